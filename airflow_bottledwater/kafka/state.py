"""The two state topics, which are all the memory there is: facts, written in transactions, and status and control, not.

``_bottledwater.<database>.<slot>`` belongs to one slot, so that no other pipeline's open transaction hides our position.
``_bottledwater`` is shared and never transactional: a job that waits in a commit still sees ``stop``.
"""

from __future__ import annotations

import contextlib
import json
import time
import uuid
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from confluent_kafka import Consumer, KafkaError, KafkaException, Producer, TopicPartition

from airflow_bottledwater.encoding.names import mangle
from airflow_bottledwater.errors import Outage
from airflow_bottledwater.kafka.topics import Topics, client_config, errors, passes

CONTROL_TOPIC = "_bottledwater"
#: compacted, small segments, so that compaction follows soon
TOPIC_CONFIG = {"cleanup.policy": "compact", "segment.bytes": "16777216", "min.cleanable.dirty.ratio": "0.1"}

Facts = dict[str, dict[str, Any]]


def facts_topic(database: str, slot: str) -> str:
    """The topic of one slot's facts."""
    return f"_bottledwater.{mangle(database)}.{slot}"


def encode(value: dict[str, Any] | None) -> bytes | None:
    """A fact's bytes; None is a tombstone."""
    return None if value is None else json.dumps(value, separators=(",", ":")).encode()


def _consumer(config: Mapping[str, str], isolation: str) -> Consumer:
    return Consumer(
        {
            **client_config(config),
            # assigned by hand: no group is joined and nothing committed
            "group.id": f"bottledwater-{uuid.uuid4()}",
            "enable.auto.commit": False,
            "enable.partition.eof": True,
            "isolation.level": isolation,
            "auto.offset.reset": "earliest",
            "fetch.wait.max.ms": 100,
        }
    )


class Reader:
    """Folds a one-partition compacted topic into a dictionary, to its end and then on."""

    def __init__(self, config: Mapping[str, str], topic: str, *, committed: bool = True) -> None:
        self._config, self._topic = config, topic
        self._consumer = _consumer(config, "read_committed" if committed else "read_uncommitted")
        self._consumer.assign([TopicPartition(topic, 0, 0)])
        self._at = 0
        self.values: Facts = {}
        #: offset at which each key was last written
        self.offsets: dict[str, int] = {}

    def poll(self, timeout: float) -> list[tuple[str, dict[str, Any] | None]]:
        """What is new; waits at most ``timeout`` seconds for it."""
        changes = []
        with errors(self._config):
            # consume() would wait for all 1000 until its time is over
            first = self._consumer.poll(timeout)
            for message in [first, *self._consumer.consume(1000, 0)] if first is not None else []:
                error = message.error()
                if error is not None:
                    if error.code() == KafkaError._PARTITION_EOF:
                        self._at = max(self._at, message.offset())
                    elif not passes(error):
                        raise KafkaException(error)
                    continue
                self._at = max(self._at, message.offset() + 1)
                key = message.key().decode() if message.key() else ""
                value = json.loads(message.value()) if message.value() is not None else None
                if value is None:
                    self.values.pop(key, None)
                else:
                    self.values[key] = value
                self.offsets[key] = message.offset()
                changes.append((key, value))
        return changes

    def read_to(self, end: int, *, timeout: float, waiting: Callable[[str], None] | None = None) -> Facts:
        """Read until the offset ``end`` is passed.

        The end is a high watermark, not the last stable offset: what lies behind a foreign open transaction would be missed.

        :raises Outage: not within ``timeout`` seconds: a producer holds an open transaction in the topic.
        """
        deadline = time.monotonic() + timeout
        while self._at < end:
            self.poll(0.2)
            if self._at < end and time.monotonic() > deadline:
                raise Outage(
                    f"State topic {self._topic!r} could be read to offset {self._at} of {end} only: "
                    "a transaction in it is still open.",
                    "It ends with its producer's time-out; see who claims the slot with 'bottledwater status'.",
                )
            if waiting and self._at < end:
                waiting(f"reading state topic {self._topic!r}")
        return self.values

    def close(self) -> None:
        """Leave the topic."""
        self._consumer.close()


def read_facts(config: Mapping[str, str], topic: str, *, timeout: float = 90.0, committed: bool = True) -> Facts:
    """All facts of the topic up to its present end; nothing if there is no such topic."""
    with _reader(config, topic, timeout, committed) as reader:
        return {} if reader is None else reader.values


@contextlib.contextmanager
def _reader(config: Mapping[str, str], topic: str, timeout: float, committed: bool) -> Iterator[Reader | None]:
    topics = Topics(config)
    if topic not in topics.describe([topic]):
        yield None
        return
    end = topics.ends(topic, 1)[0]
    reader = Reader(config, topic, committed=committed)
    try:
        reader.read_to(end, timeout=timeout)
        yield reader
    finally:
        reader.close()


class Control:
    """The shared topic: heartbeats, owners of topics, requests. Written by an ordinary producer."""

    def __init__(self, config: Mapping[str, str]) -> None:
        self._config = config
        self._producer = Producer(
            {**config, "enable.idempotence": True, "linger.ms": 0, "log_level": "2", "message.timeout.ms": 10_000}
        )

    def write(self, key: str, value: dict[str, Any] | None, *, wait: float = 10.0) -> None:
        """Write one record; with ``wait`` until the broker has it.

        :raises Outage: it has not, in time.
        """
        failed: list[KafkaError] = []
        try:
            self._producer.produce(
                CONTROL_TOPIC,
                encode(value),
                key.encode(),
                partition=0,
                on_delivery=lambda error, _: failed.append(error) if error else None,
            )
        except BufferError:
            if wait:
                raise Outage("Kafka does not take our status records.") from None
            return
        if wait and (self._producer.flush(wait) or failed):
            raise Outage(f"Kafka did not take a control record: {failed[0].str() if failed else 'no answer'}.")
        self._producer.poll(0)

    def close(self) -> None:
        """Send what is left, for a moment."""
        self._producer.flush(2)
