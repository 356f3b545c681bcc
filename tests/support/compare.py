"""Whether a topic is its table, for a table of any types in either format: its records against PostgreSQL's own text of
the rows."""

from __future__ import annotations

import io
import json
import uuid
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import fastavro
from confluent_kafka import Consumer, KafkaError, KafkaException, Message, TopicPartition
from confluent_kafka.schema_registry import SchemaRegistryClient
from psycopg import sql

from airflow_bottledwater.kafka.topics import Topics
from airflow_bottledwater.model.relation import SourceTable
from airflow_bottledwater.postgres import catalog
from airflow_bottledwater.postgres.connect import connect
from tests.support import reference


@dataclass(slots=True)
class Comparison:
    """The comparison of one topic with its table.

    :param snapshot_records: the number of records without headers.
    :param stream_records: the number of records with headers.
    :param differences: the first differences, as sentences.
    """

    topic: str
    rows: int
    snapshot_records: int
    stream_records: int
    differences: list[str] = field(default_factory=list)

    @property
    def equal(self) -> bool:
        """Whether there are no differences."""
        return not self.differences


def records(kafka: Mapping[str, str], *topics: str, committed: bool = True) -> Iterator[Message]:
    """All records of topics, up to their ends of now, without waiting for more."""
    consumer = Consumer(
        {
            **kafka,
            "group.id": uuid.uuid4().hex,
            "enable.auto.commit": False,
            "enable.partition.eof": True,
            "auto.offset.reset": "earliest",  # also behind records that were deleted
            "fetch.wait.max.ms": 50,
            "isolation.level": "read_committed" if committed else "read_uncommitted",
        }
    )
    described = Topics(kafka).describe(topics)
    left = {(topic, p) for topic in topics for p in range(described[topic].partitions)}
    consumer.assign([TopicPartition(topic, p, 0) for topic, p in left])
    try:
        while left:
            # what is there; with a time-out, consume() waits for as many as it is asked for (a tombstone is false)
            first = consumer.poll(1.0)
            for message in [*([] if first is None else [first]), *consumer.consume(5000, 0)]:
                if (error := message.error()) is None:
                    yield message
                elif error.code() == KafkaError._PARTITION_EOF:
                    left.discard((message.topic(), message.partition()))  # others may go on writing to it
                else:
                    raise KafkaException(error)
    finally:
        consumer.close()


def latest(kafka: Mapping[str, str], topic: str) -> tuple[dict[bytes, bytes | None], int, int]:
    """The last committed value of each key, and how many records came from the snapshot and from the stream."""
    values: dict[bytes, bytes | None] = {}
    snapshot = stream = 0
    for message in records(kafka, topic) if Topics(kafka).describe([topic]) else ():
        if message.headers():
            stream += 1
        else:
            snapshot += 1
        values[message.key()] = message.value()
    return values, snapshot, stream


class Schemas:
    """Writer schemas by id, without logical types: values stay as they are on the wire."""

    def __init__(self, registry: Mapping[str, str]) -> None:
        self._client = SchemaRegistryClient(dict(registry))
        self._known: dict[int, Any] = {}

    def decode(self, data: bytes) -> dict[str, Any]:
        """A framed record."""
        schema_id = int.from_bytes(data[1:5], "big")
        if schema_id not in self._known:
            text = self._client.get_schema(schema_id).schema_str
            self._known[schema_id] = fastavro.parse_schema(reference.without_logical(json.loads(text)))
        found: Any = fastavro.schemaless_reader(io.BytesIO(data[5:]), self._known[schema_id], None)
        return dict(found)


def table_rows(dsn: str, name: str) -> tuple[SourceTable, list[list[str | None]]]:
    """A table and its rows as PostgreSQL's own text."""
    with connect(dsn, application="compare") as connection:
        table = catalog.load(connection, catalog.resolve(connection, [name], [], via_root=True))[0]
        text = sql.SQL("CASE WHEN {0} IS DISTINCT FROM NULL THEN format('%s', {0}) END")
        columns = sql.SQL(", ").join(text.format(sql.Identifier(c.name)) for c in table.columns)
        only = sql.SQL("" if table.partitioned else "ONLY ")
        query = sql.SQL("SELECT {} FROM {}{}").format(columns, only, sql.Identifier(table.schema, table.name))
        return table, [list(row) for row in connection.execute(query).fetchall()]


def compare(
    dsn: str, kafka: Mapping[str, str], registry: Mapping[str, str] | None, name: str, topic: str
) -> Comparison:
    """Compare a keyed table with its topic.

    :param registry: None for the JSON format.
    """
    table, rows = table_rows(dsn, name)
    values, snapshot, stream = latest(kafka, topic)
    result = Comparison(topic, len(rows), snapshot, stream)
    schemas = Schemas(registry) if registry is not None else None

    def decoded(data: bytes) -> dict[str, Any]:
        found: dict[str, Any] = schemas.decode(data) if schemas else json.loads(data)
        return found

    published = {json.dumps(decoded(k), default=str): v for k, v in values.items() if v is not None}
    native = reference.native if schemas else reference.json_native
    for row in rows:
        expected = {
            c.name: None if text is None else native(c.type, text) for c, text in zip(table.columns, row, strict=True)
        }
        key = json.dumps({k: expected[k] for k in table.key}, default=str)
        data = published.pop(key, None)
        if data is None:
            result.differences.append(f"row {key} is not in the topic")
        elif (got := decoded(data)) != expected:
            result.differences.append(f"row {key}: {_first_difference(got, expected)}")
        if len(result.differences) > 5:
            return result
    result.differences += [f"record {key} is not in the table" for key in list(published)[:5]]
    return result


def _first_difference(got: dict[str, Any], expected: dict[str, Any]) -> str:
    for name, value in expected.items():
        if got.get(name) != value:
            return f"{name} is {got.get(name)!r} in the topic and {value!r} in the table"
    return "the topic's record has other fields"
