"""Preflight's check that the records which a table's topic already holds are in the partitions that the pipeline would
choose for them. They may be those of an earlier pipeline, whose slot was dropped, and whose partitions were chosen by
other columns: a key would then be in two partitions, between which there is no order for consumers, and a tombstone
would not be behind the row that it deletes.
"""

from __future__ import annotations

import io
from collections.abc import Callable, Mapping
from functools import cache, partial
from typing import Any

import fastavro
import msgspec

from airflow_bottledwater.encoding import names, types
from airflow_bottledwater.encoding.mapping import TableMapping
from airflow_bottledwater.encoding.protobuf import FIXED32, FIXED64, LENGTH, VARINT, number
from airflow_bottledwater.kafka.offsets import RangeReader
from airflow_bottledwater.kafka.registry import Registry
from airflow_bottledwater.kafka.topics import Topic, Topics, partition_of
from airflow_bottledwater.model.relation import SourceTable
from airflow_bottledwater.pipeline.settings import Settings
from airflow_bottledwater.state.identity import choosers

#: records of each partition that are looked at, the last ones
_LOOKED_AT = 200
#: the share of them that may lie elsewhere: keys of before the table got another key, whose tombstones stay where they
#: were. Keys that other columns have spread over two partitions are half of them elsewhere, over more, most of them
_ELSEWHERE = 0.25
#: bytes in front of a key: a zero byte and the id of its schema (Confluent's wire format), and with Protocol Buffers,
#: one more for the place of the message in its file
_ID, _FRAME = 5, 6

#: the part of a key that chooses its partition; None of a key that is not the table's
_Chosen = Callable[[bytes], bytes | None]


def misplaced(pipeline: Settings, data: Mapping[str, SourceTable], present: Mapping[str, Topic]) -> list[str]:
    """A message for each topic whose last records lie in other partitions than the pipeline would put them into.

    :param data: the tables that are not published yet, by their topics' names.
    :param present: the topics that exist.
    :raises Outage: Kafka or the schema registry does not answer.
    """
    if pipeline.share_topics:
        return []  # other programs may choose as they like
    counts = {name: present[name].partitions for name, table in data.items() if name in present and table.key}
    counts = {name: count for name, count in counts.items() if count > 1 and present[name].may_read}
    ends = Topics(pipeline.kafka).all_ends(counts) if counts else {}
    problems = []
    for name in (name for name in counts if any(ends[name])):
        table, right = data[name], _right(pipeline, data[name], name, ends[name])
        looked_at, elsewhere = len(right), len(right) - sum(right)
        if elsewhere > _ELSEWHERE * looked_at:
            problems.append(
                f"The partitions of the records of {table.qualified} would be chosen by {choosers(table.partition_by)} "
                f"(partition_by of table_options), and of the last {looked_at} records in topic {name!r}, {elsewhere} "
                "are in other partitions: their keys would be in two. Set partition_by as it was when these records "
                "were published; if the topic was given more partitions since, or has other records, let it be a new "
                "one: another topic_prefix, or delete it."
            )
    return problems


def _right(pipeline: Settings, table: SourceTable, topic: str, ends: list[int]) -> list[bool]:
    """For each of the last rows of a topic, whether it is in the partition in which it belongs."""
    chosen, right = _chosen(pipeline, table), []
    with RangeReader(pipeline.kafka) as reader:
        for message in reader.last(topic, ends, _LOOKED_AT):
            key = message.key()
            if key and message.value() is not None and (head := chosen(key)) is not None:
                right.append(message.partition() == partition_of(head, len(ends)))
    return right


def _chosen(pipeline: Settings, table: SourceTable) -> _Chosen:
    """What chooses the partitions of a table's keys."""
    fields = {column.name: column.field for column in table.columns}
    wanted = [fields[name] for name in table.partition_by]
    format, envelope = pipeline.record_format, TableMapping.of(pipeline).envelope
    if not wanted:
        return lambda key: key
    if format.as_json:
        return partial(_of_json, wanted, _ID if format.uses_registry else 0, bool(envelope and envelope.with_schema))
    mangled = [names.mangle(each) for each in wanted]
    if format.as_protobuf:
        return partial(_of_protobuf, [number(name) for name in mangled])
    registry = Registry(pipeline.registry, format.schema_type)
    return partial(_of_avro, mangled, cache(registry.schema))


def _of_json(wanted: list[str], frame: int, with_schema: bool, key: bytes) -> bytes | None:
    """The members of these names, as they are written."""
    try:
        found = msgspec.json.decode(key[frame:], type=dict[str, msgspec.Raw])
        members = msgspec.json.decode(found["payload"], type=dict[str, msgspec.Raw]) if with_schema else found
        return b"{" + b",".join(types.json_key(name) + bytes(members[name]) for name in wanted) + b"}"
    except (msgspec.DecodeError, KeyError):
        return None


def _of_avro(wanted: list[str], schema: Callable[[int], str | None], key: bytes) -> bytes | None:
    """The fields of these names, written behind each other."""
    text = schema(int.from_bytes(key[1:_ID], "big")) if len(key) > _ID and not key[0] else None
    if text is None:
        return None
    parsed: Any = fastavro.parse_schema(msgspec.json.decode(text))
    found, out = fastavro.schemaless_reader(io.BytesIO(key[_ID:]), parsed, None), io.BytesIO()
    types_of = {each["name"]: each["type"] for each in parsed.get("fields", ())}
    if not isinstance(found, dict) or not {*wanted} <= types_of.keys():
        return None
    for name in wanted:
        fastavro.schemaless_writer(out, types_of[name], found[name])
    return out.getvalue()


def _of_protobuf(wanted: list[int], key: bytes) -> bytes | None:
    """The fields of these numbers, with their tags."""
    fields, at = dict[int, bytes](), _FRAME
    try:
        while at < len(key):
            begin = at
            tag, at = _varint(key, at)
            if tag & 7 == LENGTH:
                size, at = _varint(key, at)
                at += size
            elif tag & 7 == VARINT:
                _, at = _varint(key, at)
            else:
                at += {FIXED64: 8, FIXED32: 4}[tag & 7]
            fields[tag >> 3] = key[begin:at]
        return b"".join(fields[each] for each in wanted)
    except (IndexError, KeyError):
        return None


def _varint(data: bytes, at: int) -> tuple[int, int]:
    """A number of seven bits in a byte, and where it ends."""
    value = shift = 0
    while True:
        value |= (data[at] & 127) << shift
        at, shift = at + 1, shift + 7
        if data[at - 1] < 128:
            return value, at
