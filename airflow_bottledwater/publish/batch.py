"""A batch of changes: raw messages with all that is needed to encode them, so that encoding asks no server."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from airflow_bottledwater.encoding.layout import Rows
from airflow_bottledwater.encoding.wire import MESSAGE_LOGICAL
from airflow_bottledwater.model.lsn import Position
from airflow_bottledwater.model.version import Version


@dataclass(frozen=True, slots=True)
class Batch:
    """The changes from ``start`` (exclusive) to ``end`` (inclusive): whole transactions, except that one too large is
    cut. They are in the order of their positions.

    :param data: row and truncate messages of pgoutput, one after the other.
    :param changes: rows of :data:`~airflow_bottledwater.encoding.layout.CHANGE`; they point into ``data``.
    :param versions: the relation versions that the changes refer to, by their index in ``relation``.
    """

    start: Position
    end: Position
    data: npt.NDArray[np.uint8]
    changes: Rows
    versions: tuple[Version, ...]

    def __len__(self) -> int:
        return len(self.changes)

    def before(self, final_lsn: int) -> Batch:
        """The transactions of this batch before the one with this final LSN (perhaps none)."""
        count = int(np.searchsorted(self.changes["lsn"], final_lsn, side="left"))
        end = max(self.start, self._place_before(count) if count < len(self) else Position(final_lsn, 0))
        return Batch(self.start, end, self.data, self.changes[:count], self.versions)

    def _place_before(self, count: int) -> Position:
        """The position before a transaction, by the number of its first change: (its final LSN, 0), from which
        everything before it is skipped, but not the transaction itself.

        A logical message of no transaction is sent by PostgreSQL only from the beginning of its record on, which is not
        known: before such a one, it is right behind the beginning of what comes before it.
        """
        change = self.changes[count]
        if change["xid"] or change["kind"] != MESSAGE_LOGICAL:
            return Position(int(change["lsn"]), 0)
        return Position(int(self.changes[count - 1]["lsn"]) + 1, 0) if count else self.start

    def whole(self, most: int) -> Batch:
        """The leading transactions of this batch that have at most so many changes together, and at least the first."""
        lsn = self.changes["lsn"]
        if most >= len(self):
            return self
        count = int(np.searchsorted(lsn, lsn[most], side="left")) or int(np.searchsorted(lsn, lsn[0], side="right"))
        return self if count == len(self) else self.before(int(lsn[count]))

    def leading(self, most: int) -> Batch:
        """The leading changes of this batch, at least one and otherwise at most so many: whole transactions, if one
        fits; otherwise a part of the first."""
        most = max(1, most)
        part = self.whole(most)
        if len(part) <= most:
            return part
        last = self.changes[most - 1]
        end = Position(int(last["lsn"]), int(last["ordinal"]))
        return Batch(self.start, end, self.data, self.changes[:most], self.versions)

    def after(self, position: Position) -> Batch | None:
        """The changes of this batch from a position on; None unless the position is one at which :meth:`before` or
        :meth:`leading` has ended a part."""
        begin, end = (int(np.searchsorted(self.changes["lsn"], position.lsn, side=s)) for s in ("left", "right"))
        count, known = begin, begin < len(self) and self._place_before(begin) == position
        if position.ordinal:
            ordinals = self.changes["ordinal"][begin:end]
            count += int(np.searchsorted(ordinals, position.ordinal, side="right"))
            known = count > begin and ordinals[count - begin - 1] == position.ordinal
        if not known or not self.start < position < self.end:
            return None
        return Batch(position, self.end, self.data, self.changes[count:], self.versions)
