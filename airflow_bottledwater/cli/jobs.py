"""A run at the shell prompt: the slot, then the snapshot's job, then the stream's, in the foreground."""

from __future__ import annotations

import logging
import signal
import tempfile
import threading
from pathlib import Path
from typing import TYPE_CHECKING

from rich.console import Console

from airflow_bottledwater.errors import Interrupted, JobFailed, SettingError
from airflow_bottledwater.model.lsn import POSITION, Position
from airflow_bottledwater.settings import Pipeline

if TYPE_CHECKING:
    from airflow_bottledwater.spark.supervise import LogReader

log = logging.getLogger("bottledwater")

#: how the names of the jobs' folders begin, in the folder for temporary files
_RUN_FOLDER = "bottledwater-run-"
#: bytes of a job's log that are shown at once
_LOG_BYTES = 1 << 20
#: seconds between two looks at a job
_INTERVAL = 0.3


def run(pipeline: Pipeline, master: str, spark_conf: dict[str, str], bounded: bool, position: str | None) -> None:
    """Create what is missing, then run both jobs until the stream ends or a signal stops it.

    :param master: where Spark runs the jobs.
    :param spark_conf: properties of Spark.
    :param bounded: end when everything is published that is committed now.
    :param position: of the last record in the topics, where the slot's records are lost; else None.
    :raises SettingError: the position is none.
    :raises JobFailed: a job failed; the message is the job's own.
    """
    from airflow_bottledwater.provision.create import assume_complete, create
    from airflow_bottledwater.spark import supervise

    if position is not None and not POSITION.fullmatch(position):
        raise SettingError("position", position, "a header pos, such as 00000000016B3748/0000000C")

    stopped = _stop_by_signal()
    supervise.sweep(list(Path(tempfile.gettempdir()).glob(f"{_RUN_FOLDER}*")))
    log.info("Writing messages to Kafka in %s format.", "Avro" if pipeline.output_format == "avro" else "JSON")
    if position is not None:
        assume_complete(pipeline, Position.parse(position))
    else:
        create(pipeline, stopped=stopped)
    for name in ("snapshot", "stream"):
        if stopped.is_set():
            log.info("Terminated, shutting down...")
            return
        if not _job(pipeline, name, master, spark_conf, bounded and name == "stream", stopped):
            return


def _stop_by_signal() -> threading.Event:
    """An event that is set by the first signal that asks the command to end."""
    stopped = threading.Event()
    for signum in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        if signal.getsignal(signum) is not signal.SIG_IGN:  # nohup
            signal.signal(signum, lambda *_: stopped.set())
    return stopped


def _job(
    pipeline: Pipeline, name: str, master: str, spark_conf: dict[str, str], bounded: bool, stopped: threading.Event
) -> bool:
    """Run one Spark job to its end, showing progress; a signal ends it in order. False if it was stopped before its end.

    :raises JobFailed: it failed; the message is the job's own.
    """
    from airflow_bottledwater.spark import submit, supervise

    with tempfile.TemporaryDirectory(prefix=_RUN_FOLDER) as created:
        folder = Path(created)
        settings = pipeline.write(folder)
        command = submit.command(name, settings, master=master, conf=spark_conf, bounded=bounded)
        # a command that is killed takes its job with it: nobody would see that it goes on
        supervise.start(folder, command, submit.environment(master=master), tied=True)
        log.info("%s job started.", name.capitalize())
        _follow(folder, name, stopped)
        return _completed(folder, name, stopped)


def _follow(folder: Path, name: str, stopped: threading.Event) -> None:
    """Show a job's log until it has ended; stop it when we are."""
    from airflow_bottledwater.spark import supervise

    reader = supervise.LogReader(folder)
    with Console(stderr=True).status(f"{name} …"):
        while supervise.running(folder):
            _show(reader)
            if stopped.wait(_INTERVAL):
                log.info("Terminated, shutting down...")
                supervise.stop(folder)
    while _show(reader):
        pass


def _show(reader: LogReader) -> bool:
    """The job's own lines (not Spark's) that are new; whether there were any lines."""
    from airflow_bottledwater.spark.log import parse

    lines = reader.read(_LOG_BYTES)
    for line in lines:
        if (record := parse(line)) is not None and record.ours:
            log.log(record.level, "%s", record.message)
    return bool(lines)


def _completed(folder: Path, name: str, stopped: threading.Event) -> bool:
    """How an ended job has ended: False if it was stopped before its end.

    :raises JobFailed: it failed.
    """
    from airflow_bottledwater.spark import supervise

    outcome = supervise.outcome(folder)
    if outcome is not None and outcome.ok:
        log.info("%s: %s", name.capitalize(), ", ".join(f"{k} {v}" for k, v in outcome.result.items()))
        return not outcome.stopped
    # the signal was for the command; a terminal or a service manager sends it to the job's processes, too
    if stopped.is_set() and (outcome is None or outcome.kind == Interrupted.__name__):
        return False
    if outcome is not None:
        raise JobFailed(outcome.error)
    code = supervise.exit_code(folder)
    raise JobFailed(f"The {name} job ended with exit code {code}.\n{supervise.log_tail(folder)}")
