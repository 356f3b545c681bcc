"""pgoutput's messages."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from airflow_bottledwater.errors import ProtocolError
from airflow_bottledwater.postgres import pgoutput
from airflow_bottledwater.postgres.pgoutput import Field, RelationColumn, RelationMessage, RowMessage, TruncateMessage
from tests.support import wire as fix_wire

names = st.text(st.characters(exclude_characters="\0", exclude_categories=["Cs"]), min_size=1, max_size=10)
oids = st.integers(0, 2**32 - 1)
fields = st.one_of(
    st.sampled_from([Field("n"), Field("u")]), st.builds(Field, st.sampled_from("tb"), st.binary(max_size=20))
)
tuples = st.lists(fields, max_size=6)
rows = st.one_of(
    st.builds(lambda oid, new: RowMessage("I", oid, "", None, new), oids, tuples),
    st.builds(lambda oid, new: RowMessage("U", oid, "", None, new), oids, tuples),
    st.builds(
        lambda oid, tag, old, new: RowMessage("U", oid, tag, old, new), oids, st.sampled_from("KO"), tuples, tuples
    ),
    st.builds(lambda oid, tag, old: RowMessage("D", oid, tag, old, None), oids, st.sampled_from("KO"), tuples),
)
relation_columns = st.lists(st.tuples(st.booleans(), names, oids, st.integers(-1, 2**31 - 1)), max_size=5)
decoders = st.sampled_from([pgoutput.row, pgoutput.relation, pgoutput.truncate])


@given(rows)
def test_a_row_message_is_decoded_as_it_is_encoded(message: RowMessage) -> None:
    assert pgoutput.row(message.encode()) == message


@given(oids, names, names, st.sampled_from("dnfi"), relation_columns)
def test_a_relation_message_is_decoded(
    oid: int, schema: str, name: str, identity: str, columns: list[tuple[bool, str, int, int]]
) -> None:
    data = fix_wire.relation(oid, columns, schema=schema, name=name, identity=identity)
    assert pgoutput.relation(data) == RelationMessage(
        oid, schema, name, identity, tuple(RelationColumn(*c) for c in columns)
    )


def test_the_empty_schema_is_pg_catalog() -> None:
    assert pgoutput.relation(fix_wire.relation(1, [], schema="")).schema == "pg_catalog"


@given(st.lists(oids, min_size=1, max_size=5), st.integers(0, 3))
def test_a_truncate_message_is_decoded(truncated: list[int], options: int) -> None:
    found = pgoutput.truncate(fix_wire.truncate(truncated, options))
    assert found == TruncateMessage(tuple(truncated), bool(options & 1), bool(options & 2))


@given(rows)
def test_a_row_message_that_is_cut_short_is_a_protocol_error(message: RowMessage) -> None:
    data = message.encode()
    for size in range(len(data)):
        with pytest.raises(ProtocolError):
            pgoutput.row(data[:size])


@given(oids, names, relation_columns)
def test_a_relation_message_that_is_cut_short_is_a_protocol_error(
    oid: int, name: str, columns: list[tuple[bool, str, int, int]]
) -> None:
    data = fix_wire.relation(oid, columns, name=name)
    for size in range(len(data)):
        with pytest.raises(ProtocolError):
            pgoutput.relation(data[:size])


@given(st.lists(oids, min_size=1, max_size=3))
def test_a_truncate_message_that_is_cut_short_is_a_protocol_error(truncated: list[int]) -> None:
    data = fix_wire.truncate(truncated)
    for size in range(len(data)):
        with pytest.raises(ProtocolError):
            pgoutput.truncate(data[:size])


@given(
    decoders,
    st.one_of(
        st.binary(max_size=60),
        rows.map(RowMessage.encode),
        st.builds(fix_wire.relation, oids, relation_columns),
        st.builds(fix_wire.truncate, st.lists(oids, max_size=3)),
    ),
    st.data(),
)
def test_damaged_bytes_are_decoded_or_a_protocol_error(decoder, data: bytes, draw: st.DataObject) -> None:  # type: ignore[no-untyped-def]
    damaged = bytearray(data)
    for at in draw.draw(st.lists(st.integers(0, max(0, len(data) - 1)), max_size=3)):
        if damaged:
            damaged[at] = draw.draw(st.integers(0, 255))
    try:
        decoder(bytes(damaged))
    except ProtocolError:
        pass
