"""The operator that takes the consistent snapshot, as a Spark job."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from airflow_bottledwater.errors import JobFailed
from airflow_bottledwater.model.outcome import Outcome
from airflow_bottledwater.operators.assets import AssetEvents
from airflow_bottledwater.operators.base import asked_at, failing
from airflow_bottledwater.operators.spark import BottledWaterSparkOperator
from airflow_bottledwater.pipeline.argument import PipelineArgument
from airflow_bottledwater.pipeline.settings import Settings

if TYPE_CHECKING:
    from airflow.sdk import Context

#: what the task returns if there is nothing left to do
_COMPLETE = {"complete": True}


class SnapshotToKafkaOperator(BottledWaterSparkOperator):
    """Publish every row of the tables as of one moment, in parallel; a retry resumes where an earlier try stopped. At
    its end, the assets of the topics get events.

    :param pipeline: the :class:`~airflow_bottledwater.Pipeline`, its name or the path of its file. (templated)
    :param name: the job's name in Spark; None: ``bottledwater-snapshot``. (templated)
    :param deferrable: whether the task is deferred while its job runs; None: in deploy-mode cluster only, since a job
        in client mode keeps the worker busy anyway.
    :param poll_interval: seconds between two checks of the job.
    :param start_timeout: seconds in which the job has to report for the first time; on a cluster, it may wait in a
        queue.

    Takes the other parameters of ``SparkSubmitOperator``, too (executors, memory, conf).
    """

    job_name = "snapshot"
    ui_color = "#fff3cd"

    def __init__(self, *, pipeline: PipelineArgument, **kwargs: Any) -> None:
        super().__init__(pipeline=pipeline, **kwargs)
        self._has_assets()

    def execute(self, context: Context) -> dict[str, Any]:
        """Run the job to its end; returns rows, ranges and seconds."""
        asked_at(context)
        with failing():
            self._pipeline = pipeline = self.pipeline_hook.pipeline()
            if pipeline.skip_snapshot:
                self.log.info("The snapshot is skipped, as set.")
                return {"skipped": True}
            with self.noting(context, pipeline):
                place = self._place()
                found = self._earlier(context, pipeline)
                if not isinstance(found, dict):
                    if self._is_complete(pipeline):
                        if found is None and self._is_untold(context):
                            self._tell(context, pipeline)  # an earlier try, or life of the task, could not
                        return _COMPLETE if found is None else self._finish(found.outcome)
                    found = self._submit(context, pipeline, place)
        return self._follow(context, pipeline, place, found)

    def _tell(self, context: Context, pipeline: Settings) -> None:
        """Give the topics' assets their events."""
        self.published = AssetEvents(context, self.outlets, pipeline).snapshot()
        self.keep_lineage()

    def _finish(self, outcome: Outcome) -> dict[str, Any]:
        """Turn an ended job's outcome into that of the task.

        :raises JobFailed: the job failed for a transient reason.
        :raises AirflowFailException: it failed for good, or was stopped.
        """
        with failing():
            if outcome.stopped:
                raise JobFailed("The snapshot was stopped before its end.", "Clear the task: it resumes the snapshot.")
        return super()._finish(outcome)

    def _is_complete(self, pipeline: Settings) -> bool:
        from airflow_bottledwater.jobs.status import snapshot_is_complete

        complete = snapshot_is_complete(pipeline)
        if complete:
            self.log.info("The snapshot is complete already; no job is started.")
        return complete
