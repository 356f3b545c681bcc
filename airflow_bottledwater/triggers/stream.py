"""Watches a stream job; never runs it."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

from airflow.sdk.execution_time.task_runner import RuntimeTaskInstance
from airflow.triggers.base import BaseTrigger, TriggerEvent
from asgiref.sync import sync_to_async

from airflow_bottledwater.errors import BottledWaterError
from airflow_bottledwater.hooks import spark_job
from airflow_bottledwater.hooks.pipeline import PipelineHook
from airflow_bottledwater.hooks.spark_job import Identity
from airflow_bottledwater.settings import Pipeline
from airflow_bottledwater.spark import supervise

log = logging.getLogger(__name__)

#: seconds after its deferral before which no task is woken: Airflow's scheduler could still take the end of the deferring process for
#: the end of the task
_SETTLED = 3.0
#: on_kill has 30 s ([triggerer] on_kill_timeout)
_STOP_SECONDS = 20.0
#: and of these for Airflow's answer
_ASK_SECONDS = 3.0


def stop_job(pipeline: Pipeline, identity: Identity, *, timeout: float = 40.0) -> None:
    """Stop a job wherever it hangs, and free its slot: in order, then by force, then on the server. The slot is kept."""
    from airflow_bottledwater.postgres import slot
    from airflow_bottledwater.postgres.connect import session

    spark_job.stop(identity, timeout=timeout)
    with session(pipeline.postgres, "Freeing the slot", application="bottledwater stop") as connection:
        slot.release(connection, pipeline.slot, timeout=5)


class PauseTrigger(BaseTrigger):
    """Fires when a pause is over: so long no worker slot waits.

    :param until: wall-clock seconds.
    """

    def __init__(self, *, until: float) -> None:
        super().__init__()
        self.until = until

    def serialize(self) -> tuple[str, dict[str, Any]]:
        """Class path and arguments."""
        return f"{type(self).__module__}.{type(self).__qualname__}", {"until": self.until}

    async def run(self) -> AsyncIterator[TriggerEvent]:
        """One event."""
        await asyncio.sleep(max(_SETTLED, self.until - time.time()))
        yield TriggerEvent({"status": "over"})


class StreamTrigger(BaseTrigger):
    """Waits for the end of a stream job, or for its deadline; stops the job when the task is killed by a user.

    :param identity: who the job is.
    :param postgres_conn_id: for freeing the slot.
    :param kafka_conn_id: of the pipeline.
    :param schema_registry_conn_id: of the pipeline.
    :param settings: of the pipeline; no secrets.
    :param poll_interval: seconds between two looks.
    :param deadline: wall-clock seconds; None: no end.
    """

    def __init__(
        self,
        *,
        identity: Identity,
        postgres_conn_id: str,
        kafka_conn_id: str,
        schema_registry_conn_id: str | None,
        settings: dict[str, Any],
        poll_interval: float = 5.0,
        deadline: float | None = None,
    ) -> None:
        super().__init__()
        self.identity = identity
        self.postgres_conn_id = postgres_conn_id
        self.kafka_conn_id = kafka_conn_id
        self.schema_registry_conn_id = schema_registry_conn_id
        self.settings = settings
        self.poll_interval = poll_interval
        self.deadline = deadline

    def serialize(self) -> tuple[str, dict[str, Any]]:
        """Class path and arguments."""
        names = (
            "identity",
            "postgres_conn_id",
            "kafka_conn_id",
            "schema_registry_conn_id",
            "settings",
            "poll_interval",
            "deadline",
        )
        return f"{type(self).__module__}.{type(self).__qualname__}", {name: getattr(self, name) for name in names}

    async def run(self) -> AsyncIterator[TriggerEvent]:
        """One event: ended, or timeout."""
        await asyncio.sleep(max(_SETTLED, self.poll_interval))
        # another triggerer has passed on what came before, perhaps for months
        follower = spark_job.LogFollower(self.identity, lambda level, line: log.log(level, "%s", line), past=64 << 10)
        while True:
            await asyncio.to_thread(follower.follow)
            if not await asyncio.to_thread(spark_job.running, self.identity):
                await asyncio.to_thread(follower.follow)
                tail = await asyncio.to_thread(supervise.log_tail, Path(self.identity["folder"]), 20)
                yield TriggerEvent({"status": "ended", "identity": self.identity, "log": tail})
                return
            if self.deadline is not None and time.time() > self.deadline:
                yield TriggerEvent({"status": "timeout", "identity": self.identity})
                return
            await asyncio.sleep(self.poll_interval)

    async def on_kill(self) -> None:
        """Marked, cleared, or the run was: stop the job and free the slot, which is kept."""
        if await self._still_waits():
            log.info("The trigger was given to another triggerer; the job goes on.")
            return
        log.info("The task was ended by a user: the job is stopped, its slot is kept.")
        # first what needs no connection
        stopped = await asyncio.to_thread(spark_job.stop, self.identity, timeout=_STOP_SECONDS)
        try:
            hook = PipelineHook(self.postgres_conn_id, self.kafka_conn_id, self.schema_registry_conn_id, self.settings)
            pipeline = await hook.apipeline()
            await asyncio.to_thread(stop_job, pipeline, self.identity, timeout=1.0)
        except BottledWaterError as error:
            log.warning("The slot could not be freed: %s", error)
        if stopped:
            await asyncio.to_thread(spark_job.forget, self.identity)

    async def _still_waits(self) -> bool:
        """Whether the task is still deferred. Airflow cancels a trigger in the same way when it belongs to another triggerer now
        (this one was too slow to report for a while); if it does not say, the user is believed to have ended the task."""
        ti: Any = self.task_instance
        if ti is None:
            return False
        try:
            async with asyncio.timeout(_ASK_SECONDS):
                states = await sync_to_async(RuntimeTaskInstance.get_task_states)(
                    dag_id=ti.dag_id, task_ids=[ti.task_id], run_ids=[ti.run_id], map_index=ti.map_index
                )
        except Exception as error:
            log.warning("Airflow does not say whether the task was ended (%s).", type(error).__name__)
            return False
        return "deferred" in {str(getattr(state, "value", state)) for state in states.get(ti.run_id, {}).values()}
