"""Copies rows of a COPY with the values of some columns hashed."""

from __future__ import annotations

import numpy as np

from airflow_bottledwater.compiled import compiled, memcpy
from airflow_bottledwater.encoding.kernels.reading import i16, i32
from airflow_bottledwater.encoding.kernels.sha256 import AS_TEXT, DIGITS, hash_value
from airflow_bottledwater.encoding.kernels.text import unescape

_TAB, _NEWLINE, _BACKSLASH = ord("\t"), ord("\n"), ord("\\")
#: what stands in ``forms`` for a column whose values are copied as they are
KEPT = -1


@compiled
def hash_binary(b, offsets, forms, words, room, out, ends):
    """Copy binary rows; returns how many are well formed, those before the first that is not.

    https://www.postgresql.org/docs/current/sql-copy.html (Binary Format, Tuples)

    :param forms: for each column how its values become the text that is hashed, or :data:`KEPT`.
    :param out: receives the rows, with room for a hash in place of each value; ``ends`` receives where they end, behind
        its first entry.
    """
    o = np.int64(0)
    for row in range(offsets.size - 1):
        p, end = offsets[row], offsets[row + 1]
        if end - p < 2 or i16(b, p) != forms.size:
            return row
        memcpy(out.ctypes.data + o, b.ctypes.data + p, np.int64(2))
        p += 2
        o += 2
        for c in range(forms.size):
            n = i32(b, p) if end - p >= 4 else np.int64(-2)
            if n < -1 or n > end - p - 4:
                return row
            if forms[c] == KEPT or n == -1:
                memcpy(out.ctypes.data + o, b.ctypes.data + p, np.int64(4 + max(n, 0)))
                o += 4 + max(n, 0)
            else:
                out[o] = out[o + 1] = out[o + 2] = 0
                out[o + 3] = DIGITS
                o = hash_value(words, room, forms[c], b, p + 4, n, out, o + 4)
                if o < 0:
                    return row
            p += 4 + max(n, 0)
        if p != end:
            return row
        ends[row + 1] = o
    return offsets.size - 1


@compiled
def hash_lines(b, offsets, forms, words, room, spare, out, ends):
    """Copy rows of COPY's text format, whose values are the texts that are hashed.

    :param spare: room for the largest value.
    """
    o = np.int64(0)
    for row in range(offsets.size - 1):
        p, end, column = offsets[row], offsets[row + 1], 0
        while p < end:
            stop, escaped = p, False
            while stop < end and b[stop] != _TAB and b[stop] != _NEWLINE:
                escaped = escaped or b[stop] == _BACKSLASH
                stop += 1
            null = stop - p == 2 and b[p] == _BACKSLASH and b[p + 1] == ord("N")
            if column < forms.size and forms[column] != KEPT and not null:
                if escaped:
                    o = hash_value(words, room, AS_TEXT, spare, 0, unescape(b, p, stop, spare), out, o)
                else:
                    o = hash_value(words, room, AS_TEXT, b, p, stop - p, out, o)
            else:
                memcpy(out.ctypes.data + o, b.ctypes.data + p, np.int64(stop - p))
                o += stop - p
            if stop < end:
                out[o] = b[stop]
                o += 1
            p = stop + 1
            column += 1
        ends[row + 1] = o
