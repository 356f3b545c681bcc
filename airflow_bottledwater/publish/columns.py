"""Whether a table's columns of today are those that it had when a change was written: names and types alone do not
tell.

A column can be dropped and made again, or change names with another one. PostgreSQL numbers columns in the order in
which they are made and never uses a number again (``pg_attribute.attnum``), and a dropped column keeps its row there;
so the columns of a relation version are the first of those rows, in this order, that were not dropped before, without
those that the options of the table leave out.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass

from airflow_bottledwater.model.boundary import widen_xid
from airflow_bottledwater.model.relation import SourceTable
from airflow_bottledwater.postgres.connect import Connection

#: the first id of a transaction; the ones below are of rows that are older than all (FirstNormalTransactionId,
#: src/include/access/transam.h)
_FIRST_XID = 3


@dataclass(frozen=True, slots=True)
class _Attribute:
    """A row of pg_attribute.

    :param written: the transaction that wrote it last.
    """

    name: str
    type: int
    dropped: bool
    written: int

    def since(self, xid: int, latest: int) -> bool:
        """Whether it was written by a transaction or after it.

        :param latest: the id of the next transaction: what seems to be behind it was written before ids began anew.
        """
        return self.written >= _FIRST_XID and 0 <= widen_xid(self.written, xid) - xid <= widen_xid(latest, xid) - xid


def altered(connection: Connection, table: SourceTable, xids: Collection[int] = ()) -> dict[int, str]:
    """The columns that are no longer what they were in a relation version, by number, and why.

    :param table: the relation version.
    :param xids: the transactions that wrote rows of it; without any, a column of the same name and type is taken for
        the same.
    """
    attributes, latest = _read(connection, table.oid)
    today = {attribute.name: attribute for attribute in attributes if not attribute.dropped}
    found = {}
    for c, column in enumerate(table.columns):
        if column.name not in today:
            found[c] = f"column {column.name!r} was dropped or renamed since"
        elif today[column.name].type != column.type.oid:
            found[c] = f"the type of column {column.name!r} was altered since"
    if xids:
        # the oldest and the latest of these transactions: if both mean the same column, so do those between
        near = next(iter(xids))
        ends = min(xids, key=lambda xid: widen_xid(xid, near)), max(xids, key=lambda xid: widen_xid(xid, near))
        places = [_then(attributes, xid, latest) for xid in ends]
        for c, (column, at) in enumerate(zip(table.columns, table.places, strict=True)):
            attribute = today.get(column.name)
            if c in found or attribute is None or not attribute.since(ends[0], latest):
                continue
            if any(at >= len(place) or place[at] is not attribute for place in places):
                found[c] = f"column {column.name!r} is another one since: it was dropped and made again, or renamed"
    return found


def _then(attributes: Sequence[_Attribute], xid: int, latest: int) -> list[_Attribute]:
    """The columns that there were for a transaction, and behind them those that were made since."""
    return [each for each in attributes if not each.dropped or each.since(xid, latest)]


def _read(connection: Connection, oid: int) -> tuple[list[_Attribute], int]:
    """The rows of pg_attribute in the order of the columns' numbers, and the id of the next transaction."""
    rows = connection.execute(
        "SELECT attname, atttypid, attisdropped, xmin::text::bigint,"
        " (pg_snapshot_xmax(pg_current_snapshot())::text::numeric %% 4294967296)::bigint"
        " FROM pg_attribute WHERE attrelid = %s AND attnum > 0 AND attgenerated = '' ORDER BY attnum",
        (oid,),
    ).fetchall()
    return [_Attribute(*row[:4]) for row in rows], rows[0][4] if rows else 0
