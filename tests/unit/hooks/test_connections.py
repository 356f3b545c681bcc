"""Looking up a connection: one that is not found may be there at the next attempt."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

import pytest
from airflow.sdk import BaseHook
from airflow.sdk.exceptions import AirflowSecretsBackendAccessDenied

from airflow_bottledwater.errors import ConnectionNotFound, Outage
from airflow_bottledwater.hooks import connections, spark_target

LookUp = Callable[[str], Any]


@pytest.fixture(params=["operator", "trigger"])
def look_up(request: pytest.FixtureRequest) -> LookUp:
    """As an operator and as a trigger do it."""
    if request.param == "operator":
        return connections.connection
    return lambda conn_id: asyncio.run(connections.aconnection(conn_id))


def test_one_that_is_not_found_is_tried_again(look_up: LookUp, connect: Any) -> None:
    """Airflow says the same of a backend that is away."""
    with pytest.raises(
        Outage, match=r"^Airflow does not find the connection 'pg'.*create it under Admin > Connections"
    ):
        look_up("pg")
    connect("pg", conn_type="postgres", host="db")
    assert look_up("pg").host == "db"


def test_all_that_are_not_found_are_told(connect: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Who looks again in another place knows by them whether they are found there."""
    connect("pg", conn_type="postgres", host="db")
    with pytest.raises(ConnectionNotFound, match=r"'a'.*'b'.*The task's retries") as raised:
        connections.connections(["pg", "a", "b"])
    assert raised.value.conn_ids == ("a", "b")
    with pytest.raises(ConnectionNotFound, match=r"'a'.*'b'.*The triggerer looks it up again") as raised:
        asyncio.run(connections.aconnections(["pg", "a", "b"]))
    assert raised.value.conn_ids == ("a", "b")

    def denied(conn_id: str) -> Any:
        raise AirflowSecretsBackendAccessDenied(conn_id)

    monkeypatch.setattr(BaseHook, "get_connection", denied)
    with pytest.raises(ConnectionNotFound, match="does not let it be seen here"):
        connections.connection("pg")


def test_an_error_of_the_look_up_shows_no_password(look_up: LookUp, monkeypatch: pytest.MonkeyPatch) -> None:
    def away(conn_id: str) -> Any:
        raise ConnectionError("https://user:hunter2@vault/ does not answer")

    async def aaway(conn_id: str) -> Any:
        away(conn_id)

    monkeypatch.setattr(BaseHook, "get_connection", away)
    monkeypatch.setattr(BaseHook, "aget_connection", aaway)
    with pytest.raises(Outage, match=r"'pg' could not be looked up \(ConnectionError\)") as raised:
        look_up("pg")
    assert "hunter2" not in str(raised.value)


def test_a_spark_connection_that_is_not_found_is_no_refusal() -> None:
    with pytest.raises(Outage, match="Airflow does not find the Spark connection 'spark_nowhere'"):
        spark_target.connection_of("spark_nowhere")
