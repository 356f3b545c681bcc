"""The one description of a pipeline, and its settings.

:mod:`~airflow_bottledwater.pipeline.groups` has the settings, each with its type, its rule, its sentence and its
default; :mod:`~airflow_bottledwater.pipeline.rules` checks the rules, and
:mod:`~airflow_bottledwater.pipeline.settings` all of them together, as jobs have them.
:mod:`~airflow_bottledwater.pipeline.description` has the objects that users write,
:mod:`~airflow_bottledwater.pipeline.section` what checks them, and :mod:`~airflow_bottledwater.pipeline.file` the YAML
file of the same shape, with its JSON schema.
"""
