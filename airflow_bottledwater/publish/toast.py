"""Completes rows: with unchanged TOAST values, which messages do not contain, and with the text of values that no
kernel can encode.

Both are rare or done in bulk, so this is Python; both use one connection of the publisher's process.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace

import numpy as np
import numpy.typing as npt
import psycopg
from psycopg import sql

from airflow_bottledwater.backoff import Waiting
from airflow_bottledwater.encoding import kernels, layout, wire
from airflow_bottledwater.encoding.kernels import unchanged
from airflow_bottledwater.encoding.program import Programs
from airflow_bottledwater.encoding.types import Sql
from airflow_bottledwater.errors import CredentialsRefused, Outage
from airflow_bottledwater.model.relation import ColumnType
from airflow_bottledwater.model.slot import SlotRecord
from airflow_bottledwater.postgres.connect import Connection, outage, query_with, said
from airflow_bottledwater.publish.batch import Batch
from airflow_bottledwater.publish.composites import with_known_attributes
from airflow_bottledwater.publish.current import CurrentRows
from airflow_bottledwater.publish.definitions import MISFITS
from airflow_bottledwater.publish.unchanged import UnchangedValues
from airflow_bottledwater.publish.unsent import GONE
from airflow_bottledwater.state.identity import connect_source

#: values in one conversion query
_CHUNK = 1000
#: bytes of values to fill in for several transactions at a time; more of them would not make the query faster
_LACKING_BYTES = 16 << 20

#: the texts of a batch without converted values
NOTHING_CONVERTED = layout.Texts(np.zeros(1, dtype=np.uint8), np.zeros(1, dtype=np.int64))


@dataclass(frozen=True, slots=True)
class _Text:
    """What became of a value: its text, or why it has none; and whether its type may have been altered."""

    text: bytes = b""
    reason: str = ""
    changed: bool = False


@dataclass(slots=True)
class Completed:
    """A batch, or a leading part of it, whose rows have all their values.

    :param texts: the server's text of values that no kernel can encode.
    :param failed: change → why it cannot be completed.
    :param changed: change → the column whose type may have been altered, also where the value could be completed.
    :param superseded: changes whose new row is left out, since a later change of the same key is still to come.
    """

    batch: Batch
    texts: layout.Texts
    failed: dict[int, str] = field(default_factory=dict)
    changed: dict[int, int] = field(default_factory=dict)
    superseded: set[int] = field(default_factory=set)


class ToastResolver:
    """Completes the rows of batches.

    :param dsn: the connection string of the source.
    :param waiting: called when a look-up has to wait; it sleeps, or raises to give up.
    :param most: bytes of values to fill in for one transaction, unless a single row needs more: one that needs more is
        divided.
    :param record: see :func:`~airflow_bottledwater.state.identity.check_source`.
    :ivar current: looks rows up over the same connection.
    """

    def __init__(
        self, dsn: str, waiting: Waiting, most: int = _LACKING_BYTES, *, record: SlotRecord | None = None
    ) -> None:
        self._dsn, self._record = dsn, record
        self._waiting = waiting
        self._connection: Connection | None = None
        self._most, self._most_together = most, min(most, _LACKING_BYTES)
        #: bytes of the values that a row lacks on average, by what was filled in before: a guess, by which no
        #: transaction is divided
        self._value_bytes = 8000.0
        self.current = CurrentRows(dsn, self._session, waiting)

    def close(self) -> None:
        """Close the connection."""
        if self._connection is not None:
            self._connection.close()
            self._connection = None

    def _session(self) -> Connection:
        while self._connection is None or self._connection.closed:
            try:
                self._connection = connect_source(self._dsn, self._record, application="bottledwater values")
            except (Outage, CredentialsRefused) as error:
                # the stream's own connection worked with these credentials; they may have been rotated since
                self._waiting(error)
        return self._connection

    def leading(self, batch: Batch, programs: Programs) -> Batch:
        """The leading transactions of a batch whose missing values together probably fit well into memory; usually all.
        Messages of updates that leave large values unchanged are small, so the missing values can be thousands of times
        as large as the batch."""
        most = max(1, int(self._most_together / self._value_bytes))
        lacking = batch.changes["kind"] == wire.MESSAGE_UPDATE
        if programs.program.relations["filtered"].any():
            lacking |= batch.changes["kind"] == wire.MESSAGE_INSERT
        if np.count_nonzero(lacking) <= most:
            return batch  # so it is for most batches, which then need not be scanned
        return batch.whole(unchanged.leading(batch.data, batch.changes, programs.program, programs.scratch(), most))

    def complete(self, batch: Batch, programs: Programs) -> Completed:
        """Complete a batch: fill in its unchanged values, and convert those that no kernel can encode. If the values
        turn out to be larger than expected, only its leading transactions are completed, or a part of the first, if
        that one alone lacks too much."""
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
            for place, text in zip(places, self._texts(*programs.conversions[int(column)], values), strict=True):
                change = int(found[place]["change"])
                texts[place] = text.text
                if text.reason:
                    done.failed[change] = text.reason
                if text.changed:
                    first = programs.program.relations[int(batch.changes[change]["relation"])]["column"]
                    done.changed[change] = int(column - first)
        # writable like all other buffers: for a read-only one, the kernel would be compiled anew
        data = np.frombuffer(bytearray(b"".join(texts) or b"\0"), dtype=np.uint8)
        done.texts = layout.Texts(data, np.concatenate([[0], np.cumsum([len(t) for t in texts])]).astype(np.int64))

    def _texts(self, kind: ColumnType, convert: Sql | None, values: list[bytes]) -> list[_Text]:
        """The server's text of binary values of one type, as bytes."""
        # what has more attributes than are known would lose them
        known = [with_known_attributes(kind, value) for value in values]
        # the base type and not a domain, whose constraints may have changed since; the value is the same
        texts = iter(self._converted(kind.base_oid, convert, [value for value in known if value is not None]))
        unknown = _Text(reason=wire.REASONS[wire.CHANGED], changed=True)
        made = [unknown if value is None else next(texts) for value in known]
        # what lacks attributes may be from before these were added, or from behind one that was dropped
        return [
            text if value == whole else replace(text, changed=True)
            for text, value, whole in zip(made, values, known, strict=True)
        ]

    def _converted(self, oid: int, convert: Sql | None, values: list[bytes]) -> list[_Text]:
        texts: list[_Text] = []
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
                    reason = f"PostgreSQL cannot turn a value into text: {said(error)} (SQLSTATE {error.sqlstate})"
                    texts.append(_Text(reason=reason, changed=isinstance(error, MISFITS)))
                else:  # one of the values is to blame: convert each on its own
                    for value in chunk:
                        texts += self._converted(oid, convert, [value])
        return texts

    def _query(self, oid: int, convert: Sql | None, values: list[bytes]) -> list[_Text]:
        rows = sql.SQL(",".join(f"({i},${i + 1})" for i in range(len(values))))
        # a value list keeps arrays whole, where unnest would flatten them
        assert convert is not None
        query = sql.SQL("SELECT {} FROM (VALUES {}) t(n, v) ORDER BY n").format(convert(sql.Identifier("v")), rows)
        result = query_with(self._session(), query, values, [oid] * len(values), [1] * len(values))
        return [_Text(result.get_value(i, 0) or b"") for i in range(len(values))]

    # ------------------------------------------------------------------ unchanged TOAST
    def _fill_unchanged(self, done: Completed, programs: Programs) -> None:
        """Fill in unchanged values from the old row; else from an earlier change of that key in the batch; else from
        the table as it is now."""
        batch, first = done.batch, done.batch.whole(1)
        found = self._found(batch, programs, self._most_together, done.failed)
        alone = len(first) == len(batch) and self._most == self._most_together
        if found is not None and len(found.batch) < len(first) and not alone:
            # by itself it has room for more of what it lacks: what others lack is not to divide it
            done.failed = {}
            found = self._found(first, programs, self._most, done.failed)
        if found is None:
            return
        done.failed = {i: reason for i, reason in done.failed.items() if i < len(found.batch)}
        if len(found.lacking):
            # it falls slowly: rows that are gone say nothing of others
            self._value_bytes = max(100.0, found.filled / len(found.lacking), self._value_bytes / 8)
        done.batch, kept, superseded = found.completed(done.failed)
        done.superseded |= superseded
        done.failed = {int(np.searchsorted(kept, i)): reason for i, reason in done.failed.items()}

    def _found(self, batch: Batch, programs: Programs, most: int, failed: dict[int, str]) -> UnchangedValues | None:
        """The unchanged values of a batch, or of a leading part whose values have at most so many bytes; None if it
        lacks none."""
        program = programs.program
        affected: npt.NDArray[np.int64] = np.zeros(len(program.relations), dtype=np.int64)
        count, values = unchanged.find_unchanged(batch.data, batch.changes, program, programs.scratch(), affected)
        if not count:
            return None
        found = UnchangedValues(batch, programs, affected, count, values)
        fit = min(
            [self._fill_from_table(found, relation, most, failed) for relation in found.relations()], default=len(batch)
        )
        found.keep(batch.leading(min(fit, found.fitting(most))))
        return found

    def _fill_from_table(self, found: UnchangedValues, relation: int, most: int, failed: dict[int, str]) -> int:
        """Fill in the values that the table has today, by few look-ups for all changes of a relation version. If a row
        does not exist any more, its values stay marked as unchanged: a later change of the key is still to come, unless
        the row has gone with its table or its partition. Returns how many leading changes of the batch do not need a
        row that was not looked up, since so many bytes were found before."""
        table = found.programs.tables[relation]
        wanted, columns = found.wanted(relation)
        keys, lookups = found.keys(relation, wanted)
        xids = np.unique(found.changes["xid"][found.lacking["change"][wanted]]).tolist()
        done, each = 0, self._value_bytes
        while done < len(keys) and (done == 0 or found.filled <= most):
            # sizes are estimated: with room for a part of the limit at least, a few look-ups are enough
            room = max(1, most - found.filled, most // 4)
            some = keys.some(done, done + max(1, int(2 * room / each)))
            cells = self.current.fetch(table, some, columns, xids=xids, most=room)
            upto = done + len(some) - cells.left_out
            mine = (lookups >= done) & (lookups < upto)
            asked = set(found.lacking["change"][wanted[mine]].tolist())
            reasons = [
                *(
                    (i, why)
                    for c, why in cells.unreadable.items()
                    for i in found.changes_without(relation, c)
                    if i in asked
                ),
                *((i, GONE) for i in found.lacking["change"][wanted[np.isin(lookups - done, cells.unsent)]].tolist()),
            ]
            for i, why in reasons:
                failed.setdefault(i, f"a large value that the change left as it was is not in the stream, and {why}")
            found.fill_in(wanted[mine], lookups[mine] - done, columns, cells)
            each, done = max(100.0, cells.data.size / len(some), each / 8), upto
        without = found.lacking["change"][wanted][lookups >= done]
        return int(without.min()) if len(without) else len(found.batch)
