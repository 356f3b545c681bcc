"""Which keys count as newer than a snapshot, of changes that were published and of those that could not be."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from airflow_bottledwater.encoding.layout import CHANGE
from airflow_bottledwater.kafka.publisher import tombstones
from airflow_bottledwater.live.changed_keys import ChangedKeys
from airflow_bottledwater.model.boundary import Snapshot
from airflow_bottledwater.publish.reject import Rejection

#: shows the transactions below 100
SNAPSHOT = Snapshot(100, 100, ())


def noted(records: dict[int, bytes], rejected: list[int], *, outbox: bool = False) -> ChangedKeys:
    """What is noted of a batch of three inserts by transaction 200.

    :param records: the keys of the changes that were encoded, by the changes' numbers.
    :param rejected: the changes that are rejected.
    :param outbox: whether the changes that are not encoded are of an outbox.
    """
    changes = np.zeros(3, dtype=CHANGE)
    changes["xid"], changes["kind"] = 200, ord("I")
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
    touched = ChangedKeys()
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
