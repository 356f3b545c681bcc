"""The identity of a job that works on a slot."""

from __future__ import annotations

import os
import socket
import time
import uuid
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Owner:
    """The task of Airflow that has submitted a job, so that others can find and stop the job when that task has ended.

    :param map_index: of a mapped task; -1 for any other.
    :param host: the host that it was submitted on.
    :param folder: its run directory there; empty if there is none.
    :param master: Spark's master.
    :param airflow: the id of the Airflow, see :mod:`airflow_bottledwater.hooks.instance`; empty if it has none.
    """

    dag_id: str
    run_id: str
    task_id: str
    map_index: int
    host: str
    folder: str
    master: str
    airflow: str = ""

    def __str__(self) -> str:
        mapped = f"[{self.map_index}]" if self.map_index >= 0 else ""
        where = f" in the Airflow {self.airflow!r}" if self.airflow else ""
        return f"of the task {self.task_id + mapped!r} in the run {self.run_id!r} of the DAG {self.dag_id!r}{where}"


@dataclass(frozen=True, slots=True)
class Job:
    """The identity of a job that works on a slot: written as the claim, and compared with it at every initialisation of
    a producer.

    :param epoch: one more than that of the claim before; together with ``id`` it is unique even if two jobs read the
        same claim.
    :param started: seconds since 1970, by the clock of the job's host.
    :param owner: the task that has submitted it; None if none has, as of a command.
    """

    epoch: int
    id: str
    kind: str
    host: str
    pid: int
    started: float
    owner: Owner | None = None

    @classmethod
    def next(cls, previous: Job | None, kind: str, owner: Owner | None = None) -> Job:
        """A new job of this process, with the epoch after that of ``previous``, the last claim in the state."""
        epoch = (previous.epoch if previous else 0) + 1
        return cls(epoch, uuid.uuid4().hex, kind, socket.gethostname(), os.getpid(), time.time(), owner)

    def __str__(self) -> str:
        by = f", {self.owner}" if self.owner is not None else ""
        return f"{self.kind} job {self.id[:8]} (epoch {self.epoch}, process {self.pid} on {self.host}{by})"
