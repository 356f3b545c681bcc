"""Requests for live snapshots in the shared state topic: how they are made and changed, and how a job hears them."""

from __future__ import annotations

import logging
import time
from dataclasses import replace
from typing import Any

from airflow_bottledwater.errors import StateError
from airflow_bottledwater.jobs.open_requests import UNKNOWN, OpenRequests
from airflow_bottledwater.pipeline.settings import Settings
from airflow_bottledwater.state import control_topic
from airflow_bottledwater.state.control_records import (
    SnapshotReport,
    SnapshotRequest,
    decode,
    encode,
    is_below,
    reading_key,
    snapshot_key,
    snapshots_prefix,
)
from airflow_bottledwater.state.pipeline_state import PipelineState
from airflow_bottledwater.state.records import LiveProgress

log = logging.getLogger(__name__)

#: seconds after which a report that nobody has removed is removed
_KEPT = 7 * 86400.0


class SnapshotRequests(OpenRequests[SnapshotRequest]):
    """Hears the requests for a pipeline's live snapshots."""

    def __init__(self, pipeline: Settings, name: str) -> None:
        super().__init__(pipeline, snapshots_prefix(name), SnapshotRequest)
        self._name = name

    @property
    def active(self) -> bool:
        """Whether there is one to be worked on."""
        return any(not request.paused for request in self.open.values())

    def _completed(self) -> None:
        """Answer those that this version does not know. Once, remove the reports on live snapshots that have ended long
        ago, and that nobody has waited for."""
        while self.unknown:
            # the report first, since whoever waits takes a request without one for cancelled
            request_id = self.unknown.pop()
            failed = encode(SnapshotReport("failed", error=UNKNOWN, at=time.time()))
            answer = {reading_key(self._name, request_id): failed, snapshot_key(self._name, request_id): None}
            self._topic.write(answer, wait=0)
        if self.complete:
            return
        super()._completed()
        prefix = reading_key(self._name, "")
        for key, raw in self._topic.known().items():
            report = decode(SnapshotReport, raw) if is_below(prefix, key) else None
            if report is not None and report.ended and time.time() - report.at > _KEPT:
                self._topic.write({key: None}, wait=0)


def ask(pipeline: Settings, name: str, request_id: str, request: SnapshotRequest) -> None:
    """Ask a pipeline's job, the one that runs or the next one, for a live snapshot.

    :param name: the pipeline's name, see :meth:`~airflow_bottledwater.model.slot.Cluster.pipeline`.
    :raises Outage: Kafka does not take the request.
    """
    control_topic.write(pipeline.kafka, {snapshot_key(name, request_id): encode(replace(request, at=time.time()))})


def failed_required(known: PipelineState) -> dict[str, LiveProgress]:
    """The live snapshots that have ended although their topics lack rows without them, as they are to be tried again."""
    failed = {each: progress for each, progress in known.lives.items() if progress.ended and progress.unfinished}
    for each, progress in failed.items():
        log.warning(
            "Live snapshot %s has not finished (%s). It is tried again: without it, its topics lack rows.",
            each,
            progress.error or progress.ended,
        )
    return {each: replace(progress, ended="", error="") for each, progress in failed.items()}


def ask_for_recorded(pipeline: Settings, name: str, known: PipelineState) -> None:
    """Ask for the live snapshots that the state knows and nobody asks for: those that were recorded together with their
    tables, whose topics lack rows until they have finished.

    :raises Outage: Kafka does not answer.
    """
    open_ones = {each: progress for each, progress in known.lives.items() if progress.required and not progress.ended}
    if not open_ones:
        return
    asked, requests = control_topic.read(pipeline.kafka), dict[str, dict[str, Any] | None]()
    for each, progress in open_ones.items():
        if (key := snapshot_key(name, each)) not in asked:
            tables = tuple(known.tables[oid].table.qualified for oid in progress.tables)
            requests[key] = encode(SnapshotRequest(tables, sweep=progress.sweep, at=time.time()))
    if requests:
        control_topic.write(pipeline.kafka, requests)


def change(pipeline: Settings, name: str, request_id: str, **changes: Any) -> None:
    """Change a request: pause it, go on with it, cancel it, or set other limits.

    :raises StateError: there is no such request, or it is answered already.
    :raises Outage: Kafka does not answer.
    """
    found = decode(SnapshotRequest, control_topic.read(pipeline.kafka).get(snapshot_key(name, request_id)))
    if found is None:
        raise StateError(
            f"There is no live snapshot {request_id!r} that could be changed.",
            "It has ended, or it is another pipeline's: see 'bottledwater snapshots'.",
        )
    key = snapshot_key(name, request_id)
    control_topic.write(pipeline.kafka, {key: encode(replace(found, **changes))})
    report = decode(SnapshotReport, control_topic.read(pipeline.kafka).get(reading_key(name, request_id)))
    if report is not None and report.ended:
        # its job has removed the request in this moment, and must not find it again
        control_topic.write(pipeline.kafka, {key: None})
        if changes.get("cancelled") and report.state == "cancelled":
            return  # the job was quick
        raise StateError(f"Live snapshot {request_id!r} has just ended.", "Its report is in 'bottledwater snapshots'.")


def reports(pipeline: Settings, name: str) -> dict[str, tuple[SnapshotRequest | None, SnapshotReport | None]]:
    """All live snapshots of a pipeline by their ids: the request, None if it is answered, and the last report, None if
    there is none.

    :raises Outage: Kafka does not answer.
    """
    records = control_topic.read(pipeline.kafka)
    requests, told = snapshots_prefix(name), reading_key(name, "")
    ids = {key.removeprefix(prefix) for prefix in (requests, told) for key in records if is_below(prefix, key)}
    return {
        each: (decode(SnapshotRequest, records.get(requests + each)), decode(SnapshotReport, records.get(told + each)))
        for each in sorted(ids)
    }


def forget(pipeline: Settings, name: str, request_id: str) -> None:
    """Remove the report on a live snapshot that has ended.

    :raises Outage: Kafka does not take it.
    """
    control_topic.write(pipeline.kafka, {reading_key(name, request_id): None})


def forget_all(pipeline: Settings, name: str) -> None:
    """Remove all requests for live snapshots of a pipeline, and the reports on them.

    :raises Outage: Kafka does not take it.
    """
    ids = reports(pipeline, name)
    keys = [key(name, each) for each in ids for key in (snapshot_key, reading_key)]
    control_topic.write(pipeline.kafka, dict.fromkeys(keys))
