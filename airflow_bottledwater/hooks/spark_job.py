"""Submits Spark jobs from Airflow, with the command line of the Spark provider's connection.

In client mode the job is a family of processes of its own on the worker, with a run directory; in cluster mode
spark-submit hands it to YARN or Kubernetes. Either way it does not end with the task: how it is watched is in
:mod:`airflow_bottledwater.jobs.watch`, how it is stopped in :mod:`airflow_bottledwater.jobs.stop`. (The
provider's own client mode ends with the task that started it, and leaves the Python driver behind when it is killed.)
"""

from __future__ import annotations

import logging
import os
import re
import shutil
import socket
import subprocess
import sys
import uuid
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from airflow_bottledwater import extras
from airflow_bottledwater.errors import JobDied, Refused
from airflow_bottledwater.hooks.spark_submit import making, submission
from airflow_bottledwater.hooks.spark_target import SparkTarget
from airflow_bottledwater.jobs import run_directory, submit, supervise
from airflow_bottledwater.jobs.identity import Identity
from airflow_bottledwater.jobs.run_directory import Submission
from airflow_bottledwater.pipeline.settings import Settings

log = logging.getLogger(__name__)

#: what YARN calls an application, as spark-submit prints it
_APPLICATION_ID = re.compile(r"application_\d+_\d+")


#: where the image of docs/examples/Dockerfile has the jobs
_IN_IMAGE = "local:///opt/bottledwater/jobs"

#: an operator's application, properties and files as its user gave them
Given = tuple[str, dict[Any, Any] | None, str | None]


def refuse_missing_programs(place: SparkTarget) -> None:
    """Check that jobs can be submitted from this host: the provider takes the connection, and its program starts, which
    needs a Java that Spark can run on. A condition that is only necessary (a file of that name, say) does not tell.

    :param place: where they run; its connection may name another program than spark-submit (``spark-binary``).
    :raises Refused: there is no such connection, or something is missing.
    """
    from airflow.providers.apache.spark.hooks.spark_submit import SparkSubmitHook

    _home()
    with making(place.conn_id):
        # a keytab that is given keeps the hook from writing that of the connection into a file
        hook = SparkSubmitHook(conn_id=place.conn_id, keytab="")
    environment = submit.environment(master=place.master, cluster=place.cluster)
    if submit.is_local(place.master) and environment["PYSPARK_PYTHON"] == sys.executable:
        extras.require("spark")  # the workers are processes of this Python
    name = str(hook.spark_binary or "spark-submit")
    if shutil.which(name, path=environment["PATH"]) is None:
        raise Refused(
            f"{name} (of connection {place.conn_id!r}) is not on the PATH of this worker.",
            "Install the spark extra (pip install airflow-provider-bottledwater[spark]), or put Spark's bin folder on "
            "the PATH.",
        )
    if said := _why_not_started([name, "--version"], environment):
        raise Refused(
            f"{name} (of connection {place.conn_id!r}) does not start on this worker: {said}.",
            "Spark needs Java 17 or later. Install it (on Debian and Ubuntu: apt-get install openjdk-17-jre-headless). "
            f"If another Java is used, set JAVA_HOME to the folder of this one. Then try {name} --version.",
        )


def _why_not_started(command: list[str], environment: Mapping[str, str]) -> str:
    """What a command says that fails; empty if it does not fail within two minutes."""
    try:
        ended = subprocess.run(
            command, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
            errors="replace", env=dict(environment), timeout=120, check=False,
        )  # fmt: skip
    except subprocess.TimeoutExpired:
        return ""  # it runs, on a busy host
    if not ended.returncode:
        return ""
    return " ".join(ended.stdout.split())[:500].rstrip(".") or f"exit code {ended.returncode}"


def _home() -> Path:
    """Where the run directories of jobs are made.

    :raises Refused: this user has no name, or cannot write there: no job could ever start.
    """
    submit.refuse_unknown_user()  # whose home is not known either
    home = Path(os.environ.get("AIRFLOW_HOME") or Path.home() / "airflow") / "bottledwater"
    there = next(folder for folder in (home, *home.parents) if folder.exists())
    if not there.is_dir() or not os.access(there, os.W_OK | os.X_OK):
        raise Refused(
            f"The folder {home}, in which each job has its files, cannot be written by the user of this worker "
            f"({there} is in the way).",
            "Let it be written, or set AIRFLOW_HOME to a folder that can be.",
        )
    return home


def prepare(pipeline: Settings, kind: str, place: SparkTarget) -> tuple[Identity, Path]:
    """Make a run directory for one job, with a settings file that only this user can read; returns the job's identity
    and the path of the file.

    The files of jobs that were killed earlier are removed, see :func:`supervise.sweep`.

    :param kind: the job: ``snapshot`` or ``stream``.
    """
    home = _home()
    supervise.sweep(sorted(home.glob("*-*")))
    job_id = uuid.uuid4().hex
    folder = home / f"{kind}-{pipeline.slot}-{job_id[:12]}"
    folder.mkdir(parents=True, mode=0o700)
    run_directory.write(folder, Submission(job_id, kind))
    pod = place.pod or f"bottledwater-{kind}-{pipeline.slot.replace('_', '-')[:30].strip('-')}-{job_id[:8]}"
    identity: Identity = {
        "id": job_id,
        "host": socket.gethostname(),
        "folder": "" if place.cluster else str(folder),
        "application": f"{place.namespace or 'default'}:{pod}" if place.kubernetes else "",
        "master": place.master,
    }
    return identity, pipeline.write(folder)


def describe(
    pipeline: Settings,
    kind: str,
    place: SparkTarget,
    identity: Identity,
    given: Given,
    settings: Path,
    settings_file: str | None,
    *,
    bounded: bool,
) -> tuple[str, dict[Any, Any], str | None, list[str]]:
    """What the provider's hook takes of a job: entry point, properties, files and arguments.

    :param given: what the user gave of the first three.
    :param settings: the settings file of this job.
    :param settings_file: on Kubernetes, the path of the file with the connections in the pods.
    :raises Refused: see :func:`airflow_bottledwater.jobs.submit.conf_for`.
    """
    application, properties, files = given
    conf: dict[Any, Any] = submit.conf_for(
        place.master,
        properties,
        folder=settings.parent,
        tasks=1 if kind == "stream" else pipeline.lanes,
        cluster=place.cluster,
    )
    if place.kubernetes:
        application = application or f"{_IN_IMAGE}/{kind}.py"
        conf["spark.kubernetes.driver.pod.name"] = identity["application"].partition(":")[2]
        more = pipeline.chosen()
        path = str(settings_file)
    else:
        application = application or str(submit.job_file(kind))
        more = {}
        path = settings.name if place.cluster else str(settings)
        if not submit.is_local(place.master):
            files = ",".join(filter(None, [files, str(settings)]))
    return application, conf, files, submit.arguments(path, bounded=bounded, job_id=identity["id"], more=more)


def start(
    hook: Any, identity: Identity, application: str, *, variables: Mapping[str, str], ends_with_parent: bool
) -> None:
    """Start a job in client mode, as a supervised family of processes.

    :param hook: a ``SparkSubmitHook`` of the Spark provider, which makes the command line from a connection.
    :param application: the path of its entry point.
    :param variables: further ones of its environment.
    :param ends_with_parent: whether the job ends with this process, for whatever reason that ends.
    """
    made = submission(hook, application)
    supervise.start(
        Path(identity["folder"]),
        made.command,
        {**submit.environment(master=made.master), **variables, **made.variables},
        ends_with_parent=ends_with_parent,
    )


def send(
    hook: Any, application: str, started: Callable[[subprocess.Popen[str]], Any], named: Callable[[str], Any]
) -> None:
    """Hand a job to a cluster; returns once the cluster has accepted it.

    :param hook: a ``SparkSubmitHook`` of the Spark provider, which makes the command line from a connection.
    :param application: the entry point; a path here, or ``local:`` and a path in the image.
    :param started: called with spark-submit's process, which has to be ended if the task is.
    :param named: called with what YARN calls the application, as soon as that is known.
    :raises JobDied: spark-submit failed; the message has the end of its output. The cluster may have accepted the job
        all the same.
    """
    made = submission(hook, application)
    tail: list[str] = []
    with subprocess.Popen(
        made.command, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
        errors="replace", env={**submit.environment(master=made.master, cluster=True), **made.variables},
    ) as child:  # fmt: skip
        try:
            started(child)
            assert child.stdout is not None
            for line in child.stdout:
                log.info("%s", line.rstrip())
                tail = [*tail[-19:], line]
                if made.master.startswith("yarn") and (match := _APPLICATION_ID.search(line)):
                    named(match[0])
        except BaseException:
            child.terminate()
            raise
    if child.returncode:
        raise JobDied(f"spark-submit ended with exit code {child.returncode}.\n{''.join(tail)}", kind=JobDied.__name__)
