"""Tables with their columns and types, as both the stream and the snapshot use them."""

from __future__ import annotations

from collections.abc import Callable, Collection
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

#: date, time, timestamp, timestamp with time zone, interval, time with time zone (src/include/catalog/pg_type.dat)
TEMPORAL = frozenset({1082, 1083, 1114, 1184, 1186, 1266})
#: of these, ``timestamptz``, ``interval`` and ``timetz``, which Debezium's connector publishes as texts
#: (https://debezium.io/documentation/reference/3.7/connectors/postgresql.html#postgresql-basic-types; intervals with
#: ``interval.handling.mode=string``)
TEXTS_OF_DEBEZIUM = frozenset({1184, 1186, 1266})
#: the form of a column whose values are published as hashes, which are texts
HASHED = "hash"


class Member(NamedTuple):
    """Something in a type that shows in its values, and that PostgreSQL can change without sending anything.

    :param number: what it keeps: the oid of an enum's label; or, of a composite, its oid with a minus.
    :param name: the label; or the numbers of the composite's attributes.
    :param written: the transaction that has written a label's row (``xmin``); 0 if it is not known.
    """

    number: int
    name: str
    written: int = 0


@dataclass(frozen=True, slots=True)
class ColumnType:
    """A column's type, with what the replication protocol does not send about it.

    :param oid: the declared type, as in the Relation message.
    :param typmod: its modifier, -1 for none.
    :param base_oid: the type below all domains; the same as ``oid`` if the declared type is not a domain.
    :param base_typmod: the modifier in force for the base type.
    :param kind: ``pg_type.typtype`` of the base type: b, c, e, m, p or r.
    :param name: the declared type's SQL name, for messages and for casts.
    :param element: for an array, the type of its elements; for a multirange, its range; for a range, the type of its
        bounds.
    :param dimensions: of an array, as declared.
    :param schema: the schema of the base type; ``label`` is its name there.
    :param extension: the extension that the base type belongs to; empty for none.
    :param attributes: the attributes of a composite.
    :param labels: the labels of an enum that is published as an enum.
    :param members: the labels of an enum; for a type that is published as a text, also what of the types inside of it
        shows in that. Two types are the same if only these differ.
    :param form: the form that the settings choose, for a type that has several
        (:class:`~airflow_bottledwater.model.forms.TypeOptions`).
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
    members: tuple[Member, ...] = field(default=(), compare=False)

    @property
    def inside(self) -> list[ColumnType]:
        """The types that its values are made of: that of its elements, ranges or bounds, or those of its attributes."""
        return [*([self.element] if self.element else []), *(attribute.type for attribute in self.attributes)]

    @property
    def whole(self) -> list[ColumnType]:
        """It and all types inside of it."""
        return [self, *(each for part in self.inside for each in part.whole)]

    @property
    def forms(self) -> tuple[Any, ...]:
        """The forms that the settings choose for it and for the types inside of it."""
        return (self.form, *(each.forms for each in self.inside))

    @property
    def temporal(self) -> bool:
        """Whether its values are, or have inside of them, dates or times that are not part of a text."""
        return self.base_oid in TEMPORAL or any(each.temporal for each in self.inside)

    def with_temporal(self, form: str, *, as_debezium: bool = False) -> ColumnType:
        """The type with a form of dates and times, also of those inside of it; see
        :class:`~airflow_bottledwater.model.forms.TypeOptions`.

        :param as_debezium: whether those are texts by default that Debezium's connector publishes as texts.
        """

        def chosen(kind: ColumnType) -> str:
            if form != "logical":
                return form
            return "text" if as_debezium and kind.base_oid in TEXTS_OF_DEBEZIUM else ""

        return self._with_forms(chosen)

    @property
    def with_units(self) -> ColumnType:
        """The type with the logical types of the dates and times, also of those inside of it, that are published as
        numbers without them: these say what the numbers count, and from when."""
        return self._with_forms(lambda kind: "" if kind.form == "plain" else kind.form)

    def with_names(self, *, inside: bool) -> ColumnType:
        """The type with Debezium's names for dates and times that are texts.

        :param inside: whether also of those inside of it.
        """

        def named(kind: ColumnType) -> str:
            return "named" if kind.form == "text" and kind.base_oid in TEXTS_OF_DEBEZIUM else kind.form

        return self._with_forms(named) if inside else replace(self, form=named(self))

    def _with_forms(self, form: Callable[[ColumnType], str]) -> ColumnType:
        """The type with other forms of dates and times, also of those inside of it."""
        if not self.temporal:
            return self
        return replace(
            self,
            form=form(self) if self.base_oid in TEMPORAL else self.form,
            element=self.element and self.element._with_forms(form),
            attributes=tuple(replace(each, type=each.type._with_forms(form)) for each in self.attributes),
        )


@dataclass(frozen=True, slots=True)
class Column:
    """One published column of a table, or an attribute of a composite.

    :param required: whether it is published as never null.
    :param mask: what is published instead of its values, as the option says it; empty for the values.
    :param renamed: the name that it is published under; empty for its own.
    :param number: ``pg_attribute.attnum``, which no other one of its table or type gets; 0 if it is not known.
    """

    name: str
    type: ColumnType
    comment: str | None = None
    required: bool = False
    mask: str = ""
    renamed: str = ""
    number: int = field(default=0, compare=False)

    @property
    def field(self) -> str:
        """The name of its values in records."""
        return self.renamed or self.name


@dataclass(frozen=True, slots=True)
class CatalogKey:
    """What a key is in PostgreSQL's catalog: another one can have the same columns by name and type.

    :param columns: the numbers of its columns, in the order of their names.
    :param unique: the oids of what makes its columns unique: of constraints, which ``REINDEX CONCURRENTLY`` keeps, and
        of indexes that belong to none.
    :param rows: what the table's rows are in: its file and its TOAST table, each 0 if there is none or it is not known.
    """

    columns: tuple[int, ...]
    unique: tuple[int, ...]
    rows: tuple[int, int] = (0, 0)

    def rewritten(self, now: CatalogKey) -> bool:
        """Whether ALTER TABLE may have written the rows anew: it gives a table another TOAST table with each new file.
        Where there is none, other statements that give it another file count, too."""
        (file, toast), (file_now, toast_now) = self.rows, now.rows
        return toast != toast_now if toast and toast_now else 0 != file != file_now


@dataclass(frozen=True, slots=True)
class SourceTable:
    """A table as its catalog rows describe it.

    :param identity: ``pg_class.relreplident``: d(efault), n(othing), f(ull) or i(ndex).
    :param key: the names of the key columns in index order; empty for an unkeyed table.
    :param columns: the columns that are published: no dropped and no generated ones, and none that the options of the
        table leave out.
    :param filenode: ``pg_relation_filenode``; a different value means that the rows were rewritten into another file.
    :param partitioned: whether it is a partitioned table that is published as one; its rows are in its partitions.
    :param unpublishable: whether its full old row cannot be sent, so that publishing updates or deletes would make them
        fail.
    :param left_out: the places, among the columns that PostgreSQL sends, of those that the options leave out. Nobody
        but whoever receives rows from PostgreSQL sees these columns.
    :param where: the row filter: a condition that the published rows fulfil; empty for all rows.
    :param filtered: whether it has or has had a row filter, so that an insert may be an update that has brought a row
        into the filter, and lack the large values that the update left unchanged.
    :param sent: all columns that PostgreSQL sends, with their numbers in its catalog, which stay when they get other
        names; empty where nobody has asked for them.
    :param partition_by: the columns of the key that choose a record's partition; empty if the whole key does.
    :param outbox: whether its rows are published as the records that they describe. It has no key then, since its rows
        are no rows to a consumer, and no topic of its own.
    :param catalog_key: its key in the catalog; None if it has none, or nobody has asked for it.
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
    partitioned: bool = False
    left_out: tuple[int, ...] = ()
    key_problem: str = field(default="", compare=False)
    unpublishable: bool = field(default=False, compare=False)
    where: str = ""
    filtered: bool = field(default=False, compare=False)
    outbox: bool = False
    partition_by: tuple[str, ...] = ()
    sent: tuple[tuple[int, str], ...] = field(default=(), compare=False)
    catalog_key: CatalogKey | None = field(default=None, compare=False)

    @property
    def qualified(self) -> str:
        """``schema.table``, for messages; not quoted."""
        return f"{self.schema}.{self.name}"

    @property
    def places(self) -> list[int]:
        """The places of its columns among those that PostgreSQL sends."""
        return [each for each in range(len(self.columns) + len(self.left_out)) if each not in self.left_out]

    def without(self, columns: Collection[int]) -> SourceTable:
        """The table with some more of its columns left out, by number."""
        places = self.places
        kept = [column for c, column in enumerate(self.columns) if c not in columns]
        left_out = tuple(sorted({*self.left_out, *(places[c] for c in columns)}))
        return replace(self, columns=tuple(kept), left_out=left_out)

    @property
    def keyed(self) -> bool:
        """Whether its messages have keys."""
        return bool(self.key)

    @property
    def identifiable(self) -> bool:
        """Whether PostgreSQL can send its updates and deletes: it has a key, or sends the full old row."""
        return self.keyed or (self.outbox and not self.key_problem) or (self.identity == "f" and not self.unpublishable)
