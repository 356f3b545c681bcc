"""The connection type of a Confluent-compatible schema registry."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any
from urllib.parse import urlsplit, urlunsplit

from airflow.sdk import BaseHook

from airflow_bottledwater.errors import BottledWaterError
from airflow_bottledwater.hooks import connections
from airflow_bottledwater.kafka.registry import Registry


def properties(connection: Any) -> dict[str, str]:
    """The properties of the registry's client from a connection: the URL from ``host`` (or, as in Airflow's HTTP
    connections, from ``host``, ``port`` and the scheme in ``schema``), user and password, and all others from
    ``extra``."""
    found = {"url": _url(connection), **json.loads(connection.extra or "{}")}
    if connection.login:
        found["basic.auth.user.info"] = f"{connection.login}:{connection.password or ''}"
    return texts(found)


def _url(connection: Any) -> str:
    host = connection.host or ""
    if not host:
        return ""
    parts = urlsplit(host if "://" in host else f"{connection.schema or 'http'}://{host}")
    if connection.port and parts.netloc.rpartition("]")[2].rpartition("@")[2].find(":") < 0:
        parts = parts._replace(netloc=f"{parts.netloc}:{connection.port}")
    return urlunsplit(parts)


def texts(extra: Mapping[str, Any]) -> dict[str, str]:
    """A connection's extra as properties of a client, which are texts; null means not set."""
    return {str(k): str(v).lower() if isinstance(v, bool) else str(v) for k, v in extra.items() if v is not None}


class SchemaRegistryHook(BaseHook):
    """The hook of a schema registry.

    :param schema_registry_conn_id: connection of type Schema Registry.
    """

    conn_name_attr = "schema_registry_conn_id"
    default_conn_name = "schema_registry_default"
    conn_type = "schema_registry"
    hook_name = "Schema Registry"

    def __init__(self, schema_registry_conn_id: str = default_conn_name, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.schema_registry_conn_id = schema_registry_conn_id

    def get_conn(self) -> Registry:
        """A client of the registry.

        :raises Outage: the connection is not found.
        """
        return Registry(properties(connections.connection(self.schema_registry_conn_id)))

    def test_connection(self) -> tuple[bool, str]:
        """Check, for Airflow's UI, that the registry answers a request for its subjects."""
        try:
            self.get_conn().ping()
        except BottledWaterError as error:
            return False, str(error)
        return True, "The registry answers."
