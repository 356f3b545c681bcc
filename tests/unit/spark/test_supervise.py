"""The supervisor of client mode, with shells in place of Spark."""

from __future__ import annotations

import json
import os
import signal
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from airflow_bottledwater import processes
from airflow_bottledwater.errors import Outage, RecordError, StopRequested
from airflow_bottledwater.spark import job, supervise
from airflow_bottledwater.spark.carry import pack


def until(found: Callable[[], object], timeout: float = 15) -> None:
    deadline = time.monotonic() + timeout
    while not found():
        assert time.monotonic() < deadline
        time.sleep(0.02)


def start(folder: Path, script: str) -> int:
    """Start a shell as the job; returns its supervisor's process id."""
    (folder / "pipeline-x.json").write_text("secret")
    supervise.start(folder, ["bash", "-c", script], dict(os.environ))
    assert supervise.running(folder)
    return int(json.loads((folder / "supervisor.json").read_text())["pid"])


DRIVER = (
    f"{sys.executable} -c 'import os, json, time, signal, sys;"
    " signal.signal(15, lambda *_: sys.exit(0));"
    ' open(os.environ["BOTTLEDWATER_RUN_DIRECTORY"] + "/driver.json", "w").write(json.dumps({"pid": os.getpid()}));'
    " time.sleep(100)'"
)


def test_a_job_is_known_at_once_and_leaves_its_exit_code_and_log(tmp_path: Path) -> None:
    start(tmp_path, "echo hello; sleep 0.5; exit 7")
    assert supervise.exit_code(tmp_path) is None
    until(lambda: not supervise.running(tmp_path))
    assert supervise.exit_code(tmp_path) == 7
    assert supervise.log_tail(tmp_path) == "hello"
    # the secrets are gone
    assert not list(tmp_path.glob("pipeline-*"))
    assert supervise.stop(tmp_path)


def test_stopped_the_driver_ends_in_order(tmp_path: Path) -> None:
    start(tmp_path, DRIVER + "; exit 3")
    until((tmp_path / "driver.json").exists)
    started = time.monotonic()
    assert supervise.stop(tmp_path)
    assert time.monotonic() - started < 5
    assert supervise.exit_code(tmp_path) == 3


def test_what_does_not_end_is_killed_with_its_children(tmp_path: Path) -> None:
    pid = start(tmp_path, "trap '' TERM; (trap '' TERM; sleep 1000) & sleep 1001")
    until(lambda: len(processes.family(pid)) >= 4)
    members = processes.family(pid)
    assert supervise.stop(tmp_path, timeout=0.5)
    assert not processes.alive(members)
    assert not list(tmp_path.glob("pipeline-*"))


def test_without_its_supervisor_a_job_still_runs_and_can_be_stopped(tmp_path: Path) -> None:
    pid = start(tmp_path, DRIVER)
    until((tmp_path / "driver.json").exists)
    members = processes.family(pid)
    os.kill(pid, signal.SIGKILL)
    until(lambda: processes.started(pid) is None)
    assert supervise.running(tmp_path)
    started = time.monotonic()
    assert supervise.stop(tmp_path)
    assert time.monotonic() - started < 5
    assert not processes.alive(members) and not supervise.running(tmp_path)
    assert not list(tmp_path.glob("pipeline-*"))


def test_a_killed_job_takes_its_family_with_it(tmp_path: Path) -> None:
    pid = start(tmp_path, "sleep 1000 & sleep 1001")
    until(lambda: len(processes.family(pid)) >= 4)
    members = processes.family(pid)
    (child,) = (p for p in members if Path(f"/proc/{p}/stat").read_text().split()[3] == str(pid))
    os.kill(child, signal.SIGKILL)
    until(lambda: not supervise.running(tmp_path))
    assert not processes.alive(members)
    assert supervise.exit_code(tmp_path) == -9 and supervise.outcome(tmp_path) is None


def test_another_process_of_the_same_id_is_not_the_job(tmp_path: Path) -> None:
    (tmp_path / "supervisor.json").write_text(json.dumps({"pid": os.getpid(), "started": 1}))
    assert not supervise.running(tmp_path)
    assert supervise.stop(tmp_path)


def test_an_empty_folder_is_no_job(tmp_path: Path) -> None:
    assert not supervise.running(tmp_path)
    assert supervise.stop(tmp_path)
    assert (supervise.outcome(tmp_path), supervise.exit_code(tmp_path), supervise.log_tail(tmp_path)) == (
        None,
        None,
        "",
    )


# ------------------------------------------------------------------ the job's side
@pytest.mark.parametrize(
    ("raised", "code", "transient"),
    [
        (RecordError("too large"), job.EXIT_FAILED, False),
        (RuntimeError(f"py4j … {pack(Outage('broker away'))}"), job.EXIT_TRANSIENT, True),
        (ValueError("a bug"), job.EXIT_FAILED, False),
        # the JVM was killed before the driver was
        (ConnectionRefusedError(111, "refused"), job.EXIT_TRANSIENT, True),
    ],
)
def test_a_jobs_error_is_left_for_whoever_asks(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, raised: Exception, code: int, transient: bool
) -> None:
    def work(*_: object) -> dict[str, object]:
        raise raised

    assert _run(tmp_path, monkeypatch, work) == code
    found = supervise.outcome(tmp_path)
    assert found is not None and (found["ok"], found["transient"]) == (False, transient)
    assert json.loads((tmp_path / "driver.json").read_text()) == {"pid": os.getpid()}


def test_a_job_that_was_stopped_says_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Or a retry would take it for one that is finished."""

    def asked(*_: object) -> dict[str, object]:
        raise StopRequested("asked")

    def told(*arguments: object) -> dict[str, object]:
        os.kill(os.getpid(), signal.SIGTERM)
        return {"position": "0/5"}

    for work in (asked, told):
        assert _run(tmp_path, monkeypatch, work) == job.EXIT_OK
        found = supervise.outcome(tmp_path)
        assert found is not None and found["ok"] and found["stopped"]
    assert _run(tmp_path, monkeypatch, lambda *_: {"position": "0/5"}) == job.EXIT_OK
    assert supervise.outcome(tmp_path) == {"ok": True, "position": "0/5"}


def _run(folder: Path, monkeypatch: pytest.MonkeyPatch, work: Callable[..., dict[str, object]]) -> int:
    monkeypatch.setenv(supervise.RUN_DIRECTORY, str(folder))
    monkeypatch.setattr(job, "load", lambda path: None)
    kept = {signum: signal.getsignal(signum) for signum in (signal.SIGTERM, signal.SIGINT)}
    try:
        return job._run(work, "x", False)
    finally:
        for signum, handler in kept.items():
            signal.signal(signum, handler)
