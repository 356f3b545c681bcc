"""Writes single values in Avro's binary encoding
(https://avro.apache.org/docs/1.12.0/specification/#binary-encoding)."""

from __future__ import annotations

import numpy as np

from airflow_bottledwater.compiled import callee, inlined
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
from airflow_bottledwater.encoding.kernels.writing import (
    INFINITY,
    MINUS_INFINITY,
    NAN,
    copy_bytes,
    literal,
    unsigned,
    varint,
)
from airflow_bottledwater.encoding.wire import (
    DATE_INFINITY,
    DATE_MINUS_INFINITY,
    EPOCH_DAYS,
    EPOCH_MICROS,
    MALFORMED,
    NO_REPRESENTATION,
    NUMERIC_NAN,
    NUMERIC_NINF,
    NUMERIC_PINF,
    OP_BOOL,
    OP_BYTEA,
    OP_DATE,
    OP_DECIMAL,
    OP_DOUBLE,
    OP_FLOAT4,
    OP_FLOAT8,
    OP_FLOATS,
    OP_HEX,
    OP_INET,
    OP_INT2,
    OP_INT4,
    OP_INT8,
    OP_INTERVAL,
    OP_ISO,
    OP_JSONB,
    OP_MAP,
    OP_MONEY,
    OP_NUMERIC_TEXT,
    OP_TEXT,
    OP_TIME,
    OP_TIMESTAMP,
    OP_TIMESTAMPTZ,
    OP_TIMETZ,
    OP_UINT32,
    OP_UINT32_TEXT,
    OP_UINT64,
    OP_UUID,
    SPACE,
    TIMESTAMP_INFINITY,
    TIMESTAMP_MINUS_INFINITY,
)


@callee
def _map(b, p, n, out, o, cap):
    """Write an hstore as a map of one block (https://avro.apache.org/docs/1.12.0/specification/#maps-1).

    Its layout is that of hstore_send (contrib/hstore/hstore_io.c): int32 number of pairs; for each, int32 length and
    key, int32 length (-1: NULL) and value.
    """
    end = p + n
    count = i32(b, p) if n >= 4 else np.int64(-1)
    if count < 0 or count > n:
        return np.int64(MALFORMED)
    p += 4
    if cap - o < 32:
        return np.int64(SPACE)
    if count > 0:
        o = varint(count, out, o)
    for i in range(2 * count):
        length = i32(b, p) if end - p >= 4 else np.int64(-2)
        p += 4
        is_value = i % 2 == 1
        if length < (-1 if is_value else 0) or length > end - p:
            return np.int64(MALFORMED)
        if cap - o < length + 32:
            return np.int64(SPACE)
        if is_value:
            out[o] = 0 if length == -1 else 2
            o += 1
        if length >= 0:
            o = copy_bytes(b, p, length, out, varint(length, out, o))
            p += length
    out[o] = 0
    return np.int64(o + 1) if p == end else np.int64(MALFORMED)


@callee
def _floats(width, b, p, n, out, o, cap):
    """Write a vector or halfvec as an array of floats. The layout is that of vector_send and halfvec_send (pgvector,
    src/vector.c, src/halfvec.c): int16 dimensions, int16 unused, the numbers."""
    count = i16(b, p) if n >= 4 else np.int64(-1)
    if count < 0 or n != 4 + width * count:
        return np.int64(MALFORMED)
    if cap - o < 4 * count + 16:
        return np.int64(SPACE)
    if count > 0:
        o = varint(count, out, o)
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
    if op == OP_DECIMAL:
        if is_malformed(b, p, n):
            return np.int64(MALFORMED)
        return write_decimal(b, p, arg, out, o, cap)
    if op == OP_NUMERIC_TEXT:
        if is_malformed(b, p, n):
            return np.int64(MALFORMED)
        sign = u16(b, p + 4)
        if sign == NUMERIC_NAN:
            return literal(NAN, out, varint(np.int64(3), out, o), cap)
        if sign == NUMERIC_PINF:
            return literal(INFINITY, out, varint(np.int64(8), out, o), cap)
        if sign == NUMERIC_NINF:
            return literal(MINUS_INFINITY, out, varint(np.int64(9), out, o), cap)
        if cap - o < text_size(b, p) + 10:
            return np.int64(SPACE)
        end = write_text(b, p, out, o + 10)
        size = end - (o + 10)
        start = varint(np.int64(size), out, o)
        for i in range(size):
            out[start + i] = out[o + 10 + i]
        return np.int64(start + size)
    if op == OP_JSONB:
        if n < 1 or b[p] != 1:
            return np.int64(MALFORMED)
        if cap - o < n + 10:
            return np.int64(SPACE)
        return np.int64(copy_bytes(b, p + 1, n - 1, out, varint(np.int64(n - 1), out, o)))
    if op == OP_MAP:
        return _map(b, p, n, out, o, cap)
    if op == OP_FLOATS:
        return _floats(arg, b, p, n, out, o, cap)
    if op == OP_DOUBLE:
        if is_malformed(b, p, n):
            return np.int64(MALFORMED)
        code, number = nearest_double(b, p, out, o, cap)
        if code < 0:
            return np.int64(code)
        bits = bits_of(number)
        for i in range(8):
            out[o + i] = np.uint8((bits >> (8 * i)) & 255)
        return np.int64(o + 8)
    if op == OP_INT2:
        return np.int64(varint(i16(b, p), out, o)) if n == 2 else np.int64(MALFORMED)
    if op == OP_FLOAT4 or op == OP_FLOAT8:
        width = 4 if op == OP_FLOAT4 else 8
        if n != width:
            return np.int64(MALFORMED)
        for i in range(width):
            out[o + i] = b[p + width - 1 - i]
        return np.int64(o + width)
    if op == OP_DATE:
        if n != 4:
            return np.int64(MALFORMED)
        d = i32(b, p)
        if d != DATE_INFINITY and d != DATE_MINUS_INFINITY:
            d += EPOCH_DAYS
        return np.int64(varint(d, out, o))
    if op == OP_UUID:
        if n != 16:
            return np.int64(MALFORMED)
        return np.int64(uuid(b, p, out, varint(np.int64(36), out, o)))
    if op == OP_INET:
        if inet_is_malformed(b, p, n):
            return np.int64(MALFORMED)
        end = inet(b, p, out, o + 1)
        out[o] = np.uint8(2 * (end - o - 1))  # shorter than 64: one byte
        return np.int64(end)
    if op == OP_UINT32:
        return np.int64(varint(u32(b, p), out, o)) if n == 4 else np.int64(MALFORMED)
    if op == OP_UINT32_TEXT:
        if n != 4:
            return np.int64(MALFORMED)
        end = unsigned(np.uint64(u32(b, p)), out, o + 1)
        out[o] = np.uint8(2 * (end - o - 1))
        return np.int64(end)
    if op == OP_UINT64:
        if n != 8:
            return np.int64(MALFORMED)
        v = i64(b, p)
        return np.int64(varint(v, out, o)) if v >= 0 else np.int64(NO_REPRESENTATION)
    if op == OP_MONEY:
        if n != 8:
            return np.int64(MALFORMED)
        v = i64(b, p)
        width = (bit_length(np.uint64(0) - np.uint64(v) if v < 0 else np.uint64(v)) + 8) // 8
        o = varint(np.int64(width), out, o)
        for i in range(width - 1, -1, -1):
            out[o + i] = np.uint8(v & 255)
            v >>= 8
        return np.int64(o + width)
    if op == OP_TIMETZ:
        if n != 12:
            return np.int64(MALFORMED)
        # in PostgreSQL, the zone is an offset west of Greenwich (timetz_out, src/backend/utils/adt/date.c)
        return np.int64(varint(-i32(b, p + 8), out, varint(i64(b, p), out, o)))
    if op == OP_ISO:
        if cap - o < 96:
            return np.int64(SPACE)
        end = quoted_temporal(arg, b, p, n, out, o, cap)
        if end < 0:
            return np.int64(end)
        # its size takes the place of the first quote: it is shorter than 64 bytes
        out[o] = np.uint8(2 * (end - o - 2))
        return np.int64(end - 1)
    if op == OP_INTERVAL:
        if n != 16:
            return np.int64(MALFORMED)
        o = varint(i32(b, p + 12), out, o)
        return np.int64(varint(i64(b, p), out, varint(i32(b, p + 8), out, o)))
    return np.int64(MALFORMED)


@inlined
def avro_value(op, arg, b, p, n, out, o, cap):
    """Write one non-null value, without its union branch. The most frequent types are handled here, the others in a
    function."""
    if op == OP_TEXT or op == OP_BYTEA or op == OP_HEX:
        if cap - o < n + 10:
            return np.int64(SPACE)
        return np.int64(copy_bytes(b, p, n, out, varint(np.int64(n), out, o)))
    if cap - o < 64:
        return np.int64(SPACE)
    if op == OP_INT4:
        return np.int64(varint(i32(b, p), out, o)) if n == 4 else np.int64(MALFORMED)
    if op == OP_INT8 or op == OP_TIME:
        return np.int64(varint(i64(b, p), out, o)) if n == 8 else np.int64(MALFORMED)
    if op == OP_TIMESTAMP or op == OP_TIMESTAMPTZ:
        if n != 8:
            return np.int64(MALFORMED)
        t = i64(b, p)
        if t != TIMESTAMP_INFINITY and t != TIMESTAMP_MINUS_INFINITY:
            # the largest number stands for infinity
            if t >= TIMESTAMP_INFINITY - EPOCH_MICROS:
                return np.int64(NO_REPRESENTATION)
            t += EPOCH_MICROS
        return np.int64(varint(t, out, o))
    if op == OP_BOOL:
        if n != 1 or b[p] > 1:
            return np.int64(MALFORMED)
        out[o] = b[p]
        return np.int64(o + 1)
    return _less_common(op, arg, b, p, n, out, o, cap)
