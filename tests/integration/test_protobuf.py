"""The format ``protobuf``: what Confluent's deserializer makes of records, PostgreSQL being the oracle, and what a real
registry makes of the schemas."""

from __future__ import annotations

from typing import Any

import pytest
from confluent_kafka.schema_registry import SchemaRegistryClient
from confluent_kafka.schema_registry.protobuf import ProtobufDeserializer
from confluent_kafka.serialization import MessageField, SerializationContext

from airflow_bottledwater.encoding.protobuf import parse
from airflow_bottledwater.kafka.topics import Topics
from airflow_bottledwater.local.registry import SchemaRegistry
from airflow_bottledwater.postgres.connect import Connection
from airflow_bottledwater.provision import preflight, redrive
from tests.integration.test_json_schema import of_every_type, table, verified
from tests.integration.test_registry import ids, level
from tests.integration.test_types_against_postgres import VALUES, load, prepared, supported
from tests.support import reference
from tests.support.paths import texts
from tests.support.protobuf_messages import fill, message_class
from tests.support.scan import scan
from tests.support.topics import Flow, MakeFlow

__all__ = ["prepared"]


@pytest.fixture
def flow_settings() -> dict[str, Any]:
    return {"format": "protobuf"}


def schemas(flow: Flow, subject: str) -> list[str]:
    """The texts of a subject's versions."""
    assert flow.registry is not None
    client = SchemaRegistryClient({"url": flow.registry.url})
    return [client.get_version(subject, n).schema.schema_str or "" for n in client.get_versions(subject)]


def read(flow: Flow, table: str, version: int = -1) -> dict[int, Any]:
    """The latest messages of a topic by their ids, as Confluent's deserializer gives them to a consumer that was made
    for one version of the schema; None for a tombstone."""
    topic, found = flow.topic(table), dict[int, Any]()
    config = {"use.deprecated.format": False}
    kinds = [schemas(flow, f"{topic}-key")[0], schemas(flow, f"{topic}-value")[version]]
    key_of, value_of = (ProtobufDeserializer(message_class(text), config) for text in kinds)
    for message in scan(flow.pipeline.kafka, topic, Topics(flow.pipeline.kafka).ends(topic, 1)):
        key = key_of(message.key(), SerializationContext(topic, MessageField.KEY))
        found[key.id] = value_of(message.value(), SerializationContext(topic, MessageField.VALUE))
    return found


@pytest.mark.some(1)
@pytest.mark.parametrize("forms", [{}, {"ranges": "record", "regs": "name", "numeric": "double"}], ids=["default", "x"])
def test_confluents_deserializer_reads_every_type(
    make_flow: MakeFlow, registry: SchemaRegistry, prepared: Connection, forms: dict[str, str]
) -> None:
    kinds = [kind for kind in VALUES if supported(prepared, kind)]
    # what is no double under numeric = double is an error
    kinds = [kind for kind in kinds if not forms or "numeric" not in kind]
    flow = of_every_type(make_flow, registry, prepared, kinds, forms)
    table, found = load(prepared, "public.every", flow.pipeline.forms), read(flow, "every")
    (text,) = schemas(flow, f"{flow.topic('every')}-value")
    kind, expected = message_class(text), texts(prepared, table)
    assert len(found) == len(expected)
    for row in expected:
        made, wanted = found[int(row[0] or 0)], fill(kind(), reference.protobuf_row(table, row)[1])
        assert made.SerializeToString() == wanted.SerializeToString()
    assert verified(flow)


@pytest.mark.long
def test_columns_come_and_go_and_readers_of_all_versions_read_all_records(
    make_flow: MakeFlow, registry: SchemaRegistry
) -> None:
    flow = make_flow(registry)
    table(flow)
    flow.create()
    flow.snapshot()
    flow.execute("ALTER TABLE t ADD c int", "INSERT INTO t VALUES (2, 'two', 'two', '(2,two)', 2)")
    flow.stream()
    flow.execute("ALTER TABLE t DROP a", "INSERT INTO t VALUES (3, 'three', '(3,three)', 3)")
    flow.stream()
    flow.execute("ALTER TABLE t RENAME c TO d", "INSERT INTO t VALUES (4, 'four', '(4,four)', 4)")
    flow.stream()
    assert verified(flow)
    # another place, the same number; and a wider integer is no change
    flow.execute("ALTER TABLE t ADD a text", "ALTER TABLE t ALTER d TYPE bigint")
    flow.execute("INSERT INTO t VALUES (5, 'five', NULL, 5000000000, 'again')")
    flow.stream()
    texts_ = schemas(flow, f"{flow.topic('t')}-value")
    numbers = [{each.name: n for n, each in parse(text).message.fields.items()} for text in texts_]
    assert [set(each) for each in numbers] == [{"id", "a", "b", "p"}, {"id", "a", "b", "p", "c"}, {*"abpcd", "id"}]
    assert all(numbers[-1].items() >= each.items() for each in numbers)
    for version in range(3):
        found = read(flow, "t", version)
        assert [found[n].a for n in range(1, 6)] == ["one", "two", "", "", "again"]
        assert [found[n].b for n in range(1, 6)] == [b"one", b"two", b"three", b"four", b"five"]
        assert [found[n].HasField("p") for n in range(1, 6)] == [True] * 4 + [False]
        assert [found[n].p.y for n in range(1, 5)] == ["one", "two", "three", "four"]
    assert [found[n].c for n in range(1, 6)] == [0, 2, 3, 0, 0]
    assert [found[n].d for n in range(1, 6)] == [0, 0, 0, 4, 5_000_000_000]
    before = ids(flow)
    preflight.run(flow.pipeline)
    flow.execute("DELETE FROM t WHERE id = 1")
    flow.stream()
    assert ids(flow) == before
    assert schemas(flow, f"{flow.topic('t')}-value") == texts_
    assert read(flow, "t")[1] is None


@pytest.mark.long
def test_another_type_is_refused_whatever_the_registry_says_and_published_at_a_persons_word(
    make_flow: MakeFlow, registry: SchemaRegistry
) -> None:
    flow = make_flow(registry, on_error="log")
    table(flow)
    flow.create()
    flow.snapshot()
    flow.execute("ALTER TABLE t ALTER b TYPE text USING 'other'", "INSERT INTO t SELECT 2, a, b FROM t")
    assert flow.stream()["dead_letters"] == 1
    (letter,) = flow.dead_letters()
    assert "readers would read b (string) as bytes" in letter.value["error"]
    assert redrive.redrive(flow.pipeline).failed == 1
    level(flow, "NONE")
    assert redrive.redrive(flow.pipeline).published == 1
    assert (read(flow, "t")[2].a, read(flow, "t")[2].b) == ("one", "other")
