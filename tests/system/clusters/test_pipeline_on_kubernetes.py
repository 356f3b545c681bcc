"""Snapshot and stream in Kubernetes' cluster mode: the real spark-submit against a recorded API server, and in place of
the pod's container a process with the arguments that the pod was given. Secret and properties are those of
docs/operations.md."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from airflow.sdk.exceptions import AirflowFailException
from psycopg.conninfo import conninfo_to_dict

from airflow_bottledwater.errors import JobFailed
from airflow_bottledwater.jobs import status, stop
from airflow_bottledwater.local.kafka import KafkaBroker
from airflow_bottledwater.operators.snapshot import SnapshotToKafkaOperator
from airflow_bottledwater.operators.stream import StreamToKafkaOperator
from tests.support.clusters.kubernetes import FakeKubernetes
from tests.support.clusters.tasks import Task
from tests.support.describing import described
from tests.support.documented import OnKubernetes
from tests.support.topics import Flow
from tests.support.verifying import verified_by_command
from tests.support.waiting import until

pytestmark = pytest.mark.long

PASSWORD = "Ma9ker7"
#: what the documentation prints
PRINTED = OnKubernetes()


@pytest.fixture
def kubernetes() -> Iterator[FakeKubernetes]:
    with FakeKubernetes() as server:
        yield server


@pytest.fixture
def flow(database: str, kafka: KafkaBroker) -> Flow:
    made = Flow(database, kafka, None, skip_snapshot=True, heartbeat_interval=0.5, create_publication=True)
    made.execute("CREATE TABLE a (id bigint PRIMARY KEY, name text)")
    made.create()
    return made


class Kubelet:
    """Runs what a driver's pod says, on this machine.

    :param secrets: the namespaces, with a folder for each of their secrets.
    """

    def __init__(self, kubernetes: FakeKubernetes, folder: Path, secrets: Path) -> None:
        self._kubernetes, self._folder, self._secrets = kubernetes, folder, secrets
        self.running: list[subprocess.Popen[bytes]] = []

    def pod(self, number: int = 0) -> dict[str, Any]:
        """A pod that was created, once it is."""
        return until(lambda: (pods := self._kubernetes.of_kind("Pod")) and len(pods) > number and pods[number], "a pod")

    def run(self, pod: dict[str, Any]) -> subprocess.Popen[bytes]:
        """Run a pod, as the API then says."""
        process = self.start(pod)
        self._kubernetes.set_phase(pod["metadata"]["name"], "Running")
        return process

    def start(self, pod: dict[str, Any]) -> subprocess.Popen[bytes]:
        """Run the container of a pod."""
        (container,) = pod["spec"]["containers"]
        arguments = [self._mounted(pod, container, argument) for argument in container["args"]]
        application = next(i for i, each in enumerate(arguments) if each.startswith("local://"))
        kind = arguments[application].removeprefix("local:///opt/bottledwater/jobs/").removesuffix(".py")
        with (self._folder / f"pod{len(self.running)}.log").open("wb") as log:
            self.running.append(
                subprocess.Popen(
                    [sys.executable, "-m", "tests.support.process_job", kind, *arguments[application + 1 :]],
                    stdout=log,
                    stderr=log,
                    env={**os.environ, "SPARK_APPLICATION_ID": "spark-1"},
                )
            )
        return self.running[-1]

    def _mounted(self, pod: dict[str, Any], container: dict[str, Any], path: str) -> str:
        """Where a path in the container is here, if it is in a secret that the pod mounts."""
        secrets = {each["name"]: each["secret"]["secretName"] for each in pod["spec"]["volumes"] if "secret" in each}
        for mount in container["volumeMounts"]:
            if mount["name"] in secrets and path.startswith(f"{mount['mountPath']}/"):
                # a pod can mount the secrets of its own namespace only
                folder = self._secrets / pod["metadata"]["namespace"] / secrets[mount["name"]]
                return path.replace(mount["mountPath"], str(folder))
        return path


@pytest.fixture
def kubelet(kubernetes: FakeKubernetes, flow: Flow, tmp_path: Path) -> Iterator[Kubelet]:
    secret = tmp_path / "secrets" / PRINTED.namespace / PRINTED.secret / PRINTED.file
    secret.parent.mkdir(parents=True)
    secret.write_text(json.dumps({**PRINTED.settings, "postgres": flow.dsn, "kafka": dict(flow.pipeline.kafka)}))
    made = Kubelet(kubernetes, tmp_path, tmp_path / "secrets")
    yield made
    for process in made.running:
        process.kill()
        process.wait()


Make = Callable[[type], Task]


@pytest.fixture
def make(kubernetes: FakeKubernetes, flow: Flow, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Make:
    """Makes the task of an operator."""
    dsn = conninfo_to_dict(flow.dsn)
    for name, value in {
        "postgres_default": {
            "conn_type": "postgres", "host": dsn["host"], "port": int(dsn["port"]), "login": dsn["user"],
            "schema": dsn["dbname"], "password": PASSWORD,
        },
        "kafka_default": {"conn_type": "kafka", "extra": flow.pipeline.kafka},
        "spark_default": {
            "conn_type": "spark", "host": kubernetes.master, "extra": {"deploy-mode": "cluster"},
        },
    }.items():  # fmt: skip
        monkeypatch.setenv(f"AIRFLOW_CONN_{name.upper()}", json.dumps(value))
    monkeypatch.setenv("AIRFLOW_HOME", str(tmp_path / "airflow"))
    monkeypatch.setenv("AIRFLOW__CORE__EXECUTOR", "KubernetesExecutor")
    monkeypatch.setenv("KUBECONFIG", "/nowhere")

    def task(kind: type) -> Task:
        return Task(
            lambda **more: kind(
                task_id="t",
                pipeline=described(flow.pipeline, replace(PRINTED.spark, conn_id="spark_default", **more)),
                poll_interval=0.5,
            )
        )

    return task


@pytest.fixture
def task(make: Make) -> Task:
    return make(StreamToKafkaOperator)


def test_the_job_is_submitted_watched_and_stopped(
    kubernetes: FakeKubernetes, kubelet: Kubelet, task: Task, flow: Flow
) -> None:
    ended = task.start()
    pod = kubelet.pod()
    # while the cluster has no room for it
    assert not ended.done()
    job = kubelet.run(pod)
    flow.execute("INSERT INTO a SELECT g, 'x' FROM generate_series(1, 100) g")
    until(lambda: len(flow.read("a")) == 100 or ended.done(), "the rows are published")
    assert task.identity["application"] == f"{PRINTED.namespace}:{pod['metadata']['name']}"
    # the password is in no manifest, and the secret is mounted
    created = json.dumps(kubernetes.created)
    assert PASSWORD not in created and "postgres_default" not in created
    assert pod["metadata"]["namespace"] == PRINTED.namespace
    assert pod["spec"]["serviceAccountName"] == "bottledwater-driver"
    stop.stop(flow.pipeline, task.identity)
    assert job.wait(60) == 0
    # the task still waits: the next pod is made
    assert kubelet.pod(1)["metadata"]["name"] != pod["metadata"]["name"]
    second = kubelet.run(kubelet.pod(1))
    flow.execute("INSERT INTO a SELECT g, 'x' FROM generate_series(101, 200) g")
    until(lambda: len(flow.read("a")) == 200 or ended.done(), "the rows are published")
    assert verified_by_command(flow).rows == 200
    _retire(flow)
    assert ended.result(60)["stopped"] and second.wait(60) == 0


def test_a_pod_that_hangs_is_fenced_and_deleted(
    kubernetes: FakeKubernetes, kubelet: Kubelet, task: Task, flow: Flow
) -> None:
    task.start()
    pod = kubelet.pod()
    job = kubelet.run(pod)
    flow.execute("INSERT INTO a VALUES (1, 'x')")
    until(lambda: len(flow.read("a")) == 1, "the row is published")
    job.send_signal(signal.SIGSTOP)
    stop.stop(flow.pipeline, task.identity, timeout=2.0)
    assert kubernetes.pod(pod["metadata"]["name"]) is None
    assert any(
        request.startswith(f"DELETE /api/v1/namespaces/{PRINTED.namespace}/pods/") for request in kubernetes.requests
    )


@pytest.fixture
def snapshot(flow: Flow, make: Make) -> Task:
    """The snapshot's task; there is a table with rows."""
    flow.execute(f"SELECT pg_drop_replication_slot('{flow.pipeline.slot}')")
    flow.change(slot=f"{flow.pipeline.slot}_s", topic_prefix=f"{flow.pipeline.slot}_s", skip_snapshot=False)
    flow.execute("INSERT INTO a SELECT g, 'x' FROM generate_series(1, 500) g")
    flow.create()
    return make(SnapshotToKafkaOperator)


def test_a_snapshot_is_submitted_watched_and_finished(
    kubernetes: FakeKubernetes, kubelet: Kubelet, snapshot: Task, flow: Flow
) -> None:
    ended = snapshot.start()
    job = kubelet.run(kubelet.pod())
    assert ended.result(180)["rows"] == 500 and job.wait(60) == 0
    assert len(flow.read("a")) == 500 and status.report(flow.pipeline).complete
    # once more: it is complete, and no pod is made. (The task of another test's stream may still make one of its own)
    assert snapshot._make().execute(snapshot.context)
    pods = [pod["metadata"]["name"] for pod in kubernetes.of_kind("Pod")]
    assert len([name for name in pods if "snapshot" in name]) == 1


def test_a_snapshot_that_fails_for_good_says_why(kubelet: Kubelet, snapshot: Task, flow: Flow) -> None:
    flow.execute(f"SELECT pg_drop_replication_slot('{flow.pipeline.slot}')")
    ended = snapshot.start()
    job = kubelet.run(kubelet.pod())
    with pytest.raises(AirflowFailException, match="does not exist any more"):
        ended.result(180)
    assert job.wait(60) == 1


def test_a_snapshot_that_is_ended_while_its_pod_is_pending_is_cancelled(
    kubernetes: FakeKubernetes, kubelet: Kubelet, snapshot: Task, flow: Flow
) -> None:
    ended = snapshot.start()
    pod = kubelet.pod()
    until(lambda: snapshot.trigger, "the task is deferred")
    stop.stop(flow.pipeline, snapshot.identity, timeout=2.0)
    assert kubernetes.pod(pod["metadata"]["name"]) is None
    # no user has ended the task: a retry submits it again
    with pytest.raises(JobFailed, match="its task still waits for it"):
        ended.result(180)
    # should its container begin all the same, it does nothing
    assert kubelet.start(pod).wait(180) == 0
    assert flow.read("a") == [] and not status.report(flow.pipeline).complete


def test_what_is_missing_is_said_before_anything_is_submitted(kubernetes: FakeKubernetes, task: Task) -> None:
    with pytest.raises(AirflowFailException, match="settings_file"):
        task._make(settings_file="").execute(task.context)
    assert kubernetes.requests == []


def _retire(flow: Flow) -> None:
    """As ``bottledwater stop`` does."""
    from airflow_bottledwater.jobs import requests
    from airflow_bottledwater.postgres.connect import connect
    from airflow_bottledwater.postgres.server import identify

    # its first rows may be there before its first status
    until(lambda: (found := status.report(flow.pipeline).job) and found.state == "streaming", "it reports")
    with connect(flow.dsn) as connection:
        assert requests.stop_pipeline(flow.pipeline, identify(connection)) is not None
