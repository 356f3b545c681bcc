"""A stop that is asked for between the end of a job and the first status of the one that continues it: it is neither
lost nor answered for the wrong job."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace
from typing import Any

import pytest
from click.testing import CliRunner, Result

from airflow_bottledwater.cli import cli, jobs, restart
from airflow_bottledwater.errors import JobDied, Outage, PreflightError, StateError, TakenOver
from airflow_bottledwater.jobs import fence, requests, status
from airflow_bottledwater.jobs.control import Controller
from airflow_bottledwater.jobs.submitted import records
from airflow_bottledwater.local.kafka import KafkaBroker
from airflow_bottledwater.provision.drop import drop
from airflow_bottledwater.state import claim
from airflow_bottledwater.state.control_records import request_key
from airflow_bottledwater.state.control_topic import ControlTopic
from airflow_bottledwater.stream.start import begin
from tests.support import running
from tests.support.topics import Flow
from tests.support.waiting import until


@pytest.fixture
def flow(database: str, kafka: KafkaBroker) -> Flow:
    made = Flow(database, kafka, None)
    made.execute("CREATE TABLE a (id bigint PRIMARY KEY, name text)", "INSERT INTO a VALUES (0, 'a')")
    made.create()
    made.snapshot()
    return made


def _ends(flow: Flow) -> None:
    """Start the stream, which is not bounded: it ends because a stop was asked for."""
    thread = threading.Thread(target=running.run_stream, args=(flow.pipeline,), daemon=True)
    thread.start()
    thread.join(60)
    assert not thread.is_alive(), "it streams on"
    assert flow.state == "stopped"


def _goes_on(flow: Flow) -> None:
    """Start the stream on purpose: nothing stops it."""
    with flow.streaming() as errors:
        until(lambda: flow.state == "streaming", "the stream runs", failed=errors)
        flow.execute("INSERT INTO a SELECT max(id) + 1, 'more' FROM a")
        rows = flow.execute("SELECT count(*) FROM a")[0][0]
        until(lambda: len({m.key["id"] for m in flow.read("a")}) == rows, "the record", failed=errors)
    assert not errors


def _stop(flow: Flow, *options: str) -> Result:
    """``bottledwater stop``."""
    arguments = ["stop", "-d", flow.dsn, "-s", flow.pipeline.slot, "-b", flow.kafka.bootstrap, "-f", "json", *options]
    return CliRunner().invoke(cli, arguments)


def test_a_stop_between_snapshot_and_stream_holds_for_the_stream(flow: Flow) -> None:
    assert flow.state == "finished"
    assert requests.stop_pipeline(flow.pipeline, flow.cluster) is not None
    _ends(flow)
    _goes_on(flow)


def _runs(flow: Flow) -> Controller:
    """A job that has claimed the slot, reports and listens, and does nothing else."""
    start = begin(flow.pipeline)
    made = Controller(flow.pipeline, start.cluster, start.job)
    made.status.state = "streaming"
    made.start()
    until(lambda: (job := flow.job) and job.job.id == start.job.id, "its first status")
    return made


def test_a_stop_that_a_job_heard_while_it_failed_holds_for_the_next(flow: Flow) -> None:
    job = _runs(flow)
    requests.stop_pipeline(flow.pipeline, flow.cluster)
    assert job.stopped.wait(60)
    job.finish("failed", Outage("Kafka is away."), permanent=False)
    _ends(flow)
    _goes_on(flow)


def test_a_stop_is_answered_by_the_job_that_continues_the_one_that_was_asked(flow: Flow) -> None:
    dead = _runs(flow)
    dead.abandon()  # without a last word
    with ThreadPoolExecutor(1) as pool:
        answer = pool.submit(_stop, flow, "--timeout", "60")
        until(lambda: request_key(flow.cluster.pipeline(flow.pipeline.slot)) in records(flow.pipeline), "the request")
        next_job = _runs(flow)
        assert next_job.stopped.wait(60)
        # it publishes what it has
        time.sleep(2)
        assert not answer.done()
        next_job.finish("stopped")
        said, more = answer.result(60).output.strip().splitlines()
        assert said == "The job is stopped." and "a Deployment of Kubernetes" in more
    assert _stop(flow).output.strip() == "The job is stopped."  # whose command is not there any more
    _goes_on(flow)


def test_what_an_earlier_job_passes_on_to_its_worker_does_not_stop_a_later_one(flow: Flow) -> None:
    """It was frozen, given up and replaced, and then woke and found that it was asked to stop."""
    earlier = _runs(flow)
    earlier.abandon()
    later = _runs(flow)
    requests.pass_on(flow.pipeline, flow.cluster, earlier._job)
    assert not later.stopped.wait(3)
    requests.pass_on(flow.pipeline, flow.cluster, later._job)
    assert later.stopped.wait(60)
    later.finish("stopped")


def test_a_job_that_was_fenced_does_not_report_itself_alive_again(flow: Flow) -> None:
    """Its work hangs, but its heart beats; then it is killed."""
    hangs = _runs(flow)
    _stop(flow, "--timeout", "2")
    until(lambda: flow.state == "stopped", "it counts as stopped")
    time.sleep(3 * flow.pipeline.heartbeat_interval)
    assert flow.state == "stopped"
    hangs.abandon()
    _goes_on(flow)


@pytest.mark.some(1)
@pytest.mark.parametrize("late", [False, True], ids=["alive", "under way"])
def test_the_status_of_a_pipeline_that_was_dropped_does_not_come_back(
    flow: Flow, monkeypatch: pytest.MonkeyPatch, late: bool
) -> None:
    """Its job lives until it learns that its slot was claimed; its last heartbeat may be under way then."""
    start, name = begin(flow.pipeline), flow.name
    runs, sent, write = Controller(flow.pipeline, start.cluster, start.job), list[object](), ControlTopic.write

    def delayed(self: ControlTopic, changes: dict[str, Any], **options: Any) -> None:
        if late and threading.current_thread() is runs._thread and not sent:
            sent.append(changes)
            until(lambda: status.read_status(flow.pipeline, name) is None, "the status is deleted")
        write(self, changes, **options)

    with pytest.raises(TakenOver), runs.reporting():
        until(lambda: (now := status.read_status(flow.pipeline, name)) and now.job.id == start.job.id, "it reports")
        with pytest.raises(StateError, match=r"alive: its job .* It was not dropped. Retire the pipeline"):
            drop(flow.pipeline, when="always", alive=False)
        monkeypatch.setattr(ControlTopic, "write", delayed)
        until(lambda: sent or not late, "a heartbeat is under way")
        drop(flow.pipeline, when="always")
        if not late:
            time.sleep(2 * flow.pipeline.heartbeat_interval)
        raise TakenOver("The slot was taken over.")
    time.sleep(1.0)
    assert status.read_status(flow.pipeline, name) is None


def test_a_job_that_slept_through_the_drop_of_its_pipeline_leaves_no_status(flow: Flow) -> None:
    """The deletion of the status was compacted away before the job woke."""
    start = begin(flow.pipeline)
    drop(flow.pipeline, when="always")
    runs = Controller(flow.pipeline, start.cluster, start.job)
    with pytest.raises(TakenOver), runs.reporting():
        until(lambda: status.read_status(flow.pipeline, flow.name), "it reports")
        raise TakenOver("The slot was taken over.")
    assert status.read_status(flow.pipeline, flow.name) is None


def test_a_signal_that_is_passed_on_does_not_replace_a_stop(flow: Flow) -> None:
    job = _runs(flow)
    job.abandon()
    requests.stop_pipeline(flow.pipeline, flow.cluster)
    requests.pass_on(flow.pipeline, flow.cluster, job._job, interrupted=15)
    _ends(flow)


class _Work(jobs._JobRuns):
    """Fails once, and then would run."""

    def __init__(self, flow: Flow, fails: Callable[[], None]) -> None:
        super().__init__(flow.pipeline, "local", {}, False, None, threading.Event(), lambda: flow.pipeline)
        self.fails, self.done = fails, 0

    def once(self) -> None:
        self.done += 1
        if self.done == 1:
            self.fails()
            raise JobDied("It died.", kind="Outage")


@pytest.mark.some(1)
@pytest.mark.parametrize("how", ["failed", "killed"])
def test_a_stop_in_the_pause_before_a_restart_ends_the_command(
    flow: Flow, monkeypatch: pytest.MonkeyPatch, how: str
) -> None:
    def fails() -> None:
        job = _runs(flow)
        if how == "failed":
            job.finish("failed", Outage("Kafka is away."), permanent=False)
        else:
            job.abandon()
        time.sleep(0.1)
        assert _stop(flow, "--timeout", "2").exit_code == 0

    work = _Work(flow, fails)
    restart.keep_running(work, work.stopped)
    assert work.done == 1
    assert flow.state == "stopped"
    _goes_on(flow)


def test_a_stop_from_before_the_command_does_not_end_it(flow: Flow) -> None:
    job = _runs(flow)
    job.abandon()
    assert _stop(flow, "--timeout", "2").exit_code == 0
    time.sleep(0.1)
    work = _Work(flow, lambda: None)
    restart.keep_running(work, work.stopped)
    assert work.done == 2


def test_who_takes_the_slot_in_the_pause_before_a_restart_keeps_it(flow: Flow) -> None:
    ours = begin(flow.pipeline).job.id
    fence.refuse_taken_over(flow.pipeline, ours)
    other = _runs(flow)
    with pytest.raises(TakenOver, match=f"taken over by stream job {other._job.id[:8]}.*is not started again"):
        fence.refuse_taken_over(flow.pipeline, ours)
    other.finish("finished")  # a bounded run leaves it
    fence.refuse_taken_over(flow.pipeline, ours)


def test_a_job_that_an_outage_ends_behind_its_claim_does_not_keep_itself_from_going_on(
    flow: Flow, monkeypatch: pytest.MonkeyPatch
) -> None:
    job = SimpleNamespace(last_claim="", owner=None, may_claim=lambda name: True)
    job.claimed = lambda made: setattr(job, "last_claim", made.id)
    monkeypatch.setattr(claim, "_job", job)
    begin(flow.pipeline)

    def away(*_: object) -> None:
        raise Outage("Kafka is away.")

    with monkeypatch.context() as patch, pytest.raises(Outage):
        patch.setattr(claim.Claim, "_initialise_others", away)
        begin(flow.pipeline)
    fence.refuse_taken_over(flow.pipeline, job.last_claim)
    begin(flow.pipeline)


def test_a_start_that_is_refused_after_a_stop_says_so_in_the_status(
    flow: Flow, monkeypatch: pytest.MonkeyPatch
) -> None:
    _runs(flow).finish("stopped")
    assert _stop(flow).exit_code == 0
    before = status.read_status(flow.pipeline, flow.name)
    assert before is not None and not before.wanted
    flow.execute(f"SELECT pg_drop_replication_slot('{flow.pipeline.slot}')")
    monkeypatch.setattr(jobs, "start", lambda *_, **__: None)
    with pytest.raises(PreflightError):
        jobs._JobRuns(flow.pipeline, "local", {}, False, None, threading.Event(), lambda: flow.pipeline).once()
    after = status.read_status(flow.pipeline, flow.name)
    assert after is not None and after.wanted and after.not_begun and flow.pipeline.slot in after.error
