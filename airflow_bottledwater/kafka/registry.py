"""The schema registry. Of a job, only the driver uses it; but workers that verify a topic read the schemas that its records name."""

from __future__ import annotations

import functools
import re
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Any

from airflow_bottledwater.errors import BottledWaterError, CredentialsRefused, Outage, Refused, SchemaRefused

# the client takes a fifth of a second to import, and few jobs have a schema to register
if TYPE_CHECKING:
    from confluent_kafka.schema_registry import SchemaRegistryClient

#: requests for schemas at the same time
_AT_ONCE = 8


class Registry:
    """Registers schemas and checks their compatibility, over Confluent's API.

    :param config: properties of confluent-kafka's client: ``url``, ``basic.auth.user.info``, ``ssl.…``.
    """

    def __init__(self, config: Mapping[str, str]) -> None:
        options: dict[str, Any] = {"max.retries": 1, "timeout": 10.0, **config, "url": config["url"].rstrip("/")}
        # for messages: without the user and password that a URL may contain
        self.url = re.sub("//[^/]*@", "//", config["url"])
        self._options = options

    @functools.cached_property
    def _client(self) -> SchemaRegistryClient:
        """The client, made when it is first used.

        :raises Refused: it does not accept a property.
        """
        from confluent_kafka.schema_registry import SchemaRegistryClient

        try:
            return SchemaRegistryClient(self._options)
        except (ValueError, KeyError) as error:
            raise Refused(f"Schema registry setting: {error}") from None

    def register(self, subject: str, schema: str) -> int:
        """Register an Avro schema; returns its id.

        :raises Outage: the registry does not answer.
        :raises SchemaRefused: it refuses the schema, for example as not compatible with the subject's versions (409).
        :raises Refused: it denies access, or answers with another error.
        """
        from confluent_kafka.schema_registry import Schema

        client = self._client
        try:
            return int(client.register_schema(subject, Schema(schema, "AVRO")))
        except Exception as error:
            raise self._translate(error, subject) from error

    def register_all(self, schemas: Sequence[tuple[str, str]]) -> list[int]:
        """Call :meth:`register` for each (subject, schema), several at a time; returns the ids in this order."""
        with ThreadPoolExecutor(_AT_ONCE, "register") as pool:
            return list(pool.map(lambda each: self.register(*each), schemas))

    def refused(self, schemas: Sequence[tuple[str, str]]) -> list[str]:
        """The reasons why some of these (subject, schema) pairs could not be registered; nothing is registered. A subject that does not
        exist yet accepts any schema.

        :raises Outage: the registry does not answer.
        """
        present = self._subjects()

        def problem(subject: str, schema: str) -> str:
            try:
                self.check(subject, schema)
            except Refused as error:
                return str(error)
            return ""

        known = [each for each in schemas if each[0] in present]
        with ThreadPoolExecutor(_AT_ONCE, "check") as pool:
            return [found for found in pool.map(lambda each: problem(*each), known) if found]

    def check(self, subject: str, schema: str) -> None:
        """Check that the schema could be registered, without registering it.

        :raises Outage: the registry does not answer.
        :raises SchemaRefused: the schema would be refused.
        :raises Refused: the registry denies access, or answers with another error.
        """
        from confluent_kafka.schema_registry import Schema
        from confluent_kafka.schema_registry.error import SchemaRegistryError

        client = self._client
        try:
            compatible = client.test_compatibility(subject, Schema(schema, "AVRO"))
        except SchemaRegistryError as error:
            if error.http_status_code == 404:  # no such subject yet
                return
            raise self._translate(error, subject) from error
        except Exception as error:
            raise self._translate(error, subject) from error
        if not compatible:
            raise self._incompatible(subject, "the registry says that it is not compatible with the latest version")

    def schema(self, number: int) -> str | None:
        """The text of a schema by its id; None if there is none.

        :raises Outage: the registry does not answer.
        :raises Refused: it denies access.
        """
        from confluent_kafka.schema_registry.error import SchemaRegistryError

        client = self._client
        try:
            return str(client.get_schema(number).schema_str)
        except Exception as error:
            if isinstance(error, SchemaRegistryError) and error.http_status_code == 404:
                return None
            raise self._translate(error, f"with id {number}") from error

    def ping(self) -> None:
        """Check that the registry answers, by asking for its subjects.

        :raises Outage: it does not answer.
        :raises Refused: it denies access, or answers with another error.
        """
        self._subjects()

    def _subjects(self) -> set[str]:
        client = self._client
        try:
            return set(client.get_subjects())
        except Exception as error:
            raise self._translate(error, "") from error

    def _incompatible(self, subject: str, why: str) -> SchemaRefused:
        return SchemaRefused(
            f"The schema registry at {self.url} refuses the schema of subject {subject!r}: {why}.",
            "Make the change compatible, relax the subject's compatibility level, or use another topic prefix.",
        )

    def _translate(self, error: Exception, subject: str) -> BottledWaterError:
        from confluent_kafka.schema_registry.error import SchemaRegistryError

        if isinstance(error, SchemaRegistryError):
            if error.http_status_code == 409 or error.http_status_code == 422:
                return self._incompatible(subject, str(error.error_message)[:300])
            if error.http_status_code in (401, 403):
                kind = CredentialsRefused if error.http_status_code == 401 else Refused
                return kind(f"The schema registry at {self.url} denies access.", "Check user and password.")
            if error.http_status_code < 500 and error.http_status_code != 429:
                return Refused(
                    f"The schema registry at {self.url}: {error.error_message} (HTTP {error.http_status_code})."
                )
        return Outage(
            f"The schema registry at {self.url} does not answer: {type(error).__name__}: {str(error)[:200]}.",
            "Check the address (--schema-registry) and the registry.",
        )
