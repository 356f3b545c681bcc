"""Jobs whose task has ended, and that still run: when a user ends a task, Airflow notifies its trigger only if a
triggerer has loaded it; otherwise nobody is told to stop the job."""

from __future__ import annotations

import logging
from collections.abc import Callable

from airflow_bottledwater.jobs import identity as identities
from airflow_bottledwater.jobs import stop
from airflow_bottledwater.jobs.identity import Identity
from airflow_bottledwater.model.job import Owner
from airflow_bottledwater.pipeline.settings import Settings
from airflow_bottledwater.state import control_topic

log = logging.getLogger(__name__)


def unfinished(pipeline: Settings, name: str) -> list[tuple[Owner, Identity]]:
    """The jobs of a pipeline that have not reported their end, on any host, each with the task that has submitted it.

    :param name: the pipeline's; jobs that do not know theirs yet are told by their slot.
    :raises Outage: Kafka does not answer.
    """
    from airflow_bottledwater.jobs import submitted

    found = submitted.unfinished(control_topic.read(pipeline.kafka), pipeline.slot, name)
    return [
        (record.owner, identities.of_record(job_id, record))
        for job_id, record in found.items()
        if record.owner is not None
    ]


def stop_all(pipeline: Settings, name: str, has_ended: Callable[[Owner], bool]) -> None:
    """Stop the jobs of a pipeline whose tasks have ended, and remove what is left of them.

    :param name: the pipeline's.
    :param has_ended: asks Airflow whether the task that has submitted a job has ended.
    :raises BottledWaterError: a server does not answer, or a slot did not become free.
    """
    for owner, identity in unfinished(pipeline, name):
        if has_ended(owner):
            log.warning("The task of a job has ended, and the job still runs; it is stopped: %s", identity)
            stop.stop_and_forget(pipeline, identity)
