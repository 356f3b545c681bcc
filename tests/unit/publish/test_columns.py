"""When a catalog row was written, told by transaction ids that begin anew after 2^32."""

from __future__ import annotations

from dataclasses import replace

import pytest

from airflow_bottledwater.model.relation import ColumnType
from airflow_bottledwater.publish.columns import _alterable, oldest, since
from tests.support import wire as w


@pytest.mark.parametrize(
    ("written", "xid", "latest", "found"),
    [
        (1000, 1000, 1001, True),
        (999, 1000, 1001, False),
        (1001, 1000, 1002, True),
        (2, 1000, 1001, False),  # FrozenTransactionId: initdb has written it
        (5, 0xFFFFFFF0, 20, True),  # ids began anew in between
        (0xFFFFFFF0, 5, 20, False),
        (0x90000000, 0x7FFFFFFF, 0x80000000, False),  # seems to lie ahead: it is from before ids began anew
        (700, 900, 900 + (1 << 31), True),  # so many transactions later that ids no longer tell
        (0xFFFFFFF0, 900, 900 + (1 << 31), True),
        (700, 900, 901 + (1 << 32), False),  # 32 bits of a transaction of the latest epoch
        (700, (1 << 32) + 900, (3 << 32) + 5, True),  # all of its 64 bits are known
        (700, (3 << 32) + 900, (3 << 32) + 5000, False),
        (1000, (3 << 32) + 900, (3 << 32) + 5000, True),
    ],
)
def test_a_row_was_written_before_a_transaction_or_since(written: int, xid: int, latest: int, found: bool) -> None:
    assert since(written, xid, latest) is found


def test_the_oldest_transaction_may_have_the_highest_id() -> None:
    assert oldest([7, 0xFFFFFFF0, 5]) == 0xFFFFFFF0


@pytest.mark.parametrize(
    ("kind", "alterable"),
    [
        (w.plain(25), False),
        (w.array(w.plain(1700)), False),
        (w.interval_of(w.plain(1700), several=True), False),
        (w.labelled("sad", "ok"), True),
        (w.array(w.labelled("sad", "ok")), True),
        (w.composite(w.plain(25)), True),
        (w.array(w.composite(w.plain(25))), True),
        (replace(w.plain(1007), form="text"), True),
    ],
)
def test_values_with_labels_or_attributes_can_become_others_without_a_change(kind: ColumnType, alterable: bool) -> None:
    assert _alterable(kind) is alterable
