"""Avro schemas of keys and rows."""

from __future__ import annotations

import json
from typing import Any

from airflow_bottledwater.encoding import names, types
from airflow_bottledwater.errors import Refused
from airflow_bottledwater.model.relation import Table

MEDIA_TYPE = "AVRO"


def _distinct(table: Table, fields: list[dict[str, Any]]) -> None:
    seen: dict[str, str] = {}
    for field, column in zip(fields, table.columns, strict=True):
        other = seen.setdefault(field["name"], column.name)
        if other != column.name:
            raise Refused(
                f"Columns {other!r} and {column.name!r} of {table.qualified} both become the Avro field {field['name']!r}.",
                "Rename one of them, leave it out of the publication, or use the JSON format.",
            )


def _named_once(schema: Any, seen: set[str]) -> Any:
    """A schema that defines each of its records where it first appears (https://avro.apache.org/docs/1.12.0/specification/#names)."""
    if isinstance(schema, list):
        return [_named_once(each, seen) for each in schema]
    if not isinstance(schema, dict):
        return schema
    if schema.get("type") == "record":
        name = f"{schema['namespace']}.{schema['name']}"
        if name in seen:
            return name
        seen.add(name)
        return {**schema, "fields": [{**f, "type": _named_once(f["type"], seen)} for f in schema["fields"]]}
    if schema.get("type") == "array":
        return {**schema, "items": _named_once(schema["items"], seen)}
    return schema


def value_schema(table: Table) -> str:
    """The row's record: every field nullable with default null, so that a registry accepts added and dropped columns.

    :raises Refused: if two columns' names become one.
    """
    fields: list[dict[str, Any]] = []
    for column in table.columns:
        field = {
            "name": names.mangle(column.name),
            "type": ["null", types.mapping(column.type).avro(column.type)],
            "default": None,
        }
        if column.comment:
            field["doc"] = column.comment
        fields.append(field)
    _distinct(table, fields)
    schema = {
        "type": "record",
        "name": names.mangle(table.name),
        "namespace": names.namespace(table.schema),
        "fields": fields,
    }
    if table.comment:
        schema["doc"] = table.comment
    return json.dumps(_named_once(schema, set()), separators=(",", ":"), ensure_ascii=False)


def key_schema(table: Table) -> str:
    """The key's record: the key columns in index order, nothing but names and types, so that key bytes (and with them
    the partition of a row) never change by themselves."""
    columns = {column.name: column for column in table.columns}
    fields = [
        {
            "name": names.mangle(name),
            "type": types.mapping(columns[name].type).avro(columns[name].type),
        }
        for name in table.key
    ]
    schema = {
        "type": "record",
        "name": names.mangle(table.name) + "_key",
        "namespace": names.namespace(table.schema),
        "fields": fields,
    }
    return json.dumps(_named_once(schema, set()), separators=(",", ":"), ensure_ascii=False)
