"""The first fields of librdkafka's metadata (rdkafka.h), of which only errors of topics are read."""

from __future__ import annotations

import ctypes


class _Topic(ctypes.Structure):
    """struct rd_kafka_metadata_topic."""

    _fields_ = [
        ("topic", ctypes.c_char_p),
        ("partitions", ctypes.c_int),
        ("partition", ctypes.c_void_p),
        ("err", ctypes.c_int),
    ]


class _Metadata(ctypes.Structure):
    """The first fields of struct rd_kafka_metadata."""

    _fields_ = [
        ("brokers", ctypes.c_int),
        ("broker", ctypes.c_void_p),
        ("topic_count", ctypes.c_int),
        ("topics", ctypes.POINTER(_Topic)),
    ]


def topic_errors(address: int) -> dict[str, int]:
    """The error codes of the topics of a struct rd_kafka_metadata, by their names; 0 for none.

    :param address: where that is.
    """
    head = _Metadata.from_address(address)
    return {head.topics[i].topic.decode(): int(head.topics[i].err) for i in range(head.topic_count)}
