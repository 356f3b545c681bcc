"""Hashes of rows and of records, by which both sides of a table are summed up and found again.

The hash of a row is that of its key and of all its columns in canonical form
(:func:`~airflow_bottledwater.verify.values.canonical`). This is the way that takes any type; :mod:`.program` is the
compiled one, which needs plain types in the key.
"""

from __future__ import annotations

from typing import Protocol

import numpy as np

from airflow_bottledwater.kafka.topic_reader import RecordBlock
from airflow_bottledwater.postgres.receive import MessageBlock
from airflow_bottledwater.verify.buckets import Hashes
from airflow_bottledwater.verify.values import Expectation, TopicReader, Unreadable, canonical, copied, text_hash


class Scan(Protocol):
    """Makes hashes of blocks: two arrays, of the keys and of the rows."""

    def rows(self, block: MessageBlock) -> tuple[Hashes, Hashes]:
        """Of rows in COPY's text format."""

    def records(self, block: RecordBlock) -> tuple[Hashes, Hashes]:
        """Of records. A value that cannot be decoded has a hash that no row has; a tombstone's is not used."""


def line(block: MessageBlock, i: int) -> bytes:
    """A row of a block."""
    return block.data[block.offsets[i] : block.offsets[i + 1]].tobytes()


class PlainScan:
    """Decodes each value in Python.

    :param seed: the key of the hashes.
    """

    def __init__(self, expectation: Expectation, reader: TopicReader, seed: bytes) -> None:
        self._expectation, self._reader, self._seed = expectation, reader, seed
        self._columns = list(expectation.values([None] * len(expectation.table.columns)))

    def _hash(self, text: str) -> int:
        return text_hash(text, self._seed)

    def _row(self, key: str, values: dict[str, object]) -> int:
        return self._hash(key + canonical([values.get(name) for name in self._columns]))

    def rows(self, block: MessageBlock) -> tuple[Hashes, Hashes]:
        """See :class:`Scan`."""
        keys, rows = np.zeros(block.count, dtype=np.uint64), np.zeros(block.count, dtype=np.uint64)
        for i in range(block.count):
            texts = copied(line(block, i))
            key = canonical(self._expectation.key(texts))
            keys[i], rows[i] = self._hash(key), self._row(key, self._expectation.values(texts))
        return keys, rows

    def records(self, block: RecordBlock) -> tuple[Hashes, Hashes]:
        """See :class:`Scan`."""
        keys, rows = np.zeros(len(block), dtype=np.uint64), np.zeros(len(block), dtype=np.uint64)
        for i in range(len(block)):
            data, value = block.key(i), block.value(i)
            try:
                key = canonical(self._reader.key(data) if self._expectation.table.keyed else {})
            except Unreadable:
                key = canonical(data)
            keys[i] = self._hash(key)
            if value is not None:
                try:
                    rows[i] = self._row(key, dict(self._reader.value(value).values))
                except Unreadable:
                    rows[i] = self._hash(key + canonical(value))
        return keys, rows
