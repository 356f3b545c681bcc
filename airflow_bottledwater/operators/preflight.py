"""Check everything before anything is changed."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from airflow.sdk import BaseOperator

from airflow_bottledwater.errors import PreflightError, Refused
from airflow_bottledwater.hooks import spark_job
from airflow_bottledwater.operators.base import PIPELINE_FIELDS, PipelineMixin, failing, take_pipeline_arguments

if TYPE_CHECKING:
    from airflow.sdk import Context


class ReplicationPreflightOperator(PipelineMixin, BaseOperator):
    """Check source, broker, schema registry and Spark; change nothing, and name every problem at once.

    :param spark_conn_id: connection of type Spark that snapshot and stream are going to use. None: not looked at. (templated)
    :param stream_executor: the stream task's own executor, if it has one.

    Takes the parameters of :class:`~airflow_bottledwater.operators.base.PipelineMixin`.
    """

    template_fields: Sequence[str] = (*PIPELINE_FIELDS, "spark_conn_id")
    ui_color = "#e8f4fd"

    def __init__(self, *, spark_conn_id: str | None = None, stream_executor: str | None = None, **kwargs: Any) -> None:
        pipeline = take_pipeline_arguments(kwargs)
        super().__init__(**kwargs)
        self._set_pipeline(**pipeline)
        self.spark_conn_id = spark_conn_id
        self.stream_executor = stream_executor

    def execute(self, context: Context) -> dict[str, Any]:
        """Run the checks; returns the tables and the warnings."""
        from airflow_bottledwater.provision import preflight

        with failing():
            pipeline = self.pipeline_hook.pipeline()
            problems = self._spark_problems()
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

    def _spark_problems(self) -> list[str]:
        """Why the stream's job could not run; said now, and not when slot and snapshot are made."""
        if not self.spark_conn_id:
            return []
        try:
            spark_job.refuse_stream(self.spark_conn_id, executor=self.stream_executor)
            if self.executor == self.stream_executor:  # else this is not the host that submits it
                spark_job.refuse_missing_binary(self.spark_conn_id)
        except Refused as error:
            return [str(error)]
        return []
