"""How much of its tables a live snapshot has still to read: known, or not known, but never guessed."""

from __future__ import annotations

from collections.abc import Sequence

from airflow_bottledwater.live.keys import files
from airflow_bottledwater.postgres import catalog, locks, partitions
from airflow_bottledwater.postgres.connect import Connection
from airflow_bottledwater.postgres.snapshot import LAST_BLOCK, OwnSnapshot
from airflow_bottledwater.state.records import LiveProgress

#: bytes of a block of a table, see airflow_bottledwater.snapshot.progress
BLOCK = 8192
#: in place of a table's filenode: its rows are published, and it is being swept
SWEEPING = -1


class RemainingSize:
    """The sizes of tables, as they were when each was looked at last."""

    def __init__(self) -> None:
        #: of each table, the file that its blocks are in (see :func:`files`; 0: not known), and how many each of its
        #: parts has
        self._parts: dict[int, tuple[int, list[int]]] = {}

    def note(self, found: OwnSnapshot) -> None:
        """Note the size of a table that is being read."""
        self._parts[found.table.oid] = files(found), [part.pages for part in found.parts]

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
            self._parts[oid] = 0, [sum(sizes.values())]

    def left(self, progress: LiveProgress) -> int | None:
        """The bytes that are to be read behind a place; None if that is not known. In the order of keys, it is not
        inside of a table."""
        behind = progress.tables[progress.done :]
        if any(oid not in self._parts for oid in behind):
            return None
        blocks = sum(sum(self._parts[oid][1]) for oid in behind)
        if behind and progress.filenode:
            file, parts = self._parts[behind[0]]
            if progress.filenode == SWEEPING:
                blocks -= sum(parts)
            elif progress.filenode != file:
                return None
            else:
                number, upto = divmod(progress.upto, LAST_BLOCK + 1)
                blocks -= sum(parts[:number]) + min(upto, sum(parts[number : number + 1]))
        return blocks * BLOCK
