"""The verification job: Spark's driver runs the verification's driver, and each part of tables and topics is read by a
Spark task."""

from __future__ import annotations

import functools
import logging
import threading
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from airflow_bottledwater.errors import BeginsAnew
from airflow_bottledwater.jobs import submitted
from airflow_bottledwater.jobs.log import UNREPORTED
from airflow_bottledwater.jobs.run_directory import Differences
from airflow_bottledwater.model.job import Owner
from airflow_bottledwater.pipeline.settings import Settings
from airflow_bottledwater.spark import executors, job
from airflow_bottledwater.spark.error_codec import Failure, returned
from airflow_bottledwater.spark.job import SettingsFile
from airflow_bottledwater.spark.tasks import run_each, warm_workers

if TYPE_CHECKING:
    from pyspark import SparkContext

    from airflow_bottledwater.verify.task import Answer, VerifyTask


log = logging.getLogger(__name__)


def _read(file: SettingsFile, reading: VerifyTask) -> dict[int, Answer] | Failure:
    """Read a part, in an executor."""
    from airflow_bottledwater.verify import lane

    return returned(lambda: lane.run(file.load(), reading))


def run_readings(
    context: SparkContext, pipeline: Settings, file: SettingsFile, readings: Sequence[VerifyTask]
) -> list[dict[int, Answer]]:
    """Read all parts; see :func:`~airflow_bottledwater.spark.tasks.run_each`."""
    return run_each(context, pipeline, functools.partial(_read, file), readings, "verify")


def _warm() -> None:
    from airflow_bottledwater.verify import lane

    lane.warm_up()


def _advance(pipeline: Settings, stopped: threading.Event, owner: Owner | None) -> None:
    """Run a bounded stream in this process.

    :param owner: the task whose job has finished, in place of which this runs.
    """
    # compiled code, a hundred megabytes, which a verification beside a stream does without
    from airflow_bottledwater.jobs import changes
    from airflow_bottledwater.provision import live
    from airflow_bottledwater.stream import engine, start

    if owner is not None:
        # a verification tells Airflow of no topic that has changed, and its task fails where topics differ
        changes.leave_untold(pipeline, live.name_of(pipeline))
    submitted.stand_in(owner)
    while True:
        try:
            engine.follow(pipeline, start.begin(pipeline, stopped), bounded=True, stopped=stopped)
        except BeginsAnew as changed:
            log.info("%s", changed)
        else:
            return


def _work(pipeline: Settings, file: SettingsFile, bounded: bool, stopped: threading.Event) -> dict[str, Any]:
    from airflow_bottledwater.verify import driver

    with job.context(f"bottledwater verify {pipeline.slot}") as context:
        executors.check(context, pipeline, file, count=pipeline.lanes)
        warm_workers(context, pipeline, pipeline.lanes, _warm)
        found = driver.run(
            pipeline,
            functools.partial(run_readings, context, pipeline, file),
            stopped=stopped,
            advance=functools.partial(_advance, pipeline, stopped),
        )
    # in a cluster, there is no run directory
    if not job.leave(Differences(found.shown())):
        for table in found.tables:
            for difference in table.differences:
                log.warning("%s: %s", table.table, difference, extra=UNREPORTED)
    return found.reported()


def main() -> None:
    """Entry point of ``spark_jobs/verify.py``."""
    job.run("verify", "Compare the pipeline's topics with their tables, while the stream runs.", _work)
