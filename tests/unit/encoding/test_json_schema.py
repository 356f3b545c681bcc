"""JSON Schemas of keys and rows, and what they mean to readers."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from jsonschema import Draft7Validator

from airflow_bottledwater.encoding import json_schema
from airflow_bottledwater.model.relation import Column, SourceTable
from tests.support.reference import RECORD
from tests.support.wire import INT4, TEXT, array, composite, plain, table
from tests.unit.encoding.test_avro import any_type, identifiers


@given(st.dictionaries(identifiers, any_type, min_size=1, max_size=8), st.data())
def test_schemas_are_valid_and_every_row_may_have_nulls(columns: dict[str, Any], data: st.DataObject) -> None:
    key = tuple(data.draw(st.permutations(sorted(columns)))[: data.draw(st.integers(1, len(columns)))])
    comments = [data.draw(st.none() | identifiers) for _ in columns]
    made = SourceTable(
        1, "public", "t", "d", key, tuple(Column(n, t, c) for (n, t), c in zip(columns.items(), comments, strict=True))
    )
    value, keys = (json.loads(of(made, RECORD)) for of in (json_schema.value_schema, json_schema.key_schema))
    for schema in (value, keys):
        Draft7Validator.check_schema(schema)
    row = Draft7Validator(value)
    assert row.is_valid(dict.fromkeys(columns))
    assert not row.is_valid({**dict.fromkeys(columns), "".join(columns): None} if len(columns) > 1 else 1)
    assert not Draft7Validator(keys).is_valid(dict.fromkeys(columns))
    assert "description" not in json_schema.key_schema(made, RECORD) or any("description" in name for name in columns)


def schema(*columns: tuple[str, Any], comment: str | None = None) -> str:
    return json_schema.value_schema(replace(table(*columns), comment=comment), RECORD)


A, B = ("a", plain(INT4)), ("b", plain(TEXT))


def test_a_schema_keeps_what_was_dropped_and_is_still_the_one_that_is_wanted() -> None:
    both, one = schema(A, B), schema(A)
    assert json_schema.amended(one, both) == both
    assert json_schema.amended(both, one) == both
    assert json_schema.same(both, one)
    assert not json_schema.same(one, both)
    assert not json_schema.same("", one)
    assert not json_schema.same(both, json_schema.value_schema(table(A), RECORD._replace(name="other")))
    assert not json_schema.same(both, schema(("a", plain(TEXT))))
    assert json_schema.same(schema(A, comment="x"), schema(A, comment="y"))
    # inside of values, too
    pair, single = (schema(("p", array(composite(*kinds)))) for kinds in ([plain(INT4), plain(TEXT)], [plain(INT4)]))
    assert json_schema.amended(single, pair) == pair
    assert json_schema.same(pair, single)
    assert json_schema.altered(pair, single) == set()
    assert json_schema.altered(single, pair) == {"p"}


@pytest.mark.parametrize(("one", "other", "said"), [(17, TEXT, "bytes in base64"), (TEXT, 17, "text")])
@pytest.mark.parametrize("inside", [lambda kind: kind, array, lambda kind: composite(plain(INT4), kind)])
def test_only_a_string_does_not_show_what_it_is(one: int, other: int, said: str, inside: Any) -> None:
    written, read = schema(("v", inside(plain(one)))), schema(("v", inside(plain(other))))
    (found,) = json_schema.misread(written, read)
    assert said in found
    assert found.startswith("v")
    assert json_schema.misread(written, written) == json_schema.misread(written, schema(("v", plain(INT4)))) == []
    assert json_schema.misread(written, "no JSON") == []
