"""Blocks as librdkafka and libpq give them, of records and rows that a test has made."""

from __future__ import annotations

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
