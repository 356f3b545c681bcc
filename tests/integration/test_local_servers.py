"""The local servers: each starts, stops, dies, comes back with its data, says why it cannot start, leaves nothing."""

from __future__ import annotations

import json
import os
import re
import signal
import socket
import subprocess
import sys
import time
import uuid
from collections.abc import Callable, Iterator
from pathlib import Path

import psycopg
import pytest
from confluent_kafka import Consumer, Producer, TopicPartition
from confluent_kafka.admin import AdminClient, NewTopic
from confluent_kafka.schema_registry import Schema, SchemaRegistryClient
from confluent_kafka.schema_registry.error import SchemaRegistryError

from airflow_bottledwater import processes
from airflow_bottledwater.errors import LocalServerError
from airflow_bottledwater.local import ports
from airflow_bottledwater.local.demo_stack import DemoStack
from airflow_bottledwater.local.kafka import KafkaBroker
from airflow_bottledwater.local.postgres import PostgresServer
from airflow_bottledwater.local.process import ServerProcess
from airflow_bottledwater.local.registry import SchemaRegistry
from airflow_bottledwater.local.stack import DataStack
from tests.support.waiting import until

SCHEMA = {"type": "record", "name": "row", "fields": [{"name": "id", "type": "int"}]}


@pytest.fixture(scope="module")
def stack(tmp_path_factory: pytest.TempPathFactory) -> Iterator[DataStack]:
    with DataStack(tmp_path_factory.mktemp("local")) as running:
        yield running


@pytest.mark.some(1)
@pytest.mark.parametrize("made", [0, 1, 2])
def test_a_source_that_was_interrupted_is_made_whole(tmp_path: Path, made: int) -> None:
    """``bottledwater up``, ended after its first statements, and started again."""
    demo = DemoStack(tmp_path / "up", die_with_parent=True)
    statements = ("CREATE ROLE bottledwater LOGIN REPLICATION", "CREATE DATABASE nyc OWNER bottledwater")
    with demo.data.postgres as server:
        with psycopg.connect(server.dsn(), autocommit=True) as connection:
            for statement in statements[:made]:
                connection.execute(statement)
        for _ in range(2):
            demo._prepare_source()
            with psycopg.connect(server.dsn("nyc")) as connection:
                assert connection.execute("SELECT count(*) FROM flights").fetchone() == (336_776,)
                found = connection.execute("SELECT count(*) FROM pg_database WHERE datname = 'airflow'").fetchone()
                assert found == (1,)


class TestPostgres:
    def write(self, server: PostgresServer) -> str:
        dsn = server.createdb(f"db_{uuid.uuid4().hex}")
        with psycopg.connect(dsn) as connection:
            connection.execute("CREATE TABLE t AS SELECT 7 AS id")
        return dsn

    def read(self, dsn: str) -> list[tuple[int]]:
        with psycopg.connect(dsn) as connection:
            return connection.execute("SELECT id FROM t").fetchall()

    def test_serves_logical_replication(self, stack: DataStack) -> None:
        with psycopg.connect(stack.postgres.dsn(), autocommit=True) as connection:
            name = f"slot_{uuid.uuid4().hex}"
            connection.execute("SELECT pg_create_logical_replication_slot(%s, 'pgoutput')", [name])
            connection.execute("SELECT pg_drop_replication_slot(%s)", [name])

    @pytest.mark.parametrize("end", [pytest.param("stop", marks=pytest.mark.long), "kill"])
    def test_keeps_port_and_data(self, stack: DataStack, end: str) -> None:
        dsn = self.write(stack.postgres)
        getattr(stack.postgres, end)()
        assert not stack.postgres.running
        with pytest.raises(psycopg.OperationalError):
            psycopg.connect(dsn)
        stack.postgres.start()
        assert self.read(dsn) == [(7,)]

    def test_stops_at_once_with_clients(self, stack: DataStack) -> None:
        with psycopg.connect(stack.postgres.dsn()):
            stack.postgres.stop("fast")
            assert not stack.postgres.running
        stack.postgres.start()

    def test_is_found_by_its_folder(self, stack: DataStack) -> None:
        other = PostgresServer(stack.postgres.folder)
        assert (other.pid, other.port) == (stack.postgres.pid, stack.postgres.port)

    def test_a_paused_server_keeps_connections_and_does_not_answer(self, stack: DataStack) -> None:
        with psycopg.connect(stack.postgres.dsn()) as connection:
            stack.postgres.pause()
            with pytest.raises(psycopg.OperationalError):
                psycopg.connect(stack.postgres.dsn(), connect_timeout=2)
            stack.postgres.resume()
            assert connection.execute("SELECT 1").fetchone() == (1,)

    def test_other_roles_show_a_password(self, stack: DataStack) -> None:
        role = f"role_{uuid.uuid4().hex}"
        with psycopg.connect(stack.postgres.dsn(), autocommit=True) as connection:
            connection.execute(f"CREATE ROLE {role} LOGIN PASSWORD 'right'")
        psycopg.connect(stack.postgres.dsn(user=role, password="right")).close()
        with pytest.raises(psycopg.OperationalError, match="password authentication failed"):
            psycopg.connect(stack.postgres.dsn(user=role, password="wrong"))

    @pytest.mark.parametrize("version", ["15", "18"])
    def test_other_versions(self, tmp_path: Path, version: str) -> None:
        if version == "15" and not Path("/usr/lib/postgresql/15/bin/postgres").exists():
            pytest.skip("PostgreSQL 15 of Debian is not installed")
        settings = {"wal_sender_timeout": "7s"}
        with (
            PostgresServer(tmp_path / "pg", version=version, settings=settings) as server,
            psycopg.connect(server.dsn()) as connection,
        ):
            assert connection.info.server_version // 10_000 == int(version)
            assert connection.execute("SHOW wal_sender_timeout").fetchone() == ("7s",)

    def test_a_wrong_setting_is_the_reason_given(self, tmp_path: Path) -> None:
        server = PostgresServer(tmp_path / "pg", settings={"wal_level": "perhaps"})
        with pytest.raises(LocalServerError, match="wal_level") as raised:
            server.start()
        assert_one_line(raised.value)
        assert not server.pid_path.exists()


class TestKafka:
    def write(self, broker: KafkaBroker) -> str:
        topic = f"topic-{uuid.uuid4().hex}"
        admin = AdminClient({"bootstrap.servers": broker.bootstrap})
        admin.create_topics([NewTopic(topic, 1)])[topic].result(60)
        producer = Producer({"bootstrap.servers": broker.bootstrap, "enable.idempotence": True})
        producer.produce(topic, b"value")
        assert producer.flush(60) == 0
        return topic

    def read(self, broker: KafkaBroker, topic: str) -> bytes | None:
        consumer = Consumer({"bootstrap.servers": broker.bootstrap, "group.id": "none"})
        consumer.assign([TopicPartition(topic, 0, 0)])
        message = consumer.poll(10)
        consumer.close()
        assert message is not None
        return message.value()

    @pytest.mark.parametrize("end", [pytest.param("stop", marks=pytest.mark.long), "kill"])
    def test_keeps_port_and_data(self, stack: DataStack, end: str) -> None:
        topic, bootstrap = self.write(stack.kafka), stack.kafka.bootstrap
        getattr(stack.kafka, end)()
        assert not stack.kafka.running
        stack.kafka.start()
        assert stack.kafka.bootstrap == bootstrap
        assert self.read(stack.kafka, topic) == b"value"

    def test_serves_transactions(self, stack: DataStack) -> None:
        topic = self.write(stack.kafka)
        producer = Producer({"bootstrap.servers": stack.kafka.bootstrap, "transactional.id": uuid.uuid4().hex})
        producer.init_transactions(20)
        producer.begin_transaction()
        producer.produce(topic, b"more")
        producer.commit_transaction(20)

    @pytest.mark.long
    def test_starts_from_archived_classes_also_where_there_are_none_yet(self, stack: DataStack, tmp_path: Path) -> None:
        (tmp_path / "cache").mkdir()
        for folder in stack.kafka.cache.glob("kafka-*/"):
            (tmp_path / "cache" / folder.name).symlink_to(folder)
        with KafkaBroker(tmp_path / "broker", cache=tmp_path / "cache") as broker:
            (archive,) = (tmp_path / "cache").glob("kafka-classes-*.jsa")
            assert f"-XX:SharedArchiveFile={archive}" in broker.command()
            assert self.read(broker, self.write(broker)) == b"value"

    def test_makes_no_topic_unasked(self, stack: DataStack) -> None:
        topic = f"topic-{uuid.uuid4().hex}"
        client = AdminClient({"bootstrap.servers": stack.kafka.bootstrap})
        assert client.list_topics(topic, timeout=10).topics[topic].error is not None
        assert topic not in client.list_topics(timeout=10).topics


class TestRegistry:
    @pytest.mark.parametrize("end", [pytest.param("stop", marks=pytest.mark.long), "kill"])
    def test_keeps_port_and_data(self, stack: DataStack, end: str) -> None:
        subject, url = f"{uuid.uuid4().hex}-value", stack.registry.url
        number = SchemaRegistryClient({"url": url}).register_schema(subject, Schema(json.dumps(SCHEMA), "AVRO"))
        getattr(stack.registry, end)()  # at once: what was acknowledged must be on disk
        assert not stack.registry.running
        stack.registry.start()
        assert stack.registry.url == url
        client = SchemaRegistryClient({"url": url})
        assert client.get_latest_version(subject).schema_id == number
        assert client.get_compatibility() == "BACKWARD"

    @pytest.mark.long
    def test_asks_for_a_password(self, tmp_path: Path) -> None:
        with SchemaRegistry(tmp_path / "registry", basic_auth=("bob", "se:cret")) as registry:
            named = SchemaRegistryClient({"url": registry.url, "basic.auth.user.info": "bob:se:cret"})
            assert named.get_subjects() == []
            with pytest.raises(SchemaRegistryError, match="401"):
                SchemaRegistryClient({"url": registry.url}).get_subjects()
            assert b"se:cret" not in Path(f"/proc/{registry.pid}/cmdline").read_bytes()


@pytest.mark.parametrize("kind", [PostgresServer, KafkaBroker, SchemaRegistry])
class TestUnusablePort:
    def test_in_use(self, tmp_path: Path, kind: Callable[..., ServerProcess]) -> None:
        with socket.socket() as other:
            other.bind((ports.HOST, 0))
            other.listen()
            port = other.getsockname()[1]
            with pytest.raises(LocalServerError, match=f"{port}: Address already in use") as raised:
                kind(tmp_path / "server", port=port).start()
        assert_one_line(raised.value)

    def test_no_port_at_all(self, tmp_path: Path, kind: Callable[..., ServerProcess]) -> None:
        with pytest.raises(LocalServerError, match="70000 is not a port"):
            kind(tmp_path / "server", port=70_000).start()


class Sleeper(ServerProcess):
    """A leader with a child in a session of its own, as PostgreSQL's backends are; it does not end when asked to."""

    name = "sleeper"
    stop_grace = 0.3
    start_timeout = 1.0

    def command(self) -> list[str]:
        return ["/bin/sh", "-c", "trap '' TERM; setsid sleep 1000 & echo $! > child; echo cannot find it; sleep 1000"]

    def ready(self) -> bool:
        file = self.folder / "child"
        return file.exists() and bool(file.read_text().strip())

    def everybody(self) -> dict[int, int]:
        assert self.pid
        found = processes.family(self.pid)
        assert int((self.folder / "child").read_text()) in found
        return found


class TestProcess:
    @pytest.mark.parametrize("end", ["stop", "kill"])
    def test_ends_with_its_whole_family(self, tmp_path: Path, end: str) -> None:
        server = Sleeper(tmp_path).start()
        everybody = server.everybody()
        getattr(Sleeper(tmp_path), end)()  # by the pid file
        assert not processes.alive(everybody)
        assert not server.running

    def test_never_touches_a_process_that_has_got_the_id(self, tmp_path: Path) -> None:
        server = Sleeper(tmp_path).start()
        kept = server.pid_path.read_text()
        server.stop()
        with subprocess.Popen(["sleep", "1000"]) as innocent:
            server.pid_path.write_text(json.dumps(json.loads(kept) | {"pid": innocent.pid}))
            assert not server.running
            server.stop()
            server.kill()
            assert innocent.poll() is None
            innocent.kill()

    def test_that_is_not_ready_in_time_is_ended_and_says_why(self, tmp_path: Path) -> None:
        server = Sleeper(tmp_path)
        server.ready = lambda: False  # type: ignore[method-assign]
        with pytest.raises(LocalServerError, match="sleeper did not start: not ready after 1 s: cannot find it"):
            server.start()
        assert not server.pid_path.exists()

    @pytest.mark.parametrize("guarded", [True, False], ids=["guarded", "left-running"])
    def test_when_the_starter_is_killed(self, tmp_path: Path, guarded: bool) -> None:
        program = (
            "import os, signal, threading\n"
            "from pathlib import Path\n"
            "from tests_sleeper import Sleeper\n"
            f"start = Sleeper(Path({str(tmp_path)!r}), die_with_parent={guarded}).start\n"
            "thread = threading.Thread(target=start); thread.start(); thread.join()\n"  # and not when this thread ends
            "print('started', flush=True); input()\n"
        )
        (tmp_path / "tests_sleeper.py").write_text(
            f"import sys\nsys.path.insert(0, {str(Path(__file__).parents[2])!r})\n"
            f"from tests.integration.{Path(__file__).stem} import Sleeper\n"
        )
        environment = os.environ | {"PYTHONPATH": str(tmp_path)}
        starter = subprocess.Popen(
            [sys.executable, "-c", program], stdin=subprocess.PIPE, stdout=subprocess.PIPE, env=environment
        )
        assert starter.stdout and starter.stdout.readline() == b"started\n"
        everybody = Sleeper(tmp_path).everybody()
        time.sleep(0.3)
        assert processes.alive(everybody)
        starter.send_signal(signal.SIGKILL)
        starter.communicate()
        if guarded:
            until(lambda: not processes.alive(everybody), "all of it has ended with who started it")
        else:
            time.sleep(1.0)
            assert processes.alive(everybody)
        Sleeper(tmp_path).kill()
        assert not processes.alive(everybody)


def test_a_stopped_stack_leaves_nothing(tmp_path: Path) -> None:
    stack = DataStack(tmp_path).start()
    everybody = {
        pid: start for server in stack.servers if server.pid for pid, start in processes.family(server.pid).items()
    }
    assert len(everybody) > 5
    stack.stop()
    assert not processes.alive(everybody)
    assert not list(tmp_path.glob("*/*.pid"))


def assert_one_line(error: LocalServerError) -> None:
    assert re.fullmatch(r".{10,400}", str(error))
