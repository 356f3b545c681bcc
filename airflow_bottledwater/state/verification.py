"""What a verification has found, as the command prints it, and without values of rows, as a job reports it."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Any, Literal

import msgspec

from airflow_bottledwater.decoding import prepare
from airflow_bottledwater.state.control_records import VerifiedRecord

Kind = Literal["missing", "surplus", "different", "wrong partition", "unreadable"]

#: differences of a table that are reported one by one
SHOWN = 10
#: and of all tables
_ALL_SHOWN = 100


@dataclass(frozen=True, slots=True)
class Difference:
    """A key in which topic and table differ for good.

    :param kind: ``missing``: the table has it, the topic does not; ``surplus``: the other way round; ``different``: in
        a column; ``wrong partition``: consumers of its own partition do not see it; ``unreadable``: a record that no
        consumer can decode.
    :param key: as text by column.
    :param partition: of the record that counts, and its offset; -1 if the topic has none.
    """

    kind: Kind
    key: Mapping[str, str]
    column: str = ""
    in_table: str = ""
    in_topic: str = ""
    partition: int = -1
    offset: int = -1

    def __str__(self) -> str:
        key = ", ".join(f"{name} = {value}" for name, value in self.key.items())
        at = f" (partition {self.partition}, offset {self.offset})" if self.offset >= 0 else ""
        what = (
            f": {self.column} is {self.in_topic} in the topic and {self.in_table} in the table" if self.column else ""
        )
        if self.kind == "unreadable":
            what = f": {self.in_topic}"
        return f"{self.kind}: {key}{what}{at}"


@dataclass(slots=True)
class TableResult:
    """What was found of one table.

    :param rows: how many rows were compared; of a sample, those of the sample.
    :param verified: False if it cannot be compared, for a ``reason``: its changes are in another topic, say.
    :param dropped: whether it does not exist any more, so that there is nothing to compare.
    :param outbox: whether it is an outbox, whose rows are no state that topics could have.
    :param counts: how many keys differ, by kind.
    :param differences: the first of them.
    :param unsettled: keys that differed, and were changed again whenever they were looked at: nothing is known of them.
    :param unexamined: keys that were not looked at one by one, since too many differ, or seem to.
    :param older: records that were written before the table was altered, and that are as the source was then; of those
        that were looked at one by one.
    :param left_out: columns that are not compared, since PostgreSQL's text does not tell about their values.
    """

    table: str
    topic: str
    rows: int = 0
    verified: bool = True
    reason: str = ""
    counts: dict[str, int] = field(default_factory=dict)
    differences: list[Difference] = field(default_factory=list)
    unsettled: int = 0
    unexamined: int = 0
    older: int = 0
    left_out: list[str] = field(default_factory=list)
    dropped: bool = False
    outbox: bool = False

    @property
    def equal(self) -> bool:
        """Whether no difference was found."""
        return not self.counts

    @property
    def verdict(self) -> str:
        """In a word or two."""
        if self.dropped or self.outbox:
            return "dropped" if self.dropped else "outbox"
        if not self.verified:
            return "not verified"
        if self.counts:
            return "different"
        return "unsettled" if self.unsettled or self.unexamined else "equal"

    def add(self, found: Sequence[Difference]) -> None:
        """Add differences."""
        self.counts = dict(Counter(self.counts) + Counter(each.kind for each in found))
        self.differences += found[: SHOWN - len(self.differences)]


@dataclass(slots=True)
class Verification:
    """What a verification has found.

    :param sample: the share of the keys that was compared.
    :param position: L of its first snapshot, at which the tables were compared.
    :param allow_unverified: whether tables that are not verified are accepted.
    """

    sample: float
    position: str
    seconds: float
    tables: list[TableResult]
    allow_unverified: bool = False

    @property
    def different(self) -> list[TableResult]:
        """The tables whose topic differs."""
        return [table for table in self.tables if not table.equal]

    @property
    def unsettled(self) -> list[TableResult]:
        """The tables of which not all is known."""
        return [table for table in self.tables if table.verdict == "unsettled"]

    @property
    def older(self) -> list[TableResult]:
        """Of the unsettled tables, those with too many records of before they were altered."""
        return [table for table in self.unsettled if table.unexamined and table.older]

    @property
    def lasts(self) -> bool:
        """Whether there is something that will not be otherwise when it is verified again: keys that were changed again
        and again may be settled then."""
        return bool(self.different or self.unverified or self.older)

    @property
    def unverified(self) -> list[TableResult]:
        """The tables of which nothing is known, unless that is accepted."""
        return [] if self.allow_unverified else [table for table in self.tables if table.verdict == "not verified"]

    @property
    def equal(self) -> bool:
        """Whether all that was asked for is proved."""
        return not (self.different or self.unsettled or self.unverified)

    @property
    def rows(self) -> int:
        """How many rows were compared."""
        return sum(table.rows for table in self.tables)

    def known_after(self, before: VerifiedRecord, *, all_tables: bool, now: float) -> VerifiedRecord:
        """What is known of the pipeline behind this verification: of each table what the last one of all of its rows
        has found, with the differences that samples have found since, for a sample proves nothing of other rows.

        :param before: what was known before it.
        :param all_tables: whether all tables of the pipeline were verified.
        :param now: seconds since 1970.
        """
        different = {table.table for table in self.different}
        if self.sample < 1:
            return replace(before, different=tuple(sorted(different.union(before.different))))
        unproved = {table.table for table in (*self.unsettled, *self.unverified)}
        if all_tables:
            return VerifiedRecord(self.rows, tuple(sorted(different)), tuple(sorted(unproved)), now)
        own = {table.table for table in self.tables}
        return replace(
            before,
            different=tuple(sorted(different.union(before.different) - (own - different))),
            unverified=tuple(sorted(unproved.union(before.unverified) - (own - unproved))),
        )

    def as_json(self) -> dict[str, Any]:
        """As plain JSON values; with the verdicts."""
        found, room = asdict(self), _ALL_SHOWN
        for each, table in zip(found["tables"], self.tables, strict=True):
            each["verdict"] = table.verdict
            each["differences"] = each["differences"][:room]
            room -= len(each["differences"])
        return {**found, "rows": self.rows, "equal": self.equal}

    def reported(self) -> dict[str, Any]:
        """As :meth:`as_json`, without keys and values of rows, which are for those alone who may see the tables."""
        return replace(self, tables=[replace(table, differences=[]) for table in self.tables]).as_json()

    def shown(self) -> dict[str, list[Any]]:
        """What :meth:`reported` leaves out, by table, for :meth:`with_shown`."""
        return {table["table"]: table["differences"] for table in self.as_json()["tables"] if table["differences"]}

    def with_shown(self, shown: Mapping[str, Any]) -> Verification:
        """What was reported, with what it has left out."""
        found = {name: msgspec.convert(some, list[Difference]) for name, some in shown.items()}
        return replace(self, tables=[replace(each, differences=found.get(each.table, [])) for each in self.tables])

    def summary(self) -> dict[str, Any]:
        """The counts by table, without values of rows."""
        tables = {
            table.table: {"verdict": table.verdict, "rows": table.rows, "unsettled": table.unsettled, **table.counts}
            for table in self.tables
        }
        return {"equal": self.equal, "rows": self.rows, "tables": tables}

    def advice(self) -> str:
        """What is wrong, and what the reader can do; empty if nothing is wrong."""
        if self.different:
            names = ",".join(table.table for table in self.different)
            counts = "; ".join(
                f"{table.table}: " + ", ".join(f"{count:,} {kind}" for kind, count in table.counts.items())
                for table in self.different
            )
            return (
                f"Topics differ from their tables: {counts}. Find the cause (who else may write to these topics; dead "
                "letters; a column whose type was altered, which PostgreSQL sends no rows for; a registry that has "
                f"lost schemas), then publish the rows again: bottledwater snapshot --tables {names} --sweep"
                + self._misplaced()
            )
        if self.older:
            names = ",".join(table.table for table in self.older)
            return (
                "Too many records were written before their table was altered to look at each of them. Publish the "
                f"rows as they are now, then verify again: bottledwater snapshot --tables {names}"
            )
        if self.unsettled:
            names = ", ".join(table.table for table in self.unsettled)
            return (
                f"Keys of {names} differed, and were changed whenever they were looked at, or a transaction that "
                "writes to the table was open for more than 30 s: nothing is known of them. Verify again when less is "
                "written, and when such a transaction has ended: the job's log names who writes, and pg_prepared_xacts "
                "has transactions that were prepared and forgotten."
            )
        if self.unverified:
            why = "; ".join(f"{table.table}: {table.reason}" for table in self.unverified[:10])
            more = f"; and {len(self.unverified) - 10} more" if len(self.unverified) > 10 else ""
            return (
                f"Nothing is proved of {len(self.unverified)} {'table' if len(self.unverified) == 1 else 'tables'} "
                f"({why}{more}). If that is meant, set allow_unverified: such tables are then accepted."
            )
        return ""

    def _misplaced(self) -> str:
        """What else is to be done about records in the wrong partition: a tombstone for a key that the table has would
        delete its row for whoever reads all partitions, so a sweep leaves them."""
        topics = ", ".join(repr(table.topic) for table in self.different if "wrong partition" in table.counts)
        if not topics:
            return ""
        return (
            ". Records in the wrong partition, whose keys the table has, stay there: to be rid of them, drop the slot "
            f"(bottledwater drop-slot --when always), delete {topics}, and start again with a snapshot."
        )


prepare(Verification)
