"""Transactions that a broker has left open for ever.

A coordinator that restarts while a transaction times out may complete it without writing its markers (seen with Kafka
4.3.1, a single node killed for longer than the time-out). Readers with ``read_committed`` then never get past its
records, and the next commit under the same transactional id would commit them, too. The tool of KIP-664
(``kafka-transactions.sh abort``) ends such a transaction. A producer with the same id can also end it, with a
transaction that writes to the same partitions and is aborted.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence

import confluent_kafka
from confluent_kafka import Consumer, TopicPartition

from airflow_bottledwater.backoff import Waiting
from airflow_bottledwater.kafka.clients import errors, made, reader_config
from airflow_bottledwater.kafka.producer import Message, TransactionalProducer
from airflow_bottledwater.kafka.topics import Topics

log = logging.getLogger(__name__)

_TIMEOUT = 10.0


def release(
    config: Mapping[str, str],
    transactional_id: str,
    topics: Sequence[str],
    *,
    transaction_timeout: float,
    waiting: Waiting,
) -> bool:
    """Abort what a transactional id has left open in these topics; returns whether anything was open there.

    The first open record of each partition is sent once more, in a transaction that is aborted. Readers of uncommitted
    records see only a repeated record, which they recognise by its position. If the open transaction is another
    producer's, which is at work, it is not affected. The user of the id has to initialise it again afterwards.

    :param waiting: called while a server is not available; it sleeps, or raises to give up.
    """
    found = _first_open(config, topics)
    if not found:
        return False
    log.warning("%s: ending what an outage has left open in %d partitions.", transactional_id, len(found))
    producer = TransactionalProducer(
        config, transactional_id, topics, transaction_timeout=transaction_timeout, waiting=waiting
    )
    producer.open()
    try:
        producer.attempt([_again(message) for message in found])
    finally:
        producer.close()
    return True


def _first_open(config: Mapping[str, str], topics: Sequence[str]) -> list[confluent_kafka.Message]:
    """For each partition with an open transaction, the first record after its last stable offset."""
    admin = Topics(config)
    partitions = {name: topic.partitions for name, topic in admin.describe(topics).items()}
    ends, stable = admin.all_ends(partitions), admin.all_ends(partitions, committed=True)
    stuck = [
        TopicPartition(name, p, stable[name][p])
        for name, count in partitions.items()
        for p in range(count)
        if stable[name][p] < ends[name][p]
    ]
    if not stuck:
        return []
    consumer = made(Consumer, reader_config(config, isolation_level="read_uncommitted"))
    messages = []
    try:
        for partition in stuck:
            consumer.assign([partition])
            with errors(config):
                message = consumer.poll(_TIMEOUT)
            if message is not None and message.error() is None:
                messages.append(message)
    finally:
        consumer.close()
    return messages


def _again(message: confluent_kafka.Message) -> Message:
    return Message(
        message.topic(), message.key(), message.value(), message.partition(), message.timestamp()[1],
        tuple(message.headers() or ()),
    )  # fmt: skip
