"""``engine = continuous``: the whole stream runs in one long-lived Spark task, which Spark supervises and starts again."""

from __future__ import annotations

import logging
import threading
import time
from typing import TYPE_CHECKING, Any

from airflow_bottledwater.errors import BottledWaterError, Outage
from airflow_bottledwater.memory import give_back
from airflow_bottledwater.model.stop import interruption
from airflow_bottledwater.policy import transient
from airflow_bottledwater.settings import Pipeline
from airflow_bottledwater.spark import job
from airflow_bottledwater.spark.error_codec import Failure, received, returned, unpack
from airflow_bottledwater.spark.executors import Presence
from airflow_bottledwater.spark.job import SettingsFile
from airflow_bottledwater.state import control
from airflow_bottledwater.state.claim import read_state

if TYPE_CHECKING:
    from pyspark import SparkContext

    from airflow_bottledwater.stream.start import Start

log = logging.getLogger(__name__)

#: seconds that the task has to end in order, once it is asked to stop
_GRACE = 30.0


def _follow(file: SettingsFile, start: Start, bounded: bool) -> dict[str, int] | Failure:
    """Run the stream in the executor, including the job's status and log."""
    job.log_to_stderr()

    def work() -> dict[str, int]:
        # the driver, which only watches, does without it and its hundred megabytes
        from airflow_bottledwater.stream import engine

        pipeline = file.load()
        job.check_attempt(pipeline, start.state_topic, start.job)
        return engine.follow(pipeline, start, bounded=bounded)

    return returned(work)


def stream(
    context: SparkContext, pipeline: Pipeline, file: SettingsFile, start: Start, bounded: bool, stopped: threading.Event
) -> dict[str, Any]:
    """Run the task, and pass a stop on to it (through the state topic, since it may be on another host); returns position and counters.

    :raises BottledWaterError: the task's own error, or an :class:`Outage` if its worker died, or no executor is left; none is raised after
        a stop.
    """
    outcome: list[dict[str, int] | BaseException] = []

    def work() -> None:
        try:
            task = context.parallelize([start], 1).map(lambda claimed: _follow(file, claimed, bounded))
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
        dead = not isinstance(result, BottledWaterError) and unpack(str(result)) is None
    if isinstance(result, BaseException):
        if dead:
            _report_death(pipeline, start, result, stopped)
        if not stopped.is_set():
            raise job.translate(result) from result
    found = read_state(pipeline, start.state_topic)
    return {"position": str(found.position or start.position), **found.counters}


def _watch(
    context: SparkContext, pipeline: Pipeline, start: Start, stopped: threading.Event, thread: threading.Thread
) -> None:
    """Wait for the task's end, and pass a stop on. The task itself reports its progress: a reader of the state topic in the driver would
    slow down every commit.

    :raises Outage: no executor is left.
    """
    asked = 0.0
    presence = Presence(context, pipeline)
    while thread.is_alive():
        thread.join(0.2)
        if not stopped.is_set():
            presence.check()
        now = time.monotonic()
        if stopped.is_set() and not asked:
            asked = now
            try:
                signalled = interruption(stopped)
                control.request_stop_of(
                    pipeline, start.cluster, start.job, interrupted=signalled.signum if signalled else 0
                )
            except BottledWaterError as error:
                log.warning("The task could not be asked to stop: %s", error)
                context.cancelAllJobs()
        elif asked and now - asked > _GRACE:
            context.cancelAllJobs()
            thread.join(5)
            return


def _report_death(pipeline: Pipeline, start: Start, error: BaseException, stopped: threading.Event) -> None:
    """Write the last status for a worker that died, and so could not write it itself."""
    cause = interruption(stopped) or job.translate(error)
    controller = control.Controller(pipeline, start.cluster, start.job)
    if stopped.is_set() and interruption(stopped) is None:
        controller.finish("stopped")
    else:
        controller.finish("failed", cause, permanent=not transient(cause))
