"""The snapshot job: Spark's driver runs the snapshot's driver, and each lane is one Spark task."""

from __future__ import annotations

import functools
import importlib
import threading
from collections.abc import Sequence
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from airflow_bottledwater.jobs import run_directory
from airflow_bottledwater.pipeline.settings import Settings
from airflow_bottledwater.spark import executors, job
from airflow_bottledwater.spark.error_codec import Failure, returned
from airflow_bottledwater.spark.job import SettingsFile
from airflow_bottledwater.spark.tasks import run_each, warm_workers

if TYPE_CHECKING:
    from pyspark import SparkContext

    from airflow_bottledwater.snapshot.progress import SnapshotProgress
    from airflow_bottledwater.snapshot.task import LaneTask


def _run_lane(file: SettingsFile, task: LaneTask) -> dict[str, int] | Failure:
    """Run a lane, in an executor."""
    from airflow_bottledwater.snapshot import lane

    def work() -> dict[str, int]:
        pipeline = file.load()
        again = job.check_attempt(pipeline, task.state_topic, task.job)
        return lane.run(pipeline, task, again=again)

    return returned(work)


def run_lanes(
    context: SparkContext, pipeline: Settings, file: SettingsFile, tasks: Sequence[LaneTask]
) -> list[dict[str, int]]:
    """Run each lane as a task; see :func:`~airflow_bottledwater.spark.tasks.run_each`."""
    return run_each(context, pipeline, functools.partial(_run_lane, file), tasks, "lane")


def warm() -> None:
    """Import modules and load compiled code in an executor's worker before there is work."""
    from airflow_bottledwater.publish.warm import warm_up

    job.log_to_stderr()  # if code is compiled, the log says so at once
    warm_up()


def import_driver() -> None:
    """Begin to import the snapshot's driver in a thread, which takes a second, while Spark and its workers start."""
    threading.Thread(
        target=importlib.import_module, args=("airflow_bottledwater.snapshot.driver",), daemon=True
    ).start()


def take(context: SparkContext, pipeline: Settings, file: SettingsFile, stopped: threading.Event) -> dict[str, Any]:
    """Take the snapshot, with lanes as tasks of this context; returns what it did.

    :raises BottledWaterError: see :func:`airflow_bottledwater.snapshot.driver.run`.
    """
    executors.check(context, pipeline, file, count=pipeline.lanes)
    warm_workers(context, pipeline, pipeline.lanes, warm)

    from airflow_bottledwater.snapshot import driver

    lanes = functools.partial(run_lanes, context, pipeline, file)
    return asdict(driver.run(pipeline, lanes, stopped=stopped, report=_leave_progress))


def _leave_progress(found: SnapshotProgress) -> None:
    job.leave(run_directory.ProgressReport(found.rows, found.bytes, found.total_bytes, found.rows_per_second))


def _work(pipeline: Settings, file: SettingsFile, bounded: bool, stopped: threading.Event) -> dict[str, Any]:
    import_driver()
    with job.context(f"bottledwater snapshot {pipeline.slot}") as context:
        return take(context, pipeline, file, stopped)


def main() -> None:
    """Entry point of ``spark_jobs/snapshot.py``."""
    job.run("snapshot", "Publish a consistent snapshot of the pipeline's tables.", _work)
