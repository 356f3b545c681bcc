"""What a running job finds wrong: told once, again every hour, and when it is gone; in each status, and red for whoever
reads it."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace

import pytest

from airflow_bottledwater.model.problem import Problem
from airflow_bottledwater.state import problems, store
from airflow_bottledwater.state.control_records import StatusRecord, decode, encode
from airflow_bottledwater.state.problems import Problems
from airflow_bottledwater.triggers import stream_error
from tests.support.status import status_of

ORDERS = Problem("not-followed", "public.orders", "It has no key.", "Give it a primary key.")
ITEMS = Problem("not-followed", "public.items", "Its registry is away.")


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    now = [1000.0]
    clocks = SimpleNamespace(time=lambda: now[0], monotonic=lambda: now[0] - 900)
    monkeypatch.setattr(problems, "time", clocks)
    return now


def test_a_clock_that_is_set_neither_hides_a_problem_nor_makes_one_last(monkeypatch: pytest.MonkeyPatch) -> None:
    wall, since_boot = [10_000.0], [100.0]
    monkeypatch.setattr(problems, "time", SimpleNamespace(time=lambda: wall[0], monotonic=lambda: since_boot[0]))
    told = Problems()
    told.tell("tables", [ORDERS])
    for step in (-7200.0, 9000.0):
        wall[0], since_boot[0] = wall[0] + step + 5, since_boot[0] + 5
        assert not problems.lasting(told.all(), wall[0])
    wall[0], since_boot[0] = wall[0] - 7200 + problems.GRACE, since_boot[0] + problems.GRACE
    told.tell("tables", [ORDERS])
    assert problems.lasting(told.all(), wall[0])
    assert told.all()[0].since == wall[0] - problems.GRACE - 10


def test_each_part_replaces_its_own_and_a_lasting_one_keeps_its_beginning(clock: list[float]) -> None:
    told = Problems()
    told.tell("tables", [ORDERS])
    clock[0] += 10
    told.tell("registry", [ITEMS])
    told.tell("tables", [Problem("not-followed", "public.orders", "It still has no key.")])
    assert [(each.subject, each.since) for each in told.all()] == [("public.orders", 1000), ("public.items", 1010)]
    assert told.all()[0].reason == "It still has no key."
    told.tell("tables", [])
    assert [each.subject for each in told.all()] == ["public.items"]


def test_a_status_has_room_for_the_problems_of_thousands_of_tables(clock: list[float]) -> None:
    """Kafka would refuse the record, and no heartbeat come any more, as if the job were dead."""
    told = Problems()
    told.tell("dead letters", [Problem("dead-letters", "open letters", "There are some.")])
    clock[0] += 10
    told.tell("topics", [replace(ITEMS, kind="expires", subject=f"topic.{n}", reason="x" * 400) for n in range(5000)])
    *named, more = told.all()
    assert [each.kind for each in named] == ["dead-letters"] + ["expires"] * 50
    assert (more.kind, more.subject, more.since) == ("expires", "4950 more", 1010)
    assert len(store.encode(encode(status_of(problems=told.all())))) < 100_000
    assert len(problems.lasting(told.all(), 1080.0)) == 52


def test_it_is_logged_once_again_every_hour_and_when_it_is_gone(
    clock: list[float], caplog: pytest.LogCaptureFixture
) -> None:
    told = Problems()
    for seconds in (0, 10, 3589, 2):
        clock[0] += seconds
        told.tell("tables", [ORDERS])
    assert [r.levelname for r in caplog.records] == ["WARNING", "WARNING"]
    assert caplog.messages[0] == "public.orders: It has no key. Give it a primary key."
    told.tell("tables", [])
    assert "no longer a problem" in caplog.messages[-1]


def test_a_status_tells_them_and_the_error_sensor_fails_for_one_that_lasts(clock: list[float]) -> None:
    told = Problems()
    told.tell("tables", [ORDERS])
    status = decode(StatusRecord, encode(status_of(problems=told.all(), at=1000.0)))
    assert status is not None and status.problems == told.all()

    def event() -> object:
        return stream_error.evaluate(status, silent=0, longest=600, earlier="", max_dead_letters=None)

    status.at = 1000.0 + problems.GRACE - 1
    assert event() is None
    status.at = 1000.0 + problems.GRACE
    assert event() == {"status": "failed", "message": str(ORDERS), "position": ""}


def test_a_summary_of_many_names_five() -> None:
    many = [Problem("not-followed", f"t{n}", "No key.") for n in range(7)]
    assert problems.summary([]) == ""
    assert "t4: No key." in problems.summary(many) and "t5" not in problems.summary(many)
    assert problems.summary(many).endswith("and 2 more")
