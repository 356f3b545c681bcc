"""The DAG in a real Airflow over real servers: whole runs, and everything that users and crashes do to a running
stream.

Each step asks the machine itself who lives (``/proc``), the source whether the slot exists and is in use, and the
topics whether every change came, once.
"""

from __future__ import annotations

import io
import json
import os
import signal
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import fastavro
import psycopg
import pytest
from confluent_kafka import Consumer, TopicPartition
from confluent_kafka.schema_registry import SchemaRegistryClient
from cryptography.fernet import Fernet
from psycopg import sql

from airflow_bottledwater import processes
from airflow_bottledwater.jobs import requests
from airflow_bottledwater.local.airflow import AirflowStack
from airflow_bottledwater.local.airflow_client import AirflowClient
from airflow_bottledwater.local.stack import DataStack
from airflow_bottledwater.pipeline.settings import Settings
from airflow_bottledwater.postgres.connect import connect
from airflow_bottledwater.postgres.server import identify
from tests.support import waiting
from tests.support.processes import job_processes, proc
from tests.support.verifying import verified_in_airflow

DAG = "bottledwater"
MARKER = "Ma9ker7"
#: asked for by scram; all characters that libpq, JSON or a shell could trip over
PASSWORD = MARKER + " '\\\"%41@/:$x"
DAGS = Path(__file__).parents[2] / "dags"
TASKS = ("preflight", "create_slot", "snapshot", "stream", "wait_caught_up", "watch_errors", "drop_slot")


def until(what: str, found: Callable[[], Any], timeout: float = waiting.LONG) -> Any:
    """What the function gives, once that is true."""
    return waiting.until(found, what, timeout, pause=0.5)


# ------------------------------------------------------------------ who lives
class Watch(threading.Thread):
    """Looks at all processes several times a second: more than one stream job at once, or the marker where it must not
    be."""

    def __init__(self, home: Path) -> None:
        super().__init__(daemon=True)
        self._home, self._ended = home, threading.Event()
        self.most, self.looks = 0, 0
        self.doubles: list[set[str]] = []
        self.leaks: set[str] = set()

    def run(self) -> None:
        while not self._ended.wait(0.5):
            found = job_processes(self._home)
            streams = {folder for folder in found.values() if folder.startswith("stream-")}
            self.most, self.looks = max(self.most, len(streams)), self.looks + 1
            if len(streams) > 1:
                self.doubles.append(streams)
            for pid in found:
                for name in ("cmdline", "environ"):
                    if MARKER.encode() in proc(pid, name):
                        self.leaks.add(f"{name} of {proc(pid, 'cmdline')[:200]!r}")
            for entry in os.listdir("/proc"):
                if entry.isdigit() and MARKER.encode() in proc(entry, "cmdline"):
                    self.leaks.add(f"arguments of {proc(entry, 'comm')!r}")

    def end(self) -> None:
        self._ended.set()
        self.join()


# ------------------------------------------------------------------ what was published
class Topics:
    """What a consumer with ``read_committed`` has seen so far of some topics, decoded through the registry."""

    def __init__(self, stack: DataStack, *names: str) -> None:
        self._registry = SchemaRegistryClient({"url": stack.registry.url})
        self._schemas: dict[int, Any] = {}
        self._consumer = Consumer(
            {
                "bootstrap.servers": stack.kafka.bootstrap, "group.id": "test", "isolation.level": "read_committed",
                "enable.auto.commit": False, "auto.offset.reset": "earliest", "fetch.wait.max.ms": 50,
            }
        )  # fmt: skip
        self._consumer.assign([TopicPartition(name, 0, 0) for name in names])
        self.records: dict[str, list[tuple[Any, Any]]] = {name: [] for name in names}

    def read(self, wait: float = 0.5) -> dict[str, list[tuple[Any, Any]]]:
        """All (key, value) so far; while more is published, what comes within a second or two."""
        deadline = time.monotonic() + 4 * wait
        while time.monotonic() < deadline and (messages := self._consumer.consume(5000, wait)):
            for message in messages:
                assert message.error() is None, message.error()
                self.records[message.topic()].append((self.decode(message.key()), self.decode(message.value())))
        return self.records

    def decode(self, data: bytes | None) -> Any:
        """A key or a value."""
        if data is None:
            return None
        number = int.from_bytes(data[1:5], "big")
        if number not in self._schemas:
            self._schemas[number] = fastavro.parse_schema(json.loads(self._registry.get_schema(number).schema_str))
        return fastavro.schemaless_reader(io.BytesIO(data[5:]), self._schemas[number], None)

    def close(self) -> None:
        self._consumer.close()


# ------------------------------------------------------------------ servers
class System:
    """The data servers and an Airflow whose connections are to them.

    :param dags: the folder of its DAGs.
    """

    def __init__(self, folder: Path, dags: Path = DAGS) -> None:
        # the role of the connection must show its password, from anywhere and also for replication
        self.data = DataStack(folder / "data", postgres_options={"hba": ["host all cdc 127.0.0.1/32 scram-sha-256"]})
        self.folder, self.dags = folder, dags

    def start(self) -> None:
        self.data.start()
        with self.connect("postgres") as connection:
            connection.execute(sql.SQL("CREATE ROLE cdc LOGIN REPLICATION PASSWORD {}").format(sql.Literal(PASSWORD)))
            connection.execute("CREATE DATABASE shop OWNER cdc")
            connection.execute("CREATE DATABASE airflow")
        postgres = {"conn_type": "postgres", "host": "127.0.0.1", "port": self.data.postgres.port, "login": "cdc"}
        connections = {
            "POSTGRES_DEFAULT": {
                **postgres,
                "password": PASSWORD,
                "schema": "shop",
                "extra": {"sslmode": "disable", "foreign": 1},
            },
            "KAFKA_DEFAULT": {
                "conn_type": "kafka",
                "extra": {"bootstrap.servers": self.data.kafka.bootstrap, "group.id": "x"},
            },
            "SCHEMA_REGISTRY_DEFAULT": {"conn_type": "schema_registry", "host": self.data.registry.url},
        }
        self.airflow = AirflowStack(
            self.folder / "airflow",
            dags_folder=self.dags,
            metadata_dsn=self.data.postgres.url("airflow"),
            env={f"AIRFLOW_CONN_{name}": json.dumps(value) for name, value in connections.items()}
            # a folder that a test has made has files that it changes; the examples would only take processor time
            | ({"AIRFLOW__DAG_PROCESSOR__MIN_FILE_PROCESS_INTERVAL": "600"} if self.dags == DAGS else {}),
        )
        self.watch = Watch(self.airflow.folder)
        self.airflow.start()
        self.watch.start()
        self.client.wait_for_dag(DAG)

    @property
    def client(self) -> AirflowClient:
        return self.airflow.client()

    def stop(self) -> None:
        if hasattr(self, "airflow"):
            self.airflow.stop()
            # jobs outlive Airflow, that is the point
            for pid in job_processes(self.airflow.folder):
                os.kill(pid, signal.SIGKILL)
        self.data.stop()

    def connect(self, database: str = "shop") -> psycopg.Connection[Any]:
        """A session of the superuser, who needs no password."""
        return psycopg.connect(self.data.postgres.dsn(database), autocommit=True)

    def execute(self, *statements: str, database: str = "shop") -> list[tuple[Any, ...]]:
        """Run statements; returns the rows of the last."""
        with self.connect(database) as connection:
            for statement in statements:
                cursor = connection.execute(statement)  # type: ignore[arg-type]
            return cursor.fetchall() if cursor.description else []

    def slot(self, name: str) -> tuple[bool, bool]:
        """Whether the slot exists, and whether somebody reads from it."""
        rows = self.execute(f"SELECT active FROM pg_replication_slots WHERE slot_name = '{name}'")
        return bool(rows), bool(rows and rows[0][0])

    def publications(self) -> list[str]:
        return [row[0] for row in self.execute("SELECT pubname FROM pg_publication ORDER BY 1")]

    def jobs(self) -> dict[int, str]:
        return job_processes(self.airflow.folder)

    def leaders(self, folder: str) -> dict[str, int]:
        """The process ids of a job's supervisor, JVM and driver; Python workers come and go."""
        kept = self.airflow.folder / "bottledwater" / folder
        (jvm,) = (pid for pid, each in self.jobs().items() if each == folder and proc(pid, "comm").strip() == b"java")
        found = {name: int(json.loads((kept / f"{name}.json").read_text())["pid"]) for name in ("supervisor", "driver")}
        assert {*found.values()} <= set(self.jobs())
        return {**found, "jvm": jvm}

    def retire(self, name: str) -> None:
        """Stop the stream of a slot for good, as ``bottledwater stop --retire`` does."""
        dsn = self.data.postgres.dsn("shop")
        pipeline = Settings(postgres=dsn, kafka={"bootstrap.servers": self.data.kafka.bootstrap}, slot=name)
        with connect(dsn) as connection:
            assert requests.stop_pipeline(pipeline, identify(connection), retire=True) is not None

    def streams(self, run_id: str, slot: str) -> bool:
        """Whether the run's stream reads from the slot; while a slot is made, it is in use, too."""
        return self.task(run_id, "stream")["state"] == "deferred" and self.slot(slot) == (True, True)

    def ended(self, run_id: str) -> bool:
        return self.client.run(DAG, run_id)["state"] in ("success", "failed")

    def task(self, run_id: str, task_id: str) -> dict[str, Any]:
        return next(t for t in self.client.task_instances(DAG, run_id) if t["task_id"] == task_id)

    def why(self, run_id: str) -> str:
        """The ends of the logs of tasks that did not succeed: for a test that failed."""
        return "\n".join(
            f"--- {t['task_id']} "
            f"{t['state']}\n{self.client.task_log(DAG, run_id, t['task_id'], max(1, t['try_number']))[-3000:]}"
            for t in self.client.task_instances(DAG, run_id)
            if t["state"] in ("failed", "up_for_retry", "deferred")
        )


@pytest.fixture(scope="module")
def system(tmp_path_factory: pytest.TempPathFactory) -> Iterator[System]:
    """Started once for all tests here."""
    started = System(tmp_path_factory.mktemp("system"))
    try:
        started.start()
        yield started
        started.watch.end()
    finally:
        started.stop()


# ------------------------------------------------------------------ a whole life
def test_a_run_is_verified_and_stopped_for_good_and_leaves_nothing_behind(system: System) -> None:
    system.execute(
        "CREATE TABLE public.small (id bigint PRIMARY KEY, name text, price numeric(8,2))",
        "INSERT INTO public.small SELECT g, 'nö ' || g, g / 4.0 FROM generate_series(1, 3000) g",
        "CREATE TABLE public.pairs (a int, b text, at timestamptz, PRIMARY KEY (b, a))",
        "INSERT INTO public.pairs SELECT g, 'k' || g % 7, now() FROM generate_series(1, 500) g",
        "ALTER TABLE public.small OWNER TO cdc",
        "ALTER TABLE public.pairs OWNER TO cdc",
    )
    pipeline = {"slot": "whole", "topic_prefix": "w"}
    run = system.client.trigger(DAG, {**pipeline, "tables": ["small", "pairs"]})
    until("it streams", lambda: system.streams(run, "whole") or system.ended(run), 600)
    system.execute("UPDATE public.small SET price = -price WHERE id % 10 = 0", "DELETE FROM public.pairs WHERE a > 450")
    found = verified_in_airflow(system.client, pipeline)
    counted = {table: each["rows"] for table, each in found["tables"].items()}
    assert counted == {"public.small": 3000, "public.pairs": 450}
    system.retire("whole")
    ended = system.client.wait_run(DAG, run, 120)
    assert ended["state"] == "success", system.why(run)
    assert {t["task_id"]: t["state"] for t in system.client.task_instances(DAG, run)} == dict.fromkeys(TASKS, "success")
    topics = Topics(system.data, "w.small", "w.pairs")
    records = topics.read(2.0)
    topics.close()
    # nothing twice: the rows, the updates and the deletes
    assert (len(records["w.small"]), len(records["w.pairs"])) == (3000 + 300, 500 + 50)
    assert system.slot("whole") == (False, False)
    assert system.publications() == []
    assert system.jobs() == {}
    assert list((system.airflow.folder / "bottledwater").iterdir()) == []
    assert not system.watch.leaks


# ------------------------------------------------------------------ continuous
class Writers(threading.Thread):
    """Applications that go on writing: every id of ``orders`` once, every version of the rows of ``ticks``."""

    def __init__(self, system: System) -> None:
        super().__init__(daemon=True)
        self._system, self._ended = system, threading.Event()
        self.written = 0
        self.error: BaseException | None = None

    def run(self) -> None:
        try:
            with self._system.connect() as connection:
                while not self._ended.wait(0.05):
                    new = self.written + 1
                    many = 1 + new % 5
                    with connection.transaction():
                        connection.execute(
                            f"INSERT INTO public.orders SELECT g, 'order ' || g FROM generate_series({new}, "
                            f"{new + many - 1}) g"
                        )
                        connection.execute(f"UPDATE public.ticks SET n = n + 1 WHERE id = {new % 10}")
                    self.written = new + many - 1
        except psycopg.Error as error:
            self.error = error

    def end(self) -> None:
        self._ended.set()
        self.join()
        assert self.error is None


class Stream:
    """One continuous run, and what is known of it."""

    def __init__(self, system: System) -> None:
        self.system = system
        self.slot = self._prefix = "life"
        system.execute(
            "CREATE TABLE public.orders (id bigint PRIMARY KEY, name text)",
            "CREATE TABLE public.ticks (id int PRIMARY KEY, n int)",
            "INSERT INTO public.ticks SELECT g, 0 FROM generate_series(0, 9) g",
            "ALTER TABLE public.orders OWNER TO cdc",
            "ALTER TABLE public.ticks OWNER TO cdc",
        )
        self.writers = Writers(system)
        self.writers.start()
        self.begin("retired")
        self.topics = Topics(system.data, *(f"{self._prefix}.{name}" for name in ("orders", "ticks")))

    def begin(self, drop_slot: str) -> None:
        """Start a run and wait until it streams."""
        conf = {
            "tables": ["orders", "ticks"],
            "slot": self.slot,
            "topic_prefix": self._prefix,
            "drop_slot": drop_slot,
        }
        self.run_id = self.system.client.trigger(DAG, conf)
        self.deferred(timeout=900)

    @property
    def state(self) -> str | None:
        return self.task()["state"]

    def task(self, name: str = "stream") -> dict[str, Any]:
        return self.system.task(self.run_id, name)

    def mark(self, state: str) -> None:
        self.system.client.set_task_state(DAG, self.run_id, "stream", state)

    def clear(self) -> None:
        self.system.client.clear(DAG, self.run_id, ["stream"], downstream=True)

    def deferred(self, but: str = "", timeout: float = 240) -> str:
        """Wait until a job (but not this one) reads from the slot and the task is deferred; returns the job's
        folder."""

        def found() -> str | None:
            state = self.state
            assert state != "failed", self.system.why(self.run_id)
            folders = {f for f in self.system.jobs().values() if f.startswith(f"stream-{self.slot}-")} - {but}
            return (
                folders.pop()
                if state == "deferred" and len(folders) == 1 and self.system.slot(self.slot) == (True, True)
                else None
            )

        return str(until("a stream that is deferred", found, timeout))

    def streaming(self) -> str:
        """The folder of the job that streams now, whatever the test before has left."""
        if not (self.state == "deferred" and self.system.jobs()):
            self.clear()
        return self.deferred()

    def gone(self, timeout: float = 60) -> None:
        """No process of any job lives within this time, and the slot is there and free."""
        begun = time.monotonic()
        until("no process of a job lives", lambda: not self.system.jobs(), timeout)
        until(
            "the slot is free", lambda: not self.system.slot(self.slot)[1], max(1.0, begun + timeout - time.monotonic())
        )

    def nothing_lost_or_twice(self) -> None:
        """Everything that is written by now is published within a minute, and only once."""
        written = self.writers.written

        def arrived() -> bool:
            ids = {key["id"] for key, _ in self.topics.read()[f"{self._prefix}.orders"]}
            return len(ids) >= written and ids >= set(range(1, written + 1))

        until(f"all of {written} ids", arrived)
        counts = Counter(key["id"] for key, _ in self.topics.records[f"{self._prefix}.orders"])
        assert [i for i, n in counts.items() if n > 1] == []
        assert sorted(counts) == list(range(1, max(counts) + 1))
        versions: dict[int, list[int]] = {}
        for key, value in self.topics.records[f"{self._prefix}.ticks"]:
            versions.setdefault(key["id"], []).append(value["n"])
        for seen in versions.values():
            assert seen == list(range(seen[0], seen[-1] + 1))

    def trigger_row(self) -> tuple[int, int]:
        """Trigger and triggerer that the task is deferred to."""
        rows = self.system.execute(
            "SELECT t.id, t.triggerer_id FROM trigger t JOIN task_instance i ON i.trigger_id = t.id"
            f" WHERE i.task_id = 'stream' AND i.run_id = '{self.run_id}'",
            database="airflow",
        )
        return rows[0] if rows else (0, 0)


@pytest.fixture(scope="module")
def stream(system: System) -> Iterator[Stream]:
    """A stream that runs while its tables are written to."""
    started = Stream(system)
    yield started
    started.writers.end()
    started.topics.close()
    system.execute("DROP TABLE public.orders, public.ticks")


@pytest.mark.long
def test_a_stream_that_is_deferred_shows_no_password(system: System, stream: Stream) -> None:
    folder = stream.streaming()
    secrets = json.loads((system.airflow.folder / "secrets.json").read_text())
    rows = system.execute("SELECT classpath, kwargs FROM trigger", database="airflow")
    decrypt = Fernet(secrets["fernet_key"]).decrypt
    # Airflow stores them as they are where the task's side could not encrypt them
    kept = {path: text if text.startswith("{") else decrypt(text.encode()).decode() for path, text in rows}
    assert folder in kept["airflow_bottledwater.triggers.job.JobTrigger"]
    assert not any(MARKER in text for text in kept.values())
    # supervisor, JVM, driver, Spark's daemon and the worker at least
    assert len(system.jobs()) >= 5
    for pid in system.jobs():
        assert proc(pid, "environ") and MARKER.encode() not in proc(pid, "environ") + proc(pid, "cmdline")
    (file,) = (system.airflow.folder / "bottledwater" / folder).glob("pipeline-*.json")
    assert file.stat().st_mode & 0o77 == 0 and MARKER in file.read_text()


@pytest.mark.long
def test_marked_failed_the_job_ends_and_the_slot_stays(system: System, stream: Stream) -> None:
    stream.streaming()
    stream.nothing_lost_or_twice()
    stream.mark("failed")
    stream.gone()
    assert system.slot(stream.slot) == (True, False)
    assert stream.state == "failed"


@pytest.mark.long
def test_cleared_a_new_job_goes_on(system: System, stream: Stream) -> None:
    if stream.state == "deferred":
        stream.mark("failed")
        stream.gone()
    stream.clear()
    folder = stream.deferred()
    assert len(set(system.jobs().values())) == 1
    stream.nothing_lost_or_twice()
    assert stream.deferred() == folder


@pytest.mark.long
def test_cleared_while_it_runs_the_old_job_is_gone_before_the_new_one_starts(system: System, stream: Stream) -> None:
    old = stream.streaming()
    members = {pid for pid, folder in system.jobs().items() if folder == old}
    stream.clear()
    new = stream.deferred(but=old)
    assert new != old
    assert members.isdisjoint(system.jobs())
    assert not (system.airflow.folder / "bottledwater" / old).exists()
    stream.nothing_lost_or_twice()
    assert system.watch.most == 1 and system.watch.doubles == []


@pytest.mark.long
@pytest.mark.parametrize("how", ["restarted", "killed"])
def test_another_triggerer_attaches_to_the_same_job(system: System, stream: Stream, how: str) -> None:
    folder = stream.streaming()
    before, leaders, tries = stream.trigger_row(), system.leaders(folder), stream.task()["try_number"]
    if how == "restarted":
        system.airflow.restart("triggerer")
    else:
        triggerer = system.airflow.components["triggerer"]
        triggerer.kill()
        triggerer.start()
    # the trigger is another triggerer's now; after kill -9 the old one counts as alive for 30 s
    until("another triggerer has the trigger", lambda: stream.trigger_row()[1] not in (None, 0, before[1]))
    assert stream.trigger_row()[0] == before[0]
    time.sleep(6)
    assert stream.deferred() == folder
    assert (system.leaders(folder), stream.task()["try_number"]) == (leaders, tries)
    stream.nothing_lost_or_twice()


@pytest.mark.long
def test_data_flows_while_airflow_is_down(system: System, stream: Stream) -> None:
    folder = stream.streaming()
    before, leaders = stream.trigger_row(), system.leaders(folder)
    system.airflow.stop()
    stream.nothing_lost_or_twice()
    system.airflow.start()
    until("another triggerer has the trigger", lambda: stream.trigger_row()[1] not in (None, 0, before[1]))
    assert stream.deferred() == folder
    assert system.leaders(folder) == leaders
    stream.nothing_lost_or_twice()


@pytest.mark.long
def test_a_job_that_is_killed_is_submitted_again_without_using_up_a_try(system: System, stream: Stream) -> None:
    old = stream.streaming()
    tries = stream.task()["try_number"]
    members = {pid: processes.started(pid) for pid in system.jobs()}
    os.kill(system.leaders(old)["jvm"], signal.SIGKILL)
    until("nothing of the killed job is left", lambda: not any(processes.started(p) == s for p, s in members.items()))
    new = stream.deferred(but=old)
    assert new != old and stream.task()["try_number"] == tries
    stream.nothing_lost_or_twice()
    assert "is submitted again" in system.client.task_log(DAG, stream.run_id, "stream", tries)


@pytest.mark.long
def test_marked_success_the_job_ends_and_the_slot_stays(system: System, stream: Stream) -> None:
    stream.streaming()
    stream.mark("success")
    stream.gone()
    assert system.client.wait_run(DAG, stream.run_id, 60)["state"] == "success"
    assert system.slot(stream.slot) == (True, False)


@pytest.mark.long
def test_a_run_marked_failed_keeps_the_slot_and_says_what_it_costs(system: System, stream: Stream) -> None:
    stream.streaming()
    system.client.set_run_state(DAG, stream.run_id, "failed")
    stream.gone()
    until("the teardown has ended", lambda: stream.task("drop_slot")["state"] in ("success", "failed"))
    task = stream.task("drop_slot")
    assert task["state"] == "success"
    assert system.slot(stream.slot) == (True, False)
    log = system.client.task_log(DAG, stream.run_id, "drop_slot", task["try_number"])
    assert f"Kept: slot '{stream.slot}' at " in log and "MiB of WAL" in log
    # before the next test clears tasks of it: the scheduler would end the run over them
    assert system.client.wait_run(DAG, stream.run_id, 60)["state"] == "failed"


@pytest.mark.long
def test_a_run_that_is_ended_while_no_triggerer_runs_leaves_no_job(system: System, stream: Stream) -> None:
    stream.streaming()
    triggerer = system.airflow.components["triggerer"]
    triggerer.kill()
    try:
        system.client.set_run_state(DAG, stream.run_id, "failed")
        until("the teardown has ended", lambda: stream.task("drop_slot")["state"] in ("success", "failed"))
        assert stream.task("drop_slot")["state"] == "success", system.why(stream.run_id)
        assert system.jobs() == {}
        assert system.slot(stream.slot) == (True, False)
        log = system.client.task_log(DAG, stream.run_id, "drop_slot", max(1, stream.task("drop_slot")["try_number"]))
        assert "A job of this run is still there" in log
        assert system.client.wait_run(DAG, stream.run_id, 60)["state"] == "failed"
    finally:
        triggerer.start()


@pytest.mark.long
def test_a_task_that_is_marked_while_no_triggerer_runs_is_caught_up(system: System, stream: Stream) -> None:
    if stream.state == "deferred":
        system.client.set_run_state(DAG, stream.run_id, "failed")
        stream.gone()
    # a run of its own: the watch that catches up is in the same one
    stream.begin("retired")
    until("the watch is deferred", lambda: stream.task("watch_errors")["state"] == "deferred")
    triggerer = system.airflow.components["triggerer"]
    triggerer.kill()
    try:
        stream.mark("failed")
        assert system.jobs() != {}
    finally:
        triggerer.start()
    stream.gone(timeout=180)
    assert system.client.wait_run(DAG, stream.run_id, 120)["state"] == "failed"


@pytest.mark.long
def test_a_job_that_a_signal_from_outside_ends_is_submitted_again(system: System, stream: Stream) -> None:
    """A host that reboots ends the supervisor and the driver in order."""
    old = stream.streaming()
    tries = stream.task()["try_number"]
    watcher = stream.task("watch_errors")["state"]
    os.kill(system.leaders(old)["supervisor"], signal.SIGTERM)
    new = stream.deferred(but=old)
    assert new != old and stream.task()["try_number"] == tries
    # who watches the stream does not take it for its end
    assert stream.task("watch_errors")["state"] == watcher
    stream.nothing_lost_or_twice()
    assert "SIGTERM from outside" in system.client.task_log(DAG, stream.run_id, "stream", tries)


@pytest.mark.long
def test_another_run_goes_on_and_always_drops_a_slot_that_is_in_use(system: System, stream: Stream) -> None:
    if stream.state == "deferred":
        system.client.set_run_state(DAG, stream.run_id, "failed")
        stream.gone()
    stream.begin("always")
    stream.nothing_lost_or_twice()
    # after all that was done to it, and while the tables are written to
    verified_in_airflow(system.client, {"slot": stream.slot, "topic_prefix": stream.slot})
    system.client.set_run_state(DAG, stream.run_id, "failed")
    until("the teardown has ended", lambda: stream.task("drop_slot")["state"] in ("success", "failed"))
    assert stream.task("drop_slot")["state"] == "success", system.why(stream.run_id)
    until("no process of a job lives", lambda: not system.jobs())
    assert system.slot(stream.slot) == (False, False)
    assert system.publications() == []


@pytest.mark.long
def test_the_password_is_nowhere(system: System, stream: Stream) -> None:
    """In no log, no row of Airflow's database, no argument or environment of a job; of files only where it has to
    be."""
    assert system.watch.looks > 100
    assert system.watch.leaks == set() and system.watch.doubles == []
    # every table: rendered templates, XCom, task state, triggers, serialized DAGs, the audit log
    tables = system.execute(
        "SELECT c.oid::regclass::text FROM pg_class c WHERE relkind = 'r' AND relnamespace = 'public'::regnamespace",
        database="airflow",
    )
    for (table,) in tables:
        leaks = system.execute(f"SELECT 1 FROM {table} t WHERE t::text LIKE '%{MARKER}%' LIMIT 1", database="airflow")
        assert not leaks, table
    # the settings file of a job that lives is its way of secrets
    living = {str(system.airflow.folder / "bottledwater" / folder) for folder in system.jobs().values()}
    for path in system.airflow.folder.rglob("*"):
        if path.is_file() and MARKER.encode() in path.read_bytes():
            assert (
                str(path.parent) in living and path.name.startswith("pipeline-") and path.stat().st_mode & 0o77 == 0
            ), path
