"""Protocol Buffers schemas (proto3) of keys and rows: their text, the numbers of their fields, and what they mean to
readers.

A field's number is made from its name: it stays the same whatever columns come and go, in whichever order, also when a
table is made again, or restored on another server, and nothing has to be remembered for it. As in the other formats, a
column that gets another name is another field.
"""

from __future__ import annotations

import re
import zlib
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

from airflow_bottledwater.encoding import names, types, wire
from airflow_bottledwater.errors import SchemaRefused
from airflow_bottledwater.model.relation import ColumnType, SourceTable

#: the numbers that names are spread over: above 19000 to 19999, which Protocol Buffers keep for themselves
#: (https://protobuf.dev/programming-guides/proto3/#assigning), and such that a tag has four bytes at most
_LOWEST, _NUMBERS = 20_000, (1 << 25) - 20_000

#: how a value is written (https://protobuf.dev/programming-guides/encoding/#structure)
VARINT, FIXED64, LENGTH, FIXED32 = 0, 1, 2, 5
#: by opcode; what is not here is a string, or a message
_SINGLE: dict[int, str] = {
    wire.OP_BOOL: "bool",
    # one type for all integers: one that a column is made larger by is no change
    **dict.fromkeys((wire.OP_INT2, wire.OP_INT4, wire.OP_INT8, wire.OP_UINT32), "int64"),
    wire.OP_UINT64: "uint64",
    wire.OP_FLOAT4: "float",
    **dict.fromkeys((wire.OP_FLOAT8, wire.OP_DOUBLE), "double"),
    **dict.fromkeys((wire.OP_BYTEA, wire.OP_HEX), "bytes"),
}
_WRITTEN = {"bool": VARINT, "int64": VARINT, "uint64": VARINT, "float": FIXED32, "double": FIXED64}


@dataclass(frozen=True, slots=True)
class ProtobufField:
    """A field of a message.

    :param label: ``optional``, ``repeated``, or nothing for one that is left out where it is false.
    :param type: a scalar type, or the name of a message inside of the field's own.
    """

    name: str
    type: str
    label: str = "optional"

    @property
    def written(self) -> int:
        """How its values are written."""
        return _WRITTEN.get(self.type, LENGTH)


@dataclass(frozen=True, slots=True)
class ProtobufMessage:
    """A message: its fields by their numbers, and the messages that are declared inside of it."""

    fields: Mapping[int, ProtobufField] = field(default_factory=dict)
    messages: Mapping[str, ProtobufMessage] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class ProtobufSchema:
    """A file with one message."""

    package: str
    name: str
    message: ProtobufMessage


# ---------------------------------------------------------------------- what tables become
def number(name: str) -> int:
    """The number of the field with a name."""
    return _LOWEST + zlib.crc32(name.encode()) % _NUMBERS


def varint(value: int) -> bytes:
    """A number, seven bits in a byte."""
    found = bytearray()
    while value > 127:
        found.append(value & 127 | 128)
        value >>= 7
    return bytes([*found, value])


def read_varint(data: bytes, at: int) -> tuple[int, int]:
    """A number of :func:`varint`, and where it ends.

    :raises ValueError: the bytes end inside of it, or it has more than 64 bits.
    """
    found = shift = 0
    while at < len(data) and shift < 70:
        found |= (data[at] & 127) << shift
        at += 1
        if data[at - 1] < 128:
            return found & (1 << 64) - 1, at
        shift += 7
    raise ValueError("it ends inside of a number")


class WrittenField(NamedTuple):
    """A field as it is written.

    :param written: how: one of :data:`VARINT`, :data:`FIXED64`, :data:`LENGTH` and :data:`FIXED32`.
    :param value: a number, or bytes.
    :param raw: all of its bytes, with its tag.
    """

    number: int
    written: int
    value: Any
    raw: bytes


def written_fields(data: bytes) -> Iterator[WrittenField]:
    """The fields of a message.

    :raises ValueError: the bytes are no message.
    """
    at = 0
    while at < len(data):
        begin = at
        head, at = read_varint(data, at)
        written, size = head & 7, 0
        if written == VARINT:
            value, at = read_varint(data, at)
            yield WrittenField(head >> 3, written, value, data[begin:at])
            continue
        if written == LENGTH:
            size, at = read_varint(data, at)
        elif written in (FIXED32, FIXED64):
            size = 4 if written == FIXED32 else 8
        else:
            raise ValueError(f"a field is written in a way that there is not ({written})")
        if at + size > len(data):
            raise ValueError("it ends inside of a value")
        yield WrittenField(head >> 3, written, data[at : at + size], data[begin : at + size])
        at += size


def _kind(opcode: int) -> str:
    return _SINGLE.get(opcode, "string")


def tag(number: int, opcode: int) -> bytes:
    """What is written before a value."""
    return varint(number << 3 | _WRITTEN.get(_kind(opcode), LENGTH))


def column_tag(name: str, opcode: int) -> bytes:
    """What is written before the value of a column, or of an attribute.

    :param name: under which it is published.
    """
    return tag(number(names.mangle(name)), opcode)


def part_tags(column: ColumnType, mapping: types.TypeMapping) -> list[bytes]:
    """What is written before the parts of a value: an array's element, a composite's attributes, a range's bounds."""
    if mapping.opcode == wire.OP_RECORD:
        return [
            column_tag(attribute.name, part.mapping.opcode)
            for attribute, part in zip(column.attributes, mapping.parts, strict=True)
            if part.mapping is not None
        ]
    return [tag(i, part.mapping.opcode) if part.mapping else b"" for i, part in enumerate(mapping.parts, 1)]


_ITEM, _STRING = ProtobufField("items", "item", "repeated"), ProtobufField("value", "string")
_SIZES = ProtobufField("sizes", "int64", "repeated")
_PAIR = ProtobufMessage({1: ProtobufField("key", "string"), 2: _STRING})
_FLAGS = {
    n: ProtobufField(name, "bool", "") for n, name in enumerate(("lower_inclusive", "upper_inclusive", "empty"), 3)
}


def _several(table: SourceTable, columns: list[tuple[str, ColumnType]]) -> ProtobufMessage:
    """The message with a field for each column or attribute."""
    fields: dict[int, ProtobufField] = {}
    messages: dict[str, ProtobufMessage] = {}
    for name, kind in columns:
        made, inside = _field(table, names.mangle(name), kind)
        if (n := number(made.name)) in fields:
            raise SchemaRefused(
                f"Two columns or attributes in {table.qualified} become the same Protobuf field ({fields[n].name}, "
                f"{made.name}: number {n}).",
                "Publish one of them under another name (option rename), leave it out, or use another format.",
            )
        fields[n] = made
        if inside is not None:
            messages[made.type] = inside
    if taken := _alike(ProtobufMessage(fields, messages)):
        raise SchemaRefused(
            f"Two names in {table.qualified} become one in Protobuf: {', '.join(taken)}.",
            "Publish one of them under another name (option rename), leave it out, or use another format.",
        )
    return ProtobufMessage(fields, messages)


def _alike(message: ProtobufMessage) -> list[str]:
    """The fields, also inside of values, whose names are one with another name of their message: compilers refuse it.
    Names that differ only by their case and by underscores are one in JSON."""
    shown = Counter(re.sub("_+", "", each.name).lower() for each in message.fields.values())
    alike = [each.name for each in message.fields.values() if shown[re.sub("_+", "", each.name).lower()] > 1]
    found = alike or sorted({each.name for each in message.fields.values()} & message.messages.keys())
    return found or next((taken for each in message.messages.values() if (taken := _alike(each))), [])


def _field(table: SourceTable, name: str, column: ColumnType) -> tuple[ProtobufField, ProtobufMessage | None]:
    """A column's field, and the message that its values are."""
    mapping = types.mapping(column)
    opcode = mapping.opcode
    if opcode == wire.OP_FLOATS:
        return ProtobufField(name, f"{name}__floats"), ProtobufMessage({1: ProtobufField("items", "float", "repeated")})
    if opcode == wire.OP_MAP:
        return ProtobufField(name, f"{name}__pairs"), ProtobufMessage(
            {1: ProtobufField("pairs", "pair", "repeated")}, {"pair": _PAIR}
        )
    if opcode == wire.OP_RECORD:
        inside = _several(table, [(attribute.name, attribute.type) for attribute in column.attributes])
        return ProtobufField(name, f"{name}__record"), inside
    if opcode not in (wire.OP_ARRAY, wire.OP_RANGE, wire.OP_MULTIRANGE):
        return ProtobufField(name, _kind(opcode)), None
    assert column.element is not None
    bare = {wire.OP_ARRAY: "value", wire.OP_RANGE: "bound", wire.OP_MULTIRANGE: "range"}[opcode]
    part, its = _field(table, bare, column.element)
    inner = {part.type: its} if its is not None else {}
    if opcode == wire.OP_ARRAY:
        sizes = {2: _SIZES} if column.dimensions > 1 else {}
        return ProtobufField(name, f"{name}__array"), ProtobufMessage(
            {1: _ITEM, **sizes}, {"item": ProtobufMessage({1: part}, inner)}
        )
    if opcode == wire.OP_MULTIRANGE:
        return ProtobufField(name, f"{name}__ranges"), ProtobufMessage(
            {1: replace(part, name="ranges", label="repeated")}, inner
        )
    bounds = {1: replace(part, name="lower"), 2: replace(part, name="upper")}
    return ProtobufField(name, f"{name}__range"), ProtobufMessage({**bounds, **_FLAGS}, inner)


def value_schema(table: SourceTable, record: names.Record) -> str:
    """The schema of a row: a message in which every field is optional.

    :param record: what it is called.
    :raises SchemaRefused: two fields would have one name, or one number.
    """
    columns = [(column.field, column.type) for column in table.columns]
    return text(ProtobufSchema(record.namespace, record.name, _several(table, columns)))


def key_schema(table: SourceTable, record: names.Record) -> str:
    """The schema of a key: a message of the key columns, in index order.

    :param record: what the record of a row is called.
    """
    columns = {column.name: column for column in table.columns}
    fields = [(columns[name].field, columns[name].type) for name in table.key]
    return text(ProtobufSchema(record.namespace, f"{record.name}_key", _several(table, fields)))


# ---------------------------------------------------------------------- texts
def text(schema: ProtobufSchema) -> str:
    """A schema as text."""
    lines = [*_lines(schema.name, schema.message, "")]
    return "\n".join(['syntax = "proto3";', f"package {schema.package};", "", *lines, ""])


def _lines(name: str, message: ProtobufMessage, indent: str) -> Iterator[str]:
    yield f"{indent}message {name} {{"
    for n, each in message.fields.items():
        yield f"{indent}  {f'{each.label} ' if each.label else ''}{each.type} {each.name} = {n};"
    for inner, its in message.messages.items():
        yield from _lines(inner, its, f"{indent}  ")
    yield f"{indent}}}"


_TOKEN = re.compile(r"//[^\n]*|/\*.*?\*/|[\w.]+|\"[^\"]*\"|\S", re.DOTALL)


def parse(text: str) -> ProtobufSchema:
    """A schema of ours, in whichever way a registry writes it.

    :raises ValueError: it is another one.
    """
    tokens = [each for each in _TOKEN.findall(text) if not each.startswith(("//", "/*"))][::-1]
    package = ""
    try:
        while tokens:
            if (word := tokens.pop()) == "message":
                name = tokens.pop()
                return ProtobufSchema(package, name, _message(tokens))
            statement = _statement(tokens)
            if word == "package":
                package = statement[0]
    except IndexError:
        pass
    raise ValueError("not a schema of this package")


def _statement(tokens: list[str]) -> list[str]:
    """What comes up to the next semicolon."""
    found = []
    while (word := tokens.pop()) != ";":
        found.append(word)
    return found


def _message(tokens: list[str]) -> ProtobufMessage:
    fields: dict[int, ProtobufField] = {}
    messages: dict[str, ProtobufMessage] = {}
    if tokens.pop() != "{":
        raise ValueError("a message without fields")
    while (word := tokens.pop()) != "}":
        if word == "message" and tokens[-2] == "{":
            name = tokens.pop()
            messages[name] = _message(tokens)
            continue
        label = word if word in ("optional", "repeated") else ""
        kind = tokens.pop() if label else word
        name, equals, n, *_ = _statement(tokens)
        if equals != "=":
            raise ValueError(f"what {word} {name} says is not of this package")
        fields[int(n)] = ProtobufField(name, kind.rpartition(".")[2], label)
    return ProtobufMessage(fields, messages)


# ---------------------------------------------------------------------- what they mean
def _with_dropped(message: ProtobufMessage, before: ProtobufMessage) -> ProtobufMessage:
    """A message with the fields that only an earlier one has, also inside of values."""
    return ProtobufMessage(
        {**message.fields, **{n: each for n, each in before.fields.items() if n not in message.fields}},
        {
            **{
                name: _with_dropped(each, before.messages[name]) if name in before.messages else each
                for name, each in message.messages.items()
            },
            **{name: each for name, each in before.messages.items() if name not in message.messages},
        },
    )


def _taken(message: ProtobufMessage, before: ProtobufMessage) -> Iterator[str]:
    """The fields, also inside of values, whose numbers an earlier message has given to fields with other names."""
    for n, each in message.fields.items():
        if (its := before.fields.get(n)) is not None and its.name != each.name:
            yield f"{each.name} that of {its.name} ({n})"
    for name, inside in message.messages.items():
        if name in before.messages:
            yield from _taken(inside, before.messages[name])


def _parsed(text: str) -> ProtobufSchema | None:
    try:
        return parse(text)
    except ValueError:
        return None


def full_name(text: str) -> str:
    """The full name of a schema's records; empty if it is none of ours."""
    found = _parsed(text)
    return f"{found.package}.{found.name}" if found else ""


def same(known: str, wanted: str) -> bool:
    """Whether a schema that a registry has under an id is the one that is wanted there. It may have more fields: those
    of columns that were dropped."""
    one, other = _parsed(known), _parsed(wanted)
    if one is None or other is None:
        return False
    return replace(other, message=_with_dropped(other.message, one.message)) == one


def amended(schema: str, earlier: str) -> str:
    """A schema with the fields that only an earlier one of its subject has: many registries refuse one without them.

    :param earlier: the subject's latest version.
    :raises SchemaRefused: a field has the number of another one that the earlier schema has, or a name that is one with
        its name in Protobuf.
    """
    ours, before = parse(schema), _parsed(earlier)
    if before is None:
        return schema
    if taken := [*_taken(ours.message, before.message)]:
        raise SchemaRefused(
            f"Fields in {ours.package}.{ours.name} would have the numbers of others: {', '.join(taken)}. Its schema "
            "keeps the fields of columns that were dropped or renamed, and readers take the one for the other.",
            "Publish the column under its earlier name, or under one of its own (option rename), leave it out, or use "
            "another format.",
        )
    made = replace(ours, message=_with_dropped(ours.message, before.message))
    if (taken := _alike(made.message)) and not _alike(before.message):
        raise SchemaRefused(
            f"Two names in {ours.package}.{ours.name} become one in Protobuf: {', '.join(taken)}. Its schema keeps "
            "the fields of columns that were dropped or renamed.",
            "Publish the column under its earlier name, or under one of its own (option rename), leave it out, or use "
            "another format.",
        )
    return earlier if made == before else text(made)


def altered(known: str, today: str) -> set[str]:
    """The fields that a schema does not have as that of today has them; that of today may lack some."""
    one, other = parse(known).message, parse(today).message
    merged = _with_dropped(other, one)
    return {
        each.name
        for n, each in one.fields.items()
        if other.fields.get(n) != each or merged.messages.get(each.type) != one.messages.get(each.type)
    }


def misread(written: str, read: str) -> list[str]:
    """The fields that a reader with one schema takes for other values, without an error, in records that were written
    with another one, as :func:`airflow_bottledwater.encoding.meaning.misread` finds them for Avro: those that have
    another type there, or another name. A reader takes the one for the other, or passes over the value."""
    one, other = _parsed(written), _parsed(read)
    return [] if one is None or other is None else list(_misread(one.message, other.message, ""))


def _misread(writer: ProtobufMessage, reader: ProtobufMessage, path: str) -> Iterator[str]:
    for n, each in writer.fields.items():
        here = f"{path}.{each.name}" if path else each.name
        if (its := reader.fields.get(n)) is None:
            if each == _SIZES:  # its items are then taken for those of one dimension
                yield f"{path} (an array of more dimensions) as an array of one"
            continue
        if each.name != its.name:
            yield f"{here} as {its.name}, which has its number"
        elif (each.type, each.label) != (its.type, its.label):
            yield f"{here} ({each.type}) as {its.type}"
        elif each.type in writer.messages and its.type in reader.messages:
            yield from _misread(writer.messages[each.type], reader.messages[its.type], here)
