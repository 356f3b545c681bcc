"""What the snapshot's driver gives a lane to do, and what a snapshot has done."""

from __future__ import annotations

from dataclasses import dataclass

from airflow_bottledwater.model.job import Job
from airflow_bottledwater.model.relation import SourceTable
from airflow_bottledwater.postgres.snapshot import ExportedSnapshot
from airflow_bottledwater.state.pinned import PinnedTable
from airflow_bottledwater.state.records import progress_key


@dataclass(frozen=True, slots=True)
class SnapshotChunk:
    """A range of a table.

    :param oid: the table's.
    :param number: its place in the plan.
    :param part: the partition that it is a range of; None if the table has no partitions.
    """

    oid: int
    number: int
    first: int
    last: int
    part: SourceTable | None = None

    @property
    def progress_key(self) -> str:
        """The key of its progress in the state: plans are made for each partition."""
        return progress_key(self.planned, self.number)

    @property
    def planned(self) -> int:
        """The oid by which its plan is recorded."""
        return self.oid if self.part is None else self.part.oid


@dataclass(frozen=True, slots=True)
class LaneTask:
    """All that a lane needs to know, besides the pipeline's settings."""

    lane: int
    job: Job
    prefix: str
    state_topic: str
    held: ExportedSnapshot
    tables: tuple[PinnedTable, ...]
    chunks: tuple[SnapshotChunk, ...]


@dataclass(frozen=True, slots=True)
class SnapshotResult:
    """What one run of the snapshot did.

    :param tables: how many tables it covers.
    :param rows: rows published by this run; ``dead_letters`` are counted apart.
    :param open_dead_letters: how many dead letters of the pipeline nobody has re-driven or dismissed yet, of this run
        and of all before.
    :param ranges: ranges published by this run.
    :param skipped: ranges that an earlier run had published.
    """

    tables: int
    rows: int
    dead_letters: int
    open_dead_letters: int
    ranges: int
    skipped: int
    seconds: float
