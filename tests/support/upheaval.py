"""What is done to whole tables beside writers and readers: TRUNCATE, columns that come, go and get other types,
rewrites."""

from __future__ import annotations

import random
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass

import psycopg

from airflow_bottledwater.model.lsn import parse_lsn
from tests.support.writers import LOSSES, insert, truncate

#: the same value, without and with a rewrite of the table
_ADD = (
    "ALTER TABLE {table} ADD extra int DEFAULT 7",
    "ALTER TABLE {table} ADD extra int DEFAULT 6 + (random() < 2)::int",
)
_DROP = "ALTER TABLE {table} DROP extra"
_WIDEN = "ALTER TABLE {table} ALTER n TYPE bigint"


@dataclass(frozen=True, slots=True)
class Upset:
    """Something that was done to a whole table, and committed.

    :param lsn: of a moment at which nobody else could read the table (but for a rewrite): what others read of it is
        from before if they have read an LSN up to this one, under their lock on the table, and from behind it
        otherwise.
    :param extra: whether the table has the column ``extra`` then.
    """

    table: str
    what: str
    lsn: int
    extra: bool


class Upheaval:
    """Does some such things beside the block, at random moments.

    :param kinds: of ``truncate``, ``alter``, ``rewrite``: in turn.
    :param rows: rows that a truncated table is given again, at most.
    :ivar done: what was committed, in order.
    """

    def __init__(self, dsn: str, tables: Sequence[str], seed: int, rows: int, kinds: Sequence[str]) -> None:
        self.done: list[Upset] = []
        self._dsn, self._tables, self._rows, self._kinds = dsn, tables, rows, kinds
        self._dice = random.Random(seed)
        self._extra = dict.fromkeys(tables, False)
        self._errors: list[BaseException] = []
        self._stopped = threading.Event()
        self._thread = threading.Thread(target=self._run, name="upheaval", daemon=True)

    def __enter__(self) -> Upheaval:
        if self._kinds:
            self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stopped.set()
        if self._kinds:
            self._thread.join(60)
            assert not self._thread.is_alive()
        assert not self._errors, self._errors

    def _run(self) -> None:
        times = self._dice.randrange(3, 8)
        try:
            with psycopg.connect(self._dsn, autocommit=True) as connection:
                # writers wait less, and end what they have begun
                connection.execute("SET lock_timeout = '3s'")
                while len(self.done) < times and not self._stopped.wait(self._dice.uniform(0.3, 2.0)):
                    try:
                        kind = self._kinds[len(self.done) % len(self._kinds)]
                        self._upset(connection, kind, self._dice.choice(self._tables))
                    except LOSSES:
                        connection.execute("ROLLBACK")
        except BaseException as error:
            self._errors.append(error)

    def _upset(self, connection: psycopg.Connection, kind: str, table: str) -> None:
        dice, extra = self._dice, self._extra[table]
        if kind == "rewrite":
            connection.execute(f"VACUUM FULL {table}")  # type: ignore[arg-type]
            self.done.append(Upset(table, kind, _insert_lsn(connection), extra))
            return
        connection.execute("BEGIN")
        if kind == "alter":
            widens = dice.random() < 0.3
            connection.execute((_WIDEN if widens else _DROP if extra else dice.choice(_ADD)).format(table=table))  # type: ignore[arg-type]
            extra = extra if widens else not extra
        else:
            self._truncate(connection, table)
        lsn = _insert_lsn(connection)
        time.sleep(dice.uniform(0.0, 0.1))
        if dice.random() < 0.25:
            connection.execute("ROLLBACK")
            return
        connection.execute("COMMIT")
        self._extra[table] = extra
        self.done.append(Upset(table, kind, lsn, extra))

    def _truncate(self, connection: psycopg.Connection, table: str) -> None:
        dice = self._dice
        if dice.random() < 0.3:
            connection.execute("SAVEPOINT s")
            for statement in truncate(table):
                connection.execute(statement)  # type: ignore[arg-type]
            connection.execute("ROLLBACK TO SAVEPOINT s")
        for statement in truncate(table):
            connection.execute(statement)  # type: ignore[arg-type]
        first = dice.randrange(self._rows // 2)
        connection.execute(insert(table, first, dice.randrange(first + 50, self._rows)))  # type: ignore[arg-type]


def _insert_lsn(connection: psycopg.Connection) -> int:
    row = connection.execute("SELECT pg_current_wal_insert_lsn()::text").fetchone()
    assert row is not None
    return parse_lsn(row[0])
