"""Our Spark jobs from Airflow, in client mode: submitted through the Spark provider's connection, supervised by a folder.

The provider's own client mode dies with the task that started it and leaves the Python driver behind when killed; here the
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

from airflow_bottledwater.errors import JobFailed, Refused
from airflow_bottledwater.hooks import connections
from airflow_bottledwater.hooks.spark_submit import submission
from airflow_bottledwater.settings import Pipeline
from airflow_bottledwater.spark import run_directory, submit, supervise
from airflow_bottledwater.spark.log import parse
from airflow_bottledwater.spark.run_directory import Outcome, Owner

#: of Airflow's environment, not for a Spark job: they hold Airflow's own secrets and connections
_AIRFLOW_ONLY = ("AIRFLOW__", "AIRFLOW_CONN_", "AIRFLOW_VAR_", "_AIRFLOW", "__AIRFLOW")

#: bytes of a job's log that are passed on at once
_LOG_BYTES = 1 << 20


class Identity(TypedDict):
    """Which job it is, as Airflow keeps it between a task's tries.

    :param folder: absolute path of the job's folder.
    :param host: name of the host that it is on.
    """

    folder: str
    host: str


def connection_of(conn_id: str) -> Any:
    """A Spark connection that exists.

    :raises Refused: it does not (the provider would silently submit to YARN).
    :raises Outage: it could not be looked up.
    """
    return connections.connection(conn_id, kind="Spark")


def deploy_mode(connection: Any) -> str:
    """client or cluster."""
    return str(connection.extra_dejson.get("deploy-mode") or "client")


def refuse_foreign_hosts(what: str, executor: str | None = None) -> None:
    """A detached process can be watched and stopped only where worker and triggerer share the host.

    :param executor: the task's own; None: the first that is configured.
    :raises Refused: they do not.
    """
    executor = executor or conf.get("core", "executor", fallback="LocalExecutor").split(",")[0]
    if "LocalExecutor" not in executor:
        raise Refused(
            f"{what} needs an Airflow whose worker and triggerer share the host; the executor is {executor}.",
            "Configure LocalExecutor, too, and give it to this task (executor='LocalExecutor'), or run the 'bottledwater' command "
            "as a service.",
        )


def refuse_stream(conn_id: str, *, mode: str | None = None, executor: str | None = None) -> None:
    """What the stream's job cannot do there, said before anything is changed.

    :param conn_id: connection of type Spark.
    :param mode: deploy mode; None: the connection's.
    :param executor: of the stream's task; None: the first that is configured.
    :raises Refused: there is no such connection, its deploy mode is cluster, or Airflow runs on several hosts.
    """
    connection = connection_of(conn_id)
    if (mode or deploy_mode(connection)) != "client":
        raise Refused(
            f"The stream in deploy-mode cluster (connection {conn_id!r}) is not supported yet.",
            "Use a Spark connection with deploy-mode client and LocalExecutor, or run the 'bottledwater' command as a service.",
        )
    refuse_foreign_hosts("The stream", executor)


def refuse_missing_binary(conn_id: str) -> None:
    """A job is submitted by a program of this host.

    :param conn_id: connection of type Spark.
    :raises Refused: there is no such connection, or not the program that it names.
    """
    name = str(connection_of(conn_id).extra_dejson.get("spark-binary") or "spark-submit")
    if shutil.which(name, path=environment()["PATH"]) is None:
        raise Refused(
            f"{name} (of connection {conn_id!r}) is not on the PATH of this worker.",
            "Install the spark extra (pip install airflow-provider-bottledwater[spark]), or put Spark's bin folder on the PATH.",
        )


class SparkJobHook(BaseHook):
    """Submit, watch and stop our jobs.

    :param hook: a ``SparkSubmitHook`` of the Spark provider: it knows how to make a command line from a connection.
    """

    def __init__(self, hook: Any) -> None:
        super().__init__()
        self._hook = hook

    @staticmethod
    def prepare(pipeline: Pipeline, name: str, owner: Owner) -> tuple[Identity, Path]:
        """A folder for one job, by which whoever has to will find it, and in it the settings file that only this user can read.

        What killed jobs have left in their folders is removed.

        :param owner: for whom it runs.
        """
        home = _home()
        supervise.sweep(sorted(home.glob("*-*")))
        folder = home / f"{name}-{pipeline.slot}-{uuid.uuid4().hex[:12]}"
        folder.mkdir(parents=True, mode=0o700)
        run_directory.write(folder, owner)
        return {"folder": str(folder), "host": socket.gethostname()}, pipeline.write(folder)

    def start(self, identity: Identity, application: str) -> None:
        """Start the job."""
        made = submission(self._hook, application)
        supervise.start(Path(identity["folder"]), made.command, {**environment(master=made.master), **made.variables})


def _home() -> Path:
    return Path(os.environ.get("AIRFLOW_HOME") or Path.home() / "airflow") / "bottledwater"


def environment(base: Mapping[str, str] | None = None, *, master: str = "local") -> dict[str, str]:
    """What a job gets of the worker's environment."""
    kept = {k: v for k, v in (base or os.environ).items() if not k.startswith(_AIRFLOW_ONLY)}
    return submit.environment(kept, master=master)


def is_here(identity: Identity) -> bool:
    """Whether the job was started on this host; of another host nothing can be seen."""
    return identity["host"] == socket.gethostname()


def running(identity: Identity) -> bool:
    """Whether the job lives; on another host it cannot be known.

    :raises Refused: it was started on another host.
    """
    if not is_here(identity):
        raise Refused(
            f"The job was started on host {identity['host']}, this is {socket.gethostname()}.",
            "Worker and triggerer must share the host. Clear the task: its next try takes the slot over.",
        )
    return supervise.running(Path(identity["folder"]))


def stop_asked(identity: Identity) -> bool:
    """Whether one of ours has stopped the job on its host (:func:`stop`), and not somebody through Kafka."""
    return supervise.stop_asked(Path(identity["folder"]))


def left_behind(owner: Owner) -> list[Identity]:
    """The jobs that still run on this host for the tasks of a run.

    Airflow tells only a trigger that is loaded that its task was ended; while no triggerer runs, nobody stops the job.
    """
    found: list[Identity] = []
    for path in sorted(_home().glob(f"*/{Owner.FILE}")):
        if run_directory.read(path.parent, Owner) == owner and supervise.running(path.parent):
            found.append({"folder": str(path.parent), "host": socket.gethostname()})
    return found


def outcome(identity: Identity) -> Outcome:
    """How an ended job ended."""
    folder = Path(identity["folder"])
    found = supervise.outcome(folder)
    if found is not None:
        return found
    code = supervise.exit_code(folder)
    return Outcome(
        ok=False,
        kind=JobFailed.__name__,
        error=f"The job ended without a word (exit code {'unknown' if code is None else code}).\n{supervise.log_tail(folder)}",
        # killed: by the host, by hand, out of memory; nothing says that it would happen again
        transient=True,
    )


def stop(identity: Identity, *, timeout: float = 40.0) -> bool:
    """End the job in order, then by force; True when it is gone."""
    return supervise.stop(Path(identity["folder"]), timeout=timeout)


def forget(identity: Identity) -> None:
    """Remove an ended job's folder."""
    shutil.rmtree(identity["folder"], ignore_errors=True)


#: takes a record of a job's log: its level and its text
Write = Callable[[int, str], Any]


class LogFollower:
    """Passes the job's own log on as it comes: each line with its level, and without the time, which Airflow adds.

    :param write: takes a line. One that begins no record (of a traceback, for example) has the level of the record before.
    :param past: how many bytes of what is there already; None: all.
    """

    def __init__(self, identity: Identity, write: Write, *, past: int | None = None) -> None:
        self._reader = supervise.LogReader(Path(identity["folder"]), past=past)
        self._write = write
        self._level = logging.INFO

    def follow(self) -> None:
        """What is new."""
        for line in self._reader.read(_LOG_BYTES):
            record = parse(line)
            if record is not None:
                self._level = record.level
            self._write(self._level, line if record is None else record.message)


def wait(identity: Identity, write: Write, *, interval: float = 1.0) -> Outcome:
    """Follow a job's log until it ends; returns its outcome."""
    follower = LogFollower(identity, write)
    while running(identity):
        follower.follow()
        time.sleep(interval)
    follower.follow()
    return outcome(identity)
