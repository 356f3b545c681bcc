"""A table's program: what the kernels need to know of it, as arrays."""

from __future__ import annotations

import json
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from airflow_bottledwater.encoding import types, wire
from airflow_bottledwater.model.relation import ColumnType, Table, quote

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
    conversions: tuple[tuple[int, str], ...]

    @property
    def width(self) -> int:
        """Columns of the widest relation (at least one: a table may have none)."""
        return max([1, *(len(t.columns) for t in self.tables)])

    def scratch(self) -> Int64:
        """Room for one row's fields."""
        return np.zeros((3, self.width), dtype=np.int64)

    def error(self, relation: int, code: int, column: int) -> str:
        """A kernel's verdict as a sentence."""
        table = self.tables[relation]
        name = table.columns[column].name if column < len(table.columns) else "?"
        return f"{table.qualified}, column {name!r}: {wire.REASONS.get(code, code)}"


def compile_programs(tables: list[tuple[Table, Target]], output_format: str, *, copied: bool) -> Programs:
    """Compile tables to programs.

    :param copied: for COPY, where the query itself converts (:func:`select_list`).
    """
    relations = np.zeros((max(1, len(tables)), wire.RELATION_WIDTH), dtype=np.int64)
    columns: list[list[int]] = []
    conversions: list[tuple[int, str]] = []
    elements: list[tuple[int, types.TypeMapping, ColumnType]] = []
    keys: list[int] = []
    labels = bytearray()
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
            label = (json.dumps(column.name, ensure_ascii=False) + ":").encode()
            if mapping.element is not None and column.type.element is not None:
                elements.append((len(columns), mapping.element, column.type.element))
            converted = int(mapping.convert != "" and not copied)
            columns.append([mapping.opcode, mapping.argument(column.type), len(labels), len(label), converted, 0])
            # not a domain: its constraints may have changed since, and the value is that of the base type
            conversions.append((column.type.base_oid, mapping.convert))
            labels += label
    while elements:
        of, mapping, kind = elements.pop()
        columns[of][wire.P_CHILD] = len(columns)
        if mapping.element is not None and kind.element is not None:
            elements.append((len(columns), mapping.element, kind.element))
        columns.append([mapping.opcode, mapping.argument(kind), 0, 0, 0, 0])
    return Programs(
        json=output_format == "json",
        relations=relations,
        columns=np.array(columns or [[0] * wire.COLUMN_WIDTH], dtype=np.int64),
        keys=np.array(keys or [0], dtype=np.int64),
        names=np.frombuffer(bytes(labels) or b"\0", dtype=np.uint8),
        tables=tuple(table for table, _ in tables),
        conversions=tuple(conversions),
    )


def select_list(table: Table) -> str:
    """The columns of a COPY query; what has no kernel is converted by the server.

    ``format('%s', v)`` turns NULL into an empty string; ``IS DISTINCT FROM NULL`` tests the value itself, also for a composite
    whose fields are all NULL (make_nulltest_from_distinct, src/backend/parser/parse_expr.c).
    """
    parts = []
    for column in table.columns:
        name = quote(column.name)
        if convert := types.mapping(column.type).convert:
            parts.append(f"CASE WHEN {name} IS DISTINCT FROM NULL THEN {convert.replace('{}', name)} END")
        else:
            parts.append(name)
    return ", ".join(parts)
