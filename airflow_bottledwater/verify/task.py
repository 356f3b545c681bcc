"""What the verification's driver gives a task to read, and what the task gives back."""

from __future__ import annotations

from dataclasses import dataclass, field

from airflow_bottledwater.model.relation import SourceTable
from airflow_bottledwater.postgres.snapshot import ExportedSnapshot


@dataclass(frozen=True, slots=True)
class View:
    """A table and its topic at one moment.

    :param table: the table as it is under the snapshot.
    :param ends: per partition of the topic, the high watermark that was read after the stream had passed L.
    :param insert_lsn: L: a record whose transaction has a final LSN from L on is not in the snapshot.
    :param last_lsn: the end of the WAL, read after the ends: no record can be later.
    :param first_lsn: L of the table's first snapshot, whose rows have no position; 0 if there was none.
    :param truncated: the position of the last TRUNCATE that the snapshot shows, as in the header ``pos``; empty if
        there is none.
    :param start: per partition, the offset before which records are of an earlier pipeline, so that their positions
        mean nothing.
    :param bits: keys are divided into so many buckets, as a power of two.
    :param wanted: the buckets whose keys are looked at one by one, as a bitmap; None: all are only summed up.
    """

    table: SourceTable
    topic: str
    ends: tuple[int, ...]
    insert_lsn: int
    last_lsn: int
    first_lsn: int
    truncated: str
    start: tuple[int, ...]
    bits: int
    wanted: bytes | None = None

    @property
    def summed(self) -> bool:
        """Whether rows and records are only summed up; those of a table without a key always are."""
        return self.wanted is None or not self.table.keyed


@dataclass(frozen=True, slots=True)
class VerifiedRange:
    """A range of a table's blocks; ``last`` is the one behind it."""

    oid: int
    first: int
    last: int


@dataclass(frozen=True, slots=True)
class VerifyTask:
    """What one task reads: either block ranges of tables under the snapshot, or partitions of topics.

    :param seed: the key of all hashes, the same in all tasks of a verification.
    :param sample: the share of the keys that is compared, chosen by their hashes.
    :param partitions: for each table's oid, the partitions of its topic to read.
    """

    number: int
    views: tuple[View, ...]
    held: ExportedSnapshot
    seed: bytes
    sample: float
    chunks: tuple[VerifiedRange, ...] = ()
    partitions: tuple[tuple[int, tuple[int, ...]], ...] = ()

    def view(self, oid: int) -> View:
        """The view of a table."""
        return next(view for view in self.views if view.table.oid == oid)


@dataclass(frozen=True, slots=True)
class Row:
    """A row of a wanted bucket, as PostgreSQL's text of each column."""

    bucket: int
    texts: tuple[str | None, ...]


@dataclass(frozen=True, slots=True)
class RecordVersion:
    """A record of a key.

    :param value: None for a tombstone.
    :param deleted: whether a TRUNCATE has deleted its row, by its position.
    :param old: whether one has, by its place: it has no position.
    """

    offset: int
    value: bytes | None
    deleted: bool
    old: bool


@dataclass(slots=True)
class FoundRecords:
    """The records of a key of a wanted bucket that count, in one partition.

    :param latest: the last one below the high watermark.
    :param shown: the last one whose transaction may be in the snapshot; None if there is none.
    :param misplaced: whether the partitioner puts the key into another partition.
    """

    bucket: int
    key: bytes
    partition: int
    latest: RecordVersion
    shown: RecordVersion | None
    misplaced: bool


@dataclass(slots=True)
class Answer:
    """What a task has read of one table.

    :param rows: how many rows, or keys with a value, it has seen; of the sample.
    :param sums: the sums of the buckets, see :class:`~airflow_bottledwater.verify.buckets.Buckets`; empty if buckets
        are wanted.
    """

    rows: int = 0
    sums: bytes = b""
    found_rows: list[Row] = field(default_factory=list)
    found_records: list[FoundRecords] = field(default_factory=list)
