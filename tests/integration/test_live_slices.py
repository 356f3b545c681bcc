"""Slices whose rows an index finds: only these rows are read, and they are the same ones."""

from __future__ import annotations

import random
from typing import Any

import pytest
from psycopg import sql

from airflow_bottledwater.live import reading, slices
from airflow_bottledwater.model.relation import SourceTable
from airflow_bottledwater.postgres import catalog, copy
from airflow_bottledwater.postgres.connect import Connection, connect
from airflow_bottledwater.postgres.snapshot import copy_query
from tests.support.topics import Flow, MakeFlow
from tests.support.waiting import until

ROWS = 20_000


def _fill(connection: Connection, *, clustered: bool) -> SourceTable:
    day = "g / 200" if clustered else "(g * 7919) % 100"
    for statement in (
        "CREATE TABLE public.items (id int PRIMARY KEY, day int, name text)",
        f"INSERT INTO public.items SELECT g, {day}, repeat('x', 50) FROM generate_series(0, {ROWS - 1}) g",
        "CREATE INDEX ON public.items (day)",
        "DELETE FROM public.items WHERE id % 7 = 0",
        "UPDATE public.items SET name = 'moved' WHERE id % 11 = 0",
        "VACUUM ANALYZE public.items",
    ):
        connection.execute(statement)
    (oid,) = catalog.resolve(connection, ["items"], [], via_root=True)
    (table,) = catalog.load(connection, [oid], sizes=True)
    return table


def _chunks(connection: Connection, table: SourceTable, condition: sql.SQL, blocks: int) -> list[int]:
    """How many rows each chunk has; the rows are compared with those that PostgreSQL finds."""
    with connection.transaction():
        found = slices.find(connection, table, condition, idle=lambda: None)
        assert found is not None
        counts, ids, first = [], [], 0
        while True:
            places, last = found.take(first, blocks)
            query = copy_query(table, sql.SQL("id"), first, 0, condition, places=places.condition(connection))
            for block in copy.rows(connection, query):
                assert block.count
                ids += [int.from_bytes(bytes(block.data[i + 6 : i + 10])) for i in block.offsets[:-1].tolist()]
            counts.append(len(places.tids))
            if last is None:
                break
            assert last > first
            first = last
    rows = connection.execute(sql.SQL("SELECT id FROM public.items WHERE {}").format(condition)).fetchall()
    assert sorted(ids) == sorted(each for (each,) in rows)
    assert sum(counts) == len(ids)
    return counts


@pytest.mark.parametrize("clustered", [True, False])
def test_the_rows_are_those_that_the_condition_means(
    database: str, clustered: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    with connect(database) as connection:
        table = _fill(connection, clustered=clustered)
        for day, blocks in ((5, 1), (5, 3), (42, 1000), (-1, 3)):
            condition = sql.SQL(f"day = {day}")  # type: ignore[arg-type]
            _chunks(connection, table, condition, blocks)
        # a query has a limited number of places; the rows of one block stay together
        monkeypatch.setattr(slices, "_MOST_IN_A_QUERY", 100)
        assert max(_chunks(connection, table, sql.SQL("day BETWEEN 5 AND 7"), 1000)) <= 100


@pytest.mark.parametrize(
    ("column", "first", "last"),
    [
        ("at", "2026-03-28 23:00", "2026-03-29 21:00"),  # in UTC: the day has 23 hours
        ("at AT TIME ZONE 'Europe/Berlin'", "2026-03-28 23:00", "2026-03-29 21:00"),
        ("(at AT TIME ZONE 'Europe/Berlin')::date", "2026-03-28 23:00", "2026-03-29 21:00"),
        ("at AT TIME ZONE 'UTC'", "2026-03-29 00:00", "2026-03-29 23:00"),
    ],
)
def test_bounds_with_an_offset_fit_every_type_that_dates_a_row(
    database: str, column: str, first: str, last: str
) -> None:
    """As Pipeline.backfill_dag has them, of a day in Berlin."""
    with connect(database) as connection:
        connection.execute("SET timezone TO 'Asia/Tokyo'")
        found = connection.execute(
            f"SELECT min(at) AT TIME ZONE 'UTC', max(at) AT TIME ZONE 'UTC' FROM (SELECT at, {column} AS t FROM "
            "generate_series(timestamptz '2026-03-27 00:00Z', '2026-04-01 00:00Z', interval '1 hour') at) "
            "WHERE t >= '2026-03-29T00:00:00+01:00' AND t < '2026-03-30T00:00:00+02:00'"
        ).fetchone()  # type: ignore[call-overload]
    assert found is not None and [f"{each:%Y-%m-%d %H:%M}" for each in found] == [first, last]


def test_a_table_is_read_whole_where_that_is_faster(database: str, monkeypatch: pytest.MonkeyPatch) -> None:
    with connect(database) as connection:
        table = _fill(connection, clustered=True)

        def found(condition: str) -> bool:
            with connection.transaction():
                return slices.find(connection, table, sql.SQL(condition), idle=lambda: None) is not None  # type: ignore[arg-type]

        assert found("day = 5")
        assert not found("day > 5")
        assert not found("name LIKE '%moved'")
        monkeypatch.setattr(slices, "_MOST_ROWS", 10)
        assert not found("day = 5")


def test_partitions_that_cannot_have_such_rows_are_not_looked_at(database: str) -> None:
    with connect(database) as connection:
        for statement in (
            "CREATE TABLE public.days (id int, day int, PRIMARY KEY (id, day)) PARTITION BY LIST (day)",
            "CREATE TABLE public.days_1 PARTITION OF public.days FOR VALUES IN (1)",
            "CREATE TABLE public.days_2 PARTITION OF public.days FOR VALUES IN (2)",
            "INSERT INTO public.days SELECT g, 1 FROM generate_series(1, 5000) g",
            "ANALYZE public.days",
        ):
            connection.execute(statement)
        oids = catalog.resolve(connection, ["days"], [], via_root=False)
        found = {}
        for table in catalog.load(connection, oids, sizes=True):
            with connection.transaction():
                found[table.name] = slices.find(connection, table, sql.SQL("day = 1"), idle=lambda: None)
    assert found["days_2"] is not None and len(found["days_2"].tids) == 0
    assert found["days_1"] is None


def _in_small_chunks(make_flow: MakeFlow, monkeypatch: pytest.MonkeyPatch) -> Flow:
    """A pipeline that streams a table whose slices are everywhere in it, and are read again in many chunks."""
    flow: Flow = make_flow(tables="items")
    with connect(flow.dsn) as connection:
        _fill(connection, clustered=False)
    flow.create()
    flow.snapshot()
    flow.stream()
    monkeypatch.setattr(reading, "_FIRST_BLOCKS", 5)
    monkeypatch.setattr(reading, "_MOST_BLOCKS", 5)
    return flow


def test_a_slice_with_an_index_while_its_rows_move(make_flow: MakeFlow, monkeypatch: pytest.MonkeyPatch) -> None:
    """Rows leave the slice, join it, and move to other places between the chunks; the stream has published what the
    chunks do not show."""
    flow = _in_small_chunks(make_flow, monkeypatch)
    dice, original, steps = random.Random(1), reading.LiveReader._step, [0]

    def step(self: reading.LiveReader) -> Any:
        steps[0] += 1
        low = dice.randrange(ROWS - 2000)
        flow.execute(
            f"UPDATE items SET day = 5, name = 'in' WHERE id BETWEEN {low} AND {low + 20}",
            f"UPDATE items SET day = 6, name = 'out' WHERE day = 5 AND id BETWEEN {low + 1000} AND {low + 2000}",
            f"DELETE FROM items WHERE day = 5 AND id BETWEEN {low + 300} AND {low + 500}",
        )
        return original(self)

    monkeypatch.setattr(reading.LiveReader, "_step", step)
    request_id = flow.ask("items", where="day = 5", sweep=True)
    flow.stream()
    report = flow.reported(request_id)
    assert (report.state, report.error) == ("finished", "")
    assert steps[0] > 5 and report.rows > 20 and report.rows + report.superseded > 50
    assert {m.value["day"] for m in flow.read("items") if m.snapshot.startswith(request_id) and m.value} == {5}
    assert flow.compare("items").equal


@pytest.mark.long
def test_places_that_rows_outside_the_slice_have_got_are_left_out(
    make_flow: MakeFlow, monkeypatch: pytest.MonkeyPatch
) -> None:
    flow = _in_small_chunks(make_flow, monkeypatch)
    places = {ctid for (ctid,) in flow.execute("SELECT ctid::text FROM items WHERE day = 5")}
    original, steps = reading.LiveReader._step, [0]

    def step(self: reading.LiveReader) -> Any:
        steps[0] += 1
        if steps[0] == 2:
            flow.execute("DELETE FROM items WHERE day = 5 AND id > 5000")
            until(taken, "rows of another day take the places")
        return original(self)

    def taken() -> bool:
        """VACUUM frees nothing as long as any session of the database still sees the rows."""
        first = flow.execute("SELECT max(id) + 1 FROM items")[0][0]
        flow.execute(
            "VACUUM items",
            f"INSERT INTO items SELECT g, 6, repeat('x', 50) FROM generate_series({first}, {first + 5000}) g",
        )
        return bool(places & {ctid for (ctid,) in flow.execute(f"SELECT ctid::text FROM items WHERE id >= {first}")})

    monkeypatch.setattr(reading.LiveReader, "_step", step)
    request_id = flow.ask("items", where="day = 5")
    flow.stream()
    assert flow.reported(request_id).state == "finished"
    assert {m.value["day"] for m in flow.read("items") if m.snapshot.startswith(request_id)} == {5}
    assert flow.compare("items").equal
