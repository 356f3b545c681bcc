"""A value that has no form in what its column is published as: what is said before and then, and the way that is
named."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
from confluent_kafka.schema_registry import SchemaRegistryClient

from airflow_bottledwater.errors import RecordError, Refused
from airflow_bottledwater.local.registry import SchemaRegistry
from airflow_bottledwater.provision import preflight
from tests.support.topics import MakeFlow


@pytest.fixture
def flow_statements() -> Sequence[str]:
    return ("CREATE TABLE a (id int PRIMARY KEY, price numeric(10, 2), tags text[])",)


def test_the_setting_that_holds_a_value_without_a_form_is_named_and_helps(
    make_flow: MakeFlow, registry: SchemaRegistry
) -> None:
    flow = make_flow(registry, skip_snapshot=True)
    notes = " ".join(preflight.run(flow.pipeline).notes)
    assert "public.a.price cannot hold NaN and infinity" in notes
    assert "public.a.tags cannot hold arrays of another depth than 1, or with a lower bound other than 1" in notes
    flow.create()
    flow.execute("INSERT INTO a VALUES (1, 1, '{a}')")
    flow.stream()
    flow.execute("INSERT INTO a VALUES (2, 'NaN', '{a}')", "INSERT INTO a VALUES (3, 3, '{{a},{b}}')")
    with pytest.raises(RecordError, match=r"column 'price': .*NaN and infinity \(held by numeric = string\)"):
        flow.stream()
    SchemaRegistryClient({"url": registry.url}).set_compatibility(f"{flow.topic('a')}-value", level="NONE")
    flow.change(numeric="string")
    with pytest.raises(RecordError, match=r"column 'tags': .*than 1 \(held by arrays = text\)"):
        flow.stream()
    flow.change(arrays="text")
    assert flow.stream()["published"] == 3


def test_a_value_that_postgresql_cannot_convert_names_its_table_and_what_to_do(make_flow: MakeFlow) -> None:
    flow = make_flow(None)
    flow.execute(
        "CREATE TYPE broken",
        "CREATE FUNCTION broken_in(cstring) RETURNS broken LANGUAGE internal IMMUTABLE STRICT AS 'int4in'",
        # it knows no value
        "CREATE FUNCTION broken_out(broken) RETURNS cstring LANGUAGE internal IMMUTABLE STRICT AS 'enum_out'",
        "CREATE TYPE broken (INPUT = broken_in, OUTPUT = broken_out, LIKE = int4)",
        "ALTER TABLE a ADD v broken",
        "INSERT INTO a (id, v) VALUES (1, '7')",
    )
    flow.create()
    with pytest.raises(
        Refused, match=r"Reading blocks 0 to .* of public\.a: .*converts the values of .*\bv\b.*exclude"
    ):
        flow.snapshot()
