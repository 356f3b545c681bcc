"""A table's program: what the kernels need to know of it, as arrays."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from psycopg import sql

from airflow_bottledwater.encoding import layout, types, wire
from airflow_bottledwater.model.relation import Table


@dataclass(frozen=True, slots=True)
class Target:
    """Where a table's records go.

    :param topic: its index in the publisher's list of topics.
    :param key_schema: registry id, or 0 without a registry.
    """

    topic: int
    partitions: int
    key_schema: int = 0
    value_schema: int = 0


@dataclass(frozen=True, slots=True)
class Programs:
    """The programs of several relations, in the order in which changes refer to them.

    :ivar program: for the kernels; has a row for each column, and behind them those of what columns are made of.
    :ivar conversions: per column its type, without domains, and the SQL by which the server converts a value.
    """

    program: layout.Program
    tables: tuple[Table, ...]
    conversions: tuple[tuple[int, types.Sql | None], ...]

    @property
    def width(self) -> int:
        """Columns of the widest relation (at least one: a table may have none)."""
        return max([1, *(len(t.columns) for t in self.tables)])

    def scratch(self) -> layout.Rows:
        """Room for the fields of a change's old and new row."""
        return np.zeros((2, self.width), dtype=layout.FIELD)

    def error(self, relation: int, code: int, column: int, offset: int = -1) -> str:
        """What a kernel found wrong, as a sentence.

        :param offset: where the value is in its row, in bytes; -1: not in it.
        """
        table = self.tables[relation]
        name = f", column {table.columns[column].name!r}" if 0 <= column < len(table.columns) else ""
        place = f" (at byte {offset} of the row)" if code == wire.MALFORMED and offset >= 0 else ""
        return f"{table.qualified}{name}: {wire.REASONS.get(code, code)}{place}"


class _Builder:
    """Collects the rows of a program's tables."""

    def __init__(self) -> None:
        self.relations: list[dict[str, int]] = []
        self.columns: list[dict[str, int]] = []
        self.conversions: list[tuple[int, types.Sql | None]] = []
        self.keys: list[int] = []
        self.names = bytearray()
        self._made_of: list[tuple[int, tuple[types.Part, ...]]] = []

    def add_table(self, table: Table, target: Target, *, copied: bool) -> None:
        """A relation, its key and its columns."""
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
            }
        )
        self.keys += [positions[name] for name in table.key]
        for column, mapping, convert in zip(table.columns, mappings, converted, strict=True):
            part = types.Part(types.json_key(column.name), column.type, mapping)
            self._add(part, converted=convert, required=column.required)
            # not a domain: its constraints may have changed since, and the value is that of the base type
            self.conversions.append((column.type.base_oid, mapping.convert))

    def _add(self, part: types.Part, *, converted: bool = False, required: bool = False) -> None:
        opcode = argument = 0
        if part.mapping is not None and part.type is not None:
            opcode, argument = part.mapping.opcode, part.mapping.argument(part.type)
            self._made_of.append((len(self.columns), part.mapping.parts))
        self.columns.append(
            {
                "opcode": opcode,
                "argument": argument,
                "name": len(self.names),
                "name_length": len(part.name),
                "converted": int(converted),
                "child": 0,
                "required": int(required),
            }
        )
        self.names.extend(part.name)

    def add_parts(self) -> None:
        """What columns are made of: behind all columns, so that a relation's are together."""
        while self._made_of:
            of, parts = self._made_of.pop()
            if parts:
                self.columns[of]["child"] = len(self.columns)
            for part in parts:
                self._add(part)


def compile_programs(tables: list[tuple[Table, Target]], output_format: str, *, copied: bool) -> Programs:
    """Compile tables to programs.

    :param copied: for COPY, where the query itself converts (:func:`select_list`).
    """
    built = _Builder()
    for table, target in tables:
        built.add_table(table, target, copied=copied)
    built.add_parts()
    return Programs(
        program=layout.Program(
            json=output_format == "json",
            relations=layout.rows(layout.RELATION, built.relations),
            keys=np.array(built.keys or [0], dtype=np.int64),
            columns=layout.rows(layout.COLUMN, built.columns),
            # writable, as all our buffers: compiled code is compiled anew for a read-only one
            names=np.frombuffer(built.names or bytearray(1), dtype=np.uint8),
        ),
        tables=tuple(table for table, _ in tables),
        conversions=tuple(built.conversions),
    )


def select_list(table: Table) -> sql.Composed:
    """The columns of a COPY query; what has no kernel is converted by the server."""
    parts: list[sql.Composable] = []
    for column in table.columns:
        name, convert = sql.Identifier(column.name), types.mapping(column.type).convert
        parts.append(name if convert is None else types.unless_null(convert, name))
    return sql.SQL(", ").join(parts)
