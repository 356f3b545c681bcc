"""Topics: what is there, and creating what is not; never the broker's auto-creation."""

from __future__ import annotations

import contextlib
import functools
import re
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import confluent_kafka.admin
import tenacity
from confluent_kafka import IsolationLevel, KafkaError, KafkaException, TopicCollection, TopicPartition
from confluent_kafka.admin import AclOperation, AdminClient, ConfigResource, OffsetSpec, ResourceType

from airflow_bottledwater.errors import DOCS, CredentialsRefused, Outage, Refused

#: the broker's default of max.message.bytes, where it may not be asked
DEFAULT_MAX_BYTES = 1_048_588
_TIMEOUT = 15.0
#: seconds for which a topic must be unknown to be taken for missing
_CONFIRM = 2.0
#: a rejection; a broker that stops in the middle of a handshake has the same error codes
_REFUSAL = re.compile("authentication failed|mechanism|certificate", re.IGNORECASE)
#: the remedy for a missing right
GRANT = f"The ACLs that are needed: {DOCS}operations.html#acls-in-kafka"


@dataclass(frozen=True, slots=True)
class Topic:
    """A topic as the broker has it, and what we may do with it."""

    name: str
    id: str
    partitions: int
    max_bytes: int
    cleanup: str
    may_read: bool
    may_write: bool


@dataclass(frozen=True, slots=True)
class NewTopic:
    """A topic to create.

    :param configs: of which the first is used that the broker takes: managed Kafkas allow some properties in a range only, or not
        at all.
    """

    name: str
    partitions: int
    replication: int
    configs: tuple[Mapping[str, str], ...]


#: where the next configuration is tried: INVALID_CONFIG and POLICY_VIOLATION of
#: https://kafka.apache.org/protocol#protocol_error_codes
_OF_THE_CONFIGURATION = {KafkaError.INVALID_CONFIG, KafkaError.POLICY_VIOLATION}
#: what a broker answers for good to CreateTopics, and what the reader can do
_REFUSALS_TO_CREATE = {
    KafkaError.INVALID_CONFIG: "Check topic_config, and which topic properties this Kafka allows.",
    KafkaError.POLICY_VIOLATION: "The cluster has a policy for new topics: check partitions, replication_factor and topic_config.",
    KafkaError.INVALID_REPLICATION_FACTOR: "Check replication_factor, and how many brokers are running.",
    KafkaError.INVALID_PARTITIONS: "Check the setting partitions.",
    KafkaError.TOPIC_EXCEPTION: "Use another topic_prefix.",
    KafkaError.TOPIC_AUTHORIZATION_FAILED: GRANT,
    KafkaError.CLUSTER_AUTHORIZATION_FAILED: GRANT,
}


def _asked(topic: NewTopic, config: Mapping[str, str]) -> confluent_kafka.admin.NewTopic:
    return confluent_kafka.admin.NewTopic(
        topic.name, num_partitions=topic.partitions, replication_factor=topic.replication, config=dict(config)
    )


def _why(error: KafkaError) -> str:
    return f"{error.name()}: {error.str().rstrip('.')}. {_REFUSALS_TO_CREATE[error.code()]}"


def client_config(config: Mapping[str, str]) -> dict[str, Any]:
    """The user's properties as far as consumers and admin clients know them."""
    producer_only = (
        "queue.",
        "batch.",
        "linger.",
        "compression.",
        "acks",
        "request.required",
        "message.timeout",
        "transaction",
        "enable.idem",
        "delivery.",
        "partitioner",
        "sticky.",
    )
    return {k: v for k, v in config.items() if not k.startswith(producer_only)} | {
        "log_level": "2",
        # a question must never make a topic
        "allow.auto.create.topics": "false",
    }


#: the client's own and the brokers' errors that pass when a broker is back, a leader elected, metadata fresh: "retriable" in
#: https://kafka.apache.org/protocol#protocol_error_codes, but for a topic that is missing, which is ours to say.
#: ``KafkaError.retriable()`` is false for nearly all of them: librdkafka sets it in the transactional API only.
_AWAY = {
    KafkaError._TRANSPORT,
    KafkaError._TIMED_OUT,
    KafkaError._TIMED_OUT_QUEUE,
    KafkaError._ALL_BROKERS_DOWN,
    KafkaError._RESOLVE,
    KafkaError._WAIT_COORD,
    KafkaError.LEADER_NOT_AVAILABLE,
    KafkaError.NOT_LEADER_FOR_PARTITION,
    KafkaError.REQUEST_TIMED_OUT,
    KafkaError.BROKER_NOT_AVAILABLE,
    KafkaError.REPLICA_NOT_AVAILABLE,
    KafkaError.NETWORK_EXCEPTION,
    KafkaError.COORDINATOR_LOAD_IN_PROGRESS,
    KafkaError.COORDINATOR_NOT_AVAILABLE,
    KafkaError.NOT_COORDINATOR,
    KafkaError.NOT_ENOUGH_REPLICAS,
    KafkaError.NOT_ENOUGH_REPLICAS_AFTER_APPEND,
    KafkaError.NOT_CONTROLLER,
    KafkaError.CONCURRENT_TRANSACTIONS,
    KafkaError.KAFKA_STORAGE_ERROR,
    KafkaError.LISTENER_NOT_FOUND,
    KafkaError.FENCED_LEADER_EPOCH,
    KafkaError.UNKNOWN_LEADER_EPOCH,
    KafkaError.OFFSET_NOT_AVAILABLE,
    KafkaError.STALE_BROKER_EPOCH,
    KafkaError.PREFERRED_LEADER_NOT_AVAILABLE,
    KafkaError.ELIGIBLE_LEADERS_NOT_AVAILABLE,
    KafkaError.THROTTLING_QUOTA_EXCEEDED,
}


def away(error: KafkaError) -> bool:
    """Whether an error is an outage: it passes by waiting."""
    return error.retriable() or error.code() in _AWAY


def passes(error: KafkaError) -> bool:
    """Whether a consumer's error leaves the consumer at work."""
    return away(error) or error.code() in (
        # it had worked, and librdkafka tries again
        KafkaError._AUTHENTICATION,
        KafkaError._SSL,
        # librdkafka looks for the coordinator of a group that we never join: no right of ours
        KafkaError.GROUP_AUTHORIZATION_FAILED,
    )


@contextlib.contextmanager
def errors(config: Mapping[str, str]) -> Iterator[None]:
    """Kafka's exceptions as ours."""
    try:
        yield
    except KafkaException as error:
        raise translate(error, config) from None


def translate(error: KafkaException, config: Mapping[str, str]) -> Outage | Refused:
    """An outage if the brokers are away, else a refusal."""
    detail = error.args[0]
    servers = config.get("bootstrap.servers", "?")
    name = detail.name() if hasattr(detail, "name") else ""
    text = detail.str() if hasattr(detail, "str") else str(error)
    if isinstance(detail, KafkaError) and away(detail):
        return Outage(
            f"Kafka at {servers} does not answer: {text}.", "Check the address (--broker), the network and the broker."
        )
    if "AUTH" in name or name.startswith("SASL") or name == "_SSL":
        return Refused(
            f"Kafka at {servers} rejected the client: {text}.", f"Check the credentials and the ACLs. {GRANT}"
        )
    return Refused(f"Kafka at {servers} reports an error: {text}.")


def _note_refusal(refusals: list[str], error: KafkaError) -> None:
    """Why no broker could be used: the calls themselves only say that none answered in time."""
    if error.code() in (KafkaError._AUTHENTICATION, KafkaError._SSL) and _REFUSAL.search(error.str()):
        refusals[:] = [error.str()]


class Topics:
    """An admin client with the few questions that we have."""

    def __init__(self, config: Mapping[str, str]) -> None:
        self._config = dict(config)
        self._refusals: list[str] = []
        self._admin = self._make()

    def _make(self) -> AdminClient:
        # nothing that refers to this object: a client in a cycle keeps its threads and sockets until the collector runs
        noted = functools.partial(_note_refusal, self._refusals)
        try:
            return AdminClient({**client_config(self._config), "error_cb": noted})
        except KafkaException as error:
            raise Refused(
                f"The Kafka client does not accept a property: {error.args[0].str()}",
                "The properties are listed at https://github.com/confluentinc/librdkafka/blob/master/CONFIGURATION.md.",
            ) from None

    @contextlib.contextmanager
    def _errors(self) -> Iterator[None]:
        """Kafka's exceptions as ours; where the broker was there and would not talk to us, that.

        :raises CredentialsRefused: name and password are wrong, or one side does not trust the other's certificate.
        """
        try:
            with errors(self._config):
                yield
        except Outage:
            self._admin.poll(0)
            if self._refusals:
                # of a client that lives on, the next outage may be one
                refusal = self._refusals.pop()
                raise CredentialsRefused(
                    f"Kafka at {self._config.get('bootstrap.servers', '?')} refuses the connection: {refusal}.",
                    "Check user, password, sasl.mechanism and ssl.ca.location.",
                ) from None
            raise

    def brokers(self) -> int:
        """How many brokers answer.

        :raises Outage: none.
        """
        deadline = time.monotonic() + _TIMEOUT
        while True:
            try:
                with self._errors():
                    return len(self._admin.list_topics(timeout=1.0).brokers)
            except Outage:
                if time.monotonic() > deadline:
                    raise

    def names(self) -> list[str]:
        """All topics that we may see."""
        with self._errors():
            return sorted(self._admin.list_topics(timeout=_TIMEOUT).topics)

    def describe(self, names: Sequence[str], *, confirm: bool = False) -> dict[str, Topic]:
        """The topics that exist, by name.

        :param confirm: for whoever takes a topic that is missing for lost: a broker that has just started, or one that is behind
            the others, knows few topics for a moment. It is missing if that is the answer for some seconds, to two questions.
        :raises Refused: one of them may not be seen; whether it exists is not known then.
        """
        found = self._describe(names)
        deadline = time.monotonic() + _CONFIRM
        while confirm and (missing := [name for name in names if name not in found]):
            if time.monotonic() > deadline and not set(missing) & set(self.names()):
                break
            if time.monotonic() > deadline + _TIMEOUT:
                raise Outage(
                    f"Kafka at {self._config.get('bootstrap.servers', '?')} lists topic {missing[0]!r} and says that it does not know it.",
                    "It is being created or deleted, or the brokers' metadata differ. Try again.",
                )
            time.sleep(_CONFIRM / 10)
            found |= self._describe(missing)
        return found

    def _describe(self, names: Sequence[str]) -> dict[str, Topic]:
        if not names:
            return {}
        found: dict[str, Topic] = {}
        with self._errors():
            described = self._admin.describe_topics(
                TopicCollection(list(names)), include_authorized_operations=True, request_timeout=_TIMEOUT
            )
            known = {}
            for name, future in described.items():
                try:
                    known[name] = future.result()
                except KafkaException as error:
                    if error.args[0].name() == "TOPIC_AUTHORIZATION_FAILED":
                        raise Refused(f"Kafka denies every access to topic {name!r}.", GRANT) from None
                    if error.args[0].name() != "UNKNOWN_TOPIC_OR_PART":
                        raise
            configs = self._configs(list(known))
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
            )
        return found

    def uncreatable(self, wanted: Sequence[NewTopic]) -> dict[str, str]:
        """Those of these missing topics that the broker would refuse to create, and why; it is asked without creating any."""
        denied: dict[str, str] = {}
        if not wanted:
            return denied
        with self._errors():
            first = self._admin.create_topics(
                [_asked(topic, topic.configs[0]) for topic in wanted],
                validate_only=True,
                request_timeout=_TIMEOUT,
            )
            # all in one question; one by one only what is refused
            for topic in wanted:
                if (
                    first[topic.name].exception() is not None
                    and (refusal := self._try_to_create(topic, validate_only=True)) is not None
                ):
                    denied[topic.name] = _why(refusal.args[0])
        return denied

    def _try_to_create(self, topic: NewTopic, *, validate_only: bool) -> KafkaException | None:
        """Create a topic with the first of its configurations that the broker takes; returns the last refusal where it takes none."""
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
            [ConfigResource(ResourceType.TOPIC, name) for name in names], request_timeout=_TIMEOUT
        )
        configs = {}
        for resource, future in asked.items():
            try:
                configs[resource.name] = {k: v.value for k, v in future.result().items()}
            except KafkaException as error:
                # DescribeConfigs is a right of its own; without it the broker's defaults are assumed
                if "AUTH" not in error.args[0].name():
                    raise
        return configs

    def create(self, name: str, *, partitions: int, replication: int, config: Mapping[str, str]) -> None:
        """:meth:`make` with one configuration."""
        self.make(NewTopic(name, partitions, replication, (config,)))

    def make(self, topic: NewTopic) -> None:
        """Create a topic and wait until the broker knows it; one that exists is left alone.

        :raises Refused: the broker does not take it; the message says what of it.
        """
        with self._errors():
            refusal = self._try_to_create(topic, validate_only=False)
            if refusal is not None:
                raise Refused(f"Kafka refuses to create topic {topic.name!r}: {_why(refusal.args[0])}")
            deadline = time.monotonic() + _TIMEOUT
            while topic.name not in self._admin.list_topics(timeout=_TIMEOUT).topics and time.monotonic() < deadline:
                time.sleep(0.05)

    # a topic that was just made has no leader for a moment
    @tenacity.retry(
        retry=tenacity.retry_if_exception_type(Outage),
        stop=tenacity.stop_after_delay(10),
        wait=tenacity.wait_fixed(0.1),
        reraise=True,
    )
    def ends(self, name: str, partitions: int, *, committed: bool = False) -> list[int]:
        """The high watermark of each partition: behind the last record, committed or not.

        :param committed: the last stable offset instead: what lies before has been decided.
        """
        asked = {TopicPartition(name, p): OffsetSpec.latest() for p in range(partitions)}
        with self._errors():
            futures = self._admin.list_offsets(
                asked,
                isolation_level=IsolationLevel.READ_COMMITTED if committed else IsolationLevel.READ_UNCOMMITTED,
                request_timeout=_TIMEOUT,
            )
            try:
                return [
                    future.result().offset for _, future in sorted(futures.items(), key=lambda item: item[0].partition)
                ]
            except KafkaException as error:
                code = error.args[0].code()
                if code in (KafkaError.FENCED_LEADER_EPOCH, KafkaError.UNKNOWN_LEADER_EPOCH):
                    # the partition has another leader epoch since its broker was started again, and this client would ask with the
                    # old one for ever
                    self._admin = self._make()
                # a broker that has just started, or is behind the others, does not know it yet
                if code != KafkaError.UNKNOWN_TOPIC_OR_PART:
                    raise
                raise Outage(
                    f"Kafka does not know topic {name!r}.",
                    "A broker that has just started learns of it in a moment. If the topic was deleted, its records are lost.",
                ) from None
