"""The operator that checks everything before anything is changed."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from airflow_bottledwater.errors import BottledWaterError, Outage, PreflightError, Refused
from airflow_bottledwater.hooks import spark_job, spark_target
from airflow_bottledwater.operators.base import failing
from airflow_bottledwater.operators.before_jobs import BeforeJobsOperator

if TYPE_CHECKING:
    from airflow.sdk import Context

    from airflow_bottledwater.pipeline.settings import Settings
    from airflow_bottledwater.provision.findings import Findings


class ReplicationPreflightOperator(BeforeJobsOperator):
    """Check source, broker, schema registry and Spark; change nothing, and name every problem at once."""

    ui_color = "#e8f4fd"

    def execute(self, context: Context) -> dict[str, Any]:
        """Run the checks; returns the tables and the warnings."""
        with failing():
            pipeline = self.pipeline_hook.pipeline().with_hash_key()
            with self.noting(context, pipeline):
                found = self._check(pipeline)
        for table in found.tables:
            self.log.info(
                "%s: %d columns, key (%s)", table.qualified, len(table.columns), ", ".join(table.key) or "none"
            )
        return {"tables": [t.qualified for t in found.tables], "warnings": found.warnings, "notes": found.notes}

    def _check(self, pipeline: Settings) -> Findings:
        """
        :raises BottledWaterError: something is wrong, with all that is.
        """
        from airflow_bottledwater.provision import preflight

        away: BottledWaterError | None = None
        try:
            problems = self.spark_problems(pipeline)
        except Outage as error:
            problems, away = [], error
        try:
            found = preflight.run(pipeline)
        except PreflightError as error:
            raise PreflightError([*problems, *error.problems, *([str(away)] if away else [])]) from error
        except BottledWaterError as error:
            if problems:  # which stay when the server is back
                raise PreflightError([*problems, str(error)]) from error
            raise
        if away is not None:
            raise away
        if problems:
            raise PreflightError(problems)
        return found

    def spark_problems(self, pipeline: Settings) -> list[str]:
        """Why snapshot or stream could not run, also for want of a program; reported before anything is created."""
        found = super().spark_problems(pipeline)
        # a task with another executor may be on another host
        if not found and any(self.executor == task.get("executor") for task in self.jobs(pipeline).values()):
            spark = self.described().spark
            try:
                spark_job.refuse_missing_programs(spark_target.find(spark.conn_id, mode=spark.deploy_mode or None))
            except Refused as error:
                found.append(str(error))
        return found
