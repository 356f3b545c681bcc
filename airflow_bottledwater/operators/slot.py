"""The operators that create and drop the replication slot, with its publications."""

from __future__ import annotations

import threading
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, ClassVar

from airflow.sdk import BaseOperator

from airflow_bottledwater.errors import Outage, PreflightError, StopRequested
from airflow_bottledwater.hooks import job_stop, job_watch, places, tasks
from airflow_bottledwater.operators.base import PIPELINE_FIELDS, PIPELINE_RENDERERS, PipelineMixin, failing, jobs_of

if TYPE_CHECKING:
    from airflow.sdk import Context

    from airflow_bottledwater.settings import Pipeline


class CreateReplicationSlotOperator(PipelineMixin, BaseOperator):
    """Create publications, slot, topics and schemas, and record them. Idempotent: meant as a setup task.

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
    :param spark_conn_id: connection of type Spark that snapshot and stream are going to use: if one of them cannot run with it, nothing
        is created. None: it is not checked. (templated)
    :param snapshot: arguments of the snapshot's operator that say where its job runs: ``executor``, ``deploy_mode``, ``deferrable`` and
        ``settings_file``, as far as they are given. (templated)
    :param stream: the same of the stream's operator. (templated)
    """

    template_fields: Sequence[str] = (*PIPELINE_FIELDS, "spark_conn_id", "snapshot", "stream")
    template_fields_renderers: ClassVar[dict[str, str]] = dict(PIPELINE_RENDERERS)
    ui_color = "#d4edda"

    def __init__(
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
        spark_conn_id: str | None = None,
        snapshot: Mapping[str, Any] | None = None,
        stream: Mapping[str, Any] | None = None,
        **kwargs: Any,
    ) -> None:
        super().__init__(**kwargs)
        self._set_pipeline(
            slot=slot,
            tables=tables,
            schemas=schemas,
            topic_prefix=topic_prefix,
            output_format=output_format,
            on_error=on_error,
            allow_unkeyed=allow_unkeyed,
            skip_snapshot=skip_snapshot,
            postgres_conn_id=postgres_conn_id,
            kafka_conn_id=kafka_conn_id,
            schema_registry_conn_id=schema_registry_conn_id,
            settings=settings,
        )
        self.spark_conn_id = spark_conn_id
        self.snapshot, self.stream = snapshot, stream
        self._stopped: threading.Event | None = None

    def execute(self, context: Context) -> dict[str, Any]:
        """Create what is missing; returns slot and consistent point."""
        from airflow_bottledwater.model.lsn import format_lsn
        from airflow_bottledwater.provision.create import create

        # made here and not in __init__: operators are copied, which an event cannot be
        self._stopped = threading.Event()
        with failing():
            pipeline = self.pipeline_hook.pipeline()
            if self.spark_conn_id:
                problems = places.problems(self.spark_conn_id, jobs_of(self, pipeline))
                if problems:
                    raise PreflightError(problems)
            try:
                record = create(pipeline, stopped=self._stopped)
            except StopRequested as error:
                raise Outage("The task was ended before the slot was made.", "A retry goes on where it was.") from error
        return {"slot": record.name, "consistent_point": format_lsn(record.consistent_point)}

    def on_kill(self) -> None:
        """Stop the creation; the next try continues it."""
        if self._stopped is not None:
            self._stopped.set()


class DropReplicationSlotOperator(PipelineMixin, BaseOperator):
    """Drop slot and publications; meant as the teardown of the slot's setup task.

    The slot holds the changes that are not yet published, so by default it is dropped only if the stream was stopped for good.
    A job that this DAG run has left behind, on any host, is stopped first, which happens if its task was marked while no triggerer ran.

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
    :param when: ``retired`` (default), ``always`` or ``never``. (templated)
    """

    template_fields: Sequence[str] = (*PIPELINE_FIELDS, "when")
    template_fields_renderers: ClassVar[dict[str, str]] = dict(PIPELINE_RENDERERS)
    ui_color = "#f8d7da"

    def __init__(
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
        when: str = "retired",
        **kwargs: Any,
    ) -> None:
        super().__init__(**kwargs)
        self._set_pipeline(
            slot=slot,
            tables=tables,
            schemas=schemas,
            topic_prefix=topic_prefix,
            output_format=output_format,
            on_error=on_error,
            allow_unkeyed=allow_unkeyed,
            skip_snapshot=skip_snapshot,
            postgres_conn_id=postgres_conn_id,
            kafka_conn_id=kafka_conn_id,
            schema_registry_conn_id=schema_registry_conn_id,
            settings=settings,
        )
        self.when = when

    def execute(self, context: Context) -> str:
        """Drop or keep the slot; returns a sentence that says what was done."""
        from airflow_bottledwater.errors import SettingError
        from airflow_bottledwater.provision.drop import drop

        with failing():
            if self.when not in ("retired", "always", "never"):
                raise SettingError("when", self.when, "retired, always or never")
            pipeline = self.pipeline_hook.pipeline()
            self._stop_jobs(context, pipeline)
            done = drop(pipeline, when=self.when)
        self.log.info("%s", done)
        return done

    def _stop_jobs(self, context: Context, pipeline: Pipeline) -> None:
        from airflow_bottledwater.provision import live

        ti: Any = context["ti"]
        for owner, identity in job_watch.unfinished(pipeline, live.name_of(pipeline)):
            if (owner.dag_id, owner.run_id) != (ti.dag_id, ti.run_id):
                continue
            if tasks.known_fate(owner.dag_id, owner.run_id, owner.task_id, owner.map_index) is not tasks.Fate.ENDED:
                continue  # such as a verification beside the stream
            self.log.warning(
                "A job of this run is still there, although its task has ended; it is stopped: %s", identity
            )
            job_stop.stop_and_forget(pipeline, identity)
