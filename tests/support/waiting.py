"""Waiting for what another thread, process or server does."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import TypeVar

T = TypeVar("T")


def until(
    condition: Callable[[], T | None],
    what: str,
    seconds: float = 60.0,
    *,
    pause: float = 0.05,
    failed: Sequence[object] = (),
) -> T:
    """Ask until the answer is true, and return it.

    The bound is there to end a test that went wrong: it is to be as long as the slowest machine needs. A test that
    proves a time-out measures the time itself.

    :param what: is awaited, for the message.
    :param failed: where another thread leaves its errors: the first one ends the waiting.
    """
    deadline = time.monotonic() + seconds
    while not (found := condition()):
        assert not failed, f"it failed before this came: {what}: {failed!r}"
        assert time.monotonic() < deadline, f"not within {seconds:.0f} s: {what}"
        time.sleep(pause)
    return found
