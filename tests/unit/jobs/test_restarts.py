"""The policy of restarts: how often, after which pause, and when the count begins anew."""

from __future__ import annotations

import pytest

from airflow_bottledwater.jobs.restarts import RESTARTS, Restarts


def test_the_pauses_double_up_to_five_minutes() -> None:
    last, now, pauses = Restarts(at=100.0), 100.0, []
    for _ in range(RESTARTS):
        last = last.after("Outage", reached=None, now=now)
        pauses.append(last.pause)
        assert last.at == now + last.pause
        now = last.at + 1
    assert pauses == [2, 4, 8, 16, 32, 64, 128, 256, 300, 300]
    assert Restarts().pause == 0


@pytest.mark.parametrize(
    ("ran", "position", "reached", "published", "kind", "anew"),
    [
        (601, 5, 6, False, "Outage", True),
        (599, 5, 6, False, "Outage", False),
        (601, 5, 5, False, "Outage", False),
        # it only waited
        (601, None, 6, False, "Outage", False),
        # it took a snapshot, in which the slot stays where it is
        (601, 5, 5, True, "Outage", True),
        (599, 5, 5, True, "Outage", False),
        # its host was started again
        (601, 5, 5, False, "Interrupted", True),
        (599, 5, 5, False, "Interrupted", False),
    ],
)
def test_the_count_begins_anew_behind_a_job_that_worked_for_a_while(
    ran: float, position: int | None, reached: int, published: bool, kind: str, anew: bool
) -> None:
    last = Restarts(7, 1000.0, position)
    found = last.after(kind, reached=reached, now=1000.0 + ran, published=published)
    assert found.count == (1 if anew else 8)
    assert found.position == reached


def test_a_position_that_is_not_known_is_the_last_one() -> None:
    assert Restarts(1, 0.0, 5).after("Outage", reached=None, now=1.0).position == 5
