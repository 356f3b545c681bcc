"""The sensor that waits until consumers can have everything up to a position."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from airflow.sdk import conf

from airflow_bottledwater.errors import SettingError
from airflow_bottledwater.hooks.source import SourceHook
from airflow_bottledwater.operators.base import PIPELINE_FIELDS
from airflow_bottledwater.pipeline.argument import PipelineArgument
from airflow_bottledwater.sensors.slot_lag import ReplicationSlotLagSensor
from airflow_bottledwater.triggers.slots import END_SQL

if TYPE_CHECKING:
    from airflow.sdk import Context

#: the key in the task's state for the position: in mode ``reschedule``, the sensor starts anew at each poke
_TARGET = "bottledwater_target"


class StreamPositionSensor(ReplicationSlotLagSensor):
    """Succeeds when everything is published that was committed up to a position of the source: a DAG that has written
    to PostgreSQL waits with it until consumers that read committed records can have what it wrote.

    It looks at the slot only: rows of a table that is paused, set aside or not followed, of open dead letters, and of a
    snapshot that is not complete may be missing all the same.

    Fails when the slot does not exist or is lost, or when the source becomes another server, of which the position is
    none; is skipped when the stream's task has ended before.

    :param pipeline: the :class:`~airflow_bottledwater.Pipeline`, its name or the path of its file. (templated)
    :param position: an LSN, such as ``0/16B3748`` (``SELECT pg_current_wal_insert_lsn()`` behind the commit); or
        ``now``: where the source is when the sensor begins. (templated)
    :param stream_task_id: the task of the same DAG run that runs the stream, with its task group's prefix. With it, the
        sensor does not wait for a stream that has ended. (templated)
    :param poke_interval: seconds between two checks.
    :param timeout: seconds after which the sensor fails.
    :param deferrable: wait in the triggerer instead of a worker slot; by default ``[operators] default_deferrable``.
    """

    template_fields: Sequence[str] = (*PIPELINE_FIELDS, "position", "stream_task_id")

    def __init__(
        self,
        *,
        pipeline: PipelineArgument,
        position: str = "now",
        stream_task_id: str | None = None,
        poke_interval: float = 5.0,
        deferrable: bool = conf.getboolean("operators", "default_deferrable", fallback=False),
        **kwargs: Any,
    ) -> None:
        super().__init__(
            pipeline=pipeline,
            stream_task_id=stream_task_id,
            poke_interval=poke_interval,
            deferrable=deferrable,
            **kwargs,
        )
        self.position = position
        self._target: tuple[int, str] | None = None

    def _max_lag(self) -> int | None:
        return None

    def _position(self, context: Context) -> tuple[int, str]:
        """The LSN that is waited for, and the server of which it is one: that of the first look, at which ``now`` is
        asked for, too.

        :raises SettingError: it is neither an LSN nor ``now``.
        """
        from airflow_bottledwater.model.lsn import parse_lsn
        from airflow_bottledwater.postgres.connect import session

        given = str(self.position).strip()
        try:
            asked = None if given == "now" else parse_lsn(given)
        except ValueError:
            raise SettingError("position", self.position, "'now', or an LSN such as 0/16B3748") from None
        store = context.get("task_state_store") if self.reschedule else None
        if self._target is None and store is not None and (kept := store.get(_TARGET)):
            self._target = (kept["lsn"], kept.get("server", "")) if kept["try"] == context["ti"].try_number else None
        if self._target is None:
            with session(SourceHook(self.described().source.conn_id).dsn(), "Reading the WAL position") as connection:
                end, server = connection.execute(END_SQL).fetchone() or ("0/0", "")
            self._target = parse_lsn(end) if asked is None else asked, server
            if store is not None:
                store.set(_TARGET, {"try": context["ti"].try_number, "lsn": self._target[0], "server": server})
        return self._target
