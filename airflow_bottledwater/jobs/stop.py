"""Stops a job, or the pipeline that it works for, wherever it runs, for Airflow and for the command: by a request through Kafka; if nobody answers, it is fenced by a claim, and its
replication connection is ended on the server. Only then what is left of it is ended where it can be reached, which may
take a minute: its processes on this host, or its application in a cluster."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, get_args

from airflow_bottledwater.decoding import prepare
from airflow_bottledwater.errors import BottledWaterError, Outage, StateError
from airflow_bottledwater.jobs import identity as identities
from airflow_bottledwater.jobs import leftovers, run_directory, supervise, watch
from airflow_bottledwater.jobs.identity import Identity
from airflow_bottledwater.jobs.run_directory import Driver, RunRecord
from airflow_bottledwater.jobs.watch import Ended
from airflow_bottledwater.model.outcome import Outcome
from airflow_bottledwater.pipeline.settings import Settings
from airflow_bottledwater.state.control_records import JobRecord, decode, job_key
from airflow_bottledwater.state.control_topic import ControlTopic

if TYPE_CHECKING:
    from airflow_bottledwater.model.job import Job

log = logging.getLogger(__name__)

# Airflow stops a job in a signal's handler (on_kill), which may have interrupted the decoding of one
prepare(*get_args(RunRecord))

#: seconds for a job that has fallen silent to answer all the same, before it is replaced
LAST_CHANCE = 2.0


def stop(pipeline: Settings, identity: Identity, *, timeout: float = 40.0, final: bool = True) -> bool:
    """Stop a job and free its slot, which is kept; a job that works on the slot since is left alone. Each step is
    logged.

    :param timeout: seconds for the job to end in order.
    :param final: whether the job has no task any more; otherwise it is going to be replaced.
    :returns: whether it has ended in order. Otherwise the request stays in Kafka, should the job wake up or begin
        later.
    :raises SlotInUse: the slot did not become free.
    :raises Outage: the source does not answer.
    """
    from airflow_bottledwater.jobs import fence

    folder = identities.folder_here(identity)
    if folder is not None:
        supervise.ask(folder)
    claim, answered = _request(pipeline, identity, folder, timeout, final)
    if answered:
        if folder is not None:
            supervise.stop(folder)
        if fence.holds(pipeline, claim):
            fence.free(pipeline)
        return True

    def end() -> None:
        leftovers.end(identity)
        _report(pipeline, identity, final)

    fence.fence_and_release(pipeline, claim, "end" if final else "replace", end)
    return False


def stop_and_forget(pipeline: Settings, identity: Identity, *, final: bool = True) -> None:
    """Stop a job, and remove what is left of it. The record of one that did not answer stays, with the request: should
    it wake up.

    :param final: see :func:`stop`.
    :raises BottledWaterError: see :func:`stop`.
    """
    if stop(pipeline, identity, final=final):
        watch.forget(pipeline, identity, asked=True)
    else:
        identities.forget(identity)


def clear_away(pipeline: Settings, identity: Identity, ended: Ended) -> None:
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
        watch.forget(pipeline, identity, asked=ended.asked or ended.outcome.stopped)


def stop_pipeline(pipeline: Settings, *, retire: bool, timeout: float, say: Callable[[str], object]) -> None:
    """Stop the job that works on the slot, and those that are starting; the pipeline is not meant to run from then on.

    :param retire: whether the slot may be dropped then.
    :param timeout: seconds for the job to end in order.
    :param say: called with what people should know.
    :raises StateError: no job has ever reported for the slot.
    """
    from airflow_bottledwater.jobs import pipelines, requests
    from airflow_bottledwater.postgres.connect import session
    from airflow_bottledwater.postgres.server import identify
    from airflow_bottledwater.state import control_topic
    from airflow_bottledwater.state.identity import forgetting

    # what a person starts while this waits is started behind the stop
    at = time.time()
    with session(pipeline.postgres) as connection:
        cluster = identify(connection)
    asked = requests.stop_pipeline(pipeline, cluster, retire=retire, at=at)
    # a job that is starting, or is started again at this moment, has not reported yet
    name, claim = cluster.pipeline(pipeline.slot), asked.job.id if asked is not None else ""
    others = requests.stop_starting(pipeline, name, claim)
    if others:
        log.info("Jobs that are starting were asked to stop, too: %d.", others)
    if asked is None:
        if not others:
            reported = pipelines.statuses(control_topic.read(pipeline.kafka))
            of_others = [each for each, status in reported.items() if status.slot == pipeline.slot]
            raise StateError(
                f"No job has ever reported for slot {pipeline.slot!r} of this database ({name}). If it is the right one, "
                "none begins: neither of a run that was asked for before now, nor of a schedule or of another DAG, until "
                "a person starts the pipeline.",
                " ".join(f"One of {each} has. {forgetting(each)}" for each in of_others),
            )
        return
    ended = requests.wait_ended(pipeline, cluster, asked.job, timeout=timeout)
    if ended is not None:
        if ended.wanted:
            # it has ended by itself, before it heard of the request
            requests.stop_pipeline(pipeline, cluster, retire=retire, at=at)
        say(f"The job is {ended.state}.")
        if not ended.over:
            minutes = requests.REQUEST_HOLDS / 60
            say(f"A job that continues it within {minutes:.0f} minutes stops, too.")
        if not asked.ended and ended.job.owner is None:
            say(
                "Where its command is started again after exit code 0 (a Deployment of Kubernetes, restart: always), end "
                "it there, and stop it again."
            )
        return
    log.warning("The job did not answer within %.0f s.", timeout)
    _give_up(pipeline, name, asked.job, say)
    if retire:
        requests.stop_pipeline(pipeline, cluster, retire=True, at=at)


def _give_up(pipeline: Settings, name: str, job: Job, say: Callable[[str], object]) -> None:
    from airflow_bottledwater.jobs import fence, requests, submitted

    def end() -> None:
        # what Airflow has submitted is not submitted again
        requests.stop_starting(pipeline, name, "")
        ended = False
        for job_id, record in submitted.unfinished(submitted.records(pipeline), pipeline.slot, name).items():
            if record.claim == job.id:
                submitted.report_end(pipeline, job_id, record.kind, Outcome(ok=True, stopped=True), [], asked=False)
                ended = leftovers.end(identities.of_record(job_id, record))
        if not ended:
            say(f"Kill the remaining process on host {job.host}: process {job.pid}.")

    fence.fence_and_release(pipeline, job.id, "stop", end)


def _request(
    pipeline: Settings, identity: Identity, folder: Path | None, timeout: float, final: bool
) -> tuple[str, bool]:
    """Ask the job to stop, and wait for its end; returns the id of its claim on the slot (empty if it has none, or it
    is not known), and whether it has ended."""
    from airflow_bottledwater.jobs import requests

    claim = ""
    try:
        requests.stop_job(pipeline.kafka, identity["id"], replaced=not final)
        log.info("The job was asked to stop.")
        with ControlTopic.of(pipeline.kafka) as shared:
            deadline = time.monotonic() + timeout
            while True:
                record = decode(JobRecord, shared.get(job_key(identity["id"]))[0])
                claim = record.claim if record is not None else claim
                if record is not None and record.outcome is not None and watch.is_pending(identity, record):
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
    except Outage as error:
        log.warning("Kafka does not take the request, or does not say whether the job has ended: %s", error)
        return claim, _over(folder)
    log.warning("The job has not answered within %.0f s.", timeout)
    return claim, False


def _over(folder: Path | None) -> bool:
    """Whether the job is known to have no process on this host any more."""
    return folder is not None and not supervise.running(folder)


def _report(pipeline: Settings, identity: Identity, final: bool) -> None:
    """Report the end of a job that did not answer, so that nobody takes it for one that runs."""
    from airflow_bottledwater.jobs import submitted

    outcome = Outcome(ok=final, stopped=final, error="" if final else "It did not answer.", transient=not final)
    try:
        submitted.report_end(pipeline, identity["id"], "", outcome, [])
    except BottledWaterError as error:
        log.warning("The job's end could not be reported: %s", error)
