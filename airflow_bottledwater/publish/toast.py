"""What a row message lacks: unchanged TOAST values, and the text of values that have no kernel.

Both are rare or batched, so this is Python; both go over one connection of the publisher's process.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace

import numpy as np
import numpy.typing as npt
import psycopg
from psycopg import sql

from airflow_bottledwater.backoff import Waiting
from airflow_bottledwater.encoding import kernels, layout, wire
from airflow_bottledwater.encoding.program import Programs
from airflow_bottledwater.encoding.types import Sql
from airflow_bottledwater.errors import CredentialsRefused, Outage
from airflow_bottledwater.model.relation import Table
from airflow_bottledwater.postgres import pgoutput
from airflow_bottledwater.postgres.connect import Connection, connect, outage, query_with
from airflow_bottledwater.publish.batch import Batch
from airflow_bottledwater.publish.current import CurrentRows, Key

#: values of one conversion query
_CHUNK = 1000


#: of a batch without converted values
NOTHING_CONVERTED = layout.Texts(np.zeros(1, dtype=np.uint8), np.zeros(1, dtype=np.int64))


@dataclass(slots=True)
class Completed:
    """A batch whose rows have all their values.

    :param texts: what the server made of values that no kernel can encode.
    :param failed: change → why it cannot be completed.
    :param superseded: changes whose new row is left out, since a later change of the same key is still to come.
    """

    batch: Batch
    texts: layout.Texts
    failed: dict[int, str] = field(default_factory=dict)
    superseded: set[int] = field(default_factory=set)


class ToastResolver:
    """Fills in what rows lack.

    :param waiting: called while a re-read has to wait; may raise.
    :ivar current: looks rows up over the same connection.
    """

    def __init__(self, dsn: str, waiting: Waiting) -> None:
        self._dsn = dsn
        self._waiting = waiting
        self._connection: Connection | None = None
        self.current = CurrentRows(self._session, waiting)

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
        done = Completed(batch, NOTHING_CONVERTED)
        if len(batch):
            self._fill_unchanged(done, programs)
            self._convert(done, programs)
        return done

    # ------------------------------------------------------------------ values without a kernel
    def _convert(self, done: Completed, programs: Programs) -> None:
        if not programs.program.relations["converts"].any():
            return
        batch = done.batch
        found: layout.Rows = np.zeros(max(1024, len(batch)), dtype=layout.CONVERSION)
        while True:
            count = kernels.find_conversions(batch.data, batch.changes, programs.program, programs.scratch(), found)
            if count <= len(found):
                break
            found = np.zeros(count, dtype=layout.CONVERSION)
        texts: list[bytes] = [b""] * count
        found = found[:count]
        for column in np.unique(found["column"]):
            places = np.flatnonzero(found["column"] == column)
            values = [bytes(batch.data[v["position"] : v["position"] + v["length"]]) for v in found[places]]
            for place, text in zip(places, self._converted(*programs.conversions[int(column)], values), strict=True):
                if isinstance(text, str):
                    done.failed[int(found[place]["change"])] = f"PostgreSQL cannot turn a value into text: {text}"
                else:
                    texts[place] = text
        # writable, as all our buffers: compiled code is compiled anew for a read-only one
        data = np.frombuffer(bytearray(b"".join(texts) or b"\0"), dtype=np.uint8)
        done.texts = layout.Texts(data, np.concatenate([[0], np.cumsum([len(t) for t in texts])]).astype(np.int64))

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
        rows = sql.SQL(",".join(f"({i},${i + 1})" for i in range(len(values))))
        # a value list keeps arrays whole, where unnest would flatten them
        assert convert is not None
        query = sql.SQL("SELECT {} FROM (VALUES {}) t(n, v) ORDER BY n").format(convert(sql.Identifier("v")), rows)
        result = query_with(self._session(), query, values, [oid] * len(values), [1] * len(values))
        return [result.get_value(i, 0) or b"" for i in range(len(values))]

    # ------------------------------------------------------------------ unchanged TOAST
    def _fill_unchanged(self, done: Completed, programs: Programs) -> None:
        """From the old row; else from an earlier change of that key in the batch; else from the table as it is now."""
        batch = done.batch
        found: npt.NDArray[np.int64] = np.zeros(len(batch), dtype=np.int64)
        count = kernels.find_unchanged(batch.data, batch.changes, programs.program, programs.scratch(), found)
        if not count:
            return
        changes = batch.changes.copy()
        filled = self._fill_from_batch(batch, programs, set(found[:count].tolist()))
        left_out: set[int] = set()
        failed: dict[int, str] = {}
        for relation, message_of in _lacking(filled, changes).items():
            self._fill_from_table(programs.tables[relation], message_of, changes, failed)
            for i, message in message_of.items():
                filled[i] = message
                if i in failed or message.new is None or not _missing(message.new):
                    continue
                done.superseded.add(i)
                table = programs.tables[relation]
                if message.old is None or row_key(table, message.old) == row_key(table, message.new):
                    left_out.add(i)
                    continue
                # of a key change the tombstone remains: nothing else would delete the old key
                filled[i] = replace(message, kind="D", new=None)
                changes[i]["kind"] = pgoutput.DELETE
        extra = bytearray()
        for i, message in filled.items():
            encoded = message.encode()
            changes[i]["offset"], changes[i]["length"] = len(batch.data) + len(extra), len(encoded)
            extra += encoded
        kept = np.array([i for i in range(len(batch)) if i not in left_out], dtype=np.int64)
        data = np.concatenate([batch.data, np.frombuffer(bytes(extra), dtype=np.uint8)])
        done.batch = replace(batch, data=data, changes=changes[kept])
        done.failed |= {int(np.searchsorted(kept, i)): reason for i, reason in failed.items()}

    def _fill_from_batch(self, batch: Batch, programs: Programs, lacking: set[int]) -> dict[int, pgoutput.RowMessage]:
        """Change → its message, with what the old row or an earlier change of its key says; the rest is still unchanged."""
        changes = batch.changes
        affected = {int(changes[i]["relation"]) for i in lacking}
        filled: dict[int, pgoutput.RowMessage] = {}
        seen: dict[tuple[int, Key], list[pgoutput.Field]] = {}
        for i in range(len(batch)):
            relation = int(changes[i]["relation"])
            if relation not in affected or changes[i]["kind"] == pgoutput.TRUNCATE:
                continue
            at, length = int(changes[i]["offset"]), int(changes[i]["length"])
            message = pgoutput.row(bytes(batch.data[at : at + length]))
            table = programs.tables[relation]
            if i in lacking:
                message = with_key(table, message)
                assert message.new is not None
                new = message.new
                old_key = row_key(table, message.old if message.old is not None else new)
                for source in (message.old if message.old_tag == "O" else None, seen.get((relation, old_key))):
                    if source is not None:
                        new = [s if f.kind == "u" else f for f, s in zip(new, source, strict=True)]
                message = filled[i] = replace(message, new=new)
            # what is still unchanged here stays so for later changes: a value of today's row is not passed on
            if message.old is not None:
                seen.pop((relation, row_key(table, message.old)), None)
            if message.new is not None:
                seen[relation, row_key(table, message.new)] = message.new
        return filled

    def _fill_from_table(
        self,
        table: Table,
        messages: dict[int, pgoutput.RowMessage],
        changes: layout.Rows,
        failed: dict[int, str],
    ) -> None:
        """Fill in today's values, by one look-up for all changes of a relation version; where the row is gone, they stay
        unchanged: a later change of the key is still to come."""
        columns = sorted({c for message in messages.values() for c in _missing(message.new or [])})
        keys = list(dict.fromkeys(row_key(table, message.new or []) for message in messages.values()))
        found = self.current.read(table, keys, columns, xids=(int(changes[i]["xid"]) for i in messages))
        for i, message in messages.items():
            assert message.new is not None
            lost = [found.unreadable[c] for c in _missing(message.new) if c in found.unreadable]
            values = found.rows.get(row_key(table, message.new))
            if lost:
                failed[i] = f"a large value that the change left as it was is not in the stream, and {lost[0]}"
            elif values is not None:
                new = list(message.new)
                for c in _missing(message.new):
                    value = values[columns.index(c)]
                    new[c] = pgoutput.Field("n") if value is None else pgoutput.Field("b", value)
                messages[i] = replace(message, new=new)
                changes[i]["flags"] |= wire.FLAG_REREAD


def _missing(values: list[pgoutput.Field]) -> list[int]:
    return [c for c, value in enumerate(values) if value.kind == "u"]


def _lacking(filled: dict[int, pgoutput.RowMessage], changes: layout.Rows) -> dict[int, dict[int, pgoutput.RowMessage]]:
    """Relation → change → message, of those that still lack a value."""
    found: dict[int, dict[int, pgoutput.RowMessage]] = {}
    for i, message in filled.items():
        if message.new is not None and _missing(message.new):
            found.setdefault(int(changes[i]["relation"]), {})[i] = message
    return found


def with_key(table: Table, message: pgoutput.RowMessage) -> pgoutput.RowMessage:
    """A key value that is itself stored out of line is not sent again when it is unchanged; the old key then is
    (ExtractReplicaIdentity, src/backend/access/heap/heapam.c)."""
    if message.old is None or message.new is None:
        return message
    new = [
        old if value.kind == "u" and column.name in table.key else value
        for column, value, old in zip(table.columns, message.new, message.old, strict=True)
    ]
    return replace(message, new=new)


def row_key(table: Table, values: Sequence[pgoutput.Field]) -> Key:
    """The binary values of a row's key columns, in the order of the key."""
    places = {c.name: i for i, c in enumerate(table.columns)}
    return tuple(values[places[name]].data for name in table.key)
