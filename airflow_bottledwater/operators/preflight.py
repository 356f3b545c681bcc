"""The operator that checks everything before anything is changed."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, ClassVar

from airflow.sdk import BaseOperator

from airflow_bottledwater.errors import BottledWaterError, Outage, PreflightError, Refused
from airflow_bottledwater.hooks import spark_job, spark_target
from airflow_bottledwater.operators.base import (
    PIPELINE_FIELDS,
    PIPELINE_RENDERERS,
    PipelineMixin,
    failing,
    jobs_of,
)
from airflow_bottledwater.pipeline.argument import PipelineArgument

if TYPE_CHECKING:
    from airflow.sdk import Context

    from airflow_bottledwater.pipeline.settings import Settings


class ReplicationPreflightOperator(PipelineMixin, BaseOperator):
    """Check source, broker, schema registry and Spark; change nothing, and name every problem at once.

    :param pipeline: the :class:`~airflow_bottledwater.Pipeline`, its name or the path of its file. (templated)
    :param snapshot: arguments of the snapshot's operator that say where its job runs: ``executor`` and ``deferrable``,
        as far as they are given. If neither these nor the stream's are given, it is not checked whether Spark can run
        the jobs. (templated)
    :param stream: the same of the stream's operator. (templated)
    """

    template_fields: Sequence[str] = (*PIPELINE_FIELDS, "snapshot", "stream")
    template_fields_renderers: ClassVar[dict[str, str]] = dict(PIPELINE_RENDERERS)
    ui_color = "#e8f4fd"

    def __init__(
        self,
        *,
        pipeline: PipelineArgument,
        snapshot: Mapping[str, Any] | None = None,
        stream: Mapping[str, Any] | None = None,
        **kwargs: Any,
    ) -> None:
        super().__init__(**kwargs)
        self._set_pipeline(pipeline)
        self.snapshot, self.stream = snapshot, stream

    def execute(self, context: Context) -> dict[str, Any]:
        """Run the checks; returns the tables and the warnings."""
        from airflow_bottledwater.provision import preflight

        with failing():
            pipeline = self.pipeline_hook.pipeline()
            away: BottledWaterError | None = None
            try:
                problems = self._spark_problems(pipeline)
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
        for table in found.tables:
            self.log.info(
                "%s: %d columns, key (%s)", table.qualified, len(table.columns), ", ".join(table.key) or "none"
            )
        return {"tables": [t.qualified for t in found.tables], "warnings": found.warnings, "notes": found.notes}

    def _spark_problems(self, pipeline: Settings) -> list[str]:
        """Why snapshot or stream could not run; reported before anything is created."""
        if self.snapshot is None and self.stream is None:
            return []
        tasks, conn_id = jobs_of(self, pipeline), self.described().spark.conn_id
        found = spark_target.problems(conn_id, tasks)
        # a task with another executor may be on another host
        if not found and any(self.executor == task.get("executor") for task in tasks.values()):
            try:
                spark_job.refuse_missing_programs(conn_id)
            except Refused as error:
                found.append(str(error))
        return found
