"""Creating topics on brokers that do not allow every setting."""

from __future__ import annotations

import threading
from concurrent.futures import Future
from types import SimpleNamespace
from typing import Any

import pytest
from confluent_kafka import KafkaError, KafkaException, TopicPartition

from airflow_bottledwater.errors import Outage, Refused
from airflow_bottledwater.kafka import topics
from airflow_bottledwater.kafka.topics import NewTopic, Topic, Topics
from airflow_bottledwater.state import store


class Managed:
    """An admin client of a broker with rules for new topics."""

    def __init__(self, code: int, smallest: int) -> None:
        self.code, self.smallest = code, smallest
        self.asked: list[Any] = []

    def create_topics(self, wanted: list[Any], **_: Any) -> dict[str, Future[None]]:
        self.asked += wanted
        answers = {}
        for topic in wanted:
            answer: Future[None] = Future()
            ratio = "min.cleanable.dirty.ratio" in topic.config
            if ratio or int(topic.config.get("segment.bytes", self.smallest)) < self.smallest:
                answer.set_exception(KafkaException(KafkaError(self.code, "not here")))
            else:
                answer.set_result(None)
            answers[topic.topic] = answer
        return answers

    def list_topics(self, **_: Any) -> Any:
        class Listed:
            topics = {topic.topic: None for topic in self.asked}

        return Listed


def _admin(monkeypatch: pytest.MonkeyPatch, code: int, smallest: int) -> tuple[Topics, Managed]:
    managed = Managed(code, smallest)
    monkeypatch.setattr(topics, "AdminClient", lambda config: managed)
    monkeypatch.setattr(topics, "_kept", {})
    return Topics({"bootstrap.servers": "nowhere"}), managed


@pytest.mark.parametrize("code", [KafkaError.INVALID_CONFIG, KafkaError.POLICY_VIOLATION])
@pytest.mark.parametrize("smallest", [52428800, 1 << 30])
def test_a_state_topic_is_made_with_what_the_broker_allows(
    monkeypatch: pytest.MonkeyPatch, code: int, smallest: int
) -> None:
    admin, managed = _admin(monkeypatch, code, smallest)
    topic = store.new_topic("_bottledwater", 3)
    assert admin.uncreatable([topic]) == {}
    admin.make(topic)
    made = managed.asked[-1].config
    assert made["cleanup.policy"] == "compact"
    assert made["min.insync.replicas"] == "2"
    assert made.get("segment.bytes") == ("52428800" if smallest == 52428800 else None)
    assert "min.insync.replicas" not in store.new_topic("_bottledwater", 1).configs[0]


@pytest.mark.parametrize("replication", [1, 3])
@pytest.mark.parametrize("name", ["_bottledwater", "_bottledwater.d.s"])
def test_the_last_attempt_at_a_state_topic_sets_what_must_be_alone(name: str, replication: int) -> None:
    configs = store.new_topic(name, replication).configs
    assert configs[-1] == {"cleanup.policy": "compact"} and configs.count(configs[-1]) == 1


def test_what_the_broker_does_not_allow_is_said_before_and_when_the_topic_is_made(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    admin, _ = _admin(monkeypatch, KafkaError.POLICY_VIOLATION, 100)
    topic = NewTopic("orders", 4, 3, ({"segment.bytes": "1"},))
    assert "POLICY_VIOLATION: not here" in admin.uncreatable([topic])["orders"]
    with pytest.raises(Refused, match=r"'orders': POLICY_VIOLATION: not here.*policy for new topics"):
        admin.make(topic)


def test_a_topic_that_the_broker_never_lists_is_an_outage(monkeypatch: pytest.MonkeyPatch) -> None:
    admin, managed = _admin(monkeypatch, KafkaError.POLICY_VIOLATION, 100)
    monkeypatch.setattr(managed, "poll", lambda _: None, raising=False)
    monkeypatch.setattr(managed, "list_topics", lambda **_: Managed(0, 0).list_topics())
    monkeypatch.setattr(topics, "_TIMEOUT", 0.2)
    with pytest.raises(Outage, match="'orders' was created, but Kafka does not list it"):
        admin.make(NewTopic("orders", 4, 3, ({},)))


class Looking:
    """An admin client that knows something only after it has looked at the cluster again."""

    def __init__(self) -> None:
        self.looked = False

    def list_topics(self, **_: Any) -> None:
        self.looked = True

    def poll(self, _: float) -> None:
        pass


class Fenced(Looking):
    """It has found no controller."""

    def describe_topics(self, wanted: Any, **_: Any) -> dict[str, Future[None]]:
        answer: Future[None] = Future()
        code = KafkaError.UNKNOWN_TOPIC_OR_PART if self.looked else KafkaError._TIMED_OUT
        answer.set_exception(KafkaException(KafkaError(code, "Failed while waiting for controller")))
        return {"orders": answer}


def test_a_broker_that_was_fenced_for_a_moment_is_found_again(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(topics, "AdminClient", lambda config: Fenced())
    monkeypatch.setattr(topics, "_kept", {})
    assert Topics({"bootstrap.servers": "nowhere"}).describe(["orders"]) == {}


class Leaderless(Looking):
    """It knows no leader, since the broker is busy."""

    def list_offsets(self, wanted: dict[TopicPartition, Any], **_: Any) -> dict[TopicPartition, Future[Any]]:
        answer: Future[Any] = Future()
        if self.looked:
            answer.set_result(SimpleNamespace(offset=7))
        else:
            found = "Failed to query partition leaders: No leaders found"
            answer.set_exception(KafkaException(KafkaError(KafkaError._NOENT, found)))
        return dict.fromkeys(wanted, answer)


def test_a_topic_whose_leader_is_not_known_for_a_moment_is_asked_for_again(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(topics, "AdminClient", lambda config: Leaderless())
    monkeypatch.setattr(topics, "_kept", {})
    assert Topics({"bootstrap.servers": "nowhere"}).ends("orders", 2) == [7, 7]


def test_brokers_that_are_not_known_for_a_moment_are_asked_for_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """None at all would be the replication factor of a new topic."""

    class Brokerless(Looking):
        def list_topics(self, **_: Any) -> Any:
            found, self.looked = {1: "a", 2: "b"} if self.looked else {}, True
            return SimpleNamespace(brokers=found)

    monkeypatch.setattr(topics, "AdminClient", lambda config: Brokerless())
    monkeypatch.setattr(topics, "_kept", {})
    assert Topics({"bootstrap.servers": "nowhere"}).replicas(3) == 2
    assert Topics({"bootstrap.servers": "nowhere"}).replicas(1) == 1


_UNLIMITED = str(2**63 - 1)


@pytest.mark.parametrize(
    ("before", "after", "difference", "limits"),
    [
        (None, None, None, (topics.FOR_EVER, topics.HOUR)),  # what is not told
        (_UNLIMITED, "3600000", None, (topics.FOR_EVER, topics.HOUR)),  # Kafka 4
        ("5000", "6000", None, (5000, 6000)),
        # Kafka 3.6 to 3.9
        (_UNLIMITED, _UNLIMITED, "7000", (7000, 7000)),
        ("5000", _UNLIMITED, "7000", (5000, 7000)),
        (_UNLIMITED, _UNLIMITED, _UNLIMITED, (topics.FOR_EVER, topics.FOR_EVER)),
        (None, None, "7000", (7000, 7000)),  # earlier ones
    ],
)
def test_how_far_timestamps_may_lie_is_read_under_the_names_that_the_broker_has(
    monkeypatch: pytest.MonkeyPatch, before: str | None, after: str | None, difference: str | None, limits: object
) -> None:
    names = ("message.timestamp.before.max.ms", "message.timestamp.after.max.ms", "message.timestamp.difference.max.ms")
    config = {name: value for name, value in zip(names, (before, after, difference), strict=True) if value is not None}
    topic = SimpleNamespace(topic_id="id", partitions=[0], authorized_operations=None)
    monkeypatch.setattr(topics, "AdminClient", lambda config: Looking())
    monkeypatch.setattr(topics, "_kept", {})
    monkeypatch.setattr(Topics, "_known", lambda *_, **__: {"orders": topic})
    monkeypatch.setattr(Topics, "_configs", lambda *_: {"orders": config})
    found = Topics({"bootstrap.servers": "nowhere"}).describe(["orders"])["orders"]
    assert (found.before_ms, found.after_ms) == limits


@pytest.mark.parametrize(
    ("policy", "partitions", "fit"),
    [("compact", 1, True), ("", 1, True), ("delete", 1, False), ("compact, delete", 1, False), ("compact", 2, True)],
)
def test_a_state_topic_keeps_what_is_written_once(policy: str, partitions: int, fit: bool) -> None:
    problem = store.unfit(
        {"bootstrap.servers": "k:9092"}, Topic("_bottledwater", "id", partitions, 1, policy, True, True)
    )
    assert (problem is None) is fit


def test_a_signals_handler_gets_a_client_while_the_interrupted_code_takes_one(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of the same thread: Airflow calls on_kill in one."""
    made = list[Topics]()

    def interrupted() -> None:
        with topics._keeping:
            made.append(_admin(monkeypatch, 0, 0)[0])
            topics._leave(made[0]._client)

    handling = threading.Thread(target=interrupted, daemon=True)
    handling.start()
    handling.join(10)
    assert not handling.is_alive() and made and not topics._kept


_WEEK = 7 * 86_400_000


@pytest.mark.parametrize(
    ("topic", "age", "taken"),
    [
        ({}, 10 * _WEEK, True),
        ({"before_ms": _WEEK}, _WEEK // 2, True),
        ({"before_ms": _WEEK}, _WEEK, False),  # the broker's clock is another one, and it waits
        ({"before_ms": _WEEK}, 8 * _WEEK // 7, False),
        ({}, -1_800_000, True),
        ({}, -7_200_000, False),
        ({"after_ms": topics.FOR_EVER}, -7_200_000, False),
        ({"after_ms": 60_000}, -30_000, True),
        ({"after_ms": 60_000}, -60_000, False),
        ({"cleanup": ""}, 0, False),
        ({"cleanup": "delete", "retention_ms": _WEEK}, 0, False),
        ({"cleanup": "delete"}, 0, True),
        ({"timestamps": "LogAppendTime"}, 0, False),
    ],
)
def test_a_commit_time_is_the_timestamp_only_where_the_broker_takes_and_keeps_it(
    topic: dict[str, Any], age: int, taken: bool
) -> None:
    found = Topic("t", "id", 1, 1, **{"cleanup": "compact", "may_read": True, "may_write": True, **topic})
    before, after = found.commit_times
    assert (-after <= age <= before) is taken
