"""Publishes the stream's batches: each in one Kafka transaction, together with the position P as the record of
progress."""

from __future__ import annotations

import functools
import itertools
import logging
import math
import time
from collections.abc import Callable, Iterator, Mapping, Sequence

import numpy as np

from airflow_bottledwater import memory
from airflow_bottledwater.backoff import Backoff
from airflow_bottledwater.encoding import wire
from airflow_bottledwater.encoding.mapping import TableMapping
from airflow_bottledwater.encoding.program import Programs
from airflow_bottledwater.errors import Refused, StaleBatch, TypeAltered
from airflow_bottledwater.kafka.errors import NewProducerNeeded, RecordRefused, TooSlow
from airflow_bottledwater.kafka.publisher import NO_RECORDS, Records, keyed, merged, single
from airflow_bottledwater.kafka.topics import Topic
from airflow_bottledwater.live.snapshots import LiveSnapshots
from airflow_bottledwater.metrics import batch as counting
from airflow_bottledwater.metrics.meter import Meter
from airflow_bottledwater.model.lsn import Position
from airflow_bottledwater.model.problem import Problem
from airflow_bottledwater.model.relation import SourceTable
from airflow_bottledwater.pipeline.settings import Settings
from airflow_bottledwater.postgres import pgoutput
from airflow_bottledwater.provision import kafka_checks
from airflow_bottledwater.provision.create import make_chosen
from airflow_bottledwater.publish.ahead import Ahead
from airflow_bottledwater.publish.batch import Batch
from airflow_bottledwater.publish.chosen import ChosenTopics
from airflow_bottledwater.publish.dead_letter import DeadLetter, counted
from airflow_bottledwater.publish.definitions import check_definitions
from airflow_bottledwater.publish.encode import EncodedBatch, encode_changes
from airflow_bottledwater.publish.messages import Messages
from airflow_bottledwater.publish.outbox import Outbox
from airflow_bottledwater.publish.refusals import find_refused, rule_out
from airflow_bottledwater.publish.reject import Rejection, distinct, oversized, without
from airflow_bottledwater.publish.rows import RowEncoder
from airflow_bottledwater.publish.session import PublishSession
from airflow_bottledwater.publish.toast import Completed
from airflow_bottledwater.publish.warm import warm_up
from airflow_bottledwater.state import starts
from airflow_bottledwater.state.pinned import PinnedTable, pins
from airflow_bottledwater.state.pipeline_state import PipelineState
from airflow_bottledwater.state.records import (
    BY_LIVE,
    BY_STREAM,
    POSITION,
    PartOfTransaction,
    Reached,
    StateRecord,
    stream_id,
    table_key,
)
from airflow_bottledwater.stream.aside import set_aside
from airflow_bottledwater.stream.behind import passed
from airflow_bottledwater.stream.ends import ended, transactions
from airflow_bottledwater.stream.events import published_truncates, truncate_events
from airflow_bottledwater.stream.start import Start, fingerprint
from airflow_bottledwater.stream.stops import position_of, rejection_stop, truncate_stop
from airflow_bottledwater.tables.new_rows import NewRows
from airflow_bottledwater.tables.writer import hold

log = logging.getLogger(__name__)

#: changes, and bytes, that are encoded and handed over within the millisecond for which the beginning of their
#: transaction would be waited for
_SOON, _SOON_BYTES = 50, 32 << 10

#: makes records of the state as it is then
MakeRecords = Callable[[PipelineState], Mapping[str, StateRecord | None]]

#: the operation of a change in a dead letter
_OPS = {pgoutput.INSERT: "c", pgoutput.UPDATE: "u", pgoutput.DELETE: "d", pgoutput.LOGICAL: "m"}


class StreamPublisher:
    """Publishes batches under the stream's transactional id. It keeps no position of its own: P is in the session's
    state only.

    :param start: the claimed stream.
    :param known: the pipeline's tables and topics; if the state has others by now (:attr:`state`), they must not be
        published with.
    :param meter: counts what is published.
    :ivar live: the live snapshots, which are published between two batches.
    :raises StateError: a topic is missing, or is no longer the one that was pinned.
    """

    def __init__(
        self,
        pipeline: Settings,
        start: Start,
        known: PipelineState,
        backoff: Backoff,
        meter: Meter | None = None,
    ) -> None:
        self._pipeline = pipeline
        self._start, self._fingerprint = start, fingerprint(pipeline, known, start.cluster)
        memory.keep()
        # compiling takes time, and must not happen while a transaction is open
        warm_up(pipeline.table_options.values())
        memory.settle()
        mapping = TableMapping.of(pipeline)
        pinned = pins(known.tables.values())
        self._session = PublishSession(
            pipeline, start.job, stream_id(start.prefix), pinned, start.state_topic, backoff, meter,
            mapping.named_topics,
        )  # fmt: skip
        self._keyed = [name for name, pin in pinned.items() if pin.keyed]
        #: the topics as they were described last, and the problems with them
        self._expiring: tuple[Mapping[str, Topic], list[Problem]] = {}, []
        chosen = ChosenTopics(self._session, functools.partial(make_chosen, pipeline, start.cluster))
        self._outbox = Outbox(chosen) if any(each.table.outbox for each in known.tables.values()) else None
        self._messages = Messages(chosen) if pipeline.sends_messages else None
        self._ends = self._session.index.get(mapping.ends_topic)
        self._completer = Ahead(pipeline.postgres, backoff.wait, pipeline.max_transaction_bytes, record=known.slot)
        self.live = LiveSnapshots(pipeline, start.cluster.pipeline(pipeline.slot), self._session)
        #: changes that the broker is known to refuse, by their position, and why
        self._refused: dict[Position, str] = {}

    def close(self) -> None:
        """Close the producer and the connections."""
        self.live.close()
        self._session.close()
        self._completer.close()

    @property
    def slow(self) -> str:
        """Why transactions are smaller than they would be; empty if they are not."""
        return str(self._session.pace) if self._session.pace.slow else ""

    def topic_problems(self, away: float) -> list[Problem]:
        """The topics that delete what has to stay (:func:`kafka_checks.expiring`), and that they cannot be compared.

        :param away: when Kafka was away last, by the monotonic clock.
        """
        described = self._session.described
        if self._expiring[0] is not described:
            self._expiring = described, kafka_checks.expiring(self._pipeline, self._keyed, described)
        return [*self._expiring[1], *self._session.unchecked(away)]

    @property
    def counters(self) -> dict[str, int]:
        """How many records of each kind the stream has published since the slot was created."""
        return self._session.state.counters

    @property
    def open_letters(self) -> dict[str, dict[str, int]]:
        """The dead letters that nobody has settled, see :attr:`PipelineState.open_letters`."""
        return self._session.state.open_letters

    @property
    def position(self) -> Position:
        """P, as this publisher has last read or written it; A if nothing was streamed yet."""
        return self._session.state.position or self._start.position

    @property
    def state(self) -> PipelineState:
        """The pipeline's state, as it was read last, with all that was published since."""
        return self._session.state

    def write(self, make: MakeRecords) -> None:
        """Write records of the state in one transaction, between two batches.

        :param make: makes them of the state as it is then; if there are none, nothing is written.
        :raises TakenOver: another job has claimed the slot.
        :raises Refused: a record is too large for the state topic, or the topic takes none.
        """

        def once() -> None:
            if values := make(self._session.state):
                try:
                    self._session.transact(self._begins(values), values)
                except RecordRefused as error:
                    rule_out(self._session, error, (), values)
                    raise

        self._session.run(once)

    def _begins(self, values: Mapping[str, StateRecord | None]) -> list[Records]:
        """What tells consumers where the pipeline begins in topics, if it is about to."""
        event = starts.event(self._session.name, values)
        return [single(self._session.events, 0, b"begin", event)] if event else []

    def take_in(self, rows: NewRows, make: MakeRecords) -> None:
        """Publish the rows of new tables without a key, what was committed behind them until P, and the records with
        which the stream goes on with these tables, in one Kafka transaction.

        :param make: see :meth:`write`.
        :raises RecordError: one of the rows cannot be published; nothing is.
        :raises Refused: Kafka does not take them in one transaction; nothing is published.
        :raises TakenOver: another job has claimed the slot.
        """
        encoder = RowEncoder(self._session, wire.HEADERS if self._pipeline.snapshot_headers else 0, BY_LIVE)

        def once() -> None:
            known = self._session.state
            if rows.blocks.keys() <= known.tables.keys():
                return  # the outcome of an earlier attempt was unknown
            values = dict(make(known))
            tables = {oid: pin for oid in rows.blocks if isinstance(pin := values[table_key(oid)], PinnedTable)}
            try:
                first = itertools.chain(self._begins(values), self._first(rows, tables, encoder, values))
                self._session.transact(first, values, divisible=False)
            except (TooSlow, RecordRefused) as error:
                raise Refused(f"Kafka does not take its rows in one transaction: {error}") from error

        self._session.run(once)

    def _first(
        self,
        rows: NewRows,
        tables: Mapping[int, PinnedTable],
        encoder: RowEncoder,
        values: dict[str, StateRecord | None],
    ) -> Iterator[Records]:
        """The records of new tables' rows, and of what was committed behind them; the counts of their dead letters are
        added to ``values``."""
        letters: dict[str, list[SourceTable]] = {BY_LIVE: [], BY_STREAM: []}
        for oid, pinned in tables.items():
            programs = self._session.programs([pinned.version], copied=True)
            for block in rows.blocks[oid]:
                for encoded, rejections in encoder.encode(pinned.version, block, programs, rows.boundary.insert_lsn):
                    yield without(encoded.records, rejections)
                    for rejection in rejections:
                        letters[BY_LIVE].append(pinned.table)
                        yield encoder.dead_letter(pinned.version, block, rejection, rows.boundary.insert_lsn)
        for batch in passed(self._pipeline, rows, tables, self.position):
            programs = self._session.programs(batch.versions, copied=False)
            for changes in self._in_parts(batch, programs):
                part = changes.batch
                stop = truncate_stop(self._pipeline, part) or rejection_stop(
                    self._pipeline, changes, programs, ("exit", "isolate")
                )
                if stop is not None:
                    raise stop
                yield without(changes.records, changes.rejections)
                yield from truncate_events(part, self._session.events, self._session.name)
                for rejection in changes.rejections:
                    letters[BY_STREAM].append(part.versions[int(changes.change(rejection)["relation"])].table)
                    yield self._dead_letter(changes, rejection)
        for by, of in letters.items():
            values |= counted(self._session.state, by, of)

    def _in_parts(self, batch: Batch, programs: Programs) -> Iterator[EncodedBatch]:
        """All of a batch, in as many parts as the values that its changes lack need."""
        reached = batch.start
        while reached < batch.end:
            part = self._completer.leading(_rest(batch, reached), programs)
            encoded = self._encode(part, programs)
            yield encoded
            reached = encoded.batch.end

    def reached(self) -> Position:
        """P, read after an initialisation, so that no open transaction of an earlier attempt can move it any more; it
        compares the topics, too, when that is due.

        :raises TakenOver: another job has claimed the slot.
        :raises StateError: a topic is missing, or is no longer the one that was pinned.
        """
        return self._session.run(lambda: self.position)

    def publish(self, batch: Batch, reached: Callable[[Position], None] = lambda _: None) -> Position:
        """Publish a batch, unless the state shows that it was published; returns P.

        :param reached: called with P behind each part that is published by itself, but the last.
        :raises StopRequested: the job is to end, and a part of the batch is left.
        :raises TakenOver: another job has claimed the slot.
        :raises StaleBatch: P is neither the batch's start nor its end, nor at one of its changes.
        :raises RecordError: a row or a TRUNCATE stops the stream (``on_error = exit``, ``on_truncate = stop``);
            everything before its transaction was published.
        """
        self._refused = {}
        if self._outbox is not None:
            self._outbox.prepare(batch)
        if self._messages is not None:
            self._messages.prepare(batch)
        while True:
            position = self._session.run(lambda: self._advance(batch))
            if position >= batch.end:
                return position
            reached(position)
            self._session.backoff.check()

    def _advance(self, batch: Batch) -> Position:
        """Publish all that is left of the batch by the state's P, or a leading part of it; returns the new P."""
        reached = self._session.state.position
        self.live.expect(reached)
        if reached is not None and reached >= batch.end and batch.end > batch.start:
            return reached
        self._completer.know(self._session.state.partitions)
        rest = _rest(batch, reached)
        programs = self._session.programs(rest.versions, copied=False)
        part = self._completer.leading(rest, programs)
        if self._session.pace.slow:
            part = self._paced(part, programs)
        held = self._session.state.held
        stop = truncate_stop(self._pipeline, part, held)
        if stop is not None:
            part = part.before(Position.parse(stop.position).lsn)
        encoded = self._encode_known(part, programs)
        rejected = rejection_stop(self._pipeline, encoded, programs, loses=lambda each: self._loses(encoded, each))
        if rejected is not None:
            stop = rejected
            part = part.before(Position.parse(stop.position).lsn)
            encoded = self._encode(part, programs)
        encoded = set_aside(self._pipeline, encoded, programs, held)
        if encoded.batch.end < part.end:
            # its turn comes with the rest: the values of all changes before it do not fit into memory, or a type was
            # altered before it
            stop = None
        if stop is None and (following := rest.after(encoded.batch.end)) is not None:
            self._completer.prepare(following, programs)
        if stop is None or encoded.batch.end > rest.start:
            # if the outcome is unknown, P shows it, and the next attempt with what is left stops here again
            self.live.publishing(encoded)
            self._send(encoded)
            self.live.reached(self._session.state.position)
        if stop is not None:
            raise stop
        return encoded.batch.end

    def _paced(self, part: Batch, programs: Programs) -> Batch:
        """The leading part of a batch that Kafka takes in one transaction: whole source transactions if one fits, else
        a part of the first, and at least one change."""
        limit = self._session.pace.limit
        if limit < math.inf:
            part = part.leading(int(np.searchsorted(np.cumsum(part.changes["length"]), limit, side="right")))
        while len(part) > 1:
            encoded = self._encode_known(part, programs)
            records = max(encoded.records, encoded.outbox, key=lambda each: int(each.sizes().sum()))
            ends = np.cumsum(records.sizes())
            if not len(records) or ends[-1] <= limit:
                break
            over = int(records.table["row"][np.searchsorted(ends, limit, side="right")])
            part = part.leading(min(over, len(part) - 1))
        return part

    # ------------------------------------------------------------------ one batch
    def _encode_known(self, batch: Batch, programs: Programs) -> EncodedBatch:
        """Encode a batch as :meth:`_encode` does; if a type was altered, what was committed before, with the
        definitions of before.

        :raises TypeAltered: the first transaction has values of altered types.
        """
        try:
            return self._encode(batch, programs)
        except TypeAltered as altered:
            if not len(before := batch.before(altered.lsn)):
                raise
            return self._encode(before, programs)

    def _encode(self, batch: Batch, programs: Programs) -> EncodedBatch:
        """Complete and encode a batch, or a leading part of it, and find the rows that cannot be published.

        :raises TypeAltered: it has values that do not fit their types since these were altered.
        """
        completed = self._completer.complete(batch, programs)
        if 0 < len(completed.batch) <= _SOON and completed.batch.data.nbytes <= _SOON_BYTES:
            self._session.begin()
        headers = wire.HEADERS | (wire.HEADER_XID if self._pipeline.xid_header else 0)
        session, nothing = self._session, (NO_RECORDS, list[Rejection]())
        found = encode_changes(completed, programs, headers=headers, largest=session.largest_record)
        messages, no_records = self._messages.records(completed.batch, headers) if self._messages else nothing
        outbox, unfit = self._outbox.records(completed.batch, headers) if self._outbox else nothing
        if changed := _changed(completed, found.rejections):
            self._check_definitions(completed, programs, changed)
            # so what lacks attributes is from before these were added
            found = encode_changes(completed, programs.for_older, headers=headers, largest=session.largest_record)
        rejections = [
            *(Rejection(row, reason) for row, reason in completed.failed.items()),
            *found.rejections,
            *self._known_to_be_refused(completed.batch),
            *_without_schema(completed.batch, found.records),
            *oversized(session, found.records),
            *no_records,
            *oversized(session, messages),
            *unfit,
            *oversized(session, outbox),
        ]
        return EncodedBatch(completed, found.records, distinct(rejections), messages=messages, outbox=outbox)

    def _check_definitions(self, completed: Completed, programs: Programs, changed: Mapping[int, set[int]]) -> None:
        """See :func:`check_definitions`.

        :param changed: the columns with values that do not fit their types, by change.
        """
        changes, columns = completed.batch.changes, dict[int, set[int]]()
        for row, found in changed.items():
            columns.setdefault(int(changes[row]["relation"]), set()).update(found)
        try:
            for relation, each in columns.items():
                check_definitions(self._pipeline, programs.tables[relation], each)
        except TypeAltered as altered:
            altered.lsn = int(changes[min(changed)]["lsn"])
            raise

    def _known_to_be_refused(self, batch: Batch) -> Iterator[Rejection]:
        for i, change in enumerate(batch.changes if self._refused else ()):
            if (reason := self._refused.get(position_of(change))) is not None:
                yield Rejection(i, reason)

    def _send(self, encoded: EncodedBatch) -> None:
        """Publish records, events, dead letters and P in one Kafka transaction."""
        each_kind = (encoded.records, encoded.messages, encoded.outbox)
        rows, messages, outbox = (without(each, encoded.rejections) for each in each_kind)
        # rows and messages of outboxes may have the same topics and keys
        records = [rows, merged(messages, outbox)]
        dead_letters = [self._dead_letter(encoded, rejection) for rejection in encoded.rejections]
        events = list(truncate_events(encoded.completed.batch, self._session.events, self._session.name, encoded.held))
        before, end = self.counters, encoded.batch.end
        ends, part = self._ended(encoded, records)
        service = [*events, *ends, *dead_letters]
        versions, changes = encoded.completed.batch.versions, encoded.completed.batch.changes
        of = [versions[int(changes[each.row]["relation"])].table for each in encoded.rejections]
        progress: dict[str, StateRecord | None] = {
            **counted(self._session.state, BY_STREAM, of),
            **hold(self._session.state, encoded.gaps),
            POSITION: Reached(
                end.lsn,
                end.ordinal,
                time.time(),
                # only a position inside a transaction is compared with it
                self._fingerprint if end.ordinal else None,
                self._session.job.epoch,
                published=before["published"] + sum(map(len, records)),
                superseded=before["superseded"] + len(encoded.completed.superseded),
                events=before["events"] + len(events),
                messages=before["messages"] + len(messages),
                part=part,
            ),
        }
        try:
            self._session.transact([*records, *service], progress, divisible=len(encoded.batch) > 1)
        except RecordRefused as error:
            rule_out(self._session, error, service, progress)
            known = len(self._refused)
            for each in records:
                for number, why in find_refused(self._session, each).items():
                    change = encoded.completed.batch.changes[each.table[number]["row"]]
                    self._refused[position_of(change)] = why
            if len(self._refused) == known:
                self._session.smaller_batches(sum(int(each.sizes().sum()) for each in records))
            raise NewProducerNeeded(error.what) from error
        # what was superseded is not among the changes any more
        for oid, gap in encoded.gaps.items():
            log.error("%s is set aside, and all others go on: it %s.", self.state.tables[oid].table.qualified, gap.why)
        truncates = published_truncates(encoded.completed.batch, encoded.held)
        published = np.concatenate([*(each.table["row"] for each in records), truncates])
        counting.count(self._session.meter, changes, versions, published)

    def _ended(
        self, encoded: EncodedBatch, records: Sequence[Records]
    ) -> tuple[list[Records], PartOfTransaction | None]:
        """The records of the ends of a batch's transactions, if they are asked for, and what is published of the one
        that the batch ends inside of.

        :param records: those of the batch that are published.
        """
        batch, reached = encoded.completed.batch, self._session.state.reached
        if self._ends is None and not batch.end.ordinal:
            return [], None
        truncates = published_truncates(batch, encoded.held)
        letters = np.array([each.row for each in encoded.rejections], dtype=np.int64)
        rows = np.concatenate([*(each.table["row"] for each in records), truncates, letters])
        topics = np.concatenate([
            *(each.table["topic"] for each in records),
            np.full(len(truncates), self._session.events),
            np.full(len(letters), self._session.dead_letters),
        ])  # fmt: skip
        found = transactions(batch.changes, rows, topics, self._session.topics)
        whole, part = ended(found, self.position, None if reached is None else reached.part, batch.end)
        if self._ends is None or not whole:
            return [], part
        return [keyed(self._ends, [(each.name.encode(), each.end(), each.published.time) for each in whole])], part

    def _loses(self, encoded: EncodedBatch, rejection: Rejection) -> bool:
        """Whether what cannot be published may be nowhere, also not in its dead letter: rows of outboxes are deleted,
        and messages are in no table."""
        version = encoded.batch.versions[int(encoded.change(rejection)["relation"])]
        limit = self._session.dead_letter_limit
        return version.table.outbox and self._letter(encoded, rejection).with_row(limit) is None

    def _dead_letter(self, encoded: EncodedBatch, rejection: Rejection) -> Records:
        letter = self._letter(encoded, rejection)
        log.error("Dead letter for %s at %s: %s", letter.version.table.qualified, letter.position, rejection.reason)
        key, value = f"{self._session.name}/{letter.position}", letter.encode(self._session.dead_letter_limit)
        return single(self._session.dead_letters, 0, key.encode(), value)

    def _letter(self, encoded: EncodedBatch, rejection: Rejection) -> DeadLetter:
        change, batch = encoded.change(rejection), encoded.completed.batch
        version = batch.versions[int(change["relation"])]
        at, size = int(change["offset"]), int(change["length"])
        return DeadLetter(
            self._session.name,
            version,
            _OPS[int(change["kind"])],
            str(position_of(change)),
            bytes(batch.data[at : at + size]),
            rejection.reason,
            BY_STREAM,
            whole=int(change["kind"]) != pgoutput.LOGICAL or version.table.outbox,
            context={"xid": int(change["xid"]), "time": int(change["time"])},
        )


def _rest(batch: Batch, reached: Position | None) -> Batch:
    """The part of a batch that is not published yet.

    :param reached: P; None if nothing was streamed yet.
    :raises StaleBatch: P is neither the batch's start nor at one of its changes.
    """
    if reached is None or reached == batch.start:
        return batch
    # inside of it: a leading part was committed
    rest = batch.after(reached)
    if rest is None:
        raise StaleBatch(f"The batch starts at {batch.start}, but the stream is at {reached}.")
    return rest


def _changed(completed: Completed, rejections: list[Rejection]) -> dict[int, set[int]]:
    """The columns with values that do not fit their types, by change."""
    changed = {row: {column} for row, column in completed.changed.items()}
    for rejection in rejections:
        if rejection.code == wire.CHANGED:
            changed.setdefault(rejection.row, set()).add(rejection.column)
    return changed


def _without_schema(batch: Batch, records: Records) -> Iterator[Rejection]:
    """The rows for which the registry refuses a schema; deletes are not among them, since they need only a key."""
    reasons = {i: v.refused for i, v in enumerate(batch.versions) if v.refused}
    if not reasons:
        return
    for row in records.table["row"][records.table["value_length"] >= 0].tolist():
        if (reason := reasons.get(int(batch.changes[row]["relation"]))) is not None:
            yield Rejection(row, reason)
