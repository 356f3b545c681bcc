"""A YARN cluster on two other hosts: an application with an archive of the environment, its end, its logs and its
death."""

from __future__ import annotations

import json
import re
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from airflow_bottledwater.processes import alive
from tests.support.clusters.archive import make_archive
from tests.support.clusters.hosts import Network, available
from tests.support.clusters.standalone import spark_home
from tests.support.clusters.yarn import YarnCluster
from tests.support.waiting import until

pytestmark = [pytest.mark.skipif(bool(available()), reason=available()), pytest.mark.long]

#: where the package is found, in the driver and in an executor
APP = """
import json, os, socket, sys, time
import airflow_bottledwater
from pyspark.sql import SparkSession

def here(rows):
    import airflow_bottledwater
    import numba
    return [[socket.gethostname(), airflow_bottledwater.__file__, sum(rows)]]

spark = SparkSession.builder.getOrCreate()
driver = [socket.gethostname(), airflow_bottledwater.__file__, sys.executable, os.environ["CONTAINER_ID"]]
(executor,) = spark.sparkContext.parallelize(range(1000), 1).mapPartitions(here).collect()
print(json.dumps({"driver": driver, "executor": executor}), flush=True)
time.sleep(float(sys.argv[1]))
"""


@pytest.fixture(scope="module")
def archive(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    made = make_archive(tmp_path_factory.mktemp("archive") / "environment.tar.gz")
    yield made
    made.unlink()  # pytest keeps folders for a while


def submit(yarn: YarnCluster, folder: Path, archive: Path, seconds: float, **settings: str) -> str:
    """Submit the application, and return its id as soon as it is accepted."""
    (folder / "app.py").write_text(APP)
    python = "./environment/bin/python"
    chosen = {
        **yarn.spark_settings(),
        "spark.yarn.submit.waitAppCompletion": "false",
        "spark.yarn.dist.archives": f"file://{archive}#environment",
        "spark.yarn.appMasterEnv.PYSPARK_PYTHON": python,
        "spark.executorEnv.PYSPARK_PYTHON": python,
        **settings,
    }
    options = [part for name, value in chosen.items() for part in ("--conf", f"{name}={value}")]
    command = [f"{spark_home()}/bin/spark-submit", "--master", "yarn", "--deploy-mode", "cluster", *options]
    done = subprocess.run(
        [*command, str(folder / "app.py"), str(seconds)],
        env=yarn.client_environment(),
        cwd=folder,
        check=False,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return re.findall(r"application_\d+_\d+", done.stderr)[-1]


def test_the_archive_is_used_by_the_driver_and_by_an_executor(yarn: YarnCluster, archive: Path, tmp_path: Path) -> None:
    assert [node.state() for node in yarn.nodes] == ["RUNNING", "RUNNING"]
    application = submit(yarn, tmp_path, archive, 0, **{"spark.yarn.tags": "run-7"})
    assert [app["id"] for app in yarn.applications(applicationTags="run-7")] == [application]
    ended = yarn.wait(application)
    assert (ended["state"], ended["finalStatus"]) == ("FINISHED", "SUCCEEDED"), yarn.output(application, "stderr")[
        -3000:
    ]
    (line,) = yarn.output(application).splitlines()
    (driver_host, driver_file, python, container), (executor_host, executor_file, total) = json.loads(line).values()
    assert total == sum(range(1000))
    assert {driver_host, executor_host} <= {"host1.test", "host2.test"}
    assert container in driver_file and "/environment/lib/" in driver_file and "/environment/bin/" in python
    assert "/container_" in executor_file and "/environment/lib/" in executor_file and executor_file != driver_file
    assert yarn.attempts(application)[0]["nodeId"].startswith(f"{driver_host}:")
    assert "Final app status: SUCCEEDED" in yarn.logs(application)[f"{container}/stderr"]


def test_an_application_is_killed(yarn: YarnCluster, archive: Path, tmp_path: Path) -> None:
    application = submit(yarn, tmp_path, archive, 1000)
    yarn.wait(application, "RUNNING")
    until(lambda: yarn.output(application), "the job is done")
    running = yarn.containers(application)
    assert alive(running)
    yarn.kill(application)
    assert yarn.wait(application, timeout=60)["state"] == "KILLED"
    until(lambda: not alive(running), "its processes are gone")


def test_a_frozen_host_is_lost_and_comes_back(network: Network, yarn: YarnCluster) -> None:
    network[1].freeze()
    until(lambda: yarn.nodes[1].state() == "LOST", "it is lost")
    network[1].thaw()
    until(lambda: yarn.nodes[1].state() == "RUNNING", "it is back")


def test_a_killed_host_comes_back(network: Network, yarn: YarnCluster) -> None:
    network[0].kill()
    yarn.nodes[0].start()
    assert [node.state() for node in yarn.nodes] == ["RUNNING", "RUNNING"]


def test_a_single_node_on_this_machine_needs_no_other_host(tmp_path: Path) -> None:
    with YarnCluster(tmp_path / "small") as yarn:
        assert yarn.nodes[0].state() == "RUNNING"
        assert yarn.applications() == []
        pid = yarn.manager.pid
    assert pid is not None and not Path(f"/proc/{pid}").exists()
