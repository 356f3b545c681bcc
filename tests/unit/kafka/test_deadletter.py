"""Dead letters: never larger than their topic takes, and complete or said to be cut."""

from __future__ import annotations

import base64
import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from airflow_bottledwater.kafka.deadletter import MAX_TEXT, letter


def made(
    columns: dict[str, str | None],
    *,
    message: bytes | None = b"row",
    limit: int = 10**6,
    key: tuple[str, ...] = ("id",),
) -> tuple[bytes, dict[str, Any]]:
    """A letter, and what a consumer reads in it."""
    value = letter(
        topic="shop.items",
        op="u",
        position="0000000000000010/00000001",
        relation="public.items",
        key=key,
        columns=columns,
        error="column 'v': no representation",
        again={"relation": 7},
        message=message,
        limit=limit,
    )
    return value, json.loads(value)


def test_a_letter_has_the_row_the_reason_and_what_it_takes_to_publish_it_later() -> None:
    _, read = made({"id": "1", "v": "ü", "n": None}, message=b"\0\xff")
    assert read["columns"] == {"id": "1", "v": "ü", "n": None}
    assert read["key"] == {"id": "1"}
    assert read["error"] == "column 'v': no representation"
    assert not read["truncated"]
    assert read["again"]["relation"] == 7
    assert base64.b64decode(read["again"]["message"]) == b"\0\xff"


def test_a_row_without_a_key_has_none() -> None:
    assert made({"v": "x"}, key=())[1]["key"] is None


@pytest.mark.parametrize(("size", "cut"), [(MAX_TEXT - 1, False), (MAX_TEXT, False), (MAX_TEXT + 1, True)])
def test_the_text_of_all_columns_together_is_cut_at_a_limit(size: int, cut: bool) -> None:
    half = size // 2
    _, read = made({"id": "x" * half, "v": "y" * (size - half), "n": None})
    assert read["truncated"] is cut
    assert sum(len(text or "") for text in read["columns"].values()) == min(size, MAX_TEXT)
    # null stays null, and is told from what was cut
    assert read["columns"]["n"] is None


def test_columns_behind_the_cut_are_empty_and_not_missing() -> None:
    _, read = made({"id": "1", "big": "x" * (2 * MAX_TEXT), "after": "kept?"})
    assert (read["columns"]["id"], read["columns"]["after"]) == ("1", "")


def test_without_room_for_the_message_it_is_left_out_and_the_letter_says_that_it_is_cut() -> None:
    whole, _ = made({"id": "1"}, message=b"x" * 1000)
    exactly, read = made({"id": "1"}, message=b"x" * 1000, limit=len(whole))
    assert exactly == whole and "again" in read
    _, read = made({"id": "1"}, message=b"x" * 1000, limit=len(whole) - 1)
    assert "again" not in read
    assert read["truncated"]


def test_a_letter_without_a_message_cannot_be_published_later_and_says_so() -> None:
    _, read = made({"id": "1"}, message=None)
    assert "again" not in read and read["truncated"]


@given(st.text(max_size=300), st.binary(max_size=500), st.integers(0, 3000))
def test_a_letter_that_can_be_published_later_always_fits(text: str, message: bytes, limit: int) -> None:
    value, read = made({"id": text}, message=message, limit=limit)
    assert read["columns"]["id"] == text
    assert "again" not in read or len(value) <= limit
