"""What a pipeline costs its source, and how far it is behind: asked of PostgreSQL in one query."""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeVar

import psycopg

from airflow_bottledwater.errors import BottledWaterError
from airflow_bottledwater.metrics import registry
from airflow_bottledwater.metrics.registry import Metric
from airflow_bottledwater.model.lsn import parse_lsn
from airflow_bottledwater.postgres.connect import Connection, connect

log = logging.getLogger(__name__)

T = TypeVar("T")

#: seconds for a query
_TIMEOUT = 5
#: looks at the end of the WAL that are kept; of more, every second one is: an age becomes less exact then, not smaller
_REMEMBERED = 360
#: looks among which the one with the quickest answer tells the difference of the clocks
_CLOCKS = 12

_QUERY = """
SELECT extract(epoch FROM clock_timestamp())::float8, pg_current_wal_lsn()::text,
       pg_wal_lsn_diff(pg_current_wal_lsn(), s.restart_lsn)::bigint, s.safe_wal_size, s.wal_status, s.active,
       pg_wal_lsn_diff(pg_current_wal_lsn(), s.confirmed_flush_lsn)::bigint,
       (SELECT nullif(setting::bigint, -1) << 20 FROM pg_settings WHERE name = 'max_slot_wal_keep_size'),
       r.spill_txns, r.spill_bytes, x.age, x.kind, x.who
FROM (VALUES (1)) one
LEFT JOIN pg_replication_slots s ON s.slot_name = %s
LEFT JOIN pg_stat_replication_slots r ON r.slot_name = s.slot_name
LEFT JOIN LATERAL (
    SELECT age(xmin) AS age, kind, who FROM (
        SELECT backend_xmin, 'session',
               format('session %%s (%%s)', pid, coalesce(nullif(application_name, ''), usename))
        FROM pg_stat_activity WHERE backend_type = 'client backend' AND pid <> pg_backend_pid()
        UNION ALL
        SELECT backend_xmin, 'standby', format('standby %%s', application_name) FROM pg_stat_replication
        UNION ALL
        SELECT transaction, 'prepared_transaction', format('prepared transaction %%s', gid) FROM pg_prepared_xacts
        UNION ALL
        SELECT CASE WHEN age(catalog_xmin) > coalesce(age(xmin), 0) THEN catalog_xmin ELSE xmin END, 'slot',
               format('slot %%s', slot_name)
        FROM pg_replication_slots
    ) holders (xmin, kind, who) WHERE xmin IS NOT NULL ORDER BY 1 DESC LIMIT 1
) x ON true
"""


@dataclass(frozen=True, slots=True)
class Look:
    """What PostgreSQL has answered.

    :param values: by metric and its labels.
    :param ahead: seconds by which its clock is ahead of this host's.
    :param lag: bytes from the slot's confirmed position to the end of the WAL.
    :param end: the end of the WAL, as an LSN.
    :param holder: who holds the oldest xmin, as text.
    """

    values: list[tuple[Metric, float, tuple[str, ...]]]
    ahead: float
    lag: int | None
    end: int
    holder: str


class SourceLook:
    """Asks PostgreSQL over a session of its own, which it makes anew after an error; may be used from several threads.

    :param slot: the name of the slot.
    """

    def __init__(self, dsn: str, slot: str) -> None:
        self._dsn, self._slot = dsn, slot
        self._connection: Connection | None = None
        self._asking, self._told = threading.Lock(), False
        self._clocks: deque[tuple[float, float]] = deque(maxlen=_CLOCKS)

    def ask(self, question: Callable[[Connection], T]) -> T | None:
        """Ask something; None if PostgreSQL does not answer."""
        with self._asking:
            try:
                if self._connection is None:
                    self._connection = connect(self._dsn, application="bottledwater metrics")
                    self._connection.execute(f"SET statement_timeout = {_TIMEOUT * 1000}")
                found = question(self._connection)
            except (psycopg.Error, BottledWaterError) as error:
                if not self._told:
                    log.info("PostgreSQL does not answer what is measured, which harms nothing else: %s", error)
                self._told = True
                self.close()
                return None
            self._told = False
            return found

    def look(self) -> Look | None:
        """Ask for all that is measured; None if PostgreSQL does not answer."""
        found = self.ask(self._timed)
        if found is None:
            return None
        before, row, after = found
        self._clocks.append((after - before, row[0] - (before + after) / 2))
        return self._read(row)

    def _timed(self, connection: Connection) -> tuple[float, tuple, float]:  # type: ignore[type-arg]
        before = time.time()
        row = connection.execute(_QUERY, (self._slot,)).fetchone()
        assert row is not None
        return before, row, time.time()

    def _read(self, row: tuple) -> Look:  # type: ignore[type-arg]
        _, end, kept, safe, status, active, lag, limit, spilled, spilled_bytes, age, holder, who = row
        ahead = min(self._clocks)[1]
        values: list[tuple[Metric, float, tuple[str, ...]]] = [(registry.CLOCK_SECONDS, ahead, ())]
        for metric, value in (
            (registry.WAL_KEPT, kept),
            (registry.WAL_SAFE, safe),
            (registry.WAL_LIMIT, limit),
            (registry.SLOT_ACTIVE, active),
            (registry.SPILLED, spilled),
            (registry.SPILLED_BYTES, spilled_bytes),
        ):
            if value is not None:
                values.append((metric, float(value), ()))
        if status:
            values.append((registry.WAL_STATUS, 1.0, (status,)))
        if age is not None:
            values.append((registry.XMIN_AGE, float(age), (holder,)))
        return Look(values, ahead, lag, parse_lsn(end), who or "")

    def close(self) -> None:
        """Close the session."""
        if self._connection is not None:
            self._connection.close()
        self._connection = None


def _elapsed() -> float:
    """Seconds by a clock that only grows, and that does not stop while the host is suspended."""
    return time.clock_gettime(getattr(time, "CLOCK_BOOTTIME", time.CLOCK_MONOTONIC))


class Age:
    """How old the oldest change is that is not published: the time since the WAL first reached beyond what is, so that
    no clocks of two hosts are compared.

    :param now: a clock that only grows, in seconds, also while the host is suspended.
    """

    def __init__(self, now: Callable[[], float] = _elapsed) -> None:
        self._now = now
        self._ends: deque[tuple[float, int]] = deque()

    def behind(self, published: int, end: int, committed_ago: float | None = None) -> float:
        """Seconds.

        :param published: the LSN up to which everything is published.
        :param end: the end of the WAL now.
        :param committed_ago: how long ago the last published transaction was committed; counts if the WAL was beyond it
            already when this began to look.
        """
        now = self._now()
        self._ends.append((now, end))
        while len(self._ends) > 1 and self._ends[1][1] <= published:
            self._ends.popleft()
        if len(self._ends) > _REMEMBERED:
            self._ends = deque(list(self._ends)[::2])
        if end <= published:
            return 0.0
        at, first = self._ends[0]
        if first > published:
            # it was behind before the first look
            return max(now - at, committed_ago or 0.0)
        after, later = self._ends[1]
        # between these two looks the WAL has passed what is published: as if it had grown evenly
        return now - (at + (after - at) * (published - first) / (later - first))
