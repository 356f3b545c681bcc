"""Makes a pipeline from Airflow's connections and an operator's settings.

The connections are of the types of the Postgres and Kafka providers, so that users can reuse theirs; their secrets are
only passed to the :class:`~airflow_bottledwater.pipeline.settings.Settings`.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from airflow.sdk import BaseHook
from airflow.sdk.log import mask_secret

from airflow_bottledwater.errors import Refused, SettingError
from airflow_bottledwater.hooks import schema_registry
from airflow_bottledwater.hooks.connections import aconnections, connections
from airflow_bottledwater.hooks.schema_registry import texts
from airflow_bottledwater.hooks.source import dsn_of
from airflow_bottledwater.pipeline.formats import FORMATS
from airflow_bottledwater.pipeline.groups import SECRET_PROPERTIES, TOKENS
from airflow_bottledwater.pipeline.settings import SETTINGS, Settings


def properties(found: Any) -> dict[str, str]:
    """The librdkafka properties of a Kafka connection, which the Kafka provider keeps in ``extra``.

    :raises Refused: one of them is a function.
    """
    extra = json.loads(found.extra or "{}")
    if "oauth_cb" in extra:
        raise Refused(
            f"The Kafka connection {found.conn_id!r} has an oauth_cb, a function of this Airflow, which a Spark job "
            "cannot call.",
            TOKENS,
        )
    kept = texts(extra)
    # properties for consumers: those of this package are configured by the package itself
    for name in ("group.id", "auto.offset.reset", "enable.auto.commit", "enable.auto.offset.store", "error_cb"):
        kept.pop(name, None)
    return kept


class PipelineHook(BaseHook):
    """The pipeline of an operator, a sensor or a trigger.

    :param postgres_conn_id: the connection to the source database.
    :param kafka_conn_id: the connection to Kafka.
    :param schema_registry_conn_id: the connection to the registry; not used with JSON.
    :param settings: the settings of :class:`~airflow_bottledwater.pipeline.settings.Settings` except for postgres,
        kafka, registry and hash_key.
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

    @classmethod
    def of_state(cls, postgres_conn_id: str, kafka_conn_id: str, slot: str) -> PipelineHook:
        """The hook for what needs only the pipeline's name and its saved state: nothing is encoded, so that no registry
        is needed."""
        return PipelineHook(postgres_conn_id, kafka_conn_id, None, {"slot": slot, "format": "json"})

    def arguments(self) -> dict[str, Any]:
        """The arguments with which a trigger makes the same hook, as JSON values: connection ids and settings, no
        secrets."""
        return {
            "postgres_conn_id": self.postgres_conn_id,
            "kafka_conn_id": self.kafka_conn_id,
            "schema_registry_conn_id": self.schema_registry_conn_id,
            "settings": {
                name: list(value) if isinstance(value, tuple) else value for name, value in self.settings.items()
            },
        }

    def pipeline(self) -> Settings:
        """The pipeline, with the connections as they are defined now; their passwords are masked in logs. It has the
        key of ``hash_key_file`` if this host can read it: what does no more than watch or stop a job needs none. Where
        it is needed, :meth:`~airflow_bottledwater.pipeline.settings.Settings.with_hash_key` says what is wrong.

        :raises ConnectionNotFound: a connection is not found.
        :raises Outage: a connection could not be looked up.
        :raises SettingError: a setting is unknown or not allowed.
        """
        found = self._build(connections(self._needed()))
        try:
            return found.with_hash_key()
        except SettingError:
            return found

    def saved_settings(self) -> dict[str, Any]:
        """The settings of the pipeline's saved state, with the slot's name; nothing else of this hook's settings is
        used.

        :raises StateError: there is no such pipeline.
        :raises Outage: a connection is not found, or a server does not answer.
        """
        # imported here, since it imports psycopg and confluent-kafka, which a DAG processor does not need
        from airflow_bottledwater.state import saved

        slot = self.settings["slot"]
        # without a registry: whether one is needed is what is looked for
        bare = PipelineHook.of_state(self.postgres_conn_id, self.kafka_conn_id, slot)
        return {**saved.settings_of(bare.pipeline()), "slot": slot}

    async def apipeline(self) -> Settings:
        """Like :meth:`pipeline`, for a trigger, which needs no key of hashes: neither ``hash_key_file`` nor
        ``hash_key_conn_id`` is read."""
        return self._build(await aconnections(name for name in self._needed() if name != self._hash_key))

    def _needed(self) -> list[str]:
        for secret in ("postgres", "kafka", "registry", "hash_key"):
            if secret in self.settings:
                raise SettingError(secret, "(in settings)", "an Airflow connection, by its id")
        needed = [self.postgres_conn_id, self.kafka_conn_id]
        if self._avro and self.schema_registry_conn_id:
            needed.append(self.schema_registry_conn_id)
        if self._hash_key:
            needed.append(self._hash_key)
        return needed

    @property
    def _hash_key(self) -> str:
        return str(self.settings.get("hash_key_conn_id") or "")

    @property
    def _avro(self) -> bool:
        return FORMATS[self.settings.get("format") or SETTINGS["format"].default].uses_registry

    def _build(self, found: Mapping[str, Any]) -> Settings:
        values: dict[str, Any] = {
            "postgres": dsn_of(found[self.postgres_conn_id]),
            "kafka": properties(found[self.kafka_conn_id]),
            "registry": {},
        }
        if self._avro and self.schema_registry_conn_id:
            values["registry"] = schema_registry.properties(found[self.schema_registry_conn_id])
        if self._hash_key in found:
            values["hash_key"] = found[self._hash_key].password or ""
        for each in found.values():
            if each.password:
                mask_secret(each.password)
        for name, value in values["kafka"].items():
            if any(word in name for word in SECRET_PROPERTIES):
                mask_secret(value)
        return Settings.of(**values, **self.settings)
