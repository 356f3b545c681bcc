"""What whoever submits a job keeps of it, to find it again: Airflow stores it between a task's tries."""

from __future__ import annotations

import os
import shutil
import socket
from pathlib import Path
from typing import TYPE_CHECKING, TypedDict

from airflow_bottledwater.jobs import run_directory
from airflow_bottledwater.jobs.run_directory import RUN_FOLDER, Submission

if TYPE_CHECKING:
    from airflow_bottledwater.state.control_records import JobRecord


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


def of_record(job_id: str, record: JobRecord) -> Identity:
    """The identity of a job by its record in Kafka: as the task that has submitted it keeps it, or, of a command's job,
    as the job reports it."""
    owner = record.owner
    return {
        "id": job_id,
        "host": record.host if owner is None else owner.host,
        "folder": record.folder if owner is None else owner.folder,
        "application": record.application,
        "master": "" if owner is None else owner.master,
    }


def folder_here(identity: Identity) -> Path | None:
    """The job's run directory, if it was started on this host in client mode, and is still there: only then can its
    processes be seen. A folder of another user is not one, and none that is not this job's, or a command's: anybody may
    write into the topic that says where it is, and what is there is removed."""
    if not identity["folder"] or identity["host"] != socket.gethostname():
        return None
    folder = Path(identity["folder"])
    if not folder.is_dir() or folder.stat().st_uid != os.getuid():
        return None
    submission = run_directory.read(folder, Submission)
    mine = submission.id == identity["id"] if submission is not None else folder.name.startswith(RUN_FOLDER)
    return folder if mine else None


def forget(identity: Identity) -> None:
    """Remove an ended job's folder, if it is on this host."""
    if (folder := folder_here(identity)) is not None:
        shutil.rmtree(folder, ignore_errors=True)
