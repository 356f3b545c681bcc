"""What a record is for its key by its place in the topic: whether the snapshot can show it, and whether the key belongs
there."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from airflow_bottledwater.kafka.topic_reader import RecordBlock
from airflow_bottledwater.model.lsn import Position
from airflow_bottledwater.verify import records
from airflow_bottledwater.verify.buckets import Hashes
from airflow_bottledwater.verify.latest import SKIP, TOMBSTONE, VALUE
from airflow_bottledwater.verify.task import View

#: misplaced keys that are remembered: each of them is a difference, and this many are enough
_MOST = 100_000


class RecordOrder:
    """Decides by positions what records of a view do to their keys. It is told of all records of some partitions, in
    their order."""

    def __init__(self, view: View) -> None:
        self._from, self._last = view.insert_lsn, view.last_lsn
        self._truncated = Position.parse(view.truncated) if view.truncated else None
        self._shown, self._start = view.first_lsn, np.array(view.start, dtype=np.int64)
        #: the partitions that have a record of behind the TRUNCATE
        self._behind = set[int]()

    def later(self, lsn: int) -> bool:
        """Whether the transaction with this final LSN (0: none) committed after the snapshot. Nothing can have a
        position beyond the end of the WAL: such a record is not one of the stream, and counts."""
        return self._from <= lsn <= self._last

    def positions(self, block: RecordBlock) -> tuple[npt.NDArray[np.uint64], npt.NDArray[np.uint64]]:
        """See :func:`airflow_bottledwater.verify.records.positions`; records of before the pipeline have none."""
        lsns, ordinals = records.positions(block)
        lsns[self._earlier(block)] = ordinals[self._earlier(block)] = 0
        return lsns, ordinals

    def _earlier(self, block: RecordBlock) -> npt.NDArray[np.bool_]:
        earlier: npt.NDArray[np.bool_] = block.messages["offset"] < self._start[block.messages["partition"]]
        return earlier

    def deleted(
        self, block: RecordBlock, lsns: npt.NDArray[np.uint64], ordinals: npt.NDArray[np.uint64]
    ) -> tuple[npt.NDArray[np.bool_], npt.NDArray[np.bool_]]:
        """Which records are of before the TRUNCATE, which deleted their rows, by their positions; and which others by
        their places.

        :param lsns: the records' positions, with ``ordinals``.
        """
        if (at := self._truncated) is None:
            return (never := np.zeros(len(block), dtype=np.bool_)), never
        # a TRUNCATE before the LSN that a row shows the table at came before the row was read: the two lock each other
        # out
        lsns = np.where((lsns == 0) & ~self._earlier(block), records.shown(block), lsns)
        before = (lsns < np.uint64(at.lsn)) | ((lsns == np.uint64(at.lsn)) & (ordinals < np.uint64(at.ordinal)))
        placed = lsns != 0
        behind = self._stands_behind(block, ~before & (lsns <= np.uint64(self._last)))
        by_place = ~placed & ~behind if at.lsn >= self._shown else np.zeros(len(block), dtype=np.bool_)
        return before & placed, by_place

    def _stands_behind(self, block: RecordBlock, later: npt.NDArray[np.bool_]) -> npt.NDArray[np.bool_]:
        """Which records stand behind one of these in their partitions."""
        partitions, found = block.messages["partition"], later.copy()
        for partition in np.unique(partitions).tolist():
            mine = partitions == partition
            found[mine] = np.logical_or.accumulate(later[mine]) | (partition in self._behind)
            if found[mine].any():
                self._behind.add(partition)
        return found

    def kinds(self, block: RecordBlock) -> npt.NDArray[np.int64]:
        """What each record does to its key, for the sums."""
        lsns, ordinals = self.positions(block)
        found = np.where(block.messages["payload"] != 0, VALUE, TOMBSTONE).astype(np.int64)
        found[(lsns >= np.uint64(self._from)) & (lsns <= np.uint64(self._last))] = SKIP
        by_position, by_place = self.deleted(block, lsns, ordinals)
        found[(by_position | by_place) & (found == VALUE)] = TOMBSTONE
        return found


class Misplaced:
    """The keys with a value in a partition that they do not belong to."""

    def __init__(self) -> None:
        self._keys: dict[tuple[int, bytes], np.uint64] = {}

    def take(
        self, block: RecordBlock, keys: Hashes, kinds: npt.NDArray[np.int64], right: npt.NDArray[np.int64]
    ) -> None:
        """Take misplaced records out of a block: their kinds become SKIP.

        :param keys: hashes of the keys.
        :param right: the partitions that the keys belong to.
        """
        wrong = (right != block.messages["partition"]) & (kinds != SKIP)
        for i in np.flatnonzero(wrong).tolist():
            place = int(block.messages[i]["partition"]), block.key(i)
            if kinds[i] == TOMBSTONE:
                self._keys.pop(place, None)
            elif len(self._keys) < _MOST:
                self._keys[place] = keys[i]
        kinds[wrong] = SKIP

    def keys(self) -> Hashes:
        """The hashes of the keys."""
        return np.array(list(self._keys.values()), dtype=np.uint64)
