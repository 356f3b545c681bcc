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
from airflow_bottledwater.compiled import memcpy
from airflow_bottledwater.encoding.kernels.reading import i64, u32
from airflow_bottledwater.encoding.wire import (
    C_FLAGS,
    C_KIND,
    C_LENGTH,
    C_LSN,
    C_OFFSET,
    C_ORDINAL,
    C_RELATION,
    C_TIME,
    C_XID,
    CHANGE_WIDTH,
    EPOCH_MICROS,
    FLAG_XID_SHIFT,
)
from airflow_bottledwater.errors import ProtocolError
from airflow_bottledwater.model.boundary import Boundary
from airflow_bottledwater.model.lsn import Position
from airflow_bottledwater.model.version import Version
from airflow_bottledwater.postgres import pgoutput
from airflow_bottledwater.postgres.receive import Block
from airflow_bottledwater.postgres.replication import XLOG_HEADER
from airflow_bottledwater.publish.batch import Batch

# the assembler's state
(
    _IN,  # inside a transaction
    _FINAL,  # its final LSN
    _XID,
    _TIME,
    _ORDINAL,
    _FROM_LSN,  # P at the start of the session: what is skipped
    _FROM_ORDINAL,
    _COUNT,  # changes taken, and their bytes
    _BYTES,
    _MARK,  # the same at the end of the last whole transaction
    _MARK_BYTES,
    _MARK_LSN,  # its end LSN, or a later keepalive's
    _SEEN,  # transactions, changes left out at the boundary, transactions of which some were
    _SKIPPED,
    _SKIPPED_TRANSACTIONS,
    _SKIPPED_HERE,
) = range(16)

_DONE, _RELATION, _TRUNCATE, _FULL, _CUT, _ROOM, _UNKNOWN, _MALFORMED, _UNEXPECTED = range(9)


@compiled.compiled
def _sees(xid, xmin, xmax, running, first, last):
    """Snapshot.sees, on arrays."""
    difference = (xid - xmax) & 0xFFFFFFFF
    wide = xmax + difference - 0x100000000 if difference >= 0x80000000 else xmax + difference
    if wide >= xmax:
        return False
    if wide < xmin:
        return True
    for i in range(first, last):
        if running[i] == wide:
            return False
    return True


@compiled.compiled
def _assemble(
    b,
    offsets,
    i,
    count,
    state,
    out,
    changes,
    oids,
    indexes,
    boundary_of,
    boundaries,
    running,
    hidden,
    skips,
    limit,
    most,
):
    """Take messages from ``i`` on; returns the next message and why it stopped there."""
    while i < count:
        p = offsets[i]
        end = offsets[i + 1]
        if end - p >= 18 and b[p] == 107:
            # a keepalive inside a transaction says nothing about what is complete
            if state[_IN] == 0:
                k = i64(b, p + 1)
                if k > state[_MARK_LSN]:
                    state[_MARK_LSN] = k
            i += 1
            continue
        p += 25
        if b[offsets[i]] != 119 or end - p < 1:
            return i, _MALFORMED
        kind = b[p]
        if kind == 66:
            if end - p < 21:
                return i, _MALFORMED
            state[_IN] = 1
            state[_FINAL] = i64(b, p + 1)
            state[_TIME] = (i64(b, p + 9) + EPOCH_MICROS) // 1000
            state[_XID] = u32(b, p + 17)
            state[_ORDINAL] = 0
            state[_SEEN] += 1
            state[_SKIPPED_HERE] = 0
            for k in range(boundaries.shape[0]):
                hidden[k] = state[_FINAL] < boundaries[k, 0] and _sees(
                    state[_XID], boundaries[k, 1], boundaries[k, 2], running, boundaries[k, 3], boundaries[k, 4]
                )
        elif kind == 67:
            if end - p < 26:
                return i, _MALFORMED
            state[_IN] = 0
            state[_MARK] = state[_COUNT]
            state[_MARK_BYTES] = state[_BYTES]
            lsn = i64(b, p + 10)
            if lsn > state[_MARK_LSN]:
                state[_MARK_LSN] = lsn
            state[_SKIPPED_TRANSACTIONS] += state[_SKIPPED_HERE]
            if state[_BYTES] >= limit:
                return i + 1, _FULL
        elif kind == 82:
            return i, _RELATION
        elif kind == 84:
            return i, _TRUNCATE
        elif kind == 73 or kind == 85 or kind == 68:
            if end - p < 6:
                return i, _MALFORMED
            final = state[_FINAL]
            ordinal = state[_ORDINAL] + 1
            if final < state[_FROM_LSN] or (final == state[_FROM_LSN] and ordinal <= state[_FROM_ORDINAL]):
                state[_ORDINAL] = ordinal
                i += 1
                continue
            at = np.searchsorted(oids, u32(b, p + 1))
            if at == oids.size or oids[at] != u32(b, p + 1):
                return i, _UNKNOWN
            relation = indexes[at]
            if boundary_of[at] >= 0 and hidden[boundary_of[at]]:
                state[_ORDINAL] = ordinal
                state[_SKIPPED] += 1
                state[_SKIPPED_HERE] = 1
                if skips[at, 1] != final:
                    skips[at, 0] += 1
                    skips[at, 1] = final
                i += 1
                continue
            n = end - p
            c = state[_COUNT]
            if c > state[_MARK] and state[_BYTES] - state[_MARK_BYTES] + n > most:
                return i, _CUT
            if c == changes.shape[0] or state[_BYTES] + n > out.size:
                return i, _ROOM
            o = state[_BYTES]
            memcpy(out.ctypes.data + o, b.ctypes.data + p, n)
            changes[c, C_KIND] = kind
            changes[c, C_OFFSET] = o
            changes[c, C_LENGTH] = n
            changes[c, C_RELATION] = relation
            changes[c, C_LSN] = final
            changes[c, C_ORDINAL] = ordinal
            changes[c, C_XID] = state[_XID]
            changes[c, C_TIME] = state[_TIME]
            changes[c, C_FLAGS] = state[_XID] << FLAG_XID_SHIFT
            state[_ORDINAL] = ordinal
            state[_COUNT] = c + 1
            state[_BYTES] = o + n
        elif kind != 89 and kind != 79 and kind != 77:
            # Type, Origin and Message say nothing of rows; any other kind may
            return i, _UNEXPECTED
        i += 1
    return i, _DONE


class Cutter:
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
        self._state[[_IN, _COUNT, _BYTES, _MARK, _MARK_BYTES]] = 0
        self._state[_FROM_LSN], self._state[_FROM_ORDINAL] = self.position
        self._state[_MARK_LSN] = self.position.lsn
        self._block = None

    @property
    def statistics(self) -> dict[str, int]:
        """Transactions seen, changes and transactions that the boundary left out."""
        return {
            "transactions": int(self._state[_SEEN]),
            "skipped_changes": int(self._state[_SKIPPED]),
            "skipped_transactions": int(self._state[_SKIPPED_TRANSACTIONS]),
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
            self._next, why = _assemble(
                block.data, block.offsets, self._next, block.count, self._state, self._out, self._changes, self._oids,
                self._indexes, self._boundary_of, self._bounds, self._running, self._hidden, self._skips, self._limit, self._most,
            )  # fmt: skip
            if why == _DONE:
                self._block = None
            elif why == _FULL:
                return self._emit()
            elif why == _CUT:
                # first what is whole; then, if the transaction alone is too large, a part of it
                return self._emit() if self._state[_MARK] else self._emit_part()
            elif why == _ROOM:
                self._grow()
            elif why == _RELATION:
                self._take_relation(self._payload())
                self._next += 1
            elif why == _TRUNCATE:
                self._take_truncate(self._payload())
                self._next += 1
            elif why == _UNKNOWN:
                raise ProtocolError("PostgreSQL sent a row before its Relation message.")
            elif why == _UNEXPECTED:
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
        moved = self._state[_MARK_LSN] > self.position.lsn
        if self._state[_MARK] or (empty and moved):
            return self._emit()
        return None

    def _payload(self) -> bytes:
        assert self._block is not None
        begin, end = self._block.offsets[self._next], self._block.offsets[self._next + 1]
        return bytes(self._block.data[begin + XLOG_HEADER : end])

    def _grow(self) -> None:
        if self._state[_COUNT] == len(self._changes):
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
        state[_ORDINAL] += 1
        final, xid = int(state[_FINAL]), int(state[_XID])
        if self.position.passed(final, int(state[_ORDINAL])):
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
        while state[_COUNT] == len(self._changes) or state[_BYTES] + len(kept) > len(self._out):
            self._grow()
        row = self._changes[state[_COUNT]]
        row[:] = 0
        row[C_KIND], row[C_OFFSET], row[C_LENGTH] = pgoutput.TRUNCATE, state[_BYTES], len(kept)
        row[C_RELATION] = self._current[oids[0]]
        row[C_LSN], row[C_ORDINAL], row[C_XID], row[C_TIME] = final, state[_ORDINAL], xid, state[_TIME]
        self._out[state[_BYTES] : state[_BYTES] + len(kept)] = np.frombuffer(kept, dtype=np.uint8)
        state[_COUNT] += 1
        state[_BYTES] += len(kept)

    def _emit(self) -> Batch:
        state = self._state
        batch = self._batch(int(state[_MARK]), int(state[_MARK_BYTES]), Position(int(state[_MARK_LSN]), 0))
        self._keep_rest(int(state[_MARK]), int(state[_MARK_BYTES]))
        return batch

    def _emit_part(self) -> Batch:
        state = self._state
        batch = self._batch(int(state[_COUNT]), int(state[_BYTES]), Position(int(state[_FINAL]), int(state[_ORDINAL])))
        self._keep_rest(int(state[_COUNT]), int(state[_BYTES]))
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
        rest = int(state[_COUNT]) - count
        if rest:
            self._changes[:rest] = self._changes[count : count + rest].copy()
            self._changes[:rest, C_OFFSET] -= size
            length = int(state[_BYTES]) - size
            self._out[:length] = self._out[size : size + length].copy()
        state[_COUNT] = rest
        state[_BYTES] -= size
        state[_MARK] = state[_MARK_BYTES] = 0


def warm_up() -> None:
    """See :func:`airflow_bottledwater.compiled.warm_up`."""
    compiled.warm_up("stream", _assemble_nothing)


def _assemble_nothing() -> None:
    def resolve(*_: object) -> Version:
        raise AssertionError("an empty block has no Relation message")

    cutter = Cutter(Position(0), {}, resolve, limit=1, most=1)
    cutter.add(Block(np.zeros(1, dtype=np.uint8), np.zeros(1, dtype=np.int64)))
    cutter.cut()
