"""How large transactions are made, by what Kafka has taken."""

from __future__ import annotations

import math

import pytest

from airflow_bottledwater.kafka.errors import TooSlow
from airflow_bottledwater.publish import pace as module
from airflow_bottledwater.publish.pace import Pace

MOST = 16 << 20


def _run(pace: Pace, rate: float, size: int, *, latency: float = 0.005, timeout: float = 60.0) -> bool:
    """Publish as much as is allowed of so many bytes, at a rate; returns whether it was committed."""
    published = min(size, pace.limit)
    seconds = latency + published / rate
    half = timeout / 2
    if seconds <= half:
        pace.committed(int(published), seconds)
        return True
    arrived = int(rate * half) // pace.request * pace.request
    pace.failed(TooSlow("slow", arrived, half))
    return False


@pytest.mark.parametrize("rate", [1_000, 3_000, 10_000, 100_000, 250_000])
def test_a_slow_kafka_commits_after_few_attempts_and_then_always(rate: int) -> None:
    pace = Pace(60.0, MOST)
    attempts = 0
    while not _run(pace, rate, 8 << 20):
        attempts += 1
    assert 1 <= attempts <= 3
    assert all(_run(pace, rate, 8 << 20) for _ in range(50))
    assert rate * 5 < pace.limit <= rate * 15.1
    assert "transaction_timeout (60 s)" in str(pace)
    assert "a second" in str(pace)


def test_a_kafka_that_is_fast_again_sets_no_limit_after_some_transactions() -> None:
    pace = Pace(60.0, MOST)
    while not _run(pace, 10_000, 8 << 20):
        pass
    assert pace.slow
    for _ in range(8):
        assert _run(pace, 50e6, 8 << 20)
    assert (pace.slow, pace.limit, pace.request, str(pace)) == (False, math.inf, 1_000_000, "")


def test_small_transactions_do_not_show_that_kafka_is_fast_but_time_does(monkeypatch: pytest.MonkeyPatch) -> None:
    pace = Pace(60.0, MOST)
    while not _run(pace, 100_000, 8 << 20):
        pass
    limit = pace.limit
    for _ in range(100):
        _run(pace, 100_000, 500)
    assert pace.limit == limit
    now = module.time.monotonic()
    monkeypatch.setattr(module.time, "monotonic", lambda: now + 301)
    _run(pace, 100_000, 500)
    assert not pace.slow


def test_a_transaction_that_was_committed_changes_nothing() -> None:
    pace = Pace(60.0, MOST)
    for size, seconds in ((0, 1.0), (10, 0.1), (16 << 20, 1.0), (8 << 20, 25.0)):
        pace.committed(size, seconds)
    assert not pace.slow


def test_an_outage_makes_requests_smaller_and_not_transactions() -> None:
    pace = Pace(60.0, MOST)
    pace.failed(TooSlow("4 MB were confirmed.", 4_000_000, 30.0))
    assert (pace.limit, pace.request, str(pace)) == (math.inf, 15_625, "4 MB were confirmed.")
    assert pace.slow
    pace.committed(16 << 20, 0.5)
    assert (pace.slow, pace.request) == (False, 1_000_000)
