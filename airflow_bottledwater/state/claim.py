"""Who may work on a slot. A transactional id fences, it does not elect: the *last* to initialise wins, not the newest job.

So a job (1) writes its claim, (2) initialises every id that is recorded, (3) reads the state to its end, (4) works; and
every later initialisation, in a task or after an error, is again followed by that read before its first record.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor

from airflow_bottledwater.backoff import Backoff
from airflow_bottledwater.encoding import names
from airflow_bottledwater.errors import LOST_STATE, Outage, StateError, TakenOver
from airflow_bottledwater.kafka.errors import NewProducerNeeded
from airflow_bottledwater.kafka.hanging import release
from airflow_bottledwater.kafka.producer import Message, TransactionalProducer
from airflow_bottledwater.kafka.topics import Topics
from airflow_bottledwater.model.job import Job
from airflow_bottledwater.model.lsn import Position
from airflow_bottledwater.model.slot import Cluster
from airflow_bottledwater.settings import Pipeline
from airflow_bottledwater.state import store
from airflow_bottledwater.state.identity import check_cluster
from airflow_bottledwater.state.pipeline_state import PipelineState
from airflow_bottledwater.state.records import CLAIM, IDS, Ids, StateRecord, encode, id_prefix, state_writer_id

log = logging.getLogger(__name__)


def ensure_state_topics(pipeline: Pipeline, topic: str, topics: Topics) -> None:
    """Create the shared and the slot's state topic where they are missing.

    :raises StateError: one is missing and may not be created, or is one that forgets.
    """
    present = topics.describe([store.CONTROL_TOPIC, topic])
    replication = min(pipeline.replication_factor, topics.brokers())
    for name in (store.CONTROL_TOPIC, topic):
        if name not in present:
            if not pipeline.create_topics:
                raise StateError(
                    f"Topic {name!r} is missing and create_topics is off.", "Create it: one partition, compacted."
                )
            topics.make(store.new_topic(name, replication))
        elif problem := store.unfit(present[name]):
            raise StateError(problem)


def read_state(
    pipeline: Pipeline, topic: str, admin: Topics | None = None, *, must_exist: bool = False
) -> PipelineState:
    """All records, to the topic's end; an open transaction in it ends with its producer's time-out at the latest.

    :param admin: the caller's client, where it has one.
    :param must_exist: the topic was there before; else one that is missing has no records.
    :raises Outage: they cannot be read, or a transaction stays open.
    :raises StateError: the topic is gone that was there.
    """
    timeout = pipeline.transaction_timeout + 30
    return PipelineState(store.read_records(pipeline.kafka, topic, timeout=timeout, admin=admin, must_exist=must_exist))


def read_behind(
    pipeline: Pipeline, topic: str, backoff: Backoff, release: Callable[[], None], admin: Topics | None = None
) -> PipelineState:
    """The state behind an initialisation, waited for.

    :param release: ends what an outage has left open for ever.
    :param admin: the caller's client, where it has one.
    :raises StateError: the topic is gone.
    """
    while True:
        try:
            return read_state(pipeline, topic, admin, must_exist=True)
        except Outage as error:
            backoff.wait(error)
            release()


def reached(pipeline: Pipeline, topic: str, job: Job) -> Position | None:
    """P as the state has it now.

    :raises TakenOver: another job has claimed the slot.
    """
    found = read_state(pipeline, topic)
    check(found, job)
    return found.position


def check(found: PipelineState, job: Job) -> None:
    """Whether the job's claim still stands.

    :raises TakenOver: it does not; the message names who has it.
    """
    claim = found.claim
    if claim is None:
        raise StateError("The state topic lost its records while the job ran.", LOST_STATE)
    if claim.id != job.id:
        raise TakenOver(f"The slot was taken over by {claim}; {job} ends without publishing anything more.")


def _ids(known: Sequence[str], *more: str) -> Ids:
    return Ids(tuple(sorted({*known, *more})))


class Claim:
    """A claimed slot: writes records, each group in one transaction.

    :param kind: what the job does: create, snapshot, stream or drop.
    :raises TakenOver: another job claimed the slot at the same time.
    :raises StateError: the state is another cluster's; nothing was changed.
    """

    def __init__(self, pipeline: Pipeline, cluster: Cluster, kind: str, backoff: Backoff) -> None:
        self.pipeline, self.cluster = pipeline, cluster
        self.topic = store.state_topic_name(cluster.database, pipeline.slot)
        self.prefix = id_prefix(cluster, pipeline.slot)
        self._backoff = backoff
        self._admin = Topics(pipeline.kafka)
        self._reader: store.Reader | None = None
        ensure_state_topics(pipeline, self.topic, self._admin)
        self._producer = self._make(state_writer_id(self.prefix))
        self._producer.open()
        before = self._claim(kind)
        self._initialise([i for i in before.ids if i != state_writer_id(self.prefix)])
        self.state = read_behind(pipeline, self.topic, backoff, lambda: self._release(before), self._admin)
        check(self.state, self.job)
        backoff.over()

    def _release(self, known: PipelineState) -> None:
        """For all ids, in all topics: a commit of theirs must not take along what an outage has left open."""
        service = [names.service_topic(kind, self.pipeline.topic_prefix) for kind in ("events", "dead_letters")]
        topics = [self.topic, *sorted({t.topic for t in known.tables.values()}), *service]
        for transactional_id in known.ids:
            release(
                self.pipeline.kafka,
                transactional_id,
                topics,
                transaction_timeout=self.pipeline.transaction_timeout,
                waiting=self._backoff.wait,
            )
        self._initialise([i for i in known.ids if i != state_writer_id(self.prefix)])
        self._producer.open()

    def _claim(self, kind: str) -> PipelineState:
        """Write the claim; returns the state before it."""
        while True:
            # uncommitted: who died with its position written but not committed would hide the ids until its time-out; they
            # only ever become more, and only what is read behind the initialisations decides
            # The topic is there, whatever a broker says that has just started: taken for empty, the epoch would begin anew and
            # the ids be forgotten.
            before = PipelineState(
                store.read_records(self.pipeline.kafka, self.topic, committed=False, admin=self._admin, must_exist=True)
            )
            check_cluster(before, self.cluster, self.topic)
            self.job = Job.next(before.claim, kind)
            try:
                self._send({CLAIM: self.job, IDS: _ids(before.ids, state_writer_id(self.prefix))})
                return before
            except NewProducerNeeded as error:
                # fenced by another claim, or an outcome that only the state can tell
                log.warning("Writing the claim: %s", error)
                self._producer.open()
                found = read_state(self.pipeline, self.topic, self._admin, must_exist=True)
                if found.claim is not None and found.claim.epoch >= self.job.epoch:
                    check(found, self.job)
                    return before
                self._backoff.wait(str(error))

    def _make(self, transactional_id: str) -> TransactionalProducer:
        return TransactionalProducer(
            self.pipeline.kafka,
            transactional_id,
            [self.topic],
            transaction_timeout=self.pipeline.transaction_timeout,
            waiting=self._backoff.wait,
        )

    def _initialise(self, ids: Sequence[str]) -> None:
        """End the open transaction of everybody who used one of these ids, and fence them."""

        def one(transactional_id: str) -> None:
            producer = self._make(transactional_id)
            producer.open()
            producer.close()

        with ThreadPoolExecutor(max_workers=8) as pool:
            list(pool.map(one, ids))

    def initialise_all(self) -> None:
        """Once more, when the work is done: nothing that is still under way can become visible after it."""
        self._initialise([i for i in self.state.ids if i != state_writer_id(self.prefix)])
        self.refresh()

    def refresh(self) -> PipelineState:
        """Read the state again.

        :raises TakenOver: it is no longer ours.
        """
        self.state = PipelineState(self._read_on())
        check(self.state, self.job)
        return self.state

    def _read_on(self) -> store.RawRecords:
        """The records up to the topic's present end, with one reader for as long as it works: a driver asks every two seconds."""
        end = self._admin.ends(self.topic, 1)[0]
        if self._reader is not None and end < self._reader.at:
            # another topic of this name
            self._leave()
        if self._reader is None:
            self._reader = store.Reader(self.pipeline.kafka, self.topic)
        try:
            return dict(self._reader.read_to(end, timeout=self.pipeline.transaction_timeout + 30))
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
        """Write records in one transaction; repeated until it is known to be there.

        :raises TakenOver: another job has claimed the slot.
        """
        while True:
            try:
                self._send(values)
                break
            except NewProducerNeeded as error:
                log.warning("Writing records: %s", error)
                self._producer.open()
                self.refresh()
        self._backoff.over()
        self.state.apply(values)

    def _send(self, values: Mapping[str, StateRecord | None]) -> None:
        self._producer.send(
            [
                Message(self.topic, key.encode(), store.encode(encode(value) if value else None))
                for key, value in values.items()
            ]
        )

    def close(self) -> None:
        """Let go of the producer and the reader; the claim stays."""
        self._producer.close()
        self._leave()
