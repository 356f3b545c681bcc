"""Publishing never breaks the source: what an application could do before the slot was made, it can do afterwards."""

from __future__ import annotations

import random
import uuid
from collections.abc import Iterator

import psycopg
import pytest

from airflow_bottledwater.errors import PreflightError
from airflow_bottledwater.local.kafka import KafkaBroker
from airflow_bottledwater.local.postgres import PostgresServer
from airflow_bottledwater.postgres import publication, slot
from airflow_bottledwater.postgres.connect import connect
from airflow_bottledwater.provision.create import create
from airflow_bottledwater.provision.drop import drop
from tests.support.pipeline import Source, refuses
from tests.support.topics import Flow

#: kinds of relations, each with columns id and v; the tables of the first list can be named in the settings
TABLES: dict[str, list[str]] = {
    "plain": ["CREATE TABLE plain (id int PRIMARY KEY, v int)"],
    "keyless": ["CREATE TABLE keyless (id int, v int)"],
    "parent": ["CREATE TABLE parent (id int PRIMARY KEY, v int)"],
    "bare_child": ["CREATE TABLE bare_child () INHERITS (parent)"],
    "keyed_child": ["CREATE TABLE keyed_child (PRIMARY KEY (id)) INHERITS (parent)"],
    "grandchild": ["CREATE TABLE grandchild () INHERITS (keyed_child)"],
    "bare_parent": ["CREATE TABLE bare_parent (id int, v int)"],
    "child_of_bare": ["CREATE TABLE child_of_bare (PRIMARY KEY (id)) INHERITS (bare_parent)"],
    "whole": ["CREATE TABLE whole (id int, v int)", "ALTER TABLE whole REPLICA IDENTITY FULL"],
    "keyed_whole": [
        "CREATE TABLE keyed_whole (id int PRIMARY KEY, v int)",
        "ALTER TABLE keyed_whole REPLICA IDENTITY FULL",
    ],
    "nothing": ["CREATE TABLE nothing (id int PRIMARY KEY, v int)", "ALTER TABLE nothing REPLICA IDENTITY NOTHING"],
    "indexed": [
        "CREATE TABLE indexed (id int NOT NULL UNIQUE, v int)",
        "ALTER TABLE indexed REPLICA IDENTITY USING INDEX indexed_id_key",
    ],
    "lost_index": [
        "CREATE TABLE lost_index (id int NOT NULL UNIQUE, v int)",
        "ALTER TABLE lost_index REPLICA IDENTITY USING INDEX lost_index_id_key",
        "ALTER TABLE lost_index DROP CONSTRAINT lost_index_id_key",
    ],
    "late": ["CREATE TABLE late (id int PRIMARY KEY DEFERRABLE, v int)"],
    "generated": ["CREATE TABLE generated (id int PRIMARY KEY, v int, twice int GENERATED ALWAYS AS (v * 2) STORED)"],
    "generated_key": [
        "CREATE TABLE generated_key (id int, v int, g int GENERATED ALWAYS AS (id + 1) STORED PRIMARY KEY)"
    ],
    "generated_whole": [
        "CREATE TABLE generated_whole (id int PRIMARY KEY, v int, g int GENERATED ALWAYS AS (v * 2) STORED)",
        "ALTER TABLE generated_whole REPLICA IDENTITY FULL",
    ],
    "generated_bare_whole": [
        "CREATE TABLE generated_bare_whole (id int, v int, g int GENERATED ALWAYS AS (v * 2) STORED)",
        "ALTER TABLE generated_bare_whole REPLICA IDENTITY FULL",
    ],
    "parted": [
        "CREATE TABLE parted (id int PRIMARY KEY, v int) PARTITION BY RANGE (id)",
        "CREATE TABLE parted_1 PARTITION OF parted FOR VALUES FROM (0) TO (100)",
        "CREATE TABLE parted_2 PARTITION OF parted FOR VALUES FROM (100) TO (1000) PARTITION BY RANGE (id)",
        "CREATE TABLE parted_2_1 PARTITION OF parted_2 FOR VALUES FROM (100) TO (1000)",
    ],
    "parted_bare": [
        "CREATE TABLE parted_bare (id int, v int) PARTITION BY RANGE (id)",
        "CREATE TABLE parted_bare_1 PARTITION OF parted_bare FOR VALUES FROM (0) TO (100)",
        "CREATE TABLE parted_bare_2 PARTITION OF parted_bare (PRIMARY KEY (id)) FOR VALUES FROM (100) TO (1000)",
    ],
}
OTHERS: dict[str, list[str]] = {
    "quick": ["CREATE UNLOGGED TABLE quick (id int PRIMARY KEY, v int)"],
    "quick_child": ["CREATE UNLOGGED TABLE quick_child () INHERITS (plain)"],
    "mixed": [
        "CREATE TABLE mixed (id int, v int) PARTITION BY RANGE (id)",
        "CREATE UNLOGGED TABLE mixed_1 PARTITION OF mixed FOR VALUES FROM (0) TO (100)",
        "CREATE TABLE mixed_2 PARTITION OF mixed FOR VALUES FROM (100) TO (1000)",
    ],
    "view": ["CREATE VIEW view AS SELECT id, v FROM plain"],
    "ruled": [
        "CREATE VIEW ruled AS SELECT id, v FROM keyless",
        "CREATE RULE i AS ON INSERT TO ruled DO INSTEAD INSERT INTO keyless VALUES (NEW.id, NEW.v)",
        "CREATE RULE u AS ON UPDATE TO ruled DO INSTEAD UPDATE keyless SET v = NEW.v WHERE id = OLD.id",
        "CREATE RULE d AS ON DELETE TO ruled DO INSTEAD DELETE FROM keyless WHERE id = OLD.id",
    ],
    "matview": ["CREATE MATERIALIZED VIEW matview AS SELECT id, v FROM plain"],
}
FOREIGN = [
    "CREATE EXTENSION postgres_fdw",
    "CREATE SERVER here FOREIGN DATA WRAPPER postgres_fdw OPTIONS (host '127.0.0.1', port 'PORT', dbname 'NAME')",
    "CREATE USER MAPPING FOR CURRENT_USER SERVER here OPTIONS (user 'postgres')",
    "CREATE SCHEMA there",
    "CREATE TABLE there.a (id int, v int)",
    "CREATE TABLE there.b (id int, v int)",
    "CREATE FOREIGN TABLE abroad (id int, v int) SERVER here OPTIONS (schema_name 'there', table_name 'a')",
    "CREATE FOREIGN TABLE abroad_child () INHERITS (parent) SERVER here OPTIONS (schema_name 'there', table_name 'b')",
    "CREATE TABLE far (id int, v int) PARTITION BY RANGE (id)",
    "CREATE FOREIGN TABLE far_1 PARTITION OF far FOR VALUES FROM (0) TO (100) SERVER here"
    " OPTIONS (schema_name 'there', table_name 'a')",
    "CREATE TABLE far_2 PARTITION OF far (PRIMARY KEY (id)) FOR VALUES FROM (100) TO (1000)",
]


@pytest.fixture
def zoo(each_postgres: PostgresServer, kafka: KafkaBroker) -> Iterator[Flow]:
    """A database with one relation of each kind, on each version; a pipeline over all of it, with partitions under
    their own names."""
    name = f"zoo_{uuid.uuid4().hex[:8]}"
    dsn = each_postgres.createdb(name)
    flow = Flow(dsn, kafka, None, allow_unkeyed=True, partitioned_tables="leaves")
    for statements in [*TABLES.values(), *OTHERS.values()]:
        flow.execute(*statements)
    if flow.execute("SELECT 1 FROM pg_available_extensions WHERE name = 'postgres_fdw'"):
        flow.execute(*(s.replace("PORT", str(each_postgres.port)).replace("NAME", name) for s in FOREIGN))
    yield flow
    with connect(each_postgres.dsn()) as connection:
        if slot.state(connection, flow.pipeline.slot) is not None:
            slot.drop(connection, flow.pipeline.slot)
        connection.execute(f"DROP DATABASE {name} WITH (FORCE)")


def possible(flow: Flow) -> dict[str, str]:
    """Every kind of change of every relation, and its SQLSTATE ('' if it works); everything is rolled back."""
    found: dict[str, str] = {}
    with psycopg.connect(flow.dsn, options="-c statement_timeout=5s") as connection:
        names = [
            row[0]
            for row in connection.execute(
                "SELECT relname FROM pg_class WHERE relnamespace = 'public'::regnamespace AND relkind IN ('r', 'p', "
                "'v', 'm', 'f')"
            )
        ]
        for name in names:
            for statement in (
                *(f"INSERT INTO {name} (id, v) VALUES ({id}, 1)" for id in (7, 107)),
                f"UPDATE {name} SET v = v + 1",
                f"UPDATE {name} SET v = v + 1 WHERE id = 7",
                f"UPDATE {name} SET id = id + 1",
                f"UPDATE ONLY {name} SET v = v + 1",
                f"DELETE FROM {name} WHERE id = 8",
                f"DELETE FROM {name}",
            ):
                try:
                    with connection.transaction():
                        connection.execute(statement)  # type: ignore[arg-type]
                    found[statement] = ""
                except psycopg.Error as error:
                    found[statement] = error.sqlstate or "?"
        connection.rollback()
    return found


def broken(flow: Flow, before: dict[str, str]) -> dict[str, str]:
    """The statements that worked before and do not any more."""
    return {statement: state for statement, state in possible(flow).items() if state and not before[statement]}


@pytest.mark.some(1)
def test_every_change_that_worked_still_works_when_tables_are_published_added_and_dropped(
    zoo: Flow, request: pytest.FixtureRequest
) -> None:
    before = possible(zoo)
    assert sum(not state for state in before.values()) > 150
    chance = random.Random(int(request.config.option.hypothesis_seed))
    some = chance.sample(sorted(TABLES), chance.randint(1, len(TABLES) - 1))
    zoo.change(tables=tuple(some))
    zoo.create()
    assert broken(zoo, before) == {}, f"published: {some}"
    more = [*some, *chance.sample(sorted(set(TABLES) - set(some)), 1)]
    for tables in (more, ["*"]):
        zoo.change(tables=tuple(tables))
        zoo.create()
        assert broken(zoo, before) == {}, f"published: {some}, then {tables}"
    drop(zoo.pipeline, when="always")
    assert broken(zoo, before) == {}


def test_every_change_that_worked_still_works_when_partitioned_tables_are_published_as_one(zoo: Flow) -> None:
    before = possible(zoo)
    zoo.change(tables=("plain", "parted"), partitioned_tables="root")
    zoo.create()
    assert broken(zoo, before) == {}
    zoo.change(tables=tuple(TABLES))
    zoo.create()
    assert broken(zoo, before) == {}


def test_every_change_that_worked_still_works_whatever_the_options_of_tables(zoo: Flow) -> None:
    """A row filter is the one option that PostgreSQL knows of: with one over columns that the replica identity lacks,
    it would refuse an UPDATE."""
    before = possible(zoo)
    options = {"exclude": ["v"], "where": "id >= 5"}
    zoo.change(tables=tuple(TABLES), table_options={"*": {"where": "v > 0"}})
    with pytest.raises(PreflightError, match="REPLICA IDENTITY FULL"):
        zoo.create()
    assert broken(zoo, before) == {}
    zoo.change(tables=tuple(TABLES.keys() - {"generated_key"}), table_options={"*": options, "plain": {"exclude": []}})
    zoo.create()
    assert zoo.execute("SELECT count(*) FROM pg_publication_rel WHERE prqual IS NOT NULL")[0][0] > 10
    assert broken(zoo, before) == {}


def test_a_parent_is_published_without_its_children(source: Source) -> None:
    source.execute("CREATE TABLE kept () INHERITS (items)", "CREATE TABLE more (id bigint PRIMARY KEY, name text)")
    source.execute("CREATE TABLE also () INHERITS (more)")
    create(source.pipeline)
    create(source.pipeline.with_(tables=("items", "more")))
    assert source.execute("SELECT tablename FROM pg_publication_tables ORDER BY 1") == [("items",), ("more",)]
    source.execute(
        "INSERT INTO kept VALUES (1, 'one')",
        "UPDATE kept SET name = 'two'",
        "UPDATE items SET name = 'three'",
        "DELETE FROM items",
    )


@pytest.mark.parametrize(
    ("made", "said", "way_out"),
    [
        (
            ["CREATE TABLE kept () INHERITS (items)", "CREATE PUBLICATION NAME FOR TABLE items"],
            "public.kept, which has no usable key (it has no primary key)",
            "ALTER PUBLICATION NAME SET TABLE ONLY public.items",
        ),
        (
            ["CREATE TABLE kept (PRIMARY KEY (id)) INHERITS (items)", "CREATE PUBLICATION NAME FOR TABLE items"],
            "also publishes public.kept, which is not a table of the pipeline: its changes would be left out",
            "ALTER PUBLICATION NAME SET TABLE ONLY public.items",
        ),
        (
            ["CREATE TABLE log (line text)", "CREATE PUBLICATION NAME FOR TABLE items, log"],
            "public.log, which has no usable key (it has no primary key)",
            "ALTER PUBLICATION NAME DROP TABLE log",
        ),
    ],
)
def test_a_publication_that_publishes_other_tables_too_is_refused(
    source: Source, made: list[str], said: str, way_out: str
) -> None:
    source.execute(f"CREATE PUBLICATION {source.name}_unkeyed", *(s.replace("NAME", source.name) for s in made))
    pipeline = source.pipeline.with_(create_publication=False)
    refuses(source, pipeline, said, f"Publication {source.name!r}")
    source.execute(way_out.replace("NAME", source.name))
    create(pipeline)


def test_the_statements_for_a_dba_name_tables_without_their_children(source: Source) -> None:
    source.execute("CREATE TABLE kept () INHERITS (items)", "CREATE TABLE more (id int PRIMARY KEY)")
    pipeline = source.pipeline.with_(create_publication=False, tables=("items", "more"))
    with pytest.raises(PreflightError) as raised:
        create(pipeline)
    (said,) = (each for each in raised.value.problems if "does not exist and create_publication is off" in each)
    source.execute(*said.partition("run: ")[2].split("; "))
    assert source.execute("SELECT tablename FROM pg_publication_tables ORDER BY 1") == [("items",), ("more",)]
    create(pipeline)


PUBLICATIONS = [
    "FOR ALL TABLES",
    "FOR ALL TABLES WITH (publish_via_partition_root)",
    "FOR TABLES IN SCHEMA public",
    "FOR TABLES IN SCHEMA public WITH (publish_via_partition_root)",
    "FOR TABLE keyed_child, bare_parent, keyless WHERE (id > 1), parted, parted_bare_2 (id)",
    "FOR TABLE ONLY parent, whole (id), generated (id, v), parted_2, parted_1",
    "FOR TABLE parted, parted_2_1, mixed (id) WHERE (id > 1) WITH (publish_via_partition_root)",
    "FOR TABLE ONLY plain, TABLES IN SCHEMA public",
    "",
]


def test_what_a_publication_sends_is_read_as_postgresql_does(zoo: Flow) -> None:
    with connect(zoo.dsn) as connection:
        connection.execute("SET search_path = public")
        for number, clause in enumerate(PUBLICATIONS):
            connection.execute(f"CREATE PUBLICATION p{number} {clause}")
            expected = connection.execute(
                "SELECT relid, attrs::text, qual IS NOT NULL FROM pg_get_publication_tables(%s) AS t", (f"p{number}",)
            ).fetchall()
            found = publication.read(connection, f"p{number}")
            assert found is not None
            assert sorted(found.tables) == sorted(row[0] for row in expected), clause
            assert {oid for oid, (_, filtered) in found.tables.items() if filtered} == {
                oid for oid, _, filtered in expected if filtered
            }, clause
            names = connection.execute(
                "SELECT relid, ARRAY(SELECT attname FROM pg_attribute WHERE attrelid = relid AND attnum = ANY "
                "(attrs::int2[]) ORDER BY attnum) FROM pg_get_publication_tables(%s) AS t",
                (f"p{number}",),
            )
            sent = {oid: tuple(columns) for oid, columns in names if columns}
            for oid, (columns, _) in found.tables.items():
                assert columns is None or sent[oid] == columns, clause
