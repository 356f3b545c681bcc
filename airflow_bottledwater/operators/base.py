"""What all our operators and sensors have in common: connections, settings, and how errors end a task."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from airflow.sdk.exceptions import AirflowFailException

from airflow_bottledwater.errors import BottledWaterError, JobFailed
from airflow_bottledwater.hooks.pipeline import PipelineHook

#: set explicitly by parameters; the rest of :class:`~airflow_bottledwater.settings.Pipeline` goes through ``settings``
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


class PipelineMixin:
    """The parameters that describe a pipeline; all of them are templated.

    :param slot: name of the replication slot; it names the pipeline.
    :param tables: ``[schema.]table`` patterns, a list or comma-separated; empty means all.
    :param schemas: patterns of schemas whose tables are taken.
    :param topic_prefix: put before every topic's name.
    :param output_format: avro or json.
    :param on_error: exit or log.
    :param allow_unkeyed: publish tables without a usable key.
    :param skip_snapshot: start with the changes from now on.
    :param postgres_conn_id: connection of type Postgres: the source.
    :param kafka_conn_id: connection of type Apache Kafka.
    :param schema_registry_conn_id: connection of type Schema Registry; unused with JSON.
    :param settings: any other setting (docs/settings.md).
    """

    def _set_pipeline(
        self,
        *,
        slot: str = "bottledwater",
        tables: Sequence[str] | str | None = None,
        schemas: Sequence[str] | str | None = None,
        topic_prefix: str | None = None,
        output_format: str = "avro",
        on_error: str = "exit",
        allow_unkeyed: bool | str = False,
        skip_snapshot: bool | str = False,
        postgres_conn_id: str = "postgres_default",
        kafka_conn_id: str = "kafka_default",
        schema_registry_conn_id: str | None = "schema_registry_default",
        settings: Mapping[str, Any] | None = None,
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
        """All settings as JSON values, without connections: also for a trigger's kwargs."""
        chosen = {
            "slot": str(self.slot),
            "tables": _listed(self.tables),
            "schemas": _listed(self.schemas),
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
        """The pipeline's hook; made after templating."""
        return PipelineHook(
            self.postgres_conn_id, self.kafka_conn_id, self.schema_registry_conn_id, self.pipeline_settings()
        )

    def job_owner(self, context: Any, slot: str) -> dict[str, str]:
        """For which run a job works, told in its folder: so that another task of the run finds what is left of it."""
        ti: Any = context["ti"]
        return {
            "dag_id": ti.dag_id,
            "run_id": ti.run_id,
            "slot": slot,
            "postgres_conn_id": self.postgres_conn_id,
        }

    def trigger_arguments(self) -> dict[str, Any]:
        """What a trigger needs to make the same hook: ids and settings, never a secret."""
        return {
            "postgres_conn_id": self.postgres_conn_id,
            "kafka_conn_id": self.kafka_conn_id,
            "schema_registry_conn_id": self.schema_registry_conn_id,
            "settings": self.pipeline_settings(),
        }


def take_pipeline_arguments(kwargs: dict[str, Any]) -> dict[str, Any]:
    """The arguments of :class:`PipelineMixin` out of an operator's."""
    return {name: kwargs.pop(name) for name in PIPELINE_FIELDS if name in kwargs}


def _listed(value: Sequence[str] | str | None) -> list[str]:
    if value is None:
        return []
    parts = value.split(",") if isinstance(value, str) else value
    return [str(part).strip() for part in parts if str(part).strip()]


@contextlib.contextmanager
def failing() -> Iterator[None]:
    """Our errors as Airflow's: what a retry cannot mend fails the task at once."""
    try:
        yield
    except BottledWaterError as error:
        # here and not above: it brings the publisher and numba, which a DAG processor does without
        from airflow_bottledwater.policy import transient

        if transient(error):
            raise
        raise AirflowFailException(str(error)) from error


def known_event(event: dict[str, Any] | None) -> dict[str, Any]:
    """A sensor's verdict from its trigger.

    :raises JobFailed: it is none; a sensor that succeeded on it would let the DAG go on.
    """
    if event is None or event.get("status") not in ("ok", "failed"):
        raise JobFailed(f"The trigger sent an event that is not known: {event!r}.")
    return event
