"""A Kafka that takes little: transactions become as small as it takes, and it is said why."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from typing import Any

import pytest

from airflow_bottledwater.local import artifacts
from airflow_bottledwater.local.kafka import KafkaBroker
from airflow_bottledwater.local.process import run
from tests.support.faults import ProxiedBroker
from tests.support.topics import Flow, MakeFlow
from tests.support.waiting import until


@pytest.fixture(scope="module")
def slow(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ProxiedBroker]:
    """A broker behind a slow link."""
    with ProxiedBroker(tmp_path_factory.mktemp("slow")) as server:
        yield server
        server.proxy.close()


@pytest.fixture
def flow_settings() -> dict[str, Any]:
    """No compression, so that the rate is that of the rows."""
    return {"transaction_timeout": 3.0, "outage_timeout": 60.0, "on_error": "log", "lanes": 1}


@pytest.fixture
def flow_statements() -> Sequence[str]:
    return ("CREATE TABLE a (id int PRIMARY KEY, t text)",)


#: half a megabyte of rows
_ROWS = "INSERT INTO a SELECT n, repeat('x', 1000) FROM generate_series({}, {}) n"


def _behind(flow: Flow, slow: ProxiedBroker) -> Flow:
    """The same pipeline by way of the slow link."""
    flow.change(kafka={**slow.proxied, "compression.type": "none"})
    return flow


def _wait_for(flow: Flow, count: int, timeout: float = 60.0) -> None:
    until(lambda: len(flow.read("a")) >= count, f"{count} rows are published", seconds=timeout)


@pytest.mark.long
def test_a_stream_moves_at_the_rate_that_kafka_takes(make_flow: MakeFlow, slow: ProxiedBroker) -> None:
    flow = make_flow(broker=slow, skip_snapshot=True)
    flow.create()
    flow.execute(_ROWS.format(1, 500))  # one transaction of 0.6 MB, which takes 6 s, twice the time-out
    _behind(flow, slow)
    slow.proxy.rate = 100_000
    try:
        with flow.streaming() as errors:

            def told() -> str:
                job = flow.job
                return " ".join(each.reason for each in job.problems) if job else ""

            until(lambda: "a second" in told(), "the rate is told")
            assert "transaction_timeout (3 s)" in told()
            _wait_for(flow, 500)
            slow.proxy.rate = 0
            for n in range(6):
                flow.execute(_ROWS.format(1000 + n * 500, 1499 + n * 500))
                _wait_for(flow, 1000 + n * 500)
            until(lambda: not told(), "it is not slow any more")
            assert not errors
    finally:
        slow.proxy.rate = 0
    assert [message.key["id"] for message in flow.read("a")][:500] == list(range(1, 501))
    assert flow.compare("a").differences == []


@pytest.mark.long
def test_a_snapshot_is_read_in_ranges_that_kafka_takes(
    make_flow: MakeFlow, slow: ProxiedBroker, caplog: pytest.LogCaptureFixture
) -> None:
    flow = make_flow(broker=slow)
    flow.create()
    flow.execute(_ROWS.format(1, 500))
    _behind(flow, slow)
    slow.proxy.rate = 100_000
    try:
        assert flow.snapshot().rows == 500
    finally:
        slow.proxy.rate = 0
    assert "is split at blocks" in caplog.text
    assert len(flow.read("a")) == 500


@pytest.mark.long
def test_a_sweep_and_a_live_snapshot_are_published_in_parts(make_flow: MakeFlow, slow: ProxiedBroker) -> None:
    flow = make_flow(broker=slow, skip_snapshot=True)
    flow.execute(_ROWS.format(1, 500))
    flow.create()
    for n in range(1000, 1010):
        flow.damage("a", {"id": n}, {"id": n, "t": "gone"})
    _behind(flow, slow)
    slow.proxy.rate = 100_000
    try:
        with flow.streaming() as errors:
            flow.streams()
            asked = flow.ask("a", sweep=True)
            until(lambda: flow.reported(asked).ended, "the live snapshot ends")
            assert flow.reported(asked).state == "finished", flow.reported(asked)
            assert not errors
    finally:
        slow.proxy.rate = 0
    assert flow.compare("a").differences == []


@pytest.mark.long
def test_one_record_has_nearly_all_of_the_time_out_and_beyond_that_it_is_said(
    make_flow: MakeFlow, slow: ProxiedBroker
) -> None:
    flow = make_flow(broker=slow, skip_snapshot=True, outage_timeout=5.0, on_error="exit")
    flow.create()
    flow.execute("INSERT INTO a VALUES (1, repeat('x', 200000))")  # 2 s, more than half of the time-out
    _behind(flow, slow)
    slow.proxy.rate = 100_000
    try:
        flow.stream()
        flow.execute("INSERT INTO a VALUES (2, repeat('x', 900000))")
        began = time.monotonic()
        with pytest.raises(Exception, match="raise transaction_timeout"):
            flow.stream()
        assert time.monotonic() - began < 60
    finally:
        slow.proxy.rate = 0
    flow.stream()
    assert len(flow.read("a")) == 2


def _quota(broker: KafkaBroker, *change: str) -> None:
    """Change what each client may send, as an administrator does with ``kafka-configs.sh``."""
    jars = ":".join(map(str, artifacts.kafka_jars(broker.cache)))
    command = [str(artifacts.system_java()), "-Xmx128m", "-cp", jars, "kafka.admin.ConfigCommand", "--alter", *change]
    where = ["--bootstrap-server", broker.bootstrap, "--entity-type", "clients", "--entity-default"]
    run([*command, *where], "changing the quota", cwd=broker.folder)


@pytest.mark.long
def test_a_quota_of_the_broker_slows_a_stream_down_and_it_says_so(make_flow: MakeFlow, slow: ProxiedBroker) -> None:
    flow = make_flow(broker=slow, skip_snapshot=True)
    flow.create()
    flow.change(kafka={**flow.pipeline.kafka, "compression.type": "none"})
    _quota(slow, "--add-config", "producer_byte_rate=100000")
    try:
        flow.execute(_ROWS.format(1, 2000))  # 2 MB, of which the quota takes 1 MB at once, and the rest in ten seconds
        with flow.streaming() as errors:
            said = set[str]()

            def published() -> bool:
                job = flow.job
                said.update(each.reason for each in (job.problems if job else ()))
                return len(flow.read("a")) >= 2000

            until(published, "the rows are published", seconds=120, failed=errors)
        assert not errors
    finally:
        _quota(slow, "--delete-config", "producer_byte_rate")
    assert any("a second" in each for each in said), said
    assert flow.compare("a").differences == []
