"""When a catalog row was written, told by transaction ids that begin anew after 2^32."""

from __future__ import annotations

import pytest

from airflow_bottledwater.publish.columns import oldest, since


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
    ],
)
def test_a_row_was_written_before_a_transaction_or_since(written: int, xid: int, latest: int, found: bool) -> None:
    assert since(written, xid, latest) is found


def test_the_oldest_transaction_may_have_the_highest_id() -> None:
    assert oldest([7, 0xFFFFFFF0, 5]) == 0xFFFFFFF0
