"""The snapshot's driver: it exports a snapshot, stores boundary and plan, runs the lanes, and records the completion.

Why each step is needed is explained in docs/guarantees.md. The *holder* is the session that exports the snapshot and
holds the locks.
"""

from __future__ import annotations

import contextlib
import logging
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, replace

from airflow_bottledwater.backoff import Backoff, stoppable
from airflow_bottledwater.encoding.mapping import TableMapping
from airflow_bottledwater.errors import (
    BottledWaterError,
    Outage,
    Refused,
    SourcePressed,
    TakenOver,
    TypeAltered,
)
from airflow_bottledwater.guard.guard import SourceGuard, guarded
from airflow_bottledwater.jobs import status
from airflow_bottledwater.jobs.control import Controller
from airflow_bottledwater.lineage.job import telling
from airflow_bottledwater.metrics.meter import Meter
from airflow_bottledwater.metrics.sampler import Sampler
from airflow_bottledwater.model.lsn import format_lsn
from airflow_bottledwater.model.relation import SourceTable
from airflow_bottledwater.pipeline.settings import Settings
from airflow_bottledwater.postgres import catalog, slot
from airflow_bottledwater.postgres import snapshot as pg
from airflow_bottledwater.postgres.connect import Connection, session
from airflow_bottledwater.postgres.server import check_primary, end_of_wal, identify
from airflow_bottledwater.postgres.watch import HolderWatch
from airflow_bottledwater.snapshot.plans import Plans
from airflow_bottledwater.snapshot.progress import Report, SnapshotMeter
from airflow_bottledwater.snapshot.task import LaneTask, SnapshotResult
from airflow_bottledwater.state import held, letters, options, schemas
from airflow_bottledwater.state.claim import Claim
from airflow_bottledwater.state.identity import check_slot, check_topics, own_again
from airflow_bottledwater.state.movement import Movement
from airflow_bottledwater.state.pinned import pins
from airflow_bottledwater.state.pipeline_state import PipelineState
from airflow_bottledwater.state.records import (
    COMPLETE,
    Complete,
    LaterSchema,
    Progress,
    StateRecord,
    schema_key,
    stream_id,
    table_key,
)
from airflow_bottledwater.state.schemas import register_value, united

log = logging.getLogger(__name__)

#: snapshots in a row that are given up although no range was finished under them, after which the job ends
_IN_VAIN = 3
#: runs lanes (as threads, or as Spark tasks) and returns the counts of each
RunLanes = Callable[[Sequence[LaneTask]], list[dict[str, int]]]


def run(
    pipeline: Settings,
    run_lanes: RunLanes,
    *,
    stopped: threading.Event | None = None,
    report: Report = lambda progress: None,
) -> SnapshotResult:
    """Take the snapshot or resume it; do nothing if it is complete.

    :param run_lanes: runs the lanes, each as a task.
    :param stopped: ends the snapshot in order; finished ranges stay.
    :param report: called with the progress about every two seconds.
    :raises StopRequested: it was asked to stop.
    :raises BottledWaterError: see :mod:`airflow_bottledwater.errors`; after any error, finished ranges stay.
    """
    stopped = stopped or threading.Event()
    with stoppable(stopped), session(pipeline.postgres, "Snapshot") as connection:
        check_primary(connection, pipeline.postgres)
        cluster = identify(connection)
        claim = Claim(pipeline, cluster, "snapshot", Backoff(pipeline.outage_timeout, stopped))
        controller = Controller(pipeline, cluster, claim.job)
        controller.stopped = stopped
        controller.status.state = "snapshot"
        with contextlib.closing(claim), controller.reporting():
            sampler = Sampler(pipeline, controller.name, lambda: controller.status, Meter())
            with (
                sampler as meter,
                guarded(pipeline, controller, meter, sampler.source, snapshot=True) as guard,
                telling(pipeline, "snapshot", lambda: _rows(claim.state)) as tell,
            ):
                tell(claim.state.tables.values())
                result = _SnapshotDriver(pipeline, connection, claim, controller, guard, run_lanes, report).run()
            controller.finish("finished")
    return result


def _rows(known: PipelineState) -> dict[str, int]:
    """The rows that are published, by table."""
    return {table.table: table.rows for table in status.tables(known)}


class _SnapshotDriver:
    def __init__(
        self,
        pipeline: Settings,
        connection: Connection,
        claim: Claim,
        controller: Controller,
        guard: SourceGuard,
        run_lanes: RunLanes,
        report: Report,
    ) -> None:
        self._pipeline, self._connection, self._claim = pipeline, connection, claim
        self._controller, self._guard, self._run_lanes, self._report = controller, guard, run_lanes, report
        #: the oids of tables that were dropped
        self._gone: set[int] = set()
        self._movement = Movement(
            controller.problems, f"Snapshot of slot {pipeline.slot}", stalled=pipeline.transaction_timeout
        )
        #: how far it is
        self._made: tuple[int, ...] = ()
        #: what was published under snapshots that were given up, and how often nothing was
        self._before = SnapshotResult(0, 0, 0, 0, 0, 0, 0.0)
        self._in_vain = 0

    def run(self) -> SnapshotResult:
        started = time.monotonic()
        known = self._claim.state
        self._tell()  # also if it ends before it reads anything
        self._check_slot(self._connection)
        self._guard.check = self._check_slot
        check_topics(self._connection, self._pipeline, known)
        own_again(self._pipeline, known)
        options.check(self._connection, self._pipeline, known)
        schemas.settle(self._pipeline, self._connection, self._claim)
        while (result := self._once(started)) is None:
            log.info("What is left is read under a new snapshot.")
        return result

    def _check_slot(self, connection: Connection) -> None:
        """Check that the stream can begin at its position; also while tables are read, which takes hours.

        :raises Outage: the connection leads to a standby.
        :raises SlotError: see :func:`check_slot`.
        """
        known = self._claim.state
        assert known.slot is not None, "the claim has seen it"
        check_primary(connection, self._pipeline.postgres)
        found = slot.state(connection, known.slot.name)
        end = end_of_wal(connection)
        check_slot(found, known.slot, identify(connection), known.resume_at, end, shown=known.shown)

    def _once(self, started: float) -> SnapshotResult | None:
        """Read what is left under one snapshot; returns None if it was given up, and something may be left."""
        known = self._claim.state
        wanted = [oid for oid in known.tables if oid not in known.completed]
        if not wanted:
            log.info("The snapshot is complete.")
            return self._nothing_left()
        # what is set aside is read by the stream, when a person lets it go on
        tables = self._present([oid for oid in wanted if oid not in known.held])
        if not tables:
            self._complete([])
            return self._nothing_left()
        holder = pg.SnapshotExporter(self._pipeline.postgres)
        try:
            return self._take(holder, tables, started)
        finally:
            holder.close()

    def _take(self, holder: pg.SnapshotExporter, tables: list[SourceTable], started: float) -> SnapshotResult | None:
        known, wanted = self._claim.state, [table.oid for table in tables]
        oldest = max(known.tables[oid].oldest_xid for oid in wanted)
        held = holder.open(tables, oldest_xid=oldest, timeout=self._pipeline.create_slot_timeout)
        watch = self._watch(holder)
        tables, plans, tasks, skipped = watch.work(lambda: self._plan(holder, held, wanted, oldest))
        log.info(
            "Boundary %s at %s: %d tables, %d ranges in %d lanes (%d done before).",
            held.snapshot, format_lsn(held.insert_lsn), len(tables), sum(len(t.chunks) for t in tasks), len(tasks),
            skipped,
        )  # fmt: skip
        self._controller.status.progress = {
            "boundary": str(held.snapshot), "in_progress": len(held.snapshot.running),
            "insert_lsn": format_lsn(held.insert_lsn), "ranges": sum(len(t.chunks) for t in tasks) + skipped,
        }  # fmt: skip
        meter = SnapshotMeter(tables, self._claim.state, plans.parts)
        watch.meanwhile = lambda: self._measure(meter)
        self._guard.renewable = plans.resumable
        self._guard.watch(list(known.tables), lambda: (holder.pid,))
        try:
            totals = watch.work(lambda: self._run_lanes(tasks)) if tasks else []
        except SourcePressed as pressed:
            self._give_up(holder, watch, meter, pressed)
            return None
        except TypeAltered as altered:
            if self._in_vain >= _IN_VAIN:
                raise
            log.warning("%s The plan is made anew.", altered.what)
            self._renew(holder, watch, meter, altered)
            return None
        self._movement.end()
        # nothing is read under it any more: it must not block others while a topic is swept, nor the guard ask for it
        self._guard.watch(list(known.tables), tuple)
        holder.close()
        # after this, no transaction that a lane has left open can become visible
        self._claim.initialise_all()
        aside = self._claim.state.held
        parts = {oid: each for oid, each in plans.parts.items() if oid not in aside}
        self._check_done([part for each in parts.values() for part in each])
        self._sweep(parts)
        self._complete(tables)
        self._report(meter.sum_up(self._claim.state, sum(t["dead_letters"] for t in totals)))
        self._tell()
        before = self._before
        return SnapshotResult(
            max(len(tables), before.tables),
            sum(t["rows"] for t in totals) + before.rows,
            sum(t["dead_letters"] for t in totals),
            self._claim.state.counters["open_dead_letters"],
            sum(len(t.chunks) for t in tasks) + before.ranges,
            skipped - before.ranges,
            time.monotonic() - started,
        )

    def _give_up(
        self, holder: pg.SnapshotExporter, watch: HolderWatch, meter: SnapshotMeter, pressed: SourcePressed
    ) -> None:
        """Give up the snapshot since it presses on the source.

        :raises SourcePressed: the job has to end instead: what is left cannot be read under another snapshot, or the
            last ones were given up before any range was finished.
        """
        limit = pressed.limit
        if not self._guard.renewable or self._in_vain >= _IN_VAIN:
            self._guard.stepped(limit, "stopped", f"{pressed.what} The job ends.")
            raise pressed
        self._guard.stepped(limit, "renewed", f"{pressed.what} What is left is read under a new snapshot.")
        self._renew(holder, watch, meter, pressed)

    def _renew(self, holder: pg.SnapshotExporter, watch: HolderWatch, meter: SnapshotMeter, why: Outage) -> None:
        """Give up the snapshot, its locks and its xmin, so that what is left is read under a new one. That is what a
        snapshot does that is run again, in the same job: finished ranges stay, with the first boundary.

        :raises Outage: what still reads under it does not end.
        """
        self._guard.watch(list(self._claim.state.tables), tuple)
        holder.close()
        # each lane publishes the range that it reads, and then finds that nobody holds the snapshot any more
        if not watch.ended(self._pipeline.transaction_timeout):
            raise why
        # one that goes on elsewhere cannot commit any more; what it has committed is in the state
        self._claim.initialise_all()
        made = meter.since(self._claim.state)
        self._in_vain = 0 if made.ranges_done else self._in_vain + 1
        before = self._before
        self._before = replace(
            before,
            tables=max(before.tables, len(self._claim.state.boundaries)),
            rows=before.rows + made.rows,
            ranges=before.ranges + made.ranges_done,
        )

    def _nothing_left(self) -> SnapshotResult:
        """What a snapshot does that is complete."""
        self._tell()
        known = self._claim.state
        return SnapshotResult(len(known.tables), 0, 0, known.counters["open_dead_letters"], 0, 0, 0.0)

    def _tell(self) -> None:
        """Tell of the dead letters that nobody has settled, and of the tables that are set aside: in the log and in the
        job's status."""
        known, shared = self._claim.state, self._pipeline.share_topics
        self._controller.status.counters = known.counters
        self._controller.problems.tell("dead letters", letters.problems(known.open_letters))
        self._controller.problems.tell(
            "tables",
            [
                held.problem(known.gaps[oid], known.tables[oid].table, shared=shared)
                for oid in known.held & known.tables.keys()
            ],
        )

    def _present(self, wanted: Sequence[int]) -> list[SourceTable]:
        """These tables, but for those that were dropped: they have no rows that could be read, and the others are not
        to wait for them."""
        tables = catalog.load(self._connection, wanted, TableMapping.of(self._pipeline))
        self._gone = set(wanted) - {table.oid for table in tables}
        for oid in self._gone:
            log.warning("%s was dropped before it was read.", self._claim.state.tables[oid].table.qualified)
        return tables

    def _complete(self, tables: Sequence[SourceTable]) -> None:
        known = self._claim.state
        completed = {*known.completed, *self._gone, *(table.oid for table in tables), *known.held}
        self._claim.write({COMPLETE: Complete(tuple(sorted(completed)), False, time.time())})

    def _refresh_pinned(self, tables: Sequence[SourceTable]) -> list[SourceTable]:
        """Record the tables as they are today, since they are read by today's names and files, and return them, with
        the keys that their topics have. If columns changed since the slot was created, their new schema is registered.

        :raises Refused: a key changed; or a table has another name, by which less of it is hidden.
        """
        changed: dict[str, StateRecord | None] = {}
        state, known = self._claim.state, self._claim.state.tables
        if exposed := options.exposed(self._pipeline, state, tables):
            raise Refused(" ".join(exposed.values()))
        tables = [
            # the publication has the filter that was recorded; another one of today's options is for the stream
            replace(pinned.check_key(table, complete=False), where=pinned.table.where, filtered=pinned.table.filtered)
            for table in tables
            for pinned in [known[table.oid]]
        ]
        for table in tables:
            pinned = known[table.oid]
            if table == pinned.table:
                continue
            value_schema = pinned.value_schema
            if catalog.definition(table) != catalog.definition(pinned.table):
                number, published = pinned.value_schema, state.versions(table.oid)
                value_schema = register_value(self._pipeline, pinned.topic, table, published)
                of_id = [each.table for each in published if each.value_schema == number]
                before = pinned.table if value_schema != number else united(table, of_id)
                if value_schema != number or before.columns != table.columns:  # there may be rows with it already
                    changed[schema_key(table.oid, number)] = LaterSchema(before, number)
                # before its snapshot has begun, no row is published
                changed |= state.published_types(table.oid) if table.oid in state.boundaries else {}
            changed[table_key(table.oid)] = replace(pinned, table=table, value_schema=value_schema)
        if changed:
            self._claim.write(changed)
        return tables

    def _sweep(self, parts: Mapping[int, Sequence[SourceTable]]) -> None:
        """Publish tombstones for keys that the topics contained before, and that the source does not have any more.

        :param parts: see :class:`Plans`.
        """
        known = self._claim.state
        wanted = {oid: found.ends for oid in parts if (found := known.sweep(oid)) is not None and not found.done}
        if not wanted:
            return
        # compiled code, a hundred megabytes: a driver that has nothing to sweep does without it
        from airflow_bottledwater.publish.session import PublishSession
        from airflow_bottledwater.snapshot.sweep import sweep

        self._claim.record_ids([stream_id(self._claim.prefix)])
        pinned = self._claim.state.tables
        publishing = PublishSession(
            self._pipeline,
            self._claim.job,
            stream_id(self._claim.prefix),
            pins(pinned[oid] for oid in wanted),
            self._claim.topic,
            Backoff(self._pipeline.outage_timeout, self._controller.stopped),
        )
        try:
            for oid, ends in wanted.items():
                letters = any(done.letters for part in parts[oid] for done in self._progress(part) if done)
                sweep(publishing, pinned[oid], ends, self._connection if letters else None)
        finally:
            publishing.close()

    def _watch(self, holder: pg.SnapshotExporter) -> HolderWatch:
        """Watches the holder and the sessions that wait for its locks, from the moment that it has them."""
        return HolderWatch(
            holder,
            self._pipeline.lock_queue_limit,
            self._controller.stopped,
            what="The snapshot",
            again="Run it again, finished ranges stay;",
            kept="; finished ranges stay",
        )

    def _plan(
        self, holder: pg.SnapshotExporter, held: pg.ExportedSnapshot, wanted: Sequence[int], oldest: int
    ) -> tuple[list[SourceTable], Plans, list[LaneTask], int]:
        """What is read under the snapshot, recorded."""
        # before the boundary is stored: if PostgreSQL crashed and lost commits that B sees, it would use their ids
        # again
        holder.wait_flushed(held.insert_lsn, timeout=self._pipeline.outage_timeout)
        # read again under the locks: until the holder ends, no ALTER TABLE changes what is read here, but an ALTER TYPE
        # may, which lanes notice by the values
        tables = holder.load(wanted, TableMapping.of(self._pipeline))
        tables = self._refresh_pinned(tables)
        plans = Plans(self._pipeline, self._claim, tables, holder.partitions(tables))
        tasks, skipped = plans.tasks(held, oldest)
        return tables, plans, tasks, skipped

    def _measure(self, meter: SnapshotMeter) -> None:
        if (lost := self._guard.lost) is not None:
            self._claim.refresh()  # a job that has taken the slot over moves it
            raise lost
        if reason := self._guard.renew:
            raise SourcePressed(reason, "Raise guard_xmin_age.", limit="xmin")
        self._movement.look()
        try:
            state = self._claim.refresh()
        except TakenOver:
            raise
        except BottledWaterError:
            return
        progress = meter.update(state)
        if (made := (progress.rows, progress.ranges_done)) != self._made:
            self._made = made
            self._movement.moved()
        self._controller.status.progress |= asdict(progress)
        self._tell()
        self._report(progress)

    def _check_done(self, tables: Sequence[SourceTable]) -> None:
        for table in tables:
            for chunk, done in enumerate(self._progress(table)):
                if done is None or not done.done:
                    raise Outage(
                        f"Range {chunk} of {table.qualified} has no record of its completion.",
                        "Run the snapshot again.",
                    )

    def _progress(self, table: SourceTable) -> list[Progress | None]:
        """How far each range of a table's plan is published."""
        plan = self._claim.state.plan(table.oid)
        assert plan is not None
        return [self._claim.state.done(table.oid, chunk) for chunk in range(len(plan.ranges))]
