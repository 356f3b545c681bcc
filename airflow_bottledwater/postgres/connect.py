"""Connections with pinned session settings, waits that a stop can end, and the errors of this package for
PostgreSQL's."""

from __future__ import annotations

import contextlib
import ctypes
import math
import re
import socket
import sys
import time
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from typing import Any, TypeVar

import psycopg
from psycopg import conninfo, generators, pq, sql, waiting
from psycopg.pq.misc import find_libpq_full_path

from airflow_bottledwater.backoff import check_stopped
from airflow_bottledwater.errors import DOCS, BottledWaterError, CredentialsRefused, Outage, Refused, StopRequested
from airflow_bottledwater.postgres.dsn import describe, parse

#: the settings that PostgreSQL's output functions use: every session gives the same text, whatever the server's
#: defaults are
PINNED = {
    "client_encoding": "UTF8",
    "DateStyle": "ISO, MDY",
    "IntervalStyle": "postgres",
    "TimeZone": "UTC",
    "extra_float_digits": "1",
    "bytea_output": "hex",
    "lc_monetary": "C",
    "search_path": "pg_catalog",
    # a row-level policy that would hide rows leads to an error instead of missing rows
    "row_security": "off",
}
#: time-outs that may be set for a role or a database, and that would end long sessions of a job; with the versions that
#: have them
UNLIMITED = {
    "statement_timeout": 0,
    "lock_timeout": 0,
    "idle_in_transaction_session_timeout": 0,
    "idle_session_timeout": 140000,
    "transaction_timeout": 170000,
}

#: without wal_sender_timeout, the server keeps a slot for a job whose host has vanished until TCP notices, and the next
#: job has to wait for it. PostgreSQL's default is taken then: replication.py sends a status every second, also while
#: Kafka is slow
_NOTICED = sql.SQL(
    "pg_catalog.set_config('wal_sender_timeout', "
    "coalesce(nullif(pg_catalog.current_setting('wal_sender_timeout'), '0'), '60s'), false)"
)

Connection = psycopg.Connection[tuple[Any, ...]]

#: seconds for opening a session, for each address of a host
_CONNECT_TIMEOUT = 10
#: seconds of silence after which a new session is tried, to distinguish a statement that takes long from a server that
#: is gone
SILENCE = 30.0
#: milliseconds after which a connection is given up if sent data is not acknowledged (TCP_USER_TIMEOUT): TCP keepalives
#: are not sent while data is waiting to be acknowledged
_UNCONFIRMED = 60_000

T = TypeVar("T")
E = TypeVar("E", bound=Exception)


def _watched(waiting: Generator[Any, Any, T], check: Callable[[], None]) -> Generator[Any, Any, T]:
    """A generator of psycopg that also calls ``check`` whenever nothing has arrived for a tenth of a second."""
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
    """Distinguishes a server that takes long from one that is gone, while nothing arrives from it.

    :param connection: the connection that is waited on.
    """

    def __init__(self, connection: Connection) -> None:
        self._connection = connection
        self.broken()

    def broken(self) -> None:
        """Note that something has arrived."""
        self._since = time.monotonic()

    def check(self) -> None:
        """To be called repeatedly during a wait; after every 30 seconds of silence, it tries to open a new session.

        :raises StopRequested: see :func:`stoppable`.
        :raises Outage: the server does not accept a new session.
        """
        check_stopped()
        if time.monotonic() - self._since > SILENCE:
            self.ask()
            self.broken()

    def ask(self) -> None:
        """Check that the server answers a new session; a refusal counts as an answer.

        :raises Outage: it does not answer.
        """
        dsn = getattr(self._connection, "dsn", "")
        own = {"connect_timeout": _CONNECT_TIMEOUT, "fallback_application_name": "bottledwater probe"}
        try:
            Session.connect(conninfo.make_conninfo(**{**own, **parse(dsn)})).close()
        except psycopg.OperationalError as error:
            if not _ANSWER.search(str(error)):
                raise Outage(
                    f"{describe(dsn)} has sent nothing for {SILENCE:.0f} s and does not accept a new session.",
                    "Check the server and the network.",
                ) from None


class Session(psycopg.Connection[tuple[Any, ...]]):
    """A connection whose waits end when the thread's work is asked to stop, or when the server no longer answers.

    :ivar dsn: the connection string of the server that it is with, which may be one of several: for a new session that
        checks whether that one answers.
    :ivar pid: the id of the process that serves it, as PostgreSQL says it: a proxy may tell its clients another one.
    """

    dsn, pid = "", 0

    @classmethod
    def _connect_gen(cls, conninfo: str = "", *, timeout: float = 0.0) -> Any:
        # psycopg before 3.3.5 leaves the time-out to this generator
        return cls((yield from _watched(_opening(conninfo, timeout), check_stopped)))

    def wait(self, gen: Any, *args: Any, **options: Any) -> Any:
        """Wait for a statement's answer.

        :raises StopRequested: see :func:`stoppable`; the connection is closed, since its statement is still running.
        :raises Outage: the server does not answer; the connection is closed.
        """
        try:
            return super().wait(_watched(gen, Silence(self).check), *args, **options)
        except (StopRequested, Outage):
            self.close()
            raise


def command(connection: Connection, statement: sql.Composable) -> pq.abc.PGresult:
    """Send a command that begins a COPY, and wait for its first result (libpq's own PQexec would wait without a limit).

    :raises StopRequested: see :func:`stoppable`.
    :raises Outage: the server does not answer.
    """

    return _first_result(connection, lambda: connection.pgconn.send_query(statement.as_bytes(connection)))


def query_with(
    connection: Connection, query: sql.Composable, values: Sequence[bytes], oids: Sequence[int], formats: Sequence[int]
) -> pq.abc.PGresult:
    """Run a query whose parameters are bytes as PostgreSQL sent them; the values of its result are in binary form.

    :param values: the parameters, in the form that ``formats`` gives for each: 1 for binary, 0 for text.
    :param oids: the parameters' types.
    :raises psycopg.Error: the query failed.
    :raises StopRequested: see :func:`stoppable`.
    :raises Outage: the server does not answer.
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


#: the severity of a server's answer to a new connection, in the server's language (FATAL, in Russian ВАЖНО): libpq
#: writes two blanks behind it (pqBuildErrorMessage3 in src/interfaces/libpq/fe-protocol3.c), and its own messages have
#: none
_ANSWER = re.compile(r"(^|: )[^\s:]+:  ")
#: the SQLSTATE in such an answer
_CODE = re.compile(r"(?<=:  )([0-9A-Z]{5}): ")
#: classes of SQLSTATEs with which a new connection is refused only for now
#: (https://www.postgresql.org/docs/current/errcodes-appendix.html): insufficient resources, operator intervention
_PASSING = ("53", "57")
#: those with which it is refused until somebody changes something: feature not supported, data exception (of a
#: setting), authorization, catalog name, syntax error or access rule violation, object not in prerequisite state (a
#: database that lets nobody in)
_LASTING = ("0A", "22", "28", "3D", "42", "55")
#: the SQLSTATE of a wrong password, and PostgreSQL's function that says that an authentication failed, whatever the
#: method (src/backend/libpq/auth.c)
_PASSWORD, _FAILED = "28P01", "auth_failed"
#: what a pooler says of a connection that wants to replicate, with a SQLSTATE that it has for whatever it says
_POOLED = "unsupported startup parameter"
#: libpq's messages about parameters of a connection string, or about the service that it names
_INVALID = re.compile(r"(^|: )(invalid|bad value)|definition of service|service file|connection option")
#: libpq's messages about a server that it does not trust, about what was to be secure and is not, or about its own
#: files for that (src/interfaces/libpq/fe-{connect,auth,secure-openssl}.c)
_UNTRUSTED = re.compile(
    "certificate|private key|does not support SSL|weak sslmode|channel binding|method requirement|GSSAPI encryption"
    "|requirepeer|alert (unknown ca|access denied|handshake failure)"
)
#: the remedy where something that is no primary has answered
NO_POOLER = "Connect to the primary itself, not through a connection pooler."


#: libpq's function (https://www.postgresql.org/docs/current/libpq-control.html#LIBPQ-PQSETERRORVERBOSITY), in the
#: library with which psycopg is linked
_set_verbosity = ctypes.CDLL(
    find_libpq_full_path() if pq.__impl__ == "python" else sys.modules[pq.PGconn.__module__].__file__
).PQsetErrorVerbosity
_set_verbosity.argtypes = [ctypes.c_void_p, ctypes.c_int]
_DEFAULT, _VERBOSE = 1, 2


def _opening(dsn: str, timeout: float) -> Generator[Any, Any, Any]:
    """Open a connection as ``psycopg.generators.connect`` does, but so that the message of an answer has its SQLSTATE:
    a server answers in the language of its ``lc_messages``. Gives psycopg's ``PGconn``.

    :param timeout: in seconds; 0 for none.
    :raises psycopg.OperationalError: it was not opened.
    """
    until = time.monotonic() + timeout if timeout else math.inf
    connection: Any = pq.PGconn.connect_start(dsn.encode())
    try:
        _set_verbosity(connection.pgconn_ptr, _VERBOSE)
        while connection.status != pq.ConnStatus.BAD:
            status = connection.connect_poll()
            if status == pq.PollingStatus.OK:
                _set_verbosity(connection.pgconn_ptr, _DEFAULT)
                connection.nonblocking = 1
                return connection
            wanted = waiting.Wait.R if status == pq.PollingStatus.READING else waiting.Wait.W
            while status != pq.PollingStatus.FAILED and not (yield connection.socket, wanted):
                if time.monotonic() > until:
                    raise psycopg.errors.ConnectionTimeout("connection timeout expired")
        raise psycopg.OperationalError(f"connection failed: {connection.get_error_message()}")
    except BaseException:
        connection.finish()
        raise


def connect(dsn: str, *, replication: bool = False, application: str = "bottledwater") -> Session:
    """Open a session with pinned settings, in autocommit.

    :param replication: whether to open a replication connection.
    :param application: the application name, unless the connection string has one.
    :raises Outage: the server cannot be reached, or is starting or stopping.
    :raises CredentialsRefused: the server rejects the password, or its certificate is not trusted.
    :raises Refused: the server refuses the connection for another reason (database, role, pg_hba.conf), the connection
        string is not valid, or it leads to a connection pooler.
    """
    options: dict[str, Any] = {"fallback_application_name": application, "connect_timeout": _CONNECT_TIMEOUT}
    # so that a peer that vanished is noticed within minutes, and does not hold a slot or a snapshot for hours
    options |= {
        "keepalives_idle": 30,
        "keepalives_interval": 10,
        "keepalives_count": 3,
        "tcp_user_timeout": _UNCONFIRMED,
    }
    if replication:
        options["replication"] = "database"
    params = {**options, **parse(dsn)}
    began = time.monotonic()
    try:
        connection = Session.connect(conninfo.make_conninfo(**params), autocommit=True)
        connection.dsn = _of_server(dsn, connection)
    except psycopg.Error as error:
        raise _unconnected(error, dsn, params) from None
    _answered.add(_who(dsn, params))
    try:
        unlimited = [name for name, since in UNLIMITED.items() if connection.info.server_version >= since]
        settings = [*PINNED.items(), *((name, "0") for name in unlimited)]
        # a single statement: sessions are opened often, and the server may be far away
        calls: list[sql.Composable] = [
            sql.SQL("pg_catalog.set_config({}, {}, false)").format(sql.Literal(name), sql.Literal(value))
            for name, value in settings
        ]
        calls += [_NOTICED] if replication else []
        found = connection.execute(
            sql.SQL("SELECT pg_catalog.pg_backend_pid(), {}").format(sql.SQL(", ").join(calls))
        ).fetchone()
        connection.pid = found[0] if found else 0
        if connection.pid != connection.info.backend_pid:
            _refuse_pooler(connection, dsn, began)
    except (psycopg.Error, Refused) as error:
        connection.close()
        raise own(error, describe(dsn)) from None
    return connection


def _refuse_pooler(connection: Connection, dsn: str, began: float) -> None:
    """Check that a session was made for us, although what is in between has told us another process: so does the proxy
    of Neon, too, which leads each client to a process of its own. A role that is set for a session may not be told how
    old that is.

    :param began: when we began to connect.
    :raises Refused: PostgreSQL's process is older, so that other clients have used the session, and will.
    """
    found = connection.execute(
        "SELECT extract(epoch FROM clock_timestamp() - backend_start) FROM pg_stat_activity WHERE pid = "
        "pg_backend_pid()"
    ).fetchone()
    age = found[0] if found is not None else None
    if age is not None and age > time.monotonic() - began:
        raise Refused(
            f"{describe(dsn)} is a connection pooler: its session was in PostgreSQL before we connected, and is shared "
            "with others. Their settings would hold for what is read, and ours for them.",
            NO_POOLER,
        )


def _of_server(dsn: str, connection: Connection) -> str:
    info = connection.info
    at = {"host": info.host, "hostaddr": info.hostaddr, "port": str(info.port), "target_session_attrs": "any"}
    return conninfo.make_conninfo(dsn, **{name: value for name, value in at.items() if value})


def probe(dsn: str) -> Connection | None:
    """A new session, which shows whether the server still serves one that is open; None if it answers, and only refuses
    new ones: a role without CONNECT, or no room for another session, ends none.

    :raises BottledWaterError: the server does not answer, or it starts or stops.
    """
    try:
        return connect(dsn, application="bottledwater probe")
    except BottledWaterError:
        if not _pings(dsn, pq.Ping.OK):
            raise
        return None


def _pings(dsn: str, answer: pq.Ping) -> bool:
    """Whether the server answers so to PQping
    (https://www.postgresql.org/docs/current/libpq-connect.html#LIBPQ-PQPING), which says OK also if it refuses this
    session, and REJECT only if it starts or stops."""
    # a short time-out, since PQping holds Python's lock
    return pq.PGconn.ping(conninfo.make_conninfo(**{**parse(dsn), "connect_timeout": 2}).encode()) == answer


#: servers that have let this process in, with the role
_answered: set[tuple[str, str]] = set()


def _unconnected(error: psycopg.Error, dsn: str, params: dict[str, Any]) -> BottledWaterError:
    """Why a session could not be opened."""
    # if there are several addresses, show the answer of one that has a server
    lines = str(error).strip().splitlines() or ["no answer"]
    at = next((at for at, line in enumerate(lines) if _ANSWER.search(line)), None)
    message = lines[at or 0].removeprefix("- ")
    if not isinstance(error, psycopg.OperationalError) or (at is None and _INVALID.search(message)):
        # what is quoted could be a part of a password
        shown = re.sub("'[^']*'|\"[^\"]*\"", "'…'", message)
        return Refused(f"The connection string is not valid: {shown}.")
    if at is not None:
        code, message = _code(message)
        if not _passes(code, message, dsn, params):
            # a client's certificate that is being exchanged is missing for a moment: then none is sent
            failed = (
                code == _PASSWORD
                or _FAILED in "".join(lines[at + 1 : at + 2])
                or (code[:2] == "28" and "sslcert" in params)
            )
            kind = CredentialsRefused if failed else Refused
            return kind(f"{describe(dsn)} refuses the connection: {message}.", _remedy(code, message, params))
    if "no password supplied" in message:
        return CredentialsRefused(
            f"{describe(dsn)} asks for a password, and the connection has none.",
            "Put it into the connection, a password file, a service file or PGPASSWORD. A password file is ignored "
            "unless it has mode 0600, which a file of a Kubernetes secret has not: "
            f"{DOCS}operations.html#rotating-a-password",
        )
    if at is None and _UNTRUSTED.search(message):
        return CredentialsRefused(f"The connection to {describe(dsn)} is not secure: {message}.", _securing(message))
    return Outage(f"{describe(dsn)} cannot be reached: {message}.")


def _code(message: str) -> tuple[str, str]:
    """The SQLSTATE of an answer, and the message with it at its end."""
    found = _CODE.search(message)
    return (found[1], f"{_CODE.sub('', message)} (SQLSTATE {found[1]})") if found else ("", message)


def _passes(code: str, message: str, dsn: str, params: dict[str, Any]) -> bool:
    """Whether a server refuses a connection only for now. Where its SQLSTATE does not tell, it passes if the server has
    let this process in before, or says to PQping that it starts or stops."""
    if code[:2] in _LASTING or _POOLED in message:
        return False
    return code[:2] in _PASSING or _who(dsn, params) in _answered or _pings(dsn, pq.Ping.REJECT)


def _who(dsn: str, params: Mapping[str, Any]) -> tuple[str, str]:
    return describe(dsn), str(params.get("user", ""))


def quoted(*names: str) -> str:
    """A name as it has to be written in SQL, for a statement that an error prints."""
    return sql.Identifier(*names).as_string(None)


def _securing(message: str) -> str:
    """What to do about a message of libpq's that :data:`_UNTRUSTED` knows."""
    if "private key" in message:
        return (
            f"On this host ({socket.gethostname()}), the file (sslkey) has to belong to the jobs' user with mode 0600, "
            "or to root with 0640 (on Kubernetes: defaultMode 0440 of the secret, and an fsGroup), and to fit sslcert."
        )
    if "certificate" in message or "does not support SSL" in message:
        return "Check sslmode, sslrootcert, the host's name, and with a certificate of the client sslcert and sslkey."
    if "alert" in message:
        return (
            "The server does not accept the client's certificate: check sslcert and sslkey, and until when it is valid."
        )
    return "Check sslmode, channel_binding, require_auth and gssencmode of the connection, and what the server offers."


def _remedy(code: str, message: str, params: Mapping[str, Any]) -> str:
    if _POOLED in message:  # PostgreSQL itself says "unrecognized configuration parameter"
        return f"A connection pooler has answered. {NO_POOLER}"
    role = quoted(params["user"]) if params.get("user") else "…"
    return {
        _PASSWORD: "Check user and password, and that pg_hba.conf has a line for this host (for replication too).",
        "28000": (
            "Check the role and its right to log in, how it authenticates (with a certificate: sslcert and sslkey), "
            "and that pg_hba.conf has a line for this host, database and role (for replication too)."
        ),
        "3D000": "Check the database in the connection.",
        "42501": (
            f"Let the role connect: GRANT CONNECT ON DATABASE … TO {role}; and replicate: ALTER ROLE {role} "
            f"REPLICATION (on RDS and Aurora: GRANT rds_replication TO {role})."
        ),
    }.get(code, "")


_NEW_SLOT = (
    "If the stream ends with this, the row is in the WAL as it was: then also run 'bottledwater "
    "drop-slot --when always', and start again"
)
#: what to do about an error of an open session, by its SQLSTATE: insufficient_privilege, untranslatable_character,
#: undefined_function
_REMEDIES = {
    "42501": f"The grants that the role needs: {DOCS}operations.html#grants-in-postgresql",
    "22P05": f"Correct the text in the table: it has a character that UTF-8 lacks. {_NEW_SLOT}.",
    "42883": f"If a type has no binary output function, give the column another type, or drop it. {_NEW_SLOT}.",
}


_LOCK_TABLE_FULL = (
    "The server's lock table is full: raise max_locks_per_transaction, and restart PostgreSQL. Whoever reads a "
    "partitioned table locks all of its partitions at once, so fewer partitions help as well, or fewer sessions that "
    "lock many tables."
)


#: PostgreSQL's functions that miss a segment of WAL (SQLSTATE 58P01, of the file that is not there)
_WAL_READERS = ("WalSndSegmentOpen", "CheckXLogRemoved")
#: the classes of errors whose messages quote values of rows: of data, of constraints, and of functions' own
_QUOTING = ("22", "23", "P0")
#: before each word but the first in the name of a class
_WORDS = re.compile(r"(?<!^)(?=[A-Z])")


class MessageTooLarge(Refused):
    """PostgreSQL cannot send a row: its message would have more than 1 GB. Who knows the row says which it is."""


class PublicationMissing(Refused):
    """A publication did not exist when what a walsender reads was committed."""


@contextlib.contextmanager
def defining(what: str) -> Iterator[None]:
    """A block of DDL. It has no values of rows, so what an event trigger says that forbids it is told in its words.

    :param what: what the block does, for the message.
    :raises Refused: an event trigger forbids it.
    """
    try:
        yield
    except psycopg.Error as error:
        # PL/pgSQL's RAISE, whatever code it gives
        if not isinstance(error, psycopg.errors.RaiseException) and error.diag.source_function != "exec_stmt_raise":
            raise
        raise Refused(
            f"{what} is forbidden by an event trigger: {str(error).splitlines()[0].rstrip('.')}.",
            "Have the event trigger let this role do it.",
        ) from error


def own(error: psycopg.Error | E, what: str) -> E | BottledWaterError:
    """The error of this package for one of psycopg, see :func:`outage`; any other as it is."""
    return outage(error, what) if isinstance(error, psycopg.Error) else error


def outage(error: psycopg.Error, what: str) -> BottledWaterError:
    """The error of this package for a psycopg error on an open session: an :class:`Outage` if the session or the server
    is gone, or if other sessions were in the way; otherwise :class:`Refused`.

    :param what: what was being done, for the message.
    """
    code, message = error.sqlstate or "", said(error)
    # class 08: connection; 57P: operator intervention; 53: out of resources; no code: libpq lost the connection. These
    # pass when other sessions have ended: 40P01 deadlock_detected, 40001 serialization_failure, 55P03
    # lock_not_available, 57014 query_canceled
    if not code or code[:2] in ("08", "53") or code[:3] == "57P" or code in ("40P01", "40001", "55P03", "57014"):
        # the parameter's name is in the hint in every language; real memory has the same SQLSTATE
        locks = "max_locks_per_transaction" in (error.diag.message_hint or "")
        return Outage(f"{what}: {message}.", _LOCK_TABLE_FULL if locks else "")
    if code == "54000" or "invalid memory alloc request size" in message:
        return MessageTooLarge(
            f"{what}: {message} (SQLSTATE {code}): a message of PostgreSQL has at most 1 GB, and that of a row would "
            "have more."
        )
    # PostgreSQL's functions that raised the error (src/backend/utils/cache/lsyscache.c, src/backend/utils/misc/rls.c;
    # those that read WAL: src/backend/replication/walsender.c, src/backend/access/transam/xlog.c): its messages may be
    # in any language
    if code == "42704" and error.diag.source_function == "get_publication_oid":
        return PublicationMissing(f"{what}: {message} (SQLSTATE {code}).")
    if code == "58P01" and error.diag.source_function in _WAL_READERS:
        return Refused(
            f"{what}: {message}. The server has lost WAL that the slot needs, though it takes the slot for valid.",
            "Changes are missing: 'bottledwater drop-slot --when always', then start again with a snapshot. That "
            "happens by pg_resetwal, by files that were removed from pg_wal, and by a restore without them.",
        )
    if error.diag.source_function == "check_enable_rls":
        return Refused(
            f"{what}: {message}: a policy would hide rows from this role.",
            "Use a role with BYPASSRLS (ALTER ROLE … BYPASSRLS), or the table's owner without FORCE ROW LEVEL "
            "SECURITY.",
        )
    remedy = "PostgreSQL's own message may quote a value: it is in the server's log." if code[:2] in _QUOTING else ""
    return Refused(f"{what}: {message} (SQLSTATE {code}).", _REMEDIES.get(code, remedy))


def said(error: psycopg.Error) -> str:
    """PostgreSQL's message, its first line; what the error is called, where the message may quote a value of a row,
    which may be masked or left out in what is published."""
    if (error.sqlstate or "")[:2] in _QUOTING:
        return _WORDS.sub(" ", type(error).__name__).lower()
    return next(iter(str(error).strip().splitlines()), type(error).__name__)


@contextlib.contextmanager
def session(dsn: str, what: str = "", **options: Any) -> Iterator[Connection]:
    """A connection for a block; psycopg's errors in it are raised as errors of this package, see :func:`outage`.

    :param what: what the block does, for the message.
    :param options: those of :func:`connect`, which also says what else is raised.
    """
    connection = connect(dsn, **options)
    try:
        yield connection
    except psycopg.Error as error:
        raise outage(error, what or describe(dsn)) from error
    finally:
        connection.close()
