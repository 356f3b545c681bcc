"""Whose is what: clusters of one name on one Kafka, tables that swap their names or are made again, servers set back in
time."""

from __future__ import annotations

import json
import shutil
import subprocess
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import psycopg
import pytest
from confluent_kafka import Producer
from confluent_kafka.admin import AdminClient
from psycopg.conninfo import conninfo_to_dict

from airflow_bottledwater.errors import BottledWaterError, Outage, PreflightError, Refused, SlotError, StateError
from airflow_bottledwater.jobs import status
from airflow_bottledwater.kafka.topics import Topics
from airflow_bottledwater.local.kafka import KafkaBroker
from airflow_bottledwater.local.postgres import PostgresServer
from airflow_bottledwater.pipeline.settings import Settings
from airflow_bottledwater.postgres.connect import connect
from airflow_bottledwater.postgres.server import identify
from airflow_bottledwater.postgres.snapshot import SnapshotExporter
from airflow_bottledwater.provision import create as creation
from airflow_bottledwater.provision import live, preflight, redrive
from airflow_bottledwater.provision.accept import accept
from airflow_bottledwater.provision.create import create
from airflow_bottledwater.provision.drop import drop, forget
from airflow_bottledwater.snapshot import driver
from airflow_bottledwater.state import control_topic, identity
from airflow_bottledwater.state.claim import read_state
from airflow_bottledwater.state.control_records import SnapshotRequest
from airflow_bottledwater.state.store import new_topic, read_records, state_topic_name
from airflow_bottledwater.stream import engine
from airflow_bottledwater.stream.start import begin
from airflow_bottledwater.verify import driver as verification
from tests.support import running
from tests.support.pipeline import Source
from tests.support.tables import look_often
from tests.support.topics import Flow, MakeFlow, assert_exactly_once_in_order, create_topic, read
from tests.support.waiting import until


def two_tables(flow: Flow) -> None:
    """``a`` with rows that say 'a', and ``b`` of the same columns with rows that say 'b' and other keys besides."""
    for name, last in (("a", 20), ("b", 10)):
        flow.execute(
            f"CREATE TABLE {name} (id int PRIMARY KEY, t text)",
            f"INSERT INTO {name} SELECT g, '{name}' FROM generate_series(1, {last}) g",
        )


SWAP = ("ALTER TABLE a RENAME TO c", "ALTER TABLE b RENAME TO a", "ALTER TABLE c RENAME TO b")
AGAIN = ("DROP TABLE a", "CREATE TABLE a (id int PRIMARY KEY, t text)", "INSERT INTO a VALUES (3, 'b'), (99, 'b')")


# ---------------------------------------------------------------------- tables
def test_a_snapshot_reads_the_table_that_was_recorded_whatever_its_name_is_now(make_flow: MakeFlow) -> None:
    flow = make_flow(tables="a", new_tables="ignore")
    two_tables(flow)
    flow.create()
    flow.execute(*SWAP)
    flow.snapshot()
    assert {m.value["t"] for m in flow.read("a")} == {"a"}
    assert len(flow.read("a")) == 20
    flow.execute("UPDATE b SET t = 'changed' WHERE id = 1", "UPDATE a SET t = 'not ours'")
    flow.stream()
    assert [m.value["t"] for m in flow.read("a")[20:]] == ["changed"]


def test_a_table_that_is_dropped_before_it_was_read_holds_nobody_up(make_flow: MakeFlow) -> None:
    flow = make_flow(tables=("a", "b"))
    two_tables(flow)
    flow.create()
    flow.execute("DROP TABLE b")
    assert flow.snapshot().rows == 20
    flow.stream()
    # one that is added to a pipeline that runs
    flow.execute("CREATE TABLE late (id int PRIMARY KEY)")
    flow.change(tables=("a", "late"))
    flow.create()
    flow.execute("DROP TABLE late", "INSERT INTO a VALUES (21, 'a')")
    flow.change(tables=("a",))
    flow.snapshot()
    flow.stream()
    assert flow.compare("a").differences == []


def test_a_renamed_table_has_its_topic_also_where_none_is_made(make_flow: MakeFlow) -> None:
    flow = make_flow(tables="a,renamed")
    two_tables(flow)
    flow.execute("CREATE TABLE renamed (id int PRIMARY KEY)")
    flow.create()
    flow.snapshot()
    flow.execute("DROP TABLE renamed", "ALTER TABLE a RENAME TO renamed")
    flow.change(tables="renamed", create_topics=False)
    preflight.run(flow.pipeline.with_(tables="b", create_topics=True))
    flow.execute("UPDATE renamed SET t = 'changed' WHERE id = 1")
    flow.stream()
    # until everything of before is published, it keeps the topic that it had
    assert [m.value["t"] for m in flow.read("a")[20:]] == ["changed"]
    assert flow.compare("renamed").equal


def test_a_rename_while_the_locks_are_taken_is_noticed(make_flow: MakeFlow, monkeypatch: pytest.MonkeyPatch) -> None:
    flow = make_flow(tables="a")
    two_tables(flow)
    flow.create()
    original = SnapshotExporter.open
    swapped = threading.Event()

    def open_after_a_swap(self: SnapshotExporter, *arguments: Any, **more: Any) -> Any:
        if not swapped.is_set():
            swapped.set()
            flow.execute(*SWAP)
        return original(self, *arguments, **more)

    monkeypatch.setattr(SnapshotExporter, "open", open_after_a_swap)
    with pytest.raises(Outage, match="Run the snapshot again"):
        flow.snapshot()
    flow.snapshot()
    assert {m.value["t"] for m in flow.read("a")} == {"a"}


@pytest.mark.some(1)
@pytest.mark.parametrize("change", [SWAP, AGAIN], ids=["swapped", "made-again"])
def test_a_topic_is_not_given_to_the_table_that_took_the_name_of_its_own(
    make_flow: MakeFlow, change: tuple[str, ...]
) -> None:
    flow = make_flow(tables="a", new_tables="ignore")
    two_tables(flow)
    flow.create()
    flow.snapshot()
    before = flow.execute("SELECT 'a'::regclass::oid")[0][0]
    flow.execute("INSERT INTO a VALUES (50, 'a')", *change)
    with pytest.raises(PreflightError, match="holds the rows of another table") as refused:
        flow.create()
    assert str(before) in str(refused.value)
    known = read_state(
        flow.pipeline, state_topic_name(flow.execute("SELECT current_database()")[0][0], flow.pipeline.slot)
    )
    assert set(known.tables) == {before}
    # the advice: drop the slot and start again
    drop(flow.pipeline, when="always")
    flow.create()
    flow.snapshot()
    flow.execute("INSERT INTO a VALUES (51, 'b')")
    flow.stream()
    assert flow.compare("a").differences == []


def test_tables_that_are_renamed_back_go_on(make_flow: MakeFlow) -> None:
    flow = make_flow(tables="a", new_tables="ignore")
    two_tables(flow)
    flow.create()
    flow.snapshot()
    flow.execute(*SWAP)
    with pytest.raises(PreflightError, match="Rename the tables back"):
        flow.create()
    flow.execute(*SWAP)
    flow.create()
    flow.execute("DELETE FROM a WHERE id > 5")
    flow.stream()
    assert flow.compare("a").differences == []


def test_tables_that_swap_their_names_swap_their_topics_behind_what_was_committed(make_flow: MakeFlow) -> None:
    flow = make_flow(tables="a,b")
    two_tables(flow)
    flow.create()
    flow.snapshot()
    flow.execute("DELETE FROM b WHERE id = 3", *SWAP, "UPDATE b SET t = 'changed' WHERE id = 1")
    flow.create()
    flow.stream()
    assert flow.read("a")[20].value["t"] == "changed" and flow.read("b")[10].op == "d"
    assert flow.compare("a").equal and flow.compare("b").equal
    flow.execute("UPDATE b SET t = 'more' WHERE id = 2", "DELETE FROM a WHERE id = 2")
    flow.stream()
    assert flow.read("b")[-1].value["t"] == "more" and flow.read("a")[-1].op == "d"


# ---------------------------------------------------------------------- clusters
@pytest.fixture
def staging(source: Source, small: Source) -> Iterator[Source]:
    """Another cluster with the same database, table and settings as the production that ``source`` is, and the same
    Kafka."""
    database = conninfo_to_dict(source.dsn)["dbname"]
    small.execute(f"CREATE DATABASE {database}")
    small.dsn = small.server.dsn(database)
    small.name = source.name
    small.execute("CREATE TABLE items (id bigint PRIMARY KEY, name text)", "INSERT INTO items VALUES (1, 'staging')")
    small.pipeline = source.pipeline.with_(postgres=small.dsn, transaction_timeout=5.0)
    yield small
    with psycopg.connect(small.server.dsn(), autocommit=True) as connection:
        connection.execute(
            "SELECT pg_drop_replication_slot(slot_name) FROM pg_replication_slots WHERE database = %s", (database,)
        )
        connection.execute(f"DROP DATABASE {database} WITH (FORCE)")


ERROR_ACTIONS: dict[str, Callable[[Source | Flow], object]] = {
    "preflight": lambda other: preflight.run(other.pipeline),
    "create": lambda other: create(other.pipeline),
    "snapshot": lambda other: driver.run(other.pipeline, running.in_threads(other.pipeline)),
    "stream": lambda other: running.run_stream(other.pipeline, bounded=True),
    "redrive": lambda other: redrive.redrive(other.pipeline),
    "drop": lambda other: drop(other.pipeline, when="always"),
    "drop-retired": lambda other: drop(other.pipeline),
    "status": lambda other: status.report(other.pipeline),
}


@pytest.mark.long
def test_nothing_that_a_copy_of_the_cluster_does_touches_the_original(source: Source, staging: Source) -> None:
    production = source.pipeline.with_(transaction_timeout=5.0)
    source.execute("INSERT INTO items VALUES (1, 'production')")
    create(production)
    driver.run(production, running.in_threads(production))
    topic = state_topic_name(conninfo_to_dict(source.dsn)["dbname"], source.name)
    stopped = threading.Event()
    errors: list[BaseException] = []

    def stream() -> None:
        try:
            running.run_stream(production, stopped=stopped)
        except BaseException as error:
            errors.append(error)

    thread = threading.Thread(target=stream, daemon=True)
    thread.start()
    try:
        claim = None
        while claim is None or claim["kind"] != "stream":
            claim = read_records(production.kafka, topic).get("claim")
        for name, act in ERROR_ACTIONS.items():
            with pytest.raises(BottledWaterError, match="belongs to the cluster with system identifier") as refused:
                act(staging)
            assert "drop-slot --when always" not in str(refused.value), name
            assert read_records(production.kafka, topic)["claim"] == claim, name
        with pytest.raises(StateError, match="is alive"):
            forget(staging.pipeline, name_of(production))
        source.execute("INSERT INTO items VALUES (2, 'production')")
    finally:
        stopped.set()
        thread.join(60)
    assert not errors
    assert running.run_stream(production, bounded=True)["published"] == 1
    # the advice: another slot name for the copy
    other = staging.pipeline.with_(slot=f"{source.name}_staging", topic_prefix=f"{source.name}_staging")
    create(other)
    assert driver.run(other, running.in_threads(other)).rows == 1
    drop(other, when="always")


PUBLISHING: dict[str, Callable[[Settings], object]] = {
    "preflight": preflight.run,
    "create": create,
    "snapshot": lambda pipeline: driver.run(pipeline, running.in_threads(pipeline)),
    "stream": lambda pipeline: running.run_stream(pipeline, bounded=True),
    "redrive": redrive.redrive,
    "verify": lambda pipeline: verification.run(pipeline, verification.in_threads(pipeline)),
}


@pytest.mark.some(1)
@pytest.mark.parametrize("other", [{"format": "json"}, {"topic_prefix": "elsewhere"}], ids=str)
def test_nothing_is_published_in_another_format_or_to_other_topics(source: Source, other: dict[str, str]) -> None:
    source.execute("INSERT INTO items VALUES (1, 'a')")
    create(source.pipeline)
    driver.run(source.pipeline, running.in_threads(source.pipeline))
    topic = state_topic_name(conninfo_to_dict(source.dsn)["dbname"], source.name)
    before = read_records(source.pipeline.kafka, topic)
    for name, act in PUBLISHING.items():
        with pytest.raises(BottledWaterError, match=f"was made with {next(iter(other))} = .* and the settings say"):
            act(source.pipeline.with_(**other))
        assert read_records(source.pipeline.kafka, topic) == before, name
    source.execute("INSERT INTO items VALUES (2, 'b')")
    assert running.run_stream(source.pipeline, bounded=True)["published"] == 1


def test_a_copy_of_the_saved_state_is_not_gone_on_with(source: Source) -> None:
    """Such as a program that mirrors topics makes in another Kafka: nothing else may show that it is another one, since
    the topics of an outbox are not compared."""
    source.execute("INSERT INTO items VALUES (1, 'a')")
    create(source.pipeline)
    driver.run(source.pipeline, running.in_threads(source.pipeline))
    topic = state_topic_name(conninfo_to_dict(source.dsn)["dbname"], source.name)
    before, topics = read_records(source.pipeline.kafka, topic), Topics(source.pipeline.kafka)
    admin = AdminClient({"bootstrap.servers": source.kafka.bootstrap})
    admin.delete_topics([topic])[topic].result()
    until(lambda: topic not in topics.names(), "the topic is gone")
    topics.make(new_topic(topic, 1))
    producer = Producer({"bootstrap.servers": source.kafka.bootstrap})
    for key, value in before.items():
        producer.produce(topic, json.dumps(value).encode(), key.encode())
    producer.flush()
    for name, act in PUBLISHING.items():
        with pytest.raises(BottledWaterError, match=r"is not the one with which slot .* but a copy of it"):
            act(source.pipeline)
        assert read_records(source.pipeline.kafka, topic) == before, name
    # as the message says
    drop(source.pipeline, when="always")
    create(source.pipeline)
    driver.run(source.pipeline, running.in_threads(source.pipeline))
    source.execute("INSERT INTO items VALUES (2, 'b')")
    assert running.run_stream(source.pipeline, bounded=True)["published"] == 1


def test_what_a_newer_version_has_recorded_is_not_passed_over(source: Source) -> None:
    create(source.pipeline)
    topic = state_topic_name(conninfo_to_dict(source.dsn)["dbname"], source.name)
    producer = Producer({"bootstrap.servers": source.kafka.bootstrap})
    producer.produce(topic, b"{}", b"hold/7")
    producer.flush()
    before = read_records(source.pipeline.kafka, topic)
    with pytest.raises(StateError, match="install that one here, too"):
        driver.run(source.pipeline, running.in_threads(source.pipeline))
    assert read_records(source.pipeline.kafka, topic) == before
    drop(source.pipeline, when="always")
    create(source.pipeline)


def name_of(pipeline: Any) -> str:
    """The whole name of a pipeline."""
    with connect(pipeline.postgres) as connection:
        return identify(connection).pipeline(pipeline.slot)


def test_the_state_of_a_cluster_that_is_gone_is_forgotten_when_it_is_named(source: Source, staging: Source) -> None:
    create(source.pipeline)
    with pytest.raises(StateError, match="--forget-cluster"):
        drop(staging.pipeline, when="always")
    here, there = name_of(staging.pipeline), name_of(source.pipeline)
    for wrong, why in ((f"42/{there.partition('/')[2]}", "has no saved state"), (here, "is not gone")):
        with pytest.raises(StateError, match=why):
            forget(staging.pipeline, wrong)
    assert "Deleted the saved state" in forget(staging.pipeline, there)
    create(staging.pipeline)
    assert driver.run(staging.pipeline, running.in_threads(staging.pipeline)).rows == 1
    drop(staging.pipeline, when="always")


def test_the_state_of_a_job_that_has_not_reported_yet_is_not_forgotten(source: Source, staging: Source) -> None:
    """Between its claim and its first status, only the claim shows that a job runs."""
    create(source.pipeline)
    driver.run(source.pipeline, running.in_threads(source.pipeline))
    claimed = begin(source.pipeline)
    stopped = threading.Event()

    def stream_later() -> None:
        time.sleep(2)
        engine.follow(source.pipeline, claimed, stopped=stopped)

    with ThreadPoolExecutor(1) as pool:
        streaming = pool.submit(stream_later)
        try:
            with pytest.raises(StateError, match="is alive"):
                forget(staging.pipeline, name_of(source.pipeline))
        finally:
            stopped.set()
        streaming.result(60)


# ---------------------------------------------------------------------- servers that were set back, or promoted
@pytest.mark.some(1)
@pytest.mark.parametrize("with_slot", [True, False], ids=["snapshot-of-the-disk", "base-backup"])
def test_nothing_that_a_promoted_copy_of_the_files_does_touches_the_original(
    kafka: KafkaBroker, tmp_path: Path, with_slot: bool
) -> None:
    """It has the system identifier of the original, and another timeline."""
    server = PostgresServer(tmp_path / "postgres", settings={"restore_command": "/bin/false"})
    copied = PostgresServer(tmp_path / "copy", settings={"restore_command": "/bin/false"})
    server.start()
    try:
        flow = Flow(server.createdb("d"), kafka, None)
        flow.execute("CREATE TABLE items (id int PRIMARY KEY)", "INSERT INTO items VALUES (1)")
        flow.create()
        flow.snapshot()
        server.stop()
        subprocess.run(["cp", "-a", server.data, copied.data], check=True)
        subprocess.run(["cp", "-a", copied.data / "PG_VERSION", copied.data / "standby.signal"], check=True)
        if not with_slot:
            shutil.rmtree(copied.data / "pg_replslot" / flow.pipeline.slot)
        server.start()
        copied.start()
        copy = Flow(copied.dsn("d"), kafka, None)
        copy.pipeline = flow.pipeline.with_(postgres=copy.dsn)
        copy.execute("SELECT pg_promote()")
        topic, stopped = state_topic_name("d", flow.pipeline.slot), threading.Event()
        with ThreadPoolExecutor(1) as pool:
            streaming = pool.submit(running.run_stream, flow.pipeline, stopped=stopped)
            try:
                claim = None
                while claim is None or claim["kind"] != "stream":
                    claim = read_records(flow.pipeline.kafka, topic).get("claim")
                for name in ("preflight", "create", "snapshot", "stream", "redrive"):
                    with pytest.raises(BottledWaterError, match="on timeline 2"):
                        ERROR_ACTIONS[name](copy)
                with pytest.raises(SlotError, match="on timeline 2"):
                    live.ask(copy.pipeline, SnapshotRequest(("items",), sweep=True))
                with pytest.raises(StateError, match="is alive"):
                    drop(copy.pipeline, when="always")
                assert read_records(flow.pipeline.kafka, topic)["claim"] == claim
                flow.execute("INSERT INTO items VALUES (2)")
            finally:
                stopped.set()
            streaming.result(60)
        # whether a copy or the server after a fail-over: only a person knows
        for name in ("create", "snapshot", "stream"):
            with pytest.raises(BottledWaterError, match="on timeline 2"):
                ERROR_ACTIONS[name](copy)
        with pytest.raises(SlotError, match="on timeline 2"):
            accept(copy.pipeline, ["items"])
        assert read_records(flow.pipeline.kafka, topic)["claim"] == claim
        flow.stream()
        assert flow.compare("items").equal
        # the advice after a fail-over
        drop(copy.pipeline, when="always")
        create(copy.pipeline)
    finally:
        server.stop()
        copied.stop()


@pytest.fixture
def twice(tmp_path: Path) -> Iterator[tuple[PostgresServer, Callable[[str], None]]]:
    """A server of which a copy can be made and put back, as it was or as a standby."""
    server = PostgresServer(tmp_path / "postgres", settings={"restore_command": "/bin/false"})
    server.start()
    kept = tmp_path / "kept"

    def turn(what: str) -> None:
        server.stop()
        if what == "keep":
            subprocess.run(["cp", "-a", server.data, kept], check=True)
        else:
            shutil.rmtree(server.data)
            subprocess.run(["cp", "-a", kept, server.data], check=True)
            if what == "as standby":
                subprocess.run(["cp", "-a", server.data / "PG_VERSION", server.data / "standby.signal"], check=True)
        server.start()

    try:
        yield server, turn
    finally:
        server.stop()


@pytest.mark.long
def test_a_server_that_was_set_back_behind_the_position_is_refused(
    kafka: KafkaBroker, twice: tuple[PostgresServer, Callable[[str], None]]
) -> None:
    server, turn = twice
    flow = Flow(server.createdb("d"), kafka, None)
    flow.execute("CREATE TABLE a (id int PRIMARY KEY, n int)")
    flow.create()
    flow.snapshot()
    flow.execute("INSERT INTO a VALUES (1, 1)")
    flow.stream()
    turn("keep")
    flow.execute("INSERT INTO a SELECT g, g FROM generate_series(2, 20000) g")
    flow.stream()
    turn("back")
    flow.execute("INSERT INTO a VALUES (2, -2)")
    with pytest.raises(SlotError, match="beyond the end of the server's WAL") as refused:
        flow.stream()
    assert "drop-slot --when always" in str(refused.value)
    drop(flow.pipeline, when="always")
    flow.create()
    flow.snapshot()
    flow.execute("UPDATE a SET n = 7 WHERE id = 1")
    flow.stream()
    assert flow.compare("a").differences == []
    assert_exactly_once_in_order(flow.read("a")[20_000:])


def test_a_promoted_copy_is_refused_before_its_first_checkpoint(
    kafka: KafkaBroker, twice: tuple[PostgresServer, Callable[[str], None]]
) -> None:
    server, turn = twice
    flow = Flow(server.createdb("d"), kafka, None, skip_snapshot=True)
    flow.execute("CREATE TABLE a (id int PRIMARY KEY, n int)")
    flow.create()
    turn("keep")
    turn("as standby")
    before = read_records(flow.pipeline.kafka, state_topic_name("d", flow.pipeline.slot))
    for act in (flow.snapshot, flow.stream):
        with pytest.raises(Outage, match="is a standby now"):
            act()
    assert read_records(flow.pipeline.kafka, state_topic_name("d", flow.pipeline.slot)) == before
    flow.execute("SELECT pg_promote()")
    with connect(flow.dsn) as connection:
        assert identify(connection).timeline == 2
    with pytest.raises(SlotError, match="on timeline 2"):
        flow.stream()


@pytest.mark.long
def test_a_running_stream_waits_for_a_standby_to_become_the_primary(
    kafka: KafkaBroker, twice: tuple[PostgresServer, Callable[[str], None]]
) -> None:
    server, turn = twice
    flow = Flow(server.createdb("d"), kafka, None, skip_snapshot=True, outage_timeout=120.0)
    flow.execute("CREATE TABLE a (id int PRIMARY KEY, n int)")
    flow.create()
    name = flow.name
    turn("keep")
    with flow.streaming() as errors:
        flow.streams()
        turn("as standby")

        def told() -> str:
            found = status.read_status(flow.pipeline, name)
            return " ".join(map(str, found.problems)) if found is not None else ""

        until(lambda: "is a standby now" in told(), "it waits", failed=errors)
        assert not errors
        flow.execute("SELECT pg_promote()")
        until(lambda: errors, "the stream ends")
    assert isinstance(errors[0], SlotError) and "on timeline 2" in str(errors[0])


# ---------------------------------------------------------------------- topics
def _theirs(flow: Flow, table: str, *, retention: str = "-1") -> str:
    """A topic of another program with the name of a table's, which has two records; returns its name."""
    topic = flow.topic(table)
    config = {"cleanup.policy": "compact" if retention == "-1" else "delete", "retention.ms": retention}
    create_topic(flow.pipeline.kafka, topic, partitions=1, replication=1, config=config)
    producer = Producer(flow.pipeline.kafka)
    for key in ("theirs", "also"):
        producer.produce(topic, json.dumps({"id": key}).encode(), json.dumps({"key": key}).encode())
    assert producer.flush() == 0
    return topic


@pytest.mark.parametrize("retention", ["-1", "600000"])
def test_a_topic_of_another_program_is_no_table_of_ours(make_flow: MakeFlow, retention: str) -> None:
    flow = make_flow(tables="a")
    two_tables(flow)
    topic = _theirs(flow, "a", retention=retention)
    with pytest.raises(PreflightError, match="no pipeline is known to have published them") as refused:
        flow.create()
    # which would delete what their producers send without a key
    assert "cleanup.policy=compact" not in str(refused.value)
    if retention != "-1":
        return
    flow.change(table_options={"a": {"topic": "of_a"}})
    flow.create()
    flow.snapshot()
    assert len(flow.read("a")) == 20 and len(read(flow.kafka, topic)) == 2
    drop(flow.pipeline, when="always")
    flow.change(table_options={}, share_topics=True)
    flow.create()
    flow.snapshot()
    assert not [m for m in flow.read("a") if m.value is None] and len(flow.read("a")) == 22


def test_a_new_table_does_not_take_the_topic_of_another_program(
    make_flow: MakeFlow, monkeypatch: pytest.MonkeyPatch
) -> None:
    look_often(monkeypatch)
    flow = make_flow(tables="*")
    two_tables(flow)
    flow.create()
    flow.snapshot()
    flow.stream()
    topic = _theirs(flow, "payments")
    with flow.streaming() as errors:
        flow.execute("CREATE TABLE payments (id int PRIMARY KEY)", "INSERT INTO payments VALUES (1)")

        def problems() -> str:
            job = flow.job
            return " ".join(str(each) for each in job.problems) if job else ""

        until(lambda: "no pipeline is known" in problems(), "the table is red", failed=errors)
        assert len(read(flow.kafka, topic)) == 2
        # as the message says
        admin = AdminClient(flow.pipeline.kafka)
        admin.delete_topics([topic])[topic].result()
        until(lambda: not problems(), "it is followed", failed=errors)
    flow.stream()
    assert flow.compare("payments").equal


def test_what_a_dropped_pipeline_has_shared_with_another_program_is_not_swept(make_flow: MakeFlow) -> None:
    flow = make_flow(tables="payments", share_topics=True)
    flow.execute("CREATE TABLE payments (id int PRIMARY KEY)", "INSERT INTO payments VALUES (1)")
    topic = _theirs(flow, "payments")
    theirs = len(read(flow.kafka, topic))
    flow.create()
    flow.snapshot()
    drop(flow.pipeline, when="always")
    flow.change(share_topics=False)
    with pytest.raises(PreflightError, match="has shared it with other programs"):
        flow.create()
    assert len(read(flow.kafka, topic)) == theirs + 1


def test_who_is_refused_a_topic_is_not_left_as_one_that_publishes_to_it(
    make_flow: MakeFlow, monkeypatch: pytest.MonkeyPatch
) -> None:
    flow = make_flow(skip_snapshot=True)
    two_tables(flow)
    other = "1/theirs/theirs"

    def late(pipeline: Settings, name: str, topics: Sequence[str], **shared: bool) -> Any:
        """The other pipeline has passed its checks at the same time, and is first."""
        identity.own(pipeline, other, topics, **shared)
        return identity.own(pipeline, name, topics, **shared)

    monkeypatch.setattr(creation, "own", late)
    with pytest.raises(Refused, match="belongs to pipeline '1/theirs/theirs'"):
        flow.create()
    records = control_topic.read(flow.pipeline.kafka)
    assert [identity.Owners(records).names(flow.topic(table)) for table in ("a", "b")] == [[other], [other]]


def test_the_topics_of_a_dropped_pipeline_are_taken_up_and_swept_by_the_next_one(make_flow: MakeFlow) -> None:
    """Also by one with another slot, as after an upgrade of the server it has another cluster."""
    flow = make_flow(tables="a")
    two_tables(flow)
    flow.create()
    flow.snapshot()
    drop(flow.pipeline, when="always")
    flow.execute("DELETE FROM a WHERE id = 7")
    flow.change(slot=f"{flow.pipeline.slot}_2")
    flow.create()
    flow.snapshot()
    assert [m.key["id"] for m in flow.read("a") if m.value is None] == [7]
    flow.stream()
    assert flow.compare("a").equal


@pytest.mark.parametrize("killed", [False, True])
@pytest.mark.long
def test_the_topic_of_a_table_that_was_let_go_can_be_taken_by_another_pipeline(
    make_flow: MakeFlow, monkeypatch: pytest.MonkeyPatch, killed: bool
) -> None:
    """Also if the job dies between both; and it comes back only when the other one has let it go, too."""
    look_often(monkeypatch)
    one = make_flow(tables="*")
    two_tables(one)
    one.create()
    one.snapshot()
    one.stream()
    one.change(tables="b")
    one.execute(f"ALTER PUBLICATION {one.pipeline.slot} DROP TABLE a", "DELETE FROM a WHERE id = 7")
    two = Flow(
        one.dsn, one.kafka, one.registry, slot=f"{one.pipeline.slot}_2", tables="a",
        topic_prefix=one.pipeline.topic_prefix,
    )  # fmt: skip
    with pytest.raises(PreflightError, match="belongs to pipeline"):
        two.create()
    if killed:
        with monkeypatch.context() as patched:
            patched.setattr(engine, "give_up", lambda *_: None)
            one.stream()
        with pytest.raises(PreflightError, match="belongs to pipeline"):
            two.create()
    one.stream()
    try:
        two.create()
        two.snapshot()
        assert [m.key["id"] for m in two.read("a") if m.value is None] == [7]
        two.stream()
        assert two.compare("a").equal
        one.change(tables="*")
        one.stream()
        said = " ".join(str(each) for each in one.job.problems) if one.job else ""
        assert f"belongs to pipeline '{two.name}'" in said
        two.execute("INSERT INTO a VALUES (100, 'x')")
        two.stream()
        assert two.compare("a").equal
    finally:
        drop(two.pipeline, when="always")
    one.execute("DELETE FROM a WHERE id = 8")
    one.stream()
    assert one.compare("a").equal and one.compare("b").equal
