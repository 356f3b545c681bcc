"""A Spark standalone cluster on two other hosts: both take part in a job, and it goes on without one of them."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.clusters.hosts import Network, available
from tests.support.clusters.standalone import StandaloneCluster, spark_environment
from tests.support.waiting import until

pytestmark = [pytest.mark.skipif(bool(available()), reason=available()), pytest.mark.long]

#: sums a range in four tasks, slow enough for both workers; says where they ran
APP = """
import json, socket, sys, time
from pyspark.sql import SparkSession

seconds = float(sys.argv[1])

def count(rows):
    rows = list(rows)
    time.sleep(seconds)
    return [(socket.gethostname(), sum(rows))]

spark = SparkSession.builder.getOrCreate()
found = spark.sparkContext.parallelize(range(1000), 4).mapPartitions(count).collect()
print(json.dumps({"sum": sum(n for _, n in found), "hosts": sorted({host for host, _ in found})}), flush=True)
"""


def submit(standalone: StandaloneCluster, folder: Path, seconds: float, **settings: str) -> subprocess.Popen[str]:
    """Start the application: its driver runs on this machine."""
    (folder / "app.py").write_text(APP)
    chosen = {**standalone.driver_settings(), "spark.executor.memory": "512m", "spark.executor.cores": "1", **settings}
    options = [part for name, value in chosen.items() for part in ("--conf", f"{name}={value}")]
    # spark-submit is a shell script, and not on the PATH
    command = [Path(sys.executable).parent / "spark-submit", "--master", standalone.url, *options, folder / "app.py"]
    return subprocess.Popen(
        [*map(os.fspath, command), str(seconds)],
        env=spark_environment(),
        stdout=subprocess.PIPE,
        stderr=(folder / "log").open("w"),
        text=True,
        cwd=folder,
    )


def test_both_hosts_take_part(standalone: StandaloneCluster, tmp_path: Path) -> None:
    assert [worker["state"] for worker in standalone.state()["workers"]] == ["ALIVE", "ALIVE"]
    # with too short a task, the first executor would take all before the second has come
    settings = {
        "spark.scheduler.minRegisteredResourcesRatio": "1",
        "spark.scheduler.maxRegisteredResourcesWaitingTime": "60s",
    }
    app = submit(standalone, tmp_path, 0.5, **settings)
    output, _ = app.communicate(timeout=120)
    assert app.returncode == 0, (tmp_path / "log").read_text()[-3000:]
    assert json.loads(output) == {"sum": sum(range(1000)), "hosts": ["host1.test", "host2.test"]}
    assert "Executor" in standalone.workers[0].executor_logs()


def test_the_job_goes_on_without_a_host_that_freezes(
    network: Network, standalone: StandaloneCluster, tmp_path: Path
) -> None:
    settings = {
        "spark.network.timeout": "20s",
        "spark.network.timeoutInterval": "5s",
        "spark.executor.heartbeatInterval": "3s",
    }
    app = submit(standalone, tmp_path, 5, **settings)
    active = until(lambda: [a for a in standalone.state()["activeapps"] if a["cores"] == 2], "it has both workers")
    until(lambda: "Running task" in standalone.workers[1].executor_logs(active[0]["id"]), "tasks run")
    network[1].freeze()
    try:
        output, _ = app.communicate(timeout=180)
        assert app.returncode == 0, (tmp_path / "log").read_text()[-3000:]
        assert json.loads(output) == {"sum": sum(range(1000)), "hosts": ["host1.test"]}
    finally:
        network[1].thaw()
    until(lambda: [worker.state() for worker in standalone.workers] == ["ALIVE", "ALIVE"], "the host is back")


def test_a_worker_that_was_killed_is_started_again(network: Network, standalone: StandaloneCluster) -> None:
    network[0].kill()
    assert network[0].processes() == {}
    standalone.workers[0].start()
    assert standalone.workers[0].state() == "ALIVE"
