"""The trigger that watches a live snapshot through Kafka, and cancels it when a user ends the task."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import AsyncIterator
from typing import Any

from airflow.triggers.base import TriggerEvent

from airflow_bottledwater.errors import BottledWaterError
from airflow_bottledwater.hooks import backfill, tasks
from airflow_bottledwater.hooks.backfill import BackfillWatch
from airflow_bottledwater.triggers.pipeline import PipelineTrigger
from airflow_bottledwater.triggers.watching import SETTLED, Watching

log = logging.getLogger(__name__)


class BackfillTrigger(PipelineTrigger):
    """Fires when a live snapshot has ended, or at its deadline; cancels it when a user ends the task.

    :param name: the pipeline's name in the shared topic.
    :param request_id: the live snapshot's id.
    :param hook: see :class:`~airflow_bottledwater.triggers.pipeline.PipelineTrigger`.
    :param poll_interval: seconds between two checks.
    :param deadline: in seconds since 1970; None: never.
    """

    def __init__(
        self,
        *,
        name: str,
        request_id: str,
        hook: dict[str, Any],
        poll_interval: float = 5.0,
        deadline: float | None = None,
    ) -> None:
        super().__init__(hook=hook)
        self.name, self.request_id = name, request_id
        self.poll_interval, self.deadline = poll_interval, deadline

    async def run(self) -> AsyncIterator[TriggerEvent]:
        """Wait; yields one event: ended, or timeout."""
        await asyncio.sleep(max(SETTLED, self.poll_interval))
        async with Watching(self._begin, "The live snapshot", self.task_instance) as watching:
            while True:
                report = None
                try:
                    report = await watching.fetch()
                except BottledWaterError as error:
                    # it may be mended; the live snapshot goes on meanwhile
                    log.warning("The live snapshot cannot be seen: %s", error)
                if report is not None:
                    yield TriggerEvent({"status": "ended", "report": report})
                    return
                if self.deadline is not None and time.time() > self.deadline:
                    yield TriggerEvent({"status": "timeout"})
                    return
                await asyncio.sleep(self.poll_interval)

    async def _begin(self) -> BackfillWatch:
        return BackfillWatch(await self.pipeline(), self.name, self.request_id, lambda line: log.info("%s", line))

    async def on_kill(self) -> None:
        """Cancel the live snapshot when a user has marked or cleared the task or its DAG run; what it has published
        stays."""
        looking = asyncio.create_task(self.pipeline_at_end())

        async def end(_: tasks.Fate) -> None:
            if (pipeline := await looking) is None:
                return
            try:
                await asyncio.to_thread(backfill.cancel, pipeline, self.name, self.request_id)
            except BottledWaterError as error:
                log.warning("The live snapshot could not be cancelled: %s", error)

        await tasks.settle(self.task_instance, "the live snapshot", end)
