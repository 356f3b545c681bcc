"""Looking up a connection: only one that is not defined is a person's mistake."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

import pytest
from airflow.sdk.exceptions import AirflowRuntimeError, ErrorType
from airflow.sdk.execution_time import supervisor, task_runner
from airflow.sdk.execution_time.comms import ConnectionResult, ErrorResponse
from airflow.sdk.execution_time.secrets import ExecutionAPISecretsBackend
from airflow.secrets.environment_variables import EnvironmentVariablesBackend

from airflow_bottledwater.errors import Outage, Refused
from airflow_bottledwater.hooks import connections, spark_job

LookUp = Callable[[str], Any]


@pytest.fixture(params=["operator", "trigger"])
def look_up(request: pytest.FixtureRequest) -> LookUp:
    """As an operator and as a trigger do it."""
    if request.param == "operator":
        return connections.connection
    return lambda conn_id: asyncio.run(connections.aconnection(conn_id))


class Vault(EnvironmentVariablesBackend):
    """A secrets backend that may be away."""

    away = False

    def get_connection(self, conn_id: str, team_name: str | None = None) -> Any:
        if self.away:
            raise ConnectionError("https://user:hunter2@vault/ does not answer")
        return None


FOUND = ConnectionResult(
    conn_id="pg", conn_type="postgres", host="db", schema=None, login=None, password=None, port=None, extra=None
)


class Supervisor:
    """What the API server answers to the task's process, through its supervisor."""

    def __init__(self) -> None:
        self.answer: Any = None

    def send(self, message: Any) -> Any:
        assert message.conn_id == "pg"
        if isinstance(self.answer, Exception):
            raise self.answer
        return self.answer

    async def asend(self, message: Any) -> Any:
        return self.send(message)


@pytest.fixture
def vault(monkeypatch: pytest.MonkeyPatch) -> Vault:
    """Beside the environment, without an API server."""
    made = Vault()
    monkeypatch.setattr(supervisor, "ensure_secrets_backend_loaded", lambda: [made, EnvironmentVariablesBackend()])
    return made


@pytest.fixture
def server(monkeypatch: pytest.MonkeyPatch) -> Supervisor:
    """As in a worker: the API server first."""
    made = Supervisor()
    monkeypatch.setattr(task_runner, "SUPERVISOR_COMMS", made, raising=False)
    backends = [EnvironmentVariablesBackend(), ExecutionAPISecretsBackend()]
    monkeypatch.setattr(supervisor, "ensure_secrets_backend_loaded", lambda: backends)
    return made


def test_one_that_nobody_defines_is_refused(look_up: LookUp) -> None:
    with pytest.raises(Refused, match=r"^Airflow has no connection 'pg'\. Create it under Admin > Connections"):
        look_up("pg")


def test_a_secrets_backend_that_is_away_is_an_outage(look_up: LookUp, vault: Vault, connect: Any) -> None:
    with pytest.raises(Refused):
        look_up("pg")
    vault.away = True
    with pytest.raises(Outage, match="'pg' could not be looked up \\(Vault: ConnectionError\\)") as raised:
        look_up("pg")
    assert "hunter2" not in str(raised.value)
    # defined elsewhere, it does not matter
    connect("pg", conn_type="postgres", host="db")
    assert look_up("pg").host == "db"


@pytest.mark.parametrize(
    ("answer", "expected", "message"),
    [
        (ErrorResponse(error=ErrorType.CONNECTION_NOT_FOUND), Refused, "has no connection 'pg'"),
        (AirflowRuntimeError(ErrorResponse(error=ErrorType.CONNECTION_NOT_FOUND)), Refused, "has no connection 'pg'"),
        (ErrorResponse(error=ErrorType.API_SERVER_ERROR), Outage, "API_SERVER_ERROR"),
        # of which the supervisor tells in this way
        (AirflowRuntimeError(ErrorResponse(error=ErrorType.API_SERVER_ERROR)), Outage, "API_SERVER_ERROR"),
        (ErrorResponse(error=ErrorType.PERMISSION_DENIED), Outage, "AccessDenied"),
        (EOFError(), Outage, "EOFError"),
    ],
)
def test_an_api_server_that_is_away_is_an_outage(
    look_up: LookUp, server: Supervisor, answer: Any, expected: type[Exception], message: str
) -> None:
    server.answer = answer
    with pytest.raises(expected, match=message):
        look_up("pg")
    server.answer = FOUND
    assert look_up("pg").host == "db"


def test_an_outage_that_has_just_ended_is_one_all_the_same(server: Supervisor, monkeypatch: pytest.MonkeyPatch) -> None:
    answers = iter([ErrorResponse(error=ErrorType.API_SERVER_ERROR), FOUND])
    monkeypatch.setattr(server, "send", lambda message: next(answers))
    with pytest.raises(Outage, match="has it only now"):
        connections.connection("pg")


def test_a_spark_connection_that_cannot_be_looked_up_is_no_refusal(vault: Vault) -> None:
    vault.away = True
    with pytest.raises(Outage, match="The Spark connection 'spark_nowhere' could not be looked up"):
        spark_job.connection_of("spark_nowhere")
