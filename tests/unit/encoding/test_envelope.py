"""Debezium's envelope: what the kernels write, read by fastavro and as JSON."""

from __future__ import annotations

import io
import json
from dataclasses import replace
from datetime import datetime
from typing import Any

import fastavro
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from airflow_bottledwater import __version__
from airflow_bottledwater.encoding import avro, json_schema, kernels, layout, names, types, wire
from airflow_bottledwater.encoding.envelope import Envelope, around_rows, connect_key, connect_schema, envelope_schema
from airflow_bottledwater.encoding.program import Programs, Target, compile_programs
from airflow_bottledwater.model.relation import Column, ColumnType, SourceTable
from airflow_bottledwater.model.version import Version
from airflow_bottledwater.pipeline.formats import FORMATS
from airflow_bottledwater.pipeline.settings import Settings
from airflow_bottledwater.publish.encode import BlockEncoder, encode_changes
from airflow_bottledwater.publish.session import PublishSession
from airflow_bottledwater.publish.toast import NOTHING_CONVERTED, Completed
from tests.support import wire as w
from tests.support.batches import batch_of
from tests.unit.encoding.test_avro import scalar

_INT8, _TIMESTAMPTZ, _UUID = 20, 1184, 2950
_TOPIC = "shop.public.orders"
_RECORD = names.enveloped(_TOPIC)
_COLUMNS = (
    Column("id", w.plain(_INT8)),
    Column("note", w.plain(w.TEXT)),
    Column("at", w.plain(_TIMESTAMPTZ)),
    Column("u", w.plain(_UUID)),
)
_TABLE = SourceTable(1, "public", "orders", "d", ("id",), _COLUMNS)
_FULL = SourceTable(1, "public", "orders", "f", ("id",), _COLUMNS)
_UNKEYED = SourceTable(1, "public", "orders", "f", (), _COLUMNS)
_NOW = 1772357400.5
_AT = 1_772_357_400_500_000
_UID = bytes(range(16))


def _programs(table: SourceTable, format: str, *, with_schema: bool = False, copied: bool = False) -> Programs:
    envelope = Envelope("shop", with_schema)
    around = around_rows(envelope, table, _TOPIC, "db", as_json=format == "json")
    return compile_programs([(table, Target(0, 3, 1, 2, around))], FORMATS[format], copied=copied)


def _row(number: int, note: bytes | None) -> list[bytes | None]:
    moment = (_AT - 946_684_800_000_000).to_bytes(8, "big")
    return [number.to_bytes(8, "big"), note, moment, _UID]


def _encoded(table: SourceTable, programs: Programs, *messages: bytes) -> list[Any]:
    """The records of changes of one transaction: operation, key, value, and the old row of the header."""
    relation = w.relation(1, [(c.name == "id", c.name, c.type.oid, -1) for c in table.columns], identity=table.identity)
    micros = _AT - 946_684_800_000_000
    rows = [w.xlog(message) for message in messages]
    block = w.block([w.xlog(w.begin(0x16B3748, 745, micros)), w.xlog(relation), *rows, w.xlog(w.commit(9, 10))])
    found = encode_changes(Completed(batch_of(block, Version(table, _TOPIC)), NOTHING_CONVERTED), programs)
    assert not found.rejections
    return [_record(row, found.records.data) for row in found.records.table]


def _record(row: Any, data: Any) -> tuple[str, bytes | None, bytes | None, bytes | None]:
    def part(name: str) -> bytes | None:
        at, size = int(row[name]), int(row[f"{name}_length"])
        return None if size < 0 else bytes(data[at : at + size])

    before = part("headers") or None
    if before is not None:
        head = b"\0\0\0\7before\0" + (len(before) - 15).to_bytes(4, "big")
        assert before.startswith(head)
        before = before[len(head) :]
    return chr(row["event"]), part("key"), part("value"), before


def _read(table: SourceTable, data: bytes | None, format: str, *, key: bool = False) -> Any:
    """What a reader of the format finds; the numbers of moments as in JSON."""
    if data is None:
        return None
    if format == "json":
        return json.loads(data)
    assert data[:5] == bytes([0, 0, 0, 0, 1 if key else 2])
    schema = avro.key_schema(table, _RECORD) if key else envelope_schema(table, _RECORD)
    body = io.BytesIO(data[5:])
    found = fastavro.schemaless_reader(body, fastavro.parse_schema(json.loads(schema)), None)
    assert not body.read(1)
    return json.loads(json.dumps(found, default=_text))


def _text(value: Any) -> str:
    return value.isoformat().replace("+00:00", "Z") if isinstance(value, datetime) else str(value)


def _shown(number: int, note: str | None) -> dict[str, Any]:
    return {
        "id": number,
        "note": note,
        "at": "2026-03-01T09:30:00.500000Z",
        "u": "00010203-0405-0607-0809-0a0b0c0d0e0f",
    }


_ONLY_KEY = {"id": 7, "note": None, "at": None, "u": None}
_OLD_KEY = [(7).to_bytes(8, "big"), None, None, None]


def _source(ordinal: int) -> dict[str, Any]:
    return {
        "version": __version__, "connector": "postgresql", "name": "shop", "ts_ms": _AT // 1000, "snapshot": "false",
        "db": "db", "sequence": f'["23803720","{ordinal}"]', "ts_us": _AT, "ts_ns": _AT * 1000, "schema": "public",
        "table": "orders", "txId": 745, "lsn": 0x16B3748, "xmin": None, "origin": None, "origin_lsn": None,
    }  # fmt: skip


def _values(table: SourceTable, format: str, *messages: bytes) -> list[tuple[str, Any, Any]]:
    """Operation, key and value of each record; the times of encoding are checked and taken out."""
    found = []
    for op, key, value, _ in _encoded(table, _programs(table, format), *messages):
        read = _read(table, value, format)
        if read is not None:
            assert list(read) == ["before", "after", "source", "op", "ts_ms", "ts_us", "ts_ns", "transaction"]
            micros = read.pop("ts_us")
            assert (read.pop("ts_ms"), read.pop("ts_ns")) == (micros // 1000, micros * 1000)
            assert read.pop("transaction") is None and read["op"] == op
        found.append((op, _read(table, key, format, key=True), read))
    return found


@pytest.mark.parametrize("format", ["avro", "json"])
def test_changes_become_the_events_of_debezium(format: str) -> None:
    old, new, moved = _row(7, b"a"), _row(7, b"b"), _row(8, b"c")
    messages = [w.insert(1, *old), w.update(1, *new), w.update(1, *moved, old=_OLD_KEY), w.delete(1, *_OLD_KEY)]
    # an old key is also sent if it is stored out of line
    messages.append(w.update(1, *new, old=_OLD_KEY))
    key, other = {"id": 7}, {"id": 8}
    assert _values(_TABLE, format, *messages) == [
        ("c", key, {"before": None, "after": _shown(7, "a"), "source": _source(1), "op": "c"}),
        ("u", key, {"before": None, "after": _shown(7, "b"), "source": _source(2), "op": "u"}),
        ("d", key, {"before": _ONLY_KEY, "after": None, "source": _source(3), "op": "d"}),
        ("d", key, None),
        ("c", other, {"before": None, "after": _shown(8, "c"), "source": _source(3), "op": "c"}),
        ("d", key, {"before": _ONLY_KEY, "after": None, "source": _source(4), "op": "d"}),
        ("d", key, None),
        ("u", key, {"before": None, "after": _shown(7, "b"), "source": _source(5), "op": "u"}),
    ]


@pytest.mark.parametrize("format", ["avro", "json"])
def test_the_old_row_is_whole_where_the_replica_identity_is_full(format: str) -> None:
    old, new = _row(7, b"a"), _row(7, b"b")
    messages = [w.update(1, *new, old=old, tag="O"), w.update(1, *_row(8, None), old=new, tag="O")]
    messages += [w.delete(1, *_row(8, None), tag="O")]
    found = _values(_FULL, format, *messages)
    assert [(op, value and (value["before"], value["after"])) for op, _, value in found] == [
        ("u", (_shown(7, "a"), _shown(7, "b"))),
        ("d", (_shown(7, "b"), None)),
        ("d", None),
        ("c", (None, _shown(8, None))),
        ("d", (_shown(8, None), None)),
        ("d", None),
    ]


@pytest.mark.parametrize("format", ["avro", "json"])
def test_a_table_without_a_key_has_inserts_and_updates(format: str) -> None:
    old, new = _row(7, b"a"), _row(7, b"b")
    messages = [w.insert(1, *old), w.update(1, *new, old=old, tag="O"), w.delete(1, *new, tag="O")]
    found = _values(_UNKEYED, format, *messages)
    assert [(op, key, value["before"], value["after"]) for op, key, value in found] == [
        ("c", None, None, _shown(7, "a")),
        ("u", None, _shown(7, "a"), _shown(7, "b")),
    ]


@pytest.mark.parametrize("format", ["avro", "json"])
@pytest.mark.parametrize(("origin", "word"), [(wire.FROM_SNAPSHOT, "true"), (wire.FROM_LIVE, "incremental")])
def test_rows_of_a_snapshot_are_reads(format: str, origin: int, word: str) -> None:
    programs = _programs(_TABLE, format, copied=True)
    block = w.block([w.copy_row(*_row(number, b"x")) for number in (7, 8)])
    facts = layout.facts(origin, _NOW, 0x16B3748)
    pieces = list(BlockEncoder(0).encode(block, programs, 1 << 20, facts))
    found = [_record(row, piece.records.data) for piece in pieces for row in piece.records.table]
    for number, (op, key, value, _) in zip((7, 8), found, strict=True):
        read = _read(_TABLE, value, format)
        unknown = {"snapshot": word, "txId": None, "sequence": '["23803720","0"]'}
        assert (op, _read(_TABLE, key, format, key=True)) == ("r", {"id": number})
        assert read["source"] == {**_source(0), **unknown} and read["op"] == "r"
        assert (read["before"], read["after"]) == (None, _shown(number, "x"))
        assert read["ts_us"] == _AT


def test_json_has_its_schema_in_front_if_asked() -> None:
    programs = _programs(_TABLE, "json", with_schema=True)
    plain = _encoded(_TABLE, _programs(_TABLE, "json"), w.insert(1, *_row(7, b"a")), w.delete(1, *_OLD_KEY))
    for (_, key, value, _), (_, bare_key, bare, _) in zip(
        _encoded(_TABLE, programs, w.insert(1, *_row(7, b"a")), w.delete(1, *_OLD_KEY)), plain, strict=True
    ):
        assert json.loads(key or b"") == {"schema": connect_key(_TABLE, _TOPIC), "payload": json.loads(bare_key or b"")}
        assert (value is None) == (bare is None)
        if value is not None and bare is not None:
            found, payload = json.loads(value), json.loads(bare)
            assert list(found) == ["schema", "payload"] and found["schema"] == connect_schema(_TABLE, _TOPIC)
            assert {**found["payload"], **dict.fromkeys(("ts_ms", "ts_us", "ts_ns"))} == {
                **payload, **dict.fromkeys(("ts_ms", "ts_us", "ts_ns"))
            }  # fmt: skip


def _agree(declared: dict[str, Any], written: dict[str, Any]) -> None:
    """Each value that is written, which a JSON Schema says, has the type that Kafka Connect is told; NaN and infinity
    excepted, of which preflight tells."""
    if "oneOf" in written and {"type": "null"} in written["oneOf"]:
        (written,) = [each for each in written["oneOf"] if each != {"type": "null"}]
    kind = declared["type"]
    if kind == "array":
        assert written["type"] == "array"
        _agree(declared["items"], written["items"])
    elif kind == "struct":
        assert {each["field"] for each in declared["fields"]} == written["properties"].keys()
        for each in declared["fields"]:
            _agree(each, written["properties"][each["field"]])
    elif kind == "map":
        assert written["type"] == "object"
        _agree(declared["values"], written["additionalProperties"])
    elif kind in ("float", "double"):
        assert written["oneOf"][0] == {"type": "number"}
    else:
        bytes_of = {"contentEncoding": "base64"} if kind == "bytes" else {}
        name = {"boolean": "boolean", "string": "string", "bytes": "string"}.get(kind, "integer")
        assert written == {"type": name, **bytes_of}


_FORMS = st.sampled_from(["", "double"]).map(lambda form: replace(w.plain(1700), form=form))
_LEAF = scalar | _FORMS | st.sampled_from(sorted(types.EXTENSIONS)).map(lambda of: w.extension(*of))
_ANY = st.recursive(
    _LEAF,
    lambda inner: (
        st.builds(w.array, inner, st.integers(1, 3))
        | st.builds(w.interval_of, inner, several=st.booleans())
        | st.lists(inner, min_size=1, max_size=3).map(lambda parts: w.composite(*parts))
    ),
    max_leaves=4,
)


@given(_ANY)
def test_kafka_connect_is_told_the_types_that_values_have(kind: ColumnType) -> None:
    table = w.table(("id", w.plain(w.INT4)), ("v", kind), key=("id", "v"))
    row = next(each for each in connect_schema(table, _TOPIC)["fields"] if each["field"] == "after")
    value = json.loads(json_schema.value_schema(table, _RECORD))["properties"]
    key = json.loads(json_schema.key_schema(table, _RECORD))["properties"]
    _agree(row["fields"][1], value["v"])
    _agree(connect_key(table, _TOPIC)["fields"][1], key["v"])


def test_the_names_in_avro_are_those_of_debezium() -> None:
    columns = tuple(replace(each, type=each.type.with_temporal("logical", as_debezium=True)) for each in _COLUMNS)
    made = json.loads(envelope_schema(replace(_TABLE, columns=columns), _RECORD))
    assert (made["namespace"], made["name"]) == (_TOPIC, "Envelope")
    assert made["fields"][0]["type"][1]["name"] == "Value"
    assert made["fields"][2]["type"]["namespace"] == "io.debezium.connector.postgresql"
    key = json.loads(avro.key_schema(_TABLE, _RECORD))
    assert (key["namespace"], key["name"]) == (_TOPIC, "Key")
    at = made["fields"][0]["type"][1]["fields"][2]["type"][1]
    assert at == {"type": "string", "connect.version": 1, "connect.name": "io.debezium.time.ZonedTimestamp"}


def test_texts_inside_of_values_have_names_in_avro_and_those_of_keys_have_none() -> None:
    """The names came later: keys keep their ids, and with them their partitions."""
    moment = w.plain(_TIMESTAMPTZ)
    inside = [w.array(moment, 2), w.composite(w.plain(_INT8), moment), w.interval_of(moment, several=True)]
    kinds = [each.with_temporal("logical", as_debezium=True) for each in [moment, *inside]]
    table = w.table(*((f"c{i}", kind) for i, kind in enumerate(kinds)), key=["c0", "c1", "c2", "c3"])
    found = {}
    for part, schema in (("row", avro.value_schema(table, _RECORD)), ("key", avro.key_schema(table, _RECORD))):
        fastavro.parse_schema(json.loads(schema))
        found[part] = [
            json.dumps(field).count("io.debezium.time.ZonedTimestamp") for field in json.loads(schema)["fields"]
        ]
    # a range has two bounds
    assert found == {"row": [1, 1, 1, 2], "key": [1, 0, 0, 0]}


@pytest.mark.parametrize("format", ["avro", "json"])
def test_a_buffer_that_is_too_small_is_never_left(format: str) -> None:
    """Whatever the room, all records come, piece by piece."""
    programs = _programs(_TABLE, format, copied=True)
    block = w.block([w.copy_row(*_row(number, b"x" * number)) for number in range(40)])
    facts = layout.facts(wire.FROM_SNAPSHOT, _NOW)
    whole = layout.output(100, 3, 1 << 20)
    kernels.encode_copy(block.data, block.offsets, 0, programs.program, 0, programs.scratch(), facts, whole)
    for room in range(0, 2400, 7):
        out = layout.output(100, 3, room)
        data = np.full(room + 64, 0xAB, dtype=np.uint8)
        small = out._replace(data=data[:room])
        _, used, made, failed = kernels.encode_copy(
            block.data, block.offsets, 0, programs.program, 0, programs.scratch(), facts, small
        )
        assert not failed and used <= room and (data[room:] == 0xAB).all()
        assert bytes(data[:used]) == bytes(whole.data[:used]) and (made > 0) == (used > 0)


@pytest.mark.parametrize("format", ["avro", "json"])
def test_the_old_row_is_a_header_if_asked(format: str) -> None:
    """Of an update beside the new row, and of a deletion beside the tombstone; what is only a key is none."""
    found = []
    for table in (_FULL, _TABLE):
        target = Target(0, 3, 1, 2, before=True)
        programs = compile_programs([(table, target)], FORMATS[format], copied=False)
        first, second, third = _row(7, b"a"), _row(7, b"b"), _row(8, b"c")
        if table is _FULL:
            messages = [w.update(1, *second, old=first, tag="O"), w.update(1, *third, old=second, tag="O")]
            messages.append(w.delete(1, *third, tag="O"))
        else:
            messages = [w.update(1, *second), w.update(1, *third, old=_OLD_KEY), w.delete(1, *_OLD_KEY)]
        messages.insert(0, w.insert(1, *first))
        for op, _, value, before in _encoded(table, programs, *messages):
            found.append((op, value is None, _note(table, before, format)))
    assert found == [
        ("c", False, None), ("u", False, "a"), ("d", True, "b"), ("u", False, None), ("d", True, "c"),
        ("c", False, None), ("u", False, None), ("d", True, None), ("u", False, None), ("d", True, None),
    ]  # fmt: skip


@pytest.mark.parametrize("refused", ["", "the registry refuses it"])
def test_an_old_row_has_no_header_without_a_schema(refused: str) -> None:
    """Its frame would have the id of a schema that there is not."""
    session = object.__new__(PublishSession)
    session.pipeline = Settings.of(postgres="host=db", format="avro", registry={"url": "http://r"}, before="header")
    session.index, session.partitions = {_TOPIC: 0}, {_TOPIC: 3}
    session._programs, session._encoded = None, {}
    version = Version(_FULL, _TOPIC, 1, 0 if refused else 2, refused)
    found = _encoded(_FULL, session.programs([version], copied=False), w.delete(1, *_row(7, b"a"), tag="O"))
    assert [(op, key is None, value, before is None) for op, key, value, before in found] == [
        ("d", False, None, bool(refused))
    ]


def _note(table: SourceTable, data: bytes | None, format: str) -> Any:
    if data is None or format == "json":
        return data and json.loads(data)["note"]
    schema = fastavro.parse_schema(json.loads(avro.value_schema(table)))
    found: Any = fastavro.schemaless_reader(io.BytesIO(data[5:]), schema, None)
    return found["note"]


#: NaN (numeric_send, src/backend/utils/adt/numeric.c), for which Avro's decimals have no form; and 1.00
_NAN, _ONE = bytes((0, 0, 0, 0, 0xC0, 0, 0, 0)), bytes((0, 1, 0, 0, 0, 0, 0, 2, 0, 1))
_AMOUNTS = SourceTable(
    1, "public", "orders", "f", ("id",),
    (Column("id", w.plain(_INT8)), Column("note", w.plain(w.TEXT)), Column("n", w.plain(1700, (9 << 16 | 2) + 4))),
)  # fmt: skip


@pytest.mark.parametrize("way", ["envelope", "header"])
def test_an_old_row_without_a_form_holds_nothing_up(way: str) -> None:
    """What the row becomes is published, and a row that is gone is removed."""

    def row(number: int, n: bytes) -> list[bytes | None]:
        return [number.to_bytes(8, "big"), b"a", n]

    old, new = row(7, _NAN), row(7, _ONE)
    if way == "envelope":
        programs = _programs(_AMOUNTS, "avro")
    else:
        target = Target(0, 3, 1, 2, before=True)
        programs = compile_programs([(_AMOUNTS, target)], FORMATS["avro"], copied=False)
    messages = [
        w.update(1, *new, old=old, tag="O"), w.update(1, *row(8, _ONE), old=old, tag="O"), w.delete(1, *old, tag="O"),
        w.delete(1, *new, tag="O"),
    ]  # fmt: skip
    found = _encoded(_AMOUNTS, programs, *messages)
    if way == "header":
        assert [(op, before is not None) for op, _, _, before in found] == [
            ("u", False), ("d", False), ("u", False), ("d", False), ("d", True)
        ]  # fmt: skip
        return
    key = {"id": 7, "note": None, "n": None}
    values = [(op, _read(_AMOUNTS, value, "avro")) for op, _, value, _ in found]
    assert [(op, value and (value["before"], bool(value["after"]))) for op, value in values] == [
        ("u", (None, True)), ("d", (key, False)), ("d", None), ("c", (None, True)), ("d", (key, False)), ("d", None),
        ("d", ({"id": 7, "note": "a", "n": "1.00"}, False)), ("d", None),
    ]  # fmt: skip


def test_room_is_for_what_is_around_one_row_however_many_tables_there_are() -> None:
    one = _programs(_TABLE, "json", with_schema=True)
    around = around_rows(Envelope("shop", with_schema=True), _TABLE, _TOPIC, "db", as_json=True)
    many = compile_programs([(_TABLE, Target(0, 3, 1, 2, around))] * 50, FORMATS["json"], copied=False)
    assert many.around == one.around > len(around.segments[0])
