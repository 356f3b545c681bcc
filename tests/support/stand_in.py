"""A job in place of Spark's, with a real job's entry point: it reports to nobody. Run as a module, it waits to be
stopped."""

from __future__ import annotations

import sys
from typing import Any

from airflow_bottledwater.jobs import submitted
from airflow_bottledwater.spark import job
from airflow_bottledwater.spark.job import SettingsFile


class _Nobody:
    """In place of the reporter, which would need Kafka."""

    last_claim = ""

    def __init__(self, *_: Any) -> None:
        pass

    def start(self) -> None:
        pass

    def finish(self, outcome: Any) -> None:
        pass


def run(work: Any) -> int:
    """Run a job that does this; returns its exit code."""
    submitted.JobReporter = _Nobody  # type: ignore[assignment,misc]
    job._note = lambda *_: None
    SettingsFile.load = lambda self: None  # type: ignore[assignment,method-assign,return-value]
    return job._run("stream", work, SettingsFile("x"), "id", False)


if __name__ == "__main__":
    sys.exit(run(lambda pipeline, file, bounded, stopped: stopped.wait() and {}))
