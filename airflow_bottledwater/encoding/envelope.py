"""Debezium's envelope around a row: its schemas, for Kafka Connect and in Avro, and the bytes that all records of a
table have in common.

The fields, their order and their schemas are those that Debezium 3.6 itself makes (``Envelope.defineSchema`` in
io.debezium.data and ``PostgresSourceInfoStructMaker`` in io.debezium.connector.postgresql); a test compares them with
its classes.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from importlib.metadata import version
from typing import Any

from airflow_bottledwater.encoding import avro, names, types, wire
from airflow_bottledwater.model.relation import HASHED, ColumnType, SourceTable

_PACKAGE, _CONNECTOR = "airflow-provider-bottledwater", "postgresql"
_SOURCE = "io.debezium.connector.postgresql.Source"
#: the words of source.snapshot by wire.FROM_STREAM, FROM_SNAPSHOT, FROM_LIVE, and all that Debezium knows
_WORDS = ("false", "true", "incremental")
_ALLOWED = "true,first,first_in_data_collection,last_in_data_collection,last,false,incremental"
#: the fields of source with numbers and texts, in their order, and whether they may be null; ``snapshot`` is an enum
_SOURCE_FIELDS = (
    ("version", "string", False),
    ("connector", "string", False),
    ("name", "string", False),
    ("ts_ms", "int64", False),
    ("snapshot", "", True),
    ("db", "string", False),
    ("sequence", "string", True),
    ("ts_us", "int64", True),
    ("ts_ns", "int64", True),
    ("schema", "string", False),
    ("table", "string", False),
    ("txId", "int64", True),
    ("lsn", "int64", True),
    ("xmin", "int64", True),
    ("origin", "string", True),
    ("origin_lsn", "int64", True),
)
_TIMES = ("ts_ms", "ts_us", "ts_ns")
_BLOCK = (("id", "string"), ("total_order", "int64"), ("data_collection_order", "int64"))
#: the schemas in Kafka Connect of what JSON has for an opcode; of all others, a text
_CONNECT = {
    wire.OP_BOOL: "boolean",
    wire.OP_INT2: "int16",
    wire.OP_INT4: "int32",
    **dict.fromkeys((wire.OP_INT8, wire.OP_UINT32, wire.OP_UINT64), "int64"),
    wire.OP_FLOAT4: "float",
    **dict.fromkeys((wire.OP_FLOAT8, wire.OP_DOUBLE), "double"),
    wire.OP_BYTEA: "bytes",
}
_NAMED_BY_TYPE = {114: "io.debezium.data.Json", 3802: "io.debezium.data.Json", 142: "io.debezium.data.Xml"}


@dataclass(frozen=True, slots=True)
class Envelope:
    """What is around each row.

    :param server: what ``source.name`` says.
    :param with_schema: whether each key and value has its schema of Kafka Connect in front of it (in JSON).
    """

    server: str
    with_schema: bool = False


@dataclass(frozen=True, slots=True)
class Around:
    """The bytes around the rows and keys of a relation version.

    :param segments: in the order of :mod:`~airflow_bottledwater.encoding.kernels.envelope`.
    :param key_head: what is in front of a key; empty for nothing.
    """

    segments: tuple[bytes, ...]
    key_head: bytes = b""


def around_rows(envelope: Envelope, table: SourceTable, topic: str, database: str, *, as_json: bool) -> Around:
    """What is around a table's rows and keys.

    :param database: what ``source.db`` says.
    :param as_json: the format; otherwise Avro.
    """
    constants = {
        "version": version(_PACKAGE),
        "connector": _CONNECTOR,
        "name": envelope.server,
        "db": database,
        "schema": table.schema,
        "table": table.name,
    }
    if not as_json:
        return Around(tuple(_avro_segments(constants)))
    head = key_head = b""
    if envelope.with_schema:
        head, key_head = (
            b'{"schema":' + _dumped(schema) + b',"payload":'
            for schema in (connect_schema(table, topic), connect_key(table, topic))
        )
    segments = _json_segments(constants)
    return Around((head + segments[0], *segments[1:13], segments[13] + b"}" * bool(head), *segments[14:]), key_head)


def _dumped(value: Any) -> bytes:
    return json.dumps(value, separators=(",", ":"), ensure_ascii=False).encode()


def _json_segments(constants: Mapping[str, str]) -> list[bytes]:
    text = {name: json.dumps(value, ensure_ascii=False) for name, value in constants.items()}
    found = [
        '{"before":',
        ',"after":',
        f',"source":{{"version":{text["version"]},"connector":{text["connector"]},"name":{text["name"]},"ts_ms":',
        ',"snapshot":',
        f',"db":{text["db"]},"sequence":',
        ',"ts_us":',
        ',"ts_ns":',
        f',"schema":{text["schema"]},"table":{text["table"]},"txId":',
        ',"lsn":',
        ',"xmin":null,"origin":null,"origin_lsn":null},"op":"',
        '","ts_ms":',
        ',"ts_us":',
        ',"ts_ns":',
        ',"transaction":null}',
        *(f'"{word}"' for word in _WORDS),
    ]
    return [each.encode() for each in found]


def _avro_segments(constants: Mapping[str, str]) -> Iterator[bytes]:
    """Of unions with null, null is the first branch, but of ``snapshot``, whose default is a text."""
    text = {name: _avro_text(value) for name, value in constants.items()}
    null = b"\0"
    yield from (b"", b"", text["version"] + text["connector"] + text["name"], b"", text["db"], b"", b"")
    yield from (text["schema"] + text["table"], b"", 3 * null + b"\2", b"", b"", b"", null)
    yield from (b"\0" + _avro_text(word) for word in _WORDS)


def _avro_text(value: str) -> bytes:
    raw, found = value.encode(), bytearray()
    left = len(raw) << 1
    while left >= 128:
        found.append(left & 127 | 128)
        left >>= 7
    return bytes([*found, left]) + raw


# ---------------------------------------------------------------------- Avro
def envelope_schema(table: SourceTable, record: names.Record) -> str:
    """The schema of an envelope in Avro.

    :param record: what the record of a row is called in the topic.
    :raises SchemaRefused: see :func:`airflow_bottledwater.encoding.avro.value_schema`.
    """
    row = json.loads(avro.value_schema(table, record))
    block = {
        "type": "record",
        "name": "block",
        "namespace": "event",
        "fields": [{"name": name, "type": _AVRO[kind]} for name, kind in _BLOCK],
        "connect.version": 1,
        "connect.name": "event.block",
    }
    fields = [
        _nullable("before", row),
        _nullable("after", f"{record.namespace}.{record.name}"),
        {"name": "source", "type": _avro_source()},
        {"name": "op", "type": "string"},
        *(_nullable(name, "long") for name in _TIMES),
        _nullable("transaction", block),
    ]
    made = {
        "type": "record",
        "name": record.envelope,
        "namespace": record.namespace,
        "fields": fields,
        "connect.version": 2,
        "connect.name": f"{record.namespace}.{record.envelope}",
    }
    return json.dumps(made, separators=(",", ":"), ensure_ascii=False)


_AVRO = {"string": "string", "int64": "long"}


def _nullable(name: str, schema: Any) -> dict[str, Any]:
    return {"name": name, "type": ["null", schema], "default": None}


def _avro_source() -> dict[str, Any]:
    enum = {
        "type": "string",
        "connect.version": 1,
        "connect.parameters": {"allowed": _ALLOWED},
        "connect.default": _WORDS[0],
        "connect.name": "io.debezium.data.Enum",
    }
    fields: list[dict[str, Any]] = []
    for name, kind, optional in _SOURCE_FIELDS:
        if not kind:
            fields.append({"name": name, "type": [enum, "null"], "default": _WORDS[0]})
        else:
            fields.append(_nullable(name, _AVRO[kind]) if optional else {"name": name, "type": _AVRO[kind]})
    namespace, _, name = _SOURCE.rpartition(".")
    made = {"type": "record", "name": name, "namespace": namespace, "fields": fields}
    return {**made, "connect.version": 1, "connect.name": _SOURCE}


# ---------------------------------------------------------------------- Kafka Connect
def connect_schema(table: SourceTable, topic: str) -> dict[str, Any]:
    """The schema of an envelope in JSON, as Kafka Connect's JsonConverter has it."""
    columns = [_field(column.field, _connect(column.type), optional=True) for column in table.columns]
    row = {"type": "struct", "fields": columns, "optional": True, "name": f"{topic}.Value"}
    enum = {"type": "string", "optional": True, "name": "io.debezium.data.Enum", "version": 1}
    source = [
        _field(name, {"type": kind}, optional=optional)
        if kind
        else {**enum, "parameters": {"allowed": _ALLOWED}, "default": _WORDS[0], "field": name}
        for name, kind, optional in _SOURCE_FIELDS
    ]
    block = [_field(name, {"type": kind}, optional=False) for name, kind in _BLOCK]
    fields = [
        {**row, "field": "before"},
        {**row, "field": "after"},
        {"type": "struct", "fields": source, "optional": False, "name": _SOURCE, "version": 1, "field": "source"},
        _field("op", {"type": "string"}, optional=False),
        *(_field(name, {"type": "int64"}, optional=True) for name in _TIMES),
        {"type": "struct", "fields": block, "optional": True, "name": "event.block", "version": 1,
         "field": "transaction"},
    ]  # fmt: skip
    return {"type": "struct", "fields": fields, "optional": False, "name": f"{topic}.Envelope", "version": 2}


def connect_key(table: SourceTable, topic: str) -> dict[str, Any]:
    """The schema of a key in JSON."""
    columns = {column.name: column for column in table.columns}
    fields = [_field(columns[name].field, _connect(columns[name].type), optional=False) for name in table.key]
    return {"type": "struct", "fields": fields, "optional": False, "name": f"{topic}.Key"}


def _field(name: str, schema: Mapping[str, Any], *, optional: bool) -> dict[str, Any]:
    return {**schema, "optional": optional, "field": name}


def _connect(column: ColumnType) -> dict[str, Any]:
    """What JSON has for a value of this type. The settings allow no form that has no schema
    (``Settings._check_envelope``)."""
    mapping = types.mapping(column)
    opcode = mapping.opcode
    parts = [(part.name.decode()[:-1], part) for part in mapping.parts if part.type is not None]
    if opcode == wire.OP_ARRAY:
        found = _optional(parts[0][1])
        for _ in range(column.dimensions - 1):
            found = {"type": "array", "items": found, "optional": False}
        return {"type": "array", "items": found}
    if opcode == wire.OP_MULTIRANGE:
        return {"type": "array", "items": {**_optional(parts[0][1]), "optional": False}}
    if opcode in (wire.OP_RECORD, wire.OP_RANGE):
        fields = [{**_optional(part), "field": json.loads(name)} for name, part in parts]
        flags = ("lower_inclusive", "upper_inclusive", "empty") if opcode == wire.OP_RANGE else ()
        fields += [_field(name, {"type": "boolean"}, optional=False) for name in flags]
        return {"type": "struct", "fields": fields}
    if opcode == wire.OP_MAP:
        text = {"type": "string", "optional": True}
        return {"type": "map", "keys": {**text, "optional": False}, "values": text}
    if opcode == wire.OP_FLOATS:
        return {"type": "array", "items": {"type": "float", "optional": False}}
    name = types.NAMED_TEXTS.get(opcode)
    if opcode in (wire.OP_TEXT, wire.OP_JSONB) and column.form != HASHED:
        name = _NAMED_BY_TYPE.get(column.base_oid)
    kind = _CONNECT.get(opcode, "string")
    return {"type": kind, "name": name, "version": 1} if name else {"type": kind}


def _optional(part: types.Part) -> dict[str, Any]:
    assert part.type is not None
    return {**_connect(part.type), "optional": True}
