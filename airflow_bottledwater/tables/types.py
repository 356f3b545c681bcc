"""What the types of the followed tables' columns consist of: PostgreSQL sends nothing when an attribute of a composite
or a label of an enum gets another name, or when an attribute is replaced."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from airflow_bottledwater.model.relation import Column, ColumnType, SourceTable
from airflow_bottledwater.state.pipeline_state import PipelineState
from airflow_bottledwater.state.records import ChangedTypes


def altered(known: PipelineState, today: Mapping[int, SourceTable]) -> tuple[dict[int, str], dict[int, ChangedTypes]]:
    """Compare the types of columns with what they were when the rows were published. What is only added needs nothing:
    no record has it yet.

    :param today: the tables as they are, by oid.
    :returns: by table, the end of a sentence: which column's type has other names or attributes now, so that the
        table's records are to be published again; and what is to be recorded for the next comparison, by table.
    """
    reasons: dict[int, str] = {}
    changed: dict[int, ChangedTypes] = {}
    recorded = known.types
    for oid, pinned in known.tables.items():
        if oid not in today:
            continue
        known_columns = (recorded.get(oid) or pinned.table).columns
        # by the number, which stays if it gets another name; by the name if its number is not known
        before = {column.number or column.name: column for column in known_columns}
        columns = []
        for column in today[oid].columns:
            old = before.get(column.number) or before.get(column.name)
            # of another declared type the stream is told
            if old is not None and _declared(old) == _declared(column) and (why := _renamed(old.type, column.type)):
                reasons[oid] = f"has a column {column.name!r} {why}"
                column = old
            if any(_names(column.type)):
                columns.append(column)
        if _compared(columns) != _compared(column for column in known_columns if any(_names(column.type))):
            changed[oid] = ChangedTypes(tuple(columns))
    return reasons, changed


def _declared(column: Column) -> tuple[int, int]:
    return column.type.oid, column.type.typmod


def _names(kind: ColumnType) -> tuple[Any, ...]:
    """All names that a type gives its values, and what tells an attribute from another one of its name."""
    inside = [(each.name, each.number, *_declared(each), *_names(each.type)) for each in kind.attributes]
    return (*kind.members, *inside, *(_names(kind.element) if kind.element is not None else ()))


def _compared(columns: Any) -> dict[str, Any]:
    return {column.name: (_declared(column), _names(column.type)) for column in columns}


def _renamed(before: ColumnType, now: ColumnType) -> str:
    """Which names or attributes of a type are others now, of those that were published; empty if none are."""
    if before.element is not None and now.element is not None:
        return _renamed(before.element, now.element)
    members = {each.number: each for each in now.members}
    for member in before.members:
        other = members.get(member.number, member)
        if other.name != member.name or (member.written or other.written) != other.written:
            if member.number < 0:
                return f"whose type {now.name} has other attributes now"
            return f"with a label of {now.name} that was renamed"
    if len(now.attributes) < len(before.attributes):
        return f"whose type {now.name} has other attributes now"
    for old, new in zip(before.attributes, now.attributes, strict=False):
        if (old.name, *_declared(old)) != (new.name, *_declared(new)) or (old.number or new.number) != new.number:
            return f"whose type {now.name} has other attributes now"
        if why := _renamed(old.type, new.type):
            return why
    return ""
