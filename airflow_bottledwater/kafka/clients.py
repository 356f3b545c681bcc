"""What all Kafka clients of this package share: their properties, and the meaning of their errors."""

from __future__ import annotations

import contextlib
import re
import time
import uuid
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

from confluent_kafka import KafkaError, KafkaException

from airflow_bottledwater.errors import DOCS, CredentialsRefused, Outage, Refused
from airflow_bottledwater.pipeline.groups import TOKENS
from airflow_bottledwater.pipeline.settings import first_broker

Client = TypeVar("Client")

#: texts of a rejected login, of a broker that is not trusted, and of the alerts of one that does not trust the client
#: (RFC 8446, 6.2); the error codes alone do not show it, since a broker that stops during a handshake leads to the same
#: ones, and since with TLS 1.3 a handshake has succeeded here when the broker rejects the client's certificate
_REFUSAL = re.compile(
    "authentication failed|mechanism|certificate|alert (unknown ca|access denied|handshake failure)", re.IGNORECASE
)
#: texts beside which it is none: the connection was lost in the middle of a login
_CUT = re.compile("Broker transport failure|timed out", re.IGNORECASE)
_REFUSING = (KafkaError._AUTHENTICATION, KafkaError._SSL, KafkaError._TRANSPORT)
#: the remedy for a missing right
GRANT = f"The ACLs that are needed: {DOCS}operations.html#acls-in-kafka"


def altering(config: Mapping[str, str], topic: str, properties: str) -> str:
    """The command that gives a topic other properties, for messages.

    :param config: the user's properties of librdkafka.
    """
    return (
        f"kafka-configs.sh --bootstrap-server {first_broker(config)} --alter --entity-type topics --entity-name "
        f"{topic} --add-config {properties}"
    )


def client_config(config: Mapping[str, str]) -> dict[str, Any]:
    """The user's properties without those that only producers know, for consumers and admin clients."""
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
        # asking about a topic must never create it
        "allow.auto.create.topics": "false",
    }


#: properties of producers that the package sets itself, by all of their names: with others a record would find no room,
#: could be dropped inside of a transaction, or would belong to a transaction of somebody else
_OURS = frozenset(
    {
        "transactional.id",
        "transaction.timeout.ms",
        "message.timeout.ms",
        "delivery.timeout.ms",
        "queue.buffering.max.messages",
        "queue.buffering.max.kbytes",
    }
)


def producer_config(config: Mapping[str, str]) -> dict[str, Any]:
    """The user's properties for a producer without transactions, without those that the package sets itself."""
    # of a producer it is true by default: asking for a topic that was deleted would make it anew, with the broker's
    # defaults
    own = {k: v for k, v in config.items() if k not in _OURS}
    return {"log_level": "2", **own, "allow.auto.create.topics": "false"}


def made(kind: Callable[[dict[str, Any]], Client], config: dict[str, Any]) -> Client:
    """A client of confluent-kafka: a producer, consumer or admin client.

    :raises Refused: it does not accept a property, or would wait for a token that nobody gives it.
    """
    if _lacks_token(config):
        raise Refused(
            f"The connection to Kafka at {config.get('bootstrap.servers', '?')} has sasl.mechanism = OAUTHBEARER, and "
            "nothing that makes a token. (For Amazon MSK and Google's Managed Kafka, Airflow's Kafka provider adds a "
            "function of its own, which a job cannot call.)",
            TOKENS,
        )
    try:
        return kind(config)
    except KafkaException as error:
        raise unknown_property(error.args[0].str()) from None
    except (TypeError, ValueError) as error:
        # some values have to be of a type that no connection's extra can have
        raise unknown_property(str(error)) from None


def _lacks_token(config: Mapping[str, Any]) -> bool:
    """Whether a client would wait for a token without even connecting: librdkafka gets one by OIDC only
    (``aws_iam`` is for clients with a function, see its CONFIGURATION.md), or makes an unsecured one."""
    mechanisms = {config.get("sasl.mechanism"), config.get("sasl.mechanisms")}
    if "OAUTHBEARER" not in mechanisms or "SASL" not in str(config.get("security.protocol")).upper():
        return False
    fetched = str(config.get("sasl.oauthbearer.method")).lower() == "oidc"
    by_function = str(config.get("sasl.oauthbearer.metadata.authentication.type")).lower() == "aws_iam"
    unsecured = str(config.get("enable.sasl.oauthbearer.unsecure.jwt")).lower() in ("true", "t", "1")
    return (not fetched or by_function) and not unsecured


def reader_config(config: Mapping[str, str], **more: str) -> dict[str, Any]:
    """The properties of a consumer whose partitions are assigned by hand: no group is joined, and no offsets are
    committed.

    :param config: the user's properties.
    :param more: further properties, with underscores instead of dots.
    """
    return {
        **client_config(config),
        "group.id": f"bottledwater-{uuid.uuid4()}",
        "enable.auto.commit": "false",
        **{name.replace("_", "."): value for name, value in more.items()},
    }


def transactional_config(config: Mapping[str, str], transactional_id: str, timeout: float) -> dict[str, str]:
    """The properties of a producer under a transactional id.

    :param config: the user's properties; those that transactions depend on are overridden.
    :param timeout: seconds after which the broker aborts a transaction whose producer is silent.
    """
    return {
        **producer_config(config),
        "transactional.id": transactional_id,
        "transaction.timeout.ms": str(int(timeout * 1000)),
        "enable.idempotence": "true",
    }


#: the client's and the brokers' errors that pass when a broker is back, a leader elected, metadata fresh: those that
#: are "retriable" in https://kafka.apache.org/protocol#protocol_error_codes, except for a missing topic, which the
#: callers handle. ``KafkaError.retriable()`` is false for nearly all of them: librdkafka sets it in the transactional
#: API only.
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
    """Whether an error is an outage, which passes by waiting."""
    return error.retriable() or error.code() in _AWAY


def passes(error: KafkaError) -> bool:
    """Whether a consumer goes on working after an error."""
    return away(error) or error.code() in (
        # the login worked before, and librdkafka tries again
        KafkaError._AUTHENTICATION,
        KafkaError._SSL,
        # librdkafka asks for the coordinator of the group, which is never joined, so that no right on it is needed
        KafkaError.GROUP_AUTHORIZATION_FAILED,
    )


@contextlib.contextmanager
def errors(config: Mapping[str, str]) -> Iterator[None]:
    """Within this block, Kafka's exceptions are raised as errors of this package, see :func:`translate`."""
    try:
        yield
    except KafkaException as error:
        raise translate(error, config) from None


def translate(error: KafkaException, config: Mapping[str, str]) -> Outage | Refused:
    """The error of this package for Kafka's: :class:`Outage` if the brokers are not available, else
    :class:`Refused`."""
    detail = error.args[0]
    servers = config.get("bootstrap.servers", "?")
    name = detail.name() if hasattr(detail, "name") else ""
    text = detail.str() if hasattr(detail, "str") else str(error)
    if isinstance(detail, KafkaError) and detail.code() == KafkaError.THROTTLING_QUOTA_EXCEEDED:
        return Outage(
            f"Kafka at {servers} makes no more topics or partitions now: {text}.",
            "The quota controller_mutation_rate of this user or client is used up. It fills again by itself; with a "
            "higher one it is quicker (kafka-configs.sh --entity-type users).",
        )
    if isinstance(detail, KafkaError) and away(detail):
        return Outage(
            f"Kafka at {servers} does not answer: {text}.",
            "Check the address in the connection (or --broker), security.protocol, the network and the broker.",
        )
    if "AUTH" in name or name.startswith("SASL") or name == "_SSL":
        return Refused(
            f"Kafka at {servers} rejected the client: {text}.", f"Check the credentials and the ACLs. {GRANT}"
        )
    return Refused(f"Kafka at {servers} reports an error: {text}.")


@dataclass(slots=True)
class Heard:
    """What a client told its error callback of its connections: the calls themselves only report a time-out.

    :ivar refusal: why a broker rejects the client; empty if none does.
    :ivar refused: when it did, by the monotonic clock.
    :ivar failure: what failed last, which need not be a refusal; empty if nothing did.
    :ivar at: when it did.
    """

    refusal: str = ""
    refused: float = 0.0
    failure: str = ""
    at: float = 0.0

    def outage(self, what: str, config: Mapping[str, str]) -> str | CredentialsRefused:
        """What a call that had no answer waits for: the brokers, or other credentials. A refusal is forgotten then: the
        next outage may be a real one.

        :param what: what the call reported.
        :param config: the client's properties.
        """
        refusal, self.refusal = self.refusal, ""
        if not refusal or time.monotonic() - self.refused > _RECENT:
            return f"{what.rstrip('.')}.{self.reason()}"
        return CredentialsRefused(
            f"Kafka at {config.get('bootstrap.servers', '?')} refuses the connection: {refusal.rstrip('.')}.",
            "Check user, password and sasl.mechanism, and with TLS ssl.ca.location and the certificates of both sides.",
        )

    def reason(self) -> str:
        """The failure, as sentences to put behind what a call reported; empty if there is none of now."""
        if not self.failure or time.monotonic() - self.at > _RECENT:
            return ""
        said = f" The client says: {self.failure.rstrip('.')}."
        if told := _TOLD.match(self.failure):
            said += (
                f" {told[1]} is an address that the brokers tell their clients (advertised.listeners): it has to be "
                "reachable from here."
            )
        return said


#: the broker that an error is about, if its address is not one of bootstrap.servers but from the cluster's metadata:
#: "sasl_ssl://kafka:9092/1: Connect to …"; with the former it is ".../bootstrap: Connect to …"
_TOLD = re.compile(r"(?:\w+://)?(\S+:\d+)/\d+: ")
#: how long an attempt took, which differs each time
_TOOK = re.compile(r" \(after \d+ms in state [^)]*\)")
#: seconds; librdkafka repeats an error that has not changed every half a minute only
_RECENT = 60.0
_CONNECTION = (*_REFUSING, KafkaError._RESOLVE)


def hear(heard: Heard, error: KafkaError) -> None:
    """Note, as a client's error callback, why it cannot work with a broker."""
    if error.code() not in _CONNECTION:
        return
    heard.failure, heard.at = _TOOK.sub("", error.str()), time.monotonic()
    said = error.str().partition(": ")[2]  # behind the broker's name
    if error.code() in _REFUSING and _REFUSAL.search(said) and not _CUT.search(said):
        heard.refusal, heard.refused = heard.failure, heard.at


def denied(code: int) -> bool:
    """Whether an error code means that the client's principal lacks a right on a topic, the cluster or a transactional
    id."""
    return code in (
        KafkaError.TOPIC_AUTHORIZATION_FAILED,
        KafkaError.CLUSTER_AUTHORIZATION_FAILED,
        KafkaError.TRANSACTIONAL_ID_AUTHORIZATION_FAILED,
    )


def refusal(code: int, transactional_id: str, topics: Sequence[str]) -> Refused | None:
    """Why a transactional call can never work; None if the error means something else. A right on a topic is checked
    when it is added to the transaction, before a record is sent, so no record is to blame.

    :param topics: those of the transaction.
    """
    if code == KafkaError.INVALID_TRANSACTION_TIMEOUT:
        return Refused(
            "transaction_timeout is longer than the brokers allow.",
            "Lower it, or raise transaction.max.timeout.ms of the brokers.",
        )
    if code == KafkaError.TRANSACTIONAL_ID_AUTHORIZATION_FAILED:
        return Refused(
            f"Kafka denies transactional id {transactional_id!r}.",
            "Grant Write on transactional ids with the prefix 'bottledwater-'.",
        )
    return Refused(f"Kafka denies Write on one of the topics {', '.join(topics)}.", GRANT) if denied(code) else None


def unknown_property(detail: str) -> Refused:
    """The error for a property that librdkafka does not know, or whose value it does not accept."""
    return Refused(
        f"The Kafka client does not accept a property: {detail}",
        "The properties are listed at https://github.com/confluentinc/librdkafka/blob/master/CONFIGURATION.md.",
    )
