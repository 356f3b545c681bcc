"""Scheduled backfills in a real Airflow: ten days that are created at once, each published again once, while the stream
runs; a damaged topic that the watch finds and a backfill mends; and a slice that waits for the next bounded run. All
DAGs have the defaults of their forms."""

from __future__ import annotations

import shutil
import sys
from collections import Counter
from collections.abc import Iterator
from typing import Any

import pytest
from confluent_kafka import Consumer, KafkaError, Message, Producer, TopicPartition

from airflow_bottledwater.local.process import run
from tests.support.verifying import VERIFY, found_equal, holds_snapshot, start_watch, verified_in_airflow, watched
from tests.system.test_dag import DAG, DAGS, TASKS, System, Topics, until

pytestmark = pytest.mark.long

BACKFILL, ROWS = "bottledwater_backfill", 200
#: the DAG of the watch, with the schedule of every minute
OFTEN = "watch_each_minute"
CONF = {"tables": ["flights"], "drop_slot": "never"}
#: a bounded run on a server whose other databases write more than its sensor accepts as lag
BEHIND = """
from airflow.sdk import DAG
from airflow_bottledwater import BottledWaterTaskGroup, Kafka, Pipeline, Source

with DAG(dag_id="behind", schedule=None):
    pipeline = Pipeline("behind", source=Source(tables="flights"), kafka=Kafka(topic_prefix="behind"))
    BottledWaterTaskGroup("cdc", pipeline=pipeline, bounded=True, drop_when="always", max_lag=-1)
"""


@pytest.fixture(scope="module")
def system(tmp_path_factory: pytest.TempPathFactory) -> Iterator[System]:
    dags = tmp_path_factory.mktemp("dags")
    shutil.copytree(DAGS, dags, dirs_exist_ok=True)
    nightly = (DAGS / "bottledwater_verify.py").read_text()
    (dags / "often.py").write_text(nightly.replace(f'"{VERIFY}"', f'"{OFTEN}"').replace('"@daily"', '"* * * * *"'))
    (dags / "behind.py").write_text(BEHIND)
    started = System(tmp_path_factory.mktemp("backfill"), dags)
    try:
        started.start()
        started.client.wait_for_dag(BACKFILL)
        started.execute(
            "CREATE TABLE public.flights (id bigint PRIMARY KEY, time_hour timestamptz NOT NULL, delay int)",
            "INSERT INTO public.flights SELECT g, timestamptz '2026-03-01 23:59Z' + (g % 10) * interval '1 day', g % 60"
            f" FROM generate_series(1, {10 * ROWS}) g",
            "ALTER TABLE public.flights OWNER TO cdc",
        )
        yield started
        started.watch.end()
    finally:
        started.stop()


def _records(system: System) -> list[Message]:
    """All committed records of the topic."""
    consumer = Consumer(
        {
            "bootstrap.servers": system.data.kafka.bootstrap, "group.id": "test", "isolation.level": "read_committed",
            "enable.partition.eof": True, "auto.offset.reset": "earliest",
        }
    )  # fmt: skip
    consumer.assign([TopicPartition("flights", 0, 0)])
    found: list[Message] = []
    while True:
        for message in consumer.consume(5000, 1.0):
            if message.error() is not None:
                assert message.error().code() == KafkaError._PARTITION_EOF
                consumer.close()
                return found
            found.append(message)


def _published_again(system: System) -> Counter[tuple[str, str]]:
    """How many rows each live snapshot has published, by its id and their day."""
    topics = Topics(system.data, "flights")
    found: Counter[tuple[str, str]] = Counter()
    for message in _records(system):
        label = dict(message.headers() or []).get("snapshot")
        if label:
            day = topics.decode(message.value())["time_hour"].strftime("%Y-%m-%d")
            found[label.decode().partition("/")[0], day] += 1
    topics.close()
    return found


def _damage(system: System, damaged: int, other: int) -> None:
    """Publish the row of another id under an id's key, as a program that has no business to write to the topic."""
    topics = Topics(system.data, "flights")
    known = {topics.decode(message.key())["id"]: message for message in _records(system)}
    topics.close()
    producer = Producer({"bootstrap.servers": system.data.kafka.bootstrap})
    producer.produce("flights", known[other].value(), known[damaged].key(), 0)
    assert not producer.flush(60)


def _backfills(system: System) -> list[dict[str, Any]]:
    runs = system.client.request("GET", f"dags/{BACKFILL}/dagRuns", params={"limit": 100})["dag_runs"]
    return [run for run in runs if run["run_type"] == "backfill"]


def _runs(system: System) -> Counter[str]:
    return Counter(run["state"] for run in _backfills(system))


def _why(system: System) -> str:
    failed = [run["dag_run_id"] for run in _backfills(system) if run["state"] == "failed"]
    return "\n".join(system.client.task_log(BACKFILL, each, "backfill", 1)[-3000:] for each in failed[:2])


def _slice(system: System, day: str) -> str:
    """The run of a day."""
    return next(run for run in _backfills(system) if run["data_interval_start"].startswith(day))["dag_run_id"]


def _again(system: System, run: str, timeout: float) -> dict[str, Any]:
    """Wait for a cleared slice; returns its task's result."""
    until("it has ended", lambda: system.client.task_instances(BACKFILL, run)[0]["state"] == "success", timeout)
    path = f"dags/{BACKFILL}/dagRuns/{run}/taskInstances/backfill/xcomEntries/return_value"
    return dict(system.client.request("GET", path, params={"deserialize": True})["value"])


def _stream(system: System) -> str:
    runs = system.client.request("GET", f"dags/{DAG}/dagRuns", params={"limit": 100})["dag_runs"]
    (running,) = (run["dag_run_id"] for run in runs if run["state"] == "running")
    return str(running)


def test_ten_days_are_published_again_once_each(system: System) -> None:
    first = system.client.trigger(DAG, {**CONF, "bounded": True})
    assert system.client.wait_run(DAG, first, 300)["state"] == "success", system.why(first)
    assert {t["task_id"]: t["state"] for t in system.client.task_instances(DAG, first)} == dict.fromkeys(
        TASKS, "success"
    )
    stream = system.client.trigger(DAG, CONF)
    until("it streams", lambda: system.task(stream, "stream")["state"] == "deferred", 200)
    # what the choice Backfill of the trigger dialog sends
    system.client.request("PATCH", f"dags/{BACKFILL}", json={"is_paused": False})
    system.client.request(
        "POST",
        "backfills",
        json={
            "dag_id": BACKFILL, "from_date": "2026-03-01T00:00:00Z", "to_date": "2026-03-10T00:00:00Z",
            "max_active_runs": 4, "run_backwards": False, "dag_run_conf": {}, "reprocess_behavior": "none",
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
    assert verified_in_airflow(system.client, {})["rows"] == 10 * ROWS


def test_the_command_publishes_days_again(system: System) -> None:
    before = _published_again(system)
    airflow = [sys.executable, "-m", "airflow", "backfill", "create", "--dag-id", BACKFILL]
    days = ["--from-date", "2026-03-02", "--to-date", "2026-03-03", "--reprocess-behavior", "completed"]
    run([*airflow, *days], "airflow backfill create", cwd=system.airflow.folder, env=system.airflow.environment())
    until(
        "two days are published again",
        lambda: sum((_published_again(system) - before).values()) >= 2 * ROWS or _runs(system)["failed"],
        200,
    )
    until("all runs have ended", lambda: _runs(system)["success"] + _runs(system)["failed"] >= 10)
    assert _runs(system)["failed"] == 0, _why(system)
    more = _published_again(system) - before
    assert sorted((day, n) for (_, day), n in more.items()) == [("2026-03-02", ROWS), ("2026-03-03", ROWS)]


def test_the_watch_is_run_by_its_schedule(system: System) -> None:
    system.client.wait_for_dag(OFTEN)
    system.client.request("PATCH", f"dags/{OFTEN}", json={"is_paused": False})
    path = f"dags/{OFTEN}/dagRuns"
    run = until("a run is due", lambda: system.client.request("GET", path, params={"limit": 1})["dag_runs"])[0]
    assert run["run_type"] == "scheduled"
    assert found_equal(system.client, run["dag_run_id"], dag=OFTEN)["rows"] == 10 * ROWS
    system.client.request("PATCH", f"dags/{OFTEN}", json={"is_paused": True})


def test_the_watch_names_a_damaged_row_and_publishing_its_day_again_mends_it(system: System) -> None:
    _damage(system, damaged=7, other=8)
    state, _, log = watched(system.client, start_watch(system.client, {}))
    assert state == "failed"
    assert "Topics differ from their tables: public.flights: 1 different" in log
    assert "The first keys that differ: public.flights (id = 7)." in log
    assert "public.flights: different: id = 7: id is 8 in the topic and 7 in the table" in log
    again = _slice(system, "2026-03-08")
    system.client.clear(BACKFILL, again, ["backfill"])
    until("it runs", lambda: system.client.task_instances(BACKFILL, again)[0]["state"] != "success")
    found = _again(system, again, 120)
    assert (found["rows"], found["left_out"]) == (ROWS, 0)
    verified_in_airflow(system.client, {})
    system.client.set_task_state(DAG, _stream(system), "stream", "failed")
    until("the job has ended", lambda: not system.jobs())


def test_a_slice_waits_for_the_next_bounded_run(system: System) -> None:
    before = _published_again(system)
    again = _slice(system, "2026-03-04")
    system.client.clear(BACKFILL, again, ["backfill"])
    until("it waits", lambda: system.client.task_instances(BACKFILL, again)[0]["state"] == "deferred")
    # so does the verification
    verification = start_watch(system.client, {})
    until("it holds its snapshot", lambda: holds_snapshot(system.execute, "flights"))
    # its schedule runs it at once
    system.client.request("PATCH", "dags/bottledwater_bounded", json={"is_paused": False})
    _again(system, again, 300)
    more = _published_again(system) - before
    assert {day: n for (_, day), n in more.items()} == {"2026-03-04": ROWS}
    found_equal(system.client, verification)
    system.client.request("PATCH", "dags/bottledwater_bounded", json={"is_paused": True})


def test_the_sensor_does_not_wait_for_a_slot_whose_stream_has_ended(system: System) -> None:
    system.client.wait_for_dag("behind")
    run = system.client.trigger("behind", {})
    assert system.client.wait_run("behind", run, 300)["state"] == "success"
    states = {t["task_id"]: t["state"] for t in system.client.task_instances("behind", run)}
    assert states == {f"cdc.{name}": "skipped" if name == "wait_caught_up" else "success" for name in TASKS}
    assert system.slot("behind") == (False, False)
