"""Writes bytes, digits and Avro's integers. Each function returns the position after what it has written."""

from __future__ import annotations

import numpy as np

from airflow_bottledwater.compiled import compiled, memcpy
from airflow_bottledwater.encoding.wire import SPACE

HEX = np.frombuffer(b"0123456789abcdef", dtype=np.uint8)
NAN = np.frombuffer(b"NaN", dtype=np.uint8)
INFINITY = np.frombuffer(b"Infinity", dtype=np.uint8)
MINUS_INFINITY = np.frombuffer(b"-Infinity", dtype=np.uint8)
LOWER_INFINITY = np.frombuffer(b"infinity", dtype=np.uint8)
LOWER_MINUS_INFINITY = np.frombuffer(b"-infinity", dtype=np.uint8)
NULL = np.frombuffer(b"null", dtype=np.uint8)
TRUE = np.frombuffer(b"true", dtype=np.uint8)
FALSE = np.frombuffer(b"false", dtype=np.uint8)
QUOTE, COMMA, COLON, BACKSLASH, MINUS, PLUS, ZERO, DOT = 34, 44, 58, 92, 45, 43, 48, 46
OPEN, CLOSE, OPEN_ARRAY, CLOSE_ARRAY = 123, 125, 91, 93


@compiled
def copy_bytes(b, p, n, out, o):
    if n < 32:
        # unsigned, for the same reason as in reading.py
        source, target = np.uint64(p), np.uint64(o)
        for i in range(np.uint64(n)):
            out[target + i] = b[source + i]
    else:
        memcpy(out.ctypes.data + o, b.ctypes.data + p, n)
    return o + n


@compiled
def literal(word, out, o, cap):
    if cap - o < word.size:
        return np.int64(SPACE)
    for i in range(word.size):
        out[o + i] = word[i]
    return np.int64(o + word.size)


@compiled
def varint(v, out, o):
    """Write an Avro long: zig-zag, seven bits in a byte (https://avro.apache.org/docs/1.12.0/specification/#primitive-types-1)."""
    z = np.uint64((v << 1) ^ (v >> 63))
    at = np.uint64(o)
    while z >= np.uint64(128):
        out[at] = np.uint8((z & np.uint64(127)) | np.uint64(128))
        z >>= np.uint64(7)
        at += np.uint64(1)
    out[at] = np.uint8(z)
    return np.int64(at) + 1


@compiled
def integer(v, out, o):
    """Write an integer in decimal digits."""
    if v < 0:
        out[o] = MINUS
        return unsigned(np.uint64(0) - np.uint64(v), out, o + 1)
    return unsigned(np.uint64(v), out, o)


@compiled
def unsigned(magnitude, out, o):
    n = 1
    rest = magnitude // np.uint64(10)
    while rest > np.uint64(0):
        n += 1
        rest //= np.uint64(10)
    for i in range(n - 1, -1, -1):
        out[o + i] = np.uint8(np.uint64(ZERO) + magnitude % np.uint64(10))
        magnitude //= np.uint64(10)
    return o + n


@compiled
def padded(v, width, out, o):
    """Write a number, which must not be negative, with ``width`` digits."""
    rest = np.uint64(v)  # unsigned division is much cheaper
    for i in range(width - 1, -1, -1):
        out[o + i] = np.uint8(np.uint64(ZERO) + rest % np.uint64(10))
        rest //= np.uint64(10)
    return o + width


@compiled
def quoted(word, out, o, cap):
    if cap - o < word.size + 2:
        return np.int64(SPACE)
    out[o] = QUOTE
    o = literal(word, out, o + 1, cap)
    out[o] = QUOTE
    return np.int64(o + 1)
