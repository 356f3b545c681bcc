"""Outboxes: rows become the records that they describe, each exactly once, in the order of their commits."""

from __future__ import annotations

import json
import threading
import uuid
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from confluent_kafka import Consumer, TopicPartition
from confluent_kafka.admin import AdminClient

from airflow_bottledwater.errors import PreflightError, RecordError
from airflow_bottledwater.jobs import status
from airflow_bottledwater.kafka.topics import Topics
from airflow_bottledwater.local.postgres import PostgresServer
from airflow_bottledwater.local.registry import SchemaRegistry
from airflow_bottledwater.metrics.meter import Meter
from airflow_bottledwater.pipeline.settings import Settings
from airflow_bottledwater.provision import create
from airflow_bottledwater.provision.drop import drop, forget
from airflow_bottledwater.provision.redrive import RedriveResult, dismiss, redrive
from airflow_bottledwater.publish import session
from airflow_bottledwater.state import control_topic
from airflow_bottledwater.state.claim import read_own
from airflow_bottledwater.state.control_records import OwnerRecord, encode, owner_key
from airflow_bottledwater.state.identity import Owners
from airflow_bottledwater.stream import engine
from airflow_bottledwater.verify import driver
from tests.support.compare import records
from tests.support.together import put_together
from tests.support.topics import Flow, MakeFlow, limit_topic
from tests.support.waiting import until

OUTBOX = (
    "CREATE TABLE outbox (id uuid PRIMARY KEY DEFAULT gen_random_uuid(), aggregatetype text, aggregateid text, "
    "type text, payload jsonb)"
)


@pytest.fixture
def flow_settings() -> dict[str, Any]:
    """A table beside the outbox."""
    return {
        "tables": ("a", "outbox"), "xid_header": True, "transaction_topic": "transactions",
        "table_options": {"outbox": {"outbox": "outbox.{aggregatetype}", "partitions": 3}},
    }  # fmt: skip


@pytest.fixture
def flow_statements() -> tuple[str, ...]:
    """The tables."""
    return "CREATE TABLE a (id int PRIMARY KEY)", OUTBOX


def event(kind: str | None, key: str | None, payload: object, type: str = "made") -> str:
    """The statement that inserts a row."""
    quoted = ["NULL" if each is None else f"'{each}'" for each in (kind, key, type)]
    text = "NULL" if payload is None else f"'{json.dumps(payload)}'"
    return f"INSERT INTO outbox (aggregatetype, aggregateid, type, payload) VALUES ({', '.join(quoted)}, {text})"


class Event:
    """A record of an outbox, as a consumer sees it."""

    def __init__(self, message: Any) -> None:
        self.key, self.value, self.partition = message.key(), message.value(), message.partition()
        self.headers: dict[str, bytes] = dict(message.headers() or [])

    @property
    def payload(self) -> Any:
        """Its value, which is JSON."""
        return json.loads(self.value)


def events(flow: Flow, kind: str) -> list[Event]:
    """The records of a topic that rows choose, in the order of their positions."""
    topic, config = flow.topic(f"outbox.{kind}"), {"bootstrap.servers": flow.kafka.bootstrap}
    described = Topics(config).describe([topic])
    if topic not in described:
        return []
    partitions = described[topic].partitions
    consumer = Consumer({**config, "group.id": uuid.uuid4().hex, "isolation.level": "read_committed",
                         "enable.partition.eof": True})  # fmt: skip
    consumer.assign([TopicPartition(topic, partition, 0) for partition in range(partitions)])
    found, ended = list[Event](), 0
    while ended < partitions:
        message = consumer.poll(10.0)
        assert message is not None
        if message.error() is not None:
            ended += 1
            continue
        found.append(Event(message))
    consumer.close()
    by_partition: dict[int, list[bytes]] = {}
    for each in found:
        by_partition.setdefault(each.partition, []).append(each.headers["pos"])
    assert all(places == sorted(set(places)) for places in by_partition.values())
    return sorted(found, key=lambda each: each.headers["pos"])


def test_rows_become_the_records_that_they_describe(
    make_flow: MakeFlow, registry: SchemaRegistry, monkeypatch: pytest.MonkeyPatch
) -> None:
    meter = Meter()
    monkeypatch.setattr(engine, "Meter", lambda: meter)
    flow = make_flow(registry)
    flow.execute(event("order", "0", "before the slot"))
    flow.create()
    flow.snapshot()
    flow.transaction("INSERT INTO a VALUES (1)", event("order", "o1", {"n": 1}), event("customer", "c", [2], "left"),
                     event("order", "o2", {"n": "é"}), "DELETE FROM outbox")  # fmt: skip
    flow.execute(event("order", None, None))
    flow.execute(f"BEGIN; {event('order', 'x', 'never')}; ROLLBACK", "TRUNCATE outbox")
    flow.stream()
    # that rows are deleted is not published
    assert meter.rows() == {"public.a": 1, "public.outbox": 4}
    first, second, last = events(flow, "order")
    assert [each.key for each in (first, second, last)] == [b"o1", b"o2", None]
    assert (first.payload, second.payload, last.value) == ({"n": 1}, {"n": "é"}, None)
    assert first.headers.keys() == {"op", "pos", "xid", "id", "eventType"}
    assert (first.headers["op"], first.headers["eventType"]) == (b"c", b"made")
    assert str(uuid.UUID(first.headers["id"].decode())) == first.headers["id"].decode()
    (other,) = events(flow, "customer")
    assert (other.key, other.payload, other.headers["eventType"]) == (b"c", [2], b"left")
    places = [each.headers["pos"].decode()[16:] for each in (first, other, second)]
    assert places == ["/00000002", "/00000003", "/00000004"]
    together = put_together(flow, (), ("outbox.order", "outbox.customer"))
    assert [each.end["count"] for each in together] == [4, 1, 1]
    assert (
        Topics(flow.pipeline.kafka).describe([flow.topic("outbox.order")])[flow.topic("outbox.order")].partitions == 3
    )
    with flow.streaming():
        verified = driver.run(flow.pipeline, driver.in_threads(flow.pipeline))
    (row,) = [each for each in verified.tables if each.table == "public.outbox"]
    assert row.verdict == "outbox" and "nothing to compare" in row.reason and verified.equal


@pytest.mark.long
@pytest.mark.parametrize("gone", ["order", "customer"])
def test_a_chosen_topic_that_is_deleted_ends_nothing(
    make_flow: MakeFlow, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, gone: str
) -> None:
    """A tenant is gone, with the topic of its events, which is the first one that was chosen or the last one."""
    monkeypatch.setattr(session, "_COMPARE_AGAIN", 0.2)
    flow = make_flow()
    flow.create()
    flow.snapshot()
    admin = AdminClient(flow.pipeline.kafka)
    with flow.streaming() as errors:
        for number, kind in enumerate(("customer", "order")):
            flow.execute(event(kind, "a", number))
            until(lambda kind=kind: events(flow, kind), "its record", failed=errors)  # type: ignore[misc]
        (deleted,) = admin.delete_topics([flow.topic(f"outbox.{gone}")]).values()
        deleted.result()
        until(lambda: "does not exist any more" in caplog.text, "the stream notices it", failed=errors)
        flow.execute(event(gone, "a", 4))
        until(lambda: events(flow, gone), "its topic is made again", failed=errors)
    assert [each.payload for each in events(flow, gone)] == [4]


_TYPES = (
    "CREATE TYPE kind AS ENUM ('paid', 'sent')",
    "CREATE TABLE types (id bigint PRIMARY KEY, kind kind, number smallint, at int, body bytea, js json, "
    "secret text, empty uuid)",
)


def test_columns_are_chosen_and_keep_their_bytes(make_flow: MakeFlow) -> None:
    rule = {
        "outbox": "events.{kind}.v1", "outbox_key": "id", "outbox_payload": "body", "exclude": ["secret"],
        "mask": {"js": "null"},
        "outbox_headers": {"number": "n", "at": "at", "js": "js", "empty": "empty", "kind": "kind"},
    }  # fmt: skip
    flow = make_flow(tables="types", table_options={"types": rule}, skip_snapshot=True)
    flow.execute(*_TYPES)
    flow.create()
    flow.execute("INSERT INTO types VALUES (-9223372036854775808, 'paid', -3, 7, '\\x00ff80', '{\"a\": 1}', 'hidden')")
    flow.stream()
    topic = flow.topic("events.paid.v1")
    consumer = Consumer({"bootstrap.servers": flow.kafka.bootstrap, "group.id": uuid.uuid4().hex})
    consumer.assign([TopicPartition(topic, 0, 0)])
    message = consumer.poll(10.0)
    consumer.close()
    assert message is not None and message.key() == b"-9223372036854775808" and message.value() == b"\x00\xff\x80"
    own = [each for each in message.headers() or [] if each[0] not in ("op", "pos", "xid")]
    assert own == [("n", b"-3"), ("at", b"7"), ("js", None), ("empty", None), ("kind", b"paid")]


@pytest.mark.parametrize(
    ("rule", "said"),
    [
        ({"outbox": "{nothing}"}, "it has no column 'nothing'"),
        ({"outbox": "x.{aggregatetype}", "outbox_key": "number"}, "column 'number' is of type numeric"),
        ({"outbox": "x.{aggregatetype}", "exclude": ["payload"]}, "it has no column 'payload' that is published"),
        ({"outbox": "x.{aggregatetype}", "outbox_headers": {"nobody": "n"}}, "it has no column 'nobody'"),
        ({"outbox": "{aggregatetype}"}, ".a' is another topic of the pipeline"),
        ({"outbox": "_bottledwater_{aggregatetype}"}, "_bottledwater_events' is another topic"),
    ],
)
def test_an_outbox_that_cannot_be_is_refused_before_anything_is_made(
    make_flow: MakeFlow, rule: dict[str, Any], said: str
) -> None:
    flow = make_flow(table_options={"outbox": rule})
    flow.execute("ALTER TABLE outbox ADD number numeric")
    with pytest.raises(PreflightError) as caught:
        flow.create()
    assert said in str(caught.value)
    assert not [name for name in Topics(flow.pipeline.kafka).names() if name.startswith(flow.pipeline.topic_prefix)]


@pytest.mark.long
def test_a_row_that_cannot_be_a_record_is_a_dead_letter_and_can_be_published_later(make_flow: MakeFlow) -> None:
    flow = make_flow(on_error="log")
    flow.create()
    flow.snapshot()
    flow.execute(event("order", "1", "first"))
    flow.stream()
    limit_topic(flow, flow.topic("outbox.order"), 20_000)
    flow.execute(event("order", "2", "x" * 30_000), event("a/b", "3", 3), event(None, "4", 4), event("..", "5", 5))
    flow.transaction(event("order", "6", 6), "UPDATE outbox SET payload = '7' WHERE aggregateid = '6'")
    flow.stream()
    assert [each.payload for each in events(flow, "order")] == ["first", 6]
    assert [each.payload for each in events(flow, "..")] == [5]
    reasons = [letter.value["error"] for letter in flow.dead_letters()]
    assert ["max.message.bytes" in reasons[0], "has a value with '/'" in reasons[1], "is empty" in reasons[2],
            "was updated" in reasons[3]] == [True] * 4  # fmt: skip
    assert status.report(flow.pipeline).open_letters == {"public.outbox": {"stream": 4}}
    result = redrive(flow.pipeline)
    assert (result.published, result.failed) == (0, 4)
    limit_topic(flow, flow.topic("outbox.order"), 200_000)
    assert redrive(flow.pipeline).published == 1
    assert redrive(flow.pipeline).published == 0
    assert sorted(str(each.payload)[:5] for each in unsorted(flow, "order")) == ["6", "first", "xxxxx"]
    assert dismiss(flow.pipeline, ["outbox"]).dismissed == 3


def test_a_row_that_no_dead_letter_can_hold_is_not_lost(make_flow: MakeFlow) -> None:
    """By Kafka's defaults, what is too large for its topic is too large for the topic of dead letters, too."""
    flow = make_flow(on_error="log", skip_snapshot=True)
    flow.create()
    flow.transaction(event("order", "1", "x" * 1_100_000), "DELETE FROM outbox")
    with pytest.raises(RecordError, match=r"a larger max\.message\.bytes of the dead-letter topic"):
        flow.stream()
    assert not events(flow, "order") and not flow.dead_letters()
    limit_topic(flow, flow.topic("_bottledwater_dead_letters"), 3_000_000)
    flow.stream()
    assert "again" in flow.dead_letters()[0].value and not events(flow, "order")
    limit_topic(flow, flow.topic("outbox.order"), 3_000_000)
    assert redrive(flow.pipeline).published == 1
    assert len(events(flow, "order")[0].value) == 1_100_002


def _problems(flow: Flow) -> str:
    return "" if (job := flow.job) is None else str(job.problems)


def unsorted(flow: Flow, kind: str, of: str = "outbox") -> list[Event]:
    """Like :func:`events`, of a topic with records that came later than their places."""
    return [Event(message) for message in records(flow.pipeline.kafka, flow.topic(f"{of}.{kind}"))]


def other_pipeline(flow: Flow) -> Flow:
    """Another pipeline, one of whose topics an outbox could choose."""
    return Flow(
        flow.dsn, flow.kafka, None, tables="a", skip_snapshot=True, topic_prefix=flow.pipeline.topic_prefix,
        table_options={"a": {"topic": "outbox.theirs"}},
    )  # fmt: skip


def test_a_row_never_chooses_a_topic_of_another_pipeline(make_flow: MakeFlow) -> None:
    flow = make_flow(on_error="isolate", skip_snapshot=True)
    other = other_pipeline(flow)
    other.create()
    flow.create()
    flow.transaction(event("order", "1", 1), "INSERT INTO a VALUES (1)")
    flow.transaction(event("order", "2", 2), event("theirs", "3", 3), "INSERT INTO a VALUES (2)")
    flow.stream()
    # the outbox is set aside from that transaction on, which the other table has whole
    assert [each.payload for each in events(flow, "order")] == [1]
    assert not flow.read("outbox.theirs") and len(flow.read("a")) == 2
    assert "belongs to pipeline" in _problems(flow)
    mine = flow.topic("outbox.order")
    assert Owners(control_topic.read(flow.pipeline.kafka)).names(mine) == [flow.name]
    assert flow.name not in Owners(control_topic.read(flow.pipeline.kafka)).names(flow.topic("outbox.theirs"))
    drop(flow.pipeline, when="always")
    assert not Owners(control_topic.read(flow.pipeline.kafka)).names(mine)
    drop(other.pipeline, when="always")


def test_a_topic_that_another_pipeline_takes_at_the_same_moment_is_theirs(
    make_flow: MakeFlow, monkeypatch: pytest.MonkeyPatch
) -> None:
    flow, own, theirs = make_flow(on_error="isolate", skip_snapshot=True), create.own, "1/db/other"
    flow.create()
    taken = owner_key(flow.topic("outbox.order"), theirs)

    def late(pipeline: Settings, name: str, topics: Sequence[str], **shared: bool) -> Any:
        """Another pipeline records itself after this one has looked."""
        control_topic.write(pipeline.kafka, {taken: encode(OwnerRecord(theirs, 1.0))})
        return own(pipeline, name, topics, **shared)

    monkeypatch.setattr(create, "own", late)
    flow.transaction(event("order", "1", 1))
    flow.stream()
    assert not flow.read("outbox.order") and f"belongs to pipeline {theirs!r}" in _problems(flow)
    control_topic.write(flow.pipeline.kafka, {taken: None})


@pytest.mark.long
def test_options_of_its_key_leave_an_outbox_published(make_flow: MakeFlow) -> None:
    none = f"'{uuid.UUID(int=0)}'"
    rule = {"outbox": "outbox.{aggregatetype}", "where": f"id <> {none}"}
    flow = make_flow(table_options={"outbox": rule}, skip_snapshot=True)
    flow.create()
    options: list[dict[str, Any]] = [{}, {"exclude": ["id"]}, {"mask": {"id": "null"}}, {}]
    for n, more in enumerate(options):
        # each start looks at the tables, and the next one would miss what is not published any more
        flow.change(table_options={"outbox": {**rule, **more}})
        flow.execute(event("order", "o", n))
        flow.execute(f"INSERT INTO outbox VALUES ({none}, 'order')", "DELETE FROM outbox")
        flow.stream()
        assert _problems(flow) == "[]"
    assert [each.payload for each in events(flow, "order")] == [0, 1, 2, 3]


@pytest.mark.long
def test_what_an_outbox_is_does_not_change(make_flow: MakeFlow) -> None:
    flow = make_flow(create_topics=True, on_error="log", skip_snapshot=True)
    flow.create()
    flow.execute(event("order", "1", 1))
    flow.stream()
    meant = flow.pipeline.table_options
    for options in ({}, {"outbox": {"outbox": "others.{aggregatetype}"}}):
        flow.change(table_options=options)
        with pytest.raises(PreflightError, match=r"The outbox of public\.outbox is"):
            flow.stream()
        with pytest.raises(PreflightError, match=r"The outbox of public\.outbox is"):
            flow.create()
    flow.change(table_options=meant, create_topics=False)
    flow.execute(event("bill", "2", 2), event("order", "3", 3))
    flow.stream()
    assert [each.payload for each in events(flow, "order")] == [1, 3]
    (letter,) = flow.dead_letters()
    assert "does not exist, and create_topics is off" in letter.value["error"]
    flow.change(create_topics=True)
    assert redrive(flow.pipeline).published == 1
    assert [each.payload for each in events(flow, "bill")] == [2]
    flow.execute("ALTER TABLE outbox RENAME TO box", event("order", "4", 4).replace("INTO outbox", "INTO box"))
    flow.stream()
    assert "only one of these names is an outbox" in _problems(flow)
    assert [each.payload for each in events(flow, "order")] == [1, 3]


def test_an_outbox_is_taken_in_while_the_stream_does_not_run(make_flow: MakeFlow) -> None:
    flow = make_flow(tables=("a", "out*"), table_options={"out*": {"outbox": "{table}.{aggregatetype}"}})
    flow.execute("DROP TABLE outbox", "CREATE TABLE outside (aggregatetype text, aggregateid text, payload text)")
    flow.create()
    flow.snapshot()
    flow.execute(OUTBOX, event("order", "1", 1), "INSERT INTO outside VALUES ('order', '1', 'without a key')")
    flow.execute("UPDATE outside SET payload = 'other'", "DELETE FROM outside")
    flow.stream()
    assert "it is an outbox, of which only rows are published" in _problems(flow)
    flow.create()
    flow.execute(
        "WITH old AS (DELETE FROM outbox RETURNING *) INSERT INTO outbox SELECT * FROM old", event("order", "2", 2)
    )
    flow.stream()
    assert [each.payload for each in events(flow, "order")] == [1, 2]
    assert [each.value for each in unsorted(flow, "order", "outside")] == [b"without a key"]
    # under another name it keeps its topics, also of the next job
    flow.execute("ALTER TABLE outbox RENAME TO out_old", event("order", "3", 3).replace("INTO outbox", "INTO out_old"))
    for number in (4, 5):
        flow.stream()
        flow.execute(event("order", "4", number).replace("INTO outbox", "INTO out_old"))
    assert [each.payload for each in events(flow, "order")] == [1, 2, 3, 4]
    assert not [name for name in Topics(flow.pipeline.kafka).names() if "out_old" in name]
    flow.change(table_options={"out*": {"outbox": "{table}.of.{aggregatetype}"}})
    with pytest.raises(PreflightError, match=r"The outbox of public\.out_old is"):
        flow.stream()


@pytest.mark.long
def test_an_outbox_that_is_made_again_is_taken_in_again(make_flow: MakeFlow) -> None:
    """Its topics are those of the one before, whose last rows are published first."""
    flow = make_flow(skip_snapshot=True)
    flow.create()
    flow.execute(event("order", "1", 1))
    flow.stream()
    flow.execute(event("order", "2", 2), "ALTER TABLE outbox RENAME TO outbox_old", OUTBOX, event("order", "3", 3))
    flow.stream()
    assert "it is an outbox, of which only rows are published" in _problems(flow)
    flow.create()
    flow.execute(event("order", "4", 4))
    flow.stream()
    assert _problems(flow) == "[]"
    # without a stream that would give the topics to the new one
    flow.change(new_tables="ignore")
    flow.execute(event("order", "5", 5), "DROP TABLE outbox", OUTBOX)
    flow.create()
    flow.execute(event("order", "6", 6))
    flow.stream()
    assert [each.payload for each in events(flow, "order")] == [1, 2, 4, 5, 6] and _problems(flow) == "[]"
    # the rows of one that is gone have nothing to be told
    known = read_own(flow.pipeline, flow.cluster).tables
    assert [each.table.oid for each in known.values() if each.table.outbox] == [
        oid for (oid,) in flow.execute("SELECT 'outbox'::regclass::oid::int8")
    ]


@pytest.mark.long
def test_the_letters_of_an_outbox_wait_for_the_one_that_has_its_topics(
    make_flow: MakeFlow, caplog: pytest.LogCaptureFixture
) -> None:
    flow = make_flow(on_error="log", skip_snapshot=True, topic_config={"max.message.bytes": "20000"})
    flow.create()
    flow.transaction(event("order", "1", "x" * 30_000), "DELETE FROM outbox")
    flow.stream()
    limit_topic(flow, flow.topic("outbox.order"), 200_000)
    followed = {"tables": flow.pipeline.tables, "table_options": flow.pipeline.table_options}
    prefix = flow.pipeline.topic_prefix
    for settings, done in (
        ({"tables": ("a",), "table_options": {}}, RedriveResult(failed=1)),
        # their topic is another one then
        ({**followed, "topic_prefix": f"{prefix}.other"}, RedriveResult()),
        ({"topic_prefix": prefix}, RedriveResult(published=1)),
    ):
        drop(flow.pipeline, when="always")
        flow.execute("DROP TABLE outbox", OUTBOX)
        flow.change(**settings)
        flow.create()
        # no snapshot brings the row back: it is only there
        assert status.report(flow.pipeline).open_letters == {"public.outbox": {"stream": 1}}
        assert redrive(flow.pipeline) == done
    assert f"are in topic '{prefix}._bottledwater_dead_letters', of another topic_prefix" in caplog.text
    assert "no outbox with these topics is followed any more" in caplog.text
    assert [len(each.value) for each in events(flow, "order")] == [30_002]
    assert status.report(flow.pipeline).open_letters == {}


@pytest.mark.parametrize("first", ["drop", "forget"])
def test_the_letters_of_an_outbox_are_published_from_another_cluster(
    make_flow: MakeFlow, tmp_path: Path, first: str
) -> None:
    """As behind pg_upgrade, or a restored dump: its row may be gone, so that only the letter has it. Those of other
    tables stay until the table was read again."""
    flow = make_flow(on_error="log", skip_snapshot=True, topic_config={"max.message.bytes": "20000"})
    flow.execute("ALTER TABLE a ADD t text")
    flow.create()
    flow.transaction(event("order", "1", "x" * 30_000), "DELETE FROM outbox")
    flow.execute("INSERT INTO a VALUES (1, repeat('x', 30000))")
    flow.stream()
    limit_topic(flow, flow.topic("outbox.order"), 200_000)
    before = flow.cluster
    # what a job begins beside its stream ends with its process
    until(lambda: "tables" not in {thread.name for thread in threading.enumerate()}, "the end of its last look")
    if first == "drop":
        drop(flow.pipeline, when="always")
    with PostgresServer(tmp_path / "upgraded") as server:
        flow.dsn = server.createdb(before.database)
        flow.change(postgres=flow.dsn)
        flow.execute("CREATE TABLE a (id int PRIMARY KEY, t text)", OUTBOX)
        if first == "forget":
            forget(flow.pipeline, before.pipeline(flow.pipeline.slot))
        flow.create()
        of_a = {"public.a": {"stream": 1}}
        assert status.report(flow.pipeline).open_letters == {**of_a, "public.outbox": {"stream": 1}}
        flow.execute(event("order", "2", "second"))
        flow.stream()
        assert redrive(flow.pipeline) == RedriveResult(published=1, failed=1)
        assert [len(each.value) for each in unsorted(flow, "order")] == [30_002, 8]
        assert status.report(flow.pipeline).open_letters == of_a
