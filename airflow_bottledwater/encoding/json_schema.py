"""JSON Schemas (draft-07) of keys and rows, in the form of Confluent's serializers; and what they mean to readers.

A schema says what the kernels write as JSON, and nothing that a value of PostgreSQL could break: no ``format``, since
``infinity`` is no date, and no keywords of our own, since strict validators refuse these.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from typing import Any

from airflow_bottledwater.encoding import names, types, wire
from airflow_bottledwater.model.relation import Column, ColumnType, SourceTable

_DRAFT = "http://json-schema.org/draft-07/schema#"
_NULL = {"type": "null"}
_STRING = {"type": "string"}
_BOOLEAN = {"type": "boolean"}
_INTEGER = {"type": "integer"}
_NUMBER = {"oneOf": [{"type": "number"}, {"enum": ["NaN", "Infinity", "-Infinity"]}]}

#: by opcode; what is not here is a string, or consists of other values
_SINGLE: dict[int, dict[str, Any]] = {
    wire.OP_BOOL: _BOOLEAN,
    **dict.fromkeys((wire.OP_INT2, wire.OP_INT4, wire.OP_INT8, wire.OP_UINT32, wire.OP_UINT64), _INTEGER),
    **dict.fromkeys((wire.OP_FLOAT4, wire.OP_FLOAT8, wire.OP_DOUBLE), _NUMBER),
    wire.OP_BYTEA: {"type": "string", "contentEncoding": "base64"},
    wire.OP_FLOATS: {"type": "array", "items": _NUMBER},
    wire.OP_MAP: {"type": "object", "additionalProperties": {"oneOf": [_NULL, _STRING]}},
}
#: the forms of columns whose JSON is the value itself
_DOCUMENT: dict[str, dict[str, Any]] = {"value": {}, "geojson": {"type": "object"}, "number": _NUMBER}


def _nullable(schema: dict[str, Any]) -> dict[str, Any]:
    """A schema that also allows null; that of any value does already."""
    return {"oneOf": [_NULL, schema]} if schema else {}


def _schema(column: ColumnType) -> dict[str, Any]:
    mapping = types.mapping(column)
    if mapping.opcode in (wire.OP_TEXT, wire.OP_JSONB, wire.OP_NUMERIC_TEXT):
        return _DOCUMENT[column.form] if mapping.argument(column) else _STRING
    inner = [_schema(part.type) for part in mapping.parts if part.type is not None]
    if mapping.opcode == wire.OP_ARRAY:
        found = _nullable(inner[0])
        for _ in range(column.dimensions):
            found = {"type": "array", "items": found}
        return found
    if mapping.opcode == wire.OP_MULTIRANGE:
        return {"type": "array", "items": inner[0]}
    if mapping.opcode == wire.OP_RECORD:
        return _object(list(zip(column.attributes, inner, strict=True)))
    if mapping.opcode == wire.OP_RANGE:
        flags = dict.fromkeys(("lower_inclusive", "upper_inclusive", "empty"), _BOOLEAN)
        bounds = {name: _nullable(schema) for name, schema in zip(("lower", "upper"), inner, strict=True)}
        return {"type": "object", "properties": {**bounds, **flags}, "additionalProperties": False}
    return _SINGLE.get(mapping.opcode, _STRING)


def _object(fields: Sequence[tuple[Column, dict[str, Any]]]) -> dict[str, Any]:
    properties = {
        column.field: _nullable(schema) | ({"description": column.comment} if column.comment else {})
        for column, schema in fields
    }
    return {"type": "object", "properties": properties, "additionalProperties": False}


def _text(title: str, schema: dict[str, Any], comment: str | None = None) -> str:
    head = {"$schema": _DRAFT, "title": title, **({"description": comment} if comment else {})}
    return json.dumps({**head, **schema}, separators=(",", ":"), ensure_ascii=False)


def value_schema(table: SourceTable, record: names.Record) -> str:
    """The schema of a row: an object in which every property may be null or lack, and which has no others. A registry
    with the level ``BACKWARD`` then accepts added columns; for dropped ones see :func:`amended`.

    :param record: what it is called.
    """
    schema = _object([(column, _schema(column.type)) for column in table.columns])
    return _text(f"{record.namespace}.{record.name}", schema, table.comment)


def key_schema(table: SourceTable, record: names.Record) -> str:
    """The schema of a key: an object of the key columns, with nothing but names and types, so that the id of the
    schema, a part of the key's bytes, never changes without need.

    :param record: what the record of a row is called.
    """
    columns = {column.name: column for column in table.columns}
    properties = {columns[name].field: _plain(_schema(columns[name].type)) for name in table.key}
    schema = {"type": "object", "properties": properties, "required": list(properties), "additionalProperties": False}
    return _text(f"{record.namespace}.{record.key}", schema)


def _parse(text: str) -> dict[str, Any]:
    try:
        found = json.loads(text)
    except ValueError:
        return {}
    return found if isinstance(found, dict) else {}


def _plain(schema: Any) -> Any:
    """A schema without what only people read. The names of an object's properties are no keywords."""
    if isinstance(schema, list):
        return [_plain(each) for each in schema]
    if not isinstance(schema, dict):
        return schema
    return {
        keyword: {name: _plain(each) for name, each in part.items()} if keyword == "properties" else _plain(part)
        for keyword, part in schema.items()
        if keyword != "description"
    }


def _with_dropped(schema: Any, before: Any) -> Any:
    """A schema with the properties that only an earlier one has, also inside of values."""
    if not isinstance(schema, dict) or not isinstance(before, dict):
        return schema
    found = dict(schema)
    if isinstance(ours := schema.get("properties"), dict) and isinstance(theirs := before.get("properties"), dict):
        found["properties"] = {name: _with_dropped(each, theirs.get(name)) for name, each in ours.items()}
        found["properties"] |= {name: each for name, each in theirs.items() if name not in ours}
    if "items" in schema:
        found["items"] = _with_dropped(schema["items"], before.get("items"))
    if inside := _not_null(schema):
        found["oneOf"] = [_NULL, _with_dropped(inside, _not_null(before))]
    return found


def altered(known: str, today: str) -> set[str]:
    """The properties that a schema does not have as that of today has them; that of today may lack some."""
    one, other = (_plain(_parse(text)).get("properties", {}) for text in (known, today))
    return {name for name, each in one.items() if name not in other or _with_dropped(other[name], each) != each}


def title(text: str) -> str:
    """The full name of a schema's records; empty if it has none."""
    return str(_parse(text).get("title", ""))


def same(known: str, wanted: str) -> bool:
    """Whether a schema that a registry has under an id is the one that is wanted there. It may have more properties:
    those of columns that were dropped."""
    found = _plain(_parse(known))
    return bool(found) and _with_dropped(_plain(_parse(wanted)), found) == found


def amended(schema: str, earlier: str) -> str:
    """A schema with the properties that only an earlier one of its subject has. Rows have no properties but those that
    their schema names: without those of dropped columns, a reader with the new one could not read older records, and so
    a registry refuses it.

    :param earlier: the subject's latest version.
    """
    found, before = _parse(schema), _parse(earlier)
    made = _with_dropped(found, before)
    if made == before:
        return earlier
    return schema if made == found else json.dumps(made, separators=(",", ":"), ensure_ascii=False)


def misread(written: str, read: str) -> list[str]:
    """The properties that a reader with one schema takes for other values, without an error, in records that were
    written with another one, as :func:`airflow_bottledwater.encoding.meaning.misread` finds them for Avro.

    JSON shows most of what a value is. What it does not show is whether a string is a text or bytes in base64.
    """
    return list(dict.fromkeys(_misread(_parse(written), _parse(read), "")))


def _misread(writer: Any, reader: Any, path: str) -> Iterator[str]:
    if not isinstance(writer, dict) or not isinstance(reader, dict):
        return
    others = reader.get("properties", {})
    for name, each in writer.get("properties", {}).items():
        yield from _misread(each, others.get(name), f"{path}.{name}" if path else name)
    yield from _misread(writer.get("items"), reader.get("items"), path)
    one, other = _string(writer), _string(reader)
    if one and other and one != other:
        yield f"{path} ({one}) as {other}"
    if (inside := _not_null(writer)) and (its := _not_null(reader)):
        yield from _misread(inside, its, path)


def _not_null(schema: dict[str, Any]) -> Any:
    """What a nullable value is otherwise."""
    choices = [each for each in schema.get("oneOf", ()) if each != _NULL]
    return choices[0] if len(choices) == 1 else None


def _string(schema: dict[str, Any]) -> str:
    """What a string says; empty if it is no string."""
    if schema.get("type") != "string":
        return ""
    return "bytes in base64" if schema.get("contentEncoding") == "base64" else "text"
