"""Looks at all pipelines of a Kafka: what is wrong with them, and with the tasks that have submitted their jobs."""

from __future__ import annotations

import logging
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from airflow_bottledwater.errors import BottledWaterError
from airflow_bottledwater.hooks.source import SourceHook
from airflow_bottledwater.hooks.tasks import Fate, owners_fate
from airflow_bottledwater.state.control_topic import ControlTopic

if TYPE_CHECKING:
    from airflow_bottledwater.jobs.pipelines import HealthLimits
    from airflow_bottledwater.postgres.slot import SlotState
    from airflow_bottledwater.state.control_records import JobRecord

log = logging.getLogger(__name__)

#: of a Kafka that no pipeline has reported to
_NONE = (
    "No pipeline has ever reported to this Kafka, or its topic _bottledwater was lost: nothing is watched. Give the "
    "Kafka connection that the pipelines have; if there is no pipeline yet, or none any more, pause this DAG."
)
#: of a pattern that no pipeline has: with a slot that was dropped, its pipeline's status is deleted
_MISSING = (
    "There is no pipeline of this name: none has ever reported, or its slot was dropped. If it was retired, take it "
    "out of the pipelines that are watched."
)


@dataclass(slots=True)
class Health:
    """What was found.

    :param states: the state of each pipeline's job, by the pipeline's name.
    :param wrong: what is wrong with each pipeline that is not as it is meant, by its name; or with what was to be
        looked at, so that whoever watches nothing is told.
    :param told: what people should know although nothing is wrong yet.
    """

    states: dict[str, str] = field(default_factory=dict)
    wrong: dict[str, list[str]] = field(default_factory=dict)
    told: list[str] = field(default_factory=list)

    def as_result(self) -> dict[str, Any]:
        """As plain JSON values."""
        return {"states": self.states, "wrong": self.wrong, "told": self.told}


def look(
    kafka: dict[str, str], *, pipelines: Sequence[str] = (), postgres_conn_ids: Sequence[str] = (), limits: HealthLimits
) -> Health:
    """Look once, for at most some seconds more than the servers take.

    :param kafka: properties of the Kafka client.
    :param pipelines: patterns of slots, or of whole names; empty for all pipelines of this Kafka.
    :param postgres_conn_ids: connections of the sources whose slots are looked at, too.
    :raises Outage: Kafka does not answer, so that nothing is known.
    """
    from airflow_bottledwater.jobs import alive
    from airflow_bottledwater.jobs import pipelines as state

    with ControlTopic.of(kafka) as shared:
        records = shared.all(now=True)
        found = state.statuses(records, pipelines)
        suspects = {each: s for each, s in found.items() if alive.suspect(s, time.time())}
        dead = alive.unheard(shared, suspects)
        # those that are alive have reported meanwhile
        records = shared.all(now=True)
        found = state.statuses(records, pipelines)
    health = Health({name: status.state for name, status in found.items()})
    unreadable, every_unreadable = state.unreadable(records, pipelines), state.unreadable(records)
    health.wrong.update((name, [error]) for name, error in unreadable.items())
    for pattern in state.missing([*found, *unreadable], pipelines):
        health.wrong[pattern] = [_MISSING]
    every = state.statuses(records)
    if not every and not every_unreadable and not pipelines:
        health.wrong["pipelines"] = [_NONE]
    slots = _slots(postgres_conn_ids, [*every, *every_unreadable], health)
    for name, status in found.items():
        wrong = state.wrong(name, status, records, limits, alive=name not in dead)
        cluster = name.rpartition("/")[0]
        if cluster in slots:
            found_slot = slots[cluster].get(status.slot)
            wrong += state.wrong_slot(found_slot, status, limits)
            if found_slot is not None and not wrong and not status.wanted and not status.retired:
                health.told.append(f"{name}: {state.unread(found_slot, status)}")
        for job_id, job in state.submitted(records, name, status).items():
            _task(kafka, job_id, job, wrong, health.told)
        if wrong:
            health.wrong[name] = wrong
    return health


def _slots(postgres_conn_ids: Sequence[str], every: Iterable[str], health: Health) -> dict[str, dict[str, SlotState]]:
    """The slots of each source, by system identifier and database with a slash between them, and by their names. A
    source that does not answer, or that no pipeline has, is wrong itself.

    :param every: the names of all pipelines.
    """
    from airflow_bottledwater.postgres import slot
    from airflow_bottledwater.postgres.connect import session
    from airflow_bottledwater.postgres.server import identify

    found, sources = {}, {each.rpartition("/")[0] for each in every}
    for conn_id in postgres_conn_ids:
        try:
            with session(SourceHook(conn_id).dsn(), "Reading the slots") as connection:
                name = identify(connection).pipeline("").rstrip("/")
                found[name] = {each.name: each for each in slot.states(connection)}
        except BottledWaterError as error:
            health.wrong[f"connection {conn_id}"] = [str(error)]
            continue
        if name not in sources:
            health.wrong[f"connection {conn_id}"] = [
                f"No pipeline of this Kafka has its database {name.partition('/')[2]!r} (system identifier "
                f"{name.partition('/')[0]}) as its source, so that no slot is compared. Give the connections that the "
                "pipelines have."
            ]
    return found


def _task(kafka: dict[str, str], job_id: str, job: JobRecord, wrong: list[str], told: list[str]) -> None:
    """Find out whether a running job has a task: one whose task was ended while no triggerer ran is asked to stop,
    since nobody else was told; one whose task is gone goes on. Of a task of another Airflow, that one tells."""
    from airflow_bottledwater.jobs import requests

    owner = job.owner
    assert owner is not None
    task = f"The {job.kind} job {job_id[:8]} on {job.host} is {owner}"
    fate = owners_fate(owner)
    if fate is Fate.GONE:
        told.append(
            f"{task}, a task of which Airflow has no row any more. It goes on; run the DAG again, so that a task "
            "watches it, and starts it again when it dies."
        )
    elif fate is Fate.ENDED:
        wrong.append(f"{task}, a task that has ended. The job is asked to stop, too; run the DAG again.")
        requests.stop_job(kafka, job_id)
