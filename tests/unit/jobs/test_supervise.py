"""The supervisor of client mode, with shells in place of Spark."""

from __future__ import annotations

import contextlib
import json
import logging
import os
import shutil
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from airflow_bottledwater import processes
from airflow_bottledwater.errors import Outage, RecordError, StopRequested
from airflow_bottledwater.jobs import run_directory, submitted, supervise
from airflow_bottledwater.jobs.log import UNREPORTED, formatter
from airflow_bottledwater.jobs.run_directory import Exit, Submission, Supervisor
from airflow_bottledwater.model.outcome import Outcome
from airflow_bottledwater.pipeline.settings import Settings
from airflow_bottledwater.spark import job
from airflow_bottledwater.spark.error_codec import pack
from airflow_bottledwater.state import control_topic
from tests.support import stand_in
from tests.support.waiting import until

pytestmark = pytest.mark.slow


@pytest.fixture(autouse=True)
def nothing_is_left(tmp_path: Path) -> Iterator[None]:
    """Whatever a test has started ends with it, also when it fails."""
    yield
    for path in tmp_path.rglob(Supervisor.FILE):
        found = run_directory.read(path.parent, Supervisor)
        if found is not None and found.started is not None and processes.started(found.pid) == found.started:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(found.pid, signal.SIGKILL)


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
    start(tmp_path, f"echo hello; while ! test -e {tmp_path}/go; do sleep 0.05; done; exit 7")
    assert supervise.exit_code(tmp_path) is None
    (tmp_path / "go").touch()
    until(lambda: not supervise.running(tmp_path), "the job ends")
    assert supervise.exit_code(tmp_path) == 7
    assert supervise.log_tail(tmp_path) == "hello"
    # the secrets are gone
    assert not list(tmp_path.glob("pipeline-*"))
    assert supervise.stop(tmp_path)


def test_stopped_the_driver_ends_in_order(tmp_path: Path) -> None:
    start(tmp_path, DRIVER + "; exit 3")
    until((tmp_path / "driver.json").exists, "the driver says who it is")
    started = time.monotonic()
    assert supervise.stop(tmp_path)
    # in order, and not by force after the grace time
    assert time.monotonic() - started < supervise.GRACE / 2
    assert supervise.exit_code(tmp_path) == 3


@pytest.fixture
def full_disk(monkeypatch: pytest.MonkeyPatch) -> None:
    def write(*_: Any) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(run_directory, "write", write)


def test_on_a_full_disk_a_job_is_stopped_all_the_same(tmp_path: Path, request: pytest.FixtureRequest) -> None:
    start(tmp_path, DRIVER)
    until((tmp_path / "driver.json").exists, "the driver runs")
    request.getfixturevalue("full_disk")
    assert supervise.stop(tmp_path) and not supervise.running(tmp_path)


@pytest.mark.usefixtures("full_disk")
def test_on_a_full_disk_a_job_reports_its_end_in_kafka(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    ended: list[Outcome] = []

    class Reporter:
        def __init__(self, *_: Any) -> None:
            pass

        def start(self) -> None:
            pass

        def finish(self, outcome: Outcome) -> bool:
            ended.append(outcome)
            return True

    monkeypatch.setattr(submitted, "JobReporter", Reporter)
    monkeypatch.setenv(supervise.RUN_DIRECTORY, str(tmp_path))
    monkeypatch.setattr(signal, "signal", lambda *_: None)
    (tmp_path / "settings.json").write_text(json.dumps({"postgres": "host=db", "format": "json"}))
    file = job.SettingsFile(str(tmp_path / "settings.json"), {})

    def work(*_: Any) -> dict[str, Any]:
        job.leave(run_directory.ProgressReport(1, 2, 3, 4.0))
        return {"rows": 1}

    assert job._run("snapshot", work, file, "j", False) == job.EXIT_OK
    assert ended == [Outcome(ok=True, counts={"rows": 1})]


def test_what_does_not_end_is_killed_with_its_children(tmp_path: Path) -> None:
    pid = start(tmp_path, "trap '' TERM; (trap '' TERM; sleep 1000) & sleep 1001")
    until(lambda: len(processes.family(pid)) >= 4, "all its processes run")
    members = processes.family(pid)
    assert supervise.stop(tmp_path, timeout=0.5)
    assert not processes.alive(members)
    assert not list(tmp_path.glob("pipeline-*"))


def test_without_its_supervisor_a_job_still_runs_and_can_be_stopped(tmp_path: Path) -> None:
    pid = start(tmp_path, DRIVER)
    until((tmp_path / "driver.json").exists, "the driver says who it is")
    members = processes.family(pid)
    os.kill(pid, signal.SIGKILL)
    until(lambda: processes.started(pid) is None, "the supervisor is gone")
    assert supervise.running(tmp_path)
    started = time.monotonic()
    assert supervise.stop(tmp_path)
    assert time.monotonic() - started < supervise.GRACE / 2
    assert not processes.alive(members) and not supervise.running(tmp_path)
    assert not list(tmp_path.glob("pipeline-*"))


def test_a_killed_job_takes_its_family_with_it(tmp_path: Path) -> None:
    pid = start(tmp_path, "sleep 1000 & sleep 1001")
    until(lambda: len(processes.family(pid)) >= 4, "all its processes run")
    members = processes.family(pid)
    (child,) = (p for p in members if Path(f"/proc/{p}/stat").read_text().split()[3] == str(pid))
    os.kill(child, signal.SIGKILL)
    until(lambda: not supervise.running(tmp_path), "the job ends")
    assert not processes.alive(members)
    assert supervise.exit_code(tmp_path) == -9 and supervise.outcome(tmp_path) is None


def test_another_process_of_the_same_id_is_not_the_job(tmp_path: Path) -> None:
    (tmp_path / "supervisor.json").write_text(json.dumps({"pid": os.getpid(), "started": 1}))
    assert not supervise.running(tmp_path)
    assert supervise.stop(tmp_path)


def test_a_supervisor_that_was_gone_before_it_could_be_looked_at_does_not_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ended = subprocess.Popen(["true"], start_new_session=True)
    ended.wait()
    monkeypatch.setattr(supervise.subprocess, "Popen", lambda *_, **__: ended)
    supervise.start(tmp_path, ["true"], {})
    assert json.loads((tmp_path / "supervisor.json").read_text())["started"] is None
    assert not supervise.running(tmp_path)
    started = time.monotonic()
    assert supervise.stop(tmp_path) and time.monotonic() - started < 30


# ------------------------------------------------------------------ who started it is gone
_STARTER = """
import os, sys, time
from pathlib import Path
from airflow_bottledwater.jobs import supervise
ends = sys.argv[3] == "ends"
supervise.start(Path(sys.argv[1]), ["bash", "-c", sys.argv[2]], dict(os.environ), ends_with_parent=ends)
print("started", flush=True)
time.sleep(100)
"""


@pytest.mark.parametrize("how", ["ends", "detached"])
def test_a_job_of_a_command_that_is_killed_ends_and_takes_its_settings_with_it(tmp_path: Path, how: str) -> None:
    folder = tmp_path / "run"
    folder.mkdir()
    (folder / "pipeline-x.json").write_text("secret")
    starter = subprocess.Popen(
        [sys.executable, "-c", _STARTER, str(folder), DRIVER + "; sleep 0.3", how], stdout=subprocess.PIPE
    )
    assert starter.stdout is not None and starter.stdout.readline() == b"started\n"
    until((folder / "driver.json").exists, "the driver says who it is")
    pid = json.loads((folder / "supervisor.json").read_text())["pid"]
    members = processes.family(pid)
    starter.kill()
    starter.wait()
    if how == "detached":
        time.sleep(1.0)
        assert processes.alive(members) and supervise.running(folder)
        assert supervise.stop(folder)
        return
    until(lambda: not processes.alive(members), "the job ends")
    until(lambda: not folder.exists(), "its folder is gone")


_ONE_AFTER_ANOTHER = """
import os, pathlib, sys, time
from airflow_bottledwater.jobs import supervise
for number, command in enumerate([["sleep", "100"], ["true"], ["true"], ["true"]]):
    folder = pathlib.Path(sys.argv[1]) / str(number)
    folder.mkdir()
    supervise.start(folder, command, dict(os.environ), ends_with_parent=True)
    while number and supervise.running(folder):
        time.sleep(0.05)
    print(len(os.listdir("/proc/self/fd")))
assert supervise.running(folder.parent / "0")
assert supervise.stop(folder.parent / "0", timeout=0)
"""


def test_a_process_that_starts_one_job_after_another_keeps_no_descriptors_of_those_that_have_ended(
    tmp_path: Path,
) -> None:
    # in a process of its own: what other tests have left in this one opens and closes descriptors meanwhile
    done = subprocess.run(
        [sys.executable, "-c", _ONE_AFTER_ANOTHER, str(tmp_path)], capture_output=True, text=True, check=True
    )
    _, *opened = map(int, done.stdout.split())
    assert len(opened) == 3 and len(set(opened)) == 1


# ------------------------------------------------------------------ what is left
def test_what_a_killed_job_has_left_is_removed_by_a_later_start(tmp_path: Path) -> None:
    long_ago = time.time() - 8 * 86400
    folders = {
        name: tmp_path / name for name in ("lives", "died", "old", "starting", "foreign", "foreign-old", "never")
    }
    for name, folder in folders.items():
        folder.mkdir()
        (folder / "pipeline-x.json").write_text("secret")
        host = "elsewhere" if name.startswith("foreign") else socket.gethostname()
        mine = {"pid": os.getpid(), "started": processes.started(os.getpid()) if name == "lives" else 1, "host": host}
        if name not in ("starting", "never"):
            (folder / "supervisor.json").write_text(json.dumps(mine))
        if name in ("old", "foreign-old", "never", "lives"):
            for path in (*folder.iterdir(), folder):
                os.utime(path, (long_ago, long_ago))
    supervise.sweep([*folders.values(), tmp_path / "nowhere"])
    secrets = {name for name, folder in folders.items() if (folder / "pipeline-x.json").exists()}
    assert secrets == {"lives", "starting", "foreign"}
    assert {name for name, folder in folders.items() if folder.exists()} == {"lives", "died", "starting", "foreign"}


# ------------------------------------------------------------------ the log
def test_a_log_is_rotated_and_followed_over_it(tmp_path: Path) -> None:
    reader, lines = supervise.LogReader(tmp_path), list[str]()
    with (tmp_path / "job.log").open("ab", buffering=0) as log:  # as the job's processes have it
        for i in range(3000):
            log.write(b"line %d\n" % i)
            if i % 7 == 0:
                supervise.rotate(tmp_path, 5000)
            if i % 300 == 0:
                lines += reader.read(1 << 20)
    while more := reader.read(1 << 20):
        lines += more
    assert lines == [f"line {i}" for i in range(3000)]
    sizes = {path.name: path.stat().st_size for path in tmp_path.iterdir()}
    assert set(sizes) == {"job.log", "job.log.1"} and max(sizes.values()) < 6000
    # who comes later reads the older part first, or only the end
    kept = [*(tmp_path / "job.log.1").read_text().splitlines(), *(tmp_path / "job.log").read_text().splitlines()]
    assert supervise.LogReader(tmp_path).read(1 << 20) == kept == lines[-len(kept) :]
    (tmp_path / "job.log").write_bytes(b"line 3000\n")
    assert supervise.LogReader(tmp_path, past=100).read(100) == ["line 3000"]
    assert supervise.log_tail(tmp_path, 1) == "line 3000"
    assert len(supervise.log_tail(tmp_path, 40).splitlines()) == 40


def test_lines_with_values_of_rows_are_in_no_error(tmp_path: Path) -> None:
    """What a log's end is put into goes to those who may not see rows: mails, events, OpenLineage."""
    records: tuple[tuple[str, dict[str, str]], ...] = (
        ("Reading public.a.", {}),
        ("It is the row with email = alice\n@example.com.", UNREPORTED),
        ("The end.", {}),
    )
    for message, extra in records:
        line = formatter().format(logging.makeLogRecord({"levelname": "ERROR", "msg": message, **extra}))
        with (tmp_path / supervise.LOG).open("a") as log:
            log.write(f"{line}\n")
    told = [line.split(" ERROR ")[1] for line in supervise.log_tail(tmp_path).splitlines()]
    assert told == ["Reading public.a.", "The end."]
    with (tmp_path / supervise.LOG).open("a") as log:
        log.write("MemoryError\n")
    assert supervise.log_tail(tmp_path, 1) == "MemoryError", "what others say is told"
    assert "alice" not in supervise.final_outcome(tmp_path).error
    assert "alice" in "".join(supervise.LogReader(tmp_path).read(1 << 20))
    long = formatter().format(logging.makeLogRecord({"levelname": "ERROR", "msg": "alice" * 20_000, **UNREPORTED}))
    (tmp_path / supervise.LOG).write_text(f"{long}\nThe end.\n")
    assert supervise.log_tail(tmp_path) == "The end."


def test_a_supervisor_bounds_the_log(tmp_path: Path) -> None:
    limit = supervise.LOG_BYTES
    start(
        tmp_path,
        f"head -c {limit + 5} /dev/zero | tr '\\0' x; echo; while ! test -e {tmp_path}/go; do sleep 0.05; done; echo "
        "end; sleep 1000",
    )
    until((tmp_path / "job.log.1").exists, "the log is rotated")
    (tmp_path / "go").touch()
    until(lambda: supervise.log_tail(tmp_path, 1) == "end", "the log goes on")
    assert (tmp_path / "job.log").stat().st_size < 100
    assert (tmp_path / "job.log.1").stat().st_size >= limit
    assert supervise.stop(tmp_path, timeout=0.5)


def test_a_supervisor_keeps_its_files_younger_than_what_is_cleaned_by_age(tmp_path: Path) -> None:
    old, young = tmp_path / "pipeline-1.json", tmp_path / "driver.json"
    for path, days in ((old, 9), (young, 0.5)):
        path.write_text("{}")
        os.utime(path, (time.time() - days * 86400,) * 2)
    # Spark's, which is empty for as long as the stream runs
    (empty := tmp_path / "spark-1" / "pyspark-1").mkdir(parents=True)
    os.utime(empty, (time.time() - 9 * 86400,) * 2)
    (tmp_path / supervise.LOG).touch()
    before = young.stat().st_mtime
    supervise._keep(tmp_path)
    assert time.time() - old.stat().st_mtime < 60 and young.stat().st_mtime == before
    assert time.time() - empty.stat().st_mtime < 60


def test_a_supervisor_that_cannot_be_recorded_keeps_its_job(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: Any) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(supervise, "_introduce", full)
    monkeypatch.setattr(supervise.signal, "signal", lambda *_: None)
    monkeypatch.setattr(supervise.processes, "family", lambda _: {})
    assert supervise._supervise(tmp_path, ["true"], False) == 0


def test_a_full_disk_does_not_end_the_supervisor(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its log is on the same disk, so that it cannot even say so."""
    (tmp_path / supervise.LOG).write_bytes(b"x" * 10)
    monkeypatch.setattr(supervise.rotate, "__defaults__", (5,))

    def write(*_: Any) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(shutil, "copyfileobj", write)
    monkeypatch.setattr(sys, "stderr", SimpleNamespace(write=write, flush=write))
    run_directory.write(tmp_path, Submission("id", "stream"))
    (tmp_path / "pipeline-x.json").write_text("no settings")
    supervise._keep(tmp_path)
    supervise._report_end(tmp_path)
    assert (tmp_path / supervise.LOG).read_bytes() == b"x" * 10
    assert not (tmp_path / f".{supervise.OLD_LOG}").exists()


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
    assert found is not None and (found.ok, found.transient) == (False, transient)
    assert json.loads((tmp_path / "driver.json").read_text()) == {"pid": os.getpid()}


def test_a_job_that_was_stopped_says_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Or a retry would take it for one that is finished."""

    def asked(*_: object) -> dict[str, object]:
        raise StopRequested("asked")

    def through_kafka(
        _pipeline: object, _path: object, _bounded: object, stopped: threading.Event
    ) -> dict[str, object]:
        stopped.set()
        os.kill(os.getpid(), signal.SIGTERM)  # too late to be the reason
        return {"position": "0/5"}

    for work in (asked, through_kafka):
        assert _run(tmp_path, monkeypatch, work) == job.EXIT_OK
        found = supervise.outcome(tmp_path)
        assert found is not None and found.ok and found.stopped
    assert _run(tmp_path, monkeypatch, lambda *_: {"position": "0/5"}) == job.EXIT_OK
    assert supervise.outcome(tmp_path) == Outcome(ok=True, counts={"position": "0/5"})


@pytest.mark.parametrize("signum", [signal.SIGTERM, signal.SIGINT, signal.SIGHUP])
@pytest.mark.parametrize("raised", [None, StopRequested("while it waited"), RuntimeError("SparkContext was shut down")])
def test_a_signal_that_nobody_asked_for_is_no_stop(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, signum: int, raised: Exception | None
) -> None:
    """A host that reboots sends it: the job is to be submitted again."""

    def work(*_: object) -> dict[str, object]:
        os.kill(os.getpid(), signum)
        if raised is not None:
            raise raised
        return {"position": "0/5"}

    assert _run(tmp_path, monkeypatch, work) == job.EXIT_TRANSIENT
    found = supervise.outcome(tmp_path)
    assert found is not None and (found.ok, found.transient, found.kind) == (False, True, "Interrupted")
    assert signal.Signals(signum).name in found.error and "bottledwater stop" in found.error
    # the same signal behind a request of ours is a stop
    supervise.stop(tmp_path)
    if not isinstance(raised, RuntimeError):
        assert _run(tmp_path, monkeypatch, work) == job.EXIT_OK
        found = supervise.outcome(tmp_path)
        assert found is not None and found.ok and found.stopped


#: a real job's entry point, with a work that waits to be stopped
JOB = f"{sys.executable} -m tests.support.stand_in"


@pytest.mark.parametrize(
    ("who", "signum"),
    [
        pytest.param("supervisor", signal.SIGTERM, id="supervisor"),
        # systemd's SendSIGHUP, for example
        pytest.param("supervisor", signal.SIGHUP, id="supervisor, SIGHUP"),
        pytest.param("driver", signal.SIGTERM, id="driver"),
        pytest.param("we", signal.SIGTERM, id="we"),
    ],
)
def test_only_our_own_stop_is_one(tmp_path: Path, who: str, signum: signal.Signals) -> None:
    pid = start(tmp_path, JOB)
    until((tmp_path / "driver.json").exists, "the driver says who it is")
    if who == "we":
        assert supervise.stop(tmp_path)
    else:
        os.kill(pid if who == "supervisor" else json.loads((tmp_path / "driver.json").read_text())["pid"], signum)
        until(lambda: not supervise.running(tmp_path), "the job ends")
    found = supervise.outcome(tmp_path)
    assert found is not None, supervise.log_tail(tmp_path)
    assert (found.ok, found.stopped, found.transient) == ((True, True, False) if who == "we" else (False, False, True))
    assert supervise.exit_code(tmp_path) == (job.EXIT_OK if who == "we" else job.EXIT_TRANSIENT)


def test_the_end_that_a_supervisor_reports_has_lines_of_ours_only(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pipeline = Settings.of(postgres="host=db", kafka={"bootstrap.servers": "k"}, format="json")
    pipeline.write(tmp_path)
    run_directory.write(tmp_path, Submission("id", "stream"))
    run_directory.write(tmp_path, Exit(-9))
    stamp = "2026-01-02 03:04:05,678 INFO"
    lines = [
        "a password, who knows",
        *(f"{stamp} {number} {'x' * 2000}" for number in range(20)),
        f"{stamp} last words",
    ]
    (tmp_path / supervise.LOG).write_text("\n".join(lines) + "\n")
    written: list[dict[str, Any]] = []
    monkeypatch.setattr(submitted, "read", lambda *_: None)
    monkeypatch.setattr(control_topic, "write", lambda _, records: written.extend(records.values()))
    supervise._report_end(tmp_path)
    (record,) = written
    error = record["outcome"]["error"]
    assert "password" not in json.dumps(record)
    assert len(error) <= 4000 and error.startswith("The job exited without reporting a result (exit code -9).")
    assert error.endswith("last words")


def test_what_was_stopped_before_it_started_does_not_start(tmp_path: Path) -> None:
    assert supervise.stop(tmp_path)
    with pytest.raises(StopRequested):
        supervise.start(tmp_path, ["true"], dict(os.environ))
    assert not supervise.running(tmp_path)


def _run(folder: Path, monkeypatch: pytest.MonkeyPatch, work: Callable[..., dict[str, object]]) -> int:
    monkeypatch.setenv(supervise.RUN_DIRECTORY, str(folder))
    for where, name in ((submitted, "JobReporter"), (job.SettingsFile, "load"), (job, "_note")):
        monkeypatch.setattr(where, name, getattr(where, name))  # to have it back
    kept = {signum: signal.getsignal(signum) for signum in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)}
    try:
        return stand_in.run(work)
    finally:
        for signum, handler in kept.items():
            signal.signal(signum, handler)
