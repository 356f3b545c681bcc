"""The latest record of each key of some partitions, in bounded memory: a table of hashes holds as many keys as fit. Partitions with more
keys are read several times, for one range of hashes after the other."""

from __future__ import annotations

from typing import Final

import numpy as np
import numpy.typing as npt

from airflow_bottledwater import compiled as compiling
from airflow_bottledwater.compiled import compiled
from airflow_bottledwater.encoding.layout import Rows
from airflow_bottledwater.errors import Refused
from airflow_bottledwater.verify.buckets import Hashes

#: places of the largest table: 134 MB
_PLACES = 1 << 22
#: how full a table may be, in eighths
_FULL = 6
#: hashes of keys' bytes are divided by their upper 16 bits
RANGES: Final = 1 << 16
_RANGE_SHIFT = np.uint64(48)

#: what a record does to its key
SKIP, TOMBSTONE, VALUE = 0, 1, 2

#: the hash of the key's bytes, those of the key's value and of the row, and what the latest record is (0: the place is empty)
_ENTRY = np.dtype([("identity", np.uint64), ("key", np.uint64), ("row", np.uint64), ("kind", np.int64)])


@compiled
def _place(table, identity):
    mask = table.size - 1
    place = np.int64(identity & np.uint64(mask))
    while table[place].kind != 0 and table[place].identity != identity:
        place = (place + 1) & mask
    return place


@compiled
def _note(table, used, records, start, low, high):
    """Enter the records from ``start`` whose hash is in the range; returns (next record, entries), earlier if the table is full."""
    identities, keys, rows, kinds = records
    limit = table.size // 8 * _FULL
    for i in range(start, identities.size):
        identity = identities[i]
        if kinds[i] == SKIP or not low <= np.int64(identity >> _RANGE_SHIFT) < high:
            continue
        if used >= limit:
            return i, used
        place = _place(table, identity)
        used += table[place].kind == 0
        table[place].identity = identity
        table[place].key = keys[i]
        table[place].row = rows[i]
        table[place].kind = kinds[i]
    return identities.size, used


@compiled
def _enter(table, entries):
    for i in range(entries.size):
        table[_place(table, entries[i].identity)] = entries[i]


def warm_up() -> None:
    """Compile it; see :func:`airflow_bottledwater.compiled.warm_up`."""
    compiling.warm_up("latest values", _note_nothing)


def _note_nothing() -> None:
    table, nothing = np.zeros(1, dtype=_ENTRY), np.zeros(0, dtype=np.uint64)
    _note(table, 0, (nothing, nothing, nothing, np.zeros(0, dtype=np.int64)), 0, 0, RANGES)
    _enter(table, table[:0])


class LatestValues:
    """The latest records of the keys whose bytes' hashes are in ``[low, high)``. ``high`` sinks when the table is full; what is then
    outside is for another reading of the partitions.

    :param records: how many records there are at most.
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

    def note(self, identities: Hashes, keys: Hashes, rows: Hashes, kinds: npt.NDArray[np.int64]) -> None:
        """Enter records; those of a key come in order.

        :param identities: hashes of the keys' bytes.
        :param keys: hashes of the keys' values, by which both sides are compared; ``rows`` those of keys and values.
        :param kinds: what each record does.
        :raises Refused: the keys of a single range fill the table.
        """
        records = (np.ascontiguousarray(identities), keys, rows, kinds)
        i = 0
        while i < len(identities):
            i, self._used = _note(self._table, self._used, records, i, self.low, self.high)
            if i < len(identities):
                self._halve()

    def _halve(self) -> None:
        """Leave half of the range, or more, to another reading."""
        kept = self._table[self._table["kind"] != 0]
        while len(kept) == self._used:
            if self.high - self.low == 1:
                raise Refused("A topic has more keys than can be compared.", "Verify a sample, or fewer tables.")
            self.high = self.low + (self.high - self.low) // 2
            kept = kept[(kept["identity"] >> _RANGE_SHIFT).astype(np.int64) < self.high]
        self._table[:] = np.zeros(1, dtype=_ENTRY)
        _enter(self._table, kept)
        self._used = len(kept)

    def values(self) -> tuple[Hashes, Hashes]:
        """The hashes of the keys whose latest record has a value, and of their rows."""
        found = self._table[self._table["kind"] == VALUE]
        return found["key"].copy(), found["row"].copy()
