"""What a probe is told of a pipeline, and that it is told in time."""

from __future__ import annotations

import socket
import time
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest

from airflow_bottledwater.errors import Outage
from airflow_bottledwater.jobs import health
from airflow_bottledwater.model.problem import Problem
from airflow_bottledwater.pipeline.settings import Settings
from airflow_bottledwater.postgres.slot import SlotState
from tests.support.status import status_of

SLOT = SlotState("shop", "pgoutput", "logical", "db", None, 0x10, "reserved", 1234, 5678, None)
NOW = 10_000.0


_LETTERS = Problem("dead-letters", "public.t", "1 of its rows")


def problem(
    found: SlotState | None = SLOT, *, max_lag: Any = None, max_age: Any = None, letters: int = 0, **status: Any
) -> str:
    told = status_of(status.pop("state", "streaming"), slot="shop", **{"at": NOW - 1, **status})
    return health.problem(found, told, max_lag=max_lag, max_age=max_age, now=NOW, max_dead_letters=letters)


@pytest.mark.parametrize("state", ["snapshot", "streaming", "waiting"])
def test_a_job_that_works_has_no_problem(state: str) -> None:
    assert problem(state=state) == ""
    assert problem(state=state, max_lag=1234, max_age=1) == ""
    assert problem(state=state, problems=[_LETTERS], counters={"open_dead_letters": 2}, letters=2) == ""
    # the clock of another host
    assert problem(state=state, at=NOW + 60) == ""


@pytest.mark.parametrize(
    ("status", "why"),
    [
        ({"state": "starting"}, "starting"),
        ({"state": "stopped"}, "No job runs: the last one is stopped"),
        ({"state": "finished"}, "No job runs: the last one is finished"),
        ({"state": "failed", "error": "Kafka is away."}, "failed for a transient reason: Kafka is away."),
        ({"state": "failed", "error": "It is lost.", "permanent": True}, "failed for good: It is lost."),
        ({"error": "Something is wrong."}, "reports an error: Something is wrong."),
        ({"at": NOW - 31}, "not reported for 31 s, more than 30 s"),
        ({"at": NOW - 5, "max_age": 4}, "more than 4 s"),
        ({"max_lag": 1233}, "1,234 bytes behind, more than 1,233"),
        ({"found": None}, "There is no slot 'shop'"),
        ({"problems": [Problem("not-followed", "public.t", "It has no key.")]}, "public.t: It has no key."),
        ({"problems": [_LETTERS], "counters": {"open_dead_letters": 1}}, "public.t: 1 of its rows"),
        ({"counters": {"open_dead_letters": 1}}, "1 dead letter is open"),
        ({"found": replace(SLOT, invalidated="wal_removed")}, "was invalidated"),
        ({"found": replace(SLOT, plugin="other")}, "another application"),
    ],
)
def test_each_reason_not_to_work_is_named(status: dict[str, Any], why: str) -> None:
    found = problem(**status)
    assert why in found, found


def test_the_age_that_is_allowed_follows_the_heartbeats() -> None:
    assert problem(at=NOW - 29) == ""
    assert problem(at=NOW - 59, heartbeat=6.0) == ""
    assert "more than 60 s" in problem(at=NOW - 61, heartbeat=6.0)
    assert problem(at=NOW - 61, heartbeat=6.0, max_age=70) == ""


def test_a_pipeline_without_a_job_does_not_work() -> None:
    assert "ever reported" in health.problem(SLOT, None, max_lag=None, max_age=None, now=NOW)


# ------------------------------------------------------------------ servers that say nothing
@pytest.fixture
def silent() -> Iterator[int]:
    """The port of a server that accepts connections, and never answers."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        yield server.getsockname()[1]


@pytest.fixture
def closed() -> int:
    """A port that nobody listens on."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        port: int = server.getsockname()[1]
    return port


def pipeline(postgres: int, kafka: int) -> Settings:
    return Settings.of(
        postgres=f"host=127.0.0.1 port={postgres} dbname=shop",
        kafka={"bootstrap.servers": f"127.0.0.1:{kafka}"},
        format="json",
    )


def test_a_silent_source_is_not_waited_for_any_longer(silent: int) -> None:
    began = time.monotonic()
    with pytest.raises(Outage, match=r"PostgreSQL at 127.0.0.1:\d+, database shop has not answered within 0.5 s"):
        health.look(pipeline(silent, silent), timeout=0.5)
    assert time.monotonic() - began < 30


@pytest.mark.parametrize("kafka", ["silent", "closed"])
def test_neither_is_a_kafka_that_is_away(
    kafka: str, monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest
) -> None:
    port = request.getfixturevalue(kafka)
    monkeypatch.setattr(health, "_slot", lambda pipeline: (None, SLOT))
    began = time.monotonic()
    with pytest.raises(Outage, match=rf"Kafka at 127.0.0.1:{port} has not answered within 0.5 s"):
        health.look(pipeline(1, port), timeout=0.5)
    assert time.monotonic() - began < 30


def test_a_source_that_is_away_is_named_at_once(closed: int) -> None:
    with pytest.raises(Outage, match="cannot be reached"):
        health.look(pipeline(closed, closed), timeout=20)
