"""When a task of Airflow was made, and its run: by these, an operator knows when a person has asked for it."""

from __future__ import annotations

import uuid
from datetime import UTC, datetime
from types import SimpleNamespace

#: seconds since 1970, when a run is triggered
TRIGGERED = 1_800_000_000.0


def made_at(at: float = TRIGGERED) -> uuid.UUID:
    """The id that Airflow gives a task then, a UUID of version 7.

    :param at: seconds since 1970.
    """
    return uuid.UUID(int=(int(at * 1000) << 80) | (0x7 << 76) | (0x2 << 62) | 5)


def run_of(run_type: str = "manual", *, at: float = TRIGGERED, clear_number: int = 0) -> SimpleNamespace:
    """What a task knows of its run.

    :param at: when it was to begin, in seconds since 1970.
    """
    return SimpleNamespace(run_type=run_type, run_after=datetime.fromtimestamp(at, UTC), clear_number=clear_number)
