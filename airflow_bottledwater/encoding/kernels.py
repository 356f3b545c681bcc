"""The compiled transcoder: rows as ``COPY … (FORMAT binary)`` or pgoutput send them, to Avro or JSON records.

No Python object is made per value. Every function that writes takes the output array and a position and returns the
next position, or a negative code of :mod:`.wire`; none reads outside ``[position, end)`` of a row. A readable twin of
the value layouts is :mod:`.reference`.
"""

from __future__ import annotations

import ctypes

import numpy as np

from airflow_bottledwater.compiled import allocating, compiled, external, memcpy, types
from airflow_bottledwater.encoding.reading import i16, i32, i64, u16, u32
from airflow_bottledwater.encoding.wire import (
    C_FLAGS,
    C_KIND,
    C_LENGTH,
    C_LSN,
    C_OFFSET,
    C_ORDINAL,
    C_RELATION,
    C_TIME,
    DATE_INFINITY,
    DATE_MINUS_INFINITY,
    EPOCH_DAYS,
    EPOCH_MICROS,
    FIELD_BINARY,
    FIELD_NULL,
    FIELD_SIDE,
    FIELD_TEXT,
    FIELD_UNCHANGED,
    INTERVAL_INFINITY,
    INTERVAL_MINUS_INFINITY,
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
    NO_REPRESENTATION,
    NUMERIC_NAN,
    NUMERIC_NEGATIVE,
    NUMERIC_NINF,
    NUMERIC_PINF,
    OP_ARRAY,
    OP_BOOL,
    OP_BYTEA,
    OP_DATE,
    OP_DECIMAL,
    OP_FLOAT4,
    OP_FLOAT8,
    OP_INET,
    OP_INT2,
    OP_INT4,
    OP_INT8,
    OP_INTERVAL,
    OP_JSONB,
    OP_MONEY,
    OP_NUMERIC_TEXT,
    OP_TEXT,
    OP_TIME,
    OP_TIMESTAMP,
    OP_TIMESTAMPTZ,
    OP_TIMETZ,
    OP_UINT32,
    OP_UINT64,
    OP_UUID,
    P_ARG,
    P_CHILD,
    P_CONVERT,
    P_NAME,
    P_NAME_LEN,
    P_OP,
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
    TIMESTAMP_INFINITY,
    TIMESTAMP_MINUS_INFINITY,
    UNCHANGED,
)

_libc = ctypes.CDLL(None)
#: glibc's gcvt writes %.<n>g; with strtod it finds the shortest of 15, 16 and 17 digits that reads back the same
_gcvt = external(_libc, "gcvt", types.intp, types.float64, types.int32, types.intp)
_strtod = external(_libc, "strtod", types.float64, types.intp, types.intp)
_strtof = external(_libc, "strtof", types.float32, types.intp, types.intp)

_HEX = np.frombuffer(b"0123456789abcdef", dtype=np.uint8)
_BASE64 = np.frombuffer(b"ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789+/", dtype=np.uint8)
_NAN = np.frombuffer(b"NaN", dtype=np.uint8)
_INFINITY = np.frombuffer(b"Infinity", dtype=np.uint8)
_MINUS_INFINITY = np.frombuffer(b"-Infinity", dtype=np.uint8)
_LOWER_INFINITY = np.frombuffer(b"infinity", dtype=np.uint8)
_LOWER_MINUS_INFINITY = np.frombuffer(b"-infinity", dtype=np.uint8)
_NULL = np.frombuffer(b"null", dtype=np.uint8)
_TRUE = np.frombuffer(b"true", dtype=np.uint8)
_FALSE = np.frombuffer(b"false", dtype=np.uint8)

#: a numeric of more decimal digits than this cannot come from a column with a precision (NUMERIC_MAX_PRECISION 1000,
#: scales from -1000 to 1000)
_MAX_DECIMAL_DIGITS = 2100
_QUOTE, _COMMA, _COLON, _OPEN, _CLOSE, _BACKSLASH, _MINUS, _ZERO, _DOT = 34, 44, 58, 123, 125, 92, 45, 48, 46
_OPEN_ARRAY, _CLOSE_ARRAY = 91, 93


# ------------------------------------------------------------------------------------------------ reading
@compiled
def read_copy_row(b, p, end, count, position, length, kind):
    """Find the fields of one COPY row: int16 count, then int32 length (-1: NULL) and bytes each.

    https://www.postgresql.org/docs/current/sql-copy.html (Binary Format, Tuples)
    """
    if end - p < 2 or i16(b, p) != count:
        return MALFORMED
    p += 2
    for c in range(count):
        if end - p < 4:
            return MALFORMED
        n = i32(b, p)
        p += 4
        if n == -1:
            kind[c] = FIELD_NULL
            continue
        if n < 0 or n > end - p:
            return MALFORMED
        kind[c] = FIELD_BINARY
        position[c] = p
        length[c] = n
        p += n
    return p if p == end else MALFORMED


@compiled
def read_tuple(b, p, end, count, position, length, kind):
    """Find the fields of a pgoutput TupleData; returns the position behind it.

    https://www.postgresql.org/docs/current/protocol-logicalrep-message-formats.html (TupleData)
    """
    if end - p < 2 or i16(b, p) != count:
        return MALFORMED
    p += 2
    for c in range(count):
        if end - p < 1:
            return MALFORMED
        k = np.int64(b[p])
        p += 1
        kind[c] = k
        if k == FIELD_NULL or k == FIELD_UNCHANGED:
            continue
        if (k != FIELD_BINARY and k != FIELD_TEXT) or end - p < 4:
            return MALFORMED
        n = i32(b, p)
        p += 4
        if n < 0 or n > end - p:
            return MALFORMED
        position[c] = p
        length[c] = n
        p += n
    return p


# ------------------------------------------------------------------------------------------------ writing, shared
@compiled
def _copy(b, p, n, out, o):
    if n < 32:
        for i in range(n):
            out[o + i] = b[p + i]
    else:
        memcpy(out.ctypes.data + o, b.ctypes.data + p, n)
    return o + n


@compiled
def _literal(word, out, o, cap):
    if cap - o < word.size:
        return np.int64(SPACE)
    for i in range(word.size):
        out[o + i] = word[i]
    return np.int64(o + word.size)


@compiled
def _varint(v, out, o):
    """Avro long: zig-zag, seven bits a byte (https://avro.apache.org/docs/1.12.0/specification/#primitive-types-1)."""
    z = np.uint64((v << 1) ^ (v >> 63))
    while z >= np.uint64(128):
        out[o] = np.uint8((z & np.uint64(127)) | np.uint64(128))
        z >>= np.uint64(7)
        o += 1
    out[o] = np.uint8(z)
    return o + 1


@compiled
def _decimal(v, out, o):
    """An integer in decimal digits."""
    if v < 0:
        out[o] = _MINUS
        return _unsigned(np.uint64(0) - np.uint64(v), out, o + 1)
    return _unsigned(np.uint64(v), out, o)


@compiled
def _unsigned(magnitude, out, o):
    n = 1
    rest = magnitude // np.uint64(10)
    while rest > np.uint64(0):
        n += 1
        rest //= np.uint64(10)
    for i in range(n - 1, -1, -1):
        out[o + i] = np.uint8(np.uint64(_ZERO) + magnitude % np.uint64(10))
        magnitude //= np.uint64(10)
    return o + n


@compiled
def _padded(v, width, out, o):
    for i in range(width - 1, -1, -1):
        out[o + i] = np.uint8(_ZERO + v % 10)
        v //= 10
    return o + width


@compiled
def _uuid(b, p, out, o):
    for i in range(16):
        if i == 4 or i == 6 or i == 8 or i == 10:
            out[o] = _MINUS
            o += 1
        out[o] = _HEX[b[p + i] >> 4]
        out[o + 1] = _HEX[b[p + i] & 15]
        o += 2
    return o


# ------------------------------------------------------------------------------------------------ network addresses
@compiled
def _inet_is_malformed(b, p, n):
    """network_send, src/backend/utils/adt/network.c: family, bits, whether it is a cidr, number of address bytes, address."""
    if n < 4 or (b[p] != 2 and b[p] != 3):
        return True
    size = 4 if b[p] == 2 else 16
    return b[p + 3] != size or n != 4 + size or b[p + 1] > 8 * size or b[p + 2] > 1


@compiled
def _ipv4(b, p, out, o):
    for i in range(4):
        if i > 0:
            out[o] = _DOT
            o += 1
        o = _decimal(np.int64(b[p + i]), out, o)
    return o


@compiled
def _ipv6(b, p, out, o):
    """As inet_net_ntop_ipv6 prints it (src/port/inet_net_ntop.c): the first longest run of zeros as ``::``."""
    best, best_size = -1, 1
    i = 0
    while i < 8:
        run = i
        while run < 8 and u16(b, p + 2 * run) == 0:
            run += 1
        if run - i > best_size:
            best, best_size = i, run - i
        i = run + 1
    for i in range(8):
        if best <= i < best + best_size and best >= 0:
            if i == best:
                out[o] = _COLON
                o += 1
            continue
        if i > 0:
            out[o] = _COLON
            o += 1
        if (
            i == 6
            and best == 0
            and (
                best_size == 6
                or (best_size == 7 and u16(b, p + 14) != 1)
                or (best_size == 5 and u16(b, p + 10) == 0xFFFF)
            )
        ):
            return _ipv4(b, p + 12, out, o)
        v = u16(b, p + 2 * i)
        shift = 12
        while shift > 0 and (v >> shift) == 0:
            shift -= 4
        while shift >= 0:
            out[o] = _HEX[(v >> shift) & 15]
            o += 1
            shift -= 4
    if best >= 0 and best + best_size == 8:
        out[o] = _COLON
        o += 1
    return o


@compiled
def _inet(b, p, out, o):
    """An address, and its bits where they are not all, or of a network."""
    wide = b[p] == 3
    o = _ipv6(b, p + 4, out, o) if wide else _ipv4(b, p + 4, out, o)
    if b[p + 2] == 1 or b[p + 1] != (128 if wide else 32):
        out[o] = 47
        o = _decimal(np.int64(b[p + 1]), out, o + 1)
    return o


# ------------------------------------------------------------------------------------------------ numeric
@compiled
def _numeric_is_malformed(b, p, n):
    if n < 8:
        return True
    digits = u16(b, p)
    if n != 8 + 2 * digits:
        return True
    for i in range(digits):
        if u16(b, p + 8 + 2 * i) > 9999:
            return True
    return False


@compiled
def _numeric_text_size(b, p):
    weight = i16(b, p + 2)
    return 16 + (4 * (weight + 1) if weight >= 0 else 1) + u16(b, p + 6)


@compiled
def _numeric_text(b, p, out, o):
    """As numeric_out prints it (get_str_from_var, src/backend/utils/adt/numeric.c)."""
    digits, weight, sign, scale = u16(b, p), i16(b, p + 2), u16(b, p + 4), u16(b, p + 6)
    base = p + 8
    if sign == NUMERIC_NEGATIVE:
        out[o] = _MINUS
        o += 1
    if weight < 0:
        out[o] = _ZERO
        o += 1
    else:
        for d in range(weight + 1):
            v = u16(b, base + 2 * d) if d < digits else 0
            o = _decimal(np.int64(v), out, o) if d == 0 else _padded(v, 4, out, o)
    if scale > 0:
        out[o] = _DOT
        o += 1
        written = 0
        d = weight + 1
        while written < scale:
            v = u16(b, base + 2 * d) if 0 <= d < digits else 0
            for unit in (1000, 100, 10, 1):
                if written < scale:
                    out[o] = np.uint8(_ZERO + (v // unit) % 10)
                    o += 1
                    written += 1
            d += 1
    return o


@compiled
def _bit_length(v):
    n = 0
    while v > np.uint64(0):
        v >>= np.uint64(1)
        n += 1
    return n


@allocating
def _large_decimal_bytes(b, base, digits, exponent, negative, out, o, cap):
    """A decimal of more digits than an integer holds."""
    # limbs of 32 bits, least significant first; log2(10) < 3.33
    limbs = np.zeros((4 * digits + max(exponent, 0)) * 10 // 96 + 2, dtype=np.uint64)
    used = 0
    for i in range(digits + max(exponent, 0)):
        factor = np.uint64(10000) if i < digits else np.uint64(10)
        carry = np.uint64(u16(b, base + 2 * i)) if i < digits else np.uint64(0)
        for k in range(used):
            t = limbs[k] * factor + carry
            limbs[k] = t & np.uint64(0xFFFFFFFF)
            carry = t >> np.uint64(32)
        if carry > np.uint64(0):
            limbs[used] = carry
            used += 1
    for _ in range(-exponent):
        rest = np.uint64(0)
        for k in range(used - 1, -1, -1):
            t = (rest << np.uint64(32)) | limbs[k]
            limbs[k] = t // np.uint64(10)
            rest = t % np.uint64(10)
        if rest != np.uint64(0):
            return np.int64(NO_REPRESENTATION)
        while used > 0 and limbs[used - 1] == np.uint64(0):
            used -= 1
    bits = 32 * (used - 1) + _bit_length(limbs[used - 1]) if used > 0 else 0
    width = (bits + 8) // 8
    if cap - o < width + 10:
        return np.int64(SPACE)
    o = _varint(np.int64(width), out, o)
    borrow = np.uint64(1)
    for i in range(width):
        limb = limbs[i // 4] if i // 4 < used else np.uint64(0)
        v = (limb >> np.uint64(8 * (i % 4))) & np.uint64(255)
        if negative:
            v = (v ^ np.uint64(255)) + borrow
            borrow = v >> np.uint64(8)
            v &= np.uint64(255)
        out[o + width - 1 - i] = np.uint8(v)
    return np.int64(o + width)


@compiled
def _decimal_bytes(b, p, scale, out, o, cap):
    """A numeric as Avro decimal: its length, then the unscaled value as two's complement, most significant first.

    The width is that of fastavro (one bit more than the magnitude needs).
    https://avro.apache.org/docs/1.12.0/specification/#decimal
    """
    digits, weight, sign = u16(b, p), i16(b, p + 2), u16(b, p + 4)
    if sign != 0 and sign != NUMERIC_NEGATIVE:
        return np.int64(NO_REPRESENTATION)
    negative = sign == NUMERIC_NEGATIVE
    base = p + 8
    # value = D * 10^exponent, D the digits read as one integer in base 10000
    exponent = 4 * (weight - digits + 1) + scale
    if digits == 0:
        exponent = 0
    if 4 * digits + max(exponent, 0) <= 18:
        magnitude = np.uint64(0)
        for i in range(digits):
            magnitude = magnitude * np.uint64(10000) + np.uint64(u16(b, base + 2 * i))
        for _ in range(exponent):
            magnitude *= np.uint64(10)
        for _ in range(-exponent):
            if magnitude % np.uint64(10) != np.uint64(0):
                return np.int64(NO_REPRESENTATION)
            magnitude //= np.uint64(10)
        width = (_bit_length(magnitude) + 8) // 8
        if cap - o < width + 1:
            return np.int64(SPACE)
        o = _varint(np.int64(width), out, o)
        v = np.int64(magnitude)
        if negative:
            v = -v
        for i in range(width - 1, -1, -1):
            out[o + i] = np.uint8(v & 255)
            v >>= 8
        return np.int64(o + width)
    if 4 * digits + abs(exponent) > 2 * _MAX_DECIMAL_DIGITS:
        return np.int64(NO_REPRESENTATION)
    return _large_decimal_bytes(b, base, digits, exponent, negative, out, o, cap)


# ------------------------------------------------------------------------------------------------ Avro
@compiled
def avro_value(op, arg, b, p, n, out, o, cap):
    """One non-null value in Avro binary, without its union branch."""
    if op == OP_TEXT or op == OP_BYTEA:
        if cap - o < n + 10:
            return np.int64(SPACE)
        return np.int64(_copy(b, p, n, out, _varint(np.int64(n), out, o)))
    if op == OP_DECIMAL:
        if _numeric_is_malformed(b, p, n):
            return np.int64(MALFORMED)
        return _decimal_bytes(b, p, arg, out, o, cap)
    if op == OP_NUMERIC_TEXT:
        if _numeric_is_malformed(b, p, n):
            return np.int64(MALFORMED)
        sign = u16(b, p + 4)
        if cap - o < 20:
            return np.int64(SPACE)
        if sign == NUMERIC_NAN:
            return _literal(_NAN, out, _varint(np.int64(3), out, o), cap)
        if sign == NUMERIC_PINF:
            return _literal(_INFINITY, out, _varint(np.int64(8), out, o), cap)
        if sign == NUMERIC_NINF:
            return _literal(_MINUS_INFINITY, out, _varint(np.int64(9), out, o), cap)
        if cap - o < _numeric_text_size(b, p) + 10:
            return np.int64(SPACE)
        end = _numeric_text(b, p, out, o + 10)
        size = end - (o + 10)
        start = _varint(np.int64(size), out, o)
        for i in range(size):
            out[start + i] = out[o + 10 + i]
        return np.int64(start + size)
    if op == OP_JSONB:
        if n < 1 or b[p] != 1:
            return np.int64(MALFORMED)
        if cap - o < n + 10:
            return np.int64(SPACE)
        return np.int64(_copy(b, p + 1, n - 1, out, _varint(np.int64(n - 1), out, o)))
    if cap - o < 64:
        return np.int64(SPACE)
    if op == OP_INT4:
        return np.int64(_varint(i32(b, p), out, o)) if n == 4 else np.int64(MALFORMED)
    if op == OP_INT8 or op == OP_TIME:
        return np.int64(_varint(i64(b, p), out, o)) if n == 8 else np.int64(MALFORMED)
    if op == OP_TIMESTAMP or op == OP_TIMESTAMPTZ:
        if n != 8:
            return np.int64(MALFORMED)
        t = i64(b, p)
        if t != TIMESTAMP_INFINITY and t != TIMESTAMP_MINUS_INFINITY:
            # the greatest number stands for infinity
            if t >= TIMESTAMP_INFINITY - EPOCH_MICROS:
                return np.int64(NO_REPRESENTATION)
            t += EPOCH_MICROS
        return np.int64(_varint(t, out, o))
    if op == OP_BOOL:
        if n != 1 or b[p] > 1:
            return np.int64(MALFORMED)
        out[o] = b[p]
        return np.int64(o + 1)
    if op == OP_INT2:
        return np.int64(_varint(i16(b, p), out, o)) if n == 2 else np.int64(MALFORMED)
    if op == OP_FLOAT4 or op == OP_FLOAT8:
        width = 4 if op == OP_FLOAT4 else 8
        if n != width:
            return np.int64(MALFORMED)
        for i in range(width):
            out[o + i] = b[p + width - 1 - i]
        return np.int64(o + width)
    if op == OP_DATE:
        if n != 4:
            return np.int64(MALFORMED)
        d = i32(b, p)
        if d != DATE_INFINITY and d != DATE_MINUS_INFINITY:
            d += EPOCH_DAYS
        return np.int64(_varint(d, out, o))
    if op == OP_UUID:
        if n != 16:
            return np.int64(MALFORMED)
        return np.int64(_uuid(b, p, out, _varint(np.int64(36), out, o)))
    if op == OP_INET:
        if _inet_is_malformed(b, p, n):
            return np.int64(MALFORMED)
        end = _inet(b, p, out, o + 1)
        out[o] = np.uint8(2 * (end - o - 1))  # shorter than 64: one byte
        return np.int64(end)
    if op == OP_UINT32:
        return np.int64(_varint(u32(b, p), out, o)) if n == 4 else np.int64(MALFORMED)
    if op == OP_UINT64:
        if n != 8:
            return np.int64(MALFORMED)
        v = i64(b, p)
        return np.int64(_varint(v, out, o)) if v >= 0 else np.int64(NO_REPRESENTATION)
    if op == OP_MONEY:
        if n != 8:
            return np.int64(MALFORMED)
        v = i64(b, p)
        width = (_bit_length(np.uint64(0) - np.uint64(v) if v < 0 else np.uint64(v)) + 8) // 8
        o = _varint(np.int64(width), out, o)
        for i in range(width - 1, -1, -1):
            out[o + i] = np.uint8(v & 255)
            v >>= 8
        return np.int64(o + width)
    if op == OP_TIMETZ:
        if n != 12:
            return np.int64(MALFORMED)
        # PostgreSQL counts the zone westwards (timetz_out, src/backend/utils/adt/date.c)
        return np.int64(_varint(-i32(b, p + 8), out, _varint(i64(b, p), out, o)))
    if op == OP_INTERVAL:
        if n != 16:
            return np.int64(MALFORMED)
        o = _varint(i32(b, p + 12), out, o)
        return np.int64(_varint(i64(b, p), out, _varint(i32(b, p + 8), out, o)))
    return np.int64(MALFORMED)


# ------------------------------------------------------------------------------------------------ JSON
@compiled
def _json_string(b, p, n, out, o, cap):
    """A JSON string (RFC 8259 §7): UTF-8 as it is, control characters, quote and backslash escaped."""
    if cap - o < 6 * n + 2:
        return np.int64(SPACE)
    out[o] = _QUOTE
    o += 1
    for i in range(n):
        c = b[p + i]
        if c == _QUOTE or c == _BACKSLASH:
            out[o] = _BACKSLASH
            out[o + 1] = c
            o += 2
        elif c >= 32:
            out[o] = c
            o += 1
        else:
            out[o] = _BACKSLASH
            short = np.uint8(0)
            if c == 8:
                short = np.uint8(98)
            elif c == 9:
                short = np.uint8(116)
            elif c == 10:
                short = np.uint8(110)
            elif c == 12:
                short = np.uint8(102)
            elif c == 13:
                short = np.uint8(114)
            if short:
                out[o + 1] = short
                o += 2
            else:
                out[o + 1] = 117
                out[o + 2] = _ZERO
                out[o + 3] = _ZERO
                out[o + 4] = _HEX[c >> 4]
                out[o + 5] = _HEX[c & 15]
                o += 6
    out[o] = _QUOTE
    return np.int64(o + 1)


@compiled
def _quoted(word, out, o, cap):
    if cap - o < word.size + 2:
        return np.int64(SPACE)
    out[o] = _QUOTE
    o = _literal(word, out, o + 1, cap)
    out[o] = _QUOTE
    return np.int64(o + 1)


@compiled
def _base64(b, p, n, out, o):
    i = 0
    while i + 3 <= n:
        v = (np.int64(b[p + i]) << 16) | (np.int64(b[p + i + 1]) << 8) | np.int64(b[p + i + 2])
        for k in range(4):
            out[o + k] = _BASE64[(v >> (18 - 6 * k)) & 63]
        o += 4
        i += 3
    if i < n:
        v = np.int64(b[p + i]) << 16
        if i + 1 < n:
            v |= np.int64(b[p + i + 1]) << 8
        out[o] = _BASE64[(v >> 18) & 63]
        out[o + 1] = _BASE64[(v >> 12) & 63]
        out[o + 2] = _BASE64[(v >> 6) & 63] if i + 1 < n else np.uint8(61)
        out[o + 3] = np.uint8(61)
        o += 4
    return o


@allocating
def _float(b, p, n):
    scratch = np.empty(8, dtype=np.uint8)
    for i in range(n):
        scratch[i] = b[p + n - 1 - i]
    return np.float64(scratch[:4].view(np.float32)[0]) if n == 4 else scratch.view(np.float64)[0]


@compiled
def _json_double(v, single, out, o):
    """The shortest of 15, 16 and 17 significant digits (6 to 9 for a float4) that reads back as the same number."""
    at = out.ctypes.data + o
    first, last = (6, 9) if single else (15, 17)
    for digits in range(first, last + 1):
        _gcvt(v, np.int32(digits), at)
        if single:
            same = np.float64(_strtof(at, 0)) == v
        else:
            same = _strtod(at, 0) == v
        if same:
            break
    end = o
    while out[end] != 0:
        end += 1
    return end


@compiled
def _year_month_day(days, out, o):
    """ISO 8601 date of days since 2000-01-01; years outside 0000-9999 with a sign and at least six digits.

    The civil-from-days algorithm of Howard Hinnant (http://howardhinnant.github.io/date_algorithms.html).
    """
    z = days + EPOCH_DAYS + 719468
    era = z // 146097
    doe = z - era * 146097
    yoe = (doe - doe // 1460 + doe // 36524 - doe // 146096) // 365
    year = yoe + era * 400
    doy = doe - (365 * yoe + yoe // 4 - yoe // 100)
    mp = (5 * doy + 2) // 153
    day = doy - (153 * mp + 2) // 5 + 1
    month = mp + 3 if mp < 10 else mp - 9
    if month <= 2:
        year += 1
    if 0 <= year <= 9999:
        o = _padded(year, 4, out, o)
    else:
        out[o] = _MINUS if year < 0 else 43
        magnitude = -year if year < 0 else year
        o = _padded(magnitude, 7 if magnitude > 999999 else 6, out, o + 1)
    out[o] = _MINUS
    o = _padded(month, 2, out, o + 1)
    out[o] = _MINUS
    return _padded(day, 2, out, o + 1)


@compiled
def _clock(micros, out, o):
    o = _padded(micros // 3600000000, 2, out, o)
    out[o] = _COLON
    o = _padded(micros // 60000000 % 60, 2, out, o + 1)
    out[o] = _COLON
    o = _padded(micros // 1000000 % 60, 2, out, o + 1)
    if micros % 1000000 != 0:
        out[o] = _DOT
        o = _padded(micros % 1000000, 6, out, o + 1)
    return o


@compiled
def _scaled(v, scale, out, o):
    """A number of hundredths, for a scale of two, as a decimal."""
    if v < 0:
        out[o] = _MINUS
        o += 1
    magnitude = np.uint64(0) - np.uint64(v) if v < 0 else np.uint64(v)
    unit = np.uint64(1)
    for _ in range(scale):
        unit *= np.uint64(10)
    o = _unsigned(magnitude // unit, out, o)
    if scale > 0:
        out[o] = _DOT
        o = _padded(np.int64(magnitude % unit), scale, out, o + 1)
    return o


@compiled
def _zone(offset, out, o):
    """Seconds east of Greenwich, as ISO 8601 has them; PostgreSQL may add seconds."""
    out[o] = _MINUS if offset < 0 else 43
    if offset < 0:
        offset = -offset
    o = _padded(offset // 3600, 2, out, o + 1)
    out[o] = _COLON
    o = _padded(offset // 60 % 60, 2, out, o + 1)
    if offset % 60 != 0:
        out[o] = _COLON
        o = _padded(offset % 60, 2, out, o + 1)
    return o


@compiled
def _part(v, unit, out, o):
    if v == 0:
        return o
    o = _decimal(v, out, o)
    out[o] = unit
    return o + 1


@compiled
def _truncated(v, unit):
    """C's division."""
    return -(-v // unit) if v < 0 else v // unit


@compiled
def _duration(months, days, micros, out, o):
    """ISO 8601 with designators, each with its own sign (INTSTYLE_ISO_8601 in EncodeInterval, src/backend/utils/adt/datetime.c)."""
    out[o] = 80
    if months == 0 and days == 0 and micros == 0:
        out[o + 1] = 84
        out[o + 2] = _ZERO
        out[o + 3] = 83
        return o + 4
    years = _truncated(months, 12)
    o = _part(years, 89, out, o + 1)
    o = _part(months - 12 * years, 77, out, o)
    o = _part(days, 68, out, o)
    if micros == 0:
        return o
    out[o] = 84
    hours = _truncated(micros, 3600000000)
    rest = micros - 3600000000 * hours
    o = _part(hours, 72, out, o + 1)
    minutes = _truncated(rest, 60000000)
    rest -= 60000000 * minutes
    o = _part(minutes, 77, out, o)
    if rest == 0:
        return o
    if rest < 0:
        out[o] = _MINUS
        o += 1
        rest = -rest
    o = _decimal(rest // 1000000, out, o)
    fraction = rest % 1000000
    if fraction != 0:
        out[o] = _DOT
        o = _padded(fraction, 6, out, o + 1)
        while out[o - 1] == _ZERO:
            o -= 1
    out[o] = 83
    return o + 1


@compiled
def json_value(op, arg, b, p, n, out, o, cap):
    """One non-null value as JSON."""
    if op == OP_TEXT:
        return _json_string(b, p, n, out, o, cap)
    if op == OP_JSONB:
        if n < 1 or b[p] != 1:
            return np.int64(MALFORMED)
        return _json_string(b, p + 1, n - 1, out, o, cap)
    if op == OP_BYTEA:
        if cap - o < (n + 2) // 3 * 4 + 2:
            return np.int64(SPACE)
        out[o] = _QUOTE
        o = _base64(b, p, n, out, o + 1)
        out[o] = _QUOTE
        return np.int64(o + 1)
    if op == OP_DECIMAL or op == OP_NUMERIC_TEXT:
        if _numeric_is_malformed(b, p, n):
            return np.int64(MALFORMED)
        sign = u16(b, p + 4)
        if sign == NUMERIC_NAN:
            return _quoted(_NAN, out, o, cap)
        if sign == NUMERIC_PINF:
            return _quoted(_INFINITY, out, o, cap)
        if sign == NUMERIC_NINF:
            return _quoted(_MINUS_INFINITY, out, o, cap)
        if cap - o < _numeric_text_size(b, p) + 2:
            return np.int64(SPACE)
        out[o] = _QUOTE
        o = _numeric_text(b, p, out, o + 1)
        out[o] = _QUOTE
        return np.int64(o + 1)
    if cap - o < 96:
        return np.int64(SPACE)
    if op == OP_INT4:
        return np.int64(_decimal(i32(b, p), out, o)) if n == 4 else np.int64(MALFORMED)
    if op == OP_INT8:
        return np.int64(_decimal(i64(b, p), out, o)) if n == 8 else np.int64(MALFORMED)
    if op == OP_INT2:
        return np.int64(_decimal(i16(b, p), out, o)) if n == 2 else np.int64(MALFORMED)
    if op == OP_BOOL:
        if n != 1 or b[p] > 1:
            return np.int64(MALFORMED)
        return _literal(_TRUE, out, o, cap) if b[p] == 1 else _literal(_FALSE, out, o, cap)
    if op == OP_FLOAT4 or op == OP_FLOAT8:
        if n != (4 if op == OP_FLOAT4 else 8):
            return np.int64(MALFORMED)
        v = _float(b, p, n)
        if np.isnan(v):
            return _quoted(_NAN, out, o, cap)
        if np.isinf(v):
            return _quoted(_INFINITY if v > 0 else _MINUS_INFINITY, out, o, cap)
        return np.int64(_json_double(v, op == OP_FLOAT4, out, o))
    if op == OP_DATE or op == OP_TIME or op == OP_TIMESTAMP or op == OP_TIMESTAMPTZ:
        if n != (4 if op == OP_DATE else 8):
            return np.int64(MALFORMED)
        v = i32(b, p) if op == OP_DATE else i64(b, p)
        if (op == OP_DATE and v == DATE_INFINITY) or (op >= OP_TIMESTAMP and v == TIMESTAMP_INFINITY):
            return _quoted(_LOWER_INFINITY, out, o, cap)
        if (op == OP_DATE and v == DATE_MINUS_INFINITY) or (op >= OP_TIMESTAMP and v == TIMESTAMP_MINUS_INFINITY):
            return _quoted(_LOWER_MINUS_INFINITY, out, o, cap)
        out[o] = _QUOTE
        o += 1
        if op == OP_DATE:
            o = _year_month_day(v, out, o)
        elif op == OP_TIME:
            if v < 0 or v > 86400000000:
                return np.int64(MALFORMED)
            o = _clock(v, out, o)
        else:
            days = v // 86400000000
            o = _year_month_day(days, out, o)
            out[o] = 84
            o = _clock(v - days * 86400000000, out, o + 1)
            if op == OP_TIMESTAMPTZ:
                out[o] = 90
                o += 1
        out[o] = _QUOTE
        return np.int64(o + 1)
    if op == OP_UUID:
        if n != 16:
            return np.int64(MALFORMED)
        out[o] = _QUOTE
        o = _uuid(b, p, out, o + 1)
        out[o] = _QUOTE
        return np.int64(o + 1)
    if op == OP_INET:
        if _inet_is_malformed(b, p, n):
            return np.int64(MALFORMED)
        out[o] = _QUOTE
        o = _inet(b, p, out, o + 1)
        out[o] = _QUOTE
        return np.int64(o + 1)
    if op == OP_UINT32:
        return np.int64(_decimal(u32(b, p), out, o)) if n == 4 else np.int64(MALFORMED)
    if op == OP_UINT64:
        return np.int64(_unsigned(np.uint64(i64(b, p)), out, o)) if n == 8 else np.int64(MALFORMED)
    if op == OP_MONEY:
        if n != 8:
            return np.int64(MALFORMED)
        out[o] = _QUOTE
        o = _scaled(i64(b, p), arg, out, o + 1)
        out[o] = _QUOTE
        return np.int64(o + 1)
    if op == OP_TIMETZ:
        v = i64(b, p) if n == 12 else np.int64(-1)
        if v < 0 or v > 86400000000:
            return np.int64(MALFORMED)
        out[o] = _QUOTE
        o = _zone(-i32(b, p + 8), out, _clock(v, out, o + 1))
        out[o] = _QUOTE
        return np.int64(o + 1)
    if op == OP_INTERVAL:
        if n != 16:
            return np.int64(MALFORMED)
        micros, days, months = i64(b, p), i32(b, p + 8), i32(b, p + 12)
        if months == INTERVAL_INFINITY and days == INTERVAL_INFINITY and micros == TIMESTAMP_INFINITY:
            return _quoted(_LOWER_INFINITY, out, o, cap)
        if months == INTERVAL_MINUS_INFINITY and days == INTERVAL_MINUS_INFINITY and micros == TIMESTAMP_MINUS_INFINITY:
            return _quoted(_LOWER_MINUS_INFINITY, out, o, cap)
        out[o] = _QUOTE
        o = _duration(months, days, micros, out, o + 1)
        out[o] = _QUOTE
        return np.int64(o + 1)
    return np.int64(MALFORMED)


# ------------------------------------------------------------------------------------------------ made of others
@compiled
def _array(json, programs, node, b, p, n, out, o, cap):
    """An array, nested as deep as it is declared (array_send, src/backend/utils/adt/arrayfuncs.c).

    int32 dimensions, flags and element type; of each dimension int32 size and lower bound; the elements, row by row, each an
    int32 length (-1: NULL) and its value. Avro: one block of items and its end (https://avro.apache.org/docs/1.12.0/specification/#arrays-1).
    """
    end = p + n
    dimensions = i32(b, p) if n >= 12 else np.int64(-1)
    if dimensions < 0 or dimensions > 6 or n < 12 + 8 * dimensions:
        return np.int64(MALFORMED)
    if cap - o < 256:
        return np.int64(SPACE)
    sizes = p + 12
    p = sizes + 8 * dimensions
    if dimensions == 0:
        if p != end:
            return np.int64(MALFORMED)
        out[o] = _OPEN_ARRAY if json else 0
        if json:
            out[o + 1] = _CLOSE_ARRAY
        return np.int64(o + 2 if json else o + 1)
    if dimensions != programs[node, P_ARG]:
        return np.int64(NO_REPRESENTATION)
    count = np.int64(1)
    for d in range(dimensions):
        size = i32(b, sizes + 8 * d)
        if i32(b, sizes + 8 * d + 4) != 1:
            return np.int64(NO_REPRESENTATION)
        # an element has four bytes at least
        if size < 1 or size > n:
            return np.int64(MALFORMED)
        count *= size
        if count > n:
            return np.int64(MALFORMED)
    child = programs[node, P_CHILD]
    op = programs[child, P_OP]
    for i in range(count):
        if cap - o < 256:
            return np.int64(SPACE)
        if json and i > 0:
            out[o] = _COMMA
            o += 1
        period = count
        for d in range(dimensions):
            if i % period == 0:
                if json:
                    out[o] = _OPEN_ARRAY
                    o += 1
                else:
                    o = _varint(i32(b, sizes + 8 * d), out, o)
            period //= i32(b, sizes + 8 * d)
        if end - p < 4:
            return np.int64(MALFORMED)
        length = i32(b, p)
        p += 4
        if length == -1:
            if json:
                o = _literal(_NULL, out, o, cap)
            else:
                out[o] = 0
                o += 1
        else:
            if length < 0 or length > end - p:
                return np.int64(MALFORMED)
            if not json:
                out[o] = 2
                o += 1
            if op == OP_ARRAY:
                o = _array(json, programs, child, b, p, length, out, o, cap)
            elif json:
                o = json_value(op, programs[child, P_ARG], b, p, length, out, o, cap)
            else:
                o = avro_value(op, programs[child, P_ARG], b, p, length, out, o, cap)
            if o < 0:
                return np.int64(o)
            p += length
        if cap - o < 16:
            return np.int64(SPACE)
        period = np.int64(1)
        for d in range(dimensions - 1, -1, -1):
            period *= i32(b, sizes + 8 * d)
            if (i + 1) % period == 0:
                out[o] = _CLOSE_ARRAY if json else 0
                o += 1
    return np.int64(o) if p == end else np.int64(MALFORMED)


@compiled
def _value(json, programs, node, b, p, n, out, o, cap):
    op = programs[node, P_OP]
    if op == OP_ARRAY:
        return _array(json, programs, node, b, p, n, out, o, cap)
    if json:
        return json_value(op, programs[node, P_ARG], b, p, n, out, o, cap)
    return avro_value(op, programs[node, P_ARG], b, p, n, out, o, cap)


# ------------------------------------------------------------------------------------------------ rows
@compiled
def _frame(schema_id, out, o):
    out[o] = MAGIC
    out[o + 1] = np.uint8((schema_id >> 24) & 255)
    out[o + 2] = np.uint8((schema_id >> 16) & 255)
    out[o + 3] = np.uint8((schema_id >> 8) & 255)
    out[o + 4] = np.uint8(schema_id & 255)
    return o + 5


@compiled
def _field(json, programs, column, k, b, side, p, n, out, o, cap):
    if k == FIELD_UNCHANGED:
        return np.int64(UNCHANGED)
    if k == FIELD_TEXT and programs[column, P_OP] != OP_TEXT:
        return np.int64(MALFORMED)  # text comes of types without a send function only
    return _value(json, programs, column, side if k == FIELD_SIDE else b, p, n, out, o, cap)


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
        return np.int64(SPACE), 0
    if json:
        out[o] = _OPEN
        o += 1
    else:
        o = _frame(schema_id, out, o)
    for i in range(count):
        c = keys[relations[rel, L_KEY] + i] if is_key else i
        if cap - o < programs[first + c, P_NAME_LEN] + 8:
            return np.int64(SPACE), c
        if json:
            if i > 0:
                out[o] = _COMMA
                o += 1
            o = _copy(names, programs[first + c, P_NAME], programs[first + c, P_NAME_LEN], out, o)
            if kind[c] == FIELD_NULL:
                o = _literal(_NULL, out, o, cap)
                continue
        elif kind[c] == FIELD_NULL:
            if is_key:
                return np.int64(MALFORMED), c
            out[o] = 0
            o += 1
            continue
        elif not is_key:
            out[o] = 2
            o += 1
        o = _field(
            json,
            programs,
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
            return np.int64(SPACE), 0
        out[o] = _CLOSE
        o += 1
    return np.int64(o), 0


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
def checksum(words, h):
    """FNV-1a over 64-bit words instead of bytes (http://www.isthe.com/chongo/tech/comp/fnv/): what a range's progress says of
    its records, an eighth of a CRC's time."""
    for i in range(words.size):
        h = (h ^ words[i]) * np.uint64(0x100000001B3)
    return h


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
def encode_copy(
    b, offsets, start, rows, json, relations, rel, programs, keys, names, fields, records, errors, out, now
):
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
        column = 0
        status = read_copy_row(b, offsets[i], offsets[i + 1], relations[rel, L_COLUMN_COUNT], position, length, kind)
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
            errors[e, 0] = i
            errors[e, 1] = status
            errors[e, 2] = column
            e += 1
            o = begin
            continue
        o = status
        _record(records, r, relations, rel, begin, key_len, value, o - value, out, i, 114, now, 0, 0, 0)
        r += 1
    return rows, o, r, e


@compiled
def _convert_fields(relations, rel, programs, keys, only_key, kind, position, length, side_offsets, cursor):
    """Point the fields that the server converted at their text; returns the next entry of ``side_offsets``."""
    first = relations[rel, L_COLUMNS]
    if only_key:
        for i in range(relations[rel, L_KEY_COUNT]):
            c = keys[relations[rel, L_KEY] + i]
            if programs[first + c, P_CONVERT] and kind[c] == FIELD_BINARY:
                kind[c] = FIELD_SIDE
                position[c] = side_offsets[cursor]
                length[c] = side_offsets[cursor + 1] - side_offsets[cursor]
                cursor += 1
    else:
        for c in range(relations[rel, L_COLUMN_COUNT]):
            if programs[first + c, P_CONVERT] and kind[c] == FIELD_BINARY:
                kind[c] = FIELD_SIDE
                position[c] = side_offsets[cursor]
                length[c] = side_offsets[cursor + 1] - side_offsets[cursor]
                cursor += 1
    return cursor


@compiled
def find_conversions(b, changes, count, relations, programs, keys, fields, found):
    """List the values that PostgreSQL has to turn into text, in the order in which :func:`encode_changes` uses them.

    Rows of ``found``: position, length, column row in ``programs``, change. Returns how many there are (more than fit means:
    call again with more room).
    """
    position, length, kind = fields[0], fields[1], fields[2]
    n = 0
    for i in range(count):
        if changes[i, C_KIND] != 73 and changes[i, C_KIND] != 85 and changes[i, C_KIND] != 68:
            continue
        rel = changes[i, C_RELATION]
        first = relations[rel, L_COLUMNS]
        p = changes[i, C_OFFSET] + 5
        end = changes[i, C_OFFSET] + changes[i, C_LENGTH]
        while p < end and p >= 0:
            tag = b[p]
            p = read_tuple(b, p + 1, end, relations[rel, L_COLUMN_COUNT], position, length, kind)
            if p < 0:
                break
            if tag == 78:
                for c in range(relations[rel, L_COLUMN_COUNT]):
                    if programs[first + c, P_CONVERT] and kind[c] == FIELD_BINARY:
                        if n < found.shape[0]:
                            found[n, 0] = position[c]
                            found[n, 1] = length[c]
                            found[n, 2] = first + c
                            found[n, 3] = i
                        n += 1
            else:
                for k in range(relations[rel, L_KEY_COUNT]):
                    c = keys[relations[rel, L_KEY] + k]
                    if programs[first + c, P_CONVERT] and kind[c] == FIELD_BINARY:
                        if n < found.shape[0]:
                            found[n, 0] = position[c]
                            found[n, 1] = length[c]
                            found[n, 2] = first + c
                            found[n, 3] = i
                        n += 1
    return n


@compiled
def find_unchanged(b, changes, count, relations, fields, found):
    """List the changes whose new row lacks an unchanged TOAST value; returns how many."""
    position, length, kind = fields[0], fields[1], fields[2]
    n = 0
    for i in range(count):
        if changes[i, C_KIND] != 85:
            continue
        rel = changes[i, C_RELATION]
        p = changes[i, C_OFFSET] + 5
        end = changes[i, C_OFFSET] + changes[i, C_LENGTH]
        if p < end and b[p] != 78:
            p = read_tuple(b, p + 1, end, relations[rel, L_COLUMN_COUNT], position, length, kind)
        if p < 0 or p >= end:
            continue
        if read_tuple(b, p + 1, end, relations[rel, L_COLUMN_COUNT], position, length, kind) < 0:
            continue
        for c in range(relations[rel, L_COLUMN_COUNT]):
            if kind[c] == FIELD_UNCHANGED:
                found[n] = i
                n += 1
                break
    return n


@compiled
def _same_bytes(out, p, n, q, m):
    if n != m:
        return False
    for i in range(n):
        if out[p + i] != out[q + i]:
            return False
    return True


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
        column = 0
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
                break
            cursor = _convert_fields(
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
        if status == SPACE:
            return i, begin_cursor, begin, r, e
        if status < 0:
            errors[e, 0] = i
            errors[e, 1] = status
            errors[e, 2] = column
            e += 1
            o = begin
            # the values of a row that failed half-way are used up all the same
            cursor = begin_cursor + _count_conversions(b, changes, i, relations, programs, keys, position, length, kind)
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
        if old_key >= 0 and not _same_bytes(out, old_key, old_len, key, key_len):
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


@compiled
def _count_conversions(b, changes, i, relations, programs, keys, position, length, kind):
    rel = changes[i, C_RELATION]
    first = relations[rel, L_COLUMNS]
    p = changes[i, C_OFFSET] + 5
    end = changes[i, C_OFFSET] + changes[i, C_LENGTH]
    n = 0
    while p < end and p >= 0:
        tag = b[p]
        p = read_tuple(b, p + 1, end, relations[rel, L_COLUMN_COUNT], position, length, kind)
        if p < 0:
            break
        if tag == 78:
            for c in range(relations[rel, L_COLUMN_COUNT]):
                if programs[first + c, P_CONVERT] and kind[c] == FIELD_BINARY:
                    n += 1
        else:
            for k in range(relations[rel, L_KEY_COUNT]):
                c = keys[relations[rel, L_KEY] + k]
                if programs[first + c, P_CONVERT] and kind[c] == FIELD_BINARY:
                    n += 1
    return n
