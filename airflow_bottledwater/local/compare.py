"""Compares a topic with its table: the latest committed record of each key with the row, value by value.

Records and rows are read by the libraries that a consumer and a client of the database would use, fastavro and psycopg; none of this
package's encoders is used.
"""

from __future__ import annotations

import io
import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from decimal import Decimal
from typing import Any

import fastavro
import psycopg
from confluent_kafka import Consumer, KafkaError, KafkaException, TopicPartition
from confluent_kafka.schema_registry import SchemaRegistryClient
from psycopg import sql
from psycopg.rows import dict_row

from airflow_bottledwater.kafka.topics import Topics

#: differences after which the rest is not compared
_ENOUGH = 5


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


def latest(kafka: Mapping[str, str], topic: str) -> tuple[dict[bytes, bytes | None], int, int]:
    """The last committed value of each key, and how many records came from the snapshot and from the stream."""
    described = Topics(kafka).describe([topic])
    if topic not in described:
        return {}, 0, 0
    consumer = Consumer(
        {
            **kafka,
            "group.id": "compare",
            "enable.auto.commit": False,
            "enable.partition.eof": True,
            "isolation.level": "read_committed",
        }
    )
    partitions = described[topic].partitions
    consumer.assign([TopicPartition(topic, p, 0) for p in range(partitions)])
    values: dict[bytes, bytes | None] = {}
    ended: set[int] = set()
    snapshot = stream = 0
    try:
        while len(ended) < partitions:
            for message in consumer.consume(10_000, 1.0):
                error = message.error()
                if error is not None:
                    if error.code() == KafkaError._PARTITION_EOF:
                        ended.add(message.partition())
                        continue
                    raise KafkaException(error)
                if message.headers():
                    stream += 1
                else:
                    snapshot += 1
                values[message.key()] = message.value()
    finally:
        consumer.close()
    return values, snapshot, stream


class _Decoder:
    """Reads framed Avro with the schema that it was written with."""

    def __init__(self, registry: Mapping[str, str]) -> None:
        self._client = SchemaRegistryClient(dict(registry))
        self._schemas: dict[int, Any] = {}

    def decode(self, data: bytes) -> dict[str, Any]:
        """A record's key or value by field."""
        number = int.from_bytes(data[1:5], "big")
        if number not in self._schemas:
            self._schemas[number] = fastavro.parse_schema(json.loads(self._client.get_schema(number).schema_str))
        found: Any = fastavro.schemaless_reader(io.BytesIO(data[5:]), self._schemas[number], None)
        return dict(found)


def compare(dsn: str, kafka: Mapping[str, str], registry: Mapping[str, str], table: str, topic: str) -> Comparison:
    """Compare a table of the demo, which has a key and plain types, with its topic in Avro."""
    decoder = _Decoder(registry)
    values, snapshot, stream = latest(kafka, topic)
    result = Comparison(topic, 0, snapshot, stream)
    published = {tuple(decoder.decode(key).items()): value for key, value in values.items() if value is not None}
    key_columns = [name for name, _ in next(iter(published), ())]
    with psycopg.connect(dsn) as connection:
        connection.execute("SET TimeZone = 'UTC'")
        # in binary form, since a float is then exact; by a server-side cursor, since the flights are many rows
        with connection.cursor("compare", row_factory=dict_row) as cursor:
            cursor.execute(sql.SQL("SELECT * FROM ONLY {}").format(sql.Identifier(table)), binary=True)
            for row in cursor:
                result.rows += 1
                if len(result.differences) > _ENOUGH:
                    continue
                key = tuple((name, row[name]) for name in key_columns)
                data = published.pop(key, None)
                if data is None:
                    result.differences.append(f"row {row} is not in the topic")
                elif difference := _difference(decoder.decode(data), row):
                    result.differences.append(f"row {dict(key)}: {difference}")
    result.differences += [f"record {dict(key)} is not in the table" for key in list(published)[:_ENOUGH]]
    return result


def _difference(record: dict[str, Any], row: dict[str, Any]) -> str:
    """The first column in which record and row differ; empty if there is none."""
    if record.keys() != row.keys():
        return "the topic's record has other fields"
    for name, value in row.items():
        got = record[name]
        # a numeric without a precision is a string in Avro
        if isinstance(value, Decimal) and isinstance(got, str):
            got = Decimal(got)
        if got != value:
            return f"{name} is {got!r} in the topic and {value!r} in the table"
    return ""
