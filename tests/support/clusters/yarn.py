"""A YARN cluster as it is deployed, without HDFS: the hosts share the disk."""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import time
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from airflow_bottledwater.errors import LocalServerError
from airflow_bottledwater.local.waiting import until
from airflow_bottledwater.processes import alive, send, started
from tests.support.clusters.hadoop import NodeManager, ResourceManager, write_configuration
from tests.support.clusters.hosts import Network
from tests.support.clusters.standalone import spark_environment, spark_home

ENDED = ("FINISHED", "FAILED", "KILLED")


class YarnCluster:
    """A resource manager and node managers in `folder`.

    :param network: a node on each of its hosts; without it, one node on this machine.
    :param settings: further ones of yarn-site.xml, for all.
    """

    def __init__(self, folder: Path, network: Network | None = None, settings: Mapping[str, str] | None = None) -> None:
        self.folder = folder.absolute()
        self.manager = ResourceManager(self.folder / "rm", network, settings)
        self.nodes = [
            NodeManager(self.folder / f"node{i}", self.manager, host, settings)
            for i, host in enumerate(network or [None], start=1)
        ]

    # ------------------------------------------------------------------ clients
    @property
    def client_conf(self) -> Path:
        """The folder for HADOOP_CONF_DIR of clients."""
        return self.folder / "client"

    def client_environment(self, **more: str) -> dict[str, str]:
        """The environment of a spark-submit for this cluster."""
        return spark_environment(HADOOP_CONF_DIR=str(self.client_conf), **more)

    def spark_settings(self) -> dict[str, str]:
        """Spark's settings of an application that is small and is staged quickly."""
        return {
            # of every host, so that a hundred megabytes need not be staged
            "spark.yarn.jars": f"local:{spark_home()}/jars/*",
            "spark.yarn.stagingDir": f"file://{self.folder}/staging",
            "spark.yarn.maxAppAttempts": "1",
            "spark.driver.memory": "512m",
            "spark.executor.memory": "512m",
            "spark.executor.instances": "1",
            "spark.executor.cores": "1",
        }

    # ------------------------------------------------------------------ applications
    def application(self, application: str) -> dict[str, Any]:
        """What the resource manager knows of it: `state`, `finalStatus`, `diagnostics`, `applicationTags` and more."""
        found: dict[str, Any] = self.manager.ask(f"/apps/{application}")["app"]
        return found

    def applications(self, **filters: str) -> list[dict[str, Any]]:
        """All applications; filters are those of the REST API, as `applicationTags` and `states`."""
        query = "&".join(f"{name}={value}" for name, value in filters.items())
        return list((self.manager.ask(f"/apps?{query}")["apps"] or {}).get("app", []))

    def attempts(self, application: str) -> list[dict[str, Any]]:
        """Its attempts, each with `appAttemptState` and `nodeId`, the oldest first."""
        found = self.manager.ask(f"/apps/{application}/appattempts")["appAttempts"]["appAttempt"]
        return sorted(found, key=lambda attempt: attempt["id"])

    def kill(self, application: str) -> None:
        """Have it killed; return before it is."""
        self.manager.ask(f"/apps/{application}/state", "PUT", {"state": "KILLED"})

    def wait(self, application: str, *states: str, timeout: float = 180) -> dict[str, Any]:
        """Wait until it is in one of the states (by default: has ended), and return what is known of it.

        :raises LocalServerError: it is not within `timeout` seconds, or has ended in another one.
        """
        wanted = states or ENDED

        def reached() -> dict[str, Any] | None:
            found = self.application(application)
            if found["state"] in ENDED and found["state"] not in wanted:
                raise LocalServerError(self._why(application))
            return found if found["state"] in wanted else None

        return until(reached, timeout=timeout, otherwise=lambda: self._why(application))

    def _why(self, application: str) -> str:
        known = self.application(application)
        ends = [
            f"--- {file}\n{text[-2000:]}" for file, text in self.logs(application).items() if "/std" in file and text
        ]
        return "\n".join([f"{application} is {known['state']}: {known['diagnostics']}", *ends])

    def logs(self, application: str) -> dict[str, str]:
        """What its containers wrote, also after its end: `container_…/stdout`, `…/stderr` and others → text.

        The driver's is the container 000001 of each attempt.
        """
        files = sorted(self.folder.glob(f"node*/logs/{application}/container_*/*"))
        return {f"{file.parent.name}/{file.name}": file.read_text(errors="replace") for file in files if file.is_file()}

    def output(self, application: str, stream: str = "stdout") -> str:
        """What its driver and then its executors printed."""
        return "".join(text for name, text in self.logs(application).items() if name.endswith(f"/{stream}"))

    def containers(self, application: str = "") -> dict[int, int]:
        """The processes of its containers (or of those of all applications): process id → start time."""
        found: dict[int, int] = {}
        for entry in os.listdir("/proc"):
            if entry.isdigit():
                with contextlib.suppress(OSError):
                    place = os.readlink(f"/proc/{entry}/cwd").removesuffix(" (deleted)")
                    inside = place.startswith(f"{self.folder}/node") and f"/appcache/{application}" in place
                    if inside and (start := started(int(entry))) is not None:
                        found[int(entry)] = start
        return found

    # ------------------------------------------------------------------ start and stop
    def start(self) -> Self:
        """Start the resource manager and all nodes."""
        write_configuration(self.client_conf / "yarn-site.xml", self.manager.where())
        try:
            self.manager.start()
            with ThreadPoolExecutor(max_workers=2) as threads:
                list(threads.map(NodeManager.start, self.nodes))
        except BaseException:
            self.stop()
            raise
        return self

    def stop(self) -> None:
        """Stop all, with all containers; also when they are frozen, so none is asked to end by itself.

        What was unpacked for them is removed; logs stay.
        """
        for daemon in (*self.nodes, self.manager):
            daemon.kill()
        # those of a node that died before are nobody's children
        left = self.containers()
        send(left, signal.SIGKILL)
        while alive(left):
            time.sleep(0.05)
        for folder in self.folder.glob("node*/local"):
            shutil.rmtree(folder, ignore_errors=True)

    def __enter__(self) -> Self:
        return self.start()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.stop()
