"""The ends of transactions, however their batches are cut."""

from __future__ import annotations

import json
import random
from collections import Counter, defaultdict

import numpy as np
import pytest

from airflow_bottledwater.encoding.layout import CHANGE, Rows
from airflow_bottledwater.model.lsn import Position
from airflow_bottledwater.state.records import PartOfTransaction
from airflow_bottledwater.stream.ends import SourceTransaction, ended, transactions

TOPICS = ("a", "b", "events", "state")


def _changes(positions: list[Position]) -> Rows:
    changes = np.zeros(len(positions), dtype=CHANGE)
    for change, position in zip(changes, positions, strict=True):
        change["lsn"], change["ordinal"], change["xid"], change["time"] = (
            *position,
            position.lsn + 1,
            position.lsn * 2,
        )
    return changes


@pytest.mark.parametrize("seed", range(50))
def test_each_transaction_ends_once_with_all_of_its_records_wherever_batches_are_cut(seed: int) -> None:
    dice = random.Random(seed)
    positions = [Position(lsn, o) for lsn in range(10, 100, 10) for o in range(1, dice.randrange(1, 6) + 1)]
    # some changes give no record, and a key change gives two
    records = {position: [dice.randrange(3) for _ in range(dice.choice((0, 1, 1, 2)))] for position in positions}
    expected: dict[int, Counter[str]] = defaultdict(Counter)
    for position, topics in records.items():
        expected[position.lsn].update(TOPICS[topic] for topic in topics)
    found: list[SourceTransaction] = []
    start, part = Position(5), None
    at = 0
    while at < len(positions):
        stop = dice.randrange(at + 1, len(positions) + 1)
        whole = stop == len(positions) or positions[stop].lsn > positions[stop - 1].lsn
        end = Position(positions[stop - 1].lsn + 3) if whole else positions[stop - 1]
        here = positions[at:stop]
        rows = np.array([i for i, each in enumerate(here) for _ in records[each]], dtype=np.int64)
        topics = np.array([topic for each in here for topic in records[each]], dtype=np.int64)
        ends, part = ended(transactions(_changes(here), rows, topics, TOPICS), start, part, end)
        assert part is None or end.ordinal
        found += ends
        start, at = end, stop
    assert [each.lsn for each in found] == [lsn for lsn, counts in expected.items() if counts]
    for each in found:
        of = each.published
        assert (of.xid, of.time) == (each.lsn + 1, each.lsn * 2)
        assert of.counts == expected[each.lsn]


def test_a_transaction_ends_although_nothing_that_is_left_of_it_is_published() -> None:
    before = PartOfTransaction(7, 1000, {"a": 3})
    nothing = transactions(_changes([]), np.zeros(0, dtype=np.int64), np.zeros(0, dtype=np.int64), TOPICS)
    assert ended(nothing, Position(10, 3), before, Position(13)) == ([SourceTransaction(10, before)], None)
    assert ended((), Position(10, 3), before, Position(10, 5)) == ([], before)


def test_the_record_of_an_end() -> None:
    end = SourceTransaction(0x16B3748, PartOfTransaction(745, 1000, {"a": 2, "b": 1}))
    assert end.name == "00000000016B3748"
    assert json.loads(end.end()) == {
        "transaction": "00000000016B3748", "xid": 745, "time": 1000, "count": 3, "topics": {"a": 2, "b": 1}
    }  # fmt: skip
