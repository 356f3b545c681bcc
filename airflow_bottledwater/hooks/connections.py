"""Looks up Airflow's connections."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from airflow.sdk import BaseHook
from airflow.sdk.exceptions import AirflowNotFoundException, AirflowSecretsBackendAccessDenied

from airflow_bottledwater.errors import ConnectionNotFound, Outage

#: who looks a connection up again that is not found
_TASK, _TRIGGERER = "The task's retries look it up again.", "The triggerer looks it up again, at each of its looks."
#: what a triggerer needs
IN_TRIGGERER = (
    "A triggerer needs the connections that the workers have: in Airflow's database, in its own environment, or in a "
    "secrets backend that lets it read them, too; and the files that they name."
)


def connection(conn_id: str, *, kind: str = "") -> Any:
    """Look up a connection.

    :param kind: the type of connection that it has to be, for the message.
    :raises ConnectionNotFound: it is not found. Airflow says the same of a connection that nobody has defined and of
        one whose secrets backend, or whose API server, does not answer (``_get_connection`` of
        airflow/sdk/execution_time/context.py ignores what a backend raises), so neither is final: the task's retries
        look again.
    :raises Outage: it could not be looked up.
    """
    try:
        return BaseHook.get_connection(conn_id)
    except Exception as error:
        raise _not_found(conn_id, kind, error, _TASK) from error


async def aconnection(conn_id: str, *, kind: str = "") -> Any:
    """Like :func:`connection`, for a trigger."""
    try:
        return await BaseHook.aget_connection(conn_id)
    except Exception as error:
        raise _not_found(conn_id, kind, error, f"{_TRIGGERER} {IN_TRIGGERER}") from error


def connections(conn_ids: Iterable[str]) -> dict[str, Any]:
    """Look several connections up; returns them by their ids.

    :raises ConnectionNotFound: one or more are not found; the message names all of them.
    :raises Outage: one or more could not be looked up.
    """
    found: dict[str, Any] = {}
    missing = []
    for conn_id in conn_ids:
        try:
            found[conn_id] = connection(conn_id)
        except Outage as error:
            missing.append(error)
    return _complete(found, missing)


async def aconnections(conn_ids: Iterable[str]) -> dict[str, Any]:
    """Like :func:`connections`, for a trigger."""
    found: dict[str, Any] = {}
    missing = []
    for conn_id in conn_ids:
        try:
            found[conn_id] = await aconnection(conn_id)
        except Outage as error:
            missing.append(error)
    return _complete(found, missing)


def _complete(found: dict[str, Any], missing: list[Outage]) -> dict[str, Any]:
    if missing:
        remedies = dict.fromkeys(each.remedy for each in missing)
        said = " ".join(each.what for each in missing), " ".join(remedies)
        not_found = [conn_id for each in missing if isinstance(each, ConnectionNotFound) for conn_id in each.conn_ids]
        raise (ConnectionNotFound(*said, not_found) if not_found else Outage(*said)) from missing[0]
    return found


def _not_found(conn_id: str, kind: str, error: Exception, again: str) -> Outage:
    what = f"{kind} connection".strip()
    if isinstance(error, AirflowNotFoundException | AirflowSecretsBackendAccessDenied):
        why = "it is not defined, or a secrets backend or the API server does not answer"
        if isinstance(error, AirflowSecretsBackendAccessDenied):
            why = "a secrets backend, or the API server, does not let it be seen here"
        return ConnectionNotFound(
            f"Airflow does not find the {what} {conn_id!r}: {why}.",
            "If it is not defined, create it under Admin > Connections, or in your secrets backend. Otherwise look at "
            f"the backend and at Airflow's API server. {again}",
            [conn_id],
        )
    # only the error's name, since its text may contain an address with a password
    return Outage(
        f"The {what} {conn_id!r} could not be looked up ({type(error).__name__}).",
        f"{again} If it stays so, look at Airflow's API server and at the secrets backend.",
    )
