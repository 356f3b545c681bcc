"""What must not be done beside a job that is alive: a claim would end it for good."""

from __future__ import annotations

import logging

from airflow_bottledwater.errors import StateError
from airflow_bottledwater.jobs.alive import longest_silence, next_status
from airflow_bottledwater.jobs.status import read_status
from airflow_bottledwater.model.job import Job
from airflow_bottledwater.model.slot import Cluster
from airflow_bottledwater.pipeline.settings import Settings
from airflow_bottledwater.state.claim import read_own
from airflow_bottledwater.state.control_records import REPORTED
from airflow_bottledwater.state.control_topic import ControlTopic
from airflow_bottledwater.state.identity import check_timeline

log = logging.getLogger(__name__)


def refuse_beside_job(pipeline: Settings, cluster: Cluster) -> None:
    """Check, before the slot is claimed for something that a person asks for, that this ends no job: that of a
    snapshot, or a stream that is starting or connects again, does not read from the slot.

    :raises StateError: the pipeline's job is alive; or the saved state is another cluster's.
    :raises SlotError: the pipeline is one of another timeline.
    """
    known = read_own(pipeline, cluster)
    if known.slot is not None:
        check_timeline(known.slot, cluster)  # the job of a copy's original is not to be stopped
    remedy = "Stop it first (bottledwater stop, or the DAG bottledwater_control), ask again, and then start it again."
    refuse_alive(pipeline, cluster.pipeline(pipeline.slot), known.claim, remedy)


def refuse_alive(pipeline: Settings, owner: str, claim: Job | None, remedy: str) -> None:
    """Wait until it is sure that no job of a pipeline reports any more.

    :param owner: the pipeline's name.
    :param claim: the last claim in the pipeline's state. If its job reports, but has not yet, it may be starting.
    :param remedy: what to do if one does.
    :raises StateError: a job reported.
    """
    before = read_status(pipeline, owner)
    starting = claim is not None and claim.kind in REPORTED and (before is None or before.job.epoch < claim.epoch)
    if not starting and (before is None or before.ended):
        return
    # the clocks of the hosts may differ, so what counts is whether the job writes its status again
    heartbeat = pipeline.heartbeat_interval if before is None else before.heartbeat
    log.info("Waiting up to %.0f s to see whether the job of %r is alive.", longest_silence(heartbeat), owner)
    with ControlTopic.of(pipeline.kafka) as topic:
        now = next_status(topic, owner, heartbeat)
    if now is not None and not (now.ended and (claim is None or now.job.epoch >= claim.epoch)):
        raise StateError(f"The pipeline {owner!r} is alive: its job on host {now.job.host} is {now.state}.", remedy)
