"""The trigger that watches a live snapshot through Kafka, and cancels it when a user ends the task."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import AsyncIterator
from typing import Any

from airflow.triggers.base import BaseTrigger, TriggerEvent

from airflow_bottledwater.errors import BottledWaterError
from airflow_bottledwater.hooks import backfill
from airflow_bottledwater.hooks.backfill import BackfillWatch
from airflow_bottledwater.hooks.pipeline import PipelineHook
from airflow_bottledwater.settings import Pipeline
from airflow_bottledwater.triggers import tasks
from airflow_bottledwater.triggers.watching import SETTLED, Watching

log = logging.getLogger(__name__)


class BackfillTrigger(BaseTrigger):
    """Fires when a live snapshot has ended, or at its deadline; cancels it when a user ends the task.

    :param name: the pipeline's name in the shared topic.
    :param request_id: the live snapshot's id.
    :param postgres_conn_id: the pipeline's connection of type Postgres.
    :param kafka_conn_id: the pipeline's connection of type Apache Kafka.
    :param schema_registry_conn_id: the pipeline's connection of type Schema Registry.
    :param settings: the pipeline's other settings; no secrets.
    :param poll_interval: seconds between two checks.
    :param deadline: in seconds since 1970; None: never.
    """

    def __init__(
        self,
        *,
        name: str,
        request_id: str,
        postgres_conn_id: str,
        kafka_conn_id: str,
        schema_registry_conn_id: str | None,
        settings: dict[str, Any],
        poll_interval: float = 5.0,
        deadline: float | None = None,
    ) -> None:
        super().__init__()
        self.name, self.request_id = name, request_id
        self.postgres_conn_id = postgres_conn_id
        self.kafka_conn_id = kafka_conn_id
        self.schema_registry_conn_id = schema_registry_conn_id
        self.settings = settings
        self.poll_interval, self.deadline = poll_interval, deadline
        self._pipeline: Pipeline | None = None

    def serialize(self) -> tuple[str, dict[str, Any]]:
        """The trigger's class path and arguments."""
        names = (
            "name",
            "request_id",
            "postgres_conn_id",
            "kafka_conn_id",
            "schema_registry_conn_id",
            "settings",
            "poll_interval",
            "deadline",
        )
        return f"{type(self).__module__}.{type(self).__qualname__}", {each: getattr(self, each) for each in names}

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
        self._pipeline = await self._hook.apipeline()
        return BackfillWatch(self._pipeline, self.name, self.request_id, lambda line: log.info("%s", line))

    @property
    def _hook(self) -> PipelineHook:
        return PipelineHook(self.postgres_conn_id, self.kafka_conn_id, self.schema_registry_conn_id, self.settings)

    async def on_kill(self) -> None:
        """Cancel the live snapshot when a user has marked or cleared the task or its DAG run; what it has published stays."""
        if await tasks.goes_on(self.task_instance):
            return
        try:
            pipeline = self._pipeline or await self._hook.apipeline()
            await asyncio.to_thread(backfill.cancel, pipeline, self.name, self.request_id)
        except BottledWaterError as error:
            log.warning("The live snapshot could not be cancelled: %s", error)
