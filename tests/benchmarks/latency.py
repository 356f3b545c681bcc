"""``latency``: transactions of one to three rows at several rates, from just before each commit until a
``read_committed`` consumer has its last row. ``rates`` has for each rate the percentiles, those of the reference, how
many Kafka transactions there were, and the seconds of processor time that the servers took meanwhile.

References, by turns in the same run on the same broker, after a minute that warms it up: a plain script that receives
and publishes in Kafka transactions, and does nothing else; for the broker's processor time, the same script without
transactions.
"""

from __future__ import annotations

import collections
import itertools
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

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
from tests.support.topics import create_topic
from tests.support.waiting import until

#: transactions a second
RATES = (200, 1_000, 3_000, 10_000)
_SECONDS, _TURNS = 15, 2
_WARM_UP = {200: 20, 3_000: 20, 10_000: 20}
#: seconds at the first rate before anything is measured: Spark's JVM compiles what has started the job, on both cores
_REST = 20
#: at the start of each rate
_IGNORED_SECONDS = 1.0
#: times of commits, and milliseconds
Delays = list[tuple[float, float]]
_PLAIN = Path(__file__).parent / "plain_publisher.py"
#: transactions at their times; ``d`` of each one's last row is the moment before its commit
_PACED = """CREATE OR REPLACE PROCEDURE paced_{table}(first bigint, rate float8, transactions int)
LANGUAGE plpgsql AS $$
DECLARE n bigint := first; begun timestamptz := clock_timestamp(); early float8;
BEGIN
    FOR k IN 0..transactions - 1 LOOP
        early := k / rate - extract(epoch FROM clock_timestamp() - begun);
        IF early > 0 THEN PERFORM pg_sleep(early); END IF;
        INSERT INTO {table} SELECT i, k, 'row ' || k, k + 0.25, clock_timestamp(), true
            FROM generate_series(n, n + k % 3) i;
        n := n + k % 3 + 1;
        COMMIT;
    END LOOP;
END $$"""


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
    """When each key was seen."""

    def __init__(self, client: Consumer) -> None:
        self.seen: dict[bytes, float] = {}
        self.last = b""
        self._client = client
        self._stopped = threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def _run(self) -> None:
        while not self._stopped.is_set():
            message = self._client.poll(0.2)
            if message is not None and message.error() is None:
                self.last = message.key()
                self.seen.setdefault(self.last, time.time())

    def close(self) -> None:
        self._stopped.set()
        self._thread.join()
        self._client.close()


def observe(
    source: Workload,
    topic: str,
    identify: Callable[[bytes], int],
    first: int,
    job: Job | None,
    *,
    rate: int,
    seconds: float,
    table: str = "bench",
) -> tuple[dict[str, Any], Delays]:
    """Run the module's transactions, and see when they arrive; returns what was used meanwhile, and the time of each
    commit with the milliseconds from then on.

    :param topic: the topic of the table that they insert into.
    :param identify: the id in the bytes of a key.
    :param first: the first id that is inserted.
    :param rate: transactions a second.
    """
    transactions = max(round(rate * seconds), 3)
    last = list(itertools.accumulate((k % 3 + 1 for k in range(transactions)), initial=first - 1))[1:]
    source.execute(_PACED.format(table=table))
    watch = _Watch(consumer(source, topic))
    cpu, end = Cpu(source.stack, job), Topics(source.pipeline.kafka).ends(topic, 1)[0]
    source.execute(f"CALL paced_{table}({first}, {rate}, {transactions})")
    until(lambda: watch.last and identify(watch.last) == last[-1], "the last transaction", 120)
    used = cpu.used()
    watch.close()
    # behind the records of each Kafka transaction there is one marker
    commits = Topics(source.pipeline.kafka).ends(topic, 1)[0] - end - (last[-1] - first + 1)
    committed = dict(
        source.execute(f"SELECT id, extract(epoch FROM d)::float8 FROM {table} WHERE id BETWEEN {first} AND {last[-1]}")
    )
    begun, ended = committed[last[0]], committed[last[-1]]
    found = {"transactions": transactions, "rate": transactions / (ended - begun), "commits": commits, "cpu": used}
    seen = {identify(key): at for key, at in watch.seen.items()}
    delays = [(committed[i], (seen[i] - committed[i]) * 1000) for i in last if committed[i] - begun > _IGNORED_SECONDS]
    return found, delays


class _Results:
    """What was found for each rate, in all turns."""

    def __init__(self) -> None:
        self._delays: dict[int, list[float]] = collections.defaultdict(list)
        self._used: dict[int, list[dict[str, Any]]] = collections.defaultdict(list)

    def run(self, source: Workload, topic: str, identify: Callable[[bytes], int], job: Job | None) -> None:
        """Measure all rates, one after the other, when what was started has come to rest."""
        observe(source, topic, identify, 1_000_000, job, rate=RATES[0], seconds=scaled(_REST, 2))
        for number, rate in enumerate(RATES, 1):
            seconds = max(_SECONDS * scaled(100) / 100, _IGNORED_SECONDS + 2)
            found, delays = observe(source, topic, identify, number * 10_000_000, job, rate=rate, seconds=seconds)
            self._used[rate].append(found)
            self._delays[rate] += [ms for _, ms in delays]

    def of(self, rate: int) -> dict[str, Any]:
        """What is reported of a rate."""
        used = self._used[rate]
        commits = sum(u["commits"] for u in used)
        cpu = {kind: sum(u["cpu"][kind] for u in used) for kind in used[0]["cpu"]}
        return {
            **{f"p{p}_ms": value for p, value in percentiles(self._delays[rate]).items()},
            "rate": sum(u["rate"] for u in used) / len(used), "commits": commits, "cpu": cpu,
        }  # fmt: skip


@contextmanager
def _script(stack: DataStack, *, transactions: bool) -> Iterator[tuple[Workload, str]]:
    """The plain script while it runs; yields its source and topic."""
    source = Workload(stack)
    pipeline, topic = source.pipeline, f"{source.pipeline.slot}.plain"
    source.execute(f"CREATE PUBLICATION {pipeline.slot} FOR TABLE bench")
    slot = source.extra_slot("plain")
    create_topic(pipeline.kafka, topic, partitions=1, replication=1, config={})
    state = f"{topic}_state" if transactions else ""
    if state:
        create_topic(pipeline.kafka, state, partitions=1, replication=1, config={"cleanup.policy": "compact"})
    script = subprocess.Popen(
        [sys.executable, str(_PLAIN), source.dsn, slot, pipeline.slot, stack.kafka.bootstrap, topic, state],
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
        yield source, topic
    finally:
        script.terminate()
        script.wait()
        until(lambda: not source.execute("SELECT 1 FROM pg_replication_slots WHERE active"), "the slot", 300)
        source.drop()


@contextmanager
def _stream(stack: DataStack, engine: str) -> Iterator[tuple[Workload, Job]]:
    """A stream while it runs, which has published something."""
    source = Workload(stack, skip_snapshot=True)
    source.create()
    follower = Follower(source)
    with Job(source.pipeline, "stream", engine=engine) as job:
        source.insert(10)
        follower.until(10, job=job)
        follower.close()
        time.sleep(1)
        yield source, job
    source.released()
    source.drop()


def run(stack: DataStack) -> None:
    """See the module."""
    plain, untransacted, ours = _Results(), _Results(), {engine: _Results() for engine in ENGINES}
    # in its first minute a broker's JVM compiles, and a commit costs it four times the processor time
    with _script(stack, transactions=True) as (source, topic):
        for number, (rate, seconds) in enumerate(_WARM_UP.items(), 1):
            seconds = scaled(seconds, 4)
            observe(source, topic, _plain_id, number * 10_000_000, None, rate=rate, seconds=seconds)
    for _ in range(_TURNS):
        for results, transactions in ((plain, True), (untransacted, False)):
            with _script(stack, transactions=transactions) as (source, topic):
                results.run(source, topic, _plain_id, None)
        for engine, results in ours.items():
            with _stream(stack, engine) as (source, job):
                results.run(source, source.topic, avro_id, job)
    log.info("plain script: %s", {rate: plain.of(rate) for rate in RATES})
    for engine, results in ours.items():
        _emit(engine, results, plain, untransacted)


def _emit(engine: str, results: _Results, plain: _Results, untransacted: _Results) -> None:
    rates = {}
    for rate in RATES:
        found, script, bare = results.of(rate), plain.of(rate), untransacted.of(rate)
        names = [name for name in found if name.endswith("_ms")]
        rates[rate] = {
            **found,
            **{f"plain_{name}": script[name] for name in names},
            **{f"ratio_{name.removesuffix('_ms')}": found[name] / script[name] for name in names},
            "ratio_broker": found["cpu"]["broker"] / bare["cpu"]["broker"],
            "plain_ratio_broker": script["cpu"]["broker"] / bare["cpu"]["broker"],
            "marker_ms": 1000 * (found["cpu"]["broker"] - bare["cpu"]["broker"]) / max(1, found["commits"]),
        }
    middle = rates[3_000]
    emit("latency", middle["p50_ms"], "ms", {"plain_p50_ms": middle["plain_p50_ms"]}, engine=engine, rates=rates)
