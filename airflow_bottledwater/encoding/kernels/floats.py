"""Writes floats as the shortest decimal that is read back as the same float, by the algorithm Schubfach.

Raffaele Giulietti, "The Schubfach way to render doubles" (2020); the names are those of Alexander Bolz's C++ code
(https://github.com/abolz/Drachennest, src/schubfach.cc). All arithmetic is in unsigned 64-bit integers.
"""

from __future__ import annotations

import numpy as np

from airflow_bottledwater.compiled import allocating, callee
from airflow_bottledwater.encoding.kernels.writing import DOT, MINUS, PLUS, ZERO, padded, unsigned

#: the smallest and the largest power of ten that a float8 can need
_FIRST, _LAST = -292, 324


def _powers() -> np.ndarray:
    """The powers 10^k as 128 bits, of which the highest is set, rounded up; each row has the upper and the lower
    half."""
    rows = []
    for k in range(_FIRST, _LAST + 1):
        shift = 127 - ((k * 1741647) >> 19)  # floor(log2(10^k))
        if k >= 0:
            scaled = 10**k << shift if shift >= 0 else -(-(10**k) >> -shift)
        else:
            scaled = -(-(1 << shift) // 10**-k)
        rows.append((scaled >> 64, scaled & (2**64 - 1)))
    return np.array(rows, dtype=np.uint64)


_POWERS = _powers()
_0, _1, _2, _4, _10, _32, _40, _LOW = (np.uint64(n) for n in (0, 1, 2, 4, 10, 32, 40, 0xFFFFFFFF))


@allocating
def bits_of(v):
    """The 64 bits of a float8."""
    scratch = np.empty(1, dtype=np.float64)
    scratch[0] = v
    return scratch.view(np.int64)[0]


@callee
def half(h):
    """The 32 bits of the float4 that equals a 16-bit float (IEEE 754 binary16)."""
    sign, exponent, fraction = (h >> 15) << 31, (h >> 10) & 31, h & 1023
    if exponent == 31:
        return sign | (255 << 23) | (fraction << 13)
    if exponent > 0:
        return sign | ((exponent + 112) << 23) | (fraction << 13)
    if fraction == 0:
        return sign
    exponent = np.int64(113)
    while fraction & 1024 == 0:
        fraction <<= 1
        exponent -= 1
    return sign | (exponent << 23) | ((fraction & 1023) << 13)


@callee
def _product(a, b):
    """The upper and the lower half of a product of 128 bits."""
    low = (a & _LOW) * (b & _LOW)
    one = (a >> _32) * (b & _LOW) + (low >> _32)
    two = (a & _LOW) * (b >> _32) + (one & _LOW)
    return (a >> _32) * (b >> _32) + (one >> _32) + (two >> _32), (two << _32) | (low & _LOW)


@callee
def _round_to_odd(high, low, c):
    x, _ = _product(low, c)
    y, rest = _product(high, c)
    total = rest + x
    if total < rest:
        y += _1
    return y | _1 if total > _1 else y


@callee
def _decimal(significand, exponent, digits):
    """The digits and the power of ten of a finite float other than 0.

    :param digits: how many bits of the significand are stored: 52 or 23.
    """
    bias = np.int64(1075 if digits == 52 else 150)
    if exponent != 0:
        c = (_1 << np.uint64(digits)) | np.uint64(significand)
        q = exponent - bias
        if 0 <= -q <= digits and c & ((_1 << np.uint64(-q)) - _1) == _0:
            return c >> np.uint64(-q), np.int64(0)
    else:
        c = np.uint64(significand)
        q = 1 - bias
    closer = significand == 0 and exponent > 1
    k = (q * 1262611 - (524031 if closer else 0)) >> 22
    h = np.uint64(q + ((-k * 1741647) >> 19) + 1)
    high, low = _POWERS[-k - _FIRST, 0], _POWERS[-k - _FIRST, 1]
    odd = c & _1
    below = _round_to_odd(high, low, (_4 * c - (_1 if closer else _2)) << h) + odd
    at = _round_to_odd(high, low, (_4 * c) << h)
    above = _round_to_odd(high, low, (_4 * c + _2) << h) - odd
    s = at // _4
    if s >= _10:
        shorter = s // _10
        down, up = below <= _40 * shorter, _40 * shorter + _40 <= above
        if down != up:
            return shorter + (_1 if up else _0), k + 1
    down, up = below <= _4 * s, _4 * s + _4 <= above
    if down != up:
        return s + (_1 if up else _0), k
    middle = _4 * s + _2
    return s + (_1 if at > middle or (at == middle and s & _1 == _1) else _0), k


@callee
def write_shortest(bits, digits, out, o):
    """Write a finite float like ``%g`` with as many digits as it needs: with an exponent below 10^-4, and from 10^15 on
    (10^6 for a float4), unless all places are digits."""
    exponent_bits = 11 if digits == 52 else 8
    if (bits >> (digits + exponent_bits)) & 1:
        out[o] = MINUS
        o += 1
    significand = bits & ((np.int64(1) << digits) - 1)
    exponent = (bits >> digits) & ((np.int64(1) << exponent_bits) - 1)
    if significand == 0 and exponent == 0:
        out[o] = ZERO
        return o + 1
    number, k = _decimal(significand, exponent, digits)
    while number % _10 == _0:
        number //= _10
        k += 1
    begin = o
    end = unsigned(number, out, o)
    count = end - begin
    power = count - 1 + k  # that of the first digit
    least = 15 if digits == 52 else 6
    if power < -4 or power >= (count if count > least else least):
        if count > 1:
            for i in range(end, begin + 1, -1):
                out[i] = out[i - 1]
            out[begin + 1] = DOT
            end += 1
        out[end] = 101
        out[end + 1] = MINUS if power < 0 else PLUS
        size = -power if power < 0 else power
        return padded(size, 3 if size > 99 else 2, out, end + 2)
    if power < 0:
        zeros = 1 - power
        for i in range(end - 1, begin - 1, -1):
            out[i + zeros] = out[i]
        for i in range(zeros):
            out[begin + i] = ZERO
        out[begin + 1] = DOT
        return end + zeros
    if k >= 0:
        for i in range(k):
            out[end + i] = ZERO
        return end + k
    for i in range(end, begin + power + 1, -1):
        out[i] = out[i - 1]
    out[begin + power + 1] = DOT
    return end + 1
