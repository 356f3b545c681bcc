"""A value that has no form in what its column is published as: what is said before and then, and the way that is
named."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
from confluent_kafka.schema_registry import SchemaRegistryClient

from airflow_bottledwater.errors import RecordError
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
    assert "public.a.tags cannot hold arrays with another number of dimensions than 1" in notes
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
