"""Damaged rows: the kernels never crash, never read outside of a row, never write outside of their room.

Each run has values of its own; ``make fuzz`` takes more of them.
"""

from __future__ import annotations

import struct
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from airflow_bottledwater.encoding import kernels, layout, wire
from airflow_bottledwater.encoding.kernels import unchanged
from airflow_bottledwater.encoding.program import Programs, Target, compile_programs
from airflow_bottledwater.model.relation import Column, ColumnType, SourceTable
from airflow_bottledwater.pipeline.formats import FORMATS
from airflow_bottledwater.publish.toast import NOTHING_CONVERTED
from tests.support import wire as w
from tests.support.callees import write_value
from tests.support.examples import examples
from tests.support.paths import encode_block

pytestmark = pytest.mark.slow

GUARD, PAD = 64, 0xA5
NUMERIC_10_2 = ((10 << 16) | 2) + 4
NUMERIC_1000_0 = (1000 << 16) + 4
#: one column of every layout; a range has no kernel
COLUMNS = (
    tuple(
        Column(f"c{i}", w.plain(oid, typmod))
        for i, (oid, typmod) in enumerate(
            [
                (20, -1),
                (16, -1),
                (17, -1),
                (21, -1),
                (23, -1),
                (25, -1),
                (700, -1),
                (701, -1),
                (1082, -1),
                (1083, -1),
                (1114, -1),
                (1184, -1),
                (1700, -1),
                (1700, NUMERIC_10_2),
                (1700, NUMERIC_1000_0),
                (2950, -1),
                (3802, -1),
                (869, -1),
                (26, -1),
                (790, 2),
                (1186, -1),
                (1266, -1),
                (5069, -1),
                (3904, -1),
            ]
        )
    )
    + tuple(
        Column(f"a{i}", w.array(element, dimensions))
        for i, (element, dimensions) in enumerate(
            [
                (w.plain(23), 1),
                (w.plain(25), 2),
                (w.plain(1700, NUMERIC_10_2), 1),
                (w.plain(3904), 1),
                (w.array(w.plain(21), 1), 1),
                (w.composite(w.plain(20), w.plain(25)), 1),
            ]
        )
    )
    + tuple(
        Column(f"m{i}", kind, required=i == 0)
        for i, kind in enumerate(
            [
                w.plain(16),
                w.composite(w.plain(23), w.composite(w.plain(25), w.array(w.plain(16))), w.plain(1700)),
                w.composite(w.plain(3904), w.plain(25)),
                w.interval_of(w.plain(1700)),
                w.interval_of(w.plain(23), several=True),
                w.extension("hstore", "hstore"),
                w.extension("vector", "vector"),
                w.extension("vector", "halfvec"),
                w.extension("postgis", "geometry"),
                w.labelled("sad", "ok", "happy"),
                w.plain(2205),
                replace(w.plain(2205), form="number"),
                replace(w.plain(1700), form="double"),
                replace(w.plain(1700, NUMERIC_10_2), form="number"),
                replace(w.plain(114), form="value"),
                replace(w.plain(3802), form="value"),
            ]
        )
    )
)
TABLE = SourceTable(1, "public", "t", "f", ("c0", "c5"), COLUMNS)
UNKEYED = SourceTable(2, "public", "u", "f", (), COLUMNS)
CHOSEN = replace(TABLE, oid=3, name="v", partition_by=("c5",))
ALL = {
    (format, copied): compile_programs(
        [(TABLE, Target(0, 3, 1, 2)), (UNKEYED, Target(1, 3, 0, 3)), (CHOSEN, Target(2, 3, 1, 2))],
        FORMATS[format],
        copied=copied,
    )
    for format in FORMATS
    for copied in (True, False)
}


class Guarded:
    """An array in the middle of a larger one whose ends must stay as they are."""

    def __init__(self, size: int, dtype: str | np.dtype[np.void] = "uint8", width: int = 0) -> None:
        shape = (size + 2 * GUARD, width) if width else (size + 2 * GUARD,)
        self._whole = np.zeros(shape, dtype=dtype)
        self._whole.view(np.uint8)[:] = PAD
        self.view = self._whole[GUARD : GUARD + size]

    def check(self) -> None:
        for end in (self._whole[:GUARD], self._whole[GUARD + len(self.view) :]):
            assert (end.view(np.uint8) == PAD).all()


def guarded_bytes(data: bytes) -> Guarded:
    made = Guarded(len(data))
    made.view[:] = np.frombuffer(data, dtype=np.uint8)
    return made


def numeric(count: int, weight: int, sign: int, scale: int, digits: list[int]) -> bytes:
    return struct.pack(">HhHH", count, weight, sign, scale) + b"".join(struct.pack(">H", d) for d in digits)


numerics = st.builds(
    lambda digits, weight, sign, scale, more: numeric(len(digits) + more, weight, sign, scale, digits),
    st.lists(st.integers(0, 9999) | st.integers(0, 65535), max_size=12),
    st.integers(-10, 10) | st.integers(-32768, 32767),
    st.sampled_from([0, wire.NUMERIC_NEGATIVE, wire.NUMERIC_NAN, wire.NUMERIC_PINF, wire.NUMERIC_NINF, 1]),
    st.integers(0, 20) | st.integers(0, 65535),
    st.sampled_from([0, 0, 0, 1, 40000]),
)
# by itself, hypothesis makes texts of some five bytes, which fit nearly everywhere
sized = st.integers(0, 70).flatmap(lambda n: st.binary(min_size=n, max_size=n))
#: what a column's binary value looks like: most values must be good, or no row gets past its first columns
GOOD: dict[int, st.SearchStrategy[bytes]] = {
    16: st.sampled_from([b"\0", b"\1"]),
    17: sized,
    25: sized,
    3904: sized,
    114: sized,
    2205: st.binary(min_size=4, max_size=4),
    869: st.one_of(
        st.builds(
            lambda bits, cidr, address: bytes([2, bits, cidr, 4]) + address,
            st.integers(0, 32),
            st.integers(0, 1),
            st.binary(min_size=4, max_size=4),
        ),
        st.builds(
            lambda bits, cidr, address: bytes([3, bits, cidr, 16]) + address,
            st.integers(0, 128),
            st.integers(0, 1),
            st.lists(st.sampled_from([b"\0\0", b"\xff\xff", b"\x01\x02"]), min_size=8, max_size=8).map(b"".join),
        ),
    ),
    1083: st.integers(0, 86_400_000_000).map(lambda t: struct.pack(">q", t)),
    1700: st.builds(
        lambda digits, weight, sign, scale: numeric(len(digits), weight, sign, scale, digits),
        st.lists(st.integers(1, 9999), max_size=9),
        st.integers(-3, 9),
        st.sampled_from([0, wire.NUMERIC_NEGATIVE]),
        st.integers(0, 20),
    ),
    2950: st.binary(min_size=16, max_size=16),
    3802: sized.map(lambda text: b"\1" + text),
    1266: st.builds(
        lambda t, zone: struct.pack(">qi", t, zone), st.integers(0, 86_400_000_000), st.integers(-60_000, 60_000)
    ),
    1186: st.binary(min_size=16, max_size=16),
    **{oid: st.binary(min_size=n, max_size=n) for oid, n in ((21, 2), (23, 4), (26, 4), (700, 4), (1082, 4))},
    **{oid: st.binary(min_size=8, max_size=8) for oid in (20, 701, 790, 1114, 1184, 5069)},
}


def array_of(sizes: list[int], bound: int, elements: list[bytes | None]) -> bytes:
    head = struct.pack(">iiI", len(sizes), 1, 23) + b"".join(struct.pack(">ii", size, bound) for size in sizes)
    return head + b"".join(struct.pack(">i", -1) if e is None else struct.pack(">i", len(e)) + e for e in elements)


@st.composite
def arrays(draw: st.DrawFn, kind: ColumnType) -> bytes:
    """Mostly as it is declared."""
    assert kind.element is not None
    if draw(st.integers(0, 4)) == 0:
        return array_of([], 1, [])
    sizes = draw(st.lists(st.integers(1, 3), min_size=kind.dimensions, max_size=kind.dimensions))
    if draw(st.integers(0, 9)) == 0:
        sizes = draw(st.lists(st.integers(-1, 2**31 - 1), max_size=7))
    # converted by the server, so that they are text
    inner = sized if kind.element.oid == 3904 and kind.element.element is None else good(kind.element)
    count = min(30, max(0, int(np.prod(sizes))))
    return array_of(sizes, draw(st.sampled_from([1, 1, 1, 1, 0])), [draw(st.none() | inner) for _ in range(count)])


def prefixed(values: list[bytes | None]) -> bytes:
    return b"".join(struct.pack(">i", -1) if v is None else struct.pack(">i", len(v)) + v for v in values)


@st.composite
def composites(draw: st.DrawFn, kind: ColumnType) -> bytes:
    """Sometimes of before an attribute was added, or of after one was, or with another one."""
    converted = any(a.type.oid == 3904 for a in kind.attributes)
    oids = [*(25 if converted and a.type.oid == 3904 else a.type.oid for a in kind.attributes), 23]
    if draw(st.integers(0, 15)) == 0:
        oids[draw(st.integers(0, len(oids) - 1))] = 26
    values = [draw(st.none() | (sized if converted and a.type.oid == 3904 else good(a.type))) for a in kind.attributes]
    values = draw(st.sampled_from([values] * 12 + [values[:-1], [*values, None]]))
    each = zip(oids, values, strict=False)
    return struct.pack(">i", len(values)) + b"".join(struct.pack(">I", oid) + prefixed([v]) for oid, v in each)


@st.composite
def spans(draw: st.DrawFn, kind: ColumnType) -> bytes:
    """Flags, and the bounds that they leave."""
    assert kind.element is not None
    flags = draw(st.sampled_from([0, 2, 4, 6, 1, 8, 16, 24, 10]) | st.integers(0, 255))
    count = 0 if flags & 1 else 2 - bool(flags & 8) - bool(flags & 16)
    return bytes([flags]) + prefixed([draw(good(kind.element)) for _ in range(count)])


texts = st.lists(st.tuples(sized, st.none() | sized), max_size=4)


def good(kind: ColumnType) -> st.SearchStrategy[bytes]:
    if kind.attributes:
        return composites(kind)
    if kind.kind == "m" and kind.element is not None:
        return st.lists(spans(kind.element), max_size=3).map(lambda of: struct.pack(">i", len(of)) + prefixed([*of]))
    if kind.kind == "r" and kind.element is not None:
        return spans(kind)
    if kind.element is not None:
        return arrays(kind)
    return GOOD[kind.oid] if kind.oid in GOOD else OF_EXTENSIONS[kind.label]


OF_EXTENSIONS: dict[str, st.SearchStrategy[bytes]] = {
    "hstore": texts.map(lambda pairs: struct.pack(">i", len(pairs)) + prefixed([v for pair in pairs for v in pair])),
    "vector": st.lists(st.binary(min_size=4, max_size=4), max_size=9).map(
        lambda of: struct.pack(">hh", len(of), 0) + b"".join(of)
    ),
    "halfvec": st.lists(st.binary(min_size=2, max_size=2), max_size=9).map(
        lambda of: struct.pack(">hh", len(of), 0) + b"".join(of)
    ),
    "geometry": sized,
    "mood": st.sampled_from([b"sad", b"ok", b"happy"] * 5 + [b"happier", b""]),
}


BAD = st.none() | st.binary(max_size=20) | numerics


@st.composite
def rows(draw: st.DrawFn) -> list[bytes | None]:
    """Values of all columns, sometimes one that does not fit its column."""
    # NULL where a numeric with a precision would rarely have a representation
    found = [
        None if draw(st.integers(0, 5)) == 0 and not column.required else draw(good(column.type)) for column in COLUMNS
    ]
    found[0], found[5] = draw(GOOD[20]), draw(GOOD[25])
    if draw(st.integers(0, 3)) == 0:
        found[draw(st.integers(0, len(COLUMNS) - 1))] = draw(BAD)
    return found


outputs = st.integers(0, 900) | st.just(1 << 19)


@st.composite
def damaged(draw: st.DrawFn, data: bytes) -> bytes:
    """Cut, lengthened, with bits flipped, or as it was."""
    how = draw(st.sampled_from(["cut", "long", "flip", "length", "whole", "whole", "whole"]))
    if how == "cut":
        return data[: draw(st.integers(0, len(data)))]
    if how == "long":
        return data + draw(st.binary(min_size=1, max_size=9))
    if how == "flip" and data:
        changed = bytearray(data)
        for _ in range(draw(st.integers(1, 4))):
            changed[draw(st.integers(0, len(data) - 1))] ^= 1 << draw(st.integers(0, 7))
        return bytes(changed)
    if how == "length" and len(data) > 8:
        at = draw(st.integers(2, len(data) - 4))
        return (
            data[:at]
            + struct.pack(">i", draw(st.sampled_from([-2, -(2**31), 2**31 - 1, 1000, 65535])))
            + data[at + 4 :]
        )
    return data


def check_records(table: np.ndarray, used: int, size: int) -> None:  # type: ignore[type-arg]
    """Every record lies in what was used of the output."""
    assert 0 <= used <= size
    for row in table:
        for at, length in ((row["key"], row["key_length"]), (row["value"], row["value_length"])):
            assert length == -1 or (length >= 0 and 0 <= at <= at + length <= used)
        assert 0 <= row["partition"] < 3


def scratch_of(programs: Programs) -> Guarded:
    # the fields of two rows; the guards are rows before and behind
    made = Guarded(2, layout.FIELD, programs.width)
    for field in layout.FIELD.names or ():
        made.view[field] = 2**40  # a position left over from another row must never be used
    return made


@settings(max_examples=examples(60))
@given(st.data(), st.sampled_from(list(FORMATS)), st.sampled_from([0, 1, 2]), outputs)
def test_damaged_copy_rows_are_verdicts(data: st.DataObject, format: str, relation: int, size: int) -> None:
    programs = ALL[format, True]
    given_rows = [data.draw(damaged(w.copy_row(*data.draw(rows())))) for _ in range(data.draw(st.integers(1, 3)))]
    source = guarded_bytes(b"".join(given_rows))
    offsets = np.concatenate([[0], np.cumsum([len(r) for r in given_rows])]).astype(np.int64)
    out, fields = Guarded(size), scratch_of(programs)
    records, errors = Guarded(2, layout.RECORD), Guarded(2, layout.ERROR)
    following, used, made, failed = kernels.encode_copy(
        source.view, offsets, 0, programs.program, relation, fields.view, layout.facts(1, 0),
        layout.Output(records.view, errors.view, out.view),
    )  # fmt: skip
    for guarded in (source, out, fields, records, errors):
        guarded.check()
    assert made + failed == following
    check_records(records.view[:made], used, size)
    for row, code, column, offset in errors.view[:failed].tolist():
        assert 0 <= row < len(given_rows)
        assert -1 <= column < len(COLUMNS)
        assert -1 <= offset <= len(given_rows[row])
        assert programs.error(relation, code, column, offset)
        assert code in wire.REASONS


def assert_one_form(programs: Programs, relation: int, row: bytes, largest: int) -> None:
    """The row is whole or not there in a buffer of any size below ``largest``, and the same in each that it fits in."""
    source, offsets = guarded_bytes(row), np.array([0, len(row)], dtype=np.int64)
    records, errors = np.zeros(2, dtype=layout.RECORD), np.zeros(2, dtype=layout.ERROR)
    ends, fitting = set(), 0
    for size in [1 << 19, *range(largest)]:
        out = Guarded(size)
        following, used, made, failed = kernels.encode_copy(
            source.view, offsets, 0, programs.program, relation, programs.scratch(), layout.facts(1, 0),
            layout.Output(records, errors, out.view),
        )  # fmt: skip
        out.check()
        if following:
            # a value may be refused before or after the buffer is full, but a row has one form only
            ends.add((used, made, failed, bytes(out.view[:used])))
            check_records(records[:made], used, size)
            fitting += made
        else:
            assert (used, made, failed) == (0, 0, 0)
        if fitting > 100:
            break  # what is still larger is the same again
    assert len(ends) == 1


@settings(max_examples=15)
@given(rows(), st.sampled_from(list(FORMATS)), st.sampled_from([0, 1, 2]))
def test_a_row_is_whole_or_not_there_in_a_buffer_of_any_size(
    values: list[bytes | None], format: str, relation: int
) -> None:
    assert_one_form(ALL[format, True], relation, w.copy_row(*values), 1500)


@pytest.mark.parametrize("column", range(len(COLUMNS)))
@pytest.mark.parametrize("format", ["avro", "json", "protobuf"])
@settings(max_examples=12)
@given(st.data())
def test_so_is_a_value_of_each_type_by_itself(format: str, column: int, data: st.DataObject) -> None:
    """A whole row is longer than the sizes above: its last columns never meet a buffer that ends inside them."""
    alone = SourceTable(1, "public", "t", "d", (), (COLUMNS[column],))
    programs = compile_programs([(alone, Target(0, 1))], FORMATS[format], copied=True)
    kind = COLUMNS[column].type
    value = data.draw(sized if kind.base_oid == 3904 and not kind.attributes else good(kind))
    assert_one_form(programs, 0, w.copy_row(value), 700)


field_kinds = st.sampled_from("b" * 60 + "nut")


@st.composite
def tuples(draw: st.DrawFn) -> bytes:
    out = struct.pack(">h", len(COLUMNS))
    for value in draw(rows()):
        kind = "n" if value is None else draw(field_kinds)
        out += kind.encode()
        if kind in "bt":
            out += struct.pack(">i", len(value or b"")) + (value or b"")
    return out


@st.composite
def changes(draw: st.DrawFn) -> bytes:
    kind = draw(st.sampled_from("IUD"))
    parts = (
        [draw(st.sampled_from("KO")).encode() + draw(tuples())]
        if kind == "D" or (kind == "U" and draw(st.booleans()))
        else []
    )
    if kind != "D":
        parts.append(b"N" + draw(tuples()))
    message = kind.encode() + struct.pack(">I", 1) + b"".join(parts)
    # the assembler looks at the first bytes
    return message[:6] + draw(damaged(message[6:]))


@settings(max_examples=examples(60))
@given(st.lists(changes(), min_size=1, max_size=4), st.sampled_from(list(FORMATS)), st.data(), outputs)
def test_damaged_changes_are_verdicts(messages: list[bytes], format: str, data: st.DataObject, size: int) -> None:
    programs = ALL[format, False]
    source, fields = guarded_bytes(b"".join(messages)), scratch_of(programs)
    table = np.zeros(len(messages), dtype=layout.CHANGE)
    at = 0
    for row, message in zip(table, messages, strict=True):
        row["kind"], row["offset"], row["length"] = message[0], at, len(message)
        row["relation"] = data.draw(st.integers(0, 2))
        at += len(message)
    found = Guarded(3, layout.CONVERSION)
    wanted = kernels.find_conversions(source.view, table, programs.program, fields.view, found.view)
    for position, length, column, change in found.view[: min(wanted, 3)].tolist():
        row = table[change]
        assert row["offset"] <= position <= position + length <= row["offset"] + row["length"]
        assert 0 <= column < len(programs.program.columns)
    affected = Guarded(3, "int64")
    assert (
        0
        <= unchanged.find_unchanged(source.view, table, programs.program, fields.view, affected.view)[0]
        <= len(messages)
    )
    # each converted text is its own number, so that a text given to the wrong value shows
    texts = [str(i).encode() for i in range(wanted)]
    side = guarded_bytes(b"".join(texts) or b"\0")
    side_offsets = np.concatenate([[0], np.cumsum([len(t) for t in texts])]).astype(np.int64)
    out = Guarded(size)
    records, errors = Guarded(2 * len(messages), layout.RECORD), Guarded(len(messages) + 1, layout.ERROR)
    following, cursor, used, made, failed = kernels.encode_changes(
        source.view, table, 0, programs.program, layout.Texts(side.view, side_offsets), 0, fields.view,
        layout.facts(0, 0),
        layout.Output(records.view, errors.view, out.view),
    )  # fmt: skip
    for guarded in (source, side, out, fields, records, errors, found, affected):
        guarded.check()
    check_records(records.view[:made], used, size)
    assert 0 <= cursor <= wanted
    assert following < len(messages) or cursor == wanted
    for change, code, column, offset in errors.view[:failed].tolist():
        assert 0 <= change < len(messages)
        assert -1 <= column < len(COLUMNS)
        assert -1 <= offset <= len(messages[change])
        assert code in wire.REASONS
        assert programs.error(int(table[change]["relation"]), code, column, offset)


@settings(max_examples=examples(100))
@given(numerics, st.sampled_from(["avro", "json"]), st.integers(0, 4000))
def test_any_numeric_is_written_within_its_room_or_refused(value: bytes, format: str, size: int) -> None:
    source, out = guarded_bytes(value), Guarded(size)
    for opcode, argument in (
        (wire.OP_NUMERIC_TEXT, 0),
        (wire.OP_DECIMAL, 2),
        (wire.OP_DECIMAL, 1000),
        (wire.OP_DOUBLE, 0),
    ):
        program = w.program_of(opcode, argument, json=format == "json")
        end = write_value(program, 0, source.view, 0, len(value), out.view, 0)
        assert end in (wire.SPACE, wire.MALFORMED, wire.NO_REPRESENTATION) or 0 < end <= size
        out.check()


@given(st.sampled_from([b"U", b"I"]), st.sampled_from(["avro", "json"]))
def test_a_change_that_lacks_its_new_row_is_a_verdict(kind: bytes, format: str) -> None:
    programs = ALL[format, False]
    key = (
        b"K"
        + struct.pack(">h", len(COLUMNS))
        + b"b"
        + struct.pack(">iq", 8, 1)
        + b"n" * 4
        + b"b"
        + struct.pack(">i", 1)
        + b"x"
        + b"n" * 12
    )
    for message in (kind + struct.pack(">I", 1) + key, b"D" + struct.pack(">I", 1) + b"N" + key[1:]):
        table = np.zeros(1, dtype=layout.CHANGE)
        table[0]["kind"], table[0]["length"] = message[0], len(message)
        output = layout.output(5, 5, 4096)
        *_, made, failed = kernels.encode_changes(
            np.frombuffer(message, dtype=np.uint8).copy(), table, 0, programs.program, NOTHING_CONVERTED, 0,
            programs.scratch(), layout.facts(0, 0), output,
        )  # fmt: skip
        assert (made, failed, output.errors[0]["code"]) == (0, 1, wire.MALFORMED)


def test_what_is_damaged_is_said_with_its_column_and_place() -> None:
    programs = compile_programs(
        [(SourceTable(1, "public", "t", "d", (), (Column("a", w.plain(23)), Column("b", w.plain(16)))), Target(0, 1))],
        FORMATS["avro"],
        copied=True,
    )
    good, wrong = w.copy_row(b"\0\0\0\1", b"\1"), w.copy_row(b"\0\0\0\1", b"\7")
    given = [good, wrong, good[:-3], good + b"\0", b"\0"]
    block = w.block(given)
    found = [made.error for made in encode_block(block, programs)]
    layout = "the value's bytes do not have the layout of its type"
    assert found == [
        "",
        f"public.t, column 'b': {layout} (at byte 14 of the row)",
        f"public.t, column 'b': {layout} (at byte 10 of the row)",
        f"public.t: {layout} (at byte 15 of the row)",
        f"public.t: {layout} (at byte 0 of the row)",
    ]
