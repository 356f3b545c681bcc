"""A live snapshot is read no faster than its request allows."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from airflow_bottledwater.live import reading
from airflow_bottledwater.live.reading import LiveReader
from airflow_bottledwater.state.control_records import SnapshotRequest

#: a chunk of 100 rows with 8000 bytes
CHUNK = [SimpleNamespace(count=60, data=b"x" * 5000), SimpleNamespace(count=40, data=b"x" * 3000)]


class Paced:
    """A reading without its thread, by a clock of its own."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, **limits: float) -> None:
        self.now = 100.0
        monkeypatch.setattr(reading, "time", SimpleNamespace(monotonic=lambda: self.now))
        monkeypatch.setattr(reading, "pause", self.wait)
        self.reading = LiveReader.__new__(LiveReader)
        self.reading._request, self.reading._due, self.reading._blocks = SnapshotRequest(("a",), **limits), self.now, 64  # type: ignore[arg-type]

    def wait(self, seconds: float) -> None:
        self.now += seconds

    def read(self, chunks: int, *, takes: float = 0.0) -> float:
        """Read so many chunks; returns the seconds that it took."""
        began = self.now
        for _ in range(chunks):
            self.now += takes
            self.reading._pace(CHUNK)  # type: ignore[arg-type]
        return self.now - began


@pytest.mark.parametrize(
    ("limits", "seconds"),
    [
        ({"rows_per_second": 200.0}, 5.0),
        ({"bytes_per_second": 16_000.0}, 5.0),
        ({"rows_per_second": 200.0, "bytes_per_second": 4_000.0}, 20.0),
        ({"rows_per_second": 50.0, "bytes_per_second": 16_000.0}, 20.0),
        ({}, 0.0),
    ],
)
def test_the_pace_is_the_limit(monkeypatch: pytest.MonkeyPatch, limits: dict[str, float], seconds: float) -> None:
    assert Paced(monkeypatch, **limits).read(10) == pytest.approx(seconds)


def test_reading_counts_and_a_pause_is_not_made_up_for(monkeypatch: pytest.MonkeyPatch) -> None:
    paced = Paced(monkeypatch, rows_per_second=200.0)
    assert paced.read(10, takes=0.3) == pytest.approx(5.0)
    paced.wait(3600.0)
    # but for a second
    assert paced.read(10) >= 4.0 - 1e-6


def test_a_chunk_becomes_as_small_as_the_limit_is(monkeypatch: pytest.MonkeyPatch) -> None:
    paced = Paced(monkeypatch, bytes_per_second=1000.0)
    paced.read(1)
    assert paced.reading._blocks == 8
