"""``latency``: 200 transactions a second of one to three rows, from just before each commit until a ``read_committed``
consumer has its last row; ``*_uncommitted_ms`` until a ``read_uncommitted`` one has. ``cpu`` has the seconds of
processor time meanwhile, and ``broker_ms_per_commit`` what of it the broker takes for each Kafka transaction, the two
consumers' requests included.

Reference: a plain script that receives and publishes in Kafka transactions, and does nothing else.
"""

from __future__ import annotations

import multiprocessing
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from multiprocessing.queues import Queue
from pathlib import Path
from typing import Any

import psycopg
from confluent_kafka import Consumer

from airflow_bottledwater.kafka.topics import Topics
from airflow_bottledwater.local.stack import DataStack
from tests.benchmarks.common import (
    ENGINES,
    Cpu,
    Follower,
    Job,
    Workload,
    consumer,
    emit,
    log,
    percentiles,
    scaled,
)
from tests.support.waiting import until

_RATE = 200
_SECONDS = 60
#: at the start: JITs, caches
_IGNORED_SECONDS = 3.0
#: times of commits, and milliseconds
Delays = list[tuple[float, float]]
_PLAIN = Path(__file__).parent / "plain_publisher.py"


def _write(dsn: str, table: str, first: int, transactions: int, out: Queue[list[tuple[int, float]]]) -> None:
    """In a process of its own: transactions at their times; puts (last id, time of commit) of each."""
    done = []
    with psycopg.connect(dsn) as connection:
        identity, begun = first, time.time()
        for k in range(transactions):
            if (wait := begun + k / _RATE - time.time()) > 0:
                time.sleep(wait)
            rows = k % 3 + 1
            values = ",".join(f"({identity + r}, {k}, 'row {k}', {k}.25, now(), true)" for r in range(rows))
            connection.execute(f"INSERT INTO {table} VALUES {values}")  # type: ignore[arg-type]
            identity += rows
            done.append((identity - 1, time.time()))
            connection.commit()
    out.put(done)


def avro_id(key: bytes) -> int:
    """The bigint behind the registry's frame."""
    value = shift = 0
    for byte in key[5:]:
        value |= (byte & 0x7F) << shift
        shift += 7
    return (value >> 1) ^ -(value & 1)


def _plain_id(key: bytes) -> int:
    return int.from_bytes(key, "big", signed=True)


class _Watch:
    """When each id was seen."""

    def __init__(self, client: Consumer, identify: Callable[[bytes], int]) -> None:
        self.seen: dict[int, float] = {}
        self._client, self._identify = client, identify
        self._stopped = threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def _run(self) -> None:
        while not self._stopped.is_set():
            message = self._client.poll(0.2)
            if message is not None and message.error() is None:
                self.seen.setdefault(self._identify(message.key()), time.time())

    def close(self) -> None:
        self._stopped.set()
        self._thread.join()
        self._client.close()


def measure(
    source: Workload,
    topic: str,
    identify: Callable[[bytes], int],
    first: int,
    job: Job | None = None,
    *,
    table: str = "bench",
) -> dict[str, Any]:
    """The latencies of the module's transactions; for the parameters see :func:`observe`."""
    found, committed, uncommitted = observe(source, topic, identify, first, job, table=table)
    for delays, suffix in ((committed, ""), (uncommitted, "_uncommitted")):
        found |= {f"p{p}{suffix}_ms": value for p, value in percentiles([ms for _, ms in delays]).items()}
    return found


def observe(
    source: Workload, topic: str, identify: Callable[[bytes], int], first: int, job: Job | None, *, table: str
) -> tuple[dict[str, Any], Delays, Delays]:
    """Run the module's transactions, and see when they arrive; returns what was used meanwhile, and for a
    ``read_committed`` and a ``read_uncommitted`` consumer the time of each commit and the milliseconds from then on.

    :param topic: the topic of the table that they insert into.
    :param identify: the id in the bytes of a key.
    :param first: the first id that is inserted.
    """
    transactions = scaled(_SECONDS * _RATE, 5 * _RATE)
    watches = [_Watch(consumer(source, topic, committed=c), identify) for c in (True, False)]
    context = multiprocessing.get_context("spawn")
    out = context.Queue()
    writer = context.Process(target=_write, args=(source.dsn, table, first, transactions, out))
    cpu, end = Cpu(source.stack, job), Topics(source.pipeline.kafka).ends(topic, 1)[0]
    writer.start()
    done = out.get(timeout=transactions / _RATE + 120)
    writer.join()
    until(lambda: all(done[-1][0] in w.seen for w in watches), "the last transaction", 120)
    used = cpu.used()
    for watch in watches:
        watch.close()
    # behind the records of each Kafka transaction there is one marker
    commits = Topics(source.pipeline.kafka).ends(topic, 1)[0] - end - (done[-1][0] - first + 1)
    begun = done[0][1]
    found: dict[str, Any] = {
        "transactions": transactions, "rate": (len(done) - 1) / (done[-1][1] - begun), "commits": commits, "cpu": used,
        "broker_ms_per_commit": 1000 * used["broker"] / commits,
    }  # fmt: skip
    committed, uncommitted = (
        [(at, (watch.seen[i] - at) * 1000) for i, at in done if at - begun > _IGNORED_SECONDS] for watch in watches
    )
    return found, committed, uncommitted


def _reference(stack: DataStack) -> dict[str, Any]:
    source = Workload(stack)
    pipeline, topic = source.pipeline, f"{source.pipeline.slot}.plain"
    source.execute(f"CREATE PUBLICATION {pipeline.slot} FOR TABLE bench")
    slot = source.extra_slot("plain")
    Topics(pipeline.kafka).create(topic, partitions=1, replication=1, config={})
    script = subprocess.Popen(
        [sys.executable, str(_PLAIN), source.dsn, slot, pipeline.slot, stack.kafka.bootstrap, topic],
        stdout=sys.stderr,
    )
    try:
        until(
            lambda: source.execute(f"SELECT active_pid FROM pg_replication_slots WHERE slot_name = '{slot}'")[0][0],
            "the plain script",
        )
        source.insert(10)
        until(lambda: Topics(pipeline.kafka).ends(topic, 1)[0], "the plain script's first transaction", 300)
        time.sleep(1)
        return measure(source, topic, _plain_id, 1000)
    finally:
        script.terminate()
        script.wait()
        until(lambda: not source.execute("SELECT 1 FROM pg_replication_slots WHERE active"), "the slot", 300)
        source.drop()


def run(stack: DataStack) -> None:
    """See the module."""
    # in its first minute a broker's JVM compiles, and a commit costs it four times the processor time
    log.info("with a cold broker, plain script: %s", _reference(stack))
    reference = _reference(stack)
    log.info("plain script: %s", reference)
    for engine in ENGINES:
        source = Workload(stack, skip_snapshot=True)
        source.create()
        follower = Follower(source)
        with Job(source.pipeline, "stream", engine=engine) as job:
            source.insert(10)
            follower.until(10, job=job)
            time.sleep(1)
            found = measure(source, source.topic, avro_id, 1000, job)
        follower.close()
        emit(
            "latency",
            found["p50_ms"],
            "ms",
            {
                "plain_p50_ms": reference["p50_ms"],
                **{f"plain_{name}": value for name, value in reference.items() if name.endswith(("_ms", "_commit"))},
            },
            engine=engine,
            **found,
            ratio_p99=found["p99_ms"] / reference["p99_ms"],
        )
        source.released()
        source.drop()
