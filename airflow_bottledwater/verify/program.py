"""The compiled way to make hashes, of columns of plain types, and (but in Protocol Buffers) of arrays of these. A
column of another type does not need to be in the key: its values are found by compiled code, and are compared as
:mod:`.values` does."""

from __future__ import annotations

import ctypes
import io
import itertools
import json
import operator
from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator
from typing import Any, ClassVar, NamedTuple

import fastavro
import numpy as np
import numpy.typing as npt

from airflow_bottledwater import compiled as compiling
from airflow_bottledwater.encoding import avro, names, protobuf, types, wire
from airflow_bottledwater.encoding.envelope import Envelope
from airflow_bottledwater.encoding.layout import Rows
from airflow_bottledwater.kafka import librdkafka as rd
from airflow_bottledwater.kafka.topic_reader import RecordBlock
from airflow_bottledwater.model.relation import ColumnType, SourceTable
from airflow_bottledwater.pipeline.formats import Format
from airflow_bottledwater.postgres.receive import MessageBlock
from airflow_bottledwater.verify import fields as f
from airflow_bottledwater.verify.buckets import Hashes
from airflow_bottledwater.verify.documents import parsed
from airflow_bottledwater.verify.fields import finish, hash_rows
from airflow_bottledwater.verify.messages import AFTER, AVRO, JSON, PAYLOAD, PROTOBUF, hash_records, schema_ids
from airflow_bottledwater.verify.nested import delimiter
from airflow_bottledwater.verify.protobuf import decode
from airflow_bottledwater.verify.skip import Nodes, expanded
from airflow_bottledwater.verify.values import (
    Expectation,
    Schemas,
    canonical,
    row_schema,
    text_hash,
    unescaped,
    unverified,
)

#: opcodes whose values are the same in both formats
_KINDS = {
    **dict.fromkeys((wire.OP_INT2, wire.OP_INT4, wire.OP_INT8, wire.OP_UINT32, wire.OP_UINT64), f.INT),
    **dict.fromkeys((wire.OP_UUID, wire.OP_INET, wire.OP_UINT32_TEXT), f.TEXT),
    **dict.fromkeys((wire.OP_TIMESTAMP, wire.OP_TIMESTAMPTZ), f.STAMP),
    **dict.fromkeys((wire.OP_FLOAT8, wire.OP_DOUBLE), f.FLOAT),
    wire.OP_BOOL: f.BOOL,
    wire.OP_FLOAT4: f.SINGLE,
    wire.OP_DATE: f.DATE,
    wire.OP_TIME: f.TIME,
}
#: opcodes of texts, which an argument makes JSON values or numbers
_TEXTS = (wire.OP_TEXT, wire.OP_JSONB, wire.OP_NUMERIC_TEXT)
#: digits of a decimal that surely fits into 64 bits
_DIGITS = 18
#: kinds of dates and times, which may be texts in Avro
_MOMENTS = (f.DATE, f.TIME, f.STAMP)
#: Avro's plain types, and the kinds that each can be
_AVRO: dict[str, tuple[int, ...]] = {
    "int": (f.INT, f.DATE),
    "long": (f.INT, f.TIME, f.STAMP),
    "boolean": (f.BOOL,),
    "string": (f.TEXT, *_MOMENTS),
    "bytes": (f.BYTES, f.DECIMAL),
    "double": (f.FLOAT,),
    "float": (f.SINGLE,),
}
#: the same of Protocol Buffers
_PROTOBUF: dict[str, tuple[int, ...]] = {
    "int64": (f.INT,),
    "bool": (f.BOOL,),
    "string": (f.TEXT, *_MOMENTS),
    "bytes": (f.BYTES,),
    "double": (f.FLOAT,),
    "float": (f.SINGLE,),
}


class _Form(NamedTuple):
    """How the values of a column are made into hashes; see :data:`~airflow_bottledwater.verify.fields.FIELD`."""

    kind: int
    scale: int = 0
    dimensions: int = 0
    delimiter: str = ","

    def field(self, column: int, *, nullable: bool = False, text: bool = False, node: int = 0) -> _Field:
        """As the kernels take it."""
        return column, self.kind, int(nullable), self.scale, self.dimensions, ord(self.delimiter), int(text), node


#: of a column that has no compiled form
_OTHER = _Form(f.OTHER)
#: an element of :data:`~airflow_bottledwater.verify.fields.FIELD`
_Field = tuple[int, int, int, int, int, int, int, int]


def _form(column: ColumnType, format: Format) -> _Form | None:
    """The form of a column; None if it has no compiled one."""
    mapping = types.mapping(column)
    opcode, argument = mapping.opcode, mapping.argument(column)
    as_texts = format.as_json or format.as_protobuf
    if opcode == wire.OP_ARRAY and column.element is not None:
        element = None if format.as_protobuf else _form(column.element, format)
        if element is None or element.dimensions or column.dimensions > f.MOST_DIMENSIONS:
            return None
        return element._replace(dimensions=column.dimensions, delimiter=delimiter(column.element))
    if opcode == wire.OP_UINT64 and as_texts:
        return None  # it may be beyond Avro's long
    kind = _KINDS.get(argument if opcode == wire.OP_ISO else opcode)
    if kind is not None:
        return _Form(kind)
    if opcode in _TEXTS:
        return _Form(f.TEXT) if argument == 0 else None
    if opcode == wire.OP_DECIMAL:
        precision, scale = types.numeric_precision(column.base_typmod)
        if as_texts:
            return _Form(f.TEXT)
        return _Form(f.DECIMAL, scale) if precision <= _DIGITS else None
    return _Form(f.BYTES) if opcode == wire.OP_BYTEA and not format.as_json else None


def _rows(values: list[Any], kind: np.dtype[Any]) -> Rows:
    return np.array(values or [(0,) * len(kind.names or ())], dtype=kind)


def _optional(schema: Any) -> tuple[Any, bool]:
    """A schema without its union with null, and whether it has one."""
    if isinstance(schema, list) and len(schema) == 2 and schema[0] == "null":
        return schema[1], True
    return schema, False


class _Schemas(ABC):
    """The schemas under which a topic's keys or values are written, as far as they were met.

    :param columns: the columns by their names in schemas, with their numbers (-1: it is not compared).
    :param around: what is around them (``PAYLOAD``, ``AFTER``).
    """

    _form: ClassVar[int]

    def __init__(self, columns: dict[str, tuple[int, _Form]], schemas: Schemas, around: int = 0) -> None:
        self._columns, self._schemas, self._around = columns, schemas, around
        self._nodes = Nodes()
        self._others: list[Any] = []  # for each schema, what its other columns are decoded by
        self._numbers: dict[int, int] = {}
        self._found: list[tuple[int, int, int]] = []
        self._fields: list[_Field] = []

    def numbers(self, ids: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
        """The numbers of schemas by their ids; -1 for none."""
        found, places = np.unique(ids, return_inverse=True)
        return np.array([self._number(number) for number in found.tolist()], dtype=np.int64)[places]

    def _number(self, number: int) -> int:
        if number < 0:
            return -1
        if number not in self._numbers:
            fields, others = self._read(self._schemas(number))
            self._numbers[number] = len(self._found)
            self._found.append((number, len(self._fields), -1 if fields is None else len(fields)))
            self._fields += fields or []
            self._others.append(others)
        return self._numbers[number]

    @abstractmethod
    def _read(self, text: str | None) -> tuple[list[_Field] | None, Any]:
        """The fields of a schema, and what its other columns are decoded by; None for either if there is none."""

    @abstractmethod
    def values(self, number: int, pieces: list[tuple[int, bytes]]) -> Iterable[tuple[int, Any]]:
        """The values of other columns of a record, by their columns' numbers.

        :param number: of its schema.
        :param pieces: their columns and bytes, all of them, in the order in which they are written.
        :raises Exception: they are no such values: whatever decoding them leads to.
        """

    def plan(self) -> tuple[Any, ...]:
        """What the kernels take."""
        found, fields = _rows(self._found, f.SCHEMA), _rows(self._fields, f.FIELD)
        nothing, ends = np.zeros(1, dtype=np.uint8), np.zeros(1, dtype=np.int64)
        return found, fields, nothing, ends, self._form, True, self._around, *self._nodes.arrays()


class _Avro(_Schemas):
    """Of Avro."""

    _form = AVRO

    def _read(self, text: str | None) -> tuple[list[_Field] | None, Any]:
        schema = json.loads(text or "null")
        schema = row_schema(schema) if self._around else schema
        if not isinstance(schema, dict) or schema.get("type") != "record":
            return None, None
        schema = fastavro.parse_schema(schema)  # in which names are full
        self._nodes.begin()
        found, others = [], []
        for field in schema["fields"]:
            node = self._nodes.add(field["type"])
            if (read := self._read_field(field, node)) is None:
                return None, None
            found.append(read)
            if read[0] >= 0 and read[1] == f.OTHER:
                others.append(field)
        alone = avro.without_logical(expanded(schema | {"fields": others}, self._nodes.named, set()))
        return found, fastavro.parse_schema(alone)

    def values(self, number: int, pieces: list[tuple[int, bytes]]) -> Iterable[tuple[int, Any]]:
        body = io.BytesIO(b"".join(piece for _, piece in pieces))
        found: Any = fastavro.schemaless_reader(body, self._others[number], None)
        return zip((column for column, _ in pieces), found.values(), strict=True)

    def _read_field(self, field: dict[str, Any], node: int) -> _Field | None:
        column, form = self._columns.get(field["name"], (-1, _OTHER))  # a column that was dropped
        if form is _OTHER:
            return _OTHER.field(column, node=node)
        schema, nullable = _optional(field["type"])
        dimensions, optional = 0, False
        # only the elements of the innermost array can be null
        while isinstance(schema, dict) and schema["type"] == "array" and not optional:
            dimensions += 1
            schema, optional = _optional(schema["items"])
        described = schema if isinstance(schema, dict) else {"type": schema}
        kinds = _AVRO.get(described["type"]) if isinstance(described["type"], str) else None
        if kinds is None or optional != (dimensions > 0) or dimensions > f.MOST_DIMENSIONS:
            return None
        if form.kind not in kinds or form.dimensions != dimensions:
            return None
        if form.kind == f.DECIMAL and described.get("scale", 0) != form.scale:
            return None
        text = described["type"] == "string" and form.kind in _MOMENTS
        return form.field(column, nullable=nullable, text=text)


class _Protobuf(_Schemas):
    """Of Protocol Buffers: a field's number is before its value, so that they may be in any order."""

    _form = PROTOBUF

    def _read(self, text: str | None) -> tuple[list[_Field] | None, Any]:
        if text is None:
            return None, None
        message = protobuf.parse(text).message
        found, others = [], {}
        for number, field in message.fields.items():
            column, form = self._columns.get(field.name, (-1, _OTHER))  # a column that was dropped
            if form is not _OTHER and (form.kind not in _PROTOBUF.get(field.type, ()) or field.label != "optional"):
                return None, None
            found.append(form.field(column, node=number << 3 | field.written))
            if form is _OTHER:
                others[column] = field.name, protobuf.ProtobufMessage({number: field}, message.messages)
        return found, others

    def values(self, number: int, pieces: list[tuple[int, bytes]]) -> Iterable[tuple[int, Any]]:
        for column, piece in pieces:
            name, message = self._others[number][column]
            yield column, decode(message, piece)[name]


class _Members:
    """The same of JSON: a schema says nothing that a value itself does not, but a registry must know it.

    :param columns: the members' names, in the order in which they come.
    :param schemas: None if records have none.
    :param around: what is around them (``PAYLOAD``, ``AFTER``).
    """

    def __init__(self, columns: list[tuple[str, _Field]], schemas: Schemas | None, around: int = 0) -> None:
        self._schemas = schemas
        found = [types.json_key(name) for name, _ in columns]
        ends = np.cumsum([len(name) for name in found] or [0], dtype=np.int64)
        text = np.frombuffer(bytearray(b"".join(found) or b"\0"), dtype=np.uint8)
        fields = _rows([field for _, field in columns], f.FIELD)
        self._plan = _rows([], f.SCHEMA), fields, text, ends, JSON, schemas is not None, around, *Nodes().arrays()

    def numbers(self, ids: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
        """0 for each schema that there is; -1 for none."""
        if self._schemas is None:
            return np.zeros(len(ids), dtype=np.int64)
        found, places = np.unique(ids, return_inverse=True)
        known = [number >= 0 and self._schemas(number) is not None for number in found.tolist()]
        return np.where(known, 0, -1)[places]

    def values(self, _: int, pieces: list[tuple[int, bytes]]) -> Iterable[tuple[int, Any]]:
        """The values of other columns; see :meth:`_Schemas.values`.

        :raises ValueError: they are not JSON.
        """
        return [(column, parsed(piece)) for column, piece in pieces]

    def plan(self) -> tuple[Any, ...]:
        """What the kernels take."""
        return self._plan


def _scratch() -> tuple[Any, ...]:
    double, single = np.zeros(1, dtype=np.float64), np.zeros(1, dtype=np.float32)
    left = np.zeros(f.MOST_DIMENSIONS, dtype=np.int64)
    return np.zeros(f.ROOM, dtype=np.uint8), double, double.view(np.int64), single, single.view(np.int32), left


def compile_scan(
    table: SourceTable, format: Format, schemas: Schemas | None, seed: bytes, envelope: Envelope | None = None
) -> CompiledScan | None:
    """The compiled way for a table; None if a column of its key has no compiled form.

    :param envelope: what is around the rows; None for nothing.
    """
    forms = [_form(column.type, format) or _OTHER for column in table.columns]
    keys = {form for column, form in zip(table.columns, forms, strict=True) if column.name in table.key}
    if _OTHER in keys:
        return None
    return CompiledScan(table, forms, format, schemas, seed, envelope)


class CompiledScan:
    """See :class:`~airflow_bottledwater.verify.scan.Scan`.

    :param forms: of each column.
    """

    def __init__(
        self,
        table: SourceTable,
        forms: list[_Form],
        format: Format,
        schemas: Schemas | None,
        seed: bytes,
        envelope: Envelope | None,
    ) -> None:
        warm_up()
        around_keys = PAYLOAD if envelope and envelope.with_schema else 0
        around = around_keys | (AFTER if envelope else 0)
        self._secret, self._expectation = seed, Expectation(table, format)
        self._seed: Hashes = np.frombuffer(bytearray(seed[:16]), dtype=np.uint64)
        left_out = set(unverified(table))
        numbers = [-1 if c.name in left_out else i for i, c in enumerate(table.columns)]
        self._others = sum(form is _OTHER for form in forms)
        fields = {c.name: form.field(i) for i, c, form in zip(numbers, table.columns, forms, strict=True)}
        self._fields = _rows(list(fields.values()), f.FIELD)
        self._key = np.array([c.name in table.key for c in table.columns], dtype=np.bool_)
        self._scratch, self._room = _scratch(), np.zeros((2, 1 << 16), dtype=np.uint8)
        self._schemas: tuple[_Schemas, _Schemas] | tuple[_Members, _Members]
        if format.as_json or schemas is None:
            shown = {c.name: c.field for c in table.columns}
            self._schemas = (
                _Members([(shown[n], fields[n]) for n in table.key], schemas, around_keys),
                _Members([(shown[n], field) for n, field in fields.items()], schemas, around),
            )
        else:
            known = {names.mangle(c.field): (i, form) for i, c, form in zip(numbers, table.columns, forms, strict=True)}
            if format.as_protobuf:
                self._schemas = _Protobuf(known, schemas), _Protobuf(known, schemas)
            else:
                self._schemas = _Avro(known, schemas), _Avro(known, schemas, around)

    def _texts(self, largest: int) -> npt.NDArray[np.uint8]:
        """Room for two values of this size, and what their forms need beyond it."""
        if self._room.shape[1] < largest + 64:
            self._room = np.zeros((2, 2 * largest + 64), dtype=np.uint8)
        return self._room

    def rows(self, block: MessageBlock) -> tuple[Hashes, Hashes]:
        """See :meth:`Scan.rows <airflow_bottledwater.verify.scan.Scan.rows>`."""
        out = np.zeros(block.count, dtype=np.uint64), np.zeros(block.count, dtype=np.uint64)
        room, places = self._texts(int(np.diff(block.offsets).max(initial=0))), self._places(block.count)
        into = *out, places
        count = hash_rows(block.data, block.offsets, self._fields, self._key, self._seed, self._scratch[:3], room, into)
        for row, pieces in _by_row(places[:count]):
            texts = ((column, unescaped(piece.decode())) for column, piece in pieces)
            self._add(out[1], row, ((column, self._expectation.value(column, text)) for column, text in texts))
        finish(*out, self._seed)
        return out

    def records(self, block: RecordBlock) -> tuple[Hashes, Hashes]:
        """See :meth:`Scan.records <airflow_bottledwater.verify.scan.Scan.records>`."""
        messages = block.messages
        out = np.zeros(len(block), dtype=np.uint64), np.zeros(len(block), dtype=np.uint64)
        which = np.zeros((2, len(block)), dtype=np.int64)
        head = np.zeros(5, dtype=np.uint8)
        for n in range(2):
            schema_ids(messages, n == 0, head, which[n])
            which[n] = self._schemas[n].numbers(which[n])
        key_plan, value_plan = (schemas.plan() for schemas in self._schemas)
        largest = max(int(messages["key_len"].max(initial=0)), int(messages["len"].max(initial=0)))
        room, places = self._texts(largest), self._places(len(block))
        into = *out, places
        count = hash_records(messages, which, key_plan, value_plan, self._seed, self._scratch, room, into)
        for row, pieces in _by_row(places[:count]):
            try:
                self._add(out[1], row, self._schemas[1].values(int(which[1, row]), pieces))
            except Exception:  # whatever the bytes lead to; no row has such a value
                self._add(out[1], row, pieces)
        finish(*out, self._seed)
        out[1][messages["payload"] == 0] = 0
        return out

    def _places(self, rows: int) -> Rows:
        """Room for the places of all values of other columns."""
        return np.zeros(rows * self._others + 1, dtype=f.PLACE)

    def _add(self, sums: Hashes, row: int, values: Iterable[tuple[int, Any]]) -> None:
        """Add the hashes of values of other columns, as :class:`~airflow_bottledwater.verify.scan.PlainScan` compares
        them, to the sum of a row."""
        found = [f"{column}:{canonical(value)}" for column, value in values if value is not None]
        total = sum(text_hash(text, self._secret) for text in found)
        sums[row] = (int(sums[row]) + total) % 2**64


def _by_row(places: Rows) -> Iterator[tuple[int, list[tuple[int, bytes]]]]:
    """The columns and bytes of values, for each row that has some."""
    for row, found in itertools.groupby(places.tolist(), key=operator.itemgetter(0)):
        yield row, [(column, ctypes.string_at(address, size)) for _, column, address, size in found]


def warm_up() -> None:
    """Compile it; see :func:`airflow_bottledwater.compiled.warm_up`."""
    compiling.warm_up("verified values", _hash_nothing)


def _hash_nothing() -> None:
    out, room = (np.zeros(0, dtype=np.uint64), np.zeros(0, dtype=np.uint64)), np.zeros((2, 64), dtype=np.uint8)
    seed, fields = np.zeros(2, dtype=np.uint64), _rows([], f.FIELD)
    offsets, key = np.zeros(1, dtype=np.int64), np.zeros(0, dtype=np.bool_)
    places = np.zeros(1, dtype=f.PLACE)
    hash_rows(room[0], offsets, fields, key, seed, _scratch()[:3], room, (*out, places))
    messages, plan = np.zeros(0, dtype=rd.MESSAGE), _Members([], None).plan()
    schema_ids(messages, True, room[0], offsets)
    hash_records(messages, np.zeros((2, 0), dtype=np.int64), plan, plan, seed, _scratch(), room, (*out, places))
    finish(*out, seed)
