"""A run in the foreground, at a shell prompt or as a service: creates the slot, and then runs a Spark job for the
snapshot, if needed, and the stream."""

from __future__ import annotations

import contextlib
import logging
import signal
import tempfile
import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

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
    Refused,
    SettingError,
    StopRequested,
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
    pipeline: Settings, master: str, spark_conf: dict[str, str], bounded: bool, position: str | None, restart: bool
) -> None:
    """Create what is missing, then run a job until the stream ends or a signal stops it.

    :param master: Spark's master.
    :param spark_conf: properties of Spark.
    :param bounded: whether to end once everything is published that was committed when the stream began.
    :param position: the position of the last record in the topics, if the slot's saved state was lost; otherwise None.
    :param restart: whether a job that ends for a transient reason is followed by another one.
    :raises SettingError: the position is not valid.
    :raises JobFailed: the job failed; the message is the job's own.
    """
    from airflow_bottledwater.jobs import supervise

    if position is not None and not POSITION.fullmatch(position):
        raise SettingError("position", position, "a header pos, such as 00000000016B3748/0000000C")

    work = _JobRuns(pipeline, master, spark_conf, bounded, position, stop_by_signal())
    supervise.sweep(list(_temporary().glob(f"{RUN_FOLDER}*")))
    log.info("Writing messages to Kafka in %s format.", pipeline.record_format.title)
    try:
        if restart:
            keep_running(work, pipeline, work.stopped)
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
    """
    try:
        return Path(tempfile.gettempdir())
    except FileNotFoundError as error:
        raise Refused(
            f"There is no folder for the files of a job: {error.strerror}.",
            "Set TMPDIR to a folder that this user can write.",
        ) from None


@contextlib.contextmanager
def job_folder() -> Iterator[Path]:
    """A folder for the files of one job, which is removed behind the block.

    :raises Refused: it cannot be made.
    """
    parent = _temporary()
    try:
        created = tempfile.TemporaryDirectory(prefix=RUN_FOLDER, dir=parent)
    except OSError as error:
        raise Refused(
            f"The folder for the files of the job cannot be made in {parent}: {error.strerror}.",
            "Let it be written, or set TMPDIR to another folder.",
        ) from None
    with created as folder:
        yield Path(folder)


@dataclass(slots=True)
class _JobRuns:
    """What the command does once, or, if it starts jobs again, several times; for the parameters see :func:`run`.

    :param stopped: set when the command is to end.
    :param published: whether the last job has published rows of a snapshot.
    :param begun: when the command began, in seconds since 1970.
    """

    pipeline: Settings
    master: str
    spark_conf: dict[str, str]
    bounded: bool
    position: str | None
    stopped: threading.Event
    published: bool = False
    begun: float = field(default_factory=time.time)

    def once(self) -> None:
        """Make what is missing, and run a job until it ends.

        :raises JobDied: it failed for a transient reason.
        :raises JobFailed: it failed.
        :raises StopRequested: the command was asked to end before the job could begin.
        """
        from airflow_bottledwater.jobs import run_directory, submit, supervise

        self.published = False
        with job_folder() as folder:
            settings = self.pipeline.write(folder)
            submit.refuse_unknown_user()
            command = submit.command(
                "pipeline",
                settings,
                master=self.master,
                conf=self.spark_conf,
                tasks=self.pipeline.lanes,
                bounded=self.bounded,
            )
            # Spark takes several seconds to start, in which everything is made. A command that is killed takes its job
            # with it: nobody would see that it goes on
            supervise.start(folder, command, submit.environment(master=self.master), ends_with_parent=True)
            with ExitStack() as undo:
                # in order, so that Spark removes its own folders, in which a copy of the settings may be
                undo.callback(supervise.stop, folder, timeout=10)
                snapshot = self._prepare()
                if self.asked():
                    self.stopped.set()
                if self.stopped.is_set():
                    raise StopRequested("The command was asked to end.")
                undo.pop_all()
            run_directory.write(folder, run_directory.PreparedPipeline(snapshot))
            give_back()  # from now on this process only watches
            log.info("Spark job started%s.", ": snapshot, then stream" if snapshot else "")
            follow(folder, self.stopped)
            progress = run_directory.read(folder, run_directory.ProgressReport)
            self.published = progress is not None and progress.rows_per_second > 0
            check_outcome(folder, self.stopped)

    def asked(self) -> bool:
        """Whether the pipeline was asked to stop while no job ran, since the command began."""
        from airflow_bottledwater.backoff import stoppable
        from airflow_bottledwater.jobs import fence

        with stoppable(self.stopped):
            return fence.asked_meanwhile(self.pipeline, self.begun)

    def _prepare(self) -> bool:
        """Make what is missing; returns whether there is a snapshot to take."""
        from airflow_bottledwater.jobs.status import snapshot_is_complete

        if self.position is not None:
            from airflow_bottledwater.provision.create import assume_complete

            assume_complete(self.pipeline, Position.parse(self.position))
            # the saved state is there now: a restart goes on from it
            self.position = None
        else:
            _create(self.pipeline, self.stopped)
        return not self.stopped.is_set() and not snapshot_is_complete(self.pipeline)


def _create(pipeline: Settings, stopped: threading.Event) -> None:
    from airflow_bottledwater.provision.create import create

    create(pipeline, stopped=stopped)


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
    """Show the new log lines of the job itself, not Spark's; returns whether there were any new lines."""
    from airflow_bottledwater.jobs.log import parse

    lines = reader.read(_LOG_BYTES)
    for line in lines:
        if (record := parse(line)) is not None and record.ours:
            show_line(log, record)
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
