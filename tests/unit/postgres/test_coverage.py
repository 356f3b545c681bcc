"""What is known of a publication, and in which ways changes can have been left out since."""

from __future__ import annotations

from dataclasses import replace

import pytest

from airflow_bottledwater.postgres.coverage import Coverage, Publication

OURS = Publication(oid=500, xmin="70", owner=10, all_tables=False, sends="insert, update, delete, truncate")
RECORDED = Coverage({"p": OURS}, {1: frozenset({901}), 2: frozenset({902, 903})})


def changed(**fields: object) -> Coverage:
    """The same tables, published by a publication that is another now."""
    return replace(RECORDED, publications={"p": replace(OURS, **fields)})  # type: ignore[arg-type]


def test_what_is_as_it_was_is_no_gap() -> None:
    assert (RECORDED.altered(RECORDED, "p", keyed=True), RECORDED.lacking(RECORDED, "p")) == ("", [])


@pytest.mark.parametrize(
    ("today", "gap", "lacking"),
    [
        pytest.param(replace(RECORDED, publications={}), False, [], id="dropped: its tables are in none"),
        pytest.param(changed(oid=501, xmin="71"), False, [], id="made again: its tables have other rows"),
        pytest.param(changed(sends="insert", xmin="71"), True, ["update", "delete", "truncate"], id="less"),
        pytest.param(changed(xmin="71"), True, [], id="altered back"),
        # it may have been altered there and back before or after
        pytest.param(changed(xmin="71", owner=11), True, [], id="a new owner"),
    ],
)
def test_what_hides_changes_of_all_tables_is_a_gap_of_each(today: Coverage, gap: bool, lacking: list[str]) -> None:
    assert bool(RECORDED.altered(today, "p", keyed=True)) is gap
    assert RECORDED.lacking(today, "p") == lacking


@pytest.mark.parametrize(("sends", "gap"), [(OURS.sends, False), ("insert", True)])
def test_a_new_owner_alone_is_no_gap_that_could_not_be_closed(sends: str, gap: bool) -> None:
    today = changed(xmin="71", owner=11, sends=sends)
    assert bool(RECORDED.altered(today, "p", keyed=False)) is gap


@pytest.mark.parametrize(
    ("rows", "said"),
    [
        ({901}, ""),
        ({901, 999}, ""),
        (set(), "is no longer published"),
        ({950}, "was removed from its publication and added again"),
    ],
)
def test_what_hides_changes_of_one_table_is_a_gap_of_that_table(rows: set[int], said: str) -> None:
    today = replace(RECORDED, tables={1: frozenset(rows), 2: frozenset({903, 999})})
    assert RECORDED.lost(today, 1) == said
    assert RECORDED.lost(today, 2) == ""


def test_a_table_that_nothing_published_when_it_was_recorded_is_no_gap() -> None:
    recorded = replace(RECORDED, tables={1: frozenset({901})})
    assert recorded.lost(recorded, 2) == ""


def test_what_is_new_is_added_and_what_was_known_stays_as_it_was() -> None:
    other = replace(OURS, oid=600)
    today = Coverage({"p": replace(OURS, oid=501), "q": other}, {1: frozenset({950}), 3: frozenset({903})})
    assert RECORDED.with_new(today) == Coverage({"p": OURS, "q": other}, {**RECORDED.tables, 3: frozenset({903})})
    before, now = replace(RECORDED, files={1: (10, 11)}), replace(today, files={1: (12, 13), 3: (30, 31)})
    assert before.with_new(now).files == {1: (10, 11), 3: (30, 31)}
    assert before.renewed(now).files == {1: (12, 13), 3: (30, 31)}
    assert before.renewed(replace(now, files={})).files == {}


@pytest.mark.parametrize(
    ("before", "now", "told"),
    [
        pytest.param((10, 11), (10, 11), False, id="as it was"),
        pytest.param((10, 11), (12, 11), False, id="truncated"),
        pytest.param((10, 11), (12, 13), True, id="rewritten"),
        pytest.param((10, 0), (10, 13), False, id="a first large column"),
        pytest.param((10, 0), (12, 0), True, id="rewritten, or truncated, without large columns"),
    ],
)
def test_a_table_that_may_have_been_unlogged_is_told(before: tuple[int, int], now: tuple[int, int], told: bool) -> None:
    recorded, today = replace(RECORDED, files={1: before}), replace(RECORDED, files={1: now})
    assert bool(recorded.rewritten(today, 1)) is told
    # one that a publication names, today or then, is always logged
    assert not RECORDED.rewritten(today, 1) and not recorded.rewritten(RECORDED, 1)
