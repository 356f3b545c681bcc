"""Looks up Airflow's connections, and distinguishes one that is not defined from one that cannot be looked up right now."""

from __future__ import annotations

import asyncio
from typing import Any

from airflow.sdk import BaseHook
from airflow.sdk.exceptions import AirflowNotFoundException

from airflow_bottledwater.errors import BottledWaterError, Outage, Refused


def connection(conn_id: str, *, kind: str = "") -> Any:
    """Look up a connection.

    :param kind: the type of connection that it has to be, for the message.
    :raises Refused: it is not defined.
    :raises Outage: it could not be looked up, since Airflow's API server or a secrets backend does not answer.
    """
    try:
        return BaseHook.get_connection(conn_id)
    except AirflowNotFoundException as error:
        raise _lookup_error(conn_id, kind, _why_not_found(conn_id)) from error
    except Exception as error:
        raise _lookup_error(conn_id, kind, type(error).__name__) from error


async def aconnection(conn_id: str, *, kind: str = "") -> Any:
    """Like :func:`connection`, for a trigger."""
    try:
        return await BaseHook.aget_connection(conn_id)
    except AirflowNotFoundException as error:
        raise _lookup_error(conn_id, kind, await asyncio.to_thread(_why_not_found, conn_id)) from error
    except Exception as error:
        raise _lookup_error(conn_id, kind, type(error).__name__) from error


def _lookup_error(conn_id: str, kind: str, trouble: str) -> BottledWaterError:
    what = f"{kind} connection".strip()
    if trouble:
        return Outage(
            f"The {what} {conn_id!r} could not be looked up ({trouble}).",
            "It is tried again with the task's retries. If it stays so, look at Airflow's API server and at the secrets backend.",
        )
    return Refused(
        f"Airflow has no {what} {conn_id!r}.", "Create it under Admin > Connections, or in your secrets backend."
    )


def _why_not_found(conn_id: str) -> str:
    """Why one of the places in which connections are defined did not answer; empty if all of them answer that it is not defined.

    Airflow 3.3 raises "not defined" in both cases: ``_get_connection`` of airflow/sdk/execution_time/context.py ignores whatever a
    secrets backend raises, and the backend that asks the API server ignores most of its errors. So each backend is asked once more.
    These are internal names of Airflow, used nowhere else. The message contains only the error's name, since its text may contain an
    address with a password.
    """
    from airflow.sdk.exceptions import AirflowRuntimeError, ErrorType
    from airflow.sdk.execution_time import task_runner
    from airflow.sdk.execution_time.comms import ErrorResponse, GetConnection
    from airflow.sdk.execution_time.secrets import ExecutionAPISecretsBackend
    from airflow.sdk.execution_time.supervisor import ensure_secrets_backend_loaded

    for backend in ensure_secrets_backend_loaded():
        try:
            if isinstance(backend, ExecutionAPISecretsBackend):
                answer: Any = task_runner.SUPERVISOR_COMMS.send(GetConnection(conn_id=conn_id))
                if isinstance(answer, ErrorResponse):
                    raise AirflowRuntimeError(answer)
            else:
                answer = backend.get_connection(conn_id=conn_id)
        except AirflowRuntimeError as error:
            if error.error.error is not ErrorType.CONNECTION_NOT_FOUND:
                return f"the API server: {error.error.error.value}"
            continue
        except Exception as error:
            return f"{type(backend).__name__}: {type(error).__name__}"
        if answer is not None:
            return f"{type(backend).__name__} has it only now"
    return ""
