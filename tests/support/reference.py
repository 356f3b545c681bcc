"""The readable twin of the kernels: what a row must look like, from PostgreSQL's own text of its values.

The values are those that the verification compares topics with (``airflow_bottledwater/verify/expected.py``); here they
become records.
"""

from __future__ import annotations

import io
import json
from typing import Any

import fastavro

from airflow_bottledwater.encoding import avro, json_schema, names, protobuf, wire
from airflow_bottledwater.encoding.avro import without_logical
from airflow_bottledwater.model.relation import SourceTable
from airflow_bottledwater.pipeline.formats import FORMATS
from airflow_bottledwater.verify.expected import json_native, native, protobuf_native
from airflow_bottledwater.verify.nested import Unrepresentable

__all__ = [
    "Unrepresentable",
    "avro_row",
    "json_native",
    "json_row",
    "native",
    "protobuf_row",
    "schemas_of",
    "without_logical",
]

#: what the records of the tests' tables are called
RECORD = names.named("public", "t")


def schemas_of(table: SourceTable, format: str, key_id: int, value_id: int) -> dict[int, str] | None:
    """A table's schemas, as a registry has them; None if the format needs none."""
    if not FORMATS[format].uses_registry:
        return None
    made = json_schema if FORMATS[format].as_json else protobuf if FORMATS[format].as_protobuf else avro
    return {key_id: made.key_schema(table, RECORD), value_id: made.value_schema(table, RECORD)}


def _avro(schema: str, schema_id: int, record: dict[str, Any]) -> bytes:
    out = io.BytesIO()
    out.write(bytes([wire.MAGIC]) + schema_id.to_bytes(4, "big"))
    fastavro.schemaless_writer(out, fastavro.parse_schema(without_logical(json.loads(schema))), record)
    return out.getvalue()


def avro_row(table: SourceTable, texts: list[str | None], key_id: int, value_id: int) -> tuple[bytes | None, bytes]:
    """Key and value of a row as fastavro writes them."""
    fields = json.loads(avro.value_schema(table))["fields"]
    values = {
        field["name"]: None if text is None else native(column.type, text)
        for field, column, text in zip(fields, table.columns, texts, strict=True)
    }
    key = None
    if table.keyed:
        by_name = {c.name: f["name"] for c, f in zip(table.columns, fields, strict=True)}
        key = _avro(avro.key_schema(table), key_id, {by_name[name]: values[by_name[name]] for name in table.key})
    return key, _avro(avro.value_schema(table), value_id, values)


def protobuf_row(table: SourceTable, texts: list[str | None]) -> tuple[dict[str, Any] | None, dict[str, Any]]:
    """Key and value of a row in Protocol Buffers, by the fields' names; None for none."""
    values = {
        names.mangle(column.field): None if text is None else protobuf_native(column.type, text)
        for column, text in zip(table.columns, texts, strict=True)
    }
    return ({names.mangle(name): values[names.mangle(name)] for name in table.key} if table.keyed else None), values


def json_row(table: SourceTable, texts: list[str | None]) -> tuple[dict[str, Any] | None, dict[str, Any]]:
    """Key and value of a row in the JSON format, parsed."""
    values = {
        column.name: None if text is None else json_native(column.type, text)
        for column, text in zip(table.columns, texts, strict=True)
    }
    return ({name: values[name] for name in table.key} if table.keyed else None), values
