"""What is read of a table at a time: as it is planned, and as it is handed over to be published."""

from __future__ import annotations

from dataclasses import dataclass, field

from psycopg import sql

from airflow_bottledwater.model.boundary import Snapshot
from airflow_bottledwater.model.relation import SourceTable
from airflow_bottledwater.model.version import Version
from airflow_bottledwater.postgres import partitions
from airflow_bottledwater.postgres.large_rows import LargeRow
from airflow_bottledwater.postgres.receive import MessageBlock
from airflow_bottledwater.state.records import LiveProgress


class TooLarge(Exception):
    """The chunk has too many rows; it is read again in parts."""


@dataclass(frozen=True, slots=True)
class LiveChunk:
    """Rows of one table as a snapshot shows them; or keys that it does not show.

    :param insert_lsn: L: everything that the snapshot shows was committed below it.
    :param blocks: the rows.
    :param after: the progress when they are published, except for the counts of records.
    :param stale: partition and key of records whose keys the table does not have.
    :param partitions: what the topic knows of a partitioned table's partitions when this is published, or of those that
        are read; None if that is unchanged.
    :param large: the rows that PostgreSQL cannot send, which are not among the others.
    """

    version: Version
    snapshot: Snapshot
    insert_lsn: int
    blocks: list[MessageBlock]
    after: LiveProgress
    stale: list[tuple[int, bytes]] = field(default_factory=list)
    partitions: partitions.Known | None = None
    large: list[LargeRow] = field(default_factory=list)


@dataclass(frozen=True, slots=True)
class BlockRange:
    """Rows of a table, or of a partition of it.

    :param first: the first block, and ``last``, the one behind the last one.
    :param places: which rows of these blocks, as a condition; None for all.
    """

    source: SourceTable
    first: int
    last: int
    places: sql.Composed | None


@dataclass(frozen=True, slots=True)
class Piece:
    """What is read next, under one snapshot.

    :param blocks: how large it is, in blocks.
    :param after: the progress behind it, unless it is ``whole``: then nothing of the table is left to be read.
    """

    ranges: list[BlockRange]
    blocks: int
    after: LiveProgress
    whole: bool
