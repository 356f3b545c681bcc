"""A connector of Debezium becomes a pipeline that does the same, and what differs is said."""

from __future__ import annotations

import fnmatch
import itertools
import json
import re
from pathlib import Path
from typing import Any

import hypothesis.strategies as st
import pytest
import yaml
from click.testing import CliRunner
from hypothesis import given

from airflow_bottledwater import cli
from airflow_bottledwater.errors import SettingError
from airflow_bottledwater.pipeline import debezium
from airflow_bottledwater.pipeline.debezium import imported
from airflow_bottledwater.pipeline.description import Description
from airflow_bottledwater.pipeline.expressions import as_patterns
from airflow_bottledwater.pipeline.patterns import is_meant
from airflow_bottledwater.pipeline.settings import Settings
from airflow_bottledwater.pipeline.table import Table

CLASS = {"connector.class": "io.debezium.connector.postgresql.PostgresConnector"}
#: as in Debezium's tutorial, with what people add
SHOP = CLASS | {
    "tasks.max": "1",
    "database.hostname": "db.example.com",
    "database.port": "5432",
    "database.user": "cdc user",
    "database.password": "s3cret",
    "database.dbname": "shop",
    "topic.prefix": "shop",
    "slot.name": "shop_cdc",
    "plugin.name": "pgoutput",
    "table.include.list": r"public.orders,inventory\..*,public\.(a|b)",
    "column.exclude.list": "public.orders.card,inventory\\..*\\.note",
    "column.mask.with.4.chars": "public.orders.email",
    "column.truncate.to.10.chars": "public.a.text",
    "decimal.handling.mode": "string",
    "snapshot.mode": "no_data",
    "value.converter": "io.confluent.connect.avro.AvroConverter",
    "value.converter.schema.registry.url": "http://registry.example.com",
    "topic.creation.default.partitions": 6,
    "topic.creation.default.replication.factor": "-1",
    "topic.creation.default.cleanup.policy": "compact",
    "heartbeat.interval.ms": "1000",
}


def said(found: debezium.Imported) -> dict[str, str]:
    return {name: what for name, what in found.differences if name}


def test_a_connector_becomes_a_pipeline() -> None:
    found = imported({"name": "shop", "config": SHOP})
    made = Description.of(found.description)
    assert (made.name, made.source.dsn) == (
        "shop_cdc",
        "host=db.example.com port=5432 dbname=shop user='cdc user'",
    )
    assert list(made.source.tables) == ["public.orders", "inventory.*", "public.a", "public.b"]
    assert found.description["source"]["table_options"] == {
        "public.orders": {"exclude": ["card"], "mask": {"email": "constant:****"}},
        "inventory.*": {"exclude": ["note"]},
        "public.a": {"mask": {"text": "first:10"}},
        "*.*": {"topic": "{schema}.{table}"},
    }
    assert (made.kafka.format, made.kafka.topic_prefix, made.kafka.partitions) == ("avro", "shop.events", 6)
    assert made.kafka.topic_config == {"cleanup.policy": "compact"} and made.kafka.replication_factor == 3
    assert made.types.numeric == "string" and made.source.skip_snapshot
    assert made.kafka.envelope == "debezium" and not made.kafka.envelope_schema
    # the rest makes no difference
    assert set(said(found)) == {"slot.name", "database.password", "topic.prefix"}


@pytest.mark.parametrize(
    ("converter", "format"),
    [
        ("json.JsonSchemaConverter", "json-schema"),
        ("protobuf.ProtobufConverter", "protobuf"),
        ("avro.AvroConverter", "avro"),
    ],
)
@pytest.mark.parametrize("flat", [True, False])
def test_a_converter_with_a_registry_becomes_a_format_with_one(converter: str, format: str, flat: bool) -> None:
    unwrap = {"transforms": "u", "transforms.u.type": "io.debezium.transforms.ExtractNewRecordState"} if flat else {}
    config = {**SHOP, "value.converter": f"io.confluent.connect.{converter}", **unwrap}
    found = imported({"name": "shop", "config": config})
    made = Description.of(found.description)
    # an envelope is there in some formats only
    put = format if flat else "avro"
    assert made.settings().get("format", "avro") == put
    assert put == format or f"With {format}" in said(found)["value.converter"]
    assert made.kafka.registry == "shop_cdc_registry"
    Settings.of(postgres="x", **made.settings())


_ROUTED = {
    "topic.prefix": "shop",
    "transforms": "route",
    "transforms.route.type": "io.debezium.transforms.partitions.PartitionRouting",
    "transforms.route.partition.payload.fields": "change.customer,change.region",
    "transforms.route.partition.topic.num": "12",
    "transforms.route.predicate": "some",
    "predicates": "some",
    "predicates.some.type": "org.apache.kafka.connect.transforms.predicates.TopicNameMatches",
    "predicates.some.pattern": r"shop\.public\.(orders|sales.*)",
}


def test_the_columns_that_choose_partitions_are_taken_over() -> None:
    found = imported(CLASS | _ROUTED)
    options = Description.of(found.description).source.table_options
    for table in ("public.orders", "public.sales*"):
        assert (options[table].partition_by, options[table].partitions) == (("customer", "region"), 12)
    assert "another one" in said(found)["transforms.route"] and "transforms" not in said(found)


@pytest.mark.parametrize(
    "given",
    [
        {"predicates.some.pattern": "shop.*"},
        {"predicates.some.pattern": "other[.]public[.]orders"},
        {"predicates.some.type": "io.example.Another"},
        {"transforms.route.predicate": "none"},
        {"transforms.route.negate": "true"},
        {"transforms.route.partition.payload.fields": "change.customer,source.db"},
        {"transforms.route.partition.payload.fields": ""},
    ],
)
def test_partitions_that_cannot_be_taken_over_are_said(given: dict[str, str]) -> None:
    found = imported(CLASS | _ROUTED | given)
    assert "partition_by" not in str(found.description) and "is not known" in said(found)["transforms.route"]


_NAMELESS = "public.NAME_WHAT_IS_MEANT"


@pytest.mark.parametrize(
    ("given", "tables"),
    [
        ({"table.include.list": r"public\.orders_\d+"}, [_NAMELESS]),
        ({"table.include.list": "orders"}, [_NAMELESS]),
        ({"schema.include.list": "inv[0-9]"}, [_NAMELESS]),
        ({"table.include.list": r"a\.x_\d+", "schema.include.list": "a"}, [_NAMELESS]),
        ({"table.include.list": r"a\.x,a\.y_\d+"}, ["a.x"]),
        ({"table.exclude.list": r"a\.x,a\.y_\d+"}, [_NAMELESS, "*.*", "!a.x"]),
        ({"table.exclude.list": ".*_secret"}, [_NAMELESS, "*.*"]),
        ({"column.mask.with.4.chars": r"a\.x\.card_\d"}, [_NAMELESS, "*.*"]),
        ({"column.exclude.list": ".*card"}, [_NAMELESS, "*.*"]),
    ],
)
def test_no_more_is_published_than_the_connector_does(given: dict[str, str], tables: list[str]) -> None:
    """Where it is not known what that is, preflight refuses the file: no table has the name that is in it."""
    found = imported(CLASS | given)
    source = found.description["source"]
    assert source["tables"] == tables and "schemas" not in source
    assert (_NAMELESS in tables) == any("preflight refuses the file" in what for _, what in found.differences)
    assert set(given) & set(said(found))


def test_upper_case_letters_are_said() -> None:
    """The connector does not distinguish them, so that the pattern may leave nothing out."""
    found = imported(CLASS | {"table.exclude.list": "public.Secret_Log,public.other"})
    assert found.description["source"]["tables"] == ["*.*", "!public.Secret_Log", "!public.other"]
    assert "'public.Secret_Log'" in said(found)["table.exclude.list"]


@pytest.mark.parametrize(
    ("url", "written"),
    [
        ("http://sr:8081", "http://sr:8081"),
        ("http://u:s3cret@sr:8081,https://u:s3cret@sr2", "http://sr:8081,https://sr2"),
        ("http://u:s3cret/2@sr:8081", None),
    ],
)
def test_a_registrys_password_is_not_written(url: str, written: str | None) -> None:
    found = imported(SHOP | {"value.converter.schema.registry.url": url})
    assert found.description["kafka"].get("registry_properties", {}).get("url") == written
    assert "s3cret" not in found.yaml()
    assert ("value.converter.schema.registry.url" in said(found)) == (url != written)


def test_partitions_have_the_topics_that_the_connector_gives_them() -> None:
    assert imported(CLASS).description["source"]["partitioned_tables"] == "leaves"
    by_root = imported(CLASS | {"publish.via.partition.root": True})
    assert by_root.description["source"]["partitioned_tables"] == "root" and Description.of(by_root.description)


@pytest.mark.parametrize(("given", "name"), [({}, "dbz_publication"), ({"publication.name": "p"}, "p")])
def test_a_publication_that_is_not_made_is_the_connectors(given: dict[str, str], name: str) -> None:
    source = imported(CLASS | given | {"publication.autocreate.mode": "disabled"}).description["source"]
    assert (source["create_publication"], source["publication"]) == (False, name)
    assert "publication" not in imported(CLASS | given).description["source"]


def test_nothing_secret_is_written() -> None:
    secrets = {
        "database.password": "s3cret",
        "database.sslpassword": "s3cret",
        "column.mask.hash.SHA-256.with.salt.s3cret": "a.b.c",
    }
    secrets["value.converter.schema.registry.basic.auth.user.info"] = "u:s3cret"
    assert "s3cret" not in imported(SHOP | secrets).yaml()


def test_records_without_envelope_keep_their_topics() -> None:
    flat = {"transforms": "flat", "transforms.flat.type": "io.debezium.transforms.ExtractNewRecordState"}
    found = imported(SHOP | flat)
    assert found.description["kafka"]["topic_prefix"] == "shop"
    # which is right for one way of the two only
    assert "Only take-over may go on with them" in said(found)["topic.prefix"]
    assert any("for a sink of it, set kafka.envelope to debezium" in what for _, what in found.differences)
    assert "envelope" not in found.description["kafka"]
    json = {name: value for name, value in SHOP.items() if not name.startswith("value.")}
    assert "schema in each record" in said(imported(json | flat))["value.converter.schemas.enable"]
    base64 = {"binary.handling.mode": "base64"}
    assert "binary.handling.mode" not in said(imported(json | base64))
    assert "base64 in JSON" in said(imported(SHOP | base64))["binary.handling.mode"]


@pytest.mark.parametrize(
    ("name", "value", "words"),
    [
        ("table.include.list", "public.or[a-z]+", "add the names"),
        ("message.key.columns", "public.orders:id", "primary key"),
        ("column.mask.hash.SHA-256.with.salt.x", "public.orders.card", "published as they are"),
        ("snapshot.mode", "when_needed", "live snapshot"),
        ("plugin.name", "decoderbufs", "pgoutput"),
        ("transforms", "route", "no transformations"),
        ("column.exclude.list", "card", "schema.table.column"),
        ("something.new", "1", "not known"),
        ("value.converter", "org.apache.kafka.connect.converters.ByteArrayConverter", "no equal"),
        ("value.converter", "", "Kafka Connect's worker"),
        ("key.converter", "org.apache.kafka.connect.storage.StringConverter", "format of the values"),
        ("key.converter.schemas.enable", "false", "format of the values"),
        ("topic.creation.default.partitions", "${env:P}", "no number"),
    ],
)
def test_what_differs_is_said(name: str, value: str, words: str) -> None:
    found = imported(SHOP | {name: value})
    assert words in said(found)[re.sub(r"salt\..*", "salt", name)]
    Description.of(found.description)


def test_an_outbox_and_logical_messages_are_said() -> None:
    config = {"transforms": "o", "transforms.o.type": "io.debezium.transforms.outbox.EventRouter"}
    found = imported(SHOP | config)
    assert "option outbox" in said(found)["transforms"] and "no transformations" not in said(found)["transforms"]
    assert any("shop.message" in what for name, what in found.differences if not name)


def test_json_and_all_tables_are_what_is_left_without_more() -> None:
    found = imported(CLASS)
    assert found.description["source"]["tables"] == ["*.*"] and found.description["kafka"]["format"] == "json"
    assert found.description["kafka"]["envelope_schema"] is True
    bare = imported(CLASS | {"value.converter.schemas.enable": False})
    assert bare.description["kafka"]["envelope"] == "debezium" and "envelope_schema" not in bare.description["kafka"]
    assert imported(CLASS | {"schema.exclude.list": "a.*"}).description["source"]["tables"] == ["*.*", "!a*.*"]
    assert imported(CLASS | {"schema.include.list": "a,b"}).description["source"]["schemas"] == ["a", "b"]


@pytest.mark.parametrize(("given", "topic"), [({}, "transaction"), ({"topic.transaction": "ends"}, "ends")])
def test_the_topic_of_transactions_is_taken_over(given: dict[str, Any], topic: str) -> None:
    found = imported(SHOP | given | {"provide.transaction.metadata": "true"})
    assert found.description["kafka"]["transaction_topic"] == topic
    assert "form of its own" in said(found)["provide.transaction.metadata"]
    assert "transaction_topic" not in imported(SHOP | given).description["kafka"]


@pytest.mark.parametrize("raw", [{}, [], {"connector.class": "io.debezium.connector.mysql.MySqlConnector"}])
def test_what_is_no_connector_of_postgresql_is_refused(raw: Any) -> None:
    with pytest.raises(SettingError, match=r"connector\.class"):
        imported(raw)


PARTS = st.sampled_from(["a", "b", "ab", "sales", "_x", r"\.", ".", ".*", ".+", "[^.]*", "(a|b)", "(sales|a.*)"])
NAMES = st.text("abs_x", min_size=1, max_size=5)


@given(st.lists(PARTS, min_size=1, max_size=5), NAMES, NAMES)
def test_a_pattern_means_what_the_expression_does(parts: list[str], schema: str, table: str) -> None:
    """Where the expression has its dot: elsewhere, and for a lone dot, a pattern may mean less."""
    expression = "".join(["(?:", *parts[:2], r")\.(?:", *parts[2:], ")"]).replace("(?:)", "(?:.*)")
    patterns = as_patterns("".join(parts[:2]) + r"\." + ("".join(parts[2:]) or ".*"))
    assert patterns is not None
    if any("." in part and part not in (".*", "(sales|a.*)") for part in parts):
        return  # several dots
    expected = re.fullmatch(expression, f"{schema}.{table}") is not None
    assert any(is_meant(pattern, schema, table) for pattern in patterns) == expected


_PART = st.sampled_from(["a", "b", "a.*", ".*b", ".*"])
_LISTS = st.lists(st.tuples(_PART, _PART, st.sampled_from(["x", "y", "x.*", ".*"])), max_size=4)


@given(_LISTS, _LISTS, _LISTS)
def test_no_column_is_shown_that_the_connector_hides(left_out: Any, masked: Any, cut: Any) -> None:
    """Unless it is said that two expressions may describe one table."""
    given = {
        name: ",".join(r"\.".join(parts) for parts in lists)
        for name, lists in (
            ("column.exclude.list", left_out),
            ("column.mask.with.4.chars", masked),
            ("column.truncate.to.3.chars", cut),
        )
    }
    found = imported(CLASS | {name: value for name, value in given.items() if value})
    rules = Description.of(found.description).source.table_options
    for schema, table, column in itertools.product(["a", "b", "ab"], ["a", "b", "ab"], ["x", "y", "xy"]):
        of = Table.of_table(rules, schema, table)
        hides = any(
            re.fullmatch(r"\.".join(parts), f"{schema}.{table}.{column}") for parts in [*left_out, *masked, *cut]
        )
        hidden = any(fnmatch.fnmatchcase(column, each) for each in [*of.exclude, *of.mask])
        assert hidden == hides or "column.*" in said(found), (schema, table, column)


@pytest.mark.parametrize("expression", [r"\w+", "a{2}", "ab?", "[ab]c", "a+", "(a(b|c))*", r"a\d"])
def test_an_expression_that_no_pattern_equals_is_none(expression: str) -> None:
    assert as_patterns(expression) is None


def test_the_command_writes_a_file_that_can_be_loaded(tmp_path: Path) -> None:
    source, target = tmp_path / "connector.json", tmp_path / "shop.yaml"
    source.write_text(json.dumps({"name": "shop", "config": SHOP}))
    shown = CliRunner().invoke(cli.cli, ["import-debezium", str(source)])
    assert shown.exit_code == 0 and shown.output.startswith("# What differs from the connector:")
    written = CliRunner().invoke(cli.cli, ["import-debezium", str(source), "-o", str(target)])
    assert written.exit_code == 0 and target.read_text() == shown.output
    assert Description.of(yaml.safe_load(target.read_text())).name == "shop_cdc"
    for unwritable in (tmp_path / "no" / "shop.yaml", source / "shop.yaml"):
        with pytest.raises(SettingError, match=r"shop\.yaml' cannot be written .*Allowed: a file in a folder that is"):
            CliRunner().invoke(cli.cli, ["import-debezium", str(source), "-o", str(unwritable)], catch_exceptions=False)
    source.write_text("{")
    with pytest.raises(SettingError, match=r"connector\.json"):
        CliRunner().invoke(cli.cli, ["import-debezium", str(source)], catch_exceptions=False)
