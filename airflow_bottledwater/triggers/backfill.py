"""The trigger that watches a live snapshot through Kafka, and cancels it when a user ends the task."""

from __future__ import annotations

import logging
from typing import Any, ClassVar

from airflow_bottledwater.errors import BottledWaterError
from airflow_bottledwater.hooks import backfill
from airflow_bottledwater.hooks.backfill import BackfillWatch
from airflow_bottledwater.pipeline.settings import Settings
from airflow_bottledwater.triggers.watching import WatchTrigger

log = logging.getLogger(__name__)


class BackfillTrigger(WatchTrigger):
    """Fires when a live snapshot has ended, or at its deadline; cancels it when a user ends the task: what it has
    published stays.

    :param name: the pipeline's name in the shared topic.
    :param request_id: the live snapshot's id.
    :param hook: see :class:`~airflow_bottledwater.triggers.watching.WatchTrigger`, also for the others.
    """

    WHAT: ClassVar[str] = "the live snapshot"

    def __init__(
        self,
        *,
        name: str,
        request_id: str,
        hook: dict[str, Any],
        poll_interval: float = 5.0,
        deadline: float | None = None,
    ) -> None:
        super().__init__(hook=hook, poll_interval=poll_interval, deadline=deadline)
        self.name, self.request_id = name, request_id

    async def _begin(self) -> BackfillWatch:
        return BackfillWatch(await self.pipeline(), self.name, self.request_id, lambda line: log.info("%s", line))

    def _result(self, found: dict[str, Any] | None) -> dict[str, Any]:
        return {} if found is None else {"report": found}

    def _stop(self, pipeline: Settings | None, replace: bool) -> None:
        if pipeline is None:
            return
        try:
            backfill.cancel(pipeline, self.name, self.request_id)
        except BottledWaterError as error:
            log.warning("The live snapshot could not be cancelled: %s", error)
