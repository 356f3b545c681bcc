"""PostgreSQL, Kafka and the registry together, in one folder."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from airflow_bottledwater.local.kafka import KafkaBroker
from airflow_bottledwater.local.postgres import PostgresServer
from airflow_bottledwater.local.process import ServerProcess
from airflow_bottledwater.local.registry import SchemaRegistry


class DataStack:
    """The servers that change data flows through.

    `postgres_options`, `kafka_options` and `registry_options` are passed to the three servers' classes.
    """

    def __init__(
        self,
        folder: Path | str,
        *,
        registry: bool = True,
        die_with_parent: bool = True,
        cache: Path | None = None,
        postgres_options: Mapping[str, Any] | None = None,
        kafka_options: Mapping[str, Any] | None = None,
        registry_options: Mapping[str, Any] | None = None,
    ) -> None:
        self.folder = Path(folder).absolute()
        common: dict[str, Any] = {"die_with_parent": die_with_parent}
        self.postgres = PostgresServer(self.folder / "postgres", **common, **(postgres_options or {}))
        common["cache"] = cache
        self.kafka = KafkaBroker(self.folder / "kafka", **common, **(kafka_options or {}))
        self.registry = (
            SchemaRegistry(self.folder / "registry", **common, **(registry_options or {})) if registry else None
        )

    @property
    def servers(self) -> list[ServerProcess]:
        return [server for server in (self.postgres, self.kafka, self.registry) if server is not None]

    def start(self) -> Self:
        """Starts all at the same time; if one cannot, the others are stopped again."""
        try:
            self._all(lambda server: server.start())
        except BaseException:
            self.stop()
            raise
        return self

    def stop(self) -> None:
        """Stops all at the same time."""
        self._all(lambda server: server.stop())

    def kill(self) -> None:
        """Kills all."""
        self._all(lambda server: server.kill())

    def _all(self, act: Callable[[ServerProcess], object]) -> None:
        with ThreadPoolExecutor(max_workers=3) as threads:
            done = [threads.submit(act, server) for server in self.servers]
        for future in done:
            future.result()

    def __enter__(self) -> Self:
        return self.start()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.stop()
