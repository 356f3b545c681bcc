"""The client of the shared topic: one for all who need it in a process."""

from __future__ import annotations

import contextlib
import time
import uuid
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from confluent_kafka.admin import AdminClient, AlterConfigOpType, ConfigEntry, ConfigResource

from airflow_bottledwater.errors import Outage
from airflow_bottledwater.jobs import alive
from airflow_bottledwater.jobs.control import Controller
from airflow_bottledwater.jobs.requests import stop_job
from airflow_bottledwater.jobs.snapshots import SnapshotRequests, ask
from airflow_bottledwater.jobs.submitted import JobReporter, LogTail
from airflow_bottledwater.jobs.watch import JobWatch
from airflow_bottledwater.kafka.topics import Topics
from airflow_bottledwater.local.kafka import KafkaBroker
from airflow_bottledwater.model.job import Job
from airflow_bottledwater.model.outcome import Outcome
from airflow_bottledwater.model.slot import Cluster
from airflow_bottledwater.pipeline.settings import Settings
from airflow_bottledwater.state import control_topic, store
from airflow_bottledwater.state.control_records import (
    PROBE,
    JobRecord,
    SnapshotRequest,
    StopRequest,
    encode,
    job_key,
    request_key,
)
from airflow_bottledwater.state.control_topic import ControlTopic, _key
from tests.support.waiting import until


@pytest.fixture
def pipeline(kafka: KafkaBroker) -> Settings:
    properties = {"bootstrap.servers": kafka.bootstrap, "client.id": uuid.uuid4().hex}
    topics = Topics(properties)
    if store.CONTROL_TOPIC not in topics.describe([store.CONTROL_TOPIC]):
        topics.make(store.new_topic(store.CONTROL_TOPIC, 1))
    return Settings.of(postgres="host=nowhere", kafka=properties, format="json", slot=uuid.uuid4().hex)


def test_a_jobs_parts_hear_and_write_by_one_client(pipeline: Settings, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its status, its submission, the requests for live snapshots, and whoever watches it from within the process."""
    made, original = list[str](), store.Reader.__init__

    def init(self: Any, config: Any, topic: str, **keywords: Any) -> None:
        made.append(topic)
        original(self, config, topic, **keywords)

    monkeypatch.setattr(store.Reader, "__init__", init)
    cluster, stopped = Cluster("1", 1, "d", 160000), list[str]()
    name, job = cluster.pipeline(pipeline.slot), Job.next(None, "stream")
    controller = Controller(pipeline, cluster, job)
    reporter = JobReporter(pipeline, "j" + job.id, "stream", LogTail(), lambda: stopped.append("asked"))
    requests = SnapshotRequests(pipeline, name)
    controller.start()
    reporter.start()
    try:
        until(lambda: requests.poll() or requests.complete, "the requests of before are known")
        ask(pipeline, name, "s", SnapshotRequest(("a",)))
        stop_job(pipeline.kafka, "j" + job.id)
        control_topic.write(
            pipeline.kafka, {request_key(name): encode(StopRequest("request", job.epoch, at=time.time()))}
        )
        until(lambda: requests.poll() or requests.active, "the request for a live snapshot")
        until(controller.stopped.is_set, "the stop of the pipeline")
        until(lambda: stopped == ["asked"], "the stop of this job")
        requests.remove("s")
        requests.read()
        assert not requests.open
    finally:
        reporter.finish(Outcome(ok=True, stopped=True))
        controller.finish("stopped")
        requests.close()
    # those for other properties are not this job's
    until(lambda: _key(pipeline.kafka) not in ControlTopic._of, "each part has closed the client")
    assert made == [store.CONTROL_TOPIC]
    # what was written last is there, and the answered request is not
    found = control_topic.read(pipeline.kafka)
    assert found[f"status/{name}"]["state"] == "stopped" and request_key(name) not in found


def test_a_record_that_kafka_does_not_take_is_logged_once_and_costs_no_client(
    pipeline: Settings, caplog: pytest.LogCaptureFixture
) -> None:
    failed, controller = list[str](), Controller(pipeline, Cluster("1", 1, "d", 160000), Job.next(None, "stream"))
    writer, write = controller._topic._producer(), controller._write

    def writes(wait: float) -> None:
        try:
            write(wait)
        except Outage as error:
            failed.append(str(error))
            raise

    controller._write = writes  # type: ignore[method-assign]
    controller.status.error = "x" * 2_000_000
    controller.start()
    until(lambda: len(failed) > 2, "three heartbeats")
    assert "too large" in failed[0] and controller._topic._producer() is writer
    controller.status.error = ""
    controller.finish("stopped")
    assert caplog.text.count("Heartbeats and requests wait") == 1
    assert control_topic.read(pipeline.kafka)[f"status/{controller.name}"]["state"] == "stopped"


def test_a_subscriber_gets_what_it_wants_once_and_in_order(pipeline: Settings) -> None:
    key = f"verified/{pipeline.slot}"
    control_topic.write(pipeline.kafka, {key: {"rows": 0}, f"{key}/other": {"rows": 9}})
    with ControlTopic.of(pipeline.kafka) as topic:
        heard = topic.subscribe(key.__eq__)
        assert heard.read()[key] == {"rows": 0}
        topic.write({key: {"rows": 1}, f"{key}/other": {"rows": 9}})
        topic.write({key: None})
        found = list[Any]()
        until(lambda: found.extend(heard.poll(1.0)) or len(found) == 2, "both changes")
        assert found == [(key, {"rows": 1}), (key, None)]
        assert heard.poll() == []
        # one who comes later begins with what is known
        late = topic.subscribe(f"{key}/other".__eq__)
        assert late.poll() == [(f"{key}/other", {"rows": 9})]
        value, changed = topic.get(key)
        assert value is None and changed > topic.answering > 0
        topic.write({f"{key}/other": None})


@pytest.mark.parametrize("listening", [False, True])
def test_the_records_are_in_the_order_in_which_they_were_written_last(pipeline: Settings, listening: bool) -> None:
    """The first owner of a topic has it."""
    first, second = (f"verified/{pipeline.slot}/{n}" for n in "12")
    with contextlib.ExitStack() as stack:
        if listening:
            stack.enter_context(ControlTopic.of(pipeline.kafka)).all()
        # more than a reader takes at once
        others = [f"verified/{pipeline.slot}/other/{n}" for n in range(2000)]
        control_topic.write(pipeline.kafka, {key: {"rows": 0} for key in (first, second, *others)})
        control_topic.write(pipeline.kafka, {first: {"rows": 1}})
        found = control_topic.read(pipeline.kafka)
        assert [key for key in found if key in (first, second)] == [second, first]
        assert ControlTopic.used(pipeline.kafka) == listening
        control_topic.write(pipeline.kafka, dict.fromkeys((first, second, *others)))


def test_what_the_broker_does_not_take_is_an_outage(pipeline: Settings) -> None:
    away = {**pipeline.kafka, "bootstrap.servers": "127.0.0.1:1"}
    with ControlTopic.of(away) as topic:
        topic.write({"verified/nothing": {}}, wait=0)
        with pytest.raises(Outage, match="did not take"):
            topic.write({"verified/nothing": {}}, wait=0.3)


@pytest.mark.long
def test_a_topic_that_was_made_again_is_read_and_written(tmp_path: Path) -> None:
    """Behind a restart of its broker, the new topic's leader epoch is lower than the one that clients know."""
    with KafkaBroker(tmp_path) as broker:
        kafka = {"bootstrap.servers": broker.bootstrap}
        admin, topics, new = AdminClient(kafka), Topics(kafka), store.new_topic(store.CONTROL_TOPIC, 1)
        topics.make(new)
        broker.stop()
        broker.start()
        with ControlTopic.of(kafka) as topic:
            for number in range(9):
                topic.write({f"verified/{number}": {"rows": number}})
            assert len(topic.all(now=True)) == 9
            for future in admin.delete_topics([store.CONTROL_TOPIC]).values():
                future.result()
            until(lambda: store.CONTROL_TOPIC not in topics.names(), "it is gone")
            topics.make(new)

            def written() -> bool:
                with contextlib.suppress(Outage):
                    topic.write({"verified/again": {"rows": 1}})
                    return True
                return False

            until(written, "it is written")
            assert topic.all(now=True) == {"verified/again": {"rows": 1}}


def test_where_a_broker_takes_no_records_no_job_counts_as_dead(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(alive, "_SHORTEST", 1.0)
    with KafkaBroker(tmp_path) as broker:
        kafka = {"bootstrap.servers": broker.bootstrap}
        admin = AdminClient(kafka)
        Topics(kafka).make(store.new_topic(store.CONTROL_TOPIC, 1))
        pipeline = Settings.of(postgres="host=nowhere", kafka=kafka, format="json")
        job: Any = {"id": "j", "folder": "", "host": "h", "application": "", "master": "local"}
        control_topic.write(kafka, {job_key("j"): encode(JobRecord("stream", "s", host="h", heartbeat=0.1))})
        watching = JobWatch(pipeline, job, start_timeout=60.0, write=lambda *_: None)
        try:
            _take_at_most(admin, 10)

            def refused(look: Callable[[], object]) -> bool:
                try:
                    assert look() is None
                except Outage as error:
                    return "did not take" in str(error)
                return False

            # the broker goes by it a moment later, and a silence counts for as long as it takes records
            until(lambda: refused(lambda: control_topic.write(kafka, {PROBE: None})), "the broker takes none")
            until(lambda: refused(watching.fetch), "it is an outage")
            _take_at_most(admin, 1_000_000)

            def ended() -> Any:
                with contextlib.suppress(Outage):
                    return watching.fetch()

            assert until(ended, "it is dead").lost
        finally:
            watching.close()


def _take_at_most(admin: AdminClient, size: int) -> None:
    entry = ConfigEntry("max.message.bytes", str(size), incremental_operation=AlterConfigOpType.SET)
    topic = ConfigResource(ConfigResource.Type.TOPIC, store.CONTROL_TOPIC, incremental_configs=[entry])
    for future in admin.incremental_alter_configs([topic]).values():
        future.result()
