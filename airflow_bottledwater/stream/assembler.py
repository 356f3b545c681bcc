"""Transactions put together from the stream, filtered at the boundary, and cut into batches.

The loop over messages is compiled; Python sees a transaction only where something rare is in it (a Relation message, a
TRUNCATE). The rules are those of :class:`~airflow_bottledwater.model.lsn.Position` and
:class:`~airflow_bottledwater.model.boundary.Boundary`, which tests hold the kernel against.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

import numpy as np
import numpy.typing as npt

from airflow_bottledwater import compiled
from airflow_bottledwater.encoding.wire import (
    C_KIND,
    C_LENGTH,
    C_LSN,
    C_OFFSET,
    C_ORDINAL,
    C_RELATION,
    C_TIME,
    C_XID,
    CHANGE_WIDTH,
)
from airflow_bottledwater.errors import ProtocolError
from airflow_bottledwater.model.boundary import Boundary
from airflow_bottledwater.model.lsn import Position
from airflow_bottledwater.model.version import Version
from airflow_bottledwater.postgres import pgoutput
from airflow_bottledwater.postgres.receive import Block
from airflow_bottledwater.postgres.replication import XLOG_HEADER
from airflow_bottledwater.publish.batch import Batch
from airflow_bottledwater.stream.assemble import (
    BYTES,
    COUNT,
    CUT,
    DONE,
    FINAL,
    FROM_LSN,
    FROM_ORDINAL,
    FULL,
    IN,
    MARK,
    MARK_BYTES,
    MARK_LSN,
    ORDINAL,
    RELATION,
    ROOM,
    SEEN,
    SKIPPED,
    SKIPPED_TRANSACTIONS,
    TIME,
    TRUNCATE,
    UNEXPECTED,
    UNKNOWN,
    XID,
    assemble,
)


class TransactionAssembler:
    """Blocks in, batches out.

    :param start: P; what lies before is left out.
    :param boundaries: per table oid what its snapshot already holds.
    :param resolve: makes a :class:`Version` of a Relation message (asks the catalog and the registry).
    :param limit: bytes at which a batch ends, at the next commit.
    :param most: bytes at which a single transaction is cut.
    """

    def __init__(
        self,
        start: Position,
        boundaries: Mapping[int, Boundary],
        resolve: Callable[[pgoutput.RelationMessage, Version | None], Version],
        *,
        limit: int,
        most: int,
    ) -> None:
        self.position = start
        self._boundaries = dict(boundaries)
        self._resolve = resolve
        self._limit, self._most = limit, most
        self._versions: list[Version] = []
        self._messages: dict[int, pgoutput.RelationMessage] = {}
        self._current: dict[int, int] = {}
        self._state: npt.NDArray[np.int64] = np.zeros(16, dtype=np.int64)
        self._out: npt.NDArray[np.uint8] = np.empty(1 << 20, dtype=np.uint8)
        self._changes: npt.NDArray[np.int64] = np.empty((1 << 12, CHANGE_WIDTH), dtype=np.int64)
        self._block: Block | None = None
        self._next = 0
        self._oids: npt.NDArray[np.int64] = np.zeros(0, dtype=np.int64)
        self._skips: npt.NDArray[np.int64] = np.zeros((0, 2), dtype=np.int64)
        self._index()
        self.restart()

    def restart(self) -> None:
        """Forget what is half received: a new session sends from the position on."""
        self._state[[IN, COUNT, BYTES, MARK, MARK_BYTES]] = 0
        self._state[FROM_LSN], self._state[FROM_ORDINAL] = self.position
        self._state[MARK_LSN] = self.position.lsn
        self._block = None

    @property
    def statistics(self) -> dict[str, int]:
        """Transactions seen, changes and transactions that the boundary left out."""
        return {
            "transactions": int(self._state[SEEN]),
            "skipped_changes": int(self._state[SKIPPED]),
            "skipped_transactions": int(self._state[SKIPPED_TRANSACTIONS]),
        }

    @property
    def _skipped_of(self) -> dict[int, int]:
        """Per table, how many transactions the boundary left out."""
        return {int(oid): int(count) for oid, count in zip(self._oids, self._skips[:, 0], strict=True)}

    @property
    def skipped_by_table(self) -> dict[str, int]:
        """The same by the table's name."""
        return {self._versions[self._current[oid]].table.qualified: n for oid, n in self._skipped_of.items() if n}

    def _index(self) -> None:
        """The lookup tables of the kernel, after a new relation version."""
        kept = self._skipped_of
        oids = sorted(self._current)
        bounds = [b for b in self._boundaries.values() if b.filtered]
        distinct = list(dict.fromkeys(bounds))
        self._oids = np.array(oids, dtype=np.int64)
        self._indexes = np.array([self._current[oid] for oid in oids], dtype=np.int64)
        self._boundary_of = np.array(
            [
                distinct.index(self._boundaries[o]) if o in self._boundaries and self._boundaries[o].filtered else -1
                for o in oids
            ],
            dtype=np.int64,
        )
        running: list[int] = []
        rows = []
        for boundary in distinct:
            first = len(running)
            running += boundary.snapshot.running
            rows.append((boundary.insert_lsn, boundary.snapshot.xmin, boundary.snapshot.xmax, first, len(running)))
        self._bounds = np.array(rows, dtype=np.int64).reshape(len(rows), 5)
        self._running = np.array(running or [0], dtype=np.int64)
        self._skips = np.array([(kept.get(oid, 0), 0) for oid in oids], dtype=np.int64).reshape(len(oids), 2)
        if not hasattr(self, "_hidden") or len(self._hidden) != len(rows):
            self._hidden: npt.NDArray[np.bool_] = np.zeros(len(rows), dtype=np.bool_)

    def add(self, block: Block) -> None:
        """Give it the next block; call :meth:`cut` until it returns None before the next."""
        assert self._block is None
        self._block, self._next = block, 0

    def cut(self) -> Batch | None:
        """The next full batch, or None when the block is used up (see :meth:`flush`)."""
        while self._block is not None:
            block = self._block
            self._next, why = assemble(
                block.data, block.offsets, self._next, block.count, self._state, self._out, self._changes, self._oids,
                self._indexes, self._boundary_of, self._bounds, self._running, self._hidden, self._skips, self._limit, self._most,
            )  # fmt: skip
            if why == DONE:
                self._block = None
            elif why == FULL:
                return self._emit()
            elif why == CUT:
                # first what is whole; then, if the transaction alone is too large, a part of it
                return self._emit() if self._state[MARK] else self._emit_part()
            elif why == ROOM:
                self._grow()
            elif why == RELATION:
                self._take_relation(self._payload())
                self._next += 1
            elif why == TRUNCATE:
                self._take_truncate(self._payload())
                self._next += 1
            elif why == UNKNOWN:
                raise ProtocolError("PostgreSQL sent a row before its Relation message.")
            elif why == UNEXPECTED:
                raise ProtocolError(
                    f"PostgreSQL sent a message of kind {chr(self._payload()[0])!r}, which was not asked for and may change rows; nothing "
                    "of it is published.",
                    "A slot with two_phase sends such messages: make one without.",
                )
            else:
                raise ProtocolError("PostgreSQL sent a message that does not follow the replication protocol.")
        return None

    def flush(self, *, empty: bool) -> Batch | None:
        """The whole transactions that are there.

        :param empty: also a batch without changes, that only moves the position.
        """
        moved = self._state[MARK_LSN] > self.position.lsn
        if self._state[MARK] or (empty and moved):
            return self._emit()
        return None

    def _payload(self) -> bytes:
        assert self._block is not None
        begin, end = self._block.offsets[self._next], self._block.offsets[self._next + 1]
        return bytes(self._block.data[begin + XLOG_HEADER : end])

    def _grow(self) -> None:
        if self._state[COUNT] == len(self._changes):
            self._changes = np.concatenate([self._changes, np.empty_like(self._changes)])
        else:
            self._out = np.concatenate([self._out, np.empty_like(self._out)])

    def _take_relation(self, data: bytes) -> None:
        message = pgoutput.relation(data)
        known = self._messages.get(message.oid)
        if known == message and message.identity != "f":
            return  # every session repeats them, ANALYZE too
        current = self._current.get(message.oid)
        version = self._resolve(message, None if current is None else self._versions[current])
        if known == message and current is not None and version is self._versions[current]:
            return  # with the full old row as identity, the message does not tell a change of the primary key
        self._messages[message.oid] = message
        self._current[message.oid] = len(self._versions)
        self._versions.append(version)
        self._index()

    def _take_truncate(self, data: bytes) -> None:
        state = self._state
        state[ORDINAL] += 1
        final, xid = int(state[FINAL]), int(state[XID])
        if self.position.passed(final, int(state[ORDINAL])):
            return
        message = pgoutput.truncate(data)
        oids = [
            oid for oid in message.oids if oid not in self._boundaries or not self._boundaries[oid].contains(final, xid)
        ]
        if not oids:
            return
        if not all(oid in self._current for oid in oids):
            raise ProtocolError("PostgreSQL sent a TRUNCATE before its tables' Relation messages.")
        kept = bytes(data[:1]) + len(oids).to_bytes(4, "big") + bytes(data[5:6])
        kept += b"".join(oid.to_bytes(4, "big") for oid in oids)
        while state[COUNT] == len(self._changes) or state[BYTES] + len(kept) > len(self._out):
            self._grow()
        row = self._changes[state[COUNT]]
        row[:] = 0
        row[C_KIND], row[C_OFFSET], row[C_LENGTH] = pgoutput.TRUNCATE, state[BYTES], len(kept)
        row[C_RELATION] = self._current[oids[0]]
        row[C_LSN], row[C_ORDINAL], row[C_XID], row[C_TIME] = final, state[ORDINAL], xid, state[TIME]
        self._out[state[BYTES] : state[BYTES] + len(kept)] = np.frombuffer(kept, dtype=np.uint8)
        state[COUNT] += 1
        state[BYTES] += len(kept)

    def _emit(self) -> Batch:
        state = self._state
        batch = self._batch(int(state[MARK]), int(state[MARK_BYTES]), Position(int(state[MARK_LSN]), 0))
        self._keep_rest(int(state[MARK]), int(state[MARK_BYTES]))
        return batch

    def _emit_part(self) -> Batch:
        state = self._state
        batch = self._batch(int(state[COUNT]), int(state[BYTES]), Position(int(state[FINAL]), int(state[ORDINAL])))
        self._keep_rest(int(state[COUNT]), int(state[BYTES]))
        return batch

    def _batch(self, count: int, size: int, end: Position) -> Batch:
        changes = self._changes[:count].copy()
        used = set(changes[:, C_RELATION].tolist())
        for row in changes[changes[:, C_KIND] == pgoutput.TRUNCATE]:
            # it names more tables than the one that its row can refer to
            message = pgoutput.truncate(bytes(self._out[row[C_OFFSET] : row[C_OFFSET] + row[C_LENGTH]]))
            named = {self._versions[index].table.oid for index in used}
            used |= {self._current[oid] for oid in message.oids if oid not in named}
        order = np.array(sorted(used), dtype=np.int64)
        changes[:, C_RELATION] = np.searchsorted(order, changes[:, C_RELATION])
        batch = Batch(
            self.position, end, self._out[:size].copy(), changes, tuple(self._versions[int(index)] for index in order)
        )
        self.position = end
        return batch

    def _keep_rest(self, count: int, size: int) -> None:
        state = self._state
        rest = int(state[COUNT]) - count
        if rest:
            self._changes[:rest] = self._changes[count : count + rest].copy()
            self._changes[:rest, C_OFFSET] -= size
            length = int(state[BYTES]) - size
            self._out[:length] = self._out[size : size + length].copy()
        state[COUNT] = rest
        state[BYTES] -= size
        state[MARK] = state[MARK_BYTES] = 0


def warm_up() -> None:
    """See :func:`airflow_bottledwater.compiled.warm_up`."""
    compiled.warm_up("stream", _assemble_nothing)


def _assemble_nothing() -> None:
    def resolve(*_: object) -> Version:
        raise AssertionError("an empty block has no Relation message")

    cutter = TransactionAssembler(Position(0), {}, resolve, limit=1, most=1)
    cutter.add(Block(np.zeros(1, dtype=np.uint8), np.zeros(1, dtype=np.int64)))
    cutter.cut()
