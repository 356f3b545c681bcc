"""Live snapshots under concurrent writers on the very rows that are read, with random seeds, while tables are
truncated, altered and rewritten: each proves something or fails.

``BOTTLEDWATER_SEEDS`` says how many, ``BOTTLEDWATER_SEED`` which is the first.
"""

from __future__ import annotations

import os
import random
import time
from typing import Any

import pytest

from airflow_bottledwater.live import reading
from airflow_bottledwater.live.reading import LiveReader
from airflow_bottledwater.local.kafka import KafkaBroker
from tests.support import outboxes
from tests.support.again import SLICES, Asked, ask, check_rows, ended, left_alone
from tests.support.forms import Draw
from tests.support.options import filters, has_hashed_key, without_primary_keys
from tests.support.topics import Flow
from tests.support.upheaval import Upheaval
from tests.support.writers import ASYNCHRONOUS, LONG, PREPARING, SHORT, Writers, audit, make_tables, read_log, sent

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
    """The session that reads, with time between its steps, in which others commit: between lock, snapshot and L above
    all."""

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
    original = LiveReader._connect

    def connect(self: LiveReader) -> Any:
        found = original(self)
        return found if isinstance(found, _Slow) else _Slow(found, dice)

    patch.setattr(LiveReader, "_connect", connect)
    # a chunk is a few blocks, so that there are many
    patch.setattr(reading, "_FIRST_BLOCKS", dice.choice((1, 3)))
    patch.setattr(reading, "_MOST_BLOCKS_BY_KEY", dice.choice((1, 3)))
    patch.setattr(reading, "_MOST_BLOCKS", dice.choice((3, 8, 20)))


@pytest.mark.parametrize("seed", SEEDS)
def test_rows_that_are_read_again_never_take_a_key_back_in_time(
    database: str, kafka: KafkaBroker, monkeypatch: pytest.MonkeyPatch, draw: Draw, seed: int
) -> None:
    dice = random.Random(seed)
    _slow_down(monkeypatch, dice)
    flow = Flow(
        database, kafka, None, tables=TABLES, xid_header=True, partitions=dice.choice((1, 1, 3)),
        batch_bytes=dice.choice((1 << 16, 8 << 20)),
    )  # fmt: skip
    if with_outbox := seed % 2 == 0:
        flow.change(tables=(*TABLES, outboxes.OUTBOX), messages=outboxes.MESSAGES)
    make_tables(flow, TABLES, ROWS)
    options, statements = without_primary_keys(seed, TABLES)
    for statement in statements:
        flow.execute(statement)
    options |= outboxes.OPTIONS if with_outbox else {}
    flow.change(table_options=options)
    draw(flow, seed, TABLES)
    # hashed keys are not read by key
    by_keys = 0.0 if has_hashed_key(flow, TABLES) else 0.3
    kinds = UPSETS[seed % len(UPSETS)]
    asked: list[Asked] = []
    with Writers(flow.dsn, TABLES, seed, ROWS, habits=WRITERS, pause=(0.0, 0.02), outbox=with_outbox):
        flow.create()
        flow.snapshot()
        with flow.streaming() as errors, Upheaval(flow.dsn, TABLES, seed, ROWS, kinds) as upheaval:
            for _ in range(2):
                where, sweep, by_key = dice.choice(list(SLICES)), dice.random() < 0.4, dice.random() < by_keys
                tables = dice.choice((TABLES, TABLES[:1], TABLES))
                named = ("?",) if tables == TABLES and dice.random() < 0.5 else tables
                asked.append(ask(flow, tables, where, named=named, sweep=sweep, by_key=by_key))
            # the last one may be left for the run that follows
            done = list(asked if dice.random() < 0.7 else asked[:-1])
            ended(flow, done, errors)
            while len(done) < 8 and not (
                any(flow.reported(each.id).superseded for each in done)
                and sum(flow.reported(each.id).rows for each in done) >= 300
                and any(left_alone(sent(read_log(flow), filters(flow, TABLES)), each) for each in done)
                and set(kinds) <= {each.what for each in upheaval.done}
            ):  # a seed without these would prove nothing
                done.append(ask(flow, TABLES, by_key=dice.random() < by_keys))
                ended(flow, done, errors)
    flow.stream()
    asked += [each for each in done if each not in asked]
    ended(flow, asked, ())
    assert {(flow.reported(each.id).state, flow.reported(each.id).error) for each in asked} == {("finished", "")}
    alone, within = check_rows(flow, TABLES, asked, upheaval.done)
    counted = audit(flow, TABLES).check().statistics
    print(
        f"seed {seed} ({', '.join(kinds)}): {counted}, {alone} rows left alone, {within} of {len(upheaval.done)} "
        "within a reading"
    )
    assert counted.live_rows >= 300, f"seed {seed} proves nothing: {counted}"
    left_out = sum(flow.reported(each.id).superseded for each in asked)
    assert left_out >= 1, f"seed {seed} proves nothing: no row was older than the stream"
    assert alone >= 1, f"seed {seed} proves nothing: no row was left alone"
    assert set(kinds) <= {each.what for each in upheaval.done}, f"seed {seed} proves nothing: {upheaval.done}"
    assert counted.truncated >= ("truncate" in kinds), f"seed {seed} proves nothing: {counted}"
