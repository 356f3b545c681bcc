"""``memory``: peak resident memory of the stream job, the JVM and all Python processes summed: idle, under a backlog,
and with one large transaction. The value is the last one's; its difference to the backlog's is what a transaction's
size costs.

Resident sets count pages that processes share once for each; ``proportional`` counts them once.

``variant`` tables: kB by which the Python processes grow with each table that is made and dropped while the stream
runs, beside a column that is added and dropped and 60 transactions a second; of the last two thirds of the rounds.
Reference: their MB before.
"""

from __future__ import annotations

import threading
import time
from typing import Self

from airflow_bottledwater.errors import Outage
from airflow_bottledwater.kafka.topics import Topics
from airflow_bottledwater.local.stack import DataStack
from tests.benchmarks.common import (
    ENGINES,
    Follower,
    Job,
    Workload,
    emit,
    empty_job,
    is_jvm,
    log,
    paused,
    proportional,
    resident,
    scaled,
)
from tests.support.waiting import until

_CHANGES = 1_000_000
_LARGE = 2_000_000
_IDLE_SECONDS = 10.0
_ROUNDS, _RATE = 60, 60
_INTERVAL = 0.1
_MB = 1_000_000


class Peak:
    """The highest sums of a job's processes while the block lasts."""

    def __init__(self, job: Job) -> None:
        self._job = job
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True)
        self.total, self.jvm, self.python, self.proportional = 0, 0, 0, 0

    def _run(self) -> None:
        n = 0
        while not self._ended.wait(_INTERVAL):
            pids = self._job.pids
            jvm = sum(resident(p) for p in pids if is_jvm(p))
            python = sum(resident(p) for p in pids if not is_jvm(p))
            if jvm + python > self.total:
                self.total, self.jvm, self.python = jvm + python, jvm, python
            if n % 10 == 0:  # the kernel walks all pages for it
                self.proportional = max(self.proportional, sum(map(proportional, pids)))
            n += 1

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._ended.set()
        self._thread.join()

    def to_json(self) -> dict[str, float]:
        """In MB."""
        return {
            "total": self.total / _MB,
            "jvm": self.jvm / _MB,
            "python": self.python / _MB,
            "proportional": self.proportional / _MB,
        }


def run(stack: DataStack) -> None:
    """See the module."""
    empty_job()  # its files are in the page cache then
    for engine in ENGINES:
        _tables(stack, engine)
        source = Workload(stack, skip_snapshot=True)
        source.insert(600)
        source.create()
        follower = Follower(source)
        with Job(source.pipeline, "stream", engine=engine) as job:
            source.insert(1)
            follower.until(1, job=job)
            with Peak(job) as idle:
                time.sleep(_IDLE_SECONDS)
            with paused(source.walsender()):
                changes = 1 + source.churn(scaled(_CHANGES, 1000))
            with Peak(job) as backlog:
                follower.until(changes, job=job)
            large = scaled(_LARGE, 1000)
            failure = {}
            with Peak(job) as transaction:
                source.insert(large)
                try:
                    follower.until(changes + large, job=job)
                except (TimeoutError, RuntimeError) as error:
                    log.error("%s: %s\n%s", engine, error, job.log())
                    failure = {"failed": str(error).splitlines()[0]}
        follower.close()
        emit(
            "memory",
            transaction.total / _MB,
            "MB",
            {"backlog": backlog.total / _MB, "idle": idle.total / _MB},
            engine=engine,
            difference=(transaction.total - backlog.total) / _MB,
            idle=idle.to_json(),
            backlog=backlog.to_json(),
            transaction=transaction.to_json(),
            changes=changes - 1,
            transaction_rows=large,
            **failure,
        )
        source.released()
        source.drop()


def _tables(stack: DataStack, engine: str) -> None:
    source = Workload(stack, skip_snapshot=True, tables="public.*", new_tables="add")
    source.insert(600)
    source.create()
    topics, ended = Topics(source.pipeline.kafka), threading.Event()

    def write() -> None:
        while not ended.wait(1 / _RATE):
            source.insert(1)

    def arrived(topic: str) -> bool:
        try:
            return topic in topics.describe([topic]) and topics.ends(topic, 1)[0] > 0
        except Outage:
            return False  # it was made just now

    def python(job: Job) -> float:
        return sum(proportional(p) for p in job.pids if not is_jvm(p)) / _MB

    with Job(source.pipeline, "stream", engine=engine) as job:
        source.walsender()
        writer = threading.Thread(target=write, daemon=True)
        writer.start()
        time.sleep(_IDLE_SECONDS)
        sizes = [python(job)]
        for n in range(scaled(_ROUNDS, 6)):
            source.execute(
                f"CREATE TABLE t{n} (id int PRIMARY KEY, a text)",
                f"INSERT INTO t{n} VALUES (1, 'x')",
                f"ALTER TABLE bench ADD x{n} int",
            )
            until(lambda n=n: arrived(f"{source.pipeline.topic_prefix}.t{n}"), "the new table's row", 300)  # type: ignore[misc]
            source.execute(f"DROP TABLE t{n}", f"ALTER TABLE bench DROP x{n}")
            sizes.append(python(job))
        ended.set()
        writer.join()
    first = len(sizes) // 3
    growth = 1000 * (sizes[-1] - sizes[first]) / (len(sizes) - 1 - first)
    emit(
        "memory",
        growth,
        "kB",
        {"start": sizes[0]},
        engine=engine,
        variant="tables",
        end=sizes[-1],
        rounds=len(sizes) - 1,
    )
    source.released()
    source.drop()
