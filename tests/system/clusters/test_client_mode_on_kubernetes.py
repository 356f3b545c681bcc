"""Snapshot and stream in client mode with a k8s:// master: the driver is here, and asks a recorded API server for its
executors' pods. In place of their containers run the processes that Spark's image would start."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from airflow_bottledwater.jobs import status, submit, supervise
from airflow_bottledwater.local.kafka import KafkaBroker
from tests.support.clusters.kubernetes import FakeKubernetes
from tests.support.clusters.standalone import spark_environment, spark_home
from tests.support.topics import Flow
from tests.support.verifying import verified_by_command
from tests.support.waiting import until

pytestmark = [pytest.mark.long, pytest.mark.timeout(900)]

#: what docs/operations.md says that it needs, and small executors
CONF = {
    "spark.kubernetes.container.image": "registry.example.com/bottledwater:0.1.0",
    "spark.kubernetes.namespace": "cdc",
    "spark.executor.instances": "1",
    "spark.executor.memory": "512m",
    "spark.executor.cores": "2",
    # a lost one is replaced soon
    "spark.kubernetes.executor.apiPollingInterval": "5s",
    "spark.log.level": "WARN",
}


class Kubelet:
    """Runs each executor's pod as a process, as the entry point of Spark's image does."""

    def __init__(self, kubernetes: FakeKubernetes, folder: Path) -> None:
        self._kubernetes, self._folder = kubernetes, folder
        self.running: dict[str, subprocess.Popen[bytes]] = {}
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._work, daemon=True)
        self._thread.start()

    def _work(self) -> None:
        while not self._ended.wait(0.5):
            for pod in self._kubernetes.of_kind("Pod"):
                name = pod["metadata"]["name"]
                if name not in self.running:
                    self.running[name] = self._start(pod)
                    self._kubernetes.set_phase(name, "Running")
                elif self.running[name].poll() is not None and self._kubernetes.pod(name):
                    self._kubernetes.set_phase(name, "Failed", exit_code=137)

    def _start(self, pod: dict[str, Any]) -> subprocess.Popen[bytes]:
        assert pod["metadata"]["labels"]["spark-role"] == "executor" and pod["metadata"]["namespace"] == "cdc"
        (container,) = pod["spec"]["containers"]
        assert container["args"] == ["executor"] and container["image"] == CONF["spark.kubernetes.container.image"]
        given = {each["name"]: each["value"] for each in container["env"] if "value" in each}
        folder = self._folder / pod["metadata"]["name"]
        folder.mkdir()
        command = [
            "java", f"-Xmx{given['SPARK_EXECUTOR_MEMORY']}", "-XX:+UseSerialGC", "-cp", f"{spark_home()}/jars/*",
            "org.apache.spark.scheduler.cluster.k8s.KubernetesExecutorBackend",
            "--driver-url", given["SPARK_DRIVER_URL"], "--executor-id", given["SPARK_EXECUTOR_ID"],
            "--cores", given["SPARK_EXECUTOR_CORES"], "--app-id", given["SPARK_APPLICATION_ID"],
            "--hostname", "127.0.0.1", "--resourceProfileId", given["SPARK_RESOURCE_PROFILE_ID"],
            "--podName", pod["metadata"]["name"],
        ]  # fmt: skip
        own = {name: value for name, value in given.items() if not name.startswith(("SPARK_CONF", "SPARK_LOCAL"))}
        with (folder / "log").open("wb") as log:
            return subprocess.Popen(
                command,
                cwd=folder,
                stdout=log,
                stderr=log,
                env={**spark_environment(), **own, "SPARK_LOCAL_DIRS": str(folder)},
                start_new_session=True,
            )

    def stop(self) -> None:
        self._ended.set()
        self._thread.join()
        for process in self.running.values():
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGKILL)
                process.wait()

    def logs(self) -> str:
        return "\n".join(path.read_text(errors="replace")[-3000:] for path in sorted(self._folder.glob("*/log")))


Start = Callable[[str], Path]


@pytest.fixture
def kubernetes() -> Iterator[FakeKubernetes]:
    with FakeKubernetes() as server:
        yield server


@pytest.fixture
def kubelet(kubernetes: FakeKubernetes, tmp_path: Path) -> Iterator[Kubelet]:
    (tmp_path / "pods").mkdir()
    made = Kubelet(kubernetes, tmp_path / "pods")
    yield made
    made.stop()


@pytest.fixture
def flow(database: str, kafka: KafkaBroker) -> Flow:
    made = Flow(database, kafka, None, lanes=2, executor_timeout=180.0, create_publication=True)
    made.execute("CREATE TABLE a (id bigint PRIMARY KEY, name text)")
    made.execute("INSERT INTO a SELECT g, 'x' FROM generate_series(1, 1000) g")
    made.create()
    return made


@pytest.fixture
def start(kubernetes: FakeKubernetes, flow: Flow, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Start]:
    """Starts jobs; all of them end with the test."""
    monkeypatch.setenv("KUBECONFIG", "/nowhere")
    made: list[Path] = []

    def one(kind: str) -> Path:
        folder = tmp_path / kind
        folder.mkdir()
        made.append(folder)
        command = submit.command(kind, flow.pipeline.write(folder), master=kubernetes.master, conf=CONF)
        supervise.start(folder, command, submit.environment(master=kubernetes.master))
        return folder

    yield one
    for folder in made:
        assert supervise.stop(folder, timeout=20)


def _log(folder: Path, kubelet: Kubelet) -> str:
    return (folder / supervise.LOG).read_text()[-4000:] + kubelet.logs()


def test_the_executors_are_pods(kubernetes: FakeKubernetes, kubelet: Kubelet, flow: Flow, start: Start) -> None:
    snapshot = start("snapshot")
    until(lambda: not supervise.running(snapshot), "the snapshot's end", 600)
    assert supervise.exit_code(snapshot) == 0, _log(snapshot, kubelet)
    assert status.report(flow.pipeline).complete and len(flow.read("a")) == 1000
    assert len(kubernetes.of_kind("Pod")) == 1

    stream = start("stream")
    flow.execute("UPDATE a SET name = 'y' WHERE id <= 100")
    until(lambda: len(flow.read("a")) == 1100 or not supervise.running(stream), "the changes", 600)
    assert supervise.running(stream), _log(stream, kubelet)
    # the pod is lost: another one is made, in which Spark starts the task again
    name = kubernetes.of_kind("Pod")[-1]["metadata"]["name"]
    os.killpg(kubelet.running[name].pid, signal.SIGKILL)
    until(lambda: len(kubernetes.of_kind("Pod")) == 3, "another pod", 300)
    flow.execute("UPDATE a SET name = 'z' WHERE id <= 100")
    until(lambda: len(flow.read("a")) == 1200 or not supervise.running(stream), "the changes", 600)
    assert supervise.running(stream), _log(stream, kubelet)
    assert verified_by_command(flow).rows == 1000
    assert supervise.stop(stream)
    # neither a pod nor a configuration has the connections
    created = str(kubernetes.created)
    assert flow.dsn not in created and "dbname" not in created
    assert all(sys.executable not in str(pod["spec"]["containers"][0]["args"]) for pod in kubernetes.of_kind("Pod"))
