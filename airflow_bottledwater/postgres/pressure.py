"""How hard a pipeline presses on its source: the WAL that its slot keeps, the xmin that its sessions hold, who waits
behind their locks, and how far physical standbys are behind."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass

import psycopg

from airflow_bottledwater.model.amounts import size
from airflow_bottledwater.postgres.connect import Connection

#: milliseconds to wait for the lock that PostgreSQL takes to measure a table: one that is being rewritten is locked for
#: long, and just then the WAL grows
_LOCKED_MS = 500

_QUERY = """
SELECT pg_wal_lsn_diff(pg_current_wal_lsn(), s.restart_lsn)::bigint,
       pg_wal_lsn_diff(pg_current_wal_lsn(), s.confirmed_flush_lsn)::bigint,
       (SELECT nullif(setting::bigint, -1) << 20 FROM pg_settings WHERE name = 'max_slot_wal_keep_size'),
       (SELECT max(age(backend_xmin)) FROM pg_stat_activity WHERE pid = ANY (%(sessions)s)),
       (SELECT count(DISTINCT pid) FROM pg_locks WHERE cardinality(%(sessions)s::int[]) > 0 AND NOT granted
            AND pg_blocking_pids(pid) && %(sessions)s::int[])
FROM (VALUES (1)) one LEFT JOIN pg_replication_slots s ON s.slot_name = %(slot)s
"""

# without pg_read_all_stats, other roles' walsenders are there, and have no lag
_STANDBYS = """
SELECT pid, coalesce(nullif(application_name, ''), client_addr::text, 'standby'),
       coalesce(extract(epoch FROM replay_lag), 0)::float8
FROM pg_stat_replication
WHERE pid NOT IN (SELECT active_pid FROM pg_replication_slots WHERE slot_type = 'logical' AND active_pid IS NOT NULL)
"""

_COST = """
SELECT coalesce(pg_wal_lsn_diff(pg_current_wal_lsn(), s.confirmed_flush_lsn), 0)::bigint,
       coalesce(pg_wal_lsn_diff(pg_current_wal_lsn(), s.restart_lsn), 0)::bigint,
       (SELECT count(*) FROM pg_class WHERE oid = ANY (%(tables)s::oid[])),
       CASE WHEN %(sized)s THEN (
            SELECT coalesce(sum(pg_table_size(p.oid)), 0) FROM unnest(%(tables)s::oid[]) t (oid), LATERAL (
                SELECT c.oid FROM pg_class c WHERE c.oid = t.oid AND c.relkind <> 'p'
                UNION SELECT relid FROM pg_partition_tree(t.oid::regclass) WHERE isleaf) p) END::bigint
FROM (VALUES (1)) one LEFT JOIN pg_replication_slots s ON s.slot_name = %(slot)s
"""

#: physical standbys: name and seconds of replay lag, by the process that sends to them
Standbys = dict[int, tuple[str, float]]


@dataclass(frozen=True, slots=True)
class Pressure:
    """What PostgreSQL has answered.

    :param kept: bytes of WAL that it keeps for the slot; None if there is no slot.
    :param unread: bytes of it that the slot's reader has not confirmed: the rest is kept for transactions that are
        still open.
    :param limit: bytes of ``max_slot_wal_keep_size``; None without a limit.
    :param xmin_age: age of the oldest xmin that one of the sessions holds, in transactions; 0 if none does.
    :param waiting: how many sessions wait for a lock that one of the sessions holds, or waits for itself.
    """

    kept: int | None
    unread: int | None
    limit: int | None
    xmin_age: int
    waiting: int


def ask(connection: Connection, slot: str, sessions: Collection[int]) -> Pressure:
    """Ask PostgreSQL, in one query.

    :param slot: the name of the slot.
    :param sessions: the process ids of the sessions that read tables.
    """
    row = connection.execute(_QUERY, {"slot": slot, "sessions": list(sessions)}).fetchone()
    assert row is not None
    kept, unread, limit, age, waiting = row
    return Pressure(kept, unread, limit, age or 0, waiting)


def standbys(connection: Connection) -> Standbys:
    """The physical standbys that replicate from this server directly."""
    return {pid: (name, lag) for pid, name, lag in connection.execute(_STANDBYS).fetchall()}


@dataclass(frozen=True, slots=True)
class DropCost:
    """What is lost with a slot, and what it takes to begin anew.

    :param unread: bytes of WAL with changes that were not confirmed.
    :param kept: bytes of WAL that the server may remove then.
    :param tables: how many tables have to be read again.
    :param table_bytes: their size, with TOAST and without indexes; None if one of them is locked.
    """

    unread: int
    kept: int
    tables: int
    table_bytes: int | None

    @property
    def counted(self) -> str:
        """The number of the tables, as text."""
        return f"{self.tables:,} {'table' if self.tables == 1 else 'tables'}"

    @property
    def sized(self) -> str:
        """The size of the tables, as text."""
        return "one is locked, so their size is not known" if self.table_bytes is None else size(self.table_bytes)

    def __str__(self) -> str:
        return (
            f"The changes in {size(self.unread)} of WAL that are not published are never sent, and a new snapshot "
            f"reads {self.counted} ({self.sized}) again; PostgreSQL may remove {size(self.kept)} of WAL."
        )


def drop_cost(connection: Connection, slot: str, tables: Collection[int]) -> DropCost:
    """What dropping a slot costs.

    :param slot: the name of the slot.
    :param tables: the oids of the pipeline's tables.
    """
    asked = {"slot": slot, "tables": list(tables)}
    try:
        with connection.transaction():
            connection.execute(f"SET LOCAL lock_timeout = {_LOCKED_MS}")
            row = connection.execute(_COST, {**asked, "sized": True}).fetchone()
    except psycopg.errors.LockNotAvailable:
        row = connection.execute(_COST, {**asked, "sized": False}).fetchone()
    assert row is not None
    return DropCost(*row)
