"""Reads a whole topic once with Python's consumer: what the package's own reader is compared with."""

from __future__ import annotations

import uuid
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from confluent_kafka import Consumer, KafkaError, KafkaException, TopicPartition

from airflow_bottledwater.kafka.clients import client_config, errors, passes


def scan(config: Mapping[str, str], topic: str, ends: Sequence[int]) -> Iterator[Any]:
    """The committed records of a topic before these offsets, in order for each partition.

    :param ends: for each partition, its high watermark.
    :raises Outage: the brokers are not available.
    """
    consumer = Consumer(
        {
            **client_config(config),
            "group.id": f"bottledwater-{uuid.uuid4()}",
            "enable.auto.commit": False,
            "enable.partition.eof": True,
            "fetch.wait.max.ms": 50,
            "isolation.level": "read_committed",
            "auto.offset.reset": "earliest",
        }
    )
    waited_for = {p for p, end in enumerate(ends) if end}
    consumer.assign([TopicPartition(topic, p, 0) for p in waited_for])
    try:
        while waited_for:
            with errors(config):
                messages = consumer.consume(10_000, 0.1)
            for message in messages:
                partition, offset = message.partition(), message.offset()
                error = message.error()
                if error is None:
                    if offset < ends[partition]:
                        yield message
                    offset += 1
                elif error.code() != KafkaError._PARTITION_EOF:
                    if passes(error):
                        continue
                    with errors(config):
                        raise KafkaException(error)
                # the end of a partition is reported with its offset, which also counts markers and aborted records
                if offset >= ends[partition]:
                    waited_for.discard(partition)
    finally:
        consumer.close()
