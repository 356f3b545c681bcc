"""Compiled hashes of records of plain types, in each format: the same as those of rows (:mod:`.fields`)."""

from __future__ import annotations

import numpy as np

from airflow_bottledwater.compiled import callee, compiled, memcpy
from airflow_bottledwater.encoding.protobuf import FIXED32, FIXED64, LENGTH, VARINT
from airflow_bottledwater.verify import fields as f
from airflow_bottledwater.verify.fields import (
    CLOSE,
    NULL,
    OPEN,
    _float_bits,
    _hash,
    _hash_number,
    fold,
    hash_text,
    key_hash,
    note,
)
from airflow_bottledwater.verify.skip import long, skipped, varint

#: in which form records are
AVRO, JSON, PROTOBUF = range(3)
_BACKSLASH, _QUOTE = ord("\\"), ord('"')
#: what may be around a key or row: a schema of Kafka Connect (in JSON), and an envelope
PAYLOAD, AFTER = 1, 2
_PAYLOAD = np.frombuffer(b'"payload":', dtype=np.uint8).copy()
_AFTER = np.frombuffer(b'"after":', dtype=np.uint8).copy()


# ---------------------------------------------------------------------- Avro
@compiled
def schema_ids(messages, of_keys, head, out):
    """The id of each record's schema in Confluent's wire format; -1 if it has none.

    :param head: room for five bytes.
    """
    for i in range(messages.size):
        address = messages[i].key if of_keys else messages[i].payload
        size = messages[i].key_len if of_keys else messages[i].len
        out[i] = -1
        if address != 0 and size >= 5:
            memcpy(head.ctypes.data, address, np.int64(5))
            if head[0] == 0:
                number = np.int64(0)
                for k in range(1, 5):
                    number = number * 256 + np.int64(head[k])
                out[i] = number


@callee
def _little(data, at, size):
    value = np.uint64(0)
    for i in range(size):
        value |= np.uint64(data[at + i]) << np.uint64(8 * i)
    return np.int64(value)


@callee
def _signed(data, at, size):
    """A big-endian number in two's complement."""
    value = np.int64(-1) if size > 0 and data[at] >= 128 else np.int64(0)
    for i in range(size):
        value = (value << np.int64(8)) | np.int64(data[at + i])
    return value


@callee
def _fixed(data, at, kind, scratch):
    """A number of one byte, or the bits of a float."""
    if kind == f.FLOAT:
        scratch[2][0] = _little(data, at, 8)
        return _float_bits(scratch[1][0], scratch[1], scratch[2])
    if kind == f.SINGLE:
        scratch[4][0] = np.int32(np.uint32(_little(data, at, 4)))
        return _float_bits(np.float64(scratch[3][0]), scratch[1], scratch[2])
    return np.int64(data[at])


@callee
def _avro_field(data, at, end, field, seed, scratch):
    """(hash, next) of a field that is not null; next is -1 if the bytes do not fit."""
    kind, column = field.kind, field.column
    if kind == f.TEXT or kind == f.BYTES or kind == f.DECIMAL:
        size, at = long(data, at, end)
        if at < 0 or size < 0 or at + size > end:
            return np.uint64(0), np.int64(-1)
        if kind == f.DECIMAL and size <= 8:
            return _hash_number(_signed(data, at, size), column, seed), at + size
        return _hash(data, at, size, column, seed), at + size
    if field.text:
        size, at = long(data, at, end)
        if at < 0 or size < 0 or at + size > end:
            return np.uint64(0), np.int64(-1)
        good, found = hash_text(data, at, at + size, field, seed, scratch[:3], data)
        return found, at + size if good else np.int64(-1)
    if kind == f.FLOAT or kind == f.SINGLE or kind == f.BOOL:
        size = 8 if kind == f.FLOAT else 4 if kind == f.SINGLE else 1
        if at + size > end:
            return np.uint64(0), np.int64(-1)
        return _hash_number(_fixed(data, at, kind, scratch), column, seed), at + size
    value, at = long(data, at, end)
    return _hash_number(value, column, seed), at


@callee
def _avro_array(data, at, end, field, seed, scratch):
    """Like :func:`_avro_field`, of an array of unions with null, as deep as the field says; blocks may be preceded by
    their size."""
    column, left = field.column, scratch[5]
    state, level = fold(np.uint64(0), OPEN, column, seed), 0
    left[0] = 0
    while level >= 0:
        if left[level] == 0:
            count, at = long(data, at, end)
            if at >= 0 and count < 0:
                count = -count
                _, at = long(data, at, end)
            if at < 0 or count < 0:
                return state, np.int64(-1)
            if count == 0:
                state = fold(state, CLOSE, column, seed)
                level -= 1
                continue
            left[level] = count
        left[level] -= 1
        if level < field.dimensions - 1:
            level += 1
            left[level] = 0
            state = fold(state, OPEN, column, seed)
            continue
        branch, at = long(data, at, end)
        if at < 0 or branch < 0 or branch > 1:
            return state, np.int64(-1)
        found = NULL
        if branch == 1:
            found, at = _avro_field(data, at, end, field, seed, scratch)
            if at < 0:
                return state, at
        state = fold(state, found, column, seed)
    return state, at


@callee
def _avro_row(data, at, size, schema, plan, seed, scratch, others):
    """(sum of the columns' hashes, next, values of other columns that are noted); next is -1 if the bytes do not fit
    the schema.

    :param others: see :func:`_sum`.
    """
    fields = plan[1]
    places, noted, row, address = others
    total = np.uint64(0)
    if schema.count < 0:
        return total, np.int64(-1), noted
    for n in range(schema.start, schema.start + schema.count):
        if fields[n].kind == f.OTHER:
            start = at
            at = skipped(plan[7], plan[8], fields[n].node, data, at, size)
            if at < 0:
                return total, np.int64(-1), noted
            if fields[n].column >= 0:
                noted = note(places, noted, row, fields[n].column, address + start, at - start)
            continue
        if fields[n].nullable:
            branch, at = long(data, at, size)
            if at < 0 or branch < 0 or branch > 1:
                return total, np.int64(-1), noted
            if branch == 0:
                continue
        if fields[n].dimensions > 0:
            found, at = _avro_array(data, at, size, fields[n], seed, scratch)
        else:
            found, at = _avro_field(data, at, size, fields[n], seed, scratch)
        if at < 0:
            return total, np.int64(-1), noted
        total += found if fields[n].column >= 0 else np.uint64(0)
    return total, at, noted


@callee
def _avro_after(data, at, size, schema, plan, seed, scratch, others):
    """The same of the new row of an envelope, which is behind the old one; what follows is not looked at."""
    branch, at = long(data, at, size)
    if at >= 0 and branch == 1:
        _, at, _ = _avro_row(data, at, size, schema, plan, seed, scratch, others)
    if at < 0:
        return np.uint64(0), np.int64(-1), others[1]
    branch, at = long(data, at, size)
    if at < 0 or branch != 1:
        return np.uint64(0), np.int64(-1), others[1]
    return _avro_row(data, at, size, schema, plan, seed, scratch, others)


# ---------------------------------------------------------------------- JSON
@callee
def _json_end(data, at, end):
    """Behind a value, or a member with its name, of which nothing but its end is looked for; -1 if there is none."""
    depth = 0
    while at < end:
        character = data[at]
        if character == _QUOTE:
            at += 1
            while at < end and data[at] != _QUOTE:
                at += 2 if data[at] == _BACKSLASH else 1
        elif character == ord("{") or character == ord("["):
            depth += 1
        elif character == ord("}") or character == ord("]"):
            if depth == 0:
                return np.int64(at)
            depth -= 1
        elif character == ord(",") and depth == 0:
            return np.int64(at)
        at += 1
    return np.int64(-1)


@callee
def _member(data, at, end, name):
    """Where the value of an object's member begins; -1 if there is none.

    :param name: quoted, with its colon.
    """
    if at >= end or data[at] != ord("{"):
        return np.int64(-1)
    while at >= 0 and at < end and data[at] != ord("}"):
        at += 1
        same = end - at >= name.size
        for k in range(name.size if same else 0):
            same &= data[at + k] == name[k]
        if same:
            return np.int64(at + name.size)
        at = _json_end(data, at, end)
    return np.int64(-1)


@callee
def _inside(data, size, around):
    """Where the key or row begins and ends in what is around it; (-1, -1) if it is not there."""
    at = np.int64(0)
    if around & PAYLOAD:
        at = _member(data, at, size, _PAYLOAD)
    if at >= 0 and around & AFTER:
        at = _member(data, at, size, _AFTER)
    end = _json_end(data, at, size) if at >= 0 else np.int64(-1)
    return (at, end) if end >= 0 else (np.int64(-1), np.int64(-1))


@callee
def _utf8(code, out, size):
    if code < 0x80:
        out[size] = np.uint8(code)
        return size + 1
    count = 1 if code < 0x800 else 2 if code < 0x10000 else 3
    out[size] = np.uint8((0xF00 >> count) & 0xFF | (code >> (6 * count)))
    for k in range(count):
        out[size + 1 + k] = np.uint8(0x80 | ((code >> (6 * (count - 1 - k))) & 0x3F))
    return size + 1 + count


@callee
def _unit(data, at, end):
    """A UTF-16 unit of four hex digits; -1 if it is not that."""
    value = np.int64(0)
    if at + 4 > end:
        return np.int64(-1)
    for k in range(4):
        character = data[at + k] | 32
        digit = np.int64(character) - (48 if character < 58 else 87)
        if digit < 0 or digit > 15:
            return np.int64(-1)
        value = value * 16 + digit
    return value


@callee
def _plain(data, at, end):
    """Where a string ends, or its first escape is."""
    while at < end and data[at] != _QUOTE and data[at] != _BACKSLASH:
        at += 1
    return at


@callee
def _string(data, start, end, out):
    """(next, size) of a string whose quote is before ``start``; next is -1 if it is not one, or has a surrogate without
    its other half."""
    at, size = start, 0
    while at < end and data[at] != _QUOTE:
        character = data[at]
        at += 1
        if character != _BACKSLASH:
            out[size] = character
            size += 1
            continue
        if at >= end:
            return np.int64(-1), size
        character = data[at]
        at += 1
        if character == ord("u"):
            code = _unit(data, at, end)
            at += 4
            if 0xD800 <= code < 0xDC00 and at + 6 <= end and data[at] == _BACKSLASH and data[at + 1] == ord("u"):
                low = _unit(data, at + 2, end)
                at += 6
                code = 0x10000 + ((code - 0xD800) << 10) + (low - 0xDC00) if 0xDC00 <= low < 0xE000 else np.int64(-1)
            if code < 0 or 0xD800 <= code < 0xE000:
                return np.int64(-1), size
            size = _utf8(code, out, size)
            continue
        for letter, meant in ((98, 8), (102, 12), (110, 10), (114, 13), (116, 9)):
            if character == letter:
                character = np.uint8(meant)
                break
        out[size] = character
        size += 1
    return (at + 1 if at < end else np.int64(-1)), size


@callee
def _named(data, at, end, names, name_ends, n):
    """Behind the name of a member (quoted, with its colon), if it is this one's; else -1."""
    start = name_ends[n - 1] if n > 0 else 0
    size = name_ends[n] - start
    if at + size > end:
        return np.int64(-1)
    for k in range(size):
        if data[at + k] != names[start + k]:
            return np.int64(-1)
    return at + size


@callee
def _is(data, at, end, first, second, third, fourth):
    return (
        end - at == 4
        and data[at] == first
        and data[at + 1] == second
        and data[at + 2] == third
        and data[at + 3] == fourth
    )


@callee
def _json_value(data, at, size, field, seed, scratch, text):
    """(found, hash, next) of a string, a number, true, false or null."""
    if data[at] == _QUOTE:
        start = at + 1
        end = _plain(data, start, size)
        if field.kind == f.INT or field.kind == f.BOOL or end == size:
            return False, np.uint64(0), end
        if data[end] == _QUOTE:
            good, found = hash_text(data, start, end, field, seed, scratch[:3], text)
            return good, found, end + 1
        at, length = _string(data, start, size, text)
        if at < 0:
            return False, np.uint64(0), at
        good, found = hash_text(text, 0, length, field, seed, scratch[:3], text)
        return good, found, at
    end = at
    while end < size and data[end] != ord(",") and data[end] != ord("}") and data[end] != ord("]"):
        end += 1
    if _is(data, at, end, 110, 117, 108, 108):  # null
        return True, NULL, end
    if field.kind == f.BOOL:
        # true, or f and alse
        good = _is(data, at, end, 116, 114, 117, 101) or (data[at] == 102 and _is(data, at + 1, end, 97, 108, 115, 101))
    else:
        good = field.kind == f.INT or field.kind == f.FLOAT or field.kind == f.SINGLE
    if not good:
        return False, np.uint64(0), end
    good, found = hash_text(data, at, end, field, seed, scratch[:3], text)
    return good, found, end


@callee
def _json_array(data, at, size, field, seed, scratch, text):
    """Like :func:`_json_value`, of an array as deep as the field says."""
    column = field.column
    state, level = np.uint64(0), 0
    ready, fresh = True, False  # whether a value may come, and whether the array has just begun
    while at < size:
        character = data[at]
        if character == ord("["):
            level += 1
            if not ready or level > field.dimensions:
                return False, state, at
            fresh = True
            state = fold(state, OPEN, column, seed)
            at += 1
        elif character == ord("]"):
            if ready and not fresh:
                return False, state, at
            level -= 1
            ready = fresh = False
            state = fold(state, CLOSE, column, seed)
            at += 1
            if level == 0:
                return True, state, at
        elif character == ord(","):
            if ready:
                return False, state, at
            ready = True
            at += 1
        else:
            if not ready or level != field.dimensions:
                return False, state, at
            good, found, at = _json_value(data, at, size, field, seed, scratch, text)
            if not good:
                return False, state, at
            ready = fresh = False
            state = fold(state, found, column, seed)
    return False, state, at


@callee
def _json(data, size, plan, seed, scratch, text, others):
    """(sum of the columns' hashes, whether it is an object of these members in their order, some of which may lack,
    values of other columns that are noted).

    :param others: see :func:`_sum`.
    """
    places, noted, row, address = others
    fields, names, name_ends, framed = plan[1], plan[2], plan[3], plan[5]
    start = 5 if framed else 0
    total, at, n = np.uint64(0), np.int64(start + 1), 0
    if size < start + 2 or data[start] != ord("{"):
        return total, False, noted
    while data[at] != ord("}"):
        behind = np.int64(-1)
        while n < fields.size and behind < 0:
            behind = _named(data, at, size, names, name_ends, n)
            n += 1
        at = behind
        if at < 0 or at >= size:
            return total, False, noted
        field = fields[n - 1]
        if field.kind == f.OTHER:
            start = at
            at = _json_end(data, at, size)
            good, found = at >= 0, np.uint64(0)
            if good and field.column >= 0 and not (data[start] == 110 and at - start == 4):  # null
                noted = note(places, noted, row, field.column, address + start, at - start)
        elif field.dimensions > 0 and data[at] == ord("["):
            good, found, at = _json_array(data, at, size, field, seed, scratch, text)
        else:
            good, found, at = _json_value(data, at, size, field, seed, scratch, text)
            # a member that is null is as one that lacks
            good, found = good and (field.dimensions == 0 or found == NULL), np.uint64(0) if found == NULL else found
        if not good or at >= size:
            return total, False, noted
        total += found
        if data[at] == ord(","):
            at += 1
        elif data[at] != ord("}"):
            return total, False, noted
    return total, at == size - 1, noted


# ---------------------------------------------------------------------- Protocol Buffers
@callee
def _written(data, at, size, tag):
    """(start, end, number) of what is behind a tag: its bytes, or a number; end is -1 if the bytes end before."""
    written = tag & 7
    number = np.uint64(0)
    if written == VARINT:
        number, end = varint(data, at, size)
        return at, end, np.int64(number)
    length = np.int64(-1)
    if written == LENGTH:
        number, at = varint(data, at, size)
        length = np.int64(number)
    elif written == FIXED64 or written == FIXED32:
        length = np.int64(8 if written == FIXED64 else 4)
    if at < 0 or length < 0 or length > size - at:
        return np.int64(at), np.int64(-1), np.int64(0)
    return np.int64(at), at + length, np.int64(0)


@callee
def _protobuf(data, size, schema, plan, seed, scratch, others):
    """(sum of the columns' hashes, whether it is the first message of its schema, values of other columns that are
    noted, with their tags).

    :param others: see :func:`_sum`.
    """
    fields = plan[1]
    places, noted, row, address = others
    total, at, n = np.uint64(0), np.int64(6), np.int64(0)
    if schema.count < 0 or size < 6 or data[5] != 0:
        return total, False, noted
    while at < size:
        begin = at
        number, at = varint(data, at, size)
        tag, left = np.int64(number), schema.count
        # most often it is the next one
        while left > 0 and fields[schema.start + n].node != tag:
            n = n + 1 if n + 1 < schema.count else np.int64(0)
            left -= 1
        if at < 0 or left == 0:
            return total, False, noted
        field = fields[schema.start + n]
        start, at, value = _written(data, at, size, tag)
        if at < 0:
            return total, False, noted
        if field.column < 0:
            continue
        good, found = True, np.uint64(0)
        if field.kind == f.OTHER:
            # one that comes several times, as none of ours does, needs more room than there is
            if noted == places.size:
                return total, False, noted
            noted = note(places, noted, row, field.column, address + begin, at - begin)
        elif field.kind == f.INT or field.kind == f.BOOL:
            found = _hash_number(value, field.column, seed)
        elif field.kind == f.FLOAT or field.kind == f.SINGLE:
            found = _hash_number(_fixed(data, start, field.kind, scratch), field.column, seed)
        elif field.kind == f.BYTES:
            found = _hash(data, start, at - start, field.column, seed)
        else:
            good, found = hash_text(data, start, at, field, seed, scratch[:3], data)
        if not good:
            return total, False, noted
        total += found
    return total, True, noted


# ---------------------------------------------------------------------- records
@callee
def _sum(texts, address, size, schema, plan, seed, scratch, others):
    """(sum of the columns' hashes, whether it is a key or row of the plan, values of other columns that are noted).

    :param texts: room for the bytes at the address, three times.
    :param others: where to note the values of other columns, how many are there, and the number of the record.
    """
    schemas, form, around = plan[0], plan[4], plan[6]
    places, noted, row = others
    data, text = texts[0], texts[1]
    memcpy(data.ctypes.data, address, size)
    if schema < 0:
        return np.uint64(0), False, noted
    if form == JSON:
        if around:
            at, end = _inside(data, size, around)
            if at < 0:
                return np.uint64(0), False, noted
            size, address = end - at, address + at
            memcpy(data.ctypes.data, address, size)
        return _json(data, size, plan, seed, scratch, text, (places, noted, row, address))
    inside = places, noted, row, address
    if form == PROTOBUF:
        return _protobuf(data, size, schemas[schema], plan, seed, scratch, inside)
    if around:
        total, at, noted = _avro_after(data, np.int64(5), size, schemas[schema], plan, seed, scratch, inside)
        return total, at >= 0, noted
    total, at, noted = _avro_row(data, np.int64(5), size, schemas[schema], plan, seed, scratch, inside)
    return total, at == size, noted


@compiled
def hash_records(messages, which, key_plan, value_plan, seed, scratch, texts, out):
    """Hashes of the keys of records, and the sums of their columns' hashes; returns how many values of other columns
    are noted.

    :param which: for each record, the numbers of the schemas of its key and value in the plans; -1 for none.
    :param texts: room for the largest key or value, three times.
    :param out: receives the hashes, the sums, and where values of other columns are.
    """
    key_hashes, row_hashes, places = out
    data = texts[0]
    noted = np.int64(0)
    for i in range(messages.size):
        message = messages[i]
        address, size = np.int64(message.key), np.int64(message.key_len)
        key_sum, good, _ = _sum(texts, address, size, which[0][i], key_plan, seed, scratch, (places, noted, i))
        if not good:
            key_sum = _hash(data, 0, message.key_len, 1 << 22, seed)
        key_hashes[i] = key_hash(key_sum, seed)
        if message.payload == 0:
            continue
        address, size, before = np.int64(message.payload), np.int64(message.len), noted
        row_sum, good, noted = _sum(texts, address, size, which[1][i], value_plan, seed, scratch, (places, noted, i))
        if not good:
            row_sum, noted = _hash(data, 0, size, (1 << 22) + 1, seed), before
        row_hashes[i] = row_sum
    return noted
