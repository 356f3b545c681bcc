"""What a real spark-submit asks of Kubernetes in cluster mode, and what it makes of the driver's end."""

from __future__ import annotations

import json
import subprocess
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import pytest

from airflow_bottledwater.local import ports
from tests.support.clusters.kubernetes import FakeKubernetes
from tests.support.clusters.standalone import spark_environment, spark_home
from tests.support.waiting import until


@pytest.fixture
def kubernetes() -> Iterator[FakeKubernetes]:
    with FakeKubernetes() as server:
        yield server


def spark_submit(kubernetes: FakeKubernetes, folder: Path, *arguments: str) -> subprocess.Popen[str]:
    command = [f"{spark_home()}/bin/spark-submit", "--master", kubernetes.master, *arguments]
    with (folder / "log").open("w") as log:
        return subprocess.Popen(
            command, env=spark_environment(KUBECONFIG="/nowhere"), cwd=folder, stdout=log, stderr=log, text=True
        )


def submit(kubernetes: FakeKubernetes, folder: Path, **settings: str) -> subprocess.Popen[str]:
    chosen = {
        "spark.kubernetes.container.image": "example/image:1",
        "spark.kubernetes.namespace": "jobs",
        "spark.kubernetes.driver.pod.name": "tiny-driver",
        "spark.kubernetes.driver.secretKeyRef.PGPASSWORD": "db:password",
        **settings,
    }
    options = [part for name, value in chosen.items() for part in ("--conf", f"{name}={value}")]
    application = ["local:///opt/app/app.py", "--a", "b"]
    return spark_submit(kubernetes, folder, "--deploy-mode", "cluster", "--name", "tiny", *options, *application)


@pytest.mark.long
def test_a_submission_creates_the_driver_and_what_it_needs(kubernetes: FakeKubernetes, tmp_path: Path) -> None:
    process = submit(kubernetes, tmp_path, **{"spark.kubernetes.submission.waitAppCompletion": "false"})
    assert process.wait(120) == 0, (tmp_path / "log").read_text()
    assert "submission ID jobs:tiny-driver" in (tmp_path / "log").read_text()
    assert sorted(thing["kind"] for thing in kubernetes.created) == ["ConfigMap", "NetworkPolicy", "Pod", "Service"]
    (pod,) = kubernetes.of_kind("Pod")
    assert pod["metadata"]["name"] == "tiny-driver" and pod["metadata"]["labels"]["spark-role"] == "driver"
    (container,) = pod["spec"]["containers"]
    assert container["image"] == "example/image:1" and container["args"][-3:] == ["local:///opt/app/app.py", "--a", "b"]
    (password,) = (variable for variable in container["env"] if variable["name"] == "PGPASSWORD")
    assert password["valueFrom"]["secretKeyRef"] == {"name": "db", "key": "password"}
    kubernetes.set_phase("tiny-driver", "Running")
    status = spark_submit(kubernetes, tmp_path, "--status", "jobs:tiny-driver")
    assert status.wait(120) == 0
    assert "phase: Running" in (tmp_path / "log").read_text()
    kill = spark_submit(kubernetes, tmp_path, "--kill", "jobs:tiny-driver")
    assert kill.wait(120) == 0
    assert kubernetes.pod("tiny-driver") is None
    assert [r.partition("?")[0] for r in kubernetes.requests][-1] == "DELETE /api/v1/namespaces/jobs/pods/tiny-driver"


@pytest.mark.long
def test_who_waits_is_told_the_phase_but_not_by_the_exit_code(kubernetes: FakeKubernetes, tmp_path: Path) -> None:
    process = submit(kubernetes, tmp_path, **{"spark.kubernetes.submission.waitAppCompletion": "true"})
    until(lambda: sum("watch=true" in request for request in kubernetes.requests) > 1, "it watches")
    kubernetes.set_phase("tiny-driver", "Running")
    until(lambda: "phase: Running" in (tmp_path / "log").read_text(), "it has seen that it runs")
    kubernetes.set_phase("tiny-driver", "Failed", exit_code=3)
    assert process.wait(60) == 0
    log = (tmp_path / "log").read_text()
    assert "phase: Failed" in log and "exit code: 3" in log


@pytest.mark.long
def test_a_refused_object_fails_the_submission(kubernetes: FakeKubernetes, tmp_path: Path) -> None:
    kubernetes.refused["configmaps"] = 403
    process = submit(kubernetes, tmp_path, **{"spark.kubernetes.submission.waitAppCompletion": "false"})
    assert process.wait(120) == 1
    assert kubernetes.pod("tiny-driver") is None and len(kubernetes.of_kind("Pod")) == 1


def test_pods_are_selected_by_label_and_missing_ones_reported(kubernetes: FakeKubernetes) -> None:
    base = f"{kubernetes.url}/api/v1/namespaces/jobs/pods"
    for name, role in (("a", "driver"), ("b", "executor")):
        body = {"kind": "Pod", "metadata": {"name": name, "labels": {"role": role}}, "spec": {"containers": []}}
        with ports.open_url(urllib.request.Request(base, json.dumps(body).encode())) as answer:
            assert answer.status == 201 and json.load(answer)["metadata"]["uid"]
    with ports.open_url(f"{base}?labelSelector=role%3Ddriver") as answer:
        assert [pod["metadata"]["name"] for pod in json.load(answer)["items"]] == ["a"]
    kubernetes.delete_pod("a")
    with pytest.raises(urllib.error.HTTPError, match="404"):
        ports.open_url(f"{base}/a")
