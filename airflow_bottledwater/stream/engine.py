"""The stream's whole path in one process, without a JVM; the Spark job is a thin wrapper around it."""

from __future__ import annotations

import contextlib
import logging
import math
import threading
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager

from airflow_bottledwater.backoff import Backoff
from airflow_bottledwater.errors import (
    CredentialsRefused,
    StopRequested,
    TablesChanged,
    TakenOver,
    rotated,
)
from airflow_bottledwater.memory import Rest
from airflow_bottledwater.model.lsn import Position, parse_lsn
from airflow_bottledwater.policy import transient
from airflow_bottledwater.postgres.connect import session, stoppable
from airflow_bottledwater.settings import Pipeline
from airflow_bottledwater.state import letters
from airflow_bottledwater.state.control import Controller
from airflow_bottledwater.state.coverage import CoverageWatch
from airflow_bottledwater.state.schemas import SchemaWatch
from airflow_bottledwater.stream.publisher import StreamPublisher
from airflow_bottledwater.stream.source import open_source
from airflow_bottledwater.stream.start import Start

log = logging.getLogger(__name__)

#: seconds to wait for changes: while nothing else is to be done, and beside a live snapshot
_IDLE, _BESIDE = 0.2, 0.01
#: seconds between two log lines with the stream's position
_LOG_INTERVAL = 10.0
#: seconds between two looks whether open dead letters are to be logged again
_TELL_LETTERS = 60.0


@contextmanager
def reported(pipeline: Pipeline, start: Start, stopped: threading.Event | None = None) -> Iterator[Controller]:
    """Run a stream's work with a controller: it writes heartbeats while the work runs, and its outcome as the last status.

    :param stopped: also set when the job is asked to stop.
    :raises Outage: instead of :class:`CredentialsRefused`: the claim was made with the same credentials, so they were changed since;
        when the job is submitted again, it gets the new ones.
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
        controller.finish_stopped()
    except (TakenOver, TablesChanged):
        controller.abandon()
        raise
    except CredentialsRefused as error:
        changed = rotated(error)
        controller.finish("failed", changed, permanent=False)
        raise changed from error
    except BaseException as error:
        controller.finish("failed", error, permanent=not transient(error))
        raise
    else:
        if controller.stopped.is_set():
            controller.finish_stopped()
        else:
            controller.finish("finished")


class StreamReport:
    """Updates a stream's status while it runs, and logs its position regularly.

    :param watch: watches the publications; its findings are part of the status.
    :ivar position: P as it was last reported.
    """

    def __init__(self, controller: Controller, watch: CoverageWatch, position: Position) -> None:
        self._controller, self._watch = controller, watch
        self.position = position
        self._last_logged, self._published_then = -math.inf, 0
        self._letters: Mapping[str, Mapping[str, int]] = {}
        self._told_letters = -math.inf

    def tell_letters(self, open_letters: Mapping[str, Mapping[str, int]], counters: Mapping[str, int]) -> None:
        """Tell of the dead letters that nobody has settled, if they are others than before, and now and then: a live snapshot writes some
        without a change of the stream's position.

        :param counters: see :meth:`update`.
        """
        if open_letters != self._letters or time.monotonic() - self._told_letters > _TELL_LETTERS:
            self._letters, self._told_letters = open_letters, time.monotonic()
            status = self._controller.status
            status.counters = {**status.counters, **counters}
            self._controller.problems.tell("dead letters", letters.problems(open_letters))

    def update(self, position: Position, counters: Mapping[str, int], skipped_by_table: Mapping[str, int]) -> None:
        """Report that the stream is at ``position``.

        :param counters: how many records of each kind are published since the slot was created.
        :param skipped_by_table: how many transactions had changes of a table that were left out: at the boundary, or because it is not
            followed.
        """
        self.position = position
        status = self._controller.status
        status.position, status.counters = str(position), dict(counters)
        status.progress = {"skipped_by_table": dict(skipped_by_table), "not_followed": self._watch.unfollowed}
        now, published = time.monotonic(), counters.get("published", 0)
        if (seconds := now - self._last_logged) > _LOG_INTERVAL:
            rate = (published - self._published_then) / seconds
            log.info(
                "At %s: %s records published (%s a second), %s dead letters, of which %s are open.",
                position, f"{published:,}", f"{rate:,.0f}", f"{counters.get('dead_letters', 0):,}",
                f"{counters.get('open_dead_letters', 0):,}",
            )  # fmt: skip
            self._last_logged, self._published_then = now, published


def follow(
    pipeline: Pipeline, start: Start, *, bounded: bool = False, stopped: threading.Event | None = None
) -> dict[str, int]:
    """Stream with a slot that is claimed already; returns the counters. It begins at P as the state has it now, which may be further
    than at the claim, if an earlier attempt has published since.

    :param bounded: whether to end once everything is published that the server had flushed to WAL at the start, instead of running
        until stopped.
    """
    stopped = stopped or threading.Event()
    with (
        reported(pipeline, start, stopped) as controller,
        stoppable(stopped),
        contextlib.closing(CoverageWatch(pipeline, start.state, start.not_taken)) as watch,
        contextlib.closing(
            SchemaWatch(pipeline, start.state.tables.values(), controller.problems, start.lost_schemas)
        ) as schemas,
    ):
        backoff = stream_backoff(pipeline, stopped)
        with contextlib.closing(StreamPublisher(pipeline, start, backoff)) as publisher:
            publisher.reached()
            report = StreamReport(controller, watch, publisher.position)
            controller.status.counters = publisher.counters
            with contextlib.closing(open_source(pipeline, start, backoff, publisher.position)) as source:
                rest = Rest(source.rest)
                target = flush_target(pipeline) if bounded else None
                while not stopped.is_set() and not (target is not None and _is_done(publisher, target)):
                    live = publisher.live
                    batch = source.next(_BESIDE if live.active else _IDLE, flush_empty=bounded or live.waits)
                    if not publisher.position.ordinal:
                        schemas.check()
                    watch.check(publisher.position)
                    if batch is not None:
                        source.acknowledge(publisher.publish(batch))
                        counters = {**publisher.counters, **source.statistics}
                        report.update(publisher.position, counters, source.skipped_by_table)
                    live.work()
                    report.tell_letters(publisher.open_letters, publisher.counters)
                    rest.note(worked=live.active or (batch is not None and len(batch.changes) > 0))
                if not stopped.is_set():
                    watch.check(publisher.position)
                return {**publisher.counters, **source.statistics}


def _is_done(publisher: StreamPublisher, target: int) -> bool:
    """Whether a bounded run has done everything: it is at its target, and no live snapshot is asked for."""
    if publisher.position.lsn < target or publisher.live.active:
        return False
    publisher.live.catch_up()
    return not publisher.live.active


def stream_backoff(pipeline: Pipeline, stopped: threading.Event | None = None) -> Backoff:
    """The backoff of a stream, up to ``outage_timeout``; without a limit if ``on_error`` is not exit."""
    return Backoff(pipeline.outage_timeout if pipeline.on_error == "exit" else None, stopped)


def flush_target(pipeline: Pipeline) -> int:
    """The LSN at which a bounded run ends: ``pg_current_wal_flush_lsn()`` now."""
    with session(pipeline.postgres, "Reading the WAL position", application="bottledwater bounded run") as connection:
        row = connection.execute("SELECT pg_current_wal_flush_lsn()::text").fetchone()
    assert row is not None
    return parse_lsn(row[0])
