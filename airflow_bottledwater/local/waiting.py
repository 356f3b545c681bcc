"""Waits until a server has done something."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import TypeVar

from airflow_bottledwater.errors import LocalServerError

T = TypeVar("T")


def until(found: Callable[[], T | None], *, timeout: float, otherwise: Callable[[], str], pause: float = 0.3) -> T:
    """Call a function repeatedly until its result is not None (or False), and return that.

    :param timeout: seconds.
    :param otherwise: returns the error's text, which says what did not happen in time.
    :raises LocalServerError: it did not happen in time.
    """
    deadline = time.monotonic() + timeout
    while (result := found()) is None or result is False:
        if time.monotonic() > deadline:
            raise LocalServerError(f"{otherwise()} (waited {timeout:.0f} s)")
        time.sleep(pause)
    return result
