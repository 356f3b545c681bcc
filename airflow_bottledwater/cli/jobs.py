"""A run in the foreground, at a shell prompt or as a service: creates the slot, and then runs a Spark job for the
snapshot, if needed, and the stream."""

from __future__ import annotations

import contextlib
import errno
import logging
import os
import signal
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

import click
from rich.progress import (
    BarColumn,
    Progress,
    SpinnerColumn,
    TaskID,
    TaskProgressColumn,
    TextColumn,
    TimeRemainingColumn,
)

from airflow_bottledwater.cli.log import console, draws, show_line
from airflow_bottledwater.cli.restart import keep_running
from airflow_bottledwater.errors import (
    BottledWaterError,
    Interrupted,
    JobDied,
    JobFailed,
    Outage,
    Refused,
    SettingError,
    StopRequested,
    being_changed,
)
from airflow_bottledwater.jobs.run_directory import RUN_FOLDER
from airflow_bottledwater.memory import give_back
from airflow_bottledwater.model.lsn import POSITION, Position
from airflow_bottledwater.pipeline.settings import Settings
from airflow_bottledwater.policy import transient

if TYPE_CHECKING:
    from airflow_bottledwater.jobs.supervise import LogReader

log = logging.getLogger("bottledwater")

#: bytes of a job's log that are shown at once
_LOG_BYTES = 1 << 20
#: seconds between two checks of a job
_INTERVAL = 0.3


def run(
    pipeline: Settings,
    master: str,
    spark_conf: dict[str, str],
    bounded: bool,
    position: str | None,
    restart: bool,
    read: Callable[[], Settings],
) -> None:
    """Create what is missing, then run a job until the stream ends or a signal stops it.

    :param master: Spark's master.
    :param spark_conf: properties of Spark.
    :param bounded: whether to end once everything is published that was committed when the stream began.
    :param position: the position of the last record in the topics, if the slot's saved state was lost; otherwise None.
    :param restart: whether a job that ends for a transient reason is followed by another one.
    :param read: reads the pipeline's settings again, for this.
    :raises SettingError: the position is not valid.
    :raises JobFailed: the job failed; the message is the job's own.
    """
    from airflow_bottledwater.jobs import supervise

    if position is not None and not POSITION.fullmatch(position):
        raise SettingError("position", position, "a header pos, such as 00000000016B3748/0000000C")

    work = _JobRuns(pipeline, master, spark_conf, bounded, position, stop_by_signal(), read)
    supervise.sweep(list(_temporary().glob(f"{RUN_FOLDER}*")))
    log.info("Writing messages to Kafka in %s format.", pipeline.record_format.title)
    try:
        if restart:
            keep_running(work, work.stopped)
        else:
            work.once()
    except BottledWaterError as error:
        # what passes by waiting did not pass in time for the signal: the command has ended as it was asked to, and
        # nothing is lost
        if not work.stopped.is_set() or not (transient(error) or isinstance(error, StopRequested)):
            raise
        if not isinstance(error, StopRequested):
            log.warning("%s", error)
        log.info("Terminated, shutting down...")


def _temporary() -> Path:
    """The folder for temporary files.

    :raises Refused: none can be written: no job could ever start.
    :raises Outage: it is full.
    """
    try:
        return Path(tempfile.gettempdir())
    except FileNotFoundError as error:
        # Python tries to write a file, and does not say why that fails
        place = os.environ.get("TMPDIR") or "/tmp"  # noqa: S108
        if os.access(place, os.W_OK):
            raise Outage(
                f"There is no room in {place} for the files of a job.", "Make room, or set TMPDIR to another folder."
            ) from None
        raise Refused(
            f"There is no folder for the files of a job: {error.strerror}.",
            "Set TMPDIR to a folder that this user can write.",
        ) from None


#: how the system says that something cannot be done however often it is tried
_FOR_GOOD = frozenset({errno.EACCES, errno.EPERM, errno.EROFS, errno.ENOENT, errno.ENOTDIR})


@contextlib.contextmanager
def _room(folder: Path) -> Iterator[None]:
    """Within this block, a job gets its files and processes.

    :param folder: where its files are.
    :raises Refused: they cannot be made in this folder.
    :raises Outage: there is no room for them now.
    """
    try:
        yield
    except OSError as error:
        if error.errno in _FOR_GOOD:
            raise Refused(
                f"The files of the job cannot be made in {folder}: {error.strerror}.",
                "Let the folder be written, or set TMPDIR to another one.",
            ) from None
        raise Outage(
            f"The job cannot be started, with its files in {folder}: {error.strerror}.",
            "Make room: on the disk of the folder (TMPDIR names another one), or in the limits of this user's "
            "processes and files (ulimit; of a unit of systemd: TasksMax; of a container: pids).",
        ) from None


@contextlib.contextmanager
def job_folder() -> Iterator[Path]:
    """A folder for the files of one job, which is removed behind the block.

    :raises Refused: it cannot be made.
    :raises Outage: there is no room for it now.
    """
    parent = _temporary()
    with _room(parent):
        created = tempfile.TemporaryDirectory(prefix=RUN_FOLDER, dir=parent)
    with created as folder:
        yield Path(folder)


def start(
    folder: Path, kind: str, pipeline: Settings, master: str, spark_conf: dict[str, str], *, bounded: bool = False
) -> None:
    """Start a job. A command that is killed takes it along: nobody would see that it goes on.

    :param folder: for its files.
    :param kind: pipeline or verify.
    :param master: Spark's master.
    :param spark_conf: properties of Spark.
    :raises Refused: it cannot be started.
    :raises Outage: there is no room for it now.
    """
    from airflow_bottledwater.jobs import submit, supervise

    with _room(folder):
        command = submit.command(
            kind, pipeline.write(folder), master=master, conf=spark_conf, tasks=pipeline.lanes, bounded=bounded
        )
        supervise.start(folder, command, submit.environment(master=master), ends_with_parent=True)


@dataclass(slots=True)
class _JobRuns:
    """What the command does once, or, if it starts jobs again, several times; for the parameters see :func:`run`.

    :param stopped: set when the command is to end.
    :param begun: when the command began, in seconds since 1970.
    :ivar published: whether the last job has published rows of a snapshot.
    :ivar claim: the id of the last claim of the last job; empty if it has made none.
    """

    pipeline: Settings
    master: str
    spark_conf: dict[str, str]
    bounded: bool
    position: str | None
    stopped: threading.Event
    read: Callable[[], Settings]
    begun: float = field(default_factory=time.time)
    published: bool = field(default=False, init=False)
    claim: str = field(default="", init=False)
    _again: bool = field(default=False, init=False)
    _worked: bool = field(default=False, init=False)

    def once(self) -> None:
        """Make what is missing, and run a job until it ends.

        :raises JobDied: it failed for a transient reason.
        :raises JobFailed: it failed.
        :raises StopRequested: the command was asked to end before the job could begin.
        """
        from airflow_bottledwater.jobs import run_directory

        self.published = False
        with self._starting():
            self._renew()
        with ExitStack() as job:
            with self._starting():
                folder = job.enter_context(job_folder())
                self._begin(folder)
            give_back()  # from now on this process only watches
            follow(folder, self.stopped)
            progress = run_directory.read(folder, run_directory.ProgressReport)
            self.published = progress is not None and progress.rows_per_second > 0
            claimed = run_directory.read(folder, run_directory.Claimed)
            self.claim = claimed.id if claimed is not None else ""
            self._worked = self._worked or claimed is not None
            check_outcome(folder, self.stopped)

    @contextlib.contextmanager
    def _starting(self) -> Iterator[None]:
        """Within this block, a job is started; why it cannot be is noted with the pipeline, too.

        :raises Outage: a server does not answer, or refuses what a job has worked with.
        """
        from airflow_bottledwater.jobs import requests

        with requests.noting(self.pipeline), being_changed(self._worked):
            yield

    def _renew(self) -> None:
        """Before a restart, read the settings again: a password in a file may have been changed since.

        :raises Outage: they cannot be read, or are wrong: they were right when the command began.
        :raises Refused: they are those of another pipeline, whose slot would be made.
        """
        try:
            found = self.read() if self._again else self.pipeline
        except (SettingError, click.UsageError) as error:
            told = error.format_message() if isinstance(error, click.UsageError) else error
            raise Outage(
                f"The settings were changed, and do not describe the pipeline any more: {told}",
                "Correct them: they are read again before each restart.",
            ) from None
        if found.slot != self.pipeline.slot:
            raise Refused(
                f"The settings name slot {found.slot!r} now, and this command runs the pipeline of slot "
                f"{self.pipeline.slot!r}, which nobody reads from any more.",
                "Start the command again for the other pipeline. If it takes the place of this one, drop this slot.",
            )
        self.pipeline, self._again = found, True

    def _begin(self, folder: Path) -> None:
        """Start a job, make what is missing, and let the job begin.

        :raises StopRequested: the command was asked to end meanwhile.
        :raises TakenOver: another job works on the slot since the last one has ended.
        """
        from airflow_bottledwater.jobs import fence, run_directory, supervise

        if self.claim:
            fence.refuse_taken_over(self.pipeline, self.claim)
        # Spark takes several seconds to start, in which everything is made
        start(folder, "pipeline", self.pipeline, self.master, self.spark_conf, bounded=self.bounded)
        with ExitStack() as undo:
            # in order, so that Spark removes its own folders, in which a copy of the settings may be
            undo.callback(supervise.stop, folder, timeout=10)
            snapshot = self._prepare()
            if self.asked():
                self.stopped.set()
            if self.stopped.is_set():
                raise StopRequested("The command was asked to end.")
            with _room(folder):
                run_directory.write(folder, run_directory.PreparedPipeline(snapshot))
            undo.pop_all()
        log.info("Spark job started%s.", ": snapshot, then stream" if snapshot else "")

    def asked(self) -> bool:
        """Whether the pipeline was asked to stop while no job ran, since the command began."""
        from airflow_bottledwater.backoff import stoppable
        from airflow_bottledwater.jobs import fence

        with stoppable(self.stopped):
            return fence.asked_meanwhile(self.pipeline, self.begun)

    def _prepare(self) -> bool:
        """Make what is missing; returns whether there is a snapshot to take."""
        from airflow_bottledwater.jobs.status import snapshot_is_complete

        self._create()
        return not self.stopped.is_set() and not snapshot_is_complete(self.pipeline)

    def _create(self) -> None:
        if self.position is not None:
            from airflow_bottledwater.provision.create import assume_complete

            assume_complete(self.pipeline, Position.parse(self.position))
            # the saved state is there now: a restart goes on from it
            self.position = None
        else:
            from airflow_bottledwater.provision.create import create

            create(self.pipeline, stopped=self.stopped)


def stop_by_signal() -> threading.Event:
    """An event that is set by the first signal that asks the command to end."""
    stopped = threading.Event()
    for signum in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        if signal.getsignal(signum) is not signal.SIG_IGN:  # nohup
            signal.signal(signum, lambda *_: stopped.set())
    return stopped


def follow(folder: Path, stopped: threading.Event) -> None:
    """Show a job's log, and a progress bar while it takes a snapshot, until the job has ended; stop it when the command
    is stopped."""
    from airflow_bottledwater.jobs import supervise

    reader = supervise.LogReader(folder)
    with Progress(
        SpinnerColumn(),
        TextColumn("{task.description}"),
        BarColumn(),
        TaskProgressColumn(),
        TextColumn("{task.fields[rows]}"),
        TimeRemainingColumn(),
        console=console,
        transient=True,
        disable=not draws(),
    ) as bar:
        task = bar.add_task("snapshot", total=None, rows="", visible=False)
        while supervise.running(folder):
            _show(reader)
            _show_progress(folder, bar, task)
            if stopped.wait(_INTERVAL):
                log.info("Terminated, shutting down...")
                supervise.stop(folder)
    while _show(reader):
        pass


def _show_progress(folder: Path, bar: Progress, task: TaskID) -> None:
    """Update the progress bar of a snapshot; it is visible only while the snapshot is in progress."""
    from airflow_bottledwater.jobs import run_directory

    found = run_directory.read(folder, run_directory.ProgressReport)
    if found is not None:
        rows = f"{found.rows:,} rows ({found.rows_per_second:,.0f}/s)"
        under_way = found.bytes < found.total_bytes
        bar.update(task, total=found.total_bytes, completed=found.bytes, rows=rows, visible=under_way)


def _show(reader: LogReader) -> bool:
    """Show what the job itself has logged since, with the lines that belong to it (a traceback), not what Spark has;
    returns whether there were any new lines."""
    from airflow_bottledwater.jobs.log import LogLine, noise, parse

    lines, shown = reader.read(_LOG_BYTES), list[tuple[LogLine, list[str]]]()
    for line in lines:
        if (record := parse(line)) is not None:
            shown.append((record, [record.message]))
        elif shown and not noise(line):
            shown[-1][1].append(line)
    for record, message in shown:
        if record.ours:
            show_line(log, record._replace(message="\n".join(message)))
    return bool(lines)


def check_outcome(folder: Path, stopped: threading.Event) -> None:
    """Say how an ended job has ended.

    :raises JobDied: it failed for a transient reason.
    :raises JobFailed: it failed.
    """
    from airflow_bottledwater.jobs import supervise

    outcome, reported = supervise.final_outcome(folder), supervise.outcome(folder) is not None
    if outcome.ok:
        log.info("Ended: %s", ", ".join(f"{k} {v}" for k, v in outcome.result.items()))
        return
    # the command itself got the signal; a terminal or a service manager also sends it to the job's processes
    if stopped.is_set() and (not reported or outcome.kind == Interrupted.__name__):
        return
    raise JobDied(outcome.error, kind=outcome.kind) if outcome.transient else JobFailed(outcome.error)
