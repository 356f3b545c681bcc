"""Stops a job, wherever it runs: by a request through Kafka; if nobody answers, it is fenced by a claim, and its
replication connection is ended on the server. Only then what is left of it is ended where it can be reached, which may
take a minute: its processes on this host, or its application in a cluster."""

from __future__ import annotations

import logging
import time
from pathlib import Path

from airflow_bottledwater.errors import BottledWaterError, Outage
from airflow_bottledwater.jobs import ending, job_watch, run_directory, submit, supervise
from airflow_bottledwater.jobs import identity as identities
from airflow_bottledwater.jobs.identity import Identity
from airflow_bottledwater.jobs.job_watch import Ended
from airflow_bottledwater.jobs.run_directory import Driver
from airflow_bottledwater.model.outcome import Outcome
from airflow_bottledwater.pipeline.settings import Pipeline
from airflow_bottledwater.state.control_records import JobRecord, decode, job_key
from airflow_bottledwater.state.control_topic import ControlTopic

log = logging.getLogger(__name__)

#: seconds for a job that has fallen silent to answer all the same, before it is replaced
LAST_CHANCE = 2.0


def stop(pipeline: Pipeline, identity: Identity, *, timeout: float = 40.0, final: bool = True) -> bool:
    """Stop a job and free its slot, which is kept; a job that works on the slot since is left alone. Each step is
    logged.

    :param timeout: seconds for the job to end in order.
    :param final: whether the job has no task any more; otherwise it is going to be replaced.
    :returns: whether it has ended in order. Otherwise the request stays in Kafka, should the job wake up or begin
        later.
    :raises SlotInUse: the slot did not become free.
    :raises Outage: the source does not answer.
    """
    from airflow_bottledwater.jobs.fence import free, give_up, holds

    folder = identities.folder_here(identity)
    if folder is not None and not folder.is_dir():
        folder = None
    if folder is not None:
        supervise.ask(folder)
    claim, answered = _request(pipeline, identity, folder, timeout, final)
    if answered:
        if folder is not None:
            supervise.stop(folder)
        if holds(pipeline, claim):
            free(pipeline)
        return True

    def end() -> None:
        end_processes(identity)
        _report(pipeline, identity, final)

    give_up(pipeline, claim, "end" if final else "replace", end)
    return False


def stop_and_forget(pipeline: Pipeline, identity: Identity, *, final: bool = True) -> None:
    """Stop a job, and remove what is left of it. The record of one that did not answer stays, with the request: should
    it wake up.

    :param final: see :func:`stop`.
    :raises BottledWaterError: see :func:`stop`.
    """
    if stop(pipeline, identity, final=final):
        job_watch.forget(pipeline, identity)
    else:
        identities.forget(identity)


def clear_away(pipeline: Pipeline, identity: Identity, ended: Ended) -> None:
    """Remove what is left of a job that has ended. One that has only fallen silent is fenced and, where possible,
    ended. The request to stop stays, should it wake up, or should one begin that was given up before."""
    if ended.lost:
        log.warning("%s", ended.outcome.error)
        try:
            stop(pipeline, identity, timeout=LAST_CHANCE, final=False)
        except BottledWaterError as error:
            log.warning("%s", error)  # the next job waits for it
        identities.forget(identity)
    elif not ended.pending:
        job_watch.forget(pipeline, identity)


def end_processes(identity: Identity) -> None:
    """End what is left of a job where it can be reached: its processes on this host, or its application in a
    cluster."""
    if (folder := identities.folder_here(identity)) is not None:
        ending.end_here(folder)
    elif identity["application"]:
        _cancel(identity)
    elif identity["folder"]:
        log.warning(
            "If processes of the job are left on host %s, they cannot be ended from here. Once the slot is claimed, "
            "by a stop or by the next job, they publish nothing any more.",
            identity["host"],
        )


def _request(
    pipeline: Pipeline, identity: Identity, folder: Path | None, timeout: float, final: bool
) -> tuple[str, bool]:
    """Ask the job to stop, and wait for its end; returns the id of its claim on the slot (empty if it has none, or it
    is not known), and whether it has ended."""
    from airflow_bottledwater.jobs import submitted

    claim = ""
    try:
        submitted.request_stop(pipeline, identity["id"], replace=not final)
        log.info("The job was asked to stop.")
        shared = ControlTopic.of(pipeline.kafka)
        try:
            deadline = time.monotonic() + timeout
            while True:
                record = decode(JobRecord, shared.get(job_key(identity["id"]))[0])
                claim = record.claim if record is not None else claim
                if record is not None and record.outcome is not None and job_watch.is_pending(identity, record):
                    log.info("The job was given up before it began.")
                    return claim, False
                if record is None and not identity["folder"]:
                    log.info("The job is not known in Kafka. It may wait in its cluster, if it could not be announced.")
                    return claim, False
                if record is None or record.outcome is not None or _over(folder):
                    log.info("The job has ended.")
                    return claim, True
                if folder is not None and not run_directory.present(folder, Driver):
                    log.info("The job has not begun yet.")
                    return claim, False
                if time.monotonic() > deadline:
                    break
                time.sleep(0.3)
        finally:
            shared.close()
    except Outage as error:
        log.warning("Kafka does not take the request, or does not say whether the job has ended: %s", error)
        return claim, _over(folder)
    log.warning("The job has not answered within %.0f s.", timeout)
    return claim, False


def _over(folder: Path | None) -> bool:
    """Whether the job is known to have no process on this host any more."""
    return folder is not None and not supervise.running(folder)


def _report(pipeline: Pipeline, identity: Identity, final: bool) -> None:
    """Report the end of a job that did not answer, so that nobody takes it for one that runs."""
    from airflow_bottledwater.jobs import submitted

    outcome = Outcome(ok=final, stopped=final, error="" if final else "It did not answer.", transient=not final)
    try:
        submitted.report_end(pipeline, identity["id"], "", outcome, [])
    except BottledWaterError as error:
        log.warning("The job's end could not be reported: %s", error)


def _cancel(identity: Identity) -> None:
    """Cancel an application in its cluster; a failure is logged."""
    ending.cancel(identity["master"], identity["application"], submit.environment(master=identity["master"]))
