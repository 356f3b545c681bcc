"""DDL statements as records: what an event trigger has written (:mod:`airflow_bottledwater.postgres.ddl`), with the ids
of the schemas that records have from there on."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from typing import Any

from airflow_bottledwater.encoding.mapping import TableMapping
from airflow_bottledwater.errors import Refused
from airflow_bottledwater.model.version import Version
from airflow_bottledwater.postgres.pgoutput import RelationColumn, RelationMessage
from airflow_bottledwater.state.pinned import PinnedTable

#: what the trigger writes for the stream alone
_OURS = ("oid", "replica_identity", "columns")


class Statements:
    """Makes the values of records.

    :param pinned: the pipeline's tables by oid.
    :param resolve: makes a version of a table, see :class:`~airflow_bottledwater.stream.relations.Resolver`.
    """

    def __init__(
        self,
        mapping: TableMapping,
        pinned: Mapping[int, PinnedTable],
        resolve: Callable[[RelationMessage, Version | None], Version | None],
    ) -> None:
        self._mapping, self._pinned, self._resolve = mapping, pinned, resolve

    def __call__(self, content: bytes, current: Callable[[int], Version | None]) -> bytes:
        """The value of a statement's record.

        :param content: of its message; what is not a trigger's stays as it is.
        :param current: the version that a table's rows have had until here, by its oid; None if none has come yet.
        :raises Outage: the source or the registry does not answer.
        """
        try:
            found = json.loads(content)
            objects = list(found["objects"])
        except (ValueError, TypeError, KeyError):
            return content
        schemas: dict[str, int | None] = {}
        for each in objects:
            if self._mapping.format.uses_registry and each.get("oid") in self._pinned:
                schemas |= self._schemas(each, current(each["oid"]))
        found["objects"] = [{name: of for name, of in each.items() if name not in _OURS} for each in objects]
        if schemas:
            found["schemas"] = schemas
        return json.dumps(found, ensure_ascii=False).encode()

    def _schemas(self, table: Mapping[str, Any], current: Version | None) -> dict[str, int | None]:
        """The ids by subject; None of one that is refused."""
        columns = tuple(
            RelationColumn(key, name, type_oid, typmod) for name, type_oid, typmod, key in table.get("columns", ())
        )
        oid = table["oid"]
        message = RelationMessage(oid, table["schema"], table["name"], table["replica_identity"], columns)
        try:
            version = self._resolve(message, current)
        except Refused:
            return {f"{self._pinned[oid].topic}-value": None}
        if version is None:
            return {}
        subjects = [subject for subject, _ in self._mapping.subjects(version.topic, version.table)]
        numbers = [version.key_schema, version.value_schema][2 - len(subjects) :]
        return {subject: number if not version.refused or subject.endswith("-key") else None
                for subject, number in zip(subjects, numbers, strict=True)}  # fmt: skip
