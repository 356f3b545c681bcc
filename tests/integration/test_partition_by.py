"""Partitions that some columns of the key choose, wherever records are written or looked at."""

from __future__ import annotations

from collections import defaultdict
from typing import Any

import pytest

from airflow_bottledwater.errors import PreflightError, StateError
from airflow_bottledwater.provision import preflight, redrive
from airflow_bottledwater.provision.accept import accept
from airflow_bottledwater.provision.drop import drop
from tests.support.forms import decoders
from tests.support.options import HASH_KEY
from tests.support.partitions import check_partitions, key_bytes, murmur2
from tests.support.tables import problems
from tests.support.topics import (
    Flow,
    MakeFlow,
    Message,
    assert_exactly_once_in_order,
    delete_topic,
    limit_topic,
    read_all,
)
from tests.support.verifying import verify_beside_a_stream
from tests.support.waiting import until

PARTITIONS = 7
_OPTIONS: dict[str, dict[str, Any]] = {
    "orders": {"partition_by": "customer"},
    "parted": {"partition_by": ["customer", "region"], "rename": {"customer": "Kunde Nr."}},
    "plain": {"key": ["code", "customer"], "partition_by": ["customer"]},
    "masked": {"mask": {"customer": "hash"}, "partition_by": ["customer"]},
}
_LARGE = "(SELECT string_agg(md5(i::text || clock_timestamp()), '') FROM generate_series(1, 300) i)"
#: settings, whether there is a registry, and whether the quick suite has them
_FORMS: dict[str, tuple[dict[str, Any], bool]] = {
    "json": ({}, False),
    "avro": ({"format": "avro"}, True),
    "json-schema": ({"format": "json-schema"}, True),
    "protobuf": ({"format": "protobuf"}, True),
    "debezium": ({"envelope": "debezium", "envelope_schema": True}, False),
    "debezium-avro": ({"envelope": "debezium", "format": "avro"}, True),
}

_in_each_form = pytest.mark.parametrize(
    "form", ["json", *(pytest.param(each, marks=pytest.mark.long) for each in _FORMS if each != "json")]
)


@pytest.fixture
def flow_statements() -> tuple[str, ...]:
    columns = "(id int, customer int NOT NULL, region text NOT NULL, code text NOT NULL, note text, large text"
    return (
        f"CREATE TABLE orders {columns}, PRIMARY KEY (id, customer))",
        f"CREATE TABLE parted {columns}, PRIMARY KEY (region, customer, id)) PARTITION BY LIST (region)",
        "CREATE TABLE parted_eu PARTITION OF parted FOR VALUES IN ('EU')",
        "CREATE TABLE parted_us PARTITION OF parted FOR VALUES IN ('US')",
        f"CREATE TABLE plain {columns}, UNIQUE (customer, code))",
        f"CREATE TABLE masked {columns}, PRIMARY KEY (customer, id))",
        *(f"ALTER TABLE {name} REPLICA IDENTITY FULL" for name in ("plain", "masked")),
        *(
            f"INSERT INTO {name} SELECT g, g % 20, (ARRAY['EU', 'US'])[g % 2 + 1], 'c' || g, 'old', {_LARGE}"
            " FROM generate_series(1, 200) g"
            for name in _OPTIONS
        ),
    )


@pytest.fixture
def flow_settings() -> dict[str, Any]:
    return {
        "tables": tuple(_OPTIONS),
        "partitions": PARTITIONS,
        "partitioned_tables": "root",
        "table_options": _OPTIONS,
        "hash_key": HASH_KEY,
    }


_CHANGES = (
    "UPDATE {} SET note = 'new' WHERE id % 10 = 1",
    "UPDATE {} SET customer = customer + 100 WHERE id % 10 = 2",
    "UPDATE {} SET id = id + 1000, code = 'x' || code WHERE id % 10 = 3",
    "DELETE FROM {} WHERE id % 10 = 4",
    "INSERT INTO {} SELECT 2000 + g, g, 'US', 'n' || g, 'another', NULL FROM generate_series(1, 30) g",
)


def _read(flow: Flow, table: str) -> list[Message]:
    topic = flow.topic(table)
    return read_all(flow.kafka, [topic], decoders=decoders(flow.pipeline))[topic]


def _place(flow: Flow, customer: int) -> int:
    return murmur2(key_bytes(flow.pipeline.format, {"customer": customer}, ["customer"])) % PARTITIONS


@_in_each_form
def test_the_columns_choose_the_partition_of_every_record(
    make_flow: MakeFlow, request: pytest.FixtureRequest, form: str
) -> None:
    settings, registered = _FORMS[form]
    flow = make_flow(request.getfixturevalue("registry") if registered else None, **settings)
    flow.create()
    flow.snapshot()
    for table in _OPTIONS:
        flow.execute(*(change.format(table) for change in _CHANGES))
    flow.stream()
    asked = [flow.ask(*_OPTIONS, sweep=True), flow.ask("orders", by_key=True), flow.ask("plain", where="id > 100")]
    flow.execute("DELETE FROM orders WHERE id = 9", "UPDATE plain SET note = 'during' WHERE id > 150")
    flow.stream()
    assert [flow.reported(each).state for each in asked] == ["finished"] * 3
    found = verify_beside_a_stream(flow)
    assert {each.verdict for each in found.tables} == {"equal"}, found
    for table in _OPTIONS:
        messages = _read(flow, table)
        assert check_partitions(flow, table, messages) > 400
        assert len({message.partition for message in messages}) > 2
        if form == "json":
            assert_exactly_once_in_order(messages)
    by_customer = defaultdict[int, list[Message]](list)
    for message in _read(flow, "orders"):
        by_customer[message.key["customer"]].append(message)
    for customer, messages in by_customer.items():
        assert {message.partition for message in messages} == {_place(flow, customer)}
        streamed = [message.pos for message in messages if message.pos]
        assert streamed == sorted(streamed), f"the changes of customer {customer} are not in commit order"


@pytest.mark.parametrize("envelope", ["none", pytest.param("debezium", marks=pytest.mark.long)])
def test_an_update_of_the_key_moves_the_row_and_the_tombstone_stays(make_flow: MakeFlow, envelope: str) -> None:
    flow = make_flow(tables=("orders",), table_options={"orders": _OPTIONS["orders"]}, envelope=envelope)
    flow.create()
    flow.snapshot()
    other = next(each for each in range(500, 600) if _place(flow, each) != _place(flow, 7))
    flow.execute(f"UPDATE orders SET customer = {other} WHERE id = 7", "DELETE FROM orders WHERE id = 27")
    flow.stream()
    old, new = _place(flow, 7), _place(flow, other)
    found = [(m.key["id"], m.value is None, m.partition) for m in flow.read("orders") if m.pos]
    deleted = [(7, False, old)] * (envelope == "debezium") + [(7, True, old)]
    assert [each for each in found if each[0] == 7 and each[2] == old] == deleted
    assert [each for each in found if each[0] == 7 and each[2] == new] == [(7, False, new)]
    assert (27, True, old) in found  # of the same customer


@pytest.mark.long
def test_a_sweep_removes_a_key_where_it_is_and_the_verification_knows_where_keys_belong(make_flow: MakeFlow) -> None:
    flow = make_flow(tables=("orders",), table_options={"orders": _OPTIONS["orders"]})
    flow.create()
    flow.snapshot()
    flow.stream()
    key, right = {"id": 9999, "customer": 3}, _place(flow, 3)
    flow.damage("orders", key, {**key, "note": "surplus"}, partition=right)
    (of_key,) = [m.value for m in flow.read("orders") if m.key == {"id": 5, "customer": 5}]
    flow.damage("orders", {"id": 5, "customer": 5}, of_key, partition=(_place(flow, 5) + 1) % PARTITIONS)
    (table,) = verify_beside_a_stream(flow).tables
    assert {each.kind for each in table.differences} == {"surplus", "wrong partition"}, table
    asked = flow.ask("orders", sweep=True)
    flow.stream()
    assert flow.reported(asked).tombstones == 1
    assert [m.partition for m in flow.read("orders") if m.key == key and m.value is None] == [right]
    # a tombstone for a key that the table has would harm who reads all partitions
    found = verify_beside_a_stream(flow)
    assert {each.kind for each in found.tables[0].differences} == {"wrong partition"}
    assert f"drop-slot --when always), delete '{flow.topic('orders')}', and start again" in found.advice()
    drop(flow.pipeline, when="always")
    delete_topic(flow, flow.topic("orders"))
    flow.create()
    flow.snapshot()
    flow.stream()
    assert verify_beside_a_stream(flow).equal


@pytest.mark.long
def test_a_new_snapshot_into_the_same_topics_sweeps_what_is_gone(make_flow: MakeFlow) -> None:
    flow = make_flow(tables=("orders",), table_options={"orders": _OPTIONS["orders"]})
    flow.create()
    flow.snapshot()
    drop(flow.pipeline, when="always")
    flow.execute("DELETE FROM orders WHERE id <= 50", "UPDATE orders SET note = 'new' WHERE id > 150")
    flow.create()
    flow.snapshot()
    found = verify_beside_a_stream(flow)
    assert {each.verdict for each in found.tables} == {"equal"}, found
    assert check_partitions(flow, "orders", flow.read("orders")) > 300


@pytest.mark.long
@_in_each_form
def test_topics_whose_keys_are_in_other_partitions_are_refused(
    make_flow: MakeFlow, request: pytest.FixtureRequest, form: str
) -> None:
    """The slot was dropped, and whoever starts again names other columns than before."""
    settings, registered = _FORMS[form]
    flow = make_flow(request.getfixturevalue("registry") if registered else None, **settings)
    by_whole_key = {name: {k: v for k, v in each.items() if k != "partition_by"} for name, each in _OPTIONS.items()}
    others = {table: {**options, "partition_by": options.get("key", ["id"])[:1]} for table, options in _OPTIONS.items()}
    for made, refused in ((_OPTIONS, (by_whole_key, others)), (by_whole_key, (_OPTIONS, others))):
        flow.change(table_options=made, topic_prefix=f"{flow.pipeline.topic_prefix}.new")
        flow.create()
        flow.snapshot()
        flow.execute("DELETE FROM orders WHERE id % 3 = 1")
        flow.stream()
        drop(flow.pipeline, when="always")
        for options in refused:
            flow.change(table_options=options)
            with pytest.raises(PreflightError, match="their keys would be in two") as found:
                flow.create()
            said = str(found.value)
            assert [table for table in _OPTIONS if f"records of public.{table} would be" not in said] == [], said
        flow.change(table_options=made)
        flow.create()
        drop(flow.pipeline, when="always")


@pytest.mark.long
def test_a_later_table_is_not_followed_into_a_topic_whose_keys_are_in_other_partitions(make_flow: MakeFlow) -> None:
    flow = make_flow(tables=("late",), new_tables="add", table_options={"late": {"partition_by": "a"}})
    flow.execute("DROP TABLE plain", "CREATE TABLE late (a int, b int, PRIMARY KEY (a, b))")
    flow.create()
    flow.snapshot()
    flow.execute("INSERT INTO late SELECT g, g FROM generate_series(1, 50) g")
    flow.stream()
    drop(flow.pipeline, when="always")
    flow.execute("DROP TABLE late")
    flow.change(tables=("*",), table_options={})
    flow.create()
    flow.snapshot()
    with flow.streaming() as errors:
        flow.streams()
        flow.execute("CREATE TABLE late (a int, b int, PRIMARY KEY (a, b))")
        until(lambda: "their keys would be in two" in str(problems(flow)), "it is told", failed=errors)


@pytest.mark.long
@pytest.mark.parametrize("registered", [False, True])
def test_dead_letters_are_published_again_into_their_partition(
    make_flow: MakeFlow, request: pytest.FixtureRequest, registered: bool
) -> None:
    flow = make_flow(
        request.getfixturevalue("registry") if registered else None,
        tables=("orders", "masked"),
        table_options={name: _OPTIONS[name] for name in ("orders", "masked")},
        on_error="log",
        topic_config={"max.message.bytes": "20000"},
    )
    flow.create()
    flow.snapshot()
    flow.execute("UPDATE orders SET note = repeat('x', 30000) WHERE id IN (5, 6)")
    flow.stream()
    limit_topic(flow, flow.topic("orders"), 100_000)
    assert redrive.redrive(flow.pipeline).published == 2
    messages = _read(flow, "orders")
    assert sum(bool(m.value) and len(m.value["note"] or "") == 30000 for m in messages) == 2
    check_partitions(flow, "orders", messages)
    found = verify_beside_a_stream(flow)
    assert {each.verdict for each in found.tables} == {"equal"}, found


@pytest.mark.parametrize(
    ("table", "options", "said"),
    [
        ("orders", {"partition_by": "region"}, r"'region' cannot choose the partitions .*\(id, customer\)"),
        ("orders", {"partition_by": ["id", "no"]}, "'no' cannot choose the partitions of public.orders"),
        ("plain", {"partition_by": "code"}, "public.plain has no key, and table_options name columns of a key"),
        ("plain", {"partition_by": "code", "outbox": "{region}"}, "outbox, whose records are in the partitions"),
        ("plain", {"key": ["code", "customer"], "partition_by": "id"}, r"'id' .* of its key \(code, customer\)"),
    ],
)  # fmt: skip
def test_columns_that_cannot_choose_are_found_before_anything_is_made(
    make_flow: MakeFlow, table: str, options: dict[str, Any], said: str
) -> None:
    flow = make_flow(tables=(table,), table_options={table: options}, allow_unkeyed=True)
    with pytest.raises(PreflightError, match=said):
        preflight.run(flow.pipeline)
    with pytest.raises(PreflightError, match=said):
        flow.create()


@pytest.mark.long
def test_the_columns_of_a_table_that_exists_stay_what_they_are(make_flow: MakeFlow) -> None:
    flow = make_flow(tables=("orders", "masked"), table_options={"orders": _OPTIONS["orders"]})
    flow.create()
    flow.snapshot()
    flow.stream()
    for options, said in (
        ({}, r"by \(customer\), and table_options say the whole key now"),
        ({"orders": {"partition_by": ["customer", "id"]}}, r"say \(customer, id\) now: keys would be in other"),
        ({"*": {"partition_by": "customer"}}, r"public.masked are chosen by the whole key, .* say \(customer\) now"),
    ):
        flow.change(table_options=options)
        with pytest.raises(StateError, match=said):
            flow.stream()
        with pytest.raises(PreflightError, match=said):
            preflight.run(flow.pipeline)
    accept(flow.pipeline, ["orders"])  # although the key stays the same
    flow.change(table_options={"orders": {"partition_by": "id"}})
    with pytest.raises(PreflightError, match=r"by \(customer\), and table_options say \(id\) now"):
        flow.stream()
    flow.change(table_options={"or*": _OPTIONS["orders"]})
    flow.execute("UPDATE orders SET note = 'again' WHERE id < 20")
    flow.stream()
    check_partitions(flow, "orders", flow.read("orders"))


def test_the_options_of_a_table_go_with_its_name(make_flow: MakeFlow) -> None:
    """Those that never change, too: they may be kept under the old name, be taken out, and be given to the new one."""
    made = {"orders": {**_OPTIONS["orders"], "topic": "bought"}, "masked": _OPTIONS["masked"]}
    flow = make_flow(tables=("orders", "masked"), table_options=made)
    flow.create()
    flow.snapshot()
    flow.execute("ALTER TABLE orders RENAME TO sales", "DROP TABLE masked")
    for options in ({"orders": made["orders"]}, {}, {"sales": made["orders"]}):
        flow.change(table_options=options)
        flow.execute("UPDATE sales SET note = 'after' WHERE id < 100")
        flow.stream()
    check_partitions(flow, "orders", flow.read("bought"))
    for other, said in (("topic", "public.sales is .*bought', and"), ("partition_by", "public.sales are chosen by")):
        flow.change(table_options={"sales": {**made["orders"], other: "id"}})
        with pytest.raises(StateError, match=said):
            flow.stream()


@pytest.mark.long
def test_a_renamed_table_keeps_its_columns_and_a_renamed_column_needs_new_keys(make_flow: MakeFlow) -> None:
    flow = make_flow(tables=("*",), table_options={"orders": _OPTIONS["orders"]}, new_tables="add")
    flow.execute("DROP TABLE parted, plain, masked")
    flow.create()
    flow.snapshot()
    flow.stream()
    flow.execute("ALTER TABLE orders RENAME TO sales", "UPDATE sales SET note = 'after' WHERE id < 100")
    flow.stream()
    asked = flow.ask("sales")
    flow.stream()
    assert flow.reported(asked).state == "finished"
    assert check_partitions(flow, "orders", flow.read("orders")) > 250
    flow.execute("ALTER TABLE sales RENAME TO orders", "ALTER TABLE orders RENAME customer TO kunde")
    flow.execute("UPDATE orders SET note = 'kunde' WHERE id < 50")
    accept(flow.pipeline, ["orders"])
    flow.change(table_options={"orders": {"partition_by": "kunde"}})
    flow.stream()
    found = verify_beside_a_stream(flow)
    assert {each.verdict for each in found.tables} == {"equal"}, found
    rows = [m for m in flow.read("orders") if "kunde" in m.key]
    assert check_partitions(flow, "orders", rows) >= 200


@pytest.mark.long
def test_new_keys_that_are_accepted_may_be_in_other_partitions(make_flow: MakeFlow) -> None:
    """Although the keys of before have the column by which the new ones are divided."""
    flow = make_flow(tables=("orders",), table_options={"orders": _OPTIONS["orders"]})
    flow.create()
    flow.snapshot()
    flow.stream()
    flow.execute("ALTER TABLE orders DROP CONSTRAINT orders_pkey, ADD PRIMARY KEY (id, customer, code)")
    accept(flow.pipeline, ["orders"])
    flow.change(table_options={"orders": {"partition_by": "id"}})
    flow.stream()
    found = verify_beside_a_stream(flow)
    assert {each.verdict for each in found.tables} == {"equal"}, found
    rows = [message for message in flow.read("orders") if "code" in message.key]
    assert check_partitions(flow, "orders", rows) >= 200


@pytest.mark.long
def test_a_key_that_loses_a_column_sets_the_table_aside(make_flow: MakeFlow) -> None:
    flow = make_flow(tables=("orders", "masked"), table_options={"orders": _OPTIONS["orders"]})
    flow.create()
    flow.snapshot()
    with flow.streaming() as errors:
        flow.streams()
        flow.execute("ALTER TABLE orders DROP CONSTRAINT orders_pkey, ADD PRIMARY KEY (id)")

        def told() -> str:
            job = flow.job
            return " ".join(map(str, job.problems)) if job else ""

        until(lambda: "chosen by column 'customer'" in told(), "it is told", failed=errors)
        flow.execute("ALTER TABLE orders DROP CONSTRAINT orders_pkey, ADD PRIMARY KEY (customer, id)")
        until(lambda: not told(), "nothing is wrong any more", failed=errors)
    found = verify_beside_a_stream(flow)
    assert {each.verdict for each in found.tables} == {"equal"}, found
    check_partitions(flow, "orders", flow.read("orders"))
