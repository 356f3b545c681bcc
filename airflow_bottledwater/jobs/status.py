"""A report of a pipeline's slot, job and progress, for people and programs."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import msgspec

from airflow_bottledwater.model.lsn import format_lsn
from airflow_bottledwater.pipeline.settings import Settings
from airflow_bottledwater.postgres import slot
from airflow_bottledwater.postgres.connect import session
from airflow_bottledwater.postgres.server import identify
from airflow_bottledwater.postgres.slot import SlotState
from airflow_bottledwater.state import control_topic, letters
from airflow_bottledwater.state.claim import read_own
from airflow_bottledwater.state.control_records import StatusRecord, decode, encode, status_key
from airflow_bottledwater.state.pinned import PinnedTable
from airflow_bottledwater.state.pipeline_state import PipelineState
from airflow_bottledwater.state.store import Kept


def read_status(pipeline: Settings, name: str) -> StatusRecord | None:
    """The last status of a pipeline, which is named by :meth:`Cluster.pipeline`; None if there is none."""
    return decode(StatusRecord, control_topic.read(pipeline.kafka).get(status_key(name)))


def tell_letters(pipeline: Settings, name: str, known: PipelineState) -> None:
    """Let the last status of a pipeline whose job has ended say how many dead letters are open now; a job that runs
    says it itself.

    :param known: the state behind those that were settled.
    :raises Outage: Kafka does not answer.
    """
    status = read_status(pipeline, name)
    if status is None or not status.ended:
        return
    since = {each.subject: each.since for each in status.problems if each.kind == letters.KIND}
    problems = [each for each in status.problems if each.kind != letters.KIND]
    for each in letters.problems(known.open_letters):
        problems.append(replace(each, since=since.get(each.subject, status.at)))
    told = replace(status, counters={**status.counters, **known.counters}, problems=problems)
    control_topic.write(pipeline.kafka, {status_key(name): encode(told)})


def snapshot_is_complete(pipeline: Settings) -> bool:
    """Whether the snapshot of every table in the slot's state is complete; False if there is no slot in the state.

    :raises StateError: the state is another cluster's.
    """
    found = known(pipeline)
    return found.slot is not None and found.complete


def known(pipeline: Settings) -> PipelineState:
    """The saved state of a pipeline.

    :raises StateError: the state is another cluster's.
    """
    with session(pipeline.postgres, "Identifying the cluster") as connection:
        return read_own(pipeline, identify(connection))


@dataclass(frozen=True, slots=True)
class TableReport:
    """The progress of one table's snapshot.

    :param boundary: the PostgreSQL snapshot that its rows were read under, as text; empty before it is known.
    :param insert_lsn: the end of the server's WAL at that moment; empty before it is known.
    :param filtered: whether the stream compares the table's changes with the boundary.
    :param ranges: how many ranges of blocks are published, and how many there are: ``3/8``.
    :param complete: whether the table's snapshot is complete.
    """

    table: str
    topic: str
    boundary: str
    insert_lsn: str
    filtered: bool
    ranges: str
    rows: int
    complete: bool


@dataclass(frozen=True, slots=True)
class PipelineReport:
    """Slot, job and position of a pipeline, and the progress of each table. It contains no secrets.

    :param name: the slot's name.
    :param slot: the slot as PostgreSQL shows it; None if there is none.
    :param consistent_point: the LSN at which the slot starts; empty before it is created.
    :param position: the position up to which the stream is published; empty before anything is.
    :param counters: how many records of each kind the stream has published since the slot was created.
    :param open_letters: how many dead letters are open, by table and by what has written them: snapshot, stream or
        live.
    :param complete: whether the snapshot of all tables is complete.
    :param job: the last status of the pipeline's job; None if there is none.
    """

    name: str
    database: str
    slot: SlotState | None
    consistent_point: str
    position: str
    counters: dict[str, int]
    open_letters: dict[str, dict[str, int]]
    complete: bool
    tables: list[TableReport]
    job: StatusRecord | None

    def as_json(self) -> dict[str, Any]:
        """The report as plain JSON values, for programs."""
        found: dict[str, Any] = msgspec.to_builtins(self)
        if self.slot is not None:
            found["slot"]["confirmed"] = format_lsn(self.slot.confirmed)
        return found


def report(pipeline: Settings, kept: Kept | None = None) -> PipelineReport:
    """Read the report from PostgreSQL and Kafka.

    :param kept: what a caller who asks again and again has read of the saved state.
    :raises StateError: the state is another cluster's.
    """
    with session(pipeline.postgres, "Reading the slot") as connection:
        cluster = identify(connection)
        found = slot.state(connection, pipeline.slot)
    state = read_own(pipeline, cluster, kept)
    return PipelineReport(
        name=pipeline.slot,
        database=cluster.database,
        slot=found,
        consistent_point=format_lsn(state.slot.consistent_point) if state.slot else "",
        position=str(state.position) if state.position else "",
        counters=state.counters,
        open_letters=state.open_letters,
        complete=bool(state.tables) and state.complete,
        tables=tables(state),
        job=read_status(pipeline, cluster.pipeline(pipeline.slot)),
    )


def tables(known: PipelineState) -> list[TableReport]:
    """The progress of all tables of a state, in the order of their names."""
    found = sorted(known.tables.items(), key=lambda item: item[1].table.qualified)
    return [_table(known, oid, pinned) for oid, pinned in found]


def _table(known: PipelineState, oid: int, pinned: PinnedTable) -> TableReport:
    boundary = known.boundaries.get(oid)
    plans = {part: plan for part in known.parts(oid) if (plan := known.plan(part)) is not None}
    done = [known.done(part, i) for part, plan in plans.items() for i in range(len(plan.ranges))]
    return TableReport(
        table=pinned.table.qualified,
        topic=pinned.topic,
        boundary=str(boundary.snapshot) if boundary else "",
        insert_lsn=format_lsn(boundary.insert_lsn) if boundary else "",
        filtered=boundary.filtered if boundary else False,
        ranges=f"{sum(1 for d in done if d and d.done)}/{len(done)}",
        rows=sum(d.rows for d in done if d),
        complete=oid in known.completed,
    )
