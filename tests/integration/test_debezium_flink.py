"""Flink's own format ``debezium-json`` reads what is published with Debezium's envelope: its changelog is the table."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from typing import Any

import pytest
from py4j.java_gateway import GatewayParameters, JavaGateway, launch_gateway
from py4j.protocol import Py4JJavaError

from airflow_bottledwater.local import artifacts
from tests.support import debezium
from tests.support.jars import retrieved
from tests.support.topics import Flow, MakeFlow

pytestmark = pytest.mark.long

_FLINK, _CONNECTOR = "2.2.1", "5.0.0-2.2"
_MODULES = ("clients", "connector-base", "json", "table-api-java-bridge", "table-planner-loader", "table-runtime")
#: what Flink opens in its own configuration for Java 17
_OPENED = ("java.lang", "java.util", "java.time", "java.net", "java.io", "java.nio", "java.util.concurrent")
#: the columns of ``orders`` as Flink declares them
_COLUMNS = (
    "id INT, note STRING, cash DECIMAL(10, 2), `at` TIMESTAMP_LTZ(6), `local` TIMESTAMP(6), `day` DATE, `time` TIME,"
    " u STRING, doc STRING, tags ARRAY<STRING>, `raw` BYTES, ok BOOLEAN, ratio DOUBLE, span STRING,"
    " origin STRING METADATA FROM 'value.source.table' VIRTUAL,"
    " committed TIMESTAMP_LTZ(3) METADATA FROM 'value.source.timestamp' VIRTUAL"
)
_SHOWN = (
    "id, note, CAST(cash AS STRING), CAST(`at` AS STRING), CAST(`local` AS STRING), CAST(`day` AS STRING),"
    " CAST(`time` AS STRING), u, doc, CAST(tags AS STRING), TO_BASE64(CAST(`raw` AS STRING)), ok, ratio, span, origin"
)
#: the same of PostgreSQL's table
_EXPECTED = (
    "SELECT id, note, cash::text, to_char(at AT TIME ZONE 'UTC', 'YYYY-MM-DD HH24:MI:SS.US'),"
    " to_char(local, 'YYYY-MM-DD HH24:MI:SS.US'), day::text, time::text, u::text, doc::text,"
    " '[' || array_to_string(tags, ', ', 'NULL') || ']', encode(raw, 'base64'), ok, ratio,"
    " CASE WHEN span IS NOT NULL THEN 'P1D' END, 'orders' FROM orders"
)


@pytest.fixture(scope="module")
def java() -> Iterator[Any]:
    """A JVM with Flink."""
    modules = [f"org.apache.flink:flink-{name}:{_FLINK}" for name in _MODULES]
    classes = retrieved("flink", f"org.apache.flink:flink-connector-kafka:{_CONNECTOR}", *modules)
    port = launch_gateway(
        classpath=f"{classes}/*",
        javaopts=[f"--add-opens=java.base/{name}=ALL-UNNAMED" for name in _OPENED],
        die_on_exit=True,
        java_path=str(artifacts.system_java()),
    )
    gateway = JavaGateway(gateway_parameters=GatewayParameters(port=port))
    yield gateway.jvm
    gateway.shutdown()


def _changelog(
    java: Any, flow: Flow, table: str, columns: str, shown: str = "*", **config: str
) -> Iterator[tuple[str, tuple[Any, ...]]]:
    """The changes that Flink reads of a topic, up to its end: their kinds, and the rows."""
    api = java.org.apache.flink.table.api
    environment = api.TableEnvironment.create(api.EnvironmentSettings.inStreamingMode())
    settings = {"table.local-time-zone": "UTC", "parallelism.default": "1", **config}
    for name, value in settings.items():
        environment.getConfig().set(name, value)
    options = {
        "connector": "kafka",
        "topic": flow.topic(table),
        "properties.bootstrap.servers": flow.kafka.bootstrap,
        "properties.isolation.level": "read_committed",
        "scan.startup.mode": "earliest-offset",
        "scan.bounded.mode": "latest-offset",
        "format": "debezium-json",
        "debezium-json.schema-include": str(flow.pipeline.envelope_schema).lower(),
        "debezium-json.timestamp-format.standard": "ISO-8601",
    }
    given = ", ".join(f"'{name}' = '{value}'" for name, value in options.items())
    environment.executeSql(f"CREATE TABLE {table} ({columns}) WITH ({given})")
    found = environment.executeSql(f"SELECT {shown} FROM {table}").collect()
    while found.hasNext():
        row = found.next()
        yield row.getKind().shortString(), tuple(row.getField(place) for place in range(row.getArity()))


def _published(make_flow: MakeFlow, *, schema: bool = False, again: bool = False) -> Flow:
    """The tables and their changes; with `again`, all rows of one are read again between them."""
    flow = make_flow(envelope="debezium", envelope_schema=schema, tables="orders,parts")
    flow.execute(*debezium.TABLES, *debezium.ROWS)
    flow.create()
    flow.snapshot()
    flow.execute(*debezium.CHANGES)
    if again:
        asked = flow.ask("orders", where="true")
    flow.stream()
    assert not again or flow.reported(asked).state == "finished"
    return flow


def _assert_equal(flow: Flow, changes: Iterator[tuple[str, tuple[Any, ...]]]) -> None:
    rows: Counter[tuple[Any, ...]] = Counter()
    kinds: Counter[str] = Counter()
    for kind, row in changes:
        kinds[kind] += 1
        rows[row] += 1 if kind in ("+I", "+U") else -1
        assert rows[row] >= 0, f"{row} is taken back, and was not there"
    assert set(kinds) == {"+I", "-U", "+U", "-D"}
    assert rows.total() and +rows == Counter(flow.execute(_EXPECTED))


@pytest.mark.parametrize("schema", [False, True], ids=["json", "schema"])
def test_the_changelog_is_the_table(java: Any, make_flow: MakeFlow, schema: bool) -> None:
    flow = _published(make_flow, schema=schema)
    _assert_equal(flow, _changelog(java, flow, "orders", _COLUMNS, _SHOWN))


def test_rows_that_were_read_again_need_a_key(java: Any, make_flow: MakeFlow) -> None:
    """To Flink, they would be rows once more."""
    flow = _published(make_flow, again=True)
    columns = f"{_COLUMNS}, PRIMARY KEY (id) NOT ENFORCED"
    _assert_equal(
        flow, _changelog(java, flow, "orders", columns, _SHOWN, **{"table.exec.source.cdc-events-duplicate": "true"})
    )


def test_updates_without_the_old_row_are_refused(java: Any, make_flow: MakeFlow) -> None:
    """As those of Debezium's own connector are."""
    flow = _published(make_flow)
    columns = "region STRING, id BIGINT, `large` STRING, n DECIMAL(38, 18), PRIMARY KEY (region, id) NOT ENFORCED"
    with pytest.raises(Py4JJavaError, match=r'The "before" field of UPDATE message is null.*REPLICA IDENTITY to FULL'):
        list(_changelog(java, flow, "parts", columns))
