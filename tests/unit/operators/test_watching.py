"""How a task that is not deferred looks again and again."""

from __future__ import annotations

from typing import Any

from airflow_bottledwater.errors import CredentialsRefused, Outage, Refused
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


def test_an_outage_does_not_end_the_watch_and_other_credentials_begin_it_anew() -> None:
    first, second = Watch(None, Outage("away"), CredentialsRefused("refused")), Watch(Refused("denied"))
    third = Watch("the end")
    begun: list[Any] = [first, Outage("Airflow does not answer"), second, Refused("no connection"), third]

    def begin() -> Watch:
        watch = begun.pop(0)
        if isinstance(watch, Exception):
            raise watch
        return watch  # type: ignore[no-any-return]

    with BlockingWatch(begin, "The job") as watching:
        assert [watching.fetch() for _ in range(7)] == [None] * 6 + ["the end"]
        assert (first.closed, second.closed, third.closed) == (1, 1, 0)
    assert third.closed == 1
