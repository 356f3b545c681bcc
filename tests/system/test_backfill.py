"""Scheduled backfills in a real Airflow: ten days that are created at once, each published again once, while the stream runs; and a slice
that waits for the next bounded run."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterator
from typing import Any

import pytest
from confluent_kafka import Consumer, KafkaError, TopicPartition

from tests.system.test_dag import System, until

pytestmark = pytest.mark.long

BACKFILL, ROWS = "bottledwater_backfill", 200
CONF = {"tables": ["flights"], "drop_slot": "never", "output_format": "json"}


@pytest.fixture(scope="module")
def system(tmp_path_factory: pytest.TempPathFactory) -> Iterator[System]:
    started = System(tmp_path_factory.mktemp("backfill"))
    try:
        started.start()
        started.client.wait_for_dag(BACKFILL)
        started.execute(
            "CREATE TABLE public.flights (id bigint PRIMARY KEY, day date NOT NULL, delay int)",
            "INSERT INTO public.flights SELECT g, date '2026-03-01' + (g % 10)::int, g % 60"
            f" FROM generate_series(1, {10 * ROWS}) g",
            "ALTER TABLE public.flights OWNER TO cdc",
        )
        yield started
        started.watch.end()
    finally:
        started.stop()


def _published_again(system: System) -> Counter[tuple[str, str]]:
    """How many rows each live snapshot has published, by its id and their day."""
    consumer = Consumer(
        {
            "bootstrap.servers": system.data.kafka.bootstrap, "group.id": "test", "isolation.level": "read_committed",
            "enable.partition.eof": True, "auto.offset.reset": "earliest",
        }
    )  # fmt: skip
    consumer.assign([TopicPartition("flights", 0, 0)])
    found: Counter[tuple[str, str]] = Counter()
    while True:
        for message in consumer.consume(5000, 1.0):
            if message.error() is not None:
                assert message.error().code() == KafkaError._PARTITION_EOF
                consumer.close()
                return found
            label = dict(message.headers() or []).get("snapshot")
            if label:
                found[label.decode().partition("/")[0], json.loads(message.value())["day"]] += 1


def _backfills(system: System) -> list[dict[str, Any]]:
    runs = system.client.request("GET", f"dags/{BACKFILL}/dagRuns", params={"limit": 100})["dag_runs"]
    return [run for run in runs if run["run_type"] == "backfill"]


def _runs(system: System) -> Counter[str]:
    return Counter(run["state"] for run in _backfills(system))


def _why(system: System) -> str:
    failed = [run["dag_run_id"] for run in _backfills(system) if run["state"] == "failed"]
    return "\n".join(system.client.task_log(BACKFILL, each, "backfill", 1)[-3000:] for each in failed[:2])


def _set(system: System, **variables: str) -> None:
    for key, value in variables.items():
        system.client.request("POST", "variables", json={"key": key, "value": value})


def test_ten_days_are_published_again_once_each(system: System) -> None:
    _set(system, bottledwater_format="json")
    first = system.client.trigger("bottledwater", {**CONF, "bounded": True})
    assert system.client.wait_run("bottledwater", first, 300)["state"] == "success", system.why(first)
    stream = system.client.trigger("bottledwater", CONF)
    until("it streams", lambda: system.task(stream, "stream")["state"] == "deferred", 200)
    # what the choice Backfill of the trigger dialog sends
    system.client.request("PATCH", f"dags/{BACKFILL}", json={"is_paused": False})
    system.client.request(
        "POST",
        "backfills",
        json={
            "dag_id": BACKFILL, "from_date": "2026-03-01T00:00:00Z", "to_date": "2026-03-10T00:00:00Z", "max_active_runs": 4,
            "run_backwards": False, "dag_run_conf": {}, "reprocess_behavior": "none",
        },
    )  # fmt: skip
    until("ten runs have ended", lambda: _runs(system)["success"] + _runs(system)["failed"] >= 10, 400)
    assert _runs(system)["failed"] == 0, _why(system)
    found = _published_again(system)
    days = Counter(day for _, day in found)
    assert set(found.values()) == {ROWS}
    assert {day: days[day] for day in (f"2026-03-{n:02d}" for n in range(1, 11))} == {
        f"2026-03-{n:02d}": 1 for n in range(1, 11)
    }
    system.client.set_task_state("bottledwater", stream, "stream", "failed")
    until("the job has ended", lambda: not system.jobs(), 60)


def test_a_slice_waits_for_the_next_bounded_run(system: System) -> None:
    before = _published_again(system)
    again = next(run for run in _backfills(system) if run["data_interval_start"].startswith("2026-03-04"))["dag_run_id"]
    system.client.clear(BACKFILL, again, ["backfill"])
    until("it waits", lambda: system.client.task_instances(BACKFILL, again)[0]["state"] == "deferred", 60)
    # its schedule runs it at once
    system.client.request("PATCH", "dags/bottledwater_scheduled", json={"is_paused": False})
    until("it has ended", lambda: system.client.task_instances(BACKFILL, again)[0]["state"] == "success", 300)
    system.client.request("PATCH", "dags/bottledwater_scheduled", json={"is_paused": True})
    more = _published_again(system) - before
    assert {day: n for (_, day), n in more.items()} == {"2026-03-04": ROWS}
