"""Asks for live snapshots: checked first, so that what cannot be read is refused before anything is asked for."""

from __future__ import annotations

import uuid

from airflow_bottledwater.errors import Refused, StateError
from airflow_bottledwater.jobs import snapshots
from airflow_bottledwater.jobs.status import read_status
from airflow_bottledwater.live.wanted import check_named, wanted
from airflow_bottledwater.model.slot import Cluster
from airflow_bottledwater.pipeline.settings import Settings
from airflow_bottledwater.postgres.connect import Connection, session
from airflow_bottledwater.postgres.server import identify
from airflow_bottledwater.state import store
from airflow_bottledwater.state.claim import read_own, read_state
from airflow_bottledwater.state.control_records import TAKEN_NOW, SnapshotRequest
from airflow_bottledwater.state.identity import check_timeline
from airflow_bottledwater.state.pipeline_state import PipelineState


def name_of(pipeline: Settings) -> str:
    """The pipeline's name in the shared topic.

    :raises Outage: the source does not answer.
    """
    return _cluster(pipeline).pipeline(pipeline.slot)


def _cluster(pipeline: Settings) -> Cluster:
    with session(pipeline.postgres, "Identifying the cluster", application="bottledwater live snapshot") as connection:
        return identify(connection)


def streamed(pipeline: Settings, connection: Connection, what: str) -> tuple[Cluster, PipelineState]:
    """The cluster and the saved state of a pipeline that has a stream.

    :param what: the stream is to do, for the message.
    :raises StateError: there is no such pipeline, or its first snapshot is not complete.
    :raises SlotError: the pipeline is one of another timeline.
    """
    cluster = identify(connection)
    known = read_own(pipeline, cluster)
    if known.slot is None or not known.complete:
        raise StateError(
            f"The snapshot of slot {pipeline.slot!r} is not complete: there is no stream yet that could {what}.",
            "Run the pipeline first: the command, or the tasks create_slot, snapshot and stream.",
        )
    check_timeline(known.slot, cluster)
    return cluster, known


def check(pipeline: Settings, request: SnapshotRequest) -> str:
    """Check that a live snapshot can be taken; returns the pipeline's name.

    :raises SettingError: it names no table.
    :raises StateError: there is no such pipeline, or its first snapshot is not complete.
    :raises PreflightError: a pattern matches nothing.
    :raises Refused: a table is not the pipeline's, has no key, or PostgreSQL does not accept the condition; or see
        :func:`streamed`.
    """
    check_named(request)
    with session(pipeline.postgres, "Checking a live snapshot", application="bottledwater live snapshot") as connection:
        cluster, known = streamed(pipeline, connection, "read rows again")
        wanted(pipeline, connection, request, known)
        return cluster.pipeline(pipeline.slot)


def ask(pipeline: Settings, request: SnapshotRequest) -> tuple[str, str]:
    """Ask for a live snapshot; returns the pipeline's name and the request's id.

    :raises BottledWaterError: see :func:`check`; nothing was asked for.
    """
    name, request_id = check(pipeline, request), uuid.uuid4().hex[:12]
    snapshots.ask(pipeline, name, request_id, request)
    return name, request_id


def cancel(pipeline: Settings, name: str, request_id: str) -> None:
    """Ask for the end of a live snapshot; what it has published stays.

    :raises Refused: without it, topics would lack rows for good.
    :raises StateError: there is no such request, or it is answered already.
    :raises Outage: Kafka does not answer.
    """
    progress = read_state(pipeline, store.state_topic_name(_cluster(pipeline).database, pipeline.slot)).live(request_id)
    if progress is not None and progress.unfinished:
        raise Refused(
            f"Live snapshot {request_id!r} reads tables or partitions that were added, or tables that were taken up "
            "again with another key: without it, their topics would lack rows for good.",
            "Let it wait instead (bottledwater snapshots --pause), which is a problem in the status then, or set a "
            "limit for its pace when you ask for one.",
        )
    snapshots.change(pipeline, name, request_id, cancelled=True)


def publishes(pipeline: Settings, name: str) -> str:
    """Which job will take a live snapshot, as a sentence.

    :param name: the pipeline's name.
    """
    status = read_status(pipeline, name)
    if status is None or status.ended:
        return f"No job of slot {pipeline.slot!r} runs: the next one takes it, continuous or bounded. {TAKEN_NOW}"
    return f"The job on host {status.job.host} takes it."
