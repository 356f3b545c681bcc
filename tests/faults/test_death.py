"""Jobs and servers die at named points and at random moments, under writers; in the end everything is there exactly
once."""

from __future__ import annotations

import random
import signal
import time
from collections.abc import Iterable
from typing import Any

import pytest

from airflow_bottledwater.jobs import snapshots
from airflow_bottledwater.local.kafka import KafkaBroker
from airflow_bottledwater.local.postgres import PostgresServer
from tests.faults.worker import FOLLOWING_POINTS, LIVE_POINTS, SNAPSHOT_POINTS, STREAM_POINTS
from tests.support import outboxes
from tests.support.checker import recovery_times
from tests.support.faults import Job, Jobs
from tests.support.forms import Draw
from tests.support.live_reader import LiveReader
from tests.support.options import COLUMNS, drawn
from tests.support.topics import Flow, MakeFlow, assert_exactly_once_in_order
from tests.support.waiting import until
from tests.support.writers import (
    ASYNCHRONOUS,
    PREPARING,
    SHORT,
    Habit,
    Writers,
    audit,
    check_last,
    delete,
    insert,
    large_transaction,
    make_tables,
    move,
    read_rows,
    table_of,
    truncate,
    update,
)

TABLES = ("a", "b")
ROWS = 8000
#: transactions of writers have some twenty changes, a large one has thousands, also if only
#: some of them pass a row filter, and columns are left out
LARGE, CUT_FROM = 8000, 1000
#: slow enough to leave the processor to those who are tested
HABITS = (Habit(open_for=(0.1, 0.4)), Habit(open_for=(0.1, 0.4)), SHORT, ASYNCHRONOUS, PREPARING)
PAUSE = (0.01, 0.1)


#: one of them shows in the quick tests that the scenario works
def _first(points: Iterable[str]) -> list[Any]:
    return [pytest.param(each, marks=pytest.mark.long) if n else each for n, each in enumerate(points)]


def _writers(flow: Flow, seed: int) -> Writers:
    return Writers(flow.dsn, TABLES, seed, ROWS, HABITS, PAUSE, messages=True)


def _start(jobs: Jobs, flow: Flow, kind: str, point: str, dice: random.Random) -> Job:
    rare = point in ("in-claim", "before-init", "before-complete", "in-cut-transaction")
    in_commit = {"act": "kill-soon", "delay": dice.uniform(0.0, 0.015)} if point == "in-commit" else {}
    return jobs.start(flow, kind, point=point, nth=1 if rare else dice.randrange(1, 4), **in_commit)


def test_a_snapshot_that_is_killed_at_every_named_point_and_resumed(
    make_flow: MakeFlow, jobs: Jobs, draw: Draw, seed: int
) -> None:
    dice = random.Random(seed)
    flow = make_flow(tables=TABLES, lanes=2)
    make_tables(flow, TABLES, ROWS)
    draw(flow, seed, TABLES)
    *points, last = SNAPSHOT_POINTS
    dice.shuffle(points)
    with _writers(flow, seed):
        flow.create()
        for point in (*points, last):
            _start(jobs, flow, "snapshot", point, dice).killed_at_its_point()
        flow.snapshot()
        flow.stream()
    flow.stream()
    audit(flow, TABLES, resumed=True).check()


def test_a_stream_that_is_killed_at_every_named_point_and_restarted(
    make_flow: MakeFlow, jobs: Jobs, draw: Draw, seed: int
) -> None:
    dice = random.Random(seed)
    flow = make_flow(
        tables=(*TABLES, outboxes.OUTBOX), transaction_timeout=90.0, table_options=outboxes.OPTIONS,
        messages={"*": "messages", **outboxes.MESSAGES},
    )  # fmt: skip
    make_tables(flow, TABLES, 1000)
    draw(flow, seed, TABLES)
    flow.create()
    points = list(STREAM_POINTS)
    dice.shuffle(points)
    kills = []
    with Writers(flow.dsn, TABLES, seed, 1000, HABITS, PAUSE, messages=True, outbox=True):
        flow.snapshot()
        with LiveReader(flow, TABLES) as reader:
            for number, point in enumerate(points):
                if point == "in-cut-transaction":
                    large_transaction(flow, "a", 1_000_000 * (number + 1), LARGE)
                kills.append(_start(jobs, flow, "stream", point, dice).killed_at_its_point())
            flow.stream()
            recovery = recovery_times(kills, reader.arrivals)
    flow.stream()
    report = audit(flow, TABLES, cut_from=CUT_FROM).check()
    assert report.ahead == []
    # the last ones may have seen their first record after the reader left
    measured = {point: seconds for point, seconds in zip(points, recovery, strict=True) if seconds is not None}
    print("seconds to the next visible record:", ", ".join(f"{p} {s:.1f}" for p, s in measured.items()))
    assert len(measured) >= len(kills) - 2
    # nobody waits for the time-out of a dead producer's transaction
    assert max(measured.values()) < 60


def _emptied(flow: Flow, table: str, rows: int) -> None:
    """A table that loses many rows without a tombstone: what a sweep is for."""
    flow.transaction(*truncate(table), insert(table, 0, rows))


@pytest.mark.long
def test_a_live_snapshot_whose_job_is_killed_at_every_named_point(
    make_flow: MakeFlow, jobs: Jobs, draw: Draw, seed: int
) -> None:
    dice = random.Random(seed)
    flow = make_flow(tables=TABLES)
    make_tables(flow, TABLES, 1000)
    draw(flow, seed, TABLES)
    flow.create()
    points = list(LIVE_POINTS)
    dice.shuffle(points)
    asked = []
    with Writers(flow.dsn, TABLES, seed, 1000, HABITS, PAUSE, messages=True):
        flow.snapshot()
        for point in points:
            swept = "swept" in point
            if swept:
                flow.execute(insert("b", 0, 1000))
                flow.stream()
                _emptied(flow, "b", dice.randrange(900))
            asked.append(flow.ask(*TABLES, sweep=swept or dice.random() < 0.5))
            nth = 1 if point.startswith("before-re") or swept else dice.randrange(1, 4)
            in_commit = {"act": "kill-soon", "delay": dice.uniform(0.0, 0.015)} if "commit" in point else {}
            jobs.start(flow, "stream", point=point, nth=nth, **in_commit).killed_at_its_point()
        flow.stream()
    flow.stream()
    assert [flow.reported(each).state for each in asked] == ["finished"] * len(asked)
    # a table that was emptied gets its rows in one transaction, which is larger than max_transaction_bytes
    counted = audit(flow, TABLES, cut_from=50).check().statistics
    assert counted.live_rows > 0 and counted.truncated == 3


@pytest.mark.timeout(60)  # what is broken waits for ever
def test_a_live_snapshot_whose_job_is_killed_behind_its_last_rows_ends(make_flow: MakeFlow, jobs: Jobs) -> None:
    """Nothing is left to be read, and nothing but the end to be recorded."""
    flow = make_flow(tables="a")
    make_tables(flow, ("a",), 100)
    flow.create()
    flow.snapshot()
    asked = flow.ask("a")
    # the first that is recorded is its beginning
    jobs.start(flow, "stream", point="behind-chunk", nth=2).killed_at_its_point()
    flow.stream()
    assert flow.reported(asked).state == "finished"


@pytest.mark.long
@pytest.mark.parametrize("point", _first(FOLLOWING_POINTS))
def test_a_job_that_is_killed_while_it_begins_to_follow_a_table(
    make_flow: MakeFlow, jobs: Jobs, draw: Draw, seed: int, point: str
) -> None:
    flow = make_flow(tables="?")
    make_tables(flow, TABLES, 300)
    draw(flow, seed, TABLES)
    # a pattern has to match a table that is there; what a and b have of their own comes first
    later = drawn(random.Random(f"later {seed}"), ("?",), [*COLUMNS], keys=False).get("?", {})
    later.pop("topic", None)
    flow.change(
        table_options={"?": later, **{name: rule.as_dict() for name, rule in flow.pipeline.table_options.items()}}
    )
    flow.create()
    flow.snapshot()
    flow.stream()
    flow.execute(*table_of("c", 300))
    jobs.start(flow, "stream", point=point).killed_at_its_point()
    flow.execute(update("c", 0, 100), delete("c", 200), update("a", 0, 10))
    flow.stream()
    flow.execute(move("c", 5, 1000), delete("c", 6))
    flow.stream()
    assert_exactly_once_in_order(read_rows(flow, ("c",))["c"])
    check_last(flow, "c")
    # the audit knows tables of the snapshot only
    flow.execute("DELETE FROM checker_log WHERE tbl = 'c'")
    audit(flow, TABLES).check()


@pytest.mark.long
@pytest.mark.parametrize("point", FOLLOWING_POINTS)
def test_a_job_that_is_killed_while_a_key_changes_is_made_up_for(make_flow: MakeFlow, jobs: Jobs, point: str) -> None:
    flow = make_flow(tables="c")
    flow.execute(*_new_table("c"))
    flow.create()
    flow.snapshot()
    flow.stream()
    flow.execute(
        "UPDATE c SET text = 'before' WHERE id = 7",
        "ALTER TABLE c DROP CONSTRAINT c_pkey, ADD PRIMARY KEY (other)",
        "DELETE FROM c WHERE id = 8",
    )
    jobs.start(flow, "stream", point=point).killed_at_its_point()
    flow.execute("UPDATE c SET text = 'between' WHERE id = 9", "DELETE FROM c WHERE id = 10")
    flow.stream()
    flow.execute("UPDATE c SET text = 'after' WHERE id = 11", "UPDATE c SET other = 5000 WHERE id = 12")
    flow.stream()
    assert flow.compare("c").equal
    assert {report.state for _, report in snapshots.reports(flow.pipeline, flow.name).values() if report} == {
        "finished"
    }


def _new_table(name: str) -> tuple[str, ...]:
    return (
        f"CREATE TABLE {name} (id int PRIMARY KEY, other int NOT NULL UNIQUE, text text)",
        f"INSERT INTO {name} SELECT g, 3000 + g, 'old' FROM generate_series(1, 300) g",
    )


@pytest.mark.long
@pytest.mark.parametrize("kind", ["snapshot", "stream"])
def test_a_job_that_is_killed_at_random_moments(
    make_flow: MakeFlow, jobs: Jobs, draw: Draw, kind: str, seed: int
) -> None:
    dice = random.Random(seed)
    flow = make_flow(tables=TABLES)
    rows = ROWS if kind == "snapshot" else 1000
    make_tables(flow, TABLES, rows)
    draw(flow, seed, TABLES)
    flow.create()
    with Writers(flow.dsn, TABLES, seed, rows, HABITS, PAUSE, messages=True):
        if kind == "stream":
            flow.snapshot()
        for _ in range(4):
            job = jobs.start(flow, kind)
            time.sleep(dice.uniform(0.0, 2.5))
            job.signal(signal.SIGKILL)
            assert job.wait() in (0, -signal.SIGKILL)
        flow.snapshot()
        flow.stream()
    flow.stream()
    audit(flow, TABLES, resumed=kind == "snapshot").check()


@pytest.mark.long
def test_a_stream_survives_the_death_of_its_servers(
    make_flow: MakeFlow, jobs: Jobs, postgres: PostgresServer, kafka: KafkaBroker, draw: Draw, seed: int
) -> None:
    dice = random.Random(seed)
    flow = make_flow(tables=TABLES)
    make_tables(flow, TABLES, 1000)
    draw(flow, seed, TABLES)
    flow.create()

    def end_the_walsender() -> None:
        flow.execute(
            "SELECT pg_terminate_backend(active_pid) FROM pg_replication_slots"
            " WHERE active AND database = current_database()"
        )

    def crash_postgres() -> None:
        postgres.stop("immediate")
        time.sleep(dice.uniform(0.0, 1.0))
        postgres.start()

    def kill_the_broker() -> None:
        kafka.kill()
        time.sleep(dice.uniform(0.0, 2.0))
        kafka.start()

    faults = [end_the_walsender, crash_postgres, kill_the_broker, end_the_walsender]
    dice.shuffle(faults)
    kills = []
    with Writers(flow.dsn, TABLES, seed, 1000, HABITS, PAUSE, messages=True):
        flow.snapshot()
        job = jobs.start(flow, "stream")
        with LiveReader(flow, TABLES) as reader:
            until(lambda: len(reader.arrivals) > 2 * 1000, "the snapshot is read, and the stream has begun")
            for fault in faults:
                _more(reader)
                kills.append(time.time())
                fault()
                _more(reader)
            recovery = recovery_times(kills, reader.arrivals)
        assert job.running, job.output
        job.stop()
    print("seconds to the next visible record:", recovery)
    flow.stream()
    report = audit(flow, TABLES).check()
    assert report.ahead == []


def _more(reader: LiveReader) -> None:
    """Wait until the stream publishes."""
    since = time.time()
    until(lambda: any(t > since for t in reader.arrivals[-50:]), "a new record")


@pytest.mark.long
@pytest.mark.parametrize("fault", ["holder", "postgres", "broker"])
def test_a_snapshot_that_lost_its_servers_is_resumed(
    make_flow: MakeFlow, jobs: Jobs, postgres: PostgresServer, kafka: KafkaBroker, fault: str, seed: int
) -> None:
    flow = make_flow(tables=TABLES)
    make_tables(flow, TABLES, ROWS)
    flow.create()
    with _writers(flow, seed):
        job = jobs.start(flow, "snapshot", point="between-ranges", nth=3, act="stop")
        job.stopped_at_its_point()
        if fault == "holder":
            ended = flow.execute(
                "SELECT pg_terminate_backend(pid) FROM pg_stat_activity"
                " WHERE application_name = 'bottledwater snapshot holder' AND datname = current_database()"
            )
            assert len(ended) == 1
        elif fault == "postgres":
            postgres.stop("immediate")
            postgres.start()
        else:
            kafka.kill()
            kafka.start()
        job.resume()
        code = job.wait(120)
        if fault == "broker":
            assert code == 0, job.output
        else:
            assert job.outcome.startswith(("Outage", "HolderEnded")), job.output
            assert flow.snapshot().skipped >= 3
        flow.stream()
    flow.stream()
    audit(flow, TABLES, resumed=fault != "broker").check()
