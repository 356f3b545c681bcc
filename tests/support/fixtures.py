"""The fixtures of all tests: servers, started when a test first asks for one; a database for each test; pipelines over
them."""

from __future__ import annotations

import os
import uuid
import zlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import psycopg
import pytest

from airflow_bottledwater.errors import LocalServerError
from airflow_bottledwater.local.kafka import KafkaBroker
from airflow_bottledwater.local.postgres import PostgresServer, programs
from airflow_bottledwater.local.registry import SchemaRegistry
from tests.support import shared_registry
from tests.support.forms import FORMS, Draw, draw_form
from tests.support.pipeline import PASSWORD, Source, logged
from tests.support.topics import Flow, MakeFlow


# ---------------------------------------------------------------------- servers
@pytest.fixture(scope="session")
def postgres(tmp_path_factory: pytest.TempPathFactory) -> Iterator[PostgresServer]:
    """A PostgreSQL server; BOTTLEDWATER_TEST_POSTGRES chooses its version."""
    version = os.environ.get("BOTTLEDWATER_TEST_POSTGRES", "16")
    settings = {"max_prepared_transactions": 50}
    with PostgresServer(tmp_path_factory.mktemp("postgres"), version=version, settings=settings) as server:
        yield server


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
def registry(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[SchemaRegistry]:
    """A schema registry; nobody may stop it, since other processes use it, too."""
    if url := getattr(request.config, "workerinput", {}).get("registry"):
        yield shared_registry.started(url)
    else:
        with SchemaRegistry(tmp_path_factory.mktemp("registry")) as server:
            yield server


@pytest.fixture(scope="session")
def own_registry(tmp_path_factory: pytest.TempPathFactory) -> Iterator[SchemaRegistry]:
    """A schema registry that may be stopped and killed."""
    with SchemaRegistry(tmp_path_factory.mktemp("own-registry")) as server:
        yield server


@pytest.fixture(scope="session")
def small_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[PostgresServer]:
    """A server with tiny limits and prepared transactions; its WAL segments have 1 MB."""
    settings = {
        "max_connections": 15,
        "max_locks_per_transaction": 10,
        "max_prepared_transactions": 2,
        "max_wal_senders": 2,
        "max_replication_slots": 2,
        "min_wal_size": "2MB",
        "max_slot_wal_keep_size": "2MB",
    }
    folder = tmp_path_factory.mktemp("small")
    with PostgresServer(folder, settings=settings, initdb_args=["--wal-segsize=1"]) as server:
        yield server


# ---------------------------------------------------------------------- pipelines that run
@pytest.fixture
def flow_settings() -> dict[str, Any]:
    """What the pipelines of a module have in common: a module with settings of its own replaces this."""
    return {}


@pytest.fixture
def flow_statements() -> tuple[str, ...]:
    """What each pipeline's database begins with: a module with tables of its own replaces this."""
    return ()


@pytest.fixture
def make_flow(
    database: str, kafka: KafkaBroker, flow_settings: dict[str, Any], flow_statements: tuple[str, ...]
) -> MakeFlow:
    """Makes pipelines over the test's database, in the JSON format where no registry is given."""

    def make(registry: SchemaRegistry | None = None, *, broker: KafkaBroker = kafka, **settings: Any) -> Flow:
        flow = Flow(database, broker, registry, **{**flow_settings, **settings})
        if flow_statements:
            flow.execute(*flow_statements)
        return flow

    return make


@pytest.fixture
def draw(request: pytest.FixtureRequest) -> Draw:
    """Gives a pipeline that is not made yet the form of its records, by the test and its seed, see
    :func:`tests.support.forms.draw_form`."""
    salt = zlib.crc32(request.node.originalname.encode())

    def drawn(flow: Flow, seed: int, tables: Sequence[str]) -> None:
        draw_form(seed + salt % len(FORMS), flow, lambda: request.getfixturevalue("registry"), tables)

    return drawn


# ---------------------------------------------------------------------- pipelines that nobody may harm or give away
@pytest.fixture
def make_source(
    kafka: KafkaBroker, registry: SchemaRegistry, caplog: pytest.LogCaptureFixture, capfd: pytest.CaptureFixture[str]
) -> Iterator[Callable[[PostgresServer, str], Source]]:
    """Sources with ``items``, a table with a primary key; at the end nobody may have logged the password."""
    made: list[Source] = []

    def make(server: PostgresServer, dsn: str) -> Source:
        source = Source(server, dsn, kafka, registry)
        made.append(source)
        source.execute("CREATE TABLE items (id bigint PRIMARY KEY, name text)")
        return source

    caplog.set_level("DEBUG")
    yield make
    for source in made:
        source.clean()
    out, err = capfd.readouterr()
    for seen in (out, err, logged(caplog)):
        assert PASSWORD not in seen


@pytest.fixture
def source(make_source: Callable[[PostgresServer, str], Source], postgres: PostgresServer, database: str) -> Source:
    """A fresh database on the server of all tests."""
    return make_source(postgres, database)


@pytest.fixture
def small(make_source: Callable[[PostgresServer, str], Source], small_server: PostgresServer) -> Source:
    """A fresh database on the server with tiny limits."""
    return make_source(small_server, small_server.createdb(f"d{uuid.uuid4().hex[:8]}"))
