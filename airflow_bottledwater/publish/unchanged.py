"""The large values that the rows of a batch lack because updates left them unchanged: the tables that the compiled
functions fill."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import replace

import numpy as np
import numpy.typing as npt

from airflow_bottledwater.encoding import layout, wire
from airflow_bottledwater.encoding.kernels import unchanged
from airflow_bottledwater.encoding.program import Programs
from airflow_bottledwater.publish.batch import Batch
from airflow_bottledwater.publish.current import Cells, KeyBatch


class UnchangedValues:
    """The values that the rows of a batch lack, in the tables of the compiled functions of :mod:`kernels.unchanged`.

    :param affected: for each relation version, 1 if changes of it lack values.
    :param lacking: how many changes lack values; ``values`` is how many values they lack.
    :ivar changes: a copy of the batch's changes.
    :ivar lacking: the changes that lack values, as rows of :data:`~airflow_bottledwater.encoding.layout.LACKING`.
    """

    def __init__(
        self, batch: Batch, programs: Programs, affected: npt.NDArray[np.int64], lacking: int, values: int
    ) -> None:
        self.batch, self.programs = batch, programs
        self.changes = batch.changes.copy()
        self.lacking = np.zeros(lacking, dtype=layout.LACKING)
        self._missing = np.zeros(values, dtype=layout.MISSING)
        self._fields = np.zeros((5, programs.width), dtype=layout.FIELD)
        widest = max(1, *(len(table.key) for table in programs.tables))
        self._keys = np.zeros((len(batch), widest), dtype=layout.FIELD)
        self._looked_up: list[npt.NDArray[np.uint8]] = []
        index = (self.lacking, self._missing, np.zeros(len(batch), dtype=np.int64))
        unchanged.find_in_batch(
            batch.data, self.changes, programs.program, affected, self._fields, self._keys, _slots(len(batch)), index
        )

    @property
    def _open(self) -> npt.NDArray[np.bool_]:
        found: npt.NDArray[np.bool_] = self._missing["kind"] == wire.FIELD_UNCHANGED
        return found

    def relations(self) -> list[int]:
        """The relation versions, by index, for which a value is still missing."""
        return [int(r) for r in np.unique(self.changes["relation"][self._missing["change"][self._open]])]

    def _of(self, relation: int) -> npt.NDArray[np.bool_]:
        found: npt.NDArray[np.bool_] = self._open & (self.changes["relation"][self._missing["change"]] == relation)
        return found

    def wanted(self, relation: int) -> tuple[npt.NDArray[np.int64], list[int]]:
        """The changes of a relation version that still lack a value, by their numbers in :attr:`lacking`, and the
        columns of these values."""
        missing = self._missing[self._of(relation)]
        wanted = np.flatnonzero(np.isin(self.lacking["change"], missing["change"])).astype(np.int64)
        return wanted, np.unique(missing["column"]).tolist()

    def keys(self, relation: int, wanted: npt.NDArray[np.int64]) -> tuple[KeyBatch, npt.NDArray[np.int64]]:
        """The keys of these changes, each once, and for each change the number of its key."""
        changes = self.lacking["change"][wanted]
        lookups: npt.NDArray[np.int64] = np.zeros(len(wanted), dtype=np.int64)
        width = len(self.programs.tables[relation].key)
        count = unchanged.number_keys(
            self.batch.data, self.changes, changes, self._keys, width, _slots(len(wanted)), lookups
        )
        owners = np.zeros(count, dtype=np.int64)
        owners[lookups] = changes
        return KeyBatch(self.batch.data, self._keys[owners, :width]), lookups

    def changes_without(self, relation: int, column: int) -> list[int]:
        """The changes of a relation version that still lack this column's value."""
        found: list[int] = self._missing["change"][self._of(relation) & (self._missing["column"] == column)].tolist()
        return found

    def fill_in(
        self,
        wanted: npt.NDArray[np.int64],
        lookups: npt.NDArray[np.int64],
        columns: list[int],
        cells: Cells,
    ) -> None:
        """Fill in the values that a look-up found.

        :param wanted: see :meth:`wanted`, as is ``columns``.
        :param lookups: see :meth:`keys`.
        """
        place_of: npt.NDArray[np.int64] = np.full(self.programs.width, -1, dtype=np.int64)
        place_of[columns] = range(len(columns))
        base = self.batch.data.size + sum(data.size for data in self._looked_up)
        unchanged.fill_in(self.lacking, self._missing, wanted, lookups, place_of, cells.cells, base)
        self._looked_up.append(cells.data)

    @property
    def _sizes(self) -> npt.NDArray[np.int64]:
        has_bytes = np.isin(self._missing["kind"], (wire.FIELD_BINARY, wire.FIELD_TEXT))
        found: npt.NDArray[np.int64] = np.where(has_bytes, self._missing["length"], 0)
        return found

    @property
    def filled(self) -> int:
        """Bytes of the values that were found until now."""
        return int(self._sizes.sum())

    def fitting(self, most: int) -> int:
        """How many leading changes of the batch get values of at most so many bytes. Changes of one row get a copy of
        its values each."""
        missing = int(np.searchsorted(np.cumsum(self._sizes), most, side="right"))
        return int(self._missing["change"][missing]) if missing < len(self._missing) else len(self.batch)

    def keep(self, part: Batch) -> None:
        """Go on with a leading part of the batch."""
        self.batch, self.changes = part, self.changes[: len(part)]
        self.lacking = self.lacking[self.lacking["change"] < len(part)]
        self._missing = self._missing[self._missing["change"] < len(part)]

    def completed(self, failed: Collection[int]) -> tuple[Batch, npt.NDArray[np.int64], set[int]]:
        """The batch with complete rows, the numbers that its changes had before, and the changes whose new row is left
        out.

        :param failed: changes that cannot be completed; they are kept unchanged.
        """
        batch, changes, lacking = self.batch, self.changes, self.lacking
        gone = np.isin(lacking["change"], self._missing["change"][self._open])
        gone &= ~np.isin(lacking["change"], np.array(sorted(failed), dtype=np.int64))
        # if the update changed the key, its tombstone is kept: nothing else would delete the old key
        lacking["fate"][gone] = np.where(lacking["moved"][gone], unchanged.TOMBSTONE, unchanged.LEFT_OUT)
        changes["flags"][lacking["change"][(lacking["reread"] != 0) & ~gone]] |= wire.FLAG_REREAD
        values = (
            self._looked_up[0]
            if len(self._looked_up) == 1
            else np.concatenate([*self._looked_up, np.zeros(1, np.uint8)])
        )
        size = self._rebuild(values, np.zeros(0, dtype=np.uint8))
        # one byte more than needed, since rebuild writes nothing into an array of length 0
        data: npt.NDArray[np.uint8] = np.empty(batch.data.size + size + 1, dtype=np.uint8)
        data[: batch.data.size] = batch.data
        self._rebuild(values, data[batch.data.size :])
        kept = np.ones(len(batch), dtype=np.bool_)
        kept[lacking["change"][lacking["fate"] == unchanged.LEFT_OUT]] = False
        whole = replace(batch, data=data, changes=changes[kept])
        return whole, np.flatnonzero(kept), set(lacking["change"][gone].tolist())

    def _rebuild(self, values: npt.NDArray[np.uint8], out: npt.NDArray[np.uint8]) -> int:
        used: int = unchanged.rebuild(
            self.batch.data, values, self.changes, self.lacking, self._missing, self.programs.program, self._fields, out
        )
        return used


def _slots(keys: int) -> layout.Rows:
    """An empty hash table for the keys of so many changes, of which each can have two; it becomes at most half full."""
    return np.zeros(1 << (4 * keys + 1).bit_length(), dtype=layout.SLOT)
