"""Waiting for servers that are not available: with backoff, interrupted by a stop, and up to a limit."""

from __future__ import annotations

import contextlib
import logging
import math
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextvars import ContextVar
from dataclasses import dataclass

from airflow_bottledwater import errors
from airflow_bottledwater.model.amounts import clock, duration

log = logging.getLogger(__name__)

#: seconds that rotated credentials may take to reach the file that they are read from
ROTATION = 20.0
#: seconds after which an outage that goes on is logged, or reported, again
_SAY_AGAIN, _REPORT_AGAIN = 60.0, 10.0
#: waits out an outage: called with what is waited for (or its error), it sleeps or raises
Waiting = Callable[[str | BaseException], None]


@dataclass(frozen=True, slots=True)
class Wait:
    """An outage that is waited out.

    :param what: what is waited for.
    :param since: seconds since 1970; ``until`` is when the wait is given up, None for never.
    """

    what: str
    since: float
    until: float | None


class Refusals:
    """How long one session after the other has been refused: rotated credentials may reach libpq's password file in a
    moment, and if they do not, the job has to be started again with new ones."""

    def __init__(self) -> None:
        self._since: float | None = None

    def last(self, limit: float = 0.0) -> bool:
        """Note that one is refused now; returns whether they have been for more than 20 seconds.

        :param limit: how long they may be, if longer.
        """
        now = time.monotonic()
        self._since = now if self._since is None else self._since
        return now - self._since > max(ROTATION, limit)

    def over(self) -> None:
        """Note that one is not."""
        self._since = None


class Backoff:
    """Waits out outages: with backoff, until the job is asked to stop or (with a limit) has waited too long.

    An outage begins with the first :meth:`wait` and lasts until :meth:`over`, however long a single attempt takes.

    :param limit: seconds that one outage may last; None waits for ever.
    :param stopped: set when the job is asked to end.
    :param report: called with what is waited for, when an outage begins and then every ten seconds. By default it is
        logged when an outage begins, every minute, and when it is over.
    :ivar waits: the outage that is waited out now; None if there is none. Any thread may read it.
    """

    def __init__(
        self, limit: float | None, stopped: threading.Event | None = None, report: Callable[[str], None] | None = None
    ) -> None:
        self._limit = limit
        self._stopped = stopped or threading.Event()
        self._report = report
        self._since: float | None = None
        self.waits: Wait | None = None
        self._last_logged = -math.inf
        self._pause = 0.1
        self._refusals = Refusals()

    def wait(self, what: str | BaseException) -> None:
        """Pause once during an outage; each pause is longer than the one before, up to 5 seconds.

        :param what: what is waited for, or the error. Refused credentials have a short limit of their own, see
            :class:`Refusals`.
        :raises StopRequested: the job is asked to end.
        :raises Outage: the limit is reached.
        :raises CredentialsRefused: the credentials are still refused after 20 seconds.
        """
        now = time.monotonic()
        if isinstance(what, errors.CredentialsRefused) and self._refusals.last():
            raise what
        self._since = now if self._since is None else self._since
        since = self.waits.since if self.waits else time.time()
        self.waits = Wait(str(what), since, None if self._limit is None else since + self._limit)
        if now - self._last_logged >= (_SAY_AGAIN if self._report is None else _REPORT_AGAIN):
            self._last_logged = now
            (self._report or self._log)(str(what))
        if self._limit is not None and now - self._since > self._limit:
            raise errors.Outage(
                f"{str(what).rstrip('.')}, for {now - self._since:.0f} s (since {clock(since)}).",
                "Everything is resumable: start again when it is back, or raise outage_timeout.",
            )
        if self._stopped.wait(self._pause):
            raise errors.StopRequested("The job was asked to stop while it waited for a server.")
        self._pause = min(self._pause * 1.6, 5.0)

    def check(self) -> None:
        """Between two pieces of work:

        :raises StopRequested: the job is asked to end.
        """
        if self._stopped.is_set():
            raise errors.StopRequested("The job was asked to stop.")

    def _log(self, what: str) -> None:
        assert self.waits is not None
        until = f" until {clock(self.waits.until)} at most (outage_timeout)" if self.waits.until else ""
        log.warning("Waiting since %s%s: %s", clock(self.waits.since), until, what)

    def over(self) -> None:
        """The outage is over: what was waited for has worked. The next wait begins a new outage."""
        if self.waits is not None and self._report is None:
            log.info("The outage is over, after %s.", duration(time.time() - self.waits.since))
        self._since = self.waits = None
        self._refusals.over()
        self._last_logged, self._pause = -math.inf, 0.1


#: the event that is set when the work of this thread is asked to stop
_stopped: ContextVar[threading.Event | None] = ContextVar("stopped", default=None)


@contextlib.contextmanager
def stoppable(stopped: threading.Event | None) -> Iterator[None]:
    """Within this block, every wait of this thread for PostgreSQL, and each :func:`pause`, ends soon after the event is
    set.

    :raises StopRequested: in the block, when the event is set.
    """
    token = _stopped.set(stopped)
    try:
        yield
    finally:
        _stopped.reset(token)


def check_stopped() -> None:
    """Raise if the work of this thread was asked to stop (:func:`stoppable`).

    :raises StopRequested: it was.
    """
    stopped = _stopped.get()
    if stopped is not None and stopped.is_set():
        raise errors.StopRequested("The job was asked to stop.")


def pause(seconds: float) -> None:
    """Sleep, but not beyond a request to stop.

    :raises StopRequested: see :func:`check_stopped`.
    """
    stopped = _stopped.get()
    if stopped is None:
        time.sleep(seconds)
    else:
        stopped.wait(seconds)
        check_stopped()


def threads(number: int, name: str) -> ThreadPoolExecutor:
    """A pool of threads whose waits end when those of this thread do, see :func:`stoppable`."""
    return ThreadPoolExecutor(number, name, _stopped.set, (_stopped.get(),))
