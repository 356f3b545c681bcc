"""The ordinary transactional producer: it sends a few records, such as state records, in one Kafka transaction.

Rows go through :mod:`airflow_bottledwater.kafka.publisher`, which takes whole batches and needs compiled code; this one
does without. Both handle the errors of a transaction in the same way, see
:class:`~airflow_bottledwater.kafka.publisher.Publisher`.
"""

from __future__ import annotations

import contextlib
import functools
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from confluent_kafka import KafkaError, KafkaException, Producer

from airflow_bottledwater.backoff import Waiting
from airflow_bottledwater.errors import BottledWaterError, Refused
from airflow_bottledwater.kafka.clients import (
    GRANT,
    Heard,
    altering,
    denied,
    hear,
    made,
    refusal,
    transactional_config,
)
from airflow_bottledwater.kafka.errors import NewProducerNeeded

#: seconds of one attempt of a call; between two attempts, a stop is noticed
_SLICE = 1.0
#: seconds to wait for an abort, which spares readers the wait for the transaction's time-out
_ABORT = 5.0
#: codes of records that no attempt will make smaller
_TOO_LARGE = frozenset({KafkaError.MSG_SIZE_TOO_LARGE, KafkaError.RECORD_LIST_TOO_LARGE})
#: seconds for which a topic may be unknown, since a new topic becomes known to every broker only after a moment
_UNKNOWN = 5.0


@dataclass(frozen=True, slots=True)
class Message:
    """A record to be sent.

    :param value: None for a tombstone.
    :param timestamp: milliseconds since 1970; 0 for now.
    """

    topic: str
    key: bytes | None
    value: bytes | None
    partition: int = 0
    timestamp: int = 0
    headers: tuple[tuple[str, bytes | None], ...] = ()


class TransactionalProducer:
    """A producer under one transactional id.

    :param config: the user's properties of librdkafka.
    :param transactional_id: names the work, never the process that does it.
    :param topics: all topics that it will write to.
    :param transaction_timeout: seconds after which the broker aborts a transaction whose producer is silent.
    :param waiting: called while a server is not available; it sleeps, or raises to give up.
    """

    def __init__(
        self,
        config: Mapping[str, str],
        transactional_id: str,
        topics: Sequence[str],
        *,
        transaction_timeout: float,
        waiting: Waiting,
    ) -> None:
        self.transactional_id = transactional_id
        self._topics, self._waiting = list(topics), waiting
        self._servers = config.get("bootstrap.servers", "?")
        self._heard = Heard()
        self._config: dict[str, Any] = {
            **transactional_config(config, transactional_id, transaction_timeout),
            "linger.ms": "0",
            # the definition of a table with many columns and comments is long, and compresses well
            "compression.type": "lz4",
            # the topic's own limit decides
            "message.max.bytes": "1000000000",
            # must not refer to this object, see Topics._make
            "error_cb": functools.partial(hear, self._heard),
        }
        self._producer: Producer | None = None

    def open(self) -> None:
        """Make the producer, fetch the topics' metadata and initialise: the producer that used the id before is fenced,
        and its open transaction is ended. The state must be read afterwards, before the first record is sent.

        :raises Refused: the broker denies the id, a topic does not exist or is denied, or a property is unknown.
        :raises NewProducerNeeded: the initialisation failed.
        """
        self.close()
        self._producer = made(Producer, self._config)
        # before the first transaction: a record for a topic without metadata registers partition -1 in the transaction.
        # One topic is fetched twice, see Publisher.open
        for topic in [*self._topics, *self._topics[:1]]:
            self._fetch(topic)
        self._call(
            f"initialising transactional id {self.transactional_id!r}",
            lambda: self._open_producer.init_transactions(_SLICE),
        )

    def send(self, messages: Sequence[Message]) -> None:
        """Send these records in one transaction.

        :raises NewProducerNeeded: it could not be committed; nothing of it is visible, or its outcome is unknown, and
            only the state shows it.
        :raises Refused: the broker denies the id or a topic, or a record is too large for its topic.
        """
        failed = self._begin(messages)
        try:
            self._call("committing", lambda: self._open_producer.commit_transaction(_SLICE))
        except (NewProducerNeeded, Refused):
            if failed:
                raise self._refusal(failed[0], messages) from None
            raise
        self._open_producer.poll(0)
        if failed or len(self._open_producer):
            raise NewProducerNeeded(f"{len(messages)} records were sent and not all confirmed.")

    def _refusal(self, error: KafkaError, messages: Sequence[Message]) -> BottledWaterError:
        """Why a record was not accepted; it is not known which, but the largest of them is the most likely one."""
        largest = max(messages, key=lambda message: len(message.value or b""))
        if error.code() not in _TOO_LARGE:
            return NewProducerNeeded(f"Kafka refuses a record: {error.str()}.")
        command = altering({"bootstrap.servers": self._servers}, largest.topic, "max.message.bytes=10485760")
        return Refused(
            f"Kafka refuses a record for topic {largest.topic!r}: the record {(largest.key or b'').decode()!r} has "
            f"{len(largest.value or b''):,} bytes ({error.str()}).",
            f"Raise the topic's limit ({command}), then start again.",
        )

    def attempt(self, messages: Sequence[Message]) -> None:
        """Send these records in a transaction that is then aborted; the producer must not be used again.

        :raises NewProducerNeeded: the broker did not accept them.
        """
        failed = self._begin(messages)
        try:
            while self._open_producer.flush(_SLICE):
                if not failed:
                    self._wait(f"Kafka does not confirm records of {self.transactional_id!r}")
        except KafkaException as error:
            raise NewProducerNeeded(f"Sending failed: {error.args[0].str()}.") from None
        finally:
            self._abort()
        if failed:
            raise NewProducerNeeded(f"Kafka refuses a record: {failed[0].str()}.")

    def close(self) -> None:
        """Close the producer; an open transaction is ended by the next producer with this id, or by its time-out."""
        if self._producer is not None:
            # a producer that was fenced refuses every call
            with contextlib.suppress(KafkaException):
                self._producer.purge()
                self._producer.flush(0)
        self._producer = None

    @property
    def _open_producer(self) -> Producer:
        assert self._producer is not None, "open() comes first"
        return self._producer

    def _begin(self, messages: Sequence[Message]) -> list[KafkaError]:
        """Begin a transaction and hand the records over; returns the list to which their delivery errors will be
        added."""
        failed: list[KafkaError] = []

        def delivered(error: KafkaError | None, _: object) -> None:
            if error is not None:
                failed.append(error)

        self._call("beginning a transaction", self._open_producer.begin_transaction)
        try:
            for message in messages:
                self._produce(message, delivered)
        except BaseException:
            self._abort()
            raise
        return failed

    def _produce(self, message: Message, delivered: Callable[[KafkaError | None, object], None]) -> None:
        while True:
            try:
                self._open_producer.produce(
                    message.topic, message.value, message.key, message.partition, delivered,
                    timestamp=message.timestamp, headers=list(message.headers),
                )  # fmt: skip
                return
            except BufferError:
                self._open_producer.poll(_SLICE)
            except KafkaException as error:
                raise self._refusal(error.args[0], [message]) from None

    def _abort(self) -> None:
        try:
            self._open_producer.abort_transaction(_ABORT)
        except KafkaException:
            pass  # its time-out ends the transaction

    def _fetch(self, topic: str) -> None:
        deadline = time.monotonic() + _UNKNOWN
        while True:
            try:
                error = self._open_producer.list_topics(topic, timeout=2.0).topics[topic].error
            except KafkaException as outage:
                self._wait(f"Kafka does not answer: {outage.args[0].str()}")
                # the first broker that is back may not know any topic for a moment
                deadline = time.monotonic() + _UNKNOWN
                continue
            if error is None:
                return
            if denied(error.code()):
                raise Refused(f"Kafka denies every access to topic {topic!r}.", GRANT)
            if time.monotonic() > deadline:
                raise Refused(f"Topic {topic!r} cannot be used: {error.str()}.", "Create it, or check its name.")
            time.sleep(0.1)

    def _call(self, what: str, call: Callable[[], object]) -> None:
        """Make a transactional call, and repeat it after retriable errors, which include an unknown outcome.

        :raises NewProducerNeeded: it failed in another way.
        :raises Refused: the broker denies the id or a topic, or allows no such time-out.
        """
        while True:
            try:
                call()
                return
            except KafkaException as raised:
                error: KafkaError = raised.args[0]
            if error.retriable() and not error.fatal():
                self._wait(f"{what}: {error.str()}")
                continue
            if error.txn_requires_abort():
                self._abort()
            if refused := refusal(error.code(), self.transactional_id, self._topics):
                raise refused
            raise NewProducerNeeded(f"{what[0].upper()}{what[1:]} failed: {error.name()}: {error.str()}")

    def _wait(self, what: str) -> None:
        """Wait for the broker once; if it rejects the login, ``waiting`` is called with :class:`CredentialsRefused`."""
        self._open_producer.poll(0)
        self._waiting(self._heard.outage(what, self._config))
