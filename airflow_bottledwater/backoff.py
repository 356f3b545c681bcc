"""Waiting for servers that are away: with back-off, heard by a stop, and not for ever."""

from __future__ import annotations

import logging
import math
import threading
import time
from collections.abc import Callable

from airflow_bottledwater import errors

log = logging.getLogger(__name__)

#: seconds for new credentials to arrive where the old ones are read
_ROTATION = 20.0
#: what waits out an outage: told what is waited for, it sleeps or raises
Waiting = Callable[[str | BaseException], None]


class Backoff:
    """Waits out outages: with back-off, until it is told to stop or (with a limit) has waited too long.

    An outage begins with the first :meth:`wait` and lasts until :meth:`over`, however long a single attempt takes.

    :param limit: seconds; None waits for ever.
    :param stopped: set when the job is asked to end.
    :param report: told what is waited for, once per outage and then every ten seconds.
    """

    def __init__(
        self, limit: float | None, stopped: threading.Event | None = None, report: Callable[[str], None] | None = None
    ) -> None:
        self._limit = limit
        self._stopped = stopped or threading.Event()
        self._report = report or (lambda what: log.warning("Waiting: %s", what))
        self._since: float | None = None
        self._last_logged = -math.inf
        self._pause = 0.1
        self._refused: float | None = None

    def wait(self, what: str | BaseException) -> None:
        """One pause of an outage.

        :param what: waited for; or the error, of which credentials that are refused have a limit of their own: new ones may be
            in libpq's password file in a moment, else whoever starts the job again has them.
        :raises StopRequested: the job is to end.
        :raises Outage: the limit is reached.
        :raises CredentialsRefused: they still are.
        """
        now = time.monotonic()
        if isinstance(what, errors.CredentialsRefused):
            self._refused = now if self._refused is None else self._refused
            if now - self._refused > _ROTATION:
                raise what
        self._since = now if self._since is None else self._since
        if now - self._last_logged >= 10.0:
            self._report(str(what))
            self._last_logged = now
        if self._limit is not None and now - self._since > self._limit:
            raise errors.Outage(
                f"{what} (for {now - self._since:.0f} s).",
                "Everything is resumable: start again when it is back, or raise outage_timeout.",
            )
        if self._stopped.wait(self._pause):
            raise errors.StopRequested("The job was asked to stop while it waited for a server.")
        self._pause = min(self._pause * 1.6, 5.0)

    def over(self) -> None:
        """What was waited for has worked."""
        self._since = self._refused = None
        self._last_logged, self._pause = -math.inf, 0.1
