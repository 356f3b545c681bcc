"""Transactions that a broker has left open for ever.

A coordinator that restarts while a transaction times out may complete it without writing its markers (seen with Kafka 4.3.1, a
single node killed for longer than the time-out). No reader with ``read_committed`` gets past its records then, and the next
commit of the same producer would take them along. The tool of KIP-664 (``kafka-transactions.sh abort``) ends such a
transaction; so does its own producer with a transaction that writes to the same partitions and is aborted.
"""

from __future__ import annotations

import logging
import uuid
from collections.abc import Mapping, Sequence

from confluent_kafka import Consumer, Message, TopicPartition

from airflow_bottledwater.encoding import wire
from airflow_bottledwater.kafka.publisher import Publisher, Records, single
from airflow_bottledwater.kafka.topics import Topics, client_config, errors
from airflow_bottledwater.model.lsn import Position

log = logging.getLogger(__name__)

_TIMEOUT = 10.0


def release(config: Mapping[str, str], publisher: Publisher, topics: Sequence[str]) -> None:
    """Abort what the publisher's id has left open in these topics; the publisher is initialised again behind it.

    The first record of each is sent once more, so that a reader of uncommitted records sees nothing that it cannot tell by its
    position. Where the transaction is another's and at work, that record is all that happens.

    :param publisher: initialised; made for these topics, in this order.
    """
    found = [(index, message) for index, name in enumerate(topics) for message in _first_open(config, name)]
    if not found:
        return
    log.warning("%s: ending what an outage has left open in %d partitions.", publisher.transactional_id, len(found))
    publisher.attempt([_again(index, message) for index, message in found])
    publisher.open()


def _first_open(config: Mapping[str, str], topic: str) -> list[Message]:
    """The first record behind each partition's last stable offset, where that is not the end."""
    described = Topics(config).describe([topic])
    if topic not in described:
        return []
    partitions = described[topic].partitions
    ends, stable = Topics(config).ends(topic, partitions), Topics(config).ends(topic, partitions, committed=True)
    stuck = [TopicPartition(topic, p, stable[p]) for p in range(partitions) if stable[p] < ends[p]]
    consumer = Consumer(
        {
            **client_config(config),
            "group.id": f"bottledwater-{uuid.uuid4()}",
            "enable.auto.commit": False,
            "isolation.level": "read_uncommitted",
        }
    )
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


def _again(index: int, message: Message) -> Records:
    record = single(index, message.partition(), message.key(), message.value(), message.timestamp()[1])
    headers = dict(message.headers() or [])
    if "pos" not in headers or "op" not in headers:
        return record
    position = Position.parse(headers["pos"].decode())
    row = record.table
    row[0, wire.R_OP], row[0, wire.R_LSN], row[0, wire.R_ORDINAL] = headers["op"][0], position.lsn, position.ordinal
    return Records(row, record.data, wire.HEADERS)
