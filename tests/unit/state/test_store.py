"""The state topics' records."""

from __future__ import annotations

import json

from hypothesis import given, settings
from hypothesis import strategies as st

from airflow_bottledwater.state import store

values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(),
    lambda inner: st.lists(inner) | st.dictionaries(st.text(), inner),
    max_leaves=10,
)


@settings(max_examples=40)
@given(st.dictionaries(st.text(), values, max_size=5))
def test_a_fact_is_json_that_reads_back_the_same(fact: dict) -> None:  # type: ignore[type-arg]
    encoded = store.encode(fact)
    assert encoded is not None
    assert json.loads(encoded) == fact


def test_nothing_is_a_tombstone() -> None:
    assert store.encode(None) is None
    assert store.encode({}) == b"{}"


def test_every_slot_has_a_topic_of_its_own() -> None:
    assert store.state_topic_name("shop", "orders") == "_bottledwater.shop.orders"
    assert store.state_topic_name("Mein Laden", "orders") == "_bottledwater.Mein_20_Laden.orders"
