"""DDL statements as records: what an event trigger has written (:mod:`airflow_bottledwater.postgres.ddl`), with the ids
of the schemas that records have from there on."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from typing import Annotated, Any

import msgspec

from airflow_bottledwater.decoding import prepare
from airflow_bottledwater.encoding.mapping import TableMapping
from airflow_bottledwater.errors import TableRefused
from airflow_bottledwater.model.version import Version
from airflow_bottledwater.postgres.pgoutput import RelationColumn, RelationMessage
from airflow_bottledwater.state.pinned import PinnedTable

#: what the trigger writes for the stream alone
_OURS = ("oid", "replica_identity", "columns")

_Oid = Annotated[int, msgspec.Meta(ge=0, lt=1 << 32)]
_Typmod = Annotated[int, msgspec.Meta(ge=-(1 << 31), lt=1 << 31)]


class _Table(msgspec.Struct):
    """A table that a statement made or altered, as the trigger describes it.

    :param columns: name, type, modifier, and whether it is in the replica identity, of each.
    """

    oid: _Oid
    schema: str
    name: str
    replica_identity: str
    columns: list[tuple[str, _Oid, _Typmod, bool]] = []


prepare(_Table)


class Statements:
    """Makes the values of records.

    :param pinned: the pipeline's tables by oid.
    :param resolve: makes a version of a table, see
        :meth:`~airflow_bottledwater.stream.relations.Resolver.of_statement`.
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
            objects: list[dict[str, Any]] = [{**each} for each in found["objects"]]
            _dumped(found)
        except (ValueError, TypeError, KeyError, RecursionError):
            return content  # who may connect may write a message with any prefix
        schemas: dict[str, int | None] = {}
        for each in objects if self._mapping.format.uses_registry else ():
            schemas |= self._schemas(each, current)
        found["objects"] = [{name: of for name, of in each.items() if name not in _OURS} for each in objects]
        if schemas:
            found["schemas"] = schemas
        return _dumped(found)

    def _schemas(self, described: Mapping[str, Any], current: Callable[[int], Version | None]) -> dict[str, int | None]:
        """The ids by subject; None of one that is refused. Empty if it is none of the pipeline's tables with schemas.

        :param described: an object of a statement.
        """
        try:
            table = msgspec.convert(described, _Table)
        except msgspec.ValidationError:
            return {}
        if (pinned := self._pinned.get(table.oid)) is None or pinned.table.outbox:
            return {}
        columns = tuple(RelationColumn(key, name, oid, typmod) for name, oid, typmod, key in table.columns)
        message = RelationMessage(table.oid, table.schema, table.name, table.replica_identity, columns)
        try:
            version = self._resolve(message, current(table.oid))
        except TableRefused:
            return {f"{pinned.topic}-value": None}
        if version is None:
            return {}
        keys = {f"{version.topic}-key": version.key_schema} if version.table.keyed else {}
        return keys | {f"{version.topic}-value": None if version.refused else version.value_schema}


def _dumped(value: Any) -> bytes:
    return json.dumps(value, ensure_ascii=False).encode()
