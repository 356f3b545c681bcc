"""Which values have no form, and what is said of them."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from airflow_bottledwater.encoding import types, unheld
from airflow_bottledwater.encoding.program import Target, compile_programs
from airflow_bottledwater.encoding.wire import GEOJSON, MALFORMED, NO_REPRESENTATION, OP_TEXT
from airflow_bottledwater.model.relation import ColumnType
from airflow_bottledwater.pipeline.formats import AVRO
from tests.support import wire as w
from tests.support.callees import write_value


def _type(oid: int, typmod: int = -1, **more: Any) -> ColumnType:
    return ColumnType(oid, typmod, oid, typmod, "b", "t", **more)


#: numeric(10, 2)
DECIMAL = _type(types.NUMERIC, ((10 << 16) | 2) + 4)
ARRAY = _type(1007, element=_type(23), dimensions=2)


@pytest.mark.parametrize(
    ("type", "json", "settings"),
    [
        (DECIMAL, False, ["numeric = string"]),
        (DECIMAL, True, []),
        (_type(types.NUMERIC), False, []),
        (_type(types.NUMERIC, form="double"), True, ["numeric = string"]),
        (ARRAY, True, ["arrays = text"]),
        (_type(23), False, []),
        (_type(1184), True, []),
        (_type(1184, form="text"), False, []),
        (_type(1184), False, ["temporal = text"]),
        (
            _type(1231, element=DECIMAL, dimensions=1),
            False,
            ["arrays = text", "numeric = string"],
        ),
    ],
)
def test_values_without_a_form_have_a_setting_that_holds_them(
    type: ColumnType, json: bool, settings: list[str]
) -> None:
    assert [each.setting for each in unheld.unheld(type, json=json)] == settings


def test_the_error_names_the_setting() -> None:
    table = w.table(("id", w.plain(w.TEXT)), ("price", DECIMAL), key=["id"])
    programs = compile_programs([(table, Target(0, 1, 1, 2))], AVRO, copied=False)
    message = programs.error(0, NO_REPRESENTATION, 1)
    assert "NaN and infinity (held by numeric = string)" in message
    assert "Values without a form" in message
    assert "numeric" not in programs.error(0, MALFORMED, 1)
    assert "held" not in programs.error(0, NO_REPRESENTATION, 0)


@pytest.mark.parametrize(
    ("text", "valid"),
    [
        (b'{"type":"Point","coordinates":[1,-2.5e-7]}', True),
        (b'{"type":"Point","coordinates":[]}', True),
        (b'{"type":"Point","coordinates":[1,2,NaN]}', False),
        (b'{"type":"Point","coordinates":[nan,2]}', False),
        (b'{"type":"Point","coordinates":[1,-Infinity]}', False),
        (b'{"type":"Point","coordinates":[1,inf]}', False),
        (b"", False),
    ],
)
def test_what_is_written_as_geojson_is_json(text: bytes, valid: bool) -> None:
    out, data = np.zeros(200, dtype=np.uint8), np.frombuffer(bytearray(text or b" "), dtype=np.uint8)
    end = write_value(w.program_of(OP_TEXT, GEOJSON), 0, data, 0, len(text), out, 0)
    assert bytes(out[:end]) == text if valid else end == NO_REPRESENTATION


def test_a_note_says_for_which_columns_it_can_happen() -> None:
    columns = [("id", w.plain(w.TEXT)), *((f"n{i}", DECIMAL) for i in range(7)), ("t", _type(1184))]
    table = w.table(*columns, key=["id"])
    (note,) = unheld.notes([table], json=False)
    assert f"{table.qualified}.n0" in note
    assert "and 2 more columns cannot hold NaN and infinity" in note
    assert "numeric = string holds them" in note
    assert unheld.notes([table], json=True) == []


def test_a_note_says_which_decimals_are_too_precise_for_many_readers() -> None:
    kinds = [_type(types.NUMERIC, ((digits << 16) | scale) + 4) for digits, scale in ((39, 0), (38, 38), (3, 39))]
    kinds += [w.array(kinds[0]), replace(kinds[0], form="string"), _type(790, 2)]
    table = w.table(*((f"c{i}", kind) for i, kind in enumerate(kinds)))
    (note,) = [each for each in unheld.notes([table], json=False) if "38 digits" in each]
    assert [f"{table.qualified}.c{i}" in note for i in range(len(kinds))] == [True, False, True, True, False, False]
    assert not any("38 digits" in each for each in unheld.notes([table], json=True))


def test_a_note_says_what_kafka_connect_would_read_as_another_number() -> None:
    kinds = [_type(700), w.array(_type(701)), w.composite(_type(23), _type(types.NUMERIC, form="double"))]
    kinds += [w.extension("vector", "vector"), _type(23), DECIMAL, _type(701, form="hash")]  # none of these has them
    table = w.table(*((f"c{i}", kind) for i, kind in enumerate(kinds)))
    (note,) = unheld.misread_by_connect([table])
    assert [f"{table.qualified}.c{i}" in note for i in range(len(kinds))] == [True] * 3 + [False] * 4
    assert unheld.misread_by_connect([w.table(("id", _type(23)))]) == []
    (note,) = unheld.misread_by_connect([w.table(("id", _type(23)), ("x", _type(5069)))])
    assert "Numbers from 2^63 on in public.t.x are read as negative ones" in note
