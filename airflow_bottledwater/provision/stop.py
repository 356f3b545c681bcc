"""What is done about a job that does not answer a request to stop: it is fenced, and its slot is freed, from any host."""

from __future__ import annotations

import logging
import time
from dataclasses import replace

from airflow_bottledwater.backoff import Backoff
from airflow_bottledwater.postgres import slot
from airflow_bottledwater.postgres.connect import identify, session
from airflow_bottledwater.settings import Pipeline
from airflow_bottledwater.state import store
from airflow_bottledwater.state.claim import Claim, read_state
from airflow_bottledwater.state.control import read_status
from airflow_bottledwater.state.control_records import encode, status_key

log = logging.getLogger(__name__)

#: seconds in which the claim has to succeed; longer outages are not waited out by a stop
_CLAIM_SECONDS = 10.0


def fence(pipeline: Pipeline) -> None:
    """Claim the slot, so that nothing of its job can be published any more, and write the job's last status in its place.

    :raises BottledWaterError: a server does not answer, or another job has claimed the slot at the same time.
    """
    with session(pipeline.postgres, "Identifying the cluster") as connection:
        cluster = identify(connection)
    if read_state(pipeline, store.state_topic_name(cluster.database, pipeline.slot)).claim is None:
        return  # no job has ever worked on the slot
    Claim(pipeline, cluster, "stop", Backoff(_CLAIM_SECONDS)).close()
    log.info("The slot was claimed: the job publishes nothing any more.")
    name = cluster.pipeline(pipeline.slot)
    status = read_status(pipeline, name)
    if status is not None and not status.ended:
        control = store.Control(pipeline.kafka)
        try:
            control.write(status_key(name), encode(replace(status, state="stopped", at=time.time())))
        finally:
            control.close()


def free(pipeline: Pipeline) -> None:
    """End the session that reads from the slot, which is kept.

    :raises SlotInUse: the slot did not become free.
    :raises Outage: the source does not answer.
    """
    with session(pipeline.postgres, "Freeing the slot", application="bottledwater stop") as connection:
        slot.release(connection, pipeline.slot, timeout=5)
    log.info("The slot %r is free, and kept.", pipeline.slot)
