"""The type table: per PostgreSQL type its Avro schema and how its binary value is transcoded.

A new type is a row here, a kernel if its layout is new, and a conformance case. A type that is not here becomes a
string, PostgreSQL's own text of the value (:data:`TEXT`), converted by the server.

JSON needs no column of its own: the form follows from the opcode (docs/message-format.md lists both).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from airflow_bottledwater.encoding import wire
from airflow_bottledwater.model.relation import ColumnType

Schema = Any


@dataclass(frozen=True, slots=True)
class TypeMapping:
    """How one type is published.

    :param opcode: what the kernels do with its binary value.
    :param avro: the Avro schema for a type modifier.
    :param argument: the kernel's argument for a type modifier.
    """

    opcode: int
    avro: Callable[[int], Schema]
    argument: Callable[[int], int] = lambda typmod: 0


def _plain(schema: Schema) -> Callable[[int], Schema]:
    return lambda typmod: schema


def _logical(base: str, logical: str) -> Callable[[int], Schema]:
    return lambda typmod: {"type": base, "logicalType": logical}


def numeric_precision(typmod: int) -> tuple[int, int]:
    """Precision and scale of ``numeric(p, s)`` as Avro can hold them: a negative scale and a scale above the
    precision both widen the precision (make_numeric_typmod, src/backend/utils/adt/numeric.c: 11 bits of scale)."""
    packed = typmod - 4
    precision = (packed >> 16) & 0xFFFF
    scale = ((packed & 0x7FF) ^ 0x400) - 0x400
    if scale < 0:
        return precision - scale, 0
    return max(precision, scale), scale


def _decimal(typmod: int) -> Schema:
    precision, scale = numeric_precision(typmod)
    return {"type": "bytes", "logicalType": "decimal", "precision": precision, "scale": scale}


_STRING = TypeMapping(wire.OP_TEXT, _plain("string"))

#: PostgreSQL's own text of the value: for every type without a row
TEXT = TypeMapping(wire.OP_CONVERT, _plain("string"))
NUMERIC = 1700
_DECIMAL = TypeMapping(wire.OP_DECIMAL, _decimal, lambda typmod: numeric_precision(typmod)[1])

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
    2950: TypeMapping(wire.OP_UUID, _logical("string", "uuid")),  # uuid
    3802: TypeMapping(wire.OP_JSONB, _plain("string")),  # jsonb
}


def mapping(column: ColumnType) -> TypeMapping:
    """The row of a column's type: a domain is its base type, an enum its label."""
    if column.kind == "e":
        return _STRING
    if column.base_oid == NUMERIC and column.base_typmod >= 0:
        return _DECIMAL
    return TABLE.get(column.base_oid, TEXT)
