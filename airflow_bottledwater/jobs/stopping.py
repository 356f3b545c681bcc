"""Stops a pipeline, for the command and for Airflow: asks its job to stop, wherever it runs, and ends one that does not
answer."""

from __future__ import annotations

import logging
import os
import socket
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING

from airflow_bottledwater.errors import StateError
from airflow_bottledwater.jobs.supervise import RUN_FOLDER
from airflow_bottledwater.pipeline.settings import Pipeline

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from airflow_bottledwater.model.job import Job
    from airflow_bottledwater.state.control_records import JobRecord

log = logging.getLogger("bottledwater")


def stop(pipeline: Pipeline, *, retire: bool, timeout: float, say: Callable[[str], object]) -> None:
    """Stop the job that works on the slot, and those that are starting; the pipeline is not meant to run from then on.

    :param retire: whether the slot may be dropped then.
    :param timeout: seconds for the job to end in order.
    :param say: called with what people should know.
    :raises StateError: no job has ever reported for the slot.
    """
    from airflow_bottledwater.jobs import control, submitted
    from airflow_bottledwater.postgres.connect import session
    from airflow_bottledwater.postgres.server import identify

    with session(pipeline.postgres) as connection:
        cluster = identify(connection)
    asked = control.request_stop(pipeline, cluster, retire=retire)
    # a job that is starting, or is started again at this moment, has not reported yet
    name, claim = cluster.pipeline(pipeline.slot), asked.job.id if asked is not None else ""
    others = submitted.request_stop_of_others(pipeline, name, claim)
    if others:
        log.info("Jobs that are starting were asked to stop, too: %d.", others)
    if asked is None:
        if not others:
            raise StateError(f"No job has ever reported for slot {pipeline.slot!r}.")
        return
    ended = control.wait_ended(pipeline, cluster, asked.job, timeout=timeout)
    if ended is not None:
        say(f"The job is {ended.state}.")
        if not ended.over:
            minutes = control.REQUEST_HOLDS / 60
            say(f"A job that continues it within {minutes:.0f} minutes stops, too.")
        return
    log.warning("The job did not answer within %.0f s.", timeout)
    _give_up(pipeline, name, asked.job, say)
    if retire:
        control.request_stop(pipeline, cluster, retire=True)


def _give_up(pipeline: Pipeline, name: str, job: Job, say: Callable[[str], object]) -> None:
    from airflow_bottledwater.jobs import submitted
    from airflow_bottledwater.jobs.fence import give_up
    from airflow_bottledwater.model.outcome import Outcome

    def end() -> None:
        # what Airflow has submitted is not submitted again
        submitted.request_stop_of_others(pipeline, name, "")
        records = [
            (job_id, record)
            for job_id, record in submitted.unfinished(submitted.records(pipeline), pipeline.slot, name).items()
            if record.claim == job.id
        ]
        for job_id, record in records:
            submitted.report_end(pipeline, job_id, record.kind, Outcome(ok=True, stopped=True), [], asked=False)
        if not _end(job, [record for _, record in records]):
            say(f"Kill the remaining process on host {job.host}: process {job.pid}.")

    give_up(pipeline, job.id, "stop", end)


def _end(job: Job, records: Iterable[JobRecord]) -> bool:
    """End the job's processes, if they are on this host, or its application; returns whether nothing is left."""
    from airflow_bottledwater.jobs import ending, run_directory, submit, supervise

    # anybody may make a folder there
    found = Path(tempfile.gettempdir()).glob(f"{RUN_FOLDER}*")
    folders = [folder for folder in found if folder.stat().st_uid == os.getuid()]
    for record in records:
        if record.application:
            master = record.owner.master if record.owner is not None else ""
            return ending.cancel(master, record.application, submit.environment(master=master))
        if record.owner is not None and record.owner.folder:
            folders.append(Path(record.owner.folder))
    if job.host != socket.gethostname():
        return False
    for folder in folders:
        driver = run_directory.read(folder, run_directory.Driver)
        # a process id may be another process's by now: what counts is that the supervisor's family lives
        if driver is not None and driver.pid == job.pid and supervise.running(folder):
            return ending.end_here(folder)
    return False
