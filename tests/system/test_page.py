"""The page in a browser, in a real Airflow with a pipeline under load: list, plots, dead letters, buttons, light and
dark, and what it says when tables are paused, the slot is lost, and Kafka is away."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.page import FOLDER
from tests.system.test_dag import DAG, System, until

pytestmark = [
    pytest.mark.long,
    pytest.mark.timeout(1500),
    pytest.mark.skipif(shutil.which("chromium") is None, reason="Debian's chromium is not installed"),
    pytest.mark.skipif(
        not (FOLDER / "node_modules").is_dir(), reason="make page has not installed the browser's client"
    ),
]


@pytest.fixture(scope="module")
def system(tmp_path_factory: pytest.TempPathFactory) -> Iterator[System]:
    started = System(tmp_path_factory.mktemp("page"))
    try:
        started.start()
        started.execute(
            "CREATE TABLE public.orders (id bigint PRIMARY KEY, amount numeric, note text)",
            "INSERT INTO public.orders SELECT g, g, repeat('x', 60) FROM generate_series(1, 20000) g",
            "CREATE TABLE public.customers (id int PRIMARY KEY, name text)",
            "INSERT INTO public.customers SELECT g, 'customer ' || g FROM generate_series(1, 500) g",
            "ALTER TABLE public.orders OWNER TO cdc",
            "ALTER TABLE public.customers OWNER TO cdc",
        )
        yield started
        started.watch.end()
    finally:
        started.stop()


def browse(system: System, step: str) -> None:
    """Run a step of www/tests/browser.mjs, which fails if the page is not as it says."""
    images = Path(os.environ.get("BOTTLEDWATER_IMAGES") or system.folder / "images").absolute()
    images.mkdir(parents=True, exist_ok=True)
    where = {"url": system.airflow.url, "user": system.airflow.user, "password": system.airflow.password}
    env = {**os.environ, "AIRFLOW": json.dumps(where), "IMAGES": str(images)}
    command = ["node", "tests/browser.mjs", step]
    ended = subprocess.run(command, cwd=FOLDER, env=env, capture_output=True, text=True, check=False)
    assert ended.returncode == 0, ended.stdout + ended.stderr


def test_the_page_shows_a_pipeline_and_stops_it(system: System) -> None:
    browse(system, "empty")
    asked = {"slot": "orders", "tables": ["orders", "customers"], "metrics_interval": 1, "on_error": "log"}
    run = system.client.trigger(DAG, asked)
    until("it streams", lambda: system.streams(run, "orders") or system.ended(run), 300)
    ended = threading.Event()

    def write() -> None:
        number = 20_000
        with system.connect() as connection:
            while not ended.wait(0.2):
                number += 37
                rows = f"generate_series({number - 36}, {number}) g"
                connection.execute(f"INSERT INTO orders SELECT g, g, 'new' FROM {rows}")
                connection.execute(f"UPDATE orders SET amount = -amount WHERE id % 500 = {number % 500}")
                connection.execute(f"DELETE FROM orders WHERE id = {number - 9000}")

    writer = threading.Thread(target=write, daemon=True)
    writer.start()
    try:
        browse(system, "running")
        system.execute("INSERT INTO orders VALUES (-1, 0, repeat('x', 2000000))")
        browse(system, "letters")
        browse(system, "pause")
        browse(system, "stop")
        until("its task has ended", lambda: system.task(run, "stream")["state"] == "success")
    finally:
        ended.set()
        writer.join()
    lose_the_slot(system)
    browse(system, "lost")
    system.data.kafka.stop()
    browse(system, "away")


def lose_the_slot(system: System) -> None:
    """Let PostgreSQL remove WAL that the slot needs."""
    system.execute("ALTER SYSTEM SET max_slot_wal_keep_size = '16MB'", "SELECT pg_reload_conf()")

    def lost() -> bool:
        system.execute("INSERT INTO orders SELECT max(id) + 1 FROM orders", "SELECT pg_switch_wal()", "CHECKPOINT")
        with system.connect() as connection:
            found = connection.execute("SELECT wal_status FROM pg_replication_slots WHERE slot_name = 'orders'")
            return found.fetchall() == [("lost",)]

    until("the slot is lost", lost, 120)
