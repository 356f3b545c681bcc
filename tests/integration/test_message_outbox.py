"""Messages of an outbox: they become the records that they describe, each exactly once, in the place of its
transaction, or at once."""

from __future__ import annotations

import json
from typing import Any

import psycopg
import pytest

from airflow_bottledwater.errors import PreflightError, RecordError
from airflow_bottledwater.jobs import status
from airflow_bottledwater.kafka.topics import Topics
from airflow_bottledwater.local.registry import SchemaRegistry
from airflow_bottledwater.provision.drop import drop
from airflow_bottledwater.provision.redrive import dismiss, redrive
from airflow_bottledwater.state import control_topic
from airflow_bottledwater.state.identity import Owners
from tests.integration.test_outbox import OUTBOX, event, events, other_pipeline, unsorted
from tests.support import running
from tests.support.together import put_together
from tests.support.topics import MakeFlow, limit_topic


@pytest.fixture
def flow_settings() -> dict[str, Any]:
    """A table, and a prefix of messages that name their topics."""
    return {
        "tables": "a", "skip_snapshot": True, "xid_header": True, "transaction_topic": "transactions",
        "messages": {"*": "others", "outbox*": "outbox.{topic}"}, "partitions": 3,
    }  # fmt: skip


@pytest.fixture
def flow_statements() -> tuple[str, ...]:
    """A table with a key."""
    return ("CREATE TABLE a (id int PRIMARY KEY)",)


def tell(topic: str, key: str | None, payload: object, *, transactional: bool = True, **more: object) -> str:
    """The statement that writes a message."""
    said = {"topic": topic, **({} if key is None else {"key": key}), "payload": payload, **more}
    return write(json.dumps(said, ensure_ascii=False), transactional=transactional)


def write(content: str, *, transactional: bool = True) -> str:
    """The same for any content."""
    return f"SELECT pg_logical_emit_message({transactional}, 'outbox', '{content}')"


def test_messages_become_the_records_that_they_describe(make_flow: MakeFlow, registry: SchemaRegistry) -> None:
    flow = make_flow(registry)
    flow.create()
    flow.transaction(
        tell("order", "o1", {"n": "é"}, headers={"id": "1", "none": None}), "INSERT INTO a VALUES (1)",
        tell("customer", None, None), tell("order", "o2", "2"),
        "SELECT pg_logical_emit_message(true, 'plain', '3')",
    )  # fmt: skip
    flow.execute(f"BEGIN; {tell('order', 'x', 'never')}; ROLLBACK", f"BEGIN; {tell('never', 'x', 1)}; ROLLBACK")
    flow.stream()
    first, second = events(flow, "order")
    assert [(each.key, each.value) for each in (first, second)] == [(b"o1", '{"n": "é"}'.encode()), (b"o2", b"2")]
    assert first.headers.keys() == {"op", "pos", "xid", "id", "none"}
    assert (first.headers["op"], first.headers["id"], first.headers["none"]) == (b"m", b"1", None)
    (other,) = events(flow, "customer")
    assert (other.key, other.value) == (None, None) and not events(flow, "never")
    assert [each.headers["pos"].decode()[16:] for each in (first, other, second)] == [
        "/00000001", "/00000003", "/00000004"
    ]  # fmt: skip
    assert [(each.key, each.value) for each in flow.read("others")] == [("plain", 3)]
    topic = flow.topic("outbox.order")
    assert Topics(flow.pipeline.kafka).describe([topic])[topic].partitions == 3
    together = put_together(flow, (), ("outbox.order", "outbox.customer", "others"))
    assert [each.end["count"] for each in together] == [5]


def test_messages_of_no_transaction_are_published_at_once(make_flow: MakeFlow) -> None:
    flow = make_flow()
    flow.create()
    with psycopg.connect(flow.dsn) as connection:
        connection.execute(tell("order", "1", "of the transaction"))  # type: ignore[arg-type]
        connection.execute(tell("order", "2", "at once", transactional=False))  # type: ignore[arg-type]
        flow.execute("INSERT INTO a VALUES (1)")  # which writes the WAL
        flow.stream()
        (event,) = events(flow, "order")
        assert (event.key, event.value, event.headers["op"]) == (b"2", b"at once", b"n")
        connection.rollback()
    flow.execute("INSERT INTO a VALUES (2)")
    flow.stream()
    assert len(events(flow, "order")) == 1


@pytest.mark.long
def test_each_message_comes_once_wherever_the_stream_stops(make_flow: MakeFlow) -> None:
    """P is behind each of them in turn; the slot does not know."""
    flow = make_flow()
    flow.create()
    expected = []
    for number in range(6):
        kind = "order" if number % 2 else "customer"
        expected += [(kind, number, True), (kind, number, False)]
        flow.transaction(f"INSERT INTO a VALUES ({number})", tell(kind, "k", [number, True]))
        flow.execute(tell(kind, "k", [number, False], transactional=False))
        flow.stream()
    flow.execute("INSERT INTO a VALUES (100)")
    flow.stream()
    for kind in ("order", "customer"):
        assert [each.payload for each in events(flow, kind)] == [
            [n, of] for of_kind, n, of in expected if of_kind == kind
        ]


@pytest.mark.long
def test_a_stream_that_stopped_inside_a_transaction_goes_on(make_flow: MakeFlow) -> None:
    flow = make_flow(max_transaction_bytes=64 << 10, batch_bytes=64 << 10)
    flow.create()
    described = "json_build_object('topic', 'order', 'key', 'k', 'payload', g)::text"
    flow.transaction(
        f"SELECT pg_logical_emit_message(true, 'outbox', {described}) FROM generate_series(1, 3000) g",
        "INSERT INTO a SELECT generate_series(1, 3000)",
        f"SELECT pg_logical_emit_message(true, 'outbox', {described}) FROM generate_series(3001, 4000) g",
    )
    running.stop_inside(flow.pipeline)
    assert 0 < len(events(flow, "order")) + len(flow.read("a")) < 7000
    flow.execute(tell("order", "k", "4001"))
    flow.stream()
    assert [each.payload for each in events(flow, "order")] == [*range(1, 4002)]
    assert [each.end["count"] for each in put_together(flow, ("a",), ("outbox.order",))] == [7000, 1]


@pytest.mark.long
def test_a_message_that_is_no_record_is_a_dead_letter_and_can_be_published_later(
    make_flow: MakeFlow, registry: SchemaRegistry
) -> None:
    flow = make_flow(registry, format="avro")
    flow.create()
    flow.execute(tell("order", "1", "first"))
    flow.stream()
    limit_topic(flow, flow.topic("outbox.order"), 20_000)
    large = tell("order", "2", "x" * 30_000, transactional=False)
    flow.transaction("INSERT INTO a VALUES (1)", write("no JSON"), tell("order", "3", 3))
    with pytest.raises(RecordError, match="content of the message is not the JSON object") as caught:
        flow.stream()
    assert "topic 'f" in str(caught.value) and "outbox.{topic}'" in str(caught.value)
    assert [each.value for each in events(flow, "order")] == [b"first"]
    flow.change(on_error="log")
    flow.execute(large, tell("a/b", "4", 4), tell("order", "5", 5, more=1), tell("order", "6", 6))
    flow.stream()
    assert [each.value for each in events(flow, "order")] == [b"first", b"3", b"6"]
    letters = [letter.value for letter in flow.dead_letters()]
    said = ("JSON object", "max.message.bytes", "has a value with '/'", "unknown field")
    assert all(each in letter["error"] for each, letter in zip(said, letters, strict=True))
    assert {(each["op"], each["relation"], each["oid"], each["key"]) for each in letters} == {
        ("m", "logical.message", 0, None)
    }
    assert letters[0]["columns"] == {"prefix": "outbox", "content": "no JSON"}
    assert status.report(flow.pipeline).open_letters == {"logical.message": {"stream": 4}}
    result = redrive(flow.pipeline)
    assert (result.published, result.failed) == (0, 4)
    limit_topic(flow, flow.topic("outbox.order"), 200_000)
    flow.change(messages={"outbox": "others.{topic}"})
    assert redrive(flow.pipeline).failed == 4  # it was for a topic of outbox.{topic}
    flow.change(messages={"outbox": "outbox.{topic}"})
    assert redrive(flow.pipeline).published == 1
    assert redrive(flow.pipeline).published == 0
    ((again, op),) = [(each.key, each.headers["op"]) for each in unsorted(flow, "order") if each.value == b"x" * 30_000]
    assert (again, op) == (b"2", b"n")
    assert dismiss(flow.pipeline, ["logical.message"]).dismissed == 3
    flow.execute(tell("order", "7", "x" * 1_100_000))
    with pytest.raises(RecordError, match=r"a larger max\.message\.bytes of the dead-letter topic"):
        flow.stream()  # the message is nowhere else


@pytest.mark.long
def test_a_message_never_chooses_a_topic_of_another_pipeline(make_flow: MakeFlow) -> None:
    flow = make_flow(on_error="log")
    other = other_pipeline(flow)
    other.create()
    flow.create()
    flow.execute(tell("order", "1", 1), tell("theirs", "2", 2), tell("order", "3", 3))
    flow.stream()
    assert [each.payload for each in events(flow, "order")] == [1, 3] and not flow.read("outbox.theirs")
    (letter,) = flow.dead_letters()
    assert "belongs to pipeline" in letter.value["error"]
    mine = flow.topic("outbox.order")
    assert Owners(control_topic.read(flow.pipeline.kafka)).names(mine) == [flow.name]
    drop(flow.pipeline, when="always")
    assert not Owners(control_topic.read(flow.pipeline.kafka)).names(mine)
    drop(other.pipeline, when="always")


def test_rows_and_messages_of_one_topic_keep_their_order(make_flow: MakeFlow) -> None:
    flow = make_flow(tables=("a", "outbox"), table_options={"outbox": {"outbox": "outbox.{aggregatetype}"}})
    flow.execute(OUTBOX)
    flow.create()
    flow.transaction(*(tell("order", "k", n) if n % 3 else event("order", "k", n) for n in range(30)))
    flow.stream()
    offsets = [each.payload for each in unsorted(flow, "order")]
    assert offsets == [*range(30)]


def test_topics_that_messages_choose_are_none_of_the_pipelines(make_flow: MakeFlow) -> None:
    flow = make_flow(messages={"*": "{topic}"})
    with pytest.raises(PreflightError, match=r"messages \(to .* go to .*\.a' is another topic of the pipeline"):
        flow.create()
    assert not [name for name in Topics(flow.pipeline.kafka).names() if name.startswith(flow.pipeline.topic_prefix)]
