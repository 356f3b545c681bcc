"""How a task that is not deferred looks again and again."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from airflow_bottledwater.errors import CredentialsRefused, Outage, Refused
from airflow_bottledwater.operators import watching
from airflow_bottledwater.operators.watching import BlockingWatch


class Watch:
    """A watch that sees what it is told to."""

    def __init__(self, *seen: Any) -> None:
        self.seen, self.closed = list(seen), 0

    def fetch(self) -> Any:
        found = self.seen.pop(0)
        if isinstance(found, Exception):
            raise found
        return found

    def close(self) -> None:
        self.closed += 1


def test_an_outage_that_lasts_begins_the_watch_anew(monkeypatch: pytest.MonkeyPatch) -> None:
    """Kafka may have another address now, which only the connection knows."""
    now = [1000.0]
    monkeypatch.setattr(watching, "time", SimpleNamespace(monotonic=lambda: now[0]))
    away = Outage("away")
    first, second = Watch(away, None, away, away), Watch("the end")
    begun = [first, second]
    with BlockingWatch(lambda: begun.pop(0), "The job") as watch:
        for expected in (None, None, None, None, "the end"):
            assert watch.fetch() == expected
            now[0] += 30
    assert (first.closed, second.closed) == (1, 1)


def test_an_outage_does_not_end_the_watch_and_other_credentials_begin_it_anew() -> None:
    first, second = Watch(None, Outage("away"), CredentialsRefused("refused")), Watch(Refused("denied"))
    third = Watch("the end")
    begun: list[Any] = [first, Outage("Airflow does not answer"), second, Refused("no connection"), third]

    def begin() -> Watch:
        watch = begun.pop(0)
        if isinstance(watch, Exception):
            raise watch
        return watch  # type: ignore[no-any-return]

    with BlockingWatch(begin, "The job") as watch:
        assert [watch.fetch() for _ in range(7)] == [None] * 6 + ["the end"]
        assert (first.closed, second.closed, third.closed) == (1, 1, 0)
    assert third.closed == 1
