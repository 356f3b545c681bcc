"""The operator that stops, retires and starts a pipeline."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, ClassVar

from airflow.sdk import BaseOperator

from airflow_bottledwater.errors import SettingError
from airflow_bottledwater.operators.base import (
    PIPELINE_FIELDS,
    PIPELINE_RENDERERS,
    PipelineArgument,
    PipelineMixin,
    failing,
    number,
)

if TYPE_CHECKING:
    from airflow.sdk import Context

    from airflow_bottledwater.pipeline.settings import Pipeline


class PipelineControlOperator(PipelineMixin, BaseOperator):
    """Stop a pipeline, wherever its job runs; or say that it is meant to run again.

    A stop that is asked for is no failure: the task that runs the job succeeds, and
    :class:`~airflow_bottledwater.operators.health.PipelineHealthOperator` does not expect the pipeline to run.

    :param pipeline: the :class:`~airflow_bottledwater.Pipeline`, its name or the path of its file. (templated)
    :param action: ``stop``: its job ends in order, the slot is kept; ``retire``: the same, and ``drop_slot`` may drop
        the slot; ``start``: the pipeline is meant to run again, which its DAG has to do. (templated)
    :param timeout: seconds in which the job may end by itself; then it is fenced, its slot is released and its
        processes are killed. (templated)
    """

    template_fields: Sequence[str] = (*PIPELINE_FIELDS, "action", "timeout")
    template_fields_renderers: ClassVar[dict[str, str]] = dict(PIPELINE_RENDERERS)
    ui_color = "#f8d7da"

    def __init__(
        self,
        *,
        pipeline: PipelineArgument,
        action: str = "stop",
        timeout: float | str = 60.0,
        **kwargs: Any,
    ) -> None:
        super().__init__(**kwargs)
        self._set_pipeline(pipeline)
        self.action = action
        self.timeout = timeout

    def execute(self, context: Context) -> None:
        """Do what is asked for; it does no harm to do it again.

        :raises AirflowFailException: no job has ever reported for the slot, or a setting is not allowed.
        :raises Outage: a server does not answer.
        """
        from airflow_bottledwater.jobs import stop

        with failing():
            if self.action not in ("stop", "retire", "start"):
                raise SettingError("action", self.action, "stop, retire or start")
            pipeline = self.pipeline_hook.pipeline()
            if self.action == "start":
                self._start(pipeline)
                return
            retire, timeout = self.action == "retire", number("timeout", self.timeout) or 0.0
            stop.stop_pipeline(pipeline, retire=retire, timeout=timeout, say=lambda line: self.log.info("%s", line))

    def _start(self, pipeline: Pipeline) -> None:
        from airflow_bottledwater.jobs import requests
        from airflow_bottledwater.postgres.connect import session
        from airflow_bottledwater.postgres.server import identify

        with session(pipeline.postgres, "Identifying the cluster") as connection:
            cluster = identify(connection)
        status = requests.want(pipeline, cluster)
        if status is not None and not status.ended:
            self.log.info("The pipeline is meant to run, and its job is %s.", status.state)
        else:
            self.log.info("The pipeline is meant to run. Its DAG starts it.")
