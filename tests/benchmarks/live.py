"""``live``: a live snapshot of a table beside a stream of 200 transactions a second of another table. The value is the
snapshot's rows/s; ``ratio_p99`` is the latency of the transactions that are committed while it runs (``p99_ms``)
against the same without it, measured just before.

Reference: draining the same COPY raw over one connection, before both.
"""

from __future__ import annotations

import functools
import threading
import time
import uuid

from airflow_bottledwater.jobs import snapshots
from airflow_bottledwater.local.stack import DataStack
from airflow_bottledwater.postgres.connect import connect
from airflow_bottledwater.postgres.server import identify
from airflow_bottledwater.state.control_records import SnapshotReport, SnapshotRequest
from tests.benchmarks.common import TABLE, Job, Workload, copy_all, drain, emit, percentiles, scaled
from tests.benchmarks.latency import avro_id, observe
from tests.support.waiting import until

_ROWS = 5_000_000
#: transactions a second beside it, for so many seconds
_RATE, _SECONDS = 200, 60
#: seconds after which the live snapshot is asked for: the writer has begun by then
_BEFORE = 5.0


def _end(source: Workload, name: str, request_id: str) -> SnapshotReport | None:
    report = snapshots.reports(source.pipeline, name)[request_id][1]
    return report if report is not None and report.ended else None


def run(stack: DataStack) -> None:
    """See the module."""
    rows, seconds = scaled(_ROWS, 100_000), max(scaled(_SECONDS), 5)
    source = Workload(stack, skip_snapshot=True, tables="bench,ticks")
    source.execute(TABLE.replace("bench", "ticks"))
    source.insert(rows)
    source.execute("VACUUM ANALYZE bench")
    source.create()
    began = time.perf_counter()
    assert drain(source.dsn, copy_all(source.table())) == rows
    raw = rows / (time.perf_counter() - began)
    ticks = f"{source.pipeline.topic_prefix}.ticks"
    with connect(source.dsn) as connection:
        name = identify(connection).pipeline(source.pipeline.slot)
    with Job(source.pipeline, "stream") as job:
        source.walsender()
        beside = functools.partial(observe, source, ticks, avro_id, job=job, rate=_RATE, seconds=seconds, table="ticks")
        beside(first=1)
        alone = percentiles([ms for _, ms in beside(first=1_000_000)[1]])
        request_id, asked = uuid.uuid4().hex[:12], time.time() + _BEFORE
        ask = functools.partial(snapshots.ask, source.pipeline, name, request_id, SnapshotRequest(("bench",)))
        threading.Timer(_BEFORE, ask).start()
        _, delays = beside(first=2_000_000)
        report = until(functools.partial(_end, source, name, request_id), "the live snapshot", 1200, pause=0.5)
        assert (report.state, report.rows) == ("finished", rows)
    meanwhile = percentiles([ms for at, ms in delays if asked <= at <= report.at])
    emit(
        "live", rows / (report.at - asked), "rows/s",
        {"raw_rows_per_second": raw, "alone_p50_ms": alone[50], "alone_p99_ms": alone[99]},
        rows=rows, seconds=report.at - asked, p50_ms=meanwhile[50], p99_ms=meanwhile[99],
        ratio_p99=meanwhile[99] / alone[99],
    )  # fmt: skip
    source.released()
    source.drop()
