"""How triggers look at what they wait for, again and again, whatever happens to Kafka and to its credentials."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable
from typing import Any, Protocol

from airflow_bottledwater.errors import BottledWaterError, Outage
from airflow_bottledwater.hooks import tasks

log = logging.getLogger(__name__)

#: seconds between two looks at a job, at most: a silence of it counts only while Kafka has answered for all of it, see
#: :class:`airflow_bottledwater.state.control_topic.ControlTopic`
LONGEST_PAUSE = 10.0
#: seconds after a task's deferral before which no event is sent: Airflow's scheduler could otherwise take the end of
#: the deferring process for the end of the task
SETTLED = 5.0


class Watch(Protocol):
    """Looks at something by calls that block; it has to be closed."""

    def fetch(self) -> Any:
        """What has happened, or None as long as nothing has."""

    def close(self) -> None:
        """End the watch."""


class Watching:
    """A watch that is begun when it is needed, and begun anew after an error that is not an outage: with the
    connections as they are then, since a password may have been changed. All calls are made in threads, not in the
    triggerer's event loop.

    :param begin: begins to watch.
    :param what: is watched, for the log.
    :param ti: the trigger's task instance, if the trigger is going to ask Airflow for its state.
    """

    def __init__(self, begin: Callable[[], Awaitable[Watch]], what: str, ti: Any = None) -> None:
        self._begin, self._what, self._ti = begin, what, ti
        self._watch: Watch | None = None

    async def __aenter__(self) -> Watching:
        self._asking = asyncio.create_task(tasks.ask_early(self._ti))
        return self

    async def __aexit__(self, *_: object) -> None:
        self._asking.cancel()
        await self._close()

    async def fetch(self) -> Any:
        """Look once; None if nothing has happened yet, or it cannot be seen, of which the log says why.

        :raises BottledWaterError: the watch cannot begin, for another reason than an outage.
        """
        if self._watch is None:
            try:
                self._watch = await self._begin()
            except Outage as error:
                log.warning("%s cannot be seen: %s", self._what, error)
                return None
        try:
            return await asyncio.to_thread(self._watch.fetch)
        except BottledWaterError as error:
            log.warning("%s cannot be seen: %s", self._what, error)
            if not isinstance(error, Outage):
                await self._close()
            return None

    async def _close(self) -> None:
        if self._watch is not None:
            watch, self._watch = self._watch, None
            await asyncio.to_thread(watch.close)
