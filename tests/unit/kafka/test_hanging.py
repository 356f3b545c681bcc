"""What an outage has left open is ended, and nobody else's transaction is waited for."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from types import SimpleNamespace
from typing import Any, cast

import pytest

from airflow_bottledwater.kafka import hanging


class Broker:
    """A topic with a transaction in its second partition, which ends after some looks.

    :param ends_after: looks; 0 for never.
    """

    def __init__(self, monkeypatch: pytest.MonkeyPatch, *, ends_after: int = 0) -> None:
        self.left, self.now = ends_after or 10**9, 0.0
        self.sent: list[tuple[str, list[str], list[int]]] = []
        monkeypatch.setattr(hanging, "TransactionalProducer", self.producer)
        monkeypatch.setattr(hanging, "_records", lambda config, places: [_message(each.partition) for each in places])
        monkeypatch.setattr(hanging, "time", SimpleNamespace(monotonic=lambda: self.now, sleep=self.sleep))

    def all_ends(self, topics: Mapping[str, int], *, committed: bool = False) -> dict[str, list[int]]:
        self.left -= committed
        return {name: [9, 2 if committed and self.left >= 0 else 5] for name in topics}

    def sleep(self, seconds: float) -> None:
        self.now += seconds

    def producer(self, config: Any, transactional_id: str, topics: list[str], **_: Any) -> Any:
        def attempt(messages: Sequence[Any]) -> None:
            self.sent.append((transactional_id, topics, [each.partition for each in messages]))

        return SimpleNamespace(open=lambda: None, close=lambda: None, attempt=attempt)


def _message(partition: int) -> Any:
    values = {"topic": "a", "key": b"k", "value": b"v", "timestamp": (1, 2), "headers": None, "partition": partition}
    return SimpleNamespace(**{name: lambda value=value: value for name, value in values.items()})


def _release(broker: Broker) -> bool:
    return hanging.release(
        {}, ["one", "two"], {"a": 2}, admin=cast("Any", broker), transaction_timeout=60.0, waiting=lambda what: None
    )


def test_each_id_ends_what_stays_open(monkeypatch: pytest.MonkeyPatch) -> None:
    broker = Broker(monkeypatch)
    assert _release(broker)
    assert broker.sent == [("one", ["a"], [1]), ("two", ["a"], [1])]


def test_what_ends_in_a_moment_is_left_to_who_has_begun_it(monkeypatch: pytest.MonkeyPatch) -> None:
    broker = Broker(monkeypatch, ends_after=3)
    assert not _release(broker)
    assert not broker.sent
