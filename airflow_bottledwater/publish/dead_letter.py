"""Dead letters: rows that could not be published, with the reason and what is needed to publish them later."""

from __future__ import annotations

import base64
import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import msgspec

from airflow_bottledwater.errors import ProtocolError
from airflow_bottledwater.model.relation import Table
from airflow_bottledwater.model.version import Version
from airflow_bottledwater.postgres import pgoutput

#: a dead letter has at most so many characters of row text, for which so many bytes of a value are enough
MAX_TEXT = 64 * 1024
MAX_BYTES = 4 * (MAX_TEXT + 1)


@dataclass(frozen=True, slots=True)
class DeadLetter:
    """A row that could not be published.

    :param pipeline: the name of the pipeline, since several may share the topic.
    :param version: the relation version that the row belongs to.
    :param op: the operation in the record that it should have become (``c``, ``u``, ``d`` or ``r``).
    :param position: the position of the change; empty for a row of a snapshot.
    :param message: the row as a message of pgoutput.
    :param error: why it could not be published.
    :param whole: whether the message has all of the row, so that it can be published later.
    :param context: what else is needed to publish it later: of a change, the transaction's id and time (``xid``, ``time``); of a snapshot's
        row, the LSN up to which it shows the table (``lsn``), and the header of a live snapshot's (``label``).
    """

    pipeline: str
    version: Version
    op: str
    position: str
    message: bytes
    error: str
    whole: bool = True
    context: Mapping[str, int | str] = field(default_factory=dict)

    def encode(self, limit: int) -> bytes:
        """The dead letter as JSON: values as text where they are printable, else as hex of their binary form, cut if they are too
        large; and what ``redrive`` needs to encode the row later, unless the dead letter would exceed ``limit`` bytes with it."""
        table = self.version.table
        kept: dict[str, Any] = {}
        size = 0
        for name, text in column_texts(table, self.message).items():
            room = max(0, MAX_TEXT - size)
            kept[name] = text if text is None or len(text) <= room else text[:room]
            size += len(text or "")
        record = {
            "pipeline": self.pipeline,
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
            again = {
                **msgspec.to_builtins(self.version),
                **self.context,
                "message": base64.b64encode(self.message).decode(),
            }
            encoded = json.dumps({**record, "again": again}, ensure_ascii=False).encode()
            if len(encoded) <= limit:
                return encoded
        return json.dumps({**record, "truncated": True}, ensure_ascii=False).encode()


def column_texts(table: Table, message: bytes) -> dict[str, str | None]:
    """A row's values for a dead letter: printable text unchanged, anything else as hex of its binary form."""
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
