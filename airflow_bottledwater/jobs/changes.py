"""Follows what a pipeline publishes of some tables, as ranges that follow each other."""

from __future__ import annotations

import contextlib
import dataclasses
import logging
import math
import time
from collections.abc import Mapping, Sequence
from typing import NamedTuple

from airflow_bottledwater.errors import Outage, StateError
from airflow_bottledwater.kafka.offsets import OffsetSearch
from airflow_bottledwater.kafka.topics import Topics
from airflow_bottledwater.model.changes import ChangeRange, TopicRange
from airflow_bottledwater.model.lsn import Position, format_lsn
from airflow_bottledwater.model.slot import parts
from airflow_bottledwater.pipeline.patterns import describes, describes_one
from airflow_bottledwater.pipeline.settings import Settings
from airflow_bottledwater.state import control_topic, store
from airflow_bottledwater.state.claim import read_state
from airflow_bottledwater.state.control_records import (
    StatusRecord,
    UntoldRecord,
    decode,
    encode,
    status_key,
    untold_key,
)
from airflow_bottledwater.state.control_topic import ControlTopic
from airflow_bottledwater.state.identity import refuse_shared

log = logging.getLogger(__name__)

#: seconds after which the pipeline's saved state is read again for tables that are new
_TABLES = 60.0
#: seconds for which a look waits for the end of transactions
_OPEN = 10.0
#: offsets before a topic's end within which the place of a new watch is searched
_FAR = 1_000_000


class FollowedTopic(NamedTuple):
    """A table's topic.

    :param start: per partition, the offset before which positions are those of an earlier pipeline.
    """

    name: str
    id: str
    partitions: int
    start: list[int]


def topics_of(
    pipeline: Settings,
    name: str,
    tables: Sequence[str],
    topics: Topics,
    *,
    searched: bool = False,
    kept: store.Kept | None = None,
) -> dict[str, FollowedTopic]:
    """The topics of a pipeline's tables that patterns match, by ``schema.table``.

    :param name: the pipeline's name.
    :param tables: ``[schema.]table`` patterns, as in the settings.
    :param searched: whether positions are to be searched in them, which rise in topics of one pipeline only.
    :param kept: see :func:`store.read_records`.
    :raises Refused: they are to be, and a topic is shared.
    """
    _, database, slot = parts(name)
    state = read_state(pipeline, store.state_topic_name(database, slot), topics, kept=kept)
    meant = {
        pinned.table.qualified: pinned.topic
        for pinned in state.tables.values()
        if not pinned.table.outbox
        and any(describes(pattern, pinned.table.schema, pinned.table.name) for pattern in tables)
    }
    if searched:
        refuse_shared(
            pipeline,
            state,
            sorted(set(meant.values())),
            "Changes cannot be told by position",
            "positions lie among them",
        )
    described = topics.describe(sorted(set(meant.values())))
    found = {
        topic.name: FollowedTopic(
            topic.name, topic.id, topic.partitions, state.start(topic.name, topic.id) or [0] * topic.partitions
        )
        for topic in described.values()
    }
    return {table: found[topic] for table, topic in sorted(meant.items()) if topic in found}


def published(pipeline: Settings, name: str, kept: store.Kept | None = None) -> int:
    """The LSN of P, as it is in the pipeline's saved state: changes of transactions whose final LSN is below it are
    published.

    :param name: the pipeline's name.
    :param kept: see :func:`store.read_records`.
    :raises StateError: there is no such pipeline.
    """
    _, database, slot = parts(name)
    state = read_state(pipeline, store.state_topic_name(database, slot), kept=kept)
    if state.slot is None:
        raise StateError(f"There is no pipeline {name!r} in this Kafka.", "Create its slot first.")
    return state.resume_at.lsn


class ChangeWatch:
    """Watches a pipeline through Kafka for changes of some tables; it has to be closed.

    :param name: the pipeline's name.
    :param tables: ``[schema.]table`` patterns, as in the settings; None for all, also if there are none.
    :param min_records: how many records have to be published until they are told.
    :param max_wait: seconds after which fewer are told, too; None: never.
    :param last: the last range that was told; None to begin with what is published from now on.
    """

    def __init__(
        self,
        pipeline: Settings,
        name: str,
        tables: Sequence[str] | None,
        *,
        min_records: int = 1,
        max_wait: float | None = None,
        last: ChangeRange | None = None,
    ) -> None:
        self._pipeline, self._name, self._tables = pipeline, name, tables
        self._min_records, self._max_wait = min_records, max_wait
        self._control = ControlTopic.of(pipeline.kafka)
        self._topics = Topics(pipeline.kafka)
        self._known: tuple[float, dict[str, FollowedTopic]] | None = None
        self._kept = store.Kept()
        self._since: float | None = None
        self.last = last
        #: the patterns that match no table; None as long as that is not known
        self.missing: tuple[str, ...] | None = None

    def close(self) -> None:
        """End the watch."""
        self._control.close()

    def fetch(self) -> ChangeRange | None:
        """What was published since the last range, if it is to be told; the first time, an empty range that says where
        the next one begins.

        :raises Outage: Kafka does not answer, or no job has reported on the pipeline.
        """
        status = decode(StatusRecord, self._control.get(status_key(self._name))[0])
        if status is None:
            # the name has the cluster's system identifier: a source that was upgraded or moved has another name, which
            # whoever watches learns when the watch begins anew
            raise Outage(f"No job has reported on a pipeline {self._name!r} in this Kafka.", "Run the pipeline.")
        if not status.position:
            return None
        # inside of a transaction, none of its changes count yet, so that it is not divided
        lsn = Position.parse(status.position).lsn
        if self.last is None:
            return self._told(self._cut(ChangeRange(self._name, lsn, lsn), lsn, begins=True))
        if self.last.pipeline == self._name and lsn == self.last.end:
            return None
        waiting = self._behind(self._ends())
        if not waiting.records:
            self._since = None
            return None
        self._since = self._since or time.monotonic()
        if self._too_few(waiting):
            return None
        if lsn < waiting.start:
            return self._set_back(waiting.start)
        found = self._cut(waiting, lsn)
        # what is behind the position is not in it
        return None if found is None or found.empty or self._too_few(found) else self._told(found)

    def _set_back(self, end: int) -> ChangeRange | None:
        """What was published since the last range if the source was restored to a moment before its end: the topics may
        have changes of the time behind that moment, so that no position can be searched there. None if it was not, and
        a job that was replaced has reported once more."""
        found = self.present()
        return self._told(found) if found.end < end else None

    def _too_few(self, found: ChangeRange) -> bool:
        """Whether more are waited for."""
        waited = time.monotonic() - (self._since or math.inf)
        return found.records < self._min_records and (self._max_wait is None or waited < self._max_wait)

    def _told(self, found: ChangeRange | None) -> ChangeRange | None:
        if found is not None:
            self.last, self._since = found, None
        return found

    def _of_tables(self, *, now: bool = False) -> dict[str, FollowedTopic]:
        """The topics by table; ``now``, before positions are searched in them."""
        if self._known is None or now or time.monotonic() - self._known[0] > _TABLES:
            patterns = ["*.*"] if self._tables is None else self._tables
            known = topics_of(self._pipeline, self._name, patterns, self._topics, searched=now, kept=self._kept)
            self.missing = tuple(
                sorted(each for each in self._tables or () if not any(describes_one(each, table) for table in known))
            )
            self._known = time.monotonic(), known
        return self._known[1]

    def _ends(self, *, committed: bool = False) -> dict[str, tuple[int, ...]]:
        """The ends of the topics, by table."""
        topics = self._of_tables()
        ends = self._topics.all_ends({topic.name: topic.partitions for topic in topics.values()}, committed=committed)
        return {table: tuple(ends[topic.name]) for table, topic in topics.items()}

    def _behind(self, ends: Mapping[str, tuple[int, ...]]) -> ChangeRange:
        """From where the last range has ended up to these offsets."""
        last = ChangeRange(self._name) if self.last is None else self.last
        known = {(each.topic, each.id): each.end for each in last.tables.values()}
        topics = self._of_tables()
        before = {table: known.get((topic.name, topic.id), ()) for table, topic in topics.items()}
        # a table that is new, or has another topic by now, is told from its topic's beginning
        new = [topic for table, topic in topics.items() if len(before[table]) < topic.partitions]
        begins = self._topics.begins({topic.name: topic.partitions for topic in new})
        tables = {}
        for table, topic in topics.items():
            begin = begins.get(topic.name, ())[len(before[table]) :]
            start = (*before[table], *map(min, begin, ends[table][len(before[table]) :]))
            tables[table] = TopicRange(topic.name, topic.id, start, ends[table])
        lsn = last.end if last.pipeline == self._name else 0
        return ChangeRange(self._name, lsn, lsn, tables)

    def _cut(self, waiting: ChangeRange, lsn: int, *, begins: bool = False) -> ChangeRange | None:
        """All changes below an LSN that the pipeline has published, and no others.

        :param begins: whether to take the place itself, as an empty range.
        :return: None if transactions are open that could hide some of them; it is tried again.
        """
        topics = self._of_tables(now=True)
        if (ends := self._committed_ends()) is None:
            log.info("Changes are told later, since a transaction is open in one of the topics.")
            return None
        tables = self._behind(ends).tables
        if begins:
            # far enough back: what a status does not say yet was published within the seconds between two of them
            tables = {table: each.begun_at(end - _FAR for end in each.end) for table, each in tables.items()}
        with OffsetSearch(self._pipeline.kafka) as search:
            found = {table: self._end(search, topics[table], each, lsn) for table, each in tables.items()}
        return ChangeRange(
            self._name,
            waiting.start,
            lsn,
            {
                table: TopicRange(each.topic, each.id, found[table] if begins else each.start, found[table])
                for table, each in tables.items()
            },
        )

    def _committed_ends(self) -> dict[str, tuple[int, ...]] | None:
        """The ends of the topics, by table, once every transaction before them is committed or aborted: what is
        published lies below these ends, but Kafka may show it a moment later. None if that takes too long."""
        ends, deadline = self._ends(), time.monotonic() + _OPEN
        while True:
            shown = self._ends(committed=True)
            if all(a >= b for table, of in ends.items() for a, b in zip(shown[table], of, strict=True)):
                return ends
            if time.monotonic() > deadline:
                return None
            time.sleep(0.1)

    def present(self) -> ChangeRange:
        """Everything that was published since the last range; the first time, an empty range, which ends before
        transactions that stay open: the next one has all of them. While no job publishes, it ends at the position,
        without a search. If the last range ends behind that, the source was restored to an earlier moment, and the
        range begins at 0.

        :raises StateError: there is no such pipeline.
        :raises Outage: Kafka does not answer, or a transaction stays open behind the last range.
        """
        if self.last is None:
            # only the next job of the pipeline may end what is open, of a producer that was killed for example
            self._kept = store.Kept(waits=False)
        lsn, ends = published(self._pipeline, self._name, self._kept), self._committed_ends()
        if ends is None and self.last is None:
            ends = self._ends(committed=True)
        if ends is None:
            raise Outage("A transaction is open in one of the topics.", "It ends with its producer's time-out.")
        found = self._behind(ends)
        tables = found.tables
        if self.last is None:
            tables = {table: each.begun_at(each.end) for table, each in tables.items()}
        start = lsn if self.last is None else found.start
        return ChangeRange(self._name, start if start <= lsn else 0, lsn, tables)

    def between(self, start: int, end: int) -> ChangeRange:
        """The range between two LSNs, see :func:`between`."""
        if (reached := published(self._pipeline, self._name, self._kept)) < end:
            raise StateError(
                f"The pipeline {self._name!r} has published up to {format_lsn(reached)} only, not up to "
                f"{format_lsn(end)}.",
                "Wait until it has (StreamPositionSensor).",
            )
        topics = self._of_tables(now=True)
        if self.missing:
            raise StateError(
                f"The pipeline {self._name!r} has no table that matches {', '.join(self.missing)}.",
                "See which tables it has with 'bottledwater status'; a schema other than public has to be named.",
            )
        if (ends := self._committed_ends()) is None:
            raise Outage("A transaction is open in one of the topics.", "It ends with its producer's time-out.")
        tables = {}
        with OffsetSearch(self._pipeline.kafka) as search:
            for table, whole in self._behind(ends).tables.items():
                until = self._end(search, topics[table], whole, end)
                begins = self._end(search, topics[table], dataclasses.replace(whole, end=until), start)
                tables[table] = TopicRange(whole.topic, whole.id, begins, until)
                self._check_whole(search, topics[table], whole.start, begins, start)
        return ChangeRange(self._name, start, end, tables)

    @staticmethod
    def _check_whole(
        search: OffsetSearch, topic: FollowedTopic, first: Sequence[int], begins: Sequence[int], lsn: int
    ) -> None:
        """Check that the topic still has a change before those of the range, if a retention has deleted any: otherwise
        some of the range may be among these.

        :param first: per partition, the offset of the topic's first record.
        :param begins: per partition, where the range begins.
        """
        for partition, (low, start, at) in enumerate(zip(first, topic.start, begins, strict=True)):
            if start < low and not search.has_change(topic.name, partition, low, at):
                raise StateError(
                    f"Topic {topic.name!r} has lost the records of partition {partition} up to offset {low} by its "
                    f"retention, and has no change from before {format_lsn(lsn)} any more: some of the range may be "
                    "among the lost ones.",
                    "Begin the range at a later position; or read the table itself, or publish it again by a backfill. "
                    "Give the topic a longer retention.",
                )

    @staticmethod
    def _end(search: OffsetSearch, topic: FollowedTopic, within: TopicRange, lsn: int) -> tuple[int, ...]:
        """By partition, where the changes below an LSN end. They rise from where the pipeline begins in the topic: what
        is before may have any positions, and is before all of its changes."""
        places = zip(within.start, topic.start, within.end, strict=True)
        return tuple(
            search.find(within.topic, partition, max(low, start), high, lsn)
            for partition, (low, start, high) in enumerate(places)
        )


def present(pipeline: Settings, name: str, last: ChangeRange | None = None) -> ChangeRange:
    """Everything that the pipeline has published, in all of its tables, since an earlier range; without one, an empty
    range that ends here. See :meth:`ChangeWatch.present`."""
    with contextlib.closing(ChangeWatch(pipeline, name, None, last=last)) as watch:
        return watch.present()


def leave_untold(pipeline: Settings, name: str) -> None:
    """Let the next bounded run also tell what is published from now on, which no task tells: without the begin, since
    it does not know of that. What was left before begins earlier, and stays.

    :raises Outage: Kafka does not answer, or a transaction stays open.
    """
    if untold(pipeline, name) is None:
        left = UntoldRecord(present(pipeline, name).as_event())
        control_topic.write(pipeline.kafka, {untold_key(name): encode(left)})


def untold(pipeline: Settings, name: str) -> ChangeRange | None:
    """Where that begins what was left for the next bounded run to tell; None if nothing was.

    :raises Outage: Kafka does not answer.
    """
    left = decode(UntoldRecord, control_topic.read(pipeline.kafka).get(untold_key(name)))
    return None if left is None else ChangeRange.of_event(left.begun)


def take_untold(pipeline: Settings, name: str) -> None:
    """What was left is going to be told: whoever tells it has noted where it begins.

    :raises Outage: Kafka does not answer.
    """
    if untold(pipeline, name) is not None:
        control_topic.write(pipeline.kafka, {untold_key(name): None})


def between(pipeline: Settings, name: str, tables: Sequence[str], start: int, end: int) -> ChangeRange:
    """The range of changes between two LSNs that the pipeline has passed, since its slot was made. Dead letters that
    were re-driven have the positions of their changes, and lie behind later ones: they are in none of such ranges, or
    in a later one.

    :param name: the pipeline's name.
    :param tables: ``[schema.]table`` patterns, as in the settings.
    :raises StateError: the pipeline has no such table, or has not come so far.
    :raises Outage: Kafka does not answer, or a transaction stays open.
    """
    with contextlib.closing(ChangeWatch(pipeline, name, tables)) as watch:
        return watch.between(start, end)
