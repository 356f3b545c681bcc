"""The partitions that records belong to where some columns of the key choose them (``partition_by``): their values are
taken out of the key as it is in the topic, and put together as the key that they would be alone. The kernels that
publish have no part in it."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence

import fastavro
import numpy as np
import numpy.typing as npt

from airflow_bottledwater import compiled as compiling
from airflow_bottledwater.compiled import callee, compiled, memcpy
from airflow_bottledwater.encoding import names, types
from airflow_bottledwater.encoding.envelope import Envelope
from airflow_bottledwater.encoding.protobuf import number
from airflow_bottledwater.encoding.wire import PROTOBUF_FRAME, SCHEMA_FRAME
from airflow_bottledwater.kafka import librdkafka as rd
from airflow_bottledwater.kafka.topic_reader import RecordBlock
from airflow_bottledwater.model.relation import SourceTable
from airflow_bottledwater.pipeline.formats import Format
from airflow_bottledwater.verify import records
from airflow_bottledwater.verify.messages import _PAYLOAD, _json_end, _member, _written, schema_ids
from airflow_bottledwater.verify.skip import Nodes, skipped, varint
from airflow_bottledwater.verify.values import Schemas

#: for each record of a block, the partition that it belongs to, of so many. A key that is none of the table's is taken
#: whole: it is unreadable wherever it is
Partitioner = Callable[[RecordBlock, int], npt.NDArray[np.int64]]


def partitioner(
    table: SourceTable, format: Format, schemas: Schemas | None, envelope: Envelope | None = None
) -> Partitioner:
    """That of a table's records.

    :param schemas: the registry's; None if the format needs none.
    :param envelope: what is around the rows; None for nothing.
    """
    fields = {column.name: column.field for column in table.columns}
    chosen = [fields[name] for name in table.partition_by]
    if not chosen:
        return records.partitions
    if format.as_json or schemas is None:
        return _ByMembers(chosen, SCHEMA_FRAME if format.uses_registry else 0, bool(envelope and envelope.with_schema))
    mangled = [names.mangle(each) for each in chosen]
    return _Tagged(mangled) if format.as_protobuf else _Fields(mangled, schemas)


def _room(block: RecordBlock) -> npt.NDArray[np.uint8]:
    """Room for any key of a block, and for what is made of it."""
    return np.zeros((2, 2 * int(block.messages["key_len"].max(initial=0)) + 64), dtype=np.uint8)


# ---------------------------------------------------------------------- JSON
@callee
def _copy(data, start, end, out, o):
    memcpy(out.ctypes.data + o, data.ctypes.data + start, np.int64(end - start))
    return o + end - start


@compiled
def _by_members(messages, heads, ends, frame, with_schema, room, count, out):
    """Replace the partitions of the records whose keys have all of some members.

    :param heads: the members' names, quoted and with their colons; ``ends`` says where each of them ends.
    """
    data, text = room[0], room[1]
    for i in range(messages.size):
        size = np.int64(messages[i].key_len)
        memcpy(data.ctypes.data, np.int64(messages[i].key), size)
        at = _member(data, np.int64(frame), size, _PAYLOAD) if with_schema else np.int64(frame)
        text[0] = ord("{")
        length, first = np.int64(1), 0
        for n in range(ends.size if at >= 0 else 0):
            value = _member(data, at, size, heads[first : ends[n]])
            end = _json_end(data, value, size) if value >= 0 else np.int64(-1)
            if end < 0:
                at = np.int64(-1)
                break
            if n > 0:
                text[length] = ord(",")
                length += 1
            length = _copy(data, value - (ends[n] - first), end, text, length)
            first = ends[n]
        if at >= 0:
            text[length] = ord("}")
            out[i] = rd.msg_partitioner_murmur2(0, text.ctypes.data, length + 1, np.int32(count), 0, 0)


class _ByMembers:
    """Of keys in JSON.

    :param frame: bytes in front of each key.
    """

    def __init__(self, chosen: Sequence[str], frame: int, with_schema: bool) -> None:
        found = [types.json_key(name) for name in chosen]
        self._heads = np.frombuffer(bytearray(b"".join(found)), dtype=np.uint8)
        self._ends = np.cumsum([len(each) for each in found], dtype=np.int64)
        self._frame, self._with_schema = frame, with_schema

    def __call__(self, block: RecordBlock, count: int) -> npt.NDArray[np.int64]:
        out, shape = records.partitions(block, count), (self._heads, self._ends, self._frame, self._with_schema)
        _by_members(block.messages, *shape, _room(block), count, out)
        return out


# ---------------------------------------------------------------------- Avro
@compiled
def _by_fields(messages, which, plan, places, room, count, out):
    """Replace the partitions of the records whose keys have schemas with all of some fields.

    :param which: the number of each record's schema; -1 for none.
    :param plan: for each schema, its first field and how many it has; for each field, its node, and which of the wanted
        fields it is (-1: none); nodes and children.
    :param places: room for where each wanted field begins and ends.
    """
    schemas, fields, nodes, children = plan
    data, text = room[0], room[1]
    for i in range(messages.size):
        if which[i] < 0:
            continue
        size = np.int64(messages[i].key_len)
        memcpy(data.ctypes.data, np.int64(messages[i].key), size)
        at = np.int64(SCHEMA_FRAME)
        for n in range(schemas[which[i], 0], schemas[which[i], 0] + schemas[which[i], 1]):
            begin = at
            at = skipped(nodes, children, fields[n, 0], data, at, size)
            if at < 0:
                break
            if fields[n, 1] >= 0:
                places[fields[n, 1], 0], places[fields[n, 1], 1] = begin, at
        if at == size:
            length = np.int64(0)
            for n in range(places.shape[0]):
                length = _copy(data, places[n, 0], places[n, 1], text, length)
            out[i] = rd.msg_partitioner_murmur2(0, text.ctypes.data, length, np.int32(count), 0, 0)


class _Fields:
    """Of keys in Avro.

    :param chosen: the names of fields.
    """

    def __init__(self, chosen: Sequence[str], schemas: Schemas) -> None:
        self._chosen, self._schemas, self._nodes = chosen, schemas, Nodes()
        self._numbers: dict[int, int] = {}
        self._found: list[tuple[int, int]] = []
        self._fields: list[tuple[int, int]] = []

    def _number(self, id: int) -> int:
        """The number of a schema; -1 if it is none of the table's keys."""
        if id not in self._numbers:
            schema = json.loads((self._schemas(id) if id >= 0 else None) or "null")
            fields = schema.get("fields", []) if isinstance(schema, dict) else []
            self._numbers[id] = -1
            if {*self._chosen} <= {each["name"] for each in fields}:
                self._numbers[id] = len(self._found)
                self._found.append((len(self._fields), len(fields)))
                self._nodes.begin()
                for each in fastavro.parse_schema(schema)["fields"]:  # in which names are full
                    place = self._chosen.index(each["name"]) if each["name"] in self._chosen else -1
                    self._fields.append((self._nodes.add(each["type"]), place))
        return self._numbers[id]

    def __call__(self, block: RecordBlock, count: int) -> npt.NDArray[np.int64]:
        out, which = records.partitions(block, count), np.zeros(len(block), dtype=np.int64)
        schema_ids(block.messages, True, np.zeros(SCHEMA_FRAME, dtype=np.uint8), which)
        found, places = np.unique(which, return_inverse=True)
        which = np.array([self._number(id) for id in found.tolist()], dtype=np.int64)[places]
        schemas, fields = (np.array(each or [(0, 0)], dtype=np.int64) for each in (self._found, self._fields))
        wanted = np.zeros((len(self._chosen), 2), dtype=np.int64)
        plan = schemas, fields, *self._nodes.arrays()
        _by_fields(block.messages, which, plan, wanted, _room(block), count, out)
        return out


# ---------------------------------------------------------------------- Protocol Buffers
@compiled
def _by_tags(messages, numbers, places, room, count, out):
    """Replace the partitions of the records whose keys have all fields with some numbers.

    :param places: room for where each of them begins and ends, with its tag.
    """
    data, text = room[0], room[1]
    for i in range(messages.size):
        size, at, found = np.int64(messages[i].key_len), np.int64(PROTOBUF_FRAME), 0
        memcpy(data.ctypes.data, np.int64(messages[i].key), size)
        places[:, 0] = -1
        while 0 <= at < size:
            begin = at
            tag, at = varint(data, at, size)
            if at >= 0:
                _, at, _ = _written(data, at, size, np.int64(tag))
            for n in range(numbers.size if at >= 0 else 0):
                if np.int64(tag) >> 3 == numbers[n]:
                    found += 1 if places[n, 0] < 0 else 0  # one of a damaged key may come several times
                    places[n, 0], places[n, 1] = begin, at
        if at == size and found == numbers.size:
            length = np.int64(0)
            for n in range(numbers.size):
                length = _copy(data, places[n, 0], places[n, 1], text, length)
            out[i] = rd.msg_partitioner_murmur2(0, text.ctypes.data, length, np.int32(count), 0, 0)


class _Tagged:
    """Of keys in Protocol Buffers.

    :param chosen: the names of fields.
    """

    def __init__(self, chosen: Sequence[str]) -> None:
        self._numbers = np.array([number(name) for name in chosen], dtype=np.int64)

    def __call__(self, block: RecordBlock, count: int) -> npt.NDArray[np.int64]:
        out, places = records.partitions(block, count), np.zeros((len(self._numbers), 2), dtype=np.int64)
        _by_tags(block.messages, self._numbers, places, _room(block), count, out)
        return out


def warm_up() -> None:
    """Compile it; see :func:`airflow_bottledwater.compiled.warm_up`."""
    compiling.warm_up("verified partitions", _choose_nothing)


def _choose_nothing() -> None:
    nothing = RecordBlock(np.zeros(0, dtype=rd.MESSAGE), np.zeros(0, dtype=np.int64))
    _ByMembers(["a"], 0, True)(nothing, 1)
    _Fields(["a"], lambda _: None)(nothing, 1)
    _Tagged(["a"])(nothing, 1)
