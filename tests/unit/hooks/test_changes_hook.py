"""What the hook makes of the records of a range."""

from __future__ import annotations

from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest

from airflow_bottledwater.hooks import changes
from airflow_bottledwater.hooks.changes import ChangesHook
from airflow_bottledwater.kafka import offsets, topics
from airflow_bottledwater.model.changes import ChangeRange, TopicRange

_POSITION, _LIVE = b"00000000016B3748/00000001", b"3f2a91c04d7e/0/16B3748"


def record(value: bytes | None, *headers: tuple[str, bytes]) -> SimpleNamespace:
    """A record of Kafka as confluent-kafka has it."""
    has = {"key": b"k", "value": value, "headers": list(headers) or None, "partition": 0, "offset": 0}
    return SimpleNamespace(**{name: lambda part=part: part for name, part in {**has, "timestamp": (1, 0)}.items()})


@pytest.mark.parametrize(
    ("found", "operation"),
    [
        (record(b"{}", ("op", b"c"), ("pos", _POSITION)), "c"),
        (record(None, ("op", b"d"), ("pos", _POSITION)), "d"),
        (record(b"{}"), "r"),
        (record(b"{}", ("op", b"r"), ("pos", b"0" * 16 + b"/" + b"0" * 8)), "r"),
        (record(b"{}", ("snapshot", _LIVE)), "r"),
        # of sweeps: with a live snapshot, with a snapshot, and the event in an envelope
        (record(None, ("snapshot", _LIVE)), "d"),
        (record(None), "d"),
        (record(b"{}", ("snapshot", _LIVE), ("op", b"d")), "d"),
    ],
)
def test_what_a_record_does_is_known_without_headers(
    monkeypatch: pytest.MonkeyPatch, found: SimpleNamespace, operation: str
) -> None:
    """A consumer deletes the row for a deletion, and otherwise writes it."""

    class Reader:
        def __init__(self, _: Any) -> None: ...
        def __enter__(self) -> Reader:
            return self

        def __exit__(self, *_: object) -> None: ...
        def check(self, *_: object) -> None: ...
        def read(self, *_: object) -> Iterator[SimpleNamespace]:
            yield found

    monkeypatch.setattr(offsets, "RangeReader", Reader)
    monkeypatch.setattr(topics.Topics, "describe", lambda *_, **__: {})
    monkeypatch.setattr(changes, "connection", lambda *_, **__: None)
    monkeypatch.setattr(changes, "properties", lambda _: {"bootstrap.servers": "none:1"})
    whole = ChangeRange("p", 0, 9, {"public.orders": TopicRange("orders", "id", (0,), (1,))})
    (change,) = ChangesHook().records(whole)
    assert change.operation == operation and (change.value is None or change.operation != "d" or change.snapshot)
