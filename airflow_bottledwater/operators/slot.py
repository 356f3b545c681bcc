"""Make and drop the replication slot with its publications."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from airflow.sdk import BaseOperator

from airflow_bottledwater.operators.base import PIPELINE_FIELDS, PipelineMixin, failing, take_pipeline_arguments

if TYPE_CHECKING:
    from airflow.sdk import Context


class CreateReplicationSlotOperator(PipelineMixin, BaseOperator):
    """Create publications, slot, topics and schemas, and record them. Idempotent: meant as a setup task.

    Takes the parameters of :class:`~airflow_bottledwater.operators.base.PipelineMixin`.
    """

    template_fields: Sequence[str] = PIPELINE_FIELDS
    ui_color = "#d4edda"

    def __init__(self, **kwargs: Any) -> None:
        pipeline = take_pipeline_arguments(kwargs)
        super().__init__(**kwargs)
        self._set_pipeline(**pipeline)
        self._stopped: threading.Event | None = None

    def execute(self, context: Context) -> dict[str, Any]:
        """Create what is missing; returns slot and consistent point."""
        from airflow_bottledwater.flow import setup
        from airflow_bottledwater.model.lsn import format_lsn

        # made here: operators are copied, and an event cannot be
        self._stopped = threading.Event()
        with failing():
            record = setup.create(self.pipeline_hook.pipeline(), stopped=self._stopped)
        return {"slot": record.name, "consistent_point": format_lsn(record.consistent_point)}

    def on_kill(self) -> None:
        """A slot that is being built is left to the next try, which takes it up."""
        if self._stopped is not None:
            self._stopped.set()


class DropReplicationSlotOperator(PipelineMixin, BaseOperator):
    """Drop slot and publications; meant as the teardown of the slot's setup task.

    The slot holds the changes that are not yet published, so by default it is dropped only if the stream was stopped for good.

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
        from airflow_bottledwater.flow import setup

        with failing():
            if self.when not in ("retired", "always", "never"):
                raise SettingError("when", self.when, "retired, always or never")
            done = setup.drop(self.pipeline_hook.pipeline(), when=self.when)
        self.log.info("%s", done)
        return done
