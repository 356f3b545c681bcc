"""``snapshot``: a table into Kafka, end to end. The value is rows/s of the job's own time, from its claim of the slot
to the record of completion; ``with_start`` also counts spark-submit's start and end.

Reference: draining the same COPY raw over two connections, half of the table's blocks each, just before and after:
their mean.
"""

from __future__ import annotations

import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict
from typing import Any

from airflow_bottledwater.encoding.program import select_list
from airflow_bottledwater.local.stack import DataStack
from airflow_bottledwater.postgres.snapshot import LAST_BLOCK, copy_query
from airflow_bottledwater.snapshot import driver
from tests.benchmarks.common import RUNNER, Cpu, Job, Workload, consumer, drain, emit, empty_job, scaled
from tests.support import running

_ROWS = 2_000_000
#: snapshots before the measured ones: a broker takes about five million rows until its JVM has compiled what it runs,
#: and a broker that one publishes to in earnest has long done so
_WARMING = 3
#: of each engine; the one in the middle, by its ratio, counts
_REPEAT = 3


def _raw(source: Workload, rows: int) -> float:
    table = source.table()
    middle = table.pages // 2
    halves = [copy_query(table, select_list(table), *ends) for ends in ((0, middle), (middle, LAST_BLOCK))]
    started = time.perf_counter()
    with ThreadPoolExecutor(2) as pool:
        assert sum(pool.map(lambda query: drain(source.dsn, query), halves)) == rows
    return rows / (time.perf_counter() - started)


def _progress(source: Workload) -> dict[str, float]:
    """What the ranges' records say of the time: from the first to the last of them, and until completion was
    recorded."""
    reader = consumer(source, source.state_topic, start=0)
    at: dict[str, list[float]] = {}
    while (message := reader.poll(2.0)) is not None:
        assert message.error() is None, message.error()
        key = (message.key() or b"").decode().partition("/")[0]
        at.setdefault(key, []).append(message.timestamp()[1] / 1000)
    reader.close()
    plan, ranges, complete = at["plan"][-1], at["progress"], at["complete"][-1]
    return {
        "claim_to_plan": plan - at["claim"][-1],
        "plan_to_first_range": min(ranges) - plan,
        "first_to_last_range": max(ranges) - min(ranges),
        "last_range_to_complete": complete - max(ranges),
        "ranges": len(ranges),
    }


def _publish(stack: DataStack, engine: str, rows: int) -> dict[str, Any]:
    """One snapshot of a new table, raw drains just before and after it."""
    source = Workload(stack)
    source.insert(rows)
    source.execute("VACUUM ANALYZE bench")
    source.create()
    before = _raw(source, rows)
    cpu, started = Cpu(stack), time.monotonic()
    if engine == RUNNER:
        outcome = asdict(driver.run(source.pipeline, running.in_threads(source.pipeline)))
    else:
        with Job(source.pipeline, "snapshot") as job:
            outcome = job.wait()
    total, broker = time.monotonic() - started, cpu.used()["broker"]
    assert outcome["rows"] == rows, outcome
    value, reference = rows / outcome["seconds"], (before + _raw(source, rows)) / 2
    found = {
        "value": value,
        "reference": reference,
        "ratio": value / reference,
        "with_start": rows / total,
        "seconds": outcome["seconds"],
        "seconds_with_start": total,
        "parts": _progress(source),
        "broker_cpu_seconds": broker,
    }
    source.drop()
    return found


def run(stack: DataStack) -> None:
    """See the module."""
    empty_job()  # its files are in the page cache then
    rows = scaled(_ROWS, 10_000)
    for _ in range(_WARMING):
        _publish(stack, RUNNER, rows)
    for engine in ("spark", RUNNER):
        runs = sorted((_publish(stack, engine, rows) for _ in range(_REPEAT)), key=lambda r: r["ratio"])
        ratios = [r.pop("ratio") for r in runs]
        found = runs[_REPEAT // 2]
        value, reference = found.pop("value"), found.pop("reference")
        emit(
            "snapshot",
            value,
            "rows/s",
            {"raw_copy_2_connections": reference},
            engine=engine,
            ratios=ratios,
            **found,
            rows=rows,
        )
