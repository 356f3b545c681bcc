"""How tasks that are not deferred look at what they wait for, again and again, whatever happens to Kafka and to its
credentials; triggers do it by :mod:`airflow_bottledwater.triggers.watching`."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Callable
from typing import Any

from airflow_bottledwater.errors import BottledWaterError, Outage
from airflow_bottledwater.triggers.watching import Watch

log = logging.getLogger(__name__)


class BlockingWatch(contextlib.AbstractContextManager["BlockingWatch"]):
    """A watch that is begun when it is needed, and begun anew after an error that is not an outage: with the
    connections as they are then, since a password may have been changed.

    :param begin: begins to watch.
    :param what: is watched, for the log.
    """

    def __init__(self, begin: Callable[[], Watch], what: str) -> None:
        self._begin, self._what = begin, what
        self._watch: Watch | None = None

    def __exit__(self, *_: object) -> None:
        self._close()

    def fetch(self) -> Any:
        """Look once; None if nothing has happened yet, or it cannot be seen, of which the log says why."""
        try:
            self._watch = self._watch or self._begin()
            return self._watch.fetch()
        except BottledWaterError as error:
            log.warning("%s cannot be seen: %s", self._what, error)
            if not isinstance(error, Outage):
                self._close()
            return None

    def _close(self) -> None:
        if self._watch is not None:
            watch, self._watch = self._watch, None
            watch.close()
