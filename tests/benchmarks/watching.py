"""``watching``: percent of a core that a triggerer takes to watch 300 pipelines on 10 databases: the lag of each slot
and the status of each job, every ten seconds, while each job reports every two. ``sessions`` is how many it has with
PostgreSQL, and ``list_ms`` how long the page takes to list the pipelines."""

from __future__ import annotations

import asyncio
import json
import subprocess
import sys
import time
from typing import Any
from unittest import mock

import psycopg

from airflow_bottledwater.hooks.source import SourceHook
from airflow_bottledwater.kafka.topics import Topics
from airflow_bottledwater.local.stack import DataStack
from airflow_bottledwater.model.job import Job
from airflow_bottledwater.model.slot import Cluster
from airflow_bottledwater.pipeline.settings import Settings
from airflow_bottledwater.plugin import overview
from airflow_bottledwater.plugin.watch import KafkaWatch
from airflow_bottledwater.state import store
from airflow_bottledwater.state.claim import ensure_state_topics
from airflow_bottledwater.state.control_records import StatusRecord, encode, status_key
from airflow_bottledwater.state.control_topic import ControlTopic
from airflow_bottledwater.triggers.pipeline import PipelineTrigger
from airflow_bottledwater.triggers.slot_lag import SlotLagTrigger
from airflow_bottledwater.triggers.stream_error import StreamErrorTrigger
from tests.benchmarks.common import emit

_PIPELINES, _DATABASES = 300, 10
_INTERVAL, _SETTLED, _SECONDS = 10.0, 15.0, 60.0


def _cluster(number: int) -> Cluster:
    return Cluster("7000000000000000000", 1, f"watched{number % _DATABASES}", 160000)


def report(bootstrap: str) -> None:
    """Report for all jobs until this process is ended."""
    topic = ControlTopic.of({"bootstrap.servers": bootstrap})
    while True:
        for number in range(_PIPELINES):
            slot = f"p{number}"
            status = StatusRecord("streaming", Job(1, slot, "stream", "host", 1, time.time()), slot, at=time.time())
            topic.write({status_key(_cluster(number).pipeline(slot)): encode(status)}, wait=0)
        time.sleep(2.0)


def run(stack: DataStack) -> None:
    """See the module."""
    kafka = {"bootstrap.servers": stack.kafka.bootstrap}
    of_one = Settings(postgres="host=unused", kafka=kafka, slot="p0", format="json", replication_factor=1)
    ensure_state_topics(of_one, store.state_topic_name("watched0", "p0"), Topics(kafka), new=True)
    dsns = [stack.postgres.createdb(f"watched{number}") for number in range(_DATABASES)]
    for number, dsn in enumerate(dsns):
        with psycopg.connect(dsn, autocommit=True) as connection:
            connection.execute(f"SELECT pg_create_logical_replication_slot('watched{number}', 'pgoutput')")
    reporting = subprocess.Popen([sys.executable, "-m", "tests.benchmarks.watching", stack.kafka.bootstrap])
    try:
        used, sessions = asyncio.run(_watch(kafka, dsns))
        watch = KafkaWatch.of("kafka_default", kafka)
        deadline = time.monotonic() + 60
        while len((seen := watch.look()).statuses) < _PIPELINES and time.monotonic() < deadline:
            time.sleep(0.5)
        began = time.monotonic()
        listed = json.dumps(overview.rows("kafka_default", seen))
        took = 1e3 * (time.monotonic() - began)
    finally:
        reporting.kill()
        reporting.wait()
    emit(
        "watching", 100 * used / _SECONDS, "%", {"limit": 20.0}, pipelines=_PIPELINES, databases=_DATABASES,
        sessions=sessions, list_ms=took, list_kb=len(listed) / 1e3,
    )  # fmt: skip


async def _watch(kafka: dict[str, str], dsns: list[str]) -> tuple[float, int]:
    """Seconds of processor time that all triggers take, and how many sessions they have."""

    async def adsn(hook: SourceHook) -> str:
        return dsns[int(hook.postgres_conn_id)]

    async def pipeline(trigger: PipelineTrigger) -> Settings:
        slot = trigger.hook["settings"]["slot"]
        return Settings(postgres="host=unused", kafka=kafka, slot=slot, format="json")

    async def one(trigger: Any) -> None:
        async for event in trigger.run():
            raise AssertionError(f"It has fired: {event.payload}")

    triggers: list[Any] = []
    for number in range(_PIPELINES):
        of = str(number % _DATABASES)
        # a position that is never reached
        triggers.append(
            SlotLagTrigger(
                postgres_conn_id=of, slot=f"watched{of}", max_lag=None, position=1 << 62, poll_interval=_INTERVAL
            )
        )
        cluster = {name: getattr(_cluster(number), name) for name in ("system_identifier", "timeline", "database")}
        triggers.append(
            StreamErrorTrigger(
                hook={"settings": {"slot": f"p{number}"}}, cluster={**cluster, "version": 160000},
                poll_interval=_INTERVAL,
            )
        )  # fmt: skip
    with mock.patch.object(SourceHook, "adsn", adsn), mock.patch.object(PipelineTrigger, "pipeline", pipeline):
        watching = [asyncio.create_task(one(trigger)) for trigger in triggers]
        await asyncio.sleep(_SETTLED)
        began, at = time.process_time(), time.monotonic()
        await asyncio.sleep(_SECONDS)
        used = (time.process_time() - began) * _SECONDS / (time.monotonic() - at)
        with psycopg.connect(dsns[0]) as connection:
            query = "SELECT count(*) FROM pg_stat_activity WHERE application_name = 'bottledwater triggerer'"
            ((sessions,),) = connection.execute(query).fetchall()
        assert not [each for each in watching if each.done()]
        for each in watching:
            each.cancel()
        await asyncio.gather(*watching, return_exceptions=True)
    return used, int(sessions)


if __name__ == "__main__":
    report(sys.argv[1])
