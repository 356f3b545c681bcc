"""A table of hashes of keys, for a topic with any number of keys, in bounded memory: it holds as many keys as fit. A
topic with more is read several times, for one range of hashes after the other."""

from __future__ import annotations

from collections.abc import Callable
from typing import Final

import numpy as np
import numpy.typing as npt

from airflow_bottledwater.encoding.layout import Rows
from airflow_bottledwater.errors import Refused

#: places of the largest table: 134 MB with entries of 32 bytes
PLACES: Final = 1 << 22
#: how full a table may be, in eighths
FULL: Final = 6
#: hashes are divided by their upper 16 bits
RANGES: Final = 1 << 16
RANGE_SHIFT: Final = np.uint64(48)


class KeyTable:
    """Entries of the keys whose hashes are in ``[low, high)``. ``high`` sinks when the table is full; what is then
    outside is for another reading of the topic.

    :param entry: the type of an entry.
    :param hashed: the field of an entry with the hash that ranges divide.
    :param taken: the field of an entry that is 0 where a place is empty.
    :param enter: puts entries into a table that has room for them.
    :param records: how many records there are at most.
    :param low: where the range begins, of :data:`RANGES`.
    :param places: of the table at most, a power of two.
    """

    #: what the reader can do where the keys of a single range fill the table
    remedy = "Publish the table to a new topic."

    def __init__(
        self,
        entry: np.dtype[np.void],
        hashed: str,
        taken: str,
        enter: Callable[[Rows, Rows], None],
        *,
        records: int,
        low: int,
        places: int,
    ) -> None:
        size = 16
        while size < min(places, 2 * records):
            size *= 2
        self.table: Rows = np.zeros(size, dtype=entry)
        self.used = 0
        self.low, self.high = low, RANGES
        self._hashed, self._taken, self._enter = hashed, taken, enter

    def halve(self) -> None:
        """Leave half of the range, or more, to another reading.

        :raises Refused: the keys of a single range fill the table.
        """
        # only what stays is copied: a copy of all entries would take as much memory as the table
        ranges = (self.table[self._hashed] >> RANGE_SHIFT).astype(np.uint16)
        stays: npt.NDArray[np.bool_] = self.table[self._taken] != 0
        while (count := int(np.count_nonzero(stays))) == self.used:
            if self.high - self.low == 1:
                raise Refused("A topic has more keys than can be compared.", self.remedy)
            self.high = self.low + (self.high - self.low) // 2
            stays &= ranges < self.high
        kept = self.table[stays]
        self.table[:] = np.zeros(1, dtype=self.table.dtype)
        self._enter(self.table, kept)
        self.used = count
