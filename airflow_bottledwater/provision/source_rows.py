"""Dead letters as they are read again, and what decides whether one may still be published: newer records, and what the
source holds."""

from __future__ import annotations

import base64
import time
from collections.abc import Collection, Sequence
from dataclasses import dataclass, fields, replace
from typing import Any

import msgspec

from airflow_bottledwater.decoding import prepare
from airflow_bottledwater.encoding import layout, masks, wire
from airflow_bottledwater.encoding.mapping import TableMapping
from airflow_bottledwater.encoding.masks import Mask
from airflow_bottledwater.errors import RecordError
from airflow_bottledwater.kafka.publisher import Records
from airflow_bottledwater.model.lsn import Position
from airflow_bottledwater.model.relation import SourceTable
from airflow_bottledwater.model.version import Version
from airflow_bottledwater.postgres import pgoutput
from airflow_bottledwater.publish.current import FoundRows, row_key
from airflow_bottledwater.publish.unsent import GONE

_SNAPSHOT = "r"
#: what can be done if a dead letter has less than is published today
READ_AGAIN = (
    "Read the table again by a live snapshot with --sweep, which also removes keys that have no row any more, and "
    "dismiss the dead letter. (In a topic that others write to, too, nothing is swept: read it without --sweep, and "
    "send the tombstone of a deleted key yourself.)"
)

#: what only people read of a dead letter
_SHOWN = ("columns", "key", "error")

prepare(SourceTable)


def _members(raw: bytes | msgspec.Raw, as_written: str) -> dict[str, Any]:
    """The members of a JSON object.

    :param as_written: one that is not decoded; those that only people read are left out.
    """
    found: dict[str, Any] = msgspec.json.decode(raw, type=dict[str, msgspec.Raw])
    return {
        name: each if name == as_written else msgspec.json.decode(each)
        for name, each in found.items()
        if name not in _SHOWN
    }


@dataclass(frozen=True, slots=True)
class StoredDeadLetter:
    """A dead letter as it was written.

    :param key: of its record.
    :param content: what is decoded of it, see :meth:`read`.
    :param earlier: whether it was written before the pipeline's slot was made, by one of before.
    """

    key: bytes
    content: dict[str, Any]
    earlier: bool = False

    @classmethod
    def read(cls, key: bytes, value: bytes, tables: dict[bytes, SourceTable], *, earlier: bool) -> StoredDeadLetter:
        """Decode a dead letter, but for what only people read.

        :param tables: the tables of those that were decoded before, as they were written: each letter has all of its
            own, of which most of it consists.
        """
        content = _members(value, "again")
        if "again" in content:
            content["again"] = _members(content["again"], "table")
            written = bytes(content["again"]["table"])
            if (table := tables.get(written)) is None:
                table = tables[written] = msgspec.json.decode(written, type=SourceTable)
            content["again"]["table"] = table
        return cls(key, content, earlier)

    @property
    def position(self) -> str:
        """The position of its change; empty of a snapshot's row."""
        return str(self.content["pos"])

    @property
    def copied(self) -> bool:
        """Whether it is of a snapshot's row."""
        return str(self.content["op"]) == _SNAPSHOT

    @property
    def table(self) -> SourceTable:
        """Its table as it was then; all dead letters of one relation version have the same object."""
        found: SourceTable = self.content["again"]["table"]
        return found

    @property
    def version(self) -> Version:
        """Its table as it was published then, with the topic."""
        again = self.content["again"]
        return Version(**{each.name: again[each.name] for each in fields(Version) if each.name in again})

    @property
    def label(self) -> str:
        """See :class:`~airflow_bottledwater.kafka.publisher.Records`."""
        return str(self.content["again"].get("label", ""))

    @property
    def facts(self) -> layout.Rows | None:
        """What an envelope tells of a snapshot's row; None for a change."""
        if not self.copied:
            return None
        shown = int(self.content["again"].get("lsn", 0))
        return layout.facts(wire.FROM_LIVE if self.label else wire.FROM_SNAPSHOT, time.time(), shown)

    def as_published(self, today: TableToday) -> StoredDeadLetter:
        """The dead letter as its table is published today.

        :raises RecordError: a mask cannot be made from what it holds.
        """
        if today.published is today.written:
            return self
        message = pgoutput.row(base64.b64decode(self.content["again"]["message"]))
        if today.lost and message.new is not None:
            raise RecordError(
                f"Column {today.lost!r} of {today.published.qualified} had another mask, or another key of hashes, "
                "when the dead letter was written, and what is published of it today cannot be made from that.",
                f"{READ_AGAIN} Or give the column the mask of before.",
            )
        if today.lost:
            # a deletion needs only the key
            message = message.with_old_key(
                [c for c, each in enumerate(self.table.columns) if each.name in self.table.key]
            )
        row = message.masked(today.masks).without(today.left_out)
        again = {**self.content["again"], "table": today.published, "message": base64.b64encode(row.encode()).decode()}
        return replace(self, content={**self.content, "again": again})

    def lacks(self, today: SourceTable | None) -> str:
        """A column of its table that is published today and that it has no value of, or one of another type, as the
        column was added, altered or left out; empty if there is none.

        :param today: the table; None if it is gone.
        """
        had = {(c.name, c.type.oid) for c in self.table.columns}
        columns = today.columns if today is not None and today.key else ()
        return next((c.name for c in columns if (c.name, c.type.oid) not in had), "")

    def overtaken(self, newest: str) -> bool:
        """Whether a record or a TRUNCATE is newer than its row.

        :param newest: the position of the newest one; empty for none.
        """
        if not self.copied:
            return newest > self.position
        return newest >= str(Position(self.content["again"]["lsn"]))


@dataclass(frozen=True, slots=True)
class TableToday:
    """A table of dead letters and how it is published today, made once for all of them: without the columns that are
    not published any more, and with the others, and the row filter, as they are published today; but those of the key
    as they were, since its bytes must not change.

    :param written: the table as it was.
    :param published: the table as it is published today; the same object if that is how it was.
    :param left_out: the columns, by number, that are not published any more.
    :param masks: what is to be done with the values of each column.
    :param lost: a column whose values under its mask of today cannot be made from what a dead letter holds; empty if
        there is none.
    """

    written: SourceTable
    published: SourceTable
    left_out: Collection[int]
    masks: Sequence[Mask]
    lost: str

    @classmethod
    def of(cls, mapping: TableMapping, written: SourceTable, named: tuple[str, str] | None = None) -> TableToday:
        """
        :param named: schema and name that the table has today, by which it has options: another one may bear the name
            that it had when the dead letters were written. None: those.
        """
        if not written.oid:
            return cls(written, written, (), (), "")  # a message has no options of a table
        schema, name = named or (written.schema, written.name)
        table = replace(written, schema=schema, name=name)
        columns = mapping.left_out(schema, name, [column.name for column in table.columns])
        published = mapping.published(schema, name, map(masks.without, table.columns))
        where = mapping.options(schema, name).where
        whole = replace(
            table,
            where=where,
            filtered=table.filtered or bool(where),
            columns=tuple(
                before if before.name in table.key else now
                for now, before in zip(published, table.columns, strict=True)
            ),
        )
        pairs = list(zip(whole.columns, table.columns, strict=True))
        made = [Mask() if now.mask == before.mask else Mask.of(now) for now, before in pairs]
        kept = [pair for c, pair in enumerate(pairs) if c not in columns]
        lost = next((now.name for now, before in kept if not Mask.of(before).gives(Mask.of(now))), "")
        same = not columns and whole == written
        return cls(written, written if same else whole.without(columns), columns, made, lost)


@dataclass(frozen=True, slots=True)
class SourceRow:
    """What the source holds today for a dead letter's keys.

    :param gone: whether no row has the key that the change deleted, or changed to another one; None if that is not
        known.
    :param same: whether the row that the change wrote exists unchanged.
    :param unknown: why one of these is not known; empty if both are.
    """

    gone: bool | None
    same: bool
    unknown: str = ""

    def allows(self, records: Records, i: int) -> bool:
        """Whether a record of the dead letter may be published."""
        return bool(self.gone) if records.table[i]["event"] == wire.EVENT_DELETE else self.same

    def doubt(self, records: Records, rows: Sequence[int]) -> str:
        """Why it is not known whether some records of the dead letter may be published; empty if it is."""
        deletes = all(records.table[i]["event"] == wire.EVENT_DELETE for i in rows)
        return "" if deletes and self.gone is not None else self.unknown


def compare(table: SourceTable, message: pgoutput.RowMessage, found: FoundRows) -> SourceRow:
    """Compare a dead letter's row with what the source holds today."""
    lost = [reason for c, reason in found.unreadable.items() if table.columns[c].name in table.key]
    if lost:
        return SourceRow(gone=None, same=False, unknown=lost[0])
    gone = message.old is None or row_key(table, message.old) not in found.rows
    if message.new is None:
        return SourceRow(gone, same=False)
    key = row_key(table, message.new)
    row = found.rows.get(key)
    if row is None:
        return SourceRow(gone, same=False, unknown=found.unfit.get(key, GONE if key in found.unsent else ""))
    other = [
        c
        for c, value in enumerate(message.new)
        if value.kind in "nb" and c not in found.unreadable
        if (None if value.kind == "n" else value.data) != row[c]
    ]
    unknown = ""
    if other and all(c in found.rewritten for c in other):
        # an ALTER TABLE that writes a table anew is no change of its rows, of which a newer record would follow
        unknown = (
            f"column {table.columns[other[0]].name!r} or its type was altered since, so that it cannot be told whether "
            f"its row has changed. {READ_AGAIN}"
        )
    return SourceRow(gone, same=not other, unknown=unknown)
