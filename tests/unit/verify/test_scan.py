"""Rows and records of plain types have the same hashes where they are equal, and others where they are not."""

from __future__ import annotations

import io
import json
import struct
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import fastavro
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from airflow_bottledwater.encoding import avro, names, types
from airflow_bottledwater.encoding.envelope import Envelope, envelope_schema
from airflow_bottledwater.model.relation import Column, ColumnType, SourceTable
from airflow_bottledwater.pipeline.formats import FORMATS, JSON
from airflow_bottledwater.verify.program import compile_scan
from airflow_bottledwater.verify.scan import PlainScan, Scan
from airflow_bottledwater.verify.values import Expectation, TopicReader, Unreadable, canonical
from tests.support import reference
from tests.support.blocks import Records, rows
from tests.support.examples import examples
from tests.support.protobuf_messages import fill, message_class

pytestmark = pytest.mark.slow

KEY, VALUE = 7, 70_000
NUMERIC_12_2 = (12 << 16 | 2) + 4


def kind(oid: int, typmod: int = -1) -> ColumnType:
    return ColumnType(oid, typmod, oid, typmod, "b", f"type {oid}")


TEXT = st.text(st.characters(codec="utf-8", exclude_characters="\0"), max_size=20)
DAY = st.one_of(
    st.dates().map(str), st.sampled_from(["0044-03-15 BC", "10000-01-01", "infinity", "-infinity", "4714-11-24 BC"])
)
CLOCK = st.times().map(lambda t: f"{t:%H:%M:%S}" + (f".{t.microsecond:06d}".rstrip("0") if t.microsecond else ""))
STAMP = st.one_of(
    st.tuples(st.dates(), CLOCK).map(lambda p: f"{p[0]} {p[1]}"),
    st.sampled_from(["infinity", "-infinity", "0001-12-31 23:59:59 BC", "10000-01-01 00:00:00"]),
)


def shortest(value: float) -> str:
    """As PostgreSQL writes it."""
    return {"inf": "Infinity", "-inf": "-Infinity", "nan": "NaN"}.get(str(value), repr(value))


def array(element: ColumnType, dimensions: int = 1) -> ColumnType:
    return ColumnType(1, -1, 1, -1, "b", f"{element.name}[]", element=element, dimensions=dimensions)


def quoted(element: str | None) -> str:
    """An element as array_out writes it (src/backend/utils/adt/arrayfuncs.c)."""
    if element is None:
        return "NULL"
    if element and element.upper() != "NULL" and not any(c in '"\\{}, \t\n\r\v\f' for c in element):
        return element
    return '"' + element.replace("\\", "\\\\").replace('"', '\\"') + '"'


def listed(element: st.SearchStrategy[str], dimensions: int = 1) -> st.SearchStrategy[str]:
    def shaped(shape: list[int]) -> st.SearchStrategy[str]:
        size, *inner = shape
        one = shaped(inner) if inner else (st.none() | element).map(quoted)
        return st.lists(one, min_size=size, max_size=size).map(lambda found: "{" + ",".join(found) + "}")

    shapes = st.lists(st.integers(1, 3), min_size=dimensions, max_size=dimensions)
    return st.just("{}") | shapes.flatmap(shaped)


WINDOW = ColumnType(3904, -1, 3904, -1, "r", "int4range", kind(23), schema="pg_catalog", label="int4range")
PAIR = ColumnType(
    9, -1, 9, -1, "c", "pair", schema="public", label="pair", attributes=(Column("a", kind(25)), Column("w", WINDOW))
)
GAP = st.builds(
    lambda mons, days, clock: f"{mons} mons {days} days {clock}", st.integers(-999, 999), st.integers(0, 99), CLOCK
)
BOUND = st.integers(-(2**31), 2**31 - 1).map(str) | st.just("")
BOUNDS = st.just("empty") | st.builds(lambda one, two: ("[" if one else "(") + f"{one},{two})", BOUND, BOUND)

COLUMNS: list[tuple[str, ColumnType, st.SearchStrategy[str]]] = [
    ("id", kind(20), st.integers(-(2**63), 2**63 - 1).map(str)),
    ("name", kind(25), TEXT),
    ("price", kind(1700, NUMERIC_12_2), st.decimals(-(10**9), 10**9, places=2).map(lambda d: f"{d:.2f}")),
    ("ok", kind(16), st.sampled_from("tf")),
    ("day", kind(1082), DAY),
    ("clock", kind(1083), CLOCK),
    ("stamp", kind(1114), STAMP),
    (
        "zoned",
        kind(1184),
        STAMP.map(lambda s: s if s.endswith("infinity") else s.replace(" BC", "") + "+00" + " BC" * s.endswith("BC")),
    ),
    ("ratio", kind(701), st.floats().map(shortest)),
    (
        "single",
        kind(700),
        st.floats(width=32).map(lambda x: shortest(x) if x != x or abs(x) == float("inf") else f"{x:.9g}"),
    ),
    ("doc", kind(3802), TEXT),
    ("tags", array(kind(25)), listed(TEXT | st.sampled_from(["null", "a;b", "", "{}", "NULL"]))),
    ("numbers", array(kind(23), 2), listed(st.integers(-(2**31), 2**31 - 1).map(str), 2)),
    ("days", array(kind(1082)), listed(DAY)),
    ("stamps", array(kind(1114)), listed(STAMP)),
    (
        "prices",
        array(kind(1700, NUMERIC_12_2)),
        listed(st.decimals(-(10**9), 10**9, places=2).map(lambda d: f"{d:.2f}")),
    ),
    ("flags", array(kind(16)), listed(st.sampled_from("tf"))),
    ("ratios", array(kind(701), 3), listed(st.floats().map(shortest), 3)),
    # these have no compiled form; the same named types come several times
    ("gap", kind(1186), GAP),
    ("window", WINDOW, BOUNDS),
    ("pair", PAIR, st.builds(lambda a, w: f'("{a}","{w}")', st.text("ab ,():é", max_size=5), BOUNDS)),
    ("gaps", array(kind(1186)), listed(GAP)),
    ("windows", array(WINDOW), listed(BOUNDS)),
    ("any", kind(1700), st.sampled_from(["0", "1e400".replace("e400", "0" * 400), "NaN", "-0.000"])),
]  # fmt: skip
TABLE = SourceTable(1, "public", "t", "d", ("id", "name"), tuple(Column(name, of) for name, of, _ in COLUMNS))
SCHEMAS = {
    format: known.get if (known := reference.schemas_of(TABLE, format, KEY, VALUE)) else None for format in FORMATS
}
MESSAGES = [message_class(text) for text in (reference.schemas_of(TABLE, "protobuf", KEY, VALUE) or {}).values()]
ROW = st.tuples(*(s if n < 2 else st.none() | s for n, (_, _, s) in enumerate(COLUMNS)))


def escaped(text: str | None) -> str:
    if text is None:
        return r"\N"
    for character, letter in zip("\\\b\f\n\r\t\v", "\\bfnrtv", strict=True):
        text = text.replace(character, f"\\{letter}")
    return text


def line(row: tuple[str | None, ...]) -> bytes:
    """As COPY writes it."""
    return "\t".join(map(escaped, row)).encode() + b"\n"


def record(row: tuple[str | None, ...], format: str) -> tuple[bytes, bytes]:
    kind, _, form = format.partition(" ")
    key, value = bare(row, kind)
    if not form:
        return key, value
    old = bare(OLD, kind)[1]
    if kind == "avro":
        return key, value[:5] + b"\2" + old[5:] + b"\2" + value[5:] + TAIL
    found = b'{"before":' + old + b',"after":' + value + b',"op":"u","ts_ms":1}'
    if form == "schema":
        head = b'{"schema":{"name":"\\"}","fields":[{"payload":1,"after":2}]},"payload":'
        return head + key + b"}", head + found + b"}"
    return key, found


#: a row that is not the one that is looked for
OLD = ("5", '}{"after":', *([None] * (len(COLUMNS) - 2)))
ENVELOPES = {"envelope": Envelope("shop"), "schema": Envelope("shop", with_schema=True)}
RECORD = names.enveloped("shop.t")


def _tail() -> bytes:
    """What is behind the rows in Avro."""
    source = dict.fromkeys(("version", "connector", "name", "db", "schema", "table"), "x") | {"ts_ms": 1}
    event = {"before": None, "after": None, "source": source, "op": "u", "ts_ms": 1}
    made = io.BytesIO()
    fastavro.schemaless_writer(made, fastavro.parse_schema(json.loads(envelope_schema(TABLE, RECORD))), event)
    return made.getvalue()[2:]


TAIL = _tail()


def bare(row: tuple[str | None, ...], kind: str) -> tuple[bytes, bytes]:
    """Key and row without an envelope."""
    if kind == "avro":
        key, value = reference.avro_row(TABLE, list(row), KEY, VALUE)
        assert key is not None
        return key, value
    if FORMATS[kind].as_protobuf:
        heads = [b"\0" + number.to_bytes(4, "big") + b"\0" for number in (KEY, VALUE)]
        parts = zip(heads, MESSAGES, reference.protobuf_row(TABLE, list(row)), strict=True)
        return tuple(head + fill(of(), values or {}).SerializeToString() for head, of, values in parts)  # type: ignore[return-value]
    frames = [bytes([0]) + number.to_bytes(4, "big") if SCHEMAS[kind] else b"" for number in (KEY, VALUE)]
    found = zip(frames, reference.json_row(TABLE, list(row)), strict=True)
    return tuple(at + json.dumps(each, separators=(",", ":"), ensure_ascii=False).encode() for at, each in found)  # type: ignore[return-value]


def schemas_of(format: str) -> Callable[[int], str | None] | None:
    if format == "avro envelope":
        return {KEY: avro.key_schema(TABLE, RECORD), VALUE: envelope_schema(TABLE, RECORD)}.get
    return SCHEMAS[format.partition(" ")[0]]


def reader_of(format: str) -> TopicReader:
    kind, _, form = format.partition(" ")
    return TopicReader(TABLE, FORMATS[kind], schemas_of(format), ENVELOPES.get(form))


def scan(way: str, format: str) -> Scan:
    kind, _, form = format.partition(" ")
    if way == "compiled":
        found = compile_scan(TABLE, FORMATS[kind], schemas_of(format), bytes(range(32)), ENVELOPES.get(form))
        assert found is not None
        return found
    return PlainScan(Expectation(TABLE, FORMATS[kind]), reader_of(format), bytes(range(32)))


FORMS = (*FORMATS, "avro envelope", "json envelope", "json schema")
WAYS = [(way, form) for way in ("compiled", "plain") for form in FORMS]


@pytest.mark.some(2)
@pytest.mark.parametrize(("way", "format"), WAYS)
@settings(max_examples=examples(40))
@given(st.lists(ROW, max_size=4))
def test_equal_rows_and_records_have_equal_hashes(way: str, format: str, table: list[Any]) -> None:
    found = scan(way, format)
    ours = found.rows(rows([line(row) for row in table]))
    theirs = found.records(Records([record(row, format) for row in table]))
    assert [ours[0].tolist(), ours[1].tolist()] == [theirs[0].tolist(), theirs[1].tolist()]


@pytest.mark.some(2)
@pytest.mark.parametrize(("way", "format"), WAYS)
@settings(max_examples=examples(40))
@given(ROW, ROW, st.integers(0, len(COLUMNS) - 1))
def test_a_row_with_another_value_in_a_column_has_another_hash(
    way: str, format: str, row: tuple[Any, ...], other: tuple[Any, ...], at: int
) -> None:
    changed = (*row[:at], other[at], *row[at + 1 :])
    of = Expectation(TABLE, FORMATS[format.partition(" ")[0]])
    assume(canonical(of.values(row)) != canonical(of.values(changed)))
    found = scan(way, format)
    keys, hashes = found.rows(rows([line(row)]))
    other_keys, other_hashes = found.records(Records([record(changed, format)]))
    assert hashes[0] != other_hashes[0]
    assert (keys[0] == other_keys[0]) == (at > 1)


@pytest.mark.some(2)
@pytest.mark.parametrize(("way", "format"), WAYS)
@settings(max_examples=examples(40))
@given(ROW, st.binary(max_size=40), st.integers(0, 200))
def test_damaged_bytes_have_another_hash_and_harm_nothing(
    way: str, format: str, row: tuple[Any, ...], noise: bytes, at: int
) -> None:
    key, value = record(row, format)
    # what is behind the row of an envelope is not looked at
    at %= len(value) - (len(TAIL) if format == "avro envelope" else 30 if " " in format else 0)
    damaged = value[:at] + noise
    assume(damaged != value)
    found = scan(way, format)
    before = found.records(Records([(key, value)]))[1][0]
    after = found.records(Records([(key, damaged), (b"", b""), (noise, None)]))[1]
    reader = reader_of(format)
    try:
        same = canonical(dict(reader.value(damaged).values)) == canonical(dict(reader.value(value).values))
    except ValueError:
        same = False
    assert after[0] != before or same
    assert after[2] == 0


@pytest.mark.parametrize(
    ("way", "format"), [each for each in WAYS if each[1] in FORMATS and FORMATS[each[1]].uses_registry]
)
def test_a_record_whose_schema_the_registry_does_not_have_is_no_row(way: str, format: str) -> None:
    row = ("1", "x", *[None] * (len(COLUMNS) - 2))
    key, value = record(row, format)
    unknown = value[:1] + (VALUE + 1).to_bytes(4, "big") + value[5:]
    found = scan(way, format).records(Records([(key, value), (key, unknown)]))[1]
    assert found[0] == scan(way, format).rows(rows([line(row)]))[1][0] != found[1]
    with pytest.raises(Unreadable, match="has no schema"):
        reader_of(format).value(unknown)


def test_keys_without_a_compiled_form_take_the_other_way() -> None:
    wide = SourceTable(1, "public", "t", "d", ("v",), (Column("id", kind(20)), Column("v", kind(1186))))
    assert types.mapping(kind(1186)) and compile_scan(wide, JSON, None, bytes(32)) is None


@pytest.mark.parametrize("format", ["avro", "protobuf"])
def test_a_column_that_was_dropped_is_passed_over_whatever_its_type(format: str) -> None:
    row = ("1", "x", *(["1.50", "t"] + [None] * (len(COLUMNS) - 4)))
    gap, pair = "1 mons 2 days 03:00:00", '("a","[1,2)")'
    row = tuple(
        {"gap": gap, "pair": pair, "gaps": "{" + gap + "}"}.get(n, row[i]) for i, (n, _, _) in enumerate(COLUMNS)
    )
    left = tuple(column for column in TABLE.columns if column.name not in ("gap", "pair", "gaps", "windows"))
    found = compile_scan(replace(TABLE, columns=left), FORMATS[format], schemas_of(format), bytes(range(32)))
    assert found is not None
    text = line(tuple(row[TABLE.columns.index(column)] for column in left))
    ours, theirs = found.rows(rows([text])), found.records(Records([record(row, format)]))
    assert [ours[0].tolist(), ours[1].tolist()] == [theirs[0].tolist(), theirs[1].tolist()]


def test_a_protobuf_field_that_comes_many_times_is_no_row_and_harms_nothing() -> None:
    plain = ("1", "x", *[None] * (len(COLUMNS) - 2))
    row = tuple(
        "1 mons 2 days 03:00:00" if name == "gap" else of for (name, _, _), of in zip(COLUMNS, plain, strict=True)
    )
    (key, short), (_, value) = record(plain, "protobuf"), record(row, "protobuf")
    again = value + (value[6:].replace(short[6:], b"")) * 100_000
    found = scan("compiled", "protobuf").records(Records([(key, value), (key, again), (key, value)]))[1]
    assert found[0] == scan("compiled", "protobuf").rows(rows([line(row)]))[1][0] != found[1]


def test_a_canonical_number_does_not_depend_on_its_type() -> None:
    from decimal import Decimal

    assert canonical(1.0) == canonical(1) == canonical(Decimal("1.000"))
    assert canonical(1e20) == canonical(10**20) == canonical(Decimal("1e20"))
    assert canonical(0.1) == canonical(Decimal("0.1")) != canonical(Decimal("0.1000000000000000055"))
    assert canonical(True) != canonical(1) != canonical("1")
    assert canonical(struct.unpack("<f", struct.pack("<f", 0.1))[0]) != canonical(0.1)


#: what PostgreSQL's json takes and Python's parser does not, and texts that differ from these in the innermost value
DOCUMENTS = {
    "number": ("1e99999999999999999999", "1e99999999999999999998"),
    "nested": (f"{'[' * 1500}1, 0{']' * 1500}", f"{'[' * 1500}1, 2{']' * 1500}"),
    "objects": (""" {"a":""" * 1500 + '''"]\\"}"''' + "}" * 1500, """ {"a":""" * 1500 + '''"]\\"]"''' + "}" * 1500),
    # with the record around it, it has one level more
    "nearly": (f"{'[' * 100}1.50{']' * 100}", f"{'[' * 100}1.51{']' * 100}"),
}


@pytest.mark.parametrize("document", DOCUMENTS)
@pytest.mark.parametrize(
    ("way", "envelope"), [("compiled", ""), ("plain", ""), ("plain", "envelope"), ("plain", "schema")]
)
def test_a_document_that_python_cannot_parse_is_compared_by_its_text(way: str, envelope: str, document: str) -> None:
    text, other = DOCUMENTS[document]
    table = SourceTable(
        1, "public", "t", "d", ("id",), (Column("id", kind(20)), Column("d", replace(kind(114), form="value")))
    )
    around = ENVELOPES.get(envelope)
    found: Scan | None = compile_scan(table, JSON, None, bytes(range(32)))
    reader, expectation = TopicReader(table, JSON, None, around), Expectation(table, JSON)
    if way == "plain":
        found = PlainScan(expectation, reader, bytes(range(32)))
    assert found is not None
    heads = {"": ("", ""), "envelope": ('{"before":null,"after":', "}")}
    heads["schema"] = ('{"schema":{},"payload":' + heads["envelope"][0], "}}")
    head, tail = heads[envelope]
    key = b'{"schema":{},"payload":{"id":1}}' if envelope == "schema" else b'{"id":1}'
    made = [(key, f'{head}{{"id":1,"d":{each}}}{tail}'.encode()) for each in (text, other)]
    _, (ours,) = found.rows(rows([line(("1", text))]))
    _, theirs = found.records(Records(made))
    assert ours == theirs[0] != theirs[1]
    assert expectation.difference(["1", text], reader.value(made[0][1])) is None
    assert expectation.difference(["1", text], reader.value(made[1][1])) is not None
    with pytest.raises(Unreadable):
        reader.value(made[0][1][:-1])
