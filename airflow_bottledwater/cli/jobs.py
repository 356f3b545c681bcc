"""A run at the shell prompt, in the foreground: creates the slot, and then runs one Spark job for the snapshot, if needed, and the
stream."""

from __future__ import annotations

import logging
import signal
import tempfile
import threading
from contextlib import ExitStack
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

from airflow_bottledwater.cli.log import console
from airflow_bottledwater.errors import Interrupted, JobFailed, SettingError
from airflow_bottledwater.model.lsn import POSITION, Position
from airflow_bottledwater.settings import Pipeline

if TYPE_CHECKING:
    from airflow_bottledwater.spark.supervise import LogReader

log = logging.getLogger("bottledwater")

#: the prefix of the jobs' run directories, in the folder for temporary files
_RUN_FOLDER = "bottledwater-run-"
#: bytes of a job's log that are shown at once
_LOG_BYTES = 1 << 20
#: seconds between two checks of a job
_INTERVAL = 0.3


def run(pipeline: Pipeline, master: str, spark_conf: dict[str, str], bounded: bool, position: str | None) -> None:
    """Create what is missing, then run a job until the stream ends or a signal stops it.

    :param master: Spark's master.
    :param spark_conf: properties of Spark.
    :param bounded: whether to end once everything is published that was committed when the stream began.
    :param position: the position of the last record in the topics, if the slot's saved state was lost; otherwise None.
    :raises SettingError: the position is not valid.
    :raises JobFailed: the job failed; the message is the job's own.
    """
    from airflow_bottledwater.spark import run_directory, submit, supervise

    if position is not None and not POSITION.fullmatch(position):
        raise SettingError("position", position, "a header pos, such as 00000000016B3748/0000000C")

    stopped = _stop_by_signal()
    supervise.sweep(list(Path(tempfile.gettempdir()).glob(f"{_RUN_FOLDER}*")))
    log.info("Writing messages to Kafka in %s format.", "Avro" if pipeline.output_format == "avro" else "JSON")
    with tempfile.TemporaryDirectory(prefix=_RUN_FOLDER) as created:
        folder = Path(created)
        settings = pipeline.write(folder)
        command = submit.command("pipeline", settings, master=master, conf=spark_conf, bounded=bounded)
        # Spark takes several seconds to start, in which everything is made. A command that is killed takes its job with it: nobody
        # would see that it goes on
        supervise.start(folder, command, submit.environment(master=master), tied=True)
        with ExitStack() as undo:
            # in order, so that Spark removes its own folders, in which a copy of the settings may be
            undo.callback(supervise.stop, folder, timeout=10)
            snapshot = _prepare(pipeline, position, stopped)
            if stopped.is_set():
                log.info("Terminated, shutting down...")
                return
            undo.pop_all()
        run_directory.write(folder, run_directory.Prepared(snapshot))
        log.info("Spark job started%s.", ": snapshot, then stream" if snapshot else "")
        _follow(folder, stopped)
        _check_outcome(folder, stopped)


def _prepare(pipeline: Pipeline, position: str | None, stopped: threading.Event) -> bool:
    """Make what is missing; returns whether there is a snapshot to take."""
    from airflow_bottledwater.provision.create import assume_complete, create
    from airflow_bottledwater.state.status import snapshot_is_complete

    if position is not None:
        assume_complete(pipeline, Position.parse(position))
    else:
        create(pipeline, stopped=stopped)
    return not stopped.is_set() and not snapshot_is_complete(pipeline)


def _stop_by_signal() -> threading.Event:
    """An event that is set by the first signal that asks the command to end."""
    stopped = threading.Event()
    for signum in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        if signal.getsignal(signum) is not signal.SIG_IGN:  # nohup
            signal.signal(signum, lambda *_: stopped.set())
    return stopped


def _follow(folder: Path, stopped: threading.Event) -> None:
    """Show a job's log, and a progress bar while it takes a snapshot, until the job has ended; stop it when the command is stopped."""
    from airflow_bottledwater.spark import supervise

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
    from airflow_bottledwater.spark import run_directory

    found = run_directory.read(folder, run_directory.Progress)
    if found is not None:
        rows = f"{found.rows:,} rows ({found.rows_per_second:,.0f}/s)"
        under_way = found.bytes < found.total_bytes
        bar.update(task, total=found.total_bytes, completed=found.bytes, rows=rows, visible=under_way)


def _show(reader: LogReader) -> bool:
    """Show the new log lines of the job itself, not Spark's; returns whether there were any new lines."""
    from airflow_bottledwater.spark.log import parse

    lines = reader.read(_LOG_BYTES)
    for line in lines:
        if (record := parse(line)) is not None and record.ours:
            log.log(record.level, "%s", record.message)
    return bool(lines)


def _check_outcome(folder: Path, stopped: threading.Event) -> None:
    """Say how an ended job has ended.

    :raises JobFailed: it failed.
    """
    from airflow_bottledwater.spark import supervise

    outcome = supervise.outcome(folder)
    if outcome is not None and outcome.ok:
        log.info("Ended: %s", ", ".join(f"{k} {v}" for k, v in outcome.result.items()))
        return
    # the command itself got the signal; a terminal or a service manager also sends it to the job's processes
    if stopped.is_set() and (outcome is None or outcome.kind == Interrupted.__name__):
        return
    if outcome is not None:
        raise JobFailed(outcome.error)
    code = supervise.exit_code(folder)
    raise JobFailed(f"The Spark job ended with exit code {code}.\n{supervise.log_tail(folder)}")
