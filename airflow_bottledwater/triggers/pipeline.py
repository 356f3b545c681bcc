"""What the triggers of a pipeline have in common: its connections, as they are now."""

from __future__ import annotations

import asyncio
import logging
from typing import Any

from airflow_bottledwater.hooks.pipeline import PipelineHook
from airflow_bottledwater.pipeline.settings import Settings
from airflow_bottledwater.triggers.stored import StoredTrigger

log = logging.getLogger(__name__)

#: seconds to look up the connections while Airflow ends a trigger, which has 30 s for everything ([triggerer]
#: on_kill_timeout)
_LOOK_UP_SECONDS = 5.0


class PipelineTrigger(StoredTrigger):
    """A trigger that has a pipeline's connections.

    :param hook: the arguments of the pipeline's hook, as
        :meth:`~airflow_bottledwater.hooks.pipeline.PipelineHook.arguments` has them; no secrets.
    """

    def __init__(self, *, hook: dict[str, Any]) -> None:
        super().__init__()
        self.hook = hook
        self._known: Settings | None = None

    async def pipeline(self) -> Settings:
        """The pipeline, with its connections as they are now.

        :raises BottledWaterError: a connection could not be looked up.
        """
        self._known = await PipelineHook(**self.hook).apipeline()
        return self._known

    async def pipeline_at_end(self) -> Settings | None:
        """Like :meth:`pipeline`, while Airflow ends the trigger and may not answer it any more: then with the
        connections that were looked up last; None if none were. It is looked up while Airflow is asked for the task's
        state, so that there is time left."""
        try:
            async with asyncio.timeout(_LOOK_UP_SECONDS):
                return await self.pipeline()
        except Exception as error:
            # its errors are of many classes
            log.warning("The connections cannot be looked up again (%s): %s", type(error).__name__, error)
            return self._known
