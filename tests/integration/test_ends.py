"""The ends of transactions: a consumer puts source transactions together by them."""

from __future__ import annotations

import time
from typing import Any

import pytest

from airflow_bottledwater.errors import PreflightError, Refused
from airflow_bottledwater.kafka.topics import Topics
from airflow_bottledwater.local.registry import SchemaRegistry
from airflow_bottledwater.provision.drop import drop
from airflow_bottledwater.state import control_topic
from airflow_bottledwater.state.identity import Owners
from tests.support import running
from tests.support.together import put_together
from tests.support.topics import Flow, MakeFlow, limit_records, read


@pytest.fixture
def flow_settings() -> dict[str, Any]:
    """Two tables of which nothing is in a snapshot."""
    return {"tables": ("a", "b"), "transaction_topic": "transactions", "skip_snapshot": True, "xid_header": True}


@pytest.fixture
def flow_statements() -> tuple[str, ...]:
    """The tables, and one that is not the pipeline's."""
    return (
        "CREATE TABLE a (id int PRIMARY KEY, text text)",
        "CREATE TABLE b (id int PRIMARY KEY, text text)",
        "CREATE TABLE other (id int PRIMARY KEY)",
    )


def _counts(flow: Flow, *others: str) -> list[dict[str, int]]:
    prefix = f"{flow.pipeline.topic_prefix}."
    found = [each.end["topics"] for each in put_together(flow, ("a", "b"), others)]
    return [{name.removeprefix(prefix): count for name, count in each.items()} for each in found]


def test_each_transaction_that_publishes_something_has_an_end(make_flow: MakeFlow) -> None:
    flow = make_flow(max_delay=0.2)
    flow.create()
    before = time.time()
    flow.transaction("INSERT INTO a VALUES (1), (2)", "INSERT INTO b VALUES (1)", "UPDATE a SET id = 3 WHERE id = 1")
    flow.execute("INSERT INTO other VALUES (1)")
    flow.execute("BEGIN; INSERT INTO a VALUES (9); ROLLBACK")
    flow.execute(
        "BEGIN; INSERT INTO b VALUES (4); SAVEPOINT s; INSERT INTO a VALUES (5); ROLLBACK TO SAVEPOINT s; COMMIT"
    )
    flow.transaction("TRUNCATE a", "INSERT INTO a VALUES (7)")
    flow.stream()
    assert _counts(flow) == [{"a": 4, "b": 1}, {"b": 1}, {"a": 1, "_bottledwater_events": 1}]
    first = put_together(flow, ("a", "b"))[0]
    assert before - 1 < first.end["time"] / 1000 < time.time() + 1
    assert {record.xid for record in first.records[flow.topic("a")]} == {str(first.end["xid"])}


def test_nothing_is_written_where_it_is_not_asked_for(make_flow: MakeFlow) -> None:
    flow = make_flow(transaction_topic="")
    flow.create()
    flow.execute("INSERT INTO a VALUES (1)")
    flow.stream()
    named = {name for name in Topics(flow.pipeline.kafka).names() if name.startswith(flow.pipeline.topic_prefix)}
    assert named == {flow.topic(name) for name in ("a", "b", "_bottledwater_events", "_bottledwater_dead_letters")}


def test_a_transaction_in_several_kafka_transactions_has_one_end(make_flow: MakeFlow) -> None:
    """Also if the stream stops in between, and the setting comes only then."""
    flow = make_flow(transaction_topic="", max_transaction_bytes=64 << 10, batch_bytes=64 << 10)
    flow.create()
    flow.transaction(
        "INSERT INTO a SELECT g, repeat('x', 100) FROM generate_series(1, 5000) g",
        "INSERT INTO b SELECT g, repeat('x', 100) FROM generate_series(1, 3000) g",
    )
    running.stop_inside(flow.pipeline)
    assert len(flow.read("a")) > 0 and len(flow.read("b")) < 3000
    flow.change(transaction_topic="ends")
    flow.execute("INSERT INTO b VALUES (0)")
    flow.stream()
    assert _counts(flow) == [{"a": 5000, "b": 3000}, {"b": 1}]


def test_a_dead_letter_is_a_record_of_its_transaction(make_flow: MakeFlow) -> None:
    flow = make_flow(on_error="log")
    flow.create()
    limit_records(flow, "a", 20_000)
    flow.execute(
        "INSERT INTO a SELECT g, (SELECT string_agg(md5(i::text), '') FROM generate_series(1, g * 1000) i) "
        "FROM generate_series(0, 1) g"
    )
    flow.stream()
    assert _counts(flow) == [{"a": 1, "_bottledwater_dead_letters": 1}]


@pytest.mark.long
def test_the_topic_is_made_when_the_setting_comes_later(make_flow: MakeFlow, registry: SchemaRegistry) -> None:
    flow = make_flow(registry, transaction_topic="")
    flow.create()
    flow.execute("INSERT INTO a VALUES (1)")
    flow.stream()
    flow.change(transaction_topic="of.transactions", create_topics=False)
    with pytest.raises(PreflightError, match=r"of\.transactions' does not exist"):
        flow.create()
    with pytest.raises(Refused, match=r"does not know topic '.*\.of\.transactions'"):
        flow.stream()
    flow.change(create_topics=True)
    flow.create()
    flow.execute("INSERT INTO a VALUES (2)")
    flow.stream()
    (end,) = read(flow.kafka, flow.topic("of.transactions"))
    assert end.value["topics"] == {flow.topic("a"): 1}


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"transaction_topic": "a"}, "one of the pipeline's own topics"),
        ({"transaction_topic": "_bottledwater_events"}, "is also another one"),
        ({"transaction_topic": "x.y", "table_options": {"a": {"topic": "x_y"}}}, "collides"),
    ],
)
def test_a_name_that_cannot_be_is_found_before_anything_is_made(
    make_flow: MakeFlow, settings: dict[str, Any], said: str
) -> None:
    flow = make_flow(**settings)
    with pytest.raises(PreflightError, match=said):
        flow.create()
    assert not [name for name in Topics(flow.pipeline.kafka).names() if name.startswith(flow.pipeline.topic_prefix)]


@pytest.mark.parametrize("name", ["a", "_bottledwater_events"])
def test_a_name_of_another_purpose_is_refused_when_only_the_stream_starts(
    make_flow: MakeFlow, registry: SchemaRegistry, name: str
) -> None:
    """It would write the ends of transactions into the topic of a table."""
    flow = make_flow(registry, transaction_topic="")
    flow.create()
    flow.execute("INSERT INTO a VALUES (1)")
    flow.stream()
    flow.change(transaction_topic=name)
    with pytest.raises(PreflightError, match="one of the pipeline's own topics"):
        flow.stream()


def test_the_topic_belongs_to_one_pipeline(make_flow: MakeFlow) -> None:
    flow = make_flow()
    flow.create()
    topic = flow.topic("transactions")
    other = Flow(
        flow.dsn, flow.kafka, None, tables="a", topic_prefix=flow.pipeline.topic_prefix,
        transaction_topic="transactions", table_options={"a": {"topic": "another"}},
    )  # fmt: skip
    with pytest.raises(PreflightError, match=f"Topic '{topic}' belongs to pipeline"):
        other.create()
    drop(flow.pipeline, when="always")
    assert not Owners(control_topic.read(flow.pipeline.kafka)).names(topic)
