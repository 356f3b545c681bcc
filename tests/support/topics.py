"""Reading topics as a strict consumer, and pipelines over the embedded servers."""

from __future__ import annotations

import json
import threading
import uuid
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from typing import Any

import psycopg
import pytest
from confluent_kafka import Producer
from confluent_kafka.admin import AdminClient, AlterConfigOpType, ConfigEntry, ConfigResource, ResourceType
from psycopg.conninfo import conninfo_to_dict

from airflow_bottledwater.jobs import snapshots, status
from airflow_bottledwater.kafka.topics import NewTopic, Topics
from airflow_bottledwater.local.kafka import KafkaBroker
from airflow_bottledwater.local.registry import SchemaRegistry
from airflow_bottledwater.model.lsn import Position
from airflow_bottledwater.model.slot import Cluster
from airflow_bottledwater.pipeline.settings import Settings
from airflow_bottledwater.pipeline.table import Table
from airflow_bottledwater.postgres.connect import connect
from airflow_bottledwater.postgres.server import identify
from airflow_bottledwater.provision.create import create
from airflow_bottledwater.snapshot import driver
from airflow_bottledwater.snapshot.task import SnapshotResult
from airflow_bottledwater.state.control_records import SnapshotReport, SnapshotRequest, StatusRecord
from tests.support import running
from tests.support.compare import Comparison, compare, records
from tests.support.waiting import LONG, until


@dataclass(frozen=True, slots=True)
class Message:
    """A record as a consumer sees it."""

    partition: int
    offset: int
    key: Any
    value: Any
    op: str
    pos: str
    timestamp: int
    xid: str = ""
    toast: str = ""
    snapshot: str = ""
    time: str = ""
    before: Any = None


def read(kafka: KafkaBroker, topic: str, *, committed: bool = True) -> list[Message]:
    """All records of a JSON topic, in order per partition."""
    return read_all(kafka, [topic], committed=committed)[topic]


def read_all(
    kafka: KafkaBroker,
    topics: Sequence[str],
    *,
    committed: bool = True,
    decoders: tuple[Callable[[bytes], Any], Callable[[bytes], Any]] | None = None,
) -> dict[str, list[Message]]:
    """The same for several topics, with one consumer.

    :param decoders: of keys and of values; None: JSON, and positions as the keys of service topics.
    """
    of_key, of_value = decoders or (_key, json.loads)
    found: dict[str, list[Message]] = {topic: [] for topic in topics}
    for message in records({"bootstrap.servers": kafka.bootstrap}, *topics, committed=committed):
        told = dict(message.headers() or [])
        before = told.pop("before", None)
        headers = {name: (value or b"").decode() for name, value in told.items()}
        found[message.topic()].append(
            Message(
                message.partition(),
                message.offset(),
                None if message.key() is None else of_key(message.key()),
                None if message.value() is None else of_value(message.value()),
                headers.get("op", "r"),
                headers.get("pos", ""),
                message.timestamp()[1],
                headers.get("xid", ""),
                headers.get("toast", ""),
                headers.get("snapshot", ""),
                headers.get("time", ""),
                None if before is None else of_value(before),
            )
        )
    return found


def _key(key: bytes) -> Any:
    """JSON in data topics, a position in service topics."""
    return json.loads(key) if key.startswith(b"{") else key.decode()


def assert_exactly_once_in_order(messages: list[Message]) -> None:
    """No stream record twice, and per key never an older one behind a newer one, the snapshot's row first."""
    seen: set[tuple[str, str, str]] = set()
    last: dict[str, str] = {}
    for message in messages:
        if message.snapshot:
            continue  # a row that was read again is what the topic has already
        key = json.dumps(message.key, sort_keys=True)
        if message.key is not None:
            assert last.get(key, "") <= message.pos, f"{key} goes back to {message.pos or 'a snapshot row'}"
            last[key] = message.pos
        if message.pos:
            identity = (message.pos, key, message.op)
            assert identity not in seen, f"{identity} comes twice"
            seen.add(identity)


class Flow:
    """A pipeline over a fresh database, in the JSON format unless said otherwise, run without a JVM."""

    def __init__(self, dsn: str, kafka: KafkaBroker, registry: SchemaRegistry | None, **settings: Any) -> None:
        self.dsn, self.kafka, self.registry = dsn, kafka, registry
        self._named = ("", "", "")
        name = f"f{uuid.uuid4().hex[:8]}"
        self.pipeline = Settings.of(
            postgres=dsn,
            kafka={"bootstrap.servers": kafka.bootstrap},
            registry={"url": registry.url} if registry else {},
            **{
                "slot": name,
                "topic_prefix": name,
                "format": "avro" if registry else "json",
                "replication_factor": 1,
                "outage_timeout": 20.0,
                "keepalive_interval": 0.2,
                "heartbeat_interval": 0.3,
                "transaction_timeout": 20.0,
                **settings,
            },
        )

    def change(self, **settings: Any) -> None:
        """Go on with other settings."""
        self.pipeline = self.pipeline.with_(**settings)

    def execute(self, *statements: str) -> list[tuple[Any, ...]]:
        """Run statements, each in its own transaction; returns the rows of the last."""
        with psycopg.connect(self.dsn, autocommit=True) as connection:
            for statement in statements:
                cursor = connection.execute(statement)  # type: ignore[arg-type]
            return cursor.fetchall() if cursor.description else []

    def transaction(self, *statements: str) -> None:
        """Run statements in one transaction."""
        with psycopg.connect(self.dsn) as connection:
            for statement in statements:
                connection.execute(statement)  # type: ignore[arg-type]

    def create(self) -> None:
        """Slot, publications, topics."""
        create(self.pipeline)

    def snapshot(self) -> SnapshotResult:
        """Take or resume the snapshot, lanes as threads."""
        return driver.run(self.pipeline, running.in_threads(self.pipeline))

    def stream(self) -> dict[str, int]:
        """Stream what is committed now; behind it, also behind an error, the slot is free."""
        try:
            return running.run_stream(self.pipeline, bounded=True)
        finally:
            # the server's process ends a moment after its connection
            used = f"SELECT 1 FROM pg_replication_slots WHERE slot_name = '{self.pipeline.slot}' AND active"
            with suppress(psycopg.OperationalError):  # of a test that stopped the server
                until(lambda: not self.execute(used), "the slot is free")

    @contextmanager
    def streaming(self) -> Iterator[list[BaseException]]:
        """Stream beside the block, until it ends; gives the errors of the stream."""
        stopped, errors = threading.Event(), list[BaseException]()

        def work() -> None:
            try:
                running.run_stream(self.pipeline, stopped=stopped)
            except BaseException as error:
                errors.append(error)

        thread = threading.Thread(target=work, daemon=True)
        thread.start()
        try:
            yield errors
        finally:
            stopped.set()
            thread.join(LONG)
            assert not thread.is_alive()

    def streams(self) -> None:
        """Wait until the pipeline's stream says that it streams."""
        until(lambda: self.state == "streaming", "the stream runs")

    def published(self, *statements: str) -> None:
        """Run statements beside a stream, the first of which changes rows, and wait until that is published."""
        (before,) = self.execute("SELECT pg_current_wal_insert_lsn() - '0/0'::pg_lsn")[0]
        self.execute(*statements)
        until(lambda: status.report(self.pipeline).position > str(Position(int(before))), f"published: {statements[0]}")

    def ask(self, *tables: str, **options: Any) -> str:
        """Ask for a live snapshot; returns its id."""
        request_id = uuid.uuid4().hex
        snapshots.ask(self.pipeline, self.name, request_id, SnapshotRequest(tables, **options))
        return request_id

    def damage(self, table: str, key: dict[str, Any], value: dict[str, Any] | None, *, partition: int = 0) -> None:
        """Publish a record of a JSON topic behind the pipeline's back."""
        producer = Producer({"bootstrap.servers": self.kafka.bootstrap})
        text = None if value is None else json.dumps(value, separators=(",", ":"))
        producer.produce(self.topic(table), text, json.dumps(key, separators=(",", ":")), partition)
        assert not producer.flush(60)

    def reported(self, request_id: str) -> SnapshotReport:
        """The report on a live snapshot; one without a state, if nothing was reported yet."""
        return snapshots.reports(self.pipeline, self.name)[request_id][1] or SnapshotReport("")

    @property
    def cluster(self) -> Cluster:
        """The source's."""
        with connect(self.dsn) as connection:
            return identify(connection)

    @property
    def name(self) -> str:
        """The pipeline's name."""
        return self.cluster.pipeline(self.pipeline.slot)

    @property
    def job(self) -> StatusRecord | None:
        """What the pipeline's job said last; None if none has. For those who ask again and again: a whole report asks
        the source, and reads the state."""
        asked = self.dsn, self.pipeline.slot
        if asked != self._named[:2]:
            self._named = *asked, self.name
        return status.read_status(self.pipeline, self._named[2])

    @property
    def state(self) -> str:
        """Of the pipeline's job, as it said last; empty if none has."""
        return job.state if (job := self.job) else ""

    def topic(self, table: str) -> str:
        """The topic of a table of the public schema, or another topic of the pipeline by its name without the
        prefix."""
        template = Table.of_table(self.pipeline.table_options, "public", table).topic or "{table}"
        return f"{self.pipeline.topic_prefix}.{template.format(schema='public', table=table)}"

    def read(self, table: str, *, committed: bool = True) -> list[Message]:
        """The records of a table's topic."""
        return read(self.kafka, self.topic(table), committed=committed)

    def dead_letters(self) -> list[Message]:
        """The records of the topic of dead letters."""
        return read(self.kafka, f"{self.pipeline.topic_prefix}._bottledwater_dead_letters")

    def compare(self, table: str) -> Comparison:
        """Topic against table."""
        registry = self.pipeline.registry if self.pipeline.format == "avro" else None
        return compare(self.dsn, self.pipeline.kafka, registry, table, self.topic(table))


MakeFlow = Callable[..., Flow]
"""The fixture that makes one (``tests/support/fixtures.py``)."""


def delete_topic(flow: Flow, topic: str) -> None:
    """Delete a topic and wait until it is gone."""
    admin = AdminClient(flow.pipeline.kafka)
    admin.delete_topics([topic])[topic].result()
    until(lambda: topic not in Topics(flow.pipeline.kafka).names(), "the topic is gone")


def create_topic(
    kafka: Mapping[str, str], name: str, *, partitions: int, replication: int, config: Mapping[str, str]
) -> None:
    """Create a topic, as the pipeline does."""
    Topics(kafka).make(NewTopic(name, partitions, replication, (config,)))


def limit_records(flow: Flow, table: str, size: int) -> None:
    """Change what the table's topic takes (``max.message.bytes``)."""
    limit_topic(flow, flow.topic(table), size)


def limit_topic(flow: Flow, topic: str, size: int) -> None:
    """The same by the topic's name."""
    alter(flow, topic, {"max.message.bytes": str(size)})


def alter_topic(flow: Flow, table: str, **config: str) -> None:
    """Change properties of the table's topic, with underscores for their dots."""
    alter(flow, flow.topic(table), {name.replace("_", "."): value for name, value in config.items()})


def alter(flow: Flow, topic: str, config: dict[str, str]) -> None:
    """The same by the topic's name and the properties' own ones."""
    set_to = AlterConfigOpType.SET
    entries = [ConfigEntry(name, value, incremental_operation=set_to) for name, value in config.items()]
    resource = ConfigResource(ResourceType.TOPIC, topic, incremental_configs=entries)
    admin = AdminClient(flow.pipeline.kafka)
    for future in admin.incremental_alter_configs([resource]).values():
        future.result()


def airflow_connections(monkeypatch: pytest.MonkeyPatch, flow: Flow) -> None:
    """Airflow's connections are the flow's."""
    of = conninfo_to_dict(flow.dsn)
    source = {"host": of["host"], "port": of["port"], "login": of.get("user"), "schema": of["dbname"]}
    monkeypatch.setenv("AIRFLOW_CONN_POSTGRES_DEFAULT", json.dumps({"conn_type": "postgres", **source}))
    monkeypatch.setenv("AIRFLOW_CONN_KAFKA_DEFAULT", json.dumps({"conn_type": "kafka", "extra": flow.pipeline.kafka}))
