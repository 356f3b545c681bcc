"""What a consumer must find for a row: each value as Avro or JSON gives it, made from PostgreSQL's own text of the
value.

It is independent of the binary layouts and of the kernels that publish: the verification and the tests compare the
kernels with it.
"""

from __future__ import annotations

import base64
import functools
import math
import re
import struct
from collections.abc import Callable
from datetime import date
from decimal import Decimal, localcontext
from typing import Any

from airflow_bottledwater.encoding import names, wire
from airflow_bottledwater.encoding.types import mapping, numeric_precision
from airflow_bottledwater.model.relation import ColumnType
from airflow_bottledwater.verify.documents import parsed
from airflow_bottledwater.verify.nested import Unrepresentable, elements, pairs, quoted_parts, ranges

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


def _zoned(text: str) -> tuple[str, int]:
    """The clock of a timetz, and its offset in seconds east of Greenwich."""
    match = re.fullmatch(r"([\d:.]+)([+-])(\d+)(?::(\d+))?(?::(\d+))?", text)
    assert match is not None
    clock, sign, hours, minutes, seconds = match.groups()
    offset = int(hours) * 3600 + int(minutes or 0) * 60 + int(seconds or 0)
    return clock, -offset if sign == "-" else offset


_UNITS = {"year": 12, "mon": 1}


def _interval(text: str) -> dict[str, int]:
    """Months, days and microseconds of PostgreSQL's own style."""
    if text.endswith("infinity"):
        less = text.startswith("-")
        edge = wire.INTERVAL_MINUS_INFINITY if less else wire.INTERVAL_INFINITY
        return {
            "months": edge,
            "days": edge,
            "micros": wire.TIMESTAMP_MINUS_INFINITY if less else wire.TIMESTAMP_INFINITY,
        }
    found = {"months": 0, "days": 0, "micros": 0}
    for number, unit in re.findall(r"([+-]?\d+) (year|mon|day)s?", text):
        if unit == "day":
            found["days"] = int(number)
        else:
            found["months"] += int(number) * _UNITS[unit]
    if clock := re.search(r"([+-]?)(\d+:\d+:[\d.]+)$", text):
        found["micros"] = _micros(clock[2]) * (-1 if clock[1] == "-" else 1)
    return found


def _iso_interval(text: str) -> str:
    if text.endswith("infinity"):
        return text
    found = _interval(text)

    def parts(number: int, units: list[tuple[int, str]]) -> str:
        sign, rest, made = "-" if number < 0 else "", abs(number), ""
        for size, unit in units:
            if rest // size:
                made += f"{sign}{rest // size}{unit}"
            rest %= size
        return made

    date_part = parts(found["months"], [(12, "Y"), (1, "M")]) + parts(found["days"], [(1, "D")])
    micros = abs(found["micros"])
    sign = "-" if found["micros"] < 0 else ""
    clock = parts(found["micros"], [(3_600_000_000, "H"), (60_000_000, "M")])
    if seconds := micros % 60_000_000:
        clock += f"{sign}{Decimal(seconds).scaleb(-6).normalize():f}S"
    return f"P{date_part}{'T' + clock if clock else ''}" if date_part or clock else "PT0S"


def _money(column: ColumnType, text: str) -> Decimal:
    """Of lc_monetary C: ``-$1,234.56``."""
    digits = re.sub(r"[^\d]", "", text)
    return Decimal(("-" if "-" in text else "") + digits).scaleb(-column.base_typmod)


def _bytes(unscaled: int) -> bytes:
    return unscaled.to_bytes((abs(unscaled).bit_length() + 8) // 8, "big", signed=True)


def _each(column: ColumnType, found: Any, make: Callable[[ColumnType, str], Any]) -> Any:
    if isinstance(found, list):
        return [_each(column, each, make) for each in found]
    assert column.element is not None
    return None if found is None else make(column.element, found)


def _attributes(column: ColumnType, text: str, make: Callable[[ColumnType, str], Any]) -> list[Any]:
    """Of a composite (record_out, src/backend/utils/adt/rowtypes.c)."""
    if not column.attributes:
        return []
    parts = quoted_parts(text[1:-1])
    return [
        None if part is None else make(attribute.type, part)
        for attribute, part in zip(column.attributes, parts, strict=True)
    ]


def _bounds(column: ColumnType, text: str, make: Callable[[ColumnType, str], Any]) -> dict[str, Any]:
    """Of a range (range_deparse, src/backend/utils/adt/rangetypes.c)."""
    assert column.element is not None
    empty = text == "empty"
    lower, upper = (None, None) if empty else quoted_parts(text[1:-1])
    return {
        "lower": None if lower is None else make(column.element, lower),
        "upper": None if upper is None else make(column.element, upper),
        "lower_inclusive": text.startswith("["),
        "upper_inclusive": text.endswith("]"),
        "empty": empty,
    }


def _single(text: str) -> float:
    found: float = struct.unpack("<f", struct.pack("<f", float(text)))[0]
    return found


_NESTED = {wire.OP_ARRAY, wire.OP_RECORD, wire.OP_RANGE, wire.OP_MULTIRANGE, wire.OP_MAP, wire.OP_FLOATS}


def _nested(column: ColumnType, text: str, make: Callable[[ColumnType, str], Any], named: Callable[[str], str]) -> Any:
    """What is made of other values, each of which ``make`` makes; attributes have the names that ``named`` gives
    them."""
    opcode = mapping(column).opcode
    if opcode == wire.OP_ARRAY:
        return _each(column, elements(column, text), make)
    if opcode == wire.OP_RECORD:
        fields = [named(attribute.name) for attribute in column.attributes]
        return dict(zip(fields, _attributes(column, text, make), strict=True))
    if opcode == wire.OP_RANGE:
        return _bounds(column, text, make)
    if opcode == wire.OP_MULTIRANGE:
        assert column.element is not None
        return [make(column.element, each) for each in ranges(text)]
    if opcode == wire.OP_MAP:
        return pairs(text)
    return [_single(each) for each in text[1:-1].split(",")]


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


def _exact(column: ColumnType, text: str) -> int:
    """The integer of a type that Avro has to hold in a signed long."""
    if int(text) >= 2**63:
        raise Unrepresentable(text)
    return int(text)


def _double(column: ColumnType, text: str) -> float:
    """The nearest double of a numeric."""
    if math.isinf(float(text)) and "Inf" not in text:
        raise Unrepresentable(text)
    return float(text)


def _date(column: ColumnType, text: str) -> int:
    return {"infinity": wire.DATE_INFINITY, "-infinity": wire.DATE_MINUS_INFINITY}.get(text) or _days(text)


def _timestamp(column: ColumnType, text: str) -> int:
    if text.endswith("infinity"):
        return wire.TIMESTAMP_MINUS_INFINITY if text.startswith("-") else wire.TIMESTAMP_INFINITY
    day, clock = text.removesuffix(" BC").split(" ")
    era = " BC" if text.endswith(" BC") else ""
    return _days(day + era) * 86_400_000_000 + _micros(clock.removesuffix("+00"))


def _decimal(column: ColumnType, text: str) -> bytes:
    if not Decimal(text).is_finite():
        raise Unrepresentable(text)
    scale = numeric_precision(column.base_typmod)[1]
    with localcontext() as context:
        context.prec = 4000
        return _bytes(int(Decimal(text).scaleb(scale)))


def _timetz(column: ColumnType, text: str) -> dict[str, int]:
    clock, offset = _zoned(text)
    return {"micros": _micros(clock), "offset_seconds": offset}


def _json_timetz(text: str) -> str:
    clock, offset = _zoned(text)
    sign, size = "-" if offset < 0 else "+", abs(offset)
    seconds = f":{size % 60:02d}" if size % 60 else ""
    return f"{_iso(wire.OP_TIME, clock)}{sign}{size // 3600:02d}:{size // 60 % 60:02d}{seconds}"


def _iso_text(column: ColumnType, text: str) -> str:
    """A date or time that is published as text, in either format."""
    opcode = mapping(column).argument(column)
    if opcode == wire.OP_TIMETZ:
        return _json_timetz(text)
    return _iso_interval(text) if opcode == wire.OP_INTERVAL else _iso(opcode, text)


#: a value in Avro without logical types, by opcode; what is not here is the text itself
_NATIVE: dict[int, Callable[[ColumnType, str], Any]] = {
    wire.OP_ENUM: lambda column, text: names.symbol(text),
    wire.OP_HEX: lambda column, text: bytes.fromhex(text),
    wire.OP_MONEY: lambda column, text: _bytes(int(_money(column, text).scaleb(column.base_typmod))),
    wire.OP_TIMETZ: _timetz,
    wire.OP_INTERVAL: lambda column, text: _interval(text),
    wire.OP_ISO: _iso_text,
    wire.OP_UINT32: _exact,
    wire.OP_UINT64: _exact,
    wire.OP_BOOL: lambda column, text: text == "t",
    wire.OP_INT2: lambda column, text: int(text),
    wire.OP_INT4: lambda column, text: int(text),
    wire.OP_INT8: lambda column, text: int(text),
    wire.OP_FLOAT4: lambda column, text: _single(text),
    wire.OP_FLOAT8: lambda column, text: float(text),
    wire.OP_DOUBLE: _double,
    wire.OP_BYTEA: lambda column, text: bytes.fromhex(text.removeprefix("\\x")),
    wire.OP_DATE: _date,
    wire.OP_TIME: lambda column, text: _micros(text),
    wire.OP_TIMESTAMP: _timestamp,
    wire.OP_TIMESTAMPTZ: _timestamp,
    wire.OP_DECIMAL: _decimal,
}


def native(column: ColumnType, text: str) -> Any:
    """What Avro gives for a value, without logical types (they cannot hold every value).

    :param text: PostgreSQL's text under DateStyle ISO, TimeZone UTC, extra_float_digits 1, bytea_output hex.
    :raises Unrepresentable: Avro cannot hold it.
    """
    opcode = mapping(column).opcode
    if opcode in _NESTED:
        return _nested(column, text, native, names.mangle)
    make = _NATIVE.get(opcode)
    return text if make is None else make(column, text)


def _json_float(text: str) -> Any:
    return text if text in ("NaN", "Infinity", "-Infinity") else float(text)


def _json_bytes(text: str) -> str:
    return base64.b64encode(bytes.fromhex(text.removeprefix("\\x"))).decode()


#: a value in JSON, by opcode; what is not here is the text itself
_JSON: dict[int, Callable[[ColumnType, str], Any]] = {
    wire.OP_MONEY: lambda column, text: f"{_money(column, text):f}",
    wire.OP_TIMETZ: lambda column, text: _json_timetz(text),
    wire.OP_INTERVAL: lambda column, text: _iso_interval(text),
    wire.OP_ISO: _iso_text,
    **dict.fromkeys(
        (wire.OP_UINT32, wire.OP_UINT64, wire.OP_INT2, wire.OP_INT4, wire.OP_INT8), lambda column, text: int(text)
    ),
    wire.OP_BOOL: lambda column, text: text == "t",
    **dict.fromkeys((wire.OP_FLOAT4, wire.OP_FLOAT8, wire.OP_DOUBLE), lambda column, text: _json_float(text)),
    wire.OP_BYTEA: lambda column, text: _json_bytes(text),
    **{
        opcode: functools.partial(lambda opcode, column, text: _iso(opcode, text), opcode)
        for opcode in (wire.OP_DATE, wire.OP_TIME, wire.OP_TIMESTAMP, wire.OP_TIMESTAMPTZ)
    },
}


#: a value in Protocol Buffers where it differs from JSON's, by opcode
_PROTOBUF: dict[int, Callable[[ColumnType, str], Any]] = {
    wire.OP_FLOAT4: lambda column, text: _single(text),
    wire.OP_FLOAT8: lambda column, text: float(text),
    wire.OP_DOUBLE: _double,
    wire.OP_BYTEA: lambda column, text: bytes.fromhex(text.removeprefix("\\x")),
    wire.OP_HEX: lambda column, text: bytes.fromhex(text),
}


def protobuf_native(column: ColumnType, text: str) -> Any:
    """What a consumer makes of a value in Protocol Buffers: numbers, bytes and booleans are these, all else is as in
    JSON.

    :raises Unrepresentable: it cannot hold it.
    """
    opcode = mapping(column).opcode
    if opcode in _NESTED:
        return _nested(column, text, protobuf_native, names.mangle)
    make = _PROTOBUF.get(opcode) or _JSON.get(opcode)
    return text if make is None else make(column, text)


def json_native(column: ColumnType, text: str) -> Any:
    """What the JSON value of a column is, parsed; numbers that must be exact are Decimals."""
    opcode = mapping(column).opcode
    if opcode == wire.OP_FLOATS:
        return [float(each) for each in text[1:-1].split(",")]
    if opcode in _NESTED:
        return _nested(column, text, json_native, str)
    if opcode == wire.OP_NUMERIC_TEXT and column.form == "number":
        return text if text in ("NaN", "Infinity", "-Infinity") else Decimal(text)
    if column.form in ("value", "geojson"):
        return parsed(text)
    make = _JSON.get(opcode)
    return text if make is None else make(column, text)
