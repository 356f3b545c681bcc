"""Whether slot and topics are still those that the state describes."""

from __future__ import annotations

from dataclasses import replace
from unittest.mock import Mock

import pytest

from airflow_bottledwater.errors import SlotError, SlotInUse, StateError, TopicGone
from airflow_bottledwater.kafka.topics import Topic
from airflow_bottledwater.model.lsn import Position
from airflow_bottledwater.model.slot import Cluster, SlotRecord
from airflow_bottledwater.pipeline.settings import Settings
from airflow_bottledwater.postgres import catalog
from airflow_bottledwater.postgres.slot import SlotState
from airflow_bottledwater.state import identity
from airflow_bottledwater.state.identity import check_settings, check_slot, check_topic, check_topics
from airflow_bottledwater.state.pinned import Pin
from airflow_bottledwater.state.pipeline_state import PipelineState
from airflow_bottledwater.state.records import INTENT, SLOT, Intent
from tests.unit.tables.test_plan import known, table

CLUSTER = Cluster("7000", 1, "shop", 160000)
RECORD = SlotRecord("orders", "7000", 1, "shop", consistent_point=100, oldest_xid=700)
FOUND = SlotState("orders", "pgoutput", "logical", "shop", None, 200, "reserved", 0, 0, None)
KAFKA = {"bootstrap.servers": "kafka:9092"}
#: P, at or behind the slot, and before the end of the WAL
POSITION, END = Position(200, 0), 300


def test_a_slot_that_is_at_or_behind_what_was_published_is_the_one() -> None:
    check_slot(FOUND, RECORD, CLUSTER, POSITION, END)
    check_slot(replace(FOUND, confirmed=150), RECORD, CLUSTER, POSITION, END)
    # inside a transaction, and at the very end of the WAL
    check_slot(FOUND, RECORD, CLUSTER, Position(END, 5), END)


@pytest.mark.parametrize(
    ("found", "cluster", "position", "said"),
    [
        pytest.param(None, CLUSTER, POSITION, "does not exist any more", id="gone"),
        pytest.param(
            FOUND, replace(CLUSTER, system_identifier="8000"), POSITION, "This is another cluster", id="a copy"
        ),
        pytest.param(FOUND, replace(CLUSTER, timeline=2), POSITION, "is on timeline 2", id="promoted"),
        pytest.param(replace(FOUND, confirmed=201), CLUSTER, POSITION, "somebody moved it", id="moved forward"),
        pytest.param(FOUND, CLUSTER, Position(301, 0), "beyond the end of the server's WAL", id="server set back"),
        pytest.param(replace(FOUND, database="other"), CLUSTER, POSITION, "belongs to database", id="other database"),
        pytest.param(replace(FOUND, plugin="wal2json"), CLUSTER, POSITION, "not pgoutput", id="other plugin"),
        pytest.param(replace(FOUND, wal_status="lost"), CLUSTER, POSITION, "was invalidated", id="lost its WAL"),
    ],
)
def test_another_slot_or_another_server_is_refused(
    found: SlotState | None, cluster: Cluster, position: Position, said: str
) -> None:
    with pytest.raises(SlotError, match=said):
        check_slot(found, RECORD, cluster, position, END)


def test_a_server_that_was_set_back_before_a_snapshot_is_refused() -> None:
    check_slot(FOUND, RECORD, CLUSTER, POSITION, END, shown=END)
    with pytest.raises(SlotError, match="beyond the end of the server's WAL"):
        check_slot(FOUND, RECORD, CLUSTER, POSITION, END, shown=END + 1)


def test_a_copy_of_the_cluster_is_named_before_the_slot_that_it_lacks() -> None:
    """On a copy the advice to drop the slot and begin anew would be wrong."""
    with pytest.raises(SlotError, match="for a copy of it, use another slot name"):
        check_slot(None, RECORD, replace(CLUSTER, system_identifier="8000"), POSITION, END)


def test_a_slot_that_is_still_being_made_is_in_use() -> None:
    with pytest.raises(SlotInUse, match="is being created by process 42"):
        check_slot(replace(FOUND, confirmed=0, active_pid=42), RECORD, CLUSTER, POSITION, END)


TOPIC = Topic("shop.a", "id-1", 3, 1_000_000, "compact,delete", True, True)
PIN = Pin("id-1", 3, keyed=True)


def test_a_topic_that_is_as_it_was_pinned_passes() -> None:
    check_topic(KAFKA, "shop.a", TOPIC, PIN)
    check_topic(KAFKA, "shop.a", replace(TOPIC, cleanup="delete"), Pin("id-1", 3, keyed=False))
    # a topic that is no table's only has to be there
    check_topic(KAFKA, "shop._events", replace(TOPIC, id="id-2", partitions=9), None)


@pytest.mark.parametrize(
    ("found", "pin", "said"),
    [
        pytest.param(None, PIN, "does not exist any more", id="gone"),
        pytest.param(None, None, "does not exist any more.*again with one partition", id="no table's, and gone"),
        pytest.param(replace(TOPIC, id="id-2"), PIN, "was deleted and made again", id="made again"),
        pytest.param(replace(TOPIC, partitions=4), PIN, "has 4 partitions, it had 3", id="more partitions"),
        pytest.param(TOPIC, Pin("id-1", 3, keyed=False), "is compacted now", id="compacted without keys"),
    ],
)
def test_another_topic_of_the_name_is_refused(found: Topic | None, pin: Pin | None, said: str) -> None:
    with pytest.raises(StateError, match=said):
        check_topic(KAFKA, "shop.a", found, pin)


@pytest.mark.parametrize(
    ("found", "there", "expected"),
    [
        pytest.param(None, False, {2}, id="deleted"),
        pytest.param(replace(TOPIC, id="id-2"), False, {2}, id="made again"),
        pytest.param(None, True, TopicGone, id="deleted, the table is there"),
        pytest.param(replace(TOPIC, id="id-2"), True, TopicGone, id="made again, the table is there"),
        # what was committed to the table is still to be published
        pytest.param(replace(TOPIC, id="id", partitions=4), False, StateError, id="more partitions"),
    ],
)
def test_only_a_dropped_table_may_have_lost_its_topic(
    monkeypatch: pytest.MonkeyPatch, found: Topic | None, there: bool, expected: set[int] | type[StateError]
) -> None:
    present = {"a": replace(TOPIC, id="id", partitions=1)} | ({"b": found} if found else {})
    names = {1: ("public", "a"), 2: ("public", "b")} if there else {1: ("public", "a")}
    monkeypatch.setattr(identity, "Topics", Mock(return_value=Mock(describe=Mock(return_value=present))))
    monkeypatch.setattr(catalog, "names", lambda _, oids: {oid: names[oid] for oid in oids if oid in names})
    state = known(table(1, "a"), table(2, "b"))
    if isinstance(expected, set):
        assert check_topics(Mock(), settings(), state) == expected
    else:
        with pytest.raises(expected, match="b'"):
            check_topics(Mock(), settings(), state)


# ---------------------------------------------------------------------- settings with which a pipeline was made
def made(format: str, prefix: str) -> PipelineState:
    """The state of a pipeline that was made with these."""
    state = PipelineState()
    state.apply({SLOT: RECORD, INTENT: Intent("orders", "orders", 0.0, "7000", "root", format, prefix)})
    return state


def settings(prefix: str = "", format: str = "json") -> Settings:
    return Settings(postgres="host=db", slot="orders", topic_prefix=prefix, format=format)  # type: ignore[arg-type]


def test_a_pipeline_keeps_what_it_was_made_with() -> None:
    state = made("avro", "elsewhere")
    check_settings(settings("elsewhere", "avro"), state)
    with pytest.raises(StateError, match="was made with topic_prefix = elsewhere, and the settings say shop"):
        check_settings(settings("shop", "avro"), state)
    with pytest.raises(StateError, match="was made with format = avro, and the settings say json"):
        check_settings(settings("elsewhere", "json"), state)
    with pytest.raises(StateError, match="was made with publication = orders, and the settings say others"):
        check_settings(settings("elsewhere", "avro").with_(publication="others"), state)
    for name, was, other in (("envelope", "none", "debezium"), ("envelope_schema", "false", True)):
        said = f"was made with {name} = {was}, and the settings say {str(other).lower()}"
        with pytest.raises(StateError, match=said):
            check_settings(settings("elsewhere", "avro").with_(**{name: other}), state)
    # whose publications they are does not depend on whether it changes them today
    check_settings(settings("elsewhere", "avro").with_(create_publication=False), state)
    # nothing is there yet that could be contradicted
    check_settings(settings("shop"), PipelineState())
    # but for what was begun: its publications would be left behind
    begun = PipelineState({INTENT: made("avro", "elsewhere").raw[INTENT]})
    check_settings(settings("shop"), begun)
    with pytest.raises(StateError, match="was begun with publication = orders, and the settings say others"):
        check_settings(settings("shop").with_(publication="others"), begun)
