"""Pipelines of which no job has ever reported, since a task before it has failed: Kafka knows nothing of them, and so
only Airflow can tell."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from airflow_bottledwater.pipeline.description import Description
from airflow_bottledwater.plugin import kafkas, rights
from airflow_bottledwater.plugin.overview import owner_of
from airflow_bottledwater.plugin.watch import KafkaLook
from airflow_bottledwater.state.control_records import StatusRecord


def found(looks: Mapping[str, KafkaLook]) -> list[dict[str, Any]]:
    """Each of them with the task that has failed; of several tasks of one DAG and slot, the first.

    :param looks: what each Kafka has, by the id under which it is listed; while one was never read, nothing can be said
        of its pipelines.
    """
    made: dict[tuple[str, str], dict[str, Any]] = {}
    for task, described in rights.failed():
        own = looks.get(kafkas.listed_as(described.kafka.conn_id))
        # another Kafka may have a pipeline of this name
        reported = own.statuses.values() if own is not None else ()
        if (own is None or own.read) and not any(_is_of(status, task["dag_id"], described) for status in reported):
            made.setdefault((task["dag_id"], described.name), {**task, "slot": described.name})
    return list(made.values())


def _is_of(status: StatusRecord, dag_id: str, described: Description) -> bool:
    """Whether it is the status of the pipeline; two sources may have a slot of the same name."""
    if status.slot != described.name:
        return False
    owner = owner_of(status)
    if owner is None or owner.dag_id == dag_id:
        return True
    other = rights.described(
        {"dag_id": owner.dag_id, "run_id": owner.run_id, "task_id": owner.task_id, "map_index": owner.map_index},
        status.slot,
    )
    return other is None or other.source.conn_id == described.source.conn_id
