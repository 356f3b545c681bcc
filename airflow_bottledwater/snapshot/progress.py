"""A snapshot's progress, measured in blocks of its tables, for the log, the status and progress bars."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

from airflow_bottledwater.model.amounts import duration, size
from airflow_bottledwater.model.relation import SourceTable
from airflow_bottledwater.postgres.snapshot import LAST_BLOCK
from airflow_bottledwater.state.pipeline_state import PipelineState

log = logging.getLogger(__name__)

#: bytes of a block of a table (BLCKSZ, src/include/pg_config.h.in; another size needs a custom build of PostgreSQL)
_BLOCK = 8192
#: seconds between two log lines
_LOG_INTERVAL = 10.0
#: how many tables the summary names, the largest first
_NAMED = 20


@dataclass(frozen=True, slots=True)
class SnapshotProgress:
    """How far a snapshot is.

    :param rows: rows published, including those of earlier attempts.
    :param ranges_done: ranges published completely.
    :param bytes: the size of the tables' blocks that are published, without TOAST.
    :param total_bytes: the size of all their blocks, as it was when the snapshot was exported.
    :param rows_per_second: since this attempt began.
    :param seconds_left: estimated from the pace of this attempt; None if it is not known yet.
    """

    rows: int
    ranges_done: int
    bytes: int
    total_bytes: int
    rows_per_second: float = 0.0
    seconds_left: float | None = None


#: called with a snapshot's progress now and then
Report = Callable[[SnapshotProgress], None]


class SnapshotMeter:
    """Measures a snapshot while it runs, and summarises it at the end.

    :param tables: the tables that it reads, with their sizes.
    :param state: the state before this attempt publishes its first range.
    :param parts: by the oid of a table, the tables that have its rows, with their sizes; by default itself.
    """

    def __init__(
        self,
        tables: Sequence[SourceTable],
        state: PipelineState,
        parts: Mapping[int, Sequence[SourceTable]] | None = None,
    ) -> None:
        self._tables, self._parts = tables, parts or {}
        self._began = time.monotonic()
        self._last_logged = self._began
        self._before = self._measure(state)

    def update(self, state: PipelineState) -> SnapshotProgress:
        """The progress by the state as it is now; it is also logged, every ten seconds."""
        seconds = max(0.001, time.monotonic() - self._began)
        now = self._measure(state)
        pace = (now.bytes - self._before.bytes) / seconds
        found = SnapshotProgress(
            now.rows,
            now.ranges_done,
            now.bytes,
            now.total_bytes,
            (now.rows - self._before.rows) / seconds,
            (now.total_bytes - now.bytes) / pace if pace else None,
        )
        if time.monotonic() - self._last_logged >= _LOG_INTERVAL:
            self._last_logged = time.monotonic()
            left = "" if found.seconds_left is None else f", about {duration(found.seconds_left)} left"
            log.info(
                "Snapshot: %s rows (%s a second), %s of %s%s.",
                f"{found.rows:,}", f"{found.rows_per_second:,.0f}", size(found.bytes), size(found.total_bytes), left,
            )  # fmt: skip
        return found

    def since(self, state: PipelineState) -> SnapshotProgress:
        """What was published since this attempt began."""
        now = self._measure(state)
        return replace(
            now, rows=now.rows - self._before.rows, ranges_done=now.ranges_done - self._before.ranges_done,
            bytes=now.bytes - self._before.bytes,
        )  # fmt: skip

    def sum_up(self, state: PipelineState, dead_letters: int) -> SnapshotProgress:
        """Log how much was published, in total and of the largest tables; returns the last progress.

        :param dead_letters: how many rows became dead letters.
        """
        seconds = max(0.001, time.monotonic() - self._began)
        now = self._measure(state)
        rows = now.rows - self._before.rows
        log.info(
            "Snapshot of %d %s: %s rows%s, %s in %s (%s rows a second)%s.",
            len(self._tables), "table" if len(self._tables) == 1 else "tables", f"{rows:,}",
            f" and {dead_letters:,} dead letters" if dead_letters else "", size(now.bytes - self._before.bytes),
            duration(seconds), f"{rows / seconds:,.0f}",
            f"; {self._before.rows:,} rows were there before" if self._before.rows else "",
        )  # fmt: skip
        largest = sorted(self._tables, key=lambda table: self._of(state, table).total_bytes, reverse=True)
        width = max((len(table.qualified) for table in largest[:_NAMED]), default=0)
        for table in largest[:_NAMED]:
            of_table = self._of(state, table)
            log.info("  %s %15s rows %10s", table.qualified.ljust(width), f"{of_table.rows:,}", size(of_table.bytes))
        if len(largest) > _NAMED:
            log.info("  and %d smaller tables", len(largest) - _NAMED)
        return replace(now, rows_per_second=rows / seconds, seconds_left=0.0)

    def _measure(self, state: PipelineState) -> SnapshotProgress:
        return _total([self._of(state, table) for table in self._tables])

    def _of(self, state: PipelineState, table: SourceTable) -> SnapshotProgress:
        return _total([self._of_part(state, part) for part in self._parts.get(table.oid, [table])])

    def _of_part(self, state: PipelineState, table: SourceTable) -> SnapshotProgress:
        rows = ranges_done = blocks = 0
        plan = state.plan(table.oid)
        for number, (first, last, _) in enumerate(plan.ranges if plan else ()):
            if (done := state.done(table.oid, number)) is None:
                continue
            # the last range has no end, since a table may have grown after its size was measured
            end = max(first, table.pages) if last == LAST_BLOCK else last
            rows += done.rows
            ranges_done += done.done
            blocks += (end if done.done else min(done.upto, end)) - first
        return SnapshotProgress(rows, ranges_done, blocks * _BLOCK, table.pages * _BLOCK)


def _total(each: Sequence[SnapshotProgress]) -> SnapshotProgress:
    return SnapshotProgress(
        sum(one.rows for one in each),
        sum(one.ranges_done for one in each),
        sum(one.bytes for one in each),
        sum(one.total_bytes for one in each),
    )
