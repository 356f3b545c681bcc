"""Rows looked up by key, for keys of many types: found through the index, and never one whose key only is equal."""

from __future__ import annotations

import uuid

import numpy as np
import psycopg
import pytest

from airflow_bottledwater.encoding import layout, wire
from airflow_bottledwater.encoding.mapping import TableMapping
from airflow_bottledwater.local.postgres import PostgresServer
from airflow_bottledwater.pipeline.table import Table
from airflow_bottledwater.postgres import catalog, partitions
from airflow_bottledwater.postgres.connect import connect
from airflow_bottledwater.publish.current import CurrentRows, KeyBatch
from tests.support.waiting import until

#: how a table's key is made of a number, and what has to be there first
KEYS = {
    "bigint": ("id bigint", "i", ""),
    "text": ("id text", "'key ' || i", ""),
    "varchar": ("id varchar(40)", "'key ' || i", ""),
    "char": ('id char(12)', "'key ' || i", ""),
    "numeric": ("id numeric", "i / 8.0", ""),
    "uuid": ("id uuid", "md5(i::text)::uuid", ""),
    "timestamptz": ("id timestamptz", "timestamptz '2024-01-01' + i * interval '1 s'", ""),
    "inet": ("id inet", "inet '10.0.0.0' + i", ""),
    "range": ("id int4range", "int4range(i, i + 1)", ""),
    "array": ("id int[]", "ARRAY[i, 1]", ""),
    "enum": (
        "id mood",
        "('m' || i)::mood",
        "DO $$BEGIN EXECUTE (SELECT format('CREATE TYPE mood AS ENUM (%s)', string_agg(quote_literal('m' || i), ','))"
        " FROM generate_series(1, 3000) i); END$$",
    ),
    "domain": ("id positive", "i", "CREATE DOMAIN positive AS int CHECK (VALUE > 0)"),
    "domain over text": ("id code", "'c' || i", "CREATE DOMAIN code AS varchar(20)"),
    "composite": ("id pair", "ROW(i, 'x')::pair", "CREATE TYPE pair AS (a int, b text)"),
    "citext": ("id citext", "'Key ' || i", "CREATE EXTENSION citext SCHEMA public"),
    "ltree": ("id ltree", "('a.b' || i)::ltree", "CREATE EXTENSION ltree SCHEMA public"),
    "of the options": ("id citext NOT NULL", "'Key ' || i", "CREATE EXTENSION citext SCHEMA public"),
    "in another schema": ("id s.citext", "'Key ' || i", "CREATE SCHEMA s; CREATE EXTENSION citext SCHEMA s"),
}  # fmt: skip
#: unique indexes that sort a text otherwise than its column is sorted
INDEXES = {"another collation": 'id COLLATE "C"', "another operator class": "id text_pattern_ops"}


def prepare(
    server: PostgresServer, columns: str, key: str, expression: str, first: str, constraint: str = "PRIMARY KEY"
) -> str:
    dsn = server.createdb(f"test_{uuid.uuid4().hex[:12]}")
    with psycopg.connect(dsn, autocommit=True) as connection:
        try:
            if first:
                connection.execute(first)  # type: ignore[arg-type]
        except psycopg.errors.FeatureNotSupported as error:
            pytest.skip(str(error))
        for statement in (
            f"CREATE TABLE t ({columns}, v int, w text, {constraint} ({key}))",
            "ALTER TABLE t REPLICA IDENTITY FULL",
            f"INSERT INTO t SELECT {expression}, i, CASE WHEN i % 2 = 0 THEN 'w' || i END FROM generate_series(1, "
            "3000) i",
            "VACUUM ANALYZE t",
        ):
            connection.execute(statement)  # type: ignore[arg-type]
    return dsn


def keys_of(dsn: str, names: str, where: str, of: str = "t") -> KeyBatch:
    """Keys as PostgreSQL sends them."""
    with psycopg.connect(dsn) as connection:
        rows = connection.cursor(binary=True).execute(f"SELECT {names} FROM {of} WHERE {where} ORDER BY v")  # type: ignore[arg-type]
        result = rows.pgresult
        assert result is not None
        data, fields = bytearray(1), np.zeros((result.ntuples, result.nfields), dtype=layout.FIELD)
        for row in range(result.ntuples):
            for column in range(result.nfields):
                value = result.get_value(row, column) or b""
                fields[row, column] = (wire.FIELD_BINARY, len(data), len(value))
                data += value
        return KeyBatch(np.frombuffer(data, dtype=np.uint8), fields)


def fetched(
    dsn: str, keys: KeyBatch, mapping: TableMapping | None = None, since: str = ""
) -> list[tuple[int | None, bytes | None]]:
    """v and w of each key; v is None where there is no row.

    :param since: a statement that has changed the table since the keys were those of its rows.
    """
    with connect(dsn) as connection:
        (row,) = connection.execute("SELECT 'public.t'::regclass::oid::int").fetchall()
        (table,) = catalog.load(connection, list(row), mapping)
        columns = [i for i, c in enumerate(table.columns) if c.name in ("v", "w")]
        if since:
            connection.execute(since)  # type: ignore[arg-type]
        found = CurrentRows(dsn, lambda: connection, lambda what: pytest.fail(str(what))).fetch(
            table, keys, columns, xids=()
        )
        assert not found.unreadable

        def value(cell: np.void) -> bytes | None:
            return (
                bytes(found.data[cell["position"] : cell["position"] + cell["length"]])
                if cell["kind"] == ord("b")
                else None
            )

        rows = [
            (None if v["kind"] == wire.FIELD_UNCHANGED else int.from_bytes(value(v) or b"", "big"), value(w))
            for v, w in found.cells
        ]
        for number, (v, w) in enumerate(rows):
            one = CurrentRows(dsn, lambda: connection, lambda what: pytest.fail(str(what))).read(
                table, [keys.key(number)], columns
            )
            assert one.rows.get(keys.key(number)) == (None if v is None else [v.to_bytes(4, "big"), w])
    return rows


@pytest.mark.parametrize("kind", [*KEYS, *INDEXES])
def test_a_row_is_found_by_its_key_through_the_index(each_postgres: PostgresServer, kind: str) -> None:
    if kind in INDEXES:
        dsn = prepare(each_postgres, "id text NOT NULL", "id <> ''", "'key ' || i", "", "CHECK")
        with psycopg.connect(dsn, autocommit=True) as connection:
            connection.execute(f"CREATE UNIQUE INDEX t_id ON t ({INDEXES[kind]})")  # type: ignore[arg-type]
    else:
        constraint = "UNIQUE" if kind == "of the options" else "PRIMARY KEY"
        column, expression, first = KEYS[kind]
        dsn = prepare(each_postgres, column, "id", expression, first, constraint)
    chosen = kind in {"of the options", *INDEXES}
    mapping = TableMapping(rules={"t": Table(key=("id",))} if chosen else {})
    keys = keys_of(dsn, "id", "v IN (7, 8, 2999)")
    with psycopg.connect(dsn, autocommit=True) as connection:
        connection.execute("DELETE FROM t WHERE v = 2999")
    with psycopg.connect(dsn, autocommit=True) as connection:
        # a session leaves its counts when it ends
        others = "SELECT 1 FROM pg_stat_activity WHERE datname = current_database() AND pid <> pg_backend_pid()"
        until(lambda: not connection.execute(others).fetchall(), "the end of other sessions")
        connection.execute("SELECT pg_stat_reset()")
    assert fetched(dsn, keys, mapping) == [(7, None), (8, b"w8"), (None, None)]
    with psycopg.connect(dsn, autocommit=True) as connection:
        connection.execute("SELECT pg_stat_force_next_flush()")
        (scans,) = connection.execute("SELECT seq_scan FROM pg_stat_user_tables WHERE relname = 't'").fetchall()
    assert scans == (0,)


@pytest.mark.parametrize("kind", ["enum", "array", "ltree", "in another schema"])
def test_a_row_is_found_by_a_key_whose_index_is_gone(each_postgres: PostgresServer, kind: str) -> None:
    column, expression, first = KEYS[kind]
    dsn = prepare(each_postgres, column, "id", expression, first)
    keys = keys_of(dsn, "id", "v IN (7, 8)")
    assert fetched(dsn, keys, since="ALTER TABLE public.t DROP CONSTRAINT t_pkey") == [(7, None), (8, b"w8")]


@pytest.mark.parametrize(
    ("kind", "statement", "unfit"),
    [
        ("enum", "ALTER TYPE public.mood RENAME VALUE 'm9' TO 'other'", [9]),
        ("composite", "ALTER TYPE public.pair ADD ATTRIBUTE c int", [7, 8, 9, 10, 11]),
    ],
)
def test_a_key_that_postgresql_does_not_take_any_more_keeps_no_other_from_its_row(
    postgres: PostgresServer, kind: str, statement: str, unfit: list[int]
) -> None:
    column, expression, first = KEYS[kind]
    dsn = prepare(postgres, column, "id", expression, first)
    keys = keys_of(dsn, "id", "v BETWEEN 7 AND 11")
    told: dict[int, tuple[bool, str]] = {}
    with connect(dsn) as connection:
        ((oid,),) = connection.execute("SELECT 'public.t'::regclass::oid::int")
        (table,) = catalog.load(connection, [oid])
        connection.execute(statement)  # type: ignore[arg-type]
        rows = CurrentRows(dsn, lambda: connection, lambda what: pytest.fail(str(what)))
        while len(told) < len(keys):
            found = rows.fetch(table, keys.some(len(told), len(keys)), [1], xids=())
            for kind_of in found.cells["kind"][: len(found.cells) - found.left_out, 0]:
                told[7 + len(told)] = kind_of == wire.FIELD_BINARY, found.unreadable.get(1, "")
        read = rows.read(table, [keys.key(number) for number in range(5)], [1])
    assert [v for v, (there, why) in told.items() if "in which a label or an attribute was" in why] == unfit
    assert [v for v, (there, why) in told.items() if not there] == unfit
    assert list(read.unfit) == [keys.key(v - 7) for v in unfit]
    assert {*read.rows} == {keys.key(v - 7) for v in told if v not in unfit}


def test_a_key_of_several_columns_in_an_order_of_its_own(each_postgres: PostgresServer) -> None:
    dsn = prepare(each_postgres, "b text, a int", "a, b", "'b' || i, i % 7", "")
    keys = keys_of(dsn, "a, b", "v IN (7, 8, 9)")
    assert fetched(dsn, keys) == [(7, None), (8, b"w8"), (9, None)]


@pytest.mark.parametrize(("kind", "key", "equal"), [("numeric", "1.50", "1.5"), ("citext", "'Abc'", "'aBC'")])
def test_a_row_whose_key_is_only_equal_is_another_keys(
    each_postgres: PostgresServer, kind: str, key: str, equal: str
) -> None:
    """Its record is that of another key in Kafka."""
    dsn = prepare(each_postgres, f"id {kind}", "id", "i", "CREATE EXTENSION citext" if kind == "citext" else "")
    with psycopg.connect(dsn, autocommit=True) as connection:
        connection.execute("TRUNCATE t")
        connection.execute(f"INSERT INTO t VALUES ({key}, 1, 'w')")  # type: ignore[arg-type]
        keys = keys_of(dsn, "id", "v = 1")
        assert fetched(dsn, keys) == [(1, b"w")]
        connection.execute(f"UPDATE t SET id = {equal}")  # type: ignore[arg-type]
    assert fetched(dsn, keys) == [(None, None)]


def test_a_second_attempt_knows_nothing_of_the_first(postgres: PostgresServer, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its connection is lost behind the answer, and the row is gone when it is asked again."""
    dsn = prepare(postgres, "id int", "id", "i", "")
    keys = keys_of(dsn, "id", "v IN (7, 8)")
    (oid,) = keys_of(dsn, "tableoid::int", "v = 7").key(0)
    waited: list[str] = []
    with connect(dsn) as first, connect(dsn) as second:
        (table,) = catalog.load(second, [int.from_bytes(oid, "big")])
        execute = first.execute

        def lost(query: object, *arguments: object) -> object:
            if query == "ROLLBACK":
                second.execute("DELETE FROM public.t WHERE v = 8")
                raise psycopg.OperationalError("the server closed the connection")
            return execute(query, *arguments)  # type: ignore[arg-type]

        monkeypatch.setattr(first, "execute", lost)
        sessions = iter([first, second])
        found = CurrentRows(dsn, lambda: next(sessions), lambda what: waited.append(str(what))).fetch(
            table, keys, [1], xids=()
        )
    assert len(waited) == 1
    assert found.cells["kind"].tolist() == [[wire.FIELD_BINARY], [wire.FIELD_UNCHANGED]]


#: of two levels, with a default partition, and a key in the order of none
PARTED = (
    "CREATE TABLE p (r text, v int, w text, PRIMARY KEY (r, v)) PARTITION BY LIST (r)",
    "CREATE TABLE p_a PARTITION OF p FOR VALUES IN ('a')",
    "CREATE TABLE p_b PARTITION OF p FOR VALUES IN ('b')",
    "CREATE TABLE p_s PARTITION OF p FOR VALUES IN ('s') PARTITION BY HASH (v)",
    "CREATE TABLE p_s0 PARTITION OF p_s FOR VALUES WITH (MODULUS 2, REMAINDER 0)",
    "CREATE TABLE p_s1 PARTITION OF p_s FOR VALUES WITH (MODULUS 2, REMAINDER 1)",
    "CREATE TABLE p_default PARTITION OF p DEFAULT",
    "INSERT INTO p SELECT (ARRAY['a', 'b', 's', '{}'])[i % 4 + 1], i, 'w' FROM generate_series(1, 40) i",
)


@pytest.mark.parametrize(
    ("statements", "unsent"),
    [
        (["DELETE FROM p"], []),
        (["TRUNCATE p"], []),
        (["VACUUM FULL p_a"], []),
        (["TRUNCATE p_a"], ["a"]),
        (["ALTER TABLE p DETACH PARTITION p_a"], ["a"]),
        (["ALTER TABLE p DETACH PARTITION p_s"], ["s"]),
        # what was in a default partition may have been in the one that is gone, by what is known of it
        (["DROP TABLE p_a", "DELETE FROM p"], ["a", "{}"]),
        (["DROP TABLE p_a", "CREATE TABLE p_a PARTITION OF p FOR VALUES IN ('a')", "DELETE FROM p"], ["a", "{}"]),
        (
            [
                "ALTER TABLE p DETACH PARTITION p_s",
                "DELETE FROM p_s",
                "ALTER TABLE p ATTACH PARTITION p_s FOR VALUES IN ('s')",
            ],
            ["s"],
        ),
        (["TRUNCATE p_default"], ["{}"]),
    ],
)
def test_a_row_that_may_have_gone_with_its_partition_is_told_from_a_deleted_one(
    each_postgres: PostgresServer, statements: list[str], unsent: list[str]
) -> None:
    dsn = each_postgres.createdb(f"test_{uuid.uuid4().hex[:12]}")
    with connect(dsn) as connection, psycopg.connect(dsn, autocommit=True) as writer:
        for statement in PARTED:
            writer.execute(statement)  # type: ignore[arg-type]
        ((oid, xid),) = writer.execute("SELECT 'p'::regclass::oid::int, pg_current_xact_id()::text::bigint")
        (table,) = catalog.load(connection, [oid])
        rows = CurrentRows(dsn, lambda: connection, lambda what: pytest.fail(str(what)))
        rows.partitions = {oid: partitions.remembered(partitions.below(connection, [oid])[oid])}
        keys = keys_of(dsn, "r, v", "true", "p")
        for statement in statements:
            writer.execute(statement)  # type: ignore[arg-type]
        found = rows.fetch(table, keys, [2], xids=[xid])
        assert sorted({keys.key(number)[0].decode() for number in found.unsent}) == unsent
        every = [keys.key(number) for number in range(len(keys))]
        assert {*rows.read(table, every, [2]).unsent} == {every[number] for number in found.unsent}
        # all of a partition's rows, and those that are there are found
        gone = np.flatnonzero(found.cells["kind"][:, 0] == wire.FIELD_UNCHANGED).tolist()
        assert {*found.unsent} == {number for number in gone if every[number][0].decode() in unsent}


def test_the_rows_of_a_dropped_table_cannot_be_read(postgres: PostgresServer) -> None:
    dsn = prepare(postgres, "id int", "id", "i", "")
    keys = keys_of(dsn, "id", "v IN (7, 8)")
    with connect(dsn) as connection:
        ((oid,),) = connection.execute("SELECT 'public.t'::regclass::oid::int")
        (table,) = catalog.load(connection, [oid])
        connection.execute("DROP TABLE public.t")
        rows = CurrentRows(dsn, lambda: connection, lambda what: pytest.fail(str(what)))
        assert rows.fetch(table, keys, [1, 2], xids=()).unreadable == dict.fromkeys([1, 2], "its table was dropped")
