"""The client of the shared topic, without a Kafka: who asks it, what subscribers get, and what outlives an error."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import confluent_kafka
import pytest

from airflow_bottledwater.errors import Outage
from airflow_bottledwater.kafka import topics
from airflow_bottledwater.state import control_topic, store
from airflow_bottledwater.state.control_topic import ControlTopic
from tests.support.waiting import until

KAFKA = {"bootstrap.servers": "nowhere:1"}


@pytest.fixture(autouse=True)
def clients_of_this_test(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ControlTopic, "_of", {})


@pytest.mark.parametrize("away", [False, True])
def test_one_asks_kafka_for_all_that_wait(monkeypatch: pytest.MonkeyPatch, away: bool) -> None:
    asked, answer = list[int](), threading.Event()

    def end(self: ControlTopic) -> int:
        asked.append(1)
        assert answer.wait(60)
        if away:
            raise Outage("Kafka does not answer.")
        return 0

    def look() -> object:
        with ControlTopic.of(KAFKA) as topic:
            try:
                return topic.get("job/1", now=True)
            except Outage as error:
                return str(error)

    monkeypatch.setattr(ControlTopic, "end", end)
    with ControlTopic.of(KAFKA) as ours, ThreadPoolExecutor(20) as threads:
        found = [threads.submit(look) for _ in range(20)]
        until(lambda: len(asked) == 1, "the first asks")
        until(lambda: ours._users > 20, "all look")
        answer.set()
        results = [each.result(60) for each in found]
    assert set(results) == ({"Kafka does not answer."} if away else {(None, 0.0)})
    # one that came after the question began asks once more: what was written meanwhile counts for it
    assert len(asked) <= 3
    with ControlTopic.of(KAFKA) as later:
        before = len(asked)
        if not away:
            later.get("job/1", now=True)
            assert len(asked) == before + 1


def test_one_asks_a_kafka_that_does_not_answer_and_no_other_waits_for_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """A triggerer watches the jobs of other Kafkas in the same threads."""
    asked, answer = list[int](), threading.Event()

    def end(self: ControlTopic) -> int:
        asked.append(1)
        if len(asked) > 1:
            assert answer.wait(60)
            return 0
        raise Outage("Kafka does not answer.")

    monkeypatch.setattr(ControlTopic, "end", end)
    with ControlTopic.of(KAFKA) as topic, ThreadPoolExecutor(1) as other:
        with pytest.raises(Outage):
            topic.read_to_end()
        asking = other.submit(topic.get, "job/1")
        until(lambda: len(asked) == 2, "one asks again")
        with pytest.raises(Outage):
            topic.get("job/2")
        answer.set()
        asking.result(60)
        topic.get("job/2", now=True)
        assert len(asked) == 3


def test_a_forked_process_has_its_own_client() -> None:
    with ControlTopic.of(KAFKA) as ours, ControlTopic._lock:
        child = os.fork()
        if not child:
            with ControlTopic.of(KAFKA) as other:
                os._exit(0 if other is not ours and other._users == 1 else 1)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
        assert ControlTopic._of


def test_a_subscriber_that_falls_behind_gets_the_last_of_each_key() -> None:
    with ControlTopic.of(KAFKA) as topic:
        heard = topic.subscribe(lambda key: key != "other")
        topic._arrived([("first", {"n": 0}), ("other", {})], 2)
        for number in range(3 * control_topic._WAIT_AT_MOST):
            topic._arrived([("status", {"n": number}), ("gone", None)], number)
        assert len(heard._changes) <= control_topic._WAIT_AT_MOST + 2
        topic._reading = threading.current_thread()
        assert heard.poll()[-2:] == [("status", {"n": number}), ("gone", None)]
        topic._reading = None


def test_records_are_in_the_order_of_their_last_offsets() -> None:
    """So that who reads them for the first time finds the same order: the first owner of a topic owns it."""
    with ControlTopic.of(KAFKA) as topic:
        topic._arrived([("a", {"n": 1}), ("b", {"n": 2}), ("c", {"n": 3})], 3)
        topic._arrived([("a", {"n": 4}), ("c", None)], 5)
        assert list(topic.known().items()) == [("b", {"n": 2}), ("a", {"n": 4})]


def test_when_a_record_was_removed_is_known_for_a_day(monkeypatch: pytest.MonkeyPatch) -> None:
    """The keys of jobs are never used again, and a watch may live for years."""
    now = [1000.0]
    monkeypatch.setattr(control_topic.time, "monotonic", lambda: now[0])
    with ControlTopic.of(KAFKA) as topic:
        topic._first_end = 0
        topic._arrived([("status/s", {}), ("job/1", {}), ("job/1", None)], 3)
        for passed, known in ((3600.0, {"status/s", "job/1", "job/2"}), (86_000.0, {"status/s", "job/2"})):
            now[0] += passed
            topic._arrived([("job/2", {}), ("job/2", None)], topic.at + 2)
            assert topic._changed.keys() == known


class Broker:
    """A Kafka in which the topic does not exist at first."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.exists = False
        monkeypatch.setattr(topics, "Topics", lambda _: self)
        monkeypatch.setattr(store, "Reader", lambda *_, **__: self)
        monkeypatch.setattr(control_topic, "_ASKED", 0.0)
        self.at, self.polls = 0, list[Any]()

    def describe(self, names: list[str], *, confirm: bool) -> dict[str, Any]:
        return dict.fromkeys(names) if self.exists else {}

    def ends(self, name: str, partitions: int) -> list[int]:
        return [1]

    def poll(self, timeout: float) -> list[Any]:
        self.polls.append(timeout)
        if len(self.polls) == 1:
            raise ValueError("whatever it is")
        if len(self.polls) == 2:
            self.at = 1
            return [("stop/1", {"by": "task"})]
        threading.Event().wait(0.01)
        return []

    def close(self) -> None:
        pass


def test_a_topic_that_is_created_later_is_read_then(monkeypatch: pytest.MonkeyPatch) -> None:
    broker = Broker(monkeypatch)
    with ControlTopic.of(KAFKA) as topic:
        heard = topic.subscribe("stop/1".__eq__)
        assert heard.read() == {} and heard.poll() == []
        broker.exists = True
        found = list[Any]()

        def hear() -> bool:
            try:
                found.extend(heard.poll(0.1))
            except ValueError:  # the first look fails, and is not the last
                return False
            return bool(found)

        until(hear, "the request is heard")
        assert found == [("stop/1", {"by": "task"})]


def test_a_producer_that_has_failed_for_good_is_replaced(monkeypatch: pytest.MonkeyPatch) -> None:
    made = list[Any]()

    class Producer:
        def __init__(self, _: Any) -> None:
            made.append(self)

        def produce(self, *_: Any, on_delivery: Any, **__: Any) -> None:
            if len(made) == 1:
                raise confluent_kafka.KafkaException(confluent_kafka.KafkaError(confluent_kafka.KafkaError._FATAL))
            on_delivery(None, None)

        def poll(self, _: float) -> None: ...
        def flush(self, _: float) -> None: ...

    monkeypatch.setattr(confluent_kafka, "Producer", Producer)
    with ControlTopic.of(KAFKA) as topic:
        with pytest.raises(Outage, match="does not take"):
            topic.write({"status/a": {}}, wait=0)
        topic.write({"status/a": {}})
    assert len(made) == 2


def test_a_producer_that_does_not_deliver_is_replaced(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where it is asked for no more than a heartbeat now and then, for which nobody waits."""
    made, now = list[Any](), [1000.0]

    class Producer:
        def __init__(self, _: Any) -> None:
            made.append(self)
            self.answers = list[Any]()

        def produce(self, *_: Any, on_delivery: Any, **__: Any) -> None:
            self.answers.append(on_delivery)

        def poll(self, _: float) -> None:
            code = confluent_kafka.KafkaError._MSG_TIMED_OUT if len(made) == 1 else large
            while self.answers:
                self.answers.pop()(confluent_kafka.KafkaError(code), None)

        def flush(self, _: float) -> None: ...

    large = confluent_kafka.KafkaError.MSG_SIZE_TOO_LARGE
    monkeypatch.setattr(confluent_kafka, "Producer", Producer)
    monkeypatch.setattr(control_topic.time, "monotonic", lambda: now[0])
    with ControlTopic.of(KAFKA) as topic:
        for passed, producers in ((0.0, 1), (2.0, 1), (2.0, 1), (10.0, 2), (20.0, 2), (20.0, 2)):
            now[0] += passed
            topic.write({"status/a": {}}, wait=0)
            assert len(made) == producers


def test_a_topic_that_was_made_again_is_read_from_its_start_by_another_consumer(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A consumer that has read the one before may never get anything of it."""
    made, ends = list[Any](), [5]
    written = {1: [("status/a", {"n": 1}), ("snapshot/b", {}), ("snapshot/b", None)], 2: [("status/a", {"n": 2})]}

    class Reader:
        def __init__(self, *_: Any, **__: Any) -> None:
            made.append(self)
            self.at, self.mine = 0, len(made)

        def poll(self, timeout: float) -> list[Any]:
            threading.Event().wait(0.01)
            found, self.at = (written.get(self.mine, []), 6 - self.mine) if not self.at else ([], self.at)
            return found

        def close(self) -> None: ...

    monkeypatch.setattr(topics.Topics, "__init__", lambda *_: None)
    monkeypatch.setattr(topics.Topics, "describe", lambda _, names, **__: dict.fromkeys(names))
    monkeypatch.setattr(topics.Topics, "ends", lambda *_: ends)
    monkeypatch.setattr(store, "Reader", Reader)
    with ControlTopic.of(KAFKA) as topic:
        heard = topic.subscribe(lambda _: True)
        assert topic.get("status/a", now=True)[0] == {"n": 1}
        assert heard.poll() == [*written[1]]
        ends[0] = 4
        assert topic.get("status/a", now=True)[0] == {"n": 2}
        assert heard.poll() == [*written[2]] and len(made) == 2
        # also where it has more records by now than the one before had
        monkeypatch.setattr(control_topic, "_READING", 0.3)
        ends[0] = 9
        with pytest.raises(Outage, match="offset 4 of 9"):
            topic.get("status/a", now=True)
        until(lambda: len(made) == 3, "another consumer")
        # what is not read yet may be there
        with pytest.raises(Outage, match="of 9 only"):
            topic.get("status/a")


def reading(monkeypatch: pytest.MonkeyPatch, poll: Callable[[Any], list[Any]], end: list[int]) -> list[Any]:
    """The consumers that are made, of a topic that exists; ``poll`` says what they get."""
    made = list[Any]()

    class Reader:
        def __init__(self, *_: Any, **__: Any) -> None:
            made.append(self)
            self.at, self.mine = 0, len(made)

        def poll(self, timeout: float) -> list[Any]:
            threading.Event().wait(0.01)
            return poll(self)

        def close(self) -> None: ...

    monkeypatch.setattr(topics.Topics, "__init__", lambda *_: None)
    monkeypatch.setattr(topics.Topics, "describe", lambda _, names, **__: dict.fromkeys(names))
    monkeypatch.setattr(topics.Topics, "ends", lambda *_: end)
    monkeypatch.setattr(store, "Reader", Reader)
    return made


def test_who_was_away_for_long_reads_anew(monkeypatch: pytest.MonkeyPatch) -> None:
    """Kafka has no tombstone any more of what was removed meanwhile."""
    written, passed, clock = [("status/a", {"n": 1}), ("job/1", {})], [0.0], time.time
    ends = [2]

    def poll(reader: Any) -> list[Any]:
        found, reader.at = (written if reader.at < ends[0] else []), ends[0]
        return found

    made = reading(monkeypatch, poll, ends)
    monkeypatch.setattr(control_topic.time, "time", lambda: clock() + passed[0])
    with ControlTopic.of(KAFKA) as topic:
        assert topic.all(now=True) == dict(written)
        for away, known, consumers in (
            (control_topic._AWAY - 60, {"status/a": {"n": 2}, "job/1": {}}, 1),
            (control_topic._AWAY + 60, {"status/a": {"n": 3}}, 2),
        ):
            passed[0] += away
            written[:] = [("status/a", {"n": consumers + 1})]
            ends[0] += 5
            assert topic.all(now=True) == known and len(made) == consumers


def test_reading_is_given_up_only_when_nothing_moves(monkeypatch: pytest.MonkeyPatch) -> None:
    passed, clock = [0.0], time.monotonic

    def poll(reader: Any) -> list[Any]:
        reader.at = min(10, reader.at + 1)
        passed[0] += 0.4 * control_topic._READING
        return []

    monkeypatch.setattr(control_topic.time, "monotonic", lambda: clock() + passed[0])
    made = reading(monkeypatch, poll, ends := [10])
    with ControlTopic.of(KAFKA) as topic:
        topic.read_to_end()
        assert len(made) == 1
        ends[0] = 11
        with pytest.raises(Outage, match="offset 10 of 11"):
            topic.read_to_end()
