"""The operator that takes the consistent snapshot, as a Spark job."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, ClassVar

from airflow.providers.apache.spark.operators.spark_submit import SparkSubmitOperator
from airflow.sdk.exceptions import AirflowFailException

from airflow_bottledwater.errors import JobFailed
from airflow_bottledwater.hooks import spark_job
from airflow_bottledwater.hooks.spark_job import Identity, SparkJobHook
from airflow_bottledwater.operators.base import (
    PIPELINE_FIELDS,
    PIPELINE_RENDERERS,
    PipelineMixin,
    failing,
    is_first_try,
)
from airflow_bottledwater.settings import Pipeline
from airflow_bottledwater.spark import submit

if TYPE_CHECKING:
    from pathlib import Path

    from airflow.providers.apache.spark.hooks.spark_submit import SparkSubmitHook
    from airflow.sdk import Context

    from airflow_bottledwater.spark.run_directory import Outcome

_STATE_KEY = "bottledwater_job"
#: what the task returns if there is nothing left to do
_COMPLETE = {"complete": True}


class BottledWaterSparkOperator(PipelineMixin, SparkSubmitOperator):
    """Runs a job through spark-submit: what the operators of snapshot and stream have in common.

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
    :param conn_id: connection of type Spark; one that does not exist is an error. (templated)
    :param deploy_mode: ``client`` or ``cluster``; None: the connection's.
    :param name: the job's name in Spark; None: ``bottledwater-snapshot`` or ``bottledwater-stream``. (templated)

    Takes the other parameters of ``SparkSubmitOperator``, too (executors, memory, conf).
    """

    job_name: str
    conf: dict[Any, Any] | None
    files: str | None
    template_fields: Sequence[str] = (*SparkSubmitOperator.template_fields, *PIPELINE_FIELDS, "conn_id")
    template_fields_renderers: ClassVar[dict[str, str]] = {
        **SparkSubmitOperator.template_fields_renderers,
        **PIPELINE_RENDERERS,
        "conf": "json",
        "env_vars": "json",
    }

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
        conn_id: str = "spark_default",
        deploy_mode: str | None = None,
        name: str | None = None,
        **kwargs: Any,
    ) -> None:
        super().__init__(
            conn_id=conn_id, deploy_mode=deploy_mode, name=name or f"bottledwater-{self.job_name}", **kwargs
        )
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
        self.conn_id = conn_id
        self.deploy_mode = deploy_mode
        self._identity: Identity | None = None
        self._in_cluster_mode = False

    def _get_hook(self) -> SparkSubmitHook:
        """The provider's hook, with the templated connection id, which the provider's own operator does not template."""
        self._conn_id = self.conn_id
        return super()._get_hook()

    def _submit(
        self, context: Context, pipeline: Pipeline, keep: Callable[[Identity], None], *, bounded: bool = False
    ) -> Identity:
        """Start the job as a supervised family of processes (client mode).

        :param keep: stores the job's identity before it starts, so that no job can run that nobody knows of.
        """
        identity, settings = SparkJobHook.prepare(pipeline, self.job_name, self.job_owner(context, pipeline.slot))
        try:
            self._describe(settings, bounded)
            hook = self._get_hook()
        except BaseException:
            spark_job.forget(identity)  # removes the settings file, too
            raise
        self._identity = identity
        keep(identity)
        SparkJobHook(hook).start(identity, self.application)
        return identity

    def _describe(self, settings: Path, bounded: bool) -> None:
        master = spark_job.connection_of(self.conn_id).host or ""
        self.application = str(submit.job_file(self.job_name))
        self.application_args = submit.arguments(settings, bounded=bounded)
        self.conf = submit.conf_for(master, self.conf)
        if not submit.is_local(master):
            self.files = ",".join(filter(None, [self.files, str(settings)]))

    @property
    def _client_mode(self) -> bool:
        mode = self.deploy_mode or spark_job.deploy_mode(spark_job.connection_of(self.conn_id))
        return str(mode) == "client"

    def _finish(self, outcome: Outcome) -> dict[str, Any]:
        """Turn an ended job's outcome into that of the task.

        :raises JobFailed: the job failed for a transient reason.
        :raises AirflowFailException: it failed for good, so that a retry does not help.
        """
        if not outcome.ok:
            message = f"The {self.job_name} job failed: {outcome.error}"
            raise (JobFailed(message) if outcome.transient else AirflowFailException(message))
        return outcome.result

    def _earlier(self, known: Identity | None, context: Context, stop: Callable[[Identity], None]) -> Identity | None:
        """The job of an earlier try, to attach to. If the task was cleared since, that job is stopped instead, and the result is None.

        :param known: the stored identity of the last job.
        :param stop: ends a job, or raises.
        """
        if known is None:
            return None
        if not spark_job.is_here(known):
            self.log.warning(
                "The job of an earlier try was started on host %s, and this is another: whether it still runs cannot be seen. A new "
                "job takes the slot over; the old one then publishes nothing more and ends.",
                known["host"],
            )
            return None
        if is_first_try(context["ti"], self.retries):
            self.log.info("The job of the task's earlier life is stopped first.")
            stop(known)
            spark_job.forget(known)
            return None
        return known

    def on_kill(self) -> None:
        """End the job in order, and kill it if it does not end."""
        if self._identity is not None:
            if spark_job.stop(self._identity):
                spark_job.forget(self._identity)
        elif self._in_cluster_mode:
            super().on_kill()


class SnapshotToKafkaOperator(BottledWaterSparkOperator):
    """Publish every row of the tables as of one moment, in parallel; a retry resumes where an earlier try stopped.

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
    :param conn_id: connection of type Spark; one that does not exist is an error. (templated)
    :param deploy_mode: ``client`` or ``cluster``; None: the connection's.
    :param name: the job's name in Spark; None: ``bottledwater-snapshot``. (templated)

    Takes the other parameters of ``SparkSubmitOperator``, too (executors, memory, conf).
    """

    job_name = "snapshot"
    ui_color = "#fff3cd"

    def execute(self, context: Context) -> dict[str, Any]:
        """Run the job to its end; returns rows, ranges and seconds."""
        with failing():
            pipeline = self.pipeline_hook.pipeline()
            if pipeline.skip_snapshot:
                self.log.info("The snapshot is skipped, as set.")
                return {"skipped": True}
            if not self._client_mode:
                return self._in_cluster(context, pipeline)
            store: Any = context["task_state_store"]
            known = self._earlier(store.get(_STATE_KEY), context, _stop)
            if known and spark_job.running(known):
                self.log.info("The job of an earlier try still runs; it is followed.")
                self._identity = known
            else:
                if known:
                    spark_job.forget(known)
                if self._is_complete(pipeline):
                    return _COMPLETE
                self._identity = self._submit(context, pipeline, lambda identity: store.set(_STATE_KEY, identity))
            outcome = spark_job.wait(self._identity, self._write)
            spark_job.forget(self._identity)
            if outcome.stopped:
                raise JobFailed("The snapshot was stopped before its end.", "Clear the task: it resumes the snapshot.")
        return self._finish(outcome)

    def _is_complete(self, pipeline: Pipeline) -> bool:
        from airflow_bottledwater.state.status import snapshot_is_complete

        complete = snapshot_is_complete(pipeline)
        if complete:
            self.log.info("The snapshot is complete already; no job is started.")
        return complete

    def _write(self, level: int, line: str) -> None:
        self.log.log(level, "%s", line)

    def _in_cluster(self, context: Context, pipeline: Pipeline) -> dict[str, Any]:
        if self._is_complete(pipeline):
            return _COMPLETE
        identity, settings = SparkJobHook.prepare(pipeline, self.job_name, self.job_owner(context, pipeline.slot))
        try:
            self._describe(settings, bounded=False)
            self._in_cluster_mode = True
            super().execute(context)
        finally:
            spark_job.forget(identity)
        return {}


def _stop(identity: Identity) -> None:
    if not spark_job.stop(identity):
        raise JobFailed(
            f"The earlier snapshot job in {identity['folder']} does not end.", "End its processes, then clear the task."
        )
