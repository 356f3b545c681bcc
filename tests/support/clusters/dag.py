"""An Airflow with CeleryExecutor, the servers of its pipelines, and where Spark runs their jobs."""

from __future__ import annotations

import json
import os
import signal
import sys
import threading
from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import psycopg

from airflow_bottledwater.local.airflow_client import AirflowClient
from airflow_bottledwater.local.stack import DataStack
from tests.support.clusters.celery import CeleryAirflow
from tests.support.clusters.standalone import StandaloneCluster
from tests.support.clusters.yarn import YarnCluster
from tests.support.processes import job_processes
from tests.support.topics import read
from tests.support.waiting import until

DAG = "bottledwater"
DAGS = Path(__file__).parents[3] / "dags"


class Local:
    """Spark on the worker's own host, which needs no cluster.

    :param folder: for the cluster.
    """

    connection: Mapping[str, Any] = {
        "conn_type": "spark",
        "host": "local[2]",
        "extra": {"deploy-mode": "client", "spark-binary": "spark-submit"},
    }

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def start(self) -> None:
        pass

    def stop(self) -> None:
        pass

    def settings(self) -> dict[str, str]:
        """Lines of spark-defaults.conf."""
        return {}

    def environment(self) -> dict[str, str]:
        """What the workers have in their environment."""
        (self.folder / "conf").mkdir(parents=True, exist_ok=True)
        lines = (f"{name} {value}\n" for name, value in self.settings().items())
        (self.folder / "conf" / "spark-defaults.conf").write_text("".join(lines))
        return {"SPARK_CONF_DIR": str(self.folder / "conf")}

    def jobs(self, airflow: CeleryAirflow) -> dict[int, tuple[str, str]]:
        """The processes that make up a job's life: process id → host and job."""
        return {
            pid: (worker.host, folder)
            for worker in airflow.workers
            for pid, folder in job_processes(airflow.folder / worker.host).items()
        }

    def all_of(self, airflow: CeleryAirflow, job: str) -> list[int]:
        """All processes of a job, wherever they are."""
        return [pid for pid, (_, of) in self.jobs(airflow).items() if of == job]


class Standalone(Local):
    """A standalone cluster: the driver is on the worker's host, the executors are the cluster's."""

    def start(self) -> None:
        self.cluster = StandaloneCluster(self.folder / "cluster", cores=4, memory="2g")
        self.cluster.start()
        self.connection = {
            "conn_type": "spark",
            "host": self.cluster.url,
            "extra": {"deploy-mode": "client", "spark-binary": "spark-submit"},
        }

    def stop(self) -> None:
        if hasattr(self, "cluster"):
            self.cluster.stop()

    def settings(self) -> dict[str, str]:
        return {
            "spark.executor.cores": "2",
            "spark.executor.memory": "512m",
            "spark.network.timeout": "20s",
            "spark.network.timeoutInterval": "5s",
            "spark.executor.heartbeatInterval": "3s",
        }

    def all_of(self, airflow: CeleryAirflow, job: str) -> list[int]:
        """Those of the executors, too: there is no other job."""
        work = f"{self.cluster.workers[0].folder.parent}/worker"
        executors = []
        for entry in os.listdir("/proc"):
            try:
                place = os.readlink(f"/proc/{entry}/cwd") if entry.isdigit() else ""
            except OSError:
                continue
            if place.startswith(work) and "/work/app-" in place:
                executors.append(int(entry))
        return [*super().all_of(airflow, job), *executors]


class Yarn(Local):
    """YARN in cluster mode: nothing of a job is on the worker's host."""

    connection: Mapping[str, Any] = {"conn_type": "spark", "host": "yarn", "extra": {"deploy-mode": "cluster"}}

    def start(self) -> None:
        room = {"yarn.nodemanager.resource.memory-mb": "6144", "yarn.nodemanager.resource.cpu-vcores": "8"}
        self.cluster = YarnCluster(self.folder / "cluster", settings=room)
        self.cluster.start()

    def stop(self) -> None:
        if hasattr(self, "cluster"):
            self.cluster.stop()

    def settings(self) -> dict[str, str]:
        places = ("spark.yarn.appMasterEnv.PYSPARK_PYTHON", "spark.yarn.appMasterEnv.PYSPARK_DRIVER_PYTHON")
        return {
            **self.cluster.spark_settings(),
            **dict.fromkeys((*places, "spark.executorEnv.PYSPARK_PYTHON"), sys.executable),
        }

    def environment(self) -> dict[str, str]:
        known = self.cluster.client_environment()
        return {
            **super().environment(),
            **{k: v for k, v in known.items() if k.startswith(("HADOOP", "SPARK", "JAVA"))},
        }

    def jobs(self, airflow: CeleryAirflow) -> dict[int, tuple[str, str]]:
        return {
            pid: ("node", f"{'stream' if 'stream' in application['name'] else 'other'}-{application['id']}")
            for application in self.cluster.applications()
            for pid in self.cluster.containers(application["id"])
        }


SPARKS = {"local": Local, "standalone": Standalone, "yarn": Yarn}


class System:
    """Data servers, and an Airflow with Celery whose connections are to them.

    :param spark: where the jobs run, of :data:`SPARKS`.
    """

    def __init__(self, folder: Path, spark: str) -> None:
        self.data, self.folder = DataStack(folder / "data"), folder
        self.spark = SPARKS[spark](folder / "spark")

    def start(self) -> None:
        self.data.start()
        self.spark.start()
        self.data.postgres.createdb("shop")
        connections = {
            "POSTGRES_DEFAULT": {
                "conn_type": "postgres", "host": "127.0.0.1", "port": self.data.postgres.port, "login": "postgres",
                "schema": "shop",
            },
            "KAFKA_DEFAULT": {"conn_type": "kafka", "extra": {"bootstrap.servers": self.data.kafka.bootstrap}},
            "SPARK_DEFAULT": self.spark.connection,
        }  # fmt: skip
        env = {f"AIRFLOW_CONN_{name}": json.dumps(value) for name, value in connections.items()}
        env |= {"AIRFLOW__CORE__DEFAULT_TASK_RETRIES": "3", "AIRFLOW__CORE__DEFAULT_TASK_RETRY_DELAY": "1"}
        env |= self.spark.environment()
        self.airflow = CeleryAirflow(self.folder / "airflow", self.data.postgres, dags_folder=DAGS, env=env)
        self.airflow.start()
        self.client.wait_for_dag(DAG)

    def stop(self) -> None:
        if hasattr(self, "airflow"):
            self.airflow.stop()
            for pid in self.jobs():
                os.kill(pid, signal.SIGKILL)
        self.spark.stop()
        self.data.stop()

    @property
    def client(self) -> AirflowClient:
        return self.airflow.client()

    def execute(self, statement: str) -> list[tuple[Any, ...]]:
        with psycopg.connect(self.data.postgres.dsn("shop"), autocommit=True) as connection:
            cursor = connection.execute(statement)  # type: ignore[call-overload]
            return cursor.fetchall() if cursor.description else []

    def jobs(self) -> dict[int, tuple[str, str]]:
        """The processes of jobs on all hosts: process id → host and job."""
        return self.spark.jobs(self.airflow)

    def time_out(self, stream: Stream) -> None:
        """Let Airflow fail the deferred task, while its job runs: what remains of its tries is for it."""
        with psycopg.connect(self.data.postgres.dsn("airflow"), autocommit=True) as connection:
            connection.execute(
                "UPDATE task_instance SET trigger_timeout = now() WHERE run_id = %s AND task_id = 'stream' AND state "
                "= 'deferred'",
                (stream.run_id,),
            )


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
            "format": "json",
            "drop_slot": "always",
            "executor_timeout": 180,
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

    def deferred(self, but: str = "", timeout: float = 600) -> tuple[str, str]:
        """Host and folder of the job that reads from the slot, once the task is deferred; not the one with this
        folder."""

        def found() -> tuple[str, str] | None:
            state = self.task()["state"]
            assert state != "failed", self.why()
            jobs = {job for job in self.system.jobs().values() if job[1].startswith("stream-")} - {("", "")}
            others = [job for job in jobs if job[1] != but]
            active = self.system.execute(f"SELECT active FROM pg_replication_slots WHERE slot_name = '{self.name}'")
            return others[0] if state == "deferred" and len(others) == 1 and active == [(True,)] else None

        try:
            return until(found, "a stream that is deferred", timeout, pause=0.5)
        except AssertionError as error:
            raise AssertionError(self.why()) from error

    def why(self) -> str:
        return "\n".join(
            f"--- {t['task_id']} {t['state']}\n"
            f"{self.system.client.task_log(DAG, self.run_id, t['task_id'], max(1, t['try_number']))[-3000:]}"
            for t in self.system.client.task_instances(DAG, self.run_id)
            if t["state"] in ("failed", "up_for_retry", "deferred", "running")
        )

    def nothing_lost_or_twice(self) -> None:
        """Everything that is written by now is published soon, and only once."""
        written = self.written

        def ids() -> list[int]:
            return [int(message.key["id"]) for message in read(self.system.data.kafka, f"x.{self.name}")]

        until(lambda: len(set(ids())) >= written, f"all of {written} rows", pause=0.5)
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
        )

    def clear(self) -> None:
        self.system.client.clear(DAG, self.run_id, ["stream"], downstream=True)
