"""Compiled hashes of rows and records of plain types, and of arrays of these: a row is the sum of its columns' hashes,
each of the value in one canonical form. An array is a sequence of its elements' hashes and of its braces.

What has no canonical form here (a number with too many digits, a record under an unknown schema) makes a hash that the
other side does not have. Such a key is then looked at one by one, by the way that takes anything.
"""

from __future__ import annotations

import ctypes

import numpy as np

from airflow_bottledwater.compiled import callee, compiled, external, memcpy, types
from airflow_bottledwater.encoding import wire
from airflow_bottledwater.encoding.kernels.text import unescape
from airflow_bottledwater.kafka.hashes import siphash, siphash_number

#: the kinds of columns
INT, BOOL, TEXT, DECIMAL, DATE, TIME, STAMP, FLOAT, SINGLE, BYTES = range(1, 11)
#: a column without a compiled form: where its values are is noted, and Python looks at them
OTHER = 11

#: a field of a record: the column (-1: the table has it no more), its kind, whether it is a union with null, the scale
#: of a decimal; of an array, the number of its dimensions and what stands between its elements in PostgreSQL's text:
#: the kind is then that of the elements; whether Avro has a date or time as text; of another column, the node of its
#: Avro type (:mod:`.skip`); in Protocol Buffers, of each column, the tag before its values
FIELD = np.dtype(
    [(name, np.int64) for name in ("column", "kind", "nullable", "scale", "dimensions", "delimiter", "text", "node")]
)
#: where a value of another column is: its row or record, its column, its address and its size
PLACE = np.dtype([(name, np.int64) for name in ("row", "column", "address", "size")])
#: dimensions that an array can have (MAXDIM, src/include/utils/array.h)
MOST_DIMENSIONS = 6
#: what an array is made of, besides its elements
OPEN, CLOSE, NULL = np.uint64(1), np.uint64(2), np.uint64(3)
#: a schema: its id, its fields; ``count`` is -1 if it has a field of another type
SCHEMA = np.dtype([("id", np.int64), ("start", np.int64), ("count", np.int64)])

_strtod = external(ctypes.CDLL(None), "strtod", types.float64, types.intp, types.intp)
_strtof = external(ctypes.CDLL(None), "strtof", types.float32, types.intp, types.intp)

_TAB, _NEWLINE, _BACKSLASH, _QUOTE = ord("\t"), ord("\n"), ord("\\"), ord('"')
_BRACE, _BRACE_END = ord("{"), ord("}")
_MIX = np.uint64(0x9E3779B97F4A7C15)
_NAN = np.int64(0x7FF8000000000000)
_DAY = 86_400_000_000
#: digits of a number that surely fits into 64 bits
_DIGITS = 18
#: characters of the longest text that is read as a float, and the bytes of the room for it
_FLOAT, ROOM = 2000, 2048


# ---------------------------------------------------------------------- hashes
@callee
def _hash(data, start, length, column, seed):
    return siphash(data, start, length, seed[0] ^ (np.uint64(column + 1) * _MIX), seed[1])


@callee
def _hash_number(value, column, seed):
    return siphash_number(value, seed[0] ^ (np.uint64(column + 1) * _MIX), seed[1])


@callee
def key_hash(total, seed):
    """The hash of a key, which depends on all its columns at once."""
    return _hash_number(total, 1 << 20, seed)


@callee
def row_hash(total, key, seed):
    """The hash of a row that has this key's hash."""
    return _hash_number(total ^ (key * _MIX), (1 << 20) + 1, seed)


# ---------------------------------------------------------------------- values from text
@callee
def _digit(character):
    return np.int64(character) - 48 if 48 <= character <= 57 else np.int64(-1)


@callee
def _integer(text, start, end):
    """(found, value, next) of digits."""
    at, value = start, np.int64(0)
    while at < end and at - start <= _DIGITS and _digit(text[at]) >= 0:
        value = value * 10 + _digit(text[at])
        at += 1
    return start < at <= start + _DIGITS, value, at


@callee
def _whole(text, start, end):
    """A number of an integer type; its last digits may need all 64 bits."""
    negative = text[start] == ord("-")
    at, value = start + (1 if negative else 0), np.uint64(0)
    if at >= end or end - at > 19:
        return False, np.int64(0)
    while at < end:
        digit = _digit(text[at])
        if digit < 0:
            return False, np.int64(0)
        value = value * np.uint64(10) + np.uint64(digit)
        at += 1
    if value > np.uint64(0x7FFFFFFFFFFFFFFF) + np.uint64(1 if negative else 0):
        return False, np.int64(0)
    return True, np.int64(np.uint64(0) - value) if negative else np.int64(value)


@callee
def _decimal(text, start, end, scale):
    negative = text[start] == ord("-")
    at, value, digits, fraction = start + (1 if negative else 0), np.int64(0), 0, -1
    while at < end:
        if text[at] == ord(".") and fraction < 0:
            fraction = 0
        else:
            digit = _digit(text[at])
            digits += 1
            if digit < 0 or digits > _DIGITS:
                return False, np.int64(0)
            value = value * 10 + digit
            fraction += 1 if fraction >= 0 else 0
        at += 1
    missing = scale - max(fraction, 0)
    if digits == 0 or missing < 0 or digits + missing > _DIGITS:
        return False, np.int64(0)
    for _ in range(missing):
        value *= 10
    return True, -value if negative else value


@callee
def _days(year, month, day):
    """Days since 1970-01-01 of a date of the Gregorian calendar (https://howardhinnant.github.io/date_algorithms.html,
    days_from_civil)."""
    year -= 1 if month <= 2 else 0
    era = year // 400
    of_era = year - era * 400
    of_year = (153 * (month + (-3 if month > 2 else 9)) + 2) // 5 + day - 1
    return era * 146097 + of_era * 365 + of_era // 4 - of_era // 100 + of_year - 719468


@callee
def _date(text, start, end):
    """(found, days, next); a year may have a sign, as in JSON, or BC behind everything, as in PostgreSQL."""
    at, sign = start, np.int64(1)
    if text[at] == ord("-") or text[at] == ord("+"):
        sign = np.int64(-1) if text[at] == ord("-") else sign
        at += 1
    good, year, at = _integer(text, at, end)
    if not good or at + 6 > end or text[at] != ord("-") or text[at + 3] != ord("-"):
        return False, np.int64(0), at
    first, month, _ = _integer(text, at + 1, at + 3)
    second, day, _ = _integer(text, at + 4, at + 6)
    year *= sign
    if end - start > 3 and text[end - 1] == ord("C") and text[end - 2] == ord("B"):
        year = 1 - year
    return first and second, _days(year, month, day), at + 6


@callee
def _clock(text, start, end):
    """(found, microseconds, next)."""
    if start + 8 > end or text[start + 2] != ord(":") or text[start + 5] != ord(":"):
        return False, np.int64(0), start
    one, hours, _ = _integer(text, start, start + 2)
    two, minutes, _ = _integer(text, start + 3, start + 5)
    three, seconds, at = _integer(text, start + 6, start + 8)
    micros, left = np.int64(0), 6
    if at < end and text[at] == ord("."):
        at += 1
        while at < end and left > 0 and _digit(text[at]) >= 0:
            micros = micros * 10 + _digit(text[at])
            left, at = left - 1, at + 1
    for _ in range(left):
        micros *= 10
    return one and two and three, ((hours * 60 + minutes) * 60 + seconds) * 1_000_000 + micros, at


@callee
def _ends(text, at, end):
    """Whether nothing but a zone (UTC) and an era is left."""
    if at < end and text[at] == ord("Z"):
        at += 1
    elif at + 3 <= end and text[at] == ord("+") and text[at + 1] == 48 and text[at + 2] == 48:
        at += 3
    if at + 3 == end and text[at] == ord(" ") and text[at + 1] == ord("B"):
        at += 3
    return at == end


@callee
def _moment(text, start, end, kind):
    """A date, a time or a timestamp as Avro counts it."""
    infinite = text[start] == ord("i")
    if infinite or (end - start > 1 and text[start] == ord("-") and text[start + 1] == ord("i")):
        if kind == DATE:
            return True, np.int64(wire.DATE_INFINITY if infinite else wire.DATE_MINUS_INFINITY)
        return True, np.int64(wire.TIMESTAMP_INFINITY if infinite else wire.TIMESTAMP_MINUS_INFINITY)
    days, at, good = np.int64(0), start, True
    if kind != TIME:
        good, days, at = _date(text, start, end)
        if not good or kind == DATE:
            return good and _ends(text, at, end), days
        if at >= end or (text[at] != ord(" ") and text[at] != ord("T")):
            return False, np.int64(0)
        at += 1
    good, micros, at = _clock(text, at, end)
    return good and _ends(text, at, end), days * _DAY + micros


@callee
def _float_bits(value, floats, bits):
    floats[0] = value
    if value != value:
        return _NAN
    return np.int64(0) if value == 0.0 else bits[0]


@callee
def _float(text, start, end, kind, scratch):
    """The bits of the nearest double, or of the nearest float as a double; C's own functions read the text."""
    work, floats, bits = scratch
    if end - start > _FLOAT:
        return False, np.int64(0)
    memcpy(work.ctypes.data + 16, text.ctypes.data + start, np.int64(end - start))
    work[16 + end - start] = 0
    place = work.ctypes.data + 16
    value = np.float64(_strtof(place, work.ctypes.data)) if kind == SINGLE else _strtod(place, work.ctypes.data)
    stop = np.int64(0)
    for i in range(8):
        stop |= np.int64(work[i]) << np.int64(8 * i)
    return stop == place + end - start, _float_bits(value, floats, bits)


@callee
def _nibble(character):
    if 48 <= character <= 57:
        return np.int64(character) - 48
    return np.int64(character) - 87 if 97 <= character <= 102 else np.int64(-1)


@callee
def _unhex(text, start, end, out):
    """The number of bytes of ``\\x…``; -1 if it is not that."""
    if end - start < 2 or (end - start) % 2 or text[start] != _BACKSLASH or text[start + 1] != ord("x"):
        return -1
    size = 0
    for at in range(start + 2, end, 2):
        high, low = _nibble(text[at]), _nibble(text[at + 1])
        if high < 0 or low < 0:
            return -1
        out[size] = np.uint8(high * 16 + low)
        size += 1
    return size


@callee
def hash_text(text, start, end, field, seed, scratch, spare):
    """(found, hash) of a column's value as text: PostgreSQL's, or that of a JSON string or number.

    :param spare: room for the bytes of a bytea; it may be the text's own.
    """
    kind, column = field.kind, field.column
    if kind == TEXT:
        return True, _hash(text, start, end - start, column, seed)
    if start >= end:
        return False, np.uint64(0)
    good, value = False, np.int64(0)
    if kind == INT:
        good, value = _whole(text, start, end)
    elif kind == BOOL:
        good, value = text[start] == ord("t") or text[start] == ord("f"), np.int64(text[start] == ord("t"))
    elif kind == DECIMAL:
        good, value = _decimal(text, start, end, field.scale)
    elif kind == FLOAT or kind == SINGLE:
        good, value = _float(text, start, end, kind, scratch)
    elif kind == BYTES:
        size = _unhex(text, start, end, spare)
        return size >= 0, _hash(spare, 0, max(size, 0), column, seed)
    else:
        good, value = _moment(text, start, end, kind)
    return good, _hash_number(value, column, seed)


# ---------------------------------------------------------------------- arrays
@callee
def fold(state, token, column, seed):
    """The hash of a sequence, and of one more after it."""
    return _hash_number(state * _MIX + token, column, seed)


@callee
def _bare(text, at, end, delimiter):
    """The end of an element that is not quoted."""
    while at < end and text[at] != delimiter and text[at] != _BRACE and text[at] != _BRACE_END:
        at += 1
    return at


@callee
def _quoted(text, start, end, out):
    """(next, size) of an element whose quote is before ``start``."""
    at, size = start, 0
    while at < end and text[at] != _QUOTE:
        at += 1 if text[at] == _BACKSLASH else 0
        out[size] = text[at]
        size += 1
        at += 1
    return at + 1, size


@callee
def _hash_array(text, start, end, field, seed, scratch, spare):
    """(found, hash) of an array as array_out writes it (src/backend/utils/adt/arrayfuncs.c). It is not found if it has
    lower bounds, or other dimensions than the column declares: the formats cannot hold it."""
    state, level, deepest, elements, at = np.uint64(0), 0, 0, 0, start
    good = text[start] == _BRACE
    while good and at < end:
        character = text[at]
        if character == _BRACE:
            level += 1
            deepest = max(deepest, level)
            state = fold(state, OPEN, field.column, seed)
            at += 1
        elif character == _BRACE_END:
            level -= 1
            state = fold(state, CLOSE, field.column, seed)
            at += 1
        elif character == field.delimiter:
            at += 1
        else:
            found = NULL
            if character == _QUOTE:
                at, size = _quoted(text, at + 1, end, spare)
                good, found = hash_text(spare, 0, size, field, seed, scratch, spare)
            else:
                behind = _bare(text, at, end, field.delimiter)
                # an element that reads NULL itself is quoted
                if behind - at != 4 or text[at] != 78 or text[at + 1] != 85 or text[at + 2] != 76 or text[at + 3] != 76:
                    good, found = hash_text(text, at, behind, field, seed, scratch, spare)
                at = behind
            state = fold(state, found, field.column, seed)
            elements += 1
    return good and (deepest == field.dimensions or elements == 0), state


@callee
def _hash_value(text, start, end, field, seed, scratch, spare):
    if field.dimensions > 0:
        return _hash_array(text, start, end, field, seed, scratch, spare)
    return hash_text(text, start, end, field, seed, scratch, spare)


# ---------------------------------------------------------------------- rows
@callee
def note(places, count, row, column, address, size):
    """Note where a value of another column is; returns how many are noted then."""
    place = places[count]
    place.row = row
    place.column = column
    place.address = address
    place.size = size
    return count + 1


@compiled
def finish(keys, rows, seed):
    """Make hashes of the sums of columns.

    :param keys: hashes of keys; ``rows`` are the sums.
    """
    for i in range(rows.size):
        rows[i] = row_hash(rows[i], keys[i], seed)


@compiled
def hash_rows(data, offsets, fields, keys, seed, scratch, texts, out):
    """Hashes of the keys of rows in COPY's text format, and the sums of their columns' hashes; returns how many values
    of other columns are noted.

    :param fields: of all columns; ``keys`` says which belong to the key.
    :param texts: room for a row's largest value, twice.
    :param out: receives the hashes, the sums, and where values of other columns are.
    """
    key_hashes, row_hashes, places = out
    noted = 0
    for row in range(offsets.size - 1):
        at, stop = offsets[row], offsets[row + 1]
        key_sum = row_sum = np.uint64(0)
        column = 0
        while at < stop:
            end, escaped = at, False
            while data[end] != _TAB and data[end] != _NEWLINE:
                escaped = escaped or data[end] == _BACKSLASH
                end += 1
            there = not (end - at == 2 and data[at] == _BACKSLASH and data[at + 1] == ord("N"))
            if there and fields[column].kind == OTHER:
                if fields[column].column >= 0:
                    noted = note(places, noted, row, column, data.ctypes.data + at, end - at)
            elif there:
                if escaped:
                    size = unescape(data, at, end, texts[0])
                    good, found = _hash_value(texts[0], 0, size, fields[column], seed, scratch, texts[1])
                else:
                    good, found = _hash_value(data, at, end, fields[column], seed, scratch, texts[1])
                if not good:
                    found = _hash(data, at, end - at, (1 << 21) + column, seed)
                row_sum += found
                key_sum += found if keys[column] else np.uint64(0)
            column += 1
            at = end + 1
        key_hashes[row] = key_hash(key_sum, seed)
        row_hashes[row] = row_sum
    return noted
