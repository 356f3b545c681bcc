"""The operators that create and drop the replication slot, with its publications."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, ClassVar

from airflow.sdk import BaseOperator

from airflow_bottledwater.errors import Outage, PreflightError, SettingError, StopRequested
from airflow_bottledwater.hooks import tasks
from airflow_bottledwater.jobs import orphans
from airflow_bottledwater.operators.base import (
    PIPELINE_FIELDS,
    PIPELINE_RENDERERS,
    PipelineMixin,
    asked_at,
    failing,
)
from airflow_bottledwater.operators.before_jobs import BeforeJobsOperator
from airflow_bottledwater.pipeline.argument import PipelineArgument

if TYPE_CHECKING:
    from airflow.sdk import Context

    from airflow_bottledwater.model.job import Owner
    from airflow_bottledwater.pipeline.settings import Settings


class CreateReplicationSlotOperator(BeforeJobsOperator):
    """Create publications, slot, topics and schemas, and record them. Idempotent: meant as a setup task."""

    ui_color = "#d4edda"
    _stopped: threading.Event | None = None

    def execute(self, context: Context) -> dict[str, Any]:
        """Create what is missing; returns slot and consistent point."""
        from airflow_bottledwater.model.lsn import format_lsn
        from airflow_bottledwater.provision.create import create

        # made here and not in __init__: operators are copied, which an event cannot be
        self._stopped = threading.Event()
        asked_at(context)
        with failing():
            pipeline = self.pipeline_hook.pipeline().with_hash_key()
            self.refuse_stopped(context, pipeline)
            with self.noting(context, pipeline):
                if problems := self.spark_problems(pipeline):
                    raise PreflightError(problems)
                try:
                    record = create(pipeline, stopped=self._stopped)
                except StopRequested as error:
                    said = "The task was ended before the slot was made.", "A retry goes on where it was."
                    raise Outage(*said) from error
        return {"slot": record.name, "consistent_point": format_lsn(record.consistent_point)}

    def on_kill(self) -> None:
        """Stop the creation; the next try continues it."""
        if self._stopped is not None:
            self._stopped.set()


class DropReplicationSlotOperator(PipelineMixin, BaseOperator):
    """Drop slot and publications; meant as the teardown of the slot's setup task.

    The slot holds the changes that are not yet published, so by default it is dropped only if the stream was stopped
    for good. A job that this DAG run has left behind, on any host, is stopped first, which happens if its task was
    marked while no triggerer ran.

    :param pipeline: the :class:`~airflow_bottledwater.Pipeline`, its name or the path of its file. (templated)
    :param when: ``retired`` (default), ``always`` or ``never``. (templated)
    """

    template_fields: Sequence[str] = (*PIPELINE_FIELDS, "when")
    template_fields_renderers: ClassVar[dict[str, str]] = dict(PIPELINE_RENDERERS)
    ui_color = "#f8d7da"

    def __init__(
        self,
        *,
        pipeline: PipelineArgument,
        when: str = "retired",
        **kwargs: Any,
    ) -> None:
        super().__init__(**kwargs)
        self._set_pipeline(pipeline)
        self.when = when

    def execute(self, context: Context) -> str:
        """Drop or keep the slot; returns a sentence that says what was done."""
        return self.carry_out(context)

    def carry_out(self, context: Context) -> str:
        """See :meth:`execute`."""
        from airflow_bottledwater.provision.drop import drop

        with failing():
            self._check_when()
            pipeline = self.pipeline_hook.pipeline()
            self._stop_jobs(context, pipeline)
            done = drop(pipeline, when=self.when)
        self.log.info("%s", done)
        return done

    def _check_when(self) -> None:
        if self.when not in ("retired", "always", "never"):
            raise SettingError("when", self.when, "retired, always or never")

    def _stop_jobs(self, context: Context, pipeline: Settings) -> None:
        """Stop the jobs of this run whose tasks have ended; not others, such as a verification beside the stream."""
        from airflow_bottledwater.provision import live

        ti: Any = context["ti"]

        def has_ended(owner: Owner) -> bool:
            of_this_run = (owner.dag_id, owner.run_id) == (ti.dag_id, ti.run_id)
            return of_this_run and tasks.owners_fate(owner) is tasks.Fate.ENDED

        orphans.stop_all(pipeline, live.name_of(pipeline), has_ended)
