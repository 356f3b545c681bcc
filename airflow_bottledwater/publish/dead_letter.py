"""Dead letters: rows that could not be published, with the reason and what is needed to publish them later."""

from __future__ import annotations

import base64
import json
import struct
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import msgspec
import psycopg
from psycopg.adapt import Transformer
from psycopg.pq import Format

from airflow_bottledwater.encoding import types
from airflow_bottledwater.errors import ProtocolError
from airflow_bottledwater.model.relation import HASHED, ColumnType, SourceTable
from airflow_bottledwater.model.version import Version
from airflow_bottledwater.postgres import pgoutput
from airflow_bottledwater.state.pipeline_state import PipelineState
from airflow_bottledwater.state.records import Letters, StateRecord, letters_key

#: a dead letter has at most so many characters of row text, for which so many bytes of a value are enough
MAX_TEXT = 64 * 1024
MAX_BYTES = 4 * (MAX_TEXT + 1)
#: types of which psycopg reads the binary form, without a connection: bool, int8, int2, int4, oid, float4, float8,
#: date, time, timestamp, timestamptz (in UTC), numeric and uuid (src/include/catalog/pg_type.dat)
_READ = frozenset((16, 20, 21, 23, 26, 700, 701, 1082, 1083, 1114, 1184, 1700, 2950))


@dataclass(frozen=True, slots=True)
class DeadLetter:
    """A row that could not be published.

    :param pipeline: the name of the pipeline, since several may share the topic.
    :param version: the relation version that the row belongs to.
    :param op: the operation in the record that it should have become (``c``, ``u``, ``d`` or ``r``).
    :param position: the position of the change; empty for a row of a snapshot.
    :param message: the row as a message of pgoutput.
    :param error: why it could not be published.
    :param by: what has written it, see :func:`~airflow_bottledwater.state.records.letters_key`.
    :param whole: whether the message has all of the row, so that it can be published later.
    :param context: what else is needed to publish it later: of a change, the transaction's id and time (``xid``,
        ``time``); of a snapshot's row, the LSN up to which it shows the table (``lsn``), and the header of a live
        snapshot's (``label``).
    """

    pipeline: str
    version: Version
    op: str
    position: str
    message: bytes
    error: str
    by: str
    whole: bool = True
    context: Mapping[str, int | str] = field(default_factory=dict)

    def encode(self, limit: int) -> bytes:
        """The dead letter as JSON: values as text where they are printable, else as hex of their binary form, cut if
        they are too large; and what ``redrive`` needs to encode the row later, unless the dead letter would exceed
        ``limit`` bytes with it."""
        found = self.with_row(limit)
        return _json({**self._shown(), "truncated": True}) if found is None else found

    def with_row(self, limit: int) -> bytes | None:
        """The dead letter with what ``redrive`` needs; None if there is not all of it, or it would exceed ``limit``
        bytes."""
        if not self.whole or len(self.message) >= limit:
            return None
        again = {
            **msgspec.to_builtins(replace(self.version, table=replace(self.version.table, sent=()))),
            **self.context,
            "message": base64.b64encode(self.message).decode(),
        }
        found = _json({**self._shown(), "again": again})
        return found if len(found) <= limit else None

    def _shown(self) -> dict[str, Any]:
        """What people read of it."""
        table = self.version.table
        kept: dict[str, Any] = {}
        size = 0
        for name, text in column_texts(table, self.message).items():
            room = max(0, MAX_TEXT - size)
            kept[name] = text if text is None or len(text) <= room else text[:room]
            size += len(text or "")
        return {
            "pipeline": self.pipeline,
            "topic": self.version.topic,
            "op": self.op,
            "pos": self.position,
            "relation": table.qualified,
            "oid": table.oid,
            "by": self.by,
            "key": {name: kept.get(name) for name in table.key} if table.key else None,
            "columns": kept,
            "truncated": size > MAX_TEXT,
            "error": self.error,
        }


def _json(record: Mapping[str, Any]) -> bytes:
    return json.dumps(record, ensure_ascii=False).encode()


def counted(state: PipelineState, by: str, tables: Iterable[SourceTable]) -> dict[str, StateRecord]:
    """The counts behind the dead letters of a Kafka transaction, which are to be written in it.

    :param state: as it is before the transaction.
    :param by: what writes them, see :func:`~airflow_bottledwater.state.records.letters_key`. Nobody else writes a count
        of the same key.
    :param tables: that of each letter.
    """
    found: dict[str, Letters] = {}
    for table in tables:
        key = letters_key(table.oid, by)
        before = found.get(key) or state.letters.get(key) or Letters(table.qualified, 0)
        found[key] = replace(before, table=table.qualified, written=before.written + 1)
    return dict(found)


def column_texts(table: SourceTable, message: bytes) -> dict[str, str | None]:
    """A row's values for a dead letter: numbers, times and the like as PostgreSQL writes them, printable text
    unchanged, and anything else as hex of its binary form."""
    if message[:1] == bytes([pgoutput.LOGICAL]):
        logical = pgoutput.message(message)
        return {"prefix": logical.prefix, "content": _printable(logical.content[:MAX_BYTES])}
    try:
        row = pgoutput.row(message)
    except ProtocolError:
        return {"raw": message.hex()}
    texts: dict[str, str | None] = {}
    for column, value in zip(table.columns, row.new or row.old or [], strict=False):
        if value.kind in "nu":
            texts[column.name] = None
            continue
        read = _read(column.type, value.data) if value.kind == "b" and column.type.form != HASHED else None
        texts[column.name] = _printable(value.data[:MAX_BYTES]) if read is None else read
    return texts


def _read(kind: ColumnType, data: bytes) -> str | None:
    """A binary value as text; None if it is of another type than :data:`_READ`, or is not one of it."""
    if kind.base_oid not in _READ or types.mapping(kind).convert is not None:
        return None
    try:
        value = Transformer().get_loader(kind.base_oid, Format.BINARY).load(data)
    except (psycopg.Error, ValueError, struct.error, IndexError, OverflowError):
        return None
    return str(value).lower() if isinstance(value, bool) else str(value)


def _printable(data: bytes) -> str:
    try:
        text = data.decode()
    except UnicodeDecodeError as error:
        if len(data) < MAX_BYTES or error.start < len(data) - 3:
            return f"\\x{data.hex()}"
        text = data[: error.start].decode()  # cut inside a character
    return text if text.isprintable() else f"\\x{data.hex()}"
