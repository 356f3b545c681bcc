"""The description of a pipeline."""

from __future__ import annotations

import json
import pickle
import re
import stat
from dataclasses import FrozenInstanceError
from pathlib import Path
from typing import Annotated, Any, Literal, get_args

import jsonschema
import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st

from airflow_bottledwater.cli.options import merge
from airflow_bottledwater.errors import SettingError
from airflow_bottledwater.model import forms
from airflow_bottledwater.model.forms import DEFAULT_TYPE_OPTIONS, TypeOptions
from airflow_bottledwater.pipeline import file
from airflow_bottledwater.pipeline.description import Description
from airflow_bottledwater.pipeline.rules import about, said
from airflow_bottledwater.pipeline.settings import SETTINGS, Settings

ROOT = Path(__file__).parents[2]

DSN = "host=db dbname=shop user=cdc password=hunter2"
SECRETS = {
    "postgres": DSN,
    "kafka": {"bootstrap.servers": "k:9092", "sasl.password": "hunter3"},
    "registry": {"url": "http://r", "basic.auth.user.info": "me:hunter4"},
}

INVALID: list[tuple[str, Any]] = [
    ("slot", ""),
    ("slot", "Orders"),
    ("slot", "a-b"),
    ("slot", "a" * 64),
    ("slot", "a\n"),
    ("slot", 5),
    ("slot", ["a"]),
    ("publication", "p" * 55),
    ("publication", "ä" * 28),
    ("publication", 5),
    ("topic_prefix", "a b"),
    ("topic_prefix", "a/b"),
    ("topic_prefix", "a\n"),
    ("topic_prefix", "a" * 181),
    ("topic_prefix", 5),
    ("format", "xml"),
    ("format", "AVRO"),
    ("format", ["avro"]),
    ("on_error", "ignore"),
    ("on_error", True),
    ("on_truncate", "delete"),
    ("allow_unkeyed", "perhaps"),
    ("allow_unkeyed", "yes"),
    ("adopt_slot", "on"),
    ("allow_unkeyed", 2),
    ("skip_snapshot", "ja"),
    ("create_publication", 1.0),
    ("create_topics", ""),
    ("adopt_slot", []),
    ("share_topics", "2"),
    ("partitions", 0),
    ("partitions", 10_001),
    ("partitions", "many"),
    ("partitions", True),
    ("partitions", 1.5),
    ("partitions", "1.5"),
    ("partitions", float("inf")),
    ("partitions", float("nan")),
    ("partitions", [1]),
    ("replication_factor", 0),
    ("replication_factor", 33),
    ("lanes", 0),
    ("lanes", 257),
    ("lanes", 1.5),
    ("unkeyed_retention_ms", "long"),
    ("unkeyed_retention_ms", -2),
    ("unkeyed_retention_ms", 1.5),
    ("range_bytes", 1),
    ("range_bytes", 1 << 35),
    ("batch_bytes", 0),
    ("buffer_bytes", -1),
    ("max_transaction_bytes", "16MB"),
    ("max_delay", -0.1),
    ("max_delay", 11),
    ("keepalive_interval", 0),
    ("keepalive_interval", "soon"),
    ("heartbeat_interval", -1),
    ("outage_timeout", float("nan")),
    ("outage_timeout", float("inf")),
    ("create_slot_timeout", 0),
    ("lock_queue_limit", 10**9),
    ("transaction_timeout", 901),
    ("transaction_timeout", 0.5),
    ("outage_timeout", True),
    ("tables", 5),
    ("tables", {"orders": 1}),
    ("schemas", 5),
    ("topic_config", "a=b"),
    ("topic_config", 5),
    ("kafka", 5),
    ("kafka", {}),
    ("kafka", {"x": "y"}),
    ("registry", {}),
    ("registry", "http://r"),
    ("postgres", ""),
    ("postgres", "  "),
    ("postgres", 5),
]


@pytest.mark.parametrize(("name", "value"), INVALID)
def test_a_value_that_is_not_allowed_names_the_setting_the_value_and_what_is(name: str, value: Any) -> None:
    with pytest.raises(SettingError) as caught:
        Settings.of(**{"postgres": DSN, name: value})
    assert caught.value.setting == name
    assert caught.value.allowed
    if name not in SECRETS:
        assert caught.value.value == value or value != value
        assert repr(name) in str(caught.value) and repr(value) in str(caught.value)


@pytest.mark.parametrize(("name", "value"), INVALID)
def test_the_constructor_refuses_the_same_values(name: str, value: Any) -> None:
    with pytest.raises(SettingError) as caught:
        Settings(**{"postgres": DSN, name: value})
    assert caught.value.setting == name


def test_the_constructor_and_a_changed_copy_take_the_same_forms_of_values() -> None:
    loose = {"tables": "a,b", "lanes": "3", "allow_unkeyed": "true"}
    assert Settings(postgres=DSN, **loose) == Settings.of(postgres=DSN, **loose)
    assert Settings(postgres=DSN).with_(**loose) == Settings.of(postgres=DSN, **loose)


@given(
    st.sampled_from(sorted(SETTINGS)),
    st.none()
    | st.text()
    | st.integers()
    | st.floats()
    | st.booleans()
    | st.lists(st.text())
    | st.dictionaries(st.text(), st.text()),
)
def test_any_value_is_taken_or_is_a_setting_error(name: str, value: Any) -> None:
    try:
        Settings.of(**{"postgres": DSN, name: value})
    except SettingError:
        pass


def test_an_unknown_setting_is_refused_with_the_known_ones() -> None:
    with pytest.raises(SettingError, match=r"'tabels'.*topic_prefix"):
        Settings.of(postgres=DSN, tabels="x")


def test_a_misspelt_name_is_recognised_and_its_value_not_shown() -> None:
    with pytest.raises(SettingError) as caught:
        Settings.of(postgers=DSN)
    assert "'postgers' does not exist (did you mean 'postgres'?)" in str(caught.value)
    assert "hunter" not in str(caught.value) + repr(caught.value)


def test_without_a_database_there_is_no_pipeline() -> None:
    with pytest.raises(SettingError, match="postgres"):
        Settings.of()
    with pytest.raises(SettingError, match="postgres"):
        Settings.of(postgres=None)


def test_json_needs_no_registry() -> None:
    assert Settings.of(postgres=DSN, registry={}, format="json").registry == {}


@pytest.mark.parametrize(
    ("word", "value"),
    [("true", True), ("True", True), ("1", True), ("FALSE", False), ("false", False), ("0", False)],
)
def test_a_switch_may_be_a_word(word: str, value: bool) -> None:
    assert Settings.of(postgres=DSN, allow_unkeyed=word).allow_unkeyed is value


def test_loose_values_of_a_form_become_those_of_the_settings() -> None:
    made = Settings.of(
        postgres=DSN,
        tables="a, b ,,s.c",
        schemas=["x"],
        allow_unkeyed="True",
        skip_snapshot="0",
        partitions="3",
        lanes=4.0,
        outage_timeout="10",
        on_error=None,
        topic_config={"retention.ms": 5},
        kafka={"bootstrap.servers": "k", "sasl.password": None},
    )
    assert made.tables == ("a", "b", "s.c")
    assert made.schemas == ("x",)
    assert (made.allow_unkeyed, made.skip_snapshot) == (True, False)
    assert (made.partitions, made.lanes, made.outage_timeout) == (3, 4, 10.0)
    assert isinstance(made.lanes, int)
    assert made.on_error == "exit"
    assert made.topic_config == {"retention.ms": "5"}
    # null in a connection's extra means not set
    assert made.kafka == {"bootstrap.servers": "k"}


def test_a_written_pipeline_is_read_back_and_only_its_user_can(tmp_path: Path) -> None:
    made = Settings.of(**SECRETS, tables="a,b", topic_config={"x": "y"}, partitions=3)
    path = made.write(tmp_path / "new")
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert stat.S_IMODE(path.parent.stat().st_mode) == 0o700
    assert Settings.read(path) == made


def test_neither_repr_nor_what_is_chosen_holds_a_secret() -> None:
    made = Settings.of(**SECRETS)
    for text in (repr(made), str(made), repr(made.chosen())):
        assert "hunter" not in text


def test_a_pipeline_is_a_value() -> None:
    made = Settings.of(**SECRETS, tables="a,b")
    assert pickle.loads(pickle.dumps(made)) == made
    with pytest.raises(FrozenInstanceError):
        made.slot = "other"  # type: ignore[misc]


@pytest.mark.parametrize(
    "values", [{"kafka": "sasl.password=hunter5"}, {"registry": "hunter6"}, {"postgres": ["hunter7"]}]
)
def test_an_error_in_a_secret_setting_does_not_print_it(values: dict[str, Any]) -> None:
    with pytest.raises(SettingError) as caught:
        Settings.of(**{"postgres": DSN, **values})
    assert "hunter" not in str(caught.value)
    assert "hunter" not in repr(caught.value)
    assert "has a value that is not allowed (not shown, since it may hold secrets). Allowed: " in str(caught.value)


def test_a_secret_setting_that_is_missing_is_called_so() -> None:
    with pytest.raises(SettingError, match=r"Setting 'postgres' is missing\. Allowed: a connection string"):
        Settings.of()


# ---------------------------------------------------------------------- the settings' own description


@pytest.mark.parametrize("setting", SETTINGS.values(), ids=SETTINGS)
def test_a_default_is_allowed(setting: Any) -> None:
    if setting.name != "postgres":
        assert setting.take(setting.default) == setting.default


@pytest.mark.parametrize("setting", SETTINGS.values(), ids=SETTINGS)
def test_the_first_choice_is_the_default(setting: Any) -> None:
    if setting.type is Literal:
        assert setting.default == get_args(setting.hint.__origin__)[0]


@pytest.mark.parametrize("setting", SETTINGS.values(), ids=SETTINGS)
def test_a_setting_is_described_in_one_sentence(setting: Any) -> None:
    assert setting.sentence.endswith(".")
    assert ". " not in setting.sentence


def test_a_setting_without_a_rule_or_a_sentence_is_an_error_of_its_author() -> None:
    with pytest.raises(TypeError, match="needs allowed: "):
        said(Annotated[int, about("How many.")])
    with pytest.raises(TypeError, match="needs changes, sentence: "):
        said(bool)


def test_later_layers_win_and_dictionaries_are_merged() -> None:
    merged = merge({"a": 1, "kafka": {"x": "1", "y": "1"}}, {"a": None, "b": 2}, {"a": 3, "kafka": {"y": "2"}})
    assert merged == {"a": 3, "b": 2, "kafka": {"x": "1", "y": "2"}}


def test_a_changed_copy_is_checked_too() -> None:
    made = Settings.of(postgres=DSN)
    assert made.with_(slot="other").publication_name == "other"
    with pytest.raises(SettingError):
        made.with_(slot="Other")


def test_the_key_of_hashes_is_read_from_its_file(tmp_path: Path) -> None:
    file = tmp_path / "key"
    made = Settings.of(postgres=DSN, hash_key_file=str(file))
    with pytest.raises(SettingError, match=r"cannot be read \(FileNotFoundError\)"):
        made.with_hash_key()
    file.write_text("0123456789abc key\r\nanother line\n")
    assert made.with_hash_key().hash_key == "0123456789abc key"
    file.write_text("0123456789\n")
    with pytest.raises(SettingError, match=r"hash_key.*not shown"):
        made.with_hash_key()
    file.write_text("")
    with pytest.raises(SettingError, match=r"hash_key.*is missing"):
        made.with_hash_key()
    assert Settings.of(postgres=DSN).with_hash_key().hash_key == ""


# ---------------------------------------------------------------------- forms of types


def test_what_only_one_format_has_is_not_asked_of_the_other() -> None:
    asked = {
        "enums": "enum", "not_null": "required", "temporal": "plain", "json_numeric": "number",
        "json_documents": "value", "json_geometries": "geojson",
        "arrays": "text", "composites": "text", "ranges": "record", "regs": "name",
    }  # fmt: skip
    both = {"arrays": "text", "composites": "text", "ranges": "record", "regs": "name"}
    assert Settings.of(postgres="host=db", **asked).forms == TypeOptions(
        enums="enum", not_null="required", temporal="plain", **both
    )
    assert Settings.of(postgres="host=db", format="json", **asked).forms == TypeOptions(
        numeric="number", documents="value", geometries="geojson", **both
    )
    # a double stays one, in both
    assert Settings.of(postgres="host=db", format="json", numeric="double", json_numeric="number").forms == TypeOptions(
        numeric="double"
    )
    assert Settings.of(postgres="host=db").forms == DEFAULT_TYPE_OPTIONS


@given(st.fixed_dictionaries({
    "json_numeric": st.sampled_from(get_args(forms.JsonNumeric)),
    "json_documents": st.sampled_from(get_args(forms.Documents)),
    "json_geometries": st.sampled_from(get_args(forms.Geometries)),
    "numeric": st.sampled_from(get_args(forms.Numeric)),
    "ranges": st.sampled_from(get_args(forms.Ranges)),
}))  # fmt: skip
def test_no_form_that_has_no_schema_of_kafka_connect_is_sent_with_one(chosen: dict[str, str]) -> None:
    """A schema in front of a record has to hold for each value: what it does not say, a sink gets as NULL, or as
    another number."""
    enveloped = {"postgres": DSN, "format": "json", "envelope": "debezium", **chosen}
    assert Settings.of(**enveloped)
    assert Settings.of(**{**enveloped, "format": "avro", "registry": {"url": "http://r"}}, envelope_schema=True)
    if {"number", "value", "geojson"} & set(chosen.values()):
        with pytest.raises(SettingError, match="no schema of Kafka Connect"):
            Settings.of(**enveloped, envelope_schema=True)
    else:
        made = Settings.of(**enveloped, envelope_schema=True).forms
        assert (made.documents, made.geometries, made.numeric) == ("string", "ewkb", chosen["numeric"])


# ---------------------------------------------------------------------- the file that describes a pipeline

SECTIONS = {
    "source": {"tables": ["orders"], "dsn": "host=db"},
    "kafka": {"format": "json", "properties": {"bootstrap.servers": "k"}},
    "types": {"numeric": "string"},
    "spark": {"conf": {"a": "b"}},
    "outage_timeout": 7,
}


def test_the_schema_of_the_wheel_is_that_of_the_objects() -> None:
    shipped = json.loads(file.SCHEMA.read_text())
    assert shipped == file.schema(), "run: python -m airflow_bottledwater.pipeline.file"
    jsonschema.Draft202012Validator.check_schema(shipped)
    validator = jsonschema.Draft202012Validator(shipped)
    validator.validate(Description.of({**SECTIONS, "name": "shop"}).as_dict(secrets=True))
    for wrong in ({"sorce": {}}, {"kafka": {"partitions": 0}}, {"kafka": {"format": "xml"}}, {"name": "a\n"}):
        assert list(validator.iter_errors(wrong))


def _blocks() -> list[dict[str, Any]]:
    """The descriptions of pipelines in the documentation."""
    pages = [*(ROOT / "docs").glob("*.md"), ROOT / "README.md"]
    found = [
        yaml.safe_load(each) for page in pages for each in re.findall(r"```yaml\n(.*?)```", page.read_text(), re.S)
    ]
    described = [{"source": each} if each.keys() == {"table_options"} else each for each in found]
    return [each for each in described if "scrape_configs" not in each]


def test_descriptions_in_the_documentation_fit_the_schema_and_are_taken() -> None:
    validator = jsonschema.Draft202012Validator(file.schema())
    blocks = _blocks()
    assert len(blocks) > 10
    for block in blocks:
        validator.validate(block)
        Description.of({"name": "shop", **block})


@pytest.mark.parametrize("value", [7, 0.5, True])
def test_what_is_no_text_in_yaml_fits_the_schema_where_it_is_taken(value: object) -> None:
    given = {"name": "shop", "kafka": {"topic_config": {"a.b": value}}}
    jsonschema.Draft202012Validator(file.schema()).validate(given)
    assert set(Description.of(given).kafka.topic_config) == {"a.b"}


@pytest.mark.parametrize(
    ("text", "key"),
    [
        ("name: shop\nname: other\n", "name"),
        ("name: shop\nsource:\n  table_options:\n    a: {exclude: [x]}\n    b: {}\n    a: {topic: t}\n", "a"),
    ],
)
def test_a_key_that_a_file_has_twice_is_refused(tmp_path: Path, text: str, key: str) -> None:
    """The first one would be lost, and with it columns that were to be left out."""
    (tmp_path / "shop.yaml").write_text(text)
    with pytest.raises(SettingError, match=rf"shop\.yaml' cannot be read \(the key '{key}' is there twice, .*line"):
        file.load(tmp_path / "shop.yaml", Description)
