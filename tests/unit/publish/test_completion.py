"""What of a row is repaired without a server: unchanged TOAST values that the batch itself knows."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import replace

import numpy as np
import psycopg
import pytest
from hypothesis import given
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
from airflow_bottledwater.publish.current import Cells, CurrentRows, Key, KeyBatch
from airflow_bottledwater.publish.dead_letter import column_texts
from airflow_bottledwater.publish.toast import Completed, ToastResolver, _Text
from airflow_bottledwater.stream.assembler import TransactionAssembler
from tests.support import wire as w

TABLE = w.table(("id", w.plain(w.TEXT)), ("a", w.plain(w.TEXT)), ("toast", w.plain(w.TEXT)), key=["id"], oid=7)
FULL = w.table(
    ("id", w.plain(w.TEXT)), ("a", w.plain(w.TEXT)), ("toast", w.plain(w.TEXT)), key=["id"], oid=7, identity="f"
)
UNCHANGED = Field("u")


class FakeTable(CurrentRows):
    """The table as it is now; remembers the keys that it was asked for."""

    def __init__(self, rows: dict[bytes, bytes], unsent: Collection[bytes] = ()) -> None:
        self.rows, self.unsent, self.asked = rows, unsent, list[Key]()

    def fetch(self, table: SourceTable, keys: KeyBatch, columns: Sequence[int], **_: object) -> Cells:
        asked = [keys.key(number) for number in range(len(keys))]
        self.asked += asked
        cells, data = np.zeros((len(keys), len(columns)), dtype=layout.FIELD), bytearray(1)
        cells["kind"] = wire.FIELD_UNCHANGED
        for number, (key,) in enumerate(asked):
            if key in self.rows:
                cells[number] = (wire.FIELD_BINARY, len(data), len(self.rows[key]))
                data += self.rows[key]
        unsent = [number for number, (key,) in enumerate(asked) if key in self.unsent]
        return Cells(cells, np.frombuffer(data, dtype=np.uint8), unsent=unsent)


def complete(
    messages: list[bytes],
    table: SourceTable = TABLE,
    current: dict[bytes, bytes] | None = None,
    unsent: Collection[bytes] = (),
) -> tuple[list[RowMessage], Completed, FakeTable]:
    """:param current: key → the value that the table has now; by default it no longer has any row.
    :param unsent: the keys whose rows may have gone with a partition."""
    assembler = TransactionAssembler(
        Position(0), {}, lambda message, current: Version(table, "t"), batch_bytes=10**9, largest_transaction=10**9
    )
    relation = w.relation(7, [(c.name == "id", c.name, w.TEXT, -1) for c in table.columns])
    assembler.add(w.block([w.xlog(m) for m in (w.begin(9, 3), relation, *messages, w.commit(9, 10))]))
    assert assembler.cut() is None
    batch = assembler.flush(empty=False)
    assert isinstance(batch, Batch)
    completer = ToastResolver("", lambda what: None)
    completer.current = now = FakeTable(current or {}, unsent)
    done = completer.complete(batch, compile_programs([(table, Target(0, 1))], JSON, copied=False))
    rows = [
        pgoutput.row(bytes(done.batch.data[at : at + size]))
        for at, size in done.batch.changes[["offset", "length"]].tolist()
    ]
    return rows, done, now


def change(*new: bytes | Field, old: list[bytes | None] | None = None, tag: str = "K") -> bytes:
    fields = [f if isinstance(f, Field) else w.binary(f) for f in new]
    before = None if old is None else [w.binary(f) for f in old]
    return RowMessage("U", 7, tag if before else "", before, fields).encode()


def values(row: RowMessage) -> list[bytes]:
    assert row.new is not None
    assert all(f.kind == "b" for f in row.new)
    return [f.data for f in row.new]


def test_the_full_old_row_has_the_value() -> None:
    rows, done, completer = complete([change(b"1", b"new", UNCHANGED, old=[b"1", b"old", b"large"], tag="O")], FULL)
    assert values(rows[0]) == [b"1", b"new", b"large"]
    assert (done.superseded, completer.asked) == (set(), [])


def test_an_earlier_change_of_the_key_has_the_value() -> None:
    rows, _, completer = complete(
        [w.insert(7, b"1", b"a", b"large"), change(b"1", b"b", UNCHANGED), change(b"1", b"c", UNCHANGED)]
    )
    assert [values(row) for row in rows] == [[b"1", b"a", b"large"], [b"1", b"b", b"large"], [b"1", b"c", b"large"]]
    assert completer.asked == []


def test_an_earlier_change_of_the_old_key_has_the_value() -> None:
    rows, _, completer = complete(
        [w.insert(7, b"1", b"a", b"large"), change(b"2", b"b", UNCHANGED, old=[b"1", None, None])]
    )
    assert values(rows[1]) == [b"2", b"b", b"large"]
    assert completer.asked == []


def test_a_row_that_is_gone_is_superseded() -> None:
    rows, done, completer = complete(
        [w.insert(7, b"9", b"x", b"y"), change(b"1", b"b", UNCHANGED), w.delete(7, b"1", None, None)]
    )
    assert [row.kind for row in rows] == ["I", "D"]
    assert done.superseded == {1}
    assert completer.asked == [(b"1",)]


def test_a_row_that_has_gone_with_a_partition_cannot_be_completed() -> None:
    rows, done, _ = complete(
        [
            change(b"1", b"b", UNCHANGED),
            change(b"2", b"b", UNCHANGED),
            change(b"3", b"b", UNCHANGED, old=[b"1", None, None]),
        ],
        current={b"4": b"x"},
        unsent=[b"1", b"3"],
    )
    # no tombstone without its row; the row of 2 was deleted
    assert [row.kind for row in rows] == ["U", "U"] and done.superseded == {1}
    assert done.failed.keys() == {0, 1} and all("gone with a partition" in why for why in done.failed.values())


def test_a_key_change_that_is_superseded_still_deletes_the_old_key() -> None:
    rows, done, _ = complete([change(b"2", b"b", UNCHANGED, old=[b"1", None, None]), w.delete(7, b"2", None, None)])
    # else the old key would stay in the topic for ever
    assert [(row.kind, row.old[0].data if row.old else None) for row in rows] == [("D", b"1"), ("D", b"2")]
    assert done.batch.changes["kind"].tolist() == [pgoutput.DELETE, pgoutput.DELETE]
    assert len(done.superseded) == 1


def test_a_value_of_a_deleted_row_is_not_given_to_a_later_row_of_its_key() -> None:
    rows, done, completer = complete(
        [
            w.insert(7, b"2", b"a", b"of the old row"),
            w.delete(7, b"2", None, None),
            change(b"2", b"b", UNCHANGED, old=[b"1", None, None]),
            change(b"2", b"c", UNCHANGED),
        ]
    )
    assert completer.asked == [(b"2",)]
    assert [row.kind for row in rows] == ["I", "D", "D"]
    assert len(done.superseded) == 2


def test_a_value_of_a_row_that_moved_away_is_not_given_to_a_later_row_of_its_key() -> None:
    _rows, _, completer = complete(
        [
            w.insert(7, b"1", b"a", b"first"),
            w.update(7, b"2", b"a", b"first", old=[b"1", None, None]),
            change(b"1", b"b", UNCHANGED, old=[b"3", None, None]),
            change(b"1", b"c", UNCHANGED),
        ]
    )
    assert completer.asked == [(b"1",)]


def test_a_value_of_today_is_not_passed_on_to_the_key_that_its_row_was_moved_to() -> None:
    # 3 is updated and moved to 575, then another row gets the key 3: what is at 3 today is of that one
    rows, done, now = complete(
        [
            change(b"3", b"100", UNCHANGED),
            change(b"575", b"100", UNCHANGED, old=[b"3", None, None]),
            w.insert(7, b"3", b"1", b"of another row"),
        ],
        current={b"3": b"of another row", b"575": b"of the row"},
    )
    assert [values(row)[2] for row in rows] == [b"of another row", b"of the row", b"of another row"]
    assert now.asked == [(b"3",), (b"575",)]
    flags = done.batch.changes["flags"] & wire.FLAG_REREAD
    assert flags.tolist() == [wire.FLAG_REREAD, wire.FLAG_REREAD, 0]


def test_every_record_that_has_a_value_of_today_says_so() -> None:
    _rows, done, now = complete(
        [
            change(b"1", b"a", UNCHANGED),
            change(b"1", b"b", UNCHANGED),
            w.update(7, b"1", b"c", b"new"),
            change(b"1", b"d", UNCHANGED),
        ],
        current={b"1": b"today"},
    )
    assert now.asked == [(b"1",)]
    assert (done.batch.changes["flags"] & wire.FLAG_REREAD).tolist() == [1, 1, 0, 0]


def test_a_key_that_is_itself_unchanged_is_taken_from_the_old_key() -> None:
    # a long text key is stored out of line, too; PostgreSQL then sends the old key with every update
    key = bytes(3000)
    rows, _, completer = complete(
        [w.insert(7, key, b"a", b"large"), change(UNCHANGED, b"b", UNCHANGED, old=[key, None, None])]
    )
    assert values(rows[1]) == [key, b"b", b"large"]
    rows, _done, completer = complete([change(UNCHANGED, b"b", b"other", old=[key, None, None])])
    assert values(rows[0]) == [key, b"b", b"other"]
    assert completer.asked == []


def test_an_insert_of_a_table_with_a_row_filter_gets_what_it_lacks_from_its_own_row() -> None:
    # pgoutput makes it of an update that brings a row into the filter (pgoutput_row_filter,
    # src/backend/replication/pgoutput/pgoutput.c)
    def entered(key: bytes, a: bytes = b"a") -> bytes:
        return RowMessage("I", 7, "", None, [w.binary(key), w.binary(a), UNCHANGED]).encode()

    rows, done, now = complete(
        [
            w.insert(7, b"1", b"a", b"of a row before"),
            entered(b"1"),
            change(b"1", b"b", UNCHANGED),
            entered(b"2"),
            w.insert(7, b"3", b"a", b"whole"),
        ],
        replace(TABLE, where="a > ''", filtered=True),
        current={b"1": b"of 1"},
    )
    # between the first two, a TRUNCATE may have been, which is no row of the batch
    assert [values(row)[2] for row in rows] == [b"of a row before", b"of 1", b"of 1", b"whole"]
    assert now.asked == [(b"1",), (b"2",)]
    assert (done.batch.changes["flags"] & wire.FLAG_REREAD).tolist() == [0, 1, 1, 0]
    assert done.superseded == {3}


def test_an_insert_of_another_table_that_lacks_a_value_is_left_as_it_is() -> None:
    lacks = RowMessage("I", 7, "", None, [w.binary(b"2"), w.binary(b"a"), UNCHANGED]).encode()
    messages = [change(b"1", b"b", UNCHANGED), *[lacks] * 1000, change(b"2", b"c", UNCHANGED)]
    rows, _, now = complete(messages, current={b"1": b"of 1", b"2": b"of 2"})
    assert now.asked == [(b"1",), (b"2",)]
    assert (values(rows[0])[2], values(rows[-1])[2]) == (b"of 1", b"of 2")
    assert {row.encode() for row in rows[1:-1]} == {lacks}


@given(
    st.lists(
        st.tuples(st.sampled_from("12"), st.sampled_from(["I", "U", "D"]), st.binary(min_size=1, max_size=3)),
        max_size=12,
    )
)
def test_values_are_never_invented(changes: list[tuple[str, str, bytes]]) -> None:
    stored: dict[str, bytes] = {}
    messages, wanted = [], []
    for key, kind, value in changes:
        if kind == "I" or (kind == "U" and key not in stored):
            stored[key] = value
            messages.append(w.insert(7, key.encode(), b"a", value))
        elif kind == "U":
            messages.append(change(key.encode(), value, UNCHANGED))
        else:
            stored.pop(key, None)
            messages.append(w.delete(7, key.encode(), None, None))
        wanted.append(stored.get(key))
    rows, _, _ = complete([*messages, w.insert(7, b"3", b"a", b"b")])
    assert [r.new[2].data if r.new else None for r in rows[:-1]] == wanted


@pytest.mark.parametrize("message", [b"", b"I\0\0\0\7", w.insert(7, b"1", b"a", b"b")[:-1]])
def test_a_damaged_row_is_shown_as_hex(message: bytes) -> None:
    assert column_texts(TABLE, message) == {"raw": message.hex()}


def test_a_dead_letters_texts_are_readable_where_they_can_be() -> None:
    texts = column_texts(TABLE, w.insert(7, b"1", None, b"\xff\x00"))
    assert texts == {"id": "1", "a": None, "toast": "\\xff00"}


def test_what_the_server_says_of_a_value_is_not_quoted(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object) -> list[_Text]:
        raise psycopg.errors.InvalidTextRepresentation('invalid input value for enum diagnosis: "positive"')

    monkeypatch.setattr(ToastResolver, "_query", refuse)
    resolver = ToastResolver("host=h", lambda _: None)
    (text,) = resolver._converted(1, None, [b"positive"])
    assert text.reason == ("PostgreSQL cannot turn a value into text: invalid text representation (SQLSTATE 22P02)")
