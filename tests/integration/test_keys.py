"""Keys that the options of tables choose: other columns than the primary key."""

from __future__ import annotations

import hmac
import uuid
from typing import Any

import pytest

from airflow_bottledwater.encoding import hashes
from airflow_bottledwater.encoding.mapping import TableMapping
from airflow_bottledwater.errors import PreflightError, Refused
from airflow_bottledwater.local.postgres import PostgresServer
from airflow_bottledwater.pipeline.table import Table
from airflow_bottledwater.postgres import catalog, large_rows
from airflow_bottledwater.postgres.connect import connect
from airflow_bottledwater.provision import redrive
from airflow_bottledwater.provision.accept import accept
from airflow_bottledwater.state.verification import Verification
from tests.integration.test_choose import SECRET, everything
from tests.support.topics import Flow, MakeFlow, assert_exactly_once_in_order, limit_topic
from tests.support.verifying import verify_beside_a_stream
from tests.support.waiting import until

_LARGE = "(SELECT string_agg(md5(i::text || clock_timestamp()), '') FROM generate_series(1, 300) i)"
_OPTIONS = {"orders": {"key": ["number", "region"]}, "parted": {"key": "code,region"}, "plain": {"key": "code"}}
_ONLY = {name: _OPTIONS[name] for name in ("orders", "plain")}
#: keys that are published as hashes, of tables whose rows are called by something that must be nowhere
_HASHED = {
    "orders": {"mask": {"id": "hash"}},
    "parted": {"key": "region,code", "mask": {"no*": "last:3", "code": "hash", "region": "hash"}},
    "small": {"mask": {"id": "hash"}},
}
_HASH_KEY = "0123456789abcdef"
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
        "CREATE TABLE small (id text PRIMARY KEY, n int)",
        f"INSERT INTO small SELECT '{SECRET}' || g, g FROM generate_series(1, 200) g",
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
    found = verify_beside_a_stream(flow)
    assert {each.verdict for each in found.tables} == {"equal"}, found
    return found


def _problems(flow: Flow) -> str:
    job = flow.job
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


def _hash(text: str) -> str:
    return hmac.digest(_HASH_KEY.encode(), text.encode(), "sha256").hex()


@pytest.mark.parametrize("format", ["json", pytest.param("avro", marks=pytest.mark.long)])
def test_keys_are_published_as_hashes_and_their_values_are_nowhere(
    make_flow: MakeFlow, request: pytest.FixtureRequest, caplog: pytest.LogCaptureFixture, format: str
) -> None:
    caplog.set_level("DEBUG")
    flow = make_flow(
        request.getfixturevalue("registry") if format == "avro" else None,
        tables=tuple(_HASHED),
        table_options=_HASHED,
        hash_key=_HASH_KEY,
        on_error="log",
        topic_config={"max.message.bytes": "20000"},
    )
    flow.execute(f"UPDATE parted SET code = '{SECRET}' || code", f"UPDATE parted SET note = '{SECRET}abc'")
    flow.create()
    flow.snapshot()
    flow.execute(
        "UPDATE orders SET note = 'new' WHERE id = 1",
        "UPDATE orders SET id = 1002, note = 'moved' WHERE id = 2",
        "UPDATE orders SET note = repeat('x', 30000) WHERE id = 3",
        "DELETE FROM orders WHERE id = 4",
        f"UPDATE parted SET code = '{SECRET}moved' WHERE id = 2",
        f"INSERT INTO parted VALUES (300, 'EU', 1, '{SECRET}c2', 'another', NULL)",
        f"UPDATE small SET n = n + 1 WHERE id = '{SECRET}7'",
        f"DELETE FROM small WHERE id = '{SECRET}8'",
    )
    flow.stream()
    if format == "json":
        flow.damage("small", {"id": _hash("no row")}, {"id": _hash("no row"), "n": 1})
    asked, by_key = flow.ask(*_HASHED, sweep=True), flow.ask("small", by_key=True)
    flow.stream()
    report = flow.reported(asked)
    assert (report.state, report.tombstones) == ("finished", int(format == "json")), report
    assert flow.reported(by_key).state == "failed" and "published as a hash" in flow.reported(by_key).error
    # without its value in the table's hands, a row cannot be found by its key
    assert redrive.redrive(flow.pipeline).failed == 2
    letters = flow.dead_letters()
    assert {letter.value["key"]["id"] for letter in letters} == {_hash("3")}
    redrive.dismiss(flow.pipeline, ["orders"])
    flow.execute("UPDATE orders SET note = 'small again' WHERE id = 3")
    _verified(flow)
    assert SECRET.encode() not in everything(flow) and SECRET not in caplog.text
    if format == "avro":
        return
    streamed = [(m.key["id"], m.op) for m in flow.read("orders") if m.pos]
    assert streamed[:4] == [(_hash("1"), "u"), (_hash("2"), "d"), (_hash("1002"), "u"), (_hash("4"), "d")]
    assert all(m.value is None or m.value["id"] == m.key["id"] for m in flow.read("small"))
    assert {m.key["id"] for m in flow.read("small")} == {
        _hash("no row"),
        *(_hash(f"{SECRET}{i}") for i in range(1, 201)),
    }
    for table in _HASHED:
        assert_exactly_once_in_order(flow.read(table))


@pytest.mark.long
def test_a_value_that_cannot_be_looked_up_by_a_hash_is_a_record_error(make_flow: MakeFlow) -> None:
    options = {"orders": _HASHED["orders"]}
    flow = make_flow(tables=("orders",), table_options=options, hash_key=_HASH_KEY, on_error="log")
    flow.execute("ALTER TABLE orders REPLICA IDENTITY DEFAULT")
    with pytest.raises(
        PreflightError, match=r"'id' of the key .* 'region' may be stored apart.* REPLICA IDENTITY FULL"
    ):
        flow.create()
    flow.execute("ALTER TABLE orders REPLICA IDENTITY FULL")
    flow.create()
    flow.snapshot()
    flow.execute("ALTER TABLE orders REPLICA IDENTITY DEFAULT", "UPDATE orders SET note = 'new' WHERE id = 1")
    flow.stream()
    (letter,) = flow.dead_letters()
    assert "its key is published as a hash" in letter.value["error"], letter
    assert [m for m in flow.read("orders") if m.pos] == []


@pytest.mark.some(1)
@pytest.mark.parametrize("options", [{"mask": {"id": "hash"}}, {"rename": {"id": "name"}}])
def test_a_new_name_by_which_the_key_has_another_form_sets_only_its_table_aside(
    make_flow: MakeFlow, options: dict[str, Any]
) -> None:
    flow = make_flow(tables=("orders", "small"), table_options={"small": options}, hash_key=_HASH_KEY)
    flow.create()
    flow.snapshot()
    with flow.streaming() as errors:
        flow.streams()
        flow.execute("ALTER TABLE small RENAME TO tiny", "INSERT INTO tiny VALUES ('x', 7)")
        until(lambda: "Put its options under the new name" in _problems(flow), "it is told", failed=errors)
        flow.execute("UPDATE orders SET note = 'later' WHERE id = 5")
        later = [{"id": 5}, "later"]
        until(lambda: later in [[e.key, e.value and e.value["note"]] for e in flow.read("orders")], "on", failed=errors)
    assert not errors and len(flow.read("small")) == 200
    flow.change(table_options={"tiny": options})
    flow.stream()
    flow.stream()
    assert not _problems(flow)
    _verified(flow)


@pytest.mark.long
def test_keys_become_hashes_or_other_hashes_only_if_that_is_accepted(make_flow: MakeFlow) -> None:
    flow = make_flow(tables=("small",), table_options={})
    flow.create()
    flow.snapshot()
    flow.stream()
    for settings in (
        {"table_options": {"small": _HASHED["small"]}, "hash_key": _HASH_KEY},
        {"hash_key": "another key of hashes", "hash_key_version": 2},
    ):
        flow.change(**settings)
        with pytest.raises(Refused, match="the hash that the settings choose"):
            flow.stream()
        accept(flow.pipeline, ["small"])
        flow.execute("UPDATE small SET n = n + 1 WHERE n < 10")
        flow.stream()
        _verified(flow)
    last = {m.key["id"]: m.value for m in flow.read("small")}
    assert sum(value is not None for value in last.values()) == 200 and len(last) == 600


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


def test_a_key_that_would_be_rounded_is_refused_whenever_it_comes(make_flow: MakeFlow) -> None:
    flow = make_flow(tables="?", table_options={}, numeric="double", regs="name", allow_unkeyed=True)
    flow.execute("CREATE TABLE n (id numeric(20, 0) PRIMARY KEY, exact numeric(15, 2) UNIQUE)")
    flow.execute("CREATE TABLE r (rels regclass[], n int, PRIMARY KEY (n, rels))")
    with pytest.raises(PreflightError, match=r"'id' is in the key of public\.n, .* Set numeric to decimal") as raised:
        flow.create()
    assert "'rels' is in the key of public.r" in str(raised.value) and "Set regs to number" in str(raised.value)
    flow.execute(
        "DROP TABLE r",
        "ALTER TABLE n DROP CONSTRAINT n_pkey, DROP CONSTRAINT n_exact_key, ADD PRIMARY KEY (exact)",
        "INSERT INTO n VALUES (9007199254740992, 1.5)",
    )
    flow.create()
    flow.snapshot()
    assert [m.key for m in flow.read("n")] == [{"exact": 1.5}]
    with flow.streaming() as errors:
        flow.streams()
        flow.execute(
            "CREATE TABLE l (id numeric PRIMARY KEY)",
            "ALTER TABLE n DROP CONSTRAINT n_pkey, ADD PRIMARY KEY (id)",
            "INSERT INTO n VALUES (9007199254740993, 2.5)",
        )
        for name in "ln":
            until(lambda name=name: f"'id' is in the key of public.{name}" in _problems(flow), "", failed=errors)
    assert [m.key for m in flow.read("n")] == [{"exact": 1.5}]


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


def test_a_masked_column_that_becomes_the_key_is_none(postgres: PostgresServer) -> None:
    rules = {"t": Table(mask={"a": "first:3", "b": "hash", "*": "hash"})}
    mapping = TableMapping(rules=rules, hash_key=hashes.remember(_HASH_KEY).id)
    with connect(postgres.createdb(f"test_{uuid.uuid4().hex[:12]}")) as connection:
        connection.execute(
            "CREATE TABLE public.t (a text NOT NULL, b text NOT NULL, c text NOT NULL, d int PRIMARY KEY)"
        )
        keys = {}
        for name in "abc":
            connection.execute(
                f"ALTER TABLE public.t DROP CONSTRAINT t_pkey, ADD CONSTRAINT t_pkey PRIMARY KEY ({name})"
            )
            ((oid,),) = connection.execute("SELECT 'public.t'::regclass::oid::int").fetchall()
            (table,) = catalog.load(connection, [oid], mapping)
            keys[name] = table.key, table.key_problem
    assert keys["b"] == (("b",), "")
    for name in "ac":
        assert keys[name][0] == () and f"mask column '{name}' of its key" in keys[name][1]


def test_the_key_of_a_large_row_is_its_hash(postgres: PostgresServer) -> None:
    mapping = TableMapping(rules={"t": Table(mask={"id": "hash"})}, hash_key=hashes.remember(_HASH_KEY).id)
    with connect(postgres.createdb(f"test_{uuid.uuid4().hex[:12]}")) as connection:
        connection.execute("CREATE TABLE public.t (n int, id bigint, v text, PRIMARY KEY (n, id))")
        connection.execute("INSERT INTO public.t VALUES (1, 42, repeat('x', 100))")
        ((oid,),) = connection.execute("SELECT 'public.t'::regclass::oid::int").fetchall()
        (table,) = catalog.load(connection, [oid], mapping)
        (row,) = large_rows.large_rows(connection, table, at_least=50)
    assert row.key == {"n": "1", "id": _hash("42")}
