"""The checker of the hand-over and fault suites finds what it must find, and nothing else."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

import pytest

from airflow_bottledwater.model.boundary import Snapshot
from airflow_bottledwater.model.lsn import Position
from tests.support.checker import Checker, Report, recovery_times, uncommitted_rule
from tests.support.history import Before, Change, Record, Truncation

#: ids below 100 have ended, 103 runs, 105 is the next
BOUNDARY = Snapshot(100, 105, (103,))

LOG = [
    # the first rows, and what the snapshot sees of later changes
    Change(1, 50, "a", None, 1, "c", 11),
    Change(2, 50, "a", None, 2, "c", 12),
    Change(3, 50, "b", None, 1, "c", 13),
    Change(4, 50, "a", None, 3, "c", 14),
    Change(5, 101, "a", 1, 1, "u", 15),
    Change(6, 102, "a", 3, None, "d", 0),
    # in progress at the boundary
    Change(7, 103, "a", 2, 2, "u", 16),
    Change(8, 103, "b", 1, 7, "k", 17),
    # after it
    Change(9, 106, "a", 1, 1, "u", 18),
    Change(10, 106, "a", 2, None, "d", 0),
    Change(11, 107, "a", None, 3, "c", 19),
    Change(12, 107, "a", 3, 3, "u", 20),
]


def pos(lsn: int, ordinal: int) -> str:
    return str(Position(lsn, ordinal))


def topics() -> list[Record]:
    """What exactly once looks like: markers at the offsets that are left out."""
    return [
        Record("a", 0, 0, 1, 15, "r"),
        Record("a", 0, 1, 2, 12, "r"),
        Record("b", 0, 0, 1, 13, "r"),
        Record("a", 0, 3, 2, 16, "u", pos(1000, 1), 103),
        Record("b", 0, 2, 1, None, "d", pos(1000, 2), 103),
        Record("b", 0, 3, 7, 17, "u", pos(1000, 2), 103),
        Record("a", 0, 5, 1, 18, "u", pos(2000, 1), 106),
        Record("a", 0, 6, 2, None, "d", pos(2000, 2), 106),
        Record("a", 0, 7, 3, 19, "c", pos(3000, 1), 107),
        Record("a", 0, 8, 3, 20, "u", pos(3000, 2), 107),
    ]


def checked(records: Sequence[Record], **options: object) -> Report:
    checker = Checker(LOG, {"a": BOUNDARY, "b": BOUNDARY}, **{"oldest_xid": 101, **options})  # type: ignore[arg-type]
    return checker.check(records)


def test_what_is_right_is_right_and_counted() -> None:
    report = checked(topics())
    assert report.findings == []
    assert (report.ahead, report.superseded) == ([], [])
    counted = report.statistics
    assert (counted.in_progress, counted.skipped, counted.after) == (1, 2, 2)
    assert (counted.snapshot_rows, counted.stream_records) == (3, 7)
    report.check()


@pytest.mark.parametrize("number", range(10))
def test_any_record_that_is_dropped_is_lost(number: int) -> None:
    records = topics()
    dropped = records.pop(number)
    report = checked(records)
    assert "lost" in report.kinds
    (lost,) = [f for f in report.findings if f.kind == "lost"]
    assert lost.table == dropped.table
    with pytest.raises(AssertionError, match="lost"):
        report.check()


@pytest.mark.parametrize("number", range(10))
def test_any_record_that_comes_twice_is_duplicated(number: int) -> None:
    records = topics()
    records.append(replace(records[number], offset=99))
    report = checked(records)
    assert "duplicated" in report.kinds
    assert "lost" not in report.kinds
    (found,) = [f for f in report.findings if f.kind == "duplicated"]
    assert (found.table, found.key, found.version) == (
        records[number].table,
        records[number].key,
        records[number].version,
    )


def _swap(records: list[Record], a: int, b: int) -> None:
    records[a], records[b] = (
        replace(records[a], offset=records[b].offset),
        replace(records[b], offset=records[a].offset),
    )


def _change(records: list[Record], number: int, **values: object) -> None:
    records[number] = replace(records[number], **values)  # type: ignore[arg-type]


BROKEN: dict[str, tuple[str, Callable[[list[Record]], None]]] = {
    "two versions of a key are swapped": ("order", lambda r: _swap(r, 8, 9)),
    "two transactions' changes of a key are swapped": ("order", lambda r: _swap(r, 3, 7)),
    "a snapshot row behind a change": ("order", lambda r: _swap(r, 0, 6)),
    "a key moves to another partition": ("order", lambda r: _change(r, 6, partition=1)),
    "the snapshot has a version from before the boundary": ("stale", lambda r: _change(r, 0, version=11)),
    "the snapshot has a row that was deleted": ("stale", lambda r: r.append(Record("a", 0, 2, 3, 14, "r"))),
    "a snapshot row that never was": ("invented", lambda r: r.append(Record("a", 0, 2, 9, 999, "r"))),
    "a snapshot row under another key": ("invented", lambda r: _change(r, 1, key=8)),
    "a transaction that was rolled back": (
        "invented",
        lambda r: r.append(Record("a", 0, 10, 3, 21, "u", pos(3500, 1), 108)),
    ),
    "a change that was rolled back to a savepoint": (
        "invented",
        lambda r: r.append(Record("a", 0, 9, 3, 21, "u", pos(3000, 3), 107)),
    ),
    "another version than the one that was written": ("invented", lambda r: _change(r, 9, version=18)),
    "a transaction at two positions": ("invented", lambda r: _change(r, 9, pos=pos(4000, 2))),
    "the stream repeats what the snapshot has": (
        "duplicated",
        lambda r: r.append(Record("a", 0, 2, 1, 15, "u", pos(500, 1), 101)),
    ),
    "half of a transaction": ("torn", lambda r: [r.remove(x) for x in [r[4], r[5]]] and None),
    "a marker inside a transaction": ("torn", lambda r: _change(r, 9, offset=10)),
}  # fmt: skip


@pytest.mark.parametrize("case", BROKEN)
def test_what_is_broken_is_found(case: str) -> None:
    kind, breaks = BROKEN[case]
    records = topics()
    breaks(records)
    report = checked(records)
    assert kind in report.kinds, str(report)


def test_a_position_inside_a_transaction_is_a_torn_one() -> None:
    assert checked(topics(), positions=[Position(1000, 2), Position(3000, 2), Position(3100, 0)]).findings == []
    report = checked(topics(), positions=[Position(3000, 1)])
    assert report.kinds == {"torn"}
    assert report.findings[0].xid == 107


def test_a_transaction_that_may_be_cut_is_not_torn() -> None:
    records = topics()
    _change(records, 9, offset=10)
    assert checked(records, positions=[Position(3000, 1)], cut_from=2).findings == []
    assert checked(records, cut_from=3).kinds == {"torn"}
    assert checked(records, cut_from_large=1).kinds == {"torn"}


def test_a_row_that_is_ahead_is_no_error_and_may_be_followed_by_older_versions() -> None:
    records = topics()
    _change(records, 1, version=16)
    report = checked(records, resumed=True)
    assert report.findings == []
    assert [(f.key, f.version) for f in report.ahead] == [(2, 16)]
    # without a resumption the version at the boundary is missing
    assert checked(records).kinds == {"lost"}


def test_a_resumed_snapshot_may_leave_a_row_to_the_stream_only_if_it_is_there() -> None:
    records = topics()
    del records[2]  # it was moved after the boundary
    assert checked(records, resumed=True).findings == []
    untouched = [*LOG, Change(13, 50, "b", None, 5, "c", 30)]
    report = Checker(untouched, {"a": BOUNDARY, "b": BOUNDARY}, resumed=True).check(topics())
    assert {(f.kind, f.table, f.key) for f in report.findings} == {("lost", "b", 5)}


def test_superseded_versions_are_excused_up_to_what_the_stream_counted() -> None:
    log = [*LOG[:8], Change(9, 106, "a", 1, 1, "u", 18), Change(10, 108, "a", 1, None, "d", 0)]
    records = [*topics()[:6], Record("a", 0, 5, 1, None, "d", pos(4000, 1), 108)]
    boundaries = {"a": BOUNDARY, "b": BOUNDARY}
    report = Checker(log, boundaries, superseded=1).check(records)
    assert report.findings == []
    assert [f.version for f in report.superseded] == [18]
    assert "lost" in Checker(log, boundaries).check(records).kinds
    # nothing came after it: that is not superseded
    assert "lost" in Checker(log[:9], boundaries, superseded=1).check(records[:6]).kinds


def test_a_run_that_is_not_over_may_miss_transactions_but_not_parts_of_one() -> None:
    assert checked(topics()[:6], complete=False).findings == []
    report = checked(topics()[:7], complete=False)
    assert report.kinds == {"lost", "torn"}


def test_without_a_snapshot_what_came_before_is_not_expected() -> None:
    assert checked(topics()[3:], snapshot=False).findings == []
    assert checked(topics(), snapshot=False).kinds >= {"invented"}


def test_transaction_ids_of_records_have_32_bits() -> None:
    epoch = 3 << 32
    log = [replace(c, xid=c.xid + epoch) for c in LOG]
    wide = Snapshot(BOUNDARY.xmin + epoch, BOUNDARY.xmax + epoch, (103 + epoch,))
    assert Checker(log, {"a": wide, "b": wide}).check(topics()).findings == []


def test_an_uncommitted_reader_drops_what_is_not_higher() -> None:
    records = topics()
    aborted = [*records[:6], replace(records[6]), replace(records[7]), *records[6:]]
    assert uncommitted_rule(aborted) == records


def test_the_report_names_what_is_wrong() -> None:
    records = topics()
    del records[9]
    text = str(checked(records))
    assert "1 lost" in text
    assert "table a, key 3, version 20, transaction 107" in text


def test_recovery_is_measured_from_each_kill_to_the_next_record() -> None:
    assert recovery_times([10.0, 20.0, 40.0], [9.0, 12.5, 13.0, 21.0]) == [2.5, 1.0, None]


# ---------------------------------------------------------------------- large values
#: row 1 has the value 51 and keeps it, also under its new key 9, while another row with the value 52 gets the key 1
LARGE_LOG = [
    Change(1, 50, "a", None, 1, "c", 11, 51),
    Change(2, 106, "a", 1, 1, "u", 12, 51),
    Change(3, 107, "a", 1, 9, "k", 13, 51),
    Change(4, 108, "a", None, 1, "c", 14, 52),
]


def large_topics(**changed: Record) -> list[Record]:
    records = {
        "row": Record("a", 0, 0, 1, 11, "r", large=51),
        "update": Record("a", 0, 1, 1, 12, "u", pos(1000, 1), 106, 52, reread=True),
        "old": Record("a", 0, 2, 1, None, "d", pos(2000, 1), 107),
        "moved": Record("a", 0, 3, 9, 13, "u", pos(2000, 1), 107, 51, reread=True),
        "new": Record("a", 0, 4, 1, 14, "c", pos(3000, 1), 108, 52),
        **changed,
    }
    return list(records.values())


def large_checked(records: Sequence[Record], **options: int) -> Report:
    return Checker(LARGE_LOG, {"a": BOUNDARY}, **options).check(records)  # type: ignore[arg-type]


def test_a_value_that_was_read_afterwards_may_be_any_that_its_key_ever_had() -> None:
    large_checked(large_topics()).check()


@pytest.mark.parametrize(
    ("changed", "kind"),
    [
        ({"row": Record("a", 0, 0, 1, 11, "r", large=52)}, "invented"),
        ({"update": Record("a", 0, 1, 1, 12, "u", pos(1000, 1), 106, 52)}, "invented"),
        ({"moved": Record("a", 0, 3, 9, 13, "u", pos(2000, 1), 107, 52, reread=True)}, "invented"),
        ({"moved": Record("a", 0, 3, 9, 13, "u", pos(2000, 1), 107, 0, reread=True)}, "invented"),
        ({"new": Record("a", 0, 4, 1, 14, "c", pos(3000, 1), 108, 51, reread=True)}, "stale"),
    ],
)
def test_a_value_of_another_row_is_found(changed: dict[str, Record], kind: str) -> None:
    assert kind in large_checked(large_topics(**changed)).kinds


def test_a_key_change_that_was_superseded_leaves_its_tombstone() -> None:
    log = [*LARGE_LOG, Change(5, 109, "a", 9, None, "d", 0)]
    records = [r for r in large_topics() if r.key != 9] + [Record("a", 0, 5, 9, None, "d", pos(4000, 1), 109)]
    checked = Checker(log, {"a": BOUNDARY}, superseded=1).check(records)
    assert (checked.findings, len(checked.superseded)) == ([], 1)
    bare = [r for r in records if not (r.xid == 107 and r.op == "d")]
    assert "lost" in Checker(log, {"a": BOUNDARY}, superseded=1).check(bare).kinds


# ---------------------------------------------------------------------- TRUNCATE, and rows that are read again
#: row 1 is deleted with its table, row 2 is put into it afterwards
TRUNCATED_LOG = [
    Change(1, 50, "a", None, 1, "c", 11),
    Change(2, 106, "a", 1, 1, "u", 12),
    Change(3, 107, "a", None, None, "t", 0),
    Change(4, 107, "a", None, 2, "c", 13),
]
TOLD = Truncation("a", pos(2000, 1), 107)
NONE = Record("a", 0, 0, 0, None, "")


def truncated_topic(**changed: Record) -> list[Record]:
    records = {
        "row": Record("a", 0, 0, 1, 11, "r"),
        "update": Record("a", 0, 1, 1, 12, "u", pos(1000, 1), 106),
        "again": Record("a", 0, 2, 1, 12, "r", live=True, shown=1500),
        "new": Record("a", 0, 3, 2, 13, "c", pos(2000, 2), 107),
        "swept": Record("a", 0, 4, 1, None, "d", live=True, shown=2500),
        **changed,
    }
    return [each for each in records.values() if each is not NONE]


def truncated_checked(records: Sequence[Record], *told: Truncation) -> Report:
    return Checker(TRUNCATED_LOG, {"a": BOUNDARY}, truncations=told).check(records)


@pytest.mark.parametrize("swept", [True, False])
def test_what_a_truncate_deleted_may_be_swept_or_not(swept: bool) -> None:
    records = truncated_topic() if swept else truncated_topic()[:-1]
    report = truncated_checked(records, TOLD)
    assert report.findings == []
    assert report.statistics.truncated == 1


@pytest.mark.parametrize(
    ("changed", "told", "kind"),
    [
        ({}, (), "lost"),
        ({}, (TOLD, TOLD), "duplicated"),
        ({}, (TOLD, Truncation("a", pos(3000, 1), 109)), "invented"),
        # by its header, the TRUNCATE has not deleted it
        ({"again": Record("a", 0, 2, 1, 12, "r", live=True, shown=2500)}, (TOLD,), "stale"),
        # it is the row that the topic had before
        ({"again": Record("a", 0, 2, 1, 11, "r", live=True, shown=1500)}, (TOLD,), "order"),
        # it is deleted by a sweep that did not know of the TRUNCATE, or a row is that is there
        ({"swept": Record("a", 0, 4, 1, None, "d", live=True, shown=1500)}, (TOLD,), "invented"),
        ({"swept": Record("a", 0, 4, 2, None, "d", live=True, shown=2500)}, (TOLD,), "lost"),
        # a consumer would still have it, or not have it any more
        ({"update": Record("a", 0, 1, 1, 12, "u", pos(2500, 1), 106), "again": NONE, "swept": NONE}, (TOLD,), "stale"),
        ({"new": Record("a", 0, 3, 2, 13, "c", pos(1500, 2), 107)}, (TOLD,), "lost"),
    ],
)  # fmt: skip
def test_what_is_wrong_about_a_truncate_is_found(
    changed: dict[str, Record], told: tuple[Truncation, ...], kind: str
) -> None:
    assert kind in truncated_checked(truncated_topic(**changed), *told).kinds


def test_a_value_that_was_read_for_a_row_that_was_truncated_is_superseded() -> None:
    records = [r for r in truncated_topic() if r.version != 12 and not r.live]
    checked = Checker(TRUNCATED_LOG, {"a": BOUNDARY}, truncations=[TOLD], superseded=1).check(records)
    assert (checked.findings, len(checked.superseded)) == ([], 1)


#: with the old rows that an envelope has under a replica identity FULL
def told() -> list[Record]:
    old = {3: Before(2, 12), 4: Before(1, 13), 6: Before(1, 15), 7: Before(2, 16), 9: Before(3, 19)}
    return [replace(record, before=old.get(number)) for number, record in enumerate(topics())]


_TOLD = {"a": "envelope, whole", "b": "envelope, whole"}


def test_old_rows_are_those_of_the_log() -> None:
    assert not checked(told(), told=_TOLD).findings
    header = [replace(each, before=None if each.key == 7 else each.before) for each in told()]
    assert not checked(header, told=dict.fromkeys("ab", "header, whole")).findings
    # of keys only, a header tells nothing, and an envelope the key of what is deleted
    assert not checked(topics(), told=dict.fromkeys("ab", "header, key")).findings
    keys = [replace(each, before=Before(each.key, None) if each.op == "d" else None) for each in topics()]
    assert not checked(keys, told=dict.fromkeys("ab", "envelope, key")).findings


@pytest.mark.parametrize("number", range(3, 10))
@pytest.mark.parametrize("wrong", [None, Before(1, 11), Before(9, None), Before(2, 12, 5)])
def test_any_old_row_that_is_wrong_is_found(number: int, wrong: Before | None) -> None:
    records = told()
    if records[number].before == wrong:
        wrong = Before(77, 77)
    records[number] = replace(records[number], before=wrong)
    assert "invented" in checked(records, told=_TOLD).kinds
