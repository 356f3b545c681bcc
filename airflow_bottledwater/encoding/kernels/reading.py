"""Big-endian integers, as PostgreSQL sends them, for compiled code."""

from __future__ import annotations

import numpy as np

from airflow_bottledwater.compiled import compiled


@compiled
def u16(b, p):
    """Two bytes, unsigned."""
    return (np.int64(b[p]) << 8) | np.int64(b[p + 1])


@compiled
def i16(b, p):
    """Two bytes, signed."""
    v = (np.int64(b[p]) << 8) | np.int64(b[p + 1])
    return v - 65536 if v >= 32768 else v


@compiled
def u32(b, p):
    """Four bytes, unsigned."""
    return (np.int64(b[p]) << 24) | (np.int64(b[p + 1]) << 16) | (np.int64(b[p + 2]) << 8) | np.int64(b[p + 3])


@compiled
def i32(b, p):
    """Four bytes, signed."""
    v = (np.int64(b[p]) << 24) | (np.int64(b[p + 1]) << 16) | (np.int64(b[p + 2]) << 8) | np.int64(b[p + 3])
    return v - 4294967296 if v >= 2147483648 else v


@compiled
def i64(b, p):
    """Eight bytes, signed."""
    v = np.int64(0)
    for i in range(8):
        v = (v << 8) | np.int64(b[p + i])
    return v
