"""A small supervisor for client mode: a job as a detached family of processes, known by a folder.

Run as a module, it is the job's parent: it writes who it is, runs spark-submit, ends everything in order on SIGTERM and
leaves the exit code. The functions look at such a folder from outside, from any process of the host.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from airflow_bottledwater import processes

#: tells the job its folder, in which it leaves its process id and its outcome
RUN_DIRECTORY = "BOTTLEDWATER_RUN_DIRECTORY"
_SUPERVISOR, _DRIVER, _OUTCOME, _EXIT = "supervisor.json", "driver.json", "outcome.json", "exit.json"
LOG = "job.log"
#: seconds for the driver to end in order (flush, acknowledge) before everything is killed
GRACE = 30.0


def start(run_directory: Path, command: Sequence[str], environment: dict[str, str]) -> None:
    """Start a supervised job that outlives the calling process; returns at once.

    :param run_directory: an existing folder of this job alone.
    """
    with (run_directory / LOG).open("ab") as log:
        child = subprocess.Popen(
            [sys.executable, "-m", __name__, str(run_directory), *command],
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=log,
            env=environment,
            start_new_session=True,
        )
    # here too, and not only there: from now on the job can be found and stopped, however long its start takes
    _introduce(run_directory, child.pid)


def _introduce(run_directory: Path, pid: int) -> None:
    temporary = run_directory / f".supervisor-{os.getpid()}"
    temporary.write_text(json.dumps({"pid": pid, "started": processes.started(pid)}))
    temporary.rename(run_directory / _SUPERVISOR)


def _read(run_directory: Path, name: str) -> dict[str, Any] | None:
    try:
        found: dict[str, Any] = json.loads((run_directory / name).read_text())
        return found
    except (OSError, ValueError):
        return None


def running(run_directory: Path) -> bool:
    """Whether anything of the job lives (on this host): the supervisor, or what it left when it was killed."""
    me = _read(run_directory, _SUPERVISOR)
    return me is not None and (processes.started(me["pid"]) == me["started"] or bool(_family(me)))


def _family(me: dict[str, Any]) -> dict[int, int]:
    """A supervisor's processes: they share its group, also when it is gone itself."""
    now = processes.started(me["pid"])
    # an id is used again only when its group has ended
    return {} if now is not None and now != me["started"] else processes.family(me["pid"])


def outcome(run_directory: Path) -> dict[str, Any] | None:
    """What the job left: counts or its error; None while it runs or if it died without a word."""
    return _read(run_directory, _OUTCOME)


def exit_code(run_directory: Path) -> int | None:
    """The exit code, once it has ended."""
    found = _read(run_directory, _EXIT)
    return None if found is None else int(found["code"])


def log_tail(run_directory: Path, lines: int = 40) -> str:
    """The end of the job's log."""
    try:
        with (run_directory / LOG).open("rb") as file:
            file.seek(0, os.SEEK_END)
            file.seek(max(0, file.tell() - 64 * 1024))
            return "\n".join(file.read().decode(errors="replace").splitlines()[-lines:])
    except OSError:
        return ""


def stop(run_directory: Path, *, timeout: float = GRACE + 10) -> bool:
    """Ask the job to end in order, and end it by force after the grace time; False if it still lives."""
    me = _read(run_directory, _SUPERVISOR)
    if me is not None and running(run_directory):
        driver = _read(run_directory, _DRIVER)
        if processes.started(me["pid"]) == me["started"]:
            processes.send({me["pid"]: me["started"]}, signal.SIGTERM)
        elif driver is not None and driver["pid"] in _family(me):
            _signal(driver["pid"], signal.SIGTERM)
        deadline = time.monotonic() + timeout
        while running(run_directory) and time.monotonic() < deadline:
            time.sleep(0.1)
        deadline = time.monotonic() + 5
        while running(run_directory) and time.monotonic() < deadline:
            processes.send(_family(me), signal.SIGKILL)
            time.sleep(0.1)
        if running(run_directory):
            return False
    _remove_settings(run_directory)
    return True


def _remove_settings(run_directory: Path) -> None:
    """The file with the secrets: a job that has ended needs it no more."""
    for secret in run_directory.glob("pipeline-*.json"):
        secret.unlink(missing_ok=True)


def main(arguments: Sequence[str]) -> int:
    """``python -m airflow_bottledwater.spark.supervise FOLDER COMMAND …``."""
    folder, command = Path(arguments[0]), list(arguments[1:])
    stopping = 0.0
    child = subprocess.Popen(command, stdin=subprocess.DEVNULL, env={**os.environ, RUN_DIRECTORY: str(folder)})

    def on_term(*_: object) -> None:
        nonlocal stopping
        stopping = stopping or time.monotonic()

    signal.signal(signal.SIGTERM, on_term)
    signal.signal(signal.SIGINT, on_term)
    _introduce(folder, os.getpid())
    asked = False
    while child.poll() is None:
        time.sleep(0.1)
        if stopping and not asked:
            # the driver ends the query, confirms the position and exits; the JVM follows it
            driver = _read(folder, _DRIVER)
            if driver is not None:
                _signal(driver["pid"], signal.SIGTERM)
                asked = True
            elif time.monotonic() - stopping > 5:
                child.terminate()
                asked = True
        if stopping and time.monotonic() - stopping > GRACE:
            break
    rest = processes.family(os.getpid())
    rest.pop(os.getpid(), None)
    processes.send(rest, signal.SIGKILL)
    code = child.wait()
    _remove_settings(folder)
    (folder / _EXIT).write_text(json.dumps({"code": code, "at": time.time()}))
    return code if code >= 0 else 128 - code


def _signal(pid: int, signum: int) -> None:
    try:
        os.kill(pid, signum)
    except ProcessLookupError:
        pass


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
