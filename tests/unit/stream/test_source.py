"""When an outage of the source counts as over."""

from __future__ import annotations

import time
from typing import Any

import pytest

from airflow_bottledwater.backoff import Backoff
from airflow_bottledwater.errors import Outage
from airflow_bottledwater.model.lsn import Position
from airflow_bottledwater.model.slot import SlotRecord
from airflow_bottledwater.pipeline.settings import Pipeline
from airflow_bottledwater.state.pipeline_state import PipelineState
from airflow_bottledwater.state.records import SLOT, encode
from airflow_bottledwater.stream import source


@pytest.mark.parametrize(("lasts", "unfinished"), [(True, False), (False, False), (True, True)])
def test_an_idle_server_begins_a_new_outage_if_its_session_has_lasted_since_the_one_before(
    monkeypatch: pytest.MonkeyPatch, lasts: bool, unfinished: bool
) -> None:
    """It sends no batch that would end it. One that always fails inside of the same transaction is another matter."""
    answers: list[Any] = [Outage("gone"), None, Outage("gone again"), None]

    def answer(self: source.ChangeSource, deadline: float, flush_empty: bool) -> None:
        self._connected = time.monotonic() - (source._LASTS + 1 if lasts else 1)
        if (error := answers.pop(0)) is not None:
            raise error

    monkeypatch.setattr(source.ChangeSource, "_next", answer)
    monkeypatch.setattr(source.TransactionAssembler, "unfinished", unfinished)
    record = SlotRecord("s", "7381", 1, "db", 0, 12)
    pipeline = Pipeline.of(postgres="dbname=none", format="json")
    changes = source.ChangeSource(pipeline, PipelineState({SLOT: encode(record)}), Position(1), Backoff(0.3))
    assert changes.next(0.1) is None
    time.sleep(0.4)
    if lasts and not unfinished:
        assert changes.next(0.1) is None
    else:
        with pytest.raises(Outage, match="gone again"):
            changes.next(0.1)
