"""What errors advise, followed on the situation that prints it: it mends, and nothing is destroyed."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import psycopg
import pytest
from confluent_kafka import Producer
from confluent_kafka.admin import AdminClient, NewPartitions

from airflow_bottledwater.errors import BottledWaterError, Refused, StateError
from airflow_bottledwater.kafka.topics import Topics
from airflow_bottledwater.provision import preflight
from airflow_bottledwater.provision.create import create
from airflow_bottledwater.provision.drop import drop
from airflow_bottledwater.state.store import state_topic_name
from tests.support.pipeline import Source
from tests.support.topics import Flow, MakeFlow, create_topic, delete_topic
from tests.support.waiting import until


@pytest.fixture
def flow_statements() -> tuple[str, ...]:
    return (
        "CREATE TABLE a (id int PRIMARY KEY, other int NOT NULL, n int)",
        "INSERT INTO a SELECT g, -g, g FROM generate_series(1, 50) g",
    )


def move_the_slot(flow: Flow) -> None:
    flow.execute(f"SELECT pg_replication_slot_advance('{flow.pipeline.slot}', pg_current_wal_flush_lsn())")


def drop_the_slot(flow: Flow) -> None:
    flow.execute(f"SELECT pg_drop_replication_slot('{flow.pipeline.slot}')")


def make_the_slot_again(flow: Flow) -> None:
    drop_the_slot(flow)
    flow.execute(f"SELECT pg_create_logical_replication_slot('{flow.pipeline.slot}', 'pgoutput')")


def delete_the_topic(flow: Flow) -> None:
    delete_topic(flow, flow.topic("a"))


def make_the_topic_again(flow: Flow) -> None:
    delete_the_topic(flow)
    create_topic(
        flow.pipeline.kafka, flow.topic("a"), partitions=1, replication=1, config={"cleanup.policy": "compact"}
    )


def add_partitions(flow: Flow) -> None:
    admin = AdminClient(flow.pipeline.kafka)
    topic = flow.topic("a")
    admin.create_partitions([NewPartitions(topic, 3)])[topic].result()
    until(lambda: Topics(flow.pipeline.kafka).describe([topic])[topic].partitions == 3, "the new partitions")


#: what happens to a stream that is stopped, what the error says, and whether its way out names a new topic prefix
SITUATIONS: dict[str, tuple[Callable[[Flow], None], str, bool]] = {
    "slot moved": (move_the_slot, "somebody moved it", False),
    "slot dropped": (drop_the_slot, "does not exist any more", False),
    "slot made again": (make_the_slot_again, "somebody moved it", False),
    "topic deleted": (delete_the_topic, "does not exist any more", False),
    "topic made again": (make_the_topic_again, "was deleted and made again", False),
    "partitions added": (add_partitions, "keys would move between them", True),
}


@pytest.mark.long
@pytest.mark.parametrize("situation", SITUATIONS)
def test_dropping_the_slot_and_a_new_snapshot_mend_what_they_are_advised_for(
    make_flow: MakeFlow, situation: str
) -> None:
    happens, said, new_prefix = SITUATIONS[situation]
    flow = make_flow()
    flow.create()
    flow.snapshot()
    flow.execute("UPDATE a SET n = -n WHERE id < 5", "DELETE FROM a WHERE id = 6")
    flow.stream()
    flow.execute("DELETE FROM a WHERE id = 7", "INSERT INTO a VALUES (100, 100, 100)")
    happens(flow)
    with pytest.raises(BottledWaterError, match=said) as refused:
        flow.stream()
    assert "drop" in refused.value.remedy.lower()
    assert "snapshot" in refused.value.remedy
    assert ("prefix" in refused.value.remedy) == new_prefix
    drop(flow.pipeline, when="always")
    if new_prefix:
        flow.change(topic_prefix=f"{flow.pipeline.topic_prefix}_2")
    flow.create()
    flow.snapshot()
    flow.execute("UPDATE a SET n = 5 WHERE id = 20", "DELETE FROM a WHERE id = 21")
    flow.stream()
    assert flow.compare("a").differences == []


def test_a_key_change_that_is_undone_lets_the_snapshot_go_on(make_flow: MakeFlow) -> None:
    flow = make_flow()
    flow.create()
    flow.execute("ALTER TABLE a DROP CONSTRAINT a_pkey", "ALTER TABLE a ADD PRIMARY KEY (other)")
    with pytest.raises(Refused, match="Undo the change"):
        flow.snapshot()
    flow.execute("ALTER TABLE a DROP CONSTRAINT a_pkey", "ALTER TABLE a ADD PRIMARY KEY (id)")
    flow.snapshot()
    flow.execute("DELETE FROM a WHERE id = 8")
    flow.stream()
    assert flow.compare("a").differences == []


@pytest.mark.some(1)
@pytest.mark.parametrize("adopt", [True, False], ids=["adopted", "dropped-by-hand"])
def test_a_pipeline_that_lost_its_records_begins_anew(make_flow: MakeFlow, adopt: bool) -> None:
    flow = make_flow()
    flow.create()
    flow.snapshot()
    state_topic = state_topic_name(flow.execute("SELECT current_database()")[0][0], flow.pipeline.slot)
    # another program has written to it: there is no way back from that
    producer = Producer(flow.pipeline.kafka)
    producer.produce(state_topic, b"[1]", b"foreign")
    assert not producer.flush(60)
    advice = rf"{state_topic}' is not one of ours.* stop the job and delete the topic: .*state-topics-and-lost-state"
    for fails in (flow.stream, flow.create, partial(drop, flow.pipeline, when="always")):
        with pytest.raises(BottledWaterError, match=advice):
            fails()
    delete_topic(flow, state_topic)
    flow.execute("DELETE FROM a WHERE id = 7")
    with pytest.raises(StateError, match="does not know slot"):
        flow.stream()
    with pytest.raises(BottledWaterError, match="adopt_slot"):
        create(flow.pipeline)
    with pytest.raises(BottledWaterError, match=r"was not created by this pipeline.*by hand"):
        drop(flow.pipeline.with_(adopt_slot=adopt), when="always")
    name = flow.pipeline.publication_name
    flow.execute(f"DROP PUBLICATION IF EXISTS {name}, {name}_unkeyed")
    if adopt:
        flow.change(adopt_slot=True)
    else:
        drop_the_slot(flow)
    flow.create()
    flow.snapshot()
    flow.execute("DELETE FROM a WHERE id = 8")
    flow.stream()
    assert flow.compare("a").differences == []


def test_what_is_advised_for_a_missing_right_is_the_statement_that_grants_it(source: Source) -> None:
    dsn = source.role("REPLICATION")
    pipeline = source.pipeline.with_(postgres=dsn)
    with pytest.raises(BottledWaterError) as refused:
        preflight.run(pipeline)
    assert "GRANT SELECT ON public.items" in str(refused.value)
    role = psycopg.conninfo.conninfo_to_dict(dsn)["user"]
    source.execute(f"GRANT SELECT ON public.items TO {role}")
    with pytest.raises(BottledWaterError) as still:
        preflight.run(pipeline)
    assert "GRANT SELECT" not in str(still.value)
    # the publications by whoever may make them: the statements are in the message
    statements = str(still.value).split("as the owner of the tables, run: ", 1)[1].split("\n")[0].split("; ")
    source.execute(*statements)
    preflight.run(pipeline.with_(create_publication=False))
    source.execute(f"DROP OWNED BY {role}", f"DROP ROLE {role}")


def test_a_slot_that_was_invalidated_is_mended_by_a_new_one(small: Source) -> None:
    create(small.pipeline)
    small.execute("CREATE TABLE filler (x text)")
    for _ in range(8):
        small.execute(
            "INSERT INTO filler SELECT repeat('x', 1000) FROM generate_series(1, 2000)", "SELECT pg_switch_wal()"
        )
    small.execute("CHECKPOINT")
    with pytest.raises(BottledWaterError, match="the WAL that it needs is gone") as refused:
        create(small.pipeline.with_(tables=("items", "filler"), allow_unkeyed=True))
    assert "drop-slot --when always" in str(refused.value)
    drop(small.pipeline, when="always")
    create(small.pipeline)
