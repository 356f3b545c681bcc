"""What is known of a pipeline, for people and programs."""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

from airflow_bottledwater.model.lsn import format_lsn
from airflow_bottledwater.model.slot import Cluster
from airflow_bottledwater.postgres import slot
from airflow_bottledwater.postgres.connect import identify, session
from airflow_bottledwater.settings import Pipeline
from airflow_bottledwater.state import store
from airflow_bottledwater.state.claim import read_state
from airflow_bottledwater.state.control import read_status
from airflow_bottledwater.state.control_records import encode
from airflow_bottledwater.state.identity import check_cluster
from airflow_bottledwater.state.pipeline_state import PipelineState


def snapshot_is_complete(pipeline: Pipeline) -> bool:
    """Whether nothing is left for a snapshot: of every table that the slot's records name.

    :raises StateError: the state is another cluster's.
    """
    with session(pipeline.postgres, "Identifying the cluster") as connection:
        known = _known(pipeline, identify(connection))
    return known.slot is not None and known.complete


def _known(pipeline: Pipeline, cluster: Cluster) -> PipelineState:
    topic = store.state_topic_name(cluster.database, pipeline.slot)
    known = read_state(pipeline, topic)
    check_cluster(known, cluster, topic)
    return known


def report(pipeline: Pipeline) -> dict[str, Any]:
    """Slot, job, position, and per table boundary and progress; plain JSON values, no secret."""
    with session(pipeline.postgres, "Reading the slot") as connection:
        cluster = identify(connection)
        found = slot.state(connection, pipeline.slot)
    known = _known(pipeline, cluster)
    boundaries, job = known.boundaries, read_status(pipeline, cluster.pipeline(pipeline.slot))
    tables = []
    for oid, pinned in sorted(known.tables.items(), key=lambda item: item[1].table.qualified):
        plan = known.plan(oid)
        done = [known.done(oid, i) for i in range(len(plan.ranges))] if plan else []
        boundary = boundaries.get(oid)
        tables.append(
            {
                "table": pinned.table.qualified,
                "topic": pinned.topic,
                "boundary": str(boundary.snapshot) if boundary else "",
                "insert_lsn": format_lsn(boundary.insert_lsn) if boundary else "",
                "filtered": boundary.filtered if boundary else False,
                "ranges": f"{sum(1 for d in done if d and d.done)}/{len(done)}",
                "rows": sum(d.rows for d in done if d),
                "complete": oid in known.completed,
            }
        )
    return {
        "name": pipeline.slot,
        "database": cluster.database,
        "slot": {**asdict(found), "confirmed": format_lsn(found.confirmed)} if found else None,
        "consistent_point": format_lsn(known.slot.consistent_point) if known.slot else "",
        "position": str(known.position) if known.position else "",
        "counters": known.counters,
        "complete": bool(known.tables) and known.complete,
        "tables": tables,
        "job": encode(job) if job else None,
    }
