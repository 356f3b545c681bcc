"""Which schema ids of a pipeline the registry is asked for."""

from __future__ import annotations

import pytest

from airflow_bottledwater.model.relation import Column, ColumnType, SourceTable
from airflow_bottledwater.pipeline.settings import Settings
from airflow_bottledwater.state.pinned import PinnedTable
from airflow_bottledwater.state.schemas import pinned_schemas

INT = ColumnType(23, -1, 23, -1, "b", "integer")


@pytest.mark.parametrize(
    ("format", "key", "found"),
    [("json", ("id",), []), ("avro", ("id",), [7, 8]), ("avro", (), [8])],
)
def test_a_format_without_registry_has_no_schema_ids_and_a_table_without_key_one(
    format: str, key: tuple[str, ...], found: list[int]
) -> None:
    pipeline = Settings.of(postgres="host=db", format=format, registry={"url": "http://registry"})
    pinned = PinnedTable(SourceTable(1, "public", "t", "d", key, (Column("id", INT),)), "t", "topic-id", 1, 7, 8, 3)
    assert [each.number for each in pinned_schemas(pipeline, [pinned])] == found
