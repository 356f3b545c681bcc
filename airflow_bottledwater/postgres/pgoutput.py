"""pgoutput's messages, without I/O: a readable decoder for rare messages, and encoders for tests and for completing
rows.

https://www.postgresql.org/docs/current/protocol-logicalrep-message-formats.html, protocol version 1. Row messages are
read by compiled code (:mod:`airflow_bottledwater.stream.assembler`, :mod:`airflow_bottledwater.encoding.kernels`).
"""

from __future__ import annotations

import struct
from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace

from airflow_bottledwater.encoding import wire
from airflow_bottledwater.encoding.masks import Mask
from airflow_bottledwater.errors import ProtocolError

RELATION, TRUNCATE, LOGICAL = wire.MESSAGE_RELATION, wire.MESSAGE_TRUNCATE, wire.MESSAGE_LOGICAL
INSERT, UPDATE, DELETE = wire.MESSAGE_INSERT, wire.MESSAGE_UPDATE, wire.MESSAGE_DELETE

TRUNCATE_CASCADE, TRUNCATE_RESTART_IDENTITY = 1, 2


@dataclass(frozen=True, slots=True)
class RelationColumn:
    """A column in a Relation message.

    :param key: whether it is part of the replica identity.
    """

    key: bool
    name: str
    type_oid: int
    typmod: int


@dataclass(frozen=True, slots=True)
class RelationMessage:
    """A Relation message, which describes the columns of the rows of this table that follow."""

    oid: int
    schema: str
    name: str
    identity: str
    columns: tuple[RelationColumn, ...]


@dataclass(frozen=True, slots=True)
class TruncateMessage:
    """A Truncate message, for one or more tables."""

    oids: tuple[int, ...]
    cascade: bool
    restart_identity: bool


@dataclass(frozen=True, slots=True)
class LogicalMessage:
    """A logical message, written by ``pg_logical_emit_message``.

    :param transactional: whether it belongs to the transaction around it.
    :param lsn: the end of its record in the WAL.
    """

    transactional: bool
    lsn: int
    prefix: str
    content: bytes


def _string(data: bytes, position: int) -> tuple[str, int]:
    end = data.index(b"\0", position)
    return data[position:end].decode(), end + 1


def relation(data: bytes) -> RelationMessage:
    """Decode a Relation message.

    :raises ProtocolError: it is cut short, or is another message.
    """
    try:
        if data[0] != RELATION:
            raise ProtocolError("This is not a Relation message.")
        (oid,) = struct.unpack_from(">I", data, 1)
        schema, position = _string(data, 5)
        name, position = _string(data, position)
        identity = chr(data[position])
        (count,) = struct.unpack_from(">h", data, position + 1)
        position += 3
        columns = []
        for _ in range(count):
            flags = data[position]
            column, position = _string(data, position + 1)
            type_oid, typmod = struct.unpack_from(">Ii", data, position)
            position += 8
            columns.append(RelationColumn(bool(flags & 1), column, type_oid, typmod))
    except (IndexError, ValueError, struct.error) as error:
        raise ProtocolError(f"A Relation message is cut short: {error}.") from error
    # an empty namespace stands for pg_catalog (logicalrep_write_namespace, src/backend/replication/logical/proto.c)
    return RelationMessage(oid, schema or "pg_catalog", name, identity, tuple(columns))


def truncate(data: bytes) -> TruncateMessage:
    """Decode a Truncate message.

    :raises ProtocolError: it is cut short, or is another message.
    """
    try:
        if data[0] != TRUNCATE:
            raise ProtocolError("This is not a Truncate message.")
        count, options = struct.unpack_from(">Ib", data, 1)
        oids = struct.unpack_from(f">{count}I", data, 6)
    except (IndexError, struct.error) as error:
        raise ProtocolError(f"A Truncate message is cut short: {error}.") from error
    return TruncateMessage(oids, bool(options & TRUNCATE_CASCADE), bool(options & TRUNCATE_RESTART_IDENTITY))


def with_content(data: bytes, content: bytes) -> bytes:
    """A logical message with another content."""
    return data[: data.index(b"\0", 10) + 1] + struct.pack(">I", len(content)) + content


def message(data: bytes) -> LogicalMessage:
    """Decode a logical message.

    :raises ProtocolError: it is cut short, or is another message.
    """
    try:
        if data[0] != LOGICAL:
            raise ProtocolError("This is not a logical message.")
        flags, lsn = struct.unpack_from(">BQ", data, 1)
        prefix, position = _string(data, 10)
        (length,) = struct.unpack_from(">I", data, position)
    except (IndexError, ValueError, struct.error) as error:
        raise ProtocolError(f"A logical message is cut short: {error}.") from error
    content = data[position + 4 :]
    if len(content) != length:
        raise ProtocolError("The content of a logical message has another length than it says.")
    return LogicalMessage(bool(flags & 1), lsn, prefix, content)


@dataclass(frozen=True, slots=True)
class Field:
    """One column of a row: n(ull), u(nchanged), t(ext) or b(inary), and its bytes."""

    kind: str
    data: bytes = b""


def fields(data: bytes, position: int) -> tuple[list[Field], int]:
    """Decode a TupleData at ``position``; returns the fields and the position behind it.

    :raises ProtocolError: it is cut short.
    """
    try:
        (count,) = struct.unpack_from(">h", data, position)
        position += 2
        found = []
        for _ in range(count):
            kind = chr(data[position])
            position += 1
            if kind in "nu":
                found.append(Field(kind))
                continue
            if kind not in "tb":
                raise ProtocolError(f"A row has a field of the unknown kind {kind!r}.")
            (length,) = struct.unpack_from(">i", data, position)
            position += 4
            if length < 0 or position + length > len(data):
                raise ProtocolError("A field is longer than its message.")
            found.append(Field(kind, data[position : position + length]))
            position += length
    except (IndexError, struct.error) as error:
        raise ProtocolError(f"A row is cut short: {error}.") from error
    return found, position


def tuple_data(values: list[Field]) -> bytes:
    """The inverse of :func:`fields`."""
    out = bytearray(struct.pack(">h", len(values)))
    for field in values:
        out += field.kind.encode()
        if field.kind in "tb":
            out += struct.pack(">i", len(field.data)) + field.data
    return bytes(out)


@dataclass(frozen=True, slots=True)
class RowMessage:
    """An Insert, Update or Delete.

    :param kind: ``I``, ``U`` or ``D``.
    :param old_tag: K (key columns only) or O (the full old row) if there is an old row, else empty.
    """

    kind: str
    oid: int
    old_tag: str
    old: list[Field] | None
    new: list[Field] | None

    def without(self, columns: Collection[int]) -> RowMessage:
        """The message without some of its columns, by number."""
        old, new = (
            None if row is None else [field for c, field in enumerate(row) if c not in columns]
            for row in (self.old, self.new)
        )
        return replace(self, old=old, new=new)

    def with_old_key(self, key: Collection[int]) -> RowMessage:
        """The message with no more than the key of the old row, as PostgreSQL sends it unless the replica identity is
        FULL.

        :param key: the numbers of the key's columns.
        """
        old = None if self.old is None else [each if c in key else Field("n") for c, each in enumerate(self.old)]
        return replace(self, old_tag="K", old=old)

    def masked(self, masks: Sequence[Mask]) -> RowMessage:
        """The message with masked values, by the masks of all its columns."""
        old, new = (
            None
            if row is None
            else [Field(*mask.masked(field.kind, field.data)) for mask, field in zip(masks, row, strict=True)]
            for row in (self.old, self.new)
        )
        return replace(self, old=old, new=new)

    def encode(self) -> bytes:
        """The message's bytes."""
        out = self.kind.encode() + struct.pack(">I", self.oid)
        if self.old is not None:
            out += self.old_tag.encode() + tuple_data(self.old)
        if self.new is not None:
            out += b"N" + tuple_data(self.new)
        return out


def row(data: bytes) -> RowMessage:
    """Decode an Insert, Update or Delete message.

    :raises ProtocolError: it is malformed, or is another message.
    """
    if len(data) < 6:
        raise ProtocolError("A row message is cut short.")
    if data[0] not in (INSERT, UPDATE, DELETE):
        raise ProtocolError("This is not a row message.")
    (oid,) = struct.unpack_from(">I", data, 1)
    position, old_tag, old, new = 5, "", None, None
    while position < len(data):
        tag = chr(data[position])
        values, position = fields(data, position + 1)
        if tag == "N" and new is None:
            new = values
        elif tag in "KO" and old is None and new is None:
            old_tag, old = tag, values
        else:
            raise ProtocolError(f"A row message has an unexpected part {tag!r}.")
    if (old if data[0] == DELETE else new) is None:
        raise ProtocolError("A row message is cut short.")
    return RowMessage(chr(data[0]), oid, old_tag, old, new)
