"""What readers take for something else; tests/integration/test_readers.py compares it with what Avro's Java reader
makes of it."""

from __future__ import annotations

import json
from typing import Any

import pytest

from airflow_bottledwater.encoding.meaning import misread, same


def decimal(scale: int, precision: int = 12) -> dict[str, Any]:
    return {"type": "bytes", "logicalType": "decimal", "precision": precision, "scale": scale}


DATE, TIME = {"type": "int", "logicalType": "date"}, {"type": "long", "logicalType": "time-micros"}
INSTANT = {"type": "long", "logicalType": "timestamp-micros"}
LOCAL = {"type": "long", "logicalType": "local-timestamp-micros"}
UUID = {"type": "string", "logicalType": "uuid"}


def schema(kind: Any, **more: Any) -> str:
    field = {"name": "a", "type": ["null", kind], "default": None, **more}
    return json.dumps({"type": "record", "name": "t", "namespace": "bottledwater.public", "fields": [field]})


@pytest.mark.parametrize(
    ("written", "reader"),
    [
        (decimal(4), decimal(2)),
        (decimal(2), decimal(4)),
        (decimal(2), "bytes"),
        (decimal(2), "string"),
        ("string", decimal(2)),
        (DATE, "int"),
        ("int", DATE),
        (DATE, INSTANT),
        (DATE, LOCAL),
        (DATE, "double"),
        (INSTANT, "long"),
        (INSTANT, LOCAL),
        (LOCAL, INSTANT),
        (TIME, "long"),
        (TIME, INSTANT),
        ("bytes", "string"),
    ],
)
def test_what_is_read_as_something_else_without_an_error_is_told(written: Any, reader: Any) -> None:
    (told,) = misread(schema(written), schema(reader))
    assert told.startswith("a (")


@pytest.mark.parametrize(
    ("written", "reader"),
    [
        (decimal(2, 10), decimal(2, 20)),
        ("int", "long"),
        ("long", "double"),
        ("float", "double"),
        ("string", "bytes"),
        (UUID, "string"),
        ("string", UUID),
    ],
)
def test_what_avro_reads_with_the_same_meaning_is_not(written: Any, reader: Any) -> None:
    assert misread(schema(written), schema(reader)) == []


def test_what_a_reader_refuses_is_not_misread() -> None:
    for written, reader in (("long", "int"), ("int", "string"), (INSTANT, DATE), ("boolean", "int")):
        assert misread(schema(written), schema(reader)) == []
    one = {"type": "enum", "name": "mood", "symbols": ["sad", "ok"]}
    assert misread(schema({**one, "symbols": ["ok", "sad", "glad"]}), schema(one)) == []
    assert misread("{", schema("int")) == []


def test_it_is_found_inside_of_arrays_maps_records_and_where_a_type_is_named_again() -> None:
    def place(scale: int) -> str:
        inner = {"type": "record", "name": "place", "fields": [{"name": "at", "type": ["null", decimal(scale)]}]}
        fields = [
            {"name": "one", "type": ["null", inner]},
            {"name": "list", "type": {"type": "array", "items": ["null", decimal(scale)]}},
            {"name": "map", "type": {"type": "map", "values": ["null", decimal(scale)]}},
            {"name": "again", "type": ["null", "place"]},
        ]
        return json.dumps({"type": "record", "name": "t", "fields": fields})

    assert [told.split(" ")[0] for told in misread(place(1), place(2))] == ["one.at", "list", "map"]
    assert misread(place(1), place(1)) == []


def test_comments_and_defaults_say_nothing_and_names_and_types_do() -> None:
    assert same(schema("int", doc="x"), schema({"type": "int"}))
    assert same(schema(decimal(2)), schema(decimal(2)))
    assert not same(schema(decimal(2)), schema(decimal(2, 13)))
    assert not same(schema("long"), schema(INSTANT))
    assert not same(schema("int"), schema("int").replace("bottledwater.public", "other"))
    assert not same(schema("int"), schema("int", name="b"))
    assert not same("[", schema("int"))
    inner = {"type": "enum", "name": "bottledwater.public.e", "symbols": ["x"]}
    assert same(schema(inner), schema({**inner, "name": "e", "namespace": "bottledwater.public"}))
