"""Takes locks on tables without blocking other sessions for long: in short attempts, with all locks released in
between."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Sequence
from typing import TypeVar

import psycopg
from psycopg import sql

from airflow_bottledwater.errors import Outage
from airflow_bottledwater.postgres import partitions, sessions
from airflow_bottledwater.postgres.connect import Connection, pause

log = logging.getLogger(__name__)

#: the modes that conflict with ACCESS SHARE, and with SHARE UPDATE EXCLUSIVE, the lock of CREATE and ALTER PUBLICATION
#: (https://www.postgresql.org/docs/current/explicit-locking.html, Conflicting Lock Modes)
SHARE = ("AccessExclusiveLock",)
PUBLISH = ("ShareUpdateExclusiveLock", "ShareLock", "ShareRowExclusiveLock", "ExclusiveLock", "AccessExclusiveLock")
#: the mode in which whoever inserts, updates or deletes rows holds a table, until after the transaction is visible to
#: others
WRITE = ("RowExclusiveLock",)

#: a lock was not granted in time (lock_timeout or statement_timeout), or there was a deadlock
BUSY = (psycopg.errors.LockNotAvailable, psycopg.errors.QueryCanceled, psycopg.errors.DeadlockDetected)

T = TypeVar("T")


def limit(connection: Connection, tables: int) -> None:
    """Limit the time of each statement until the transaction ends, and so the time for which its locks make other
    sessions wait.

    :param tables: how many tables the statement locks: it may take a second and a millisecond for each.
    """
    connection.execute(sql.SQL("SET LOCAL statement_timeout = {}").format(sql.Literal(f"{1000 + tables}ms")))


def in_rounds(
    connection: Connection,
    oids: Sequence[int],
    conflicting: Sequence[str],
    attempt: Callable[[], T],
    *,
    what: str,
    timeout: float,
) -> T:
    """Repeat an attempt until it gets its locks; between two attempts none is held, so that sessions that wait for them
    can go on.

    :param conflicting: the lock modes that conflict with those of the attempt, to find the sessions that hold them.
    :param attempt: takes the locks; it must end its transaction if it raises one of :data:`BUSY`.
    :param what: what needs the locks, for the message.
    :raises Outage: it took longer than ``timeout`` seconds; the message names the sessions that hold the locks.
    """
    deadline, rest, last_logged = time.monotonic() + timeout, 0.2, ""
    while True:
        try:
            return attempt()
        except BUSY as error:
            who = "; ".join(holders(connection, oids, conflicting)) or f"nobody any more ({str(error).splitlines()[0]})"
        if time.monotonic() > deadline:
            raise Outage(
                f"{what} did not get a lock on every table within {timeout:.0f} s. In the way: {who}.",
                "Let them end, or end them (pg_terminate_backend), and try again.",
            )
        if who != last_logged:
            log.info("%s waits for table locks that other sessions hold: %s.", what, who)
            last_logged = who
        pause(rest)
        rest = min(rest * 1.6, 2.0)


def holders(connection: Connection, oids: Sequence[int], conflicting: Sequence[str]) -> list[str]:
    """The other sessions that hold, or wait for, a lock of one of these modes on one of the tables, as text."""
    rows = connection.execute(
        sql.SQL(
            "SELECT DISTINCT l.granted, l.mode, l.relation::regclass::text, l.pid, {} FROM pg_locks l LEFT JOIN "
            "pg_stat_activity a ON a.pid = l.pid WHERE l.database = (SELECT oid FROM pg_database WHERE datname = "
            "current_database()) AND l.relation = ANY (%s::oid[]) AND l.mode = ANY (%s) AND l.pid IS DISTINCT FROM "
            "pg_backend_pid() ORDER BY l.granted DESC, l.pid LIMIT 10"
        ).format(sessions.COLUMNS),
        (list(oids), list(conflicting)),
    ).fetchall()
    return [
        (sessions.named(pid, *session) if pid else "a prepared transaction (pg_prepared_xacts)")
        + f" ({'has' if granted else 'waits for'} {mode} on {table})"
        for granted, mode, table, pid, *session in rows
    ]


def wait_for_writers(connection: Connection, oids: Sequence[int], *, timeout: float) -> bool:
    """Wait until every transaction that writes to the tables, or below them, now has ended, and others see it; returns
    whether all have ended within ``timeout`` seconds."""
    deadline, oids = time.monotonic() + timeout, _with_partitions(connection, oids)
    left = _writing(connection, oids)
    while left := left & _writing(connection, oids):
        if time.monotonic() > deadline:
            return False
        pause(0.05)
    return True


def _writing(connection: Connection, oids: Sequence[int]) -> set[str]:
    """The transactions that write to the tables, by their virtual ids."""
    rows = connection.execute(
        "SELECT DISTINCT virtualtransaction FROM pg_locks WHERE locktype = 'relation' AND relation = ANY (%s::oid[]) "
        "AND database = (SELECT oid FROM pg_database WHERE datname = current_database()) AND mode = ANY (%s) AND "
        "granted",
        (list(oids), list(WRITE)),
    )
    return {row[0] for row in rows}


def writers(connection: Connection, oids: Sequence[int]) -> str:
    """The sessions that write to the tables, or below them, for a message."""
    return "; ".join(holders(connection, _with_partitions(connection, oids), WRITE)) or "nobody any more"


def _with_partitions(connection: Connection, oids: Sequence[int]) -> list[int]:
    """The tables and everything below them: a partition may be written to under its own name."""
    return [*oids, *partitions.names(connection, oids)]
