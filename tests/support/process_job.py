"""A stream with a real job's entry point, in one process without Spark: ``python -m tests.support.process_job --pipeline FILE --job ID``."""

from __future__ import annotations

import threading
from typing import Any

from airflow_bottledwater.settings import Pipeline
from airflow_bottledwater.spark import job
from airflow_bottledwater.stream import engine


def work(pipeline: Pipeline, file: Any, bounded: bool, stopped: threading.Event) -> dict[str, Any]:
    """Stream until stopped."""
    return dict(engine.run(pipeline, bounded=bounded, stopped=stopped))


if __name__ == "__main__":
    job.run("stream", "A stream without Spark.", work)
