"""Writes values as text: UUIDs, network addresses, dates and times."""

from __future__ import annotations

import numpy as np

from airflow_bottledwater.compiled import callee
from airflow_bottledwater.encoding import wire
from airflow_bottledwater.encoding.kernels import writing
from airflow_bottledwater.encoding.kernels.reading import i32, i64, u16

_DAY = 86_400_000_000  # microseconds


@callee
def uuid(b, p, out, o):
    for i in range(16):
        if i == 4 or i == 6 or i == 8 or i == 10:
            out[o] = writing.MINUS
            o += 1
        out[o] = writing.HEX[b[p + i] >> 4]
        out[o + 1] = writing.HEX[b[p + i] & 15]
        o += 2
    return o


@callee
def inet_is_malformed(b, p, n):
    """Whether an address is not in the layout of network_send (src/backend/utils/adt/network.c): family, bits, whether
    it is a cidr, number of address bytes, address."""
    if n < 4 or (b[p] != 2 and b[p] != 3):
        return True
    size = 4 if b[p] == 2 else 16
    return b[p + 3] != size or n != 4 + size or b[p + 1] > 8 * size or b[p + 2] > 1


@callee
def _ipv4(b, p, out, o):
    for i in range(4):
        if i > 0:
            out[o] = writing.DOT
            o += 1
        o = writing.integer(np.int64(b[p + i]), out, o)
    return o


@callee
def _ipv6(b, p, out, o):
    """Write an IPv6 address as inet_net_ntop_ipv6 prints it (src/port/inet_net_ntop.c): the first longest run of zeros
    as ``::``."""
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
                out[o] = writing.COLON
                o += 1
            continue
        if i > 0:
            out[o] = writing.COLON
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
            out[o] = writing.HEX[(v >> shift) & 15]
            o += 1
            shift -= 4
    if best >= 0 and best + best_size == 8:
        out[o] = writing.COLON
        o += 1
    return o


@callee
def inet(b, p, out, o):
    """Write an address, followed by its number of bits if these are not all, or if it is a cidr."""
    wide = b[p] == 3
    o = _ipv6(b, p + 4, out, o) if wide else _ipv4(b, p + 4, out, o)
    if b[p + 2] == 1 or b[p + 1] != (128 if wide else 32):
        out[o] = 47
        o = writing.integer(np.int64(b[p + 1]), out, o + 1)
    return o


@callee
def year_month_day(days, out, o):
    """Write the ISO 8601 date of days since 2000-01-01; years outside 0000-9999 have a sign and at least six digits.

    The algorithm of Neri and Schneider (Euclidean affine functions and their application to calendar algorithms, 2022,
    figure 12), within an era of 400 years (http://howardhinnant.github.io/date_algorithms.html).
    """
    z = days + wire.EPOCH_DAYS + 719468
    era = np.int64(np.uint64(z) // np.uint64(146097)) if z >= 0 else z // 146097
    # the era's days to century, year and month: all unsigned, since signed division is expensive
    n1 = np.uint64(4) * np.uint64(z - era * 146097) + np.uint64(3)
    century = n1 // np.uint64(146097)
    n2 = np.uint64(2939745) * ((n1 - century * np.uint64(146097)) | np.uint64(3))
    year = 400 * era + np.int64(np.uint64(100) * century + (n2 >> np.uint64(32)))
    of_year = (n2 & np.uint64(0xFFFFFFFF)) // np.uint64(4 * 2939745)
    n3 = np.uint64(2141) * of_year + np.uint64(197913)
    month, day = n3 >> np.uint64(16), (n3 & np.uint64(0xFFFF)) // np.uint64(2141) + np.uint64(1)
    # a year of this calendar begins in March
    if month > np.uint64(12):
        month -= np.uint64(12)
        year += 1
    if 0 <= year <= 9999:
        writing.pair(np.uint64(year) // np.uint64(100), out, o)
        writing.pair(np.uint64(year) % np.uint64(100), out, o + 2)
        o += 4
    else:
        out[o] = writing.MINUS if year < 0 else writing.PLUS
        magnitude = -year if year < 0 else year
        o = writing.padded(magnitude, 7 if magnitude > 999999 else 6, out, o + 1)
    out[o] = writing.MINUS
    writing.pair(month, out, o + 1)
    out[o + 3] = writing.MINUS
    writing.pair(day, out, o + 4)
    return o + 6


@callee
def clock(micros, out, o):
    """Write the time of day of microseconds since midnight, which must not be negative."""
    second, micro = np.uint64(micros) // np.uint64(1000000), np.uint64(micros) % np.uint64(1000000)
    minute = second // np.uint64(60)
    writing.pair(minute // np.uint64(60), out, o)
    out[o + 2] = writing.COLON
    writing.pair(minute % np.uint64(60), out, o + 3)
    out[o + 5] = writing.COLON
    writing.pair(second % np.uint64(60), out, o + 6)
    o += 8
    if micro != np.uint64(0):
        out[o] = writing.DOT
        writing.pair(micro // np.uint64(10000), out, o + 1)
        writing.pair(micro // np.uint64(100) % np.uint64(100), out, o + 3)
        writing.pair(micro % np.uint64(100), out, o + 5)
        o += 7
    return o


@callee
def scaled(v, scale, out, o):
    """Write an integer as a decimal number of a scale: for a scale of 2, it is a number of hundredths."""
    if v < 0:
        out[o] = writing.MINUS
        o += 1
    magnitude = np.uint64(0) - np.uint64(v) if v < 0 else np.uint64(v)
    unit = np.uint64(1)
    for _ in range(scale):
        unit *= np.uint64(10)
    o = writing.unsigned(magnitude // unit, out, o)
    if scale > 0:
        out[o] = writing.DOT
        o = writing.padded(np.int64(magnitude % unit), scale, out, o + 1)
    return o


@callee
def zone(offset, out, o):
    """Write an offset in seconds east of Greenwich, as in ISO 8601, with seconds where PostgreSQL has them."""
    out[o] = writing.MINUS if offset < 0 else writing.PLUS
    if offset < 0:
        offset = -offset
    o = writing.padded(offset // 3600, 2, out, o + 1)
    out[o] = writing.COLON
    o = writing.padded(offset // 60 % 60, 2, out, o + 1)
    if offset % 60 != 0:
        out[o] = writing.COLON
        o = writing.padded(offset % 60, 2, out, o + 1)
    return o


@callee
def _part(v, unit, out, o):
    if v == 0:
        return o
    o = writing.integer(v, out, o)
    out[o] = unit
    return o + 1


@callee
def _truncated(v, unit):
    """Integer division that truncates towards zero, as in C; without negation, which the least integer does not
    have."""
    q = v // unit
    return q + 1 if v < 0 and q * unit != v else q


@callee
def duration(months, days, micros, out, o):
    """Write an interval as in ISO 8601 with designators, each number with its own sign (INTSTYLE_ISO_8601 in
    EncodeInterval, src/backend/utils/adt/datetime.c)."""
    out[o] = 80
    if months == 0 and days == 0 and micros == 0:
        out[o + 1] = 84
        out[o + 2] = writing.ZERO
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
        out[o] = writing.MINUS
        o += 1
        rest = -rest
    o = writing.integer(rest // 1000000, out, o)
    fraction = rest % 1000000
    if fraction != 0:
        out[o] = writing.DOT
        o = writing.padded(fraction, 6, out, o + 1)
        while out[o - 1] == writing.ZERO:
            o -= 1
    out[o] = 83
    return o + 1


@callee
def quoted_moment(op, b, p, n, out, o, cap):
    """Write a date, a time or a timestamp, as a JSON string."""
    if n != (4 if op == wire.OP_DATE else 8):
        return np.int64(wire.MALFORMED)
    v = i32(b, p) if op == wire.OP_DATE else i64(b, p)
    if (op == wire.OP_DATE and v == wire.DATE_INFINITY) or (op >= wire.OP_TIMESTAMP and v == wire.TIMESTAMP_INFINITY):
        return writing.quoted(writing.LOWER_INFINITY, out, o, cap)
    if (op == wire.OP_DATE and v == wire.DATE_MINUS_INFINITY) or (
        op >= wire.OP_TIMESTAMP and v == wire.TIMESTAMP_MINUS_INFINITY
    ):
        return writing.quoted(writing.LOWER_MINUS_INFINITY, out, o, cap)
    out[o] = writing.QUOTE
    o += 1
    if op == wire.OP_DATE:
        o = year_month_day(v, out, o)
    elif op == wire.OP_TIME:
        if v < 0 or v > _DAY:
            return np.int64(wire.MALFORMED)
        o = clock(v, out, o)
    else:
        days = np.int64(np.uint64(v) // np.uint64(_DAY)) if v >= 0 else v // _DAY
        o = year_month_day(days, out, o)
        out[o] = 84
        o = clock(v - days * _DAY, out, o + 1)
        if op == wire.OP_TIMESTAMPTZ:
            out[o] = 90
            o += 1
    out[o] = writing.QUOTE
    return np.int64(o + 1)


@callee
def quoted_temporal(op, b, p, n, out, o, cap):
    """Write any date, time or interval as a JSON string, for which there must be room for 96 bytes; all are shorter
    than 64."""
    if op == wire.OP_TIMETZ:
        v = i64(b, p) if n == 12 else np.int64(-1)
        if v < 0 or v > _DAY:
            return np.int64(wire.MALFORMED)
        out[o] = writing.QUOTE
        o = zone(-i32(b, p + 8), out, clock(v, out, o + 1))
        out[o] = writing.QUOTE
        return np.int64(o + 1)
    if op == wire.OP_INTERVAL:
        if n != 16:
            return np.int64(wire.MALFORMED)
        micros, days, months = i64(b, p), i32(b, p + 8), i32(b, p + 12)
        if months == wire.INTERVAL_INFINITY and days == wire.INTERVAL_INFINITY and micros == wire.TIMESTAMP_INFINITY:
            return writing.quoted(writing.LOWER_INFINITY, out, o, cap)
        if (
            months == wire.INTERVAL_MINUS_INFINITY
            and days == wire.INTERVAL_MINUS_INFINITY
            and micros == wire.TIMESTAMP_MINUS_INFINITY
        ):
            return writing.quoted(writing.LOWER_MINUS_INFINITY, out, o, cap)
        out[o] = writing.QUOTE
        o = duration(months, days, micros, out, o + 1)
        out[o] = writing.QUOTE
        return np.int64(o + 1)
    return quoted_moment(op, b, p, n, out, o, cap)


@callee
def unescape(data, start, end, out):
    """Copy a value of COPY's text format without its escapes (a backslash and a letter of these, or the character
    itself); returns how many bytes it has."""
    size = 0
    at = start
    while at < end:
        character = data[at]
        if character == writing.BACKSLASH:
            at += 1
            character = data[at]
            for letter, meant in ((98, 8), (102, 12), (110, 10), (114, 13), (116, 9), (118, 11)):
                if character == letter:
                    character = np.uint8(meant)
                    break
        out[size] = character
        size += 1
        at += 1
    return size
