"""Which tables a live snapshot is of, and whether they can be read again. Whoever asks for one checks it, too, so this needs no numba."""

from __future__ import annotations

import psycopg
from psycopg import sql

from airflow_bottledwater.errors import Refused
from airflow_bottledwater.postgres import catalog
from airflow_bottledwater.postgres.connect import Connection, query_with
from airflow_bottledwater.settings import Pipeline
from airflow_bottledwater.state.control_records import SnapshotRequest
from airflow_bottledwater.state.identity import resolve
from airflow_bottledwater.state.pipeline_state import PipelineState

#: int8 (src/include/catalog/pg_type.dat)
_INT8 = 20


def wanted(
    pipeline: Pipeline, connection: Connection, request: SnapshotRequest, known: PipelineState
) -> tuple[int, ...]:
    """The oids of a request's tables.

    :raises PreflightError: a pattern matches nothing.
    :raises Refused: a table is not one of the pipeline's, has no key, or cannot be read with this condition.
    """
    tables = known.tables
    oids = resolve(connection, pipeline, known, request.tables)
    names = catalog.names(connection, oids)
    for oid in oids:
        name = ".".join(names.get(oid, (str(oid),)))
        if oid not in tables:
            raise Refused(
                f"Table {name} is not one of the tables that slot {pipeline.slot!r} follows.",
                "Add it to the pipeline's settings first: slot and snapshot tasks (or the command) take it in with all its rows.",
            )
        if not tables[oid].table.keyed:
            raise Refused(
                f"Table {name} has no key: its rows cannot be told from those that the topic has already.",
                "Stop the stream, drop the slot and start again with a snapshot, or give the table a primary key.",
            )
        if request.where:
            _check_condition(connection, names[oid], request.where)
    return tuple(oids)


def _check_condition(connection: Connection, named: tuple[str, str], where: str) -> None:
    """:raises Refused: PostgreSQL does not accept the condition for this table."""
    query = sql.SQL("SELECT FROM ONLY {} WHERE (\n{}\n) LIMIT $1").format(sql.Identifier(*named), sql.SQL(where))  # type: ignore[arg-type]
    try:
        with connection.transaction(force_rollback=True):
            connection.execute("SET TRANSACTION READ ONLY")
            # with a parameter it is sent by the extended protocol, which does not take several statements
            query_with(connection, query, [b"0"], [_INT8], [0])
    except psycopg.Error as error:
        raise Refused(
            f"PostgreSQL does not accept the condition {where!r} for {'.'.join(named)}: {str(error).splitlines()[0]}.",
            "It is what would follow WHERE, over the table's own columns, such as: day >= '2026-01-01' AND day < '2026-02-01'.",
        ) from None
