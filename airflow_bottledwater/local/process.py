"""A server process: it is started in a session of its own, waited for, stopped and killed, also from another
process."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Self

from airflow_bottledwater.errors import LocalServerError
from airflow_bottledwater.processes import Guard, family, kill_family, send, started

_GUARD = Guard()
_BOOT = Path("/proc/sys/kernel/random/boot_id")
_RELEVANT = re.compile(r"FATAL|PANIC|ERROR|Caused by|Exception|Error|error:|cannot |could not |invalid |unrecognized ")
# lines that say less than the line before them: frames of a stack trace, and PostgreSQL's last line about its
# configuration
_NOISE = re.compile(r"^\s*(at |\.\.\. \d+ more|\^|~)|FATAL: .* contains errors$")
_INHERITED = ("HOME", "JAVA_HOME", "LANG", "LC_ALL", "LD_LIBRARY_PATH", "PATH", "TMPDIR", "TZ", "USER")


def plain_environment(**more: str) -> dict[str, str]:
    """The few environment variables that a server needs; others, which may be secrets, are not passed on."""
    return {name: os.environ[name] for name in _INHERITED if name in os.environ} | more


def one_line(output: str) -> str:
    """The line of a command's output that best describes what went wrong."""
    lines = [line.strip() for line in output.splitlines() if line.strip() and not _NOISE.search(line)]
    return (([line for line in lines if _RELEVANT.search(line)] or lines or ["it said nothing"])[-1])[:300]


def run(
    command: Sequence[str | os.PathLike[str]], what: str, *, cwd: Path, env: Mapping[str, str] | None = None
) -> str:
    """Run a command to its end, in a plain environment or in `env`; `what` describes it in the error if it fails."""
    environment = dict(plain_environment() if env is None else env)
    done = subprocess.run(command, check=False, capture_output=True, text=True, env=environment, cwd=cwd)
    if done.returncode:
        raise LocalServerError(f"{what} failed: {one_line(done.stderr.strip() or done.stdout)}")
    return done.stdout


class ServerProcess:
    """A server in a folder. A subclass defines what to run, and how to see that it is ready.

    The folder has `<name>.log` and, while the server runs, `<name>.pid`, by which another process can stop it, too.

    :param die_with_parent: whether the server ends when the process that started it ends, even by SIGKILL.
    """

    name = "server"
    start_timeout = 60.0
    stop_signal: int = signal.SIGTERM
    stop_grace = 20.0
    children_grace: float | None = None
    """Seconds after which the children of a server that was asked to end are killed, so that it can end."""
    orphan_signal: int = signal.SIGKILL
    """The signal that the server gets when the process that started it has ended. PostgreSQL gets a milder one, since
    it leaves shared memory behind when it is killed."""

    def __init__(self, folder: Path | str, *, die_with_parent: bool = True) -> None:
        self.folder = Path(folder).absolute()
        self.die_with_parent = die_with_parent
        self._child: subprocess.Popen[bytes] | None = None
        self._log_start = 0

    # defined by a subclass

    def prepare(self) -> None:
        """Create what the server needs before it starts; the folder exists when this is called."""

    def command(self) -> list[str]:
        """The command that runs the server."""
        raise NotImplementedError

    def environment(self) -> Mapping[str, str]:
        """The server's whole environment."""
        return plain_environment()

    def ready(self) -> bool:
        """Whether the server is ready; called repeatedly, so it must be quick and must not raise."""
        raise NotImplementedError

    # common to all servers

    @property
    def log_path(self) -> Path:
        return self.folder / f"{self.name}.log"

    @property
    def pid_path(self) -> Path:
        return self.folder / f"{self.name}.pid"

    @property
    def pid(self) -> int | None:
        """The process id of the server; None if it does not run."""
        process = self._process()
        return process[0] if process and self._lives(process) else None

    @property
    def running(self) -> bool:
        return self.pid is not None

    def start(self) -> Self:
        """Start the server, and return when it is ready; do nothing if it runs already."""
        if self.running:
            return self
        self.folder.mkdir(parents=True, exist_ok=True)
        self.prepare()
        with self.log_path.open("ab") as log:
            self._log_start = log.tell()
            try:
                self._child = subprocess.Popen(
                    self.command(),
                    env=dict(self.environment()),
                    cwd=self.folder,
                    stdin=subprocess.DEVNULL,
                    stdout=log,
                    stderr=subprocess.STDOUT,
                    start_new_session=True,
                )
            except OSError as error:
                raise LocalServerError(f"{self.name} did not start: {error}") from error
        pid, start = self._child.pid, started(self._child.pid)
        if start is not None:
            if self.die_with_parent:
                _GUARD.watch(pid, start, self.orphan_signal)
            self._write_pid(pid, start)
        self._wait_until_ready()
        return self

    def stop(self) -> None:
        """Ask the server to end; after the grace time, kill it if it still runs, and those left of its family of
        processes."""
        self._stop(self.stop_signal)

    def kill(self) -> None:
        """Kill the server and its whole family at once, as in a crash."""
        process = self._process()
        if process:
            kill_family(*process)
            self._gone(process)

    def restart(self) -> Self:
        """Stop the server and start it again, with the same ports and data."""
        self.stop()
        return self.start()

    def pause(self) -> None:
        """Stop the whole family with SIGSTOP: connections stay open, but get no answers."""
        self._signal_family(signal.SIGSTOP)

    def resume(self) -> None:
        """Let a paused family go on."""
        self._signal_family(signal.SIGCONT)

    def __enter__(self) -> Self:
        return self.start()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.stop()

    def reason(self) -> str:
        """The line of the log since the last start that best describes why the server has failed."""
        try:
            with self.log_path.open("rb") as log:
                log.seek(self._log_start)
                return one_line(log.read().decode(errors="replace"))
        except OSError:
            return "it wrote no log"

    def _stop(self, signum: int, grace: float | None = None) -> None:
        process = self._process()
        if process is None:
            return
        grace = self.stop_grace if grace is None else grace
        leader = {process[0]: process[1]}
        members: dict[int, int] = {}
        begun = looked = time.monotonic()
        if self._lives(process):
            members = family(process[0])
            send(leader, signum)
            send(leader, signal.SIGCONT)  # a paused server would not handle the signal
        while self._lives(process) and (now := time.monotonic()) < begun + grace:
            if now > looked + 0.5:
                looked = now
                members |= family(process[0])
            if self.children_grace is not None and now > begun + self.children_grace:
                send({pid: start for pid, start in family(process[0]).items() if pid != process[0]}, signal.SIGKILL)
            time.sleep(0.02)
        kill_family(*process)
        send(members, signal.SIGKILL)  # children that left the group and outlived the leader
        self._gone(process)

    def _wait_until_ready(self) -> None:
        assert self._child is not None
        deadline = time.monotonic() + self.start_timeout
        while not self.ready():
            if (code := self._child.poll()) is not None:
                why = f"it ended with code {code}: {self.reason()}"
            elif time.monotonic() > deadline:
                why = f"not ready after {self.start_timeout:.0f} s: {self.reason()}"
            else:
                time.sleep(0.05)
                continue
            self.kill()
            raise LocalServerError(f"{self.name} did not start: {why}")

    def _signal_family(self, signum: int) -> None:
        process = self._process()
        if process is None or not self._lives(process):
            raise LocalServerError(f"{self.name} is not running in {self.folder}")
        send({process[0]: process[1]}, signum)  # the leader first, so that it starts no others meanwhile
        send(family(process[0]), signum)

    def _lives(self, process: tuple[int, int]) -> bool:
        if self._child is not None and self._child.pid == process[0]:
            self._child.poll()  # collects a child that has ended
        return started(process[0]) == process[1]

    def _process(self) -> tuple[int, int] | None:
        """The process id and start time in the pid file; None if there is none, or it is from before the last boot."""
        try:
            kept = json.loads(self.pid_path.read_text())
        except (OSError, ValueError):
            return None
        # start times count from boot: after a reboot, id and time could be those of another process
        return (kept["pid"], kept["started"]) if kept["boot"] == _BOOT.read_text().strip() else None

    def _write_pid(self, pid: int, start: int) -> None:
        temporary = self.pid_path.with_suffix(".pid.new")
        temporary.write_text(json.dumps({"pid": pid, "started": start, "boot": _BOOT.read_text().strip()}))
        temporary.rename(self.pid_path)

    def _gone(self, process: tuple[int, int]) -> None:
        if self._child is not None and self._child.pid == process[0]:
            self._child.wait(timeout=10)
            self._child = None
        _GUARD.release(*process)
        self.pid_path.unlink(missing_ok=True)
