"""What the benchmarks share: servers, the table, pipelines, jobs, and the line that each result is."""

from __future__ import annotations

import json
import logging
import os
import signal
import statistics
import subprocess
import sys
import tempfile
import time
import uuid
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

import psycopg
from confluent_kafka import Consumer, TopicPartition
from psycopg import sql

from airflow_bottledwater.encoding.program import select_list
from airflow_bottledwater.jobs import submit, supervise
from airflow_bottledwater.kafka.topics import Topics
from airflow_bottledwater.local.postgres import programs
from airflow_bottledwater.local.stack import DataStack
from airflow_bottledwater.model.relation import SourceTable
from airflow_bottledwater.pipeline.settings import Settings
from airflow_bottledwater.postgres import catalog, copy
from airflow_bottledwater.postgres.connect import connect
from airflow_bottledwater.provision.create import create
from airflow_bottledwater.state import store
from airflow_bottledwater.warm import warm_up
from tests.support import process_job
from tests.support.waiting import until

log = logging.getLogger("bench")

#: all sizes are multiplied by it
SCALE = float(os.environ.get("BENCH_SCALE", "1"))
MASTER = "local[2]"
VERSION = os.environ.get("BOTTLEDWATER_TEST_POSTGRES", "16")
#: the stream without Spark: what Spark costs beside it
RUNNER = "runner"
#: how the stream is run
ENGINES = ("spark", RUNNER)
_HERE = Path(__file__).parent
_TICKS = os.sysconf("SC_CLK_TCK")
_PAGE = os.sysconf("SC_PAGE_SIZE")

TABLE = "CREATE TABLE bench (id bigint PRIMARY KEY, a int, b text, c numeric(12,2), d timestamptz, e boolean)"
_ROW = """i, (i * 7919 %% 1000003)::int, 'row ' || i || ' ' || md5(i::text),
 ((i * 31 %% 100000000) / 100.0)::numeric(12,2),
 timestamptz '2024-01-01 00:00:00+00' + i * interval '1.000123 s', i %% 3 = 0"""
ROWS = f"INSERT INTO bench SELECT {_ROW} FROM generate_series(%s::bigint, %s::bigint) i"
#: one transaction of the backlog: of 1,000 changes 600 insert, 300 update and 100 delete rows of the transaction before
CHURN = f"""CREATE PROCEDURE churn(first bigint, transactions int) LANGUAGE plpgsql AS $$
DECLARE n bigint := first;
BEGIN
    FOR k IN 1..transactions LOOP
        INSERT INTO bench SELECT {_ROW.replace("%%", "%")} FROM generate_series(n, n + 599) i;
        UPDATE bench SET a = a + 1, d = d + interval '1 s', e = NOT e WHERE id BETWEEN n - 600 AND n - 301;
        DELETE FROM bench WHERE id BETWEEN n - 300 AND n - 201;
        COMMIT;
        n := n + 600;
    END LOOP;
END $$"""
CHANGES_PER_TRANSACTION = 1000
#: the same mix, each change in a transaction of its own
SINGLE = f"""CREATE PROCEDURE single(n bigint, transactions int) LANGUAGE plpgsql AS $$
DECLARE i bigint;
BEGIN
    FOR k IN 0..transactions - 1 LOOP
        i := n + k / 10 * 6 + k % 10;
        IF k % 10 < 6 THEN
            INSERT INTO bench SELECT {_ROW.replace("%%", "%")};
        ELSIF k % 10 < 9 THEN
            UPDATE bench SET a = a + 1, d = d + interval '1 s', e = NOT e WHERE id = i - 6;
        ELSE
            DELETE FROM bench WHERE id = i - 6;
        END IF;
        COMMIT;
    END LOOP;
END $$"""


def scaled(full: int, least: int = 1) -> int:
    """A size, smaller or larger by BENCH_SCALE."""
    return max(least, round(full * SCALE))


def emit(
    bench: str, value: float, unit: str, reference: dict[str, float], *, engine: str | None = None, **more: Any
) -> None:
    """Print one result; its ratio is to the first reference."""
    line: dict[str, Any] = {"bench": bench, **({"engine": engine} if engine else {}), "value": value, "unit": unit}
    first = next(iter(reference.values()), 0)
    line |= {"reference": reference, "ratio": value / first if first else None, **more, "scale": SCALE}
    print(json.dumps(_rounded(line)), flush=True)


def _rounded(value: Any) -> Any:
    if isinstance(value, dict):
        return {k: _rounded(v) for k, v in value.items()}
    if isinstance(value, list):
        return [_rounded(v) for v in value]
    if isinstance(value, float):
        return round(value, 3) if abs(value) < 100 else round(value)
    return value


@contextmanager
def servers() -> Iterator[DataStack]:
    """PostgreSQL, a broker as in production (not the tests' quick-starting one) and a registry, in a folder of their
    own."""
    # neither time-outs of a paused walsender nor checkpoints and vacuums at random moments
    settings = {
        "wal_sender_timeout": 0, "autovacuum": False, "max_wal_size": "16GB", "checkpoint_timeout": "1h",
    }  # fmt: skip
    warm_up()
    with (
        tempfile.TemporaryDirectory(prefix="bottledwater-bench-") as folder,
        DataStack(
            folder,
            postgres_options={"version": VERSION, "settings": settings},
            kafka_options={"fast_start": False, "java_heap": "1g"},
        ) as stack,
    ):
        yield stack


class Workload:
    """A fresh database with the table, and a pipeline over it that streams from now on.

    :param settings: of the pipeline, over those here.
    """

    def __init__(self, stack: DataStack, **settings: Any) -> None:
        self.stack = stack
        name = f"b{uuid.uuid4().hex[:8]}"
        self.dsn = stack.postgres.createdb(name)
        self.execute(TABLE, CHURN, SINGLE)
        self.pipeline = Settings.of(
            postgres=self.dsn,
            kafka={"bootstrap.servers": stack.kafka.bootstrap},
            registry={"url": stack.registry.url},
            **{"slot": name, "topic_prefix": name, "tables": "bench", "replication_factor": 1, **settings},
        )
        self.topic = f"{name}.bench"
        self.state_topic = store.state_topic_name(name, name)
        self._next = 1

    def execute(self, *statements: str) -> list[tuple[Any, ...]]:
        """Run statements, each in its own transaction; returns the rows of the last."""
        with psycopg.connect(self.dsn, autocommit=True) as connection:
            for statement in statements:
                cursor = connection.execute(statement)  # type: ignore[arg-type]
            return cursor.fetchall() if cursor.description else []

    def create(self) -> None:
        """Slot, publications, topics, schemas."""
        create(self.pipeline)

    def insert(self, rows: int) -> None:
        """New rows, in one transaction."""
        with psycopg.connect(self.dsn, autocommit=True) as connection:
            connection.execute(ROWS, (self._next, self._next + rows - 1))
        self._next += rows

    def churn(self, changes: int, *, single: bool = False) -> int:
        """The mixed backlog; returns how many changes it has. There must be 600 rows before.

        :param single: whether each change is a transaction.
        """
        if single:
            changes = changes // 10 * 10
            self.execute(f"CALL single({self._next}, {changes})")
            self._next += changes // 10 * 6
            return changes
        transactions = max(1, changes // CHANGES_PER_TRANSACTION)
        self.execute(f"CALL churn({self._next}, {transactions})")
        self._next += 600 * transactions
        return transactions * CHANGES_PER_TRANSACTION

    def flushed(self) -> str:
        """``pg_current_wal_flush_lsn()``."""
        return str(self.execute("SELECT pg_current_wal_flush_lsn()")[0][0])

    def table(self, name: str = "bench") -> SourceTable:
        """A table as the catalog has it."""
        with connect(self.dsn) as connection:
            row = connection.execute("SELECT ('public.' || %s::text)::regclass::oid::int", (name,)).fetchone()
            assert row is not None
            return catalog.load(connection, [row[0]])[0]

    def extra_slot(self, name: str) -> str:
        """Another slot, made now; returns its name."""
        full = f"{self.pipeline.slot}_{name}"
        self.execute(f"SELECT pg_create_logical_replication_slot('{full}', 'pgoutput')")
        return full

    def walsender(self) -> int:
        """The process id of the walsender that serves the pipeline's slot, waited for."""
        return int(until(self._walsender, "the stream's replication connection", 300))

    def _walsender(self) -> int | None:
        rows = self.execute(f"SELECT active_pid FROM pg_replication_slots WHERE slot_name = '{self.pipeline.slot}'")
        return rows[0][0] if rows else None

    def released(self) -> None:
        """Wait until the server has noticed that a job is gone."""
        until(lambda: not self._walsender(), "the end of the job's replication connection", 300)

    def drop(self) -> None:
        """The database's slots: else they would keep WAL."""
        self.execute(
            "SELECT pg_drop_replication_slot(slot_name) FROM pg_replication_slots"
            " WHERE database = current_database() AND NOT active"
        )


@dataclass(frozen=True, slots=True)
class Progress:
    """P as a strict consumer sees it: how many records are published, and when that was seen."""

    published: int
    seen: float


class Follower:
    """Reads a slot's positions as they become visible to a ``read_committed`` consumer."""

    def __init__(self, source: Workload) -> None:
        self._reader = store.Reader(source.pipeline.kafka, source.state_topic)
        self.history: list[Progress] = [Progress(0, time.time())]

    def until(self, published: int, *, job: Job | None = None, backoff: float = 120.0) -> Progress:
        """Wait until so many records are published.

        :raises RuntimeError: the job has ended before.
        :raises TimeoutError: for ``backoff`` seconds nothing more was published.
        """
        deadline = time.monotonic() + backoff
        while self.history[-1].published < published:
            for key, value in self._reader.poll(0.2):
                if key == "position" and value is not None and value["published"] > self.history[-1].published:
                    self.history.append(Progress(value["published"], time.time()))
                    deadline = time.monotonic() + backoff
            if job is not None and not job.running:
                raise RuntimeError(f"the job has ended:\n{job.log()}")
            if time.monotonic() > deadline:
                raise TimeoutError(f"stuck: {self.history[-1].published} of {published} are published")
        return next(p for p in self.history if p.published >= published)

    def close(self) -> None:
        """Leave the topic."""
        self._reader.close()


class Job:
    """A submitted job: ``spark-submit`` under the package's own supervisor, as the command and Airflow start it.

    :param name: snapshot or stream.
    :param engine: :data:`RUNNER` is the stream in a plain process without Spark.
    """

    def __init__(self, pipeline: Settings, name: str, *, engine: str | None = None) -> None:
        self._folder = tempfile.TemporaryDirectory(prefix="bottledwater-bench-job-")
        self.run = Path(self._folder.name)
        settings = pipeline.write(self.run)
        environment = submit.environment()
        if engine == RUNNER:
            environment |= submit.WORKER_ENVIRONMENT
            command = process_job.command("stream", settings)
        else:
            command = submit.command(name, settings, master=MASTER)
        self.submitted = time.time()
        supervise.start(self.run, command, environment)

    @property
    def running(self) -> bool:
        """Whether anything of it lives."""
        return supervise.running(self.run)

    @property
    def pids(self) -> list[int]:
        """The JVM and all Python processes below the supervisor (without it)."""
        return descendants(int(json.loads((self.run / "supervisor.json").read_text())["pid"]))

    def log(self) -> str:
        """The end of its log."""
        return supervise.log_tail(self.run)

    def wait(self, timeout: float = 1200.0) -> dict[str, Any]:
        """What it reports, once it has ended.

        :raises RuntimeError: it failed.
        """
        until(lambda: supervise.exit_code(self.run) is not None, "the job's end", timeout)
        outcome = supervise.outcome(self.run)
        if outcome is None or not outcome.ok:
            raise RuntimeError(f"the job failed: {outcome}\n{self.log()}")
        return outcome.result

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        supervise.stop(self.run)
        self._folder.cleanup()


def empty_job() -> tuple[float, float]:
    """Run a Spark job of one task: seconds from spark-submit until the task is done, and until the process has
    ended."""
    properties = [part for key, value in submit.conf_for(MASTER).items() for part in ("--conf", f"{key}={value}")]
    environment = submit.environment()
    started = time.time()
    done = subprocess.run(
        [str(Path(sys.executable).parent / "spark-submit"), "--master", MASTER, *properties,
        str(_HERE / "empty_job.py")], env=environment, check=True, capture_output=True, text=True,
    )  # fmt: skip
    return float(done.stdout.split()[-1]) - started, time.time() - started


# ---------------------------------------------------------------------- processes


def descendants(root: int) -> list[int]:
    """All processes below one, without it."""
    children: dict[int, list[int]] = {}
    for entry in os.listdir("/proc"):
        if entry.isdigit() and (fields := _stat(int(entry))) is not None:
            children.setdefault(int(fields[1]), []).append(int(entry))
    found, todo = [], [root]
    while todo:
        for child in children.get(todo.pop(), []):
            found.append(child)
            todo.append(child)
    return found


def parent(pid: int) -> int:
    """A process's parent; 0 when it is gone."""
    fields = _stat(pid)
    return int(fields[1]) if fields is not None else 0


def _stat(pid: int) -> list[str] | None:
    """The fields behind the name: state, parent, …"""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return None


def is_jvm(pid: int) -> bool:
    """Whether a process is Java."""
    try:
        return Path(f"/proc/{pid}/comm").read_text().strip() == "java"
    except OSError:
        return False


def resident(pid: int) -> int:
    """Resident bytes of a process; 0 when it is gone."""
    try:
        return int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * _PAGE
    except (OSError, IndexError):
        return 0


def proportional(pid: int) -> int:
    """Resident bytes of a process, of which each page counts for its share only if others have it, too; 0 when it is
    gone."""
    try:
        lines = Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines()
    except OSError:
        return 0
    return sum(int(line.split()[1]) * 1024 for line in lines if line.startswith("Pss:"))


class Cpu:
    """CPU seconds per kind of process, from now on.

    :param stack: whose PostgreSQL and broker count.
    :param job: whose JVM and Python count, if there is one.
    """

    def __init__(self, stack: DataStack, job: Job | None = None) -> None:
        self._stack, self._job = stack, job
        self._start = self._now()

    def _now(self) -> dict[str, dict[int, float]]:
        postgres, broker = self._stack.postgres.pid, self._stack.kafka.pid
        assert postgres is not None
        assert broker is not None
        kinds = {"postgres": [postgres, *descendants(postgres)], "broker": [broker]}
        if self._job is not None:
            pids = self._job.pids
            kinds |= {"jvm": [p for p in pids if is_jvm(p)], "python": [p for p in pids if not is_jvm(p)]}
        return {kind: {p: _seconds(p) for p in pids} for kind, pids in kinds.items()}

    def used(self) -> dict[str, float]:
        """Since the start; processes that have ended meanwhile are not seen."""
        return {
            kind: sum(max(0.0, s - self._start[kind].get(pid, 0.0)) for pid, s in now.items())
            for kind, now in self._now().items()
        }


def _seconds(pid: int) -> float:
    fields = _stat(pid)
    return 0.0 if fields is None else (int(fields[11]) + int(fields[12])) / _TICKS


@contextmanager
def paused(pid: int) -> Iterator[None]:
    """A process that stands still during the block: a walsender, so that a backlog piles up before a warm job."""
    os.kill(pid, signal.SIGSTOP)
    try:
        yield
    finally:
        os.kill(pid, signal.SIGCONT)


# ---------------------------------------------------------------------- references


def drain(dsn: str, query: sql.Composable) -> int:
    """Rows of a binary COPY, received by the compiled reader and thrown away."""
    with connect(dsn) as connection:
        return sum(block.count for block in copy.rows(connection, query))


def copy_all(table: SourceTable) -> sql.Composed:
    """The COPY of a whole table."""
    return sql.SQL("COPY (SELECT {} FROM {}) TO STDOUT (FORMAT binary)").format(
        select_list(table), sql.Identifier(table.schema, table.name)
    )


def recvlogical(source: Workload, slot: str, end: str) -> float:
    """Seconds in which ``pg_recvlogical`` drains a slot up to an LSN to /dev/null."""
    pipeline = source.pipeline
    names = f'"{pipeline.publication_name}","{pipeline.publication_name}_unkeyed"'
    options = ("proto_version=1", "binary=true", f"publication_names={names}")
    started = time.monotonic()
    subprocess.run(
        [
            str(programs(VERSION) / "pg_recvlogical"), "-d", source.dsn, "--slot", slot, "--start", "--no-loop", "-f",
            "/dev/null", "--endpos", end, *(part for option in options for part in ("-o", option)),
        ],
        check=True, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, timeout=900,
    )  # fmt: skip
    return time.monotonic() - started


def consumer(source: Workload, topic: str, *, committed: bool = True, start: int | None = None) -> Consumer:
    """A consumer of a one-partition topic, from its present end on unless said otherwise, that is told what there is
    soon."""
    found = Consumer(
        {
            **source.pipeline.kafka,
            "group.id": uuid.uuid4().hex,
            "enable.auto.commit": False,
            "isolation.level": "read_committed" if committed else "read_uncommitted",
            "fetch.wait.max.ms": 10,
        }
    )
    start = Topics(source.pipeline.kafka).ends(topic, 1)[0] if start is None else start
    found.assign([TopicPartition(topic, 0, start)])
    return found


def percentiles(values: Sequence[float]) -> dict[int, float]:
    """The 50th, 95th and 99th."""
    cuts = statistics.quantiles(values, n=100, method="inclusive")
    return {p: cuts[p - 1] for p in (50, 95, 99)}
