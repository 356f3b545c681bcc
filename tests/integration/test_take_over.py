"""Taking over the slot of a connector of Debezium, from where it has stopped."""

from __future__ import annotations

import json
from typing import Any

import pytest
from confluent_kafka import Producer
from confluent_kafka.schema_registry import Schema, SchemaRegistryClient

from airflow_bottledwater.encoding.envelope import Envelope
from airflow_bottledwater.encoding.mapping import TableMapping
from airflow_bottledwater.errors import PreflightError, Refused, SlotError, SlotInUse, StateError
from airflow_bottledwater.kafka.offsets import RangeReader
from airflow_bottledwater.kafka.topics import Topics, partition_of
from airflow_bottledwater.local.registry import SchemaRegistry
from airflow_bottledwater.model.lsn import Position, parse_lsn
from airflow_bottledwater.postgres.connect import connect
from airflow_bottledwater.postgres.replication import ReplicationStream
from airflow_bottledwater.provision import preflight
from airflow_bottledwater.provision.drop import drop
from airflow_bottledwater.provision.redrive import RedriveResult, redrive
from airflow_bottledwater.provision.take_over import take_over, unlike
from airflow_bottledwater.verify import driver
from tests.support.topics import Flow, MakeFlow, create_topic, limit_records, read_all
from tests.support.wire import INT4, NUMERIC, TEXT, TIMESTAMP, plain, table

#: what a connector makes, and what is to be made while it runs
_DEBEZIUM = "CREATE PUBLICATION dbz_publication FOR TABLE a"
_SECOND = "CREATE PUBLICATION dbz_publication_unkeyed WITH (publish = 'insert, truncate')"


_SCHEMAS = {"envelope": "debezium", "envelope_schema": True}


@pytest.fixture
def flow_settings() -> dict[str, Any]:
    """A connector's publication."""
    return {"tables": "a", "publication": "dbz_publication", "create_publication": False}


@pytest.fixture
def flow_statements() -> tuple[str, ...]:
    """A table."""
    return ("CREATE TABLE a (id int PRIMARY KEY, b text)",)


def _slot(flow: Flow) -> None:
    flow.execute(f"SELECT pg_create_logical_replication_slot('{flow.pipeline.slot}', 'pgoutput')")


def _confirm(flow: Flow) -> str:
    """The connector has read everything."""
    slot = flow.pipeline.slot
    ((lsn,),) = flow.execute(
        f"SELECT end_lsn::text FROM pg_replication_slot_advance('{slot}', pg_current_wal_insert_lsn())"
    )
    return str(lsn)


def test_the_first_changes_are_those_behind_the_confirmed_position(make_flow: MakeFlow) -> None:
    flow = make_flow()
    flow.execute(_DEBEZIUM, _SECOND)
    _slot(flow)
    flow.execute("INSERT INTO a VALUES (1, 'read by the connector')")
    confirmed = _confirm(flow)
    flow.execute(
        "INSERT INTO a VALUES (2, 'not read')", "DELETE FROM a WHERE id = 1", "INSERT INTO a VALUES (3, 'new')"
    )
    with pytest.raises(PreflightError, match="was not created by this pipeline"):
        flow.create()
    record = take_over(flow.pipeline)
    assert record.consistent_point == parse_lsn(confirmed)
    flow.stream()
    found = flow.read("a")
    assert [(each.key["id"], each.op) for each in found] == [(2, "c"), (1, "d"), (3, "c")]
    assert all(each.pos > str(Position(parse_lsn(confirmed), 0)) for each in found)
    assert flow.snapshot().rows == 0 and len(flow.read("a")) == 3
    with pytest.raises(StateError, match="is this pipeline's already"):
        take_over(flow.pipeline)
    flow.execute("INSERT INTO a VALUES (4, 'x')")
    flow.stream()
    assert [each.key["id"] for each in flow.read("a")] == [2, 1, 3, 4]


def test_a_dead_letter_is_overtaken_by_what_the_stream_has_published_since(make_flow: MakeFlow) -> None:
    flow = make_flow(on_error="log", topic_config={"max.message.bytes": "20000"})
    flow.execute(_DEBEZIUM, _SECOND)
    _slot(flow)
    _confirm(flow)
    take_over(flow.pipeline)
    flow.execute("INSERT INTO a VALUES (1, repeat('x', 30000))", "UPDATE a SET b = 'newer'")
    assert flow.stream()["dead_letters"] == 1
    limit_records(flow, "a", 100_000)
    assert redrive(flow.pipeline) == RedriveResult(overtaken=1)
    assert [each.value["b"] for each in flow.read("a")] == ["newer"]


def test_the_publications_are_not_taken_for_the_pipelines_own(make_flow: MakeFlow) -> None:
    """Also if nobody says that others have made them."""
    flow = make_flow(create_publication=True)
    flow.execute(_DEBEZIUM, _SECOND)
    _slot(flow)
    _confirm(flow)
    take_over(flow.pipeline)
    with pytest.raises(StateError, match="was made with create_publication = false, and the settings say true"):
        flow.stream()
    assert drop(flow.pipeline, when="always") == f"Dropped slot {flow.pipeline.slot!r}."
    assert flow.execute("SELECT count(*) FROM pg_publication WHERE pubname LIKE 'dbz_publication%'") == [(2,)]


def test_a_verification_says_which_rows_the_topics_do_not_have(make_flow: MakeFlow) -> None:
    flow = make_flow()
    flow.execute(_DEBEZIUM, _SECOND, "INSERT INTO a VALUES (1, 'before'), (2, 'before')")
    _slot(flow)
    _confirm(flow)
    flow.execute("UPDATE a SET b = 'behind' WHERE id = 2")
    take_over(flow.pipeline)
    with flow.streaming():
        found = driver.run(flow.pipeline, driver.in_threads(flow.pipeline))
    (of_a,) = found.tables
    assert of_a.counts == {"missing": 1} and of_a.differences[0].key == {"id": "1"}


def test_a_slot_that_cannot_be_taken_over_is_left_alone(make_flow: MakeFlow) -> None:
    flow = make_flow(outage_timeout=10.0)
    flow.execute(_DEBEZIUM)
    with pytest.raises(PreflightError, match="Publication 'dbz_publication_unkeyed' does not exist"):
        take_over(flow.pipeline)
    _slot(flow)
    flow.execute("INSERT INTO a VALUES (1, 'before the second publication')", _SECOND)
    with pytest.raises(SlotError, match="from before publication 'dbz_publication_unkeyed' was made or altered: Post"):
        take_over(flow.pipeline)
    _confirm(flow)
    slot = flow.pipeline.slot
    stream = ReplicationStream(flow.dsn, slot, ("dbz_publication",), 0, messages=False, buffer_bytes=1 << 20)
    with pytest.raises((PreflightError, SlotInUse), match="is in use by process"):
        take_over(flow.pipeline)
    stream.close()
    flow.execute("CREATE TABLE c (id int PRIMARY KEY)")
    flow.change(tables=("a", "c"))
    with pytest.raises(PreflightError, match=r"public\.c"):
        take_over(flow.pipeline)
    flow.change(tables="a", slot=f"{slot}_no")
    with pytest.raises(SlotError, match="There is no slot"):
        take_over(flow.pipeline)
    flow.execute(f"SELECT pg_create_physical_replication_slot('{slot}_no')")
    with pytest.raises(PreflightError, match="uses 'physical', not pgoutput"):
        take_over(flow.pipeline)
    assert not [name for name in Topics(flow.pipeline.kafka).names() if name.startswith(flow.pipeline.topic_prefix)]


def test_changes_from_before_a_table_was_published_are_not_passed_over(make_flow: MakeFlow) -> None:
    flow = make_flow(tables=("a", "c"))
    flow.execute(_DEBEZIUM, _SECOND, "CREATE TABLE c (id int PRIMARY KEY)")
    _slot(flow)
    flow.execute(
        "INSERT INTO c VALUES (1)", "ALTER PUBLICATION dbz_publication ADD TABLE c", "INSERT INTO c VALUES (2)"
    )
    for _ in range(2):
        with pytest.raises(SlotError, match=r"from before public\.c was added to its publication: PostgreSQL"):
            take_over(flow.pipeline)
        flow.execute("CHECKPOINT")  # tells the slot which transactions run
    for _ in range(2):
        flow.execute("CHECKPOINT")
        _confirm(flow)
    flow.execute("INSERT INTO c VALUES (3)")
    take_over(flow.pipeline)
    flow.stream()
    assert [each.key["id"] for each in flow.read("c")] == [3]


def _json(value: Any) -> bytes | None:
    """As Kafka Connect and the pipeline write it."""
    return None if value is None else json.dumps(value, separators=(",", ":"), ensure_ascii=False).encode()


@pytest.mark.parametrize(
    ("key", "value", "said"),
    [
        ({"id": 1}, {"before": None, "after": {"id": 1}, "op": "c", "source": {}}, "Debezium's envelope"),
        ({"schema": {}, "payload": {"id": 1}}, {"id": 1}, "schemas.enable"),
        ({"id": 1, "b": "x"}, {"id": 1}, "their keys"),
        (None, {"id": 1}, "their keys"),
        ({"id": "1"}, {"id": 1}, "column id has another form"),
        ({"id": True}, {"id": 1}, "column id has another form"),
        ({"id": 1}, {"id": 1, "other": 2}, "other fields"),
        ({"id": 1}, 5, "other fields"),
        ({"id": 1}, {"id": 1, "b": "x"}, ""),
        ({"id": 1}, None, ""),
    ],
)
def test_records_that_the_pipeline_would_not_write_are_told_apart(key: Any, value: Any, said: str) -> None:
    of = table(("id", plain(INT4)), ("b", plain(TEXT)), key=("id",))
    found = unlike(of, None, b"", _json(key), _json(value))
    assert said in found if said else not found


@pytest.mark.parametrize(
    ("with_schema", "key", "value", "said"),
    [
        (False, {"id": 1}, {"before": None, "after": {"id": 1}, "op": "c"}, ""),
        (False, {"id": 1}, {"before": {"id": 1}, "after": None, "op": "d"}, ""),
        (False, {"id": 1}, None, ""),
        (False, {"id": 1}, {"id": 1, "b": "x"}, "not Debezium's envelope"),
        (False, {"id": 1}, {"before": None, "after": {"id": 1, "c": 2}, "op": "c"}, "other fields"),
        (False, {"schema": {}, "payload": {"id": 1}}, None, "the schema with each"),
        (True, {"schema": {}, "payload": {"id": 1}}, None, ""),
        (
            True,
            {"schema": {}, "payload": {"id": 1}},
            {"schema": {}, "payload": {"before": None, "after": {"id": 1}, "op": "c"}},
            "",
        ),
        (True, {"id": 1}, {"schema": {}, "payload": {"before": None, "after": {"id": 1}, "op": "c"}}, "no schema"),
    ],
)
def test_records_with_an_envelope_are_compared_with_it(with_schema: bool, key: Any, value: Any, said: str) -> None:
    of = table(("id", plain(INT4)), ("b", plain(TEXT)), key=("id",))
    head = b'{"schema":{},"payload":' if with_schema else b""
    found = unlike(of, Envelope("shop", with_schema), head, _json(key), _json(value))
    assert said in found if said else not found


@pytest.mark.parametrize(
    ("kind", "key", "said"),
    [
        (INT4, b'{"b":1,"a":2}', ""),
        (INT4, b'{"a":2,"b":1}', "not the columns b, a, in this order"),
        (INT4, b'{"b": 1, "a": 2}', "other bytes of the same JSON"),
        (TEXT, '{"b":"\u00e4","a":2}'.encode(), ""),
        (TEXT, b'{"b":"\\u00e4","a":2}', "other bytes of the same JSON"),
        (TIMESTAMP, b'{"b":1,"a":2}', "not known in which form"),
        (NUMERIC, b'{"b":"AQ==","a":2}', "not known in which form"),
    ],
)
def test_keys_are_the_same_bytes_or_told_apart(kind: int, key: bytes, said: str) -> None:
    """One key would be two otherwise, in partitions that differ, too."""
    found = unlike(table(("a", plain(INT4)), ("b", plain(kind)), key=("b", "a")), None, b"", key, None)
    assert said in found if said else not found


@pytest.mark.parametrize("with_schema", [False, True])
def test_the_keys_of_a_pipeline_are_those_that_are_compared_with(make_flow: MakeFlow, with_schema: bool) -> None:
    flow = make_flow(
        tables="k", publication="", create_publication=True, **{**_SCHEMAS, "envelope_schema": with_schema}
    )
    flow.execute(
        "CREATE TYPE size AS ENUM ('small')",
        "CREATE TABLE k (t text, b bool, u uuid DEFAULT gen_random_uuid(), n int8, v varchar(9), s size, "
        "PRIMARY KEY (n, t, u, b, v, s))",
        "INSERT INTO k (t, b, n, v, s) SELECT '\\\"' || chr(i) || chr(8364), i > 9, -i, '/', 'small' "
        "FROM generate_series(1, 40) i",
    )
    flow.create()
    flow.snapshot()
    mapping, name = TableMapping.of(flow.pipeline), flow.topic("k")
    (of,) = preflight.run(flow.pipeline).tables
    around = mapping.around(name, of, "")
    assert around is not None and bool(around.key_head) == with_schema
    topics = Topics(flow.pipeline.kafka)
    ends = topics.all_ends({name: topics.describe([name])[name].partitions})[name]
    with RangeReader(flow.pipeline.kafka) as reader:
        found = list(reader.last(name, ends, 100))
    assert len(found) == 40
    for each in found:
        assert not unlike(of, mapping.envelope, around.key_head, each.key(), each.value())


_ROW = {"id": 1, "b": "x"}
_EVENT = {"before": None, "after": _ROW, "op": "c"}


def _with_schema(value: Any, **of_key: Any) -> dict[str, Any]:
    """As a connector with schemas writes it.

    :param of_key: what is said of the key's column beside its type.
    """
    field = {"type": "int32", "optional": False, **of_key, "field": "id"}
    schema = {"type": "struct", "fields": [field], "optional": False, "name": "TOPIC.Key"}
    return {"schema": schema, "payload": value}


@pytest.mark.parametrize(
    ("settings", "key", "value", "said"),
    [
        ({}, {"id": 1}, _EVENT, "Debezium's envelope"),
        ({}, {"id": 1}, _ROW, ""),
        (_SCHEMAS, _with_schema({"id": 1}, default=0), None, "schema with each of their keys is another one"),
        (_SCHEMAS, _with_schema({"id": 1}), None, ""),
    ],
)
def test_topics_with_other_records_are_refused(
    make_flow: MakeFlow, settings: dict[str, Any], key: Any, value: Any, said: str
) -> None:
    flow = make_flow(**settings)
    flow.execute(_DEBEZIUM, _SECOND)
    _slot(flow)
    create_topic(
        flow.pipeline.kafka, flow.topic("a"), partitions=2, replication=1, config={"cleanup.policy": "compact"}
    )
    producer = Producer(flow.pipeline.kafka)
    of_key = (_json(key) or b"").replace(b"TOPIC", flow.topic("a").encode())
    producer.produce(flow.topic("a"), _json(value), of_key, partition_of(of_key, 2))
    assert not producer.flush(60)
    if not said:
        take_over(flow.pipeline)
        return
    with pytest.raises(Refused, match=said):
        take_over(flow.pipeline)
    with connect(flow.dsn) as connection:
        assert connection.execute("SELECT count(*) FROM pg_replication_slots").fetchone()


@pytest.mark.parametrize("named", [False, True])
def test_keys_whose_schema_is_another_one_in_the_registry_are_refused(
    make_flow: MakeFlow, registry: SchemaRegistry, named: bool
) -> None:
    """A connector's has a name for Kafka Connect: the registry takes both, under two ids, which are part of the key."""
    flow = make_flow(registry, envelope="debezium")
    flow.execute(_DEBEZIUM, _SECOND)
    _slot(flow)
    (of,) = preflight.run(flow.pipeline.with_(adopt_slot=True), adopts_topics=True).tables
    topic = flow.topic("a")
    (subject, text), _ = TableMapping.of(flow.pipeline).subjects(topic, of)
    schema = json.loads(text) | ({"connect.name": f"{topic}.Key"} if named else {})
    number = SchemaRegistryClient({"url": registry.url}).register_schema(subject, Schema(json.dumps(schema), "AVRO"))
    config = {"cleanup.policy": "compact"}
    create_topic(flow.pipeline.kafka, topic, partitions=1, replication=1, config=config)
    producer = Producer(flow.pipeline.kafka)
    producer.produce(topic, None, b"\0" + number.to_bytes(4, "big") + b"\2", 0)
    assert not producer.flush(60)
    if named:
        with pytest.raises(Refused, match="the schema of their keys is another one"):
            take_over(flow.pipeline)
        return
    take_over(flow.pipeline)
    flow.execute("INSERT INTO a VALUES (1, 'x')")
    flow.stream()
    keys = [each.key for each in read_all(flow.kafka, [topic], decoders=(bytes, bytes))[topic]]
    assert len(keys) == 2 and keys[0] == keys[1]


def test_records_in_other_partitions_than_the_options_choose_are_refused(make_flow: MakeFlow) -> None:
    flow = make_flow(table_options={"a": {"partition_by": "id"}})
    flow.execute(_DEBEZIUM, _SECOND)
    _slot(flow)
    create_topic(
        flow.pipeline.kafka, flow.topic("a"), partitions=2, replication=1, config={"cleanup.policy": "compact"}
    )
    producer = Producer(flow.pipeline.kafka)
    producer.produce(flow.topic("a"), _json({"id": 1, "b": "x"}), _json({"id": 1}), 1)
    assert not producer.flush(60)
    with pytest.raises(PreflightError, match=r"chosen by \(id\) \(partition_by .* their keys would be in two"):
        take_over(flow.pipeline)
    flow.change(share_topics=True)  # where preflight does not look at partitions
    with pytest.raises(Refused, match=r"are chosen by id \(partition_by .* one key would be in two partitions"):
        take_over(flow.pipeline)
    flow.change(topic_prefix=f"{flow.pipeline.topic_prefix}-new")
    take_over(flow.pipeline)
