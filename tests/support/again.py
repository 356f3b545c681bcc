"""Live snapshots under writers: what the log says that they must have read."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from airflow_bottledwater.model.boundary import Snapshot
from airflow_bottledwater.model.lsn import parse_lsn
from tests.support.history import TRUNCATE, Change
from tests.support.options import filters
from tests.support.topics import Flow
from tests.support.upheaval import Upset
from tests.support.waiting import until
from tests.support.writers import read_log, read_rows, readable, sent

#: conditions, and a condition on key and version of rows that fulfil them
SLICES: dict[str, Callable[[int, int], bool]] = {
    "": lambda key, version: True,
    "id % 3 = 0": lambda key, version: key % 3 == 0,
    "n > 0 OR version % 2 = 0": lambda key, version: version % 2 == 0,
    "id < 250": lambda key, version: key < 250,
}


@dataclass(slots=True)
class Asked:
    """A live snapshot, and what the log must say about rows that it cannot have left out.

    :param begun: shows what was committed before it was asked for.
    :param last: the log's last line when it had ended.
    """

    id: str
    tables: tuple[str, ...]
    where: str
    begun: Snapshot
    last: int = 0


def ask(flow: Flow, tables: Sequence[str], where: str = "", *, named: Sequence[str] = (), **options: Any) -> Asked:
    """Ask for a live snapshot.

    :param tables: which those are that are meant by ``named``; by their own names, if this is empty.
    """
    ((shown,),) = flow.execute("SELECT pg_current_snapshot()::text")
    return Asked(flow.ask(*(named or tables), where=where, **options), tuple(tables), where, Snapshot.parse(shown))


def ended(flow: Flow, asked: Sequence[Asked], errors: Sequence[object]) -> None:
    """Wait until they have ended."""
    until(
        lambda: all(flow.reported(each.id).ended for each in asked),
        "the live snapshots end",
        400,
        pause=0.5,
        failed=errors,
    )
    for each in asked:
        each.last = each.last or flow.execute("SELECT last_value FROM checker_n")[0][0]


def left_alone(log: Sequence[Change], asked: Asked) -> set[tuple[str, int]]:
    """The rows of a slice that nobody has changed from before it was asked for until it had ended."""
    rows: dict[tuple[str, int], int] = {}
    touched: set[tuple[str, int | None]] = set()
    for change in log:
        if not asked.begun.sees(change.xid):
            if change.n <= asked.last:
                touched |= {(change.table, change.old), (change.table, change.new)}
                touched |= {key for key in rows if change.op == TRUNCATE and key[0] == change.table}
            continue
        if change.op == TRUNCATE:
            rows = {key: version for key, version in rows.items() if key[0] != change.table}
        if change.old is not None:
            rows.pop((change.table, change.old), None)
        if change.new is not None:
            rows[change.table, change.new] = change.version
    meant = SLICES[asked.where]
    return {
        key for key, version in rows.items()
        if key[0] in asked.tables and key not in touched and meant(key[1], version)
    }  # fmt: skip


def check_rows(flow: Flow, tables: Sequence[str], asked: Sequence[Asked], done: Sequence[Upset]) -> tuple[int, int]:
    """Rows that were left alone are there, and each has the columns that its table had when it was read. Returns how
    many were left alone, and how many things were done to whole tables while they were read."""
    log = sent(read_log(flow), filters(flow, tables))
    adds = {table: one.publishes("extra") for table, one in readable(flow, tables).items()}
    rows = [(table, m) for table, found in read_rows(flow, tables).items() for m in found if m.snapshot]
    alone = 0
    spans: dict[tuple[str, str], list[int]] = {}
    for table, m in rows:
        reading, _, shown = m.snapshot.partition("/")
        lsn = parse_lsn(shown)
        spans.setdefault((reading, table), []).append(lsn)
        if m.value is not None:
            altered = [each.extra for each in done if each.table == table and each.lsn < lsn]
            expected = {"extra": 7} if adds[table] and altered and altered[-1] else {}
            # a Protobuf schema keeps the fields of columns that were dropped
            assert {name: v for name, v in m.value.items() if name == "extra" and v is not None} == expected, (
                f"{table}: {m}"
            )
    for each in asked:
        there = {(table, m.key["id"]) for table, m in rows if m.snapshot.startswith(f"{each.id}/") and m.value}
        expected_rows = left_alone(log, each)
        alone += len(expected_rows)
        assert expected_rows <= there, f"{each} has left out {sorted(expected_rows - there)[:5]}"
        if each.where.startswith("id"):
            assert all(SLICES[each.where](key, 0) for _, key in there), f"{each} has rows of others"
    within = sum(
        min(lsns) <= each.lsn < max(lsns) for each in done for (_, table), lsns in spans.items() if table == each.table
    )
    return alone, within
