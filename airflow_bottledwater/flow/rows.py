"""What a row message lacks: unchanged TOAST values, and the text of values that have no kernel.

Both are rare or batched, so this is Python; both go over one connection of the publisher's process.
"""

from __future__ import annotations

import time
from dataclasses import dataclass, field, replace

import numpy as np
import numpy.typing as npt
import psycopg
from psycopg import pq

from airflow_bottledwater.encoding import kernels, wire
from airflow_bottledwater.encoding.program import Programs
from airflow_bottledwater.encoding.types import Sql
from airflow_bottledwater.errors import CredentialsRefused, Outage, ProtocolError
from airflow_bottledwater.flow.batch import Batch
from airflow_bottledwater.kafka import deadletter
from airflow_bottledwater.kafka.publisher import Waiting
from airflow_bottledwater.model.boundary import widen_xid
from airflow_bottledwater.model.relation import Table, quote
from airflow_bottledwater.postgres import pgoutput
from airflow_bottledwater.postgres.connect import Connection, connect, outage

#: values of one conversion query
_CHUNK = 1000


#: side buffer and offsets of a batch without converted values
NOTHING_CONVERTED: tuple[npt.NDArray[np.uint8], npt.NDArray[np.int64]] = (
    np.zeros(1, dtype=np.uint8),
    np.zeros(1, dtype=np.int64),
)


@dataclass(slots=True)
class Completed:
    """A batch whose rows have all their values.

    :param side: converted texts, one after the other; ``side_offsets`` has one entry more than there are.
    :param failed: change → why it cannot be completed.
    :param superseded: changes whose new row is left out, since a later change of the same key is still to come.
    """

    batch: Batch
    side: npt.NDArray[np.uint8]
    side_offsets: npt.NDArray[np.int64]
    failed: dict[int, str] = field(default_factory=dict)
    superseded: set[int] = field(default_factory=set)


class _ColumnGone(Exception):
    """A value has to be read again from a column that was dropped or renamed: no later change need bring it."""


class Completer:
    """Fills in what rows lack.

    :param waiting: called while a re-read has to wait; may raise.
    """

    def __init__(self, dsn: str, waiting: Waiting) -> None:
        self._dsn = dsn
        self._waiting = waiting
        self._connection: Connection | None = None

    def close(self) -> None:
        """End the connection."""
        if self._connection is not None:
            self._connection.close()
            self._connection = None

    def _session(self) -> Connection:
        while self._connection is None or self._connection.closed:
            try:
                self._connection = connect(self._dsn, application="bottledwater values")
            except (Outage, CredentialsRefused) as error:
                # the stream's own connection has proven the credentials; they may have been rotated since
                self._waiting(error)
        return self._connection

    def complete(self, batch: Batch, programs: Programs) -> Completed:
        """Everything that the kernels need for the batch."""
        done = Completed(batch, *NOTHING_CONVERTED)
        if len(batch):
            self._fill_unchanged(done, programs)
            self._convert(done, programs)
        return done

    # ------------------------------------------------------------------ values without a kernel
    def _convert(self, done: Completed, programs: Programs) -> None:
        if not programs.columns[:, wire.P_CONVERT].any():
            return
        batch = done.batch
        found: npt.NDArray[np.int64] = np.zeros((max(1024, len(batch)), 4), dtype=np.int64)
        while True:
            count = kernels.find_conversions(
                batch.data,
                batch.changes,
                len(batch),
                programs.relations,
                programs.columns,
                programs.keys,
                programs.scratch(),
                found,
            )
            if count <= len(found):
                break
            found = np.zeros((count, 4), dtype=np.int64)
        texts: list[bytes] = [b""] * count
        for column in np.unique(found[:count, 2]):
            places = np.flatnonzero(found[:count, 2] == column)
            values = [bytes(batch.data[p : p + n]) for p, n in found[places, :2]]
            for place, text in zip(places, self._converted(*programs.conversions[int(column)], values), strict=True):
                if isinstance(text, str):
                    done.failed[int(found[place, 3])] = f"PostgreSQL cannot turn a value into text: {text}"
                else:
                    texts[place] = text
        # writable, as all our buffers: compiled code is compiled anew for a read-only one
        done.side = np.frombuffer(bytearray(b"".join(texts) or b"\0"), dtype=np.uint8)
        done.side_offsets = np.concatenate([[0], np.cumsum([len(t) for t in texts])]).astype(np.int64)

    def _converted(self, oid: int, convert: Sql | None, values: list[bytes]) -> list[bytes | str]:
        """What the server makes of binary values of one type; a str is an error message."""
        texts: list[bytes | str] = []
        for start in range(0, len(values), _CHUNK):
            chunk = values[start : start + _CHUNK]
            try:
                texts += self._query(oid, convert, chunk)
            except psycopg.Error as error:
                translated = outage(error, "Converting values to text")
                if isinstance(translated, Outage):
                    self._waiting(str(translated))
                    return texts + self._converted(oid, convert, values[start:])
                if len(chunk) == 1:
                    texts.append(str(error).splitlines()[0])
                else:  # one of them is to blame: each for itself
                    for value in chunk:
                        texts += self._converted(oid, convert, [value])
        return texts

    def _query(self, oid: int, convert: Sql | None, values: list[bytes]) -> list[bytes | str]:
        rows = ",".join(f"({i},${i + 1})" for i in range(len(values)))
        # a value list keeps arrays whole, where unnest would flatten them
        assert convert is not None
        query = f"SELECT {convert('v')} FROM (VALUES {rows}) t(n, v) ORDER BY n"
        result = self._session().pgconn.exec_params(
            query.encode(), values, param_types=[oid] * len(values), param_formats=[1] * len(values), result_format=1
        )
        if result.status != pq.ExecStatus.TUPLES_OK:
            raise psycopg.errors.error_from_result(result)
        return [result.get_value(i, 0) or b"" for i in range(len(values))]

    # ------------------------------------------------------------------ unchanged TOAST
    def _fill_unchanged(self, done: Completed, programs: Programs) -> None:
        batch = done.batch
        found: npt.NDArray[np.int64] = np.zeros(len(batch), dtype=np.int64)
        count = kernels.find_unchanged(
            batch.data, batch.changes, len(batch), programs.relations, programs.scratch(), found
        )
        if not count:
            return
        changes = batch.changes.copy()
        extra = bytearray()
        seen: dict[tuple[int, tuple[bytes, ...]], list[pgoutput.Field]] = {}
        lacking = set(found[:count].tolist())
        left_out: set[int] = set()
        failed: dict[int, str] = {}
        affected = {int(changes[i, wire.C_RELATION]) for i in lacking}
        for i in range(len(batch)):
            relation = int(changes[i, wire.C_RELATION])
            if relation not in affected or changes[i, wire.C_KIND] == pgoutput.TRUNCATE:
                continue
            at, length = int(changes[i, wire.C_OFFSET]), int(changes[i, wire.C_LENGTH])
            message = pgoutput.row(bytes(batch.data[at : at + length]))
            table = programs.tables[relation]
            reread = False
            if i in lacking:
                message = _with_key(table, message)
                try:
                    filled, reread = self._fill(table, message, seen, relation, int(changes[i, wire.C_XID]))
                except _ColumnGone as error:
                    failed[i] = str(error)
                    assert message.new is not None
                    seen.pop((relation, _key(table, message.new)), None)
                    continue
                if filled is None:
                    done.superseded.add(i)
                    assert message.new is not None
                    seen.pop((relation, _key(table, message.new)), None)
                    if message.old is None or _key(table, message.old) == _key(table, message.new):
                        left_out.add(i)
                        continue
                    # of a key change the tombstone remains: nothing else would delete the old key
                    filled = replace(message, kind="D", new=None)
                    changes[i, wire.C_KIND] = pgoutput.DELETE
                encoded = filled.encode()
                changes[i, wire.C_OFFSET], changes[i, wire.C_LENGTH] = len(batch.data) + len(extra), len(encoded)
                changes[i, wire.C_FLAGS] |= wire.FLAG_REREAD if reread else 0
                extra += encoded
                message = filled
            if message.old is not None:
                seen.pop((relation, _key(table, message.old)), None)
            if message.new is not None:
                seen[relation, _key(table, message.new)] = message.new
        kept = np.array([i for i in range(len(batch)) if i not in left_out], dtype=np.int64)
        data = np.concatenate([batch.data, np.frombuffer(bytes(extra), dtype=np.uint8)])
        done.batch = replace(batch, data=data, changes=changes[kept])
        done.failed |= {int(np.searchsorted(kept, i)): reason for i, reason in failed.items()}

    def _fill(
        self,
        table: Table,
        message: pgoutput.RowMessage,
        seen: dict[tuple[int, tuple[bytes, ...]], list[pgoutput.Field]],
        relation: int,
        xid: int,
    ) -> tuple[pgoutput.RowMessage | None, bool]:
        """From the old row; else from an earlier change of that key in the batch; else from the table."""
        assert message.new is not None
        new = list(message.new)
        old_key = _key(table, message.old) if message.old is not None else _key(table, new)
        for source in (message.old if message.old_tag == "O" else None, seen.get((relation, old_key))):
            if source is not None:
                new = [s if f.kind == "u" and s.kind in "btn" else f for f, s in zip(new, source, strict=True)]
        missing = [c for c, f in enumerate(new) if f.kind == "u"]
        if not missing:
            return replace(message, new=new), False
        values = self._reread(table, _key(table, new), missing, xid)
        if values is None:
            return None, False
        for c, value in zip(missing, values, strict=True):
            new[c] = pgoutput.Field("n") if value is None else pgoutput.Field("b", value)
        return replace(message, new=new), True

    def _reread(self, table: Table, key: tuple[bytes, ...], missing: list[int], xid: int) -> list[bytes | None] | None:
        """The values as the table has them under a snapshot in which the change itself is visible. None: row or table is gone,
        so a later change of the key is still to come."""
        while True:
            try:
                return self._try_reread(table, key, missing, xid)
            except psycopg.Error as error:
                if error.sqlstate in ("42P01", "3F000"):
                    return None
                if error.sqlstate == "42703":
                    names = ", ".join(repr(table.columns[c].name) for c in missing)
                    raise _ColumnGone(
                        f"the unchanged value of {names} is not in the stream, and the column was dropped or renamed since"
                    ) from None
                translated = outage(error, f"Reading TOAST values of {table.qualified}")
                if not isinstance(translated, Outage):
                    raise translated from error
                self._waiting(str(translated))

    def _try_reread(
        self, table: Table, key: tuple[bytes, ...], missing: list[int], xid: int
    ) -> list[bytes | None] | None:
        connection = self._session()
        if not table.key:
            return None
        while True:
            connection.execute("BEGIN ISOLATION LEVEL REPEATABLE READ READ ONLY")
            try:
                row = connection.execute(
                    "SELECT pg_snapshot_xmax(pg_current_snapshot())::text::bigint, n.nspname, c.relname"
                    " FROM (SELECT) x LEFT JOIN pg_class c ON c.oid = %s LEFT JOIN pg_namespace n ON n.oid = c.relnamespace",
                    (table.oid,),
                ).fetchone()
                assert row is not None
                if row[2] is None:
                    return None
                wide = widen_xid(xid, row[0])
                visible = connection.execute(
                    "SELECT pg_visible_in_snapshot(%s::text::xid8, pg_current_snapshot())", (str(wide),)
                ).fetchone()
                if visible is not None and visible[0]:
                    return self._select(connection, table, f"{quote(row[1])}.{quote(row[2])}", key, missing)
            finally:
                if not connection.closed:
                    connection.execute("ROLLBACK")
            # a synchronous standby may hold the commit back: an outage, not a record error
            self._waiting(f"transaction {xid} is streamed but not yet visible")
            time.sleep(0.01)

    def _select(
        self, connection: Connection, table: Table, name: str, key: tuple[bytes, ...], missing: list[int]
    ) -> list[bytes | None] | None:
        columns = {c.name: c for c in table.columns}
        where = " AND ".join(f"{quote(k)} = ${i + 1}" for i, k in enumerate(table.key))
        wanted = ", ".join(quote(table.columns[c].name) for c in missing)
        result = connection.pgconn.exec_params(
            f"SELECT {wanted} FROM ONLY {name} WHERE {where}".encode(),
            list(key),
            param_types=[columns[k].type.oid for k in table.key],
            param_formats=[1] * len(key),
            result_format=1,
        )
        if result.status != pq.ExecStatus.TUPLES_OK:
            raise psycopg.errors.error_from_result(result)
        if result.ntuples == 0:
            return None
        return [result.get_value(0, i) for i in range(len(missing))]


def _with_key(table: Table, message: pgoutput.RowMessage) -> pgoutput.RowMessage:
    """A key value that is itself stored out of line is not sent again when it is unchanged; the old key then is
    (ExtractReplicaIdentity, src/backend/access/heap/heapam.c)."""
    if message.old is None or message.new is None:
        return message
    new = [
        old if value.kind == "u" and column.name in table.key else value
        for column, value, old in zip(table.columns, message.new, message.old, strict=True)
    ]
    return replace(message, new=new)


def _key(table: Table, values: list[pgoutput.Field]) -> tuple[bytes, ...]:
    places = {c.name: i for i, c in enumerate(table.columns)}
    return tuple(values[places[name]].data for name in table.key)


def column_texts(table: Table, message: bytes) -> dict[str, str | None]:
    """A row for a dead letter: texts as they are, other values as hex of their binary form."""
    try:
        row = pgoutput.row(message)
    except ProtocolError:
        return {"raw": message.hex()}
    texts: dict[str, str | None] = {}
    for column, value in zip(table.columns, row.new or row.old or [], strict=False):
        if value.kind in "nu":
            texts[column.name] = None
            continue
        texts[column.name] = _printable(value.data[: deadletter.MAX_BYTES])
    return texts


def _printable(data: bytes) -> str:
    try:
        text = data.decode()
    except UnicodeDecodeError as error:
        if len(data) < deadletter.MAX_BYTES or error.start < len(data) - 3:
            return f"\\x{data.hex()}"
        text = data[: error.start].decode()  # cut inside a character
    return text if text.isprintable() else f"\\x{data.hex()}"
