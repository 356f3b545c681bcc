"""The format ``json-schema``: what Confluent's deserializer makes of records and schemas (PostgreSQL is the oracle),
and what a real registry makes of the schemas."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from typing import Any

import pytest
from confluent_kafka.schema_registry import SchemaRegistryClient
from confluent_kafka.schema_registry.json_schema import JSONDeserializer
from confluent_kafka.serialization import MessageField, SerializationContext

from airflow_bottledwater.errors import Refused
from airflow_bottledwater.kafka.topics import Topics
from airflow_bottledwater.local.registry import SchemaRegistry
from airflow_bottledwater.postgres.connect import Connection
from airflow_bottledwater.provision import preflight, redrive
from airflow_bottledwater.state import schemas
from tests.integration.test_registry import ids, level
from tests.integration.test_types_against_postgres import VALUES, load, parsed, prepared, supported
from tests.integration.test_verify import running, verify
from tests.support import reference
from tests.support.paths import texts
from tests.support.registry_front import fronted
from tests.support.scan import scan
from tests.support.topics import Flow, MakeFlow
from tests.support.waiting import until

__all__ = ["prepared"]


@pytest.fixture
def flow_settings() -> dict[str, Any]:
    return {"format": "json-schema"}


def read(flow: Flow, table: str) -> dict[str, tuple[dict[str, Any], dict[str, Any] | None]]:
    """The latest records of a topic by their keys, as Confluent's deserializer gives them: it validates each by the
    schema whose id it carries."""
    assert flow.registry is not None
    client, topic = SchemaRegistryClient({"url": flow.registry.url}), flow.topic(table)
    deserialize = JSONDeserializer(None, schema_registry_client=client)
    key, value = (SerializationContext(topic, each) for each in (MessageField.KEY, MessageField.VALUE))
    latest: dict[bytes, bytes | None] = {}
    for message in scan(flow.pipeline.kafka, topic, Topics(flow.pipeline.kafka).ends(topic, 1)):
        latest[message.key()] = message.value()
    found = {}
    for data, row in latest.items():
        made = deserialize(data, key)
        found[json.dumps(made)] = made, deserialize(row, value)
    return found


def of_every_type(
    make_flow: MakeFlow, registry: SchemaRegistry, prepared: Connection, kinds: list[str], forms: dict[str, str]
) -> Flow:
    """A pipeline that has published a table of these types, by a snapshot and a stream."""
    columns = ", ".join(f'"c {i} ""\u00e4" {kind}' for i, kind in enumerate(kinds))
    prepared.execute(f"CREATE TABLE public.every (id bigint PRIMARY KEY, {columns})")
    prepared.execute("COMMENT ON TABLE public.every IS 'of \"every\" type'")
    flow = make_flow(registry, tables=("public.every",), **forms)
    placeholders = ", ".join(f"%s::text::{kind}" for kind in kinds)

    def insert(number: int) -> None:
        values = [VALUES[kind][number % len(VALUES[kind])] for kind in kinds]
        prepared.execute(f"INSERT INTO public.every VALUES (%s, {placeholders})", [number, *values])

    for number in range(7):
        insert(number)
    flow.create()
    flow.snapshot()
    for number in range(7, max(len(v) for v in VALUES.values())):
        insert(number)
    prepared.execute("INSERT INTO public.every VALUES (-1)")
    flow.stream()
    return flow


def verified(flow: Flow) -> bool:
    with running(flow):
        return verify(flow).equal


@pytest.fixture
def long_numbers() -> Iterator[None]:
    """A consumer that reads numbers of any length."""
    before = sys.get_int_max_str_digits()
    sys.set_int_max_str_digits(0)
    yield
    sys.set_int_max_str_digits(before)


@pytest.mark.some(1)
@pytest.mark.parametrize(
    "forms",
    [{}, {"ranges": "record", "json_numeric": "number", "json_documents": "value", "regs": "name"}],
    ids=["default", "chosen"],
)
def test_confluents_deserializer_reads_every_type(
    make_flow: MakeFlow, registry: SchemaRegistry, prepared: Connection, forms: dict[str, str], long_numbers: None
) -> None:
    kinds = [kind for kind in VALUES if supported(prepared, kind)]
    flow = of_every_type(make_flow, registry, prepared, kinds, forms)
    table, found = load(prepared, "public.every", flow.pipeline.forms), read(flow, "every")
    expected = [reference.json_row(table, row) for row in texts(prepared, table)]
    assert len(found) == len(expected)
    for key, value in expected:
        made_key, made = found[json.dumps(key)]
        assert made_key == key
        assert made is not None
        assert parsed(table, made) == parsed(table, value)
    assert verified(flow)


def rows(flow: Flow) -> dict[int, dict[str, Any] | None]:
    """The latest rows of ``t`` by their ids."""
    return {key["id"]: value for key, value in read(flow, "t").values()}


def table(flow: Flow) -> None:
    flow.execute(
        "CREATE TYPE pair AS (x int, y text)",
        "CREATE TABLE t (id int PRIMARY KEY, a text, b bytea, p pair)",
        "INSERT INTO t VALUES (1, 'one', 'one', '(1,one)')",
    )


@pytest.mark.long
def test_columns_come_and_go_under_the_registrys_default_level(make_flow: MakeFlow, registry: SchemaRegistry) -> None:
    """It is BACKWARD: a reader with the newest schema reads all records."""
    flow = make_flow(registry)
    table(flow)
    flow.create()
    flow.snapshot()
    flow.execute("ALTER TABLE t ADD c int", "INSERT INTO t VALUES (2, 'two', 'two', '(2,two)', 2)")
    flow.stream()
    flow.execute("ALTER TABLE t DROP a", "ALTER TYPE pair DROP ATTRIBUTE y")
    flow.execute("INSERT INTO t VALUES (3, 'three', '(3)', 3)")
    flow.stream()
    flow.execute("ALTER TABLE t RENAME c TO d", "INSERT INTO t VALUES (4, 'four', '(4)', 4)")
    flow.stream()
    flow.execute("ALTER TABLE t ADD a text", "INSERT INTO t VALUES (5, 'five', '(5)', 5, 'again')")
    flow.stream()
    found = rows(flow)
    # the rows before were read again, since a name inside of a type had gone
    assert found == {
        1: {"id": 1, "b": "b25l", "p": {"x": 1}, "c": None},
        2: {"id": 2, "b": "dHdv", "p": {"x": 2}, "c": 2},
        3: {"id": 3, "b": "dGhyZWU=", "p": {"x": 3}, "c": 3},
        4: {"id": 4, "b": "Zm91cg==", "p": {"x": 4}, "d": 4},
        5: {"id": 5, "b": "Zml2ZQ==", "p": {"x": 5}, "d": 5, "a": "again"},
    }
    # the newest one names all properties that there ever were, and a start registers nothing else
    client = SchemaRegistryClient({"url": registry.url})
    newest = client.get_latest_version(f"{flow.topic('t')}-value").schema.schema_str or ""
    assert set(json.loads(newest)["properties"]) == {"id", "a", "b", "p", "c", "d"}
    versions = client.get_versions(f"{flow.topic('t')}-value")
    preflight.run(flow.pipeline)
    flow.execute("DELETE FROM t WHERE id = 1")
    flow.stream()
    assert client.get_versions(f"{flow.topic('t')}-value") == versions
    assert rows(flow)[1] is None
    assert verified(flow)


@pytest.mark.long
@pytest.mark.parametrize(
    ("alter", "told", "row"),
    [
        (
            "b TYPE text USING 'dHdv'",
            "readers would read b (text) as bytes in base64",
            {"id": 2, "a": "one", "b": "dHdv", "p": None},
        ),
        ("a TYPE int USING 7", "refuses the schema of subject", {"id": 2, "a": 7, "b": "b25l", "p": None}),
    ],
    ids=["misread", "refused"],
)
def test_what_readers_would_misread_becomes_letters_and_is_published_at_a_persons_word(
    make_flow: MakeFlow, registry: SchemaRegistry, alter: str, told: str, row: dict[str, Any]
) -> None:
    flow = make_flow(registry, on_error="log")
    table(flow)
    flow.create()
    flow.snapshot()
    flow.execute(f"ALTER TABLE t ALTER {alter}", "INSERT INTO t SELECT 2, a, b FROM t")
    assert flow.stream()["dead_letters"] == 1
    (letter,) = flow.dead_letters()
    assert told in letter.value["error"]
    assert redrive.redrive(flow.pipeline).failed == 1
    level(flow, "NONE")
    assert redrive.redrive(flow.pipeline).published == 1
    assert rows(flow)[2] == row


@pytest.mark.long
def test_schemas_that_the_registry_has_lost_are_registered_again_and_a_keys_id_never_changes(
    make_flow: MakeFlow, registry: SchemaRegistry, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(schemas, "_INTERVAL", 0.2)
    monkeypatch.setattr(schemas, "_AGAIN", (0.1,))
    with fronted(registry) as front:
        flow = make_flow(front)
        table(flow)
        flow.create()
        flow.snapshot()
        flow.execute("ALTER TABLE t DROP a", "INSERT INTO t VALUES (2, 'two')")
        flow.stream()
        before = ids(flow)
        with flow.streaming() as errors:
            # the registry's schema still has the dropped column, which is no loss
            flow.published("INSERT INTO t VALUES (3, 'three')")
            assert ids(flow) == before
            front.lost = {before[1]}
            until(lambda: ids(flow)[1] != before[1], "the new id", failed=errors)
            flow.execute("INSERT INTO t VALUES (4, 'four')")
            until(lambda: set(rows_known(flow)) == {1, 2, 3, 4}, "all rows are read again", failed=errors)
        assert not errors
        front.lost = set(ids(flow))
        with pytest.raises(Refused, match="has lost schema ids that keys in topics carry"):
            flow.stream()


def rows_known(flow: Flow) -> dict[int, Any]:
    """The same, none while one cannot be read."""
    try:
        return rows(flow)
    except Exception:  # whatever a consumer raises for an id that the registry does not know
        return {}
