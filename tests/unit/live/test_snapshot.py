"""What the thread that publishes tells the one that reads."""

from __future__ import annotations

import queue
from types import SimpleNamespace
from typing import Any, cast

import pytest

from airflow_bottledwater.live import snapshot
from airflow_bottledwater.state.pipeline_state import PipelineState
from airflow_bottledwater.state.records import LaterSchema, LiveProgress, schema_key
from tests.unit.tables.test_plan import A, known


def test_rows_are_compared_with_what_the_stream_has_published_since_the_reading_began(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def reader(_pipeline: object, _request: object, _progress: object, state: PipelineState) -> Any:
        return SimpleNamespace(error=None, chunks=queue.Queue(), later=state.later)

    monkeypatch.setattr(snapshot, "LiveReader", reader)
    monkeypatch.setattr(snapshot, "RowEncoder", lambda *_: None)
    state, topic = known(A), known(A).tables[A.oid].topic
    session = cast("Any", SimpleNamespace(state=state, index={topic: 0}))
    live = snapshot.LiveSnapshot(cast("Any", None), session, "r", cast("Any", None))
    assert not live.advance(LiveProgress((A.oid,))) and live.reading is not None and not live.reading.later
    state.apply({schema_key(A.oid, 9): LaterSchema(A, 9)})
    live.advance(LiveProgress((A.oid,)))
    assert live.reading.later == {A.oid: {9: A}}
