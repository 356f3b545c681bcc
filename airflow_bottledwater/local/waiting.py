"""Waiting for what a server does in its own time."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import TypeVar

from airflow_bottledwater.errors import LocalServerError

T = TypeVar("T")


def until(found: Callable[[], T | None], *, timeout: float, otherwise: Callable[[], str], pause: float = 0.3) -> T:
    """What the function finds, asked again and again until it is not None (or False).

    :param otherwise: says what was not there in time.
    :raises LocalServerError: with these words.
    """
    deadline = time.monotonic() + timeout
    while (result := found()) is None or result is False:
        if time.monotonic() > deadline:
            raise LocalServerError(f"{otherwise()} (waited {timeout:.0f} s)")
        time.sleep(pause)
    return result
