"""Compares the rows and records of a table's wanted buckets, key by key and value by value."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

from airflow_bottledwater.encoding.envelope import Envelope
from airflow_bottledwater.pipeline.formats import Format
from airflow_bottledwater.state.verification import Difference
from airflow_bottledwater.verify.task import Answer, FoundRecords, RecordVersion, Row, View
from airflow_bottledwater.verify.values import Decoded, Expectation, Schemas, TopicReader, Unreadable, canonical, shown


@dataclass(frozen=True, slots=True)
class Suspect:
    """A key in which the table under the snapshot and the topic differ.

    :param identity: the same in each round.
    :param record: the key's latest record; None if the topic has none.
    :param certain: whether it is a difference whatever happens meanwhile.
    """

    identity: str
    bucket: int
    difference: Difference
    partition: int = -1
    offset: int = -1
    certain: bool = False

    def unchanged(self, ends: Sequence[int]) -> bool:
        """Whether no record of the key is at or above these offsets."""
        return self.offset < 0 or self.offset < ends[self.partition]


@dataclass(slots=True)
class Compared:
    """What a round has found of a table.

    :param older: records that differ only because they were written before the table was altered.
    """

    suspects: list[Suspect] = field(default_factory=list)
    older: int = 0


class Comparison:
    """Compares one table with its topic.

    :param envelope: what is around the rows; None for nothing.
    """

    def __init__(self, view: View, format: Format, schemas: Schemas | None, envelope: Envelope | None = None) -> None:
        self._expectation = Expectation(view.table, format)
        self._reader = TopicReader(view.table, format, schemas, envelope)
        self._found = Compared()

    def compare(self, answers: Sequence[Answer]) -> Compared:
        """:param answers: of all tasks that have read the table or its topic."""
        rows = {canonical(self._expectation.key(row.texts)): row for answer in answers for row in answer.found_rows}
        records = self._by_key(found for answer in answers for found in answer.found_records)
        for identity, row in rows.items():
            self._compare_key(identity, row, records.pop(identity, []))
        for identity, found in records.items():
            self._compare_key(identity, None, found)
        return self._found

    def _by_key(self, records: Iterator[FoundRecords]) -> dict[str, list[FoundRecords]]:
        """The records that are in their keys' partitions; the others are differences if they have a value."""
        by_key: dict[str, list[FoundRecords]] = {}
        for found in records:
            try:
                identity = canonical(self._reader.key(found.key))
            except Unreadable as error:
                if found.latest.value is not None:
                    self._note(canonical(found.key), found, "unreadable", in_topic=str(error))
                continue
            if not found.misplaced:
                by_key.setdefault(identity, []).append(found)
            elif found.latest.value is not None:
                self._note(identity, found, "wrong partition")
        return by_key

    def _note(self, identity: str, found: FoundRecords, kind: str, *, in_topic: str = "") -> None:
        """A difference that no transaction can explain: the pipeline never writes such a record."""
        key = self._reader.shown_key(found.key)
        difference = Difference(
            kind, key, in_topic=in_topic, partition=found.partition, offset=found.latest.offset  # type: ignore[arg-type]
        )  # fmt: skip
        suspect = Suspect(f"{identity}@{found.partition}/{found.key.hex()}", found.bucket, difference, certain=True)
        self._found.suspects.append(suspect)

    def _compare_key(self, identity: str, row: Row | None, records: list[FoundRecords]) -> None:
        """Compare a key: its row with the record that the snapshot shows, or with the latest one."""
        # another program's key may be equal in other bytes: consumers then have it twice
        ranked = sorted(((self._matches(row, found), found) for found in records), key=lambda each: not each[0])
        for i, (equal, found) in enumerate(ranked):
            if i == 0 and not equal:
                self._suspect(identity, row, found)
            elif i > 0 and not self._matches(None, found):
                self._suspect(f"{identity}@{found.key.hex()}", None, found)
        if not records and row is not None:
            key = self._row_key(row)
            self._found.suspects.append(Suspect(identity, row.bucket, Difference("missing", key)))

    def _matches(self, row: Row | None, found: FoundRecords) -> bool:
        versions = [found.latest, *([found.shown] if found.shown is not None else [])]
        if row is None and found.shown is None:
            return True  # all records of the key are later than the snapshot
        return any(self._equals(row, version) for version in versions)

    def _equals(self, row: Row | None, version: RecordVersion) -> bool:
        if row is None:
            return version.value is None or version.deleted or version.old
        # a row may be behind a TRUNCATE though no record before it in its partition says so
        if version.deleted or version.value is None:
            return False
        try:
            decoded = self._reader.value(version.value)
        except Unreadable:
            return False
        if self._expectation.difference(row.texts, decoded) is not None:
            return False
        self._found.older += self._expectation.older(row.texts, decoded)
        return True

    def _row_key(self, row: Row) -> dict[str, str]:
        return {name: shown(value) for name, value in self._expectation.key(row.texts).items()}

    def _suspect(self, identity: str, row: Row | None, found: FoundRecords) -> None:
        version = found.latest
        kind, column, in_table, in_topic = "different", "", "", ""
        if row is None:
            kind = "surplus"
        elif version.deleted or version.value is None:
            kind = "missing"
        else:
            try:
                decoded: Decoded = self._reader.value(version.value)
                column, in_table, in_topic = self._expectation.difference(row.texts, decoded) or ("", "", "")
            except Unreadable as error:
                kind, in_topic = "unreadable", str(error)
        key = self._row_key(row) if row is not None else self._reader.shown_key(found.key)
        difference = Difference(kind, key, column, in_table, in_topic, found.partition, version.offset)  # type: ignore[arg-type]
        self._found.suspects.append(Suspect(identity, found.bucket, difference, found.partition, version.offset))
