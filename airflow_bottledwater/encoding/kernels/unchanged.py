"""Completes rows with values that an update left unchanged and that are not in its message: they are found in the batch
or looked up.

PostgreSQL does not send a value that is stored out of line (TOAST) if an update did not change it (``u`` in a
TupleData). The old row has it, if that is sent; otherwise an earlier change of the same key in the batch may have it;
otherwise it is looked up in the table as it is now. A value that was looked up belongs to the change that it was looked
up for, and is never used for another one.

An insert has all its values, unless it is an update that has brought a row into a row filter (pgoutput_row_filter,
src/backend/replication/pgoutput/pgoutput.c). What an earlier change of that key has is then another row's.
"""

from __future__ import annotations

import numpy as np

from airflow_bottledwater.compiled import callee, compiled, memcpy
from airflow_bottledwater.encoding import wire
from airflow_bottledwater.encoding.kernels.fields import (
    MESSAGE_HEADER,
    NEW,
    OLD,
    in_key,
    is_row,
    read_change,
    read_tuple,
)
from airflow_bottledwater.encoding.kernels.rows import murmur2

#: what becomes of a change that lacks values: its row is completed, only its tombstone is published, or it is left out
FILLED, TOMBSTONE, LEFT_OUT = 0, 1, 2


@callee
def _may_lack(change, program):
    """Whether the new row of a change may lack values that are needed."""
    if program.relations[change.relation].outbox:
        return False
    if change.kind == wire.MESSAGE_INSERT:
        return program.relations[change.relation].filtered != 0
    return change.kind == wire.MESSAGE_UPDATE


@callee
def _lacks(b, change, program, fields):
    """How many values the new row of an update lacks, or of an insert that may have been one."""
    if not _may_lack(change, program):
        return 0
    columns = program.relations[change.relation].columns
    old, new = fields[0, :columns], fields[1, :columns]
    rows, _, _ = read_change(b, change, old, new)
    lacking = 0
    for c in range(columns if rows & NEW else 0):
        if new[c].kind == wire.FIELD_UNCHANGED:
            lacking += 1
    return lacking


@compiled
def find_unchanged(b, changes, program, fields, affected):
    """Count the changes whose new row lacks values, and the values.

    :param fields: scratch memory: two rows, as wide as the widest relation.
    :param affected: set to 1 for the relation versions of such changes.
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
    """How many leading changes there are until more than ``most`` of them lack values."""
    lacking = 0
    for i in range(changes.size):
        if _lacks(b, changes[i], program, fields) > 0:
            lacking += 1
        if lacking > most:
            return i
    return changes.size


@callee
def _take_key(program, relation, row, old, has_old, key):
    """Copy the fields of a row's key. A key value that is stored out of line is not sent again in the new row if it is
    unchanged; the old key, which is sent then, has it (ExtractReplicaIdentity, src/backend/access/heap/heapam.c)."""
    for k in range(relation.keys):
        c = program.keys[relation.key + k]
        field = old[c] if has_old and row[c].kind == wire.FIELD_UNCHANGED else row[c]
        key[k].kind = field.kind
        key[k].position = field.position
        key[k].length = field.length if field.kind == wire.FIELD_BINARY or field.kind == wire.FIELD_TEXT else 0


@callee
def _same_key(b, key, other, n):
    for k in range(n):
        if key[k].length != other[k].length:
            return False
        for i in range(key[k].length):
            if b[key[k].position + i] != b[other[k].position + i]:
                return False
    return True


@callee
def _slot(b, changes, relation, key, n, keys, slots):
    """The slot of a key in a hash table with open addressing: that of the change that owns the key, or a free one.

    :param relation: the relation's number; equal keys of different relations are different.
    :param keys: the keys of all changes.
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


@callee
def _of_earlier(column, earlier, row, lacking, missing, number_of):
    """A column's value in an earlier change: from its message, or as it was found in the batch for that change."""
    if row[column].kind != wire.FIELD_UNCHANGED:
        return row[column].kind, row[column].position, row[column].length
    mine = lacking[number_of[earlier]]
    # a change that lacks nothing is not in the list
    for m in range(mine.first, mine.first + (mine.missing if mine.change == earlier else 0)):
        if missing[m].column == column:
            return missing[m].kind, missing[m].position, missing[m].length
    return np.int64(wire.FIELD_UNCHANGED), np.int64(0), np.int64(0)


@compiled
def find_in_batch(b, changes, program, affected, fields, keys, slots, index):
    """List the changes that lack values, and for each value, where it is in the batch, if it is there.

    :param fields: scratch memory: five rows, as wide as the widest relation.
    :param keys: receives, for each change, a row of :data:`~airflow_bottledwater.encoding.layout.FIELD` with the key of
        its new row.
    :param slots: zeros of :data:`~airflow_bottledwater.encoding.layout.SLOT`; their number is a power of two, and
        larger than that of the changes.
    :param index: tables to be filled: the changes that lack values, the values, and for each change its number in the
        first of these.
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
        full = has_old and b[change.offset + MESSAGE_HEADER] == wire.FULL_OLD_ROW
        if has_old:
            _take_key(program, relation, old, old, False, old_key)
        if rows & NEW:
            _take_key(program, relation, new, old, has_old, keys[i])
        # without a key, it is not known which row an earlier change belongs to
        before = -1
        if rows & NEW and relation.keys > 0 and change.kind != wire.MESSAGE_INSERT:
            at = _slot(b, changes, change.relation, old_key if has_old else keys[i], relation.keys, keys, slots)
            if slots[at].owner > 0:
                before = slots[at].latest - 1
        first = m
        was_read = False
        # as _lacks counts them
        for c in range(relation.columns if rows & NEW and _may_lack(change, program) else 0):
            if new[c].kind != wire.FIELD_UNCHANGED:
                continue
            kind, position, length = np.int64(wire.FIELD_UNCHANGED), np.int64(0), np.int64(0)
            # a large value that is still there was not NULL: that is the old row of a partition whose replica identity
            # is only the key
            if (full or (has_old and in_key(program, relation, c))) and old[c].kind != wire.FIELD_NULL:
                kind, position, length = old[c].kind, old[c].position, old[c].length
            if kind == wire.FIELD_UNCHANGED and before >= 0:
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
    """Number the distinct keys of changes; returns how many there are.

    :param wanted: changes of one relation.
    :param n: the number of columns of its key.
    :param slots: see :func:`find_in_batch`.
    :param lookups: receives, for each of ``wanted``, the number of its key.
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
    """Write values as an array in the binary form that PostgreSQL takes (array_recv,
    src/backend/utils/adt/arrayfuncs.c).

    :param fields: the fields of the values, none of which is NULL.
    :param oid: the oid of their type.
    :param out: it must have 20 bytes, and for each value 4 more than the value has.
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


@callee
def _write_int32(value, out, o):
    out[o] = np.uint8((value >> 24) & 255)
    out[o + 1] = np.uint8((value >> 16) & 255)
    out[o + 2] = np.uint8((value >> 8) & 255)
    out[o + 3] = np.uint8(value & 255)
    return o + 4


@compiled
def fill_in(lacking, missing, wanted, lookups, place_of, cells, base):
    """Fill in the values that were looked up; if there was no row, they stay marked as unchanged.

    :param wanted: the changes, by their numbers in ``lacking``; ``lookups`` has the number of the key of each.
    :param place_of: for each column, its index in ``cells``; -1 if it was not read.
    :param cells: rows of :data:`~airflow_bottledwater.encoding.layout.FIELD`, by the number of the key.
    :param base: what is added to positions in the buffer of the cells.
    """
    for w in range(wanted.size):
        mine = lacking[wanted[w]]
        for m in range(mine.first, mine.first + mine.missing):
            place = place_of[missing[m].column]
            if missing[m].kind != wire.FIELD_UNCHANGED or place < 0:
                continue
            cell = cells[lookups[w], place]
            if cell.kind != wire.FIELD_UNCHANGED:
                missing[m].kind = cell.kind
                missing[m].position = cell.position + base
                missing[m].length = cell.length
                mine.reread = 1


@callee
def _new_row_at(b, change, old):
    """The position of the new row's tag, after the old row."""
    p = change.offset + MESSAGE_HEADER
    if b[p] != wire.NEW_ROW:
        _, _, p = read_tuple(b, p + 1, change.offset + change.length, old)
    return p


@callee
def _value(field, b, values):
    """A field's bytes, from the batch or, at positions beyond its end, from the values that were looked up."""
    if field.position >= b.size:
        return values.ctypes.data + field.position - b.size
    return b.ctypes.data + field.position


@compiled
def rebuild(b, values, changes, lacking, missing, program, fields, out):
    """Write the messages of changes that lacked values anew, with the values that were found, and point the changes to
    them; returns the bytes used. If ``out`` is empty, nothing is written, and the result is how many bytes are needed.

    :param values: the values that were looked up.
    :param fields: scratch memory: two rows.
    :param out: receives the messages; it comes after ``b`` in the same buffer.
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
                out[begin] = wire.MESSAGE_DELETE
                change.kind = wire.MESSAGE_DELETE
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
                has_bytes = field.kind == wire.FIELD_BINARY or field.kind == wire.FIELD_TEXT
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
