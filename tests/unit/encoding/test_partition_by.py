"""The partitions that some columns of a key choose: kernels and verification against a plain Python reference."""

from __future__ import annotations

import ctypes
import struct
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from airflow_bottledwater.encoding import avro, kernels, layout, names, protobuf, wire
from airflow_bottledwater.encoding.envelope import Envelope
from airflow_bottledwater.encoding.mapping import TableMapping
from airflow_bottledwater.encoding.program import Programs, Target, compile_programs
from airflow_bottledwater.errors import SettingError
from airflow_bottledwater.kafka import librdkafka as rd
from airflow_bottledwater.kafka.topic_reader import RecordBlock
from airflow_bottledwater.model.relation import SourceTable
from airflow_bottledwater.pipeline.formats import AVRO, JSON, JSON_SCHEMA, PROTOBUF, Format
from airflow_bottledwater.pipeline.table import Table
from airflow_bottledwater.publish.encode import with_room
from airflow_bottledwater.publish.toast import NOTHING_CONVERTED
from airflow_bottledwater.verify.chosen import partitioner
from tests.support import wire as w
from tests.support.partitions import key_bytes, murmur2

COUNT = 97
_FORMATS = {each.name: each for each in (AVRO, JSON, JSON_SCHEMA, PROTOBUF)}
_COLUMNS = (("order", w.plain(20)), ("note", w.plain(25)), ("customer", w.plain(23)), ("regiön", w.plain(25)))
ORDERS = w.table(*_COLUMNS, key=("regiön", "order", "customer"))
_CHOSEN = st.permutations(ORDERS.key).flatmap(lambda key: st.integers(1, 3).map(lambda n: tuple(key[:n])))
_ENVELOPES = st.sampled_from([None, Envelope("server", False), Envelope("server", True)])
_texts = st.text(st.characters(exclude_characters="\0", exclude_categories=["Cs"]), max_size=20)
_rows = st.tuples(st.integers(-(2**63), 2**63 - 1), _texts, st.integers(-(2**31), 2**31 - 1), _texts)
Row = tuple[int, str, int, str]


def _programs(table: SourceTable, format: Format, envelope: Envelope | None, *, copied: bool, id: int = 5) -> Programs:
    mapping = TableMapping(format=format, envelope=envelope)
    target = Target(0, COUNT, id, id + 1, mapping.around("orders", table, "db"))
    return compile_programs([(w.table(("a", w.plain(23))), Target(1)), (table, target)], format, copied=copied)


def _binary(row: Row) -> tuple[bytes, ...]:
    return struct.pack(">q", row[0]), row[1].encode(), struct.pack(">i", row[2]), row[3].encode()


def _right(table: SourceTable, format: Format, row: Row) -> int:
    fields = {column.name: column.field for column in table.columns}
    named = [fields[name] if format.as_json else names.mangle(fields[name]) for name in table.partition_by]
    found = dict(zip(("order", "note", "customer", "regiön"), row, strict=True))
    key = dict(zip(named, (found[name] for name in table.partition_by), strict=True))
    return murmur2(key_bytes(format.name, key, named)) % COUNT


def _copied(programs: Programs, rows: Sequence[Row], size: int) -> tuple[layout.Rows, bytes, int]:
    """The records of COPY rows, as many as there is room for, and how many rows that is."""
    messages = [w.copy_row(*_binary(row)) for row in rows]
    ends = np.concatenate([[0], np.cumsum([len(each) for each in messages])]).astype(np.int64)
    output = layout.output(len(rows) + 1, 1, size)
    data = np.frombuffer(bytearray(b"".join(messages)), dtype=np.uint8)
    following, used, made, failed = kernels.encode_copy(
        data, ends, 0, programs.program, 1, programs.scratch(), layout.facts(wire.FROM_SNAPSHOT, 0), output
    )
    assert failed == 0
    records, scratch = output.records[:made], programs.scratch()
    if programs.choosers is not None:
        with_room(
            np.empty(1, dtype=np.uint8),
            lambda room: kernels.choose_for_copy(
                data, ends, programs.program, 1, programs.choosers, scratch, records, room
            ),
        )
    return records, output.data[:used].tobytes(), following


@settings(max_examples=60, deadline=None)
@given(st.sampled_from([*_FORMATS]), _ENVELOPES, _CHOSEN, st.lists(_rows, min_size=1, max_size=5), st.data())
def test_rows_are_in_the_partitions_that_their_columns_choose(
    format: str, envelope: Envelope | None, chosen: tuple[str, ...], rows: list[Row], data: st.DataObject
) -> None:
    envelope = envelope if format in ("avro", "json") else None
    table = replace(ORDERS, partition_by=chosen)
    programs = _programs(table, _FORMATS[format], envelope, copied=True)
    whole, text, _ = _copied(programs, rows, 1 << 16)
    assert whole["partition"].tolist() == [_right(table, _FORMATS[format], row) for row in rows]
    # the keys and values are those of a table without the option
    plain, same, _ = _copied(_programs(ORDERS, _FORMATS[format], envelope, copied=True), rows, 1 << 16)
    assert same == text and plain["key"].tolist() == whole["key"].tolist()
    some, cut, following = _copied(programs, rows, data.draw(st.integers(0, len(text) + 100)))
    assert len(some) == following and text.startswith(cut)
    assert some["partition"].tolist() == whole["partition"].tolist()[:following]


def _changed(programs: Programs, messages: Sequence[bytes], size: int = 1 << 16) -> tuple[layout.Rows, int]:
    changes = np.zeros(len(messages), dtype=layout.CHANGE)
    at = 0
    for row, message in zip(changes, messages, strict=True):
        row["kind"], row["offset"], row["length"], row["relation"] = message[0], at, len(message), 1
        at += len(message)
    output = layout.output(3 * len(messages) + 3, 1, size)
    data, scratch = np.frombuffer(bytearray(b"".join(messages)), dtype=np.uint8), programs.scratch()
    following, _, _, made, failed = kernels.encode_changes(
        data, changes, 0, programs.program, NOTHING_CONVERTED, 0, scratch, layout.facts(wire.FROM_STREAM, 0), output
    )
    assert failed == 0
    records = output.records[:made]
    with_room(
        np.empty(1, dtype=np.uint8),
        lambda room: kernels.choose_for_changes(
            data, changes, programs.program, programs.choosers, NOTHING_CONVERTED, scratch, records, room
        ),
    )
    return records, following


@settings(max_examples=40, deadline=None)
@given(st.sampled_from([*_FORMATS]), st.booleans(), _CHOSEN, _rows, _rows, st.integers(0, 700))
def test_so_are_changes_and_the_tombstone_of_an_old_key_is_where_its_row_was(
    format: str, enveloped: bool, chosen: tuple[str, ...], old: Row, new: Row, size: int
) -> None:
    envelope = Envelope("server", False) if enveloped and format in ("avro", "json") else None
    table, of = replace(ORDERS, partition_by=chosen), _FORMATS[format]
    programs = _programs(table, of, envelope, copied=False)
    old_key, new_key = ((each[0], None, *each[2:]) for each in (_binary(old), _binary(new)))
    messages = [w.insert(1, *_binary(old)), w.update(1, *_binary(new), old=old_key), w.delete(1, *new_key)]
    found, _ = _changed(programs, messages)
    first, last = _right(table, of, old), _right(table, of, new)
    deletions = 2 if envelope else 1
    moved = [first] * deletions if (old[0], *old[2:]) != (new[0], *new[2:]) else []
    assert found["partition"].tolist() == [first, *moved, last, *[last] * deletions]
    some, following = _changed(programs, messages, size)
    assert some["partition"].tolist() == found["partition"].tolist()[: len(some)]
    assert set(some["row"].tolist()) <= set(range(following))


def test_texts_that_the_server_made_are_those_of_their_values() -> None:
    box = w.plain(603)
    other = w.table(("box", box), key=(), identity="f")
    table = replace(w.table(("box", box), ("id", w.plain(23)), key=("box", "id")), partition_by=("box",))
    programs = compile_programs([(other, Target(0, COUNT)), (table, Target(1, COUNT))], JSON, copied=False)
    assert programs.program.relations["converts"][:2].all()
    messages = [w.insert(1, b"1"), w.insert(1, b"2", b"\0\0\0\7")] * 2
    texts = ["one", "two", "three", "four"]
    ends = np.cumsum([0, *map(len, texts)])
    converted = layout.Texts(np.frombuffer(bytearray("".join(texts).encode()), dtype=np.uint8), ends)
    changes, data = np.zeros(4, dtype=layout.CHANGE), np.frombuffer(bytearray(b"".join(messages)), dtype=np.uint8)
    changes["kind"], changes["relation"] = ord("I"), [0, 1, 0, 1]
    changes["length"] = [len(each) for each in messages]
    changes["offset"] = np.cumsum(changes["length"]) - changes["length"]
    output, scratch = layout.output(20, 1, 1 << 16), programs.scratch()
    _, cursor, _, made, failed = kernels.encode_changes(
        data, changes, 0, programs.program, converted, 0, scratch, layout.facts(wire.FROM_STREAM, 0), output
    )
    assert (cursor, made, failed) == (4, 4, 0)
    records, room = output.records[:made], np.empty(4096, dtype=np.uint8)
    by = programs.choosers
    assert kernels.choose_for_changes(data, changes, programs.program, by, converted, scratch, records, room)
    right = [murmur2(f'{{"box":"{text}"}}'.encode()) % COUNT for text in ("two", "four")]
    assert records["partition"][[1, 3]].tolist() == right


class _Block:
    """Records in memory, as the verification reads them."""

    def __init__(self, keys: Sequence[bytes]) -> None:
        self._kept = [ctypes.create_string_buffer(key, max(1, len(key))) for key in keys]
        messages = np.zeros(len(keys), dtype=rd.MESSAGE)
        for row, key, kept in zip(messages, keys, self._kept, strict=True):
            row["key"], row["key_len"] = ctypes.addressof(kept), len(key)
        self.block = RecordBlock(messages, np.zeros(len(keys), dtype=np.int64))


@settings(max_examples=60, deadline=None)
@given(
    st.sampled_from([*_FORMATS]), _ENVELOPES, _CHOSEN, st.lists(_rows, min_size=1, max_size=5),
    st.sampled_from([b"", b"\0\0\0\0\5", b"{}", b'{"order":', b"\0\0\0\0\5\xff\xff", b"\0\0\0\0\7\2", b"another"]),
)  # fmt: skip
def test_the_verification_finds_the_same_partitions_in_keys(
    format: str, envelope: Envelope | None, chosen: tuple[str, ...], rows: list[Row], damaged: bytes
) -> None:
    envelope = envelope if format in ("avro", "json") else None
    of, table = _FORMATS[format], replace(ORDERS, partition_by=chosen)
    records, text, _ = _copied(_programs(table, of, envelope, copied=True), rows, 1 << 16)
    keys = [text[at : at + size] for at, size in records[["key", "key_length"]].tolist()]
    name = names.named("public", "orders")
    schemas: dict[int, str] = {}
    if format == "avro":
        schemas = {5: avro.key_schema(table, name), 6: avro.value_schema(table, name), 8: '"string"'}
    find = partitioner(table, of, schemas.get if of.uses_registry else None, envelope)
    made = _Block([*keys, damaged])
    found = find(made.block, COUNT).tolist()
    assert found == [*records["partition"].tolist(), murmur2(damaged) % COUNT]
    if format == "protobuf":
        assert protobuf.key_schema(table, name)


def test_without_the_option_the_verification_takes_whole_keys() -> None:
    keys = [b"a", b"", b'{"order":1}']
    found = partitioner(ORDERS, JSON, None)(_Block(keys).block, COUNT).tolist()
    assert found == [murmur2(key) % COUNT for key in keys]


def test_another_program_that_writes_keys_of_these_columns_alone_has_them_in_the_same_partitions() -> None:
    """So consumers can join the topics."""
    customers = w.table(("customer", w.plain(23)), key=("customer",))
    row = (1, "", 77, "")
    orders = _programs(replace(ORDERS, partition_by=("customer",)), JSON, None, copied=True)
    of_order, _, _ = _copied(orders, [row], 4096)
    assert of_order["partition"].tolist() == [murmur2(b'{"customer":77}') % COUNT]
    programs = compile_programs([(customers, Target(0, COUNT))], JSON, copied=True)
    output, message = layout.output(2, 1, 4096), w.copy_row(struct.pack(">i", 77))
    kernels.encode_copy(
        np.frombuffer(bytearray(message), dtype=np.uint8), np.array([0, len(message)]), 0, programs.program, 0,
        programs.scratch(), layout.facts(wire.FROM_SNAPSHOT, 0), output,
    )  # fmt: skip
    assert output.records["partition"][0] == of_order["partition"][0]


@pytest.mark.parametrize("id", [1, 70_000])
@pytest.mark.parametrize("format", ["avro", "json-schema", "protobuf"])
def test_the_id_of_a_schema_does_not_move_a_key(format: str, id: int) -> None:
    table = replace(ORDERS, partition_by=("order", "customer"))
    programs = _programs(table, _FORMATS[format], None, copied=True, id=id)
    found, _, _ = _copied(programs, [(1, "", 2, "EU")], 4096)
    assert found["partition"].tolist() == [_right(table, _FORMATS[format], (1, "", 2, "EU"))]


@pytest.mark.parametrize("given_as", ["a,b", ["a", "b"]])
def test_the_option_names_each_column_once(given_as: Any) -> None:
    assert Table(partition_by=given_as).partition_by == ("a", "b")
    with pytest.raises(SettingError, match="partition_by"):
        Table(partition_by=("a", "b", "a"))
