"""What a person can do after something went wrong: skip one position, re-drive dead letters, sweep after a lost slot,
go on without the facts; and what passes by itself."""

from __future__ import annotations

import contextlib
import functools
import json
import threading
import time
import uuid
from pathlib import Path
from typing import Any

import psycopg
import pytest
from confluent_kafka import Producer, TopicPartition
from confluent_kafka.admin import AdminClient
from psycopg.conninfo import make_conninfo

from airflow_bottledwater.backoff import Backoff
from airflow_bottledwater.errors import (
    CredentialsRefused,
    Outage,
    PreflightError,
    RecordError,
    Refused,
    SlotError,
    SlotInUse,
    StaleBatch,
    StateError,
    TakenOver,
)
from airflow_bottledwater.jobs import status
from airflow_bottledwater.kafka.topics import Topics
from airflow_bottledwater.local.kafka import KafkaBroker
from airflow_bottledwater.local.postgres import PostgresServer
from airflow_bottledwater.model.lsn import Position
from airflow_bottledwater.policy import transient
from airflow_bottledwater.postgres.snapshot import SnapshotExporter
from airflow_bottledwater.provision import letters, live, preflight, redrive
from airflow_bottledwater.provision.create import assume_complete
from airflow_bottledwater.provision.drop import drop
from airflow_bottledwater.snapshot import driver, sweep
from airflow_bottledwater.snapshot.plans import Plans
from airflow_bottledwater.state import control_topic
from airflow_bottledwater.state.claim import reached
from airflow_bottledwater.state.control_records import SnapshotRequest, owner_key
from airflow_bottledwater.state.identity import Owners
from airflow_bottledwater.state.store import state_topic_name
from airflow_bottledwater.stream import engine
from airflow_bottledwater.stream.source import ChangeSource
from airflow_bottledwater.stream.start import begin
from airflow_bottledwater.verify import driver as verification
from tests.support.topics import Flow, MakeFlow, Message, assert_exactly_once_in_order, limit_records, limit_topic
from tests.support.waiting import until


@pytest.fixture
def flow_statements() -> tuple[str, ...]:
    return ("CREATE TABLE a (id int PRIMARY KEY, t text, n int)",)


def _values(messages: list[Message]) -> list[Any]:
    return [m.value and (m.value["id"], m.value["n"]) for m in messages]


# ---------------------------------------------------------------------- one bad record
def test_the_stream_stops_before_a_bad_record_stops_there_again_and_passes_it_when_told(make_flow: MakeFlow) -> None:
    flow = make_flow(skip_snapshot=True, topic_config={"max.message.bytes": "20000"})
    flow.create()
    flow.execute("INSERT INTO a VALUES (1, 'x', 1)")
    flow.transaction("INSERT INTO a VALUES (2, 'x', 2)", "INSERT INTO a VALUES (3, repeat('x', 30000), 3)")
    flow.execute("INSERT INTO a VALUES (4, 'x', 4)", "INSERT INTO a VALUES (5, repeat('x', 30000), 5)")
    positions = []
    for _ in range(2):
        with pytest.raises(RecordError) as stopped:
            flow.stream()
        positions.append(stopped.value.position)
        assert _values(flow.read("a")) == [(1, 1)]
    assert positions[0] == positions[1]
    assert f"skip_position = {positions[0]}" in str(stopped.value)
    # only that one: the next bad record stops it again
    flow.change(skip_position=positions[0])
    with pytest.raises(RecordError) as again:
        flow.stream()
    assert again.value.position > positions[0]
    assert _values(flow.read("a")) == [(1, 1), (2, 2), (4, 4)]
    assert [letter.value["pos"] for letter in flow.dead_letters()] == [positions[0]]
    flow.change(skip_position=again.value.position)
    flow.stream()
    assert len(flow.dead_letters()) == 2


def test_a_truncate_that_stops_the_stream_can_be_passed(make_flow: MakeFlow) -> None:
    flow = make_flow(skip_snapshot=True, on_truncate="stop")
    flow.create()
    flow.execute("INSERT INTO a VALUES (1, 'x', 1)", "TRUNCATE a", "INSERT INTO a VALUES (2, 'x', 2)")
    with pytest.raises(RecordError) as stopped:
        flow.stream()
    flow.change(skip_position=stopped.value.position)
    assert flow.stream()["events"] == 1
    assert _values(flow.read("a")) == [(1, 1), (2, 2)]


def test_a_column_that_is_gone_before_its_toast_value_was_read_is_a_record_error(make_flow: MakeFlow) -> None:
    flow = make_flow(skip_snapshot=True, on_error="log")
    flow.execute("ALTER TABLE a ALTER t SET STORAGE EXTERNAL")
    flow.create()
    flow.execute("INSERT INTO a VALUES (1, repeat('x', 9000), 1), (2, 'short', 1)")
    flow.stream()
    flow.execute("UPDATE a SET n = 2", "ALTER TABLE a DROP t")
    counters = flow.stream()
    assert (counters["dead_letters"], counters["superseded"]) == (1, 0)
    assert _values(flow.read("a")) == [(1, 1), (2, 1), (2, 2)]
    assert "dropped or renamed" in flow.dead_letters()[0].value["error"]


def test_a_state_record_that_is_too_large_ends_the_snapshot_and_its_locks(make_flow: MakeFlow) -> None:
    flow = make_flow(outage_timeout=3.0)
    flow.execute(f"CREATE TABLE wide (id int PRIMARY KEY, {', '.join(f'c{uuid.uuid4().hex} text' for _ in range(60))})")
    flow.create()
    topic = state_topic_name(flow.cluster.database, flow.pipeline.slot)
    limit_topic(flow, topic, 1200)
    with pytest.raises(Refused, match=rf"topic '{topic}': the record 'plan/[0-9]+' has .* bytes.*kafka-configs.sh"):
        flow.snapshot()
    locks = "SELECT count(*) FROM pg_locks WHERE relation = 'wide'::regclass"
    until(lambda: flow.execute(locks) == [(0,)], "the locks are released")
    # the advice
    limit_topic(flow, topic, 10485760)
    flow.snapshot()


def test_the_snapshots_locks_are_watched_while_it_is_planned(
    make_flow: MakeFlow, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Kafka may be away then, say."""
    flow = make_flow(lock_queue_limit=2)
    flow.create()
    original, went_on = Plans.tasks, threading.Event()

    def tasks(self: Plans, *arguments: Any) -> Any:
        went_on.wait(60)
        return original(self, *arguments)

    def alter() -> None:
        flow.execute("ALTER TABLE a ADD more int")

    altering = threading.Thread(target=alter, daemon=True)
    with monkeypatch.context() as patch:
        patch.setattr(Plans, "tasks", tasks)
        threading.Timer(2.0, altering.start).start()
        began = time.monotonic()
        with pytest.raises(Outage, match="blocked others for 2 s: session"):
            flow.snapshot()
        assert time.monotonic() - began < 40.0
        altering.join(60)
        assert not altering.is_alive()
        went_on.set()
    flow.snapshot()
    assert flow.compare("a").differences == []


@pytest.mark.long
def test_a_password_that_is_rotated_while_a_snapshot_runs_is_a_transient_error(
    make_flow: MakeFlow, monkeypatch: pytest.MonkeyPatch
) -> None:
    flow = make_flow()
    flow.create()
    monkeypatch.setattr("airflow_bottledwater.backoff.ROTATION", 4.0)

    def refuse(self: SnapshotExporter) -> list[str]:
        raise CredentialsRefused("PostgreSQL refuses the connection.")

    monkeypatch.setattr(SnapshotExporter, "waiting_behind", refuse)
    began = time.monotonic()

    def run_lanes(_: Any) -> list[dict[str, int]]:
        time.sleep(60)
        return []

    with pytest.raises(Outage, match="had worked with these credentials") as ended:
        driver.run(flow.pipeline, run_lanes)
    assert transient(ended.value) and time.monotonic() - began > 4.0


# ---------------------------------------------------------------------- dead letters
@pytest.mark.some(1)
@pytest.mark.parametrize("portion", [1, 32 << 20])
def test_dead_letters_are_published_when_their_cause_is_mended_unless_overtaken(
    make_flow: MakeFlow, monkeypatch: pytest.MonkeyPatch, portion: int
) -> None:
    monkeypatch.setattr(letters, "_PORTION_BYTES", portion)
    flow = make_flow(on_error="log", topic_config={"max.message.bytes": "20000"}, xid_header=True)
    flow.execute("INSERT INTO a SELECT g, CASE WHEN g < 3 THEN repeat('y', 30000) END, g FROM generate_series(1, 5) g")
    flow.create()
    assert flow.snapshot().dead_letters == 2
    flow.execute(
        "UPDATE a SET t = repeat('x', 30000), n = 40 WHERE id = 4",
        "UPDATE a SET t = repeat('x', 30000), n = 50 WHERE id = 5",
        "UPDATE a SET t = 'small', n = 51 WHERE id = 5",
        "UPDATE a SET t = 'small', n = 20 WHERE id = 2",
        "UPDATE a SET t = repeat('x', 30000), id = 33 WHERE id = 3",
    )
    assert flow.stream()["dead_letters"] == 5
    assert redrive.redrive(flow.pipeline) == redrive.RedriveResult(failed=5)
    limit_records(flow, "a", 100_000)
    # the row of 1, the update of 4 and the key change are still the newest of their keys
    assert redrive.redrive(flow.pipeline) == redrive.RedriveResult(published=3, overtaken=2)
    assert redrive.redrive(flow.pipeline) == redrive.RedriveResult()
    assert flow.compare("a").differences == []
    assert_exactly_once_in_order(flow.read("a"))
    assert all(m.xid for m in flow.read("a") if m.pos)
    assert {m.value for m in flow.dead_letters()[-5:]} == {None}
    flow.execute("UPDATE a SET n = 99")
    flow.stream()
    assert flow.compare("a").differences == []


def test_a_letter_of_a_truncated_table_or_of_a_key_that_was_deleted_is_dropped(make_flow: MakeFlow) -> None:
    flow = make_flow(on_error="log", skip_snapshot=True, topic_config={"max.message.bytes": "20000"})
    flow.create()
    flow.execute(
        "INSERT INTO a VALUES (1, repeat('x', 30000), 1)",
        "DELETE FROM a",
        "INSERT INTO a VALUES (2, repeat('x', 30000), 1)",
    )
    flow.execute("TRUNCATE a")
    flow.stream()
    limit_records(flow, "a", 100_000)
    assert redrive.redrive(flow.pipeline) == redrive.RedriveResult(overtaken=2)
    assert [m.op for m in flow.read("a")] == ["d"]


@pytest.mark.long
@pytest.mark.parametrize(
    ("pipeline", "shared", "result"),
    [
        ("1/db/slot", False, redrive.RedriveResult(published=1)),
        ("", True, redrive.RedriveResult(overtaken=1)),
        ("", False, redrive.RedriveResult(overtaken=1)),
    ],
    ids=["another-source", "own-and-shared", "own"],
)
def test_a_truncate_of_another_source_overtakes_no_letter(
    make_flow: MakeFlow, pipeline: str, shared: bool, result: redrive.RedriveResult
) -> None:
    flow = make_flow(
        on_error="log", skip_snapshot=True, share_topics=shared, topic_config={"max.message.bytes": "20000"}
    )
    flow.create()
    flow.execute("INSERT INTO a VALUES (1, repeat('x', 30000), 1)")
    flow.stream()
    event = {
        "event": "truncate",
        "pipeline": pipeline or flow.name,
        "pos": f"0{'F' * 15}/00000001",
        "topics": [flow.topic("a")],
    }
    producer = Producer({"bootstrap.servers": flow.kafka.bootstrap})
    producer.produce(f"{flow.pipeline.topic_prefix}._bottledwater_events", json.dumps(event).encode(), b"p")
    assert producer.flush() == 0
    limit_records(flow, "a", 100_000)
    assert redrive.redrive(flow.pipeline) == result


@pytest.mark.long
def test_a_letter_of_a_truncated_table_without_a_key_is_dropped(make_flow: MakeFlow) -> None:
    flow = make_flow(
        on_error="log", skip_snapshot=True, allow_unkeyed=True, topic_config={"max.message.bytes": "20000"}
    )
    flow.execute("ALTER TABLE a DROP CONSTRAINT a_pkey")
    flow.create()
    flow.execute("INSERT INTO a VALUES (1, repeat('x', 30000), 1)", "TRUNCATE a")
    flow.execute("INSERT INTO a VALUES (2, repeat('x', 30000), 1)")
    flow.stream()
    limit_records(flow, "a", 100_000)
    assert redrive.redrive(flow.pipeline) == redrive.RedriveResult(published=1, overtaken=1)
    assert _values(flow.read("a")) == [(2, 1)]


@pytest.mark.long
def test_a_letter_whose_row_was_deleted_while_its_slot_was_lost_brings_no_row_back(make_flow: MakeFlow) -> None:
    flow = make_flow(on_error="log", topic_config={"max.message.bytes": "20000"})
    flow.create()
    flow.snapshot()
    flow.execute("INSERT INTO a VALUES (1, repeat('x', 30000), 1), (2, repeat('x', 30000), 1)")
    assert flow.stream()["dead_letters"] == 2
    drop(flow.pipeline, when="always")
    flow.execute("DELETE FROM a WHERE id = 1")
    flow.change(tables=("a",))
    flow.create()
    # the sweep finds no record of the key, and the new snapshot writes a letter of its own for the other row
    flow.snapshot()
    limit_records(flow, "a", 100_000)
    assert redrive.redrive(flow.pipeline) == redrive.RedriveResult(published=1, overtaken=2)
    assert flow.compare("a").differences == []


@pytest.mark.long
def test_a_snapshots_letter_is_overtaken_only_by_what_its_row_does_not_show(make_flow: MakeFlow) -> None:
    flow = make_flow(on_error="log", topic_config={"max.message.bytes": "20000"})
    flow.create()
    flow.snapshot()
    flow.execute("TRUNCATE a", "INSERT INTO a VALUES (1, 'small', 1), (2, 'small', 1)")
    flow.stream()
    flow.execute(
        f"SELECT pg_drop_replication_slot('{flow.pipeline.slot}')",
        "UPDATE a SET t = repeat('x', 30000)",
        "INSERT INTO a VALUES (3, repeat('x', 30000), 1)",
    )
    drop(flow.pipeline, when="always")
    flow.create()
    flow.damage("a", {"id": 9}, {"id": 9, "t": "not there", "n": 1})
    assert flow.snapshot().dead_letters == 3
    assert [message.key for message in flow.read("a") if message.value is None] == [{"id": 9}]
    limit_records(flow, "a", 100_000)
    # the source has the same row of 2 as before, and the topic has it behind two changes
    flow.execute("UPDATE a SET n = 2 WHERE id = 2", "UPDATE a SET n = 1 WHERE id = 2")
    flow.stream()
    assert redrive.redrive(flow.pipeline) == redrive.RedriveResult(published=2, overtaken=1)
    assert flow.compare("a").differences == []


@pytest.mark.long
def test_a_live_snapshots_letter_becomes_the_row_that_was_read_again(make_flow: MakeFlow) -> None:
    flow = make_flow(on_error="log", skip_snapshot=True)
    flow.create()
    flow.execute("INSERT INTO a VALUES (1, repeat('x', 30000), 1)", "TRUNCATE a")
    flow.execute("INSERT INTO a VALUES (1, repeat('x', 30000), 2)")
    flow.stream()
    flow.damage("a", {"id": 1}, None)
    limit_records(flow, "a", 20_000)
    asked = flow.ask("a")
    flow.stream()
    assert flow.reported(asked).dead_letters == 1
    limit_records(flow, "a", 100_000)
    assert redrive.redrive(flow.pipeline) == redrive.RedriveResult(published=1)
    last = flow.read("a")[-1]
    assert (last.pos, last.snapshot) == ("", f"{asked}/{flow.reported(asked).boundary}")
    assert flow.compare("a").differences == []


@pytest.mark.long
def test_a_letter_does_not_bring_back_what_compaction_has_forgotten_the_delete_of(make_flow: MakeFlow) -> None:
    flow = make_flow(
        on_error="log",
        skip_snapshot=True,
        allow_expiry=True,
        topic_config={"max.message.bytes": "20000", "cleanup.policy": "compact,delete"},
    )
    flow.create()
    flow.execute(
        "INSERT INTO a VALUES (1, repeat('x', 30000), 1), (2, repeat('x', 30000), 1), (3, repeat('x', 30000), 1)",
        "DELETE FROM a WHERE id = 1",
        "UPDATE a SET n = 2, t = 'small' WHERE id = 2",
    )
    assert flow.stream()["dead_letters"] == 3
    end = flow.read("a")[-1].offset + 2
    admin = AdminClient(flow.pipeline.kafka)
    admin.delete_records([TopicPartition(flow.topic("a"), 0, end)])[TopicPartition(flow.topic("a"), 0)].result()
    limit_records(flow, "a", 100_000)
    assert redrive.redrive(flow.pipeline) == redrive.RedriveResult(published=1, overtaken=2)
    assert _values(flow.read("a")) == [(3, 1)]


def test_a_letter_is_dropped_whose_row_was_published_since_as_it_is_in_the_letter(make_flow: MakeFlow) -> None:
    flow = make_flow(on_error="log", skip_snapshot=True, topic_config={"max.message.bytes": "20000"})
    flow.create()
    flow.execute("INSERT INTO a VALUES (1, repeat('x', 30000), 1)")
    assert flow.stream()["dead_letters"] == 1
    limit_records(flow, "a", 100_000)
    flow.execute("UPDATE a SET n = 2", "UPDATE a SET n = 1")
    flow.stream()
    assert redrive.redrive(flow.pipeline) == redrive.RedriveResult(overtaken=1)
    assert_exactly_once_in_order(flow.read("a"))


@pytest.mark.long
@pytest.mark.parametrize("copied", [True, False])
def test_a_letter_of_a_row_that_was_only_rewritten_since_stays(make_flow: MakeFlow, copied: bool) -> None:
    flow = make_flow(tables="p", on_error="log", skip_snapshot=not copied, topic_config={"max.message.bytes": "20000"})
    flow.execute(
        "CREATE TABLE p (id int PRIMARY KEY, price numeric(10,2), note text, doc text)",
    )
    fill = "INSERT INTO p SELECT g, 12.5, 'a', repeat('x', 30000) FROM generate_series(1, 6) g"
    if copied:
        flow.execute(fill)
    flow.create()
    if copied:
        flow.snapshot()
    else:
        flow.execute(fill)
        flow.stream()
    flow.execute(
        "UPDATE p SET note = 'b' WHERE id = 5",
        "DELETE FROM p WHERE id = 4",
        "ALTER TABLE p ALTER price TYPE numeric(12,4)",
    )
    limit_records(flow, "p", 100_000)
    # of 4 and 5 it is known that they have changed
    assert redrive.redrive(flow.pipeline) == redrive.RedriveResult(failed=4, overtaken=2)
    flow.stream()
    flow.ask("p")
    flow.stream()
    assert redrive.redrive(flow.pipeline) == redrive.RedriveResult(overtaken=4)
    assert flow.compare("p").differences == []


@pytest.mark.long
@pytest.mark.parametrize(
    "alter",
    [
        "ALTER TABLE p ALTER at TYPE timestamp(0)",
        "ALTER TABLE p ALTER code TYPE char(20)",
        "ALTER TABLE p DROP n, ADD n int DEFAULT 8",
        "ALTER TYPE pair ADD ATTRIBUTE c int",
        "ALTER TYPE mood RENAME VALUE 'sad' TO 'blue'",
    ],
)
def test_whatever_rewrites_a_row_is_no_change_of_it(make_flow: MakeFlow, alter: str) -> None:
    flow = make_flow(tables="p", on_error="log", skip_snapshot=True, topic_config={"max.message.bytes": "20000"})
    flow.execute(
        "CREATE TYPE pair AS (a int, b int)",
        "CREATE TYPE mood AS ENUM ('sad', 'ok')",
        "CREATE TABLE p (id int PRIMARY KEY, at timestamp(6), code char(10), n int, kind pair[], mood mood, doc text)",
    )
    flow.create()
    flow.execute(
        "INSERT INTO p VALUES (1, '2026-01-01 00:00:00.25', 'a', 7, ARRAY[ROW(1, 2)::pair], 'sad', repeat('x', 30000))"
    )
    assert flow.stream()["dead_letters"] == 1
    flow.execute(alter)
    limit_records(flow, "p", 100_000)
    assert redrive.redrive(flow.pipeline) == redrive.RedriveResult(failed=1)


@pytest.mark.long
def test_a_letter_of_a_row_that_has_changed_since_is_dropped_and_the_change_follows(make_flow: MakeFlow) -> None:
    flow = make_flow(on_error="log", skip_snapshot=True, topic_config={"max.message.bytes": "20000"})
    flow.create()
    flow.execute("INSERT INTO a VALUES (1, repeat('x', 30000), 1), (2, repeat('x', 30000), 1)")
    assert flow.stream()["dead_letters"] == 2
    flow.execute("UPDATE a SET n = 2 WHERE id = 1", "DELETE FROM a WHERE id = 2")
    limit_records(flow, "a", 100_000)
    assert redrive.redrive(flow.pipeline) == redrive.RedriveResult(overtaken=2)
    flow.stream()
    assert flow.compare("a").differences == []


def test_dead_letters_are_not_touched_while_the_stream_runs(make_flow: MakeFlow) -> None:
    flow = make_flow(skip_snapshot=True)
    flow.create()
    with flow.streaming() as errors:
        until(lambda: getattr(status.report(flow.pipeline).slot, "active_pid", None), "the stream holds its slot")
        with pytest.raises(SlotInUse, match="Stop the stream first"):
            redrive.redrive(flow.pipeline)
    assert not errors


# ---------------------------------------------------------------------- lost slot, lost facts
def test_after_a_lost_slot_a_snapshot_sweeps_what_the_source_no_longer_has(
    make_flow: MakeFlow, monkeypatch: pytest.MonkeyPatch
) -> None:
    flow = make_flow(partitions=3)
    flow.execute("INSERT INTO a SELECT g, 'x', g FROM generate_series(1, 50) g")
    flow.create()
    flow.snapshot()
    flow.execute("DELETE FROM a WHERE id = 50")
    flow.stream()
    flow.execute(
        f"SELECT pg_drop_replication_slot('{flow.pipeline.slot}')",
        "DELETE FROM a WHERE id % 5 = 0",
        "UPDATE a SET n = -1 WHERE id = 1",
    )
    with pytest.raises(SlotError, match="does not exist any more"):
        flow.stream()
    drop(flow.pipeline, when="always")
    flow.create()
    locks = "SELECT 1 FROM pg_locks WHERE relation = 'a'::regclass AND mode = 'AccessShareLock'"

    def swept(*arguments: Any) -> int:
        # an application that alters the table does not wait for it
        until(lambda: not flow.execute(locks), "the snapshot's locks are gone")
        return original(*arguments)

    original = sweep.sweep
    monkeypatch.setattr(sweep, "sweep", swept)
    flow.snapshot()
    assert flow.compare("a").differences == []
    tombstones = [m.key["id"] for m in flow.read("a") if m.value is None]
    assert sorted(tombstones) == sorted([50, *range(5, 50, 5)])
    flow.execute("UPDATE a SET n = 7")
    flow.stream()
    assert flow.compare("a").differences == []


def test_a_topic_that_others_share_is_not_swept(make_flow: MakeFlow) -> None:
    flow = make_flow(share_topics=True)
    flow.execute("INSERT INTO a SELECT g, 'x', g FROM generate_series(1, 5) g")
    flow.create()
    flow.snapshot()
    drop(flow.pipeline, when="always")
    flow.execute("DELETE FROM a WHERE id = 5")
    flow.create()
    flow.snapshot()
    assert not [m for m in flow.read("a") if m.value is None]


@pytest.mark.long
def test_nothing_removes_the_keys_of_another_pipeline_from_a_topic_that_is_shared(
    make_flow: MakeFlow, kafka: KafkaBroker, postgres: PostgresServer
) -> None:
    """Neither of both: the first one does not say that it shares its topics."""
    one = make_flow()
    dsn = postgres.createdb(f"other_{uuid.uuid4().hex[:8]}")
    two = Flow(dsn, kafka, None, tables="a", topic_prefix=one.pipeline.topic_prefix, share_topics=True)
    two.execute("CREATE TABLE a (id bigint PRIMARY KEY, t text, n int)")
    try:
        for flow, first in ((one, 1), (two, 101)):
            flow.execute(f"INSERT INTO a SELECT g, 'x', g FROM generate_series({first}, {first + 9}) g")
            flow.create()
            flow.snapshot()
            flow.stream()
        for flow in (one, two):
            with pytest.raises(Refused, match=r"sweep.*is shared with other pipelines"):
                live.ask(flow.pipeline, SnapshotRequest(("a",), sweep=True))
            with pytest.raises(Refused, match=r"verified.*is shared"):
                verification.run(flow.pipeline, verification.in_threads(flow.pipeline))
        # the shared topic is lost, and made again: until both have started anew, nobody knows who writes to the topic
        names = [one.name, two.name]
        control_topic.write(one.pipeline.kafka, {owner_key(one.topic("a"), each): None for each in names})
        with pytest.raises(
            Refused, match=r"sweep.*is shared with others, perhaps .*recorded again when its job starts"
        ):
            live.ask(one.pipeline, SnapshotRequest(("a",), sweep=True))
        for flow in (two, one):
            preflight.run(flow.pipeline)
            flow.stream()
        assert set(Owners(control_topic.read(one.pipeline.kafka)).names(one.topic("a"))) == set(names)
        with pytest.raises(Refused, match=r"sweep.*is shared with other pipelines"):
            live.ask(one.pipeline, SnapshotRequest(("a",), sweep=True))
        two.execute("DROP TABLE a", "CREATE TABLE a (id bigint PRIMARY KEY, t text, n int)")
        two.stream()
        # after a lost slot, the other one owns the topic
        drop(one.pipeline, when="always")
        one.execute("DELETE FROM a WHERE id = 5")
        with pytest.raises(PreflightError, match="set share_topics"):
            one.create()
        one.change(share_topics=True)
        one.create()
        one.snapshot()
        one.stream()
        assert not [m for m in one.read("a") if m.value is None]
    finally:
        drop(two.pipeline, when="always")


@pytest.mark.long
def test_dead_letters_of_another_pipeline_in_a_shared_topic_are_left_alone(
    make_flow: MakeFlow, kafka: KafkaBroker, postgres: PostgresServer
) -> None:
    """The first one knows where it begins in the topic, and does not say that it shares it."""
    large = "repeat('x', 30000)"
    one = make_flow(on_error="log", skip_snapshot=True, topic_config={"max.message.bytes": "20000"})
    dsn = postgres.createdb(f"other_{uuid.uuid4().hex[:8]}")
    two = Flow(
        dsn, kafka, None, tables="a", topic_prefix=one.pipeline.topic_prefix,
        share_topics=True, on_error="log", skip_snapshot=True,
    )  # fmt: skip
    two.execute("CREATE TABLE a (id bigint PRIMARY KEY, t text, n int)")
    try:
        for flow, rows in (
            (one, f"(1, {large}, 1), (2, {large}, 2)"),
            (two, f"(101, {large}, 101), (2, '', 102)"),
        ):
            flow.create()
            flow.execute(f"INSERT INTO a VALUES {rows}")
            flow.stream()
        assert [letter.value["pipeline"] for letter in one.dead_letters()] == [one.name, one.name, two.name]
        limit_records(one, "a", 100_000)
        # of key 2, the other one has a higher position, which says nothing
        for flow, failed in ((one, 1), (two, 0)):
            assert redrive.redrive(flow.pipeline) == redrive.RedriveResult(published=1, failed=failed)
        assert _values(one.read("a")) == [(2, 102), (1, 1), (101, 101)]
    finally:
        drop(two.pipeline, when="always")


@pytest.mark.long
def test_without_its_facts_a_slot_goes_on_at_the_users_word(make_flow: MakeFlow) -> None:
    flow = make_flow()
    flow.execute("INSERT INTO a VALUES (1, 'x', 1)")
    flow.create()
    flow.snapshot()
    flow.execute("UPDATE a SET n = 2", "UPDATE a SET n = 3")
    flow.stream()
    last = Position.parse(flow.read("a")[-1].pos)
    with pytest.raises(StateError, match="knows slot"):
        assume_complete(flow.pipeline, last)
    database = flow.execute("SELECT current_database()")[0][0]
    admin = AdminClient(flow.pipeline.kafka)
    topic = state_topic_name(database, flow.pipeline.slot)
    admin.delete_topics([topic])[topic].result()
    until(lambda: topic not in Topics(flow.pipeline.kafka).names(), "the topic is gone")
    flow.execute("UPDATE a SET n = 4")
    with pytest.raises(StateError, match="does not know slot"):
        flow.stream()
    with pytest.raises(SlotError, match="changes between would be missing"):
        assume_complete(flow.pipeline, Position(1))
    confirmed = flow.execute(
        "SELECT (confirmed_flush_lsn - '0/0')::bigint FROM pg_replication_slots WHERE slot_name = "
        f"'{flow.pipeline.slot}'"
    )
    assume_complete(flow.pipeline, max(last, Position(confirmed[0][0])))
    flow.stream()
    messages = flow.read("a")
    assert [m.value["n"] for m in messages] == [1, 2, 3, 4]
    assert_exactly_once_in_order(messages)


# ---------------------------------------------------------------------- what passes by itself
def test_a_second_attempt_of_a_claimed_stream_goes_on_where_the_first_came_to(make_flow: MakeFlow) -> None:
    flow = make_flow(skip_snapshot=True)
    flow.create()
    flow.execute("INSERT INTO a VALUES (1, 'x', 1)")
    start = begin(flow.pipeline)
    assert engine.follow(flow.pipeline, start, bounded=True)["published"] == 1
    flow.execute("INSERT INTO a VALUES (2, 'x', 2)")
    assert engine.follow(flow.pipeline, start, bounded=True)["published"] == 2
    assert _values(flow.read("a")) == [(1, 1), (2, 2)]


def test_an_attempt_that_another_one_has_overtaken_ends_and_blames_nobody(make_flow: MakeFlow) -> None:
    flow = make_flow(skip_snapshot=True)
    flow.create()
    flow.execute("INSERT INTO a VALUES (1, 'x', 1)")
    start = begin(flow.pipeline)
    assert engine.follow(flow.pipeline, start, bounded=True)["published"] == 1
    # an executor that was thought lost went on and confirmed; this attempt had read P before
    state_of = functools.partial(reached, flow.pipeline, start.state_topic, start.job)
    late = ChangeSource(flow.pipeline, start.state, start.position, Backoff(5), state_of)
    with pytest.raises(StaleBatch, match="Another attempt of this job") as overtaken:
        late.next(5)
    assert transient(overtaken.value)
    flow.execute("INSERT INTO a VALUES (2, 'x', 2)")
    assert engine.follow(flow.pipeline, start, bounded=True)["published"] == 2
    # where nobody of ours did it, somebody else has
    flow.execute(
        "INSERT INTO a VALUES (3, 'x', 3)",
        f"SELECT pg_replication_slot_advance('{flow.pipeline.slot}', pg_current_wal_flush_lsn())",
    )
    with pytest.raises(SlotError, match="somebody moved it"):
        flow.stream()


def test_an_idle_job_that_has_lost_its_slot_to_another_one_ends(make_flow: MakeFlow) -> None:
    """The other one has ended its walsender, and reads from the slot by the time it connects again."""
    flow = make_flow(skip_snapshot=True)
    flow.create()
    first = begin(flow.pipeline)
    state_of = functools.partial(reached, flow.pipeline, first.state_topic, first.job)
    idle = ChangeSource(flow.pipeline, first.state, first.position, Backoff(30), state_of)
    second = begin(flow.pipeline)
    theirs = ChangeSource(flow.pipeline, second.state, second.position, Backoff(5))
    with contextlib.closing(idle), contextlib.closing(theirs):
        assert theirs.next(0.1) is None
        with pytest.raises(TakenOver, match="The slot was taken over by"):
            idle.next(0.1)


def test_a_password_that_is_rotated_while_the_stream_runs_is_taken_up_at_the_next_reconnect(
    kafka: KafkaBroker, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with PostgresServer(tmp_path / "postgres") as server:
        dsn = server.createdb("rotated")
        with psycopg.connect(dsn, autocommit=True) as connection:
            connection.execute("CREATE ROLE cdc LOGIN REPLICATION PASSWORD 'first'")
            connection.execute("CREATE TABLE a (id int PRIMARY KEY, t text, n int, many int[])")
            connection.execute("GRANT SELECT ON a TO cdc")
            connection.execute("GRANT CREATE ON DATABASE rotated TO cdc")
            connection.execute("ALTER TABLE a OWNER TO cdc")
            hba = Path(connection.execute("SHOW hba_file").fetchone()[0])  # type: ignore[index]
            hba.write_text("host all,replication cdc 127.0.0.1/32 scram-sha-256\n" + hba.read_text())
            connection.execute("SELECT pg_reload_conf()")
            passwords = tmp_path / "pgpass"
            passwords.write_text("*:*:*:cdc:first\n")
            passwords.chmod(0o600)
            flow = Flow(make_conninfo(dsn, user="cdc", passfile=str(passwords)), kafka, None, skip_snapshot=True)
            flow.create()
            with flow.streaming() as errors:
                connection.execute("INSERT INTO a VALUES (1, 'x', 1)")
                until(lambda: status.report(flow.pipeline).counters["published"] == 1, "the first change")
                connection.execute("ALTER ROLE cdc PASSWORD 'second'")
                # an array's dimensions are looked up again
                connection.execute("ANALYZE a")
                connection.execute("INSERT INTO a VALUES (2, 'x', 2)")
                time.sleep(2)
                assert not errors
                passwords.write_text("*:*:*:cdc:second\n")
                until(lambda: status.report(flow.pipeline).counters["published"] == 2, "the second change")
            assert not errors
            assert "Its changes are left out" not in caplog.text
            # at a start it is refused at once
            passwords.write_text("*:*:*:cdc:third\n")
            with pytest.raises(CredentialsRefused, match="authentication failed"):
                flow.stream()
            passwords.write_text("*:*:*:cdc:second\n")
            drop(flow.pipeline, when="always")
            assert _values(flow.read("a")) == [(1, 1), (2, 2)]
