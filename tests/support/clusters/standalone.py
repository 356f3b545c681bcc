"""A Spark standalone cluster: a master and workers from the installed pyspark, each a process, on other hosts if
wanted."""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from airflow_bottledwater.local import artifacts, ports
from airflow_bottledwater.local.process import ServerProcess, plain_environment
from tests.support.clusters.hosts import Host, Network


def spark_home() -> Path:
    """Where pyspark keeps Spark."""
    return artifacts.installed("pyspark")


def spark_environment(**more: str) -> dict[str, str]:
    """What Spark's programs need: executors would otherwise run the first python3 of the PATH."""
    return plain_environment(SPARK_HOME=str(spark_home()), PYSPARK_PYTHON=sys.executable, **more)


class _Daemon(ServerProcess):
    """The master or a worker."""

    kind = ""

    def __init__(self, folder: Path, address: str, host: Host | None = None) -> None:
        super().__init__(folder)
        self.address, self.host = address, host
        kept = ports.keep(self.folder, spark=0, web=0)
        self.port, self.web_port = kept["spark"], kept["web"]

    def arguments(self) -> list[str]:
        raise NotImplementedError

    def command(self) -> list[str]:
        # spark-class replaces itself by the JVM
        daemon = [str(spark_home() / "bin" / "spark-class"), f"org.apache.spark.deploy.{self.kind}"]
        # a worker's name for itself, which it gives its executors, is its address, so that drivers need not resolve any
        whole = [
            *daemon,
            "-h",
            self.address,
            "-p",
            str(self.port),
            "--webui-port",
            str(self.web_port),
            *self.arguments(),
        ]
        return self.host.command(whole) if self.host else whole

    def environment(self) -> Mapping[str, str]:
        small = {"SPARK_DAEMON_MEMORY": "256m", "SPARK_DAEMON_JAVA_OPTS": "-XX:+UseSerialGC -XX:TieredStopAtLevel=1"}
        # of the master itself and of the executors; Spark would take the first address that it finds
        return spark_environment(**small, SPARK_LOCAL_IP=self.address, SPARK_LOCAL_DIRS=str(self.folder / "local"))


class Master(_Daemon):
    """The master."""

    name = "spark-master"
    kind = "master.Master"

    @property
    def url(self) -> str:
        """The URL for `--master`."""
        return f"spark://{self.address}:{self.port}"

    def arguments(self) -> list[str]:
        return []

    def state(self) -> dict[str, Any]:
        """What it says of itself: `workers` with their `state`, `activeapps`, `completedapps` and more."""
        with ports.open_url(f"http://{self.address}:{self.web_port}/json/") as answer:
            content: dict[str, Any] = json.load(answer)
        return content

    def ready(self) -> bool:
        try:
            return bool(self.state()["status"] == "ALIVE")
        except (OSError, ValueError):
            return False


class Worker(_Daemon):
    """A worker. What its executors print is in `work` of its folder.

    :param cores: how many tasks run at once on it.
    :param memory: of all its executors.
    """

    name = "spark-worker"
    kind = "worker.Worker"

    def __init__(
        self, folder: Path, master: Master, *, host: Host | None = None, cores: int = 1, memory: str = "1g"
    ) -> None:
        super().__init__(folder, host.address if host else ports.HOST, host)
        self.master, self.cores, self.memory = master, cores, memory

    def arguments(self) -> list[str]:
        return ["-c", str(self.cores), "-m", self.memory, "-d", str(self.folder / "work"), self.master.url]

    def state(self) -> str:
        """What the master thinks of it: ALIVE, DEAD or UNKNOWN; empty if it does not know it."""
        # one that was started again is listed twice, the old one as DEAD
        known = {
            w["state"] for w in self.master.state()["workers"] if (w["host"], w["port"]) == (self.address, self.port)
        }
        return "ALIVE" if "ALIVE" in known else next(iter(known), "")

    def ready(self) -> bool:
        try:
            return self.state() == "ALIVE"
        except (OSError, ValueError):
            return False

    def executor_logs(self, application: str = "app-*") -> str:
        """What its executors (of one application) wrote to stderr, the oldest first."""
        files = sorted(self.folder.glob(f"work/{application}/*/stderr"), key=lambda file: file.stat().st_mtime)
        return "".join(file.read_text(errors="replace") for file in files)


class StandaloneCluster:
    """A master and workers in `folder`.

    :param network: a worker on each of its hosts, the master on this machine; without it, two workers on this machine,
        too.
    :param options: of each worker.
    """

    def __init__(self, folder: Path, network: Network | None = None, **options: Any) -> None:
        self.address = network.address if network else ports.HOST
        self.master = Master(folder / "master", self.address)
        self.workers = [
            Worker(folder / f"worker{i}", self.master, host=host, **options)
            for i, host in enumerate(network or [None, None], start=1)
        ]

    def driver_settings(self) -> dict[str, str]:
        """Spark's settings of a driver on this machine, so that executors on other hosts reach it."""
        return {"spark.driver.host": self.address, "spark.driver.bindAddress": "0.0.0.0"}

    @property
    def url(self) -> str:
        """The URL for `--master`."""
        return self.master.url

    def state(self) -> dict[str, Any]:
        """What the master says of itself."""
        return self.master.state()

    def start(self) -> Self:
        """Start the master, then the workers."""
        try:
            self.master.start()
            for worker in self.workers:
                worker.start()
        except BaseException:
            self.stop()
            raise
        return self

    def stop(self) -> None:
        """Stop all, with their executors; also when they are frozen, so none is asked to end by itself."""
        for daemon in (*self.workers, self.master):
            daemon.kill()

    def __enter__(self) -> Self:
        return self.start()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.stop()
