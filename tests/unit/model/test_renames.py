"""Columns by the names of two moments."""

from __future__ import annotations

import pytest

from airflow_bottledwater.model.renames import by_later_order, by_number, by_order


def test_a_column_keeps_its_number() -> None:
    before = [(1, "id"), (2, "email"), (4, "note")]
    assert by_number([(1, "id"), (2, "mail"), (4, "note"), (5, "other")], before) == {"mail": ["email"]}
    # names that were exchanged, and one that was given to another column
    assert by_number([(1, "id"), (2, "note"), (4, "email")], before) == {"note": ["email"], "email": ["note"]}
    assert by_number([(1, "id"), (2, "old"), (5, "email")], before) == {"old": ["email"]}
    assert by_number(before, before) == {}


@pytest.mark.parametrize(
    ("now", "had"),
    [
        ("id email note", {}),
        ("id note", {}),
        ("id email note other", {}),
        ("id note other", {}),
        ("id mail note", {"mail": "email mail"}),
        ("key email note", {"key": "id key"}),
        # it may be new, or the last one
        ("id email other", {"other": "note other"}),
        ("id a b", {"a": "email note a", "b": "email note b"}),
        # exchanged, or given to another column
        ("id note email", dict.fromkeys(["id", "note", "email"], "id email note")),
        ("id old note email", dict.fromkeys(["id", "old", "note", "email"], "id email note")),
        ("id old email note", dict.fromkeys(["id", "old", "email", "note"], "id email note")),
    ],
)
def test_without_numbers_the_order_says_which_names_a_column_may_have_had(now: str, had: dict[str, str]) -> None:
    found = by_order(now.split(), ["id", "email", "note"])
    assert found == {name: names.split() for name, names in had.items()}


@pytest.mark.parametrize(
    ("later", "names"),
    [
        ("id email note", {}),
        ("id note other", {}),
        ("note other", {}),
        ("id mail note", {"email": "email mail"}),
        ("id other", {"email": "email other", "note": "note other"}),
        ("id email a b", {"note": "note a b"}),
        ("id note email", dict.fromkeys(["id", "email", "note"], "id note email")),
    ],
)
def test_the_order_says_which_names_a_column_may_have_got(later: str, names: dict[str, str]) -> None:
    found = by_later_order(["id", "email", "note"], later.split())
    assert {name: {*some} for name, some in found.items() if {*some} != {name}} == {
        name: {*some.split()} for name, some in names.items()
    }
