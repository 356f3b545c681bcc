"""The parts of a batch, of which the next one is completed while one is published."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from dataclasses import replace

import numpy as np
import psycopg
import pytest

from airflow_bottledwater.encoding import layout, wire
from airflow_bottledwater.encoding.program import Programs, Target, compile_programs
from airflow_bottledwater.model.lsn import Position
from airflow_bottledwater.model.relation import SourceTable
from airflow_bottledwater.model.version import Version
from airflow_bottledwater.pipeline.formats import JSON
from airflow_bottledwater.postgres import pgoutput
from airflow_bottledwater.postgres.pgoutput import Field, RowMessage
from airflow_bottledwater.publish.ahead import Ahead
from airflow_bottledwater.publish.batch import Batch
from airflow_bottledwater.publish.current import Cells, CurrentRows, KeyBatch
from airflow_bottledwater.publish.toast import Completed
from tests.support import wire as w

#: bytes of values that are enough for a part
_PART = 2000
TABLE = w.table(("k", w.plain(w.TEXT)), ("big", w.plain(w.TEXT)), key=["k"], oid=1)


class Clock(CurrentRows):
    """A table with every key; its value is the number of the look-up, so that it shows when it was read."""

    def __init__(self) -> None:
        self.reads = 0
        self.threads: list[str] = []
        self.before: Callable[[], None] = lambda: None

    def fetch(self, table: SourceTable, keys: KeyBatch, columns: Sequence[int], **_: object) -> Cells:
        self.threads.append(threading.current_thread().name)
        self.before()
        self.reads += 1
        value = b"%d" % self.reads + bytes(_PART)
        cells = np.zeros((len(keys), len(columns)), dtype=layout.FIELD)
        cells["kind"], cells["length"] = wire.FIELD_BINARY, len(value)
        return Cells(cells, np.frombuffer(bytearray(value), dtype=np.uint8))


class Parts:
    """A batch of four transactions, each of which is a part of its own."""

    def __init__(self) -> None:
        message = RowMessage("U", 1, "", None, [Field("b", b"1"), Field("u")]).encode()
        table = np.zeros(4, dtype=layout.CHANGE)
        table["kind"], table["length"], table["offset"] = ord("U"), len(message), np.arange(4) * len(message)
        table["lsn"] = [10, 20, 30, 40]
        data = np.frombuffer(bytearray(message * 4), dtype=np.uint8)
        self.batch = Batch(Position(0), Position(50), data, table, (Version(TABLE, "t"),))
        self.programs: Programs = compile_programs([(TABLE, Target(0, 1))], JSON, copied=False)
        self.waited: list[str] = []
        self.ahead = Ahead("", lambda what: self.waited.append(str(what)), _PART)
        self.rows = Clock()
        self.ahead._resolver.current = self.rows

    def part(self, rest: Batch) -> tuple[Batch, str]:
        """The leading part, and the value that its row has got."""
        part = self.ahead.leading(rest, self.programs)
        return part, _value(self.ahead.complete(part, self.programs))

    def follows(self, part: Batch) -> Batch:
        following = self.batch.after(part.end)
        assert following is not None
        return following


def _value(done: Completed) -> str:
    ((at, size),) = done.batch.changes[["offset", "length"]].tolist()
    row = pgoutput.row(bytes(done.batch.data[at : at + size])).new
    assert row is not None
    return row[1].data.rstrip(b"\0").decode()


@pytest.fixture
def parts():
    made = Parts()
    yield made
    made.ahead.close()


def test_the_next_part_is_read_by_another_thread_and_in_order(parts: Parts) -> None:
    rest, values = parts.batch, []
    while True:
        part, value = parts.part(rest)
        values.append((part.end, value))
        following = parts.batch.after(part.end)
        if following is None:
            break
        rest = following
        parts.ahead.prepare(rest, parts.programs)
    assert values == [(Position(20), "1"), (Position(30), "2"), (Position(40), "3"), (Position(50), "4")]
    assert parts.rows.threads == ["MainThread", "values_0", "values_0", "values_0"]


def test_a_part_that_is_published_again_is_read_again_and_so_is_what_follows(parts: Parts) -> None:
    # a value of the next part must never be older than one of this part: a key would go back in time
    first, value = parts.part(parts.batch)
    parts.ahead.prepare(parts.follows(first), parts.programs)
    again, later = parts.part(parts.batch)
    assert (again.end, value, later) == (first.end, "1", "3")
    assert parts.part(parts.follows(first))[1] == "4"


def test_a_part_that_is_cut_or_of_another_batch_is_read_again(parts: Parts) -> None:
    first, _ = parts.part(parts.batch)
    following = parts.follows(first)
    parts.ahead.prepare(following, parts.programs)
    cut = parts.ahead.leading(following, parts.programs).before(20)
    assert cut.end == Position(20) and not len(cut)
    assert parts.ahead.complete(cut, parts.programs).batch.end == cut.end
    assert parts.part(following)[1] == "3"
    parts.ahead.prepare(following, parts.programs)
    assert parts.part(replace(following, data=following.data.copy()))[1] == "5"


def test_what_fails_in_the_background_is_done_when_it_is_needed(parts: Parts) -> None:
    first, _ = parts.part(parts.batch)

    def fail() -> None:
        if threading.current_thread() is not threading.main_thread():
            raise psycopg.OperationalError("gone")

    parts.rows.before = fail
    parts.ahead.prepare(parts.follows(first), parts.programs)
    second, value = parts.part(parts.follows(first))
    assert (second.end, value) == (Position(30), "2")


def test_the_second_thread_waits_for_no_server(parts: Parts) -> None:
    first, _ = parts.part(parts.batch)
    parts.rows.before = lambda: parts.ahead._wait("a standby")
    parts.ahead.prepare(parts.follows(first), parts.programs)
    parts.ahead._await()
    assert not parts.waited
    parts.part(parts.follows(first))
    assert parts.waited == ["a standby"]
