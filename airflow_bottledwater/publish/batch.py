"""A batch: raw messages with all that is needed to encode them, so that whoever does asks nobody."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from airflow_bottledwater.encoding.layout import Rows
from airflow_bottledwater.model.lsn import Position
from airflow_bottledwater.model.version import Version


@dataclass(frozen=True, slots=True)
class Batch:
    """Changes from ``start`` (exclusive) to ``end`` (inclusive), whole transactions unless one exceeds the limit.

    :param data: row and truncate messages of pgoutput, one after the other.
    :param changes: :data:`~airflow_bottledwater.encoding.layout.CHANGE`; they point into ``data``.
    :param versions: what the changes' ``relation`` refers to.
    """

    start: Position
    end: Position
    data: npt.NDArray[np.uint8]
    changes: Rows
    versions: tuple[Version, ...]

    def __len__(self) -> int:
        return len(self.changes)

    def before(self, final_lsn: int) -> Batch:
        """The transactions of this batch before the one with this final LSN (perhaps none).

        The new end is (that LSN, 0): the transaction itself is not skipped there, everything before is.
        """
        count = int(np.searchsorted(self.changes["lsn"], final_lsn, side="left"))
        end = max(self.start, Position(final_lsn, 0))
        return Batch(self.start, end, self.data, self.changes[:count], self.versions)

    def after(self, position: Position) -> Batch | None:
        """The transactions of this batch that begin at or behind a position; None where it is no place between two of them."""
        count = int(np.searchsorted(self.changes["lsn"], position.lsn, side="left"))
        between = count < len(self.changes) and int(self.changes[count]["lsn"]) == position.lsn
        if position.ordinal or not between or not self.start < position < self.end:
            return None
        return Batch(position, self.end, self.data, self.changes[count:], self.versions)
