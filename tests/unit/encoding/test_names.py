"""Names for Avro and Kafka."""

from __future__ import annotations

import re

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from airflow_bottledwater.encoding import names

#: identifiers of PostgreSQL: 1 to 63 bytes, anything but NUL
identifiers = st.text(
    st.characters(exclude_characters="\0", exclude_categories=["Cs"]), min_size=1, max_size=63
).filter(lambda name: len(name.encode()) <= 63)
#: https://avro.apache.org/docs/1.12.0/specification/#names
AVRO_NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")
#: org.apache.kafka.common.internals.Topic
TOPIC = re.compile(r"[A-Za-z0-9._-]+")


@pytest.mark.parametrize(
    ("name", "mangled"),
    [
        ("crêpes", "cr_c3__aa_pes"),
        ("flobble-biscuits?whatisthetime/hahahaha", "flobble_2d_biscuits_3f_whatisthetime_2f_hahahaha"),
        ("1st", "_31_st"),
        ("Mixed Case", "Mixed_20_Case"),
        ("a1_", "a1_"),
        (".a", "_2e_a"),
    ],
)
def test_names_are_mangled_as_by_bottled_water(name: str, mangled: str) -> None:
    assert names.mangle(name) == mangled


@pytest.mark.parametrize(
    ("schema", "table", "prefix", "topic"),
    [
        ("public", "orders", "", "orders"),
        ("public", "orders", "shop", "shop.orders"),
        ("sales", "orders", "", "sales.orders"),
        ("sales", "orders", "shop", "shop.sales.orders"),
        ("public", "1st", "", "_31_st"),
        ("a.b", "c.d", "", "a.b.c_2e_d"),
        ("public", "Mixed Case", "p-1.x", "p-1.x.Mixed_20_Case"),
    ],
)
def test_a_topic_is_prefix_schema_and_table(schema: str, table: str, prefix: str, topic: str) -> None:
    assert names.topic(schema, table, prefix) == topic


@given(identifiers, identifiers, st.sampled_from(["", "shop", "p-1.x"]))
@example("public", "a.b", "")
@example("a..b", "c.d", "p-1.x")
def test_the_record_of_a_topic_is_called_as_the_table_for_which_it_was_made(
    schema: str, table: str, prefix: str
) -> None:
    found = names.record(names.topic(schema, table, prefix), prefix)
    assert found[:2] == (names.namespace(schema), names.mangle(table))
    assert found.known == {f"{names.namespace(schema)}.{names.mangle(table)}{end}" for end in ("", "_key")}


def test_the_records_of_envelopes_are_called_as_debezium_calls_them() -> None:
    found = names.enveloped("shop.a-b.orders")
    assert (found.namespace, found.name) == ("shop.a_2d_b.orders", "Value")
    assert found.known == {"shop.a_2d_b.orders.Envelope", "shop.a_2d_b.orders.Key"}


@given(identifiers)
def test_every_mangled_name_is_an_avro_name(name: str) -> None:
    assert AVRO_NAME.fullmatch(names.mangle(name))


@given(identifiers)
@example("a..b")
@example(".")
@example("...")
@example("a.1")
def test_every_namespace_is_made_of_avro_names(schema: str) -> None:
    assert all(AVRO_NAME.fullmatch(part) for part in names.namespace(schema).split("."))


@given(identifiers, identifiers, st.from_regex(r"\A[A-Za-z0-9._-]{0,20}\Z"))
@example("..", "..", "")
def test_every_topic_has_a_name_that_kafka_takes(schema: str, table: str, prefix: str) -> None:
    topic = names.topic(schema, table, prefix)
    assert TOPIC.fullmatch(topic)
    assert topic not in (".", "..")


@given(st.sampled_from(["events", "dead_letters"]))
def test_service_topics_begin_with_the_prefix(kind: str) -> None:
    assert names.service_topic(kind) == f"_bottledwater_{kind}"
    assert names.service_topic(kind, "shop") == f"shop._bottledwater_{kind}"
