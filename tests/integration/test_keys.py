"""Keys that the options of tables choose: other columns than the primary key."""

from __future__ import annotations

from typing import Any

import pytest

from airflow_bottledwater.errors import PreflightError
from airflow_bottledwater.jobs import status
from airflow_bottledwater.provision import redrive
from airflow_bottledwater.state.verification import Verification
from airflow_bottledwater.verify import driver
from tests.support.topics import Flow, MakeFlow, assert_exactly_once_in_order, limit_topic
from tests.support.waiting import until

_LARGE = "(SELECT string_agg(md5(i::text || clock_timestamp()), '') FROM generate_series(1, 300) i)"
_OPTIONS = {"orders": {"key": ["number", "region"]}, "parted": {"key": "code,region"}, "plain": {"key": "code"}}
_ONLY = {name: _OPTIONS[name] for name in ("orders", "plain")}
_CHANGES = (
    "UPDATE {} SET note = 'new' WHERE id = 1",
    "UPDATE {} SET id = id + 1000 WHERE id = 2",
    "UPDATE {} SET number = 333, code = 'c333' WHERE id = 3",
    "DELETE FROM {} WHERE id = 4",
    "INSERT INTO {} VALUES (3003, 'EU', 3, 'c3', 'another', NULL)",
)


@pytest.fixture
def flow_statements() -> tuple[str, ...]:
    columns = "(id int, region text NOT NULL, number int NOT NULL, code text NOT NULL, note text, large text"
    return (
        f"CREATE TABLE orders {columns}, PRIMARY KEY (id), UNIQUE (region, number), UNIQUE (code))",
        f"CREATE TABLE parted {columns}, UNIQUE (region, code)) PARTITION BY LIST (region)",
        "CREATE TABLE parted_eu PARTITION OF parted FOR VALUES IN ('EU')",
        f"CREATE TABLE plain {columns}, UNIQUE (code))",
        *(f"ALTER TABLE {name} REPLICA IDENTITY FULL" for name in ("orders", "parted", "parted_eu", "plain")),
        *(
            f"INSERT INTO {name} SELECT g, 'EU', g, 'c' || g, 'old', {_LARGE} FROM generate_series(1, 200) g"
            for name in _OPTIONS
        ),
    )


@pytest.fixture
def flow_settings() -> dict[str, Any]:
    return {"tables": tuple(_OPTIONS), "partitioned_tables": "root", "table_options": _OPTIONS}


def _verified(flow: Flow) -> Verification:
    """Verify beside a stream: all topics are equal to their tables."""
    with flow.streaming() as errors:
        flow.streams()
        found = driver.run(flow.pipeline, driver.in_threads(flow.pipeline))
    assert not errors, errors
    assert {each.verdict for each in found.tables} == {"equal"}, found
    return found


def _problems(flow: Flow) -> str:
    job = status.report(flow.pipeline).job
    return " ".join(map(str, job.problems)) if job else ""


@pytest.mark.parametrize("format", ["json", pytest.param("avro", marks=pytest.mark.long)])
def test_tables_have_the_keys_of_their_options(
    make_flow: MakeFlow, request: pytest.FixtureRequest, format: str
) -> None:
    flow = make_flow(request.getfixturevalue("registry") if format == "avro" else None)
    flow.create()
    flow.snapshot()
    for table in _OPTIONS:
        flow.execute(*(change.format(table) for change in _CHANGES))
    flow.stream()
    flow.execute("DELETE FROM plain WHERE id > 190", "UPDATE orders SET code = 'x' WHERE id = 9")
    asked = [flow.ask("orders", by_key=True), flow.ask("parted", "plain", sweep=True)]
    flow.stream()
    assert [flow.reported(each).state for each in asked] == ["finished", "finished"]
    _verified(flow)
    if format == "avro":
        return
    streamed = [each for each in flow.read("orders") if each.pos]
    # an update of the primary key is one of a row; only one of the key is a tombstone and a row
    assert [(each.key, each.op, each.value and each.value["id"]) for each in streamed][:6] == [
        ({"number": 1, "region": "EU"}, "u", 1),
        ({"number": 2, "region": "EU"}, "u", 1002),
        ({"number": 3, "region": "EU"}, "d", None),
        ({"number": 333, "region": "EU"}, "u", 3),
        ({"number": 4, "region": "EU"}, "d", None),
        ({"number": 3, "region": "EU"}, "c", 3003),
    ]
    assert all(each.value is None or each.key["code"] == each.value["code"] for each in flow.read("plain"))
    for table in _OPTIONS:
        assert_exactly_once_in_order(flow.read(table))


def test_a_key_that_cannot_be_is_found_before_anything_is_made(make_flow: MakeFlow) -> None:
    flow = make_flow(allow_unkeyed=True)
    flow.execute(
        "ALTER TABLE parted ALTER region DROP NOT NULL",
        "CREATE UNIQUE INDEX ON plain (number) WHERE id > 0",
        "CREATE UNIQUE INDEX ON plain (region, (id + 1))",
        "ALTER TABLE plain ADD UNIQUE (id, code) DEFERRABLE",
        "ALTER TABLE orders REPLICA IDENTITY DEFAULT",
    )
    found = {}
    for key in (["number"], ["region"], ["id", "code"], ["no"]):
        flow.change(table_options={**_OPTIONS, "plain": {"key": key}})
        with pytest.raises(PreflightError) as raised:
            flow.create()
        found[key[0]] = [each for each in raised.value.problems if "public.plain" in each]
        text = str(raised.value)
        assert "public.orders cannot have the key" in text and "USING INDEX" in text
        assert "column 'region' of the key" in text and "SET NOT NULL" in text
    assert all("no unique index over just the columns" in found[key][0] for key in ("number", "region"))
    assert "column 'id' of the key" in found["id"][0] and "a column 'no'" in found["no"][0]
    flow.execute("ALTER TABLE plain ALTER id SET NOT NULL")
    flow.change(table_options={"plain": {"key": ["id", "code"]}}, tables=("plain",))
    with pytest.raises(PreflightError, match="neither DEFERRABLE nor"):
        flow.create()
    flow.change(table_options={"orders": {"key": "id"}}, tables=("orders",))
    flow.create()


@pytest.mark.long
def test_a_table_gets_another_key_by_its_options(make_flow: MakeFlow) -> None:
    flow = make_flow(tables=("orders",), table_options={})
    flow.create()
    flow.snapshot()
    flow.execute("UPDATE orders SET note = 'before' WHERE id = 5")
    flow.stream()
    flow.execute("UPDATE orders SET note = 'between' WHERE id = 6", "DELETE FROM orders WHERE id = 7")
    flow.change(table_options={"orders": {"key": "code"}})
    flow.stream()
    _verified(flow)
    last = {str(each.key): each.value for each in flow.read("orders")}
    assert last["{'id': 5}"] is None and last["{'code': 'c5'}"]["note"] == "before"
    assert "{'code': 'c7'}" not in last or last["{'code': 'c7'}"] is None


@pytest.mark.long
def test_a_table_whose_key_is_not_one_any_more_is_set_aside(make_flow: MakeFlow) -> None:
    flow = make_flow(tables=("orders", "plain"), table_options=_ONLY)
    flow.create()
    flow.snapshot()
    with flow.streaming() as errors:
        flow.streams()
        flow.execute(
            "ALTER TABLE orders REPLICA IDENTITY DEFAULT",
            "UPDATE orders SET number = 777 WHERE id = 7",
            "DELETE FROM orders WHERE id = 8",
            "UPDATE plain SET note = 'goes on' WHERE id = 7",
        )
        until(lambda: "replica identity is not the key" in _problems(flow), "it is told", failed=errors)
        until(
            lambda: any(each.value and each.value["note"] == "goes on" for each in flow.read("plain")), "others go on"
        )
        assert not [each for each in flow.read("orders") if each.pos]
        flow.execute("ALTER TABLE orders REPLICA IDENTITY FULL")
        until(lambda: not _problems(flow), "nothing is wrong any more", failed=errors)
    flow.stream()
    _verified(flow)
    keys = {each.key["number"]: each.value for each in flow.read("orders")}
    assert keys[7] is None and keys[8] is None and keys[777]["id"] == 7


@pytest.mark.long
def test_dead_letters_are_published_again_by_the_key_of_the_options(make_flow: MakeFlow) -> None:
    flow = make_flow(
        tables=("orders",),
        table_options={"orders": _OPTIONS["orders"]},
        on_error="log",
        topic_config={"max.message.bytes": "20000"},
    )
    flow.create()
    flow.snapshot()
    flow.execute("UPDATE orders SET note = repeat('x', 30000) WHERE id = 5")
    flow.stream()
    (letter,) = flow.dead_letters()
    assert letter.value["key"] == {"number": "5", "region": "EU"}, letter
    limit_topic(flow, flow.topic("orders"), 100_000)
    assert redrive.redrive(flow.pipeline).published == 1
    _verified(flow)


def test_a_table_that_was_taken_in_without_a_key_gets_none(make_flow: MakeFlow) -> None:
    flow = make_flow(tables=("plain",), table_options={}, allow_unkeyed=True)
    flow.create()
    flow.snapshot()
    flow.change(table_options={"plain": {"key": "code"}})
    with pytest.raises(PreflightError, match="was taken in without a key"):
        flow.stream()
