"""Unchanged values of random batches: the compiled functions against a readable twin, which has an object for each
value."""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from airflow_bottledwater.encoding import layout, wire
from airflow_bottledwater.encoding.program import Target, compile_programs
from airflow_bottledwater.model.lsn import Position
from airflow_bottledwater.model.relation import SourceTable
from airflow_bottledwater.model.version import Version
from airflow_bottledwater.pipeline.formats import JSON
from airflow_bottledwater.postgres import pgoutput
from airflow_bottledwater.postgres.pgoutput import Field, RowMessage
from airflow_bottledwater.publish.batch import Batch
from airflow_bottledwater.publish.current import Cells, CurrentRows, Key, KeyBatch, row_key, with_key
from airflow_bottledwater.publish.toast import ToastResolver
from tests.support import wire as w
from tests.support.examples import examples

pytestmark = pytest.mark.slow

COLUMNS = [(name, w.plain(w.TEXT)) for name in ("k", "a", "l", "b")]
TABLES = [
    w.table(*COLUMNS, key=["l", "k"], oid=1),
    w.table(*COLUMNS, key=["k", "l"], oid=2, identity="f"),
    w.table(*COLUMNS, key=["k"], oid=3),
]
Now = dict[tuple[int, Key], list[bytes | None]]


class Rows(CurrentRows):
    """Tables as they are now."""

    def __init__(self, now: Now) -> None:
        self.now = now

    def fetch(self, table: SourceTable, keys: KeyBatch, columns: Sequence[int], *, most: int, **_: object) -> Cells:
        cells, data = np.zeros((len(keys), len(columns)), dtype=layout.FIELD), bytearray(1)
        cells["kind"] = wire.FIELD_UNCHANGED
        asked = [keys.key(number) for number in range(len(keys))]
        assert len(set(asked)) == len(asked)
        for number, key in enumerate(asked):
            if len(data) > most // 2:  # sizes are estimated, perhaps too large
                return Cells(cells, np.frombuffer(data, dtype=np.uint8), left_out=len(keys) - number)
            row = self.now.get((table.oid, key))
            for place, c in enumerate(columns if row is not None else ()):
                value = row[c] if row is not None else None
                kind = wire.FIELD_NULL if value is None else wire.FIELD_BINARY
                cells[number, place] = (kind, len(data), len(value or b""))
                data += value or b""
        return Cells(cells, np.frombuffer(data, dtype=np.uint8))


def twin(messages: Sequence[tuple[int, RowMessage]], now: Now) -> list[tuple[RowMessage, bool]]:
    """The messages as they are published, and whether a value of today is in them."""
    seen: dict[tuple[int, Key], list[Field]] = {}
    made: list[tuple[RowMessage, bool]] = []
    for relation, given_message in messages:
        table = TABLES[relation]
        message, reread = with_key(table, given_message), False
        old_key = row_key(table, message.old) if message.old is not None else None
        new_key = row_key(table, message.new) if message.new is not None else None
        if message.new is not None and any(f.kind == "u" for f in message.new):
            new = message.new
            earlier = seen.get((relation, old_key or new_key or ()))
            # a value that is unchanged was not NULL: the old row does not have it
            full = message.old if message.old_tag == "O" else None
            before = None if full is None else [Field("u") if f.kind == "n" else f for f in full]
            for source in (before, earlier):
                if source is not None:
                    new = [s if f.kind == "u" else f for f, s in zip(new, source, strict=True)]
            message = replace(message, new=new)
        if old_key is not None:
            seen.pop((relation, old_key), None)
        if message.new is not None:
            assert new_key is not None
            seen[relation, new_key] = message.new
            if any(f.kind == "u" for f in message.new):
                row = now.get((table.oid, new_key))
                if row is None:
                    if old_key is None or old_key == new_key:
                        continue
                    message = replace(message, kind="D", new=None)
                else:
                    today = [Field("n") if v is None else Field("b", v) for v in row]
                    new = [t if f.kind == "u" else f for f, t in zip(message.new, today, strict=True)]
                    message, reread = replace(message, new=new), True
        made.append((message, reread))
    return made


short = st.sampled_from([b"", b"1", b"2", b"12"])
fields = st.one_of(st.just(Field("n")), st.just(Field("u")), st.just(Field("u")), short.map(lambda v: Field("b", v)))


@st.composite
def changes(draw: st.DrawFn) -> tuple[int, RowMessage]:
    relation = draw(st.integers(0, 2))
    table, kind = TABLES[relation], draw(st.sampled_from("IUUUUD"))

    def row(*, unchanged: bool) -> list[Field]:
        values = [draw(fields) for _ in table.columns]
        plain = [f if unchanged or f.kind != "u" else Field("b", b"0") for f in values]
        return [
            Field("b", draw(short)) if c.name in table.key else f for c, f in zip(table.columns, plain, strict=True)
        ]

    full = table.identity == "f"
    old, new, tag = None, None, ""
    if kind == "D" or (kind == "U" and (full or draw(st.booleans()))):
        old, tag = row(unchanged=False), "O" if full else "K"
        if not full:
            old = [f if c.name in table.key else Field("n") for c, f in zip(table.columns, old, strict=True)]
    if kind != "D":
        new = row(unchanged=kind == "U")
        if old is not None and draw(st.booleans()):
            # a key value that is out of line, or one that did not change
            new = [
                (Field("u") if draw(st.booleans()) else o) if c.name in table.key else f
                for c, f, o in zip(table.columns, new, old, strict=True)
            ]
    return relation, RowMessage(kind, table.oid, tag, old, new)


@settings(max_examples=examples(150))
@given(
    st.lists(changes(), min_size=1, max_size=14),
    st.dictionaries(
        st.tuples(st.integers(1, 3), st.lists(short, min_size=1, max_size=2).map(tuple)),
        st.lists(st.none() | st.binary(max_size=3), min_size=4, max_size=4),
        max_size=12,
    ),
)
def test_a_batch_is_completed_as_its_twin_says(messages: list[tuple[int, RowMessage]], now: Now) -> None:
    encoded = [message.encode() for _, message in messages]
    table = np.zeros(len(messages), dtype=layout.CHANGE)
    table["kind"] = [message[0] for message in encoded]
    table["length"] = [len(message) for message in encoded]
    table["offset"] = np.cumsum(table["length"]) - table["length"]
    table["relation"] = [relation for relation, _ in messages]
    data = np.frombuffer(bytearray(b"".join(encoded)), dtype=np.uint8)
    batch = Batch(Position(0), Position(1), data, table, tuple(Version(each, "t") for each in TABLES))
    resolver = ToastResolver("", lambda what: None)
    resolver.current = Rows(now)
    programs = compile_programs([(each, Target(0, 1)) for each in TABLES], JSON, copied=False)
    done = resolver.complete(batch, programs)
    found = [
        (pgoutput.row(bytes(done.batch.data[at : at + size])), bool(flags & wire.FLAG_REREAD))
        for at, size, flags in done.batch.changes[["offset", "length", "flags"]].tolist()
    ]
    assert found == twin(messages, now)
    assert done.batch.changes["kind"].tolist() == [ord(message.kind) for message, _ in found]


def updates(keys: Sequence[bytes], lsn: Sequence[int]) -> Batch:
    """A batch of updates of the third table that leave its last column as it was."""
    encoded = [RowMessage("U", 3, "", None, [Field("b", k), Field("n"), Field("n"), Field("u")]).encode() for k in keys]
    table = np.zeros(len(keys), dtype=layout.CHANGE)
    table["kind"], table["length"] = ord("U"), [len(message) for message in encoded]
    table["offset"] = np.cumsum(table["length"]) - table["length"]
    table["lsn"] = lsn
    table["ordinal"] = np.arange(len(keys)) - np.searchsorted(table["lsn"], table["lsn"]) + 1
    data = np.frombuffer(bytearray(b"".join(encoded)), dtype=np.uint8)
    return Batch(Position(0), Position(50), data, table, (Version(TABLES[2], "t"),))


PROGRAMS = compile_programs([(TABLES[2], Target(0, 1))], JSON, copied=False)


def test_a_batch_that_lacks_much_is_taken_in_whole_transactions() -> None:
    batch = updates([b"1"] * 40, np.repeat([10, 20, 30, 40], [5, 25, 5, 5]).tolist())
    resolver = ToastResolver("", lambda what: None)
    taken = []
    for value_bytes in (1e3, 1.6e6, 3e6, 1e9):
        resolver._value_bytes = value_bytes
        part = resolver.leading(batch, PROGRAMS)
        taken.append((len(part), part.end))
    # that one has too much by itself is only a guess: it is not divided yet
    assert taken == [(40, Position(50)), (5, Position(20)), (5, Position(20)), (5, Position(20))]
    rest = batch.after(Position(20))
    assert rest is not None
    assert [(len(p), p.end) for p in [resolver.leading(rest, PROGRAMS)]] == [(25, Position(30))]
    part = rest.leading(10)
    assert (len(part), part.end) == (10, Position(20, 10))
    following = rest.after(part.end)
    assert following is not None and (len(following), following.start) == (25, Position(20, 10))
    assert rest.after(Position(20, 26)) is None and rest.after(Position(21)) is None


@given(
    st.lists(st.tuples(st.sampled_from([b"1", b"2", b"3"]), st.booleans()), min_size=1, max_size=30),
    st.dictionaries(st.sampled_from([b"1", b"2", b"3"]), st.integers(0, 900)),
    st.lists(st.sampled_from([1.0, 200.0, 1e9]), min_size=1),
    st.sampled_from([300, 1000]),
)
@example([(b"1", False), (b"2", False), (b"1", False)], {b"1": 600, b"2": 600}, [1e9], 1000)
@example([(b"2", False), (b"1", False), (b"2", False)], {b"2": 500}, [1.0], 1000)
@example([(b"1", False), (b"2", False), (b"1", True)], {b"1": 500}, [1.0], 1000)
@example([(b"1", False), (b"2", False), (b"1", True), (b"1", False)], {b"1": 500}, [1.0], 1000)
def test_values_of_any_size_are_filled_in_part_by_part(
    rows: list[tuple[bytes, bool]], sizes: dict[bytes, int], guesses: list[float], together: int
) -> None:
    """A row that has the value is one of many that are alike, or it is updated again and again. A transaction is
    divided only if it lacks too much by itself, whatever was expected."""
    most = 1000
    batch = updates([key for key, _ in rows], (10 + 10 * np.cumsum([begins for _, begins in rows])).tolist())
    batch = replace(batch, end=Position(10_000))
    resolver = ToastResolver("", lambda what: None, most)
    resolver._most_together = together
    resolver.current = Rows({(3, (key,)): [key, None, None, bytes(size)] for key, size in sizes.items()})
    lacks = Counter[int]()
    for (key, _), lsn in zip(rows, batch.changes["lsn"].tolist(), strict=True):
        lacks[lsn] += sizes.get(key, 0)
    rest = batch
    found: list[tuple[int, int]] = []
    for guess in itertools.cycle(guesses):
        resolver._value_bytes = guess
        done = resolver.complete(resolver.leading(rest, PROGRAMS), PROGRAMS)
        filled = done.batch.data.size - batch.data.size
        assert filled < most + 2000 or len(done.batch) == 1
        if done.batch.end.ordinal:  # the part is all of one transaction
            assert int(done.batch.changes["lsn"].min(initial=done.batch.end.lsn)) == done.batch.end.lsn
            assert lacks[done.batch.end.lsn] > most
        found += done.batch.changes[["lsn", "ordinal"]].tolist()
        assert done.batch.end > rest.start
        if done.batch.end == batch.end:
            break
        following = rest.after(done.batch.end)
        assert following is not None
        rest = following
    kept = [key in sizes for key, _ in rows]
    assert found == batch.changes[kept][["lsn", "ordinal"]].tolist()
