"""An Airflow with CeleryExecutor, as it is on several hosts: each worker and the triggerer have a host name and files
of their own.

The broker is Redis where Debian's redis-server is installed, and else a database of the same PostgreSQL that has the
metadata. A task whose worker died is found by the scheduler, which misses its heartbeats: neither broker delivers it
again within a test.
"""

from __future__ import annotations

import shutil
import socket
import threading
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Self

import psycopg

from airflow_bottledwater.local import ports
from airflow_bottledwater.local.airflow import AirflowStack, Component
from airflow_bottledwater.local.postgres import PostgresServer
from airflow_bottledwater.local.process import ServerProcess

_SETTINGS = {
    "CORE__EXECUTOR": "CeleryExecutor",
    # so that a worker is busy with one task, and the next goes to another one
    "CELERY__WORKER_CONCURRENCY": "1",
    "CELERY__WORKER_PREFETCH_MULTIPLIER": "1",
    # 5 minutes by default, until a task whose worker is gone fails
    "SCHEDULER__TASK_INSTANCE_HEARTBEAT_TIMEOUT": "30",
    "SCHEDULER__TASK_INSTANCE_HEARTBEAT_TIMEOUT_DETECTION_INTERVAL": "5",
    # 30 s by default, until the triggers of a triggerer that is gone are given to another one
    "TRIGGERER__TRIGGERER_HEALTH_CHECK_THRESHOLD": "10",
}


class _Redis(ServerProcess):
    """A Redis that keeps nothing on disk."""

    name = "redis"

    def __init__(self, folder: Path) -> None:
        super().__init__(folder)
        self.port = ports.keep(self.folder, redis=0)["redis"]

    @property
    def url(self) -> str:
        return f"redis://{ports.HOST}:{self.port}/0"

    def command(self) -> list[str]:
        return ["redis-server", "--bind", ports.HOST, "--port", str(self.port), "--save", "", "--appendonly", "no"]

    def ready(self) -> bool:
        try:
            socket.create_connection((ports.HOST, self.port), timeout=1).close()
        except OSError:
            return False
        return True


class _Elsewhere(Component):
    """A component that takes its host for another one than the machine's, and has an AIRFLOW_HOME of its own there.

    :param host: the host's name, which nobody can resolve: nobody has to.
    """

    def __init__(self, stack: AirflowStack, name: str, *arguments: str, host: str, health: str = "") -> None:
        super().__init__(stack, name, *arguments, health=health, folder=stack.folder / host)
        self.host = host

    def prepare(self) -> None:
        super().prepare()
        (self.folder / "run").mkdir(mode=0o700, exist_ok=True)

    def command(self) -> list[str]:
        return ["unshare", "--uts", "sh", "-c", 'hostname "$0" && exec "$@"', self.host, *super().command()]

    def environment(self) -> Mapping[str, str]:
        own = {"AIRFLOW_HOME": str(self.folder), "XDG_RUNTIME_DIR": str(self.folder / "run")}
        # the only files in common, as on a volume that all mount: the API server reads the logs there
        return {**super().environment(), **own, "AIRFLOW__LOGGING__BASE_LOG_FOLDER": str(self._stack.folder / "logs")}


class Worker(_Elsewhere):
    """A Celery worker.

    :meth:`kill` is the end of its host, with all that its tasks have started; :meth:`pause` and :meth:`resume` freeze
    and thaw it.
    """

    def __init__(self, stack: AirflowStack, host: str, queues: str, one_at_a_time: threading.Lock) -> None:
        options = ["--celery-hostname", "worker@%h", "--queues", queues, "--skip-serve-logs"]
        # each of them, started later, would ask the others who they are
        options += ["--without-gossip", "--without-mingle"]
        super().__init__(stack, "celery", "worker", *options, host=host, health="worker")
        self._one_at_a_time = one_at_a_time

    def start(self) -> Self:
        """Start it, after another one that is being started: the first makes the broker's tables, which two at once
        cannot."""
        with self._one_at_a_time:
            return super().start()

    def prepare(self) -> None:
        super().prepare()
        (self.folder / "airflow-worker.pid").unlink(missing_ok=True)  # of one that was killed

    def ready(self) -> bool:
        return f"worker@{self.host} ready".encode() in self.log_path.read_bytes()[self._log_start :]


class CeleryAirflow(AirflowStack):
    """An Airflow with CeleryExecutor in `folder`.

    Its `components` are api-server, scheduler and dag-processor on this machine, and the triggerer and the workers
    elsewhere: each can be started, stopped, killed, paused and resumed.

    :param postgres: runs already; the databases airflow and broker are created in it, the broker's for use without
        Redis.
    :param workers: their hosts; each is the name of the component, too.
    :param queues: of each worker.
    :param env: further environment variables for all components.
    """

    def __init__(
        self,
        folder: Path | str,
        postgres: PostgresServer,
        *,
        dags_folder: Path | str,
        workers: Sequence[str] = ("worker-a.test", "worker-b.test"),
        queues: str = "default",
        env: Mapping[str, str] | None = None,
    ) -> None:
        self._redis = _Redis(Path(folder) / "redis") if shutil.which("redis-server") else None
        settings = _SETTINGS | {
            "CELERY__BROKER_URL": self._redis.url if self._redis else f"sqla+{postgres.url('broker')}",
            "CELERY__RESULT_BACKEND": f"db+{postgres.url('airflow')}",
        }
        named = {f"AIRFLOW__{name}": value for name, value in settings.items()}
        super().__init__(
            folder, dags_folder=dags_folder, metadata_dsn=postgres.url("airflow"), env={**named, **(env or {})}
        )
        self.postgres = postgres
        self.components["triggerer"] = _Elsewhere(
            self, "triggerer", "--skip-serve-logs", host="triggerer.test", health="triggerer"
        )
        lock = threading.Lock()
        self.components |= {host: Worker(self, host, queues, lock) for host in workers}

    @property
    def workers(self) -> list[Worker]:
        """The workers, in order."""
        return [component for component in self.components.values() if isinstance(component, Worker)]

    def start(self) -> Self:
        """Create the databases, and start all components."""
        with psycopg.connect(self.postgres.dsn(), autocommit=True) as connection:
            known = {name for (name,) in connection.execute("SELECT datname FROM pg_database")}
        for name in {"airflow", "broker"} - known:
            self.postgres.createdb(name)
        if self._redis:
            self._redis.start()
        return super().start()

    def stop(self) -> None:
        """Stop all components, and the broker."""
        super().stop()
        if self._redis:
            self._redis.stop()
