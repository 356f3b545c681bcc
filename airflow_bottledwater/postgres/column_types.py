"""What lies below a declared type: domains, elements of arrays, and what only the server knows of it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from airflow_bottledwater.model.relation import ColumnType
from airflow_bottledwater.postgres.connect import Connection

#: int2vector and oidvector have elements, too, but are not their arrays
_TYPES = """
SELECT t.oid, t.typtype, t.typbasetype, t.typtypmod, t.typndims, CASE WHEN e.typarray = t.oid THEN e.oid ELSE 0 END,
       format_type(t.oid, NULL)
FROM pg_type t LEFT JOIN pg_type e ON e.oid = t.typelem WHERE t.oid = ANY (%s::oid[])
"""
_MONEY = 790


@dataclass(frozen=True, slots=True)
class Declared:
    """A type as a column declares it.

    :param dimensions: ``pg_attribute.attndims``; 0 where it is not known.
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


def describe(connection: Connection, declared: Sequence[Declared], *, arrays: str = "array") -> list[ColumnType]:
    """The types of columns, in their order.

    :param arrays: ``text``: an array has no element.
    :raises LookupError: one does not exist any more.
    """
    known: dict[int, _Row] = {}
    wanted = {d.oid for d in declared}
    while wanted:
        for oid, *row in connection.execute(_TYPES, (sorted(wanted),)).fetchall():
            known[oid] = _Row(*row)
            if arrays == "text":
                known[oid] = replace(known[oid], element=0)
        if gone := wanted - set(known):
            raise LookupError(f"type {min(gone)}")
        wanted = {oid for row in known.values() for oid in (row.base, row.element) if oid} - set(known)
    scale = 0
    if _MONEY in known:
        # of lc_monetary's currency
        found = connection.execute("SELECT scale(1::money::numeric)").fetchone()
        scale = found[0] if found is not None else 0
    return [_describe(known, d, scale) for d in declared]


def _describe(known: dict[int, _Row], declared: Declared, money_scale: int) -> ColumnType:
    """The outermost domain with a modifier wins (getBaseTypeAndTypmod, src/backend/utils/cache/lsyscache.c); an array's
    modifier is that of its elements."""
    base, typmod, dimensions = declared.oid, declared.typmod, declared.dimensions
    while known[base].kind == "d":
        typmod = typmod if typmod >= 0 else known[base].typmod
        dimensions = dimensions or known[base].dimensions
        base = known[base].base
    row = known[base]
    element = None
    if row.element:
        element = _describe(known, Declared(row.element, typmod, 0, known[row.element].name), money_scale)
    return ColumnType(
        declared.oid,
        declared.typmod,
        base,
        money_scale if base == _MONEY else typmod,
        row.kind,
        declared.name,
        element,
        max(1, dimensions) if element else 0,
    )
