"""A stream's status as its watchers read it from Kafka."""

from __future__ import annotations

import time

import pytest

from airflow_bottledwater.jobs.control import Controller
from airflow_bottledwater.local.kafka import KafkaBroker
from airflow_bottledwater.model.job import Job
from airflow_bottledwater.postgres.connect import connect
from airflow_bottledwater.postgres.server import identify
from airflow_bottledwater.triggers.stream_error import StatusWatch, read
from tests.support.topics import Flow
from tests.support.waiting import until


@pytest.mark.long
def test_a_stream_that_reports_nothing_more_is_noticed_and_one_that_reports_is_not(
    database: str, kafka: KafkaBroker
) -> None:
    flow = Flow(database, kafka, None, skip_snapshot=True)
    flow.execute("CREATE TABLE a (id int PRIMARY KEY)")
    flow.create()
    with connect(flow.dsn) as connection:
        cluster = identify(connection)
    job = Job.next(None, "stream")
    # a silence of two outages counts: short enough to wait for, long enough for a machine that is busy
    pipeline = flow.pipeline.with_(outage_timeout=4.0)
    controller = Controller(flow.pipeline, cluster, job)
    controller.status.state = "streaming"
    controller.start()
    until(lambda: read(pipeline, cluster, now=True)[0] is not None, "the first heartbeat", pause=0.2)
    watch = StatusWatch(pipeline, cluster, earlier="", max_silence=1.0, max_dead_letters=None)
    deadline = time.monotonic() + 10.0
    while time.monotonic() < deadline:
        assert watch.fetch() is None
        time.sleep(0.2)
    # killed: it writes no last status
    controller._ended.set()
    controller._thread.join()
    begun = time.monotonic()
    event = until(watch.fetch, "the silence is noticed", pause=0.2)
    assert time.monotonic() - begun > 6.0
    assert event["status"] == "failed" and f"process {job.pid} on {job.host}" in event["message"]
    # asked to stop, and not with its task, which another job may follow
    controller._by = "request"
    controller.finish("stopped")
    time.sleep(1.1)
    event = watch.fetch()
    assert event is not None and (event["status"], event["seen"][:2]) == ("ok", [job.id, "stopped"])
    # of another slot nobody ever reports
    nobody = StatusWatch(pipeline.with_(slot="nobody"), cluster, earlier="", max_silence=1.0, max_dead_letters=None)
    begun = time.monotonic()
    event = until(nobody.fetch, "nobody has reported", pause=0.2)
    assert "No job has ever reported" in event["message"] and time.monotonic() - begun > 7.0
