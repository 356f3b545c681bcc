"""The compiled loop over messages: finds transactions, leaves out what the boundary holds, and copies the rest.

Its rules are those of :class:`~airflow_bottledwater.model.lsn.Position` and :class:`~airflow_bottledwater.model.boundary.Boundary`,
which tests hold it against.
"""

from __future__ import annotations

import numpy as np

from airflow_bottledwater.compiled import compiled, memcpy
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
    EPOCH_MICROS,
    FLAG_XID_SHIFT,
)

# the assembler's state
(
    IN,  # inside a transaction
    FINAL,  # its final LSN
    XID,
    TIME,
    ORDINAL,
    FROM_LSN,  # P at the start of the session: what is skipped
    FROM_ORDINAL,
    COUNT,  # changes taken, and their bytes
    BYTES,
    MARK,  # the same at the end of the last whole transaction
    MARK_BYTES,
    MARK_LSN,  # its end LSN, or a later keepalive's
    SEEN,  # transactions, changes left out at the boundary, transactions of which some were
    SKIPPED,
    SKIPPED_TRANSACTIONS,
    SKIPPED_HERE,
) = range(16)

DONE, RELATION, TRUNCATE, FULL, CUT, ROOM, UNKNOWN, MALFORMED, UNEXPECTED = range(9)


@compiled
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


@compiled
def assemble(
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
            if state[IN] == 0:
                k = i64(b, p + 1)
                if k > state[MARK_LSN]:
                    state[MARK_LSN] = k
            i += 1
            continue
        p += 25
        if b[offsets[i]] != 119 or end - p < 1:
            return i, MALFORMED
        kind = b[p]
        if kind == 66:
            if end - p < 21:
                return i, MALFORMED
            state[IN] = 1
            state[FINAL] = i64(b, p + 1)
            state[TIME] = (i64(b, p + 9) + EPOCH_MICROS) // 1000
            state[XID] = u32(b, p + 17)
            state[ORDINAL] = 0
            state[SEEN] += 1
            state[SKIPPED_HERE] = 0
            for k in range(boundaries.shape[0]):
                hidden[k] = state[FINAL] < boundaries[k, 0] and _sees(
                    state[XID], boundaries[k, 1], boundaries[k, 2], running, boundaries[k, 3], boundaries[k, 4]
                )
        elif kind == 67:
            if end - p < 26:
                return i, MALFORMED
            state[IN] = 0
            state[MARK] = state[COUNT]
            state[MARK_BYTES] = state[BYTES]
            lsn = i64(b, p + 10)
            if lsn > state[MARK_LSN]:
                state[MARK_LSN] = lsn
            state[SKIPPED_TRANSACTIONS] += state[SKIPPED_HERE]
            if state[BYTES] >= limit:
                return i + 1, FULL
        elif kind == 82:
            return i, RELATION
        elif kind == 84:
            return i, TRUNCATE
        elif kind == 73 or kind == 85 or kind == 68:
            if end - p < 6:
                return i, MALFORMED
            final = state[FINAL]
            ordinal = state[ORDINAL] + 1
            if final < state[FROM_LSN] or (final == state[FROM_LSN] and ordinal <= state[FROM_ORDINAL]):
                state[ORDINAL] = ordinal
                i += 1
                continue
            at = np.searchsorted(oids, u32(b, p + 1))
            if at == oids.size or oids[at] != u32(b, p + 1):
                return i, UNKNOWN
            relation = indexes[at]
            if boundary_of[at] >= 0 and hidden[boundary_of[at]]:
                state[ORDINAL] = ordinal
                state[SKIPPED] += 1
                state[SKIPPED_HERE] = 1
                if skips[at, 1] != final:
                    skips[at, 0] += 1
                    skips[at, 1] = final
                i += 1
                continue
            n = end - p
            c = state[COUNT]
            if c > state[MARK] and state[BYTES] - state[MARK_BYTES] + n > most:
                return i, CUT
            if c == changes.shape[0] or state[BYTES] + n > out.size:
                return i, ROOM
            o = state[BYTES]
            memcpy(out.ctypes.data + o, b.ctypes.data + p, n)
            changes[c, C_KIND] = kind
            changes[c, C_OFFSET] = o
            changes[c, C_LENGTH] = n
            changes[c, C_RELATION] = relation
            changes[c, C_LSN] = final
            changes[c, C_ORDINAL] = ordinal
            changes[c, C_XID] = state[XID]
            changes[c, C_TIME] = state[TIME]
            changes[c, C_FLAGS] = state[XID] << FLAG_XID_SHIFT
            state[ORDINAL] = ordinal
            state[COUNT] = c + 1
            state[BYTES] = o + n
        elif kind != 89 and kind != 79 and kind != 77:
            # Type, Origin and Message say nothing of rows; any other kind may
            return i, UNEXPECTED
        i += 1
    return i, DONE
