"""Masks: what is published instead of a column's values. A value is masked before anything else sees it: by PostgreSQL
in a query, or when a message of the stream is received; both give the same bytes."""

from __future__ import annotations

from dataclasses import dataclass, replace

from psycopg import sql

from airflow_bottledwater.model.relation import Column, ColumnType

#: what is done to a column of a row that is received
LEFT_OUT, KEPT, NULL, CONSTANT, FIRST, LAST = range(6)
_KINDS = {"null": NULL, "constant": CONSTANT, "first": FIRST, "last": LAST}
#: text and varchar: types whose values are the text that is published (src/include/catalog/pg_type.dat)
_TEXTS = (25, 1043)


@dataclass(frozen=True, slots=True)
class Mask:
    """A mask.

    :param kind: :data:`NULL`, :data:`CONSTANT`, :data:`FIRST` or :data:`LAST`; :data:`KEPT` for none.
    :param text: the constant.
    :param count: how many characters are left of a text.
    """

    kind: int = KEPT
    text: bytes = b""
    count: int = 0

    @classmethod
    def of(cls, said: str) -> Mask:
        """A mask as the option ``mask`` says it; none for an empty text."""
        name, _, rest = said.partition(":")
        kind = _KINDS.get(name, KEPT)
        return cls(kind, rest.encode() if kind == CONSTANT else b"", int(rest) if kind in (FIRST, LAST) else 0)

    def masked(self, kind: str, value: bytes) -> tuple[str, bytes]:
        """A value in a message, masked: the kind of its field as pgoutput names them, and its bytes."""
        if self.kind == NULL:
            return "n", b""
        if self.kind == KEPT or kind == "n":
            return kind, value
        if self.kind == CONSTANT:
            return "b", self.text
        if kind == "u":
            return kind, value  # whoever looks it up gets it masked
        text = value.decode()
        begin = 0 if self.kind == FIRST else max(0, len(text) - self.count)
        return kind, text[begin : begin + self.count].encode()


def fits(said: str, kind: ColumnType) -> bool:
    """Whether a mask can be that of columns of this type: all but ``null`` leave a text, and need one."""
    return not said or said == "null" or kind.base_oid in _TEXTS


def fitting(said: str, column: Column) -> Column:
    """The column with a mask; with ``null`` if its type does not allow this one."""
    said = said if fits(said, column.type) else "null"
    return replace(column, mask=said, required=column.required and said != "null")


def selected(column: Column, name: sql.Composable | None = None) -> sql.Composable:
    """SQL for a column's value as it is published.

    :param name: the column; by default by its name.
    """
    name = name or sql.Identifier(column.name)
    mask = Mask.of(column.mask)
    if mask.kind == NULL:
        return sql.SQL("NULL")
    if mask.kind == CONSTANT:
        return sql.SQL("CASE WHEN {} IS NOT NULL THEN {}::text END").format(name, sql.Literal(mask.text.decode()))
    if mask.kind in (FIRST, LAST):
        cut = sql.SQL("left({}, {})" if mask.kind == FIRST else "right({}, {})")
        return cut.format(name, sql.Literal(mask.count))
    return name
