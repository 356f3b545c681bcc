"""Sensors: the verdict at the first look, and what is deferred."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from datetime import UTC, datetime
from types import SimpleNamespace
from typing import Any

import pytest
from airflow.sdk.exceptions import AirflowFailException, TaskDeferred

from airflow_bottledwater.errors import Outage
from airflow_bottledwater.model.slot import Cluster
from airflow_bottledwater.postgres import connect as postgres
from airflow_bottledwater.sensors import stream_error
from airflow_bottledwater.sensors.slot_lag import ReplicationSlotLagSensor
from airflow_bottledwater.sensors.stream_error import StreamErrorSensor

pytestmark = pytest.mark.usefixtures("connections")

CLUSTER = Cluster(system_identifier="1", timeline=1, database="d", version=160000)
CONTEXT: Any = {"ti": SimpleNamespace(start_date=datetime(2026, 1, 1, tzinfo=UTC))}


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
    source.append(("reserved", 10, 20))
    assert ReplicationSlotLagSensor(task_id="t", max_lag="10").execute(CONTEXT) is None


def test_a_slot_that_is_behind_is_waited_for(source: list[Any]) -> None:
    source.append(("reserved", 11, 20))
    with pytest.raises(TaskDeferred) as raised:
        ReplicationSlotLagSensor(task_id="t", slot="orders", max_lag=10, poke_interval=5, timeout=60).execute(CONTEXT)
    trigger: Any = raised.value.trigger
    assert (trigger.slot, trigger.max_lag, trigger.poll_interval) == ("orders", 10, 5)
    assert raised.value.timeout is not None and raised.value.timeout.total_seconds() == 60


@pytest.mark.parametrize("row", [None, ("lost", 1, 1)])
def test_a_slot_that_is_gone_fails_for_good(source: list[Any], row: Any) -> None:
    source.append(row)
    with pytest.raises(AirflowFailException, match="orders"):
        ReplicationSlotLagSensor(task_id="t", slot="orders").execute(CONTEXT)
    with pytest.raises(AirflowFailException, match="gone"):
        ReplicationSlotLagSensor(task_id="t").execute_complete(CONTEXT, {"status": "failed", "message": "gone"})


def test_a_source_that_is_away_is_left_for_a_retry(source: list[Any]) -> None:
    source.append(Outage("away"))
    with pytest.raises(Outage):
        ReplicationSlotLagSensor(task_id="t").execute(CONTEXT)


@pytest.fixture
def looks(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """What looks at the status give, in turn."""
    events: list[Any] = []
    monkeypatch.setattr(stream_error, "look", lambda *_, **__: events.pop(0))
    monkeypatch.setattr(StreamErrorSensor, "_cluster", lambda self: CLUSTER)
    return events


def test_a_stream_that_runs_is_waited_for(looks: list[Any]) -> None:
    looks.append(None)
    with pytest.raises(TaskDeferred) as raised:
        StreamErrorSensor(task_id="t", slot="orders", max_dead_letters=3).execute(CONTEXT)
    trigger: Any = raised.value.trigger
    assert (trigger.since, trigger.max_dead_letters, trigger.settings["slot"]) == (
        CONTEXT["ti"].start_date.timestamp(),
        3,
        "orders",
    )
    assert Cluster(**trigger.cluster) == CLUSTER


def test_a_streams_error_is_the_sensors(looks: list[Any]) -> None:
    looks.append({"status": "failed", "message": "schema refused", "position": "0/5"})
    with pytest.raises(AirflowFailException, match="0/5: schema refused"):
        StreamErrorSensor(task_id="t").execute(CONTEXT)


def test_a_stream_that_ended_in_order_ends_the_sensor(looks: list[Any]) -> None:
    looks.append({"status": "ok", "position": "0/5", "counters": {}})
    assert StreamErrorSensor(task_id="t").execute(CONTEXT) is None
