"""Carries a plan out, in two parts: what may take time is made beside the stream (publications, topics, schemas), and
what the stream goes by is recorded between two of its batches, all of it at once.

A table of which changes were not sent, or were left out, or that gets a topic in which another table's rows are, needs
no boundary: the stream publishes all of its changes from the position on at which that is recorded, and a live
snapshot, which is recorded in the same transaction, brings the topic to what the table holds, and removes what it does
not hold (docs/guarantees.md).
"""

from __future__ import annotations

import logging
import time
import uuid
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace

import psycopg

from airflow_bottledwater.encoding.mapping import TableMapping
from airflow_bottledwater.errors import BottledWaterError, Refused, StopRequested, TakenOver
from airflow_bottledwater.kafka.offsets import has_records
from airflow_bottledwater.kafka.topics import Topics
from airflow_bottledwater.model.attached import AttachedTable
from airflow_bottledwater.model.problem import Problem
from airflow_bottledwater.model.relation import SourceTable
from airflow_bottledwater.model.slot import Cluster
from airflow_bottledwater.pipeline.settings import Settings
from airflow_bottledwater.policy import transient
from airflow_bottledwater.postgres import catalog, coverage, locks, partitions, publication, slot
from airflow_bottledwater.postgres.connect import Connection, own, quoted
from airflow_bottledwater.postgres.coverage import Coverage
from airflow_bottledwater.postgres.server import end_of_wal
from airflow_bottledwater.provision.create import partition_records, pin
from airflow_bottledwater.state import row_filters, starts
from airflow_bottledwater.state.identity import shared, via_root
from airflow_bottledwater.state.pinned import PinnedTable
from airflow_bottledwater.state.pipeline_state import PipelineState
from airflow_bottledwater.state.records import (
    COMPLETE,
    COVERAGE,
    ChangedTypes,
    Complete,
    Former,
    Gap,
    LiveProgress,
    Partitions,
    StateRecord,
    Stopped,
    attached_key,
    boundary_key,
    former_key,
    gap_key,
    live_key,
    partitions_key,
    plan_key,
    progress_key,
    schema_key,
    stopped_key,
    sweep_key,
    table_key,
    types_key,
)
from airflow_bottledwater.tables import checks, new_rows
from airflow_bottledwater.tables.lives import ChangedLives
from airflow_bottledwater.tables.look import CatalogLook
from airflow_bottledwater.tables.names import NewNames
from airflow_bottledwater.tables.new_rows import NewRows
from airflow_bottledwater.tables.plan import PINNING, WRITES_FAIL, Do, Step, Unfit, publication_of

log = logging.getLogger(__name__)

#: seconds for which a look waits to publish a table, or to take it out: it is tried again at the next one, and the other
#: tables wait for it
_PUBLISH_SECONDS = 5.0
_FILLED = Unfit(
    "has no key, and its topic has records already: they could not be told from its rows",
    "Delete the topic, or rename the table: then it gets a topic of its own.",
)


@dataclass(frozen=True, slots=True)
class PreparedSteps:
    """Steps of which only the records are left to be written.

    :param pinned: the tables that are recorded anew, by oid.
    :param more: the records of the partitions of these, and of where the pipeline begins in their topics.
    :param covered: how the publications cover the tables that are recorded anew.
    :param swept: the oids of the tables whose live snapshots remove what their topics have and they do not.
    :param lsn: the stream has to be here first: everything that was committed before the steps' reasons came up is
        before it.
    :param retry: whether required live snapshots that have failed are tried again.
    :param types: what is recorded of columns' types, for tables that are not recorded anew.
    :param followed: see :class:`airflow_bottledwater.tables.look.CatalogLook`, and ``gaps`` and ``names`` as well.
    :param rows: those of new tables without a key, which are published together with the records.
    :param unfit: the tables for which nothing could be made, and why.
    :param dropped: the oids of those that are not followed any more, and are not there any more.
    :param id: of what the ids of live snapshots are made.
    """

    steps: tuple[Step, ...] = ()
    pinned: dict[int, PinnedTable] = field(default_factory=dict)
    more: dict[str, StateRecord | None] = field(default_factory=dict)
    covered: Coverage = field(default_factory=lambda: Coverage({}, {}))
    swept: frozenset[int] = frozenset()
    lsn: int = 0
    retry: bool = False
    types: dict[int, ChangedTypes] = field(default_factory=dict)
    followed: Mapping[int, tuple[partitions.Known, partitions.Known]] = field(default_factory=dict)
    gaps: dict[int, Gap] = field(default_factory=dict)
    names: NewNames = field(default_factory=NewNames)
    rows: NewRows | None = None
    unfit: dict[int, Unfit] = field(default_factory=dict)
    dropped: frozenset[int] = frozenset()
    id: uuid.UUID = field(default_factory=uuid.uuid4)

    def close(self) -> None:
        """Give up what was read, if it is not carried out."""
        if self.rows is not None:
            self.rows.close()

    @property
    def changes_topics(self) -> bool:
        """Whether the stream has other tables or topics behind it, or reads a table from its start of which it may be
        publishing rows that were read before: it has to begin anew, and forgets those."""
        return any(step.do in (*PINNING, Do.STOP, Do.APART) for step in self.steps) or bool(self.names.columns)


@dataclass(slots=True)
class EarlierWriters:
    """Who was writing to a table when it was published, on a server that forgets them: those who come later are none of
    them, and the place behind them stays where it is.

    :param rows: the catalog rows that publish it; None if none does.
    :param left: the ids of their transactions that had not ended when they were last looked for.
    :param lsn: the end of the WAL when all had; 0 until then.
    """

    rows: frozenset[int] | None
    left: set[str]
    lsn: int = 0


def set_aside(connection: Connection, pipeline: Settings, seen: CatalogLook) -> list[Problem]:
    """Take the tables out of the pipeline's publication that have neither a key nor the full old row any more, or not
    the columns of their row filters in it, since the application's UPDATE and DELETE fail on them as long as they are in
    there; returns those that could not be taken out now."""
    if not pipeline.create_publication:
        return []
    name = publication.names(pipeline.publication_name)[0]
    gone = {
        oid: f"{table.qualified} has neither a key nor the full old row any more ({table.key_problem})"
        for oid in seen.members
        if (table := seen.tables.get(oid)) is not None and not table.identifiable
    } | {oid: why.partition(":")[0] for oid, why in seen.uncovered.items() if oid in seen.members}
    left = []
    for oid, why in sorted(gone.items()):
        try:
            publication.remove(
                connection, name, seen.tables[oid], timeout=min(_PUBLISH_SECONDS, pipeline.create_slot_timeout)
            )
        except (BottledWaterError, psycopg.Error) as error:
            left.append(_still_published(name, seen.tables[oid], why, own(error, "Taking it out")))
            continue
        log.warning(
            "%s: it was taken out of publication %r, since UPDATE and DELETE fail on such a table while it is "
            "published.",
            why, name,
        )  # fmt: skip
    return left


def filter_again(connection: Connection, pipeline: Settings, known: PipelineState) -> dict[int, str]:
    """Give tables that are held for it their row filters again, in publications that the pipeline has made and that
    name them; returns those that are without, see :func:`airflow_bottledwater.state.row_filters.ineffective`.

    Only of those that are held: what was sent until now is published by a stream that does not know of it.
    """
    found = row_filters.ineffective(connection, pipeline, known)
    mine = [oid for oid in found if oid in known.gaps and known.gaps[oid].unfiltered and pipeline.create_publication]
    if not mine:
        return found
    both = publication.existing(connection, pipeline.publication_name)
    for table in catalog.load(connection, mine, TableMapping.of(pipeline)):
        if any(each.takes_in(table) for each in both):
            continue
        try:
            _extend(connection, pipeline, both, table)
        except (BottledWaterError, psycopg.Error) as error:
            log.warning("%s cannot be filtered again now: %s", table.qualified, own(error, "Publishing it"))
            continue
        log.warning("%s had lost its row filter in a publication, and has it again.", table.qualified)
    return row_filters.ineffective(connection, pipeline, known)


def _still_published(name: str, table: SourceTable, why: str, error: BottledWaterError) -> Problem:
    """That the application's writes fail, since a table could not be taken out of a publication."""
    remedy = "Let the sessions that are in the way end, or end them (pg_terminate_backend): it is tried again."
    if not transient(error):
        of = quoted(table.schema, table.name)
        remedy = f"As the owner of both, run: ALTER PUBLICATION {quoted(name)} DROP TABLE ONLY {of};"
    reason = f"UPDATE and DELETE on it fail for the application: {why}, and it is still published. {error.what}"
    return Problem(WRITES_FAIL, table.qualified, reason, remedy)


def prepare(
    connection: Connection,
    pipeline: Settings,
    cluster: Cluster,
    known: PipelineState,
    seen: CatalogLook,
    steps: Sequence[Step],
    writers: dict[int, EarlierWriters],
) -> PreparedSteps:
    """Make what the steps need: tables are added to the publication, topics and schemas are made. Nothing of it changes
    what the stream does: changes of a table that it does not know are left out, and read later.

    :param steps: those that are due.
    :param writers: what earlier calls have found of the tables that still have to be taken in, by oid.
    :raises Outage: a server does not answer.
    """
    names = publication.names(pipeline.publication_name)
    tables, unfit = _publish(connection, pipeline, known, seen, steps)
    late, lsn = _behind_writers(connection, names, tables, writers)
    unfit |= late
    tables = {oid: table for oid, table in tables.items() if oid not in late}
    # taken after the tables were added: what wrote to them before is not sent
    oldest_xid = slot.fresh_xid(connection) if tables else 0
    topics = {step.topic: tables[step.oid] for step in steps if step.oid in tables}
    pinned, refused = _pin(pipeline, cluster, topics, oldest_xid)
    unfit |= refused
    covered = coverage.read(connection, names, list(pinned))
    # another table may have got its name in this moment, and was added in its place
    unfit |= {oid: Unfit("has to wait: it is not published yet") for oid in pinned.keys() - covered.tables.keys()}
    pinned = {oid: each for oid, each in pinned.items() if oid not in unfit}
    left = tuple(step for step in steps if step.oid not in unfit)
    found = list(pinned.values())
    used = Topics(pipeline.kafka).all_ends({each.topic: each.partitions for each in found}) if found else {}
    filled = [topic for topic, ends in used.items() if any(ends)]
    theirs = shared(pipeline, known, filled)
    begun = starts.new(pipeline, known, {each.topic: each.topic_id for each in found if each.topic not in theirs}, used)
    new = [each for oid, each in pinned.items() if not each.table.keyed and oid not in known.tables]
    # its end may be behind markers of transactions only, of a job that died
    unfit |= {each.table.oid: _FILLED for each in new if has_records(pipeline.kafka, each.topic, used[each.topic])}
    rows = None
    if new and not unfit:
        rows, unfit = _read(connection, pipeline, [each.table for each in new], oldest_xid)
    stopped = {*known.stopped, *(step.oid for step in steps if step.do is Do.STOP)}
    return PreparedSteps(
        left,
        pinned,
        {**partition_records(connection, [each.table for each in found]), **begun},
        covered,
        frozenset(oid for oid, each in pinned.items() if each.topic in set(filled) - theirs.keys()),
        lsn,
        types=seen.types,
        followed=seen.followed,
        gaps=seen.gaps,
        names=seen.names,
        rows=rows,
        unfit=unfit,
        dropped=frozenset(stopped - catalog.names(connection, list(stopped)).keys()),
    )


def _publish(
    connection: Connection, pipeline: Settings, known: PipelineState, seen: CatalogLook, steps: Sequence[Step]
) -> tuple[dict[int, SourceTable], dict[int, Unfit]]:
    """Add the tables of steps to the pipeline's publications, unless others make these; returns those that may be
    published, by oid, and why the others cannot be."""
    names = publication.names(pipeline.publication_name)
    unfit: dict[int, Unfit] = {}
    tables: dict[int, SourceTable] = {}
    missing = pipeline.create_publication and not seen.coverage.publications.keys() >= set(names)
    # without its slot, which is dropped first, the pipeline was dropped as a whole while this look was under way
    if missing and slot.state(connection, pipeline.slot) is not None:
        # what was dropped is made again; which tables are in it comes next
        timeout = pipeline.create_slot_timeout
        publication.create(
            connection, pipeline.publication_name, [], via_root=via_root(pipeline, known), timeout=timeout
        )
    new = [step for step in steps if step.do in PINNING]
    there = publication.existing(connection, pipeline.publication_name) if new else []
    for step in new:
        table = _as_known(known, seen.tables[step.oid])
        if pipeline.create_publication:
            try:
                _extend(connection, pipeline, there, table)
            except (BottledWaterError, psycopg.Error) as error:
                unfit[step.oid] = checks.refused(own(error, "Publishing it"))
                continue
        tables[step.oid] = table
    return tables, unfit


def _behind_writers(
    connection: Connection, names: Sequence[str], tables: Mapping[int, SourceTable], writers: dict[int, EarlierWriters]
) -> tuple[dict[int, Unfit], int]:
    """On a server that forgets those who write to a table while it is published, wait for them; returns why tables have
    to wait on, and where the stream has to be before it begins anew, so that it sends none of those transactions."""
    if not (tables and publication.forgets_writers(connection.info.server_version)):
        return {}, 0
    rows = coverage.read(connection, names, list(tables)).tables
    new = [oid for oid in tables if oid not in writers or writers[oid].rows != rows.get(oid)]
    writers |= {oid: EarlierWriters(rows.get(oid), left) for oid, left in locks.writing(connection, new).items()}
    ends = {oid: writers[oid] for oid in tables if not writers[oid].lsn}
    left = locks.wait_for_ends(
        connection, set().union(*(each.left for each in ends.values())), timeout=_PUBLISH_SECONDS
    )
    end = end_of_wal(connection)
    for each in ends.values():
        each.left &= left
        each.lsn = 0 if each.left else end
    unfit = {
        oid: Unfit(
            "has to wait for transactions that were writing to it when it was published. In the way: "
            f"{locks.writers(connection, [oid], each.left)}",
            "Let them end, or end them (pg_terminate_backend); newer releases of PostgreSQL need not wait.",
        )
        for oid, each in ends.items()
        if each.left
    }
    return unfit, max(writers[oid].lsn for oid in tables)


def _extend(
    connection: Connection, pipeline: Settings, there: Sequence[publication.Published], table: SourceTable
) -> None:
    """See :func:`airflow_bottledwater.postgres.publication.extend`."""
    timeout = min(_PUBLISH_SECONDS, pipeline.create_slot_timeout)
    publication.extend(connection, pipeline.publication_name, there, [table], timeout=timeout)


def _read(
    connection: Connection, pipeline: Settings, tables: Sequence[SourceTable], oldest_xid: int
) -> tuple[NewRows | None, dict[int, Unfit]]:
    """The rows of new tables without a key, or why they cannot be read now."""
    try:
        rows = new_rows.read(connection, pipeline, tables, oldest_xid)
    except (BottledWaterError, psycopg.Error) as error:
        why = checks.refused(own(error, "Reading its rows"))
        return None, {table.oid: why for table in tables}
    left = [table.oid for table in tables if table.oid not in rows.blocks]
    if not left:
        return rows, {}
    rows.close()
    if rows.blocks:
        # those that wait make room: they are read at the next look
        return None, dict.fromkeys(left, Unfit("has to wait: others are read first"))
    large = new_rows.unread(f"larger than {new_rows.LARGEST >> 20} MiB as PostgreSQL sends it")
    return None, {left[0]: checks.refused(large, lasts=True)}  # not read again at each look


def _as_known(known: PipelineState, table: SourceTable) -> SourceTable:
    """A table with its key in the order that its topic has, if it is the same key."""
    pinned = known.tables.get(table.oid)
    try:
        found = pinned.check_key(table) if pinned is not None and pinned.table.keyed else table
        # what was sent under the filter of before may still be to come
        filtered = table.filtered or (pinned is not None and pinned.table.filtered)
        return replace(found, filtered=filtered, catalog_key=table.catalog_key)
    except Refused:
        # by another name, a table may have no options
        before = pinned.table.partition_by if pinned is not None else ()
        return replace(table, partition_by=table.partition_by or (before if {*before} <= {*table.key} else ()))


def _pin(
    pipeline: Settings, cluster: Cluster, topics: dict[str, SourceTable], oldest_xid: int
) -> tuple[dict[int, PinnedTable], dict[int, Unfit]]:
    """Pin tables together, if that can be done; otherwise one half after the other, so that only what is unfit is left
    out."""
    if not topics:
        return {}, {}
    try:
        return {each.table.oid: each for each in pin(pipeline, cluster, topics, oldest_xid, new=False)}, {}
    except (TakenOver, StopRequested):
        raise
    except BottledWaterError as error:
        if len(topics) == 1:
            return {}, {table.oid: checks.refused(error) for table in topics.values()}
    each, half = list(topics.items()), len(topics) // 2
    first = _pin(pipeline, cluster, dict(each[:half]), oldest_xid)
    second = _pin(pipeline, cluster, dict(each[half:]), oldest_xid)
    return first[0] | second[0], first[1] | second[1]


# ---------------------------------------------------------------------- what is recorded
def records(pipeline: Settings, prepared: PreparedSteps, known: PipelineState) -> dict[str, StateRecord | None]:
    """The records that carry the steps out, for one transaction. Where it is not known whether that was committed, they
    are made again, of a state in which the steps may be carried out already; this changes nothing then.

    :param known: the state as it is in this moment; the stream is between two transactions.
    """
    values: dict[str, StateRecord | None] = {stopped_key(oid): None for oid in prepared.dropped}
    complete = known.get(COMPLETE, Complete)
    assert complete is not None
    done = set(complete.tables)
    taken = {each.topic: oid for oid, each in prepared.pinned.items()}
    # of a table that stays held nothing is read, whatever was being read of the one whose topic it gets
    lives = ChangedLives(
        known, {each.topic: each.oid for each in prepared.steps if each.do in PINNING and _held(known, each) is None}
    )
    if prepared.retry:
        lives.retry()
    for step in _left(prepared, known):
        before = known.tables.get(step.oid)
        if step.do in PINNING:
            pinned = prepared.pinned[step.oid]
            values |= dict.fromkeys(_obsolete(known, step.oid))
            values |= {table_key(step.oid): pinned, former_key(pinned.topic): None, stopped_key(step.oid): None}
            done.add(step.oid)
            if (gap := _held(known, step)) is not None:
                values[gap_key(step.oid)] = gap
            elif pinned.table.keyed:  # of an unkeyed one, only its definition is another
                lives.read(step.oid, sweep=step.oid in prepared.swept)
            elif prepared.rows is not None and step.oid in prepared.rows.blocks:
                values[boundary_key(step.oid)] = prepared.rows.boundary
        elif step.do is Do.STOP:
            values |= dict.fromkeys([table_key(step.oid), boundary_key(step.oid), *_obsolete(known, step.oid)])
            done.discard(step.oid)
            lives.stop(step.oid)
            if step.oid not in prepared.dropped and TableMapping.of(pipeline).hides(known.tables[step.oid].table):
                values[stopped_key(step.oid)] = Stopped(known.tables[step.oid].table)
        elif step.do is Do.BELOW:
            values[attached_key(step.oid)] = AttachedTable(step.root) if step.root else None
        elif step.do is Do.APART:
            values[attached_key(step.oid)] = None
            if step.oid not in known.held:
                # the keys of another pipeline are not removed
                lives.read(step.oid, sweep=not shared(pipeline, known, [step.topic]))
        elif step.do is Do.READ_PARTS:
            parts, request_id = tuple(part.oid for part in step.parts), uuid.uuid5(prepared.id, str(step.oid)).hex[:12]
            values[live_key(request_id)] = LiveProgress((step.oid,), parts=parts, required=True)
        if before is not None and before.topic != step.topic and before.topic not in taken:
            values[former_key(before.topic)] = Former(step.oid, before.table.qualified)
    values = {key: value for key, value in values.items() if value is not None or key in known.raw}
    values |= _found(prepared, known, lives)
    values |= prepared.more
    values |= lives.changed
    values[COMPLETE] = replace(complete, tables=tuple(sorted(done)), at=time.time())
    if known.coverage is not None:
        values |= _covered(pipeline, known.coverage, prepared, known)
    return values


def _left(prepared: PreparedSteps, known: PipelineState) -> list[Step]:
    """The steps that the state does not show: a table that is recorded anew has an X0 that is this step's alone."""
    return [
        step
        for step in prepared.steps
        if step.do not in (*PINNING, Do.STOP) or known.tables.get(step.oid) != prepared.pinned.get(step.oid)
    ]


def _found(prepared: PreparedSteps, known: PipelineState, lives: ChangedLives) -> dict[str, StateRecord | None]:
    """What the look has found of the tables that go on as they are recorded."""
    left = known.tables.keys() - {step.oid for step in prepared.steps if step.do in PINNING or step.do is Do.STOP}
    values = prepared.names.records(known, left, prepared.pinned)
    values |= {types_key(oid): types for oid, types in prepared.types.items() if oid in left}
    values |= {gap_key(oid): gap for oid, gap in prepared.gaps.items() if oid in left - known.gaps.keys()}
    for oid in (oid for oid, gap in prepared.gaps.items() if gap.unfiltered and oid in left):
        values[gap_key(oid)] = replace(known.gaps.get(oid, prepared.gaps[oid]), unfiltered=True)
        lives.stop(oid)
    for oid in prepared.followed.keys() & known.partitions.keys() & left:
        values[partitions_key(oid)] = Partitions(partitions.merged(known.partitions[oid], *prepared.followed[oid]))
    return values


def _held(known: PipelineState, step: Step) -> Gap | None:
    """The record with which a table stays held, or gets the topic of one that is; None if it goes on."""
    held = {oid: gap for oid, gap in known.gaps.items() if gap.held}
    before = (gap for oid, gap in held.items() if oid in known.tables and known.tables[oid].topic == step.topic)
    return held.get(step.oid) or next(before, None)


def hold(known: PipelineState, gaps: Mapping[int, Gap]) -> dict[str, StateRecord | None]:
    """The records with which no changes of tables are published until a person lets them go on. What is being read of
    them is given up, as all of their rows are read then.

    :param gaps: why, by the table's oid; one that is held already stays as it is.
    """
    if not gaps:
        return {}
    # also what stays is written: only a job that has the slot answers a request
    values: dict[str, StateRecord | None] = {gap_key(oid): known.gaps.get(oid) for oid in gaps}
    lives = ChangedLives(known, {})
    for oid in gaps.keys() & known.tables.keys():
        before = known.gaps.get(oid, Gap(""))
        if not before.held:
            values[gap_key(oid)] = replace(gaps[oid], held=True, accepted=before.accepted, unfiltered=before.unfiltered)
            lives.stop(oid)
    return values | lives.changed


def release(known: PipelineState, oids: Iterable[int]) -> dict[str, StateRecord | None]:
    """The records with which held tables go on: what their topics lack is read again, as behind any other gap."""
    gaps = {oid: known.gaps.get(oid) for oid in oids}
    return {gap_key(oid): None if gap is None else replace(gap, held=False) for oid, gap in gaps.items()}


def _covered(
    pipeline: Settings, recorded: Coverage, prepared: PreparedSteps, known: PipelineState
) -> dict[str, StateRecord | None]:
    """How the tables are covered from now on. A publication that was altered is recorded as it is now, so that it is
    noticed if that happens again; its tables that are not read now have gaps."""
    today, values = prepared.covered, dict[str, StateRecord | None]()
    publications = {**today.publications, **recorded.publications}
    others = known.tables.keys() - {*prepared.pinned, *prepared.gaps, *known.gaps}
    for name in recorded.publications.keys() & today.publications.keys():
        if recorded.lacking(today, name):
            continue  # it has not been altered back yet
        publications[name] = today.publications[name]
        for oid in others:
            pinned = known.tables[oid]
            if publication_of(pipeline, pinned) != name:
                continue
            if why := recorded.altered(today, name, keyed=pinned.table.keyed):
                values[gap_key(oid)] = Gap(why)
    # a table that is recorded anew is covered by the rows of today
    values[COVERAGE] = replace(recorded, publications=publications).renewed(today)
    return values


def tell(prepared: PreparedSteps) -> None:
    """Log what was carried out."""
    for step in prepared.steps:
        topic = f" (topic {step.topic!r})" if step.topic else ""
        log.info("%s %s: %s%s.", step.table, step.why, step.do.value, topic)


def _obsolete(known: PipelineState, oid: int) -> list[str]:
    """The keys of a table's records that describe what it was: its first snapshot, its partitions; and what waited."""
    pinned = known.tables.get(oid)
    # the rows of a table without a key stay, with the schemas that they have
    later = known.later.get(oid, {}) if pinned is not None and pinned.table.keyed else {}
    keys = [schema_key(oid, number) for number in later]
    keys += [partitions_key(oid), sweep_key(oid), attached_key(oid), gap_key(oid), types_key(oid)]
    for part in known.parts(oid):
        if (plan := known.plan(part)) is not None:
            keys += [plan_key(part), *(progress_key(part, chunk) for chunk in range(len(plan.ranges)))]
    return [key for key in keys if key in known.raw]
