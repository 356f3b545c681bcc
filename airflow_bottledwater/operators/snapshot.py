"""The operator that takes the consistent snapshot, as a Spark job."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from airflow_bottledwater.errors import JobFailed
from airflow_bottledwater.model.outcome import Outcome
from airflow_bottledwater.operators.base import failing
from airflow_bottledwater.operators.spark import BottledWaterSparkOperator
from airflow_bottledwater.settings import Pipeline

if TYPE_CHECKING:
    from airflow.sdk import Context

#: what the task returns if there is nothing left to do
_COMPLETE = {"complete": True}


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
    :param deferrable: whether the task is deferred while its job runs; None: in deploy-mode cluster only, since a job in client mode
        keeps the worker busy anyway.
    :param poll_interval: seconds between two checks of the job.
    :param start_timeout: seconds in which the job has to report for the first time; on a cluster, it may wait in a queue.
    :param settings_file: on Kubernetes, the path of the file with the connections in the pods. (templated)

    Takes the other parameters of ``SparkSubmitOperator``, too (executors, memory, conf).
    """

    job_name = "snapshot"
    ui_color = "#fff3cd"

    def execute(self, context: Context) -> dict[str, Any]:
        """Run the job to its end; returns rows, ranges and seconds."""
        with failing():
            self._pipeline = pipeline = self.pipeline_hook.pipeline()
            if pipeline.skip_snapshot:
                self.log.info("The snapshot is skipped, as set.")
                return {"skipped": True}
            place = self._place()
            found = self._earlier(context, pipeline)
            if not isinstance(found, dict):
                if self._is_complete(pipeline):
                    return _COMPLETE
                found = self._submit(context, pipeline, place)
        return self._follow(pipeline, place, found)

    def _finish(self, outcome: Outcome) -> dict[str, Any]:
        """Turn an ended job's outcome into that of the task.

        :raises JobFailed: the job failed for a transient reason.
        :raises AirflowFailException: it failed for good, or was stopped.
        """
        with failing():
            if outcome.stopped:
                raise JobFailed("The snapshot was stopped before its end.", "Clear the task: it resumes the snapshot.")
        return super()._finish(outcome)

    def _is_complete(self, pipeline: Pipeline) -> bool:
        from airflow_bottledwater.state.status import snapshot_is_complete

        complete = snapshot_is_complete(pipeline)
        if complete:
            self.log.info("The snapshot is complete already; no job is started.")
        return complete
