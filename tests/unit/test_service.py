"""The command as a service: restarts, exit codes, probes, and the lines of its log."""

from __future__ import annotations

import errno
import io
import json
import logging
import os
import re
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import click
import pytest
from click.testing import CliRunner
from rich.console import Console

from airflow_bottledwater import cli
from airflow_bottledwater.cli import jobs, restart
from airflow_bottledwater.cli import log as own_log
from airflow_bottledwater.errors import (
    BottledWaterError,
    CredentialsRefused,
    JobDied,
    JobFailed,
    Outage,
    PreflightError,
    Refused,
    SettingError,
    StateError,
    StopRequested,
    TakenOver,
)
from airflow_bottledwater.jobs import fence, health, requests, run_directory, status, supervise
from airflow_bottledwater.jobs import restarts as policy
from airflow_bottledwater.jobs.log import parse
from airflow_bottledwater.jobs.run_directory import Claimed
from airflow_bottledwater.pipeline.settings import Settings
from airflow_bottledwater.provision import create as creation
from tests.support.status import status_of
from tests.unit.jobs.test_health import SLOT

pytestmark = pytest.mark.slow

REQUIRED = ["--postgres", "host=db dbname=shop", "-f", "json"]
_PROGRAM = str(Path(sys.executable).parent / "bottledwater")
PIPELINE = Settings(postgres="host=db")
_START = jobs.start


# ------------------------------------------------------------------ the loop
class Work:
    """Fails in the given ways, one after the other, and then ends."""

    pipeline, claim = PIPELINE, "c"

    def __init__(self, *failures: BottledWaterError, published: bool = False) -> None:
        self.failures, self.published, self.done = list(failures), published, 0

    def once(self) -> None:
        self.done += 1
        if self.failures:
            raise self.failures.pop(0)

    def asked(self) -> bool:
        return False


class Clock(threading.Event):
    """Time that passes only in pauses; :attr:`pauses` are those that were asked for."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        super().__init__()
        self.now, self.pauses = 1000.0, []
        monkeypatch.setattr(restart.time, "time", lambda: self.now)

    def wait(self, timeout: float | None = None) -> bool:
        self.pauses.append(round(timeout or 0, 3))
        self.now += timeout or 0
        return self.is_set()


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    monkeypatch.setattr(restart, "reached", lambda pipeline: None)
    monkeypatch.setattr(requests, "not_begun", lambda *_, **__: pytest.fail("It goes on, or the job has said why."))
    return Clock(monkeypatch)


def test_what_fails_for_a_transient_reason_is_done_again_after_a_pause(clock: Clock) -> None:
    work = Work(Outage("away"), JobDied("died", kind="Interrupted"), Outage("away"))
    restart.keep_running(work, clock)
    assert work.done == 4
    assert clock.pauses == [2, 4, 8]


@pytest.mark.parametrize("error", [JobFailed("lost"), Refused("no")], ids=lambda error: type(error).__name__)
def test_what_fails_for_good_is_not_done_again(clock: Clock, error: BottledWaterError) -> None:
    work = Work(Outage("away"), error)
    with pytest.raises(type(error)):
        restart.keep_running(work, clock)
    assert work.done == 2


def test_it_is_not_done_again_for_ever(clock: Clock, monkeypatch: pytest.MonkeyPatch) -> None:
    told: list[tuple[str, str]] = []
    monkeypatch.setattr(requests, "not_begun", lambda _, why, claim, retry: told.append((why, claim)))
    work = Work(*(Outage("away") for _ in range(100)))
    with pytest.raises(Outage):
        restart.keep_running(work, clock)
    assert work.done == 1 + policy.RESTARTS
    assert clock.pauses == [2, 4, 8, 16, 32, 64, 128, 256, 300, 300]
    assert told == [("away", "c")]


def test_a_job_that_took_a_snapshot_for_a_while_counts_as_well(clock: Clock) -> None:
    work = Work(*(Outage("away") for _ in range(15)), published=True)
    begin = work.once

    def once() -> None:
        clock.now += 601
        begin()

    work.once = once  # type: ignore[method-assign]
    restart.keep_running(work, clock)
    assert clock.pauses == [2] * 15


def test_what_was_asked_to_stop_in_a_pause_is_not_done_again(clock: Clock) -> None:
    work = Work(*(Outage("away") for _ in range(9)))
    work.asked = lambda: clock.now > 1006  # type: ignore[method-assign]
    restart.keep_running(work, clock)
    assert (work.done, clock.pauses) == (3, [2, 4, 8])


def _runs(read: Callable[[], Settings] = lambda: PIPELINE, **more: Any) -> jobs._JobRuns:
    return jobs._JobRuns(PIPELINE, "local", {}, False, None, threading.Event(), read, **more)


@pytest.fixture
def begun(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """Settings with which jobs were started that do nothing, and why none could begin."""
    found: list[Any] = []
    monkeypatch.setattr(jobs, "start", lambda folder, kind, pipeline, *_, **__: found.append(pipeline))
    monkeypatch.setattr(jobs, "follow", lambda folder, _: run_directory.write(folder, Claimed("c")))
    monkeypatch.setattr(jobs, "check_outcome", lambda *_: None)
    monkeypatch.setattr(fence, "asked_meanwhile", lambda *_: False)
    monkeypatch.setattr(fence, "refuse_taken_over", lambda *_: None)
    monkeypatch.setattr(creation, "create", lambda *_, **__: None)
    monkeypatch.setattr(status, "snapshot_is_complete", lambda _: True)
    monkeypatch.setattr(requests, "not_begun", lambda _, why, **__: found.append(why))
    return found


def _refuses(error: BottledWaterError) -> Callable[..., None]:
    def create(*_: Any, **__: Any) -> None:
        raise error

    return create


@pytest.mark.parametrize(
    ("error", "told"),
    [
        (PreflightError(["Table public.a has no key."]), ["Table public.a has no key."]),
        (CredentialsRefused("The password is refused."), ["The password is refused."]),
        (Outage("Kafka is away."), []),
        (TakenOver("Another job works."), []),
        (StopRequested("Asked to stop."), []),
    ],
    ids=lambda value: type(value).__name__,
)
def test_why_no_job_could_begin_is_told_with_the_pipeline(
    begun: list[Any], monkeypatch: pytest.MonkeyPatch, error: BottledWaterError, told: list[str]
) -> None:
    monkeypatch.setattr(creation, "create", _refuses(error))
    with pytest.raises(type(error)):
        _runs().once()
    assert begun == [PIPELINE, *told]


def test_a_restart_has_the_settings_as_they_are_then(begun: list[Any]) -> None:
    later = PIPELINE.with_(postgres="host=db password=new")
    work = _runs(lambda: later)
    work.once()
    assert (begun, work.claim) == ([PIPELINE], "c")
    work.once()
    assert begun == [PIPELINE, later]


_REFUSED_PASSWORD = CredentialsRefused("The password is refused.")


@pytest.mark.parametrize(
    ("step", "error", "told"),
    [
        # with saved settings, reading asks the servers
        ("read", _REFUSED_PASSWORD, "they were changed since"),
        ("read", SettingError("a.yaml", None, "a readable YAML file", problem="cannot be read"), "'a.yaml' cannot be"),
        ("read", click.UsageError("--postgres is required"), "any more: --postgres is required"),
        ("refuse_taken_over", _REFUSED_PASSWORD, "they were changed since"),
        ("create", _REFUSED_PASSWORD, "they were changed since"),
        ("snapshot_is_complete", _REFUSED_PASSWORD, "they were changed since"),
    ],
)
def test_what_is_being_changed_before_a_restart_is_waited_for(
    begun: list[Any], monkeypatch: pytest.MonkeyPatch, step: str, error: Exception, told: str
) -> None:
    def refuses(*_: Any, **__: Any) -> Any:
        raise error

    work = _runs()
    work.once()
    if step != "refuse_taken_over":  # another job has died before it could claim the slot
        monkeypatch.setattr(jobs, "follow", lambda *_: None)
        work.once()
    where = {"read": work, "refuse_taken_over": fence, "create": creation, "snapshot_is_complete": status}[step]
    with monkeypatch.context() as patch:
        patch.setattr(where, step, refuses)
        with pytest.raises(Outage, match=told):
            work.once()
    work.once()
    assert all(each is PIPELINE for each in begun)


def test_what_no_restart_can_help_is_told_with_the_pipeline_before_a_restart_too(
    begun: list[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    work = _runs()
    work.once()
    monkeypatch.setattr(fence, "refuse_taken_over", _refuses(StateError("The state is lost.")))
    with pytest.raises(StateError):
        work.once()
    assert begun == [PIPELINE, "The state is lost."]


def test_a_restart_makes_no_slot_of_another_pipeline(begun: list[Any]) -> None:
    work = _runs()
    work.once()
    work.read = lambda: PIPELINE.with_(slot="other")
    with pytest.raises(Refused, match="name slot 'other' now"):
        work.once()
    assert begun[0] is PIPELINE and len(begun) == 2 and "slot 'other'" in begun[1]


@pytest.mark.parametrize(
    ("number", "raised"),
    [(errno.ENOSPC, Outage), (errno.EAGAIN, Outage), (errno.EMFILE, Outage), (errno.EACCES, Refused)],
    ids=lambda value: errno.errorcode[value] if isinstance(value, int) else value.__name__,
)
@pytest.mark.parametrize("step", ["write", "Popen", "TemporaryDirectory", "Prepared"])
def test_a_job_that_finds_no_room_is_started_later(
    begun: list[Any], monkeypatch: pytest.MonkeyPatch, step: str, number: int, raised: type[BottledWaterError]
) -> None:
    def fails(*_: Any, **__: Any) -> None:
        raise OSError(number, os.strerror(number))

    if step in ("write", "Popen"):
        monkeypatch.setattr(jobs, "start", _START)
    if step != "Prepared":
        of = {"write": Settings, "Popen": supervise.subprocess, "TemporaryDirectory": jobs.tempfile}[step]
        monkeypatch.setattr(of, step, fails)
    else:
        monkeypatch.setattr(run_directory, "write", fails)
    with pytest.raises(raised, match=re.escape(os.strerror(number))) as found:
        _runs().once()
    assert str(jobs._temporary()) in str(found.value) and "TMPDIR" in str(found.value)


def test_only_what_was_asked_since_the_command_began_ends_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fence, "asked_meanwhile", lambda pipeline, since: (pipeline, since) == (PIPELINE, 1000.0))
    assert _runs(begun=1000.0).asked()


def test_after_a_stop_it_is_not_done_again(clock: Clock) -> None:
    clock.set()
    work = Work(Outage("away"))
    with pytest.raises(Outage):
        restart.keep_running(work, clock)
    assert (work.done, clock.pauses) == (1, [])


# ------------------------------------------------------------------ the same in processes, with a job in place of
# Spark's
_COMMAND = """
import signal, sys
signal.signal(signal.SIGHUP, signal.SIG_DFL)
signal.signal(signal.SIGINT, signal.default_int_handler)
from airflow_bottledwater import cli
from airflow_bottledwater.jobs import restarts
from airflow_bottledwater.cli import restart
from airflow_bottledwater.jobs import submit
import airflow_bottledwater.provision.create as creation
import airflow_bottledwater.jobs.fence as fence
import airflow_bottledwater.jobs.status as status

restarts._BACKOFF = float(sys.argv.pop(1))
failing = sys.argv.pop(1)
job = (
    "import sys; from pathlib import Path; from airflow_bottledwater import errors; from "
    "airflow_bottledwater.spark import job\\n"
    "from tests.support import stand_in; job.log_to_stderr()\\n"
    "def work(*_):\\n"
    "    with Path(sys.argv[1]).open('a') as file: file.write('.')\\n"
    "    if len(Path(sys.argv[1]).read_text()) < 3: " + failing + "\\n"
    "    return {'published': 7}\\n"
    "sys.exit(stand_in.run(work))"
)
creation.create = lambda *_, **__: None
fence.asked_meanwhile = lambda *_: False
restart.reached = lambda pipeline: None
status.snapshot_is_complete = lambda pipeline: True
jobs = sys.argv.pop(1)
submit.command = lambda *_, **__: [sys.executable, "-c", job, jobs]
cli.main()
"""
_OUTAGE, _REFUSED, _KILLED = (
    "raise errors.Outage('Kafka is away.')",
    "raise errors.Refused('The slot is lost.')",
    "import os; os.kill(os.getpid(), 9)",
)


def _start(tmp_path: Path, failing: str, *options: str, backoff: float = 0.05) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-c", _COMMAND, str(backoff), failing, str(tmp_path / "jobs"), *REQUIRED, *options],
        env={**os.environ, "TMPDIR": str(tmp_path)},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )


@pytest.mark.some(3)
@pytest.mark.parametrize(
    ("failing", "options", "code", "started", "said"),
    [
        (_OUTAGE, ["--restart"], 0, 3, "Kafka is away.\n"),
        # nothing said how it ended
        (_KILLED, ["--restart"], 0, 3, "exited without reporting a result"),
        (_REFUSED, ["--restart"], 1, 1, "The slot is lost."),
        (_OUTAGE, [], 75, 1, "Kafka is away."),
        (_KILLED, [], 75, 1, "exited without reporting a result"),
        (_REFUSED, [], 1, 1, "The slot is lost."),
    ],
)
def test_how_a_job_ends_decides_what_follows(
    tmp_path: Path, failing: str, options: list[str], code: int, started: int, said: str
) -> None:
    command = _start(tmp_path, failing, *options)
    output = command.communicate(timeout=120)[0]
    assert command.returncode == code, output
    assert len((tmp_path / "jobs").read_text()) == started
    assert said in output
    assert output.count("It is started again in") == started - 1
    assert ("Ended: published 7" in output) == (code == 0)
    # nothing is left
    assert [path.name for path in tmp_path.iterdir()] == ["jobs"]


@pytest.mark.parametrize("signum", [signal.SIGTERM, signal.SIGINT, signal.SIGHUP])
def test_a_signal_ends_a_pause_at_once(tmp_path: Path, signum: signal.Signals) -> None:
    command = _start(tmp_path, _OUTAGE, "--restart", backoff=100)
    assert command.stdout is not None
    lines = []
    for line in command.stdout:
        lines.append(line)
        if "It is started again in 100 s (1 of 10)" in line:
            break
    # the loop may not be in the pause yet
    time.sleep(0.2)
    began = time.monotonic()
    command.send_signal(signum)
    rest = command.communicate(timeout=60)[0]
    assert command.returncode == 0, "".join([*lines, rest])
    assert time.monotonic() - began < 60
    assert "Terminated, shutting down..." in rest
    assert (tmp_path / "jobs").read_text() == "."


@pytest.mark.parametrize("server", ["says nothing", "closes the connection"])
def test_a_signal_while_the_servers_are_waited_for_is_a_stop(tmp_path: Path, server: str) -> None:
    with socket.create_server(("127.0.0.1", 0)) as silent:
        command = subprocess.Popen(
            [_PROGRAM, "-f", "json", "--restart", "-d", f"host=127.0.0.1 port={silent.getsockname()[1]} dbname=shop"],
            env={**os.environ, "TMPDIR": str(tmp_path)},
            stderr=subprocess.PIPE,
            text=True,
        )
        accepted, _ = silent.accept()
        with accepted:
            command.send_signal(signal.SIGTERM)
            if server != "says nothing":
                command.send_signal(signal.SIGSTOP)
                accepted.close()
                command.send_signal(signal.SIGCONT)
            told = command.communicate(timeout=60)[1]
    assert command.returncode == 0, told
    assert "Terminated, shutting down..." in told
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("raised", "code"),
    [(Outage("away"), 75), (Refused("no"), 1), (JobDied("died"), 75), (JobFailed("lost"), 1), (ValueError("a bug"), 1)],
    ids=lambda value: type(value).__name__ if isinstance(value, Exception) else str(value),
)
def test_the_exit_code_tells_what_passes_from_what_does_not(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, raised: Exception, code: int
) -> None:
    def fail(**_: object) -> None:
        raise raised

    monkeypatch.setattr(cli.commands.cli, "main", fail)
    with pytest.raises(SystemExit) as ended:
        cli.main()
    assert ended.value.code == code
    assert str(raised) in caplog.text


# ------------------------------------------------------------------ probes
def _check(monkeypatch: pytest.MonkeyPatch, *options: str, **status: Any) -> tuple[int, str]:
    told = status_of(slot="shop", **{"at": time.time() - 1, **status})
    monkeypatch.setattr(health, "look", lambda pipeline, timeout: (SLOT, told))
    result = CliRunner().invoke(cli.cli, ["status", *REQUIRED[:2], "--check", *options])
    return result.exit_code, result.output


def test_a_probe_of_a_job_that_works_is_told_so(monkeypatch: pytest.MonkeyPatch) -> None:
    assert _check(monkeypatch) == (0, "Ready: streaming, 1,234 bytes behind, reported 1 s ago.\n")
    assert _check(monkeypatch, "--max-lag", "1234", "--max-age", "3")[0] == 0


@pytest.mark.parametrize(
    ("options", "status", "why"),
    [
        (["--max-lag", "1233"], {}, "1,234 bytes behind"),
        (["--max-age", "0.5"], {}, "has not reported"),
        ([], {"state": "failed", "error": "One.\nTwo."}, "One. Two."),
    ],
)
def test_a_probe_of_one_that_does_not_is_told_why_in_one_line(
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    options: list[str],
    status: dict[str, Any],
    why: str,
) -> None:
    code, output = _check(monkeypatch, *options, **status)
    assert (code, output) == (1, "")
    (line,) = caplog.messages
    assert line.startswith("Not ready: ") and why in line and "\n" not in line


@pytest.mark.parametrize(
    "options", [["--check", "--json"], ["--max-lag", "1"], ["--max-age", "1"], ["--check", "--max-lag", "-1"]]
)
def test_options_of_a_probe_that_make_no_sense_are_refused(options: list[str]) -> None:
    result = CliRunner().invoke(cli.cli, ["status", *REQUIRED[:2], *options])
    assert result.exit_code == 1
    assert "Usage" in result.output


def test_a_probe_ends_in_time_when_nobody_answers() -> None:
    with socket.create_server(("127.0.0.1", 0)) as silent:
        port = silent.getsockname()[1]
        done = subprocess.run(
            [
                _PROGRAM,
                "status",
                "--check",
                "--timeout",
                "1",
                "-d",
                f"host=127.0.0.1 port={port} dbname=shop",
                "-b",
                f"127.0.0.1:{port}",
            ],
            capture_output=True,
            text=True,
            check=False,
            timeout=30,
        )
    assert done.returncode == 1, done.stderr
    (line,) = done.stderr.splitlines()
    assert line.endswith("database shop has not answered within 1 s.")


# ------------------------------------------------------------------ the log
@pytest.fixture
def written(monkeypatch: pytest.MonkeyPatch) -> Iterator[io.StringIO]:
    """What the command writes, as at a terminal or not (isatty of standard error)."""
    text = io.StringIO()
    monkeypatch.setattr(own_log, "console", Console(file=text, width=40))
    yield text
    own_log.name_slot("")


def _log(*arguments: Any, error: BaseException | None = None) -> None:
    record = logging.LogRecord("bottledwater", logging.INFO, "x", 1, arguments[0], arguments[1:], None)
    if error is not None:
        record.exc_info = (type(error), error, None)
    record.created = 1795338554.1234
    own_log._handler.handle(record)


@pytest.mark.parametrize("terminal", [True, False])
def test_a_line_has_its_time_where_nobody_watches(
    monkeypatch: pytest.MonkeyPatch, written: io.StringIO, terminal: bool
) -> None:
    monkeypatch.setattr(own_log.sys.stderr, "isatty", lambda: terminal, raising=False)
    own_log.setup_log()
    _log("Two [bold]words[/bold] :smile:\n%s", "and a long line, longer than the terminal is wide")
    stamp = "" if terminal else "2026-11-22T09:09:14.123Z "
    assert written.getvalue() == (
        f"{stamp}[INFO] Two [bold]words[/bold] :smile:\n{stamp}[INFO] and a long line, longer than the terminal is "
        "wide\n"
    )


def test_json_has_a_record_a_line(written: io.StringIO) -> None:
    own_log.use_format("json")
    own_log.name_slot("shop")
    _log("Two :smile: [x]\n%s ä", "lines", error=ValueError("a bug"))
    (line,) = written.getvalue().splitlines()
    found = json.loads(line)
    assert found == {
        "time": "2026-11-22T09:09:14.123Z",
        "level": "INFO",
        "message": "Two :smile: [x]\nlines ä\nValueError: a bug",
        "slot": "shop",
    }
    own_log.use_format("text")
    _log("more")
    assert written.getvalue().endswith("\n2026-11-22T09:09:14.123Z [INFO] more\n")


def test_a_jobs_line_has_the_time_at_which_the_job_wrote_it(
    written: io.StringIO, caplog: pytest.LogCaptureFixture
) -> None:
    line = parse("2026-11-22 09:09:14,123 WARNING The lag grows.\n")
    assert line is not None
    log = logging.getLogger("bottledwater")
    own_log.show_line(log, line)
    (record,) = caplog.records
    assert time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(record.created)) == "2026-11-22 09:09:14"
    assert (record.levelname, record.getMessage()) == ("WARNING", "The lag grows.")


def test_the_option_holds_for_all_that_is_said(tmp_path: Path) -> None:
    for before, after in (([], ["--log-format", "json"]), (["--log-format", "json"], [])):
        done = subprocess.run(
            [
                _PROGRAM,
                *before,
                "preflight",
                *after,
                "-d",
                "host=db",
                "-s",
                "Upper",
            ],
            capture_output=True,
            text=True,
            check=False,
        )
        assert done.returncode == 1
        (line,) = done.stderr.splitlines()
        assert json.loads(line)["level"] == "CRITICAL"
        assert re.match("Setting 'slot' cannot be 'Upper'", json.loads(line)["message"])


def test_what_a_job_says_is_in_the_commands_format(tmp_path: Path) -> None:
    command = _start(tmp_path, _OUTAGE, "--restart", "--log-format", "json", "-s", "shop")
    output = command.communicate(timeout=120)[0]
    assert command.returncode == 0, output
    found = [json.loads(line) for line in output.splitlines()]
    assert {record["slot"] for record in found} == {"shop"}
    assert [r["level"] for r in found if r["message"] == "Outage: Kafka is away."] == ["ERROR"] * 2
