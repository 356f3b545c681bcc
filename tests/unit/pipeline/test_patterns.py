"""Patterns of tables and schemas: only ``*`` and ``?`` are more than themselves."""

from __future__ import annotations

import pytest

from airflow_bottledwater.encoding import mapping
from airflow_bottledwater.pipeline import patterns
from airflow_bottledwater.postgres import catalog


@pytest.mark.parametrize(
    ("tables", "schemas", "schema", "name", "covered"),
    [
        ([], ["*", "!tenant[1]"], "tenant[1]", "t", False),
        ([], ["*", "!tenant[1]"], "tenant1", "t", True),
        ([], ["tenant[1]"], "tenant1", "t", False),
        ([], ["tenant[?]"], "tenant[2]", "t", True),
        (["*.*", "!tenant[1].*"], [], "tenant[1]", "t", False),
        (["*.*", "!tenant[1].*"], [], "tenant1", "t", True),
        (["t[ab]*"], [], "public", "t[ab]1", True),
        (["t[ab]*"], [], "public", "ta1", False),
    ],
)
def test_a_bracket_is_itself(tables: list[str], schemas: list[str], schema: str, name: str, covered: bool) -> None:
    assert catalog.covers(tables, schemas, schema, name) == covered


def test_so_it_is_in_patterns_of_options_and_columns() -> None:
    assert patterns.specificity("tenant[1].*", "tenant[1]", "t") > patterns.specificity("*.*", "tenant[1]", "t")
    assert patterns.specificity("tenant[1].*", "tenant1", "t") == -1
    assert mapping.matches(["a[1]*"], "a[1]b") and not mapping.matches(["a[1]*"], "a1b")


@pytest.mark.parametrize(
    ("pattern", "qualified", "fits"),
    [
        ("orders", "public.orders", True),
        ("orders", "sales.orders", False),
        ("sales.*", "sales.orders", True),
        ("my.app.*", "my.app.orders", True),
        ("my.app.orders", "my.app.orders", True),
        ("my.app.*", "my.apps.orders", False),
        ("*.orders", "my.app.orders", True),
    ],
)
def test_a_whole_name_may_have_several_dots(pattern: str, qualified: str, fits: bool) -> None:
    assert patterns.describes_one(pattern, qualified) == fits
