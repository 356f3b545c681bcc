"""Tables, columns and slots as value objects."""

from __future__ import annotations

import re

import pytest

from airflow_bottledwater.model.slot import SLOT_NAME


@pytest.mark.parametrize("name", ["", "A", "a-b", "a" * 64, "a\n", "ä", "a b"])
def test_what_postgresql_refuses_is_no_slot_name(name: str) -> None:
    assert not re.search(SLOT_NAME, name)


@pytest.mark.parametrize("name", ["a", "0", "_", "a" * 63])
def test_what_postgresql_accepts_is_a_slot_name(name: str) -> None:
    assert re.search(SLOT_NAME, name)
