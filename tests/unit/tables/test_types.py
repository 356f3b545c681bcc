"""Which changes of types are noticed, and are a reason to publish a table's records again."""

from __future__ import annotations

from dataclasses import replace

import pytest

from airflow_bottledwater.model.relation import ColumnType
from airflow_bottledwater.tables.types import _names, _renamed
from tests.support import wire as w


def price(*attributes: tuple[str, ColumnType, int]) -> ColumnType:
    """A composite of attributes with names, types and numbers."""
    kind = w.composite(*(of for _, of, _ in attributes))
    each = zip(kind.attributes, attributes, strict=True)
    return replace(kind, attributes=tuple(replace(a, name=name, number=number) for a, (name, _, number) in each))


TEXT, INT8, FLOAT8 = w.plain(25), w.plain(20), w.plain(701)
KNOWN = price(("currency", TEXT, 1), ("amount", INT8, 2))
NUMERIC = price(("currency", TEXT, 1), ("amount", w.plain(1700, 100), 2))
OTHERS = {
    "of another type": (KNOWN, price(("currency", TEXT, 1), ("amount", FLOAT8, 3))),
    "with another modifier": (NUMERIC, price(("currency", TEXT, 1), ("amount", w.plain(1700, 200), 3))),
    "made again": (KNOWN, price(("currency", TEXT, 1), ("amount", INT8, 3))),
    "renamed": (KNOWN, price(("currency", TEXT, 1), ("sum", INT8, 2))),
    "dropped": (KNOWN, price(("amount", INT8, 2))),
    "dropped at the end": (KNOWN, price(("currency", TEXT, 1))),
}


@pytest.mark.parametrize("other", OTHERS)
@pytest.mark.parametrize("within", ["itself", "an array", "a composite"])
def test_an_attribute_that_is_another_one_now_is_noticed(other: str, within: str) -> None:
    before, now = OTHERS[other]
    if within == "an array":
        before, now = w.array(before), w.array(now)
    elif within == "a composite":
        before, now = price(("p", before, 1)), price(("p", now, 1))
    assert "has other attributes now" in _renamed(before, now)
    assert _names(before) != _names(now)


def test_what_is_only_added_or_was_recorded_without_numbers_is_no_reason() -> None:
    added = price(("currency", TEXT, 1), ("amount", INT8, 2), ("note", TEXT, 3))
    unnumbered = price(("currency", TEXT, 0), ("amount", INT8, 0))
    assert not _renamed(KNOWN, KNOWN) and not _renamed(KNOWN, added) and not _renamed(unnumbered, KNOWN)
    # but it is recorded
    assert _names(KNOWN) != _names(added) and _names(unnumbered) != _names(KNOWN)
