"""How a position is searched in a topic."""

from __future__ import annotations

import time
from types import SimpleNamespace
from typing import Any

import pytest
from confluent_kafka import KafkaError, KafkaException, TopicPartition

from airflow_bottledwater.errors import Outage
from airflow_bottledwater.kafka import offsets
from airflow_bottledwater.kafka.offsets import OffsetSearch, RangeReader
from airflow_bottledwater.model.lsn import Position


class Log:
    """A consumer of a log of changes.

    :param changes: their LSNs by offset.
    :param silent: how often nothing comes before the first record.
    :param away: whether the broker does not answer.
    :param stable: the offset before which no transaction is open; None for the end.
    """

    def __init__(
        self, changes: dict[int, int], *, silent: int = 0, away: bool = False, stable: int | None = None
    ) -> None:
        self.changes, self.silent, self.away, self.stable = changes, silent, away, stable
        self.looks = list[int]()

    def assign(self, places: list[TopicPartition]) -> None:
        self.looks.append(places[0].offset)

    def poll(self, timeout: float) -> Any:
        if self.silent > 0:
            self.silent -= 1
            time.sleep(0.02)
            return None
        found = min(offset for offset in self.changes if offset >= self.looks[-1])
        headers = [("pos", str(Position(self.changes[found], 1)).encode())]
        return SimpleNamespace(error=lambda: None, partition=lambda: 0, offset=lambda: found, headers=lambda: headers)

    def consume(self, *_: object) -> list[Any]:
        return []

    def get_watermark_offsets(self, *_: object, timeout: float) -> tuple[int, int]:
        if self.away:
            raise KafkaException(KafkaError(KafkaError._TRANSPORT))
        return 0, max(self.changes) + 1 if self.stable is None else self.stable

    def close(self) -> None:
        pass


@pytest.fixture
def search(monkeypatch: pytest.MonkeyPatch) -> OffsetSearch:
    monkeypatch.setattr(offsets, "_SILENCE", 0.01)
    return OffsetSearch({"bootstrap.servers": "nowhere:1"})


def test_a_stretch_of_markers_is_no_outage(search: OffsetSearch, monkeypatch: pytest.MonkeyPatch) -> None:
    """A consumer tells nothing of the markers that compaction has left of transactions."""
    search._consumer = Log({5: 100, 9: 200}, silent=3)  # type: ignore[assignment]
    assert search.find("t", 0, 0, 10, 150) == 9
    search._consumer = Log({5: 100, 9: 200}, silent=3, away=True)  # type: ignore[assignment]
    with pytest.raises(Outage):
        search.find("t", 0, 0, 10, 150)
    monkeypatch.setattr(offsets, "_MARKERS", 0.0)
    search._consumer = Log({5: 100, 9: 200}, silent=3)  # type: ignore[assignment]
    with pytest.raises(Outage, match="gives no more records"):
        search.find("t", 0, 0, 10, 150)


def test_a_stretch_of_markers_in_a_range_is_no_outage(monkeypatch: pytest.MonkeyPatch) -> None:
    """An open transaction is one: the records behind it are not to be had."""
    monkeypatch.setattr(offsets, "_SILENCE", 0.01)
    reader = RangeReader({"bootstrap.servers": "nowhere:1"})
    reader._consumer = Log({9: 200}, silent=3)  # type: ignore[assignment]
    assert [message.offset() for message in reader.read("t", {0: 0}, {0: 10})] == [9]
    for log in (Log({9: 200}, silent=3, away=True), Log({9: 200}, silent=3, stable=7)):
        reader._consumer = log  # type: ignore[assignment]
        with pytest.raises(Outage):
            list(reader._heard("t", 0, 10, time.monotonic() + 60))


def test_a_stretch_of_markers_is_read_few_times(search: OffsetSearch) -> None:
    """Each look into it reads it to its end."""
    behind = {offset: offset for offset in range(3_000_000, 3_000_100)}
    search._consumer = log = Log({7: 100, **behind})  # type: ignore[assignment]
    assert search.find("t", 0, 0, 3_000_100, 500) == 3_000_000
    assert sum(7 < look < 2_900_000 for look in log.looks) < 8


@pytest.mark.parametrize("gap", [1, 2, 7])
def test_the_first_change_at_a_position_is_found(search: OffsetSearch, gap: int) -> None:
    changes = {offset: 10 * offset for offset in range(3, 300, gap)}
    for lsn in (0, 30, 31, 1234, 2970, 5000):
        search._consumer = Log({**changes, 10_000: 10_000_000})  # type: ignore[assignment]
        expected = min((offset for offset in changes if changes[offset] >= lsn), default=300)
        assert search.find("t", 0, 0, 300, lsn) == expected
