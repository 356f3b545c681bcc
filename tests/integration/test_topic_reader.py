"""A topic in blocks, compared with what a consumer gives record by record."""

from __future__ import annotations

import random
import time

import pytest
from confluent_kafka import Producer
from confluent_kafka.admin import AdminClient, NewTopic

from airflow_bottledwater.backoff import Backoff
from airflow_bottledwater.errors import Outage, Refused
from airflow_bottledwater.kafka import topic_reader
from airflow_bottledwater.kafka.topic_reader import blocks
from airflow_bottledwater.kafka.topics import Topics
from airflow_bottledwater.local.kafka import KafkaBroker
from tests.support.scan import scan


@pytest.fixture(scope="module")
def topic(kafka: KafkaBroker) -> str:
    """Committed and aborted transactions in three partitions of which one stays empty."""
    name = f"blocks-{random.randrange(10**9)}"
    admin = AdminClient({"bootstrap.servers": kafka.bootstrap})
    admin.create_topics([NewTopic(name, 3, 1)])[name].result()
    producer = Producer({"bootstrap.servers": kafka.bootstrap, "transactional.id": name})
    producer.init_transactions()
    chance = random.Random(7)
    for i in range(60):
        producer.begin_transaction()
        for _ in range(chance.randrange(1, 400)):
            key = None if chance.random() < 0.1 else b"k" * chance.randrange(40) + b"%d" % chance.randrange(99)
            value = chance.choice([None, b"", b"value" * chance.randrange(50)])
            producer.produce(name, value, key, partition=chance.randrange(2), headers={"pos": b"%d" % i})
        # an abort of what was not sent yet may be refused by the broker (librdkafka's issue 4849)
        producer.flush()
        producer.commit_transaction() if i % 3 else producer.abort_transaction()
    # the topic's end is no record
    producer.begin_transaction()
    producer.produce(name, b"aborted", b"last", partition=0)
    producer.flush()
    producer.abort_transaction()
    return name


def test_blocks_have_what_a_consumer_gives(kafka: KafkaBroker, topic: str) -> None:
    config = {"bootstrap.servers": kafka.bootstrap}
    ends = Topics(config).ends(topic, 3)
    assert ends[2] == 0
    wanted = [(m.partition(), m.offset(), m.key() or b"", m.value(), m.headers()) for m in scan(config, topic, ends)]
    found = []
    for block in blocks(config, topic, ends, Backoff(30)):
        for i, message in enumerate(block.messages):
            assert (message["payload"] == 0) <= (message["len"] == 0)
            value = None if message["payload"] == 0 else int(message["len"])
            header = block.header(i, "pos")
            assert block.header(i, "other") is None
            found.append((int(message["partition"]), int(message["offset"]), block.key(i), value, header))
    assert len(wanted) > 5000
    assert sorted(found) == sorted(
        [(p, o, key, None if value is None else len(value), headers[0][1]) for p, o, key, value, headers in wanted],
        key=lambda row: row[:2],
    )


def test_only_what_lies_below_the_ends_is_given(kafka: KafkaBroker, topic: str) -> None:
    config = {"bootstrap.servers": kafka.bootstrap}
    whole = {(m.partition(), m.offset()) for m in scan(config, topic, Topics(config).ends(topic, 3))}
    read = [
        (int(m["partition"]), int(m["offset"]))
        for b in blocks(config, topic, [777, 20, 0], Backoff(30))
        for m in b.messages
    ]
    assert len(read) == len(set(read))
    assert set(read) == {(p, o) for p, o in whole if o < [777, 20, 0][p]}
    assert list(blocks(config, topic, [0, 0, 0], Backoff(30))) == []


def test_partitions_that_were_added_since_are_read_from_their_beginning(kafka: KafkaBroker, topic: str) -> None:
    config = {"bootstrap.servers": kafka.bootstrap}
    ends = Topics(config).ends(topic, 3)
    whole = {(m.partition(), m.offset()) for m in scan(config, topic, ends)}
    read = {
        (int(m["partition"]), int(m["offset"]))
        for b in blocks(config, topic, ends, Backoff(30), start=[777])
        for m in b.messages
    }
    assert read == {(p, o) for p, o in whole if p or o >= 777}


def test_a_reader_may_end_before_the_topic_does(kafka: KafkaBroker, topic: str) -> None:
    config = {"bootstrap.servers": kafka.bootstrap}
    read = blocks(config, topic, Topics(config).ends(topic, 3), Backoff(30))
    assert next(b for b in read if len(b)).key(0) is not None
    started = time.monotonic()
    read.close()
    assert time.monotonic() - started < 20


def test_brokers_that_are_away_are_an_outage(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(topic_reader, "_SILENCE", 1.0)
    with pytest.raises(Outage, match="gives no more records of topic 'a'"):
        for block in blocks({"bootstrap.servers": "127.0.0.1:9", "log_level": "0"}, "a", [5], Backoff(2)):
            # whoever reads can end meanwhile
            assert not len(block)


def test_a_transaction_that_is_open_is_waited_for(
    kafka: KafkaBroker, topic: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of another pipeline that shares the topic; its records are below the end already."""
    monkeypatch.setattr(topic_reader, "_SILENCE", 1.0)
    config = {"bootstrap.servers": kafka.bootstrap}
    producer = Producer({**config, "transactional.id": f"{topic}-other"})
    producer.init_transactions()
    producer.begin_transaction()
    producer.produce(topic, b"late", b"late", partition=0)
    producer.flush()
    waited: list[str] = []

    def report(message: str) -> None:
        if not waited:
            producer.commit_transaction()
        waited.append(message)

    ends = Topics(config).ends(topic, 3)
    keys = [
        block.key(i) for block in blocks(config, topic, ends, Backoff(30, report=report)) for i in range(len(block))
    ]
    assert b"late" in keys
    assert waited and "a transaction is open there" in waited[0]


def test_a_property_that_is_none_is_refused() -> None:
    with pytest.raises(Refused, match="does not accept a property"):
        next(blocks({"bootstrap.servers": "127.0.0.1:9", "socket.mss": "1"}, "a", [5], Backoff(5)))
