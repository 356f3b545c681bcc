"""Relation versions: read of all tables together, or of one by itself, they are the same."""

from __future__ import annotations

import time
from typing import Any

import pytest

from airflow_bottledwater.postgres import connect, pgoutput
from airflow_bottledwater.state.claim import read_state
from airflow_bottledwater.stream.relations import Resolver
from tests.support.topics import MakeFlow
from tests.support.writers import state_topic

TABLES = (
    "CREATE TYPE mood AS ENUM ('sad', 'ok')",
    "CREATE TYPE pair AS (a int, b numeric(5,1)[])",
    "CREATE DOMAIN positive AS int CHECK (VALUE > 0)",
    "CREATE DOMAIN many AS varchar(7)[]",
    "CREATE TABLE a (id int PRIMARY KEY, n numeric(10,2) NOT NULL, t varchar(20), m mood, p pair, d positive, l "
    "int[][], x many, z timestamptz(3), r int4range, e mood[], g int GENERATED ALWAYS AS (id * 2) STORED)",
    "CREATE TABLE b (k2 text, k1 text, v int, PRIMARY KEY (k1, k2))",
    "CREATE TABLE c (id int NOT NULL, u uuid NOT NULL UNIQUE, v text)",
    "ALTER TABLE c REPLICA IDENTITY USING INDEX c_u_key",
    "CREATE TABLE f (id int PRIMARY KEY, v text)",
    "ALTER TABLE f REPLICA IDENTITY FULL",
    "COMMENT ON COLUMN a.t IS 'a text'",
)


@pytest.fixture
def flow_settings() -> dict[str, Any]:
    return {"skip_snapshot": True, "tables": "a, b, c, f", "not_null": "required", "enums": "enum"}


@pytest.fixture
def flow_statements() -> tuple[str, ...]:
    return TABLES


def messages(dsn: str) -> list[pgoutput.RelationMessage]:
    """As the server would send them (logicalrep_write_attrs, src/backend/replication/logical/proto.c)."""
    with connect.connect(dsn) as connection:
        rows = connection.execute(
            "SELECT c.oid::int8, c.relname, c.relreplident::text, array_agg(a.attname::text ORDER BY attnum), "
            "array_agg(atttypid::int8 ORDER BY attnum), array_agg(atttypmod ORDER BY attnum), array_agg(EXISTS "
            "(SELECT 1 FROM pg_index i WHERE i.indrelid = c.oid AND (CASE c.relreplident WHEN 'i' THEN "
            "i.indisreplident  ELSE i.indisprimary END) AND a.attnum = ANY (i.indkey)) OR c.relreplident = 'f' ORDER "
            "BY attnum) FROM pg_class c JOIN pg_attribute a ON a.attrelid = c.oid AND attnum > 0 AND attgenerated = "
            "'' WHERE relkind = 'r' AND relnamespace = 'public'::regnamespace GROUP BY 1, 2, 3 ORDER BY 2"
        ).fetchall()
    return [
        pgoutput.RelationMessage(
            oid, "public", name, identity, tuple(map(pgoutput.RelationColumn, keys, names, types, typmods))
        )
        for oid, name, identity, names, types, typmods, keys in rows
    ]


def test_a_table_that_is_read_with_all_others_is_the_same(make_flow: MakeFlow, monkeypatch: pytest.MonkeyPatch) -> None:
    flow = make_flow()
    flow.create()
    pinned = read_state(flow.pipeline, state_topic(flow)).tables
    together, alone = Resolver(flow.pipeline, pinned), Resolver(flow.pipeline, pinned)
    monkeypatch.setattr(alone, "_as_read", lambda *_: None)
    found = messages(flow.dsn)
    together.arrived = time.monotonic()
    assert [m.name for m in found] == ["a", "b", "c", "f"]
    for message in found:
        assert together(message, None) == alone(message, None)
        assert together(message, None) is pinned[message.oid].version or message.name
    # one reading for all, and also for those that have come again
    single = list[str]()
    monkeypatch.setattr(together, "_table", lambda message, *_: single.append(message.name))
    monkeypatch.setattr(together, "_loaded", single.append)
    for message in found:
        assert together(message, None) is not None
        assert together(message, pinned[message.oid].version) is not None
    assert single == []
    together.close()
    alone.close()


def test_a_table_that_was_altered_since_is_read_by_itself(make_flow: MakeFlow) -> None:
    flow = make_flow()
    flow.create()
    pinned = read_state(flow.pipeline, state_topic(flow)).tables
    resolver = Resolver(flow.pipeline, pinned)
    before = messages(flow.dsn)
    resolver(before[1], None)
    flow.execute("ALTER TABLE a ADD extra text", "ALTER TABLE a ALTER t TYPE varchar(30)")
    after = messages(flow.dsn)
    # neither what was sent before nor what is sent now is taken for the other
    for message in (after[0], before[0]):
        version = resolver(message, None)
        assert [(c.name, c.type.oid, c.type.typmod) for c in version.table.columns] == [
            (c.name, c.type_oid, c.typmod) for c in message.columns
        ]
