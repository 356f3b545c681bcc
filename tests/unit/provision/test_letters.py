"""Which dead letters patterns of tables mean."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from airflow_bottledwater.provision.letters import LetterPosition, LettersTopic


def _table(schema: str, name: str) -> Any:
    return SimpleNamespace(table=SimpleNamespace(schema=schema, name=name, qualified=f"{schema}.{name}"))


TABLES = {1: _table("a", "t"), 2: _table("a.b", "t"), 3: _table("a", "b.t"), 5: _table("a.b", "renamed")}


@pytest.mark.parametrize(
    ("pattern", "meant"), [("a.*", {1, 3}), ("a.b.*", {2, 4, 5}), ("a.t", {1}), ("a.b.t", {2, 3, 4, 5})]
)
def test_a_schema_or_a_table_may_have_a_dot_in_its_name(pattern: str, meant: set[int]) -> None:
    topic = object.__new__(LettersTopic)
    topic._publishing = SimpleNamespace(state=SimpleNamespace(tables=TABLES))  # type: ignore[assignment]
    relations = {1: "a.t", 2: "a.b.t", 3: "a.b.t", 4: "a.b.t", 5: "a.b.t"}
    places = [LetterPosition("", b"", 1, "", relation, oid) for oid, relation in relations.items()]
    assert {each.oid for each in places if topic._meant(each, [pattern])} == meant
