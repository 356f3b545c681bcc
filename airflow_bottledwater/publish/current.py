"""Rows as the source has them now, looked up by key: for large values that the stream left out, and for dead letters.

A value that is found here belongs to its key *today*. Since the change that needs it, the row may have been deleted and
the key used again, so such a value is never used for another key or another change.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TypeVar

import numpy as np
import numpy.typing as npt
import psycopg
from psycopg import pq, sql

from airflow_bottledwater.backoff import Waiting
from airflow_bottledwater.encoding import layout, wire
from airflow_bottledwater.encoding.kernels import unchanged
from airflow_bottledwater.encoding.masks import HASH, Mask
from airflow_bottledwater.errors import Outage
from airflow_bottledwater.model.boundary import Snapshot
from airflow_bottledwater.model.relation import SourceTable
from airflow_bottledwater.postgres import catalog, pgoutput
from airflow_bottledwater.postgres.connect import Connection, outage, query_with, said
from airflow_bottledwater.postgres.partitions import Known
from airflow_bottledwater.postgres.results import take_cells
from airflow_bottledwater.postgres.server import end_of_wal, wait_flushed
from airflow_bottledwater.publish.columns import altered, rewritten
from airflow_bottledwater.publish.definitions import MISFITS
from airflow_bottledwater.publish.row_query import (
    RowQuery,
    equality,
    following_key,
    listed,
    unnested,
    wire_types,
)
from airflow_bottledwater.publish.unsent import kept

T = TypeVar("T")

#: the binary values of the key columns, in the order of the key
Key = tuple[bytes, ...]

#: keys in one query; PostgreSQL takes at most 65,535 parameters
_KEYS = 1000
#: bytes of values at which a look-up ends that does not end before its last key
_ALL = 1 << 62
#: seconds in which the WAL has to be on disk that a look-up's snapshot sees; then the look-up is repeated
_FLUSH = 30.0
#: SQLSTATE insufficient_privilege
_DENIED = "42501"
#: a key has a label that no enum has any more, or a composite with other attributes
_UNFIT = (psycopg.errors.InvalidTextRepresentation, *MISFITS)


@dataclass(frozen=True, slots=True)
class FoundRows:
    """What a look-up found.

    :param rows: key → the values of the requested columns, None for SQL's NULL; a key without a row is missing.
    :param unreadable: column → why the value that it had in the relation version cannot be read any more.
    :param left_out: see :class:`Cells`.
    :param unsent: the keys whose rows may have gone with a partition, see :mod:`~airflow_bottledwater.publish.unsent`.
    :param rewritten: see :func:`~airflow_bottledwater.publish.columns.rewritten`.
    :param unfit: key → why no row can be looked up by it.
    """

    rows: dict[Key, list[bytes | None]] = field(default_factory=dict)
    unreadable: dict[int, str] = field(default_factory=dict)
    left_out: int = 0
    unsent: Collection[Key] = ()
    rewritten: Collection[int] = ()
    unfit: Mapping[Key, str] = field(default_factory=dict)

    def with_others(self, other: FoundRows) -> FoundRows:
        """What both look-ups of a relation version's keys have found."""
        return FoundRows(
            {**self.rows, **other.rows},
            {**self.unreadable, **other.unreadable},
            unsent={*self.unsent, *other.unsent},
            rewritten={*self.rewritten, *other.rewritten},
            unfit={**self.unfit, **other.unfit},
        )


@dataclass(frozen=True, slots=True)
class KeyBatch:
    """Many keys of one table, in arrays.

    :param fields: a row of :data:`~airflow_bottledwater.encoding.layout.FIELD` for each key; they point into ``data``.
    """

    data: npt.NDArray[np.uint8]
    fields: layout.Rows

    def __len__(self) -> int:
        return len(self.fields)

    def some(self, first: int, last: int) -> KeyBatch:
        """The keys [first, last)."""
        return KeyBatch(self.data, self.fields[first:last])

    def key(self, number: int) -> Key:
        """One of the keys."""
        return tuple(bytes(self.data[f["position"] : f["position"] + f["length"]]) for f in self.fields[number])

    def array(self, column: int, oid: int) -> bytes:
        """One key column of all keys, as a PostgreSQL array in binary form.

        :param oid: the type of its elements.
        """
        fields = np.ascontiguousarray(self.fields[:, column])
        out: npt.NDArray[np.uint8] = np.empty(20 + 4 * len(fields) + int(fields["length"].sum()), dtype=np.uint8)
        unchanged.write_array(self.data, fields, oid, out)
        return out.tobytes()


@dataclass(frozen=True, slots=True)
class Cells:
    """What a look-up of many keys found.

    :param cells: a row of :data:`~airflow_bottledwater.encoding.layout.FIELD` for each key, with the requested columns;
        they point into ``data``. If a key has no row, its cells are marked as unchanged values (``FIELD_UNCHANGED``).
    :param unreadable: see :class:`FoundRows`; these columns' cells are marked in the same way.
    :param left_out: how many of the last keys were not looked up, since the values before them are large; their cells
        say nothing.
    :param unsent: the numbers of the keys whose rows may have gone with a partition, see
        :mod:`~airflow_bottledwater.publish.unsent`.
    """

    cells: layout.Rows
    data: npt.NDArray[np.uint8]
    unreadable: dict[int, str] = field(default_factory=dict)
    left_out: int = 0
    unsent: Sequence[int] = ()

    @classmethod
    def without_rows(cls, keys: KeyBatch, columns: Sequence[int], unreadable: dict[int, str] | None = None) -> Cells:
        """The result if no row is found for any key."""
        cells = np.zeros((len(keys), len(columns)), dtype=layout.FIELD)
        cells["kind"] = wire.FIELD_UNCHANGED
        return cls(cells, np.zeros(1, dtype=np.uint8), unreadable or {})


class CurrentRows:
    """Looks rows up by key.

    :param dsn: the connection string of the source.
    :param session: returns an open connection to it.
    :param waiting: called when a look-up has to wait; it sleeps, or raises to give up.
    :ivar partitions: those that the topics know, by the oid of the table that is published as one.
    """

    def __init__(self, dsn: str, session: Callable[[], Connection], waiting: Waiting) -> None:
        self._dsn, self._session, self._waiting = dsn, session, waiting
        self.partitions: Mapping[int, Known] = {}

    def read(
        self,
        table: SourceTable,
        keys: Sequence[Key],
        columns: Sequence[int],
        *,
        as_text: Collection[str] = (),
        since: int = 0,
    ) -> FoundRows:
        """The rows of these keys, all read under one snapshot, unless a key is unfit.

        :param table: the relation version that the keys belong to; the table is found by its oid, whatever its name is
            today.
        :param columns: indexes in ``table.columns``.
        :param as_text: columns whose values are, in keys and rows, as a snapshot has them: PostgreSQL's text instead of
            binary.
        :param since: the transaction since which columns may have been rewritten.
        :raises Refused: the role may not read the table, or a row-level policy could hide rows from it.
        """

        def ask(source: _Source) -> FoundRows:
            return replace(source.rows(keys, columns, as_text), rewritten=source.rewritten(since))

        try:
            return self._look_up(table, (), ask) or FoundRows()
        except _Unfit as unfit:
            if len(keys) == 1:
                return FoundRows(unfit={keys[0]: str(unfit)})
            halves = keys[: len(keys) // 2], keys[len(keys) // 2 :]
            first, second = (self.read(table, some, columns, as_text=as_text, since=since) for some in halves)
            return first.with_others(second)

    def fetch(
        self, table: SourceTable, keys: KeyBatch, columns: Sequence[int], *, xids: Iterable[int], most: int = _ALL
    ) -> Cells:
        """Like :meth:`read` for many keys, without a Python object for each row.

        :param xids: transactions that need the rows, which the snapshot must see; the look-up is repeated until it
            does.
        :param most: bytes of values at which the look-up ends, behind the row that reaches them.
        """
        xids = sorted(set(xids))
        try:
            found = self._look_up(table, xids, lambda source: source.cells(keys, columns, most))
        except _Unfit as unfit:
            if len(keys) == 1:
                return Cells.without_rows(keys, columns, dict.fromkeys(columns, str(unfit)))
            # what is behind the first half is left to another look-up
            found = self.fetch(table, keys.some(0, len(keys) // 2), columns, xids=xids, most=most)
            rest = Cells.without_rows(keys.some(len(keys) // 2, len(keys)), columns).cells
            return replace(found, cells=np.concatenate([found.cells, rest]), left_out=found.left_out + len(rest))
        if found is None:
            why = "its table was dropped" if table.key else "its row cannot be looked up, since its table had no key"
            return Cells.without_rows(keys, columns, dict.fromkeys(columns, why))
        return found

    def _look_up(self, table: SourceTable, xids: Sequence[int], ask: Callable[[_Source], T]) -> T | None:
        """Query the table as it is now, waiting out outages; None if it does not exist any more or the relation version
        has no key."""
        while True:
            try:
                return self._try(table, xids, ask)
            except _UNFIT as error:
                raise _Unfit(
                    "its row cannot be looked up by its key, in which a label or an attribute was renamed, added or "
                    f"dropped since ({said(error)})"
                ) from error
            except psycopg.Error as error:
                translated = outage(error, f"Reading rows of {table.qualified}")
                # a right that was revoked can be granted again; the pipeline's status names it
                if not isinstance(translated, Outage) and error.sqlstate != _DENIED:
                    raise translated from error
                self._waiting(str(translated))
            except Outage as error:
                self._waiting(error)
            except _NotVisible:
                # a synchronous standby may hold the commit back: an outage, not a record error
                self._waiting(
                    f"A transaction that changed {table.qualified} is streamed but not yet visible to other sessions: "
                    "its commit waits for a synchronous standby. synchronous_standby_names must name no other than "
                    "physical ones."
                )
                time.sleep(0.01)

    def _try(self, table: SourceTable, xids: Sequence[int], ask: Callable[[_Source], T]) -> T | None:
        connection = self._session()
        while True:
            named = catalog.names(connection, [table.oid])
            if not named or not table.key:
                return None
            name = sql.Identifier(*named[table.oid])
            connection.execute("BEGIN ISOLATION LEVEL REPEATABLE READ READ ONLY")
            try:
                # the lock comes first: under it neither name nor columns change, and the snapshot sees them as they are
                connection.execute("SET LOCAL lock_timeout = '2s'")
                try:
                    only = sql.SQL("" if table.partitioned else "ONLY ")
                    connection.execute(sql.SQL("LOCK TABLE {}{} IN ACCESS SHARE MODE").format(only, name))
                except (psycopg.errors.UndefinedTable, psycopg.errors.InvalidSchemaName):
                    continue  # dropped or renamed since its name was read
                if not catalog.still_named(connection, named):
                    continue
                row = connection.execute("SELECT pg_current_snapshot()::text").fetchone()
                assert row is not None
                end = end_of_wal(connection)
                snapshot = Snapshot.parse(row[0])
                if not all(snapshot.sees(xid) for xid in xids):
                    raise _NotVisible
                known = self.partitions.get(table.oid, {})
                found = ask(_Source(connection, table, name, known, xids, snapshot.xmax))
                # a crash could undo an asynchronous commit that the snapshot sees: then what replaced a value, or
                # deleted a row, never comes
                wait_flushed(connection, self._dsn, end, timeout=_FLUSH)
                return found
            finally:
                if not connection.closed:
                    connection.execute("ROLLBACK")


class _Unfit(Exception):
    """PostgreSQL does not take a key, or one of the keys, any more."""


class _NotVisible(Exception):
    """Not every one of the transactions is visible yet."""


class _Source:
    """Queries a table that is locked, under one snapshot.

    :param table: the relation version whose columns and key are used.
    :param known: the partitions that the topic knows.
    :param xids: see :func:`altered`, as is ``latest``.
    """

    def __init__(
        self,
        connection: Connection,
        table: SourceTable,
        name: sql.Identifier,
        known: Known,
        xids: Sequence[int],
        latest: int,
    ) -> None:
        self._connection, self._table = connection, table
        self._known, self._xids, self._latest = known, xids, latest
        self._altered = altered(connection, table, xids, latest)
        self._key = [column for name in table.key for column in table.columns if column.name == name]
        self._text, self._arrays = wire_types(connection, table)
        masks = enumerate(Mask.of(column) for column in table.columns)
        self._hashes = {c: mask for c, mask in masks if mask.kind == HASH}
        self._key_oids = [column.type.base_oid for column in self._key]
        self._query = RowQuery(table, name, self._key, equality(connection, table.oid, self._key), self._text)

    def rows(
        self, keys: Sequence[Key], columns: Sequence[int], as_text: Collection[str], most: int = _ALL
    ) -> FoundRows:
        """The rows of these keys.

        :param most: see :meth:`CurrentRows.fetch`.
        """
        unreadable, readable = self._readable(columns)
        rows: dict[Key, list[bytes | None]] = {}
        looked_up, left_out = list(keys), 0
        for start in range(0, len(keys) if readable is not None else 0, _KEYS):
            some = keys[start : start + _KEYS]
            query = replace(self._query, converted=as_text).select(
                listed(len(some), len(self._key)), "i.n", readable or [], most
            )
            result = self._ask(query, some, as_text)
            for i in range(result.ntuples):
                key = some[int.from_bytes(result.get_value(i, 0) or b"", "big")]
                read = {c: self._hashed(c, result.get_value(i, place + 1)) for place, c in enumerate(readable or [])}
                rows[key] = [read.get(c) for c in columns]
                most -= sum(len(value or b"") for value in read.values())
            following = following_key(result)
            if following is None and most <= 0:
                following = len(some)
            if following is not None:
                left_out = len(keys) - start - following
                looked_up = looked_up[: start + following]
                break
        missing = [key for key in looked_up if key not in rows] if readable is not None else []
        return FoundRows(rows, unreadable, left_out, self._unsent(missing, as_text))

    def _ask(self, query: sql.Composed, keys: Sequence[Key], as_text: Collection[str]) -> pq.abc.PGresult:
        """Query with a list of keys as parameters."""
        formats = [0 if column.name in as_text or column.name in self._text else 1 for column in self._key]
        return query_with(
            self._connection,
            query,
            [value for key in keys for value in key],
            self._key_oids * len(keys),
            formats * len(keys),
        )

    def _unsent(self, missing: Sequence[Key], as_text: Collection[str] = ()) -> Collection[Key]:
        """Those keys without a row whose rows may have gone with a partition."""
        if not missing or not self._table.partitioned:
            return ()
        condition = kept(self._connection, self._table, self._known, self._xids, self._latest)
        found = set(missing)
        for start in range(0, len(missing), _KEYS):
            some = missing[start : start + _KEYS]
            query = self._query.fulfilling(listed(len(some), len(self._key)), condition)
            result = self._ask(query, some, as_text)
            found -= {some[int.from_bytes(result.get_value(i, 0) or b"", "big")] for i in range(result.ntuples)}
        return found

    def rewritten(self, since: int) -> set[int]:
        """See :func:`~airflow_bottledwater.publish.columns.rewritten`."""
        return rewritten(self._connection, self._table, since, self._latest)

    def cells(self, keys: KeyBatch, columns: Sequence[int], most: int) -> Cells:
        """The rows of many keys, by a single query to which each key column is passed as an array.

        :param most: see :meth:`CurrentRows.fetch`.
        """
        unreadable, readable = self._readable(columns)
        if readable is None:
            return Cells.without_rows(keys, columns, unreadable)
        oids = self._key_oids
        used = [*self._key, *(self._table.columns[c] for c in readable)]
        apart = any(column.name in self._text for column in used) or any(c in self._hashes for c in readable)
        if apart or not self._arrays.keys() >= set(oids):
            return self._cells_of_rows(keys, columns, most)
        result = query_with(
            self._connection,
            self._query.select(unnested(len(self._key)), "i.n - 1", readable, most),
            [keys.array(k, oid) for k, oid in enumerate(oids)],
            [self._arrays[oid] for oid in oids],
            [1] * len(oids),
        )
        cells, read = (Cells.without_rows(keys, asked).cells for asked in (columns, readable))
        data = take_cells(result, read)
        cells[:, [columns.index(c) for c in readable]] = read
        following = following_key(result)
        looked_up = len(keys) if following is None else following
        missing: dict[Key, int] = {}
        if self._table.partitioned and readable:
            numbers = np.flatnonzero(read["kind"][:looked_up, 0] == wire.FIELD_UNCHANGED).tolist()
            missing = {keys.key(number): number for number in numbers}
        unsent = [missing[key] for key in self._unsent(list(missing))]
        return Cells(cells, data, unreadable, len(keys) - looked_up, unsent)

    def _hashed(self, c: int, value: bytes | None) -> bytes | None:
        if value is None or c not in self._hashes:
            return value
        return self._hashes[c].masked("b", value)[1]

    def _cells_of_rows(self, keys: KeyBatch, columns: Sequence[int], most: int) -> Cells:
        cells = Cells.without_rows(keys, columns).cells
        numbers = {keys.key(number): number for number in range(len(keys))}
        found, data = self.rows(list(numbers), columns, (), most), bytearray(1)
        for key, values in found.rows.items():
            for place, value in enumerate(values):
                if columns[place] not in found.unreadable:
                    text = self._table.columns[columns[place]].name in self._text
                    sent = wire.FIELD_TEXT if text else wire.FIELD_BINARY
                    kind = wire.FIELD_NULL if value is None else sent
                    cells[numbers[key], place] = (kind, len(data), len(value or b""))
                    data += value or b""
        unsent = [numbers[key] for key in found.unsent]
        return Cells(cells, np.frombuffer(data, dtype=np.uint8), found.unreadable, found.left_out, unsent)

    def _readable(self, columns: Sequence[int]) -> tuple[dict[int, str], list[int] | None]:
        """The columns that cannot be read, with the reasons, and those that can; None instead of the latter if no row
        can be found."""
        if any(self._table.columns[c].name in self._table.key for c in self._hashes):
            return dict.fromkeys(columns, "its row cannot be looked up, since its key is published as a hash"), None
        if any(self._table.columns[c].name in self._table.key for c in self._altered):
            # rows cannot be looked up by a key whose columns or types have changed
            reason = "its row cannot be looked up, since a key column was dropped, renamed or given another type"
            return dict.fromkeys(columns, reason), None
        unreadable = {c: reason for c, reason in self._altered.items() if c in columns}
        return unreadable, [c for c in columns if c not in self._altered]


def with_key(table: SourceTable, message: pgoutput.RowMessage) -> pgoutput.RowMessage:
    """The message with a complete key. A key value that is stored out of line is not sent again in the new row if it is
    unchanged; the old key, which is sent then, contains it (ExtractReplicaIdentity,
    src/backend/access/heap/heapam.c)."""
    if message.old is None or message.new is None:
        return message
    new = [
        old if value.kind == "u" and column.name in table.key else value
        for column, value, old in zip(table.columns, message.new, message.old, strict=True)
    ]
    return replace(message, new=new)


def row_key(table: SourceTable, values: Sequence[pgoutput.Field]) -> Key:
    """The binary values of a row's key columns, in the order of the key."""
    places = {c.name: i for i, c in enumerate(table.columns)}
    return tuple(values[places[name]].data for name in table.key)
