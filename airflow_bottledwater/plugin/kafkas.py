"""Which Kafkas the page shows: those of Airflow's connections."""

from __future__ import annotations

import logging
import os
import threading
import time
from typing import Any

from airflow.configuration import conf
from airflow.models.connection import Connection
from airflow.utils.session import create_session
from sqlalchemy import select

from airflow_bottledwater.hooks.pipeline import properties
from airflow_bottledwater.plugin.watch import KafkaWatch

log = logging.getLogger(__name__)

#: the type of connection, and the prefix of environment variables that define one (airflow/secrets/__init__.py)
_TYPE, _VARIABLE = "kafka", "AIRFLOW_CONN_"
#: the connection that a pipeline has by default, which a secrets backend may have
_DEFAULT = "kafka_default"
#: seconds for which the connections are not looked up again
_KEPT = 30.0

#: of each connection the one under whose id its Kafka is listed, and the properties of its own client
_Known = dict[str, tuple[str, dict[str, str]]]
_found: tuple[float, _Known] = (0.0, {})
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
    """The ids of connections that the setting names, and that were never found, or are none to a Kafka."""
    known = _connections()
    return [each for each in _named() if each not in known]


def _connections() -> _Known:
    global _found
    with _lock:
        at, before = _found
        if time.monotonic() - at < _KEPT and before:
            return before
        by_brokers: dict[str, str] = {}
        known: _Known = {}
        # Airflow does not tell a secrets backend that does not answer from a connection that is not defined
        backend = bool(conf.get("secrets", "backend", fallback=""))
        for conn_id in _ids():
            kafka = _properties(conn_id)
            if kafka is None and backend and conn_id in before:
                kafka = before[conn_id][1]
            if kafka:
                known[conn_id] = by_brokers.setdefault(kafka["bootstrap.servers"], conn_id), kafka
        _found = time.monotonic(), known
        return known


def _ids() -> list[str]:
    """The ids of connections that may be to a Kafka: Airflow's database, the environment and the setting name them."""
    with create_session() as session:
        stored = list(session.scalars(select(Connection.conn_id).where(Connection.conn_type == _TYPE)))
    defined = [name.removeprefix(_VARIABLE).lower() for name in os.environ if name.startswith(_VARIABLE)]
    return sorted({*stored, *defined, *_named(), _DEFAULT}, key=lambda each: (each != _DEFAULT, each))


def _named() -> list[str]:
    """The ids that the setting names."""
    return [
        each for part in conf.get("bottledwater", "kafka_conn_ids", fallback="").split(",") if (each := part.strip())
    ]


def _properties(conn_id: str) -> dict[str, str] | None:
    """The properties of the client; empty if it is no connection to a Kafka, None if it is not found."""
    try:
        found: Any = Connection.get_connection_from_secrets(conn_id)
        return properties(found) if found.conn_type == _TYPE and "bootstrap.servers" in (found.extra or "") else {}
    except Exception as error:
        # not defined; or a secrets backend does not answer, whose errors are of many classes
        log.debug("The connection %r is not found: %s", conn_id, type(error).__name__)
        return None
