"""The publisher that a worker keeps between batches."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from airflow_bottledwater.spark import source
from airflow_bottledwater.stream import publisher


class _Publisher:
    """Knows whether it is closed."""

    open: list[_Publisher] = []

    def __init__(self, *_: object) -> None:
        self.open.append(self)
        self.live = SimpleNamespace(work=lambda: None)
        self.position = 0

    def reached(self) -> None:
        """Do nothing."""

    def close(self) -> None:
        """Note it."""
        self.open.remove(self)


def test_a_worker_closes_its_publisher_when_another_job_begins(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(publisher, "StreamPublisher", _Publisher)
    monkeypatch.setattr(source, "_settings", lambda assignment: (None, None))
    monkeypatch.setattr(source, "_publisher", None)
    for job in ("first", "first", "second", "third"):
        assignment: Any = SimpleNamespace(start=SimpleNamespace(job=SimpleNamespace(id=job)))
        source._publish(assignment, None)
        assert len(_Publisher.open) == 1
