"""Whether reading rests because a standby falls behind."""

from __future__ import annotations

import time
from collections.abc import Callable

from airflow_bottledwater.model.amounts import duration
from airflow_bottledwater.postgres.pressure import Standbys

#: seconds for which reading rests for a standby that does not catch up: then something else keeps it
PATIENCE = 300.0


class StandbyBrake:
    """Tells whether reading rests for a standby. PostgreSQL does not say what makes one fall behind. What counts here
    is one whose lag was below the limit while tables were read, and is above it now: one that was behind before, such
    as one that is meant to be, never counts. If it does not catch up although nothing is read, reading is not the
    cause, and goes on.

    :param limit: seconds of replay lag; 0 for none.
    :param now: a clock that only grows, in seconds.
    """

    def __init__(self, limit: float, now: Callable[[], float] = time.monotonic) -> None:
        self._limit, self._now = limit, now
        #: those that were below the limit since they are looked at, and those for which reading rests, since when
        self._calm: set[int] = set()
        self._since: dict[int, float] = {}

    def look(self, found: Standbys) -> str:
        """Why reading is to rest, as a sentence; empty if it is not.

        :param found: the standbys as they are now.
        """
        if not self._limit:
            return ""
        self._calm &= found.keys()
        self._since = {pid: since for pid, since in self._since.items() if pid in found}
        now = self._now()
        for pid, (_, lag) in found.items():
            if pid in self._since:
                if lag < self._limit / 2:
                    del self._since[pid]
                elif now - self._since[pid] > PATIENCE:
                    # until it is below the limit again
                    del self._since[pid]
                    self._calm.discard(pid)
            elif lag <= self._limit:
                self._calm.add(pid)
            elif pid in self._calm:
                self._since[pid] = now
        return "; ".join(
            f"standby {found[pid][0]} has fallen more than {duration(self._limit)} behind since tables are read "
            "(guard_replica_lag)"
            for pid in self._since
        )

    @staticmethod
    def largest(found: Standbys) -> float:
        """The largest lag, in seconds."""
        return max((lag for _, lag in found.values()), default=0.0)
