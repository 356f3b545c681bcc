"""What a broker refuses, and whose fault that is; topics that are no longer the ones that were pinned."""

from __future__ import annotations

import itertools
import re
import threading
import time
import uuid
from collections.abc import Callable, Iterator, Sequence
from types import SimpleNamespace
from typing import Any

import pytest
from confluent_kafka import Producer
from confluent_kafka.admin import (
    AdminClient,
    AlterConfigOpType,
    ConfigEntry,
    ConfigResource,
    NewPartitions,
    NewTopic,
    ResourceType,
)

from airflow_bottledwater.backoff import Backoff
from airflow_bottledwater.errors import BottledWaterError, RecordError, Refused, StateError
from airflow_bottledwater.kafka import publisher
from airflow_bottledwater.kafka import topics as kafka_topics
from airflow_bottledwater.kafka.errors import NewProducerNeeded
from airflow_bottledwater.kafka.producer import TransactionalProducer
from airflow_bottledwater.kafka.publisher import Publisher
from airflow_bottledwater.kafka.topics import Topic, Topics
from airflow_bottledwater.local.kafka import KafkaBroker
from airflow_bottledwater.provision import redrive
from airflow_bottledwater.publish import session
from airflow_bottledwater.stream import publisher as stream_publisher
from airflow_bottledwater.stream.publisher import StreamPublisher
from airflow_bottledwater.stream.start import Start, begin
from tests.support.topics import Flow, MakeFlow
from tests.support.waiting import until


@pytest.fixture(scope="module")
def creating(tmp_path_factory: pytest.TempPathFactory) -> Iterator[KafkaBroker]:
    """A broker that makes every topic that somebody asks for."""
    with KafkaBroker(tmp_path_factory.mktemp("creating"), settings={"auto.create.topics.enable": "true"}) as server:
        yield server


@pytest.fixture
def flow_settings() -> dict[str, Any]:
    return {"skip_snapshot": True}


def _admin(flow: Flow, ask: Callable[[AdminClient], dict[Any, Any]]) -> None:
    admin = AdminClient({"bootstrap.servers": flow.kafka.bootstrap})
    for future in ask(admin).values():
        future.result()


def _alter(flow: Flow, topic: str, **config: str) -> None:
    entries = [
        ConfigEntry(name.replace("_", "."), value, incremental_operation=AlterConfigOpType.SET)
        for name, value in config.items()
    ]
    resource = ConfigResource(ResourceType.TOPIC, topic, incremental_configs=entries)
    _admin(flow, lambda admin: admin.incremental_alter_configs([resource]))


def _delete(flow: Flow, topic: str) -> None:
    _admin(flow, lambda admin: admin.delete_topics([topic], operation_timeout=10))
    until(lambda: topic not in Topics(flow.pipeline.kafka).names(), "the topic is gone")


def _make_again(flow: Flow, topic: str) -> None:
    """Delete a topic and create it anew, with as many partitions."""
    _delete(flow, topic)
    _admin(flow, lambda admin: admin.create_topics([NewTopic(topic, flow.pipeline.partitions, 1)]))
    until(lambda: topic in Topics(flow.pipeline.kafka).names(), "the topic is there")


def _add_partition(flow: Flow, topic: str) -> None:
    partitions = flow.pipeline.partitions + 1
    _admin(flow, lambda admin: admin.create_partitions([NewPartitions(topic, partitions)]))
    until(lambda: Topics(flow.pipeline.kafka).describe([topic])[topic].partitions == partitions, "the new partition")


def _facts(flow: Flow) -> str:
    return f"_bottledwater.{flow.execute('SELECT current_database()')[0][0]}.{flow.pipeline.slot}"


def _table(flow: Flow, *, rows: int = 0) -> None:
    flow.execute("CREATE TABLE a (id bigint PRIMARY KEY, name text)")
    if rows:
        flow.execute(f"INSERT INTO a SELECT g, md5(g::text) || md5(g::text) FROM generate_series(1, {rows}) g")
    # what the broker compares is compressed
    flow.change(kafka={**flow.pipeline.kafka, "compression.type": "none"})
    flow.create()


def _large(bytes_: int) -> str:
    return f"repeat('x', {bytes_})"


def _without_limits(monkeypatch: pytest.MonkeyPatch) -> None:
    """As where DescribeConfigs is not granted: the defaults are assumed, and only the broker knows."""
    monkeypatch.setattr(Topics, "_configs", lambda self, names: {})


# ---------------------------------------------------------------- a record's fault, or not
def test_a_limit_that_is_lowered_while_the_stream_runs_blames_only_what_exceeds_it(make_flow: MakeFlow) -> None:
    flow = make_flow(on_error="log")
    _table(flow)
    with flow.streaming() as errors:
        flow.execute("INSERT INTO a VALUES (0, 'first')")
        until(lambda: flow.read("a"), "the first record", failed=errors)
        _alter(flow, flow.topic("a"), max_message_bytes="3000")
        flow.transaction(
            "INSERT INTO a SELECT g, repeat('y', 300) FROM generate_series(1, 100) g",
            f"INSERT INTO a VALUES (1000, {_large(5000)})",
            "INSERT INTO a SELECT g, repeat('y', 300) FROM generate_series(101, 200) g",
        )
        until(lambda: len(flow.read("a")) == 201, "all records but the refused", failed=errors)
    assert not errors
    assert [letter.value["columns"]["name"][:3] for letter in flow.dead_letters()] == ["xxx"]


@pytest.mark.long
def test_what_only_the_broker_knows_to_be_too_large_is_found_among_good_records(
    make_flow: MakeFlow, monkeypatch: pytest.MonkeyPatch
) -> None:
    flow = make_flow(on_error="log", topic_config={"max.message.bytes": "10000"})
    _table(flow)
    _without_limits(monkeypatch)
    flow.transaction(
        "INSERT INTO a SELECT g, repeat('y', 100) FROM generate_series(1, 150) g",
        f"INSERT INTO a VALUES (1000, {_large(12000)}), (1001, 'good'), (1002, {_large(11000)})",
    )
    assert flow.stream()["dead_letters"] == 2
    assert len(flow.read("a")) == 151
    assert sorted(len(letter.value["columns"]["name"]) for letter in flow.dead_letters()) == [11000, 12000]


@pytest.mark.some(1)
@pytest.mark.parametrize("on_error", ["log", "exit"])
def test_a_position_that_its_topic_does_not_take_is_no_rows_fault(make_flow: MakeFlow, on_error: str) -> None:
    flow = make_flow(on_error=on_error)
    _table(flow)
    facts = _facts(flow)
    with flow.streaming() as errors:
        flow.execute("INSERT INTO a VALUES (0, 'first')")
        until(lambda: flow.read("a"), "the first record", failed=errors)
        _alter(flow, facts, max_message_bytes="100")
        flow.execute("INSERT INTO a VALUES (1, 'second'), (2, 'third')")
        until(lambda: errors, "the stream fails")
    assert type(errors[0]) is Refused
    assert facts in str(errors[0])
    assert not flow.dead_letters()
    # the way out that it names
    _alter(flow, facts, max_message_bytes="1048588")
    flow.stream()
    assert len(flow.read("a")) == 3


def test_clocks_that_differ_are_no_rows_fault_and_waited_for(
    make_flow: MakeFlow, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As those of a host that comes from sleep."""
    flow = make_flow(on_error="log", skip_snapshot=False, snapshot_headers=True)
    _table(flow, rows=20)
    ahead, told = [7200.0], list[str]()

    def wait(self: Backoff, what: str) -> None:
        told.append(what)
        ahead[0] = 0.0

    monkeypatch.setattr(publisher, "time", SimpleNamespace(**{**vars(time), "time": lambda: time.time() + ahead[0]}))
    monkeypatch.setattr(Backoff, "wait", wait)
    flow.snapshot()
    assert len(flow.read("a")) == 20 and not flow.dead_letters()
    assert re.search(r"clocks.*message\.timestamp\.after\.max\.ms", told[0])


def test_a_topic_that_is_compacted_while_its_table_has_no_key_is_no_rows_fault(make_flow: MakeFlow) -> None:
    flow = make_flow(on_error="log", allow_unkeyed=True)
    flow.execute("CREATE TABLE a (name text)")
    flow.create()
    with flow.streaming() as errors:
        flow.execute("INSERT INTO a VALUES ('first')")
        until(lambda: flow.read("a"), "the first record", failed=errors)
        _alter(flow, flow.topic("a"), cleanup_policy="compact")
        flow.execute("INSERT INTO a VALUES ('second')")
        until(lambda: errors, "the stream fails")
    assert isinstance(errors[0], StateError)
    assert flow.topic("a") in str(errors[0])
    assert not flow.dead_letters()
    _alter(flow, flow.topic("a"), cleanup_policy="delete")
    flow.stream()
    assert len(flow.read("a")) == 2


def test_a_row_of_a_snapshot_that_the_broker_refuses_is_a_dead_letter_or_is_named(
    make_flow: MakeFlow, monkeypatch: pytest.MonkeyPatch
) -> None:
    flow = make_flow(skip_snapshot=False, topic_config={"max.message.bytes": "10000"})
    _table(flow, rows=200)
    flow.execute(f"UPDATE a SET name = {_large(12000)} WHERE id IN (77, 154)")
    _without_limits(monkeypatch)
    with pytest.raises(RecordError, match=r"public\.a cannot be published .*The job's log names it") as raised:
        flow.snapshot()
    assert raised.value.row == "the row with id = 77"
    assert not flow.read("a")
    flow.change(on_error="log")
    assert flow.snapshot().dead_letters == 2
    assert len(flow.read("a")) == 198
    assert len(flow.dead_letters()) == 2


# ---------------------------------------------------------------- the same batch again
def test_a_commit_of_the_good_part_without_an_answer_is_still_the_record_error(
    make_flow: MakeFlow, monkeypatch: pytest.MonkeyPatch
) -> None:
    flow = make_flow(topic_config={"max.message.bytes": "10000"})
    _table(flow)
    flow.execute("INSERT INTO a VALUES (1, 'good')")
    flow.transaction("INSERT INTO a VALUES (2, 'before')", f"INSERT INTO a VALUES (3, {_large(12000)})")
    commit, lost = Publisher._commit, list[int]()

    def loses_one_answer(self: Publisher) -> None:
        commit(self)
        if self.transactional_id.endswith("-stream") and self._sent > 1 and not lost:
            lost.append(1)
            raise NewProducerNeeded("the answer was lost")

    monkeypatch.setattr(Publisher, "_commit", loses_one_answer)
    with pytest.raises(RecordError, match=r"public\.a.*max\.message\.bytes"):
        flow.stream()
    assert lost
    assert [m.key for m in flow.read("a")] == [{"id": 1}]


@pytest.mark.long
def test_a_record_that_was_refused_is_the_same_one_when_the_batch_is_completed_anew(
    make_flow: MakeFlow, monkeypatch: pytest.MonkeyPatch
) -> None:
    flow = make_flow(on_error="log", topic_config={"max.message.bytes": "30000"})
    flow.execute(
        "CREATE TABLE a (id bigint PRIMARY KEY, name text, n int)",
        "ALTER TABLE a ALTER name SET STORAGE EXTERNAL",
        f"INSERT INTO a VALUES (1, {_large(9000)}, 0)",
    )
    flow.change(kafka={**flow.pipeline.kafka, "compression.type": "none"})
    flow.create()
    _without_limits(monkeypatch)
    # the first needs its value from the table; gone there, it is left out, and what follows has other numbers in the
    # batch
    flow.transaction(
        "UPDATE a SET n = 1 WHERE id = 1",
        f"INSERT INTO a VALUES (2, {_large(40000)}, 0)",
        "INSERT INTO a VALUES (3, 'good', 0)",
    )
    find = stream_publisher.find_refused

    def gone_meanwhile(*args: Any) -> Any:
        found = find(*args)
        flow.execute("DELETE FROM a WHERE id = 1")
        return found

    monkeypatch.setattr(stream_publisher, "find_refused", gone_meanwhile)
    flow.stream()
    assert [len(letter.value["columns"]["name"]) for letter in flow.dead_letters()] == [40000]
    assert [m.key["id"] for m in flow.read("a") if m.value is not None] == [3]


# ---------------------------------------------------------------- topics that are others now
def _publisher(flow: Flow, start: Start) -> StreamPublisher:
    return StreamPublisher(flow.pipeline, start, start.state, Backoff(20.0))


@pytest.mark.parametrize("how", ["partitions", "made again"])
def test_a_publisher_compares_its_topics_with_the_pinned_ones(make_flow: MakeFlow, how: str) -> None:
    flow = make_flow()
    _table(flow)
    start = begin(flow.pipeline)
    topic = flow.topic("a")
    if how == "partitions":
        _add_partition(flow, topic)
    else:
        _make_again(flow, topic)
    with pytest.raises(StateError, match=topic):
        _publisher(flow, start).close()


def test_a_publisher_notices_that_its_state_topic_was_made_again(make_flow: MakeFlow) -> None:
    flow = make_flow()
    _table(flow)
    publisher = _publisher(flow, begin(flow.pipeline))
    try:
        assert not publisher._session.compare_topics()
        _make_again(flow, _facts(flow))
        with pytest.raises(StateError, match="its records are gone"):
            publisher._session.compare_topics()
    finally:
        publisher.close()


def test_letters_are_not_driven_into_a_topic_with_other_partitions(make_flow: MakeFlow) -> None:
    flow = make_flow(on_error="log", topic_config={"max.message.bytes": "10000"})
    _table(flow)
    flow.execute(f"INSERT INTO a VALUES (1, {_large(12000)})")
    assert flow.stream()["dead_letters"] == 1
    topic = flow.topic("a")
    _alter(flow, topic, max_message_bytes="20000")
    _add_partition(flow, topic)
    with pytest.raises(StateError, match=rf"{topic}.* partitions"):
        redrive.redrive(flow.pipeline)
    assert not flow.read("a")


@pytest.mark.some(1)
@pytest.mark.parametrize("on_error", ["exit", "log"])
def test_a_topic_that_is_deleted_while_the_stream_runs_ends_it_and_is_not_made_again(
    make_flow: MakeFlow, creating: KafkaBroker, on_error: str
) -> None:
    flow = make_flow(broker=creating, on_error=on_error)
    # librdkafka's default is to wait for half a minute that the topic comes back
    flow.change(kafka={**flow.pipeline.kafka, "topic.metadata.propagation.max.ms": "3000"})
    _table(flow)
    with flow.streaming() as errors:
        flow.execute("INSERT INTO a VALUES (1, 'a')")
        until(lambda: flow.read("a"), "the first record", failed=errors)
        _delete(flow, flow.topic("a"))
        flow.execute("INSERT INTO a VALUES (2, 'b')")
        until(lambda: errors, "the stream fails")
    assert isinstance(errors[0], StateError), errors
    assert flow.topic("a") in str(errors[0])
    assert flow.topic("a") not in Topics(flow.pipeline.kafka).names()


def test_a_producer_for_a_topic_that_is_missing_does_not_make_it(creating: KafkaBroker) -> None:
    config, topic = {"bootstrap.servers": creating.bootstrap}, f"missing-{uuid.uuid4().hex}"
    publisher = Publisher(config, f"t-{topic}", [topic], transaction_timeout=10, waiting=lambda what: None)
    with pytest.raises(Refused, match="cannot be used"):
        publisher.open()
    publisher.close()
    assert topic not in Topics(config).names()


@pytest.mark.parametrize("kind", [Publisher, TransactionalProducer])
def test_a_time_out_that_the_brokers_do_not_allow_is_refused_and_not_tried_again(
    kafka: KafkaBroker, kind: type[Publisher | TransactionalProducer]
) -> None:
    config = {"bootstrap.servers": kafka.bootstrap}
    producer = kind(config, uuid.uuid4().hex, [], transaction_timeout=1000.0, waiting=lambda what: None)
    with pytest.raises(Refused, match=r"longer than the brokers allow\. Lower it.*transaction\.max\.timeout\.ms"):
        producer.open()
    producer.close()


def test_a_topic_that_is_made_again_while_the_stream_runs_ends_it(
    make_flow: MakeFlow, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(session, "_COMPARE_AGAIN", 0.5)
    flow = make_flow(on_error="log")
    _table(flow)
    with flow.streaming() as errors:
        flow.execute("INSERT INTO a VALUES (1, 'a')")
        until(lambda: flow.read("a"), "the first record", failed=errors)
        _make_again(flow, flow.topic("a"))
        until(lambda: errors, "the stream fails")
    assert isinstance(errors[0], StateError)
    assert "made again" in str(errors[0])


def test_nothing_waits_while_kafka_takes_long_to_describe_the_topics(
    make_flow: MakeFlow, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(session, "_COMPARE_AGAIN", 0.5)
    flow = make_flow(on_error="log")
    _table(flow)
    describe, asked, answer = Topics._describe, threading.Event(), threading.Event()

    def slowly(self: Topics, names: Sequence[str], **how: bool) -> dict[str, Topic]:
        if threading.current_thread().name == "topics":
            asked.set()
            assert answer.wait(60)
        return describe(self, names, **how)

    monkeypatch.setattr(Topics, "_describe", slowly)
    numbers = itertools.count(1)

    def write() -> int:
        number = next(numbers)
        flow.execute(f"INSERT INTO a VALUES ({number}, 'a')")
        return number

    with flow.streaming() as errors:
        until(lambda: write() and asked.is_set(), "Kafka is asked", failed=errors, pause=0.2)
        until(lambda: len(flow.read("a")) == write() - 1, "records are published meanwhile", failed=errors, pause=0.2)
        _make_again(flow, flow.topic("a"))
        answer.set()
        until(lambda: write() and errors, "the stream fails", pause=0.2)
    assert "made again" in str(errors[0])


# ---------------------------------------------------------------- a broker that knows few topics for a moment
def _forgetful(monkeypatch: pytest.MonkeyPatch, name: str, times: int) -> list[str]:
    """The next answers about this topic are that there is none."""
    asked: list[str] = []

    class Forgetful(AdminClient):
        def describe_topics(self, topics: Any, **options: Any) -> Any:
            # a copy: the answers are filled into the original
            found = dict(super().describe_topics(topics, **options))
            if name in found and len(asked) < times:
                asked.append(name)
                nowhere = f"nowhere.{time.monotonic_ns()}"
                found[name] = super().describe_topics(type(topics)([nowhere]), **options)[nowhere]
            return found

    monkeypatch.setattr(kafka_topics, "AdminClient", Forgetful)
    monkeypatch.setattr(kafka_topics, "_kept", {})
    return asked


@pytest.mark.parametrize("times", [*(pytest.param(times, marks=pytest.mark.long) for times in (1, 2, 3)), 4])
def test_a_broker_that_does_not_know_the_state_topic_for_a_moment_is_not_believed(
    make_flow: MakeFlow, monkeypatch: pytest.MonkeyPatch, times: int
) -> None:
    flow = make_flow()
    _table(flow)
    flow.execute("INSERT INTO a VALUES (1, 'a')")
    first = begin(flow.pipeline)
    asked = _forgetful(monkeypatch, _facts(flow), times)
    flow.stream()
    assert len(asked) == times
    after = begin(flow.pipeline)
    assert after.job.epoch == first.job.epoch + 2
    assert set(first.state.ids) <= set(after.state.ids)
    assert len(flow.read("a")) == 1


def test_a_data_topic_that_is_not_known_for_a_moment_is_not_believed_to_be_lost(
    make_flow: MakeFlow, monkeypatch: pytest.MonkeyPatch
) -> None:
    flow = make_flow()
    _table(flow)
    flow.execute("INSERT INTO a VALUES (1, 'a')")
    asked = _forgetful(monkeypatch, flow.topic("a"), 2)
    flow.stream()
    assert len(asked) == 2
    assert len(flow.read("a")) == 1


# ---------------------------------------------------------------- state topics
@pytest.mark.parametrize("policy", ["delete", "compact,delete"])
def test_a_state_topic_that_forgets_is_refused_until_it_is_compacted(make_flow: MakeFlow, policy: str) -> None:
    from airflow_bottledwater.provision import preflight

    flow = make_flow()
    _table(flow)
    facts = _facts(flow)
    _alter(flow, facts, cleanup_policy=policy)
    for work in (flow.stream, lambda: preflight.run(flow.pipeline)):
        with pytest.raises(BottledWaterError, match=r"cleanup\.policy") as refused:
            work()
        # the way out that it names
        advised = str(refused.value).split("kafka-configs.sh")[1]
        assert f"--entity-type topics --entity-name {facts} --add-config cleanup.policy=compact" in advised
    _alter(flow, facts, cleanup_policy="compact")
    flow.stream()


def test_a_malformed_fact_names_its_topic_and_offset(make_flow: MakeFlow) -> None:
    flow = make_flow()
    _table(flow)
    facts = _facts(flow)
    end = Topics(flow.pipeline.kafka).ends(facts, 1)[0]
    producer = Producer({"bootstrap.servers": flow.kafka.bootstrap})
    producer.produce(facts, b"not json", b"position", partition=0)
    assert producer.flush(60) == 0
    with pytest.raises(StateError, match=rf"offset {end} of state topic '{facts}'"):
        flow.stream()
