"""What decides whether a dead letter may still be published."""

from __future__ import annotations

import base64
import hmac
import struct
from dataclasses import replace

import pytest

from airflow_bottledwater.encoding.mapping import TableMapping
from airflow_bottledwater.errors import RecordError
from airflow_bottledwater.model.lsn import Position
from airflow_bottledwater.model.relation import Column
from airflow_bottledwater.pipeline.settings import Settings
from airflow_bottledwater.postgres import pgoutput
from airflow_bottledwater.postgres.pgoutput import Field, RowMessage
from airflow_bottledwater.provision.source_rows import SourceRow, StoredDeadLetter, TableToday, compare
from airflow_bottledwater.publish.current import FoundRows
from tests.support import wire as w

OLDER, AT, NEWER = str(Position(100, 1)), str(Position(200, 1)), str(Position(300, 1))


@pytest.mark.parametrize(("newest", "overtaken"), [("", False), (OLDER, False), (NEWER, True)])
def test_what_overtakes_a_letter_of_a_snapshot(newest: str, overtaken: bool) -> None:
    letter = StoredDeadLetter(b"", {"op": "r", "pos": "", "again": {"lsn": 200}})
    assert letter.overtaken(newest) is overtaken


@pytest.mark.parametrize(("newest", "overtaken"), [(OLDER, False), (AT, False), (NEWER, True)])
def test_what_overtakes_a_letter_of_a_change(newest: str, overtaken: bool) -> None:
    letter = StoredDeadLetter(b"", {"op": "u", "pos": AT, "again": {}})
    assert letter.overtaken(newest) is overtaken


def test_a_column_that_cannot_be_compared_does_not_count() -> None:
    table = w.table(("k", w.plain(w.TEXT)), ("bits", w.plain(w.TEXT)), key=["k"], oid=1)
    message = RowMessage("I", 1, "", None, [Field("b", b"1"), Field("b", b"0")])
    found = FoundRows({(b"1",): [b"1", b"1"]})
    assert not compare(table, message, found).same
    assert compare(table, message, replace(found, unreadable={1: "its type was altered"})).same


def test_only_a_column_that_was_not_rewritten_shows_that_a_row_has_changed() -> None:
    """numeric_send has the display scale: what numeric(10,2) was has other bytes as numeric(12,4)."""
    table = w.table(("k", w.plain(w.TEXT)), ("price", w.plain(1700)), ("note", w.plain(w.TEXT)), key=["k"], oid=1)
    before, now = (struct.pack(">hhhhhh", 2, 0, 0, scale, 12, 5000) for scale in (2, 4))
    message = RowMessage("I", 1, "", None, [Field("b", b"1"), Field("b", before), Field("b", b"a")])

    def found(price: bytes, note: bytes, *rewritten: int) -> SourceRow:
        return compare(table, message, FoundRows({(b"1",): [b"1", price, note]}, rewritten=rewritten))

    assert found(before, b"a", 1).same
    assert (found(now, b"a").same, found(now, b"a").unknown) == (False, "")
    assert "column 'price' or its type was altered since" in found(now, b"a", 1).unknown
    assert (found(now, b"b", 1).same, found(now, b"b", 1).unknown) == (False, "")
    assert "altered since" in found(now, b"b", 1, 2).unknown
    gone = compare(table, message, FoundRows(rewritten=(1,)))
    assert (gone.same, gone.unknown) == (False, "")


def test_a_letter_is_published_as_its_columns_are_today_but_for_its_key() -> None:
    day = w.plain(1082)
    table = w.table(("k", day), ("day", day), ("note", w.plain(w.TEXT)), ("gone", day), key=["k"], oid=1)
    row = RowMessage("I", 1, "", None, [Field("b", b"key!"), Field("b", b"days"), Field("b", b"note"), Field("n")])
    again = {"table": table, "message": base64.b64encode(row.encode()).decode()}
    options = {"*.*": {"temporal": {"*": "text"}, "mask": {"note": "first:2"}, "exclude": "gone"}}
    mapping = TableMapping.of(Settings(postgres="host=db", table_options=options))
    found = _today(StoredDeadLetter(b"", {"again": again}), mapping).content["again"]
    as_text = day.with_temporal("text")
    now = found["table"]
    assert [(c.name, c.type) for c in now.columns] == [("k", day), ("day", as_text), ("note", w.plain(w.TEXT))]
    new = pgoutput.row(base64.b64decode(found["message"])).new
    assert new == [Field("b", b"key!"), Field("b", b"days"), Field("b", b"no")]
    unchanged = StoredDeadLetter(b"", {"again": again})
    assert _today(unchanged, TableMapping()) is unchanged


def test_a_letter_has_the_options_of_the_name_that_its_table_has_today() -> None:
    letter = _letter(Column("email", w.plain(w.TEXT)), Column("note", w.plain(w.TEXT)))
    table = letter.content["again"]["table"]
    options = {
        f"{table.schema}.{table.name}": {"exclude": "note"},
        "clients": {"exclude": "email", "mask": {"note": "null"}, "where": "true"},
    }
    mapping = TableMapping.of(Settings(postgres="host=db", table_options=options))
    again = _today(letter, mapping, ("public", "clients")).content["again"]
    now = again["table"]
    assert (now.qualified, now.where, [column.name for column in now.columns]) == (
        "public.clients", "true", ["k", "note"],
    )  # fmt: skip
    assert pgoutput.row(base64.b64decode(again["message"])).new == [Field("b", b"key"), Field("n")]


def _today(letter: StoredDeadLetter, mapping: TableMapping, named: tuple[str, str] | None = None) -> StoredDeadLetter:
    return letter.as_published(TableToday.of(mapping, letter.table, named))


def _letter(*columns: Column) -> StoredDeadLetter:
    table = w.table(("k", w.plain(w.TEXT)), key=["k"], oid=1)
    table = replace(table, columns=(*table.columns, *columns))
    row = RowMessage("I", 1, "", None, [Field("b", b"key"), *(Field("b", b"\0\0\0\7") for _ in columns)])
    again = {"table": table, "message": base64.b64encode(row.encode()).decode()}
    return StoredDeadLetter(b"", {"again": again})


def test_a_letter_lacks_columns_that_are_published_today() -> None:
    letter = _letter(Column("n", w.plain(23)))
    had = letter.content["again"]["table"]
    more = replace(had, columns=(*had.columns, Column("added", w.plain(w.TEXT))))
    altered = replace(had, columns=(had.columns[0], Column("n", w.plain(20))))
    assert [letter.lacks(today) for today in (had, more, altered)] == ["", "added", "n"]
    # nothing overwrites a row without a key, nor those of a table that is gone
    assert [letter.lacks(today) for today in (replace(more, key=()), None)] == ["", ""]


def _hashing(key: str) -> TableMapping:
    options = {"*.*": {"mask": {"n": "hash"}}}
    return TableMapping.of(Settings(postgres="host=db", table_options=options, hash_key=key))


def test_a_letter_of_before_a_hash_is_hashed() -> None:
    mapping = _hashing("0123456789abcdef")
    found = _today(_letter(Column("n", w.plain(23))), mapping).content["again"]
    new = pgoutput.row(base64.b64decode(found["message"])).new
    digits = hmac.digest(b"0123456789abcdef", b"7", "sha256").hex().encode()
    assert new == [Field("b", b"key"), Field("b", digits)]
    letter = StoredDeadLetter(b"", {"again": found})
    assert _today(letter, mapping) is letter


@pytest.mark.parametrize("mask", ["hash:0123456789abcdef", "first:3"])
def test_a_letter_with_other_hashes_is_not_published(mask: str) -> None:
    with pytest.raises(RecordError, match="another mask, or another key"):
        _today(_letter(Column("n", w.plain(w.TEXT), mask=mask)), _hashing("0123456789abcdef"))


def _masking(mask: str) -> TableMapping:
    options = {"*.*": {"mask": {"n": mask}}} if mask else {}
    return TableMapping.of(Settings(postgres="host=db", table_options=options))


@pytest.mark.parametrize(
    ("was", "now"),
    [
        ("first:3", "first:5"),
        ("first:3", "last:3"),
        ("last:3", "last:5"),
        ("first:3", ""),
        ("null", ""),
        ("null", "constant:x"),
        ("constant:x", "first:1"),
        ("constant:x", ""),
        ("hash:0123456789abcdef", ""),
    ],
)
def test_a_letter_that_was_masked_more_is_not_published(was: str, now: str) -> None:
    with pytest.raises(RecordError, match=r"another mask, .* cannot be made from that.*live snapshot"):
        _today(_letter(Column("n", w.plain(w.TEXT), mask=was)), _masking(now))


def test_a_letter_of_a_deletion_is_published_whatever_was_masked() -> None:
    letter = _letter(Column("n", w.plain(w.TEXT), mask="first:3"))
    again = letter.content["again"]
    old = RowMessage("D", 1, "O", [Field("b", b"key"), Field("b", b"Ann")], None)
    again["message"] = base64.b64encode(old.encode()).decode()
    found = _today(letter, _masking("last:3")).content["again"]
    assert pgoutput.row(base64.b64decode(found["message"])) == replace(
        old, old_tag="K", old=[Field("b", b"key"), Field("n")]
    )


@pytest.mark.parametrize(
    ("was", "now", "value"),
    [
        ("first:4", "first:4", Field("b", b"\0\0\0\7")),
        ("first:4", "first:2", Field("b", b"\0\0")),
        ("last:4", "last:2", Field("b", b"\0\7")),
        ("first:4", "constant:x", Field("b", b"x")),
        ("constant:y", "constant:x", Field("b", b"x")),
        ("constant:y", "null", Field("n")),
        ("hash:0123456789abcdef", "null", Field("n")),
    ],
)
def test_a_letter_that_was_masked_less_is_masked_as_today(was: str, now: str, value: Field) -> None:
    found = _today(_letter(Column("n", w.plain(w.TEXT), mask=was)), _masking(now)).content["again"]
    assert pgoutput.row(base64.b64decode(found["message"])).new == [Field("b", b"key"), value]


def test_the_mask_of_a_column_that_is_left_out_does_not_matter() -> None:
    mapping = TableMapping.of(Settings(postgres="host=db", table_options={"*.*": {"exclude": "n"}}))
    found = _today(_letter(Column("n", w.plain(w.TEXT), mask="first:3")), mapping).content["again"]
    assert pgoutput.row(base64.b64decode(found["message"])).new == [Field("b", b"key")]
