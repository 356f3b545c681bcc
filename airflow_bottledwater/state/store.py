"""The two state topics, which hold all that a pipeline remembers: a slot's records, which are written in transactions,
and status and requests, which are not.

``_bottledwater.<database>.<slot>`` belongs to one slot, so that no other pipeline's open transaction hides its
position. ``_bottledwater`` is shared by all pipelines and never written in transactions: a job that waits in a commit
still sees a request to stop.
"""

from __future__ import annotations

import json
import logging
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from confluent_kafka import Consumer, KafkaError, KafkaException, Message, TopicPartition

from airflow_bottledwater.encoding.names import mangle
from airflow_bottledwater.errors import LOST_STATE, Outage, StateError
from airflow_bottledwater.kafka.clients import altering, errors, made, passes, reader_config
from airflow_bottledwater.kafka.topics import HOUR, NewTopic, Topic, Topics, small_segments
from airflow_bottledwater.model.problem import Problem

log = logging.getLogger(__name__)

CONTROL_TOPIC = "_bottledwater"

#: for how long compaction leaves tombstones in a slot's topic, and the marker that each Kafka transaction ends with.
#: Kafka's day of markers is 1.3 GB at 200 commits a second, all of which is read by whoever asks for the saved state.
#: An hour is enough: who has read a record has to come to its tombstone within that time. A reading lasts for
#: transaction_timeout (15 minutes at most) and 30 seconds, and who reads on later does so for READ_ON seconds only
MARKERS = {"delete.retention.ms": str(HOUR)}
#: seconds since a reading has begun that came to the end, after which the next one begins at the topic's start again
READ_ON = 600.0


def new_topic(name: str, replication: int) -> NewTopic:
    """A state topic to create: compacted, with small segments, so that it is compacted soon and stays quick to read.
    Those of the shared topic are the smallest that Kafka allows (segment.bytes,
    https://kafka.apache.org/documentation/#topicconfigs): it consists of heartbeats, and whoever asks for one status
    reads all of them.

    The configurations are tried in order, since some managed Kafkas allow none of these settings, or other values.
    """
    compact = {"cleanup.policy": "compact", **({"min.insync.replicas": "2"} if replication >= 3 else {})}
    # in the shared topic, tombstones stay for Kafka's day: each finished job leaves one, which everybody reads, and who
    # was away for longer reads from the start
    kept = MARKERS if name.startswith(f"{CONTROL_TOPIC}.") else {}
    soon = {**compact, **kept, "min.cleanable.dirty.ratio": "0.1"}
    configs = (
        *([{**soon, "segment.bytes": "1048576"}] if name == CONTROL_TOPIC else []),
        *small_segments(soon),
        *small_segments(compact)[1:],
        compact,
        *([{"cleanup.policy": "compact"}] if replication >= 3 else []),
    )
    return NewTopic(name, 1, replication, configs)


def unfit(kafka: Mapping[str, str], topic: Topic) -> Problem | None:
    """Why an existing topic cannot hold state records; None if it can, or if its settings may not be read.

    With the clean-up policy ``delete``, even together with ``compact``, the oldest records expire after the retention
    time: the claim, the slot and the plans, which are written only once.
    """
    if not topic.cleanup or topic.cleanup.replace(" ", "") == "compact":
        return None  # further partitions, which cannot be taken back, do no harm: all records are in the first one
    return Problem(
        "expiry",
        f"State topic {topic.name!r}",
        f"Has cleanup.policy={topic.cleanup}: what is written once (claims, positions, plans) would expire.",
        f"Set it: {altering(kafka, topic.name, 'cleanup.policy=compact')}",
    )


RawRecords = dict[str, dict[str, Any]]


def state_topic_name(database: str, slot: str) -> str:
    """The topic of one slot's records."""
    return f"_bottledwater.{mangle(database)}.{slot}"


def encode(value: dict[str, Any] | None) -> bytes | None:
    """The bytes of a record's value; None is a tombstone."""
    return None if value is None else json.dumps(value, separators=(",", ":")).encode()


def _decode(key: bytes | None, value: bytes | None) -> tuple[str, dict[str, Any] | None]:
    """Key and value of a record.

    :raises ValueError: it is not a record of this package.
    """
    name = key.decode() if key else ""
    found = json.loads(value) if value is not None else None
    if found is not None and not isinstance(found, dict):
        raise ValueError(f"its value is a JSON {type(found).__name__}, not an object")
    return name, found


#: milliseconds for which a broker keeps back the answer that there are no more records: of one who goes on listening,
#: so that it is not asked too often, and of one who only reads to the end
_LISTENING, _READING = "100", "20"


#: of one who goes on listening to the shared topic: behind an answer with records, for so many milliseconds none are
#: fetched. Otherwise each record would be an answer of its own, to each of hundreds of jobs
_SHARED = {"queued_min_messages": "1", "fetch_queue_backoff_ms": "100"}


class Reader:
    """Reads a compacted topic of one partition into a dictionary, up to its end and beyond as records arrive.

    Other programs may write to the shared topic: malformed records there are skipped, with one warning. In a slot's own
    topic they are an error.

    :param committed: whether only committed records are read.
    :param listens: whether it is asked again and again; False: it is read to its end once, for the last record of each
        key.
    :param begin: the offset that it begins at; ``values`` are the records before it.
    :ivar at: the offset behind the last record that was read.
    """

    def __init__(
        self,
        config: Mapping[str, str],
        topic: str,
        *,
        committed: bool = True,
        listens: bool = True,
        begin: int = 0,
        values: Mapping[str, dict[str, Any]] | None = None,
    ) -> None:
        self._config, self._topic, self._listens = config, topic, listens
        self._warned = False
        #: whether what is behind ``at`` may not be read yet
        self._ended = False
        more = {
            "enable_partition_eof": "true",
            "isolation_level": "read_committed" if committed else "read_uncommitted",
            "auto_offset_reset": "earliest",
            "fetch_wait_max_ms": _LISTENING if listens else _READING,
            **(_SHARED if listens and topic == CONTROL_TOPIC else {}),
        }
        self._consumer = made(Consumer, reader_config(config, **more))
        self._consumer.assign([TopicPartition(topic, 0, begin)])
        self.at, self.values = begin, dict(values or {})

    def poll(self, timeout: float) -> list[tuple[str, dict[str, Any] | None]]:
        """The records that have arrived since the last call, as key and value (None for a tombstone); waits at most
        ``timeout`` seconds for the first.

        :raises StateError: a record in a slot's own topic is malformed.
        """
        changes = []
        arrived: dict[object, Message] = {}
        at = self.at
        with errors(self._config):
            # consume() alone would wait for 1000 records or its time-out
            first = self._consumer.poll(timeout)
            for message in [first, *self._consumer.consume(1000, 0)] if first is not None else []:
                error = message.error()
                if error is not None:
                    if error.code() == KafkaError._PARTITION_EOF:
                        at, self._ended = max(at, message.offset()), True
                    elif not passes(error):
                        raise KafkaException(error)
                    continue
                at, self._ended = max(at, message.offset() + 1), False
                # read once, most records are heartbeats before others, which need not be decoded; who listens has to
                # hear each: behind one that ends a job, there may be another heartbeat of it
                named = message.offset() if self._listens else message.key()
                arrived.pop(named, None)
                arrived[named] = message
        for message in arrived.values():
            try:
                key, value = _decode(message.key(), message.value())
            except ValueError as wrong:
                self._malformed(message.offset(), wrong)
                continue
            self.values.pop(key, None)  # they are in the order of their offsets, by which a topic has its owner
            if value is not None:
                self.values[key] = value
            changes.append((key, value))
        self.at = at
        return changes

    def _malformed(self, offset: int, error: ValueError) -> None:
        if self._topic != CONTROL_TOPIC:
            raise StateError(
                f"The record at offset {offset} of state topic {self._topic!r} is not one of ours: {error}.",
                "Find out who else writes to this topic, and revoke that right. Then stop the job and delete the "
                f"topic: the saved state is lost with it. {LOST_STATE}",
            )
        if not self._warned:
            log.warning(
                "Records of topic %r that are not ours are left out; the first is at offset %d.", self._topic, offset
            )
            self._warned = True

    def read_to(self, end: int, *, timeout: float) -> RawRecords:
        """Read until the offset ``end`` is passed.

        The end should be the high watermark, not the last stable offset, or records after another producer's open
        transaction would be missed; unless it is enough to know a moment before it.

        :raises Outage: it is not passed within ``timeout`` seconds: a producer holds an open transaction in the topic,
            or there is too much to read.
        """
        deadline = time.monotonic() + timeout
        while self.at < end:
            self.poll(0.2)
            if self.at < end and time.monotonic() > deadline:
                read = f"State topic {self._topic!r} could be read to offset {self.at} of {end} only"
                if self._ended:
                    raise Outage(
                        f"{read}: a transaction in it is still open.",
                        "It ends with its producer's time-out; see who claims the slot with 'bottledwater status'.",
                    )
                hour = altering(self._config, self._topic, f"delete.retention.ms={HOUR}")
                raise Outage(
                    f"{read}: there was no time for more within {timeout:g} s.",
                    "It is tried again. By itself, Kafka keeps the end of each transaction in a topic for a day; so "
                    f"that this one keeps it for an hour, run: {hour}",
                )
        return self.values

    def close(self) -> None:
        """Close the consumer."""
        self._consumer.close()


def gone(topic: str) -> StateError:
    """The error of a state topic that does not exist any more."""
    return StateError(f"State topic {topic!r} does not exist any more.", LOST_STATE)


def topic_id(config: Mapping[str, str], topic: str) -> str:
    """Kafka's id of a state topic.

    :raises StateError: the topic does not exist.
    :raises Outage: Kafka does not answer.
    """
    if (found := Topics(config).describe([topic], confirm=True).get(topic)) is None:
        raise gone(topic)
    return found.id


class _Reached(NamedTuple):
    """How far a topic was read.

    :param topic_id: Kafka's id of the topic; empty if it was not read.
    :param since: when the last reading began that came to the end, on the clock of :func:`time.monotonic`.
    """

    topic_id: str = ""
    at: int = 0
    since: float = 0.0
    values: Mapping[str, dict[str, Any]] = {}

    def follows(self, topic_id: str, end: int) -> bool:
        """Whether a reading can begin here: the topic is the same, and has the tombstones of all that was read."""
        return topic_id == self.topic_id and self.at <= end and time.monotonic() - self.since < READ_ON


@dataclass
class Kept:
    """What was read of a topic, for who asks for its records again and again: the next reading goes on from there.

    :param waits: whether a reading waits for transactions that are open, instead of ending before them.
    """

    reached: _Reached = field(default_factory=_Reached)
    waits: bool = True


def read_records(
    config: Mapping[str, str],
    topic: str,
    *,
    timeout: float = 90.0,
    committed: bool = True,
    admin: Topics | None = None,
    must_exist: bool = False,
    kept: Kept | None = None,
) -> RawRecords:
    """All records of the topic up to its present end; none if there is no such topic.

    :param timeout: seconds for reading to the end.
    :param committed: whether only committed records are read.
    :param admin: the caller's admin client, if it has one.
    :param must_exist: whether a missing topic is an error.
    :param kept: where this reading of committed records begins, if it can, and the next one goes on.
    :raises StateError: the topic must exist and does not, or a record in it is malformed.
    :raises Outage: the end is not reached in time.
    """
    topics, kept = admin or Topics(config), kept or Kept()
    if (found := topics.describe([topic], confirm=True).get(topic)) is None:
        if must_exist:
            raise gone(topic)
        return {}
    end, began = topics.ends(topic, 1, committed=not kept.waits)[0], time.monotonic()
    before = kept.reached if kept.reached.follows(found.id, end) else _Reached(found.id, since=began)
    if before.at == end:
        kept.reached = before._replace(since=began)
        return dict(before.values)
    reader = Reader(config, topic, committed=committed, listens=False, begin=before.at, values=before.values)
    try:
        reader.read_to(end, timeout=timeout)
        before = before._replace(since=began)
        return dict(reader.values)
    finally:
        reader.close()
        kept.reached = before._replace(at=reader.at, values=reader.values)
