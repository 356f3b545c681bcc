"""Sensors: the verdict at the first look, and what is deferred."""

from __future__ import annotations

import asyncio
import contextlib
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from datetime import UTC, datetime, timedelta
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from airflow.sdk.exceptions import AirflowFailException, AirflowSkipException, TaskDeferred

from airflow_bottledwater.errors import CredentialsRefused, JobFailed, Outage, StateError
from airflow_bottledwater.hooks import tasks
from airflow_bottledwater.model.job import Owner
from airflow_bottledwater.model.slot import Cluster
from airflow_bottledwater.pipeline.description import Description
from airflow_bottledwater.postgres import connect as postgres
from airflow_bottledwater.sensors import looking, slot_lag, stream_error
from airflow_bottledwater.sensors.dead_letters import DeadLettersSensor
from airflow_bottledwater.sensors.slot_lag import ReplicationSlotLagSensor
from airflow_bottledwater.sensors.stream_error import StreamErrorSensor
from airflow_bottledwater.sensors.stream_position import StreamPositionSensor
from airflow_bottledwater.state.control_records import StatusRecord
from airflow_bottledwater.triggers.dead_letters import DeadLettersTrigger
from airflow_bottledwater.triggers.slot_lag import SlotLagTrigger, stream_over
from tests.support.status import status_of

pytestmark = pytest.mark.usefixtures("connections")

CLUSTER = Cluster(system_identifier="1", timeline=1, database="d", version=160000)
CONTEXT: Any = {"ti": SimpleNamespace(start_date=datetime(2026, 1, 1, tzinfo=UTC))}

ORDERS = Description("orders")
#: system identifier and timeline
SERVER = "7/00000001"
#: the task of a stream
STREAM = Owner("d", "r", "g.stream", 2, "h", "", "local")


def lag_sensor(**arguments: Any) -> ReplicationSlotLagSensor:
    return ReplicationSlotLagSensor(task_id="t", pipeline=ORDERS, deferrable=True, **arguments)


def error_sensor(**arguments: Any) -> StreamErrorSensor:
    return StreamErrorSensor(task_id="t", pipeline=ORDERS, deferrable=True, **arguments)


def dead_letters_sensor(**arguments: Any) -> DeadLettersSensor:
    return DeadLettersSensor(task_id="t", pipeline=ORDERS, deferrable=True, **arguments)


@pytest.fixture
def source(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """The rows that looks at the slot give, in turn; an exception is raised."""
    rows: list[Any] = []

    @contextlib.contextmanager
    def session(*_: Any, **__: Any) -> Iterator[Any]:
        row = rows.pop(0)
        if isinstance(row, Exception):
            raise row
        yield SimpleNamespace(execute=lambda *_: SimpleNamespace(fetchone=lambda: row))

    monkeypatch.setattr(postgres, "session", session)
    return rows


def test_a_slot_that_has_caught_up_ends_the_sensor_at_once(source: list[Any]) -> None:
    source.append(("reserved", 10, 20, True, 50, None, SERVER))
    assert lag_sensor(max_lag="10").execute(CONTEXT) is None


def test_a_slot_that_is_behind_is_waited_for(source: list[Any]) -> None:
    source.append(("reserved", 11, 20, True, 50, None, SERVER))
    with pytest.raises(TaskDeferred) as raised:
        lag_sensor(max_lag=10, poke_interval=5, timeout=60).execute(CONTEXT)
    trigger: Any = raised.value.trigger
    assert (trigger.slot, trigger.max_lag, trigger.poll_interval) == ("orders", 10, 5)
    assert raised.value.timeout is not None and raised.value.timeout.total_seconds() == 60


def test_a_slot_that_is_being_created_is_not_called_invalidated(source: list[Any]) -> None:
    source.append(("reserved", None, 20, True, 50, None, SERVER))
    with pytest.raises(TaskDeferred):
        lag_sensor(max_lag=10).execute(CONTEXT)


@pytest.mark.parametrize(
    "row", [None, ("lost", 1, 1, True, 50, None, SERVER), ("lost", None, None, True, 50, None, SERVER)]
)
def test_a_slot_that_is_gone_fails_for_good(source: list[Any], row: Any) -> None:
    source.append(row)
    with pytest.raises(AirflowFailException, match="orders"):
        lag_sensor().execute(CONTEXT)
    with pytest.raises(AirflowFailException, match="gone"):
        lag_sensor().execute_complete(CONTEXT, {"status": "failed", "message": "gone"})


def test_a_source_that_is_away_is_left_for_a_retry(source: list[Any]) -> None:
    source.append(Outage("away"))
    with pytest.raises(Outage):
        lag_sensor().execute(CONTEXT)


@pytest.mark.parametrize("sensor", [ReplicationSlotLagSensor, StreamErrorSensor])
@pytest.mark.parametrize("event", [None, {}, {"status": "ended"}, {"status": None}])
def test_an_event_that_is_not_known_is_no_success(sensor: Any, event: Any) -> None:
    with pytest.raises(JobFailed, match="Unexpected trigger event"):
        sensor(task_id="t", pipeline=ORDERS).execute_complete(CONTEXT, event)


def test_whether_a_sensor_defers_is_airflows_setting(tmp_path: Path) -> None:
    code = (
        "from airflow_bottledwater.sensors import slot_lag, stream_error\n"
        "print([s(task_id='t', pipeline='orders').deferrable for s in (slot_lag.ReplicationSlotLagSensor, "
        "stream_error.StreamErrorSensor)])"
    )
    # not what Airflow has without it, which the other tests see
    env = {**os.environ, "AIRFLOW_HOME": str(tmp_path), "AIRFLOW__OPERATORS__DEFAULT_DEFERRABLE": "True"}
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=env, check=True)
    assert done.stdout.splitlines()[-1] == "[True, True]"
    assert not ReplicationSlotLagSensor(task_id="t", pipeline=ORDERS).deferrable


def test_a_limit_that_is_no_number_is_refused(source: list[Any]) -> None:
    with pytest.raises(AirflowFailException, match="Setting 'max_lag' cannot be 'little'"):
        lag_sensor(max_lag="little").execute(CONTEXT)


def test_without_a_trigger_the_sensor_looks_itself(source: list[Any]) -> None:
    source.extend([("reserved", 11, 20, True, 50, None, SERVER), ("reserved", 10, 20, True, 50, None, SERVER)])
    sensor = ReplicationSlotLagSensor(task_id="t", pipeline=ORDERS, max_lag=10, deferrable=False)
    assert [sensor.poke(CONTEXT), sensor.poke(CONTEXT)] == [False, True]


@pytest.mark.parametrize(
    ("state", "lag", "verdict"),
    [
        ("deferred", 11, False),
        ("up_for_retry", 11, False),
        (None, 11, False),
        (OSError("the API server is away"), 11, False),
        # nobody reads from the slot any more
        ("failed", 11, AirflowSkipException),
        ("success", 11, AirflowSkipException),
        ("success", 10, True),
    ],
)
def test_a_stream_that_has_ended_is_not_waited_for(
    source: list[Any], monkeypatch: pytest.MonkeyPatch, state: Any, lag: int, verdict: Any
) -> None:
    asked: list[Any] = []

    def states(dag_id: str, run_id: str, task_id: str, map_index: int) -> set[str]:
        asked.append((dag_id, run_id, task_id, map_index))
        if isinstance(state, Exception):
            raise state
        return {state} if state else set()

    monkeypatch.setattr(tasks, "states_now", states)
    ti = SimpleNamespace(dag_id="d", run_id="r", map_index=0)
    sensor = ReplicationSlotLagSensor(
        task_id="t", pipeline=ORDERS, max_lag=10, deferrable=False, stream_task_id="g.stream"
    )
    source.append(("reserved", lag, 20, True, 50, None, SERVER))
    context: Any = {"ti": ti}
    if isinstance(verdict, bool):
        assert sensor.poke(context) is verdict
    else:
        with pytest.raises(verdict, match=r"'g\.stream' has ended before slot 'orders' had caught up"):
            sensor.poke(context)
    assert asked == [("d", "r", "g.stream", 0)]


def test_the_triggers_word_that_the_stream_has_ended_skips_the_sensor() -> None:
    with pytest.raises(AirflowSkipException, match="has ended"):
        lag_sensor().execute_complete(CONTEXT, stream_over("orders", "stream"))


@pytest.mark.parametrize("error", [Outage("PostgreSQL is away"), CredentialsRefused("refused")])
def test_what_passes_ends_a_sensor_at_its_first_look_only(source: list[Any], error: Exception) -> None:
    sensor = ReplicationSlotLagSensor(task_id="t", pipeline=ORDERS, max_lag=10, deferrable=False)
    source.append(error)
    with pytest.raises((Outage, AirflowFailException)):
        sensor.poke(CONTEXT)
    source.extend(
        [error, ("reserved", 11, 20, True, 50, None, SERVER), error, ("reserved", 10, 20, True, 50, None, SERVER)]
    )
    assert [sensor.poke(CONTEXT) for _ in range(4)] == [False, False, False, True]
    # in mode "reschedule", each look is a process of its own
    source.append(error)
    assert not ReplicationSlotLagSensor(task_id="t", pipeline=ORDERS).poke({**CONTEXT, "task_reschedule_count": 1})


def test_seconds_and_what_postgresql_says_of_the_wal_are_waited_for(source: list[Any]) -> None:
    sensor = ReplicationSlotLagSensor(
        task_id="t", pipeline=ORDERS, max_lag=10**9, max_lag_seconds="600", wal_status="extended", min_safe_wal=100
    )
    source.extend([
        ("reserved", 11, 20, True, 50, 100, SERVER),  # how old that is, is not known
        ("reserved", 900, 20, True, 60, 100, SERVER),  # not all that was there is confirmed
        ("unreserved", 900, 20, True, 61, 100, SERVER),
        ("extended", 900, 20, True, 61, 99, SERVER),
        ("extended", 900, 20, True, 61, None, SERVER),
    ])  # fmt: skip
    assert [sensor.poke(CONTEXT) for _ in range(5)] == [False, False, False, False, True]
    source.append(("reserved", 11, 20, True, 50, None, SERVER))
    with pytest.raises(TaskDeferred) as raised:
        lag_sensor(max_lag=10, max_lag_seconds="30", wal_status="reserved").execute(CONTEXT)
    trigger: Any = raised.value.trigger
    assert (trigger.max_lag_seconds, trigger.wal_status, trigger.min_safe_wal) == (30.0, "reserved", None)
    with pytest.raises(AirflowFailException, match="Setting 'wal_status' cannot be 'good'"):
        lag_sensor(wal_status="good").execute(CONTEXT)


def test_what_was_seen_is_kept_from_one_process_to_the_next(source: list[Any]) -> None:
    kept: dict[str, Any] = {}
    store = SimpleNamespace(get=kept.get, set=kept.__setitem__)

    def poke(attempt: int) -> bool:
        context: Any = {"ti": SimpleNamespace(try_number=attempt), "task_state_store": store}
        sensor = ReplicationSlotLagSensor(
            task_id="t", pipeline=ORDERS, max_lag=10**9, max_lag_seconds=600, mode="reschedule"
        )
        return sensor.poke(context)

    source.extend([("reserved", 5, 20, True, 50, None, SERVER), ("reserved", 99, 20, True, 55, None, SERVER)])
    assert [poke(1), poke(1)] == [False, True]
    source.append(("reserved", 99, 20, True, 55, None, SERVER))
    assert not poke(2)
    # what was seen of another server proves nothing
    source.append(("reserved", 99, 20, True, 5000, None, "8/00000001"))
    assert not poke(2)


# ------------------------------------------------------------------ dead letters
@pytest.fixture
def letters(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """The open dead letters that looks find, in turn."""
    found: list[Any] = []

    def report(*_: Any) -> Any:
        counted = found.pop(0)
        if isinstance(counted, Exception):
            raise counted
        tables = [SimpleNamespace(table=each) for each in ("public.a", "public.c", "sales.b")]
        return SimpleNamespace(tables=tables, slot=None, open_letters=counted)

    monkeypatch.setattr("airflow_bottledwater.jobs.status.report", report)
    return found


def test_dead_letters_are_waited_for(letters: list[Any]) -> None:
    many = {"public.a": {"stream": 2, "live": 1}, "sales.b": {"snapshot": 4}}
    letters.extend([many, many, many, {}])
    assert not DeadLettersSensor(task_id="t", pipeline=ORDERS).poke(CONTEXT)
    assert not DeadLettersSensor(task_id="t", pipeline=ORDERS, tables="a", max_open="2").poke(CONTEXT)
    assert DeadLettersSensor(task_id="t", pipeline=ORDERS, tables="a, c", max_open=3).poke(CONTEXT)
    assert DeadLettersSensor(task_id="t", pipeline=ORDERS).poke(CONTEXT)
    letters.append(many)
    with pytest.raises(TaskDeferred) as raised:
        DeadLettersSensor(task_id="t", pipeline=ORDERS, tables=["a"], deferrable=True).execute(CONTEXT)
    trigger: Any = raised.value.trigger
    assert (trigger.max_open, trigger.tables) == (0, ["a"])
    sensor = DeadLettersSensor(task_id="t", pipeline=ORDERS)
    sensor.execute_complete(CONTEXT, {"status": "ok", "open": 0})
    with pytest.raises(AirflowFailException, match="no such"):
        sensor.execute_complete(CONTEXT, {"status": "failed", "message": "no such pipeline"})


@pytest.mark.parametrize("tables", ["b", "public.b", "a, nobodys*"])
def test_a_table_that_the_pipeline_does_not_have_is_an_error(letters: list[Any], tables: str) -> None:
    letters.extend([{"sales.b": {"snapshot": 4}}])
    with pytest.raises(AirflowFailException, match=r"Setting 'tables' cannot be '(public\.)?[bn]"):
        DeadLettersSensor(task_id="t", pipeline=ORDERS, tables=tables).poke(CONTEXT)
    # one that was dropped may have some
    letters.extend([{"public.gone": {"stream": 1}}])
    assert not DeadLettersSensor(task_id="t", pipeline=ORDERS, tables="gone").poke(CONTEXT)


def test_the_trigger_waits_for_dead_letters_over_an_outage(letters: list[Any], monkeypatch: pytest.MonkeyPatch) -> None:
    pause = asyncio.sleep
    monkeypatch.setattr(asyncio, "sleep", lambda _: pause(0))
    one = {"public.a": {"stream": 1}}
    letters.extend([one, Outage("away"), CredentialsRefused("refused"), {}])
    trigger = DeadLettersTrigger(
        hook=DeadLettersSensor(task_id="t", pipeline=ORDERS).pipeline_hook.arguments(), poll_interval=0.1
    )

    async def first() -> Any:
        async for event in trigger.run():
            return event.payload

    assert asyncio.run(first()) == {"status": "ok", "open": 0}
    assert not letters
    # what does not pass ends it, as it ends a sensor that looks itself
    letters.extend([one, StateError("There is no pipeline 'orders'."), StateError("There is no pipeline 'orders'.")])
    assert asyncio.run(first()) == {"status": "failed", "message": "There is no pipeline 'orders'."}
    with pytest.raises(AirflowFailException, match="There is no pipeline"):
        DeadLettersSensor(task_id="t", pipeline=ORDERS).poke(CONTEXT)


# ------------------------------------------------------------------ a position
def position_sensor(**arguments: Any) -> StreamPositionSensor:
    return StreamPositionSensor(task_id="t", pipeline=ORDERS, **{"deferrable": False, **arguments})


def test_a_position_is_waited_for_however_far_the_source_has_come(source: list[Any]) -> None:
    sensor = position_sensor(position="0/33")
    source.extend(
        [
            ("0/99", SERVER),
            ("reserved", 10**9, 20, True, 50, None, SERVER),
            ("reserved", 10**9, 20, True, 51, None, SERVER),
        ]
    )
    assert [sensor.poke(CONTEXT), sensor.poke(CONTEXT)] == [False, True]


def test_now_is_asked_for_once(source: list[Any]) -> None:
    sensor = position_sensor()
    source.extend(
        [("0/33", SERVER), ("reserved", 9, 20, True, 50, None, SERVER), ("reserved", 9, 20, True, 51, None, SERVER)]
    )
    assert [sensor.poke(CONTEXT), sensor.poke(CONTEXT)] == [False, True]


def test_now_is_kept_from_one_process_to_the_next(source: list[Any]) -> None:
    kept: dict[str, Any] = {}
    store = SimpleNamespace(get=kept.get, set=kept.__setitem__)

    def poke(attempt: int) -> bool:
        context: Any = {"ti": SimpleNamespace(try_number=attempt), "task_state_store": store}
        return position_sensor(mode="reschedule").poke(context)

    source.extend(
        [("0/33", SERVER), ("reserved", 9, 20, True, 50, None, SERVER), ("reserved", 9, 20, True, 51, None, SERVER)]
    )
    assert [poke(1), poke(1)] == [False, True]
    source.extend([("0/34", SERVER), ("reserved", 9, 20, True, 51, None, SERVER)])
    assert not poke(2)


@pytest.mark.parametrize("position", ["now", "0/33"])
@pytest.mark.parametrize("confirmed", [50, 51])
def test_a_position_of_another_server_is_not_waited_for(source: list[Any], position: str, confirmed: int) -> None:
    """The source was moved: LSNs begin anew, lower or higher."""
    sensor = position_sensor(position=position)
    source.extend([("0/33", SERVER), ("reserved", 9, 20, True, 50, None, SERVER)])
    assert not sensor.poke(CONTEXT)
    source.append(("reserved", 9, 20, True, confirmed, None, "8/00000001"))
    with pytest.raises(AirflowFailException, match="is another server by now"):
        sensor.poke(CONTEXT)


def test_another_server_is_noticed_by_the_next_process(source: list[Any]) -> None:
    kept: dict[str, Any] = {}
    store = SimpleNamespace(get=kept.get, set=kept.__setitem__)
    context: Any = {"ti": SimpleNamespace(try_number=1), "task_state_store": store}
    source.extend([("0/33", SERVER), ("reserved", 9, 20, True, 50, None, SERVER)])
    assert not position_sensor(mode="reschedule").poke(context)
    source.append(("reserved", 9, 20, True, 99, None, "7/00000002"))
    with pytest.raises(AirflowFailException, match="promoted"):
        position_sensor(mode="reschedule").poke(context)


def test_a_position_is_waited_for_in_the_triggerer(source: list[Any]) -> None:
    source.extend([("0/99", SERVER), ("reserved", 9, 20, True, 50, None, SERVER)])
    with pytest.raises(TaskDeferred) as raised:
        position_sensor(position="0/33", deferrable=True).execute(CONTEXT)
    trigger: Any = raised.value.trigger
    assert (trigger.max_lag, trigger.position, trigger.server) == (None, 51, SERVER)


def test_a_position_that_is_none_is_refused(source: list[Any]) -> None:
    with pytest.raises(AirflowFailException, match="Setting 'position' cannot be 'later'"):
        position_sensor(position="later").poke(CONTEXT)


def test_the_sensor_reports_to_airflows_metrics_at_each_look(
    source: list[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    told: list[Any] = []
    monkeypatch.setattr(slot_lag.stats, "gauge", lambda name, value, tags: told.append((name, value, tags)))
    source += [("reserved", 10, 20, True, 50, 7, SERVER), ("reserved", 4, 30, True, 50, 7, SERVER)]
    sensor = ReplicationSlotLagSensor(task_id="t", pipeline=ORDERS, max_lag=5, deferrable=False)
    # also while it waits
    assert [sensor.poke(CONTEXT) for _ in range(2)] == [False, True]
    lag, kept, of = "bottledwater.slot.lag_bytes", "bottledwater.slot.wal_kept_bytes", {"slot": "orders"}
    assert told == [(lag, 10, of), (kept, 20, of), (lag, 4, of), (kept, 30, of)]


# ------------------------------------------------------------------ the stream's end
def told(state: str = "streaming", id: str = "j1", **more: Any) -> StatusRecord:
    """A status as a job writes it."""
    return status_of(state, id=id, **{"position": "0/5", "permanent": True, "at": 5.0, **more})


@pytest.fixture
def looks(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """The statuses that looks give, in turn."""
    found: list[Any] = []
    monkeypatch.setattr(stream_error, "read", lambda *_, **__: (found.pop(0), 0.0))
    monkeypatch.setattr(StreamErrorSensor, "_cluster", lambda self: CLUSTER)
    return found


@pytest.mark.parametrize(
    ("status", "earlier"),
    [
        (None, ""),
        (told(), ""),
        # which ended before the sensor began: the stream of this run is on its way
        (told("failed", "j0", error="old"), "j0"),
        (told("stopped", "j0"), "j0"),
        (told("finished", "j0", kind="snapshot"), ""),
    ],
)
def test_a_stream_that_runs_or_may_start_is_waited_for(looks: list[Any], status: Any, earlier: str) -> None:
    looks.append(status)
    with pytest.raises(TaskDeferred) as raised:
        error_sensor(max_dead_letters="3", max_silence="50").execute(CONTEXT)
    trigger: Any = raised.value.trigger
    assert (trigger.earlier, trigger.max_silence, trigger.max_dead_letters) == (earlier, 50, 3)
    assert trigger.hook["settings"]["slot"] == "orders"
    assert Cluster(**trigger.cluster) == CLUSTER


def test_too_many_dead_letters_are_the_sensors_error_at_once(looks: list[Any]) -> None:
    looks.append(told(counters={"dead_letters": 9, "open_dead_letters": 4}))
    with pytest.raises(AirflowFailException, match="0/5: 4 dead letters are open"):
        error_sensor(max_dead_letters=3).execute(CONTEXT)


def test_a_verdict_of_the_trigger_is_the_sensors() -> None:
    sensor = error_sensor()
    with pytest.raises(AirflowFailException, match="0/5: schema refused"):
        sensor.execute_complete(CONTEXT, {"status": "failed", "message": "schema refused", "position": "0/5"})
    with pytest.raises(AirflowFailException, match="The stream failed: No stream"):
        sensor.execute_complete(CONTEXT, {"status": "failed", "message": "No stream has reported", "position": ""})
    sensor.execute_complete(CONTEXT, {"status": "ok", "position": "0/5", "counters": {}})


def test_without_a_trigger_the_tasks_state_remembers_what_was_seen(
    looks: list[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """In mode reschedule each look is a process of its own."""
    now = [1000.0]
    monkeypatch.setattr(stream_error.time, "time", lambda: now[0])
    values: dict[str, Any] = {}
    store = SimpleNamespace(get=values.get, set=lambda key, value: values.update({key: value}))
    context: Any = {"ti": SimpleNamespace(try_number=1), "task_state_store": store}

    def look(status: Any, after: float, interval: float = 200.0) -> bool:
        now[0] += after
        looks.append(status)
        return StreamErrorSensor(task_id="t", pipeline=ORDERS, deferrable=False, poke_interval=interval).poke(context)

    assert not look(told("failed", "j0", error="old"), 0)
    assert not look(told("failed", "j0", error="old"), 500)
    assert not look(told(at=6.0), 10)
    assert not look(told(at=7.0), 590)
    assert not look(told(at=7.0), 590)
    with pytest.raises(AirflowFailException, match="has not reported for 600 s"):
        look(told(at=7.0), 10)
    # what cannot be seen says nothing of the stream
    context["task_reschedule_count"] = 1
    sensor = StreamErrorSensor(task_id="t", pipeline=ORDERS, deferrable=False)
    looks.clear()
    monkeypatch.setattr(StreamErrorSensor, "_cluster", lambda self: (_ for _ in ()).throw(Outage("Kafka is away")))
    now[0] += 300
    assert not sensor.poke(context)
    monkeypatch.setattr(StreamErrorSensor, "_cluster", lambda self: CLUSTER)
    assert not look(told(at=7.0), 599)
    # the next try begins anew
    context["ti"].try_number = 2
    assert not look(told(at=7.0), 10)
    # while Airflow was away, it submitted no job; the time is counted for which it has looked
    assert not look(told(at=7.0), 3 * 86400, interval=10)
    for _ in range(8):
        assert not look(told(at=7.0), 60, interval=10)
    with pytest.raises(AirflowFailException, match="has not reported for 600 s"):
        look(told(at=7.0), 60, interval=10)
    assert look(told("stopped", at=8.0), 10)


def test_without_a_trigger_it_waits_for_the_task_of_a_stream_that_was_stopped_with_it(
    looks: list[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A retry of that task submits another job, and nobody would watch it."""
    now, fates = [1000.0], [tasks.Fate.GOES_ON, tasks.Fate.CLEARED, tasks.Fate.UNKNOWN, tasks.Fate.ENDED]
    monkeypatch.setattr(stream_error.time, "time", lambda: now[0])
    monkeypatch.setattr(tasks, "owners_fate", lambda owner: fates.pop(0) if owner == STREAM else None)
    values: dict[str, Any] = {}
    store = SimpleNamespace(get=values.get, set=lambda key, value: values.update({key: value}))
    context: Any = {"ti": SimpleNamespace(try_number=1), "task_state_store": store}
    sensor = StreamErrorSensor(task_id="t", pipeline=ORDERS, deferrable=False)
    stopped = told("stopped", stopped_by="task", owner=STREAM, at=6.0)
    looks.extend([told(), *[stopped] * 6])
    found = []
    for seconds in (0, 10, 59, 2, 1, 1, 1):
        now[0] += seconds
        found.append(sensor.poke(context))
    assert (found, fates) == ([False] * 6 + [True], [])


def test_a_first_look_that_fails_skips_a_sensor_that_shall_not_fail(source: list[Any], looks: list[Any]) -> None:
    """Whether it waits in the triggerer or not."""

    def execute(**arguments: Any) -> None:
        source.append(None)
        ReplicationSlotLagSensor(task_id="t", pipeline=ORDERS, **arguments).execute(CONTEXT)

    for deferrable in (True, False):
        for how in ({"soft_fail": True}, {"never_fail": True}):
            with pytest.raises(AirflowSkipException):
                execute(deferrable=deferrable, **how)
        with pytest.raises(AirflowFailException, match="does not exist"):
            execute(deferrable=deferrable)
    # of an outage, a retry may be the end
    source.append(Outage("away"))
    with pytest.raises(Outage):
        lag_sensor(soft_fail=True).execute(CONTEXT)
    source.append(Outage("away"))
    with pytest.raises(AirflowSkipException, match="away"):
        lag_sensor(never_fail=True).execute(CONTEXT)
    looks.append(told("failed", error="schema refused", id="j2", counters={"open_dead_letters": 1}))
    with pytest.raises(AirflowSkipException, match="1 dead letter"):
        error_sensor(soft_fail=True).execute(CONTEXT)
    source.append(("reserved", 11, 20, True, 50, None, SERVER))
    with pytest.raises(TaskDeferred):
        lag_sensor(max_lag=10, never_fail=True).execute(CONTEXT)


@pytest.mark.parametrize("status", ["failed", "ok"])
def test_old_news_of_the_trigger_end_no_watch(looks: list[Any], status: str) -> None:
    """A DAG was paused while its trigger fired; meanwhile the stream was started again."""
    event = {
        "status": status,
        "message": "has not reported",
        "position": "",
        "counters": {},
        "seen": ["j0", "failed", 4.0],
    }
    looks.extend([told(), told()])
    with pytest.raises(TaskDeferred) as raised:
        error_sensor().execute_complete(CONTEXT, event)
    assert isinstance(raised.value.trigger, stream_error.StreamErrorTrigger)
    # what is still so is the verdict
    same = {**event, "seen": ["j1", "streaming", 5.0]}
    looks.append(told())
    if status == "ok":
        error_sensor().execute_complete(CONTEXT, same)
        return
    with pytest.raises(AirflowFailException, match="has not reported"):
        error_sensor().execute_complete(CONTEXT, same)


# ------------------------------------------------------------------ a triggerer that cannot look
@pytest.mark.parametrize("sensor", [lag_sensor, error_sensor, dead_letters_sensor])
def test_what_the_triggerer_cannot_see_fails_the_sensor(sensor: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    trigger = SlotLagTrigger(postgres_conn_id="pg", slot="orders", max_lag=5)
    stored, lacking = list(trigger.serialize()), ["postgres_default"]
    event = {"status": "unseen", "message": "Nobody watches it.", "lacking": lacking, "trigger": stored, "seconds": 600}
    kept: dict[str, Any] = {}
    store = SimpleNamespace(get=kept.get, set=kept.__setitem__, delete=lambda key: kept.pop(key, None))
    now = [time.time()]
    monkeypatch.setattr(looking.time, "time", lambda: now[0])

    def resume(after: float, attempt: int = 1, *, runs: float = 0.0, **arguments: Any) -> None:
        now[0] += after
        ti = SimpleNamespace(try_number=attempt, start_date=datetime.now(UTC) - timedelta(seconds=runs))
        context: Any = {"ti": ti, "task_state_store": store}
        sensor(**arguments).resume_execution("execute_complete", {"event": event}, context)

    def goes_on(after: float, attempt: int = 1, **arguments: Any) -> TaskDeferred:
        with pytest.raises(TaskDeferred) as raised:
            resume(after, attempt, **arguments)
        again: Any = raised.value.trigger
        assert (again.serialize(), raised.value.method_name) == (trigger.serialize(), "execute_complete")
        return raised.value

    # found once: an outage of a secrets backend may have ended since the trigger looked
    goes_on(0)
    with pytest.raises(AirflowFailException, match=r"^Nobody watches it\.$"):
        resume(700)
    with pytest.raises(AirflowSkipException):
        resume(700, soft_fail=True)
    # the trigger could look in between; or it was another try
    goes_on(3600)
    goes_on(700, 2)
    # what is not found here, either, is waited for
    url = os.environ["AIRFLOW_CONN_POSTGRES_DEFAULT"]
    monkeypatch.delenv("AIRFLOW_CONN_POSTGRES_DEFAULT")
    # for what is left of the time
    for runs, left in ((0.0, 60.0), (45.0, 15.0), (600.0, 1.0)):
        timeout = goes_on(100, 2, timeout=60, runs=runs).timeout
        assert timeout is not None and timeout.total_seconds() == pytest.approx(left, abs=0.9)
    monkeypatch.setenv("AIRFLOW_CONN_POSTGRES_DEFAULT", url)
    goes_on(0, 2)
    # its looks may be far apart, and it may have waited for longer than others
    event["seconds"] = 7200
    with pytest.raises(AirflowFailException):
        resume(7200 + 1800, 2, poke_interval=1800)
