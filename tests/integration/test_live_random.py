"""Live snapshots under concurrent writers on the very rows that are read, with random seeds: each proves something or fails.

``BOTTLEDWATER_SEEDS`` says how many, ``BOTTLEDWATER_SEED`` which is the first.
"""

from __future__ import annotations

import os
import random
import time
from collections.abc import Sequence
from typing import Any

import pytest

from airflow_bottledwater.live import reading
from airflow_bottledwater.live.reading import Reading
from airflow_bottledwater.local.kafka import KafkaBroker
from tests.support.topics import Flow
from tests.support.waiting import until
from tests.support.writers import ASYNCHRONOUS, LONG, PREPARING, SHORT, Writers, audit, make_tables

pytestmark = pytest.mark.long

FIRST = int(os.environ.get("BOTTLEDWATER_SEED", "1"))
SEEDS = range(FIRST, FIRST + int(os.environ.get("BOTTLEDWATER_SEEDS", "4")))
TABLES = ("a", "b")
ROWS = 1500
#: enough for some to be in progress at every boundary; more would only take the processor from the rest
WRITERS = (*[LONG] * 8, SHORT, ASYNCHRONOUS, PREPARING)


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


def _await(flow: Flow, asked: Sequence[str], errors: Sequence[object]) -> None:
    until(
        lambda: all(flow.reported(each).ended for each in asked),
        "the live snapshots end",
        120,
        pause=0.5,
        failed=errors,
    )


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
    asked = []
    with Writers(flow.dsn, TABLES, seed, ROWS, habits=WRITERS, pause=(0.0, 0.02)):
        flow.create()
        flow.snapshot()
        with flow.streaming() as errors:
            for _ in range(2):
                where = dice.choice(("", "", "id % 3 = 0", "n > 0 OR version % 2 = 0", "id < 250"))
                asked.append(
                    flow.ask(
                        *dice.choice((TABLES, TABLES[:1], ("?",))),
                        where=where,
                        sweep=dice.random() < 0.4,
                        by_key=dice.random() < 0.3,
                    )
                )
            # the last one may be left for the run that follows
            done = list(asked if dice.random() < 0.7 else asked[:-1])
            _await(flow, done, errors)
            # a seed in which no row was older than the stream would prove nothing
            while not any(flow.reported(each).newer for each in done) and len(done) < 8:
                done.append(flow.ask(*TABLES))
                _await(flow, done, errors)
    flow.stream()
    asked = list(dict.fromkeys([*asked, *done]))
    assert {(flow.reported(each).state, flow.reported(each).error) for each in asked} == {("finished", "")}
    counted = audit(flow, TABLES).check().statistics
    assert counted.live_rows >= 300, f"seed {seed} proves nothing: {counted}"
    left_out = sum(flow.reported(each).newer for each in asked)
    assert left_out >= 1, f"seed {seed} proves nothing: no row was older than the stream"
