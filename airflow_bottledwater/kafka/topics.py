"""Topics: what is there, and creating what is not; never the broker's auto-creation."""

from __future__ import annotations

import contextlib
import re
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import tenacity
from confluent_kafka import IsolationLevel, KafkaError, KafkaException, TopicCollection, TopicPartition
from confluent_kafka.admin import (
    AclOperation,
    AdminClient,
    ConfigResource,
    NewTopic,
    OffsetSpec,
    ResourceType,
)

from airflow_bottledwater.errors import CredentialsRefused, Outage, Refused

#: the broker's default of max.message.bytes, where it may not be asked
DEFAULT_MAX_BYTES = 1_048_588
_TIMEOUT = 15.0
#: a verdict; a broker that stops in the middle of a handshake has the same error codes
_REFUSAL = re.compile("authentication failed|mechanism|certificate", re.IGNORECASE)
#: the remedy for a missing right
GRANT = "See the list of ACLs in docs/operations.md."


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
    return {k: v for k, v in config.items() if not k.startswith(producer_only)} | {"log_level": "2"}


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
            f"Kafka at {servers} refuses us: {text}.", "Check credentials and ACLs (docs/operations.md lists them)."
        )
    return Refused(f"Kafka at {servers}: {text}.")


class Topics:
    """An admin client with the few questions that we have."""

    def __init__(self, config: Mapping[str, str]) -> None:
        self._config = dict(config)
        self._refusal = ""
        try:
            self._admin = AdminClient({**client_config(config), "error_cb": self._on_error})
        except KafkaException as error:
            raise Refused(f"Kafka setting: {error.args[0].str()}", "See librdkafka's CONFIGURATION.md.") from None

    def _on_error(self, error: KafkaError) -> None:
        """Why no broker could be used: the calls themselves only say that none answered in time."""
        if error.code() in (KafkaError._AUTHENTICATION, KafkaError._SSL) and _REFUSAL.search(error.str()):
            self._refusal = error.str()

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
            if self._refusal:
                raise CredentialsRefused(
                    f"Kafka at {self._config.get('bootstrap.servers', '?')} refuses the connection: {self._refusal}.",
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

    def describe(self, names: Sequence[str]) -> dict[str, Topic]:
        """The topics that exist, by name.

        :raises Refused: one of them may not be seen; whether it exists is not known then.
        """
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

    def uncreatable(self, names: Sequence[str]) -> list[str]:
        """Those of these missing topics that we have no right to create; the broker is asked without creating any."""
        denied = []
        with self._errors():
            asked = self._admin.create_topics(
                [NewTopic(name, num_partitions=1, replication_factor=1) for name in names],
                validate_only=True,
                request_timeout=_TIMEOUT,
            )
            for name, future in asked.items():
                try:
                    future.result()
                except KafkaException as error:
                    if "AUTH" in error.args[0].name():
                        denied.append(name)
        return denied

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
        """Create a topic and wait until the broker knows it; one that exists is left alone."""
        settings = dict(config)
        with self._errors():
            future = self._admin.create_topics(
                [NewTopic(name, num_partitions=partitions, replication_factor=replication, config=settings)],
                request_timeout=_TIMEOUT,
            )[name]
            try:
                future.result()
            except KafkaException as error:
                if error.args[0].name() != "TOPIC_ALREADY_EXISTS":
                    raise
            deadline = time.monotonic() + _TIMEOUT
            while name not in self._admin.list_topics(timeout=_TIMEOUT).topics and time.monotonic() < deadline:
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
            return [future.result().offset for _, future in sorted(futures.items(), key=lambda item: item[0].partition)]
