"""The helper that all tests wait with."""

from __future__ import annotations

import pytest

from tests.support.waiting import until


def test_it_returns_the_first_answer_that_is_true() -> None:
    answers = iter([None, "", [], "found"])
    assert until(lambda: next(answers), "an answer", pause=0.0) == "found"


def test_it_ends_in_time_and_says_what_was_awaited() -> None:
    with pytest.raises(AssertionError, match="not within 0 s: the stream's first record"):
        until(lambda: False, "the stream's first record", 0.05, pause=0.01)


def test_an_error_elsewhere_ends_it_at_once_and_is_shown() -> None:
    errors: list[Exception] = []

    def fails() -> bool:
        errors.append(ValueError("the stream's own"))
        return False

    with pytest.raises(AssertionError, match="the stream's own"):
        until(fails, "a record", 600.0, failed=errors)


def test_what_came_before_the_error_counts() -> None:
    assert until(lambda: True, "a record", failed=[ValueError("later")])
