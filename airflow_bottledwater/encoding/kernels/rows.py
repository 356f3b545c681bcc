"""Encodes rows: writes keys and values, and an entry in the table of records for each record."""

from __future__ import annotations

import numpy as np

from airflow_bottledwater.compiled import callee, compiled, inlined
from airflow_bottledwater.encoding import wire
from airflow_bottledwater.encoding.kernels.envelope import begin_row, begin_value, between_rows, end_envelope
from airflow_bottledwater.encoding.kernels.fields import (
    MESSAGE_HEADER,
    NEW,
    OLD,
    column_of,
    convert_fields,
    is_row,
    keep_key,
    read_change,
    read_copy_row,
)
from airflow_bottledwater.encoding.kernels.nested import single_value, write_value
from airflow_bottledwater.encoding.kernels.to_protobuf import message_value, protobuf_value
from airflow_bottledwater.encoding.kernels.writing import CLOSE, COMMA, NULL, OPEN, copy_name, length_of, literal

#: the name of the header with the old row
_BEFORE = np.frombuffer(b"before\0", dtype=np.uint8)


@inlined
def _field(program, column, field, b, texts, out, o):
    if field.kind == wire.FIELD_UNCHANGED:
        return np.int64(wire.UNCHANGED)
    opcode = program.columns[column].opcode
    if field.kind == wire.FIELD_TEXT and opcode != wire.OP_TEXT:
        return np.int64(wire.MALFORMED)  # text is only sent for types without a send function
    source = texts if field.kind == wire.FIELD_CONVERTED else b
    if opcode >= wire.OP_ENUM:
        return write_value(program, column, source, field.position, field.length, out, o)
    return single_value(program, column, source, field.position, field.length, out, o)


@callee
def _encode_message(program, relation, is_key, b, texts, fields, out, o):
    """Like :func:`_encode_columns`, of Protocol Buffers: what is NULL is not there. Behind the schema's id, Confluent's
    framing has the place of the message in its file; that of the first one is a zero byte."""
    o = begin_value(program, relation.key_schema if is_key else relation.value_schema, -1, out, o)
    if o < 0:
        return o, np.int64(-1)
    out[o] = 0
    o += 1
    for i in range(relation.keys if is_key else relation.columns):
        c = column_of(program, relation, is_key, i)
        field, number = fields[c], relation.column + c
        column = program.columns[number]
        if field.kind == wire.FIELD_NULL:
            if is_key:
                return np.int64(wire.NO_KEY), c
            continue
        if field.kind == wire.FIELD_UNCHANGED:
            return np.int64(wire.UNCHANGED), c
        if field.kind == wire.FIELD_TEXT and column.opcode != wire.OP_TEXT:
            return np.int64(wire.MALFORMED), c
        if out.size - o < 16:
            return np.int64(wire.SPACE), c
        o = copy_name(program.names, column.name, column.name_length, out, o)
        source = texts if field.kind == wire.FIELD_CONVERTED else b
        if column.opcode >= wire.OP_ENUM:
            o = message_value(program, number, source, field.position, field.length, out, o)
        else:
            o = protobuf_value(column.opcode, column.argument, source, field.position, field.length, out, o, out.size)
        if o < 0:
            return np.int64(o), c
    return np.int64(o), np.int64(-1)


@inlined
def _write_columns(program, relation, is_key, b, texts, fields, out, o):
    """Write the key's columns, or all columns, without what is in front of them; see :func:`_encode_columns`.

    No view of an array is made here, since its reference counting would cost more than the value.
    """
    json = program.json
    if json:
        if out.size - o < 1:
            return np.int64(wire.SPACE), np.int64(-1)
        out[o] = OPEN
        o += 1
    for i in range(relation.keys if is_key else relation.columns):
        c = column_of(program, relation, is_key, i)
        column = program.columns[relation.column + c]
        # the comma, and what a name may be longer in whole words; or null
        if out.size - o < column.name_length + 8:
            return np.int64(wire.SPACE), c
        if is_key and fields[c].kind == wire.FIELD_NULL:
            return np.int64(wire.NO_KEY), c
        if json:
            if i > 0:
                out[o] = COMMA
                o += 1
            o = copy_name(program.names, column.name, column.name_length, out, o)
            if fields[c].kind == wire.FIELD_NULL:
                o = literal(NULL, out, o, out.size)
                continue
        elif fields[c].kind == wire.FIELD_NULL:
            if column.required:
                return np.int64(wire.CHANGED), c
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
            return np.int64(wire.SPACE), np.int64(-1)
        out[o] = CLOSE
        o += 1
    return np.int64(o), np.int64(-1)


@callee
def _encode_columns(program, relation, is_key, b, texts, fields, out, o):
    """Write the key's columns, or all columns, as one record; returns the next position or an error code, and the
    column of the error."""
    head = relation.key_head if is_key else np.int64(-1)
    o = begin_value(program, relation.key_schema if is_key else relation.value_schema, head, out, o)
    if o < 0:
        return o, np.int64(-1)
    o, column = _write_columns(program, relation, is_key, b, texts, fields, out, o)
    if o >= 0 and head >= 0:
        if out.size - o < 1:
            return np.int64(wire.SPACE), np.int64(-1)
        out[o] = CLOSE
        o += 1
    return o, column


@inlined
def _encode(program, relation, is_key, b, texts, fields, out, o):
    if program.protobuf:
        return _encode_message(program, relation, is_key, b, texts, fields, out, o)
    return _encode_columns(program, relation, is_key, b, texts, fields, out, o)


@callee
def _write_row(program, relation, present, b, texts, fields, out, o):
    """Write the old or the new row of an envelope; returns what :func:`_encode_columns` does."""
    o = begin_row(program, present, out, o)
    if o < 0 or not present:
        return o, np.int64(-1)
    return _write_columns(program, relation, False, b, texts, fields, out, o)


@callee
def _encode_envelope(program, relation, b, texts, rows, old, new, facts, out, o):
    """Write an envelope; returns what :func:`_encode_columns` does.

    :param rows: which of both rows it has.
    """
    o = begin_value(program, relation.value_schema, relation.envelope, out, o)
    if o < 0:
        return o, np.int64(-1)
    o, column = _write_row(program, relation, rows & OLD != 0, b, texts, old, out, o)
    if o < 0:
        return o, column
    o = between_rows(program, relation, out, o)
    if o < 0:
        return o, np.int64(-1)
    o, column = _write_row(program, relation, rows & NEW != 0, b, texts, new, out, o)
    if o < 0:
        return o, column
    return end_envelope(program, relation, facts, out, o), np.int64(-1)


@inlined
def _encode_value(program, relation, b, texts, rows, old, new, facts, out, o):
    """Write the value of a row; returns what :func:`_encode_columns` does."""
    if relation.envelope < 0:
        return _encode(program, relation, False, b, texts, new, out, o)
    return _encode_envelope(program, relation, b, texts, rows, old, new, facts, out, o)


@callee
def _encode_header(program, relation, b, texts, old, out, o):
    """Write the old row as a header: a length and the name with the byte 0, then a length and the value; returns what
    :func:`_encode_columns` does."""
    if out.size - o < _BEFORE.size + 8:
        return np.int64(wire.SPACE), np.int64(-1)
    length_of(_BEFORE.size, out, o)
    value = literal(_BEFORE, out, o + 4, out.size) + 4
    end, column = _encode(program, relation, False, b, texts, old, out, value)
    if end >= 0:
        length_of(end - value, out, value - 4)
    return end, column


@inlined
def _encode_key(program, relation, b, texts, fields, out, o):
    """Write a row's key, if its table has one; returns what :func:`_encode_columns` does, and the key's length or
    -1."""
    if relation.keys == 0:
        return np.int64(o), np.int64(-1), np.int64(-1)
    end, column = _encode(program, relation, True, b, texts, fields, out, o)
    return end, column, end - o


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


@callee
def _same_bytes(out, p, n, q, m):
    if n != m:
        return False
    for i in range(n):
        if out[p + i] != out[q + i]:
            return False
    return True


@callee
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


@callee
def _of_change(record, change, event):
    record.event = event
    record.time = change.time
    record.lsn = change.lsn
    record.ordinal = change.ordinal
    # what was read again is of the new row
    record.flags = change.flags & ~wire.FLAG_REREAD if event == wire.EVENT_DELETE else change.flags


@callee
def _error(error, row, code, column, offset):
    error.row = row
    error.code = code
    error.column = column
    error.offset = offset


@callee
def _offset_of(fields, column, start):
    """Where a column's value is, in bytes from the beginning of its row; -1 if it is not in the row."""
    return fields[column].position - start if column >= 0 and fields[column].kind == wire.FIELD_BINARY else np.int64(-1)


@compiled
def encode_copy(b, offsets, start, program, rel, fields, facts, output):
    """Encode COPY rows from ``start`` on; returns (next row, bytes used, records, errors).

    It stops early if the output is full; the caller publishes what there is, and calls it again.

    :param offsets: where each row begins in ``b``, and where the last one ends.
    :param rel: the relation's number in ``program``.
    :param fields: scratch memory, see :func:`~airflow_bottledwater.encoding.kernels.fields.find_conversions`.
    :param facts: one row of :data:`~airflow_bottledwater.encoding.layout.FACTS`, for all rows.
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
            _error(errors[e], i, wire.MALFORMED, column, at - offsets[i])
            e += 1
            continue
        end, column, key_length = _encode_key(program, relation, b, b, row, out, o)
        value = end
        if end >= 0:
            end, column = _encode_value(program, relation, b, b, NEW, row, row, facts[0], out, value)
        if end == wire.SPACE:
            return i, o, r, e
        if end < 0:
            _error(errors[e], i, end, column, _offset_of(row, column, offsets[i]))
            e += 1
            continue
        _record(records, r, relation, out, o, key_length, value, end - value)
        record = records[r]
        record.row = i
        record.event = wire.EVENT_SNAPSHOT
        record.time = 0
        record.lsn = 0
        record.ordinal = 0
        record.flags = 0
        r += 1
        o = end
    return max(start, offsets.size - 1), o, r, e


@callee
def _of(facts, change, event):
    """Say of a change what an envelope tells; of a row that was copied, it is known already."""
    if facts.snapshot != wire.FROM_STREAM:
        return
    facts.event = event
    facts.time = change.time * 1000
    facts.lsn = change.lsn
    facts.ordinal = change.ordinal
    facts.xid = change.xid


@callee
def _encode_change(program, relation, b, texts, change, rows, old, new, facts, output, r, o):
    """Write the keys and values of a change, and enter its records; returns the next position or an error code, the
    column of the error and its place in the message, and how many records there are then."""
    records, out = output.records, output.data
    is_delete = change.kind == wire.MESSAGE_DELETE
    enveloped = relation.envelope >= 0
    keyed = relation.keys > 0
    has_old_key = keyed and rows & OLD != 0
    key = np.int64(o)
    if has_old_key:
        key, column = _encode(program, relation, True, b, texts, old, out, o)
        if key < 0:
            return key, column, _offset_of(old, column, change.offset), r
    at, key_length = key, np.int64(-1)
    if not is_delete:
        at, column, key_length = _encode_key(program, relation, b, texts, new, out, key)
        if at < 0:
            return at, column, _offset_of(new, column, change.offset), r
    whole_old = relation.whole_old and rows & OLD and b[change.offset + MESSAGE_HEADER] == wire.FULL_OLD_ROW
    # a row that is not in an envelope has the old one in a header
    headers = at
    if whole_old and not enveloped:
        at, column = _encode_header(program, relation, b, texts, old, out, headers)
        if at == wire.NO_REPRESENTATION:
            at = headers  # what becomes of the row does not depend on what it was
        if at < 0:
            return at, column, _offset_of(old, column, change.offset), r
    headers_length = at - headers
    removed = has_old_key and (is_delete or not _same_bytes(out, o, key - o, key, key_length))
    end = at
    if removed and enveloped:
        _of(facts, change, wire.EVENT_DELETE)
        end, column = _encode_envelope(program, relation, b, texts, OLD, old, new, facts, out, at)
        if end == wire.NO_REPRESENTATION:
            keep_key(program, relation, old)
            end, column = _encode_envelope(program, relation, b, texts, OLD, old, new, facts, out, at)
        if end < 0:
            return end, column, _offset_of(old, column, change.offset), r
    value = end
    event = wire.EVENT_CREATE if change.kind == wire.MESSAGE_INSERT or (removed and enveloped) else wire.EVENT_UPDATE
    if not is_delete:
        shown = NEW
        if enveloped:
            _of(facts, change, event)
            if whole_old and not removed:
                shown = NEW | OLD
        end, column = _encode_value(program, relation, b, texts, shown, old, new, facts, out, value)
        if end == wire.NO_REPRESENTATION and shown != NEW:
            shown = NEW
            end, column = _encode_envelope(program, relation, b, texts, shown, old, new, facts, out, value)
        if end < 0:
            # of both rows, the column is not known to be one of the new row
            offset = _offset_of(new, column, change.offset) if shown == NEW else np.int64(-1)
            return end, column, offset, r
    # if a table has neither a key nor the full old row, an update cannot be distinguished from an insert
    if not keyed and (is_delete or (change.kind == wire.MESSAGE_UPDATE and not relation.sends_updates)):
        return np.int64(o), np.int64(-1), np.int64(-1), r
    if removed and enveloped:
        _record(records, r, relation, out, o, key - o, at, value - at)
        _of_change(records[r], change, wire.EVENT_DELETE)
        r += 1
    if removed:
        _record(records, r, relation, out, o, key - o, 0, -1)
        _of_change(records[r], change, wire.EVENT_DELETE)
        records[r].headers = headers
        records[r].headers_length = headers_length
        r += 1
    if not is_delete:
        _record(records, r, relation, out, key, key_length, value, end - value)
        _of_change(records[r], change, event)
        if not removed:  # otherwise the tombstone has it
            records[r].headers = headers
            records[r].headers_length = headers_length
        r += 1
    return np.int64(end), np.int64(-1), np.int64(-1), r


@compiled
def encode_changes(b, changes, start, program, texts, cursor, fields, facts, output):
    """Encode changes from ``start`` on; returns (next change, next text, bytes used, records, errors).

    A change becomes no record (a delete without a key), one record, or two (an update of the key: a tombstone, then the
    row). With envelopes, the envelope of the deletion is in front of each tombstone.

    :param texts: the texts of the values that :func:`~airflow_bottledwater.encoding.kernels.fields.find_conversions`
        has found.
    :param cursor: the number of the next text.
    :param fields: scratch memory, see there.
    :param facts: one row of :data:`~airflow_bottledwater.encoding.layout.FACTS`, with what all changes have in common.
    """
    records, errors = output.records, output.errors
    o = np.int64(0)
    r = 0
    e = 0
    for i in range(start, changes.size):
        change = changes[i]
        if not is_row(change.kind):
            continue
        if r + 3 > records.size or e == errors.size:
            return i, cursor, o, r, e
        relation = program.relations[change.relation]
        if relation.outbox:
            continue
        old, new = fields[0, : relation.columns], fields[1, : relation.columns]
        rows, column, at = read_change(b, change, old, new)
        # the texts of a change that cannot be encoded must be skipped, too
        first_text = cursor
        if rows & OLD:
            cursor = convert_fields(program, relation, relation.whole_old == 0, old, texts, cursor)
        if rows & NEW:
            cursor = convert_fields(program, relation, False, new, texts, cursor)
        # a delete has an old row, the others a new one
        is_delete = change.kind == wire.MESSAGE_DELETE
        shaped = (rows & NEW == 0 and (rows & OLD != 0 or relation.keys == 0)) if is_delete else rows & NEW != 0
        if rows == 0 or not shaped:
            _error(errors[e], i, wire.MALFORMED, column, at - change.offset if rows == 0 else np.int64(-1))
            e += 1
            continue
        before = r
        end, column, offset, r = _encode_change(
            program, relation, b, texts.data, change, rows, old, new, facts[0], output, r, o
        )
        if end == wire.SPACE:
            return i, first_text, o, r, e
        if end < 0:
            _error(errors[e], i, end, column, offset)
            e += 1
            continue
        for k in range(before, r):
            records[k].row = i
        o = end
    return changes.size, cursor, o, r, e
