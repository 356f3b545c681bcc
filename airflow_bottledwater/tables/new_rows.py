"""Reads new tables without a key while the stream runs. Their records cannot be told from each other, so each row has
to be published exactly once: the rows that a snapshot shows, and what was committed behind it. A temporary slot gives
both, as for PostgreSQL's own synchronisation of a table (src/backend/replication/logical/tablesync.c)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from airflow_bottledwater.encoding.program import select_list
from airflow_bottledwater.errors import Outage, Refused
from airflow_bottledwater.model.boundary import Boundary
from airflow_bottledwater.model.relation import SourceTable
from airflow_bottledwater.pipeline.settings import Settings
from airflow_bottledwater.postgres import catalog, copy
from airflow_bottledwater.postgres.connect import Connection, connect
from airflow_bottledwater.postgres.receive import MessageBlock
from airflow_bottledwater.postgres.slot import TemporarySlot
from airflow_bottledwater.postgres.snapshot import LAST_BLOCK, begin_under, copy_query
from airflow_bottledwater.publish import hashed

#: bytes of the tables that are read together, on disk and as PostgreSQL sends them: they are kept in memory, and are
#: published in one Kafka transaction, for which the stream stands still
LARGEST = 64 << 20
#: seconds to wait for the transactions that are running
PATIENCE = 5.0
#: seconds to wait for the tables' locks, while others wait behind
_LOCK = 1.0


@dataclass(frozen=True, slots=True)
class NewRows:
    """The rows of new tables, and the slot that has what was committed behind them.

    :param boundary: what the stream leaves out of these tables, since the rows have it.
    :param blocks: the rows as COPY has sent them, by the table's oid; none of the table with which they
        would be too many, and of those behind it.
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
            found = _rows(pipeline, reader, tables)
        # DDL that commits while a slot is being made can leave it without what that has changed
        if catalog.fingerprint(connection, oids) != before:
            raise Outage("A new table was altered while it was read.", "It is read again.")
    except BaseException:
        made.close()
        raise
    return NewRows(made, boundary, found)


def _rows(pipeline: Settings, reader: Connection, tables: Sequence[SourceTable]) -> dict[int, list[MessageBlock]]:
    """The rows of tables, one after the other, as long as they have at most :data:`LARGEST` bytes together. Values that
    are compressed on disk are sent whole, a hundred times as large perhaps."""
    found, size = dict[int, list[MessageBlock]](), 0
    for table in tables:
        blocks = list[MessageBlock]()
        query = copy_query(table, select_list(table), 0, LAST_BLOCK)
        for block in hashed.rows(pipeline, table, copy.rows(reader, query)):
            size += block.data.size
            if size > LARGEST:
                reader.close()  # it would send all that is left
                return found
            blocks.append(MessageBlock(block.data.copy(), block.offsets.copy()))
        found[table.oid] = blocks
    return found


def too_large(connection: Connection, table: SourceTable) -> bool:
    """Whether a table is too large to be read while the stream runs: it has more bytes than :data:`LARGEST` on disk,
    those of values that are stored apart (TOAST) among them."""
    row = connection.execute("SELECT pg_table_size(%s::oid::regclass)", (table.oid,)).fetchone()
    return row is not None and (row[0] or 0) > LARGEST


def unread(why: str) -> Refused:
    """The error of a new table that cannot be read while the stream runs.

    :param why: the rest of a sentence about it.
    """
    return Refused(
        f"it is {why}, and without a key its rows can only be read while the stream does not run.",
        "Give it a primary key; or stop the stream, then run create_slot and the snapshot again (or start the command "
        "again).",
    )
