"""What whoever submits a job keeps of it, to find it again: Airflow stores it between a task's tries."""

from __future__ import annotations

import shutil
import socket
from pathlib import Path
from typing import TypedDict


class Identity(TypedDict):
    """Identifies a job; Airflow stores it between a task's tries.

    :param id: the job's id in Kafka.
    :param host: name of the host that it was submitted on.
    :param folder: in client mode the absolute path of its run directory there; otherwise empty.
    :param application: in cluster mode, what the cluster's manager calls it, as far as it is known (YARN's application
        id; on Kubernetes namespace and pod of the driver, with a colon between them); otherwise empty.
    :param master: Spark's master.
    """

    id: str
    host: str
    folder: str
    application: str
    master: str


def folder_here(identity: Identity) -> Path | None:
    """The job's run directory, if it was started on this host in client mode: only then can its processes be seen."""
    return Path(identity["folder"]) if identity["folder"] and identity["host"] == socket.gethostname() else None


def forget(identity: Identity) -> None:
    """Remove an ended job's folder, if it is on this host."""
    if (folder := folder_here(identity)) is not None:
        shutil.rmtree(folder, ignore_errors=True)
