"""Checks that the executors of a cluster can do the work, before it begins, and that there are some while it lasts: a
job must not wait in silence."""

from __future__ import annotations

import functools
import queue
import socket
import threading
import time
from typing import TYPE_CHECKING

from airflow_bottledwater.errors import BottledWaterError, Outage, Refused
from airflow_bottledwater.jobs.submit import is_local
from airflow_bottledwater.pipeline.settings import Settings
from airflow_bottledwater.spark import job, parcels
from airflow_bottledwater.spark.error_codec import Failure, received, returned
from airflow_bottledwater.spark.job import SettingsFile

if TYPE_CHECKING:
    from collections.abc import Callable

    from pyspark import SparkContext

#: seconds for all servers together, which are tried at the same time: a little more than the time-outs of their
#: clients, which say more. The driver has to have the answer within executor_timeout, or it would blame the cluster
_REACH = 20.0
#: seconds between two looks whether tasks have executors
_LOOK = 1.0


def _probe(file: SettingsFile) -> dict[str, int] | Failure:
    """Try everything that a task needs, in an executor."""

    def work() -> dict[str, int]:
        pipeline = file.load()
        try:
            _reach(pipeline)
        except BottledWaterError as error:
            here = socket.gethostname()
            raise type(error)(f"From the executor on host {here}: {error.what}", error.remedy) from error
        return {}

    # what is not reached now will not be a moment later: Spark repeating it would only delay the message
    return returned(work, repeated=False)


def _reach(pipeline: Settings) -> None:
    """Ask each server once, all at the same time.

    :raises Outage: one of them does not answer.
    :raises Refused: one of them refuses the connection.
    """
    answers: queue.SimpleQueue[tuple[str, BaseException | None]] = queue.SimpleQueue()

    def work(name: str, ask: Callable[[], None]) -> None:
        try:
            ask()
            answers.put((name, None))
        except BaseException as error:
            answers.put((name, error))

    waiting = _servers(pipeline)
    for each in waiting.items():
        # daemon threads: one that hangs is left behind
        threading.Thread(target=work, args=each, name=f"reach {each[0]}", daemon=True).start()
    deadline = time.monotonic() + _REACH
    while waiting:
        try:
            name, error = answers.get(timeout=max(0.0, deadline - time.monotonic()))
        except queue.Empty:
            raise Outage(
                f"{' and '.join(waiting)}: no answer within {_REACH:.0f} s.",
                "Check the network between the executors' hosts and the servers (name resolution, firewalls).",
            ) from None
        if error is not None:
            raise error
        del waiting[name]


def _servers(pipeline: Settings) -> dict[str, Callable[[], None]]:
    """What a task connects to, by its name in messages, and how it is asked."""
    from airflow_bottledwater.kafka.registry import Registry
    from airflow_bottledwater.kafka.topics import Topics
    from airflow_bottledwater.postgres.connect import session
    from airflow_bottledwater.postgres.dsn import describe

    def source() -> None:
        with session(pipeline.postgres, "Reaching the source", application="bottledwater check"):
            pass

    def kafka() -> None:
        Topics(pipeline.kafka).brokers()

    found = {
        describe(pipeline.postgres): source,
        f"Kafka at {pipeline.kafka.get('bootstrap.servers', '?')}": kafka,
    }
    if registry := Registry.of(pipeline):
        found[f"The schema registry at {registry.url}"] = registry.ping
    return found


def check(context: SparkContext, pipeline: Settings, file: SettingsFile, *, count: int = 1) -> None:
    """Let executors try what a task needs; on one host nothing is checked, since its executors are the driver's own
    threads.

    :param count: how many tasks are tried at the same time.
    :raises Refused: an executor lacks the package, or has another build of it or another Python, or a server refuses
        its connection.
    :raises Outage: no executor has answered within ``executor_timeout``, or one cannot reach PostgreSQL, Kafka or the
        schema registry.
    """
    parcel = parcels.packed(functools.partial(_probe, file))
    if is_local(context.master):
        return
    ask = functools.partial(parcels.carry_out, refusal=Refused)
    outcome: list[list[dict[str, int] | Failure] | BaseException] = []

    def work() -> None:
        try:
            # one first: with fewer cores than tasks they run one after the other, each of which waits for a server
            # that does not answer
            for n in sorted({1, count}):
                found = context.parallelize([parcel] * n, n).map(ask).collect()
                if n == count or any(isinstance(each, Failure) for each in found):
                    outcome.append(found)
                    return
        except BaseException as error:
            outcome.append(error)

    thread = threading.Thread(target=work, name="executors", daemon=True)
    thread.start()
    deadline = time.monotonic() + pipeline.executor_timeout
    while thread.is_alive() and time.monotonic() < deadline:
        thread.join(0.2)
    if not outcome:
        context.cancelAllJobs()
        raise Outage(
            f"No executor of {context.master} has finished a first task within {pipeline.executor_timeout:.0f} s.",
            "Either the cluster has no free cores or memory for it (another application of a standalone cluster takes "
            "all cores unless its spark.cores.max limits it), or its hosts cannot reach the driver at "
            f"{context.getConf().get('spark.driver.host', '(unknown)')} (set spark.driver.host to an address that they "
            "can reach), or they hang: look at the executors' logs. A cluster that has to start hosts first needs a "
            "longer executor_timeout.",
        )
    found = outcome[0]
    if isinstance(found, BaseException):
        raise job.translate(found) from found
    for each in found:
        received(each)


class Presence:
    """Notices that no executor is left: should all be lost, Spark waits for others for ever.

    What waits for tasks asks it again and again. With a master ``local`` it does nothing.
    """

    def __init__(self, context: SparkContext, pipeline: Settings) -> None:
        self._context, self._pipeline = context, pipeline
        self._looked = time.monotonic()
        self._without = 0.0

    def check(self) -> None:
        """Look, at most once in a second.

        :raises Outage: for ``executor_timeout`` seconds there have been tasks, none of which any executor has run.
        """
        now = time.monotonic()
        if is_local(self._context.master) or (passed := now - self._looked) < _LOOK:
            return
        self._looked = now
        # a driver that stood still itself has seen nothing meanwhile
        self._without = self._without + min(passed, 2 * _LOOK) if self._waits() else 0.0
        if self._without >= self._pipeline.executor_timeout:
            raise Outage(
                f"No executor of {self._context.master} has run any of the job's tasks for {self._without:.0f} s: all "
                "were lost, and the cluster gives no others.",
                "Look for its workers: Spark's master, YARN or Kubernetes shows them. A cluster that has to start "
                "hosts first needs a longer executor_timeout.",
            )

    def _waits(self) -> bool:
        try:
            tracker = self._context.statusTracker()
            stages = [found for n in tracker.getActiveStageIds() if (found := tracker.getStageInfo(n)) is not None]
        except Exception:
            return False  # Spark's context or its JVM has ended, of which the tasks tell
        return bool(stages) and not any(stage.numActiveTasks for stage in stages)
