"""Which tables a live snapshot is of, and whether they can be read again. Whoever asks for one checks it, too, so this
needs no numba."""

from __future__ import annotations

from collections.abc import Sequence

import psycopg
from psycopg import sql

from airflow_bottledwater.errors import Outage, Refused, SettingError
from airflow_bottledwater.pipeline.patterns import is_named
from airflow_bottledwater.pipeline.settings import Settings
from airflow_bottledwater.postgres import catalog, row_filter
from airflow_bottledwater.postgres.connect import Connection, outage
from airflow_bottledwater.postgres.storage import undecoded
from airflow_bottledwater.state import held
from airflow_bottledwater.state.control_records import SnapshotRequest, check
from airflow_bottledwater.state.identity import refuse_shared, resolve
from airflow_bottledwater.state.pipeline_state import PipelineState

#: of the indexes of a key, one that sorts it as ORDER BY does in our sessions, which trust PostgreSQL's own operators
#: only: NULL; or else the first column that one does not sort so. {} is what makes an index that of the key
_UNSORTED = """
SELECT (array_agg(a.attname || ' (' || format_type(a.atttypid, a.atttypmod) || ')' ORDER BY k.n) FILTER (WHERE
    k.collated <> a.attcollation OR c.opcnamespace <> 'pg_catalog'::regnamespace OR NOT EXISTS (
        SELECT FROM pg_opclass d WHERE d.opcfamily = c.opcfamily AND d.opcintype = c.opcintype AND d.opcdefault)
))[1]
FROM pg_index x
CROSS JOIN LATERAL unnest(x.indkey::int2[], x.indclass::oid[], x.indcollation::oid[])
    WITH ORDINALITY AS k(attnum, opclass, collated, n)
JOIN pg_attribute a ON a.attrelid = x.indrelid AND a.attnum = k.attnum
JOIN pg_opclass c ON c.oid = k.opclass
WHERE x.indrelid = %s AND {} AND k.n <= x.indnkeyatts
GROUP BY x.indexrelid ORDER BY 1 NULLS FIRST LIMIT 1
"""


def named(
    pipeline: Settings, connection: Connection, request: SnapshotRequest, known: PipelineState
) -> tuple[int, ...]:
    """The oids of those tables of a request that there are, whether they can be read or not."""
    return tuple(resolve(connection, pipeline, known, request.tables, strict=False))


def wanted(
    pipeline: Settings, connection: Connection, request: SnapshotRequest, known: PipelineState
) -> tuple[int, ...]:
    """The oids of a request's tables: those that it names, and of those that patterns with wildcards match, the ones
    that can be read again: the pipeline's, with a key, and neither paused nor set aside.

    :raises PreflightError: a pattern matches nothing.
    :raises Outage: the condition cannot be checked now: another session has locked a table, say.
    :raises Refused: a table is not one of the pipeline's, is paused or set aside, is stored where its changes are not
        decoded, has no key, or cannot be read with this condition; or keys are to be removed from a topic that is
        shared with another pipeline.
    """
    tables = known.tables
    meant = resolve(connection, pipeline, known, request.tables)
    names = catalog.names(connection, meant)
    apart = undecoded(connection, meant)
    fit = {oid for oid in meant if oid in tables and oid not in {*known.held, *apart} and tables[oid].table.keyed}
    by_name = {oid for oid in meant if oid in names and any(is_named(each, *names[oid]) for each in request.tables)}
    # if nothing can be read, it is said why
    oids = [oid for oid in meant if oid in fit | by_name] or meant
    for oid in oids:
        name = ".".join(names.get(oid, (str(oid),)))
        if oid not in tables:
            raise Refused(
                f"Table {name} is not one of the tables that slot {pipeline.slot!r} follows.",
                "Add it to the pipeline's settings first: slot and snapshot tasks (or the command) take it in with "
                "all its rows.",
            )
        if oid in known.held:
            raise Refused(
                f"Table {name} cannot be read now: it {known.gaps[oid].why}.",
                f"{held.goes_on(known.gaps[oid], name)}: then all of its rows are read.",
            )
        if oid in apart:
            what, _, remedy = apart[oid].partition(". ")
            raise Refused(f"{what}.", remedy)
        if not tables[oid].table.keyed:
            raise Refused(
                f"Table {name} is published without a key: its rows cannot be told from those that the topic has.",
                "Give it a primary key, drop the slot, and start again with a snapshot under another topic_prefix.",
            )
        if request.by_key and any(
            each.mask for each in tables[oid].table.columns if each.name in tables[oid].table.key
        ):
            raise Refused(
                f"Table {name} cannot be read in the order of its keys: its key is published as a hash, and the keys "
                "that were reached would be in the saved state.",
                "Ask for it without by_key (--by-key): it is then read in the order of its blocks.",
            )
        if request.by_key:
            check_order(connection, oid, name, tables[oid].table.key)
        if request.where:
            _check_condition(connection, oid, names[oid], request.where)
    if request.sweep:
        refuse_shared(pipeline, known, [tables[oid].topic for oid in oids], "Keys cannot be removed (sweep)")
    return tuple(oids)


def check_named(request: SnapshotRequest) -> None:
    """Check that a request can be read, and names tables: no name would mean all of them.

    :raises Refused: a value has not its type.
    :raises SettingError: it names none.
    """
    check(request)
    if not request.tables:
        raise SettingError(
            "tables",
            "",
            "at least one table that is to be read again ('*.*' means all of the pipeline that have a key)",
        )


def check_order(connection: Connection, oid: int, name: str, key: Sequence[str]) -> None:
    """
    :param name: the table's, for the message; ``key`` are the columns of its key.
    :raises Refused: no index of the table's key sorts it as ``ORDER BY`` does: by the operators of its types that are
        PostgreSQL's own (those of an extension, citext or ltree, our sessions do not find), and in the collations of
        its columns. Each chunk would sort the whole table.
    """
    found = connection.execute(
        _UNSORTED.format(catalog.OF_KEY),  # type: ignore[arg-type]
        (oid, sorted(key)),
    ).fetchone()
    if found is not None and found[0]:
        raise Refused(
            f"Table {name} cannot be read in the order of its keys: column {found[0]} is not sorted by PostgreSQL's "
            "own operators for its type, and in its own collation, in an index of the key.",
            "Ask for it without by_key (--by-key): it is then read in the order of its blocks.",
        )


def _check_condition(connection: Connection, oid: int, named: tuple[str, str], where: str) -> None:
    """
    :raises Outage: it cannot be checked now: the table is locked, or was renamed or dropped in this moment, or the
        server ends.
    :raises Refused: PostgreSQL does not accept the condition for this table.
    """
    name = ".".join(named)
    try:
        with connection.transaction(force_rollback=True):
            connection.execute("SET TRANSACTION READ ONLY")
            # the stream stands still meanwhile
            connection.execute("SET LOCAL lock_timeout = '100ms'")
            row_filter.check_alone(connection, sql.Identifier(*named), where)
    except psycopg.Error as error:
        found = outage(error, f"Checking the condition {where!r} for {name}")
        if isinstance(found, Outage):
            raise found from None
        if catalog.names(connection, [oid]).get(oid) != named:
            raise Outage(f"{name} was renamed or dropped while the condition {where!r} was checked for it.") from None
        raise Refused(
            f"PostgreSQL does not accept the condition {where!r} for {name}: {str(error).splitlines()[0]}.",
            "It is what would follow WHERE, over the table's own columns, such as: day >= '2026-01-01' AND day < "
            "'2026-02-01'.",
        ) from None
