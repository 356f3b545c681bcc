"""Which job may work on a slot. A transactional id fences other producers, but it does not elect a job: the *last*
producer to initialise wins, not the newest job.

So a job (1) writes its claim, (2) initialises every transactional id that is recorded, (3) reads the state to its end,
(4) works. After every later initialisation, in a task or after an error, the state is read again before the first
record is sent.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Protocol

from airflow_bottledwater.backoff import Backoff
from airflow_bottledwater.encoding.mapping import TableMapping
from airflow_bottledwater.errors import LOST_STATE, Outage, StateError, StopRequested, TakenOver
from airflow_bottledwater.kafka.errors import NewProducerNeeded
from airflow_bottledwater.kafka.hanging import release
from airflow_bottledwater.kafka.producer import Message, TransactionalProducer
from airflow_bottledwater.kafka.topics import Topics
from airflow_bottledwater.model.job import Job, Owner
from airflow_bottledwater.model.lsn import Position
from airflow_bottledwater.model.slot import Cluster
from airflow_bottledwater.pipeline.settings import Settings
from airflow_bottledwater.state import control_topic, store
from airflow_bottledwater.state.control_records import OwnerRecord, decode, topic_owned
from airflow_bottledwater.state.identity import check_cluster, check_settings, check_timeline
from airflow_bottledwater.state.pinned import pins
from airflow_bottledwater.state.pipeline_state import PipelineState
from airflow_bottledwater.state.records import (
    CLAIM,
    IDS,
    Ids,
    StateRecord,
    encode,
    id_prefix,
    state_writer_id,
)

log = logging.getLogger(__name__)

#: what jobs do that publish, or make what is published to
_PUBLISHING = frozenset({"create", "snapshot", "stream", "redrive"})
#: claims that go on with a pipeline; the others end its job or delete its state, as is needed also after a fail-over
_CONTINUING = _PUBLISHING | {"accept"}


def ensure_state_topics(pipeline: Settings, topic: str, topics: Topics, *, new: bool) -> None:
    """Create the shared state topic and the slot's, if they are missing.

    :param new: whether the slot's may be created.
    :raises StateError: one is missing and may not be created, or has settings under which records would be lost.
    """
    present = topics.describe([store.CONTROL_TOPIC, topic], confirm=not new)
    replication = topics.replicas(pipeline.replication_factor)
    for name in (store.CONTROL_TOPIC, topic):
        if name not in present:
            if name == topic and not new:
                raise unknown(topic, pipeline.slot)
            if not pipeline.create_topics:
                raise StateError(
                    f"Topic {name!r} is missing and create_topics is off.", "Create it: one partition, compacted."
                )
            topics.make(store.new_topic(name, replication))
        elif problem := store.unfit(pipeline.kafka, present[name]):
            raise StateError(f"{problem.subject}: {problem.reason}", problem.remedy)


def unknown(topic: str, slot: str) -> StateError:
    """The error of a slot of which nothing is saved."""
    return StateError(
        f"The state topic {topic!r} does not know slot {slot!r}.",
        "Check the slot's name and the database of the connection. If they are right, create the slot first "
        f"(create_slot, or 'bottledwater'). If it was created, its records were lost. {LOST_STATE}",
    )


def read_state(
    pipeline: Settings,
    topic: str,
    admin: Topics | None = None,
    *,
    must_exist: bool = False,
    committed: bool = True,
    kept: store.Kept | None = None,
) -> PipelineState:
    """Read all state records, up to the topic's end. An open transaction in it ends with its producer's time-out at the
    latest.

    :param admin: the caller's admin client, if it has one.
    :param committed: whether only committed records are read; the others need not wait for an open transaction.
    :param must_exist: the topic is known to exist; otherwise a missing topic is read as one without records.
    :param kept: see :func:`store.read_records`.
    :raises Outage: the records cannot be read, or a transaction stays open.
    :raises StateError: a topic that must exist is missing, or a record in it is malformed.
    """
    timeout = pipeline.transaction_timeout + 30
    return PipelineState(
        store.read_records(
            pipeline.kafka, topic, timeout=timeout, committed=committed, admin=admin, must_exist=must_exist, kept=kept
        )
    )


def read_own(pipeline: Settings, cluster: Cluster, kept: store.Kept | None = None) -> PipelineState:
    """The saved state of a pipeline of this cluster.

    :param kept: see :func:`store.read_records`.
    :raises StateError: the state is another cluster's, or see :func:`read_state`.
    :raises Outage: see :func:`read_state`.
    """
    found = read_state(pipeline, store.state_topic_name(cluster.database, pipeline.slot), kept=kept)
    check_cluster(found, cluster, pipeline.slot)
    return found


def read_behind(
    pipeline: Settings, topic: str, backoff: Backoff, release: Callable[[], None], admin: Topics | None = None
) -> PipelineState:
    """Read the state after a producer's initialisation, waiting out outages.

    :param release: ends what an outage has left open for ever under the id that was initialised: the next commit would
        include it. It is called before each reading.
    :param admin: the caller's admin client, if it has one.
    :raises StateError: the topic is missing, or a record in it is malformed.
    """
    while True:
        try:
            release()
            return read_state(pipeline, topic, admin, must_exist=True)
        except Outage as error:
            backoff.wait(error)


def reached(pipeline: Settings, topic: str, job: Job) -> Position | None:
    """P, read from the state topic now; None if nothing was streamed yet.

    :raises TakenOver: another job has claimed the slot.
    """
    found = read_state(pipeline, topic)
    check(found, job)
    return found.position


def check(found: PipelineState, job: Job) -> None:
    """Check that the job's claim is still the last one.

    :raises TakenOver: another job has claimed the slot; the message names it.
    :raises StateError: the state has no claim any more.
    """
    claim = found.claim
    if claim is None:
        raise StateError("The state topic lost its records while the job ran.", LOST_STATE)
    if claim.id != job.id:
        raise TakenOver(f"The slot was taken over by {claim}; {job} ends without publishing anything more.")


def _ids(known: Sequence[str], *more: str) -> Ids:
    return Ids(tuple(sorted({*known, *more})))


class ClaimingJob(Protocol):
    """What claims need of the job that this process is.

    :ivar last_claim: the id of the last claim that it has made; empty if there is none.
    """

    @property
    def last_claim(self) -> str: ...

    @property
    def owner(self) -> Owner | None:
        """The task whose job its claims are; None if they are none's."""

    def may_claim(self, name: str) -> bool:
        """Whether neither the job nor the pipeline of this name was asked to stop. It waits until what was requested
        before the job began is known: one that starts late, after it was given up and replaced, must not take the slot
        from the one that replaced it."""

    def claimed(self, job: Job) -> None:
        """Note the job's claim on its slot."""


#: the job that this process is
_job: ClaimingJob | None = None


def work_for(job: ClaimingJob | None) -> None:
    """Make all claims of this process those of a job; None: they are nobody's."""
    global _job
    _job = job


def working_for() -> ClaimingJob | None:
    """The job that this process is; None if it is none."""
    return _job


class Claim:
    """A claim on a slot, made when this is constructed; through it the job writes state records, each group in one
    transaction.

    :param kind: what the job does: create, snapshot, stream, redrive, drop, or why it stops another job.
    :param backoff: waits out outages.
    :raises TakenOver: another job claimed the slot at the same time, or since this process, which is a job, has claimed
        it.
    :raises StateError: the state is another cluster's, or a newer version's, or does not know a slot that has to be
        there, or the pipeline was made with other settings; nothing was changed.
    :raises SlotError: the job would go on with a pipeline of another timeline; nothing was changed.
    :raises StopRequested: this process is a job that was asked to stop before it began.
    """

    def __init__(self, pipeline: Settings, cluster: Cluster, kind: str, backoff: Backoff) -> None:
        self.pipeline, self.cluster = pipeline, cluster
        self.topic = store.state_topic_name(cluster.database, pipeline.slot)
        self.prefix = id_prefix(cluster, pipeline.slot)
        self._backoff = backoff
        self._admin = Topics(pipeline.kafka)
        self._reader: store.Reader | None = None
        #: when the last reading began
        self._read = 0.0
        self._reading = threading.Lock()
        if _job is not None and not _job.may_claim(cluster.pipeline(pipeline.slot)):
            raise StopRequested("The job was asked to stop before it began.")
        needs_slot = kind in _CONTINUING and kind != "create"
        # a topic that is made for a mistyped slot would stay for ever
        ensure_state_topics(pipeline, self.topic, self._admin, new=not needs_slot)
        self._producer = self._make(state_writer_id(self.prefix))
        self._producer.open()
        before = self._claim(kind)
        # it is the job's, although an outage may keep it from working: whoever starts the job again must know it
        if _job is not None:
            _job.claimed(self.job)
        self._initialise_others(before)
        self.state = read_behind(pipeline, self.topic, backoff, lambda: self._release(before), self._admin)
        check(self.state, self.job)
        if needs_slot and self.state.slot is None:
            self.close()
            raise unknown(self.topic, pipeline.slot)
        backoff.over()

    def _release(self, known: PipelineState) -> None:
        """End what an outage has left open under any of the slot's transactional ids, and then initialise them all
        again. A job that publishes looks into all topics of the pipeline, any other one into the state topic."""
        if not known.ids:
            return
        topics = {self.topic}
        if self.job.kind in _PUBLISHING:
            mapping, name = TableMapping.of(self.pipeline), self.cluster.pipeline(self.pipeline.slot)
            topics |= {*pins(known.tables.values()), *mapping.service_topics, *mapping.named_topics}
            # those that records have chosen, too
            for key, record in control_topic.read(self.pipeline.kafka).items():
                owner = decode(OwnerRecord, record)
                if (topic := topic_owned(key, name)) and owner is not None and not owner.dropped:
                    topics.add(topic)
        if release(
            self.pipeline.kafka,
            known.ids,
            {name: topic.partitions for name, topic in self._admin.describe(sorted(topics), hidden=True).items()},
            admin=self._admin,
            transaction_timeout=self.pipeline.transaction_timeout,
            waiting=self._backoff.wait,
        ):
            self._initialise_others(known)
            self._producer.open()

    def _claim(self, kind: str) -> PipelineState:
        """Write the claim; returns the state before it."""
        while True:
            # Uncommitted records are read, too: a job that died with an open transaction would hide the ids until its
            # time-out. This is safe, since ids are only ever added, and what counts is the state read after the
            # initialisations. The topic must exist, even if a broker that has just started does not know it yet: if it
            # were taken for empty, epochs would begin at 1 again and the ids would be forgotten.
            before = PipelineState(
                store.read_records(self.pipeline.kafka, self.topic, committed=False, admin=self._admin, must_exist=True)
            )
            check_cluster(before, self.cluster, self.pipeline.slot)
            # a job claims the slot again when it takes tables in, say: if another one has claimed it since, that one
            # keeps it
            if (ours := _job.last_claim if _job is not None else "") and (
                before.claim is None or before.claim.id != ours
            ):
                raise TakenOver(f"The slot was taken over by {before.claim}; this job does not claim it again.")
            if kind in _CONTINUING:
                before.check()
                if before.slot is not None:
                    check_timeline(before.slot, self.cluster)
            if kind in _PUBLISHING:
                check_settings(self.pipeline, before)
            self.job = Job.next(before.claim, kind, _job.owner if _job is not None else None)
            try:
                self._send({CLAIM: self.job, IDS: _ids(before.ids, state_writer_id(self.prefix))})
                return before
            except NewProducerNeeded as error:
                # fenced by another claim, or the outcome is unknown: the state shows it
                log.warning("Writing the claim: %s", error)
                self._producer.open()
                found = read_state(self.pipeline, self.topic, self._admin, must_exist=True)
                if found.claim is not None and found.claim.epoch >= self.job.epoch:
                    check(found, self.job)
                    return before
                self._backoff.wait(str(error))

    def _make(self, transactional_id: str, *topics: str) -> TransactionalProducer:
        return TransactionalProducer(
            self.pipeline.kafka,
            transactional_id,
            topics or [self.topic],
            transaction_timeout=self.pipeline.transaction_timeout,
            waiting=self._backoff.wait,
        )

    def _initialise_others(self, known: PipelineState) -> None:
        """End the open transactions of all producers that used one of the recorded ids, and fence those producers; but
        for the id that the state itself is written under, which is this claim's own."""

        def one(transactional_id: str) -> None:
            producer = self._make(transactional_id)
            producer.open()
            producer.close()

        with ThreadPoolExecutor(max_workers=8) as pool:
            list(pool.map(one, [i for i in known.ids if i != state_writer_id(self.prefix)]))

    def initialise_all(self) -> None:
        """Initialise all other recorded ids once more, when the work is done, and check the claim: after this, no open
        transaction of an earlier producer can become visible.

        :raises TakenOver: another job has claimed the slot.
        """
        self._initialise_others(self.state)
        self._release(self.state)
        self.refresh()

    def refresh(self) -> PipelineState:
        """Read the state again.

        :raises TakenOver: another job has claimed the slot.
        """
        self.state = PipelineState(self._read_on())
        check(self.state, self.job)
        return self.state

    def _read_on(self) -> store.RawRecords:
        """The records up to the topic's present end. The reader is kept between calls, since a driver calls this every
        two seconds; a stream, only after errors."""
        end, began = self._admin.ends(self.topic, 1)[0], time.monotonic()
        with self._reading:
            if self._reader is not None and (end < self._reader.at or began - self._read > store.READ_ON):
                # the topic was deleted and created again, so that its offsets begin anew; or it was not read for so
                # long that compaction may have removed tombstones that are new here
                self._leave()
            if self._reader is None:
                self._reader = store.Reader(self.pipeline.kafka, self.topic)
            try:
                found = dict(self._reader.read_to(end, timeout=self.pipeline.transaction_timeout + 30))
                self._read = began
                return found
            except BaseException:
                self._leave()
                raise

    def _leave(self) -> None:
        if self._reader is not None:
            self._reader.close()
        self._reader = None

    def record_ids(self, ids: Sequence[str]) -> None:
        """Record ids before their first use, so that the next job finds and initialises them."""
        if missing := set(ids) - set(self.state.ids):
            self.write({IDS: _ids(self.state.ids, *missing)})

    def write(self, values: Mapping[str, StateRecord | None]) -> None:
        """Write records in one transaction, and repeat it until it is known to be committed; None writes a tombstone.

        :raises TakenOver: another job has claimed the slot.
        :raises Refused: the broker refuses a record for good.
        """
        while True:
            try:
                self._send(values)
                break
            except NewProducerNeeded as error:
                log.warning("Writing records: %s", error)
                self._backoff.wait(error)
                self._producer.open()
                self.refresh()
        self._backoff.over()
        self.state.apply(values)

    def publish(self, transactional_id: str, messages: Sequence[Message]) -> None:
        """Publish records under an id that nobody uses, in one transaction; if its outcome is unknown, they come twice.

        :raises TakenOver: another job has claimed the slot.
        :raises Refused: the broker refuses a record for good.
        """
        self.record_ids([transactional_id])
        producer = self._make(transactional_id, *{message.topic for message in messages})
        while True:
            try:
                producer.open()
                self.refresh()
                producer.send(messages)
                break
            except NewProducerNeeded as error:
                self._backoff.wait(error)
            finally:
                producer.close()
        self._backoff.over()

    def _send(self, values: Mapping[str, StateRecord | None]) -> None:
        self._producer.send(
            [
                Message(self.topic, key.encode(), store.encode(encode(value) if value else None))
                for key, value in values.items()
            ]
        )

    def close(self) -> None:
        """Close the producer and the reader; the claim remains in the state. A reader that another thread still uses,
        whose result nobody waits for any more, is left to it."""
        self._producer.close()
        if self._reading.acquire(blocking=False):
            self._leave()
            self._reading.release()
