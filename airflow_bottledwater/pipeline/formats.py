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
    :param as_json: which branch of the kernels encodes it: that of JSON, or that of Avro.
    :param offers: the settings of types that it alone offers; with any other format they have their defaults.
    """

    name: str
    title: str
    schema_type: str
    as_json: bool
    offers: frozenset[str]

    @property
    def uses_registry(self) -> bool:
        """Whether its records carry the ids of schemas that a schema registry has."""
        return bool(self.schema_type)


_OF_JSON = frozenset({"json_numeric", "json_documents", "json_geometries"})

AVRO = Format("avro", "Avro", "AVRO", as_json=False, offers=frozenset({"enums", "not_null", "temporal"}))
JSON = Format("json", "JSON", "", as_json=True, offers=_OF_JSON)
JSON_SCHEMA = Format("json-schema", "JSON Schema", "JSON", as_json=True, offers=_OF_JSON)

#: all formats by name
FORMATS = {each.name: each for each in (AVRO, JSON, JSON_SCHEMA)}
