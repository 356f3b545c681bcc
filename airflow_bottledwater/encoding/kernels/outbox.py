"""Makes records of an outbox's rows: the topic by the value of a column, the key, the value and the headers as their
columns have them."""

from __future__ import annotations

import numpy as np

from airflow_bottledwater.compiled import callee, compiled, memcpy
from airflow_bottledwater.encoding import wire
from airflow_bottledwater.encoding.kernels.fields import MESSAGE_HEADER, read_tuple
from airflow_bottledwater.encoding.kernels.reading import i16, i32, i64
from airflow_bottledwater.encoding.kernels.rows import murmur2
from airflow_bottledwater.encoding.kernels.text import uuid
from airflow_bottledwater.encoding.kernels.writing import integer, length_of
from airflow_bottledwater.encoding.layout import int64s
from airflow_bottledwater.encoding.outbox import AS_INTEGER, AS_IT_IS, AS_JSONB, AS_UUID

#: the parts of the records of a relation version: of the topic, the key and the value, then of the headers
PLAN = int64s("columns", "first", "headers", "route")
#: one of them, see :class:`airflow_bottledwater.encoding.outbox.RecordPart`; where its header is named, with the byte 0
PART = int64s("column", "form", "name", "name_length")
#: a value that chooses a topic: where its bytes are, whose it is, and the topic's number; -1 if there can be none
ROUTE = int64s("route", "begin", "end", "topic", "partitions")

#: why a row is no record, besides the reasons of :mod:`~airflow_bottledwater.encoding.wire`: it chooses a topic that
#: cannot be
NO_TOPIC = np.int64(-100)
#: bytes of an integer or a uuid as text, at most; and of the framing of a header
_TEXT, _FRAME = 40, 8


@callee
def _read(b, change, plan, parts, fields):
    """Find the fields of an Insert; returns how many bytes its record needs at most, or a negative code."""
    at = change.offset + MESSAGE_HEADER + 1
    good, _, _ = read_tuple(b, at, change.offset + change.length, fields[: plan.columns])
    if not good:
        return np.int64(wire.MALFORMED)
    need = np.int64(0)
    for k in range(plan.headers + 3):
        part = parts[plan.first + k]
        need += part.name_length + _TEXT + _FRAME
        if part.column < 0:
            continue
        # of an update that has brought the row into a row filter
        if fields[part.column].kind == wire.FIELD_UNCHANGED:
            return np.int64(wire.UNCHANGED)
        # several parts may be of one column
        if fields[part.column].kind != wire.FIELD_NULL:
            need += fields[part.column].length
    return need


@callee
def _route_of(b, plan, parts, fields, routes, names, last):
    """The number of the route of a row; -1 if it is not known yet.

    :param last: the number of the route of the row before, which is looked at first.
    """
    column = parts[plan.first].column
    n = np.int64(0)
    p = np.int64(0)
    if column >= 0 and fields[column].kind != wire.FIELD_NULL:
        p, n = fields[column].position, fields[column].length
    for k in range(-1, routes.size):
        route = routes[last if k < 0 else k]
        if route.route == plan.route and route.end - route.begin == n:
            same = True
            for i in range(n):
                if names[route.begin + i] != b[p + i]:
                    same = False
                    break
            if same:
                return last if k < 0 else np.int64(k)
    return np.int64(-1)


@compiled
def find_route(b, changes, rows, start, fields, plans, parts, routes, names):
    """The place, among ``rows``, of the first row whose topic is not known yet, from ``start`` on, and where the value
    is that chooses it, and how long; as many as there are rows, if all are.

    :param rows: the numbers of the changes that are inserts of outboxes.
    """
    last = np.int64(0)
    for r in range(start, rows.size):
        plan = plans[changes[rows[r]].relation]
        if plan.columns < 0 or _read(b, changes[rows[r]], plan, parts, fields) < 0:
            continue
        found = _route_of(b, plan, parts, fields, routes, names, last)
        if found < 0:
            column = parts[plan.first].column
            if column < 0 or fields[column].kind == wire.FIELD_NULL:
                return np.int64(r), np.int64(0), np.int64(0)
            return np.int64(r), fields[column].position, fields[column].length
        last = found
    return np.int64(rows.size), np.int64(0), np.int64(0)


@callee
def _write(part, b, fields, out, o):
    """Write a key, a value or the value of a header; returns where it ends, or a negative code, and its length: -1 for
    NULL."""
    field = fields[part.column]
    if field.kind == wire.FIELD_NULL:
        return np.int64(o), np.int64(-1)
    p, n, end = field.position, field.length, np.int64(wire.MALFORMED)
    form = part.form if field.kind == wire.FIELD_BINARY else np.int64(AS_IT_IS)
    if form == AS_INTEGER:
        if n == 2:
            end = np.int64(integer(np.int64(i16(b, p)), out, o))
        elif n == 4:
            end = np.int64(integer(np.int64(i32(b, p)), out, o))
        elif n == 8:
            end = np.int64(integer(i64(b, p), out, o))
    elif form == AS_UUID:
        if n == 16:
            end = np.int64(uuid(b, p, out, o))
    elif form == AS_IT_IS or (n > 0 and b[p] == 1):
        skipped = 1 if form == AS_JSONB else 0
        memcpy(out.ctypes.data + o, b.ctypes.data + p + skipped, n - skipped)
        end = np.int64(o + n - skipped)
    return end, end - o


@callee
def _write_record(b, plan, parts, fields, names, record, out, o):
    """Write a key, a value, and the headers: each a length and the name with the byte 0, then a length (-1: NULL) and
    the value; returns where they end, or a negative code."""
    record.key = o
    o, record.key_length = _write(parts[plan.first + 1], b, fields, out, o)
    if o < 0:
        return o
    record.value = o
    o, record.value_length = _write(parts[plan.first + 2], b, fields, out, o)
    if o < 0:
        return o
    record.headers = o
    for k in range(plan.headers):
        part = parts[plan.first + 3 + k]
        length_of(part.name_length, out, o)
        memcpy(out.ctypes.data + o + 4, names.ctypes.data + part.name, part.name_length)
        at = o + 4 + part.name_length
        o, length = _write(part, b, fields, out, at + 4)
        if o < 0:
            return o
        length_of(length, out, at)
    record.headers_length = o - record.headers
    return o


@compiled
def encode_outbox(b, changes, rows, start, fields, plans, parts, routes, names, output):
    """Make records of rows from ``start`` on, whose routes are all known; returns (next row, bytes used, records,
    errors).

    :param rows: see :func:`find_route`.
    :param fields: scratch memory: a row of :data:`~airflow_bottledwater.encoding.layout.FIELD`, as wide as the widest
        outbox.
    :param plans: by relation, rows of :data:`PLAN`; ``columns`` is negative where there is none.
    :param parts: rows of :data:`PART`, ``routes`` of :data:`ROUTE`; ``names`` has their bytes.
    """
    records, errors, out = output.records, output.errors, output.data
    o = np.int64(0)
    made = 0
    failed = 0
    last = np.int64(0)
    for r in range(start, rows.size):
        change = changes[rows[r]]
        plan = plans[change.relation]
        if made == records.size or failed == errors.size:
            return r, o, made, failed
        end = _read(b, change, plan, parts, fields)
        if end >= 0:
            if o + end > out.size:
                return r, o, made, failed
            last = max(np.int64(0), _route_of(b, plan, parts, fields, routes, names, last))
            if routes[last].topic < 0:
                end = NO_TOPIC
            else:
                end = _write_record(b, plan, parts, fields, names, records[made], out, o)
        if end < 0:
            errors[failed].row = rows[r]
            errors[failed].code = end
            errors[failed].column = last
            errors[failed].offset = -1
            failed += 1
            continue
        record = records[made]
        record.topic = routes[last].topic
        record.partition = murmur2(out, o, max(record.key_length, 0)) % routes[last].partitions
        record.row = rows[r]
        record.event = wire.EVENT_CREATE
        record.time = change.time
        record.lsn = change.lsn
        record.ordinal = change.ordinal
        record.flags = change.flags
        made += 1
        o = end
    return rows.size, o, made, failed
