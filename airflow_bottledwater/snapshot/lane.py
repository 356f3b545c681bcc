"""A snapshot lane: one connection, one publisher, its ranges in sequence; each range is one Kafka transaction."""

from __future__ import annotations

import contextlib
import hashlib
import itertools
import logging
import math
import struct
import time
import uuid
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import psycopg

from airflow_bottledwater.backoff import Backoff
from airflow_bottledwater.encoding import kernels, wire
from airflow_bottledwater.encoding.program import Programs, select_list
from airflow_bottledwater.errors import BottledWaterError, RecordError, StopRequested
from airflow_bottledwater.kafka import deadletter
from airflow_bottledwater.kafka.errors import NewProducerNeeded, RecordRefused
from airflow_bottledwater.kafka.publisher import Publisher, Records, single
from airflow_bottledwater.model.relation import Table
from airflow_bottledwater.postgres import copy, pgoutput, snapshot
from airflow_bottledwater.postgres.connect import Connection, connect, outage
from airflow_bottledwater.postgres.receive import Block
from airflow_bottledwater.postgres.snapshot import Held
from airflow_bottledwater.publish.delivery import Channel, find_refused, room_for, too_large
from airflow_bottledwater.publish.toast import column_texts
from airflow_bottledwater.publish.warm import warm_up
from airflow_bottledwater.settings import Pipeline
from airflow_bottledwater.state.records import Job, PinnedTable, PipelineState, lane_id, pins, progress_key

log = logging.getLogger(__name__)

_OUT_BYTES = 4 << 20
_FNV_OFFSET = np.uint64(0xCBF29CE484222325)
_ROWS = 1 << 15
#: seconds by which a lane is more patient than the driver, who sees the whole queue behind the snapshot's locks
_LATER = 5.0
#: bytes of a key's column in an error
_KEY_BYTES = 100
#: int8, int2, int4 (src/include/catalog/pg_type.dat)
_INTEGERS = (20, 21, 23)


@dataclass(frozen=True, slots=True)
class Part:
    """A range of a table.

    :param number: its place in the table's plan.
    """

    oid: int
    number: int
    first: int
    last: int


@dataclass(frozen=True, slots=True)
class LaneTask:
    """All that a lane needs to know, besides the pipeline's settings."""

    lane: int
    job: Job
    prefix: str
    state_topic: str
    held: Held
    tables: tuple[PinnedTable, ...]
    parts: tuple[Part, ...]


class _Slow(BottledWaterError):
    """The range would outlive half the transaction time-out: it is split."""


def run(pipeline: Pipeline, task: LaneTask, *, stopped: Callable[[], bool] = lambda: False) -> dict[str, int]:
    """Read and publish a lane's ranges; those that the state says are done are skipped.

    :raises TakenOver: another job has claimed the slot.
    :raises Outage: source or broker were away for too long, or the snapshot's holder is gone; resumable.
    :raises RecordError: a row cannot be published and ``on_error`` is exit.
    """
    lane = _Lane(pipeline, task, stopped)
    try:
        return lane.run()
    except psycopg.Error as error:
        raise outage(error, f"Reading the snapshot in lane {task.lane}") from error
    finally:
        lane.close()


class _Lane:
    def __init__(self, pipeline: Pipeline, task: LaneTask, stopped: Callable[[], bool]) -> None:
        self._pipeline, self._task, self._stopped = pipeline, task, stopped
        warm_up()  # not while a transaction is open
        self._channel = Channel(
            pipeline,
            task.job,
            lane_id(task.prefix, task.lane),
            pins(task.tables),
            task.state_topic,
            Backoff(pipeline.outage_timeout),
        )
        self._connection: Connection = connect(pipeline.postgres, application=f"bottledwater snapshot lane {task.lane}")
        self._state = PipelineState()
        self._tables = {t.table.oid: t for t in task.tables}
        self._out: npt.NDArray[np.uint8] = np.empty(_OUT_BYTES, dtype=np.uint8)
        self._records: npt.NDArray[np.int64] = np.zeros((_ROWS, wire.RECORD_WIDTH), dtype=np.int64)
        self._errors: npt.NDArray[np.int64] = np.zeros((256, wire.ERROR_WIDTH), dtype=np.int64)
        self._totals = {"rows": 0, "bytes": 0, "dead_letters": 0}
        #: rows that the broker is known to refuse, by the digest of their bytes, and why
        self._refused: dict[bytes, str] = {}

    def close(self) -> None:
        self._channel.close()
        self._connection.close()

    def run(self) -> dict[str, int]:
        for part in self._task.parts:
            pinned = self._tables[part.oid]
            pending = [(part.first, part.last)]
            while pending:
                self._check_stopped()
                first, last = pending[0]
                try:
                    self._read_state()
                    done = self._state.done(part.oid, part.number)
                    if done is not None and done["done"]:
                        break
                    if done is not None:
                        first = max(first, done["upto"])
                        if first >= last:
                            pending.pop(0)
                            continue
                    try:
                        self._publish(pinned, part, first, last, done)
                    except RecordRefused as error:
                        self._find_refused(pinned, part, first, last, error)
                        continue
                    pending.pop(0)
                except _Slow:
                    # the size as the holder found it, under its locks
                    end = last if last < snapshot.LAST_BLOCK else max(pinned.table.pages, first + 2)
                    middle = (first + end) // 2
                    if middle <= first:
                        raise RecordError(
                            f"One block of {pinned.table.qualified} takes longer than half of transaction_timeout.",
                            "Raise transaction_timeout.",
                        ) from None
                    log.info("Range %d of %s is split at block %d.", part.number, pinned.table.qualified, middle)
                    pending[0:1] = [(first, middle), (middle, last)]
                except NewProducerNeeded as error:
                    log.warning("%s: a new producer reads the state and goes on.", error)
                    self._channel.close()
                    self._channel.backoff.wait(str(error))
        return self._totals

    def _read_state(self) -> None:
        found = self._channel.open()
        if found is not None:
            self._state = found

    def _publish(
        self,
        pinned: PinnedTable,
        part: Part,
        first: int,
        last: int,
        before: dict[str, object] | None,
    ) -> None:
        """One transaction: the rows of blocks [first, last) and the range's progress."""
        table = pinned.table
        programs = self._channel.programs([pinned.version], copied=True)
        counts = {"rows": 0, "bytes": 0, "dead_letters": 0}
        progress: dict[str, object] = {}
        self._begin(table)
        deadline = math.inf

        def in_time() -> None:
            self._check_stopped()
            if time.monotonic() > deadline:
                raise _Slow("The range takes too long.")

        query = snapshot.copy_query(table, select_list(table), first, last)
        blocks = copy.rows(self._connection, query, idle=in_time)

        def parts(publisher: Publisher) -> None:
            checksum = _FNV_OFFSET
            for block in () if begun is None else itertools.chain([begun], blocks):
                in_time()
                checksum = self._encode(publisher, programs, pinned, block, counts, checksum)
            progress.update(
                rows=counts["rows"] + int((before or {}).get("rows", 0)),  # type: ignore[call-overload]
                checksum=f"{int(checksum):016x}",
                upto=last,
                done=last == part.last,
                lane=self._task.lane,
                epoch=self._task.job.epoch,
            )

        key = progress_key(part.oid, part.number)
        try:
            # the transaction begins with its first record: blocks without a visible row may take any time to read
            begun = next(blocks, None)
            deadline = time.monotonic() + self._pipeline.transaction_timeout / 2
            self._channel.send(parts, {key: progress})
        except BaseException:
            self._reconnect()
            raise
        self._connection.execute("COMMIT")
        self._state.facts[key] = dict(progress)
        for name, count in counts.items():
            self._totals[name] += count

    def _check_stopped(self) -> None:
        if self._stopped():
            raise StopRequested("The snapshot was asked to stop; finished ranges stay.")

    def _begin(self, table: Table) -> None:
        """A transaction under the exported snapshot."""
        snapshot.begin_task(
            self._connection, table, self._task.held, lock_timeout=self._pipeline.lock_queue_limit + _LATER
        )

    def _find_refused(self, pinned: PinnedTable, part: Part, first: int, last: int, error: RecordRefused) -> None:
        """Read the blocks [first, last) once more and find the rows that the broker refuses; the next attempt sets them aside.

        :raises BottledWaterError: no row has a fault, see :meth:`Channel.explain`.
        """
        programs = self._channel.programs([pinned.version], copied=True)
        service = self._channel.progress({progress_key(part.oid, part.number): {"upto": last, "done": False}})
        known = len(self._refused)
        self._begin(pinned.table)

        def search(block: Block, records: Records) -> None:
            self._check_stopped()
            for number, why in find_refused(self._channel, records).items():
                self._refused[_digest(block, int(records.table[number, wire.R_MESSAGE]))] = why

        counts = {"rows": 0, "bytes": 0, "dead_letters": 0}
        try:
            self._channel.explain(error, service)
            query = snapshot.copy_query(pinned.table, select_list(pinned.table), first, last)
            for block in copy.rows(self._connection, query, idle=self._check_stopped):
                self._encode(None, programs, pinned, block, counts, _FNV_OFFSET, search)
        finally:
            self._reconnect()
        if len(self._refused) == known:
            self._channel.smaller_batches(counts["bytes"])
            raise NewProducerNeeded(f"{error.what} A second time its rows are taken")

    def _reconnect(self) -> None:
        """A COPY that was left half-way can only be ended by ending its session; cancelled, so that it does not read on until it
        has something to send."""
        with contextlib.suppress(psycopg.Error):
            self._connection.cancel_safe(timeout=2)
        self._connection.close()
        self._connection = connect(self._pipeline.postgres, application=f"bottledwater snapshot lane {self._task.lane}")

    def _encode(
        self,
        publisher: Publisher | None,
        programs: Programs,
        pinned: PinnedTable,
        block: Block,
        counts: dict[str, int],
        checksum: np.uint64,
        search: Callable[[Block, Records], None] | None = None,
    ) -> np.uint64:
        """Encode a block and produce its records; those that cannot be published become dead letters.

        :param publisher: None: nothing is published, the records are given to ``search``.
        """
        start, scratch = 0, programs.scratch()
        while start < block.count:
            before = start
            start, used, made, failed = kernels.encode_copy(
                block.data, block.offsets, start, block.count, programs.json, programs.relations, 0, programs.columns, programs.keys,
                programs.names, scratch, self._records, self._errors, self._out,
            )  # fmt: skip
            records = Records(self._records[:made], self._out, wire.HEADERS if self._pipeline.snapshot_headers else 0)
            verdicts = {
                row: programs.error(0, code, column, offset)
                for row, code, column, offset in self._errors[:failed].tolist()
            }
            for i in np.flatnonzero(self._channel.too_large(records)).tolist():
                limit = int(self._channel.limits[self._channel.index[pinned.topic]])
                verdicts[int(records.table[i, wire.R_MESSAGE])] = (
                    f"the record has {int(records.sizes()[i]):,} bytes, the topic's max.message.bytes is {limit:,}"
                )
            if self._refused:
                digests = ((row, _digest(block, row)) for row in range(before, start))
                verdicts |= {row: self._refused[digest] for row, digest in digests if digest in self._refused}
            if verdicts:
                records = self._set_aside(publisher, pinned, block, records, verdicts, counts)
            if publisher is not None:
                publisher.produce(records)
            elif search is not None and len(records):
                search(block, records)
            self._out[used : used + 8] = 0
            checksum = np.uint64(kernels.checksum(self._out[: (used + 7) & ~7].view(np.uint64), checksum))
            counts["rows"] += len(records)
            counts["bytes"] += used
            if start == before and not failed:
                room = room_for(self._channel.most)
                if self._out.size > room:
                    reason = too_large(self._channel.most)
                    self._set_aside(publisher, pinned, block, records, {start: reason}, counts)
                    start += 1
                else:
                    self._out = np.empty(self._out.size + min(self._out.size, room), dtype=np.uint8)
        return checksum

    def _set_aside(
        self,
        publisher: Publisher | None,
        pinned: PinnedTable,
        block: Block,
        records: Records,
        verdicts: dict[int, str],
        counts: dict[str, int],
    ) -> Records:
        table = pinned.table
        for row, reason in verdicts.items():
            if self._pipeline.on_error == "exit":
                raise RecordError(
                    f"A row of {table.qualified} cannot be published to topic {pinned.topic!r}: {reason.rstrip('.')}"
                    f"{_named(table, _row(block, row))}.",
                    "Nothing of its range is published. Mend the cause and start again, or go on with on_error = log, which writes it "
                    "to the dead-letter topic.",
                    topic=pinned.topic,
                )
            if publisher is None:
                continue
            raw = _row(block, row)
            whole = len(raw) < self._channel.letter_limit
            message = _as_insert(table, raw, most=len(raw) if whole else deadletter.MAX_BYTES)
            log.error("Dead letter for a row of %s: %s", table.qualified, reason)
            value = deadletter.letter(
                topic=pinned.topic,
                op="r",
                position="",
                relation=table.qualified,
                key=table.key,
                columns=column_texts(table, message),
                error=reason,
                again=pinned.version.to_json(),
                message=message if whole else None,
                limit=self._channel.letter_limit,
            )
            publisher.produce(single(self._channel.letters, 0, f"snapshot/{uuid.uuid4().hex}".encode(), value))
            counts["dead_letters"] += 1
        kept = ~np.isin(records.table[:, wire.R_MESSAGE], np.array(sorted(verdicts)))
        return Records(records.table[kept], records.data, records.headers)


def _row(block: Block, row: int) -> memoryview:
    return memoryview(block.data)[block.offsets[row] : block.offsets[row + 1]]  # type: ignore[arg-type]


def _digest(block: Block, row: int) -> bytes:
    """What names a row however often its range is read and split: what the broker refuses, it refuses in every equal row."""
    return hashlib.blake2b(_row(block, row), digest_size=16).digest()


def _named(table: Table, raw: memoryview) -> str:
    """Which row it is, for people."""
    if not table.keyed:
        return ""
    texts = column_texts(table, _as_insert(table, raw, most=_KEY_BYTES))
    values = []
    for column in table.columns:
        if column.name in table.key:
            text = texts.get(column.name) or ""
            if column.type.oid in _INTEGERS and text.startswith("\\x"):
                text = str(int.from_bytes(bytes.fromhex(text[2:]), signed=True))
            values.append(f"{column.name} = {text}")
    return f"; it is the row with {', '.join(values)}"


def _as_insert(table: Table, raw: memoryview, *, most: int) -> bytes:
    """A COPY row in the form of an Insert message, for the one decoder of rows.

    :param most: bytes at which a value is cut.
    """
    fields, at = [], 2
    for _ in table.columns:
        (length,) = struct.unpack_from(">i", raw, at)
        at += 4
        fields.append(
            pgoutput.Field("n") if length < 0 else pgoutput.Field("b", bytes(raw[at : at + min(length, most)]))
        )
        at += max(length, 0)
    return pgoutput.RowMessage("I", table.oid, "", None, fields).encode()
