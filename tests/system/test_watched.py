"""Whoever watches outlives what is watched, in a real Airflow: rows are removed, tasks are cleared and tried again,
DAGs are paused, brokers are away and hosts restart. Each time ``bottledwater_health`` says what is so."""

from __future__ import annotations

import contextlib
import datetime
import itertools
import json
import os
import shutil
import signal
import sys
import time
from collections.abc import Iterator
from typing import Any

import pytest

from airflow_bottledwater.jobs import supervise
from airflow_bottledwater.kafka.offsets import RangeReader
from airflow_bottledwater.kafka.topics import Topics
from airflow_bottledwater.local.process import run
from tests.system.test_dag import DAG, DAGS, Stream, System, until

pytestmark = pytest.mark.long

HEALTH, CONTROL, BOUNDED, BACKFILL = (
    "bottledwater_health",
    "bottledwater_control",
    "bottledwater_bounded",
    "bottledwater_backfill",
)
#: a pipeline whose every death uses up a try
RETRIED = """
from datetime import timedelta
from airflow_bottledwater import Kafka, Pipeline, Source

beside = Pipeline("beside", source=Source(tables="beside"), kafka=Kafka(topic_prefix="b", format="json")).dag(
    stream={"restarts": 0}, default_args={"retries": 5, "retry_delay": timedelta(seconds=3)}
)
"""

#: a DAG that runs when tables have changed, and writes down what it has read
WAKES = """
import json
import os

from airflow.sdk import DAG, Asset, AssetWatcher, task
from airflow_bottledwater import ChangesHook, TableChangedTrigger

trigger = TableChangedTrigger(pipeline="life", tables=["orders", "ticks"], poll_interval=2.0)
life = Asset("life", watchers=[AssetWatcher(name="life", trigger=trigger)])

with DAG("on_life", schedule=[life], catchup=False, max_active_runs=1):

    @task(inlets=[life])
    def read(**context):
        changes = ChangesHook.of_run(context, life)
        found = [[c.topic, c.partition, c.offset] for c in ChangesHook().records(changes)]
        with open(os.environ["AIRFLOW_HOME"] + "/read.jsonl", "a") as file:
            file.write(json.dumps({"changes": changes.as_event(), "records": found}) + "\\n")

    read()
"""

#: a DAG that works long by the changes of a table that is quiet, so that several events come meanwhile
BURST = """
import json
import os
import time

from airflow.sdk import DAG, Asset, AssetWatcher, task
from airflow_bottledwater import ChangesHook, TableChangedTrigger

trigger = TableChangedTrigger(pipeline="beside", tables=["beside"], poll_interval=2.0)
beside = Asset("beside", watchers=[AssetWatcher(name="beside", trigger=trigger)])

with DAG("on_beside", schedule=[beside], catchup=False, max_active_runs=1):

    @task(inlets=[beside])
    def read(**context):
        found = [json.loads(c.key)["id"] for c in ChangesHook().records(ChangesHook.of_run(context, beside))]
        with open(os.environ["AIRFLOW_HOME"] + "/burst.jsonl", "a") as file:
            file.write(json.dumps(found) + "\\n")
        time.sleep(40)

    read()
"""


@pytest.fixture(scope="module")
def system(tmp_path_factory: pytest.TempPathFactory) -> Iterator[System]:
    dags = tmp_path_factory.mktemp("dags")
    shutil.copytree(DAGS, dags, dirs_exist_ok=True)
    # triggered by hand, so that nothing else looks meanwhile
    health = (DAGS / f"{HEALTH}.py").read_text()
    (dags / f"{HEALTH}.py").write_text(
        health.replace('"*/5 * * * *"', "None").replace("creation=True", "creation=False")
    )
    (dags / "beside.py").write_text(RETRIED)
    (dags / "on_life.py").write_text(WAKES)
    (dags / "on_beside.py").write_text(BURST)
    started = System(tmp_path_factory.mktemp("watched"), dags)
    try:
        started.start()
        for each in (HEALTH, CONTROL, BOUNDED, BACKFILL, "beside", "on_life", "on_beside"):
            started.client.wait_for_dag(each)
        yield started
        started.watch.end()
    finally:
        started.stop()


@pytest.fixture(scope="module")
def stream(system: System) -> Iterator[Stream]:
    started = Stream(system)
    yield started
    started.writers.end()
    started.topics.close()


@pytest.fixture(scope="module")
def beside(system: System, stream: Stream) -> str:
    """A second pipeline, whose watch is in the same triggerer."""
    system.execute(
        "CREATE TABLE public.beside (id int PRIMARY KEY)",
        "INSERT INTO public.beside VALUES (1)",
        "ALTER TABLE public.beside OWNER TO cdc",
    )
    run_id = system.client.trigger("beside")
    until("it streams beside", lambda: state(system, "beside", run_id) == "deferred" and system.slot("beside")[1], 900)
    return run_id


def state(system: System, dag: str, run_id: str, task: str = "stream") -> str:
    return str(next(t["state"] for t in system.client.task_instances(dag, run_id) if t["task_id"] == task))


def ended(system: System, dag: str, conf: dict[str, Any], task: str, timeout: float = 240) -> tuple[str, str]:
    """How a run of a DAG ends, and the log of its task."""
    run_id = system.client.trigger(dag, conf)
    found = system.client.wait_run(dag, run_id, timeout)["state"]
    tried = next(t["try_number"] for t in system.client.task_instances(dag, run_id) if t["task_id"] == task)
    return found, system.client.task_log(dag, run_id, task, max(1, tried))


def healthy(system: System, *pipelines: str) -> str:
    """The DAG of the health is green; what it says."""
    found, log = ended(system, HEALTH, {"pipelines": list(pipelines or ("life",))}, "health")
    assert found == "success", log[-3000:]
    return log


def ill(system: System, *pipelines: str) -> str:
    """The DAG of the health is red; what it says."""
    found, log = ended(system, HEALTH, {"pipelines": list(pipelines or ("life",))}, "health")
    assert found == "failed", log[-3000:]
    return log


@contextlib.contextmanager
def paused(system: System, dag: str) -> Iterator[None]:
    system.client.request("PATCH", f"dags/{dag}", json={"is_paused": True})
    try:
        yield
    finally:
        system.client.request("PATCH", f"dags/{dag}", json={"is_paused": False})


def remove_rows(system: System) -> None:
    """``airflow db clean``, as production runs it at night, of everything that is older than a moment."""
    before = datetime.datetime.now(datetime.UTC) - datetime.timedelta(seconds=5)
    run(
        [
            sys.executable, "-m", "airflow", "db", "clean", "--clean-before-timestamp", before.isoformat(), "--yes",
            "--skip-archive", "--tables", "dag_run,task_instance,xcom,log,trigger",
        ],
        "airflow db clean", cwd=system.folder, env=system.airflow.environment(),
    )  # fmt: skip


def test_a_stream_is_green_and_a_bounded_run_beside_it_ends_nothing(system: System, stream: Stream) -> None:
    folder = stream.deferred()
    assert "life: streaming" in healthy(system)
    system.client.request("PATCH", f"dags/{BOUNDED}", json={"is_paused": False})
    found, log = ended(system, BOUNDED, {"slot": "life"}, "stream")
    system.client.request("PATCH", f"dags/{BOUNDED}", json={"is_paused": True})
    assert found == "failed" and "is held by a stream that lives" in log
    assert f"'{stream.run_id}'" in log and f"'{DAG}'" in log
    assert stream.deferred() == folder
    stream.nothing_lost_or_twice()


def test_a_dag_that_wakes_by_changes_reads_each_of_them_once(system: System, stream: Stream) -> None:
    stream.streaming()
    until("it has run", lambda: len(_wakings(system)) >= 2, 240)
    # twice, since what is known of the last event may be lost or not
    for pause in (4.0, 7.0):
        triggerer = system.airflow.components["triggerer"]
        time.sleep(pause)
        triggerer.kill()
        triggerer.start()
        runs = len(_wakings(system))
        # a killed triggerer counts as alive for 30 s
        until("it runs on", lambda runs=runs: len(_wakings(system)) >= runs + 2, 240)
    system.client.request("PATCH", "dags/on_life", json={"is_paused": True})
    time.sleep(20)
    missed = len(_wakings(system))
    system.client.request("PATCH", "dags/on_life", json={"is_paused": False})
    until("it has caught up", lambda: len(_wakings(system)) >= missed + 2, 240)
    # the snapshot has told of its topics, too
    events = system.client.request("GET", "assets/events", params={"limit": 100, "order_by": "timestamp"})
    told = [each["extra"] for each in events["asset_events"]]
    rows = {each["table"]: each["rows"] for each in told if each.get("by") == "snapshot"}
    assert rows.get("public.ticks") == 10, told[:5]
    found = _wakings(system)
    ranges = [each["changes"] for each in found if each["records"]]
    for before, after in itertools.pairwise(ranges):
        assert before["to"] == after["from"]
    read = sorted(tuple(place) for each in found for place in each["records"])
    begins = {each["topic"]: each["from"][0] for each in ranges[0]["tables"].values()}
    ends = {each["topic"]: each["to"][0] for each in ranges[-1]["tables"].values()}
    assert read == sorted(
        (topic, 0, offset)
        for topic in begins
        for offset in _offsets(system, topic)
        if begins[topic] <= offset < ends[topic]
    )
    system.client.request("PATCH", "dags/on_life", json={"is_paused": True})


def _wakings(system: System) -> list[dict[str, Any]]:
    """What the runs have read that were woken by changes."""
    file = system.airflow.folder / "read.jsonl"
    return [json.loads(line) for line in file.read_text().splitlines()] if file.exists() else []


def _offsets(system: System, topic: str) -> list[int]:
    """Of all committed records of a topic with one partition."""
    kafka = {"bootstrap.servers": system.data.kafka.bootstrap}
    with RangeReader(kafka) as reader:
        end = Topics(kafka).ends(topic, 1, committed=True)[0]
        return [message.offset() or 0 for message in reader.read(topic, {0: 0}, {0: end})]


def test_the_last_events_of_a_burst_have_a_run(system: System, beside: str) -> None:
    file, ids = system.airflow.folder / "burst.jsonl", itertools.count(2)

    def runs() -> list[list[int]]:
        return [json.loads(line) for line in file.read_text().splitlines()] if file.exists() else []

    def insert() -> int:
        time.sleep(6)
        system.execute(f"INSERT INTO public.beside VALUES ({(last := next(ids))})")
        return last

    until("the first event has a run", lambda: insert() and runs(), 240)
    last = [insert() for _ in range(4)][-1]
    until("it has read the last event", lambda: last in itertools.chain(*runs()), 300)
    read = list(itertools.chain(*runs()))
    assert read == list(range(read[0], last + 1)), runs()
    # what is read wakes nobody
    count = len(runs())
    time.sleep(130)
    assert len(runs()) <= count + 1, runs()
    system.client.request("PATCH", "dags/on_beside", json={"is_paused": True})


@pytest.mark.parametrize("downstream", [False, True])
def test_a_task_that_is_cleared_keeps_its_alarm(system: System, stream: Stream, downstream: bool) -> None:
    old = stream.streaming()
    system.client.clear(DAG, stream.run_id, ["stream"], downstream=downstream)
    assert stream.deferred(but=old) != old
    assert stream.task("watch_errors")["state"] == "deferred"
    healthy(system)
    stream.nothing_lost_or_twice()


def test_a_retry_keeps_the_alarm(system: System, beside: str) -> None:
    (folder,) = {f for f in system.jobs().values() if '"beside"' in _settings(system, f)}
    old = [pid for pid, each in system.jobs().items() if each == folder]
    for pid in old:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
    until(
        "it is tried again", lambda: _tries(system, beside) > 1 and state(system, "beside", beside) == "deferred", 240
    )
    until("it streams", lambda: system.slot("beside")[1])
    assert state(system, "beside", beside, "watch_errors") == "deferred"
    healthy(system, "beside")


def _settings(system: System, folder: str) -> str:
    (file,) = (system.airflow.folder / "bottledwater" / folder).glob("pipeline-*.json")
    return file.read_text()


def _tries(system: System, run_id: str) -> int:
    return int(
        next(t["try_number"] for t in system.client.task_instances("beside", run_id) if t["task_id"] == "stream")
    )


def test_a_broker_that_is_away_replaces_no_job_and_ends_no_alarm(system: System, stream: Stream, beside: str) -> None:
    stream.streaming()
    before = {folder for folder in system.jobs().values() if folder.startswith("stream-")}
    assert len(before) == 2
    system.data.kafka.stop()
    time.sleep(105)
    system.data.kafka.start()
    stream.nothing_lost_or_twice()
    time.sleep(30)
    assert {folder for folder in system.jobs().values() if folder.startswith("stream-")} == before
    for dag, run_id in ((DAG, stream.run_id), ("beside", beside)):
        assert [state(system, dag, run_id, task) for task in ("stream", "watch_errors")] == ["deferred"] * 2
    healthy(system, "life", "beside")
    system.client.set_run_state("beside", beside, "success")


def test_a_paused_dag_whose_job_is_killed_is_red_and_goes_on_when_it_is_unpaused(
    system: System, stream: Stream
) -> None:
    old = stream.streaming()
    with paused(system, DAG):
        for pid in [pid for pid, folder in system.jobs().items() if folder == old]:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        until("its silence is red", lambda: "has not reported for" in _looked(system), 240)
    assert stream.deferred(but=old) != old
    time.sleep(15)
    assert stream.task("watch_errors")["state"] in ("deferred", "scheduled", "queued", "running")
    healthy(system)
    stream.nothing_lost_or_twice()


def _looked(system: System) -> str:
    return ended(system, HEALTH, {"pipelines": ["life"]}, "health")[1]


def test_a_host_that_restarts_streams_again(system: System, stream: Stream) -> None:
    old = stream.streaming()
    system.airflow.stop()
    supervise.stop(system.airflow.folder / "bottledwater" / old, timeout=5, asked=False)
    assert system.jobs() == {}
    system.airflow.start()
    assert stream.deferred(but=old) != old
    healthy(system)
    stream.nothing_lost_or_twice()


def test_rows_that_are_removed_end_nothing_and_the_next_run_goes_on(system: System, stream: Stream) -> None:
    old = stream.streaming()
    leaders = system.leaders(old)
    time.sleep(10)
    remove_rows(system)
    assert not [r for r in _runs(system) if r["dag_run_id"] == stream.run_id]
    time.sleep(45)
    assert system.leaders(old) == leaders and system.slot("life") == (True, True)
    stream.nothing_lost_or_twice()
    log = _triggerer_log(system)
    assert "This ends nothing" in log and "ended by a user" not in log, log[-5000:]
    assert "has no row any more" in healthy(system)
    stream.begin("retired")
    assert stream.deferred(but=old) != old
    assert "has no row any more" not in healthy(system)
    stream.nothing_lost_or_twice()


def test_a_file_that_is_renamed_and_a_task_that_is_deleted_end_nothing(system: System, stream: Stream) -> None:
    old = stream.streaming()
    leaders = system.leaders(old)
    file = system.dags / f"{DAG}.py"
    file.rename(system.dags / "renamed.py")
    until("Airflow knows the file's new name", lambda: _file(system) == "renamed.py", 240)
    time.sleep(20)
    assert stream.deferred() == old and system.leaders(old) == leaders
    system.client.request("DELETE", f"dags/{DAG}/dagRuns/{stream.run_id}/taskInstances/stream")
    time.sleep(30)
    if "has no row any more" in healthy(system):
        assert system.leaders(old) == leaders
        system.client.set_run_state(DAG, stream.run_id, "success")
        system.client.wait_run(DAG, stream.run_id, 120)  # failed: Airflow lacks a task of it
        assert system.leaders(old) == leaders and system.slot("life") == (True, True)
        stream.begin("retired")
    # or the scheduler gives the run another one, which takes the slot over, too
    assert stream.deferred(but=old) != old
    assert "ended by a user" not in _triggerer_log(system)
    healthy(system)
    stream.nothing_lost_or_twice()


def _triggerer_log(system: System) -> str:
    kept = [system.airflow.folder / "triggerer.log", *(system.airflow.folder / "logs").rglob("*.trigger.*")]
    return "".join(path.read_text(errors="replace") for path in kept)


def _file(system: System) -> str:
    return str(system.client.request("GET", f"dags/{DAG}")["relative_fileloc"])


def _runs(system: System) -> list[dict[str, Any]]:
    return list(system.client.request("GET", f"dags/{DAG}/dagRuns", params={"limit": 100})["dag_runs"])


def test_a_single_run_of_the_backfill_for_any_day_does_its_work(system: System, stream: Stream) -> None:
    stream.streaming()
    # only one row is of that day, so that it alone is published twice
    conf = {"slot": "life", "tables": ["orders"], "column": "CASE id WHEN 1 THEN to_timestamp(0) ELSE now() END"}
    system.client.request("PATCH", f"dags/{BACKFILL}", json={"is_paused": False})
    body = {"logical_date": "1970-01-02T00:00:00Z", "conf": conf}
    run_id = system.client.request("POST", f"dags/{BACKFILL}/dagRuns", json=body)["dag_run_id"]
    assert system.client.wait_run(BACKFILL, run_id, 240)["state"] == "success"
    (task,) = system.client.task_instances(BACKFILL, run_id)
    log = system.client.task_log(BACKFILL, run_id, task["task_id"], task["try_number"])
    assert task["state"] == "success" and "1 rows of public.orders are published again" in log
    orders = stream.topics.read()["life.orders"]
    again = [i for i, (key, _) in enumerate(orders) if key["id"] == 1]
    assert len(again) == 2
    del orders[again[1]]
    system.client.request("PATCH", f"dags/{BACKFILL}", json={"is_paused": True})


def test_a_pipeline_is_stopped_started_and_retired_by_a_dag(system: System, stream: Stream) -> None:
    old = stream.streaming()
    assert ended(system, CONTROL, {"slot": "life", "action": "stop"}, "control")[0] == "success"
    assert system.client.wait_run(DAG, stream.run_id, 120)["state"] == "success"
    assert system.slot("life") == (True, False)
    healthy(system)
    conf = {"tables": ["orders", "ticks"], "topic_prefix": "life"}
    found, log = ended(system, CONTROL, {"slot": "life", "action": "start", "dag_id": DAG, "conf": conf}, "control")
    assert found == "success", log
    stream.run_id = max(_runs(system), key=lambda each: each["run_after"])["dag_run_id"]
    assert stream.deferred(but=old) != old
    stream.nothing_lost_or_twice()
    healthy(system)
    assert ended(system, CONTROL, {"slot": "life", "action": "retire"}, "control")[0] == "success"
    assert system.client.wait_run(DAG, stream.run_id, 120)["state"] == "success"
    assert system.slot("life") == (False, False)
    # who watches it by its name is told to do so no longer
    assert "If it was retired, take it out" in ill(system)
