"""The formats of records: what the other rooms must know of each, so that none of them compares its name."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Format:
    """A format of records.

    :param name: the value of the setting ``format``.
    :param title: its name in messages.
    :param schema_type: what a schema registry calls its schemas (``schemaType`` in Confluent's API), whose ids its
        records carry; empty if it needs no registry.
    :param as_json: whether the kernels' branch of JSON encodes it.
    :param offers: the settings of types that it alone offers; with any other format they have their defaults.
    :param as_protobuf: whether that of Protocol Buffers does; with neither, that of Avro.
    """

    name: str
    title: str
    schema_type: str
    as_json: bool
    offers: frozenset[str]
    as_protobuf: bool = False

    @property
    def uses_registry(self) -> bool:
        """Whether its records carry the ids of schemas that a schema registry has."""
        return bool(self.schema_type)

    @property
    def holds_all(self) -> bool:
        """Whether it has a form for each value of a type without parts: dates, times and exact numbers are texts."""
        return self.as_json or self.as_protobuf


_OF_JSON = frozenset({"json_numeric", "json_documents", "json_geometries"})

AVRO = Format("avro", "Avro", "AVRO", as_json=False, offers=frozenset({"enums", "not_null", "temporal"}))
JSON = Format("json", "JSON", "", as_json=True, offers=_OF_JSON)
JSON_SCHEMA = Format("json-schema", "JSON Schema", "JSON", as_json=True, offers=_OF_JSON)
PROTOBUF = Format("protobuf", "Protobuf", "PROTOBUF", as_json=False, offers=frozenset(), as_protobuf=True)

#: the formats that can have Debezium's envelope around their rows
ENVELOPED = (AVRO.name, JSON.name)

#: all formats by name
FORMATS = {each.name: each for each in (AVRO, JSON, JSON_SCHEMA, PROTOBUF)}
