"""What is to be erased for good is: deleted rows, and settled dead letters, in the ways that the docs give."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from airflow_bottledwater.provision import redrive
from tests.support.topics import Flow, MakeFlow, Message, alter, create_topic, delete_topic, limit_records
from tests.support.waiting import until

pytestmark = pytest.mark.long

_LETTERS = "_bottledwater_dead_letters"


@pytest.fixture
def flow_statements() -> tuple[str, ...]:
    return ("CREATE TABLE a (id int PRIMARY KEY, t text)",)


def _shown(messages: list[Message]) -> bool:
    return any("secret" in str(each.value) for each in messages)


def _is_gone(read: Callable[[], list[Message]], again: Callable[[], None]) -> Callable[[], bool]:
    """Whether nothing shows it any more; otherwise there is one more record, behind which Kafka may compact the others
    (its cleaner looks each 15 seconds)."""

    def gone() -> bool:
        again()
        return not _shown(read())

    return gone


def test_a_deleted_row_is_compacted_away_behind_another_record(make_flow: MakeFlow) -> None:
    flow = make_flow(topic_config={"max.compaction.lag.ms": "1000"}, partitions=1)
    flow.execute("INSERT INTO a VALUES (1, 'secret'), (2, 'x')")
    flow.create()
    flow.snapshot()
    flow.execute("DELETE FROM a WHERE id = 1")
    flow.stream()
    assert _shown(flow.read("a"))

    def again() -> None:
        flow.execute("UPDATE a SET t = t || 'y' WHERE id = 2")
        flow.stream()

    until(_is_gone(lambda: flow.read("a"), again), "the row is gone")


def _with_a_letter(make_flow: MakeFlow) -> Flow:
    flow = make_flow(on_error="log", topic_config={"max.message.bytes": "20000"}, partitions=1)
    flow.execute("INSERT INTO a VALUES (1, 'secret' || repeat('x', 30000))")
    flow.create()
    flow.snapshot()
    assert redrive.dismiss(flow.pipeline, []) == redrive.RedriveResult(dismissed=1)
    assert _shown(flow.dead_letters())
    return flow


def test_a_settled_dead_letter_is_compacted_away_behind_another_one(make_flow: MakeFlow) -> None:
    flow = _with_a_letter(make_flow)
    alter(flow, f"{flow.pipeline.topic_prefix}.{_LETTERS}", {"max.compaction.lag.ms": "1000"})

    def again() -> None:
        flow.execute("UPDATE a SET t = repeat('x', 30001)")
        flow.stream()

    until(_is_gone(flow.dead_letters, again), "the letter is gone")


def test_the_topic_of_dead_letters_may_be_made_again_when_none_is_open(make_flow: MakeFlow) -> None:
    flow = _with_a_letter(make_flow)
    topic = f"{flow.pipeline.topic_prefix}.{_LETTERS}"
    delete_topic(flow, topic)
    create_topic(flow.pipeline.kafka, topic, partitions=1, replication=1, config={"cleanup.policy": "compact"})
    flow.execute("UPDATE a SET t = repeat('x', 30001)")
    counters = flow.stream()
    assert counters["open_dead_letters"] == 1 and len(flow.dead_letters()) == 1
    limit_records(flow, "a", 100_000)
    done = redrive.redrive(flow.pipeline)
    assert (done.published, done.failed) == (1, 0)
