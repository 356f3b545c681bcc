"""Avro schemas of keys and rows."""

from __future__ import annotations

import json
from dataclasses import replace

import fastavro
import pytest
from hypothesis import given
from hypothesis import strategies as st

from airflow_bottledwater.encoding import avro, types
from airflow_bottledwater.errors import Refused, SchemaRefused
from airflow_bottledwater.model.relation import Column, ColumnType, SourceTable
from tests.support.wire import INT4, TEXT, array, composite, interval_of, plain, table

identifiers = st.text(st.characters(exclude_characters="\0", exclude_categories=["Cs"]), min_size=1, max_size=15)
scalar = st.one_of(
    st.sampled_from(sorted(types.TABLE)).map(lambda oid: plain(oid, 2 if oid == 790 else -1)),
    st.builds(lambda p, s: plain(1700, ((p << 16) | (s & 0x7FF)) + 4), st.integers(1, 1000), st.integers(-1000, 1000)),
    st.integers(1, 2**32 - 1).map(plain),
)
any_type = st.recursive(scalar, lambda inner: st.builds(array, inner, st.integers(1, 6)), max_leaves=2)


@given(
    schema=identifiers,
    name=identifiers,
    columns=st.dictionaries(identifiers, any_type, min_size=1, max_size=8),
    data=st.data(),
)
def test_schemas_are_accepted_by_fastavro(schema: str, name: str, columns: dict, data: st.DataObject) -> None:  # type: ignore[type-arg]
    key = tuple(data.draw(st.permutations(sorted(columns)))[: data.draw(st.integers(1, len(columns)))])
    made = SourceTable(
        1, schema, name, "d", key, tuple(Column(n, t, data.draw(st.none() | identifiers)) for n, t in columns.items())
    )
    try:
        value = json.loads(avro.value_schema(made))
    except Refused as error:
        refused = str(error)
        assert "both become the Avro field" in refused
        return
    fastavro.parse_schema(value)
    fastavro.parse_schema(json.loads(avro.key_schema(made)))
    assert [f["default"] for f in value["fields"]] == [None] * len(columns)


@pytest.mark.parametrize(
    ("precision", "scale", "expected"),
    [(10, 2, (10, 2)), (3, -2, (5, 0)), (3, 5, (5, 5)), (1000, 1000, (1000, 1000)), (1, -1000, (1001, 0))],
)
def test_a_numerics_modifier_becomes_what_avro_can_hold(precision: int, scale: int, expected: tuple[int, int]) -> None:
    made = table(("n", plain(1700, ((precision << 16) | (scale & 0x7FF)) + 4)))
    decimal = json.loads(avro.value_schema(made))["fields"][0]["type"][1]
    assert (decimal["precision"], decimal["scale"]) == expected
    assert decimal["logicalType"] == "decimal"


def test_columns_whose_names_become_one_are_refused() -> None:
    made = table(("a b", plain(INT4)), ("a_20_b", plain(INT4)))
    with pytest.raises(
        Refused, match=r"'a b' and 'a_20_b' of public\.t both become the Avro field 'a_20_b'\..*option rename"
    ):
        avro.value_schema(made)


@pytest.mark.parametrize("kind", [composite(plain(1114)), interval_of(plain(1114), several=True)])
def test_one_type_in_two_forms_of_its_times_is_refused_with_what_can_be_done(kind: ColumnType) -> None:
    columns = (("id", plain(INT4)), ("p", kind.with_temporal("text")), ("q", array(kind)))
    with pytest.raises(SchemaRefused, match=r"Columns p, q of public\.t have values of one type.*option temporal"):
        avro.value_schema(table(*columns))
    # two types of one name are another matter
    other = replace(composite(plain(INT4)), base_oid=2)
    with pytest.raises(SchemaRefused, match=r"Two types in .* both become the Avro name"):
        avro.value_schema(table(("p", composite(plain(TEXT))), ("q", other)))


def test_the_key_has_its_columns_in_index_order_and_nothing_but_names_and_types() -> None:
    made = SourceTable(
        1,
        "s",
        "t",
        "d",
        ("b", "a"),
        (Column("a", plain(INT4), "a comment"), Column("b", plain(TEXT))),
        comment="another",
    )
    assert json.loads(avro.key_schema(made)) == {
        "type": "record",
        "name": "t_key",
        "namespace": "bottledwater.s",
        "fields": [{"name": "b", "type": "string"}, {"name": "a", "type": "int"}],
    }


def test_comments_document_the_row() -> None:
    made = SourceTable(1, "s", "t", "d", (), (Column("a", plain(INT4), "a comment"),), comment="of the table")
    schema = json.loads(avro.value_schema(made))
    assert schema["doc"] == "of the table"
    assert schema["fields"][0]["doc"] == "a comment"
