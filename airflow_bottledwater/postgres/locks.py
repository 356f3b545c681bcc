"""Takes locks on tables without blocking other sessions for long: in short attempts, with all locks released in
between."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterable, Sequence
from typing import TypeVar

import psycopg
from psycopg import sql

from airflow_bottledwater.backoff import pause
from airflow_bottledwater.errors import Outage
from airflow_bottledwater.postgres import partitions, sessions
from airflow_bottledwater.postgres.connect import Connection

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


def holders(
    connection: Connection, oids: Sequence[int], conflicting: Sequence[str], of: Iterable[str] | None = None
) -> list[str]:
    """The other sessions that hold, or wait for, a lock of one of these modes on one of the tables, as text.

    :param of: only those of these transactions, by their ids; None: all.
    """
    rows = connection.execute(
        sql.SQL(
            "SELECT DISTINCT l.granted, l.mode, l.relation::regclass::text, l.pid, {} FROM pg_locks l LEFT JOIN "
            "pg_stat_activity a ON a.pid = l.pid WHERE l.database = (SELECT oid FROM pg_database WHERE datname = "
            "current_database()) AND l.relation = ANY (%(oids)s::oid[]) AND l.mode = ANY (%(modes)s) AND l.pid IS "
            "DISTINCT FROM pg_backend_pid() AND (%(of)s::text[] IS NULL OR l.virtualtransaction IN (SELECT "
            "virtualtransaction FROM pg_locks WHERE transactionid::text = ANY (%(of)s) AND mode = 'ExclusiveLock')) "
            "ORDER BY l.granted DESC, l.pid LIMIT 10"
        ).format(sessions.COLUMNS),
        {"oids": list(oids), "modes": list(conflicting), "of": None if of is None else list(of)},
    ).fetchall()
    return [
        (sessions.named(pid, *session) if pid else "a prepared transaction (pg_prepared_xacts)")
        + f" ({'has' if granted else 'waits for'} {mode} on {table})"
        for granted, mode, table, pid, *session in rows
    ]


def writing(connection: Connection, oids: Sequence[int]) -> dict[int, set[str]]:
    """The transactions that have written to tables, or below them, and have not ended, by table: their ids, which they
    keep when they are prepared. One that has no id yet has written nothing."""
    below = partitions.below(connection, oids)
    both = [(oid, each) for oid in oids for each in (oid, *(part.oid for part in below.get(oid, ())))]
    found: dict[int, set[str]] = {oid: set() for oid in oids}
    for oid, transaction in connection.execute(
        "WITH l AS MATERIALIZED (SELECT * FROM pg_locks WHERE granted) SELECT t.oid, x.transactionid::text "
        "FROM unnest(%s::oid[], %s::oid[]) t(oid, relation) JOIN l USING (relation) JOIN l x USING "
        "(virtualtransaction) WHERE l.database = (SELECT oid FROM pg_database WHERE datname = current_database()) AND "
        "l.mode = ANY (%s) AND x.locktype = 'transactionid' AND x.mode = 'ExclusiveLock'",
        ([oid for oid, _ in both], [each for _, each in both], list(WRITE)),
    ):
        found[oid].add(transaction)
    return found


def wait_for_ends(connection: Connection, transactions: Iterable[str], *, timeout: float) -> set[str]:
    """Wait until transactions have ended, and others see it; returns those that have not within ``timeout`` seconds.

    :param transactions: their ids.
    """
    deadline, left = time.monotonic() + timeout, set(transactions)
    query = "SELECT transactionid::text FROM pg_locks WHERE transactionid::text = ANY (%s) AND mode = 'ExclusiveLock'"
    while left:
        left = {each for (each,) in connection.execute(query, (list(left),))}
        if not left or time.monotonic() > deadline:
            break
        pause(0.05)
    return left


def writers(connection: Connection, oids: Sequence[int], of: Iterable[str] | None = None) -> str:
    """The sessions that write to the tables, or below them, for a message.

    :param of: see :func:`holders`.
    """
    return "; ".join(holders(connection, with_partitions(connection, oids), WRITE, of)) or "nobody any more"


def with_partitions(connection: Connection, oids: Sequence[int]) -> list[int]:
    """The tables and everything below them: a partition may be written to under its own name."""
    return [*oids, *partitions.names(connection, oids)]
