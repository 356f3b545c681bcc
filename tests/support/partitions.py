"""In which partition a record must be: the readable twin of what the kernels and the verification compute."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from airflow_bottledwater.encoding.protobuf import number, varint
from airflow_bottledwater.kafka.topics import Topics
from tests.support.options import Readable, options_of
from tests.support.topics import Flow, Message


def murmur2(data: bytes) -> int:
    """The hash of Kafka's Java clients, without its sign."""
    m, h = 0x5BD1E995, 0x9747B28C ^ len(data)
    whole = len(data) // 4 * 4
    for i in range(0, whole, 4):
        k = int.from_bytes(data[i : i + 4], "little") * m & 0xFFFFFFFF
        k = (k ^ (k >> 24)) * m & 0xFFFFFFFF
        h = (h * m & 0xFFFFFFFF) ^ k
    if rest := data[whole:]:
        h = (h ^ int.from_bytes(rest, "little")) * m & 0xFFFFFFFF
    h = (h ^ (h >> 13)) * m & 0xFFFFFFFF
    return (h ^ (h >> 15)) & 0x7FFFFFFF


def key_bytes(format: str, key: Mapping[str, Any], fields: Sequence[str]) -> bytes:
    """A key of these fields alone, without the id of a schema.

    :param key: has them, as a consumer reads them: integers and texts.
    :param fields: their names, in the order of ``partition_by``.
    """
    if format in ("json", "json-schema"):
        return json.dumps({name: key[name] for name in fields}, separators=(",", ":"), ensure_ascii=False).encode()
    made = b""
    for name in fields:
        value = key[name]
        if isinstance(value, str):
            size = len(value.encode())
            head = varint(number(name) << 3 | 2) + varint(size) if format == "protobuf" else varint(2 * size)
            made += head + value.encode()
        elif format == "protobuf":
            made += varint(number(name) << 3) + varint(value % 2**64)
        else:
            made += varint(2 * value if value >= 0 else -2 * value - 1)
    return made


def check_partitions(flow: Flow, table: str, found: Sequence[Message]) -> int:
    """Check that each record of a table is in the partition that the columns of its option choose, whose values are
    integers or texts; returns how many there are, 0 for a table without the option.

    :param found: as they are published, but for an envelope.
    """
    if not (chosen := options_of(flow, table).partition_by):
        return 0
    readable, topic = Readable.of(flow, table, {}), flow.topic(table)
    fields = [readable.name(column) for column in chosen]
    count = Topics(flow.pipeline.kafka).describe([topic])[topic].partitions
    for message in found:
        right = murmur2(key_bytes(flow.pipeline.format, message.key, fields)) % count
        assert message.partition == right, f"{message} belongs in partition {right} of {count} by {', '.join(fields)}"
    return len(found)
