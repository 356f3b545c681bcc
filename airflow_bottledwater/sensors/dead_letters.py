"""The sensor that waits until no dead letters are open."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, ClassVar

from airflow.sdk import conf
from airflow.sdk.exceptions import AirflowFailException

from airflow_bottledwater.operators.base import (
    PIPELINE_FIELDS,
    PIPELINE_RENDERERS,
    PipelineMixin,
    known_event,
    number,
)
from airflow_bottledwater.pipeline.argument import PipelineArgument
from airflow_bottledwater.pipeline.rules import listed
from airflow_bottledwater.sensors.looking import LookingSensor
from airflow_bottledwater.triggers.dead_letters import DeadLettersTrigger, LettersWatch

if TYPE_CHECKING:
    from airflow.sdk import Context


class DeadLettersSensor(PipelineMixin, LookingSensor):
    """Succeeds when no dead letters are open, or not more than a number: every row of the tables is published, but for
    those. For a DAG that must not go on with less, or as an alarm by its ``timeout``.

    :param pipeline: the :class:`~airflow_bottledwater.Pipeline`, its name or the path of its file. (templated)
    :param max_open: how many may be open. (templated)
    :param tables: of which tables, as ``[schema.]table`` with ``*`` and ``?``; empty for all. (templated)
    :param poke_interval: seconds between two checks.
    :param timeout: seconds after which the sensor fails.
    :param deferrable: wait in the triggerer instead of a worker slot; by default ``[operators] default_deferrable``.
    """

    template_fields: Sequence[str] = (*PIPELINE_FIELDS, "max_open", "tables")
    template_fields_renderers: ClassVar[dict[str, str]] = dict(PIPELINE_RENDERERS)
    ui_color = "#e2e3e5"

    def __init__(
        self,
        *,
        pipeline: PipelineArgument,
        max_open: int | str = 0,
        tables: Sequence[str] | str = (),
        poke_interval: float = 60.0,
        deferrable: bool = conf.getboolean("operators", "default_deferrable", fallback=False),
        **kwargs: Any,
    ) -> None:
        super().__init__(poke_interval=poke_interval, **kwargs)
        self._set_pipeline(pipeline)
        self.max_open = max_open
        self.tables = tables
        self.deferrable = deferrable

    def trigger(self, context: Context) -> DeadLettersTrigger:
        """What counts in the triggerer."""
        return DeadLettersTrigger(hook=self.pipeline_hook.arguments(), poll_interval=self.poke_interval, **self._of())

    def look(self, context: Context) -> bool:
        """Count once; returns whether few enough are open.

        :raises AirflowFailException: there is no such pipeline.
        """
        return LettersWatch(self.pipeline_hook.pipeline(), **self._of()).fetch() is not None

    def _of(self) -> dict[str, Any]:
        """``max_open`` and ``tables``, after templating.

        :raises SettingError: ``max_open`` is not a number.
        """
        return {"max_open": int(number("max_open", self.max_open) or 0), "tables": listed(self.tables)}

    def execute_complete(self, context: Context, event: dict[str, Any] | None = None) -> None:
        """Succeed or fail by the trigger's event."""
        event = known_event(event, "ok", "failed")
        if event["status"] == "failed":
            raise AirflowFailException(event["message"])
        self.log.info("%d dead letters are open.", event["open"])
