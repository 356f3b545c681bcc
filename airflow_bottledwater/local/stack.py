"""PostgreSQL, Kafka and the schema registry together, in one folder."""

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
    """The servers that changes flow through: PostgreSQL, Kafka and the schema registry.

    `postgres_options` and `kafka_options` are passed to the servers' classes.
    """

    def __init__(
        self,
        folder: Path | str,
        *,
        die_with_parent: bool = True,
        postgres_options: Mapping[str, Any] | None = None,
        kafka_options: Mapping[str, Any] | None = None,
    ) -> None:
        self.folder = Path(folder).absolute()
        tied = die_with_parent
        self.postgres = PostgresServer(self.folder / "postgres", die_with_parent=tied, **(postgres_options or {}))
        self.kafka = KafkaBroker(self.folder / "kafka", die_with_parent=tied, **(kafka_options or {}))
        self.registry = SchemaRegistry(self.folder / "registry", die_with_parent=tied)

    @property
    def servers(self) -> list[ServerProcess]:
        return [self.postgres, self.kafka, self.registry]

    def start(self) -> Self:
        """Start all servers at the same time; if one fails to start, stop the others again."""
        try:
            self._all(lambda server: server.start())
        except BaseException:
            self.stop()
            raise
        return self

    def stop(self) -> None:
        """Stop all servers at the same time."""
        self._all(lambda server: server.stop())

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
