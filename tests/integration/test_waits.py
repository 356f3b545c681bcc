"""No wait for PostgreSQL is without a bound, and each ends soon after a stop; nobody waits long for our locks."""

from __future__ import annotations

import re
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import psycopg
import pytest
from psycopg import sql
from psycopg.conninfo import conninfo_to_dict, make_conninfo

import airflow_bottledwater.provision.create as creation
from airflow_bottledwater.errors import BottledWaterError, Outage, Refused, SlotInUse, StopRequested
from airflow_bottledwater.local.kafka import KafkaBroker
from airflow_bottledwater.postgres import connect as connections
from airflow_bottledwater.postgres import locks, replication, slot
from airflow_bottledwater.postgres import snapshot as pg
from airflow_bottledwater.postgres.connect import connect
from airflow_bottledwater.provision import preflight
from airflow_bottledwater.provision.create import create
from airflow_bottledwater.publish.session import PublishSession
from airflow_bottledwater.snapshot import driver, lane
from airflow_bottledwater.snapshot.task import LaneTask
from airflow_bottledwater.stream import engine
from airflow_bottledwater.stream.source import ChangeSource
from tests.support import running
from tests.support.faults import Proxy
from tests.support.paths import Follower
from tests.support.topics import Flow
from tests.support.waiting import until


@pytest.fixture
def direct(database: str, kafka: KafkaBroker) -> Flow:
    """A pipeline with two small tables."""
    flow = Flow(database, kafka, None, create_slot_timeout=20.0)
    for table in "ab":
        flow.execute(
            f"CREATE TABLE {table} (id bigint PRIMARY KEY, n int)",
            f"INSERT INTO {table} SELECT g, g FROM generate_series(1, 10) g",
        )
    return flow


@pytest.fixture
def proxy(database: str) -> Iterator[Proxy]:
    """A proxy in front of PostgreSQL."""
    made = Proxy(int(str(conninfo_to_dict(database)["port"])))
    yield made
    made.mode = "pass"
    made.frozen.clear()
    made.close()


@pytest.fixture
def flow(direct: Flow, proxy: Proxy) -> Flow:
    """The same pipeline, through the proxy."""
    direct.change(postgres=make_conninfo(direct.dsn, port=proxy.port, sslmode="disable", gssencmode="disable"))
    return direct


@contextmanager
def locked(flow: Flow, table: str, mode: str = "ACCESS EXCLUSIVE") -> Iterator[Any]:
    """A session that has a lock."""
    with psycopg.connect(flow.dsn) as connection:
        connection.execute(f"LOCK TABLE {table} IN {mode} MODE")  # type: ignore[arg-type]
        yield connection


def following(flow: Flow, stopped: threading.Event) -> None:
    """Stream until stopped; it counts, too, if that is during a wait."""
    assert isinstance(running.run_stream(flow.pipeline, stopped=stopped), dict)


def snapshotting(flow: Flow, stopped: threading.Event) -> None:
    """Take the snapshot."""
    driver.run(flow.pipeline, running.in_threads(flow.pipeline), stopped=stopped)


def creating(flow: Flow, stopped: threading.Event) -> None:
    """Make the slot."""
    create(flow.pipeline, stopped=stopped)


def waiting_lanes(tasks: Sequence[LaneTask]) -> list[dict[str, int]]:
    """Lanes that are at work for long."""
    time.sleep(60)
    return []


#: where PostgreSQL falls silent: what is done, and before which function's call
SILENT: dict[str, tuple[Callable[[Flow, threading.Event], None], Any, str]] = {
    "create: before it is reached": (creating, preflight, "run"),
    "create: before the catalog is read": (creating, preflight, "check_tables"),
    "create: before the publications": (creating, creation.publication, "create"),
    "create: before the slot": (creating, slot, "create"),
    "create: before the new transaction id": (creating, slot, "fresh_xid"),
    "snapshot: before it is reached": (snapshotting, driver, "Claim"),
    "snapshot: before the locks": (snapshotting, pg.SnapshotExporter, "open"),
    "snapshot: before the flush": (snapshotting, pg.SnapshotExporter, "wait_flushed"),
    "snapshot: while lanes work": (snapshotting, pg.SnapshotExporter, "alive"),
    "stream: before it is reached": (following, running, "begin"),
    "stream: before the slot is checked": (following, ChangeSource, "_connect"),
    "stream: before replication starts": (following, replication.ReplicationStream, "_start"),
    "stream: while it streams": (following, replication.ReplicationStream, "take"),
}


#: the others wait in the same way
_SOON = (
    "create: before the slot",
    "snapshot: while lanes work",
    "stream: before replication starts",
    "stream: while it streams",
)
_OUTAGES = [pytest.param(case, marks=() if case in _SOON else pytest.mark.long) for case in SILENT]


@pytest.fixture
def silent(request: pytest.FixtureRequest, flow: Flow, proxy: Proxy, monkeypatch: pytest.MonkeyPatch) -> Any:
    """Work during which PostgreSQL falls silent; and an event that says that it has."""
    work, place, name = SILENT[request.param]
    if work is not creating:
        flow.create()
    if work is following:
        flow.snapshot()
    if "lanes" in request.param:
        monkeypatch.setattr(running, "in_threads", lambda _: waiting_lanes)
    usual, fell = getattr(place, name), threading.Event()

    def silenced(*args: Any, **options: Any) -> Any:
        proxy.mode = "hang"
        fell.set()
        return usual(*args, **options)

    monkeypatch.setattr(place, name, silenced)
    return work, fell


@pytest.mark.some(2)
@pytest.mark.parametrize("silent", SILENT, indirect=True)
def test_a_stop_is_answered_in_time_although_postgresql_is_silent(flow: Flow, silent: Any) -> None:
    work, fell = silent
    stopped = threading.Event()
    with ThreadPoolExecutor(1) as pool:
        working = pool.submit(work, flow, stopped)
        assert fell.wait(60)
        time.sleep(0.3)
        stopped.set()
        started = time.monotonic()
        try:
            working.result(60)
        except StopRequested:
            pass
        assert time.monotonic() - started < 15


@pytest.mark.some(1)
@pytest.mark.parametrize("silent", _OUTAGES, indirect=True)
def test_a_silent_postgresql_is_an_outage_in_time(flow: Flow, silent: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    for module, name in ((connections, "SILENCE"), (replication, "_SILENCE")):
        monkeypatch.setattr(module, name, 0.3)
    monkeypatch.setattr(connections, "_CONNECT_TIMEOUT", 2)
    flow.change(outage_timeout=1.0)
    work, fell = silent
    with ThreadPoolExecutor(1) as pool:
        working = pool.submit(work, flow, threading.Event())
        assert fell.wait(60)
        started = time.monotonic()
        with pytest.raises(Outage):
            working.result(60)
        assert time.monotonic() - started < 30


@pytest.mark.some(1)
@pytest.mark.parametrize("work", [creating, snapshotting])
def test_a_stop_is_answered_while_others_are_waited_for(
    direct: Flow, work: Callable[[Flow, threading.Event], None]
) -> None:
    if work is snapshotting:
        direct.create()
    stopped, name = threading.Event(), direct.pipeline.slot
    with locked(direct, "b") as blocker, ThreadPoolExecutor(1) as pool:
        if work is creating:
            blocker.rollback()
            blocker.execute("SELECT pg_current_xact_id()")
        working = pool.submit(work, direct, stopped)
        blocked = f"SELECT 1 FROM pg_stat_activity WHERE {blocker.info.backend_pid} = ANY (pg_blocking_pids(pid))"
        until(lambda: direct.execute(blocked), "somebody waits")
        stopped.set()
        started = time.monotonic()
        with pytest.raises(StopRequested):
            working.result(60)
        assert time.monotonic() - started < 15
        # an unfinished slot is given up on the server, too
        until(
            lambda: (
                not direct.execute(
                    "SELECT 1 FROM pg_replication_slots"
                    " WHERE confirmed_flush_lsn IS NULL AND database = current_database()"
                )
            ),
            "it ends",
        )
    work(direct, threading.Event())
    assert direct.execute(f"SELECT count(*) FROM pg_replication_slots WHERE slot_name = '{name}'") == [(1,)]


# ---------------------------------------------------------------------- a half-open connection of the stream


def test_a_replication_connection_that_has_died_unnoticed_is_an_outage(
    database: str, direct: Flow, proxy: Proxy, monkeypatch: pytest.MonkeyPatch
) -> None:
    direct.execute("CREATE PUBLICATION p FOR TABLE a")
    monkeypatch.setattr(replication, "_SILENCE", 0.5)
    follower = Follower(make_conninfo(database, port=proxy.port, sslmode="disable", gssencmode="disable"))
    direct.execute("INSERT INTO a VALUES (100, 1)")
    assert len(follower.changes("json")) == 1
    # while the server says what it is asked for, the connection lives
    for _ in range(20):
        follower.stream.take(0.1)
    proxy.freeze()
    for _ in range(20):
        follower.stream.take(0.1)  # the server still serves it, for all that we know
    direct.execute(
        "SELECT pg_terminate_backend(active_pid) FROM pg_replication_slots WHERE active AND database = "
        "current_database()"
    )
    started = time.monotonic()
    with pytest.raises(Outage, match="no longer serves the job's connection"):
        while time.monotonic() - started < 60:
            follower.stream.take(0.1)
    follower.stream.close()
    follower.connection.close()


def test_connections_are_lost_when_nobody_confirms_what_is_sent(database: str) -> None:
    with connect(database) as connection:
        assert connection.info.get_parameters()["tcp_user_timeout"] == "60000"


# ---------------------------------------------------------------------- locks


@pytest.mark.parametrize("code", ["40P01", "40001", "55P03", "57014", "57P01", "08006", "53300"])
def test_what_passes_by_itself_is_an_outage(code: str) -> None:
    error = psycopg.errors.lookup(code)("some message")
    assert isinstance(connections.outage(error, "Doing something"), Outage)
    assert isinstance(connections.outage(psycopg.errors.InsufficientPrivilege("no"), "Doing"), Refused)


@pytest.mark.parametrize("code", ["22P02", "22012", "23505", "P0001"])
def test_the_message_of_an_error_that_may_quote_a_value_is_not_told(code: str) -> None:
    error = psycopg.errors.lookup(code)('invalid input syntax for type bigint: "secret"')
    told = str(connections.outage(error, "Reading rows"))
    assert "secret" not in told and f"(SQLSTATE {code})" in told and told.startswith("Reading rows: ")


def test_nobody_waits_long_for_a_snapshot_that_waits_for_a_lock(direct: Flow) -> None:
    direct.create()
    longest, ended = 0.0, threading.Event()

    def lock_again_and_again() -> None:
        nonlocal longest
        while not ended.is_set():
            started = time.monotonic()
            with locked(direct, "a"):
                longest = max(longest, time.monotonic() - started)
            time.sleep(0.05)

    with ThreadPoolExecutor(2) as pool, locked(direct, "b") as blocker:
        others = pool.submit(lock_again_and_again)
        try:
            direct.change(create_slot_timeout=8.0)
            with pytest.raises(
                Outage,
                match=rf"did not get a lock on every table within 8 s.*session {blocker.info.backend_pid} "
                r".*on public.b",
            ):
                direct.snapshot()
        finally:
            ended.set()
        others.result(60)
        # all locks are given back after about a second, not when it gives up
        assert 0.2 < longest < 5.0
        taking = pool.submit(direct.snapshot)
        time.sleep(1.5)
        blocker.rollback()
        assert taking.result(60).rows == 20


@pytest.mark.parametrize("stops", [False, True])
def test_a_snapshot_waits_for_a_reindex_and_a_stop_is_answered(
    direct: Flow, monkeypatch: pytest.MonkeyPatch, stops: bool
) -> None:
    """Nobody waits behind a lane that waits for an index."""
    direct.create()
    direct.change(lock_queue_limit=1.0)
    monkeypatch.setattr(lane, "_LATER", 0.0)
    stopped = threading.Event()
    with psycopg.connect(direct.dsn) as reindexing, ThreadPoolExecutor(1) as pool:
        reindexing.execute("REINDEX TABLE a")
        working = pool.submit(snapshotting, direct, stopped)
        waits = "SELECT 1 FROM pg_locks WHERE NOT granted AND relation = 'a_pkey'::regclass"
        until(lambda: direct.execute(waits) or working.done(), "a lane waits for the index")
        time.sleep(3)
        assert not working.done(), working.exception()
        if stops:
            stopped.set()
            with pytest.raises(StopRequested):
                working.result(60)
        reindexing.commit()
        if not stops:
            working.result(60)
            assert len(direct.read("a")) == 10


def test_a_lane_does_not_wait_for_ever_behind_who_waits_for_the_holder(
    direct: Flow, monkeypatch: pytest.MonkeyPatch
) -> None:
    direct.create()
    direct.change(lock_queue_limit=1.0)
    # usually the driver is first to notice
    monkeypatch.setattr(lane, "_LATER", 0.0)
    monkeypatch.setattr(pg.SnapshotExporter, "waiting_behind", lambda _: [])

    def lanes(tasks: Sequence[LaneTask]) -> list[dict[str, int]]:
        with ThreadPoolExecutor(1) as pool:
            waiting = pool.submit(direct.execute, "ALTER TABLE a ADD extra int")
            until(lambda: direct.execute("SELECT 1 FROM pg_locks WHERE NOT granted"), "the ALTER waits")
            started = time.monotonic()
            try:
                return [lane.run(direct.pipeline, task) for task in tasks]
            finally:
                assert time.monotonic() - started < 20
                direct.execute(
                    "SELECT pg_terminate_backend(pid) FROM pg_stat_activity WHERE datname = current_database()"
                    " AND application_name = 'bottledwater snapshot holder'"
                )
                waiting.result(60)

    with pytest.raises(
        Outage, match=r"A lane of the snapshot did not get a lock on public.a within 1 s.*active, since .*, ALTER …"
    ):
        driver.run(direct.pipeline, lanes)


@pytest.mark.some(1)
@pytest.mark.parametrize("added", [False, True])
def test_publishing_does_not_wait_for_ever_behind_a_vacuum(direct: Flow, added: bool) -> None:
    if added:
        direct.change(tables=("a",))
        direct.create()
    with locked(direct, "b", "SHARE UPDATE EXCLUSIVE") as vacuum, ThreadPoolExecutor(1) as pool:
        direct.change(tables=("a", "b"), create_slot_timeout=1.5)
        started = time.monotonic()
        with pytest.raises(Outage, match=rf"session {vacuum.info.backend_pid} .*ShareUpdateExclusiveLock on public.b"):
            direct.create()
        assert time.monotonic() - started < 30
        direct.change(create_slot_timeout=20.0)
        creation = pool.submit(direct.create)
        time.sleep(1.5)
        # others are not kept from their work meanwhile
        direct.execute(
            "SET statement_timeout = '10s'", "VACUUM a", "INSERT INTO b VALUES (20, 1)", "ALTER TABLE a ADD x int"
        )
        vacuum.rollback()
        creation.result(60)


def test_sessions_are_named_without_the_values_in_their_statements(direct: Flow) -> None:
    with locked(direct, "a", "ROW EXCLUSIVE") as writing, psycopg.connect(direct.dsn) as other:
        writing.execute("UPDATE a SET n = 1 WHERE 'SECRET' <> ''")
        pid, waiting = writing.info.backend_pid, other.info.backend_pid
        with ThreadPoolExecutor(1) as pool, connect(direct.dsn) as watcher:
            altering = pool.submit(other.execute, "ALTER TABLE a ALTER n SET DEFAULT length('SECRET')")
            until(lambda: direct.execute(f"SELECT pg_blocking_pids({waiting}) <> '{{}}'") == [(True,)], "it waits")
            (oid,) = direct.execute("SELECT 'a'::regclass::oid")[0]
            found = [
                *locks.holders(watcher, [oid], ("RowExclusiveLock", "AccessExclusiveLock")),
                *pg.SnapshotExporter.waiting_behind(SimpleNamespace(_dsn=direct.dsn, pid=pid)),  # type: ignore[arg-type]
                *slot.blockers(watcher),
            ]
            writing.rollback()
            altering.result(60)
    who = rf"session {pid} \(postgres@\w+, no application name, idle in transaction, since [\d:]+, UPDATE …\)"
    assert re.fullmatch(rf"{who} \(has RowExclusiveLock on public\.a\)", found[0])
    assert found[1].startswith(f"session {waiting} ") and found[1].endswith(
        "ALTER …) (waits for AccessExclusiveLock on public.a)"
    )
    assert found[2].startswith(f"session {waiting} ")
    assert any(re.fullmatch(who, each) for each in found[3:])
    assert "SECRET" not in str(found)


def test_a_locked_table_does_not_keep_the_stream_from_starting(direct: Flow) -> None:
    direct.create()
    direct.snapshot()
    direct.execute("INSERT INTO a VALUES (100, 1)", "INSERT INTO b VALUES (100, 1)")
    with ThreadPoolExecutor(1) as pool, locked(direct, "a"):
        streaming = pool.submit(direct.stream)
        assert streaming.result(60)["published"] == 2
        assert len(pool.submit(preflight.run, direct.pipeline).result(60).tables) == 2


# ---------------------------------------------------------------------- ranges that are read slowly


def slow(monkeypatch: pytest.MonkeyPatch, condition: str) -> None:
    """COPY takes long over what the condition says."""
    usual = pg.copy_query

    def query(*args: Any) -> sql.SQL:
        return sql.SQL(usual(*args).as_string(None).replace(") TO STDOUT", f" AND ({condition})) TO STDOUT"))

    monkeypatch.setattr(pg, "copy_query", query)


def transactions(monkeypatch: pytest.MonkeyPatch, most: float) -> list[float]:
    """How long each Kafka transaction of the lanes took; one that takes longer than ``most`` ends the snapshot."""
    usual, seconds = PublishSession.transact, list[float]()

    def send(*args: Any) -> None:
        started = time.monotonic()
        try:
            usual(*args)
        finally:
            seconds.append(time.monotonic() - started)
            assert seconds[-1] < most

    monkeypatch.setattr(PublishSession, "transact", send)
    return seconds


@pytest.mark.long
@pytest.mark.parametrize("visible", ["none", "the first", "the last"])
def test_blocks_without_a_visible_row_do_not_outlive_a_transaction(
    direct: Flow, monkeypatch: pytest.MonkeyPatch, visible: str
) -> None:
    direct.change(tables=("a",), lanes=1, transaction_timeout=2.0)
    direct.execute("TRUNCATE a", "INSERT INTO a SELECT g, g FROM generate_series(1, 1600) g")
    direct.create()
    # more than PostgreSQL keeps back before it sends (8 KiB), so that a transaction is open
    rows = {"none": [], "the first": list(range(1, 801)), "the last": list(range(801, 1601))}[visible]
    low, high = (rows[0], rows[-1]) if rows else (0, 0)
    slow(monkeypatch, f"id BETWEEN {low} AND {high} OR (SELECT pg_sleep(0.005 + id * 0)) IS NULL")
    seconds = transactions(monkeypatch, 1.9)
    assert direct.snapshot().rows == len(rows)
    assert sorted(m.key["id"] for m in direct.read("a")) == rows
    # the range was split where its rows had come and its time went by
    assert (len(seconds) > 1) == (visible == "the first")


def test_a_table_that_has_grown_since_the_slot_was_made_is_split_by_its_real_size(
    direct: Flow, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    direct.change(tables=("a",), lanes=1, transaction_timeout=2.0)
    direct.execute("TRUNCATE a")
    direct.create()
    direct.execute("INSERT INTO a SELECT g, g FROM generate_series(1, 5000) g")
    # more than one transaction's time
    slow(monkeypatch, "id % 10 > 0 OR (SELECT pg_sleep(0.003 + id * 0)) IS NOT NULL")
    assert direct.snapshot().rows == 5000
    splits = [r.getMessage() for r in caplog.records if "is split at block" in r.getMessage()]
    assert 1 <= len(splits) <= 10
    assert sorted(m.key["id"] for m in direct.read("a")) == list(range(1, 5001))


# ---------------------------------------------------------------------- slots that cannot be used (yet)


def test_a_slot_that_is_being_created_is_not_called_lost(direct: Flow) -> None:
    name = direct.pipeline.slot
    with psycopg.connect(direct.dsn) as blocker, ThreadPoolExecutor(1) as pool:
        blocker.execute("SELECT pg_current_xact_id()")
        first = pool.submit(direct.create)
        until(
            lambda: direct.execute(f"SELECT 1 FROM pg_replication_slots WHERE slot_name = '{name}'"), "the slot appears"
        )
        with pytest.raises(SlotInUse, match=r"is being created by process .* waits for running transactions") as raised:
            create(direct.pipeline)
        # what the message advises
        pid = str(raised.value).partition("pg_terminate_backend(")[2].partition(")")[0]
        direct.execute(f"SELECT pg_terminate_backend({pid})")
        with pytest.raises(BottledWaterError):
            first.result(60)
        assert not direct.execute(f"SELECT 1 FROM pg_replication_slots WHERE slot_name = '{name}'")
        blocker.rollback()
    direct.create()
    direct.snapshot()


def test_a_slot_that_gives_prepared_transactions_is_refused(direct: Flow) -> None:
    name = direct.pipeline.slot
    direct.execute(f"SELECT pg_create_logical_replication_slot('{name}', 'pgoutput', false, true)")
    direct.change(adopt_slot=True)
    with pytest.raises(BottledWaterError, match="has two_phase: it gives a transaction when it is prepared"):
        direct.create()
    direct.execute(f"SELECT pg_drop_replication_slot('{name}')")
    direct.create()


@pytest.mark.parametrize("by_stream", [False, True], ids=["by hand", "by the stream"])
def test_a_table_cannot_be_added_while_the_stream_is_inside_a_transaction(direct: Flow, by_stream: bool) -> None:
    direct.change(tables=("a",), skip_snapshot=True, max_transaction_bytes=64 * 1024, batch_bytes=64 * 1024)
    direct.create()
    direct.execute("INSERT INTO a SELECT g, g FROM generate_series(101, 6100) g")
    stopped, usual = threading.Event(), engine.StreamPublisher.publish

    def publish(*args: Any) -> Any:
        position = usual(*args)
        stopped.set()
        return position

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(engine.StreamPublisher, "publish", publish)
        running.run_stream(direct.pipeline, stopped=stopped)
    before = direct.execute("SELECT pubname, tablename FROM pg_publication_tables ORDER BY 1, 2")
    direct.change(tables=("a", "b"), new_tables="ignore")
    with pytest.raises(Refused, match=r"stopped inside a large transaction.*public.b cannot be added there"):
        direct.create()
    assert direct.execute("SELECT pubname, tablename FROM pg_publication_tables ORDER BY 1, 2") == before
    if by_stream:
        # it takes a new table in by itself, behind the transaction
        direct.change(new_tables="add")
        direct.create()
        assert direct.execute("SELECT pubname, tablename FROM pg_publication_tables ORDER BY 1, 2") == before
        direct.stream()
        assert direct.compare("b").equal and len(direct.read("a")) == 6000
        return
    # what the message advises: the stream goes on, with the tables as they are
    direct.change(tables=("a",))
    direct.create()
    direct.stream()
    direct.change(tables=("a", "b"))
    direct.create()
    direct.execute("INSERT INTO b VALUES (100, 1)")
    direct.stream()
    assert [m.key["id"] for m in direct.read("b")] == [100]
    assert len(direct.read("a")) == 6000


def test_only_who_has_the_slot_is_terminated(direct: Flow, monkeypatch: pytest.MonkeyPatch) -> None:
    direct.create()
    name = direct.pipeline.slot
    with connect(direct.dsn) as connection, psycopg.connect(direct.dsn, autocommit=True) as stranger:
        found = slot.state(connection, name)
        assert found is not None
        # the reader has ended, and its process id was given to somebody else before we act on it
        stale = replace(found, active_pid=stranger.info.backend_pid)
        with monkeypatch.context() as patch:
            patch.setattr(slot, "state", lambda *_: stale)
            with pytest.raises(SlotInUse):
                slot.release(connection, name, timeout=0.5)
        assert stranger.execute("SELECT 1").fetchone() == (1,)


@pytest.mark.parametrize(("configured", "used"), [("0", "1min"), ("90s", "90s"), ("20s", "20s")])
def test_the_server_notices_a_job_that_is_gone_also_where_it_is_told_not_to(
    direct: Flow, configured: str, used: str
) -> None:
    dsn = make_conninfo(direct.dsn, options=f"-c wal_sender_timeout={configured}")
    with connect(dsn, replication=True) as connection:
        assert connection.execute("SHOW wal_sender_timeout").fetchone() == (used,)


def test_no_time_out_of_a_role_or_a_database_ends_a_session(direct: Flow) -> None:
    known = (
        "SELECT name, setting FROM pg_settings WHERE name LIKE '%timeout' AND context = 'user'"
        " AND name NOT IN ('tcp_user_timeout', 'wal_sender_timeout')"
    )
    options = " ".join(f"-c {name}=200" for name, _ in direct.execute(known))
    with connect(make_conninfo(direct.dsn, options=options)) as connection:
        time.sleep(1)  # as the verification's own session is while its tasks read
        assert {setting for _, setting in connection.execute(known)} == {"0"}  # type: ignore[arg-type]
