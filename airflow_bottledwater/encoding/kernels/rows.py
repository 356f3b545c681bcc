"""Rows: keys and records written, one table entry for each record."""

from __future__ import annotations

import numpy as np

from airflow_bottledwater.compiled import compiled, inlined
from airflow_bottledwater.encoding.kernels.fields import (
    convert_fields,
    count_conversions,
    read_copy_row,
    read_tuple,
    same_bytes,
)
from airflow_bottledwater.encoding.kernels.nested import single_value, write_value
from airflow_bottledwater.encoding.kernels.writing import CLOSE, COMMA, NULL, OPEN, copy_bytes, literal
from airflow_bottledwater.encoding.wire import (
    C_FLAGS,
    C_KIND,
    C_LENGTH,
    C_LSN,
    C_OFFSET,
    C_ORDINAL,
    C_RELATION,
    C_TIME,
    CHANGED,
    E_CODE,
    E_COLUMN,
    E_OFFSET,
    E_ROW,
    FIELD_BINARY,
    FIELD_NULL,
    FIELD_SIDE,
    FIELD_TEXT,
    FIELD_UNCHANGED,
    L_COLUMN_COUNT,
    L_COLUMNS,
    L_KEY,
    L_KEY_COUNT,
    L_KEY_SCHEMA,
    L_PARTITIONS,
    L_SEND_UPDATES,
    L_TOPIC,
    L_VALUE_SCHEMA,
    MAGIC,
    MALFORMED,
    OP_ENUM,
    OP_TEXT,
    P_NAME,
    P_NAME_LEN,
    P_OP,
    P_REQUIRED,
    R_FLAGS,
    R_KEY,
    R_KEY_LEN,
    R_LSN,
    R_MESSAGE,
    R_OP,
    R_ORDINAL,
    R_PARTITION,
    R_TIME,
    R_TOPIC,
    R_VALUE,
    R_VALUE_LEN,
    SPACE,
    UNCHANGED,
)


@compiled
def _frame(schema_id, out, o):
    out[o] = MAGIC
    out[o + 1] = np.uint8((schema_id >> 24) & 255)
    out[o + 2] = np.uint8((schema_id >> 16) & 255)
    out[o + 3] = np.uint8((schema_id >> 8) & 255)
    out[o + 4] = np.uint8(schema_id & 255)
    return o + 5


@inlined
def _field(json, programs, names, column, k, b, side, p, n, out, o, cap):
    if k == FIELD_UNCHANGED:
        return np.int64(UNCHANGED)
    if k == FIELD_TEXT and programs[column, P_OP] != OP_TEXT:
        return np.int64(MALFORMED)  # text comes of types without a send function only
    source = side if k == FIELD_SIDE else b
    if programs[column, P_OP] >= OP_ENUM:
        return write_value(json, programs, names, column, source, p, n, out, o, cap)
    return single_value(json, programs, column, source, p, n, out, o, cap)


@compiled
def _encode_columns(
    json, is_key, relations, rel, programs, keys, names, b, side, position, length, kind, out, o, cap
):  # fmt: skip
    """The key's columns, or all of them, as one record; returns the next position or a code, and the column it fell on.

    No view of an array is made here: its reference count would cost more than the value.
    """
    first = relations[rel, L_COLUMNS]
    count = relations[rel, L_KEY_COUNT] if is_key else relations[rel, L_COLUMN_COUNT]
    schema_id = relations[rel, L_KEY_SCHEMA] if is_key else relations[rel, L_VALUE_SCHEMA]
    if cap - o < 8:
        return np.int64(SPACE), np.int64(-1)
    if json:
        out[o] = OPEN
        o += 1
    else:
        o = _frame(schema_id, out, o)
    for i in range(count):
        c = keys[relations[rel, L_KEY] + i] if is_key else i
        if cap - o < programs[first + c, P_NAME_LEN] + 8:
            return np.int64(SPACE), c
        if json:
            if i > 0:
                out[o] = COMMA
                o += 1
            o = copy_bytes(names, programs[first + c, P_NAME], programs[first + c, P_NAME_LEN], out, o)
            if kind[c] == FIELD_NULL:
                o = literal(NULL, out, o, cap)
                continue
        elif kind[c] == FIELD_NULL:
            if is_key:
                return np.int64(MALFORMED), c
            if programs[first + c, P_REQUIRED]:
                return np.int64(CHANGED), c
            out[o] = 0
            o += 1
            continue
        elif not is_key and not programs[first + c, P_REQUIRED]:
            out[o] = 2
            o += 1
        o = _field(
            json,
            programs,
            names,
            first + c,
            kind[c],
            b,
            side,
            position[c],
            length[c],
            out,
            o,
            cap,
        )
        if o < 0:
            return o, c
    if json:
        if cap - o < 1:
            return np.int64(SPACE), np.int64(-1)
        out[o] = CLOSE
        o += 1
    return np.int64(o), np.int64(-1)


@compiled
def murmur2(b, p, n):
    """The hash of Kafka's Java clients (org.apache.kafka.common.utils.Utils.murmur2), sign bit cleared."""
    m = np.uint32(0x5BD1E995)
    h = np.uint32(0x9747B28C) ^ np.uint32(n)
    i = 0
    while i + 4 <= n:
        k = (
            np.uint32(b[p + i])
            | (np.uint32(b[p + i + 1]) << np.uint32(8))
            | (np.uint32(b[p + i + 2]) << np.uint32(16))
            | (np.uint32(b[p + i + 3]) << np.uint32(24))
        )
        k = np.uint32(k * m)
        k = np.uint32((k ^ (k >> np.uint32(24))) * m)
        h = np.uint32(np.uint32(h * m) ^ k)
        i += 4
    rest = n - i
    if rest == 3:
        h ^= np.uint32(b[p + i + 2]) << np.uint32(16)
    if rest >= 2:
        h ^= np.uint32(b[p + i + 1]) << np.uint32(8)
    if rest >= 1:
        h = np.uint32(np.uint32(h ^ np.uint32(b[p + i])) * m)
    h = np.uint32((h ^ (h >> np.uint32(13))) * m)
    h ^= h >> np.uint32(15)
    return np.int64(h & np.uint32(0x7FFFFFFF))


@compiled
def _record(records, r, relations, rel, key, key_len, value, value_len, out, message, op, time, lsn, ordinal, flags):
    records[r, R_KEY] = key
    records[r, R_KEY_LEN] = key_len
    records[r, R_VALUE] = value
    records[r, R_VALUE_LEN] = value_len
    records[r, R_TOPIC] = relations[rel, L_TOPIC]
    partitions = relations[rel, L_PARTITIONS]
    # rows without a key have no order to keep: spread them in runs, so that batches stay large
    records[r, R_PARTITION] = murmur2(out, key, key_len) % partitions if key_len >= 0 else (r >> 10) % partitions
    records[r, R_MESSAGE] = message
    records[r, R_OP] = op
    records[r, R_TIME] = time
    records[r, R_LSN] = lsn
    records[r, R_ORDINAL] = ordinal
    records[r, R_FLAGS] = flags


@compiled
def _error(errors, e, row, code, column, broken, start, position, length, kind):
    at = np.int64(-1)
    if broken:
        column, at = length[0], position[0] - start
    elif column >= 0 and kind[column] == FIELD_BINARY:
        at = position[column] - start
    errors[e, E_ROW] = row
    errors[e, E_CODE] = code
    errors[e, E_COLUMN] = column
    errors[e, E_OFFSET] = at


@compiled
def encode_copy(b, offsets, start, rows, json, relations, rel, programs, keys, names, fields, records, errors, out):
    """Encode COPY rows ``start`` to ``rows``; returns (next row, bytes used, records, errors).

    ``offsets`` has one entry more than rows. It stops early where ``out`` is full: the caller publishes and goes on.
    ``fields`` is scratch of three rows, as wide as the table.
    """
    position, length, kind = fields[0], fields[1], fields[2]
    cap = out.size
    o = np.int64(0)
    r = 0
    e = 0
    for i in range(start, rows):
        if r == records.shape[0] or e == errors.shape[0]:
            return i, o, r, e
        begin = o
        column = np.int64(-1)
        status = read_copy_row(b, offsets[i], offsets[i + 1], relations[rel, L_COLUMN_COUNT], position, length, kind)
        broken = status < 0
        key_len = np.int64(-1)
        value = o
        if status >= 0:
            status = o
            if relations[rel, L_KEY_COUNT] > 0:
                status, column = _encode_columns(
                    json, True, relations, rel, programs, keys, names, b, b, position, length, kind, out, o, cap
                )
                key_len = status - o
                value = status
            if status >= 0:
                status, column = _encode_columns(
                    json, False, relations, rel, programs, keys, names, b, b, position, length, kind, out, value, cap
                )
        if status == SPACE:
            return i, begin, r, e
        if status < 0:
            _error(errors, e, i, status, column, broken, offsets[i], position, length, kind)
            e += 1
            o = begin
            continue
        o = status
        _record(records, r, relations, rel, begin, key_len, value, o - value, out, i, 114, 0, 0, 0, 0)
        r += 1
    return rows, o, r, e


@compiled
def encode_changes(
    b,
    changes,
    start,
    count,
    json,
    relations,
    programs,
    keys,
    names,
    side,
    side_offsets,
    cursor,
    fields,
    records,
    errors,
    out,
):
    """Encode changes ``start`` to ``count``; returns (next change, cursor, bytes used, records, errors).

    A change makes no record (a delete without a key), one, or two (a key change: a tombstone, then the row).
    """
    position, length, kind = fields[0], fields[1], fields[2]
    cap = out.size
    o = np.int64(0)
    r = 0
    e = 0
    for i in range(start, count):
        op = changes[i, C_KIND]
        if op != 73 and op != 85 and op != 68:
            continue
        if r + 2 > records.shape[0] or e == errors.shape[0]:
            return i, cursor, o, r, e
        rel = changes[i, C_RELATION]
        columns = relations[rel, L_COLUMN_COUNT]
        keyed = relations[rel, L_KEY_COUNT] > 0
        begin = o
        begin_cursor = cursor
        column = np.int64(-1)
        broken = False
        p = changes[i, C_OFFSET] + 5
        end = changes[i, C_OFFSET] + changes[i, C_LENGTH]
        status = o
        old_key = np.int64(-1)
        old_len = np.int64(0)
        value = np.int64(-1)
        key_len = np.int64(-1)
        key = np.int64(-1)
        if p >= end:
            status = np.int64(MALFORMED)
        while status >= 0 and p < end:
            tag = b[p]
            p = read_tuple(b, p + 1, end, columns, position, length, kind)
            if p < 0:
                status = np.int64(MALFORMED)
                broken = True
                break
            cursor = convert_fields(
                relations, rel, programs, keys, tag != 78, kind, position, length, side_offsets, cursor
            )
            if tag != 78:
                if keyed:
                    old_key = o
                    status, column = _encode_columns(
                        json, True, relations, rel, programs, keys, names, b, side, position, length, kind, out, o, cap
                    )
                    old_len = status - o
                    o = status if status >= 0 else o
            else:
                if keyed:
                    key = o
                    status, column = _encode_columns(
                        json, True, relations, rel, programs, keys, names, b, side, position, length, kind, out, o, cap
                    )
                    key_len = status - o
                    o = status if status >= 0 else o
                if status >= 0:
                    value = o
                    status, column = _encode_columns(
                        json, False, relations, rel, programs, keys, names, b, side, position, length, kind, out, o, cap
                    )
                    o = status if status >= 0 else o
        # a delete has an old row, the others a new one
        if status >= 0 and (value < 0 if op != 68 else (value >= 0 or (keyed and old_key < 0))):
            status = np.int64(MALFORMED)
            column = np.int64(-1)
        if status == SPACE:
            return i, begin_cursor, begin, r, e
        if status < 0:
            _error(errors, e, i, status, column, broken, changes[i, C_OFFSET], position, length, kind)
            e += 1
            o = begin
            # the values of a row that failed half-way are used up all the same
            cursor = begin_cursor + count_conversions(b, changes, i, relations, programs, keys, position, length, kind)
            continue
        time, lsn, ordinal, flags = changes[i, C_TIME], changes[i, C_LSN], changes[i, C_ORDINAL], changes[i, C_FLAGS]
        if op == 68:
            if keyed and old_key >= 0:
                _record(records, r, relations, rel, old_key, old_len, 0, -1, out, i, 100, time, lsn, ordinal, flags)
                r += 1
            else:
                o = begin
            continue
        if op == 85 and not keyed and relations[rel, L_SEND_UPDATES] == 0:
            o = begin
            continue
        if old_key >= 0 and not same_bytes(out, old_key, old_len, key, key_len):
            _record(records, r, relations, rel, old_key, old_len, 0, -1, out, i, 100, time, lsn, ordinal, flags)
            r += 1
        _record(
            records,
            r,
            relations,
            rel,
            key,
            key_len,
            value,
            o - value,
            out,
            i,
            99 if op == 73 else 117,
            time,
            lsn,
            ordinal,
            flags,
        )
        r += 1
    return count, cursor, o, r, e
