"""The fields of rows: found in a message, and those that lack a value or a text."""

from __future__ import annotations

import numpy as np

from airflow_bottledwater.compiled import compiled
from airflow_bottledwater.encoding.kernels.reading import i16, i32
from airflow_bottledwater.encoding.wire import (
    C_KIND,
    C_LENGTH,
    C_OFFSET,
    C_RELATION,
    FIELD_BINARY,
    FIELD_NULL,
    FIELD_SIDE,
    FIELD_TEXT,
    FIELD_UNCHANGED,
    L_COLUMN_COUNT,
    L_COLUMNS,
    L_KEY,
    L_KEY_COUNT,
    MALFORMED,
    P_CONVERT,
)


@compiled
def broken(column, p, position, length):
    """A row that is not one: which field, and where it was seen, are left in the first entries."""
    position[0] = p
    length[0] = column
    return MALFORMED


@compiled
def read_copy_row(b, p, end, count, position, length, kind):
    """Find the fields of one COPY row: int16 count, then int32 length (-1: NULL) and bytes each.

    https://www.postgresql.org/docs/current/sql-copy.html (Binary Format, Tuples)
    """
    if end - p < 2 or i16(b, p) != count:
        return broken(-1, p, position, length)
    p += 2
    for c in range(count):
        if end - p < 4:
            return broken(c, p, position, length)
        n = i32(b, p)
        p += 4
        if n == -1:
            kind[c] = FIELD_NULL
            continue
        if n < 0 or n > end - p:
            return broken(c, p, position, length)
        kind[c] = FIELD_BINARY
        position[c] = p
        length[c] = n
        p += n
    return p if p == end else broken(-1, p, position, length)


@compiled
def read_tuple(b, p, end, count, position, length, kind):
    """Find the fields of a pgoutput TupleData; returns the position behind it.

    https://www.postgresql.org/docs/current/protocol-logicalrep-message-formats.html (TupleData)
    """
    if end - p < 2 or i16(b, p) != count:
        return broken(-1, p, position, length)
    p += 2
    for c in range(count):
        if end - p < 1:
            return broken(c, p, position, length)
        k = np.int64(b[p])
        p += 1
        kind[c] = k
        if k == FIELD_NULL or k == FIELD_UNCHANGED:
            continue
        if (k != FIELD_BINARY and k != FIELD_TEXT) or end - p < 4:
            return broken(c, p, position, length)
        n = i32(b, p)
        p += 4
        if n < 0 or n > end - p:
            return broken(c, p, position, length)
        position[c] = p
        length[c] = n
        p += n
    return p


@compiled
def convert_fields(relations, rel, programs, keys, only_key, kind, position, length, side_offsets, cursor):
    """Point the fields that the server converted at their text; returns the next entry of ``side_offsets``."""
    first = relations[rel, L_COLUMNS]
    if only_key:
        for i in range(relations[rel, L_KEY_COUNT]):
            c = keys[relations[rel, L_KEY] + i]
            if programs[first + c, P_CONVERT] and kind[c] == FIELD_BINARY:
                kind[c] = FIELD_SIDE
                position[c] = side_offsets[cursor]
                length[c] = side_offsets[cursor + 1] - side_offsets[cursor]
                cursor += 1
    else:
        for c in range(relations[rel, L_COLUMN_COUNT]):
            if programs[first + c, P_CONVERT] and kind[c] == FIELD_BINARY:
                kind[c] = FIELD_SIDE
                position[c] = side_offsets[cursor]
                length[c] = side_offsets[cursor + 1] - side_offsets[cursor]
                cursor += 1
    return cursor


@compiled
def find_conversions(b, changes, count, relations, programs, keys, fields, found):
    """List the values that PostgreSQL has to turn into text, in the order in which :func:`encode_changes` uses them.

    Rows of ``found``: position, length, column row in ``programs``, change. Returns how many there are (more than fit means:
    call again with more room).
    """
    position, length, kind = fields[0], fields[1], fields[2]
    n = 0
    for i in range(count):
        if changes[i, C_KIND] != 73 and changes[i, C_KIND] != 85 and changes[i, C_KIND] != 68:
            continue
        rel = changes[i, C_RELATION]
        first = relations[rel, L_COLUMNS]
        p = changes[i, C_OFFSET] + 5
        end = changes[i, C_OFFSET] + changes[i, C_LENGTH]
        while p < end and p >= 0:
            tag = b[p]
            p = read_tuple(b, p + 1, end, relations[rel, L_COLUMN_COUNT], position, length, kind)
            if p < 0:
                break
            if tag == 78:
                for c in range(relations[rel, L_COLUMN_COUNT]):
                    if programs[first + c, P_CONVERT] and kind[c] == FIELD_BINARY:
                        if n < found.shape[0]:
                            found[n, 0] = position[c]
                            found[n, 1] = length[c]
                            found[n, 2] = first + c
                            found[n, 3] = i
                        n += 1
            else:
                for k in range(relations[rel, L_KEY_COUNT]):
                    c = keys[relations[rel, L_KEY] + k]
                    if programs[first + c, P_CONVERT] and kind[c] == FIELD_BINARY:
                        if n < found.shape[0]:
                            found[n, 0] = position[c]
                            found[n, 1] = length[c]
                            found[n, 2] = first + c
                            found[n, 3] = i
                        n += 1
    return n


@compiled
def find_unchanged(b, changes, count, relations, fields, found):
    """List the changes whose new row lacks an unchanged TOAST value; returns how many."""
    position, length, kind = fields[0], fields[1], fields[2]
    n = 0
    for i in range(count):
        if changes[i, C_KIND] != 85:
            continue
        rel = changes[i, C_RELATION]
        p = changes[i, C_OFFSET] + 5
        end = changes[i, C_OFFSET] + changes[i, C_LENGTH]
        if p < end and b[p] != 78:
            p = read_tuple(b, p + 1, end, relations[rel, L_COLUMN_COUNT], position, length, kind)
        if p < 0 or p >= end:
            continue
        if read_tuple(b, p + 1, end, relations[rel, L_COLUMN_COUNT], position, length, kind) < 0:
            continue
        for c in range(relations[rel, L_COLUMN_COUNT]):
            if kind[c] == FIELD_UNCHANGED:
                found[n] = i
                n += 1
                break
    return n


@compiled
def same_bytes(out, p, n, q, m):
    if n != m:
        return False
    for i in range(n):
        if out[p + i] != out[q + i]:
            return False
    return True


@compiled
def count_conversions(b, changes, i, relations, programs, keys, position, length, kind):
    rel = changes[i, C_RELATION]
    first = relations[rel, L_COLUMNS]
    p = changes[i, C_OFFSET] + 5
    end = changes[i, C_OFFSET] + changes[i, C_LENGTH]
    n = 0
    while p < end and p >= 0:
        tag = b[p]
        p = read_tuple(b, p + 1, end, relations[rel, L_COLUMN_COUNT], position, length, kind)
        if p < 0:
            break
        if tag == 78:
            for c in range(relations[rel, L_COLUMN_COUNT]):
                if programs[first + c, P_CONVERT] and kind[c] == FIELD_BINARY:
                    n += 1
        else:
            for k in range(relations[rel, L_KEY_COUNT]):
                c = keys[relations[rel, L_KEY] + k]
                if programs[first + c, P_CONVERT] and kind[c] == FIELD_BINARY:
                    n += 1
    return n
