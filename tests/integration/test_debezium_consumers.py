"""Programs of others read Debezium's envelope: Debezium's own transformation and schemas, Kafka Connect's converters
for JSON and (Apicurio's) for Avro."""

from __future__ import annotations

import glob
import json
from collections.abc import Iterator
from typing import Any

import pytest
from confluent_kafka.schema_registry import SchemaRegistryClient
from py4j.java_gateway import GatewayParameters, JavaGateway, launch_gateway

from airflow_bottledwater.encoding.envelope import connect_schema
from airflow_bottledwater.local import artifacts
from airflow_bottledwater.local.registry import SchemaRegistry
from tests.support import wire as w
from tests.support.compare import records
from tests.support.jars import retrieved
from tests.support.topics import Flow, MakeFlow

pytestmark = pytest.mark.long

_DEBEZIUM = "3.6.1.Final"
_CONVERTER = "io.apicurio:apicurio-registry-utils-converter:2.6.13.Final"
_JARS = (
    f"io.debezium:debezium-api:{_DEBEZIUM}",
    f"io.debezium:debezium-embedded:{_DEBEZIUM}",
    f"io.debezium:debezium-connector-postgres:{_DEBEZIUM}",
    f"org.apache.kafka:connect-json:{artifacts.KAFKA_VERSION}",
)


@pytest.fixture(scope="module")
def java() -> Iterator[Any]:
    """A JVM with Debezium, Kafka Connect and Avro."""
    spark = artifacts.installed("pyspark") / "jars"
    classes = retrieved("debezium", *_JARS, alone=[_CONVERTER])
    paths = [f"{classes}/*"]
    paths += [path for name in ("avro-1", "commons-c", "commons-l") for path in glob.glob(str(spark / f"{name}*"))]
    port = launch_gateway(classpath=":".join(paths), die_on_exit=True, java_path=str(artifacts.system_java()))
    gateway = JavaGateway(gateway_parameters=GatewayParameters(port=port))
    yield gateway.jvm
    gateway.shutdown()


def _converter(java: Any, *, schemas: bool, keys: bool = False) -> Any:
    found = java.org.apache.kafka.connect.json.JsonConverter()
    options = java.java.util.HashMap()
    options.put("schemas.enable", "true" if schemas else "false")
    found.configure(options, keys)
    return found


class Connect:
    """What Kafka Connect makes of records.

    :param schemas: the schemas of Avro; None for JSON, which has them in each record.
    """

    def __init__(self, java: Any, schemas: SchemaRegistryClient | None) -> None:
        self._java, self._schemas = java, schemas
        self._plain = _converter(java, schemas=False)
        self._read = {keys: _converter(java, schemas=True, keys=keys) for keys in (True, False)}
        self._avro = java.io.apicurio.registry.utils.converter.avro.AvroData(10)

    def taken(self, topic: str, data: bytes | None, *, key: bool = False) -> Any:
        """A key or value as a sink or a transformation gets it."""
        if self._schemas is None or data is None:
            return self._read[key].toConnectData(topic, data)
        schema = self._schemas.get_schema(int.from_bytes(data[1:5], "big")).schema_str
        java = self._java
        parsed = java.org.apache.avro.Schema.Parser().parse(schema)
        decoder = java.org.apache.avro.io.DecoderFactory.get().binaryDecoder(data[5:], None)
        value = java.org.apache.avro.generic.GenericDatumReader(parsed).read(None, decoder)
        return self._avro.toConnectData(parsed, value)

    def record(self, topic: str, key: bytes | None, value: bytes | None) -> Any:
        """A record as a transformation gets it."""
        found = self.taken(topic, key, key=True), self.taken(topic, value)
        parts = [part for each in found for part in (each.schema(), each.value())]
        return self._java.org.apache.kafka.connect.sink.SinkRecord(topic, 0, *parts, 0)

    def shown(self, topic: str, schema: Any, value: Any) -> Any:
        """A value as JSON."""
        data = self._plain.fromConnectData(topic, schema, value)
        return None if data is None else json.loads(bytes(data))


def _flat(java: Any, **options: str) -> Any:
    found = java.io.debezium.transforms.ExtractNewRecordState()
    given = java.java.util.HashMap()
    for name, value in options.items():
        given.put(name.replace("_", "."), value)
    found.configure(given)
    return found


def _records(flow: Flow) -> list[tuple[bytes | None, bytes | None]]:
    return [(each.key(), each.value()) for each in records(flow.pipeline.kafka, flow.topic("orders"))]


@pytest.fixture(params=["json", "avro"])
def published(request: pytest.FixtureRequest, make_flow: MakeFlow, registry: SchemaRegistry) -> Flow:
    """A table of many types, and changes of each kind."""
    given = registry if request.param == "avro" else None
    flow = make_flow(given, envelope="debezium", envelope_schema=True, tables="orders")
    flow.execute(
        "CREATE TABLE orders (id int PRIMARY KEY, note text, cash numeric(10,2), at timestamptz, local timestamp,"
        " day date, time time, u uuid, doc jsonb, tags text[], raw bytea, ok boolean, ratio float8, span interval,"
        " moments timestamptz[])",
        "ALTER TABLE orders REPLICA IDENTITY FULL",
        "INSERT INTO orders VALUES (1, 'é', 12.5, '2026-03-01 09:30:00.5+00', '2026-03-01 09:30', '2026-03-01',"
        " '09:30', '00010203-0405-0607-0809-0a0b0c0d0e0f', '{\"a\":1}', '{a,NULL}', '\\x0102', true, 0.25, '1 day',"
        " '{2026-03-01 09:30:00.5+00,NULL}')",
    )
    flow.create()
    flow.snapshot()
    flow.execute(
        "UPDATE orders SET note = 'b'",
        "UPDATE orders SET id = 2",
        "INSERT INTO orders (id) VALUES (3)",
        "DELETE FROM orders WHERE id = 3",
    )
    flow.stream()
    return flow


def test_the_transformation_of_debezium_takes_the_rows_out(java: Any, published: Flow) -> None:
    flow, topic = published, published.topic("orders")
    as_avro = flow.pipeline.format == "avro"
    connect = Connect(java, SchemaRegistryClient({"url": flow.pipeline.registry["url"]}) if as_avro else None)
    flat, rewritten = _flat(java), _flat(java, delete_tombstone_handling_mode="rewrite", add_fields="op,source.lsn")
    rows: list[Any] = []
    deleted: list[Any] = []
    for key, value in _records(flow):
        record = connect.record(topic, key, value)
        if (found := flat.apply(record)) is not None:
            rows.append((connect.shown(topic, found.keySchema(), found.key()),
                         connect.shown(topic, found.valueSchema(), found.value())))  # fmt: skip
        if value is not None and (found := rewritten.apply(record)) is not None:
            shown = connect.shown(topic, found.valueSchema(), found.value())
            deleted.append((shown["id"], shown["__op"], shown["__deleted"], shown["note"]))
    assert [key["id"] for key, _ in rows] == [1, 1, 1, 2, 3, 3]
    assert [row and (row["id"], row["note"]) for _, row in rows] == [
        (1, "é"), (1, "b"), None, (2, "b"), (3, None), None
    ]  # fmt: skip
    assert deleted == [
        (1, "r", "false", "é"), (1, "u", "false", "b"), (1, "d", "true", "b"), (2, "c", "false", "b"),
        (3, "c", "false", None), (3, "d", "true", None),
    ]  # fmt: skip
    first = rows[0][1]
    assert (first["tags"], first["ok"], first["ratio"], first["raw"]) == (["a", None], True, 0.25, "AQI=")
    moment = 1_772_357_400_500_000
    assert first["at"] == "2026-03-01T09:30:00.500000Z"
    assert first["local"] == (moment - 500_000 if as_avro else "2026-03-01T09:30:00")


def test_sinks_get_the_names_that_debezium_has_for_types(java: Any, published: Flow) -> None:
    flow = published
    as_avro = flow.pipeline.format == "avro"
    connect = Connect(java, SchemaRegistryClient({"url": flow.pipeline.registry["url"]}) if as_avro else None)
    value = connect.taken(flow.topic("orders"), _records(flow)[0][1])
    row = value.schema().field("after").schema()
    assert (value.schema().name(), row.name()) == (f"{flow.topic('orders')}.Envelope", f"{flow.topic('orders')}.Value")
    named = {name: row.field(name).schema().name() for name in ("at", "local", "day", "time", "u", "cash", "span")}
    debezium, kafka = "io.debezium.time", "org.apache.kafka.connect.data"
    assert named == (
        {"at": f"{debezium}.ZonedTimestamp", "local": f"{debezium}.MicroTimestamp", "day": f"{kafka}.Date",
         "time": f"{debezium}.MicroTime", "u": "io.debezium.data.Uuid", "cash": f"{kafka}.Decimal",
         "span": f"{debezium}.Interval"}
        if as_avro
        else {"at": f"{debezium}.ZonedTimestamp", "local": None, "day": None, "time": None,
              "u": "io.debezium.data.Uuid", "cash": None, "span": f"{debezium}.Interval"}
    )  # fmt: skip
    assert row.field("moments").schema().valueSchema().name() == f"{debezium}.ZonedTimestamp"


def test_the_envelope_is_the_one_that_debezium_makes(java: Any) -> None:
    """Field by field, with names, order and versions."""
    data, connector = java.org.apache.kafka.connect.data, java.io.debezium.connector.postgresql
    options = java.io.debezium.config.Configuration.create()
    for name, value in {"topic.prefix": "shop", "database.dbname": "d", "database.hostname": "h"}.items():
        options = getattr(options, "with")(name, value)
    maker = connector.PostgresSourceInfoStructMaker()
    maker.init("postgresql", "1", connector.PostgresConnectorConfig(options.build()))
    row = data.SchemaBuilder.struct().optional().name("shop.t.Value").field("id", data.Schema.OPTIONAL_INT32_SCHEMA)
    builder = java.io.debezium.data.Envelope.defineSchema().withName("shop.t.Envelope").withRecord(row.build())
    made = builder.withSource(maker.schema()).build().schema()
    shown = json.loads(_converter(java, schemas=True).asJsonSchema(made).toString())
    assert shown == connect_schema(w.table(("id", w.plain(w.INT4))), "shop.t")
