"""``start``: seconds from spark-submit until the first record is visible to a strict consumer; the median of some
starts.

Reference: an empty Spark job of the same configuration, from spark-submit until its one task is done;
``empty_job_exit`` is when its process has ended.
"""

from __future__ import annotations

import statistics
import time

from airflow_bottledwater.local.stack import DataStack
from tests.benchmarks.common import ENGINES, Job, Workload, consumer, emit, empty_job, log, scaled
from tests.support.waiting import until

_STARTS = 5


def _first(source: Workload, engine: str) -> float:
    reader = consumer(source, source.topic)
    source.insert(1)
    try:
        with Job(source.pipeline, "stream", engine=engine) as job:
            message = until(lambda: reader.poll(0.05), "the first record", 300, pause=0)
            assert message.error() is None, message.error()
            return time.time() - job.submitted
    finally:
        reader.close()
        source.released()


def run(stack: DataStack) -> None:
    """See the module."""
    starts = scaled(_STARTS)
    empty_job()  # the files are in the page cache then, for everybody
    for engine in ENGINES:
        source = Workload(stack, skip_snapshot=True)
        source.create()
        seconds, empty = [], []
        for _ in range(starts):
            empty.append(empty_job())
            seconds.append(_first(source, engine))
            log.info("%s: %.2f s, empty job %.2f s", engine, seconds[-1], empty[-1][0])
        value = statistics.median(seconds)
        reference = statistics.median(e[0] for e in empty)
        emit(
            "start",
            value,
            "s",
            {"empty_job": reference, "empty_job_exit": statistics.median(e[1] for e in empty)},
            engine=engine,
            difference=value - reference,
            starts=starts,
        )
        source.drop()
