"""Triggers: what is stored of them, and what they make of what they see."""

from __future__ import annotations

import asyncio
import json
import re
import threading
import time
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest

from airflow_bottledwater.errors import ConnectionNotFound, Outage, Refused, StateError
from airflow_bottledwater.hooks import tasks
from airflow_bottledwater.hooks.pipeline import PipelineHook
from airflow_bottledwater.jobs import identity as identities
from airflow_bottledwater.jobs import leftovers, orphans, stop
from airflow_bottledwater.jobs.watch import Ended
from airflow_bottledwater.model.job import Owner
from airflow_bottledwater.model.outcome import Outcome
from airflow_bottledwater.model.problem import Problem
from airflow_bottledwater.operators.stream import StreamToKafkaOperator
from airflow_bottledwater.pipeline.description import Description, Source
from airflow_bottledwater.state.control_records import StatusRecord, encode, status_key
from airflow_bottledwater.state.control_topic import ControlTopic
from airflow_bottledwater.triggers import job, slot_lag, stream_error
from airflow_bottledwater.triggers import watching as watch_of_triggers
from airflow_bottledwater.triggers.backfill import BackfillTrigger
from airflow_bottledwater.triggers.dead_letters import DeadLettersTrigger
from airflow_bottledwater.triggers.job import JobTrigger, PauseTrigger
from airflow_bottledwater.triggers.slot_lag import SlotLagTrigger
from airflow_bottledwater.triggers.stored import stored_again
from airflow_bottledwater.triggers.stream_error import StreamErrorTrigger
from tests.support.status import status_of

HOOK: dict[str, Any] = {
    "postgres_conn_id": "postgres_default",
    "kafka_conn_id": "kafka_default",
    "schema_registry_conn_id": None,
    "settings": {"slot": "orders", "tables": ["a", "b"], "format": "json"},
}
IDENTITY = {"id": "j", "folder": "/tmp/nowhere", "host": "elsewhere", "application": "", "master": "yarn"}

#: system identifier and timeline
SERVER = "7/00000001"


def watching(**arguments: Any) -> JobTrigger:
    return JobTrigger(**{"identity": IDENTITY, "hook": HOOK, "poll_interval": 0.01, **arguments})


@pytest.mark.parametrize(
    "trigger",
    [
        JobTrigger(identity=IDENTITY, hook=HOOK, poll_interval=2.5, deadline=1e9),
        JobTrigger(identity=IDENTITY, hook=HOOK),
        PauseTrigger(until=1e9),
        SlotLagTrigger(
            postgres_conn_id="pg", slot="orders", max_lag=5, poll_interval=1.5, stream_task_id="group.stream"
        ),
        SlotLagTrigger(
            postgres_conn_id="pg", slot="s", max_lag=5, max_lag_seconds=9.0, wal_status="extended", min_safe_wal=7
        ),
        DeadLettersTrigger(hook=HOOK, max_open=2, tables=["a", "s.*"], poll_interval=5.0),
        StreamErrorTrigger(
            hook=HOOK,
            cluster={"system_identifier": "1", "timeline": 1, "database": "d", "version": 160000},
            earlier="j0",
            max_silence=50.0,
            max_dead_letters=3,
        ),
    ],
    ids=lambda trigger: type(trigger).__name__,
)
def test_a_trigger_is_stored_as_plain_values(trigger: Any) -> None:
    from airflow.sdk.module_loading import import_string

    path, arguments = trigger.serialize()
    kept = json.loads(json.dumps(arguments))
    again = import_string(path)(**kept)
    assert type(again) is type(trigger)
    assert again.serialize() == (path, kept)


def test_a_trigger_is_stored_without_secrets(connections: str) -> None:
    operator = StreamToKafkaOperator(task_id="stream", pipeline=Description(source=Source(tables=("a",))))
    assert operator.pipeline_hook.pipeline().kafka["sasl.password"] == connections
    _, arguments = JobTrigger(identity=IDENTITY, hook=operator.pipeline_hook.arguments()).serialize()
    assert connections[:5] not in json.dumps(arguments, ensure_ascii=False)


def events(trigger: Any) -> list[dict[str, Any]]:
    async def collect() -> list[dict[str, Any]]:
        return [event.payload async for event in trigger.run()]

    return asyncio.run(collect())


@pytest.fixture(autouse=True)
def pauses(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """The pauses that are asked for; none is made."""
    asked: list[float] = []
    pause = asyncio.sleep

    def sleep(seconds: float) -> Any:
        asked.append(seconds)
        return pause(0)

    monkeypatch.setattr(asyncio, "sleep", sleep)
    return asked


@pytest.fixture(autouse=True)
def readers_of_this_test(monkeypatch: pytest.MonkeyPatch) -> None:
    """None that another test has left."""
    monkeypatch.setattr(ControlTopic, "_of", {})


class Looks:
    """What a watch finds, look for look: None while the job runs, an error, or its end."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, *found: Ended | Exception | None) -> None:
        self.found, self.closed = list(found), 0
        monkeypatch.setattr(job, "JobWatch", lambda *_, **__: self)

    def fetch(self) -> Ended | None:
        found = self.found.pop(0) if self.found else None
        if isinstance(found, Exception):
            raise found
        return found

    def close(self) -> None:
        self.closed += 1


@pytest.mark.usefixtures("connections")
def test_a_job_that_ended_is_one_event_with_its_outcome(monkeypatch: pytest.MonkeyPatch) -> None:
    end = Ended(Outcome(ok=True, counts={"position": "0/5"}), log="the last line")
    # with a password that was changed, it begins again
    looks = Looks(monkeypatch, None, Outage("Kafka is away"), Refused("Kafka rejected the client"), end)
    (event,) = events(watching())
    assert (event.pop("status"), event.pop("identity")) == ("ended", IDENTITY)
    assert Ended.of_event(json.loads(json.dumps(event))) == end
    assert looks.closed == 2


@pytest.mark.usefixtures("connections")
def test_an_outage_that_lasts_begins_the_watch_anew(monkeypatch: pytest.MonkeyPatch) -> None:
    """Kafka may have another address now, which only the connection knows."""
    end, asked = Ended(Outcome(ok=True)), list[int]()
    looks = Looks(monkeypatch, Outage("Kafka is away"), Outage("Kafka is away"), end)
    monkeypatch.setattr(watch_of_triggers, "ANEW", 0.0)
    monkeypatch.setattr(job, "JobWatch", lambda pipeline, *_, past, **__: asked.append(past) or looks)
    assert len(events(watching())) == 1
    # of its log, what was passed on is not passed on again
    assert (looks.closed, asked) == (3, [64 << 10, 0, 0])


@pytest.mark.usefixtures("connections")
def test_the_deadline_is_one_event_and_stops_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    looks = Looks(monkeypatch)
    assert events(watching(deadline=time.time() - 1)) == [{"status": "timeout", "identity": IDENTITY}]
    # also while nothing can be seen
    looks.found = [Outage("Kafka is away")]
    assert events(watching(deadline=time.time() - 1)) == [{"status": "timeout", "identity": IDENTITY}]


@pytest.mark.usefixtures("connections")
def test_no_task_is_woken_at_once(monkeypatch: pytest.MonkeyPatch, pauses: list[float]) -> None:
    """Airflow's scheduler may still take the end of the deferring process for the end of the task."""
    Looks(monkeypatch, Ended(Outcome(ok=True)))
    events(watching())
    assert events(PauseTrigger(until=time.time() - 5)) == [{"status": "over"}]
    assert pauses == [5.0, 5.0]


def test_a_pause_lasts_until_its_time(pauses: list[float]) -> None:
    assert events(PauseTrigger(until=time.time() + 300)) == [{"status": "over"}]
    assert 295 < pauses[0] <= 300


def test_a_pause_that_another_hosts_clock_tells_is_no_longer_than_any(pauses: list[float]) -> None:
    assert events(PauseTrigger(until=time.time() + 7200)) == [{"status": "over"}]
    assert pauses == [300]


# ------------------------------------------------------------------ connections that cannot be looked up now
@pytest.mark.usefixtures("connections")
@pytest.mark.parametrize(
    "trigger",
    [
        SlotLagTrigger(postgres_conn_id="postgres_default", slot="orders", max_lag=5),
        StreamErrorTrigger(
            hook=HOOK, cluster={"system_identifier": "1", "timeline": 1, "database": "d", "version": 160000}
        ),
    ],
    ids=lambda trigger: type(trigger).__name__,
)
def test_a_trigger_waits_for_a_connection_and_fails_without_one(
    monkeypatch: pytest.MonkeyPatch, pauses: list[float], trigger: Any
) -> None:
    async def look_up(conn_id: str, **_: Any) -> Any:
        raise Outage("away") if len(pauses) < 3 else Refused("Airflow has no connection 'x'.")

    for module in ("source", "connections"):
        monkeypatch.setattr(f"airflow_bottledwater.hooks.{module}.aconnection", look_up)
    (event,) = events(trigger)
    assert event["status"] == "failed" and event["message"].endswith("Airflow has no connection 'x'.")
    # who watches has failed, not the stream
    assert len(pauses) == 3 and "position" not in event


@pytest.fixture
def passing(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """The time, which passes in each pause."""
    now, sleep = [1000.0], asyncio.sleep

    def passes(seconds: float) -> Any:
        now[0] += seconds
        assert now[0] < 100_000, "the trigger waits for ever"
        return sleep(0)

    monkeypatch.setattr(asyncio, "sleep", passes)
    monkeypatch.setattr(watch_of_triggers.time, "monotonic", lambda: now[0])
    return now


CLUSTER_OF: dict[str, Any] = {"system_identifier": "1", "timeline": 1, "database": "d", "version": 160000}


@pytest.mark.parametrize(
    ("trigger", "after"),
    [
        (JobTrigger(identity=IDENTITY, hook=HOOK, deadline=1e11), 600),
        (BackfillTrigger(name="n", request_id="r", hook=HOOK), 600),
        (StreamErrorTrigger(hook=HOOK, cluster=CLUSTER_OF), 600),
        (StreamErrorTrigger(hook=HOOK, cluster=CLUSTER_OF, max_silence=900.0), 900),
        (SlotLagTrigger(postgres_conn_id="postgres_default", slot="orders", max_lag=5), 600),
        (DeadLettersTrigger(hook=HOOK), 600),
    ],
    ids=lambda each: type(each).__name__,
)
def test_a_triggerer_without_the_connections_lets_the_task_look(passing: list[float], trigger: Any, after: int) -> None:
    (event,) = events(trigger)
    assert after <= passing[0] - 1000 < after + 130
    assert json.loads(json.dumps(event)) == event
    assert event["status"] == "unseen" and "postgres_default" in event["lacking"]
    assert re.search(r"cannot be seen by the triggerer.*'postgres_default'.*A triggerer needs the", event["message"])
    assert "retries" not in event["message"]
    assert stored_again(*event["trigger"]).serialize() == trigger.serialize()


@pytest.mark.usefixtures("connections")
@pytest.mark.parametrize(
    "trigger",
    [
        JobTrigger(identity=IDENTITY, hook=HOOK, deadline=1e11),
        BackfillTrigger(name="n", request_id="r", hook=HOOK, deadline=1e11),
    ],
    ids=lambda each: type(each).__name__,
)
def test_a_triggerer_without_a_file_lets_the_task_look(
    connect: Any, monkeypatch: pytest.MonkeyPatch, passing: list[float], trigger: Any
) -> None:
    """The watch begins with the connection alone; that the file is not there, only its looks see."""
    properties = {"bootstrap.servers": "k:1", "security.protocol": "SSL", "ssl.ca.location": "/nowhere/ca.pem"}
    connect("kafka_default", conn_type="kafka", extra=properties)
    (event,) = events(trigger)
    assert 600 <= passing[0] - 1000 < 730 and event["seconds"] >= 600
    assert (event["status"], event["lacking"]) == ("unseen", [])
    assert re.search(r"cannot be seen by the triggerer.*ssl\.ca\.location.*the files that they name", event["message"])
    # while Kafka does not answer, the file is there
    looks = Looks(monkeypatch, *[Refused("no file"), Outage("Kafka is away")] * 400, Ended(Outcome(ok=True)))
    assert events(watching(poll_interval=5.0))[0]["status"] == "ended" and not looks.found


def test_what_lacks_is_not_counted_while_nothing_is_known(passing: list[float]) -> None:
    lack, trigger = watch_of_triggers.Lack(), watching()
    for why in (ConnectionNotFound("not found"), *[Outage("away")] * 100, *[ConnectionNotFound("not found")] * 58):
        lack.note(why)
        assert lack.event(trigger, "The job") is None
        passing[0] += 10
    for _ in range(2):
        passing[0] += 10
        lack.note(ConnectionNotFound("not found"))
    assert lack.event(trigger, "The job") is not None


@pytest.mark.parametrize("lasting", [True, False])
def test_a_triggerer_whose_servers_are_away_waits(
    monkeypatch: pytest.MonkeyPatch, passing: list[float], lasting: bool
) -> None:
    """An outage may take hours. Nor does a connection matter that is found within minutes."""

    async def pipeline(_: Any) -> Any:
        if not lasting:
            if passing[0] < 1500:
                raise ConnectionNotFound("Airflow does not find the connection 'pg'.")
        elif passing[0] < 9000:
            raise Outage("The connection 'pg' could not be looked up (TimeoutError).")
        return SimpleNamespace(kafka=KAFKA, slot="orders", heartbeat_interval=2.0, outage_timeout=5.0)

    monkeypatch.setattr(PipelineHook, "apipeline", pipeline)
    away = [Outage("Kafka is away")] * 200
    looks = Looks(monkeypatch, *away, Ended(Outcome(ok=True)))
    (event,) = events(watching(poll_interval=5.0))
    assert event["status"] == "ended" and not looks.found and passing[0] > (9000 if lasting else 1500)


@pytest.fixture
def done(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """What is done to the job."""
    made: list[str] = []
    monkeypatch.setattr(
        stop,
        "stop",
        lambda pipeline, identity, timeout, final: made.append(f"{'stop' if final else 'replace'} {pipeline.slot}"),
    )
    monkeypatch.setattr(leftovers, "end", lambda identity: made.append("end processes"))
    monkeypatch.setattr(identities, "forget", lambda identity: made.append("forget"))
    return made


def of_a_task(trigger: JobTrigger) -> JobTrigger:
    trigger._task_instance = SimpleNamespace(dag_id="d", run_id="r", task_id="stream", map_index=-1)  # type: ignore[assignment]
    return trigger


def airflow_says(monkeypatch: pytest.MonkeyPatch, *answers: Any) -> list[dict[str, Any]]:
    """What Airflow says of the task, in turn: its state (the last one for ever), an error, or ``()`` if it has no row
    of it.

    :returns: what it was asked.
    """
    asked: list[dict[str, Any]] = []
    left = list(answers)

    def states(**arguments: Any) -> Any:
        asked.append(arguments)
        state = left.pop(0) if len(left) > 1 else left[0]
        if isinstance(state, Exception):
            raise state
        return {} if state == () else {"r": {"stream": state}}

    monkeypatch.setattr(tasks.RuntimeTaskInstance, "get_task_states", staticmethod(states))
    return asked


@pytest.mark.usefixtures("connections")
def test_killed_while_the_source_is_away_it_still_stops_the_job(
    monkeypatch: pytest.MonkeyPatch, done: list[str]
) -> None:
    def away(*_: Any, **__: Any) -> None:
        raise Outage("PostgreSQL cannot be reached")

    monkeypatch.setattr(stop, "stop", away)
    airflow_says(monkeypatch, "failed")
    asyncio.run(of_a_task(watching()).on_kill())
    asyncio.run(of_a_task(watching(hook={**HOOK, "postgres_conn_id": "nowhere"})).on_kill())
    assert done == ["end processes", "forget"] * 2


@pytest.mark.usefixtures("connections")
@pytest.mark.parametrize(
    ("state", "does"),
    [
        *((state, []) for state in ("deferred", "scheduled", "queued", "running", "restarting", "up_for_retry")),
        *(
            (state, ["stop orders", "forget"])
            for state in ("failed", "success", "skipped", "upstream_failed", "removed")
        ),
        # cleared: its next try submits another job
        (None, ["replace orders", "forget"]),
        # its row is gone, which was no user's decision: airflow db clean
        ((), []),
    ],
)
def test_only_when_the_task_was_ended_the_job_is(
    monkeypatch: pytest.MonkeyPatch, done: list[str], state: Any, does: list[str]
) -> None:
    """Airflow cancels a trigger in the same way when it gives it to another triggerer, when it resumes the task or
    tries it again, and when the task's row was removed."""
    asked = airflow_says(monkeypatch, state)
    asyncio.run(of_a_task(watching()).on_kill())
    assert done == does
    assert asked == [{"dag_id": "d", "task_ids": ["stream"], "run_ids": ["r"], "map_index": -1}]


@pytest.mark.usefixtures("connections")
@pytest.mark.parametrize(("at_last", "does"), [("failed", ["stop orders", "forget"]), ("deferred", []), ((), [])])
def test_an_airflow_that_does_not_answer_is_asked_until_it_does(
    monkeypatch: pytest.MonkeyPatch, done: list[str], at_last: Any, does: list[str]
) -> None:
    airflow_says(monkeypatch, OSError("away"), TimeoutError(), at_last)

    async def life() -> None:
        ended = asyncio.create_task(of_a_task(watching()).on_kill())
        while not tasks._settling:
            await asyncio.sleep(0)
        # what Airflow does when the time of on_kill is over
        ended.cancel()
        while tasks._settling:
            await asyncio.sleep(0)

    asyncio.run(life())
    assert done == does


@pytest.mark.usefixtures("connections")
def test_a_job_goes_on_if_airflow_never_says_that_its_task_was_ended(
    monkeypatch: pytest.MonkeyPatch, done: list[str]
) -> None:
    airflow_says(monkeypatch, OSError("away"))
    asyncio.run(of_a_task(watching()).on_kill())
    asyncio.run(watching().on_kill())  # a trigger without a task
    assert done == []


@pytest.mark.usefixtures("connections")
def test_a_job_whose_task_has_ended_is_stopped(monkeypatch: pytest.MonkeyPatch, done: list[str]) -> None:
    """Marked while no triggerer ran: nobody was told."""
    known = {"a": "failed", "b": "deferred", "c": "success", "d": None, "e": "up_for_retry"}
    jobs = [(Owner("d", "r", task, -1, "h", "", "s"), {**IDENTITY, "id": task}) for task in (*known, "f")]
    jobs.insert(0, (Owner("d", "r", "a", -1, "h", "", "s", "another Airflow"), {**IDENTITY, "id": "foreign"}))
    monkeypatch.setenv("AIRFLOW__BOTTLEDWATER__AIRFLOW_ID", "this one")

    def states(task_ids: list[str], **_: Any) -> Any:
        if task_ids == ["f"]:
            raise OSError("the API server is away")
        return {"r": {task_ids[0]: known[task_ids[0]]}}

    monkeypatch.setattr(tasks.RuntimeTaskInstance, "get_task_states", staticmethod(states))
    monkeypatch.setattr(orphans, "unfinished", lambda pipeline, name: jobs)
    monkeypatch.setattr(stop, "stop_and_forget", lambda pipeline, identity: done.append(identity["id"]))
    cluster = {"system_identifier": "1", "timeline": 1, "database": "d", "version": 160000}
    asyncio.run(StreamErrorTrigger(hook=HOOK, cluster=cluster)._stop_orphans())  # type: ignore[arg-type]
    assert done == ["a", "c"]


@pytest.mark.usefixtures("connections")
def test_the_watch_does_not_wait_for_a_look_for_such_jobs(clock: Clock, monkeypatch: pytest.MonkeyPatch) -> None:
    """Neither does who ends what a task has begun: the Kafka of a hundred other pipelines may be away."""
    sleep, away, looks = asyncio.sleep, threading.Event(), list[str]()

    def unfinished(_: Any, name: str) -> list[Any]:
        looks.append(name)
        assert away.wait(60)
        return []

    def passes(seconds: float) -> Any:
        clock.now += seconds
        if clock.now > 1200:
            clock.status = seen("failed")
        return sleep(0.01)

    monkeypatch.setattr(asyncio, "sleep", passes)
    monkeypatch.setattr(orphans, "unfinished", unfinished)
    clock.status, clock.changed = seen("streaming"), clock.now
    cluster = {"system_identifier": "1", "timeline": 1, "database": "d", "version": 160000}
    try:
        (event,) = events(StreamErrorTrigger(hook=HOOK, cluster=cluster, poll_interval=10.0))
        assert event["status"] == "failed" and len(looks) == 1
        assert watch_of_triggers.STOPPING.submit(lambda: "ended").result(10) == "ended"
    finally:
        away.set()


@pytest.mark.usefixtures("connections")
@pytest.mark.parametrize(
    ("state", "status"), [("failed", "over"), ("success", "over"), ("deferred", "ok"), (OSError("away"), "ok")]
)
def test_a_slot_whose_stream_has_ended_is_not_waited_for(
    monkeypatch: pytest.MonkeyPatch, state: Any, status: str
) -> None:
    rows = [("reserved", 101, 500, True, 50, None, SERVER), ("reserved", 100, 500, True, 50, None, SERVER)]
    told: list[tuple[str, int]] = []
    monkeypatch.setattr(slot_lag.stats, "gauge", lambda name, value, tags: told.append((name, value)))

    class Connection:
        async def close(self) -> None:
            pass

        async def execute(self, *_: Any) -> Any:
            async def fetchone() -> Any:
                return rows.pop(0)

            return SimpleNamespace(fetchone=fetchone)

    async def connect(*_: Any, **__: Any) -> Connection:
        return Connection()

    def states(**arguments: Any) -> Any:
        if isinstance(state, Exception):
            raise state
        assert arguments == {"dag_id": "d", "task_ids": ["g.stream"], "run_ids": ["r"], "map_index": 0}
        return {"r": {"g.stream": state}}

    monkeypatch.setattr("psycopg.AsyncConnection.connect", connect)
    monkeypatch.setattr(tasks.RuntimeTaskInstance, "get_task_states", staticmethod(states))
    trigger = SlotLagTrigger(postgres_conn_id="postgres_default", slot="orders", max_lag=100, stream_task_id="g.stream")
    trigger._task_instance = SimpleNamespace(dag_id="d", run_id="r", task_id="lag", map_index=0)  # type: ignore[assignment]
    (event,) = events(trigger)
    assert (event["status"], event["slot"]) == (status, "orders")
    # also while it waits
    assert told[:2] == [("bottledwater.slot.lag_bytes", 101), ("bottledwater.slot.wal_kept_bytes", 500)]


# ------------------------------------------------------------------ verdicts
@pytest.mark.parametrize(
    ("row", "status"),
    [
        (None, "failed"),
        (("lost", 5, 5, False, 50, None, SERVER), "failed"),
        (("reserved", None, 5, True, 50, None, SERVER), None),
        (("reserved", None, 5, False, 50, None, SERVER), "failed"),
        (("reserved", 101, 500, True, 50, None, SERVER), None),
        (("reserved", 100, 500, True, 50, None, SERVER), "ok"),
        (("extended", 0, 500, False, 50, None, SERVER), "ok"),
        (("unreserved", -8, 0, True, 50, None, SERVER), "ok"),
    ],
)
def test_what_a_slots_lag_means(row: tuple[Any, ...] | None, status: str | None) -> None:
    event = slot_lag.evaluate("orders", row, 100)
    assert (event and event["status"]) == status
    if status == "failed":
        assert event and "'orders'" in event["message"]


@pytest.mark.parametrize(
    ("row", "limits", "good"),
    [
        (("extended", 0, 500, False, 50, None, SERVER), {"wal_status": "extended"}, True),
        (("extended", 0, 500, False, 50, None, SERVER), {"wal_status": "reserved"}, False),
        (("unreserved", 0, 500, False, 50, -5, SERVER), {"wal_status": "extended"}, False),
        (("reserved", 0, 500, False, 50, 99, SERVER), {"min_safe_wal": 100}, False),
        (("reserved", 0, 500, False, 50, 100, SERVER), {"min_safe_wal": 100}, True),
        # a server without a limit
        (("reserved", 0, 500, False, 50, None, SERVER), {"min_safe_wal": 100}, True),
    ],
)
def test_what_a_slots_wal_means(row: tuple[Any, ...], limits: dict[str, Any], good: bool) -> None:
    assert (slot_lag.evaluate("orders", row, 100, **limits) is not None) is good


def test_a_lag_in_seconds_is_known_by_what_was_seen() -> None:
    seen = slot_lag.Seen(60)
    # behind, nobody knows how long
    assert not seen.within(1000, 900, now=0)
    assert not seen.within(2000, 999, now=30)
    # all that was there 60 s ago is confirmed
    assert seen.within(3000, 1000, now=60)
    assert not seen.within(4000, 1999, now=61)
    assert seen.within(4000, 4000, now=500) and len(seen.looks) == 1
    # what another process has seen; a clock that was set back proves nothing
    assert slot_lag.Seen(60, [[500.0, 70]]).within(99, 70, now=520)
    assert not slot_lag.Seen(60, [[500.0, 70]]).within(99, 70, now=499)
    row = ("reserved", 5, 500, False, 50, None, SERVER)
    late = slot_lag.Seen(60)
    assert slot_lag.evaluate("orders", row, None, seen=late) is None and late.looks[0][1] == 55
    assert slot_lag.Seen(None).within(5, 1)


def test_a_lag_in_seconds_is_an_alarm_only_when_it_is_known() -> None:
    seen = slot_lag.Seen(60)
    assert not seen.exceeded(1000, 900, now=0)
    assert not seen.exceeded(2000, 950, now=60)
    assert seen.exceeded(3000, 999, now=61)
    # what was there then is confirmed, and what came 30 s ago may wait
    assert not seen.exceeded(3000, 1000, now=62)
    assert not seen.exceeded(9000, 2000, now=121)
    assert seen.exceeded(9000, 2000, now=122)
    assert len(seen.looks) < 5 and not slot_lag.Seen(None).exceeded(5, 1)


def seen(state: str = "streaming", **changes: Any) -> StatusRecord:
    return status_of(
        state, **{"position": "0/5", "counters": {"dead_letters": 9, "open_dead_letters": 2, "published": 7}, **changes}
    )


@pytest.mark.parametrize(
    ("status", "silent", "limit", "verdict"),
    [
        (None, 0, None, None),
        (None, 599, None, None),
        # nobody starts
        (None, 600, None, "No job has ever reported"),
        (seen(), 0, None, None),
        (seen(), 0, 2, None),
        (seen(), 0, 1, "2 dead letters are open"),
        (seen(), 0, 0, "2 dead letters are open"),
        # killed without a word, or its host is gone
        (seen(), 599, None, None),
        (seen(), 600, None, "process 5 on h"),
        (seen(state="stopped"), 0, None, "ok"),
        (seen(state="stopped", stopped_by="request"), 0, None, "ok"),
        # with its task, which may have been cleared: then it submits another one
        (seen(state="stopped", stopped_by="task"), 59, None, None),
        (seen(state="stopped", stopped_by="task"), 60, None, "ok"),
        # to be replaced, which is no end
        (seen(state="stopped", stopped_by="replacement"), 599, None, None),
        (seen(state="stopped", stopped_by="replacement"), 600, None, "no other has reported for 600 s"),
        (seen(state="finished"), 0, None, "ok"),
        (seen(state="failed", permanent=True, error="schema refused"), 0, None, "schema refused"),
        # no job could begin since the last one has ended in order
        (seen(state="finished", permanent=True, error="slot lost"), 0, None, "slot lost"),
        (seen(state="stopped", permanent=True, error="slot lost"), 0, None, "slot lost"),
        (seen(state="finished", permanent=True, error="slot lost", id="j0"), 599, None, None),
        (seen(state="finished", permanent=True, error="slot lost", id="j0"), 600, None, "slot lost"),
        # it is submitted again
        (seen(state="failed", error="broker away"), 599, None, None),
        # or nobody did
        (seen(state="failed", error="broker away"), 600, None, "broker away"),
        # of a job before this one: another may be on its way
        (seen(state="failed", permanent=True, error="old", id="j0"), 599, None, None),
        (seen(state="stopped", id="j0"), 599, None, None),
        # what a bounded run has left does not wait for the next one
        (
            seen(state="finished", problems=[Problem("not-followed", "public.a", "It has no key.")]),
            0,
            None,
            "public.a: It has no key.",
        ),
        (
            seen(state="finished", problems=[Problem("not-followed", "public.a", "It has no key.")], id="j0"),
            599,
            None,
            None,
        ),
        (
            seen(
                state="stopped", problems=[Problem("not-followed", "public.a", "It has no key.")], stopped_by="request"
            ),
            0,
            None,
            "ok",
        ),
        # or there is none
        (seen(state="failed", permanent=True, error="old", id="j0"), 600, None, "old"),
        (seen(state="stopped", id="j0"), 600, None, "ok"),
        # of a snapshot
        (seen(state="failed", permanent=True, kind="snapshot"), 0, None, None),
        (seen(state="finished", kind="snapshot"), 600, None, "of a snapshot job"),
        # behind which the pipeline was asked to stop
        (seen(state="finished", kind="snapshot", stopped_by="request"), 599, None, None),
        (seen(state="finished", kind="snapshot", stopped_by="request"), 600, None, "ok"),
    ],
)
def test_what_a_streams_status_means(
    status: StatusRecord | None, silent: float, limit: int | None, verdict: str | None
) -> None:
    if status is not None:
        # no clock of another host decides anything
        status.at = time.time() + 1e6
    event = stream_error.evaluate(status, silent=silent, longest=600, earlier="j0", max_dead_letters=limit)
    if verdict in (None, "ok"):
        assert (event and event["status"]) == verdict
    else:
        assert event is not None and event["status"] == "failed" and verdict in event["message"]


def test_what_is_waited_for_is_longer_where_jobs_wait_longer(connections: str) -> None:
    def made(**settings: Any) -> float:
        operator = StreamToKafkaOperator(task_id="t", pipeline=Description(**settings))
        return stream_error.limit(operator.pipeline_hook.pipeline(), 600.0)

    assert made() == made(outage_timeout=10) == 600
    assert made(outage_timeout=1000) == 2000
    assert made(heartbeat_interval=100) == 1000


class Clock:
    """Monotonic time, and statuses as Kafka has them."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now = 1000.0
        self.status: StatusRecord | None = None
        self.changed = 0.0
        self.away = False
        self.late: StatusRecord | None = None
        monkeypatch.setattr(stream_error.time, "monotonic", lambda: self.now)
        monkeypatch.setattr(ControlTopic, "get", self.get)
        monkeypatch.setattr(ControlTopic, "all", lambda *_, **__: {})

    def get(self, name: str, *, now: bool = False) -> tuple[StatusRecord | None, float]:
        if self.away:
            raise Outage("Kafka is away")
        if now and self.late is not None:
            self.status, self.changed = self.late, self.now
        return self.status, self.changed


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    return Clock(monkeypatch)


KAFKA = {"bootstrap.servers": "nowhere:1"}
CLUSTER: Any = SimpleNamespace(pipeline=lambda slot: f"d/{slot}")


def watch(kafka: dict[str, str] = KAFKA) -> stream_error.StatusWatch:
    pipeline: Any = SimpleNamespace(kafka=kafka, slot="orders", heartbeat_interval=2.0, outage_timeout=5.0)
    return stream_error.StatusWatch(pipeline, CLUSTER, earlier="", max_silence=60.0, max_dead_letters=None)


def test_a_stream_is_silent_by_the_watchers_own_clock(clock: Clock) -> None:
    clock.status, clock.changed = seen(), 10.0  # long before the watch began: no more than the watch has seen itself
    watching = watch()
    clock.now += 59
    assert watching.fetch() is None
    clock.changed = clock.now
    clock.now += 59
    assert watching.fetch() is None
    clock.now += 1
    event = watching.fetch()
    assert event is not None and "has not reported for 60 s" in event["message"]


def test_an_outage_of_kafka_is_not_a_streams_silence(clock: Clock) -> None:
    clock.status = seen()
    watching = watch()
    clock.now += 50
    clock.away = True
    for _ in range(3):
        clock.now += 50
        with pytest.raises(Outage):
            watching.fetch()
    clock.away = False
    clock.now += 59
    assert watching.fetch() is None
    # what was not read in time, because a broker was slow, is read before the verdict
    clock.now += 2
    clock.late = seen(position="0/6")
    assert watching.fetch() is None


@pytest.mark.usefixtures("connections")
def test_a_stream_that_never_starts_ends_the_trigger(clock: Clock, monkeypatch: pytest.MonkeyPatch) -> None:
    sleep = asyncio.sleep

    def passes(seconds: float) -> Any:
        clock.now += seconds
        clock.away = clock.now < 1100
        return sleep(0)

    monkeypatch.setattr(asyncio, "sleep", passes)
    cluster = {"system_identifier": "1", "timeline": 1, "database": "d", "version": 160000}
    hook = {**HOOK, "settings": {**HOOK["settings"], "outage_timeout": 5}}
    arguments = {"hook": hook, "cluster": cluster, "max_silence": 60.0, "poll_interval": 7.0}
    (event,) = events(StreamErrorTrigger(**arguments))
    assert event["status"] == "failed" and "No stream has reported" in event["message"]
    assert 1160 <= clock.now < 1180
    # and lets go of the reader
    assert ControlTopic._of == {}


#: the task of a stream
STREAM = Owner("d", "r", "g.stream", 2, "h", "", "local")


@pytest.mark.usefixtures("connections")
@pytest.mark.parametrize(
    ("answers", "owner", "asked"),
    [
        # a time-out has ended its try, or its worker went away: the retry submits another job
        (["up_for_retry", "queued", None, OSError("the API server is away"), "failed"], STREAM, 5),
        (["failed"], STREAM, 1),
        (["success"], STREAM, 1),
        ([], replace(STREAM, airflow="another one"), 0),
        ([], None, 0),
    ],
)
def test_a_stream_that_was_stopped_with_its_task_has_ended_when_the_task_has(
    clock: Clock, monkeypatch: pytest.MonkeyPatch, answers: list[Any], owner: Owner | None, asked: int
) -> None:
    sleep, left, began = asyncio.sleep, list(answers), clock.now

    def passes(seconds: float) -> Any:
        clock.now += seconds
        return sleep(0)

    def states(**arguments: Any) -> Any:
        assert arguments == {"dag_id": "d", "task_ids": ["g.stream"], "run_ids": ["r"], "map_index": 2}
        assert clock.now >= began + 60
        answer = left.pop(0)
        if isinstance(answer, Exception):
            raise answer
        return {"r": {"g.stream": answer}}

    monkeypatch.setenv("AIRFLOW__BOTTLEDWATER__AIRFLOW_ID", "this one")
    monkeypatch.setattr(asyncio, "sleep", passes)
    monkeypatch.setattr(tasks.RuntimeTaskInstance, "get_task_states", staticmethod(states))
    monkeypatch.setattr(StreamErrorTrigger, "_stop_orphans", lambda _: sleep(0))
    clock.status, clock.changed = seen("stopped", stopped_by="task", owner=owner), clock.now
    cluster = {"system_identifier": "1", "timeline": 1, "database": "d", "version": 160000}
    (event,) = events(StreamErrorTrigger(hook=HOOK, cluster=cluster, poll_interval=10.0))
    assert (event["status"], left, len(answers)) == ("ok", [], asked)
    assert 60 + 10 * max(0, asked - 1) <= clock.now - began <= 80 + 10 * asked
    json.dumps(event)


class Reader:
    """Of the shared topic: one that is open, and then closed.

    :ivar written: the records that are there.
    """

    made: list[Reader]
    written: dict[str, Any]

    def __init__(self, *_: Any, **__: Any) -> None:
        self.closed, self.at = 0, 0
        self.made.append(self)

    def poll(self, timeout: float) -> list[Any]:
        assert not self.closed
        found = list(self.written.items())[self.at :]
        self.at = len(self.written)
        # it waits for records
        threading.Event().wait(0.0 if found else 0.01)
        return found

    def close(self) -> None:
        self.closed += 1


@pytest.fixture
def readers(monkeypatch: pytest.MonkeyPatch) -> list[Reader]:
    Reader.made, Reader.written = [], {}
    topics = SimpleNamespace(describe=lambda names, confirm: names, ends=lambda topic, count: [len(Reader.written)])
    monkeypatch.setattr("airflow_bottledwater.kafka.topics.Topics", lambda kafka: topics)
    monkeypatch.setattr("airflow_bottledwater.state.store.Reader", Reader)
    return Reader.made


@pytest.fixture
def away(monkeypatch: pytest.MonkeyPatch, readers: list[Reader]) -> list[bool]:
    """Whether Kafka does not answer."""
    is_away = [False]

    def ends(topic: str, count: int) -> list[int]:
        if is_away[0]:
            raise Outage("away")
        return [len(Reader.written)]

    topics = SimpleNamespace(describe=lambda names, confirm: names, ends=ends)
    monkeypatch.setattr("airflow_bottledwater.kafka.topics.Topics", lambda kafka: topics)
    return is_away


def test_all_who_watch_one_broker_share_a_reader_which_the_last_one_closes(readers: list[Reader]) -> None:
    first, second, elsewhere = watch(), watch(dict(KAFKA)), watch({"bootstrap.servers": "other:1"})
    for each in (first, second, elsewhere):
        each.fetch()
    assert len(readers) == 2
    first.close()
    second.fetch()
    assert [reader.closed for reader in readers] == [0, 0]
    second.close()
    assert [reader.closed for reader in readers] == [1, 0]
    # whoever comes later begins anew
    later = watch()
    later.fetch()
    assert len(readers) == 3
    for each in (later, elsewhere):
        each.close()
    assert [reader.closed for reader in readers] == [1, 1, 1] and ControlTopic._of == {}


def test_a_status_of_another_version_is_told(readers: list[Reader]) -> None:
    key = status_key("d/orders")
    Reader.written = {key: encode(seen())}
    pipeline: Any = SimpleNamespace(kafka=KAFKA, slot="orders")
    assert stream_error.read(pipeline, CLUSTER, now=True)[0] == seen()
    for foreign in (
        {},
        {"state": "stopped"},
        {"state": "stopped", "job": "x"},
        {"job": encode(seen())["job"]},
    ):
        Reader.written = {key: foreign}
        with pytest.raises(StateError, match="was written by another version"):
            stream_error.read(pipeline, CLUSTER, now=True)


def test_a_look_that_fails_leaves_no_reader(readers: list[Reader], away: list[bool]) -> None:
    pipeline: Any = SimpleNamespace(kafka=KAFKA, slot="orders")
    assert stream_error.read(pipeline, CLUSTER, now=True) == (None, 0.0)
    away[0] = True
    with pytest.raises(Outage):
        stream_error.read(pipeline, CLUSTER)
    assert all(reader.closed == 1 for reader in readers) and ControlTopic._of == {}


def test_a_look_that_is_under_way_ends_with_the_watch(readers: list[Reader], monkeypatch: pytest.MonkeyPatch) -> None:
    """It does not open the reader again."""
    begun = threading.Event()
    monkeypatch.setattr(Reader, "poll", lambda *_, **__: (begun.set(), threading.Event().wait(0.01), [])[-1])
    Reader.written = {"status/d/orders": {}}
    watching, ended = watch(), list[str]()

    def look() -> None:
        with pytest.raises(Outage):
            watching.fetch()
        ended.append("it ended")

    looking = threading.Thread(target=look)
    looking.start()
    assert begun.wait(60)
    watching.close()
    looking.join(60)
    assert ended and [reader.closed for reader in readers] == [1] and ControlTopic._of == {}


@pytest.mark.usefixtures("connections")
def test_a_trigger_that_is_cancelled_closes_the_reader(readers: list[Reader], monkeypatch: pytest.MonkeyPatch) -> None:
    looked = threading.Event()
    fetch = stream_error.StatusWatch.fetch
    monkeypatch.setattr(stream_error.StatusWatch, "fetch", lambda self: (fetch(self), looked.set())[0])
    cluster = {"system_identifier": "1", "timeline": 1, "database": "d", "version": 160000}

    async def cancelled() -> None:
        run = asyncio.create_task(anext(StreamErrorTrigger(hook=HOOK, cluster=cluster).run()))  # type: ignore[arg-type]
        while not looked.is_set():
            await asyncio.sleep(0)
        run.cancel()
        with pytest.raises(asyncio.CancelledError):
            await run

    asyncio.run(cancelled())
    assert [reader.closed for reader in readers] == [1] and ControlTopic._of == {}


def test_airflow_is_asked_early_so_that_it_answers_when_it_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    """A triggerer makes what answers when it is first asked."""
    asked: list[str] = []

    async def states(dag_id: str, run_id: str, task_id: str, map_index: int) -> set[str]:
        asked.append(task_id)
        raise TimeoutError

    monkeypatch.setattr(tasks, "states", states)
    trigger = watching(deadline=time.time() - 1)
    trigger.task_instance = SimpleNamespace(dag_id="d", run_id="r", task_id="stream", map_index=-1)  # type: ignore[assignment]
    assert events(trigger) == [{"status": "timeout", "identity": IDENTITY}]
    assert asked == ["stream"]


def test_the_watch_says_what_it_sees_at_each_change_and_from_time_to_time(
    clock: Clock, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO", logger=stream_error.__name__)
    watching = watch()

    def says(status: StatusRecord | None, after: float) -> list[str]:
        caplog.clear()
        clock.now += after
        if status is not clock.status:
            clock.status, clock.changed = status, clock.now
        watching.fetch()
        return [record.getMessage() for record in caplog.records]

    assert says(None, 0) == ["No job has ever reported."]
    (line,) = says(seen("starting"), 1)
    assert line.startswith("stream job j1, epoch 4 on h: starting. Position 0/5; {'dead_letters': 9")
    assert "'open_dead_letters': 2" in line
    (line,) = says(seen(), 1)
    assert "streaming" in line
    # its position is not news
    assert says(seen(position="0/6"), 59) == []
    assert len(says(seen(position="0/7"), 600)) == 1
    (line,) = says(clock.status, 31)
    assert "has not reported for 31 s" in line
    (line,) = says(seen("stopped", stopped_by="replacement", id="j2"), 1)
    assert "j2" in line and "stopped by: replacement" in line


def test_kafka_answers_from_its_first_answer_after_a_failure_or_a_gap(
    away: list[bool], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Before, that a record did not change says nothing."""
    now = [1000.0]
    monkeypatch.setattr(stream_error.time, "monotonic", lambda: now[0])
    records = ControlTopic.of(KAFKA)

    def looked(after: float) -> float:
        now[0] += after
        records.get("job/j")
        return records.answering

    assert looked(0) == 1000
    # nobody writes, so that it is asked
    assert looked(10) == looked(10) == looked(10) == 1000
    away[0] = True
    with pytest.raises(Outage):
        looked(10)
    away[0] = False
    assert looked(10) == looked(10) == 1050
    # nobody has looked: Kafka may have been away meanwhile
    assert looked(31) == 1091
    records.close()
