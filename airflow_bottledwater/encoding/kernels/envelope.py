"""Writes what is around a row: Confluent's frame, and Debezium's envelope, whose constant parts are the program's
segments (:class:`~airflow_bottledwater.encoding.envelope.Around`)."""

from __future__ import annotations

import numpy as np

from airflow_bottledwater.compiled import callee, compiled, inlined
from airflow_bottledwater.encoding.kernels.writing import BACKSLASH, COMMA, NULL, QUOTE, copy_bytes, integer, varint
from airflow_bottledwater.encoding.wire import MAGIC, SPACE

#: the segments of an envelope: in front of each of its variable parts, behind the last, and the words of ``snapshot``
(
    BEFORE,
    AFTER,
    SOURCE_TIME,
    SNAPSHOT,
    SEQUENCE,
    SOURCE_MICROS,
    SOURCE_NANOS,
    XID,
    LSN,
    OP,
    TIME,
    MICROS,
    NANOS,
    END,
    WORDS,
) = range(15)
#: bytes that the variable parts behind the rows have at most
_ROOM = 400


@callee
def _segment(program, number, out, o):
    segment = program.columns[number]
    return copy_bytes(program.names, segment.name, segment.name_length, out, o)


@inlined
def begin_value(program, schema, segment, out, o):
    """Write what is in front of a key or a value: the id of its schema, and a segment.

    :param segment: its row in the table of columns; -1: none.
    """
    length = program.columns[segment].name_length if segment >= 0 else np.int64(0)
    if out.size - o < length + 8:
        return np.int64(SPACE)
    if program.framed:
        out[o] = MAGIC
        out[o + 1] = np.uint8((schema >> 24) & 255)
        out[o + 2] = np.uint8((schema >> 16) & 255)
        out[o + 3] = np.uint8((schema >> 8) & 255)
        out[o + 4] = np.uint8(schema & 255)
        o += 5
    return _segment(program, segment, out, o) if segment >= 0 else np.int64(o)


@callee
def begin_row(program, present, out, o):
    """Write what is in front of a row that may be absent, or that it is absent."""
    if out.size - o < 8:
        return np.int64(SPACE)
    if program.json:
        return np.int64(o) if present else _null(out, o)
    out[o] = 2 if present else 0
    return np.int64(o + 1)


@callee
def between_rows(program, relation, out, o):
    """Write what is between the old row and the new one."""
    if out.size - o < program.columns[relation.envelope + AFTER].name_length:
        return np.int64(SPACE)
    return _segment(program, relation.envelope + AFTER, out, o)


@callee
def _null(out, o):
    for i in range(NULL.size):
        out[o + i] = NULL[i]
    return np.int64(o + NULL.size)


@callee
def _number(json, value, out, o):
    return integer(value, out, o) if json else varint(value, out, o)


@callee
def _optional(json, value, absent, out, o):
    """Write a number that may be absent."""
    if json:
        return _null(out, o) if absent else integer(value, out, o)
    out[o] = 0 if absent else 2
    return np.int64(o + 1) if absent else varint(value, out, o + 1)


@callee
def _quote(json, out, o):
    """Write a quote inside a text."""
    if json:
        out[o] = BACKSLASH
        o += 1
    out[o] = QUOTE
    return o + 1


@callee
def _sequence(json, facts, out, o):
    """Write ``["lsn","ordinal"]``, a text."""
    begin = o + (1 if json else 2)
    o = begin
    out[o] = np.uint8(ord("["))
    o = _quote(json, out, o + 1)
    o = _quote(json, out, integer(facts.lsn, out, o))
    out[o] = COMMA
    o = _quote(json, out, o + 1)
    o = _quote(json, out, integer(facts.ordinal, out, o))
    out[o] = np.uint8(ord("]"))
    o += 1
    if json:
        out[begin - 1] = out[o] = QUOTE
        return np.int64(o + 1)
    out[begin - 2] = 2
    out[begin - 1] = np.uint8((o - begin) << 1)  # 36 bytes at most
    return np.int64(o)


@callee
def end_envelope(program, relation, facts, out, o):
    """Write what is behind the rows: where and when the change was made, and what it is.

    :param facts: a row of :data:`~airflow_bottledwater.encoding.layout.FACTS`.
    """
    json, first = program.json, relation.envelope
    room = np.int64(_ROOM)
    for i in range(SOURCE_TIME, WORDS):
        room += program.columns[first + i].name_length
    if out.size - o < room:
        return np.int64(SPACE)
    o = _number(json, facts.time // 1000, out, _segment(program, first + SOURCE_TIME, out, o))
    o = _segment(program, first + WORDS + facts.snapshot, out, _segment(program, first + SNAPSHOT, out, o))
    o = _segment(program, first + SEQUENCE, out, o)
    if facts.lsn > 0:
        o = _sequence(json, facts, out, o)
    else:
        o = _optional(json, np.int64(0), True, out, o)
    o = _optional(json, facts.time, False, out, _segment(program, first + SOURCE_MICROS, out, o))
    o = _optional(json, facts.time * 1000, False, out, _segment(program, first + SOURCE_NANOS, out, o))
    o = _optional(json, facts.xid, facts.xid < 0, out, _segment(program, first + XID, out, o))
    o = _optional(json, facts.lsn, facts.lsn == 0, out, _segment(program, first + LSN, out, o))
    o = _segment(program, first + OP, out, o)
    out[o] = np.uint8(facts.event)
    o = _optional(json, facts.now // 1000, False, out, _segment(program, first + TIME, out, o + 1))
    o = _optional(json, facts.now, False, out, _segment(program, first + MICROS, out, o))
    o = _optional(json, facts.now * 1000, False, out, _segment(program, first + NANOS, out, o))
    return np.int64(_segment(program, first + END, out, o))


@compiled
def encode_removal(program, rel, facts, out, ends):
    """Write an envelope without an old row, and without a new one.

    :param facts: one row of :data:`~airflow_bottledwater.encoding.layout.FACTS`.
    :param ends: receives where the old row would be, where what is behind the new one begins, and where that ends.
    """
    relation = program.relations[rel]
    ends[0] = begin_value(program, relation.value_schema, relation.envelope, out, 0)
    ends[1] = begin_row(program, False, out, between_rows(program, relation, out, ends[0]))
    ends[2] = end_envelope(program, relation, facts[0], out, ends[1])
