"""What a server is, and how far its WAL has come."""

from __future__ import annotations

import time

from airflow_bottledwater.backoff import pause
from airflow_bottledwater.errors import Outage
from airflow_bottledwater.model.lsn import format_lsn, parse_lsn
from airflow_bottledwater.model.slot import Cluster
from airflow_bottledwater.postgres.connect import Connection, connect
from airflow_bottledwater.postgres.dsn import describe

#: the prefix of the logical messages that pipelines write themselves; nobody publishes them
OWN_PREFIX = "bottledwater"


def identify(connection: Connection) -> Cluster:
    """The cluster and database of a connection, as IDENTIFY_SYSTEM reports them, but without a replication connection.

    The timeline is that of the WAL file which is written now: the first eight hexadecimal digits of its name
    (XLogFileName, src/include/access/xlog_internal.h). The control file has that of the last checkpoint, which is out
    of date after a promotion.
    """
    row = connection.execute(
        "SELECT (SELECT system_identifier FROM pg_control_system()),"
        " CASE WHEN pg_is_in_recovery() THEN (SELECT timeline_id FROM pg_control_checkpoint())"
        " ELSE ('x' || left(pg_walfile_name(pg_current_wal_insert_lsn()), 8))::bit(32)::int END, current_database()"
    ).fetchone()
    assert row is not None
    return Cluster(str(row[0]), int(row[1]), row[2], connection.info.server_version)


def exists(connection: Connection, database: str) -> bool:
    """Whether the server has a database of this name."""
    found = connection.execute("SELECT FROM pg_database WHERE datname = %s", (database,)).fetchone()
    return found is not None


def is_standby(connection: Connection) -> bool:
    """Whether the server is a standby now."""
    row = connection.execute("SELECT pg_is_in_recovery()").fetchone()
    return bool(row and row[0])


def check_primary(connection: Connection, dsn: str) -> None:
    """Check that the server is no standby, before a job works with the slot: while a primary restarts or fails over,
    another host of the connection string, or what an address leads to, may answer for a moment.

    :raises Outage: it is one.
    """
    if is_standby(connection):
        raise Outage(
            f"{describe(dsn)} is a standby now; the job needs the primary.",
            "If it stays one, connect to the primary. Where several hosts may answer, set "
            "target_session_attrs=read-write in the connection: then only the primary is taken.",
        )


def end_of_wal(connection: Connection) -> int:
    """The server's WAL insert position; everything that it has sent lies before it."""
    row = connection.execute("SELECT pg_current_wal_insert_lsn()::text").fetchone()
    assert row is not None
    return parse_lsn(row[0])


def flushed(connection: Connection) -> int:
    """How far the server's WAL is on disk."""
    row = connection.execute("SELECT pg_current_wal_flush_lsn()::text").fetchone()
    assert row is not None
    return parse_lsn(row[0])


def wait_flushed(connection: Connection, dsn: str, lsn: int, *, timeout: float) -> None:
    """Wait until the WAL is on disk up to ``lsn``: a snapshot sees asynchronous commits that a crash could still undo,
    and a published row cannot be taken back.

    A commit in another session forces the flush; the flush position is read on the connection that has the snapshot,
    which a crash would end.

    :raises Outage: the WAL was not flushed within ``timeout`` seconds.
    """
    deadline = time.monotonic() + timeout
    looks = 0
    while True:
        if flushed(connection) >= lsn:
            return
        looks += 1
        if looks == 2:  # most commits are flushed by those who make them, a moment later
            with connect(dsn, application="bottledwater flush") as other:
                # local, so that it does not wait for a synchronous standby
                other.execute("SET synchronous_commit = local")
                other.execute("SELECT pg_logical_emit_message(true, %s, 'flush')", (OWN_PREFIX,))
        if time.monotonic() > deadline:
            raise Outage(
                f"PostgreSQL did not flush its WAL up to {format_lsn(lsn)} within {timeout:.0f} s.",
                "Check the server's disk, and try again.",
            )
        pause(0.005 if looks == 1 else 0.02)
