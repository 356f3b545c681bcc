"""The latest record of each key of some partitions, in bounded memory."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from airflow_bottledwater import compiled as compiling
from airflow_bottledwater.compiled import callee, compiled
from airflow_bottledwater.kafka.key_table import FULL, PLACES, RANGE_SHIFT, RANGES, KeyTable
from airflow_bottledwater.verify.buckets import Hashes

#: what a record does to its key
SKIP, TOMBSTONE, VALUE = 0, 1, 2

#: the hash of the key's bytes, those of the key's value and of the row, and what the latest record is (0: the place is
#: empty)
_ENTRY = np.dtype([("identity", np.uint64), ("key", np.uint64), ("row", np.uint64), ("kind", np.int64)])


@callee
def _place(table, identity):
    mask = table.size - 1
    place = np.int64(identity & np.uint64(mask))
    while table[place].kind != 0 and table[place].identity != identity:
        place = (place + 1) & mask
    return place


@compiled
def _note(table, used, records, start, low, high):
    """Enter the records from ``start`` whose hash is in the range; returns (next record, entries), earlier if the table
    is full."""
    identities, keys, rows, kinds = records
    limit = table.size // 8 * FULL
    for i in range(start, identities.size):
        identity = identities[i]
        if kinds[i] == SKIP or not low <= np.int64(identity >> RANGE_SHIFT) < high:
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


class LatestValues(KeyTable):
    """The latest records of keys.

    :param records: how many records there are at most.
    :param low: where the range of hashes begins, which are those of the keys' bytes.
    :param places: of the table at most.
    """

    remedy = "Verify a sample, or fewer tables."

    def __init__(self, records: int, low: int, *, places: int = PLACES) -> None:
        warm_up()
        super().__init__(_ENTRY, "identity", "kind", _enter, records=records, low=low, places=places)

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
            i, self.used = _note(self.table, self.used, records, i, self.low, self.high)
            if i < len(identities):
                self.halve()

    def values(self) -> tuple[Hashes, Hashes]:
        """The hashes of the keys whose latest record has a value, and of their rows."""
        # each field is copied by itself: the entries together would take as much memory as the table
        live = self.table["kind"] == VALUE
        return self.table["key"][live], self.table["row"][live]
