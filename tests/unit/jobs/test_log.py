"""Which lines of a job's log begin a record, and whose."""

from __future__ import annotations

import logging
import subprocess
import sys
import time

import pytest

from airflow_bottledwater.jobs.log import LogLine, parse


def test_what_a_job_logs_is_read_back() -> None:
    code = (
        "import logging; from airflow_bottledwater.spark.job import log_to_stderr; log_to_stderr();log = "
        "logging.getLogger('a.b'); log.info('one'); log.warning('At 0/1: ERROR %s', 'x'); log.error(''); "
        "log.debug('no');log.critical('  two')"
    )
    logged = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stderr
    found = [parse(line) for line in logged.splitlines(keepends=True)]
    assert all(line is not None and abs(line.at - time.time()) < 60 for line in found)
    assert [line and line._replace(at=0.0) for line in found] == [
        LogLine(logging.INFO, "one", ours=True),
        LogLine(logging.WARNING, "At 0/1: ERROR x", ours=True),
        LogLine(logging.ERROR, "", ours=True),
        LogLine(logging.CRITICAL, "  two", ours=True),
    ]


@pytest.mark.parametrize(
    "line",
    [
        "",
        "2026 INFO x",
        "2026-11-22 09:09:14 INFO no milliseconds",
        " 2026-11-22 09:09:14,123 INFO the rest of a message",
        "Traceback (most recent call last):",
    ],
)
def test_another_line_begins_no_record(line: str) -> None:
    assert parse(line) is None


def test_a_line_of_sparks_is_told_from_ours() -> None:
    line = "26/11/22 09:09:14 WARN SparkContext: Running Spark version 4.2.0"
    assert parse(line) == LogLine(logging.WARNING, "SparkContext: Running Spark version 4.2.0", ours=False)
