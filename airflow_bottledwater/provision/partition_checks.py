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
from airflow_bottledwater.encoding.protobuf import number, written_fields
from airflow_bottledwater.encoding.wire import MAGIC, PROTOBUF_FRAME, SCHEMA_FRAME
from airflow_bottledwater.kafka.offsets import RangeReader
from airflow_bottledwater.kafka.registry import Registry
from airflow_bottledwater.kafka.topics import Topic, Topics, partition_of
from airflow_bottledwater.model.relation import SourceTable
from airflow_bottledwater.pipeline.settings import Settings
from airflow_bottledwater.state.identity import choosers
from airflow_bottledwater.state.pipeline_state import PipelineState

#: records of each partition that are looked at, the last ones
_LOOKED_AT = 200
#: the share of them that may lie elsewhere: keys of before the table got another key, whose tombstones stay where they
#: were. Keys that other columns have spread over two partitions are half of them elsewhere, over more, most of them
_ELSEWHERE = 0.25
#: the part of a key that chooses its partition; None of a key that is not the table's
_Chosen = Callable[[bytes], bytes | None]


def misplaced(
    pipeline: Settings, known: PipelineState, data: Mapping[str, SourceTable], present: Mapping[str, Topic]
) -> list[str]:
    """A message for each topic whose last records lie in other partitions than the pipeline would put them into.

    :param known: the pipeline's state. Its own tables are left out: their options are compared with those that are
        recorded, and keys of before may stay where they are until they are swept.
    :param data: the tables by their topics' names.
    :param present: the topics that exist.
    :raises Outage: Kafka or the schema registry does not answer.
    """
    if pipeline.share_topics:
        return []  # other programs may choose as they like
    keyed = {name: table for name, table in data.items() if table.key and table.oid not in known.tables}
    topics = [present[name] for name in keyed if name in present]
    counts = {topic.name: topic.partitions for topic in topics if topic.partitions > 1 and topic.may_read}
    found = Topics(pipeline.kafka).all_ends(counts) if counts else {}
    used = {name: ends for name, ends in found.items() if any(ends)}
    if not used:
        return []
    problems, chosen_of = [], _choice(pipeline)
    with RangeReader(pipeline.kafka) as reader:
        for name, ends in used.items():
            table, right = keyed[name], _right(reader, name, ends, chosen_of(keyed[name]))
            looked_at, elsewhere = len(right), len(right) - sum(right)
            if elsewhere > _ELSEWHERE * looked_at:
                problems.append(
                    f"The partitions of the records of {table.qualified} would be chosen by "
                    f"{choosers(table.partition_by)} (partition_by of table_options), and of the last {looked_at} "
                    f"records in topic {name!r}, {elsewhere} are in other partitions: their keys would be in two. Set "
                    "partition_by as it was when these records were published; if the topic was given more partitions "
                    "since, or has other records, let it be a new one: another topic_prefix, or delete it."
                )
    return problems


def _right(reader: RangeReader, topic: str, ends: list[int], chosen: _Chosen) -> list[bool]:
    """For each of the last rows of a topic, whether it is in the partition in which it belongs."""
    right = []
    for message in reader.last(topic, ends, _LOOKED_AT):
        key = message.key()
        if key and message.value() is not None and (head := chosen(key)) is not None:
            right.append(message.partition() == partition_of(head, len(ends)))
    return right


def _choice(pipeline: Settings) -> Callable[[SourceTable], _Chosen]:
    """By table, what chooses the partitions of its keys."""
    format, envelope = pipeline.record_format, TableMapping.of(pipeline).envelope
    registry = Registry.of(pipeline)

    @cache
    def schema(number: int) -> Any:
        text = registry.schema(number) if registry is not None else None
        return None if text is None else fastavro.parse_schema(msgspec.json.decode(text))

    def chosen(table: SourceTable) -> _Chosen:
        fields = {column.name: column.field for column in table.columns}
        wanted = [fields[name] for name in table.partition_by]
        if not wanted:
            return lambda key: key
        if format.as_json:
            frame = SCHEMA_FRAME if format.uses_registry else 0
            return partial(_of_json, wanted, frame, bool(envelope and envelope.with_schema))
        mangled = [names.mangle(each) for each in wanted]
        if format.as_protobuf:
            return partial(_of_protobuf, [number(name) for name in mangled])
        return partial(_of_avro, mangled, schema)

    return chosen


def _of_json(wanted: list[str], frame: int, with_schema: bool, key: bytes) -> bytes | None:
    """The members of these names, as they are written."""
    try:
        found = msgspec.json.decode(key[frame:], type=dict[str, msgspec.Raw])
        members = msgspec.json.decode(found["payload"], type=dict[str, msgspec.Raw]) if with_schema else found
        return b"{" + b",".join(types.json_key(name) + bytes(members[name]) for name in wanted) + b"}"
    except (msgspec.DecodeError, KeyError):
        return None


def _of_avro(wanted: list[str], schema: Callable[[int], Any], key: bytes) -> bytes | None:
    """The fields of these names, written behind each other."""
    framed = len(key) > SCHEMA_FRAME and key[0] == MAGIC
    if not framed or (parsed := schema(int.from_bytes(key[1:SCHEMA_FRAME], "big"))) is None:
        return None
    found, out = fastavro.schemaless_reader(io.BytesIO(key[SCHEMA_FRAME:]), parsed, None), io.BytesIO()
    types_of = {each["name"]: each["type"] for each in parsed.get("fields", ())}
    if not isinstance(found, dict) or not {*wanted} <= types_of.keys():
        return None
    for name in wanted:
        fastavro.schemaless_writer(out, types_of[name], found[name])
    return out.getvalue()


def _of_protobuf(wanted: list[int], key: bytes) -> bytes | None:
    """The fields of these numbers, with their tags."""
    try:
        found = {each.number: each.raw for each in written_fields(key[PROTOBUF_FRAME:])}
        return b"".join(found[each] for each in wanted)
    except (ValueError, KeyError):
        return None
