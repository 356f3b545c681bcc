"""Dividing batches that have logical messages of no transaction."""

from __future__ import annotations

import random

import numpy as np
import pytest

from airflow_bottledwater.encoding.layout import CHANGE
from airflow_bottledwater.model.lsn import Position
from airflow_bottledwater.postgres import pgoutput
from airflow_bottledwater.publish.batch import Batch


@pytest.mark.parametrize("seed", range(30))
def test_what_is_left_of_a_divided_batch_is_sent_again(seed: int) -> None:
    """PostgreSQL sends a message if its record begins at P or behind it, and a transaction if its commit record does;
    whoever has published a part goes on with the same batch, too."""
    dice = random.Random(seed)
    wal, rows, begins = 100, list[tuple[int, ...]](), list[int]()
    for _ in range(dice.randrange(2, 8)):
        wal += dice.randrange(2)
        if dice.random() < 0.5:
            end = wal + dice.randrange(24, 60)
            rows.append((pgoutput.LOGICAL, 0, 0, 0, end - 1, 1, 0, 0, 0))
            begins.append(wal)
        else:
            end = wal + 30
            for ordinal in range(1, dice.randrange(1, 4) + 1):
                rows.append((pgoutput.INSERT, 0, 0, 0, wal, ordinal, 7, 0, 0))
                begins.append(wal)
        wal = end
    batch = Batch(Position(100), Position(wal), np.zeros(1, dtype=np.uint8), np.array(rows, dtype=CHANGE), ())
    for lsn in sorted({row[4] for row in rows}):
        part = batch.before(lsn)
        kept = len(part)
        assert [row[4] for row in rows[:kept]] == [row[4] for row in rows if row[4] < lsn]
        assert all(begin >= part.end.lsn for begin in begins[kept:])
        assert all(part.end.passed(row[4], row[5]) for row in rows[:kept])
        assert not any(part.end.passed(row[4], row[5]) for row in rows[kept:])
        if kept:
            rest = batch.after(part.end)
            assert rest is not None and (rest.start, len(rest)) == (part.end, len(rows) - kept)
        elif rows[0][0] == pgoutput.LOGICAL:
            assert part.end == batch.start
