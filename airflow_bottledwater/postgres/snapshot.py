"""The exported snapshot: the session that holds it, the boundary that it defines, and the ranges that tasks read under
it."""

from __future__ import annotations

import time
import zlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

import psycopg
from psycopg import sql

from airflow_bottledwater.backoff import pause
from airflow_bottledwater.encoding.mapping import TableMapping
from airflow_bottledwater.errors import HolderEnded, Outage, Refused
from airflow_bottledwater.model.boundary import Snapshot
from airflow_bottledwater.model.relation import SourceTable
from airflow_bottledwater.postgres import catalog, locks, partitions, row_filter, sessions, slot
from airflow_bottledwater.postgres.connect import NO_POOLER, Connection, connect, outage, session
from airflow_bottledwater.postgres.partitions import Partition
from airflow_bottledwater.postgres.server import check_primary, end_of_wal, wait_flushed

#: one above the highest block number (MaxBlockNumber + 1, src/include/storage/block.h): the end of a range that is open
LAST_BLOCK = 2**32 - 1
#: bytes of a block of a server that was built as usual (BLCKSZ)
BLOCK_BYTES = 8192
#: ranges of one table at most: its plan is one record of the state topic, which must stay small
MAX_RANGES = 4096


@dataclass(frozen=True, slots=True)
class ExportedSnapshot:
    """A snapshot that a holder has exported.

    :param snapshot: B.
    :param insert_lsn: L, read after B: the start of every visible transaction's commit record is strictly below it.
    :param exported: the snapshot's name, by which tasks import it.
    """

    snapshot: Snapshot
    insert_lsn: int
    exported: str


#: schema and name of tables, by oid
_Named = Mapping[int, tuple[str, str]]


def _lock(connection: Connection, named: _Named) -> None:
    if named:
        names = sql.SQL(", ").join(sql.SQL("ONLY {}").format(sql.Identifier(*each)) for each in named.values())
        connection.execute(sql.SQL("LOCK TABLE {} IN ACCESS SHARE MODE").format(names))


def _begin(connection: Connection, named: _Named, lock_timeout: float) -> None:
    """Begin a transaction that reads under one snapshot, and lock its tables before it has one."""
    connection.execute("BEGIN ISOLATION LEVEL REPEATABLE READ READ ONLY")
    limit = sql.Literal(f"{max(1, int(lock_timeout * 1000))}ms")
    connection.execute(sql.SQL("SET LOCAL lock_timeout = {}").format(limit))
    _lock(connection, named)


def _check_names(connection: Connection, named: _Named) -> None:
    """Check that the tables that were locked by name are those whose names were read.

    :raises Outage: a table was renamed or created anew in between; the next attempt reads today's names.
    """
    if not catalog.still_named(connection, named):
        tables = ", ".join(map(".".join, list(named.values())[:5]))
        raise Outage(
            f"A table was renamed or recreated while the snapshot of {tables} began.", "Run the snapshot again."
        )


class SnapshotExporter:
    """The holder: a session that keeps one snapshot until the last task has read under it.

    The order inside :meth:`open` is essential: the locks come first (an ALTER or TRUNCATE that commits between snapshot
    and lock would make the table appear empty), then the snapshot B, then L, then the export.

    :raises Outage: the server is a standby now.
    """

    def __init__(self, dsn: str) -> None:
        self._dsn = dsn
        self._connection = connect(dsn, application="bottledwater snapshot holder")
        try:
            # a standby's snapshots have no list of running transactions, so rows would be lost
            check_primary(self._connection, dsn)
        except BaseException:
            self._connection.close()
            raise

    def open(self, tables: Sequence[SourceTable], *, oldest_xid: int, timeout: float) -> ExportedSnapshot:
        """Lock the tables, take a snapshot and export it; repeated until the snapshot sees no transaction older than X0
        as running.

        :param oldest_xid: X0.
        :param timeout: seconds for each of the waits.
        :raises Outage: transactions older than X0 did not end in time, or other sessions have locks on the tables (the
            message names them), or a table was dropped meanwhile.
        :raises Refused: a table may not be read.
        """
        slot.wait_visible(self._connection, oldest_xid, timeout=timeout)
        oids = [t.oid for t in tables]
        deadline = time.monotonic() + timeout
        while True:
            try:
                held = locks.in_rounds(
                    self._connection,
                    [*oids, *partitions.names(self._connection, oids)],
                    locks.SHARE,
                    lambda: self._try(tables),
                    what="The snapshot",
                    timeout=timeout,
                )
            except psycopg.errors.UndefinedTable as error:
                # the next attempt leaves it out
                raise Outage(
                    f"A table was dropped while its lock was waited for: {str(error).splitlines()[0]}."
                ) from error
            except psycopg.Error as error:
                raise outage(error, "Taking the snapshot") from error
            if held.snapshot.xmin >= oldest_xid:
                return held
            self._connection.execute("ROLLBACK")
            if time.monotonic() > deadline:
                raise Outage(
                    f"Within {timeout:.0f} s no snapshot could be taken in which all transactions before {oldest_xid} "
                    "have ended.",
                    "Run the snapshot again, or raise create_slot_timeout.",
                )
            pause(0.05)

    def _try(self, tables: Sequence[SourceTable]) -> ExportedSnapshot:
        execute = self._connection.execute
        while True:
            below = partitions.names(self._connection, [t.oid for t in tables])
            named = {**{t.oid: (t.schema, t.name) for t in tables}, **below}
            execute("BEGIN ISOLATION LEVEL REPEATABLE READ READ ONLY")
            # all tables are locked by one statement, with one limit: while it waits for the last table, others may wait
            # for the first
            locks.limit(self._connection, len(named))
            try:
                _lock(self._connection, named)
            except locks.BUSY:
                execute("ROLLBACK")
                raise
            except psycopg.errors.UndefinedTable:
                execute("ROLLBACK")
                if partitions.names(self._connection, [t.oid for t in tables]) == below:
                    raise
                continue  # a partition was dropped since its name was read
            execute("SET LOCAL statement_timeout = 0")
            row = execute("SELECT pg_current_snapshot()::text").fetchone()
            assert row is not None
            snapshot = Snapshot.parse(row[0])
            # no lock of ours keeps a partition from being attached before the snapshot: those that it shows are the
            # ones to be read
            if partitions.names(self._connection, [t.oid for t in tables]) == below:
                break
            execute("ROLLBACK")
        _check_names(self._connection, named)
        end = end_of_wal(self._connection)
        exported = execute("SELECT pg_export_snapshot()").fetchone()
        assert exported is not None
        return ExportedSnapshot(snapshot, end, exported[0])

    def wait_flushed(self, lsn: int, *, timeout: float) -> None:
        """See :func:`wait_flushed`, on the holder's own connection."""
        wait_flushed(self._connection, self._dsn, lsn, timeout=timeout)

    def load(self, oids: Sequence[int], mapping: TableMapping | None = None) -> list[SourceTable]:
        """The tables with their sizes, read by the holder itself, under its locks. Another session could have to wait
        behind an ALTER that waits for the holder, while the holder waits for that session: a deadlock that PostgreSQL
        cannot detect."""
        return catalog.load(self._connection, oids, mapping, sizes=True)

    def partitions(self, tables: Sequence[SourceTable]) -> dict[int, list[Partition]]:
        """What is below the partitioned ones of these tables, with sizes; see :meth:`load`."""
        found = partitions.below(self._connection, [table.oid for table in tables if table.partitioned])
        sizes = catalog.measured(self._connection, [each.oid for some in found.values() for each in some])
        return {oid: [replace(each, pages=sizes[each.oid]) for each in some] for oid, some in found.items()}

    def waiting_behind(self) -> list[str]:
        """The sessions that wait for a lock that the holder's ACCESS SHARE blocks, as text. Other sessions queue up
        behind them, so that the application is blocked."""
        with session(self._dsn, "Looking who waits", application="bottledwater lock watch") as other:
            rows = other.execute(
                sql.SQL("SELECT a.pid, {} FROM pg_stat_activity a WHERE %s = ANY (pg_blocking_pids(a.pid))").format(
                    sessions.COLUMNS
                ),
                (self.pid,),
            ).fetchall()
        return [sessions.named(*row) for row in rows]

    @property
    def pid(self) -> int:
        """The process id of the session."""
        return self._connection.pid

    def alive(self) -> None:
        """Check that the holder's session still exists.

        :raises Outage: it does not, and with it the snapshot is gone.
        """
        try:
            self._connection.execute("SELECT 1")
        except psycopg.Error as error:
            raise outage(error, "The session that holds the snapshot was lost") from error

    def close(self) -> None:
        """End the session, which releases snapshot and locks."""
        self._connection.close()


@dataclass(frozen=True, slots=True)
class OwnSnapshot:
    """A snapshot that is read under by the session that took it.

    :param table: the table as the snapshot shows it, with its size.
    :param insert_lsn: L, see :class:`ExportedSnapshot`.
    :param parts: the tables that have its rows, with their sizes: itself, or its leaf partitions in the order of their
        oids.
    :param partitions: what is below it, if it is partitioned.
    """

    snapshot: Snapshot
    insert_lsn: int
    table: SourceTable
    parts: list[SourceTable]
    partitions: list[Partition]

    def files(self) -> dict[int, int]:
        """By the oid of each part of the table, a number that is another one when rows may be in it that were not there
        before, although nobody has changed them: it has got another file, or was put below the table since. It is not
        0."""
        below = {each.oid: each for each in self.partitions}
        numbers = {}
        for part in self.parts:
            attached, each = list[str](), below.get(part.oid)
            while each is not None:
                attached.append(each.attached)
                each = below.get(each.parent)
            numbers[part.oid] = zlib.crc32(repr((part.filenode, attached)).encode()) | 1
        return numbers


def begin_reading(connection: Connection, oid: int, mapping: TableMapping, *, lock_timeout: float) -> OwnSnapshot:
    """Begin a transaction that reads one table: lock it, and then take the transaction's snapshot; for the order, see
    :class:`SnapshotExporter`.

    :param lock_timeout: seconds to wait for the lock; others wait behind it meanwhile.
    :raises Outage: the lock was not granted in time, or the table, or a partition of it, was renamed or dropped
        meanwhile.
    :raises Refused: the table does not exist any more.
    """
    named = catalog.names(connection, [oid]).get(oid)
    if named is None:
        raise Refused("The table does not exist any more.", "Ask for a live snapshot of the others.")
    everything = {oid: named, **partitions.names(connection, [oid])}
    try:
        _begin(connection, everything, lock_timeout)
    except locks.BUSY as error:
        connection.execute("ROLLBACK")
        who = "; ".join(locks.holders(connection, list(everything), locks.SHARE)) or "nobody any more"
        raise Outage(f"No lock on {'.'.join(named)} within {lock_timeout:.0f} s. In the way: {who}.") from error
    except (psycopg.errors.UndefinedTable, psycopg.errors.InvalidSchemaName) as error:
        # its session had the lock already when the names were read; the next attempt reads today's
        connection.execute("ROLLBACK")
        raise Outage(
            f"{'.'.join(named)}, or a partition of it, was renamed or dropped while its lock was waited for."
        ) from error
    row = connection.execute("SELECT pg_current_snapshot()::text").fetchone()
    assert row is not None
    end = end_of_wal(connection)
    tables = catalog.load(connection, [oid], mapping, sizes=True)
    if not tables or (tables[0].schema, tables[0].name) != named:
        connection.execute("ROLLBACK")
        raise Outage(f"{'.'.join(named)} was renamed or dropped while it was locked.")
    below = partitions.below(connection, [oid]).get(oid, [])
    if {each.oid for each in below} != everything.keys() - {oid}:
        connection.execute("ROLLBACK")
        raise Outage(f"A partition of {'.'.join(named)} was attached or detached while it was locked.")
    below.sort(key=lambda each: each.oid)
    sizes = catalog.measured(connection, [each.oid for each in below])
    below = [replace(each, pages=sizes[each.oid]) for each in below]
    parts = partitions.parts(tables[0], below)
    table = replace(tables[0], pages=sum(part.pages for part in parts))
    return OwnSnapshot(Snapshot.parse(row[0]), end, table, parts, below)


def ranges(table: SourceTable, bytes_per_range: int, block_size: int = BLOCK_BYTES) -> list[tuple[int, int]]:
    """Block ranges [from, to) of a table, of this size, or larger if there would be too many. The last one has no end,
    since the table may grow until a snapshot is resumed."""
    step = max(1, bytes_per_range // block_size, -(-table.pages // MAX_RANGES))
    starts = list(range(0, max(1, table.pages), step))
    return [(start, LAST_BLOCK if i == len(starts) - 1 else starts[i + 1]) for i, start in enumerate(starts)]


def begin_task(connection: Connection, table: SourceTable, held: ExportedSnapshot, *, lock_timeout: float) -> None:
    """Lock a table in a task's session, and then import the holder's snapshot.

    The lock comes first: otherwise, a TRUNCATE that waited for the holder could run when the holder ends, and the task
    would read an empty table.

    :param lock_timeout: seconds to wait for this lock, behind sessions that wait for the holder's.
    :raises Outage: the holder is gone (the snapshot's name is no longer valid), the lock was not granted in time, or
        the table was renamed or rewritten since the plan.
    :raises Refused: the imported snapshot is not B.
    """
    named = {table.oid: (table.schema, table.name)}
    try:
        snapshot = begin_under(connection, named, held.exported, lock_timeout=lock_timeout)
    except locks.BUSY as error:
        connection.execute("ROLLBACK")
        who = "; ".join(locks.holders(connection, [table.oid], locks.SHARE)) or "nobody any more"
        raise Outage(
            f"A lane of the snapshot did not get a lock on {table.qualified} within {lock_timeout:.0f} s. In the way: "
            f"{who}.",
            "Run the snapshot again (finished ranges are kept), or raise lock_queue_limit.",
        ) from error
    except (
        psycopg.errors.InvalidParameterValue,
        psycopg.errors.UndefinedObject,
        # the snapshot's name still exists, but not the process that exported it (ProcArrayInstallImportedXmin)
        psycopg.errors.ObjectNotInPrerequisiteState,
    ) as error:
        raise HolderEnded(
            "The session that holds the snapshot has ended.", "Run the snapshot again: finished ranges are kept."
        ) from error
    # The COPY also locks the indexes, which a REINDEX can keep for hours. Nobody else has to wait longer because this
    # session waits there: its ACCESS SHARE is in the way of those only who want the whole index for themselves
    connection.execute("SET LOCAL lock_timeout = 0")
    _check_names(connection, named)
    filenode = connection.execute("SELECT pg_relation_filenode(%s::oid)", (table.oid,)).fetchone()
    # a partitioned table has no file of its own
    if filenode is not None and (filenode[0] or 0) != table.filenode:
        raise Outage(f"{table.qualified} was rewritten since its snapshot was planned.", "Run the snapshot again.")
    if snapshot != held.snapshot:
        raise Refused(
            f"The imported snapshot is {snapshot}, not {held.snapshot}, which was exported.",
            NO_POOLER,
        )


def begin_under(connection: Connection, named: _Named, exported: str, *, lock_timeout: float) -> Snapshot:
    """Begin a transaction that reads tables under an exported snapshot, which is returned: they are locked first, see
    :func:`begin_task`.

    :param named: schema and name of each table, by oid.
    :param lock_timeout: seconds to wait for the locks.
    :raises psycopg.Error: the locks are not granted in time, or the snapshot is gone.
    """
    _begin(connection, named, lock_timeout)
    connection.execute(sql.SQL("SET TRANSACTION SNAPSHOT {}").format(sql.Literal(exported)))
    row = connection.execute("SELECT pg_current_snapshot()::text").fetchone()
    assert row is not None
    return Snapshot.parse(row[0])


def blocks(first: int, last: int) -> sql.Composed:
    """The condition for the rows of the blocks [first, last)."""
    where = sql.SQL("ctid >= {}::tid").format(sql.Literal(f"({first},0)"))
    if last < LAST_BLOCK:
        where += sql.SQL(" AND ctid < {}::tid").format(sql.Literal(f"({last},0)"))
    return where


def copy_query(
    table: SourceTable,
    columns: sql.Composable,
    first: int,
    last: int,
    condition: sql.Composable | None = None,
    *,
    places: sql.Composed | None = None,
    text: bool = False,
) -> sql.Composed:
    """The COPY of one block range; with ONLY, so that tables that inherit from it are not read twice. Of a partitioned
    table, it is the range of each partition.

    :param condition: which of its published rows are read; None for all.
    :param places: the places of rows, as a condition, if only these can be meant; they are in the range.
    :param text: whether in COPY's text format, which uses the types' output functions, instead of the binary one.
    """
    where = row_filter.within(table, places or blocks(first, last))
    if condition is not None:
        where += sql.SQL(" AND (\n{}\n)").format(condition)
    name = sql.Identifier(table.schema, table.name)
    source = name if table.partitioned else sql.SQL("ONLY {}").format(name)
    return sql.SQL("COPY (SELECT {} FROM {} WHERE {}) TO STDOUT (FORMAT {})").format(
        columns, source, where, sql.SQL("text" if text else "binary")
    )


def deal(plan: Sequence[tuple[SourceTable, Sequence[tuple[int, int]]]], lanes: int) -> Iterator[tuple[int, int, int]]:
    """Assign ranges to lanes, round robin over all tables: (table index, range index, lane)."""
    n = 0
    for t, (_, parts) in enumerate(plan):
        for r in range(len(parts)):
            yield t, r, n % lanes
            n += 1
