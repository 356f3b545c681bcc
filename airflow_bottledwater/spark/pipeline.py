"""The job of the command: the snapshot, if there is one to take, and then the stream, in one Spark application.

Spark takes several seconds to start. It does so while the command makes what is missing, and while a worker imports
what it needs.
"""

from __future__ import annotations

import os
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING, Any

from airflow_bottledwater.errors import StopRequested
from airflow_bottledwater.jobs import run_directory
from airflow_bottledwater.jobs.run_directory import PreparedPipeline
from airflow_bottledwater.jobs.supervise import RUN_DIRECTORY
from airflow_bottledwater.pipeline.settings import Settings
from airflow_bottledwater.spark import executors, job, snapshot, stream
from airflow_bottledwater.spark.job import SettingsFile
from airflow_bottledwater.spark.tasks import warm_workers

if TYPE_CHECKING:
    from airflow_bottledwater.stream.start import Start

#: seconds between two looks whether the command has made everything
_INTERVAL = 0.05


def _work(pipeline: Settings, file: SettingsFile, bounded: bool, stopped: threading.Event) -> dict[str, Any]:
    snapshot.import_driver()
    name = f"bottledwater {pipeline.slot}"
    failed = threading.Event()
    with ThreadPoolExecutor(1, "claim") as pool:
        claimed = pool.submit(_begin, pipeline, stopped, failed)
        try:
            with job.context(name) as context:
                executors.check(context, pipeline, file)
                warm_workers(context, pipeline, 1, snapshot.warm)
                start = claimed.result()
                if start is None:
                    snapshot.take(context, pipeline, file, stopped)
                    start = stream.begin(pipeline, stopped)
                return stream.follow(context, pipeline, file, start, bounded, stopped)
        except BaseException:
            failed.set()
            raise


def _begin(pipeline: Settings, stopped: threading.Event, failed: threading.Event) -> Start | None:
    """The claimed stream; None if the snapshot comes first."""
    return None if _prepared(stopped, failed).snapshot else stream.begin(pipeline, stopped)


def _prepared(*ended: threading.Event) -> PreparedPipeline:
    """Wait until the command has made everything.

    :param ended: events of which one is set when the job is to end.
    :raises StopRequested: one is set.
    """
    folder = os.environ.get(RUN_DIRECTORY)
    if folder is None:  # submitted by hand: a snapshot that is complete is found to be
        return PreparedPipeline(snapshot=True)
    while (found := run_directory.read(Path(folder), PreparedPipeline)) is None:
        # not Event.wait, whose lock a signal's handler would need
        time.sleep(_INTERVAL)
        if any(each.is_set() for each in ended):
            raise StopRequested("The job was asked to stop before it began.")
    return found


def main() -> None:
    """Entry point of ``spark_jobs/pipeline.py``."""
    job.run("pipeline", "Publish a consistent snapshot, and then every committed change.", _work)
