"""The conformance files: literals of every type, by way of the snapshot and of the stream, to the records that they
must be.

``tests/conformance/types.jsonl`` has a case a line: ``type``, ``literal``, ``avro`` (what fastavro reads, see
:func:`shown`), ``json`` (the text of the value in the record, to the byte). Perhaps ``forms`` (other than the
defaults), ``refused`` (the formats that cannot hold it: a verdict, for on_error), ``from`` (the first server version
that has it), ``extension`` (that makes the type), ``if`` (a query that a server without it refuses). ``tables.jsonl``
has tables: statements, and the records of their rows.
"""

from __future__ import annotations

import io
import json
import math
import uuid
from collections.abc import Iterator, Sequence
from dataclasses import replace
from decimal import Decimal, localcontext
from pathlib import Path
from typing import Any

import fastavro
import psycopg
import pytest
from psycopg import sql

from airflow_bottledwater.encoding import avro
from airflow_bottledwater.encoding.mapping import TableMapping
from airflow_bottledwater.local.postgres import PostgresServer
from airflow_bottledwater.model.forms import TypeOptions
from airflow_bottledwater.model.relation import SourceTable
from airflow_bottledwater.postgres import catalog
from airflow_bottledwater.postgres.connect import Connection, connect
from tests.support import reference
from tests.support.paths import Follower, Made, copied, encoded

FOLDER = Path(__file__).parents[1] / "conformance"
Case = dict[str, Any]


def lines(name: str) -> list[Case]:
    return [json.loads(line) for line in (FOLDER / name).read_text().strip().split("\n")]


SETUP, *CASES = lines("types.jsonl")
FORMS = list(dict.fromkeys(json.dumps(case.get("forms", {}), sort_keys=True) for case in CASES))


def named(schema: Any) -> dict[str, Any]:
    """The schema's records, by the names by which they are used again."""
    inner = schema if isinstance(schema, list) else []
    if isinstance(schema, dict):
        inner = [*(f["type"] for f in schema.get("fields", ())), schema.get("items"), schema.get("values")]
    found = {name: each for one in inner for name, each in named(one).items()}
    if isinstance(schema, dict) and schema["type"] == "record":
        found[f"{schema['namespace']}.{schema['name']}"] = schema
    return found


def shown(schema: Any, value: Any, names: dict[str, Any]) -> Any:
    """A value that fastavro read without logical types, as the file has it: decimals as their digits, bytes in
    hexadecimal, floats that JSON cannot say as words."""
    schema = names.get(schema, schema) if isinstance(schema, str) else schema
    if isinstance(schema, list):
        return None if value is None else shown(next(s for s in schema if s != "null"), value, names)
    if isinstance(value, bytes):
        if isinstance(schema, dict) and schema.get("logicalType") == "decimal":
            with localcontext() as context:
                context.prec = 4000
                return f"{Decimal(int.from_bytes(value, 'big', signed=True)).scaleb(-schema['scale']):f}"
        return value.hex()
    if isinstance(value, float) and not math.isfinite(value):
        return {"inf": "Infinity", "-inf": "-Infinity", "nan": "NaN"}[str(value)]
    if isinstance(value, list):
        return [shown(schema["items"], each, names) for each in value]
    if isinstance(value, dict):
        of = {f["name"]: f["type"] for f in schema["fields"]} if schema["type"] == "record" else {}
        return {name: shown(of.get(name) or schema["values"], each, names) for name, each in value.items()}
    return value


def avro_of(table: SourceTable, made: Made) -> dict[str, Any]:
    """An Avro record's fields."""
    assert made.value is not None
    schema = json.loads(avro.value_schema(table))
    row = fastavro.schemaless_reader(
        io.BytesIO(made.value[5:]), fastavro.parse_schema(reference.without_logical(schema))
    )
    assert isinstance(row, dict)
    return {f["name"]: shown(f["type"], row[f["name"]], named(schema)) for f in schema["fields"]}


def json_of(made: Made, column: str) -> str:
    """The text of a column's value in a JSON record whose last column it is."""
    assert made.value is not None
    json.loads(made.value)
    return made.value.decode().partition(f'"{column}":')[2][:-1]


@pytest.fixture
def server(each_postgres: PostgresServer) -> Iterator[tuple[str, Connection]]:
    """A database of each server version."""
    dsn = each_postgres.createdb(f"test_{uuid.uuid4().hex[:12]}")
    with connect(dsn) as connection:
        connection.execute("SET lc_monetary = 'C'")
        yield dsn, connection


def supported(connection: Connection, case: Case) -> bool:
    """Whether this server has the type."""
    if connection.info.server_version // 10000 < case.get("from", 0):
        return False
    try:
        if "extension" in case:
            connection.execute(f"CREATE EXTENSION IF NOT EXISTS {case['extension']} SCHEMA public")
        if "if" in case:
            connection.execute(case["if"])
    except psycopg.Error:
        return False
    return True


def both_ways(connection: Connection, follower: Follower, tables: Sequence[SourceTable]) -> dict[str, list[Made]]:
    """The rows of tables that were filled one after the other: by the stream, once it is the same as the snapshot."""
    batches = follower.batches()
    found = {}
    for format in ("avro", "json"):
        stream = [made for batch in batches for made in encoded(batch, follower.completer, format)[0]]
        snapshot = [made for table in tables for made in copied(connection, table, format)]
        assert [replace(made, op="") for made in stream] == snapshot
        found[format] = stream
    return found


def _oid(connection: Connection, table: str) -> int:
    (row,) = connection.execute("SELECT %s::text::regclass::oid::bigint", (table,)).fetchall()
    return int(row[0])


def test_there_are_enough_cases_and_none_twice() -> None:
    assert len(CASES) >= 400
    distinct = {json.dumps([case["type"], case["literal"], case.get("forms")]) for case in CASES}
    assert len(distinct) == len(CASES)


@pytest.mark.parametrize("forms", FORMS)
def test_every_case_is_what_the_file_says(server: tuple[str, Connection], forms: str) -> None:
    dsn, connection = server
    for statement in SETUP["setup"]:
        connection.execute(statement)
    connection.execute("CREATE PUBLICATION p FOR ALL TABLES")
    wanted = [case for case in CASES if case.get("forms", {}) == json.loads(forms) and supported(connection, case)]
    follower = Follower(dsn, forms=TypeOptions(**json.loads(forms)))
    by_type: dict[str, list[Case]] = {}
    for case in wanted:
        by_type.setdefault(case["type"], []).append(case)
    tables, of = [], []
    for i, (kind, cases) in enumerate(by_type.items()):
        connection.execute(f"CREATE TABLE public.t{i} (id int PRIMARY KEY, v {kind})")
        with connection.transaction():
            for n, case in enumerate(cases):
                insert = sql.SQL("INSERT INTO public.{} VALUES ({}, {})")
                connection.execute(insert.format(sql.Identifier(f"t{i}"), n, sql.Literal(case["literal"])))
        tables += catalog.load(connection, [_oid(connection, f"public.t{i}")], TableMapping(forms=follower.forms))
        of += [(tables[-1], case) for case in cases]
    found = both_ways(connection, follower, tables)
    for (table, case), as_avro, as_json in zip(of, found["avro"], found["json"], strict=True):
        for made, format in ((as_avro, "avro"), (as_json, "json")):
            assert bool(made.error) == (format in case.get("refused", ())), (case, made.error)
        if not as_avro.error:
            assert json.dumps(avro_of(table, as_avro)["v"]) == json.dumps(case["avro"]), case
        if not as_json.error:
            assert json_of(as_json, "v") == case["json"], case
    follower.close()


@pytest.mark.parametrize("case", lines("tables.jsonl"), ids=lambda case: case["name"])
def test_every_table_is_what_the_file_says(server: tuple[str, Connection], case: Case) -> None:
    dsn, connection = server
    connection.execute("CREATE PUBLICATION p FOR ALL TABLES")
    follower = Follower(dsn)
    connection.execute("SET search_path = public")
    for statement in case["statements"]:
        connection.execute(statement)
    (table,) = catalog.load(
        connection, [_oid(connection, sql.Identifier("public", case["table"]).as_string(connection))]
    )
    found = both_ways(connection, follower, [table])
    assert json.loads(avro.value_schema(table))["name"] == case["record"]
    assert [avro_of(table, made) for made in found["avro"]] == case["avro"]
    assert [made.value.decode() for made in found["json"] if made.value is not None] == case["json"]
    follower.close()


# ---------------------------------------------------------------------- completeness
#: all types that a column can have: with those of composites made on purpose, not of tables; and arrays of all these
ALL_TYPES = """
WITH found AS (
    SELECT t.oid, t.typtype, t.typbasetype, t.typarray, t.typdelim, format('%I.%I', n.nspname, t.typname) AS name
    FROM pg_type t JOIN pg_namespace n ON n.oid = t.typnamespace LEFT JOIN pg_class c ON c.oid = t.typrelid
    WHERE t.typisdefined AND (t.typtype IN ('b', 'd', 'e', 'r', 'm') OR c.relkind = 'c')
    AND NOT EXISTS (SELECT FROM pg_type e WHERE e.typarray = t.oid)
)
SELECT oid::bigint, name, typbasetype::bigint, '' FROM found
UNION ALL SELECT typarray::bigint, name, oid::bigint, typdelim::text FROM found WHERE typarray <> 0 ORDER BY 4, 1
"""
#: values that no literal makes
EXPRESSIONS = {
    "pg_node_tree": "(SELECT adbin FROM pg_attrdef LIMIT 1)",
    "pg_ndistinct": "(SELECT stxdndistinct FROM pg_statistic_ext_data LIMIT 1)",
    "pg_dependencies": "(SELECT stxddependencies FROM pg_statistic_ext_data LIMIT 1)",
    "pg_mcv_list": "(SELECT stxdmcv FROM pg_statistic_ext_data LIMIT 1)",
    "int2vector": "'1 2'",
    # of indexes: no literal is accepted, and nothing in SQL makes one
    **dict.fromkeys(
        ("gtsvector", "pg_brin_bloom_summary", "pg_brin_minmax_multi_summary", "ghstore", "ltree_gist"), "NULL"
    ),
    **dict.fromkeys(("box2df", "gidx"), "NULL"),
    "xml": "NULL",  # for a server that is built without
    "yes_or_no": "'YES'",
    "aclitem": "'postgres=r/postgres'",
}


def test_every_type_of_the_server_is_the_same_both_ways(server: tuple[str, Connection]) -> None:
    dsn, connection = server
    for statement in SETUP["setup"]:
        connection.execute(statement)
    connection.execute("CREATE TABLE public.statistics (a int DEFAULT 1 + 1, b int)")
    connection.execute("INSERT INTO public.statistics SELECT g % 10, g % 10 FROM generate_series(1, 1000) g")
    connection.execute("CREATE STATISTICS public.s ON a, b FROM public.statistics")
    connection.execute("ANALYZE public.statistics")
    literals: dict[int, str] = {}
    for case in sorted(CASES, key=lambda case: len(case["literal"])):
        if "refused" not in case and not case.get("forms") and case["literal"] and supported(connection, case):
            (row,) = connection.execute("SELECT %s::text::regtype::oid::bigint", (case["type"],)).fetchall()
            literals.setdefault(row[0], case["literal"])
    connection.execute("CREATE PUBLICATION p FOR ALL TABLES")
    follower = Follower(dsn)
    missing: list[str] = []
    tables: list[SourceTable] = []
    unsendable: set[str] = set()
    for oid, name, below, delimiter in connection.execute(ALL_TYPES).fetchall():
        label = name.rpartition(".")[2].strip('"')
        expression = EXPRESSIONS.get(label)
        literal = literals.get(below if delimiter else oid, literals.get(below, ""))
        expression = None if expression == "NULL" and literal else expression
        if expression is None and literal == "":
            missing.append(name)
            continue
        literals.setdefault(oid, literal)
        kind = f"{name}[]" if delimiter else name
        if expression is not None:
            value = f"ARRAY[{expression}::{name}, NULL]" if delimiter else expression
        else:
            escaped = literal.replace("\\", "\\\\").replace('"', '\\"')
            value = sql.Literal(f'{{"{escaped}"{delimiter}NULL}}' if delimiter else literal).as_string()
        connection.execute(f"CREATE TABLE public.c{oid} (id int PRIMARY KEY, v {kind})")
        (table,) = catalog.load(connection, [_oid(connection, f"public.c{oid}")])
        if catalog.unsendable(connection, [table]):  # preflight refuses it
            connection.execute(f"DROP TABLE public.c{oid}")
            unsendable.add(name)
            continue
        connection.execute(f"INSERT INTO public.c{oid} VALUES (1, {value}), (2, NULL)")
        tables.append(table)
    assert not missing, " ".join(sorted(set(missing)))
    assert len(tables) > 190
    # arrays of these, that is: alone they come as text
    assert {name for name in unsendable if name.startswith("pg_catalog.")} <= {
        "pg_catalog.aclitem",
        "pg_catalog.gtsvector",
    }
    for format, rows in both_ways(connection, follower, tables).items():
        for i, made in enumerate(rows):
            assert not made.error, (tables[i // 2].columns[1].type.name, made.error)
            if format == "avro":
                avro_of(tables[i // 2], made)
            else:
                json_of(made, "v")
    follower.close()


def test_not_null_that_is_not_valid_yet_is_nullable(server: tuple[str, Connection]) -> None:
    """PostgreSQL 18: rows from before may be NULL, though pg_attribute.attnotnull says otherwise."""
    _, connection = server
    if connection.info.server_version < 180000:
        pytest.skip("NOT NULL … NOT VALID came with PostgreSQL 18")
    connection.execute("CREATE TABLE public.halfway (id int PRIMARY KEY, n int, m int NOT NULL)")
    connection.execute("INSERT INTO public.halfway VALUES (1, NULL, 1)")
    connection.execute("ALTER TABLE public.halfway ADD CONSTRAINT there NOT NULL n NOT VALID")
    (oid,) = connection.execute("SELECT 'public.halfway'::regclass::oid").fetchone() or ()

    # PostgreSQL takes it for the replica identity all the same
    connection.execute("CREATE UNIQUE INDEX key ON public.halfway (n)")
    connection.execute("ALTER TABLE public.halfway REPLICA IDENTITY USING INDEX key")

    def required() -> list[bool]:
        return [column.required for column in loaded().columns]

    def loaded() -> SourceTable:
        (table,) = catalog.load(connection, [oid], TableMapping(forms=TypeOptions(not_null="required")))
        return table

    assert required() == [True, False, True]
    assert not loaded().keyed and "column 'n' of its key may be NULL" in loaded().key_problem
    connection.execute("UPDATE public.halfway SET n = 1")
    connection.execute("ALTER TABLE public.halfway VALIDATE CONSTRAINT there")
    assert required() == [True, True, True] and loaded().key == ("n",)
    connection.execute("DROP TABLE public.halfway")
