"""What is known of releases of PostgreSQL."""

from __future__ import annotations

import pytest

from airflow_bottledwater.postgres.publication import forgets_writers, repeats_invalidations


@pytest.mark.parametrize(
    ("version", "forgets"), [(140017, True), (140018, False), (160008, True), (160009, False), (180000, False)]
)
def test_a_release_forgets_writers(version: int, forgets: bool) -> None:
    assert forgets_writers(version) == forgets


@pytest.mark.parametrize(
    ("version", "repeats"),
    [(140017, False), (140018, True), (140019, False), (150013, True), (160009, True), (170005, True), (170006, False)],
)
def test_a_release_repeats_invalidations(version: int, repeats: bool) -> None:
    assert repeats_invalidations(version) == repeats
