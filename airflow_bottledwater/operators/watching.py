"""How tasks that are not deferred look at what they wait for, again and again, whatever happens to Kafka and to its
credentials; triggers do it by :mod:`airflow_bottledwater.triggers.watching`."""

from __future__ import annotations

import contextlib
import logging
import time
from collections.abc import Callable
from datetime import timedelta
from typing import Any, NoReturn

from airflow.sdk import BaseOperator

from airflow_bottledwater.errors import BottledWaterError, Outage
from airflow_bottledwater.triggers.stored import stored_again
from airflow_bottledwater.triggers.watching import ANEW, UNSEEN, Watch, WatchTrigger

log = logging.getLogger(__name__)


def wait_in_triggerer(operator: BaseOperator, trigger: WatchTrigger) -> NoReturn:
    """Defer a task until its trigger fires."""
    timeout = None
    if trigger.deadline is not None:
        # longer than the deadline, which the trigger itself keeps: when this timeout expires, nothing is stopped
        timeout = timedelta(seconds=max(0.0, trigger.deadline - time.time()) + 10 * trigger.poll_interval + 120)
    operator.defer(trigger=trigger, method_name="execute_complete", timeout=timeout)
    raise AssertionError("defer does not return")


def here(
    operator: BaseOperator, next_kwargs: dict[str, Any] | None, look: Callable[[Any], dict[str, Any] | None]
) -> dict[str, Any] | None:
    """What a task is resumed with; if the trigger could not look, since its triggerer lacks something, what the task
    itself sees. As long as it sees no end, it is deferred again: what it has begun goes on, and is looked at every
    :data:`~airflow_bottledwater.triggers.watching.LACKING` seconds.

    :param next_kwargs: as ``resume_execution`` has them.
    :param look: looks once here, for this trigger; returns the event that it would have sent, or None if it goes on.
    """
    event = (next_kwargs or {}).get("event") or {}
    if event.get("status") != UNSEEN:
        return next_kwargs
    trigger = stored_again(*event["trigger"])
    log.error("%s", event["message"])
    try:
        found = look(trigger)
    except BottledWaterError as error:
        # whatever who watches lacks, it is no reason to end what is watched
        log.warning("Nor can it be seen by the task itself: %s", error)
        found = None
    if found is None:
        wait_in_triggerer(operator, trigger)
    return {"event": found}


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
