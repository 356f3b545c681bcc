"""Logical replication slots: read their state, create, advance, release and drop them."""

from __future__ import annotations

import contextlib
import re
import threading
import time
import uuid
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass

import psycopg
from psycopg import sql

from airflow_bottledwater.backoff import check_stopped, pause
from airflow_bottledwater.errors import BottledWaterError, Outage, SlotError, SlotInUse
from airflow_bottledwater.model.boundary import widen_xid
from airflow_bottledwater.model.lsn import format_lsn, parse_lsn
from airflow_bottledwater.postgres import sessions
from airflow_bottledwater.postgres.connect import Connection, connect, outage
from airflow_bottledwater.postgres.publication import as_option
from airflow_bottledwater.postgres.server import OWN_PREFIX

PLUGIN = "pgoutput"
#: by major version, the first release that restores no snapshot of another slot while it creates one, which could put
#: the consistent point in the middle of transactions (SnapBuildFindSnapshot in
#: src/backend/replication/logical/snapbuild.c; https://www.postgresql.org/docs/release/16.4/)
_NOT_RESTORED = {14: 140013, 15: 150008, 16: 160004}


def application(name: str) -> str:
    """The application name of the session that replicates from a slot, unless the connection string has one."""
    return f"bottledwater {name}"


@dataclass(frozen=True, slots=True)
class SlotState:
    """A row of pg_replication_slots, with how far the slot is behind.

    :param confirmed: the LSN up to which the slot is confirmed; 0 if its creation is not complete.
    :param lag: bytes of WAL from the confirmed LSN to the end of the WAL.
    :param retained: bytes of WAL from its restart LSN: what the server keeps on disk for it.
    :param safe_wal_size: bytes of WAL that can be written before the slot may be lost; None if there is no limit.
    :param two_phase: whether it sends transactions when they are prepared.
    :param invalidated: PostgreSQL's reason why it can never be used again (``invalidation_reason``, since 17; derived
        from other columns before); empty if it can be used.
    """

    name: str
    plugin: str
    slot_type: str
    database: str
    active_pid: int | None
    confirmed: int
    wal_status: str
    lag: int
    retained: int
    safe_wal_size: int | None
    two_phase: bool = False
    invalidated: str = ""


_STATE = """
SELECT slot_name, coalesce(plugin, ''), slot_type, coalesce(database, ''), active_pid, confirmed_flush_lsn::text,
       coalesce(wal_status, ''),
       coalesce(pg_wal_lsn_diff(pg_current_wal_lsn(), confirmed_flush_lsn), 0)::bigint,
       coalesce(pg_wal_lsn_diff(pg_current_wal_lsn(), restart_lsn), 0)::bigint, safe_wal_size, two_phase,
       coalesce(to_jsonb(s) ->> 'invalidation_reason', CASE WHEN wal_status = 'lost' THEN 'wal_removed'
                WHEN (to_jsonb(s) ->> 'conflicting')::bool THEN 'conflicting' END, '')
FROM pg_replication_slots s
"""

#: ``invalidation_reason`` (SlotInvalidationCauses in src/backend/replication/slot.c) → its explanation
_REASONS = {
    "wal_removed": "the WAL that it needs is gone (max_slot_wal_keep_size)",
    "rows_removed": "rows of the catalog that it needs are gone (a conflict on a standby)",
    "conflicting": "what it needs is gone (a conflict on a standby)",
    "wal_level_insufficient": "wal_level was below logical",
    "idle_timeout": "nobody read from it for idle_replication_slot_timeout",
}


def state(connection: Connection, name: str) -> SlotState | None:
    """The state of the slot; None if it does not exist."""
    row = connection.execute(_STATE + "WHERE slot_name = %s", (name,)).fetchone()
    return None if row is None else _state(row)


def existing(connection: Connection, name: str, remedy: str) -> SlotState:
    """The state of the slot.

    :param remedy: what to do without it, for the message.
    :raises SlotError: there is no such slot.
    """
    found = state(connection, name)
    if found is None:
        raise SlotError(f"There is no slot {name!r}.", remedy)
    return found


def states(connection: Connection) -> list[SlotState]:
    """The states of all slots of the cluster."""
    return [_state(row) for row in connection.execute(_STATE + "ORDER BY 1")]


def _state(row: tuple) -> SlotState:  # type: ignore[type-arg]
    name, plugin, kind, database, pid, confirmed, *rest = row
    return SlotState(name, plugin, kind, database, pid, parse_lsn(confirmed) if confirmed else 0, *rest)


#: the option of START_REPLICATION, whose name some clients quote, and a name in it (SplitIdentifierString in
#: src/backend/utils/adt/varlena.c)
_OPTION = re.compile(r"""publication_names"?\s+'((?:[^']|'')*)'""", re.IGNORECASE)
_NAME = re.compile(r""""((?:[^"]|"")*)"|([^",\s]+)""")


def publications(command: str) -> set[str]:
    """The publications that a command ``START_REPLICATION`` names, whoever has sent it; none in any other command."""
    options = _OPTION.findall(command) if command.startswith("START_REPLICATION") else []
    found = _NAME.findall(",".join(options).replace("''", "'"))
    return {quoted.replace('""', '"') or plain.lower() for quoted, plain in found}


def streaming(connection: Connection, wanted: Iterable[str]) -> list[str]:
    """The slots of this database from which somebody streams now with one of some publications. PostgreSQL shows what
    sessions of other roles do to members of pg_read_all_stats alone.

    :param wanted: the names of the publications.
    """
    rows = connection.execute(
        "SELECT s.slot_name, a.query FROM pg_replication_slots s JOIN pg_stat_activity a ON a.pid = s.active_pid WHERE "
        "s.database = current_database() ORDER BY 1"
    )
    return [name for name, command in rows if not publications(command or "").isdisjoint(wanted)]


def check(found: SlotState, database: str, *, recorded: bool = False) -> None:
    """Check that the pipeline can use an existing slot.

    :param recorded: whether the pipeline's saved state has a slot of this name.
    :raises SlotError: it has another plugin, is of another database, was invalidated, was not created completely, or
        has two_phase.
    :raises SlotInUse: it is still being created.
    """
    if found.slot_type != "logical" or found.plugin != PLUGIN:
        kind = found.plugin or found.slot_type
        raise SlotError(
            f"Slot {found.name!r} uses {kind!r}, not pgoutput; it belongs to another application.",
            "Choose another slot name.",
        )
    if found.database != database:
        renamed = (
            "If the databases have exchanged their names (ALTER DATABASE … RENAME), the slot is the pipeline's own, of "
            f"the database that is {found.database!r} now: drop it there (SELECT pg_drop_replication_slot("
            f"'{found.name}')), run 'bottledwater drop-slot --when always', and start again with a snapshot. Otherwise "
            "choose another slot name."
        )
        raise SlotError(
            f"Slot {found.name!r} belongs to database {found.database!r}, not {database!r}.",
            renamed if recorded else "Choose another slot name.",
        )
    reason = (
        "wal_removed" if found.wal_status == "lost" and found.invalidated in ("", "conflicting") else found.invalidated
    )
    if reason:
        raise SlotError(
            f"Slot {found.name!r} was invalidated: {_REASONS.get(reason, reason)}.",
            "Changes are missing. Drop the slot (bottledwater drop-slot --when always) and start again with a "
            "snapshot.",
        )
    if found.confirmed == 0 and found.active_pid is not None:
        # ReplicationSlotCreate: until it is consistent, a slot disappears with the process that creates it
        raise SlotInUse(
            f"Slot {found.name!r} is being created by process {found.active_pid}, which waits for running "
            "transactions.",
            f"Wait until it has finished, and try again; or end it (SELECT pg_terminate_backend({found.active_pid})), "
            "which removes the unfinished slot.",
        )
    if found.confirmed == 0:
        raise SlotError(
            f"Slot {found.name!r} is unusable: its creation was interrupted.",
            f"Nothing was read from it, so nothing is lost: drop it (SELECT pg_drop_replication_slot('{found.name}')), "
            "and try again.",
        )
    if found.two_phase:
        raise SlotError(
            f"Slot {found.name!r} has two_phase: it gives a transaction when it is prepared, before it is known "
            "whether it commits.",
            f"Drop it (SELECT pg_drop_replication_slot('{found.name}')) and let create_slot create it, or create it "
            "without two_phase.",
        )


def blockers(connection: Connection, below: int | None = None) -> list[str]:
    """The sessions and prepared transactions of all databases that have a transaction id, oldest first, as text.

    :param below: include only those with an id below this 64-bit one.
    """
    rows = connection.execute(
        sql.SQL(
            "SELECT a.backend_xid::text::bigint, a.pid, {} FROM pg_stat_activity a WHERE a.backend_xid IS NOT NULL "
            "AND a.pid <> pg_backend_pid() ORDER BY a.xact_start"
        ).format(sessions.COLUMNS)
    ).fetchall()
    prepared = connection.execute(
        "SELECT transaction::text::bigint, gid, database, prepared FROM pg_prepared_xacts ORDER BY prepared"
    ).fetchall()

    def counts(xid: int) -> bool:
        return below is None or widen_xid(xid, below) < below

    return [sessions.named(*session) for xid, *session in rows if counts(xid)] + [
        f"prepared transaction {gid!r} in {database} (since {at:%Y-%m-%d %H:%M})"
        for xid, gid, database, at in prepared
        if counts(xid)
    ]


def fresh_xid(connection: Connection) -> int:
    """X0: the id of a new transaction, which is rolled back. Every transaction that has committed before has a lower
    id.

    The xmax of a snapshot would not do: transactions that are running now may have an id above it.
    """
    with connection.transaction(force_rollback=True):
        row = connection.execute("SELECT pg_current_xact_id()::text::bigint").fetchone()
    assert row is not None
    return int(row[0])


def create(
    dsn: str, watcher: Connection, name: str, *, timeout: float, waiting: Callable[[list[str]], None] | None = None
) -> int:
    """Create the slot over the replication protocol; returns its consistent point A.

    The creation waits for running transactions of the whole cluster; the wait has a limit, and the error names them.

    :param watcher: an ordinary session, with which to find the transactions that the creation waits for.
    :param timeout: seconds for the creation.
    :param waiting: called with these transactions, as text, about every second.
    :raises Outage: the creation waited too long for running transactions, or they have too many subtransactions;
        nothing is left of it.
    :raises SlotError: the slot exists already, or no slot is free.
    """
    # a snapshot is not needed, and could not be exported while a transaction with many subtransactions runs; but where
    # one is exported, none is restored
    exports = watcher.info.server_version < _NOT_RESTORED.get(watcher.info.server_version // 10000, 0)
    connection, row = _create(dsn, watcher, name, "LOGICAL", timeout, waiting, exports=exports)
    connection.close()
    return parse_lsn(row[1])


def _create(
    dsn: str,
    watcher: Connection,
    name: str,
    kind: str,
    timeout: float,
    waiting: Callable[[list[str]], None] | None = None,
    *,
    exports: bool = True,
) -> tuple[Connection, tuple[str, str, str, str]]:
    """Create a slot; returns the session that has created it, and the server's answer: the slot's name, its consistent
    point, the name of its exported snapshot (None if there is none), and the plugin.

    :param exports: whether a snapshot is exported.
    """
    statement = sql.SQL("CREATE_REPLICATION_SLOT {} {} {} {}").format(
        sql.Identifier(name), sql.SQL(kind), sql.Identifier(PLUGIN),
        sql.SQL("EXPORT_SNAPSHOT" if exports else "NOEXPORT_SNAPSHOT"),
    )  # fmt: skip
    connection = connect(dsn, replication=True, application="bottledwater create slot")
    result: list[tuple[str, str, str, str] | psycopg.Error | Outage] = []

    def work() -> None:
        try:
            row = connection.execute(statement).fetchone()
            assert row is not None
            result.append((row[0], row[1], row[2], row[3]))
        except (psycopg.Error, Outage) as error:
            result.append(error)

    thread = threading.Thread(target=work, name="create-slot", daemon=True)
    thread.start()
    try:
        _wait_for(thread, watcher, name, timeout, waiting)
    except BaseException:
        # if the creation is cancelled, the server removes the slot; if only the connection ended, it might still
        # complete it
        with contextlib.suppress(psycopg.Error):
            connection.cancel_safe(timeout=2)
        thread.join(2)
        connection.close()
        raise
    outcome = result[0]
    if isinstance(outcome, tuple):
        return connection, outcome
    connection.close()
    if isinstance(outcome, Outage):
        raise outcome
    raise _not_created(watcher, name, outcome) from outcome


class TemporarySlot:
    """A slot that disappears with its session, made to read tables under its exported snapshot: that shows what was
    committed before its consistent point, and the slot has everything that was committed later.

    :param watcher: see :func:`create`.
    :raises BottledWaterError: see :func:`create`.
    :ivar consistent_point: the LSN of the first commit that the snapshot does not show, at least.
    :ivar exported: the name of the snapshot, which can be imported until :meth:`changes` is called.
    """

    def __init__(self, dsn: str, watcher: Connection, *, timeout: float) -> None:
        self._name = f"bottledwater_{uuid.uuid4().hex[:16]}"
        self._connection, row = _create(dsn, watcher, self._name, "TEMPORARY LOGICAL", timeout)
        self.consistent_point, self.exported = parse_lsn(row[1]), row[2]

    def changes(self, publications: Sequence[str], end: int, *, messages: bool) -> Iterator[tuple[int, bytes]]:
        """The messages of the transactions whose commits end at ``end`` or before, and perhaps of one more, with their
        LSNs. They are those that the stream gets from its slot, so that changes have the same positions. It can be
        called several times.

        :param messages: whether the stream gets logical messages, too, which are counted among the changes.
        :raises psycopg.Error: the session is gone.
        """
        names = as_option(publications, self._connection)
        # as an ordinary statement of a replication session, which may have no parameters
        query = sql.SQL(
            "SELECT lsn::text, data FROM pg_logical_slot_peek_binary_changes({}, {}, NULL, 'proto_version', '1',"
            " 'publication_names', {}, 'binary', 'true', 'messages', {})"
        ).format(*map(sql.Literal, (self._name, format_lsn(end), names, "true" if messages else "false")))
        for lsn, data in self._connection.execute(query):
            yield parse_lsn(lsn), data

    def close(self) -> None:
        """End the session, and with it the slot."""
        self._connection.close()


def _wait_for(
    thread: threading.Thread,
    watcher: Connection,
    name: str,
    timeout: float,
    waiting: Callable[[list[str]], None] | None,
) -> None:
    """Wait for the creation, and find out about every second which transactions it waits for itself.

    :raises Outage: it takes too long.
    """
    deadline = time.monotonic() + timeout
    while thread.is_alive():
        thread.join(1.0)
        if not thread.is_alive():
            return
        check_stopped()
        named = blockers(watcher)
        if waiting:
            waiting(named)
        if time.monotonic() > deadline:
            raise Outage(
                f"Slot {name!r} could not be created within {timeout:.0f} s: it waits for running transactions: "
                + ("; ".join(named) or "none that this role may see")
                + ".",
                "End them (COMMIT, ROLLBACK PREPARED, pg_terminate_backend), or raise create_slot_timeout.",
            )


def _not_created(watcher: Connection, name: str, error: psycopg.Error) -> BottledWaterError:
    if error.sqlstate == "42710":
        return SlotError(f"Slot {name!r} exists already.", "Choose another name, or drop it.")
    if error.sqlstate == "53400":
        return SlotError(
            f"Slot {name!r} cannot be created: all replication slots are in use.", "Raise max_replication_slots."
        )
    if error.sqlstate == "40001":  # SnapBuildInitialSnapshot (src/backend/replication/logical/snapbuild.c)
        return Outage(
            f"Slot {name!r} cannot be created: its snapshot would have more running transactions, with their "
            "subtransactions, than PostgreSQL has room for. Running: "
            + ("; ".join(blockers(watcher)) or "none that this role may see")
            + ".",
            "Try again when a transaction with many savepoints, or with many blocks with EXCEPTION in PL/pgSQL, has "
            "ended: most likely the oldest of these. Or end it (pg_terminate_backend). On PostgreSQL 14.13, 15.8, 16.4 "
            "and later, only a table that is added while the stream runs needs such a snapshot.",
        )
    return outage(error, f"Creating slot {name!r}")


def advance(connection: Connection, name: str) -> int:
    """Move a slot from which nothing was published yet to the end of the WAL; returns its new position.

    :raises SlotInUse: a session replicates from it.
    """
    with connection.transaction():
        # the commit of this also flushes what was committed asynchronously before
        connection.execute("SET LOCAL synchronous_commit = local")
        connection.execute("SELECT pg_logical_emit_message(true, %s, 'flush')", (OWN_PREFIX,))
    try:
        row = connection.execute(
            "SELECT end_lsn::text FROM pg_replication_slot_advance(%s, pg_current_wal_flush_lsn())", (name,)
        ).fetchone()
    except psycopg.errors.ObjectInUse as error:
        raise SlotInUse(f"Slot {name!r} is in use.", "Stop the job that reads from it.") from error
    assert row is not None
    return parse_lsn(row[0])


def release(connection: Connection, name: str, *, timeout: float) -> None:
    """End the session that replicates from the slot, and wait until the slot is free.

    :param timeout: seconds.
    :raises SlotInUse: it did not become free in time.
    """
    deadline = time.monotonic() + timeout
    while True:
        found = state(connection, name)
        if found is None or found.active_pid is None:
            return
        # only if it still has the slot: the process id may belong to another session by now
        connection.execute(
            "SELECT pg_terminate_backend(active_pid) FROM pg_replication_slots WHERE slot_name = %s AND active_pid = "
            "%s",
            (name, found.active_pid),
        )
        if time.monotonic() > deadline:
            raise SlotInUse(
                f"Slot {name!r} is still in use by process {found.active_pid}: its client reconnects.",
                "Stop that client first.",
            )
        pause(0.2)


def drop(connection: Connection, name: str, *, timeout: float = 30.0) -> bool:
    """Drop the slot, and end the session that uses it; returns False if there was no slot.

    :raises SlotInUse: it did not become free within ``timeout`` seconds.
    """
    deadline = time.monotonic() + timeout
    while True:
        release(connection, name, timeout=max(1.0, deadline - time.monotonic()))
        if state(connection, name) is None:
            return False
        try:
            connection.execute("SELECT pg_drop_replication_slot(%s)", (name,))
            return True
        except psycopg.errors.ObjectInUse as error:
            if time.monotonic() > deadline:
                raise SlotInUse(f"Slot {name!r} is in use.", "Stop the job that reads from it.") from error
            pause(0.2)


def retained(found: SlotState) -> str:
    """How much WAL the slot makes the server keep, as text for messages."""
    return (
        f"slot {found.name!r} at {format_lsn(found.confirmed)} keeps {found.retained / 2**20:,.1f} MiB of "
        "WAL on the server"
    )


def wait_visible(connection: Connection, oldest_xid: int, *, timeout: float) -> None:
    """Wait until every transaction with an id below X0 has ended.

    :raises Outage: it took longer than ``timeout`` seconds; the message names the transactions.
    """
    deadline = time.monotonic() + timeout
    while True:
        row = connection.execute("SELECT pg_snapshot_xmin(pg_current_snapshot())::text::bigint").fetchone()
        assert row is not None
        if row[0] >= oldest_xid:
            return
        if time.monotonic() > deadline:
            raise Outage(
                f"Transactions older than {oldest_xid} still run after {timeout:.0f} s: "
                + ("; ".join(blockers(connection, oldest_xid)) or "none that this role may see")
                + ".",
                "End them, or raise create_slot_timeout.",
            )
        pause(0.05)
