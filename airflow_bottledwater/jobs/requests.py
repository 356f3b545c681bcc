"""Requests to stop: written, and answered for jobs that do not do it themselves, in one place.

A request to stop names the pipeline, and by its epoch the job that was seen last. It holds for that job, and for
the next one if that continues it: a stop that is requested between a job's death and its restart, or between the
snapshot and the stream, must not be lost, and an old request that no job answered must not end a job that a person
starts on purpose later. So a job obeys

* every request that is written while it listens, if it names the job itself, or an earlier one and has a time;
* a request that was written before, and that no job has answered, if it names the job itself; or if it names an
  earlier one, the last job is not over (:attr:`StatusRecord.over`), and the request is at most
  :data:`REQUEST_HOLDS` seconds old (a job that died, or failed for a transient reason, is submitted again within
  that time).

Other requests that were written before are removed. One that the job obeys is removed after its last status: if the
job fails for a transient reason on its way to the end, the request holds for the job that continues it.

A request to a submitted job, by its id, holds for this job alone, whether it runs already or not yet.

No job hears of a stop that is submitted only later: by a run of Airflow that waits in a queue, say. So that somebody
has asked a pipeline to stop is also kept with the time, until it is started again, and whoever is about to begin
something for the pipeline compares it with when a person has asked for that (:func:`refuse_stopped`).
"""

from __future__ import annotations

import contextlib
import logging
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from typing import Any

from airflow_bottledwater.errors import BottledWaterError, Outage, PipelineStopped, StopRequested, TakenOver
from airflow_bottledwater.jobs import submitted
from airflow_bottledwater.jobs.status import read_status
from airflow_bottledwater.model.amounts import moment
from airflow_bottledwater.model.job import Job
from airflow_bottledwater.model.slot import Cluster
from airflow_bottledwater.pipeline.settings import Settings
from airflow_bottledwater.policy import transient
from airflow_bottledwater.postgres.connect import session
from airflow_bottledwater.postgres.server import identify
from airflow_bottledwater.state import control_topic
from airflow_bottledwater.state.control_records import (
    REPLACEMENT,
    REQUEST,
    STATUSES,
    STOPPED,
    TASK,
    StatusRecord,
    StoppedBy,
    StopRequest,
    decode,
    encode,
    request_key,
    status_key,
    stop_key,
    stopped_key,
)
from airflow_bottledwater.state.control_topic import ControlTopic
from airflow_bottledwater.state.store import RawRecords

log = logging.getLogger(__name__)

#: seconds for which an unanswered request to stop also holds for the job that continues the one that it names
REQUEST_HOLDS = 600.0


def holds(request: StopRequest, status: StatusRecord | None, epoch: int, now: float) -> bool:
    """Whether a job obeys a request that was written before it listened; for the rules, see above.

    :param status: the pipeline's last status, perhaps that of an earlier job.
    :param epoch: the job's epoch.
    :param now: seconds since 1970.
    """
    if request.epoch == epoch:
        return True
    if request.epoch > epoch or request.at is None or not abs(now - request.at) <= REQUEST_HOLDS:
        return False
    # a later job than the one that was asked has removed the request if it did not obey it, and also if it ended as it
    # was asked to
    return status is not None and status.job.epoch >= request.epoch and not status.over


def stop_pipeline(
    pipeline: Settings, cluster: Cluster, *, retire: bool = False, at: float | None = None
) -> StatusRecord | None:
    """Ask the running job of a slot, or the one that continues it, to stop. If the last job is over, no request is
    written: no job runs, and none continues it. That the pipeline is not to run is recorded in any case, also if it is
    only about to have its first job.

    :param retire: stop for good: ``drop_slot(when='retired')`` may then drop the slot.
    :param at: when somebody has asked for that, in seconds since 1970; None: now.
    :returns: the last status of the pipeline, which names the job that is asked; None if there is none, so that no job
        is asked.
    :raises Outage: Kafka does not take the request.
    """
    name, at = cluster.pipeline(pipeline.slot), time.time() if at is None else at
    control_topic.write(pipeline.kafka, {stopped_key(name): encode(StopRequest(REQUEST, retire=retire, at=at))})
    status = read_status(pipeline, name)
    if status is None:
        return None
    if not status.over:
        request = StopRequest(REQUEST, status.job.epoch, retire=retire, at=at)
        control_topic.write(pipeline.kafka, {request_key(name): encode(request)})
    if status.ended and (status.wanted or retire):
        unwanted = replace(status, retired=status.retired or retire, stopped_by=REQUEST)
        control_topic.write(pipeline.kafka, {status_key(name): encode(unwanted)})
    return status


def stop_job(kafka: Mapping[str, str], job_id: str, *, replaced: bool = False) -> None:
    """Ask a submitted job to stop, whether it runs already or not yet.

    :param kafka: properties of the client.
    :param replaced: whether another job is about to take its place.
    :raises Outage: Kafka does not take it.
    """
    request = StopRequest(REPLACEMENT if replaced else TASK, at=time.time())
    control_topic.write(kafka, {stop_key(job_id): encode(request)})


def stop_starting(pipeline: Settings, name: str, claim: str) -> int:
    """Ask the submitted jobs of a pipeline to stop that have not reported to it yet: those that are starting, or have
    just claimed the slot. Returns how many jobs on a slot of this name were asked; those of another pipeline do not
    obey. Verifications, which are not counted, hear of it, too: they go on, and do not claim the slot any more.

    :param name: the pipeline's.
    :param claim: the id of the job that has reported last, which is left out; empty if there is none.
    :raises Outage: Kafka does not answer.
    """
    others = {
        each: record
        for each, record in submitted.unfinished(control_topic.read(pipeline.kafka), pipeline.slot, name).items()
        if not claim or record.claim != claim
    }
    control_topic.write(
        pipeline.kafka, {stop_key(each): encode(StopRequest(REQUEST, pipeline=name, at=time.time())) for each in others}
    )
    return sum(record.kind != submitted.VERIFY for record in others.values())


def stop_since(found: Mapping[str, Any], name: str, asked: float | None) -> StopRequest | None:
    """The request to stop behind which nothing is to be begun for a pipeline; None if there is none, or a person has
    started the pipeline since.

    :param found: records of the shared topic.
    :param name: the pipeline's.
    :param asked: when a person has asked for what is about to begin, in seconds since 1970; None: nobody has.
    """
    status, last = decode(StatusRecord, found.get(status_key(name))), decode(StopRequest, found.get(stopped_key(name)))
    if status is not None and status.wanted:
        return None
    if last is None and status is not None:
        last = StopRequest(REQUEST, retire=status.retired)  # of a version that did not keep when it was
    return None if last is None or (asked is not None and asked > (last.at or 0.0)) else last


def _outlived(found: Mapping[str, Any], name: str, asked: float | None) -> bool:
    """Whether a request to stop is left that no job will answer, since its job has ended, and a person has asked behind
    it for what is about to begin. Parameters: see :func:`stop_since`."""
    status, left = decode(StatusRecord, found.get(status_key(name))), decode(StopRequest, found.get(request_key(name)))
    if asked is None or status is None or not status.ended:
        return False
    return left is not None and left.at is not None and left.at < asked


def refuse_stopped(pipeline: Settings, asked: float | None) -> None:
    """Check that a pipeline was not asked to stop behind the moment at which a person has asked for what is about to
    begin: who has asked for something before, or without knowing, does not undo what was asked last. Who has asked
    behind it does: a request that no job has answered would end what is about to begin, and is removed.

    :param asked: see :func:`stop_since`.
    :raises PipelineStopped: it was.
    :raises Outage: Kafka does not answer; or the source, which is asked only if a pipeline with a slot of this name was
        asked to stop.
    """
    found = control_topic.read(pipeline.kafka)
    names = {
        key.removeprefix(each)
        for key in found
        for each in (STATUSES, STOPPED)
        if key.startswith(each) and key.endswith(f"/{pipeline.slot}")
    }
    if not any(stop_since(found, name, asked) or _outlived(found, name, asked) for name in names):
        return
    with session(pipeline.postgres, "Identifying the cluster") as connection:
        name = identify(connection).pipeline(pipeline.slot)
    if (last := stop_since(found, name, asked)) is None:
        if _outlived(found, name, asked):
            control_topic.write(pipeline.kafka, {request_key(name): None})
        return
    how, when = "retired" if last.retire else "asked to stop", f" on {moment(last.at)}" if last.at else ""
    why = "no person has asked for this since" if asked is None else f"this was asked for before, on {moment(asked)}"
    raise PipelineStopped(
        f"The pipeline with slot {pipeline.slot!r} was {how}{when}, and {why}: nothing is begun.",
        "If it is to run again, start it: trigger its DAG, or clear a run of it (a schedule, Airflow's backfills and "
        "other DAGs do not start it again), take the action start of its control DAG, or run the command.",
    )


def pass_on(pipeline: Settings, cluster: Cluster, job: Job, *, interrupted: int = 0, by: StoppedBy = TASK) -> None:
    """Ask one job to stop, whether or not it has reported yet; the request does not hold for the one that continues it.

    :param interrupted: the number of a signal from outside the pipeline that is passed on; 0 if a stop was requested.
    :param by: who has stopped the job, see :class:`StatusRecord`.
    :raises Outage: Kafka does not take the request.
    """
    name = cluster.pipeline(pipeline.slot)
    asked = decode(StopRequest, control_topic.read(pipeline.kafka).get(request_key(name)))
    if asked is None or asked.at is None:  # what somebody has asked for holds longer, and is not overwritten
        request = StopRequest(by or TASK, job.epoch, interrupted=interrupted)
        control_topic.write(pipeline.kafka, {request_key(name): encode(request)})


def want(pipeline: Settings, cluster: Cluster) -> StatusRecord | None:
    """Record that a pipeline is meant to run again, although it was asked to stop or retired; a request that no job has
    answered is removed. This starts nothing.

    :returns: its last status before that; None if there is none.
    :raises Outage: Kafka does not answer.
    """
    name = cluster.pipeline(pipeline.slot)
    status = read_status(pipeline, name)
    changes: RawRecords = {}
    if status is not None and status.ended and not status.wanted:
        wanted = status.told(stopped_by="", retired=False)
        changes[status_key(name)] = encode(wanted)
    control_topic.write(pipeline.kafka, {**changes, request_key(name): None, stopped_key(name): None})
    return status


def not_begun(pipeline: Settings, why: str, *, claim: str = "", retry: bool = False) -> None:
    """Record why no job of a pipeline could begin, for whoever looks at the pipeline, until one reports: a pipeline that
    is started is meant to run, although it may have been stopped before. It does nothing if no job has ever reported,
    or if one runs, or if the job that failed has reported that itself.

    :param why: as sentences.
    :param claim: the id of the claim of the job that failed; empty if it has made none.
    :param retry: whether a retry failed: a pipeline that was stopped meanwhile stays stopped.
    :raises Outage: PostgreSQL or Kafka does not answer.
    """
    with session(pipeline.postgres, "Identifying the cluster") as connection:
        name = identify(connection).pipeline(pipeline.slot)
    status = read_status(pipeline, name)
    if status is None or (status.failed and status.job.id == claim) or (retry and not status.wanted):
        return
    if status.ended:
        told = status.told(error=why, permanent=True, stopped_by="", retired=False)
        control_topic.write(pipeline.kafka, {status_key(name): encode(told)})


def note(pipeline: Settings, error: BottledWaterError, *, claim: str = "", retry: bool = False) -> None:
    """The same with an error, which is told all the same if this cannot be recorded; see :func:`not_begun`."""
    try:
        not_begun(pipeline, str(error), claim=claim, retry=retry)
    except BottledWaterError as unsaid:
        log.info("Only this log has why no job begins: %s", unsaid)


@contextlib.contextmanager
def noting(pipeline: Settings, *, retry: Callable[[], bool] = lambda: False) -> Iterator[None]:
    """Within this block, an error after which a retry cannot help is noted with the pipeline, too: no job begins, and
    so none could say why. But for one that says who works on the slot instead, or that nobody is to.

    :param retry: see :func:`not_begun`.
    """
    try:
        yield
    except BottledWaterError as error:
        if not (transient(error) or isinstance(error, TakenOver | StopRequested | PipelineStopped)):
            note(pipeline, error, retry=retry())
        raise


def answer(pipeline: Settings, cluster: Cluster, since: float) -> tuple[bool, StatusRecord | None]:
    """Answer a request to stop between a job that has ended and the one that would continue it; returns whether there
    was one, and the pipeline's last status before that.

    :param since: seconds since 1970; what was requested before is not answered.
    :raises Outage: Kafka does not answer.
    """
    name = cluster.pipeline(pipeline.slot)
    found = control_topic.read(pipeline.kafka)
    request, status = (
        decode(StopRequest, found.get(request_key(name))),
        decode(StatusRecord, found.get(status_key(name))),
    )
    if status is None or status.over or request is None or request.at is None or request.at < since:
        return False, status
    changes: RawRecords = {}
    if status.ended:
        retired = status.retired or request.retire
        last = status.told(state="stopped", error="", retired=retired, stopped_by=REQUEST)
        changes[status_key(name)] = encode(last)
    control_topic.write(pipeline.kafka, {**changes, request_key(name): None})
    return True, status


def wait_ended(pipeline: Settings, cluster: Cluster, job: Job, *, timeout: float) -> StatusRecord | None:
    """Wait until a job, or the one that continues it, has written its last status.

    :param timeout: seconds.
    :returns: that status; None after the time-out.
    """
    key, deadline = status_key(cluster.pipeline(pipeline.slot)), time.monotonic() + timeout
    with ControlTopic.of(pipeline.kafka) as topic:
        while time.monotonic() < deadline:
            with contextlib.suppress(Outage):  # it may be back in time
                status = decode(StatusRecord, topic.get(key)[0])
                if status is not None and status.ended and status.job.epoch >= job.epoch:
                    return status
            time.sleep(0.2)
    return None
