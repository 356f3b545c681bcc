"""Publications that have all tables, or whole schemas: tables that are not followed come along, and do not stop the
stream."""

from __future__ import annotations

import logging

import pytest

from airflow_bottledwater.errors import Refused
from airflow_bottledwater.provision import preflight
from airflow_bottledwater.state.claim import read_state
from airflow_bottledwater.stream.engine import follow
from airflow_bottledwater.stream.start import begin
from tests.support.tables import look_often, problems
from tests.support.topics import Flow, MakeFlow, read
from tests.support.waiting import until
from tests.support.writers import state_topic


@pytest.fixture
def flow(make_flow: MakeFlow, monkeypatch: pytest.MonkeyPatch) -> Flow:
    """A pipeline of the tables f…, with publications of a DBA."""
    look_often(monkeypatch)
    made = make_flow(tables="f*", create_publication=False)
    name = made.pipeline.slot
    made.execute(
        "CREATE TABLE first (id int PRIMARY KEY, name text)",
        "INSERT INTO first VALUES (1, 'one')",
        f"CREATE PUBLICATION {name} FOR ALL TABLES",
        f"CREATE PUBLICATION {name}_unkeyed WITH (publish = 'insert, truncate')",
    )
    made.create()
    made.snapshot()
    made.stream()
    return made


def test_a_new_table_is_taken_in_with_all_its_rows(flow: Flow) -> None:
    with flow.streaming() as errors:
        flow.execute(
            "CREATE TABLE fresh (id int PRIMARY KEY, name text)",
            "INSERT INTO fresh SELECT g, 'old' FROM generate_series(1, 50) g",
            "UPDATE fresh SET name = 'new' WHERE id < 10",
            "DELETE FROM fresh WHERE id = 50",
            "INSERT INTO first VALUES (2, 'two')",
        )
        until(lambda: len(flow.read("first")) == 2, "the stream goes on", failed=errors)
        flow.execute("INSERT INTO fresh VALUES (60, 'newest')")
        until(lambda: flow.compare("fresh").equal, "it is published", failed=errors)
    assert errors == [] and flow.compare("first").equal


CASES = {
    "new_tables is ignore": ("fresh (id int PRIMARY KEY, name text)", {"new_tables": "ignore"}, {"new_tables": "add"}),
    "it could not be taken in": ("fresh (id int, name text)", {}, {}),
    "the settings do not name it": ("other (id int PRIMARY KEY, name text)", {}, {"tables": ("f*", "other")}),
}


@pytest.mark.some(1)
@pytest.mark.parametrize(
    ("case", "way"),
    [
        # in the quick suite each case once
        pytest.param(case, way, marks=[] if (i + j) % 2 == 0 else [pytest.mark.long], id=f"{case}-{way}")
        for i, case in enumerate(CASES)
        for j, way in enumerate(("by the stream", "by a snapshot"))
    ],
)
def test_changes_of_a_table_that_is_not_followed_are_left_out_until_it_is(
    flow: Flow, caplog: pytest.LogCaptureFixture, case: str, way: str
) -> None:
    caplog.set_level(logging.WARNING)
    table, before, after = CASES[case]
    name = table.split()[0]
    flow.change(**before)
    with flow.streaming() as errors:
        flow.execute(f"CREATE TABLE {table}")
        for number in range(2, 6):
            flow.execute(f"INSERT INTO {name} VALUES ({number}, 'left out')", f"INSERT INTO first VALUES ({number})")
        flow.transaction(f"INSERT INTO {name} VALUES (20, 'gone'), (21, 'gone')", "INSERT INTO first VALUES (6)")
        until(lambda: len(flow.read("first")) == 6, "the stream goes on", failed=errors)
        flow.execute(
            f"TRUNCATE first, {name}",
            f"INSERT INTO {name} VALUES (7, 'kept')",
            "INSERT INTO first SELECT generate_series(1, 7)",
        )
        until(lambda: len(flow.read("first")) == 13, "the stream goes on", failed=errors)
        until(lambda: _skipped(flow) == {f"public.{name}": 6}, "the status counts them", failed=errors)
    assert errors == [] and _tables(flow) == {"first"}
    said = [line for line in caplog.messages if f"sends changes of public.{name}, which are left out: it " in line]
    assert len(said) == 1
    (event,) = read(flow.kafka, f"{flow.pipeline.topic_prefix}._bottledwater_events")
    assert event.value["relations"] == ["public.first"]
    flow.execute(
        f"ALTER TABLE {name} DROP COLUMN id, ADD id serial PRIMARY KEY" if "PRIMARY" not in table else "SELECT 1"
    )
    flow.change(**after)
    if way == "by a snapshot":
        flow.create()
        flow.snapshot()
    flow.execute(
        f"INSERT INTO {name} VALUES (8, 'streamed')" if "PRIMARY" in table else f"UPDATE {name} SET name = 'n'"
    )
    flow.stream()
    assert _tables(flow) == {"first", name}
    assert flow.compare(name).equal and flow.compare("first").equal


def test_one_that_cannot_be_taken_in_keeps_no_other_from_it(flow: Flow) -> None:
    flow.execute(
        "CREATE TABLE faulty (id int)",
        "INSERT INTO faulty VALUES (1)",
        "CREATE TABLE other (id int PRIMARY KEY)",
        "INSERT INTO other VALUES (1)",
        "CREATE TABLE fresh (id int PRIMARY KEY)",
        "INSERT INTO fresh VALUES (1)",
    )
    flow.stream()
    assert _tables(flow) == {"first", "fresh"} and flow.compare("fresh").equal


def test_a_table_that_is_created_in_a_large_transaction_is_taken_in(flow: Flow) -> None:
    flow.change(max_transaction_bytes=64 * 1024, batch_bytes=64 * 1024)
    start = begin(flow.pipeline)
    flow.transaction(
        "INSERT INTO first SELECT g, repeat('x', 1000) FROM generate_series(2, 300) g",
        "CREATE TABLE fresh (id int PRIMARY KEY, name text)",
        "INSERT INTO fresh SELECT g, repeat('y', 1000) FROM generate_series(1, 300) g",
    )
    follow(flow.pipeline, start, bounded=True)
    assert len({m.key["id"] for m in flow.read("first")}) == 300
    assert _tables(flow) == {"first", "fresh"} and flow.compare("fresh").equal


@pytest.mark.long
@pytest.mark.parametrize("kind", ["ALL TABLES", "TABLES IN SCHEMA public"])
def test_a_followed_table_that_is_not_sent_for_a_while_is_told_and_read_again(flow: Flow, kind: str) -> None:
    name = flow.pipeline.slot
    flow.execute(
        f"DROP PUBLICATION {name}",
        f"CREATE PUBLICATION {name} FOR {kind} WITH (publish_via_partition_root)",
        "CREATE TABLE events (id int PRIMARY KEY, name text) PARTITION BY RANGE (id)",
        "CREATE TABLE f_2024 (id int PRIMARY KEY, name text)",
        "INSERT INTO f_2024 VALUES (1, 'one')",
    )
    flow.stream()
    with flow.streaming() as errors:
        flow.streams()
        for table, away, back, told, remedy in (
            (
                "first",
                "ALTER TABLE first SET UNLOGGED",
                "ALTER TABLE first SET LOGGED",
                "is not permanent",
                'ALTER TABLE "public"."first" SET LOGGED;',
            ),
            (
                "f_2024",
                "ALTER TABLE events ATTACH PARTITION f_2024 FOR VALUES FROM (0) TO (10)",
                "ALTER TABLE events DETACH PARTITION f_2024",
                "is no longer published",
                "DETACH PARTITION",
            ),
        ):
            flow.execute(away, f"DELETE FROM {table} WHERE id = 1", f"INSERT INTO {table} VALUES (2, 'two')")
            until(lambda table=table: f"public.{table}" in problems(flow), "it is told", failed=errors)
            problem = problems(flow)[f"public.{table}"]
            assert told in problem.reason and remedy in problem.remedy
            flow.execute(back)
            until(
                lambda table=table: not problems(flow) and flow.compare(table).equal, "it is read again", failed=errors
            )
    assert errors == []


@pytest.mark.some(1)
@pytest.mark.parametrize("new_tables", ["add", "stop"])
@pytest.mark.long
def test_a_partition_that_was_detached_for_a_while_is_read_again(
    make_flow: MakeFlow, monkeypatch: pytest.MonkeyPatch, new_tables: str
) -> None:
    """Only the row of the root publishes it, which is the same afterwards."""
    look_often(monkeypatch)
    flow = make_flow(tables="events", create_publication=False, partitioned_tables="leaves", new_tables=new_tables)
    attach = "ALTER TABLE events ATTACH PARTITION part FOR VALUES FROM (0) TO (9)"
    flow.execute(
        "CREATE TABLE events (id int PRIMARY KEY, name text) PARTITION BY RANGE (id)",
        "CREATE TABLE part (id int PRIMARY KEY, name text)",
        attach,
        "INSERT INTO events SELECT g, 'first' FROM generate_series(1, 4) g",
        f"CREATE PUBLICATION {flow.pipeline.slot} FOR TABLE events",
        f"CREATE PUBLICATION {flow.pipeline.slot}_unkeyed WITH (publish = 'insert, truncate')",
    )
    flow.create()
    flow.snapshot()
    flow.stream()
    away = "ALTER TABLE events DETACH PARTITION part"
    flow.execute(away, "DELETE FROM part WHERE id = 1", attach)
    flow.stream()
    assert flow.compare("part").equal
    with flow.streaming() as errors:
        flow.streams()
        flow.execute(away, "DELETE FROM part WHERE id = 2")
        if new_tables == "add":
            until(lambda: _tables(flow) == set(), "it is not followed", failed=errors)
        else:
            until(lambda: read_state(flow.pipeline, state_topic(flow)).gaps, "it is noticed", failed=errors)
            assert problems(flow) == {}
        flow.execute(attach, "INSERT INTO part VALUES (5, 'later')")
        until(lambda: _tables(flow) and flow.compare("part").equal, "it is read again", failed=errors)
    assert errors == []


@pytest.mark.some(1)
@pytest.mark.parametrize("kind", ["ALL TABLES", "TABLES IN SCHEMA public"])
@pytest.mark.long
def test_a_table_that_was_unlogged_between_two_looks_is_read_again(flow: Flow, kind: str) -> None:
    name = flow.pipeline.slot
    flow.execute(f"DROP PUBLICATION {name}", f"CREATE PUBLICATION {name} FOR {kind}")
    flow.execute("INSERT INTO first VALUES (2, 'two'), (3, 'three')")
    flow.stream()
    flow.transaction(
        "ALTER TABLE first SET UNLOGGED",
        "DELETE FROM first WHERE id = 1",
        "INSERT INTO first VALUES (4, 'four')",
        "ALTER TABLE first SET LOGGED",
    )
    flow.stream()
    assert flow.compare("first").equal
    known = len(flow.read("first"))
    # what keeps all changes in the WAL lets nothing be read again
    flow.execute("VACUUM FULL first", "TRUNCATE first", "INSERT INTO first VALUES (5, 'five')")
    flow.stream()
    assert len(flow.read("first")) == known + 1


def test_with_stop_it_ends_the_stream(flow: Flow) -> None:
    flow.change(new_tables="stop")
    flow.execute("CREATE TABLE other (id int PRIMARY KEY)", "INSERT INTO other VALUES (1)")
    flow.stream()
    flow.execute("CREATE TABLE fresh (id int PRIMARY KEY)", "INSERT INTO fresh VALUES (1)")
    with pytest.raises(Refused, match="fresh: created since the slot was, and new_tables is stop"):
        flow.stream()


def test_the_tables_of_a_schema_may_be_more_than_the_pipelines(make_flow: MakeFlow) -> None:
    flow = make_flow(tables="first", create_publication=False)
    name = flow.pipeline.slot
    flow.execute(
        "CREATE TABLE first (id int PRIMARY KEY)",
        "CREATE TABLE other (id int PRIMARY KEY)",
        f"CREATE PUBLICATION {name} FOR TABLES IN SCHEMA public",
        f"CREATE PUBLICATION {name}_unkeyed WITH (publish = 'insert, truncate')",
    )
    assert any("also publishes public.other" in each for each in preflight.run(flow.pipeline).warnings)
    flow.create()
    flow.snapshot()
    flow.execute("INSERT INTO other VALUES (1)", "INSERT INTO first VALUES (1)", "DROP TABLE other")
    flow.stream()
    assert flow.compare("first").equal


def _skipped(flow: Flow) -> dict[str, int]:
    job = flow.job
    return dict(job.progress.get("skipped_by_table", {})) if job else {}


def _tables(flow: Flow) -> set[str]:
    return {pinned.table.name for pinned in read_state(flow.pipeline, state_topic(flow)).tables.values()}
