"""How a pipeline sees a table."""

from __future__ import annotations

import json

import pytest

from airflow_bottledwater.encoding.mapping import TableMapping
from airflow_bottledwater.model.forms import TypeOptions
from airflow_bottledwater.model.relation import Column, ColumnType, Table
from airflow_bottledwater.pipeline.formats import AVRO, JSON
from airflow_bottledwater.pipeline.settings import Pipeline

INT = ColumnType(23, -1, 23, -1, "b", "integer")
ORDERS = Table(1, "sales", "orders", "d", ("id",), (Column("id", INT),))


def test_topics_have_the_prefix() -> None:
    mapping = TableMapping.of(Pipeline(postgres="service=x", topic_prefix="shop"))
    assert mapping.by_topic([ORDERS]) == {"shop.sales.orders": ORDERS}
    assert mapping.service_topics == ("shop._bottledwater_events", "shop._bottledwater_dead_letters")


def test_only_a_format_with_a_registry_has_subjects() -> None:
    found = dict(TableMapping(format=AVRO, prefix="shop").subjects("shop.sales.bought", ORDERS))
    assert list(found) == ["shop.sales.bought-key", "shop.sales.bought-value"]
    # named by the topic: a registry does not let the next schema of a subject have another name
    value = json.loads(found["shop.sales.bought-value"])
    assert (value["namespace"], value["name"]) == ("bottledwater.sales", "bought")
    assert TableMapping(format=JSON).subjects("orders", ORDERS) == []


@pytest.mark.parametrize(
    ("format", "forms"),
    [
        ("avro", TypeOptions(enums="enum", not_null="required")),
        ("json", TypeOptions(numeric="number", documents="value", geometries="geojson")),
    ],
)
def test_each_format_offers_its_own_forms(format: str, forms: TypeOptions) -> None:
    everything = {
        "enums": "enum",
        "not_null": "required",
        "json_numeric": "number",
        "json_documents": "value",
        "json_geometries": "geojson",
    }
    assert TableMapping.of(Pipeline.of(postgres="service=x", format=format, **everything)).forms == forms
