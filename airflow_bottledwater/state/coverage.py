"""What is below the pipeline's partitioned tables today, compared with what is known of it."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

from airflow_bottledwater.model.relation import SourceTable
from airflow_bottledwater.pipeline.settings import Settings
from airflow_bottledwater.postgres import catalog, partitions
from airflow_bottledwater.postgres.connect import Connection
from airflow_bottledwater.state.pipeline_state import PipelineState
from airflow_bottledwater.state.records import Gap, Partitions, partitions_key


def below(connection: Connection, known: PipelineState) -> dict[int, str]:
    """The pipeline's tables that are partitions of another one of its tables today, which is published as one: by oid,
    with the name of that one, as which their changes are sent."""
    roots = {oid: pinned.table for oid, pinned in known.tables.items() if pinned.table.partitioned}
    found = partitions.below(connection, roots) if roots else {}
    return {
        part.oid: roots[root].qualified for root, parts in found.items() for part in parts if part.oid in known.tables
    }


def moved(today: Mapping[int, str], known: PipelineState) -> list[int]:
    """The pipeline's tables that were attached below another one of its tables, or detached from it, since the state
    knows of it.

    :param today: see :func:`below`.
    """
    return [oid for oid in today.keys() ^ known.below.keys() if oid in known.tables]


def unsent(connection: Connection, known: PipelineState) -> dict[str, dict[str, str]]:
    """By table, the partitions that have lost or brought rows without PostgreSQL sending anything, and what happened to
    each."""
    changed = {
        table.qualified: dict(partitions.changes(partitioned, table, today))
        for table, partitioned, today in _partitioned(connection, known)
    }
    return {table: of for table, of in changed.items() if of}


def attached(connection: Connection, pipeline: Settings, known: PipelineState) -> dict[int, list[partitions.Partition]]:
    """By the table's oid, what was attached below it with the rows that it had, and is to be read: if ``new_tables`` is
    add, and the table has a key, without which it cannot be read again. What is not in the WAL cannot be followed."""
    if pipeline.new_tables != "add":
        return {}
    found = {}
    for table, partitioned, today in _partitioned(connection, known):
        new = [each for each in partitions.attached(partitioned, table, today) if each.logged]
        if new and table.keyed:
            found[table.oid] = new
    return found


def unread(
    attached: Mapping[int, list[partitions.Partition]], known: PipelineState
) -> dict[int, list[partitions.Partition]]:
    """Those of the attached partitions for which no live snapshot is recorded yet."""
    read = {part for progress in known.lives.values() for part in progress.parts}
    left = {oid: [part for part in parts if part.oid not in read] for oid, parts in attached.items()}
    return {oid: parts for oid, parts in left.items() if parts}


def followed(connection: Connection, known: PipelineState) -> dict[str, Partitions]:
    """The records of tables below which something has changed that the stream was told of, or of which it need not be
    told: what was attached without rows below a table that has no key, and so cannot be read again."""
    found = {}
    for table, partitioned, today in _partitioned(connection, known):
        more = partitions.followed(partitioned, table, today)
        if not table.keyed:
            parents, new = {table.oid, *more}, partitions.attached(more, table, today)
            more |= partitions.remembered(
                each for each in new if each.parent in parents and partitions.empty(connection, each)
            )
        if more != partitioned:
            found[partitions_key(table.oid)] = Partitions(more)
    return found


def unlogged(connection: Connection, known: PipelineState) -> dict[int, Gap]:
    """The gaps of tables that have a partition which was logged when the topic got its rows, and is not now: what is
    changed in it until it is logged again (and stored as heap) is never sent. A table that has a gap already is left
    out."""
    found = {}
    for table, partitioned, today in _partitioned(connection, known):
        lost = [each.qualified for each in today if each.oid in partitioned and not each.logged]
        if lost and table.oid not in known.gaps:
            found[table.oid] = Gap(
                f"lacks changes of a partition that was unlogged, or not stored as heap: {', '.join(lost)}"
            )
    return found


def _partitioned(
    connection: Connection, known: PipelineState
) -> Iterator[tuple[SourceTable, partitions.Known, list[partitions.Partition]]]:
    """The tables that are published as one and still exist: with the partitions that are known, and those of today."""
    recorded = known.partitions
    below = partitions.below(connection, recorded)
    for oid in catalog.names(connection, list(recorded)):
        yield known.tables[oid].table, recorded[oid], below.get(oid, [])


def mismatches(connection: Connection, tables: Sequence[SourceTable]) -> dict[int, str]:
    """The partitioned tables among these of which PostgreSQL sends not all, or what cannot be read: by oid, the first
    partition that is not logged, or that has another replica identity, and how to mend it."""
    below = partitions.below(connection, [table.oid for table in tables if table.partitioned])
    parts = [(table, below.get(table.oid, [])) for table in tables]
    found = {table.oid: partitions.unfit(table, some) + partitions.mismatches(table, some) for table, some in parts}
    return {oid: wrong[0] for oid, wrong in found.items() if wrong}


def renamed(connection: Connection, pipeline: Settings, known: PipelineState, wanted: set[int]) -> set[int]:
    """The tables that the settings name as they were called before; they are still the pipeline's, unless others have
    these names."""
    taken = {named for oid, named in catalog.names(connection, list(wanted)).items() if oid not in known.tables}
    there = catalog.names(connection, [oid for oid in known.tables if oid not in wanted])
    before = {oid: (known.tables[oid].table.schema, known.tables[oid].table.name) for oid in there}
    return {
        oid
        for oid, named in before.items()
        if named not in taken and catalog.covers(pipeline.tables, pipeline.schemas, *named)
    }
