"""Arrays whose columns declare another depth than they have, as after ``CREATE TABLE AS`` and after a restored dump."""

from __future__ import annotations

import logging

import psycopg
import pytest

from airflow_bottledwater.errors import PreflightError
from airflow_bottledwater.provision import preflight
from tests.support.topics import Flow, MakeFlow


@pytest.fixture
def flow_statements() -> tuple[str, ...]:
    return (
        "CREATE TABLE a (id int PRIMARY KEY, m int[][], s text[], d varchar(7)[])",
        "INSERT INTO a VALUES (1, '{{1,2},{3,4}}', '{x}', '{{y}}'), (2, '{}', NULL, NULL)",
        "CREATE TABLE b AS SELECT id, m, s FROM a",
        "ALTER TABLE b ADD PRIMARY KEY (id)",
        "CREATE TABLE empty (id int PRIMARY KEY, m int[])",
    )


def problems(flow: Flow) -> list[str]:
    with pytest.raises(PreflightError) as refused:
        preflight.run(flow.pipeline)
    return refused.value.problems


def test_a_depth_that_was_lost_is_found_before_anything_is_created_and_both_ways_out_work(make_flow: MakeFlow) -> None:
    flow = make_flow(tables="b, empty")
    (said,) = problems(flow)
    assert "Column 'm' of public.b is declared with 1 dimension, and holds arrays of 2 (CREATE TABLE AS" in said
    before = flow.execute("SELECT pg_relation_filenode('b')")
    flow.execute(said.split("rewrites nothing: ")[1].split(";")[0])
    assert flow.execute("SELECT pg_relation_filenode('b')") == before
    preflight.run(flow.pipeline)
    flow.execute("INSERT INTO b VALUES (3, '{7}', NULL)", "INSERT INTO empty VALUES (1, '[0:0]={7}')")
    one, other = problems(flow)
    assert "declared with 2 dimensions, and holds arrays of 1 or 2 (" in one
    assert "holds arrays of 1, and lower bounds other than 1 (" in other
    for each in (one, other):
        assert each.endswith("Publish arrays as PostgreSQL's text, which holds every value (arrays = text).")
    flow.change(arrays="text")
    flow.create()
    flow.snapshot()
    assert [m.value["m"] for m in flow.read("b")] == ["{{1,2},{3,4}}", "{}", "{7}"]
    assert [m.value["m"] for m in flow.read("empty")] == ["[0:0]={7}"]


def test_each_column_is_looked_at_with_its_modifier(make_flow: MakeFlow) -> None:
    (said,) = problems(make_flow(tables="a"))
    assert 'ALTER TABLE "public"."a" ALTER "d" TYPE character varying(7)[][];' in said


def test_the_statement_that_declares_it_quotes_names(make_flow: MakeFlow) -> None:
    flow = make_flow(tables="Order lines")
    flow.execute('CREATE TABLE "Order lines" AS SELECT id, m AS "user" FROM a')
    flow.execute('ALTER TABLE "Order lines" ADD PRIMARY KEY (id)')
    (said,) = problems(flow)
    flow.execute(said.split("rewrites nothing: ")[1].split(";")[0])
    preflight.run(flow.pipeline)


def test_under_log_it_is_a_warning_and_what_is_published_already_is_not_looked_at(
    make_flow: MakeFlow, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.WARNING)
    flow = make_flow(tables="b", on_error="log")
    flow.create()
    assert "Column 'm' of public.b is declared with 1 dimension" in caplog.text
    flow.change(on_error="exit")
    preflight.run(flow.pipeline)


def test_a_table_that_is_locked_is_not_waited_for(make_flow: MakeFlow) -> None:
    flow = make_flow(tables="empty")
    with psycopg.connect(flow.dsn) as locking:
        locking.execute("LOCK TABLE empty IN ACCESS EXCLUSIVE MODE")
        preflight.run(flow.pipeline)


def test_a_depth_that_is_declared_while_the_stream_runs_holds_for_the_next_row(make_flow: MakeFlow) -> None:
    """PostgreSQL's stream has no word of it."""
    flow = make_flow(tables="empty")
    flow.create()
    flow.snapshot()
    with flow.streaming() as errors:
        flow.published("INSERT INTO empty VALUES (1, '{1}')")
        flow.execute("ALTER TABLE empty ALTER m TYPE int[][]")
        flow.published("INSERT INTO empty VALUES (2, '{{1,2}}')")
    assert errors == []
    assert [m.value["m"] for m in flow.read("empty")] == [[1], [[1, 2]]]
