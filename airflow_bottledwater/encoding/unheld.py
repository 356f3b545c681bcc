"""Which values of a column have no form in what it is published as, and the setting that holds them."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import NamedTuple

from airflow_bottledwater.encoding import types, wire
from airflow_bottledwater.model.relation import ColumnType, SourceTable


class Unheld(NamedTuple):
    """Values that cannot be published.

    :param values: which, as a noun phrase.
    :param setting: the setting that holds them, with its value.
    :param rare: whether no sensible value is one of them, so that nobody needs to know before it happens.
    """

    values: str
    setting: str
    rare: bool = False


_NAN = Unheld("NaN and infinity", "numeric = string")
_BEYOND_DOUBLE = Unheld("numbers too large for a double", "numeric = string", rare=True)
_TIMESTAMP = Unheld("timestamps beyond the year 294247", "temporal = text", rare=True)
_GEOJSON = Unheld("curves, and coordinates that are NaN or infinite", "json_geometries = ewkb", rare=True)
_XID8 = Unheld("numbers from 2^63 on", "format = json (in a pipeline of its own)", rare=True)
#: by opcodes, what is said of values that Kafka Connect's JsonConverter reads as others
_MISREAD = {
    (wire.OP_FLOAT4, wire.OP_FLOAT8, wire.OP_DOUBLE): "NaN and infinity in {} are texts in JSON, and Kafka Connect's "
    "JsonConverter, for which envelope_schema is, reads these as 0. If they can come, use format = avro (in a pipeline "
    "of its own).",
    (wire.OP_UINT64,): "Numbers from 2^63 on in {} are read as negative ones by Kafka Connect's JsonConverter, for "
    "which envelope_schema is. If they can come, leave the column out (exclude).",
}
#: the largest precision of a decimal in Spark (DecimalType.MAX_PRECISION) and in other readers
_MAX_PRECISION = 38


def unheld(column: ColumnType, *, json: bool) -> list[Unheld]:
    """The values of a type that have no form, also inside of arrays, composites and ranges.

    :param json: whether the output is JSON instead of Avro.
    """
    found = (each for kind, mapping in _parts(column, types.mapping(column)) for each in _of(kind, mapping, json))
    return list(dict.fromkeys(found))


def _parts(column: ColumnType, mapping: types.TypeMapping) -> Iterator[tuple[ColumnType, types.TypeMapping]]:
    """A type and those inside of it, as far as they are published as such."""
    yield column, mapping
    for part in mapping.parts:
        if part.type is not None and part.mapping is not None:
            yield from _parts(part.type, part.mapping)


def _of(column: ColumnType, mapping: types.TypeMapping, json: bool) -> Iterator[Unheld]:
    opcode = mapping.opcode
    if opcode == wire.OP_DOUBLE:
        yield _BEYOND_DOUBLE
    elif mapping.convert is not None and column.form == "geojson":
        yield _GEOJSON
    elif opcode == wire.OP_ARRAY:
        yield Unheld(
            f"arrays of another depth than {column.dimensions}, or with a lower bound other than 1", "arrays = text"
        )
    elif not json and opcode == wire.OP_DECIMAL:
        yield _NAN
    elif not json and opcode in (wire.OP_TIMESTAMP, wire.OP_TIMESTAMPTZ):
        yield _TIMESTAMP
    elif not json and opcode == wire.OP_UINT64:
        yield _XID8


def explain(column: ColumnType, *, json: bool) -> str:
    """What is said behind the error for a value without a form; empty if no setting would hold it."""
    found = unheld(column, json=json)
    if not found:
        return ""
    held = "; ".join(f"{each.values} (held by {each.setting})" for each in found)
    return f". It cannot hold {held}. To change that setting, see 'Values without a form' in docs/errors.md"


def _columns(
    tables: Sequence[SourceTable], matches: Callable[[ColumnType, types.TypeMapping], bool], said: str
) -> list[str]:
    """What is said of the columns with a type, or with one inside of it, that matches; empty if there are none."""
    found = [
        f"{table.qualified}.{each.name}"
        for table in tables
        for each in table.columns
        if any(matches(*part) for part in _parts(each.type, types.mapping(each.type)))
    ]
    return [said.format(_listed(found))] if found else []


def _listed(names: Sequence[str]) -> str:
    return f"{', '.join(names[:5])}{f' and {len(names) - 5} more columns' if len(names) > 5 else ''}"


def misread_by_connect(tables: Sequence[SourceTable]) -> list[str]:
    """Notes, if columns may have values that are published, and that Kafka Connect's JsonConverter reads as others. A
    schema of Kafka Connect has one type for a column, JSON has no numbers for NaN and infinity, and the schema no
    number beyond int64."""
    # vector and halfvec refuse NaN and infinity (CheckElement, src/vector.c of pgvector)
    return [note for opcodes, said in _MISREAD.items() for note in _columns(tables, partial(_is_one, opcodes), said)]


def _is_one(opcodes: Sequence[int], column: ColumnType, mapping: types.TypeMapping) -> bool:
    return mapping.opcode in opcodes


def _is_too_precise(column: ColumnType, mapping: types.TypeMapping) -> bool:
    return mapping.opcode == wire.OP_DECIMAL and mapping.avro(column)["precision"] > _MAX_PRECISION


def _too_precise(tables: Sequence[SourceTable]) -> list[str]:
    """A note, if columns are decimals of Avro with more digits than many readers take."""
    return _columns(
        tables,
        _is_too_precise,
        "{} are decimals of more than "
        f"{_MAX_PRECISION} digits in Avro, which not every reader takes: Spark reads no record of a topic with one. "
        "numeric = string publishes them as texts; with a registry that is best chosen before the slot is made.",
    )


def converted(table: SourceTable) -> str:
    """What helps if PostgreSQL cannot convert a value while the rows of a table are read; empty if it converts none."""
    columns = [each for each in table.columns if types.mapping(each.type).convert is not None and not each.mask]
    if not columns:
        return ""
    held = f", or set {_GEOJSON.setting}" if any(each.type.form == "geojson" for each in columns) else ""
    return (
        f"PostgreSQL converts the values of {_listed([each.name for each in columns])}. If it cannot convert one of "
        f"them, mend the value, leave its column out (exclude){held}; and start again."
    )


def notes(tables: Sequence[SourceTable], *, json: bool) -> list[str]:
    """A note for each setting: in which columns values may come that have no form, or for which readers have none."""
    columns: dict[tuple[str, str], list[str]] = {}
    for table in tables:
        for column in table.columns:
            for each in unheld(column.type, json=json):
                if not each.rare:
                    columns.setdefault((each.values, each.setting), []).append(f"{table.qualified}.{column.name}")
    found = [
        f"{_listed(names)} cannot hold {values}: such a value is a record error (on_error). {setting} holds them; with "
        "a registry that is best chosen before the slot is made."
        for (values, setting), names in columns.items()
    ]
    return found if json else found + _too_precise(tables)
