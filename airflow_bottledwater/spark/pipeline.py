"""The job of the command: the snapshot, and then the stream, in one Spark application, so that nothing starts twice."""

from __future__ import annotations

import threading
from typing import Any

from airflow_bottledwater.settings import Pipeline
from airflow_bottledwater.spark import job, snapshot, stream


def _work(pipeline: Pipeline, path: str, bounded: bool, stopped: threading.Event) -> dict[str, Any]:
    snapshot.import_driver()
    with job.context(f"bottledwater {pipeline.slot}") as context:
        snapshot.take(context, pipeline, path, stopped)
        if pipeline.engine == "continuous":
            from airflow_bottledwater.spark import continuous

            start = stream.begin(pipeline, stopped)
            return continuous.stream(context, pipeline, path, start, bounded, stopped)
    # a query needs properties that a context has from its beginning
    return stream.run(pipeline, path, bounded, stopped)


def main() -> None:
    """Entry point of ``spark_jobs/pipeline.py``."""
    job.run("Publish a consistent snapshot, and then every committed change.", _work)
