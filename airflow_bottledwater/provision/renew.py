"""Takes tables up again whose keys changed, or that were dropped and created again, without a new slot.

The changes that were committed before cannot be published any more: they were written under another key. A boundary
says that the stream leaves them out (as it does behind a snapshot), and a live snapshot with a sweep, recorded together
with the boundary, brings the topic to what the table holds.
"""

from __future__ import annotations

import logging
import time
import uuid
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from airflow_bottledwater.backoff import Backoff
from airflow_bottledwater.encoding.mapping import TableMapping
from airflow_bottledwater.errors import Refused
from airflow_bottledwater.jobs import snapshots
from airflow_bottledwater.jobs.control import read_status
from airflow_bottledwater.live.wanted import check_named, check_order
from airflow_bottledwater.model.boundary import Boundary, Snapshot
from airflow_bottledwater.model.relation import Table
from airflow_bottledwater.pipeline.settings import Pipeline
from airflow_bottledwater.postgres import catalog, coverage, publication, slot
from airflow_bottledwater.postgres.connect import Connection, session
from airflow_bottledwater.postgres.server import end_of_wal, wait_flushed
from airflow_bottledwater.provision import preflight
from airflow_bottledwater.provision.create import partition_records, pin
from airflow_bottledwater.state.claim import Claim
from airflow_bottledwater.state.control_records import SnapshotRequest
from airflow_bottledwater.state.identity import refuse_shared
from airflow_bottledwater.state.pipeline_state import PipelineState
from airflow_bottledwater.state.records import (
    COMPLETE,
    COVERAGE,
    Complete,
    LiveProgress,
    StateRecord,
    below_key,
    boundary_key,
    live_key,
    partitions_key,
    plan_key,
    progress_key,
    sweep_key,
    table_key,
)

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class _Renewal:
    """A table that is taken up again.

    :param before: the oid by which the pipeline knows it; another one than the table's if it was dropped and created
        again.
    """

    table: Table
    topic: str
    before: int


def renew(pipeline: Pipeline, request: SnapshotRequest, request_id: str = "") -> tuple[str, str]:
    """Take a request's tables up with the keys that they have today, and ask for the live snapshot that reads them;
    returns the pipeline's name and the request's id. A repeated call with the same id does nothing more.

    :param request: of whole tables; it is made one with a sweep.
    :param request_id: empty for a new one.
    :raises PreflightError: the source, the broker or the registry is not ready, or a pattern matches nothing; nothing
        was changed.
    :raises Refused: a job runs, or a table has no key, or none whose order it can be read in, is not the pipeline's, or
        would get the topic of another one that still exists, or while the stream is inside a large transaction; nothing
        was changed.
    """
    check_named(request)
    pipeline = pipeline.with_(tables=request.tables, schemas=())
    findings = preflight.run(pipeline, renewing=True)
    cluster, request_id = findings.cluster, request_id or uuid.uuid4().hex[:12]
    name = cluster.pipeline(pipeline.slot)
    request = replace(request, sweep=True)
    if findings.state.live(request_id) is None:
        status = read_status(pipeline, name)
        if status is not None and not status.ended:
            raise Refused(
                f"The job of slot {pipeline.slot!r} on host {status.job.host} runs: no table can be taken up with "
                "another key beside it.",
                "Stop it (bottledwater stop, or mark its task), ask again, and start it again.",
            )
        claim = Claim(pipeline, cluster, "create", Backoff(pipeline.outage_timeout))
        try:
            with session(pipeline.postgres, "Taking tables up again") as connection:
                for table in findings.tables if request.by_key else ():
                    check_order(connection, table.oid, table.qualified)
                _renew(pipeline, connection, claim, findings.tables, request_id)
        finally:
            claim.close()
    snapshots.ask(pipeline, name, request_id, request)
    return name, request_id


def _renew(
    pipeline: Pipeline,
    connection: Connection,
    claim: Claim,
    tables: Sequence[Table],
    request_id: str,
) -> None:
    known = claim.state
    renewals = _renewals(pipeline, connection, known, tables)
    if pipeline.create_publication:
        publication.extend(connection, pipeline.publication_name, tables, timeout=pipeline.create_slot_timeout)
    oldest_xid = slot.fresh_xid(connection)
    slot.wait_visible(connection, oldest_xid, timeout=pipeline.create_slot_timeout)
    boundary = _boundary(pipeline, connection, oldest_xid)
    pinned = pin(pipeline, claim.cluster, {each.topic: each.table for each in renewals}, oldest_xid)
    values: dict[str, StateRecord | None] = {}
    for each in renewals:
        values |= dict.fromkeys(_obsolete(known, each))
        # the changes of a table that was dropped are left out, too
        values |= {boundary_key(each.before): boundary, boundary_key(each.table.oid): boundary}
    values |= _lives(known, {each.before: each.table.oid for each in renewals})
    values |= {table_key(each.table.oid): each for each in pinned}
    values |= partition_records(connection, tables)
    complete = known.get(COMPLETE, Complete)
    assert complete is not None
    oids = tuple(each.table.oid for each in renewals)
    done = {*complete.tables, *oids} - {each.before for each in renewals if each.before not in oids}
    values |= {
        COMPLETE: replace(complete, tables=tuple(sorted(done)), at=time.time()),
        live_key(request_id): LiveProgress(oids, sweep=True, owed=True),
    }
    if known.coverage is not None:
        today = coverage.read(connection, publication.names(pipeline.publication_name), list(oids))
        values[COVERAGE] = known.coverage.with_new(today)
    claim.write(values)
    for each in renewals:
        log.info("%s: taken up with the key (%s).", each.table.qualified, ", ".join(each.table.key))


def _renewals(
    pipeline: Pipeline, connection: Connection, known: PipelineState, tables: Sequence[Table]
) -> list[_Renewal]:
    """:raises Refused: see :func:`renew`."""
    if not known.complete:
        raise Refused(
            f"The snapshot of slot {pipeline.slot!r} is not complete: there is nothing yet that could be taken up "
            "again.",
            "Run the snapshot to its end; if a key changed meanwhile, drop the slot and start again.",
        )
    by_topic = {pinned.topic: oid for oid, pinned in known.tables.items()}
    found = []
    for table in tables:
        topic = TableMapping.of(pipeline).topic(table)
        # a renamed table has kept its topic
        before = table.oid if table.oid in known.tables else by_topic.get(topic)
        if before is None:
            raise Refused(
                f"Table {table.qualified} is not one of the tables that slot {pipeline.slot!r} follows.",
                "A table that was created since is taken in when the stream starts, or by slot and snapshot tasks (or "
                "the command).",
            )
        pinned = known.tables[before]
        if not table.keyed or not pinned.table.keyed:
            raise Refused(
                f"Table {table.qualified} has no key, or had none before: what its topic has cannot be told from what "
                "the table has.",
                "Give the table a primary key; if it had none before, drop the slot (bottledwater drop-slot --when "
                "always) and start again with a snapshot under another topic prefix.",
            )
        if before != table.oid and (other := catalog.names(connection, [before]).get(before)):
            raise Refused(
                f"Topic {topic!r} holds the rows of table {'.'.join(other)}, which still exists: it cannot pass to "
                f"{table.qualified}.",
                "Drop that table first, or rename the tables back.",
            )
        if before != table.oid and known.position is not None and known.position.ordinal:
            # the boundary leaves out the rest of that transaction, and its changes count; but with other tables it may
            # have others
            raise Refused(
                f"The stream of slot {pipeline.slot!r} stopped inside a large transaction, at {known.position}: the "
                f"rest of it must be published before topic {pinned.topic!r} passes to another table.",
                "Run the stream until it has passed that transaction (a bounded run is enough), then ask again.",
            )
        found.append(_Renewal(table, pinned.topic, before))
    refuse_shared(pipeline, [each.topic for each in found], "A table cannot be taken up again")
    return found


def _boundary(pipeline: Pipeline, connection: Connection, oldest_xid: int) -> Boundary:
    """The boundary at this moment. What its snapshot sees is on disk: after a crash, its transaction ids would be used
    again."""
    row = connection.execute("SELECT pg_current_snapshot()::text").fetchone()
    assert row is not None
    lsn = end_of_wal(connection)
    wait_flushed(connection, pipeline.postgres, lsn, timeout=pipeline.outage_timeout)
    return Boundary(Snapshot.parse(row[0]), lsn, oldest_xid, filtered=True)


def _lives(known: PipelineState, oids: Mapping[int, int]) -> dict[str, LiveProgress]:
    """The records of live snapshots of these tables: they go on with their successors, and from the start of the one
    that is being read."""
    changed = {}
    for request_id, progress in known.lives.items():
        tables = tuple(oids.get(oid, oid) for oid in progress.tables)
        if not oids.keys().isdisjoint(progress.tables[progress.done : progress.done + 1]):
            changed[live_key(request_id)] = replace(progress, tables=tables, filenode=0, upto=0, key=())
        elif tables != progress.tables:
            changed[live_key(request_id)] = replace(progress, tables=tables)
    return changed


def _obsolete(known: PipelineState, renewal: _Renewal) -> list[str]:
    """The keys of a table's records that describe what it was: its definition, its first snapshot, its partitions; and
    what waited."""
    oid = renewal.before
    keys = [table_key(oid), partitions_key(oid), sweep_key(oid), below_key(oid)]
    for part in known.parts(oid):
        if (plan := known.plan(part)) is not None:
            keys += [plan_key(part), *(progress_key(part, chunk) for chunk in range(len(plan.ranges)))]
    return [key for key in keys if key in known.raw]
