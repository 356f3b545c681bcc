"""Reads new tables without a key while the stream runs. Their records cannot be told from each other, so each row has
to be published exactly once: the rows that a snapshot shows, and what was committed behind it. A temporary slot gives
both, as for PostgreSQL's own synchronisation of a table (src/backend/replication/logical/tablesync.c)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from airflow_bottledwater.encoding.program import select_list
from airflow_bottledwater.errors import Outage
from airflow_bottledwater.model.boundary import Boundary
from airflow_bottledwater.model.relation import SourceTable
from airflow_bottledwater.pipeline.settings import Settings
from airflow_bottledwater.postgres import catalog, copy
from airflow_bottledwater.postgres.connect import Connection, connect
from airflow_bottledwater.postgres.receive import MessageBlock
from airflow_bottledwater.postgres.slot import TemporarySlot
from airflow_bottledwater.postgres.snapshot import BLOCK_BYTES, LAST_BLOCK, begin_under, copy_query
from airflow_bottledwater.publish import hashed

#: bytes of the tables that are read together: they are kept in memory, and are published in one Kafka transaction, for
#: which the stream stands still
LARGEST = 64 << 20
#: seconds to wait for the transactions that are running
PATIENCE = 5.0
#: seconds to wait for the tables' locks, while others wait behind
_LOCK = 1.0


@dataclass(frozen=True, slots=True)
class NewRows:
    """The rows of new tables, and the slot that has what was committed behind them.

    :param boundary: what the stream leaves out of these tables, since the rows have it.
    :param blocks: the rows as COPY has sent them, by the table's oid.
    """

    slot: TemporarySlot
    boundary: Boundary
    blocks: Mapping[int, Sequence[MessageBlock]]

    def close(self) -> None:
        """Give up the slot."""
        self.slot.close()


def read(connection: Connection, pipeline: Settings, tables: Sequence[SourceTable], oldest_xid: int) -> NewRows:
    """Read tables that are published already, under the exported snapshot of a temporary slot.

    :param oldest_xid: X0, taken after they were published.
    :raises Outage: a table was altered meanwhile, running transactions did not end in time, or PostgreSQL does not
        answer.
    :raises SlotError: no slot is free.
    :raises psycopg.Error: a table may not be read, or is locked by others.
    """
    oids = [table.oid for table in tables]
    before = catalog.fingerprint(connection, oids)
    made = TemporarySlot(pipeline.postgres, connection, timeout=min(PATIENCE, pipeline.create_slot_timeout))
    try:
        named = {table.oid: (table.schema, table.name) for table in tables}
        with connect(pipeline.postgres, application="bottledwater new tables") as reader:
            snapshot = begin_under(reader, named, made.exported, lock_timeout=_LOCK)
            # its consistent point is behind every commit that the snapshot shows
            boundary = Boundary(snapshot, made.consistent_point, oldest_xid, True)
            found = {table.oid: _rows(pipeline, reader, table) for table in tables}
        # DDL that commits while a slot is being made can leave it without what that has changed
        if catalog.fingerprint(connection, oids) != before:
            raise Outage("A new table was altered while it was read.", "It is read again.")
    except BaseException:
        made.close()
        raise
    return NewRows(made, boundary, found)


def _rows(pipeline: Settings, reader: Connection, table: SourceTable) -> list[MessageBlock]:
    query = copy_query(table, select_list(table), 0, LAST_BLOCK)
    blocks = hashed.rows(pipeline, table, copy.rows(reader, query))
    return [MessageBlock(block.data.copy(), block.offsets.copy()) for block in blocks]


def too_large(connection: Connection, tables: Sequence[SourceTable]) -> set[int]:
    """Those of the tables that are too large to be read while the stream runs, by oid: they have more bytes than
    :data:`LARGEST`, alone or together with smaller ones."""
    pages = catalog.measured(connection, [table.oid for table in tables])
    found, total = set[int](), 0
    for oid in sorted(pages, key=lambda each: pages[each]):
        total += pages[oid] * BLOCK_BYTES
        if total > LARGEST:
            found.add(oid)
    return found
