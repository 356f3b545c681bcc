"""Make and drop the replication slot with its publications."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from airflow.sdk import BaseOperator

from airflow_bottledwater.hooks import spark_job
from airflow_bottledwater.operators.base import PIPELINE_FIELDS, PipelineMixin, failing, take_pipeline_arguments

if TYPE_CHECKING:
    from airflow.sdk import Context


class CreateReplicationSlotOperator(PipelineMixin, BaseOperator):
    """Create publications, slot, topics and schemas, and record them. Idempotent: meant as a setup task.

    :param spark_conn_id: connection of type Spark that the stream is going to use: where it cannot run, nothing is made. None: not
        looked at. (templated)
    :param stream_executor: the stream task's own executor, if it has one.

    Takes the parameters of :class:`~airflow_bottledwater.operators.base.PipelineMixin`.
    """

    template_fields: Sequence[str] = (*PIPELINE_FIELDS, "spark_conn_id")
    ui_color = "#d4edda"

    def __init__(self, *, spark_conn_id: str | None = None, stream_executor: str | None = None, **kwargs: Any) -> None:
        pipeline = take_pipeline_arguments(kwargs)
        super().__init__(**kwargs)
        self._set_pipeline(**pipeline)
        self.spark_conn_id = spark_conn_id
        self.stream_executor = stream_executor
        self._stopped: threading.Event | None = None

    def execute(self, context: Context) -> dict[str, Any]:
        """Create what is missing; returns slot and consistent point."""
        from airflow_bottledwater.model.lsn import format_lsn
        from airflow_bottledwater.provision.create import create

        # made here: operators are copied, and an event cannot be
        self._stopped = threading.Event()
        with failing():
            if self.spark_conn_id:
                spark_job.refuse_stream(self.spark_conn_id, executor=self.stream_executor)
            record = create(self.pipeline_hook.pipeline(), stopped=self._stopped)
        return {"slot": record.name, "consistent_point": format_lsn(record.consistent_point)}

    def on_kill(self) -> None:
        """A slot that is being built is left to the next try, which takes it up."""
        if self._stopped is not None:
            self._stopped.set()


class DropReplicationSlotOperator(PipelineMixin, BaseOperator):
    """Drop slot and publications; meant as the teardown of the slot's setup task.

    The slot holds the changes that are not yet published, so by default it is dropped only if the stream was stopped for good.
    A job that this run has left on this host is stopped first: nobody has done so if its task was marked while no triggerer ran.

    :param when: ``retired`` (default), ``always`` or ``never``. (templated)

    Takes the parameters of :class:`~airflow_bottledwater.operators.base.PipelineMixin`, too.
    """

    template_fields: Sequence[str] = (*PIPELINE_FIELDS, "when")
    ui_color = "#f8d7da"

    def __init__(self, *, when: str = "retired", **kwargs: Any) -> None:
        pipeline = take_pipeline_arguments(kwargs)
        super().__init__(**kwargs)
        self._set_pipeline(**pipeline)
        self.when = when

    def execute(self, context: Context) -> str:
        """Drop or keep, and say which and why."""
        from airflow_bottledwater.errors import SettingError
        from airflow_bottledwater.provision.drop import drop

        with failing():
            if self.when not in ("retired", "always", "never"):
                raise SettingError("when", self.when, "retired, always or never")
            pipeline = self.pipeline_hook.pipeline()
            self._stop_jobs(context, pipeline.slot)
            done = drop(pipeline, when=self.when)
        self.log.info("%s", done)
        return done

    def _stop_jobs(self, context: Context, slot: str) -> None:
        for identity in spark_job.left_behind(self.job_owner(context, slot)):
            self.log.warning(
                "A job of this run is still there, although its task has ended; it is stopped: %s", identity
            )
            if spark_job.stop(identity):
                spark_job.forget(identity)
