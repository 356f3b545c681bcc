"""The reports on live snapshots, for whoever has asked for them."""

from __future__ import annotations

import time
from collections.abc import Mapping

from airflow_bottledwater.live.reading import LiveReader
from airflow_bottledwater.pipeline.settings import Settings
from airflow_bottledwater.state.control_records import SNAPSHOT_ENDS, SnapshotReport, encode, reading_key
from airflow_bottledwater.state.control_topic import ControlTopic
from airflow_bottledwater.state.pinned import PinnedTable
from airflow_bottledwater.state.records import LiveProgress

#: tables that a report names, so that it fits into a record whatever their names are
_TABLES = 500


class Reports:
    """Writes a report at every heartbeat, and when a live snapshot changes its state."""

    def __init__(self, pipeline: Settings, name: str) -> None:
        self._pipeline, self._name = pipeline, name
        self._topic = ControlTopic.of(pipeline.kafka)
        #: by the request: the state that was reported last, and when
        self._last: dict[str, tuple[str, float]] = {}
        #: by the request: which reading the pace is measured of, since when, and from where
        self._measured: dict[str, tuple[LiveReader, float, LiveProgress]] = {}

    def tell(
        self,
        request_id: str,
        state: str,
        progress: LiveProgress | None,
        reading: LiveReader | None = None,
        tables: dict[int, PinnedTable] | None = None,
        waits_for: str = "",
        boundary: str = "",
    ) -> None:
        """Report, unless the same was reported a moment ago.

        :param reading: None if nothing is read of it now.
        :param tables: the pipeline's tables by oid, to name those that it is of.
        :param waits_for: what it waits for where nothing is read yet.
        :param boundary: the LSN up to which the rows that were published last show the table.
        :raises Outage: Kafka does not take the last report.
        """
        now = time.monotonic()
        progress = progress or LiveProgress(())
        waits_for = reading.waits_for if reading is not None else waits_for
        if waits_for:
            state = "waiting"
        before, at = self._last.get(request_id, ("", 0.0))
        if before == state and now - at < self._pipeline.heartbeat_interval:
            return
        if reading is None:
            self._measured.pop(request_id, None)
        elif request_id not in self._measured or self._measured[request_id][0] is not reading:
            self._measured[request_id] = reading, now, progress
        report = SnapshotReport(state, waits_for, _named(progress, tables or {}))
        report.rows, report.superseded, report.dead_letters = progress.rows, progress.superseded, progress.dead_letters
        report.tombstones, report.bytes, report.error = progress.tombstones, progress.bytes, progress.error
        left = reading.extent.left(progress) if reading is not None else 0 if state == "finished" else None
        report.total_bytes = progress.bytes + left if left is not None else 0
        if state == "reading":
            _, began, then = self._measured[request_id]
            seconds = max(0.001, now - began)
            report.rows_per_second = (progress.rows - then.rows) / seconds
            pace = (progress.bytes - then.bytes) / seconds
            report.seconds_left = left / pace if left is not None and pace > 0 else None
        report.boundary, report.at = boundary, time.time()
        self._topic.write(
            {reading_key(self._name, request_id): encode(report)}, wait=10.0 if state in SNAPSHOT_ENDS else 0
        )
        self._last[request_id] = (state, now)

    def close(self) -> None:
        """Send what is queued."""
        self._topic.close()


def _named(progress: LiveProgress, tables: Mapping[int, PinnedTable]) -> list[str]:
    """The tables that it is of, at most :data:`_TABLES` of them, and how many others there are."""
    names = [tables[oid].table.qualified for oid in progress.tables] if tables else []
    others = len(names) - _TABLES
    return names if others <= 0 else [*names[:_TABLES], f"and {others:,} others"]
