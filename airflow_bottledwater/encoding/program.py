"""A table's program: what the kernels need to know of it, as arrays."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
from psycopg import sql

from airflow_bottledwater.encoding import types, wire
from airflow_bottledwater.model.relation import Table

Int64 = npt.NDArray[np.int64]
Bytes = npt.NDArray[np.uint8]


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

    :ivar columns: a row for each column, and behind them those of what columns are made of.
    :ivar conversions: per column its type, without domains, and the SQL by which the server converts a value.
    """

    json: bool
    relations: Int64
    columns: Int64
    keys: Int64
    names: Bytes
    tables: tuple[Table, ...]
    conversions: tuple[tuple[int, types.Sql | None], ...]

    @property
    def width(self) -> int:
        """Columns of the widest relation (at least one: a table may have none)."""
        return max([1, *(len(t.columns) for t in self.tables)])

    def scratch(self) -> Int64:
        """Room for one row's fields."""
        return np.zeros((3, self.width), dtype=np.int64)

    def error(self, relation: int, code: int, column: int, offset: int = -1) -> str:
        """What a kernel found wrong, as a sentence.

        :param offset: where the value is in its row, in bytes; -1: not in it.
        """
        table = self.tables[relation]
        name = f", column {table.columns[column].name!r}" if 0 <= column < len(table.columns) else ""
        place = f" (at byte {offset} of the row)" if code == wire.MALFORMED and offset >= 0 else ""
        return f"{table.qualified}{name}: {wire.REASONS.get(code, code)}{place}"


def compile_programs(tables: list[tuple[Table, Target]], output_format: str, *, copied: bool) -> Programs:
    """Compile tables to programs.

    :param copied: for COPY, where the query itself converts (:func:`select_list`).
    """
    relations = np.zeros((max(1, len(tables)), wire.RELATION_WIDTH), dtype=np.int64)
    columns: list[list[int]] = []
    conversions: list[tuple[int, types.Sql | None]] = []
    keys: list[int] = []
    labels = bytearray()
    made_of: list[tuple[int, tuple[types.Part, ...]]] = []

    def add(part: types.Part, *, converted: bool = False, required: bool = False) -> None:
        opcode = argument = 0
        if part.mapping is not None and part.type is not None:
            opcode, argument = part.mapping.opcode, part.mapping.argument(part.type)
            made_of.append((len(columns), part.mapping.parts))
        columns.append([opcode, argument, len(labels), len(part.name), int(converted), 0, int(required)])
        labels.extend(part.name)

    for i, (table, target) in enumerate(tables):
        positions = {column.name: c for c, column in enumerate(table.columns)}
        relations[i] = (
            len(columns),
            len(table.columns),
            len(keys),
            len(table.key),
            target.topic,
            max(1, target.partitions),
            target.key_schema,
            target.value_schema,
            int(table.identity == "f"),
        )
        keys += [positions[name] for name in table.key]
        for column in table.columns:
            mapping = types.mapping(column.type)
            add(
                types.Part(types.json_key(column.name), column.type, mapping),
                converted=mapping.convert is not None and not copied,
                required=column.required,
            )
            # not a domain: its constraints may have changed since, and the value is that of the base type
            conversions.append((column.type.base_oid, mapping.convert))
    # behind all columns, so that a relation's are together
    while made_of:
        of, parts = made_of.pop()
        if parts:
            columns[of][wire.P_CHILD] = len(columns)
        for part in parts:
            add(part)
    return Programs(
        json=output_format == "json",
        relations=relations,
        columns=np.array(columns or [[0] * wire.COLUMN_WIDTH], dtype=np.int64),
        keys=np.array(keys or [0], dtype=np.int64),
        names=np.frombuffer(bytes(labels) or b"\0", dtype=np.uint8),
        tables=tuple(table for table, _ in tables),
        conversions=tuple(conversions),
    )


def select_list(table: Table) -> sql.Composed:
    """The columns of a COPY query; what has no kernel is converted by the server."""
    parts: list[sql.Composable] = []
    for column in table.columns:
        name, convert = sql.Identifier(column.name), types.mapping(column.type).convert
        parts.append(name if convert is None else types.unless_null(convert, name))
    return sql.SQL(", ").join(parts)
