"""Our Spark jobs from Airflow, in client mode: submitted through the Spark provider's connection, supervised by a folder.

The provider's own client mode dies with the task that started it and leaves the Python driver behind when killed; here the
job is a family of processes of its own, so that data flows whether or not Airflow is up.
"""

from __future__ import annotations

import os
import shutil
import socket
import time
import uuid
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from airflow.sdk import BaseHook, conf

from airflow_bottledwater.errors import JobFailed, Refused
from airflow_bottledwater.settings import Pipeline
from airflow_bottledwater.spark import submit, supervise

#: of Airflow's environment, not for a Spark job: they hold Airflow's own secrets and connections
_AIRFLOW_ONLY = ("AIRFLOW__", "AIRFLOW_CONN_", "AIRFLOW_VAR_", "_AIRFLOW", "__AIRFLOW")

#: bytes of a job's log that are passed on at once
_MOST = 1 << 20

Identity = dict[str, str]


def connection_of(conn_id: str) -> Any:
    """A Spark connection that exists.

    :raises Refused: it does not (the provider would silently submit to YARN).
    """
    try:
        return BaseHook.get_connection(conn_id)
    except Exception as error:
        raise Refused(
            f"Airflow has no Spark connection {conn_id!r} ({type(error).__name__}).", "Create it, type Spark."
        ) from error


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
            f"{what} in client mode needs an Airflow whose worker and triggerer share the host; the executor is {executor}.",
            "Use a Spark connection with deploy-mode cluster (YARN or Kubernetes), or LocalExecutor.",
        )


class SparkJobHook(BaseHook):
    """Submit, watch and stop our jobs.

    :param hook: a ``SparkSubmitHook`` of the Spark provider: it knows how to make a command line from a connection.
    """

    def __init__(self, hook: Any) -> None:
        super().__init__()
        self._hook = hook

    @staticmethod
    def prepare(pipeline: Pipeline, name: str) -> tuple[Identity, Path]:
        """A folder for one job, by which whoever has to will find it, and in it the settings file that only this user can read."""
        home = Path(os.environ.get("AIRFLOW_HOME") or Path.home() / "airflow")
        folder = home / "bottledwater" / f"{name}-{pipeline.slot}-{uuid.uuid4().hex[:12]}"
        folder.mkdir(parents=True, mode=0o700)
        return {"folder": str(folder), "host": socket.gethostname()}, pipeline.write(folder)

    def start(self, identity: Identity, application: str) -> None:
        """Start the job."""
        command = self._hook._build_spark_submit_command(application)
        supervise.start(Path(identity["folder"]), command, {**environment(), **(self._hook._env or {})})


def environment(base: Mapping[str, str] | None = None) -> dict[str, str]:
    """What a job gets of the worker's environment."""
    kept = {k: v for k, v in (base or os.environ).items() if not k.startswith(_AIRFLOW_ONLY)}
    return submit.environment(kept)


def running(identity: Identity) -> bool:
    """Whether the job lives; on another host it cannot be known.

    :raises Refused: it was started on another host.
    """
    if identity["host"] != socket.gethostname():
        raise Refused(
            f"The job was started on host {identity['host']}, this is {socket.gethostname()}.",
            "Client mode needs one host for worker and triggerer; use deploy-mode cluster.",
        )
    return supervise.running(Path(identity["folder"]))


def outcome(identity: Identity) -> dict[str, Any]:
    """How an ended job ended: ``ok``, or ``error`` and whether it is ``transient``."""
    folder = Path(identity["folder"])
    found = supervise.outcome(folder)
    if found is not None:
        return found
    code = supervise.exit_code(folder)
    return {
        "ok": False,
        "kind": JobFailed.__name__,
        "error": f"The job ended without a word (exit code {'unknown' if code is None else code}).\n{supervise.log_tail(folder)}",
        # killed: by the host, by hand, out of memory; nothing says that it would happen again
        "transient": True,
    }


def stop(identity: Identity, *, timeout: float = 40.0) -> bool:
    """End the job in order, then by force; True when it is gone."""
    return supervise.stop(Path(identity["folder"]), timeout=timeout)


def forget(identity: Identity) -> None:
    """Remove an ended job's folder."""
    shutil.rmtree(identity["folder"], ignore_errors=True)


class LogFollower:
    """Passes the job's own log lines on as they come.

    :param write: takes a line.
    :param past: how many bytes of what is there already; None: all.
    """

    def __init__(self, identity: Identity, write: Any, *, past: int | None = None) -> None:
        self._path = Path(identity["folder"]) / supervise.LOG
        self._write, self._at = write, 0
        if past is not None and self._path.exists():
            self._at = max(0, self._path.stat().st_size - past)

    def follow(self) -> None:
        """What is new."""
        try:
            with self._path.open("rb") as file:
                file.seek(self._at)
                data = file.read(_MOST)
        except OSError:
            return
        # a line that is longer than that comes in pieces
        whole = data[: data.rfind(b"\n") + 1] or (data if len(data) == _MOST else b"")
        self._at += len(whole)
        for line in whole.decode(errors="replace").splitlines():
            self._write(line)


def wait(identity: Identity, write: Any, *, interval: float = 1.0) -> dict[str, Any]:
    """Follow a job's log until it ends; returns its outcome."""
    follower = LogFollower(identity, write)
    while running(identity):
        follower.follow()
        time.sleep(interval)
    follower.follow()
    return outcome(identity)
