"""Both sides of a comparison, value by value: records as a consumer decodes them, rows as PostgreSQL's own text, both
in one canonical text.

Nothing here is done once per record of a large topic, unless a column has a type that :mod:`.program` has no compiled
form for.
"""

from __future__ import annotations

import hashlib
import io
import json
import math
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from decimal import Context, Decimal
from typing import Any, NamedTuple

import fastavro
from psycopg import sql

from airflow_bottledwater.encoding import avro, json_schema, masks, names, protobuf, types, wire
from airflow_bottledwater.encoding.envelope import Envelope
from airflow_bottledwater.model.relation import Column, ColumnType, SourceTable
from airflow_bottledwater.pipeline.formats import Format
from airflow_bottledwater.verify.documents import members, parsed
from airflow_bottledwater.verify.expected import json_native, native, protobuf_native
from airflow_bottledwater.verify.nested import Unrepresentable
from airflow_bottledwater.verify.protobuf import decode

#: enough digits for any numeric (131072 before the point, 16383 behind it: NUMERIC_MAX_PRECISION and its like)
_EXACT = Context(prec=150_000)
#: the byte before the id of a schema (Confluent's wire format)
_MAGIC = 0
#: types that PostgreSQL's text does not tell about: what is published is the binary form
_BINARY_ONLY = {3361, 3402, 5017, 4600, 4601}

#: the name of records in a schema that is only compared by its properties
_NAMELESS = names.named("nameless", "nameless")

#: returns the text of a schema by its id; None if there is none
Schemas = Callable[[int], str | None]


class Unreadable(ValueError):
    """A record that a consumer cannot decode."""


def canonical(value: Any) -> str:
    """A text that is the same for equal values, whatever their Python types: of numbers, the shortest exact decimal."""
    if value is None:
        return "n"
    if isinstance(value, bool):
        return "t" if value else "f"
    if isinstance(value, str):
        return f"s{len(value)}:{value}"
    if isinstance(value, int | float | Decimal):
        return f"#{_number(value)}"
    if isinstance(value, bytes):
        return f"b{value.hex()}"
    if isinstance(value, list):
        return f"[{','.join(map(canonical, value))}]"
    if isinstance(value, dict):
        return "{" + ",".join(f"{canonical(k)}={canonical(v)}" for k, v in sorted(value.items())) + "}"
    return f"?{value!r}"


def text_hash(text: str, seed: bytes) -> int:
    """The hash of a canonical text, in 64 bits.

    :param seed: its key.
    """
    # a lone surrogate may come from JSON of another program
    digest = hashlib.blake2b(text.encode(errors="surrogatepass"), digest_size=8, key=seed).digest()
    return int.from_bytes(digest, "little")


def _number(value: int | float | Decimal) -> str:
    if isinstance(value, int):
        return str(value)
    if isinstance(value, float):
        if not math.isfinite(value):
            return str(value)
        value = Decimal(repr(value))
    if not value.is_finite():
        return str(value)
    if not value:
        return "0"
    if abs(value.adjusted()) > 100_000:
        return str(value)  # JSON of another program
    return f"{_EXACT.normalize(value):f}"


@dataclass(frozen=True, slots=True)
class Decoded:
    """A record's value.

    :param values: by column; only columns that the table has today.
    :param older: columns that the record has under another schema than today's, or does not have at all: it was written
        before the table was altered. JSON does not show another type, and neither does Avro where both types have the
        same schema.
    """

    values: Mapping[str, Any]
    older: frozenset[str] = frozenset()


class TopicReader:
    """Decodes the keys and values of a table's topic as a consumer does: by the schema whose id the record has, JSON
    with exact numbers; the registry must know its id, too, if it has one.

    :param format: the topic's.
    :param schemas: the registry's schemas; None if the format needs none.
    :param envelope: what is around the rows; None for nothing.
    """

    def __init__(
        self, table: SourceTable, format: Format, schemas: Schemas | None, envelope: Envelope | None = None
    ) -> None:
        self._schemas, self._way, self._envelope = schemas, _way(format), envelope
        self._known: dict[int, tuple[Any, frozenset[str]]] = {}
        self._columns = {c.name: c for c in table.columns}
        self._names = {c.field if format.as_json else names.mangle(c.field): c.name for c in table.columns}
        self._today = self._way.schema(table, names.enveloped(table.name) if envelope else _NAMELESS)

    def key(self, data: bytes) -> dict[str, Any]:
        """A key by column.

        :raises Unreadable: a consumer cannot decode it.
        """
        found, _ = self._decode(data)
        found = self._payload(found)
        return {self._names.get(name, name): value for name, value in found.items()}

    def shown_key(self, data: bytes) -> dict[str, str]:
        """A key as text by column."""
        try:
            return {name: shown_of(self._columns.get(name), value) for name, value in self.key(data).items()}
        except Unreadable:
            hidden = any(column.mask for column in self._columns.values())
            return {"bytes": HIDDEN if hidden else shown(data)}

    def value(self, data: bytes) -> Decoded:
        """A value by column.

        :raises Unreadable: a consumer cannot decode it.
        """
        found, older = self._decode(data)
        if self._envelope is not None:
            after = _members(self._payload(found).get("after"))
            if not isinstance(after, dict):
                raise Unreadable("it is an envelope without a new row, and not followed by a tombstone")
            found = after
        values = {self._names[name]: value for name, value in found.items() if name in self._names}
        absent = frozenset(self._columns) - values.keys()
        return Decoded(values, absent | {self._names[name] for name in older if name in self._names})

    def _payload(self, found: dict[str, Any]) -> dict[str, Any]:
        if self._envelope is None or not self._envelope.with_schema:
            return found
        payload = _members(found.get("payload"))
        if not isinstance(payload, dict):
            raise Unreadable("it has no payload beside a schema")
        return payload

    def _decode(self, data: bytes) -> tuple[dict[str, Any], frozenset[str]]:
        if self._schemas is None:
            return _json(None, data), frozenset()
        if len(data) < 5 or data[0] != _MAGIC:
            raise Unreadable("it is not in Confluent's wire format")
        number = int.from_bytes(data[1:5], "big")
        schema, older = self._schema(number)
        try:
            return self._way.decode(schema, data[5:]), older
        except Unreadable:
            raise
        except Exception as error:  # fastavro raises whatever the bytes lead to
            raise Unreadable(f"it does not fit schema {number}: {type(error).__name__}") from None

    def _schema(self, number: int) -> tuple[Any, frozenset[str]]:
        """A schema, and the names of those fields that it has with other types than today's, or that have gone since.

        :raises Unreadable: the registry does not know it.
        """
        if number not in self._known:
            assert self._schemas is not None
            if (text := self._schemas(number)) is None:
                raise Unreadable(f"the registry has no schema {number} of this topic's records")
            rows = json.dumps(row_schema(json.loads(text))) if self._envelope else text
            self._known[number] = self._way.parse(text), frozenset(self._way.altered(rows, self._today))
        return self._known[number]


def _altered(text: str, today: str) -> set[str]:
    """Of Avro, see :func:`airflow_bottledwater.encoding.json_schema.altered`."""
    of_today = _fields(json.loads(today))
    return {name for name, kind in _fields(json.loads(text)).items() if kind != of_today.get(name)}


def _fields(schema: Any) -> dict[str, Any]:
    """The types of a record's fields, without what says nothing about values."""
    fields = schema.get("fields", []) if isinstance(schema, dict) else []
    return {field["name"]: _plain(field["type"]) for field in fields}


def _avro(schema: Any, data: bytes) -> dict[str, Any]:
    body = io.BytesIO(data)
    found: Any = fastavro.schemaless_reader(body, schema, None)
    if body.read(1):
        raise Unreadable("it has more bytes than its schema tells about")
    if not isinstance(found, dict):
        raise Unreadable("it is not a record")
    return found


def _protobuf(schema: Any, data: bytes) -> dict[str, Any]:
    if not data.startswith(b"\0"):
        raise Unreadable("it is not the first message of its schema")
    return decode(schema.message, data[1:])


class _Way(NamedTuple):
    """How the records of a format are decoded, and what they are then.

    :param schema: makes that of a table's rows.
    :param parse: makes of a schema's text what ``decode`` takes.
    :param altered: see :func:`airflow_bottledwater.encoding.json_schema.altered`.
    :param make: makes what they must be from PostgreSQL's text.
    """

    schema: Callable[[SourceTable, names.Record], str]
    parse: Callable[[str], Any]
    altered: Callable[[str, str], set[str]]
    decode: Callable[[Any, bytes], dict[str, Any]]
    make: Callable[[ColumnType, str], Any]


def _way(format: Format) -> _Way:
    if format.as_json:
        return _Way(json_schema.value_schema, str, json_schema.altered, _json, json_native)
    if format.as_protobuf:
        return _Way(protobuf.value_schema, protobuf.parse, protobuf.altered, _protobuf, protobuf_native)
    return _Way(avro.value_schema, _parsed_avro, _altered, _avro, native)


def _parsed_avro(text: str) -> Any:
    return fastavro.parse_schema(avro.without_logical(json.loads(text)))


def row_schema(schema: Any) -> Any:
    """The schema of the rows in an envelope's; that of a key as it is."""
    for field in schema.get("fields", []) if isinstance(schema, dict) else []:
        if field["name"] == "before" and isinstance(field["type"], list):
            return next((each for each in field["type"] if isinstance(each, dict)), schema)
    return schema


def _plain(schema: Any) -> Any:
    """A schema without what says nothing about a value: whether it may be null, and comments."""
    if isinstance(schema, list):
        kept = [_plain(each) for each in schema if each != "null"]
        return kept[0] if len(kept) == 1 else kept
    if isinstance(schema, dict):
        return {
            k: _plain(v) if k in ("type", "items", "values", "fields") else v for k, v in schema.items() if k != "doc"
        }
    return schema


def _json(schema: Any, data: bytes) -> dict[str, Any]:
    found = _members(data)
    if not isinstance(found, dict):
        raise Unreadable("it is not a JSON object")
    return found


def _members(found: Any) -> Any:
    """See :func:`~.documents.members`; bytes are parsed first.

    :raises Unreadable: it is not JSON.
    """
    try:
        return members(parsed(found) if isinstance(found, bytes) else found)
    except ValueError as error:
        raise Unreadable(f"it is not JSON: {error}") from None


def unverified(table: SourceTable) -> list[str]:
    """The columns whose values PostgreSQL's text does not tell about, so that they are not compared."""
    return [c.name for c in table.columns if _untold(c.type, top=True)]


def _untold(column: ColumnType, *, top: bool = False) -> bool:
    if column.base_oid in _BINARY_ONLY:
        return True
    if types.mapping(column).opcode == wire.OP_UINT32_TEXT:
        return not top
    if types.mapping(column).convert is types.to_text:
        return False
    return any(_untold(each) for each in column.inside)


def select_list(table: SourceTable) -> sql.Composed:
    """The columns for a COPY in text form, which uses the types' own output functions. A reg* that is published as its
    number is cast to one, and what is published as GeoJSON is converted by PostGIS."""
    return sql.SQL(", ").join(_selected(column) for column in table.columns)


def _selected(column: Column) -> sql.Composable:
    name = sql.Identifier(column.name)
    mapping = types.mapping(column.type)
    if column.mask:
        return masks.selected(column)
    if mapping.opcode == wire.OP_UINT32_TEXT:
        return sql.SQL("{}::pg_catalog.oid").format(name)
    if column.type.form == "geojson" and mapping.convert is not None:
        return mapping.convert(name)
    return name


class Expectation:
    """What a consumer must find for a row.

    :param format: the topic's.
    """

    def __init__(self, table: SourceTable, format: Format) -> None:
        self.table = table
        self._make = _way(format).make
        left_out = set(unverified(table))
        self._compared = [(i, c) for i, c in enumerate(table.columns) if c.name not in left_out]
        self._key = [next((i, c) for i, c in enumerate(table.columns) if c.name == name) for name in table.key]

    def key(self, texts: Sequence[str | None]) -> dict[str, Any]:
        """A row's key by column."""
        return {c.name: self._value(c, texts[i]) for i, c in self._key}

    def values(self, texts: Sequence[str | None]) -> dict[str, Any]:
        """A row by column; those columns that cannot be verified are left out."""
        return {c.name: self._value(c, texts[i]) for i, c in self._compared}

    def value(self, column: int, text: str) -> Any:
        """The value of a column, by its number."""
        return self._value(self.table.columns[column], text)

    def _value(self, column: Column, text: str | None) -> Any:
        if text is None:
            return None
        try:
            return self._make(column.type, text)
        except Unrepresentable:
            return _Impossible(text)

    def difference(self, texts: Sequence[str | None], found: Decoded) -> tuple[str, str, str] | None:
        """The first column in which a record differs from a row, with both values as text; None if there is none.

        A column that was altered since the record was written, as its schema shows, is not a difference: the topic is
        as the source was.
        """
        for i, column in self._compared:
            expected = self._value(column, texts[i])
            got = found.values.get(column.name)
            if canonical(expected) != canonical(got) and column.name not in found.older:
                return column.name, shown(texts[i]), shown_of(column, got)
        return None

    def older(self, texts: Sequence[str | None], found: Decoded) -> bool:
        """Whether a record differs from a row only because it was written before the table was altered."""
        return any(
            canonical(self._value(c, texts[i])) != canonical(found.values.get(c.name))
            for i, c in self._compared
            if c.name in found.older
        )


@dataclass(frozen=True, slots=True)
class _Impossible:
    """A value that the format cannot hold: no record equals it."""

    text: str


#: characters of a value that are shown
_SHOWN = 80


def shown(value: Any) -> str:
    """A value for a message, cut if it is long."""
    text = "NULL" if value is None else value.hex() if isinstance(value, bytes) else str(value)
    return text if len(text) <= _SHOWN else f"{text[:_SHOWN]}… ({len(text):,} characters)"


#: instead of a value in a topic that nobody may see: the record may have been written before its column was masked or
#: left out
HIDDEN = "another value"
_HASH = re.compile("[0-9a-f]{64}")


def shown_of(column: Column | None, value: Any) -> str:
    """A value in a topic for a message; of a column that has a mask, only what is NULL or looks like a hash.

    :param column: None if the table has no such column that is published.
    """
    masked = column is None or (bool(column.mask) and not (column.mask.startswith("hash") and _is_hash(value)))
    return HIDDEN if masked and value is not None else shown(value)


def _is_hash(value: Any) -> bool:
    return isinstance(value, str) and _HASH.fullmatch(value) is not None


_ESCAPES = {"b": "\b", "f": "\f", "n": "\n", "r": "\r", "t": "\t", "v": "\v"}


def copied(line: bytes) -> list[str | None]:
    """The texts of a row of COPY's text format (https://www.postgresql.org/docs/current/sql-copy.html, Text Format)."""
    return [None if field == b"\\N" else unescaped(field.decode()) for field in line.removesuffix(b"\n").split(b"\t")]


def unescaped(field: str) -> str:
    """The text of a field of COPY's text format that is not NULL."""
    if "\\" not in field:
        return field
    first, *rest = field.split("\\")
    found, literal = [first], False
    for part in rest:
        if literal:  # the second backslash of two
            found.append(part)
            literal = False
        elif not part:
            found.append("\\")
            literal = True
        else:
            found.append(_ESCAPES.get(part[0], part[0]) + part[1:])
    return "".join(found)
