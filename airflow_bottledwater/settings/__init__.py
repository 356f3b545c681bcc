"""The settings of a pipeline, described once for DAG params, the command line and the Spark jobs.

The settings are in :mod:`~airflow_bottledwater.settings.groups`, each with its type, its rule, its sentence and its
default.
:mod:`~airflow_bottledwater.settings.rules` checks the rules, :mod:`~airflow_bottledwater.settings.pipeline` the whole
description, and :mod:`~airflow_bottledwater.settings.layers` merges them.
"""

from airflow_bottledwater.settings.groups import DEFAULT_BROKER, DEFAULT_REGISTRY, SECRET_PROPERTIES
from airflow_bottledwater.settings.layers import merge
from airflow_bottledwater.settings.pipeline import GROUPS, SETTINGS, Pipeline, Setting

__all__ = [
    "DEFAULT_BROKER",
    "DEFAULT_REGISTRY",
    "GROUPS",
    "SECRET_PROPERTIES",
    "SETTINGS",
    "Pipeline",
    "Setting",
    "merge",
]
