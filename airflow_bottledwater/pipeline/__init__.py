"""The one description of a pipeline: as Python objects, or as a YAML file of the same shape.

:mod:`~airflow_bottledwater.pipeline.description` has the objects, :mod:`~airflow_bottledwater.pipeline.section` what
checks them, and
:mod:`~airflow_bottledwater.pipeline.file` the YAML file with its JSON schema.
"""
