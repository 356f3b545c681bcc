"""``verify``: a table and its topic, compared by a Spark job while the stream runs. The value is rows/s of the job's
own time, without spark-submit's start.

Reference: the same of the snapshot of the same table, just before.
"""

from __future__ import annotations

import threading

from airflow_bottledwater.local.stack import DataStack
from tests.benchmarks.common import Job, Workload, emit, scaled
from tests.support import running

_ROWS = 2_000_000
#: of each format; the one in the middle, by its ratio, counts
_REPEAT = 3


def _measure(stack: DataStack, format: str, rows: int) -> tuple[float, float]:
    """Rows/s of the verification's job, and of the snapshot's."""
    source = Workload(stack, format=format)
    source.insert(rows)
    source.execute("VACUUM ANALYZE bench")
    source.create()
    with Job(source.pipeline, "snapshot") as job:
        published = job.wait()
    stopped = threading.Event()
    stream = threading.Thread(target=lambda: running.run_stream(source.pipeline, stopped=stopped), daemon=True)
    stream.start()
    try:
        source.walsender()
        with Job(source.pipeline, "verify") as job:
            found = job.wait()
    finally:
        stopped.set()
        stream.join(60)
    assert found["equal"] and found["rows"] == rows, found
    source.released()
    source.drop()
    return rows / found["seconds"], rows / published["seconds"]


def run(stack: DataStack) -> None:
    """See the module."""
    rows = scaled(_ROWS, 10_000)
    for format in ("avro", "json", "protobuf"):
        runs = sorted((_measure(stack, format, rows) for _ in range(_REPEAT)), key=lambda run: run[0] / run[1])
        value, reference = runs[_REPEAT // 2]
        emit(
            "verify", value, "rows/s", {"snapshot": reference}, engine="spark", format=format,
            ratios=[a / b for a, b in runs], rows=rows,
        )  # fmt: skip
