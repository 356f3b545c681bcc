"""Dead letters: rows that could not be published, with enough to see why and to publish them later."""

from __future__ import annotations

import base64
import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from airflow_bottledwater.errors import ProtocolError
from airflow_bottledwater.model.relation import Table
from airflow_bottledwater.model.version import Version
from airflow_bottledwater.postgres import pgoutput

#: a dead letter is cut to this many characters of row text; so many bytes of a value are enough for them
MAX_TEXT = 64 * 1024
MAX_BYTES = 4 * (MAX_TEXT + 1)


@dataclass(frozen=True, slots=True)
class DeadLetter:
    """A row that could not be published.

    :param op: of the record that it should have been.
    :param position: of the change; empty for a row of a snapshot.
    :param message: pgoutput's message with the row.
    :param whole: whether the message has all of the row, so that it can be published later.
    :param context: further numbers that a later encoding needs (the transaction's id and time).
    """

    version: Version
    op: str
    position: str
    message: bytes
    error: str
    whole: bool = True
    context: Mapping[str, int] = field(default_factory=dict)

    def encode(self, limit: int) -> bytes:
        """As JSON: the row as text where it has one, hex of its binary form elsewhere, cut where it is too large; and what
        ``redrive`` needs to encode it later, unless the record would exceed ``limit`` bytes with that."""
        table = self.version.table
        kept: dict[str, Any] = {}
        size = 0
        for name, text in column_texts(table, self.message).items():
            room = max(0, MAX_TEXT - size)
            kept[name] = text if text is None or len(text) <= room else text[:room]
            size += len(text or "")
        record = {
            "topic": self.version.topic,
            "op": self.op,
            "pos": self.position,
            "relation": table.qualified,
            "key": {name: kept.get(name) for name in table.key} if table.key else None,
            "columns": kept,
            "truncated": size > MAX_TEXT,
            "error": self.error,
        }
        if self.whole and len(self.message) < limit:
            again = {**self.version.to_json(), **self.context, "message": base64.b64encode(self.message).decode()}
            encoded = json.dumps({**record, "again": again}, ensure_ascii=False).encode()
            if len(encoded) <= limit:
                return encoded
        return json.dumps({**record, "truncated": True}, ensure_ascii=False).encode()


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
        texts[column.name] = _printable(value.data[:MAX_BYTES])
    return texts


def _printable(data: bytes) -> str:
    try:
        text = data.decode()
    except UnicodeDecodeError as error:
        if len(data) < MAX_BYTES or error.start < len(data) - 3:
            return f"\\x{data.hex()}"
        text = data[: error.start].decode()  # cut inside a character
    return text if text.isprintable() else f"\\x{data.hex()}"
