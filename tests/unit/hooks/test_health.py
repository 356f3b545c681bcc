"""The watch over all pipelines of a Kafka, without servers: what it says when there is nothing to look at."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence
from types import SimpleNamespace
from typing import Any

import pytest

from airflow_bottledwater.errors import Outage
from airflow_bottledwater.hooks import health
from airflow_bottledwater.jobs.pipelines import HealthLimits
from airflow_bottledwater.postgres import connect, server, slot
from airflow_bottledwater.state.control_records import encode, status_key
from tests.support.status import status_of

Look = Callable[..., dict[str, list[str]]]


@pytest.fixture
def look(monkeypatch: pytest.MonkeyPatch) -> Look:
    """Looks at pipelines of these names, and at connections of these databases."""

    def looked(
        *names: str, databases: dict[str, str] | None = None, others: Sequence[str] = (), **more: Any
    ) -> dict[str, list[str]]:
        record = encode(status_of(slot="s", stopped_by="request"))
        records = {status_key(name): record for name in names}
        records |= {status_key(name): {**record, "state": ["of another version"]} for name in others}
        shared = SimpleNamespace(all=lambda now: records)
        monkeypatch.setattr(health, "ControlTopic", SimpleNamespace(of=lambda _: contextlib.nullcontext(shared)))
        monkeypatch.setattr("airflow_bottledwater.jobs.alive.unheard", lambda *_: set())
        monkeypatch.setattr(
            health, "SourceHook", lambda conn_id: SimpleNamespace(dsn=lambda: (databases or {})[conn_id])
        )

        def session(dsn: str, _: str) -> Any:
            if not dsn:
                raise Outage("It is away.")
            return contextlib.nullcontext(dsn)

        monkeypatch.setattr(connect, "session", session)
        monkeypatch.setattr(server, "identify", lambda dsn: SimpleNamespace(pipeline=lambda slot: f"{dsn}/{slot}"))
        monkeypatch.setattr(slot, "states", lambda _: [])
        return health.look({}, postgres_conn_ids=list(databases or ()), limits=HealthLimits(), **more).wrong

    return looked


def test_a_kafka_without_pipelines_is_no_healthy_one(look: Look) -> None:
    assert look("1/shop/s") == {}
    (told,) = look()["pipelines"]
    assert "No pipeline has ever reported to this Kafka" in told
    assert list(look(pipelines=["s"])) == ["s"]


def test_a_status_of_another_version_is_wrong_and_no_pipeline_that_is_missing(look: Look) -> None:
    found = look("1/shop/s", others=["1/shop/t"], pipelines=["s", "t"])
    assert list(found) == ["1/shop/t"] and "was written by another version of the provider" in found["1/shop/t"][0]
    assert list(look(others=["1/shop/t"])) == ["1/shop/t"]
    assert look("1/shop/s", others=["1/shop/t"], pipelines=["s"]) == {}
    assert list(look(others=["1/shop/t"], databases={"c": "1/shop"})) == ["1/shop/t"]


def test_a_connection_to_a_database_that_no_pipeline_has_compares_nothing(look: Look) -> None:
    found = look(
        "1/shop/s", "1/a/b/s", databases={"right": "1/shop", "odd": "1/a/b", "other": "1/postgres", "away": ""}
    )
    assert list(found) == ["connection other", "connection away"] and found["connection away"] == ["It is away."]
    assert "its database 'postgres' (system identifier 1) as its source" in found["connection other"][0]
    # that of a pipeline that is not watched is right
    assert look("1/shop/s", "1/other/t", databases={"one": "1/other"}, pipelines=["1/shop/*"]) == {}
