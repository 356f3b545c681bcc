"""Writes PostgreSQL's numeric as text, as an Avro decimal, or as a double."""

from __future__ import annotations

import ctypes

import numpy as np

from airflow_bottledwater.compiled import allocating, callee, external, types
from airflow_bottledwater.encoding import wire
from airflow_bottledwater.encoding.kernels.reading import i16, u16
from airflow_bottledwater.encoding.kernels.writing import DOT, MINUS, ZERO, integer, padded, pair, varint

_strtod = external(ctypes.CDLL(None), "strtod", types.float64, types.intp, types.intp)
#: a numeric with more decimal digits cannot come from a column with a precision (NUMERIC_MAX_PRECISION 1000, scales
#: from -1000 to 1000)
_MAX_DECIMAL_DIGITS = 2100


@callee
def is_malformed(b, p, n):
    if n < 8:
        return True
    digits = u16(b, p)
    if n != 8 + 2 * digits:
        return True
    for i in range(digits):
        if u16(b, p + 8 + 2 * i) > 9999:
            return True
    return False


@callee
def text_size(b, p):
    weight = i16(b, p + 2)
    return 16 + (4 * (weight + 1) if weight >= 0 else 1) + u16(b, p + 6)


@callee
def write_text(b, p, out, o):
    """Write a numeric as numeric_out prints it (get_str_from_var, src/backend/utils/adt/numeric.c)."""
    digits, weight, sign, scale = u16(b, p), i16(b, p + 2), u16(b, p + 4), u16(b, p + 6)
    base = p + 8
    if sign == wire.NUMERIC_NEGATIVE:
        out[o] = MINUS
        o += 1
    if weight < 0:
        out[o] = ZERO
        o += 1
    else:
        for d in range(weight + 1):
            v = u16(b, base + 2 * d) if d < digits else 0
            o = integer(np.int64(v), out, o) if d == 0 else padded(v, 4, out, o)
    if scale > 0:
        out[o] = DOT
        o += 1
        left, d = scale, weight + 1
        while left > 0:
            v = np.uint64(u16(b, base + 2 * d)) if 0 <= d < digits else np.uint64(0)
            high = v // np.uint64(100)
            if left >= 4:
                pair(high, out, o)
                pair(v - high * np.uint64(100), out, o + 2)
            else:
                if left > 1:
                    pair(high, out, o)
                if left != 2:
                    out[o + left - 1] = np.uint8(
                        np.uint64(ZERO) + (high if left == 1 else v) // np.uint64(10) % np.uint64(10)
                    )
            o += min(left, 4)
            left -= 4
            d += 1
    return o


@callee
def bit_length(v):
    n = 0
    while v > np.uint64(0):
        v >>= np.uint64(1)
        n += 1
    return n


@allocating
def _large_decimal_bytes(b, base, digits, exponent, negative, out, o, cap):
    """Write the unscaled value of a decimal that has more digits than fit into an integer."""
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
            return np.int64(wire.NO_REPRESENTATION)
        while used > 0 and limbs[used - 1] == np.uint64(0):
            used -= 1
    bits = 32 * (used - 1) + bit_length(limbs[used - 1]) if used > 0 else 0
    width = (bits + 8) // 8
    if cap - o < width + 10:
        return np.int64(wire.SPACE)
    o = varint(np.int64(width), out, o)
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


@callee
def write_decimal(b, p, scale, out, o, cap):
    """Write a numeric as an Avro decimal: its length, then the unscaled value in two's complement, most significant
    byte first.

    It is as long as fastavro makes it (one bit more than the magnitude needs).
    https://avro.apache.org/docs/1.12.0/specification/#decimal
    """
    digits, weight, sign = u16(b, p), i16(b, p + 2), u16(b, p + 4)
    if sign != 0 and sign != wire.NUMERIC_NEGATIVE:
        return np.int64(wire.NO_REPRESENTATION)
    negative = sign == wire.NUMERIC_NEGATIVE
    base = p + 8
    # value = D * 10^exponent, where D is the integer of all digits in base 10000
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
                return np.int64(wire.NO_REPRESENTATION)
            magnitude //= np.uint64(10)
        width = (bit_length(magnitude) + 8) // 8
        if cap - o < width + 1:
            return np.int64(wire.SPACE)
        o = varint(np.int64(width), out, o)
        v = np.int64(magnitude)
        if negative:
            v = -v
        for i in range(width - 1, -1, -1):
            out[o + i] = np.uint8(v & 255)
            v >>= 8
        return np.int64(o + width)
    if 4 * digits + abs(exponent) > 2 * _MAX_DECIMAL_DIGITS:
        return np.int64(wire.NO_REPRESENTATION)
    return _large_decimal_bytes(b, base, digits, exponent, negative, out, o, cap)


@callee
def nearest_double(b, p, out, o, cap):
    """Returns 0 or an error code, and the double nearest to a numeric; ``out`` is used for its text meanwhile."""
    sign = u16(b, p + 4)
    if sign == wire.NUMERIC_NAN:
        return 0, np.nan
    if sign == wire.NUMERIC_PINF:
        return 0, np.inf
    if sign == wire.NUMERIC_NINF:
        return 0, -np.inf
    if cap - o < text_size(b, p) + 1:
        return wire.SPACE, 0.0
    out[write_text(b, p, out, o)] = 0
    v = _strtod(out.ctypes.data + o, 0)
    return wire.NO_REPRESENTATION if np.isinf(v) else 0, v
