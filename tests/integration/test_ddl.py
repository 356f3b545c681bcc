"""DDL statements as records, at their places among the changes of rows."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import psycopg
import pytest
from click.testing import CliRunner
from confluent_kafka.schema_registry import SchemaRegistryClient
from psycopg.conninfo import conninfo_to_dict

from airflow_bottledwater.cli import cli
from airflow_bottledwater.errors import PreflightError, Refused
from airflow_bottledwater.kafka.registry import Registry
from airflow_bottledwater.local.postgres import PostgresServer
from airflow_bottledwater.local.registry import SchemaRegistry
from airflow_bottledwater.postgres import connect, ddl
from airflow_bottledwater.provision.drop import drop
from tests.support.topics import Flow, MakeFlow


@pytest.fixture
def flow_settings() -> dict[str, Any]:
    """Of other messages, all have a topic, too."""
    return {"tables": "a", "skip_snapshot": True, "ddl_topic": "ddl", "messages": {"*": "others"}}


@pytest.fixture
def flow_statements() -> tuple[str, ...]:
    """A table."""
    return ("CREATE TABLE a (id int PRIMARY KEY, b text)",)


def _install(flow: Flow) -> None:
    with connect.session(flow.dsn) as connection:
        ddl.install(connection)


def _statements(flow: Flow) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = [each.value for each in flow.read("ddl")]
    return found


def test_each_statement_is_told_at_its_place(make_flow: MakeFlow) -> None:
    flow = make_flow()
    with pytest.raises(PreflightError, match="bottledwater ddl install"):
        flow.create()
    _install(flow)
    _install(flow)
    flow.create()
    flow.transaction(
        "INSERT INTO a VALUES (1, 'b')", "ALTER TABLE a ADD c int, DROP b", "INSERT INTO a VALUES (2, 3)",
        "CREATE SCHEMA s CREATE TABLE t (id int) CREATE VIEW v AS SELECT * FROM t", "DROP SCHEMA s CASCADE",
    )  # fmt: skip
    flow.execute("BEGIN; ALTER TABLE a ADD d int; ROLLBACK", "CREATE TEMP TABLE temporary (id int)")
    flow.execute("CREATE FOREIGN DATA WRAPPER w; CREATE SERVER f FOREIGN DATA WRAPPER w OPTIONS (password 'secret')")
    flow.execute("CREATE TABLE u (user_name text); create  role r PASSWORD 'secret'; DROP ROLE r; DROP TABLE u")
    for between in ("/**/", "/* a /* b */\n*/", "--\n", " -- a\r-- b\n"):
        flow.execute(f"COMMENT ON TABLE a IS 'x'; CREATE{between}ROLE r PASSWORD 'secret'; DROP ROLE r")
        flow.execute(f"COMMENT ON TABLE a IS 'x'; SELECT 'ALTER FOREIGN{between}DATA WRAPPER w OPTIONS (secret)'")
    others = ("COMMENT", "CREATE TABLE AS", "GRANT", "REVOKE")
    comment = "COMMENT ON TABLE a IS 'x'"
    hidden = [
        f"{comment}; UPDATE a SET id = id WHERE 'secret' = ''", f"(SELECT 'secret'); {comment}",
        f"{comment};SELECT 'secret'", f"-- {comment}\nSELECT 'secret'; {comment}",
        f"/* COMMENT */ WITH x AS (SELECT 'secret') SELECT * FROM x; {comment}",
        f"/* a */ SELECT 'secret' /* b */ alter; {comment}", f"DO $$ BEGIN {comment}; PERFORM 'secret'; END $$",
        "COMMENT ON TABLE a IS 'host=db password=secret'", "COMMENT ON TABLE a IS 'postgresql://u:secret@db'",
        "COMMENT ON TABLE a IS 'dblink_connect(secret)'", f"CREATE TABLE v AS (VALUES ('secret')); {comment}",
    ]  # fmt: skip
    flow.execute(*hidden)
    told = f"BEGIN; {comment}; /* ** told */ {comment}; -- told\nGRANT SELECT ON a TO PUBLIC; COMMIT; -- told"
    flow.execute(told, "REVOKE SELECT ON a FROM PUBLIC")
    flow.execute("SELECT pg_logical_emit_message(true, 'bottledwater', '1')")
    flow.execute("ALTER /* of a user */ TABLE a -- role\nRENAME c TO e")
    flow.stream()
    altered, *of_schema, gone, wrapper, server, made, unmade, renamed = (
        each for each in flow.read("ddl") if each.value["tag"] not in others
    )
    assert (altered.value["tag"], altered.value["statement"]) == ("ALTER TABLE", "ALTER TABLE a ADD c int, DROP b")
    assert altered.value["objects"] == [{"type": "table", "schema": "public", "name": "a", "identity": "public.a"}]
    column = {"type": "table column", "schema": "public", "name": None, "identity": "public.a.b"}
    assert altered.value["dropped"] == [column] and "schemas" not in altered.value
    before, after = flow.read("a")
    assert [before.pos[17:], altered.pos[17:], after.pos[17:]] == ["00000001", "00000002", "00000003"]
    assert before.pos[:16] == altered.pos[:16] and altered.op == "m"
    assert {each["identity"] for one in of_schema for each in one.value["objects"]} == {"s", "s.t", "s.v"}
    assert {each["identity"] for each in gone.value["dropped"]} >= {"s", "s.t", "s.v"} and not gone.value["objects"]
    assert [each.value["statement"] for each in (wrapper, server, made, unmade)] == [None] * 4
    assert "-- role\nRENAME c TO e" in renamed.value["statement"] and not renamed.value["dropped"]
    found = [each["statement"] for each in _statements(flow) if each["tag"] in others]
    assert found == [None] * (8 + len(hidden) + 1) + [told] * 3 + ["REVOKE SELECT ON a FROM PUBLIC"]
    assert "secret" not in str(_statements(flow)) and not flow.read("others")


def test_statements_of_a_database_in_another_encoding_are_utf_8(make_flow: MakeFlow, postgres: PostgresServer) -> None:
    """Also an outbox's messages, if they are written as documented."""
    flow = make_flow()
    name = str(conninfo_to_dict(flow.dsn)["dbname"]) + "_latin"
    flow.execute(f"CREATE DATABASE {name} ENCODING LATIN1 TEMPLATE template0 LOCALE 'C'")
    flow.dsn = postgres.dsn(name)
    flow.change(postgres=flow.dsn, messages={"outbox": "of.{topic}"})
    flow.execute("CREATE TABLE a (id int PRIMARY KEY, b text)")
    _install(flow)
    flow.create()
    content = "convert_to(jsonb_build_object('topic', 'order', 'payload', 'grün')::text, 'UTF8')"
    flow.execute('ALTER TABLE a ADD "straße" text', f"SELECT pg_logical_emit_message(true, 'outbox', {content})")
    flow.execute('ALTER TABLE a DROP "straße"')
    flow.stream()
    added, dropped = _statements(flow)
    assert added["statement"] == 'ALTER TABLE a ADD "straße" text'
    assert added["objects"] == [{"type": "table", "schema": "public", "name": "a", "identity": "public.a"}]
    assert dropped["dropped"][0]["identity"] == 'public.a."straße"'
    from tests.integration.test_messages import _raw

    assert [each.value() for each in _raw(flow, "of.order")] == ["grün".encode()]
    drop(flow.pipeline, when="always")


def test_a_statement_has_the_schemas_of_the_records_behind_it(make_flow: MakeFlow, registry: SchemaRegistry) -> None:
    flow = make_flow(registry)
    _install(flow)
    flow.create()
    # read only when the table has another column already
    flow.execute("INSERT INTO a VALUES (1, 'b')", "ALTER TABLE a ADD c int", "INSERT INTO a VALUES (2, 'b', 3)")
    flow.execute("ALTER TABLE a ADD d int", "CREATE TABLE other (id int)", "INSERT INTO a VALUES (3, 'b', 3, 4)")
    flow.stream()
    raw, subject = _ids(flow), f"{flow.topic('a')}-value"
    first, second, other = _statements(flow)
    assert [first["schemas"][subject], second["schemas"][subject]] == raw[1:] and len(set(raw)) == 3
    assert "schemas" not in other
    key = Registry(flow.pipeline.registry).schema(first["schemas"][f"{flow.topic('a')}-key"])
    assert key is not None and '"id"' in key
    flow.execute("ALTER TABLE a ALTER b TYPE int USING 1", "CREATE VIEW v AS SELECT 1")
    flow.change(on_error="log")
    flow.stream()
    assert _statements(flow)[3]["schemas"] == {**first["schemas"], subject: None}


def test_what_any_role_can_write_registers_nothing_and_leaves_out_no_table(
    make_flow: MakeFlow, registry: SchemaRegistry
) -> None:
    flow = make_flow(registry, tables=("a", "p"))
    flow.execute(
        "CREATE TABLE p (id int PRIMARY KEY, b text) PARTITION BY RANGE (id)",
        "CREATE TABLE p_1 PARTITION OF p FOR VALUES FROM (0) TO (100)",
    )
    _install(flow)
    flow.create()
    client = SchemaRegistryClient({"url": registry.url})
    subjects = [f"{flow.topic(table)}-value" for table in ("a", "p")]
    oids = dict(flow.execute("SELECT relname, oid::int FROM pg_class WHERE relname IN ('a', 'p')"))
    key, text, new = ["id", 23, -1, True], ["b", 25, -1, False], ["c", 23, -1, False]
    said = [
        [key], [text, key], [key, text, text], [key, text, new], [key, ["b", 23, -1, False]], [key, ["b", 25, 9, False]]
    ]  # fmt: skip
    objects = [
        {"oid": oids["a"], "schema": "public", "name": "a", "replica_identity": "d", "columns": columns}
        for columns in said
    ]
    objects += [{**objects[0], "columns": [key, text], "name": "other"}]
    objects += [{**objects[0], "oid": oids["p"], "name": "p", "replica_identity": "n", "columns": [key, text]}]
    with psycopg.connect(flow.dsn, autocommit=True) as plain:
        plain.execute("CREATE ROLE plain; SET ROLE plain")
        for each in objects:
            forged = json.dumps({"objects": [each]})
            plain.execute("SELECT pg_logical_emit_message(true, 'bottledwater.ddl', %s)", (forged,))
        plain.execute("RESET ROLE; DROP ROLE plain")
    flow.execute("INSERT INTO p VALUES (1, 'b')", "UPDATE p SET id = 2")
    flow.stream()
    assert [client.get_versions(subject) for subject in subjects] == [[1], [1]]
    assert (len(_ids(flow, "p")), len(_statements(flow))) == (3, len(objects))
    # the owner's column of the name that was forged, and of another type
    flow.execute("ALTER TABLE a ADD c text", "INSERT INTO a VALUES (1, 'b', 'c')")
    flow.stream()
    assert [client.get_versions(subject) for subject in subjects] == [[1, 2], [1]]
    assert _statements(flow)[-1]["schemas"][subjects[0]] == _ids(flow)[-1]


def _ids(flow: Flow, table: str = "a") -> list[int]:
    """The ids of the value schemas in the topic of the table."""
    from tests.integration.test_messages import _raw

    return [int.from_bytes((each.value() or b"")[1:5], "big") for each in _raw(flow, table)]


def test_a_trigger_that_fails_lets_the_statement_pass(make_flow: MakeFlow) -> None:
    flow = make_flow()
    _install(flow)
    flow.create()
    for name in ("note_ddl", "note_dropped"):
        ((made,),) = flow.execute(f"SELECT pg_get_functiondef('bottledwater.{name}'::regproc)")
        flow.execute(made.replace("PERFORM ", "PERFORM nothing(1), "))
    flow.execute("ALTER TABLE a ADD c int", "ALTER TABLE a DROP c", "INSERT INTO a VALUES (1)")
    flow.stream()
    assert not flow.read("ddl") and len(flow.read("a")) == 1
    _install(flow)
    # any session may set what only the triggers are to set
    flow.execute("SET bottledwater.dropped = 'no JSON'; CREATE TABLE b (id int)")
    flow.execute("ALTER TABLE a ADD c int")
    flow.stream()
    assert [each["tag"] for each in _statements(flow)] == ["ALTER TABLE"]


def test_triggers_that_do_not_fire_are_a_problem_of_the_stream(make_flow: MakeFlow) -> None:
    flow = make_flow()
    _install(flow)
    flow.create()

    def problems() -> list[str]:
        flow.stream()
        job = flow.job
        return [each.kind for each in job.problems] if job else []

    assert problems() == []
    flow.execute("ALTER EVENT TRIGGER bottledwater_ddl DISABLE")
    assert problems() == ["ddl-untold"]
    flow.execute("DROP EVENT TRIGGER bottledwater_ddl_dropped", "ALTER EVENT TRIGGER bottledwater_ddl ENABLE")
    assert problems() == ["ddl-untold"]
    _install(flow)  # the advice
    assert problems() == []


def test_a_function_of_another_role_is_not_kept(make_flow: MakeFlow) -> None:
    """Its owner could write anew what a superuser's statements run."""
    flow = make_flow()
    flow.execute(
        "CREATE ROLE other NOLOGIN", "CREATE SCHEMA bottledwater AUTHORIZATION other",
        "SET ROLE other; CREATE FUNCTION bottledwater.note_ddl() RETURNS event_trigger LANGUAGE plpgsql AS 'BEGIN END'",
    )  # fmt: skip
    _install(flow)
    owners = flow.execute("SELECT DISTINCT proowner::regrole::text FROM pg_proc WHERE proname ~ '^note_d'")
    with connect.session(flow.dsn) as connection:
        ddl.remove(connection)
    flow.execute("DROP OWNED BY other", "DROP ROLE other")
    assert owners == [("postgres",)]


def test_the_command_needs_only_the_source(make_flow: MakeFlow, tmp_path: Path) -> None:
    """As documented, without a Kafka: there is none at the default port, and the file leaves it to Airflow."""
    flow = make_flow()
    file = tmp_path / "shop.yaml"
    file.write_text("source: {conn_id: shop}\nkafka: {conn_id: shop, registry: shop}\n")
    for action, there in (("install", True), ("remove", False)):
        done = CliRunner().invoke(cli, ["ddl", action, "-d", flow.dsn, "-c", str(file)], catch_exceptions=False)
        assert done.exit_code == 0, done.output
        with connect.session(flow.dsn) as connection:
            assert ddl.installed(connection) == there


def test_only_what_was_installed_is_removed(make_flow: MakeFlow) -> None:
    flow = make_flow()
    _install(flow)
    with connect.session(flow.dsn) as connection:
        ddl.remove(connection)
        ddl.remove(connection)
        assert not ddl.installed(connection)
        assert not connection.execute("SELECT FROM pg_namespace WHERE nspname = 'bottledwater'").fetchone()
        ddl.install(connection)
        connection.execute("CREATE TABLE bottledwater.of_others (id int)")
        connection.execute("ALTER EVENT TRIGGER bottledwater_ddl DISABLE")
        assert not ddl.installed(connection)
        ddl.remove(connection)
        assert connection.execute("SELECT count(*) FROM bottledwater.of_others").fetchone() == (0,)
        connection.execute("CREATE ROLE nobody_special NOLOGIN")
        connection.execute(f"GRANT CREATE ON DATABASE {connection.info.dbname} TO nobody_special")  # type: ignore[arg-type]
        connection.execute("SET ROLE nobody_special")
        with pytest.raises(Refused, match="may not make or drop event triggers") as caught:
            ddl.install(connection)
        assert "superuser" in str(caught.value)
        connection.execute("RESET ROLE")
        connection.execute("DROP OWNED BY nobody_special")
        connection.execute("DROP ROLE nobody_special")
