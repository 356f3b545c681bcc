"""Whether a table's columns of today are those that it had when a change was written: names and types alone do not
tell.

A column can be dropped and made again, or change names with another one. PostgreSQL numbers columns in the order in
which they are made and never uses a number again (``pg_attribute.attnum``), and a dropped column keeps its row there;
so the columns of a relation version are the first of those rows, in this order, that were not dropped before, without
generated columns and those that the options of the table leave out. The row of a column that is dropped, or is no
longer generated, does not say that it was generated: that is told by the numbers of the columns that were sent when the
table was recorded.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass

from airflow_bottledwater.model.boundary import widen_xid
from airflow_bottledwater.model.relation import ColumnType, SourceTable
from airflow_bottledwater.postgres.connect import Connection

#: the first id of a transaction; the ones below are of rows that are older than all (FirstNormalTransactionId,
#: src/include/access/transam.h)
_FIRST_XID = 3
#: ids in an epoch; two that are at least half of them apart cannot be ordered by their low halves
_EPOCH = 1 << 32


@dataclass(frozen=True, slots=True)
class _Attribute:
    """A row of pg_attribute.

    :param written: the transaction that wrote it last.
    """

    number: int
    name: str
    type: int
    dropped: bool
    written: int
    modifier: int


def since(written: int, xid: int, latest: int) -> bool:
    """Whether a row of the catalog may have been written by a transaction or after it.

    :param written: the transaction that wrote it last (32 bits).
    :param xid: 64 bits, or 32: then it is the last one with this low half.
    :param latest: the id of the next transaction (64 bits): what seems to be behind it was written before ids began
        anew. So many transactions after ``xid`` that ids no longer tell, a row counts as written since.
    """
    if written < _FIRST_XID:
        return False
    age = latest - xid if xid >= _EPOCH else (latest - xid) % _EPOCH
    return age >= _EPOCH // 2 or 0 <= widen_xid(written, xid) - xid <= age


def oldest(xids: Collection[int]) -> int:
    """The oldest of some transactions."""
    near = next(iter(xids))
    return min(xids, key=lambda xid: widen_xid(xid, near))


def altered(connection: Connection, table: SourceTable, xids: Collection[int], latest: int) -> dict[int, str]:
    """The columns that are no longer what they were in a relation version, by number, and why.

    :param table: the relation version.
    :param xids: the transactions that wrote rows of it; without any, a column of the same name and type is taken for
        the same.
    :param latest: see :func:`since`.
    """
    attributes = _read(connection, table.oid)
    today = {attribute.name: attribute for attribute in attributes if not attribute.dropped}
    found = {}
    for c, column in enumerate(table.columns):
        if column.name not in today:
            found[c] = f"column {column.name!r} was dropped or renamed since"
        elif today[column.name].type != column.type.oid:
            found[c] = f"the type of column {column.name!r} was altered since"
    if xids:
        # the oldest and the latest of these transactions: if both mean the same column, so do those between
        first = oldest(xids)
        ends = first, max(xids, key=lambda xid: widen_xid(xid, first))
        places = [_then(attributes, table, xid, latest) for xid in ends]
        for c, (column, at) in enumerate(zip(table.columns, table.places, strict=True)):
            attribute = today.get(column.name)
            if c in found or attribute is None or not since(attribute.written, first, latest):
                continue
            if any(at >= len(place) or place[at] is not attribute for place in places):
                found[c] = f"column {column.name!r} is another one since: it was dropped and made again, or renamed"
    return found


def rewritten(connection: Connection, table: SourceTable, xid: int, latest: int) -> set[int]:
    """The columns, by number, of which a row may have got other values without a change of it: an ALTER TABLE may have
    written them anew since a transaction, or an ALTER TYPE has given them other names or attributes.

    :param table: the relation version.
    :param latest: see :func:`since`.
    """
    attributes = _read(connection, table.oid)
    # what has the lower id may have altered it later: a modifier tells all the same
    same = {
        (each.name, each.modifier) for each in attributes if not each.dropped and not since(each.written, xid, latest)
    }
    return {
        c for c, each in enumerate(table.columns) if (each.name, each.type.typmod) not in same or _alterable(each.type)
    }


def _alterable(kind: ColumnType) -> bool:
    """Whether ALTER TYPE can give the values of a type another form: if it is, or has inside of it, a composite or an
    enum, also one that is not described since it is published as text."""
    return kind.kind in ("c", "e") or kind.form == "text" or (kind.element is not None and _alterable(kind.element))


def _then(attributes: Sequence[_Attribute], table: SourceTable, xid: int, latest: int) -> list[_Attribute]:
    """The columns that PostgreSQL sent of a relation version for a transaction, and behind them those that were made
    since."""
    recorded, names = {number for number, _ in table.sent}, {column.name for column in table.columns}
    last = max(recorded, default=0)

    def sent(each: _Attribute) -> bool:
        if not since(each.written, xid, latest):
            return not each.dropped
        # one that was there when the table was recorded, and was not sent, was generated
        return each.number > last or each.number in recorded or each.name in names

    return [each for each in attributes if sent(each)]


def _read(connection: Connection, oid: int) -> list[_Attribute]:
    """The rows of pg_attribute in the order of the columns' numbers."""
    rows = connection.execute(
        "SELECT attnum, attname, atttypid, attisdropped, xmin::text::bigint, atttypmod"
        " FROM pg_attribute WHERE attrelid = %s AND attnum > 0 AND attgenerated = '' ORDER BY attnum",
        (oid,),
    )
    return [_Attribute(*row) for row in rows]
