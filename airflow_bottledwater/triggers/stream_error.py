"""Waits for a pipeline's job to end or to report an error; all triggers of one broker share one reader."""

from __future__ import annotations

import asyncio
import json
import threading
import time
from collections.abc import AsyncIterator
from typing import TYPE_CHECKING, Any, ClassVar

from airflow.triggers.base import BaseTrigger, TriggerEvent

from airflow_bottledwater.errors import BottledWaterError
from airflow_bottledwater.hooks.pipeline import PipelineHook
from airflow_bottledwater.model.slot import Cluster
from airflow_bottledwater.settings import Pipeline

if TYPE_CHECKING:
    from airflow_bottledwater.kafka import state

#: seconds in which a job that failed of a transient cause may be submitted again, before its end is an error
_AGAIN = 600.0


class SharedStatus:
    """The statuses of all pipelines of a broker, read once for all triggers of this process."""

    _of: ClassVar[dict[str, SharedStatus]] = {}
    _lock: ClassVar[threading.Lock] = threading.Lock()

    def __init__(self, kafka: dict[str, str]) -> None:
        self._kafka = kafka
        self._reading = threading.Lock()
        self._reader: state.Reader | None = None
        self._read = 0.0

    @classmethod
    def of(cls, kafka: dict[str, str]) -> SharedStatus:
        """The one for these properties."""
        with cls._lock:
            return cls._of.setdefault(json.dumps(kafka, sort_keys=True), cls(kafka))

    def get(self, name: str) -> dict[str, Any] | None:
        """A pipeline's status, at most a second old."""
        # here and not above: they bring the publisher and numba, which a DAG processor does without
        from airflow_bottledwater.flow.control import status_key
        from airflow_bottledwater.kafka import state

        with self._reading:
            if self._reader is None:
                self._reader = state.Reader(self._kafka, state.CONTROL_TOPIC, committed=False)
            if time.monotonic() - self._read > 1.0:
                while self._reader.poll(0.5):
                    pass
                self._read = time.monotonic()
            return self._reader.values.get(status_key(name))


def judge(status: dict[str, Any] | None, *, since: float, max_dead_letters: int | None) -> dict[str, Any] | None:
    """What a status means: an event, or None to look again.

    A failure of a transient cause is no verdict at once: the stream operator submits the job again.

    :param since: epoch seconds; an end that was reported before is an earlier job's.
    """
    if status is None or status["job"]["kind"] != "stream":
        return None
    letters = int(status["counters"].get("dead_letters", 0))
    if max_dead_letters is not None and letters > max_dead_letters:
        return {
            "status": "failed",
            "message": f"{letters} dead letters, more than {max_dead_letters}.",
            "position": status["position"],
        }
    if status["at"] < since:
        return None
    if status["state"] == "failed":
        if not status["permanent"] and time.time() - status["at"] < _AGAIN:
            return None
        return {
            "status": "failed",
            "message": status["error"],
            "position": status["position"],
            "permanent": status["permanent"],
        }
    if status["state"] in ("stopped", "finished"):
        return {"status": "ok", "position": status["position"], "counters": status["counters"]}
    return None


def look(pipeline: Pipeline, cluster: Cluster, *, since: float, max_dead_letters: int | None) -> dict[str, Any] | None:
    """One look, blocking."""
    from airflow_bottledwater.flow.preflight import pipeline_name

    found = SharedStatus.of(pipeline.kafka).get(pipeline_name(cluster, pipeline.slot))
    return judge(found, since=since, max_dead_letters=max_dead_letters)


class StreamErrorTrigger(BaseTrigger):
    """Fires when the stream has ended, in order or with an error, or has written too many dead letters.

    :param cluster: the source's identity, looked up by the sensor.
    :param since: ends before this moment are an earlier job's.
    :param max_dead_letters: more than this many fire; None: any number is fine.
    """

    def __init__(
        self,
        *,
        postgres_conn_id: str,
        kafka_conn_id: str,
        schema_registry_conn_id: str | None,
        settings: dict[str, Any],
        cluster: dict[str, Any],
        since: float,
        max_dead_letters: int | None = None,
        poll_interval: float = 10.0,
    ) -> None:
        super().__init__()
        self.postgres_conn_id, self.kafka_conn_id = postgres_conn_id, kafka_conn_id
        self.schema_registry_conn_id, self.settings = schema_registry_conn_id, settings
        self.cluster, self.since = cluster, since
        self.max_dead_letters, self.poll_interval = max_dead_letters, poll_interval

    def serialize(self) -> tuple[str, dict[str, Any]]:
        """Class path and arguments."""
        names = (
            "postgres_conn_id", "kafka_conn_id", "schema_registry_conn_id", "settings", "cluster", "since", "max_dead_letters",
            "poll_interval",
        )  # fmt: skip
        return f"{type(self).__module__}.{type(self).__qualname__}", {name: getattr(self, name) for name in names}

    async def run(self) -> AsyncIterator[TriggerEvent]:
        """One event."""
        hook = PipelineHook(self.postgres_conn_id, self.kafka_conn_id, self.schema_registry_conn_id, self.settings)
        pipeline = await hook.apipeline()
        cluster = Cluster(**self.cluster)
        while True:
            await asyncio.sleep(self.poll_interval)
            try:
                event = await asyncio.to_thread(
                    look, pipeline, cluster, since=self.since, max_dead_letters=self.max_dead_letters
                )
            except BottledWaterError as error:
                self.log.warning("Kafka does not answer: %s", error)
                continue
            if event is not None:
                yield TriggerEvent(event)
                return
