"""Writes values that consist of others (arrays, composites, ranges), and with :func:`write_value` any value of any
type."""

from __future__ import annotations

import numpy as np

from airflow_bottledwater.compiled import callee, inlined
from airflow_bottledwater.encoding import wire
from airflow_bottledwater.encoding.kernels import writing
from airflow_bottledwater.encoding.kernels.reading import i32, u32
from airflow_bottledwater.encoding.kernels.to_avro import avro_value
from airflow_bottledwater.encoding.kernels.to_json import json_value

_LOWER_INCLUSIVE = np.frombuffer(b',"lower_inclusive":', dtype=np.uint8)
_UPPER_INCLUSIVE = np.frombuffer(b',"upper_inclusive":', dtype=np.uint8)
_EMPTY = np.frombuffer(b',"empty":', dtype=np.uint8)


@callee
def array_is_malformed(b, p, n):
    """Whether an array is not in the layout of array_send (src/backend/utils/adt/arrayfuncs.c): int32 dimensions, flags
    and element type; for each dimension int32 size and lower bound; then the elements, row by row."""
    dimensions = i32(b, p) if n >= 12 else np.int64(-1)
    if dimensions < 0 or dimensions > 6 or n < 12 + 8 * dimensions or (dimensions == 0 and n != 12):
        return True
    count = np.int64(1)
    for d in range(dimensions):
        # an element has at least four bytes
        if i32(b, p + 12 + 8 * d) < 1 or i32(b, p + 12 + 8 * d) > n:
            return True
        count *= i32(b, p + 12 + 8 * d)
        if count > n:
            return True
    return False


@callee
def array_fits(b, p, depth):
    """Whether an array has as many dimensions as declared (or is empty), and every lower bound is 1."""
    dimensions = i32(b, p)
    for d in range(dimensions):
        if i32(b, p + 12 + 8 * d + 4) != 1:
            return False
    return dimensions == 0 or dimensions == depth


@callee
def _array_opens(json, b, p, i, count, out, o):
    """Open the dimensions that begin at element ``i``; in Avro, each is one block of items
    (https://avro.apache.org/docs/1.12.0/specification/#arrays-1)."""
    period = count
    for d in range(i32(b, p)):
        size = i32(b, p + 12 + 8 * d)
        if i % period == 0:
            if json:
                out[o] = writing.OPEN_ARRAY
                o += 1
            else:
                o = writing.varint(size, out, o)
        period //= size
    return o


@callee
def _array_closes(json, b, p, i, out, o):
    """Close the dimensions that end after element ``i``."""
    period = np.int64(1)
    for d in range(i32(b, p) - 1, -1, -1):
        period *= i32(b, p + 12 + 8 * d)
        if (i + 1) % period == 0:
            out[o] = writing.CLOSE_ARRAY if json else 0
            o += 1
    return o


@callee
def _flag(json, word, v, out, o, cap):
    """Write a boolean of a range; in JSON, after its name."""
    if not json:
        out[o] = 1 if v else 0
        return np.int64(o + 1)
    o = writing.literal(word, out, o, cap)
    return np.int64(writing.boolean(v, out, o))


@callee
def _label(program, node, b, p, n, out, o):
    """Write the number of an enum's label (in Avro)."""
    for i in range(program.columns[node].argument):
        label = program.columns[program.columns[node].child + i]
        if label.name_length == n:
            k = 0
            while k < n and program.names[label.name + k] == b[p + k]:
                k += 1
            if k == n:
                return np.int64(writing.varint(np.int64(i), out, o))
    return np.int64(wire.CHANGED)


@inlined
def single_value(program, node, b, p, n, out, o):
    """Write one non-null value that does not consist of others, in either format."""
    opcode, argument = program.columns[node].opcode, program.columns[node].argument
    if program.json:
        return json_value(opcode, argument, b, p, n, out, o, out.size)
    return avro_value(opcode, argument, b, p, n, out, o, out.size)


@callee
def write_value(program, node, b, p, n, out, o):
    """Write one non-null value of any type, without its union branch.

    All values that consist of others are handled by one loop over items, each an int32 length (-1: NULL) and a value:
    the elements of an array, the attributes of a composite (record_send, src/backend/utils/adt/rowtypes.c: int32 count;
    before each its int32 type), the bounds of a range (range_send, rangetypes.c: a byte of flags, then the bounds that
    are finite), the ranges of a multirange (multirange_send, multirangetypes.c: int32 count).

    It recurses only directly, and always with the same types of arguments: numba cannot cache functions that call each
    other in a circle.

    :param node: the value's row in the program's table of columns.
    """
    json, cap = program.json, out.size
    op = program.columns[node].opcode
    if op < wire.OP_ENUM:
        return single_value(program, node, b, p, n, out, o)
    if cap - o < 256:
        return np.int64(wire.SPACE)
    if op == wire.OP_ENUM:
        if json:
            return json_value(wire.OP_TEXT, 0, b, p, n, out, o, cap)
        return _label(program, node, b, p, n, out, o)
    begin, end = p, p + n
    first = program.columns[node].child
    flags = np.int64(0)
    there = np.int64(0)  # attributes that the value has
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
        if count == 0:
            out[o] = writing.OPEN_ARRAY if json else 0
            if json:
                out[o + 1] = writing.CLOSE_ARRAY
            return np.int64(o + 2 if json else o + 1)
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
            # attributes that were added to the type after the value was written are NULL; but if one was dropped since
            # the type became known, the value does not tell which
            count = program.columns[node].argument
            if there > count or (there < count and not program.shorter):
                return np.int64(wire.CHANGED)
        if json:
            out[o] = writing.OPEN_ARRAY if op == wire.OP_MULTIRANGE else writing.OPEN
            o += 1
        elif op == wire.OP_MULTIRANGE and count > 0:
            o = writing.varint(count, out, o)
    for i in range(count):
        child = first if op == wire.OP_ARRAY or op == wire.OP_MULTIRANGE else first + i
        if cap - o < 256 + program.columns[child].name_length:
            return np.int64(wire.SPACE)
        if json:
            if i > 0:
                out[o] = writing.COMMA
                o += 1
            elif op == wire.OP_RANGE:
                out[o] = writing.OPEN
                o += 1
        if op == wire.OP_ARRAY:
            o = _array_opens(json, b, begin, i, count, out, o)
        elif json and op != wire.OP_MULTIRANGE:
            o = writing.copy_bytes(
                program.names, program.columns[child].name, program.columns[child].name_length, out, o
            )
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
        if not json and op != wire.OP_MULTIRANGE:
            out[o] = 0 if length == -1 else 2
            o += 1
        if length >= 0:
            o = write_value(program, child, b, p, length, out, o)
            if o < 0:
                return np.int64(o)
            p += length
        elif op == wire.OP_MULTIRANGE:
            return np.int64(wire.MALFORMED)
        elif json:
            o = writing.literal(writing.NULL, out, o, cap)
        if cap - o < 256:
            return np.int64(wire.SPACE)
        if op == wire.OP_ARRAY:
            o = _array_closes(json, b, begin, i, out, o)
    if cap - o < 256:
        return np.int64(wire.SPACE)
    if op == wire.OP_RANGE:
        o = _flag(json, _LOWER_INCLUSIVE, flags & wire.RANGE_LOWER_INCLUSIVE != 0, out, o, cap)
        o = _flag(json, _UPPER_INCLUSIVE, flags & wire.RANGE_UPPER_INCLUSIVE != 0, out, o, cap)
        o = _flag(json, _EMPTY, flags & wire.RANGE_EMPTY != 0, out, o, cap)
    if json and op != wire.OP_ARRAY:
        out[o] = writing.CLOSE_ARRAY if op == wire.OP_MULTIRANGE else writing.CLOSE
        o += 1
    elif op == wire.OP_MULTIRANGE:
        out[o] = 0
        o += 1
    return np.int64(o) if p == end else np.int64(wire.MALFORMED)
