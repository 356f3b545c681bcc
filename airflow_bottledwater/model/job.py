"""Who works on a slot."""

from __future__ import annotations

import os
import socket
import time
import uuid
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Job:
    """Who works on a slot: written as the claim, compared at every initialisation.

    :param epoch: one more than the claim before; with ``id`` it is unique even if two jobs read the same claim.
    """

    epoch: int
    id: str
    kind: str
    host: str
    pid: int
    started: float

    @classmethod
    def next(cls, previous: Job | None, kind: str) -> Job:
        """A new job after the one that the state names."""
        epoch = (previous.epoch if previous else 0) + 1
        return cls(epoch, uuid.uuid4().hex, kind, socket.gethostname(), os.getpid(), time.time())

    def __str__(self) -> str:
        return f"{self.kind} job {self.id[:8]} (epoch {self.epoch}, process {self.pid} on {self.host})"
