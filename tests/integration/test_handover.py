"""Every clause of the hand-over from snapshot to stream (docs/guarantees.md), each at the one moment that it is there
for.

Random writers rarely hit these moments. Here statements run between two statements of the snapshot's holder, commits
stall between their record and their visibility, and servers crash, so that the same happens in every run.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import psycopg
import pytest
from psycopg import sql
from psycopg.conninfo import conninfo_to_dict

from airflow_bottledwater.errors import Outage, PreflightError, StateError
from airflow_bottledwater.live import reading
from airflow_bottledwater.live.slices import RowLocations
from airflow_bottledwater.local.kafka import KafkaBroker
from airflow_bottledwater.local.postgres import PostgresServer, programs
from airflow_bottledwater.local.process import run
from airflow_bottledwater.model.boundary import Boundary
from airflow_bottledwater.model.lsn import parse_lsn
from airflow_bottledwater.postgres import slot
from airflow_bottledwater.postgres import snapshot as pg
from airflow_bottledwater.postgres.connect import connect
from airflow_bottledwater.postgres.snapshot import OwnSnapshot
from airflow_bottledwater.provision.create import create
from airflow_bottledwater.provision.drop import drop
from airflow_bottledwater.publish.current import Cells, CurrentRows
from airflow_bottledwater.snapshot import driver, lane
from airflow_bottledwater.snapshot.task import LaneTask
from airflow_bottledwater.state import store
from airflow_bottledwater.state.claim import read_state
from airflow_bottledwater.state.pipeline_state import PipelineState
from airflow_bottledwater.stream.publisher import StreamPublisher
from tests.support import running
from tests.support.topics import Flow, MakeFlow, Message, assert_exactly_once_in_order
from tests.support.waiting import until

VERSION = os.environ.get("BOTTLEDWATER_TEST_POSTGRES", "16")

#: commits wait for a standby that no server is, where their session asks for it
STALLING = {
    "max_prepared_transactions": 10,
    "synchronous_standby_names": "nobody",
    "synchronous_commit": "local",
    "autovacuum": "off",
}


@pytest.fixture(scope="module")
def postgres(tmp_path_factory: pytest.TempPathFactory) -> Iterator[PostgresServer]:
    with PostgresServer(tmp_path_factory.mktemp("stalling"), version=VERSION, settings=STALLING) as server:
        yield server


@pytest.fixture
def flow_settings() -> dict[str, Any]:
    return {"lanes": 2, "create_slot_timeout": 20.0}


def fill(flow: Flow, *tables: str, rows: int = 10) -> None:
    """Tables with rows 1 to ``rows``."""
    for table in tables:
        flow.execute(
            f"CREATE TABLE {table} (id bigint PRIMARY KEY, name text, n integer)",
            f"INSERT INTO {table} SELECT g, 'row ' || g, g FROM generate_series(1, {rows}) g",
        )


class Transaction:
    """A transaction with a session of its own, that the test prepares, stalls and ends."""

    def __init__(self, flow: Flow, *statements: str) -> None:
        self._flow = flow
        self._session = psycopg.connect(flow.dsn, autocommit=True)
        self._stalled: threading.Thread | None = None
        self.pid = self._session.info.backend_pid
        self.name = ""
        self.ended = False
        self._session.execute("BEGIN")
        for statement in statements:
            self._session.execute(statement)  # type: ignore[arg-type]
        row = self._session.execute("SELECT pg_current_xact_id()::text::bigint").fetchone()
        assert row is not None
        self.xid: int = row[0]

    def __enter__(self) -> Transaction:
        return self

    def __exit__(self, *_: object) -> None:
        if self._stalled is not None:
            self.release()
        elif self.name and not self.ended:
            self.end("ROLLBACK")
        self._session.close()

    def prepare(self) -> Transaction:
        """Prepare it."""
        self.name = f"{self._flow.pipeline.slot} {self.xid}"
        self._session.execute(f"PREPARE TRANSACTION '{self.name}'")
        return self

    def end(self, how: str = "COMMIT") -> None:
        """Commit it, or roll it back."""
        self._session.execute(f"{how} PREPARED '{self.name}'" if self.name else how)
        self.ended = True

    def stall(self) -> Transaction:
        """Commit, and stay where the commit record is in the WAL and nobody sees the commit."""
        self._session.execute("SET synchronous_commit = on")
        self._stalled = threading.Thread(target=self.end, daemon=True)
        self._stalled.start()
        waiting = f"SELECT 1 FROM pg_stat_activity WHERE pid = {self.pid} AND wait_event = 'SyncRep'"
        until(lambda: self._flow.execute(waiting), "the commit waits for a standby")
        return self

    def release(self) -> None:
        """Let it become visible (a stalled commit that is cancelled has committed); at most once."""
        if self._stalled is not None:
            self._flow.execute(f"SELECT pg_cancel_backend({self.pid})")
            self._stalled.join(60)
            assert self.ended
            self._stalled = None
        elif not self.ended:
            self.end()

    def who(self) -> str:
        """As messages name it."""
        return f"prepared transaction '{self.name}'" if self.name else f"session {self.pid} "


class Hooked:
    """A connection that says every statement before it runs it."""

    def __init__(self, connection: Any, before: Callable[[str], None]) -> None:
        self._connection, self._before = connection, before

    def execute(self, query: str | sql.Composable, *more: Any) -> Any:
        self._before(query if isinstance(query, str) else query.as_string(self._connection))
        return self._connection.execute(query, *more)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._connection, name)


LOCK = "LOCK TABLE"
SNAPSHOT = "SELECT pg_current_snapshot()::text"
INSERT_LSN = "SELECT pg_current_wal_insert_lsn()::text"
EXPORT = "SELECT pg_export_snapshot()"
FLUSH_LSN = "SELECT pg_current_wal_flush_lsn()::text"


def before_the_holders(patch: pytest.MonkeyPatch, **acts: Callable[[], object]) -> list[str]:
    """ErrorAction once before the holder's first statement of a kind (a name of the constants above); gives what was
    done."""
    usual, done = pg.connect, list[str]()

    def before(query: str) -> None:
        for kind, act in acts.items():
            if kind not in done and query.startswith(globals()[kind]):
                done.append(kind)
                act()

    def connect(dsn: str, *, application: str) -> Any:
        connection = usual(dsn, application=application)
        return Hooked(connection, before) if application == "bottledwater snapshot holder" else connection

    patch.setattr(pg, "connect", connect)
    return done


def release_when_waited_for(patch: pytest.MonkeyPatch, transaction: Callable[[], Transaction]) -> list[str]:
    """Release it once a wait for X0 was in vain; gives what that wait said. If nobody waits, it is not released."""
    usual, said = slot.wait_visible, list[str]()

    def wait(connection: Any, oldest_xid: int, *, timeout: float) -> None:
        try:
            usual(connection, oldest_xid, timeout=0.3)
        except Outage as error:
            said.append(str(error))
            transaction().release()
            usual(connection, oldest_xid, timeout=timeout)

    patch.setattr(slot, "wait_visible", wait)
    return said


def blocked_by(flow: Flow, pid: int) -> bool:
    """Whether somebody waits for this session."""
    return bool(flow.execute(f"SELECT 1 FROM pg_stat_activity WHERE {pid} = ANY (pg_blocking_pids(pid))"))


def holder_of(flow: Flow) -> int:
    """The process of the snapshot's holder."""
    found = flow.execute(
        "SELECT pid FROM pg_stat_activity WHERE application_name = 'bottledwater snapshot holder'"
        " AND datname = current_database()"
    )
    return int(found[0][0])


def known(flow: Flow) -> PipelineState:
    """What the state topic says."""
    database = conninfo_to_dict(flow.dsn)["dbname"]
    return read_state(flow.pipeline, store.state_topic_name(str(database), flow.pipeline.slot))


def boundary(flow: Flow, table: str = "a") -> Boundary:
    """A table's boundary."""
    recorded = known(flow)
    (oid,) = (oid for oid, pinned in recorded.tables.items() if pinned.table.name == table)
    return recorded.boundaries[oid]


def insert_lsn(flow: Flow) -> int:
    """Where the WAL ends now."""
    return parse_lsn(flow.execute(INSERT_LSN)[0][0])


def assert_nothing_lost_nothing_twice(flow: Flow, *tables: str) -> None:
    """Topic and table are equal, and no row or change came twice."""
    for table in tables:
        assert flow.compare(table).differences == []
        messages = flow.read(table)
        assert_exactly_once_in_order(messages)
        rows = [m.key["id"] for m in messages if m.op == "r"]
        assert len(rows) == len(set(rows)), "a row of the snapshot comes twice"
        there: set[int] = set()
        for message in messages:
            row = message.key["id"]
            assert not (message.op == "c" and row in there), (
                f"row {row} is in the snapshot and its insert in the stream"
            )
            there = there - {row} if message.op == "d" else there | {row}


def changes(messages: Sequence[Message]) -> list[tuple[str, int]]:
    """What the stream published: kind and id."""
    return [(m.op, m.key["id"]) for m in messages if m.pos]


def half(flow: Flow, ranges: int = 2) -> driver.RunLanes:
    """Lanes of which the first ends after some ranges, and the others do nothing."""

    def run_lanes(tasks: Sequence[LaneTask]) -> list[dict[str, int]]:
        lane.run(flow.pipeline, replace(tasks[0], chunks=tasks[0].chunks[:ranges]))
        raise Outage("The cluster went away.")

    return run_lanes


# ---------------------------------------------------------------------- transactions between record and visibility

HOW = pytest.mark.parametrize("prepared", [False, True], ids=["commit", "commit prepared"])


@contextmanager
def slot_in_phases(flow: Flow, ddl: str = "", make: Callable[[], Any] | None = None) -> Iterator[list[Any]]:
    """Build the slot in three phases; the block runs in the last one, and the slot is consistent after it.

    PostgreSQL waits for those who ran at its last record of running transactions only: the block's are newer.

    :param ddl: commits while the second phase is waited for.
    :param make: makes the slot; None for the one of the pipeline.
    """
    made: list[Any] = []
    with ThreadPoolExecutor(1) as pool, Transaction(flow) as first:
        creating = pool.submit(make or (lambda: create(flow.pipeline)))
        until(lambda: blocked_by(flow, first.pid), "the creation waits for the first")
        with Transaction(flow) as second:
            if ddl:
                flow.execute(ddl)
            first.end()
            until(lambda: blocked_by(flow, second.pid), "the creation waits for the second")
            yield made
            second.end()
        made.append(creating.result(60))


@pytest.mark.parametrize("temporary", [False, True])
def test_only_a_slot_whose_snapshot_is_read_is_not_made_while_a_transaction_has_many_subtransactions(
    make_flow: MakeFlow, temporary: bool
) -> None:
    """An exported snapshot lists those that run, with room for about as many as there may be sessions."""
    flow = make_flow()
    fill(flow, "a")
    blocks = "FOR i IN 11..400 LOOP BEGIN INSERT INTO a VALUES (i); EXCEPTION WHEN others THEN RAISE; END; END LOOP"
    with ExitStack() as ended, connect(flow.dsn) as watcher:

        def make() -> Any:
            if temporary:
                return slot.TemporarySlot(flow.dsn, watcher, timeout=20)
            return slot.create(flow.dsn, watcher, flow.pipeline.slot, timeout=20)

        if temporary:
            ended.enter_context(pytest.raises(Outage, match=r"(?s)subtransactions.*Running: .*many savepoints"))
        with slot_in_phases(flow, make=make) as made:
            ended.enter_context(Transaction(flow, f"DO $$ BEGIN {blocks}; END $$"))
            # a commit with a later id makes all of them a part of the snapshot
            flow.execute("UPDATE a SET n = 0 WHERE id = 1")
        assert made[0] > 0
        assert slot.drop(watcher, flow.pipeline.slot)


@pytest.mark.some(1)
@HOW
def test_a_commit_before_the_slot_that_nobody_sees_yet_is_waited_for(
    make_flow: MakeFlow, monkeypatch: pytest.MonkeyPatch, prepared: bool
) -> None:
    flow = make_flow()
    fill(flow, "a")
    late: list[Transaction] = []
    said = release_when_waited_for(monkeypatch, lambda: late[0])
    with slot_in_phases(flow) as made:
        late.append(Transaction(flow, "INSERT INTO a VALUES (11, 'late', 11)", "UPDATE a SET n = -1 WHERE id = 1"))
        if prepared:
            late[0].prepare()
        late[0].stall()
        recorded_before = insert_lsn(flow)
    with late[0]:
        flow.snapshot()
    assert made[0].consistent_point >= recorded_before, "its record is not before the slot: this proves nothing"
    flow.execute("UPDATE a SET n = 12 WHERE id = 11")
    flow.stream()
    assert_nothing_lost_nothing_twice(flow, "a")
    assert late[0].who() in said[0]
    messages = flow.read("a")
    assert [m.value["n"] for m in messages if m.key["id"] in (1, 11)] == [11, -1, 12]
    assert changes(messages) == [("u", 11)]


@pytest.mark.some(1)
@HOW
@pytest.mark.parametrize("listed", [True, False], ids=["in the snapshot's list", "above its end"])
def test_a_commit_that_stalls_at_the_boundary_is_streamed(make_flow: MakeFlow, prepared: bool, listed: bool) -> None:
    flow = make_flow()
    fill(flow, "a")
    flow.create()
    with Transaction(flow, "INSERT INTO a VALUES (11, 'late', 11)", "DELETE FROM a WHERE id = 1") as late:
        if prepared:
            late.prepare()
        late.stall()
        recorded_before = insert_lsn(flow)
        if listed:
            flow.execute("UPDATE a SET n = 0 WHERE id = 2")
        flow.snapshot()
        drawn = boundary(flow)
        assert (late.xid in drawn.snapshot.running) == listed
        assert late.xid >= drawn.snapshot.xmin
        assert recorded_before <= drawn.insert_lsn
        late.release()
    flow.stream()
    assert_nothing_lost_nothing_twice(flow, "a")
    assert changes(flow.read("a")) == [("c", 11), ("d", 1)]


def test_a_transaction_that_is_prepared_when_the_slot_is_made_is_named_and_then_in_the_snapshot(
    make_flow: MakeFlow,
) -> None:
    flow = make_flow(create_slot_timeout=1.0)
    fill(flow, "a")
    with Transaction(flow, "INSERT INTO a VALUES (11, 'prepared', 11)").prepare() as forgotten:
        with pytest.raises(Outage, match=f"could not be created within 1 s.*{forgotten.who()}"):
            flow.create()
        forgotten.end()
    flow.create()
    flow.snapshot()
    flow.stream()
    assert_nothing_lost_nothing_twice(flow, "a")
    assert changes(flow.read("a")) == []


@pytest.mark.some(1)
@pytest.mark.parametrize(("how", "streamed"), [("COMMIT", [("c", 11), ("u", 1)]), ("ROLLBACK", [])])
def test_a_transaction_that_is_prepared_at_the_boundary_is_streamed_when_it_commits_and_never_when_it_does_not(
    make_flow: MakeFlow, how: str, streamed: list[tuple[str, int]]
) -> None:
    flow = make_flow()
    fill(flow, "a")
    flow.create()
    writes = ("INSERT INTO a VALUES (11, 'prepared', 11)", "UPDATE a SET n = -1 WHERE id = 1")
    with Transaction(flow, *writes).prepare() as pending:
        flow.execute("UPDATE a SET n = 0 WHERE id = 2")
        flow.snapshot()
        assert pending.xid in boundary(flow).snapshot.running
        flow.stream()
        pending.end(how)
    flow.stream()
    assert_nothing_lost_nothing_twice(flow, "a")
    assert changes(flow.read("a")) == streamed


# ---------------------------------------------------------------------- crashes


@pytest.fixture(scope="module")
def fragile(tmp_path_factory: pytest.TempPathFactory) -> Iterator[PostgresServer]:
    """A server that is slow to write what commits asynchronously, and that a test may crash."""
    settings = {"wal_writer_delay": "4s", "full_page_writes": "off", "autovacuum": "off"}
    with PostgresServer(tmp_path_factory.mktemp("fragile"), version=VERSION, settings=settings) as server:
        yield server


def commit_unflushed(flow: Flow, *statements: str) -> int:
    """Commit in one transaction, asynchronously, right after the WAL writer's turn; returns its id."""
    with psycopg.connect(flow.dsn, autocommit=True) as connection:
        connection.execute("SET synchronous_commit = off")
        row = connection.execute("SELECT pg_logical_emit_message(true, 'turn', '')::text").fetchone()
        assert row is not None
        turn = row[0]
        flushed = f"SELECT pg_current_wal_flush_lsn() > '{turn}'"
        until(lambda: connection.execute(flushed).fetchone() == (True,), "the WAL writer's turn")
        # a page of its own: nothing of what follows is written before the next turn
        connection.execute("SELECT pg_switch_wal()")
        with connection.transaction():
            for statement in statements:
                connection.execute(statement)  # type: ignore[arg-type]
            row = connection.execute("SELECT pg_current_xact_id()::text::bigint").fetchone()
        assert row is not None
        return int(row[0])


def crash(server: PostgresServer) -> None:
    """End it as a loss of power would, and start it."""
    server.stop("immediate")
    server.start()


def test_nothing_is_published_that_a_crash_of_the_server_can_undo(
    fragile: PostgresServer, kafka: KafkaBroker, monkeypatch: pytest.MonkeyPatch
) -> None:
    flow = Flow(fragile.createdb("undone"), kafka, None)
    fill(flow, "a")
    flow.create()
    behind: list[bool] = []
    back = threading.Event()

    def write() -> None:
        commit_unflushed(flow, "INSERT INTO a VALUES (11, 'asynchronous', 11)")
        behind.append(flow.execute("SELECT pg_current_wal_flush_lsn() < pg_current_wal_insert_lsn()")[0][0])

    def crashing(tasks: Sequence[LaneTask]) -> list[dict[str, int]]:
        running.in_threads(flow.pipeline)(tasks)
        crash(fragile)
        back.set()
        raise Outage("The server crashed.")

    before_the_holders(monkeypatch, SNAPSHOT=write)
    with pytest.raises(Outage):
        driver.run(flow.pipeline, crashing)
    # the driver may have noticed the crash by itself, before the server is back
    assert back.wait(60)
    assert behind == [True], "the commit was on disk already: this proves nothing"
    flow.snapshot()
    flow.execute("UPDATE a SET n = 0 WHERE id = 1")
    flow.stream()
    assert_nothing_lost_nothing_twice(flow, "a")
    assert changes(flow.read("a")) == [("u", 1)]


def test_a_large_value_is_read_from_nothing_that_a_crash_of_the_server_can_undo(
    fragile: PostgresServer, kafka: KafkaBroker, monkeypatch: pytest.MonkeyPatch
) -> None:
    flow = Flow(fragile.createdb("value"), kafka, None)
    flow.execute(
        "CREATE TABLE w (id int PRIMARY KEY, v int, big text)",
        "ALTER TABLE w ALTER big SET STORAGE EXTERNAL",
        "INSERT INTO w SELECT g, 0, repeat('o', 9000) FROM generate_series(1, 2) g",
    )
    flow.create()
    flow.snapshot()
    flow.execute("UPDATE w SET v = 1")
    fetch, send, done = CurrentRows.fetch, StreamPublisher._send, []

    def fetched(current: CurrentRows, *arguments: Any, **options: Any) -> Cells:
        if not done:
            commit_unflushed(flow, "UPDATE w SET big = repeat('n', 9000) WHERE id = 1", "DELETE FROM w WHERE id = 2")
            done.append("asynchronous")
        return fetch(current, *arguments, **options)

    def sent(publisher: StreamPublisher, encoded: Any) -> None:
        send(publisher, encoded)
        if done == ["asynchronous"]:
            done.append("crash")
            crash(fragile)

    monkeypatch.setattr(CurrentRows, "fetch", fetched)
    monkeypatch.setattr(StreamPublisher, "_send", sent)
    flow.stream()
    flow.execute("INSERT INTO w VALUES (3, 0, 'x')")
    flow.stream()
    assert done == ["asynchronous", "crash"]
    assert flow.compare("w").equal


@pytest.mark.long
def test_a_slice_is_found_by_nothing_that_a_crash_of_the_server_can_undo(
    fragile: PostgresServer, kafka: KafkaBroker, monkeypatch: pytest.MonkeyPatch
) -> None:
    flow = Flow(fragile.createdb("slice"), kafka, None, tables="items")
    flow.execute(
        "CREATE TABLE items (id int PRIMARY KEY, day int)",
        "INSERT INTO items SELECT g, g / 200 FROM generate_series(0, 19999) g",
        "CREATE INDEX ON items (day)",
        "VACUUM ANALYZE items",
    )
    flow.create()
    flow.snapshot()
    flow.stream()
    begin, find, crashed = reading.begin_reading, reading.find, []

    def behind_a_commit(*arguments: Any, **more: Any) -> OwnSnapshot:
        if not crashed:
            commit_unflushed(flow, "UPDATE items SET day = 6 WHERE id = 1100")
        return begin(*arguments, **more)

    def found_before_a_crash(*arguments: Any, **more: Any) -> RowLocations | None:
        found = find(*arguments, **more)
        if not crashed:
            crashed.append(len(found.tids) if found else 0)
            crash(fragile)
        return found

    monkeypatch.setattr(reading, "begin_reading", behind_a_commit)
    monkeypatch.setattr(reading, "find", found_before_a_crash)
    asked = flow.ask("items", where="day = 5")
    flow.stream()
    assert crashed == [199]
    assert flow.execute("SELECT day FROM items WHERE id = 1100") == [(5,)], (
        "the commit was on disk: this proves nothing"
    )
    assert (flow.reported(asked).state, flow.reported(asked).rows) == ("finished", 200)
    drop(flow.pipeline, when="always")


def test_a_boundary_that_a_crash_undid_does_not_filter_those_who_get_its_transaction_ids_again(
    fragile: PostgresServer, kafka: KafkaBroker, monkeypatch: pytest.MonkeyPatch
) -> None:
    flow = Flow(fragile.createdb("reused"), kafka, None)
    fill(flow, "a")
    flow.create()
    undone: list[int] = []

    def write() -> None:
        padding = "SELECT pg_logical_emit_message(true, 'padding', repeat('x', 6000))"
        undone.extend([commit_unflushed(flow, "INSERT INTO a VALUES (11, 'undone', 11)", padding), insert_lsn(flow)])

    with monkeypatch.context() as patch:
        before_the_holders(patch, SNAPSHOT=write, FLUSH_LSN=lambda: crash(fragile))
        with pytest.raises(Outage):
            flow.snapshot()
    assert flow.execute("SELECT count(*) FROM a") == [(10,)]
    # not in the snapshot that is taken now, but visible for the one that the crash ended, and before its L
    with Transaction(flow, "INSERT INTO a VALUES (12, 'again', 12)") as again:
        assert again.xid == undone[0]
        flow.snapshot()
        again.end()
        assert insert_lsn(flow) < undone[1], "it commits behind the old L: this proves nothing"
    flow.stream()
    assert_nothing_lost_nothing_twice(flow, "a")
    assert changes(flow.read("a")) == [("c", 12)]
    drop(flow.pipeline, when="always")


# ---------------------------------------------------------------------- the order of the holder's steps


def test_a_rewrite_that_commits_while_the_holder_opens_does_not_empty_the_snapshot(
    make_flow: MakeFlow, monkeypatch: pytest.MonkeyPatch
) -> None:
    flow = make_flow()
    fill(flow, "a")
    flow.create()
    done = before_the_holders(monkeypatch, LOCK=lambda: flow.execute("ALTER TABLE a ALTER n TYPE bigint"))
    assert flow.snapshot().rows == 10
    assert done == ["LOCK"]
    flow.execute("UPDATE a SET n = 5000000000 WHERE id = 1")
    flow.stream()
    assert_nothing_lost_nothing_twice(flow, "a")
    assert changes(flow.read("a")) == [("u", 1)]


def test_a_rewrite_that_waits_behind_the_holder_gets_its_lock_in_time_and_nothing_is_lost(
    make_flow: MakeFlow, monkeypatch: pytest.MonkeyPatch
) -> None:
    flow = make_flow(lock_queue_limit=0.1)
    fill(flow, "a")
    flow.create()
    altering = threading.Thread(target=flow.execute, args=("ALTER TABLE a ALTER n TYPE bigint",), daemon=True)

    def alter() -> None:
        altering.start()
        until(lambda: blocked_by(flow, holder_of(flow)), "the ALTER waits for the holder")

    with monkeypatch.context() as patch:
        before_the_holders(patch, SNAPSHOT=alter)
        with ThreadPoolExecutor(1) as pool:
            taking = pool.submit(flow.snapshot)
            try:
                # it reads on under a new holder
                taking.result(60)
            finally:
                # whoever waits for the ALTER while the holder waits for him would wait for ever
                flow.execute(
                    "SELECT pg_terminate_backend(pid) FROM pg_stat_activity WHERE datname = current_database()"
                    " AND application_name = 'bottledwater snapshot holder'"
                )
    altering.join(60)
    assert not altering.is_alive()
    flow.execute("UPDATE a SET n = 5000000000 WHERE id = 1")
    flow.stream()
    assert_nothing_lost_nothing_twice(flow, "a")
    assert changes(flow.read("a")) == [("u", 1)]


def test_the_boundary_lies_between_what_commits_before_and_after_each_of_the_holders_steps(
    make_flow: MakeFlow, monkeypatch: pytest.MonkeyPatch
) -> None:
    flow = make_flow()
    fill(flow, "a")
    flow.create()
    steps = ["LOCK", "SNAPSHOT", "INSERT_LSN", "EXPORT", "FLUSH_LSN"]

    def write(row: int) -> Callable[[], object]:
        return lambda: flow.execute(f"INSERT INTO a VALUES ({row}, 'new', 0)", f"UPDATE a SET n = {row} WHERE id = 1")

    done = before_the_holders(monkeypatch, **{step: write(11 + i) for i, step in enumerate(steps)})
    rows = flow.snapshot().rows
    flow.stream()
    assert_nothing_lost_nothing_twice(flow, "a")
    assert (rows, done) == (12, steps)
    # what is before the snapshot is in it; what is before L only, is not
    assert changes(flow.read("a")) == [("c", 13), ("u", 1), ("c", 14), ("u", 1), ("c", 15), ("u", 1)]


def test_an_asynchronous_commit_that_the_snapshot_sees_is_before_the_boundary(
    fragile: PostgresServer, kafka: KafkaBroker, monkeypatch: pytest.MonkeyPatch
) -> None:
    # L is where WAL is inserted, not where it is on disk
    flow = Flow(fragile.createdb("asynchronous"), kafka, None)
    fill(flow, "a")
    flow.create()
    before_the_holders(
        monkeypatch, SNAPSHOT=lambda: commit_unflushed(flow, "INSERT INTO a VALUES (11, 'asynchronous', 11)")
    )
    assert flow.snapshot().rows == 11
    flow.execute("UPDATE a SET n = 0 WHERE id = 1")
    flow.stream()
    assert_nothing_lost_nothing_twice(flow, "a")
    assert changes(flow.read("a")) == [("u", 1)]
    drop(flow.pipeline, when="always")


# ---------------------------------------------------------------------- transaction ids around 2^32


@pytest.fixture(scope="module")
def wrapping(tmp_path_factory: pytest.TempPathFactory) -> Iterator[PostgresServer]:
    """A server that is a few hundred transactions below the end of epoch 2."""
    server = PostgresServer(tmp_path_factory.mktemp("wrapping"), version=VERSION, settings=STALLING)
    with server:
        # rows with an old id would be in the future
        for database in ("postgres", "template1"):
            with psycopg.connect(server.dsn(database), autocommit=True) as connection:
                connection.execute("VACUUM FREEZE")
    following = 2**32 - 400
    # the page of pg_xact that the new ids are on (4 of them in a byte, 32 pages in a file)
    segment = server.data / "pg_xact" / f"{following // (4 * 8192 * 32):04X}"
    segment.write_bytes(bytes(32 * 8192))
    owner = Path(server.data).stat()
    segment.chmod(0o600)
    os.chown(segment, owner.st_uid, owner.st_gid)
    command = [*server._drop_root(), str(programs(server.version) / "pg_resetwal"), "-D", str(server.data)]
    # without -u the oldest id would be in the future, and rows would be pruned too early
    command += ["-x", str(following), "-e", "2", "-u", str(following - 100)]
    run(command, "pg_resetwal", cwd=Path("/"))
    with server:
        yield server


def burn(flow: Flow, following: int) -> None:
    """Use transaction ids up until the next one is this."""
    with psycopg.connect(flow.dsn, autocommit=True) as connection:
        for _ in range(1000):
            row = connection.execute("SELECT pg_current_xact_id()::text::bigint").fetchone()
            assert row is not None
            assert row[0] < following, "it is too late"
            if row[0] == following - 1:
                return
    raise AssertionError("no end of it")


def test_transactions_on_both_sides_of_the_wrap_are_told_apart(wrapping: PostgresServer, kafka: KafkaBroker) -> None:
    dsn = wrapping.createdb("wrap")
    below, above = Flow(dsn, kafka, None, tables=("a",)), Flow(dsn, kafka, None, tables=("a",))
    fill(below, "a")
    below.create()
    above.create()
    end = 3 << 32
    burn(below, end - 2)
    with (
        Transaction(below, "INSERT INTO a VALUES (11, 'last', 11)") as last_but_one,
        Transaction(below, "INSERT INTO a VALUES (12, 'last', 12)") as last,
        # 0 to 2 are never given away
        Transaction(below, "INSERT INTO a VALUES (13, 'first', 13)") as first,
    ):
        assert (last_but_one.xid, last.xid, first.xid) == (end - 2, end - 1, end + 3)
        last_but_one.end()
        # not visible, ahead of L, and of the next epoch
        first.stall()
        below.snapshot()
        assert (boundary(below).snapshot.xmin, boundary(below).snapshot.xmax) == (end - 1, end - 1)
        first.release()
        last.end()
    below.stream()
    # visible, and of the epoch before
    above.snapshot()
    assert boundary(above).snapshot.xmax >= end + 4
    above.execute("UPDATE a SET n = 0 WHERE id = 11")
    for flow, streamed in ((below, [("c", 13), ("c", 12), ("u", 11)]), (above, [("u", 11)])):
        flow.stream()
        assert_nothing_lost_nothing_twice(flow, "a")
        assert changes(flow.read("a")) == streamed


# ---------------------------------------------------------------------- what is filtered, and what is not


def test_a_table_that_the_stream_describes_inside_a_skipped_transaction_only_is_known_afterwards(
    make_flow: MakeFlow,
) -> None:
    flow = make_flow()
    fill(flow, "a", "b")
    flow.create()
    flow.transaction("UPDATE a SET n = 0 WHERE id = 1", "TRUNCATE b", "INSERT INTO b VALUES (1, 'new', 1)")
    flow.snapshot()
    flow.execute("UPDATE a SET n = 0 WHERE id = 2", "DELETE FROM b")
    # the TRUNCATE is before the boundary as the rows are
    assert flow.stream()["events"] == 0
    assert_nothing_lost_nothing_twice(flow, "a", "b")
    assert changes(flow.read("a")) == [("u", 2)]
    assert changes(flow.read("b")) == [("d", 1)]


@contextmanager
def load(flow: Flow, table: str) -> Iterator[None]:
    """A session that changes rows 5 to 10, and adds and removes others, until the block ends."""
    stopped = threading.Event()

    def work() -> None:
        with psycopg.connect(flow.dsn, autocommit=True) as connection:
            number = 1000
            while not stopped.wait(0.005):
                number += 1
                with connection.transaction():
                    connection.execute(f"UPDATE {table} SET n = n + 1 WHERE id = {5 + number % 6}")
                    connection.execute(f"INSERT INTO {table} VALUES ({number}, 'load', 0)")
                    connection.execute(f"DELETE FROM {table} WHERE id = {number - 3}")

    with ThreadPoolExecutor(1) as pool:
        working = pool.submit(work)
        try:
            yield
        finally:
            stopped.set()
    working.result()


@pytest.mark.long
@HOW
def test_a_table_that_is_added_while_somebody_writes_to_it_waits_for_who_wrote_before(
    make_flow: MakeFlow, monkeypatch: pytest.MonkeyPatch, prepared: bool
) -> None:
    flow = make_flow(tables=("a",))
    fill(flow, "a", "b")
    flow.create()
    flow.snapshot()
    # of b, nobody else's changes: whoever comes first tells the server's cache whether b is published
    with load(flow, "a"):
        flow.stream()
        with Transaction(flow, "INSERT INTO b VALUES (11, 'unpublished', 11)", "DELETE FROM b WHERE id = 1") as early:
            if prepared:
                early.prepare()
            flow.change(tables=("a", "b"))
            flow.create()
            with pytest.raises(StateError, match="not complete"):
                flow.stream()
            said = release_when_waited_for(monkeypatch, lambda: early)
            flow.snapshot()
            early.release()
        flow.execute("UPDATE b SET n = 0 WHERE id = 2")
        flow.stream()
    flow.stream()
    assert_nothing_lost_nothing_twice(flow, "a", "b")
    assert early.who() in said[0]
    messages = flow.read("b")
    assert sorted(m.key["id"] for m in messages if m.op == "r") == list(range(2, 12))
    assert changes(messages) == [("u", 2)]


@pytest.mark.long
def test_a_topic_that_held_rows_before_gets_every_change_since_the_slot(make_flow: MakeFlow) -> None:
    flow = make_flow(share_topics=True)
    fill(flow, "a")
    flow.create()
    flow.snapshot()
    flow.stream()
    drop(flow.pipeline, when="always")
    flow.create()
    flow.execute("DELETE FROM a WHERE id = 1", "UPDATE a SET n = 0 WHERE id = 2")
    flow.snapshot()
    flow.execute("UPDATE a SET n = 0 WHERE id = 3")
    flow.stream()
    # the first change is of a row that the second snapshot does not have, and the first had
    assert flow.compare("a").differences == []
    assert changes(flow.read("a")) == [("d", 1), ("u", 2), ("u", 3)]
    assert not boundary(flow).filtered


# ---------------------------------------------------------------------- snapshots that stop, tables that change


def test_a_snapshot_that_is_resumed_with_other_lanes_keeps_plan_and_boundary(make_flow: MakeFlow) -> None:
    flow = make_flow(range_bytes=64 * 1024)
    fill(flow, "a", rows=5000)
    flow.create()
    with pytest.raises(Outage, match="went away"):
        driver.run(flow.pipeline, half(flow))
    before = boundary(flow)
    flow.execute("DELETE FROM a WHERE id % 10 = 0")
    flow.change(lanes=5, range_bytes=128 * 1024)
    result = flow.snapshot()
    assert result.skipped == 2
    assert boundary(flow) == before
    flow.stream()
    assert_nothing_lost_nothing_twice(flow, "a")
    assert sum(op == "d" for op, _ in changes(flow.read("a"))) == 500


def test_a_label_in_a_key_that_is_renamed_before_a_snapshot_is_resumed_leaves_no_keys(make_flow: MakeFlow) -> None:
    flow = make_flow(range_bytes=64 * 1024)
    flow.execute(
        "CREATE TYPE mood AS ENUM ('sad', 'ok')",
        "CREATE TABLE a (m mood, id bigint, name text, PRIMARY KEY (m, id))",
        "INSERT INTO a SELECT 'sad', g, 'row ' || g FROM generate_series(1, 5000) g",
    )
    flow.create()
    with pytest.raises(Outage, match="went away"):
        driver.run(flow.pipeline, half(flow))
    flow.execute(
        "INSERT INTO a SELECT 'ok', g, 'new' FROM generate_series(1, 1000) g",
        "ALTER TYPE mood RENAME VALUE 'sad' TO 'blue'",
    )
    assert flow.snapshot().rows == 6000
    flow.stream()
    assert flow.compare("a").differences == []


def test_rows_that_move_behind_the_planned_end_are_in_the_last_range(make_flow: MakeFlow) -> None:
    flow = make_flow(range_bytes=64 * 1024)
    fill(flow, "a", rows=5000)
    flow.create()
    with pytest.raises(Outage, match="went away"):
        driver.run(flow.pipeline, half(flow))
    # in one statement, so that no version goes where an older one was
    flow.execute(
        "UPDATE a SET name = name || '!'", "INSERT INTO a SELECT g, 'new', 0 FROM generate_series(5001, 6000) g"
    )
    assert flow.snapshot().rows == 6000
    flow.stream()
    assert flow.compare("a").differences == []


def test_rows_that_are_appended_while_the_holder_opens_are_read(
    make_flow: MakeFlow, monkeypatch: pytest.MonkeyPatch
) -> None:
    flow = make_flow(range_bytes=64 * 1024)
    fill(flow, "a", rows=5000)
    flow.create()
    grow = "INSERT INTO a SELECT g, 'new', 0 FROM generate_series(5001, 7000) g"
    shuffle = "UPDATE a SET name = name || '!'"
    before_the_holders(
        monkeypatch,
        LOCK=lambda: flow.execute(grow, shuffle),
        EXPORT=lambda: flow.execute(shuffle, "DELETE FROM a WHERE id < 9"),
    )
    assert flow.snapshot().rows == 7000
    flow.stream()
    assert_nothing_lost_nothing_twice(flow, "a")
    assert len(changes(flow.read("a"))) == 7008


def test_a_truncate_that_waited_behind_a_dying_holder_is_not_taken_for_an_empty_table(make_flow: MakeFlow) -> None:
    flow = make_flow(lanes=1)
    fill(flow, "a")
    flow.create()
    lanes_end: list[BaseException] = []

    def dying(tasks: Sequence[LaneTask]) -> list[dict[str, int]]:
        holder = holder_of(flow)
        truncating = threading.Thread(target=flow.execute, args=("TRUNCATE a",), daemon=True)
        truncating.start()
        until(lambda: blocked_by(flow, holder), "the TRUNCATE waits for the holder")
        with ThreadPoolExecutor(1) as pool:
            reading = pool.submit(running.in_threads(flow.pipeline), tasks)
            queued = (
                "SELECT 1 FROM pg_stat_activity WHERE application_name LIKE 'bottledwater snapshot lane%'"
                " AND wait_event_type = 'Lock' AND datname = current_database()"
            )
            until(lambda: flow.execute(queued), "the lane waits for its lock")
            flow.execute(f"SELECT pg_terminate_backend({holder})")
            truncating.join(60)
            try:
                return reading.result(60)
            except Outage as error:
                lanes_end.append(error)
                raise

    with pytest.raises(Outage):
        driver.run(flow.pipeline, dying)
    # the driver may have noticed by itself, before the lane did
    until(lambda: lanes_end, "the lane ends")
    assert [str(error) for error in lanes_end] == [
        "The session that holds the snapshot has ended. Run the snapshot again: finished ranges are kept."
    ]
    assert not known(flow).complete
    assert not any(key.startswith("progress/") for key in known(flow).raw)
    flow.execute("INSERT INTO a VALUES (1, 'new', 1)")
    assert flow.snapshot().rows == 1
    flow.execute("UPDATE a SET n = 2")
    assert flow.stream()["events"] == 1
    assert flow.compare("a").differences == []


# ---------------------------------------------------------------------- making the slot


class Killed(BaseException):
    """As kill -9 would end it: nothing of ours handles it."""


def test_a_slot_whose_creation_was_killed_is_taken_up_and_waits_for_a_commit_that_it_misses(
    make_flow: MakeFlow, monkeypatch: pytest.MonkeyPatch
) -> None:
    flow = make_flow()
    fill(flow, "a")

    def kill(*_: object) -> int:
        raise Killed

    with monkeypatch.context() as patch, pytest.raises(Killed):
        patch.setattr(slot, "fresh_xid", kill)
        flow.create()
    assert known(flow).slot is None
    flow.execute("INSERT INTO a VALUES (11, 'between', 11)")
    usual, late = slot.advance, list[Transaction]()

    def advance(*args: Any) -> int:
        late.append(Transaction(flow, "INSERT INTO a VALUES (12, 'late', 12)").stall())
        return usual(*args)

    with monkeypatch.context() as patch:
        patch.setattr(slot, "advance", advance)
        recorded = create(flow.pipeline)
    said = release_when_waited_for(monkeypatch, lambda: late[0])
    with late[0]:
        flow.snapshot()
    flow.execute("UPDATE a SET n = 0 WHERE id = 11")
    flow.stream()
    assert_nothing_lost_nothing_twice(flow, "a")
    assert recorded.oldest_xid > late[0].xid
    assert late[0].who() in said[0]
    assert changes(flow.read("a")) == [("u", 11)]


def test_a_table_that_is_truncated_while_the_slot_is_built_is_streamed(make_flow: MakeFlow) -> None:
    flow = make_flow()
    fill(flow, "a")
    with slot_in_phases(flow, ddl="TRUNCATE a"):
        early = Transaction(flow, "INSERT INTO a VALUES (11, 'early', 11)")
        # it is what the first slot cannot read; it has to end for the creation to end
        exists = (
            f"SELECT 1 FROM pg_replication_slots WHERE slot_name = '{flow.pipeline.slot}'"
            " AND confirmed_flush_lsn IS NOT NULL"
        )

        def end() -> None:
            until(lambda: flow.execute(exists), "the slot is consistent")
            early.end()

        ending = threading.Thread(target=end, daemon=True)
        ending.start()
    ending.join(60)
    assert early.ended
    flow.snapshot()
    flow.execute("INSERT INTO a VALUES (12, 'later', 12)")
    flow.stream()
    assert_nothing_lost_nothing_twice(flow, "a")
    assert changes(flow.read("a")) == [("c", 12)]


def test_a_deferrable_key_is_no_key_and_a_change_of_it_cannot_run_over_a_live_row(make_flow: MakeFlow) -> None:
    flow = make_flow()
    flow.execute(
        "CREATE TABLE a (id int PRIMARY KEY DEFERRABLE, name text)", "INSERT INTO a VALUES (1, 'one'), (2, 'two')"
    )
    with pytest.raises(PreflightError, match="its key is DEFERRABLE"):
        flow.create()
    flow.change(allow_unkeyed=True)
    flow.create()
    assert flow.snapshot().rows == 2
    flow.execute("UPDATE a SET id = id + 1", "INSERT INTO a VALUES (1, 'new')")
    flow.stream()
    assert [(m.op, m.key, m.value["name"]) for m in flow.read("a")] == [
        ("r", None, "one"), ("r", None, "two"), ("c", None, "new"),
    ]  # fmt: skip
