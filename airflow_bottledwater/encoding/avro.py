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


def value_schema(table: Table) -> str:
    """The row's record: every field nullable with default null, so that a registry accepts added and dropped columns.

    :raises Refused: if two columns' names become one.
    """
    fields: list[dict[str, Any]] = []
    for column in table.columns:
        field = {
            "name": names.mangle(column.name),
            "type": ["null", types.mapping(column.type).avro(column.type.base_typmod)],
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
    return json.dumps(schema, separators=(",", ":"), ensure_ascii=False)


def key_schema(table: Table) -> str:
    """The key's record: the key columns in index order, nothing but names and types, so that key bytes (and with them
    the partition of a row) never change by themselves."""
    columns = {column.name: column for column in table.columns}
    fields = [
        {
            "name": names.mangle(name),
            "type": types.mapping(columns[name].type).avro(columns[name].type.base_typmod),
        }
        for name in table.key
    ]
    schema = {
        "type": "record",
        "name": names.mangle(table.name) + "_key",
        "namespace": names.namespace(table.schema),
        "fields": fields,
    }
    return json.dumps(schema, separators=(",", ":"), ensure_ascii=False)
