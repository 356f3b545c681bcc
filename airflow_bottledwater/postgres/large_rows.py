"""Rows that PostgreSQL cannot send: a message has at most 1 GB (MaxAllocSize, src/include/utils/memutils.h), whatever
the row's values have each."""

from __future__ import annotations

from dataclasses import dataclass

import psycopg
from psycopg import sql

from airflow_bottledwater.encoding import hashes, unheld
from airflow_bottledwater.encoding.masks import HASH, Mask
from airflow_bottledwater.errors import BottledWaterError, Refused
from airflow_bottledwater.model.relation import SourceTable
from airflow_bottledwater.postgres import row_filter
from airflow_bottledwater.postgres.connect import Connection, outage

#: bytes above which a row of a COPY is taken for one that cannot be sent; it is also what no record of Kafka can have
SENDABLE = 1_000_000_000
#: text, varchar, bpchar, json, xml, bytea (src/include/catalog/pg_type.dat): octet_length asks for their size without
#: reading them
_MEASURED = {25, 1043, 1042, 17}
#: bytes of a stored value of another type from which on its text is measured
_STORED = 100_000


@dataclass(frozen=True, slots=True)
class LargeRow:
    """A row that is too large.

    :param place: its ctid.
    :param key: the texts of the key's columns; empty if the table has none.
    :param size: bytes of its values.
    """

    place: str
    key: dict[str, str]
    size: int

    @property
    def unsendable(self) -> str:
        """Why it cannot be published, as a sentence without its end, and without its key."""
        return f"PostgreSQL cannot send a row of {self.size:,} bytes, since its messages have at most 1 GB"

    def __str__(self) -> str:
        named = ", ".join(f"{name} = {value}" for name, value in self.key.items())
        return f"the row {f'with {named}' if named else f'at {self.place}'} ({self.size:,} bytes)"


def too_large(error: BaseException) -> bool:
    """Whether a message would have had more than 1 GB: program_limit_exceeded of enlargeStringInfo
    (src/common/stringinfo.c), or what palloc says of a single value."""
    if not isinstance(error, psycopg.Error):
        return False
    return error.sqlstate == "54000" or "invalid memory alloc request size" in str(error)


def unread(error: psycopg.Error, what: str, table: SourceTable) -> BottledWaterError:
    """The error of this package for one of PostgreSQL while it read a table's rows.

    :param what: see :func:`~airflow_bottledwater.postgres.connect.outage`.
    """
    found = outage(error, f"{what} of {table.qualified}")
    if type(found) is not Refused:
        return found
    return Refused(found.what, " ".join(filter(None, (unheld.converted(table), found.remedy))))


def large_rows(
    connection: Connection, table: SourceTable, *, at_least: int = SENDABLE, where: sql.Composable | None = None
) -> list[LargeRow]:
    """The published rows of a table whose values have so many bytes together, the largest first, at most a hundred.

    :param where: a condition for the rows that are meant; None for all.
    :raises psycopg.Error: a value cannot be measured either, or the time is up.
    """
    hashed = {column.name: mask.key for column in table.columns if (mask := Mask.of(column)).kind == HASH}
    key = [
        sql.SQL("{}::text" if name in hashed else "left({}::text, 100)").format(sql.Identifier(name))
        for name in table.key
    ]
    source = sql.Identifier(table.schema, table.name)
    query = sql.SQL(
        "SELECT * FROM (SELECT ctid::text, {} AS size, ARRAY[{}]::text[] FROM {}{} WHERE {}) rows"
        " WHERE size >= {} ORDER BY size DESC LIMIT 100"
    ).format(
        _size_of_row(table),
        sql.SQL(", ").join(key),
        sql.SQL("" if table.partitioned else "ONLY "),
        source,
        row_filter.within(table, where or sql.SQL("true")),
        sql.Literal(at_least),
    )
    return [
        LargeRow(
            place,
            {
                name: hashes.known(hashed[name]).digits(value.encode()).decode() if name in hashed else value
                for name, value in zip(table.key, values, strict=True)
            },
            size,
        )
        for place, size, values in connection.execute(query)
    ]


def sendable(table: SourceTable) -> sql.Composed:
    """The condition for the rows that PostgreSQL can send."""
    return sql.SQL("{} < {}").format(_size_of_row(table), sql.Literal(SENDABLE))


def _size_of_row(table: SourceTable) -> sql.Composed:
    sizes: list[sql.Composable] = [_size(column.name, column.type.base_oid) for column in table.columns]
    return sql.SQL("({})::bigint").format(sql.SQL(" + ").join([*sizes, sql.SQL("0")]))


def _size(name: str, oid: int) -> sql.Composed:
    column = sql.Identifier(name)
    if oid in _MEASURED:
        return sql.SQL("coalesce(octet_length({}), 0)::bigint").format(column)
    return sql.SQL("CASE WHEN pg_column_size({0}) > {1} THEN octet_length({0}::text) ELSE 8 END::bigint").format(
        column, sql.Literal(_STORED)
    )
