"""Tables that come, go and change under a running stream: what is followed is what bears a name that is wanted, by
itself, and what is not is told with its reason."""

from __future__ import annotations

import random
import threading
import time
from collections.abc import Iterator
from typing import Any

import psycopg
import pytest
from confluent_kafka.schema_registry import SchemaRegistryClient

from airflow_bottledwater.errors import Outage
from airflow_bottledwater.kafka.publisher import Records
from airflow_bottledwater.kafka.registry import Registry
from airflow_bottledwater.local.registry import SchemaRegistry
from airflow_bottledwater.model.problem import Problem
from airflow_bottledwater.postgres.connect import connect
from airflow_bottledwater.publish import toast
from airflow_bottledwater.state.claim import read_state
from airflow_bottledwater.state.records import BY_LIVE, BY_STREAM
from airflow_bottledwater.stream.publisher import StreamPublisher
from airflow_bottledwater.tables import new_rows
from tests.support.tables import look_often, problems
from tests.support.topics import Flow, MakeFlow
from tests.support.waiting import until
from tests.support.writers import state_topic


@pytest.fixture(autouse=True)
def often_looked_at(monkeypatch: pytest.MonkeyPatch) -> None:
    """The catalog is looked at ten times a second."""
    look_often(monkeypatch, interval=1.0)


def _make(make_flow: MakeFlow, *tables: str, registry: SchemaRegistry | None = None, **settings: object) -> Flow:
    flow = make_flow(registry, **{"tables": "*", **settings})
    for name in tables:
        flow.execute(
            f"CREATE TABLE {name} (id int PRIMARY KEY, text text)",
            f"INSERT INTO {name} SELECT g, '{name}' FROM generate_series(1, 20) g",
        )
    flow.create()
    flow.snapshot()
    return flow


def _topics(flow: Flow) -> dict[str, str]:
    """The topics of the tables that are followed, by the names that these have today."""
    known = read_state(flow.pipeline, state_topic(flow))
    today = dict(flow.execute("SELECT oid, relname FROM pg_class"))
    prefix = f"{flow.pipeline.topic_prefix}."
    return {str(today[oid]): each.topic.removeprefix(prefix) for oid, each in known.tables.items() if oid in today}


def _gaps(flow: Flow) -> list[str]:
    """Why topics lack changes."""
    return [gap.why for gap in read_state(flow.pipeline, state_topic(flow)).gaps.values()]


def _equal(flow: Flow, errors: list[BaseException], *tables: str) -> None:
    until(
        lambda: all(_topics(flow).get(each) == each for each in tables),
        f"{tables} have their topics",
        failed=errors,
    )
    until(lambda: all(flow.compare(each).equal for each in tables), f"topics are {tables}", pause=0.3, failed=errors)


def test_a_staging_table_that_takes_a_name_gets_the_topic(make_flow: MakeFlow) -> None:
    flow = _make(make_flow, "orders", "orders_new", "other")
    with flow.streaming() as errors:
        flow.execute("UPDATE orders SET text = 'last' WHERE id = 5", "DELETE FROM orders_new WHERE id > 15")
        flow.transaction(
            "ALTER TABLE orders RENAME TO orders_old",
            "ALTER TABLE orders_new RENAME TO orders",
            "DROP TABLE orders_old",
            "UPDATE orders SET text = 'new' WHERE id = 1",
        )
        flow.execute("UPDATE other SET text = 'goes on'")
        _equal(flow, errors, "orders", "other")
        # a table of the earlier name, and a topic that had rows
        flow.execute("CREATE TABLE orders_new (id int PRIMARY KEY, n int)", "INSERT INTO orders_new VALUES (7, 7)")
        _equal(flow, errors, "orders", "orders_new")
        flow.execute("UPDATE orders SET text = 'newer'", "UPDATE orders_new SET n = 8")
        _equal(flow, errors, "orders", "orders_new")
    assert errors == []
    # what was committed to the table before is there, before any row of the other one
    texts = [m.value["text"] for m in flow.read("orders") if m.key == {"id": 5} and m.value]
    assert texts[:2] == ["orders", "last"] and texts[-1] == "newer"


def test_names_that_are_exchanged_and_rotated(make_flow: MakeFlow) -> None:
    flow = _make(make_flow, "a", "b", "log")
    with flow.streaming() as errors:
        flow.transaction("ALTER TABLE a RENAME TO x", "ALTER TABLE b RENAME TO a", "ALTER TABLE x RENAME TO b")
        flow.execute("DELETE FROM a WHERE id < 5", "UPDATE b SET text = 'b is a' WHERE id = 2")
        flow.transaction("ALTER TABLE log RENAME TO log_1", "CREATE TABLE log (id int PRIMARY KEY)")
        flow.execute("INSERT INTO log VALUES (1)", "UPDATE log_1 SET text = 'late' WHERE id = 1")
        _equal(flow, errors, "a", "b", "log", "log_1")
        flow.execute("CREATE SCHEMA archive", "ALTER TABLE a SET SCHEMA archive", "CREATE TABLE a (id int PRIMARY KEY)")
        flow.execute("INSERT INTO a VALUES (100)", "UPDATE archive.a SET text = 'not wanted'")
        _equal(flow, errors, "a", "b", "log")
    flow.stream()
    assert errors == [] and flow.compare("a").equal and not problems(flow)


def test_a_table_is_followed_as_soon_as_it_has_a_key(make_flow: MakeFlow) -> None:
    flow = _make(make_flow, "first")
    with flow.streaming() as errors:
        flow.execute("CREATE TABLE late (id int, text text)", "INSERT INTO late VALUES (1, 'a'), (2, 'b')")
        until(lambda: "public.late" in problems(flow), "it is told", failed=errors)
        problem = problems(flow)["public.late"]
        assert problem.kind == "not-followed" and "no primary key" in problem.reason and "primary key" in problem.remedy
        flow.execute("UPDATE late SET text = 'x' WHERE id = 1", "ALTER TABLE late ADD PRIMARY KEY (id)")
        _equal(flow, errors, "late")
        until(lambda: not problems(flow), "nothing is wrong any more", failed=errors)


@pytest.mark.long
def test_a_publication_of_others_is_followed_when_it_has_the_table_again(make_flow: MakeFlow) -> None:
    flow = make_flow(tables="*", create_publication=False)
    name = flow.pipeline.publication_name
    flow.execute(
        "CREATE TABLE t (id int PRIMARY KEY)",
        f"CREATE PUBLICATION {name} FOR TABLE ONLY t",
        f"CREATE PUBLICATION {name}_unkeyed WITH (publish = 'insert, truncate')",
        "INSERT INTO t VALUES (1), (2)",
    )
    flow.create()
    flow.snapshot()
    with flow.streaming() as errors:
        flow.transaction("DROP TABLE t", "CREATE TABLE t (id int PRIMARY KEY)", "INSERT INTO t VALUES (7)")
        until(lambda: "public.t" in problems(flow), "it is told", failed=errors)
        problem = problems(flow)["public.t"]
        assert f"is not in publication '{name}'" in problem.reason
        # what the remedy says
        statement = problem.remedy.partition("run: ")[2].partition(";")[0]
        flow.execute(statement, "INSERT INTO t VALUES (8)")
        _equal(flow, errors, "t")
        until(lambda: not problems(flow), "nothing is wrong any more", failed=errors)
    assert flow.stream() and flow.compare("t").equal


def test_what_a_server_refuses_for_a_while_is_tried_again(
    make_flow: MakeFlow, registry: SchemaRegistry, monkeypatch: pytest.MonkeyPatch
) -> None:
    flow = _make(make_flow, "first", registry=registry)
    with flow.streaming() as errors, monkeypatch.context() as patch:

        def refuse(*_: object) -> int:
            raise Outage("The registry is read-only.")

        patch.setattr(Registry, "register", refuse)
        flow.execute("CREATE TABLE late (id int PRIMARY KEY)", "INSERT INTO late VALUES (1)")
        until(lambda: "public.late" in problems(flow), "it is told", failed=errors)
        assert "The registry is read-only" in problems(flow)["public.late"].reason
        flow.execute("UPDATE first SET text = 'goes on' WHERE id = 1")
        patch.undo()
        _equal(flow, errors, "late", "first")
    assert errors == []


def test_a_table_that_loses_its_key_harms_nobody_and_comes_back_with_one(make_flow: MakeFlow) -> None:
    flow = _make(make_flow, "t", "u")
    with flow.streaming() as errors:
        flow.execute("UPDATE t SET text = 'before' WHERE id = 1", "ALTER TABLE t DROP CONSTRAINT t_pkey")

        def writable() -> bool:
            try:
                flow.execute("UPDATE t SET text = 'without' WHERE id = 2", "DELETE FROM t WHERE id = 3")
            except psycopg.Error:
                return False
            return True

        until(writable, "it can be written to", failed=errors)
        until(lambda: "public.t" in problems(flow), "it is told", failed=errors)
        assert "has no key any more" in problems(flow)["public.t"].reason
        until(lambda: _gaps(flow) == ["had no key for a while"], "that is recorded", failed=errors)
        flow.execute("UPDATE u SET text = 'goes on' WHERE id = 1")
        _equal(flow, errors, "u")
        flow.execute("ALTER TABLE t ADD PRIMARY KEY (id)", "INSERT INTO t VALUES (50, 'again')")
        _equal(flow, errors, "t")
    flow.stream()
    assert errors == [] and flow.compare("t").equal and flow.compare("u").equal


@pytest.mark.long
def test_a_table_that_cannot_leave_its_publication_yet_keeps_nobody_waiting(make_flow: MakeFlow) -> None:
    flow = _make(make_flow, "t", "u", "v")
    flow.execute("ALTER TABLE t DROP CONSTRAINT t_pkey", "ALTER TABLE u DROP CONSTRAINT u_pkey")

    def told() -> dict[str, Problem]:
        job = flow.job
        return {each.subject: each for each in job.problems if each.kind == "writes-fail"} if job else {}

    def writable(table: str) -> bool:
        try:
            flow.execute(f"UPDATE {table} SET text = 'without' WHERE id = 2")
        except psycopg.errors.ObjectNotInPrerequisiteState:
            return False
        return True

    with psycopg.connect(flow.dsn) as other, flow.streaming() as errors:
        # as CREATE INDEX CONCURRENTLY and VACUUM do
        other.execute("LOCK TABLE t IN SHARE UPDATE EXCLUSIVE MODE")
        until(lambda: "public.t" in told(), "it is told", failed=errors)
        assert "ShareUpdateExclusiveLock on public.t" in told()["public.t"].reason
        assert "pg_terminate_backend" in told()["public.t"].remedy
        assert not writable("t") and writable("u")
        flow.published("UPDATE v SET text = 'goes on' WHERE id = 1")
        other.rollback()
        until(lambda: writable("t"), "it can be written to", failed=errors)
        until(lambda: not told(), "it is told no more", failed=errors)
    assert errors == []


@pytest.mark.some(1)
@pytest.mark.parametrize("format", ["json", "avro"])
def test_another_key_is_taken_up_by_itself(make_flow: MakeFlow, registry: SchemaRegistry, format: str) -> None:
    flow = make_flow(registry if format == "avro" else None, tables="*")
    flow.execute(
        "CREATE TABLE t (id int PRIMARY KEY, other int NOT NULL UNIQUE)",
        "INSERT INTO t SELECT g, 1000 + g FROM generate_series(1, 20) g",
        "CREATE TABLE u (id int PRIMARY KEY)",
    )
    flow.create()
    flow.snapshot()
    with flow.streaming() as errors:
        flow.execute(
            "DELETE FROM t WHERE id = 20",
            "ALTER TABLE t DROP CONSTRAINT t_pkey, ADD CONSTRAINT t_pkey PRIMARY KEY (other)",
            "DELETE FROM t WHERE id = 19",
            "INSERT INTO t VALUES (30, 30)",
            "INSERT INTO u VALUES (1)",
        )
        if format == "avro":
            until(lambda: "public.t" in problems(flow), "it is told", failed=errors)
            problem = problems(flow)["public.t"]
            assert "refuses the schema of subject" in problem.reason and "relax the subject" in problem.remedy
            subject = f"{flow.topic('t')}-key"
            SchemaRegistryClient({"url": registry.url}).set_compatibility(subject, level="NONE")
        _equal(flow, errors, "t", "u")
        flow.execute("UPDATE t SET id = id + 1 WHERE other < 1010")
        _equal(flow, errors, "t")
    assert errors == []


@pytest.mark.long
def test_many_tables_that_are_made_again_take_one_pause(make_flow: MakeFlow) -> None:
    names = [f"t{number}" for number in range(8)]
    flow = _make(make_flow, *names, "other")
    with flow.streaming() as errors:
        flow.execute("UPDATE other SET text = 'before' WHERE id = 1")
        until(lambda: len(flow.read("other")) == 21, "the stream runs", failed=errors)
        flow.transaction(
            *(
                statement
                for name in names
                for statement in (
                    f"DROP TABLE {name}",
                    f"CREATE TABLE {name} (id int PRIMARY KEY)",
                    f"INSERT INTO {name} SELECT generate_series(5, 10)",
                )
            )
        )
        began, longest, last = time.monotonic(), 0.0, time.monotonic()
        count = len(flow.read("other"))
        while not all(_topics(flow).get(name) == name for name in names) or time.monotonic() - began < 5:
            flow.execute("UPDATE other SET text = text || '.' WHERE id = 1")
            time.sleep(0.05)
            if (now := len(flow.read("other"))) > count:
                count, longest, last = now, max(longest, time.monotonic() - last), time.monotonic()
            assert time.monotonic() - began < 60 and not errors
        _equal(flow, errors, *names)
        print(f"longest pause {longest:.1f} s, equal after {time.monotonic() - began:.1f} s")
    assert errors == []


def test_a_table_that_lives_for_a_moment_leaves_nothing(make_flow: MakeFlow, monkeypatch: pytest.MonkeyPatch) -> None:
    look_often(monkeypatch, lasts=2.0)
    flow = _make(make_flow, "first", tables=("*", "!hidden_*", "!repack.*"))
    with flow.streaming() as errors:
        flow.execute("CREATE TABLE hidden_1 (id int PRIMARY KEY)", "CREATE TABLE late (id int PRIMARY KEY)")
        for _ in range(5):
            flow.execute("CREATE TABLE helper (id int PRIMARY KEY)", "INSERT INTO helper VALUES (1)")
            time.sleep(0.5)
            flow.execute("DROP TABLE helper")
        _equal(flow, errors, "late")
        # on a slow machine it may have been there for long enough to be taken in, and gone when that was tried
        until(lambda: not problems(flow), "nothing is left to be told", failed=errors)
    assert set(_topics(flow)) == {"first", "late"}
    assert errors == []


@pytest.mark.long
def test_names_inside_of_types_that_change_are_published_again(make_flow: MakeFlow) -> None:
    flow = make_flow(tables="*", allow_unkeyed=True)
    flow.execute(
        "CREATE TYPE pair AS (a int, b text)",
        "CREATE TYPE mood AS ENUM ('sad', 'ok')",
        "CREATE DOMAIN named AS text",
        "CREATE TYPE moods AS RANGE (subtype = mood)",
        "CREATE TABLE t (id int PRIMARY KEY, p pair[], m mood, d named)",
        "INSERT INTO t SELECT g, ARRAY[ROW(g, 'x')::pair], 'sad', 'd' FROM generate_series(1, 20) g",
        "CREATE TABLE span (m moods PRIMARY KEY)",
        "INSERT INTO span VALUES ('[sad,ok]')",
        "CREATE TABLE log (p pair)",
        "CREATE TABLE other (id int PRIMARY KEY)",
        "INSERT INTO other VALUES (1)",
    )
    flow.create()
    flow.snapshot()
    with flow.streaming() as errors:
        flow.published("DELETE FROM t WHERE id = 20")
        flow.execute("ALTER TYPE pair RENAME ATTRIBUTE a TO n", "UPDATE t SET d = 'e' WHERE id < 5")
        until(lambda: flow.compare("t").equal, "the attribute's new name", failed=errors)
        flow.execute("INSERT INTO log VALUES ('(1,y)')")
        until(lambda: flow.read("log"), "the new row of a log", failed=errors)
        assert [m.value for m in flow.read("log")] == [{"p": {"n": 1, "b": "y"}}]
        flow.execute("ALTER TYPE mood RENAME VALUE 'sad' TO 'blue'")
        until(lambda: flow.compare("t").equal, "the label's new name", failed=errors)
        until(lambda: flow.compare("span").equal, "the label's new name in a text", failed=errors)
        count = len(flow.read("t"))
        # what only adds something is no reason to read the table again
        flow.execute("ALTER TYPE pair ADD ATTRIBUTE c int", "ALTER TYPE mood ADD VALUE 'great'")
        flow.execute(
            "ALTER DOMAIN named ADD CHECK (value <> 'x')", "INSERT INTO t VALUES (50, '{\"(1,z,3)\"}', 'great')"
        )
        until(lambda: len(flow.read("t")) > count, "the new row", failed=errors)
        time.sleep(1.5)
    assert errors == [] and not problems(flow)
    new = flow.read("t")[-1].value
    assert len(flow.read("t")) == count + 1 and len(flow.read("other")) == 1
    assert (new["p"], new["m"]) == ([{"n": 1, "b": "z", "c": 3}], "great")
    # of what was added since the table was recorded, and while no stream runs
    flow.execute("ALTER TYPE pair RENAME ATTRIBUTE c TO d", "ALTER TYPE mood RENAME VALUE 'great' TO 'fine'")
    assert not flow.compare("t").equal
    with flow.streaming() as errors:
        until(lambda: flow.compare("t").equal, "the names that were changed meanwhile", failed=errors)
        count = len(flow.read("t"))
        flow.published("UPDATE t SET d = 'f' WHERE id = 1")
    assert errors == [] and not problems(flow) and len(flow.read("t")) == count + 1


class _Writers:
    """Insert into tables without a key, each in transactions of its own, some of which take longer than a table takes
    to be published."""

    def __init__(self, flow: Flow) -> None:
        self._flow, self._stop = flow, threading.Event()
        self._threads: list[threading.Thread] = []
        self.written: dict[str, int] = {}

    def start(self, table: str) -> None:
        self._flow.execute(f"CREATE TABLE {table} AS SELECT -g AS n, 'y' AS t FROM generate_series(1, 500) g")
        self.written[table] = 0
        self._threads.append(threading.Thread(target=self._run, args=(table,), daemon=True))
        self._threads[-1].start()

    def _run(self, table: str) -> None:
        with connect(self._flow.pipeline.postgres, application=table) as connection:
            while not self._stop.is_set():
                with connection.transaction():
                    for _ in range(random.randint(1, 3)):
                        self.written[table] += 1
                        connection.execute(f"INSERT INTO public.{table} VALUES ({self.written[table]}, 'x')")
                        time.sleep(random.choice([0, 0, 0.01, 0.3]))

    def end(self) -> None:
        self._stop.set()
        for thread in self._threads:
            thread.join()

    def check(self) -> None:
        """Each row is in its topic once."""
        for table, count in self.written.items():
            found = sorted(message.value["n"] for message in self._flow.read(table))
            assert found == [*range(-500, 0), *range(1, count + 1)], table


@pytest.mark.long
def test_new_tables_without_a_key_have_each_row_once(make_flow: MakeFlow) -> None:
    flow = _make(make_flow, "first", tables="*", allow_unkeyed=True)
    writers, names = _Writers(flow), [f"log_{n}" for n in range(4)]
    with flow.streaming() as errors:
        until(lambda: flow.state == "streaming", "the stream runs", failed=errors)
        for name in names:
            writers.start(name)
            time.sleep(random.uniform(0, 3))
        until(lambda: set(names) <= set(_topics(flow)), "they are taken in", failed=errors)
        time.sleep(2)
        writers.end()
        flow.published("INSERT INTO first VALUES (99)")
    assert errors == [] and not problems(flow)
    writers.check()


def test_a_bounded_run_that_is_behind_takes_them_in(make_flow: MakeFlow) -> None:
    flow = _make(make_flow, "first", tables="*", allow_unkeyed=True)
    writers = _Writers(flow)
    for name in ("log_1", "log_2"):
        writers.start(name)
    flow.execute("INSERT INTO first SELECT g FROM generate_series(100, 20000) g")
    flow.stream()
    assert {"log_1", "log_2"} <= set(_topics(flow))
    writers.end()
    flow.stream()
    writers.check()


def test_what_was_committed_behind_their_rows_has_the_positions_that_the_stream_counts(
    make_flow: MakeFlow, monkeypatch: pytest.MonkeyPatch
) -> None:
    flow = _make(make_flow, "first", tables="*", allow_unkeyed=True, messages={"mail": "mails"})
    read = new_rows.read

    def behind(*given: Any) -> new_rows.NewRows:
        rows = read(*given)
        monkeypatch.setattr(new_rows, "read", read)
        flow.execute(
            "DO $$ BEGIN PERFORM pg_logical_emit_message(true, 'mail', '1'), pg_logical_emit_message(true, 'no', '2');"
            " INSERT INTO log VALUES (2); INSERT INTO first VALUES (99); END $$"
        )
        until(lambda: len(flow.read("first")) == 21, "the stream has passed it")
        return rows

    monkeypatch.setattr(new_rows, "read", behind)
    with flow.streaming() as errors:
        flow.streams()
        flow.execute("CREATE TABLE log AS SELECT 1 AS n")
        until(lambda: "log" in _topics(flow) and len(flow.read("log")) == 2, "it is taken in", failed=errors)
    ordinals = [[m.pos.rpartition("/")[2] for m in flow.read(table)][-1] for table in ("log", "first")]
    assert [int(each, 16) for each in ordinals] == [3, 4]
    assert [m.value for m in flow.read("log")] == [{"n": 1}, {"n": 2}]


def _behind(flow: Flow, monkeypatch: pytest.MonkeyPatch, *statements: str) -> None:
    """Let statements be committed behind the rows of new tables that are read first, each in a transaction of its own,
    which the stream passes before it takes the tables in."""
    read = new_rows.read

    def behind(*given: Any) -> new_rows.NewRows:
        rows = read(*given)
        # a look that began before they were taken in reads them again, for nothing
        monkeypatch.setattr(new_rows, "read", read)
        flow.execute(*statements, "INSERT INTO first VALUES (99)")
        until(lambda: 99 in [m.key["id"] for m in flow.read("first")], "the stream has passed them")
        return rows

    monkeypatch.setattr(new_rows, "read", behind)


def test_all_that_was_committed_behind_their_rows_is_published_however_large_what_it_lacks_is(
    make_flow: MakeFlow, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The new rows of updates lack large values, which are filled in from the old ones (REPLICA IDENTITY FULL)."""
    flow = _make(make_flow, "first", tables="*", allow_unkeyed=True)
    monkeypatch.setattr(toast, "_LACKING_BYTES", 20_000)
    update = "UPDATE log SET n = {} WHERE n >= 0"
    _behind(flow, monkeypatch, update.format(1), f"INSERT INTO log VALUES (-1); {update.format(2)}", update.format(3))
    with flow.streaming() as errors:
        flow.streams()
        flow.transaction(
            "CREATE TABLE log (n int, t text)",
            "ALTER TABLE log REPLICA IDENTITY FULL",
            "ALTER TABLE log ALTER COLUMN t SET STORAGE EXTERNAL",
            "INSERT INTO log SELECT 0, repeat('x', 5000) FROM generate_series(1, 7)",
        )
        until(lambda: "log" in _topics(flow), "it is taken in", failed=errors)
        flow.published("INSERT INTO log VALUES (4)")
    found = sorted((m.value["n"], len(m.value["t"] or "")) for m in flow.read("log"))
    assert found == [(-1, 0), *[(n, 5000) for n in range(4) for _ in range(7)], (4, 0)]


def test_what_cannot_be_published_of_their_changes_counts_as_of_the_stream(
    make_flow: MakeFlow, monkeypatch: pytest.MonkeyPatch
) -> None:
    flow = _make(make_flow, "first", tables="*", allow_unkeyed=True, on_error="log")
    _behind(flow, monkeypatch, "INSERT INTO log VALUES (repeat('x', 3000000))")
    with flow.streaming() as errors:
        flow.streams()
        flow.execute("CREATE TABLE log AS SELECT repeat('x', 3000001) AS t")
        until(lambda: "log" in _topics(flow), "it is taken in", failed=errors)
    known = read_state(flow.pipeline, state_topic(flow))
    counts = {key.rpartition("/")[2]: each.written for key, each in known.letters.items()}
    assert counts == {BY_STREAM: 1, BY_LIVE: 1}


def test_a_job_that_dies_while_it_publishes_them_leaves_nothing_of_them(
    make_flow: MakeFlow, monkeypatch: pytest.MonkeyPatch
) -> None:
    flow = _make(make_flow, "first", tables="*", allow_unkeyed=True)
    records = StreamPublisher._first

    def dies(*given: Any) -> Iterator[Records]:
        yield from records(*given)
        raise RuntimeError("the end")

    writers = _Writers(flow)
    writers.start("log")
    with monkeypatch.context() as patched, pytest.raises(RuntimeError, match="the end"):
        patched.setattr(StreamPublisher, "_first", dies)
        flow.stream()
    assert not flow.read("log")
    flow.stream()
    writers.end()
    flow.stream()
    writers.check()
    assert not problems(flow)
    # another table without a key never gets a topic that has records
    flow.execute("DROP TABLE log", "CREATE TABLE log AS SELECT 1 AS n")
    flow.stream()
    assert set(problems(flow)) == {"public.log"} and len(flow.read("log")) == 500 + writers.written["log"]


@pytest.mark.long
def test_a_row_of_a_new_table_that_cannot_be_published_stops_no_other_table(make_flow: MakeFlow) -> None:
    flow = _make(make_flow, "first", tables="*", allow_unkeyed=True)
    with flow.streaming() as errors:
        flow.execute("CREATE TABLE large AS SELECT repeat('x', 3000000) AS t", "CREATE TABLE log AS SELECT 1 AS n")
        until(lambda: problems(flow), "it is told", failed=errors)
        flow.published("INSERT INTO first VALUES (99)")
        flow.execute("CREATE TABLE later AS SELECT 2 AS n")
        until(lambda: {"log", "later"} <= set(_topics(flow)), "others are taken in", failed=errors)
        assert {each.rpartition(".")[2] for each in problems(flow)} == {"large"}
    assert errors == [] and not flow.read("large")
    assert [[m.value["n"] for m in flow.read(name)] for name in ("log", "later")] == [[1], [2]]
