"""Live snapshots in small steps."""

from __future__ import annotations

import pytest

from airflow_bottledwater.live import reading


def read_by_single_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let each chunk of a live snapshot be one block of its table."""
    monkeypatch.setattr(reading, "_FIRST_BLOCKS", 1)
    monkeypatch.setattr(reading, "_MOST_BLOCKS", 1)
