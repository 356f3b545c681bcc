"""In which form types are published that have several."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

# The choices of a pipeline's settings; the first named is the default.
Arrays = Literal["array", "text"]
Composites = Literal["record", "text"]
Ranges = Literal["text", "record"]
Enums = Literal["string", "enum"]
Numeric = Literal["decimal", "string", "double"]
JsonNumeric = Literal["string", "number"]
Documents = Literal["string", "value"]
Geometries = Literal["ewkb", "geojson"]
Regs = Literal["number", "name"]
NotNull = Literal["nullable", "required"]


@dataclass(frozen=True, slots=True)
class TypeOptions:
    """What a pipeline has chosen, as far as its output format has the choice.

    :param enums: ``enum`` is Avro's.
    :param numeric: ``decimal`` is a string without a precision; ``number`` is JSON's, exact.
    :param documents: json and jsonb; ``value`` is JSON's.
    :param geometries: of PostGIS; ``geojson`` is JSON's.
    """

    arrays: Arrays = "array"
    composites: Composites = "record"
    ranges: Ranges = "text"
    enums: Enums = "string"
    numeric: Numeric | Literal["number"] = "decimal"
    documents: Documents = "string"
    regs: Regs = "number"
    geometries: Geometries = "ewkb"
    not_null: NotNull = "nullable"


DEFAULT_TYPE_OPTIONS = TypeOptions()
