"""The helper that all tests wait with."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.waiting import LONG, until

TESTS = Path(__file__).parents[2]
#: whose bound is what the test is about
_SHORTER = {"until(lambda: flow.reported(asked).ended, 'the live snapshot ends', 45, pause=0.5, failed=errors)"}
#: whose first number is a bound, too; what is shorter than the second one gives time to another thread, or shows that
#: something does not come
_WAITS, _PAUSE, _SHORTEST = {"wait", "join", "communicate", "result", "flush"}, 5.0, 60.0


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


def _bounds(call: ast.Call) -> Iterator[float]:
    """What a call says about how many seconds it waits."""
    for value in [*call.args, *(each.value for each in call.keywords if each.arg in ("seconds", "timeout"))]:
        if isinstance(value, ast.Constant) and type(value.value) in (int, float):
            yield float(value.value)


def _too_short(call: ast.Call) -> bool:
    if isinstance(call.func, ast.Name) and call.func.id == "until":
        return min(_bounds(call), default=LONG) < LONG
    if isinstance(call.func, ast.Attribute) and call.func.attr in _WAITS:
        return any(_PAUSE <= seconds < _SHORTEST for seconds in _bounds(call))
    return False


def test_no_test_gives_a_slow_machine_less_time_than_it_needs() -> None:
    found = [
        f"{path.relative_to(TESTS)}:{call.lineno}: {ast.unparse(call)}"
        for room in ("integration", "faults", "system", "support")
        for path in sorted((TESTS / room).rglob("*.py"))
        for call in ast.walk(ast.parse(path.read_text()))
        if isinstance(call, ast.Call) and _too_short(call) and ast.unparse(call) not in _SHORTER
    ]
    assert found == [], f"until() waits for {LONG:.0f} s by itself"
