"""Writes bytes, digits and Avro's integers. Each function returns the position after what it has written."""

from __future__ import annotations

import numpy as np

from airflow_bottledwater.compiled import callee, inlined, memcpy
from airflow_bottledwater.encoding.layout import WORD
from airflow_bottledwater.encoding.wire import SPACE

HEX = np.frombuffer(b"0123456789abcdef", dtype=np.uint8)
NAN = np.frombuffer(b"NaN", dtype=np.uint8)
INFINITY = np.frombuffer(b"Infinity", dtype=np.uint8)
MINUS_INFINITY = np.frombuffer(b"-Infinity", dtype=np.uint8)
LOWER_INFINITY = np.frombuffer(b"infinity", dtype=np.uint8)
LOWER_MINUS_INFINITY = np.frombuffer(b"-infinity", dtype=np.uint8)
NULL = np.frombuffer(b"null", dtype=np.uint8)
QUOTE, COMMA, COLON, BACKSLASH, MINUS, PLUS, ZERO, DOT = 34, 44, 58, 92, 45, 43, 48, 46
OPEN, CLOSE, OPEN_ARRAY, CLOSE_ARRAY = 123, 125, 91, 93
#: the digits of all numbers below 100, the first one in the lower byte
_PAIRS = np.frombuffer(b"".join(b"%02d" % n for n in range(100)), dtype="<u2")
_TEN, _HUNDRED, _TEN_THOUSAND = np.uint64(10), np.uint64(100), np.uint64(10_000)
_WORD = np.uint64(WORD)
_TRUE, _FALSE = (np.uint64(int.from_bytes(word, "little")) for word in (b"true", b"false"))


@inlined
def load_word(b, p):
    """Eight bytes as a number, the first one in the lowest byte; ``p`` is unsigned, for the same reason as in
    reading.py."""
    word = np.uint64(0)
    for i in range(8):
        word |= np.uint64(b[p + np.uint64(i)]) << np.uint64(8 * i)
    return word


@inlined
def store_word(word, out, o):
    """The inverse of :func:`load_word`."""
    for i in range(8):
        out[o + np.uint64(i)] = np.uint8((word >> np.uint64(8 * i)) & np.uint64(255))


@callee
def copy_bytes(b, p, n, out, o):
    """Copy bytes between two buffers."""
    if n >= 32:
        memcpy(out.ctypes.data + o, b.ctypes.data + p, n)
        return o + n
    source, target, size = np.uint64(p), np.uint64(o), np.uint64(n)
    if size >= _WORD:
        done = np.uint64(0)
        while done + _WORD < size:
            store_word(load_word(b, source + done), out, target + done)
            done += _WORD
        # the last word overlaps the one before
        store_word(load_word(b, source + size - _WORD), out, target + size - _WORD)
    else:
        for i in range(size):
            out[target + i] = b[source + i]
    return o + n


@callee
def length_of(n, out, o):
    """Write a length as an int32; -1 stands for NULL."""
    for i in range(4):
        out[o + i] = np.uint8((n >> (24 - 8 * i)) & 255)


@inlined
def copy_name(names, p, n, out, o):
    """Copy a name in whole words: up to seven bytes more than it has are read and written."""
    source, target = np.uint64(p), np.uint64(o)
    for done in range(np.uint64(0), np.uint64(n), _WORD):
        store_word(load_word(names, source + done), out, target + done)
    return o + n


@callee
def literal(word, out, o, cap):
    if cap - o < word.size:
        return np.int64(SPACE)
    for i in range(word.size):
        out[o + i] = word[i]
    return np.int64(o + word.size)


@inlined
def boolean(v, out, o):
    """Write a boolean of JSON, for which there must be room for eight bytes."""
    store_word(_TRUE if v else _FALSE, out, np.uint64(o))
    return o + (4 if v else 5)


@callee
def varint(v, out, o):
    """Write an Avro long: zig-zag, seven bits in a byte
    (https://avro.apache.org/docs/1.12.0/specification/#primitive-types-1)."""
    z = np.uint64((v << 1) ^ (v >> 63))
    at = np.uint64(o)
    while z >= np.uint64(128):
        out[at] = np.uint8((z & np.uint64(127)) | np.uint64(128))
        z >>= np.uint64(7)
        at += np.uint64(1)
    out[at] = np.uint8(z)
    return np.int64(at) + 1


@callee
def integer(v, out, o):
    """Write an integer in decimal digits."""
    if v < 0:
        out[o] = MINUS
        return unsigned(np.uint64(0) - np.uint64(v), out, o + 1)
    return unsigned(np.uint64(v), out, o)


@inlined
def pair(v, out, o):
    """Write a number below 100 with two digits."""
    digits, target = _PAIRS[np.uint64(v)], np.uint64(o)
    out[target] = np.uint8(digits & np.uint16(255))
    out[target + np.uint64(1)] = np.uint8(digits >> np.uint16(8))


@callee
def unsigned(magnitude, out, o):
    """Write a number, given as unsigned, in decimal digits."""
    n, rest = np.uint64(1), magnitude
    while rest >= _TEN_THOUSAND:
        rest //= _TEN_THOUSAND
        n += np.uint64(4)
    if rest >= np.uint64(100):
        n += np.uint64(3) if rest >= np.uint64(1000) else np.uint64(2)
    elif rest >= _TEN:
        n += np.uint64(1)
    return padded(magnitude, n, out, o)


@callee
def padded(v, width, out, o):
    """Write a number, which must not be negative, with ``width`` digits."""
    rest = np.uint64(v)  # unsigned division is much cheaper
    left, target = np.uint64(width), np.uint64(o)
    while left >= np.uint64(2):
        left -= np.uint64(2)
        pair(rest % _HUNDRED, out, target + left)
        rest //= _HUNDRED
    if left > np.uint64(0):
        out[target] = np.uint8(np.uint64(ZERO) + rest % _TEN)
    return o + np.int64(width)


@callee
def quoted(word, out, o, cap):
    if cap - o < word.size + 2:
        return np.int64(SPACE)
    out[o] = QUOTE
    o = literal(word, out, o + 1, cap)
    out[o] = QUOTE
    return np.int64(o + 1)
