"""LSNs and positions."""

from __future__ import annotations

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from airflow_bottledwater.model.lsn import Position, format_lsn, parse_lsn

lsns = st.integers(0, 2**64 - 1)
positions = st.builds(Position, lsns, st.integers(0, 2**32 - 1))


@given(lsns)
@example(0)
@example(2**32 - 1)
@example(2**32)
def test_an_lsn_is_printed_as_it_is_parsed(lsn: int) -> None:
    assert parse_lsn(format_lsn(lsn)) == lsn


def test_an_lsn_is_printed_as_postgresql_prints_it() -> None:
    assert format_lsn(0x16_B374_D848) == "16/B374D848"
    assert format_lsn(0) == "0/0"
    assert parse_lsn("16/b374d848") == 0x16_B374_D848


@pytest.mark.parametrize(
    "text", ["", "/", "1", "1/", "/1", "123456789/0", "0/123456789", "0x1/1", "-1/1", "1/1 ", " 1/1", "1/1\n", "g/1"]
)
def test_something_else_is_not_an_lsn(text: str) -> None:
    with pytest.raises(ValueError, match="is not an LSN"):
        parse_lsn(text)


@given(positions)
def test_a_position_is_printed_as_it_is_parsed(position: Position) -> None:
    text = str(position)
    assert Position.parse(text) == position
    assert len(text) == 25


@given(positions, positions)
def test_positions_order_as_their_texts_do(one: Position, other: Position) -> None:
    assert (one < other) == (str(one) < str(other))
    assert (one == other) == (str(one) == str(other))


@pytest.mark.parametrize(
    "text",
    [
        "",
        "0/0",
        "00000000016B3748",
        "00000000016B3748/C",
        "00000000016B3748/0000000G",
        "-0000000016B3748/0000000C",
        "00000000016B3748/-000000C",
        "0x000000016B3748/0000000C",
        "00000000016B_748/0000000C",
        " 0000000016B3748/0000000C",
        "00000000016B3748/0000000C\n",
        "+0000000016B3748/0000000C",
    ],
)
def test_something_else_is_not_a_position(text: str) -> None:
    with pytest.raises(ValueError, match="is not a position"):
        Position.parse(text)


@given(positions, lsns, st.integers(1, 2**32 - 1))
def test_a_change_is_passed_when_its_own_position_is_reached(reached: Position, final_lsn: int, ordinal: int) -> None:
    assert reached.passed(final_lsn, ordinal) == (Position(final_lsn, ordinal) <= reached)


def test_a_transaction_that_ends_where_a_position_between_transactions_lies_is_not_passed() -> None:
    # an end LSN or a keepalive may equal the next transaction's final LSN
    assert not Position(100, 0).passed(100, 1)
    assert Position(100, 0).passed(99, 2**31)


def test_inside_a_transaction_the_ordinals_up_to_the_position_are_passed() -> None:
    assert Position(100, 3).passed(100, 3)
    assert not Position(100, 3).passed(100, 4)
    assert not Position(100, 3).passed(101, 1)
