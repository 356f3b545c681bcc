"""One way into Kafka for the snapshot and the stream: open, read the state, publish in one transaction with a record of
progress.

If a transaction's outcome is unknown, the state shows it: a new producer is made and initialised, the state is read
after that, and what is left to do is decided anew from it. Nothing is ever guessed.
"""

from __future__ import annotations

import contextlib
import logging
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future, wait
from dataclasses import replace
from typing import TypeVar

import numpy as np
import numpy.typing as npt

from airflow_bottledwater.backoff import Backoff
from airflow_bottledwater.encoding.mapping import TableMapping
from airflow_bottledwater.encoding.program import Programs, Target, compile_programs
from airflow_bottledwater.errors import (
    LOST_STATE,
    ChosenTopicGone,
    CredentialsRefused,
    Outage,
    Refused,
    StateError,
    beside,
)
from airflow_bottledwater.kafka.errors import NewProducerNeeded, RecordRefused, TooSlow
from airflow_bottledwater.kafka.hanging import release
from airflow_bottledwater.kafka.publisher import RECORD_OVERHEAD, Publisher, Records, single
from airflow_bottledwater.kafka.topics import CommitTimes, Topic, Topics
from airflow_bottledwater.metrics import registry
from airflow_bottledwater.metrics.meter import Meter
from airflow_bottledwater.model.amounts import clock
from airflow_bottledwater.model.job import Job
from airflow_bottledwater.model.problem import Problem
from airflow_bottledwater.model.slot import parts
from airflow_bottledwater.model.version import Version
from airflow_bottledwater.pipeline.settings import Settings
from airflow_bottledwater.policy import ErrorAction, act
from airflow_bottledwater.publish.pace import Pace
from airflow_bottledwater.state import store
from airflow_bottledwater.state.claim import check, read_behind, unknown
from airflow_bottledwater.state.identity import SWEEP_TRUNCATED, check_topic
from airflow_bottledwater.state.pinned import Pin
from airflow_bottledwater.state.pipeline_state import PipelineState
from airflow_bottledwater.state.records import BEGUN, LaterSchema, StateRecord, encode, schema_key
from airflow_bottledwater.state.schemas import later_schema

log = logging.getLogger(__name__)

T = TypeVar("T")

#: bytes of the largest record, where no topic sets a lower limit: the largest message.max.bytes of librdkafka
LARGEST = 1_000_000_000
#: bytes of a record of the state, which may be longer than its topic's limit: the broker compares what is compressed.
#: librdkafka's queue has room for one, so that more would cost memory
_STATE_RECORD = 8 << 20
#: bytes below which batches are not made smaller
_SMALLEST_BATCH = 1000
#: seconds after which a session compares its topics again while it keeps its producer
_COMPARE_AGAIN = 30.0
#: seconds without an answer after which it is told that they cannot be compared
_UNCHECKED = 120.0
#: seconds for which it waits for Kafka's description of them, which is there after some milliseconds unless there are
#: hundreds
_PATIENCE = 0.05


class PublishSession:
    """Publishes under one transactional id. It knows the topics by index and their limits, and checks the claim
    whenever it opens a producer.

    :param job: the job whose claim must be the last one.
    :param transactional_id: names the work (stream, or a lane of the snapshot), never the process that does it.
    :param topics: the data topics as they were pinned; the service topics and the state topic come after them in
        :attr:`topics`.
    :param meter: counts what is committed.
    :param named: other topics, which the settings name.
    :raises StateError: a topic is missing, or is no longer the one that was pinned.
    :ivar pace: how large a transaction may be.
    :ivar fresh: whether nobody has used the id since the claim, or :meth:`Claim.initialise_all`, has ended what was
        left open under it: looking for it once more would wait for the job's other producers. False unless the user of
        the session says so.
    :ivar state: the pipeline's state as it was read after the last initialisation, with what this session has written
        since.
    """

    def __init__(
        self,
        pipeline: Settings,
        job: Job,
        transactional_id: str,
        topics: Mapping[str, Pin],
        state_topic: str,
        backoff: Backoff,
        meter: Meter | None = None,
        named: Sequence[str] = (),
    ) -> None:
        self.pipeline, self.job, self.backoff = pipeline, job, backoff
        self.meter = meter or Meter()
        self.state = PipelineState()
        self._state_topic = state_topic
        self._id, self._pins = transactional_id, dict(topics)
        service = TableMapping.of(pipeline).service_topics
        self.topics = [*sorted(self._pins), *named, *service, state_topic]
        self.index = {name: i for i, name in enumerate(self.topics)}
        #: topics that records have chosen; nothing is lost with one of them but what it held
        self.chosen: set[str] = set()
        self.events, self.dead_letters, self._progress = (self.index[name] for name in (*service, state_topic))
        #: with which a transaction may begin: a tombstone, which changes nothing in the state
        self.first_record = single(self._progress, 0, BEGUN, None)
        self._admin = Topics(pipeline.kafka)
        self.partitions: dict[str, int] = {}
        self.limits: npt.NDArray[np.int64] = np.zeros(len(self.topics), dtype=np.int64)
        self._timed: list[CommitTimes] = []
        #: all topics as they were described last, with the shared state topic
        self.described: dict[str, Topic] = {}
        self._largest_batch = self._request = 1_000_000
        largest = max(pipeline.batch_bytes, pipeline.max_transaction_bytes, pipeline.range_bytes)
        self.pace = Pace(pipeline.transaction_timeout, largest)
        self._publisher: Publisher | None = None
        self.fresh = False
        #: the versions with which rows were encoded since the last transaction, by the table's oid and the schema's id
        self._encoded: dict[tuple[int, int], list[Version]] = {}
        #: the last programs, and what they were made of
        self._programs: tuple[tuple[Version, ...], bool, Programs] | None = None
        self._compared = 0.0
        #: why they could not be compared when that was tried last, and since when
        self._uncompared: tuple[Outage | CredentialsRefused, float] | None = None
        #: the ids of the topics of the state and of events, as they were first
        self._state_id = self._events_id = ""
        #: whether the topics have other limits than the producer was made for
        self._outdated = False
        #: what the topics are now, as another thread finds out; None if it was not asked
        self._described: Future[dict[str, Topic]] | None = None
        self.compare_topics()

    def run(self, work: Callable[[], T]) -> T:
        """Do the work with an open producer, and whenever its transaction is lost, do it again from the state as it is
        then.

        :param work: decides by :attr:`state` what is left to do, and publishes that with :meth:`transact`.
        :raises BottledWaterError: any error for which a new producer is not the remedy
            (:mod:`airflow_bottledwater.policy`).
        """
        while True:
            try:
                self.open()
                try:
                    return work()
                finally:
                    if self._publisher is not None and self._publisher.begun:
                        self.close()
            except Exception as error:
                if act(error) is not ErrorAction.REOPEN:
                    raise
                log.warning("%s: a new producer reads the state and goes on.", error)
                self.close()
                if isinstance(error, TooSlow) and error.confirmed and error.divisible:
                    self.backoff.over()  # the servers are there, and less is tried next
                else:
                    self.backoff.wait(str(error))

    def open(self, *, alone: bool = False) -> None:
        """Make and initialise a producer, unless there is one, and then read the state.

        The topics are compared whenever a producer is made, and every 30 seconds while one is in use, also while
        nothing is published: a topic that was deleted and created anew would accept records without an error. While one
        is in use, Kafka is asked in another thread, since the answer takes seconds for thousands of topics.

        :param alone: whether each record is sent in a batch of its own.
        :raises TakenOver: another job has claimed the slot.
        :raises StateError: a topic is missing, or is no longer the one that was pinned.
        """
        if self._publisher is not None and (
            self._compared_aside() or self._outdated or self._request < self.pace.request
        ):
            self.close()
        if self._publisher is not None:
            return
        self.compare_topics()
        publisher = self._make(alone=alone)
        try:
            try:
                publisher.open()
            except Refused:
                # a topic may have been deleted between the comparison and the producer's own check
                self.compare_topics()
                raise
            found = read_behind(
                self.pipeline, self._state_topic, self.backoff, lambda: self._release(publisher), self._admin
            )
            check(found, self.job)
            if found.slot is None:
                # the claim was written again when the job began, what is older has expired
                raise unknown(self._state_topic, self.pipeline.slot)
        except BaseException:
            publisher.close()
            raise
        self._publisher, self.state = publisher, found

    def _release(self, publisher: Publisher) -> None:
        """End the transaction that an outage has left open under this transactional id, and initialise again."""
        if self.fresh:
            self.fresh = False
            return
        timeout, waiting = self.pipeline.transaction_timeout, self.backoff.wait
        topics = {name: self.partitions[name] for name in self.topics}
        kafka, admin = self.pipeline.kafka, self._admin
        if release(kafka, [self._id], topics, admin=admin, transaction_timeout=timeout, waiting=waiting):
            publisher.open()

    def _make(self, *, alone: bool) -> Publisher:
        self._request, self._outdated = self.pace.request, False
        return Publisher(
            {
                **self.pipeline.kafka,
                **({"batch.num.messages": "1", "linger.ms": "0"} if alone else {}),
                "message.max.bytes": str(min(LARGEST, max(_STATE_RECORD, self.largest_record))),
                # a batch must fit the topic with the smallest limit, since the broker refuses a batch as a whole
                "batch.size": str(max(1, min(self._largest_batch, self._request, int(self.limits.min() * 0.9)))),
            },
            self._id,
            self.topics,
            transaction_timeout=self.pipeline.transaction_timeout,
            waiting=self._wait,
            partitions=sum(self.partitions[name] for name in self._pins),
            timed=self._timed,
        )

    def _wait(self, what: str | BaseException) -> None:
        """Wait for the broker once; if it is slow, that is the reason.

        :raises StateError: it takes no records since a topic is missing, or is no longer the one that was pinned.
        """
        self.backoff.wait(f"{self.pace} {what}" if self.pace.slow and isinstance(what, str) else what)
        self._outdated = self._compared_aside(now=True) or self._outdated

    def close(self) -> None:
        """Close the producer; the next :meth:`open` makes a new one."""
        if self._publisher is not None:
            self._publisher.close()
        self._publisher = None

    def begin(self) -> None:
        """Begin the Kafka transaction of the next :meth:`transact` now, while its records are still being made. It
        hides the end of the state from who reads it, so little may be waited for until then. If the work ends without
        it, it is aborted. Nothing is done in an open transaction, or where Kafka is slow.

        :raises NewProducerNeeded: the record that begins it is refused; see :meth:`transact`.
        """
        assert self._publisher is not None, "open() comes first"
        if not self._publisher.begun and not self.pace.slow:
            try:
                self._publisher.begin(self.first_record)
            except RecordRefused as error:
                raise NewProducerNeeded(error.what) from error

    def transact(
        self,
        batches: Iterable[Records],
        progress: Mapping[str, StateRecord | None],
        *,
        divisible: bool = True,
        several: bool = False,
    ) -> None:
        """Publish in one Kafka transaction: all batches, and last the records of progress.

        :param progress: read after the last batch, so that the iterator of batches may fill it in; None removes a
            record.
        :param divisible: whether less can be published at a time; otherwise Kafka has nearly all of the time-out for
            it.
        :param several: whether it may be several transactions where Kafka is slow, of which the last has the records of
            progress.
        :raises NewProducerNeeded: the transaction was lost; :meth:`run` decides anew.
        :raises RecordRefused: the broker refuses a record for good.
        """
        assert self._publisher is not None, "open() comes first"
        try:
            # what is known before the transaction begins is not made while it is open, for which consumers wait
            known = None if several or not isinstance(batches, Sequence) else self._last(progress)
            pieces = iter(self._pieces(batches) if several else batches)
            piece = next(pieces, None)
            while True:
                with self._publisher.transaction(divisible=divisible):
                    while piece is not None and not (several and self._publisher.size >= self.pace.limit):
                        self._publisher.produce(piece)
                        piece = next(pieces, None)
                    if piece is None:
                        written, last = known or self._last(progress)
                        for record in last:
                            self._publisher.produce(record)
                self.pace.committed(self._publisher.size, self._publisher.seconds)
                self.meter.add(registry.BYTES, self._publisher.size)
                self.meter.observe(registry.COMMIT_SECONDS, self._publisher.seconds)
                self.backoff.over()
                if piece is None:
                    break
        except BaseException as error:
            # after an abort, a delayed request of this transaction could still become part of the producer's next one
            self.close()
            if isinstance(error, TooSlow):
                self.pace.failed(error)
            raise
        self.state.apply(written)
        self._encoded.clear()

    def _last(self, progress: Mapping[str, StateRecord | None]) -> tuple[dict[str, StateRecord | None], list[Records]]:
        """What is written last in a transaction, as state records and as Kafka records: the progress, and the schemas
        that are first used in it."""
        written = {**self._later_schemas(), **progress}
        return written, self.progress_records(written)

    def _later_schemas(self) -> dict[str, StateRecord | None]:
        """The records of definitions that are first used in this transaction. One that is too large for the state topic
        is left out: only, it is not noticed if the registry loses its schema."""
        found: dict[str, LaterSchema] = {}
        for (oid, number), versions in self._encoded.items():
            pinned, key = self.state.tables.get(oid), schema_key(oid, number)
            for version in versions:
                if not number or pinned is None or version.topic != pinned.topic:
                    continue
                known = self.state.versions(oid) + ([replace(version, table=found[key].table)] if key in found else [])
                record = later_schema(self.pipeline, version, known)
                if record and len(store.encode(encode(record)) or b"") + RECORD_OVERHEAD < self.limits[self._progress]:
                    found[key] = record
        return dict(found)

    def _pieces(self, batches: Iterable[Records]) -> Iterator[Records]:
        """The records in pieces of half of what a transaction may have, at least one record each."""
        for records in batches:
            start, ends = 0, np.cumsum(records.sizes())
            while start < len(records):
                before = int(ends[start - 1]) if start else 0
                stop = int(np.searchsorted(ends, before + self.pace.limit / 2, side="right"))
                stop = max(start + 1, stop)
                # the event of a deletion and its tombstone have the same key, and stay together
                stop += int(stop < len(records) and records.table["key"][stop] == records.table["key"][stop - 1])
                yield Records(records.table[start:stop], records.data, records.headers, records.label)
                start = stop

    def progress_records(self, progress: Mapping[str, StateRecord | None]) -> list[Records]:
        """The state records as Kafka records for the state topic."""
        return [
            single(self._progress, 0, key.encode(), None if value is None else store.encode(encode(value)))
            for key, value in progress.items()
        ]

    @property
    def name(self) -> str:
        """The pipeline's name in the shared topic; known while a producer is open."""
        assert self.state.slot is not None, "open() comes first"
        return self.state.slot.pipeline

    # ------------------------------------------------------------------ topics and their limits
    def compare_topics(self) -> bool:
        """Compare the topics with those that were pinned; returns whether a producer must be made with other limits, or
        with other timestamps, than those of the last comparison.

        :raises StateError: a topic is missing, or is no longer the one that was pinned.
        """
        self._described = None
        while True:
            try:
                return self._compare(self._ask())
            except (Outage, CredentialsRefused) as error:
                self.backoff.wait(error)

    def _compared_aside(self, *, now: bool = False) -> bool:
        """Compare the topics if that is due and another thread has asked Kafka for them; returns what
        :meth:`compare_topics` does. An outage is no error here: publishing meets it, too, and Kafka is asked again; if
        it does not, :meth:`unchecked` tells it.

        :param now: whether it is due in any case.
        """
        described = self._described
        if described is None and (now or time.monotonic() - self._compared > _COMPARE_AGAIN):
            self._described = described = Future()
            threading.Thread(target=self._describe, args=(described,), name="topics", daemon=True).start()
            wait([described], _PATIENCE)
        if described is None or not described.done():
            return False
        self._described = None
        try:
            return self._compare(described.result())
        except (Outage, CredentialsRefused) as error:
            log.debug("The topics could not be compared: %s", error)
            since = self._uncompared[1] if self._uncompared else time.monotonic()
            self._uncompared = error, since
            return False

    def unchecked(self, away: float) -> list[Problem]:
        """That the topics could not be compared for two minutes, although Kafka answers.

        :param away: when it was away last, by the monotonic clock.
        """
        if self._uncompared is None:
            return []
        error, since = self._uncompared
        if (ago := time.monotonic() - max(since, away)) <= _UNCHECKED:
            return []
        what = (
            f"Since {clock(time.time() - ago)} it cannot be asked whether a topic was deleted or altered: {error.what}"
        )
        return [Problem("topics-unchecked", "Kafka", what, beside(error), since=time.time() - ago)]

    def _describe(self, found: Future[dict[str, Topic]]) -> None:
        try:
            found.set_result(self._ask())
        except BaseException as error:
            found.set_exception(error)

    def _ask(self) -> dict[str, Topic]:
        found = self._admin.describe(self.topics, confirm=True)
        with contextlib.suppress(Refused):  # nothing is published to it
            found |= self._admin.describe([store.CONTROL_TOPIC])
        return found

    def _compare(self, described: dict[str, Topic]) -> bool:
        if described.get(self._state_topic) is None:
            raise store.gone(self._state_topic)
        for name in self.topics:
            if name in self.chosen and described.get(name) is None:
                raise ChosenTopicGone(f"Topic {name!r}, which a record of an outbox chose, does not exist any more.")
            check_topic(self.pipeline.kafka, name, described.get(name), self._pins.get(name))
        self._state_id = self._state_id or described[self._state_topic].id
        if described[self._state_topic].id != self._state_id:
            raise StateError(
                f"State topic {self._state_topic!r} was deleted and made again: its records are gone.", LOST_STATE
            )
        events = described[self.topics[self.events]]
        self._events_id = self._events_id or events.id
        if events.id != self._events_id:
            raise StateError(
                f"Topic {events.name!r} was deleted and made again: the events of truncations that it held are gone.",
                f"Start again, and {SWEEP_TRUNCATED}",
            )
        for name, topic in described.items():
            # a right that was taken away changes no topic
            if not topic.known and (before := self.described.get(name)) is not None:
                described[name] = replace(before, id=topic.id, partitions=topic.partitions)
        limits, timed = self.limits, self._timed
        self.limits = np.array([described[n].max_bytes for n in self.topics], dtype=np.int64)
        self._timed = [described[n].commit_times for n in self.topics]
        self.described = described
        self.partitions = {name: topic.partitions for name, topic in described.items()}
        self._compared, self._uncompared = time.monotonic(), None
        return not np.array_equal(limits, self.limits) or timed != self._timed

    def include(self, names: Sequence[str]) -> None:
        """Publish to more topics, which records choose; an open producer is replaced at the next :meth:`open`.

        :raises ChosenTopicGone: one is missing.
        """
        self.close()
        self.topics += names
        self.chosen.update(names)
        self.index = {name: i for i, name in enumerate(self.topics)}
        self.compare_topics()

    @property
    def largest_record(self) -> int:
        """Bytes of the largest record that any of the topics takes."""
        return int(self.limits.max())

    @property
    def dead_letter_limit(self) -> int:
        """Bytes of the largest dead letter that its topic takes."""
        return int(self.limits[self.dead_letters]) - RECORD_OVERHEAD - 64

    def oversized(self, records: Records) -> npt.NDArray[np.bool_]:
        """Which records exceed their topic's max.message.bytes."""
        found: npt.NDArray[np.bool_] = records.sizes() > self.limits[records.table["topic"]]
        return found

    def smaller_batches(self, size: int) -> None:
        """Make batches smaller, since the broker refuses records together that it accepts one by one: it has a limit
        that this role may not read.

        :param size: bytes of these records.
        :raises Refused: batches cannot be made any smaller.
        """
        self._largest_batch = min(self._largest_batch, size) // 2
        if self._largest_batch < _SMALLEST_BATCH:
            raise Refused(
                "Kafka refuses records together that it takes one by one, however few they are.",
                "See the broker's log for what it refuses.",
            )

    # ------------------------------------------------------------------ for encoding and for refusals
    def programs(self, versions: Sequence[Version], *, copied: bool) -> Programs:
        """The encoding programs for relation versions.

        :param copied: whether the rows come from a COPY instead of the stream.
        """
        # those of the batch before are nearly always the same objects, which are compared at once; a topic's number of
        # partitions is pinned
        if self._programs is None or self._programs[:2] != (versions := tuple(versions), copied):
            tables = [(v.table, self._target(v)) for v in versions]
            made = compile_programs(tables, self.pipeline.record_format, copied=copied)
            self._programs = tuple(versions), copied, made
            for each in versions:
                of_id = self._encoded.setdefault((each.table.oid, each.value_schema), [])
                of_id += [each] if each not in of_id else []
        return self._programs[2]

    def _target(self, version: Version) -> Target:
        if version.table.outbox:
            return Target()  # it has no topic of its own, and is not encoded by a program
        topic = version.topic
        mapping = TableMapping.of(self.pipeline)
        # the state is read, and so the pipeline's name known, before there are records of rows
        around = mapping.around(topic, version.table, parts(self.name)[1]) if mapping.envelope else None
        numbers = version.key_schema, version.value_schema
        # an old row has the schema of a value, which a version that the registry has refused does not have
        before = self.pipeline.before == "header" and not version.refused
        return Target(self.index[topic], self.partitions[topic], *numbers, around, before)

    def refusal(self, records: Sequence[Records]) -> RecordRefused | None:
        """The broker's first refusal when these records are sent, each in a batch of its own, in a transaction that is
        then aborted; None if it accepts all.

        :raises NewProducerNeeded: the attempt failed, so that it is not known.
        """
        self.close()
        self.open(alone=True)
        assert self._publisher is not None
        try:
            self._publisher.attempt(records)
        except RecordRefused as error:
            return error
        finally:
            self.close()
        return None
