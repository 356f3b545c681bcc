"""Runs a pipeline's work in this process, without a JVM."""

from __future__ import annotations

import logging
import threading
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from unittest import mock

from airflow_bottledwater.backoff import stoppable
from airflow_bottledwater.errors import BeginsAnew
from airflow_bottledwater.pipeline.settings import Settings
from airflow_bottledwater.publish.encode import EncodedBatch
from airflow_bottledwater.snapshot import lane
from airflow_bottledwater.snapshot.driver import RunLanes
from airflow_bottledwater.snapshot.task import LaneTask
from airflow_bottledwater.stream import engine
from airflow_bottledwater.stream.publisher import StreamPublisher
from airflow_bottledwater.stream.start import begin

log = logging.getLogger(__name__)


def run_stream(pipeline: Settings, *, bounded: bool = False, stopped: threading.Event | None = None) -> dict[str, int]:
    """Claim the slot and stream, as the Spark job does; returns the counters.

    :param bounded: whether to end once everything is published that the server had flushed to WAL at the start, instead
        of running until stopped.
    """
    while True:
        with stoppable(stopped):
            start = begin(pipeline)
        try:
            return engine.follow(pipeline, start, bounded=bounded, stopped=stopped)
        except BeginsAnew as changed:
            log.info("%s", changed)


def stop_inside(pipeline: Settings) -> None:
    """Stream until a part of a large transaction is published."""
    stopped, send = threading.Event(), StreamPublisher._send

    def once(publisher: StreamPublisher, encoded: EncodedBatch) -> None:
        send(publisher, encoded)
        if encoded.batch.end.ordinal:
            stopped.set()

    with mock.patch.object(StreamPublisher, "_send", once):
        run_stream(pipeline, stopped=stopped)


def in_threads(pipeline: Settings) -> RunLanes:
    """Runs a snapshot's lanes as threads."""

    def run_lanes(tasks: Sequence[LaneTask]) -> list[dict[str, int]]:
        with ThreadPoolExecutor(max_workers=max(1, len(tasks))) as pool:
            return list(pool.map(lambda task: lane.run(pipeline, task), tasks))

    return run_lanes
