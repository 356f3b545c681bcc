"""Live snapshots in the order of the keys: each row once, whatever the key is made of, and wherever its reading is
interrupted."""

from __future__ import annotations

import json
import random
import re
import time
import uuid
from contextlib import nullcontext

import psycopg
import pytest

from airflow_bottledwater.errors import Refused
from airflow_bottledwater.jobs import snapshots
from airflow_bottledwater.live import reading
from airflow_bottledwater.live.keys import between, bound, place
from airflow_bottledwater.live.wanted import check_order
from airflow_bottledwater.local.kafka import KafkaBroker
from airflow_bottledwater.local.postgres import PostgresServer
from airflow_bottledwater.postgres import catalog
from airflow_bottledwater.postgres.connect import connect
from airflow_bottledwater.state.claim import read_state
from tests.support.topics import Flow, MakeFlow, assert_exactly_once_in_order
from tests.support.waiting import until
from tests.support.writers import Writers, audit, make_tables, state_topic

#: key columns, and an expression over g for each of them
KEYS = {
    "bigint": ("id bigint", "g * 7"),
    "two": ('a text COLLATE "C", b int', "left(md5(g::text), 2), g"),
    "descending": ("a numeric(12, 3), b date", "-g / 7.0, date '2020-01-01' + g % 5"),
    "text": ("name text", "chr(80 + g % 40) || repeat('x', g % 3) || E'\\'\"\\\\ü' || g"),
    "uuid": ("id uuid", "md5(g::text)::uuid"),
    "timestamptz": ("at timestamptz", "timestamptz '1999-12-31 23:59:59.999999+00' + g * interval '1 microsecond'"),
    "bytea": ("b bytea", "decode(md5(g::text), 'hex')"),
    "float": ("f float8", "CASE g WHEN 1 THEN 'NaN' WHEN 2 THEN '-Infinity' ELSE 1 / g::float8 END"),
    "char": ("c char(8)", "g::text"),
    "enum": ("e color, n int", "(enum_range(null::color))[1 + g % 3], g"),
    "domain": ("p positive", "g"),
    "array": ("l int[]", "ARRAY[g % 3, g]"),
    "bits": ("b bit varying(20)", "g::bit(20)"),
    "time": ("t timetz", "timetz '00:00:00+03' + g * interval '17 seconds'"),
    "network": ("i inet", "inet '10.0.0.0' + g"),
}


@pytest.mark.long
@pytest.mark.parametrize("kind", KEYS)
def test_a_table_is_divided_by_its_keys(database: str, make_flow: MakeFlow, kind: str) -> None:
    columns, values = KEYS[kind]
    flow = make_flow(tables="t")
    key = ", ".join(column.split()[0] for column in columns.split(", ") if not column.startswith("3)"))
    flow.execute(
        "CREATE TYPE color AS ENUM ('red', 'green', 'blue')",
        "CREATE DOMAIN positive AS int CHECK (VALUE > 0)",
        f"CREATE TABLE t ({columns}, PRIMARY KEY ({key}))",
        f"INSERT INTO t SELECT {values} FROM generate_series(1, 700) g",
    )
    with connect(flow.dsn) as connection:
        oid = catalog.resolve(connection, ["t"], (), via_root=True)
        (table,) = catalog.load(connection, oid)
        after: tuple[str, ...] = ()
        found = []
        while True:
            upto = bound(connection, table, after, 64)
            rows = connection.execute(
                b"SELECT t::text FROM public.t WHERE " + between(table, after, upto or ()).as_bytes(connection)
            ).fetchall()
            found += rows
            if upto is None:
                break
            assert len(rows) == 64
            after = upto
        assert len(found) == len(set(found)) == 700


@pytest.fixture
def small_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reading, "_FIRST_BLOCKS", 2)
    monkeypatch.setattr(reading, "_MOST_BLOCKS_BY_KEY", 4)


@pytest.mark.long
@pytest.mark.usefixtures("small_chunks")
@pytest.mark.parametrize("partitioned", [False, True])
def test_it_goes_on_where_it_was_when_the_table_is_rewritten(make_flow: MakeFlow, partitioned: bool) -> None:
    flow = make_flow(tables="t")
    if partitioned:
        flow.execute(
            "CREATE TABLE t (id int PRIMARY KEY, text text) PARTITION BY HASH (id)",
            *(f"CREATE TABLE t{i} PARTITION OF t FOR VALUES WITH (MODULUS 3, REMAINDER {i})" for i in range(3)),
        )
    else:
        flow.execute("CREATE TABLE t (id int PRIMARY KEY, text text)")
    flow.execute("INSERT INTO t SELECT g, 'row ' || g FROM generate_series(1, 20000) g")
    flow.create()
    flow.snapshot()
    asked = flow.ask("t", by_key=True, rows_per_second=10000, where="id % 2 = 0")
    for _ in range(3):
        with flow.streaming() as errors:
            before = _rows(flow, asked)
            until(lambda before=before: _rows(flow, asked) > before, "some rows", failed=errors)
            flow.execute("VACUUM FULL t", "UPDATE t SET text = 'changed' WHERE id % 1000 = 0")
            time.sleep(0.2)
        if flow.reported(asked).ended:
            break
    flow.stream()
    report = flow.reported(asked)
    assert report.state == "finished" and report.bytes == report.total_bytes
    again = [m.key["id"] for m in flow.read("t") if m.snapshot]
    assert len(again) == len(set(again)) == report.rows
    assert report.rows + report.superseded == 10000
    messages = flow.read("t")
    assert_exactly_once_in_order(messages)
    assert flow.compare("t").equal


def _interrupted(flow: Flow, *statements: str) -> str:
    """Read all rows of ``t`` again, and execute something after some of them; returns the id of the live snapshot."""
    flow.create()
    flow.snapshot()
    asked = flow.ask("t", by_key=True, sweep=True, rows_per_second=5000)
    with flow.streaming() as errors:
        until(lambda: _rows(flow, asked) > 1000, "some rows", failed=errors)
        assert _rows(flow, asked) < 10000
        flow.execute(*statements)
        snapshots.change(flow.pipeline, flow.name, asked, rows_per_second=0.0)
        until(lambda: flow.reported(asked).ended, "the live snapshot ends", failed=errors)
    assert flow.reported(asked).state == "finished"
    return asked


@pytest.mark.long
@pytest.mark.usefixtures("small_chunks")
def test_rows_that_are_attached_behind_it_are_read(make_flow: MakeFlow) -> None:
    flow = make_flow(tables="t")
    flow.execute(
        "CREATE TABLE t (id int PRIMARY KEY, text text) PARTITION BY RANGE (id)",
        "CREATE TABLE t1 PARTITION OF t FOR VALUES FROM (1000) TO (100000)",
        "INSERT INTO t SELECT g, 'row ' || g FROM generate_series(1001, 11000) g",
        "CREATE TABLE t0 (id int PRIMARY KEY, text text)",
        "INSERT INTO t0 SELECT g, 'row ' || g FROM generate_series(1, 900) g",
    )
    _interrupted(flow, "ALTER TABLE t ATTACH PARTITION t0 FOR VALUES FROM (0) TO (1000)")
    assert {m.key["id"] for m in flow.read("t")} == {*range(1, 901), *range(1001, 11001)}
    assert flow.compare("t").equal


@pytest.mark.usefixtures("small_chunks")
@pytest.mark.long
@pytest.mark.parametrize(
    "altered",
    [
        pytest.param('ALTER k TYPE text COLLATE "POSIX"', id="collation"),
        pytest.param("DROP CONSTRAINT t_pkey, ADD CONSTRAINT t_pkey PRIMARY KEY (n, k)", id="columns"),
    ],
)
def test_with_another_order_of_the_keys_it_begins_again(make_flow: MakeFlow, altered: str) -> None:
    flow = make_flow(tables="t")
    flow.execute(
        'CREATE TABLE t (k text COLLATE "C", n text, PRIMARY KEY (k, n))',
        "INSERT INTO t SELECT chr(CASE g % 2 WHEN 0 THEN 65 ELSE 97 END + g % 26) || g, md5(g::text) FROM "
        "generate_series(1, 10000) g",
    )
    asked = _interrupted(flow, f"ALTER TABLE t {altered}")
    again = [m.key["k"] for m in flow.read("t") if m.snapshot.startswith(asked)]
    assert len(again) > len(set(again)) == 10000


def test_another_version_of_the_default_collation_is_another_order_of_the_keys(each_postgres: PostgresServer) -> None:
    def version(name: str, told: str) -> str:
        # as a server tells it whose C library is replaced by a newer one
        return (
            f"CREATE FUNCTION replaced.{name}(oid) RETURNS text LANGUAGE sql AS $$ SELECT CASE WHEN {told} "
            "THEN current_setting('replaced.version') END $$"
        )

    with connect(each_postgres.createdb("collation")) as connection:
        connection.execute("CREATE TABLE public.t (k text PRIMARY KEY)")
        (table,) = catalog.load(connection, catalog.resolve(connection, ["t"], (), via_root=True))
        assert place(connection, table, []) == place(connection, table, [])
        connection.execute("CREATE SCHEMA replaced")
        # up to 15, it does not tell the version of the default collation
        connection.execute(version("pg_collation_actual_version", "$1 <> 100"))
        connection.execute(version("pg_database_collation_actual_version", "true"))
        connection.execute("SET search_path = replaced, pg_catalog")
        places = set()
        for told in ("2.36", "2.41"):
            connection.execute(f"SET replaced.version = '{told}'")
            places.add(place(connection, table, []))
        assert len(places) == 2


@pytest.mark.long
def test_keys_that_are_sorted_in_a_way_of_their_own_are_refused(make_flow: MakeFlow) -> None:
    """As those of an extension are: citext, say."""
    flow = make_flow(tables="t")
    flow.execute(
        "CREATE FUNCTION backwards(int, int) RETURNS int LANGUAGE sql IMMUTABLE AS 'SELECT btint4cmp($2, $1)'",
        "CREATE OPERATOR CLASS backwards FOR TYPE int USING btree AS OPERATOR 1 >, OPERATOR 2 >=, OPERATOR 3 =, "
        "OPERATOR 4 <=, OPERATOR 5 <, FUNCTION 1 backwards(int, int)",
        "CREATE TABLE t (k int NOT NULL)",
        "CREATE UNIQUE INDEX t_k ON t (k backwards)",
        "ALTER TABLE t REPLICA IDENTITY USING INDEX t_k",
        "INSERT INTO t SELECT generate_series(1, 50)",
    )
    flow.create()
    flow.snapshot()
    refused = flow.ask("t", by_key=True)
    flow.stream()
    assert (flow.reported(refused).state, flow.reported(refused).rows) == ("failed", 0)
    assert "column k (integer) is not sorted by PostgreSQL's own operators" in flow.reported(refused).error
    # as it advises
    asked = flow.ask("t")
    flow.stream()
    assert (flow.reported(asked).state, flow.reported(asked).rows) == ("finished", 50)


@pytest.mark.parametrize("kind", ["citext", "ltree"])
def test_keys_of_an_extension_are_refused(each_postgres: PostgresServer, kind: str) -> None:
    with connect(each_postgres.createdb(f"by_{kind}")) as connection:
        try:
            connection.execute(f"CREATE EXTENSION {kind} SCHEMA public")
        except psycopg.errors.FeatureNotSupported as error:
            pytest.skip(str(error))
        connection.execute(f"CREATE TABLE public.t (a int, k public.{kind}, PRIMARY KEY (a, k))")
        (oid,) = catalog.resolve(connection, ["t"], (), via_root=True)
        with pytest.raises(Refused, match=rf"column k \(public\.{kind}\) is not sorted by PostgreSQL's own operators"):
            check_order(connection, oid, "public.t", ["a", "k"])


@pytest.mark.parametrize(
    ("index", "refused"),
    [
        ("a, b", ""),
        ("b DESC, a", ""),
        ('a COLLATE "C", b', "a (text)"),
        ("a text_pattern_ops, b", "a (text)"),
        ('a, b COLLATE "C"', "b (character varying)"),
    ],
)
def test_keys_are_read_by_the_operators_and_collations_of_an_index(
    postgres: PostgresServer, index: str, refused: str
) -> None:
    with connect(postgres.createdb(f"o{uuid.uuid4().hex[:8]}")) as connection:
        connection.execute("CREATE TABLE public.t (a text NOT NULL, b varchar NOT NULL)")
        connection.execute(f"CREATE UNIQUE INDEX ON public.t ({index})")  # type: ignore[arg-type]
        (oid,) = catalog.resolve(connection, ["t"], ())
        with pytest.raises(Refused, match=re.escape(f"column {refused} is not")) if refused else nullcontext():
            check_order(connection, oid, "public.t", ["a", "b"])
        # any of them does
        connection.execute("CREATE UNIQUE INDEX ON public.t (a, b)")
        check_order(connection, oid, "public.t", ["a", "b"])


def _rows(flow: Flow, asked: str) -> int:
    found = read_state(flow.pipeline, state_topic(flow)).live(asked)
    return 0 if found is None else found.rows + found.superseded


@pytest.mark.long
@pytest.mark.parametrize("seed", range(2))
def test_under_writers_no_key_goes_back_in_time(
    database: str, kafka: KafkaBroker, monkeypatch: pytest.MonkeyPatch, seed: int
) -> None:
    dice = random.Random(seed)
    monkeypatch.setattr(reading, "_FIRST_BLOCKS", 1)
    monkeypatch.setattr(reading, "_MOST_BLOCKS_BY_KEY", dice.choice((1, 4)))
    flow = Flow(database, kafka, None, tables=("a", "b"), xid_header=True, partitions=dice.choice((1, 3)))
    make_tables(flow, ("a", "b"), 1500)
    with Writers(flow.dsn, ("a", "b"), seed, 1500):
        flow.create()
        flow.snapshot()
        with flow.streaming() as errors:
            asked = flow.ask("?", by_key=True, sweep=seed % 2 == 0)
            until(lambda: flow.reported(asked).ended, "the live snapshot ends", pause=0.5, failed=errors)
    flow.stream()
    assert flow.reported(asked).state == "finished", json.dumps(flow.reported(asked).error)
    assert audit(flow, ("a", "b")).check().statistics.live_rows >= 300
