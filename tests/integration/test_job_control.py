"""Heartbeats, requests and the state's readers: what others write there, what is lost, and what is left behind."""

from __future__ import annotations

import gc
import os
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from confluent_kafka import Producer

from airflow_bottledwater.backoff import Backoff
from airflow_bottledwater.errors import SlotError, StaleBatch
from airflow_bottledwater.jobs import requests, status
from airflow_bottledwater.jobs.control import Controller
from airflow_bottledwater.jobs.pipelines import HealthLimits, wrong
from airflow_bottledwater.local.kafka import KafkaBroker
from airflow_bottledwater.model.slot import Cluster
from airflow_bottledwater.publish.session import PublishSession
from airflow_bottledwater.state import control_topic, pinned, records, store
from airflow_bottledwater.state.claim import Claim
from airflow_bottledwater.state.control_records import StopRequest, encode, request_key
from airflow_bottledwater.stream import engine
from airflow_bottledwater.stream.start import Start, begin
from tests.support import running
from tests.support.topics import Flow
from tests.support.waiting import until


@pytest.fixture(scope="module")
def kafka(tmp_path_factory: pytest.TempPathFactory) -> Iterator[KafkaBroker]:
    """A broker of these tests: what is none of ours in its shared topic would be told wherever that is read."""
    with KafkaBroker(tmp_path_factory.mktemp("control")) as server:
        yield server


@pytest.fixture
def flow(database: str, kafka: KafkaBroker) -> Flow:
    made = Flow(database, kafka, None, skip_snapshot=True)
    made.execute("CREATE TABLE a (id bigint PRIMARY KEY, name text)")
    made.create()
    return made


@pytest.fixture
def foreign(flow: Flow) -> Iterator[None]:
    """Records in the shared topic that are none of ours."""
    producer = Producer({"bootstrap.servers": flow.kafka.bootstrap})
    name = flow.cluster.pipeline(flow.pipeline.slot)
    refused: list[object] = []
    for key, value in [
        (b"status/other", b"not json"), (b"\xff", b"{}"), (b"other", b"[]"), (b"status/other", b"17"),
        (b"status/other", b"\xff"),
        (request_key(name).encode(), b'"stop"'), (request_key(name).encode(), b'{"epoch": "all"}'),
    ]:  # fmt: skip
        producer.produce(
            store.CONTROL_TOPIC,
            value,
            key,
            partition=0,
            on_delivery=lambda error, _: refused.append(error) if error else None,
        )
    assert producer.flush(60) == 0
    assert not refused
    yield
    for key in (request_key(name).encode(), b"status/other"):
        producer.produce(store.CONTROL_TOPIC, None, key, partition=0)
    assert producer.flush(60) == 0


def test_what_others_write_into_the_shared_topic_stops_nothing(flow: Flow, foreign: None) -> None:
    with flow.streaming() as errors:
        until(lambda: flow.state == "streaming", "the stream runs", failed=errors)
        asked = requests.stop_pipeline(flow.pipeline, flow.cluster)
        assert asked is not None
        ended = requests.wait_ended(flow.pipeline, flow.cluster, asked.job, timeout=60)
        assert ended is not None
        assert ended.state == "stopped"
    assert not errors


def test_an_error_in_the_control_thread_does_not_end_it(
    flow: Flow, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    poll, failed = store.Reader.poll, list[int]()
    # those of other tests may not have ended yet
    others = set(threading.enumerate())

    def fails(self: store.Reader, timeout: float) -> Any:
        thread = threading.current_thread()
        if thread.name == "control topic" and thread not in others and len(failed) < 2:
            failed.append(1)
            raise KeyError("surprise")
        return poll(self, timeout)

    monkeypatch.setattr(store.Reader, "poll", fails)
    with flow.streaming() as errors:
        until(lambda: len(failed) == 2, "two failures", failed=errors)
        until(lambda: flow.state == "streaming", "the stream runs", failed=errors)
        requests.stop_pipeline(flow.pipeline, flow.cluster)
        until(lambda: flow.state == "stopped", "the stream stops", failed=errors)
    assert not errors
    told = [repr(r.exc_info[1]) for r in caplog.records if r.exc_info and "cannot be read now" in r.message]
    assert told == ["KeyError('surprise')"]


def test_a_request_to_a_later_job_is_left_to_that_job(flow: Flow) -> None:
    cluster = flow.cluster
    earlier, later = _dies(flow, cluster), begin(flow.pipeline)
    requests.pass_on(flow.pipeline, cluster, later.job)
    late = Controller(flow.pipeline, cluster, earlier.job)
    late._listen()
    assert not late.stopped.is_set()
    late._release()
    # not bounded: it ends because it was asked to
    thread = threading.Thread(target=engine.follow, args=(flow.pipeline, later), daemon=True)
    thread.start()
    until(lambda: flow.state == "stopped", "the stream ends")
    thread.join(60)


def _dies(flow: Flow, cluster: Cluster) -> Start:
    """A stream that has reported and is gone without a last word."""
    start = begin(flow.pipeline)
    dead = Controller(flow.pipeline, cluster, start.job)
    dead.status.state = "streaming"
    dead._write(wait=10.0)
    dead._release()
    return start


def test_an_attempt_that_was_overtaken_by_another_one_of_the_same_job_says_nothing(flow: Flow) -> None:
    """A lost executor that wakes up finds that the task goes on elsewhere."""
    cluster, start = flow.cluster, begin(flow.pipeline)
    living = Controller(flow.pipeline, cluster, start.job)
    with living.reporting():
        living.status.state = "streaming"
        overtaken = Controller(flow.pipeline, cluster, start.job)
        with pytest.raises(StaleBatch), overtaken.reporting():
            raise StaleBatch("Another attempt of this job has published more.")
        failed = Controller(flow.pipeline, cluster, start.job)
        with pytest.raises(SlotError), failed.reporting():
            raise SlotError("The slot is in use.")
        # whatever an attempt said last, the one that lives goes on, and says so
        time.sleep(3 * living.status.heartbeat)
        told = flow.job
        assert told is not None and (told.state, told.error) == ("streaming", "")
        living.finish("finished")


def test_a_stop_between_a_death_and_the_restart_is_not_lost_and_is_answered_once(flow: Flow) -> None:
    cluster = flow.cluster
    _dies(flow, cluster)
    assert requests.stop_pipeline(flow.pipeline, cluster) is not None
    started = time.monotonic()
    running.run_stream(flow.pipeline)  # not bounded: it ends because it was asked to
    assert time.monotonic() - started < 60
    assert flow.state == "stopped"
    # whoever starts it again has not asked for that
    with flow.streaming() as errors:
        flow.execute("INSERT INTO a VALUES (1, 'a')")
        until(lambda: flow.read("a"), "the first record", failed=errors)
        # the first heartbeat may come after the first record
        until(lambda: flow.state == "streaming", "the stream runs again", failed=errors)
    assert not errors


def test_a_stop_of_a_job_that_has_ended_does_not_end_the_next(flow: Flow) -> None:
    cluster = flow.cluster
    flow.stream()
    asked = requests.stop_pipeline(flow.pipeline, cluster)
    assert asked is not None
    assert asked.state in ("stopped", "finished")
    # and one that is left there
    left = StopRequest("request", asked.job.epoch, at=time.time())
    control_topic.write(flow.pipeline.kafka, {request_key(flow.name): encode(left)})
    with flow.streaming() as errors:
        flow.execute("INSERT INTO a VALUES (1, 'a')")
        until(lambda: flow.read("a"), "the first record", failed=errors)
        # the first heartbeat may come after the first record
        until(lambda: flow.state == "streaming", "the stream runs again", failed=errors)
    assert not errors


# ---------------------------------------------------------------- nothing is left behind
def _resources() -> tuple[int, int, int]:
    """Threads, descriptors, and resident memory in KiB."""
    memory = Path("/proc/self/status").read_text().split("VmRSS:")[1].split()[0]
    return len(os.listdir("/proc/self/task")), len(os.listdir("/proc/self/fd")), int(memory)


@pytest.mark.parametrize("cycles", [25, pytest.param(1000, marks=pytest.mark.long)])
def test_heartbeats_reconnects_and_reports_leave_nothing_behind(flow: Flow, cycles: int) -> None:
    cluster = flow.cluster
    claim = Claim(flow.pipeline, cluster, "snapshot", Backoff(20))
    publishing = PublishSession(
        flow.pipeline, claim.job, records.stream_id(claim.prefix), pinned.pins(claim.state.tables.values()),
        claim.topic, Backoff(20)
    )  # fmt: skip
    controller = Controller(flow.pipeline, cluster, claim.job)

    def cycle() -> None:
        controller._write(wait=10.0)
        claim.refresh()
        status.report(flow.pipeline)
        publishing.open()
        publishing.close()

    gc.collect()
    gc.disable()  # what needs the collector is a leak until it comes
    try:
        for _ in range(5):
            cycle()
        threads, descriptors, memory = _resources()
        for _ in range(cycles):
            cycle()
        after = _resources()
    finally:
        gc.enable()
        controller.finish("stopped")
        publishing.close()
        claim.close()
    assert after[0] <= threads + 6
    assert after[1] <= descriptors + 12
    assert after[2] <= memory + 64 * 1024


def test_a_start_that_is_refused_is_told_even_if_the_job_before_it_was_stopped_on_request(flow: Flow) -> None:
    name = flow.cluster.pipeline(flow.pipeline.slot)
    with flow.streaming() as errors:
        until(lambda: flow.state == "streaming", "the stream runs", failed=errors)
        flow.execute("INSERT INTO a VALUES (1, 'one')")
        until(
            lambda: (now := status.read_status(flow.pipeline, name)) and now.counters.get("published"), "it publishes"
        )
        requests.stop_pipeline(flow.pipeline, flow.cluster)
        until(lambda: flow.state == "stopped", "the stream stops", failed=errors)
    flow.execute(f"SELECT pg_drop_replication_slot('{flow.pipeline.slot}')")
    with pytest.raises(SlotError, match="does not exist"):
        begin(flow.pipeline)
    last = status.read_status(flow.pipeline, name)
    assert last is not None and last.wanted and (last.state, last.permanent) == ("failed", True)
    assert "does not exist" in last.error and last.position
    assert wrong(name, last, {}, HealthLimits(), alive=False)
