"""Which keys count as newer than a snapshot, of changes that were published and of those that could not be."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from airflow_bottledwater.encoding.layout import CHANGE
from airflow_bottledwater.kafka.publisher import tombstones
from airflow_bottledwater.live.changed_keys import ChangedKeys
from airflow_bottledwater.model.boundary import Snapshot
from airflow_bottledwater.publish.reject import Rejection

#: shows the transactions below 100
SNAPSHOT = Snapshot(100, 100, ())


def noted(
    records: dict[int, bytes],
    rejected: list[int],
    *,
    outbox: bool = False,
    xid: int = 200,
    by: ChangedKeys | None = None,
) -> ChangedKeys:
    """What is noted of a batch of three inserts by a transaction, by those of before if there are any.

    :param records: the keys of the changes that were encoded, by the changes' numbers.
    :param rejected: the changes that are rejected.
    :param outbox: whether the changes that are not encoded are of an outbox.
    """
    changes = np.zeros(3, dtype=CHANGE)
    changes["xid"], changes["kind"] = xid, ord("I")
    encoded = tombstones(0, [(0, key) for key in records.values()])
    encoded.table["row"] = list(records)
    version = SimpleNamespace(topic="items", table=SimpleNamespace(oid=1, outbox=False))
    other = SimpleNamespace(topic="outbox.{kind}", table=SimpleNamespace(oid=2, outbox=True))
    changes["relation"] = [int(outbox and row not in records) for row in range(3)]

    class Batch(SimpleNamespace):
        def __len__(self) -> int:
            return 3

    batch: Any = SimpleNamespace(
        completed=SimpleNamespace(
            batch=Batch(changes=changes, versions=(version, other)[: 1 + outbox], data=np.zeros(0, dtype=np.uint8))
        ),
        records=encoded,
        rejections=[Rejection(row, "why") for row in rejected],
    )
    touched = ChangedKeys() if by is None else by
    touched.note(batch, {"items": 0}, {0}, None)
    return touched


def test_any_key_may_be_that_of_a_change_that_could_not_be_encoded() -> None:
    newer = noted({0: b"a", 2: b"c"}, [1]).newer(0, SNAPSHOT)
    assert newer.all


@pytest.mark.parametrize("rejected", [[], [1], [0, 1, 2]])
def test_of_a_change_that_is_rejected_for_its_size_the_key_is_newer(rejected: list[int]) -> None:
    newer = noted({0: b"a", 1: b"b", 2: b"c"}, rejected).newer(0, SNAPSHOT)
    assert not newer.all
    asked = tombstones(0, [(0, key) for key in (b"a", b"b", b"c", b"d")])
    assert newer.rows(asked).tolist() == [True, True, True, False]


@pytest.mark.parametrize("rejected", [[], [1]])
def test_rows_of_an_outbox_are_no_newer_versions_of_anything(rejected: list[int]) -> None:
    newer = noted({0: b"a", 2: b"c"}, rejected, outbox=True).newer(0, SNAPSHOT)
    assert not newer.all
    assert newer.rows(tombstones(0, [(0, key) for key in (b"a", b"b")])).tolist() == [True, False]


def test_a_key_that_is_changed_again_and_again_is_noted_once() -> None:
    changed = ChangedKeys()
    for xid in range(200, 5200):
        noted({0: b"a"}, [], xid=xid, by=changed)
    assert len(changed) == 1
    records = tombstones(0, [(0, b"a")])
    for shown, newer in ((5199, True), (5200, False)):
        assert changed.newer(0, Snapshot(shown, shown, ())).rows(records).tolist() == [newer]


@given(st.lists(st.sets(st.integers(0, 40), min_size=1, max_size=3), max_size=60), st.integers(200, 260))
def test_what_is_noted_grows_with_the_keys_and_hides_no_change(batches: list[set[int]], shown: int) -> None:
    keys, changed = [b"%d" % each for each in range(41)], ChangedKeys()
    for xid, batch in enumerate(batches, 200):
        noted({row: keys[each] for row, each in enumerate(batch)}, [], xid=xid, by=changed)
    assert len(changed) <= 2 * len(set[int]().union(*batches))
    records = tombstones(0, [(0, key) for key in keys])
    snapshot = Snapshot(shown, shown, ())
    for _ in range(2):
        later = set[int]().union(*batches[shown - 200 :])
        assert changed.newer(0, snapshot).rows(records).tolist() == [each in later for each in range(41)]
        changed.forget(snapshot)
