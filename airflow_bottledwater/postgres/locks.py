"""Locks on tables, taken so that nobody has to wait long for us: in short rounds, all given back in between."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Sequence
from typing import TypeVar

import psycopg
from psycopg import sql

from airflow_bottledwater.errors import Outage
from airflow_bottledwater.postgres.connect import Connection, pause

log = logging.getLogger(__name__)

#: what conflicts with ACCESS SHARE and with SHARE UPDATE EXCLUSIVE, the lock of CREATE and ALTER PUBLICATION
#: (https://www.postgresql.org/docs/current/explicit-locking.html, Conflicting Lock Modes)
SHARE = ("AccessExclusiveLock",)
PUBLISH = ("ShareUpdateExclusiveLock", "ShareLock", "ShareRowExclusiveLock", "ExclusiveLock", "AccessExclusiveLock")

#: a lock was not to be had in time (by lock_timeout or statement_timeout), or two waited for each other
BUSY = (psycopg.errors.LockNotAvailable, psycopg.errors.QueryCanceled, psycopg.errors.DeadlockDetected)

T = TypeVar("T")


def limit(connection: Connection, tables: int) -> None:
    """Bound each statement of one round, until its transaction ends: about as long as others may have to wait for us."""
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
    """Try until the locks are to be had; between two attempts none is held, so that who waits for us gets his turn.

    :param conflicting: the lock modes that stand in our way, which tells who does.
    :param attempt: ends its transaction if it raises one of :data:`BUSY`.
    :param what: is done, for the message.
    :raises Outage: it took longer than ``timeout`` seconds; the message names who has the locks.
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
    """Who has, or waits before us for, a lock of these modes on one of the tables."""
    rows = connection.execute(
        "SELECT DISTINCT l.pid, coalesce(a.usename, ''), left(coalesce(a.query, ''), 80), l.relation::regclass::text, l.mode, l.granted"
        " FROM pg_locks l LEFT JOIN pg_stat_activity a ON a.pid = l.pid"
        " WHERE l.database = (SELECT oid FROM pg_database WHERE datname = current_database()) AND l.relation = ANY (%s::oid[])"
        " AND l.mode = ANY (%s) AND l.pid IS DISTINCT FROM pg_backend_pid() ORDER BY l.granted DESC, l.pid LIMIT 10",
        (list(oids), list(conflicting)),
    ).fetchall()
    return [
        (f"session {pid} ({user}): {query}" if pid else "a prepared transaction (pg_prepared_xacts)")
        + f" ({'has' if granted else 'waits for'} {mode} on {table})"
        for pid, user, query, table, mode, granted in rows
    ]
