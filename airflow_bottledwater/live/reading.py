"""Reads the rows of a live snapshot in a thread of its own, chunk by chunk, each under a snapshot of its own."""

from __future__ import annotations

import contextlib
import logging
import queue
import threading
import time
from collections.abc import Iterator, Sequence
from dataclasses import replace

import psycopg
from psycopg import sql

from airflow_bottledwater.backoff import Backoff, pause, stoppable
from airflow_bottledwater.encoding.mapping import TableMapping
from airflow_bottledwater.encoding.program import select_list
from airflow_bottledwater.errors import CredentialsRefused, RecordError, Refused, StopRequested
from airflow_bottledwater.kafka.key_table import RANGES
from airflow_bottledwater.kafka.topic_reader import RecordBlock
from airflow_bottledwater.kafka.topic_reader import blocks as topic_blocks
from airflow_bottledwater.kafka.topics import Topics
from airflow_bottledwater.live.chunks import BlockRange, LiveChunk, Piece, TooLarge
from airflow_bottledwater.live.keys import between, bound, place
from airflow_bottledwater.live.remaining import BLOCK, SWEEPING, RemainingSize
from airflow_bottledwater.live.slices import RowLocations, find
from airflow_bottledwater.model.boundary import Snapshot
from airflow_bottledwater.model.relation import SourceTable
from airflow_bottledwater.model.version import Version
from airflow_bottledwater.pipeline.settings import Settings
from airflow_bottledwater.policy import ErrorAction, act
from airflow_bottledwater.postgres import catalog, copy, large_rows, partitions, row_filter, slot
from airflow_bottledwater.postgres.connect import Connection, Session, own
from airflow_bottledwater.postgres.large_rows import LargeRow
from airflow_bottledwater.postgres.partitions import KnownPartition
from airflow_bottledwater.postgres.receive import MessageBlock
from airflow_bottledwater.postgres.server import wait_flushed
from airflow_bottledwater.postgres.snapshot import LAST_BLOCK, OwnSnapshot, begin_reading, copy_query
from airflow_bottledwater.postgres.snapshot import blocks as block_range
from airflow_bottledwater.publish import hashed
from airflow_bottledwater.snapshot.keys import LOCK, find_keys
from airflow_bottledwater.snapshot.latest import LatestRecords
from airflow_bottledwater.state.control_records import SnapshotRequest
from airflow_bottledwater.state.identity import connect_source
from airflow_bottledwater.state.options import exposed_now
from airflow_bottledwater.state.pipeline_state import PipelineState
from airflow_bottledwater.state.records import LiveProgress, Partitions
from airflow_bottledwater.state.schemas import register_value, wait_for

log = logging.getLogger(__name__)

#: chunks that wait to be published: one is read while another one waits for the stream
_AHEAD = 2
#: blocks of the first chunk, and of a chunk at most: a slice may have no rows for long
_FIRST_BLOCKS, _MOST_BLOCKS = 64, 1 << 17
#: the same for a chunk by key, which counts so many rows as a block
_ROWS_OF_A_BLOCK, _MOST_BLOCKS_BY_KEY = 64, 1 << 10
#: bytes of a chunk's rows at most, unless they are in a single block
_LARGEST = 8 << 20
#: blocks of a chunk that are not worth dividing: most of the time is then the commit's, whatever it takes
_LEAST_BLOCKS = 32


class LiveReader(threading.Thread):
    """Reads a request's rows from a place on. It must be made after the stream's changes are being noted.

    :param progress: where to begin.
    :param known: the pipeline's state, as it begins.
    :ivar later: :attr:`~airflow_bottledwater.state.pipeline_state.PipelineState.later` as it is now. The thread that
        owns the state sets it: the stream publishes rows with definitions of its own meanwhile.
    :ivar chunks: what is read, in order; the last one's ``after`` says that all tables are done.
    :ivar error: why it has ended early.
    :ivar extent: how much there is to be read.
    :ivar waits_for: what it waits for, as text; empty while it reads.
    :ivar stepped: whether it has read something.
    """

    def __init__(
        self,
        pipeline: Settings,
        request: SnapshotRequest,
        progress: LiveProgress,
        known: PipelineState,
    ) -> None:
        super().__init__(name="live snapshot", daemon=True)
        self._pipeline, self._request, self._at = pipeline, request, progress
        self._tables, self.later, self._record = known.tables, known.later, known.slot
        self.chunks: queue.Queue[LiveChunk] = queue.Queue(_AHEAD)
        self.error: BaseException | None = None
        self.waits_for, self.stepped = "", False
        self.extent = RemainingSize()
        self._ended = threading.Event()
        self._blocks = _FIRST_BLOCKS
        self._due = time.monotonic()
        self._versions: dict[int, Version] = {}
        self._connection: Session | None = None
        self._oldest_xid = 0
        #: whether a row was met that PostgreSQL cannot send: the chunk is read again without it
        self._wary = False
        #: whether PostgreSQL takes the request's condition
        self._checked = False
        #: where the rows of a slice are: of which table or partition, with which file
        self._found: tuple[int, int, RowLocations | None] | None = None
        self.start()

    def close(self) -> None:
        """Ask the thread to end, without waiting for it."""
        self._ended.set()

    def took(self, seconds: float, wanted: float) -> None:
        """Take note of how long the last chunk held up the stream, and for how long one should: the next ones' size
        follows in small steps."""
        factor = min(1.1, max(0.7, wanted / seconds))
        self._blocks = int(min(_MOST_BLOCKS, max(min(self._blocks, _LEAST_BLOCKS), self._blocks * factor + 1)))

    # ------------------------------------------------------------------ the thread
    def run(self) -> None:
        """Read until everything is read, or something is wrong for good."""
        backoff = Backoff(None, self._ended, self._tell)
        try:
            with stoppable(self._ended):
                while self._at.done < len(self._at.tables):
                    try:
                        self._step()
                        backoff.over()
                        self.waits_for, self.stepped = "", True
                    except StopRequested:
                        return
                    except Exception as error:
                        found = own(error, "Reading rows")
                        self._disconnect()
                        if act(found) is not ErrorAction.WAIT and not isinstance(found, CredentialsRefused):
                            raise found from error
                        backoff.wait(found)
        except StopRequested:
            return
        except BaseException as error:
            self.error = error
        finally:
            self._disconnect()

    def _tell(self, what: str) -> None:
        self.waits_for = what
        log.info("A live snapshot waits: %s", what)

    def _step(self) -> None:
        """Read the next chunk, and hand it over."""
        connection = self._connect()
        oid = self._at.tables[self._at.done]
        if self._at.required and oid not in catalog.names(connection, [oid]):
            return self._pass_over(connection, oid)
        self.extent.measure(connection, self._at.tables[self._at.done :])
        if self._at.filenode == SWEEPING:
            return self._sweep(connection, oid)
        found = _only(self._begin(connection, oid), self._at.parts)
        self._check_condition(connection, found.table)
        version = self._version(found)
        known = _left_behind(connection, self._at, found)
        self.extent.note(found)
        piece = self._by_key(connection, found) if self._request.by_key else self._by_blocks(connection, found)
        large = self._large(connection, version, piece) if self._wary else []
        try:
            blocks = list(self._read(connection, version, piece))
        except TooLarge:
            self._disconnect()
            self._blocks = max(1, min(self._blocks, piece.blocks) // 4)
            return
        except psycopg.Error as error:
            if self._wary or not large_rows.too_large(error):
                raise large_rows.unread(error, "Reading rows", version.table) from error
            self._disconnect()
            self._wary = True
            return
        self._wary = False
        self._flushed(connection, found)
        connection.execute("COMMIT")
        self._at = piece.after
        if piece.whole:
            filenode = SWEEPING if self._request.sweep else 0
            read = partitions.remembered(found.partitions)
            # if a sweep is still to come, the topic has behind it what these partitions have
            swept = Partitions(read) if filenode and found.table.partitioned else None
            done = self._at.done + (not filenode)
            self._at = replace(self._at.at_start(), done=done, filenode=filenode, found=swept)
            if self._at.parts:
                known = {**read, **known}
        if blocks or piece.whole or known or large:
            chunk = LiveChunk(version, found.snapshot, found.insert_lsn, blocks, self._at, [], known or None, large)
            self._hand_over(chunk)
        else:
            self._blocks = min(_MOST_BLOCKS, 2 * self._blocks)
        self._pace(blocks)

    def _pass_over(self, connection: Connection, oid: int) -> None:
        """Go on behind a table that was dropped before all of its rows were read: the topics of the others lack rows
        until they are read."""
        log.warning("%s was dropped: its rows are not read again.", self._tables[oid].table.qualified)
        ((now,),) = connection.execute("SELECT pg_current_snapshot()::text").fetchall()
        self._at = replace(self._at.at_start(), done=self._at.done + 1)
        self._hand_over(LiveChunk(self._tables[oid].version, Snapshot.parse(now), 0, [], self._at))

    def _flushed(self, connection: Connection, found: OwnSnapshot) -> None:
        """Wait, on the connection that reads, which a crash ends, until what the snapshot shows is on disk, and cannot
        be lost."""
        wait_flushed(connection, self._pipeline.postgres, found.insert_lsn, timeout=self._pipeline.outage_timeout)

    def _by_blocks(self, connection: Connection, found: OwnSnapshot) -> Piece:
        """What is read next, in the order of the blocks of the table, or of one of its partitions after the other:
        whichever is not read as it is now. Of partitions that are small, several are read at once, since each snapshot
        of a table locks all of them."""
        at, now, began = self._at, found.files(), time.monotonic()
        # those that are gone need not be remembered
        read = {oid: file for oid, file in at.read.items() if now.get(oid) == file}
        unread = [part for part in found.parts if part.oid not in read]
        unread.sort(key=lambda part: part.oid != at.part)
        # the publisher's thread lowers it while this one reads
        ranges, blocks, upto, most = list[BlockRange](), 0, (0, 0, 0), self._blocks
        for part in unread:
            first = at.upto if (at.part, at.filenode) == (part.oid, now[part.oid]) else 0
            if not first and (part.oid == at.part or part.oid in at.read):
                log.info("%s was rewritten, or attached again: it is read again from its start.", part.qualified)
            last, places = self._next(connection, found, part, now[part.oid], first, most - blocks)
            # it may end before, since VACUUM cuts empty blocks off
            blocks += max(0, last - first)
            if places is None or len(places.tids):
                where = places.condition(connection) if places is not None else None
                ranges.append(BlockRange(part, first, last, where))
            if last < part.pages:
                upto = part.oid, now[part.oid], last
                break
            read[part.oid] = now[part.oid]
            # the places of a slice are read with settings of their own; and others may wait for the table
            if blocks >= most or (ranges and self._request.where) or time.monotonic() - began > LOCK:
                break
        after = replace(at, part=upto[0], filenode=upto[1], upto=upto[2], read=read, bytes=at.bytes + blocks * BLOCK)
        return Piece(ranges, blocks, after, len(read) == len(found.parts))

    def _next(
        self, connection: Connection, snapshot: OwnSnapshot, part: SourceTable, file: int, first: int, blocks: int
    ) -> tuple[int, RowLocations | None]:
        """The block behind the last one of the next range, and the places of its rows, if they are known.

        :param file: the number of the part's file, see :meth:`OwnSnapshot.files`.
        :param blocks: how many it may have.
        """
        behind = max(part.pages, 1)
        if self._request.where:
            if self._found is None or self._found[:2] != (part.oid, file):
                condition = sql.SQL(self._request.where)  # type: ignore[arg-type]
                places = find(connection, part, condition, idle=self._check)
                # they hold as long as what they were found by is not undone by a crash
                self._flushed(connection, snapshot)
                self._found = (part.oid, file, places)
            if (found := self._found[2]) is not None:
                places, last = found.take(first, blocks)
                return max(behind, first) if last is None else last, places
        return min(first + blocks, behind), None

    def _by_key(self, connection: Connection, found: OwnSnapshot) -> Piece:
        """What is read next, in the order of the table's keys."""
        table, at, blocks = found.table, self._at, min(self._blocks, _MOST_BLOCKS_BY_KEY)
        now = place(connection, table, found.partitions)
        if at.key and at.filenode != now:
            log.info("%s has rows in other places, or another order: it is read again from its start.", table.qualified)
            at = replace(at, key=())
        upto = bound(connection, table, at.key, blocks * _ROWS_OF_A_BLOCK)
        # how much of the table this is cannot be told before its end
        size = at.bytes if upto else at.bytes + table.pages * BLOCK
        after = replace(at, filenode=now, key=upto or (), bytes=size)
        rows = BlockRange(table, 0, LAST_BLOCK, between(table, at.key, upto or ()))
        return Piece([rows], blocks, after, upto is None)

    def _sweep(self, connection: Connection, oid: int) -> None:
        """Find the keys of the topic that the table does not have, and hand them over."""
        topic = self._tables[oid].topic
        low = 0
        while low < RANGES:
            while self.chunks.unfinished_tasks:
                pause(0.02)  # until then, what was published is only noted as far as it is newer than these chunks
            reached = Topics(self._pipeline.kafka).ends(topic, self._tables[oid].partitions)
            # before the table is locked: what is read of the topic is the same at any time
            latest = LatestRecords(sum(reached), reached, low)
            for records in self._topic(topic, reached):
                latest.note(records)
            found = self._find_keys(connection, oid, latest)
            version = self._version(found)
            self._flushed(connection, found)
            connection.execute("COMMIT")
            for records in self._topic(topic, reached):
                if keys := latest.stale_keys(records):
                    self._hand_over(LiveChunk(version, found.snapshot, found.insert_lsn, [], self._at, keys))
            low = latest.high
            if low < RANGES:
                # what this snapshot shows need not be noted any more: the topic has it when it is read again
                self._hand_over(LiveChunk(version, found.snapshot, found.insert_lsn, [], self._at))
        # unless a condition has left rows out, the topic has now what these partitions have
        known = self._at.found.known if self._at.found is not None and not self._request.where else None
        self._at = replace(self._at.at_start(), done=self._at.done + 1)
        self._hand_over(LiveChunk(version, found.snapshot, found.insert_lsn, [], self._at, partitions=known))

    def _find_keys(self, connection: Connection, oid: int, latest: LatestRecords) -> OwnSnapshot:
        """See :func:`~airflow_bottledwater.snapshot.keys.find_keys`: a key that was changed since is not swept."""

        def begin() -> OwnSnapshot:
            found = self._begin(connection, oid)
            self.waits_for = ""
            return found

        backoff = Backoff(None, self._ended, self._tell)
        return find_keys(self._pipeline, connection, latest, begin, self._version, backoff=backoff, idle=self._check)

    def _topic(self, topic: str, ends: Sequence[int]) -> Iterator[RecordBlock]:
        """The records of a topic up to these offsets."""
        for records in topic_blocks(self._pipeline.kafka, topic, ends, Backoff(None, self._ended, self._tell)):
            self._check()
            yield records

    def _begin(self, connection: Connection, oid: int) -> OwnSnapshot:
        """Begin a transaction whose snapshot shows everything that was published before changes were noted.

        A transaction whose changes were published before may still be in progress for others (it waits for a
        synchronous standby, say); X0 is taken afterwards, so that it is above the id of each of them.
        """
        if not self._oldest_xid:
            self._oldest_xid = slot.fresh_xid(connection)
        while True:
            found = begin_reading(connection, oid, TableMapping.of(self._pipeline), lock_timeout=LOCK)
            if found.snapshot.xmin >= self._oldest_xid:
                return found
            connection.execute("ROLLBACK")
            who = slot.blockers(connection, below=self._oldest_xid)
            self.waits_for = (
                f"the end of transactions that are older than it: {'; '.join(who[:3]) or 'none that this role may see'}"
            )
            pause(0.1)

    def _version(self, found: OwnSnapshot) -> Version:
        """The relation version of the rows. A changed table has a new schema, which is registered here.

        :raises Outage: the registry has lost the table's schemas.
        :raises Refused: the table's key changed; or it has another name, or a column has, by which less of it is
            hidden.
        """
        pinned = self._tables[found.table.oid]
        mapping, table = TableMapping.of(self._pipeline), found.table
        if exposed := exposed_now(mapping, pinned.table, table):
            raise Refused(exposed)
        if found.table.oid not in self._versions and self._pipeline.record_format.uses_registry:
            wait_for(self._pipeline, pinned)
        table = pinned.check_key(table)
        known = self._versions.get(table.oid, pinned.version)
        if catalog.definition(table) == catalog.definition(known.table):
            version = replace(known, table=table)
        else:
            published = pinned.versions(self.later.get(table.oid, {}))
            value_schema = register_value(self._pipeline, pinned.topic, table, published)
            version = Version(table, pinned.topic, pinned.key_schema, value_schema)
        self._versions[table.oid] = version
        return version

    def _read(self, connection: Connection, version: Version, piece: Piece) -> Iterator[MessageBlock]:
        size = 0
        blocks = (rows for each in piece.ranges for rows in self._copied(connection, version, each))
        for block in hashed.rows(self._pipeline, version.table, blocks):
            used = int(block.offsets[-1])
            size += used
            if size > _LARGEST and min(self._blocks, piece.blocks) > 1:
                raise TooLarge
            yield MessageBlock(block.data[:used].copy(), block.offsets.copy())

    def _copied(self, connection: Connection, version: Version, rows: BlockRange) -> Iterator[MessageBlock]:
        """The rows of a range as PostgreSQL sends them."""
        conditions = self._conditions() + ([large_rows.sendable(rows.source)] if self._wary else [])
        condition = sql.SQL("\n) AND (\n").join(conditions) if conditions else None
        columns = select_list(version.table)
        query = copy_query(rows.source, columns, rows.first, rows.last, condition, places=rows.places)
        return copy.rows(connection, query, idle=self._check)

    def _check_condition(self, connection: Connection, table: SourceTable) -> None:
        """Check the condition as it is now: whoever writes to the shared topic may have changed it since the request
        was begun, and what follows takes whatever it says."""
        if self._request.where and not self._checked:
            row_filter.check_alone(connection, sql.Identifier(table.schema, table.name), self._request.where)
            self._checked = True

    def _conditions(self) -> list[sql.Composable]:
        return [sql.SQL(self._request.where)] if self._request.where else []  # type: ignore[arg-type]

    def _large(self, connection: Connection, version: Version, piece: Piece) -> list[LargeRow]:
        """The rows of a chunk that PostgreSQL cannot send, in the snapshot in which the others are read.

        :raises RecordError: ``on_error`` is exit.
        """
        found = list[LargeRow]()
        for each in piece.ranges:
            within = [each.places or block_range(each.first, each.last), *self._conditions()]
            where = sql.SQL("({})").format(sql.SQL("\n) AND (\n").join(within))
            found += large_rows.large_rows(connection, each.source, where=where)
        if found and TableMapping.of(self._pipeline).stops(version.table):
            raise RecordError(
                f"A row of {version.table.qualified} cannot be published to topic {version.topic!r}: "
                f"{found[0].unsendable}. The job's log names it.",
                "Make the row smaller or delete it, and ask again; or go on with on_error = log, which writes its key "
                "to the dead-letter topic and leaves it out.",
                topic=version.topic,
                row=str(found[0]),
            )
        return found

    def _check(self) -> None:
        if self._ended.is_set():
            raise StopRequested("The live snapshot is to end.")

    def _hand_over(self, chunk: LiveChunk) -> None:
        while True:
            self._check()
            with contextlib.suppress(queue.Full):
                return self.chunks.put(chunk, timeout=0.2)

    def _pace(self, blocks: list[MessageBlock]) -> None:
        """Wait as long as the request's limits demand."""
        rows, size = sum(block.count for block in blocks), sum(len(block.data) for block in blocks)
        request = self._request
        needed = max(
            rows / request.rows_per_second if request.rows_per_second else 0.0,
            size / request.bytes_per_second if request.bytes_per_second else 0.0,
        )
        if needed > 1.0:
            self._blocks = max(1, int(self._blocks / needed))
        self._due = max(self._due, time.monotonic() - 1.0) + needed
        if (rest := self._due - time.monotonic()) > 0:
            pause(rest)

    # ------------------------------------------------------------------ its session
    @property
    def session(self) -> int | None:
        """The process id of its session; None while it has none. Any thread may ask."""
        connection = self._connection
        return None if connection is None or connection.closed else connection.pid

    def _connect(self) -> Session:
        if self._connection is None:
            self._connection = connect_source(
                self._pipeline.postgres, self._record, application="bottledwater live snapshot"
            )
        return self._connection

    def _disconnect(self) -> None:
        """End the session; a COPY that is not read to its end can only be ended with it."""
        if self._connection is not None:
            with contextlib.suppress(psycopg.Error):
                self._connection.cancel_safe(timeout=2)
            self._connection.close()
        self._connection = None


def _only(found: OwnSnapshot, oids: tuple[int, ...]) -> OwnSnapshot:
    """What of a table is to be read: these partitions, as far as they still belong to it, or everything."""
    if not oids:
        return found
    return replace(
        found,
        parts=[part for part in found.parts if part.oid in oids],
        partitions=[part for part in found.partitions if part.oid in oids],
    )


def _left_behind(connection: Connection, at: LiveProgress, found: OwnSnapshot) -> dict[int, KnownPartition]:
    """Which of the partitions that are read by themselves may have left rows in the topic that the table does not have
    any more: those that were taken away since their reading began, or that got a new file (by TRUNCATE, say). As known
    partitions that are not there, or have another file, they are told of until a sweep: PostgreSQL sends nothing of it.

    :param found: what :func:`_only` leaves of a snapshot.
    """
    there = {part.oid for part in found.partitions}
    # of several tables, it is not known of which one it was a partition
    gone = [part for part in at.parts if part not in there and len(at.tables) == 1]
    named = catalog.names(connection, gone) if gone else {}
    left = {part: KnownPartition(".".join(named.get(part, ("partition", str(part)))), 0) for part in gone}
    begun, now = {at.part: at.filenode, **at.read} if at.parts else {}, found.files()
    return left | {
        part.oid: KnownPartition(part.qualified, 0, part.attached)
        for part in found.partitions
        if part.leaf and begun.get(part.oid, now[part.oid]) != now[part.oid]
    }
