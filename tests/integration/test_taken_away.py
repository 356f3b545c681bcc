"""Each right, limit and setting is taken away, one at a time, from a pipeline that has no more than it needs: whatever
the run fails with, preflight has said, and a run that is refused leaves nothing; where preflight has nothing to say,
the run does not fail. Once before there is a pipeline, and once before its stream goes on.

A sample of the cases is in every run of the tests, all of them in the long one.
"""

from __future__ import annotations

import re
import uuid
from collections.abc import Callable, Iterator
from typing import Any

import psycopg
import pytest
from confluent_kafka.admin import AdminClient, NewTopic
from confluent_kafka.schema_registry import SchemaRegistryClient
from psycopg.conninfo import conninfo_to_dict, make_conninfo

from airflow_bottledwater.errors import BottledWaterError
from airflow_bottledwater.kafka.topics import Topics
from airflow_bottledwater.local.kafka import KafkaBroker
from airflow_bottledwater.local.postgres import PostgresServer
from airflow_bottledwater.local.registry import SchemaRegistry
from airflow_bottledwater.provision import preflight
from airflow_bottledwater.state import control_topic, store
from tests.support.compare import compare
from tests.support.registry_front import RegistryFront, fronted
from tests.support.topics import Flow, alter

TABLES = ("sales.a", "sales.p")


class World:
    """A pipeline whose role, tables, types and publications are as the documentation has it for the fewest rights.

    :ivar role: its role, which owns nothing.
    :ivar owner: of the tables.
    :ivar held: connections that are open until the test's end.
    """

    def __init__(self, dsn: str, kafka: KafkaBroker, registry: SchemaRegistry, front: RegistryFront) -> None:
        self.front, self.database = front, str(conninfo_to_dict(dsn)["dbname"])
        self.flow = Flow(dsn, kafka, registry, tables=TABLES, create_publication=False, outage_timeout=4.0)
        self.role, self.owner = (f"{kind}_{uuid.uuid4().hex[:8]}" for kind in ("role", "owner"))
        self.publication = self.flow.pipeline.publication_name
        self.held: list[psycopg.Connection[Any]] = []
        self.execute(
            f"CREATE ROLE {self.role} LOGIN REPLICATION PASSWORD 'x'",
            f"CREATE ROLE {self.owner}",
            f"GRANT CREATE ON DATABASE {self.database} TO {self.owner}",
            "REVOKE ALL ON SCHEMA public FROM PUBLIC",
            f"SET ROLE {self.owner}; CREATE SCHEMA sales; CREATE SCHEMA kinds;"
            "CREATE TYPE kinds.mood AS ENUM ('sad', 'ok'); CREATE TYPE kinds.pair AS (a int, b kinds.mood);"
            "CREATE DOMAIN kinds.name AS text CHECK (value <> ''); CREATE TYPE kinds.spans AS RANGE (subtype = int8);"
            "CREATE TABLE sales.a (id int PRIMARY KEY, mood kinds.mood, pair kinds.pair, name kinds.name,"
            " moods kinds.mood[], span kinds.spans, n int, long text STORAGE EXTERNAL);"
            "CREATE TABLE sales.p (id int PRIMARY KEY, n text) PARTITION BY RANGE (id);"
            "CREATE TABLE sales.p_1 PARTITION OF sales.p FOR VALUES FROM (0) TO (100);"
            f"GRANT USAGE ON SCHEMA sales TO {self.role}; GRANT SELECT ON sales.a, sales.p, sales.p_1 TO {self.role};"
            f"CREATE PUBLICATION {self.publication} FOR TABLE sales.a, sales.p"
            " WITH (publish_via_partition_root = true);"
            f"CREATE PUBLICATION {self.publication}_unkeyed"
            " WITH (publish = 'insert, truncate', publish_via_partition_root = true);",
        )
        self.change()
        self.flow.change(postgres=make_conninfo(dsn, user=self.role, password="x"), registry={"url": front.url})

    def execute(self, *statements: str) -> list[tuple[Any, ...]]:
        """Run statements as superuser."""
        return self.flow.execute(*statements)

    def change(self) -> None:
        """Change rows in all ways: with what is in the WAL, and with values that have to be read again."""
        self.execute(
            "INSERT INTO sales.a SELECT coalesce(max(id), 0) + 1, 'ok', ROW(1, 'sad')::kinds.pair, 'n', '{ok,sad}',"
            " '[1,5)', 1, repeat(md5(random()::text), 200) FROM sales.a",
            "INSERT INTO sales.a SELECT max(id) + g, 'sad' FROM sales.a, generate_series(1, 3) g GROUP BY g",
            "UPDATE sales.a SET n = n + 1",
            "UPDATE sales.a SET id = id + 1000 WHERE id = (SELECT max(id) FROM sales.a WHERE id < 1000)",
            "DELETE FROM sales.a WHERE id = (SELECT max(id) FROM sales.a WHERE id < 1000)",
            "INSERT INTO sales.p SELECT coalesce(max(id), 0) + 1, 'x' FROM sales.p",
            "UPDATE sales.p SET n = n || 'y'",
        )

    def publishes_itself(self) -> None:
        """Let the role make the publications, with the rights that the documentation has for it."""
        self.execute(
            f"DROP PUBLICATION {self.publication}, {self.publication}_unkeyed",
            f"GRANT {self.owner} TO {self.role}",
            f"GRANT CREATE ON DATABASE {self.database} TO {self.role}",
        )
        self.flow.change(create_publication=True)

    def run(self) -> None:
        """Create, take the snapshot, stream some changes; the topics are equal to the tables."""
        self.flow.create()
        self.flow.snapshot()
        self.change()
        self.flow.stream()
        registry = {"url": self.front.registry.url}
        for table in TABLES:
            kafka = {"bootstrap.servers": self.flow.kafka.bootstrap}
            found = compare(self.flow.dsn, kafka, registry, table, self.topic(table))
            assert not found.differences, (table, found.differences[:3])

    def topic(self, name: str) -> str:
        """The name of one of its topics."""
        if name == "state":
            return store.state_topic_name(self.database, self.flow.pipeline.slot)
        return f"{self.flow.pipeline.topic_prefix}.{name}"

    def picture(self) -> dict[str, Any]:
        """What there is of the pipeline."""
        slot, kafka = self.flow.pipeline.slot, {"bootstrap.servers": self.flow.kafka.bootstrap}
        topics = Topics(kafka).names()
        control = control_topic.read(kafka) if store.CONTROL_TOPIC in topics else {}
        return {
            "publications": self.execute("SELECT pubname FROM pg_publication ORDER BY 1"),
            "slots": self.execute("SELECT slot_name FROM pg_replication_slots WHERE database = current_database()"),
            "topics": {name for name in topics if slot in name},
            "subjects": {
                name for name in SchemaRegistryClient({"url": self.front.registry.url}).get_subjects() if slot in name
            },
            "control": {key: value for key, value in control.items() if slot in key},
        }

    def clean(self) -> None:
        """Drop what is the server's."""
        for each in self.held:
            each.close()
        self.execute(
            "SELECT pg_drop_replication_slot(slot_name) FROM pg_replication_slots WHERE NOT active AND"
            f" (database = current_database() OR slot_name LIKE '{self.role}%')"
        )
        for role in (self.role, self.owner):
            self.execute(f"DROP OWNED BY {role} CASCADE", f"DROP ROLE {role}")


Take = Callable[[World], object]


def sql(*statements: str) -> Take:
    """Statements of a superuser; {role}, {owner}, {database} and {publication} stand for names."""
    return lambda world: world.execute(*(each.format(**vars(world)) for each in statements))


def settings(**changed: Any) -> Take:
    return lambda world: world.flow.change(**changed)


def connection(**changed: str) -> Take:
    """Other parameters of the connection to PostgreSQL."""
    return lambda world: world.flow.change(postgres=make_conninfo(world.flow.pipeline.postgres, **changed))


def client(name: str, value: str) -> Take:
    """A property of the Kafka connection."""
    return lambda world: world.flow.change(kafka={**world.flow.pipeline.kafka, name: value})


def topic(name: str, **config: str) -> Take:
    """A topic that somebody has made with these properties, or has altered to them."""

    def take(world: World) -> None:
        properties = {key.replace("_", "."): value for key, value in config.items()}
        named, kafka = world.topic(name), {"bootstrap.servers": world.flow.kafka.bootstrap}
        if named in Topics(kafka).names():
            alter(world.flow, named, properties)
        else:
            compacted = {} if "_events" in named else {"cleanup.policy": "compact"}
            admin = AdminClient(kafka)
            admin.create_topics([NewTopic(named, 1, 1, config={**compacted, **properties})])[named].result()

    return take


def answers(pattern: str, status: int, code: int, message: str, mode: str = "") -> Take:
    """The registry answers so to requests whose method and path match."""

    def take(world: World) -> None:
        world.front.mode = mode
        world.front.answer = lambda method, path: (
            (status, code, message) if re.search(pattern, f"{method} {path}") else None
        )

    return take


def slots(world: World) -> None:
    """All of them are in use."""
    free = "SELECT setting::int - (SELECT count(*) FROM pg_replication_slots) FROM pg_settings WHERE name = "
    for n in range(world.execute(f"{free} 'max_replication_slots'")[0][0]):
        world.execute(f"SELECT pg_create_physical_replication_slot('{world.role}_{n}')")


def walsenders(world: World) -> None:
    """All of them are in use."""
    ((most,),) = world.execute("SELECT setting::int FROM pg_settings WHERE name = 'max_wal_senders'")
    dsn = make_conninfo(world.flow.dsn, replication="database")
    world.held += [psycopg.connect(dsn, autocommit=True) for _ in range(most)]


READ_ONLY = (422, 42205, "Subject is in read-only mode")
DENIED = (403, 40301, "User is denied operation")
#: of a role, and what could be set for it, or for the database
ROLE_SETTINGS = {
    "default_transaction_read_only": "on",
    "default_transaction_isolation": "serializable",
    "default_transaction_deferrable": "on",
    "statement_timeout": "100",
    "lock_timeout": "1",
    "idle_in_transaction_session_timeout": "100",
    "idle_session_timeout": "2s",
    "client_encoding": "LATIN1",
    "DateStyle": "SQL, DMY",
    "IntervalStyle": "iso_8601",
    "search_path": "nowhere",
    "bytea_output": "escape",
    "standard_conforming_strings": "off",
    "row_security": "on",
    "quote_all_identifiers": "on",
    "role": "pg_monitor",
    "array_nulls": "off",
    "xmloption": "document",
    "transform_null_equals": "on",
    "plan_cache_mode": "force_generic_plan",
    "enable_tidscan": "off",
    "wal_sender_timeout": "100ms",
    "temp_file_limit": "0",
    "logical_decoding_work_mem": "64",
}
#: of topics that exist already
TOPIC_SETTINGS = {
    "max_message_bytes": "100",
    "min_insync_replicas": "2",
    "cleanup_policy": "delete",
    "message_timestamp_type": "LogAppendTime",
    "compression_type": "uncompressed",
    "retention_bytes": "1",
}
#: of Kafka's connection, which may be there for other programs
CLIENT_SETTINGS = {
    "acks": "1",
    "enable.idempotence": "false",
    "max.in.flight": "10",
    "retries": "0",
    "message.max.bytes": "1000",
    "message.timeout.ms": "1",
    "delivery.timeout.ms": "1",
    "queue.buffering.max.messages": "10",
    "queue.buffering.max.kbytes": "1",
    "batch.num.messages": "1",
    "batch.size": "1",
    "linger.ms": "900000",
    "compression.type": "brotli",
    "compression.codec": "snappy",
    "isolation.level": "read_uncommitted",
    "group.id": "theirs",
    "enable.auto.commit": "true",
    "auto.offset.reset": "error",
    "fetch.max.bytes": "1000",
    "max.partition.fetch.bytes": "10",
    "receive.message.max.bytes": "1000",
    "partitioner": "random",
    "allow.auto.create.topics": "true",
    "transactional.id": "mine",
    "transaction.timeout.ms": "1000",
    "key.serializer": "org.apache.kafka.common.serialization.ByteArraySerializer",
    "enable.partition.eof": "false",
    "statistics.interval.ms": "10",
    "enabled_events": "0",
    "socket.timeout.ms": "10",
    "metadata.max.age.ms": "10",
    "delivery.report.only.error": "true",
    "security.protocol": "SSL",
    "bootstrap.servers": "127.0.0.1:1",
}
#: of the package's queries, see source_checks.RELATIONS
CATALOGS = ("pg_publication_rel", "pg_stat_activity", "pg_replication_slots", "pg_locks", "pg_inherits", "pg_range")

CASES: dict[str, Take] = {
    "nothing": lambda world: None,
    "login": sql("ALTER ROLE {role} NOLOGIN"),
    "replication": sql("ALTER ROLE {role} NOREPLICATION"),
    "connect": sql("REVOKE CONNECT ON DATABASE {database} FROM PUBLIC"),
    "temporary": sql("REVOKE TEMPORARY ON DATABASE {database} FROM PUBLIC"),
    "valid until": sql("ALTER ROLE {role} VALID UNTIL '2001-01-01'"),
    **{f"{n} sessions": sql(f"ALTER ROLE {{role}} CONNECTION LIMIT {n}") for n in range(6)},
    "sessions of the database": sql("ALTER DATABASE {database} CONNECTION LIMIT 2"),
    "slots": slots,
    "walsenders": walsenders,
    "usage of the schema": sql("REVOKE USAGE ON SCHEMA sales FROM {role}"),
    "usage of the types": sql("REVOKE USAGE ON TYPE kinds.mood, kinds.pair, kinds.spans, kinds.name FROM PUBLIC"),
    "select": sql("REVOKE SELECT ON sales.a FROM {role}"),
    "select on some columns": sql("REVOKE SELECT ON sales.a FROM {role}", "GRANT SELECT (id, n) ON sales.a TO {role}"),
    "select on the root": sql("REVOKE SELECT ON sales.p FROM {role}"),
    "select on a partition": sql("REVOKE SELECT ON sales.p_1 FROM {role}"),
    "rows": sql("ALTER TABLE sales.a ENABLE ROW LEVEL SECURITY"),
    "rows of a partition": sql("ALTER TABLE sales.p_1 ENABLE ROW LEVEL SECURITY"),
    **{f"select on {name}": sql(f"REVOKE SELECT ON pg_catalog.{name} FROM PUBLIC") for name in CATALOGS},
    "publication": sql("DROP PUBLICATION {publication}"),
    "unkeyed publication": sql("DROP PUBLICATION {publication}_unkeyed"),
    "table of the publication": sql("ALTER PUBLICATION {publication} DROP TABLE sales.a"),
    "root in the publication": sql("ALTER PUBLICATION {publication} SET (publish_via_partition_root = false)"),
    "key": sql("ALTER TABLE sales.a DROP CONSTRAINT a_pkey"),
    "identity": sql("ALTER TABLE sales.a REPLICA IDENTITY NOTHING"),
    "own: nothing": lambda world: None,
    "own: create": sql("REVOKE CREATE ON DATABASE {database} FROM {role}, {owner}"),
    "own: tables": sql("REVOKE {owner} FROM {role}"),
    "own: inheritance": sql("REVOKE {owner} FROM {role}", "ALTER ROLE {role} NOINHERIT", "GRANT {owner} TO {role}"),
    **{
        f"set {name}": sql("GRANT pg_monitor TO {role}", f"ALTER ROLE {{role}} SET {name} = '{value}'")
        for name, value in ROLE_SETTINGS.items()
    },
    "options": connection(options="-c default_transaction_read_only=on"),
    "application": connection(application_name="x" * 90),
    "encoding": connection(client_encoding="LATIN1"),
    **{
        f"{name} of {which}": topic(which, **{name: value})
        for which in ("state", "sales.a", "_bottledwater_events", "_bottledwater_dead_letters")
        for name, value in TOPIC_SETTINGS.items()
        # a row that is too large is the row's fault
        if (name, which) != ("max_message_bytes", "sales.a")
    },
    "topics": settings(create_topics=False),
    "brokers": settings(replication_factor=3),
    "property of topics": settings(topic_config={"no.such": "property"}),
    **{name: client(name, value) for name, value in CLIENT_SETTINGS.items()},
    "registry's mode": answers("^POST /subjects/[^/]+/versions", *READ_ONLY, mode="READONLY"),
    "registration": answers("^POST /subjects/[^/]+/versions", *READ_ONLY),
    "write in the registry": answers("^POST /subjects/[^/]+/versions", *DENIED),
    "lookup in the registry": answers("^POST /subjects/[^/]+$", *DENIED),
    "compatibility in the registry": answers("/compatibility", *DENIED),
    "ids in the registry": answers("^GET /schemas/ids", *DENIED),
    "level in the registry": answers(" /config", *DENIED),
    "mode in the registry": answers(" /mode", *DENIED),
    "login to the registry": answers("", 401, 40101, "Unauthorized"),
    "registry": answers("", 500, 50001, "Error in the backend data store"),
    "registry's path": answers("", 404, 404, "HTTP 404 Not Found"),
    "registry's address": settings(registry={"url": "http://127.0.0.1:1"}),
}
#: what only an attempt shows, when something is made for the first time
UNKNOWN = {"registration", "write in the registry"}
#: on a server where little is needed to use them up
SMALL = {"slots", "walsenders"}
SAMPLE = {
    ("usage of the types", "first"),
    ("4 sessions", "first"),
    ("select on a partition", "later"),
    ("select on pg_locks", "first"),
    ("compression.type", "first"),
    ("queue.buffering.max.kbytes", "first"),
    ("registry's mode", "first"),
    ("write in the registry", "first"),
}


@pytest.fixture
def make_world(
    database: str, kafka: KafkaBroker, registry: SchemaRegistry, request: pytest.FixtureRequest
) -> Iterator[Callable[[str], World]]:
    made = list[World]()
    with fronted(registry) as front:

        def make(name: str) -> World:
            if name in SMALL:
                server: PostgresServer = request.getfixturevalue("small_server")
                dsn = server.createdb(f"d{uuid.uuid4().hex[:8]}")
            else:
                dsn = database
            made.append(World(dsn, kafka, registry, front))
            return made[-1]

        yield make
        for world in made:
            world.clean()


def said(world: World) -> BottledWaterError | None:
    """What preflight does not let begin."""
    try:
        preflight.run(world.flow.pipeline)
    except BottledWaterError as error:
        return error
    return None


@pytest.mark.some(3)
@pytest.mark.parametrize(
    ("name", "when"),
    [
        pytest.param(name, when, marks=() if (name, when) in SAMPLE else pytest.mark.long)
        for name in CASES
        for when in ("first", "later")
    ],
)
def test_what_a_run_fails_with_preflight_has_said(make_world: Callable[[str], World], name: str, when: str) -> None:
    world = make_world(name)
    if name.startswith("own: "):
        world.publishes_itself()
    if when == "later":
        world.run()
    CASES[name](world)
    before, found = world.picture(), said(world)
    assert world.picture() == before
    if found is None and not (name in UNKNOWN and when == "first"):
        world.run()
        return
    with pytest.raises(BottledWaterError):
        world.run()
    assert world.picture() == before
