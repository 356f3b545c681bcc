"""The watch over all pipelines of a Kafka, on real servers: it knows them only by what they report."""

from __future__ import annotations

import contextlib
import re
import threading
import time
import uuid
from collections.abc import Iterator
from types import SimpleNamespace

import pytest

from airflow_bottledwater.backoff import Backoff
from airflow_bottledwater.errors import BottledWaterError, Outage
from airflow_bottledwater.hooks import health
from airflow_bottledwater.hooks.health import Health
from airflow_bottledwater.hooks.holder import living
from airflow_bottledwater.hooks.pipeline import PipelineHook
from airflow_bottledwater.hooks.tasks import Fate
from airflow_bottledwater.jobs import alive, requests, submitted
from airflow_bottledwater.jobs.control import Controller
from airflow_bottledwater.jobs.pipelines import HealthLimits
from airflow_bottledwater.jobs.status import read_status
from airflow_bottledwater.local.kafka import KafkaBroker
from airflow_bottledwater.model.job import Job, Owner
from airflow_bottledwater.model.lsn import Position
from airflow_bottledwater.model.problem import Problem
from airflow_bottledwater.operators.control import PipelineControlOperator
from airflow_bottledwater.postgres.connect import connect
from airflow_bottledwater.postgres.server import identify
from airflow_bottledwater.provision.drop import drop
from airflow_bottledwater.spark import stream
from airflow_bottledwater.state import control_records, control_topic
from airflow_bottledwater.state.claim import Claim
from airflow_bottledwater.state.control_records import JobRecord, encode, job_key, stop_key
from airflow_bottledwater.state.records import BY_STREAM, Letters, letters_key
from airflow_bottledwater.stream import start
from airflow_bottledwater.stream.engine import reported
from airflow_bottledwater.stream.start import begin
from tests.support.topics import Flow
from tests.support.waiting import until


class Watched:
    """A pipeline whose job reports without doing anything."""

    def __init__(self, flow: Flow) -> None:
        self.flow = flow
        with connect(flow.dsn) as connection:
            self.cluster = identify(connection)
        self.epoch = 0

    def job(self, state: str = "streaming") -> Controller:
        self.epoch += 1
        job = Job(self.epoch, uuid.uuid4().hex, "stream", "h", 5, time.time())
        controller = Controller(self.flow.pipeline, self.cluster, job)
        controller.status.state = state
        controller.start()
        until(
            lambda: (s := read_status(self.flow.pipeline, controller.name)) and s.job.id == job.id,
            "it reports",
        )
        return controller

    def look(self, **limits: float) -> Health:
        return health.look(
            self.flow.pipeline.kafka,
            pipelines=[self.flow.pipeline.slot],
            postgres_conn_ids=["source"],
            limits=HealthLimits(**limits),  # type: ignore[arg-type]
        )

    def wrong(self, **limits: float) -> str:
        return " ".join(self.look(**limits).wrong.get(self.flow.name, []))


@pytest.fixture
def watched(database: str, kafka: KafkaBroker, monkeypatch: pytest.MonkeyPatch) -> Iterator[Watched]:
    flow = Flow(database, kafka, None, skip_snapshot=True, heartbeat_interval=0.2)
    flow.execute("CREATE TABLE a (id int PRIMARY KEY)")
    flow.create()
    monkeypatch.setattr(alive, "_SHORTEST", 2.0)
    monkeypatch.setattr(alive, "_SHORTEST_SUSPECTED", 1.0)
    monkeypatch.setattr(health.SourceHook, "dsn", lambda self: flow.dsn)
    yield Watched(flow)
    drop(flow.pipeline, when="always")


def _kill(controller: Controller) -> None:
    controller._ended.set()
    controller._thread.join()


def test_a_pipeline_that_is_meant_to_run_and_does_not_is_red(watched: Watched) -> None:
    nobody = watched.look().wrong[watched.flow.pipeline.slot]
    assert "There is no pipeline of this name" in nobody[0]
    job = watched.job()
    assert watched.look().states == {watched.flow.name: "streaming"} and not watched.wrong()
    job.problems.tell("tables", [Problem("not-followed", "public.b", "It has no key.", since=time.time() - 100)])
    until(lambda: "public.b: It has no key." in watched.wrong(), "its problem is red")
    # the clock of its host is wrong, but it reports
    write = job._write
    job._write = lambda wait: (setattr(job.status, "at", 5.0), write(wait))[1]  # type: ignore[method-assign]
    assert "not reported" not in watched.wrong()
    _kill(job)
    until(lambda: "has not reported" in watched.wrong(), "its silence is red")
    # another one that dies, and another
    for _ in range(2):
        job = watched.job()
        job.finish("failed", RuntimeError("no room"), permanent=False)
    assert not watched.wrong()
    watched.job()
    assert "3 jobs in a row have ended without publishing anything" in watched.wrong()


def test_one_that_was_asked_to_stop_is_not_and_one_that_was_stopped_otherwise_is(watched: Watched) -> None:
    job = watched.job()
    job.finish("stopped")
    assert "was stopped with its task" in watched.wrong(silence=0.0)
    # a person decides
    requests.stop_pipeline(watched.flow.pipeline, watched.cluster)
    assert not watched.wrong(silence=0.0)
    # and decides otherwise
    job = watched.job()
    job.finish("finished")
    assert not watched.wrong(silence=0.0) and "last bounded run" in watched.wrong(pause=0.0)


def test_that_it_was_never_verified_is_known_however_often_its_jobs_begin(watched: Watched) -> None:
    watched.job().finish("finished")
    first = read_status(watched.flow.pipeline, watched.flow.name)
    assert first is not None and first.first == first.job.started
    late = watched.job()
    assert late.status.first == first.first
    late.finish("finished")
    # one that fails before it reports is no new pipeline either
    (flow := watched.flow).execute(f"SELECT pg_drop_replication_slot('{flow.pipeline.slot}')")
    with pytest.raises(BottledWaterError):
        begin(flow.pipeline)
    last = read_status(flow.pipeline, flow.name)
    assert last is not None and last.failed and last.job.kind == "stream" and last.first == first.first


def test_a_stream_that_is_stuck_is_as_late_whichever_job_tries_it(
    watched: Watched, monkeypatch: pytest.MonkeyPatch
) -> None:
    dead = watched.job()
    dead.status.position, dead.status.delay = "0000000000000064/00000000", 5000.0
    _kill(dead)
    dead._write(wait=5.0)
    begun = time.time() - 5000

    def next_job(position: str) -> Controller:
        watched.epoch += 1
        job = Job(watched.epoch, uuid.uuid4().hex, "stream", "h", 5, time.time())
        made = Controller(watched.flow.pipeline, watched.cluster, job)
        made.status.position = position
        made.start()
        until(made.listening.is_set, "it has heard of the job before")
        return made

    # one that dies before it has measured anything, and one that follows it
    short = next_job(dead.status.position)
    assert short.status.behind_since == pytest.approx(begun, abs=5)
    _kill(short)
    short._write(wait=5.0)
    stuck = next_job(dead.status.position)
    assert stuck.status.behind_since == short.status.behind_since
    stuck.status.delay = time.time() - begun
    stuck.finish("failed", permanent=True)
    # hours later no job can begin, twice
    with monkeypatch.context() as patched:
        patched.setattr(control_records, "time", SimpleNamespace(time=lambda: time.time() + 50_000))
        for _ in range(2):
            requests.not_begun(watched.flow.pipeline, "The slot is lost.")
    told = read_status(watched.flow.pipeline, watched.flow.name)
    assert told is not None and told.at > time.time() + 40_000
    late = next_job(dead.status.position)
    assert late.status.behind_since == pytest.approx(begun, abs=5)
    assert late.status.repeats == stuck.status.repeats + 1 == 2
    late.finish("failed")
    # what was published is not late
    on = next_job("0000000000000065/00000000")
    assert on.status.behind_since == 0
    on.finish("finished")


def test_what_jobs_have_said_outlasts_starts_that_fail(watched: Watched, monkeypatch: pytest.MonkeyPatch) -> None:
    flow = watched.flow
    with contextlib.closing(Claim(flow.pipeline, watched.cluster, "stream", Backoff(20))) as claim:
        claim.write({letters_key(1, BY_STREAM): Letters("public.a", 3)})
        assert claim.state.slot is not None
        position = str(Position(claim.state.slot.consistent_point))
    dead = watched.job()
    dead.status.position, dead.status.delay = position, 5000.0
    _kill(dead)
    dead._write(wait=5.0)

    def fails(*_: object) -> None:
        raise Outage("The registry takes no schemas now.")

    with monkeypatch.context() as patched:
        patched.setattr(start, "_check", fails)
        for _ in range(3):
            with pytest.raises(Outage):
                begin(flow.pipeline)
    begun = begin(flow.pipeline)
    # a worker that dies before it has reported anything
    stream._report_death(flow.pipeline, begun, Outage("Its process died."), threading.Event())
    wrong = watched.wrong()
    assert "3 jobs in a row have ended without publishing anything" in wrong
    assert "3 dead letters are open" in wrong and "public.a" in wrong
    with reported(flow.pipeline, begin(flow.pipeline)) as job:
        until(lambda: (s := read_status(flow.pipeline, job.name)) and s.job.id == job.status.job.id, "it reports")
        last = read_status(flow.pipeline, job.name)
        assert last is not None and (last.repeats, last.open_dead_letters) == (4, 3)
        assert last.behind_since == pytest.approx(time.time() - 5000, abs=60)


def test_a_stream_that_is_behind_is_red_without_a_connection(watched: Watched) -> None:
    job = watched.job()
    job.status.lag, job.status.delay = 2_000_000, 40.0
    until(lambda: (s := read_status(watched.flow.pipeline, job.name)) and s.lag, "it reports that")
    found = health.look(
        watched.flow.pipeline.kafka, pipelines=[watched.flow.pipeline.slot], limits=HealthLimits(lag=10**9, delay=30.0)
    )
    assert "is 2.0 MB and 40 s behind; 1.0 GB and 30 s are allowed" in found.wrong[watched.flow.name][0]
    _kill(job)


def test_the_slots_of_the_sources_are_looked_at(watched: Watched) -> None:
    job = watched.job()
    assert not watched.wrong()
    watched.flow.execute("INSERT INTO a VALUES (1)")
    assert "bytes behind" in watched.wrong(lag=0)
    watched.flow.execute(f"SELECT pg_drop_replication_slot('{watched.flow.pipeline.slot}')")
    assert "There is no slot" in watched.wrong()
    _kill(job)


@pytest.mark.some(2)
@pytest.mark.parametrize("fate", [Fate.GONE, Fate.ENDED, Fate.GOES_ON, Fate.FOREIGN, Fate.UNKNOWN])
def test_a_job_whose_task_is_gone_goes_on_and_one_whose_task_has_ended_is_asked_to_stop(
    watched: Watched, monkeypatch: pytest.MonkeyPatch, fate: Fate
) -> None:
    asked: list[Owner] = []
    monkeypatch.setattr(health, "owners_fate", lambda owner: (asked.append(owner), fate)[1])
    job = watched.job()
    pipeline = watched.flow.pipeline
    record = JobRecord("stream", pipeline.slot, Owner("d", "r", "stream", -1, "h", "", "s"), host="h", at=time.time())
    record.pipeline = watched.flow.name
    control_topic.write(pipeline.kafka, {job_key("j"): encode(record)})
    found = watched.look()
    assert asked == [record.owner]
    assert any("no row any more. It goes on" in line for line in found.told) is (fate is Fate.GONE)
    assert bool(found.wrong) is (fate is Fate.ENDED)
    assert (stop_key("j") in submitted.records(pipeline)) is (fate is Fate.ENDED)
    control_topic.write(pipeline.kafka, {job_key("j"): None, stop_key("j"): None})
    _kill(job)


def test_who_works_on_a_slot_is_known_while_it_lives(watched: Watched) -> None:
    pipeline, name = watched.flow.pipeline, watched.flow.name
    assert living(pipeline, name) is None
    job = watched.job()
    holder = living(pipeline, name)
    assert holder is not None and holder.job.id == job.status.job.id and holder.owner is None
    assert "of a command" in str(holder)
    record = JobRecord("stream", pipeline.slot, Owner("d", "r", "stream", -1, "h", "", "s"), host="h", at=time.time())
    record.pipeline, record.claim = name, holder.job.id
    control_topic.write(pipeline.kafka, {job_key("j"): encode(record)})
    holder = living(pipeline, name)
    assert holder is not None and holder.identity is not None and holder.identity["id"] == "j"
    assert "of the task 'stream' in the run 'r' of the DAG 'd'" in str(holder)
    _kill(job)
    until(lambda: living(pipeline, name) is None, "what it has sent last has arrived")
    control_topic.write(pipeline.kafka, {job_key("j"): None})


@pytest.mark.parametrize("action", ["stop", "retire"])
def test_a_pipeline_is_stopped_retired_and_started_from_airflow(
    watched: Watched, monkeypatch: pytest.MonkeyPatch, action: str
) -> None:
    monkeypatch.setattr(PipelineHook, "pipeline", lambda self: watched.flow.pipeline)
    monkeypatch.setattr(PipelineHook, "saved_settings", lambda self: {})
    job = watched.job()
    ends = threading.Thread(target=lambda: (job.stopped.wait(60), job.finish_stopped()))
    ends.start()
    PipelineControlOperator(task_id="t", pipeline=watched.flow.pipeline.slot, action=action).execute({})  # type: ignore[typeddict-item]
    ends.join()
    last = read_status(watched.flow.pipeline, watched.flow.name)
    assert last is not None and (last.state, last.wanted, last.retired) == ("stopped", False, action == "retire")
    assert not watched.wrong(silence=60.0)
    assert ("drop it with 'bottledwater drop-slot'" in watched.wrong(silence=0.0)) == (action == "retire")
    PipelineControlOperator(task_id="t", pipeline=watched.flow.pipeline.slot, action="start").execute({})  # type: ignore[typeddict-item]
    last = read_status(watched.flow.pipeline, watched.flow.name)
    assert last is not None and last.wanted and not last.retired
    assert "none has followed" in watched.wrong(silence=0.0) and not watched.wrong(silence=60.0)


def test_why_no_job_could_begin_is_told_until_one_reports(watched: Watched) -> None:
    pipeline = watched.flow.pipeline
    requests.not_begun(pipeline, "The slot is lost.")  # of a pipeline of which nothing was reported
    assert read_status(pipeline, watched.flow.name) is None
    job = watched.job()
    requests.not_begun(pipeline, "The slot is lost.")
    assert "lost" not in watched.wrong()
    job.finish("stopped")
    asked = time.monotonic()
    requests.not_begun(pipeline, "The slot is lost.")
    said = re.search(r"No job could begin (\d+) s ago: The slot is lost\.", watched.wrong())
    # 0, unless the machine was slow
    assert said is not None and int(said[1]) <= round(time.monotonic() - asked)
    job = watched.job()
    assert watched.wrong() == ""
    job.finish("failed", Outage("Kafka is away."), permanent=False)
    assert watched.wrong() == ""
    requests.not_begun(pipeline, "The slot is lost.", claim=job.status.job.id)  # that job has said itself why
    assert watched.wrong() == ""
    requests.not_begun(pipeline, "The slot is lost.")
    assert "The job failed for good" in watched.wrong() and "The slot is lost." in watched.wrong()


def test_a_start_says_why_no_job_could_begin_also_after_a_stop_and_a_retry_undoes_none(watched: Watched) -> None:
    pipeline = watched.flow.pipeline
    watched.job().finish("stopped")
    requests.stop_pipeline(pipeline, watched.cluster, retire=True)
    requests.not_begun(pipeline, "The slot is lost.", retry=True)
    last = read_status(pipeline, watched.flow.name)
    assert last is not None and last.retired and not watched.wrong()
    requests.not_begun(pipeline, "The slot is lost.")
    last = read_status(pipeline, watched.flow.name)
    assert last is not None and last.wanted and "No job could begin" in watched.wrong()
    # a stop is obeyed then, too
    requests.stop_pipeline(pipeline, watched.cluster)
    assert not watched.wrong()
