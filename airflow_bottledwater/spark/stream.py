"""The stream job: claims the slot, and runs the whole stream in one long-lived Spark task, which Spark supervises and
starts again."""

from __future__ import annotations

import contextlib
import functools
import logging
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Any

from airflow_bottledwater.errors import BeginsAnew, BottledWaterError, OtherBuild, Outage
from airflow_bottledwater.memory import give_back
from airflow_bottledwater.model.stop import interruption
from airflow_bottledwater.pipeline.settings import Settings
from airflow_bottledwater.policy import transient
from airflow_bottledwater.spark import executors, job, parcels
from airflow_bottledwater.spark.error_codec import Failure, received, returned, unpack
from airflow_bottledwater.spark.job import SettingsFile

# Spark starts while the rest is imported, which takes a second
if TYPE_CHECKING:
    from pyspark import SparkContext

    from airflow_bottledwater.stream.start import Start

log = logging.getLogger(__name__)

#: seconds that the task has to end in order, once it is asked to stop
_GRACE = 30.0


def begin(pipeline: Settings, stopped: threading.Event) -> Start:
    """Claim the slot for the stream, see :func:`airflow_bottledwater.stream.start.begin`.

    :raises StopRequested: the event was set meanwhile.
    """
    from airflow_bottledwater.backoff import stoppable
    from airflow_bottledwater.stream.start import begin

    with stoppable(stopped):
        return begin(pipeline, stopped)


def run(pipeline: Settings, file: SettingsFile, bounded: bool, stopped: threading.Event) -> dict[str, Any]:
    """Stream, in a Spark application of its own; returns position and counters.

    :param file: the settings, for executors.
    :param bounded: whether to end once everything is published that was committed at the start, instead of running
        until stopped.
    """
    with ThreadPoolExecutor(1, "claim") as pool:
        claimed = pool.submit(begin, pipeline, stopped)
        with job.context(f"bottledwater stream {pipeline.slot}") as context:
            executors.check(context, pipeline, file)
            return follow(context, pipeline, file, claimed.result(), bounded, stopped)


def follow(
    context: SparkContext, pipeline: Settings, file: SettingsFile, start: Start, bounded: bool, stopped: threading.Event
) -> dict[str, Any]:
    """Stream from a claimed start, and begin anew where that settles what has changed; returns position
    and counters."""
    while True:
        try:
            return run_task(context, pipeline, file, start, bounded, stopped)
        except BeginsAnew as changed:
            log.info("%s", changed)
            start = begin(pipeline, stopped)


def _follow(file: SettingsFile, start: Start, bounded: bool) -> dict[str, int] | Failure:
    """Run the stream in the executor, including the job's status and log."""
    job.log_to_stderr()

    def work() -> dict[str, int]:
        # the driver, which only watches, does without it and its hundred megabytes
        from airflow_bottledwater.stream import engine

        # seconds after which a thread gives way: beside one that computes (a look at the catalog, a heartbeat), each of
        # the calls that publish would otherwise wait up to 5 ms for the interpreter when it comes back
        sys.setswitchinterval(0.0005)
        pipeline = file.load()
        job.check_attempt(pipeline, start.state_topic, start.job)
        return engine.follow(pipeline, start, bounded=bounded)

    return returned(work)


def run_task(
    context: SparkContext, pipeline: Settings, file: SettingsFile, start: Start, bounded: bool, stopped: threading.Event
) -> dict[str, Any]:
    """Run the task, and pass a stop on to it (through the state topic, since it may be on another host); returns
    position and counters.

    :raises BottledWaterError: the task's own error, or an :class:`Outage` if its worker died, or no executor is left;
        none is raised after a stop.
    """
    from airflow_bottledwater.state.claim import read_state

    outcome: list[dict[str, int] | BaseException] = []

    def work() -> None:
        try:
            parcel = parcels.packed(functools.partial(_follow, file, start, bounded))
            task = context.parallelize([parcel], 1).map(parcels.carry_out)
            outcome.append(received(task.collect()[0]))
        except BaseException as error:
            outcome.append(error)

    thread = threading.Thread(target=work, name="stream task", daemon=True)
    thread.start()
    give_back()  # of what the claim and a snapshot have left: from now on this process only watches
    log.info("Streaming from %s.", start.position)
    result: dict[str, int] | BaseException | None
    try:
        _watch(context, pipeline, start, stopped, thread)
    except Outage as error:  # no executor is left
        context.cancelAllJobs()
        result, dead = error, True
    else:
        result = outcome[0] if outcome else None
        # one of another build has not begun its work, and reports as little as one that died
        dead = isinstance(result, OtherBuild) or (
            not isinstance(result, BottledWaterError) and unpack(str(result)) is None
        )
    if isinstance(result, BaseException):
        if dead:
            _report_death(pipeline, start, result, stopped)
        if not stopped.is_set():
            raise job.translate(result) from result
    found = read_state(pipeline, start.state_topic)
    return {"position": str(found.position or start.position), **found.counters}


def _watch(
    context: SparkContext, pipeline: Settings, start: Start, stopped: threading.Event, thread: threading.Thread
) -> None:
    """Wait for the task's end, and pass a stop on. The task itself reports its progress: a reader of the state topic in
    the driver would slow down every commit.

    :raises Outage: no executor is left.
    """
    from airflow_bottledwater.jobs import requests, submitted

    asked = 0.0
    presence = executors.Presence(context, pipeline)
    while thread.is_alive():
        thread.join(0.2)
        if not stopped.is_set():
            presence.check()
        now = time.monotonic()
        if stopped.is_set() and not asked:
            asked = now
            try:
                signalled = interruption(stopped)
                requests.pass_on(
                    pipeline,
                    start.cluster,
                    start.job,
                    interrupted=signalled.signum if signalled else 0,
                    by=submitted.stopped_by(),
                )
            except BottledWaterError as error:
                log.warning("The task could not be asked to stop: %s", error)
                context.cancelAllJobs()
        elif asked and now - asked > _GRACE:
            context.cancelAllJobs()
            thread.join(5)
            return


def _report_death(pipeline: Settings, start: Start, error: BaseException, stopped: threading.Event) -> None:
    """Write the last status for a worker that died, or refused to begin, and so could not write it itself."""
    from airflow_bottledwater.jobs import control
    from airflow_bottledwater.jobs.status import read_status

    cause = interruption(stopped) or job.translate(error)
    controller = control.Controller(pipeline, start.cluster, start.job)
    controller.begin_at(start.position, start.state)
    with contextlib.suppress(BottledWaterError):
        last = read_status(pipeline, controller.name)
        if last is not None and last.job.id == start.job.id:
            controller.status = last
        else:
            controller.follow(last)
    if stopped.is_set() and interruption(stopped) is None:
        controller.finish("stopped")
    else:
        controller.finish("failed", cause, permanent=not transient(cause))


def main() -> None:
    """Entry point of ``spark_jobs/stream.py``."""
    job.run("stream", "Publish every committed change, in order.", run)
