"""Compiles tables to programs: arrays with all that the kernels need to know of a table."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt
from psycopg import sql

from airflow_bottledwater.encoding import layout, masks, protobuf, types, unheld, wire
from airflow_bottledwater.encoding.envelope import Around
from airflow_bottledwater.model.relation import ColumnType, SourceTable
from airflow_bottledwater.pipeline.formats import Format


@dataclass(frozen=True, slots=True)
class Target:
    """Where a table's records go.

    :param topic: the topic's index in the publisher's list of topics.
    :param partitions: how many partitions the topic has.
    :param key_schema: the registry's id of the key's schema, 0 without a registry; ``value_schema`` likewise.
    :param around: what is around their rows and keys; None for nothing.
    :param before: whether the old row is sent as a header.
    """

    topic: int = 0
    partitions: int = 1
    key_schema: int = 0
    value_schema: int = 0
    around: Around | None = None
    before: bool = False


@dataclass(frozen=True, slots=True)
class Programs:
    """The programs of several relation versions, in the order in which changes refer to them.

    :ivar program: the arrays for the kernels; their table of columns has a row for each column, and after these the
        rows for parts and segments.
    :ivar around: the bytes of a relation's segments at most, so what is around a row and its key; 0 without envelopes.
    :ivar choosers: for each relation, the one whose key chooses the partitions of its records (-1: its own one); None
        if all choose by their own.
    :ivar conversions: for each column, its type and the SQL by which the server converts a value (None: no conversion).
    """

    program: layout.Program
    tables: tuple[SourceTable, ...]
    conversions: tuple[tuple[ColumnType, types.Sql | None], ...]
    around: int = 0
    choosers: npt.NDArray[np.int64] | None = None

    @property
    def width(self) -> int:
        """The number of columns of the widest relation; at least 1, since a table may have no columns."""
        return max([1, *(len(t.columns) for t in self.tables)])

    def scratch(self) -> layout.Rows:
        """Scratch memory for the fields of a change's old and new row."""
        return np.zeros((2, self.width), dtype=layout.FIELD)

    @property
    def enveloped(self) -> bool:
        """Whether values are envelopes, of which a change can become three."""
        return self.around > 0

    @property
    def for_older(self) -> Programs:
        """The same for values of composites from before attributes were added to their types."""
        return replace(self, program=self.program._replace(shorter=True))

    def error(self, relation: int, code: int, column: int, offset: int = -1) -> str:
        """The error of a kernel as text.

        :param offset: where the value is in its row, in bytes; -1: not in the row.
        """
        table = self.tables[relation]
        name = f", column {table.columns[column].name!r}" if 0 <= column < len(table.columns) else ""
        place = f" (at byte {offset} of the row)" if code == wire.MALFORMED and offset >= 0 else ""
        known = 0 <= column < len(table.columns) and code == wire.NO_REPRESENTATION
        holds_all = self.program.json or self.program.protobuf
        explained = unheld.explain(table.columns[column].type, json=holds_all) if known else ""
        return f"{table.qualified}{name}: {wire.REASONS.get(code, code)}{place}{explained}"


class _Builder:
    """Collects the rows of a program's arrays."""

    def __init__(self, format: Format) -> None:
        self._tagged = format.as_protobuf
        self.relations: list[dict[str, int]] = []
        self.columns: list[dict[str, int]] = []
        self.conversions: list[tuple[ColumnType, types.Sql | None]] = []
        self.keys: list[int] = []
        self.names = bytearray()
        self.around = 0
        self._made_of: list[tuple[int, ColumnType, types.TypeMapping]] = []

    def add_table(self, table: SourceTable, target: Target, *, copied: bool) -> None:
        """Add a relation, its key and its columns."""
        positions = {column.name: c for c, column in enumerate(table.columns)}
        mappings = [types.mapping(column.type) for column in table.columns]
        converted = [mapping.convert is not None and not copied for mapping in mappings]
        self.relations.append(
            {
                "column": len(self.columns),
                "columns": len(table.columns),
                "key": len(self.keys),
                "keys": len(table.key),
                "topic": target.topic,
                "partitions": max(1, target.partitions),
                "key_schema": target.key_schema,
                "value_schema": target.value_schema,
                "sends_updates": int(table.identity == "f"),
                "converts": int(any(converted)),
                "filtered": int(table.filtered),
                "outbox": int(table.outbox),
                "whole_old": int(target.around is not None or target.before),
                "envelope": -1,
                "key_head": -1,
            }
        )
        self.keys += [positions[name] for name in table.key]
        for column, mapping, convert in zip(table.columns, mappings, converted, strict=True):
            head = protobuf.column_tag(column.field, mapping.opcode) if self._tagged else types.json_key(column.field)
            self._add(types.Part(head, column.type, mapping), converted=convert, required=column.required)
            self.conversions.append((column.type, mapping.convert))

    def _segments(self, segments: Sequence[bytes]) -> int:
        first = len(self.columns)
        for each in segments:
            self._add(types.Part(each))
        return first if any(segments) else -1

    def _add(self, part: types.Part, *, converted: bool = False, required: bool = False) -> None:
        opcode = argument = oid = 0
        if part.mapping is not None and part.type is not None:
            opcode, argument = part.mapping.opcode, part.mapping.argument(part.type)
            oid = part.mapping.arrives_as(part.type)
            self._made_of.append((len(self.columns), part.type, part.mapping))
        self.columns.append(
            {
                "opcode": opcode,
                "argument": argument,
                "name": len(self.names),
                "name_length": len(part.name),
                "converted": int(converted),
                "child": 0,
                "required": int(required),
                "oid": oid,
            }
        )
        self.names.extend(part.name)

    def add_parts(self) -> None:
        """Add the rows for parts after those of all columns, so that the columns of a relation are together."""
        while self._made_of:
            of, column, mapping = self._made_of.pop()
            if mapping.parts:
                self.columns[of]["child"] = len(self.columns)
            tags = protobuf.part_tags(column, mapping) if self._tagged else [part.name for part in mapping.parts]
            for part, head in zip(mapping.parts, tags, strict=True):
                self._add(replace(part, name=head))

    def add_segments(self, targets: Iterable[Target]) -> None:
        """Add what is around the rows and keys of each relation, behind all parts."""
        for relation, target in zip(self.relations, targets, strict=True):
            if target.around is not None:
                relation["envelope"] = self._segments(target.around.segments)
                relation["key_head"] = self._segments([target.around.key_head])
                self.around = max(self.around, sum(map(len, (*target.around.segments, target.around.key_head))))

    def add_choosers(self, tables: Iterable[SourceTable]) -> list[int]:
        """Add a relation for each table of which some columns of the key choose the partition, with these as its key,
        behind the relations that changes refer to. Returns its number for each table; -1: the whole key chooses."""
        found = []
        for relation, table in zip(self.relations[:], tables, strict=True):
            found.append(len(self.relations) if table.partition_by else -1)
            if table.partition_by:
                self.relations.append(
                    relation | {"key": len(self.keys), "keys": len(table.partition_by), "key_head": -1}
                )
                positions = {column.name: c for c, column in enumerate(table.columns)}
                self.keys += [positions[name] for name in table.partition_by]
        return found


def compile_programs(tables: list[tuple[SourceTable, Target]], format: Format, *, copied: bool) -> Programs:
    """Compile tables to programs.

    :param copied: whether the rows come from a COPY, whose query itself converts values (:func:`select_list`).
    """
    built = _Builder(format)
    for table, target in tables:
        built.add_table(table, target, copied=copied)
    built.add_parts()
    built.add_segments(target for _, target in tables)
    choosers = built.add_choosers(table for table, _ in tables)
    return Programs(
        program=layout.Program(
            json=format.as_json,
            protobuf=format.as_protobuf,
            framed=format.uses_registry,
            shorter=False,
            relations=layout.rows(layout.RELATION, built.relations),
            keys=np.array(built.keys or [0], dtype=np.int64),
            columns=layout.rows(layout.COLUMN, built.columns),
            # writable like all other buffers: for a read-only one, the kernels would be compiled anew
            names=np.frombuffer(built.names + bytes(layout.WORD), dtype=np.uint8),
        ),
        tables=tuple(table for table, _ in tables),
        conversions=tuple(built.conversions),
        around=built.around,
        choosers=np.array(choosers, dtype=np.int64) if max(choosers, default=-1) >= 0 else None,
    )


def select_list(table: SourceTable) -> sql.Composed:
    """The columns of a COPY query; values that no kernel can encode are converted by the server."""
    parts: list[sql.Composable] = []
    for column in table.columns:
        name, convert = sql.Identifier(column.name), types.mapping(column.type).convert
        if convert is None or column.mask:
            parts.append(masks.selected(column))
        else:
            parts.append(types.unless_null(convert, name))
    return sql.SQL(", ").join(parts)
