"""Whether a job moves: it is ready only if it has published something, or there was nothing to publish, within a
time."""

from __future__ import annotations

import time
from collections.abc import Callable

from airflow_bottledwater.backoff import Backoff
from airflow_bottledwater.model.amounts import clock, roughly
from airflow_bottledwater.model.problem import Problem
from airflow_bottledwater.state.problems import Problems

#: the name under which a job tells what keeps it from moving
_PART = "movement"
#: seconds that a wait may last until it is told: a broker that changes its leader takes less
_MOMENT = 5.0


class Movement:
    """Tells as a problem what keeps a job from moving: a server that it waits for, a Kafka that is slow, or what it
    does not know itself.

    The job's thread notes that it moves; the thread of the heartbeats looks.

    :param problems: receives it.
    :param subject: what is to move, for example ``Slot shop``.
    :param stalled: seconds without movement until that alone is a problem.
    :param backoff: knows which server the job waits for.
    :param slow: says why it is slow; empty if it is not.
    :param behind: bytes of WAL that wait to be published; 0 if that is not known.
    """

    def __init__(
        self,
        problems: Problems,
        subject: str,
        *,
        stalled: float,
        backoff: Backoff | None = None,
        slow: Callable[[], str] = str,
        behind: Callable[[], float] = float,
    ) -> None:
        self._problems, self._subject, self._stalled = problems, subject, stalled
        self._backoff, self._slow, self._behind = backoff, slow, behind
        self._moved = time.monotonic()

    def moved(self) -> None:
        """Note that something was published, or that there is nothing to publish."""
        self._moved = time.monotonic()

    def end(self) -> None:
        """Note that nothing is to move any more."""
        self._problems.tell(_PART, ())

    def look(self) -> bool:
        """Tell what keeps the job from moving; returns whether it waits for a server."""
        wait = self._backoff.waits if self._backoff is not None else None
        still = time.monotonic() - self._moved
        waiting = wait is not None and time.time() - wait.since >= _MOMENT
        found = []
        if wait is not None and waiting:
            end = (
                f"The job ends at {clock(wait.until)} if that goes on (outage_timeout), and goes on from there when "
                "it is started again."
                if wait.until is not None
                else "The job waits until that is over."
            )
            behind = f" About {roughly(size)} of WAL wait to be published." if (size := self._behind()) else ""
            reason = f"Waits since {clock(wait.since)}: {wait.what.rstrip('.')}.{behind}"
            found = [Problem("waiting", self._subject, reason, end, wait.since)]
        elif slow := self._slow():
            found = [Problem("throttled", self._subject, slow, "Give it a higher quota, or raise transaction_timeout.")]
        elif still > self._stalled:
            since = time.time() - still
            found = [
                Problem(
                    "stalled",
                    self._subject,
                    f"Nothing was published since {clock(since)}, although something is to be.",
                    "See the job's log for what it does.",
                    since,
                )
            ]
        self._problems.tell(_PART, found)
        return waiting
