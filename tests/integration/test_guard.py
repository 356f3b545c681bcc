"""The guard, under real pressure: it acts, each step can be seen, and nothing is lost."""

from __future__ import annotations

import subprocess
import threading
import time
import uuid
from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any

import psycopg
import pytest
from psycopg.conninfo import conninfo_to_dict, make_conninfo

from airflow_bottledwater.errors import BottledWaterError, SlotError
from airflow_bottledwater.guard import guard, standbys
from airflow_bottledwater.jobs import snapshots
from airflow_bottledwater.local.kafka import KafkaBroker
from airflow_bottledwater.local.postgres import PostgresServer, programs
from airflow_bottledwater.metrics.source import SourceLook
from airflow_bottledwater.postgres import watch
from airflow_bottledwater.postgres.pressure import drop_cost
from airflow_bottledwater.snapshot import lane
from airflow_bottledwater.snapshot.driver import _SnapshotDriver
from airflow_bottledwater.snapshot.task import SnapshotChunk, SnapshotResult
from airflow_bottledwater.state.control_records import StatusRecord
from airflow_bottledwater.stream.publisher import StreamPublisher
from tests.support.faults import Pooler
from tests.support.topics import Flow, MakeFlow
from tests.support.waiting import until

ROWS = 20_000


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(watch, "_INTERVAL", 0.2)
    monkeypatch.setattr(guard, "_READING", 0.2)
    monkeypatch.setattr(guard, "_ELSE", 0.2)
    monkeypatch.setattr(guard, "_REST", 1.0)


@pytest.fixture
def flow_settings() -> dict[str, Any]:
    return {"tables": "a", "range_bytes": 65536, "lanes": 2}


@pytest.fixture
def flow_statements() -> tuple[str, ...]:
    return (
        "CREATE TABLE a (id int PRIMARY KEY, n int, name text)",
        f"INSERT INTO a SELECT g, 0, 'row ' || g FROM generate_series(1, {ROWS}) g",
    )


@contextmanager
def behind_a_proxy(flow: Flow) -> Iterator[Flow]:
    """The pipeline, through a proxy that tells process ids of its own: who waits for whom is to be seen as well."""
    with closing(Pooler(int(str(conninfo_to_dict(flow.dsn)["port"])))) as proxy:
        flow.change(postgres=make_conninfo(flow.dsn, port=proxy.port, sslmode="disable", gssencmode="disable"))
        yield flow
        flow.change(postgres=flow.dsn)


def job(flow: Flow) -> StatusRecord:
    found = flow.job
    assert found is not None
    return found


def steps(flow: Flow) -> list[tuple[str, str]]:
    return [(each.limit, each.step) for each in job(flow).guard]


@contextmanager
def slow_lanes(monkeypatch: pytest.MonkeyPatch) -> Iterator[threading.Event]:
    """Lanes that rest for two seconds behind each range, until the event is set."""
    fast, read = threading.Event(), lane._Lane._read

    def slowly(self: lane._Lane, chunk: SnapshotChunk) -> None:
        read(self, chunk)
        fast.wait(2.0)

    with monkeypatch.context() as patch:
        patch.setattr(lane._Lane, "_read", slowly)
        yield fast
        fast.set()


@contextmanager
def snapshotting(flow: Flow) -> Iterator[list[SnapshotResult | BaseException]]:
    """Take the snapshot beside the block; gives its result when it is over."""
    results = list[SnapshotResult | BaseException]()

    def work() -> None:
        try:
            results.append(flow.snapshot())
        except BaseException as error:
            results.append(error)

    taking = threading.Thread(target=work, daemon=True)
    taking.start()
    until(lambda: flow.state == "snapshot" and job(flow).progress.get("ranges_done"), "it reads", failed=results)
    yield results
    taking.join(120)
    assert not taking.is_alive()


def nothing_is_lost(flow: Flow) -> None:
    flow.execute("UPDATE a SET n = n + 1 WHERE id % 100 = 0", "DELETE FROM a WHERE id % 100 = 1")
    flow.stream()
    assert flow.compare("a").differences == []


# ---------------------------------------------------------------------- the first snapshot
def test_who_waits_behind_the_snapshots_locks_gets_them_and_the_same_job_reads_on(
    make_flow: MakeFlow, monkeypatch: pytest.MonkeyPatch
) -> None:
    flow = make_flow(lock_queue_limit=1.0)
    flow.create()
    with slow_lanes(monkeypatch) as fast, behind_a_proxy(flow), snapshotting(flow) as results:
        with psycopg.connect(flow.dsn) as other:
            began = time.monotonic()
            other.execute("LOCK TABLE a IN ACCESS EXCLUSIVE MODE")
            assert time.monotonic() - began < 30
            other.execute("UPDATE a SET n = 1000")
        until(lambda: ("locks", "renewed") in steps(flow), "the status has it", failed=results)
        fast.set()
    (result,) = results
    assert isinstance(result, SnapshotResult), result
    # what was published under the first snapshot was not read again, but for rows that were moved behind it
    rows = [m.value["n"] for m in flow.read("a")]
    assert set(rows) == {0, 1000} and ROWS <= result.rows == len(rows) < 2 * ROWS
    assert job(flow).state == "finished" and job(flow).job.epoch == 2
    nothing_is_lost(flow)


@pytest.mark.long
def test_a_snapshot_gives_up_an_old_xmin_and_reads_on_under_a_new_one(
    make_flow: MakeFlow, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    flow = make_flow(guard_xmin_age=300)
    flow.create()
    held = "SELECT max(age(backend_xmin)) FROM pg_stat_activity WHERE application_name = 'bottledwater snapshot holder'"
    with slow_lanes(monkeypatch) as fast, snapshotting(flow) as results:
        for n in range(400):
            flow.execute(f"UPDATE a SET n = n + 1 WHERE id = {n * 40 + 1}")
        until(lambda: ("xmin", "renewed") in steps(flow), "it is given up", failed=results)
        until(lambda: (flow.execute(held)[0][0] or 0) < 300, "it is held no more")
        fast.set()
    assert isinstance(results[0], SnapshotResult), results
    assert "(guard_xmin_age): VACUUM removes nothing" in caplog.text
    nothing_is_lost(flow)


@pytest.mark.long
def test_a_table_without_a_key_keeps_its_snapshot(make_flow: MakeFlow, monkeypatch: pytest.MonkeyPatch) -> None:
    """What is left of it could not be read under another one."""
    flow = make_flow(guard_xmin_age=50, allow_unkeyed=True)
    flow.execute("ALTER TABLE a DROP CONSTRAINT a_pkey")
    flow.create()
    with slow_lanes(monkeypatch) as fast, snapshotting(flow) as results:
        for n in range(100):
            flow.execute(f"INSERT INTO a VALUES ({ROWS + n + 1})")
        until(lambda: "without a key" in str(job(flow).problems), "it is told", failed=results)
        assert job(flow).pressure["xmin"] >= 1 and steps(flow) == []
        fast.set()
    assert isinstance(results[0], SnapshotResult) and results[0].rows == ROWS
    flow.stream()
    assert sorted(m.value["id"] for m in flow.read("a")) == list(range(1, ROWS + 101))


@pytest.mark.long
def test_a_snapshot_that_gets_nowhere_between_those_who_wait_ends(
    make_flow: MakeFlow, monkeypatch: pytest.MonkeyPatch
) -> None:
    """No range is finished under any of its snapshots."""
    flow = make_flow(lock_queue_limit=0.1)
    flow.create()
    over = threading.Event()

    def nothing(self: lane._Lane, chunk: SnapshotChunk) -> None:
        over.wait(2.0)
        raise BottledWaterError("The lane is too late.")

    def lock() -> None:
        while not over.is_set():
            flow.transaction("LOCK TABLE a IN ACCESS EXCLUSIVE MODE")
            time.sleep(0.05)

    locking = threading.Thread(target=lock, daemon=True)
    with monkeypatch.context() as patch:
        patch.setattr(lane._Lane, "_read", nothing)
        locking.start()
        with pytest.raises(BottledWaterError, match="locks blocked others for 0 s"):
            flow.snapshot()
    over.set()
    locking.join(60)
    assert steps(flow) == [("locks", "renewed")] * 3 + [("locks", "stopped")]
    assert job(flow).failed and not job(flow).permanent
    flow.snapshot()
    nothing_is_lost(flow)


def test_the_guard_still_sees_the_source_while_topics_are_swept(
    make_flow: MakeFlow, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The session that held the snapshot is closed by then."""
    flow = make_flow()
    flow.create()
    seen = list[object]()
    monkeypatch.setattr(
        _SnapshotDriver, "_sweep", lambda self, _: seen.append(self._guard._source.ask(self._guard._look))
    )
    flow.snapshot()
    assert seen and seen[0] is not None


@pytest.mark.parametrize("how", ["dropped", "lost"])
def test_a_snapshot_whose_slot_is_gone_is_not_read_to_its_end(
    kafka: KafkaBroker,
    small_server: PostgresServer,
    flow_settings: dict[str, Any],
    flow_statements: tuple[str, ...],
    monkeypatch: pytest.MonkeyPatch,
    how: str,
) -> None:
    """The stream would refuse that slot hours later."""
    flow = Flow(small_server.createdb(f"d{uuid.uuid4().hex[:8]}"), kafka, None, **flow_settings)
    flow.execute(*flow_statements)
    flow.create()
    drop_slot = f"SELECT pg_drop_replication_slot('{flow.pipeline.slot}')"
    with slow_lanes(monkeypatch), snapshotting(flow) as results:
        if how == "dropped":
            flow.execute(drop_slot)
        else:
            for n in range(6):
                flow.execute(f"CREATE TABLE w{n} ()", "SELECT pg_switch_wal()")
            flow.execute("CHECKPOINT")
        until(lambda: results, "it ends")
        ranges = job(flow).progress
        assert ranges["ranges_done"] < ranges["ranges"]
    assert isinstance(results[0], SlotError)
    assert ("does not exist any more" if how == "dropped" else "was invalidated") in str(results[0])
    if how == "lost":
        flow.execute(drop_slot)


# ---------------------------------------------------------------------- live snapshots and WAL
@contextmanager
def slow_stream(monkeypatch: pytest.MonkeyPatch) -> Iterator[threading.Event]:
    """A stream that takes a second for each batch of 64 kB, until the event is set."""
    fast, publish = threading.Event(), StreamPublisher.publish

    def slowly(self: StreamPublisher, *arguments: Any) -> Any:
        fast.wait(1.0)
        return publish(self, *arguments)

    with monkeypatch.context() as patch:
        patch.setattr(StreamPublisher, "publish", slowly)
        yield fast
        fast.set()


def fill(flow: Flow, rows: int = 1000) -> None:
    """Write some megabytes of WAL."""
    for first in range(1, 5 * rows, rows):
        flow.execute(
            f"UPDATE a SET n = n + 1, name = repeat(md5(id::text), 20) WHERE id BETWEEN {first} AND {first + rows}"
        )


def begun(make_flow: MakeFlow, **settings: Any) -> Flow:
    flow = make_flow(batch_bytes=65536, max_transaction_bytes=65536, **settings)
    flow.create()
    flow.snapshot()
    flow.stream()
    return flow


def test_live_snapshots_rest_while_the_stream_is_far_behind(
    make_flow: MakeFlow, monkeypatch: pytest.MonkeyPatch
) -> None:
    flow = begun(make_flow, guard_wal_bytes=2 << 20)
    with slow_stream(monkeypatch) as fast, flow.streaming() as errors:
        flow.streams()
        fill(flow)
        until(lambda: ("wal", "rested") in steps(flow), "it rests", failed=errors)
        request_id = flow.ask("a")
        until(lambda: flow.reported(request_id).state == "waiting", "it waits", failed=errors)
        assert "of WAL for slot" in flow.reported(request_id).what
        assert any(each.kind == "guard-rests" for each in job(flow).problems) and job(flow).pressure["wal"] > 1
        fast.set()
        flow.execute("CHECKPOINT")
        until(lambda: flow.reported(request_id).state == "finished", "it ends", failed=errors)
        until(lambda: not job(flow).problems, "nothing is wrong any more", failed=errors)
    assert flow.compare("a").differences == []


@pytest.mark.long
def test_wal_that_an_open_transaction_holds_is_told_and_nothing_rests(make_flow: MakeFlow) -> None:
    flow = begun(make_flow, guard_wal_bytes=2 << 20)
    with psycopg.connect(flow.dsn) as open_transaction, flow.streaming() as errors:
        open_transaction.execute("INSERT INTO a VALUES (-1)")
        flow.streams()
        fill(flow)
        until(lambda: "an open transaction holds it" in str(job(flow).problems), "it is told", failed=errors)
        request_id = flow.ask("a")
        until(lambda: begun_to_read(flow, request_id), "it is read, or waits for the transaction", failed=errors)


def begun_to_read(flow: Flow, request_id: str) -> bool:
    """Whether a live snapshot has its snapshot: it may have to wait for the end of transactions that are older."""
    found = flow.reported(request_id)
    return found.state in ("reading", "finished") or "that are older than it" in found.what


def test_a_live_snapshot_gives_its_locks_to_who_waits(make_flow: MakeFlow) -> None:
    flow = begun(make_flow, lock_queue_limit=0.5)
    with behind_a_proxy(flow), flow.streaming() as errors:
        flow.streams()
        # a condition that takes long
        request_id = flow.ask("a", where="pg_sleep(0.01) IS NOT NULL")
        copies = "SELECT 1 FROM pg_stat_activity WHERE state = 'active' AND query LIKE 'COPY%pg_sleep%'"
        until(lambda: flow.execute(copies), "it reads, and has its lock", failed=errors)
        until(lambda: job(flow).pressure, "it is guarded", failed=errors)
        # the condition alone takes minutes
        flow.execute("SET lock_timeout = '60s'", "ALTER TABLE a ADD more int")
        until(lambda: ("locks", "rested") in steps(flow), "the status has it", failed=errors)
        snapshots_cancelled(flow, request_id)


def snapshots_cancelled(flow: Flow, request_id: str) -> None:
    snapshots.change(flow.pipeline, flow.name, request_id, cancelled=True)
    until(lambda: flow.reported(request_id).ended, "it is cancelled")


def test_the_slot_is_dropped_only_where_a_setting_says_so_and_what_it_costs_is_said_before(
    make_flow: MakeFlow, monkeypatch: pytest.MonkeyPatch
) -> None:
    flow = begun(make_flow, drop_slot_wal_bytes=16 << 20)
    slots = f"SELECT 1 FROM pg_replication_slots WHERE slot_name = '{flow.pipeline.slot}'"
    with slow_stream(monkeypatch), flow.streaming() as errors:
        flow.streams()
        for _ in range(40):
            fill(flow)
            if any(each.kind == "guard-drops" for each in job(flow).problems):
                break
        (told,) = [each for each in job(flow).problems if each.kind == "guard-drops"]
        # by now it may be dropped already
        assert "the slot is dropped; " in told.reason and "are kept now" in told.reason
        assert "a new snapshot reads 1 table (" in told.remedy
        while not errors:
            fill(flow)
        until(lambda: not flow.execute(slots), "it is dropped")
    (error,) = errors
    assert isinstance(error, SlotError) and "are never sent, and a new snapshot reads 1 table (" in str(error)
    assert ("wal", "dropped") in steps(flow) and job(flow).permanent and "never sent" in job(flow).error
    with pytest.raises(BottledWaterError, match=flow.pipeline.slot):
        flow.stream()


def test_a_locked_table_hides_nothing_from_the_guard(make_flow: MakeFlow) -> None:
    """PostgreSQL measures a table under a lock, which it does not get while the table is rewritten."""
    flow = make_flow()
    ((oid,),) = flow.execute("SELECT 'a'::regclass::oid::bigint")
    with closing(SourceLook(flow.dsn, flow.pipeline.slot)) as source, psycopg.connect(flow.dsn) as other:
        other.execute("LOCK TABLE a IN ACCESS EXCLUSIVE MODE")
        found = source.ask(lambda connection: drop_cost(connection, flow.pipeline.slot, [oid]))
        assert found is not None and "reads 1 table (one is locked, so their size is not known)" in str(found)
        other.rollback()
        found = source.ask(lambda connection: drop_cost(connection, flow.pipeline.slot, [oid]))
        assert found is not None and found.table_bytes


# ---------------------------------------------------------------------- standbys
@pytest.mark.long
def test_reading_rests_for_a_standby_that_falls_behind_meanwhile(
    tmp_path: Path, kafka: KafkaBroker, monkeypatch: pytest.MonkeyPatch
) -> None:
    with PostgresServer(tmp_path / "primary") as primary:
        subprocess.run(
            [programs("16") / "pg_basebackup", "-D", tmp_path / "standby" / "data", "-R", "-d", primary.dsn()],
            check=True,
        )
        subprocess.run(["chown", "-R", "--reference", primary.data, tmp_path / "standby"], check=True)
        with PostgresServer(tmp_path / "standby") as standby:
            flow = Flow(primary.createdb("shop"), kafka, None, tables="a", range_bytes=65536, guard_replica_lag=1.0)
            flow.execute(
                "CREATE TABLE a (id int PRIMARY KEY, n int, name text)",
                f"INSERT INTO a SELECT g, 0, 'row ' || g FROM generate_series(1, {ROWS}) g",
            )
            flow.create()
            with (
                slow_lanes(monkeypatch) as fast,
                snapshotting(flow) as results,
                psycopg.connect(standby.dsn(), autocommit=True) as other,
            ):
                other.execute("SELECT pg_wal_replay_pause()")
                flow.execute("UPDATE a SET n = 1 WHERE id < 100")
                until(lambda: ("replica", "rested") in steps(flow), "it rests", failed=results)
                time.sleep(2)
                done = job(flow).progress["ranges_done"]
                fast.set()
                time.sleep(3)
                assert job(flow).progress["ranges_done"] == done and not results
                assert "has fallen" in str(job(flow).problems)
                other.execute("SELECT pg_wal_replay_resume()")
            assert isinstance(results[0], SnapshotResult), results
            nothing_is_lost(flow)


def test_a_standby_that_was_behind_before_or_does_not_catch_up_is_not_waited_for() -> None:
    now = [0.0]
    brake = standbys.StandbyBrake(10.0, lambda: now[0])
    assert brake.look({1: ("delayed", 3600.0), 2: ("near", 0.0)}) == ""
    assert "near has fallen more than 10 s behind" in brake.look({1: ("delayed", 3600.0), 2: ("near", 20.0)})
    # hysteresis
    assert brake.look({2: ("near", 8.0)}) and not brake.look({2: ("near", 4.0)})
    assert brake.look({2: ("near", 20.0)})
    now[0] += standbys.PATIENCE + 1
    assert not brake.look({2: ("near", 500.0)}) and not brake.look({2: ("near", 501.0)})
    assert not brake.look({2: ("near", 1.0)}) and brake.look({2: ("near", 11.0)})
    # it is gone
    assert not brake.look({})
    assert not standbys.StandbyBrake(0.0).look({1: ("near", 1e9)})
