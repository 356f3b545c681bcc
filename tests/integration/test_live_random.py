"""Live snapshots under concurrent writers on the very rows that are read, with random seeds, while tables are truncated, altered and
rewritten: each proves something or fails.

``BOTTLEDWATER_SEEDS`` says how many, ``BOTTLEDWATER_SEED`` which is the first.
"""

from __future__ import annotations

import os
import random
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import pytest

from airflow_bottledwater.live import reading
from airflow_bottledwater.live.reading import Reading
from airflow_bottledwater.local.kafka import KafkaBroker
from airflow_bottledwater.model.boundary import Snapshot
from airflow_bottledwater.model.lsn import parse_lsn
from tests.support.checker import TRUNCATE, Change
from tests.support.topics import Flow, read_all
from tests.support.upheaval import Upheaval, Upset
from tests.support.waiting import until
from tests.support.writers import ASYNCHRONOUS, LONG, PREPARING, SHORT, Writers, audit, make_tables, read_log

pytestmark = pytest.mark.long

FIRST = int(os.environ.get("BOTTLEDWATER_SEED", "1"))
SEEDS = range(FIRST, FIRST + int(os.environ.get("BOTTLEDWATER_SEEDS", "4")))
TABLES = ("a", "b")
ROWS = 1500
#: enough for some to be in progress at every boundary; more would only take the processor from the rest
WRITERS = (*[LONG] * 8, SHORT, ASYNCHRONOUS, PREPARING)
#: what is done to whole tables meanwhile, by the seed
UPSETS = ((), ("truncate",), ("alter",), ("truncate", "alter", "rewrite"))


class _Slow:
    """The session that reads, with time between its steps, in which others commit: between lock, snapshot and L above all."""

    def __init__(self, connection: Any, dice: random.Random) -> None:
        self._connection, self._dice = connection, dice

    def execute(self, query: Any, *arguments: Any) -> Any:
        time.sleep(self._dice.uniform(0.0, 0.02))
        if "flush_lsn" in str(query) and self._dice.random() < 0.4:
            time.sleep(0.3)  # the stream passes L, and goes on
        return self._connection.execute(query, *arguments)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._connection, name)


def _slow_down(patch: pytest.MonkeyPatch, dice: random.Random) -> None:
    original = Reading._connect

    def connect(self: Reading) -> Any:
        found = original(self)
        return found if isinstance(found, _Slow) else _Slow(found, dice)

    patch.setattr(Reading, "_connect", connect)
    # a chunk is a few blocks, so that there are many
    patch.setattr(reading, "_FIRST_BLOCKS", dice.choice((1, 3)))
    patch.setattr(reading, "_MOST_BLOCKS_BY_KEY", dice.choice((1, 3)))
    patch.setattr(reading, "_MOST_BLOCKS", dice.choice((3, 8, 20)))


#: conditions, and a condition on key and version of rows that fulfil them
SLICES: dict[str, Callable[[int, int], bool]] = {
    "": lambda key, version: True,
    "id % 3 = 0": lambda key, version: key % 3 == 0,
    "n > 0 OR version % 2 = 0": lambda key, version: version % 2 == 0,
    "id < 250": lambda key, version: key < 250,
}


@dataclass(slots=True)
class _Asked:
    """A live snapshot, and what the log must say about rows that it cannot have left out.

    :param begun: shows what was committed before it was asked for.
    :param last: the log's last line when it had ended.
    """

    id: str
    tables: tuple[str, ...]
    where: str
    begun: Snapshot
    last: int = 0


def _ask(flow: Flow, dice: random.Random, tables: Sequence[str], where: str, **options: bool) -> _Asked:
    ((shown,),) = flow.execute("SELECT pg_current_snapshot()::text")
    named = dice.choice((tuple(tables), ("?",))) if set(tables) == set(TABLES) else tuple(tables)
    return _Asked(flow.ask(*named, where=where, **options), tuple(tables), where, Snapshot.parse(shown))


def _await(flow: Flow, asked: Sequence[_Asked], errors: Sequence[object]) -> None:
    until(
        lambda: all(flow.reported(each.id).ended for each in asked),
        "the live snapshots end",
        120,
        pause=0.5,
        failed=errors,
    )
    for each in asked:
        each.last = each.last or flow.execute("SELECT last_value FROM checker_n")[0][0]


def _left_alone(log: Sequence[Change], asked: _Asked) -> set[tuple[str, int]]:
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


def _check_rows(flow: Flow, asked: Sequence[_Asked], done: Sequence[Upset]) -> tuple[int, int]:
    """Rows that were left alone are there, and each has the columns that its table had when it was read. Returns how many were left
    alone, and how many things were done to whole tables while they were read."""
    log = read_log(flow)
    found = read_all(flow.kafka, [flow.topic(table) for table in TABLES])
    rows = [(table, m) for table in TABLES for m in found[flow.topic(table)] if m.snapshot]
    alone = 0
    spans: dict[tuple[str, str], list[int]] = {}
    for table, m in rows:
        reading, _, shown = m.snapshot.partition("/")
        lsn = parse_lsn(shown)
        spans.setdefault((reading, table), []).append(lsn)
        if m.value is not None:
            altered = [each.extra for each in done if each.table == table and each.lsn < lsn]
            expected = {"extra": 7} if altered and altered[-1] else {}
            assert {name: v for name, v in m.value.items() if name == "extra"} == expected, f"{table}: {m}"
    for each in asked:
        there = {(table, m.key["id"]) for table, m in rows if m.snapshot.startswith(f"{each.id}/") and m.value}
        expected_rows = _left_alone(log, each)
        alone += len(expected_rows)
        assert expected_rows <= there, f"{each} has left out {sorted(expected_rows - there)[:5]}"
        if each.where.startswith("id"):
            assert all(SLICES[each.where](key, 0) for _, key in there), f"{each} has rows of others"
    within = sum(
        min(lsns) <= each.lsn < max(lsns) for each in done for (_, table), lsns in spans.items() if table == each.table
    )
    return alone, within


@pytest.mark.parametrize("seed", SEEDS)
def test_rows_that_are_read_again_never_take_a_key_back_in_time(
    database: str, kafka: KafkaBroker, monkeypatch: pytest.MonkeyPatch, seed: int
) -> None:
    dice = random.Random(seed)
    _slow_down(monkeypatch, dice)
    flow = Flow(
        database, kafka, None, tables=TABLES, xid_header=True, partitions=dice.choice((1, 1, 3)),
        batch_bytes=dice.choice((1 << 16, 8 << 20)),
    )  # fmt: skip
    make_tables(flow, TABLES, ROWS)
    kinds = UPSETS[seed % len(UPSETS)]
    asked: list[_Asked] = []
    with Writers(flow.dsn, TABLES, seed, ROWS, habits=WRITERS, pause=(0.0, 0.02)):
        flow.create()
        flow.snapshot()
        with flow.streaming() as errors, Upheaval(flow.dsn, TABLES, seed, ROWS, kinds) as upheaval:
            for _ in range(2):
                where, sweep, by_key = dice.choice(list(SLICES)), dice.random() < 0.4, dice.random() < 0.3
                tables = dice.choice((TABLES, TABLES[:1], TABLES))
                asked.append(_ask(flow, dice, tables, where, sweep=sweep, by_key=by_key))
            # the last one may be left for the run that follows
            done = list(asked if dice.random() < 0.7 else asked[:-1])
            _await(flow, done, errors)
            while len(done) < 8 and not (
                any(flow.reported(each.id).newer for each in done)
                and any(_left_alone(read_log(flow), each) for each in done)
                and set(kinds) <= {each.what for each in upheaval.done}
            ):  # a seed without these would prove nothing
                done.append(_ask(flow, dice, TABLES, "", by_key=dice.random() < 0.3))
                _await(flow, done, errors)
    flow.stream()
    asked += [each for each in done if each not in asked]
    _await(flow, asked, ())
    assert {(flow.reported(each.id).state, flow.reported(each.id).error) for each in asked} == {("finished", "")}
    alone, within = _check_rows(flow, asked, upheaval.done)
    counted = audit(flow, TABLES).check().statistics
    print(
        f"seed {seed} ({', '.join(kinds)}): {counted}, {alone} rows left alone, {within} of {len(upheaval.done)} within a reading"
    )
    assert counted.live_rows >= 300, f"seed {seed} proves nothing: {counted}"
    left_out = sum(flow.reported(each.id).newer for each in asked)
    assert left_out >= 1, f"seed {seed} proves nothing: no row was older than the stream"
    assert alone >= 1, f"seed {seed} proves nothing: no row was left alone"
    assert set(kinds) <= {each.what for each in upheaval.done}, f"seed {seed} proves nothing: {upheaval.done}"
    assert counted.truncated >= ("truncate" in kinds), f"seed {seed} proves nothing: {counted}"
