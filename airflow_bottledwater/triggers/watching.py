"""How triggers look at what they wait for, again and again, whatever happens to Kafka and to its credentials."""

from __future__ import annotations

import asyncio
import inspect
import logging
import time
from abc import abstractmethod
from collections.abc import AsyncIterator, Awaitable, Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any, ClassVar, Protocol

from airflow.triggers.base import TriggerEvent

from airflow_bottledwater.errors import BottledWaterError, ConnectionNotFound, CredentialsRefused, Outage
from airflow_bottledwater.hooks import tasks
from airflow_bottledwater.hooks.connections import IN_TRIGGERER
from airflow_bottledwater.pipeline.settings import Settings
from airflow_bottledwater.triggers.pipeline import PipelineTrigger
from airflow_bottledwater.triggers.stored import StoredTrigger

log = logging.getLogger(__name__)

#: seconds between two looks at a job, at most: a silence of it counts only while Kafka has answered for all of it, see
#: :class:`airflow_bottledwater.state.control_topic.ControlTopic`
LONGEST_PAUSE = 10.0
#: seconds after a task's deferral before which no event is sent: Airflow's scheduler could otherwise take the end of
#: the deferring process for the end of the task
SETTLED = 5.0

#: errors that say nothing about what is watched: a server is away, or refuses a password which is being changed
PASSING = (Outage, CredentialsRefused)

#: seconds of an outage after which a watch begins anew, with the connections as they are then: servers may have moved
ANEW = 60.0

#: the status of the event of a trigger that cannot look
UNSEEN = "unseen"
#: seconds for which a triggerer may lack what the task's worker has had, such as a connection
LACKING = 600.0

#: threads for ending what tasks have begun, which must not wait for those that watch
STOPPING = ThreadPoolExecutor(8, "stop job")


class Watch(Protocol):
    """Looks at something; it has to be closed. Its calls block, or are coroutines: threads that wait for the event loop
    would be missing where that needs one, such as to look a host's name up."""

    def fetch(self) -> Any:
        """What has happened, or None as long as nothing has."""

    def close(self) -> Any:
        """End the watch."""


class Lack:
    """What a triggerer lacks that the worker of the trigger's task has had: a connection, say, or a file that one
    names. Servers that are away are another matter: they are waited for.

    :ivar error: says what is lacking; None if nothing is known to be.
    """

    def __init__(self) -> None:
        self.error: BottledWaterError | None = None
        #: since when (monotonic), without the time of outages in which nothing is known; and when that was noted last
        self._since = self._noted = 0.0

    @property
    def seconds(self) -> float:
        """For how long it has lacked."""
        return time.monotonic() - self._since

    def note(self, error: BottledWaterError | None) -> None:
        """Note why nothing can be seen; None if it is known that nothing lacks."""
        now = time.monotonic()
        if isinstance(error, PASSING) and not isinstance(error, ConnectionNotFound):
            self._since += now - self._noted
        else:
            if self.error is None:
                self._since = now
            self.error = error
        self._noted = now

    def event(self, trigger: StoredTrigger, what: str, seconds: float = LACKING) -> dict[str, Any] | None:
        """The event with which the task looks itself, since the trigger cannot; None while nothing lacks for so long.

        :param what: is watched.
        """
        error = self.error
        if error is None or self.seconds < seconds:
            return None
        return {
            "status": UNSEEN,
            "message": f"{what} cannot be seen by the triggerer, so that nobody watches it; what runs goes on. "
            f"{error.what} {IN_TRIGGERER}",
            "seconds": self.seconds,
            "lacking": list(error.conn_ids) if isinstance(error, ConnectionNotFound) else [],
            "trigger": list(trigger.serialize()),
        }


class AsyncWatch:
    """A watch that is begun when it is needed, and begun anew after an error that is not an outage, or an outage that
    lasts: with the connections as they are then, since a password or an address may have been changed. What blocks is
    called in threads, not in the triggerer's event loop.

    :param begin: begins to watch.
    :param what: is watched, for the log.
    :param ti: the trigger's task instance, if the trigger is going to ask Airflow for its state.
    :ivar away: since when nothing could be seen (monotonic); 0 if it can.
    :ivar lack: what keeps it from looking, other than an outage.
    :ivar error: why the last look has failed; None if it has not.
    :ivar seen: when the last look has succeeded, or the first one was to come (monotonic).
    """

    def __init__(self, begin: Callable[[], Awaitable[Watch]], what: str, ti: Any = None) -> None:
        self._begin, self._what, self._ti = begin, what, ti
        self._watch: Watch | None = None
        self.away, self.lack = 0.0, Lack()
        self.error: BottledWaterError | None = None
        self.seen = time.monotonic()

    async def __aenter__(self) -> AsyncWatch:
        self._asking = asyncio.create_task(tasks.ask_early(self._ti))
        return self

    async def __aexit__(self, *_: object) -> None:
        self._asking.cancel()
        await self._close()

    async def fetch(self) -> Any:
        """Look once; None if nothing has happened yet, or it cannot be seen, of which the log says why.

        :raises BottledWaterError: it cannot be seen, for another reason than one of :data:`PASSING`.
        """
        if self.away and time.monotonic() - self.away >= ANEW:
            await self._close()
        watch = self._watch = self._watch or await self._begun()
        if watch is None:
            return None
        try:
            found = await _called(watch.fetch)
        except BottledWaterError as error:
            self.away, self.error = self.away or time.monotonic(), error
            # servers that are away are asked with all that is needed
            self.lack.note(None if isinstance(error, PASSING) else error)
            if not isinstance(error, Outage):
                await self._close()
            if not isinstance(error, PASSING):
                raise
            log.warning("%s cannot be seen: %s", self._what, error)
            return None
        self.away, self.error, self.seen = 0.0, None, time.monotonic()
        self.lack.note(None)
        return found

    async def _begun(self) -> Watch | None:
        """The watch; None if it cannot be begun now."""
        try:
            watch = await self._begin()
        except BottledWaterError as error:
            self.error = error
            self.lack.note(error)
            if isinstance(error, PASSING):
                log.warning("%s cannot be seen: %s", self._what, error)
                return None
            raise
        if isinstance(self.lack.error, ConnectionNotFound):
            # files that the connections name are read only by a look
            self.lack.note(None)
        return watch

    async def _close(self) -> None:
        self.away = 0.0
        if self._watch is not None:
            watch, self._watch = self._watch, None
            await _called(watch.close)


async def _called(method: Callable[[], Any]) -> Any:
    """What a method of a watch returns: in the event loop if it is a coroutine's, else in a thread."""
    return await (method() if inspect.iscoroutinefunction(method) else asyncio.to_thread(method))


class WatchTrigger(PipelineTrigger):
    """Waits for the end of what a task has begun, or for its deadline; ends it when a user ends the task. If it cannot
    look, since its triggerer lacks something, the task looks (:func:`airflow_bottledwater.operators.watching.here`).

    :param hook: see :class:`~airflow_bottledwater.triggers.pipeline.PipelineTrigger`.
    :param poll_interval: seconds between two checks, at most ten.
    :param deadline: in seconds since 1970; None: never.
    :cvar WHAT: is watched, for the log.
    """

    WHAT: ClassVar[str]

    def __init__(self, *, hook: dict[str, Any], poll_interval: float, deadline: float | None) -> None:
        super().__init__(hook=hook)
        self.poll_interval, self.deadline = poll_interval, deadline

    @abstractmethod
    async def _begin(self) -> Watch:
        """Begin to watch.

        :raises Outage: a connection could not be looked up.
        """

    @abstractmethod
    def _result(self, found: Any) -> dict[str, Any]:
        """What the event says.

        :param found: by the watch; None at the deadline.
        """

    @abstractmethod
    def _stop(self, pipeline: Settings | None, replace: bool) -> None:
        """End what the task has begun. This blocks, in a thread.

        :param pipeline: None if its connections are not known.
        :param replace: whether the task is going to begin it anew.
        """

    async def run(self) -> AsyncIterator[TriggerEvent]:
        """Wait; yields one event: ended, timeout, or :data:`UNSEEN`."""
        await asyncio.sleep(max(SETTLED, self.poll_interval))
        async with AsyncWatch(self._begin, self.WHAT.capitalize(), self.task_instance) as watching:
            while True:
                found = None
                try:
                    found = await watching.fetch()
                except BottledWaterError as error:
                    # it may be mended; what is watched goes on meanwhile
                    log.warning("%s cannot be seen: %s", self.WHAT.capitalize(), error)
                if found is not None:
                    yield TriggerEvent({"status": "ended", **self._result(found)})
                    return
                if self.deadline is not None and time.time() > self.deadline:
                    yield TriggerEvent({"status": "timeout", **self._result(None)})
                    return
                if unseen := watching.lack.event(self, self.WHAT.capitalize()):
                    yield TriggerEvent(unseen)
                    return
                await asyncio.sleep(min(self.poll_interval, LONGEST_PAUSE))

    async def on_kill(self) -> None:
        """End what the task has begun when a user has marked or cleared the task or its DAG run; only then."""
        looking = asyncio.create_task(self.pipeline_at_end())

        async def end(fate: tasks.Fate) -> None:
            pipeline, replace = await looking, fate is tasks.Fate.CLEARED
            # one call in a thread, which goes on should Airflow cancel this coroutine, too
            await asyncio.get_running_loop().run_in_executor(STOPPING, self._stop, pipeline, replace)

        await tasks.settle(self.task_instance, self.WHAT, end)
