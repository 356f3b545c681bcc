"""Writes single values as JSON (RFC 8259)."""

from __future__ import annotations

import numpy as np

from airflow_bottledwater.compiled import callee, inlined
from airflow_bottledwater.encoding import wire
from airflow_bottledwater.encoding.kernels import writing
from airflow_bottledwater.encoding.kernels.floats import bits_of, half, write_shortest
from airflow_bottledwater.encoding.kernels.numeric import is_malformed, nearest_double, text_size, write_text
from airflow_bottledwater.encoding.kernels.reading import i16, i32, i64, u16, u32
from airflow_bottledwater.encoding.kernels.text import (
    inet,
    inet_is_malformed,
    quoted_moment,
    quoted_temporal,
    scaled,
    uuid,
)
from airflow_bottledwater.encoding.layout import WORD

#: upper case, as PostGIS prints its types
_UPPER_HEX = np.frombuffer(b"0123456789ABCDEF", dtype=np.uint8)
_WORD = np.uint64(WORD)
#: a word of bytes 1, and one of their highest bits
_ONES, _HIGHS = np.uint64(0x0101010101010101), np.uint64(0x8080808080808080)
_BASE64 = np.frombuffer(b"ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789+/", dtype=np.uint8)


@callee
def _escaped(b, p, n):
    """The bytes of a string after escaping."""
    size = n
    for i in range(n):
        c = b[p + i]
        if c < 32:
            size += 1 if c == 8 or c == 9 or c == 10 or c == 12 or c == 13 else 5
        elif c == writing.QUOTE or c == writing.BACKSLASH:
            size += 1
    return size


@inlined
def _has_escapes(word):
    """Whether one of eight bytes has to be escaped: has a byte of them that is zero, or one less than n
    (https://graphics.stanford.edu/~seander/bithacks.html#ZeroInWord, #HasLessInWord)?"""
    quote, backslash = word ^ (_ONES * np.uint64(writing.QUOTE)), word ^ (_ONES * np.uint64(writing.BACKSLASH))
    found = ((quote - _ONES) & ~quote) | ((backslash - _ONES) & ~backslash) | ((word - _ONES * np.uint64(32)) & ~word)
    return found & _HIGHS != np.uint64(0)


@inlined
def _copy_plain(b, p, n, out, o):
    """Copy a string, and return whether none of its bytes has to be escaped; if one has, not all may be copied."""
    if n < _WORD:
        for i in range(n):
            c = b[p + i]
            if c < 32 or c == writing.QUOTE or c == writing.BACKSLASH:
                return False
            out[o + i] = c
        return True
    at = np.uint64(0)
    while at < n:
        # the last word overlaps the one before
        start = min(at, n - _WORD)
        word = writing.load_word(b, p + start)
        if _has_escapes(word):
            return False
        writing.store_word(word, out, o + start)
        at += _WORD
    return True


@callee
def _escape(b, p, n, out, o, cap):
    if cap - o < 6 * n + 2 and cap - o < _escaped(b, p, n) + 2:
        return np.int64(wire.SPACE)
    out[o] = writing.QUOTE
    o += 1
    for i in range(n):
        c = b[p + i]
        if c == writing.QUOTE or c == writing.BACKSLASH:
            out[o] = writing.BACKSLASH
            out[o + 1] = c
            o += 2
        elif c >= 32:
            out[o] = c
            o += 1
        else:
            out[o] = writing.BACKSLASH
            short = np.uint8(0)
            if c == 8:
                short = np.uint8(98)
            elif c == 9:
                short = np.uint8(116)
            elif c == 10:
                short = np.uint8(110)
            elif c == 12:
                short = np.uint8(102)
            elif c == 13:
                short = np.uint8(114)
            if short:
                out[o + 1] = short
                o += 2
            else:
                out[o + 1] = 117
                out[o + 2] = writing.ZERO
                out[o + 3] = writing.ZERO
                out[o + 4] = writing.HEX[c >> 4]
                out[o + 5] = writing.HEX[c & 15]
                o += 6
    out[o] = writing.QUOTE
    return np.int64(o + 1)


@inlined
def json_string(b, p, n, out, o, cap):
    """Write a JSON string (RFC 8259 §7): UTF-8 unchanged; control characters, quotes and backslashes escaped."""
    # most strings need no escapes
    if cap - o >= n + 2 and _copy_plain(b, np.uint64(p), np.uint64(n), out, np.uint64(o + 1)):
        out[o] = writing.QUOTE
        out[o + n + 1] = writing.QUOTE
        return np.int64(o + n + 2)
    return _escape(b, p, n, out, o, cap)


@callee
def _base64(b, p, n, out, o):
    i = 0
    while i + 3 <= n:
        v = (np.int64(b[p + i]) << 16) | (np.int64(b[p + i + 1]) << 8) | np.int64(b[p + i + 2])
        for k in range(4):
            out[o + k] = _BASE64[(v >> (18 - 6 * k)) & 63]
        o += 4
        i += 3
    if i < n:
        v = np.int64(b[p + i]) << 16
        if i + 1 < n:
            v |= np.int64(b[p + i + 1]) << 8
        out[o] = _BASE64[(v >> 18) & 63]
        out[o + 1] = _BASE64[(v >> 12) & 63]
        out[o + 2] = _BASE64[(v >> 6) & 63] if i + 1 < n else np.uint8(61)
        out[o + 3] = np.uint8(61)
        o += 4
    return o


@callee
def _number(bits, digits, out, o, cap):
    """Write the float with these bits.

    :param digits: how many bits of the significand are stored: 52 or 23.
    """
    if cap - o < 64:
        return np.int64(wire.SPACE)
    infinite = (np.int64(2047) << 52) if digits == 52 else (np.int64(255) << 23)
    if bits & infinite == infinite:
        if bits & ((np.int64(1) << digits) - 1):
            return writing.quoted(writing.NAN, out, o, cap)
        sign = (bits >> (63 if digits == 52 else 31)) & 1
        return writing.quoted(writing.MINUS_INFINITY if sign else writing.INFINITY, out, o, cap)
    return np.int64(write_shortest(bits, digits, out, o))


@callee
def _object(b, p, n, out, o, cap):
    """Write an hstore as an object; for its layout, see :mod:`to_avro`."""
    end = p + n
    count = i32(b, p) if n >= 4 else np.int64(-1)
    if count < 0 or count > n:
        return np.int64(wire.MALFORMED)
    p += 4
    if cap - o < 2:
        return np.int64(wire.SPACE)
    out[o] = writing.OPEN
    o += 1
    for i in range(2 * count):
        length = i32(b, p) if end - p >= 4 else np.int64(-2)
        p += 4
        is_value = i % 2 == 1
        if length < (-1 if is_value else 0) or length > end - p:
            return np.int64(wire.MALFORMED)
        if cap - o < 8:
            return np.int64(wire.SPACE)
        if i > 0:
            out[o] = writing.COLON if is_value else writing.COMMA
            o += 1
        if length == -1:
            o = writing.literal(writing.NULL, out, o, cap)
            continue
        o = json_string(b, p, length, out, o, cap)
        if o < 0:
            return np.int64(o)
        p += length
    if cap - o < 1:
        return np.int64(wire.SPACE)
    out[o] = writing.CLOSE
    return np.int64(o + 1) if p == end else np.int64(wire.MALFORMED)


@callee
def _numbers(width, b, p, n, out, o, cap):
    """Write a vector or halfvec as an array; for its layout, see :mod:`to_avro`."""
    count = i16(b, p) if n >= 4 else np.int64(-1)
    if count < 0 or n != 4 + width * count:
        return np.int64(wire.MALFORMED)
    if cap - o < 2:
        return np.int64(wire.SPACE)
    out[o] = writing.OPEN_ARRAY
    o += 1
    for i in range(count):
        if cap - o < 1:
            return np.int64(wire.SPACE)
        if i > 0:
            out[o] = writing.COMMA
            o += 1
        at = p + 4 + width * i
        o = _number(u32(b, at) if width == 4 else half(u16(b, at)), 23, out, o, cap)
        if o < 0:
            return np.int64(o)
    if cap - o < 1:
        return np.int64(wire.SPACE)
    out[o] = writing.CLOSE_ARRAY
    return np.int64(o + 1)


@callee
def _is_json(b, p, n):
    """Whether a text of ST_AsGeoJSON is JSON: it writes coordinates that are NaN or infinite as they are
    (lwprint_double, liblwgeom/lwprint.c of PostGIS)."""
    for i in range(p + 1, p + n):
        if b[i] in (78, 110, 73, 105) and b[i - 1] in (writing.OPEN_ARRAY, writing.COMMA, writing.MINUS):  # N, n, I, i
            return False
    return n > 0


@callee
def _numeric(op, arg, b, p, n, out, o, cap):
    if is_malformed(b, p, n):
        return np.int64(wire.MALFORMED)
    sign = u16(b, p + 4)
    if sign == wire.NUMERIC_NAN:
        return writing.quoted(writing.NAN, out, o, cap)
    if sign == wire.NUMERIC_PINF:
        return writing.quoted(writing.INFINITY, out, o, cap)
    if sign == wire.NUMERIC_NINF:
        return writing.quoted(writing.MINUS_INFINITY, out, o, cap)
    if cap - o < text_size(b, p) + 2:
        return np.int64(wire.SPACE)
    if op == wire.OP_NUMERIC_TEXT and arg == 1:
        return np.int64(write_text(b, p, out, o))
    out[o] = writing.QUOTE
    o = write_text(b, p, out, o + 1)
    out[o] = writing.QUOTE
    return np.int64(o + 1)


@callee
def _less_common(op, arg, b, p, n, out, o, cap):
    """Write a value of the types that :func:`json_value` does not handle itself."""
    if op == wire.OP_TEXT or op == wire.OP_JSONB:
        if op == wire.OP_JSONB:
            if n < 1 or b[p] != 1:
                return np.int64(wire.MALFORMED)
            p += 1
            n -= 1
        if arg == 0:
            return json_string(b, p, n, out, o, cap)
        if arg == wire.GEOJSON and not _is_json(b, p, n):
            return np.int64(wire.NO_REPRESENTATION)
        if cap - o < n:
            return np.int64(wire.SPACE)
        return np.int64(writing.copy_bytes(b, p, n, out, o))
    if op == wire.OP_HEX:
        if cap - o < 2 * n + 2:
            return np.int64(wire.SPACE)
        out[o] = writing.QUOTE
        for i in range(n):
            out[o + 1 + 2 * i] = _UPPER_HEX[b[p + i] >> 4]
            out[o + 2 + 2 * i] = _UPPER_HEX[b[p + i] & 15]
        o += 1 + 2 * n
        out[o] = writing.QUOTE
        return np.int64(o + 1)
    if op == wire.OP_MAP:
        return _object(b, p, n, out, o, cap)
    if op == wire.OP_FLOATS:
        return _numbers(arg, b, p, n, out, o, cap)
    if op == wire.OP_DOUBLE:
        if is_malformed(b, p, n):
            return np.int64(wire.MALFORMED)
        code, number = nearest_double(b, p, out, o, cap)
        if code < 0:
            return np.int64(code)
        return _number(bits_of(number), 52, out, o, cap)
    if op == wire.OP_BYTEA:
        if cap - o < (n + 2) // 3 * 4 + 2:
            return np.int64(wire.SPACE)
        out[o] = writing.QUOTE
        o = _base64(b, p, n, out, o + 1)
        out[o] = writing.QUOTE
        return np.int64(o + 1)
    if cap - o < 96:
        return np.int64(wire.SPACE)
    if op == wire.OP_INT2:
        return np.int64(writing.integer(i16(b, p), out, o)) if n == 2 else np.int64(wire.MALFORMED)
    if op == wire.OP_FLOAT4 or op == wire.OP_FLOAT8:
        if n != (4 if op == wire.OP_FLOAT4 else 8):
            return np.int64(wire.MALFORMED)
        return _number(u32(b, p), 23, out, o, cap) if n == 4 else _number(i64(b, p), 52, out, o, cap)
    if op == wire.OP_UUID:
        if n != 16:
            return np.int64(wire.MALFORMED)
        out[o] = writing.QUOTE
        o = uuid(b, p, out, o + 1)
        out[o] = writing.QUOTE
        return np.int64(o + 1)
    if op == wire.OP_INET:
        if inet_is_malformed(b, p, n):
            return np.int64(wire.MALFORMED)
        out[o] = writing.QUOTE
        o = inet(b, p, out, o + 1)
        out[o] = writing.QUOTE
        return np.int64(o + 1)
    if op == wire.OP_UINT32:
        return np.int64(writing.integer(u32(b, p), out, o)) if n == 4 else np.int64(wire.MALFORMED)
    if op == wire.OP_UINT32_TEXT:
        if n != 4:
            return np.int64(wire.MALFORMED)
        out[o] = writing.QUOTE
        o = writing.unsigned(np.uint64(u32(b, p)), out, o + 1)
        out[o] = writing.QUOTE
        return np.int64(o + 1)
    if op == wire.OP_UINT64:
        return np.int64(writing.unsigned(np.uint64(i64(b, p)), out, o)) if n == 8 else np.int64(wire.MALFORMED)
    if op == wire.OP_MONEY:
        if n != 8:
            return np.int64(wire.MALFORMED)
        out[o] = writing.QUOTE
        o = scaled(i64(b, p), arg, out, o + 1)
        out[o] = writing.QUOTE
        return np.int64(o + 1)
    if op == wire.OP_TIMETZ or op == wire.OP_INTERVAL:
        return quoted_temporal(op, b, p, n, out, o, cap)
    if op == wire.OP_ISO:
        return quoted_temporal(arg, b, p, n, out, o, cap)
    return np.int64(wire.MALFORMED)


@inlined
def json_value(op, arg, b, p, n, out, o, cap):
    """Write one non-null value as JSON. The most frequent types are handled here, the others in a function."""
    if op == wire.OP_TEXT and arg == 0:
        return json_string(b, p, n, out, o, cap)
    if op == wire.OP_DECIMAL or op == wire.OP_NUMERIC_TEXT:
        return _numeric(op, arg, b, p, n, out, o, cap)
    if cap - o < 96:
        return np.int64(wire.SPACE)
    if op == wire.OP_INT4:
        return np.int64(writing.integer(i32(b, p), out, o)) if n == 4 else np.int64(wire.MALFORMED)
    if op == wire.OP_INT8:
        return np.int64(writing.integer(i64(b, p), out, o)) if n == 8 else np.int64(wire.MALFORMED)
    if op == wire.OP_DATE or op == wire.OP_TIME or op == wire.OP_TIMESTAMP or op == wire.OP_TIMESTAMPTZ:
        return quoted_moment(op, b, p, n, out, o, cap)
    if op == wire.OP_BOOL:
        if n != 1 or b[p] > 1:
            return np.int64(wire.MALFORMED)
        return np.int64(writing.boolean(b[p] == 1, out, o))
    return _less_common(op, arg, b, p, n, out, o, cap)
