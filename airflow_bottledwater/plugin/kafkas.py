"""Which Kafkas the page shows: those of Airflow's connections."""

from __future__ import annotations

import logging
import os
import threading
import time
from collections.abc import Collection
from typing import Any

from airflow.configuration import conf
from airflow.models.connection import Connection
from airflow.models.team import Team
from airflow.utils.session import create_session
from sqlalchemy import select

from airflow_bottledwater.hooks.pipeline import properties
from airflow_bottledwater.plugin.watch import KafkaWatch

log = logging.getLogger(__name__)

#: the type of connection, and the prefix of environment variables that define one; and what is behind the name of a
#: team, whose own variables have another ``_`` before it (airflow/secrets/environment_variables.py)
_TYPE, _VARIABLE, _OF_TEAM = "kafka", "AIRFLOW_CONN_", "___"
#: the connection that a pipeline has by default, which a secrets backend may have
_DEFAULT = "kafka_default"
#: seconds for which the connections are not looked up again
_KEPT = 30.0

#: of each connection the one under whose id its Kafka is listed, and the properties of its own client
_Known = dict[str, tuple[str, dict[str, str]]]
_found: tuple[float, _Known] = (0.0, {})
#: the teams of connections that only a team sees, and the ids that Airflow's database has and that are not found
_teams: dict[str, str] = {}
_lost: list[str] = []
_lock = threading.Lock()


def watches() -> dict[str, KafkaWatch]:
    """The watch of each Kafka, by the id of its connection; of several connections with the same brokers, the first. It
    has the others' properties, too: the first one may be a consumer's, which may not read what pipelines report."""
    clients: dict[str, list[dict[str, str]]] = {}
    for first, kafka in _connections().values():
        clients.setdefault(first, []).append(kafka)
    return {first: KafkaWatch.of(first, *kafkas) for first, kafkas in clients.items()}


def listed_as(conn_id: str) -> str:
    """The id under which the Kafka of a connection is listed, if it is listed at all."""
    return _connections().get(conn_id, (conn_id,))[0]


def missing() -> list[str]:
    """The ids of connections that the setting names, and that were never found, or are none to a Kafka; and those that
    Airflow's database has, and that are not found all the same."""
    known = _connections()
    return [each for each in dict.fromkeys([*_named(), *_lost]) if each not in known]


def team_of(conn_id: str) -> str | None:
    """The team that alone sees a connection; None if all do."""
    _connections()
    return _teams.get(conn_id)


def _connections() -> _Known:
    global _found, _teams, _lost
    with _lock:
        at, before = _found
        if time.monotonic() - at < _KEPT and before:
            return before
        by_brokers: dict[str, str] = {}
        known: _Known = {}
        # Airflow does not tell a secrets backend that does not answer from a connection that is not defined
        backend = bool(conf.get("secrets", "backend", fallback=""))
        ids, stored = _ids()
        lost = []
        for conn_id, team in ids.items():
            kafka = _properties(conn_id, team)
            if kafka is None and conn_id in stored:
                lost.append(conn_id)
            if kafka is None and backend and conn_id in before:
                kafka = before[conn_id][1]
            if kafka:
                known[conn_id] = by_brokers.setdefault(kafka["bootstrap.servers"], conn_id), kafka
        _teams = {conn_id: team for conn_id, team in ids.items() if team is not None}
        _found, _lost = (time.monotonic(), known), lost
        return known


def _ids() -> tuple[dict[str, str | None], set[str]]:
    """The ids of connections that may be to a Kafka, each with the team that alone sees it: Airflow's database, the
    environment and the setting name them. And those of them that the database has."""
    teams = conf.getboolean("core", "multi_team", fallback=False)
    asked = select(Connection.conn_id, Connection.team_name).where(Connection.conn_type == _TYPE)
    with create_session() as session:
        stored = {conn_id: team if teams else None for conn_id, team in session.execute(asked)}
    defined = _defined(Team.get_all_team_names() if teams else None)
    found = {**dict.fromkeys((_DEFAULT, *_named())), **defined, **stored}
    return {each: found[each] for each in sorted(found, key=lambda each: (each != _DEFAULT, each))}, {*stored}


def _defined(teams: Collection[str] | None) -> dict[str, str | None]:
    """The ids of connections that are variables of the environment, each with its team.

    :param teams: None: there are no teams.
    """
    names = [each.removeprefix(_VARIABLE) for each in os.environ if each.startswith(_VARIABLE)]
    found: dict[str, str | None] = {}
    for team in sorted(teams or ()):
        prefix = f"_{team.upper()}{_OF_TEAM}"
        found |= {name.removeprefix(prefix).lower(): team for name in names if name.startswith(prefix)}
    return found | {name.lower(): None for name in names if teams is None or _OF_TEAM not in name}


def _named() -> list[str]:
    """The ids that the setting names."""
    return [
        each for part in conf.get("bottledwater", "kafka_conn_ids", fallback="").split(",") if (each := part.strip())
    ]


def _properties(conn_id: str, team: str | None = None) -> dict[str, str] | None:
    """The properties of the client; empty if it is no connection to a Kafka, None if it is not found.

    :param team: that sees the connection.
    """
    try:
        found: Any = Connection.get_connection_from_secrets(conn_id, team_name=team)
        return properties(found) if found.conn_type == _TYPE and "bootstrap.servers" in (found.extra or "") else {}
    except Exception as error:
        # not defined; or a secrets backend does not answer, whose errors are of many classes
        log.debug("The connection %r is not found: %s", conn_id, type(error).__name__)
        return None
