"""Publishes the stream's batches: each is one Kafka transaction with the position P, which is its record of progress."""

from __future__ import annotations

import json
import logging
import time
from collections.abc import Iterator
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from airflow_bottledwater.backoff import Backoff
from airflow_bottledwater.encoding import wire
from airflow_bottledwater.encoding.program import Programs
from airflow_bottledwater.errors import RecordError, StaleBatch
from airflow_bottledwater.kafka.errors import NewProducerNeeded, RecordRefused
from airflow_bottledwater.kafka.publisher import Records, single
from airflow_bottledwater.model.lsn import Position
from airflow_bottledwater.postgres import pgoutput
from airflow_bottledwater.publish.batch import Batch
from airflow_bottledwater.publish.dead_letter import DeadLetter
from airflow_bottledwater.publish.encode import encode_changes
from airflow_bottledwater.publish.refusals import find_refused, rule_out
from airflow_bottledwater.publish.reject import Rejection, distinct, oversized, without
from airflow_bottledwater.publish.session import PublishSession
from airflow_bottledwater.publish.toast import Completed, ToastResolver
from airflow_bottledwater.publish.warm import warm_up
from airflow_bottledwater.settings import Pipeline
from airflow_bottledwater.state.records import POSITION, Reached, stream_id
from airflow_bottledwater.stream.relations import check_definitions
from airflow_bottledwater.stream.start import Start

log = logging.getLogger(__name__)

#: what a dead letter calls a change
_OPS = {pgoutput.INSERT: "c", pgoutput.UPDATE: "u", pgoutput.DELETE: "d"}


@dataclass(slots=True)
class _Encoded:
    """A batch that is ready to be published.

    :param records: of all rows, those of rejected ones too.
    """

    batch: Batch
    completed: Completed
    records: Records
    rejections: list[Rejection] = field(default_factory=list)

    def change(self, rejection: Rejection) -> npt.NDArray[np.int64]:
        """The change that is rejected."""
        found: npt.NDArray[np.int64] = self.completed.batch.changes[rejection.row]
        return found


class StreamPublisher:
    """Publishes batches under the stream's transactional id. The position P is that of the session's state, and nowhere else.

    :param start: the claimed stream.
    """

    def __init__(self, pipeline: Pipeline, start: Start, backoff: Backoff) -> None:
        self._pipeline = pipeline
        self._start, self._fingerprint = start, start.fingerprint
        warm_up()  # not while a transaction is open
        self._session = PublishSession(
            pipeline, start.job, stream_id(start.prefix), start.topics, start.state_topic, backoff
        )
        self._completer = ToastResolver(pipeline.postgres, backoff.wait)
        #: changes that the broker is known to refuse, by their position, and why
        self._refused: dict[Position, str] = {}

    def close(self) -> None:
        """Give up producer and connection."""
        self._session.close()
        self._completer.close()

    @property
    def counters(self) -> dict[str, int]:
        """What the stream has published since the slot was made."""
        return self._session.state.counters

    @property
    def position(self) -> Position:
        """P, as far as it was read or written by this publisher; A where nothing was streamed yet."""
        return self._session.state.position or self._start.position

    def reached(self) -> Position:
        """P, read behind an initialisation: nothing that an earlier attempt left under way can move it any more.

        :raises TakenOver: another job has claimed the slot.
        """
        return self._session.run(lambda: self.position)

    def publish(self, batch: Batch) -> Position:
        """Publish a batch, or find that it was; returns P.

        :raises TakenOver: another job has claimed the slot.
        :raises StaleBatch: P is neither the batch's start nor its end.
        :raises RecordError: under ``on_error = exit``, after everything before the bad transaction was published.
        """
        self._refused = {}
        return self._session.run(lambda: self._advance(batch))

    def _advance(self, batch: Batch) -> Position:
        """Bring P from where the state says that it is to the batch's end."""
        reached = self._session.state.position
        if reached is not None and reached >= batch.end and batch.end > batch.start:
            return reached
        rest = _rest(batch, reached)
        programs = self._session.programs(rest.versions, copied=False)
        part, stop = rest, self._truncate_stop(rest)
        if stop is not None:
            part = rest.before(Position.parse(stop.position).lsn)
        encoded = self._encode(part, programs)
        if (rejected := self._rejection_stop(encoded, programs)) is not None:
            stop = rejected
            encoded = self._encode(part.before(Position.parse(stop.position).lsn), programs)
        if stop is None or encoded.batch.end > rest.start:
            # should its outcome be unknown, P will tell, and what is left ends here again
            self._send(encoded)
        if stop is not None:
            raise stop
        return encoded.batch.end

    # ------------------------------------------------------------------ what ends the job
    def _truncate_stop(self, batch: Batch) -> RecordError | None:
        """The first TRUNCATE, if ``on_truncate`` is stop."""
        if self._pipeline.on_truncate != "stop":
            return None
        truncates = batch.changes[batch.changes[:, wire.C_KIND] == pgoutput.TRUNCATE]
        change = next((c for c in truncates if not self._skips(c)), None)
        if change is None:
            return None
        position = _position(change)
        return RecordError(
            f"TRUNCATE of {batch.versions[int(change[wire.C_RELATION])].table.qualified} at {position}, and on_truncate is stop.",
            f"Everything before its transaction is published. Set on_truncate to event to go on, or skip_position to {position} to "
            "let this one pass.",
            position=str(position),
        )

    def _rejection_stop(self, encoded: _Encoded, programs: Programs) -> RecordError | None:
        """The first rejection that nobody has decided to go on over, if ``on_error`` is exit."""
        if self._pipeline.on_error != "exit":
            return None
        stopping = [r for r in encoded.rejections if not self._skips(encoded.change(r))]
        if not stopping:
            return None
        first = min(stopping, key=lambda r: r.row)
        change = encoded.change(first)
        relation, position = int(change[wire.C_RELATION]), _position(change)
        topic = encoded.batch.versions[relation].topic
        return RecordError(
            f"The change of {programs.tables[relation].qualified} at {position} cannot be published to topic {topic!r}: {first.reason}.",
            "Everything before its transaction is published. Mend the cause and start again; or go on with on_error = log, which "
            f"writes it to the dead-letter topic; or with skip_position = {position}, which does so with this change alone.",
            position=str(position),
            topic=topic,
        )

    def _skips(self, change: npt.NDArray[np.int64]) -> bool:
        """Whether a person has decided to go on over this one change."""
        return str(_position(change)) == self._pipeline.skip_position.upper()

    # ------------------------------------------------------------------ one batch
    def _encode(self, batch: Batch, programs: Programs) -> _Encoded:
        """Complete and encode a batch, and find what of it cannot be published."""
        completed = self._completer.complete(batch, programs)
        headers = wire.HEADERS | (wire.HEADER_XID if self._pipeline.xid_header else 0)
        found = encode_changes(completed, programs, headers=headers, largest=self._session.largest_record)
        changed = {
            int(completed.batch.changes[r.row, wire.C_RELATION]) for r in found.rejections if r.code == wire.CHANGED
        }
        check_definitions(self._pipeline, [programs.tables[relation] for relation in changed])
        rejections = [
            *(Rejection(row, reason) for row, reason in completed.failed.items()),
            *found.rejections,
            *self._known_to_be_refused(completed.batch),
            *_without_schema(completed.batch, found.records),
            *oversized(self._session, found.records),
        ]
        return _Encoded(batch, completed, found.records, distinct(rejections))

    def _known_to_be_refused(self, batch: Batch) -> Iterator[Rejection]:
        for i, change in enumerate(batch.changes if self._refused else ()):
            if (reason := self._refused.get(_position(change))) is not None:
                yield Rejection(i, reason)

    def _send(self, encoded: _Encoded) -> None:
        """One Kafka transaction: records, events, dead letters, and P."""
        records = without(encoded.records, encoded.rejections)
        dead_letters = [self._dead_letter(encoded, rejection) for rejection in encoded.rejections]
        events = list(self._events(encoded.completed.batch))
        before, end = self.counters, encoded.batch.end
        progress = {
            POSITION: Reached(
                end.lsn,
                end.ordinal,
                time.time(),
                self._fingerprint,
                self._session.job.epoch,
                published=before["published"] + len(records),
                dead_letters=before["dead_letters"] + len(dead_letters),
                superseded=before["superseded"] + len(encoded.completed.superseded),
                events=before["events"] + len(events),
            )
        }
        try:
            self._session.transact([records, *events, *dead_letters], progress)
        except RecordRefused as error:
            rule_out(self._session, error, [*events, *dead_letters], progress)
            found = find_refused(self._session, records)
            for number, why in found.items():
                change = encoded.completed.batch.changes[records.table[number, wire.R_MESSAGE]]
                self._refused[_position(change)] = why
            if not found:
                self._session.smaller_batches(int(records.sizes().sum()))
            raise NewProducerNeeded(error.what) from error

    def _dead_letter(self, encoded: _Encoded, rejection: Rejection) -> Records:
        change, batch = encoded.change(rejection), encoded.completed.batch
        version = batch.versions[int(change[wire.C_RELATION])]
        at, size = int(change[wire.C_OFFSET]), int(change[wire.C_LENGTH])
        position = str(_position(change))
        dead_letter = DeadLetter(
            version,
            _OPS[int(change[wire.C_KIND])],
            position,
            bytes(batch.data[at : at + size]),
            rejection.reason,
            context={"xid": int(change[wire.C_XID]), "time": int(change[wire.C_TIME])},
        )
        log.error("Dead letter for %s at %s: %s", version.table.qualified, position, rejection.reason)
        value = dead_letter.encode(self._session.dead_letter_limit)
        return single(self._session.dead_letters, 0, position.encode(), value)

    def _events(self, batch: Batch) -> Iterator[Records]:
        """An event for each TRUNCATE."""
        known = {v.table.oid: v for v in batch.versions}
        for change in batch.changes[batch.changes[:, wire.C_KIND] == pgoutput.TRUNCATE]:
            at, size = int(change[wire.C_OFFSET]), int(change[wire.C_LENGTH])
            message = pgoutput.truncate(bytes(batch.data[at : at + size]))
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
            time_of_commit = int(change[wire.C_TIME])
            yield single(self._session.events, 0, position.encode(), json.dumps(event).encode(), time_of_commit)


def _rest(batch: Batch, reached: Position | None) -> Batch:
    """What of a batch is not published yet.

    :raises StaleBatch: P is none of its places.
    """
    if reached is None or reached == batch.start:
        return batch
    # between two of its transactions: the good ones before a bad one were committed, and no answer said so
    rest = batch.after(reached)
    if rest is None:
        raise StaleBatch(f"The batch starts at {batch.start}, but the stream is at {reached}.")
    return rest


def _position(change: npt.NDArray[np.int64]) -> Position:
    """What names a change however often its batch is cut, completed and encoded."""
    return Position(int(change[wire.C_LSN]), int(change[wire.C_ORDINAL]))


def _without_schema(batch: Batch, records: Records) -> Iterator[Rejection]:
    """The rows whose columns the registry refuses; a delete needs a key only."""
    reasons = {i: v.refused for i, v in enumerate(batch.versions) if v.refused}
    if not reasons:
        return
    for row in records.table[records.table[:, wire.R_VALUE_LEN] >= 0, wire.R_MESSAGE].tolist():
        if (reason := reasons.get(int(batch.changes[row, wire.C_RELATION]))) is not None:
            yield Rejection(row, reason)
