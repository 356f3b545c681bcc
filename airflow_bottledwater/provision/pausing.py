"""Asks a pipeline's job to publish no more changes of tables, or to go on with them: checked first, so that what cannot
be done is refused before anything is asked for."""

from __future__ import annotations

import time
import uuid
from collections.abc import Sequence

from airflow_bottledwater.errors import Refused
from airflow_bottledwater.jobs.status import read_status
from airflow_bottledwater.pipeline.rules import refuse_none
from airflow_bottledwater.pipeline.settings import Settings
from airflow_bottledwater.postgres import catalog
from airflow_bottledwater.postgres.connect import Connection, session
from airflow_bottledwater.provision import live
from airflow_bottledwater.state import control_topic
from airflow_bottledwater.state.control_records import TableRequest, check, encode, table_requests_prefix
from airflow_bottledwater.state.control_topic import ControlTopic
from airflow_bottledwater.state.identity import refuse_shared, resolve
from airflow_bottledwater.state.pipeline_state import PipelineState


def ask(pipeline: Settings, tables: Sequence[str], *, paused: bool, by: str = "", why: str = "") -> tuple[str, str]:
    """Ask the pipeline's job, the one that runs or the next one, to pause tables or to go on with them; returns the
    pipeline's name and the request's id.

    :param tables: ``[schema.]table`` patterns.
    :param by: who asks; ``why`` is the reason, for whoever looks at the pipeline.
    :raises SettingError: no table is named.
    :raises StateError: there is no such pipeline, or its first snapshot is not complete.
    :raises PreflightError: a pattern matches nothing.
    :raises Refused: a table is not the pipeline's; it could not be brought up to date after a pause; or ``by`` or
        ``why`` is no text.
    :raises Outage: a server does not answer.
    """
    refuse_none(tables)
    with session(pipeline.postgres, "Asking about tables", application="bottledwater tables") as connection:
        cluster, known = live.streamed(pipeline, connection, "pause a table")
        oids = _meant(pipeline, connection, known, tables, paused)
    name = cluster.pipeline(pipeline.slot)
    request, request_id = TableRequest(tuple(oids), paused, by, why, time.time()), uuid.uuid4().hex[:12]
    check(request)
    control_topic.write(pipeline.kafka, {table_requests_prefix(name) + request_id: encode(request)})
    return name, request_id


def outcome(pipeline: Settings, name: str, request_id: str, *, timeout: float = 60.0) -> str:
    """Wait until a request is carried out, if a job runs that can do so; returns what has become of it, as a sentence.

    :param timeout: seconds.
    :raises Outage: Kafka does not answer.
    """
    status = read_status(pipeline, name)
    if status is None or status.ended:
        return live.publishes(pipeline, name)
    if carried_out(pipeline, name, request_id, timeout=timeout):
        return "It is done."
    return (
        f"The job on host {status.job.host} has not answered within {timeout:.0f} s: it is done as soon as it can be."
    )


def carried_out(pipeline: Settings, name: str, request_id: str, *, timeout: float) -> bool:
    """Wait until a request is carried out; returns whether it is.

    :param timeout: seconds.
    :raises Outage: Kafka does not answer.
    """
    key, deadline = table_requests_prefix(name) + request_id, time.monotonic() + timeout
    with ControlTopic.of(pipeline.kafka) as topic:
        while topic.get(key, now=True)[0] is not None:
            if time.monotonic() > deadline:
                return False
            time.sleep(0.2)
    return True


def _meant(
    pipeline: Settings, connection: Connection, known: PipelineState, tables: Sequence[str], paused: bool
) -> list[int]:
    """The oids of the tables that patterns name."""
    oids = resolve(connection, pipeline, known, tables)
    if foreign := [oid for oid in oids if oid not in known.tables]:
        names = catalog.names(connection, foreign)
        raise Refused(
            f"{', '.join('.'.join(names.get(oid, (str(oid),))) for oid in foreign)}: not followed by slot "
            f"{pipeline.slot!r}.",
            "Name tables of the pipeline; 'bottledwater status' says which are not followed, and why.",
        )
    pinned = [known.tables[oid] for oid in oids]
    if paused and (keyless := [each.table.qualified for each in pinned if not each.table.keyed]):
        raise Refused(
            f"{', '.join(keyless)}: no key, so that what is left out during a pause could not be brought to the topic.",
            "Stop the whole pipeline instead (bottledwater stop).",
        )
    if paused:
        refuse_shared(pipeline, known, [each.topic for each in pinned], "The table cannot be paused")
    return oids
