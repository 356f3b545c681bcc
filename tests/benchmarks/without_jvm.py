"""The stream as one plain process: ``stream.engine`` with the command line of a job."""

from __future__ import annotations

import threading
from typing import Any

from airflow_bottledwater.settings import Pipeline
from airflow_bottledwater.spark import job
from airflow_bottledwater.stream import engine


def _work(pipeline: Pipeline, _path: str, bounded: bool, stopped: threading.Event) -> dict[str, Any]:
    return dict(engine.run(pipeline, bounded=bounded, stopped=stopped))


if __name__ == "__main__":
    job.run("Publish every committed change, without Spark.", _work)
