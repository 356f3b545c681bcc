"""How much of a slot's state topic is read."""

from __future__ import annotations

import uuid
from collections.abc import Callable
from typing import Any

import pytest
from confluent_kafka import Producer

from airflow_bottledwater.errors import Outage
from airflow_bottledwater.kafka.topics import Topics
from airflow_bottledwater.local.kafka import KafkaBroker
from airflow_bottledwater.state import store

Write = Callable[..., None]


@pytest.fixture
def kafka_config(kafka: KafkaBroker) -> dict[str, str]:
    return {"bootstrap.servers": kafka.bootstrap}


@pytest.fixture
def topic(kafka_config: dict[str, str]) -> str:
    name = store.state_topic_name("d", uuid.uuid4().hex)
    Topics(kafka_config).make(store.new_topic(name, 1))
    return name


@pytest.fixture
def write(kafka_config: dict[str, str], topic: str) -> Write:
    """Writes records in one transaction, which is left open if ``commit`` is False."""
    producers = list[Producer]()

    def written(*records: tuple[str, dict[str, Any] | None], commit: bool = True) -> None:
        producers.append(producer := Producer({**kafka_config, "transactional.id": topic}))
        producer.init_transactions()
        producer.begin_transaction()
        for key, value in records:
            producer.produce(topic, key=key, value=store.encode(value))
        producer.flush()
        if commit:
            producer.commit_transaction()

    return written


@pytest.fixture
def begun(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The offsets at which readings begin."""
    found, original = list[int](), store.Reader.__init__

    def init(self: store.Reader, *of: Any, begin: int = 0, **keywords: Any) -> None:
        found.append(begin)
        original(self, *of, begin=begin, **keywords)

    monkeypatch.setattr(store.Reader, "__init__", init)
    return found


def test_who_asks_again_reads_what_is_new(
    kafka_config: dict[str, str], topic: str, write: Write, begun: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    kept = store.Kept()

    def read() -> store.RawRecords:
        return store.read_records(kafka_config, topic, kept=kept)

    write(("a", {"v": 1}), ("b", {"v": 2}))
    first = read()
    assert first == {"a": {"v": 1}, "b": {"v": 2}} and begun == [0]
    first.clear()
    assert read() == {"a": {"v": 1}, "b": {"v": 2}} and begun == [0], "nothing is new"
    # two records and the marker of the commit
    write(("a", None), ("c", {"v": 3}))
    assert read() == {"b": {"v": 2}, "c": {"v": 3}} and begun == [0, 3]
    # so long ago that compaction may have removed the tombstone of what was read
    monkeypatch.setattr(store, "READ_ON", 0.0)
    assert read() == {"b": {"v": 2}, "c": {"v": 3}} and begun == [0, 3, 0]


def test_a_topic_that_was_made_again_is_read_from_its_start(
    kafka_config: dict[str, str], topic: str, write: Write, begun: list[int]
) -> None:
    kept = store.Kept()
    write(("a", {"v": 1}))
    assert store.read_records(kafka_config, topic, kept=kept) == {"a": {"v": 1}}
    topics = Topics(kafka_config)
    topics._admin.delete_topics([topic])[topic].result()
    assert store.read_records(kafka_config, topic, kept=kept) == {}
    topics.make(store.new_topic(topic, 1))
    write(("b", {"v": 2}), ("c", {"v": 3}))
    assert store.read_records(kafka_config, topic, kept=kept) == {"b": {"v": 2}, "c": {"v": 3}}
    assert begun == [0, 0]


def test_a_reading_that_had_too_little_time_is_no_open_transaction_and_is_gone_on_with(
    kafka_config: dict[str, str], topic: str, write: Write, begun: list[int]
) -> None:
    kept, many = store.Kept(), [(f"k{number}", {"v": number}) for number in range(5000)]
    write(*many)
    with pytest.raises(Outage, match=r"no time for more within 0 s.*delete.retention.ms=3600000"):
        store.read_records(kafka_config, topic, timeout=0.0, kept=kept)
    assert store.read_records(kafka_config, topic, kept=kept) == dict(many)
    assert begun[0] == 0 < begun[1] < 5000
    write(("open", {"v": 0}), commit=False)
    with pytest.raises(Outage, match="a transaction in it is still open"):
        store.read_records(kafka_config, topic, timeout=1.0, kept=kept)
