"""Avro schemas of keys and rows."""

from __future__ import annotations

import json
from typing import Any

from airflow_bottledwater.encoding import names, types
from airflow_bottledwater.errors import SchemaRefused
from airflow_bottledwater.model.relation import Column, SourceTable


def _distinct(table: SourceTable, fields: list[dict[str, Any]]) -> None:
    seen: dict[str, str] = {}
    for field, column in zip(fields, table.columns, strict=True):
        other = seen.setdefault(field["name"], column.name)
        if other != column.name:
            raise SchemaRefused(
                f"Columns {other!r} and {column.name!r} of {table.qualified} both become the Avro field "
                f"{field['name']!r}.",
                "Publish one of them under another name (option rename), leave it out (option exclude), or use another "
                "format.",
            )


def _named_once(table: SourceTable, schema: Any, seen: dict[str, Any]) -> Any:
    """A schema that defines each of its records and enums where it first appears
    (https://avro.apache.org/docs/1.12.0/specification/#names)."""
    if isinstance(schema, list):
        return [_named_once(table, each, seen) for each in schema]
    if not isinstance(schema, dict):
        return schema
    found = schema
    if schema["type"] in ("record", "enum"):
        name = f"{schema['namespace']}.{schema['name']}"
        if seen.setdefault(name, schema) != schema:
            raise _defined_twice(table, schema)
        if seen[name] is not schema:
            return name
    for list_of, part in (("fields", "name"), ("symbols", None)):
        members = [each[part] if part else each for each in schema.get(list_of, ())]
        if len(set(members)) < len(members):
            raise SchemaRefused(
                f"In {table.qualified}, two of type {schema['name']} become the same Avro name ({', '.join(members)}).",
                "Rename one of them, publish the type as text (composites = text, enums = string), or use the JSON "
                "format.",
            )
    if "fields" in schema:
        found = {**schema, "fields": [{**f, "type": _named_once(table, f["type"], seen)} for f in schema["fields"]]}
    for inner in ("items", "values"):
        if inner in schema:
            found = {**schema, inner: _named_once(table, schema[inner], seen)}
    return found


def _defined_twice(table: SourceTable, schema: dict[str, Any]) -> SchemaRefused:
    """The error for two definitions of one name: of two types, or of one whose dates and times have two forms."""
    types_inside = [(each, column.name) for column in table.columns for each in column.type.whole]
    found = [(each, name) for each, name in types_inside if types.named(each).items() <= schema.items()]
    if len({kind.base_oid for kind, _ in found}) == 1 < len({kind.forms for kind, _ in found}):
        columns = ", ".join(dict.fromkeys(column for _, column in found))
        return SchemaRefused(
            f"Columns {columns} of {table.qualified} have values of one type, {found[0][0].name}, with dates and times "
            "in several forms, and an Avro schema defines a type only once.",
            "Give these columns the same form (option temporal), or publish the type as text (composites = text, "
            "ranges = text).",
        )
    return SchemaRefused(
        f"Two types in {table.qualified} both become the Avro name {schema['namespace']}.{schema['name']}.",
        "Rename one of the types, leave its column out (option exclude), or use another format.",
    )


def value_schema(table: SourceTable, record: names.Record | None = None) -> str:
    """The schema of a row: a record in which every field is nullable with default null, so that a registry accepts
    added and dropped columns. Fields that the settings require are not nullable.

    :param record: what it is called; None: by the table's name.
    :raises SchemaRefused: two columns, or two types, would get the same Avro name.
    """
    record = record or names.named(table.schema, table.name)
    fields: list[dict[str, Any]] = []
    for column in table.columns:
        kind = _kind(column, record)
        field: dict[str, Any] = {
            "name": names.mangle(column.field),
            "type": kind if column.required else ["null", kind],
        }
        if not column.required:
            field["default"] = None
        if column.comment:
            field["doc"] = column.comment
        fields.append(field)
    _distinct(table, fields)
    schema = {
        "type": "record",
        "name": record.name,
        "namespace": record.namespace,
        "fields": fields,
    }
    if table.comment:
        schema["doc"] = table.comment
    return json.dumps(_named_once(table, schema, {}), separators=(",", ":"), ensure_ascii=False)


def key_schema(table: SourceTable, record: names.Record | None = None) -> str:
    """The schema of a key: a record of the key columns in index order, with nothing but names and types, so that the
    bytes of a key (and with them the row's partition) never change without need.

    :param record: what the record of a row is called; None: by the table's name.
    """
    record = record or names.named(table.schema, table.name)
    columns = {column.name: column for column in table.columns}
    fields = [
        {
            "name": names.mangle(columns[name].field),
            "type": types.plain(_kind(columns[name], record, key=True)),
        }
        for name in table.key
    ]
    schema = {
        "type": "record",
        "name": record.key,
        "namespace": record.namespace,
        "fields": fields,
    }
    return json.dumps(_named_once(table, schema, {}), separators=(",", ":"), ensure_ascii=False)


#: the names that Debezium has for what Avro's logical types say
#: (https://debezium.io/documentation/reference/stable/connectors/postgresql.html#postgresql-temporal-types). Kafka
#: Connect knows date and decimal by themselves, and refuses them with another name
_CONNECT = {
    "time-micros": "io.debezium.time.MicroTime",
    "timestamp-micros": "io.debezium.time.MicroTimestamp",
    "local-timestamp-micros": "io.debezium.time.MicroTimestamp",
    "uuid": "io.debezium.data.Uuid",
}


def _kind(column: Column, record: names.Record, *, key: bool = False) -> Any:
    """The schema of a column's values; with the names that Kafka Connect takes for its own where there is an
    envelope.

    :param key: whether it is one of the key, where texts inside of a value have no names: with another schema, all
        keys would begin with another id.
    """
    kind = column.type.with_names(inside=not key) if record.envelope else column.type
    found = types.mapping(kind).avro(kind)
    return _for_connect(found) if record.envelope else found


def _for_connect(schema: Any) -> Any:
    if isinstance(schema, list):
        return [_for_connect(each) for each in schema]
    if not isinstance(schema, dict):
        return schema
    inside = {name: _for_connect(schema[name]) for name in ("type", "items", "values", "fields") if name in schema}
    if name := _CONNECT.get(schema.get("logicalType", "")):
        inside |= {"connect.version": 1, "connect.name": name}
    return {**schema, **inside}


def without_logical(schema: Any) -> Any:
    """The schema with plain types: fastavro then leaves values as they are on the wire."""
    if isinstance(schema, dict):
        return {k: without_logical(v) for k, v in schema.items() if k not in ("logicalType", "precision", "scale")}
    if isinstance(schema, list):
        return [without_logical(s) for s in schema]
    return schema
