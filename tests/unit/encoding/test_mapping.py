"""How a pipeline sees a table."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import pytest

from airflow_bottledwater.encoding import masks, types
from airflow_bottledwater.encoding.mapping import TableMapping, rule_of
from airflow_bottledwater.errors import Refused
from airflow_bottledwater.model.forms import TypeOptions
from airflow_bottledwater.model.relation import Column, ColumnType, SourceTable
from airflow_bottledwater.pipeline.formats import AVRO, JSON
from airflow_bottledwater.pipeline.settings import Settings
from airflow_bottledwater.pipeline.table import Table
from airflow_bottledwater.provision.kafka_checks import new_topic

INT = ColumnType(23, -1, 23, -1, "b", "integer")
ORDERS = SourceTable(1, "sales", "orders", "d", ("id",), (Column("id", INT),))


def test_topics_have_the_prefix() -> None:
    mapping = TableMapping.of(Settings(postgres="service=x", topic_prefix="shop"))
    assert mapping.by_topic([ORDERS]) == {"shop.sales.orders": ORDERS}
    assert mapping.service_topics == ("shop._bottledwater_events", "shop._bottledwater_dead_letters")


def mapping(rules: dict[str, Any], **settings: Any) -> TableMapping:
    return TableMapping.of(Settings(postgres="service=x", table_options=rules, **settings))


@pytest.mark.parametrize(
    ("rules", "options"),
    [
        ({"sales.*": {"partitions": 2}, "*.*": {"partitions": 3, "exclude": "a"}}, {"partitions": 2, "exclude": ["a"]}),
        ({"sales.orders": {"partitions": 2}, "sales.order?": {"partitions": 3}}, {"partitions": 2}),
        ({"s*.orders": {"partitions": 2}, "sales.ord*": {"partitions": 3}}, {"partitions": 3}),
        ({"s*.orders": {"partitions": 2}, "s?les.order*": {"partitions": 3}}, {"partitions": 3}),
        # also with its default value
        (
            {"*.*": {"on_error": "log", "exclude": "a"}, "sales.*": {"on_error": "pipeline", "exclude": []}},
            {"on_error": "pipeline", "exclude": []},
        ),
        ({"sales.a*": {"partitions": 2}, "sales.*a": {"partitions": 3}, "orders": {"partitions": 4}, "*": {}}, {}),
    ],
)
def test_each_option_is_that_of_the_most_specific_pattern(rules: dict[str, Any], options: dict[str, Any]) -> None:
    assert mapping(rules).options("sales", "orders").as_dict() == options


def test_a_key_that_is_taken_back_is_so_also_without_the_other_options() -> None:
    found = mapping({"*.*": {"key": "a", "exclude": "b"}, "sales.orders": {"key": []}}).all_columns()
    assert [found.options("sales", name).key for name in ("orders", "others")] == [(), ("a",)]


def test_rules_are_compared_with_a_table_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each look at the tables asks for the options of all of them, several times."""
    asked = list[str]()

    def of_table(_: Any, schema: str, name: str) -> Table:
        asked.append(f"{schema}.{name}")
        return Table()

    monkeypatch.setattr(Table, "of_table", of_table)
    pipelines = [TableMapping(rules={"t*": Table(exclude=(column,))}) for column in "ab"]
    for each in pipelines * 2:
        assert replace(each).options("public", "t") == Table()
    assert asked == ["public.t"] * 2


def test_a_name_may_look_like_a_pattern() -> None:
    assert mapping({"odd.[x]": {"exclude": "[y]"}}).left_out("odd", "[x]", ["[y]", "y"]) == (0,)


@pytest.mark.parametrize(
    ("options", "published"),
    [
        ({}, "abcd"),
        ({"exclude": "b"}, "acd"),
        ({"include": "a, b"}, "ab"),
        ({"include": ["?"], "exclude": ["b", "d"]}, "ac"),
        ({"include": "a", "exclude": "b", "new_columns": "publish"}, "acd"),
        ({"include": "a", "exclude": "b", "new_columns": "error"}, "a"),
        ({"exclude": "b", "new_columns": "leave_out"}, ""),
    ],
)
def test_columns_are_published_by_include_exclude_and_new_columns(options: dict[str, Any], published: str) -> None:
    left_out = mapping({"orders": options}).left_out("public", "orders", list("abcd"))
    assert "".join(column for place, column in enumerate("abcd") if place not in left_out) == published


def test_columns_of_which_nothing_is_said_are_errors_if_asked_for() -> None:
    rules = {"orders": {"include": "a", "exclude": "b", "new_columns": "error"}, "o*": {"exclude": "b"}}
    assert mapping(rules).unnamed("public", "orders", "abcd") == ["c", "d"]
    assert mapping(rules).unnamed("public", "others", "abcd") == []


def test_columns_that_would_have_one_name_are_found() -> None:
    rules = {"orders": {"rename": {"a": "b", "c": "d", "d": "c"}, "exclude": "e"}}
    found = mapping(rules)
    assert found.namesakes("public", "orders", ["a", "c", "d", "e"]) is None
    assert found.namesakes("public", "orders", ["a", "b"]) == ("a", "b", "b")
    assert mapping({"orders": {"rename": {"a": "e"}, "exclude": "e"}}).namesakes("public", "orders", "ae") is None
    columns = found.published("public", "orders", [Column("a", INT), Column("x", INT)])
    assert [(c.name, c.field) for c in columns] == [("a", "b"), ("x", "x")]


def test_columns_have_their_masks() -> None:
    rules = {"sales.orders": {"mask": {"i*": "null", "name": "first:2", "n*": "last:2", "n": "constant:x"}}}
    text = ColumnType(25, -1, 25, -1, "b", "text")
    columns = [
        Column("id", INT, required=True),
        Column("name", text, required=True),
        Column("n", INT),
        Column("o", INT),
    ]
    found = mapping(rules).masked("sales", "orders", columns)
    # what an integer cannot have is null: preflight says so, but a column may come later
    assert [(c.mask, c.required) for c in found] == [("null", False), ("first:2", True), ("null", False), ("", False)]
    assert [masks.fits(said, INT) for said in ("", "null", "first:2", "constant:x", "hash")] == [
        True, True, False, False, True,
    ]  # fmt: skip


def test_of_several_rules_for_a_column_its_name_counts_or_else_the_last() -> None:
    rules = {"name": "first:1", "n*": "first:2", "*e": "first:3"}
    assert [rule_of(rules, column) for column in ("name", "nose", "n", "o")] == ["first:1", "first:3", "first:2", ""]


def test_columns_have_the_forms_of_dates_that_their_options_choose() -> None:
    rules = {"sales.orders": {"temporal": {"*": "text", "n*": "logical", "note": "plain"}}}
    day = ColumnType(1082, -1, 1082, -1, "b", "date", form="plain")
    days = ColumnType(1182, -1, 1182, -1, "b", "date[]", element=day, dimensions=1)
    pair = ColumnType(9, -1, 9, -1, "c", "pair", attributes=(Column("a", days), Column("b", INT)), form="record")
    columns = [Column(name, kind) for name, kind in (("a", day), ("n", day), ("note", day), ("p", pair), ("i", INT))]
    found = mapping(rules).published("sales", "orders", columns)
    assert [c.type.form for c in found] == ["text", "", "plain", "record", ""]
    assert found[3].type.forms == ("record", ("", ("text",)), ("",)) and found[4].type is INT
    found = mapping(rules, temporal="plain").published("sales", "other", columns)
    assert [c.type.form for c in found] == ["plain", "plain", "plain", "record", ""]
    found = mapping(rules, temporal="text", format="json").published("sales", "orders", columns)
    assert [c.type.form for c in found] == ["", "", "", "record", ""]


def test_a_column_that_is_hashed_is_a_text_and_names_its_key() -> None:
    rules = {"sales.orders": {"mask": {"id": "hash", "day": "hash"}}}
    found = mapping(rules, hash_key="0123456789abcdef")
    day = ColumnType(1082, -1, 1082, -1, "b", "date")
    hashed, null = found.published("sales", "orders", [Column("id", INT, required=True), Column("day", day)])
    assert (hashed.mask, hashed.required) == (f"hash:{found.hash_key}", True) and "0123456789" not in repr(found)
    assert types.mapping(hashed.type).avro(hashed.type) == "string"
    # what cannot be hashed is null: preflight says so, but a column may come later
    assert (null.mask, null.type) == ("null", day)
    with pytest.raises(Refused, match="hash_key_conn_id"):
        mapping(rules).published("sales", "orders", [Column("id", INT)])
    assert mapping(rules).published("sales", "others", [Column("id", INT)])[0].mask == ""


@pytest.mark.parametrize(("envelope", "zoned"), [("none", ""), ("debezium", "text")])
def test_times_with_a_zone_are_texts_in_debeziums_envelope(envelope: str, zoned: str) -> None:
    names = {"at": 1184, "span": 1186, "clock": 1266, "local": 1114, "day": 1082, "number": 1184}
    columns = [Column(name, ColumnType(oid, -1, oid, -1, "b", name)) for name, oid in names.items()]
    found = mapping({"sales.orders": {"temporal": {"number": "plain"}}}, envelope=envelope)
    forms = {column.name: column.type.form for column in found.published("sales", "orders", columns)}
    assert forms == {**dict.fromkeys(("at", "span", "clock"), zoned), "local": "", "day": "", "number": "plain"}


def test_a_topic_is_a_name_or_a_template_behind_the_prefix() -> None:
    rules = {"sales.*": {"topic": "{schema}-{table}"}, "sales.orders": {"topic": "o"}}
    found = mapping(rules, topic_prefix="shop")
    assert found.topic(ORDERS) == "shop.o"
    other = replace(ORDERS, name="a b")
    assert found.topic(other) == "shop.sales-a_20_b"
    # which Avro takes as a name
    assert found.record("shop.sales-a_20_b")[:2] == ("bottledwater.public", "sales_2d_a_20_b")


@pytest.mark.parametrize(
    ("whole", "of_table", "stops"),
    [("exit", {}, 1), ("log", {}, 0), ("log", {"on_error": "exit"}, 1), ("exit", {"on_error": "log"}, 0)],
)
def test_a_table_may_have_a_policy_of_its_own(whole: str, of_table: dict[str, Any], stops: int) -> None:
    found = mapping({"sales.orders": of_table}, on_error=whole)
    assert found.stops(ORDERS) == bool(stops) and found.stops(replace(ORDERS, name="x")) == (whole == "exit")
    assert found.writes_letters() == ("log" in (whole, of_table.get("on_error")))


def test_what_is_no_table_is_not_set_aside() -> None:
    found = mapping({}, on_error="isolate")
    assert [found.policy(table) for table in (ORDERS, replace(ORDERS, oid=0))] == ["isolate", "exit"]


def test_a_table_with_a_shared_topic_is_not_set_aside() -> None:
    # it could go on only by a sweep, which would delete the others' keys
    found = mapping({"sales.orders": {"on_error": "isolate"}}, share_topics=True)
    assert found.policy(ORDERS) == "exit" and found.stops(ORDERS)


def test_what_is_no_table_has_no_options_of_tables() -> None:
    rules = {"*.*": {"on_error": "log", "partitions": 7, "topic_config": {"retention.ms": "1"}}}
    message = replace(ORDERS, oid=0, schema="logical", name="message", key=())
    found = mapping(rules)
    assert [found.policy(table) for table in (ORDERS, message)] == ["log", "exit"]
    pipeline = Settings(postgres="service=x", table_options=rules, partitions=3)  # type: ignore[arg-type]
    made = [new_topic(pipeline, "shop.mail", table, 1) for table in (ORDERS, message)]
    assert [(topic.partitions, topic.configs[-1].get("retention.ms") == "1") for topic in made] == [
        (7, True), (3, False),
    ]  # fmt: skip


def test_only_a_format_with_a_registry_has_subjects() -> None:
    found = dict(TableMapping(format=AVRO, prefix="shop").subjects("shop.sales.bought", ORDERS))
    assert list(found) == ["shop.sales.bought-key", "shop.sales.bought-value"]
    # named by the topic: a registry does not let the next schema of a subject have another name
    value = json.loads(found["shop.sales.bought-value"])
    assert (value["namespace"], value["name"]) == ("bottledwater.sales", "bought")
    assert TableMapping(format=JSON).subjects("orders", ORDERS) == []


@pytest.mark.parametrize(
    ("format", "forms"),
    [
        ("avro", TypeOptions(enums="enum", not_null="required", temporal="text")),
        ("json", TypeOptions(numeric="number", documents="value", geometries="geojson")),
    ],
)
def test_each_format_offers_its_own_forms(format: str, forms: TypeOptions) -> None:
    everything = {
        "enums": "enum",
        "not_null": "required",
        "temporal": "text",
        "json_numeric": "number",
        "json_documents": "value",
        "json_geometries": "geojson",
    }
    assert TableMapping.of(Settings.of(postgres="service=x", format=format, **everything)).forms == forms


def test_a_key_is_hashed_only_if_a_rule_names_it() -> None:
    def hashes(rule: dict[str, str], name: str = "id", kind: ColumnType = INT) -> bool:
        found = mapping({"orders": {"mask": rule}}, hash_key="0123456789abcdef")
        (column,) = found.masked("public", "orders", [Column(name, kind)])
        return found.hashes_key("public", "orders", column)

    assert hashes({"id": "hash"}) and hashes({"*": "null", "id": "hash"})
    assert not hashes({"i*": "hash"}) and not hashes({"id": "null"}) and not hashes({"x": "hash"})
    # of a type that has no hash, the mask is another one
    assert not hashes({"id": "hash"}, kind=replace(INT, oid=1082, base_oid=1082))


_HIDDEN = {"exclude": ["email"], "mask": {"phone": "first:3"}}


@pytest.mark.parametrize(
    ("rules", "exposed"),
    [
        ({"customers": _HIDDEN}, True),
        # a pattern that matches the new name, too, and hides something else
        ({"customers": _HIDDEN, "*": {"mask": {"note*": "null"}}}, True),
        ({"customers": _HIDDEN, "clients": {"exclude": "email"}}, True),
        ({"customers": _HIDDEN, "clients": {"exclude": "email", "mask": {"phone": "first:9"}}}, True),
        ({"customers": _HIDDEN, "clients": _HIDDEN}, False),
        ({"customers": _HIDDEN, "clients": {"mask": {"email": "null", "p*": "null"}}}, False),
        ({"customers": _HIDDEN, "clients": {"include": "id"}}, False),
        ({"customers": {"include": "id"}, "c*": {"exclude": "phone"}}, True),
        ({"*": _HIDDEN, "clients": {"partitions": 3}}, False),
    ],
)
def test_a_new_name_must_hide_what_the_old_one_hides(rules: dict[str, Any], exposed: bool) -> None:
    before = replace(ORDERS, schema="public", name="customers")
    columns = ["id", "email", "phone"]
    assert mapping(rules).exposes(before, "public", "clients", columns) is exposed


@pytest.mark.parametrize(
    ("rules", "shown"),
    [
        (_HIDDEN, ["mail", "mobile"]),
        ({"exclude": ["*mail"], "mask": {"phone": "first:3", "mobile": "first:3"}}, []),
        ({"exclude": ["*mail"], "mask": {"phone": "first:3", "mobile": "first:9"}}, ["mobile"]),
        ({"include": ["id", "email"]}, []),
        ({"include": ["id", "mail", "mobile"]}, ["mail", "mobile"]),
        ({"mask": {"email": "null", "mail": "first:1"}}, ["mail"]),
    ],
)
def test_a_new_name_of_a_column_must_hide_what_the_old_one_hides(rules: dict[str, Any], shown: list[str]) -> None:
    others = {"mail": ["email"], "mobile": ["note", "phone"]}
    before = replace(ORDERS, schema="public", name="customers")
    # also if the options are under the new name of the table only
    for name in ("customers", "clients"):
        assert mapping({name: rules}).exposed(before, "public", name, ["id", "mail", "mobile"], others) == shown


@pytest.mark.parametrize(
    ("before", "now", "more"),
    [
        ({"exclude": "id"}, {}, True),
        ({"exclude": "x*"}, {}, True),  # also of what may come
        ({"include": "id", "new_columns": "leave_out"}, {}, True),
        ({"mask": {"id": "null"}}, {"mask": {"other": "null"}}, True),
        ({"where": "id > 1"}, {"exclude": "x"}, True),
        ({"where": "id > 1"}, {"where": "id > 2"}, False),
        ({"exclude": "id"}, {"mask": {"id": "null"}}, False),
        ({}, {"exclude": "id"}, False),
        ({"topic": "other"}, {}, False),
    ],
)
def test_options_may_show_more_than_those_of_before(before: dict[str, Any], now: dict[str, Any], *, more: bool) -> None:
    of = [mapping({"sales.orders": options} if options else {}) for options in (before, now)]
    left_out = of[1].left_out("sales", "orders", ["id"])
    assert of[1].shows_more(of[0], ORDERS.without(left_out)) is more
