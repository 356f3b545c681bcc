"""The identity of a job that works on a slot."""

from __future__ import annotations

import os
import socket
import time
import uuid
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Job:
    """The identity of a job that works on a slot: written as the claim, and compared with it at every initialisation of
    a producer.

    :param epoch: one more than that of the claim before; together with ``id`` it is unique even if two jobs read the
        same claim.
    :param started: seconds since 1970, by the clock of the job's host.
    :param by: who has submitted it, as part of a sentence; empty if that is not known, as of a command.
    """

    epoch: int
    id: str
    kind: str
    host: str
    pid: int
    started: float
    by: str = ""

    @classmethod
    def next(cls, previous: Job | None, kind: str, by: str = "") -> Job:
        """A new job of this process, with the epoch after that of ``previous``, the last claim in the state."""
        epoch = (previous.epoch if previous else 0) + 1
        return cls(epoch, uuid.uuid4().hex, kind, socket.gethostname(), os.getpid(), time.time(), by)

    def __str__(self) -> str:
        by = f", {self.by}" if self.by else ""
        return f"{self.kind} job {self.id[:8]} (epoch {self.epoch}, process {self.pid} on {self.host}{by})"
