"""Publishing: a batch of the stream, or a range of a snapshot, is one Kafka transaction with its record of progress, last.

Both need the same care: initialise, read the state, then work; an unknown outcome is told by the state, never guessed.
"""

from __future__ import annotations

import json
import logging
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from airflow_bottledwater.backoff import Backoff
from airflow_bottledwater.encoding import kernels, names, wire
from airflow_bottledwater.encoding.program import Programs, Target, compile_programs
from airflow_bottledwater.errors import CredentialsRefused, Outage, RecordError, Refused, StaleBatch
from airflow_bottledwater.kafka import deadletter
from airflow_bottledwater.kafka.errors import NewProducerNeeded, RecordRefused
from airflow_bottledwater.kafka.hanging import release
from airflow_bottledwater.kafka.publisher import RECORD_OVERHEAD, Publisher, Records, single
from airflow_bottledwater.kafka.topics import DEFAULT_MAX_BYTES, GRANT, Topics
from airflow_bottledwater.model.lsn import Position
from airflow_bottledwater.model.version import Version
from airflow_bottledwater.postgres import pgoutput
from airflow_bottledwater.postgres.catalog import load
from airflow_bottledwater.postgres.connect import session
from airflow_bottledwater.publish.batch import Batch
from airflow_bottledwater.publish.toast import Completed, Completer, column_texts
from airflow_bottledwater.publish.warm import warm_up
from airflow_bottledwater.settings import Pipeline
from airflow_bottledwater.state import store
from airflow_bottledwater.state.claim import check, read_behind
from airflow_bottledwater.state.identity import check_topic
from airflow_bottledwater.state.records import POSITION, Job, Pin, PipelineState, stream_id

log = logging.getLogger(__name__)


#: bytes of a record without a topic's limit: librdkafka's message.max.bytes at most
LARGEST = 1_000_000_000
#: seconds after which a channel looks at its topics again while its producer is at work
_LOOK_AGAIN = 30.0
#: https://kafka.apache.org/protocol#protocol_error_codes
_MSG_SIZE_TOO_LARGE, _TOPIC_AUTHORIZATION_FAILED, _INVALID_TIMESTAMP = 10, 29, 32
#: UNKNOWN_TOPIC_OR_PARTITION and librdkafka's own _UNKNOWN_TOPIC, INVALID_TOPIC_EXCEPTION
_OF_A_TOPIC = (3, -188, 17)


@dataclass(frozen=True, slots=True)
class Verdict:
    """A change (or a row of a snapshot's block) that cannot be published, and why.

    :param code: of :mod:`~airflow_bottledwater.encoding.wire`, where a kernel says so.
    """

    change: int
    reason: str
    code: int = 0


@dataclass(slots=True)
class Encoded:
    """An encoded batch: its records, and what could not be."""

    records: Records
    verdicts: list[Verdict] = field(default_factory=list)


class Channel:
    """An open way into Kafka for one transactional id: topics by index, limits, and the claim checked at every opening.

    :param job: whose claim must stand.
    :param topics: data topics as they were pinned; the service and state topics come behind them.
    :raises StateError: a topic is missing, or is no longer the one that was pinned.
    """

    def __init__(
        self,
        pipeline: Pipeline,
        job: Job,
        transactional_id: str,
        topics: Mapping[str, Pin],
        state_topic: str,
        backoff: Backoff,
    ) -> None:
        self.pipeline, self.job, self.backoff = pipeline, job, backoff
        self.state_topic = state_topic
        self._id, self._pins = transactional_id, dict(topics)
        service = [
            names.service_topic("events", pipeline.topic_prefix),
            names.service_topic("dead_letters", pipeline.topic_prefix),
        ]
        self._names = [*sorted(self._pins), *service, state_topic]
        self.index = {name: i for i, name in enumerate(self._names)}
        self.events, self.letters, self._state = (self.index[name] for name in (*service, state_topic))
        self._admin = Topics(pipeline.kafka)
        self.partitions: dict[str, int] = {}
        self.limits: npt.NDArray[np.int64] = np.zeros(len(self._names), dtype=np.int64)
        self._largest_batch = 1_000_000
        self._publisher: Publisher | None = None
        self._looked = 0.0
        self._look()

    def _look(self) -> bool:
        """Ask the broker for the topics; returns whether their limits are others than at the last look.

        :raises StateError: a topic is missing, or is no longer the one that was pinned.
        """
        while True:
            try:
                described = self._admin.describe(self._names, confirm=True)
                break
            except (Outage, CredentialsRefused) as error:
                self.backoff.wait(error)
        for name in self._names:
            check_topic(name, described.get(name), self._pins.get(name))
        before = self.limits
        self.limits = np.array([described[n].max_bytes for n in self._names], dtype=np.int64)
        self.partitions = {name: topic.partitions for name, topic in described.items()}
        self._looked = time.monotonic()
        return not np.array_equal(before, self.limits)

    def _make(self, *, alone: bool) -> Publisher:
        return Publisher(
            {
                **self.pipeline.kafka,
                **({"batch.num.messages": "1", "linger.ms": "0"} if alone else {}),
                "message.max.bytes": str(min(LARGEST, max(DEFAULT_MAX_BYTES, self.most))),
                # a batch must fit the smallest topic: the broker refuses a whole one
                "batch.size": str(max(1, min(self._largest_batch, int(self.limits.min() * 0.9)))),
            },
            self._id,
            self._names,
            transaction_timeout=self.pipeline.transaction_timeout,
            waiting=self.backoff.wait,
        )

    def open(self, *, alone: bool = False) -> PipelineState | None:
        """Initialise if need be, and then read the state; None if it was open already.

        The topics are looked at whenever a producer is made, and now and then while one is at work: a topic that was deleted and
        made anew takes records without a word.

        :param alone: each record is sent in a batch of its own.
        :raises TakenOver: another job has claimed the slot.
        :raises StateError: a topic is missing, or is no longer the one that was pinned.
        """
        if time.monotonic() - self._looked > (0.0 if self._publisher is None else _LOOK_AGAIN) and self._look():
            self.close()
        if self._publisher is not None:
            return None
        publisher = self._make(alone=alone)
        try:
            try:
                publisher.open()
            except Refused:
                # a topic that went between the look and the producer's own question
                self._look()
                raise
            found = read_behind(
                self.pipeline,
                self.state_topic,
                self.backoff,
                lambda: release(self.pipeline.kafka, publisher, self._names),
                self._admin,
            )
            check(found, self.job)
        except BaseException:
            publisher.close()
            raise
        self._publisher = publisher
        return found

    def close(self) -> None:
        """Give the producer up; the next :meth:`open` makes a new one."""
        if self._publisher is not None:
            self._publisher.close()
        self._publisher = None

    def too_large(self, records: Records) -> npt.NDArray[np.bool_]:
        """Which records exceed their topic's max.message.bytes."""
        found: npt.NDArray[np.bool_] = records.sizes() > self.limits[records.table[:, wire.R_TOPIC]]
        return found

    @property
    def most(self) -> int:
        """Bytes of the largest record that any of the topics takes."""
        return int(self.limits.max())

    @property
    def letter_limit(self) -> int:
        """Bytes of a dead letter that its topic takes."""
        return int(self.limits[self.letters]) - RECORD_OVERHEAD - 64

    def programs(self, versions: Sequence[Version], *, copied: bool) -> Programs:
        """Programs for relation versions."""
        return compile_programs(
            [
                (v.table, Target(self.index[v.topic], self.partitions[v.topic], v.key_schema, v.value_schema))
                for v in versions
            ],
            self.pipeline.output_format,
            copied=copied,
        )

    def progress(self, facts: Mapping[str, dict[str, object]]) -> list[Records]:
        """Facts as records of the state topic."""
        return [single(self._state, 0, key.encode(), store.encode(value)) for key, value in facts.items()]

    def send(self, parts: Callable[[Publisher], None], progress: Mapping[str, dict[str, object]]) -> None:
        """One Kafka transaction: what ``parts`` produces, and last the record of progress."""
        assert self._publisher is not None, "open() comes first"
        try:
            with self._publisher.transaction():
                parts(self._publisher)
                for record in self.progress(progress):
                    self._publisher.produce(record)
        except BaseException:
            # after an abort a delayed request of it could still enter the producer's next transaction
            self.close()
            raise
        self.backoff.over()

    def refusal(self, records: Sequence[Records]) -> RecordRefused | None:
        """What the broker refuses of these records: sent one by one, each in a batch of its own, in a transaction that is then
        aborted.

        :raises NewProducerNeeded: whether it does is not known.
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

    def explain(self, error: RecordRefused, service: Sequence[Records]) -> None:
        """Raise what a refusal means where no row has a fault; return where one may have.

        :param service: what we say ourselves in the same transaction: events, dead letters, progress.
        :raises NewProducerNeeded: the limits are others now: the same again, under these.
        :raises StateError: a topic is gone.
        :raises Refused: it will not pass by trying again.
        """
        self.close()
        if self._look():
            raise NewProducerNeeded(f"{error.what} The limits of the topics were changed since the last look")
        if error.code in _OF_A_TOPIC:
            raise NewProducerNeeded(f"{error.what} The topic exists")
        if error.code == _TOPIC_AUTHORIZATION_FAILED:
            raise Refused(f"{error.what} Kafka denies Write on one of the topics {', '.join(self._names)}.", GRANT)
        _check_time(error)
        if self.refusal(service) is not None:
            raise Refused(
                f"The service topics do not take records: {error.what}",
                f"Mend the settings or rights of {', '.join(self._names[self.events :])}, then start again; no row has a fault.",
            )

    def smaller_batches(self, size: int) -> None:
        """Records are refused in company that are taken one by one: the limit is one that we may not read.

        :param size: bytes of these records.
        :raises Refused: batches are as small as they can be.
        """
        self._largest_batch = min(self._largest_batch, size) // 2
        if self._largest_batch < 1000:
            raise Refused(
                "Kafka refuses records together that it takes one by one, however few they are.",
                "See the broker's log for what it refuses.",
            )


def _check_time(error: RecordRefused) -> None:
    """:raises Refused: the broker refuses a record for its time."""
    if error.code == _INVALID_TIMESTAMP:
        raise Refused(
            f"{error.what} The time of a record is too far from the broker's.",
            "Compare the clocks of this host, of PostgreSQL and of the brokers, and see the topics' message.timestamp.after.max.ms and "
            "message.timestamp.before.max.ms; then start again.",
        )


def find_refused(channel: Channel, records: Records) -> dict[int, str]:
    """The records that the broker refuses, by their number, and why: each is refused in a batch of its own, and the others are
    taken without them. (Sent together, the broker refuses a whole batch for one record.)

    :raises NewProducerNeeded: whether there are any is not known.
    :raises Refused: a topic takes no record at all, so that none of them has a fault.
    """
    left: npt.NDArray[np.int64] = np.arange(len(records))

    def refusal(numbers: npt.NDArray[np.int64]) -> RecordRefused | None:
        return channel.refusal([Records(records.table[numbers], records.data, records.headers)])

    found: dict[int, str] = {}
    while len(left) and (error := refusal(left)) is not None:
        _check_time(error)  # sent together, the code is another
        culprit = int(left[error.record])
        left = np.delete(left, error.record)
        if error.code != _MSG_SIZE_TOO_LARGE:
            topic = records.table[culprit, wire.R_TOPIC]
            others = left[records.table[left, wire.R_TOPIC] == topic]
            if len(others) and refusal(others[np.argsort(records.sizes()[others], kind="stable")[:1]]) is not None:
                name = next(n for n, i in channel.index.items() if i == topic)
                raise Refused(
                    f"{error.what} Topic {name!r} refuses every record, so no row has a fault.",
                    "Mend the topic's settings, or what checks its records in the broker; then start again.",
                )
        found[culprit] = error.what
    return found


class StreamPublisher:
    """Publishes the stream's batches, each with P, under the stream's id.

    :param job: the claimed job.
    :param fingerprint: stored with P (:func:`airflow_bottledwater.stream.engine.fingerprint`).
    """

    def __init__(
        self,
        pipeline: Pipeline,
        job: Job,
        prefix: str,
        state_topic: str,
        topics: Mapping[str, Pin],
        backoff: Backoff,
        fingerprint: str,
    ) -> None:
        self._pipeline = pipeline
        self._fingerprint = fingerprint
        warm_up()  # not while a transaction is open
        self._channel = Channel(pipeline, job, stream_id(prefix), topics, state_topic, backoff)
        self._completer = Completer(pipeline.postgres, backoff.wait)
        self._position: Position | None = None
        self.counters: dict[str, int] = {}

    def close(self) -> None:
        """Give up producer and connection."""
        self._channel.close()
        self._completer.close()

    def reached(self) -> Position | None:
        """P, read behind an initialisation: nothing that an earlier attempt left under way can move it any more.

        :raises TakenOver: another job has claimed the slot.
        """
        while True:
            try:
                self._open()
                return self._position
            except NewProducerNeeded as error:
                self._channel.close()
                self._channel.backoff.wait(str(error))

    def _open(self) -> None:
        found = self._channel.open()
        if found is not None:
            self._position, self.counters = found.position, found.counters

    def publish(self, batch: Batch) -> Position:
        """Publish a batch, or find that it was; returns P.

        :raises TakenOver: another job has claimed the slot.
        :raises StaleBatch: P is neither the batch's start nor its end.
        :raises RecordError: under ``on_error = exit``, after everything before the bad transaction was published.
        """
        refused: dict[Position, str] = {}
        while True:
            try:
                self._open()
                if self._position is not None and self._position >= batch.end and batch.end > batch.start:
                    return self._position
                if self._position is not None and self._position != batch.start:
                    # between two of its transactions: the good ones before a bad one were committed, and no answer said so
                    rest = batch.after(self._position)
                    if rest is None:
                        raise StaleBatch(f"The batch starts at {batch.start}, but the stream is at {self._position}.")
                    batch = rest
                return self._publish(batch, refused)
            except NewProducerNeeded as error:
                log.warning("%s: a new producer reads the state and goes on.", error)
                self._channel.close()
                self._channel.backoff.wait(str(error))

    def _publish(self, batch: Batch, refused: dict[Position, str]) -> Position:
        """:param refused: changes that the broker is known to refuse, by their position, and why; more are added."""
        if self._pipeline.on_truncate == "stop":
            self._stop_before_truncate(batch, refused)
        programs = self._channel.programs(batch.versions, copied=False)
        completed = self._completer.complete(batch, programs)
        headers = wire.HEADERS | (wire.HEADER_XID if self._pipeline.xid_header else 0)
        encoded = encode_changes(completed, programs, headers=headers, most=self._channel.most)
        records, verdicts = encoded.records, [*_failed(completed), *encoded.verdicts]
        verdicts += [
            Verdict(i, refused[at])
            for i, change in enumerate(completed.batch.changes if refused else ())
            if (at := _position(change)) in refused
        ]
        self._check_definitions(completed.batch, programs, encoded.verdicts)
        verdicts += _without_schema(completed.batch, records)
        for i in np.flatnonzero(self._channel.too_large(records)):
            verdicts.append(Verdict(int(records.table[i, wire.R_MESSAGE]), _too_large(records, int(i), self._channel)))
        if self._pipeline.on_error == "exit" and (
            stopping := [v for v in verdicts if not self._skips(completed.batch.changes[v.change])]
        ):
            self._stop_before(batch, completed, programs, stopping, refused)
        bad = {v.change for v in verdicts}
        if bad:
            kept = ~np.isin(records.table[:, wire.R_MESSAGE], np.array(sorted(bad)))
            records = Records(records.table[kept], records.data, records.headers)
        letters = [self._letter(completed, programs, v) for v in _distinct(verdicts)]
        events = self._events(completed.batch, batch.versions)
        counters = {
            "published": self.counters.get("published", 0) + len(records),
            "dead_letters": self.counters.get("dead_letters", 0) + len(letters),
            "superseded": self.counters.get("superseded", 0) + len(completed.superseded),
            "events": self.counters.get("events", 0) + len(events),
        }
        position = {
            "lsn": batch.end.lsn,
            "ordinal": batch.end.ordinal,
            "fingerprint": self._fingerprint,
            "epoch": self._channel.job.epoch,
            "at": time.time(),
            **counters,
        }

        def parts(publisher: Publisher) -> None:
            publisher.produce(records)
            for record in (*events, *letters):
                publisher.produce(record)

        try:
            self._channel.send(parts, {POSITION: position})
        except RecordRefused as error:
            service = [*events, *letters, *self._channel.progress({POSITION: position})]
            self._channel.explain(error, service)
            found = find_refused(self._channel, records)
            for number, why in found.items():
                refused[_position(completed.batch.changes[records.table[number, wire.R_MESSAGE]])] = why
            if not found:
                self._channel.smaller_batches(int(records.sizes().sum()))
            raise NewProducerNeeded(error.what) from error
        self._position, self.counters = batch.end, counters
        return batch.end

    def _check_definitions(self, batch: Batch, programs: Programs, verdicts: Sequence[Verdict]) -> None:
        """Types change without a word in the stream. Where the catalog now says what would explain a value that does not fit, the
        job has to read it anew, as it does at its start.

        :raises Outage: so that it is started again.
        """
        for relation in {int(batch.changes[v.change, wire.C_RELATION]) for v in verdicts if v.code == wire.CHANGED}:
            table = programs.tables[relation]
            with session(self._pipeline.postgres, f"Reading the columns of {table.qualified}") as connection:
                today = {
                    c.name: c for t in load(connection, [table.oid], forms=self._pipeline.forms) for c in t.columns
                }
            if any((c.type, c.required) != (n.type, n.required) for c in table.columns if (n := today.get(c.name))):
                raise Outage(
                    f"A column's type in {table.qualified} was altered while the stream ran.",
                    "Start the stream again: it reads the new definition (Airflow does so by itself).",
                )

    def _skips(self, change: npt.NDArray[np.int64]) -> bool:
        """Whether a person has decided to go on over this one change."""
        return str(_position(change)) == self._pipeline.skip_position.upper()

    def _stop_before_truncate(self, batch: Batch, refused: dict[Position, str]) -> None:
        truncates = batch.changes[batch.changes[:, wire.C_KIND] == pgoutput.TRUNCATE]
        change = next((c for c in truncates if not self._skips(c)), None)
        if change is None:
            return
        position = _position(change)
        good = batch.before(position.lsn)
        if good.end > batch.start:
            self._publish(good, refused)
        raise RecordError(
            f"TRUNCATE of {batch.versions[int(change[wire.C_RELATION])].table.qualified} at {position}, and on_truncate is stop.",
            f"Everything before its transaction is published. Set on_truncate to event to go on, or skip_position to {position} to "
            "let this one pass.",
            position=str(position),
        )

    def _stop_before(
        self,
        batch: Batch,
        completed: Completed,
        programs: Programs,
        verdicts: list[Verdict],
        refused: dict[Position, str],
    ) -> None:
        first = min(verdicts, key=lambda v: v.change)
        change = completed.batch.changes[first.change]
        good = batch.before(int(change[wire.C_LSN]))
        position = _position(change)
        if good.end > batch.start and batch.start.lsn < position.lsn:
            self._publish(good, refused)
        table = programs.tables[int(change[wire.C_RELATION])]
        topic = batch.versions[int(change[wire.C_RELATION])].topic
        raise RecordError(
            f"The change of {table.qualified} at {position} cannot be published to topic {topic!r}: {first.reason}.",
            "Everything before its transaction is published. Mend the cause and start again; or go on with on_error = log, which "
            f"writes it to the dead-letter topic; or with skip_position = {position}, which does so with this change alone.",
            position=str(position),
            topic=topic,
        )

    def _letter(self, completed: Completed, programs: Programs, verdict: Verdict) -> Records:
        change = completed.batch.changes[verdict.change]
        relation = int(change[wire.C_RELATION])
        table = programs.tables[relation]
        version = completed.batch.versions[relation]
        at, size = int(change[wire.C_OFFSET]), int(change[wire.C_LENGTH])
        position = str(_position(change))
        message = bytes(completed.batch.data[at : at + size])
        value = deadletter.letter(
            topic=version.topic,
            op={pgoutput.INSERT: "c", pgoutput.UPDATE: "u", pgoutput.DELETE: "d"}[int(change[wire.C_KIND])],
            position=position,
            relation=table.qualified,
            key=table.key,
            columns=column_texts(table, message),
            error=verdict.reason,
            again={**version.to_json(), "xid": int(change[wire.C_XID]), "time": int(change[wire.C_TIME])},
            message=message,
            limit=self._channel.letter_limit,
        )
        log.error("Dead letter for %s at %s: %s", table.qualified, position, verdict.reason)
        return single(self._channel.letters, 0, position.encode(), value)

    def _events(self, batch: Batch, versions: Sequence[Version]) -> list[Records]:
        found = []
        for i in np.flatnonzero(batch.changes[:, wire.C_KIND] == pgoutput.TRUNCATE):
            change = batch.changes[i]
            at, size = int(change[wire.C_OFFSET]), int(change[wire.C_LENGTH])
            message = pgoutput.truncate(bytes(batch.data[at : at + size]))
            known = {v.table.oid: v for v in versions}
            position = str(_position(change))
            event = {
                "event": "truncate",
                "pos": position,
                "xid": int(change[wire.C_XID]),
                "relations": [known[oid].table.qualified if oid in known else oid for oid in message.oids],
                "topics": [known[oid].topic for oid in message.oids if oid in known],
                "cascade": message.cascade,
                "restart_identity": message.restart_identity,
            }
            found.append(
                single(self._channel.events, 0, position.encode(), json.dumps(event).encode(), int(change[wire.C_TIME]))
            )
        return found


def _position(change: npt.NDArray[np.int64]) -> Position:
    """What names a change however often its batch is cut, completed and encoded."""
    return Position(int(change[wire.C_LSN]), int(change[wire.C_ORDINAL]))


def _distinct(verdicts: list[Verdict]) -> list[Verdict]:
    """The first reason of each change: what completed it knows better than a kernel that found it incomplete."""
    first: dict[int, Verdict] = {}
    for verdict in verdicts:
        first.setdefault(verdict.change, verdict)
    return [first[change] for change in sorted(first)]


def _failed(completed: Completed) -> list[Verdict]:
    return [Verdict(change, reason) for change, reason in completed.failed.items()]


def _without_schema(batch: Batch, records: Records) -> list[Verdict]:
    """The rows whose columns the registry refuses; a delete needs a key only."""
    reasons = {i: v.refused for i, v in enumerate(batch.versions) if v.refused}
    if not reasons:
        return []
    rows = records.table[records.table[:, wire.R_VALUE_LEN] >= 0, wire.R_MESSAGE]
    relations = batch.changes[rows, wire.C_RELATION]
    return [
        Verdict(int(row), reasons[int(relation)])
        for row, relation in zip(rows, relations, strict=True)
        if int(relation) in reasons
    ]


def _too_large(records: Records, i: int, channel: Channel) -> str:
    size = int(records.sizes()[i])
    limit = int(channel.limits[records.table[i, wire.R_TOPIC]])
    return f"the record has {size:,} bytes, the topic's max.message.bytes is {limit:,}"


def encode_changes(
    completed: Completed, programs: Programs, *, headers: int = wire.HEADERS, most: int = LARGEST
) -> Encoded:
    """Encode a whole batch into one buffer.

    :param headers: see :class:`Records`.
    :param most: bytes of the largest record that any of the topics takes: no more room is made for a single change than that takes.
    """
    batch = completed.batch
    out: npt.NDArray[np.uint8] = np.empty(2 * batch.data.size + 64 * 1024, dtype=np.uint8)
    records: npt.NDArray[np.int64] = np.zeros((2 * len(batch) + 2, wire.RECORD_WIDTH), dtype=np.int64)
    errors: npt.NDArray[np.int64] = np.zeros((1024, wire.ERROR_WIDTH), dtype=np.int64)
    scratch = programs.scratch()
    start = cursor = used = count = 0
    verdicts: list[Verdict] = []
    while start < len(batch):
        start, cursor, size, made, failed = kernels.encode_changes(
            batch.data, batch.changes, start, len(batch), programs.json, programs.relations, programs.columns, programs.keys,
            programs.names, completed.side, completed.side_offsets, cursor, scratch, records[count:], errors, out[used:],
        )  # fmt: skip
        records[count : count + made, wire.R_KEY] += used
        records[count : count + made, wire.R_VALUE] += used
        for change, code, column, offset in errors[:failed].tolist():
            reason = programs.error(int(batch.changes[change, wire.C_RELATION]), code, column, offset)
            verdicts.append(Verdict(change, reason, code))
        used += size
        count += made
        if start == len(batch) or failed == len(errors):
            continue
        if not made and not failed and out.size - used > room_for(most):
            verdicts.append(Verdict(start, too_large(most)))
            cursor += kernels.find_conversions(
                batch.data, batch.changes[start : start + 1], 1, programs.relations, programs.columns, programs.keys, scratch,
                np.zeros((0, 4), dtype=np.int64),
            )  # fmt: skip
            start += 1
        else:
            out = np.concatenate([out, np.empty(min(out.size, room_for(most)), dtype=np.uint8)])
    return Encoded(Records(records[:count], out, headers), verdicts)


def room_for(most: int) -> int:
    """What a change's old key, new key and row can take, each as large as a record may be, and what kernels keep free."""
    return 3 * most + 64 * 1024


def too_large(most: int) -> str:
    """Why a row is not even encoded to its end."""
    return f"the record has more than {most:,} bytes, which is the largest max.message.bytes of the pipeline's topics"
