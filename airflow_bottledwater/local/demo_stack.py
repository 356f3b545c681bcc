"""The servers of the demo and of `bottledwater up`: a source with its role and data, Kafka, the registry, and an
Airflow with their connections."""

from __future__ import annotations

import json
import secrets
import shlex
import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import psycopg
from psycopg import sql
from rich.console import Console

from airflow_bottledwater.errors import LocalServerError, Refused
from airflow_bottledwater.jobs import supervise
from airflow_bottledwater.local import artifacts, flights, ports
from airflow_bottledwater.local.airflow import AirflowStack
from airflow_bottledwater.local.stack import DataStack
from airflow_bottledwater.pipeline.settings import Settings
from airflow_bottledwater.warm import warm_up

# the slot is the default of all forms, so that the other DAGs need nothing filled in
DAG, SLOT, DATABASE, ROLE = "bottledwater", "bottledwater", "nyc", "bottledwater"

console = Console(highlight=False)


def say(text: str) -> None:
    """Print a line of progress."""
    console.print(f"[dim]{time.strftime('%H:%M:%S')}[/dim] {text}", soft_wrap=True)


def dags_folder() -> Path:
    """The folder with the ready DAG: in the wheel beside this module, in a checkout ``dags/``.

    :raises LocalServerError: it is in neither.
    """
    here = Path(__file__).resolve()
    for folder in (here.parent / "dags", here.parents[2] / "dags"):
        if (folder / f"{DAG}.py").exists():
            return folder
    raise LocalServerError(f"the DAG {DAG}.py is not installed: reinstall airflow-provider-bottledwater")


class DemoStack:
    """The servers in a folder, the source database with its role, and an Airflow."""

    def __init__(self, folder: Path, *, die_with_parent: bool) -> None:
        self.data = DataStack(folder, die_with_parent=die_with_parent)
        password_file = folder / "role-password"
        if not password_file.exists():
            folder.mkdir(parents=True, exist_ok=True)
            password_file.touch(mode=0o600)
            password_file.write_text(secrets.token_urlsafe(18))
        self.password = password_file.read_text()
        # made here, since the ports of the data servers are known now; this starts nothing
        self.airflow = AirflowStack(
            folder / "airflow",
            dags_folder=dags_folder(),
            metadata_dsn=self.data.postgres.url("airflow"),
            die_with_parent=die_with_parent,
            env={f"AIRFLOW_CONN_{name}_DEFAULT": json.dumps(value) for name, value in self._connections().items()},
        )

    @property
    def dsn(self) -> str:
        """The connection string of the source, for the pipeline's role."""
        return self.data.postgres.dsn(DATABASE, user=ROLE, password=self.password)

    @property
    def pipeline(self) -> Settings:
        """The pipeline that the DAG run is given."""
        return Settings(
            postgres=self.dsn,
            kafka={"bootstrap.servers": self.data.kafka.bootstrap},
            registry={"url": self.data.registry.url},
            slot=SLOT,
            tables=flights.TABLES,
        )

    def start(self) -> None:
        """Start everything, and prepare the source with its role and its data."""
        began = time.monotonic()
        warming = threading.Thread(target=warm_up, name="compile", daemon=True)
        warming.start()
        self.data.start()
        say(f"PostgreSQL, Kafka and the schema registry are ready ({time.monotonic() - began:.0f} s).")
        self._prepare_source()
        self.airflow.start()
        self.airflow.client().wait_for_dag(DAG, 90)
        warming.join()
        say(f"Airflow is ready at {self.airflow.url} ({time.monotonic() - began:.0f} s).")

    def stop(self) -> None:
        """Stop everything: Airflow first, since it would submit a job again that ends while its task waits for it; then
        the jobs."""
        self.airflow.stop()
        jobs = self.airflow.folder / "bottledwater"
        for folder in jobs.iterdir() if jobs.is_dir() else ():
            supervise.stop(folder, timeout=5, asked=False)
        self.data.stop()

    def _prepare_source(self) -> None:
        """Make what is missing of role, databases and data: an earlier start may have been interrupted."""
        postgres = self.data.postgres
        role, database = sql.Identifier(ROLE), sql.Identifier(DATABASE)
        with psycopg.connect(postgres.dsn(), autocommit=True) as connection:
            roles = {name for (name,) in connection.execute("SELECT rolname FROM pg_roles")}
            databases = {name for (name,) in connection.execute("SELECT datname FROM pg_database")}
            if ROLE not in roles:
                make = sql.SQL("CREATE ROLE {} LOGIN REPLICATION PASSWORD {}")
                connection.execute(make.format(role, sql.Literal(self.password)))
            if DATABASE not in databases:
                connection.execute(sql.SQL("CREATE DATABASE {} OWNER {}").format(database, role))
            if "airflow" not in databases:
                connection.execute("CREATE DATABASE airflow")
        with psycopg.connect(postgres.dsn(DATABASE)) as connection:
            # all tables are made and filled in one transaction
            if connection.execute("SELECT WHERE to_regclass('flights') IS NOT NULL").fetchone() is not None:
                return
        rows = flights.load(postgres.dsn(DATABASE), ROLE)
        say("Loaded " + ", ".join(f"{n:,} {table}" for table, n in rows.items()) + ".")

    def _connections(self) -> dict[str, dict[str, object]]:
        """Airflow's connections, with the ids that the DAG uses by default."""
        return {
            "POSTGRES": {
                "conn_type": "postgres",
                "host": ports.HOST,
                "port": self.data.postgres.port,
                "login": ROLE,
                "password": self.password,
                "schema": DATABASE,
            },
            "KAFKA": {"conn_type": "kafka", "extra": {"bootstrap.servers": self.data.kafka.bootstrap}},
            "SCHEMA_REGISTRY": {"conn_type": "schema_registry", "host": self.data.registry.url},
        }


@contextmanager
def alone(name: str) -> Iterator[Path]:
    """The folder of the servers of ``demo`` or ``up``, which no other one starts meanwhile.

    :raises Refused: another one does.
    """
    cache = artifacts.cache_folder()
    with ExitStack() as held:
        try:
            held.enter_context(artifacts.lock(cache, name, wait=False))
        except BlockingIOError:
            raise Refused(
                f"Another 'bottledwater {name}' runs in {cache / name}.",
                "Wait for its end, or set BOTTLEDWATER_CACHE to another folder.",
            ) from None
        yield cache / name


def up() -> None:
    """Start the servers and leave them running.

    :raises Refused: another process does the same.
    """
    with alone("up") as folder:
        stack = DemoStack(folder, die_with_parent=False)
        try:
            stack.start()
        except BaseException:
            stack.stop()
            raise
    lines = [
        f"\nAirflow:    {stack.airflow.url}   user {stack.airflow.user}, password {stack.airflow.password}",
        f"PostgreSQL: {stack.data.postgres.dsn(DATABASE)}",
        f"Kafka:      {stack.data.kafka.bootstrap}\nRegistry:   {stack.data.registry.url}\n",
        f"Trigger the DAG {DAG!r}: its form fits as it is. `{_from_anywhere('down')}` stops everything;"
        f" the data stay in {folder}.",
    ]
    for line in lines:  # not wrapped, so that they can be copied
        console.print(line, soft_wrap=True)


def down() -> None:
    """Stop what :func:`up` started, and say what; the data stay.

    :raises Refused: nothing was ever started there.
    """
    folder = artifacts.cache_folder() / "up"
    if not folder.exists():
        raise Refused(
            f"Nothing was started in {folder}.",
            "Run this where 'bottledwater up' was run, or set BOTTLEDWATER_CACHE to the folder that it has used.",
        )
    stack = DemoStack(folder, die_with_parent=False)
    running = [server.name for server in (*stack.airflow.components.values(), *stack.data.servers) if server.running]
    stack.stop()
    say(f"Stopped {', '.join(running)} of {folder}." if running else f"Nothing was running of {folder}.")


def _from_anywhere(command: str) -> str:
    """A subcommand with the folder that it is about, where another working directory would mean another one."""
    cache = artifacts.cache_folder()
    named = "" if cache == artifacts.users_folder() else f"BOTTLEDWATER_CACHE={shlex.quote(str(cache))} "
    return f"{named}bottledwater {command}"
