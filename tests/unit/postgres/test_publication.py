"""What is known of releases of PostgreSQL."""

from __future__ import annotations

import pytest

from airflow_bottledwater.postgres.publication import forgets_writers


@pytest.mark.parametrize(
    ("version", "forgets"), [(140017, True), (140018, False), (160008, True), (160009, False), (180000, False)]
)
def test_a_release_forgets_writers(version: int, forgets: bool) -> None:
    assert forgets_writers(version) == forgets
