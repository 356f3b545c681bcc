"""A job with a real job's entry point, in one process without Spark: ``python -m tests.support.process_job stream
--pipeline FILE --job ID``."""

from __future__ import annotations

import sys
import threading
from dataclasses import asdict
from pathlib import Path
from typing import Any

from airflow_bottledwater.jobs import submit
from airflow_bottledwater.pipeline.settings import Settings
from airflow_bottledwater.snapshot import driver
from airflow_bottledwater.spark import job
from tests.support import running


def stream(pipeline: Settings, file: Any, bounded: bool, stopped: threading.Event) -> dict[str, Any]:
    """Stream until stopped."""
    return dict(running.run_stream(pipeline, bounded=bounded, stopped=stopped))


def snapshot(pipeline: Settings, file: Any, bounded: bool, stopped: threading.Event) -> dict[str, Any]:
    """Take the snapshot, with lanes in threads."""
    return asdict(driver.run(pipeline, running.in_threads(pipeline), stopped=stopped))


def command(kind: str, settings: Path | str, job_id: str = "") -> list[str]:
    """The command line of such a job."""
    return [sys.executable, "-m", "tests.support.process_job", kind, *submit.arguments(settings, job_id=job_id)]


if __name__ == "__main__":
    kind = sys.argv.pop(1)
    job.run(kind, f"A {kind} without Spark.", {"snapshot": snapshot, "stream": stream}[kind])
