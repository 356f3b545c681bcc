"""The stream's source: a replication connection and a cutter, reconnecting at the cutter's position."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable

from airflow_bottledwater.backoff import Backoff
from airflow_bottledwater.encoding import avro
from airflow_bottledwater.errors import CredentialsRefused, Refused, SchemaRefused, SlotError, SlotInUse, StaleBatch
from airflow_bottledwater.kafka.registry import Registry
from airflow_bottledwater.model.lsn import Position, parse_lsn
from airflow_bottledwater.model.relation import Column, Table
from airflow_bottledwater.model.version import Version
from airflow_bottledwater.policy import Act, act
from airflow_bottledwater.postgres import catalog, pgoutput, publication, slot
from airflow_bottledwater.postgres.column_types import Declared, describe
from airflow_bottledwater.postgres.connect import end_of_wal, identify, session
from airflow_bottledwater.postgres.replication import ReplicationStream
from airflow_bottledwater.publish.batch import Batch
from airflow_bottledwater.settings import Pipeline
from airflow_bottledwater.state.identity import check_slot
from airflow_bottledwater.state.records import PinnedTable, PipelineState
from airflow_bottledwater.stream import assembler
from airflow_bottledwater.stream.assembler import Cutter

log = logging.getLogger(__name__)


class Resolver:
    """Makes relation versions from Relation messages: asks the catalog for what the message does not say, and the registry
    for ids."""

    def __init__(self, pipeline: Pipeline, pinned: dict[int, PinnedTable]) -> None:
        self._pipeline = pipeline
        self._pinned = pinned
        self._registry = Registry(pipeline.registry) if pipeline.output_format == "avro" else None

    def __call__(self, message: pgoutput.RelationMessage, current: Version | None) -> Version:
        """:raises Refused: a table that is not in the pipeline, or whose key changed."""
        pinned = self._pinned.get(message.oid)
        if pinned is None:
            raise Refused(
                f"Table {message.schema}.{message.name} was added to the publication behind our back.",
                "Stop the stream, and start again with the table in the settings: slot and snapshot tasks (or the command) take it in.",
            )
        known = current.table if current else pinned.table
        table = self._table(message, pinned, {c.name: c for c in known.columns})
        # with the full old row as identity the key is today's, of the catalog; else that of changes that follow
        pinned.check_key(table, written=message.identity != "f")
        if (table.columns, table.name) == (known.columns, known.name):
            return current or pinned.version
        log.warning("The columns of %s changed; its records have a new schema.", table.qualified)
        value_schema, refused = 0, ""
        try:
            if self._registry is not None:
                value_schema = self._registry.register(f"{pinned.topic}-value", avro.value_schema(table))
        except SchemaRefused as error:
            # on_error decides of each of its rows
            log.error("%s", error)
            refused = str(error)
        # a renamed table stays in its topic: consumers and keys are there
        return Version(table, pinned.topic, pinned.key_schema, value_schema, refused)

    def _table(self, message: pgoutput.RelationMessage, pinned: PinnedTable, known: dict[str, Column]) -> Table:
        with session(self._pipeline.postgres, "Reading the catalog", application="bottledwater catalog") as connection:
            tables = catalog.load(connection, [message.oid], forms=self._pipeline.forms)
            today = {c.name: c for t in tables for c in t.columns}
            declared = []
            for column in message.columns:
                row = connection.execute("SELECT format_type(%s, %s)", (column.type_oid, column.typmod)).fetchone()
                # the message does not say how deep an array is
                same = [
                    c[column.name].type
                    for c in (today, known)
                    if column.name in c and c[column.name].type.oid == column.type_oid
                ]
                depth = same[0].dimensions if same else 0
                declared.append(Declared(column.type_oid, column.typmod, depth, row[0] if row else ""))
            try:
                kinds = describe(connection, declared, forms=self._pipeline.forms)
            except LookupError as error:
                raise Refused(
                    f"A column of {message.schema}.{message.name} has a type that does not exist any more ({error}).",
                    "Its changes cannot be read; drop the slot and start again with a snapshot.",
                ) from None
        columns = [
            Column(
                c.name,
                kind,
                today[c.name].comment if c.name in today else None,
                c.name in today and today[c.name].required,
            )
            for c, kind in zip(message.columns, kinds, strict=True)
        ]
        flagged = {c.name for c in message.columns if c.key}
        # the message flags the key's columns but does not order them, and under FULL flags all: then the catalog says
        key = pinned.table.key
        if message.identity in "di" and flagged != set(key):
            key = tuple(c.name for c in message.columns if c.key)
        elif message.identity == "f" and tables:
            key = tables[0].key
        return Table(
            message.oid, message.schema, message.name, message.identity, key, tuple(columns), 0, pinned.table.comment
        )


class ChangeSource:
    """Batches from the slot, from P on, across reconnections.

    :param position: P; A where nothing was streamed yet.
    :param reached: gives P as it is in the state; raises TakenOver where another job has claimed the slot. Asked before a slot is
        found unfit.
    """

    def __init__(
        self,
        pipeline: Pipeline,
        state: PipelineState,
        position: Position,
        backoff: Backoff,
        reached: Callable[[], Position | None] = lambda: None,
    ) -> None:
        assembler.warm_up()  # before the server sends
        record = state.slot
        assert record is not None
        self._pipeline, self._record, self._backoff = pipeline, record, backoff
        self._reached = reached
        self._tables = state.tables
        self._cutter = Cutter(
            position,
            state.boundaries,
            Resolver(pipeline, self._tables),
            limit=pipeline.batch_bytes,
            most=pipeline.max_transaction_bytes,
        )
        self._stream: ReplicationStream | None = None
        self._worked = False
        self._confirmed = position
        self._last_empty = time.monotonic()

    @property
    def position(self) -> Position:
        """Up to where batches were cut."""
        return self._cutter.position

    @property
    def statistics(self) -> dict[str, int]:
        """See :attr:`Cutter.statistics`."""
        return self._cutter.statistics

    @property
    def skipped_by_table(self) -> dict[str, int]:
        """See :attr:`Cutter.skipped_by_table`."""
        return self._cutter.skipped_by_table

    def flush_target(self) -> int:
        """``pg_current_wal_flush_lsn()``, where a bounded run ends."""
        with session(
            self._pipeline.postgres, "Reading the WAL position", application="bottledwater bounded run"
        ) as connection:
            row = connection.execute("SELECT pg_current_wal_flush_lsn()::text").fetchone()
        assert row is not None
        return parse_lsn(row[0])

    def acknowledge(self, position: Position) -> None:
        """P is committed in Kafka: PostgreSQL may forget what lies before (end LSNs and keepalives only)."""
        if position.ordinal == 0 and position > self._confirmed:
            self._confirmed = position
            if self._stream is not None:
                self._stream.acknowledge(position.lsn)

    def next(self, timeout: float, *, hurry: bool = False) -> Batch | None:
        """The next batch; waits at most ``timeout`` seconds for one to begin.

        :param hurry: also an empty batch that only moves the position, and ask the server where it is.
        :raises BottledWaterError: what does not pass by waiting.
        """
        deadline = time.monotonic() + timeout
        while True:
            try:
                batch = self._next(deadline, hurry)
                self._backoff.over() if batch is not None else None
                return batch
            except Exception as error:
                if act(error) is not Act.WAIT and not (self._worked and isinstance(error, CredentialsRefused)):
                    raise
                self._disconnect()
                self._backoff.wait(error)

    def _next(self, deadline: float, hurry: bool) -> Batch | None:
        stream = self._stream or self._connect()
        if hurry:
            stream.request_reply()
        while True:
            batch = self._cutter.cut()
            if batch is not None:
                return batch
            # at the tail, do not wait for more where something is ready
            block = stream.take(0)
            if block is None:
                interval = self._pipeline.keepalive_interval
                batch = self._cutter.flush(empty=hurry or time.monotonic() - self._last_empty >= interval)
                if batch is not None:
                    self._last_empty = time.monotonic()
                    return batch
                left = deadline - time.monotonic()
                if left <= 0:
                    return None
                block = stream.take(left)
            if block is not None:
                self._cutter.add(block)

    def _connect(self) -> ReplicationStream:
        with session(self._pipeline.postgres, "Checking the slot", application="bottledwater slot check") as connection:
            cluster = identify(connection)
            found = slot.state(connection, self._record.name)
            try:
                check_slot(found, self._record, cluster, self._cutter.position, end_of_wal(connection))
            except SlotError as error:
                # a successor may have moved or dropped it; that is no damage, and nothing to advise against
                reached = self._reached()
                if reached is not None and reached > self._cutter.position:
                    raise StaleBatch(
                        f"Another attempt of this job has published up to {reached}; this one was at {self._cutter.position}."
                    ) from error
                raise
            if found is not None and found.active_pid is not None:
                raise SlotInUse(f"Slot {found.name!r} is in use by process {found.active_pid}.", "Stop the other job.")
        self._cutter.restart()
        self._stream = ReplicationStream(
            self._pipeline.postgres,
            self._record.name,
            publication.names(self._pipeline.publication_name),
            self._cutter.position.lsn,
            buffer_bytes=self._pipeline.buffer_bytes,
        )
        self._worked = True
        self._stream.acknowledge(self._confirmed.lsn if self._confirmed.ordinal == 0 else 0)
        return self._stream

    def _disconnect(self) -> None:
        if self._stream is not None:
            self._stream.close()
            self._stream = None

    def close(self) -> None:
        """Confirm what was acknowledged and leave the slot."""
        self._disconnect()
