"""Checks that the executors of a cluster can do the work, before it begins: a job must not wait in silence."""

from __future__ import annotations

import socket
import threading
import time
from importlib.metadata import version
from typing import TYPE_CHECKING

from airflow_bottledwater.errors import BottledWaterError, Outage, Refused
from airflow_bottledwater.settings import Pipeline
from airflow_bottledwater.spark import job
from airflow_bottledwater.spark.error_codec import Failure, received, returned
from airflow_bottledwater.spark.job import SettingsFile
from airflow_bottledwater.spark.submit import is_local

if TYPE_CHECKING:
    from collections.abc import Iterable

    from pyspark import SparkContext

_PACKAGE = "airflow-provider-bottledwater"


def _probe(_: Iterable[int], file: SettingsFile, wanted: str) -> list[dict[str, int] | Failure]:
    """Try everything that a task needs, in an executor."""

    def work() -> dict[str, int]:
        here = socket.gethostname()
        found = version(_PACKAGE)
        if found != wanted:
            raise Refused(
                f"The executor on host {here} has version {found} of {_PACKAGE}, the driver has {wanted}.",
                "Install the same version, in the image or in the archive of the environment.",
            )
        pipeline = file.load()
        try:
            _reach(pipeline)
        except BottledWaterError as error:
            raise type(error)(f"From the executor on host {here}: {error.what}", error.remedy) from error
        return {}

    return [returned(work)]


def _reach(pipeline: Pipeline) -> None:
    """Connect to PostgreSQL and Kafka once.

    :raises Outage: one of them does not answer.
    """
    from airflow_bottledwater.kafka.topics import Topics
    from airflow_bottledwater.postgres.connect import session

    with session(pipeline.postgres, "Reaching the source", application="bottledwater check"):
        pass
    Topics(pipeline.kafka).brokers()


def check(context: SparkContext, pipeline: Pipeline, file: SettingsFile, *, count: int = 1) -> None:
    """Let executors try what a task needs; on one host nothing is checked, since its executors are the driver's own threads.

    :param count: how many tasks are tried at the same time.
    :raises Refused: an executor lacks the package, or has another version of it or of Python.
    :raises Outage: no executor has begun within ``executor_timeout``, or one cannot reach PostgreSQL or Kafka.
    """
    if is_local(context.master):
        return
    wanted = version(_PACKAGE)
    outcome: list[list[dict[str, int] | Failure] | BaseException] = []

    def work() -> None:
        try:
            tasks = context.parallelize(range(count), count).mapPartitions(lambda it: _probe(it, file, wanted))
            outcome.append(tasks.collect())
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
            f"Either the cluster has no free cores or memory for it, or its hosts cannot reach the driver at "
            f"{context.getConf().get('spark.driver.host', '(unknown)')} (set spark.driver.host to an address that they can reach), or "
            "they hang: look at the executors' logs. A cluster that has to start hosts first needs a longer executor_timeout.",
        )
    found = outcome[0]
    if isinstance(found, BaseException):
        raise job.translate(found) from found
    for each in found:
        received(each)
