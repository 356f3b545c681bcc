"""What schemas mean to readers: whether two of them say the same, and which values a reader with one takes for others,
without an error, where they were written with the other.

A registry compares Avro's types only. Logical types are no part of that comparison, although readers turn the same
bytes into other values by them (https://avro.apache.org/docs/1.12.0/specification/#schema-resolution, #logical-types).
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import fastavro
from fastavro.types import Schema

from airflow_bottledwater.encoding import json_schema, protobuf

#: writer's type → the other types that a reader may read it as (Schema Resolution in the specification)
_PROMOTED = {
    "int": {"long", "float", "double"},
    "long": {"float", "double"},
    "float": {"double"},
    "string": {"bytes"},
    "bytes": {"string"},
}
#: logical types whose value is what a reader without them has as well
_SAME_VALUE = {"uuid"}
#: what is read as another type with the same content: a text as its bytes in UTF-8
_AS_SAID = {("string", "bytes")}
#: what a schema has for people and for readers of other schemas, and which says nothing about the values written with
#: it
_ASIDE = {"doc", "default", "aliases", "order"}


class _Parsed(NamedTuple):
    """A schema with full names, and the definitions of its named types by these."""

    schema: Any
    named: dict[str, Any]


def _parse(text: str) -> _Parsed:
    """:raises ValueError: it is no Avro schema."""
    named: dict[str, Schema] = {}
    try:
        return _Parsed(fastavro.parse_schema(json.loads(text), named_schemas=named), named)
    except Exception as error:  # fastavro raises whatever the text leads to
        raise ValueError(f"not an Avro schema: {type(error).__name__}: {error}") from None


def same(one: str, other: str) -> bool:
    """Whether two schemas have the same names and types, logical ones too, so that records of one are those of the
    other. Comments and defaults do not matter, nor how a registry writes it."""
    try:
        return one == other or bool(_bare(_parse(one).schema) == _bare(_parse(other).schema))
    except ValueError:
        return False


def _bare(schema: Any) -> Any:
    if isinstance(schema, list):
        return [_bare(each) for each in schema]
    if not isinstance(schema, dict):
        return schema
    kept = {k: _bare(v) for k, v in schema.items() if k not in _ASIDE and not k.startswith("__")}
    return kept["type"] if kept.keys() == {"type"} else kept


def misread(written: str, read: str) -> list[str]:
    """The fields that a reader with one schema takes for other values, without an error, in records that were written
    with another one: each as a text that says what is read as what.

    Values that a reader refuses (a label that it does not know, a long that is to be an int) are not among them, nor is
    what Avro itself converts with the same meaning (an int read as a long).

    :param written: the schema that the records are written with.
    :param read: the reader's schema.
    """
    try:
        writer, reader = _parse(written), _parse(read)
    except ValueError:
        return []  # whoever reads it fails
    return list(_Comparison(writer.named, reader.named).fields(writer.schema, reader.schema, ""))


class _Comparison:
    def __init__(self, written: dict[str, Any], read: dict[str, Any]) -> None:
        self._written, self._read = written, read
        self._seen: set[tuple[str, str]] = set()

    def fields(self, writer: Any, reader: Any, path: str) -> Iterator[str]:
        if isinstance(writer, list):
            for each in writer:
                yield from self.fields(each, reader, path)
            return
        if isinstance(writer, str):
            writer = self._written.get(writer, writer)
        if isinstance(reader, list):
            reader = next((each for each in reader if self._resolves(writer, each)), None)
        if isinstance(reader, str):
            reader = self._read.get(reader, reader)
        if reader is None or not self._resolves(writer, reader):
            return  # an error for whoever reads it
        kind = _type(writer)
        if kind in ("record", "error"):
            yield from self._of_record(writer, reader, path)
        elif kind in ("array", "map"):
            inner = "items" if kind == "array" else "values"
            yield from self.fields(writer[inner], reader[inner], path)
        elif kind != "enum" and (said := (_value(writer), _value(reader))) not in _AS_SAID and said[0] != said[1]:
            yield f"{path or 'the value'} ({said[0]}) as {said[1]}"

    def _of_record(self, writer: Any, reader: Any, path: str) -> Iterator[str]:
        pair = (writer["name"], reader["name"])
        if pair in self._seen:
            return
        self._seen.add(pair)
        others = {field["name"]: field["type"] for field in reader["fields"]}
        for field in writer["fields"]:
            if (name := field["name"]) in others:
                yield from self.fields(field["type"], others[name], f"{path}.{name}" if path else name)

    def _resolves(self, writer: Any, reader: Any) -> bool:
        if isinstance(reader, str):
            reader = self._read.get(reader, reader)
        one, other = _type(writer), _type(reader)
        return one == other or other in _PROMOTED.get(one, ())


def _type(schema: Any) -> str:
    return str(schema["type"] if isinstance(schema, dict) else schema)


def _value(schema: Any) -> str:
    """What a reader takes a value for. A number is the same number in each type of numbers."""
    kind = _type(schema)
    logical = schema.get("logicalType", "") if isinstance(schema, dict) else ""
    if logical == "decimal":
        return f"decimal with {schema.get('scale', 0)} digits behind the point"
    if logical and logical not in _SAME_VALUE:
        return str(logical)
    return "a number" if kind in ("int", "long", "float", "double") else "bytes" if kind == "fixed" else kind


def _name(text: str) -> str:
    found = json.loads(text)
    if not isinstance(found, dict) or found.get("type") != "record":
        return ""
    name = str(found["name"])
    return name if "." in name else ".".join(filter(None, (found.get("namespace"), name)))


class Meaning(NamedTuple):
    """What the schemas of one type mean.

    :param same: whether a schema that a registry has (the first) is the one that is wanted.
    :param misread: see :func:`misread`.
    :param name: the full name of a schema's records; empty if it does not say.
    :param amended: a new schema with what it has to keep of the latest version of its subject (the second); None if
        that is nothing.
    """

    same: Callable[[str, str], bool]
    misread: Callable[[str, str], list[str]]
    name: Callable[[str], str]
    amended: Callable[[str, str], str] | None = None


#: by what a registry calls them (:class:`~airflow_bottledwater.pipeline.formats.Format`)
OF = {
    "AVRO": Meaning(same, misread, _name),
    "PROTOBUF": Meaning(protobuf.same, protobuf.misread, protobuf.full_name, protobuf.amended),
    "JSON": Meaning(json_schema.same, json_schema.misread, json_schema.title, json_schema.amended),
}
