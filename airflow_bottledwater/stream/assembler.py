"""Assembles transactions from the stream's messages, filters them at the boundary, and cuts them into batches.

The loop over messages is compiled; Python only handles what is rare in a transaction (a Relation message, a TRUNCATE,
a logical message).
The rules are those of :class:`~airflow_bottledwater.model.lsn.Position` and
:class:`~airflow_bottledwater.model.boundary.Boundary`; tests compare the kernel with them.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Mapping

import numpy as np
import numpy.typing as npt

from airflow_bottledwater import compiled
from airflow_bottledwater.encoding import hashes
from airflow_bottledwater.encoding.kernels import sha256
from airflow_bottledwater.encoding.layout import CHANGE
from airflow_bottledwater.encoding.masks import HASH, Mask
from airflow_bottledwater.encoding.wire import EPOCH_MICROS
from airflow_bottledwater.errors import BottledWaterError, ProtocolError, Refused, TableRefused
from airflow_bottledwater.model.boundary import Boundary
from airflow_bottledwater.model.lsn import Position
from airflow_bottledwater.model.relation import SourceTable
from airflow_bottledwater.model.version import Version
from airflow_bottledwater.postgres import ddl, pgoutput
from airflow_bottledwater.postgres.receive import MessageBlock
from airflow_bottledwater.postgres.replication import XLOG_HEADER
from airflow_bottledwater.publish.batch import Batch
from airflow_bottledwater.stream.assemble import (
    BOUNDARY,
    CUT,
    DONE,
    FULL,
    LEFT_OUT,
    LOGICAL,
    RELATION,
    ROOM,
    SHAPE,
    STATE,
    TABLE,
    TRUNCATE,
    UNEXPECTED,
    UNKNOWN,
    assemble,
)


def _foreign(message: pgoutput.RelationMessage) -> BottledWaterError | None:
    return Refused(f"Table {message.schema}.{message.name} is not one of the pipeline's.")


def _stop(oid: int, why: TableRefused) -> None:
    raise why


class TransactionAssembler:
    """Takes blocks of messages, and returns batches of changes.

    :param start: P; changes at or before it are left out.
    :param boundaries: by table oid, the boundary of its snapshot, which contains some of the changes already.
    :param resolve: makes a :class:`Version` from a Relation message and the table's version before it (it asks the
        catalog and the registry); None for a table that is not the pipeline's.
    :param batch_bytes: bytes at which a batch ends, at the next commit.
    :param largest_transaction: bytes at which a single transaction is cut.
    :param again: asks the registry again for the schema of a version to which it was refused.
    :param unknown: makes the error for a change of a table that is not the pipeline's; None if the table's changes are
        to be left out.
    :param aside: is told of a table whose changes cannot be published, and are left out from now on, and why. It may
        raise an error instead.
    :ivar partition: is told of each Relation message of a partition that is published as a table above it, with that
        table's first, before its change is taken.
    :ivar position: the end of the last batch, P at first.
    """

    def __init__(
        self,
        start: Position,
        boundaries: Mapping[int, Boundary],
        resolve: Callable[[pgoutput.RelationMessage, Version | None], Version | None],
        *,
        batch_bytes: int,
        largest_transaction: int,
        again: Callable[[Version], Version] = lambda version: version,
        unknown: Callable[[pgoutput.RelationMessage], BottledWaterError | None] = _foreign,
        aside: Callable[[int, TableRefused], None] = _stop,
    ) -> None:
        self.position = start
        self._messages_as: Callable[[str], Version | None] | None = None
        self._statement: Callable[[bytes, Callable[[int], Version | None]], bytes] | None = None
        #: the numbers of the versions of logical messages, by their topics
        self._of_messages: dict[str, int] = {}
        self._boundaries = dict(boundaries)
        self._resolve, self._again, self._refuse, self._aside = resolve, again, unknown, aside
        self.partition: Callable[[pgoutput.RelationMessage, pgoutput.RelationMessage], None] = lambda *_: None
        #: the last two Relation messages, until it is known whether they are those of a partition
        self._pair: tuple[pgoutput.RelationMessage, pgoutput.RelationMessage] | None = None
        self._versions: list[Version] = []
        self._messages: dict[int, pgoutput.RelationMessage] = {}
        self._current: dict[int, int] = {}
        #: why changes of a table cannot be published that its boundary does not contain
        self._refused: dict[int, TableRefused] = {}
        #: the tables whose changes are left out
        self._left_out = set[int]()
        self._state = np.zeros(1, dtype=STATE)[0]
        self._state["batch_bytes"], self._state["largest_transaction"] = batch_bytes, largest_transaction
        self._out: npt.NDArray[np.uint8]
        self._changes: npt.NDArray[np.void]
        self._allocate()
        self._announced: tuple[pgoutput.RelationMessage | None, Position] = None, Position(0)
        self._block: MessageBlock | None = None
        self._tables: npt.NDArray[np.void] = np.zeros(0, dtype=TABLE)
        # the first are no column's: an empty array has no address
        self._shapes: npt.NDArray[np.void] = np.zeros(1, dtype=SHAPE)
        self._constants: npt.NDArray[np.uint8] = np.zeros(1, dtype=np.uint8)
        # the key of hashes and scratch memory, see kernels.sha256
        self._words: npt.NDArray[np.uint32] = np.zeros(sha256.WORDS, dtype=np.uint32)
        self._room: npt.NDArray[np.uint8] = np.zeros(sha256.ROOM, dtype=np.uint8)
        distinct = dict.fromkeys(boundary for boundary in self._boundaries.values() if boundary.filtered)
        self._boundary_numbers = {boundary: number for number, boundary in enumerate(distinct)}
        self._bounds, self._running = _boundary_table(list(distinct))
        self.restart()

    def _allocate(self) -> None:
        self._out, self._changes = np.empty(1 << 20, dtype=np.uint8), np.empty(1 << 12, dtype=CHANGE)

    def rest(self) -> None:
        """Give up the memory that large transactions have taken, if no change waits in it."""
        if not self._state["count"]:
            self._allocate()

    def take_messages(
        self,
        messages_as: Callable[[str], Version | None],
        statement: Callable[[bytes, Callable[[int], Version | None]], bytes] | None = None,
    ) -> None:
        """Take logical messages, too, which PostgreSQL is asked for; without this, they are passed over.

        :param messages_as: the version as which messages with a prefix are published; None for those that are left out.
        :param statement: makes what is published of a DDL statement, see :class:`~airflow_bottledwater.stream.ddl`.
        """
        self._messages_as, self._statement = messages_as, statement

    def _now_of(self, oid: int) -> Version | None:
        """The version that a table's rows have here; None if none has come yet."""
        return self._versions[self._current[oid]] if oid in self._current else None

    def leave_out(self, oids: Iterable[int]) -> None:
        """Leave out the changes of these tables from now on."""
        for oid in oids:
            self._left_out.add(oid)
            if oid in self._messages:
                self._index(oid)

    def restart(self) -> None:
        """Forget what is only partly received: a new session sends everything after the position again."""
        state = self._state
        state["in_transaction"] = state["count"] = state["bytes"] = state["whole_count"] = state["whole_bytes"] = 0
        state["from_lsn"], state["from_ordinal"] = self.position
        state["whole_lsn"] = self.position.lsn
        self._block = self._pair = None

    @property
    def next_place(self) -> Position:
        """The position of the change that would have come next in the transaction that has begun to come."""
        return Position(int(self._state["final_lsn"]), int(self._state["ordinal"]) + 1)

    @property
    def next_table(self) -> pgoutput.RelationMessage | None:
        """Whose change would have come next, if its Relation message was the last one that came."""
        message, place = self._announced
        return message if place == self.next_place else None

    def abandon(self) -> Batch:
        """All changes that have come, as a batch, and none of those that are left of the transaction that has begun to
        come: the next session is to begin behind it."""
        batch = self._batch(
            int(self._state["count"]), int(self._state["bytes"]), Position(int(self._state["final_lsn"]) + 1, 0)
        )
        self.restart()
        return batch

    def pass_over(self, lsn: int) -> Batch:
        """An empty batch that moves the position: the next session is to begin at ``lsn``, and what was committed
        before is left out."""
        self.restart()
        self._state["whole_lsn"] = lsn
        return self._emit()

    @property
    def unfinished(self) -> bool:
        """Whether a transaction has begun to come, and not all of it."""
        return bool(self._state["in_transaction"])

    @property
    def statistics(self) -> dict[str, int]:
        """How many transactions were received, and how many changes, in how many transactions, were left out."""
        return {name: int(self._state[name]) for name in ("transactions", "skipped_changes", "skipped_transactions")}

    @property
    def skipped_by_table(self) -> dict[str, int]:
        """For each table's name, how many transactions had changes that were left out: at the boundary, or because it
        is not followed. Any thread may ask."""
        tables, skipped = self._tables, Counter[str]()
        for oid, count in zip(tables["oid"].tolist(), tables["skipped_transactions"].tolist(), strict=True):
            if count:
                message = self._messages[oid]
                # one that is dropped and made again, again and again, has a new oid each time
                skipped[f"{message.schema}.{message.name}"] += count
        return skipped

    def _index(self, oid: int) -> None:
        """Enter a table's new version, or that it has none, into the kernel's table."""
        at = int(np.searchsorted(self._tables["oid"], oid))
        if at == len(self._tables) or self._tables[at]["oid"] != oid:
            boundary = self._boundaries.get(oid)
            number = -1 if boundary is None else self._boundary_numbers.get(boundary, -1)
            self._tables = np.insert(self._tables, at, np.array([(oid, 0, number, 0, 0, 0, 0, 0)], dtype=TABLE))
        if oid in self._left_out:
            # also if it could be published again: what was left out before is read again, for which the stream begins
            # anew
            self._tables[at]["version"] = LEFT_OUT
        else:
            self._tables[at]["version"] = -1 if oid in self._refused else self._current.get(oid, -1)
            if self._tables[at]["version"] >= 0:
                self._shape(at, self._versions[self._current[oid]].table)

    def _shape(self, at: int, table: SourceTable) -> None:
        """Enter which columns of a table's rows are left out or masked, if some are."""
        entry = self._tables[at]
        entry["columns"] = entry["first"] = entry["grows"] = 0
        if not table.left_out and not any(column.mask for column in table.columns):
            return
        shapes = np.zeros(len(table.columns) + len(table.left_out), dtype=SHAPE)
        for place, column in zip(table.places, table.columns, strict=True):
            mask = Mask.of(column)
            form = 0
            if mask.kind == HASH:
                form, self._words = hashes.FORMS[mask.oid], hashes.known(mask.key).words()
            shapes[place] = (mask.kind, mask.count, len(self._constants), len(mask.text), form)
            self._constants = np.concatenate([self._constants, np.frombuffer(mask.text, dtype=np.uint8)])
            # in the old row and in the new one
            entry["grows"] += 2 * (sha256.DIGITS if mask.kind == HASH else len(mask.text)) + 8
        entry["columns"], entry["first"] = len(shapes), len(self._shapes)
        self._shapes = np.concatenate([self._shapes, shapes])

    def add(self, block: MessageBlock) -> None:
        """Add the next block; before another one, call :meth:`cut` until it returns None."""
        assert self._block is None
        self._block, self._state["next"] = block, 0

    def cut(self) -> Batch | None:
        """The next full batch, or None when the block is used up; what is left of it waits for the next block or
        :meth:`flush`.

        :raises ProtocolError: PostgreSQL sent something that is not expected.
        """
        while self._block is not None:
            block = self._block
            if self._pair is not None:
                self._tell_partition(block, *self._pair)
            why = assemble(
                block.data, block.offsets, self._state, self._tables, self._shapes, self._constants, self._words,
                self._room, self._bounds, self._running, self._changes, self._out
            )  # fmt: skip
            if why == DONE:
                self._block = None
            elif why == FULL:
                return self._emit()
            elif why == CUT:
                # first the whole transactions before it; then, if the transaction alone is too large, a part of it
                return self._emit() if self._state["whole_count"] else self._emit_part()
            elif why == ROOM:
                self._grow()
            elif why == RELATION:
                self._take_relation(self._payload())
                self._state["next"] += 1
            elif why in (TRUNCATE, LOGICAL):
                take = self._take_truncate if why == TRUNCATE else self._take_message
                if (before := take(self._payload())) is not None:
                    return before
                self._state["next"] += 1
                if not self._state["in_transaction"] and self._state["bytes"] >= self._state["batch_bytes"]:
                    return self._emit()
            elif why == UNKNOWN and self._state["whole_count"]:
                return self._emit()  # what is whole before it can be published
            elif why == UNKNOWN:
                self._leave_out(int.from_bytes(self._payload()[1:5], "big"))
            elif why == UNEXPECTED:
                raise ProtocolError(
                    f"PostgreSQL sent a message of kind {chr(self._payload()[0])!r}, which was not asked for and may "
                    "change rows; nothing of it is published.",
                    "A slot with two_phase sends such messages: make one without.",
                )
            else:
                raise ProtocolError("PostgreSQL sent a message that does not follow the replication protocol.")
        return None

    def flush(self, *, empty: bool) -> Batch | None:
        """A batch of the whole transactions that were received so far; None if there are none.

        :param empty: whether to return a batch without changes that only moves the position, if it can be moved.
        """
        moved = self._state["whole_lsn"] > self.position.lsn
        if self._state["whole_count"] or (empty and moved):
            return self._emit()
        return None

    def _payload(self) -> bytes:
        assert self._block is not None
        begin, end = self._block.offsets[self._state["next"] : self._state["next"] + 2]
        return bytes(self._block.data[begin + XLOG_HEADER : end])

    def _sent(self) -> int:
        """When PostgreSQL has sent the next message, in milliseconds since 1970."""
        assert self._block is not None
        end = self._block.offsets[self._state["next"]] + XLOG_HEADER
        return (int.from_bytes(bytes(self._block.data[end - 8 : end]), "big", signed=True) + EPOCH_MICROS) // 1000

    def _grow(self) -> None:
        if self._state["count"] == len(self._changes):
            self._changes = np.concatenate([self._changes, np.empty_like(self._changes)])
        else:
            self._out = np.concatenate([self._out, np.empty_like(self._out)])

    def _take_relation(self, data: bytes) -> None:
        message = pgoutput.relation(data)
        if (before := self.next_table) is not None:
            self._pair = before, message
        self._announced = message, self.next_place
        known = self._messages.get(message.oid)
        if message.oid in self._left_out:
            self._messages[message.oid] = message
            self._index(message.oid)
            return
        foreign = message.oid not in self._current and message.oid not in self._refused
        if known == message and (foreign or not self._may_hide(message)):
            self._separate(message.oid)  # it is repeated in every session, and after ANALYZE
            return
        current, refused = self._current.get(message.oid), self._refused.get(message.oid)
        try:
            version = self._resolve(message, None if current is None else self._versions[current])
            self._refused.pop(message.oid, None)
        except TableRefused as error:
            # the changes that follow may all be left out: those of before a table was taken up again, with an earlier
            # key
            version, self._refused[message.oid] = None, error
        # not before: after an outage, the next session sends the same message, which is not resolved yet
        self._messages[message.oid] = message
        if version is None:
            # if it has a boundary, it was dropped, and another one with its name was taken up
            if message.oid in self._refused or message.oid in self._boundaries:
                self._index(message.oid)
            return
        if known == message and current is not None and refused is None and version is self._versions[current]:
            self._separate(message.oid)  # what it does not show has not changed
            return
        self._current[message.oid] = len(self._versions)
        self._versions.append(version)
        self._index(message.oid)

    def _tell_partition(
        self, block: MessageBlock, above: pgoutput.RelationMessage, message: pgoutput.RelationMessage
    ) -> None:
        """Tell of a partition's Relation message. It comes directly behind that of the table as which the partition is
        published, and before a change of that table (maybe_send_schema, src/backend/replication/pgoutput/pgoutput.c).
        Those of two tables that are truncated together come so, too, but before a TRUNCATE."""
        for number in range(int(self._state["next"]), block.count):
            begin = block.offsets[number]
            if block.data[begin] == ord("k"):
                continue  # a keepalive may come anywhere
            change = bytes(block.data[begin + XLOG_HEADER : begin + XLOG_HEADER + 5])
            self._pair = None
            if change[:1] in (b"I", b"U", b"D") and int.from_bytes(change[1:], "big") == above.oid:
                self.partition(above, message)
            return

    def _may_hide(self, message: pgoutput.RelationMessage) -> bool:
        """Whether a table may have changed although its message is the same: under FULL, it does not show the primary
        key, and of an array never how many dimensions are declared; nor does it show that a column which is left out or
        masked and another one have exchanged their names."""
        current = self._current.get(message.oid)
        table = None if current is None else self._versions[current].table
        columns = () if table is None else table.columns
        return (
            message.identity == "f"
            or any(column.mask or (column.type.kind == "b" and column.type.element) for column in columns)
            or bool(table and table.left_out)
        )

    def _separate(self, oid: int) -> None:
        """Give a table's version, whose Relation message has come again, a number that no waiting change has.

        Between the changes before and behind this message, all rows may have been written anew (ALTER TABLE with USING,
        or a column that was dropped and made again), and PostgreSQL sends nothing of that: a value of before is not
        that of an update behind it which has left the value unchanged. Values are only passed on among changes of one
        number (kernels.unchanged).
        """
        current = self._current.get(oid, -1)
        taken: npt.NDArray[np.bool_] = np.zeros(len(self._versions), dtype=np.bool_)
        taken[self._changes["relation"][: self._state["count"]]] = True
        if current < 0 or oid in self._refused or not taken[current]:
            return
        # numbers are used again: ANALYZE repeats the message for as long as the stream runs
        version = self._versions[current]
        free = (number for number in np.flatnonzero(~taken).tolist() if self._versions[number] is version)
        self._current[oid] = next(free, len(self._versions))
        if self._current[oid] == len(self._versions):
            self._versions.append(version)
        self._tables["version"][self._tables["oid"] == oid] = self._current[oid]

    def _take_truncate(self, data: bytes) -> Batch | None:
        """Add a TRUNCATE; returns what is whole before it instead, if that can be published and it perhaps cannot."""
        state = self._state
        final, xid = int(state["final_lsn"]), int(state["xid"])
        if self.position.passed(final, int(state["ordinal"]) + 1):
            state["ordinal"] += 1
            return None
        message = pgoutput.truncate(data)
        oids = [
            oid for oid in message.oids if oid not in self._boundaries or not self._boundaries[oid].contains(final, xid)
        ]
        doubtful = [
            oid for oid in oids if oid not in self._left_out and (oid in self._refused or oid not in self._current)
        ]
        if doubtful and state["whole_count"]:
            return self._emit()
        for oid in doubtful:
            self._leave_out(oid)
        state["ordinal"] += 1
        oids = [oid for oid in oids if oid in self._current and oid not in self._left_out]
        if not oids:
            return None
        kept = bytes(data[:1]) + len(oids).to_bytes(4, "big") + bytes(data[5:6])
        kept += b"".join(oid.to_bytes(4, "big") for oid in oids)
        self._keep(kept, self._current[oids[0]], Position(final, int(state["ordinal"])), xid, int(state["time"]))
        return None

    def _now(self) -> dict[str, int]:
        """The kernel's state: to ask the array for one of its numbers takes as long as to ask it for all."""
        return dict(zip(STATE.names or (), self._state.item(), strict=True))

    def _keep(self, message: bytes, relation: int, place: Position, xid: int, time: int) -> None:
        """Add a change that is no row."""
        state = self._now()
        while state["count"] == len(self._changes) or state["bytes"] + len(message) > len(self._out):
            self._grow()
        self._changes[state["count"]] = (message[0], state["bytes"], len(message), relation, *place, xid, time, 0)
        self._out[state["bytes"] : state["bytes"] + len(message)] = np.frombuffer(message, dtype=np.uint8)
        self._state["count"], self._state["bytes"] = state["count"] + 1, state["bytes"] + len(message)

    def _take_message(self, data: bytes) -> Batch | None:
        """Add a logical message; returns what has to be published before it instead.

        One of a transaction has its place among the transaction's changes. One of none is at its own place in the WAL,
        as if it were a transaction: PostgreSQL sends it when it comes to that place, as it sends a transaction when it
        comes to the commit. What is known of the place is its end (logicalmsg_decode,
        src/backend/replication/logical/decode.c), at which the next record may begin; so the last byte stands for it.

        :raises ProtocolError: it is inside a transaction and belongs to none, or the other way round.
        """
        if self._messages_as is None:
            return None
        state, message = self._now(), pgoutput.message(data)
        if message.transactional != bool(state["in_transaction"]):
            raise ProtocolError("PostgreSQL sent a logical message at a place that is not its own.")
        place = Position(state["final_lsn"], state["ordinal"] + 1)
        if not message.transactional:
            place = Position(message.lsn - 1, 1)
        version = None if self.position.passed(*place) else self._messages_as(message.prefix)
        if version is not None and message.prefix == ddl.PREFIX and self._statement is not None:
            data = pgoutput.with_content(data, self._statement(message.content, self._now_of))
        # by the bytes that are kept: the content may be another one than was received
        large = state["bytes"] - state["whole_bytes"] + len(data) > state["largest_transaction"]
        if version is not None and state["count"] > state["whole_count"] and large:
            return self._emit() if state["whole_count"] else self._emit_part()
        if message.transactional:
            # it is counted whether it is published or not: which are published may change while P is behind it
            self._state["ordinal"] = place.ordinal
        if version is None:
            return None
        if version.topic not in self._of_messages:
            self._of_messages[version.topic] = len(self._versions)
            self._versions.append(version)
        relation = self._of_messages[version.topic]
        if message.transactional:
            self._keep(data, relation, place, state["xid"], state["time"])
            return None
        self._keep(data, relation, place, 0, self._sent())
        self._state["whole_count"], self._state["whole_bytes"] = self._state["count"], self._state["bytes"]
        self._state["whole_lsn"] = max(state["whole_lsn"], message.lsn)
        return None

    def _leave_out(self, oid: int) -> None:
        """Leave out the changes of a table from now on, if it is not one of the pipeline's, or they cannot be
        published.

        :raises BottledWaterError: they must not be left out, and cannot be published.
        """
        if (refused := self._refused.get(oid)) is not None:
            self._aside(oid, refused)
            self._left_out.add(oid)
            self._index(oid)
            return
        if (message := self._messages.get(oid)) is None:
            raise ProtocolError("PostgreSQL sent a change before its table's Relation message.")
        if (error := self._refuse(message)) is not None:
            raise error
        self._left_out.add(oid)
        self._index(oid)

    def _emit(self) -> Batch:
        state = self._state
        batch = self._batch(int(state["whole_count"]), int(state["whole_bytes"]), Position(int(state["whole_lsn"]), 0))
        self._keep_rest(int(state["whole_count"]), int(state["whole_bytes"]))
        return batch

    def _emit_part(self) -> Batch:
        state = self._state
        batch = self._batch(
            int(state["count"]), int(state["bytes"]), Position(int(state["final_lsn"]), int(state["ordinal"]))
        )
        self._keep_rest(int(state["count"]), int(state["bytes"]))
        return batch

    def _batch(self, count: int, size: int, end: Position) -> Batch:
        changes = self._changes[:count].copy()
        used = set(changes["relation"].tolist())
        for row in changes[changes["kind"] == pgoutput.TRUNCATE]:
            # a TRUNCATE can name several tables, but its change refers only to the first
            message = pgoutput.truncate(bytes(self._out[row["offset"] : row["offset"] + row["length"]]))
            named = {self._versions[index].table.oid for index in used}
            used |= {self._current[oid] for oid in message.oids if oid not in named}
        order = np.array(sorted(used), dtype=np.int64)
        changes["relation"] = np.searchsorted(order, changes["relation"])
        for index in order.tolist():
            if self._versions[index].refused:
                self._versions[index] = self._again(self._versions[index])
        batch = Batch(
            self.position, end, self._out[:size].copy(), changes, tuple(self._versions[int(index)] for index in order)
        )
        self.position = end
        return batch

    def _keep_rest(self, count: int, size: int) -> None:
        state = self._state
        rest = int(state["count"]) - count
        if rest:
            self._changes[:rest] = self._changes[count : count + rest].copy()
            self._changes[:rest]["offset"] -= size
            length = int(state["bytes"]) - size
            self._out[:length] = self._out[size : size + length].copy()
        state["count"] = rest
        state["bytes"] -= size
        state["whole_count"] = state["whole_bytes"] = 0


def _boundary_table(boundaries: list[Boundary]) -> tuple[npt.NDArray[np.void], npt.NDArray[np.int64]]:
    """The boundaries as rows for the kernel, and the transactions in progress of all their snapshots."""
    running = [xid for boundary in boundaries for xid in boundary.snapshot.running]
    table = np.zeros(len(boundaries), dtype=BOUNDARY)
    first = 0
    for i, boundary in enumerate(boundaries):
        snapshot = boundary.snapshot
        end = first + len(snapshot.running)
        table[i] = (boundary.insert_lsn, snapshot.xmin, snapshot.xmax, first, end, 0)
        first = end
    return table, np.array(running or [0], dtype=np.int64)


def warm_up() -> None:
    """See :func:`airflow_bottledwater.compiled.warm_up`."""
    compiled.warm_up("stream", _assemble_nothing)


def _assemble_nothing() -> None:
    def resolve(*_: object) -> Version:
        raise AssertionError("an empty block has no Relation message")

    assembler = TransactionAssembler(Position(0), {}, resolve, batch_bytes=1, largest_transaction=1)
    assembler.add(MessageBlock(np.zeros(1, dtype=np.uint8), np.zeros(1, dtype=np.int64)))
    assembler.cut()
