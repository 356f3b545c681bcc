"""Finds where in a topic the changes below a position of the source end, and reads records between offsets."""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple, Self

from confluent_kafka import Consumer, KafkaError, KafkaException, Message, TopicPartition

from airflow_bottledwater.errors import Outage, StateError
from airflow_bottledwater.kafka.clients import errors, passes, reader_config
from airflow_bottledwater.kafka.topics import Topic
from airflow_bottledwater.model.lsn import Position

#: seconds without any answer after which the brokers count as away
_SILENCE = 30.0
#: seconds without a record for which a look goes on while the brokers are there: where compaction has removed the
#: records, the markers of their transactions are left, which can be gigabytes, and a consumer tells nothing of them
_MARKERS = 900.0
#: bytes of a look at a few records: a broker sends at least one batch of them, however large
_LOOK = 1 << 16
#: records of one call
_AT_ONCE = 5000


class _Found(NamedTuple):
    offset: int
    lsn: int


def headers_of(message: Message) -> dict[str, str]:
    """A record's headers; of several with one name, the last."""
    return {name: (value or b"").decode() for name, value in message.headers() or []}


def position_of(message: Message) -> Position | None:
    """The position of a change; None of a row of a snapshot, or one that was read again."""
    found = headers_of(message).get("pos", "")
    return Position.parse(found) if found.strip("0/") else None


class _Reader:
    """A consumer of committed records, which is a context manager."""

    def __init__(self, config: Mapping[str, str], **more: str) -> None:
        self._config = config
        with errors(config):
            self._consumer = Consumer(
                reader_config(
                    config,
                    enable_partition_eof="true",
                    isolation_level="read_committed",
                    auto_offset_reset="earliest",
                    fetch_wait_max_ms="100",
                    # when enough is waiting, librdkafka pauses for a second
                    fetch_queue_backoff_ms="5",
                    **more,
                )
            )

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._consumer.close()

    def _next(self, what: str) -> list[Message]:
        """The next records and ends of partitions.

        :raises Outage: the brokers do not answer for a while, or hold back what was asked for.
        """
        deadline = time.monotonic() + _SILENCE
        while time.monotonic() < deadline:
            with errors(self._config):
                first = self._consumer.poll(1.0)
                found = [] if first is None else [first, *self._consumer.consume(_AT_ONCE - 1, 0)]
                for message in found:
                    error = message.error()
                    if error is not None and error.code() != KafkaError._PARTITION_EOF and not passes(error):
                        raise KafkaException(error)
            found = [m for m in found if m.error() is None or m.error().code() == KafkaError._PARTITION_EOF]
            if found:
                return found
        raise Outage(
            f"Kafka at {self._config.get('bootstrap.servers', '?')} gives no more records of {what}: the brokers do "
            "not answer, or a transaction is open there.",
            "It is tried again.",
        )

    def _heard(self, topic: str, partition: int, end: int, deadline: float) -> list[Message]:
        """The next records; none where the broker answers, and has sent nothing but markers for a while.

        :param end: an offset of the partition up to which records are asked for.
        :param deadline: of the monotonic clock, after which that is no excuse any more.
        :raises Outage: the brokers do not answer, or a transaction is open before the end.
        """
        try:
            return self._next(f"topic {topic!r}")
        except Outage:
            with errors(self._config):
                # to a consumer of committed records, a partition ends before the first open transaction
                _, stable = self._consumer.get_watermark_offsets(TopicPartition(topic, partition), timeout=15.0)
            if stable < end or time.monotonic() > deadline:
                raise
            return []


class OffsetSearch(_Reader):
    """Searches topics for positions of the source. Per partition, changes are in the order of their positions; rows of
    snapshots lie between them."""

    def __init__(self, config: Mapping[str, str]) -> None:
        super().__init__(config, queued_min_messages="1", fetch_message_max_bytes=str(_LOOK))

    def find(self, topic: str, partition: int, start: int, end: int, lsn: int) -> int:
        """The offset of the first change between two offsets whose transaction's final LSN is not below ``lsn``;
        ``end`` if there is none.

        :param start: an offset before which all changes are below it.
        :param end: an offset before which every transaction is committed or aborted.
        :raises Outage: Kafka does not answer.
        """
        low, high, found = start, end, end
        # positions of this moment are near the end: look there first, then ever further back, then in the middle; and
        # behind a look that finds nothing, at the beginning, since each look into a long stretch of markers reads it
        # to its end
        back, empty = 1, False
        while low < high:
            at = max(low, end - back) if back else low if empty else (low + high) // 2
            change = self._first(topic, partition, at, high)
            empty = change is None
            if change is not None and change.lsn < lsn:
                low, back = change.offset + 1, 0
                continue
            found = found if change is None else change.offset
            high, back = at, back * 4
        return found

    def has_change(self, topic: str, partition: int, start: int, end: int) -> bool:
        """Whether there is a change between two offsets: rows of snapshots and the ends of transactions are none.

        :raises Outage: Kafka does not answer.
        """
        return start < end and self._first(topic, partition, start, end) is not None

    def _first(self, topic: str, partition: int, at: int, end: int) -> _Found | None:
        """The first change between two offsets."""
        self._consumer.assign([TopicPartition(topic, partition, at)])
        deadline = time.monotonic() + _MARKERS
        while True:
            for message in self._heard(topic, partition, end, deadline):
                # the offset of a partition's end also counts what is no record
                if (message.offset() or 0) >= end or message.error() is not None:
                    return None
                if (position := position_of(message)) is not None:
                    return _Found(message.offset() or 0, position.lsn)


class RangeReader(_Reader):
    """Reads records between offsets, each once."""

    @staticmethod
    def check(topic: str, topic_id: str, present: Mapping[str, Topic]) -> None:
        """Check that a topic is the one that offsets are of.

        :param present: the topics that exist.
        :raises StateError: it was deleted, or made again.
        """
        if topic not in present or present[topic].id != topic_id:
            raise StateError(
                f"Topic {topic!r} was deleted{' and made again' if topic in present else ''} before its records were "
                "read.",
                "What is missing is in the table: read it there, or publish it again by a backfill.",
            )

    def read(self, topic: str, start: Mapping[int, int], end: Mapping[int, int]) -> Iterator[Message]:
        """The committed records of some partitions, in order per partition.

        :raises StateError: records of the range were deleted before they were read.
        :raises Outage: Kafka does not answer, or a transaction stays open in the range.
        """
        waited_for = {partition for partition in start if start[partition] < end[partition]}
        for partition in waited_for:
            with errors(self._config):
                first, _ = self._consumer.get_watermark_offsets(TopicPartition(topic, partition), timeout=15.0)
            if first > start[partition]:
                raise StateError(
                    f"Topic {topic!r} begins at offset {first} of partition {partition}: its records from offset "
                    f"{start[partition]} on were deleted by its retention before they were read.",
                    "Give the topic a longer retention, or read it more often. What is missing is in the table: read "
                    "it there, or publish it again by a backfill.",
                )
        self._consumer.assign([TopicPartition(topic, partition, start[partition]) for partition in waited_for])
        deadline = time.monotonic() + _MARKERS
        while waited_for:
            left = next(iter(waited_for))
            for message in self._heard(topic, left, end[left], deadline):
                deadline = time.monotonic() + _MARKERS
                partition, offset = message.partition() or 0, message.offset() or 0
                if message.error() is None and offset < end[partition]:
                    yield message
                if offset + (message.error() is None) >= end[partition]:
                    waited_for.discard(partition)

    def last(self, topic: str, ends: Sequence[int], count: int) -> Iterator[Message]:
        """The last committed records of each partition, in order per partition; those behind an open transaction are
        left out.

        :param ends: per partition, its end.
        :param count: offsets of a partition that are looked at; some of them may be no records.
        :raises Outage: Kafka does not answer.
        """
        waited_for = {partition for partition, end in enumerate(ends) if end}
        self._consumer.assign([TopicPartition(topic, each, max(0, ends[each] - count)) for each in waited_for])
        while waited_for:
            for message in self._next(f"topic {topic!r}"):
                if message.error() is None:
                    yield message
                else:
                    waited_for.discard(message.partition() or 0)


def has_records(config: Mapping[str, str], topic: str, ends: Sequence[int]) -> bool:
    """Whether a topic has committed records: the offset of its end also counts what is none.

    :param ends: per partition, its end.
    :raises Outage: Kafka does not answer.
    """
    if not any(ends):
        return False
    with RangeReader(config) as reader:
        return any(True for _ in reader.last(topic, ends, max(ends)))
