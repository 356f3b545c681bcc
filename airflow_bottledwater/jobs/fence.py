"""What is done about a job that does not answer a request to stop: it is fenced, and its slot is freed, from any
host."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any, Literal, get_args

from airflow_bottledwater.backoff import Backoff
from airflow_bottledwater.errors import BottledWaterError, Outage, TakenOver
from airflow_bottledwater.jobs import requests, submitted
from airflow_bottledwater.jobs.status import read_status
from airflow_bottledwater.model.job import Job
from airflow_bottledwater.model.slot import Cluster
from airflow_bottledwater.pipeline.settings import Settings
from airflow_bottledwater.postgres import slot
from airflow_bottledwater.postgres.connect import session
from airflow_bottledwater.postgres.server import identify
from airflow_bottledwater.state import control_topic, store
from airflow_bottledwater.state.claim import Claim, read_state
from airflow_bottledwater.state.control_records import (
    REPLACEMENT,
    REPORTED,
    REQUEST,
    SNAPSHOT,
    TASK,
    encode,
    request_key,
    status_key,
)

log = logging.getLogger(__name__)

#: seconds in which the claim has to succeed; longer outages are not waited out by a stop
_CLAIM_SECONDS = 10.0
#: why a job is fenced, which is the kind of the claim: the pipeline is to stop, or the job's task has ended, or it is
#: going to be replaced; the one that lasts longest first
Why = Literal["stop", "end", "replace"]


def holds(pipeline: Settings, claim: str) -> bool:
    """Whether a job has the last claim on the slot: otherwise another one works on it, or none ever did.

    :param claim: the id of the job's claim; empty if it has made none.
    :raises BottledWaterError: a server does not answer.
    """
    last = _claim(pipeline, _identify(pipeline)) if claim else None
    return last is not None and last.id == claim


def refuse_taken_over(pipeline: Settings, claim: str) -> None:
    """Check that no other job has begun to work on the slot since one has ended, but for a stream that has finished.

    :param claim: the id of the claim of the one that has ended.
    :raises TakenOver: one has.
    :raises BottledWaterError: a server does not answer.
    """
    cluster = _identify(pipeline)
    last = _claim(pipeline, cluster)
    if last is None or last.id == claim or last.kind not in REPORTED:
        return
    status = read_status(pipeline, cluster.pipeline(pipeline.slot))
    if status is None or status.job.id != last.id or status.state != "finished" or last.kind == SNAPSHOT:
        raise TakenOver(f"The slot was taken over by {last}: the job that has ended is not started again.")


def fence_and_release(pipeline: Settings, claim: str, why: Why, end: Callable[[], None]) -> None:
    """Take the slot from a job that does not answer. It is fenced, and its slot is freed, before it is ended: that may
    take a minute, or not be possible at all.

    :param claim: the id of the job's claim; if another job has claimed the slot since, that one keeps it.
    :param end: kills the job's processes or its application in the cluster.
    :raises SlotInUse: the slot did not become free.
    :raises BottledWaterError: a server does not answer.
    """
    ours = ""
    try:
        ours = fence(pipeline, claim, why)
        if ours:
            free(pipeline)
    except BottledWaterError as error:
        log.warning("The job could not be fenced, or its slot not be freed: %s", error)
    end()
    # while it lived, it may have connected to the slot again
    if ours and holds(pipeline, ours):
        free(pipeline)


def fence(pipeline: Settings, claim: str, why: Why) -> str:
    """Claim a job's slot, so that nothing of the job can be published any more, and write the pipeline's status in its
    place; returns the id of this claim, or nothing if another job has claimed the slot since, which is left alone.
    A claim that only fences does no work, and who made it may have died before this was done: it is done again.

    :param claim: the id of the job's claim.
    :raises BottledWaterError: a server does not answer, or another job has claimed the slot at the same time.
    """
    cluster = _identify(pipeline)
    holder, whys = _claim(pipeline, cluster), get_args(Why)
    if not claim or holder is None or (holder.id != claim and holder.kind not in whys[whys.index(why) :]):
        return ""
    try:
        made = Claim(pipeline, cluster, why, Backoff(_CLAIM_SECONDS))
    except Outage:
        # the job that hangs may be why Kafka does not answer in time, after it has taken the claim
        if (holder := _claim(pipeline, cluster)) is not None and holder.kind in whys:
            free(pipeline)
        raise
    made.close()
    log.info("The slot was claimed: the job publishes nothing any more.")
    name = cluster.pipeline(pipeline.slot)
    status = read_status(pipeline, name)
    changes: dict[str, dict[str, Any] | None] = {}
    if status is not None and not status.ended:
        last = status.told(state="stopped", error="")
        last.stopped_by = REQUEST if why == "stop" else TASK
        if why == "replace":
            last.state, last.error = "failed", "The job does not answer; it was fenced, and is going to be replaced."
            last.stopped_by = REPLACEMENT
        changes[status_key(name)] = encode(last)
    if why != "replace":
        changes[request_key(name)] = None  # it is answered
    control_topic.write(pipeline.kafka, changes)
    return made.job.id


def asked_meanwhile(pipeline: Settings, since: float) -> bool:
    """Whether the pipeline was asked to stop while no job of the caller ran, so that the next one is not to be started:
    the request is answered here, or another job has answered it, or the one that did not was fenced. A job that was
    stopped with its task does not count. False if the servers do not answer: a job that is started hears a request,
    too.

    :param since: seconds since 1970; what was requested before does not count.
    """
    try:
        cluster = _identify(pipeline)
        answered, status = requests.answer(pipeline, cluster, since)
        if answered or requests.stop_since(submitted.records(pipeline), cluster.pipeline(pipeline.slot), since):
            return True
        if status is None or status.state != "stopped":
            return False
        # a job that a person begins does not hear of a stop of before, however long that took
        if not status.wanted and status.job.started >= since:
            return True
        last = _claim(pipeline, cluster)
    except BottledWaterError as error:
        log.info("Whether the pipeline was asked to stop is not known: %s", error)
        return False
    return last is not None and last.kind == "stop" and last.started >= since


def free(pipeline: Settings) -> None:
    """End the session that reads from the slot, which is kept.

    :raises SlotInUse: the slot did not become free.
    :raises Outage: the source does not answer.
    """
    with session(pipeline.postgres, "Freeing the slot", application="bottledwater stop") as connection:
        slot.release(connection, pipeline.slot, timeout=5)
    log.info("The slot %r is free, and kept.", pipeline.slot)


def _identify(pipeline: Settings) -> Cluster:
    with session(pipeline.postgres, "Identifying the cluster") as connection:
        return identify(connection)


def _claim(pipeline: Settings, cluster: Cluster) -> Job | None:
    """The slot's last claim. An open transaction of the job does not hide it, since uncommitted records are read."""
    return read_state(pipeline, store.state_topic_name(cluster.database, pipeline.slot), committed=False).claim
