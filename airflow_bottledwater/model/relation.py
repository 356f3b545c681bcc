"""Tables as the stream and the snapshot see them."""

from __future__ import annotations

from dataclasses import asdict, dataclass, field
from typing import Any


@dataclass(frozen=True, slots=True)
class ColumnType:
    """A column's type with what the wire does not say.

    :param oid: the declared type, as in the Relation message.
    :param typmod: its modifier, -1 for none.
    :param base_oid: the type below all domains; the same as ``oid`` for others.
    :param base_typmod: the modifier in force for the base type.
    :param kind: ``pg_type.typtype`` of the base type: b, c, e, m, p or r.
    :param name: the declared type's SQL name, for messages and for casts.
    :param element: of an array, the type of its elements; of a multirange its range, of a range its bounds.
    :param dimensions: of an array, as declared.
    :param schema: where the base type is, and ``label`` its name there.
    :param extension: that made the base type; empty for none.
    :param attributes: of a composite.
    :param labels: of an enum that is published as one.
    :param form: what the settings choose where the type has several (:class:`~airflow_bottledwater.model.forms.TypeOptions`).
    """

    oid: int
    typmod: int
    base_oid: int
    base_typmod: int
    kind: str
    name: str
    element: ColumnType | None = None
    dimensions: int = 0
    schema: str = ""
    label: str = ""
    extension: str = ""
    attributes: tuple[Column, ...] = ()
    labels: tuple[str, ...] = ()
    form: str = ""

    @classmethod
    def from_json(cls, data: dict[str, Any]) -> ColumnType:
        """From what :meth:`Table.to_json` makes of it."""
        element = data.get("element")
        return cls(
            **{
                **data,
                "element": cls.from_json(element) if element else None,
                "attributes": tuple(Column.from_json(each) for each in data.get("attributes", ())),
                "labels": tuple(data.get("labels", ())),
            }
        )


@dataclass(frozen=True, slots=True)
class Column:
    """One published column, in the table's order; or an attribute of a composite.

    :param required: published as never null.
    """

    name: str
    type: ColumnType
    comment: str | None = None
    required: bool = False

    @classmethod
    def from_json(cls, data: dict[str, Any]) -> Column:
        """From what :meth:`Table.to_json` makes of it."""
        return cls(**{**data, "type": ColumnType.from_json(data["type"])})


@dataclass(frozen=True, slots=True)
class Table:
    """A table as its catalog rows describe it.

    :param identity: ``pg_class.relreplident``: d(efault), n(othing), f(ull) or i(ndex).
    :param key: the names of the key columns in index order; empty for an unkeyed table.
    :param columns: what the publication sends: no dropped and no generated columns.
    :param filenode: ``pg_relation_filenode``; another one means that the rows have moved.
    :param unpublishable: its full old row cannot be sent, so that publishing updates or deletes would make them fail.
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
    unpublishable: bool = field(default=False, compare=False)

    @property
    def qualified(self) -> str:
        """``schema.table`` for people; not quoted."""
        return f"{self.schema}.{self.name}"

    @property
    def keyed(self) -> bool:
        """Whether its messages have keys."""
        return bool(self.key)

    @property
    def identifiable(self) -> bool:
        """Whether its updates and deletes can be published: there is a key, or the full old row."""
        return self.keyed or (self.identity == "f" and not self.unpublishable)

    def to_json(self) -> dict[str, Any]:
        """As plain JSON values, for the state topic."""
        return asdict(self)

    @classmethod
    def from_json(cls, data: dict[str, Any]) -> Table:
        """The inverse of :meth:`to_json`."""
        columns = tuple(Column.from_json(each) for each in data["columns"])
        return cls(**{**data, "columns": columns, "key": tuple(data["key"])})
