"""Partitioned tables: published as one under the root's name, or each leaf under its own."""

from __future__ import annotations

import random
import threading
import time
import uuid
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import pytest
from psycopg.conninfo import make_conninfo

from airflow_bottledwater.errors import Outage, PreflightError
from airflow_bottledwater.jobs import snapshots, status
from airflow_bottledwater.kafka.topics import Topics
from airflow_bottledwater.live import reading
from airflow_bottledwater.live.chunks import LiveChunk
from airflow_bottledwater.live.remaining import SWEEPING
from airflow_bottledwater.local.kafka import KafkaBroker
from airflow_bottledwater.local.postgres import PostgresServer
from airflow_bottledwater.local.registry import SchemaRegistry
from airflow_bottledwater.postgres import partitions, slot
from airflow_bottledwater.postgres.connect import connect
from airflow_bottledwater.snapshot import driver, lane
from airflow_bottledwater.snapshot.task import LaneTask
from airflow_bottledwater.state.claim import read_state
from airflow_bottledwater.state.pipeline_state import PipelineState
from airflow_bottledwater.tables import watch
from airflow_bottledwater.verify import driver as verification
from tests.support.compare import compare
from tests.support.live import read_by_single_blocks
from tests.support.tables import dies_before_it_reads, look_often, problems
from tests.support.topics import Flow, MakeFlow, Message, assert_exactly_once_in_order, read
from tests.support.waiting import until
from tests.support.writers import state_topic

pytestmark = pytest.mark.long

#: of two levels; p_old was made apart, with its columns in another order and with one dropped; p_new is empty
TABLES = (
    "CREATE TABLE p (id int, region text, v text, big text, PRIMARY KEY (id, region)) PARTITION BY LIST (region)",
    "CREATE TABLE p_a PARTITION OF p FOR VALUES IN ('a')",
    "CREATE TABLE p_bc PARTITION OF p FOR VALUES IN ('b', 'c') PARTITION BY LIST (region)",
    "CREATE TABLE p_b PARTITION OF p_bc FOR VALUES IN ('b')",
    "CREATE TABLE p_c PARTITION OF p_bc FOR VALUES IN ('c')",
    "CREATE TABLE p_old (gone int, big text, v text, region text NOT NULL, id int NOT NULL)",
    "ALTER TABLE p_old DROP COLUMN gone",
    "ALTER TABLE p ATTACH PARTITION p_old FOR VALUES IN ('old')",
    "CREATE TABLE p_new PARTITION OF p FOR VALUES IN ('new')",
    "INSERT INTO p SELECT g, (ARRAY['a', 'b', 'c', 'old'])[g % 4 + 1], 'row ' || g FROM generate_series(1, 400) g",
)


@pytest.fixture(autouse=True)
def often_looked_at(monkeypatch: pytest.MonkeyPatch) -> None:
    """The catalog is looked at often."""
    look_often(monkeypatch, interval=0.3)


@pytest.fixture
def flow_settings() -> dict[str, Any]:
    return {"tables": "p"}


@pytest.fixture
def flow_statements() -> tuple[str, ...]:
    return TABLES


def everything(flow: Flow) -> None:
    """Each kind of change, in each kind of partition."""
    flow.execute(
        "INSERT INTO p SELECT g, (ARRAY['a', 'b', 'c', 'old', 'new'])[g % 5 + 1], 'late ' || g FROM "
        "generate_series(1001, 1100) g",
        "UPDATE p SET v = v || '!' WHERE id % 3 = 0",
        "UPDATE p SET id = id + 5000 WHERE id % 10 = 1",
        "DELETE FROM p WHERE id % 7 = 0",
        "INSERT INTO p_old (id, region, v) VALUES (9000, 'old', 'directly')",
    )


# ---------------------------------------------------------------------- as one
@pytest.fixture
def flow_of(kafka: KafkaBroker, flow_settings: dict[str, Any]) -> Iterator[Callable[[PostgresServer], Flow]]:
    """Makes a pipeline over a fresh database of a server."""
    made: list[tuple[PostgresServer, Flow, str]] = []

    def make(server: PostgresServer) -> Flow:
        name = f"parted_{uuid.uuid4().hex[:8]}"
        flow = Flow(server.createdb(name), kafka, None, **flow_settings)
        flow.execute(*TABLES)
        made.append((server, flow, name))
        return flow

    yield make
    for server, flow, name in made:
        with connect(server.dsn()) as connection:
            if slot.state(connection, flow.pipeline.slot) is not None:
                slot.drop(connection, flow.pipeline.slot)
            connection.execute(f"DROP DATABASE {name} WITH (FORCE)")  # type: ignore[arg-type]


def test_a_partitioned_table_is_one_topic_in_each_version(
    each_postgres: PostgresServer, flow_of: Callable[[PostgresServer], Flow]
) -> None:
    flow = flow_of(each_postgres)
    flow.create()
    everything(flow)
    assert flow.snapshot().tables == 1
    (of_table,) = status.report(flow.pipeline).tables
    assert (of_table.table, of_table.rows, of_table.ranges) == (
        "public.p",
        flow.execute("SELECT count(*) FROM p")[0][0],
        "5/5",
    )
    flow.execute("UPDATE p SET region = 'a' WHERE region = 'b' AND id > 100")
    everything_else = "UPDATE p SET v = 'last' WHERE id < 50"
    flow.execute(everything_else, "INSERT INTO p VALUES (9001, 'new', 'x')")
    flow.stream()
    assert flow.compare("p").differences == []
    assert_exactly_once_in_order(flow.read("p"))
    assert {
        name for name in Topics(flow.pipeline.kafka).names() if name.startswith(f"{flow.pipeline.topic_prefix}.p")
    } == {flow.topic("p")}


def test_a_row_that_moves_is_a_tombstone_and_then_the_row(make_flow: MakeFlow) -> None:
    flow = make_flow(tables="m")
    flow.execute(
        "CREATE TABLE m (id int NOT NULL, region text, v text) PARTITION BY LIST (region)",
        "CREATE TABLE m_a PARTITION OF m (PRIMARY KEY (id)) FOR VALUES IN ('a')",
        "CREATE TABLE m_b PARTITION OF m (PRIMARY KEY (id)) FOR VALUES IN ('b')",
        "DROP TABLE m",
        "CREATE TABLE m (id int NOT NULL, v text, PRIMARY KEY (id)) PARTITION BY RANGE (id)",
        "CREATE TABLE m_1 PARTITION OF m FOR VALUES FROM (0) TO (10)",
        "CREATE TABLE m_2 PARTITION OF m FOR VALUES FROM (10) TO (20)",
        "INSERT INTO m VALUES (1, 'one'), (2, 'two')",
    )
    flow.create()
    flow.snapshot()
    flow.execute("UPDATE m SET id = 11 WHERE id = 1")
    flow.transaction("UPDATE m SET id = 12 WHERE id = 2", "UPDATE m SET id = 2, v = 'back' WHERE id = 12")
    flow.stream()
    streamed = [(m.op, m.key["id"], m.value and m.value["v"]) for m in flow.read("m") if m.pos]
    assert streamed == [
        ("d", 1, None), ("c", 11, "one"),
        ("d", 2, None), ("c", 12, "two"), ("d", 12, None), ("c", 2, "back"),
    ]  # fmt: skip
    assert flow.compare("m").differences == []


def test_unchanged_large_values_are_found_in_the_partition(make_flow: MakeFlow) -> None:
    flow = make_flow()
    flow.execute(
        "ALTER TABLE p_b ALTER big SET STORAGE EXTERNAL",
        "ALTER TABLE p_old ALTER big SET STORAGE EXTERNAL",
        "UPDATE p SET big = repeat(id::text, 2000) WHERE region IN ('b', 'old')",
    )
    flow.create()
    flow.snapshot()
    flow.execute("UPDATE p SET v = 'new' WHERE region IN ('b', 'old')")
    flow.stream()
    assert flow.compare("p").differences == []
    assert {m.toast for m in flow.read("p") if m.op == "u"} == {"reread"}


@pytest.mark.parametrize(
    ("how", "went"),
    [
        ("ALTER TABLE p DETACH PARTITION p_bc", {"b", "c"}),
        ("TRUNCATE p_old", {"old"}),
        ("DROP TABLE p_b, p_old", {"b", "old"}),
        ("DROP TABLE p", {"b", "c", "old"}),
    ],
)
def test_an_update_whose_row_has_gone_with_its_partition_is_a_dead_letter(
    make_flow: MakeFlow, how: str, went: set[str]
) -> None:
    flow = make_flow(on_error="log")
    flow.execute(
        *(f"ALTER TABLE {part} ALTER big SET STORAGE EXTERNAL" for part in ("p_b", "p_c", "p_old")),
        "UPDATE p SET big = repeat(id::text, 2000) WHERE region <> 'a'",
    )
    flow.create()
    flow.snapshot()
    flow.execute(
        "UPDATE p SET v = 'new' WHERE region <> 'a'",
        "DELETE FROM p WHERE region = 'c'",
        how,
    )
    counters = flow.stream()
    assert counters["dead_letters"] == 100 * len(went)
    assert counters["superseded"] == (0 if "c" in went else 100)
    letters = flow.dead_letters()
    assert {each.value["key"]["region"] for each in letters} == went
    assert {each.value["columns"]["v"] for each in letters} == {"new"}
    updated = Counter(each.key["region"] for each in flow.read("p") if each.op == "u")
    assert updated == dict.fromkeys({"b", "old"} - went, 100)


def test_a_killed_snapshot_is_resumed_partition_by_partition(make_flow: MakeFlow) -> None:
    flow = make_flow(lanes=1)
    flow.create()

    _begin(flow, ranges=3)
    flow.execute(
        "UPDATE p SET region = 'c' WHERE region = 'a' AND id % 2 = 0",
        "UPDATE p SET region = 'a' WHERE region = 'old' AND id % 3 = 0",
        "DELETE FROM p WHERE id % 10 = 0",
        "VACUUM FULL p_a",
        "CREATE TABLE p_late PARTITION OF p FOR VALUES IN ('late')",
        "INSERT INTO p VALUES (7000, 'late', 'x')",
    )
    result = flow.snapshot()
    assert (result.skipped, result.ranges) == (2, 4)
    flow.stream()
    assert flow.compare("p").differences == []


def test_a_partition_that_is_truncated_while_its_snapshot_is_interrupted_is_noticed(make_flow: MakeFlow) -> None:
    flow = make_flow(lanes=1)
    flow.create()
    _begin(flow, ranges=3)
    flow.execute("TRUNCATE p_a", "DROP TABLE p_b")
    flow.snapshot()
    with flow.streaming() as errors:
        until_told(flow, {"public.p_a", "public.p_b"}, errors)


def _begin(flow: Flow, ranges: int) -> None:
    """Take the first ranges of a snapshot, in a job that dies then."""

    def part_of_it(tasks: Sequence[LaneTask]) -> list[dict[str, int]]:
        (task,) = tasks
        fields = {name: getattr(task, name) for name in LaneTask.__slots__}
        lane.run(flow.pipeline, LaneTask(**{**fields, "chunks": task.chunks[:ranges]}))
        raise Outage("The cluster went away.")

    with pytest.raises(Outage, match="went away"):
        driver.run(flow.pipeline, part_of_it)


def test_a_new_empty_partition_needs_no_action(make_flow: MakeFlow) -> None:
    flow = make_flow()
    flow.create()
    flow.snapshot()
    with flow.streaming() as errors:
        flow.execute(
            "CREATE TABLE p_x PARTITION OF p FOR VALUES IN ('x', 'y') PARTITION BY LIST (region)",
            "CREATE TABLE p_x1 PARTITION OF p_x (v DEFAULT 'none', CHECK (id > 0)) FOR VALUES IN ('x')",
            "INSERT INTO p VALUES (1, 'x', 'new'), (2, 'x', 'new')",
            "UPDATE p SET v = 'newer' WHERE region = 'x' AND id = 1",
            "UPDATE p SET region = 'x' WHERE region = 'a' AND id = 4",
        )
        until(lambda: len(flow.read("p")) == 405, "the changes", failed=errors)
        told_nothing(flow, errors)
    # the next job knows it
    flow.stream()
    assert flow.compare("p").differences == []
    flow.execute("TRUNCATE p_x1")
    with flow.streaming() as errors:
        until_told(flow, {"public.p_x1"}, errors)


def told(flow: Flow) -> set[str]:
    """What the job's status says of what is not followed."""
    flow.execute("INSERT INTO p_new VALUES (100000 + (SELECT count(*) FROM p_new), 'new', 'tick')")
    job = flow.job
    return set(job.progress.get("not_followed", ())) if job is not None else set()


def until_told(flow: Flow, names: set[str], errors: list[BaseException]) -> None:
    until(lambda: told(flow) == names, f"the status names {names or 'nothing'}", pause=0.2, failed=errors)


def told_nothing(flow: Flow, errors: list[BaseException]) -> None:
    """After several looks at the catalog, nothing is told."""
    end = time.monotonic() + 2.5
    while time.monotonic() < end:
        assert told(flow) == set()
    assert not errors


def test_a_new_partition_that_loses_its_rows_is_told_at_once(make_flow: MakeFlow) -> None:
    flow = make_flow()
    flow.create()
    flow.snapshot()
    with flow.streaming() as errors:
        flow.streams()
        flow.execute("CREATE TABLE p_x PARTITION OF p FOR VALUES IN ('x')", "INSERT INTO p VALUES (1, 'x', 'new')")
        until(lambda: len(flow.read("p")) == 401, "the row", failed=errors)
        told_nothing(flow, errors)
        flow.execute("TRUNCATE p_x")
        until_told(flow, {"public.p_x"}, errors)
        # reading it would not take out what the topic has
        time.sleep(3.0)
        until_told(flow, {"public.p_x"}, errors)
        assert read_again(flow) == []


def test_an_unlogged_partition_is_told_and_read_when_it_is_logged(make_flow: MakeFlow) -> None:
    flow = make_flow()
    flow.create()
    flow.snapshot()

    def logged(name: str) -> None:
        until(lambda: "public.p" in problems(flow), "it is told", failed=errors)
        problem, statement = problems(flow)["public.p"], f'ALTER TABLE "public"."{name}" SET LOGGED'
        assert f"public.{name}, a partition of public.p, is not permanent" in problem.reason
        assert f"Run: {statement};" in problem.remedy
        flow.execute(statement)
        until(lambda: not problems(flow) and flow.compare("p").equal, "it is read", failed=errors)

    with flow.streaming() as errors:
        flow.streams()
        flow.execute(
            "CREATE UNLOGGED TABLE p_x PARTITION OF p FOR VALUES IN ('x')",
            "INSERT INTO p SELECT g, 'x', 'unlogged' FROM generate_series(1, 10) g",
        )
        logged("p_x")
        assert {message.key["region"] for message in read_again(flow)} == {"x"}
        flow.execute("ALTER TABLE p_a SET UNLOGGED", "DELETE FROM p_a WHERE id < 100", "UPDATE p_a SET v = 'unlogged'")
        logged("p_a")
        told_nothing(flow, errors)
    flow.execute(
        "CREATE UNLOGGED TABLE p_y PARTITION OF p FOR VALUES IN ('y')",
        "INSERT INTO p VALUES (1, 'y', 'unlogged')",
        "ALTER TABLE p_y SET LOGGED",
    )
    flow.create()
    flow.stream()
    assert flow.compare("p").differences == []


#: partitions that are attached with rows: how, and which rows they have then
ATTACHED = {
    "with rows": (
        [
            "CREATE TABLE later (LIKE p)",
            "INSERT INTO later SELECT g, 'later', 'before' FROM generate_series(1, 50) g",
            "ALTER TABLE p ATTACH PARTITION later FOR VALUES IN ('later')",
        ],
        50,
    ),
    "where it was made": (
        [
            "BEGIN; CREATE TABLE later AS SELECT 1 AS id, 'later'::text AS region, 'x'::text AS v, ''::text AS big;"
            " ALTER TABLE later ALTER id SET NOT NULL, ALTER region SET NOT NULL;"
            " ALTER TABLE p ATTACH PARTITION later FOR VALUES IN ('later'); COMMIT"
        ],
        1,
    ),
    "of two levels, its columns in another order": (
        [
            "CREATE TABLE later (v text, big text, region text NOT NULL, id int NOT NULL) PARTITION BY LIST (region)",
            "CREATE TABLE later_1 PARTITION OF later FOR VALUES IN ('later')",
            "CREATE TABLE later_2 PARTITION OF later FOR VALUES IN ('latest')",
            "INSERT INTO later SELECT 'before', repeat('x', 4000), (ARRAY['later', 'latest'])[g % 2 + 1], g FROM "
            "generate_series(1, 80) g",
            "ALTER TABLE p ATTACH PARTITION later FOR VALUES IN ('later', 'latest')",
        ],
        80,
    ),
    "twice": (
        [
            "CREATE TABLE later (LIKE p)",
            "INSERT INTO later VALUES (1, 'later', 'before')",
            "CREATE TABLE latest (LIKE p)",
            "INSERT INTO latest VALUES (1, 'latest', 'before'), (2, 'latest', 'before')",
            "ALTER TABLE p ATTACH PARTITION later FOR VALUES IN ('later')",
            "ALTER TABLE p ATTACH PARTITION latest FOR VALUES IN ('latest')",
        ],
        3,
    ),
}


def read_again(flow: Flow) -> list[Message]:
    """The rows in the topic that a live snapshot has read."""
    return [message for message in flow.read("p") if message.snapshot]


#: how a partition of METRICS gets its rows, each in one transaction, and whether it was made empty
METRICS = "CREATE TABLE m (ts bigint, id int, v float8, PRIMARY KEY (ts, id)) PARTITION BY RANGE (ts)"
MADE = {
    "m_like": (
        "CREATE TABLE m_like (LIKE m); INSERT INTO m_like SELECT g, g, 1 FROM generate_series(100, 149) g;"
        "ALTER TABLE m ATTACH PARTITION m_like FOR VALUES FROM (100) TO (200)",
        False,
    ),
    "m_all": (
        "CREATE TABLE m_all (LIKE m INCLUDING ALL); INSERT INTO m_all SELECT g, g, 1 FROM generate_series(200, 249) g;"
        "ALTER TABLE m ATTACH PARTITION m_all FOR VALUES FROM (200) TO (300)",
        False,
    ),
    "m_as": (
        "CREATE TABLE m_as AS SELECT g::bigint AS ts, g AS id, 1::float8 AS v FROM generate_series(300, 349) g;"
        "ALTER TABLE m_as ALTER ts SET NOT NULL, ALTER id SET NOT NULL;"
        "ALTER TABLE m ATTACH PARTITION m_as FOR VALUES FROM (300) TO (400)",
        False,
    ),
    "m_again": (
        "CREATE TABLE m_again PARTITION OF m FOR VALUES FROM (400) TO (500); ALTER TABLE m DETACH PARTITION m_again;"
        "INSERT INTO m_again SELECT g, g, 1 FROM generate_series(400, 449) g;"
        "ALTER TABLE m ATTACH PARTITION m_again FOR VALUES FROM (400) TO (500)",
        False,
    ),
    "m_of": (
        "CREATE TABLE m_of PARTITION OF m FOR VALUES FROM (500) TO (600);"
        "INSERT INTO m SELECT g, g, 1 FROM generate_series(500, 549) g",
        True,
    ),
    "m_default": ("CREATE TABLE m_default PARTITION OF m (v DEFAULT 3) FOR VALUES FROM (600) TO (700)", True),
}


def test_what_was_made_empty_is_told_from_what_was_filled_and_attached_at_once(
    each_postgres: PostgresServer,
) -> None:
    with connect(each_postgres.createdb(f"made_{uuid.uuid4().hex[:8]}")) as connection:
        connection.execute("SET search_path = public")
        connection.execute(METRICS)
        for statements, _ in MADE.values():
            connection.execute(f"BEGIN; {statements}; COMMIT")  # type: ignore[arg-type]
        row = connection.execute("SELECT 'm'::regclass::oid").fetchone()
        assert row is not None
        found = {each.name: (each.created, each.told) for each in partitions.below(connection, [row[0]])[row[0]]}
        connection.execute("TRUNCATE m")
        assert not any(each.told for each in partitions.below(connection, [row[0]])[row[0]])
    assert found == {name: (empty, empty) for name, (_, empty) in MADE.items()}


def test_the_rows_of_a_partition_that_was_filled_and_attached_at_once_are_read(make_flow: MakeFlow) -> None:
    flow = make_flow(tables="m")
    flow.execute(METRICS, "CREATE TABLE m_0 PARTITION OF m FOR VALUES FROM (0) TO (100)")
    flow.create()
    flow.snapshot()
    for statements, _ in MADE.values():
        flow.transaction(*statements.split(";"))
    flow.stream()
    flow.stream()
    assert flow.compare("m").differences == []


def _swept(flow: Flow, errors: list[BaseException]) -> None:
    """What differs is told, until the whole table is read with a sweep."""
    asked = flow.ask("p", sweep=True)
    until(lambda: flow.reported(asked).state == "finished", "the sweep", failed=errors)
    until_told(flow, set(), errors)


def test_a_partition_that_was_written_to_while_it_was_detached_is_told(make_flow: MakeFlow) -> None:
    flow = make_flow()
    flow.create()
    flow.snapshot()
    with flow.streaming() as errors:
        flow.execute("ALTER TABLE p DETACH PARTITION p_a")
        until_told(flow, {"public.p_a"}, errors)
        flow.execute(
            "INSERT INTO p_a SELECT g, 'a', 'detached' FROM generate_series(8001, 8010) g",
            "DELETE FROM p_a WHERE id < 100",
            "ALTER TABLE p ATTACH PARTITION p_a FOR VALUES IN ('a')",
        )
        time.sleep(1.5)
        until_told(flow, {"public.p_a"}, errors)
    with flow.streaming() as errors:
        until_told(flow, {"public.p_a"}, errors)
        _swept(flow, errors)
    flow.stream()
    assert flow.compare("p").differences == []


def test_rows_of_an_attached_partition_that_are_still_to_come_are_no_difference(
    make_flow: MakeFlow, monkeypatch: pytest.MonkeyPatch
) -> None:
    flow = make_flow(verify_timeout=30.0)
    flow.create()
    flow.snapshot()
    monkeypatch.setattr(watch, "QUESTION", 3600.0)
    with flow.streaming():
        flow.streams()
        flow.execute(*ATTACHED["with rows"][0])
        with pytest.raises(Outage, match=r"Rows of public\.p are still to come"):
            verification.run(flow.pipeline, verification.in_threads(flow.pipeline))
    flow.stream()
    with flow.streaming():
        assert verification.run(flow.pipeline, verification.in_threads(flow.pipeline)).as_json()["equal"]


def test_an_attached_partition_that_is_gone_before_it_was_read_is_told(make_flow: MakeFlow) -> None:
    flow = make_flow()
    flow.create()
    flow.snapshot()
    flow.execute(*ATTACHED["with rows"][0], "UPDATE p SET v = 'published' WHERE region = 'later' AND id <= 10")
    dies_before_it_reads(flow)
    flow.execute("ALTER TABLE p DETACH PARTITION later")
    flow.stream()
    with flow.streaming() as errors:
        until_told(flow, {"public.later"}, errors)
        _swept(flow, errors)
    flow.stream()
    assert flow.compare("p").differences == []


def test_an_attached_partition_that_is_truncated_while_it_is_read_is_told(
    make_flow: MakeFlow, monkeypatch: pytest.MonkeyPatch
) -> None:
    read_by_single_blocks(monkeypatch)
    flow = make_flow()
    flow.create()
    flow.snapshot()
    rows = "INSERT INTO later SELECT g, 'later', repeat('x', 500) FROM generate_series(1, 100) g WHERE g % 2 = 0"
    flow.execute(
        "CREATE TABLE later (LIKE p)",
        "INSERT INTO later VALUES (1, 'later', 'truncated')",
        rows,
        "ALTER TABLE p ATTACH PARTITION later FOR VALUES IN ('later')",
    )
    original, steps = reading.LiveReader._step, list[bool]()

    def step(self: reading.LiveReader) -> None:
        steps.append(True)
        if len(steps) == 3:
            until(lambda: read_again(flow), "the first rows are in the topic")
            flow.execute("TRUNCATE later", rows)
        original(self)

    monkeypatch.setattr(reading.LiveReader, "_step", step)
    with flow.streaming() as errors:
        until_told(flow, {"public.later"}, errors)
        until(lambda: not read_state(flow.pipeline, state_topic(flow)).lives, "it is read", failed=errors)
        until_told(flow, {"public.later"}, errors)
        _swept(flow, errors)
    flow.stream()
    assert flow.compare("p").differences == []


@pytest.mark.parametrize("how", ATTACHED)
def test_the_rows_of_a_partition_that_is_attached_are_read_and_no_others(make_flow: MakeFlow, how: str) -> None:
    statements, rows = ATTACHED[how]
    flow = make_flow()
    flow.create()
    flow.snapshot()
    with flow.streaming() as errors:
        flow.execute(*statements)
        until(lambda: len(read_again(flow)) == rows, "its rows", failed=errors)
        until_told(flow, set(), errors)
        everything(flow)
        flow.execute("UPDATE p SET v = v || '?' WHERE region LIKE 'late%'", "DELETE FROM p WHERE region = 'latest'")
        told_nothing(flow, errors)
    flow.stream()
    assert len(read_again(flow)) == rows
    assert flow.compare("p").differences == []


def test_rows_of_an_attached_partition_are_read_beside_writers_and_no_key_goes_back(
    make_flow: MakeFlow, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(reading, "_MOST_BLOCKS", 2)
    flow = make_flow(xid_header=True)
    flow.create()
    flow.snapshot()
    written, stopped = list[int](), threading.Event()

    def write(seed: int) -> None:
        dice = random.Random(seed)
        with connect(flow.dsn) as connection:
            connection.execute("SET search_path = public")
            while not stopped.is_set():
                # v counts the changes of a row, and of a row that was deleted and put in again
                where = f"region = 'later' AND id = {dice.randrange(1, 4000)}"
                statement = dice.choice(
                    (
                        f"UPDATE p SET v = (v::int + 1)::text WHERE {where}",
                        f"WITH gone AS (DELETE FROM p WHERE {where} RETURNING id, v)"
                        " INSERT INTO p SELECT id + 10000, 'later', (v::int + 1)::text FROM gone",
                        f"UPDATE p SET id = id + 20000, v = (v::int + 1)::text WHERE {where}",
                    )
                )
                connection.execute(statement)  # type: ignore[arg-type]
                written.append(1)

    writers = [threading.Thread(target=write, args=(seed,), daemon=True) for seed in range(3)]
    with flow.streaming() as errors:
        flow.execute(
            "CREATE TABLE later (LIKE p)",
            "INSERT INTO later SELECT g, 'later', '0', repeat('x', 500) FROM generate_series(1, 4000) g",
            "ALTER TABLE p ATTACH PARTITION later FOR VALUES IN ('later')",
        )
        for writer in writers:
            writer.start()
        until_told(flow, {"public.later"}, errors)
        until_told(flow, set(), errors)
        stopped.set()
        for writer in writers:
            writer.join(60)
    flow.stream()
    reports = snapshots.reports(flow.pipeline, flow.name)
    (report,) = (found for _, found in reports.values() if found is not None)
    assert report.state == "finished" and report.superseded > 0 and len(read_again(flow)) == report.rows
    assert flow.compare("p").differences == []
    versions: dict[int, int] = {}
    for message in flow.read("p"):
        if message.key["region"] == "later" and message.value is not None:
            version = int(message.value["v"])
            assert version >= versions.get(message.key["id"], 0)
            versions[message.key["id"]] = version
    assert len(written) > 100 and max(versions.values()) > 0


def test_partitions_that_are_attached_while_no_stream_runs_are_read_and_bounded_runs_wait_for_it(
    make_flow: MakeFlow,
) -> None:
    flow = make_flow()
    flow.create()
    flow.snapshot()
    flow.execute(*ATTACHED["with rows"][0], "UPDATE p SET v = 'after' WHERE region = 'later' AND id <= 10")
    flow.stream()
    assert len(read_again(flow)) == 50
    assert flow.compare("p").differences == []
    flow.execute("DELETE FROM p WHERE region = 'later' AND id <= 20")
    flow.stream()
    assert len(read_again(flow)) == 50
    assert flow.compare("p").differences == []


def test_a_partition_that_comes_back_after_a_sweep_is_read_again(make_flow: MakeFlow) -> None:
    flow = make_flow()
    flow.create()
    flow.snapshot()
    with flow.streaming() as errors:
        flow.execute(*ATTACHED["with rows"][0])
        until(lambda: len(read_again(flow)) == 50, "its rows", failed=errors)
        until_told(flow, set(), errors)
        flow.execute("ALTER TABLE p DETACH PARTITION later", "INSERT INTO later VALUES (51, 'later', 'meanwhile')")
        until_told(flow, {"public.later"}, errors)
        request = flow.ask("p", sweep=True)
        until(lambda: flow.reported(request).ended, "the live snapshot", failed=errors)
        until_told(flow, set(), errors)
        flow.execute("ALTER TABLE p ATTACH PARTITION later FOR VALUES IN ('later')")
        again = {"id": 51, "region": "later"}
        until(lambda: any(m.key == again for m in flow.read("p")), "its rows again", failed=errors)
        until_told(flow, set(), errors)
    flow.stream()
    assert flow.compare("p").differences == []


def test_a_sweep_that_another_job_ends_tells_the_partitions_as_well(
    make_flow: MakeFlow, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The rows before it were read by the job before."""
    flow = make_flow()
    flow.create()
    flow.snapshot()
    with flow.streaming() as errors:
        flow.execute("ALTER TABLE p DETACH PARTITION p_a")
        until_told(flow, {"public.p_a"}, errors)
        with monkeypatch.context() as patch:
            patch.setattr(reading.LiveReader, "_sweep", lambda self, *_: reading.pause(60))
            request = flow.ask("p", sweep=True)
            topic = state_topic(flow)
            until(lambda: _sweeping(flow, topic), "it sweeps", failed=errors)
    assert not errors
    with flow.streaming() as errors:
        until(lambda: flow.reported(request).ended, "the live snapshot", failed=errors)
        until_told(flow, set(), errors)
        # its rows were deleted from the topic, so they are read
        flow.execute("ALTER TABLE p ATTACH PARTITION p_a FOR VALUES IN ('a')")
        until(lambda: flow.compare("p").differences == [], "its rows again", pause=0.5, failed=errors)
        until_told(flow, set(), errors)


def _sweeping(flow: Flow, topic: str) -> bool:
    return any(progress.filenode == SWEEPING for progress in read_state(flow.pipeline, topic).lives.values())


def test_what_is_known_of_other_partitions_stays_when_one_is_attached(make_flow: MakeFlow) -> None:
    flow = make_flow()
    flow.create()
    flow.snapshot()
    with flow.streaming() as errors:
        flow.execute("DROP TABLE p_a")
        until_told(flow, {"public.p_a"}, errors)
        flow.execute(*ATTACHED["with rows"][0])
        until(lambda: len(read_again(flow)) == 50, "its rows", failed=errors)
        until_told(flow, {"public.p_a"}, errors)
    assert {m.key["region"] for m in flow.read("p") if m.op == "r" and not m.snapshot} == {"a", "b", "c", "old"}


def test_partitions_that_are_gone_before_they_could_be_read_hold_up_nothing(make_flow: MakeFlow) -> None:
    flow = make_flow()
    flow.create()
    flow.snapshot()
    flow.execute(*ATTACHED["with rows"][0])
    dies_before_it_reads(flow)
    (progress,) = read_state(flow.pipeline, state_topic(flow)).lives.values()
    assert progress.required and len(progress.parts) == 1
    flow.execute("ALTER TABLE p DETACH PARTITION later")
    flow.stream()
    assert read_again(flow) == []
    assert flow.compare("p").differences == []


def test_partitions_that_may_not_be_read_are_named_until_they_may(
    make_flow: MakeFlow, caplog: pytest.LogCaptureFixture
) -> None:
    flow = make_flow()
    flow.create()
    flow.snapshot()
    role = f"r{uuid.uuid4().hex[:8]}"
    flow.execute(
        f"CREATE ROLE {role} LOGIN REPLICATION PASSWORD 'x'",
        f"GRANT SELECT ON p, p_a, p_b, p_c, p_bc, p_old, p_new TO {role}",
    )
    flow.change(postgres=make_conninfo(flow.pipeline.postgres, user=role, password="x"))
    try:
        with flow.streaming() as errors:
            flow.execute(*ATTACHED["with rows"][0])
            until(lambda: "permission denied for table later" in caplog.text, "the error", failed=errors)
            until_told(flow, {"public.later"}, errors)
            flow.execute(f"GRANT SELECT ON later TO {role}")
        flow.stream()
        assert len(read_again(flow)) == 50
        assert flow.compare("p").differences == []
    finally:
        flow.execute(f"DROP OWNED BY {role}", f"DROP ROLE {role}")


SILENT = {
    "detached": (["ALTER TABLE p DETACH PARTITION p_a", "DELETE FROM p_a"], "public.p_a", "no longer a partition"),
    "detached concurrently": (
        ["ALTER TABLE p DETACH PARTITION p_a CONCURRENTLY"],
        "public.p_a",
        "no longer a partition",
    ),
    "dropped": (["DROP TABLE p_b"], "public.p_b", "no longer a partition"),
    "attached": (ATTACHED["with rows"][0], "public.later", "was attached"),
    "attached where it was made": (ATTACHED["where it was made"][0], "public.later", "was attached"),
    "truncated": (["TRUNCATE p_c"], "public.p_c", "was truncated"),
    "truncated above the leaves": (["TRUNCATE p_bc"], "public.p_b,public.p_c", "was truncated"),
}


@pytest.mark.parametrize("how", SILENT)
def test_what_postgresql_is_silent_about_is_told_and_mended_by_a_live_snapshot(
    make_flow: MakeFlow, caplog: pytest.LogCaptureFixture, how: str
) -> None:
    statements, names, said = SILENT[how]
    flow = make_flow(new_tables="ignore")
    flow.create()
    flow.snapshot()
    with flow.streaming() as errors:
        flow.execute(*statements)
        until_told(flow, set(names.split(",")), errors)
        assert said in caplog.text
        request = flow.ask("p", sweep=True)
        until(lambda: flow.reported(request).ended, "the live snapshot", failed=errors)
        assert flow.reported(request).state == "finished", flow.reported(request).error
        until_told(flow, set(), errors)
    flow.stream()
    assert flow.compare("p").differences == []
    with flow.streaming() as errors:
        told_nothing(flow, errors)


def test_what_is_attached_without_rows_to_a_table_without_a_key_needs_no_action(
    make_flow: MakeFlow, caplog: pytest.LogCaptureFixture
) -> None:
    """Rows cannot be read again there; inserted into the table, as the advice says, they are sent."""
    flow = make_flow(tables="k", allow_unkeyed=True)
    flow.execute("CREATE TABLE k (id int) PARTITION BY RANGE (id)", "CREATE TABLE later (id int)")
    flow.create()
    flow.snapshot()
    attach = "ALTER TABLE k ATTACH PARTITION later FOR VALUES FROM (0) TO (9)"
    flow.execute(attach)
    flow.stream()
    flow.execute("INSERT INTO k VALUES (1)", "CREATE TABLE full_one AS SELECT 11 AS id")
    flow.execute("ALTER TABLE k ATTACH PARTITION full_one FOR VALUES FROM (10) TO (19)")
    with flow.streaming() as errors:
        until_told(flow, {"public.full_one"}, errors)
        assert "detach them, and insert them into the table" in caplog.text and "later" not in caplog.text
        flow.transaction(
            "ALTER TABLE k DETACH PARTITION full_one",
            "CREATE TABLE other PARTITION OF k FOR VALUES FROM (10) TO (19)",
            "INSERT INTO k SELECT * FROM full_one",
        )
        until_told(flow, set(), errors)
    flow.stream()
    assert sorted(each.value["id"] for each in flow.read("k")) == [1, 11]


def test_the_truncation_of_the_whole_table_is_an_event_and_nothing_else(make_flow: MakeFlow) -> None:
    flow = make_flow()
    flow.create()
    flow.snapshot()
    with flow.streaming() as errors:
        flow.streams()
        flow.execute("TRUNCATE p", "INSERT INTO p VALUES (1, 'a', 'again')")
        events = f"{flow.pipeline.topic_prefix}._bottledwater_events"
        until(lambda: len(read(flow.kafka, events)) == 1, "the event", failed=errors)
        told_nothing(flow, errors)
        # the new files are known: those of later partitions are others
        flow.execute("CREATE TABLE p_x PARTITION OF p FOR VALUES IN ('x')")
        told_nothing(flow, errors)
        # one partition of it is noticed all the same
        flow.execute("TRUNCATE p_a")
        until_told(flow, {"public.p_a"}, errors)


def test_a_live_snapshot_without_sweep_reads_all_partitions(make_flow: MakeFlow) -> None:
    flow = make_flow()
    flow.create()
    flow.snapshot()
    flow.stream()
    request = flow.ask("p", where="id <= 100")
    everything(flow)
    flow.stream()
    assert (flow.reported(request).state, flow.reported(request).rows + flow.reported(request).superseded > 50) == (
        "finished",
        True,
    )
    assert flow.compare("p").differences == []


def test_a_live_snapshot_reads_small_partitions_under_one_snapshot(
    make_flow: MakeFlow, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each locks all of them."""
    flow = make_flow()
    flow.create()
    flow.snapshot()
    original, begun = reading.begin_reading, list[int]()
    monkeypatch.setattr(reading, "begin_reading", lambda *of, **more: begun.append(of[1]) or original(*of, **more))
    request = flow.ask("p")
    flow.stream()
    assert (flow.reported(request).state, flow.reported(request).rows, len(begun)) == ("finished", 400, 1)
    request = flow.ask("p", where="id <= 100")
    flow.stream()
    assert (flow.reported(request).state, flow.reported(request).rows) == ("finished", 100)
    assert flow.compare("p").differences == []


#: what is done below a table of which p_a and p_b have been read, and which partitions are read then, beside the rest
MEANWHILE = {
    "others come and go": (
        [
            "DROP TABLE p_a",
            "CREATE TABLE p_x PARTITION OF p FOR VALUES IN ('x')",
            "INSERT INTO p SELECT g, 'x', 'new' FROM generate_series(1, 100) g",
        ],
        "x",
    ),
    "rewritten": (["VACUUM FULL p_a"], "a"),
    "detached for a while": (
        [
            "ALTER TABLE p DETACH PARTITION p_a",
            "UPDATE p_a SET v = 'meanwhile'",
            "ALTER TABLE p ATTACH PARTITION p_a FOR VALUES IN ('a')",
        ],
        "a",
    ),
    "detached with others": (
        [
            "ALTER TABLE p DETACH PARTITION p_bc",
            "UPDATE p_b SET v = 'meanwhile'",
            "ALTER TABLE p ATTACH PARTITION p_bc FOR VALUES IN ('b', 'c')",
        ],
        "b",
    ),
}


def test_a_slice_does_not_know_the_places_of_a_partition_that_was_detached_for_a_while(
    make_flow: MakeFlow, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What was written to it meanwhile is in other places, which an index finds."""
    read_by_single_blocks(monkeypatch)
    flow = make_flow(new_tables="ignore")
    flow.execute(
        "CREATE INDEX ON p (v)",
        "INSERT INTO p SELECT g, 'a', CASE WHEN g % 20 = 0 THEN 'x' ELSE md5(g::text) END"
        " FROM generate_series(1001, 11000) g",
        "ANALYZE p_a",
    )
    flow.create()
    flow.snapshot()
    request = flow.ask("p", where="v = 'x'", rows_per_second=50.0)
    with flow.streaming() as errors:
        until(lambda: flow.reported(request).rows >= 100, "a part of the partition", failed=errors)
        assert flow.reported(request).rows < 500
        flow.execute(
            "ALTER TABLE p DETACH PARTITION p_a",
            "INSERT INTO p_a SELECT g, 'a', 'x' FROM generate_series(20001, 20500) g",
            "ALTER TABLE p ATTACH PARTITION p_a FOR VALUES IN ('a')",
        )
        snapshots.change(flow.pipeline, flow.name, request, rows_per_second=0.0)
        until(lambda: flow.reported(request).state == "finished", "it ends", failed=errors)
    assert not flow.compare("p").differences


@pytest.mark.parametrize("how", MEANWHILE)
def test_a_live_snapshot_reads_what_is_new_below_a_table_and_nothing_else_again(
    make_flow: MakeFlow, monkeypatch: pytest.MonkeyPatch, how: str
) -> None:
    """Also when another job goes on with it: partitions come every hour."""
    read_by_single_blocks(monkeypatch)
    statements, more = MEANWHILE[how]
    flow = make_flow(new_tables="ignore")
    flow.create()
    flow.snapshot()
    request = flow.ask("p", rows_per_second=100.0)
    with flow.streaming() as errors:
        until(lambda: flow.reported(request).rows >= 200, "half of the rows", failed=errors)
    assert flow.reported(request).rows < 400
    flow.execute(*statements)
    snapshots.change(flow.pipeline, flow.name, request, rows_per_second=0.0)
    flow.stream()
    assert flow.reported(request).state == "finished"
    again = Counter({"a": 100, "b": 100, "c": 100, "old": 100})
    again.update({more: 100})
    assert Counter(message.key["region"] for message in read_again(flow)) == again
    # without a sweep, the rows of a partition that is gone stay
    left = flow.compare("p").differences
    assert all("is not in the table" in each for each in left) and bool(left) == (how == "others come and go")


# ---------------------------------------------------------------------- refused
def test_foreign_partitions_are_refused(make_flow: MakeFlow) -> None:
    flow = make_flow(tables="*")
    flow.execute(
        "CREATE FOREIGN DATA WRAPPER nothing",
        "CREATE SERVER far FOREIGN DATA WRAPPER nothing",
        "CREATE TABLE q (id int) PARTITION BY RANGE (id)",
        "CREATE FOREIGN TABLE q_far PARTITION OF q FOR VALUES FROM (0) TO (9) SERVER far",
    )
    flow.change(allow_unkeyed=True)
    with pytest.raises(
        PreflightError, match=r"public\.q_far, a partition of public\.q, is not permanent or a foreign table"
    ):
        flow.create()
    flow.change(partitioned_tables="leaves")
    flow.create()


IDENTITIES = {
    "the root is FULL": ("ALTER TABLE p REPLICA IDENTITY FULL", "ALTER TABLE {} REPLICA IDENTITY FULL"),
    "a leaf is FULL": ("ALTER TABLE p_b REPLICA IDENTITY FULL", "ALTER TABLE p_b REPLICA IDENTITY DEFAULT"),
    "a leaf is NOTHING": ("ALTER TABLE p_b REPLICA IDENTITY NOTHING", "ALTER TABLE p_b REPLICA IDENTITY DEFAULT"),
    "a leaf has another index": (
        "ALTER TABLE p_b ALTER v SET NOT NULL; CREATE UNIQUE INDEX other ON p_b (v); ALTER TABLE p_b REPLICA IDENTITY "
        "USING INDEX other",
        "ALTER TABLE p_b REPLICA IDENTITY DEFAULT",
    ),
}


@pytest.mark.parametrize("what", IDENTITIES)
def test_a_partition_whose_old_rows_are_not_the_roots_is_refused(make_flow: MakeFlow, what: str) -> None:
    wrong, right = IDENTITIES[what]
    flow = make_flow()
    flow.execute(wrong)
    with pytest.raises(PreflightError, match=r"Partition public\.p_b has another replica identity than public\.p"):
        flow.create()
    flow.execute(*(right.format(leaf) for leaf in ("p_a", "p_b", "p_c", "p_old", "p_new")))
    flow.create()
    flow.snapshot()
    everything(flow)
    flow.stream()
    assert flow.compare("p").differences == []


def test_columns_that_the_primary_key_only_includes_are_no_part_of_a_partitions_identity(make_flow: MakeFlow) -> None:
    flow = make_flow()
    flow.execute("ALTER TABLE p DROP CONSTRAINT p_pkey, ADD PRIMARY KEY (id, region) INCLUDE (v)")
    flow.create()
    flow.snapshot()
    everything(flow)
    flow.stream()
    assert flow.compare("p").differences == []


def test_a_replica_identity_that_changes_is_told_and_the_table_read_again(
    make_flow: MakeFlow, monkeypatch: pytest.MonkeyPatch
) -> None:
    look_often(monkeypatch)
    flow = make_flow()
    flow.create()
    flow.snapshot()
    with flow.streaming() as errors:
        flow.execute("ALTER TABLE p_b REPLICA IDENTITY FULL")
        until(lambda: "public.p" in problems(flow), "it is told", failed=errors)
        assert "REPLICA IDENTITY DEFAULT" in problems(flow)["public.p"].remedy
        flow.execute("DELETE FROM p WHERE id = 1", "UPDATE p SET id = 5005 WHERE id = 5")
        flow.execute("ALTER TABLE p_b REPLICA IDENTITY DEFAULT", "DELETE FROM p WHERE id = 9")
        until(lambda: not problems(flow) and flow.compare("p").equal, "it is read again", failed=errors)
    assert errors == []
    flow.stream()
    assert flow.compare("p").equal


@pytest.mark.parametrize("gone", ["DROP TABLE p_b", "ALTER TABLE p_bc DETACH PARTITION p_b"])
def test_a_replica_identity_of_a_partition_that_is_gone_is_told(
    make_flow: MakeFlow, gone: str, caplog: pytest.LogCaptureFixture
) -> None:
    """The catalog does not show it any more when the stream comes to its changes."""
    flow = make_flow()
    flow.create()
    flow.snapshot()
    flow.execute(IDENTITIES["a leaf is FULL"][0], "DELETE FROM p WHERE id = 1", gone)
    flow.stream()
    assert "Partition public.p_b had another replica identity than public.p when it was changed" in caplog.text
    assert flow.compare("p").equal


def test_a_table_that_is_truncated_together_with_it_is_no_partition(
    make_flow: MakeFlow, caplog: pytest.LogCaptureFixture
) -> None:
    """Its columns are those of the other one, and its replica identity is not."""
    flow = make_flow(tables="p,archive")
    flow.execute("CREATE TABLE archive (LIKE p)", "ALTER TABLE archive ADD PRIMARY KEY (id)")
    flow.create()
    flow.snapshot()
    flow.execute("TRUNCATE p, archive", "INSERT INTO p VALUES (1, 'a', 'again')")
    flow.stream()
    assert "had another replica identity" not in caplog.text
    (event,) = read(flow.kafka, f"{flow.pipeline.topic_prefix}._bottledwater_events")
    assert {*event.value["topics"]} == {flow.topic("p"), flow.topic("archive")}


@pytest.mark.parametrize("format", ["json", "avro"])
def test_a_replica_identity_that_was_another_for_a_moment_makes_no_wrong_key(
    make_flow: MakeFlow, registry: SchemaRegistry, format: str, caplog: pytest.LogCaptureFixture
) -> None:
    flow = make_flow(registry if format == "avro" else None)
    flow.create()
    flow.snapshot()
    wrong, right = IDENTITIES["a leaf has another index"]
    flow.execute(
        wrong,
        "DELETE FROM p WHERE id = 1",
        "UPDATE p SET v = v || '!', id = 5005 WHERE id = 5",
        "UPDATE p SET id = 5009 WHERE id = 9",  # of which PostgreSQL sends no old row at all
        "DELETE FROM p WHERE id = 2",
        right,
        "DELETE FROM p WHERE id = 13",
    )
    flow.stream()
    assert "Partition public.p_b had another replica identity than public.p when it was changed" in caplog.text
    assert flow.compare("p").equal


def test_a_partition_that_was_not_full_for_a_moment_loses_no_large_value(make_flow: MakeFlow) -> None:
    flow = make_flow()
    wrong, right = IDENTITIES["the root is FULL"]
    leaves = [right.format(leaf) for leaf in ("p_a", "p_b", "p_c", "p_old", "p_new")]
    flow.execute(
        wrong, *leaves, "ALTER TABLE p ALTER big SET STORAGE EXTERNAL", "ALTER TABLE p_b ALTER big SET STORAGE EXTERNAL"
    )
    flow.execute("INSERT INTO p VALUES (7001, 'b', 'x', repeat('large', 10000))")
    flow.create()
    flow.snapshot()
    flow.execute(
        "ALTER TABLE p_b REPLICA IDENTITY DEFAULT",
        "UPDATE p SET id = 7002 WHERE id = 7001",
        leaves[1],
        "DELETE FROM p WHERE id = 1",
    )
    flow.stream()
    assert flow.compare("p").differences == []


@pytest.mark.parametrize("via_root", [True, False])
def test_a_publication_of_the_other_kind_is_refused_with_the_statement_that_mends_it(
    make_flow: MakeFlow, via_root: bool
) -> None:
    flow = make_flow(create_publication=False, partitioned_tables="leaves" if via_root else "root")
    name = flow.pipeline.slot
    option = f"publish_via_partition_root = {str(via_root).lower()}"
    flow.execute(
        f"CREATE PUBLICATION {name} FOR TABLE p WITH ({option})",
        f"CREATE PUBLICATION {name}_unkeyed WITH (publish = 'insert, truncate')",
    )
    with pytest.raises(PreflightError) as raised:
        flow.create()
    (said,) = raised.value.problems
    flow.execute(said.partition("Run: ")[2].partition(";")[0])
    flow.create()
    flow.snapshot()
    everything(flow)
    flow.stream()
    assert flow.compare("p_a" if via_root else "p").differences == []


# ---------------------------------------------------------------------- leaves
def test_leaves_have_topics_of_their_own(make_flow: MakeFlow) -> None:
    flow = make_flow(partitioned_tables="leaves")
    flow.create()
    everything(flow)
    assert flow.snapshot().tables == 5
    flow.execute("UPDATE p SET region = 'a' WHERE region = 'b'", "TRUNCATE p_c")
    assert flow.stream()["events"] == 1
    for leaf in ("p_a", "p_b", "p_old", "p_new"):
        assert flow.compare(leaf).differences == []


def test_a_pipeline_that_was_made_with_leaves_goes_on_with_them(make_flow: MakeFlow) -> None:
    flow = make_flow(partitioned_tables="leaves")
    flow.create()
    flow.snapshot()
    flow.change(partitioned_tables="auto")
    flow.execute("CREATE TABLE p_x PARTITION OF p FOR VALUES IN ('x')", "INSERT INTO p VALUES (1, 'x', 'new')")
    flow.create()
    flow.snapshot()
    everything(flow)
    flow.stream()
    for leaf in ("p_a", "p_x", "p_old"):
        assert flow.compare(leaf).differences == []
    flow.change(partitioned_tables="root")
    with pytest.raises(PreflightError, match="was made with partitioned_tables = leaves, and the settings say root"):
        flow.create()


def test_tables_below_a_chosen_one_are_not_chosen_again(make_flow: MakeFlow) -> None:
    flow = make_flow(tables="*,p_bc,p_a")
    flow.create()
    assert [each.table for each in status.report(flow.pipeline).tables] == ["public.p"]


def test_partitions_stay_with_a_root_that_patterns_do_not_cover_any_more(make_flow: MakeFlow) -> None:
    flow = make_flow(tables="*")
    flow.create()
    flow.snapshot()

    def equal() -> bool:
        return compare(flow.dsn, flow.pipeline.kafka, None, "archive.p", flow.topic("p")).equal

    with flow.streaming() as errors:
        flow.streams()
        flow.execute("CREATE SCHEMA archive", "ALTER TABLE p SET SCHEMA archive", "DELETE FROM archive.p WHERE id < 9")
        told_nothing(flow, errors)
        assert problems(flow) == {}
        until(equal, "it goes on", failed=errors)
    flow.create()
    flow.execute("UPDATE archive.p SET v = 'later' WHERE id < 50")
    flow.stream()
    assert equal() and [each.table for each in status.report(flow.pipeline).tables] == ["public.p"]


# ---------------------------------------------------------------------- what the catalog says
def test_a_look_shows_all_partitions_as_they_were_at_one_moment(make_flow: MakeFlow) -> None:
    """New files without the transaction that wrote all of them would be taken for those of single partitions."""
    flow = make_flow()
    ((oid,),) = flow.execute("SELECT 'p'::regclass::oid")
    with connect(flow.dsn) as connection, connection.transaction():
        connection.execute("SET TRANSACTION ISOLATION LEVEL REPEATABLE READ, READ ONLY")
        before = partitions.below(connection, [oid])
        flow.execute("TRUNCATE p", "DROP TABLE p_b")
        assert partitions.below(connection, [oid]) == before


def test_it_is_known_which_partitions_were_made_empty(each_postgres: PostgresServer) -> None:
    name = f"made_{uuid.uuid4().hex[:8]}"
    with connect(each_postgres.createdb(name)) as connection:
        connection.execute("SET search_path = public")
        for statement in (
            "CREATE TABLE q (id int, v text DEFAULT 'x', n numeric CHECK (n > 0), CONSTRAINT k CHECK (id > 1), "
            "PRIMARY KEY (id)) PARTITION BY LIST (id)",
            "CREATE TABLE yes_1 PARTITION OF q (v DEFAULT 'z', CONSTRAINT z CHECK (id < 1000), CHECK (n <> 7)) FOR "
            "VALUES IN (1)",
            "CREATE TABLE yes_default PARTITION OF q DEFAULT",
            "CREATE TABLE yes_2 PARTITION OF q FOR VALUES IN (2, 3) PARTITION BY LIST (id)",
            "CREATE TABLE yes_2_2 PARTITION OF yes_2 FOR VALUES IN (2)",
            "BEGIN; SELECT 1; CREATE TABLE yes_4 PARTITION OF q FOR VALUES IN (4); INSERT INTO q VALUES (4); COMMIT",
            "CREATE TABLE no_5 (LIKE q)",
            "ALTER TABLE no_5 ADD PRIMARY KEY (id), ADD CONSTRAINT q_n_check CHECK (n > 0), ADD CONSTRAINT k CHECK "
            "(id > 1)",
            "ALTER TABLE q ATTACH PARTITION no_5 FOR VALUES IN (5)",
            "CREATE TABLE r (id int, v text) PARTITION BY LIST (id)",
            "BEGIN; CREATE TABLE no_1 (id int, v text); INSERT INTO no_1 VALUES (1);"
            " ALTER TABLE r ATTACH PARTITION no_1 FOR VALUES IN (1); COMMIT",
            "BEGIN; CREATE TABLE no_2 AS SELECT 2 AS id, 'x'::text AS v; ALTER TABLE r ATTACH PARTITION no_2 FOR "
            "VALUES IN (2); COMMIT",
            "VACUUM FULL pg_inherits",
            "VACUUM FREEZE pg_attribute",
            "ALTER TABLE yes_1 ADD CONSTRAINT w CHECK (id < 999)",
        ):
            connection.execute(statement)
        oids = [row[0] for row in connection.execute("SELECT oid FROM pg_class WHERE relname IN ('q', 'r')")]
        found = [each for some in partitions.below(connection, oids).values() for each in some]
        assert {each.name for each in found if each.created} == {
            each.name for each in found if each.name.startswith("yes")
        }
        assert len(found) == 8
    with connect(each_postgres.dsn()) as connection:
        connection.execute(f"DROP DATABASE {name} WITH (FORCE)")  # type: ignore[arg-type]


# ---------------------------------------------------------------------- a table of the pipeline becomes a partition
def test_a_followed_table_that_was_a_partition_for_a_while_is_read_again(
    make_flow: MakeFlow, monkeypatch: pytest.MonkeyPatch
) -> None:
    reads, may_go_on, hand_over = threading.Event(), threading.Event(), reading.LiveReader._hand_over
    may_go_on.set()

    def held(self: reading.LiveReader, chunk: LiveChunk) -> None:
        if chunk.version.table.name == "later":
            reads.set()
            may_go_on.wait()
        hand_over(self, chunk)

    monkeypatch.setattr(reading.LiveReader, "_hand_over", held)
    flow = make_flow(tables=("p", "later", "gone"))
    flow.execute(
        "CREATE TABLE later (LIKE p, PRIMARY KEY (id, region))",
        "CREATE TABLE gone (id int PRIMARY KEY)",
        "INSERT INTO later SELECT g, 'later', 'own' FROM generate_series(1, 50) g",
        "INSERT INTO gone VALUES (1)",
    )
    flow.create()
    flow.snapshot()

    def known() -> PipelineState:
        return read_state(flow.pipeline, state_topic(flow))

    def verified() -> dict[str, tuple[str, str]]:
        found = verification.run(flow.pipeline, verification.in_threads(flow.pipeline))
        return {each.table: (each.verdict, each.reason) for each in found.tables}

    with flow.streaming() as errors:
        flow.streams()
        flow.execute("UPDATE later SET v = 'own' WHERE id = 1", "DROP TABLE gone")
        equal = ("equal", "")
        dropped = ("dropped", "it does not exist any more; its rows stay in the topic")
        found = verified()
        # it may not be followed any more
        assert found.pop("public.gone", dropped) == dropped and found == {"public.later": equal, "public.p": equal}
        flow.execute("ALTER TABLE p ATTACH PARTITION later FOR VALUES IN ('later')")
        until(lambda: known().below, "the stream knows that it is a partition", failed=errors)
        until(lambda: not any(each.unfinished for each in known().lives.values()), "it is read", failed=errors)
        flow.execute("UPDATE p SET v = 'root''s' WHERE region = 'later' AND id <= 10", "DELETE FROM p WHERE id = 20")
        below = ("not verified", "it is a partition of public.p now, and its changes are in the topic of that table")
        found = verified()
        assert found.pop("public.gone", dropped) == dropped and found == {"public.later": below, "public.p": equal}
        flow.execute("ALTER TABLE p DETACH PARTITION later", "UPDATE later SET v = 'own again' WHERE id = 30")
        until(lambda: not known().below, "the stream knows that it is detached", failed=errors)
        until(lambda: not any(each.unfinished for each in known().lives.values()), "it is read", failed=errors)
        assert verified()["public.later"] == equal
        # it is a partition once more, for a part of the time in which it is read again
        attach = "ALTER TABLE p ATTACH PARTITION later FOR VALUES IN ('later')"
        detach = "ALTER TABLE p DETACH PARTITION later"
        flow.execute(attach)
        until(lambda: known().below, "the stream knows that it is a partition", failed=errors)
        until(lambda: not any(each.unfinished for each in known().lives.values()), "it is read", failed=errors)
        reads.clear()
        may_go_on.clear()
        flow.execute(detach)
        until(reads.is_set, "its rows are read", failed=errors)
        flow.execute(attach)
        until(lambda: known().below, "the stream knows that it is a partition", failed=errors)
        flow.published("UPDATE p SET v = 'while it was one' WHERE region = 'later' AND id = 1")
        flow.execute(detach)
        until(lambda: not known().below, "the stream knows that it is detached", failed=errors)
        may_go_on.set()
        until(lambda: not any(each.unfinished for each in known().lives.values()), "it is read", failed=errors)
    assert flow.compare("later").differences == []
