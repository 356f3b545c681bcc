"""The stream's source: a replication connection and a :class:`TransactionAssembler`; it reconnects at the assembler's
position."""

from __future__ import annotations

import functools
import logging
import math
import time
from collections.abc import Callable, Iterable, Mapping

from airflow_bottledwater.backoff import Backoff
from airflow_bottledwater.encoding.mapping import TableMapping
from airflow_bottledwater.errors import (
    BottledWaterError,
    CredentialsRefused,
    Outage,
    RecordError,
    Refused,
    SlotError,
    SlotInUse,
    StaleBatch,
    TableRefused,
)
from airflow_bottledwater.jobs.log import tell_row
from airflow_bottledwater.model.lsn import Position
from airflow_bottledwater.model.problem import Problem
from airflow_bottledwater.model.relation import SourceTable
from airflow_bottledwater.pipeline.settings import Settings
from airflow_bottledwater.policy import ErrorAction, act
from airflow_bottledwater.postgres import coverage, publication, slot
from airflow_bottledwater.postgres.connect import MessageTooLarge, PublicationMissing, session
from airflow_bottledwater.postgres.large_rows import SENDABLE, large_rows
from airflow_bottledwater.postgres.pgoutput import RelationMessage
from airflow_bottledwater.postgres.replication import ReplicationStream
from airflow_bottledwater.postgres.server import check_primary, end_of_wal, identify, wait_flushed
from airflow_bottledwater.publish.batch import Batch
from airflow_bottledwater.state import claim, held
from airflow_bottledwater.state.identity import check_slot, check_source, via_root
from airflow_bottledwater.state.pipeline_state import PipelineState
from airflow_bottledwater.state.records import Gap
from airflow_bottledwater.stream import assembler
from airflow_bottledwater.stream.assembler import TransactionAssembler
from airflow_bottledwater.stream.ddl import Statements
from airflow_bottledwater.stream.messages import MessageTopics
from airflow_bottledwater.stream.relations import Resolver
from airflow_bottledwater.stream.start import Start

log = logging.getLogger(__name__)

#: seconds that a new session has to last before an outage counts as over, if no batch comes and no transaction has
#: begun to: an idle server sends none
_LASTS = 60.0
#: seconds for which a row is looked for that PostgreSQL cannot send
_LOOK_FOR = 30.0


def open_source(
    pipeline: Settings, start: Start, known: PipelineState, backoff: Backoff, position: Position
) -> ChangeSource:
    """The source of a claimed stream, from a position on.

    :param known: the pipeline's tables.
    """
    reached = functools.partial(claim.reached, pipeline, start.state_topic, start.job)
    return ChangeSource(pipeline, known, position, backoff, reached)


class ChangeSource:
    """Reads batches from the slot, from P on, and reconnects after outages.

    :param position: P; A if nothing was streamed yet.
    :param reached: returns P as it is in the state now, and raises TakenOver if another job has claimed the slot. It is
        called when the slot seems unusable, since another job may be the reason.
    :ivar set_aside: the gaps of the tables whose changes are left out since they cannot be published, by oid. Whoever
        publishes a batch records that before.
    :ivar tell: tells of what is lost and in no table: :meth:`~airflow_bottledwater.state.problems.Problems.tell`.
    :ivar later: returns the definitions with which rows are published by now, see
        :class:`~airflow_bottledwater.stream.relations.Resolver`; those of the given state, unless it is replaced.
    """

    def __init__(
        self,
        pipeline: Settings,
        state: PipelineState,
        position: Position,
        backoff: Backoff,
        reached: Callable[[], Position | None] = lambda: None,
    ) -> None:
        assembler.warm_up()  # before the server sends anything
        record = state.slot
        assert record is not None
        self._pipeline, self._record, self._backoff = pipeline, record, backoff
        self._reached = reached
        self._tables, self._shown = state.tables, state.shown
        self._via_root = via_root(pipeline, state)
        self.later: Callable[[], Mapping[int, Mapping[int, SourceTable]]] = lambda: state.later
        self._resolver = resolver = Resolver(
            pipeline, self._tables, self._mismatch, later=self._later, via_root=self._via_root
        )
        self.set_aside: dict[int, Gap] = {}
        self.tell: Callable[[str, Iterable[Problem]], None] = lambda *_: None
        self._assembler = TransactionAssembler(
            position,
            state.boundaries,
            resolver,
            batch_bytes=pipeline.batch_bytes,
            largest_transaction=pipeline.max_transaction_bytes,
            again=resolver.again,
            unknown=resolver.unknown,
            aside=self._set_aside,
        )
        self._assembler.partition = resolver.check_partition
        if pipeline.sends_messages:
            mapping = TableMapping.of(pipeline)
            self._assembler.take_messages(
                MessageTopics(mapping), Statements(mapping, self._tables, resolver.of_statement)
            )
        self._assembler.leave_out(state.accepted | state.held)
        self._stream: ReplicationStream | None = None
        self._worked, self._connected = False, math.inf
        self._version = 0
        self._confirmed = position
        self._last_empty = time.monotonic()
        #: until then, changes wait for others
        self._gathers = 0.0

    @property
    def position(self) -> Position:
        """The end of the last batch; at first, the position at which the source was made."""
        return self._assembler.position

    @property
    def statistics(self) -> dict[str, int]:
        """See :attr:`TransactionAssembler.statistics`."""
        return self._assembler.statistics

    @property
    def skipped_by_table(self) -> dict[str, int]:
        """See :attr:`TransactionAssembler.skipped_by_table`."""
        return self._assembler.skipped_by_table

    def _later(self) -> Mapping[int, Mapping[int, SourceTable]]:
        return self.later()

    def _set_aside(self, oid: int, why: TableRefused) -> None:
        # nothing that is recorded would tell a look that the column is to be hidden
        unrecorded = oid in self._resolver.unrecorded
        if oid not in self.set_aside or (unrecorded and not self.set_aside[oid].held):
            log.error("%s Its changes are left out until its rows are read again.", why.what)
            gap = Gap(f"lacks changes that could not be published ({why.what})")
            self.set_aside[oid] = held.set_aside("a column", why.what) if unrecorded else gap

    def acknowledge(self, position: Position) -> None:
        """Confirm to PostgreSQL that everything up to P is committed in Kafka, so that it need not keep it. Positions
        inside a transaction are not confirmed."""
        if position.ordinal == 0 and position > self._confirmed:
            self._confirmed = position
            if self._stream is not None:
                self._stream.acknowledge(position.lsn)

    def next(self, timeout: float, *, flush_empty: bool = False) -> Batch | None:
        """The next batch; None if none begins within ``timeout`` seconds. Outages are waited out.

        :param flush_empty: whether to ask the server for its position, and to return an empty batch that only moves the
            position.
        :raises BottledWaterError: an error that does not pass by waiting.
        """
        deadline = time.monotonic() + timeout
        self._resolver.rest()
        while True:
            try:
                batch = self._next(deadline, flush_empty)
                idle = not self._assembler.unfinished and time.monotonic() - self._connected > _LASTS
                if batch is not None or idle:
                    self._backoff.over()
                return batch
            except MessageTooLarge as error:
                self._disconnect()
                # what is whole before it comes first; then the server fails again at the same change
                return self._assembler.flush(empty=False) or self._behind(error)
            except PublicationMissing as error:
                self._disconnect()
                if (batch := self._assembler.flush(empty=False) or self._behind_publications(error)) is not None:
                    return batch
            except Exception as error:
                if act(error) is not ErrorAction.WAIT and not (self._worked and isinstance(error, CredentialsRefused)):
                    raise
                self._disconnect()
                self._backoff.wait(error)

    def _next(self, deadline: float, flush_empty: bool) -> Batch | None:
        stream = self._stream or self._connect()
        if flush_empty:
            stream.request_reply()
        while True:
            batch = self._assembler.cut()
            if batch is not None:
                return batch
            # if nothing more has arrived, return what is ready instead of waiting, unless it is to wait for more
            gathers = 0.0 if flush_empty else self._gathers - time.monotonic()
            block = stream.take(max(0.0, min(gathers, deadline - time.monotonic())))
            if block is None and gathers > 0 and time.monotonic() < self._gathers:
                return None
            if block is None:
                interval = self._pipeline.keepalive_interval
                batch = self._assembler.flush(empty=flush_empty or time.monotonic() - self._last_empty >= interval)
                if batch is not None:
                    self._last_empty = time.monotonic()
                    self._gathers = self._last_empty + self._pipeline.max_delay
                    return batch
                left = deadline - time.monotonic()
                if left <= 0:
                    return None
                block = stream.take(left)
            if block is not None:
                self._resolver.arrived = block.arrived
                self._assembler.add(block)

    def _behind_publications(self, error: PublicationMissing) -> Batch | None:
        """The empty batch behind which there are publications again: PostgreSQL cannot send anything that was committed
        while there was none, also when it exists again. All tables lack that. None if one does not exist yet."""
        names = publication.names(self._pipeline.publication_name)
        try:
            with session(self._pipeline.postgres, "Looking for publications") as connection:
                check_source(connection, self._pipeline.postgres, self._record)
                found = coverage.read(connection, names, [])
                lsn = end_of_wal(connection)
                # a crash could undo what is only in memory, also that the publications exist; P does not go back
                wait_flushed(connection, self._pipeline.postgres, lsn, timeout=self._pipeline.outage_timeout)
        except BottledWaterError as outage:
            if act(outage) is not ErrorAction.WAIT:
                raise
            self._backoff.wait(outage)
            return None
        if missing := sorted(set(names) - found.publications.keys()):
            remedy = "It is made again."
            if not self._pipeline.create_publication:
                tables = [pinned.table for pinned in self._tables.values()]
                made = publication.statements(self._pipeline.publication_name, tables, via_root=self._via_root)
                run = dict(zip(names, made, strict=True))[missing[0]].as_string(None)
                remedy = f"As the tables' owner, run, without what is not there any more: {run};"
            self._backoff.wait(Outage(f"Publication {missing[0]!r} does not exist: {error.what}", remedy))
            return None
        for oid in self._tables:
            self._set_aside(oid, TableRefused(f"Its publication did not exist: {error.what}"))
        if self._pipeline.sends_messages:
            lost = Problem(
                "messages-lost",
                f"Logical messages between {self.position} and {Position(lsn)}",
                f"They are lost, DDL statements among them, since PostgreSQL could not send them: {error.what}",
                "Write those again that are needed. This is told until the stream starts again.",
            )
            log.error("%s", lost)
            # a part of its own: another one that comes later does not replace it
            self.tell(lost.subject, [lost])
        return self._assembler.pass_over(lsn)

    def _mismatch(self, root: int, why: TableRefused) -> None:
        """Leave out the changes of a partitioned table, since those of a partition cannot be read."""
        self._set_aside(root, why)
        self._assembler.leave_out([root])

    def _behind(self, error: MessageTooLarge) -> Batch:
        """The batch that passes a change that PostgreSQL cannot send, if a person has decided that with
        ``skip_position``.

        :raises RecordError: nobody has.
        :raises Refused: it fails outside of any transaction.
        """
        if not self._assembler.unfinished:
            if publication.repeats_invalidations(self._version):
                raise Refused(
                    f"PostgreSQL {self._version // 10000}.{self._version % 10000} fails to decode the WAL of slot "
                    f"{self._record.name!r}, most likely by an error of this release: {error.what}",
                    "Upgrade PostgreSQL to its last minor release, and start the stream again. The slot keeps the "
                    "changes meanwhile.",
                ) from error
            raise error
        position, message = self._assembler.next_place, self._assembler.next_table
        of = f" of {message.schema}.{message.name}" if message is not None else ""
        row = self._large_row(message)
        failure = RecordError(
            f"The change{of} at {position} cannot be sent by PostgreSQL: "
            f"{error.what}{' The log of the job says which row it may be.' if row else ''}",
            "Everything before its transaction is published. PostgreSQL fails at it whenever it is read. Make the row "
            f"smaller or delete it, and start again with skip_position = {position}: the change, and those behind it "
            "in its transaction, are left out. Then take a live snapshot with --sweep of the tables that the "
            "transaction changed.",
            position=str(position),
            row=f"{row}, perhaps" if row else "",
        )
        if str(position) == self._pipeline.skip_position.upper():
            log.error(
                "The change%s at %s, which PostgreSQL cannot send, and those behind it in its transaction are left "
                "out.",
                of, position,
            )  # fmt: skip
            tell_row(log, failure)
            return self._assembler.abandon()
        raise failure

    def _large_row(self, message: RelationMessage | None) -> str:
        """Which row it may be, by today's table; empty if that is not found out."""
        tables = [p.table for p in self._tables.values() if message is None or p.table.oid == message.oid]
        try:
            with session(
                self._pipeline.postgres, "Looking for a large row", application="bottledwater large row"
            ) as found:
                found.execute(f"SET statement_timeout = {int(_LOOK_FOR * 1000)}")
                for table in tables:
                    # an update of a table with REPLICA IDENTITY FULL has the row twice
                    for row in large_rows(found, table, at_least=SENDABLE // 2):
                        return f"{row} of {table.qualified}"
        except BottledWaterError as error:
            log.info("The row was not found: %s", error)
        return ""

    def _connect(self) -> ReplicationStream:
        try:
            return self._open()
        except SlotError as error:
            # a later attempt or job may have moved or dropped the slot, or read from it: that is not an error of the
            # slot, and does not pass by waiting
            reached = self._reached()
            if reached is not None and reached > self._assembler.position:
                raise StaleBatch(
                    f"Another attempt of this job has published up to {reached}; this one was at "
                    f"{self._assembler.position}."
                ) from error
            raise

    def _open(self) -> ReplicationStream:
        with session(self._pipeline.postgres, "Checking the slot", application="bottledwater slot check") as connection:
            check_primary(connection, self._pipeline.postgres)
            cluster = identify(connection)
            self._version = cluster.version
            found = slot.state(connection, self._record.name)
            position, end = self._assembler.position, end_of_wal(connection)
            check_slot(found, self._record, cluster, position, end, shown=self._shown)
            if found is not None and found.active_pid is not None:
                raise SlotInUse(f"Slot {found.name!r} is in use by process {found.active_pid}.", "Stop the other job.")
        self._assembler.restart()
        self._stream = ReplicationStream(
            self._pipeline.postgres,
            self._record.name,
            publication.names(self._pipeline.publication_name),
            self._assembler.position.lsn,
            messages=self._pipeline.sends_messages,
            buffer_bytes=self._pipeline.buffer_bytes,
        )
        self._worked, self._connected = True, time.monotonic()
        self._stream.acknowledge(self._confirmed.lsn if self._confirmed.ordinal == 0 else 0)
        return self._stream

    def _disconnect(self) -> None:
        self._resolver.close()
        if self._stream is not None:
            self._stream.close()
            self._stream = None

    def rest(self) -> None:
        """Give up memory that is not needed while nothing changes; see :meth:`TransactionAssembler.rest`."""
        self._assembler.rest()

    def close(self) -> None:
        """Close the replication connection, which confirms what was acknowledged, and the session with the catalog."""
        self._disconnect()
