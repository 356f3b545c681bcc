"""Which changes of types are noticed, and are a reason to publish a table's records again."""

from __future__ import annotations

from dataclasses import replace

import pytest

from airflow_bottledwater.model.relation import Column, ColumnType, Member, SourceTable
from airflow_bottledwater.state import records
from airflow_bottledwater.state.pinned import PinnedTable
from airflow_bottledwater.state.pipeline_state import PipelineState
from airflow_bottledwater.tables.types import _names, _renamed, altered
from tests.support import wire as w


def price(*attributes: tuple[str, ColumnType, int]) -> ColumnType:
    """A composite of attributes with names, types and numbers."""
    kind = w.composite(*(of for _, of, _ in attributes))
    each = zip(kind.attributes, attributes, strict=True)
    return replace(kind, attributes=tuple(replace(a, name=name, number=number) for a, (name, _, number) in each))


TEXT, INT8, FLOAT8 = w.plain(25), w.plain(20), w.plain(701)
KNOWN = price(("currency", TEXT, 1), ("amount", INT8, 2))
NUMERIC = price(("currency", TEXT, 1), ("amount", w.plain(1700, 100), 2))
OTHERS = {
    "of another type": (KNOWN, price(("currency", TEXT, 1), ("amount", FLOAT8, 3))),
    "with another modifier": (NUMERIC, price(("currency", TEXT, 1), ("amount", w.plain(1700, 200), 3))),
    "made again": (KNOWN, price(("currency", TEXT, 1), ("amount", INT8, 3))),
    "renamed": (KNOWN, price(("currency", TEXT, 1), ("sum", INT8, 2))),
    "dropped": (KNOWN, price(("amount", INT8, 2))),
    "dropped at the end": (KNOWN, price(("currency", TEXT, 1))),
}


@pytest.mark.parametrize("other", OTHERS)
@pytest.mark.parametrize("within", ["itself", "an array", "a composite"])
def test_an_attribute_that_is_another_one_now_is_noticed(other: str, within: str) -> None:
    before, now = OTHERS[other]
    if within == "an array":
        before, now = w.array(before), w.array(now)
    elif within == "a composite":
        before, now = price(("p", before, 1)), price(("p", now, 1))
    assert "has other attributes now" in _renamed(before, now)
    assert _names(before) != _names(now)


def test_what_is_only_added_or_was_recorded_without_numbers_is_no_reason() -> None:
    added = price(("currency", TEXT, 1), ("amount", INT8, 2), ("note", TEXT, 3))
    unnumbered = price(("currency", TEXT, 0), ("amount", INT8, 0))
    assert not _renamed(KNOWN, KNOWN) and not _renamed(KNOWN, added) and not _renamed(unnumbered, KNOWN)
    # but it is recorded
    assert _names(KNOWN) != _names(added) and _names(unnumbered) != _names(KNOWN)


def mood(*members: Member) -> ColumnType:
    """An enum with these labels."""
    return ColumnType(7, -1, 7, -1, "e", "mood", members=members)


def noticed(before: Column, now: Column, recorded: Column | None = None) -> tuple[str, bool]:
    """Why a table with a column is to be published again, and whether its types are recorded.

    :param recorded: the column as it was recorded since the table was.
    """
    then, today = (SourceTable(1, "s", "t", "d", ("m",), (column,)) for column in (before, now))
    known = PipelineState()
    known.apply({records.table_key(1): PinnedTable(then, "s.t", "", 1, 0, 0, 3)})
    if recorded is not None:
        known.apply({records.types_key(1): records.ChangedTypes((recorded,))})
    reasons, changed = altered(known, {1: today})
    return reasons.get(1, ""), 1 in changed


SAD, BLUE, AGAIN = Member(9, "sad", 700), Member(9, "blue", 800), Member(9, "sad", 900)


def test_a_label_that_is_renamed_is_noticed_also_if_it_is_renamed_back_or_its_column_is_renamed() -> None:
    known = Column("m", mood(SAD), number=2)
    assert noticed(known, known) == ("", False)
    renamed = "has a column {!r} with a label of mood that was renamed".format
    assert noticed(known, Column("m", mood(BLUE), number=2)) == (renamed("m"), False)
    assert noticed(known, Column("m", mood(AGAIN), number=2)) == (renamed("m"), False)
    assert noticed(known, Column("mm", mood(BLUE), number=2)) == (renamed("mm"), False)
    # another column that has its name, and one with the labels of when it was recorded
    assert noticed(known, Column("m", mood(BLUE), number=3)) == ("", True)
    assert noticed(known, Column("mm", mood(BLUE), number=2), Column("mm", mood(BLUE), number=2)) == ("", False)


def test_a_column_that_was_recorded_without_its_number_is_known_by_its_name() -> None:
    known = Column("m", mood(Member(9, "sad")))
    assert noticed(known, Column("m", mood(SAD), number=2)) == ("", True)
    assert noticed(known, Column("m", mood(BLUE), number=2)) == (
        "has a column 'm' with a label of mood that was renamed",
        False,
    )
