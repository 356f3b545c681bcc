"""The readable twin of the kernels: what a row must look like, from PostgreSQL's own text of its values.

Slow on purpose, and independent of the binary layouts: tests hold the kernels against it.
"""

from __future__ import annotations

import base64
import io
import json
import struct
from datetime import date
from decimal import Decimal, localcontext
from typing import Any

import fastavro

from airflow_bottledwater.encoding import avro, wire
from airflow_bottledwater.encoding.types import mapping, numeric_precision
from airflow_bottledwater.model.relation import Column, Table

_EPOCH = date(1970, 1, 1).toordinal()
#: days of one cycle of the Gregorian calendar, 400 years
_CYCLE = 146_097


def _days(text: str) -> int:
    """Days since 1970-01-01 of an ISO date of PostgreSQL; any year, also BC."""
    before = text.endswith(" BC")
    year, month, day = text.removesuffix(" BC").split("-")
    astronomical = 1 - int(year) if before else int(year)
    # move by whole cycles into what datetime.date can hold
    cycles = (astronomical - 2000) // 400
    return date(astronomical - 400 * cycles, int(month), int(day)).toordinal() - _EPOCH + cycles * _CYCLE


def _micros(clock: str) -> int:
    hours, minutes, seconds = clock.split(":")
    return (int(hours) * 3600 + int(minutes) * 60) * 1_000_000 + int(Decimal(seconds) * 1_000_000)


def native(column: Column, text: str) -> Any:
    """What fastavro has to be given for a value, without its logical types (they cannot hold every value).

    :param text: PostgreSQL's text under DateStyle ISO, TimeZone UTC, extra_float_digits 1, bytea_output hex.
    """
    opcode = mapping(column.type).opcode
    if opcode == wire.OP_BOOL:
        return text == "t"
    if opcode in (wire.OP_INT2, wire.OP_INT4, wire.OP_INT8):
        return int(text)
    if opcode == wire.OP_FLOAT4:
        return struct.unpack("<f", struct.pack("<f", float(text)))[0]
    if opcode == wire.OP_FLOAT8:
        return float(text)
    if opcode == wire.OP_BYTEA:
        return bytes.fromhex(text.removeprefix("\\x"))
    if opcode == wire.OP_DATE:
        return {"infinity": wire.DATE_INFINITY, "-infinity": wire.DATE_MINUS_INFINITY}.get(text) or _days(text)
    if opcode == wire.OP_TIME:
        return _micros(text)
    if opcode in (wire.OP_TIMESTAMP, wire.OP_TIMESTAMPTZ):
        if text.endswith("infinity"):
            return wire.TIMESTAMP_MINUS_INFINITY if text.startswith("-") else wire.TIMESTAMP_INFINITY
        day, clock = text.removesuffix(" BC").split(" ")
        era = " BC" if text.endswith(" BC") else ""
        return _days(day + era) * 86_400_000_000 + _micros(clock.removesuffix("+00"))
    if opcode == wire.OP_DECIMAL:
        scale = numeric_precision(column.type.base_typmod)[1]
        with localcontext() as context:
            context.prec = 4000
            unscaled = int(Decimal(text).scaleb(scale))
        return unscaled.to_bytes((abs(unscaled).bit_length() + 8) // 8, "big", signed=True)
    return text


def without_logical(schema: Any) -> Any:
    """The schema with plain types: fastavro then leaves values as they are on the wire."""
    if isinstance(schema, dict):
        return {k: without_logical(v) for k, v in schema.items() if k not in ("logicalType", "precision", "scale")}
    if isinstance(schema, list):
        return [without_logical(s) for s in schema]
    return schema


def _avro(schema: str, schema_id: int, record: dict[str, Any]) -> bytes:
    out = io.BytesIO()
    out.write(bytes([wire.MAGIC]) + schema_id.to_bytes(4, "big"))
    fastavro.schemaless_writer(out, fastavro.parse_schema(without_logical(json.loads(schema))), record)
    return out.getvalue()


def avro_row(table: Table, texts: list[str | None], key_id: int, value_id: int) -> tuple[bytes | None, bytes]:
    """Key and value of a row as fastavro writes them."""
    fields = json.loads(avro.value_schema(table))["fields"]
    values = {
        field["name"]: None if text is None else native(column, text)
        for field, column, text in zip(fields, table.columns, texts, strict=True)
    }
    key = None
    if table.keyed:
        by_name = {c.name: f["name"] for c, f in zip(table.columns, fields, strict=True)}
        key = _avro(avro.key_schema(table), key_id, {by_name[name]: values[by_name[name]] for name in table.key})
    return key, _avro(avro.value_schema(table), value_id, values)


def _iso(opcode: int, text: str) -> str:
    if text.endswith("infinity"):
        return text
    before = text.endswith(" BC")
    text = text.removesuffix(" BC").removesuffix("+00")
    if opcode == wire.OP_TIME:
        head, clock = "", text
    else:
        day, _, clock = text.partition(" ")
        year_text, month, dom = day.split("-")
        year = 1 - int(year_text) if before else int(year_text)
        if 0 <= year <= 9999:
            head = f"{year:04d}-{month}-{dom}"
        else:
            head = f"{'-' if year < 0 else '+'}{abs(year):06d}-{month}-{dom}"
    if clock:
        whole, _, fraction = clock.partition(".")
        clock = f"{whole}.{fraction:0<6}" if fraction else whole
        head = f"{head}T{clock}" if head else clock
    return head + ("Z" if opcode == wire.OP_TIMESTAMPTZ else "")


def json_native(column: Column, text: str) -> Any:
    """What the JSON value of a column is, parsed."""
    opcode = mapping(column.type).opcode
    if opcode == wire.OP_BOOL:
        return text == "t"
    if opcode in (wire.OP_INT2, wire.OP_INT4, wire.OP_INT8):
        return int(text)
    if opcode in (wire.OP_FLOAT4, wire.OP_FLOAT8):
        return text if text in ("NaN", "Infinity", "-Infinity") else float(text)
    if opcode == wire.OP_BYTEA:
        return base64.b64encode(bytes.fromhex(text.removeprefix("\\x"))).decode()
    if opcode in (wire.OP_DATE, wire.OP_TIME, wire.OP_TIMESTAMP, wire.OP_TIMESTAMPTZ):
        return _iso(opcode, text)
    return text


def json_row(table: Table, texts: list[str | None]) -> tuple[dict[str, Any] | None, dict[str, Any]]:
    """Key and value of a row in the JSON format, parsed."""
    values = {
        column.name: None if text is None else json_native(column, text)
        for column, text in zip(table.columns, texts, strict=True)
    }
    return ({name: values[name] for name in table.key} if table.keyed else None), values
