"""What was committed, and what a consumer has of it, in plain values: the log's lines and the topics' records."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

INSERT, UPDATE, DELETE, MOVE, TRUNCATE = "c", "u", "d", "k", "t"


@dataclass(frozen=True, slots=True)
class Change:
    """A line of the log.

    :param n: its place; taken while the row was locked, so for one key it is the order of the commits.
    :param op: :data:`MOVE` is an update of the key; :data:`TRUNCATE` has neither an old nor a new one.
    :param version: identifies the row's new version, in any table; 0 for a delete.
    :param large: identifies the large value that the new version has, which most changes leave as it is; 0 for none.
    :param entered: whether it is an update that has brought a row into a row filter, and so is sent as an insert.
    """

    n: int
    xid: int
    table: str
    old: int | None
    new: int | None
    op: str
    version: int
    large: int = 0
    entered: bool = False


@dataclass(frozen=True, slots=True)
class Before:
    """What a record tells of the row that was there.

    :param version: None if nothing but the key is told; ``large`` is 0 then.
    """

    key: int | None
    version: int | None
    large: int = 0


@dataclass(frozen=True, slots=True)
class Record:
    """A record of a topic, as a consumer has it; a snapshot's row has no position and op ``r``.

    :param reread: its header says that the large value was read from the table afterwards.
    :param live: its header says that it is a row that was read while the stream ran.
    :param shown: the LSN in this header: what was committed below it is in the row.
    """

    table: str
    partition: int
    offset: int
    key: int
    version: int | None
    op: str
    pos: str = ""
    xid: int = 0
    large: int = 0
    reread: bool = False
    live: bool = False
    shown: int = 0
    before: Before | None = None

    def __str__(self) -> str:
        at = f"{self.pos}, transaction {self.xid}" if self.pos else "a snapshot row"
        return (
            f"{self.op} of {self.table} key {self.key} version {self.version} ({at}) at offset "
            f"{self.partition}/{self.offset}"
        )


@dataclass(frozen=True, slots=True)
class Truncation:
    """A TRUNCATE as the events topic tells it, of one table."""

    table: str
    pos: str
    xid: int


def rows_before(log: Iterable[Change]) -> dict[int, Change]:
    """By a change's place, the one that has left the row which it changes or deletes."""
    rows: dict[tuple[str, int], Change] = {}
    found: dict[int, Change] = {}
    for change in log:
        if change.op == TRUNCATE:
            rows = {key: row for key, row in rows.items() if key[0] != change.table}
        if change.old is not None and (row := rows.pop((change.table, change.old), None)) is not None:
            found[change.n] = row
        if change.new is not None:
            rows[change.table, change.new] = change
    return found
