"""Triggers: what is stored of them, and what they make of what they see."""

from __future__ import annotations

import asyncio
import json
import socket
import time
from pathlib import Path
from typing import Any

import pytest

from airflow_bottledwater.errors import Outage
from airflow_bottledwater.hooks import spark_job
from airflow_bottledwater.operators.stream import StreamToKafkaOperator
from airflow_bottledwater.triggers import slot_lag, stream, stream_error
from airflow_bottledwater.triggers.slot_lag import SlotLagTrigger
from airflow_bottledwater.triggers.stream import StreamTrigger
from airflow_bottledwater.triggers.stream_error import StreamErrorTrigger

PIPELINE: dict[str, Any] = {
    "postgres_conn_id": "postgres_default",
    "kafka_conn_id": "kafka_default",
    "schema_registry_conn_id": None,
    "settings": {"slot": "orders", "tables": ["a", "b"], "output_format": "json"},
}
IDENTITY = {"folder": "/tmp/nowhere", "host": socket.gethostname()}


def watching(**arguments: Any) -> StreamTrigger:
    return StreamTrigger(**{"identity": IDENTITY, **PIPELINE, "poll_interval": 0.01, **arguments})


@pytest.mark.parametrize(
    "trigger",
    [
        StreamTrigger(identity=IDENTITY, **PIPELINE, poll_interval=2.5, deadline=1e9),
        StreamTrigger(identity=IDENTITY, **PIPELINE),
        SlotLagTrigger(postgres_conn_id="pg", slot="orders", max_lag=5, poll_interval=1.5),
        StreamErrorTrigger(
            **PIPELINE,
            cluster={"system_identifier": "1", "timeline": 1, "database": "d", "version": 160000},
            since=5.0,
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
    operator = StreamToKafkaOperator(task_id="stream", tables=["a"])
    assert operator.pipeline_hook.pipeline().kafka["sasl.password"] == connections
    _, arguments = StreamTrigger(identity=IDENTITY, **operator.trigger_arguments()).serialize()
    assert connections[:5] not in json.dumps(arguments, ensure_ascii=False)


def events(trigger: Any) -> list[dict[str, Any]]:
    async def collect() -> list[dict[str, Any]]:
        return [event.payload async for event in trigger.run()]

    return asyncio.run(collect())


@pytest.fixture(autouse=True)
def hurry(monkeypatch: pytest.MonkeyPatch) -> None:
    """No pauses."""
    pause = asyncio.sleep
    monkeypatch.setattr(asyncio, "sleep", lambda seconds: pause(0))


def test_a_job_that_ended_is_one_event_with_its_log(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (tmp_path / "job.log").write_text("".join(f"line {i}\n" for i in range(100)))
    looks = iter([True, True, False])
    monkeypatch.setattr(spark_job, "running", lambda identity: next(looks))
    identity = {**IDENTITY, "folder": str(tmp_path)}
    (event,) = events(watching(identity=identity))
    assert (event["status"], event["identity"]) == ("ended", identity)
    assert event["log"].splitlines() == [f"line {i}" for i in range(80, 100)]


def test_the_deadline_is_one_event_and_stops_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(spark_job, "running", lambda identity: True)
    assert events(watching(deadline=time.time() - 1)) == [{"status": "timeout", "identity": IDENTITY}]


@pytest.mark.usefixtures("connections")
def test_killed_by_a_user_it_stops_the_job_first_and_then_frees_the_slot(monkeypatch: pytest.MonkeyPatch) -> None:
    done: list[str] = []
    monkeypatch.setattr(spark_job, "stop", lambda identity, timeout: done.append("stop") or True)
    monkeypatch.setattr(stream, "stop_job", lambda pipeline, identity, timeout: done.append(pipeline.slot))
    asyncio.run(watching().on_kill())
    assert done == ["stop", "orders"]


@pytest.mark.usefixtures("connections")
def test_killed_while_the_source_is_away_it_still_stops_the_job(monkeypatch: pytest.MonkeyPatch) -> None:
    def away(*_: Any, **__: Any) -> None:
        raise Outage("PostgreSQL cannot be reached")

    done: list[str] = []
    monkeypatch.setattr(spark_job, "stop", lambda identity, timeout: done.append("stop") or True)
    monkeypatch.setattr(stream, "stop_job", away)
    asyncio.run(watching().on_kill())
    asyncio.run(watching(postgres_conn_id="nowhere").on_kill())
    assert done == ["stop", "stop"]


# ------------------------------------------------------------------ verdicts
@pytest.mark.parametrize(
    ("row", "status"),
    [
        (None, "failed"),
        (("lost", 5, 5), "failed"),
        (("reserved", None, 5), "failed"),
        (("reserved", 101, 500), None),
        (("reserved", 100, 500), "ok"),
        (("extended", 0, 500), "ok"),
        (("unreserved", -8, 0), "ok"),
    ],
)
def test_what_a_slots_lag_means(row: tuple[Any, ...] | None, status: str | None) -> None:
    event = slot_lag.judge("orders", row, 100)
    assert (event and event["status"]) == status
    if status == "failed":
        assert event and "'orders'" in event["message"]


def seen(**changes: Any) -> dict[str, Any]:
    status = {
        "state": "streaming", "job": {"kind": "stream"}, "position": "0/5", "counters": {"dead_letters": 2, "published": 7}, "error": "",
        "permanent": False, "at": 0.0,
    }  # fmt: skip
    return {**status, **changes}


@pytest.mark.parametrize(
    ("status", "limit", "verdict"),
    [
        (None, None, None),
        (seen(), None, None),
        (seen(), 2, None),
        (seen(), 1, "failed"),
        (seen(), 0, "failed"),
        (seen(state="stopped"), None, "ok"),
        (seen(state="finished"), None, "ok"),
        (seen(state="failed", permanent=True, error="schema refused"), None, "failed"),
        # it is submitted again
        (seen(state="failed", error="broker away"), None, None),
        # or nobody did
        (seen(state="failed", error="broker away", at=-3000.0), None, "failed"),
        # of a job before this one
        (seen(state="failed", permanent=True, error="old", at=-5000.0), None, None),
        (seen(state="stopped", at=-5000.0), None, None),
        # of a snapshot
        (seen(state="failed", permanent=True, job={"kind": "snapshot"}), None, None),
    ],
)
def test_what_a_streams_status_means(status: dict[str, Any] | None, limit: int | None, verdict: str | None) -> None:
    # seconds before the test runs, which may be long after it was collected
    status = status and {**status, "at": time.time() + status["at"]}
    event = stream_error.judge(status, since=time.time() - 4000, max_dead_letters=limit)
    assert (event and event["status"]) == verdict
    if status and status["error"] and verdict:
        assert event and event["message"] == status["error"]
