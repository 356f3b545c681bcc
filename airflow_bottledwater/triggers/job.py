"""The triggers of the operators that run jobs: one watches a job, the other waits before it is submitted again."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import AsyncIterator
from typing import Any, ClassVar

from airflow.triggers.base import TriggerEvent

from airflow_bottledwater.errors import BottledWaterError
from airflow_bottledwater.jobs import identity as identities
from airflow_bottledwater.jobs import leftovers, stop
from airflow_bottledwater.jobs.identity import Identity
from airflow_bottledwater.jobs.restarts import LONGEST_BACKOFF
from airflow_bottledwater.jobs.watch import Ended, JobWatch
from airflow_bottledwater.pipeline.settings import Settings
from airflow_bottledwater.triggers.stored import StoredTrigger
from airflow_bottledwater.triggers.watching import SETTLED, WatchTrigger

log = logging.getLogger(__name__)

#: seconds for the job to end in order in on_kill, which has 30 s ([triggerer] on_kill_timeout)
_STOP_SECONDS = 12.0


class PauseTrigger(StoredTrigger):
    """Fires when a pause is over, so that no worker slot is occupied meanwhile.

    :param until: the end of the pause, in seconds since 1970.
    """

    def __init__(self, *, until: float) -> None:
        super().__init__()
        self.until = until

    async def run(self) -> AsyncIterator[TriggerEvent]:
        """Wait; yields one event."""
        # the end is told by another host's clock, which may be hours ahead
        await asyncio.sleep(min(max(SETTLED, self.until - time.time()), LONGEST_BACKOFF))
        yield TriggerEvent({"status": "over"})


class JobTrigger(WatchTrigger):
    """Waits for the end of a job, or for its deadline; stops the job, and frees the slot, which is kept, when a user
    ends the task. The job may be on any host: it is watched through Kafka.

    :param identity: the job's identity.
    :param hook: see :class:`~airflow_bottledwater.triggers.watching.WatchTrigger`, also for the others.
    :param start_timeout: seconds in which the job has to report for the first time.
    """

    WHAT: ClassVar[str] = "the job"

    def __init__(
        self,
        *,
        identity: Identity,
        hook: dict[str, Any],
        poll_interval: float = 5.0,
        start_timeout: float = 600.0,
        deadline: float | None = None,
    ) -> None:
        super().__init__(hook=hook, poll_interval=poll_interval, deadline=deadline)
        self.identity, self.start_timeout = identity, start_timeout
        # only the last part of an existing log: it may be months long, and another triggerer may have passed it on
        # already; a watch that begins anew has passed it on
        self._past = 64 << 10

    async def _begin(self) -> JobWatch:
        pipeline = await self.pipeline()
        past, self._past = self._past, 0
        return JobWatch(
            pipeline,
            self.identity,
            start_timeout=self.start_timeout,
            write=lambda level, line: log.log(level, "%s", line),
            past=past,
        )

    def _result(self, found: Ended | None) -> dict[str, Any]:
        return {"identity": self.identity, **(found.as_event() if found is not None else {})}

    def _stop(self, pipeline: Settings | None, replace: bool) -> None:
        """Stop the job, or end only its processes if its pipeline is not known, and remove its folder."""
        try:
            if pipeline is not None:
                stop.stop(pipeline, self.identity, timeout=_STOP_SECONDS, final=not replace)
            else:
                leftovers.end(self.identity)
        except BottledWaterError as error:
            log.warning("The job could not be stopped in order: %s", error)
            leftovers.end(self.identity)
        identities.forget(self.identity)
