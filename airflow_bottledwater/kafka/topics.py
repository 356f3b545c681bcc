"""Topics: describes those that exist, and creates those that do not; the broker's auto-creation is never used."""

from __future__ import annotations

import contextlib
import ctypes
import functools
import json
import os
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TypeVar

import confluent_kafka.admin
import confluent_kafka.cimpl
from confluent_kafka import IsolationLevel, KafkaError, KafkaException, TopicCollection, TopicPartition
from confluent_kafka.admin import AclOperation, AdminClient, ConfigResource, OffsetSpec, ResourceType, TopicDescription

from airflow_bottledwater.errors import Outage, Refused
from airflow_bottledwater.kafka.clients import (
    GRANT,
    Heard,
    client_config,
    errors,
    hear,
    made,
)

#: the broker's default of max.message.bytes, assumed if the topic's settings may not be read
DEFAULT_MAX_BYTES = 1_048_588
#: seconds until a request is given up; those that can be repeated without harm are sent again after some
_TIMEOUT, _ATTEMPT = 15.0, 5.0
#: topics that are created by one request, so that it does not exceed the time-out
_AT_ONCE = 200
#: seconds for which a topic must be unknown until it is considered missing
_CONFIRM = 2.0

T = TypeVar("T")

#: milliseconds of an hour, and of more than anything lasts, to which the time of today can be added
HOUR, FOR_EVER = 3_600_000, 2**62
#: how many milliseconds a record's time may lie before and behind the time of publishing to become its timestamp
CommitTimes = tuple[int, int]
NO_COMMIT_TIMES: CommitTimes = (-1, -1)


@dataclass(frozen=True, slots=True)
class Topic:
    """A topic as the broker describes it, and what the client's principal may do with it.

    :param id: Kafka's id of the topic, which changes if it is deleted and created anew.
    :param max_bytes: its max.message.bytes.
    :param cleanup: its cleanup.policy; empty if its settings may not be read.
    :param retention_ms: its retention.ms and retention.bytes, which only the policy ``delete`` looks at; -1 for ever.
    :param timestamps: its message.timestamp.type; empty if its settings may not be read.
    :param before_ms: its message.timestamp.before.max.ms and message.timestamp.after.max.ms: how far a timestamp may
        lie before and behind the broker's clock.
    """

    name: str
    id: str
    partitions: int
    max_bytes: int
    cleanup: str
    may_read: bool
    may_write: bool
    retention_ms: int = -1
    retention_bytes: int = -1
    timestamps: str = "CreateTime"
    before_ms: int = FOR_EVER
    after_ms: int = HOUR

    @property
    def known(self) -> bool:
        """Whether its settings may be read; otherwise the broker's defaults are assumed."""
        return bool(self.cleanup)

    @property
    def by_time(self) -> bool:
        """Whether it deletes records by their timestamps; also if its settings may not be read, since that is the
        broker's default."""
        return not self.cleanup or ("delete" in self.cleanup and self.retention_ms >= 0)

    @property
    def expires(self) -> bool:
        """Whether it deletes records by their age or by the topic's size, so also those of rows that do not change."""
        return "delete" in self.cleanup and (self.retention_ms >= 0 or self.retention_bytes >= 0)

    @property
    def commit_times(self) -> CommitTimes:
        """Which commit times may be timestamps of its records: those that the broker neither replaces, nor deletes by,
        nor refuses. Since its clock is another one, and records wait, a tenth of what it allows is left out."""
        if self.timestamps != "CreateTime" or self.by_time:
            return NO_COMMIT_TIMES
        return self.before_ms - self.before_ms // 10, min(HOUR, self.after_ms - self.after_ms // 10)


@dataclass(frozen=True, slots=True)
class NewTopic:
    """A topic to create.

    :param configs: alternatives, of which the first that the broker accepts is used: managed Kafkas restrict the range
        of some properties, or do not allow them at all.
    """

    name: str
    partitions: int
    replication: int
    configs: tuple[Mapping[str, str], ...]


#: for how long a compacted topic keeps the tombstone of a deleted key, so that a reader who was away learns of it: a
#: week, instead of Kafka's day. A consumer group that was away for longer has lost its place anyway (the default of
#: offsets.retention.minutes), and the topic keeps the marker of each Kafka transaction for as long
TOMBSTONES = {"delete.retention.ms": str(7 * 24 * HOUR)}


def small_segments(config: Mapping[str, str]) -> tuple[dict[str, str], ...]:
    """A topic's configuration with segments of 16 MiB; and with 50 MiB, since some managed Kafkas allow no smaller ones
    (Confluent Cloud: segment.bytes is at least 52428800,
    https://docs.confluent.io/cloud/current/topics/manage.html)."""
    return tuple({**config, "segment.bytes": size} for size in ("16777216", "52428800"))


#: errors after which the next configuration is tried: INVALID_CONFIG and POLICY_VIOLATION of
#: https://kafka.apache.org/protocol#protocol_error_codes
_OF_THE_CONFIGURATION = {KafkaError.INVALID_CONFIG, KafkaError.POLICY_VIOLATION}
#: permanent errors that a broker answers to CreateTopics, and what the reader can do
_REFUSALS_TO_CREATE = {
    KafkaError.INVALID_CONFIG: "Check topic_config, and which topic properties this Kafka allows.",
    KafkaError.POLICY_VIOLATION: "The cluster has a policy for new topics: check partitions, replication_factor "
    "and topic_config.",
    KafkaError.INVALID_REPLICATION_FACTOR: "Check replication_factor, and how many brokers are running.",
    KafkaError.INVALID_PARTITIONS: "Check the setting partitions.",
    KafkaError.TOPIC_EXCEPTION: "Use another topic_prefix.",
    KafkaError.TOPIC_AUTHORIZATION_FAILED: GRANT,
    KafkaError.CLUSTER_AUTHORIZATION_FAILED: GRANT,
}


@functools.cache
def _partitioner() -> Callable[..., int]:
    """rd_kafka_msg_partitioner_murmur2 of rdkafka.h."""
    found = ctypes.CDLL(confluent_kafka.cimpl.__file__).rd_kafka_msg_partitioner_murmur2
    found.argtypes = [ctypes.c_void_p, ctypes.c_char_p, ctypes.c_size_t, ctypes.c_int32, *[ctypes.c_void_p] * 2]
    return found


def partition_of(key: bytes, count: int) -> int:
    """The partition of a key among so many, as the default partitioner of Kafka's Java clients chooses it."""
    return int(_partitioner()(None, key, len(key), count, None, None))


def _time_limit(config: Mapping[str, str], side: str, otherwise: int) -> int:
    """How far a timestamp may lie before or behind the broker's clock. Where a topic does not limit that, Kafka up to
    3.9 goes by the property that there was before (``LogConfig.getMessageTimestampBeforeMaxMs``)."""
    unlimited = str(2**63 - 1)
    if (found := config.get(f"message.timestamp.{side}.max.ms", unlimited)) == unlimited:
        found = config.get("message.timestamp.difference.max.ms", str(otherwise))
    return int(found)


def _asked(topic: NewTopic, config: Mapping[str, str]) -> confluent_kafka.admin.NewTopic:
    return confluent_kafka.admin.NewTopic(
        topic.name, num_partitions=topic.partitions, replication_factor=topic.replication, config=dict(config)
    )


def _why(error: KafkaError) -> str:
    return f"{error.name()}: {error.str().rstrip('.')}. {_REFUSALS_TO_CREATE[error.code()]}"


class _Client:
    """An admin client, and what it says of its connections."""

    def __init__(self, config: Mapping[str, str]) -> None:
        self.heard = Heard()
        # the callback must not refer to this object: a client in a reference cycle keeps its threads and sockets until
        # it is collected
        callback = functools.partial(hear, self.heard)
        self.admin = made(AdminClient, {**client_config(config), "error_cb": callback})


#: the clients that were used last, by their properties, the last one at the end, and how many of them are kept: who
#: asks, asks little, and to connect takes longer
_kept: dict[str, _Client] = {}
_KEEP = 4
#: reentrant, since a signal's handler (on_kill) may need what the interrupted code has: what that has seen may be gone
_keeping = threading.RLock()
#: those of the process that has forked this one: their threads are not here, so that they must never be closed
_inherited: list[_Client] = []


def _client(config: Mapping[str, str]) -> _Client:
    """The client for these properties that all in this process have together."""
    key = json.dumps(dict(config), sort_keys=True)
    with _keeping:
        found = _kept.pop(key, None)
    found = found or _Client(config)
    with _keeping:
        _kept[key] = found
        unused = [_kept.pop(each, None) for each in [*_kept][:-_KEEP]]
    del unused  # closed without the lock, which may take a moment
    return found


def _leave(client: _Client) -> None:
    """Let those who come later have another client: after an error, one may know a leader that is none any more, or use
    a certificate that was replaced."""
    with _keeping:
        for key, kept in [*_kept.items()]:
            if kept is client:
                _kept.pop(key, None)


def _forked() -> None:
    global _kept, _keeping
    _inherited.extend(_kept.values())
    _kept, _keeping = {}, threading.RLock()


os.register_at_fork(after_in_child=_forked)


class Topics:
    """The few requests to an admin client that are needed."""

    def __init__(self, config: Mapping[str, str]) -> None:
        self._config = dict(config)
        #: None behind an error after which another one is needed; the one before is kept, since another thread may
        #: still wait for its answers
        self._used: _Client | None = _client(self._config)
        self._before: _Client | None = None

    @property
    def _client(self) -> _Client:
        used = self._used  # another thread may change it
        if used is None:
            used = self._used = _client(self._config)
        return used

    @property
    def _admin(self) -> AdminClient:
        return self._client.admin

    def _change(self) -> None:
        self._before, self._used = self._used, None

    @contextlib.contextmanager
    def _errors(self) -> Iterator[None]:
        """Within this block, Kafka's exceptions are raised as errors of this package; an outage because the broker
        rejects the client is reported as such, and any other with what the client says of its connections.

        :raises CredentialsRefused: user or password is wrong, or one side does not trust the other's certificate.
        """
        try:
            with errors(self._config):
                yield
        except Refused:
            _leave(self._client)
            raise
        except Outage as error:
            _leave(self._client)
            self._admin.poll(0)
            found = self._client.heard.outage(error.what, self._config)
            if isinstance(found, str):
                raise Outage(found, error.remedy) from None
            self._change()
            raise found from None

    def brokers(self) -> int:
        """The number of brokers in the cluster.

        :raises Outage: no broker answers.
        """

        def count() -> int:
            if not (found := self._admin.list_topics(timeout=1.0).brokers):
                raise Outage(f"Kafka at {self._config.get('bootstrap.servers', '?')} knows none of its brokers now.")
            return len(found)

        return self._patiently(count)

    def replicas(self, wanted: int) -> int:
        """How many replicas of a partition the cluster can hold, of as many as are wanted: one on each broker.

        :raises Outage: no broker answers.
        """
        return min(wanted, self.brokers())

    def _patiently(self, ask: Callable[[], T]) -> T:
        """Ask again until Kafka answers, each time after a look at the cluster: librdkafka sends requests to the
        controller that it knows of, and where it has found none (its only broker was fenced for a moment), it does not
        look again by itself for minutes.

        :raises Outage: no broker answers for some seconds; Kafka's exceptions are raised as by :meth:`_errors`.
        """
        deadline = time.monotonic() + _TIMEOUT
        while True:
            try:
                with self._errors():
                    return ask()
            except Outage:
                if time.monotonic() > deadline:
                    raise
                with contextlib.suppress(KafkaException):
                    self._admin.list_topics(timeout=1.0)
                time.sleep(0.1)

    def names(self) -> list[str]:
        """The names of all topics that the client's principal may see."""
        with self._errors():
            return sorted(self._admin.list_topics(timeout=_TIMEOUT).topics)

    def describe(self, names: Sequence[str], *, confirm: bool = False, hidden: bool = False) -> dict[str, Topic]:
        """Those of the topics that exist, by name.

        :param confirm: whether to make sure that a missing topic does not exist: a broker that has just started, or
            that is behind the others, knows few topics for a moment. A topic is missing only if it is for some seconds,
            in two kinds of requests.
        :param hidden: whether those that may not be seen are left out, as those that do not exist.
        :raises Refused: one of them may not be seen, so that it is not known whether it exists.
        :raises Outage: Kafka does not answer, or its answers contradict each other.
        """
        found = self._describe(names, hidden=hidden)
        deadline = time.monotonic() + _CONFIRM
        while confirm and (missing := [name for name in names if name not in found]):
            if time.monotonic() > deadline and not set(missing) & set(self.names()):
                break
            if time.monotonic() > deadline + _TIMEOUT:
                raise Outage(
                    f"Kafka at {self._config.get('bootstrap.servers', '?')} lists topic {missing[0]!r} and says that "
                    "it does not know it.",
                    "It is being created or deleted, or the brokers' metadata differ. Try again.",
                )
            time.sleep(_CONFIRM / 10)
            found |= self._describe(missing, hidden=hidden)
        return found

    def _describe(self, names: Sequence[str], *, hidden: bool = False) -> dict[str, Topic]:
        if not names:
            return {}
        found: dict[str, Topic] = {}
        known = self._patiently(lambda: self._known(names, hidden=hidden))
        configs = self._patiently(lambda: self._configs(list(known)))
        for name, topic in known.items():
            config = configs.get(name, {})
            allowed = topic.authorized_operations
            found[name] = Topic(
                name,
                str(topic.topic_id),
                len(topic.partitions),
                int(config.get("max.message.bytes", DEFAULT_MAX_BYTES)),
                config.get("cleanup.policy", ""),
                allowed is None or AclOperation.READ in allowed,
                allowed is None or AclOperation.WRITE in allowed,
                int(config.get("retention.ms", -1)),
                int(config.get("retention.bytes", -1)),
                config.get("message.timestamp.type", ""),
                min(_time_limit(config, "before", FOR_EVER), FOR_EVER),
                min(_time_limit(config, "after", HOUR), FOR_EVER),
            )
        return found

    def _known(self, names: Sequence[str], *, hidden: bool = False) -> dict[str, TopicDescription]:
        described = self._admin.describe_topics(
            TopicCollection(list(names)), include_authorized_operations=True, request_timeout=_ATTEMPT
        )
        known = {}
        for name, future in described.items():
            try:
                known[name] = future.result()
            except KafkaException as error:
                if error.args[0].name() == "TOPIC_AUTHORIZATION_FAILED":
                    if hidden:
                        continue
                    raise Refused(f"Kafka denies every access to topic {name!r}.", GRANT) from None
                if error.args[0].name() != "UNKNOWN_TOPIC_OR_PART":
                    raise
        return known

    def uncreatable(self, wanted: Sequence[NewTopic]) -> dict[str, str]:
        """The topics that the broker would refuse to create, with the reason for each; none is created."""
        denied: dict[str, str] = {}
        if not wanted:
            return denied
        with self._errors():
            first = self._admin.create_topics(
                [_asked(topic, topic.configs[0]) for topic in wanted],
                validate_only=True,
                request_timeout=_TIMEOUT,
            )
            # all in one request; those that are refused are then tried one by one, with their other configurations
            for topic in wanted:
                if (
                    first[topic.name].exception() is not None
                    and (refusal := self._try_to_create(topic, validate_only=True)) is not None
                ):
                    denied[topic.name] = _why(refusal.args[0])
        return denied

    def _try_to_create(self, topic: NewTopic, *, validate_only: bool) -> KafkaException | None:
        """Create a topic with the first of its configurations that the broker accepts; returns the last refusal if it
        accepts none."""
        refusal: KafkaException | None = None
        for config in topic.configs:
            future = self._admin.create_topics(
                [_asked(topic, config)], validate_only=validate_only, request_timeout=_TIMEOUT
            )
            try:
                future[topic.name].result()
                return None
            except KafkaException as error:
                if error.args[0].code() == KafkaError.TOPIC_ALREADY_EXISTS:
                    return None
                if error.args[0].code() not in _REFUSALS_TO_CREATE:
                    raise
                refusal = error
                if error.args[0].code() not in _OF_THE_CONFIGURATION:
                    break
        return refusal

    def _configs(self, names: list[str]) -> dict[str, dict[str, str]]:
        if not names:
            return {}
        asked = self._admin.describe_configs(
            [ConfigResource(ResourceType.TOPIC, name) for name in names], request_timeout=_ATTEMPT
        )
        configs = {}
        for resource, future in asked.items():
            try:
                configs[resource.name] = {k: v.value for k, v in future.result().items()}
            except KafkaException as error:
                # DescribeConfigs is a separate right; without it, the broker's defaults are assumed
                if "AUTH" not in error.args[0].name():
                    raise
        return configs

    def make(self, *wanted: NewTopic) -> None:
        """Create topics and wait until the broker knows them; those that exist are left as they are.

        :raises Refused: the broker refuses to create one; the message says why.
        :raises Outage: the broker does not know one of them, and for some seconds has not learned of any.
        """
        with self._errors():
            for start in range(0, len(wanted), _AT_ONCE):
                self._create(wanted[start : start + _AT_ONCE])
            unknown, deadline = {topic.name for topic in wanted}, time.monotonic() + _TIMEOUT
            while left := unknown - self._admin.list_topics(timeout=_TIMEOUT).topics.keys():
                if len(left) < len(unknown):
                    unknown, deadline = left, time.monotonic() + _TIMEOUT
                elif time.monotonic() > deadline:
                    raise Outage(f"Topic {min(left)!r} was created, but Kafka does not list it.", "Try again.")
                time.sleep(0.05)

    def _create(self, wanted: Sequence[NewTopic]) -> None:
        """Create all in one request; those that are refused are then tried one by one, with their other
        configurations."""
        made = self._admin.create_topics(
            [_asked(topic, topic.configs[0]) for topic in wanted], request_timeout=_TIMEOUT
        )
        for topic in wanted:
            if made[topic.name].exception() is None:
                continue
            refusal = self._try_to_create(topic, validate_only=False)
            if refusal is not None:
                raise Refused(f"Kafka refuses to create topic {topic.name!r}: {_why(refusal.args[0])}")

    def ends(self, name: str, partitions: int, *, committed: bool = False) -> list[int]:
        """The high watermark of each partition: the offset behind its last record, committed or not.

        :param committed: whether to return the last stable offsets instead, before which every transaction is committed
            or aborted.
        :raises Outage: Kafka does not answer, or does not know the topic for some seconds.
        """
        return self.all_ends({name: partitions}, committed=committed)[name]

    def all_ends(self, topics: Mapping[str, int], *, committed: bool = False) -> dict[str, list[int]]:
        """The :meth:`ends` of several topics, by one request.

        :param topics: for each topic, how many partitions it has.
        """
        # a topic that was just created has no leader for a moment
        return self._patiently(lambda: self._ends(topics, committed)) if topics else {}

    def begins(self, topics: Mapping[str, int]) -> dict[str, list[int]]:
        """The offset of each partition's first record: it rises with what a retention deletes.

        :param topics: for each topic, how many partitions it has.
        """
        return self._patiently(lambda: self._ends(topics, False, begins=True)) if topics else {}

    def filled(self, topics: Mapping[str, int]) -> set[str]:
        """The topics among these that have records.

        :param topics: for each topic, how many partitions it has.
        """
        ends, begins = self.all_ends(topics), self.begins(topics)
        return {name for name in topics if ends[name] != begins[name]}

    def _ends(self, topics: Mapping[str, int], committed: bool, *, begins: bool = False) -> dict[str, list[int]]:
        asked = {
            TopicPartition(name, p): OffsetSpec.earliest() if begins else OffsetSpec.latest()
            for name, partitions in topics.items()
            for p in range(partitions)
        }
        asking = ""
        futures = self._admin.list_offsets(
            asked,
            isolation_level=IsolationLevel.READ_COMMITTED if committed else IsolationLevel.READ_UNCOMMITTED,
            request_timeout=_TIMEOUT,
        )
        try:
            ends: dict[str, list[int]] = {name: [0] * partitions for name, partitions in topics.items()}
            for place, future in futures.items():
                asking = place.topic
                ends[asking][place.partition] = future.result().offset
            return ends
        except KafkaException as error:
            code = error.args[0].code()
            if code in (KafkaError.FENCED_LEADER_EPOCH, KafkaError.UNKNOWN_LEADER_EPOCH):
                # the partition has another leader epoch since its broker was restarted, and this client would use the
                # old one for ever
                _leave(self._client)
                self._change()
            # a broker that has just started, or is behind the others, does not know the topic yet, or its leader
            # (_NOENT)
            if code not in (KafkaError.UNKNOWN_TOPIC_OR_PART, KafkaError._NOENT):
                raise
            raise Outage(
                f"Kafka does not know topic {asking!r}, or no leader of it.",
                "A broker that has just started learns of it in a moment. If the topic was deleted, its records are "
                "lost.",
            ) from None
