"""What all tests share: embedded servers, started when a test first asks for one, and a database for each test."""

from __future__ import annotations

import os
import random
import uuid
from collections.abc import Iterator

import hypothesis
import psycopg
import pytest

from airflow_bottledwater.errors import LocalServerError
from airflow_bottledwater.local.kafka import KafkaBroker
from airflow_bottledwater.local.postgres import PostgresServer, programs
from airflow_bottledwater.local.registry import SchemaRegistry

pytest_plugins = ["tests.support.pipeline"]

# a first call compiles for seconds, and a shared machine is slow now and then: neither is a fault of the code
hypothesis.settings.register_profile(
    "bottledwater",
    deadline=None,
    database=None,
    suppress_health_check=[hypothesis.HealthCheck.too_slow, hypothesis.HealthCheck.data_too_large],
    print_blob=True,
)
hypothesis.settings.load_profile("bottledwater")


@pytest.fixture(scope="session")
def postgres(tmp_path_factory: pytest.TempPathFactory) -> Iterator[PostgresServer]:
    """A PostgreSQL server; BOTTLEDWATER_TEST_POSTGRES chooses its version."""
    version = os.environ.get("BOTTLEDWATER_TEST_POSTGRES", "16")
    settings = {"max_prepared_transactions": 50}
    with PostgresServer(tmp_path_factory.mktemp("postgres"), version=version, settings=settings) as server:
        yield server


@pytest.hookimpl(tryfirst=True)
def pytest_configure(config: pytest.Config) -> None:
    """One seed for all random values of a run, the same in each of its processes."""
    if config.option.hypothesis_seed is None:
        config.option.hypothesis_seed = str(random.randrange(1 << 24))


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter, config: pytest.Config) -> None:
    """With which it can be repeated."""
    terminalreporter.write_line(f"random values: --hypothesis-seed={config.option.hypothesis_seed}")


#: what can be had: 16 and 18 come with the dependencies, 15 where Debian's is installed
VERSIONS = ["15", "16", "18"]


@pytest.fixture(scope="session", params=VERSIONS)
def each_postgres(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[PostgresServer]:
    """A server of each version."""
    try:
        programs(request.param)
    except LocalServerError as error:
        pytest.skip(str(error))
    with PostgresServer(tmp_path_factory.mktemp("postgres"), version=request.param) as server:
        yield server


@pytest.fixture
def database(postgres: PostgresServer) -> Iterator[str]:
    """The connection string of a fresh database; its slots end with the test."""
    name = f"test_{uuid.uuid4().hex[:12]}"
    yield postgres.createdb(name)
    with psycopg.connect(postgres.dsn(), autocommit=True) as connection:
        connection.execute(
            "SELECT pg_terminate_backend(active_pid) FROM pg_replication_slots WHERE database = %s AND active", (name,)
        )
        connection.execute(
            "DO $$ DECLARE s record; BEGIN FOR i IN 1..50 LOOP"
            f" IF NOT EXISTS (SELECT FROM pg_replication_slots WHERE database = '{name}' AND active) THEN EXIT; END IF;"
            " PERFORM pg_sleep(0.1); END LOOP; END $$"
        )
        connection.execute(
            "SELECT pg_drop_replication_slot(slot_name) FROM pg_replication_slots WHERE database = %s", (name,)
        )
        connection.execute(f"DROP DATABASE {name} WITH (FORCE)")


@pytest.fixture(scope="session")
def kafka(tmp_path_factory: pytest.TempPathFactory) -> Iterator[KafkaBroker]:
    """A Kafka broker."""
    with KafkaBroker(tmp_path_factory.mktemp("kafka")) as server:
        yield server


@pytest.fixture(scope="session")
def registry(tmp_path_factory: pytest.TempPathFactory) -> Iterator[SchemaRegistry]:
    """A schema registry."""
    with SchemaRegistry(tmp_path_factory.mktemp("registry")) as server:
        yield server
