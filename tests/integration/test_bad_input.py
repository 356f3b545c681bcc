"""What cannot work is said before anything is changed: what is wrong, with which object, and what to do.

Every refusal here is also a comparison of publications, slots, topics and subjects before and after, and a search for
the password in the error with all its causes, in the log and in the output.
"""

from __future__ import annotations

import json
import os
import pwd
import re
import socket
import subprocess
import time
import uuid
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any

import psycopg
import pytest
from confluent_kafka.schema_registry import Schema, SchemaRegistryClient
from psycopg.conninfo import conninfo_to_dict, make_conninfo

from airflow_bottledwater.errors import CredentialsRefused, Outage, PreflightError, Refused
from airflow_bottledwater.local.postgres import PostgresServer, programs
from airflow_bottledwater.pipeline.settings import Settings
from airflow_bottledwater.postgres import publication
from airflow_bottledwater.postgres.connect import connect, session
from airflow_bottledwater.provision import preflight, source_checks
from airflow_bottledwater.provision.create import create
from airflow_bottledwater.provision.drop import drop
from airflow_bottledwater.state import store
from tests.support.pipeline import PASSWORD, Source, refused, refuses
from tests.support.topics import create_topic

# ---------------------------------------------------------------------- the server


@contextmanager
def other_settings(server: PostgresServer, **changes: Any) -> Iterator[None]:
    """The server restarted with other settings, and back."""
    usual = server.settings
    server.settings = {**usual, **changes}
    server.restart()
    try:
        yield
    finally:
        server.settings = usual
        server.restart()


def test_wal_level_must_be_logical(small: Source) -> None:
    with other_settings(small.server, wal_level="replica"):
        refuses(small, small.pipeline, "wal_level is replica", "set wal_level = logical and restart")


def test_a_slot_must_be_free(small: Source) -> None:
    for i in range(2):
        small.execute(f"SELECT pg_create_physical_replication_slot('{small.name}_{i}')")
    refuses(small, small.pipeline, "All 2 replication slots are in use", "Raise max_replication_slots, or drop one")


@pytest.mark.parametrize("who", ["superuser", "plain role"])
def test_a_walsender_must_be_free(small: Source, who: str) -> None:
    pipeline = small.pipeline
    if who == "plain role":
        pipeline = pipeline.with_(postgres=owner(small))
    replication = make_conninfo(small.dsn, replication="database")
    with psycopg.connect(replication, autocommit=True), psycopg.connect(replication, autocommit=True):
        # a plain role does not see whose the other sessions are, but is refused a connection
        said = "All 2 walsenders are in use. Raise max_wal_senders" if who == "superuser" else "max_wal_senders"
        refuses(small, pipeline, said)


def test_the_lock_table_must_hold_all_tables(small: Source) -> None:
    small.execute(
        "DO $$ BEGIN FOR i IN 1..90 LOOP EXECUTE 'CREATE TABLE t' || i || '(i int PRIMARY KEY)'; END LOOP; END $$"
    )
    refuses(
        small,
        small.pipeline.with_(tables=("t*",)),
        "locks 180 tables and indexes at once, but the lock table has room for 170",
        "Raise max_locks_per_transaction to at least",
        "or make several pipelines",
    )
    assert reasons(small, tables=("t1?",)) == []


def test_a_lock_table_that_is_full_is_waited_for_with_the_remedy(small: Source) -> None:
    locks = b"SELECT pg_advisory_xact_lock(i) FROM generate_series(1, 100000) i"
    with pytest.raises(Outage, match=r"lock table is full: raise max_locks_per_transaction"), session(small.dsn) as it:
        it.execute(locks)


def test_a_standby_is_refused(small: Source, tmp_path: Path) -> None:
    (tmp_path / "standby").mkdir()
    data = tmp_path / "standby" / "data"
    backup = [
        programs(small.server.version) / "pg_basebackup",
        "-D",
        data,
        "-d",
        small.server.dsn(),
        "-X",
        "fetch",
        "-c",
        "fast",
    ]
    subprocess.run(backup, check=True, capture_output=True)
    (data / "standby.signal").touch()
    if os.geteuid() == 0:
        user = pwd.getpwnam(data.owner() if data.owner() != "root" else "pgserver")
        for path in [data, *data.rglob("*")]:
            os.chown(path, user.pw_uid, user.pw_gid, follow_symlinks=False)
    with PostgresServer(tmp_path / "standby", version=small.server.version, settings=small.server.settings) as standby:
        database = conninfo_to_dict(small.dsn)["dbname"]
        pipeline = small.pipeline.with_(postgres=make_conninfo(standby.dsn(database), password=PASSWORD))
        refuses(small, pipeline, "The source is a standby. Connect to the primary.")


def test_an_unlimited_slot_is_a_warning_that_says_what_it_risks(source: Source, small: Source) -> None:
    warned = "\n".join(preflight.run(source.pipeline).warnings)
    assert "max_slot_wal_keep_size is unlimited" in warned
    assert "can fill the server's disk" in warned
    assert "Watch the slot's lag" in warned
    assert "max_slot_wal_keep_size" not in "\n".join(preflight.run(small.pipeline).warnings)


# ---------------------------------------------------------------------- the connection


def test_a_wrong_password_is_refused(source: Source) -> None:
    dsn = make_conninfo(source.role(), password=PASSWORD.lower())
    with refused(source, "password authentication failed", "Check user and password") as raised:
        create(source.pipeline.with_(postgres=dsn))
    assert type(raised[0]) is CredentialsRefused  # waiting would not help
    assert PASSWORD.lower() not in str(raised[0])


def test_a_wrong_password_is_not_an_outage_where_a_name_has_several_addresses(source: Source) -> None:
    dsn = make_conninfo(source.role(), password=PASSWORD + "x", host="127.0.0.1,localhost,127.0.0.2")
    with refused(source, "password authentication failed") as raised:
        create(source.pipeline.with_(postgres=dsn))
    assert type(raised[0]) is CredentialsRefused


def test_a_database_that_does_not_exist_is_refused(source: Source) -> None:
    dsn = make_conninfo(source.dsn, dbname="nowhere")
    refuses(
        source,
        source.pipeline.with_(postgres=dsn),
        'database "nowhere" does not exist',
        "Check the database in the connection",
    )


@pytest.mark.parametrize("where", [{"host": "nowhere.invalid"}, {"port": "1"}], ids=["name", "port"])
def test_a_server_that_is_not_there_is_an_outage(source: Source, where: dict[str, str]) -> None:
    with refused(source, "PostgreSQL at", next(iter(where.values())), "cannot be reached") as raised:
        create(source.pipeline.with_(postgres=make_conninfo(source.dsn, **where)))
    assert type(raised[0]) is Outage


@pytest.mark.parametrize(
    "dsn",
    [
        f"host=127.0.0.1 password=left {PASSWORD}",
        f"postgresql://bob:left%zz{PASSWORD}@127.0.0.1/app",
        f"postgresql://bob:{PASSWORD}/right@127.0.0.1/app",
        f"postgresql://bob:left@{PASSWORD}@127.0.0.1/app",
        f"postgresql://bob:left@{PASSWORD}/right@127.0.0.1/app",
    ],
    ids=["with a blank", "with a percent sign", "with a slash", "with an at sign", "with both"],
)
def test_a_password_that_is_not_quoted_is_an_error_that_does_not_show_it(source: Source, dsn: str) -> None:
    with refused(source, "connection string is not valid") as raised:
        create(source.pipeline.with_(postgres=dsn))
    assert "quote" in str(raised[0])


# ---------------------------------------------------------------------- rights


def owner(source: Source, attributes: str = "REPLICATION") -> str:
    """A role that may do what a pipeline needs, and nothing more."""
    database = conninfo_to_dict(source.dsn)["dbname"]
    return source.role(attributes, f"GRANT CREATE ON DATABASE {database} TO ROLE", "ALTER TABLE items OWNER TO ROLE")


def test_an_owner_with_replication_and_create_needs_no_other_right(source: Source) -> None:
    source.execute("CREATE TABLE log (line text)", "CREATE TABLE others (id int PRIMARY KEY)")
    dsn = owner(source)
    source.execute(f"ALTER TABLE log OWNER TO {conninfo_to_dict(dsn)['user']}")
    create(source.pipeline.with_(postgres=dsn, tables=("items", "log"), allow_unkeyed=True))
    assert source.execute(f"SELECT count(*) FROM pg_replication_slots WHERE slot_name = '{source.name}'") == [(1,)]


def test_a_role_without_replication_is_refused(source: Source) -> None:
    dsn = owner(source, "")
    role = conninfo_to_dict(dsn)["user"]
    refuses(source, source.pipeline.with_(postgres=dsn), "may not replicate", f"ALTER ROLE {role} REPLICATION;")


def test_a_role_without_select_is_refused(source: Source) -> None:
    dsn = source.role()
    role = conninfo_to_dict(dsn)["user"]
    refuses(
        source,
        source.pipeline.with_(postgres=dsn),
        "SELECT on public.items is not granted",
        f"GRANT USAGE ON SCHEMA public TO {role}; GRANT SELECT ON public.items TO {role};",
    )


def test_a_database_without_an_encoding_is_refused(source: Source) -> None:
    with psycopg.connect(source.dsn, autocommit=True) as connection:
        connection.execute(f"CREATE DATABASE {source.name}_ascii ENCODING SQL_ASCII TEMPLATE template0 LOCALE 'C'")
        try:
            dsn = make_conninfo(source.dsn, dbname=f"{source.name}_ascii")
            refuses(source, source.pipeline.with_(postgres=dsn, tables=()), "has the encoding SQL_ASCII", "pg_dump")
        finally:
            connection.execute(f"DROP DATABASE {source.name}_ascii WITH (FORCE)")


def test_a_schema_without_usage_is_refused(source: Source) -> None:
    source.execute(
        "CREATE SCHEMA hidden", "CREATE TABLE hidden.t (id int PRIMARY KEY)", "GRANT SELECT ON hidden.t TO PUBLIC"
    )
    pipeline = source.pipeline.with_(postgres=source.role(), tables=("hidden.t",))
    refuses(source, pipeline, "SELECT on hidden.t is not granted (or USAGE on its schema)")


def own_operators(kind: str, schema: str) -> list[str]:
    """Statements for operators of its own for an enum, in a schema, by which its indexes compare, as the types of
    extensions have them."""
    named = {"lt": "<", "le": "<=", "eq": "=", "ge": ">=", "gt": ">"}
    function = "CREATE FUNCTION {0}.{1}({2}, {2}) RETURNS {3} LANGUAGE internal IMMUTABLE STRICT AS 'enum_{1}'"
    operator = "CREATE OPERATOR {0}.{4} (FUNCTION = {0}.{1}, LEFTARG = {2}, RIGHTARG = {2})"
    each = ", ".join(f"OPERATOR {n} {schema}.{sign}" for n, sign in enumerate(named.values(), 1))
    return [
        function.format(schema, "cmp", kind, "int"),
        *(function.format(schema, name, kind, "bool") for name in named),
        *(operator.format(schema, name, kind, "bool", sign) for name, sign in named.items()),
        f"CREATE OPERATOR CLASS {schema}.of_{len(kind)} DEFAULT FOR TYPE {kind} USING btree AS {each}, "
        f"FUNCTION 1 {schema}.cmp({kind}, {kind})",
    ]


def test_a_schema_of_a_keys_type_without_usage_is_refused_where_rows_have_to_be_looked_up(source: Source) -> None:
    schema = '"of Types"'
    source.execute(
        f"CREATE SCHEMA {schema}",
        f"CREATE TYPE {schema}.grade AS ENUM ('a', 'b')",
        *own_operators(f"{schema}.grade", schema),
        f"CREATE TYPE {schema}.mood AS ENUM ('sad')",
        f"CREATE DOMAIN moody AS {schema}.mood",
        f"CREATE TABLE grades (g {schema}.grade PRIMARY KEY, n text)",
        "CREATE TABLE felt (m moody PRIMARY KEY, n text)",
        # that need no look-up, or none that names the schema
        f"CREATE TABLE short (g {schema}.grade PRIMARY KEY, n int)",
        f"CREATE TABLE whole (g {schema}.grade PRIMARY KEY, n text)",
        "ALTER TABLE whole REPLICA IDENTITY FULL",
        f"CREATE TABLE moods (m {schema}.mood PRIMARY KEY, n text, g {schema}.grade)",
        "GRANT SELECT ON grades, felt, short, whole, moods TO PUBLIC",
    )
    tables, dsn = ("grades", "felt", "short", "whole", "moods"), source.role()

    def said() -> list[str]:
        found = reasons(source, postgres=dsn, tables=tables, create_publication=False)
        return [each for each in found if "USAGE on schema" in each]

    assert [each.split(", ")[1] for each in said()] == ["with types of public.felt", "with types of public.grades"]
    (statement,) = {each.partition("run: ")[2] for each in said()}
    source.execute(statement)
    assert not said()


def test_a_policy_that_could_hide_rows_is_refused(source: Source) -> None:
    source.execute(
        "ALTER TABLE items ENABLE ROW LEVEL SECURITY",
        "CREATE POLICY few ON items USING (id < 10)",
        "GRANT SELECT ON items TO PUBLIC",
    )
    refuses(
        source,
        source.pipeline.with_(postgres=source.role()),
        "Table public.items has a row-level policy that would hide rows",
        "BYPASSRLS",
    )
    assert not any("policy" in w for w in reasons(source, postgres=source.role("REPLICATION BYPASSRLS")))


def test_a_role_that_may_not_make_publications_is_told_the_statements(source: Source) -> None:
    dsn = source.role("REPLICATION", "ALTER TABLE items OWNER TO ROLE")
    refuses(
        source,
        source.pipeline.with_(postgres=dsn),
        "may not create publications (it has no CREATE privilege on database",
        "set create_publication to false",
        f'CREATE PUBLICATION "{source.name}" FOR TABLE ONLY "public"."items"',
        f'CREATE PUBLICATION "{source.name}_unkeyed" WITH',
    )


def test_a_role_that_does_not_own_a_table_is_told_the_statements(source: Source) -> None:
    dsn = owner(source)
    source.execute("ALTER TABLE items OWNER TO postgres", "GRANT SELECT ON items TO PUBLIC")
    refuses(
        source,
        source.pipeline.with_(postgres=dsn),
        "Only its owner may publish a table",
        "public.items",
        "CREATE PUBLICATION",
    )


def test_statements_are_for_those_who_have_the_rights_for_them(source: Source) -> None:
    """Nobody but the database's owner has CREATE on it by default, and a grant to our role alone would lead nowhere."""
    database, cdc = (conninfo_to_dict(dsn) for dsn in (source.dsn, source.role("REPLICATION")))
    app, other = source.role("", "GRANT SELECT ON items TO PUBLIC", "ALTER TABLE items OWNER TO ROLE"), source.role("")
    ours = source.pipeline.with_(postgres=make_conninfo(source.dsn, user=cdc["user"]))
    for pipeline in (ours, ours.with_(create_publication=False)):
        with pytest.raises(PreflightError) as raised:
            preflight.run(pipeline)
        assert f"TO {cdc['user']}" not in str(raised.value) and len(raised.value.problems) == 1
        found = re.search(
            r"s the owner of the database, run: (.+); then as the owner of the tables, run: (.+)$", str(raised.value)
        )
        assert found is not None
    source.execute("CREATE TABLE log (line text)", "GRANT SELECT ON log TO PUBLIC")
    source.execute(f"ALTER TABLE log OWNER TO {conninfo_to_dict(other)['user']}")
    both = ours.with_(tables=("items", "log"), allow_unkeyed=True)
    refuses(source, both, r"and, as a superuser (the tables have several owners), run: CREATE PUBLICATION")
    # as it was advised
    source.execute(found[1])
    assert found[1].startswith(f"GRANT CREATE ON DATABASE {database['dbname']} TO ")
    with psycopg.connect(app, autocommit=True) as connection:
        for statement in found[2].split("; "):
            connection.execute(statement)
    preflight.run(ours.with_(create_publication=False))


def test_a_publication_that_is_missing_is_made_with_the_rights_that_are_named(source: Source) -> None:
    """One of the two exists, a table of somebody else is added, and the role may create none any more."""
    dsn = owner(source)
    cdc, app = (conninfo_to_dict(each)["user"] for each in (dsn, source.role("")))
    pipeline = source.pipeline.with_(postgres=dsn)
    create(pipeline)
    source.execute(
        f'DROP PUBLICATION "{source.name}_unkeyed"', "CREATE TABLE foreign_items (id int PRIMARY KEY)",
        f"ALTER TABLE foreign_items OWNER TO {app}", "GRANT SELECT ON foreign_items TO PUBLIC",
        f"REVOKE CREATE ON DATABASE {conninfo_to_dict(source.dsn)['dbname']} FROM {cdc}",
    )  # fmt: skip
    pipeline = pipeline.with_(tables=("items", "foreign_items"))
    said = advised(pipeline, "Either run: ")
    grants, _, statements = said.partition("; or, as a superuser: ")
    assert f'CREATE PUBLICATION "{source.name}_unkeyed"' in statements and "foreign_items" in statements
    source.execute(grants)
    create(pipeline)


def advised(pipeline: Settings, pattern: str) -> str:
    """The statements that preflight tells to run."""
    with pytest.raises(PreflightError) as raised:
        preflight.run(pipeline)
    found = re.search(f"{pattern}(.+)$", str(raised.value), re.MULTILINE)
    assert found is not None, raised.value
    return found[1]


@pytest.mark.some(1)
@pytest.mark.parametrize(
    ("way", "where"), [("Either run: ", ""), ("or, as a superuser: ", ""), ("public.foreign_items. Run: ", "id > 1")]
)
def test_a_table_of_somebody_else_is_added_later_as_is_said(source: Source, way: str, where: str) -> None:
    pipeline = source.pipeline.with_(postgres=owner(source))
    create(pipeline)
    app = conninfo_to_dict(source.role(""))["user"]
    source.execute(
        "CREATE TABLE foreign_items (id int PRIMARY KEY)", "GRANT SELECT ON foreign_items TO PUBLIC",
        f"ALTER TABLE foreign_items OWNER TO {app}", f'DROP PUBLICATION "{source.name}_unkeyed"',
    )  # fmt: skip
    pipeline = pipeline.with_(tables=("items", "foreign_items"), table_options={"foreign_items": {"where": where}})
    said = advised(pipeline, f"does not own .*{way}")
    assert "CREATE PUBLICATION" not in said  # one exists, and the role may make the other one itself
    source.execute(said.partition("; or,")[0])
    create(pipeline)
    assert source.execute(
        "SELECT pubname::text, tablename::text, rowfilter FROM pg_publication_tables WHERE pubname LIKE "
        f"'{source.name}%' ORDER BY 2"
    ) == [(source.name, "foreign_items", f"({where})" if where else None), (source.name, "items", None)]
    assert source.execute(f"SELECT count(*) FROM pg_publication WHERE pubname LIKE '{source.name}%'") == [(2,)]


@pytest.mark.parametrize("gone", ["", "_unkeyed"])
def test_of_two_publications_only_the_missing_one_is_to_be_made(source: Source, gone: str) -> None:
    source.execute("CREATE TABLE log (line text)")
    pipeline = source.pipeline.with_(create_publication=False, allow_unkeyed=True)
    source.execute(*advised(pipeline, "run: ").split("; "))
    pipeline = pipeline.with_(tables=("items", "log"))
    source.execute(f'DROP PUBLICATION "{source.name}{gone}"')
    source.execute(*advised(pipeline, "As the owner of the tables, run: ").split("; "))
    preflight.run(pipeline)


# ---------------------------------------------------------------------- tables

TABLES: dict[str, tuple[list[str], dict[str, Any], list[str]]] = {
    "that does not exist": (
        [],
        {"tables": ("nothing", "items", "elsewhere.nothing")},
        [
            "No table matches 'nothing'",
            "No table matches 'elsewhere.nothing'",
            "Check the name, its schema and the database",
        ],
    ),
    "without a key": (
        ["CREATE TABLE log (line text)"],
        {"tables": ("log",)},
        ["Table public.log cannot be keyed: it has no primary key", "allow_unkeyed"],
    ),
    "with a deferrable key": (
        ["CREATE TABLE late (id int PRIMARY KEY DEFERRABLE)"],
        {"tables": ("late",)},
        ["Table public.late cannot be keyed: its key is DEFERRABLE", "allow_unkeyed"],
    ),
    "with replica identity nothing": (
        ["ALTER TABLE items REPLICA IDENTITY NOTHING"],
        {},
        ["Table public.items cannot be keyed: its replica identity is NOTHING"],
    ),
    "that is unlogged": (
        ["CREATE UNLOGGED TABLE quick (id int PRIMARY KEY)"],
        {"tables": ("quick",)},
        ["Table public.quick is not permanent", "SET LOGGED"],
    ),
    "with an unlogged partition": (
        [
            "CREATE TABLE parted (id int PRIMARY KEY) PARTITION BY RANGE (id)",
            "CREATE TABLE parted_1 PARTITION OF parted FOR VALUES FROM (0) TO (10)",
            "CREATE UNLOGGED TABLE parted_2 PARTITION OF parted FOR VALUES FROM (10) TO (20)",
        ],
        {"tables": ("parted",)},
        ["public.parted_2, a partition of public.parted, is not permanent", "partitioned_tables = leaves"],
    ),
    "with an unlogged partition, as leaves": (
        [
            "CREATE TABLE parted (id int PRIMARY KEY) PARTITION BY RANGE (id)",
            "CREATE TABLE parted_1 PARTITION OF parted FOR VALUES FROM (0) TO (10)",
            "CREATE UNLOGGED TABLE parted_2 PARTITION OF parted FOR VALUES FROM (10) TO (20)",
        ],
        {"tables": ("parted",), "partitioned_tables": "leaves"},
        ["public.parted_2, a partition of public.parted, is not permanent", "Name the other partitions"],
    ),
    "that is a view": (
        ["CREATE VIEW seen AS SELECT 1 AS id"],
        {"tables": ("seen",)},
        ["public.seen is not a table", "Name tables only"],
    ),
    "that shares a topic": (
        ['CREATE TABLE "a b" (id int PRIMARY KEY)', "CREATE TABLE a_20_b (id int PRIMARY KEY)"],
        {"tables": ("a*",)},
        [
            "Tables public.a b and public.a_20_b both become topic",
            "Rename one, leave it out, or give it another topic in table_options",
        ],
    ),
    "whose topic differs in a dot only": (
        [
            "CREATE SCHEMA app",
            "CREATE TABLE app.users (id int PRIMARY KEY)",
            "CREATE TABLE app_users (id int PRIMARY KEY)",
        ],
        {"tables": ("app.users", "app_users")},
        [".app.users", ".app_users", "Kafka does not distinguish dots from underscores"],
    ),
    "whose topic is the pipeline's own": (
        ["CREATE TABLE _bottledwater_events (id int PRIMARY KEY)"],
        {"tables": ("_bottledwater_events",)},
        ["Table public._bottledwater_events", "is one of the pipeline's own topics"],
    ),
    "whose topic is too long": (
        ['CREATE TABLE "' + "ä" * 31 + '" (id int PRIMARY KEY)'],
        {"tables": ("ä*",), "topic_prefix": "p" * 20},
        ["Kafka's limit is 249", "topic in table_options"],
    ),
    "made of a type that cannot be sent": (
        ["CREATE TYPE granted AS (id int, rights aclitem)", "CREATE TABLE acl (id int PRIMARY KEY, a granted[])"],
        {"tables": ("acl",)},
        [
            "Column 'a' of table public.acl is made of type aclitem, which has no binary send function",
            "change the column's type",
        ],
    ),
    "with two types of one name": (
        [
            'CREATE TYPE "a b" AS (x int)',
            "CREATE TYPE a_20_b AS (y int)",
            'CREATE TABLE twins (id int PRIMARY KEY, p "a b", q a_20_b)',
        ],
        {"tables": ("twins",)},
        ["Two types in public.twins both become the Avro name bottledwater.public.a_20_b", "option exclude"],
    ),
    "with two labels of one name": (
        ["CREATE TYPE mood AS ENUM ('a b', 'a_20_b')", "CREATE TABLE moods (id int PRIMARY KEY, m mood)"],
        {"tables": ("moods",), "enums": "enum"},
        ["In public.moods, two of type mood become the same Avro name (a_20_b, a_20_b)", "enums = string"],
    ),
    "with two columns for one field": (
        ['CREATE TABLE twice (id int PRIMARY KEY, "a b" int, a_20_b int)'],
        {"tables": ("twice",)},
        ["Columns 'a b' and 'a_20_b' of public.twice both become the Avro field 'a_20_b'", "option rename"],
    ),
}


@pytest.mark.parametrize("case", TABLES)
def test_a_table_is_refused(source: Source, case: str) -> None:
    statements, changes, texts = TABLES[case]
    if statements:
        source.execute(statements[0], *statements[1:])
    refuses(source, source.pipeline.with_(**changes), *texts)


def test_every_problem_is_said_at_once_and_once(source: Source) -> None:
    source.execute('CREATE TABLE twice (id int PRIMARY KEY, "a b" int, a_20_b int)', "CREATE TABLE log (line text)")
    said = reasons(source, tables=("twice", "log"), postgres=source.role(), create_topics=False)
    for text in (
        "both become the Avro field",
        "cannot be keyed",
        "SELECT on public.log",
        "SELECT on public.twice",
        "does not exist and create_topics",
    ):
        assert any(text in each for each in said), text
    assert len(said) == len(set(said))


def reasons(source: Source, **changes: Any) -> list[str]:
    """The problems that preflight finds."""
    try:
        preflight.run(source.pipeline.with_(**changes))
    except PreflightError as error:
        return error.problems
    return []


# ---------------------------------------------------------------------- publications that others made

PUBLICATIONS: dict[str, tuple[list[str], str, list[str]]] = {
    "sends updates of a table without a key": (
        ["CREATE TABLE t (a int, b int)", "CREATE PUBLICATION NAME FOR TABLE t"],
        "UPDATE t SET a = 1",
        ["sends updates or deletes of public.t", "would fail for the application", "Give it a primary key"],
    ),
    "sends deletes of a table without a key": (
        ["CREATE TABLE t (a int, b int)", "CREATE PUBLICATION NAME FOR TABLE t WITH (publish = 'insert, delete')"],
        "DELETE FROM t",
        ["sends updates or deletes of public.t", "would fail for the application", "Give it a primary key"],
    ),
    "does not cover the key": (
        ["CREATE TABLE t (a int PRIMARY KEY, b int)", "CREATE PUBLICATION NAME FOR TABLE t (b)"],
        "UPDATE t SET b = 1",
        [
            "The column list of public.t",
            "does not cover its key (a)",
            "would fail for the application",
            "DROP TABLE ONLY",
        ],
    ),
    "does not cover the identity index": (
        [
            "CREATE TABLE t (a int PRIMARY KEY, b int NOT NULL UNIQUE, c int)",
            "ALTER TABLE t REPLICA IDENTITY USING INDEX t_b_key",
            "CREATE PUBLICATION NAME FOR TABLE t (a, c)",
        ],
        "UPDATE t SET b = 1",
        [
            "The column list of public.t",
            "does not cover its key (b)",
            "would fail for the application",
            "DROP TABLE ONLY",
        ],
    ),
    "has columns of a table with full identity": (
        [
            "CREATE TABLE t (a int PRIMARY KEY, b int)",
            "ALTER TABLE t REPLICA IDENTITY FULL",
            "CREATE PUBLICATION NAME FOR TABLE t (a, b)",
        ],
        "UPDATE t SET b = 1",
        [
            "The column list of public.t",
            "does not go with REPLICA IDENTITY FULL",
            "would fail for the application",
            "ADD TABLE ONLY",
        ],
    ),
    "has a row filter": (
        ["CREATE TABLE t (a int PRIMARY KEY, b int)", "CREATE PUBLICATION NAME FOR TABLE t WHERE (b > 1)"],
        "DELETE FROM t",
        ["has a row filter on public.t", "would fail for the application", "or remove the filter"],
    ),
    "is for all tables and one has no key": (
        [
            "CREATE TABLE t (a int PRIMARY KEY, b int)",
            "CREATE TABLE log (line text)",
            "CREATE PUBLICATION NAME FOR ALL TABLES",
        ],
        "UPDATE log SET line = ''",
        ["is FOR ALL TABLES, and public.log have no key", "fail for the application", "Publish a list of tables"],
    ),
}


@pytest.mark.parametrize("case", PUBLICATIONS)
def test_a_publication_that_would_break_the_source_is_refused(source: Source, case: str) -> None:
    statements, fails, texts = PUBLICATIONS[case]
    source.execute(
        statements[0].replace("NAME", source.name), *(s.replace("NAME", source.name) for s in statements[1:])
    )
    source.execute(f"CREATE PUBLICATION {source.name}_unkeyed")
    # it is as bad as we say
    with pytest.raises(psycopg.Error) as raised:
        source.execute("INSERT INTO t SELECT 1, 2", fails)
    assert raised.value.sqlstate in ("55000", "42P10")
    refuses(source, source.pipeline.with_(create_publication=False, tables=("t",), allow_unkeyed=True), *texts)


def test_a_publication_that_is_missing_is_refused_with_its_statement(source: Source) -> None:
    pipeline = source.pipeline.with_(create_publication=False)
    refuses(
        source, pipeline, f"Publication {source.name!r} does not exist", f'CREATE PUBLICATION "{source.name}" FOR TABLE'
    )
    source.execute(f"CREATE PUBLICATION {source.name} FOR TABLE items")
    refuses(source, pipeline, f"Publication '{source.name}_unkeyed' does not exist", "the second may be empty")


def test_a_table_that_is_not_published_is_refused(source: Source) -> None:
    source.execute(f"CREATE PUBLICATION {source.name}", f"CREATE PUBLICATION {source.name}_unkeyed")
    refuses(
        source,
        source.pipeline.with_(create_publication=False),
        "Table public.items is not in publication",
        "ADD TABLE ONLY",
    )


def test_a_publication_of_somebody_else_is_not_taken(source: Source) -> None:
    source.execute(f"CREATE PUBLICATION {source.name} FOR TABLE items")
    refuses(
        source,
        source.pipeline,
        f"Publication {source.name!r} exists, but was not created by this pipeline",
        "set create_publication to false",
    )


def test_a_publication_whose_owner_has_changed_does_not_keep_a_drop_from_its_end(source: Source) -> None:
    pipeline = source.pipeline.with_(postgres=owner(source))
    create(pipeline)
    source.execute(f"ALTER PUBLICATION {source.name} OWNER TO postgres")
    assert drop(pipeline, when="always") == (
        f"Dropped slot {source.name!r}, publication '{source.name}_unkeyed'. "
        f"Kept publication {source.name!r}, which belongs to another role by now: its owner can drop it."
    )
    assert source.execute("SELECT pubname FROM pg_publication") == [(source.name,)]
    assert drop(pipeline, when="always") == f"There is no slot {source.name!r}."


def test_a_publication_for_all_tables_is_a_warning(source: Source) -> None:
    source.execute(f"CREATE PUBLICATION {source.name} FOR ALL TABLES", f"CREATE PUBLICATION {source.name}_unkeyed")
    warned = "\n".join(preflight.run(source.pipeline.with_(create_publication=False)).warnings)
    assert (
        f"Publication {source.name!r} is FOR ALL TABLES: UPDATE and DELETE would fail on a table that is made" in warned
    )


def test_a_sound_publication_of_somebody_else_is_used_by_a_role_with_few_rights(source: Source) -> None:
    source.execute(
        f"CREATE PUBLICATION {source.name} FOR TABLE items",
        f"CREATE PUBLICATION {source.name}_unkeyed",
        "GRANT SELECT ON items TO PUBLIC",
    )
    pipeline = source.pipeline.with_(create_publication=False, postgres=source.role())
    create(pipeline)
    source.execute("INSERT INTO items VALUES (1, 'one')")
    assert any(b"one" in change for change in source.changes())
    assert source.name in drop(pipeline, when="always")
    assert source.execute(f"SELECT count(*) FROM pg_publication WHERE pubname LIKE '{source.name}%'") == [(2,)]


def test_generated_columns_are_not_published(
    make_source: Callable[[PostgresServer, str], Source], each_postgres: PostgresServer
) -> None:
    """PostgreSQL 18 can send them, also by naming them in a list of all columns."""
    source = make_source(each_postgres, each_postgres.createdb(f"g{uuid.uuid4().hex[:8]}"))
    if source.execute("SELECT current_setting('server_version_num')::int < 180000")[0][0]:
        pytest.skip("It has no such option.")
    name = f"{source.name.title()}-Pub"
    source.execute(
        "CREATE TABLE g (id int PRIMARY KEY, n int, twice int GENERATED ALWAYS AS (n * 2) STORED)",
        f'CREATE PUBLICATION "{name}" FOR TABLE items, g WITH (publish_generated_columns = stored)',
        f'CREATE PUBLICATION "{name}_unkeyed"',
    )
    pipeline = source.pipeline.with_(create_publication=False, publication=name, tables=("g",))
    refuses(source, pipeline, "sends the generated columns of public.g", f'ALTER PUBLICATION "{name}" SET')
    # it does not matter to a table that has none
    source.execute(f'ALTER PUBLICATION "{name}" DROP TABLE g')
    preflight.run(pipeline.with_(tables=("items",)))
    # the advice
    source.execute(
        f'ALTER PUBLICATION "{name}" SET (publish_generated_columns = none)', f'ALTER PUBLICATION "{name}" SET TABLE g'
    )
    preflight.run(pipeline)
    source.execute(f'ALTER PUBLICATION "{name}" SET TABLE g (id, n, twice)')
    refuses(source, pipeline, "The column list of public.g")


def test_generated_columns_are_said(source: Source) -> None:
    source.execute("CREATE TABLE g (id int PRIMARY KEY, twice int GENERATED ALWAYS AS (id * 2) STORED)")
    warned = preflight.run(source.pipeline.with_(tables=("items", "g"))).warnings
    assert any("Generated columns are not published: public.g (twice)." in each for each in warned)
    assert not any("Generated" in each for each in preflight.run(source.pipeline).warnings)


def test_what_was_not_tested_is_said(source: Source, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(source_checks, "_TESTED", 14)
    assert any("is newer than version 14" in each for each in preflight.run(source.pipeline).warnings)


def test_an_event_trigger_that_forbids_a_publication_is_told_in_its_words(postgres: PostgresServer) -> None:
    with connect(postgres.createdb(f"e{uuid.uuid4().hex[:8]}")) as connection:
        publication.create(connection, "there", [], via_root=False, timeout=5)
        connection.execute(
            "CREATE FUNCTION public.forbid() RETURNS event_trigger LANGUAGE plpgsql AS "
            "$$BEGIN RAISE EXCEPTION 'ask the platform team'; END$$"
        )
        connection.execute(
            "CREATE EVENT TRIGGER forbid ON ddl_command_start WHEN TAG IN ('CREATE PUBLICATION', 'DROP PUBLICATION') "
            "EXECUTE FUNCTION public.forbid()"
        )
        with pytest.raises(Refused, match=r"Creating publication 'new' is forbidden .* ask the platform team"):
            publication.create(connection, "new", [], via_root=False, timeout=5)
        with pytest.raises(Refused, match=r"Dropping publication 'there' is forbidden .* ask the platform team"):
            publication.drop(connection, "there")
        # with a full stop, and a code that is one of PostgreSQL's own, too
        connection.execute(
            "CREATE OR REPLACE FUNCTION public.forbid() RETURNS event_trigger LANGUAGE plpgsql AS $$BEGIN "
            "RAISE EXCEPTION 'ask the platform team.' USING ERRCODE = 'insufficient_privilege'; END$$"
        )
        with pytest.raises(Refused, match=r"forbidden by an event trigger: ask the platform team\. Have the"):
            publication.drop(connection, "there")


def test_a_publication_that_leaves_changes_out_is_a_warning(source: Source) -> None:
    source.execute(
        f"CREATE PUBLICATION {source.name} FOR TABLE items WITH (publish = 'insert, update')",
        f"CREATE PUBLICATION {source.name}_unkeyed",
    )
    warned = "\n".join(preflight.run(source.pipeline.with_(create_publication=False)).warnings)
    assert f"Publication {source.name!r} does not send delete, truncate of public.items" in warned


# ---------------------------------------------------------------------- slots that others made


def test_a_physical_slot_is_refused(source: Source) -> None:
    source.execute(f"SELECT pg_create_physical_replication_slot('{source.name}')")
    refuses(
        source,
        source.pipeline.with_(adopt_slot=True),
        f"Slot {source.name!r} uses 'physical', not pgoutput",
        "Choose another slot name",
    )


def test_a_slot_of_another_plugin_is_refused(source: Source) -> None:
    try:
        source.execute(f"SELECT pg_create_logical_replication_slot('{source.name}', 'test_decoding')")
    except psycopg.errors.UndefinedFile:
        pytest.skip("this PostgreSQL has no plugin but pgoutput")
    refuses(
        source,
        source.pipeline.with_(adopt_slot=True),
        f"Slot {source.name!r} uses 'test_decoding', not pgoutput",
        "another slot name",
    )


def test_a_slot_of_another_database_is_refused(source: Source) -> None:
    source.execute(f"CREATE DATABASE {source.name}")
    with psycopg.connect(make_conninfo(source.dsn, dbname=source.name), autocommit=True) as connection:
        connection.execute("SELECT pg_create_logical_replication_slot(%s, 'pgoutput')", [source.name])
    pipeline = source.pipeline.with_(adopt_slot=True)
    refuses(source, pipeline, f"belongs to database {source.name!r}, not ", "Choose another slot name")
    with refused(source, f"belongs to database {source.name!r}"):
        drop(pipeline, when="always")


def test_a_slot_in_use_is_refused(source: Source) -> None:
    make_slot(source)
    connection = psycopg.connect(make_conninfo(source.dsn, replication="database"), autocommit=True)
    with closing(connection):
        command = f"START_REPLICATION SLOT {source.name} LOGICAL 0/0 (proto_version '1', publication_names 'none')"
        connection.pgconn.exec_(command.encode())
        refuses(
            source,
            source.pipeline.with_(adopt_slot=True),
            f"Slot {source.name!r} is in use by process {connection.info.backend_pid}",
            "Stop its client first",
        )


def make_slot(source: Source) -> None:
    """A slot that nobody recorded."""
    source.execute(f"SELECT pg_create_logical_replication_slot('{source.name}', 'pgoutput')")


def test_a_slot_that_our_records_do_not_name_is_adopted_only_on_that_word(source: Source) -> None:
    make_slot(source)
    source.execute("INSERT INTO items VALUES (1, 'before')")
    refuses(
        source, source.pipeline, f"Slot {source.name!r} exists, but was not created by this pipeline", "set adopt_slot"
    )
    with refused(source, f"Slot {source.name!r} was not created by this pipeline"):
        drop(source.pipeline, when="always")
    record = create(source.pipeline.with_(adopt_slot=True))
    source.execute("INSERT INTO items VALUES (2, 'after')")
    # publications that are younger than the WAL of a slot would wedge it
    assert any(b"after" in change for change in source.changes())
    assert record.oldest_xid < source.execute("SELECT pg_current_xact_id()::text::bigint")[0][0]


def test_a_slot_that_lost_its_wal_is_refused(small: Source) -> None:
    make_slot(small)
    for _ in range(6):
        small.execute("INSERT INTO items SELECT coalesce(max(id), 0) + 1 FROM items", "SELECT pg_switch_wal()")
    small.execute("CHECKPOINT")
    assert small.execute(f"SELECT wal_status FROM pg_replication_slots WHERE slot_name = '{small.name}'") == [("lost",)]
    refuses(
        small,
        small.pipeline.with_(adopt_slot=True),
        f"Slot {small.name!r} was invalidated: the WAL that it needs is gone (max_slot_wal_keep_size)",
        "start again with a snapshot",
    )


# ---------------------------------------------------------------------- Kafka and the registry


@pytest.mark.long
def test_a_broker_that_does_not_answer_is_an_outage_in_time(source: Source) -> None:
    deaf = socket.create_server(("127.0.0.1", 0))
    servers = ["127.0.0.1:1", f"127.0.0.1:{deaf.getsockname()[1]}"]

    def attempt(server: str) -> None:
        with pytest.raises(Outage, match=f"Kafka at {server} does not answer.*Check the address") as raised:
            create(source.pipeline.with_(kafka={**source.pipeline.kafka, "bootstrap.servers": server}))
        assert PASSWORD not in str(raised.value)

    before, started = source.picture(), time.monotonic()
    with deaf, ThreadPoolExecutor() as pool:
        list(pool.map(attempt, servers))
    # librdkafka's own time-outs are minutes
    assert time.monotonic() - started < 45
    assert source.picture() == before


def test_a_missing_topic_is_refused_where_none_may_be_created(source: Source) -> None:
    closed = source.pipeline.with_(create_topics=False)
    topics = [
        f"{source.name}.items",
        f"{source.name}._bottledwater_events",
        f"{source.name}._bottledwater_dead_letters",
    ]
    topics.append(f"_bottledwater.{conninfo_to_dict(source.dsn)['dbname']}.{source.name}")
    refuses(
        source, closed, *(f"Topic {topic!r} does not exist and create_topics is off. Create it." for topic in topics)
    )
    create(source.pipeline)
    drop(source.pipeline, when="always")
    create(closed)


def test_a_topic_of_another_pipeline_is_shared_only_on_that_word(source: Source) -> None:
    create(source.pipeline)
    second = source.pipeline.with_(slot=f"{source.name}_2")
    refuses(
        source,
        second,
        f"Topic '{source.name}.items' belongs to pipeline",
        f"/{source.name}'",
        "another topic_prefix, or set share_topics",
    )
    create(second.with_(share_topics=True))
    drop(second.with_(share_topics=True), when="always")
    # the first one is still the owner
    refuses(source, second, "belongs to pipeline")


def test_a_compacted_topic_is_refused_for_a_table_without_a_key(source: Source) -> None:
    source.execute("ALTER TABLE items DROP CONSTRAINT items_pkey")
    create_topic(
        source.pipeline.kafka, f"{source.name}.items", partitions=1, replication=1, config={"cleanup.policy": "compact"}
    )
    refuses(
        source,
        source.pipeline.with_(allow_unkeyed=True),
        f"Topic '{source.name}.items' is compacted, but public.items has no key",
    )


def test_a_topic_that_kafka_cannot_tell_from_an_existing_one_is_refused(source: Source) -> None:
    create_topic(source.pipeline.kafka, f"{source.name}_items", partitions=1, replication=1, config={})
    refuses(
        source,
        source.pipeline,
        f"Topic '{source.name}.items' collides with topic '{source.name}_items'",
        "Use another topic_prefix",
    )


def test_a_state_topic_that_kafka_cannot_tell_from_another_one_needs_another_slot(source: Source) -> None:
    """It has no prefix. Such are _bottledwater.shop_eu.orders and _bottledwater.shop.eu_orders."""
    state = store.state_topic_name(conninfo_to_dict(source.dsn)["dbname"], source.pipeline.slot)  # type: ignore[arg-type]
    other = "_".join(state.rsplit(".", 1))
    create_topic(source.pipeline.kafka, other, partitions=1, replication=1, config={"cleanup.policy": "compact"})
    refuses(source, source.pipeline, f"Topic {state!r} collides with topic {other!r}", "Choose another slot name.")


def test_a_registry_that_is_away_is_an_outage(source: Source) -> None:
    registry = {"url": f"http://bob:{PASSWORD}@127.0.0.1:1"}
    with refused(
        source, "The schema registry at http://", "127.0.0.1:1 does not answer", "Check the address"
    ) as raised:
        create(source.pipeline.with_(registry=registry))
    assert type(raised[0]) is Outage


@pytest.mark.parametrize("part", ["key", "value"])
def test_a_schema_that_the_registry_refuses_is_a_problem(source: Source, part: str) -> None:
    subject = f"{source.name}.items-{part}"
    name = "items_key" if part == "key" else "items"
    theirs: dict[str, Any] = {"type": "record", "name": name, "namespace": "bottledwater.public"}
    theirs |= {"fields": [{"name": "id", "type": "string"}]}
    SchemaRegistryClient({"url": source.registry.url}).register_schema(subject, Schema(json.dumps(theirs), "AVRO"))
    refuses(
        source, source.pipeline, f"refuses the schema of subject '{subject}'", "relax the subject's compatibility level"
    )
    assert reasons(source, format="json") == []


def test_no_registry_is_needed_for_json(source: Source) -> None:
    assert reasons(source, format="json", registry={}) == []
