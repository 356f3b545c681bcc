"""What the operators have in common that run before snapshot and stream."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

from airflow.sdk import BaseOperator

from airflow_bottledwater.hooks import spark_target
from airflow_bottledwater.operators.base import PIPELINE_FIELDS, PIPELINE_RENDERERS, PipelineMixin
from airflow_bottledwater.pipeline.argument import PipelineArgument
from airflow_bottledwater.pipeline.settings import Settings


class BeforeJobsOperator(PipelineMixin, BaseOperator):
    """An operator that runs before snapshot and stream, and checks whether Spark can run them.

    :param pipeline: the :class:`~airflow_bottledwater.Pipeline`, its name or the path of its file. (templated)
    :param snapshot: arguments of the snapshot's operator that say where its job runs: ``executor`` and ``deferrable``,
        as far as they are given. If neither these nor the stream's are given, it is not checked whether Spark can run
        the jobs. (templated)
    :param stream: the same of the stream's operator. (templated)
    """

    template_fields: Sequence[str] = (*PIPELINE_FIELDS, "snapshot", "stream")
    template_fields_renderers: ClassVar[dict[str, str]] = dict(PIPELINE_RENDERERS)

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

    def jobs(self, pipeline: Settings) -> dict[str, Mapping[str, Any]]:
        """What is known of the jobs; see :func:`airflow_bottledwater.hooks.spark_target.problems`. Empty if it is
        not to be checked whether Spark can run them."""
        if self.snapshot is None and self.stream is None:
            return {}
        spark = self.described().spark
        where = {"deploy_mode": spark.deploy_mode or None, "settings_file": spark.settings_file or None}
        tasks = {"snapshot": {**where, **(self.snapshot or {})}, "stream": {**where, **(self.stream or {})}}
        return {name: task for name, task in tasks.items() if name != "snapshot" or not pipeline.skip_snapshot}

    def spark_problems(self, pipeline: Settings) -> list[str]:
        """Why snapshot or stream could not run where they are going to."""
        return spark_target.problems(self.described().spark.conn_id, self.jobs(pipeline), self.executor)
