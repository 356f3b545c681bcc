"""What the types of the followed tables' columns consist of: PostgreSQL sends nothing when an attribute of a composite
or a label of an enum gets another name."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field

from airflow_bottledwater.model.relation import Column, ColumnType, Table
from airflow_bottledwater.postgres.connect import Connection
from airflow_bottledwater.state.pinned import PinnedTable

#: label by the oid of its row, which it keeps when it gets another name; by enum
Labels = Mapping[int, Mapping[int, str]]


def labels(connection: Connection) -> dict[int, dict[int, str]]:
    """The labels of all enums, by the oids of their types and of their own."""
    found: dict[int, dict[int, str]] = {}
    for enum, oid, label in connection.execute("SELECT enumtypid, oid, enumlabel FROM pg_enum"):
        found.setdefault(enum, {})[oid] = label
    return found


@dataclass(slots=True)
class _Known:
    """A table's columns as they were when it was recorded, or when they were first seen.

    :param recorded: X0 of the table's record.
    """

    recorded: int
    columns: dict[str, Column]
    labels: dict[int, dict[int, str]] = field(default_factory=dict)


class KnownTypes:
    """Compares the types of columns with what they were: at the latest when a stream has first looked at them."""

    def __init__(self) -> None:
        self._known: dict[int, _Known] = {}
        #: as the last look has seen them: what was renamed since a table was recorded anew is noticed, too
        self._labels: Labels = {}

    def altered(
        self, followed: Mapping[int, PinnedTable], today: Mapping[int, Table], labels: Labels
    ) -> dict[int, str]:
        """By table, the end of a sentence: which column's type has other names now, so that the table's records are to
        be published again. What is only added needs nothing: no record has it yet.

        :param followed: the pipeline's tables as they are recorded.
        :param today: the tables as they are.
        """
        found = {}
        for oid in followed.keys() & today.keys():
            pinned, table = followed[oid], today[oid]
            known = self._known.get(oid)
            if known is None or known.recorded != pinned.oldest_xid:
                known = self._known[oid] = _Known(pinned.oldest_xid, {c.name: c for c in pinned.table.columns})
            for column in table.columns:
                before = known.columns.get(column.name)
                if before is None or _declared(before.type) != _declared(column.type):
                    known.columns[column.name] = column  # of which the stream is told
                elif _renamed(before.type, column.type):
                    found[oid] = f"has a column {column.name!r} whose type {column.type.name} has other attributes now"
                for enum in _enums(column.type):
                    label = known.labels.setdefault(enum, dict(self._labels.get(enum) or labels.get(enum, {})))
                    if any(labels.get(enum, {}).get(each, name) != name for each, name in label.items()):
                        found[oid] = f"has a column {column.name!r} with a label of {column.type.name} that was renamed"
        self._labels = labels
        return found


def _declared(kind: ColumnType) -> tuple[int, int]:
    return kind.oid, kind.typmod


def _renamed(before: ColumnType, now: ColumnType) -> bool:
    """Whether what was published of a type has other names now."""
    if before.element is not None and now.element is not None:
        return _renamed(before.element, now.element)
    return any(
        old.name != new.name or _renamed(old.type, new.type)
        for old, new in zip(before.attributes, now.attributes, strict=False)
    ) or len(now.attributes) < len(before.attributes)


def _enums(kind: ColumnType) -> Iterator[int]:
    if kind.kind == "e":
        yield kind.base_oid
    if kind.element is not None:
        yield from _enums(kind.element)
    for attribute in kind.attributes:
        yield from _enums(attribute.type)
