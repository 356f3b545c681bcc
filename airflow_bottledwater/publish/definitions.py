"""Whether the types of columns are still what they were known as, when values do not fit them."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace

import psycopg

from airflow_bottledwater.encoding.mapping import TableMapping
from airflow_bottledwater.errors import TypeAltered
from airflow_bottledwater.model.relation import SourceTable
from airflow_bottledwater.pipeline.settings import Settings
from airflow_bottledwater.postgres import catalog
from airflow_bottledwater.postgres.column_types import Declared, describe
from airflow_bottledwater.postgres.connect import session

#: a composite has other attributes than the value, or than are known: their types, or their names
MISFITS = (psycopg.errors.DatatypeMismatch, psycopg.errors.UndefinedColumn)


def check_definitions(pipeline: Settings, table: SourceTable, columns: Iterable[int]) -> None:
    """Check whether values do not fit their types because a type was altered, which PostgreSQL does not report: ALTER
    TYPE does not wait for the tables' locks either. The job then has to read the definitions anew, as it does at its
    start: a column has the type that it was declared with, as that type is today.

    :param table: the relation version.
    :param columns: its columns with values that do not fit, by number.
    :raises TypeAltered: such a column's definition would be another one after a start.
    """
    mapping = TableMapping.of(pipeline)
    with session(pipeline.postgres, f"Reading the columns of {table.qualified}") as connection:
        today = {c.name: c for t in catalog.load(connection, [table.oid], mapping) for c in t.columns}
        for column in (table.columns[c] for c in columns):
            declared = Declared(column.type.oid, column.type.typmod, column.type.dimensions, column.type.name)
            try:
                (kind,) = describe(connection, [declared], forms=mapping.forms)
            except LookupError:
                continue  # it was dropped; a job that starts knows it as it was, at most
            (made,) = mapping.published(table.schema, table.name, [replace(column, type=kind)])
            if (column.type, column.required) != (made.type, column.name in today and today[column.name].required):
                raise TypeAltered(
                    f"The type of column {column.name!r} of {table.qualified} was altered since it was looked up.",
                    "Started again, the job looks it up anew; Airflow does that by itself.",
                )
