"""Reads what declared types consist of: base types of domains, elements, attributes, labels."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from airflow_bottledwater.model.forms import DEFAULT_TYPE_OPTIONS, TypeOptions
from airflow_bottledwater.model.relation import Column, ColumnType, Member
from airflow_bottledwater.postgres.connect import PINNED, Connection

#: int2vector and oidvector have elements, too, but are not array types
_TYPES = """
SELECT t.oid, t.typtype, t.typbasetype, t.typtypmod, t.typndims,
       CASE WHEN e.typarray = t.oid THEN e.oid WHEN r.rngtypid = t.oid THEN r.rngsubtype
            WHEN r.oid IS NOT NULL THEN r.rngtypid ELSE 0 END,
       format_type(t.oid, NULL), n.nspname, t.typname, coalesce(x.extname, ''), t.typrelid
FROM pg_type t JOIN pg_namespace n ON n.oid = t.typnamespace
LEFT JOIN pg_type e ON e.oid = t.typelem AND e.typarray = t.oid
LEFT JOIN (SELECT rngtypid AS oid, rngtypid, rngsubtype FROM pg_range UNION ALL
           SELECT rngmultitypid, rngtypid, 0 FROM pg_range) r ON r.oid = t.oid
LEFT JOIN pg_depend d ON d.classid = 'pg_type'::regclass AND d.objid = t.oid AND d.deptype = 'e'
LEFT JOIN pg_extension x ON x.oid = d.refobjid
WHERE t.oid = ANY (%s::oid[])
"""
_ATTRIBUTES = """
SELECT attrelid, attname, atttypid, atttypmod, attndims,
       format_type(atttypid, atttypmod), col_description(attrelid, attnum), attnum
FROM pg_attribute WHERE attrelid = ANY (%s::oid[]) AND attnum > 0 AND NOT attisdropped ORDER BY attrelid, attnum
"""
#: a label that has been renamed and renamed back has been written by another transaction
_LABELS = """
SELECT enumtypid, oid, enumlabel::text, xmin::text::bigint FROM pg_enum WHERE enumtypid = ANY (%s::oid[])
ORDER BY 1, enumsortorder
"""
_MONEY, _NUMERIC = 790, 1700
_DOCUMENTS = {114, 3802}
#: regproc, regprocedure, regoper, regoperator, regclass, regcollation, regtype, regrole, regnamespace, regconfig,
#: regdictionary, regdatabase (src/include/catalog/pg_type.dat)
REGS = {24, 2202, 2203, 2204, 2205, 4191, 2206, 4096, 4089, 3734, 3769, 8326}


@dataclass(frozen=True, slots=True)
class Declared:
    """A type as a column declares it.

    :param dimensions: ``pg_attribute.attndims``; 0 if it is not known.
    """

    oid: int
    typmod: int
    dimensions: int
    name: str


@dataclass(frozen=True, slots=True)
class _Row:
    kind: str
    base: int
    typmod: int
    dimensions: int
    element: int
    name: str
    schema: str
    label: str
    extension: str
    relation: int


class _Catalog:
    """The types that columns consist of, as they were read from the catalog."""

    def __init__(self, connection: Connection, wanted: set[int], forms: TypeOptions) -> None:
        self._forms = forms
        self._rows: dict[int, _Row] = {}
        self._attributes: dict[int, list[tuple[str, Declared, str | None, int]]] = {}
        while wanted:
            found = {row[0]: _Row(*row[1:]) for row in connection.execute(_TYPES, (sorted(wanted),)).fetchall()}
            self._rows |= found
            if gone := wanted - set(self._rows):
                raise LookupError(f"type {min(gone)}")
            relations = [row.relation for row in found.values() if row.relation]
            for relation, name, *declared, comment, number in connection.execute(_ATTRIBUTES, (relations,)).fetchall():
                self._attributes.setdefault(relation, []).append((name, Declared(*declared), comment, number))
            below = {oid for row in found.values() for oid in (row.base, row.element) if oid}
            below |= {d.oid for relation in relations for _, d, _, _ in self._attributes.get(relation, [])}
            wanted = below - set(self._rows)
        enums = [oid for oid, row in self._rows.items() if row.kind == "e"]
        self._labels: dict[int, list[Member]] = {}
        for enum, *label in connection.execute(_LABELS, (enums,)).fetchall() if enums else ():
            self._labels.setdefault(enum, []).append(Member(*label))
        self._money_scale = 0
        if _MONEY in self._rows:
            self._money_scale = _money_scale(connection)

    def describe(self, declared: Declared) -> ColumnType:
        """The description of a declared type. The modifier is that of the outermost domain that has one
        (getBaseTypeAndTypmod, src/backend/utils/cache/lsyscache.c); an array's modifier is that of its elements."""
        base, typmod, dimensions = declared.oid, declared.typmod, declared.dimensions
        while self._rows[base].kind == "d":
            typmod = typmod if typmod >= 0 else self._rows[base].typmod
            dimensions = dimensions or self._rows[base].dimensions
            base = self._rows[base].base
        row = self._rows[base]
        is_array = row.kind == "b" and row.element != 0
        form = self._form(base, row, is_array)
        element = None
        if row.element and form != "text":
            element = self.describe(Declared(row.element, typmod if is_array else -1, 0, self._rows[row.element].name))
        attributes: tuple[Column, ...] = ()
        if form != "text":
            attributes = tuple(
                Column(name, self.describe(d), comment, number=number)
                for name, d, comment, number in self._attributes.get(row.relation, [])
            )
        return ColumnType(
            declared.oid,
            declared.typmod,
            base,
            self._money_scale if base == _MONEY else typmod,
            row.kind,
            declared.name,
            element,
            max(1, dimensions) if is_array and element else 0,
            row.schema,
            row.label,
            row.extension,
            attributes,
            tuple(label.name for label in self._labels.get(base, ())) if form == "enum" else (),
            form,
            tuple(self._shown(base) if form == "text" else self._labels.get(base, ())),
        )

    def _shown(self, oid: int) -> Iterator[Member]:
        """What of a type, and of those inside of it, shows in a text of its values: labels, and which attributes a
        composite has."""
        row = self._rows[oid]
        yield from self._labels.get(oid, ())
        attributes = self._attributes.get(row.relation, [])
        if row.relation:
            yield Member(-oid, " ".join(str(number) for *_, number in attributes))
        for below in (row.base, row.element, *(declared.oid for _, declared, _, _ in attributes)):
            yield from self._shown(below) if below else ()

    def _form(self, oid: int, row: _Row, is_array: bool) -> str:
        forms = self._forms
        if is_array:
            return forms.arrays
        if oid in REGS:
            return forms.regs
        if oid in _DOCUMENTS:
            return forms.documents
        if oid == _NUMERIC:
            return forms.numeric
        if row.extension == "postgis":
            return forms.geometries
        return {"c": forms.composites, "r": forms.ranges, "m": forms.ranges, "e": forms.enums}.get(row.kind, "")


def _money_scale(connection: Connection) -> int:
    """The decimal places of the currency of the server's lc_monetary, by which PostgreSQL shows and computes with
    values of money. Our sessions have another one, which gives texts that do not depend on the server: it is put aside
    for this statement, and is set again afterwards, since inside a transaction that would last until its end."""
    row = connection.execute(
        "WITH server AS MATERIALIZED"
        " (SELECT set_config(name, reset_val, true) FROM pg_settings WHERE name = 'lc_monetary')"
        " SELECT scale(1::money::numeric) FROM server"
    ).fetchone()
    connection.execute("SELECT set_config('lc_monetary', %s, true)", (PINNED["lc_monetary"],))
    return row[0] if row is not None else 0


def describe(
    connection: Connection, declared: Sequence[Declared], *, forms: TypeOptions = DEFAULT_TYPE_OPTIONS
) -> list[ColumnType]:
    """The types of columns, in the order of ``declared``.

    :param forms: the forms in which types are published; of what a type consists of, only what shows in a text
        (``members``) is described if its form is ``text``.
    :raises LookupError: a type does not exist any more.
    """
    catalog = _Catalog(connection, {d.oid for d in declared}, forms)
    # the columns of thousands of tables have a few types
    found = {each: catalog.describe(each) for each in dict.fromkeys(declared)}
    return [found[each] for each in declared]
