"""The operator that checks everything before anything is changed."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, ClassVar

from airflow.sdk import BaseOperator

from airflow_bottledwater.errors import PreflightError, Refused
from airflow_bottledwater.hooks import places, spark_job
from airflow_bottledwater.operators.base import PIPELINE_FIELDS, PIPELINE_RENDERERS, PipelineMixin, failing, jobs_of

if TYPE_CHECKING:
    from airflow.sdk import Context

    from airflow_bottledwater.settings import Pipeline


class ReplicationPreflightOperator(PipelineMixin, BaseOperator):
    """Check source, broker, schema registry and Spark; change nothing, and name every problem at once.

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
    :param spark_conn_id: connection of type Spark that snapshot and stream are going to use; None: it is not checked. (templated)
    :param snapshot: arguments of the snapshot's operator that say where its job runs: ``executor``, ``deploy_mode``, ``deferrable`` and
        ``settings_file``, as far as they are given. (templated)
    :param stream: the same of the stream's operator. (templated)
    """

    template_fields: Sequence[str] = (*PIPELINE_FIELDS, "spark_conn_id", "snapshot", "stream")
    template_fields_renderers: ClassVar[dict[str, str]] = dict(PIPELINE_RENDERERS)
    ui_color = "#e8f4fd"

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

    def execute(self, context: Context) -> dict[str, Any]:
        """Run the checks; returns the tables and the warnings."""
        from airflow_bottledwater.provision import preflight

        with failing():
            pipeline = self.pipeline_hook.pipeline()
            problems = self._spark_problems(pipeline)
            try:
                found = preflight.run(pipeline)
            except PreflightError as error:
                raise PreflightError([*problems, *error.problems]) from error
            if problems:
                raise PreflightError(problems)
        for table in found.tables:
            self.log.info(
                "%s: %d columns, key (%s)", table.qualified, len(table.columns), ", ".join(table.key) or "none"
            )
        return {"tables": [t.qualified for t in found.tables], "warnings": found.warnings}

    def _spark_problems(self, pipeline: Pipeline) -> list[str]:
        """Why snapshot or stream could not run; reported before anything is created."""
        if not self.spark_conn_id:
            return []
        tasks = jobs_of(self, pipeline)
        found = places.problems(self.spark_conn_id, tasks)
        # a task with another executor may be on another host
        if not found and any(self.executor == task.get("executor") for task in tasks.values()):
            try:
                spark_job.refuse_missing_programs(self.spark_conn_id)
            except Refused as error:
                found.append(str(error))
        return found
