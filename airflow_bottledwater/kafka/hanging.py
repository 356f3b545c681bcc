"""Transactions that a broker has left open for ever.

A coordinator that restarts while a transaction times out may complete it without writing its markers (seen with Kafka
4.3.1, a single node killed for longer than the time-out). Readers with ``read_committed`` then never get past its
records, and the next commit under the same transactional id would commit them, too. The tool of KIP-664
(``kafka-transactions.sh abort``) ends such a transaction. A producer with the same id can also end it, with a
transaction that writes to the same partitions and is aborted.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Mapping, Sequence

import confluent_kafka
from confluent_kafka import Consumer, TopicPartition

from airflow_bottledwater.backoff import Waiting
from airflow_bottledwater.errors import Outage
from airflow_bottledwater.kafka.clients import errors, made, passes, reader_config
from airflow_bottledwater.kafka.producer import Message, TransactionalProducer
from airflow_bottledwater.kafka.topics import Topics

log = logging.getLogger(__name__)

_TIMEOUT = 10.0
#: seconds after which a transaction that is still open is taken for one that may stay open for ever: most others have
#: ended by then
_MOMENT = 2.0


def release(
    config: Mapping[str, str],
    transactional_ids: Sequence[str],
    topics: Mapping[str, int],
    *,
    admin: Topics,
    transaction_timeout: float,
    waiting: Waiting,
) -> bool:
    """Abort what these transactional ids have left open in topics; returns whether anything may have been left. The
    users of the ids have to initialise them again then.

    The first open record of each partition is sent once more, in a transaction that is aborted. Readers of uncommitted
    records see only a repeated record, which they recognise by its position. An open transaction of another producer,
    which is at work, is not affected, and it is not waited for longer than a moment.

    :param topics: for each topic, how many partitions it has.
    :param admin: the caller's admin client.
    :param waiting: called while a server is not available; it sleeps, or raises to give up.
    :raises Outage: Kafka does not say what is open.
    """
    if not (found := _first_open(config, admin, topics)):
        return False
    log.info("Ending what an outage may have left open in %d partitions.", len(found))
    written = sorted({message.topic() for message in found})
    for transactional_id in transactional_ids:
        producer = TransactionalProducer(
            config, transactional_id, written, transaction_timeout=transaction_timeout, waiting=waiting
        )
        try:
            producer.open()
            producer.attempt([_again(message) for message in found])
        finally:
            producer.close()
    return True


def _first_open(config: Mapping[str, str], admin: Topics, topics: Mapping[str, int]) -> list[confluent_kafka.Message]:
    """For each partition in which a transaction stays open, the first record after its last stable offset. Those that
    may not be read are left out."""
    ends, deadline = admin.all_ends(topics), time.monotonic() + _MOMENT
    while stuck := _stuck(admin, topics, ends):
        if time.monotonic() > deadline:
            return _records(config, stuck)
        time.sleep(_MOMENT / 20)
    return []


def _stuck(admin: Topics, topics: Mapping[str, int], ends: Mapping[str, Sequence[int]]) -> list[TopicPartition]:
    """The partitions with a transaction that is open before these ends, at the first record of it."""
    stable = admin.all_ends(topics, committed=True)
    return [
        TopicPartition(name, p, stable[name][p])
        for name, count in topics.items()
        for p in range(count)
        if stable[name][p] < ends[name][p]
    ]


def _records(config: Mapping[str, str], places: Sequence[TopicPartition]) -> list[confluent_kafka.Message]:
    consumer = made(Consumer, reader_config(config, isolation_level="read_uncommitted"))
    messages = []
    try:
        for place in places:
            consumer.assign([place])
            if (message := _next(config, consumer)) is None:
                raise Outage(f"Kafka does not send the record of topic {place.topic!r} at which a transaction is open.")
            if message.error() is None:
                messages.append(message)
    finally:
        consumer.close()
    return messages


def _next(config: Mapping[str, str], consumer: Consumer) -> confluent_kafka.Message | None:
    """What comes first, behind errors that pass, in time."""
    deadline = time.monotonic() + _TIMEOUT
    while True:
        with errors(config):
            message = consumer.poll(max(0.0, deadline - time.monotonic()))
        if message is None or (error := message.error()) is None or not passes(error):
            return message


def _again(message: confluent_kafka.Message) -> Message:
    return Message(
        message.topic(), message.key(), message.value(), message.partition(), message.timestamp()[1],
        tuple(message.headers() or ()),
    )  # fmt: skip
