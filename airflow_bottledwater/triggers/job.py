"""The triggers of the operators that run jobs: one watches a job, the other waits before it is submitted again."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import AsyncIterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from airflow.triggers.base import TriggerEvent

from airflow_bottledwater.errors import BottledWaterError
from airflow_bottledwater.hooks import tasks
from airflow_bottledwater.jobs import identity as identities
from airflow_bottledwater.jobs import leftovers, stop
from airflow_bottledwater.jobs.identity import Identity
from airflow_bottledwater.jobs.watch import JobWatch
from airflow_bottledwater.pipeline.settings import Pipeline
from airflow_bottledwater.triggers.pipeline import PipelineTrigger
from airflow_bottledwater.triggers.stored import StoredTrigger
from airflow_bottledwater.triggers.watching import LONGEST_PAUSE, SETTLED, Watching

log = logging.getLogger(__name__)

#: seconds for the job to end in order in on_kill, which has 30 s ([triggerer] on_kill_timeout)
_STOP_SECONDS = 12.0


#: threads for stopping jobs, which must not wait for those that watch
STOPPING = ThreadPoolExecutor(8, "stop job")


class PauseTrigger(StoredTrigger):
    """Fires when a pause is over, so that no worker slot is occupied meanwhile.

    :param until: the end of the pause, in seconds since 1970.
    """

    def __init__(self, *, until: float) -> None:
        super().__init__()
        self.until = until

    async def run(self) -> AsyncIterator[TriggerEvent]:
        """Wait; yields one event."""
        await asyncio.sleep(max(SETTLED, self.until - time.time()))
        yield TriggerEvent({"status": "over"})


def _end(pipeline: Pipeline | None, identity: Identity, replace: bool) -> None:
    """Stop a job, or end only its processes if its pipeline is not known, and remove its folder.

    :param replace: whether the task is going to submit another one.
    """
    try:
        if pipeline is not None:
            stop.stop(pipeline, identity, timeout=_STOP_SECONDS, final=not replace)
        else:
            leftovers.end(identity)
    except BottledWaterError as error:
        log.warning("The job could not be stopped in order: %s", error)
        leftovers.end(identity)
    identities.forget(identity)


class JobTrigger(PipelineTrigger):
    """Waits for the end of a job, or for its deadline; stops the job when a user ends the task. The job may be on any
    host: it is watched through Kafka.

    :param identity: the job's identity.
    :param hook: see :class:`~airflow_bottledwater.triggers.pipeline.PipelineTrigger`.
    :param poll_interval: seconds between two checks, at most ten.
    :param start_timeout: seconds in which the job has to report for the first time.
    :param deadline: when the job is to be stopped, in seconds since 1970; None: never.
    """

    def __init__(
        self,
        *,
        identity: Identity,
        hook: dict[str, Any],
        poll_interval: float = 5.0,
        start_timeout: float = 600.0,
        deadline: float | None = None,
    ) -> None:
        super().__init__(hook=hook)
        self.identity = identity
        self.poll_interval = poll_interval
        self.start_timeout = start_timeout
        self.deadline = deadline

    async def run(self) -> AsyncIterator[TriggerEvent]:
        """Wait; yields one event: ended, or timeout."""
        await asyncio.sleep(max(SETTLED, self.poll_interval))
        async with Watching(self._begin, "The job", self.task_instance) as watching:
            while True:
                ended = None
                try:
                    ended = await watching.fetch()
                except BottledWaterError as error:
                    # it may be mended; the job goes on meanwhile
                    log.warning("The job cannot be seen: %s", error)
                if ended is not None:
                    yield TriggerEvent({"status": "ended", "identity": self.identity, **ended.as_event()})
                    return
                if self.deadline is not None and time.time() > self.deadline:
                    yield TriggerEvent({"status": "timeout", "identity": self.identity})
                    return
                await asyncio.sleep(min(self.poll_interval, LONGEST_PAUSE))

    async def _begin(self) -> JobWatch:
        """Begin to watch.

        :raises Outage: a connection could not be looked up.
        """
        return JobWatch(
            await self.pipeline(),
            self.identity,
            start_timeout=self.start_timeout,
            write=lambda level, line: log.log(level, "%s", line),
            # only the last part of an existing log: it may be months long, and another triggerer may have passed it on
            # already
            past=64 << 10,
        )

    async def on_kill(self) -> None:
        """Stop the job and free the slot, which is kept, when a user has marked or cleared the task or its DAG run;
        only then."""
        looking = asyncio.create_task(self.pipeline_at_end())

        async def end(fate: tasks.Fate) -> None:
            pipeline, replace = await looking, fate is tasks.Fate.CLEARED
            # one call in a thread, which goes on should Airflow cancel this coroutine, too
            await asyncio.get_running_loop().run_in_executor(STOPPING, _end, pipeline, self.identity, replace)

        await tasks.settle(self.task_instance, "the job", end)
