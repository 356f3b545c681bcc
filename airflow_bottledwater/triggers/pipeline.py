"""What the triggers of a pipeline have in common: its connections, as they are now."""

from __future__ import annotations

import asyncio
import logging
from typing import Any

from airflow.triggers.base import BaseTrigger

from airflow_bottledwater.hooks.pipeline import PipelineHook
from airflow_bottledwater.pipeline.settings import Pipeline

log = logging.getLogger(__name__)

#: seconds to look up the connections while Airflow ends a trigger, which has 30 s for everything ([triggerer]
#: on_kill_timeout)
_LOOK_UP_SECONDS = 5.0


class PipelineTrigger(BaseTrigger):
    """A trigger that has a pipeline's connections.

    :param postgres_conn_id: connection of type Postgres: the source.
    :param kafka_conn_id: connection of type Apache Kafka.
    :param schema_registry_conn_id: connection of type Schema Registry.
    :param settings: the pipeline's other settings; no secrets.
    """

    def __init__(
        self,
        *,
        postgres_conn_id: str,
        kafka_conn_id: str,
        schema_registry_conn_id: str | None,
        settings: dict[str, Any],
    ) -> None:
        super().__init__()
        self.postgres_conn_id, self.kafka_conn_id = postgres_conn_id, kafka_conn_id
        self.schema_registry_conn_id, self.settings = schema_registry_conn_id, settings
        self._known: Pipeline | None = None

    async def pipeline(self) -> Pipeline:
        """The pipeline, with its connections as they are now.

        :raises BottledWaterError: a connection could not be looked up.
        """
        self._known = await PipelineHook(
            self.postgres_conn_id, self.kafka_conn_id, self.schema_registry_conn_id, self.settings
        ).apipeline()
        return self._known

    async def pipeline_at_end(self) -> Pipeline | None:
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
