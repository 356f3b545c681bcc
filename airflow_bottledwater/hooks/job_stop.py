"""Stops a job, wherever it runs: by a request through Kafka; if nobody answers, it is fenced by a claim, and its replication connection
is ended on the server. Then what is left of it is ended where it can be reached: its processes on this host, or its application in a
cluster."""

from __future__ import annotations

import logging
import os
import subprocess
import time
from pathlib import Path

from airflow_bottledwater.errors import BottledWaterError, Outage
from airflow_bottledwater.hooks import places, spark_job
from airflow_bottledwater.hooks.shared_records import SharedRecords
from airflow_bottledwater.hooks.spark_job import Identity
from airflow_bottledwater.settings import Pipeline
from airflow_bottledwater.spark import run_directory, submit, supervise
from airflow_bottledwater.spark.run_directory import Driver
from airflow_bottledwater.state.control_records import JobRecord, decode, job_key

log = logging.getLogger(__name__)

#: seconds for the command that cancels an application
_CANCEL_SECONDS = 60.0


def stop(pipeline: Pipeline, identity: Identity, *, timeout: float = 40.0) -> None:
    """Stop a job and free its slot, which is kept. Each step is logged.

    :param timeout: seconds for the job to end in order.
    :raises SlotInUse: the slot did not become free.
    :raises Outage: the source does not answer.
    """
    from airflow_bottledwater.provision.stop import free

    folder = spark_job.folder_here(identity)
    if folder is not None:
        supervise.ask(folder)
    if not _request(pipeline, identity, folder, timeout):
        _fence(pipeline)
        end_processes(identity)
    elif folder is not None:
        supervise.stop(folder)
    free(pipeline)


def end_processes(identity: Identity) -> None:
    """End what is left of a job where it can be reached: its processes on this host, or its application in a cluster."""
    if (folder := spark_job.folder_here(identity)) is not None:
        if supervise.running(folder):
            log.info("The job's processes on this host are ended.")
        supervise.stop(folder, timeout=5.0)
    elif identity["application"]:
        _cancel(identity)
    elif identity["folder"]:
        log.warning(
            "Processes of the job that are left on host %s cannot be ended from here; they publish nothing any more.",
            identity["host"],
        )


def _request(pipeline: Pipeline, identity: Identity, folder: Path | None, timeout: float) -> bool:
    """Ask the job to stop, and wait for its end; returns whether it has ended."""
    from airflow_bottledwater.state import jobs

    try:
        jobs.request_stop(pipeline, identity["id"])
    except Outage as error:
        log.warning("The job cannot be asked to stop: %s", error)
        return folder is not None and not supervise.running(folder)
    log.info("The job was asked to stop.")
    if _over(folder):
        return True
    shared = SharedRecords.acquire(pipeline.kafka)
    deadline = time.monotonic() + timeout
    try:
        while time.monotonic() < deadline:
            record = decode(JobRecord, shared.get(job_key(identity["id"]))[0])
            if record is not None and record.outcome is not None:
                log.info("The job has ended in order.")
                return True
            if folder is not None and not run_directory.present(folder, Driver):
                log.info("The job has not begun yet.")
                return False
            if _over(folder):
                return True
            time.sleep(0.3)
    except Outage as error:
        log.warning("Kafka does not say whether the job has ended: %s", error)
        return False
    finally:
        shared.release()
    log.warning("The job has not answered within %.0f s.", timeout)
    return False


def _over(folder: Path | None) -> bool:
    """Whether the job is known to have no process on this host any more."""
    return folder is not None and not supervise.running(folder)


def _fence(pipeline: Pipeline) -> None:
    from airflow_bottledwater.provision import stop

    try:
        stop.fence(pipeline)
    except BottledWaterError as error:
        log.warning("The job could not be fenced: %s", error)


def _cancel(identity: Identity) -> None:
    """Cancel an application in its cluster; a failure is logged."""
    try:
        place = places.find(identity["conn_id"], mode="cluster")
    except BottledWaterError as error:
        log.warning("The application %s could not be cancelled: %s", identity["application"], error)
        return
    variables = spark_job.environment(os.environ, master=place.master)
    command = submit.cancel(place.master, identity["application"], place.namespace, variables)
    if command is None:
        log.warning("The application %s cannot be cancelled from here.", identity["application"])
        return
    try:
        done = subprocess.run(
            command, check=False, env=variables, capture_output=True, text=True, timeout=_CANCEL_SECONDS
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        log.warning("The application %s could not be cancelled: %s", identity["application"], error)
        return
    if done.returncode:
        log.warning("The application %s could not be cancelled: %s", identity["application"], done.stderr[-500:])
    else:
        log.info("The application %s was cancelled.", identity["application"])
