"""The trigger that waits until a slot's lag is at or below a limit, with one short query for each check, over the
session of all triggers with that database."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Callable, Iterable, Sequence
from typing import Any

from airflow.observability import stats
from airflow.triggers.base import TriggerEvent

from airflow_bottledwater.errors import BottledWaterError, Outage, SettingError
from airflow_bottledwater.hooks import tasks
from airflow_bottledwater.hooks.source import SourceHook
from airflow_bottledwater.triggers.slots import SlotReader
from airflow_bottledwater.triggers.stored import StoredTrigger
from airflow_bottledwater.triggers.watching import Lack

#: seconds between two questions to Airflow whether the stream's task has ended
_TASK_INTERVAL = 60.0

#: what PostgreSQL says of a slot's WAL (``wal_status`` of pg_replication_slots), from good to bad; "lost" is an error
WAL_STATUSES = ("reserved", "extended", "unreserved")


def known_status(value: object) -> str | None:
    """A ``wal_status`` as a limit; None for any.

    :raises SettingError: there is none of this name.
    """
    found = str(value or "").strip() or None
    if found not in (None, *WAL_STATUSES):
        raise SettingError("wal_status", value, f"one of {', '.join(WAL_STATUSES)}, or nothing")
    return found


class Seen:
    """Where the WAL has ended at the last looks, by which a lag in seconds is known: what was there so many seconds ago
    is confirmed. No clocks of two hosts are compared.

    :param max_seconds: the limit; None for any number.
    :ivar looks: the time and the WAL's end of each look within the limit, the oldest first.
    :ivar server: whose WAL that is.
    """

    def __init__(self, max_seconds: float | None, looks: Iterable[Sequence[float]] = (), server: str = "") -> None:
        self._max_seconds = max_seconds
        self.looks = [(float(at), int(end)) for at, end in looks]
        self.server = server

    def on(self, server: str) -> None:
        """Note which server answers: what was seen of another one says nothing of this one."""
        if server != self.server:
            self.looks, self.server = [], server

    def within(self, end: int, confirmed: int, now: float | None = None) -> bool:
        """Note where the WAL ends; returns whether the slot is behind by no more than the limit.

        :param now: seconds since 1970.
        """
        if self._max_seconds is None:
            return True
        now = time.time() if now is None else now
        self.looks = [(at, seen) for at, seen in self.looks if 0 <= now - at <= self._max_seconds]
        self.looks.append((now, end))
        return any(seen <= confirmed for _, seen in self.looks)

    def exceeded(self, end: int, confirmed: int, now: float | None = None) -> bool | None:
        """Note where the WAL ends; returns whether the slot is behind by more than the limit: something that was there
        so long ago is not confirmed. None if that is not known: no look is so old, and nothing that was seen since is
        confirmed.

        :param now: seconds since 1970.
        """
        if self._max_seconds is None:
            return False
        now = time.time() if now is None else now
        # of those beyond the limit, the last one tells
        old = [look for look in self.looks if now - look[0] > self._max_seconds]
        self.looks = [*old[-1:], *(look for look in self.looks if 0 <= now - look[0] <= self._max_seconds), (now, end)]
        if any(seen <= confirmed for _, seen in self.looks):
            return bool(old) and old[-1][1] > confirmed
        return True if old else None


def evaluate(
    slot: str,
    row: tuple[Any, ...] | None,
    max_lag: int | None,
    position: int = 0,
    *,
    server: str = "",
    seen: Seen | None = None,
    wal_status: str | None = None,
    min_safe_wal: int | None = None,
) -> dict[str, Any] | None:
    """The event for a row of :data:`LAG_SQL`; None if the lag is above the limit, or the position is not reached, so
    that it has to be read again.

    :param row: wal_status, lag and retained bytes, whether it may be being created, the confirmed LSN, safe_wal_size
        and the server; None if the slot does not exist.
    :param max_lag: bytes of WAL; None for any number.
    :param position: the LSN up to which the slot must be confirmed.
    :param server: whose LSN that is; empty for any.
    :param seen: knows the lag in seconds, and its limit.
    :param wal_status: the worst that is good enough; None for any.
    :param min_safe_wal: bytes of WAL that may be written at least until the slot may be lost. A server without a limit
        has any number.
    """
    if row is None:
        return {"status": "failed", "slot": slot, "message": f"Slot {slot!r} does not exist."}
    status, lag, retained, in_the_making, confirmed, safe, here = row
    if status == "lost":
        return {
            "status": "failed",
            "slot": slot,
            "message": f"Slot {slot!r} was invalidated: changes are missing. Drop it and start again with a snapshot.",
        }
    if server and here != server:
        return {"status": "failed", "slot": slot, "message": _moved(slot, here, server)}
    if seen is not None:
        seen.on(here)
    if lag is None:
        if in_the_making:
            return None
        message = (
            f"Slot {slot!r} has no position: it is physical, or its creation was interrupted. Look into "
            "pg_replication_slots."
        )
        return {"status": "failed", "slot": slot, "message": message}
    fine = (
        # noted in any case
        (seen is None or seen.within(confirmed + lag, confirmed))
        and (max_lag is None or lag <= max_lag)
        and confirmed >= position
        and (wal_status is None or status in WAL_STATUSES[: WAL_STATUSES.index(wal_status) + 1])
        and (min_safe_wal is None or safe is None or safe >= min_safe_wal)
    )
    if not fine:
        return None
    found = {"status": "ok", "slot": slot, "lag": lag, "retained": retained}
    return {**found, "wal_status": status, "safe_wal_size": safe}


def _moved(slot: str, here: str, before: str) -> str:
    """What is said of a slot whose source is another server than the one whose LSN is waited for."""
    return (
        f"The source of slot {slot!r} is another server by now (system identifier and timeline {here}, before "
        f"{before}): it was moved, upgraded or promoted, so that a position of before says nothing. Clear the task; "
        "if another one has given the position, that one, too."
    )


def measured(gauge: Callable[..., object], slot: str, row: tuple[Any, ...] | None) -> None:
    """Tell Airflow's metrics what a look at a slot has found, whatever the limits are.

    :param gauge: that of the process, which is a task's or the triggerer's.
    :param row: see :func:`evaluate`.
    """
    lag, kept = row[1:3] if row is not None else (None, None)
    if lag is not None:
        gauge("bottledwater.slot.lag_bytes", lag, tags={"slot": slot})
    if kept is not None:
        gauge("bottledwater.slot.wal_kept_bytes", kept, tags={"slot": slot})


def stream_over(slot: str, stream_task_id: str) -> dict[str, Any]:
    """The event for a stream whose task has ended before the slot had caught up."""
    message = (
        f"The task {stream_task_id!r} has ended before slot {slot!r} had caught up: nobody reads from the "
        "slot any more."
    )
    return {"status": "over", "slot": slot, "message": message}


class SlotLagTrigger(StoredTrigger):
    """Fires when all limits are kept and the position is reached, or when the slot does not exist or is lost, or when
    the stream's task has ended.

    :param postgres_conn_id: connection of type Postgres: the source.
    :param slot: name of the replication slot.
    :param max_lag: bytes of WAL; None for any number.
    :param position: the LSN up to which everything is to be published.
    :param server: see :func:`evaluate`.
    :param poll_interval: seconds between two checks.
    :param stream_task_id: the task of the same DAG run that runs the stream; None if it is not known.
    :param max_lag_seconds: see :class:`Seen`; None for any number.
    :param wal_status: see :func:`evaluate`, also for ``min_safe_wal``.
    """

    def __init__(
        self,
        *,
        postgres_conn_id: str,
        slot: str,
        max_lag: int | None,
        position: int = 0,
        server: str = "",
        poll_interval: float = 30.0,
        stream_task_id: str | None = None,
        max_lag_seconds: float | None = None,
        wal_status: str | None = None,
        min_safe_wal: int | None = None,
    ) -> None:
        super().__init__()
        self.postgres_conn_id, self.slot = postgres_conn_id, slot
        self.max_lag, self.poll_interval = max_lag, poll_interval
        self.position, self.server = position, server
        self.stream_task_id = stream_task_id
        self.max_lag_seconds, self.wal_status, self.min_safe_wal = max_lag_seconds, wal_status, min_safe_wal
        self._asked = -_TASK_INTERVAL

    async def run(self) -> AsyncIterator[TriggerEvent]:
        """Wait; yields one event."""
        reader = SlotReader()
        try:
            async for event in self._events(reader):
                yield event
        finally:
            await reader.close()

    async def _events(self, reader: SlotReader) -> AsyncIterator[TriggerEvent]:
        # imported here, since sensors import this module, and a DAG processor does not need libpq
        import psycopg

        dsn, seen, lack = "", Seen(self.max_lag_seconds), Lack()
        while True:
            await asyncio.sleep(self.poll_interval)
            # asked before the slot is looked at: with the end of a bounded stream, the slot may have caught up
            over = await self._stream_over()
            try:
                dsn = dsn or await SourceHook(self.postgres_conn_id).adsn()
                lack.note(None)
                row = await reader.row(dsn, self.slot)
            except (psycopg.OperationalError, Outage) as error:
                # the source may be back in a moment; that the lag is not known means nothing
                self.log.warning("The source does not answer: %s", str(error).splitlines()[0])
                # look the connection up again: it may have new credentials
                dsn = ""
                lack.note(error if isinstance(error, Outage) else None)
                if unseen := lack.event(self, f"The slot {self.slot!r}"):
                    yield TriggerEvent(unseen)
                    return
                continue
            except BottledWaterError as error:
                yield TriggerEvent({"status": "failed", "slot": self.slot, "message": str(error)})
                return
            measured(stats.gauge, self.slot, row)
            event = evaluate(
                self.slot,
                row,
                self.max_lag,
                self.position,
                server=self.server,
                seen=seen,
                wal_status=self.wal_status,
                min_safe_wal=self.min_safe_wal,
            )
            if event is not None:
                yield TriggerEvent(event)
                return
            if over:
                yield TriggerEvent(stream_over(self.slot, str(self.stream_task_id)))
                return

    async def _stream_over(self) -> bool:
        """Whether the stream's task is known to have ended; Airflow is asked once a minute."""
        ti = self.task_instance
        if self.stream_task_id is None or ti is None or time.monotonic() - self._asked < _TASK_INTERVAL:
            return False
        self._asked = time.monotonic()
        try:
            return bool(tasks.OVER & await tasks.states(ti.dag_id, ti.run_id, self.stream_task_id, ti.map_index))
        except Exception as error:
            # its errors are of many classes; it is asked again
            self.log.info("Airflow does not say whether the stream's task has ended (%s).", type(error).__name__)
            return False
