"""Watching a live snapshot from a task or a trigger, cancelling it, and letting live snapshots wait and go on."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable
from typing import Any

from airflow_bottledwater.errors import StateError
from airflow_bottledwater.hooks.pipeline import PipelineHook
from airflow_bottledwater.pipeline.settings import Settings
from airflow_bottledwater.state.control_records import (
    TAKEN_NOW,
    SnapshotReport,
    StatusRecord,
    decode,
    reading_key,
    snapshot_key,
    status_key,
)
from airflow_bottledwater.state.control_topic import ControlTopic

#: seconds between two lines in the task's log
_LOG_INTERVAL = 30.0


class BackfillWatch:
    """Watches one live snapshot, and passes its progress on as lines.

    :param name: the pipeline's name in the shared topic.
    :param write: called with lines for the task's log.
    """

    def __init__(self, pipeline: Settings, name: str, request_id: str, write: Callable[[str], None]) -> None:
        self._name, self._id, self._write = name, request_id, write
        self._shared = ControlTopic.of(pipeline.kafka)
        self._told, self._state = 0.0, ""

    def close(self) -> None:
        """End the watch."""
        self._shared.close()

    def fetch(self) -> dict[str, Any] | None:
        """The last report when the live snapshot has ended; None before that.

        :raises Outage: Kafka does not answer.
        """
        due = time.monotonic() - self._told > _LOG_INTERVAL
        # now and then make sure that Kafka answers: its silence could be taken for the live snapshot's
        raw, _ = self._shared.get(reading_key(self._name, self._id), now=due)
        report = decode(SnapshotReport, raw)
        if due and self._shared.get(snapshot_key(self._name, self._id))[0] is None:
            # it was answered in this moment, or removed
            raw, _ = self._shared.get(reading_key(self._name, self._id), now=True)
            report = decode(SnapshotReport, raw)
            if report is None or not report.ended:
                return dataclasses.asdict(SnapshotReport.removed())
        if report is not None and report.ended:
            return dataclasses.asdict(report)
        state = report.state if report is not None else ""
        if due or state != self._state:
            self._state, self._told = state, time.monotonic()
            self._write(self._line(report))
        return None

    def _line(self, report: SnapshotReport | None) -> str:
        status = decode(StatusRecord, self._shared.get(status_key(self._name))[0])
        if status is None or status.ended:
            return (
                "No job of the pipeline runs: the live snapshot waits for the next one, continuous or bounded. "
                f"{TAKEN_NOW}"
            )
        if report is None:
            return f"The job on host {status.job.host} has not begun yet; a few live snapshots are read at a time."
        left = f", {report.bytes / 1e6:,.1f} of {report.total_bytes / 1e6:,.1f} MB" if report.total_bytes else ""
        left += "" if report.seconds_left is None else f", about {report.seconds_left:,.0f} s left"
        pace = f" ({report.rows_per_second:,.0f} a second)" if report.rows_per_second else ""
        waits = f"; it waits for {report.what}" if report.what else ""
        return f"{report.state.capitalize()}: {report.rows:,} rows{pace}{left}{waits}."


def cancel(pipeline: Settings, name: str, request_id: str) -> None:
    """Cancel a live snapshot, unless it has ended.

    :raises Outage: Kafka does not answer.
    """
    # imported here, since it imports confluent-kafka, which a DAG processor does not need
    from airflow_bottledwater.jobs import snapshots

    try:
        snapshots.change(pipeline, name, request_id, cancelled=True)
    except StateError:
        return  # it has ended


class BackfillHook(PipelineHook):
    """Lets the live snapshots of a pipeline wait, and go on, whoever has asked for them: an operator, or the command.

    :param slot: name of the replication slot; it names the pipeline.
    :param postgres_conn_id: the pipeline's connection of type Postgres.
    :param kafka_conn_id: the pipeline's connection of type Apache Kafka.
    """

    def __init__(
        self,
        slot: str = "bottledwater",
        postgres_conn_id: str = "postgres_default",
        kafka_conn_id: str = "kafka_default",
    ) -> None:
        # nothing is encoded here, so that no registry is needed
        super().__init__(postgres_conn_id, kafka_conn_id, None, {"slot": slot, "format": "json"})

    def pause(self, request_id: str = "") -> list[str]:
        """Let live snapshots wait; what they have published stays. Returns the ids of those that wait now.

        :param request_id: which one (its id is in the log of the task that has asked for it); empty for all.
        :raises StateError: it has ended, or there is none with this id.
        :raises Outage: the source or Kafka does not answer.
        """
        return self._change(request_id, paused=True)

    def resume(self, request_id: str = "") -> list[str]:
        """Let live snapshots go on, like :meth:`pause`; returns their ids."""
        return self._change(request_id, paused=False)

    def _change(self, request_id: str, *, paused: bool) -> list[str]:
        from airflow_bottledwater.jobs import snapshots
        from airflow_bottledwater.provision import live

        pipeline = self.pipeline()
        name = live.name_of(pipeline)
        if request_id:
            snapshots.change(pipeline, name, request_id, paused=paused)
            return [request_id]
        changed = []
        for each, (request, _) in snapshots.reports(pipeline, name).items():
            if request is None or request.paused == paused:
                continue
            try:
                snapshots.change(pipeline, name, each, paused=paused)
            except StateError:
                continue  # it has ended in this moment
            changed.append(each)
        return changed
