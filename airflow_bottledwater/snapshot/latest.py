"""Which records of a topic the snapshot has not found again, for a topic with any number of keys, in bounded memory."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from airflow_bottledwater import compiled as compiling
from airflow_bottledwater.compiled import callee, compiled
from airflow_bottledwater.kafka import librdkafka as rd
from airflow_bottledwater.kafka.key_table import FULL, PLACES, RANGE_SHIFT, RANGES, KeyTable
from airflow_bottledwater.kafka.topic_reader import RecordBlock

#: mixes the partition into the second half of a key's hash, for the entries of partitions besides the first that a key
#: was seen in: a key that another program wrote to several partitions has a latest record in each of them
_MIX = np.uint64(0x9E3779B97F4A7C15)

#: 128 bits of the hash, and ``at``, which is 0 where the place is empty; else one more than twice the latest record's
#: offset, and one more if that has a value. A key's first entry also has the partition that it is of, and whether the
#: snapshot has found the key
_ENTRY = np.dtype(
    [("first", np.uint64), ("second", np.uint64), ("at", np.int64), ("partition", np.int32), ("found", np.int32)]
)


@callee
def _at(message):
    return 2 * message.offset + (1 if message.payload != 0 else 0) + 1


@callee
def _place(table, first, second):
    mask = table.size - 1
    place = np.int64(second & np.uint64(mask))
    while table[place].at != 0 and (table[place].first != first or table[place].second != second):
        place = (place + 1) & mask
    return place


@callee
def _mixed(second, partition):
    return second ^ (np.uint64(partition + 1) * _MIX)


@callee
def _place_of(table, key, first, second, partition):
    """Where a key's entry of a partition is or would be; ``key`` is the place of its first entry."""
    if table[key].at == 0 or table[key].partition == partition:
        return key
    return _place(table, first, _mixed(second, partition))


@compiled
def _note(table, used, messages, hashes, ends, start, low, high):
    """Enter the records from ``start`` whose hash is in the range; returns (next record, entries), earlier if the table
    is full."""
    limit = table.size // 8 * FULL
    for i in range(start, messages.size):
        first, second, message = hashes[i, 0], hashes[i, 1], messages[i]
        if not low <= np.int64(first >> RANGE_SHIFT) < high:
            continue
        if used >= limit:
            return i, used
        key = _place(table, first, second)
        place = _place_of(table, key, first, second, message.partition)
        entry = table[place]
        if entry.at == 0:
            used += 1
            entry.first = first
            entry.second = second if place == key else _mixed(second, message.partition)
            entry.partition = message.partition
        entry.at = max(entry.at, _at(message))
        if message.payload != 0 and message.offset >= ends[message.partition]:
            table[key].found = 1
    return messages.size, used


@compiled
def _find(table, hashes, low, high):
    """Mark the keys among these that have a record."""
    for i in range(hashes.shape[0]):
        first, second = hashes[i, 0], hashes[i, 1]
        if low <= np.int64(first >> RANGE_SHIFT) < high:
            key = _place(table, first, second)
            if table[key].at != 0:
                table[key].found = 1


@compiled
def _enter(table, entries):
    for i in range(entries.size):
        table[_place(table, entries[i].first, entries[i].second)] = entries[i]


@compiled
def _find_stale(table, messages, hashes, low, high, out):
    for i in range(messages.size):
        first, second, message = hashes[i, 0], hashes[i, 1], messages[i]
        if message.payload != 0 and low <= np.int64(first >> RANGE_SHIFT) < high:
            key = _place(table, first, second)
            place = _place_of(table, key, first, second, message.partition)
            out[i] = table[place].at == _at(message) and table[key].found == 0


def warm_up() -> None:
    """Compile it; see :func:`airflow_bottledwater.compiled.warm_up`."""
    compiling.warm_up("latest records", _note_nothing)


def _note_nothing() -> None:
    table, nothing = np.zeros(1, dtype=_ENTRY), np.zeros(0, dtype=rd.MESSAGE)
    hashes = np.zeros((0, 2), dtype=np.uint64)
    _note(table, 0, nothing, hashes, np.zeros(0, dtype=np.int64), 0, 0, RANGES)
    _find(table, hashes, 0, RANGES)
    _enter(table, table[:0])
    _find_stale(table, nothing, hashes, 0, RANGES, np.zeros(0, dtype=np.bool_))


class LatestRecords(KeyTable):
    """The latest records of keys, and which of these keys the snapshot has found.

    :param records: how many records there are at most.
    :param ends: per partition, where the snapshot's records begin.
    :param low: where the range of hashes begins.
    :param places: of the table at most.
    """

    def __init__(self, records: int, ends: Sequence[int], low: int, *, places: int = PLACES) -> None:
        warm_up()
        super().__init__(_ENTRY, "first", "at", _enter, records=records, low=low, places=places)
        self._ends = np.array(ends, dtype=np.int64)

    def note(self, block: RecordBlock) -> None:
        """Enter a block's records; those of a partition come in order.

        :raises Refused: the keys of a single range fill the table.
        """
        i = 0
        while i < len(block):
            i, self.used = _note(
                self.table, self.used, block.messages, block.hashes, self._ends, i, self.low, self.high
            )
            if i < len(block):
                self.halve()

    def find(self, hashes: npt.NDArray[np.uint64]) -> None:
        """Mark keys that the table has; to be called when all records are entered."""
        _find(self.table, hashes, self.low, self.high)

    def stale(self, block: RecordBlock) -> npt.NDArray[np.bool_]:
        """Which of a block's records have a value, are the latest of their keys, and of keys that the snapshot has not
        found.

        :param block: records before the snapshot's.
        """
        found = np.zeros(len(block), dtype=np.bool_)
        _find_stale(self.table, block.messages, block.hashes, self.low, self.high, found)
        return found

    def stale_keys(self, block: RecordBlock) -> list[tuple[int, bytes]]:
        """Partition and key of each of the records that :meth:`stale` names."""
        found = np.flatnonzero(self.stale(block)).tolist()
        return [(int(block.messages[i]["partition"]), block.key(i)) for i in found]

    def any_before(self) -> bool:
        """Whether a latest record has a value and may lie before the snapshot's."""
        at = self.table["at"]
        return bool(((at > 1) & (at % 2 == 0) & ((at - 1) // 2 < self._ends.max(initial=0))).any())
