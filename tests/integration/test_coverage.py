"""Publications that change under a pipeline: a table that was not published for a while is noticed, what is harmless is
not."""

from __future__ import annotations

import re
import time
import uuid
from pathlib import Path

import pytest
from psycopg.conninfo import conninfo_to_dict, make_conninfo

from airflow_bottledwater.errors import PreflightError
from airflow_bottledwater.jobs import status
from airflow_bottledwater.kafka.topics import Topics
from airflow_bottledwater.local.kafka import KafkaBroker
from airflow_bottledwater.local.postgres import PostgresServer
from airflow_bottledwater.local.process import plain_environment
from airflow_bottledwater.model.problem import Problem
from airflow_bottledwater.postgres.connect import connect
from airflow_bottledwater.postgres.server import identify
from airflow_bottledwater.provision import preflight
from airflow_bottledwater.provision.drop import drop
from airflow_bottledwater.state.claim import read_own, read_state
from airflow_bottledwater.state.problems import Problems
from airflow_bottledwater.tables import watch
from airflow_bottledwater.tables.watch import TableWatch
from tests.support.tables import look_often, problems
from tests.support.topics import Flow, MakeFlow
from tests.support.waiting import until
from tests.support.writers import state_topic


@pytest.fixture(autouse=True)
def often_looked_at(monkeypatch: pytest.MonkeyPatch) -> None:
    """The catalog is looked at ten times a second."""
    look_often(monkeypatch)


@pytest.fixture
def flow_statements() -> tuple[str, ...]:
    return tuple(
        statement
        for table in ("a", "b")
        for statement in (
            f"CREATE TABLE {table} (id int PRIMARY KEY, n int, t text)",
            f"INSERT INTO {table} SELECT g, g FROM generate_series(1, 5) g",
        )
    )


def gap(flow: Flow, kind: str) -> list[str]:
    """Statements after which some of table ``a`` was not published."""
    name = flow.pipeline.slot
    write = "UPDATE a SET n = n + 1"
    return {
        "table": [f"ALTER PUBLICATION {name} DROP TABLE a", write, f"ALTER PUBLICATION {name} ADD TABLE a"],
        "taken out": [f"ALTER PUBLICATION {name} DROP TABLE a", write],
        "publication": [
            f"DROP PUBLICATION {name}",
            write,
            f"CREATE PUBLICATION {name} FOR TABLE a, b WITH (publish = 'insert, update, delete, truncate')",
        ],
        "renamed": [
            f"ALTER PUBLICATION {name} RENAME TO {name}_other",
            write,
            f"ALTER PUBLICATION {name}_other RENAME TO {name}",
        ],
        "operations": [
            f"ALTER PUBLICATION {name} SET (publish = 'insert')",
            write,
            f"ALTER PUBLICATION {name} SET (publish = 'insert, update, delete, truncate')",
        ],
        "operations and owner": [
            f"ALTER PUBLICATION {name} SET (publish = 'insert')",
            write,
            f"ALTER PUBLICATION {name} SET (publish = 'insert, update, delete, truncate')",
            f"CREATE ROLE owner_{name} SUPERUSER",
            f"ALTER PUBLICATION {name} OWNER TO owner_{name}",
        ],
    }[kind]


@pytest.mark.long
@pytest.mark.parametrize("kind", ["publication", "renamed", "operations", "operations and owner"])
def test_what_was_not_published_of_all_tables_is_read_at_the_start(make_flow: MakeFlow, kind: str) -> None:
    flow = make_flow()
    flow.create()
    flow.snapshot()
    flow.execute("DELETE FROM b WHERE id = 4", *gap(flow, kind), "DELETE FROM a WHERE id = 1")
    flow.create()
    flow.stream()
    flow.execute("UPDATE b SET n = 0 WHERE id = 2")
    flow.stream()
    assert flow.compare("a").equal and flow.compare("b").equal and not problems(flow)
    if kind == "operations and owner":
        role = f"owner_{flow.pipeline.slot}"
        flow.execute(f"REASSIGN OWNED BY {role} TO CURRENT_USER", f"DROP ROLE {role}")


@pytest.mark.long
def test_a_publication_that_had_another_name_for_a_while_is_known_in_every_language(
    tmp_path: Path, kafka: KafkaBroker, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    if not Path("/usr/share/locale/de/LC_MESSAGES/postgres-15.mo").exists():
        pytest.skip("PostgreSQL 15 of Debian, which has translations, is not installed")
    monkeypatch.setattr(PostgresServer, "environment", lambda _: plain_environment(LANGUAGE="de"))
    with PostgresServer(tmp_path, version="15") as server:
        flow = Flow(server.createdb("d"), kafka, None)
        flow.execute(
            "CREATE TABLE a (id int PRIMARY KEY, n int)", "INSERT INTO a SELECT g, g FROM generate_series(1, 5) g"
        )
        flow.create()
        flow.snapshot()
        flow.execute(*gap(flow, "renamed"), "DELETE FROM a WHERE id = 1")
        flow.create()
        flow.stream()
        flow.execute("UPDATE a SET n = 0 WHERE id = 2")
        flow.stream()
        assert flow.compare("a").equal and not problems(flow)
    assert "existiert nicht" in caplog.text


@pytest.mark.some(1)
@pytest.mark.parametrize("which", ["", "_unkeyed"])
def test_a_publication_that_is_dropped_while_the_stream_runs_is_made_again(make_flow: MakeFlow, which: str) -> None:
    flow = make_flow()
    flow.create()
    flow.snapshot()
    with flow.streaming() as errors:
        flow.published("UPDATE a SET n = 0 WHERE id = 1")
        dropped = f"DROP PUBLICATION {flow.pipeline.slot}{which}"
        flow.execute(dropped, "DELETE FROM a WHERE id = 3", "UPDATE b SET n = n + 1")
        until(lambda: flow.compare("a").equal and flow.compare("b").equal, "all is read again", failed=errors)
        flow.execute("DELETE FROM a WHERE id = 4")
        until(lambda: flow.compare("a").equal and not problems(flow), "it goes on", failed=errors)
    assert errors == []


def test_the_publications_of_a_pipeline_that_was_dropped_are_not_made_again(make_flow: MakeFlow) -> None:
    """By a job that looks at the tables in this moment."""
    flow = make_flow()
    flow.create()
    flow.snapshot()
    with connect(flow.pipeline.postgres) as connection:
        cluster = identify(connection)
    looks = TableWatch(flow.pipeline, cluster, read_own(flow.pipeline, cluster), Problems(), patient=False)
    drop(flow.pipeline, when="always")
    looks.look_now()
    assert flow.execute("SELECT pubname FROM pg_publication") == []
    flow.create()


def test_a_stream_that_is_taken_for_a_synchronous_standby_is_told(
    make_flow: MakeFlow, monkeypatch: pytest.MonkeyPatch
) -> None:
    look_often(monkeypatch, interval=1.0)
    flow = make_flow()
    flow.create()
    flow.snapshot()
    named = f"SELECT sync_state FROM pg_stat_replication WHERE application_name = 'bottledwater {flow.pipeline.slot}'"
    try:
        with flow.streaming() as errors:
            flow.streams()
            flow.execute("ALTER SYSTEM SET synchronous_standby_names = '*'", "SELECT pg_reload_conf()")
            until(lambda: flow.execute(named) == [("sync",)], "it is one", failed=errors)
            (problem,) = until(lambda: list(problems(flow).values()), "it is told", failed=errors)
            assert problem.kind == "synchronous-standby" and "Name the physical standbys" in problem.remedy
            said = "takes the stream for a synchronous standby"
            with pytest.raises(PreflightError, match=said):
                preflight.run(flow.pipeline.with_(slot=f"{flow.pipeline.slot}_new"))
            # another one that is not there
            others = f"ALTER SYSTEM SET synchronous_standby_names = 'ANY 1 (a, \"BottledWater {flow.pipeline.slot}\")'"
            flow.execute(others, "SELECT pg_reload_conf()")
            assert said in "\n".join(preflight.run(flow.pipeline).warnings)
            flow.execute("ALTER SYSTEM SET synchronous_standby_names = ''", "SELECT pg_reload_conf()")
            until(lambda: not problems(flow), "it is none", failed=errors)
    finally:
        flow.execute("ALTER SYSTEM RESET synchronous_standby_names", "SELECT pg_reload_conf()")


def test_a_publication_that_sends_less_is_told_until_it_sends_all(make_flow: MakeFlow) -> None:
    flow = make_flow()
    flow.create()
    flow.snapshot()
    less, _, all_of_it = gap(flow, "operations")
    with flow.streaming() as errors:
        flow.execute(less, "UPDATE a SET n = n + 1", "INSERT INTO a VALUES (70, 70)")
        until(lambda: {"public.a", "public.b"} <= problems(flow).keys(), "it is told", failed=errors)
        problem = problems(flow)["public.a"]
        assert "is published without update, delete, truncate" in problem.reason
        assert "SET (publish = 'insert, update, delete, truncate')" in problem.remedy
        flow.execute(all_of_it, "DELETE FROM b WHERE id = 1")
        until(lambda: not problems(flow) and flow.compare("a").equal, "all is read again", failed=errors)
    flow.stream()
    assert errors == [] and flow.compare("a").equal and flow.compare("b").equal


def test_a_column_list_is_told_until_it_is_removed(make_flow: MakeFlow) -> None:
    """One of all columns lacks nothing yet: what is complete, also a table without a key, goes on as it is."""
    flow = make_flow(create_publication=False, tables="*", allow_unkeyed=True)
    name = flow.pipeline.slot
    flow.execute(
        "CREATE TABLE log (line text)",
        f"CREATE PUBLICATION {name} FOR TABLE a (id, n, t), b",
        f"CREATE PUBLICATION {name}_unkeyed FOR TABLE log (line) WITH (publish = 'insert, truncate')",
    )
    warned = [each for each in preflight.run(flow.pipeline).warnings if "column list" in each]
    assert ["reads its rows again" in each for each in warned] == [True, False]
    assert "needs a new slot then" in warned[1]
    flow.create()
    flow.snapshot()
    with flow.streaming() as errors:
        flow.execute("CREATE TABLE c (id int)")
        until(lambda: "public.c" in problems(flow), "it has looked", failed=errors)
        assert not {"public.a", "public.log"} & problems(flow).keys()
        flow.execute("ALTER TABLE a ADD c int", "UPDATE a SET c = 9 WHERE id = 1", "DROP TABLE c")
        until(lambda: "public.a" in problems(flow), "it is told", failed=errors)
        problem = problems(flow)["public.a"]
        assert "The column list of public.a" in problem.reason and "what it lacks is not sent" in problem.reason
        with pytest.raises(PreflightError, match=re.escape(problem.remedy)):
            preflight.run(flow.pipeline)
        flow.execute(*re.findall(r"ALTER PUBLICATION [^;]+", problem.remedy))
        until(lambda: not problems(flow) and flow.compare("a").equal, "all is read again", failed=errors)
    assert errors == []


def test_generated_columns_that_are_sent_are_told_until_they_are_not(
    each_postgres: PostgresServer, kafka: KafkaBroker
) -> None:
    flow = Flow(each_postgres.createdb(f"g{uuid.uuid4().hex[:8]}"), kafka, None, tables="a", create_publication=False)
    if flow.execute("SELECT current_setting('server_version_num')::int < 180000")[0][0]:
        pytest.skip("It cannot send them.")
    flow.execute(
        "CREATE TABLE a (id int PRIMARY KEY, n int)",
        "INSERT INTO a VALUES (1, 1), (2, 2)",
        f"CREATE PUBLICATION {flow.pipeline.slot} FOR TABLE a WITH (publish_generated_columns = stored)",
        f"CREATE PUBLICATION {flow.pipeline.slot}_unkeyed",
    )
    flow.create()
    flow.snapshot()
    with flow.streaming() as errors:
        flow.execute("ALTER TABLE a ADD g int GENERATED ALWAYS AS (n * 2) STORED", "UPDATE a SET n = 5 WHERE id = 1")
        until(lambda: "public.a" in problems(flow), "it is told", failed=errors)
        problem = problems(flow)["public.a"]
        assert "sends the generated columns of public.a" in problem.reason
        flow.execute(*re.findall(r"ALTER PUBLICATION [^;]+", problem.remedy))
        until(lambda: not problems(flow) and flow.compare("a").equal, "all is read again", failed=errors)
        flow.published("UPDATE a SET n = 6 WHERE id = 2")
    rows = {m.key["id"]: m.value for m in flow.read("a")}
    assert errors == [] and rows == {1: {"id": 1, "n": 5}, 2: {"id": 2, "n": 6}}


def _role(flow: Flow) -> str:
    """A role that owns the tables, and that a pipeline can have; whoever makes it drops it."""
    role = f"reader_{flow.pipeline.slot}"
    flow.execute(
        f"CREATE ROLE {role} LOGIN REPLICATION PASSWORD 'x'",
        f"GRANT CREATE ON DATABASE {conninfo_to_dict(flow.dsn)['dbname']} TO {role}",
        f"ALTER TABLE a OWNER TO {role}",
        f"ALTER TABLE b OWNER TO {role}",
    )
    return role


def test_a_right_that_is_revoked_is_told_until_it_is_granted(
    make_flow: MakeFlow, monkeypatch: pytest.MonkeyPatch
) -> None:
    flow = make_flow()
    role = _role(flow)
    flow.execute(
        "ALTER TABLE a ALTER t SET STORAGE EXTERNAL",
        "UPDATE a SET t = repeat('x', 9000) WHERE id = 1",
    )
    flow.change(postgres=make_conninfo(flow.dsn, user=role, password="x"))
    try:
        flow.create()
        flow.snapshot()
        with flow.streaming() as errors:
            flow.published("DELETE FROM b WHERE id = 1")
            flow.execute(f"REVOKE SELECT ON a FROM {role}")
            until(lambda: "public.a" in problems(flow), "it is told", failed=errors)
            remedy = problems(flow)["public.a"].remedy
            assert f"GRANT SELECT ON public.a TO {role};" in remedy
            # a large value that is not sent has to be read from the table
            flow.execute("UPDATE a SET n = 100 WHERE id = 1", "DELETE FROM b WHERE id = 2")
            time.sleep(1)
            flow.execute(remedy.partition("run: ")[2])
            until(lambda: not problems(flow) and flow.compare("a").equal, "it goes on", failed=errors)
        assert errors == []
    finally:
        flow.execute(f"REASSIGN OWNED BY {role} TO CURRENT_USER", f"DROP OWNED BY {role}", f"DROP ROLE {role}")


@pytest.mark.long
def test_a_catalog_that_cannot_be_looked_at_for_long_is_told_until_it_can_be(
    make_flow: MakeFlow, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The stream's own session goes on, so that nothing else tells of it."""
    monkeypatch.setattr(watch, "UNCHECKED", 0.5)
    monkeypatch.setattr(watch, "STATEMENT", 0.3)
    flow = make_flow()
    role = _role(flow)
    flow.change(postgres=make_conninfo(flow.dsn, user=role, password="x"), tables="*")

    def found() -> list[Problem]:
        job = status.report(flow.pipeline.with_(postgres=flow.dsn)).job
        return [each for each in job.problems if each.kind == "tables-unchecked"] if job else []

    try:
        flow.create()
        flow.snapshot()
        with flow.streaming() as errors:
            flow.published("DELETE FROM a WHERE id = 1")
            assert found() == []
            flow.execute(f"ALTER ROLE {role} CONNECTION LIMIT 0", "CREATE TABLE c (id int PRIMARY KEY)")
            flow.execute(f"ALTER TABLE c OWNER TO {role}", "INSERT INTO c VALUES (1)")
            (problem,) = until(found, "it is told", failed=errors)
            assert "too many connections" in problem.reason and "CONNECTION LIMIT" in problem.remedy
            flow.execute("DELETE FROM a WHERE id = 2")
            until(lambda: flow.compare("a").equal, "the stream goes on", failed=errors)
            flow.execute(f"ALTER ROLE {role} CONNECTION LIMIT -1")
            until(
                lambda: flow.topic("c") in Topics(flow.pipeline.kafka).names(),
                "the table gets its topic",
                failed=errors,
            )
            until(lambda: not problems(flow) and len(flow.read("c")) == 1, "the table is taken in", failed=errors)
            with connect(flow.dsn) as other, other.transaction():
                other.execute("LOCK TABLE pg_enum")
                (problem,) = until(found, "it is told", failed=errors)
                assert "statement timeout" in problem.reason and "may take 0.3 s" in problem.reason
                assert "pg_locks" in problem.remedy
            until(lambda: not problems(flow), "it can be looked at", failed=errors)
        assert errors == []
    finally:
        flow.execute(f"REASSIGN OWNED BY {role} TO CURRENT_USER", f"DROP OWNED BY {role}", f"DROP ROLE {role}")


@pytest.mark.parametrize("kind", [pytest.param("table", marks=pytest.mark.long), "taken out"])
def test_a_gap_of_one_table_is_closed_at_the_start(make_flow: MakeFlow, kind: str) -> None:
    flow = make_flow()
    flow.create()
    flow.snapshot()
    flow.stream()
    flow.execute("DELETE FROM a WHERE id = 2", *gap(flow, kind), "DELETE FROM b WHERE id = 1")
    flow.create()
    flow.stream()
    flow.execute("UPDATE a SET n = -n WHERE id = 5")
    flow.stream()
    assert flow.compare("a").equal and flow.compare("b").equal
    # the other table was not read again
    assert len(flow.read("b")) == 6


def test_a_gap_is_closed_while_the_stream_runs(make_flow: MakeFlow) -> None:
    flow = make_flow()
    flow.create()
    flow.snapshot()
    with flow.streaming() as errors:
        flow.execute("UPDATE a SET n = 0 WHERE id = 1")
        until(lambda: len(flow.read("a")) == 6, "the update", failed=errors)
        flow.execute(
            f"ALTER PUBLICATION {flow.pipeline.slot} DROP TABLE a",
            "DELETE FROM a WHERE id = 3",
            "INSERT INTO a VALUES (30, 30)",
            f"ALTER PUBLICATION {flow.pipeline.slot} ADD TABLE a",
            "UPDATE a SET n = n + 1",
        )
        until(lambda: flow.compare("a").equal, "the gap is closed", failed=errors)
    flow.stream()
    assert errors == [] and flow.compare("a").equal and flow.compare("b").equal


def test_what_hides_no_change_is_no_gap(make_flow: MakeFlow) -> None:
    flow = make_flow(tables="a,b")
    flow.create()
    flow.snapshot()
    name = flow.pipeline.slot
    flow.execute(
        "CREATE TABLE foreign_to_us (id int PRIMARY KEY)",
        f"ALTER PUBLICATION {name} ADD TABLE foreign_to_us",
        f"ALTER PUBLICATION {name} DROP TABLE foreign_to_us",
        "VACUUM FREEZE pg_publication",
        "ALTER TABLE a ADD extra int",
        "UPDATE a SET n = 7",
        "DROP TABLE b",
    )
    flow.stream()
    assert flow.compare("a").differences == []


@pytest.mark.long
def test_a_table_that_the_settings_no_longer_name_need_not_be_published(make_flow: MakeFlow) -> None:
    flow = make_flow(tables="a,b")
    flow.create()
    flow.snapshot()
    flow.change(tables=("a",))
    flow.execute(f"ALTER PUBLICATION {flow.pipeline.slot} DROP TABLE b", "UPDATE b SET n = 9", "UPDATE a SET n = 9")
    flow.stream()
    assert flow.compare("a").differences == []
    # it is not followed any more; named again, its topic lacks what was written meanwhile
    assert len(read_state(flow.pipeline, state_topic(flow)).tables) == 1
    flow.execute("DELETE FROM b WHERE id = 1")
    flow.change(tables=("a", "b"))
    flow.create()
    flow.snapshot()
    flow.stream()
    assert flow.compare("b").equal and problems(flow) == {}


def test_a_new_partition_is_told_of_and_taken_in_with_all_its_rows(make_flow: MakeFlow) -> None:
    flow = make_flow(tables="p", partitioned_tables="leaves", new_tables="ignore")
    flow.execute(
        "CREATE TABLE p (id int PRIMARY KEY, n int) PARTITION BY RANGE (id)",
        "CREATE TABLE p1 PARTITION OF p FOR VALUES FROM (0) TO (100)",
        "INSERT INTO p SELECT g, g FROM generate_series(1, 5) g",
    )
    flow.create()
    flow.snapshot()
    with flow.streaming() as errors:
        flow.execute(
            "CREATE TABLE p2 PARTITION OF p FOR VALUES FROM (100) TO (200)",
            "INSERT INTO p SELECT g, g FROM generate_series(101, 105) g",
            "UPDATE p SET n = -1 WHERE id = 1",
        )

        def told() -> bool:
            job = flow.job
            flow.execute("UPDATE p SET n = n - 1 WHERE id = 1")
            return job is not None and job.progress.get("not_followed") == ["public.p2"]

        until(told, "the status names the partition", pause=0.2, failed=errors)
    assert not errors
    flow.create()
    flow.snapshot()
    flow.execute("DELETE FROM p WHERE id IN (2, 102)")
    flow.stream()
    assert flow.compare("p1").differences == []
    assert flow.compare("p2").differences == []


@pytest.mark.some(1)
@pytest.mark.parametrize("other", ["ALTER TABLE b RENAME TO c", "DROP TABLE b"])
def test_a_gap_is_noticed_although_a_name_in_the_settings_matches_nothing(make_flow: MakeFlow, other: str) -> None:
    flow = make_flow(tables=("a", "b"))
    flow.create()
    flow.snapshot()
    flow.execute(other)
    flow.stream()
    flow.execute(*gap(flow, "table"))
    flow.stream()
    assert flow.compare("a").equal


@pytest.mark.long
def test_a_renamed_table_is_still_watched(make_flow: MakeFlow) -> None:
    flow = make_flow(tables=("a", "b"))
    flow.create()
    flow.snapshot()
    flow.execute("ALTER TABLE a RENAME TO c")
    flow.stream()
    flow.execute(*(statement.replace(" a", " c") for statement in gap(flow, "table")))
    flow.stream()
    flow.execute("ALTER TABLE c RENAME TO a")
    assert flow.compare("a").equal
