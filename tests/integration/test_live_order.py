"""The order of steps that the argument of live snapshots rests on, one at a time (docs/guarantees.md)."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Mapping
from contextlib import closing
from typing import Any

import psycopg
import pytest

from airflow_bottledwater.backoff import Backoff
from airflow_bottledwater.encoding.mapping import TableMapping
from airflow_bottledwater.kafka.errors import NewProducerNeeded
from airflow_bottledwater.live import reading
from airflow_bottledwater.live import snapshots as live_snapshots
from airflow_bottledwater.live.chunks import LiveChunk
from airflow_bottledwater.live.reading import LiveReader
from airflow_bottledwater.model.lsn import parse_lsn
from airflow_bottledwater.postgres import snapshot
from airflow_bottledwater.postgres.connect import connect
from airflow_bottledwater.postgres.snapshot import begin_reading
from airflow_bottledwater.publish.session import PublishSession
from airflow_bottledwater.snapshot import keys
from airflow_bottledwater.state.records import live_key
from airflow_bottledwater.stream.engine import flush_target
from airflow_bottledwater.stream.publisher import StreamPublisher
from airflow_bottledwater.stream.source import open_source
from airflow_bottledwater.stream.start import begin
from tests.support.live import read_by_single_blocks
from tests.support.topics import Flow, MakeFlow
from tests.support.waiting import until

ROWS = 300


@pytest.fixture
def flow(make_flow: MakeFlow) -> Flow:
    made = make_flow(tables="items")
    made.execute(
        "CREATE TABLE items (id bigint PRIMARY KEY, name text)",
        f"INSERT INTO items SELECT g, 'item ' || g FROM generate_series(1, {ROWS}) g",
    )
    return made


@pytest.fixture
def streamed(flow: Flow) -> Flow:
    flow.create()
    flow.snapshot()
    flow.stream()
    return flow


def _oid(flow: Flow) -> int:
    return int(flow.execute("SELECT 'items'::regclass::oid")[0][0])


def test_the_table_is_locked_before_the_snapshot_is_taken(flow: Flow) -> None:
    """A TRUNCATE leaves nothing for older snapshots to see: one from before it would show an empty table."""
    with psycopg.connect(flow.dsn) as other, connect(flow.dsn) as connection:
        other.execute("TRUNCATE items")
        other.execute("INSERT INTO items VALUES (7, 'after')")
        row = other.execute("SELECT pg_current_xact_id()::text::bigint").fetchone()
        assert row is not None
        ending = threading.Timer(1.0, other.commit)
        ending.start()
        found = begin_reading(connection, _oid(flow), TableMapping(), lock_timeout=20.0)
        ending.join()
        assert found.snapshot.sees(row[0])
        assert connection.execute("SELECT count(*) FROM public.items").fetchone() == (1,)


def test_all_that_the_snapshot_shows_was_committed_below_l(flow: Flow) -> None:
    """Also what is not on disk yet."""
    oid = _oid(flow)
    with psycopg.connect(flow.dsn, autocommit=True) as other, connect(flow.dsn) as connection:
        other.execute("SET synchronous_commit = off")
        for _ in range(20):
            other.execute("UPDATE items SET name = name WHERE id = 1")
            row = other.execute("SELECT pg_current_wal_insert_lsn()::text").fetchone()
            assert row is not None
            found = begin_reading(connection, oid, TableMapping(), lock_timeout=20.0)
            connection.execute("ROLLBACK")
            assert found.insert_lsn >= parse_lsn(row[0])


def test_whatever_is_handed_over_is_on_disk(streamed: Flow, monkeypatch: pytest.MonkeyPatch) -> None:
    flushed: set[int] = set()
    handed: list[tuple[bool, bool]] = []
    wait, hand_over = reading.wait_flushed, LiveReader._hand_over

    def waited(connection: Any, dsn: str, lsn: int, *, timeout: float) -> None:
        wait(connection, dsn, lsn, timeout=timeout)
        flushed.add(lsn)

    def handing_over(self: LiveReader, chunk: LiveChunk) -> None:
        handed.append((bool(chunk.stale), chunk.insert_lsn in flushed))
        # each snapshot has an L of its own
        streamed.execute("SELECT pg_logical_emit_message(true, 'x', 'x')")
        hand_over(self, chunk)

    monkeypatch.setattr(reading, "wait_flushed", waited)
    monkeypatch.setattr(LiveReader, "_hand_over", handing_over)
    streamed.damage("items", {"id": 99_999}, {"id": 99_999, "name": "not there"})
    request_id = streamed.ask("items", sweep=True)
    streamed.stream()
    assert streamed.reported(request_id).tombstones == 1
    assert {stale for stale, _ in handed} == {False, True} and all(on_disk for _, on_disk in handed)


def test_a_chunk_that_was_published_is_not_published_again(streamed: Flow, monkeypatch: pytest.MonkeyPatch) -> None:
    """The broker's answer to its commit was lost."""
    request_id = streamed.ask("items")
    key, lost, original = live_key(request_id), list[bool](), PublishSession.transact

    def transact(self: PublishSession, batches: Any, progress: Mapping[str, Any], **options: bool) -> None:
        original(self, batches, progress, **options)
        if (reached := progress.get(key)) is not None and reached.rows and not lost:
            lost.append(True)
            raise NewProducerNeeded("The outcome is not known.")

    monkeypatch.setattr(PublishSession, "transact", transact)
    streamed.stream()
    again = [m.key["id"] for m in streamed.read("items") if m.snapshot]
    assert lost and sorted(again) == list(range(1, ROWS + 1))
    assert streamed.reported(request_id).rows == ROWS


#: by what the session that reads is recognised to be about to do something
STEPS = {
    "the lock": "LOCK TABLE",
    "the snapshot": "pg_current_snapshot",
    "L": "pg_current_wal_insert_lsn",
    "the flush": "pg_current_wal_flush_lsn",
    "the commit": "COMMIT",
}


class _Ended:
    """The session that reads; it is ended before a step."""

    def __init__(self, connection: Any, step: str, end: Callable[[int], None]) -> None:
        self._connection, self._step, self._end = connection, step, end

    def execute(self, query: Any, *arguments: Any) -> Any:
        if STEPS[self._step] in str(query):
            self._end(self._connection.info.backend_pid)
        return self._connection.execute(query, *arguments)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._connection, name)


@pytest.mark.some(1)
@pytest.mark.parametrize("step", STEPS)
def test_a_session_that_is_ended_between_its_steps_reads_again(
    streamed: Flow, monkeypatch: pytest.MonkeyPatch, step: str
) -> None:
    read_by_single_blocks(monkeypatch)
    hits, original = list[int](), LiveReader._connect

    def end(pid: int) -> None:
        hits.append(pid)
        if len(hits) in (1, 3):
            streamed.execute(f"SELECT pg_terminate_backend({pid}, 5000)", "DELETE FROM items WHERE id = 2")

    def connect(self: LiveReader) -> Any:
        found = original(self)
        return found if isinstance(found, _Ended) else _Ended(found, step, end)

    monkeypatch.setattr(LiveReader, "_connect", connect)
    request_id = streamed.ask("items", sweep=True)
    with streamed.streaming() as errors:
        until(lambda: streamed.reported(request_id).ended, "it ends", failed=errors)
    assert len(set(hits)) >= 3
    assert (streamed.reported(request_id).state, streamed.reported(request_id).error) == ("finished", "")
    again = [m.key["id"] for m in streamed.read("items") if m.snapshot]
    assert len(again) == len(set(again)) and {1, *range(3, ROWS + 1)} <= set(again)
    assert streamed.compare("items").equal


def test_after_too_many_changes_to_note_rows_are_read_again(
    streamed: Flow, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(live_snapshots, "MOST", 50)
    original, done = LiveReader._hand_over, list[bool]()

    def hand_over(self: LiveReader, chunk: LiveChunk) -> None:
        if not done:
            done.append(True)
            streamed.published("UPDATE items SET name = 'changed' WHERE id <= 100")
        original(self, chunk)

    monkeypatch.setattr(LiveReader, "_hand_over", hand_over)
    request_id = streamed.ask("items")
    with streamed.streaming() as errors:
        until(lambda: streamed.reported(request_id).state == "finished", "it ends", failed=errors)
    assert "changed too many keys" in caplog.text
    assert streamed.reported(request_id).rows == ROWS and streamed.compare("items").equal


def test_a_sweep_waits_until_the_rows_are_published(streamed: Flow, monkeypatch: pytest.MonkeyPatch) -> None:
    """A delete that the rows show already, and that is not published yet: the sweep is to find its tombstone in the
    topic."""
    looked: list[str] = []
    ends = reading.Topics.ends

    def looking(self: Any, name: str, partitions: int, **more: bool) -> Any:
        looked.append(name)
        return ends(self, name, partitions, **more)

    streamed.execute("DELETE FROM items WHERE id = 5")
    start, backoff = begin(streamed.pipeline), Backoff(10)
    request_id = streamed.ask("items", sweep=True)
    with closing(StreamPublisher(streamed.pipeline, start, start.state, backoff)) as publisher:
        publisher.reached()
        monkeypatch.setattr(reading.Topics, "ends", looking)
        until(lambda: publisher.live.work() or publisher.live.waits, "rows are read")
        time.sleep(1.0)
        assert streamed.topic("items") not in looked
        with closing(open_source(streamed.pipeline, start, start.state, backoff, publisher.position)) as source:
            target, deadline = flush_target(streamed.pipeline), time.monotonic() + 60
            while publisher.position.lsn < target or publisher.live.active:
                if (batch := source.next(0.1, flush_empty=True)) is not None:
                    publisher.publish(batch)
                publisher.live.work()
                assert time.monotonic() < deadline
    assert streamed.topic("items") in looked and streamed.reported(request_id).tombstones == 0
    assert [m.value for m in streamed.read("items") if m.key["id"] == 5][1:] == [None]


@pytest.mark.some(1)
@pytest.mark.parametrize(
    "ddl",
    [
        "DROP TABLE items_2",
        "ALTER TABLE items_2 RENAME TO old_items",
        "ALTER TABLE items SET SCHEMA archive",
        "DROP TABLE items",
    ],
)
def test_ddl_that_gets_its_lock_between_two_chunks_ends_nothing(
    make_flow: MakeFlow, monkeypatch: pytest.MonkeyPatch, ddl: str
) -> None:
    """The next chunk's session reads the names of before, and waits for a lock by them until the DDL is committed."""
    read_by_single_blocks(monkeypatch)
    flow = make_flow(tables="items", partitioned_tables="root")
    flow.execute(
        "CREATE SCHEMA archive",
        "CREATE TABLE items (id bigint PRIMARY KEY, name text) PARTITION BY RANGE (id)",
        "CREATE TABLE items_1 PARTITION OF items FOR VALUES FROM (0) TO (500)",
        "CREATE TABLE items_2 PARTITION OF items FOR VALUES FROM (500) TO (1000)",
        "INSERT INTO items SELECT g, repeat('x', 200) FROM generate_series(1, 499) g",
    )
    flow.create()
    flow.snapshot()
    flow.stream()
    waited, locks = list[int](), snapshot._lock

    def lock(connection: Any, named: Any) -> None:
        waited.append(len(waited))
        if len(waited) == 2:
            ddl_session.execute(ddl)  # type: ignore[arg-type]
            threading.Timer(0.5, ddl_session.commit).start()
        locks(connection, named)

    monkeypatch.setattr(snapshot, "_lock", lock)
    request_id = flow.ask("items")
    with psycopg.connect(flow.dsn) as ddl_session, flow.streaming() as errors:
        until(lambda: flow.reported(request_id).ended, "it ends", failed=errors)
        assert not errors
    assert flow.reported(request_id).state == "finished", flow.reported(request_id).error
    if ddl != "DROP TABLE items":
        assert {m.key["id"] for m in flow.read("items") if m.snapshot} == set(range(1, 500))


@pytest.mark.parametrize(
    "ddl",
    [
        pytest.param("ALTER TABLE items ALTER name SET DEFAULT 0", marks=pytest.mark.long),
        pytest.param("VACUUM FULL items", marks=pytest.mark.long),
        # longer than the sweep waits for the lock of its next range
        "DO 'BEGIN LOCK TABLE items IN ACCESS EXCLUSIVE MODE; PERFORM pg_sleep(2.5); END'",
    ],
)
def test_nobody_waits_for_the_end_of_a_sweep_and_rows_that_move_meanwhile_stay(
    make_flow: MakeFlow, monkeypatch: pytest.MonkeyPatch, ddl: str
) -> None:
    """It reads the keys in ranges of blocks. Rows of the last blocks get to the first ones, which it has read by
    then."""
    rows = 400
    monkeypatch.setattr(keys, "_BLOCKS", 1)
    monkeypatch.setattr(keys, "_SECONDS", 0.0)
    flow = make_flow(tables="items")
    flow.execute(
        "CREATE TABLE items (id bigint PRIMARY KEY, name text)",
        f"INSERT INTO items SELECT g, repeat('x', 200) FROM generate_series(1, {rows}) g",
    )
    flow.create()
    flow.snapshot()
    flow.stream()
    flow.damage("items", {"id": 99_999}, {"id": 99_999, "name": "not there"})
    sweep, begin_one, hashes = LiveReader._sweep, LiveReader._begin, keys._hashes
    sweeping, begun, moved, altered = list[bool](), list[int](), list[int](), list[int]()

    def sweeps(self: LiveReader, *arguments: Any) -> None:
        sweeping.append(True)
        sweep(self, *arguments)

    def move() -> bool:
        # VACUUM frees nothing that a snapshot in this database, say of autovacuum's ANALYZE, may still see
        flow.execute("DELETE FROM items WHERE id <= 20", "VACUUM items")
        flow.execute(f"UPDATE items SET name = name || '.' WHERE id > {rows - 10}")
        moved.extend(flow.execute(f"SELECT count(*) FROM items WHERE id > {rows - 10} AND ctid < '(2,0)'")[0])
        return moved[-1] > 0

    def begins(self: LiveReader, *arguments: Any) -> Any:
        begun.append(len(sweeping))
        if begun.count(1) == 3:
            until(move, "rows of the last blocks get to the first ones")
        return begin_one(self, *arguments)

    def alter() -> None:
        flow.execute(ddl)
        altered.append(begun.count(1))

    altering = threading.Thread(target=alter, daemon=True)

    def key_hashes(*arguments: Any) -> Any:
        if begun.count(1) == 5 and not altering.ident:
            altering.start()
            time.sleep(0.5)
        return hashes(*arguments)

    monkeypatch.setattr(LiveReader, "_sweep", sweeps)
    monkeypatch.setattr(LiveReader, "_begin", begins)
    monkeypatch.setattr(keys, "_hashes", key_hashes)
    request_id = flow.ask("items", sweep=True)
    with flow.streaming() as errors:
        until(lambda: flow.reported(request_id).ended, "it ends", failed=errors)
    altering.join(60)
    assert altered[0] < begun.count(1) and len(sweeping) == 1
    assert (flow.reported(request_id).state, flow.reported(request_id).tombstones) == ("finished", 1)
    flow.stream()
    assert flow.compare("items").equal
