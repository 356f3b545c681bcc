"""Settles dead letters, on request, while the stream is stopped, and under its transactional id: publishes them after
their cause was fixed, or dismisses them.

A dead letter is published only if the source still has the row as the dead letter holds it (or, for a delete, has no
such row), and no newer record of its key is in the topic: of a later change, or for a row of a snapshot, of a change
that the snapshot does not show. Otherwise it is dropped: publishing it would overwrite a newer value, or bring a row
back that was deleted. The topic alone is not enough to decide this, since compaction removes tombstones. What it has of
before the slot was made says nothing of it: positions there may be another server's, or of a time that a restore of
the source took back.
"""

from __future__ import annotations

import base64
import functools
import json
import logging
from collections import Counter, defaultdict
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from airflow_bottledwater.backoff import Backoff
from airflow_bottledwater.encoding import layout, types, wire
from airflow_bottledwater.encoding.mapping import TableMapping
from airflow_bottledwater.errors import BottledWaterError, RecordError, Refused, SchemaRefused, SlotInUse, TakenOver
from airflow_bottledwater.jobs import status
from airflow_bottledwater.kafka.errors import RecordRefused
from airflow_bottledwater.kafka.publisher import NO_RECORDS, RECORD_OVERHEAD, Records
from airflow_bottledwater.kafka.topic_reader import KeySet
from airflow_bottledwater.model.lsn import Position
from airflow_bottledwater.model.relation import SourceTable
from airflow_bottledwater.model.slot import of_source
from airflow_bottledwater.model.version import Version
from airflow_bottledwater.pipeline.settings import Settings
from airflow_bottledwater.postgres import catalog, pgoutput, slot
from airflow_bottledwater.postgres.connect import session
from airflow_bottledwater.postgres.server import identify
from airflow_bottledwater.provision.beside import refuse_beside_job
from airflow_bottledwater.provision.create import make_chosen
from airflow_bottledwater.provision.letters import AT_ONCE, LetterPosition, LettersTopic, fitting, portions
from airflow_bottledwater.provision.newest import Newest, key_of, shown
from airflow_bottledwater.provision.source_rows import READ_AGAIN, SourceRow, StoredDeadLetter, TableToday, compare
from airflow_bottledwater.publish.batch import Batch
from airflow_bottledwater.publish.chosen import ChosenTopics
from airflow_bottledwater.publish.columns import oldest
from airflow_bottledwater.publish.current import row_key, with_key
from airflow_bottledwater.publish.encode import encode_changes
from airflow_bottledwater.publish.messages import Messages
from airflow_bottledwater.publish.outbox import Outbox
from airflow_bottledwater.publish.reject import oversized
from airflow_bottledwater.publish.session import PublishSession
from airflow_bottledwater.publish.toast import ToastResolver
from airflow_bottledwater.state import options, schemas
from airflow_bottledwater.state.claim import Claim
from airflow_bottledwater.state.identity import check_source, check_topics, shared
from airflow_bottledwater.state.pinned import pins
from airflow_bottledwater.state.pipeline_state import PipelineState
from airflow_bottledwater.state.records import StateRecord, letters_key, stream_id, table_key
from airflow_bottledwater.state.schemas import register_value

log = logging.getLogger(__name__)


@dataclass(slots=True)
class RedriveResult:
    """How many dead letters there were of each outcome.

    :param published: published and removed.
    :param overtaken: dropped, since the source today has another row of that key or none, their key has a newer record,
        or their table was truncated since, or taken up again with another key.
    :param failed: still refused; they stay in the dead-letter topic.
    :param incomplete: without their row, which was too large for a dead letter; they stay.
    :param dismissed: given up, and removed.
    """

    published: int = 0
    overtaken: int = 0
    failed: int = 0
    incomplete: int = 0
    dismissed: int = 0


def redrive(pipeline: Settings) -> RedriveResult:
    """Publish the pipeline's dead letters, each in the transaction that has its tombstone in the dead-letter topic.

    :raises SlotInUse: a stream reads from the slot.
    :raises StateError: the pipeline's job is alive, as that of a snapshot; or the state topic does not know the slot.
    :raises TakenOver: another job has claimed the slot.
    """
    return _settle(pipeline, lambda letters: letters.redrive())


def dismiss(pipeline: Settings, tables: Sequence[str] = ()) -> RedriveResult:
    """Give up the pipeline's dead letters: their rows are not published.

    :param tables: ``[schema.]table`` patterns, as in the settings; empty for all dead letters.
    :raises SettingError: a pattern matches nothing; nothing was given up.
    :raises SlotInUse: a stream reads from the slot.
    :raises StateError: the pipeline's job is alive, as that of a snapshot; or the state topic does not know the slot.
    :raises TakenOver: another job has claimed the slot.
    """
    return _settle(pipeline, lambda letters: letters.dismiss(tables))


def _settle(pipeline: Settings, how: Callable[[_Letters], RedriveResult]) -> RedriveResult:
    """Claim the slot, and settle its dead letters.

    :raises SlotInUse: a stream reads from the slot.
    :raises StateError: the pipeline's job is alive, as that of a snapshot; or the state topic does not know the slot.
    :raises TakenOver: another job has claimed the slot.
    """
    with _claimed(pipeline) as claim:
        topics = pins(claim.state.tables.values())
        backoff = Backoff(pipeline.outage_timeout)
        publishing = PublishSession(pipeline, claim.job, stream_id(claim.prefix), topics, claim.topic, backoff)
        completer = ToastResolver(pipeline.postgres, backoff.wait, record=claim.state.slot)
        completer.current.partitions = claim.state.partitions
        tells = True
        try:
            return how(_Letters(pipeline, publishing, completer, claim))
        except TakenOver:
            tells = False  # the status is that of the other job from now on
            raise
        finally:
            publishing.close()
            completer.close()
            if tells and publishing.state.slot is not None:  # it was read
                _tell(pipeline, claim.cluster.pipeline(pipeline.slot), publishing.state)


def _tell(pipeline: Settings, name: str, known: PipelineState) -> None:
    """Let whoever watches the pipeline know what is left, without waiting for the next job."""
    try:
        status.tell_letters(pipeline, name, known)
    except BottledWaterError as error:
        log.info("The pipeline's status has the open dead letters of before, until its next job begins: %s", error)


@contextmanager
def _claimed(pipeline: Settings) -> Iterator[Claim]:
    with session(pipeline.postgres, "Settling dead letters") as connection:
        cluster = identify(connection)
        found = slot.state(connection, pipeline.slot)
    if found is not None and found.active_pid is not None:
        raise SlotInUse(f"Slot {pipeline.slot!r} is in use by process {found.active_pid}.", "Stop the stream first.")
    refuse_beside_job(pipeline, cluster)
    claim = Claim(pipeline, cluster, "redrive", Backoff(pipeline.outage_timeout))
    try:
        claim.record_ids([stream_id(claim.prefix)])
        with session(pipeline.postgres, "Re-driving dead letters") as connection:
            check_source(connection, pipeline.postgres, claim.state.slot)
            # as the next stream does, which lets go of them
            gone = check_topics(connection, pipeline, claim.state)
            claim.state.apply(dict.fromkeys(map(table_key, gone)))
            options.check(connection, pipeline, claim.state)
            schemas.settle(pipeline, connection, claim)
        yield claim
    finally:
        claim.close()


class _Letters:
    """The dead letters of a pipeline whose slot is claimed."""

    def __init__(self, pipeline: Settings, publishing: PublishSession, completer: ToastResolver, claim: Claim) -> None:
        self._pipeline, self._publishing, self._completer = pipeline, publishing, completer
        #: the pipeline's tables by oid, as they are published today
        self._tables, self._mapping = claim.state.tables, TableMapping.of(pipeline)
        #: the same as the catalog has them
        self._today: dict[int, SourceTable] = {}
        self._held = {oid: claim.state.gaps[oid] for oid in claim.state.held}
        self._name = claim.cluster.pipeline(pipeline.slot)
        self._letters = LettersTopic(pipeline, publishing, self._name)
        #: by the id of the table of dead letters, see :attr:`StoredDeadLetter.table`
        self._published: dict[int, TableToday] = {}
        #: the relation versions of dead letters, as they are published now, or why the registry refuses them
        self._versions: dict[Version, Version | SchemaRefused] = {}
        self._events_topic = publishing.topics[publishing.events]
        chosen = ChosenTopics(publishing, functools.partial(make_chosen, pipeline, claim.cluster))
        self._outbox = Outbox(chosen) if any(each.table.outbox for each in self._tables.values()) else None
        self._messages = Messages(chosen)

    def redrive(self) -> RedriveResult:
        """Publish them: the snapshot's first, then by position. What the topics have of their keys is read once for all
        of them; if they do not fit into one portion, each of them is read and encoded twice."""
        result = RedriveResult()
        with session(self._pipeline.postgres, "Re-driving dead letters") as connection:
            today = catalog.load(connection, list(self._tables), self._mapping)
        self._today = {table.oid: table for table in today}
        places = portions(sorted(self._publishing.run(self._letters.places), key=lambda place: place.position))
        left: list[LetterPosition] = []
        wanted: dict[str, set[bytes]] = defaultdict(set)
        ready: list[tuple[StoredDeadLetter, Records]] = []
        for some in places:
            ready = self._ready(self._letters.read(some), result)
            for dead_letter, records in ready:
                if not dead_letter.table.outbox:
                    # the records of an outbox are events, none of which is another one's newer version
                    keys = (key_of(records, i) for i in range(len(records)))
                    wanted[dead_letter.content["topic"]].update(key for key in keys if key is not None)
            kept = {dead_letter.key for dead_letter, _ in ready}
            left += [place for place in some if place.key in kept]
        if not left:
            return result
        newest = self._newest(wanted)
        for some in portions(left):
            if len(places) > 1:
                ready = self._ready(self._letters.read(some), result)
            self._redrive(ready, newest, result)
        return result

    def dismiss(self, tables: Sequence[str]) -> RedriveResult:
        """Remove those of some tables; an attempt whose outcome is unknown is repeated from what is left."""
        return RedriveResult(dismissed=self._publishing.run(lambda: self._letters.dismiss(tables)))

    def _ready(
        self, dead_letters: list[StoredDeadLetter], result: RedriveResult
    ) -> list[tuple[StoredDeadLetter, Records]]:
        """Those that may be published unless something is newer, with their records."""
        ready: list[tuple[StoredDeadLetter, Records]] = []
        outdated: list[tuple[StoredDeadLetter, Records]] = []
        for written in dead_letters:
            if self._is_mistaken(written):
                why = "it is of another cluster, in which its table had the oid that another one has here"
                self._fails(written, f"{why}. Give it up (bottledwater dismiss), and change its row again", result)
                continue
            try:
                dead_letter = self._as_published(written)
            except RecordError as error:
                self._fails(written, error, result)
                continue
            if "again" not in dead_letter.content:
                result.incomplete += 1
                continue
            if (gap := self._held.get(int(dead_letter.content["oid"]))) is not None:
                self._fails(dead_letter, f"its table {gap.why}", result)
                continue
            if self._replaced(dead_letter) or self._read_since(dead_letter):
                outdated.append((dead_letter, NO_RECORDS))
                continue
            if why := self._unfollowed(dead_letter):
                self._fails(dead_letter, why, result)
                continue
            if dead_letter.earlier and not dead_letter.table.outbox:
                why = (
                    "it is older than the slot, whose first snapshot has not read its table, or has not swept its topic"
                )
                self._fails(dead_letter, f"{why}. {READ_AGAIN}", result)
                continue
            try:
                ready.append((dead_letter, self._encode(dead_letter)))
            except (RecordError, SchemaRefused) as error:
                self._fails(dead_letter, error, result)
        self._send(outdated, result)
        return ready

    def _redrive(
        self, ready: Sequence[tuple[StoredDeadLetter, Records]], newest: Newest, result: RedriveResult
    ) -> None:
        current = self._current(ready)
        settled: list[tuple[StoredDeadLetter, Records]] = []
        for dead_letter, records in ready:
            held = current.get(dead_letter.key)
            rows = [i for i in range(len(records)) if not newest.overtake(dead_letter, records, i)]
            if len(rows) < len(records) and newest.in_doubt(dead_letter):
                why = "what is newer by its position may be another pipeline's, or of before the slot was made"
                self._fails(dead_letter, f"{why}. {READ_AGAIN}", result)
                continue
            if rows and held is not None and (doubt := held.doubt(records, rows)):
                self._fails(dead_letter, doubt, result)
                continue
            rows = [i for i in rows if held is None or held.allows(records, i)]
            lacks = dead_letter.lacks(self._today.get(int(dead_letter.content["oid"])))
            if lacks and any(newest.may_show_more(dead_letter, records, i) for i in rows):
                why = f"the topic has a row of its key that may have column {lacks!r}, which the dead letter lacks"
                self._fails(dead_letter, f"{why}. {READ_AGAIN}", result)
                continue
            settled.append((dead_letter, replace(records, table=records.table[rows])))
            if dead_letter.label:  # those of the stream that it shows come behind it
                for i in rows:
                    label = dead_letter.label.encode()
                    newest.add(dead_letter.content["topic"], key_of(records, i), shown(label), copied=True)
        self._send(settled, result)

    def _as_published(self, written: StoredDeadLetter) -> StoredDeadLetter:
        """See :meth:`StoredDeadLetter.as_published`, by the name that the table has today.

        :raises RecordError: see there; or less of the table is hidden by that name than by the one that is recorded.
        """
        if "again" not in written.content:
            return written
        if (made := self._published.get(id(written.table))) is None:
            named = None
            if (today := self._today.get(int(written.content["oid"]))) is not None:
                named = (today.schema, today.name)
                columns = [column.name for column in written.table.columns]
                if why := options.exposed_table(self._mapping, self._tables[today.oid].table, *named, columns):
                    raise RecordError(why)
            made = self._published[id(written.table)] = TableToday.of(self._mapping, written.table, named)
        return written.as_published(made)

    def _is_mistaken(self, written: StoredDeadLetter) -> bool:
        """Whether its table's oid is another table's here."""
        pinned = self._tables.get(int(written.content["oid"]))
        return (
            self._is_foreign(written) and pinned is not None and pinned.table.qualified != written.content["relation"]
        )

    def _is_foreign(self, dead_letter: StoredDeadLetter) -> bool:
        """Whether it is of a cluster that was there before, in which its table may have had another oid."""
        return str(dead_letter.content["pipeline"]) != self._name

    @staticmethod
    def _fails(dead_letter: StoredDeadLetter, why: object, result: RedriveResult) -> None:
        log.warning("%s at %s: %s", dead_letter.content["relation"], dead_letter.position or "the snapshot", why)
        result.failed += 1

    def _replaced(self, dead_letter: StoredDeadLetter) -> bool:
        """Whether its table has got another key or another topic since, or a successor: a live snapshot has read all
        rows then, under the new key, and has removed the keys of before."""
        version = dead_letter.version
        table = version.table
        if not table.keyed:
            return False  # a message, an event or a row without a key, which no other one replaces
        pinned = self._tables.get(table.oid)
        try:
            if pinned is not None:
                pinned.check_key(table)
        except Refused:
            return True
        if pinned is None:
            return not self._is_foreign(dead_letter)
        return pinned.topic != version.topic

    def _unfollowed(self, dead_letter: StoredDeadLetter) -> str:
        """Why there is no topic any more for a dead letter of an outbox, or of a table without a key, of which no live
        snapshot publishes the row; empty if there is one. An outbox that was made again has the topics of the one
        before."""
        version = dead_letter.version
        table, topic = version.table, version.topic
        if not table.oid or table.keyed:
            return ""
        followed = [
            each.table
            for each in self._tables.values()
            if each.topic == topic and each.table.outbox == table.outbox and not each.table.keyed
        ]
        if any(table.outbox or each.oid == table.oid for each in followed):
            return ""
        what = "no outbox with these topics is" if table.outbox else "its table, without a key and with it, is not"
        return (
            f"it was for {topic!r}, and {what} followed any more. If that stays so, give the dead letter up "
            f"(bottledwater dismiss --tables {table.qualified})."
        )

    def _read_since(self, dead_letter: StoredDeadLetter) -> bool:
        """Whether it is older than the slot, and the snapshot has brought its topic to what its table holds since: it
        has published the row, if it is still there, or has written a dead letter of its own; and the sweep has deleted
        the keys that have no row. A topic that had records and is not swept (it is shared) may have the key that the
        change deleted."""
        state, oid = self._publishing.state, int(dead_letter.content["oid"])
        if oid not in self._tables and self._is_foreign(dead_letter):
            topic = dead_letter.version.topic
            oid = next((of for of, pinned in self._tables.items() if pinned.topic == topic), oid)
        boundary = state.boundaries.get(oid)
        if not dead_letter.earlier or boundary is None:
            return False
        # it is filtered if the topic had nothing to be swept
        return boundary.filtered or state.sweep(oid) is not None

    def _events(self, start: Sequence[int]) -> Iterator[dict[str, Any]]:
        for block in self._letters.blocks(self._events_topic, start):
            for i in range(len(block)):
                yield json.loads(block.value(i) or b"{}")

    def _with_schema(self, version: Version) -> Version:
        """The relation version with the schemas that the registry has today: it may have refused that of the rows then,
        or have lost it since.

        :raises SchemaRefused: it refuses it.
        """
        if version.table.outbox or not self._pipeline.record_format.uses_registry:
            return version
        if (known := self._versions.get(version)) is None:
            published = self._publishing.state.versions(version.table.oid)
            try:
                number = register_value(self._pipeline, version.topic, version.table, published)
            except SchemaRefused as error:
                known = error  # it is not asked again for each of a million
            else:
                key = self._tables[version.table.oid].key_schema
                known = replace(version, key_schema=key, value_schema=number, refused="")
            self._versions[version] = known
        if isinstance(known, SchemaRefused):
            raise known.with_traceback(None)
        return known

    def _encode(self, dead_letter: StoredDeadLetter) -> Records:
        """Encode a dead letter's row as records.

        :raises RecordError: it still cannot be published.
        :raises SchemaRefused: the registry still refuses its schema.
        """
        again = dead_letter.content["again"]
        data = np.frombuffer(bytearray(base64.b64decode(again["message"])), dtype=np.uint8)
        position = Position.parse(dead_letter.position) if dead_letter.position else Position(0)
        xid = again.get("xid", 0)
        change = {
            "kind": data[0],
            "offset": 0,
            "length": len(data),
            "relation": 0,
            "lsn": position.lsn,
            "ordinal": position.ordinal,
            "xid": xid,
            "time": again.get("time", 0),
            "flags": xid << wire.FLAG_XID_SHIFT,
        }
        changes = layout.rows(layout.CHANGE, [change])
        version = self._with_schema(dead_letter.version)
        batch = Batch(position, position, data, changes, (version,))
        headers = wire.HEADERS | (wire.HEADER_XID if self._pipeline.xid_header else 0)
        if version.table.outbox:
            return self._encode_outbox(batch, headers)
        programs = self._publishing.programs([version], copied=dead_letter.copied)
        completed = self._completer.complete(batch, programs)
        if dead_letter.copied:
            # a row of a live snapshot has its label instead, see LiveSnapshot
            headers = wire.HEADERS if self._pipeline.snapshot_headers and not dead_letter.label else 0
        encoded = encode_changes(
            completed,
            programs.for_older,
            headers=headers,
            largest=self._publishing.largest_record,
            facts=dead_letter.facts,
        )
        if dead_letter.copied:
            encoded.records.table["event"] = wire.EVENT_SNAPSHOT
        rejections = [*encoded.rejections, *oversized(self._publishing, encoded.records)]
        reasons = [*completed.failed.values(), *(rejection.reason for rejection in rejections)]
        if reasons:
            raise RecordError("; ".join(reasons))
        return replace(_trimmed(encoded.records), label=dead_letter.label)

    def _encode_outbox(self, batch: Batch, headers: int) -> Records:
        """Make a record of a row, or of a message, of an outbox.

        :raises RecordError: it still cannot be published.
        """
        (version,) = batch.versions
        if not version.table.oid:
            prefix = pgoutput.message(bytes(batch.data)).prefix
            if (now := self._mapping.message_topic(prefix)) != version.topic:
                raise RecordError(
                    f"messages with the prefix {prefix!r} went to {version.topic!r}, and by the setting messages they "
                    f"go to {now or 'no topic'!r} now"
                )
        of = self._outbox if version.table.oid else self._messages
        assert of is not None
        of.prepare(batch)
        records, rejections = of.records(batch, headers)
        if wrong := [*rejections, *oversized(self._publishing, records)]:
            raise RecordError("; ".join(rejection.reason for rejection in wrong))
        return _trimmed(records)

    def _newest(self, wanted: Mapping[str, Collection[bytes]]) -> Newest:
        """What the topics have of the keys of the dead letters. A row of the first snapshot has no position: whether it
        is newer than a dead letter is decided by the source's row, not by comparing the clocks of two hosts.

        :param wanted: the keys by their topics.
        """
        of_events = self._letters.start(self._events_topic)
        found = Newest(unsure_events=of_events is None)
        # others may have come since the pipeline has begun in a topic
        theirs = shared(self._pipeline, self._publishing.state, sorted(wanted))
        for topic, keys in wanted.items():
            looked_for = KeySet(keys)
            if (start := self._letters.start(topic)) is None or topic in theirs:
                found.unsure.add(topic)
            for block in self._letters.blocks(topic, start or ()) if keys else ():
                for i in block.having(looked_for):
                    pos = (block.header(i, "pos") or b"").decode()
                    # a snapshot's row may have headers, too: a position of zeros
                    copied = not pos.strip("0/")
                    newest = shown(block.header(i, "snapshot")) if copied else pos
                    found.add(topic, block.key(i), newest, copied=copied)
        for event in self._events(of_events or ()):
            if event.get("event") == "truncate" and of_source(event.get("pipeline", self._name), self._name):
                for topic in set(event["topics"]) & set(wanted):
                    found.add(topic, None, event["pos"])
        return found

    def _current(self, ready: Iterable[tuple[StoredDeadLetter, Records]]) -> dict[bytes, SourceRow]:
        """What the source holds today for each dead letter with a key, by one look-up for all dead letters of a
        relation version."""
        by_table: dict[tuple[int, bool], list[tuple[StoredDeadLetter, SourceTable, pgoutput.RowMessage]]] = defaultdict(
            list
        )
        for dead_letter, _ in ready:
            if (table := dead_letter.table).key:
                message = with_key(table, pgoutput.row(base64.b64decode(dead_letter.content["again"]["message"])))
                by_table[id(table), dead_letter.copied].append((dead_letter, table, message))
        held: dict[bytes, SourceRow] = {}
        for (_, copied), dead_letters in by_table.items():
            table = dead_letters[0][1]
            converted = {c.name for c in table.columns if copied and types.mapping(c.type).convert and not c.mask}
            keys = {row_key(table, side) for _, _, m in dead_letters for side in (m.old, m.new) if side is not None}
            xids = [int(each.content["again"].get("xid", 0)) for each, _, _ in dead_letters]
            # a snapshot's row has no transaction: it was read after the table was taken in
            since = self._tables[table.oid].oldest_xid if copied else oldest(xids)
            found = self._completer.current.read(
                table, sorted(keys), range(len(table.columns)), as_text=converted, since=since
            )
            for dead_letter, _, message in dead_letters:
                held[dead_letter.key] = compare(table, message, found)
        return held

    def _send(self, todo: list[tuple[StoredDeadLetter, Records]], result: RedriveResult) -> None:
        """Publish the records of dead letters and remove these, in this order, as many in one transaction as Kafka
        takes in time. Those whose records it refuses stay: they are found by halving."""
        most, tried, closed = AT_ONCE, 0, dict[str, StateRecord | None]()

        def work() -> None:
            nonlocal tried, closed
            known = self._publishing.state.letters
            if tried and all(known.get(key) == count for key, count in closed.items()):
                return  # the outcome of the attempt before was unknown: it was committed
            sizes = (int(records.sizes().sum()) + RECORD_OVERHEAD + 64 for _, records in todo[:most])
            tried = fitting(sizes, self._publishing.pace.limit)
            some = [dead_letter for dead_letter, _ in todo[:tried]]
            closed = self._letters.closed(
                Counter(letters_key(int(each.content["oid"]), str(each.content["by"])) for each in some)
            )
            batches = [*(records for _, records in todo[:tried]), self._letters.removed(each.key for each in some)]
            self._publishing.transact(batches, closed, divisible=tried > 1)

        while todo:
            tried = 0
            try:
                self._publishing.run(work)
            except RecordRefused as error:
                most = max(1, tried // 2)
                if tried == 1:
                    self._fails(todo.pop(0)[0], error, result)
                continue
            for _, records in todo[:tried]:
                result.published += bool(len(records))
                result.overtaken += not len(records)
            del todo[:tried]
            most = min(2 * most, AT_ONCE)


def _trimmed(records: Records) -> Records:
    """The records without the room that is left: it is for many rows, and many letters are kept until they are
    sent."""
    parts = ("key", "value", "headers")
    table = records.table
    used = max(int((table[part] + np.maximum(table[f"{part}_length"], 0)).max(initial=0)) for part in parts)
    return replace(records, data=records.data[:used].copy())
