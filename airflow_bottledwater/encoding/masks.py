"""Masks: what is published instead of a column's values. A value is masked before anything else sees it: by PostgreSQL
in a query, or when a message of the stream is received; both give the same bytes. A hash is always made where rows are
received, since PostgreSQL is not given the key."""

from __future__ import annotations

from dataclasses import dataclass, replace

from psycopg import sql

from airflow_bottledwater.encoding import hashes
from airflow_bottledwater.model.relation import HASHED, Column, ColumnType

#: what is done to a column of a row that is received
LEFT_OUT, KEPT, NULL, CONSTANT, FIRST, LAST, HASH = range(7)
_KINDS = {"null": NULL, "constant": CONSTANT, "first": FIRST, "last": LAST, "hash": HASH}
#: text and varchar: types whose values are the text that is published (src/include/catalog/pg_type.dat)
_TEXTS = (25, 1043)


@dataclass(frozen=True, slots=True)
class Mask:
    """A mask.

    :param kind: :data:`NULL`, :data:`CONSTANT`, :data:`FIRST`, :data:`LAST` or :data:`HASH`; :data:`KEPT` for none.
    :param text: the constant.
    :param count: how many characters are left of a text.
    :param key: the id of the key of a hash.
    :param oid: of the type of the values that are hashed.
    """

    kind: int = KEPT
    text: bytes = b""
    count: int = 0
    key: str = ""
    oid: int = 0

    @classmethod
    def of(cls, column: Column) -> Mask:
        """That of a column."""
        name, _, rest = column.mask.partition(":")
        kind = _KINDS.get(name, KEPT)
        return cls(
            kind,
            rest.encode() if kind == CONSTANT else b"",
            int(rest) if kind in (FIRST, LAST) else 0,
            rest if kind == HASH else "",
            column.type.base_oid,
        )

    def gives(self, other: Mask) -> bool:
        """Whether what another mask makes of a column's values can be made from what this one has made of them."""
        if self == other or self.kind == KEPT or other.kind == NULL:
            return True
        if other.kind == CONSTANT:
            return self.kind != NULL
        return self.kind == other.kind and self.kind in (FIRST, LAST) and self.count >= other.count

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
        if self.kind == HASH:
            text = value if kind == "t" else hashes.text_of(self.oid, value)
            return "b", hashes.known(self.key).digits(text)
        characters = value.decode()
        begin = 0 if self.kind == FIRST else max(0, len(characters) - self.count)
        return kind, characters[begin : begin + self.count].encode()


def fits(said: str, kind: ColumnType) -> bool:
    """Whether a mask can be that of columns of this type: ``null`` of any, a hash of those with a text of their own,
    all others of texts only."""
    if not said or said == "null":
        return True
    return kind.base_oid in (hashes.FORMS if said.partition(":")[0] == "hash" else _TEXTS)


def without(column: Column) -> Column:
    """The column as it is without its mask."""
    form = "" if column.type.form == HASHED else column.type.form
    return replace(column, mask="", type=replace(column.type, form=form))


def fitting(said: str, column: Column, key: str) -> Column:
    """The column with a mask; with ``null`` if its type does not allow this one.

    :param key: the id of the key of hashes.
    """
    said = said if fits(said, column.type) else "null"
    if said == "hash":
        return replace(column, mask=f"hash:{key}", type=replace(column.type, form=HASHED))
    return replace(column, mask=said, required=column.required and said != "null")


def selected(column: Column, name: sql.Composable | None = None) -> sql.Composable:
    """SQL for a column's value as it is published, or as it is before it is hashed.

    :param name: the column; by default by its name.
    """
    name = name or sql.Identifier(column.name)
    mask = Mask.of(column)
    if mask.kind == NULL:
        return sql.SQL("NULL")
    if mask.kind == CONSTANT:
        return sql.SQL("CASE WHEN {} IS NOT NULL THEN {}::text END").format(name, sql.Literal(mask.text.decode()))
    if mask.kind in (FIRST, LAST):
        cut = sql.SQL("left({}, {})" if mask.kind == FIRST else "right({}, {})")
        return cut.format(name, sql.Literal(mask.count))
    return name
