"""The triggers of the stream operator: one watches the stream's job, the other waits before the job is submitted again."""

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

#: seconds after a task's deferral before which no event is sent: Airflow's scheduler could otherwise take the end of the deferring
#: process for the end of the task
_SETTLED = 3.0
#: seconds for stopping the job in on_kill, which has 30 s ([triggerer] on_kill_timeout)
_STOP_SECONDS = 20.0
#: seconds in on_kill for Airflow's answer about the task's state
_ASK_SECONDS = 3.0


def stop_job(pipeline: Pipeline, identity: Identity, *, timeout: float = 40.0) -> None:
    """Stop a job in order, kill it after ``timeout`` seconds, and end its replication connection on the server. The slot is kept.

    :raises SlotInUse: the slot did not become free.
    :raises Outage: the source does not answer.
    """
    from airflow_bottledwater.postgres import slot
    from airflow_bottledwater.postgres.connect import session

    spark_job.stop(identity, timeout=timeout)
    with session(pipeline.postgres, "Freeing the slot", application="bottledwater stop") as connection:
        slot.release(connection, pipeline.slot, timeout=5)


class PauseTrigger(BaseTrigger):
    """Fires when a pause is over, so that no worker slot is occupied meanwhile.

    :param until: the end of the pause, in seconds since 1970.
    """

    def __init__(self, *, until: float) -> None:
        super().__init__()
        self.until = until

    def serialize(self) -> tuple[str, dict[str, Any]]:
        """The trigger's class path and arguments."""
        return f"{type(self).__module__}.{type(self).__qualname__}", {"until": self.until}

    async def run(self) -> AsyncIterator[TriggerEvent]:
        """Wait; yields one event."""
        await asyncio.sleep(max(_SETTLED, self.until - time.time()))
        yield TriggerEvent({"status": "over"})


class StreamTrigger(BaseTrigger):
    """Waits for the end of a stream job, or for its deadline; stops the job when a user ends the task.

    :param identity: the job's identity.
    :param postgres_conn_id: connection of type Postgres, with which the slot is freed.
    :param kafka_conn_id: the pipeline's connection of type Apache Kafka.
    :param schema_registry_conn_id: the pipeline's connection of type Schema Registry.
    :param settings: the pipeline's other settings; no secrets.
    :param poll_interval: seconds between two checks.
    :param deadline: when the job is to be stopped, in seconds since 1970; None: never.
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
        """The trigger's class path and arguments."""
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
        """Wait; yields one event: ended, or timeout."""
        await asyncio.sleep(max(_SETTLED, self.poll_interval))
        # only the last part of an existing log: it may be months long, and another triggerer may have passed it on already
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
        """Stop the job and free the slot, which is kept, when a user has marked or cleared the task or its DAG run."""
        if await self._still_waits():
            log.info("The trigger was given to another triggerer; the job goes on.")
            return
        log.info("The task was ended by a user: the job is stopped, its slot is kept.")
        # first on the host, which needs no connection
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
        """Whether the task is still deferred. Airflow cancels a trigger in the same way when it has given it to another triggerer
        (because this one did not report for a while). If Airflow does not answer, the task is assumed to be ended by a user."""
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
