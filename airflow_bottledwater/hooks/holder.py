"""Who works on a slot, before another job is submitted that would take it over."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, TypeGuard

from airflow_bottledwater.jobs import identity as identities
from airflow_bottledwater.jobs.alive import next_status
from airflow_bottledwater.pipeline.settings import Settings
from airflow_bottledwater.state.control_records import StatusRecord, decode, status_key
from airflow_bottledwater.state.control_topic import ControlTopic

if TYPE_CHECKING:
    from airflow_bottledwater.jobs.identity import Identity
    from airflow_bottledwater.model.job import Job, Owner


@dataclass(frozen=True, slots=True)
class Holder:
    """A job that works on a slot, and lives.

    :param owner: the task that has submitted it; None if a command has.
    :param identity: by which it can be stopped, if a task has submitted it.
    """

    job: Job
    owner: Owner | None = None
    identity: Identity | None = None

    def __str__(self) -> str:
        # a verification that works in place of a stream has claimed the slot for the stream's task
        whose = self.owner or self.job.owner
        return f"{replace(self.job, owner=whose)}{'' if whose else ' of a command'}"


def living(pipeline: Settings, name: str) -> Holder | None:
    """The stream's job that works on a slot; None if there is none, or it does not report any more, by this host's
    clock. This takes a heartbeat if there is one, and some of them if it is dead.

    :param name: the pipeline's.
    :raises Outage: Kafka does not answer.
    :raises StateError: a job of another version reports, see :func:`last_status`.
    """
    from airflow_bottledwater.jobs import submitted

    with ControlTopic.of(pipeline.kafka) as shared:
        found = shared.get(status_key(name))[0]
        status = decode(StatusRecord, found)
        if _streams(status) or (found is not None and status is None):
            # one that this version cannot read is of a job of another one, if it is alive
            status = next_status(shared, name, 0.0 if status is None else status.heartbeat)
        if not _streams(status):
            return None
        candidates = submitted.unfinished(shared.all(), pipeline.slot, name)
    for job_id, record in candidates.items():
        if record.claim == status.job.id and record.owner is not None:
            return Holder(status.job, record.owner, identities.of_record(job_id, record))
    return Holder(status.job)


def _streams(status: StatusRecord | None) -> TypeGuard[StatusRecord]:
    return status is not None and not status.ended and status.job.kind == "stream"
