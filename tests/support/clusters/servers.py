"""PostgreSQL, Kafka and the schema registry on this machine, reached from other hosts."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from psycopg.conninfo import make_conninfo

from airflow_bottledwater.local import ports
from airflow_bottledwater.local.kafka import KafkaBroker
from airflow_bottledwater.local.postgres import PostgresServer
from airflow_bottledwater.local.process import ServerProcess
from airflow_bottledwater.local.registry import SchemaRegistry
from tests.support.clusters.hosts import Network


class _Registry(SchemaRegistry):
    """A registry that listens on all addresses."""

    def environment(self) -> Mapping[str, str]:
        return {**super().environment(), "QUARKUS_HTTP_HOST": "0.0.0.0"}


class ReachableServers:
    """The three servers in `folder`. Their addresses here are those for everybody, on the hosts and on this machine.

    :param postgres_options: are passed to the server's class.
    """

    def __init__(self, folder: Path, network: Network, postgres_options: Mapping[str, Any] | None = None) -> None:
        self.address = network.address
        everyone = f"host all all {network.address}/24 trust"
        options: dict[str, Any] = {
            "hba": [everyone, everyone.replace("all", "replication", 1)],
            **(postgres_options or {}),
        }
        options["settings"] = {**options.get("settings", {}), "listen_addresses": f"{ports.HOST},{network.address}"}
        self.postgres = PostgresServer(folder / "postgres", **options)
        port = ports.free()
        # clients are sent on to what is advertised, whatever address they begin with
        self.kafka = KafkaBroker(
            folder / "kafka", port=port, settings={"advertised.listeners": f"BROKER://{self.address}:{port}"}
        )
        self.kafka.settings["listeners"] = (
            f"BROKER://0.0.0.0:{port},CONTROLLER://{ports.HOST}:{self.kafka.controller_port}"
        )
        self.registry = _Registry(folder / "registry")

    def dsn(self, dbname: str = "postgres", user: str = "postgres") -> str:
        """PostgreSQL's connection string."""
        return make_conninfo("", host=self.address, port=str(self.postgres.port), dbname=dbname, user=user)

    @property
    def bootstrap(self) -> str:
        """Kafka's `bootstrap.servers`."""
        return f"{self.address}:{self.kafka.port}"

    @property
    def registry_url(self) -> str:
        """The registry's URL."""
        return self.registry.url.replace(ports.HOST, self.address)

    def start(self) -> Self:
        """Start all at the same time; if one fails to start, stop the others again."""
        try:
            self._all(lambda server: server.start())
        except BaseException:
            self.stop()
            raise
        return self

    def stop(self) -> None:
        """Stop all."""
        self._all(lambda server: server.stop())

    def _all(self, act: Callable[[ServerProcess], object]) -> None:
        with ThreadPoolExecutor(max_workers=3) as threads:
            list(threads.map(act, (self.postgres, self.kafka, self.registry)))

    def __enter__(self) -> Self:
        return self.start()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.stop()
