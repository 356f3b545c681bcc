"""Whether a row that a partitioned table does not have any more may have gone with a partition: PostgreSQL sends
nothing when one is detached, dropped or truncated, so that no later change of the row need follow.

The columns that divide a table are in each of its keys, so that a key says which partition its row was in. If that one
is still there, with the file that the topic knows, the row was deleted, or has got another key, by a change that
follows.
"""

from __future__ import annotations

from collections.abc import Collection

from psycopg import sql

from airflow_bottledwater.model.relation import SourceTable
from airflow_bottledwater.postgres import partitions
from airflow_bottledwater.postgres.connect import Connection
from airflow_bottledwater.postgres.partitions import Known, KnownPartition, Partition
from airflow_bottledwater.publish.columns import oldest, since

#: why a value cannot be read
GONE = (
    "its row may have gone with a partition that was detached, dropped or truncated, of which PostgreSQL sends nothing"
)

#: which rows partitions take; of one that is a default partition, or is below one, that depends on the others
_TAKEN = """
SELECT c.oid, coalesce(pg_get_partition_constraintdef(c.oid), 'true'), EXISTS (
    SELECT FROM pg_partition_ancestors(c.oid) a JOIN pg_class p ON p.oid = a.relid
    WHERE pg_get_expr(p.relpartbound, p.oid) = 'DEFAULT')
FROM pg_class c WHERE c.oid = ANY (%s::oid[]) ORDER BY 1
"""


def kept(
    connection: Connection, table: SourceTable, known: Known, xids: Collection[int], latest: int
) -> sql.Composable:
    """The condition for the keys whose partitions are what they were.

    :param connection: in the transaction that has found that rows are missing, with the table locked.
    :param known: the partitions that the topic knows.
    :param xids: the transactions that wrote the rows; without any, each partition that the topic does not know counts
        as put there after them, if it may be in the place of another one.
    :param latest: the id of the next transaction.
    """
    today = partitions.below(connection, [table.oid]).get(table.oid, [])
    now, below = partitions.followed(known, table, today), {each.oid: each for each in today}
    unsent = any(oid not in below or _other(each, below[oid]) for oid, each in now.items())
    found = {table.oid}
    for each in today:
        if xids:
            new = since(int(each.attached), oldest(xids), latest)
        else:
            new = unsent and each.oid not in known
        other = _other(now[each.oid], each) if each.oid in now else unsent
        if each.parent in found and not new and not other:
            found.add(each.oid)
    leaves = [each.oid for each in today if each.leaf and each.oid in found]
    taken = connection.execute(_TAKEN, (leaves,)).fetchall()
    conditions = [sql.SQL(f"({text})") for _, text, default in taken if not (default and unsent)]
    return sql.SQL(" OR ").join([sql.SQL("false"), *conditions])


def _other(known: KnownPartition, today: Partition) -> bool:
    """Whether rows may have come or gone with a partition since it is known."""
    return known.filenode != today.filenode or known.attached not in ("", today.attached)
