"""Rows as the source has them now, looked up by key: for large values that the stream left out, and for dead letters.

A value that is found here belongs to its key *today*. The key may have been given up and used again since the change that
asks for it, so such a value is never passed on to another key or to another change.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass, field

import psycopg
from psycopg import sql

from airflow_bottledwater.backoff import Waiting
from airflow_bottledwater.errors import Outage
from airflow_bottledwater.model.boundary import Snapshot
from airflow_bottledwater.model.relation import Table
from airflow_bottledwater.postgres import catalog
from airflow_bottledwater.postgres.connect import Connection, outage, query_with

#: the binary values of the key columns, in the order of the key
Key = tuple[bytes, ...]

#: keys of one query; PostgreSQL takes 65,535 parameters
_KEYS = 1000


@dataclass(frozen=True, slots=True)
class Found:
    """What a look-up found.

    :param rows: key → the values of the columns that were asked for, None for SQL's NULL; a key without a row is missing.
    :param unreadable: column → why its value of then cannot be read any more.
    """

    rows: dict[Key, list[bytes | None]] = field(default_factory=dict)
    unreadable: dict[int, str] = field(default_factory=dict)


class CurrentRows:
    """Looks rows up by key.

    :param session: gives an open connection.
    :param waiting: called while a look-up has to wait; may raise.
    """

    def __init__(self, session: Callable[[], Connection], waiting: Waiting) -> None:
        self._session, self._waiting = session, waiting

    def read(
        self,
        table: Table,
        keys: Sequence[Key],
        columns: Sequence[int],
        *,
        xids: Iterable[int] = (),
        as_text: Collection[str] = (),
    ) -> Found:
        """The rows of these keys, all of one snapshot.

        :param table: the relation version that the keys are of; it is found by its oid, whatever its name is today.
        :param columns: places in ``table.columns``.
        :param xids: transactions that the snapshot must see; they are waited for.
        :param as_text: key columns whose values are given as PostgreSQL's text.
        :raises Refused: the role may not read the table, or a row-level policy could hide rows from it.
        """
        wanted = sorted(set(xids))
        while True:
            try:
                found = self._try(table, keys, columns, wanted, as_text)
            except psycopg.Error as error:
                translated = outage(error, f"Reading rows of {table.qualified}")
                if not isinstance(translated, Outage):
                    raise translated from error
                self._waiting(str(translated))
                continue
            if found is not None:
                return found
            # a synchronous standby may hold the commit back: an outage, not a record error
            self._waiting(
                f"A transaction that changed {table.qualified} is streamed but not yet visible to other sessions."
            )
            time.sleep(0.01)

    def _try(
        self,
        table: Table,
        keys: Sequence[Key],
        columns: Sequence[int],
        xids: Sequence[int],
        as_text: Collection[str],
    ) -> Found | None:
        """None: not every one of the transactions is visible yet."""
        connection = self._session()
        while True:
            named = catalog.names(connection, [table.oid])
            if not named or not table.key:
                return Found()
            name = sql.Identifier(*named[table.oid])
            connection.execute("BEGIN ISOLATION LEVEL REPEATABLE READ READ ONLY")
            try:
                # the lock first: behind it neither name nor columns change, and the snapshot sees them as they are
                connection.execute("SET LOCAL lock_timeout = '2s'")
                try:
                    connection.execute(sql.SQL("LOCK TABLE ONLY {} IN ACCESS SHARE MODE").format(name))
                except (psycopg.errors.UndefinedTable, psycopg.errors.InvalidSchemaName):
                    continue  # dropped or renamed since its name was read
                if not catalog.still_named(connection, named):
                    continue
                row = connection.execute("SELECT pg_current_snapshot()::text").fetchone()
                assert row is not None
                snapshot = Snapshot.parse(row[0])
                if not all(snapshot.sees(xid) for xid in xids):
                    return None
                return self._select(connection, table, name, keys, columns, as_text)
            finally:
                if not connection.closed:
                    connection.execute("ROLLBACK")

    def _select(
        self,
        connection: Connection,
        table: Table,
        name: sql.Identifier,
        keys: Sequence[Key],
        columns: Sequence[int],
        as_text: Collection[str],
    ) -> Found:
        altered = _altered(connection, table)
        if any(table.columns[c].name in table.key for c in altered):
            # rows cannot be found by a key that is no longer what it was
            reason = "its row cannot be looked up, since a key column was dropped, renamed or given another type"
            return Found(unreadable=dict.fromkeys(columns, reason))
        found = Found(unreadable={c: reason for c, reason in altered.items() if c in columns})
        readable = [c for c in columns if c not in altered]
        types = {column.name: column.type.oid for column in table.columns}
        formats = [0 if column in as_text else 1 for column in table.key]
        select = sql.SQL("SELECT {} FROM {} JOIN ONLY {} t ON {}")
        values = sql.SQL(", ").join(
            [sql.Identifier("i", "n"), *(sql.Identifier("t", table.columns[c].name) for c in readable)]
        )
        same = sql.SQL(" AND ").join(
            sql.SQL("{} = {}").format(sql.Identifier("t", column), sql.Identifier("i", f"k{k}"))
            for k, column in enumerate(table.key)
        )
        for start in range(0, len(keys), _KEYS):
            some = keys[start : start + _KEYS]
            result = query_with(
                connection,
                select.format(values, _values(len(some), len(table.key)), name, same),
                [value for key in some for value in key],
                [types[column] for column in table.key] * len(some),
                formats * len(some),
            )
            for i in range(result.ntuples):
                key = some[int.from_bytes(result.get_value(i, 0) or b"", "big")]
                read = {c: result.get_value(i, place + 1) for place, c in enumerate(readable)}
                found.rows[key] = [read.get(c) for c in columns]
        return found


def _values(rows: int, width: int) -> sql.SQL:
    """A numbered list of keys, as parameters: ``(VALUES (0, $1, $2), (1, $3, $4)) i(n, k0, k1)``."""
    listed = ", ".join(f"({n}, {', '.join(f'${n * width + k + 1}' for k in range(width))})" for n in range(rows))
    return sql.SQL(f"(VALUES {listed}) i(n, {', '.join(f'k{k}' for k in range(width))})")


def _altered(connection: Connection, table: Table) -> dict[int, str]:
    """The columns that are not what they were in this relation version, and why."""
    today: dict[str, int] = dict(
        connection.execute(
            "SELECT attname, atttypid FROM pg_attribute WHERE attrelid = %s AND attnum > 0 AND NOT attisdropped",
            (table.oid,),
        ).fetchall()
    )
    altered = {}
    for c, column in enumerate(table.columns):
        if column.name not in today:
            altered[c] = f"column {column.name!r} was dropped or renamed since"
        elif today[column.name] != column.type.oid:
            altered[c] = f"the type of column {column.name!r} was altered since"
    return altered
