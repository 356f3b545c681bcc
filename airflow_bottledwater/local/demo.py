"""``make demo``, ``make up`` and ``make down``: the whole pipeline on embedded servers.

The demo loads real data, lets writers change it from before the snapshot until the end, runs the DAG, and compares.
"""

from __future__ import annotations

import json
import logging
import secrets
import shutil
import signal
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import psycopg
from rich.console import Console
from rich.table import Table

from airflow_bottledwater.errors import BottledWaterError, LocalServerError
from airflow_bottledwater.local import flights
from airflow_bottledwater.local.airflow import AirflowStack
from airflow_bottledwater.local.compare import compare
from airflow_bottledwater.local.stack import DataStack
from airflow_bottledwater.postgres import publication, slot
from airflow_bottledwater.postgres.connect import connect, identify
from airflow_bottledwater.settings import Pipeline
from airflow_bottledwater.spark import supervise
from airflow_bottledwater.state import control, status
from airflow_bottledwater.warm import warm_up

ROOT = Path.cwd()
DEMO, KEPT = ROOT / ".local" / "demo", ROOT / ".local" / "up"
DAG, SLOT, DATABASE, ROLE = "bottledwater", "flights", "nyc", "bottledwater"
#: seconds that the writers go on while the stream runs
STREAM_SECONDS = 20.0
#: seconds for one phase of the run before the demo gives up
PATIENCE = 240.0

console = Console(highlight=False)


class DemoFailed(BottledWaterError):
    """The demo did not show what it is there to show."""


class Stack:
    """The servers of a folder, the database with its role, and an Airflow that knows them."""

    def __init__(self, folder: Path, *, die_with_parent: bool) -> None:
        self.data = DataStack(folder, die_with_parent=die_with_parent)
        password_file = folder / "role-password"
        if not password_file.exists():
            folder.mkdir(parents=True, exist_ok=True)
            password_file.touch(mode=0o600)
            password_file.write_text(secrets.token_urlsafe(18))
        self.password = password_file.read_text()
        self._folder, self._die = folder, die_with_parent
        self.airflow: AirflowStack | None = None

    @property
    def dsn(self) -> str:
        """The source, as the pipeline's role."""
        return self.data.postgres.dsn(DATABASE, user=ROLE, password=self.password)

    @property
    def pipeline(self) -> Pipeline:
        """What the DAG run is given, as one description."""
        assert self.data.registry is not None
        return Pipeline(
            postgres=self.dsn,
            kafka={"bootstrap.servers": self.data.kafka.bootstrap},
            registry={"url": self.data.registry.url},
            slot=SLOT,
            tables=flights.TABLES,
        )

    def start(self) -> None:
        """Start everything; the source gets its role and its data."""
        began = time.monotonic()
        warming = threading.Thread(target=warm_up, name="compile", daemon=True)
        warming.start()
        self.data.start()
        _say(f"PostgreSQL, Kafka and the schema registry are ready ({time.monotonic() - began:.0f} s).")
        self._prepare_source()
        self.airflow = self._make_airflow()
        self.airflow.start()
        self.airflow.client().wait_for_dag(DAG, 90)
        warming.join()
        _say(f"Airflow is ready at {self.airflow.url} ({time.monotonic() - began:.0f} s).")

    def _prepare_source(self) -> None:
        postgres = self.data.postgres
        with psycopg.connect(postgres.dsn("postgres"), autocommit=True) as connection:
            known = connection.execute("SELECT 1 FROM pg_database WHERE datname = %s", (DATABASE,)).fetchone()
            if known:
                return
            connection.execute(f"CREATE ROLE {ROLE} LOGIN REPLICATION PASSWORD '{self.password}'")  # type: ignore[arg-type]
            connection.execute(f"CREATE DATABASE {DATABASE} OWNER {ROLE}")  # type: ignore[arg-type]
            connection.execute("CREATE DATABASE airflow")
        rows = flights.load(postgres.dsn(DATABASE), ROLE)
        _say("Loaded " + ", ".join(f"{n:,} {table}" for table, n in rows.items()) + ".")

    def _make_airflow(self) -> AirflowStack:
        postgres, registry = self.data.postgres, self.data.registry
        assert registry is not None
        host, port = "127.0.0.1", postgres.port
        return AirflowStack(
            self._folder / "airflow",
            dags_folder=ROOT / "dags",
            metadata_dsn=postgres.url("airflow"),
            die_with_parent=self._die,
            env={
                "AIRFLOW_CONN_POSTGRES_DEFAULT": json.dumps(
                    {
                        "conn_type": "postgres",
                        "host": host,
                        "port": port,
                        "login": ROLE,
                        "password": self.password,
                        "schema": DATABASE,
                    }
                ),
                "AIRFLOW_CONN_KAFKA_DEFAULT": json.dumps(
                    {"conn_type": "kafka", "extra": {"bootstrap.servers": self.data.kafka.bootstrap}}
                ),
                "AIRFLOW_CONN_SCHEMA_REGISTRY_DEFAULT": json.dumps(
                    {"conn_type": "schema_registry", "host": registry.url}
                ),
            },
        )

    def stop(self) -> None:
        """Stop everything: Airflow, which would submit a job again that ends while its task waits, then the jobs."""
        if self.airflow is None and (self._folder / "airflow").exists():
            self.airflow = self._make_airflow()
        if self.airflow is not None:
            self.airflow.stop()
        jobs = self._folder / "airflow" / "bottledwater"
        for folder in jobs.iterdir() if jobs.is_dir() else ():
            supervise.stop(folder, timeout=5)
        self.data.stop()


def _say(text: str) -> None:
    console.print(f"[dim]{time.strftime('%H:%M:%S')}[/dim] {text}", soft_wrap=True)


def _plain(text: str) -> None:
    """To be copied: not broken into lines."""
    console.print(text, soft_wrap=True)


@contextmanager
def _running(stack: Stack) -> Iterator[Stack]:
    def interrupt(*_: object) -> None:
        raise KeyboardInterrupt

    for signum in (signal.SIGTERM, signal.SIGINT):
        signal.signal(signum, interrupt)
    try:
        stack.start()
        yield stack
    finally:
        # a second Ctrl-C must not leave half of them behind
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        _say("Stopping everything that was started.")
        stack.stop()


def demo() -> None:
    """The run, start to end.

    :raises DemoFailed: topic and table differ, or the run did not overlap with the writers.
    """
    shutil.rmtree(DEMO, ignore_errors=True)
    began = time.monotonic()
    with _running(Stack(DEMO, die_with_parent=True)) as stack:
        writers = flights.Writers(stack.dsn)
        writers.start()
        _say(
            "Four sessions write: delays, cancellations, new flights, key changes, several tables in one transaction, roll-backs."
        )
        try:
            seen = _run_dag(stack, writers)
        finally:
            writers.stop()
        _compare(stack, seen, writers)
        _check_gone(stack)
    _say(f"Done in {time.monotonic() - began:.0f} s.")


def _run_dag(stack: Stack, writers: flights.Writers) -> dict[str, Any]:
    """Trigger the DAG and follow it; ends the stream when the writers have had their time. Returns the last report."""
    assert stack.airflow is not None
    client = stack.airflow.client()
    run_id = client.trigger(DAG, {"tables": list(flights.TABLES), "slot": SLOT, "drop_slot": "always"})
    _say(f"Triggered DAG {DAG!r}: {stack.airflow.url}/dags/{DAG}/runs/{run_id}")
    seen: dict[str, Any] = {}
    states: dict[str, str] = {}
    phase = time.monotonic()
    streaming_since = shown = 0.0
    stopped = False
    while True:
        time.sleep(0.5)
        for task in client.task_instances(DAG, run_id):
            if task["state"] != states.get(task["task_id"]) and task["state"] not in (None, "scheduled", "queued"):
                states[task["task_id"]] = task["state"]
                phase = time.monotonic()
                _say(f"  task {task['task_id']}: {task['state']}")
                if task["state"] == "failed":
                    raise DemoFailed(f"Task {task['task_id']} failed:\n{_tail(client, run_id, task)}")
        run_state = client.run(DAG, run_id)["state"]
        if run_state in ("success", "failed"):
            if run_state == "failed":
                raise DemoFailed(f"The DAG run failed; its tasks: {states}.")
            return seen
        if time.monotonic() - shown >= 4.0 and "create_slot" in states and not (stopped and states.get("drop_slot")):
            shown = time.monotonic()
            seen = _look(stack, seen)
            _show(seen)
        if states.get("stream") == "deferred" and seen.get("position"):
            streaming_since = streaming_since or time.monotonic()
        if streaming_since and time.monotonic() - streaming_since > STREAM_SECONDS and not stopped:
            writers.stop()
            _say(
                f"The writers have stopped after {writers.committed:,} transactions ({writers.rolled_back:,} rolled back)."
            )
            seen = _catch_up(stack, seen)
            with connect(stack.dsn) as connection:
                control.request_stop(stack.pipeline, identify(connection), retire=True)
            stopped = True
            _say("The stream is asked to stop for good; the DAG tears down.")
        if time.monotonic() - phase > PATIENCE:
            raise DemoFailed(f"Nothing happened for {PATIENCE:.0f} s; tasks: {states}.")


def _look(stack: Stack, seen: dict[str, Any]) -> dict[str, Any]:
    try:
        found = status.report(stack.pipeline)
    except BottledWaterError:
        return seen
    return found if found["tables"] else seen


def _show(seen: dict[str, Any]) -> None:
    job = seen.get("job") or {}
    lag = seen["slot"]["lag"] if seen.get("slot") else 0
    if job.get("state") == "snapshot":
        rows, at = sum(t["rows"] for t in seen["tables"]), time.monotonic()
        rate = ""
        if (before := _show.__dict__.get("before")) and rows > before[0]:
            rate = f", {(rows - before[0]) / (at - before[1]):,.0f} rows/s"
        _show.__dict__["before"] = rows, at
        _say(f"  snapshot: {rows:,} rows{rate}; slot {lag / 2**20:.1f} MiB behind")
    elif job.get("state") == "streaming":
        counters = job["counters"]
        _say(
            f"  stream: {counters.get('published', 0):,} records, {counters.get('skipped_transactions', 0):,} transactions left to the snapshot; "
            f"slot {lag / 2**20:.2f} MiB behind"
        )


def _catch_up(stack: Stack, seen: dict[str, Any]) -> dict[str, Any]:
    """Wait until everything that is committed now is published."""
    with connect(stack.dsn) as connection:
        row = connection.execute("SELECT pg_current_wal_flush_lsn() - '0/0'::pg_lsn").fetchone()
    target, deadline = int(row[0]) if row else 0, time.monotonic() + PATIENCE
    while time.monotonic() < deadline:
        seen = _look(stack, seen)
        reached = int(seen["position"].partition("/")[0], 16) if seen.get("position") else 0
        heard = (seen.get("job") or {}).get("position", "")
        if reached >= target and heard and int(heard.partition("/")[0], 16) >= target:
            _show(seen)
            return seen
        time.sleep(0.5)
    raise DemoFailed(f"The stream did not reach the end of the WAL within {PATIENCE:.0f} s.")


def _tail(client: Any, run_id: str, task: dict[str, Any]) -> str:
    text = str(client.task_log(DAG, run_id, task["task_id"], max(1, task.get("try_number") or 1)))
    return text[-3000:]


def _compare(stack: Stack, seen: dict[str, Any], writers: flights.Writers) -> None:
    """The table of topics against tables, and the proof that snapshot and writers overlapped."""
    pipeline, job = stack.pipeline, seen["job"]
    by_table = job["progress"].get("skipped_by_table", {})
    shown = Table(
        "topic",
        "source rows",
        "snapshot records",
        "stream records",
        "transactions skipped\nat the boundary",
        "equal",
        title="Topics against tables",
    )
    failures: list[str] = []
    for name in flights.TABLES:
        result = compare(stack.dsn, pipeline.kafka, pipeline.registry, name, name)
        shown.add_row(
            result.topic, f"{result.rows:,}", f"{result.snapshot_records:,}", f"{result.stream_records:,}",
            f"{by_table.get(f'public.{name}', 0):,}", "[green]yes[/green]" if result.equal else "[red]NO[/red]",
        )  # fmt: skip
        failures += [f"{name}: {difference}" for difference in result.differences]
    console.print(shown)
    counters = job["counters"]
    boundary = next(t["boundary"] for t in seen["tables"])
    in_progress = len([x for x in boundary.split(":")[2].split(",") if x])
    skipped = counters.get("skipped_transactions", 0)
    published = counters.get("transactions", 0) - skipped
    _say(
        f"At the boundary {boundary} {in_progress} transactions were in progress; {skipped:,} were skipped, since the snapshot has them; "
        f"{published:,} were published after it. {counters.get('dead_letters', 0)} dead letters."
    )
    if not (in_progress and skipped and published > 0):
        failures.append("The snapshot did not overlap with the writers, so this run proves nothing.")
    if failures:
        raise DemoFailed("\n".join(failures))


def _check_gone(stack: Stack) -> None:
    """The teardown has dropped slot and publications."""
    with connect(stack.dsn) as connection:
        left = [f"slot {s.name}" for s in slot.states(connection)]
        left += [f"publication {n}" for n in publication.names(SLOT) if publication.read(connection, n)]
    if left:
        raise DemoFailed(f"The teardown left {', '.join(left)}.")
    _say("The teardown has dropped the slot and both publications.")


def up() -> None:
    """Start the stack and leave it running."""
    stack = Stack(KEPT, die_with_parent=False)
    try:
        stack.start()
    except BaseException:
        stack.stop()
        raise
    assert stack.airflow is not None
    _plain(f"\nAirflow:    {stack.airflow.url}   user {stack.airflow.user}, password {stack.airflow.password}")
    _plain(f"PostgreSQL: {stack.data.postgres.dsn(DATABASE)}")
    assert stack.data.registry is not None
    _plain(f"Kafka:      {stack.data.kafka.bootstrap}\nRegistry:   {stack.data.registry.url}\n")
    _plain(
        f"Trigger the DAG {DAG!r} (slot {SLOT!r}, tables {', '.join(flights.TABLES)}). `make down` stops everything."
    )


def down() -> None:
    """Stop what :func:`up` started; the data stay."""
    if KEPT.exists():
        Stack(KEPT, die_with_parent=False).stop()


def main(arguments: list[str]) -> int:
    """``python -m airflow_bottledwater.local.demo [up|down]``."""
    logging.basicConfig(level=logging.WARNING, format="%(message)s")
    logging.getLogger("airflow_bottledwater.provision.preflight").setLevel(logging.ERROR)
    try:
        {"up": up, "down": down}.get(arguments[0] if arguments else "", demo)()
    except KeyboardInterrupt:
        console.print("Interrupted; nothing was left running.")
        return 130
    except (BottledWaterError, LocalServerError, psycopg.Error) as error:
        console.print(f"[bold red]FAILED[/bold red] {error}", soft_wrap=True)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
