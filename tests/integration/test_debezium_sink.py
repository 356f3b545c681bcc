"""Debezium's JDBC sink, in a worker of Kafka Connect, makes tables that equal the source's of what is published with
Debezium's envelope."""

from __future__ import annotations

import contextlib
from pathlib import Path
from typing import Any

import pytest
from psycopg.conninfo import conninfo_to_dict

from airflow_bottledwater.local.artifacts import KAFKA_VERSION
from airflow_bottledwater.local.registry import SchemaRegistry
from tests.support import debezium
from tests.support.connect import ConnectWorker
from tests.support.jars import retrieved
from tests.support.topics import Flow, MakeFlow
from tests.support.waiting import until

pytestmark = pytest.mark.long

#: the newest of which all that it needs can be had
_SINK = "3.5.0.Final"
_MODULES = (
    f"org.apache.kafka:connect-runtime:{KAFKA_VERSION}",
    f"io.debezium:debezium-connector-jdbc:{_SINK}",
    "org.slf4j:slf4j-simple:2.0.17",
    # Confluent's converter is in no repository of Maven's own; this one reads Confluent's wire format, too
    "io.apicurio:apicurio-registry-utils-converter:2.6.13.Final",
)
_TABLES = ("orders", "parts")


def _converters(registry: SchemaRegistry) -> dict[str, str]:
    """The properties by which a connector reads Avro of a registry with Confluent's wire format."""
    properties = {
        "": "io.apicurio.registry.utils.converter.AvroConverter",
        ".apicurio.registry.url": registry.url.partition("/ccompat")[0] + "/registry/v2",
        ".apicurio.registry.as-confluent": "true",
        ".apicurio.registry.use-id": "contentId",
        ".apicurio.registry.headers.enabled": "false",
    }
    return {f"{of}.converter{name}": value for of in ("key", "value") for name, value in properties.items()}


def _sink(flow: Flow, **options: str) -> dict[str, str]:
    """The configuration of the sink, with properties that the test adds."""
    target = conninfo_to_dict(flow.dsn)
    return {
        "connector.class": "io.debezium.connector.jdbc.JdbcSinkConnector",
        "tasks.max": "1",
        "topics": ",".join(flow.topic(table) for table in _TABLES),
        # a text that has no type of its own in the schema takes that of the column
        "connection.url": f"jdbc:postgresql://{target['host']}:{target['port']}/{target['dbname']}?stringtype=unspecified",
        "connection.username": str(target["user"]),
        "connection.password": "",
        "insert.mode": "upsert",
        "delete.enabled": "true",
        "primary.key.mode": "record_key",
        **(_converters(flow.registry) if flow.registry else {}),
        **{name.replace("_", "."): value for name, value in options.items()},
    }


def _rows(flow: Flow, schema: str, table: str) -> list[Any]:
    """The rows of a table, its values in the source's types."""
    columns = flow.execute(
        "SELECT string_agg(format('%I::text::%s', attname, format_type(atttypid, atttypmod)), ', ' ORDER BY attnum)"
        f" FROM pg_attribute WHERE attrelid = '{table}'::regclass AND attnum > 0"
    )
    if not flow.execute(f"SELECT to_regclass('{schema}.{table}')")[0][0]:
        return []
    return flow.execute(f"SELECT {columns[0][0]} FROM {schema}.{table} ORDER BY 1, 2")


@pytest.mark.parametrize("form", ["json", "avro"])
def test_the_sink_makes_equal_tables(
    make_flow: MakeFlow, request: pytest.FixtureRequest, tmp_path: Path, form: str
) -> None:
    registry = request.getfixturevalue("registry") if form == "avro" else None
    flow = make_flow(registry, envelope="debezium", envelope_schema=form == "json", tables=_TABLES)
    flow.execute(*debezium.TABLES, *debezium.ROWS, "CREATE SCHEMA made", "CREATE SCHEMA given")
    flow.execute(*(f"CREATE TABLE given.{table} (LIKE {table} INCLUDING ALL)" for table in _TABLES))
    flow.create()
    flow.snapshot()
    connectors = {
        # tables that the sink makes itself, and tables that are there
        "made": _sink(flow, collection_name_format="made.${source.table}", schema_evolution="basic"),
        "given": _sink(flow, collection_name_format="given.${source.table}"),
    }
    with ConnectWorker(tmp_path, retrieved("connect", *_MODULES), flow.kafka.bootstrap, connectors) as worker:
        targets = [(schema, table) for schema in ("made", "given") for table in _TABLES]

        def equal() -> bool:
            worker.check()
            return all(_rows(flow, *each) == _rows(flow, "public", each[1]) for each in targets)

        def wait() -> None:
            with contextlib.suppress(AssertionError):  # what differs says more
                until(equal, "the sink has everything")
            worker.check()
            for each in targets:
                assert _rows(flow, *each) == _rows(flow, "public", each[1]), each

        wait()
        flow.execute(*debezium.CHANGES)
        asked = flow.ask(*_TABLES, where="true")
        flow.stream()
        assert flow.reported(asked).state == "finished"
        wait()
