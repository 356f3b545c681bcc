"""Google's own messages for the schemas of the format ``protobuf``, filled with what rows must be."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from confluent_kafka.schema_registry import SchemaRegistryClient
from google.protobuf import descriptor_pb2, descriptor_pool, message_factory
from google.protobuf.message import Message

from airflow_bottledwater.encoding.protobuf import ProtobufMessage, parse

_TYPES = {"bool": 8, "int64": 3, "uint64": 4, "float": 2, "double": 1, "bytes": 12, "string": 9}


def message_class(text: str) -> type[Message]:
    """The class of a schema's messages."""
    schema = parse(text)
    file = descriptor_pb2.FileDescriptorProto(name="t.proto", package=schema.package, syntax="proto3")
    _declare(file.message_type.add(), schema.name, schema.message, f".{schema.package}.{schema.name}")
    pool = descriptor_pool.DescriptorPool()
    pool.Add(file)
    found: type[Message] = message_factory.GetMessageClass(
        pool.FindMessageTypeByName(f"{schema.package}.{schema.name}")
    )
    return found


def _declare(made: Any, name: str, message: ProtobufMessage, path: str) -> None:
    made.name = name
    for number, each in message.fields.items():
        one = made.field.add(name=each.name, number=number, label=3 if each.label == "repeated" else 1)
        if each.type in message.messages:
            one.type, one.type_name = 11, f"{path}.{each.type}"
        else:
            one.type = _TYPES[each.type]
        if each.label == "optional":
            one.proto3_optional, one.oneof_index = True, len(made.oneof_decl)
            made.oneof_decl.add(name=f"_{each.name}")
    for inner, its in message.messages.items():
        _declare(made.nested_type.add(), inner, its, f"{path}.{inner}")


class ProtobufMessages:
    """The messages of a registry's schemas by id, as Confluent frames them."""

    def __init__(self, registry: Mapping[str, str]) -> None:
        self._client = SchemaRegistryClient(dict(registry))
        self._known: dict[int, type[Message]] = {}

    def decode(self, data: bytes) -> dict[str, Any]:
        """A framed record of values without parts: None for what is not there."""
        schema_id = int.from_bytes(data[1:5], "big")
        # the index of the first message
        assert (data[0], data[5]) == (0, 0)
        if schema_id not in self._known:
            self._known[schema_id] = message_class(self._client.get_schema(schema_id).schema_str or "")
        found: Any = self._known[schema_id].FromString(data[6:])
        return {
            each.name: getattr(found, each.name) if not each.has_presence or found.HasField(each.name) else None
            for each in found.DESCRIPTOR.fields
        }


def fill(message: Any, values: dict[str, Any]) -> Any:
    """Set fields to the values that a consumer must find (:func:`~.expected.protobuf_native`); None for none."""
    for name, value in values.items():
        if value is not None:
            _set(message, message.DESCRIPTOR.fields_by_name[name], value)
    return message


def _set(message: Any, field: Any, value: Any) -> None:
    if field.message_type is None:
        setattr(message, field.name, value)
        return
    inside = getattr(message, field.name)
    inside.SetInParent()
    kind = field.message_type.name
    if kind.endswith("__array"):
        if "sizes" in field.message_type.fields_by_name and value:
            depth = value
            while isinstance(depth, list):
                inside.sizes.append(len(depth))
                depth = depth[0]
            for _ in inside.sizes[1:]:
                value = [each for inner in value for each in inner]
        for each in value:
            fill(inside.items.add(), {"value": each})
    elif kind.endswith("__pairs"):
        for key, each in value.items():
            fill(inside.pairs.add(), {"key": key, "value": each})
    elif kind.endswith("__floats"):
        inside.items.extend(value)
    elif kind.endswith("__ranges"):
        for each in value:
            one = inside.ranges.add()
            if isinstance(each, dict):
                fill(one, each)
    else:
        fill(inside, value)
