"""Blocks as librdkafka and libpq give them, of records and rows that a test has made."""

from __future__ import annotations

import struct
from collections.abc import Sequence

import numpy as np

from airflow_bottledwater.kafka.librdkafka import MESSAGE
from airflow_bottledwater.kafka.topic_reader import RecordBlock
from airflow_bottledwater.postgres.receive import MessageBlock


class Records(RecordBlock):
    """Records with keys and values in a buffer of their own."""

    def __init__(self, given: Sequence[tuple[bytes, bytes | None]]) -> None:
        self._buffer = np.frombuffer(b"".join(key + (value or b"") for key, value in given) + b"\0", dtype=np.uint8)
        messages = np.zeros(len(given), dtype=MESSAGE)
        at = self._buffer.ctypes.data
        for offset, (row, (key, value)) in enumerate(zip(messages, given, strict=True)):
            row["key"], row["key_len"], row["offset"] = at, len(key), offset
            row["payload"], row["len"] = (0, 0) if value is None else (at + len(key), len(value))
            at += len(key) + len(value or b"")
        super().__init__(messages, np.zeros(len(given), dtype=np.int64))


def rows(lines: Sequence[bytes]) -> MessageBlock:
    """Rows of a COPY in text format."""
    data = np.frombuffer(bytearray(b"".join(lines) + b"\0"), dtype=np.uint8)
    return MessageBlock(data, np.cumsum([0, *map(len, lines)], dtype=np.int64))


def headers_of(data: bytes) -> list[tuple[str, bytes | None]]:
    """The headers that a record of an outbox has of its own, as a kernel or a message has them."""
    found = list[tuple[str, bytes | None]]()
    while data:
        (n,) = struct.unpack(">i", data[:4])
        name, data = data[4 : 3 + n].decode(), data[4 + n :]
        (n,) = struct.unpack(">i", data[:4])
        found.append((name, None if n < 0 else data[4 : 4 + n]))
        data = data[4 + max(n, 0) :]
    return found
