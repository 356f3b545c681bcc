"""A snapshot lane: with one connection and one publisher, it publishes its ranges one after the other, each in one
Kafka transaction."""

from __future__ import annotations

import contextlib
import functools
import itertools
import logging
import math
import time
from collections.abc import Callable, Iterator

import psycopg
from psycopg import sql

from airflow_bottledwater import memory
from airflow_bottledwater.backoff import Backoff
from airflow_bottledwater.encoding import wire
from airflow_bottledwater.encoding.mapping import TableMapping
from airflow_bottledwater.encoding.program import select_list
from airflow_bottledwater.errors import BottledWaterError, RecordError, StopRequested
from airflow_bottledwater.guard.standbys import StandbyBrake
from airflow_bottledwater.jobs.log import tell_row
from airflow_bottledwater.kafka.errors import NewProducerNeeded, RecordRefused, TooSlow
from airflow_bottledwater.kafka.publisher import Records
from airflow_bottledwater.model.relation import SourceTable
from airflow_bottledwater.pipeline.settings import Settings
from airflow_bottledwater.postgres import copy, large_rows, snapshot
from airflow_bottledwater.postgres.connect import Connection, connect, outage
from airflow_bottledwater.postgres.large_rows import LargeRow
from airflow_bottledwater.postgres.pressure import standbys
from airflow_bottledwater.postgres.receive import MessageBlock
from airflow_bottledwater.publish import hashed
from airflow_bottledwater.publish.dead_letter import counted
from airflow_bottledwater.publish.definitions import MISFITS, check_definitions
from airflow_bottledwater.publish.refusals import rule_out
from airflow_bottledwater.publish.reject import without
from airflow_bottledwater.publish.rows import RowEncoder
from airflow_bottledwater.publish.session import PublishSession
from airflow_bottledwater.publish.warm import warm_up
from airflow_bottledwater.snapshot.task import LaneTask, SnapshotChunk
from airflow_bottledwater.state import held
from airflow_bottledwater.state.pinned import pins
from airflow_bottledwater.state.records import Progress, StateRecord, by_lane, gap_key, lane_id

log = logging.getLogger(__name__)

#: seconds that a lane waits for a lock beyond lock_queue_limit: the driver, which sees all that wait, is to give up
#: first
_LATER = 5.0
#: seconds between two looks at the standbys
_STANDBYS = 1.0


class _Slow(BottledWaterError):
    """The range takes longer than half the transaction time-out, so it has to be split."""


def run(
    pipeline: Settings, task: LaneTask, *, again: bool = False, stopped: Callable[[], bool] = lambda: False
) -> dict[str, int]:
    """Read and publish a lane's ranges, except those that are done by the state; returns how many rows and dead letters
    it published.

    :param again: whether another process of the same job has begun this.
    :param stopped: returns whether the lane is to stop.
    :raises StopRequested: the lane was stopped.
    :raises TakenOver: another job has claimed the slot.
    :raises Outage: source or broker were not available for too long, or the snapshot's holder is gone; the snapshot can
        be resumed.
    :raises TypeAltered: a column's type is another one than in the plan.
    :raises RecordError: a row cannot be published and ``on_error`` is exit, or a single block takes too long.
    """
    lane = _Lane(pipeline, task, again, stopped)
    try:
        return lane.run()
    except psycopg.Error as error:
        raise outage(error, f"Reading the snapshot in lane {task.lane}") from error
    finally:
        lane.close()


class _Lane:
    def __init__(self, pipeline: Settings, task: LaneTask, again: bool, stopped: Callable[[], bool]) -> None:
        self._pipeline, self._task, self._stopped = pipeline, task, stopped
        memory.keep()
        # compiling takes time, and must not happen while a transaction is open
        warm_up(pipeline.table_options.values())
        self._session = PublishSession(
            pipeline,
            task.job,
            lane_id(task.prefix, task.lane),
            pins(task.tables),
            task.state_topic,
            Backoff(pipeline.outage_timeout),
        )
        self._session.fresh = not again
        self._connection: Connection = self._connect()
        self._tables = {t.table.oid: t for t in task.tables}
        self._rows = RowEncoder(self._session, wire.HEADERS if pipeline.snapshot_headers else 0, by_lane(task.lane))
        #: rows that PostgreSQL cannot send, by the table or partition that they are in
        self._large: dict[int, list[LargeRow]] = {}
        #: the oids of the tables that are set aside
        self._aside = set[int]()
        self._totals = {"rows": 0, "dead_letters": 0}
        self._brake, self._looked = StandbyBrake(pipeline.guard_replica_lag), -math.inf

    def close(self) -> None:
        self._session.close()
        self._connection.close()

    def run(self) -> dict[str, int]:
        for chunk in self._task.chunks:
            if chunk.oid in self._aside:
                continue
            try:
                self._read(chunk)
            except RecordError as error:
                if TableMapping.of(self._pipeline).policy(self._tables[chunk.oid].table) != "isolate":
                    raise
                self._set_aside(chunk.oid, error)
        return self._totals

    def _read(self, chunk: SnapshotChunk) -> None:
        """Publish all that is left of a range.

        :raises RecordError: a row cannot be published and does not become a dead letter, or a block takes too long.
        """
        pending = [(chunk.first, chunk.last)]
        while pending:
            self._check_stopped()
            self._give_way()
            pending[0:1] = self._split(chunk, *pending[0], at_least=1)
            try:
                self._session.run(functools.partial(self._take, chunk, *pending[0]))
            except psycopg.Error as error:
                if isinstance(error, MISFITS):
                    table = self._tables[chunk.oid].table
                    check_definitions(self._pipeline, table, range(len(table.columns)))
                if not large_rows.too_large(error):
                    what = f"Reading blocks {pending[0][0]} to {pending[0][1]}"
                    raise large_rows.unread(error, what, self._source(chunk)) from error
                self._find_large(chunk, *pending[0], error)
            except _Slow:
                pending[0:1] = self._split(chunk, *pending[0], at_least=2)
            else:
                pending.pop(0)

    def _give_way(self) -> None:
        """Rest before the next range while a standby falls behind."""
        if not self._pipeline.guard_replica_lag or time.monotonic() - self._looked < _STANDBYS:
            return
        told = False
        while why := self._brake.look(standbys(self._connection)):
            if not told:
                log.warning("Lane %d rests before its next range: %s.", self._task.lane, why)
            told = True
            self._check_stopped()
            time.sleep(_STANDBYS)
        self._looked = time.monotonic()

    def _set_aside(self, oid: int, error: RecordError) -> None:
        """Record that a table is set aside because of a row, and read no more of it; what is published of it stays."""
        name = self._tables[oid].table.qualified
        log.error("%s is set aside, and all others go on: %s", name, error.what)
        tell_row(log, error)
        gap = held.set_aside("a row", error.what)
        self._session.run(lambda: self._session.transact([], {gap_key(oid): gap}))
        self._aside.add(oid)

    def _take(self, chunk: SnapshotChunk, first: int, last: int) -> None:
        """Publish the part of the blocks [first, last) that is not published by the state."""
        done = self._session.state.done(chunk.planned, chunk.number)
        if done is not None:
            if done.done:
                return
            first = max(first, done.upto)
            if first >= last:
                return
        try:
            self._publish(chunk, first, last, done or self._progress(first))
        except RecordRefused as error:
            self._find_refused(chunk, first, last, error)
            raise NewProducerNeeded(f"{error.what} What is refused is known now") from error

    def _split(self, chunk: SnapshotChunk, first: int, last: int, *, at_least: int) -> list[tuple[int, int]]:
        """Split a range into as many parts as Kafka takes one at a time, by what it took lately.

        :param at_least: how many parts, if the range took too long already.
        :raises RecordError: it took too long, and is a single block.
        """
        table, pace = self._source(chunk), self._session.pace
        # the size as the driver read it under the locks
        end = last if last < snapshot.LAST_BLOCK else max(table.pages, first + 2)
        parts = max(at_least, math.ceil((end - first) * snapshot.BLOCK_BYTES / pace.limit))
        if parts > 1 and end - first <= 1:
            if at_least == 1:
                return [(first, last)]
            raise RecordError(
                f"One block of {table.qualified} takes longer than half of transaction_timeout "
                f"({self._pipeline.transaction_timeout:g} s). {pace}",
                "Raise transaction_timeout.",
            )
        if parts == 1:
            return [(first, last)]
        bounds = [first + (end - first) * i // parts for i in range(parts)]
        bounds = [*sorted(set(bounds)), last]
        log.info("Range %d of %s is split at blocks %s. %s", chunk.number, table.qualified, bounds[1:-1], pace)
        return list(itertools.pairwise(bounds))

    def _publish(self, chunk: SnapshotChunk, first: int, last: int, before: Progress) -> None:
        """Publish the rows of blocks [first, last) and the range's progress in one Kafka transaction."""
        pinned = self._tables[chunk.oid]
        programs = self._session.programs([pinned.version], copied=True)
        # not L: a transaction may commit below it that B does not show, and whose changes are streamed
        begin = self._session.state.resume_at.lsn
        counts = {"rows": 0, "dead_letters": 0}
        progress: dict[str, StateRecord | None] = {}
        deadline = math.inf

        def in_time() -> None:
            self._check_stopped()
            if time.monotonic() > deadline:
                raise _Slow("The range takes too long.")

        blocks = self._blocks(chunk, first, last, idle=in_time)

        def records() -> Iterator[Records]:
            for block in () if begun is None else itertools.chain([begun], blocks):
                in_time()
                for encoded, rejections in self._rows.encode(pinned.version, block, programs, begin):
                    kept = without(encoded.records, rejections)
                    yield kept
                    for rejection in rejections:
                        yield self._rows.dead_letter(pinned.version, block, rejection, self._task.held.insert_lsn)
                    counts["rows"] += len(kept)
                    counts["dead_letters"] += len(rejections)
            for row in self._large_in(chunk, first, last):
                yield self._rows.unread(pinned.version, row.key, row.unsendable, self._task.held.insert_lsn)
                counts["dead_letters"] += 1
            rows, dead_letters = before.rows + counts["rows"], before.letters + counts["dead_letters"]
            letters = [pinned.table] * counts["dead_letters"]
            progress.update(counted(self._session.state, by_lane(self._task.lane), letters))
            progress[chunk.progress_key] = self._progress(last, rows, dead_letters, done=last == chunk.last)

        try:
            # the Kafka transaction begins with its first record, so reading blocks without visible rows may take any
            # time
            begun = next(blocks, None)
            deadline = time.monotonic() + self._pipeline.transaction_timeout / 2
            self._session.transact(records(), progress)
        except TooSlow as error:
            self._reconnect()
            raise _Slow(str(error)) from error
        except BaseException:
            self._reconnect()
            raise
        self._connection.execute("COMMIT")
        for name, count in counts.items():
            self._totals[name] += count

    def _progress(self, upto: int, rows: int = 0, letters: int = 0, *, done: bool = False) -> Progress:
        return Progress(rows, upto, done, self._task.lane, self._task.job.epoch, letters)

    def _check_stopped(self) -> None:
        if self._stopped():
            raise StopRequested("The snapshot was asked to stop; finished ranges stay.")

    # ------------------------------------------------------------------ reading
    def _connect(self) -> Connection:
        return connect(self._pipeline.postgres, application=f"bottledwater snapshot lane {self._task.lane}")

    def _source(self, chunk: SnapshotChunk) -> SourceTable:
        """The table, or the partition, that a range is read from."""
        return chunk.part or self._tables[chunk.oid].table

    def _blocks(
        self, chunk: SnapshotChunk, first: int, last: int, *, idle: Callable[[], None]
    ) -> Iterator[MessageBlock]:
        """The rows of blocks [first, last), read in a transaction under the exported snapshot."""
        source = self._source(chunk)
        snapshot.begin_task(
            self._connection, source, self._task.held, lock_timeout=self._pipeline.lock_queue_limit + _LATER
        )
        known = [sql.SQL("ctid <> {}::tid").format(sql.Literal(row.place)) for row in self._large.get(source.oid, ())]
        condition = sql.SQL(" AND ").join(known) if known else None
        query = snapshot.copy_query(source, select_list(source), first, last, condition)
        return hashed.rows(self._pipeline, source, copy.rows(self._connection, query, idle=idle))

    def _reconnect(self) -> None:
        """Connect anew: a COPY that is not read to its end can only be ended with its session. It is cancelled first,
        or the server would read on until it has something to send."""
        with contextlib.suppress(psycopg.Error):
            self._connection.cancel_safe(timeout=2)
        self._connection.close()
        self._connection = self._connect()

    # ------------------------------------------------------------------ rows that cannot be published
    def _find_large(self, chunk: SnapshotChunk, first: int, last: int, error: psycopg.Error) -> None:
        """Find the rows of the blocks [first, last) that PostgreSQL cannot send; they are not read any more.

        :raises RecordError: ``on_error`` is exit.
        :raises Refused: there are none, or they cannot be found.
        """
        source = self._source(chunk)
        why = outage(error, f"Reading blocks {first} to {last} of {source.qualified}")
        known = {row.place for row in self._large.get(source.oid, ())}
        timeout = self._pipeline.lock_queue_limit + _LATER
        snapshot.begin_task(self._connection, source, self._task.held, lock_timeout=timeout)
        try:
            where = snapshot.blocks(first, last)
            found = [
                row for row in large_rows.large_rows(self._connection, source, where=where) if row.place not in known
            ]
        except psycopg.Error as failure:
            raise why from failure
        finally:
            self._reconnect()
        if not found:
            raise why from error
        self._large.setdefault(source.oid, []).extend(found)
        if TableMapping.of(self._pipeline).stops(self._tables[chunk.oid].table):
            topic = self._tables[chunk.oid].topic
            raise RecordError(
                f"A row of {source.qualified} cannot be published to topic {topic!r}: {found[0].unsendable}. The "
                "job's log names it.",
                "Nothing of its range is published. Make the row smaller or delete it, and start again; or go on with "
                "on_error = log, which writes its key to the dead-letter topic and leaves it out.",
                topic=topic,
                row=str(found[0]),
            )

    def _large_in(self, chunk: SnapshotChunk, first: int, last: int) -> list[LargeRow]:
        rows = self._large.get(self._source(chunk).oid, ())
        return [row for row in rows if first <= int(row.place[1:].split(",")[0]) < last]

    def _find_refused(self, chunk: SnapshotChunk, first: int, last: int, error: RecordRefused) -> None:
        """Read the blocks [first, last) once more to find the rows that the broker refuses; the next attempt rejects
        them.

        :raises BottledWaterError: no row is the cause, see :func:`~airflow_bottledwater.publish.refusals.rule_out`.
        """
        pinned = self._tables[chunk.oid]
        programs = self._session.programs([pinned.version], copied=True)
        found = size = 0
        progress = {chunk.progress_key: self._progress(last)}
        try:
            rule_out(self._session, error, [], progress)
            for block in self._blocks(chunk, first, last, idle=self._check_stopped):
                self._check_stopped()
                more, bytes_more = self._rows.find_refused(pinned.version, block, programs)
                found, size = found + more, size + bytes_more
        finally:
            self._reconnect()
        if not found:
            self._session.smaller_batches(size)
