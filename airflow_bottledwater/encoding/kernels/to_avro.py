"""Writes single values in Avro's binary encoding
(https://avro.apache.org/docs/1.12.0/specification/#binary-encoding)."""

from __future__ import annotations

import numpy as np

from airflow_bottledwater.compiled import callee, inlined
from airflow_bottledwater.encoding import wire
from airflow_bottledwater.encoding.kernels import writing
from airflow_bottledwater.encoding.kernels.floats import bits_of, half
from airflow_bottledwater.encoding.kernels.numeric import (
    bit_length,
    is_malformed,
    nearest_double,
    text_size,
    write_decimal,
    write_text,
)
from airflow_bottledwater.encoding.kernels.reading import i16, i32, i64, u16, u32
from airflow_bottledwater.encoding.kernels.text import inet, inet_is_malformed, quoted_temporal, uuid


@callee
def _map(b, p, n, out, o, cap):
    """Write an hstore as a map of one block (https://avro.apache.org/docs/1.12.0/specification/#maps-1).

    Its layout is that of hstore_send (contrib/hstore/hstore_io.c): int32 number of pairs; for each, int32 length and
    key, int32 length (-1: NULL) and value.
    """
    end = p + n
    count = i32(b, p) if n >= 4 else np.int64(-1)
    if count < 0 or count > n:
        return np.int64(wire.MALFORMED)
    p += 4
    if cap - o < 32:
        return np.int64(wire.SPACE)
    if count > 0:
        o = writing.varint(count, out, o)
    for i in range(2 * count):
        length = i32(b, p) if end - p >= 4 else np.int64(-2)
        p += 4
        is_value = i % 2 == 1
        if length < (-1 if is_value else 0) or length > end - p:
            return np.int64(wire.MALFORMED)
        if cap - o < length + 32:
            return np.int64(wire.SPACE)
        if is_value:
            out[o] = 0 if length == -1 else 2
            o += 1
        if length >= 0:
            o = writing.copy_bytes(b, p, length, out, writing.varint(length, out, o))
            p += length
    out[o] = 0
    return np.int64(o + 1) if p == end else np.int64(wire.MALFORMED)


@callee
def _floats(width, b, p, n, out, o, cap):
    """Write a vector or halfvec as an array of floats. The layout is that of vector_send and halfvec_send (pgvector,
    src/vector.c, src/halfvec.c): int16 dimensions, int16 unused, the numbers."""
    count = i16(b, p) if n >= 4 else np.int64(-1)
    if count < 0 or n != 4 + width * count:
        return np.int64(wire.MALFORMED)
    if cap - o < 4 * count + 16:
        return np.int64(wire.SPACE)
    if count > 0:
        o = writing.varint(count, out, o)
    for i in range(count):
        at = p + 4 + width * i
        bits = u32(b, at) if width == 4 else half(u16(b, at))
        for k in range(4):
            out[o + k] = np.uint8((bits >> (8 * k)) & 255)
        o += 4
    out[o] = 0
    return np.int64(o + 1)


@callee
def _less_common(op, arg, b, p, n, out, o, cap):
    """Write a value of the types that :func:`avro_value` does not handle itself; it has made sure that 64 bytes fit."""
    if op == wire.OP_DECIMAL:
        if is_malformed(b, p, n):
            return np.int64(wire.MALFORMED)
        return write_decimal(b, p, arg, out, o, cap)
    if op == wire.OP_NUMERIC_TEXT:
        if is_malformed(b, p, n):
            return np.int64(wire.MALFORMED)
        sign = u16(b, p + 4)
        if sign == wire.NUMERIC_NAN:
            return writing.literal(writing.NAN, out, writing.varint(np.int64(3), out, o), cap)
        if sign == wire.NUMERIC_PINF:
            return writing.literal(writing.INFINITY, out, writing.varint(np.int64(8), out, o), cap)
        if sign == wire.NUMERIC_NINF:
            return writing.literal(writing.MINUS_INFINITY, out, writing.varint(np.int64(9), out, o), cap)
        if cap - o < text_size(b, p) + 10:
            return np.int64(wire.SPACE)
        end = write_text(b, p, out, o + 10)
        size = end - (o + 10)
        start = writing.varint(np.int64(size), out, o)
        for i in range(size):
            out[start + i] = out[o + 10 + i]
        return np.int64(start + size)
    if op == wire.OP_JSONB:
        if n < 1 or b[p] != 1:
            return np.int64(wire.MALFORMED)
        if cap - o < n + 10:
            return np.int64(wire.SPACE)
        return np.int64(writing.copy_bytes(b, p + 1, n - 1, out, writing.varint(np.int64(n - 1), out, o)))
    if op == wire.OP_MAP:
        return _map(b, p, n, out, o, cap)
    if op == wire.OP_FLOATS:
        return _floats(arg, b, p, n, out, o, cap)
    if op == wire.OP_DOUBLE:
        if is_malformed(b, p, n):
            return np.int64(wire.MALFORMED)
        code, number = nearest_double(b, p, out, o, cap)
        if code < 0:
            return np.int64(code)
        bits = bits_of(number)
        for i in range(8):
            out[o + i] = np.uint8((bits >> (8 * i)) & 255)
        return np.int64(o + 8)
    if op == wire.OP_INT2:
        return np.int64(writing.varint(i16(b, p), out, o)) if n == 2 else np.int64(wire.MALFORMED)
    if op == wire.OP_FLOAT4 or op == wire.OP_FLOAT8:
        width = 4 if op == wire.OP_FLOAT4 else 8
        if n != width:
            return np.int64(wire.MALFORMED)
        for i in range(width):
            out[o + i] = b[p + width - 1 - i]
        return np.int64(o + width)
    if op == wire.OP_DATE:
        if n != 4:
            return np.int64(wire.MALFORMED)
        d = i32(b, p)
        if d != wire.DATE_INFINITY and d != wire.DATE_MINUS_INFINITY:
            d += wire.EPOCH_DAYS
        return np.int64(writing.varint(d, out, o))
    if op == wire.OP_UUID:
        if n != 16:
            return np.int64(wire.MALFORMED)
        return np.int64(uuid(b, p, out, writing.varint(np.int64(36), out, o)))
    if op == wire.OP_INET:
        if inet_is_malformed(b, p, n):
            return np.int64(wire.MALFORMED)
        end = inet(b, p, out, o + 1)
        out[o] = np.uint8(2 * (end - o - 1))  # shorter than 64: one byte
        return np.int64(end)
    if op == wire.OP_UINT32:
        return np.int64(writing.varint(u32(b, p), out, o)) if n == 4 else np.int64(wire.MALFORMED)
    if op == wire.OP_UINT32_TEXT:
        if n != 4:
            return np.int64(wire.MALFORMED)
        end = writing.unsigned(np.uint64(u32(b, p)), out, o + 1)
        out[o] = np.uint8(2 * (end - o - 1))
        return np.int64(end)
    if op == wire.OP_UINT64:
        if n != 8:
            return np.int64(wire.MALFORMED)
        v = i64(b, p)
        return np.int64(writing.varint(v, out, o)) if v >= 0 else np.int64(wire.NO_REPRESENTATION)
    if op == wire.OP_MONEY:
        if n != 8:
            return np.int64(wire.MALFORMED)
        v = i64(b, p)
        width = (bit_length(np.uint64(0) - np.uint64(v) if v < 0 else np.uint64(v)) + 8) // 8
        o = writing.varint(np.int64(width), out, o)
        for i in range(width - 1, -1, -1):
            out[o + i] = np.uint8(v & 255)
            v >>= 8
        return np.int64(o + width)
    if op == wire.OP_TIMETZ:
        if n != 12:
            return np.int64(wire.MALFORMED)
        # in PostgreSQL, the zone is an offset west of Greenwich (timetz_out, src/backend/utils/adt/date.c)
        return np.int64(writing.varint(-i32(b, p + 8), out, writing.varint(i64(b, p), out, o)))
    if op == wire.OP_ISO:
        if cap - o < 96:
            return np.int64(wire.SPACE)
        end = quoted_temporal(arg, b, p, n, out, o, cap)
        if end < 0:
            return np.int64(end)
        # its size takes the place of the first quote: it is shorter than 64 bytes
        out[o] = np.uint8(2 * (end - o - 2))
        return np.int64(end - 1)
    if op == wire.OP_INTERVAL:
        if n != 16:
            return np.int64(wire.MALFORMED)
        o = writing.varint(i32(b, p + 12), out, o)
        return np.int64(writing.varint(i64(b, p), out, writing.varint(i32(b, p + 8), out, o)))
    return np.int64(wire.MALFORMED)


@inlined
def avro_value(op, arg, b, p, n, out, o, cap):
    """Write one non-null value, without its union branch. The most frequent types are handled here, the others in a
    function."""
    if op == wire.OP_TEXT or op == wire.OP_BYTEA or op == wire.OP_HEX:
        if cap - o < n + 10:
            return np.int64(wire.SPACE)
        return np.int64(writing.copy_bytes(b, p, n, out, writing.varint(np.int64(n), out, o)))
    if cap - o < 64:
        return np.int64(wire.SPACE)
    if op == wire.OP_INT4:
        return np.int64(writing.varint(i32(b, p), out, o)) if n == 4 else np.int64(wire.MALFORMED)
    if op == wire.OP_INT8 or op == wire.OP_TIME:
        return np.int64(writing.varint(i64(b, p), out, o)) if n == 8 else np.int64(wire.MALFORMED)
    if op == wire.OP_TIMESTAMP or op == wire.OP_TIMESTAMPTZ:
        if n != 8:
            return np.int64(wire.MALFORMED)
        t = i64(b, p)
        if t != wire.TIMESTAMP_INFINITY and t != wire.TIMESTAMP_MINUS_INFINITY:
            # the largest number stands for infinity
            if t >= wire.TIMESTAMP_INFINITY - wire.EPOCH_MICROS:
                return np.int64(wire.NO_REPRESENTATION)
            t += wire.EPOCH_MICROS
        return np.int64(writing.varint(t, out, o))
    if op == wire.OP_BOOL:
        if n != 1 or b[p] > 1:
            return np.int64(wire.MALFORMED)
        out[o] = b[p]
        return np.int64(o + 1)
    return _less_common(op, arg, b, p, n, out, o, cap)
