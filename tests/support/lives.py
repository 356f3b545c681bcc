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


def ti_of(task_id: str, *, at: float = TRIGGERED, try_number: int = 1, max_tries: int = 0) -> SimpleNamespace:
    """What a task knows of itself, in a run of a DAG.

    :param at: when it was made, see :func:`made_at`.
    """
    return SimpleNamespace(
        id=made_at(at),
        try_number=try_number,
        max_tries=max_tries,
        dag_id="d",
        run_id="r",
        task_id=task_id,
        map_index=-1,
    )
