"""An Airflow with two workers on two hosts: a deferred task goes on elsewhere, a triggerer is replaced, a worker dies
at work."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from airflow_bottledwater.local.airflow_client import AirflowClient
from airflow_bottledwater.local.postgres import PostgresServer
from tests.support.clusters.celery import CeleryAirflow
from tests.support.clusters.hosts import available
from tests.support.waiting import until

pytestmark = [pytest.mark.skipif(bool(available()), reason=available()), pytest.mark.long]

DAG = '''
import json, os, socket, time
from airflow.providers.standard.triggers.file import FileDeleteTrigger
from airflow.sdk import DAG, BaseOperator, task


class Defer(BaseOperator):
    """Writes down where each half of it ran."""

    template_fields = ("folder",)

    def __init__(self, folder, **arguments):
        super().__init__(**arguments)
        self.folder = folder

    def _say(self, half):
        with open(f"{self.folder}/halves", "a") as file:
            print(json.dumps([half, socket.gethostname(), os.environ["AIRFLOW_HOME"]]), file=file)
        self.log.info("the %s half on %s", half, socket.gethostname())

    def execute(self, context):
        self._say("first")
        self.defer(trigger=FileDeleteTrigger(filepath=f"{self.folder}/go", poke_interval=0.5), method_name="resume")

    def resume(self, context, event=None):
        self._say("second")


@task(retries=0)
def long(folder):
    open(f"{folder}/at_work", "w").write(f"{os.getpid()} {socket.gethostname()}")
    time.sleep(1000)


with DAG("deferring", params={"folder": "/"}):
    Defer(task_id="wait", folder="{{ params.folder }}")

with DAG("working", params={"folder": "/"}):
    long("{{ params.folder }}")
'''


@pytest.fixture(scope="module")
def airflow(postgres: PostgresServer, tmp_path_factory: pytest.TempPathFactory) -> Iterator[CeleryAirflow]:
    dags = tmp_path_factory.mktemp("dags")
    (dags / "tiny.py").write_text(DAG)
    with CeleryAirflow(tmp_path_factory.mktemp("celery"), postgres, dags_folder=dags) as airflow:
        for dag in ("deferring", "working"):
            airflow.client().wait_for_dag(dag)
        yield airflow


@pytest.fixture
def client(airflow: CeleryAirflow) -> AirflowClient:
    return airflow.client()


def task(client: AirflowClient, dag: str, run: str) -> dict[str, Any]:
    (found,) = client.task_instances(dag, run)
    return dict(found)


def wait_for(client: AirflowClient, dag: str, run: str, state: str) -> dict[str, Any]:
    return until(lambda: (t := task(client, dag, run))["state"] == state and t, f"{dag} is {state}", pause=0.5)


def test_a_deferred_task_goes_on_at_the_other_worker(
    airflow: CeleryAirflow, client: AirflowClient, tmp_path: Path
) -> None:
    run = client.trigger("deferring", {"folder": str(tmp_path)})
    first = wait_for(client, "deferring", run, "deferred")["hostname"]
    airflow.components[first].kill()
    (tmp_path / "go").touch()
    assert client.wait_run("deferring", run)["state"] == "success"
    airflow.components[first].start()
    (other,) = (worker.host for worker in airflow.workers if worker.host != first)
    assert task(client, "deferring", run)["hostname"] == other
    halves = [json.loads(line) for line in (tmp_path / "halves").read_text().splitlines()]
    assert halves == [[half, host, str(airflow.folder / host)] for half, host in (("first", first), ("second", other))]
    log = client.task_log("deferring", run, "wait")
    assert f"the first half on {first}" in log and f"the second half on {other}" in log


def test_triggers_are_taken_over_from_a_triggerer_that_was_killed(
    airflow: CeleryAirflow, client: AirflowClient, tmp_path: Path
) -> None:
    run = client.trigger("deferring", {"folder": str(tmp_path)})
    wait_for(client, "deferring", run, "deferred")
    airflow.components["triggerer"].kill()
    airflow.components["triggerer"].start()
    (tmp_path / "go").touch()
    assert client.wait_run("deferring", run)["state"] == "success"


def test_a_task_fails_whose_worker_was_killed(airflow: CeleryAirflow, client: AirflowClient, tmp_path: Path) -> None:
    run = client.trigger("working", {"folder": str(tmp_path)})
    at_work = tmp_path / "at_work"
    pid, host = until(lambda: at_work.exists() and at_work.read_text().split(), "it is at work")
    airflow.components[host].kill()
    until(lambda: not Path(f"/proc/{pid}").exists(), "the task is gone, too")
    assert client.wait_run("working", run)["state"] == "failed"
    airflow.components[host].start()


def test_frozen_workers_go_on(airflow: CeleryAirflow, client: AirflowClient, tmp_path: Path) -> None:
    for worker in airflow.workers:
        worker.pause()
    run = client.trigger("deferring", {"folder": str(tmp_path)})
    until(lambda: task(client, "deferring", run)["state"] == "queued", "it is queued")
    assert not (tmp_path / "halves").exists()
    # Redis hands a task to the worker that has waited longest for one, frozen or not
    for worker in airflow.workers:
        worker.resume()
    wait_for(client, "deferring", run, "deferred")
    (tmp_path / "go").touch()
    assert client.wait_run("deferring", run)["state"] == "success"
