"""The description of a pipeline, as objects and as a file."""

from __future__ import annotations

import json
import pickle
from pathlib import Path
from typing import Any

import jsonschema
import pytest

from airflow_bottledwater.errors import SettingError
from airflow_bottledwater.pipeline import file
from airflow_bottledwater.pipeline.description import Description, Kafka, Source, Spark, Types
from airflow_bottledwater.pipeline.settings import SETTINGS, Settings
from airflow_bottledwater.pipeline.table import Table

SHOP = Description(
    "shop",
    source=Source("shop_postgres", tables="orders, sales.*", dsn="host=db password=hunter2"),
    kafka=Kafka(
        "shop_kafka",
        registry="shop_registry",
        topic_prefix="shop",
        partitions="6",  # type: ignore[arg-type]
        properties={"bootstrap.servers": "k", "sasl.password": "hunter3"},
        registry_properties={"url": "http://me:hunter4@r"},
    ),
    types=Types(numeric="string"),
    spark=Spark("shop_spark", conf={"spark.executor.memory": "2g"}),
    on_error="log",
    outage_timeout=600,
)

YAML = """
name: shop
source: {conn_id: shop_postgres, tables: [orders, sales.*], dsn: host=db password=hunter2}
kafka:
  conn_id: shop_kafka
  registry: shop_registry
  topic_prefix: shop
  partitions: 6
  properties: {bootstrap.servers: k, sasl.password: hunter3}
  registry_properties: {url: "http://me:hunter4@r"}
types: {numeric: string}
spark: {conn_id: shop_spark, conf: {spark.executor.memory: 2g}}
on_error: log
outage_timeout: 600
"""


def written(folder: Path, text: str, name: str = "shop.yaml") -> Path:
    path = folder / name
    path.write_text(text)
    return path


def test_the_file_describes_what_the_objects_describe(tmp_path: Path) -> None:
    assert file.load(written(tmp_path, YAML), Description) == SHOP


def test_options_of_tables_are_objects_or_mappings(tmp_path: Path) -> None:
    text = "source:\n  table_options:\n    orders: {exclude: [a, b]}\n    s.*: {topic: t-1, partitions: 2}\n    x:\n"
    options = {"orders": Table(exclude="a, b"), "s.*": Table(topic="t-1", partitions=2), "x": Table()}  # type: ignore[arg-type]
    loaded = file.load(written(tmp_path, text), Description)
    assert loaded == Description(source=Source(table_options=options))
    given = {"orders": {"exclude": ["a", "b"]}, "s.*": {"topic": "t-1", "partitions": 2}, "x": {}}
    assert loaded.as_dict() == {"source": {"table_options": given}}
    pipeline = Settings.of(postgres="x", **loaded.settings())
    assert pipeline.chosen() == {"table_options": given}
    assert Settings.read(pipeline.write(tmp_path)) == pipeline == Settings.of(postgres="x", **pipeline.chosen())


def test_an_option_that_is_given_with_its_default_stays_given(tmp_path: Path) -> None:
    """Whichever way the description goes: it takes back what a less specific pattern gives."""
    text = "source: {table_options: {a.*: {exclude: [email], partitions: 6}, a.b: {exclude: [], partitions: 0}}}"
    loaded = file.load(written(tmp_path, text), Description)
    rules = {"a.*": Table(exclude=("email",), partitions=6), "a.b": Table(exclude=(), partitions=0)}
    described = Description(source=Source(table_options=rules))
    assert (
        loaded.as_dict()
        == described.as_dict()
        == Description.of(pickle.loads(pickle.dumps(loaded)).as_dict()).as_dict()
    )
    pipeline = Settings.of(postgres="x", **loaded.settings())
    for each in (pipeline, Settings.read(pipeline.write(tmp_path)), Settings.of(postgres="x", **pipeline.chosen())):
        options = Table.of_table(each.with_(partitions=3).table_options, "a", "b")
        assert (options.exclude, options.partitions) == ((), 0) and Table.of_table(each.table_options, "a", "c").exclude


def test_a_default_that_is_given_is_given(tmp_path: Path) -> None:
    """It wins over what is saved, whichever way the description goes."""
    text = "name: shop\nsaved: true\non_error: exit\nallow_unverified: false\nsource: {tables: []}\n"
    described = Description("shop", source=Source(tables=()), saved=True, on_error="exit", allow_unverified=False)
    for each in (file.load(written(tmp_path, text), Description), described, Description.of(described.as_dict())):
        assert each.settings() == {"slot": "shop", "tables": (), "allow_unverified": False, "on_error": "exit"}


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("source: {tables: [a, null]}", r"source\.tables' cannot be \['a', None\].*in YAML, quote"),
        ("source: {tables: [a, no]}", r"source\.tables' cannot be \['a', False\]"),
        ("source: {table_options: {a: {rename: {nm: no}}}}", r"a\.rename' cannot be {'nm': False}"),
        ("source: {table_options: {a: {rename: {nm: null}}}}", r"a\.rename' cannot be {'nm': None}"),
        ("topic_prefix: x", r"topic_prefix' does not exist \(did you mean 'kafka\.topic_prefix'\?\)"),
    ],
)
def test_what_yaml_makes_of_texts_and_a_key_of_a_section_are_refused(tmp_path: Path, text: str, said: str) -> None:
    with pytest.raises(SettingError, match=said):
        file.load(written(tmp_path, text), Description)


@pytest.mark.parametrize(
    ("text", "found"),
    [
        ("name: 0123", {"name": "0123"}),
        ("name: 2024", {"name": "2024"}),
        ("name: 2024_07", {"name": "2024_07"}),
        (
            "source: {table_options: {a: {rename: {nm: 12:30}}}}",
            {"source": {"table_options": {"a": {"rename": {"nm": "12:30"}}}}},
        ),
        (
            "kafka: {topic_config: {retention.ms: 86_400_000}, partitions: 0x10}\nmax_transaction_bytes: 100_000_000",
            {
                "kafka": {"topic_config": {"retention.ms": "86400000"}, "partitions": 16},
                "max_transaction_bytes": 100_000_000,
            },
        ),
        (
            "{source: , on_error: , kafka: {partitions: '6', share_topics: 'true', topic_config: {a: false}}}",
            {"kafka": {"partitions": 6, "share_topics": True, "topic_config": {"a": "False"}}},
        ),
        (
            "source: {tables: 'a, b', table_options: {a: {exclude: b, mask: {c: null}, partitions: '2'}}}",
            {
                "source": {
                    "tables": ["a", "b"],
                    "table_options": {"a": {"exclude": ["b"], "mask": {"c": "null"}, "partitions": 2}},
                }
            },
        ),
    ],
)
def test_the_schema_allows_each_form_that_the_file_may_have(tmp_path: Path, text: str, found: dict[str, Any]) -> None:
    loaded = written(tmp_path, text)
    assert file.load(loaded, Description).as_dict() == found
    jsonschema.validate(file.yaml.load(text, file._Loader), file.schema())


def test_a_name_that_yaml_reads_as_a_number_is_what_was_written(tmp_path: Path) -> None:
    text = "source: {tables: [0x1f, 2024_07], table_options: {2024_07: {on_error: log}}}"
    loaded = file.load(written(tmp_path, text), Description)
    assert loaded.as_dict()["source"] == {
        "tables": ["0x1f", "2024_07"],
        "table_options": {"2024_07": {"on_error": "log"}},
    }


def test_null_is_a_mask(tmp_path: Path) -> None:
    loaded = file.load(written(tmp_path, "source: {table_options: {a: {mask: {b: null, c: 'first:2'}}}}"), Description)
    assert loaded.source.table_options["a"].mask == {"b": "null", "c": "first:2"}
    assert Table(mask={"b": None}) == Table(mask={"b": "null"})  # type: ignore[dict-item]


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ("{a: {mask: {b: first}}}", r"table_options\.a\.mask' cannot be"),
        ("{a: {mask: {b: 'first:-1'}}}", r"table_options\.a\.mask' cannot be"),
        ("{a: {exclud: b}}", r"table_options\.a\.exclud' does not exist \(did you mean 'exclude'\?\)"),
        ("{a: {topic: 'a b'}}", r"table_options\.a\.topic' cannot be 'a b'"),
        ("{a: {topic: '{database}'}}", r"table_options\.a\.topic' cannot be"),
        ("{a: [b]}", r"table_options\.a' cannot be \['b'\]"),
        ("[a]", r"table_options' cannot be \['a'\]"),
    ],
)
def test_options_that_are_not_allowed_are_named(tmp_path: Path, options: str, said: str) -> None:
    with pytest.raises(SettingError, match=rf"shop\.yaml: setting 'source\.{said}"):
        file.load(written(tmp_path, f"source: {{table_options: {options}}}"), Description)


def test_it_has_the_settings_of_a_pipeline_and_only_what_was_given() -> None:
    assert SHOP.settings() == {
        "slot": "shop",
        "tables": ("orders", "sales.*"),
        "topic_prefix": "shop",
        "partitions": 6,
        "numeric": "string",
        "on_error": "log",
        "outage_timeout": 600.0,
    }
    pipeline = Settings.of(**SHOP.settings(), **SHOP.connections())
    assert (pipeline.slot, pipeline.partitions, pipeline.kafka["sasl.password"]) == ("shop", 6, "hunter3")


def test_every_setting_has_a_place() -> None:
    sections = [Description, *Description.parts().values()]
    placed = [name for section in sections for name in section.described()]
    renamed = {"name": "slot", "format": "format"}
    secret = {name for name, setting in SETTINGS.items() if setting.secret}
    assert {renamed.get(name, name) for name in placed} >= SETTINGS.keys() - secret


def test_as_values_it_is_what_was_given_without_secrets_and_can_be_made_again() -> None:
    values = SHOP.as_dict()
    assert "hunter" not in json.dumps(values) + repr(SHOP) + str(SHOP)
    assert values["source"] == {"conn_id": "shop_postgres", "tables": ["orders", "sales.*"]}
    assert Description.of(values).settings() == SHOP.settings()
    assert Description.of(SHOP.as_dict(secrets=True)) == SHOP
    assert pickle.loads(pickle.dumps(SHOP)) == SHOP


@pytest.mark.parametrize(
    ("values", "problem"),
    [
        ({"sorce": {}}, r"'sorce' does not exist \(did you mean 'source'\?\)"),
        ({"source": {"tabels": []}}, r"'source.tabels' does not exist \(did you mean 'tables'\?\).*allow_unkeyed"),
        ({"source": 5}, r"'source' cannot be 5. Allowed: the keys .*tables"),
        ({"kafka": {"partitions": 0}}, r"'kafka.partitions' cannot be 0. Allowed: 1 to 10000"),
        ({"kafka": {"format": "xml"}}, r"'kafka.format' cannot be 'xml'. Allowed: avro or json"),
        ({"kafka": {"form": "avro"}}, r"'kafka.form' does not exist"),
        (
            {"spark": {"deploy_mode": "pod"}},
            r"'spark.deploy_mode' cannot be 'pod'. Allowed: client, cluster or nothing",
        ),
        ({"name": "Shop"}, r"'name' cannot be 'Shop'. Allowed: 1 to 63"),
        ({"postgres": "host=db"}, r"'postgres' does not exist"),
        ({1: 2}, r"'1' does not exist"),
    ],
)
def test_what_is_wrong_is_named_by_file_and_path_with_what_is_allowed(
    tmp_path: Path, values: dict[Any, Any], problem: str
) -> None:
    with pytest.raises(SettingError, match=problem):
        Description.of(values)
    path = written(tmp_path, json.dumps(values) if 1 not in values else "1: 2")
    with pytest.raises(SettingError, match=f"^{path}: setting {problem}"):
        file.load(path, Description)


def test_an_object_is_checked_when_it_is_made() -> None:
    with pytest.raises(SettingError, match=r"'source.new_tables' cannot be 'no'"):
        Source(new_tables="no")  # type: ignore[arg-type]
    with pytest.raises(SettingError, match=r"'source' cannot be 'shop_postgres'. Allowed: a Source"):
        Description("shop", source="shop_postgres")  # type: ignore[arg-type]


def test_an_error_in_a_secret_does_not_print_it() -> None:
    with pytest.raises(SettingError) as caught:
        Kafka(properties="sasl.password=hunter5")  # type: ignore[arg-type]
    assert "hunter" not in str(caught.value) + repr(caught.value)


def test_a_template_is_checked_when_it_is_rendered() -> None:
    made = Description("{{ params.slot }}", kafka=Kafka(partitions="{{ params.partitions }}"))  # type: ignore[arg-type]
    assert made.as_dict() == {"name": "{{ params.slot }}", "kafka": {"partitions": "{{ params.partitions }}"}}
    with pytest.raises(SettingError, match=r"'kafka.partitions' cannot be 0"):
        Description.of({"name": "shop", "kafka": {"partitions": 0}})


@pytest.mark.parametrize("text", ["- a\n", "a: [\n", "", "\x00"])
def test_what_is_no_description_is_refused(tmp_path: Path, text: str) -> None:
    with pytest.raises(SettingError, match=r"shop.yaml' (cannot be read|is no mapping)"):
        file.load(written(tmp_path, text), Description)


def test_a_missing_file_is_refused(tmp_path: Path) -> None:
    with pytest.raises(SettingError, match=r"none.yaml' cannot be read \(No such file or directory\)"):
        file.load(tmp_path / "none.yaml", Description)


def test_a_folder_has_a_pipeline_a_file(tmp_path: Path) -> None:
    written(tmp_path, "name: b\non_error: log", "b.yml")
    written(tmp_path, "name: c", "a.yaml")
    written(tmp_path, "no yaml", "readme.md")
    found, errors = file.load_folder(tmp_path, Description)
    assert ([(each.name, each.on_error) for each in found], errors) == ([("c", "exit"), ("b", "log")], [])


def test_a_file_that_is_wrong_keeps_no_other_one_from_being_loaded(tmp_path: Path) -> None:
    for name, text in {"a": "name: b", "b": "kafka: {partitions: 0}", "c": "name: b", "d": "{", "e": "name: e"}.items():
        written(tmp_path, text, f"{name}.yaml")
    found, errors = file.load_folder(tmp_path, Description)
    assert [each.name for each in found] == ["b", "e"]
    for error, said in zip(
        errors,
        ["b.yaml: setting 'kafka.partitions' cannot be 0", "c.yaml: setting 'name' is used twice", "d.yaml' cannot be"],
        strict=True,
    ):
        assert said in str(error)
