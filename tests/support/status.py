"""A status as a job writes it, for tests of those who read it."""

from __future__ import annotations

from typing import Any

from airflow_bottledwater.model.job import Job, Owner
from airflow_bottledwater.state.control_records import StatusRecord


def status_of(
    state: str = "streaming",
    *,
    id: str = "j1",
    kind: str = "stream",
    epoch: int = 4,
    owner: Owner | None = None,
    **more: Any,
) -> StatusRecord:
    """Of process 5 on host h.

    :param owner: the task that has submitted the job.
    :param more: other fields of the record.
    """
    return StatusRecord(state, Job(epoch, id, kind, "h", 5, 0.0, owner), **more)
