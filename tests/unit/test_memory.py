"""Memory that processes give back while they rest."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from airflow_bottledwater import memory
from airflow_bottledwater.memory import Rest


def _resident() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * 4096


def test_memory_is_given_back_once_whenever_something_begins_to_rest(monkeypatch: pytest.MonkeyPatch) -> None:
    now, calls = [100.0], []
    monkeypatch.setattr(memory.time, "monotonic", lambda: now[0])
    monkeypatch.setattr(memory, "give_back", lambda: calls.append(now[0]))
    rest = Rest()
    for seconds, worked in (
        (1, True),
        (3, False),
        (3, False),
        (3, False),
        (60, False),
        (1, True),
        (4, False),
        (2, False),
    ):
        now[0] += seconds
        rest.note(worked=worked)
    assert calls == [107.0, 177.0]


def test_freed_memory_goes_back_to_the_kernel() -> None:
    # below the size from which malloc takes memory from the kernel, and gives it back, by itself
    pieces = [np.ones(100_000, dtype=np.uint8) for _ in range(600)]
    kept = pieces[::2]
    del pieces
    before = _resident()
    memory.give_back()
    assert before - _resident() > 20_000_000
    assert all(piece[0] == 1 for piece in kept)
