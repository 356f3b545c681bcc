"""Debezium's envelope in the whole life of a pipeline: snapshot, stream, live snapshots, sweeps, dead letters,
re-drives and the verification; read as its consumers read it."""

from __future__ import annotations

import json
from typing import Any

import pytest
from confluent_kafka import Producer
from confluent_kafka.schema_registry import SchemaRegistryClient
from confluent_kafka.schema_registry.avro import AvroDeserializer
from confluent_kafka.serialization import MessageField, SerializationContext

from airflow_bottledwater.errors import SettingError, StateError
from airflow_bottledwater.local.registry import SchemaRegistry
from airflow_bottledwater.postgres import snapshot as pg_snapshot
from airflow_bottledwater.postgres.connect import Connection
from airflow_bottledwater.postgres.server import end_of_wal
from airflow_bottledwater.provision import preflight, redrive
from tests.support.compare import records
from tests.support.topics import Flow, MakeFlow, limit_topic, read
from tests.support.verifying import verify_beside_a_stream
from tests.support.waiting import until

SECRET = "Ma9ker"
#: too large for its page, so that an update which leaves it alone does not send it
_LARGE = "(SELECT string_agg(md5(i::text), '') FROM generate_series(1, 400) i)"
_OPTIONS = {
    "people": {"exclude": ["hidden"], "mask": {"email": "constant:***"}, "rename": {"n": "number"}, "where": "n >= 0"}
}


@pytest.fixture
def flow_statements() -> tuple[str, ...]:
    return (
        "CREATE TABLE people (id int PRIMARY KEY, n int NOT NULL, email text, hidden text, large text, bits bit(3))",
        "ALTER TABLE people REPLICA IDENTITY FULL",
        "CREATE TABLE orders (id int PRIMARY KEY, note text, at timestamptz, cash numeric(10,2), large text)",
        "CREATE TABLE visits (at int, page text)",
        "ALTER TABLE visits REPLICA IDENTITY FULL",
    )


@pytest.fixture
def flow_settings() -> dict[str, Any]:
    return {"envelope": "debezium", "table_options": _OPTIONS, "allow_unkeyed": True, "on_error": "log"}


Event = dict[str, Any]


def events(flow: Flow, table: str) -> list[tuple[Any, Event | None]]:
    """Keys and values of a topic, without the schemas in front of them; those in Avro by Confluent's deserialiser."""
    topic, pipeline = flow.topic(table), flow.pipeline
    read = AvroDeserializer(SchemaRegistryClient({"url": pipeline.registry["url"]})) if pipeline.registry else None

    def decoded(data: bytes | None, field: str) -> Any:
        if data is None:
            return None
        if read is not None:
            return read(data, SerializationContext(topic, field))
        found = json.loads(data)
        if pipeline.envelope_schema:
            assert set(found) == {"schema", "payload"}
            found = found["payload"]
        return found

    return [
        (decoded(each.key(), MessageField.KEY), decoded(each.value(), MessageField.VALUE))
        for each in records(pipeline.kafka, topic)
    ]


def table_of(found: list[tuple[Any, Event | None]]) -> dict[Any, dict[str, Any]]:
    """The table that a consumer of events has, which does not look at tombstones; each deletion has one."""
    rows: dict[Any, dict[str, Any]] = {}
    for place, (key, event) in enumerate(found):
        if event is None:
            continue
        identity = json.dumps(key)
        if event["op"] == "d":
            assert event["after"] is None and found[place + 1] == (key, None)
            assert {name: event["before"][name] for name in key} == key
            del rows[identity]
        else:
            rows[identity] = event["after"]
    return rows


FORMS = ["json", pytest.param("schema", marks=pytest.mark.long), "avro"]


def make(make_flow: MakeFlow, request: pytest.FixtureRequest, form: str, **settings: Any) -> Flow:
    registry: SchemaRegistry | None = request.getfixturevalue("registry") if form == "avro" else None
    return make_flow(registry, envelope_schema=form == "schema", **settings)


@pytest.mark.some(1)
@pytest.mark.parametrize("form", FORMS)
def test_a_pipeline_publishes_events_throughout(make_flow: MakeFlow, request: pytest.FixtureRequest, form: str) -> None:
    flow = make(make_flow, request, form, topic_config={"max.message.bytes": "60000"})
    flow.execute(
        f"INSERT INTO people SELECT i, i, '{SECRET}', '{SECRET}', {_LARGE}, B'101' FROM generate_series(1, 6) i",
        f"INSERT INTO orders SELECT i, 'n' || i, '2026-03-01 10:00+00', i, {_LARGE} FROM generate_series(1, 6) i",
        "INSERT INTO visits VALUES (1, 'a')",
    )
    flow.create()
    flow.snapshot()
    snapshot = events(flow, "people")
    assert {event["op"] for _, event in snapshot if event} == {"r"} and len(snapshot) == 6
    source = (snapshot[0][1] or {})["source"]
    assert (source["snapshot"], source["schema"], source["table"]) == ("true", "public", "people")
    assert source["name"] == flow.pipeline.topic_prefix and source["lsn"] and source["txId"] is None
    flow.execute(
        f"UPDATE people SET email = '{SECRET}-2' WHERE id = 1",
        "UPDATE people SET n = -1 WHERE id = 2",  # leaves the row filter
        "UPDATE people SET id = 30 WHERE id = 3",
        "DELETE FROM people WHERE id = 4",
        "UPDATE orders SET note = NULL WHERE id = 1",  # and leaves a large value as it is
        "UPDATE orders SET id = 20 WHERE id = 2",
        "DELETE FROM orders WHERE id = 3",
        "INSERT INTO orders VALUES (9, repeat('x', 70000), NULL, NULL, NULL)",
        "UPDATE visits SET page = 'b'",
    )
    asked = flow.ask("people", "orders", where="true")
    flow.stream()
    assert flow.reported(asked).state == "finished"
    people, orders = events(flow, "people"), events(flow, "orders")
    updated = next(event for key, event in people if event and event["op"] == "u")
    assert (updated["before"]["email"], updated["after"]["email"]) == ("***", "***")
    assert set(updated["after"]) == {"id", "number", "email", "large", "bits"} and updated["before"]["large"]
    # PostgreSQL's own text, for which it is asked
    assert (updated["before"]["bits"], updated["after"]["bits"]) == ("101", "101")
    assert [event and event["op"] for key, event in people if key == {"id": 3}][:3] == ["r", "d", None]
    assert next(event and event["op"] for key, event in people if key == {"id": 30}) == "c"
    assert [event and event["op"] for key, event in people if key == {"id": 2}] == ["r", "d", None]
    assert table_of(people).keys() == {json.dumps({"id": i}) for i in (1, 5, 6, 30)}
    update = next(event for key, event in orders if event and event["op"] == "u")
    assert update["before"] is None and update["after"]["large"]
    deleted = next(event for key, event in orders if event and event["op"] == "d" and key == {"id": 3})
    assert deleted["before"] == {"id": 3, "note": None, "at": None, "cash": None, "large": None}
    visits = [event for _, event in events(flow, "visits") if event]
    assert [(each["op"], each["before"] and each["before"]["page"]) for each in visits] == [("r", None), ("u", "a")]
    # the record that the topic has not taken, once it does
    assert len(flow.dead_letters()) >= 1
    limit_topic(flow, flow.topic("orders"), 200_000)
    result = redrive.redrive(flow.pipeline)
    assert result.published and not result.failed
    orders = events(flow, "orders")
    assert table_of(orders).keys() == {json.dumps({"id": i}) for i in (1, 20, 4, 5, 6, 9)}
    assert {event["source"]["snapshot"] for _, event in orders if event} == {"true", "false", "incremental"}
    found = verify_beside_a_stream(flow)
    assert {each.table: each.verdict for each in found.tables if each.table != "public.visits"} == {
        "public.people": "equal", "public.orders": "equal"
    }, found  # fmt: skip


@pytest.mark.long
@pytest.mark.parametrize("form", ["json", "schema", "avro"])
def test_a_difference_in_the_new_row_is_found_and_swept(
    make_flow: MakeFlow, request: pytest.FixtureRequest, form: str
) -> None:
    """And the event that removes a key says which it was, though nothing else of the row is known."""
    flow = make(make_flow, request, form, tables="orders", table_options={})
    flow.execute("INSERT INTO orders SELECT i, 'n' || i FROM generate_series(1, 6) i")
    flow.create()
    flow.snapshot()
    flow.execute("UPDATE orders SET note = 'new' WHERE id = 1")
    flow.stream()
    # behind the pipeline's back: the record of another key again, and a key that the table does not have
    topic = flow.topic("orders")
    published = {each.key(): each.value() for each in records(flow.pipeline.kafka, topic)}
    keys = sorted(published)
    producer = Producer(flow.pipeline.kafka)
    producer.produce(topic, published[keys[1]], keys[0], 0)
    surplus = keys[5].replace(b'"id":6', b'"id":7') if form != "avro" else keys[5][:-1] + bytes([14])
    producer.produce(topic, published[keys[5]], surplus, 0)
    assert not producer.flush(60)
    found = verify_beside_a_stream(flow)
    assert found.tables[0].counts == {"different": 1, "surplus": 1}
    with flow.streaming() as errors:
        flow.streams()
        asked = flow.ask("orders", sweep=True)
        until(lambda: flow.reported(asked).state == "finished", "the live snapshot has finished")
    assert not errors
    gone = [event for key, event in events(flow, "orders") if key == {"id": 7}]
    assert [event and event["op"] for event in gone] == ["r", "d", None]
    assert gone[1] and {name: value for name, value in gone[1]["before"].items() if value is not None} == {"id": 7}
    if form == "json":
        assert [message.op for message in flow.read("orders") if message.key == {"id": 7}] == ["r", "d", "d"]
    assert not verify_beside_a_stream(flow).different


def test_who_orders_events_by_their_lsn_has_the_table(make_flow: MakeFlow, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also if a transaction commits between the two moments at which the snapshot reads B and L."""
    flow = make_flow(None, tables="orders", table_options={})
    flow.execute("INSERT INTO orders SELECT i, 'old' FROM generate_series(1, 3) i")
    flow.create()
    # of an earlier pipeline
    flow.damage("orders", {"id": 7}, {"id": 7})

    def later(connection: Connection) -> int:
        flow.execute("UPDATE orders SET note = 'new' WHERE id = 1", "DELETE FROM orders WHERE id = 2")
        return end_of_wal(connection)

    monkeypatch.setattr(pg_snapshot, "end_of_wal", later)
    flow.snapshot()
    flow.execute("INSERT INTO orders VALUES (7, 'new')")
    flow.stream()
    found = [(key["id"], event) for key, event in events(flow, "orders")[1:] if event]
    assert [event["op"] for _, event in found] == ["r", "r", "r", "d", "u", "d", "c"]
    newest: dict[int, Event] = {}
    for key, event in found:
        if (known := newest.get(key)) is None or _place(known) < _place(event):
            newest[key] = event
    assert {key: event["after"] and event["after"]["note"] for key, event in newest.items()} == {
        1: "new", 2: None, 3: "old", 7: "new"
    }  # fmt: skip


def _place(event: Event) -> tuple[int, list[int]]:
    return event["source"]["lsn"], [int(part) for part in json.loads(event["source"]["sequence"])]


def test_a_table_is_told_by_the_name_that_it_has(make_flow: MakeFlow) -> None:
    """It keeps its topic, with records of before that have the other name."""
    flow = make_flow(None, tables="orders", table_options={})
    flow.create()
    flow.snapshot()
    moved = ("CREATE SCHEMA sales", "ALTER TABLE orders SET SCHEMA sales", "INSERT INTO sales.orders VALUES (2)")
    flow.execute("INSERT INTO orders VALUES (1)", *moved, "TRUNCATE sales.orders")
    flow.stream()
    found = [(key["id"], event and event["source"]["schema"]) for key, event in events(flow, "orders")]
    assert found == [(1, "public"), (2, "sales")]
    (truncate,) = read(flow.kafka, f"{flow.pipeline.topic_prefix}._bottledwater_events")
    assert truncate.value["relations"] == ["sales.orders"]


def test_what_does_not_go_with_an_envelope_is_refused(make_flow: MakeFlow, registry: SchemaRegistry) -> None:
    with pytest.raises(SettingError, match="of many"):
        make_flow(registry, not_null="required")
    with pytest.raises(SettingError, match="documents have no schema"):
        make_flow(None, envelope_schema=True, json_documents="value")
    with pytest.raises(SettingError, match="GeoJSON object has no schema"):
        make_flow(None, envelope_schema=True, json_geometries="geojson")
    with pytest.raises(SettingError, match="field before"):
        make_flow(None, before="header")
    flow = make_flow(None, tables="orders", table_options={})
    preflight.run(flow.pipeline)
    flow.create()
    flow.snapshot()
    for other in ({"envelope": "none"}, {"envelope_schema": True}):
        with pytest.raises(StateError, match="Nothing was changed"):
            Flow.stream(_with(flow, **other))


def _with(flow: Flow, **settings: Any) -> Flow:
    other = Flow(flow.dsn, flow.kafka, flow.registry)
    other.pipeline = flow.pipeline.with_(**settings)
    return other


def test_an_old_row_is_in_a_header_if_asked(make_flow: MakeFlow) -> None:
    flow = make_flow(None, envelope="none", before="header", tables="people")
    flow.execute(f"INSERT INTO people VALUES (1, 1, '{SECRET}', '{SECRET}', NULL)")
    flow.create()
    flow.snapshot()
    flow.execute("UPDATE people SET n = 2", "UPDATE people SET id = 5", "DELETE FROM people")
    flow.stream()
    found = [
        (each.value() and json.loads(each.value()), dict(each.headers() or []))
        for each in records(flow.pipeline.kafka, flow.topic("people"))
    ]
    before = [headers.get("before") and json.loads(headers["before"]) for _, headers in found]
    one = {"id": 1, "number": 1, "email": "***", "large": None, "bits": None}
    two = {**one, "number": 2}
    assert [value for value, _ in found] == [one, two, None, {**two, "id": 5}, None]
    assert before == [None, one, two, None, {**two, "id": 5}]
    assert not verify_beside_a_stream(flow).different
