"""Pipelines of tests as operators take them."""

from __future__ import annotations

from typing import Any

from airflow_bottledwater.pipeline.description import Description, Spark
from airflow_bottledwater.pipeline.settings import Settings


def described(pipeline: Settings, spark: Spark | None = None, **more: Any) -> Description:
    """The description of a pipeline; the connections are those of Airflow with the usual ids.

    :param more: other settings.
    """
    given = {**pipeline.chosen(), **more}
    given = {{"slot": "name", "format": "format"}.get(name, name): value for name, value in given.items()}
    values: dict[str, Any] = {name: given[name] for name in Description.described() if name in given}
    for section, kind in Description.parts().items():
        if inside := {name: given[name] for name in kind.described() if name in given}:
            values[section] = inside
    return Description.of({**values, **({"spark": spark} if spark else {})})
