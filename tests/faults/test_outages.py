"""Time-outs are not taken for take-overs, lost answers not for failures; a source is never harmed; a slot that was set
back replays silently, one that was exchanged is refused."""

from __future__ import annotations

import signal
import time

import pytest

from airflow_bottledwater.errors import SlotError
from airflow_bottledwater.local.kafka import KafkaBroker
from airflow_bottledwater.local.postgres import PostgresServer
from airflow_bottledwater.local.registry import SchemaRegistry
from airflow_bottledwater.model.lsn import Position
from airflow_bottledwater.postgres import slot
from airflow_bottledwater.postgres.connect import connect
from airflow_bottledwater.stream.source import ChangeSource
from tests.support.faults import Job, Jobs, ProxiedBroker
from tests.support.forms import Draw
from tests.support.live_reader import LiveReader
from tests.support.options import draw_options, filters
from tests.support.topics import Flow, MakeFlow
from tests.support.waiting import until
from tests.support.writers import (
    PREPARING,
    SHORT,
    Habit,
    Writers,
    audit,
    make_tables,
    positions,
    read_rows,
    readable,
    update,
)

TABLES = ("a", "b")
ROWS = 3000
HABITS = (Habit(open_for=(0.0, 0.1)), SHORT, PREPARING)
NEW_PRODUCER = "a new producer reads the state"


def _writers(flow: Flow, seed: int) -> Writers:
    return Writers(flow.dsn, TABLES, seed, ROWS, HABITS, (0.01, 0.1))


def _ready(flow: Flow, draw: Draw, seed: int) -> Flow:
    make_tables(flow, TABLES, ROWS)
    draw(flow, seed, TABLES)
    flow.create()
    return flow


def _goes_on(flow: Flow, job: Job) -> None:
    """The job still runs, and publishes."""
    with LiveReader(flow, TABLES) as reader:
        reader.goes_on()
    assert job.running, job.output


# ---------------------------------------------------------------------- time-outs and lost answers
@pytest.mark.long
@pytest.mark.parametrize("point", ["mid-batch", "before-commit"])
def test_a_stream_whose_transaction_timed_out_goes_on(
    make_flow: MakeFlow, jobs: Jobs, proxied: ProxiedBroker, draw: Draw, seed: int, point: str
) -> None:
    flow = _ready(make_flow(broker=proxied, tables=TABLES, transaction_timeout=2.0), draw, seed)
    flow.snapshot()
    with _writers(flow, seed):
        job = jobs.start(flow, "stream", point=point, nth=3, act="stop")
        job.stopped_at_its_point()
        time.sleep(5)
        job.resume()
        _goes_on(flow, job)
        assert NEW_PRODUCER in job.output
        job.stop()
    flow.stream()
    audit(flow, TABLES).check()


@pytest.mark.long
def test_a_snapshot_whose_transaction_timed_out_goes_on(
    make_flow: MakeFlow, jobs: Jobs, proxied: ProxiedBroker, draw: Draw, seed: int
) -> None:
    flow = _ready(make_flow(broker=proxied, tables=TABLES, transaction_timeout=2.0), draw, seed)
    with _writers(flow, seed):
        job = jobs.start(flow, "snapshot", point="before-commit", nth=2, act="stop")
        job.stopped_at_its_point()
        time.sleep(5)
        job.resume()
        assert job.wait() == 0, job.output
        assert NEW_PRODUCER in job.output
        flow.stream()
    flow.stream()
    report = audit(flow, TABLES).check()
    assert report.ahead == []


@pytest.mark.long
def test_what_a_broker_has_left_open_for_ever_is_ended_by_the_next_job(
    make_flow: MakeFlow, jobs: Jobs, proxied: ProxiedBroker, draw: Draw, seed: int
) -> None:
    flow = _ready(make_flow(broker=proxied, tables=TABLES, transaction_timeout=2.0), draw, seed)
    flow.snapshot()
    with _writers(flow, seed):
        job = jobs.start(flow, "stream", point="before-commit", nth=3, act="stop")
        job.stopped_at_its_point()
        proxied.kill()
        time.sleep(6)
        job.signal(signal.SIGKILL)
        proxied.start()
        time.sleep(3)
        flow.stream()
    flow.stream()
    audit(flow, TABLES).check()


@pytest.mark.long
def test_a_broker_that_is_away_for_longer_than_the_time_out_is_no_takeover(
    make_flow: MakeFlow, jobs: Jobs, proxied: ProxiedBroker, draw: Draw, seed: int
) -> None:
    flow = _ready(make_flow(broker=proxied, tables=TABLES, transaction_timeout=2.0), draw, seed)
    flow.snapshot()
    with _writers(flow, seed):
        job = jobs.start(flow, "stream", point="before-commit", nth=3, act="stop")
        job.stopped_at_its_point()
        proxied.kill()
        job.resume()
        time.sleep(6)
        proxied.start()
        _goes_on(flow, job)
        job.stop()
    flow.stream()
    audit(flow, TABLES).check()


def test_a_commit_whose_answer_is_lost_is_asked_for_again_and_not_aborted(
    make_flow: MakeFlow, jobs: Jobs, proxied: ProxiedBroker, draw: Draw, seed: int
) -> None:
    flow = _ready(make_flow(broker=proxied, tables=TABLES, transaction_timeout=60.0), draw, seed)
    flow.snapshot()
    direct = flow.pipeline.kafka
    with _writers(flow, seed):
        flow.change(kafka=proxied.proxied)
        job = jobs.start(flow, "stream", point="before-commit", nth=3, act="stop")
        flow.change(kafka=direct)
        job.stopped_at_its_point()
        before = len(positions(flow))
        proxied.proxy.mode = "deaf"
        job.resume()
        # the broker has committed, and the job does not know
        until(lambda: len(positions(flow)) > before, "the commit")
        time.sleep(3)  # longer than one call waits for it
        proxied.proxy.cut()
        proxied.proxy.mode = "pass"
        _goes_on(flow, job)
        assert NEW_PRODUCER not in job.output
        job.stop()
    flow.stream()
    audit(flow, TABLES).check()


@pytest.mark.long
def test_a_transaction_that_hangs_in_another_pipeline_delays_nobody(
    make_flow: MakeFlow, jobs: Jobs, draw: Draw, seed: int
) -> None:
    hanging = _ready(make_flow(tables=TABLES, transaction_timeout=300.0), draw, seed)
    hanging.snapshot()
    with _writers(hanging, seed):
        job = jobs.start(hanging, "stream", point="before-commit", nth=2, act="stop")
        job.stopped_at_its_point()
        started = time.monotonic()
        other = make_flow(tables=TABLES, transaction_timeout=300.0)
        other.create()
        other.snapshot()
        other.stream()
        assert len(other.read("a")) >= ROWS / 2
        assert time.monotonic() - started < 100
        job.resume()
        job.stop()
    for flow in (hanging, other):
        flow.stream()
        audit(flow, TABLES).check()


@pytest.mark.long
def test_a_registry_that_is_away_while_the_columns_change_is_waited_out(
    make_flow: MakeFlow, kafka: KafkaBroker, own_registry: SchemaRegistry, seed: int
) -> None:
    flow = make_flow(own_registry, tables=TABLES)
    make_tables(flow, TABLES, 300)
    draw_options(seed, flow, TABLES)
    flow.create()
    flow.snapshot()
    with flow.streaming() as errors:
        flow.published(update("a", 0, 50), update("b", 0, 50))
        own_registry.kill()
        kafka.kill()
        flow.execute(*(f"ALTER TABLE {table} ADD COLUMN extra text DEFAULT 'new'" for table in TABLES))
        flow.execute(*(update(table, 20, 100) for table in TABLES))
        time.sleep(2)
        kafka.start()
        own_registry.start()
        flow.published(update("a", 0, 20), update("b", 0, 20))
    assert not errors
    flow.stream()
    audit(flow, TABLES).check()
    for table, messages in read_rows(flow, TABLES).items():
        published = readable(flow, [table])[table].publishes("extra")
        assert messages[-1].value["extra"] == "new" if published else "extra" not in messages[-1].value


# ---------------------------------------------------------------------- the source
@pytest.mark.long
def test_postgres_shuts_down_in_seconds_while_the_broker_is_away(
    make_flow: MakeFlow, jobs: Jobs, postgres: PostgresServer, kafka: KafkaBroker, draw: Draw, seed: int
) -> None:
    flow = _ready(make_flow(tables=TABLES, transaction_timeout=60.0), draw, seed)
    flow.snapshot()
    with _writers(flow, seed):
        job = jobs.start(flow, "stream")
        _goes_on(flow, job)
        kafka.pause()
        try:
            time.sleep(2)
            started = time.monotonic()
            postgres.stop("fast")
            took = time.monotonic() - started
        finally:
            kafka.resume()
            postgres.start()
        assert took < 10, f"a fast shutdown took {took:.1f} s"
        _goes_on(flow, job)
        job.stop()
    flow.stream()
    audit(flow, TABLES).check()


@pytest.mark.long
def test_analyze_and_other_tables_inside_a_transaction_tear_nothing(make_flow: MakeFlow, draw: Draw, seed: int) -> None:
    flow = _ready(make_flow(tables=TABLES, max_transaction_bytes=1 << 20), draw, seed)
    flow.execute("CREATE TABLE elsewhere (id int)")
    flow.snapshot()
    passes = filters(flow, TABLES)
    updated = [("a", 0, 50), ("b", 0, 50), ("a", 20, 70), ("b", 20, 70), ("a", 5, 5)]
    statements = [update("a", 0, 50), "ANALYZE a", "INSERT INTO elsewhere VALUES (1)", update("b", 0, 50)]
    flow.transaction(*statements, "ANALYZE", update("a", 20, 70), "CREATE INDEX ON a (name)", update("b", 20, 70))
    flow.transaction("ANALYZE")
    flow.transaction(update("a", 5, 5))
    counters = flow.stream()
    assert counters["published"] == sum(
        table not in passes or passes[table](id) for table, first, last in updated for id in range(first, last + 1)
    )
    audit(flow, TABLES).check()


def test_every_published_table_can_still_be_updated_and_deleted_from(make_flow: MakeFlow) -> None:
    flow = make_flow(allow_unkeyed=True, skip_snapshot=True)
    flow.execute(
        "CREATE TABLE keyed (id int PRIMARY KEY, n int)",
        "CREATE TABLE unkeyed (id int, n int)",
        "CREATE TABLE full_rows (id int, n int)",
        "ALTER TABLE full_rows REPLICA IDENTITY FULL",
        "CREATE TABLE by_index (id int PRIMARY KEY, n int NOT NULL UNIQUE)",
        "ALTER TABLE by_index REPLICA IDENTITY USING INDEX by_index_n_key",
        "CREATE TABLE deferred (id int PRIMARY KEY DEFERRABLE, n int)",
    )
    tables = ("keyed", "unkeyed", "full_rows", "by_index", "deferred")
    flow.create()
    for table in tables:
        flow.execute(f"INSERT INTO {table} VALUES (1, 1)", f"UPDATE {table} SET n = 2", f"DELETE FROM {table}")
    flow.stream()
    for table in tables:
        assert flow.read(table)


# ---------------------------------------------------------------------- the slot
@pytest.mark.long
def test_a_slot_that_was_set_back_replays_silently(
    make_flow: MakeFlow, monkeypatch: pytest.MonkeyPatch, draw: Draw, seed: int
) -> None:
    flow = _ready(make_flow(tables=TABLES), draw, seed)
    flow.snapshot()
    with _writers(flow, seed), monkeypatch.context() as patched:
        # as after a crash of PostgreSQL: what was confirmed is not on its disk
        patched.setattr(ChangeSource, "acknowledge", lambda self, position: None)
        time.sleep(0.5)
        flow.stream()
        time.sleep(0.5)
        first = flow.stream()
    with connect(flow.dsn) as connection:
        found = slot.state(connection, flow.pipeline.slot)
    assert found is not None
    assert Position(found.confirmed) < max(positions(flow))
    assert flow.stream()["published"] >= first["published"] > 0
    audit(flow, TABLES).check()


@pytest.mark.long
def test_a_slot_that_was_dropped_and_made_again_is_refused(make_flow: MakeFlow, draw: Draw, seed: int) -> None:
    flow = _ready(make_flow(tables=TABLES), draw, seed)
    flow.snapshot()
    flow.execute(update("a", 0, 10))
    flow.stream()
    flow.execute(f"SELECT pg_drop_replication_slot('{flow.pipeline.slot}')", update("a", 0, 10))
    flow.execute(f"SELECT pg_create_logical_replication_slot('{flow.pipeline.slot}', 'pgoutput')")
    with pytest.raises(SlotError, match=r"ahead of what was published.*drop-slot"):
        flow.stream()
