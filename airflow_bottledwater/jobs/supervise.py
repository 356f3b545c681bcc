"""A small supervisor for client mode: a job is a detached family of processes, identified by its run directory.

Run as a module, this is the job's parent process: it records its process id, runs spark-submit, limits the size of the
log, ends everything in order on SIGTERM, SIGINT and SIGHUP, and records the exit code. The functions are for other
processes on the host, which start, watch and stop a job by its run directory.
"""

from __future__ import annotations

import contextlib
import logging
import os
import select
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from airflow_bottledwater import processes
from airflow_bottledwater.errors import JobFailed, StopRequested
from airflow_bottledwater.jobs import run_directory as records
from airflow_bottledwater.jobs.run_directory import Driver, Exit, StopAsked, Submission, Supervisor, Unreported
from airflow_bottledwater.model.outcome import Outcome

log = logging.getLogger(__name__)

#: the environment variable with the job's run directory, into which it writes its process id and its outcome
RUN_DIRECTORY = "BOTTLEDWATER_RUN_DIRECTORY"
LOG = "job.log"
#: the log's older part; each part has at most so many bytes (and those written in the second between two checks)
OLD_LOG, LOG_BYTES = "job.log.1", 16 << 20
#: seconds
_DAY = 86_400
#: seconds for the driver to end in order (flush, acknowledge) before everything is killed
GRACE = 30.0
#: seconds for which the folder of a job is kept after its processes have ended: more than a weekend
KEPT = 7 * 86400.0
#: seconds after which a job that has a folder, but still no supervisor, is considered dead
_STARTING = 3600.0
#: how many of its log's last lines are in the error of a job that died, and how many characters of each
_QUOTED, _WIDTH = 12, 300
#: the supervisor's first argument if it has to end with the process that started it
_ENDS_WITH_PARENT = "--ends-with-parent"
#: the ends of the pipes that this process keeps for jobs that end with it, and their run directories
_kept: dict[int, Path] = {}


def start(
    run_directory: Path, command: Sequence[str], environment: dict[str, str], *, ends_with_parent: bool = False
) -> None:
    """Start a supervised job that outlives the calling process; returns at once.

    :param run_directory: an existing folder for this job only.
    :param command: the spark-submit command.
    :param ends_with_parent: whether the job ends (in order) when the calling process ends, for whatever reason; its folder is then
        removed.
    :raises StopRequested: the job was asked to stop before it started.
    """
    if stop_asked(run_directory):
        raise StopRequested("The job was asked to stop before it started.")
    _close_ended()
    # only this process has the other end of the pipe, which the kernel closes when the process ends
    parent, kept = os.pipe() if ends_with_parent else (subprocess.DEVNULL, None)
    try:
        with (run_directory / LOG).open("ab") as log:
            child = subprocess.Popen(
                [
                    sys.executable,
                    "-m",
                    __name__,
                    *([_ENDS_WITH_PARENT] if ends_with_parent else []),
                    str(run_directory),
                    *command,
                ],
                stdin=parent,
                stdout=log,
                stderr=log,
                env=environment,
                start_new_session=True,
            )
        # recorded here, and not only by the supervisor itself, so that the job can be found and stopped at once, however
        # long it starts
        _introduce(run_directory, child.pid)
    except BaseException:
        if kept is not None:
            os.close(kept)
        raise
    finally:
        if ends_with_parent:
            os.close(parent)
    if kept is not None:
        _kept[kept] = run_directory


def _close_ended() -> None:
    """Close the pipes of jobs that have ended: a process that starts one job after another would run out of
    descriptors."""
    for kept, run_directory in list(_kept.items()):
        if not running(run_directory) and _kept.pop(kept, None) is not None:
            os.close(kept)


def _introduce(run_directory: Path, pid: int) -> None:
    records.write(run_directory, Supervisor(pid, processes.started(pid), socket.gethostname()))


def running(run_directory: Path) -> bool:
    """Whether any process of the job still runs on this host: its supervisor, or processes that remained when that was
    killed."""
    me = records.read(run_directory, Supervisor)
    return me is not None and (_alive(me) or bool(_family(me)))


def _alive(me: Supervisor) -> bool:
    # the start time is not known if the supervisor had ended before it could be read
    return me.started is not None and processes.started(me.pid) == me.started


def _family(me: Supervisor) -> dict[int, int]:
    """The processes of a supervisor; they are found by its process group, even if the supervisor itself has ended."""
    now = processes.started(me.pid)
    # a process id is reused only after its process group has ended
    return {} if now is not None and now != me.started else processes.family(me.pid)


def stop_asked(run_directory: Path) -> bool:
    """Whether the job was asked to stop (:func:`stop`)."""
    return records.present(run_directory, StopAsked)


def outcome(run_directory: Path) -> Outcome | None:
    """The outcome that the job has written: counts or its error; None while it runs, or if it died without writing
    one."""
    return records.read(run_directory, Outcome)


def exit_code(run_directory: Path) -> int | None:
    """The exit code of the job; None while it runs, or if its supervisor was killed."""
    found = records.read(run_directory, Exit)
    return None if found is None else found.code


def final_outcome(run_directory: Path) -> Outcome:
    """How an ended job has ended. One that died without writing its outcome counts as a transient failure: it was
    killed by its host, by hand, or was out of memory, which need not happen again."""
    found = outcome(run_directory)
    if found is not None:
        return found
    error = f"{_without_word(run_directory)}\n{log_tail(run_directory)}"
    return Outcome(ok=False, kind=JobFailed.__name__, error=error, transient=True)


def _without_word(run_directory: Path) -> str:
    code = exit_code(run_directory)
    return f"The job exited without reporting a result (exit code {'unknown' if code is None else code})."


def log_tail(run_directory: Path, lines: int = 40) -> str:
    """The last lines of the job's log, but for those that have values of rows: they go into errors and events, which
    others may see."""
    # imported only now: a supervisor lives as long as its job, and shall be small
    from airflow_bottledwater.jobs.log import parse

    found = b""
    for name in (LOG, OLD_LOG):
        if len(found) < _TAIL:
            found = _end_of(run_directory / name) + found
    told = found.decode(errors="replace").splitlines()
    if len(found) >= _TAIL:
        told = told[1:]  # the end of a line, which may be one of them
    return "\n".join([line for line in told if (record := parse(line)) is None or record.reported][-lines:])


_TAIL = 64 * 1024


def _end_of(path: Path) -> bytes:
    try:
        with path.open("rb") as file:
            file.seek(0, os.SEEK_END)
            file.seek(max(0, file.tell() - _TAIL))
            return file.read()
    except OSError:
        return b""


def rotate(run_directory: Path, limit: int = LOG_BYTES) -> None:
    """Move the content of a log that has reached the limit into the old part, by copying, since many processes write to
    the file itself.

    The old part is replaced last, when the log is empty again. Readers notice a rotation by the old part's being
    another file.

    :param limit: bytes.
    """
    path, temporary = run_directory / LOG, run_directory / f".{OLD_LOG}"
    if path.stat().st_size < limit:
        return
    try:
        with path.open("r+b") as file, temporary.open("wb") as old:
            shutil.copyfileobj(file, old)
            while more := file.read():  # what was written meanwhile
                old.write(more)
            old.flush()  # on a full disk this fails before anything is lost
            file.truncate(0)
        temporary.rename(run_directory / OLD_LOG)
    except OSError:
        temporary.unlink(missing_ok=True)
        raise


class LogReader:
    """Reads a job's log as it grows, across rotations.

    :param past: how many bytes of the existing log to begin with; None for all of it.
    """

    def __init__(self, run_directory: Path, *, past: int | None = None) -> None:
        self._path, self._old_path = run_directory / LOG, run_directory / OLD_LOG
        self._at, self._old = 0, None
        if past is not None:
            self._old = self._identity()
            if self._path.exists():
                self._at = max(0, self._path.stat().st_size - past)

    def _identity(self) -> tuple[int, int] | None:
        """Inode and modification time of the old part, which identify it; None if there is none."""
        try:
            found = self._old_path.stat()
        except OSError:
            return None
        return found.st_ino, found.st_mtime_ns

    def read(self, limit: int) -> list[str]:
        """The new lines since the last call.

        :param limit: bytes that are read from each part of the log at most; a longer line is returned in pieces.
        """
        rest: list[str] = []
        if (identity := self._identity()) != self._old:
            before = self._at
            rest = self._lines(self._old_path, limit, last=True)
            if self._at - before == limit:
                return rest  # the old part may have more
            self._old, self._at = identity, 0
        return rest + self._lines(self._path, limit)

    def _lines(self, path: Path, limit: int, *, last: bool = False) -> list[str]:
        """The lines of a file from the current position on.

        :param last: whether the file is complete, so that its last line needs no line break.
        """
        try:
            with path.open("rb") as file:
                file.seek(self._at)
                data = file.read(limit)
        except OSError:
            return []
        whole = data[: data.rfind(b"\n") + 1] or (data if last or len(data) == limit else b"")
        self._at += len(whole)
        return whole.decode(errors="replace").splitlines()


def ask(run_directory: Path) -> None:
    """Record that the job is to stop: a signal that reaches it from now on does not count as one from outside the
    pipeline, and a job that has not started yet does not start. On a full disk this is only logged: the job is stopped
    all the same."""
    if run_directory.is_dir():
        try:
            records.write(run_directory, StopAsked(time.time()))
        except OSError as error:
            log.warning("That the job is to stop cannot be recorded in %s: %s", run_directory, error)


def interrupt(run_directory: Path, *, asked: bool = True) -> bool:
    """Let the job end in order, by a signal; returns at once whether any process of it runs.

    :param asked: whether the job is asked to stop; otherwise the signal means what that of a host means that shuts
        down: the job is to be started again.
    """
    if asked:
        ask(run_directory)
    me = records.read(run_directory, Supervisor)
    if me is None or not running(run_directory):
        return False
    driver = records.read(run_directory, Driver)
    if me.started is not None and _alive(me):
        processes.send({me.pid: me.started}, signal.SIGTERM)
    elif driver is not None and driver.pid in _family(me):
        _signal(driver.pid, signal.SIGTERM)
    return True


def stop(run_directory: Path, *, timeout: float = GRACE + 10, asked: bool = True) -> bool:
    """Let the job end in order, and kill it after ``timeout`` seconds; returns False if processes of it still run.

    :param asked: see :func:`interrupt`.
    """
    me = records.read(run_directory, Supervisor)
    if interrupt(run_directory, asked=asked) and me is not None:
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
    """Remove the settings files, which contain secrets: a job that has ended does not need them any more."""
    for secret in run_directory.glob("pipeline-*.json"):
        secret.unlink(missing_ok=True)


def sweep(folders: Sequence[Path]) -> None:
    """Remove the files of jobs that were killed together with the processes that should have removed them.

    If a job's processes have ended, its settings are removed at once, and its folder after a week, since its outcome
    may still be needed. Processes of another host cannot be seen; a job there is considered dead if nothing was written
    into its folder for a week (a running job writes its log).
    """
    for folder in folders:
        try:
            newest = max(path.stat().st_mtime for path in (folder, *folder.iterdir()))
        except OSError:
            continue  # another process is removing it
        me = records.read(folder, Supervisor)
        quiet = time.time() - newest
        if me is not None and me.host == socket.gethostname():
            if running(folder):
                continue
            _remove_settings(folder)
        elif me is None and quiet > _STARTING:
            _remove_settings(folder)
        if quiet > KEPT:
            shutil.rmtree(folder, ignore_errors=True)


def main(arguments: Sequence[str]) -> int:
    """``python -m airflow_bottledwater.jobs.supervise [--ends-with-parent] FOLDER COMMAND …``."""
    ends_with_parent = arguments[0] == _ENDS_WITH_PARENT
    folder, *command = arguments[ends_with_parent:]
    return _supervise(Path(folder), command, ends_with_parent)


def _supervise(folder: Path, command: Sequence[str], ends_with_parent: bool) -> int:
    stopping = 0.0
    child = subprocess.Popen(command, stdin=subprocess.DEVNULL, env={**os.environ, RUN_DIRECTORY: str(folder)})

    def on_term(*_: object) -> None:
        nonlocal stopping
        stopping = stopping or time.monotonic()

    for signum in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
        signal.signal(signum, on_term)
    try:
        _introduce(folder, os.getpid())
    except OSError as error:  # a full disk, for example: whoever started this has recorded the same
        _say(f"The supervisor cannot be recorded: {error}")
    asked = orphaned = False
    looked = 0.0
    while child.poll() is None:
        time.sleep(0.1)
        if time.monotonic() - looked > 1.0:
            looked = time.monotonic()
            _keep(folder)
        if ends_with_parent and not orphaned and select.select([sys.stdin], [], [], 0)[0]:
            orphaned = True  # nothing is ever written to the pipe: it is readable because the process that started this one has ended
            on_term()
        if stopping and not asked:
            # the driver ends the query, confirms the position and exits; the JVM follows it
            driver = records.read(folder, Driver)
            if driver is not None:
                _signal(driver.pid, signal.SIGTERM)
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
    try:
        records.write(folder, Exit(code, time.time()))
    except OSError:
        pass  # the folder was removed, so nobody will read the record, or the disk is full
    if outcome(folder) is None or records.present(folder, Unreported):
        _report_end(folder)
    _remove_settings(folder)
    if orphaned or (ends_with_parent and select.select([sys.stdin], [], [], 0)[0]):
        shutil.rmtree(folder, ignore_errors=True)
    return code if code >= 0 else 128 - code


def _report_end(folder: Path) -> None:
    """Report in Kafka the end of a job that has not done it itself, so that nobody has to wait for a heartbeat that
    does not come. Only lines of this package go there: what else a log has, nobody can vouch for."""
    submission = records.read(folder, Submission)
    settings = next(folder.glob("pipeline-*.json"), None)
    if submission is None or settings is None:
        return
    try:
        # imported only now: a supervisor lives as long as its job, and shall be small
        from airflow_bottledwater.jobs import submitted
        from airflow_bottledwater.jobs.log import parse
        from airflow_bottledwater.pipeline.settings import Settings

        told = [(line, parse(line)) for line in log_tail(folder).splitlines()]
        ours = [line for line, record in told if record is not None and record.ours]
        quoted = [line[:_WIDTH] for line in ours[-_QUOTED:]]
        end = outcome(folder) or replace(final_outcome(folder), error="\n".join([_without_word(folder), *quoted]))
        submitted.report_end(Settings.read(settings), submission.id, submission.kind, end, ours)
    except Exception as error:
        _say(f"The job's end could not be reported: {error}")


def _keep(folder: Path) -> None:
    try:
        rotate(folder)
        _refresh(folder)
    except FileNotFoundError:
        pass  # the folder was removed
    except OSError as error:  # a full disk, for example: the job goes on
        _say(f"The log cannot be rotated: {error}")


def _refresh(folder: Path) -> None:
    """Give files and folders that nobody has written for a day today's time: a folder for temporary files is cleaned by
    age (systemd's tmpfiles.d: ten days), and a job reads its settings again, and Spark writes into its folders, after
    months."""
    now = time.time()
    for path in folder.rglob("*"):
        if now - path.stat().st_mtime > _DAY:
            os.utime(path)


def _say(message: str) -> None:
    """Write to the job's log, which may be on a full disk itself: the job must not lose its supervisor for that."""
    with contextlib.suppress(OSError):
        print(message, file=sys.stderr, flush=True)


def _signal(pid: int, signum: int) -> None:
    try:
        os.kill(pid, signum)
    except ProcessLookupError:
        pass


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
