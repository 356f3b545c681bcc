"""A tenant that is dropped with its tables and topics ends nobody else's pipeline, whenever that is."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest

from airflow_bottledwater.errors import TopicGone
from airflow_bottledwater.kafka.topics import Topics
from airflow_bottledwater.provision.redrive import redrive
from airflow_bottledwater.publish import session
from airflow_bottledwater.state.claim import read_state
from airflow_bottledwater.stream.publisher import StreamPublisher
from airflow_bottledwater.tables import watch
from airflow_bottledwater.verify import driver as verification
from tests.support import running
from tests.support.topics import Flow, MakeFlow, create_topic, delete_topic
from tests.support.waiting import until
from tests.support.writers import state_topic

#: what is committed to the tenant and is not published when it goes
_LAST = ("INSERT INTO tenant VALUES (2)", "INSERT INTO log VALUES (2)", "INSERT INTO stays VALUES (2)")


@pytest.fixture
def flow_statements() -> Sequence[str]:
    return (
        "CREATE TABLE stays (id int PRIMARY KEY)",
        "CREATE TABLE tenant (id int PRIMARY KEY)",
        "CREATE TABLE log (id int)",
        *(f"INSERT INTO {table} VALUES (1)" for table in ("stays", "tenant", "log")),
    )


@pytest.fixture
def flow(make_flow: MakeFlow) -> Flow:
    made = make_flow(tables="*", allow_unkeyed=True)
    made.create()
    return made


def _leave(flow: Flow) -> None:
    flow.execute("DROP TABLE tenant, log")
    for table in ("tenant", "log"):
        delete_topic(flow, flow.topic(table))


def _tables(flow: Flow) -> set[str]:
    return {each.table.name for each in read_state(flow.pipeline, state_topic(flow)).tables.values()}


def _gone(flow: Flow) -> bool:
    """Whether nobody has made the topics again."""
    return not {flow.topic("tenant"), flow.topic("log")} & set(Topics(flow.pipeline.kafka).names())


@pytest.mark.parametrize("how", ["deleted", "inside a transaction", "made again"])
def test_a_stream_that_begins_lets_go_of_them(flow: Flow, how: str) -> None:
    flow.snapshot()
    if how == "inside a transaction":
        flow.change(max_transaction_bytes=64 << 10, batch_bytes=64 << 10)
        flow.transaction("INSERT INTO stays SELECT generate_series(10, 7000)", *_LAST)
        running.stop_inside(flow.pipeline)
        reached = read_state(flow.pipeline, state_topic(flow)).position
        assert reached is not None and reached.ordinal
    else:
        flow.execute(*_LAST)
    _leave(flow)
    if how == "made again":  # by a consumer that had not been stopped, for instance
        config = {"cleanup.policy": "compact"}
        create_topic(flow.pipeline.kafka, flow.topic("tenant"), partitions=1, replication=1, config=config)
    assert redrive(flow.pipeline).published == 0
    flow.stream()
    assert _tables(flow) == {"stays"} and flow.compare("stays").equal
    assert _gone(flow) or (how == "made again" and not flow.read("tenant"))
    flow.stream()
    # one that comes later gets topics of these names
    flow.execute("CREATE TABLE tenant (id int PRIMARY KEY)", "INSERT INTO tenant VALUES (3)")
    flow.stream()
    assert [each.key for each in flow.read("tenant")] == [{"id": 3}] and flow.compare("stays").equal


def test_only_together_with_its_table(flow: Flow) -> None:
    flow.snapshot()
    delete_topic(flow, flow.topic("tenant"))
    for run in (flow.stream, lambda: verification.run(flow.pipeline, verification.in_threads(flow.pipeline))):
        with pytest.raises(TopicGone, match="tenant' does not exist any more"):
            run()
    flow.execute("DROP TABLE tenant")
    flow.stream()
    assert _tables(flow) == {"stays", "log"}


@pytest.mark.parametrize("publishing", [False, True], ids=["idle", "publishing"])
def test_a_stream_that_runs_lets_go_of_them(flow: Flow, monkeypatch: pytest.MonkeyPatch, publishing: bool) -> None:
    """Before a look at the catalog has done so: it is behind, for instance."""
    monkeypatch.setattr(watch, "LASTS", 600.0)
    flow.snapshot()
    with flow.streaming() as errors:
        flow.streams()
        if publishing:
            send, left = StreamPublisher._send, list[bool]()

            def leave(publisher: StreamPublisher, encoded: Any) -> None:
                if not left and len(encoded.records):
                    left.append(True)
                    _leave(flow)
                send(publisher, encoded)

            monkeypatch.setattr(StreamPublisher, "_send", leave)
            flow.transaction(*_LAST)
        else:
            _leave(flow)
            verified = verification.run(flow.pipeline, verification.in_threads(flow.pipeline))
            assert {each.table: each.verdict for each in verified.tables} == {
                "public.stays": "equal", "public.tenant": "dropped", "public.log": "dropped",
            }  # fmt: skip
            monkeypatch.setattr(session, "_COMPARE_AGAIN", 0.2)
        until(lambda: _tables(flow) == {"stays"}, "they are let go of", failed=errors)
        flow.execute("INSERT INTO stays VALUES (3)")
        until(lambda: flow.compare("stays").equal, "the others go on", failed=errors)
    assert not errors and _gone(flow)


def test_a_first_snapshot_goes_on_without_them(flow: Flow) -> None:
    _leave(flow)
    flow.snapshot()
    flow.stream()
    assert _tables(flow) == {"stays"} and flow.compare("stays").equal and _gone(flow)
