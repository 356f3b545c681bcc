"""How a stream starts, without servers."""

from __future__ import annotations

import contextlib
import threading
from typing import Any

import pytest

from airflow_bottledwater.backoff import Backoff
from airflow_bottledwater.errors import Outage, StopRequested
from airflow_bottledwater.model.slot import Cluster
from airflow_bottledwater.pipeline.settings import Settings
from airflow_bottledwater.spark import stream
from airflow_bottledwater.stream import start


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
