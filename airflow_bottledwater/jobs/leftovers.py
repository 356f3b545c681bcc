"""Ends what is left of a job that does not answer, where it can be reached: its processes on this host, or its
application in a cluster. It has lost its slot before."""

from __future__ import annotations

import logging
import re
import socket
import subprocess
from collections.abc import Mapping

from airflow_bottledwater.jobs import identity as identities
from airflow_bottledwater.jobs import submit, supervise
from airflow_bottledwater.jobs.identity import Identity

log = logging.getLogger(__name__)

#: what YARN and Kubernetes call an application: anybody may write into the topic that says it, and Spark takes a pattern
_APPLICATION = re.compile(r"application_\d+_\d+|([a-z0-9-]+:)?[a-z0-9]([a-z0-9.-]*[a-z0-9])?")
#: seconds for the command that cancels an application
_CANCEL_SECONDS = 60.0


def end(identity: Identity) -> bool:
    """End what is left of a job where it can be reached: its processes on this host, or its application in a cluster;
    returns whether nothing is left. If it cannot be reached, the log says so."""
    if (folder := identities.folder_here(identity)) is not None:
        if supervise.running(folder):
            log.info("The job's processes on this host are ended.")
        return supervise.stop(folder, timeout=5.0)
    if identity["application"]:
        master = identity["master"]
        return cancel(master, identity["application"], submit.environment(master=master))
    if identity["folder"] and identity["host"] != socket.gethostname():
        log.warning(
            "If processes of the job are left on host %s, they cannot be ended from here. Once the slot is claimed, "
            "by a stop or by the next job, they publish nothing any more.",
            identity["host"],
        )
    return False


def cancel(master: str, application: str, environment: Mapping[str, str]) -> bool:
    """Cancel an application in its cluster; returns whether that was possible. If not, the log says why, and how to do
    it by hand.

    :param master: Spark's master.
    :param application: see :func:`~airflow_bottledwater.jobs.submit.cancel`.
    """
    if not _APPLICATION.fullmatch(application):
        log.warning("The job's record has %r for its application, which is not the name of one.", application)
        return False
    command = submit.cancel(master, application, environment)
    problem = "Spark's commands are not installed on this host, or the master is not known."
    if command is not None:
        try:
            done = subprocess.run(
                command, check=False, env=environment, capture_output=True, text=True, timeout=_CANCEL_SECONDS
            )
            problem = done.stderr[-500:].strip() if done.returncode else ""
        except (OSError, subprocess.TimeoutExpired) as error:
            problem = str(error)
    if problem:
        log.warning(
            "The application %s was not cancelled: %s\nCancel it: %s", application, problem, by_hand(application)
        )
    else:
        log.info("The application %s was cancelled.", application)
    return not problem


def by_hand(application: str) -> str:
    """The command with which a person cancels an application."""
    if application.startswith("application_"):
        return f"yarn application -kill {application}"
    namespace, _, pod = application.rpartition(":")
    return f"kubectl delete pod {pod} --namespace {namespace or 'default'}"
