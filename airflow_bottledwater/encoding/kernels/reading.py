"""Reads big-endian integers, as PostgreSQL sends them, in compiled code.

Positions are converted to unsigned here: a signed one could be negative and count from the array's end, and checking
that for each byte would keep the compiler from reading a whole integer at once.
"""

from __future__ import annotations

import numpy as np

from airflow_bottledwater.compiled import callee

_EIGHT = np.uint64(8)


@callee
def _unsigned(b, p, width):
    q = np.uint64(p)
    v = np.uint64(0)
    for i in range(width):
        v = (v << _EIGHT) | np.uint64(b[q + np.uint64(i)])
    return np.int64(v)


@callee
def u16(b, p):
    """Two bytes, unsigned."""
    return _unsigned(b, p, 2)


@callee
def i16(b, p):
    """Two bytes, signed."""
    return (u16(b, p) ^ 0x8000) - 0x8000


@callee
def u32(b, p):
    """Four bytes, unsigned."""
    return _unsigned(b, p, 4)


@callee
def i32(b, p):
    """Four bytes, signed."""
    return (u32(b, p) ^ 0x80000000) - 0x80000000


@callee
def i64(b, p):
    """Eight bytes, signed."""
    return _unsigned(b, p, 8)
