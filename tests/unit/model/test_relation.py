"""Tables, columns and slots as value objects."""

from __future__ import annotations

import json

import pytest

from airflow_bottledwater.model.relation import Column, ColumnType, Table
from airflow_bottledwater.model.slot import SLOT_NAME, SlotRecord


def test_a_table_survives_the_state_topic() -> None:
    kind = ColumnType(90000, -1, 1700, (10 << 16 | 2) + 4, "b", "public.price")
    deep = ColumnType(1231, -1, 1231, -1, "b", "numeric[][]", kind, 2)
    table = Table(
        16384,
        "crêpes",
        "t",
        "f",
        ("b", "a"),
        (Column("a", kind, "what it costs"), Column("b", kind), Column("c", deep)),
        7,
        "x",
        "p",
        3,
        True,
    )
    again = Table.from_json(json.loads(json.dumps(table.to_json())))
    assert again == table
    assert again.columns[0].type == kind


def test_a_slot_record_is_plain_json() -> None:
    record = SlotRecord("s", "7381", 1, "db", 2**40, 12)
    assert SlotRecord(**json.loads(json.dumps(record.to_json()))) == record


@pytest.mark.parametrize("name", ["", "A", "a-b", "a" * 64, "a\n", "ä", "a b"])
def test_what_postgresql_refuses_is_no_slot_name(name: str) -> None:
    assert not SLOT_NAME.match(name)


@pytest.mark.parametrize("name", ["a", "0", "_", "a" * 63])
def test_what_postgresql_accepts_is_a_slot_name(name: str) -> None:
    assert SLOT_NAME.match(name)
