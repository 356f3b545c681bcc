"""The stream's line in the log, for people: how fast it is, how far it is behind, and where it is."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping

from airflow_bottledwater.metrics.meter import Meter
from airflow_bottledwater.model.amounts import duration, size

#: seconds between two looks, over which the pace is measured
_INTERVAL = 10.0
#: seconds after which a line comes although nothing has changed
_AGAIN = 600.0
#: seconds of lag from which on the stream is behind
_BEHIND = 60.0


class ProgressLine:
    """Decides when a line is due: at first, when something has changed, and every ten minutes.

    :param meter: knows how far the stream is behind.
    :param now: a clock that only grows, in seconds.
    """

    def __init__(self, meter: Meter, now: Callable[[], float] = time.monotonic) -> None:
        self._meter, self._now = meter, now
        self._looked, self._published = -math.inf, 0
        self._said = -math.inf
        self._told: tuple[bool, int] | None = None

    def due(self, position: object, counters: Mapping[str, int]) -> str:
        """The line, if one is due; else an empty text.

        :param position: up to which everything is published.
        :param counters: how many records of each kind are published since the slot was created.
        """
        now, published = self._now(), counters.get("published", 0)
        seconds = now - self._looked
        if seconds < _INTERVAL:
            return ""
        first, pace = self._looked == -math.inf, (published - self._published) / seconds
        self._looked, self._published = now, published
        if first:
            return ""  # nothing was measured yet
        open_letters, behind = counters.get("open_dead_letters", 0), self._meter.behind
        told = (behind is not None and behind[1] >= _BEHIND, open_letters)
        if told == self._told and now - self._said < _AGAIN:
            return ""
        self._said, self._told = now, told
        parts = [f"{pace:,.0f} rows/s", _behind(behind)]
        if open_letters:
            parts.append(f"{open_letters:,} dead letter{'s' if open_letters > 1 else ''}")
        return " · ".join([*filter(None, parts), f"at {position}"])


def _behind(found: tuple[float, float] | None) -> str:
    """How far the stream is behind, as people read it; empty if it is not known."""
    if found is None:
        return ""
    lag, seconds = found
    if seconds < 1:
        return "caught up"
    return f"{size(lag)} and {duration(seconds)} behind"
