"""Finds the fields of rows in messages, and those whose text has to come from the server."""

from __future__ import annotations

import numpy as np

from airflow_bottledwater.compiled import callee, compiled
from airflow_bottledwater.encoding import wire
from airflow_bottledwater.encoding.kernels.reading import i16, i32

#: flags for the rows that a message has
OLD, NEW = 1, 2
#: bytes before a message's rows: its kind and the oid of its table
MESSAGE_HEADER = 5


@callee
def read_copy_row(b, p, end, fields):
    """Find the fields of one COPY row: int16 count, then int32 length (-1: NULL) and bytes each.

    https://www.postgresql.org/docs/current/sql-copy.html (Binary Format, Tuples)

    :returns: whether the row is well formed; if not, also the column and the position of the error.
    """
    if end - p < 2 or i16(b, p) != fields.size:
        return False, np.int64(-1), p
    p += 2
    for c in range(fields.size):
        if end - p < 4:
            return False, np.int64(c), p
        n = i32(b, p)
        p += 4
        if n == -1:
            fields[c].kind = wire.FIELD_NULL
            continue
        if n < 0 or n > end - p:
            return False, np.int64(c), p
        fields[c].kind = wire.FIELD_BINARY
        fields[c].position = p
        fields[c].length = n
        p += n
    return p == end, np.int64(-1), p


@callee
def read_tuple(b, p, end, fields):
    """Find the fields of a pgoutput TupleData; like :func:`read_copy_row`, but if it is well formed, the position is
    that of its end.

    https://www.postgresql.org/docs/current/protocol-logicalrep-message-formats.html (TupleData)
    """
    if end - p < 2 or i16(b, p) != fields.size:
        return False, np.int64(-1), p
    p += 2
    for c in range(fields.size):
        if end - p < 1:
            return False, np.int64(c), p
        k = np.int64(b[p])
        p += 1
        fields[c].kind = k
        if k == wire.FIELD_NULL or k == wire.FIELD_UNCHANGED:
            continue
        if (k != wire.FIELD_BINARY and k != wire.FIELD_TEXT) or end - p < 4:
            return False, np.int64(c), p
        n = i32(b, p)
        p += 4
        if n < 0 or n > end - p:
            return False, np.int64(c), p
        fields[c].position = p
        fields[c].length = n
        p += n
    return True, np.int64(-1), p


@callee
def is_row(kind):
    """Whether a message of this kind has rows."""
    return kind == wire.MESSAGE_INSERT or kind == wire.MESSAGE_UPDATE or kind == wire.MESSAGE_DELETE


@callee
def read_change(b, change, old, new):
    """Find the fields of an Insert, Update or Delete.

    :param old: receives the fields of the old row, those of the key (K) or all (O); ``new`` receives those of the new
        row.
    :returns: which rows there are (:data:`OLD`, :data:`NEW`), or 0 if the message is malformed; then the column and the
        position of the error.
    """
    p = change.offset + MESSAGE_HEADER
    end = change.offset + change.length
    found = 0
    column = np.int64(-1)
    while p < end:
        is_new = b[p] == wire.NEW_ROW
        good, column, p = read_tuple(b, p + 1, end, new if is_new else old)
        if not good:
            return 0, column, p
        found |= NEW if is_new else OLD
    return found, column, p


@callee
def column_of(program, relation, is_key, i):
    """The row, in the table of columns, of the relation's i-th column, or of the i-th column of its key."""
    return program.keys[relation.key + i] if is_key else np.int64(i)


@callee
def in_key(program, relation, column):
    """Whether a column, by its number within its relation, is one of the key."""
    for k in range(relation.keys):
        if program.keys[relation.key + k] == column:
            return True
    return False


@callee
def keep_key(program, relation, fields):
    """Make all fields NULL but those of the key."""
    for c in range(relation.columns):
        if not in_key(program, relation, c):
            fields[c].kind = wire.FIELD_NULL


@callee
def convert_fields(program, relation, is_key, fields, texts, cursor):
    """Point the fields that the server has converted to their texts; returns the number of the next text."""
    if relation.converts:
        for i in range(relation.keys if is_key else relation.columns):
            c = column_of(program, relation, is_key, i)
            if program.columns[relation.column + c].converted and fields[c].kind == wire.FIELD_BINARY:
                fields[c].kind = wire.FIELD_CONVERTED
                fields[c].position = texts.offsets[cursor]
                fields[c].length = texts.offsets[cursor + 1] - texts.offsets[cursor]
                cursor += 1
    return cursor


@callee
def _list_conversions(program, relation, is_key, fields, change, found, n):
    if relation.converts:
        for i in range(relation.keys if is_key else relation.columns):
            c = column_of(program, relation, is_key, i)
            if program.columns[relation.column + c].converted and fields[c].kind == wire.FIELD_BINARY:
                if n < found.size:
                    found[n].position = fields[c].position
                    found[n].length = fields[c].length
                    found[n].column = relation.column + c
                    found[n].change = change
                n += 1
    return n


@compiled
def find_conversions(b, changes, program, fields, found):
    """List the values that PostgreSQL has to convert to text, in the order in which :func:`encode_changes` uses them.

    :param fields: scratch memory: two rows of :data:`~airflow_bottledwater.encoding.layout.FIELD`, as wide as the
        widest relation.
    :param found: receives rows of :data:`~airflow_bottledwater.encoding.layout.CONVERSION`.
    :returns: how many there are; if these are more than fit into ``found``, it has to be called again with a larger
        one.
    """
    n = 0
    for i in range(changes.size):
        if not is_row(changes[i].kind):
            continue
        relation = program.relations[changes[i].relation]
        if relation.outbox:
            continue
        old, new = fields[0, : relation.columns], fields[1, : relation.columns]
        rows, _, _ = read_change(b, changes[i], old, new)
        if rows & OLD:
            n = _list_conversions(program, relation, relation.whole_old == 0, old, i, found, n)
        if rows & NEW:
            n = _list_conversions(program, relation, False, new, i, found, n)
    return n
