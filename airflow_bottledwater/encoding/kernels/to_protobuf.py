"""Writes values in Protocol Buffers' binary encoding (https://protobuf.dev/programming-guides/encoding/).

A field's tag is written by the caller; what has a length begins with it. Values that consist of others are messages of
:mod:`airflow_bottledwater.encoding.protobuf`.
"""

from __future__ import annotations

import numpy as np

from airflow_bottledwater.compiled import callee, inlined
from airflow_bottledwater.encoding import wire
from airflow_bottledwater.encoding.kernels import writing
from airflow_bottledwater.encoding.kernels.floats import bits_of, half
from airflow_bottledwater.encoding.kernels.nested import array_fits, array_is_malformed
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

#: tags: the numbers of fields 1 to 5, shifted by three bits, and how they are written: with a length, or as a number
_FIRST, _SECOND = 0x0A, 0x12
_LOWER_INCLUSIVE, _UPPER_INCLUSIVE, _EMPTY = 0x18, 0x20, 0x28


@callee
def size_varint(v, out, o):
    """Write a number that is taken as unsigned, seven bits in a byte."""
    z, at = np.uint64(v), np.uint64(o)
    while z >= np.uint64(128):
        out[at] = np.uint8((z & np.uint64(127)) | np.uint64(128))
        z >>= np.uint64(7)
        at += np.uint64(1)
    out[at] = np.uint8(z)
    return np.int64(at) + 1


@callee
def measured(start, end, out):
    """Write the length of what lies behind the byte at ``start``, which was left for it; returns the new end. For a
    length that needs more bytes, there must be room for nine more."""
    length = end - start - 1
    if length < 128:
        out[start] = np.uint8(length)
        return np.int64(end)
    more, rest = 0, length >> 7
    while rest > 0:
        more += 1
        rest >>= 7
    at = end - 1
    while at > start:
        out[at + more] = out[at]
        at -= 1
    size_varint(length, out, start)
    return np.int64(end + more)


@callee
def _pairs(b, p, n, out, o, cap):
    """Write an hstore as a message of pairs; for its layout, see :mod:`to_avro`."""
    begin, end = o, p + n
    count = i32(b, p) if n >= 4 else np.int64(-1)
    if count < 0 or count > n:
        return np.int64(wire.MALFORMED)
    p += 4
    if cap - o < 32:
        return np.int64(wire.SPACE)
    o += 1
    pair = o
    for i in range(2 * count):
        length = i32(b, p) if end - p >= 4 else np.int64(-2)
        p += 4
        is_value = i % 2 == 1
        if length < (-1 if is_value else 0) or length > end - p:
            return np.int64(wire.MALFORMED)
        if cap - o < length + 64:
            return np.int64(wire.SPACE)
        if not is_value:
            out[o] = _FIRST
            pair = o + 1
            o += 2
        if length >= 0:
            out[o] = _SECOND if is_value else _FIRST
            o = writing.copy_bytes(b, p, length, out, size_varint(length, out, o + 1))
            p += length
        if is_value:
            o = measured(pair, o, out)
    if p != end:
        return np.int64(wire.MALFORMED)
    return measured(begin, o, out) if cap - o >= 16 else np.int64(wire.SPACE)


@callee
def _packed(width, b, p, n, out, o, cap):
    """Write a vector or halfvec as a message with packed floats; for its layout, see :mod:`to_avro`."""
    count = i16(b, p) if n >= 4 else np.int64(-1)
    if count < 0 or n != 4 + width * count:
        return np.int64(wire.MALFORMED)
    if cap - o < 4 * count + 32:
        return np.int64(wire.SPACE)
    begin = o
    o += 1
    if count > 0:
        out[o] = _FIRST
        o = size_varint(4 * count, out, o + 1)
    for i in range(count):
        at = p + 4 + width * i
        bits = u32(b, at) if width == 4 else half(u16(b, at))
        for k in range(4):
            out[o + k] = np.uint8((bits >> (8 * k)) & 255)
        o += 4
    return measured(begin, o, out)


@callee
def _numeric(b, p, n, out, o, cap):
    if is_malformed(b, p, n):
        return np.int64(wire.MALFORMED)
    sign = u16(b, p + 4)
    if sign == wire.NUMERIC_NAN:
        return writing.literal(writing.NAN, out, size_varint(3, out, o), cap)
    if sign == wire.NUMERIC_PINF:
        return writing.literal(writing.INFINITY, out, size_varint(8, out, o), cap)
    if sign == wire.NUMERIC_NINF:
        return writing.literal(writing.MINUS_INFINITY, out, size_varint(9, out, o), cap)
    if cap - o < text_size(b, p) + 16:
        return np.int64(wire.SPACE)
    return measured(o, write_text(b, p, out, o + 1), out)


@callee
def _unquoted(o, end, out):
    """The length of a short text in the place of its first quote."""
    if end < 0:
        return np.int64(end)
    out[o] = np.uint8(end - o - 2)
    return np.int64(end - 1)


@callee
def _less_common(op, arg, b, p, n, out, o, cap):
    """Write a value of the types that :func:`protobuf_value` does not handle itself; there is room for 96 bytes."""
    if op == wire.OP_JSONB:
        if n < 1 or b[p] != 1:
            return np.int64(wire.MALFORMED)
        if cap - o < n + 10:
            return np.int64(wire.SPACE)
        return np.int64(writing.copy_bytes(b, p + 1, n - 1, out, size_varint(n - 1, out, o)))
    if op == wire.OP_MAP:
        return _pairs(b, p, n, out, o, cap)
    if op == wire.OP_FLOATS:
        return _packed(arg, b, p, n, out, o, cap)
    if op == wire.OP_FLOAT4 or op == wire.OP_FLOAT8:
        width = 4 if op == wire.OP_FLOAT4 else 8
        if n != width:
            return np.int64(wire.MALFORMED)
        for i in range(width):
            out[o + i] = b[p + width - 1 - i]
        return np.int64(o + width)
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
        return size_varint(i16(b, p), out, o) if n == 2 else np.int64(wire.MALFORMED)
    if op == wire.OP_UINT32:
        return size_varint(u32(b, p), out, o) if n == 4 else np.int64(wire.MALFORMED)
    if op == wire.OP_UINT64:
        return size_varint(i64(b, p), out, o) if n == 8 else np.int64(wire.MALFORMED)
    if op == wire.OP_UUID:
        if n != 16:
            return np.int64(wire.MALFORMED)
        out[o] = np.uint8(36)
        return np.int64(uuid(b, p, out, o + 1))
    if op == wire.OP_INET:
        if inet_is_malformed(b, p, n):
            return np.int64(wire.MALFORMED)
        return measured(o, inet(b, p, out, o + 1), out)
    if op == wire.OP_UINT32_TEXT:
        return (
            measured(o, writing.unsigned(np.uint64(u32(b, p)), out, o + 1), out) if n == 4 else np.int64(wire.MALFORMED)
        )
    if op == wire.OP_MONEY:
        return measured(o, scaled(i64(b, p), arg, out, o + 1), out) if n == 8 else np.int64(wire.MALFORMED)
    if op == wire.OP_TIMETZ or op == wire.OP_INTERVAL:
        return _unquoted(o, quoted_temporal(op, b, p, n, out, o, cap), out)
    if op == wire.OP_ISO:
        return _unquoted(o, quoted_temporal(arg, b, p, n, out, o, cap), out)
    return np.int64(wire.MALFORMED)


@inlined
def protobuf_value(op, arg, b, p, n, out, o, cap):
    """Write one non-null value behind its tag. The most frequent types are handled here, the others in a function."""
    if op == wire.OP_TEXT or op == wire.OP_BYTEA or op == wire.OP_HEX:
        if cap - o < n + 10:
            return np.int64(wire.SPACE)
        return np.int64(writing.copy_bytes(b, p, n, out, size_varint(n, out, o)))
    if cap - o < 96:
        return np.int64(wire.SPACE)
    if op == wire.OP_INT4:
        return size_varint(i32(b, p), out, o) if n == 4 else np.int64(wire.MALFORMED)
    if op == wire.OP_INT8:
        return size_varint(i64(b, p), out, o) if n == 8 else np.int64(wire.MALFORMED)
    if op == wire.OP_DATE or op == wire.OP_TIME or op == wire.OP_TIMESTAMP or op == wire.OP_TIMESTAMPTZ:
        return _unquoted(o, quoted_moment(op, b, p, n, out, o, cap), out)
    if op == wire.OP_BOOL:
        if n != 1 or b[p] > 1:
            return np.int64(wire.MALFORMED)
        out[o] = b[p]
        return np.int64(o + 1)
    if op == wire.OP_DECIMAL or op == wire.OP_NUMERIC_TEXT:
        return _numeric(b, p, n, out, o, cap)
    return _less_common(op, arg, b, p, n, out, o, cap)


@callee
def _flag(tag, v, out, o):
    """Write a boolean that is not written if it is false."""
    if v:
        out[o] = tag
        out[o + 1] = 1
        return o + 2
    return o


@callee
def message_value(program, node, b, p, n, out, o):
    """Write one non-null value of any type behind its tag; :func:`~.nested.write_value` explains the loop over items.

    :param node: the value's row in the program's table of columns.
    """
    cap, op = out.size, program.columns[node].opcode
    if op < wire.OP_ENUM:
        return protobuf_value(op, program.columns[node].argument, b, p, n, out, o, cap)
    if op == wire.OP_ENUM:
        return protobuf_value(wire.OP_TEXT, 0, b, p, n, out, o, cap)
    if cap - o < 256:
        return np.int64(wire.SPACE)
    begin, end, start = p, p + n, o
    first = program.columns[node].child
    flags = np.int64(0)
    there = np.int64(0)  # attributes that the value has
    o += 1
    if op == wire.OP_ARRAY:
        if array_is_malformed(b, p, n):
            return np.int64(wire.MALFORMED)
        if not array_fits(b, p, program.columns[node].argument):
            return np.int64(wire.NO_REPRESENTATION)
        dimensions = i32(b, p)
        count = np.int64(1 if dimensions > 0 else 0)
        for d in range(dimensions):
            count *= i32(b, p + 12 + 8 * d)
        p += 12 + 8 * dimensions
    elif op == wire.OP_RANGE:
        if n < 1:
            return np.int64(wire.MALFORMED)
        flags = np.int64(b[p])
        p += 1
        count = np.int64(2)
    else:
        there = i32(b, p) if n >= 4 else np.int64(-1)
        if there < 0 or there > n:
            return np.int64(wire.MALFORMED)
        p += 4
        count = there
        if op == wire.OP_RECORD:
            count = program.columns[node].argument
            if there > count or (there < count and not program.shorter):
                return np.int64(wire.CHANGED)
    for i in range(count):
        child = first if op == wire.OP_ARRAY or op == wire.OP_MULTIRANGE else first + i
        if cap - o < 256:
            return np.int64(wire.SPACE)
        length = np.int64(-1)
        if op == wire.OP_RANGE:
            absent = wire.RANGE_EMPTY | (wire.RANGE_LOWER_INFINITE if i == 0 else wire.RANGE_UPPER_INFINITE)
            is_there = flags & absent == 0
        else:
            is_there = op != wire.OP_RECORD or i < there
        if is_there:
            if op == wire.OP_RECORD:
                if end - p < 4:
                    return np.int64(wire.MALFORMED)
                if u32(b, p) != program.columns[child].oid:
                    return np.int64(wire.CHANGED)
                p += 4
            if end - p < 4:
                return np.int64(wire.MALFORMED)
            length = i32(b, p)
            p += 4
            if length < -1 or length > end - p:
                return np.int64(wire.MALFORMED)
        item = o + 1
        if op == wire.OP_ARRAY:
            # a message of its own: an element may be null
            out[o] = _FIRST
            o += 2
        if length >= 0:
            o = writing.copy_name(
                program.names, program.columns[child].name, program.columns[child].name_length, out, o
            )
            o = message_value(program, child, b, p, length, out, o)
            if o < 0:
                return np.int64(o)
            p += length
        elif op == wire.OP_MULTIRANGE:
            return np.int64(wire.MALFORMED)
        if cap - o < 256:
            return np.int64(wire.SPACE)
        if op == wire.OP_ARRAY:
            o = measured(item, o, out)
    if op == wire.OP_RANGE:
        o = _flag(_LOWER_INCLUSIVE, flags & wire.RANGE_LOWER_INCLUSIVE != 0, out, o)
        o = _flag(_UPPER_INCLUSIVE, flags & wire.RANGE_UPPER_INCLUSIVE != 0, out, o)
        o = _flag(_EMPTY, flags & wire.RANGE_EMPTY != 0, out, o)
    elif op == wire.OP_ARRAY and i32(b, begin) > 1:
        out[o] = _SECOND
        sizes = o + 1
        o += 2
        for d in range(i32(b, begin)):
            o = size_varint(i32(b, begin + 12 + 8 * d), out, o)
        o = measured(sizes, o, out)
    if cap - o < 64:
        return np.int64(wire.SPACE)
    return measured(start, o, out) if p == end else np.int64(wire.MALFORMED)
