"""What decides whether a dead letter may still be published."""

from __future__ import annotations

import pytest

from airflow_bottledwater.model.lsn import Position
from airflow_bottledwater.postgres.pgoutput import Field, RowMessage
from airflow_bottledwater.provision.source_rows import StoredDeadLetter, compare
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
    assert not compare(table, message, found, ()).same
    assert compare(table, message, found, {"bits"}).same
