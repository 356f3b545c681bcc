"""In which form types are published that have several."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Forms:
    """One field for each choice; the first named is the default (docs/settings.md).

    :param arrays: ``array`` or ``text``.
    :param composites: ``record`` or ``text``.
    :param ranges: ``text`` or ``record``.
    :param enums: ``string`` or ``enum`` (of Avro).
    :param numeric: ``decimal`` (string without a precision), ``string``, ``double``, or ``number`` (of JSON, exact).
    :param documents: json and jsonb: ``string`` or ``value`` (of JSON).
    :param regs: ``number`` or ``name``.
    :param geometries: of PostGIS, ``ewkb`` or ``geojson`` (in JSON).
    :param not_null: ``nullable`` or ``required``.
    """

    arrays: str = "array"
    composites: str = "record"
    ranges: str = "text"
    enums: str = "string"
    numeric: str = "decimal"
    documents: str = "string"
    regs: str = "number"
    geometries: str = "ewkb"
    not_null: str = "nullable"


DEFAULT_FORMS = Forms()
