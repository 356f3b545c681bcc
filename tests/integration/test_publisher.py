"""Records by the batch: more than librdkafka's queue holds, of several topics and kinds, one after the other."""

from __future__ import annotations

import time
import uuid
from collections.abc import Iterator

import numpy as np
import pytest

from airflow_bottledwater.backoff import Backoff
from airflow_bottledwater.encoding import wire
from airflow_bottledwater.encoding.layout import RECORD
from airflow_bottledwater.kafka.errors import RecordRefused
from airflow_bottledwater.kafka.publisher import Publisher, Records
from airflow_bottledwater.kafka.topics import Topics
from airflow_bottledwater.local.kafka import KafkaBroker
from tests.support.topics import Message, read_all

_PARTITIONS = 3


@pytest.fixture
def topics(kafka: KafkaBroker) -> list[str]:
    admin = Topics({"bootstrap.servers": kafka.bootstrap})
    names = [f"publisher.{uuid.uuid4().hex[:8]}.{i}" for i in range(2)]
    for name in names:
        admin.create(name, partitions=_PARTITIONS, replication=1, config={})
    return names


@pytest.fixture
def publisher(kafka: KafkaBroker, topics: list[str]) -> Iterator[Publisher]:
    made = Publisher(
        {"bootstrap.servers": kafka.bootstrap, "message.max.bytes": "100000"},
        f"bottledwater-{uuid.uuid4().hex}",
        topics,
        transaction_timeout=20,
        waiting=Backoff(20).wait,
    )
    made.open()
    yield made
    made.close()


def numbered(count: int, *, headers: int = 0) -> Records:
    """Records of ascending numbers: runs of one topic, some without a key or value, some with a time."""
    texts = [str(i).encode() for i in range(count)]
    table = np.zeros(count, dtype=RECORD)
    numbers = np.arange(count)
    lengths = np.array([len(t) for t in texts])
    table["key"] = table["value"] = np.cumsum(lengths) - lengths
    table["key_length"] = np.where(numbers % 11 == 0, -1, lengths)
    table["value_length"] = np.where(numbers % 13 == 0, -1, lengths)
    table["topic"] = numbers // 700 % 2
    table["partition"] = numbers // 5 % _PARTITIONS
    table["time"] = np.where(numbers % 1000 == 999, 1_700_000_000_000 + numbers, 0)
    table["event"] = ord("c")
    table["lsn"] = numbers
    return Records(table, np.frombuffer(bytearray(b"".join(texts)), dtype=np.uint8), headers)


def expected(records: Records, topic: int, partition: int) -> list[tuple[str | None, int | None]]:
    data = records.data.tobytes()

    def text(row: np.void, at: str, length: str) -> str | None:
        return data[row[at] : row[at] + row[length]].decode() if row[length] >= 0 else None

    rows = [r for r in records.table if (r["topic"], r["partition"]) == (topic, partition)]
    values = [text(r, "value", "value_length") for r in rows]
    keys = [text(r, "key", "key_length") for r in rows]
    return [(key, None if value is None else int(value)) for key, value in zip(keys, values, strict=True)]


def of(messages: list[Message], partition: int) -> list[Message]:
    return sorted((m for m in messages if m.partition == partition), key=lambda m: m.offset)


@pytest.mark.parametrize("headers", [0, wire.HEADERS])
def test_more_records_than_the_queue_holds_come_whole_and_in_order(
    kafka: KafkaBroker, publisher: Publisher, topics: list[str], headers: int
) -> None:
    records = numbered(120_000, headers=headers)
    before = int(time.time() * 1000)
    with publisher.transaction():
        publisher.produce(records)
    found = read_all(kafka, topics)
    for topic, name in enumerate(topics):
        for partition in range(_PARTITIONS):
            messages = of(found[name], partition)
            assert [(m.key, m.value) for m in messages] == expected(records, topic, partition)
            for message in messages:
                number = message.value if message.value is not None else message.key
                timed = number is not None and int(number) % 1000 == 999
                assert message.timestamp == 1_700_000_000_000 + int(number) if timed else message.timestamp >= before
                assert bool(message.pos) == bool(headers)


def test_a_record_that_is_refused_among_others_is_named_and_nothing_of_them_is_visible(
    kafka: KafkaBroker, publisher: Publisher, topics: list[str]
) -> None:
    records = numbered(2_000)
    data = np.concatenate([records.data, np.full(200_000, ord("1"), dtype=np.uint8)])
    records.table[1_234]["value"] = records.data.size
    records.table[1_234]["value_length"] = 200_000
    with pytest.raises(RecordRefused) as refused, publisher.transaction():
        publisher.produce(Records(records.table, data, 0))
    assert refused.value.record == 1_234
    assert read_all(kafka, topics) == {name: [] for name in topics}
