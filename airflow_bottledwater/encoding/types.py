"""The type table: for each PostgreSQL type, its Avro schema and how its binary value is encoded.

A new type needs a row here, a kernel if its binary layout is new, and a conformance case. A type that is not here
becomes a string: PostgreSQL's own text of the value (:data:`TEXT`), to which the server converts it.

The table has no column for JSON, whose form follows from the opcode (docs/message-format.md lists both).
"""

from __future__ import annotations

import functools
import json
from collections.abc import Callable, Collection
from dataclasses import dataclass, replace
from typing import Any

from psycopg import sql

from airflow_bottledwater.encoding import names, wire
from airflow_bottledwater.model.relation import HASHED, TEMPORAL, ColumnType

Schema = Any
Sql = Callable[[sql.Composable], sql.Composable]


def to_text(value: sql.Composable) -> sql.Composed:
    """SQL for PostgreSQL's own text of a value: ``format`` calls the type's output function (``v::text`` differs for
    char(n) and bool)."""
    return sql.SQL("pg_catalog.format('%s', {})").format(value)


def to_texts(value: sql.Composable) -> sql.Composed:
    """SQL for the texts of an array's elements. It is not right for types with a cast to text of their own (pg_cast):
    these have a row in the table, or their arrays are converted as a whole (:data:`_OWN_CASTS`)."""
    return sql.SQL("{}::pg_catalog.text[]").format(value)


def unless_null(convert: Sql, value: sql.Composable) -> sql.Composed:
    """SQL that converts a value unless it is NULL, which ``format`` would turn into an empty string. ``IS DISTINCT FROM
    NULL`` tests the value itself, even if it is a composite whose attributes are all NULL (make_nulltest_from_distinct,
    src/backend/parser/parse_expr.c)."""
    return sql.SQL("CASE WHEN {} IS DISTINCT FROM NULL THEN {} END").format(value, convert(value))


@dataclass(frozen=True, slots=True)
class Part:
    """A part of a value: an array's element, a composite's attribute, a range's bound, or a label of an enum.

    :param name: the bytes that are written before the part in JSON; for a label, the label itself.
    :param type: the part's type; None for a label.
    :param mapping: how the part is published; None for a label.
    """

    name: bytes = b""
    type: ColumnType | None = None
    mapping: TypeMapping | None = None


@dataclass(frozen=True, slots=True)
class TypeMapping:
    """How one type is published.

    :param opcode: how the kernels encode its binary value.
    :param avro: returns the Avro schema of a column.
    :param argument: returns the kernel's argument for a column.
    :param convert: SQL by which the server converts a value into what the opcode takes; None if no conversion is
        needed.
    :param parts: the parts that a value consists of.
    """

    opcode: int
    avro: Callable[[ColumnType], Schema]
    argument: Callable[[ColumnType], int] = lambda column: 0
    convert: Sql | None = None
    parts: tuple[Part, ...] = ()

    def arrives_as(self, column: ColumnType) -> int:
        """The oid of the type that a value has where it is encoded: its own, or that of what the server makes of it."""
        return column.oid if self.convert is None else _CONVERTED.get(self.opcode, _TEXT_OID)


#: what the server converts values into, by opcode: text[] and record, or a text
_CONVERTED, _TEXT_OID = {wire.OP_ARRAY: 1009, wire.OP_RECORD: 2249}, 25


def _plain(schema: Schema) -> Callable[[ColumnType], Schema]:
    return lambda column: schema


def _given(argument: int, column: ColumnType) -> int:
    return argument


def _logical(base: str, logical: str) -> Callable[[ColumnType], Schema]:
    return lambda column: {"type": base, "logicalType": logical}


def _record(name: str, **fields: str) -> Callable[[ColumnType], Schema]:
    """A record of this package's namespace; if it appears again in a schema, it is referred to by its full name."""
    made = [{"name": field, "type": kind} for field, kind in fields.items()]
    return lambda column: {"type": "record", "name": name, "namespace": "bottledwater", "fields": made}


def numeric_precision(typmod: int) -> tuple[int, int]:
    """Precision and scale of ``numeric(p, s)`` for Avro, where a negative scale, and a scale above the precision, need
    a larger precision (make_numeric_typmod, src/backend/utils/adt/numeric.c: 11 bits of scale)."""
    packed = typmod - 4
    precision = (packed >> 16) & 0xFFFF
    scale = ((packed & 0x7FF) ^ 0x400) - 0x400
    if scale < 0:
        return precision - scale, 0
    return max(precision, scale), scale


def _decimal(column: ColumnType) -> Schema:
    precision, scale = numeric_precision(column.base_typmod)
    return {"type": "bytes", "logicalType": "decimal", "precision": precision, "scale": scale}


def _money(column: ColumnType) -> Schema:
    # an int8 has 19 digits; the scale is that of the server's currency
    return {"type": "bytes", "logicalType": "decimal", "precision": 19, "scale": column.base_typmod}


_STRING = TypeMapping(wire.OP_TEXT, _plain("string"))

#: PostgreSQL's own text of the value, for every type that is not in the table
TEXT = replace(_STRING, convert=to_text)
NUMERIC = 1700
_DECIMAL = TypeMapping(wire.OP_DECIMAL, _decimal, lambda column: numeric_precision(column.base_typmod)[1])
_LONG = TypeMapping(wire.OP_UINT32, _plain("long"))
_BYTES = TypeMapping(wire.OP_BYTEA, _plain("bytes"))
#: a version byte, then the text
_VERSIONED = TypeMapping(wire.OP_JSONB, _plain("string"))
_FLOATS = _plain({"type": "array", "items": "float"})

#: oid → mapping (src/include/catalog/pg_type.dat)
TABLE: dict[int, TypeMapping] = {
    16: TypeMapping(wire.OP_BOOL, _plain("boolean")),  # bool
    17: _BYTES,  # bytea
    19: _STRING,  # name
    20: TypeMapping(wire.OP_INT8, _plain("long")),  # int8
    21: TypeMapping(wire.OP_INT2, _plain("int")),  # int2
    23: TypeMapping(wire.OP_INT4, _plain("int")),  # int4
    25: _STRING,  # text
    114: _STRING,  # json: its stored text
    # xml: xml_send gives the text of xml_out, in UTF-8 (src/backend/utils/adt/xml.c); to read it back could change it
    142: _STRING,
    700: TypeMapping(wire.OP_FLOAT4, _plain("float")),  # float4
    701: TypeMapping(wire.OP_FLOAT8, _plain("double")),  # float8
    1042: _STRING,  # bpchar: padded, as stored
    1043: _STRING,  # varchar
    1082: TypeMapping(wire.OP_DATE, _logical("int", "date")),  # date
    1083: TypeMapping(wire.OP_TIME, _logical("long", "time-micros")),  # time
    1114: TypeMapping(wire.OP_TIMESTAMP, _logical("long", "local-timestamp-micros")),  # timestamp
    1184: TypeMapping(wire.OP_TIMESTAMPTZ, _logical("long", "timestamp-micros")),  # timestamptz
    NUMERIC: TypeMapping(wire.OP_NUMERIC_TEXT, _plain("string")),  # numeric without a precision
    26: _LONG,  # oid
    28: _LONG,  # xid
    29: _LONG,  # cid
    650: TypeMapping(wire.OP_INET, _plain("string")),  # cidr
    869: TypeMapping(wire.OP_INET, _plain("string")),  # inet
    790: TypeMapping(wire.OP_MONEY, _money, lambda column: column.base_typmod),  # money
    1186: TypeMapping(wire.OP_INTERVAL, _record("interval", months="int", days="int", micros="long")),  # interval
    1266: TypeMapping(wire.OP_TIMETZ, _record("timetz", micros="long", offset_seconds="int")),  # timetz
    2950: TypeMapping(wire.OP_UUID, _logical("string", "uuid")),  # uuid
    3802: _VERSIONED,  # jsonb
    5069: TypeMapping(wire.OP_UINT64, _plain("long")),  # xid8
    194: _STRING,  # pg_node_tree
    1790: _STRING,  # refcursor
    # types that the server cannot read back, and so cannot convert: pg_ndistinct, pg_dependencies, pg_mcv_list,
    # pg_brin_bloom_summary, pg_brin_minmax_multi_summary
    **dict.fromkeys((3361, 3402, 5017, 4600, 4601), _BYTES),
}

#: (extension, type) → mapping
EXTENSIONS: dict[tuple[str, str], TypeMapping] = {
    ("citext", "citext"): _STRING,
    ("hstore", "hstore"): TypeMapping(wire.OP_MAP, _plain({"type": "map", "values": ["null", "string"]})),
    ("ltree", "ltree"): _VERSIONED,
    ("ltree", "lquery"): _VERSIONED,
    ("ltree", "ltxtquery"): _VERSIONED,
    ("postgis", "geometry"): TypeMapping(wire.OP_HEX, _plain("bytes")),  # EWKB
    ("postgis", "geography"): TypeMapping(wire.OP_HEX, _plain("bytes")),
    ("vector", "vector"): TypeMapping(wire.OP_FLOATS, _FLOATS, lambda column: 4),
    ("vector", "halfvec"): TypeMapping(wire.OP_FLOATS, _FLOATS, lambda column: 2),
}

#: (form that the settings choose, opcode of the default) → mapping
_CHOSEN: dict[tuple[str, int], TypeMapping] = {
    ("string", wire.OP_NUMERIC_TEXT): TABLE[NUMERIC],
    ("double", wire.OP_NUMERIC_TEXT): TypeMapping(wire.OP_DOUBLE, _plain("double")),
    ("number", wire.OP_NUMERIC_TEXT): replace(TABLE[NUMERIC], argument=lambda column: 1),
    ("value", wire.OP_TEXT): replace(_STRING, argument=lambda column: 1),
    ("value", wire.OP_JSONB): replace(_VERSIONED, argument=lambda column: 1),
}
#: a date or time as ISO 8601 text; the argument is the opcode of its number
_ISO = {
    ("text", TABLE[oid].opcode): TypeMapping(
        wire.OP_ISO, _plain("string"), functools.partial(_given, TABLE[oid].opcode)
    )
    for oid in TEMPORAL
}
#: the number of a date or time without its logical type; those that are records have none
_NUMBERS = {
    ("plain", TABLE[oid].opcode): replace(TABLE[oid], avro=_plain(base))
    for oid, base in ((1082, "int"), (1083, "long"), (1114, "long"), (1184, "long"))
}
#: the names that Debezium has for texts of the same form, by opcode
NAMED_TEXTS = {
    wire.OP_TIMESTAMPTZ: "io.debezium.time.ZonedTimestamp",
    wire.OP_TIMETZ: "io.debezium.time.ZonedTime",
    wire.OP_INTERVAL: "io.debezium.time.Interval",
    wire.OP_UUID: "io.debezium.data.Uuid",
}
#: the same texts under these names (:meth:`~airflow_bottledwater.model.relation.ColumnType.with_names`)
_NAMED = {
    ("named", opcode): replace(
        _ISO["text", opcode], avro=_plain({"type": "string", "connect.version": 1, "connect.name": name})
    )
    for opcode, name in NAMED_TEXTS.items()
    if ("text", opcode) in _ISO
}
_CHOSEN |= _ISO | _NUMBERS | _NAMED
_REG = TypeMapping(wire.OP_UINT32_TEXT, _plain("string"))


#: types with a cast to text that differs from their output function: "char", xml
_OWN_CASTS = {18, 142}


def mapping(column: ColumnType) -> TypeMapping:
    """How a column's type is published: a domain like its base type; arrays, composites and ranges by the types of
    their parts."""
    if column.form == HASHED:
        return _STRING
    if column.element is not None:
        return _MADE_OF[column.kind](column.element)
    if column.form == "record" and column.kind == "c":
        return _composite(column)
    if column.labels:
        return _enum(column)
    if column.kind == "e":
        return _STRING
    if column.form == "number" and column.base_oid != NUMERIC:
        return _REG
    if column.form == "geojson" and (column.extension, column.label) in EXTENSIONS:
        function = sql.Identifier(column.schema, "st_asgeojson")
        return replace(
            _STRING,
            argument=lambda column: wire.GEOJSON,
            convert=lambda value: sql.SQL("{}({})").format(function, value),
        )
    found = EXTENSIONS.get((column.extension, column.label)) or TABLE.get(column.base_oid, TEXT)
    if chosen := _CHOSEN.get((column.form, found.opcode)):
        return chosen
    return _DECIMAL if column.base_oid == NUMERIC and column.base_typmod >= 0 else found


#: significant digits that every double holds (DBL_DIG)
_DIGITS_OF_DOUBLE = 15


def rounding_form(column: ColumnType) -> str:
    """The form of a type, or of one inside of it, in which two values can be the same, or one value can become another
    one; empty if there is none."""
    if column.form in ("geojson", "name"):
        return column.form
    exact = column.base_typmod >= 0 and numeric_precision(column.base_typmod)[0] <= _DIGITS_OF_DOUBLE
    if column.form == "double" and not exact:
        return column.form
    return next((form for each in column.inside if (form := rounding_form(each))), "")


def _array(element: ColumnType) -> TypeMapping:
    inner = mapping(element)

    def schema(column: ColumnType) -> Schema:
        found: Schema = ["null", inner.avro(element)]
        for _ in range(column.dimensions):
            found = {"type": "array", "items": found}
        return found

    # the second condition: an element that is converted in another way, such as a composite with a part that is
    # converted
    if element.base_oid in _OWN_CASTS or inner.convert not in (None, to_text):
        return TEXT
    return TypeMapping(
        wire.OP_ARRAY,
        schema,
        lambda column: column.dimensions,
        None if inner.convert is None else to_texts,
        (Part(b"", element, inner if inner.convert is None else _STRING),),
    )


def _nullable(name: str, schema: Schema, doc: str | None = None) -> Schema:
    field = {"name": name, "type": ["null", schema], "default": None}
    return {**field, "doc": doc} if doc else field


def plain(schema: Schema, *, without: Collection[str] = ("doc",)) -> Schema:
    """A schema without comments, which are those of a composite's attributes and can be changed at any time.

    :param without: the properties to leave out.
    """
    if isinstance(schema, list):
        return [plain(each, without=without) for each in schema]
    if not isinstance(schema, dict):
        return schema
    return {name: plain(part, without=without) for name, part in schema.items() if name not in without}


def named(column: ColumnType) -> dict[str, str]:
    """What the definition of a type is called in Avro."""
    namespace = "bottledwater" if column.schema == "pg_catalog" else names.namespace(column.schema)
    return {"name": names.mangle(column.label), "namespace": namespace}


def json_key(name: str) -> bytes:
    """The bytes before a value in a JSON object: its name, quoted, and a colon."""
    return (json.dumps(name, ensure_ascii=False) + ":").encode()


def _composite(column: ColumnType) -> TypeMapping:
    inner = [(a, mapping(a.type)) for a in column.attributes]

    def schema(column: ColumnType) -> Schema:
        fields = [_nullable(names.mangle(a.name), m.avro(a.type), a.comment) for a, m in inner]
        return {"type": "record", **named(column), "fields": fields}

    def convert(value: sql.Composable) -> sql.Composed:
        each: list[sql.Composable] = []
        for a, m in inner:
            attribute = sql.SQL("({}).{}").format(value, sql.Identifier(a.name))
            each.append(attribute if m.convert is None else unless_null(m.convert, attribute))
        return sql.SQL("ROW({})").format(sql.SQL(", ").join(each))

    return TypeMapping(
        wire.OP_RECORD,
        schema,
        lambda column: len(column.attributes),
        convert if any(m.convert for _, m in inner) else None,
        tuple(Part(json_key(a.name), a.type, m) for a, m in inner),
    )


def _range(bound: ColumnType) -> TypeMapping:
    inner = mapping(bound)
    if inner.convert is not None:
        return TEXT

    def schema(column: ColumnType) -> Schema:
        flags = [{"name": name, "type": "boolean"} for name in ("lower_inclusive", "upper_inclusive", "empty")]
        bounds = [_nullable(name, inner.avro(bound)) for name in ("lower", "upper")]
        return {"type": "record", **named(column), "fields": [*bounds, *flags]}

    parts = tuple(Part(json_key(name), bound, inner) for name in ("lower", "upper"))
    return TypeMapping(wire.OP_RANGE, schema, lambda column: 2, None, parts)


def _multirange(one: ColumnType) -> TypeMapping:
    inner = mapping(one)
    if inner.convert is not None:
        return TEXT
    return TypeMapping(
        wire.OP_MULTIRANGE,
        lambda column: {"type": "array", "items": inner.avro(one)},
        parts=(Part(b"", one, inner),),
    )


def _enum(column: ColumnType) -> TypeMapping:
    return TypeMapping(
        wire.OP_ENUM,
        lambda column: {"type": "enum", **named(column), "symbols": [names.symbol(label) for label in column.labels]},
        lambda column: len(column.labels),
        parts=tuple(Part(label.encode()) for label in column.labels),
    )


_MADE_OF = {"b": _array, "r": _range, "m": _multirange}
