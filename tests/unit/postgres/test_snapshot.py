"""The ranges of a plan: all blocks once, and few enough for one record."""

from __future__ import annotations

import json

import pytest

from airflow_bottledwater.model.relation import SourceTable
from airflow_bottledwater.postgres.snapshot import LAST_BLOCK, MAX_RANGES, deal, ranges
from airflow_bottledwater.state import records, store
from airflow_bottledwater.state.records import Plan

#: the most blocks that a table can have: 32 TiB
_LARGEST = 2**32 - 2


def table(pages: int) -> SourceTable:
    return SourceTable(16400, "public", "t", "d", ("id",), (), 5, pages=pages)


@pytest.mark.parametrize("pages", [0, 1, 2047, 2048, 2049, 10**6, 2**27, 2**27 + 1, _LARGEST])
def test_the_ranges_of_a_table_of_any_size_are_few_and_cover_every_block_once(pages: int) -> None:
    made = ranges(table(pages), 16 << 20)
    assert len(made) <= MAX_RANGES
    assert made[0][0] == 0
    assert made[-1][1] == LAST_BLOCK
    assert all(one[1] == other[0] for one, other in zip(made, made[1:], strict=False))
    assert all(first < last for first, last in made)
    if pages <= 2048 * MAX_RANGES:
        # of the size that the settings ask for
        assert {last - first for first, last in made[:-1]} <= {2048}


def test_the_plan_of_the_largest_table_is_a_small_record() -> None:
    of = table(_LARGEST)
    parts = ranges(of, 64 * 1024)
    plan = Plan(5, "definition", tuple((*parts[r], lane) for _, r, lane in deal([(of, parts)], 256)))
    value = store.encode(records.encode(plan))
    assert value is not None
    # a quarter of a broker's default for max.message.bytes
    assert len(value) < 256 * 1024
    assert records.decode("plan/1", json.loads(value)) == plan


def test_a_plan_with_more_ranges_is_read_as_it_was_stored() -> None:
    stored = {"filenode": 5, "definition": "d", "ranges": [[i * 2, i * 2 + 2, i % 3] for i in range(65_536)]}
    assert records.encode(records.decode("plan/1", stored))["ranges"][65_535] == (131_070, 131_072, 0)


@pytest.mark.parametrize("lanes", [1, 2, 3, 256])
def test_ranges_are_dealt_to_all_lanes_evenly_and_each_once(lanes: int) -> None:
    plan = [(table(pages), ranges(table(pages), 16 << 20)) for pages in (0, 10_000, 2049, 500_000)]
    dealt = list(deal(plan, lanes))
    assert [(t, r) for t, r, _ in dealt] == [(t, r) for t, (_, parts) in enumerate(plan) for r in range(len(parts))]
    load = [sum(lane == each for *_, lane in dealt) for each in range(lanes)]
    assert sum(load) == len(dealt) > lanes or lanes == 256
    assert max(load) - min(load) <= 1


def test_small_tables_do_not_all_go_to_the_first_lane() -> None:
    plan = [(table(1), ranges(table(1), 16 << 20))] * 6
    assert [lane for *_, lane in deal(plan, 3)] == [0, 1, 2, 0, 1, 2]
