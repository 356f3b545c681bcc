"""Runs Spark jobs from Airflow in client mode: submitted by the Spark provider's connection, and watched through a run directory.

The provider's own client mode ends with the task that started it, and leaves the Python driver behind when it is killed. Here, the
job is a family of processes of its own, so that data flows whether or not Airflow is up.
"""

from __future__ import annotations

import logging
import os
import shutil
import socket
import time
import uuid
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, TypedDict

from airflow.sdk import BaseHook, conf

from airflow_bottledwater.errors import Refused
from airflow_bottledwater.hooks import connections
from airflow_bottledwater.hooks.spark_submit import submission
from airflow_bottledwater.settings import Pipeline
from airflow_bottledwater.spark import run_directory, submit, supervise
from airflow_bottledwater.spark.log import parse
from airflow_bottledwater.spark.run_directory import Outcome, Owner

#: prefixes of environment variables that a Spark job does not get: they hold Airflow's own secrets and connections
_AIRFLOW_ONLY = ("AIRFLOW__", "AIRFLOW_CONN_", "AIRFLOW_VAR_", "_AIRFLOW", "__AIRFLOW")

#: bytes of a job's log that are passed on at once
_LOG_BYTES = 1 << 20


class Identity(TypedDict):
    """Identifies a job; Airflow stores it between a task's tries.

    :param folder: absolute path of the job's folder.
    :param host: name of the host that it is on.
    """

    folder: str
    host: str


def connection_of(conn_id: str) -> Any:
    """Look up a Spark connection.

    :raises Refused: it is not defined (the provider would then submit to YARN without an error).
    :raises Outage: it could not be looked up.
    """
    return connections.connection(conn_id, kind="Spark")


def deploy_mode(connection: Any) -> str:
    """The deploy mode of a Spark connection: ``client`` (the default) or ``cluster``."""
    return str(connection.extra_dejson.get("deploy-mode") or "client")


def refuse_foreign_hosts(what: str, executor: str | None = None) -> None:
    """Check that worker and triggerer share the host: only then can the triggerer watch and stop a detached process.

    :param what: what needs it, for the message.
    :param executor: the task's own executor; None for the first that is configured.
    :raises Refused: the executor is not LocalExecutor.
    """
    executor = executor or conf.get("core", "executor", fallback="LocalExecutor").split(",")[0]
    if "LocalExecutor" not in executor:
        raise Refused(
            f"{what} needs an Airflow whose worker and triggerer share the host; the executor is {executor}.",
            "Configure LocalExecutor, too, and give it to this task (executor='LocalExecutor'), or run the 'bottledwater' command "
            "as a service.",
        )


def refuse_stream(conn_id: str, *, mode: str | None = None, executor: str | None = None) -> None:
    """Check that the stream's job can run with a Spark connection and an executor, before anything is changed.

    :param conn_id: connection of type Spark.
    :param mode: the deploy mode; None for the connection's.
    :param executor: the executor of the stream's task; None for the first that is configured.
    :raises Refused: there is no such connection, the deploy mode is cluster, or the executor is not LocalExecutor.
    :raises Outage: the connection could not be looked up.
    """
    connection = connection_of(conn_id)
    if (mode or deploy_mode(connection)) != "client":
        raise Refused(
            f"The stream in deploy-mode cluster (connection {conn_id!r}) is not supported yet.",
            "Use a Spark connection with deploy-mode client and LocalExecutor, or run the 'bottledwater' command as a service.",
        )
    refuse_foreign_hosts("The stream", executor)


def refuse_missing_binary(conn_id: str) -> None:
    """Check that the program which submits jobs, usually spark-submit, is installed on this host.

    :param conn_id: connection of type Spark, which may name another program (``spark-binary``).
    :raises Refused: there is no such connection, or the program is not on the PATH.
    """
    name = str(connection_of(conn_id).extra_dejson.get("spark-binary") or "spark-submit")
    if shutil.which(name, path=environment()["PATH"]) is None:
        raise Refused(
            f"{name} (of connection {conn_id!r}) is not on the PATH of this worker.",
            "Install the spark extra (pip install airflow-provider-bottledwater[spark]), or put Spark's bin folder on the PATH.",
        )


class SparkJobHook(BaseHook):
    """Prepares and starts Spark jobs.

    :param hook: a ``SparkSubmitHook`` of the Spark provider, which makes the command line from a connection.
    """

    def __init__(self, hook: Any) -> None:
        super().__init__()
        self._hook = hook

    @staticmethod
    def prepare(pipeline: Pipeline, name: str, owner: Owner) -> tuple[Identity, Path]:
        """Make a run directory for one job, by which it can be found later, with a settings file that only this user can read; returns
        the job's identity and the path of the file.

        The files of jobs that were killed earlier are removed, see :func:`supervise.sweep`.

        :param name: the job: ``snapshot`` or ``stream``.
        :param owner: the DAG run that the job works for.
        """
        home = _home()
        supervise.sweep(sorted(home.glob("*-*")))
        folder = home / f"{name}-{pipeline.slot}-{uuid.uuid4().hex[:12]}"
        folder.mkdir(parents=True, mode=0o700)
        run_directory.write(folder, owner)
        return {"folder": str(folder), "host": socket.gethostname()}, pipeline.write(folder)

    def start(self, identity: Identity, application: str) -> None:
        """Start the job.

        :param application: the path of its entry point.
        """
        made = submission(self._hook, application)
        supervise.start(Path(identity["folder"]), made.command, {**environment(master=made.master), **made.variables})


def _home() -> Path:
    return Path(os.environ.get("AIRFLOW_HOME") or Path.home() / "airflow") / "bottledwater"


def environment(base: Mapping[str, str] | None = None, *, master: str = "local") -> dict[str, str]:
    """The environment of a job: that of the worker, without Airflow's own variables."""
    kept = {k: v for k, v in (base or os.environ).items() if not k.startswith(_AIRFLOW_ONLY)}
    return submit.environment(kept, master=master)


def is_here(identity: Identity) -> bool:
    """Whether the job was started on this host; a job on another host cannot be watched."""
    return identity["host"] == socket.gethostname()


def running(identity: Identity) -> bool:
    """Whether the job still runs.

    :raises Refused: it was started on another host.
    """
    if not is_here(identity):
        raise Refused(
            f"The job was started on host {identity['host']}, this is {socket.gethostname()}.",
            "Worker and triggerer must share the host. Clear the task: its next try takes the slot over.",
        )
    return supervise.running(Path(identity["folder"]))


def stop_asked(identity: Identity) -> bool:
    """Whether the job was stopped on its host, by :func:`stop`, and not by a request in Kafka."""
    return supervise.stop_asked(Path(identity["folder"]))


def left_behind(owner: Owner) -> list[Identity]:
    """The jobs on this host that still run for the tasks of a DAG run.

    When a task is ended by a user, Airflow notifies its trigger only if a triggerer has loaded it; otherwise the job is not stopped.
    """
    found: list[Identity] = []
    for path in sorted(_home().glob(f"*/{Owner.FILE}")):
        if run_directory.read(path.parent, Owner) == owner and supervise.running(path.parent):
            found.append({"folder": str(path.parent), "host": socket.gethostname()})
    return found


def outcome(identity: Identity) -> Outcome:
    """How an ended job ended."""
    return supervise.final_outcome(Path(identity["folder"]))


def stop(identity: Identity, *, timeout: float = 40.0) -> bool:
    """End the job in order, and kill it after ``timeout`` seconds; returns whether it has ended."""
    return supervise.stop(Path(identity["folder"]), timeout=timeout)


def forget(identity: Identity) -> None:
    """Remove an ended job's folder."""
    shutil.rmtree(identity["folder"], ignore_errors=True)


#: called with the level and the text of each line of a job's log
Write = Callable[[int, str], Any]


class LogFollower:
    """Passes a job's log on as it grows: each line with its level, and without its time, since Airflow adds one.

    :param write: called with each line. A line that does not begin a record (of a traceback, for example) has the level of the last
        record.
    :param past: how many bytes of the existing log to begin with; None for all of it.
    """

    def __init__(self, identity: Identity, write: Write, *, past: int | None = None) -> None:
        self._reader = supervise.LogReader(Path(identity["folder"]), past=past)
        self._write = write
        self._level = logging.INFO

    def follow(self) -> None:
        """Pass on the new lines, up to a limit of bytes."""
        for line in self._reader.read(_LOG_BYTES):
            record = parse(line)
            if record is not None:
                self._level = record.level
            self._write(self._level, line if record is None else record.message)


def wait(identity: Identity, write: Write, *, interval: float = 1.0) -> Outcome:
    """Follow a job's log until the job has ended; returns its outcome.

    :param interval: seconds between two checks.
    """
    follower = LogFollower(identity, write)
    while running(identity):
        follower.follow()
        time.sleep(interval)
    follower.follow()
    return outcome(identity)
