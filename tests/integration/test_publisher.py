"""Records by the batch: more than librdkafka's queue holds, of several topics and kinds, one after the other."""

from __future__ import annotations

import contextlib
import os
import threading
import time
import uuid
from collections.abc import Callable, Generator, Iterator

import numpy as np
import pytest

from airflow_bottledwater.backoff import Backoff
from airflow_bottledwater.encoding import wire
from airflow_bottledwater.encoding.layout import RECORD
from airflow_bottledwater.kafka import librdkafka
from airflow_bottledwater.kafka.errors import RecordRefused
from airflow_bottledwater.kafka.publisher import Publisher, Records, single
from airflow_bottledwater.local.kafka import KafkaBroker
from tests.support.topics import Message, create_topic, read_all

_PARTITIONS = 3


@pytest.fixture
def topics(kafka: KafkaBroker) -> list[str]:
    names = [f"publisher.{uuid.uuid4().hex[:8]}.{i}" for i in range(2)]
    for name in names:
        create_topic({"bootstrap.servers": kafka.bootstrap}, name, partitions=_PARTITIONS, replication=1, config={})
    return names


@contextlib.contextmanager
def opened(
    kafka: KafkaBroker, topics: list[str], *, timeout: float = 20.0, **properties: str
) -> Generator[Publisher, None, None]:
    made = Publisher(
        {"bootstrap.servers": kafka.bootstrap, **{name.replace("_", "."): value for name, value in properties.items()}},
        f"bottledwater-{uuid.uuid4().hex}",
        topics,
        transaction_timeout=timeout,
        waiting=Backoff(20).wait,
    )
    made.open()
    yield made
    made.close()


@pytest.fixture
def publisher(kafka: KafkaBroker, topics: list[str]) -> Iterator[Publisher]:
    with opened(kafka, topics, message_max_bytes="100000") as made:
        yield made


def within(seconds: float, work: Callable[[], None]) -> None:
    """Do it in a thread, which is given up if it takes longer: what is broken would hang."""
    errors: list[BaseException] = []

    def run() -> None:
        try:
            work()
        except BaseException as error:
            errors.append(error)

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    thread.join(seconds)
    assert not thread.is_alive(), "it hangs"
    if errors:
        raise errors[0]


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


def test_many_topics_are_asked_for_at_once(kafka: KafkaBroker, monkeypatch: pytest.MonkeyPatch) -> None:
    """One after the other, thousands would take minutes where the broker is far away."""
    names = [f"publisher.{uuid.uuid4().hex[:8]}.{i}" for i in range(12)]
    for name in names:
        create_topic({"bootstrap.servers": kafka.bootstrap}, name, partitions=2, replication=1, config={})
    asked, ask = list[object](), librdkafka.metadata

    def metadata(handle: int, everything: int, rkt: object, *more: object) -> int:
        asked.append(rkt)
        return int(ask(handle, everything, rkt, *more))

    monkeypatch.setattr(librdkafka, "metadata", metadata)
    with opened(kafka, names) as publisher:
        # once for all, once more for the first; and for one that a broker does not know yet
        assert asked[0] is None and len(asked) <= 4
        with publisher.transaction():
            for i in range(len(names)):
                publisher.produce(single(i, 1, b'"k"', b'"v"'))
    found = read_all(kafka, names)
    assert [[(each.key, each.partition) for each in found[name]] for name in names] == [[('"k"', 1)]] * len(names)


@pytest.mark.some(1)
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


def test_a_transaction_that_was_begun_by_a_record_is_gone_on_with(
    kafka: KafkaBroker, publisher: Publisher, topics: list[str]
) -> None:
    first, second = (single(0, 0, key, b"1") for key in (b"1", b"2"))
    publisher.begin(first)
    assert publisher.begun
    with publisher.transaction():
        publisher.produce(second)
    assert not publisher.begun
    with publisher.transaction():
        publisher.produce(second)
    assert [m.key for m in read_all(kafka, topics)[topics[0]]] == ["1", "2", "2"]


def test_a_transaction_that_was_begun_and_given_up_keeps_nobody_waiting(
    kafka: KafkaBroker, publisher: Publisher, topics: list[str]
) -> None:
    publisher.begin(single(0, 0, b"1", b"1"))
    publisher.drain()  # the broker has it
    publisher.close()
    with opened(kafka, topics) as other, other.transaction():
        other.produce(single(0, 0, b"2", b"2"))
    assert [m.key for m in read_all(kafka, topics)[topics[0]]] == ["2"]


def test_a_full_queue_without_a_complete_batch_is_sent_at_once(kafka: KafkaBroker, topics: list[str]) -> None:
    """The records of six partitions fill the queue before one of them has a batch, which would be waited for."""
    records = numbered(30_000)
    with opened(kafka, topics, timeout=600, linger_ms="300000") as publisher:

        def publish() -> None:
            with publisher.transaction():
                publisher.produce(records)

        within(60, publish)
    found = read_all(kafka, topics)
    assert sum(len(messages) for messages in found.values()) == len(records)


def test_a_record_that_is_larger_than_two_batches_has_room_in_the_queue(kafka: KafkaBroker) -> None:
    topic = f"publisher.{uuid.uuid4().hex[:8]}"
    create_topic(
        {"bootstrap.servers": kafka.bootstrap},
        topic,
        partitions=1,
        replication=1,
        config={"max.message.bytes": "5000000"},
    )
    text = os.urandom(2_000_000).hex()
    with opened(kafka, [topic], message_max_bytes="5000000") as publisher:

        def publish() -> None:
            with publisher.transaction():
                for number in (b"1", b"2", b"3"):
                    publisher.produce(single(0, 0, number, f'"{text}"'.encode()))

        within(60, publish)
    assert [(m.key, m.value) for m in read_all(kafka, [topic])[topic]] == [(key, text) for key in "123"]


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
