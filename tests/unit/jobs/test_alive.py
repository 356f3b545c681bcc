from __future__ import annotations

import contextlib
import time
from types import SimpleNamespace
from typing import Any, cast

import pytest

from airflow_bottledwater.errors import Outage, StateError
from airflow_bottledwater.hooks import holder
from airflow_bottledwater.jobs import alive
from airflow_bottledwater.pipeline.settings import Settings


class _Topic:
    """A topic that answers whoever reads."""

    def __init__(self, *, writable: bool, status: Any = None) -> None:
        self.writable, self.answering, self.status = writable, 0.0, status

    def read_to_end(self) -> None:
        self.answering = self.answering or time.monotonic()

    def get(self, key: str) -> tuple[Any, float]:
        return self.status, 0.0 if self.status is None else time.monotonic()

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


def test_a_job_of_another_version_that_reports_is_not_taken_for_dead() -> None:
    topic = cast("Any", _Topic(writable=True, status={"state": ["of another version"]}))
    with pytest.raises(StateError, match="whether its job is alive is not known"):
        alive.next_status(topic, "1/d/s", 2.0)


def test_a_status_that_cannot_be_read_is_that_of_a_living_job_only_if_it_changes(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """So that nobody takes over from a job of another version, and a dead one blocks nothing."""
    monkeypatch.setattr(alive, "longest_silence", lambda _: 0.2)
    pipeline = Settings.of(postgres="host=db", format="json")
    shown = {"state": ["of another version"]}
    for topic, dead in ((_Topic(writable=True, status=shown), False), (_Topic(writable=True), True)):
        if dead:
            monkeypatch.setattr(topic, "get", lambda key: (shown, 0.0))
        shared = contextlib.nullcontext(topic)
        monkeypatch.setattr(holder, "ControlTopic", SimpleNamespace(of=lambda _, shared=shared: shared))
        if dead:
            assert holder.living(pipeline, "1/d/s") is None
        else:
            with pytest.raises(StateError, match="another version"):
                holder.living(pipeline, "1/d/s")
