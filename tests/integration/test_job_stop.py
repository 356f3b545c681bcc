"""Jobs on another host, as far as Airflow's host can see: watched, stopped in order, fenced when they do not answer,
and the end of one that was killed."""

from __future__ import annotations

import logging
import os
import signal
import socket
import subprocess
import tempfile
import time
import uuid
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import psycopg
import pytest
from click.testing import CliRunner

from airflow_bottledwater.cli import cli
from airflow_bottledwater.jobs import (
    alive,
    orphans,
    requests,
    run_directory,
    status,
    stop,
    submit,
    submitted,
    supervise,
    watch,
)
from airflow_bottledwater.jobs.fence import asked_meanwhile, fence
from airflow_bottledwater.jobs.log import UNREPORTED, formatter
from airflow_bottledwater.jobs.run_directory import Submission
from airflow_bottledwater.jobs.watch import Ended, JobWatch
from airflow_bottledwater.local.kafka import KafkaBroker
from airflow_bottledwater.model.job import Owner
from airflow_bottledwater.state import control_records, control_topic
from airflow_bottledwater.state.control_records import JobRecord, decode, job_key
from tests.support import process_job
from tests.support.topics import Flow
from tests.support.waiting import until


class Job:
    """A stream in a process of its own, which Airflow's host cannot see."""

    def __init__(self, flow: Flow, folder: Path, *, begin: bool = True) -> None:
        self.flow, self.id = flow, uuid.uuid4().hex
        self.identity: Any = {"id": self.id, "folder": "", "host": "elsewhere", "application": "", "master": "spark"}
        submitted.announce(flow.pipeline, self.id, "stream", Owner("d", "r", "t", -1, "elsewhere", "", "spark"), "", "")
        folder.mkdir()
        self._folder, self.log = folder, folder / "log"
        if begin:
            self.begin()

    def begin(self) -> None:
        flow, folder = self.flow, self._folder
        with self.log.open("wb") as log:
            command = process_job.command("stream", flow.pipeline.write(folder), self.id)
            self.process = subprocess.Popen(command, stdout=log, stderr=log)

    def send(self, signum: int) -> None:
        os.kill(self.process.pid, signum)

    @property
    def record(self) -> JobRecord | None:
        return decode(JobRecord, submitted.records(self.flow.pipeline).get(job_key(self.id)))

    def streams(self) -> None:
        until(
            lambda: (r := self.flow.job) and r.state == "streaming" and r.job.pid == self.process.pid,
            "it streams",
        )

    def end(self) -> Ended:
        watch = JobWatch(self.flow.pipeline, self.identity, start_timeout=60, write=lambda level, line: None)
        try:
            return until(watch.fetch, "the job's end")
        finally:
            watch.close()


MakeJob = Callable[[], Job]


@pytest.fixture
def flow(database: str, kafka: KafkaBroker) -> Flow:
    made = Flow(database, kafka, None, skip_snapshot=True, heartbeat_interval=0.2)
    made.execute("CREATE TABLE a (id bigint PRIMARY KEY, name text)")
    made.create()
    return made


@pytest.fixture
def make(flow: Flow, tmp_path: Path) -> Iterator[MakeJob]:
    """Starts jobs; all of them end with the test."""
    made: list[Job] = []

    def one() -> Job:
        made.append(Job(flow, tmp_path / f"job{len(made)}"))
        return made[-1]

    yield one
    for job in made:
        job.process.kill()
        job.process.wait()


def _insert(flow: Flow, first: int, last: int) -> None:
    flow.execute(f"INSERT INTO a SELECT g, 'name ' || g FROM generate_series({first}, {last}) g")


def _published(flow: Flow) -> list[int]:
    return sorted(int(record.key["id"]) for record in flow.read("a"))


def test_a_job_is_watched_and_stopped_from_another_host(
    flow: Flow, make: MakeJob, caplog: pytest.LogCaptureFixture
) -> None:
    job = make()
    job.streams()
    _insert(flow, 1, 10)
    record = until(lambda: (r := job.record) and r.host and r, "its report")
    assert (record.host, record.pid, record.outcome) == (socket.gethostname(), job.process.pid, None)
    assert record.owner is not None and record.owner.run_id == "r"
    assert orphans.unfinished(flow.pipeline, flow.name) == [(record.owner, job.identity)]
    assert watch.still_runs(flow.pipeline, job.identity) is None
    assert stop.stop(flow.pipeline, job.identity)
    assert "The job has ended." in caplog.text and "is free" in caplog.text
    end = job.end()
    assert end.outcome.ok and end.outcome.stopped and end.asked and not end.lost
    assert job.process.wait(60) == 0
    assert orphans.unfinished(flow.pipeline, flow.name) == []
    watch.forget(flow.pipeline, job.identity, asked=True)
    assert job.record is None


def test_a_stop_that_comes_before_the_job_holds(flow: Flow, make: MakeJob) -> None:
    """It waits in YARN's queue, or Spark is still starting."""
    job = make()
    requests.stop_job(flow.pipeline.kafka, job.id)
    end = job.end()
    assert end.outcome.ok and end.outcome.stopped and end.asked
    assert job.process.wait(60) == 0


def _stop(flow: Flow, *options: str) -> str:
    """``bottledwater stop``; returns what it says."""
    server = ["--postgres", flow.dsn, "--broker", flow.kafka.bootstrap, "--format", "json"]
    done = CliRunner().invoke(cli, ["stop", *server, "--slot", flow.pipeline.slot, *options])
    assert done.exit_code == 0, done.output
    return done.output


@pytest.mark.some(1)
@pytest.mark.parametrize("before", [False, True])
def test_a_job_that_is_starting_is_stopped_with_its_pipeline(flow: Flow, tmp_path: Path, before: bool) -> None:
    """It has not reported yet, and the one before it, if there was one, has ended in order."""
    if before:
        flow.stream()
    job = Job(flow, tmp_path / "job", begin=False)
    _stop(flow)
    job.begin()
    end = job.end()
    assert end.outcome.ok and end.outcome.stopped and not end.asked
    assert job.process.wait(60) == 0


def test_a_stop_of_another_pipeline_with_a_slot_of_this_name_is_not_obeyed(flow: Flow, make: MakeJob) -> None:
    job = make()
    assert requests.stop_starting(flow.pipeline, f"{flow.name} of another cluster", "") == 1
    job.streams()
    # by then it has reported whose job it is
    assert requests.stop_starting(flow.pipeline, f"{flow.name} of another cluster", "") == 0
    time.sleep(1)
    assert job.process.poll() is None
    record = job.record
    assert record is not None
    assert requests.stop_starting(flow.pipeline, flow.name, record.claim) == 0
    assert requests.stop_starting(flow.pipeline, flow.name, "") == 1
    assert job.end().outcome.stopped


def test_a_stop_of_the_pipeline_is_not_one_of_the_task(flow: Flow, make: MakeJob) -> None:
    from airflow_bottledwater.jobs import requests
    from airflow_bottledwater.postgres.connect import connect
    from airflow_bottledwater.postgres.server import identify

    job = make()
    job.streams()
    with connect(flow.dsn) as connection:
        assert requests.stop_pipeline(flow.pipeline, identify(connection)) is not None
    end = job.end()
    assert end.outcome.ok and end.outcome.stopped and not end.asked


@pytest.mark.some(1)
@pytest.mark.parametrize("by", ["request", "task", "replacement"])
def test_a_job_reports_who_has_stopped_it(flow: Flow, make: MakeJob, by: str) -> None:
    """Only a request to the pipeline means that it is not to run."""
    job = make()
    job.streams()
    if by == "request":
        _stop(flow)
    else:
        assert stop.stop(flow.pipeline, job.identity, final=by == "task")
    job.end()
    found = flow.job
    assert found is not None and (found.state, found.stopped_by) == ("stopped", by)
    assert (found.wanted, found.over) == (by != "request", by != "replacement")
    # a person decides about a pipeline whose job has ended, too
    _stop(flow)
    found = flow.job
    assert found is not None and not found.wanted


@pytest.mark.long
def test_a_job_that_is_taken_over_names_the_task_that_did_it(flow: Flow, make: MakeJob) -> None:
    """Also if it has nothing to publish, which would fail."""
    flow.change(keepalive_interval=600)
    job = make()
    job.streams()
    successor = make()
    successor.streams()
    end = job.end()
    assert end.outcome.kind == "TakenOver" and "of the task 't' in the run 'r' of the DAG 'd'" in end.outcome.error


def test_a_job_that_was_killed_falls_silent(flow: Flow, make: MakeJob, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(alive, "_SHORTEST", 2.0)
    job = make()
    job.streams()
    job.send(signal.SIGKILL)
    end = job.end()
    assert end.lost and end.outcome.transient and "has not reported" in end.outcome.error
    found = watch.still_runs(flow.pipeline, job.identity)
    assert found is not None and found.lost


def test_a_frozen_job_is_fenced_and_publishes_nothing_when_it_wakes(
    flow: Flow, make: MakeJob, caplog: pytest.LogCaptureFixture
) -> None:
    """A host that stood still, or was cut off, and comes back."""
    began = time.time()
    job = make()
    job.streams()
    _insert(flow, 1, 100)
    until(lambda: len(_published(flow)) == 100, "its records")
    job.send(signal.SIGSTOP)
    _insert(flow, 101, 200)
    assert not stop.stop(flow.pipeline, job.identity, timeout=2.0)
    assert "has not answered" in caplog.text and "publishes nothing any more" in caplog.text
    with psycopg.connect(flow.dsn) as connection:
        row = connection.execute(
            "SELECT active FROM pg_replication_slots WHERE slot_name = %s", [flow.pipeline.slot]
        ).fetchone()
    assert row == (False,)
    found = flow.job
    assert found is not None and found.state == "stopped"
    # a task that still waits for this very job submits it again
    assert job.end().asked and not asked_meanwhile(flow.pipeline, began)
    successor = make()
    successor.streams()
    # whoever stops it once more does not touch the successor
    assert stop.stop(flow.pipeline, job.identity, timeout=1.0)
    assert job.record is not None and job.record.claim and not fence(flow.pipeline, job.record.claim, "end")
    assert [identity["id"] for _, identity in orphans.unfinished(flow.pipeline, flow.name)] == [successor.id]
    job.send(signal.SIGCONT)
    _insert(flow, 201, 300)
    until(lambda: len(_published(flow)) >= 300, "all records")
    assert job.process.wait(60) is not None
    time.sleep(1.0)
    assert _published(flow) == list(range(1, 301))
    assert successor.process.poll() is None, successor.log.read_text()


def test_a_stop_that_another_job_has_answered_is_not_undone(flow: Flow, make: MakeJob) -> None:
    """Whoever waits for the first one, as a triggerer that was away, does not start it again."""
    began = time.time()
    first = make()
    first.streams()
    second = make()
    until(lambda: first.process.poll() is not None, "the end of the one that was taken over")
    second.streams()
    assert not asked_meanwhile(flow.pipeline, began)
    _stop(flow)
    assert asked_meanwhile(flow.pipeline, began) and not asked_meanwhile(flow.pipeline, time.time())


def test_a_job_that_begins_after_it_was_given_up_takes_nothing(flow: Flow, make: MakeJob, tmp_path: Path) -> None:
    """It waited in a queue, was replaced, and begins."""
    late = Job(flow, tmp_path / "late", begin=False)
    assert not stop.stop(flow.pipeline, late.identity, timeout=1.0, final=False)
    successor = make()
    successor.streams()
    late.begin()
    assert late.process.wait(60) == 0, late.log.read_text()
    _insert(flow, 1, 10)
    until(lambda: len(_published(flow)) == 10, "its records")
    assert successor.process.poll() is None, successor.log.read_text()


@pytest.mark.parametrize("retire", [pytest.param(False, marks=pytest.mark.long), True])
def test_the_command_fences_a_job_that_does_not_answer(flow: Flow, make: MakeJob, retire: bool) -> None:
    began = time.time()
    job = make()
    job.streams()
    job.send(signal.SIGSTOP)
    said = _stop(flow, "--timeout", "2", *(["--retire"] if retire else []))
    assert f"process {job.process.pid}" in said
    found = status.report(flow.pipeline)
    assert found.job is not None and (found.job.state, found.job.retired) == ("stopped", retire)
    assert found.slot is not None and found.slot.active_pid is None
    assert not job.end().asked and asked_meanwhile(flow.pipeline, began)
    job.send(signal.SIGCONT)
    # it finds the claim, or the request, whichever it reads first
    job.process.wait(60)
    assert "was taken over by" in (log := job.log.read_text()) or "Asked to stop" in log


@pytest.mark.parametrize("by_airflow", [True, pytest.param(False, marks=pytest.mark.long)])
def test_the_command_ends_the_processes_of_a_job_on_this_host(
    flow: Flow, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, by_airflow: bool
) -> None:
    """Of one that Airflow has submitted, whose record says where its folder is, and of one of the command itself."""
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    folder = tmp_path / ("stream" if by_airflow else "bottledwater-run-1")
    folder.mkdir()
    job_id = uuid.uuid4().hex if by_airflow else ""
    if by_airflow:
        here = socket.gethostname()
        submitted.announce(
            flow.pipeline, job_id, "stream", Owner("d", "r", "t", -1, here, str(folder), "spark"), "", ""
        )
        run_directory.write(folder, run_directory.Submission(job_id, "stream"))
    command = process_job.command("stream", flow.pipeline.write(folder), job_id)
    supervise.start(folder, command, dict(os.environ))
    try:
        until(lambda: (r := flow.job) and r.state == "streaming", "it streams")
        driver = run_directory.read(folder, run_directory.Driver)
        assert driver is not None
        os.kill(driver.pid, signal.SIGSTOP)
        said = _stop(flow, "--timeout", "2")
        assert not supervise.running(folder)
        assert "End what is left" not in said
        assert not list(folder.glob("pipeline-*"))
    finally:
        supervise.stop(folder, timeout=1)


def test_the_command_cancels_the_application_of_a_job(
    flow: Flow, make: MakeJob, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    job = make()
    job.streams()
    job.send(signal.SIGSTOP)
    # as one that runs in YARN would have reported
    record = until(lambda: (r := job.record) and r.claim and r, "its claim")
    assert record.owner is not None
    record.application, record.owner = "application_1_2", replace(record.owner, master="yarn")
    control_topic.write(flow.pipeline.kafka, {job_key(job.id): control_records.encode(record)})
    (tmp_path / "spark-class").write_text(f'#!/bin/sh\necho "$*" > {tmp_path}/called\n')
    (tmp_path / "spark-class").chmod(0o755)
    monkeypatch.setattr(submit, "environment", lambda *_, **__: {"PATH": f"{tmp_path}:/bin"})
    said = _stop(flow, "--timeout", "2")
    assert (tmp_path / "called").read_text().endswith("application -kill application_1_2\n")
    assert "End what is left" not in said


def test_the_end_of_a_killed_job_is_reported_by_its_supervisor(flow: Flow, tmp_path: Path) -> None:
    """So that nobody, wherever he is, has to wait for heartbeats that do not come."""
    job_id = uuid.uuid4().hex
    folder = tmp_path / "run"
    folder.mkdir()
    run_directory.write(folder, Submission(job_id, "stream"))
    command = process_job.command("stream", flow.pipeline.write(folder), job_id)
    extras: tuple[dict[str, str], ...] = ({}, UNREPORTED)
    for extra in extras:
        line = logging.makeLogRecord({"levelname": "ERROR", "msg": f"It is {'a row' if extra else 'told'}.", **extra})
        with (folder / supervise.LOG).open("a") as log:
            log.write(f"{formatter().format(line)}\n")
    supervise.start(folder, command, dict(os.environ))
    try:
        identity: Any = {"id": job_id, "folder": str(folder), "host": "elsewhere", "application": "", "master": "spark"}
        assert watch.still_runs(flow.pipeline, identity) is None
        driver = until(lambda: run_directory.read(folder, run_directory.Driver), "its driver")
        os.kill(driver.pid, signal.SIGKILL)
        began = time.monotonic()
        watching = JobWatch(flow.pipeline, identity, start_timeout=60, write=lambda level, line: None)
        end = until(watching.fetch, "its end")
        watching.close()
        assert time.monotonic() - began < 30 and not end.lost
        assert end.outcome.transient and "exit code -9" in end.outcome.error
        assert "It is told." in end.outcome.error and "It is a row." not in f"{end.outcome.error} {end.log}"
        assert not list(folder.glob("pipeline-*"))
    finally:
        supervise.stop(folder, timeout=1)
