"""Numbers of bytes, durations and times as people read them."""

from __future__ import annotations

import math
from datetime import UTC, datetime


def size(count: float) -> str:
    """A number of bytes as readable text, such as ``1.5 GB``."""
    value, unit = float(count), "B"
    for larger in ("kB", "MB", "GB", "TB"):
        if value < 1000:
            break
        value, unit = value / 1000, larger
    return f"{value:.0f} {unit}" if value >= 100 or unit == "B" else f"{value:.1f} {unit}"


def duration(seconds: float) -> str:
    """A duration as readable text, such as ``12 s``."""
    if 0 < seconds < 1:
        return f"{seconds * 1000:.0f} ms"
    if seconds < 100:
        return f"{seconds:.0f} s" if seconds >= 10 else f"{seconds:.1f} s"
    minutes, hours = seconds / 60, seconds / 3600
    return f"{minutes:.0f} min" if minutes < 100 else f"{hours:.1f} h"


def roughly(count: float) -> str:
    """A number of bytes with one significant digit, so that a text does not change with every measurement."""
    digits = 10 ** int(math.log10(max(1.0, count)))
    return size(int(count / digits) * digits)


def moment(at: float) -> str:
    """A day and a time of it, in UTC.

    :param at: seconds since 1970.
    """
    return datetime.fromtimestamp(at, UTC).strftime("%Y-%m-%d %H:%M:%S UTC")


def clock(at: float) -> str:
    """A time of the day, in UTC.

    :param at: seconds since 1970.
    """
    return datetime.fromtimestamp(at, UTC).strftime("%H:%M:%S UTC")
