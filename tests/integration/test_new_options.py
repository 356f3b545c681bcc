"""Options of tables that change between two jobs: what a consumer of before makes of the records of after, and one of
after of those of before, at each level of compatibility that a registry may have."""

from __future__ import annotations

import io
import json
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from datetime import date
from typing import Any

import fastavro
import jsonschema
import pytest
from confluent_kafka.schema_registry import SchemaRegistryClient

from airflow_bottledwater.local.registry import SchemaRegistry
from tests.support.options import HASH_KEY, hashed
from tests.support.protobuf_messages import message_class
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
    :param others: those that take it in JSON Schema and Protobuf, whose fields are never required, and stay in the
        schema.
    """

    before: dict[str, Any]
    after: dict[str, Any]
    old: dict[str, Any] = field(default_factory=dict)
    new: dict[str, Any] = field(default_factory=dict)
    levels: frozenset[str] = frozenset(LEVELS)
    nullable: frozenset[str] = frozenset(LEVELS)
    others: frozenset[str] = frozenset(LEVELS)


#: no level, and that of a field that no consumer of before knows
_NONE: frozenset[str] = frozenset()
_ADDED = frozenset({"BACKWARD"})
CHANGES = {
    "left_out": _Changed({}, {"exclude": ["name"]}, {"name": None}, {"name": _GONE}),
    "required_left_out": _Changed(
        {}, {"exclude": ["code"]}, {"code": None}, {"code": _GONE}, levels=frozenset({"BACKWARD"})
    ),
    "again": _Changed({"exclude": ["name"]}, {}, {"name": _GONE}, {"name": None}, others=_ADDED),
    "required_again": _Changed(
        {"include": ["id", "name", "n", "born"]},
        {},
        {"code": _GONE},
        {"code": None},
        levels=frozenset({"FORWARD"}),
        others=_ADDED,
    ),
    "required_renamed": _Changed(
        {}, {"rename": {"code": "no"}}, {"code": None}, {"code": _GONE, "no": None}, levels=_NONE, others=_ADDED
    ),
    "renamed": _Changed({}, {"rename": {"name": "full"}}, {"name": None}, {"name": _GONE, "full": None}, others=_ADDED),
    "masked": _Changed({}, {"mask": {"name": "first:1", "code": "constant:no"}}, {"name": "A", "code": "no"}),
    "null": _Changed({}, {"mask": {"n": "null"}}, {"n": None}),
    "required_null": _Changed({}, {"mask": {"code": "null"}}, {"code": None}, levels=frozenset({"BACKWARD"})),
    "hashed": _Changed({}, {"mask": {"code": "hash"}}, {"code": hashed("xyz")}),
    "hashed_number": _Changed({}, {"mask": {"n": "hash"}}, levels=_NONE, nullable=_NONE, others=_NONE),
    "text": _Changed({}, {"temporal": {"born": "text"}}, levels=_NONE, nullable=_NONE),
    "plain": _Changed({}, {"temporal": {"born": "plain"}}, levels=_NONE, nullable=_NONE),
}
#: the same under each level, in a table for each
TABLES = {f"{name}_{level.lower()}": (change, level) for name, change in CHANGES.items() for level in sorted(LEVELS)}


def _insert(flow: Flow, id: int) -> None:
    flow.execute(*(f"INSERT INTO {table} VALUES ({id}, 'Ann', 'xyz', 7, '2000-01-01')" for table in TABLES))


def _options(when: str) -> dict[str, Any]:
    return {table: getattr(change, when) for table, (change, _) in TABLES.items()}


def _both(flow: Flow, taken: set[str]) -> Iterator[tuple[str, bytes, bytes]]:
    """The values of before and of after of each table whose change was taken, as they are; others have the first."""
    topics = [flow.topic(table) for table in TABLES]
    for table, found in zip(TABLES, read_all(flow.kafka, topics, decoders=(bytes, bytes)).values(), strict=True):
        values = [message.value for message in found]
        assert len(values) == (2 if table in taken else 1), table
        if table in taken:
            yield table, values[0], values[1]


def _row(read: Any, envelope: str) -> dict[str, Any]:
    return dict(read["after"] if envelope == "debezium" else read)


def _expected(id: int, differing: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in ({"id": id} | ROW | differing).items() if value is not _GONE}


def _published(flow: Flow, registry: SchemaRegistry) -> tuple[SchemaRegistryClient, dict[str, str]]:
    """A registry with the schemas of both records, and the tables whose second one was refused, with the reasons."""
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
    return client, {
        letter.value["relation"].removeprefix("public."): letter.value["error"] for letter in flow.dead_letters()
    }


def _check_refused(refused: dict[str, str], taken: set[str]) -> None:
    assert TABLES.keys() - refused.keys() == taken
    assert all("refuses the schema" in error or "is not registered, although" in error for error in refused.values()), (
        refused
    )


def _schema(client: SchemaRegistryClient, value: bytes) -> str:
    return client.get_schema(int.from_bytes(value[1:5], "big")).schema_str or ""


@pytest.mark.long
@pytest.mark.parametrize("envelope", ["none", "debezium"])
def test_consumers_of_before_and_of_after_read_each_others_records(
    make_flow: MakeFlow, registry: SchemaRegistry, envelope: str
) -> None:
    flow = make_flow(
        registry, tables=tuple(TABLES), table_options=_options("before"), envelope=envelope, on_error="log",
        not_null="required" if envelope == "none" else "nullable", hash_key=HASH_KEY,
    )  # fmt: skip
    client, refused = _published(flow, registry)
    taken = {
        table for table, (change, level) in TABLES.items()
        if level in (change.levels if envelope == "none" else change.nullable)
    }  # fmt: skip
    _check_refused(refused, taken)
    for table, first, second in _both(flow, taken):
        change, level = TABLES[table]
        schemas = [json.loads(_schema(client, value)) for value in (first, second)]
        if level in OLD_READS:
            read = fastavro.schemaless_reader(io.BytesIO(second[5:]), schemas[1], schemas[0])
            assert _row(read, envelope) == _expected(2, change.old), table
        if level in NEW_READS:
            read = fastavro.schemaless_reader(io.BytesIO(first[5:]), schemas[0], schemas[1])
            assert _row(read, envelope) == _expected(1, change.new), table


# ---------------------------------------------------------------------- JSON Schema and Protobuf
def _by_json_schema(schema: str, data: bytes) -> dict[str, Any]:
    """What a consumer who validates by a schema reads: all of its properties, None for what is not there."""
    value, parsed = json.loads(data[5:]), json.loads(schema)
    jsonschema.Draft7Validator(parsed).validate(value)
    return {name: value.get(name) for name in parsed["properties"]}


def _by_protobuf(schema: str, data: bytes) -> dict[str, Any]:
    """What a consumer whose classes are made from a schema reads; None for a field that is not there."""
    message: Any = message_class(schema).FromString(data[6:])
    return {
        each.name: getattr(message, each.name) if message.HasField(each.name) else None
        for each in message.DESCRIPTOR.fields
    }


def _written(id: int, change: _Changed) -> dict[str, Any]:
    """The row of a record, as far as it has values: under the options of before, or of after."""
    row = {"id": id} | ROW | {"born": "2000-01-01"}
    if id == 1:
        return {name: value for name, value in row.items() if change.old.get(name) is not _GONE}
    now = {name: value for name, value in change.old.items() if value is not _GONE}
    now |= {new: ROW[name] for name, new in change.after.get("rename", {}).items()}
    return {name: value for name, value in (row | now).items() if value is not None}


@pytest.mark.long
@pytest.mark.parametrize(
    ("form", "read"), [("json-schema", _by_json_schema), ("protobuf", _by_protobuf)], ids=["json-schema", "protobuf"]
)
def test_so_do_those_of_json_schema_and_protobuf(
    make_flow: MakeFlow, registry: SchemaRegistry, form: str, read: Callable[[str, bytes], dict[str, Any]]
) -> None:
    flow = make_flow(
        registry, format=form, tables=tuple(TABLES), table_options=_options("before"), on_error="log",
        not_null="required", hash_key=HASH_KEY,
    )  # fmt: skip
    client, refused = _published(flow, registry)
    taken = {table for table, (change, level) in TABLES.items() if level in change.others}
    _check_refused(refused, taken)
    for table, first, second in _both(flow, taken):
        change, level = TABLES[table]
        then, now = _schema(client, first), _schema(client, second)
        rows = [_written(id, change) for id in (1, 2)]
        # a schema keeps the fields of before, so that a consumer of after still finds what old records have
        fields = [rows[0].keys(), rows[0].keys() | rows[1].keys()]
        assert read(then, first) == {name: rows[0][name] for name in fields[0]}
        if level in NEW_READS:
            assert read(now, first) == {name: rows[0].get(name) for name in fields[1]}, table
        if level in OLD_READS or form == "protobuf":
            assert read(then, second) == {name: rows[1].get(name) for name in fields[0]}, table
        elif change.others == _ADDED:
            with pytest.raises(jsonschema.ValidationError, match="Additional properties"):
                read(then, second)
