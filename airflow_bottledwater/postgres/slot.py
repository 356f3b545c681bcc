"""Logical replication slots: look, create, drop."""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass

import psycopg
from psycopg import sql

from airflow_bottledwater.errors import BottledWaterError, Outage, SlotError, SlotInUse
from airflow_bottledwater.model.boundary import widen_xid
from airflow_bottledwater.model.lsn import format_lsn, parse_lsn
from airflow_bottledwater.postgres.connect import Connection, check_stopped, connect, outage, pause

PLUGIN = "pgoutput"


@dataclass(frozen=True, slots=True)
class SlotState:
    """A row of pg_replication_slots, with how far it is behind (bytes of WAL).

    :param lag: from the slot's confirmed position to the end of the WAL.
    :param retained: from its restart position, what the server keeps on disk for it.
    :param two_phase: it gives transactions when they are prepared.
    :param invalidated: PostgreSQL's word for why it can never be used again (``invalidation_reason``, since 17); before, what
        is known; empty if it can.
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

#: ``invalidation_reason`` (SlotInvalidationCauses in src/backend/replication/slot.c) for people
_REASONS = {
    "wal_removed": "the WAL that it needs is gone (max_slot_wal_keep_size)",
    "rows_removed": "rows of the catalog that it needs are gone (a conflict on a standby)",
    "conflicting": "what it needs is gone (a conflict on a standby)",
    "wal_level_insufficient": "wal_level was below logical",
    "idle_timeout": "nobody read from it for idle_replication_slot_timeout",
}


def state(connection: Connection, name: str) -> SlotState | None:
    """The slot, or None."""
    row = connection.execute(_STATE + "WHERE slot_name = %s", (name,)).fetchone()
    return None if row is None else _state(row)


def states(connection: Connection) -> list[SlotState]:
    """All slots of the cluster."""
    return [_state(row) for row in connection.execute(_STATE + "ORDER BY 1")]


def _state(row: tuple) -> SlotState:  # type: ignore[type-arg]
    name, plugin, kind, database, pid, confirmed, *rest = row
    return SlotState(name, plugin, kind, database, pid, parse_lsn(confirmed) if confirmed else 0, *rest)


def check(found: SlotState, database: str) -> None:
    """Whether a slot of this name can be ours.

    :raises SlotError: another plugin, another database, prepared transactions, or invalidated.
    :raises SlotInUse: it is still being created.
    """
    if found.slot_type != "logical" or found.plugin != PLUGIN:
        kind = found.plugin or found.slot_type
        raise SlotError(
            f"Slot {found.name!r} uses {kind!r}, not pgoutput; it belongs to another application.",
            "Choose another slot name.",
        )
    if found.database != database:
        raise SlotError(
            f"Slot {found.name!r} belongs to database {found.database!r}, not {database!r}.",
            "Choose another slot name.",
        )
    reason = (
        "wal_removed" if found.wal_status == "lost" and found.invalidated in ("", "conflicting") else found.invalidated
    )
    if reason:
        raise SlotError(
            f"Slot {found.name!r} was invalidated: {_REASONS.get(reason, reason)}.",
            "Changes are missing. Drop the slot (bottledwater drop-slot --when always) and start again with a snapshot.",
        )
    if found.confirmed == 0 and found.active_pid is not None:
        # ReplicationSlotCreate: until it is consistent, a slot ends with the process that creates it
        raise SlotInUse(
            f"Slot {found.name!r} is being created by process {found.active_pid}, which waits for running transactions.",
            f"Wait until it has finished, and try again; or end it (SELECT pg_terminate_backend({found.active_pid})), which removes the "
            "unfinished slot.",
        )
    if found.confirmed == 0:
        raise SlotError(
            f"Slot {found.name!r} is unusable: its creation was interrupted.",
            f"Nothing was read from it, so nothing is lost: drop it (SELECT pg_drop_replication_slot('{found.name}')), and try again.",
        )
    if found.two_phase:
        raise SlotError(
            f"Slot {found.name!r} has two_phase: it gives a transaction when it is prepared, before it is known whether it commits.",
            f"Drop it (SELECT pg_drop_replication_slot('{found.name}')) and let create_slot create it, or create it without two_phase.",
        )


def blockers(connection: Connection, below: int | None = None) -> list[str]:
    """Who holds a transaction id (of any database): sessions and prepared transactions, oldest first.

    :param below: only ids below this 64-bit one.
    """
    sessions = connection.execute(
        "SELECT backend_xid::text::bigint, pid, coalesce(datname, ''), coalesce(usename, ''), coalesce(application_name, ''),"
        " state, xact_start FROM pg_stat_activity WHERE backend_xid IS NOT NULL AND pid <> pg_backend_pid() ORDER BY xact_start"
    ).fetchall()
    named = [
        f"session {pid} ({user}@{database}, {application or 'no application name'}{f', {status}, since {start:%H:%M:%S}' if start else ''})"
        # state and start of another role's session are seen with pg_read_all_stats only
        for xid, pid, database, user, application, status, start in sessions
        if below is None or widen_xid(xid, below) < below
    ]
    prepared = connection.execute("SELECT gid, database, prepared FROM pg_prepared_xacts ORDER BY prepared").fetchall()
    return named + [
        f"prepared transaction {gid!r} in {database} (since {at:%Y-%m-%d %H:%M})" for gid, database, at in prepared
    ]


def fresh_xid(connection: Connection) -> int:
    """X0: a transaction id of our own, rolled back. Every transaction whose commit record precedes now has a lower one.

    Not the xmax of a snapshot: transactions that run now may have an id above that.
    """
    with connection.transaction(force_rollback=True):
        row = connection.execute("SELECT pg_current_xact_id()::text::bigint").fetchone()
    assert row is not None
    return int(row[0])


def create(
    dsn: str, watcher: Connection, name: str, *, timeout: float, waiting: Callable[[list[str]], None] | None = None
) -> int:
    """Create the slot over the replication protocol; returns its consistent point A.

    The creation waits for running transactions of the whole cluster: bounded, and who they are is named. EXPORT_SNAPSHOT
    is asked for although the snapshot is not used: the builder then never restores a snapshot that another slot left,
    which before the minors of August 2024 could put A in the middle of transactions.

    :param watcher: an ordinary session that looks for whom the creation waits.
    :param waiting: told of them about every second.
    :raises SlotError: it waited too long, exists already, or no slot is free.
    """
    connection = connect(dsn, replication=True, application="bottledwater create slot")
    result: list[int | psycopg.Error | Outage] = []

    def work() -> None:
        try:
            row = connection.execute(
                sql.SQL("CREATE_REPLICATION_SLOT {} LOGICAL {} EXPORT_SNAPSHOT").format(
                    sql.Identifier(name), sql.Identifier(PLUGIN)
                )
            ).fetchone()
            assert row is not None
            result.append(parse_lsn(row[1]))
        except (psycopg.Error, Outage) as error:
            result.append(error)

    thread = threading.Thread(target=work, name="create-slot", daemon=True)
    thread.start()
    try:
        _wait_for(thread, watcher, name, timeout, waiting)
    finally:
        if thread.is_alive():
            # the server removes a slot whose creation is cancelled; one whose connection only ends, it may still finish
            with contextlib.suppress(psycopg.Error):
                connection.cancel_safe(timeout=2)
            thread.join(2)
        connection.close()
    outcome = result[0]
    if isinstance(outcome, int):
        return outcome
    if isinstance(outcome, Outage):
        raise outcome
    raise _not_created(name, outcome) from outcome


def _wait_for(
    thread: threading.Thread,
    watcher: Connection,
    name: str,
    timeout: float,
    waiting: Callable[[list[str]], None] | None,
) -> None:
    """Wait for the creation, and look about every second for whom it waits itself.

    :raises SlotError: it takes too long.
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
            raise SlotError(
                f"Slot {name!r} could not be created within {timeout:.0f} s: it waits for running transactions: "
                + ("; ".join(named) or "none that this role may see")
                + ".",
                "End them (COMMIT, ROLLBACK PREPARED, pg_terminate_backend), or raise create_slot_timeout.",
            )


def _not_created(name: str, error: psycopg.Error) -> BottledWaterError:
    if error.sqlstate == "42710":
        return SlotError(f"Slot {name!r} exists already.", "Choose another name, or drop it.")
    if error.sqlstate == "53400":
        return SlotError(
            f"Slot {name!r} cannot be created: all replication slots are in use.", "Raise max_replication_slots."
        )
    return outage(error, f"Creating slot {name!r}")


def advance(connection: Connection, name: str) -> int:
    """Move a slot that nothing was published from to the end of the WAL; returns its new position.

    :raises SlotInUse: somebody replicates from it.
    """
    with connection.transaction():
        # flushes what committed asynchronously before
        connection.execute("SET LOCAL synchronous_commit = local")
        connection.execute("SELECT pg_logical_emit_message(true, 'bottledwater', 'flush')")
    try:
        row = connection.execute(
            "SELECT end_lsn::text FROM pg_replication_slot_advance(%s, pg_current_wal_flush_lsn())", (name,)
        ).fetchone()
    except psycopg.errors.ObjectInUse as error:
        raise SlotInUse(f"Slot {name!r} is in use.", "Stop the job that reads from it.") from error
    assert row is not None
    return parse_lsn(row[0])


def release(connection: Connection, name: str, *, timeout: float) -> None:
    """End whoever replicates from the slot and wait until it is free (SQLSTATE 55006 until then).

    :raises SlotInUse: it did not become free.
    """
    deadline = time.monotonic() + timeout
    while True:
        found = state(connection, name)
        if found is None or found.active_pid is None:
            return
        # of whoever has it at this moment: a process id that was read before may be somebody else's by now
        connection.execute(
            "SELECT pg_terminate_backend(active_pid) FROM pg_replication_slots WHERE slot_name = %s AND active_pid = %s",
            (name, found.active_pid),
        )
        if time.monotonic() > deadline:
            raise SlotInUse(
                f"Slot {name!r} is still in use by process {found.active_pid}: its client reconnects.",
                "Stop that client first.",
            )
        pause(0.2)


def wait_free(connection: Connection, name: str, *, timeout: float) -> None:
    """Wait until nobody replicates from the slot.

    :raises SlotInUse: somebody still does.
    """
    deadline = time.monotonic() + timeout
    while (found := state(connection, name)) is not None and found.active_pid is not None:
        if time.monotonic() > deadline:
            raise SlotInUse(f"Slot {name!r} is in use by process {found.active_pid}.", "Stop its client first.")
        pause(0.1)


def drop(connection: Connection, name: str, *, timeout: float = 30.0) -> bool:
    """Drop the slot, ending whoever uses it; False if there was none."""
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
    """How much WAL the slot keeps on the server, for people."""
    return f"slot {found.name!r} at {format_lsn(found.confirmed)} keeps {found.retained / 2**20:,.1f} MiB of WAL on the server"


def wait_visible(connection: Connection, oldest_xid: int, *, timeout: float) -> None:
    """Wait until every transaction with an id below X0 has ended.

    :raises Outage: it took longer than ``timeout`` seconds; the message names who holds it.
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
