"""One live snapshot in the process that publishes the stream: when its rows may be published, and which.

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

from airflow_bottledwater.encoding import wire
from airflow_bottledwater.errors import CredentialsRefused, RecordError, rotated
from airflow_bottledwater.kafka.errors import NewProducerNeeded, RecordRefused
from airflow_bottledwater.kafka.publisher import Records, tombstones
from airflow_bottledwater.live.changed_keys import ChangedKeys, SupersedingKeys
from airflow_bottledwater.live.chunks import LiveChunk
from airflow_bottledwater.live.reading import LiveReader
from airflow_bottledwater.model.lsn import Position, format_lsn
from airflow_bottledwater.pipeline.settings import Settings
from airflow_bottledwater.publish.dead_letter import counted
from airflow_bottledwater.publish.encode import EncodedBatch
from airflow_bottledwater.publish.refusals import find_refused, rule_out
from airflow_bottledwater.publish.reject import without
from airflow_bottledwater.publish.removed import removals
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


class Broken(Exception):
    """Changes were published that were not noted here, so that what is read cannot be compared with them."""


class Failed(Exception):
    """The live snapshot cannot be taken; the stream goes on.

    :param error: why.
    """

    def __init__(self, error: BaseException) -> None:
        super().__init__(error)
        self.error = error


class LiveSnapshot:
    """Publishes the rows of one request, in the order of the stream.

    :param request_id: the request's id.
    :param session: the stream's own.
    :ivar reading: reads the rows; None until that begins.
    :ivar boundary: the LSN up to which the rows that were published last show the table.
    :ivar published_at: when a chunk was published last.
    """

    def __init__(self, pipeline: Settings, session: PublishSession, request_id: str, request: SnapshotRequest) -> None:
        self._pipeline, self._session = pipeline, session
        self._id, self.request = request_id, request
        self._changed = ChangedKeys()
        self._noting = False
        #: the indices of the topics of what is read, as long as rows of it are left
        self._topics: set[int] = set()
        #: P as it was when the last batch was noted
        self._position: Position | None = None
        self.reading: LiveReader | None = None
        self._chunk: LiveChunk | None = None
        self._rows: RowEncoder | None = None
        self.boundary, self.published_at = "", 0.0

    @property
    def waits(self) -> bool:
        """Whether rows wait for the stream to reach the place where they may be published."""
        return self._chunk is not None

    @property
    def state(self) -> str:
        """What it does, for its report."""
        return "sweeping" if self._chunk is not None and self._chunk.stale else "reading"

    @property
    def noted(self) -> int:
        """How many changed keys are noted beside it."""
        return len(self._changed)

    def publishing(self, encoded: EncodedBatch) -> None:
        """Note the changes of a batch before it is published."""
        if self._noting:
            oldest = None if self._chunk is None or self._chunk.stale else self._chunk.snapshot
            self._changed.note(encoded, self._session.index, self._topics, oldest)

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
            self.forget()
        self._position = position

    def advance(self, progress: LiveProgress) -> bool:
        """Take what is read; returns whether a chunk of it can be published now.

        :raises Failed: the rows cannot be read.
        :raises Outage: credentials are refused with which the job had worked.
        """
        if self.reading is None:
            # what is published from now on is noted; the reading's X0 is taken after that
            self._changed.clear()
            tables = self._session.state.tables
            self._topics = {self._session.index[tables[oid].topic] for oid in progress.tables[progress.done :]}
            self._noting, self._position = True, self._session.state.position
            self.reading = LiveReader(self._pipeline, self.request, progress, self._session.state)
            # not even with snapshot_headers: a position of zeros would make the rows older than all changes
            self._rows = RowEncoder(self._session, 0, BY_LIVE)
        self.reading.later = self._session.state.later
        if self._chunk is None:
            error = self.reading.error
            if error is not None and self.reading.chunks.empty():
                raise (rotated(error) if isinstance(error, CredentialsRefused) else Failed(error)) from error
            with contextlib.suppress(queue.Empty):
                self._chunk = self.reading.chunks.get_nowait()
                if not self._chunk.stale:
                    self._changed.forget(self._chunk.snapshot)
        position = self._session.state.position
        # the stream first publishes all that the chunk shows
        return self._chunk is not None and position is not None and position.lsn >= self._chunk.insert_lsn

    def publish(self, progress: LiveProgress, batch_took: float) -> bool:
        """Publish the chunk that is ready; returns whether it was the last one.

        :param batch_took: the seconds that the stream took for its last batch.
        :raises Broken: it cannot be compared with what the stream has published: it is to be read again.
        :raises Failed: ``on_error`` is exit, and a row cannot be published.
        """
        chunk, reading = self._chunk, self.reading
        assert chunk is not None
        assert reading is not None
        began = time.monotonic()
        self._publish(chunk, progress)
        self._chunk, self.published_at = None, time.monotonic()
        reading.chunks.task_done()
        # the stream has its share of the time, and a change waits little longer than for a batch of changes
        reading.took(self.published_at - began, max(_HOLD_UP, self._pipeline.live_share * batch_took))
        self.boundary = format_lsn(chunk.insert_lsn)
        if chunk.after.done > progress.done:
            self._topics.discard(self._session.index[chunk.version.topic])
        return chunk.after.done == len(chunk.after.tables)

    def _publish(self, chunk: LiveChunk, progress: LiveProgress) -> None:
        """Publish a chunk, without the rows of which the stream has published newer versions."""
        topic = self._session.index[chunk.version.topic]
        # a key that was swept is one that no change was published of since the topic was read, not even one that the
        # snapshot shows
        newer = self._changed.newer(topic, None if chunk.stale else chunk.snapshot)
        if newer.all and (chunk.blocks or chunk.stale):
            raise Broken  # read again, the rows are those after the TRUNCATE

        def once() -> None:
            # a new producer may have found that another process works on the stream
            if self._session.state.position != self._position:
                raise Broken
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
            raise Failed(error) from error

    def _records(
        self,
        chunk: LiveChunk,
        newer: SupersedingKeys,
        topic: int,
        before: LiveProgress,
        changes: dict[str, StateRecord | None],
    ) -> Iterator[Records]:
        """The records of a chunk; at their end, the progress behind them is put into ``changes``."""
        rows = superseded = dead_letters = removed = 0
        label = f"{self._id}/{format_lsn(chunk.insert_lsn)}"
        programs = self._session.programs([chunk.version], copied=True)
        assert self._rows is not None
        for block in chunk.blocks:
            for encoded, rejections in self._rows.encode(chunk.version, block, programs, chunk.insert_lsn):
                records = without(encoded.records, rejections)
                kept = ~newer.rows(records)
                yield Records(records.table[kept], records.data, records.headers, label)
                for rejection in rejections:
                    yield self._rows.dead_letter(chunk.version, block, rejection, chunk.insert_lsn, label)
                rows += int(np.count_nonzero(kept))
                superseded += len(kept) - int(np.count_nonzero(kept))
                dead_letters += len(rejections)
        for row in chunk.large:
            yield self._rows.unread(chunk.version, row.key, row.unsendable, chunk.insert_lsn, label)
        dead_letters += len(chunk.large)
        if chunk.stale:
            superseded_keys = newer.rows(tombstones(topic, chunk.stale)).tolist()
            gone = [key for key, newer_key in zip(chunk.stale, superseded_keys, strict=True) if not newer_key]
            found = removals(self._session, chunk.version, gone, wire.FROM_LIVE, chunk.insert_lsn)
            yield replace(found, label=label)
            removed = len(gone)
        if chunk.partitions is not None and chunk.version.table.partitioned:
            oid = chunk.version.table.oid
            # what was known before of a partition that is read by itself is kept: it may have got another file since
            known = self._session.state.partitions.get(oid, {}) if chunk.after.parts else {}
            changes[partitions_key(oid)] = Partitions({**chunk.partitions, **known})
        changes.update(counted(self._session.state, BY_LIVE, [chunk.version.table] * dead_letters))
        changes[live_key(self._id)] = replace(
            chunk.after,
            rows=before.rows + rows,
            superseded=before.superseded + superseded,
            dead_letters=before.dead_letters + dead_letters,
            tombstones=before.tombstones + removed,
        )

    def _find_refused(
        self, chunk: LiveChunk, topic: int, error: RecordRefused, progress: dict[str, StateRecord | None]
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
            records = removals(self._session, chunk.version, chunk.stale, wire.FROM_LIVE)
            for why in find_refused(self._session, records).values():
                raise RecordError(
                    f"Topic {chunk.version.topic!r} does not take the removal of a key: {why}",
                    "Ask for a live snapshot without the sweep, or let the topic take records without a value.",
                )
            size += int(records.sizes().sum())
        if not found:
            self._session.smaller_batches(size)

    def forget(self) -> None:
        """End what is being read; it is read again from where its published rows end."""
        if self.reading is not None:
            self.reading.close()
        self.reading = self._chunk = self._rows = None
        self._noting = False
        self._changed.clear()
