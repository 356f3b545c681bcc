"""What travels with a job's record is bounded: all pipelines of a Kafka share its topic, and each heartbeat writes it
anew."""

from __future__ import annotations

import logging
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from airflow_bottledwater.jobs import run_directory, submitted
from airflow_bottledwater.jobs.log import UNREPORTED
from airflow_bottledwater.jobs.run_directory import Claimed
from airflow_bottledwater.jobs.supervise import RUN_DIRECTORY
from airflow_bottledwater.model.job import Job
from airflow_bottledwater.model.outcome import Outcome
from airflow_bottledwater.pipeline.settings import Settings
from airflow_bottledwater.state.control_records import JobRecord, decode, encode, job_key
from airflow_bottledwater.state.control_topic import ControlTopic

PIPELINE = Settings.of(postgres="host=db", kafka={"bootstrap.servers": "k"}, format="json")


def say(tail: submitted.LogTail, message: str, **extra: object) -> None:
    tail.handle(logging.makeLogRecord({"levelno": logging.INFO, "msg": message, **extra}))


def test_the_log_is_its_last_lines_each_cut() -> None:
    tail = submitted.LogTail()
    for number in range(99):
        say(tail, f"line {number}")
    say(tail, "x" * 1000 + "\nthe same record")
    assert tail.count == 101
    assert len(tail.lines) == 40 and tail.lines[-1] == "the same record"
    assert len(tail.lines[-2]) == 300 and tail.lines[-3].endswith("line 98")


def test_values_of_rows_stay_in_the_log() -> None:
    tail = submitted.LogTail()
    say(tail, "a value", **UNREPORTED)
    say(tail, "no value")
    assert tail.count == 1 and [line.split()[-2:] for line in tail.lines] == [["no", "value"]]


@pytest.fixture
def written(monkeypatch: pytest.MonkeyPatch) -> list[JobRecord]:
    """The records that were written."""
    found: list[JobRecord] = []

    def write(key: str, value: dict[str, Any] | None) -> None:
        record = decode(JobRecord, value)
        assert record is not None
        found.append(record)

    monkeypatch.setattr(ControlTopic, "write", lambda _, records, **__: [write(*each) for each in records.items()])
    monkeypatch.setattr(submitted, "read", lambda *_: None)
    return found


def test_the_log_is_left_out_when_nothing_was_said_for_a_while(
    written: list[JobRecord], monkeypatch: pytest.MonkeyPatch
) -> None:
    now = [1000.0]
    monkeypatch.setattr(submitted, "time", SimpleNamespace(monotonic=lambda: now[0], time=lambda: 1.0))
    tail = submitted.LogTail()
    reporter = submitted.JobReporter(PIPELINE, "id", "stream", tail, lambda: None)
    for seconds, said in ((0, "it begins"), (29, ""), (2, ""), (5, "more"), (1, "")):
        now[0] += seconds
        if said:
            say(tail, said)
        reporter._write(wait=0)
    assert [len(record.log) for record in written] == [1, 1, 0, 2, 2]
    assert [record.lines for record in written] == [1, 1, 1, 2, 2]
    # the end has it in any case
    now[0] += 100
    reporter.finish(Outcome(ok=True))
    assert len(written[-1].log) == 2


@pytest.mark.parametrize("room", [True, False])
def test_a_claim_is_noted_in_the_run_directory_if_there_is_room(
    written: list[JobRecord], monkeypatch: pytest.MonkeyPatch, tmp_path: Path, room: bool
) -> None:
    folder = tmp_path if room else tmp_path / "nowhere"
    monkeypatch.setenv(RUN_DIRECTORY, str(folder))
    reporter = submitted.JobReporter(PIPELINE, "id", "stream", submitted.LogTail(), lambda: None)
    reporter.claimed(Job.next(None, "snapshot"))
    reporter.claimed(job := Job.next(None, "stream"))
    assert run_directory.read(folder, Claimed) == (Claimed(job.id) if room else None)
    assert written[-1].claim == job.id


def test_the_end_that_another_process_reports_is_bounded(written: list[JobRecord]) -> None:
    error = "\n".join(["It was killed.", *("x" * 1000 for _ in range(50)), "the last words"])
    submitted.report_end(PIPELINE, "id", "stream", Outcome(ok=False, error=error), error.splitlines())
    (record,) = written
    assert record.outcome is not None
    assert len(record.outcome.error) == 4000 and record.outcome.error.startswith("It was killed.")
    assert len(record.log) == 40 and max(map(len, record.log)) == 300


def test_the_unfinished_jobs_of_a_slot_are_those_of_every_kind() -> None:
    """Who catches up with marks that no triggerer has seen stops snapshots and verifications, too."""
    records = {kind: JobRecord(kind, "orders") for kind in ("snapshot", "stream", "verify", "pipeline")}
    records["claimed"] = JobRecord("stream", "orders", pipeline="ours")
    others = {
        "ended": JobRecord("verify", "orders", outcome=Outcome(ok=True)),
        "elsewhere": JobRecord("verify", "other"),
        "of another database": JobRecord("stream", "orders", pipeline="theirs"),
    }
    found = {job_key(name): encode(record) for name, record in (records | others).items()}
    assert set(submitted.unfinished(found, "orders", "ours")) == set(records)
