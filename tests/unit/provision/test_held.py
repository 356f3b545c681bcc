"""What decides whether a dead letter may still be published."""

from __future__ import annotations

from typing import Any

import pytest

from airflow_bottledwater.model.lsn import Position
from airflow_bottledwater.postgres.pgoutput import Field, RowMessage
from airflow_bottledwater.provision.held import DeadLetter, compare
from airflow_bottledwater.publish.current import Found
from tests.support import wire as w

OLDER, AT, NEWER = str(Position(100, 1)), str(Position(200, 1)), str(Position(300, 1))


@pytest.mark.parametrize(
    ("again", "newest", "compared", "overtaken"),
    [
        ({"lsn": 200}, "", True, False),
        ({"lsn": 200}, OLDER, True, False),
        ({"lsn": 200}, NEWER, True, True),
        # of an earlier version, which did not write what the row shows: the source's row decides, if all of it can be compared
        ({}, OLDER, True, False),
        ({}, NEWER, True, False),
        ({}, NEWER, False, True),
        ({}, "", False, False),
    ],
)
def test_what_overtakes_a_letter_of_a_snapshot(
    again: dict[str, Any], newest: str, compared: bool, overtaken: bool
) -> None:
    letter = DeadLetter(b"", {"op": "r", "pos": "", "again": again})
    assert letter.overtaken(newest, compared=compared) is overtaken


@pytest.mark.parametrize(("newest", "overtaken"), [(OLDER, False), (AT, False), (NEWER, True)])
def test_what_overtakes_a_letter_of_a_change(newest: str, overtaken: bool) -> None:
    letter = DeadLetter(b"", {"op": "u", "pos": AT, "again": {}})
    assert letter.overtaken(newest, compared=False) is overtaken


def test_a_row_of_which_a_column_cannot_be_compared_says_so() -> None:
    table = w.table(("k", w.plain(w.TEXT)), ("bits", w.plain(w.TEXT)), key=["k"], oid=1)
    message = RowMessage("I", 1, "", None, [Field("b", b"1"), Field("b", b"0")])
    found = Found({(b"1",): [b"1", b"1"]})
    assert (compare(table, message, found, ()).same, compare(table, message, found, ()).compared) == (False, True)
    held = compare(table, message, found, {"bits"})
    assert (held.same, held.compared) == (True, False)
