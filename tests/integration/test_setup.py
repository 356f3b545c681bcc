"""Making and dropping slot, publications, topics and records: again, after a crash, and while others are at work."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import closing, contextmanager
from dataclasses import replace
from typing import Any

import psycopg
import pytest
from confluent_kafka import Producer
from confluent_kafka.admin import AdminClient, ConfigResource, ResourceType
from psycopg.conninfo import conninfo_to_dict

import airflow_bottledwater.provision.create as creation
from airflow_bottledwater.backoff import Backoff
from airflow_bottledwater.errors import BottledWaterError, Outage, PreflightError, Refused, SlotError, StateError
from airflow_bottledwater.kafka.topics import Topics
from airflow_bottledwater.model.lsn import Position, parse_lsn
from airflow_bottledwater.pipeline.settings import SETTINGS, Settings
from airflow_bottledwater.postgres import coverage, publication, slot
from airflow_bottledwater.postgres.connect import Connection, connect
from airflow_bottledwater.postgres.replication import ReplicationStream
from airflow_bottledwater.postgres.server import end_of_wal, identify
from airflow_bottledwater.provision import drop as drop_module
from airflow_bottledwater.provision import preflight, redrive
from airflow_bottledwater.provision.accept import accept
from airflow_bottledwater.provision.create import create
from airflow_bottledwater.provision.drop import drop
from airflow_bottledwater.snapshot import driver
from airflow_bottledwater.state import control_topic, saved, store
from airflow_bottledwater.state.claim import Claim, read_state
from airflow_bottledwater.state.control_records import encode, status_key
from airflow_bottledwater.state.identity import check_slot, check_topics
from airflow_bottledwater.state.pipeline_state import PipelineState
from airflow_bottledwater.state.records import INTENT, SLOT, Intent
from tests.support.pipeline import Source, refused, refuses
from tests.support.running import in_threads, run_stream
from tests.support.status import status_of
from tests.support.waiting import until


def known(source: Source) -> PipelineState:
    """What is recorded."""
    return read_state(source.pipeline, store.state_topic_name(conninfo_to_dict(source.dsn)["dbname"], source.name))


def seen(source: Source, text: str) -> bool:
    """Whether the slot streams a change with this text."""
    return any(text.encode() in change for change in source.changes())


@contextmanager
def session(source: Source, name: str = "") -> Iterator[psycopg.Connection[tuple[Any, ...]]]:
    """A session that has a transaction id, and holds it until it commits."""
    with psycopg.connect(source.dsn, application_name=name or "test") as connection:
        connection.execute("SELECT pg_current_xact_id()")
        yield connection


def blocked_by(source: Source, connection: psycopg.Connection[tuple[Any, ...]]) -> bool:
    """Whether somebody waits for this session's transaction."""
    return bool(
        source.execute(
            f"SELECT 1 FROM pg_stat_activity WHERE {connection.info.backend_pid} = ANY (pg_blocking_pids(pid))"
        )
    )


# ---------------------------------------------------------------------- create


def test_what_is_made_is_recorded(source: Source) -> None:
    source.execute("CREATE TABLE log (line text)")
    pipeline = source.pipeline.with_(tables=("items", "log"), allow_unkeyed=True, partitions=3)
    before = parse_lsn(source.execute("SELECT pg_current_wal_lsn()::text")[0][0])
    record = create(pipeline)
    recorded = known(source)
    assert recorded.slot == record
    assert record.consistent_point > before
    assert source.execute(
        f"SELECT confirmed_flush_lsn::text FROM pg_replication_slots WHERE slot_name = '{source.name}'"
    ) == [(f"{record.consistent_point >> 32:X}/{record.consistent_point & 0xFFFFFFFF:X}",)]
    assert record.oldest_xid < source.execute("SELECT pg_current_xact_id()::text::bigint")[0][0]
    pinned = {p.topic: p for p in recorded.tables.values()}
    topics = Topics(pipeline.kafka).describe(list(pinned))
    assert {name: (t.partitions, t.cleanup, t.id) for name, t in topics.items()} == {
        f"{source.name}.items": (3, "compact", pinned[f"{source.name}.items"].topic_id),
        f"{source.name}.log": (3, "delete", pinned[f"{source.name}.log"].topic_id),
    }
    of_items = ConfigResource(ResourceType.TOPIC, f"{source.name}.items")
    admin = AdminClient(pipeline.kafka)
    (properties,) = admin.describe_configs([of_items]).values()
    assert properties.result()["delete.retention.ms"].value == str(7 * 86400 * 1000)
    assert pinned[f"{source.name}.log"].key_schema == 0
    assert all(p.oldest_xid == record.oldest_xid and p.value_schema for p in pinned.values())
    assert not recorded.complete


def test_whoever_comes_later_needs_the_name_and_the_connections_only(
    source: Source, caplog: pytest.LogCaptureFixture
) -> None:
    made = source.pipeline.with_(on_error="log", outage_timeout=77, topic_config={"retention.ms": "5000"})
    secrets = {name: getattr(made, name) for name, setting in SETTINGS.items() if setting.secret}
    bare = Settings.of(**secrets, slot=made.slot)
    assert saved.completed(bare, given=()) == bare
    with pytest.raises(StateError, match="There is no pipeline"):
        saved.completed(bare, given=(), exists=True)
    # each verification has its own of these
    create(made.with_(allow_unverified=True, verify_sample=0.5))
    assert saved.completed(bare, given=()) == made
    assert saved.completed(bare.with_(on_error="exit"), given={"on_error"}) == made.with_(on_error="exit")
    assert "password" not in str(known(source).raw["settings"]) and "postgres" not in str(known(source).raw["settings"])
    # a start with other settings, and one that takes tables in
    driver.run(made, in_threads(made))
    made = made.with_(outage_timeout=78)
    run_stream(made, bounded=True)
    assert "Setting outage_timeout is 78.0 now; at the last start it was 77.0." in caplog.text
    source.execute("CREATE TABLE later (id int PRIMARY KEY)")
    run_stream(made, bounded=True)
    assert saved.completed(bare, given=()) == made


def test_creating_again_changes_nothing(source: Source) -> None:
    record = create(source.pipeline)
    source.execute("INSERT INTO items VALUES (1, 'one')")
    before = source.picture()
    assert create(source.pipeline) == record
    assert source.picture() == before


def test_unkeyed_tables_have_a_publication_of_their_own_and_no_change_fails(source: Source) -> None:
    source.execute(
        "CREATE TABLE whole (id int, name text)",
        "ALTER TABLE whole REPLICA IDENTITY FULL",
        "CREATE TABLE log (id int, name text)",
        "CREATE TABLE nothing (id int PRIMARY KEY, name text)",
        "ALTER TABLE nothing REPLICA IDENTITY NOTHING",
        "CREATE TABLE late (id int PRIMARY KEY DEFERRABLE, name text)",
        "CREATE TABLE other (id int NOT NULL UNIQUE, name text)",
        "ALTER TABLE other REPLICA IDENTITY USING INDEX other_id_key",
        "CREATE TABLE parted (id int PRIMARY KEY, name text) PARTITION BY RANGE (id)",
        "CREATE TABLE parted_1 PARTITION OF parted FOR VALUES FROM (0) TO (10)",
    )
    create(source.pipeline.with_(tables=(), allow_unkeyed=True, partitioned_tables="leaves"))
    published = source.execute(
        "SELECT pubname, array_agg(tablename::text ORDER BY tablename) FROM pg_publication_tables GROUP BY 1 ORDER BY 1"
    )
    assert published == [
        (source.name, ["items", "other", "parted_1", "whole"]),
        (f"{source.name}_unkeyed", ["late", "log", "nothing"]),
    ]
    for table in ("items", "whole", "log", "nothing", "late", "other", "parted"):
        source.execute(
            f"INSERT INTO {table} VALUES (1, 'new {table}')",
            f"UPDATE {table} SET name = 'changed {table}'",
            f"UPDATE {table} SET id = 2",
            f"DELETE FROM {table}",
            f"TRUNCATE {table}",
        )
        assert seen(source, f"new {table}")
        assert seen(source, f"changed {table}") == (table not in ("log", "nothing", "late"))


def test_a_pipeline_without_unkeyed_tables_has_both_publications(source: Source) -> None:
    create(source.pipeline)
    assert source.execute("SELECT pubname FROM pg_publication ORDER BY 1") == [
        (source.name,),
        (f"{source.name}_unkeyed",),
    ]
    source.execute("INSERT INTO items VALUES (1, 'one')")
    assert seen(source, "one")


class Killed(BaseException):
    """As kill -9 would end it: nothing of ours handles it."""


@pytest.mark.some(2)
@pytest.mark.parametrize("after", ["intent", "publications", "slot", "topics"])
def test_a_killed_creation_is_taken_up(source: Source, monkeypatch: pytest.MonkeyPatch, after: str) -> None:
    module, name = {
        "intent": (creation.publication, "create"),
        "publications": (creation.slot, "create"),
        "slot": (creation.slot, "fresh_xid"),
        "topics": (Claim, "write"),
    }[after]
    usual = getattr(module, name)

    def killed(*args: object, **options: object) -> object:
        if after == "topics" and SLOT not in args[1]:  # type: ignore[operator]
            return usual(*args, **options)
        raise Killed

    with monkeypatch.context() as patch, pytest.raises(Killed):
        patch.setattr(module, name, killed)
        create(source.pipeline)
    assert known(source).slot is None
    assert known(source).intent is not None
    there = source.execute(f"SELECT 1 FROM pg_replication_slots WHERE slot_name = '{source.name}'")
    assert bool(there) == (after in ("slot", "topics"))
    source.execute("INSERT INTO items VALUES (1, 'between')")
    record = create(source.pipeline)
    assert known(source).slot == record
    assert len(known(source).tables) == 1
    assert record.consistent_point == slot_state(source).confirmed
    source.execute("INSERT INTO items VALUES (2, 'later')")
    assert seen(source, "later")


def test_no_publication_of_a_creation_that_was_begun_is_left_behind(
    source: Source, monkeypatch: pytest.MonkeyPatch
) -> None:
    def killed(*_: object, **__: object) -> object:
        raise Killed

    with monkeypatch.context() as patch, pytest.raises(Killed):
        patch.setattr(creation.slot, "create", killed)
        create(source.pipeline)
    named = source.pipeline.with_(publication=f"{source.name}_other")
    with pytest.raises(PreflightError, match=f"was begun with publication = {source.name}, and the settings say"):
        create(named)
    drop(named, when="always")
    assert not source.execute("SELECT 1 FROM pg_publication")
    create(named)
    assert source.execute("SELECT pubname FROM pg_publication ORDER BY 1") == [
        (f"{source.name}_other",),
        (f"{source.name}_other_unkeyed",),
    ]


WORK: dict[str, Callable[[Settings], object]] = {
    "snapshot": lambda pipeline: driver.run(pipeline, in_threads(pipeline)),
    "stream": lambda pipeline: run_stream(pipeline, bounded=True),
    "redrive": redrive.redrive,
    "accept": lambda pipeline: accept(pipeline, ["*"]),
}


@pytest.mark.some(1)
@pytest.mark.parametrize("work", WORK)
def test_a_mistyped_slot_leaves_nothing_behind(source: Source, work: str) -> None:
    """No command would remove its state topic, or its status."""
    create(source.pipeline)
    typo, before = source.pipeline.with_(slot=f"{source.name}x"), Topics(source.pipeline.kafka).names()
    with pytest.raises(StateError, match="does not know slot"):
        WORK[work](typo)
    assert Topics(source.pipeline.kafka).names() == before
    # of one that was dropped, only the claim stays
    drop(source.pipeline, when="always")
    with pytest.raises(StateError, match="does not know slot"):
        WORK[work](source.pipeline)
    assert not [
        key for key in control_topic.read(source.pipeline.kafka) if key.startswith("status/") and source.name in key
    ]


def slot_state(source: Source) -> slot.SlotState:
    """The slot, which must exist."""
    with connect(source.dsn) as connection:
        found = slot.state(connection, source.name)
    assert found is not None
    return found


def test_a_slot_of_our_intent_that_was_made_by_hand_is_taken_up(source: Source) -> None:
    with connect(source.dsn) as connection:
        cluster = identify(connection)
    claim = Claim(source.pipeline, cluster, "create", Backoff(10))
    claim.write({INTENT: Intent(source.name, source.name, time.time(), "", "root", "json", "")})
    claim.close()
    source.execute(
        f"SELECT pg_create_logical_replication_slot('{source.name}', 'pgoutput')",
        "INSERT INTO items VALUES (1, 'before')",
    )
    with session(source) as running:
        running.execute("INSERT INTO items VALUES (2, 'running')")
        refused_in_time = source.pipeline.with_(create_slot_timeout=0.5)
        with pytest.raises(Outage, match=f"still run after .* s: session {running.info.backend_pid} "):
            create(refused_in_time)
        running.commit()
    record = create(source.pipeline)
    assert record.consistent_point == slot_state(source).confirmed
    source.execute("INSERT INTO items VALUES (3, 'after')")
    # what is older than the publications would wedge the slot, and is in the snapshot
    assert seen(source, "after")
    assert not seen(source, "running")


# ---------------------------------------------------------------------- create while others are at work


@pytest.mark.some(1)
@pytest.mark.parametrize("who", ["superuser", "plain role"])
def test_waiting_for_a_transaction_is_bounded_and_names_the_session(source: Source, who: str) -> None:
    pipeline = source.pipeline.with_(create_slot_timeout=1.0)
    if who == "plain role":  # to which others' sessions show little
        database = conninfo_to_dict(source.dsn)["dbname"]
        grants = [f"GRANT CREATE ON DATABASE {database} TO ROLE", "ALTER TABLE items OWNER TO ROLE"]
        pipeline = pipeline.with_(postgres=source.role("REPLICATION", *grants))
    with session(source, "nightly report") as blocker:
        started = time.monotonic()
        with pytest.raises(Outage) as raised:
            create(pipeline)
        assert time.monotonic() - started < 30
        assert f"Slot {source.name!r} could not be created within 1 s" in str(raised.value)
        assert f"session {blocker.info.backend_pid} (postgres@" in str(raised.value)
        assert ("nightly report" in str(raised.value)) or who == "plain role"
        assert "pg_terminate_backend" in str(raised.value)
        assert not source.execute(f"SELECT 1 FROM pg_replication_slots WHERE slot_name = '{source.name}'")
        blocker.commit()
    create(pipeline)


def test_no_slot_is_left_behind_when_transactions_of_before_do_not_end(
    source: Source, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Those that began when the slot was there already are waited for, too, before X0 can be relied on."""
    usual, late = slot.fresh_xid, psycopg.connect(source.dsn)

    def fresh_xid(connection: Any) -> int:
        late.execute("SELECT pg_current_xact_id()")
        return usual(connection)

    with monkeypatch.context() as patch, late:
        patch.setattr(slot, "fresh_xid", fresh_xid)
        with pytest.raises(Outage, match="still run after"):
            create(source.pipeline.with_(create_slot_timeout=0.5))
    assert not source.execute(f"SELECT 1 FROM pg_replication_slots WHERE slot_name = '{source.name}'")
    create(source.pipeline)


def test_a_prepared_transaction_of_any_database_is_named(small: Source) -> None:
    database = small.server.createdb(f"{small.name}_other")
    with psycopg.connect(database, autocommit=True) as connection:
        for statement in ("BEGIN", "SELECT pg_current_xact_id()", f"PREPARE TRANSACTION 'forgotten {small.name}'"):
            connection.execute(statement)
        try:
            with pytest.raises(Outage) as raised:
                create(small.pipeline.with_(create_slot_timeout=1.0))
        finally:
            connection.execute(f"ROLLBACK PREPARED 'forgotten {small.name}'")
    assert f"prepared transaction 'forgotten {small.name}' in {small.name}_other (since 20" in str(raised.value)
    assert "ROLLBACK PREPARED" in str(raised.value)


DDL = {
    "TRUNCATE items": "(2, 'streamed')",
    "ALTER TABLE items ALTER name TYPE varchar(20)": "(2, 'streamed')",
    "ALTER TABLE items ADD extra text": "(2, 'two', 'streamed')",
}


@contextmanager
def being_created(source: Source, pipeline: Settings) -> Iterator[Future[object]]:
    """Creation in a thread; it has ended when the block ends."""
    with ThreadPoolExecutor(1) as pool:
        yield pool.submit(create, pipeline)


@pytest.mark.some(1)
@pytest.mark.parametrize("ddl", DDL)
def test_a_slot_is_made_again_when_ddl_commits_while_it_is_built(
    source: Source, caplog: pytest.LogCaptureFixture, ddl: str
) -> None:
    columns, values = ("id, name, extra" if "extra" in ddl else "id, name"), DDL[ddl]
    # e is what such a slot cannot stream: it runs while the slot becomes consistent
    with session(source, "a") as a, session(source, "e") as e:
        e.rollback()
        with being_created(source, source.pipeline) as creating:
            until(lambda: blocked_by(source, a), "the creation waits for a")
            with session(source, "b") as b:
                source.execute(ddl)
                a.commit()
                until(lambda: blocked_by(source, b), "the creation waits for b")
                e.execute(
                    f"INSERT INTO items ({columns}) VALUES {values.replace('streamed', 'early')}".replace("(2", "(1")
                )
                b.commit()
            until(lambda: slot_exists(source), "the slot becomes consistent")
            e.commit()
            creating.result(60)
    assert "A published table was altered or truncated while slot" in caplog.text
    source.execute(f"INSERT INTO items ({columns}) VALUES {values}")
    assert seen(source, "streamed")
    assert not seen(source, "early")  # it is in the snapshot


def slot_exists(source: Source) -> bool:
    """Whether the slot is there and consistent."""
    return bool(
        source.execute(
            f"SELECT 1 FROM pg_replication_slots WHERE slot_name = '{source.name}' AND confirmed_flush_lsn IS NOT NULL"
        )
    )


def test_ddl_without_end_ends_the_creation(source: Source, monkeypatch: pytest.MonkeyPatch) -> None:
    usual = slot.create

    def altered_meanwhile(*args: object, **options: object) -> int:
        point = usual(*args, **options)  # type: ignore[arg-type]
        source.execute("TRUNCATE items")
        return point

    monkeypatch.setattr(creation.slot, "create", altered_meanwhile)
    with pytest.raises(SlotError, match=r"altered or truncated during each of 5 attempts.*Try again while no DDL runs"):
        create(source.pipeline)
    assert not slot_exists(source)


def test_ddl_of_other_tables_does_not_matter(source: Source, caplog: pytest.LogCaptureFixture) -> None:
    source.execute("CREATE TABLE other (id int PRIMARY KEY)")
    with session(source) as a, being_created(source, source.pipeline) as creating:
        until(lambda: blocked_by(source, a), "the creation waits")
        source.execute("TRUNCATE other", "ANALYZE items", "VACUUM items")
        a.commit()
        creating.result(60)
    assert "altered or truncated" not in caplog.text


def test_of_two_creations_one_wins_and_nothing_is_doubled(source: Source) -> None:
    barrier = threading.Barrier(2)

    def attempt() -> object:
        barrier.wait()
        try:
            return create(source.pipeline)
        except BottledWaterError as error:
            return error

    with ThreadPoolExecutor(2) as pool:
        results = [future.result(60) for future in (pool.submit(attempt), pool.submit(attempt))]
    record = create(source.pipeline)
    made = [result for result in results if not isinstance(result, BottledWaterError)]
    assert made, results
    assert made == [record] * len(made)
    assert record.consistent_point == slot_state(source).confirmed


# ---------------------------------------------------------------------- a table added later


def test_a_table_added_later_has_its_own_transaction_id(source: Source) -> None:
    record = create(source.pipeline)
    source.execute("CREATE TABLE more (id int PRIMARY KEY, name text)", "CREATE TABLE log (line text)")
    with session(source) as running:
        running.execute("INSERT INTO more VALUES (1, 'unpublished')")
        xid = running.execute("SELECT pg_current_xact_id()::text::bigint").fetchone()
        assert create(source.pipeline.with_(tables=("items", "more", "log"), allow_unkeyed=True)) == record
        running.commit()
    tables = {p.table.name: p for p in known(source).tables.values()}
    assert tables["items"].oldest_xid == record.oldest_xid
    # a snapshot under which the running transaction were not yet over would lose its row
    assert xid is not None
    assert tables["more"].oldest_xid > xid[0] > record.oldest_xid
    assert source.execute("SELECT pubname, tablename FROM pg_publication_tables ORDER BY 2") == [
        (source.name, "items"),
        (f"{source.name}_unkeyed", "log"),
        (source.name, "more"),
    ]
    source.execute(
        "INSERT INTO more VALUES (2, 'published')", "UPDATE more SET name = name", "INSERT INTO log VALUES ('line')"
    )
    assert seen(source, "published")
    assert f"{source.name}.more" in Topics(source.pipeline.kafka).names()
    # fewer tables than before are no reason to change anything
    assert create(source.pipeline) == record
    assert len(known(source).tables) == 3


def test_a_skipped_snapshot_is_recorded_as_complete_for_tables_added_later_too(source: Source) -> None:
    pipeline = source.pipeline.with_(skip_snapshot=True)
    create(pipeline)
    assert known(source).complete
    source.execute("CREATE TABLE more (id int PRIMARY KEY)")
    create(pipeline.with_(tables=("items", "more"), skip_snapshot=False))
    assert not known(source).complete


# ---------------------------------------------------------------------- drop


def retire(source: Source) -> None:
    """As a stop request for good leaves the status."""
    with connect(source.dsn) as connection:
        name = identify(connection).pipeline(source.name)
    control_topic.write(source.pipeline.kafka, {status_key(name): encode(status_of("stopped", retired=True))})


@pytest.mark.some(2)
@pytest.mark.parametrize(
    ("when", "retired", "dropped"),
    [("never", True, False), ("retired", False, False), ("retired", True, True), ("always", False, True)],
)
def test_dropping_keeps_or_drops_slot_and_publications(source: Source, when: str, retired: bool, dropped: bool) -> None:
    create(source.pipeline)
    if retired:
        retire(source)
    source.execute("INSERT INTO items SELECT g, repeat('x', 100) FROM generate_series(1, 20000) g")
    said = drop(source.pipeline, when=when)
    left = source.execute("SELECT count(*) FROM pg_publication"), slot_exists(source), known(source).slot is None
    if dropped:
        assert (
            said == f"Dropped slot {source.name!r}, publication {source.name!r}, publication '{source.name}_unkeyed'."
        )
        assert left == ([(0,)], False, True)
        # its topics belong to nobody now
        assert preflight.run(source.pipeline.with_(slot=f"{source.name}_2"))
    else:
        assert said.startswith(f"Kept: slot {source.name!r} at ")
        mebibytes = float(said.partition(" keeps ")[2].partition(" MiB of WAL on the server")[0])
        assert mebibytes > 2
        assert "the changes that are not yet published" in said
        assert "bottledwater drop-slot --when always" in said
        assert left == ([(2,)], True, False)


@pytest.mark.long
def test_a_publication_that_another_pipeline_has_is_not_dropped(source: Source) -> None:
    """Without it, the other one would stop for good: PostgreSQL looks it up as it was at each change."""
    first, name = source.pipeline, source.name
    second = first.with_(slot=f"{name}_2", topic_prefix=f"{name}_2", publication=name, create_publication=False)
    create(first)
    create(second)
    assert (
        drop(first, when="always") == f"Dropped slot {name!r}. Kept publication {name!r}, which slot '{name}_2' needs."
    )
    assert source.execute("SELECT count(*) FROM pg_publication") == [(2,)]
    # it has not made them, whatever is given later
    second = second.with_(create_publication=True)
    with pytest.raises(PreflightError, match="was made with create_publication = false, and the settings say true"):
        create(second)
    assert drop(second, when="always") == f"Dropped slot '{name}_2'."
    create(first.with_(publication=f"{name}_3"))
    assert drop(first, when="always").startswith(f"Dropped slot {name!r}, publication '{name}_3', ")


def test_a_publication_that_somebody_streams_with_is_not_dropped(source: Source) -> None:
    """As a pipeline in another Kafka does, whose state is not in this one."""
    create(source.pipeline)
    name, other = source.name, f"{source.name}_2"
    source.execute(f"SELECT pg_create_logical_replication_slot('{other}', 'pgoutput')")
    with (
        closing(ReplicationStream(source.pipeline.postgres, other, [name, f"{name}_unkeyed"], start=0)),
        connect(source.pipeline.postgres) as connection,
    ):
        until(lambda: slot.streaming(connection, [f"{name}_unkeyed"]) == [other], "the slot is streamed from")
        assert slot.streaming(connection, ["others"]) == []
        said = drop(source.pipeline, when="always")
    assert said == f"Dropped slot {name!r}. Kept publication {name!r}, which slot {other!r} needs."


def test_an_open_transaction_of_another_pipeline_does_not_keep_a_slot_from_being_dropped(source: Source) -> None:
    first, other = source.pipeline, f"{source.name}_2"
    create(first)
    create(first.with_(slot=other, topic_prefix=other))
    hanging = Producer({**first.kafka, "transactional.id": "hanging", "transaction.timeout.ms": 60_000})
    hanging.init_transactions(10)
    hanging.begin_transaction()
    hanging.produce(store.state_topic_name(known(source).slot.database, other), b"{}", b"letters/1/x")  # type: ignore[union-attr]
    hanging.flush()
    try:
        began = time.monotonic()
        assert drop(first, when="always").startswith(f"Dropped slot {source.name!r}, publication {source.name!r}")
        assert time.monotonic() - began < 15
    finally:
        hanging.abort_transaction(10)


def test_publications_stay_the_pipelines_while_a_table_of_another_owner_is_added(source: Source) -> None:
    """It is told to leave them alone for that while only."""
    own, name = source.pipeline, source.name
    create(own)
    source.execute("CREATE TABLE others (id int PRIMARY KEY)", f"ALTER PUBLICATION {name} ADD TABLE others")
    more = own.with_(tables=(*own.tables, "others"))
    create(more.with_(create_publication=False))
    create(more)
    assert drop(more, when="always") == f"Dropped slot {name!r}, publication {name!r}, publication '{name}_unkeyed'."


@pytest.mark.parametrize("pipelines", [False, True], ids=["of-another-application", "of-another-pipeline"])
def test_a_slot_whose_state_may_not_be_read_does_not_keep_ours(
    source: Source, monkeypatch: pytest.MonkeyPatch, pipelines: bool
) -> None:
    """As with the rights that separate pipelines from each other. Another pipeline may need the publication."""
    first, other = source.pipeline, f"{source.name}_2"
    create(first)
    if pipelines:
        create(first.with_(slot=other, topic_prefix=other))
    else:
        source.execute(f"SELECT pg_create_logical_replication_slot('{other}', 'pgoutput')")
    read = drop_module.read_state

    def denied(pipeline: Settings, topic: str, **how: bool) -> PipelineState:
        if topic.endswith(other):
            raise Refused(f"Kafka denies every access to topic {topic!r}.")
        return read(pipeline, topic, **how)

    monkeypatch.setattr(drop_module, "read_state", denied)
    said = drop(first, when="always")
    assert said.startswith(f"Dropped slot {source.name!r}") and not slot_exists(source)
    kept = source.execute(f"SELECT count(*) FROM pg_publication WHERE pubname = '{source.name}'") == [(1,)]
    assert kept == pipelines == (f"which slot {other!r} may need. Kafka denies every access" in said)


def test_a_dropped_pipeline_can_be_made_again(source: Source) -> None:
    first = create(source.pipeline)
    drop(source.pipeline, when="always")
    assert drop(source.pipeline, when="always") == f"There is no slot {source.name!r}."
    second = create(source.pipeline)
    assert second.consistent_point > first.consistent_point
    assert known(source).slot == second
    assert known(source).position is None


def test_the_slot_of_somebody_else_that_has_our_name_now_is_not_dropped(source: Source) -> None:
    create(source.pipeline)
    source.execute(
        f"SELECT pg_drop_replication_slot('{source.name}')",
        f"SELECT pg_create_physical_replication_slot('{source.name}')",
    )
    with refused(source, f"Slot {source.name!r} uses 'physical', not pgoutput"):
        drop(source.pipeline, when="always")


# ---------------------------------------------------------------------- what a stream must not continue


def check(source: Source, position: Position | None = None, **other: object) -> None:
    """What a stream that has reached this position (A by default) checks before it connects."""
    record = known(source).slot
    assert record is not None
    with connect(source.dsn) as connection:
        cluster = replace(identify(connection), **other)  # type: ignore[arg-type]
        check_slot(
            slot.state(connection, source.name),
            record,
            cluster,
            position or Position(record.consistent_point, 0),
            end_of_wal(connection),
        )


def test_a_slot_that_was_moved_forward_is_refused_and_one_that_stayed_behind_is_not(source: Source) -> None:
    create(source.pipeline)
    source.execute("INSERT INTO items VALUES (1, 'one')")
    check(source)
    # behind P: PostgreSQL may forget what it was told before a restart
    check(source, Position(parse_lsn(source.execute("SELECT pg_current_wal_lsn()::text")[0][0]), 0))
    source.execute(f"SELECT pg_replication_slot_advance('{source.name}', pg_current_wal_flush_lsn())")
    with refused(
        source,
        f"Slot {source.name!r} is at ",
        "ahead of what was published",
        "somebody moved it",
        "drop-slot --when always",
    ):
        check(source)


def test_a_slot_that_was_dropped_is_refused(source: Source) -> None:
    create(source.pipeline)
    source.execute(f"SELECT pg_drop_replication_slot('{source.name}')")
    with refused(source, f"Slot {source.name!r} does not exist any more: changes since", "drop-slot --when always"):
        check(source)
    refuses(source, source.pipeline, f"Slot {source.name!r} is gone, but its state says", "drop-slot --when always")


def test_a_slot_that_was_made_again_is_refused(source: Source) -> None:
    create(source.pipeline)
    source.execute(
        f"SELECT pg_drop_replication_slot('{source.name}')",
        f"SELECT pg_create_logical_replication_slot('{source.name}', 'pgoutput')",
    )
    with refused(source, f"Slot {source.name!r} is at ", "ahead of what was published"):
        check(source)


def test_a_slot_of_another_cluster_or_timeline_is_refused(source: Source) -> None:
    create(source.pipeline)
    with refused(source, "another cluster (system identifier 42)", source.name, "use another slot name"):
        check(source, system_identifier="42")
    with refused(source, "on timeline 7", source.name, "drop-slot --when always"):
        check(source, timeline=7)


def test_the_records_of_another_cluster_are_not_taken_for_ours(source: Source, small: Source) -> None:
    create(source.pipeline)
    database = conninfo_to_dict(source.dsn)["dbname"]
    small.execute(f"CREATE DATABASE {database}")
    other = small.pipeline.with_(slot=source.name, postgres=f"{small.server.dsn(database)}")
    with psycopg.connect(other.postgres, autocommit=True) as connection:
        connection.execute("CREATE TABLE items (id bigint PRIMARY KEY)")
        connection.execute("SELECT pg_create_logical_replication_slot(%s, 'pgoutput')", [source.name])
        try:
            refuses(source, other.with_(create_publication=True), "belongs to the cluster with system identifier")
        finally:
            connection.execute("SELECT pg_drop_replication_slot(%s)", [source.name])


def test_a_slot_of_another_plugin_or_database_is_refused(source: Source) -> None:
    create(source.pipeline)
    found, record = slot_state(source), known(source).slot
    assert record is not None
    with connect(source.dsn) as connection:
        cluster = identify(connection)
    position = Position(record.consistent_point, 0)
    for changed, said in (
        (replace(found, plugin="wal2json"), "uses 'wal2json'"),
        (replace(found, database="other"), "belongs to database 'other'"),
        (replace(found, wal_status="lost"), "was invalidated"),
    ):
        with pytest.raises(SlotError, match=said):
            check_slot(changed, record, cluster, position, 2**63)


def test_topics_that_are_not_those_of_the_records_are_refused(source: Source) -> None:
    create(source.pipeline)
    recorded = known(source)
    with connect(source.dsn) as connection:
        assert not check_topics(connection, source.pipeline, recorded)
        [(key, fact)] = [(k, v) for k, v in recorded.raw.items() if k.startswith("table/")]
        for change, said in (
            ({"partitions": 4}, "has 1 partitions, it had 4"),
            ({"topic_id": "another"}, "was deleted and made again"),
            ({"topic": f"{source.name}.gone"}, "does not exist any more"),
        ):
            with pytest.raises(StateError, match=said):
                check_topics(connection, source.pipeline, PipelineState({key: {**fact, **change}}))


def test_tables_that_a_publication_excepts_are_not_published(source: Source) -> None:
    """FOR ALL TABLES EXCEPT of PostgreSQL 19: its rows of the catalog, made by hand."""
    source.execute(
        "CREATE TABLE several (id int PRIMARY KEY) PARTITION BY RANGE (id)",
        "CREATE TABLE one PARTITION OF several FOR VALUES FROM (0) TO (10)",
        "CREATE TABLE single (id int PRIMARY KEY)",
        f"CREATE PUBLICATION {source.name} FOR ALL TABLES",
    )
    oids = {
        name: oid
        for oid, name in source.execute("SELECT oid, relname::text FROM pg_class WHERE relkind = 'r' AND oid >= 16384")
    }

    def published(connection: Connection) -> list[set[str]]:
        found = publication.read(connection, source.name)
        assert found is not None
        covered = coverage.read(connection, [source.name], list(oids.values()))
        return [{name for name, oid in oids.items() if oid in of} for of in (found.tables, covered.tables)]

    with connect(source.dsn) as connection:
        assert published(connection) == [{"items", "one", "single"}] * 2
        for excepted, names in (
            ("several", {"items", "single"}),
            ("one", {"items", "single"}),
            ("items", {"one", "single"}),
        ):
            with connection.transaction(force_rollback=True):
                connection.execute(
                    "INSERT INTO pg_publication_rel (oid, prpubid, prrelid) SELECT 1, oid, %s::regclass "
                    "FROM pg_publication",
                    (f"public.{excepted}",),
                )
                assert published(connection) == [names] * 2


def test_publications_are_read_as_they_are(source: Source) -> None:
    source.execute(
        "CREATE TABLE part (id int PRIMARY KEY, a int, b int)",
        f"CREATE PUBLICATION {source.name} FOR TABLE items, part (id, a) WHERE (id > 1)",
    )
    with connect(source.dsn) as connection:
        found = publication.read(connection, source.name)
        assert publication.read(connection, "none") is None
    assert found is not None
    assert sorted(found.tables.values(), key=str) == [(("id", "a"), frozenset({"id", "a"})), (None, None)]
    assert (found.all_tables, found.inserts, found.updates, found.deletes, found.truncates) == (
        False,
        True,
        True,
        True,
        True,
    )
