"""Protocol Buffers schemas of keys and rows, and what they mean to readers."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from airflow_bottledwater.encoding import protobuf
from airflow_bottledwater.errors import SchemaRefused
from airflow_bottledwater.model.relation import Column, SourceTable
from airflow_bottledwater.verify.protobuf import decode
from tests.support.protobuf_messages import fill, message_class
from tests.support.reference import RECORD
from tests.support.wire import INT4, TEXT, array, composite, interval_of, plain, table
from tests.unit.encoding.test_avro import any_type, identifiers

INT8 = 20


@given(st.dictionaries(identifiers, any_type, min_size=1, max_size=8), st.data())
def test_schemas_are_read_as_they_are_written_and_google_takes_them(
    columns: dict[str, Any], data: st.DataObject
) -> None:
    key = tuple(data.draw(st.permutations(sorted(columns)))[: data.draw(st.integers(1, len(columns)))])
    made = SourceTable(1, "public", "t", "d", key, tuple(Column(n, t) for n, t in columns.items()))
    try:
        texts = [of(made, RECORD) for of in (protobuf.value_schema, protobuf.key_schema)]
    except SchemaRefused as error:
        refused = str(error)
        assert "become one in Protobuf" in refused or "same Protobuf field" in refused
        return
    for text in texts:
        assert protobuf.text(protobuf.parse(text)) == text
        assert protobuf.same(text, text)
        message_class(text)


def schema(*columns: tuple[str, Any]) -> str:
    return protobuf.value_schema(table(*columns), RECORD)


A, B = ("a", plain(INT4)), ("b", plain(TEXT))


def test_a_name_has_one_number_for_ever() -> None:
    # what was published with these numbers must stay readable
    assert [protobuf.number(name) for name in ("id", "a", "m")] == [22459216, 14381795, 19164808]
    assert all(20_000 <= protobuf.number(f"c{i}") < 2**25 for i in range(10_000))
    assert all(len(protobuf.tag(protobuf.number(f"c{i}"), 7)) <= 4 for i in range(10_000))


def test_a_registry_may_write_a_schema_in_its_own_way() -> None:
    theirs = (
        '// Proto schema formatted by Wire, do not edit.\nsyntax = "proto3";\npackage bottledwater.public;\n\n/* x */'
        'message t {\n  optional int64 a = 5 [json_name = "a"];\n  repeated .bottledwater.public.t.b__array.item m = 6;'
        "\n  message b__array {\n    repeated item items = 1;\n\n    message item {\n      optional string value = 1;"
        "\n    }\n  }\n}\n"
    )
    found = protobuf.parse(theirs)
    assert (found.package, found.name) == RECORD[:2]
    assert found.message.fields == {
        5: protobuf.ProtobufField("a", "int64"),
        6: protobuf.ProtobufField("m", "item", "repeated"),
    }
    assert found.message.messages["b__array"].messages["item"].fields == {1: protobuf.ProtobufField("value", "string")}
    for other in ("", "message", "message t { oneof x { int64 a = 1; } }", "syntax = 'proto3';"):
        with pytest.raises(ValueError, match=r"package|not|unpack|message"):
            protobuf.parse(other)
    assert not protobuf.same(other, theirs)
    assert protobuf.misread(other, theirs) == []


def test_a_schema_keeps_what_was_dropped_and_is_still_the_one_that_is_wanted() -> None:
    both, one = schema(A, B), schema(A)
    assert protobuf.amended(one, both) == both
    assert protobuf.parse(protobuf.amended(both, one)) == protobuf.parse(both)
    assert protobuf.same(both, one)
    assert not protobuf.same(one, both)
    assert not protobuf.same(both, protobuf.value_schema(table(A), RECORD._replace(name="other")))
    assert protobuf.altered(both, one) == {"b"}
    # inside of values, too
    pair, single = (schema(("p", array(composite(*kinds)))) for kinds in ([plain(INT4), plain(TEXT)], [plain(INT4)]))
    assert protobuf.same(pair, single)
    assert protobuf.altered(pair, single) == set()
    assert protobuf.altered(single, pair) == {"p"}


@pytest.mark.parametrize("inside", [lambda kind: kind, array, lambda kind: composite(plain(16), kind), interval_of])
def test_another_type_is_misread_and_a_wider_integer_is_the_same(inside: Any) -> None:
    one, wider, other = (schema(("v", inside(plain(oid)))) for oid in (INT4, INT8, TEXT))
    assert one == wider
    for written, read in ((one, other), (other, one)):
        assert any("int64" in each and "string" in each for each in protobuf.misread(written, read))
    assert protobuf.misread(one, schema(A)) == []


@pytest.mark.parametrize("names", [("a_b", "aB"), ("x", "x__array"), ("ab", "AB")])
def test_names_that_become_one_are_refused(names: tuple[str, str]) -> None:
    with pytest.raises(SchemaRefused, match="become one in Protobuf"):
        schema((names[0], array(plain(INT4))), (names[1], plain(INT4)))


def test_a_name_that_becomes_one_with_a_dropped_one_is_refused() -> None:
    camel, snake = (Column(name, plain(TEXT)) for name in ("userId", "user_id"))
    for one, other in ((camel, snake), *[[Column("p", replace(composite(), attributes=(c,))) for c in (camel, snake)]]):
        before, after = (protobuf.value_schema(replace(table(), columns=(c,)), RECORD) for c in (one, other))
        with pytest.raises(SchemaRefused, match=r"one in Protobuf: user_id, userId\..*earlier name.*rename"):
            protobuf.amended(after, before)
    # an earlier version has both already
    both = before.replace("\n  }", "\n    optional string user_id = 22;\n  }", 1)
    assert "user_id" in protobuf.amended(before, both) == both


@pytest.mark.parametrize("nested", [False, True])
def test_a_name_that_has_the_number_of_a_dropped_one_is_refused(nested: bool) -> None:
    names = ("customer_default_type", "invoice_secondary_phone")
    assert {protobuf.number(name) for name in names} == {1475030}

    def having(name: str) -> str:
        column = Column(name, plain(TEXT))
        within = Column("p", replace(composite(), attributes=(column,)))
        return protobuf.value_schema(replace(table(), columns=(within if nested else column,)), RECORD)

    before, after = map(having, names)
    told = r"invoice_secondary_phone that of customer_default_type \(1475030\)\..*earlier name.*rename"
    with pytest.raises(SchemaRefused, match=told):
        protobuf.amended(after, before)
    # the latest version need not have it any more
    (found,) = protobuf.misread(after, before)
    assert found.endswith("invoice_secondary_phone as customer_default_type, which has its number")


def test_the_verification_reads_what_google_writes_and_refuses_what_it_does_not_know() -> None:
    made = table(
        A, B, ("l", array(plain(701), 2)), ("p", composite(plain(16), plain(17))), ("r", interval_of(plain(23)))
    )
    text = protobuf.value_schema(made, RECORD)
    values = {
        "a": -(2**31),
        "b": "",
        "l": [[1.5, None], [float("inf"), -0.0]],
        "p": {"f_20_0": False, "f_20_1": b"\0"},
        "r": {"lower": None, "upper": 7, "lower_inclusive": True, "upper_inclusive": False, "empty": False},
    }
    message, data = protobuf.parse(text).message, fill(message_class(text)(), values).SerializeToString()
    assert decode(message, data) == values
    assert decode(message, b"") == dict.fromkeys(values)
    smaller = protobuf.parse(protobuf.value_schema(replace(made, columns=made.columns[:2]), RECORD)).message
    for of, wrong in ((smaller, data), (message, data[:-1]), (message, data + b"\x80"), (message, b"\x0b")):
        with pytest.raises(ValueError, match=r"it ends|it has a field|in a way"):
            decode(of, wrong)


@pytest.mark.parametrize("inside", [lambda kind: kind, lambda kind: composite(plain(16), kind)])
def test_a_reader_of_one_dimension_would_not_see_that_there_are_more(inside: Any) -> None:
    flat, deep = (schema(("v", inside(replace(array(plain(INT4)), dimensions=n)))) for n in (1, 2))
    assert any("more dimensions" in each for each in protobuf.misread(deep, flat))
    # the other way round, there are no sizes, which says that there is one dimension
    assert protobuf.misread(flat, deep) == []
