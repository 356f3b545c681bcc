"""The command's job waits until everything is made."""

from __future__ import annotations

import threading
from pathlib import Path

import pytest

from airflow_bottledwater.errors import StopRequested
from airflow_bottledwater.jobs import run_directory
from airflow_bottledwater.jobs.run_directory import PreparedPipeline
from airflow_bottledwater.jobs.supervise import RUN_DIRECTORY
from airflow_bottledwater.spark import pipeline


def test_the_job_begins_when_everything_is_made(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(RUN_DIRECTORY, str(tmp_path))
    threading.Timer(0.3, run_directory.write, (tmp_path, PreparedPipeline(snapshot=False))).start()
    assert pipeline._prepared(threading.Event()) == PreparedPipeline(snapshot=False)


def test_a_job_that_is_not_to_begin_ends(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(RUN_DIRECTORY, str(tmp_path))
    stopped = threading.Event()
    threading.Timer(0.3, stopped.set).start()
    with pytest.raises(StopRequested):
        pipeline._prepared(stopped)


def test_a_job_that_was_submitted_by_hand_looks_for_a_snapshot(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(RUN_DIRECTORY, raising=False)
    assert pipeline._prepared(threading.Event()).snapshot
