"""When a job counts as running, ended or dead, by its record and this host's clock."""

from __future__ import annotations

import os
import socket
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from airflow_bottledwater.errors import Outage
from airflow_bottledwater.jobs import run_directory, supervise, watch
from airflow_bottledwater.jobs.watch import JobWatch
from airflow_bottledwater.model.outcome import Outcome
from airflow_bottledwater.state.control_records import JobRecord, encode
from airflow_bottledwater.state.control_topic import ControlTopic

PIPELINE: Any = SimpleNamespace(kafka={"bootstrap.servers": "nowhere:1"}, slot="orders")
IDENTITY: Any = {"id": "j", "folder": "", "host": "elsewhere", "application": "", "master": "yarn"}


class World:
    """Monotonic time, and the job's record as Kafka has it."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now, self.changed, self.away, self.refuses = 1000.0, 0.0, False, False
        self.record: JobRecord | None = None
        #: what is read only when the topic is read to its end
        self.late: JobRecord | None = None
        monkeypatch.setattr(watch.time, "monotonic", lambda: self.now)
        monkeypatch.setattr(ControlTopic, "_of", {})
        monkeypatch.setattr(ControlTopic, "get", self.get)
        monkeypatch.setattr(ControlTopic, "write", self.take)

    def get(self, key: str, *, now: bool = False) -> tuple[dict[str, Any] | None, float]:
        assert key == "job/j"
        if self.away:
            raise Outage("Kafka is away")
        if now and self.late is not None:
            self.writes(self.late)
        return (None if self.record is None else encode(self.record)), self.changed

    def take(self, records: dict[str, Any]) -> None:
        assert records == {"probe": None}
        if self.refuses:
            raise Outage("Kafka has too few brokers")

    def writes(self, record: JobRecord) -> None:
        self.record, self.changed = record, self.now


@pytest.fixture
def world(monkeypatch: pytest.MonkeyPatch) -> World:
    return World(monkeypatch)


def running(**changes: Any) -> JobRecord:
    # the clock of the job's host is wrong: it decides nothing
    return JobRecord("stream", "orders", **{"host": "h", "heartbeat": 2.0, "at": 5e9, **changes})


def watching(lines: list[str] | None = None, identity: Any = IDENTITY) -> JobWatch:
    kept = lines if lines is not None else []
    return JobWatch(PIPELINE, identity, start_timeout=100.0, write=lambda level, line: kept.append(line))


def test_a_job_is_dead_by_the_readers_clock(world: World) -> None:
    world.record = running()
    watch = watching()
    world.now += 30
    assert watch.fetch() is None
    world.writes(running(at=1.0))
    world.now += 30
    assert watch.fetch() is None
    world.now += 1
    found = watch.fetch()
    assert (
        found is not None
        and found.lost
        and found.outcome.transient
        and "on h has not reported for 31 s" in found.outcome.error
    )
    # which writes seldom, is given longer
    world.writes(running(heartbeat=30.0))
    world.now += 299
    assert watch.fetch() is None
    world.now += 2
    assert watch.fetch() is not None


def test_an_outage_of_kafka_is_not_a_jobs_silence(world: World) -> None:
    world.record = running()
    watch = watching()
    world.away = True
    for _ in range(3):
        world.now += 50
        with pytest.raises(Outage):
            watch.fetch()
    world.away = False
    world.now += 29
    assert watch.fetch() is None
    # what was not read in time, because a broker was slow, is read before the verdict
    world.now += 5
    world.late = running(lines=1)
    assert watch.fetch() is None


def test_where_kafka_takes_no_records_a_silence_says_nothing(world: World) -> None:
    """It has too few brokers for min.insync.replicas, say, and answers those who read."""
    world.record = running()
    watch = watching()
    world.refuses = True
    for _ in range(3):
        world.now += 31
        with pytest.raises(Outage):
            watch.fetch()
        world.now += 5
        assert watch.fetch() is None
    world.refuses = False
    world.now += 31
    found = watch.fetch()
    assert found is not None and found.lost


def test_a_job_may_wait_in_a_queue_before_it_begins(world: World) -> None:
    world.record = running(host="")
    watch = watching()
    world.now += 99
    assert watch.fetch() is None
    world.now += 2
    found = watch.fetch()
    assert found is not None and found.lost and "not reported within 101 s" in found.outcome.error


def test_the_end_that_a_job_has_reported_is_its_end(world: World) -> None:
    end = Outcome(ok=False, kind="Refused", error="no such slot")
    world.record = running(outcome=end, asked=True, log=["one", "two"], lines=2)
    lines: list[str] = []
    found = watching(lines).fetch()
    assert found is not None and (found.outcome, found.asked, found.lost, found.log) == (end, True, False, "one\ntwo")
    assert lines == ["one", "two"]


def test_only_new_lines_of_the_record_are_passed_on(world: World) -> None:
    lines: list[str] = []
    watch = watching(lines)
    for count in (1, 3, 3, 50):
        world.writes(
            running(lines=count, log=[f"2026-01-02 03:04:05,678 INFO {n}" for n in range(max(0, count - 40), count)])
        )
        assert watch.fetch() is None
    assert lines == [str(n) for n in (0, 1, 2, *range(10, 50))]


def test_while_kafka_does_not_answer_what_is_seen_here_counts(world: World, tmp_path: Path) -> None:
    here: Any = {**IDENTITY, "host": socket.gethostname(), "folder": str(tmp_path)}
    run_directory.write(tmp_path, run_directory.Submission(here["id"], "stream"))
    watch = watching(lines := [], here)
    world.away = True
    supervise.start(tmp_path, ["sleep", "100"], dict(os.environ))
    try:
        (tmp_path / "job.log").write_text("waits\n")
        with pytest.raises(Outage):
            watch.fetch()
        # another watch may begin, which does not pass it on
        assert lines == ["waits"]
    finally:
        supervise.stop(tmp_path, timeout=0.1)
    found = watch.fetch()
    assert found is not None and found.outcome.transient and "without reporting a result" in found.outcome.error
    run_directory.write(tmp_path, Outcome(ok=True, counts={"position": "0/5"}))
    # Kafka is back, and knows nothing of it
    world.away, world.record = False, running()
    found = watch.fetch()
    assert found is not None and found.outcome == Outcome(ok=True, counts={"position": "0/5"})


def test_a_silence_counts_only_while_kafka_has_answered(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    """A shared reader has seen nothing while the broker was away, and other watches have heard of it."""
    world.record = running()
    watch = watching()
    world.now += 100
    monkeypatch.setattr(watch._shared, "answering", world.now - 30)
    assert watch.fetch() is None
    world.now += 1
    assert watch.fetch() is not None


def test_a_job_whose_processes_are_here_is_not_lost_so_soon(world: World, tmp_path: Path) -> None:
    here: Any = {**IDENTITY, "host": socket.gethostname(), "folder": str(tmp_path)}
    run_directory.write(tmp_path, run_directory.Submission(here["id"], "stream"))
    supervise.start(tmp_path, ["sleep", "100"], dict(os.environ))
    try:
        world.record = running(host=socket.gethostname())
        watch = watching(identity=here)
        world.now += 299
        assert watch.fetch() is None
        # it hangs
        world.now += 2
        found = watch.fetch()
        assert found is not None and found.lost
    finally:
        supervise.stop(tmp_path, timeout=0.1)
