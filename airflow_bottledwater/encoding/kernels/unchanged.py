"""Values that an update left as they were and that are not in its message: found in the batch, looked up by key, and put in.

PostgreSQL does not send an out-of-line value again that an update did not touch (``u`` in a TupleData). The old row has it, if it
is sent; else an earlier change of the same key in the batch may; else the table as it is now is asked. A value of today belongs to
the change that it was looked up for, and is never passed on to another.
"""

from __future__ import annotations

import numpy as np

from airflow_bottledwater.compiled import compiled, memcpy
from airflow_bottledwater.encoding.kernels.fields import (
    MESSAGE_HEADER,
    NEW,
    OLD,
    is_row,
    read_change,
    read_tuple,
)
from airflow_bottledwater.encoding.kernels.rows import murmur2
from airflow_bottledwater.encoding.wire import (
    FIELD_BINARY,
    FIELD_TEXT,
    FIELD_UNCHANGED,
    FULL_OLD_ROW,
    MESSAGE_DELETE,
    MESSAGE_UPDATE,
    NEW_ROW,
)

#: what becomes of a change that lacked values
FILLED, TOMBSTONE, LEFT_OUT = 0, 1, 2


@compiled
def _lacks(b, change, program, fields):
    """How many values the new row of an update lacks."""
    if change.kind != MESSAGE_UPDATE:
        return 0
    columns = program.relations[change.relation].columns
    old, new = fields[0, :columns], fields[1, :columns]
    rows, _, _ = read_change(b, change, old, new)
    lacking = 0
    for c in range(columns if rows & NEW else 0):
        if new[c].kind == FIELD_UNCHANGED:
            lacking += 1
    return lacking


@compiled
def find_unchanged(b, changes, program, fields, affected):
    """Count the changes whose new row lacks values, and the values.

    :param fields: scratch: two rows, as wide as the widest relation.
    :param affected: set to 1 for the relations of such changes.
    """
    lacking = 0
    values = 0
    for i in range(changes.size):
        here = _lacks(b, changes[i], program, fields)
        if here > 0:
            lacking += 1
            values += here
            affected[changes[i].relation] = 1
    return lacking, values


@compiled
def leading(b, changes, program, fields, most):
    """How many changes there are before a transaction in which, with those before it, more than ``most`` lack values; at least a whole
    transaction."""
    lacking = 0
    begin = 0  # of the transaction
    for i in range(changes.size):
        if i > 0 and changes[i].lsn != changes[i - 1].lsn:
            begin = i
        if _lacks(b, changes[i], program, fields) > 0:
            lacking += 1
        if lacking > most and begin > 0:
            return begin
    return changes.size


@compiled
def _is_key(program, relation, column):
    for k in range(relation.keys):
        if program.keys[relation.key + k] == column:
            return True
    return False


@compiled
def _take_key(program, relation, row, old, has_old, key):
    """A row's key. A key value that is itself stored out of line is not sent again when it is unchanged; the old key then is
    (ExtractReplicaIdentity, src/backend/access/heap/heapam.c)."""
    for k in range(relation.keys):
        c = program.keys[relation.key + k]
        field = old[c] if has_old and row[c].kind == FIELD_UNCHANGED else row[c]
        key[k].kind = field.kind
        key[k].position = field.position
        key[k].length = field.length if field.kind == FIELD_BINARY or field.kind == FIELD_TEXT else 0


@compiled
def _same_key(b, key, other, n):
    for k in range(n):
        if key[k].length != other[k].length:
            return False
        for i in range(key[k].length):
            if b[key[k].position + i] != b[other[k].position + i]:
                return False
    return True


@compiled
def _slot(b, changes, relation, key, n, keys, slots):
    """The place of a key in an open hash table: where its owner stands, or would.

    :param relation: its number; equal keys of two relations have nothing to do with each other.
    :param keys: of all changes.
    """
    h = relation + 1
    for k in range(n):
        h = (h * 31) ^ murmur2(b, key[k].position, key[k].length)
    at = h & (slots.size - 1)
    while slots[at].owner > 0:
        owner = slots[at].owner - 1
        if changes[owner].relation == relation and _same_key(b, key, keys[owner], n):
            break
        at = (at + 1) & (slots.size - 1)
    return at


@compiled
def _of_earlier(column, earlier, row, lacking, missing, number_of):
    """A column's value in an earlier change: in its message, or as it was found for it in the batch."""
    if row[column].kind != FIELD_UNCHANGED:
        return row[column].kind, row[column].position, row[column].length
    mine = lacking[number_of[earlier]]
    for m in range(mine.first, mine.first + mine.missing):
        if missing[m].column == column:
            return missing[m].kind, missing[m].position, missing[m].length
    return np.int64(FIELD_UNCHANGED), np.int64(0), np.int64(0)


@compiled
def find_in_batch(b, changes, program, affected, fields, keys, slots, index):
    """List the changes that lack values, and of each value where the batch has it, if it does.

    :param fields: scratch: five rows, as wide as the widest relation.
    :param keys: a row of :data:`~airflow_bottledwater.encoding.layout.FIELD` for each change: the key of its new row, to be filled.
    :param slots: :data:`~airflow_bottledwater.encoding.layout.SLOT`, zeros, a power of two and more than there are changes.
    :param index: tables to be filled: of changes that lack values, of the values, and the numbers of the former by change.
    """
    lacking, missing, number_of = index
    count = 0
    m = 0
    for i in range(changes.size):
        change = changes[i]
        if not is_row(change.kind) or not affected[change.relation]:
            continue
        relation = program.relations[change.relation]
        old, new = fields[0, : relation.columns], fields[1, : relation.columns]
        earlier_old, earlier_new, old_key = fields[2, : relation.columns], fields[3, : relation.columns], fields[4]
        rows, _, _ = read_change(b, change, old, new)
        has_old = rows & OLD != 0
        full = has_old and b[change.offset + MESSAGE_HEADER] == FULL_OLD_ROW
        if has_old:
            _take_key(program, relation, old, old, False, old_key)
        if rows & NEW:
            _take_key(program, relation, new, old, has_old, keys[i])
        # without a key nothing tells which row an earlier change was of
        before = -1
        if rows & NEW and relation.keys > 0:
            at = _slot(b, changes, change.relation, old_key if has_old else keys[i], relation.keys, keys, slots)
            if slots[at].owner > 0:
                before = slots[at].latest - 1
        first = m
        was_read = False
        for c in range(relation.columns if rows & NEW else 0):
            if new[c].kind != FIELD_UNCHANGED:
                continue
            kind, position, length = np.int64(FIELD_UNCHANGED), np.int64(0), np.int64(0)
            if full or (has_old and _is_key(program, relation, c)):
                kind, position, length = old[c].kind, old[c].position, old[c].length
            if kind == FIELD_UNCHANGED and before >= 0:
                if not was_read:
                    read_change(b, changes[before], earlier_old, earlier_new)
                    was_read = True
                kind, position, length = _of_earlier(c, before, earlier_new, lacking, missing, number_of)
            missing[m].change = i
            missing[m].column = c
            missing[m].kind = kind
            missing[m].position = position
            missing[m].length = length
            m += 1
        if m > first:
            mine = lacking[count]
            mine.change = i
            mine.first = first
            mine.missing = m - first
            mine.moved = has_old and not _same_key(b, old_key, keys[i], relation.keys)
            number_of[i] = count
            count += 1
        if relation.keys > 0:
            if has_old:
                slots[_slot(b, changes, change.relation, old_key, relation.keys, keys, slots)].latest = 0
            if rows & NEW:
                at = _slot(b, changes, change.relation, keys[i], relation.keys, keys, slots)
                if slots[at].owner == 0:
                    slots[at].owner = i + 1
                slots[at].latest = i + 1


@compiled
def number_keys(b, changes, wanted, keys, n, slots, lookups):
    """Give each change the number of its key, equal ones the same; returns how many there are.

    :param wanted: changes of one relation.
    :param n: columns of its key.
    :param slots: as in :func:`find_in_batch`.
    :param lookups: to be filled, one for each of ``wanted``.
    """
    count = 0
    for w in range(wanted.size):
        i = wanted[w]
        at = _slot(b, changes, changes[i].relation, keys[i], n, keys, slots)
        if slots[at].owner == 0:
            slots[at].owner = i + 1
            slots[at].latest = count
            count += 1
        lookups[w] = slots[at].latest
    return count


@compiled
def write_array(b, fields, oid, out):
    """An array of values as PostgreSQL takes it in binary form (array_recv, src/backend/utils/adt/arrayfuncs.c).

    :param fields: of the values, none of which is NULL.
    :param oid: of their type.
    :param out: 20 bytes, and of each value its bytes and four.
    """
    header = (1, 0, oid, fields.size, 1)  # dimensions, flags, type; elements, lower bound
    o = 0
    for word in header:
        o = _write_int32(word, out, o)
    for i in range(fields.size):
        o = _write_int32(fields[i].length, out, o)
        memcpy(out.ctypes.data + o, b.ctypes.data + fields[i].position, fields[i].length)
        o += fields[i].length
    return o


@compiled
def _write_int32(value, out, o):
    out[o] = np.uint8((value >> 24) & 255)
    out[o + 1] = np.uint8((value >> 16) & 255)
    out[o + 2] = np.uint8((value >> 8) & 255)
    out[o + 3] = np.uint8(value & 255)
    return o + 4


@compiled
def fill_in(lacking, missing, wanted, lookups, place_of, cells, base):
    """Take over the values that were looked up; those without a row stay unchanged.

    :param wanted: numbers in ``lacking``, and ``lookups`` the number of the key of each.
    :param place_of: of each column its place in ``cells``; -1: it was not read.
    :param cells: rows of :data:`~airflow_bottledwater.encoding.layout.FIELD`, by the number of the key.
    :param base: added to positions in the buffer of the cells.
    """
    for w in range(wanted.size):
        mine = lacking[wanted[w]]
        for m in range(mine.first, mine.first + mine.missing):
            place = place_of[missing[m].column]
            if missing[m].kind != FIELD_UNCHANGED or place < 0:
                continue
            cell = cells[lookups[w], place]
            if cell.kind != FIELD_UNCHANGED:
                missing[m].kind = cell.kind
                missing[m].position = cell.position + base
                missing[m].length = cell.length
                mine.reread = 1


@compiled
def _new_row_at(b, change, old):
    """Where the new row's tag is; the old row is read over."""
    p = change.offset + MESSAGE_HEADER
    if b[p] != NEW_ROW:
        _, _, p = read_tuple(b, p + 1, change.offset + change.length, old)
    return p


@compiled
def _value(field, b, values):
    """A field's bytes: behind the batch's own come those that were looked up."""
    if field.position >= b.size:
        return values.ctypes.data + field.position - b.size
    return b.ctypes.data + field.position


@compiled
def rebuild(b, values, changes, lacking, missing, program, fields, out):
    """Write the messages of changes that lacked values anew, with what was found, and point the changes at them; returns the bytes
    used, or what it takes where ``out`` is empty.

    :param values: those that were looked up.
    :param fields: scratch: two rows.
    :param out: will stand behind ``b``.
    """
    o = 0
    for k in range(lacking.size):
        mine = lacking[k]
        if mine.fate == LEFT_OUT:
            continue
        change = changes[mine.change]
        columns = program.relations[change.relation].columns
        old, new = fields[0, :columns], fields[1, :columns]
        at = _new_row_at(b, change, old)
        begin = o
        head = at - change.offset
        if out.size > 0:
            memcpy(out.ctypes.data + o, b.ctypes.data + change.offset, head)
        o += head
        if mine.fate == TOMBSTONE:
            if out.size > 0:
                out[begin] = MESSAGE_DELETE
                change.kind = MESSAGE_DELETE
        else:
            read_tuple(b, at + 1, change.offset + change.length, new)
            if out.size > 0:
                memcpy(out.ctypes.data + o, b.ctypes.data + at, 3)  # the tag, and how many columns
            o += 3
            m = mine.first
            for c in range(columns):
                field = new[c]
                if m < mine.first + mine.missing and missing[m].column == c:
                    new[c].kind = missing[m].kind
                    new[c].position = missing[m].position
                    new[c].length = missing[m].length
                    m += 1
                has_bytes = field.kind == FIELD_BINARY or field.kind == FIELD_TEXT
                if out.size > 0:
                    out[o] = field.kind
                    if has_bytes:
                        _write_int32(field.length, out, o + 1)
                        memcpy(out.ctypes.data + o + 5, _value(field, b, values), field.length)
                o += 5 + field.length if has_bytes else 1
        if out.size > 0:
            change.offset = b.size + begin
            change.length = o - begin
    return o
