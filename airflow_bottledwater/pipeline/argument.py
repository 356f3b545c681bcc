"""A pipeline as operators, sensors and triggers take it."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from airflow_bottledwater.errors import SettingError
from airflow_bottledwater.pipeline.description import Description
from airflow_bottledwater.pipeline.file import SUFFIXES, load
from airflow_bottledwater.pipeline.section import templated

#: the object, the path of its file, its nested values, or its name
PipelineArgument = Description | Mapping[str, Any] | str | os.PathLike[str]


def as_values(pipeline: PipelineArgument) -> dict[str, Any] | str:
    """A pipeline as nested JSON values without secrets, which Airflow renders and shows; or its name, as it is.

    :raises SettingError: it is not a valid description, or its file is not; or nested values have secrets, which
        Airflow keeps wherever it is given them (with a DAG's ``default_args``, say).
    """
    if isinstance(pipeline, os.PathLike) or (
        isinstance(pipeline, str) and pipeline.endswith(SUFFIXES) and not templated(pipeline)
    ):
        return load(Path(pipeline), Description).as_dict()
    if isinstance(pipeline, str):
        return pipeline
    if isinstance(pipeline, Description):
        return pipeline.as_dict()
    made = Description.of(pipeline)
    if secrets := made.secrets():
        raise SettingError(
            secrets[0],
            None,
            "Airflow's connections (conn_id, registry); or the path of the file, or a Pipeline, instead of its values",
            "may hold a secret, and Airflow would keep and show the values",
        )
    return made.as_dict()


def summary(values: dict[str, Any] | str) -> dict[str, Any] | str:
    """Only what tells which pipeline it is: its name and its connections. Airflow cuts what it keeps of a templated
    field (``[core] max_templated_field_length``), which a description of a hundred tables exceeds; this stays whole.

    :param values: see :func:`as_values`.
    """
    if isinstance(values, str):
        return values
    kept = {"source": ("conn_id",), "kafka": ("conn_id", "registry"), "spark": ("conn_id",)}
    parts = {
        part: {name: values[part][name] for name in names if name in values[part]}
        for part, names in kept.items()
        if part in values
    }
    return {**({"name": values["name"]} if "name" in values else {}), **parts}


def described(pipeline: PipelineArgument) -> Description:
    """The description. Of a pipeline of which only the name is given, the settings are those of its saved state.

    :raises SettingError: a value is not allowed.
    """
    values = as_values(pipeline)
    return Description(values, saved=True) if isinstance(values, str) else Description.of(values)
