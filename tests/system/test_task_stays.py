"""``deferrable=False``: the stream's task is the supervisor of its job, for workers that end with their task."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from psycopg.conninfo import conninfo_to_dict

from airflow_bottledwater.jobs import requests
from airflow_bottledwater.local.kafka import KafkaBroker
from airflow_bottledwater.operators.spark import JOB
from airflow_bottledwater.postgres.connect import connect
from airflow_bottledwater.postgres.server import identify
from tests.support.describing import described
from tests.support.processes import job_processes
from tests.support.topics import Flow
from tests.support.verifying import verified_by_command
from tests.support.waiting import until

pytestmark = pytest.mark.long

Pod = Callable[..., "subprocess.Popen[bytes]"]


@pytest.fixture
def flow(database: str, kafka: KafkaBroker) -> Flow:
    made = Flow(database, kafka, None, skip_snapshot=True, heartbeat_interval=0.5)
    made.execute("CREATE TABLE a (id bigint PRIMARY KEY, name text)")
    made.create()
    return made


@pytest.fixture
def pod(flow: Flow, tmp_path: Path) -> Iterator[Pod]:
    """Starts the task, as a pod would; what it leaves is ended with the test."""
    dsn = conninfo_to_dict(flow.dsn)
    connections = {
        "POSTGRES_DEFAULT": {
            "conn_type": "postgres", "host": dsn["host"], "port": int(dsn["port"]), "login": dsn["user"],
            "schema": dsn["dbname"],
        },
        "KAFKA_DEFAULT": {"conn_type": "kafka", "extra": flow.pipeline.kafka},
        "SPARK_DEFAULT": {"conn_type": "spark", "host": "local[2]"},
    }  # fmt: skip
    arguments = {"pipeline": described(flow.pipeline).as_dict()}
    env = {
        **os.environ,
        **{f"AIRFLOW_CONN_{name}": json.dumps(value) for name, value in connections.items()},
        "AIRFLOW_HOME": str(tmp_path),
        "AIRFLOW__CORE__EXECUTOR": "KubernetesExecutor",
    }
    made: list[subprocess.Popen[bytes]] = []

    def one(kept: dict[str, Any] | None = None) -> subprocess.Popen[bytes]:
        known = {"KEPT": json.dumps({JOB: kept})} if kept else {}
        with (tmp_path / f"pod{len(made)}.log").open("wb") as log:
            made.append(
                subprocess.Popen(
                    [sys.executable, "-m", "tests.support.clusters.staying", json.dumps(arguments)],
                    env={**env, **known},
                    stdout=log,
                    stderr=log,
                )
            )
        return made[-1]

    yield one
    for process in made:
        process.kill()
        process.wait()
    for pid in job_processes(tmp_path):
        os.kill(pid, signal.SIGKILL)


def _streams(flow: Flow, rows: int) -> None:
    flow.execute(f"INSERT INTO a SELECT g, 'x' FROM generate_series({rows - 9}, {rows}) g")
    until(lambda: len(flow.read("a")) == rows, "the rows are published")


def test_evicted_or_ended_the_job_ends_with_its_task(flow: Flow, pod: Pod, tmp_path: Path) -> None:
    evicted = pod()
    _streams(flow, 10)
    assert job_processes(tmp_path) != {}
    evicted.kill()
    # nobody could tell the job: it ends because its task is gone
    until(lambda: job_processes(tmp_path) == {}, "the job ends")

    ended = pod()
    _streams(flow, 20)
    ended.terminate()
    assert ended.wait(60) == 1
    assert job_processes(tmp_path) == {}
    rows = flow.execute(f"SELECT active FROM pg_replication_slots WHERE slot_name = '{flow.pipeline.slot}'")
    assert rows == [(False,)]

    last = pod()
    _streams(flow, 30)
    # the job dies, and the task submits it again
    driver = json.loads(next(tmp_path.glob("bottledwater/stream-*/driver.json")).read_text())["pid"]
    os.kill(driver, signal.SIGKILL)
    _streams(flow, 40)
    assert verified_by_command(flow).rows == 40
    with connect(flow.dsn) as connection:
        assert requests.stop_pipeline(flow.pipeline, identify(connection)) is not None
    assert last.wait(60) == 0
    assert json.loads((tmp_path / "pod2.log").read_text().splitlines()[-1])["position"]
    assert job_processes(tmp_path) == {}


def test_a_retry_in_another_pod_goes_on(flow: Flow, pod: Pod, tmp_path: Path) -> None:
    """Airflow has kept which job the task had, in a pod that is gone: it has ended in order, or could not say anything
    any more."""
    kept = None
    for number, at_once in enumerate((False, True), start=1):
        evicted = pod(kept)
        _streams(flow, 10 * number)
        (folder,) = tmp_path.glob("bottledwater/stream-*")
        kept = _kept(folder)
        evicted.kill()
        if at_once:
            for pid in job_processes(tmp_path):
                os.kill(pid, signal.SIGKILL)
        until(lambda: job_processes(tmp_path) == {}, "the job has ended")
        # the next pod has a disk of its own
        shutil.rmtree(folder, ignore_errors=True)
    pod(kept)
    _streams(flow, 30)
    assert verified_by_command(flow).rows == 30
    log = (tmp_path / "pod2.log").read_text()
    assert "has not reported for" in log and "publishes nothing any more" in log


def _kept(folder: Path) -> dict[str, Any]:
    """The identity of the job with this folder, as a task in another pod finds it."""
    job_id = json.loads((folder / "submission.json").read_text())["id"]
    return {
        "id": job_id,
        "host": "the-pod-before",
        "folder": str(folder),
        "application": "",
        "master": "yarn",
    }
