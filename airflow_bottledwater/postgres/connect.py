"""Connections with the session settings that our bytes depend on, and what a server's refusal means."""

from __future__ import annotations

import contextlib
import re
import threading
import time
from collections.abc import Callable, Generator, Iterator, Sequence
from contextvars import ContextVar
from typing import Any, TypeVar

import psycopg
from psycopg import conninfo, generators, pq, sql

from airflow_bottledwater.errors import DOCS, BottledWaterError, CredentialsRefused, Outage, Refused, StopRequested
from airflow_bottledwater.model.lsn import parse_lsn
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
    # a policy that would hide rows is an error, not a smaller table
    "row_security": "off",
}
#: time-outs that a role or a database may have set for its applications, and that would end our long sessions
UNLIMITED = ("statement_timeout", "lock_timeout", "idle_in_transaction_session_timeout")

Connection = psycopg.Connection[tuple[Any, ...]]

#: seconds for a new session, of each address of a host
_CONNECT_TIMEOUT = 10
#: seconds of silence after which a new session is tried, to tell a statement that takes long from a server that is gone
SILENCE = 30.0
#: milliseconds after which a connection is lost whose data nobody confirms (TCP_USER_TIMEOUT): keepalives do not work while
#: there is something to send
_UNCONFIRMED = 60_000

T = TypeVar("T")

#: set when whoever works in this thread is asked to stop
_stopped: ContextVar[threading.Event | None] = ContextVar("stopped", default=None)


@contextlib.contextmanager
def stoppable(stopped: threading.Event | None) -> Iterator[None]:
    """In this block every wait for PostgreSQL, in this thread, ends soon after the event is set.

    :raises StopRequested: (the block) it was set.
    """
    token = _stopped.set(stopped)
    try:
        yield
    finally:
        _stopped.reset(token)


def check_stopped() -> None:
    """:raises StopRequested: the work of this thread was asked to stop (:func:`stoppable`)."""
    stopped = _stopped.get()
    if stopped is not None and stopped.is_set():
        raise StopRequested("The job was asked to stop.")


def pause(seconds: float) -> None:
    """Sleep, unless asked to stop.

    :raises StopRequested: see :func:`check_stopped`.
    """
    stopped = _stopped.get()
    if stopped is None:
        time.sleep(seconds)
    else:
        stopped.wait(seconds)
        check_stopped()


def _watched(waiting: Generator[Any, Any, T], check: Callable[[], None]) -> Generator[Any, Any, T]:
    """A generator of psycopg that also looks around each time that nothing has come for a tenth of a second."""
    ready: Any = None
    while True:
        try:
            wanted = waiting.send(ready)
        except StopIteration as done:
            value: T = done.value
            return value
        ready = yield wanted
        if not ready:
            check()


class Silence:
    """Tells a server that takes long from one that is gone, while nothing comes from it.

    :param connection: on which nothing comes.
    """

    def __init__(self, connection: Connection) -> None:
        self._connection = connection
        self.broken()

    def broken(self) -> None:
        """Something came."""
        self._since = time.monotonic()

    def check(self) -> None:
        """Called again and again; after half a minute of silence, tries a new session.

        :raises StopRequested: see :func:`stoppable`.
        :raises Outage: the server answers nobody.
        """
        check_stopped()
        if time.monotonic() - self._since > SILENCE:
            self.ask()
            self.broken()

    def ask(self) -> None:
        """Whether the server takes a session: a refusal is an answer, too.

        :raises Outage: it says nothing.
        """
        dsn = getattr(self._connection, "dsn", "")
        own = {"connect_timeout": _CONNECT_TIMEOUT, "fallback_application_name": "bottledwater probe"}
        try:
            _Session.connect(conninfo.make_conninfo(**{**own, **_parse(dsn)})).close()
        except psycopg.OperationalError as error:
            if "FATAL" not in str(error):
                raise Outage(
                    f"{describe(dsn)} has sent nothing for {SILENCE:.0f} s and does not accept a new session.",
                    "Check the server and the network.",
                ) from None


class _Session(psycopg.Connection[tuple[Any, ...]]):
    """A connection whose waits end when the thread's work is asked to stop, or the server no longer says anything.

    :ivar dsn: with which a session can be opened to ask whether the server is there.
    """

    dsn = ""

    @classmethod
    def _connect_gen(cls, *args: Any, **options: Any) -> Any:
        return _watched(super()._connect_gen(*args, **options), check_stopped)

    def wait(self, gen: Any, *args: Any, **options: Any) -> Any:
        """Wait for a statement's answer.

        :raises StopRequested: the connection is closed then: its statement is still under way.
        :raises Outage: the server answers nobody; the connection is closed.
        """
        try:
            return super().wait(_watched(gen, Silence(self).check), *args, **options)
        except (StopRequested, Outage):
            self.close()
            raise


def command(connection: Connection, statement: sql.Composable) -> pq.abc.PGresult:
    """Send a command that begins a COPY, and wait for its first result (libpq's own PQexec waits without a bound).

    :raises StopRequested: see :func:`stoppable`.
    :raises Outage: the server answers nobody.
    """

    return _first_result(connection, lambda: connection.pgconn.send_query(statement.as_bytes(connection)))


def query_with(
    connection: Connection, query: sql.Composable, values: Sequence[bytes], oids: Sequence[int], formats: Sequence[int]
) -> pq.abc.PGresult:
    """A query with parameters as they came from PostgreSQL; gives the values of its result in binary form.

    :param values: in the form that ``formats`` says: 1 binary, 0 text.
    :param oids: the parameters' types.
    :raises psycopg.Error: the query failed.
    :raises StopRequested: see :func:`stoppable`.
    :raises Outage: the server answers nobody.
    """
    result = _first_result(
        connection,
        lambda: connection.pgconn.send_query_params(
            query.as_bytes(connection), values, param_types=oids, param_formats=formats, result_format=1
        ),
    )
    if result.status != pq.ExecStatus.TUPLES_OK:
        raise psycopg.errors.error_from_result(result)
    return result


def _first_result(connection: Connection, send: Callable[[], None]) -> pq.abc.PGresult:
    def sending() -> Any:
        send()
        return (yield from generators.execute(connection.pgconn))

    results: list[pq.abc.PGresult] = connection.wait(sending())
    return results[0]


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
    options: dict[str, Any] = {"fallback_application_name": application, "connect_timeout": _CONNECT_TIMEOUT}
    # a peer that vanished without a word must not hold a slot or a snapshot for hours
    options |= {
        "keepalives_idle": 30,
        "keepalives_interval": 10,
        "keepalives_count": 3,
        "tcp_user_timeout": _UNCONFIRMED,
    }
    if replication:
        options["replication"] = "database"
    params = {**options, **_parse(dsn)}
    try:
        connection = _Session.connect(conninfo.make_conninfo(**params), autocommit=True)
        connection.dsn = dsn
    except psycopg.OperationalError as error:
        # of several addresses, the one that has a server
        lines = str(error).strip().splitlines() or ["no answer"]
        message = next((line.removeprefix("- ") for line in lines if "FATAL" in line), lines[0])
        if "FATAL" in message and not _PASSING.search(message):
            kind = CredentialsRefused if "authentication failed" in message else Refused
            remedy = _remedy(message, params.get("user"))
            raise kind(f"{describe(dsn)} refuses the connection: {message}.", remedy) from None
        if "no password supplied" in message:
            raise CredentialsRefused(
                f"{describe(dsn)} asks for a password, and the connection has none.",
                "Put it into the connection, a password file or PGPASSWORD.",
            ) from None
        if "FATAL" not in message and _UNTRUSTED.search(message):
            raise CredentialsRefused(
                f"The connection to {describe(dsn)} is not secure: {message}.",
                "Check sslmode, sslrootcert and the host's name.",
            ) from None
        raise Outage(f"{describe(dsn)} cannot be reached: {message}.") from None
    try:
        unlimited = [*UNLIMITED, *(("transaction_timeout",) if connection.info.server_version >= 170000 else ())]
        settings = [*PINNED.items(), *((name, "0") for name in unlimited)]
        # one question: a session is opened for many a small thing, and the server may be far away
        calls = sql.SQL(", ").join(
            sql.SQL("pg_catalog.set_config({}, {}, false)").format(sql.Literal(name), sql.Literal(value))
            for name, value in settings
        )
        connection.execute(sql.SQL("SELECT {}").format(calls))
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


def _remedy(message: str, user: str | None) -> str:
    if "password" in message or "authentication" in message:
        return "Check user and password, and that pg_hba.conf has a line for this host (for replication too)."
    if "does not exist" in message:
        return "Check the database and the role in the connection."
    if "pg_hba" in message or "replication" in message:
        role = sql.Identifier(user).as_string(None) if user else "…"
        return (
            f"Check that pg_hba.conf has a line for this host, database and role, and let the role replicate: ALTER ROLE {role} REPLICATION "
            f"(on RDS and Aurora: GRANT rds_replication TO {role})."
        )
    return ""


def outage(error: psycopg.Error, what: str) -> BottledWaterError:
    """A psycopg error on an open session: an :class:`Outage` if the session or the server is gone or others were in the way,
    else a refusal."""
    code = error.sqlstate or ""
    text = str(error).strip().splitlines()
    message = text[0] if text else type(error).__name__
    # class 08: connection; 57P: operator intervention; 53: out of resources; without a code libpq lost the server; and what
    # passes when others are done: 40P01 deadlock_detected, 40001 serialization_failure, 55P03 lock_not_available, 57014
    # query_canceled
    if not code or code[:2] in ("08", "53") or code[:3] == "57P" or code in ("40P01", "40001", "55P03", "57014"):
        return Outage(f"{what}: {message}.")
    if "row-level security" in message:
        return Refused(
            f"{what}: {message}: a policy would hide rows from this role.",
            "Use a role with BYPASSRLS (ALTER ROLE … BYPASSRLS), or the table's owner without FORCE ROW LEVEL SECURITY.",
        )
    remedy = f"The grants that the role needs: {DOCS}operations.html#grants-in-postgresql" if code == "42501" else ""
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
    """Which cluster this is: what IDENTIFY_SYSTEM says, without a replication connection.

    The timeline is that of the WAL file which is written now, the first eight hexadecimal digits of its name (XLogFileName,
    src/include/access/xlog_internal.h). The control file's is that of the last checkpoint, and old after a promotion.
    """
    row = connection.execute(
        "SELECT (SELECT system_identifier FROM pg_control_system()),"
        " CASE WHEN pg_is_in_recovery() THEN (SELECT timeline_id FROM pg_control_checkpoint())"
        " ELSE ('x' || left(pg_walfile_name(pg_current_wal_insert_lsn()), 8))::bit(32)::int END, current_database()"
    ).fetchone()
    assert row is not None
    return Cluster(str(row[0]), int(row[1]), row[2], connection.info.server_version)


def end_of_wal(connection: Connection) -> int:
    """The server's WAL insert position: nothing that it ever sent lies beyond."""
    row = connection.execute("SELECT pg_current_wal_insert_lsn()::text").fetchone()
    assert row is not None
    return parse_lsn(row[0])
