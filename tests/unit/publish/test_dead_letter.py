"""Dead letters: never larger than their topic takes, and complete or said to be cut."""

from __future__ import annotations

import base64
import json
from dataclasses import replace
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from airflow_bottledwater.model.version import Version
from airflow_bottledwater.publish.dead_letter import MAX_TEXT, DeadLetter
from tests.support import wire as w


def made(
    columns: dict[str, str | None], *, whole: bool = True, limit: int = 10**6, key: tuple[str, ...] = ("id",)
) -> tuple[bytes, dict[str, Any], bytes]:
    """A dead letter, what a consumer reads in it, and its row's message."""
    sent = tuple(enumerate([*columns, "left_out"], start=1))
    table = replace(w.table(*((name, w.plain(w.TEXT)) for name in columns), key=key, oid=7), sent=sent)
    message = w.insert(7, *(None if text is None else text.encode() for text in columns.values()))
    version = Version(table, "shop.items")
    of = DeadLetter(
        "7/shop/slot",
        version,
        "u",
        "0000000000000010/00000001",
        message,
        "no representation",
        "stream",
        whole,
        {"xid": 9},
    )
    value = of.encode(limit)
    return value, json.loads(value), message


def test_it_has_the_row_the_reason_and_what_it_takes_to_publish_it_later() -> None:
    value, read, message = made({"id": "1", "v": "ü", "n": None})
    assert read["columns"] == {"id": "1", "v": "ü", "n": None}
    assert (read["key"], read["error"], read["truncated"]) == ({"id": "1"}, "no representation", False)
    assert read["pipeline"] == "7/shop/slot"
    again = read["again"]
    assert (again["topic"], again["xid"], base64.b64decode(again["message"])) == ("shop.items", 9, message)
    assert msgspec.convert(again, Version).table.key == ("id",)
    # nor does it say which columns there are besides
    assert b'"left_out": []' in value and b'"left_out"]' not in value


def test_a_row_without_a_key_has_none() -> None:
    assert made({"v": "x"}, key=())[1]["key"] is None


@pytest.mark.parametrize(("size", "cut"), [(MAX_TEXT - 1, False), (MAX_TEXT, False), (MAX_TEXT + 1, True)])
def test_the_text_of_all_columns_together_is_cut_at_a_limit(size: int, cut: bool) -> None:
    half = size // 2
    _, read, _ = made({"id": "x" * half, "v": "y" * (size - half), "n": None})
    assert read["truncated"] is cut
    assert sum(len(text or "") for text in read["columns"].values()) == min(size, MAX_TEXT)
    # null stays null, and is told from what was cut
    assert read["columns"]["n"] is None


def test_columns_behind_the_cut_are_empty_and_not_missing() -> None:
    _, read, _ = made({"id": "1", "big": "x" * (2 * MAX_TEXT), "after": "kept?"})
    assert (read["columns"]["id"], read["columns"]["after"]) == ("1", "")


def test_without_room_for_the_message_it_is_left_out_and_the_dead_letter_says_that_it_is_cut() -> None:
    whole, *_ = made({"id": "x" * 1000})
    exactly, read, _ = made({"id": "x" * 1000}, limit=len(whole))
    assert exactly == whole and "again" in read
    _, read, _ = made({"id": "x" * 1000}, limit=len(whole) - 1)
    assert "again" not in read
    assert read["truncated"]


def test_a_row_that_is_not_whole_cannot_be_published_later_and_says_so() -> None:
    _, read, _ = made({"id": "1"}, whole=False)
    assert "again" not in read and read["truncated"]


@given(st.text(st.characters(categories=["L", "N"]), max_size=300), st.integers(0, 3000))
def test_one_that_can_be_published_later_always_fits(text: str, limit: int) -> None:
    value, read, _ = made({"id": text}, limit=limit)
    assert read["columns"]["id"] == text
    assert "again" not in read or len(value) <= limit
