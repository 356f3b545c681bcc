"""Whatever Kafka takes, in whatever time: a pipeline moves, or it is red with its reason within a minute."""

from __future__ import annotations

import random
import time
from collections.abc import Iterator, Sequence
from typing import Any

import pytest

from airflow_bottledwater.jobs import status
from airflow_bottledwater.kafka.publisher import RECORD_OVERHEAD
from tests.support.faults import ProxiedBroker
from tests.support.topics import Flow, MakeFlow, limit_records

pytestmark = pytest.mark.long

#: seconds within which it must have moved, or be red
_MINUTE = 60.0


@pytest.fixture
def flow_settings() -> dict[str, Any]:
    return {"on_error": "log", "lanes": 1, "heartbeat_interval": 1.0}


@pytest.fixture
def flow_statements() -> Sequence[str]:
    return ("CREATE TABLE a (id int PRIMARY KEY, t text)",)


class _Watch:
    """Asks again and again whether it moves or is red."""

    def __init__(self, flow: Flow) -> None:
        self._flow, self._last, self._good = flow, "", time.monotonic()
        self.reasons: set[str] = set()

    def look(self) -> None:
        report = status.report(self._flow.pipeline)
        problems = report.job.problems if report.job else []
        self.reasons |= {each.kind for each in problems}
        assert all(each.reason and each.since for each in problems)
        if problems or report.position != self._last:
            self._last, self._good = report.position, time.monotonic()
        assert time.monotonic() - self._good < _MINUTE, "it neither moves nor says why"


def _rates(seed: int) -> Iterator[tuple[int, float, int, int]]:
    """Bytes a second, time-out, bytes of a row, and how many rows: what a few seconds are enough for, or not."""
    chosen = random.Random(seed)
    while True:
        rate = int(10 ** chosen.uniform(3, 6))
        timeout = chosen.choice([1.0, 2.0, 5.0, 15.0])
        size = int(10 ** chosen.uniform(1, 5))
        total = min(2_000_000, rate * chosen.uniform(2, 15))
        yield rate, timeout, size, max(1, min(5_000, int(total / (size + 150))))


def test_every_rate_and_every_time_out_moves_or_is_red(
    seed: int, make_flow: MakeFlow, proxied: ProxiedBroker, record_property: Any
) -> None:
    rate, timeout, size, count = next(_rates(seed))
    chosen = random.Random(-seed)
    flow = make_flow(
        broker=proxied, skip_snapshot=True, transaction_timeout=timeout, batch_bytes=chosen.choice([1 << 16, 8 << 20])
    )
    flow.create()
    # one byte more or less than the records have, or far more
    limit = chosen.choice([size + RECORD_OVERHEAD + chosen.randint(-1, 1), 2_000_000])
    if limit > 20_000:
        limit_records(flow, "a", limit)
    rows = f"INSERT INTO a SELECT n, repeat('x', {size}) FROM generate_series({{}}, {{}}) n"
    half = count // 2
    flow.execute(rows.format(1, half), *(rows.format(n, n) for n in range(half + 1, min(count, half + 50) + 1)))
    whole = min(count, half + 50)
    flow.change(kafka={**proxied.proxied, "compression.type": "none"})
    watch = _Watch(flow)
    proxied.proxy.rate = rate
    try:
        with flow.streaming() as errors:
            deadline = time.monotonic() + 90
            while time.monotonic() < deadline and not errors:
                watch.look()
                counters = status.report(flow.pipeline).counters
                if counters.get("published", 0) + counters.get("dead_letters", 0) >= whole:
                    break
                time.sleep(1)
            proxied.proxy.rate = 0
            deadline = time.monotonic() + 120
            while time.monotonic() < deadline and not errors:
                watch.look()
                counters = status.report(flow.pipeline).counters
                if counters.get("published", 0) + counters.get("dead_letters", 0) >= whole:
                    break
                time.sleep(0.5)
            assert not errors
    finally:
        proxied.proxy.rate = 0
    record_property("met", f"{rate} B/s, {timeout} s, {whole} rows of {size}: {sorted(watch.reasons)}")
    found = [message.key["id"] for message in flow.read("a")]
    assert len(found) == len(set(found))
    assert len(found) + len(flow.dead_letters()) == whole
