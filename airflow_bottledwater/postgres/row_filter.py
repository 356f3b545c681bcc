"""Row filters of tables: as conditions in queries, and as PostgreSQL reads them
(https://www.postgresql.org/docs/current/logical-replication-row-filter.html).

What is checked here is rolled back: it leaves nothing behind.
"""

from __future__ import annotations

import uuid
from dataclasses import dataclass

from psycopg import sql

from airflow_bottledwater.model.relation import SourceTable
from airflow_bottledwater.postgres.connect import Connection, query_with

#: the first version that has them
SINCE = 150000
#: int8 (src/include/catalog/pg_type.dat)
_INT8 = 20
#: another name than the table's: a condition that names the table would not hold for its partitions
_COPY = sql.Identifier("bottledwater_row_filter")

_OF_CONSTRAINT = """
SELECT pg_get_expr(conbin, conrelid),
       ARRAY(SELECT attname::text FROM pg_attribute WHERE attrelid = conrelid AND attnum = ANY (conkey))
FROM pg_constraint WHERE conrelid = 'pg_temp.bottledwater_row_filter'::regclass AND contype = 'c'
"""

#: the rows of pg_publication_rel depend on the columns of their filters (src/backend/catalog/pg_publication.c)
_OF_PUBLICATION = """
SELECT pg_get_expr(r.prqual, r.prrelid), ARRAY(
    SELECT attname::text FROM pg_depend d JOIN pg_attribute a ON a.attrelid = d.refobjid AND a.attnum = d.refobjsubid
    WHERE d.classid = 'pg_publication_rel'::regclass AND d.objid = r.oid AND d.refobjid = r.prrelid AND a.attnum > 0)
FROM pg_publication_rel r JOIN pg_publication p ON p.oid = r.prpubid
WHERE p.pubname = %s AND r.prrelid = %s AND r.prqual IS NOT NULL
"""


@dataclass(frozen=True, slots=True)
class RowFilter:
    """A row filter as PostgreSQL has it.

    :param text: in PostgreSQL's own words, by which two can be compared.
    :param columns: the columns that it uses.
    """

    text: str
    columns: frozenset[str]


def condition(where: str) -> sql.Composed:
    """A table's option ``where`` as a part of a query, which is one expression, whatever it says."""
    return sql.SQL("(\n{}\n)").format(sql.SQL(where))  # type: ignore[arg-type]


def within(table: SourceTable, rows: sql.Composable) -> sql.Composable:
    """A condition for rows of a table, narrowed to those that are published."""
    return sql.SQL("{} AND {}").format(rows, condition(table.where)) if table.where else rows


def clause(table: SourceTable) -> sql.Composed:
    """The row filter in a statement that publishes a table, behind its name; empty if it has none."""
    return sql.SQL(" WHERE {}").format(condition(table.where)) if table.where else sql.Composed([])


def read(connection: Connection, publication: str, oid: int) -> RowFilter | None:
    """The filter of a table in a publication that names the table; None if it has none. It may wait for sessions that
    have the table locked."""
    row = connection.execute(_OF_PUBLICATION, (publication, oid)).fetchone()
    return RowFilter(row[0], frozenset(row[1])) if row is not None else None


def check_alone(connection: Connection, rows: sql.Composable, where: str) -> None:
    """Check that a text is one condition over rows, whatever is before and behind it in a query, without reading any.

    :param rows: the table, as it stands behind FROM.
    :raises psycopg.Error: it is none.
    """
    # what closes the parenthesis, and would not stand for itself beside other conditions, closes no bracket
    for form in (condition(where), sql.SQL("(ARRAY[\n{}\n])[1]").format(sql.SQL(where))):  # type: ignore[arg-type]
        # with a parameter it is sent by the extended protocol, which does not take several statements
        query_with(
            connection, sql.SQL("SELECT FROM ONLY {} WHERE {} LIMIT $1").format(rows, form), [b"0"], [_INT8], [0]
        )


def parsed(connection: Connection, table: SourceTable, where: str) -> RowFilter:
    """A condition as PostgreSQL reads it for a table: as a constraint of a copy without rows, which leaves the table
    alone. What a publication demands besides is not checked.

    :raises psycopg.Error: it is no condition over the table's columns; or the role may not make temporary tables.
    """
    name = sql.Identifier(table.schema, table.name)
    with connection.transaction(force_rollback=True):
        connection.execute("SET LOCAL lock_timeout = '1s'")
        check_alone(connection, sql.SQL("{} AS {}").format(name, _COPY), where)
        connection.execute(sql.SQL("CREATE TEMPORARY TABLE {} (LIKE {})").format(_COPY, name))
        connection.execute(sql.SQL("ALTER TABLE pg_temp.{} ADD CHECK {}").format(_COPY, condition(where)))
        ((text, columns),) = connection.execute(_OF_CONSTRAINT).fetchall()
    return RowFilter(text, frozenset(columns))


def tried(connection: Connection, table: SourceTable, where: str) -> RowFilter:
    """A condition as the filter of a publication that is made for this and rolled back: nothing else knows all of
    PostgreSQL's rules.

    :raises psycopg.Error: it cannot be one; or the role may not publish the table, or others have a lock on it.
    """
    name = f"bottledwater_{uuid.uuid4().hex}"
    statement = sql.SQL(
        "CREATE PUBLICATION {} FOR TABLE ONLY {} WHERE {} WITH (publish = 'insert', publish_via_partition_root = true)"
    ).format(sql.Identifier(name), sql.Identifier(table.schema, table.name), condition(where))
    with connection.transaction(force_rollback=True):
        connection.execute("SET LOCAL lock_timeout = '1s'")
        connection.execute(statement)
        found = read(connection, name, table.oid)
    assert found is not None
    return found
