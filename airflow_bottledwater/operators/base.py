"""What the operators and sensors have in common: connections, settings, and how errors end a task."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from airflow.sdk.exceptions import AirflowFailException

from airflow_bottledwater.errors import BottledWaterError, JobFailed, SettingError
from airflow_bottledwater.hooks.pipeline import PipelineHook
from airflow_bottledwater.policy import transient
from airflow_bottledwater.settings import Pipeline

#: the operators' own parameters; all other settings of :class:`~airflow_bottledwater.settings.Pipeline` are given in ``settings``
PIPELINE_FIELDS: Sequence[str] = (
    "postgres_conn_id",
    "kafka_conn_id",
    "schema_registry_conn_id",
    "slot",
    "tables",
    "schemas",
    "topic_prefix",
    "output_format",
    "on_error",
    "allow_unkeyed",
    "skip_snapshot",
    "settings",
)

#: how Airflow's UI renders them
PIPELINE_RENDERERS: Mapping[str, str] = {"settings": "json"}


class PipelineMixin:
    """The parameters that describe a pipeline. Each operator lists them itself, so that ``default_args``, mapped tasks and editors see
    them; all of them are templated.

    :param slot: name of the replication slot; it names the pipeline. (templated)
    :param tables: ``[schema.]table`` patterns, a list or comma-separated; empty means all. (templated)
    :param schemas: patterns of schemas whose tables are taken. (templated)
    :param topic_prefix: put before every topic's name. (templated)
    :param output_format: ``avro`` or ``json``. (templated)
    :param on_error: ``exit`` or ``log``: what is done about a record that cannot be published. (templated)
    :param allow_unkeyed: publish tables without a usable key. (templated)
    :param skip_snapshot: start with the changes from now on. (templated)
    :param postgres_conn_id: connection of type Postgres: the source. (templated)
    :param kafka_conn_id: connection of type Apache Kafka. (templated)
    :param schema_registry_conn_id: connection of type Schema Registry; unused with JSON. (templated)
    :param settings: any other setting (docs/settings.md). (templated)
    """

    def _set_pipeline(
        self,
        *,
        slot: str,
        tables: Sequence[str] | str | None,
        schemas: Sequence[str] | str | None,
        topic_prefix: str | None,
        output_format: str,
        on_error: str,
        allow_unkeyed: bool | str,
        skip_snapshot: bool | str,
        postgres_conn_id: str,
        kafka_conn_id: str,
        schema_registry_conn_id: str | None,
        settings: Mapping[str, Any] | None,
    ) -> None:
        self.slot = slot
        self.tables = tables
        self.schemas = schemas
        self.topic_prefix = topic_prefix
        self.output_format = output_format
        self.on_error = on_error
        self.allow_unkeyed = allow_unkeyed
        self.skip_snapshot = skip_snapshot
        self.postgres_conn_id = postgres_conn_id
        self.kafka_conn_id = kafka_conn_id
        self.schema_registry_conn_id = schema_registry_conn_id
        self.settings = settings

    def pipeline_settings(self) -> dict[str, Any]:
        """All settings as JSON values, without the connections; also used for a trigger's arguments."""
        chosen = {
            "slot": str(self.slot),
            "tables": listed(self.tables),
            "schemas": listed(self.schemas),
            # a native template makes a number of "2024"
            "topic_prefix": None if self.topic_prefix is None else str(self.topic_prefix),
            "output_format": self.output_format,
            "on_error": self.on_error,
            "allow_unkeyed": self.allow_unkeyed,
            "skip_snapshot": self.skip_snapshot,
        }
        return {**{k: v for k, v in chosen.items() if v not in (None, "")}, **(self.settings or {})}

    @property
    def pipeline_hook(self) -> PipelineHook:
        """The pipeline's hook, to be used after templating."""
        return PipelineHook(
            self.postgres_conn_id, self.kafka_conn_id, self.schema_registry_conn_id, self.pipeline_settings()
        )

    def trigger_arguments(self) -> dict[str, Any]:
        """The arguments with which a trigger makes the same hook: connection ids and settings, no secrets."""
        return {
            "postgres_conn_id": self.postgres_conn_id,
            "kafka_conn_id": self.kafka_conn_id,
            "schema_registry_conn_id": self.schema_registry_conn_id,
            "settings": self.pipeline_settings(),
        }


def jobs_of(operator: Any, pipeline: Pipeline) -> dict[str, Mapping[str, Any]]:
    """What an operator that runs before snapshot and stream knows of them; see :func:`airflow_bottledwater.hooks.places.problems`."""
    tasks = {"snapshot": operator.snapshot or {}, "stream": operator.stream or {}}
    return {name: task for name, task in tasks.items() if name != "snapshot" or not pipeline.skip_snapshot}


def is_first_try(ti: Any, retries: int) -> bool:
    """Whether this try is not a retry: the task runs for the first time, or for the first time since it was cleared.

    Airflow does not report this, and the task's state survives a clear. It follows from the counts: at first, a task has ``max_tries =
    retries``, and clearing it sets ``max_tries = try_number + retries`` (``clear_task_instances`` in airflow/models/taskinstance.py);
    the first try after that has the next number.

    :param ti: the running task instance.
    :param retries: the operator's retries.
    """
    return bool(ti.try_number == ti.max_tries - retries + 1)


def listed(value: Sequence[str] | str | None) -> list[str]:
    """A list, or its comma-separated text, without what is empty."""
    if value is None:
        return []
    parts = value.split(",") if isinstance(value, str) else value
    return [str(part).strip() for part in parts if str(part).strip()]


def number(name: str, value: float | str | None) -> float | None:
    """A numeric parameter, which may be text if it comes from a template; None if it is not set.

    :raises SettingError: it is not a finite number.
    """
    if value is None or (isinstance(value, str) and value.strip() in ("", "None")):
        return None
    try:
        found = float(value)
    except (TypeError, ValueError):
        found = math.nan
    if not math.isfinite(found):
        raise SettingError(name, value, "a number, or nothing")
    return found


@contextlib.contextmanager
def failing() -> Iterator[None]:
    """Within this block, errors after which a retry cannot help fail the task at once; transient errors are raised unchanged.

    :raises AirflowFailException: instead of an error that is not transient.
    """
    try:
        yield
    except BottledWaterError as error:
        if transient(error):
            raise
        raise AirflowFailException(str(error)) from error


def known_event(event: dict[str, Any] | None, *others: str) -> dict[str, Any]:
    """The event of a sensor's trigger, checked.

    :param others: statuses that it may have besides ``ok`` and ``failed``.
    :raises JobFailed: the event is not known; the sensor must not succeed with it.
    """
    if event is None or event.get("status") not in ("ok", "failed", *others):
        raise JobFailed(f"The trigger sent an event that is not known: {event!r}.")
    return event
