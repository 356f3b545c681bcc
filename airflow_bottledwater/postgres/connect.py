"""Connections with the session settings that our bytes depend on, and what a server's refusal means."""

from __future__ import annotations

import contextlib
import re
from collections.abc import Iterator
from typing import Any

import psycopg
from psycopg import conninfo

from airflow_bottledwater.errors import BottledWaterError, CredentialsRefused, Outage, Refused
from airflow_bottledwater.model.slot import Cluster

#: what PostgreSQL's output functions read: the same text from every session, whatever the server's defaults are
PINNED = {
    "client_encoding": "UTF8",
    "DateStyle": "ISO, MDY",
    "IntervalStyle": "postgres",
    "TimeZone": "UTC",
    "extra_float_digits": "1",
    "bytea_output": "hex",
    "lc_monetary": "C",
    "search_path": "pg_catalog",
}
#: time-outs that a role or a database may have set for its applications, and that would end our long sessions
UNLIMITED = ("statement_timeout", "lock_timeout", "idle_in_transaction_session_timeout")

Connection = psycopg.Connection[tuple[Any, ...]]

#: FATAL answers that pass by themselves; everything else that a server says to a new connection is a refusal
_PASSING = re.compile(
    r"starting up|shutting down|recovery mode|not yet accepting|too many (clients|connections)|connection slots"
    r"|terminating connection",
    re.IGNORECASE,
)
#: what libpq says of a server that it does not trust, or of its own certificate files
_UNTRUSTED = re.compile("certificate|does not support SSL")


def describe(dsn: str) -> str:
    """Host, port and database of a connection string; never its password."""
    known = conninfo.conninfo_to_dict(dsn)
    where = known.get("host") or known.get("hostaddr") or known.get("service") or "the default host"
    return f"PostgreSQL at {where}:{known.get('port') or 5432}, database {known.get('dbname') or '(default)'}"


def connect(dsn: str, *, replication: bool = False, application: str = "bottledwater") -> Connection:
    """Open a session with pinned settings, in autocommit.

    :raises Outage: the server cannot be reached, or is starting or stopping.
    :raises CredentialsRefused: it does not accept our password, or we not its certificate.
    :raises Refused: it is there and says no (database, pg_hba).
    """
    options: dict[str, Any] = {"fallback_application_name": application, "connect_timeout": 10}
    # a peer that vanished without a word must not hold a slot or a snapshot for hours
    options |= {"keepalives_idle": 30, "keepalives_interval": 10, "keepalives_count": 3}
    if replication:
        options["replication"] = "database"
    params = {**options, **_parse(dsn)}
    try:
        connection = psycopg.connect(conninfo.make_conninfo(**params), autocommit=True)
    except psycopg.OperationalError as error:
        # of several addresses, the one that has a server
        lines = str(error).strip().splitlines() or ["no answer"]
        message = next((line.removeprefix("- ") for line in lines if "FATAL" in line), lines[0])
        if "FATAL" in message and not _PASSING.search(message):
            kind = CredentialsRefused if "authentication failed" in message else Refused
            raise kind(f"{describe(dsn)} refuses the connection: {message}.", _remedy(message)) from None
        if "FATAL" not in message and _UNTRUSTED.search(message):
            raise CredentialsRefused(
                f"The connection to {describe(dsn)} is not secure: {message}.",
                "Check sslmode, sslrootcert and the host's name.",
            ) from None
        raise Outage(f"{describe(dsn)} cannot be reached: {message}.") from None
    try:
        for name, value in [*PINNED.items(), *((name, "0") for name in UNLIMITED)]:
            connection.execute(f"SET {name} = '{value}'")
        if connection.info.server_version >= 170000:
            connection.execute("SET transaction_timeout = 0")
    except psycopg.Error as error:
        connection.close()
        raise outage(error, describe(dsn)) from None
    return connection


def _parse(dsn: str) -> dict[str, Any]:
    """The parameters of a connection string.

    Where a password is not quoted, libpq's errors show a part of it, or it becomes a part of host or port, which ours show.
    """
    try:
        known = {k: v for k, v in conninfo.conninfo_to_dict(dsn).items() if v is not None}
    except psycopg.ProgrammingError:
        known = {"port": "?"}
    uri = dsn.lstrip().startswith(("postgresql://", "postgres://"))
    if (uri and dsn.partition("?")[0].count("@") > 1) or not re.fullmatch("[0-9, ]*", str(known.get("port", ""))):
        raise Refused(
            "The connection string is not valid.",
            "In key=value pairs put a value with blanks in single quotes; in a URI quote @ : / ? % of a password as %40 %3A %2F %3F %25.",
        )
    return known


def _remedy(message: str) -> str:
    if "password" in message or "authentication" in message:
        return "Check user and password, and that pg_hba.conf has a line for this host (for replication too)."
    if "does not exist" in message:
        return "Check the database and the role in the connection."
    if "pg_hba" in message or "replication" in message:
        return "The role needs REPLICATION (ALTER ROLE … REPLICATION; rds_replication on RDS) and a pg_hba.conf line."
    return ""


def outage(error: psycopg.Error, what: str) -> BottledWaterError:
    """A psycopg error on an open session: an :class:`Outage` if the session or the server is gone, else a refusal."""
    code = error.sqlstate or ""
    text = str(error).strip().splitlines()
    message = text[0] if text else type(error).__name__
    # class 08: connection; 57P: operator intervention; 53: out of resources; without a code libpq lost the server
    if not code or code[:2] in ("08", "53") or code[:3] == "57P":
        return Outage(f"{what}: {message}.")
    remedy = "Grant the role what it lacks (docs/operations.md lists the grants)." if code == "42501" else ""
    return Refused(f"{what}: {message} (SQLSTATE {code}).", remedy)


@contextlib.contextmanager
def session(dsn: str, what: str = "", **options: Any) -> Iterator[Connection]:
    """A connection for a block; database errors leave it as ours.

    :param what: what the block does, for the message.
    """
    connection = connect(dsn, **options)
    try:
        yield connection
    except psycopg.Error as error:
        raise outage(error, what or describe(dsn)) from error
    finally:
        connection.close()


def identify(connection: Connection) -> Cluster:
    """Which cluster this is; needs no replication connection (pg_control_system, pg_control_checkpoint)."""
    row = connection.execute(
        "SELECT (SELECT system_identifier FROM pg_control_system()),"
        " (SELECT timeline_id FROM pg_control_checkpoint()), current_database()"
    ).fetchone()
    assert row is not None
    return Cluster(str(row[0]), int(row[1]), row[2], connection.info.server_version)
