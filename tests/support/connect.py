"""A worker of Kafka Connect, as its distribution runs it, with connectors that nobody here wrote."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from airflow_bottledwater.local import artifacts, ports
from airflow_bottledwater.local.process import ServerProcess


class ConnectWorker(ServerProcess):
    """A worker in standalone mode.

    :param classes: the folder with the jars of Connect and of all that it loads.
    :param bootstrap: the brokers.
    :param connectors: their configurations, by name.
    """

    name = "connect"
    start_timeout = 180.0

    def __init__(
        self, folder: Path, classes: Path, bootstrap: str, connectors: Mapping[str, Mapping[str, str]]
    ) -> None:
        super().__init__(folder)
        self.port = ports.keep(self.folder, connect=0)["connect"]
        self.classes, self.connectors = classes, connectors
        self._settings = {
            "bootstrap.servers": bootstrap,
            "listeners": f"http://{ports.HOST}:{self.port}",
            "key.converter": "org.apache.kafka.connect.json.JsonConverter",
            "value.converter": "org.apache.kafka.connect.json.JsonConverter",
            "offset.storage.file.filename": str(self.folder / "offsets"),
            # what a transaction has not committed is not for sinks
            "consumer.isolation.level": "read_committed",
        }

    def prepare(self) -> None:
        properties = "".join(f"{name}={value}\n" for name, value in self._settings.items())
        (self.folder / "worker.properties").write_text(properties)
        for name, config in self.connectors.items():
            (self.folder / f"{name}.json").write_text(json.dumps({"name": name, "config": {**config, "name": name}}))

    def command(self) -> list[str]:
        return [
            str(artifacts.system_java()),
            "-Xmx512m",
            "-Dorg.slf4j.simpleLogger.defaultLogLevel=warn",
            # another zone than that of the servers and of whoever compares
            "-Duser.timezone=Asia/Kolkata",
            "-cp",
            f"{self.classes}/*",
            "org.apache.kafka.connect.cli.ConnectStandalone",
            "worker.properties",
            *(f"{name}.json" for name in self.connectors),
        ]

    def ready(self) -> bool:
        try:
            return set(self._asked("/connectors")) == set(self.connectors)
        except OSError:
            return False

    def check(self) -> None:
        """Fail if a connector or one of its tasks has failed."""
        for name in self.connectors:
            status = self._asked(f"/connectors/{name}/status")
            for each in (status["connector"], *status["tasks"]):
                assert each["state"] != "FAILED", f"{name}: {each['trace']}"

    def _asked(self, path: str) -> Any:
        with ports.open_url(f"http://{ports.HOST}:{self.port}{path}") as answer:
            return json.load(answer)
