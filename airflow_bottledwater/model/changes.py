"""A range of changes: those of some tables between two positions of the source, and where their records are in Kafka.

Ranges follow each other: each begins, in every partition, where the one before has ended, so that every record is in
exactly one of them. A range that was announced twice, or too late, does no harm: :meth:`ChangeRange.without` leaves out
what earlier ones have.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Self

from airflow_bottledwater.model.lsn import format_lsn, parse_lsn


@dataclass(frozen=True, slots=True)
class TopicRange:
    """Records of a topic.

    :param id: Kafka's id of the topic, which changes if it is deleted and created anew.
    :param start: the offset of the first record, by partition.
    :param end: the offset behind the last one, by partition.
    """

    topic: str
    id: str
    start: tuple[int, ...]
    end: tuple[int, ...]

    @property
    def records(self) -> int:
        """How many offsets it has: its records, and the marks that Kafka writes at the end of each transaction."""
        return sum(end - start for start, end in zip(self.start, self.end, strict=True))

    def begun_at(self, offsets: Iterable[int]) -> TopicRange:
        """The part that begins, in each partition, no earlier than there."""
        start = tuple(min(end, max(first, at)) for first, at, end in zip(self.start, offsets, self.end, strict=False))
        return TopicRange(self.topic, self.id, (*start, *self.start[len(start) :]), self.end)

    def reaching(self, offsets: Sequence[int]) -> TopicRange:
        """The range that begins, in each partition, no later than there; a partition without an offset is a new one."""
        before = (*offsets, *[0] * len(self.start))
        return TopicRange(self.topic, self.id, tuple(map(min, self.start, before)), self.end)


@dataclass(frozen=True, slots=True)
class ChangeRange:
    """The changes of some tables from one position of the source to another.

    :param pipeline: its name: system identifier, database and slot, with slashes between them.
    :param start: an LSN: changes of transactions whose final LSN is below it are in earlier ranges.
    :param end: an LSN: all changes of transactions whose final LSN is below it are in this range, or in earlier ones,
        and no others are. So a source transaction is in one range, with all of its tables.
    :param tables: by ``schema.table``, where their records are: those of the changes; and rows that were read again,
        and dead letters that were re-driven, which lie between them.
    :param missing: patterns of whoever follows the changes that match no table of the pipeline.
    """

    pipeline: str = ""
    start: int = 0
    end: int = 0
    tables: Mapping[str, TopicRange] = field(default_factory=dict)
    missing: tuple[str, ...] = ()

    @property
    def empty(self) -> bool:
        """Whether there is no record in it for sure."""
        return not self.records

    @property
    def records(self) -> int:
        """How many records there are at most, see :attr:`TopicRange.records`."""
        return sum(each.records for each in self.tables.values())

    def as_event(self) -> dict[str, Any]:
        """The range as JSON values: the payload of an event."""
        return {
            "pipeline": self.pipeline,
            "from": format_lsn(self.start),
            "to": format_lsn(self.end),
            "records": self.records,
            "tables": {
                table: {"topic": each.topic, "topic_id": each.id, "from": list(each.start), "to": list(each.end)}
                for table, each in self.tables.items()
            },
            **({"missing": list(self.missing)} if self.missing else {}),
        }

    @classmethod
    def of_event(cls, event: Mapping[str, Any]) -> Self:
        """The inverse of :meth:`as_event`.

        :raises ValueError: it is no such payload.
        """
        try:
            tables = {
                table: TopicRange(each["topic"], each["topic_id"], tuple(each["from"]), tuple(each["to"]))
                for table, each in event["tables"].items()
            }
            missing = tuple(event.get("missing", ()))
            return cls(event["pipeline"], parse_lsn(event["from"]), parse_lsn(event["to"]), tables, missing)
        except (KeyError, TypeError, AttributeError) as error:
            raise ValueError(f"this is no range of changes: {event!r}") from error

    def without(self, earlier: Iterable[ChangeRange]) -> ChangeRange:
        """The part that none of these ranges, which were announced before, has."""
        start, tables = self.start, dict(self.tables)
        for other in earlier:
            if other.pipeline == self.pipeline:
                start = min(self.end, max(start, other.end))
            ends = {(each.topic, each.id): each.end for each in other.tables.values()}
            for table, each in tables.items():
                if known := ends.get((each.topic, each.id)):
                    tables[table] = each.begun_at(known)
        return ChangeRange(self.pipeline, start, self.end, tables)

    def reaching(self, read: Mapping[str, Sequence[int]]) -> ChangeRange:
        """The range that begins, in each topic, no later than there; at the LSN 0 if that is before its own start.

        :param read: offsets by partition, by topic's id; a topic that is missing begins as it does.
        """
        tables = {table: each.reaching(read.get(each.id, each.start)) for table, each in self.tables.items()}
        return self if tables == self.tables else ChangeRange(self.pipeline, 0, self.end, tables)

    def joined(self, later: ChangeRange) -> ChangeRange:
        """This range and a later one, as one. The LSNs of one of another pipeline say nothing here: then they are those
        of the later one, with all records of both.

        :raises ValueError: tables of two pipelines have one name and several topics.
        """
        if not self.tables:
            return later
        before = {each.id: each for each in self.tables.values()}
        tables = {}
        for table, each in later.tables.items():
            if (known := before.pop(each.id, None)) is not None:
                start = (*known.start, *each.start[len(known.start) :])
                each = TopicRange(each.topic, each.id, start, each.end)
            tables[table] = each
        kept = {table: each for table, each in self.tables.items() if each.id in before}
        for table, each in kept.items():
            # a topic that was made again has nothing of before
            if each.records and table in tables and tables[table].topic != each.topic:
                raise ValueError(f"table {table} is in topic {each.topic} and in topic {tables[table].topic}")
        start_lsn = self.start if self.pipeline == later.pipeline else later.start
        return ChangeRange(later.pipeline, start_lsn, later.end, {**kept, **tables})

    def spark_options(self, *tables: str) -> dict[str, str]:
        """The options of Spark's source ``kafka`` that let it read exactly these records, committed ones only; the
        connection's own options (``kafka.bootstrap.servers`` and so on) come on top.

        :param tables: ``schema.table``; none for all.
        """
        chosen = [each for table, each in self.tables.items() if not tables or table in tables]
        offsets = {
            name: json.dumps({each.topic: dict(enumerate(getattr(each, at))) for each in chosen})
            for name, at in (("startingOffsets", "start"), ("endingOffsets", "end"))
        }
        # not "subscribe": a topic may have got more partitions since, of which nothing is asked
        return {
            "assign": json.dumps({each.topic: list(range(len(each.start))) for each in chosen}),
            "kafka.isolation.level": "read_committed",
            **offsets,
        }
