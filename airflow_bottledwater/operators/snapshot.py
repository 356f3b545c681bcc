"""The consistent snapshot, as a Spark job."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from airflow.providers.apache.spark.operators.spark_submit import SparkSubmitOperator
from airflow.sdk.exceptions import AirflowFailException

from airflow_bottledwater.errors import JobFailed
from airflow_bottledwater.hooks import spark_job
from airflow_bottledwater.hooks.spark_job import Identity, SparkJobHook
from airflow_bottledwater.operators.base import PIPELINE_FIELDS, PipelineMixin, failing, take_pipeline_arguments
from airflow_bottledwater.settings import Pipeline
from airflow_bottledwater.spark import submit

if TYPE_CHECKING:
    from pathlib import Path

    from airflow.sdk import Context

_STATE_KEY = "bottledwater_job"


class BottledWaterSparkOperator(PipelineMixin, SparkSubmitOperator):
    """A job of ours through spark-submit: what snapshot and stream have in common."""

    job_name: str
    conf: dict[Any, Any] | None
    files: str | None

    def __init__(self, **kwargs: Any) -> None:
        pipeline = take_pipeline_arguments(kwargs)
        kwargs.setdefault("name", f"bottledwater-{self.job_name}")
        super().__init__(**kwargs)
        self._set_pipeline(**pipeline)
        self._identity: Identity | None = None

    def _submit(
        self, context: Context, pipeline: Pipeline, keep: Callable[[Identity], None], *, bounded: bool = False
    ) -> Identity:
        """Start the job as a supervised family of processes (client mode).

        :param keep: stores who it is, before it starts: what dies in between leaves no job that nobody knows.
        """
        identity, settings = SparkJobHook.prepare(pipeline, self.job_name, self.job_owner(context, pipeline.slot))
        try:
            self._describe(settings, bounded)
            self._hook = self._get_hook()
        except BaseException:
            spark_job.forget(identity)  # with its settings
            raise
        self._identity = identity
        keep(identity)
        SparkJobHook(self._hook).start(identity, self.application)
        return identity

    def _describe(self, settings: Path, bounded: bool) -> None:
        master = spark_job.connection_of(self._conn_id).host or ""
        self.application = str(submit.job_file(self.job_name))
        self.application_args = submit.arguments(settings, bounded=bounded)
        self.conf = submit.conf_for(master, self.conf)
        if not submit.is_local(master):
            self.files = ",".join(filter(None, [self.files, str(settings)]))

    @property
    def _client_mode(self) -> bool:
        mode = self._deploy_mode or spark_job.deploy_mode(spark_job.connection_of(self._conn_id))
        return str(mode) == "client"

    def _finish(self, result: dict[str, Any]) -> dict[str, Any]:
        """An ended job's outcome as the task's: a permanent failure is not retried."""
        if not result["ok"]:
            message = f"The {self.job_name} job failed: {result['error']}"
            raise (JobFailed(message) if result.get("transient") else AirflowFailException(message))
        return {k: v for k, v in result.items() if k != "ok"}

    def _earlier(self, known: Identity | None, context: Context, stop: Callable[[Identity], None]) -> Identity | None:
        """The job of an earlier try, unless the task was cleared: then whatever its earlier life left is ended first.

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
        if self._is_fresh(context):
            self.log.info("The job of the task's earlier life is stopped first.")
            stop(known)
            spark_job.forget(known)
            return None
        return known

    def _is_fresh(self, context: Context) -> bool:
        """The first try of the task's life: clearing sets max_tries to try_number + retries."""
        ti: Any = context["ti"]
        return bool(ti.try_number == ti.max_tries - self.retries + 1)

    def on_kill(self) -> None:
        """End the job in order, then by force."""
        if self._identity is not None:
            if spark_job.stop(self._identity):
                spark_job.forget(self._identity)
        elif self._hook is not None:
            super().on_kill()


class SnapshotToKafkaOperator(BottledWaterSparkOperator):
    """Publish every row of the tables as of one moment, in parallel; resumes where an earlier try stopped.

    :param conn_id: connection of type Spark; one that does not exist is an error.

    Takes the parameters of :class:`~airflow_bottledwater.operators.base.PipelineMixin` and of ``SparkSubmitOperator``
    (executors, memory, conf).
    """

    job_name = "snapshot"
    template_fields: Sequence[str] = (*SparkSubmitOperator.template_fields, *PIPELINE_FIELDS)
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
                self._identity = self._submit(context, pipeline, lambda identity: store.set(_STATE_KEY, identity))
            result = spark_job.wait(self._identity, self.log.info)
            spark_job.forget(self._identity)
            if result.get("stopped"):
                raise JobFailed("The snapshot was stopped before its end.", "Clear the task: it resumes the snapshot.")
        return self._finish(result)

    def _in_cluster(self, context: Context, pipeline: Pipeline) -> dict[str, Any]:
        identity, settings = SparkJobHook.prepare(pipeline, self.job_name, self.job_owner(context, pipeline.slot))
        try:
            self._describe(settings, bounded=False)
            super().execute(context)
        finally:
            spark_job.forget(identity)
        return {}


def _stop(identity: Identity) -> None:
    if not spark_job.stop(identity):
        raise JobFailed(
            f"The earlier snapshot job in {identity['folder']} does not end.", "End its processes, then clear the task."
        )
