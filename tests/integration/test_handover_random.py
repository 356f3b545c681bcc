"""The hand-over from snapshot to stream under concurrent writers, with random seeds: each proves something or fails.

``BOTTLEDWATER_SEEDS`` says how many, ``BOTTLEDWATER_SEED`` which is the first.
"""

from __future__ import annotations

import os
import random
import time
from typing import Any

import psycopg
import pytest

from airflow_bottledwater.local.kafka import KafkaBroker
from airflow_bottledwater.postgres.snapshot import SnapshotExporter
from tests.support import outboxes
from tests.support.forms import Draw
from tests.support.options import without_primary_keys
from tests.support.topics import Flow
from tests.support.writers import PARTED, Writers, audit, make_tables

FIRST = int(os.environ.get("BOTTLEDWATER_SEED", "1"))
SEEDS = range(FIRST, FIRST + int(os.environ.get("BOTTLEDWATER_SEEDS", "6")))
#: a seed that has not seen so many transactions in progress at the boundary, left out and published after it proves
#: nothing
IN_PROGRESS, SKIPPED, AFTER = 5, 50, 50
TABLES = ("a", "b", "c", PARTED)
ROWS = 1500


class _Watched:
    """The holder's session, which draws the boundary when enough transactions are in progress; with time between its
    steps, in which others commit: between lock, boundary and L above all.

    :param dice: None: no time.
    """

    def __init__(self, connection: Any, dsn: str, dice: random.Random | None) -> None:
        self._connection, self._dsn, self._dice = connection, dsn, dice

    def execute(self, query: Any, *arguments: Any) -> Any:
        if self._dice is not None:
            time.sleep(self._dice.uniform(0.0, 0.15))
        if "pg_current_snapshot" in str(query):
            self._wait_for_transactions()
        return self._connection.execute(query, *arguments)

    def _wait_for_transactions(self) -> None:
        deadline = time.monotonic() + 20
        with psycopg.connect(self._dsn, autocommit=True) as other:
            counted = 0
            while counted < 2 * IN_PROGRESS and time.monotonic() < deadline:
                row = other.execute("SELECT count(*) FROM pg_snapshot_xip(pg_current_snapshot())").fetchone()
                counted = row[0] if row else 0

    def __getattr__(self, name: str) -> Any:
        return getattr(self._connection, name)


def _watch(patch: pytest.MonkeyPatch, dice: random.Random | None) -> None:
    original = SnapshotExporter.__init__

    def init(self: SnapshotExporter, dsn: str) -> None:
        original(self, dsn)
        self._connection = _Watched(self._connection, dsn, dice)  # type: ignore[assignment]

    patch.setattr(SnapshotExporter, "__init__", init)


@pytest.mark.some(1)
@pytest.mark.parametrize("seed", SEEDS)
def test_a_handover_under_writers_loses_repeats_and_tears_nothing(
    database: str, kafka: KafkaBroker, monkeypatch: pytest.MonkeyPatch, draw: Draw, seed: int
) -> None:
    dice = random.Random(seed)
    _watch(monkeypatch, dice if dice.random() < 0.7 else None)
    flow = Flow(
        database, kafka, None, tables=TABLES, xid_header=True, range_bytes=64 * 1024, lanes=dice.choice((2, 3)),
        partitions=dice.choice((1, 1, 3)),
    )  # fmt: skip
    if with_outbox := seed % 2 == 0:
        flow.change(tables=(*TABLES, outboxes.OUTBOX), messages=outboxes.MESSAGES, transaction_topic="transactions")
    make_tables(flow, TABLES, ROWS)
    options, statements = without_primary_keys(seed, TABLES[:3])
    for statement in statements:
        flow.execute(statement)
    options |= outboxes.OPTIONS if with_outbox else {}
    flow.change(table_options=options)
    draw(flow, seed, TABLES)
    with Writers(flow.dsn, TABLES, seed, ROWS, outbox=with_outbox):
        flow.create()
        time.sleep(dice.uniform(0.3, 0.6))
        flow.snapshot()
        time.sleep(dice.uniform(0.0, 0.3))
        if dice.random() < 0.5:
            flow.stream()
        time.sleep(0.2)
    flow.stream()
    report = audit(flow, TABLES).check()
    assert report.ahead == []
    counted = report.statistics
    proof = (counted.in_progress >= IN_PROGRESS, counted.skipped >= SKIPPED, counted.after >= AFTER)
    assert all(proof), f"seed {seed} proves nothing: {counted}"
