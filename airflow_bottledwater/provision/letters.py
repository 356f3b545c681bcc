"""The dead letters of a pipeline in their topic, and the counts of open ones in its state, which are written in the
same transactions."""

from __future__ import annotations

import itertools
import logging
import sys
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

from airflow_bottledwater.errors import SettingError
from airflow_bottledwater.kafka.publisher import Records, tombstones
from airflow_bottledwater.kafka.topic_reader import RecordBlock, blocks
from airflow_bottledwater.kafka.topics import Topics
from airflow_bottledwater.model.relation import SourceTable
from airflow_bottledwater.pipeline.settings import Settings
from airflow_bottledwater.postgres import catalog
from airflow_bottledwater.provision.source_rows import StoredDeadLetter
from airflow_bottledwater.publish.session import PublishSession
from airflow_bottledwater.state.letters import head
from airflow_bottledwater.state.records import Letters, StateRecord, letters_key, letters_of

log = logging.getLogger(__name__)

#: bytes of dead letters that are treated at once
_PORTION_BYTES = 32 << 20
#: records that are read at once: dead letters may be large
_BLOCK, _LARGE_BLOCK = 10_000, 100
#: dead letters that are settled in one Kafka transaction
AT_ONCE = 10_000


@dataclass(frozen=True, slots=True)
class LetterPosition:
    """Where a dead letter is, by which it is found again: not all of them fit into memory.

    :param at: the partition and the offset of its record.
    :param position: of its change; empty of a snapshot's.
    :param size: in bytes.
    :param counted: the key of the count that it is in.
    :param relation: its table.
    :param oid: the table's.
    """

    at: tuple[int, int]
    position: str
    key: bytes
    size: int
    counted: str
    relation: str
    oid: int


class LettersTopic:
    """
    :param publishing: under whose transactional id dead letters are removed.
    :param name: the pipeline's.
    """

    def __init__(self, pipeline: Settings, publishing: PublishSession, name: str) -> None:
        self._kafka, self._publishing, self._name = pipeline.kafka, publishing, name
        self._topic = publishing.topics[publishing.dead_letters]
        #: the tables of those that were read, see :meth:`StoredDeadLetter.read`
        self._tables: dict[bytes, SourceTable] = {}

    def places(self) -> list[LetterPosition]:
        """The dead letters of this pipeline; afterwards, its counts of open ones are right."""
        found: dict[bytes, LetterPosition] = {}
        names = {self._name, *(each.pipeline for each in self._publishing.state.letters.values() if each.pipeline)}
        for block in self.blocks(self._topic):
            for i, at in enumerate(_places(block)):
                key, value = block.key(i), block.value(i)
                found.pop(key, None)
                if value is not None and (said := head(value, names)) is not None:
                    # there may be a million, of some tables
                    counted, relation = sys.intern(letters_key(said.oid, said.by)), sys.intern(said.relation)
                    found[key] = LetterPosition(at, said.pos, key, len(value), counted, relation, said.oid)
        places = list(found.values())
        self._reconcile(places)
        return places

    def _reconcile(self, places: Sequence[LetterPosition]) -> None:
        """Make the counts of open dead letters those of the topic: some may have gone with it, or be of before the slot
        was dropped."""
        known, present = self._publishing.state.letters, Counter(place.counted for place in places)
        named = {place.counted: place.relation for place in places}
        changed: dict[str, StateRecord | None] = {}
        for key in known.keys() | present.keys():
            before, left = known.get(key) or Letters(named.get(key, ""), 0), present[key]
            if before.open > left and self._elsewhere(before):
                log.warning(
                    "%d dead letters of %s are in topic %r, of another topic_prefix. They stay open until they are "
                    "dismissed; or drop the slot, and make the pipeline with that topic_prefix, to re-drive them.",
                    before.open - left, before.table, before.topic,
                )  # fmt: skip
                continue
            if before.open > left:
                log.warning(
                    "%d dead letters of %s are not in topic %r any more: it was deleted, or has expired them.",
                    before.open - left, before.table, self._topic,
                )  # fmt: skip
            if before.open != left:
                written = max(before.written, left)
                changed[key] = replace(before, written=written, closed=written - left)
        if changed:
            self._publishing.transact([], changed)

    def _elsewhere(self, counted: Letters) -> bool:
        """Whether some may be in a topic of another ``topic_prefix``, which the pipeline had before its slot was
        dropped."""
        return bool(counted.open) and counted.topic not in ("", self._topic)

    def read(self, places: Sequence[LetterPosition]) -> list[StoredDeadLetter]:
        """These dead letters, but for those that are gone meanwhile. Only the part of the topic is read that has them:
        letters that follow each other by their positions mostly do so in the topic."""
        begins = dict(enumerate(self.start(self._topic) or ()))
        wanted, found = {place.at: place.key for place in places}, dict[bytes, StoredDeadLetter]()
        start = [0] * self._publishing.partitions[self._topic]
        ends = start.copy()
        for partition, offset in sorted(wanted):
            start[partition] = start[partition] if ends[partition] else offset
            ends[partition] = offset + 1
        for block in self.blocks(self._topic, start, ends):
            for i, at in enumerate(_places(block)):
                if at in wanted and (value := block.value(i)) is not None:
                    earlier = at[1] < begins.get(at[0], 0)
                    found[wanted[at]] = StoredDeadLetter.read(wanted[at], value, self._tables, earlier=earlier)
        return [found[place.key] for place in places if place.key in found]

    def dismiss(self, tables: Sequence[str]) -> int:
        """Remove those of some tables, some thousand in one transaction, and give up those of another ``topic_prefix``,
        whose topic keeps them; returns how many.

        :param tables: see :func:`airflow_bottledwater.provision.redrive.dismiss`.
        :raises SettingError: a pattern matches nothing; nothing was removed.
        """
        places = self.places()
        self._refuse_unknown(tables, places)
        places = [place for place in places if not tables or self._meant(place.oid, place.relation, tables)]
        for start in range(0, len(places), AT_ONCE):
            some = places[start : start + AT_ONCE]
            self._publishing.transact(
                [self.removed(place.key for place in some)], self.closed(Counter(place.counted for place in some))
            )
        left = {
            key: each
            for key, each in self._publishing.state.letters.items()
            if self._elsewhere(each) and (not tables or self._meant(letters_of(key)[0], each.table, tables))
        }
        if left:
            self._publishing.transact([], {key: replace(each, closed=each.written) for key, each in left.items()})
        return len(places) + sum(each.open for each in left.values())

    def _refuse_unknown(self, patterns: Sequence[str], places: Sequence[LetterPosition]) -> None:
        """:raises SettingError: a pattern matches no table of the pipeline, and none that has, or had, dead letters."""
        state = self._publishing.state
        known = {(place.oid, place.relation) for place in places}
        known |= {(letters_of(key)[0], each.table) for key, each in state.letters.items()}
        known |= {(oid, pinned.table.qualified) for oid, pinned in state.tables.items()}
        for pattern in patterns:
            if not any(self._meant(oid, relation, [pattern.removeprefix("!")]) for oid, relation in known):
                raise SettingError("tables", pattern, "[schema.]table, or a pattern, of tables that the pipeline has")

    def _meant(self, oid: int, relation: str, patterns: Sequence[str]) -> bool:
        pinned = self._publishing.state.tables.get(oid)
        if pinned is not None and pinned.table.qualified == relation:
            return catalog.covers(patterns, (), pinned.table.schema, pinned.table.name)
        # of a table that was renamed or dropped, only the whole name is known: a schema has a dot sooner than a table
        schema, _, name = relation.rpartition(".")
        return catalog.covers(patterns, (), schema, name)

    def removed(self, keys: Iterable[bytes]) -> Records:
        """The tombstones of dead letters."""
        return tombstones(self._publishing.dead_letters, [(0, key) for key in keys])

    def closed(self, counts: Mapping[str, int]) -> dict[str, StateRecord | None]:
        """The counts behind some dead letters that are settled.

        :param counts: how many, by the keys of their counts.
        """
        known = self._publishing.state.letters
        return {key: replace(known[key], closed=known[key].closed + count) for key, count in counts.items()}

    def start(self, topic: str) -> list[int] | None:
        """See :meth:`~airflow_bottledwater.state.pipeline_state.PipelineState.start`."""
        return self._publishing.state.start(topic, self._publishing.described[topic].id)

    def blocks(self, topic: str, start: Sequence[int] = (), ends: Sequence[int] = ()) -> Iterator[RecordBlock]:
        """The records of a topic.

        :param start: see :func:`~airflow_bottledwater.kafka.topic_reader.blocks`; ``ends``: the same, or up to its
            present end.
        """
        size = _LARGE_BLOCK if topic == self._topic else _BLOCK
        ends = ends or self._ends(topic)
        return blocks(self._kafka, topic, ends, self._publishing.backoff, start=start, size=size)

    def _ends(self, topic: str) -> list[int]:
        return Topics(self._kafka).ends(topic, self._publishing.partitions[topic])


def _places(block: RecordBlock) -> Iterator[tuple[int, int]]:
    """The partition and the offset of each record."""
    return zip(block.messages["partition"].tolist(), block.messages["offset"].tolist(), strict=True)


def portions(places: Sequence[LetterPosition]) -> list[Sequence[LetterPosition]]:
    """Dead letters that are treated at once: as many as memory is for, at least one each."""
    found = []
    while places:
        n = fitting((place.size for place in places), _PORTION_BYTES)
        found.append(places[:n])
        places = places[n:]
    return found


def fitting(sizes: Iterable[int], limit: float) -> int:
    """How many of some sizes are not more than a limit together, at least one."""
    return max(1, sum(1 for _ in itertools.takewhile(lambda size: size <= limit, itertools.accumulate(sizes))))
