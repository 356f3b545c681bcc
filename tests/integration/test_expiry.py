"""Topics that delete old records: what that does to a late backlog, and to rows that do not change."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Any

import pytest
from confluent_kafka.admin import AdminClient, NewTopic

from airflow_bottledwater.encoding.mapping import TableMapping
from airflow_bottledwater.errors import PreflightError
from airflow_bottledwater.kafka.topics import Topics
from airflow_bottledwater.provision.create import create
from airflow_bottledwater.provision.drop import drop
from airflow_bottledwater.publish import session
from tests.support.topics import Flow, MakeFlow, alter, alter_topic
from tests.support.waiting import until

_DAY = 86_400_000


@pytest.fixture
def flow_settings() -> dict[str, Any]:
    return {"skip_snapshot": True, "allow_unkeyed": True, "tables": ("k", "u"), "xid_header": True}


@pytest.fixture
def flow_statements() -> Sequence[str]:
    return ("CREATE TABLE k (id int PRIMARY KEY, n int)", "CREATE TABLE u (n int)")


def _make(flow: Flow, table: str, **config: str) -> None:
    made = NewTopic(flow.topic(table), 1, 1, config={name.replace("_", "."): value for name, value in config.items()})
    admin = AdminClient(flow.pipeline.kafka)
    for future in admin.create_topics([made]).values():
        future.result()
    until(lambda: flow.topic(table) in Topics(flow.pipeline.kafka).names(), "the topic is there")


def _late(flow: Flow) -> tuple[int, int]:
    """Commit a row in each table, and publish it later; returns the milliseconds since 1970 of the commit and of the
    publishing."""
    flow.execute("INSERT INTO k VALUES (1, 1)", "INSERT INTO u VALUES (1)")
    committed = int(time.time() * 1000)
    time.sleep(1.5)
    published = int(time.time() * 1000)
    flow.stream()
    return committed, published


def test_a_late_backlog_is_not_old_in_a_topic_that_deletes_by_time(make_flow: MakeFlow) -> None:
    flow = make_flow(unkeyed_retention_ms=_DAY)
    flow.create()
    topics = Topics(flow.pipeline.kafka).describe([flow.topic("k"), flow.topic("u")])
    assert (topics[flow.topic("u")].timestamps, topics[flow.topic("u")].retention_ms) == ("LogAppendTime", _DAY)
    assert topics[flow.topic("k")].timestamps == "CreateTime"
    committed, published = _late(flow)
    (unkeyed,), (keyed,) = flow.read("u"), flow.read("k")
    assert unkeyed.timestamp >= published
    assert abs(int(unkeyed.time) - committed) < 1000
    assert unkeyed.xid
    assert keyed.time == ""
    assert abs(keyed.timestamp - committed) < 1000


@pytest.mark.some(1)
@pytest.mark.parametrize(
    ("config", "in_header"),
    [
        ({"cleanup_policy": "delete", "retention_ms": str(_DAY)}, True),
        ({"cleanup_policy": "delete", "retention_ms": "-1"}, False),
        ({"cleanup_policy": "delete", "retention_ms": "-1", "message_timestamp_type": "LogAppendTime"}, True),
    ],
)
def test_a_topic_that_somebody_has_made_is_taken_as_it_is(
    make_flow: MakeFlow, config: dict[str, str], in_header: bool
) -> None:
    flow = make_flow()
    _make(flow, "u", **config)
    flow.create()
    committed, published = _late(flow)
    (message,) = flow.read("u")
    assert (message.timestamp >= published) == in_header
    assert abs(int(message.time or message.timestamp) - committed) < 1000


def test_a_commit_time_that_is_too_old_for_the_broker_is_in_a_header(make_flow: MakeFlow) -> None:
    """As after a stop for longer than the cluster's log.message.timestamp.before.max.ms."""
    flow = make_flow(tables=("k",))
    flow.create()
    alter_topic(flow, "k", message_timestamp_before_max_ms="1000")
    committed, published = _late(flow)
    (message,) = flow.read("k")
    assert message.timestamp >= published and abs(int(message.time) - committed) < 1000


def test_a_retention_that_is_set_while_the_stream_runs_is_seen(
    make_flow: MakeFlow, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(session, "_COMPARE_AGAIN", 0.0)
    flow = make_flow()
    flow.create()
    with flow.streaming() as errors:
        flow.streams()
        alter_topic(flow, "u", retention_ms=str(_DAY))

        def seen() -> bool:
            flow.published("INSERT INTO u VALUES (1)")
            return bool(errors or flow.read("u")[-1].time)

        until(seen, "the commit time is in a header")
    assert not errors


_EXPIRES = r"rows that do not change would be deleted.*allow_expiry"


def _by_hand(flow: Flow) -> None:
    _make(flow, "k")  # as an early consumer makes it: with the broker's defaults


def _by_size(flow: Flow) -> None:
    _make(flow, "k", cleanup_policy="compact,delete", retention_ms="-1", retention_bytes="100000000")


def _by_setting(flow: Flow) -> None:
    flow.change(topic_config={"cleanup.policy": "compact,delete"})


@pytest.mark.some(1)
@pytest.mark.parametrize("cause", [_by_hand, _by_size, _by_setting])
def test_a_topic_that_forgets_rows_that_do_not_change_is_refused_unless_that_is_meant(
    make_flow: MakeFlow, cause: Callable[[Flow], None]
) -> None:
    flow = make_flow(tables=("k",))
    cause(flow)
    with pytest.raises(PreflightError, match=_EXPIRES) as refused:
        create(flow.pipeline)
    assert ("--add-config cleanup.policy=compact" in str(refused.value)) == (cause is not _by_setting)
    flow.change(allow_expiry=True)
    flow.create()
    committed, published = _late(flow)
    (message,) = flow.read("k")
    assert (message.timestamp >= published) == (cause is not _by_size)
    assert abs(int(message.time or message.timestamp) - committed) < 1000


def test_a_topic_that_begins_to_forget_rows_is_a_problem_of_the_running_stream(
    make_flow: MakeFlow, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(session, "_COMPARE_AGAIN", 0.0)
    flow = make_flow()
    flow.create()
    with flow.streaming() as errors:
        flow.streams()
        alter_topic(flow, "k", cleanup_policy="compact,delete", retention_ms=str(_DAY))

        def told() -> list[str]:
            flow.published("INSERT INTO u VALUES (1)")
            job = flow.job
            return [each.kind for each in job.problems] if job else []

        until(lambda: errors or told() == ["expiry"], "the status is red")
    assert not errors


def test_an_events_topic_that_forgets_sooner_than_the_rows_is_refused(make_flow: MakeFlow) -> None:
    flow = make_flow(tables=("k",))
    flow.create()
    drop(flow.pipeline, when="always")
    events, _ = TableMapping.of(flow.pipeline).service_topics
    alter(flow, events, {"retention.ms": str(_DAY)})
    with pytest.raises(PreflightError, match="the event of a TRUNCATE would expire"):
        flow.create()
    flow.change(allow_expiry=True)
    flow.create()


def test_a_topic_that_keeps_everything_takes_keyed_rows(make_flow: MakeFlow) -> None:
    flow = make_flow(tables=("k",))
    _make(flow, "k", cleanup_policy="delete", retention_ms="-1")
    flow.create()
