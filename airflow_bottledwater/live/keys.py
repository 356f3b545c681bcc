"""The keys of a table as places to read it from, and what these hold for."""

from __future__ import annotations

import zlib
from collections.abc import Sequence

from psycopg import sql

from airflow_bottledwater.model.relation import SourceTable
from airflow_bottledwater.postgres.connect import Connection
from airflow_bottledwater.postgres.partitions import Partition

#: the version of the database's own collation; before 15, PostgreSQL does not tell it: there it is the C library's
_OF_DATABASE = sql.SQL(
    "(SELECT pg_database_collation_actual_version(oid) FROM pg_database WHERE datname = current_database())"
)
_OF_LIBRARY = sql.SQL("(SELECT max(pg_collation_actual_version(oid)) FROM pg_collation WHERE collprovider = 'c')")


def bound(connection: Connection, table: SourceTable, after: tuple[str, ...], rows: int) -> tuple[str, ...] | None:
    """The key that so many rows lie up to, from the one behind a key on; None if there are fewer rows.

    :param after: a key as text, in the order of the key's columns; empty for the table's first one.
    """
    # qualified: ORDER BY would otherwise mean the texts that are selected
    columns = [sql.Identifier(table.schema, table.name, name) for name in table.key]
    query = sql.SQL("SELECT {} FROM {} WHERE {} ORDER BY {} OFFSET {} LIMIT 1").format(
        sql.SQL(", ").join(sql.SQL("{}::text").format(column) for column in columns),
        _source(table),
        between(table, after, ()),
        sql.SQL(", ").join(columns),
        sql.Literal(rows - 1),
    )
    return connection.execute(query).fetchone()


def place(connection: Connection, table: SourceTable, partitions: Sequence[Partition]) -> int:
    """A number that is another one when rows may lie behind a key that were not there before: a partition was attached
    that was not made empty, or the keys are sorted by their columns in another order, by another collation, or another
    version of it. It is not 0."""
    query = sql.SQL(
        """
        SELECT a.attname, a.attcollation::int8,
               CASE a.attcollation WHEN 0 THEN NULL WHEN 'pg_catalog.default'::regcollation THEN {}
                    ELSE pg_collation_actual_version(a.attcollation) END
        FROM pg_attribute a WHERE a.attrelid = %s AND a.attname = ANY (%s) ORDER BY a.attname
        """
    ).format(_OF_DATABASE if connection.info.server_version >= 150000 else _OF_LIBRARY)
    order = connection.execute(query, (table.oid, list(table.key))).fetchall()
    attached = sorted(each.oid for each in partitions if not each.created)
    return zlib.crc32(repr((table.key, order, attached)).encode()) | 1


def between(table: SourceTable, after: tuple[str, ...], upto: tuple[str, ...]) -> sql.Composed:
    """The rows behind one key, up to and with another one, as a condition; an empty key is no bound."""
    types = {column.name: sql.SQL(column.type.name) for column in table.columns}  # type: ignore[arg-type]
    names = sql.SQL(", ").join(sql.Identifier(name) for name in table.key)
    conditions: list[sql.Composable] = [sql.SQL("true")]
    for operator, key in ((">", after), ("<=", upto)):
        if key:
            values = [
                sql.SQL("{}::{}").format(sql.Literal(value), types[name])
                for name, value in zip(table.key, key, strict=True)
            ]
            conditions.append(sql.SQL(f"ROW({{}}) {operator} ROW({{}})").format(names, sql.SQL(", ").join(values)))
    return sql.SQL(" AND ").join(conditions)


def _source(table: SourceTable) -> sql.Composed:
    name = sql.Identifier(table.schema, table.name)
    return sql.Composed([name]) if table.partitioned else sql.SQL("ONLY {}").format(name)
