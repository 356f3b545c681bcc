"""Encodes rows: writes keys and values, and an entry in the table of records for each record."""

from __future__ import annotations

import numpy as np

from airflow_bottledwater.compiled import compiled, inlined
from airflow_bottledwater.encoding.kernels.fields import (
    NEW,
    OLD,
    column_of,
    convert_fields,
    is_row,
    read_change,
    read_copy_row,
)
from airflow_bottledwater.encoding.kernels.nested import single_value, write_value
from airflow_bottledwater.encoding.kernels.to_protobuf import message_value, protobuf_value
from airflow_bottledwater.encoding.kernels.writing import CLOSE, COMMA, NULL, OPEN, copy_name, literal
from airflow_bottledwater.encoding.wire import (
    CHANGED,
    EVENT_CREATE,
    EVENT_DELETE,
    EVENT_SNAPSHOT,
    EVENT_UPDATE,
    FIELD_BINARY,
    FIELD_CONVERTED,
    FIELD_NULL,
    FIELD_TEXT,
    FIELD_UNCHANGED,
    MAGIC,
    MALFORMED,
    MESSAGE_DELETE,
    MESSAGE_INSERT,
    MESSAGE_UPDATE,
    NO_KEY,
    OP_ENUM,
    OP_TEXT,
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
def _field(program, column, field, b, texts, out, o):
    if field.kind == FIELD_UNCHANGED:
        return np.int64(UNCHANGED)
    opcode = program.columns[column].opcode
    if field.kind == FIELD_TEXT and opcode != OP_TEXT:
        return np.int64(MALFORMED)  # text is only sent for types without a send function
    source = texts if field.kind == FIELD_CONVERTED else b
    if opcode >= OP_ENUM:
        return write_value(program, column, source, field.position, field.length, out, o)
    return single_value(program, column, source, field.position, field.length, out, o)


@compiled
def _encode_message(program, relation, is_key, b, texts, fields, out, o):
    """Like :func:`_encode_columns`, of Protocol Buffers: what is NULL is not there. Behind the schema's id, Confluent's
    framing has the place of the message in its file; that of the first one is a zero byte."""
    if out.size - o < 8:
        return np.int64(SPACE), np.int64(-1)
    o = _frame(relation.key_schema if is_key else relation.value_schema, out, o)
    out[o] = 0
    o += 1
    for i in range(relation.keys if is_key else relation.columns):
        c = column_of(program, relation, is_key, i)
        field, number = fields[c], relation.column + c
        column = program.columns[number]
        if field.kind == FIELD_NULL:
            if is_key:
                return np.int64(NO_KEY), c
            continue
        if field.kind == FIELD_UNCHANGED:
            return np.int64(UNCHANGED), c
        if field.kind == FIELD_TEXT and column.opcode != OP_TEXT:
            return np.int64(MALFORMED), c
        if out.size - o < 16:
            return np.int64(SPACE), c
        o = copy_name(program.names, column.name, column.name_length, out, o)
        source = texts if field.kind == FIELD_CONVERTED else b
        if column.opcode >= OP_ENUM:
            o = message_value(program, number, source, field.position, field.length, out, o)
        else:
            o = protobuf_value(column.opcode, column.argument, source, field.position, field.length, out, o, out.size)
        if o < 0:
            return np.int64(o), c
    return np.int64(o), np.int64(-1)


@compiled
def _encode_columns(program, relation, is_key, b, texts, fields, out, o):
    """Write the key's columns, or all columns, as one record; returns the next position or an error code, and the
    column of the error.

    No view of an array is made here, since its reference counting would cost more than the value.
    """
    json = program.json
    if out.size - o < 8:
        return np.int64(SPACE), np.int64(-1)
    if program.framed:
        o = _frame(relation.key_schema if is_key else relation.value_schema, out, o)
    if json:
        out[o] = OPEN
        o += 1
    for i in range(relation.keys if is_key else relation.columns):
        c = column_of(program, relation, is_key, i)
        column = program.columns[relation.column + c]
        # the comma, and what a name may be longer in whole words; or null
        if out.size - o < column.name_length + 8:
            return np.int64(SPACE), c
        if is_key and fields[c].kind == FIELD_NULL:
            return np.int64(NO_KEY), c
        if json:
            if i > 0:
                out[o] = COMMA
                o += 1
            o = copy_name(program.names, column.name, column.name_length, out, o)
            if fields[c].kind == FIELD_NULL:
                o = literal(NULL, out, o, out.size)
                continue
        elif fields[c].kind == FIELD_NULL:
            if column.required:
                return np.int64(CHANGED), c
            out[o] = 0
            o += 1
            continue
        elif not is_key and not column.required:
            out[o] = 2
            o += 1
        o = _field(program, relation.column + c, fields[c], b, texts, out, o)
        if o < 0:
            return o, c
    if json:
        if out.size - o < 1:
            return np.int64(SPACE), np.int64(-1)
        out[o] = CLOSE
        o += 1
    return np.int64(o), np.int64(-1)


@compiled
def _encode(program, relation, is_key, b, texts, fields, out, o):
    if program.protobuf:
        return _encode_message(program, relation, is_key, b, texts, fields, out, o)
    return _encode_columns(program, relation, is_key, b, texts, fields, out, o)


@compiled
def _encode_row(program, relation, b, texts, fields, out, o):
    """Write a row's key, if its table has one, and then the row; returns what :func:`_encode_columns` does, and the
    key's length or -1."""
    key_length = np.int64(-1)
    value = np.int64(o)
    if relation.keys > 0:
        value, column = _encode(program, relation, True, b, texts, fields, out, o)
        if value < 0:
            return value, column, key_length
        key_length = value - o
    end, column = _encode(program, relation, False, b, texts, fields, out, value)
    return end, column, key_length


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
def _same_bytes(out, p, n, q, m):
    if n != m:
        return False
    for i in range(n):
        if out[p + i] != out[q + i]:
            return False
    return True


@compiled
def _record(records, r, relation, out, key, key_length, value, value_length):
    record = records[r]
    record.key = key
    record.key_length = key_length
    record.value = value
    record.value_length = value_length
    record.topic = relation.topic
    # rows without a key need not be in order: they are spread over the partitions by what they contain
    spread = murmur2(out, key, key_length) if key_length >= 0 else murmur2(out, value, value_length)
    record.partition = spread % relation.partitions


@compiled
def _of_change(record, row, change, event):
    record.row = row
    record.event = event
    record.time = change.time
    record.lsn = change.lsn
    record.ordinal = change.ordinal
    record.flags = change.flags


@compiled
def _error(error, row, code, column, offset):
    error.row = row
    error.code = code
    error.column = column
    error.offset = offset


@compiled
def _offset_of(fields, column, start):
    """Where a column's value is, in bytes from the beginning of its row; -1 if it is not in the row."""
    return fields[column].position - start if column >= 0 and fields[column].kind == FIELD_BINARY else np.int64(-1)


@compiled
def encode_copy(b, offsets, start, program, rel, fields, output):
    """Encode COPY rows from ``start`` on; returns (next row, bytes used, records, errors).

    It stops early if the output is full; the caller publishes what there is, and calls it again.

    :param offsets: where each row begins in ``b``, and where the last one ends.
    :param rel: the relation's number in ``program``.
    :param fields: scratch memory, see :func:`~airflow_bottledwater.encoding.kernels.fields.find_conversions`.
    """
    relation = program.relations[rel]
    row = fields[0, : relation.columns]
    records, errors, out = output.records, output.errors, output.data
    o = np.int64(0)
    r = 0
    e = 0
    for i in range(start, offsets.size - 1):
        if r == records.size or e == errors.size:
            return i, o, r, e
        good, column, at = read_copy_row(b, offsets[i], offsets[i + 1], row)
        if not good:
            _error(errors[e], i, MALFORMED, column, at - offsets[i])
            e += 1
            continue
        end, column, key_length = _encode_row(program, relation, b, b, row, out, o)
        if end == SPACE:
            return i, o, r, e
        if end < 0:
            _error(errors[e], i, end, column, _offset_of(row, column, offsets[i]))
            e += 1
            continue
        value = o + max(key_length, 0)
        _record(records, r, relation, out, o, key_length, value, end - value)
        record = records[r]
        record.row = i
        record.event = EVENT_SNAPSHOT
        record.time = 0
        record.lsn = 0
        record.ordinal = 0
        record.flags = 0
        r += 1
        o = end
    return max(start, offsets.size - 1), o, r, e


@compiled
def encode_changes(b, changes, start, program, texts, cursor, fields, output):
    """Encode changes from ``start`` on; returns (next change, next text, bytes used, records, errors).

    A change becomes no record (a delete without a key), one record, or two (an update of the key: a tombstone, then the
    row).

    :param texts: the texts of the values that :func:`~airflow_bottledwater.encoding.kernels.fields.find_conversions`
        has found.
    :param cursor: the number of the next text.
    :param fields: scratch memory, see there.
    """
    records, errors, out = output.records, output.errors, output.data
    o = np.int64(0)
    r = 0
    e = 0
    for i in range(start, changes.size):
        change = changes[i]
        if not is_row(change.kind):
            continue
        if r + 2 > records.size or e == errors.size:
            return i, cursor, o, r, e
        relation = program.relations[change.relation]
        if relation.outbox:
            continue
        keyed = relation.keys > 0
        old, new = fields[0, : relation.columns], fields[1, : relation.columns]
        rows, column, at = read_change(b, change, old, new)
        # the texts of a change that cannot be encoded must be skipped, too
        first_text = cursor
        if rows & OLD:
            cursor = convert_fields(program, relation, True, old, texts, cursor)
        if rows & NEW:
            cursor = convert_fields(program, relation, False, new, texts, cursor)
        # a delete has an old row, the others a new one
        is_delete = change.kind == MESSAGE_DELETE
        shaped = (rows & NEW == 0 and (rows & OLD != 0 or not keyed)) if is_delete else rows & NEW != 0
        if rows == 0 or not shaped:
            _error(errors[e], i, MALFORMED, column, at - change.offset if rows == 0 else np.int64(-1))
            e += 1
            continue
        has_old_key = keyed and rows & OLD != 0
        key_length = np.int64(-1)
        end = o
        offset = np.int64(-1)
        if has_old_key:
            end, column = _encode(program, relation, True, b, texts.data, old, out, o)
            if end < 0:
                offset = _offset_of(old, column, change.offset)
        key = end
        if end >= 0 and not is_delete:
            end, column, key_length = _encode_row(program, relation, b, texts.data, new, out, key)
            if end < 0:
                offset = _offset_of(new, column, change.offset)
        if end == SPACE:
            return i, first_text, o, r, e
        if end < 0:
            _error(errors[e], i, end, column, offset)
            e += 1
            continue
        # if a table has neither a key nor the full old row, an update cannot be distinguished from an insert
        if not keyed and (is_delete or (change.kind == MESSAGE_UPDATE and not relation.sends_updates)):
            continue
        if has_old_key and (is_delete or not _same_bytes(out, o, key - o, key, key_length)):
            _record(records, r, relation, out, o, key - o, 0, -1)
            _of_change(records[r], i, change, EVENT_DELETE)
            r += 1
        if not is_delete:
            value = key + max(key_length, 0)
            _record(records, r, relation, out, key, key_length, value, end - value)
            _of_change(records[r], i, change, EVENT_CREATE if change.kind == MESSAGE_INSERT else EVENT_UPDATE)
            r += 1
        o = end
    return changes.size, cursor, o, r, e
