"""Decodes records in Protocol Buffers' encoding as a consumer does, by the schema whose id they have: values as
:func:`airflow_bottledwater.verify.expected.protobuf_native` makes them."""

from __future__ import annotations

import struct
from typing import Any

from airflow_bottledwater.encoding.protobuf import (
    FIXED32,
    LENGTH,
    ProtobufField,
    ProtobufMessage,
    read_varint,
    written_fields,
)

#: what an optional or repeated field is without a value
_ABSENT: dict[str, Any] = {"": False, "optional": None}


def decode(message: ProtobufMessage, data: bytes) -> dict[str, Any]:
    """A message's values by the names of its fields; None for an optional field without one.

    :raises ValueError: the bytes are none of this message.
    """
    found = {each.name: _ABSENT.get(each.label, []) for each in message.fields.values()}
    for number, written, value, _ in written_fields(data):
        if (of := message.fields.get(number)) is None:
            raise ValueError(f"it has a field {number}, which its schema does not have")
        if of.label == "repeated":
            found[of.name] = [*found[of.name], *_repeated(message, of, written, value)]
        else:
            found[of.name] = _one(message, of, written, value)
    return found


def _repeated(message: ProtobufMessage, of: ProtobufField, written: int, value: Any) -> list[Any]:
    """One value, or several in one (https://protobuf.dev/programming-guides/encoding/#packed)."""
    if of.written == LENGTH or written != LENGTH:
        return [_one(message, of, written, value)]
    if of.written == FIXED32:
        return list(struct.unpack(f"<{len(value) // 4}f", value))
    found, at = [], 0
    while at < len(value):
        one, at = read_varint(value, at)
        found.append(one)
    return found


def _one(message: ProtobufMessage, of: ProtobufField, written: int, value: Any) -> Any:
    if written != of.written:
        raise ValueError(f"field {of.name} is written in another way than its type {of.type}")
    if of.type in message.messages:
        return _made_of(of.type, decode(message.messages[of.type], value))
    if of.type == "string":
        return value.decode()
    if of.type == "int64":
        return value - (1 << 64) if value >> 63 else value
    if of.type in ("float", "double"):
        return struct.unpack("<f" if of.type == "float" else "<d", value)[0]
    return bool(value) if of.type == "bool" else value


def _made_of(type: str, found: dict[str, Any]) -> Any:
    """What a message stands for, by its type (:mod:`airflow_bottledwater.encoding.protobuf`)."""
    if type.endswith("__array"):
        items = [each["value"] for each in found["items"]]
        for size in reversed(found.get("sizes", [])[1:]):
            items = [items[at : at + size] for at in range(0, len(items), size)]
        return items
    if type.endswith("__pairs"):
        return {each["key"]: each["value"] for each in found["pairs"]}
    return found["items"] if type.endswith("__floats") else found["ranges"] if type.endswith("__ranges") else found
