"""How tasks that are not deferred look at what they wait for, again and again, whatever happens to Kafka and to its
credentials; triggers do it by :mod:`airflow_bottledwater.triggers.watching`."""

from __future__ import annotations

import contextlib
import logging
import time
from collections.abc import Callable
from typing import Any

from airflow_bottledwater.errors import BottledWaterError, Outage
from airflow_bottledwater.triggers.watching import ANEW, Watch

log = logging.getLogger(__name__)


class BlockingWatch(contextlib.AbstractContextManager["BlockingWatch"]):
    """A watch that is begun when it is needed, and begun anew after an error that is not an outage, or an outage that
    lasts: with the connections as they are then, since a password or an address may have been changed.

    :param begin: begins to watch.
    :param what: is watched, for the log.
    """

    def __init__(self, begin: Callable[[], Watch], what: str) -> None:
        self._begin, self._what = begin, what
        self._watch: Watch | None = None
        #: since when nothing could be seen (monotonic); 0 if it can
        self._away = 0.0

    def __exit__(self, *_: object) -> None:
        self._close()

    def fetch(self) -> Any:
        """Look once; None if nothing has happened yet, or it cannot be seen, of which the log says why."""
        if self._away and time.monotonic() - self._away >= ANEW:
            self._close()
        try:
            self._watch = self._watch or self._begin()
            found = self._watch.fetch()
        except BottledWaterError as error:
            log.warning("%s cannot be seen: %s", self._what, error)
            self._away = self._away or time.monotonic()
            if not isinstance(error, Outage):
                self._close()
            return None
        self._away = 0.0
        return found

    def _close(self) -> None:
        self._away = 0.0
        if self._watch is not None:
            watch, self._watch = self._watch, None
            watch.close()
