"""Preflight's look at arrays: whether they have as many dimensions as their columns declare, which PostgreSQL does not
see to.

``CREATE TABLE AS``, and a dump that is restored, lose what was declared (format_type knows no dimensions), and any row
may have others.
"""

from __future__ import annotations

from collections.abc import Sequence

import psycopg
from psycopg import sql

from airflow_bottledwater.encoding import wire
from airflow_bottledwater.encoding.types import mapping
from airflow_bottledwater.model.relation import Column, SourceTable
from airflow_bottledwater.postgres import catalog, row_filter
from airflow_bottledwater.postgres.connect import Connection, quoted

#: what is read of a table: so many of its blocks, spread over it, and at most so many rows of them
_BLOCKS, _ROWS = 200, 10_000
#: milliseconds for which a table may be waited for, and read: what cannot be looked at is left to the snapshot
_LOCK, _LONGEST = 1000, 5000
#: MAXDIM, src/include/utils/array.h
_MOST_DIMENSIONS = 6


def check_arrays(connection: Connection, tables: Sequence[SourceTable]) -> list[str]:
    """Look at a sample of each table's arrays; returns what does not fit its column.

    :param tables: those that are to be read for the first time.
    """
    problems = []
    for table in tables:
        arrays = [column for column in table.columns if mapping(column.type).opcode == wire.OP_ARRAY]
        for column, depths, shifted in _seen(connection, table, arrays):
            if shifted or depths - {column.type.dimensions}:
                problems.append(_problem(table, column, depths, shifted=shifted))
    return problems


def _seen(connection: Connection, table: SourceTable, columns: Sequence[Column]) -> list[tuple[Column, set[int], bool]]:
    """For each column the numbers of dimensions that its arrays have, and whether one does not begin at 1; nothing
    where it cannot be read."""
    if not columns:
        return []
    found = [
        sql.SQL("array_agg(DISTINCT array_ndims({0})), coalesce(bool_or(array_dims({0}) ~ {1}), false)").format(
            sql.Identifier(column.name), sql.Literal(r"\[(?!1:)")
        )
        for column in columns
    ]
    name = sql.Identifier(table.schema, table.name)
    try:
        with connection.transaction():
            connection.execute(f"SET LOCAL lock_timeout = {_LOCK}; SET LOCAL statement_timeout = {_LONGEST}")
            pages = catalog.measured(connection, [table.oid]).get(table.oid, 0)
            row = connection.execute(
                sql.SQL("SELECT {} FROM (SELECT {} FROM {} TABLESAMPLE SYSTEM ({}) WHERE {} LIMIT {}) s").format(
                    sql.SQL(", ").join(found),
                    sql.SQL(", ").join(sql.Identifier(column.name) for column in columns),
                    name if table.partitioned else sql.SQL("ONLY {}").format(name),
                    sql.Literal(min(100.0, 100.0 * _BLOCKS / max(1, pages))),
                    row_filter.within(table, sql.SQL("true")),
                    sql.Literal(_ROWS),
                )
            ).fetchone()
    except psycopg.Error:
        return []
    assert row is not None
    return [
        (column, {depth for depth in row[2 * i] or () if depth is not None}, row[2 * i + 1])
        for i, column in enumerate(columns)
    ]


def _problem(table: SourceTable, column: Column, depths: set[int], *, shifted: bool) -> str:
    declared, kind = column.type.dimensions, column.type
    what = " or ".join(str(depth) for depth in sorted(depths))
    lower = ", and lower bounds other than 1" if shifted else ""
    as_text = "publish arrays as PostgreSQL's text, which holds every value (arrays = text)"
    remedy = f"{as_text[0].upper()}{as_text[1:]}."
    if len(depths) == 1 and not shifted and kind.oid == kind.base_oid:
        (depth,) = depths
        name = f"{kind.name.removesuffix('[]')}{'[]' * min(depth, _MOST_DIMENSIONS)}"
        remedy = (
            f"Declare what it holds, which rewrites nothing: ALTER TABLE {quoted(table.schema, table.name)} ALTER "
            f"{quoted(column.name)} TYPE {name}; or {as_text}."
        )
    return (
        f"Column {column.name!r} of {table.qualified} is declared with {declared} "
        f"dimension{'s' if declared > 1 else ''}, and holds arrays of {what}{lower} (CREATE TABLE AS, and a dump that "
        f"is restored, lose what was declared): such rows cannot be published. {remedy}"
    )
