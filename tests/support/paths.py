"""The two ways of a row, from a real PostgreSQL to encoded records: the snapshot's COPY and the stream."""

from __future__ import annotations

import time
from dataclasses import dataclass

import numpy as np
from psycopg import sql

from airflow_bottledwater.encoding import kernels, layout, wire
from airflow_bottledwater.encoding.mapping import TableMapping
from airflow_bottledwater.encoding.program import Programs, Target, compile_programs, select_list
from airflow_bottledwater.errors import SlotInUse
from airflow_bottledwater.model.forms import DEFAULT_TYPE_OPTIONS, TypeOptions
from airflow_bottledwater.model.lsn import Position, parse_lsn
from airflow_bottledwater.model.relation import Column, SourceTable
from airflow_bottledwater.model.version import Version
from airflow_bottledwater.pipeline.formats import FORMATS
from airflow_bottledwater.postgres import catalog, copy, pgoutput, slot
from airflow_bottledwater.postgres.column_types import REGS
from airflow_bottledwater.postgres.connect import Connection, connect
from airflow_bottledwater.postgres.receive import MessageBlock
from airflow_bottledwater.postgres.replication import ReplicationStream
from airflow_bottledwater.publish.batch import Batch
from airflow_bottledwater.publish.encode import encode_changes
from airflow_bottledwater.publish.toast import Completed, ToastResolver
from airflow_bottledwater.stream.assembler import TransactionAssembler

KEY_ID, VALUE_ID = 7, 2**31 - 1


@dataclass(frozen=True)
class Made:
    """One record, or the reason why there is none."""

    key: bytes | None = None
    value: bytes | None = None
    op: str = ""
    partition: int = 0
    flags: int = 0
    error: str = ""


def programs_of(table: SourceTable, format: str, *, copied: bool, partitions: int = 5) -> Programs:
    """The programs of a single table."""
    return compile_programs([(table, Target(0, partitions, KEY_ID, VALUE_ID))], FORMATS[format], copied=copied)


def made(row: np.void, data: np.ndarray, op: bool = True) -> Made:  # type: ignore[type-arg]
    """A row of the table of records."""
    data_bytes = memoryview(data)  # type: ignore[arg-type]
    key, key_len, value, value_len = row["key"], row["key_length"], row["value"], row["value_length"]
    return Made(
        bytes(data_bytes[key : key + key_len]) if key_len >= 0 else None,
        bytes(data_bytes[value : value + value_len]) if value_len >= 0 else None,
        chr(row["event"]) if op else "",
        row["partition"] if key_len >= 0 else 0,
        row["flags"] & ((1 << wire.FLAG_XID_SHIFT) - 1) if op else 0,  # without the xid, which no snapshot row has
    )


def encode_block(block: MessageBlock, programs: Programs, *, room: int = 4096) -> list[Made]:
    """COPY rows, encoded into a buffer that is too small at first."""
    found: dict[int, Made] = {}
    output = layout.output(50, 3, room)
    start = 0
    while start < block.count:
        before = start
        start, _, count, failed = kernels.encode_copy(
            block.data, block.offsets, start, programs.program, 0, programs.scratch(), layout.facts(1, 0), output
        )
        for row in output.records[:count]:
            found[row["row"]] = made(row, output.data, op=False)
        for i, code, column, offset in output.errors[:failed].tolist():
            found[i] = Made(error=programs.error(0, code, column, offset))
        if start == before:
            output = layout.output(50, 3, 2 * output.data.size)
    return [found[i] for i in range(block.count)]


def copied(connection: Connection, table: SourceTable, format: str, *, by_id: bool = False) -> list[Made]:
    """The table's rows by way of the snapshot.

    :param by_id: in the order of this column, and not as they are in the table: of large ones, a later one may be
        before others.
    """
    programs = programs_of(table, format, copied=True)
    query = sql.SQL("COPY (SELECT {} FROM ONLY {}{}) TO STDOUT (FORMAT binary)").format(
        select_list(table), sql.Identifier(table.schema, table.name), _order(by_id)
    )
    return [row for block in copy.rows(connection, query) for row in encode_block(block, programs)]


def _order(by_id: bool) -> sql.SQL:
    return sql.SQL(" ORDER BY id" if by_id else "")


def texts(connection: Connection, table: SourceTable, *, by_id: bool = False) -> list[list[str | None]]:
    """PostgreSQL's own text of every value; of reg* the number.

    :param by_id: see :func:`copied`.
    """

    def text(column: Column) -> sql.Composed:
        name = sql.Identifier(column.name)
        value = sql.SQL("{}").format(name)
        if column.type.base_oid in REGS and column.type.form == "number":
            value += sql.SQL("::oid")
        if column.type.form == "geojson":
            value = sql.SQL("{}({})").format(sql.Identifier(column.type.schema, "st_asgeojson"), value)
        whole = sql.SQL("CASE WHEN {} IS DISTINCT FROM NULL THEN pg_catalog.format('%s', {}) END")
        return whole.format(name, value)

    query = sql.SQL("SELECT {} FROM ONLY {}{}").format(
        sql.SQL(", ").join(map(text, table.columns)),
        sql.Identifier(table.schema, table.name),
        _order(by_id),
    )
    return [list(row) for row in connection.execute(query)]


def encoded(batch: Batch, completer: ToastResolver, format: str) -> tuple[list[Made], Completed]:
    """A batch of one table's changes."""
    programs = compile_programs(
        [(v.table, Target(0, 5, KEY_ID, VALUE_ID)) for v in batch.versions], FORMATS[format], copied=False
    )
    completed = completer.complete(batch, programs)
    # the definitions are those of today
    result = encode_changes(completed, programs.for_older)
    rows = [(row["row"], made(row, result.records.data)) for row in result.records.table]
    rows += [(rejection.row, Made(error=rejection.reason)) for rejection in result.rejections]
    rows += [(change, Made(error=reason)) for change, reason in completed.failed.items()]
    return [row for _, row in sorted(rows, key=lambda item: item[0])], completed


class Follower:
    """A slot, and all that comes out of it as batches.

    :param forms: in which types are published.
    :param options: of the ReplicationStream.
    """

    def __init__(
        self,
        dsn: str,
        publication: str = "p",
        *,
        name: str = "",
        limit: int = 1 << 30,
        most: int = 1 << 30,
        forms: TypeOptions = DEFAULT_TYPE_OPTIONS,
        **options: int,
    ) -> None:
        self.forms = forms
        self.dsn = dsn
        self.connection = connect(dsn)
        self.slot = name or f"s{time.monotonic_ns()}"
        self.start = slot.create(dsn, self.connection, self.slot, timeout=30)
        self.assembler = TransactionAssembler(
            Position(self.start), {}, self._resolve, batch_bytes=limit, largest_transaction=most
        )
        self.completer = ToastResolver(dsn, lambda what: None)
        self._publications = [publication]
        self._options = options
        self.stream = self.open()

    def open(self) -> ReplicationStream:
        """A new session from the position on."""
        self.assembler.restart()
        deadline = time.monotonic() + 10
        while True:
            try:
                self.stream = ReplicationStream(
                    self.dsn,
                    self.slot,
                    self._publications,
                    self.assembler.position.lsn,
                    **self._options,  # type: ignore[arg-type]
                )
            except SlotInUse:
                # the walsender of the session before takes a moment to end
                if time.monotonic() > deadline:
                    raise
                time.sleep(0.05)
            else:
                break
        return self.stream

    def _resolve(self, message: pgoutput.RelationMessage, current: Version | None) -> Version:
        (table,) = catalog.load(self.connection, [message.oid], TableMapping(forms=self.forms))
        assert [c.name for c in table.columns] == [c.name for c in message.columns]
        return Version(table, message.name, KEY_ID, VALUE_ID)

    def batches(self, timeout: float = 60.0) -> list[Batch]:
        """Everything that is committed now and was not taken yet."""
        row = self.connection.execute("SELECT pg_current_wal_insert_lsn()::text").fetchone()
        assert row is not None
        # a record of our own, so that there is something to flush up to
        self.connection.execute("SELECT pg_logical_emit_message(true, 'x', 'x')")
        target, found, deadline = parse_lsn(row[0]), [], time.monotonic() + timeout
        self.stream.request_reply()
        while self.assembler.position.lsn < target:
            assert time.monotonic() < deadline, "the stream did not reach the end of the WAL"
            block = self.stream.take(0.2)
            if block is None:
                self.stream.request_reply()
            else:
                self.assembler.add(block)
                while (batch := self.assembler.cut()) is not None:
                    found.append(batch)
            if (batch := self.assembler.flush(empty=True)) is not None:
                found.append(batch)
        return [batch for batch in found if len(batch)]

    def changes(self, format: str) -> list[Made]:
        """The same, encoded."""
        return [row for batch in self.batches() for row in encoded(batch, self.completer, format)[0]]

    def close(self) -> None:
        """End the session and drop the slot."""
        self.stream.close()
        self.completer.close()
        if not self.connection.closed:
            slot.drop(self.connection, self.slot)
            self.connection.close()
