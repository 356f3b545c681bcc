"""The compiled loop over messages: finds transactions, leaves out changes that the snapshot contains, and copies the
rest.

Its rules are those of :class:`~airflow_bottledwater.model.lsn.Position` and
:class:`~airflow_bottledwater.model.boundary.Boundary`; tests compare it with them.
"""

from __future__ import annotations

import numpy as np

from airflow_bottledwater.compiled import callee, compiled, memcpy
from airflow_bottledwater.encoding import wire
from airflow_bottledwater.encoding.kernels.fields import MESSAGE_HEADER, is_row
from airflow_bottledwater.encoding.kernels.reading import i16, i32, i64, u32
from airflow_bottledwater.encoding.kernels.sha256 import AS_TEXT, DIGITS, hash_value
from airflow_bottledwater.encoding.layout import int64s
from airflow_bottledwater.encoding.masks import CONSTANT, FIRST, HASH, NULL
from airflow_bottledwater.encoding.masks import LEFT_OUT as LEFT_OUT_COLUMN
from airflow_bottledwater.postgres.replication import XLOG_HEADER

#: the assembler's state between two calls
STATE = int64s(
    "next",  # number of the block's next message
    "in_transaction",
    "final_lsn",  # of the transaction that is being received
    "xid",
    "time",
    "ordinal",
    "from_lsn",  # P at the start of the session: what is at or before it is skipped
    "from_ordinal",
    "count",  # changes copied, and their bytes
    "bytes",
    "whole_count",  # the same at the end of the last whole transaction
    "whole_bytes",
    "whole_lsn",  # its end LSN, or that of a later keepalive
    "transactions",  # transactions received
    # changes left out at the boundary, or of tables that are not followed, and the transactions that contained some
    "skipped_changes",
    "skipped_transactions",
    "skipped_here",
    "batch_bytes",  # bytes at which a batch ends, at the next commit
    "largest_transaction",  # bytes at which a transaction is cut
)

#: a table that a Relation message has announced; rows are in the order of oids
TABLE = int64s(
    "oid",
    "version",  # -1: none, its changes cannot be published; or LEFT_OUT
    "boundary",  # its boundary's number; -1: none
    "skipped_transactions",
    "last_skipped",  # the final LSN of the last skipped transaction
    # the columns of its rows, and where the table of shapes has their first; 0 where all are copied as they are
    "columns",
    "first",
    "grows",  # by how many bytes a message may grow
)

#: what is done to a column of a table whose rows are not copied as they are
SHAPE = int64s(
    "kind",  # of a mask (encoding.masks), or whether the column is left out
    "count",  # how many characters of a text are left
    "text",  # where the constants have its own
    "length",
    "form",  # how a value becomes the text that is hashed (kernels.sha256)
)

#: in place of a version: the table is not one of the pipeline's, and its changes are left out
LEFT_OUT = -2

#: the numbers of a Boundary, and whether it contains the transaction that is being received
BOUNDARY = int64s("insert_lsn", "xmin", "xmax", "first_running", "end_running", "holds")

#: why the loop stopped
DONE, RELATION, TRUNCATE, LOGICAL, FULL, CUT, ROOM, UNKNOWN, MALFORMED, UNEXPECTED = range(10)

#: messages of the walsender: XLogData, and Primary keepalive with its length
#: (https://www.postgresql.org/docs/current/protocol-replication.html)
_XLOG_DATA = ord("w")
_KEEPALIVE, _KEEPALIVE_LENGTH = ord("k"), 18
#: bytes of a Begin and of a Commit message, and of the smallest message with rows
#: (https://www.postgresql.org/docs/current/protocol-logicalrep-message-formats.html)
_BEGIN_LENGTH, _COMMIT_LENGTH, _ROW_LENGTH = 21, 26, 6


@callee
def _sees(xid, boundary, running):
    """:meth:`Snapshot.sees`, on arrays."""
    xmax = boundary.xmax
    difference = (xid - xmax) & 0xFFFFFFFF
    wide = xmax + difference - 0x100000000 if difference >= 0x80000000 else xmax + difference
    if wide >= xmax:
        return False
    if wide < boundary.xmin:
        return True
    for i in range(boundary.first_running, boundary.end_running):
        if running[i] == wide:
            return False
    return True


@callee
def _begin(b, p, state, boundaries, running):
    """Take a Begin message: int64 final LSN, int64 microseconds of the commit, int32 xid."""
    state.in_transaction = 1
    state.final_lsn = i64(b, p + 1)
    state.time = (i64(b, p + 9) + wire.EPOCH_MICROS) // 1000
    state.xid = u32(b, p + 17)
    state.ordinal = 0
    state.transactions += 1
    state.skipped_here = 0
    for k in range(boundaries.size):
        boundary = boundaries[k]
        boundary.holds = state.final_lsn < boundary.insert_lsn and _sees(state.xid, boundary, running)


@callee
def _commit(b, p, state):
    """Take a Commit message: int8 flags, int64 LSN of the commit, int64 end LSN, int64 time."""
    state.in_transaction = 0
    state.whole_count = state.count
    state.whole_bytes = state.bytes
    state.whole_lsn = max(state.whole_lsn, i64(b, p + 10))
    state.skipped_transactions += state.skipped_here


@callee
def _find(tables, oid):
    """The number of a table; -1 if no Relation message has announced it."""
    low = 0
    high = tables.size
    while low < high:
        middle = (low + high) // 2
        if tables[middle].oid < oid:
            low = middle + 1
        else:
            high = middle
    return low if low < tables.size and tables[low].oid == oid else -1


@callee
def _part_of(b, p, n, shape):
    """The part of a text that its mask leaves: where it begins, and its bytes. Characters are counted as left() and
    right() of PostgreSQL do; a byte 10xxxxxx continues one in UTF-8."""
    left = shape.count
    if shape.kind == FIRST:
        for i in range(n):
            if b[p + i] & 0xC0 != 0x80:
                if left == 0:
                    return p, np.int64(i)
                left -= 1
        return p, np.int64(n)
    for i in range(n - 1, -1, -1):
        if left == 0:
            return p + i + 1, np.int64(n - i - 1)
        if b[p + i] & 0xC0 != 0x80:
            left -= 1
    return p, np.int64(n)


@callee
def _write_field(kind, b, p, n, out, o):
    """Write a field of a row with these bytes."""
    out[o] = kind
    for i in range(4):
        out[o + 1 + i] = np.uint8((n >> (24 - 8 * i)) & 255)
    memcpy(out.ctypes.data + o + 5, b.ctypes.data + p, n)
    return o + 5 + n


@callee
def _copy_shaped(b, p, end, columns, first, shapes, constants, words, room, out, o):
    """Copy a message with rows without the columns that are left out, and with others masked: of what is not to be
    published, nobody sees a byte.

    :param columns: how many columns its rows have.
    :param shapes: from ``first`` on, rows of :data:`SHAPE`.
    :returns: how many bytes were copied; -1 if the message is malformed.
    """
    began = o
    memcpy(out.ctypes.data + o, b.ctypes.data + p, MESSAGE_HEADER)
    p += MESSAGE_HEADER
    o += MESSAGE_HEADER
    remaining = 0
    for c in range(columns):
        remaining += shapes[first + c].kind != LEFT_OUT_COLUMN
    while p < end:
        if end - p < 3 or i16(b, p + 1) != columns:
            return np.int64(-1)
        out[o] = b[p]
        out[o + 1] = np.uint8(remaining >> 8)
        out[o + 2] = np.uint8(remaining & 255)
        p += 3
        o += 3
        for c in range(columns):
            if end - p < 1:
                return np.int64(-1)
            n = np.int64(1)
            if b[p] != wire.FIELD_NULL and b[p] != wire.FIELD_UNCHANGED:
                if end - p < 5:
                    return np.int64(-1)
                n = np.int64(i32(b, p + 1))
                if n < 0 or n > end - p - 5:
                    return np.int64(-1)
                n += 5
            shape = shapes[first + c]
            if shape.kind == NULL:
                out[o] = wire.FIELD_NULL
                o += 1
            elif shape.kind == CONSTANT and b[p] != wire.FIELD_NULL:
                o = _write_field(wire.FIELD_BINARY, constants, shape.text, shape.length, out, o)
            elif shape.kind == HASH and n > 1:
                form = AS_TEXT if b[p] == wire.FIELD_TEXT else shape.form
                at = hash_value(words, room, form, b, p + 5, n - 5, out, o + 5)
                if at < 0:
                    return np.int64(-1)
                out[o] = wire.FIELD_BINARY
                out[o + 1] = out[o + 2] = out[o + 3] = 0
                out[o + 4] = DIGITS
                o = at
            elif shape.kind >= FIRST and n > 1:
                begin, length = _part_of(b, p + 5, n - 5, shape)
                o = _write_field(b[p], b, begin, length, out, o)
            elif shape.kind != LEFT_OUT_COLUMN:
                memcpy(out.ctypes.data + o, b.ctypes.data + p, n)
                o += n
            p += n
    return o - began


@callee
def _take_row(b, p, n, state, tables, shapes, constants, words, room, boundaries, changes, out):
    """Copy a message with rows, unless it is at or before P, or its table's boundary contains it, or its table is left
    out; returns DONE, or why it stopped."""
    final = state.final_lsn
    ordinal = state.ordinal + 1
    if final < state.from_lsn or (final == state.from_lsn and ordinal <= state.from_ordinal):
        state.ordinal = ordinal
        return DONE
    at = _find(tables, u32(b, p + 1))
    if at < 0:
        return UNKNOWN
    table = tables[at]
    if table.version == LEFT_OUT or (table.boundary >= 0 and boundaries[table.boundary].holds):
        state.ordinal = ordinal
        state.skipped_changes += 1
        state.skipped_here = 1
        if table.last_skipped != final:
            table.skipped_transactions += 1
            table.last_skipped = final
        return DONE
    if table.version < 0:
        return UNKNOWN
    c = state.count
    if c > state.whole_count and state.bytes - state.whole_bytes + n > state.largest_transaction:
        return CUT
    if c == changes.size or state.bytes + n + table.grows > out.size:
        return ROOM
    if table.columns > 0:
        n = _copy_shaped(b, p, p + n, table.columns, table.first, shapes, constants, words, room, out, state.bytes)
        if n < 0:
            return MALFORMED
    else:
        memcpy(out.ctypes.data + state.bytes, b.ctypes.data + p, n)
    change = changes[c]
    change.kind = b[p]
    change.offset = state.bytes
    change.length = n
    change.relation = table.version
    change.lsn = final
    change.ordinal = ordinal
    change.xid = state.xid
    change.time = state.time
    change.flags = state.xid << wire.FLAG_XID_SHIFT
    state.ordinal = ordinal
    state.count = c + 1
    state.bytes += n
    return DONE


@compiled
def assemble(b, offsets, state, tables, shapes, constants, words, room, boundaries, running, changes, out):
    """Process the messages of a block, from ``state.next`` on, as far as possible; returns why it stopped.

    :param b: the block's bytes; ``offsets`` says where each message begins.
    :param tables: rows of :data:`TABLE`, sorted by oid.
    :param shapes: rows of :data:`SHAPE`, of all columns of the tables whose rows are not copied as they are.
    :param constants: the texts that are published instead of others.
    :param words: the key of hashes, and scratch memory; ``room`` likewise (kernels.sha256).
    :param running: the transactions in progress of all boundaries' snapshots, one after the other.
    :param changes: receives the changes, and ``out`` their messages.
    """
    for i in range(state.next, offsets.size - 1):
        state.next = i
        p = offsets[i]
        end = offsets[i + 1]
        if end - p >= _KEEPALIVE_LENGTH and b[p] == _KEEPALIVE:
            # inside a transaction, its LSN does not mean that everything before it is complete
            if state.in_transaction == 0:
                state.whole_lsn = max(state.whole_lsn, i64(b, p + 1))
            continue
        if end - p <= XLOG_HEADER or b[p] != _XLOG_DATA:
            return MALFORMED
        p += XLOG_HEADER
        kind = b[p]
        if is_row(kind):
            if end - p < _ROW_LENGTH:
                return MALFORMED
            why = _take_row(b, p, end - p, state, tables, shapes, constants, words, room, boundaries, changes, out)
            if why != DONE:
                return why
        elif kind == wire.MESSAGE_BEGIN:
            if end - p < _BEGIN_LENGTH:
                return MALFORMED
            _begin(b, p, state, boundaries, running)
        elif kind == wire.MESSAGE_COMMIT:
            if end - p < _COMMIT_LENGTH:
                return MALFORMED
            _commit(b, p, state)
            if state.bytes >= state.batch_bytes:
                state.next = i + 1
                return FULL
        elif kind == wire.MESSAGE_RELATION:
            return RELATION
        elif kind == wire.MESSAGE_TRUNCATE:
            return TRUNCATE
        elif kind == wire.MESSAGE_LOGICAL:
            return LOGICAL
        elif kind != wire.MESSAGE_TYPE and kind != wire.MESSAGE_ORIGIN:
            # these kinds contain no rows; any other kind may
            return UNEXPECTED
    state.next = offsets.size - 1
    return DONE
