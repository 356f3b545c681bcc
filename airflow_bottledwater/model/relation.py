"""Tables as the stream and the snapshot see them."""

from __future__ import annotations

from dataclasses import asdict, dataclass, field
from typing import Any


def quote(identifier: str) -> str:
    """A quoted SQL identifier."""
    return '"' + identifier.replace('"', '""') + '"'


@dataclass(frozen=True, slots=True)
class ColumnType:
    """A column's type with what the wire does not say.

    :param oid: the declared type, as in the Relation message.
    :param typmod: its modifier, -1 for none.
    :param base_oid: the type below all domains; the same as ``oid`` for others.
    :param base_typmod: the modifier in force for the base type.
    :param kind: ``pg_type.typtype`` of the base type: b, c, e, m, p or r.
    :param name: the declared type's SQL name, for messages and for casts.
    :param element: of an array, the type of its elements.
    :param dimensions: of an array, as declared.
    """

    oid: int
    typmod: int
    base_oid: int
    base_typmod: int
    kind: str
    name: str
    element: ColumnType | None = None
    dimensions: int = 0

    @classmethod
    def from_json(cls, data: dict[str, Any]) -> ColumnType:
        """From what :meth:`Table.to_json` makes of it."""
        element = data.get("element")
        return cls(**{**data, "element": cls.from_json(element) if element else None})


@dataclass(frozen=True, slots=True)
class Column:
    """One published column, in the table's order."""

    name: str
    type: ColumnType
    comment: str | None = None


@dataclass(frozen=True, slots=True)
class Table:
    """A table as its catalog rows describe it.

    :param identity: ``pg_class.relreplident``: d(efault), n(othing), f(ull) or i(ndex).
    :param key: the names of the key columns in index order; empty for an unkeyed table.
    :param columns: what the publication sends: no dropped and no generated columns.
    :param filenode: ``pg_relation_filenode``; another one means that the rows have moved.
    """

    oid: int
    schema: str
    name: str
    identity: str
    key: tuple[str, ...]
    columns: tuple[Column, ...]
    filenode: int = 0
    comment: str | None = None
    persistence: str = "p"
    pages: int = 0
    row_security: bool = False
    key_problem: str = field(default="", compare=False)

    @property
    def qualified(self) -> str:
        """``schema.table`` for people; not quoted."""
        return f"{self.schema}.{self.name}"

    @property
    def keyed(self) -> bool:
        """Whether its messages have keys."""
        return bool(self.key)

    def to_json(self) -> dict[str, Any]:
        """As plain JSON values, for the state topic."""
        return asdict(self)

    @classmethod
    def from_json(cls, data: dict[str, Any]) -> Table:
        """The inverse of :meth:`to_json`."""
        columns = tuple(Column(c["name"], ColumnType.from_json(c["type"]), c["comment"]) for c in data["columns"])
        return cls(**{**data, "columns": columns, "key": tuple(data["key"])})
