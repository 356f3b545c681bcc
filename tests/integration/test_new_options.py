"""Options of tables that change between two jobs: what a consumer of before makes of the records of after, and one of
after of those of before, at each level of compatibility that a registry may have."""

from __future__ import annotations

import io
import json
from collections.abc import Iterator
from dataclasses import dataclass, field
from datetime import date
from typing import Any

import fastavro
import pytest
from confluent_kafka.schema_registry import SchemaRegistryClient

from airflow_bottledwater.local.registry import SchemaRegistry
from tests.support.options import HASH_KEY, hashed
from tests.support.topics import Flow, MakeFlow, read_all

LEVELS = {"BACKWARD", "FORWARD", "FULL"}
#: of consumers that read new records by the schema of before, and old records by that of after
OLD_READS, NEW_READS = {"FORWARD", "FULL"}, {"BACKWARD", "FULL"}
#: the only row of each table, in the new record with id 2
ROW = {"name": "Ann", "code": "xyz", "n": 7, "born": date(2000, 1, 1)}
TABLE = "CREATE TABLE {} (id int PRIMARY KEY, name text, code text NOT NULL, n int, born date)"
_GONE: Any = object()


@dataclass(frozen=True, slots=True)
class _Changed:
    """A change of options.

    :param old: what a consumer of before reads of the new record, as far as it is not :data:`ROW`; and ``new``, one of
        after of the old record. ``_GONE``: nothing, the field is not in its schema.
    :param levels: those that take it where columns that cannot be NULL are no unions with null.
    :param nullable: and otherwise.
    """

    before: dict[str, Any]
    after: dict[str, Any]
    old: dict[str, Any] = field(default_factory=dict)
    new: dict[str, Any] = field(default_factory=dict)
    levels: frozenset[str] = frozenset(LEVELS)
    nullable: frozenset[str] = frozenset(LEVELS)


#: no level
_NONE: frozenset[str] = frozenset()
CHANGES = {
    "left_out": _Changed({}, {"exclude": ["name"]}, {"name": None}, {"name": _GONE}),
    "required_left_out": _Changed(
        {}, {"exclude": ["code"]}, {"code": None}, {"code": _GONE}, levels=frozenset({"BACKWARD"})
    ),
    "again": _Changed({"exclude": ["name"]}, {}, {"name": _GONE}, {"name": None}),
    "required_again": _Changed(
        {"include": ["id", "name", "n", "born"]}, {}, {"code": _GONE}, {"code": None}, levels=frozenset({"FORWARD"})
    ),
    "required_renamed": _Changed(
        {}, {"rename": {"code": "no"}}, {"code": None}, {"code": _GONE, "no": None}, levels=_NONE
    ),
    "renamed": _Changed({}, {"rename": {"name": "full"}}, {"name": None}, {"name": _GONE, "full": None}),
    "masked": _Changed({}, {"mask": {"name": "first:1", "code": "constant:no"}}, {"name": "A", "code": "no"}),
    "null": _Changed({}, {"mask": {"n": "null"}}, {"n": None}),
    "required_null": _Changed({}, {"mask": {"code": "null"}}, {"code": None}, levels=frozenset({"BACKWARD"})),
    "hashed": _Changed({}, {"mask": {"code": "hash"}}, {"code": hashed("xyz")}),
    "hashed_number": _Changed({}, {"mask": {"n": "hash"}}, levels=_NONE, nullable=_NONE),
    "text": _Changed({}, {"temporal": {"born": "text"}}, levels=_NONE, nullable=_NONE),
    "plain": _Changed({}, {"temporal": {"born": "plain"}}, levels=_NONE, nullable=_NONE),
}
#: the same under each level, in a table for each
TABLES = {f"{name}_{level.lower()}": (change, level) for name, change in CHANGES.items() for level in sorted(LEVELS)}


def _insert(flow: Flow, id: int) -> None:
    flow.execute(*(f"INSERT INTO {table} VALUES ({id}, 'Ann', 'xyz', 7, '2000-01-01')" for table in TABLES))


def _options(when: str) -> dict[str, Any]:
    return {table: getattr(change, when) for table, (change, _) in TABLES.items()}


def _raw(flow: Flow) -> Iterator[tuple[str, list[bytes]]]:
    """The values of each table, as they are."""
    topics = [flow.topic(table) for table in TABLES]
    for table, found in zip(TABLES, read_all(flow.kafka, topics, decoders=(bytes, bytes)).values(), strict=True):
        yield table, [message.value for message in found]


def _row(read: Any, envelope: str) -> dict[str, Any]:
    return dict(read["after"] if envelope == "debezium" else read)


def _expected(id: int, differing: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in ({"id": id} | ROW | differing).items() if value is not _GONE}


@pytest.mark.parametrize("envelope", ["none", "debezium"])
def test_consumers_of_before_and_of_after_read_each_others_records(
    make_flow: MakeFlow, registry: SchemaRegistry, envelope: str
) -> None:
    flow = make_flow(
        registry, tables=tuple(TABLES), table_options=_options("before"), envelope=envelope, on_error="log",
        not_null="required" if envelope == "none" else "nullable", hash_key=HASH_KEY,
    )  # fmt: skip
    client = SchemaRegistryClient({"url": registry.url})
    flow.execute(*map(TABLE.format, TABLES))
    flow.create()
    for table, (_, level) in TABLES.items():
        client.set_compatibility(f"{flow.topic(table)}-value", level=level)
    flow.snapshot()
    _insert(flow, 1)
    flow.stream()
    flow.change(table_options=_options("after"))
    _insert(flow, 2)
    flow.stream()
    refused = {
        letter.value["relation"].removeprefix("public."): letter.value["error"] for letter in flow.dead_letters()
    }
    taken = {
        table for table, (change, level) in TABLES.items()
        if level in (change.levels if envelope == "none" else change.nullable)
    }  # fmt: skip
    assert TABLES.keys() - refused.keys() == taken
    assert all("refuses the schema" in error or "is not registered, although" in error for error in refused.values()), (
        refused
    )
    for table, values in _raw(flow):
        change, level = TABLES[table]
        if table not in taken:
            assert len(values) == 1
            continue
        first, second = values
        schemas = [json.loads(client.get_schema(int.from_bytes(v[1:5], "big")).schema_str) for v in values]
        if level in OLD_READS:
            read = fastavro.schemaless_reader(io.BytesIO(second[5:]), schemas[1], schemas[0])
            assert _row(read, envelope) == _expected(2, change.old), table
        if level in NEW_READS:
            read = fastavro.schemaless_reader(io.BytesIO(first[5:]), schemas[0], schemas[1])
            assert _row(read, envelope) == _expected(1, change.new), table
