"""Which record is the latest of its key, for a topic with any number of keys, in bounded memory.

A table of hashes holds as many keys as fit. A topic with more is read several times, for one range of hashes after the other.
"""

from __future__ import annotations

from typing import Final

import numpy as np
import numpy.typing as npt

from airflow_bottledwater import compiled as compiling
from airflow_bottledwater.compiled import compiled
from airflow_bottledwater.encoding.layout import Rows
from airflow_bottledwater.kafka import librdkafka as rd
from airflow_bottledwater.kafka.topic_reader import Block

#: places of the largest table: 100 MB
_PLACES = 1 << 22
#: how full a table may be, in eighths
_FULL = 6
#: hashes are divided by their upper 16 bits
RANGES: Final = 1 << 16
_RANGE_SHIFT = np.uint64(48)
#: mixes the partition into the hash of a key: a key that another program wrote to several partitions has a latest record in each
_MIX = np.uint64(0x9E3779B97F4A7C15)

#: the latest record of a key: 128 bits of the key's hash, and ``at``, which is 0 where the place is empty; else one more than twice
#: the record's offset, and one more if it has a value
_ENTRY = np.dtype([("first", np.uint64), ("second", np.uint64), ("at", np.int64)])


@compiled
def _at(message):
    return 2 * message.offset + (1 if message.payload != 0 else 0) + 1


@compiled
def _place(table, first, second):
    mask = table.size - 1
    place = np.int64(second & np.uint64(mask))
    while table[place].at != 0 and (table[place].first != first or table[place].second != second):
        place = (place + 1) & mask
    return place


@compiled
def _hash(hashes, messages, i):
    return hashes[i, 0] ^ (np.uint64(messages[i].partition + 1) * _MIX)


@compiled
def _note(table, used, messages, hashes, start, low, high):
    """Enter the records from ``start`` whose hash is in the range; returns (next record, entries), earlier if the table is full."""
    limit = table.size // 8 * _FULL
    for i in range(start, messages.size):
        first = _hash(hashes, messages, i)
        if not low <= np.int64(first >> _RANGE_SHIFT) < high:
            continue
        place = _place(table, first, hashes[i, 1])
        if table[place].at == 0:
            if used >= limit:
                return i, used
            used += 1
            table[place].first = first
            table[place].second = hashes[i, 1]
        table[place].at = _at(messages[i])
    return messages.size, used


@compiled
def _enter(table, entries):
    for i in range(entries.size):
        table[_place(table, entries[i].first, entries[i].second)] = entries[i]


@compiled
def _find_current(table, messages, hashes, low, high, out):
    """Mark the records with a value that are the latest of their keys."""
    for i in range(messages.size):
        first = _hash(hashes, messages, i)
        if messages[i].payload != 0 and low <= np.int64(first >> _RANGE_SHIFT) < high:
            place = _place(table, first, hashes[i, 1])
            out[i] = table[place].at == _at(messages[i])


def warm_up() -> None:
    """Compile it; see :func:`airflow_bottledwater.compiled.warm_up`."""
    compiling.warm_up("latest records", _note_nothing)


def _note_nothing() -> None:
    table, nothing = np.zeros(1, dtype=_ENTRY), np.zeros(0, dtype=rd.MESSAGE)
    hashes = np.zeros((0, 2), dtype=np.uint64)
    _note(table, 0, nothing, hashes, 0, 0, RANGES)
    _enter(table, table[:0])
    _find_current(table, nothing, hashes, 0, RANGES, np.zeros(0, dtype=np.bool_))


class LatestRecords:
    """The latest record of each key whose hash is in ``[low, high)``. ``high`` sinks when the table is full; what is then outside
    is for another reading of the topic.

    :param records: how many records there are at most.
    :param low: where the range begins, of :data:`RANGES`.
    :param places: of the table at most, a power of two.
    """

    def __init__(self, records: int, low: int, *, places: int = _PLACES) -> None:
        warm_up()
        size = 16
        while size < min(places, 2 * records):
            size *= 2
        self._table: Rows = np.zeros(size, dtype=_ENTRY)
        self._used = 0
        self.low, self.high = low, RANGES

    def note(self, block: Block) -> None:
        """Enter a block's records; those of a partition come in order."""
        i = 0
        while i < len(block):
            i, self._used = _note(self._table, self._used, block.messages, block.hashes, i, self.low, self.high)
            if i < len(block):
                self._halve()

    def _halve(self) -> None:
        """Leave half of the range to another reading."""
        self.high = self.low + max(1, (self.high - self.low) // 2)
        ranges = (self._table["first"] >> _RANGE_SHIFT).astype(np.int64)
        kept = self._table[(self._table["at"] != 0) & (ranges < self.high)]
        if len(kept) == self._used:  # one part in 65,536 of all hashes fills it
            raise MemoryError("A topic has more keys than can be compared.")
        self._table[:] = np.zeros(1, dtype=_ENTRY)
        _enter(self._table, kept)
        self._used = len(kept)

    def current(self, block: Block) -> npt.NDArray[np.bool_]:
        """Which of a block's records have a value and are the latest of their keys, of those in the range."""
        found = np.zeros(len(block), dtype=np.bool_)
        _find_current(self._table, block.messages, block.hashes, self.low, self.high, found)
        return found

    def any_below(self, end: int) -> bool:
        """Whether a key's latest record has a value and an offset below ``end``."""
        at = self._table["at"]
        return bool(((at > 0) & (at % 2 == 0) & ((at - 1) // 2 < end)).any())
