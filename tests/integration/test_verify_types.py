"""Every type verifies as equal in both formats and in each form: what the kernels have encoded, against PostgreSQL's
own text; by the way that takes any type, and by the compiled one where a type has it."""

from __future__ import annotations

import json
from collections.abc import Sequence

import psycopg
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from psycopg import sql

from airflow_bottledwater.encoding.mapping import TableMapping
from airflow_bottledwater.model.forms import TypeOptions
from airflow_bottledwater.model.relation import SourceTable
from airflow_bottledwater.pipeline.formats import FORMATS
from airflow_bottledwater.postgres import catalog, copy
from airflow_bottledwater.postgres.connect import Connection, connect
from airflow_bottledwater.verify.expected import json_native, native
from airflow_bottledwater.verify.program import compile_scan
from airflow_bottledwater.verify.scan import PlainScan, Scan, line
from airflow_bottledwater.verify.values import Expectation, TopicReader, canonical, copied, select_list, unverified
from tests.integration.test_conformance import CASES, FORMS, SETUP, Case, supported
from tests.support.blocks import Records, rows
from tests.support.examples import examples
from tests.support.paths import KEY_ID, VALUE_ID, Made
from tests.support.paths import copied as encoded
from tests.support.reference import schemas_of

pytestmark = pytest.mark.long

SEED = bytes(range(32))


def lines_of(connection: Connection, table: SourceTable) -> list[bytes]:
    query = sql.SQL("COPY (SELECT {} FROM ONLY {}) TO STDOUT").format(
        select_list(table), sql.Identifier(table.schema, table.name)
    )
    return [line(block, i) for block in copy.lines(connection, query) for i in range(block.count)]


def check(table: SourceTable, made: Sequence[Made], lines: Sequence[bytes], format: str) -> bool:
    """Compare rows with records in every way; returns whether there is a compiled one."""
    known, kind = schemas_of(table, format, KEY_ID, VALUE_ID), FORMATS[format]
    schemas = known.get if known else None
    expectation, reader = Expectation(table, kind), TopicReader(table, kind, schemas)
    for text in lines:
        # a dead letter's row, too, must be something that no record can be
        assert canonical(expectation.values(copied(text)))
    kept = [(m, one) for m, one in zip(made, lines, strict=True) if not m.error]
    records = [(m.key, m.value) for m, _ in kept if m.key is not None and m.value is not None]
    for (key, value), (_, text) in zip(records, kept, strict=True):
        texts = copied(text)
        assert reader.key(key) == expectation.key(texts)
        assert expectation.difference(texts, reader.value(value)) is None, table.columns[-1].type
        assert not reader.value(value).older
    scans: list[Scan | None] = [PlainScan(expectation, reader, SEED), compile_scan(table, kind, schemas, SEED)]
    for scan in scans:
        if scan is not None and records:
            ours, theirs = scan.rows(rows([text for _, text in kept])), scan.records(Records(records))
            assert ours[0].tolist() == theirs[0].tolist()
            # the compiled way may leave a value to the other one, but never for common values (tests/unit/verify)
            wrong = [i for i, (a, b) in enumerate(zip(ours[1], theirs[1], strict=True)) if a != b]
            assert not wrong, (table.columns[-1].type.name, [copied(kept[i][1]) for i in wrong])
    return scans[1] is not None


@pytest.mark.parametrize("format", list(FORMATS))
@pytest.mark.parametrize("forms", FORMS)
def test_every_type_verifies_as_equal(database: str, forms: str, format: str) -> None:
    chosen = TypeOptions(**json.loads(forms))
    with connect(database) as connection:
        connection.execute("SET lc_monetary = 'C'")
        for statement in SETUP["setup"]:
            connection.execute(statement)
        by_type: dict[str, list[Case]] = {}
        for case in CASES:
            if case.get("forms", {}) == json.loads(forms) and supported(connection, case):
                by_type.setdefault(case["type"], []).append(case)
        if not by_type:
            pytest.skip("this PostgreSQL has none of the types")
        compiled = 0
        for i, (kind, cases) in enumerate(by_type.items()):
            connection.execute(f"CREATE TABLE public.t{i} (id int PRIMARY KEY, v {kind})")
            for n, case in enumerate(cases):
                insert = sql.SQL("INSERT INTO public.{} VALUES ({}, {})")
                connection.execute(insert.format(sql.Identifier(f"t{i}"), n, sql.Literal(case["literal"])))
            (oid,) = connection.execute(f"SELECT 'public.t{i}'::regclass::oid::bigint").fetchone() or (0,)
            (table,) = catalog.load(connection, [oid], TableMapping(forms=chosen))
            if unverified(table):
                continue
            compiled += check(
                table,
                encoded(connection, table, format),
                lines_of(connection, table),
                format,
            )
        assert compiled, "no type has a compiled form"


PARTS = st.none() | st.text(st.characters(codec="utf-8", exclude_characters="\0"), max_size=5) | st.text(
    ' ,;:"\\\\{}()[]\'=>\n\tnulNUL', max_size=6
)  # fmt: skip


def test_values_that_are_made_of_texts_are_read_as_they_are_written(database: str) -> None:
    """The texts have all that PostgreSQL quotes, and all that it does not."""
    with connect(database) as connection:
        connection.execute("CREATE TYPE public.several AS (a text, list text[], b text)")
        connection.execute(
            "CREATE TABLE public.t (id int PRIMARY KEY, list text[], two text[][], one public.several, many "
            "public.several[])"
        )
        (oid,) = connection.execute("SELECT 'public.t'::regclass::oid::bigint").fetchone() or (0,)
        (table,) = catalog.load(connection, [oid])
        _, *kinds = (column.type for column in table.columns)
        row = "ROW(%(a)s::text, %(list)s::text[], %(b)s::text)::public.several"
        query = sql.SQL(
            "SELECT (%(list)s::text[])::text, ARRAY[%(list)s::text[], %(list)s::text[]]::text, "  # type: ignore[arg-type]
            f"({row})::text, ARRAY[{row}, NULL, {row}]::text"
        )

        @settings(max_examples=examples(300), deadline=None)
        @given(st.lists(PARTS, min_size=1, max_size=4), PARTS, PARTS)
        def compare(several: list[str | None], a: str | None, b: str | None) -> None:
            texts = connection.execute(query, {"list": several, "a": a, "b": b}).fetchone() or ()
            made = {"a": a, "list": several, "b": b}
            wanted = [several, [several, several], made, [made, None, made]]
            for one, text, expected in zip(kinds, texts, wanted, strict=True):
                assert native(one, text) == json_native(one, text) == expected

        compare()


def test_what_cannot_be_verified_is_named(database: str) -> None:
    with psycopg.connect(database, autocommit=True) as admin:
        admin.execute(
            "CREATE TYPE named AS (a regclass, b int); CREATE TABLE t (id int PRIMARY KEY, a regclass, b regclass[], "
            "c named)"
        )
    with connect(database) as connection:
        (oid,) = connection.execute("SELECT 'public.t'::regclass::oid::bigint").fetchone() or (0,)
        (table,) = catalog.load(connection, [oid])
    assert unverified(table) == ["b", "c"]
