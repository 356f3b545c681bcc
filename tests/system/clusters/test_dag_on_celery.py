"""The DAG on CeleryExecutor: two workers and the triggerer have a host name and an AIRFLOW_HOME of their own, so that a job can be watched and
stopped through Kafka only."""

from __future__ import annotations

import json
import os
import signal
import threading
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psycopg
import pytest

from airflow_bottledwater.local.airflow_client import AirflowClient
from airflow_bottledwater.local.stack import DataStack
from tests.support.clusters.celery import CeleryAirflow
from tests.support.clusters.hosts import available
from tests.support.processes import job_processes
from tests.support.topics import read
from tests.support.verifying import verified_in_airflow
from tests.support.waiting import until

pytestmark = [pytest.mark.skipif(bool(available()), reason=available()), pytest.mark.long]

DAG = "bottledwater"
DAGS = Path(__file__).parents[3] / "dags"


class System:
    """Data servers, and an Airflow with Celery whose connections are to them."""

    def __init__(self, folder: Path) -> None:
        self.data, self.folder = DataStack(folder / "data"), folder

    def start(self) -> None:
        self.data.start()
        self.data.postgres.createdb("shop")
        connections = {
            "POSTGRES_DEFAULT": {
                "conn_type": "postgres", "host": "127.0.0.1", "port": self.data.postgres.port, "login": "postgres", "schema": "shop",
            },
            "KAFKA_DEFAULT": {"conn_type": "kafka", "extra": {"bootstrap.servers": self.data.kafka.bootstrap}},
        }  # fmt: skip
        env = {f"AIRFLOW_CONN_{name}": json.dumps(value) for name, value in connections.items()}
        self.airflow = CeleryAirflow(self.folder / "airflow", self.data.postgres, dags_folder=DAGS, env=env)
        self.airflow.start()
        self.client.wait_for_dag(DAG)

    def stop(self) -> None:
        if hasattr(self, "airflow"):
            self.airflow.stop()
            for pid in self.jobs():
                os.kill(pid, signal.SIGKILL)
        self.data.stop()

    @property
    def client(self) -> AirflowClient:
        return self.airflow.client()

    def execute(self, statement: str) -> list[tuple[Any, ...]]:
        with psycopg.connect(self.data.postgres.dsn("shop"), autocommit=True) as connection:
            cursor = connection.execute(statement)  # type: ignore[call-overload]
            return cursor.fetchall() if cursor.description else []

    def jobs(self) -> dict[int, tuple[str, str]]:
        """The processes of jobs on all hosts: process id → host and folder."""
        return {
            pid: (worker.host, folder)
            for worker in self.airflow.workers
            for pid, folder in job_processes(self.airflow.folder / worker.host).items()
        }


class Stream:
    """A run of the DAG, and the writer whose rows it publishes."""

    def __init__(self, system: System, name: str) -> None:
        self.system, self.name, self.written = system, name, 0
        system.execute(f"CREATE TABLE {name} (id bigint PRIMARY KEY, name text)")
        self._ended = threading.Event()
        self._writer = threading.Thread(target=self._write, daemon=True)
        self._writer.start()
        conf = {
            "tables": [name],
            "slot": name,
            "topic_prefix": "x",
            "output_format": "json",
            "drop_slot": "always",
        }
        self.run_id = system.client.trigger(DAG, conf)

    def _write(self) -> None:
        with psycopg.connect(self.system.data.postgres.dsn("shop"), autocommit=True) as connection:
            while not self._ended.wait(0.05):
                connection.execute(f"INSERT INTO {self.name} VALUES ({self.written + 1}, 'x')")  # type: ignore[call-overload]
                self.written += 1

    def end(self) -> None:
        self._ended.set()
        self._writer.join()

    def task(self, name: str = "stream") -> dict[str, Any]:
        return next(t for t in self.system.client.task_instances(DAG, self.run_id) if t["task_id"] == name)

    def deferred(self, but: str = "", timeout: float = 300) -> tuple[str, str]:
        """Host and folder of the job that reads from the slot, once the task is deferred; not the one with this folder."""

        def found() -> tuple[str, str] | None:
            state = self.task()["state"]
            assert state != "failed", self.why()
            jobs = {job for job in self.system.jobs().values() if job[1].startswith("stream-")} - {("", "")}
            others = [job for job in jobs if job[1] != but]
            active = self.system.execute(f"SELECT active FROM pg_replication_slots WHERE slot_name = '{self.name}'")
            return others[0] if state == "deferred" and len(others) == 1 and active == [(True,)] else None

        return until(found, "a stream that is deferred", timeout, pause=0.5)

    def why(self) -> str:
        return "\n".join(
            f"--- {t['task_id']} {t['state']}\n{self.system.client.task_log(DAG, self.run_id, t['task_id'], max(1, t['try_number']))[-3000:]}"
            for t in self.system.client.task_instances(DAG, self.run_id)
            if t["state"] in ("failed", "up_for_retry", "deferred")
        )

    def nothing_lost_or_twice(self) -> None:
        """Everything that is written by now is published soon, and only once."""
        written = self.written

        def ids() -> list[int]:
            return [int(message.key["id"]) for message in read(self.system.data.kafka, f"x.{self.name}")]

        until(lambda: len(set(ids())) >= written, f"all of {written} rows", 120, pause=0.5)
        found = ids()
        assert [i for i, n in Counter(found).items() if n > 1] == []
        assert sorted(found) == list(range(1, max(found) + 1))

    def gone(self, timeout: float = 60) -> None:
        """No process of a job lives, and the slot is there and free."""
        until(lambda: not self.system.jobs(), "no process of a job lives", timeout)
        until(
            lambda: (
                self.system.execute(f"SELECT active FROM pg_replication_slots WHERE slot_name = '{self.name}'")
                == [(False,)]
            ),
            "the slot is free",
            30,
        )

    def clear(self) -> None:
        self.system.client.clear(DAG, self.run_id, ["stream"], downstream=True)


@pytest.fixture(scope="module")
def system(tmp_path_factory: pytest.TempPathFactory) -> Iterator[System]:
    started = System(tmp_path_factory.mktemp("celery"))
    try:
        started.start()
        yield started
    finally:
        started.stop()


@pytest.fixture(scope="module")
def stream(system: System) -> Iterator[Stream]:
    started = Stream(system, "orders")
    yield started
    started.end()


def _signal(pids: Any, signum: int) -> None:
    for pid in pids:
        os.kill(pid, signum)


Streaming = Callable[[], tuple[str, str]]


def test_it_streams_from_a_worker(system: System, stream: Stream) -> None:
    host, folder = stream.deferred()
    assert host in {worker.host for worker in system.airflow.workers} and folder
    stream.nothing_lost_or_twice()


def test_marked_failed_the_job_on_the_worker_ends(system: System, stream: Stream) -> None:
    """The triggerer is on another host."""
    system.client.set_task_state(DAG, stream.run_id, "stream", "failed")
    stream.gone()
    until(lambda: stream.task("drop_slot")["state"] in ("success", "failed", "upstream_failed"), "the teardown", 90)


def test_cleared_the_old_job_is_gone_before_the_new_one_starts(system: System, stream: Stream) -> None:
    # the slot was dropped with the run: another one, with a table of its own
    system.client.wait_run(DAG, stream.run_id, 90)
    stream.end()
    stream.__dict__.update(Stream(system, "tickets").__dict__)
    _, old = stream.deferred()
    stream.clear()
    _, new = stream.deferred(but=old)
    assert new != old and len({folder for _, folder in system.jobs().values()}) == 1


def test_another_triggerer_watches_the_same_job(system: System, stream: Stream) -> None:
    job = stream.deferred()
    triggerer = system.airflow.components["triggerer"]
    triggerer.kill()
    triggerer.start()
    assert stream.deferred() == job


def test_a_worker_that_dies_with_its_job_is_replaced_by_the_other(system: System, stream: Stream) -> None:
    host, folder = stream.deferred()
    worker = system.airflow.components[host]
    pids = [pid for pid, (where, _) in system.jobs().items() if where == host]
    worker.kill()
    for pid in pids:
        if Path(f"/proc/{pid}").exists():
            os.kill(pid, signal.SIGKILL)
    other, _ = stream.deferred(but=folder)
    assert other != host
    worker.start()
    stream.nothing_lost_or_twice()


def test_a_job_that_hangs_is_replaced_and_publishes_nothing_when_it_wakes(system: System, stream: Stream) -> None:
    _, folder = stream.deferred()
    frozen = [pid for pid, (_, of) in system.jobs().items() if of == folder]
    _signal(frozen, signal.SIGSTOP)
    try:
        new_host, new = stream.deferred(but=folder)
    finally:
        _signal((pid for pid in frozen if Path(f"/proc/{pid}").exists()), signal.SIGCONT)
    assert new != folder
    until(lambda: all(of == new for _, of in system.jobs().values()), "the old job has ended", 90)
    stream.nothing_lost_or_twice()
    assert stream.deferred() == (new_host, new)


def test_a_run_that_is_ended_leaves_nothing(system: System, stream: Stream) -> None:
    stream.deferred()
    conf = {"slot": stream.name, "topic_prefix": "x", "output_format": "json"}
    verified_in_airflow(system.client, conf)
    system.client.set_run_state(DAG, stream.run_id, "failed")
    until(lambda: not system.jobs(), "no process of a job lives", 90)
    until(lambda: stream.task("drop_slot")["state"] in ("success", "failed"), "the teardown has ended", 120)
    assert stream.task("drop_slot")["state"] == "success", stream.why()
    assert system.execute(f"SELECT FROM pg_replication_slots WHERE slot_name = '{stream.name}'") == []
