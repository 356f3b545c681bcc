"""One look at the catalog: everything that decides which tables are followed, and whether it may have changed since the
last look."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from airflow_bottledwater.encoding.mapping import TableMapping
from airflow_bottledwater.model.relation import SourceTable
from airflow_bottledwater.pipeline.settings import Settings
from airflow_bottledwater.postgres import catalog, coverage, partitions, publication
from airflow_bottledwater.postgres.connect import Connection, quoted
from airflow_bottledwater.postgres.coverage import Coverage
from airflow_bottledwater.postgres.server import end_of_wal
from airflow_bottledwater.postgres.storage import undecoded
from airflow_bottledwater.provision.source_checks import elsewhere, unreadable
from airflow_bottledwater.state import coverage as compared
from airflow_bottledwater.state import held, options
from airflow_bottledwater.state.identity import belonging, resolve
from airflow_bottledwater.state.pipeline_state import PipelineState
from airflow_bottledwater.state.records import ChangedTypes, Gap
from airflow_bottledwater.tables.names import NewNames, new_names
from airflow_bottledwater.tables.types import altered

#: changes with every statement that may change the result of a look: the catalog rows of such an object are written
#: anew, as the transaction (xmin) shows that wrote them. VACUUM and ANALYZE write theirs in place. Tables of single
#: sessions do not count
_SUM = "SELECT sum((xmin::text::bigint * 1000003 + {}::bigint) % 2147483647)::text FROM {}"
_MARKS = (
    _SUM.format("oid", "pg_class WHERE relkind IN ('r', 'p') AND relpersistence <> 't'"),
    _SUM.format("inhrelid", "pg_inherits WHERE inhrelid NOT IN (SELECT oid FROM pg_class WHERE relpersistence = 't')"),
    _SUM.format("oid", "pg_namespace WHERE nspname NOT LIKE 'pg\\_%'"),
    _SUM.format("oid", "pg_publication"),
    _SUM.format("oid", "pg_publication_rel"),
    _SUM.format("oid", "pg_enum"),
    "SELECT sum((a.xmin::text::bigint * 1000003 + attnum) % 2147483647)::text FROM pg_attribute a"
    " JOIN pg_class c ON c.oid = attrelid WHERE c.relkind = 'c'",
    _SUM.format(
        "indexrelid",
        "pg_index WHERE indisunique AND indrelid NOT IN (SELECT oid FROM pg_class WHERE relpersistence = 't')",
    ),
)
#: from PostgreSQL 15 on
_MARK_OF_SCHEMAS = _SUM.format("oid", "pg_publication_namespace")


@dataclass(frozen=True, slots=True)
class CatalogLook:
    """What one look at the catalog has found.

    :param wanted: the oids of the tables that the settings name.
    :param kept: those of the known tables that the settings named when they were called otherwise, and that exist.
    :param tables: all of these, and the known ones that exist, as they are today, by oid.
    :param coverage: how the publications cover the known tables.
    :param members: the oids of what is in the publication that sends updates and deletes, if the pipeline has made it.
    :param below: see :func:`airflow_bottledwater.state.coverage.below`.
    :param attached: what was attached, and no live snapshot is to read yet
        (:func:`airflow_bottledwater.state.coverage.unread`).
    :param hindered: the reasons why tables that are followed, or were, cannot be published or read as they are, as
        sentences, by oid.
    :param undecoded: those of them that only lack that their changes are decoded.
    :param elsewhere: see :func:`airflow_bottledwater.provision.source_checks.elsewhere`.
    :param altered: the tables of which columns' types have other names now, see
        :func:`airflow_bottledwater.tables.types.altered`.
    :param types: what is to be recorded of columns' types, see there.
    :param unsent: see :func:`airflow_bottledwater.state.coverage.unsent`.
    :param followed: by table, what the state knows of its partitions, and what it is to know from now on: those that
        were made since, and the new files of all if the whole table was truncated, so that it is noticed if they lose
        rows.
    :param gaps: those of tables whose topics lack changes from now on.
    :param names: those that the state is to know from now on.
    :param uncovered: see :func:`airflow_bottledwater.postgres.publication.uncovered`.
    :param lsn: the end of the server's WAL behind all that was found: what was committed before a change of the catalog
        is before it.
    """

    wanted: frozenset[int]
    kept: frozenset[int]
    tables: dict[int, SourceTable]
    coverage: Coverage
    members: frozenset[int] = frozenset()
    below: dict[int, str] = field(default_factory=dict)
    attached: dict[int, list[partitions.Partition]] = field(default_factory=dict)
    hindered: dict[int, str] = field(default_factory=dict)
    undecoded: frozenset[int] = frozenset()
    elsewhere: dict[int, str] = field(default_factory=dict)
    altered: dict[int, str] = field(default_factory=dict)
    types: dict[int, ChangedTypes] = field(default_factory=dict)
    unsent: dict[str, dict[str, str]] = field(default_factory=dict)
    uncovered: dict[int, str] = field(default_factory=dict)
    followed: Mapping[int, tuple[partitions.Known, partitions.Known]] = field(default_factory=dict)
    gaps: dict[int, Gap] = field(default_factory=dict)
    names: NewNames = field(default_factory=NewNames)
    lsn: int = 0


def mark(connection: Connection) -> str:
    """A value that changes whenever the result of a look may; reading it is cheap."""
    queries = [*_MARKS, *([_MARK_OF_SCHEMAS] if connection.info.server_version >= 150000 else [])]
    return str([connection.execute(query).fetchone() for query in queries])


def look(
    connection: Connection, pipeline: Settings, known: PipelineState, unfiltered: Mapping[int, str]
) -> CatalogLook:
    """Look at the catalog, all of it as it is at one moment.

    :param connection: in no transaction.
    :param known: what the state has of the pipeline's tables; it gets the partitions that the stream was told of.
    :param unfiltered: see :func:`airflow_bottledwater.state.row_filters.ineffective`; from before the moment.
    """
    with connection.transaction():
        connection.execute("SET TRANSACTION ISOLATION LEVEL REPEATABLE READ, READ ONLY")
        before = known.partitions
        known.apply(compared.followed(connection, known))
        now = known.partitions
        told = {oid: (some, now[oid]) for oid, some in before.items() if now[oid] != some}
        # a pattern that matches nothing any more: preflight reports it
        wanted = set(resolve(connection, pipeline, known, pipeline.tables, pipeline.schemas, strict=False))
        wanted -= belonging(connection, known)
        kept = compared.renamed(connection, pipeline, known, wanted)
        names = publication.names(pipeline.publication_name)
        first, second = (publication.read(connection, name) for name in names)
        of = first if pipeline.create_publication else None
        members = frozenset(of.tables if of is not None and not of.whole else ())
        loaded = catalog.load(connection, list({*wanted, *kept, *known.tables, *members}), TableMapping.of(pipeline))
        followed = [table for table in loaded if table.oid in known.tables]
        changed = compared.unsent(connection, known)
        identifiable = [table for table in loaded if table.identifiable]
        uncovered = publication.uncovered(connection, first, identifiable) if first is not None else {}
        covered, below = coverage.read(connection, names, list(known.tables)), compared.below(connection, known)
        gaps, apart = compared.unlogged(connection, known), undecoded(connection, [table.oid for table in followed])
        gaps |= {oid: Gap("lacks changes that were not decoded") for oid in apart if oid not in known.gaps}
        gaps |= _keyless((table for table in followed if table.oid not in below), known)
        if not pipeline.create_publication:
            gaps |= _unpublished({table.oid for table in followed} - below.keys() - covered.tables.keys(), known)
        gaps |= {oid: held.unfiltered() for oid in unfiltered if not (oid in known.gaps and known.gaps[oid].unfiltered)}
        hindered = _hindered(connection, pipeline, known, loaded)
        hindered |= uncovered | publication.other_columns((first, second), followed) | dict(unfiltered)
        return CatalogLook(
            frozenset(wanted),
            frozenset(kept),
            {table.oid: table for table in loaded},
            covered,
            members,
            below,
            compared.unread(compared.attached(connection, pipeline, known), known) if changed else {},
            apart | hindered,
            frozenset(apart.keys() - hindered.keys()),
            elsewhere(connection, pipeline, {table.oid: table for table in followed if table.oid in {*wanted, *kept}}),
            *altered(known, {table.oid: table for table in followed}),
            changed,
            uncovered,
            told,
            gaps,
            new_names(pipeline, known, loaded),
            end_of_wal(connection),
        )


def _hindered(
    connection: Connection, pipeline: Settings, known: PipelineState, loaded: Sequence[SourceTable]
) -> dict[int, str]:
    """The tables among these that cannot be read as they are, or whose changes PostgreSQL cannot send."""
    followed = [table for table in loaded if table.oid in known.tables]
    return (
        unreadable(connection, followed)
        | compared.mismatches(connection, followed)
        | options.exposed(pipeline, known, loaded)
        | options.unsettled(connection, pipeline, followed)
        | _unlogged(followed)
    )


def _unpublished(oids: Iterable[int], known: PipelineState) -> dict[int, Gap]:
    """The gaps of followed tables among these that others do not publish now: of a publication of all tables or of a
    schema, nothing tells later that a table was not sent for a while."""
    return {oid: Gap("was not published for a while") for oid in oids if oid in known.tables.keys() - known.gaps.keys()}


def _keyless(tables: Iterable[SourceTable], known: PipelineState) -> dict[int, Gap]:
    """The gaps of those of some followed tables that have lost their keys: which rows their changes belong to cannot be
    told until they have keys again."""
    lost = (table.oid for table in tables if known.tables[table.oid].table.keyed and not table.keyed)
    return {oid: Gap("had no key for a while") for oid in lost if oid not in known.gaps}


def _unlogged(tables: Iterable[SourceTable]) -> dict[int, str]:
    """The tables among these whose changes are not in the WAL: by oid, why, and what can be done."""
    return {
        table.oid: f"{table.qualified} is not permanent: its changes are not in the WAL. Run: ALTER TABLE "
        f"{quoted(table.schema, table.name)} SET LOGGED; then its rows are read."
        for table in tables
        if table.persistence != "p" and not table.partitioned
    }
