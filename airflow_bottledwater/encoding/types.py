"""The type table: per PostgreSQL type its Avro schema and how its binary value is transcoded.

A new type is a row here, a kernel if its layout is new, and a conformance case. A type that is not here becomes a
string, PostgreSQL's own text of the value (:data:`TEXT`), converted by the server.

JSON needs no column of its own: the form follows from the opcode (docs/message-format.md lists both).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

from airflow_bottledwater.encoding import wire
from airflow_bottledwater.model.relation import ColumnType

Schema = Any

#: what the server makes of a value for us, as SQL. ``format('%s', v)`` calls the output function (``v::text`` differs for
#: char(n) and bool). The cast of an array does so with every element, unless the type has a cast to text of its own
#: (pg_cast): such types have a row here, or stay whole (:data:`_OWN_CASTS`).
TO_TEXT = "pg_catalog.format('%s', {})"
TO_TEXTS = "{}::pg_catalog.text[]"


@dataclass(frozen=True, slots=True)
class TypeMapping:
    """How one type is published.

    :param opcode: what the kernels do with its binary value.
    :param avro: the Avro schema of a column.
    :param argument: the kernel's argument for a column.
    :param convert: SQL by which the server makes of the value what the opcode takes; empty: it is that.
    :param element: what an array's elements are.
    """

    opcode: int
    avro: Callable[[ColumnType], Schema]
    argument: Callable[[ColumnType], int] = lambda column: 0
    convert: str = ""
    element: TypeMapping | None = None


def _plain(schema: Schema) -> Callable[[ColumnType], Schema]:
    return lambda column: schema


def _logical(base: str, logical: str) -> Callable[[ColumnType], Schema]:
    return lambda column: {"type": base, "logicalType": logical}


def _record(name: str, **fields: str) -> Callable[[ColumnType], Schema]:
    """One of our own, known by its full name wherever it appears again."""
    made = [{"name": field, "type": kind} for field, kind in fields.items()]
    return lambda column: {"type": "record", "name": name, "namespace": "bottledwater", "fields": made}


def numeric_precision(typmod: int) -> tuple[int, int]:
    """Precision and scale of ``numeric(p, s)`` as Avro can hold them: a negative scale and a scale above the
    precision both widen the precision (make_numeric_typmod, src/backend/utils/adt/numeric.c: 11 bits of scale)."""
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

#: PostgreSQL's own text of the value: for every type without a row
TEXT = replace(_STRING, convert=TO_TEXT)
NUMERIC = 1700
_DECIMAL = TypeMapping(wire.OP_DECIMAL, _decimal, lambda column: numeric_precision(column.base_typmod)[1])
_LONG = TypeMapping(wire.OP_UINT32, _plain("long"))

#: oid → mapping (src/include/catalog/pg_type.dat)
TABLE: dict[int, TypeMapping] = {
    16: TypeMapping(wire.OP_BOOL, _plain("boolean")),  # bool
    17: TypeMapping(wire.OP_BYTEA, _plain("bytes")),  # bytea
    19: _STRING,  # name
    20: TypeMapping(wire.OP_INT8, _plain("long")),  # int8
    21: TypeMapping(wire.OP_INT2, _plain("int")),  # int2
    23: TypeMapping(wire.OP_INT4, _plain("int")),  # int4
    25: _STRING,  # text
    114: _STRING,  # json: its stored text
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
    3802: TypeMapping(wire.OP_JSONB, _plain("string")),  # jsonb
    5069: TypeMapping(wire.OP_UINT64, _plain("long")),  # xid8
}


#: "char", xml
_OWN_CASTS = {18, 142}


def mapping(column: ColumnType) -> TypeMapping:
    """The row of a column's type: a domain is its base type, an enum its label, an array one of what its elements are."""
    if column.element is not None:
        return _array(column.element)
    if column.kind == "e":
        return _STRING
    if column.base_oid == NUMERIC and column.base_typmod >= 0:
        return _DECIMAL
    return TABLE.get(column.base_oid, TEXT)


def _array(element: ColumnType) -> TypeMapping:
    inner = mapping(element)

    def schema(column: ColumnType) -> Schema:
        found: Schema = ["null", inner.avro(element)]
        for _ in range(column.dimensions):
            found = {"type": "array", "items": found}
        return found

    converted = inner.convert != ""
    # the latter: arrays in a domain whose elements have no form of their own
    if converted and (element.base_oid in _OWN_CASTS or inner.opcode != wire.OP_TEXT):
        return TEXT
    return TypeMapping(
        wire.OP_ARRAY,
        schema,
        lambda column: column.dimensions,
        TO_TEXTS if converted else "",
        _STRING if converted else inner,
    )
