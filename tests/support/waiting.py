"""Waiting for what another thread, process or server does."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import TypeVar

T = TypeVar("T")

#: seconds for what a slow machine does that has other work to do: no test that waits for less would tell anything else
LONG = 120.0
#: seconds of a pause that is three times as long as the answer took, at most: then asking takes a quarter of the time
_LONGEST_PAUSE = 1.0


def until(
    condition: Callable[[], T | None],
    what: str,
    seconds: float = LONG,
    *,
    pause: float = 0.05,
    failed: Sequence[object] = (),
) -> T:
    """Ask until the answer is true, and return it.

    The bound is there to end a test that went wrong: it is to be as long as the slowest machine needs. A test that
    proves a time-out measures the time itself. To ask several servers costs as much as what is waited for, so that the
    pause grows with what an answer takes.

    :param what: is awaited, for the message.
    :param failed: where another thread leaves its errors: the first one ends the waiting.
    """
    deadline = (asked := time.monotonic()) + seconds
    while not (found := condition()):
        assert not failed, f"it failed before this came: {what}: {failed!r}"
        answered = time.monotonic()
        assert answered < deadline, f"not within {seconds:.0f} s: {what}"
        time.sleep(max(pause, min(3 * (answered - asked), _LONGEST_PAUSE)))
        asked = time.monotonic()
    return found
