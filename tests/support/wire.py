"""Builders of what PostgreSQL sends, and of the tables that it describes, for tests without a server."""

from __future__ import annotations

import struct
from collections.abc import Sequence

import numpy as np

from airflow_bottledwater.encoding import layout
from airflow_bottledwater.model.relation import Column, ColumnType, SourceTable
from airflow_bottledwater.postgres.pgoutput import Field, RowMessage
from airflow_bottledwater.postgres.receive import MessageBlock

INT4, INT8, TEXT, TIMESTAMP, NUMERIC = 23, 20, 25, 1114, 1700


def plain(oid: int, typmod: int = -1, kind: str = "b") -> ColumnType:
    """A type that is no domain."""
    return ColumnType(oid, typmod, oid, typmod, kind, f"type {oid}")


def program_of(opcode: int, argument: int = 0, *, json: bool = True) -> layout.Program:
    """A program of one nameless column."""
    column = dict.fromkeys(layout.COLUMN.names or (), 0) | {"opcode": opcode, "argument": argument}
    return layout.Program(
        json,
        False,
        False,
        True,
        layout.rows(layout.RELATION, []),
        np.zeros(1, dtype=np.int64),
        layout.rows(layout.COLUMN, [column]),
        np.zeros(1, dtype=np.uint8),
    )


def array(element: ColumnType, dimensions: int = 1) -> ColumnType:
    """An array of it; the oid does not matter."""
    return ColumnType(1007, -1, 1007, -1, "b", f"{element.name}[]", element, dimensions)


def composite(*attributes: ColumnType) -> ColumnType:
    """A type made of these."""
    fields = tuple(Column(f"f {i}", kind) for i, kind in enumerate(attributes))
    return ColumnType(
        16400, -1, 16400, -1, "c", "pair", schema="public", label="pair", attributes=fields, form="record"
    )


def interval_of(bound: ColumnType, *, several: bool = False) -> ColumnType:
    """A range that is published as a record, or a multirange."""
    one = ColumnType(3904, -1, 3904, -1, "r", "span", bound, schema="public", label="span", form="record")
    return (
        ColumnType(4451, -1, 4451, -1, "m", "spans", one, schema="public", label="spans", form="record")
        if several
        else one
    )


def extension(name: str, label: str) -> ColumnType:
    """A type that an extension made."""
    return ColumnType(16500, -1, 16500, -1, "b", label, schema="public", label=label, extension=name)


def labelled(*labels: str) -> ColumnType:
    """An enum that is published as one."""
    return ColumnType(16600, -1, 16600, -1, "e", "mood", schema="public", label="mood", labels=labels, form="enum")


def table(
    *columns: tuple[str, ColumnType],
    key: Sequence[str] = (),
    oid: int = 1,
    name: str = "t",
    schema: str = "public",
    identity: str = "d",
) -> SourceTable:
    """A table of these columns."""
    return SourceTable(oid, schema, name, identity, tuple(key), tuple(Column(n, t) for n, t in columns))


def block(messages: Sequence[bytes]) -> MessageBlock:
    """CopyData messages as the receiver hands them on."""
    offsets = np.concatenate([[0], np.cumsum([len(m) for m in messages])]).astype(np.int64)
    return MessageBlock(np.frombuffer(b"".join(messages), dtype=np.uint8).copy(), offsets)


def xlog(payload: bytes, lsn: int = 0) -> bytes:
    """XLogData."""
    return struct.pack(">cqqq", b"w", lsn, lsn, 0) + payload


def keepalive(lsn: int, reply: bool = False) -> bytes:
    """A primary's keepalive."""
    return struct.pack(">cqqb", b"k", lsn, 0, reply)


def begin(final_lsn: int, xid: int, micros: int = 0) -> bytes:
    """Begin; ``micros`` since 2000."""
    return struct.pack(">cqqI", b"B", final_lsn, micros, xid)


def commit(final_lsn: int, end_lsn: int) -> bytes:
    """Commit."""
    return struct.pack(">cbqqq", b"C", 0, final_lsn, end_lsn, 0)


def relation(
    oid: int,
    columns: Sequence[tuple[bool, str, int, int]],
    *,
    schema: str = "public",
    name: str = "",
    identity: str = "d",
) -> bytes:
    """Relation; columns are (part of the key, name, type, modifier)."""
    out = struct.pack(">cI", b"R", oid) + schema.encode() + b"\0" + (name or f"t{oid}").encode() + b"\0"
    out += identity.encode() + struct.pack(">h", len(columns))
    for key, column, type_oid, typmod in columns:
        out += struct.pack(">b", key) + column.encode() + b"\0" + struct.pack(">Ii", type_oid, typmod)
    return out


def truncate(oids: Sequence[int], options: int = 0) -> bytes:
    """Truncate."""
    return struct.pack(f">cIb{len(oids)}I", b"T", len(oids), options, *oids)


def logical(prefix: str, content: bytes, lsn: int = 0, *, transactional: bool = True) -> bytes:
    """A logical message."""
    head = struct.pack(">cbQ", b"M", transactional, lsn)
    return head + prefix.encode() + b"\0" + struct.pack(">I", len(content)) + content


def binary(value: bytes | None) -> Field:
    """A field as ``binary 'true'`` sends it."""
    return Field("n") if value is None else Field("b", value)


def insert(oid: int, *values: bytes | None) -> bytes:
    """Insert."""
    return RowMessage("I", oid, "", None, [binary(v) for v in values]).encode()


def update(oid: int, *values: bytes | None, old: Sequence[bytes | None] | None = None, tag: str = "K") -> bytes:
    """Update."""
    before = None if old is None else [binary(v) for v in old]
    return RowMessage("U", oid, tag if old is not None else "", before, [binary(v) for v in values]).encode()


def delete(oid: int, *values: bytes | None, tag: str = "K") -> bytes:
    """Delete."""
    return RowMessage("D", oid, tag, [binary(v) for v in values], None).encode()


def copy_row(*values: bytes | None) -> bytes:
    """A row of a binary COPY."""
    out = struct.pack(">h", len(values))
    for value in values:
        out += struct.pack(">i", -1) if value is None else struct.pack(">i", len(value)) + value
    return out
