"""How much of its tables a live snapshot has still to read: known, or not known, but never guessed."""

from __future__ import annotations

from collections.abc import Sequence

from airflow_bottledwater.postgres import catalog, locks, partitions
from airflow_bottledwater.postgres.connect import Connection
from airflow_bottledwater.postgres.snapshot import OwnSnapshot
from airflow_bottledwater.state.records import LiveProgress

#: bytes of a block of a table, see airflow_bottledwater.snapshot.progress
BLOCK = 8192
#: in place of a table's filenode: its rows are published, and it is being swept
SWEEPING = -1


class RemainingSize:
    """The sizes of tables, as they were when each was looked at last."""

    def __init__(self) -> None:
        #: of each table, how many blocks each of its parts has, with the number of the file that they are in (see
        #: :meth:`OwnSnapshot.files`), by oid; of one that was only measured, all blocks, by 0
        self._parts: dict[int, dict[int, tuple[int, int]]] = {}

    def note(self, found: OwnSnapshot) -> None:
        """Note the size of a table that is being read."""
        now = found.files()
        self._parts[found.table.oid] = {part.oid: (now[part.oid], part.pages) for part in found.parts}

    def measure(self, connection: Connection, oids: Sequence[int]) -> None:
        """Measure the tables whose sizes are not known yet; one that somebody has locked is left for later."""
        for oid in oids:
            if oid in self._parts:
                continue
            try:
                with connection.transaction():
                    connection.execute("SET LOCAL lock_timeout = '100ms'")
                    sizes = catalog.measured(connection, [oid, *partitions.names(connection, [oid])])
            except locks.BUSY:
                return
            self._parts[oid] = {0: (0, sum(sizes.values()))}

    def left(self, progress: LiveProgress) -> int | None:
        """The bytes that are to be read behind a place; None if that is not known. In the order of keys, it is not
        inside of a table."""
        behind = progress.tables[progress.done :]
        if any(oid not in self._parts for oid in behind):
            return None
        blocks = sum(pages for oid in behind for _, pages in self._parts[oid].values())
        if behind and (progress.filenode or progress.read):
            parts = self._parts[behind[0]]
            by_key = progress.filenode and not progress.part
            if progress.filenode == SWEEPING:
                blocks -= sum(pages for _, pages in parts.values())
            elif by_key or 0 in parts:
                return None
            for oid, (file, pages) in parts.items():
                if progress.read.get(oid) == file:
                    blocks -= pages
                elif (progress.part, progress.filenode) == (oid, file):
                    blocks -= min(progress.upto, pages)
        return blocks * BLOCK
