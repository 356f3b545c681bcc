"""Logical messages: those of a transaction are published in its place, the others at once; each exactly once."""

from __future__ import annotations

import json
import re
import uuid
from typing import Any

import psycopg
import pytest
from confluent_kafka import Consumer, Message, TopicPartition

from airflow_bottledwater.errors import PreflightError, RecordError, Refused
from airflow_bottledwater.jobs import status
from airflow_bottledwater.kafka.topics import Topics
from airflow_bottledwater.local.kafka import KafkaBroker
from airflow_bottledwater.local.postgres import PostgresServer
from airflow_bottledwater.local.registry import SchemaRegistry
from airflow_bottledwater.model.lsn import Position, parse_lsn
from airflow_bottledwater.postgres.connect import Connection
from airflow_bottledwater.postgres.server import wait_flushed
from airflow_bottledwater.provision.drop import drop
from airflow_bottledwater.provision.redrive import dismiss, redrive
from airflow_bottledwater.publish.batch import Batch
from airflow_bottledwater.stream.assembler import TransactionAssembler
from tests.support import running
from tests.support.tables import look_often, problems
from tests.support.together import put_together
from tests.support.topics import Flow, MakeFlow, limit_records
from tests.support.waiting import until


@pytest.fixture
def flow_settings() -> dict[str, Any]:
    """A table of which nothing is in a snapshot, and two topics of messages."""
    return {
        "tables": ("a", "b"), "skip_snapshot": True, "xid_header": True, "transaction_topic": "transactions",
        "messages": {"*": "others", "mail*": "mails", "mail-to-nobody": "others"},
    }  # fmt: skip


@pytest.fixture
def flow_statements() -> tuple[str, ...]:
    """Tables with a key."""
    return "CREATE TABLE a (id int PRIMARY KEY, text text)", "CREATE TABLE b (id int PRIMARY KEY)"


def emit(content: object, prefix: str = "mail", *, transactional: bool = True) -> str:
    """The statement that writes a message; its content is JSON, as the tests read records."""
    return f"SELECT pg_logical_emit_message({transactional}, '{prefix}', '{json.dumps(content)}')"


def _raw(flow: Flow, topic: str) -> list[Message]:
    """The records of a topic with one partition, as they are."""
    config = {"bootstrap.servers": flow.kafka.bootstrap}
    consumer = Consumer({**config, "group.id": uuid.uuid4().hex, "isolation.level": "read_committed"})
    (end,) = Topics(config).ends(flow.topic(topic), 1)
    consumer.assign([TopicPartition(flow.topic(topic), 0, 0)])
    found: list[Message] = []
    while not found or (found[-1].offset() or 0) < end - 2:  # the last one is the transaction's marker
        message = consumer.poll(5.0)
        assert message is not None and message.error() is None
        found.append(message)
    consumer.close()
    return found


def _contents(flow: Flow, topic: str) -> list[Any]:
    return [message.value for message in flow.read(topic)]


def test_messages_of_a_transaction_are_in_its_place(make_flow: MakeFlow) -> None:
    flow = make_flow(max_delay=0.2)
    flow.create()
    flow.transaction("INSERT INTO a VALUES (1)", emit("first"), "INSERT INTO b VALUES (1)", emit(2, "other"))
    flow.execute(emit("alone"))
    flow.execute(f"BEGIN; {emit('never')}; ROLLBACK")
    flow.execute(f"BEGIN; {emit(4)}; SAVEPOINT s; {emit('never')}; ROLLBACK TO SAVEPOINT s; {emit(5)}; COMMIT")
    flow.execute(emit("to nobody", "mail-to-nobody"), emit("its own", "bottledwater"))
    assert flow.stream()["messages"] == 6
    mails, others = flow.read("mails"), flow.read("others")
    assert [each.value for each in mails] == ["first", "alone", 4, 5]
    assert [(each.key, each.value) for each in others] == [("other", 2), ("mail-to-nobody", "to nobody")]
    assert {each.op for each in (*mails, *others)} == {"m"}
    (of_a,), (of_b,) = flow.read("a"), flow.read("b")
    places = [of_a.pos, mails[0].pos, of_b.pos, others[0].pos]
    assert places == [f"{of_a.pos[:16]}/{ordinal:08X}" for ordinal in (1, 2, 3, 4)]
    assert {each.xid for each in (of_a, mails[0], of_b, others[0])} == {of_a.xid}
    assert {each.timestamp for each in (of_a, mails[0], of_b, others[0])} == {of_a.timestamp}
    together = put_together(flow, ("a", "b"), ("mails", "others"))
    assert [each.end["count"] for each in together] == [4, 1, 2, 1]


def test_messages_of_no_transaction_are_published_at_once(make_flow: MakeFlow) -> None:
    """Also while the transaction that wrote them is open, and if it is rolled back."""
    flow = make_flow()
    flow.create()
    with psycopg.connect(flow.dsn) as connection:
        connection.execute("INSERT INTO a VALUES (1)")
        connection.execute(emit("of the transaction"))  # type: ignore[arg-type]
        ((lsn,),) = connection.execute(emit("at once", transactional=False)).fetchall()  # type: ignore[arg-type]
        flow.execute("INSERT INTO b VALUES (1)")  # which writes the WAL
        flow.stream()
        (message,) = flow.read("mails")
        assert (message.value, message.op, message.xid, message.key) == ("at once", "n", "", "mail")
        assert message.pos == str(Position(parse_lsn(lsn) - 1, 1))
        connection.rollback()
    flow.execute("INSERT INTO b VALUES (2)")
    flow.stream()
    assert _contents(flow, "mails") == ["at once"] and not flow.read("a")
    assert [each.end["count"] for each in put_together(flow, ("a", "b"), ("mails",))] == [1, 1]


def test_each_message_comes_once_wherever_the_stream_stops(make_flow: MakeFlow) -> None:
    """P is behind each of them in turn, and behind rows; the slot does not know."""
    flow = make_flow()
    flow.create()
    contents = []
    for number in range(6):
        contents += [[number, "of a transaction"], [number, "of none"]]
        flow.transaction(f"INSERT INTO a VALUES ({number})", emit(contents[-2]))
        flow.execute(emit(contents[-1], transactional=False))
        if number % 2:
            flow.execute(f"INSERT INTO b VALUES ({number})")
        flow.stream()
    flow.execute("INSERT INTO b VALUES (100)")
    flow.stream()
    assert _contents(flow, "mails") == contents
    assert [each.value["id"] for each in flow.read("b")] == [1, 3, 5, 100]


def test_the_content_is_published_as_it_is(make_flow: MakeFlow, registry: SchemaRegistry) -> None:
    flow = make_flow(registry)
    flow.create()
    flow.execute(
        "SELECT pg_logical_emit_message(true, 'mail', '\\x00ff80'::bytea)",
        "SELECT pg_logical_emit_message(true, 'mail', '')",
        "SELECT pg_logical_emit_message(false, 'mailé', 'é')",
        "SELECT pg_logical_emit_message(true, '', 'without a prefix')",
    )
    flow.stream()
    found = [(each.key(), each.value()) for each in _raw(flow, "mails")]
    assert found == [(b"mail", b"\x00\xff\x80"), (b"mail", b""), ("mailé".encode(), "é".encode())]
    assert [(each.key(), each.value()) for each in _raw(flow, "others")] == [(b"", b"without a prefix")]


@pytest.mark.long
def test_messages_without_a_topic_are_left_out(make_flow: MakeFlow) -> None:
    flow = make_flow(messages={"mail*": "mails"})
    flow.create()
    flow.transaction(emit(1, "other"), emit(2), "INSERT INTO a VALUES (1)")
    flow.execute(emit(3, "other", transactional=False), emit(4, "other"), "INSERT INTO a VALUES (2)")
    flow.stream()
    assert _contents(flow, "mails") == [2]
    assert [each.pos[16:] for each in flow.read("a")] == ["/00000003", "/00000001"]
    assert [each.end["count"] for each in put_together(flow, ("a", "b"), ("mails",))] == [2, 1]


@pytest.mark.long
def test_messages_that_were_written_while_a_publication_did_not_exist_are_told(
    make_flow: MakeFlow, monkeypatch: pytest.MonkeyPatch
) -> None:
    """They are in no table that could be read again; and a crash of the server does not undo what is passed over."""
    look_often(monkeypatch)
    flow = make_flow()
    if flow.execute("SELECT current_setting('server_version_num')::int >= 180000")[0][0]:
        return  # it sends them
    flow.create()
    pass_over, passed, on_disk = TransactionAssembler.pass_over, list[int](), list[int]()

    def waits(connection: Connection, dsn: str, lsn: int, *, timeout: float) -> None:
        wait_flushed(connection, dsn, lsn, timeout=timeout)
        on_disk.append(lsn)

    def passes(assembler: TransactionAssembler, lsn: int) -> Batch:
        passed.append(lsn)
        return pass_over(assembler, lsn)

    monkeypatch.setattr("airflow_bottledwater.stream.source.wait_flushed", waits)
    monkeypatch.setattr(TransactionAssembler, "pass_over", passes)
    with flow.streaming() as errors:
        flow.published("INSERT INTO a VALUES (1)", emit("before"))
        flow.transaction(f"DROP PUBLICATION {flow.pipeline.slot}", "DELETE FROM a", emit("lost"))
        until(lambda: passed, "it is passed over", failed=errors)
        flow.execute(emit("behind"))
        until(lambda: _contents(flow, "mails") == ["before", "behind"], "the stream goes on", failed=errors)
        told = until(
            lambda: [each for each in problems(flow) if each.startswith("Logical")], "it is told", failed=errors
        )
    assert on_disk[-1] == passed[-1]
    place = "[0-9A-F]{16}/[0-9A-F]{8}"
    assert [bool(re.fullmatch(f"Logical messages between {place} and {place}", each)) for each in told] == [True]


_MANY = (
    "SELECT pg_logical_emit_message(true, 'mail', g::text) FROM generate_series(1, 3000) g",
    "INSERT INTO a SELECT g, repeat('x', 100) FROM generate_series(1, 3000) g",
    "SELECT pg_logical_emit_message(true, 'mail', g::text) FROM generate_series(3001, 4000) g",
)


def test_a_large_transaction_with_messages_is_divided(make_flow: MakeFlow) -> None:
    flow = make_flow(max_transaction_bytes=64 << 10, batch_bytes=64 << 10)
    flow.create()
    flow.transaction(*_MANY)
    running.stop_inside(flow.pipeline)
    found = len(flow.read("mails")) + len(flow.read("a"))
    assert 0 < found < 7000
    flow.execute(emit("after"), emit("at once", transactional=False))
    flow.stream()
    assert _contents(flow, "mails") == [*range(1, 4001), "after", "at once"]
    assert [each.value["id"] for each in flow.read("a")] == [*range(1, 3001)]
    assert [each.end["count"] for each in put_together(flow, ("a", "b"), ("mails",))] == [7000, 1]


@pytest.mark.long
@pytest.mark.parametrize("before", [{}, {"mail": "mails"}])
def test_whether_messages_are_sent_does_not_change_inside_a_transaction(
    make_flow: MakeFlow, before: dict[str, str]
) -> None:
    flow = make_flow(max_transaction_bytes=64 << 10, batch_bytes=64 << 10, messages=before)
    flow.create()
    flow.transaction(*_MANY)
    running.stop_inside(flow.pipeline)
    other = {} if before else {"mail": "mails"}
    flow.change(messages=other)
    with pytest.raises(Refused, match=f"ddl_topic were {'set' if other else 'taken back'}"):
        flow.stream()
    flow.change(messages=before)
    flow.stream()
    flow.change(messages=other)
    flow.execute(emit("after"))
    flow.stream()
    assert [each.value["id"] for each in flow.read("a")] == [*range(1, 3001)]
    assert _contents(flow, "mails") == ([*range(1, 4001)] if before else ["after"])


@pytest.mark.some(1)
@pytest.mark.parametrize("transactional", [True, False])
def test_a_message_that_is_too_large_is_a_record_error(make_flow: MakeFlow, transactional: bool) -> None:
    flow = make_flow(outage_timeout=10.0, on_error="exit" if transactional else "isolate")
    flow.create()
    limit_records(flow, "mails", 20_000)
    large = emit("x" * 30_000, transactional=transactional)
    flow.transaction("INSERT INTO a VALUES (1)", emit("before"))
    flow.transaction("INSERT INTO a VALUES (2)", large)
    flow.execute(emit("after"))
    with pytest.raises(RecordError, match=r"mails': the record has") as caught:
        flow.stream()
    assert _contents(flow, "mails") == ["before"]
    # at on_error = exit, nothing of its transaction is published; of no transaction, it comes before that
    assert len(flow.read("a")) == 1
    flow.change(on_error="log")
    flow.stream()
    assert _contents(flow, "mails") == ["before", "after"] and len(flow.read("a")) == 2
    (letter,) = flow.dead_letters()
    of = letter.value
    assert (of["pos"], of["op"], of["topic"]) == (caught.value.position, "m", flow.topic("mails"))
    assert (of["relation"], of["oid"], of["key"]) == ("logical.message", 0, {"prefix": "mail"})
    assert of["columns"]["content"] == json.dumps("x" * 30_000) and "again" not in of
    assert status.report(flow.pipeline).open_letters == {"logical.message": {"stream": 1}}
    assert redrive(flow.pipeline).incomplete == 1
    assert dismiss(flow.pipeline, ["logical.message"]).dismissed == 1


def test_messages_go_on_when_a_table_is_set_aside(make_flow: MakeFlow) -> None:
    flow = make_flow(on_error="isolate")
    flow.create()
    limit_records(flow, "a", 20_000)
    large = "INSERT INTO a SELECT 1, string_agg(md5(i::text), '') FROM generate_series(1, 1000) i"
    flow.transaction("INSERT INTO b VALUES (1)", large, emit("with it"))
    flow.execute(emit("at once", transactional=False), emit("after"))
    flow.stream()
    assert _contents(flow, "mails") == ["with it", "at once", "after"]
    assert not flow.read("a") and len(flow.read("b")) == 1
    assert [each.end["count"] for each in put_together(flow, ("a", "b"), ("mails",))] == [2, 1]


@pytest.mark.long
def test_one_message_that_is_too_large_can_be_skipped(make_flow: MakeFlow) -> None:
    flow = make_flow()
    flow.create()
    limit_records(flow, "mails", 20_000)
    flow.execute(emit("x" * 30_000, transactional=False), emit("after", transactional=False))
    with pytest.raises(RecordError) as caught:
        flow.stream()
    position = caught.value.position
    assert Position.parse(position).ordinal == 1
    flow.change(skip_position=position)
    flow.stream()
    assert _contents(flow, "mails") == ["after"] and len(flow.dead_letters()) == 1


@pytest.mark.long
def test_each_version_of_postgresql_sends_the_end_of_a_message(
    each_postgres: PostgresServer, kafka: KafkaBroker, flow_settings: dict[str, Any], flow_statements: tuple[str, ...]
) -> None:
    """If it sent its beginning, transactions right before it would be passed, and messages would be lost."""
    flow = Flow(each_postgres.createdb(f"m_{uuid.uuid4().hex[:8]}"), kafka, None, **flow_settings)
    flow.execute(*flow_statements)
    flow.create()
    ends = []
    for n in range(20):
        ends.append(flow.execute(emit(n, transactional=False))[0][0])
        if n % 3 == 0:
            flow.execute(f"INSERT INTO b VALUES ({n})")
    flow.stream()
    assert [(each.value, each.pos) for each in flow.read("mails")] == [
        (n, str(Position(parse_lsn(end) - 1, 1))) for n, end in enumerate(ends)
    ]
    assert len(flow.read("b")) == 7
    drop(flow.pipeline, when="always")


@pytest.mark.long
def test_topics_of_messages_are_made_and_checked(make_flow: MakeFlow) -> None:
    flow = make_flow(messages={})
    flow.create()
    flow.execute(emit("before the setting"))
    flow.stream()
    flow.change(messages={"*": "a"})
    with pytest.raises(PreflightError, match="one of the pipeline's own topics"):
        flow.create()
    flow.change(messages={"*": "transactions"})
    with pytest.raises(PreflightError, match="is also another one"):
        flow.create()
    flow.change(messages={"*": "mails"}, create_topics=False)
    with pytest.raises(Refused, match="does not know topic"):
        flow.stream()
    flow.change(create_topics=True)
    flow.execute(emit("with it"))
    flow.stream()
    assert _contents(flow, "mails") == ["with it"]
