"""How a stream starts, without servers."""

from __future__ import annotations

import contextlib
import threading
from typing import Any
from unittest.mock import Mock

import pytest

from airflow_bottledwater.backoff import Backoff
from airflow_bottledwater.errors import Outage, StopRequested
from airflow_bottledwater.model.lsn import Position
from airflow_bottledwater.model.slot import Cluster
from airflow_bottledwater.pipeline.settings import Settings
from airflow_bottledwater.spark import stream
from airflow_bottledwater.state.records import COMPLETE, POSITION, Complete, LiveProgress, Reached, live_key
from airflow_bottledwater.stream import start
from tests.unit.tables.test_plan import PIPELINE, A, B, keyless, known


def test_a_stop_ends_the_wait_for_a_kafka_that_takes_no_claim(monkeypatch: pytest.MonkeyPatch) -> None:
    stopped = threading.Event()

    def claim(pipeline: Settings, cluster: Cluster, kind: str, backoff: Backoff) -> Any:
        stopped.set()
        backoff.wait("The transaction coordinator does not answer.")
        raise Outage("It has waited on.")

    monkeypatch.setattr(start, "session", lambda *_: contextlib.nullcontext())
    monkeypatch.setattr(start, "check_primary", lambda *_: None)
    monkeypatch.setattr(start, "identify", lambda _: Cluster("1", 1, "d", 160000))
    monkeypatch.setattr(start, "Claim", claim)
    with pytest.raises(StopRequested):
        stream.begin(Settings.of(postgres="host=db"), stopped)


@pytest.mark.parametrize("ordinal", [0, 7])
def test_what_was_dropped_with_its_topic_is_let_go_of_at_the_start(ordinal: int) -> None:
    """A stream that has fallen behind, or does not run between two bounded runs, has no other moment for it."""
    cluster, state = Cluster("1", 1, "d", 160000), known(A, B, keyless(3, "log"))
    made_by = start.fingerprint(PIPELINE, state, cluster) if ordinal else None
    state.apply(
        {
            COMPLETE: Complete((1, 2, 3), False, 0.0),
            POSITION: Reached(50, ordinal, 0.0, made_by, 1, published=9),
            live_key("its"): LiveProgress((2,), required=True),
        }
    )
    start._let_go(PIPELINE, cluster, Mock(state=state, write=state.apply), {2, 3})
    assert set(state.tables) == {1} and state.complete and state.completed == [1]
    assert state.former == {"b", "log"} and not state.stopped and state.lives["its"].tables == ()
    assert state.position == Position(50, ordinal) and state.counters["published"] == 9
    start._check_fingerprint(PIPELINE, state, cluster)  # the next start is not refused for it
