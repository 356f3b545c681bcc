"""What a job says that does not move."""

from __future__ import annotations

import threading
from types import SimpleNamespace

import pytest

from airflow_bottledwater import backoff as backoff_module
from airflow_bottledwater.backoff import Backoff
from airflow_bottledwater.state import movement as module
from airflow_bottledwater.state import problems as problems_module
from airflow_bottledwater.state.movement import Movement
from airflow_bottledwater.state.problems import Problems


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> SimpleNamespace:
    """A clock that the test turns."""
    now = SimpleNamespace(at=1_000_000.0)
    fake = SimpleNamespace(time=lambda: now.at, monotonic=lambda: now.at)
    for each in (module, backoff_module, problems_module):
        monkeypatch.setattr(each, "time", fake)
    return now


class _Now(threading.Event):
    def wait(self, timeout: float | None = None) -> bool:
        return False


def _movement(
    clock: SimpleNamespace, limit: float | None = 300.0, slow: str = ""
) -> tuple[Movement, Problems, Backoff]:
    problems, backoff = Problems(), Backoff(limit, _Now(), report=lambda what: None)
    return (
        Movement(problems, "Slot shop", stalled=30.0, backoff=backoff, slow=lambda: slow),
        problems,
        backoff,
    )


def test_a_job_that_moves_has_no_problem(clock: SimpleNamespace) -> None:
    movement, problems, _ = _movement(clock)
    for _ in range(10):
        clock.at += 29
        assert not movement.look()
        assert problems.all() == []
        movement.moved()


def test_what_does_not_move_within_a_time_is_not_ready(clock: SimpleNamespace) -> None:
    movement, problems, _ = _movement(clock)
    clock.at += 31
    assert not movement.look()
    (found,) = problems.all()
    assert (found.kind, found.since, found.subject) == ("stalled", 1_000_000.0, "Slot shop")
    clock.at += 60
    movement.look()
    assert problems.all() == [found]
    movement.moved()
    movement.look()
    assert problems.all() == []


@pytest.mark.parametrize(
    ("limit", "end"),
    [(300.0, "ends at 13:51:40 UTC if that goes on (outage_timeout)"), (None, "waits until that is over")],
)
def test_a_job_that_waits_says_for_what_since_when_and_until_when(
    clock: SimpleNamespace, limit: float | None, end: str
) -> None:
    movement, problems, backoff = _movement(clock, limit)
    backoff.wait("Slot 'shop' is in use by process 7.")
    assert not movement.look()
    assert problems.all() == []
    clock.at += 6
    backoff.wait("Slot 'shop' is in use by process 7.")
    assert movement.look()
    (found,) = problems.all()
    assert (found.kind, found.since) == ("waiting", 1_000_000.0)
    assert found.reason == "Waits since 13:46:40 UTC: Slot 'shop' is in use by process 7."
    assert end in found.remedy
    backoff.over()
    movement.moved()
    assert not movement.look()
    assert problems.all() == []


def test_a_slow_kafka_is_told_though_everything_moves(clock: SimpleNamespace) -> None:
    movement, problems, _ = _movement(clock, slow="Kafka takes about 90 kB a second.")
    movement.moved()
    movement.look()
    (found,) = problems.all()
    assert (found.kind, found.reason) == ("throttled", "Kafka takes about 90 kB a second.")
    movement.end()
    assert problems.all() == []
