"""Live snapshots in the process that publishes the stream: which are asked for, and when their rows may be published.

Everything here runs in the publisher's thread, between two batches; rows are read in another one
(:mod:`airflow_bottledwater.live.reading`).
"""

from __future__ import annotations

import contextlib
import logging
import queue
import time
from collections.abc import Iterator
from dataclasses import replace

import numpy as np

from airflow_bottledwater.backoff import ROTATION
from airflow_bottledwater.encoding import wire
from airflow_bottledwater.errors import BottledWaterError, CredentialsRefused, Outage, RecordError, rotated
from airflow_bottledwater.jobs.snapshots import SnapshotRequests
from airflow_bottledwater.kafka.errors import NewProducerNeeded, RecordRefused
from airflow_bottledwater.kafka.publisher import Records, tombstones
from airflow_bottledwater.live.chunks import Chunk
from airflow_bottledwater.live.reading import Reading
from airflow_bottledwater.live.report import Reports
from airflow_bottledwater.live.touched import MOST, Newer, Touched
from airflow_bottledwater.live.wanted import wanted
from airflow_bottledwater.model.lsn import Position, format_lsn
from airflow_bottledwater.pipeline.settings import Pipeline
from airflow_bottledwater.policy import ErrorAction, act
from airflow_bottledwater.postgres.connect import session as connected
from airflow_bottledwater.publish.dead_letter import counted
from airflow_bottledwater.publish.encode import EncodedBatch
from airflow_bottledwater.publish.refusals import find_refused, rule_out
from airflow_bottledwater.publish.reject import without
from airflow_bottledwater.publish.rows import RowEncoder
from airflow_bottledwater.publish.session import PublishSession
from airflow_bottledwater.state.control_records import SnapshotRequest
from airflow_bottledwater.state.records import (
    BY_LIVE,
    LiveProgress,
    Partitions,
    StateRecord,
    live_key,
    partitions_key,
)

log = logging.getLogger(__name__)

#: seconds for which publishing a chunk should hold up the stream, unless a batch takes much longer than this
_HOLD_UP = 0.01
#: seconds until the beginning of a live snapshot, or telling its end, is tried again after an outage: each try holds up
#: the stream
_AGAIN = 5.0


class _Broken(Exception):
    """Changes were published that were not noted here, so that what is read cannot be compared with them."""


class _Failed(Exception):
    """The live snapshot cannot be taken; the stream goes on.

    :param error: why.
    """

    def __init__(self, error: BaseException) -> None:
        super().__init__(error)
        self.error = error


class LiveSnapshots:
    """Publishes the rows of one request after the other, in the order of the stream.

    :param name: the pipeline's name, see :meth:`~airflow_bottledwater.model.slot.Cluster.pipeline`.
    :param session: the stream's own.
    """

    def __init__(self, pipeline: Pipeline, name: str, session: PublishSession) -> None:
        self._pipeline, self._session = pipeline, session
        self._requests = SnapshotRequests(pipeline, name)
        self._reports = Reports(pipeline, name)
        self._touched = Touched()
        self._noting = False
        #: the indices of the topics of what is read
        self._topics: set[int] = set()
        #: P as it was when the last batch was noted
        self._position: Position | None = None
        self._id, self._request = "", SnapshotRequest(())
        self._reading: Reading | None = None
        self._chunk: Chunk | None = None
        self._rows: RowEncoder | None = None
        #: when the next chunk may be published, unless the stream has had nothing to publish since the last one
        self._not_before = 0.0
        #: when a beginning, or telling an end, may be tried again; and since when credentials are refused, 0 if they
        #: are not
        self._again = self._refused = 0.0
        #: when the stream was given back its time, and the seconds that it took for its last batch
        self._given_back, self._batch_took = time.monotonic(), 0.0
        self._shared = False
        self._untidy = True

    def close(self) -> None:
        """End what is being read; it is read on by the next job."""
        self._forget()
        self._requests.close()
        self._reports.close()

    @property
    def active(self) -> bool:
        """Whether there is a live snapshot to be worked on."""
        return self._requests.active

    @property
    def waits(self) -> bool:
        """Whether rows wait for the stream to reach the place where they may be published."""
        return self._chunk is not None

    def catch_up(self) -> None:
        """Read all requests that were made until now.

        :raises Outage: Kafka does not answer.
        """
        self._requests.read()

    # ------------------------------------------------------------------ the stream tells what it does
    def publishing(self, encoded: EncodedBatch) -> None:
        """Note the changes of a batch before it is published."""
        self._shared = self._shared or len(encoded.records.table) > 0
        if self._noting:
            oldest = None if self._chunk is None or self._chunk.stale else self._chunk.snapshot
            self._touched.note(encoded, self._session.index, self._topics, oldest)

    def reached(self, position: Position | None) -> None:
        """Note P behind a batch that was noted."""
        self._position = position

    def expect(self, position: Position | None) -> None:
        """Before a batch is published: give up what is read if P is not where the last noted batch has left it; then
        another process, or an attempt whose outcome was not known, has published changes."""
        if self._noting and position != self._position:
            log.info(
                "The stream went on elsewhere (%s, not %s): the live snapshot reads its rows again.",
                position,
                self._position,
            )
            self._forget()
        self._position = position

    # ------------------------------------------------------------------ work
    def work(self) -> None:
        """Do what can be done now: at most one chunk is published. An error of a live snapshot ends that snapshot, not
        the stream.

        :raises Outage: credentials are refused with which the job had worked: a new job gets the new ones.
        :raises BottledWaterError: an error of the stream itself: the slot was taken over, say, or a topic is gone.
        """
        self._batch_took = time.monotonic() - self._given_back
        self._requests.poll()
        if not self._requests.complete:
            # one that was answered before may be among them: that is only known behind the last
            self._given_back = time.monotonic()
            return
        served = ""
        for request_id, request in list(self._requests.open.items()):
            progress = self._session.state.live(request_id)
            if progress is not None and progress.ended:
                if time.monotonic() >= self._again:
                    self._end(request_id, progress, progress.ended, progress.error)
            elif request.cancelled and not (progress is not None and progress.owed):
                self._end(request_id, progress, "cancelled")
            elif request.paused:
                self._reports.tell(request_id, "paused", progress)
            elif not served:
                served = request_id
                self._serve(request_id, request, progress)
        if self._id and self._id != served:
            self._forget()
        self._tidy()
        self._given_back = time.monotonic()

    def _serve(self, request_id: str, request: SnapshotRequest, progress: LiveProgress | None) -> None:
        if (request_id, request) != (self._id, self._request):
            # another request, or other limits
            self._forget()
            self._id, self._request = request_id, request
        if progress is not None and progress.done == len(progress.tables):
            # a job died behind its last rows: nothing else would end it
            self._end(request_id, progress, "finished")
            return
        try:
            self._advance(progress or self._begin())
        except _Broken:
            self._forget()
        except _Failed as failure:
            log.error("The live snapshot failed: %s", failure.error)
            self._end(request_id, self._session.state.live(request_id), "failed", str(failure.error))

    def _begin(self) -> LiveProgress:
        if time.monotonic() < self._again:
            raise _Broken
        tables = self._session.state.tables
        try:
            with connected(
                self._pipeline.postgres, "Beginning a live snapshot", application="bottledwater live snapshot"
            ) as connection:
                progress = LiveProgress(wanted(self._pipeline, connection, self._request, self._session.state))
            self._refused = 0.0
        except BottledWaterError as error:
            if isinstance(error, CredentialsRefused):
                self._refused = self._refused or time.monotonic()
                if time.monotonic() - self._refused > ROTATION:
                    raise rotated(error) from error
            elif act(error) is not ErrorAction.WAIT:
                raise _Failed(error) from error
            log.info("A live snapshot waits: %s", error)
            self._reports.tell(self._id, "waiting", None, waits_for=str(error))
            self._again = time.monotonic() + _AGAIN
            raise _Broken from error
        log.info(
            "A live snapshot of %s%s begins.",
            ", ".join(tables[oid].table.qualified for oid in progress.tables),
            f" where {self._request.where}" if self._request.where else "",
        )
        self._write({live_key(self._id): progress})
        return progress

    def _advance(self, progress: LiveProgress) -> None:
        if self._reading is None:
            # what is published from now on is noted; the reading's X0 is taken after that
            self._touched.clear()
            tables = self._session.state.tables
            self._topics = {self._session.index[tables[oid].topic] for oid in progress.tables}
            self._noting, self._position = True, self._session.state.position
            self._reading = Reading(self._pipeline, self._request, progress, tables)
            self._rows = RowEncoder(self._session, wire.HEADERS if self._pipeline.snapshot_headers else 0, BY_LIVE)
        if len(self._touched) > MOST:
            log.info("The stream has changed too many keys since the rows were read: they are read again.")
            self._forget()
            return
        if self._chunk is None:
            error = self._reading.error
            if error is not None and self._reading.chunks.empty():
                raise (rotated(error) if isinstance(error, CredentialsRefused) else _Failed(error)) from error
            with contextlib.suppress(queue.Empty):
                self._chunk = self._reading.chunks.get_nowait()
                if not self._chunk.stale:
                    self._touched.forget(self._chunk.snapshot)
        state = "sweeping" if self._chunk is not None and self._chunk.stale else "reading"
        self._reports.tell(self._id, state, progress, self._reading, self._session.state.tables)
        position = self._session.state.position
        if self._chunk is None or position is None or position.lsn < self._chunk.insert_lsn:
            return  # the stream has not published yet all that the chunk shows
        if self._shared and time.monotonic() < self._not_before:
            return
        self._publish(self._chunk, progress)

    def _publish(self, chunk: Chunk, progress: LiveProgress) -> None:
        """Publish a chunk, without the rows of which the stream has published newer versions."""
        began = time.monotonic()
        topic = self._session.index[chunk.version.topic]
        # a key that was swept is one that no change was published of since the topic was read, not even one that the
        # snapshot shows
        newer = self._touched.newer(topic, None if chunk.stale else chunk.snapshot)
        if newer.all and (chunk.blocks or chunk.stale):
            raise _Broken  # read again, the rows are those after the TRUNCATE

        def once() -> None:
            # a new producer may have found that another process works on the stream
            if self._session.state.position != self._position:
                raise _Broken
            if self._session.state.live(self._id) != progress:
                return  # its outcome was unknown, and it was published
            changes: dict[str, StateRecord | None] = {}
            try:
                # rows that are published without the progress are read and published again: they are rows of their keys
                # all the same
                records = self._records(chunk, newer, topic, progress, changes)
                self._session.transact(records, changes, several=True)
            except RecordRefused as error:
                self._find_refused(chunk, topic, error, {live_key(self._id): progress})
                raise NewProducerNeeded(f"{error.what} What is refused is known now") from error

        try:
            self._session.run(once)
        except RecordError as error:
            raise _Failed(error) from error
        self._chunk, self._shared = None, False
        took = time.monotonic() - began
        assert self._reading is not None
        self._reading.chunks.task_done()
        share = self._pipeline.live_share
        # the stream has its share of the time, and a change waits little longer than for a batch of changes
        self._reading.took(took, max(_HOLD_UP, share * self._batch_took))
        self._not_before = time.monotonic() + took * (1 / share - 1)
        self._reports.boundary = format_lsn(chunk.insert_lsn)
        if chunk.after.done == len(chunk.after.tables):
            done = self._session.state.live(self._id)
            assert done is not None
            self._end(self._id, done, "finished")

    def _records(
        self, chunk: Chunk, newer: Newer, topic: int, before: LiveProgress, changes: dict[str, StateRecord | None]
    ) -> Iterator[Records]:
        """The records of a chunk; at their end, the progress behind them is put into ``changes``."""
        rows = left_out = dead_letters = swept = 0
        label = f"{self._id}/{format_lsn(chunk.insert_lsn)}"
        programs = self._session.programs([chunk.version], copied=True)
        assert self._rows is not None
        for block in chunk.blocks:
            for encoded, rejections in self._rows.encode(chunk.version, block, programs):
                records = without(encoded.records, rejections)
                kept = ~newer.rows(records)
                yield Records(records.table[kept], records.data, records.headers, label)
                for rejection in rejections:
                    yield self._rows.dead_letter(chunk.version, block, rejection, chunk.insert_lsn, label)
                rows += int(np.count_nonzero(kept))
                left_out += len(kept) - int(np.count_nonzero(kept))
                dead_letters += len(rejections)
        for row in chunk.large:
            yield self._rows.unread(chunk.version, row.key, row.unsendable, chunk.insert_lsn, label)
        dead_letters += len(chunk.large)
        if chunk.stale:
            records = tombstones(topic, chunk.stale)
            kept = ~newer.rows(records)
            yield Records(records.table[kept], records.data, 0, label)
            swept = int(np.count_nonzero(kept))
        if chunk.partitions is not None and chunk.version.table.partitioned:
            oid = chunk.version.table.oid
            # what was known before of a partition that is read by itself is kept: it may have got another file since
            known = self._session.state.partitions.get(oid, {}) if chunk.after.parts else {}
            changes[partitions_key(oid)] = Partitions({**chunk.partitions, **known})
        changes.update(counted(self._session.state, BY_LIVE, [chunk.version.table] * dead_letters))
        changes[live_key(self._id)] = replace(
            chunk.after,
            rows=before.rows + rows,
            newer=before.newer + left_out,
            dead_letters=before.dead_letters + dead_letters,
            swept=before.swept + swept,
        )

    def _find_refused(
        self, chunk: Chunk, topic: int, error: RecordRefused, progress: dict[str, StateRecord | None]
    ) -> None:
        """Find the rows that the broker refuses; the next attempt rejects them.

        :raises RecordError: a row is refused and ``on_error`` is exit, or a tombstone is, of which no dead letter could
            be made.
        :raises BottledWaterError: no record is the cause, see :func:`~airflow_bottledwater.publish.refusals.rule_out`.
        """
        rule_out(self._session, error, [], progress)
        assert self._rows is not None
        programs = self._session.programs([chunk.version], copied=True)
        found = size = 0
        for block in chunk.blocks:
            more, bytes_more = self._rows.find_refused(chunk.version, block, programs)
            found, size = found + more, size + bytes_more
        if chunk.stale:
            records = tombstones(topic, chunk.stale)
            for why in find_refused(self._session, records).values():
                raise RecordError(
                    f"Topic {chunk.version.topic!r} does not take the removal of a key: {why}",
                    "Ask for a live snapshot without the sweep, or let the topic take records without a value.",
                )
            size += int(records.sizes().sum())
        if not found:
            self._session.smaller_batches(size)

    # ------------------------------------------------------------------ its end
    def _end(self, request_id: str, progress: LiveProgress | None, how: str, error: str = "") -> None:
        """Record the end, then report it, and remove the request: in this order, so that a crash between them repeats
        the rest only."""
        if request_id == self._id:
            self._forget()
        ended = replace(progress or LiveProgress(()), ended=how, error=error)
        if ended != progress:
            self._write({live_key(request_id): ended})
            log.info("The live snapshot is %s: %s rows.", how, f"{ended.rows:,}")
        try:
            self._reports.tell(request_id, how, ended, tables=self._session.state.tables)
            self._requests.remove(request_id)
        except Outage as outage:
            log.warning("The end of live snapshot %s cannot be told yet: %s", request_id, outage)
            self._again = time.monotonic() + _AGAIN
        self._untidy = True

    def _tidy(self) -> None:
        """Remove the records of live snapshots whose requests are answered: when the requests are known, and behind
        each end. This is called for each batch, and the state may have many records."""
        if not self._untidy:
            return
        self._untidy = False
        # if its rows are not owed, one that nobody asks for has ended, or was begun by a request that was answered
        # already
        ended = {each for each, progress in self._session.state.lives.items() if not progress.still_owed}
        if gone := ended - self._requests.open.keys():
            self._write({live_key(each): None for each in gone})

    def _write(self, records: dict[str, StateRecord | None]) -> None:
        self._session.run(lambda: self._session.transact([], records))

    def _forget(self) -> None:
        if self._reading is not None:
            self._reading.close()
        self._reading = self._chunk = self._rows = None
        self._id, self._noting = "", False
        self._touched.clear()
