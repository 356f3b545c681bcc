"""Who says how many dead letters are open, when their settling has ended."""

from __future__ import annotations

import contextlib
from typing import Any
from unittest.mock import MagicMock

import pytest

from airflow_bottledwater.errors import BottledWaterError, Outage, TakenOver
from airflow_bottledwater.provision import redrive


@pytest.mark.parametrize(
    ("error", "told"), [(None, 1), (Outage("Kafka is away."), 1), (TakenOver("Another job has the slot."), 0)]
)
def test_the_status_of_a_job_that_has_taken_the_slot_over_is_left_alone(
    monkeypatch: pytest.MonkeyPatch, error: BottledWaterError | None, told: int
) -> None:
    settled: list[Any] = []
    for name in ("_claimed", "PublishSession", "ToastResolver", "pins", "stream_id"):
        monkeypatch.setattr(redrive, name, MagicMock())
    monkeypatch.setattr(redrive, "_Letters", lambda *of: MagicMock(redrive=MagicMock(side_effect=error)))
    monkeypatch.setattr(redrive, "_tell", lambda *of: settled.append(of))
    redrive._claimed.return_value.__exit__.return_value = False  # type: ignore[attr-defined]
    with pytest.raises(type(error)) if error else contextlib.nullcontext():
        redrive.redrive(MagicMock())
    assert len(settled) == told
