"""The stream's whole path in one process, without a JVM: what Spark's stream job is a shell around, and tests use."""

from __future__ import annotations

import functools
import logging
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from airflow_bottledwater.backoff import Backoff
from airflow_bottledwater.errors import (
    BottledWaterError,
    CredentialsRefused,
    Interrupted,
    Outage,
    Refused,
    StateError,
    StopRequested,
)
from airflow_bottledwater.model.lsn import Position
from airflow_bottledwater.model.slot import Cluster
from airflow_bottledwater.model.stop import interruption
from airflow_bottledwater.policy import transient
from airflow_bottledwater.postgres import publication, slot
from airflow_bottledwater.postgres.connect import end_of_wal, identify, session, stoppable
from airflow_bottledwater.postgres.replication import ReplicationStream
from airflow_bottledwater.publish.delivery import StreamPublisher
from airflow_bottledwater.settings import Pipeline
from airflow_bottledwater.state import coverage
from airflow_bottledwater.state.claim import Claim, reached
from airflow_bottledwater.state.control import Controller
from airflow_bottledwater.state.identity import check_slot, check_topics
from airflow_bottledwater.state.records import COVERAGE, POSITION, Job, Pin, PipelineState, pins, stream_id
from airflow_bottledwater.stream.source import ChangeSource

log = logging.getLogger(__name__)

#: seconds between two lines of the log that say where the stream is
_TELL = 10.0


@dataclass(frozen=True, slots=True)
class Start:
    """A claimed stream, ready to run.

    :param position: P, or A where nothing was streamed yet.
    """

    cluster: Cluster
    job: Job
    prefix: str
    state_topic: str
    state: PipelineState
    position: Position

    @property
    def topics(self) -> dict[str, Pin]:
        """The data topics as they were pinned."""
        return pins(self.state.tables.values())


def begin(pipeline: Pipeline) -> Start:
    """Claim the slot and check that the stream may go on from where the state says.

    :raises StateError: the snapshot is not complete, or facts are missing.
    :raises SlotError: the slot is not the one that the state describes.
    """
    with session(pipeline.postgres, "Starting the stream") as connection:
        cluster = identify(connection)
        claim = Claim(pipeline, cluster, "stream", Backoff(pipeline.outage_timeout))
        try:
            known = claim.state
            record = known.slot
            if record is None:
                raise StateError(
                    f"The state topic {claim.topic!r} does not know slot {pipeline.slot!r}.",
                    "Create it first; if its facts were lost, drop the slot and start again with a snapshot.",
                )
            if not known.complete:
                raise StateError(
                    f"The snapshot of slot {pipeline.slot!r} is not complete.",
                    "Run the snapshot (it resumes), then the stream.",
                )
            position = known.position or Position(record.consistent_point)
            check_slot(slot.state(connection, record.name), record, cluster, position, end_of_wal(connection))
            _check_fingerprint(known, cluster)
            coverage.check(connection, pipeline, known)
            if known.coverage is None:
                # made by a version that did not record it: from now on it is known
                claim.write({COVERAGE: coverage.today(connection, pipeline, known).to_json()})
            check_topics(pipeline, known)
            claim.record_ids([stream_id(claim.prefix)])
            return Start(cluster, claim.job, claim.prefix, claim.topic, claim.state, position)
        finally:
            claim.close()


def _check_fingerprint(known: PipelineState, cluster: Cluster) -> None:
    """Inside a transaction, ordinals mean the same only if the server would send the same changes again."""
    stored = known.facts.get(POSITION, {})
    if stored.get("ordinal") and stored.get("fingerprint", fingerprint(known, cluster)) != fingerprint(known, cluster):
        raise Refused(
            "The stream stopped inside a large transaction, and since then the tables or the server's version changed: it cannot be "
            "continued there.",
            "Drop the slot (bottledwater drop-slot --when always) and start again with a snapshot.",
        )


def fingerprint(known: PipelineState, cluster: Cluster) -> str:
    """Of what decides which changes a transaction has."""
    return f"{cluster.version // 10000}:{','.join(map(str, sorted(known.tables)))}"


@contextmanager
def reported(pipeline: Pipeline, start: Start, stopped: threading.Event | None = None) -> Iterator[Controller]:
    """A controller around a stream's work: heartbeats while it runs, its end as the last status.

    :param stopped: also set when the controller is asked to stop.
    :raises Outage: instead of refused credentials: the claim was made with the same, so they were changed since; submitted
        again, the job has those of today.
    """
    controller = Controller(pipeline, start.cluster, start.job)
    if stopped is not None:
        controller.stopped = stopped
    controller.status.state = "streaming"
    controller.status.position = str(start.position)
    controller.start()
    try:
        yield controller
    except StopRequested:
        _finish_stopped(controller)
    except CredentialsRefused as error:
        changed = Outage(
            f"{error.what} The job had worked with these credentials: they were changed since.",
            "Start it again with the new ones (Airflow submits it again with those of its connections).",
        )
        controller.finish("failed", changed, permanent=False)
        raise changed from error
    except BaseException as error:
        controller.finish("failed", error, permanent=not transient(error))
        raise
    else:
        if controller.stopped.is_set():
            _finish_stopped(controller)
        else:
            controller.finish("finished")


def _finish_stopped(controller: Controller) -> None:
    """A stop that was asked for is an outcome of its own; a signal from outside is a failure that passes."""
    error = Interrupted(controller.interrupted) if controller.interrupted else interruption(controller.stopped)
    if error is None:
        controller.finish("stopped")
    else:
        controller.finish("failed", error, permanent=False)


def run(pipeline: Pipeline, *, bounded: bool = False, stopped: threading.Event | None = None) -> dict[str, int]:
    """Stream until stopped, or until now; returns the counters.

    :param bounded: end when everything is published that the server had flushed at the start.
    """
    with stoppable(stopped):
        start = begin(pipeline)
    return follow(pipeline, start, bounded=bounded, stopped=stopped)


def follow(
    pipeline: Pipeline, start: Start, *, bounded: bool = False, stopped: threading.Event | None = None
) -> dict[str, int]:
    """The same with a claimed stream: from where the state says that it is, which may be further than at the claim (an
    attempt before this one)."""
    stopped = stopped or threading.Event()
    with reported(pipeline, start, stopped) as controller, stoppable(stopped):
        backoff = Backoff(pipeline.outage_timeout if pipeline.on_error == "exit" else None, stopped)
        publisher = StreamPublisher(
            pipeline,
            start.job,
            start.prefix,
            start.state_topic,
            start.topics,
            backoff,
            fingerprint(start.state, start.cluster),
        )
        source: ChangeSource | None = None
        watch = coverage.CoverageWatch(pipeline, start.state)
        told = 0.0
        try:
            position = publisher.reached() or start.position
            source = ChangeSource(
                pipeline,
                start.state,
                position,
                backoff,
                functools.partial(reached, pipeline, start.state_topic, start.job),
            )
            target = source.flush_target() if bounded else None
            while not stopped.is_set() and (target is None or position.lsn < target):
                batch = source.next(0.2, hurry=bounded)
                watch.check()
                if batch is None:
                    continue
                position = publisher.publish(batch)
                source.acknowledge(position)
                controller.status.position = str(position)
                controller.status.counters = {**publisher.counters, **source.statistics}
                controller.status.progress = {
                    "skipped_by_table": source.skipped_by_table,
                    "not_followed": watch.unfollowed,
                }
                if time.monotonic() - told > _TELL:
                    told = time.monotonic()
                    log.info("At %s: %s", position, controller.status.counters)
        finally:
            watch.close()
            publisher.close()
            if source is not None:
                source.close()
    return {} if source is None else {**publisher.counters, **source.statistics}


def acknowledge(pipeline: Pipeline, known: PipelineState) -> None:
    """Confirm P to PostgreSQL after a run whose connection is already gone; failing to is harmless (the next run does it)."""
    record, position = known.slot, known.position
    if record is None or position is None or position.ordinal:
        return
    try:
        with session(
            pipeline.postgres, "Confirming the position", application="bottledwater acknowledge"
        ) as connection:
            slot.wait_free(connection, record.name, timeout=10)
        stream = ReplicationStream(
            pipeline.postgres,
            record.name,
            publication.names(pipeline.publication_name),
            position.lsn,
            buffer_bytes=1 << 20,
        )
        stream.acknowledge(position.lsn)
        stream.close()
    except BottledWaterError as error:
        log.info("P was not confirmed to PostgreSQL (%s); the next run does it.", error)
