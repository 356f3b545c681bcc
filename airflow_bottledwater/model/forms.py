"""The forms in which values of certain types can be published, as the settings choose them."""

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
Temporal = Literal["logical", "plain", "text"]
NotNull = Literal["nullable", "required"]


@dataclass(frozen=True, slots=True)
class TypeOptions:
    """The forms that a pipeline has chosen, as far as its format offers the choice.

    :param enums: ``enum`` exists in Avro only.
    :param numeric: ``decimal`` is published as a string where the column has no precision; ``number`` exists in JSON
        only, and is exact.
    :param documents: for json and jsonb; ``value`` exists in JSON only.
    :param geometries: for PostGIS; ``geojson`` exists in JSON only.
    :param temporal: for dates, times, timestamps and intervals; all but ``logical`` exist in Avro only, since JSON has
        the texts.
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
    temporal: Temporal = "logical"


DEFAULT_TYPE_OPTIONS = TypeOptions()
