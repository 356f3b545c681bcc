"""The sensor that waits until a replication slot has caught up."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, ClassVar

from airflow.sdk import conf
from airflow.sdk.exceptions import AirflowFailException, AirflowSkipException
from airflow.sdk.observability import stats

from airflow_bottledwater.hooks import tasks
from airflow_bottledwater.hooks.source import SourceHook
from airflow_bottledwater.model.amounts import size
from airflow_bottledwater.operators.base import (
    PIPELINE_FIELDS,
    PIPELINE_RENDERERS,
    PipelineMixin,
    known_event,
    number,
)
from airflow_bottledwater.pipeline.argument import PipelineArgument
from airflow_bottledwater.sensors.looking import LookingSensor
from airflow_bottledwater.triggers.slot_lag import Seen, SlotLagTrigger, evaluate, known_status, measured, stream_over
from airflow_bottledwater.triggers.slots import LAG_SQL

if TYPE_CHECKING:
    from airflow.sdk import Context

#: the key in the task's state for where the WAL has ended at the last looks
_LOOKS = "bottledwater_looks"


class ReplicationSlotLagSensor(PipelineMixin, LookingSensor):
    """Succeeds when the slot's lag is at or below its limits; fails when the slot does not exist or is lost; is skipped
    when the stream's task has ended before.

    :param pipeline: the :class:`~airflow_bottledwater.Pipeline`, its name or the path of its file. (templated)
    :param max_lag: bytes of WAL from the slot's confirmed position to the server's end. (templated)
    :param max_lag_seconds: also wait until everything is published that was there so many seconds ago. It is known from
        the sensor's own looks, so that ``poke_interval`` must be shorter; None: do not. (templated)
    :param wal_status: also wait until PostgreSQL's ``wal_status`` of the slot is this or better: ``reserved``,
        ``extended`` or ``unreserved``; None: do not. (templated)
    :param min_safe_wal: also wait until so many bytes of WAL may be written before the slot may be lost
        (``safe_wal_size``; without ``max_slot_wal_keep_size``, that is so); None: do not. (templated)
    :param stream_task_id: the task of the same DAG run that runs the stream, with its task group's prefix. With it, the
        sensor does not wait for a stream that has ended. (templated)
    :param poke_interval: seconds between two checks.
    :param timeout: seconds after which the sensor fails, which is an alarm that the stream does not catch up.
    :param deferrable: wait in the triggerer instead of a worker slot; by default ``[operators] default_deferrable``.
    """

    template_fields: Sequence[str] = (
        *PIPELINE_FIELDS,
        "max_lag",
        "max_lag_seconds",
        "wal_status",
        "min_safe_wal",
        "stream_task_id",
    )
    template_fields_renderers: ClassVar[dict[str, str]] = dict(PIPELINE_RENDERERS)
    ui_color = "#e2e3e5"

    def __init__(
        self,
        *,
        pipeline: PipelineArgument,
        max_lag: int | str = 16 << 20,
        max_lag_seconds: float | str | None = None,
        wal_status: str | None = None,
        min_safe_wal: int | str | None = None,
        stream_task_id: str | None = None,
        poke_interval: float = 30.0,
        deferrable: bool = conf.getboolean("operators", "default_deferrable", fallback=False),
        **kwargs: Any,
    ) -> None:
        super().__init__(poke_interval=poke_interval, **kwargs)
        self._set_pipeline(pipeline)
        self.max_lag = max_lag
        self.max_lag_seconds = max_lag_seconds
        self.wal_status = wal_status
        self.min_safe_wal = min_safe_wal
        self._seen: Seen | None = None
        self.stream_task_id = stream_task_id
        self.deferrable = deferrable

    def trigger(self, context: Context) -> SlotLagTrigger:
        """What looks at the slot in the triggerer."""
        position, server = self._position(context)
        return SlotLagTrigger(
            postgres_conn_id=self.described().source.conn_id,
            slot=self.described().name,
            max_lag=self._max_lag(),
            position=position,
            server=server,
            poll_interval=self.poke_interval,
            stream_task_id=self.stream_task_id,
            max_lag_seconds=number("max_lag_seconds", self.max_lag_seconds),
            **self._wal_limits(),
        )

    def look(self, context: Context) -> bool:
        """Check the slot's lag once; returns whether it has caught up.

        :raises AirflowFailException: the slot does not exist or is lost.
        :raises AirflowSkipException: the stream's task has ended before.
        """
        from airflow_bottledwater.postgres.connect import session

        max_lag, (position, server) = self._max_lag(), self._position(context)
        seen, limits = self._known(context), self._wal_limits()
        ti, task = context["ti"], self.stream_task_id
        over = task is not None and tasks.known_fate(ti.dag_id, ti.run_id, task, ti.map_index) is tasks.Fate.ENDED
        with session(SourceHook(self.described().source.conn_id).dsn(), "Reading the slot's lag") as connection:
            row = connection.execute(LAG_SQL, (self.described().name,)).fetchone()
        measured(stats.gauge, self.described().name, row)
        event = evaluate(self.described().name, row, max_lag, position, server=server, seen=seen, **limits)
        if self.reschedule and seen.looks:
            context["task_state_store"].set(_LOOKS, {"try": ti.try_number, "looks": seen.looks, "server": seen.server})
        if event is None and over:
            event = stream_over(self.described().name, str(self.stream_task_id))
        return event is not None and self._conclude(event)

    def _known(self, context: Context) -> Seen:
        """Where the WAL has ended at earlier looks of this try; in mode ``reschedule``, these were other processes."""
        if self._seen is None:
            store = context.get("task_state_store") if self.reschedule else None
            kept = (store.get(_LOOKS) if store is not None else None) or {"try": 0, "looks": ()}
            same = kept["try"] == getattr(context["ti"], "try_number", 0)
            known = (kept["looks"], kept.get("server", "")) if same else ()
            self._seen = Seen(number("max_lag_seconds", self.max_lag_seconds), *known)
        return self._seen

    def _wal_limits(self) -> dict[str, Any]:
        """``wal_status`` and ``min_safe_wal``, after templating.

        :raises SettingError: one is not allowed.
        """
        safe = number("min_safe_wal", self.min_safe_wal)
        return {"wal_status": known_status(self.wal_status), "min_safe_wal": None if safe is None else int(safe)}

    def _position(self, context: Context) -> tuple[int, str]:
        """The LSN up to which everything is to be published, 0 for any, and the server of which it is one."""
        return 0, ""

    def _max_lag(self) -> int | None:
        """``max_lag`` as a number, after templating.

        :raises SettingError: it is not a number.
        """
        return int(number("max_lag", self.max_lag) or 0)

    def execute_complete(self, context: Context, event: dict[str, Any] | None = None) -> None:
        """Succeed, fail or be skipped by the trigger's event."""
        self._conclude(known_event(event, "ok", "failed", "over"))

    def _conclude(self, event: dict[str, Any]) -> bool:
        if event["status"] == "failed":
            raise AirflowFailException(event["message"])
        if event["status"] == "over":
            raise AirflowSkipException(event["message"])
        safe = event["safe_wal_size"]
        self.log.info(
            "Slot %s: %s behind, %s of WAL kept (%s)%s.",
            event["slot"], size(event["lag"]), size(event["retained"]), event["wal_status"],
            "" if safe is None else f", {size(safe)} more until it may be lost",
        )  # fmt: skip
        return True
