"""Values of composites whose types were altered since they became known, which PostgreSQL does not report."""

from __future__ import annotations

import struct
from dataclasses import replace

import pytest

from airflow_bottledwater.encoding.program import Programs
from airflow_bottledwater.encoding.wire import CHANGED, REASONS
from airflow_bottledwater.model.relation import ColumnType
from airflow_bottledwater.pipeline.formats import FORMATS
from airflow_bottledwater.publish.composites import with_known_attributes
from tests.support import wire as w
from tests.support.paths import encode_block, programs_of

INT8, FLOAT8, TEXT, POINT, TEXTS, RECORD = 20, 701, 25, 600, 1009, 2249
PAIR = w.composite(w.plain(INT8), w.plain(INT8))
#: types with the same composite inside
WITHIN = {"itself": PAIR, "an array": w.array(PAIR), "a composite": w.composite(PAIR)}


def record(*attributes: tuple[int, bytes | None]) -> bytes:
    """As record_send writes it (src/backend/utils/adt/rowtypes.c)."""
    made = struct.pack(">i", len(attributes))
    for oid, value in attributes:
        made += struct.pack(">Ii", oid, -1 if value is None else len(value)) + (value or b"")
    return made


def number(value: int) -> bytes:
    return struct.pack(">q", value)


def within(kind: str, pair: bytes) -> bytes:
    if kind == "an array":
        return struct.pack(">iiIii", 1, 0, PAIR.oid, 1, 1) + struct.pack(">i", len(pair)) + pair
    return record((PAIR.oid, pair)) if kind == "a composite" else pair


def programs(kind: ColumnType, format: str) -> Programs:
    return programs_of(w.table(("id", w.plain(INT8)), ("p", kind), key=["id"]), format, copied=True)


def error(made: Programs, value: bytes) -> str:
    (row,) = encode_block(w.block([w.copy_row(number(1), value)]), made)
    return row.error


@pytest.mark.parametrize("format", FORMATS)
@pytest.mark.parametrize("kind", WITHIN)
def test_a_value_with_other_attributes_than_are_known_is_told_from_a_damaged_one(kind: str, format: str) -> None:
    known = programs(WITHIN[kind], format)
    whole = record((INT8, number(1)), (INT8, number(2)))
    replaced = record((INT8, number(1)), (FLOAT8, struct.pack(">d", 12.5)))
    of_another_size = record((INT8, number(1)), (23, b"\0\0\0\1"))
    null = record((INT8, number(1)), (FLOAT8, None))
    dropped, added = record((INT8, number(7))), record(*[(INT8, number(1))] * 3)
    assert not error(known, within(kind, whole))
    for value in (replaced, of_another_size, null, dropped, added):
        assert REASONS[CHANGED] in error(known, within(kind, value))
    # an attribute that was added since is NULL, but no other difference is of an older value
    assert not error(known.for_older, within(kind, dropped))
    for value in (replaced, of_another_size, null, added):
        assert REASONS[CHANGED] in error(known.for_older, within(kind, value))
    assert "layout" in error(known, within(kind, whole[:-1]))


def test_attributes_that_the_server_converts_arrive_as_what_it_makes_of_them() -> None:
    inner = w.composite(w.plain(POINT))
    kind = w.composite(w.plain(INT8), w.plain(POINT), w.array(w.plain(POINT)), inner)
    known = programs(kind, "json")
    texts = struct.pack(">iiI", 0, 0, TEXT)
    arrives = [(INT8, number(1)), (TEXT, b"(1,2)"), (TEXTS, texts), (RECORD, record((TEXT, b"(1,2)")))]
    assert not error(known, record(*arrives))
    for i, (_, value) in enumerate(arrives):
        assert REASONS[CHANGED] in error(known, record(*arrives[:i], (POINT, value), *arrives[i + 1 :]))


def test_a_value_for_the_server_has_the_known_attributes_or_is_none() -> None:
    whole = record((INT8, number(1)), (INT8, number(2)))
    assert with_known_attributes(PAIR, whole) == whole
    assert with_known_attributes(PAIR, record((INT8, number(1)))) == record((INT8, number(1)), (INT8, None))
    assert with_known_attributes(PAIR, record((INT8, number(1)), (FLOAT8, number(2)))) is None
    assert with_known_attributes(PAIR, record(*[(INT8, number(1))] * 3)) is None
    domain = replace(PAIR, attributes=(replace(PAIR.attributes[0], type=replace(w.plain(INT8), oid=17_000)),))
    assert with_known_attributes(domain, record((INT8, number(1)))) is None
    assert with_known_attributes(domain, record((17_000, number(1)))) is not None
