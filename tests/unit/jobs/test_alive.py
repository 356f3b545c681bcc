from __future__ import annotations

import time
from typing import Any, cast

import pytest

from airflow_bottledwater.errors import Outage
from airflow_bottledwater.jobs import alive


class _Topic:
    """A topic that answers whoever reads."""

    def __init__(self, *, writable: bool) -> None:
        self.writable, self.answering = writable, 0.0

    def read_to_end(self) -> None:
        self.answering = self.answering or time.monotonic()

    def get(self, key: str) -> tuple[None, float]:
        return None, 0.0

    def probe(self) -> None:
        if not self.writable:
            raise Outage("Kafka does not take our status records.")


@pytest.mark.parametrize("writable", [True, False])
def test_a_job_is_not_dead_while_kafka_takes_no_heartbeats(monkeypatch: pytest.MonkeyPatch, writable: bool) -> None:
    monkeypatch.setattr(alive, "longest_silence", lambda _: 0.2)
    topic = cast("Any", _Topic(writable=writable))
    if writable:
        assert alive.next_status(topic, "1/d/s", 2.0) is None
    else:
        with pytest.raises(Outage, match="not take"):
            alive.next_status(topic, "1/d/s", 2.0)
