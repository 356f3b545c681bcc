"""The option ``where``: a table's row filter is the publication's, and holds in snapshots, stream, live snapshots,
sweeps, look-ups, re-drives and the verification; and the application's statements never fail for it."""

from __future__ import annotations

import time
from contextlib import suppress
from typing import Any

import psycopg
import pytest
from psycopg.conninfo import make_conninfo

from airflow_bottledwater import Table
from airflow_bottledwater.encoding.mapping import TableMapping
from airflow_bottledwater.errors import Outage, PreflightError, Refused, SettingError
from airflow_bottledwater.postgres import catalog, large_rows, row_filter
from airflow_bottledwater.postgres.connect import connect
from airflow_bottledwater.provision import pausing, preflight, redrive
from airflow_bottledwater.state.verification import Verification
from airflow_bottledwater.stream.start import begin
from airflow_bottledwater.verify import driver
from tests.support.tables import look_often, problems
from tests.support.topics import Flow, MakeFlow, limit_topic
from tests.support.waiting import until

#: too large for its page, so that an update which leaves it alone does not send it
_LARGE = "(SELECT string_agg(md5(i::text), '') FROM generate_series(1, 400) i)"


@pytest.fixture
def flow_statements() -> tuple[str, ...]:
    return (
        "CREATE TABLE orders (id int PRIMARY KEY, region text NOT NULL, note text)",
        "ALTER TABLE orders REPLICA IDENTITY FULL",
        "CREATE TABLE events (id int, kind text NOT NULL, note text, UNIQUE (kind, id))",
        "ALTER TABLE events ALTER id SET NOT NULL, ALTER kind SET NOT NULL",
        "ALTER TABLE events REPLICA IDENTITY USING INDEX events_kind_id_key",
        "CREATE TABLE items (id int PRIMARY KEY, note text)",
        "ALTER TABLE items ALTER note SET STORAGE EXTERNAL",
    )


_OPTIONS = {
    "orders": {"where": "region = 'EU'"},
    "events": {"where": "kind LIKE 'a%' OR kind = 'it''s'"},
    "items": {"where": "id < 100"},
}


def made_of(*tables: str) -> dict[str, Any]:
    """The settings of a pipeline of some tables."""
    return {"tables": ",".join(tables), "table_options": {table: _OPTIONS[table] for table in tables}}


def topic(flow: Flow, table: str, key: str = "id") -> dict[Any, Any]:
    """The topic as a consumer has it in the end: the values that keys have."""
    last = {message.key[key]: message.value for message in flow.read(table)}
    return {each: value for each, value in last.items() if value is not None}


def verified(flow: Flow) -> Verification:
    """Verify beside a stream, which must find no difference."""
    found: list[Verification] = []

    def verify() -> bool:
        # until a live snapshot has read what is to be read again
        with suppress(Outage):
            found.append(driver.run(flow.pipeline, driver.in_threads(flow.pipeline)))
        return bool(found)

    with flow.streaming() as errors:
        flow.streams()
        until(verify, "it is verified", pause=0.3, failed=errors)
    assert not errors, errors
    assert {each.verdict for each in found[0].tables} == {"equal"}, found
    return found[0]


@pytest.mark.some(1)
@pytest.mark.parametrize("format", ["json", "avro"])
def test_rows_come_and_go_with_the_filter(make_flow: MakeFlow, request: pytest.FixtureRequest, format: str) -> None:
    flow = make_flow(request.getfixturevalue("registry") if format == "avro" else None, **made_of(*_OPTIONS))
    flow.execute(
        "INSERT INTO orders SELECT i, CASE WHEN i % 2 = 0 THEN 'EU' ELSE 'US' END FROM generate_series(1, 10) i",
        "INSERT INTO events SELECT i, CASE WHEN i % 2 = 0 THEN 'a' ELSE 'b' END FROM generate_series(1, 10) i",
        "INSERT INTO items SELECT i * 20, 'x' FROM generate_series(1, 10) i",
    )
    flow.create()
    assert flow.snapshot().rows == 5 + 5 + 4
    flow.execute(
        "INSERT INTO orders VALUES (11, 'US'), (12, 'EU'), (13, 'EU')",
        "UPDATE orders SET region = 'US' WHERE id IN (2, 12)",
        "UPDATE orders SET region = 'EU' WHERE id IN (1, 11)",
        "UPDATE orders SET note = 'n' WHERE id IN (3, 4)",
        "UPDATE orders SET id = id + 100 WHERE id IN (4, 5)",
        "UPDATE orders SET id = id + 100, region = 'US' WHERE id = 6",
        "UPDATE orders SET id = id + 100, region = 'EU' WHERE id = 7",
        "DELETE FROM orders WHERE id IN (8, 9)",
        "UPDATE events SET kind = 'b' WHERE id = 2",
        "UPDATE events SET kind = 'it''s' WHERE id = 1",
        "UPDATE events SET note = 'n' WHERE id IN (3, 4)",
        "DELETE FROM events WHERE id IN (5, 6)",
        "UPDATE items SET id = id + 200 WHERE id = 20",
        "UPDATE items SET id = id - 100 WHERE id = 100",
    )
    flow.stream()
    if format == "json":
        # 4 keeps its note although it moves
        assert {key: value["note"] for key, value in topic(flow, "orders").items()} == {
            1: None, 10: None, 11: None, 13: None, 104: "n", 107: None,
        }  # fmt: skip
        assert sorted(topic(flow, "items")) == [0, 40, 60, 80]
        assert {(m.op, m.key["id"]) for m in flow.read("orders") if m.op != "r"} == {
            ("c", 12), ("c", 13), ("d", 2), ("d", 12), ("c", 1), ("c", 11), ("u", 4), ("u", 104), ("d", 6), ("c", 107),
            ("d", 8),
        } | {("d", 4)}  # fmt: skip
    found = verified(flow)
    assert {each.table: each.rows for each in found.tables} == {
        "public.orders": 6, "public.events": 4, "public.items": 4,
    }  # fmt: skip


@pytest.mark.long
def test_a_large_value_that_is_unchanged_enters_the_filter(make_flow: MakeFlow) -> None:
    flow = make_flow(**made_of("items"))
    flow.execute(f"INSERT INTO items SELECT i, i || {_LARGE} FROM generate_series(1, 210) i")
    flow.create()
    flow.snapshot()
    flow.execute("UPDATE items SET id = id - 1000 WHERE id = 200")
    flow.execute("UPDATE items SET id = id - 1000 WHERE id = 201", "DELETE FROM items WHERE id = -799")
    flow.execute("UPDATE items SET id = id - 1000 WHERE id = 202", "UPDATE items SET id = 302 WHERE id = -798")
    flow.transaction(
        "UPDATE items SET id = 1000 WHERE id = 1", "UPDATE items SET id = 1 WHERE id = 203",
        "UPDATE items SET id = 2000 WHERE id = 1", "UPDATE items SET id = 1 WHERE id = 204",
    )  # fmt: skip
    # inserts of which the rows are gone: nothing is invented
    flow.transaction("INSERT INTO items VALUES (50000, 'other')", "UPDATE items SET id = 0 WHERE id = 205")
    flow.stream()
    found = topic(flow, "items")
    large = flow.execute(f"SELECT {_LARGE}")[0][0]
    assert {key: found[key]["note"] for key in (-800, 0, 1, 2)} == {
        -800: f"200{large}", 0: f"205{large}", 1: f"204{large}", 2: f"2{large}",
    }  # fmt: skip
    assert not {-799, -798} & found.keys()
    assert all(message.toast for message in flow.read("items") if message.op == "c")
    verified(flow)


@pytest.mark.long
def test_large_values_of_full_rows_enter_the_filter(make_flow: MakeFlow) -> None:
    flow = make_flow(**made_of("orders"))
    flow.execute(f"INSERT INTO orders SELECT i, 'US', i || {_LARGE} FROM generate_series(1, 4) i")
    flow.create()
    flow.snapshot()
    flow.execute("UPDATE orders SET region = 'EU' WHERE id < 3", "DELETE FROM orders WHERE id = 2")
    flow.stream()
    assert [message.op for message in flow.read("orders")] == ["c", "c", "d"]
    assert not any(message.toast for message in flow.read("orders"))
    verified(flow)


@pytest.mark.long
def test_live_snapshots_backfills_and_sweeps_see_the_rows_of_the_filter(make_flow: MakeFlow) -> None:
    flow = make_flow(**made_of("orders", "items"))
    flow.execute("INSERT INTO orders SELECT i, CASE WHEN i < 5 THEN 'EU' ELSE 'US' END FROM generate_series(1, 9) i")
    flow.create()
    flow.snapshot()
    flow.damage("orders", {"id": 7}, {"id": 7, "region": "US", "note": None})
    flow.damage("orders", {"id": 1}, None)
    asked = flow.ask("orders", where="id > 2 OR true")
    by_key = flow.ask("orders", by_key=True)
    swept = flow.ask("orders", sweep=True)
    with flow.streaming() as errors:
        until(lambda: all(flow.reported(each).state == "finished" for each in (asked, by_key, swept)), "it is read")
    assert not errors
    assert [flow.reported(each).rows for each in (asked, by_key, swept)] == [4, 4, 4]
    assert sorted(topic(flow, "orders")) == [1, 2, 3, 4]
    verified(flow)


@pytest.mark.long
def test_a_dead_letter_whose_row_has_left_the_filter_is_dropped(make_flow: MakeFlow) -> None:
    flow = make_flow(**made_of("orders"), on_error="log", topic_config={"max.message.bytes": "20000"})
    flow.execute("INSERT INTO orders SELECT i, 'EU', repeat('x', 30000) FROM generate_series(1, 3) i")
    flow.create()
    assert flow.snapshot().dead_letters == 3
    flow.execute("INSERT INTO orders VALUES (4, 'EU', repeat('x', 30000)), (5, 'US', repeat('x', 30000))")
    flow.execute("UPDATE orders SET region = 'US' WHERE id IN (1, 4)")
    flow.stream()
    assert len(flow.dead_letters()) == 4
    limit_topic(flow, flow.topic("orders"), 100_000)
    flow.change(table_options={"orders": {"where": "region = 'EU' AND id <> 2"}})
    result = redrive.redrive(flow.pipeline)
    assert (result.published, result.overtaken, result.failed) == (1, 3, 0)
    flow.stream()
    assert sorted(topic(flow, "orders")) == [3]
    verified(flow)


# ---------------------------------------------------------------------- what cannot be
@pytest.mark.parametrize(
    ("where", "texts"),
    {
        "a column that is not there": ("town = 'x'", ["town = 'x'", 'column "town" does not exist']),
        "no condition": ("region", ["must be type boolean"]),
        "a row": ("region, note", ["does not accept the row filter"]),
        "a function of a user": ("public.mine(region)", ["built-in mutable functions are not allowed"]),
        "a function that is not immutable": ("now() > '2020-01-01'", ["built-in mutable functions are not allowed"]),
        "a subquery": ("id IN (SELECT 1)", ["does not accept the row filter"]),
        "a system column": ("ctid = '(0,1)'", ["does not accept the row filter"]),
        "a type of a user": ("mood = 'glad'", ["ser-defined types are not allowed"]),
        "another table": ("public.orders.id = 1", ["does not accept the row filter"]),
    }.values(),
)
def test_a_condition_that_cannot_be_a_row_filter_is_refused(make_flow: MakeFlow, where: str, texts: list[str]) -> None:
    flow = make_flow(tables="orders", table_options={"orders": {"where": where}})
    flow.execute(
        "CREATE FUNCTION public.mine(text) RETURNS boolean IMMUTABLE LANGUAGE sql AS 'SELECT true'",
        "CREATE TYPE mood AS ENUM ('glad')",
        "ALTER TABLE orders ADD mood mood",
    )
    with pytest.raises(PreflightError) as raised:
        flow.create()
    assert len(raised.value.problems) == 1
    assert all(text in str(raised.value) for text in texts), raised.value
    assert flow.execute("SELECT FROM pg_publication") == []


@pytest.mark.parametrize(
    "where",
    [
        "true) OR (true",
        "true), TABLE ONLY public.secret WHERE (true",
        "true); DROP TABLE orders; --",
        "true -- )",
        "true /* ) */",
        "note = $$it$$",
        r"note = E'\' OR true'",
        "note = 'it",
        'region" = 1',
    ],
)
def test_what_is_not_one_expression_is_refused(where: str) -> None:
    with pytest.raises(SettingError, match="one SQL expression"):
        Table(where=where)


@pytest.mark.parametrize(
    "where", [" id > 0 ", "note = 'it''s (fine); -- ' AND \"a(\" = 1", r"note ~ '^\d+$' AND (id > 1)", "a IN (1, 2)"]
)
def test_texts_may_have_what_expressions_may_not(where: str) -> None:
    assert Table(where=where).where == where.strip()


def test_a_filter_that_the_old_rows_do_not_cover_is_refused(make_flow: MakeFlow) -> None:
    options = {"orders": {"where": "region = 'EU'"}}
    flow = make_flow(tables="orders,events", allow_unkeyed=True, table_options=options)
    flow.execute("ALTER TABLE orders REPLICA IDENTITY DEFAULT", "ALTER TABLE events REPLICA IDENTITY NOTHING")
    with pytest.raises(PreflightError) as raised:
        flow.create()
    (problem,) = raised.value.problems
    assert "uses column 'region', which is not in its replica identity (id)" in problem
    assert "UPDATE and DELETE on the table would fail" in problem and "REPLICA IDENTITY FULL" in problem
    # a table without a key sends inserts only: its filter may use any column, and no statement fails
    flow.change(table_options={"orders": {"where": "id > 5"}, "events": {"where": "note = 'yes'"}})
    flow.create()
    flow.execute(
        "INSERT INTO events SELECT i, 'k', 'no' FROM generate_series(1, 3) i",
        "UPDATE events SET note = 'yes' WHERE id = 1",
        "UPDATE orders SET region = 'x'",
    )
    assert flow.execute("SELECT tablename, rowfilter FROM pg_publication_tables ORDER BY 1") == [
        ("events", "(note = 'yes'::text)"),
        ("orders", "(id > 5)"),
    ]


def test_a_filter_of_others_has_to_be_the_same(make_flow: MakeFlow) -> None:
    flow = make_flow(tables="orders,items", create_publication=False)
    name = flow.pipeline.slot

    def published(filter: str) -> None:
        flow.execute(
            f"DROP PUBLICATION IF EXISTS {name}", f"DROP PUBLICATION IF EXISTS {name}_unkeyed",
            f"CREATE PUBLICATION {name} FOR TABLE ONLY orders{filter}, ONLY items WHERE (100 > id)",
            f"CREATE PUBLICATION {name}_unkeyed WITH (publish = 'insert, truncate')",
        )  # fmt: skip

    def problem() -> str:
        with pytest.raises(PreflightError) as raised:
            flow.create()
        (found,) = raised.value.problems
        return found

    options = {"orders": {"where": "region = 'EU'"}, "items": {"where": "100>id"}}
    flow.change(publication=name, table_options=options)
    published(" WHERE (region = 'US')")
    found = problem()
    assert "the row filter (region = 'US'::text)" in found and "where: (region = 'EU'::text)" in found, found
    published("")
    assert "no row filter for public.orders" in problem()
    flow.change(table_options={"items": options["items"]})
    published(" WHERE (region = 'EU')")
    assert "where: (region = 'EU'::text)" in problem()
    flow.change(table_options=options)
    flow.execute(f"DROP PUBLICATION {name}", f"CREATE PUBLICATION {name} FOR TABLES IN SCHEMA public")
    with pytest.raises(PreflightError, match="FOR TABLES IN SCHEMA have no filters"):
        flow.create()
    published(" WHERE (region = 'EU')")
    flow.create()


@pytest.mark.long
def test_a_role_that_may_not_make_temporary_tables_needs_none(make_flow: MakeFlow) -> None:
    flow = make_flow(tables="items")
    ((database, owner),) = flow.execute("SELECT current_database(), 'owner_' || current_database()")
    flow.execute(
        f"CREATE ROLE \"{owner}\" LOGIN REPLICATION PASSWORD 'word'",
        f'GRANT CREATE ON DATABASE "{database}" TO "{owner}"',
        f'REVOKE TEMPORARY ON DATABASE "{database}" FROM PUBLIC', f'ALTER TABLE items OWNER TO "{owner}"',
    )  # fmt: skip
    flow.change(postgres=make_conninfo(flow.dsn, user=owner, password="word"))
    try:
        flow.change(table_options={"items": {"where": "note = 'x'"}})
        with pytest.raises(PreflightError, match="not in its replica identity"):
            flow.create()
        flow.change(table_options={"items": {"where": "id > 3"}})
        flow.create()
        preflight.run(flow.pipeline)
    finally:
        flow.execute(f'REASSIGN OWNED BY "{owner}" TO CURRENT_USER', f'DROP OWNED BY "{owner}"')
        flow.execute(f"SELECT pg_drop_replication_slot('{flow.pipeline.slot}')", f'DROP ROLE "{owner}"')


# ---------------------------------------------------------------------- while it runs
@pytest.fixture
def often(monkeypatch: pytest.MonkeyPatch) -> None:
    look_often(monkeypatch)


def works(flow: Flow, statement: str) -> bool:
    """Whether PostgreSQL lets the application do this."""
    try:
        flow.execute(statement)
    except psycopg.errors.InvalidColumnReference:
        return False
    return True


def fulfilled(flow: Flow, where: str, table: str = "orders") -> list[int]:
    """The keys of the rows that fulfil a condition."""
    return [key for (key,) in flow.execute(f"SELECT id FROM {table} WHERE {where} ORDER BY id")]


@pytest.mark.usefixtures("often")
def test_a_replica_identity_that_covers_the_filter_no_more_does_not_stop_the_application(make_flow: MakeFlow) -> None:
    flow = make_flow(**made_of("orders", "items"))
    flow.execute("INSERT INTO orders SELECT i, CASE WHEN i < 5 THEN 'EU' ELSE 'US' END FROM generate_series(1, 9) i")
    flow.create()
    flow.snapshot()
    change = "UPDATE orders SET region = CASE region WHEN 'EU' THEN 'US' ELSE 'EU' END"
    with flow.streaming() as errors:
        flow.streams()
        flow.published(f"{change} WHERE id = 5")
        flow.execute("ALTER TABLE orders REPLICA IDENTITY DEFAULT")
        until(lambda: works(flow, change), "the application goes on", failed=errors)
        flow.execute("INSERT INTO orders VALUES (20, 'EU'), (21, 'US')", "DELETE FROM orders WHERE id = 6")
        said = "is not in its replica identity (id)"
        until(lambda: "public.orders" in problems(flow), "it is told", failed=errors)
        until(lambda: said in problems(flow)["public.orders"].reason, "with the reason", failed=errors)
        assert "REPLICA IDENTITY FULL" in problems(flow)["public.orders"].remedy
        flow.published("INSERT INTO items VALUES (1, 'the others go on')")
        flow.execute("ALTER TABLE orders REPLICA IDENTITY FULL")
        until(lambda: not problems(flow), "nothing is wrong any more", failed=errors)
        flow.execute(f"{change} WHERE id IN (1, 2, 7)")
        expected = fulfilled(flow, "region = 'EU'")
        until(lambda: sorted(topic(flow, "orders")) == expected, "its rows are read", failed=errors)
    assert not errors and expected
    verified(flow)


@pytest.mark.long
@pytest.mark.parametrize("format", ["json", "avro"])
def test_another_filter_is_taken_up_with_all_rows(
    make_flow: MakeFlow, request: pytest.FixtureRequest, format: str
) -> None:
    flow = make_flow(request.getfixturevalue("registry") if format == "avro" else None, **made_of("orders"))
    flow.execute(
        f"INSERT INTO orders SELECT i, (ARRAY['EU', 'US', 'AU'])[i % 3 + 1], {_LARGE} FROM generate_series(1, 30) i"
    )
    flow.create()
    flow.snapshot()
    for turn, where in enumerate(
        ("region IN ('US', 'AU')", "", "region = 'AU' AND id % 2 = 0", "region = 'AU' AND id%2 = 0")
    ):
        # under the filter of before: they are streamed by the job that has another one
        flow.execute(
            "UPDATE orders SET region = 'US' WHERE id % 5 = 0 AND region = 'EU'",
            "UPDATE orders SET region = 'EU' WHERE id % 5 = 1 AND region = 'AU'",
            "DELETE FROM orders WHERE id % 30 = 7",
            f"INSERT INTO orders VALUES ({100 + turn}, 'AU'), ({200 + turn}, 'EU')",
        )
        flow.change(table_options={"orders": {"where": where}} if where else {})
        with flow.streaming() as errors:
            flow.streams()
            flow.execute(
                "UPDATE orders SET region = 'AU' WHERE id % 7 = 2",
                "UPDATE orders SET id = id + 1000 WHERE id % 11 = 0 AND id < 900",
            )
            if format == "json":
                expected = fulfilled(flow, where or "true")
                until(lambda e=expected: sorted(topic(flow, "orders")) == e, f"the rows of {where!r}", failed=errors)
        assert not errors
        verified(flow)
    if format == "json":
        # the last one means the same: nothing was published for it, and the publication is what it was
        assert flow.execute("SELECT rowfilter FROM pg_publication_tables") == [
            ("((region = 'AU'::text) AND ((id % 2) = 0))",)
        ]


@pytest.mark.long
def test_another_filter_of_a_table_without_a_key_is_refused(make_flow: MakeFlow) -> None:
    flow = make_flow(tables="plain", allow_unkeyed=True, table_options={"plain": {"where": "n > 0"}})
    flow.execute("CREATE TABLE plain (n int)", "INSERT INTO plain VALUES (0), (1), (1)")
    flow.create()
    assert flow.snapshot().rows == 2
    flow.execute("INSERT INTO plain VALUES (-1), (2)")
    flow.stream()
    assert sorted(message.value["n"] for message in flow.read("plain")) == [1, 1, 2]
    verified(flow)
    flow.change(table_options={})
    with pytest.raises(PreflightError, match="cannot be changed from n > 0 to none: the table has no key"):
        flow.stream()


@pytest.mark.parametrize("where", ["name = 'x'", "region = 'EU' OR ctid = '(0,1)'"])
def test_another_filter_that_cannot_be_is_refused_at_the_start(make_flow: MakeFlow, where: str) -> None:
    flow = make_flow(**made_of("orders"))
    flow.create()
    flow.snapshot()
    flow.change(table_options={"orders": {"where": where}})
    with pytest.raises(PreflightError, match="does not accept the row filter"):
        flow.stream()


#: what lets the rows through that the filter of orders hides, and what is left to a person then
_UNFILTERED = {
    "it has no filter": ('ALTER PUBLICATION "{}" SET TABLE orders', ""),
    "it has another filter": ("ALTER PUBLICATION \"{}\" SET TABLE ONLY orders WHERE (region <> 'EU')", ""),
    "so has the other publication": ('ALTER PUBLICATION "{}_unkeyed" ADD TABLE orders', ""),
    "its schema is published": ('ALTER PUBLICATION "{}" ADD TABLES IN SCHEMA public', "DROP TABLES IN SCHEMA"),
}
unfiltered = pytest.mark.parametrize(("statement", "mend"), _UNFILTERED.values(), ids=_UNFILTERED)


def begun(flow: Flow) -> None:
    """A pipeline of orders, of which nobody ever sees the rows of the US from id 20 on."""
    flow.execute("INSERT INTO orders SELECT i, CASE WHEN i < 5 THEN 'EU' ELSE 'US' END FROM generate_series(1, 9) i")
    flow.create()
    flow.snapshot()
    flow.stream()


def mended(flow: Flow, mend: str) -> None:
    """A person does what the problem says."""
    told = problems(flow)["public.orders"]
    assert "no row filter for public.orders" in told.reason and mend in told.remedy, told
    flow.execute(told.remedy[told.remedy.index("ALTER") :].partition(";")[0])


def shown(flow: Flow) -> set[int]:
    """The keys of rows that were published, whatever became of them."""
    return {message.key["id"] for message in flow.read("orders") if message.value is not None}


@pytest.mark.some(1)
@unfiltered
def test_rows_that_a_filter_hides_stay_hidden_where_it_is_made_ineffective(
    make_flow: MakeFlow, statement: str, mend: str
) -> None:
    flow = make_flow(**made_of("orders"))
    begun(flow)
    flow.execute(statement.format(flow.pipeline.publication_name))
    flow.execute("INSERT INTO orders VALUES (20, 'US'), (10, 'EU')", "UPDATE orders SET region = 'US' WHERE id = 1")
    flow.stream()
    if mend:
        flow.execute("INSERT INTO orders VALUES (21, 'US')", "DELETE FROM orders WHERE id = 2")
        flow.stream()
        mended(flow, mend)
        flow.execute("INSERT INTO orders VALUES (22, 'US')")
        flow.stream()
    assert sorted(topic(flow, "orders")) == fulfilled(flow, "region = 'EU'")
    assert shown(flow) == {1, 2, 3, 4, 10} and not problems(flow)
    flow.execute("INSERT INTO orders VALUES (23, 'US')")
    verified(flow)
    assert 23 not in shown(flow)


@pytest.mark.long
@pytest.mark.usefixtures("often")
@unfiltered
def test_a_filter_that_is_made_ineffective_while_the_stream_runs_comes_back(
    make_flow: MakeFlow, statement: str, mend: str
) -> None:
    flow = make_flow(**made_of("orders"))
    begun(flow)
    with flow.streaming() as errors:
        flow.streams()
        flow.execute(statement.format(flow.pipeline.publication_name), "UPDATE orders SET note = 'x'")
        if mend:
            until(lambda: "public.orders" in problems(flow), "it is told", failed=errors)
            time.sleep(1)  # until it is held, it may have been sent
            flow.execute("INSERT INTO orders VALUES (20, 'US')")
            mended(flow, mend)
        has = "SELECT DISTINCT rowfilter FROM pg_publication_tables"
        until(lambda: flow.execute(has) == [("(region = 'EU'::text)",)], "the filter is back", failed=errors)
        flow.execute("INSERT INTO orders VALUES (21, 'US')", "UPDATE orders SET region = 'US' WHERE id = 1")
        until(lambda: sorted(topic(flow, "orders")) == [2, 3, 4], "the rows of the filter", failed=errors)
    assert not errors and not {20, 21} & shown(flow)
    verified(flow)


@pytest.mark.long
def test_what_hides_rows_does_not_end_a_pause(make_flow: MakeFlow) -> None:
    flow = make_flow(**made_of("orders"))
    begun(flow)
    flow.execute(_UNFILTERED["it has no filter"][0].format(flow.pipeline.publication_name))
    pausing.ask(flow.pipeline, ["orders"], paused=True)
    flow.stream()
    flow.execute("INSERT INTO orders VALUES (20, 'US'), (10, 'EU')")
    flow.stream()
    assert "resume-table" in problems(flow)["public.orders"].remedy and shown(flow) == {1, 2, 3, 4}
    pausing.ask(flow.pipeline, ["orders"], paused=False)
    flow.stream()
    assert sorted(topic(flow, "orders")) == [1, 2, 3, 4, 10] and 20 not in shown(flow)


@pytest.mark.long
@pytest.mark.usefixtures("often")
def test_a_partitioned_table_has_the_filter_of_its_root(make_flow: MakeFlow) -> None:
    flow = make_flow(tables="parted", table_options={"parted": {"where": "id % 2 = 0"}})
    flow.execute(
        "CREATE TABLE parted (id int PRIMARY KEY, note text) PARTITION BY RANGE (id)",
        "CREATE TABLE parted_1 (note text, gone int, id int NOT NULL)",
        "ALTER TABLE parted_1 DROP gone",
        "ALTER TABLE parted ATTACH PARTITION parted_1 FOR VALUES FROM (0) TO (100)",
        "CREATE TABLE parted_2 PARTITION OF parted FOR VALUES FROM (100) TO (200)",
        "INSERT INTO parted SELECT i * 7, 'x' FROM generate_series(0, 20) i",
    )
    flow.create()
    flow.snapshot()
    asked = flow.ask("parted", sweep=True)
    with flow.streaming() as errors:
        until(lambda: flow.reported(asked).state == "finished", "it is read", failed=errors)
        flow.execute(
            "UPDATE parted SET id = id + 1 WHERE id IN (7, 14, 105)",
            "UPDATE parted SET id = id + 100 WHERE id IN (42, 49)",
            "CREATE TABLE parted_3 (id int PRIMARY KEY, note text)",
            "INSERT INTO parted_3 SELECT i, 'attached' FROM generate_series(200, 205) i",
            "ALTER TABLE parted ATTACH PARTITION parted_3 FOR VALUES FROM (200) TO (300)",
            "UPDATE parted SET note = 'y' WHERE id > 100",
        )
        expected = fulfilled(flow, "id % 2 = 0", "parted")
        until(lambda: sorted(topic(flow, "parted")) == expected, "the rows of the filter", failed=errors)
    assert not errors
    verified(flow)


@pytest.mark.long
def test_a_new_name_does_not_bring_the_rows_that_the_old_one_hides(make_flow: MakeFlow) -> None:
    flow = make_flow(**made_of("orders"))
    flow.create()
    flow.snapshot()
    flow.execute("ALTER TABLE orders RENAME TO bestellungen", "INSERT INTO bestellungen VALUES (1, 'US'), (2, 'EU')")
    with flow.streaming() as errors:
        until(lambda: problems(flow) or errors, "it is told")
        assert "they hide less of its new name" in str(problems(flow)), errors
    assert not [message for message in flow.read("orders") if message.key["id"] == 1]


@pytest.mark.long
@pytest.mark.usefixtures("often")
def test_a_partition_whose_replica_identity_does_not_cover_the_filter_does_not_stop_the_application(
    make_flow: MakeFlow,
) -> None:
    flow = make_flow(tables="parted", table_options={"parted": {"where": "region = 'EU'"}})
    flow.execute(
        "CREATE TABLE parted (id int, region text, n int NOT NULL, PRIMARY KEY (id, region)) PARTITION BY RANGE (id)",
        "CREATE TABLE parted_1 PARTITION OF parted FOR VALUES FROM (0) TO (100)",
        "INSERT INTO parted SELECT i, (ARRAY['EU', 'US'])[i % 2 + 1], i FROM generate_series(1, 9) i",
    )
    flow.create()
    flow.snapshot()
    change = "UPDATE parted SET n = -n"
    with flow.streaming() as errors:
        flow.streams()
        flow.execute(
            "ALTER TABLE parted_1 ADD UNIQUE (n)",
            "ALTER TABLE parted_1 REPLICA IDENTITY USING INDEX parted_1_n_key",
        )
        assert not works(flow, change)
        until(lambda: works(flow, change), "the application goes on", failed=errors)
        until(lambda: "public.parted" in problems(flow), "it is told", failed=errors)
        flow.execute("ALTER TABLE parted_1 REPLICA IDENTITY DEFAULT")
        until(lambda: not problems(flow), "nothing is wrong any more", failed=errors)
        assert works(flow, change)
    assert not errors
    verified(flow)


@pytest.mark.long
def test_a_snapshot_reads_by_the_filter_with_which_its_slot_was_made(make_flow: MakeFlow) -> None:
    flow = make_flow(**made_of("orders"))
    flow.execute("INSERT INTO orders SELECT i, (ARRAY['EU', 'US'])[i % 2 + 1] FROM generate_series(1, 9) i")
    flow.create()
    flow.change(table_options={"orders": {"where": "region = 'US'"}})
    assert flow.snapshot().rows == 4
    flow.execute("UPDATE orders SET region = 'US' WHERE id = 2", "UPDATE orders SET region = 'EU' WHERE id = 1")
    verified(flow)
    assert sorted(topic(flow, "orders")) == [2, 3, 5, 7, 9]


@pytest.mark.long
def test_only_rows_of_the_filter_are_too_large(make_flow: MakeFlow) -> None:
    flow = make_flow(**made_of("orders"))
    flow.execute(
        "INSERT INTO orders SELECT i, (ARRAY['EU', 'US'])[i], repeat('x', 1000 * i) FROM generate_series(1, 2) i"
    )
    with connect(flow.dsn) as connection:
        ((oid,),) = connection.execute("SELECT 'public.orders'::regclass::oid").fetchall()
        (table,) = catalog.load(connection, [oid], TableMapping.of(flow.pipeline))
        found = large_rows.large_rows(connection, table, at_least=100)
    assert [row.key for row in found] == [{"id": "1"}]


def test_a_server_without_row_filters_is_told(make_flow: MakeFlow, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(row_filter, "SINCE", 10**6)
    flow = make_flow(**made_of("orders"))
    with pytest.raises(PreflightError, match=r"has none: version 15 is the first. Take it out, or upgrade the server"):
        flow.create()


@pytest.mark.long
@pytest.mark.usefixtures("often")
def test_the_filter_of_others_changes_with_the_option(make_flow: MakeFlow) -> None:
    flow = make_flow(**made_of("orders"), create_publication=False)
    flow.execute("INSERT INTO orders SELECT i, (ARRAY['EU', 'US'])[i % 2 + 1] FROM generate_series(1, 9) i")
    with pytest.raises(PreflightError) as raised:
        flow.create()
    # what the message says
    for statement in str(raised.value).partition("run: ")[2].split("; "):
        flow.execute(statement.partition(" If")[0])
    flow.create()
    flow.snapshot()
    name = flow.pipeline.publication_name
    with flow.streaming() as errors:
        flow.streams()
        flow.execute(f"ALTER PUBLICATION {name} SET TABLE ONLY orders WHERE (region = 'US')")
        until(lambda: "public.orders" in problems(flow), "it is told", failed=errors)
        said = problems(flow)["public.orders"]
        assert "the row filter (region = 'US'::text)" in said.reason + said.remedy, said
        flow.execute("UPDATE orders SET note = 'x'")
    assert not errors
    flow.change(table_options={"orders": {"where": "region IN ('US', 'CA')"}})
    with pytest.raises(PreflightError, match="have where"):
        flow.stream()
    flow.change(table_options={"orders": {"where": "region='US'"}})
    flow.stream()
    verified(flow)
    assert sorted(topic(flow, "orders")) == [1, 3, 5, 7, 9]


@pytest.mark.long
def test_a_table_with_another_filter_is_not_verified_before_it_is_read(make_flow: MakeFlow) -> None:
    flow = make_flow(**made_of("orders"))
    flow.execute("INSERT INTO orders SELECT i, (ARRAY['EU', 'US'])[i % 2 + 1] FROM generate_series(1, 9) i")
    flow.create()
    flow.snapshot()
    flow.stream()
    flow.change(table_options={})
    with pytest.raises(Refused, match=r"not started with table_options = {}: at its last start .*region = 'EU'"):
        driver.run(flow.pipeline, driver.in_threads(flow.pipeline))
    begin(flow.pipeline)
    with pytest.raises(Outage, match="or row filter"):
        driver.run(flow.pipeline, driver.in_threads(flow.pipeline))
    # one that the settings do not name any more is streamed with its filter for as long as the slot exists
    flow.change(tables="items")
    flow.create()
    flow.snapshot()
    assert {each.table: each.rows for each in verified(flow).tables} == {"public.orders": 4, "public.items": 0}


@pytest.mark.long
def test_a_column_of_the_filter_that_gets_another_name_goes_on_filtering(make_flow: MakeFlow) -> None:
    flow = make_flow(**made_of("orders"))
    flow.execute("INSERT INTO orders SELECT i, (ARRAY['EU', 'US'])[i % 2 + 1] FROM generate_series(1, 9) i")
    flow.create()
    flow.snapshot()
    flow.execute(
        "ALTER TABLE orders RENAME region TO zone",
        "UPDATE orders SET zone = 'US' WHERE id = 2",
        "UPDATE orders SET zone = 'EU' WHERE id = 1",
    )
    flow.stream()
    assert sorted(topic(flow, "orders")) == [1, 4, 6, 8]
    with pytest.raises(PreflightError, match='column "region" does not exist'):
        preflight.run(flow.pipeline)
    flow.change(table_options={"orders": {"where": "zone = 'EU'"}})
    verified(flow)
