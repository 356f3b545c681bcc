"""Snapshot and stream on YARN, submitted by the operators. In cluster mode nothing of a job runs on Airflow's host,
which watches and stops it through Kafka; in client mode only the driver does."""

from __future__ import annotations

import json
import os
import signal
import sys
from collections.abc import Iterator, Mapping
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import pytest

from airflow_bottledwater.jobs import status, stop
from airflow_bottledwater.jobs.identity import Identity
from airflow_bottledwater.operators.snapshot import SnapshotToKafkaOperator
from airflow_bottledwater.operators.stream import StreamToKafkaOperator
from airflow_bottledwater.pipeline.description import Spark
from airflow_bottledwater.processes import send
from tests.support.clusters.archive import make_archive
from tests.support.clusters.hosts import Network, available
from tests.support.clusters.pipelines import ROWS, live, make_flow
from tests.support.clusters.servers import ReachableServers
from tests.support.clusters.tasks import Task
from tests.support.clusters.yarn import YarnCluster
from tests.support.describing import described
from tests.support.live_reader import LiveReader
from tests.support.topics import Flow
from tests.support.waiting import until

pytestmark = [pytest.mark.skipif(bool(available()), reason=available()), pytest.mark.long, pytest.mark.timeout(900)]

PASSWORD = "Ma9ker7"


@pytest.fixture(scope="module")
def archive(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    made = make_archive(tmp_path_factory.mktemp("archive") / "environment.tar.gz")
    yield made
    made.unlink()  # pytest keeps folders for a while


class Airflow:
    """The operators of one pipeline, with connections as Airflow has them."""

    def __init__(self, yarn: YarnCluster, flow: Flow, archive: Path) -> None:
        self._flow = flow
        python = "./environment/bin/python"
        self._conf = {
            **yarn.spark_settings(),
            "spark.yarn.dist.archives": f"file://{archive}#environment",
            "spark.yarn.appMasterEnv.PYSPARK_PYTHON": python,
            "spark.executorEnv.PYSPARK_PYTHON": python,
        }
        self._pipeline = flow.pipeline

    def task(self, kind: type, conf: Mapping[str, str] | None = None, deploy_mode: str = "", **arguments: Any) -> Task:
        return Task(
            lambda: kind(
                task_id="t",
                pipeline=described(
                    self._pipeline,
                    Spark(deploy_mode=deploy_mode, conf={**self._conf, **(conf or {})}),
                    executor_timeout=180.0,
                ),
                poll_interval=1.0,
                **arguments,
            )
        )


@pytest.fixture
def flow(servers: ReachableServers) -> Flow:
    return make_flow(servers)


@pytest.fixture
def airflow(
    yarn: YarnCluster,
    servers: ReachableServers,
    flow: Flow,
    archive: Path,
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
) -> Airflow:
    database = flow.dsn.partition("dbname=")[2].split()[0]
    for name, value in {
        "postgres_default": {
            "conn_type": "postgres", "host": servers.address, "port": servers.postgres.port, "login": "postgres",
            "schema": database, "password": PASSWORD,
        },
        "kafka_default": {"conn_type": "kafka", "extra": {"bootstrap.servers": servers.bootstrap}},
        "spark_default": {"conn_type": "spark", "host": "yarn", "extra": {"deploy-mode": "cluster"}},
    }.items():  # fmt: skip
        monkeypatch.setenv(f"AIRFLOW_CONN_{name.upper()}", json.dumps(value))
    monkeypatch.setenv("AIRFLOW_HOME", str(tmp_path / "airflow"))
    for name, value in yarn.client_environment().items():
        if name.startswith(("HADOOP", "SPARK", "JAVA")):
            monkeypatch.setenv(name, value)
    return Airflow(yarn, flow, archive)


def _more(reader: LiveReader, task: Future[Any], yarn: YarnCluster, seconds: float = 300.0) -> None:
    before = len(reader.arrivals)
    until(lambda: len(reader.arrivals) > before + 50 or task.done(), "more records", seconds)
    assert not task.done(), task.result()


def _application(task: Task) -> str:
    identity: Identity = task.identity
    return identity["application"]


def test_the_whole_life(
    airflow: Airflow, yarn: YarnCluster, flow: Flow, caplog: pytest.LogCaptureFixture, tmp_path: Path
) -> None:
    with live(flow) as reader:
        snapshot = airflow.task(SnapshotToKafkaOperator)
        result = snapshot.start().result(400)
        assert result["rows"] >= 2 * ROWS and status.report(flow.pipeline).complete
        first = _application(snapshot)
        assert yarn.wait(first)["finalStatus"] == "SUCCEEDED"
        _no_secret_is_left(yarn, first, tmp_path)

        stream = airflow.task(StreamToKafkaOperator)
        running = stream.start()
        until(lambda: len(reader.arrivals) >= 2 * ROWS, "the snapshot is read")
        _more(reader, running, yarn)

        # the driver and its JVM are killed with its container: nobody can report that
        second = _application(stream)
        _kill_master(yarn, second)
        until(lambda: _application(stream) not in ("", second), "it is submitted again", 240)
        _more(reader, running, yarn)

        # an operator of the cluster ends it
        third = _application(stream)
        yarn.kill(third)
        until(lambda: _application(stream) not in ("", third), "it is submitted again", 240)
        _more(reader, running, yarn)
        assert stream.store.values["bottledwater_restarts"]["count"] == 2

        # the task is marked or cleared
        fourth = _application(stream)
        stop.stop(flow.pipeline, stream.identity)
        assert yarn.wait(fourth)["finalStatus"] == "SUCCEEDED"
        (row,) = flow.execute(f"SELECT active FROM pg_replication_slots WHERE slot_name = '{flow.pipeline.slot}'")
        assert row == (False,)
        _no_secret_is_left(yarn, fourth, tmp_path)
        # the task still waits, as if its triggerer had given it away: it is submitted again, and ended for good
        until(lambda: _application(stream) not in ("", fourth), "it is submitted again", 240)
        _more(reader, running, yarn)
        _retire(flow)
        assert running.result(120)["position"]


def test_a_job_that_hangs_is_fenced_and_cancelled(
    airflow: Airflow, yarn: YarnCluster, network: Network, flow: Flow, caplog: pytest.LogCaptureFixture
) -> None:
    """Its hosts stand still, so that nothing answers; the application is cancelled when they come back at the
    latest."""
    with live(flow) as reader:
        flow.snapshot()
        stream = airflow.task(StreamToKafkaOperator)
        running = stream.start()
        until(lambda: len(reader.arrivals) >= 2 * ROWS, "the snapshot is read")
        _more(reader, running, yarn)
        application = _application(stream)
        pids = yarn.containers(application)
        for pid in pids:
            os.kill(pid, signal.SIGSTOP)
        with caplog.at_level("INFO"):
            stop.stop(flow.pipeline, stream.identity, timeout=3.0)
        assert "publishes nothing any more" in caplog.text
        assert f"The application {application} was cancelled" in caplog.text
        send(pids, signal.SIGCONT)
        assert yarn.wait(application, timeout=60)["state"] == "KILLED"
        until(lambda: _application(stream) not in ("", application), "it is submitted again", 240)
        _more(reader, running, yarn)
        _retire(flow)
        assert running.result(120)["position"]


def test_in_client_mode_the_driver_is_here_and_the_executors_are_containers(
    airflow: Airflow, yarn: YarnCluster, flow: Flow, tmp_path: Path
) -> None:
    """Nothing is said of the driver's address."""
    before = {each["id"] for each in yarn.applications()}
    cache = os.environ.get("XDG_CACHE_HOME") or str(Path.home() / ".cache")
    client = {
        "spark.pyspark.python": sys.executable,
        "spark.yarn.dist.archives": "",
        # compiled code is there already; the home of containers is another one
        "spark.executorEnv.XDG_CACHE_HOME": cache,
    }
    with live(flow) as reader:
        snapshot = airflow.task(SnapshotToKafkaOperator, client, deploy_mode="client")
        assert snapshot.start().result(400)["rows"] >= 2 * ROWS and status.report(flow.pipeline).complete

        stream = airflow.task(StreamToKafkaOperator, client, deploy_mode="client")
        running = stream.start()
        _more(reader, running, yarn)
        first = stream.identity["id"]
        (folder,) = (tmp_path / "airflow" / "bottledwater").iterdir()
        assert folder == Path(stream.identity["folder"])

        # an operator of the cluster ends it, which the driver notices
        (application,) = yarn.applications(states="RUNNING")
        yarn.kill(application["id"])
        until(lambda: stream.identity["id"] != first, "it is submitted again", 240)
        _more(reader, running, yarn)
        assert stream.store.values["bottledwater_restarts"]["count"] == 1
        _retire(flow)
        assert running.result(120)["position"]
    until(lambda: not yarn.applications(states="RUNNING,ACCEPTED"), "no application is left")
    assert list(folder.parent.iterdir()) == []
    for application_id in {each["id"] for each in yarn.applications()} - before:
        _no_secret_is_left(yarn, application_id, tmp_path, client=True)


def _retire(flow: Flow) -> None:
    """As ``bottledwater stop`` does."""
    from airflow_bottledwater.jobs import requests
    from airflow_bottledwater.postgres.connect import connect
    from airflow_bottledwater.postgres.server import identify

    with connect(flow.dsn) as connection:
        assert requests.stop_pipeline(flow.pipeline, identify(connection)) is not None


def _kill_master(yarn: YarnCluster, application: str) -> None:
    for pid in yarn.containers(application):
        if b"ApplicationMaster" in Path(f"/proc/{pid}/cmdline").read_bytes():
            os.kill(pid, signal.SIGKILL)


def _no_secret_is_left(yarn: YarnCluster, application: str, home: Path, *, client: bool = False) -> None:
    """
    :param client: whether the driver was here: its settings were never staged.
    """
    staged = yarn.folder / "staging"
    if client:
        # an ApplicationMaster that YARN kills may leave the rest of its folder
        assert not list(staged.glob(f"**/{application}/**/pipeline-*.json"))
    else:
        until(lambda: not list(staged.glob(f"**/{application}/*")), "the staged settings are removed")
    assert not list(home.rglob("pipeline-*.json"))
    for name, text in yarn.logs(application).items():
        # the script that starts a container names the file, and nothing of what is in it
        assert PASSWORD not in text, name
    # YARN keeps what it has localized in the user's private cache, for as long as there is room: docs/operations.md
    # says so
    for copy in yarn.folder.glob("node*/local/usercache/*/filecache/**/pipeline-*.json"):
        assert any(place.stat().st_mode & 0o77 == 0 for place in (copy, *copy.parents)), copy
