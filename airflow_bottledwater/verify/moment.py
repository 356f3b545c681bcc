"""One moment at which tables and topics are compared: a snapshot, and topics in which everything is that the snapshot
shows."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import TypeVar

from airflow_bottledwater.backoff import Backoff, check_stopped
from airflow_bottledwater.encoding.mapping import TableMapping
from airflow_bottledwater.errors import Outage, Refused, StateError
from airflow_bottledwater.kafka import topic_reader
from airflow_bottledwater.kafka.topics import Topics
from airflow_bottledwater.model.lsn import Position, format_lsn
from airflow_bottledwater.model.relation import SourceTable
from airflow_bottledwater.model.slot import of_source
from airflow_bottledwater.pipeline.settings import Settings
from airflow_bottledwater.postgres import catalog, locks, slot
from airflow_bottledwater.postgres.connect import Connection
from airflow_bottledwater.postgres.server import end_of_wal, identify
from airflow_bottledwater.postgres.snapshot import ExportedSnapshot, SnapshotExporter
from airflow_bottledwater.postgres.watch import HolderWatch
from airflow_bottledwater.state.pinned import PinnedTable
from airflow_bottledwater.state.pipeline_state import PipelineState
from airflow_bottledwater.state.store import Reader
from airflow_bottledwater.verify.streaming import Streaming

T = TypeVar("T")

#: seconds to wait for the transactions that write to a table
_SETTLE = 30.0


@dataclass(frozen=True, slots=True)
class Moment:
    """A snapshot that is held, with the topics' ends.

    :param held: the snapshot, its name and L.
    :param tables: the tables as they are under it, by oid.
    :param ends: per topic and partition, the high watermarks, read after the stream had passed L.
    :param last_lsn: the end of the WAL, read after the ends.
    :param first: by the table's oid, L of its first snapshot, if there was one.
    :param truncated: by topic, the position of the last TRUNCATE that the snapshot shows.
    :param starts: per topic and partition, the offsets from which on positions are those of this pipeline.
    """

    held: ExportedSnapshot
    tables: Mapping[int, SourceTable]
    ends: Mapping[str, Sequence[int]]
    last_lsn: int
    first: Mapping[int, int]
    truncated: Mapping[str, str]
    starts: Mapping[str, Sequence[int]]


class Moments:
    """Makes moments of a pipeline's tables.

    :param wanted: the tables, by oid.
    :param streaming: sees to it that somebody publishes.
    """

    def __init__(
        self,
        pipeline: Settings,
        connection: Connection,
        state_topic: str,
        wanted: Mapping[int, PinnedTable],
        stopped: threading.Event,
        streaming: Streaming,
    ) -> None:
        self._pipeline, self._connection, self._state_topic = pipeline, connection, state_topic
        self._wanted, self._stopped, self._streaming = wanted, stopped, streaming
        self._admin = Topics(pipeline.kafka)
        # it is read on for as long as the verification lasts; position and boundaries have no tombstones, unless their
        # table is followed no more
        self._state = Reader(pipeline.kafka, state_topic)

    def close(self) -> None:
        """Close the reader of the state topic."""
        self._state.close()

    @contextmanager
    def hold(self) -> Iterator[tuple[Moment, SnapshotExporter]]:
        """A moment for a block, in which its snapshot can be imported.

        :raises Outage: the stream does not come up to it, other sessions have locks on the tables, or one of these was
            dropped or has another key since the verification began.
        """
        self._streaming.catch_up()
        holder = SnapshotExporter(self._pipeline.postgres)
        try:
            tables = [pinned.table for pinned in self._wanted.values()]
            held = holder.open(self._named(tables), oldest_xid=0, timeout=self._pipeline.create_slot_timeout)
            found = self._checked(holder.load(list(self._wanted), TableMapping.of(self._pipeline)))
            # an idle database writes no WAL beyond L: this does, and the stream passes it
            holder.wait_flushed(held.insert_lsn, timeout=self._pipeline.outage_timeout or 60.0)
            self._wait_reached(held.insert_lsn, holder)
            ends = self._admin.all_ends({pinned.topic: pinned.partitions for pinned in self._wanted.values()})
            # after the ends: no record below them has a later position
            last = end_of_wal(self._connection)
            known = PipelineState(dict(self._state.values))
            first = {oid: boundary.insert_lsn for oid, boundary in known.boundaries.items()}
            ids = {pinned.topic: pinned.topic_id for pinned in self._wanted.values()}
            starts = {topic: known.start(topic, ids[topic]) or [0] * len(of) for topic, of in ends.items()}
            yield Moment(held, found, ends, last, first, self._truncated(held.insert_lsn, known), starts), holder
        finally:
            holder.close()

    def _named(self, tables: Sequence[SourceTable]) -> list[SourceTable]:
        """The tables by today's names."""
        found = catalog.load(self._connection, [t.oid for t in tables], TableMapping.of(self._pipeline))
        return list(self._checked(found).values())

    def _checked(self, tables: Sequence[SourceTable]) -> dict[int, SourceTable]:
        """The tables by oid, with the keys and the row filters that their topics have.

        :raises Outage: one cannot be compared any more; when the verification began, it could.
        """
        found = {table.oid: table for table in tables}
        for oid, pinned in self._wanted.items():
            if oid not in found:
                raise Outage(f"Table {pinned.table.qualified} was dropped while it was verified.", "Verify again.")
            try:
                as_before = pinned.check_key(found[oid])
            except Refused as refused:
                raise Outage(f"While it was verified: {refused.what}", f"Verify again. {refused.remedy}") from refused
            found[oid] = replace(as_before, where=pinned.table.where, filtered=pinned.table.filtered)
        return found

    def _wait_reached(self, lsn: int, holder: SnapshotExporter) -> None:
        """Wait until the stream has published everything before L.

        :raises Outage: it has not in time.
        """
        deadline = time.monotonic() + self._pipeline.verify_timeout
        watch = self._watch(holder)
        while True:
            self._state.poll(0.2)
            position = PipelineState(dict(self._state.values)).position
            if position is not None and position.lsn >= lsn:
                return
            check_stopped()
            watch.look()
            self._streaming.look()
            if time.monotonic() > deadline:
                raise self._behind(lsn, position)

    def _behind(self, lsn: int, position: Position | None) -> Outage:
        found = slot.state(self._connection, self._pipeline.slot)
        where = f"it is at {position}" if position is not None else "it has published nothing yet"
        what = (
            f"The stream of slot {self._pipeline.slot!r} has not come to {format_lsn(lsn)} within "
            f"{self._pipeline.verify_timeout:.0f} s"
        )
        if found is None or found.active_pid is None:
            return Outage(
                f"{what}: {where}, and no stream reads from the slot.",
                "Start the stream, or verify while it runs; its last error is in 'bottledwater status'.",
            )
        return Outage(
            f"{what}: {where}, {found.lag:,} bytes behind.",
            "Verify again when it has caught up ('bottledwater status' shows its lag), or raise verify_timeout.",
        )

    def _truncated(self, before: int, known: PipelineState) -> dict[str, str]:
        """By topic, the position of the last TRUNCATE before L, from the events topic. Positions of another server, or
        of before the slot was made, say nothing here."""
        events, _ = TableMapping.of(self._pipeline).service_topics
        described = self._admin.describe([events])
        if events not in described:
            return {}
        ends = self._admin.ends(events, described[events].partitions)
        name = identify(self._connection).pipeline(self._pipeline.slot)
        found: dict[str, str] = {}
        start, backoff = known.start(events, described[events].id) or (), Backoff(self._pipeline.outage_timeout)
        for block in topic_reader.blocks(self._pipeline.kafka, events, ends, backoff, start=start):
            check_stopped()
            for i in range(len(block)):
                event = json.loads(block.value(i) or b"{}")
                if not of_source(event.get("pipeline", name), name):
                    continue
                if event.get("event") == "truncate" and Position.parse(event["pos"]).lsn < before:
                    for topic in event["topics"]:
                        found[topic] = max(found.get(topic, ""), event["pos"])
        return found

    def settle(self, oids: Sequence[int]) -> bool:
        """Wait until every transaction that writes to the tables now has ended, so that the next snapshot shows all
        that the topics have now: a commit is in the WAL, and perhaps published, a moment before other sessions see it
        (with a synchronous standby that is away, a long moment). Returns whether all have ended in time."""
        writing = locks.writing(self._connection, oids).values()
        return not locks.wait_for_ends(self._connection, set().union(*writing), timeout=_SETTLE)

    def writers(self, oids: Sequence[int]) -> str:
        """The sessions that write to the tables, for a message."""
        return locks.writers(self._connection, oids)

    def work(self, holder: SnapshotExporter, do: Callable[[], T]) -> T:
        """Do something under the snapshot, while its holder and the sessions that wait for its locks are watched.

        :raises Outage: the holder's session was lost, or its locks have blocked others for too long.
        :raises StopRequested: the job is to end.
        """
        return self._watch(holder).work(do)

    def _watch(self, holder: SnapshotExporter) -> HolderWatch:
        limit = self._pipeline.lock_queue_limit
        return HolderWatch(holder, limit, self._stopped, what="The verification", again="Verify again,")


def check_complete(known: PipelineState, wanted: Mapping[int, PinnedTable], attached: Collection[int]) -> None:
    """Check that the snapshot of the tables is complete: before that, topics lack rows.

    :param attached: the oids of tables whose rows the stream is going to read: partitions were attached below them, or
        they were detached, or have another row filter now.
    :raises StateError: it is not.
    :raises Outage: rows of a table that was added since, say, are still being read.
    """
    if missing := [pinned.table.qualified for oid, pinned in wanted.items() if oid not in known.completed]:
        raise StateError(
            f"The snapshot of {', '.join(missing[:5])} is not complete: rows are still to come.",
            "Let the snapshot end, and the stream run, then verify.",
        )
    reading = {oid for progress in known.lives.values() if progress.unfinished for oid in progress.tables}.union(
        attached
    )
    if incomplete := [pinned.table.qualified for oid, pinned in wanted.items() if oid in reading]:
        raise Outage(
            f"Rows of {', '.join(incomplete[:5])} are still to come, by a live snapshot: it reads tables or partitions "
            "that were added or detached, or taken up again with another key or row filter.",
            "Verify again when it has finished ('bottledwater snapshots' shows how far it is).",
        )
