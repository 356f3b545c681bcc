"""``command``: seconds of ``bottledwater`` with a small table: from its start until the first row of the snapshot is
visible to a strict consumer, from then until the first change is, and, started again on the live pipeline, until a
waiting change is; medians.

Reference: an empty Spark job of the same configuration, from spark-submit until its one task is done.
"""

from __future__ import annotations

import os
import signal
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from confluent_kafka import Consumer

from airflow_bottledwater.kafka.topics import NewTopic, Topics
from airflow_bottledwater.local.stack import DataStack
from tests.benchmarks.common import MASTER, Workload, consumer, emit, empty_job, log, scaled
from tests.support.waiting import until

_STARTS = 3


@contextmanager
def running(source: Workload) -> Iterator[int]:
    """The command with a pipeline of one table, until the end of the block; yields its process id."""
    pipeline = source.pipeline
    arguments = [
        str(Path(sys.executable).parent / "bottledwater"), "-d", source.dsn, "-s", pipeline.slot, "-b",
        pipeline.kafka["bootstrap.servers"], "-r", pipeline.registry["url"], "-p", pipeline.topic_prefix, "-i", "bench",
        "--master", MASTER, "--set", "replication_factor=1",
    ]  # fmt: skip
    process = subprocess.Popen(arguments, start_new_session=True, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    try:
        yield process.pid
        process.send_signal(signal.SIGTERM)
        assert process.wait(60) == 0
    finally:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)


def _arrival(reader: Consumer) -> float:
    """When the next record is there."""
    message = until(lambda: reader.poll(0.02), "a record", 300, pause=0)
    assert message.error() is None, message.error()
    return time.time()


def run(stack: DataStack) -> None:
    """See the module."""
    figures: dict[str, list[float]] = {"first_row": [], "first_change": [], "again": [], "empty": []}
    empty_job()  # the files are in the page cache then, for everybody
    for _ in range(scaled(_STARTS)):
        source = Workload(stack)
        source.insert(1)
        # so that it can be watched; the command makes everything else
        Topics(source.pipeline.kafka).make(NewTopic(source.topic, 1, 1, ({},)))
        reader = consumer(source, source.topic)
        figures["empty"].append(empty_job()[0])
        started = time.time()
        with running(source):
            row = _arrival(reader)
            source.insert(1)
            change = _arrival(reader)
        source.released()
        source.insert(1)
        again = time.time()
        with running(source):
            waiting = _arrival(reader)
        reader.close()
        source.released()
        source.drop()
        figures["first_row"].append(row - started)
        figures["first_change"].append(change - row)
        figures["again"].append(waiting - again)
        log.info(" ".join(f"{name} {values[-1]:.2f} s" for name, values in figures.items()))
    medians = {name: statistics.median(values) for name, values in figures.items()}
    empty = medians.pop("empty")
    for name, value in medians.items():
        emit("command", value, "s", {"empty_job": empty}, moment=name, difference=value - empty)
