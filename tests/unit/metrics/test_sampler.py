"""The thread that writes samples: what it writes, and that nothing which goes wrong in it reaches the job."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

from airflow_bottledwater.errors import Outage
from airflow_bottledwater.metrics import registry, sampler
from airflow_bottledwater.metrics.meter import Meter
from airflow_bottledwater.metrics.sample import METRICS_TOPIC, Sample, decode
from airflow_bottledwater.metrics.sampler import Sampler
from airflow_bottledwater.metrics.source import Look
from airflow_bottledwater.model.job import Job
from airflow_bottledwater.model.problem import Problem
from airflow_bottledwater.pipeline.settings import Settings
from airflow_bottledwater.state.control_records import StatusRecord
from tests.support.waiting import until

STATUS = StatusRecord(
    "streaming", Job(4, "j", "stream", "h", 5, 900.0), "shop", position="0000000000000064/00000000",
    counters={"superseded": 3, "transactions": 8, "dead_letters": 1}, progress={"tables_not_followed": 1},
    problems=[Problem("throttled", "t", "r")],
)  # fmt: skip
LOOK = Look([(registry.WAL_KEPT, 700.0, ()), (registry.XMIN_AGE, 5.0, ("slot",))], 0.25, 40, 150, "slot shop")


class World:
    """Kafka and PostgreSQL, as the sampler sees them."""

    def __init__(self) -> None:
        self.made: list[Any] = []
        self.sent: list[Sample] = []
        self.look: Look | None = LOOK
        self.fails: Exception | None = None
        self.lost: Exception | None = None


@pytest.fixture
def world(monkeypatch: pytest.MonkeyPatch) -> World:
    world = World()

    class Topics:
        def __init__(self, kafka: dict[str, str]) -> None: ...

        def replicas(self, wanted: int) -> int:
            return 1

        def make(self, topic: Any) -> None:
            if world.fails:
                raise world.fails
            world.made.append(topic)

    class Producer:
        def __init__(self, properties: dict[str, Any]) -> None: ...

        def produce(
            self, topic: str, value: bytes, key: bytes, partition: int, on_delivery: Callable[..., None]
        ) -> None:
            on_delivery(world.lost, None)
            found = decode(value)
            assert found is not None and (topic, partition) == (METRICS_TOPIC, 0) and key.decode() == found.pipeline
            world.sent.append(found)

        def poll(self, timeout: float) -> None: ...

        def flush(self, timeout: float) -> None: ...

    class SourceLook:
        def __init__(self, dsn: str, slot: str) -> None: ...

        def look(self) -> Look | None:
            return world.look

        def close(self) -> None: ...

    for name, stub in (("Topics", Topics), ("Producer", Producer), ("SourceLook", SourceLook)):
        monkeypatch.setattr(sampler, name, stub)
    return world


def made(**settings: Any) -> tuple[Sampler, Meter]:
    meter = Meter()
    pipeline = Settings.of(postgres="dbname=shop", slot="shop", format="json", metrics_interval=0.1, **settings)
    return Sampler(pipeline, "7/shop/shop", lambda: STATUS, meter), meter


def test_a_sample_has_what_was_counted_what_the_job_says_and_what_the_source_says(world: World) -> None:
    found, meter = made()
    with found as counting:
        assert counting is meter
        counting.add(registry.BYTES, 9)
        until(lambda: len(world.sent) > 1, "two samples")
    (topic,) = world.made
    assert topic.configs[0]["cleanup.policy"] == "delete" and topic.configs[0]["retention.ms"] == str(7 * 86_400_000)
    sample = world.sent[-1]
    assert (sample.pipeline, sample.job, sample.state, sample.started) == ("7/shop/shop", "j", "streaming", 900.0)
    values = {name: sample.value(name) for name in sample.values}
    assert values["published_bytes"] == 9 and values["superseded_rows"] == 3 and values["transactions"] == 8
    assert values["claims"] == 4 and values["tables_not_followed"] == 1 and values["problems"] == 1
    assert values["lag_bytes"] == 50 and values["slot_wal_kept_bytes"] == 700
    assert sample.value("oldest_xmin_age_transactions", "slot") == 5 and sample.holder == "slot shop"
    assert (meter.ahead, meter.behind and meter.behind[0]) == (0.25, 50)
    assert values.keys() <= registry.METRICS.keys()
    # the pipeline's status has it, for who knows only that
    assert STATUS.lag == 50 and STATUS.delay == pytest.approx(sample.value("lag_seconds"), abs=0.1)
    # a moment without an answer is none
    found.take(None)
    assert STATUS.lag == 50
    assert meter.behind is not None
    found._answered -= 61
    found.take(None)
    assert (STATUS.lag, STATUS.delay, meter.behind) == (None, None, None)


def test_what_another_job_has_measured_counts_until_something_is_published(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    found, _ = made()
    status = replace(STATUS, began=STATUS.position, behind_since=time.time() - 7200)
    monkeypatch.setattr(found, "_status", lambda: status)
    assert found.take(LOOK).value("lag_seconds") == pytest.approx(7200, abs=5)
    found.take(replace(LOOK, end=100))
    assert status.delay == 0
    status.position = "0000000000000065/00000000"
    assert found.take(LOOK).value("lag_seconds") < 5


def test_the_200_tables_that_have_most_are_shown_and_the_others_added_up_by_operation(world: World) -> None:
    found, meter = made()
    for i in range(201):
        # the sum decides: the table with most inserts has the fewest changes
        meter.add(registry.ROWS, 9 if i == 200 else 5, f"t{i}", "insert")
        if i != 200:
            meter.add(registry.ROWS, 7, f"t{i}", "update")
        meter.set(registry.CHANGED, 1000 - i, f"t{i}")
    meter.add(registry.ROWS, 1, "small", "delete")
    sample = found.take(None)
    rows = {each.labels: each.value for each in sample.values["rows"]}
    assert rows == {
        **{(f"t{i}", operation): value for i in range(200) for operation, value in (("insert", 5), ("update", 7))},
        ("(others)", "insert"): 9,
        ("(others)", "delete"): 1,
    }
    # another one that has more now does not take a place: the sums of the others would shrink
    meter.add(registry.ROWS, 100, "small", "delete")
    meter.set(registry.CHANGED, 2000, "t200")
    sample = found.take(None)
    rows = {each.labels: each.value for each in sample.values["rows"]}
    assert rows["(others)", "delete"] == 101 and rows["t0", "insert"] == 5 and len(rows) == 402
    # of a time there is no sum
    assert [each.labels for each in sample.values[registry.CHANGED.name]] == [
        ("t200",),
        *((f"t{i}",) for i in range(199)),
    ]


def test_a_job_that_ends_soon_writes_a_sample_too(world: World) -> None:
    found, _ = made()
    found._pipeline = found._pipeline.with_(metrics_interval=3600.0)
    with found:
        until(lambda: world.made, "the topic is made")
    assert len(world.sent) == 1


@pytest.mark.parametrize("error", [Outage("Kafka is away"), KeyError("not expected")])
def test_what_goes_wrong_is_logged_once_and_harms_nobody(
    world: World, error: Exception, caplog: pytest.LogCaptureFixture
) -> None:
    world.fails, world.look = error, None
    found, _ = made()
    began = time.monotonic()
    with found:
        time.sleep(0.5)
    assert time.monotonic() - began < 5 and world.sent == []
    assert len([m for m in caplog.messages if m.startswith("Metrics are not written for now")]) == 1


def test_a_topic_that_was_deleted_is_made_again(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sampler, "_AGAIN", 0.3)
    found, _ = made()
    with found:
        until(lambda: len(world.sent) > 5, "samples for longer than it takes to try again")
        assert len(world.made) == 1
        world.lost = KeyError("no such topic")
        until(lambda: len(world.made) == 2, "the topic is made again")


def test_a_topic_that_others_make_is_not_made(world: World) -> None:
    found, _ = made(create_topics=False)
    with found:
        until(lambda: world.sent, "a sample")
    assert world.made == []
