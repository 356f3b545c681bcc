"""A pipeline from Airflow's connections and an operator's settings.

Connections are those of the Postgres and Kafka providers, so that users reuse what they have; their secrets go nowhere but
into the :class:`~airflow_bottledwater.settings.Pipeline`.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from airflow.sdk import BaseHook
from airflow.sdk.log import mask_secret
from psycopg import conninfo, pq

from airflow_bottledwater.errors import Refused, SettingError
from airflow_bottledwater.hooks import schema_registry
from airflow_bottledwater.hooks.schema_registry import texts
from airflow_bottledwater.settings import Pipeline

#: set by us for each session (:mod:`airflow_bottledwater.postgres.connect`), whatever a connection says
_OURS = frozenset(["replication", "client_encoding"])

#: keys of a Postgres connection's extra that libpq knows (PQconndefaults); others belong to other tools
_LIBPQ = frozenset(option.keyword.decode() for option in pq.Conninfo.get_defaults()) - _OURS


#: of these the ones that libpq itself does not show (dispchar ``*`` of PQconninfoOption)
_SECRET = frozenset(option.keyword.decode() for option in pq.Conninfo.get_defaults() if option.dispchar == b"*")


def dsn(connection: Any) -> str:
    """A Postgres connection as libpq's connection string."""
    extra = json.loads(connection.extra or "{}")
    own: dict[str, Any] = {
        "host": connection.host,
        "port": connection.port,
        "dbname": connection.schema,
        "user": connection.login,
        "password": connection.password,
    }
    parts = {
        **{name: _text(value) for name, value in extra.items() if name in _LIBPQ},
        **{name: value for name, value in own.items() if value not in (None, "")},
    }
    return conninfo.make_conninfo(**{name: value for name, value in parts.items() if value not in (None, "")})


def _text(value: Any) -> Any:
    """libpq's switches are numbers, in JSON they may be booleans."""
    return int(value) if isinstance(value, bool) else value


def properties(connection: Any) -> dict[str, str]:
    """A Kafka connection as librdkafka properties: the Kafka provider keeps them in ``extra``."""
    found = texts(json.loads(connection.extra or "{}"))
    # of consumers; ours are configured by ourselves
    for name in ("group.id", "auto.offset.reset", "enable.auto.commit", "enable.auto.offset.store", "error_cb"):
        found.pop(name, None)
    return found


class PipelineHook(BaseHook):
    """The pipeline of an operator, a sensor or a trigger.

    :param postgres_conn_id: the source database.
    :param kafka_conn_id: the broker.
    :param schema_registry_conn_id: the registry; not asked for with JSON.
    :param settings: of :class:`~airflow_bottledwater.settings.Pipeline`, without its first three.
    """

    def __init__(
        self,
        postgres_conn_id: str,
        kafka_conn_id: str,
        schema_registry_conn_id: str | None,
        settings: Mapping[str, Any],
    ) -> None:
        super().__init__()
        self.postgres_conn_id = postgres_conn_id
        self.kafka_conn_id = kafka_conn_id
        self.schema_registry_conn_id = schema_registry_conn_id
        self.settings = dict(settings)

    def pipeline(self) -> Pipeline:
        """The pipeline.

        :raises Refused: a connection does not exist.
        :raises SettingError: a setting is unknown or not allowed.
        """
        found = {name: self._get(name) for name in self._needed()}
        return self._build(found)

    async def apipeline(self) -> Pipeline:
        """The same for a trigger."""
        found = {}
        for name in self._needed():
            try:
                found[name] = await self.aget_connection(name)
            except Exception as error:
                raise self._missing(name, error) from error
        return self._build(found)

    def postgres(self) -> str:
        """The source's connection string alone."""
        return self._masked(self._get(self.postgres_conn_id))

    async def apostgres(self) -> str:
        """The same for a trigger."""
        try:
            return self._masked(await self.aget_connection(self.postgres_conn_id))
        except Refused:
            raise
        except Exception as error:
            raise self._missing(self.postgres_conn_id, error) from error

    def _masked(self, connection: Any) -> str:
        found = dsn(connection)
        for name, value in conninfo.conninfo_to_dict(found).items():
            if name in _SECRET and value:
                mask_secret(str(value))
        return found

    def _needed(self) -> list[str]:
        for secret in ("postgres", "kafka", "registry"):
            if secret in self.settings:
                raise SettingError(secret, "(in settings)", "an Airflow connection, by its id")
        needed = [self.postgres_conn_id, self.kafka_conn_id]
        if self._avro and self.schema_registry_conn_id:
            needed.append(self.schema_registry_conn_id)
        return needed

    @property
    def _avro(self) -> bool:
        return (self.settings.get("output_format") or "avro") == "avro"

    def _get(self, name: str) -> Any:
        try:
            return self.get_connection(name)
        except Exception as error:
            raise self._missing(name, error) from error

    def _missing(self, name: str, error: Exception) -> Refused:
        return Refused(
            f"Airflow has no connection {name!r} ({type(error).__name__}).", "Create it under Admin > Connections."
        )

    def _build(self, found: Mapping[str, Any]) -> Pipeline:
        values: dict[str, Any] = {
            "postgres": self._masked(found[self.postgres_conn_id]),
            "kafka": properties(found[self.kafka_conn_id]),
            "registry": {},
        }
        if self._avro and self.schema_registry_conn_id:
            values["registry"] = schema_registry.properties(found[self.schema_registry_conn_id])
        for connection in found.values():
            if connection.password:
                mask_secret(connection.password)
        for name, value in values["kafka"].items():
            if "password" in name or "secret" in name:
                mask_secret(value)
        return Pipeline.of(**values, **self.settings)
