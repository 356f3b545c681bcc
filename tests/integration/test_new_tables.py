"""Tables that are created while the stream runs."""

from __future__ import annotations

import contextlib
import logging
import secrets
import threading
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import psycopg
import pytest
from confluent_kafka.admin import AdminClient

from airflow_bottledwater.backoff import Backoff
from airflow_bottledwater.encoding import names
from airflow_bottledwater.errors import Outage, Refused, TakenOver
from airflow_bottledwater.jobs import snapshots
from airflow_bottledwater.kafka.topics import Topics
from airflow_bottledwater.live.reading import LiveReader
from airflow_bottledwater.postgres import publication
from airflow_bottledwater.postgres.connect import connect
from airflow_bottledwater.postgres.server import identify
from airflow_bottledwater.provision import live, preflight
from airflow_bottledwater.provision.create import create
from airflow_bottledwater.provision.drop import drop
from airflow_bottledwater.state import claim
from airflow_bottledwater.state.claim import Claim, read_state
from airflow_bottledwater.state.problems import Problems
from airflow_bottledwater.state.records import LiveProgress, live_key
from airflow_bottledwater.stream.publisher import StreamPublisher
from airflow_bottledwater.stream.start import begin
from airflow_bottledwater.tables import new_rows, writer
from airflow_bottledwater.tables.watch import TableWatch
from airflow_bottledwater.verify import driver as verification
from tests.support.tables import dies_before_it_reads, look_often, problems
from tests.support.topics import Flow, MakeFlow, assert_exactly_once_in_order, limit_records, limit_topic, read
from tests.support.waiting import until
from tests.support.writers import state_topic


@pytest.fixture(autouse=True)
def often_looked_at(monkeypatch: pytest.MonkeyPatch) -> None:
    """The catalog is looked at ten times a second, and what it shows has to last for a moment."""
    look_often(monkeypatch)


@pytest.fixture
def flow(make_flow: MakeFlow) -> Flow:
    made = make_flow(tables="*")
    made.execute("CREATE TABLE first (id int PRIMARY KEY, name text)", "INSERT INTO first VALUES (1, 'one')")
    made.create()
    made.snapshot()
    made.stream()
    return made


def test_a_table_that_is_created_is_taken_in_with_its_rows(flow: Flow) -> None:
    with flow.streaming() as errors:
        flow.transaction(
            "CREATE TABLE later (id int PRIMARY KEY, name text)",
            "INSERT INTO later SELECT g, 'old' FROM generate_series(1, 500) g",
        )
        until(lambda: _tables(flow) == {"first", "later"}, "it is taken in", failed=errors)
        flow.execute("UPDATE later SET name = 'new' WHERE id <= 10", "INSERT INTO later VALUES (1000, 'new')")
        flow.execute("INSERT INTO first VALUES (2, 'two')")
        until(lambda: len({m.key["id"] for m in flow.read("later")}) == 501, "all rows are there", failed=errors)
        until(lambda: len(flow.read("first")) == 2, "the stream goes on", failed=errors)
    flow.stream()
    assert flow.compare("later").equal and flow.compare("first").equal
    assert read_state(flow.pipeline, state_topic(flow)).complete


def test_a_bounded_run_takes_new_tables_in(flow: Flow) -> None:
    flow.execute("CREATE TABLE later (id int PRIMARY KEY)", "INSERT INTO later VALUES (1), (2)")
    flow.stream()
    assert sorted(m.key["id"] for m in flow.read("later")) == [1, 2]
    flow.execute("DELETE FROM later WHERE id = 1")
    flow.stream()
    assert flow.compare("later").equal


def test_a_job_that_dies_between_taking_in_and_reading_is_made_up_for(flow: Flow) -> None:
    flow.execute("CREATE TABLE later (id int PRIMARY KEY)", "INSERT INTO later VALUES (1), (2)")
    dies_before_it_reads(flow)
    flow.stream()
    assert sorted(m.key["id"] for m in flow.read("later")) == [1, 2]


@pytest.mark.long
def test_a_definition_that_fits_only_compressed_is_recorded_while_the_stream_runs(flow: Flow) -> None:
    """Preflight lets it pass, and a start can write it."""
    columns = ", ".join(f"c{i} numeric" for i in range(1599))
    flow.execute(
        f"CREATE TABLE wide (id int PRIMARY KEY, {columns})",
        "DO $$ BEGIN FOR i IN 0..1598 LOOP"
        " EXECUTE format('COMMENT ON COLUMN wide.c%s IS %L', i, repeat('meant so ', 40)); END LOOP; END $$",
        "INSERT INTO wide (id, c0) VALUES (1, 1)",
    )
    flow.stream()
    assert [m.key["id"] for m in flow.read("wide")] == [1]
    flow.execute("INSERT INTO wide (id, c0) VALUES (2, 2)")
    flow.stream()
    assert [m.key["id"] for m in flow.read("wide")] == [1, 2]
    known = read_state(flow.pipeline, state_topic(flow))
    assert known.position is not None and known.position.ordinal == 0
    # what counts the tables is compared inside of a transaction only
    assert known.reached is not None and known.reached.fingerprint is None


@pytest.mark.long
def test_a_state_record_that_does_not_fit_ends_the_stream_with_a_remedy(flow: Flow) -> None:
    limit_topic(flow, state_topic(flow), 2000)
    columns = ", ".join(f"c{secrets.token_hex(20)} int" for _ in range(200))
    flow.execute(f"CREATE TABLE wide (id int PRIMARY KEY, {columns})", "INSERT INTO wide (id) VALUES (1)")
    with pytest.raises(Refused, match=r"max\.message\.bytes if a record is too large"):
        flow.stream()


@pytest.mark.long
def test_keys_that_an_earlier_pipeline_left_in_its_topic_are_removed(flow: Flow) -> None:
    flow.execute("CREATE TABLE later (id int PRIMARY KEY, t text)", "INSERT INTO later VALUES (1, 'a'), (3, 'b')")
    flow.stream()
    drop(flow.pipeline, when="always")
    flow.execute("DROP TABLE later")
    flow.create()
    flow.snapshot()
    flow.stream()
    flow.execute("CREATE TABLE later (id int PRIMARY KEY, t text)", "INSERT INTO later VALUES (3, 'new'), (4, 'd')")
    flow.stream()
    assert flow.compare("later").equal
    assert [m.key["id"] for m in flow.read("later") if m.value is None] == [1]


def test_none_is_taken_in_inside_a_transaction_in_which_the_job_before_has_stopped_meanwhile(
    make_flow: MakeFlow, monkeypatch: pytest.MonkeyPatch
) -> None:
    flow = make_flow(tables="a", new_tables="ignore", max_transaction_bytes=1 << 20, batch_bytes=1 << 16)
    flow.execute("CREATE TABLE a (id int PRIMARY KEY, t text)", "CREATE TABLE b (id int PRIMARY KEY)")
    flow.create()
    flow.snapshot()
    flow.stream()
    more = flow.pipeline.with_(tables=("a", "b"))
    before = preflight.run(more)
    flow.execute("INSERT INTO a SELECT g, repeat('x', 1000) FROM generate_series(1, 5000) g")
    send = StreamPublisher._send

    def sent(publisher: StreamPublisher, encoded: Any) -> None:
        if publisher.position.ordinal > 100:
            raise KeyboardInterrupt
        send(publisher, encoded)

    with monkeypatch.context() as patch:
        patch.setattr(StreamPublisher, "_send", sent)
        with pytest.raises(KeyboardInterrupt):
            flow.stream()
    with monkeypatch.context() as patch:
        patch.setattr(preflight, "run", lambda *_, **__: before)
        with pytest.raises(Refused, match="inside a large transaction"):
            create(more)
    flow.stream()
    assert flow.compare("a").equal


def test_a_job_does_not_take_its_slot_back(flow: Flow, monkeypatch: pytest.MonkeyPatch) -> None:
    mine = begin(flow.pipeline).job
    successor = begin(flow.pipeline).job
    claimed = SimpleNamespace(last_claim=mine.id, owner=None, may_claim=lambda name: True, claimed=lambda job: None)
    monkeypatch.setattr(claim, "_job", claimed)
    with pytest.raises(TakenOver, match="taken over"):
        begin(flow.pipeline)
    known = read_state(flow.pipeline, state_topic(flow))
    assert known.claim == successor


def test_one_that_is_dropped_before_it_was_read_does_not_keep_the_others_waiting(flow: Flow) -> None:
    flow.execute("CREATE TABLE a1 (id int PRIMARY KEY)", "CREATE TABLE b1 (id int PRIMARY KEY)")
    flow.execute("INSERT INTO a1 VALUES (1)", "INSERT INTO b1 VALUES (1), (2)")
    dies_before_it_reads(flow)
    flow.execute("DROP TABLE a1")
    flow.stream()
    assert [m.key["id"] for m in flow.read("b1")] == [1, 2]
    assert not read_state(flow.pipeline, state_topic(flow)).lives


def test_one_whose_rows_cannot_be_published_does_not_keep_the_others_waiting(flow: Flow) -> None:
    flow.change(topic_config={"max.message.bytes": "20000"})
    flow.execute("CREATE TABLE a1 (id int PRIMARY KEY, t text)", "CREATE TABLE b1 (id int PRIMARY KEY)")
    flow.execute("INSERT INTO a1 VALUES (1, repeat('x', 30000))", "INSERT INTO b1 VALUES (1), (2)")
    flow.stream()
    assert [m.key["id"] for m in flow.read("b1")] == [1, 2] and flow.read("a1") == []
    ((failed, progress),) = read_state(flow.pipeline, state_topic(flow)).lives.items()
    assert progress.ended == "failed" and "the record has 30" in progress.error
    # the next start tries it again, and it alone
    limit_records(flow, "a1", 100_000)
    flow.stream()
    assert [m.key["id"] for m in flow.read("a1")] == [1] and len(flow.read("b1")) == 2
    assert not read_state(flow.pipeline, state_topic(flow)).lives and flow.reported(failed).state == "finished"


def test_what_is_still_being_read_is_not_said_to_differ(flow: Flow, monkeypatch: pytest.MonkeyPatch) -> None:
    flow.execute("CREATE TABLE later (id int PRIMARY KEY)", "INSERT INTO later SELECT generate_series(1, 500)")
    goes_on, original = threading.Event(), LiveReader._step

    def step(self: LiveReader) -> None:
        goes_on.wait(60)
        original(self)

    monkeypatch.setattr(LiveReader, "_step", step)
    pipeline = flow.pipeline.with_(verify_timeout=30.0)
    with flow.streaming() as errors:
        until(lambda: read_state(flow.pipeline, state_topic(flow)).lives, "it is taken in", failed=errors)
        with pytest.raises(Outage, match=r"Rows of public\.later are still to come"):
            verification.run(pipeline, verification.in_threads(pipeline))
        goes_on.set()
        until(lambda: not read_state(flow.pipeline, state_topic(flow)).lives, "it is read", failed=errors)
        assert verification.run(pipeline, verification.in_threads(pipeline)).as_json()["equal"]


def test_one_whose_rows_cannot_be_read_for_a_forgotten_transaction_is_red(flow: Flow) -> None:
    name = live.name_of(flow.pipeline)
    with _forgotten(flow) as forget, flow.streaming() as errors:
        flow.execute("CREATE TABLE later (id int PRIMARY KEY)", "INSERT INTO later VALUES (1)")
        red = until(lambda: problems(flow).get("public.later"), "it is red", failed=errors)
        assert red.kind == "rows-missing" and "prepared transaction 'forgotten" in red.reason
        assert "ROLLBACK PREPARED" in red.remedy
        (request_id,) = read_state(flow.pipeline, state_topic(flow)).lives
        # that the stream begins anew ends no problem
        flow.execute("CREATE TABLE other (id int PRIMARY KEY)")
        until(lambda: "public.other" in problems(flow), "it is taken in, and waits, too", failed=errors)
        assert problems(flow)["public.later"].since == pytest.approx(red.since, abs=0.1)
        # whoever lets it wait is told so, too
        snapshots.change(flow.pipeline, name, request_id, paused=True)
        until(lambda: "is paused" in problems(flow)["public.later"].reason, "it is paused", failed=errors)
        assert f"--resume {request_id}" in problems(flow)["public.later"].remedy
        forget()
        snapshots.change(flow.pipeline, name, request_id, paused=False)
        until(lambda: not problems(flow), "nothing is wrong any more", failed=errors)
        assert [m.key["id"] for m in flow.read("later")] == [1]


@contextlib.contextmanager
def _forgotten(flow: Flow) -> Iterator[Callable[[], None]]:
    """A prepared transaction that nobody ends, unless what this gives is called; it ends with the block."""
    with psycopg.connect(flow.dsn) as connection, contextlib.ExitStack() as ends:
        gid = f"forgotten {secrets.token_hex(4)}"
        connection.execute("INSERT INTO first VALUES (2, 'two')")
        connection.execute(f"PREPARE TRANSACTION '{gid}'")  # type: ignore[arg-type]
        ends.callback(flow.execute, f"ROLLBACK PREPARED '{gid}'")
        yield ends.close


def test_one_without_a_key_that_cannot_be_read_is_named_and_the_stream_goes_on(
    flow: Flow, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    caplog.set_level(logging.WARNING)
    monkeypatch.setattr(new_rows, "LARGEST", 0)
    flow.change(allow_unkeyed=True)
    flow.execute("CREATE TABLE keyless AS SELECT 1 AS id", "INSERT INTO first VALUES (2, 'two')")
    flow.stream()
    assert _tables(flow) == {"first"}
    assert "public.keyless: It cannot be followed: it is larger than 0 MiB, and without a key" in caplog.text
    assert len(flow.read("first")) == 2
    flow.execute("UPDATE keyless SET id = 1", "DELETE FROM keyless")  # it is not harmed


def test_one_without_a_key_whose_rows_are_too_large_keeps_no_other_waiting(
    flow: Flow, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of a table with large values, the rows themselves may be small; and what is compressed is not sent so."""
    monkeypatch.setattr(new_rows, "LARGEST", 1 << 20)
    flow.change(allow_unkeyed=True)
    with flow.streaming() as errors:
        flow.streams()
        flow.transaction(
            "CREATE TABLE apart (t text)",
            "ALTER TABLE apart ALTER COLUMN t SET STORAGE EXTERNAL",
            "INSERT INTO apart VALUES (repeat('x', 1100000))",
            "CREATE TABLE compressed AS SELECT repeat('x', 500000) AS t FROM generate_series(1, 3)",
            *(f"CREATE TABLE {name} AS SELECT repeat('x', 700000) AS t" for name in ("small", "other")),
        )
        until(lambda: {"small", "other"} <= _tables(flow), "they are taken in", failed=errors)
        until(lambda: problems(flow).keys() == {"public.apart", "public.compressed"}, "it is told", failed=errors)
        told = problems(flow)
    assert "it is larger than 1 MiB, and without a key" in told["public.apart"].reason
    assert "it is larger than 1 MiB as PostgreSQL sends it, and without a key" in told["public.compressed"].reason
    assert all("Give it a primary key; or stop the stream" in each.remedy for each in told.values())
    assert _tables(flow) == {"first", "small", "other"}


def test_a_new_leaf_is_taken_in_with_its_rows(make_flow: MakeFlow) -> None:
    flow = make_flow(tables="p", partitioned_tables="leaves")
    flow.execute(
        "CREATE TABLE p (id int PRIMARY KEY, n int) PARTITION BY RANGE (id)",
        "CREATE TABLE p1 PARTITION OF p FOR VALUES FROM (0) TO (100)",
        "INSERT INTO p SELECT g, g FROM generate_series(1, 5) g",
    )
    flow.create()
    flow.snapshot()
    with flow.streaming() as errors:
        flow.transaction(
            "CREATE TABLE p2 PARTITION OF p FOR VALUES FROM (100) TO (200)",
            "INSERT INTO p SELECT g, g FROM generate_series(101, 105) g",
        )
        until(lambda: _tables(flow) == {"p1", "p2"}, "it is taken in", failed=errors)
        flow.execute("UPDATE p SET id = 110 WHERE id = 1", "DELETE FROM p WHERE id = 102")
        until(lambda: {"id": 110} in [m.key for m in flow.read("p2")], "it is streamed", failed=errors)
    flow.stream()
    assert flow.compare("p1").equal and flow.compare("p2").equal


def test_those_that_are_unfit_are_named_and_the_others_taken_in(flow: Flow, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.WARNING)
    flow.execute(
        "CREATE TABLE gone (id int PRIMARY KEY)",
        "CREATE TABLE keyless (id int)",
        'CREATE TABLE "with.dot" (id int PRIMARY KEY)',
        "CREATE TABLE good (id int PRIMARY KEY, name text)",
        "INSERT INTO good VALUES (1, 'one')",
        'INSERT INTO "with.dot" VALUES (7)',
    )
    flow.execute("ALTER TABLE first RENAME TO old", "CREATE TABLE first (id int PRIMARY KEY)", "DROP TABLE gone")
    flow.stream()
    assert _tables(flow) == {"first", "old", "good", "with.dot"}
    assert flow.compare("first").equal and flow.compare("old").equal
    dotted = names.topic("public", "with.dot", flow.pipeline.topic_prefix)
    assert flow.compare("good").equal and [m.key for m in read(flow.kafka, dotted)] == [{"id": 7}]
    (keyless,) = (line for line in caplog.messages if line.startswith("public.keyless: "))
    assert "it has no primary key" in keyless
    assert not any("good" in line for line in caplog.messages)


@pytest.mark.some(1)
@pytest.mark.parametrize("new_tables", ["ignore", "stop"])
def test_otherwise_it_is_named_or_ends_the_stream(
    flow: Flow, new_tables: str, caplog: pytest.LogCaptureFixture
) -> None:
    flow.change(new_tables=new_tables)
    with flow.streaming() as errors:
        flow.execute("INSERT INTO first VALUES (2, 'two')")
        until(lambda: len(flow.read("first")) == 2, "the stream goes on", failed=errors)
        flow.execute("CREATE TABLE later (id int PRIMARY KEY)")
        if new_tables == "stop":
            until(lambda: errors, "it ends")
            assert isinstance(errors[0], Refused) and "new_tables is stop" in str(errors[0])
            return
        flow.execute("INSERT INTO first VALUES (3, 'three')")
        until(lambda: len(flow.read("first")) == 3, "the stream goes on", failed=errors)
        until(lambda: "public.later: made since the slot was, and not followed" in caplog.text, "it is named")
    assert errors == [] and "begins anew" not in caplog.text
    # neither does the next start
    flow.stream()
    assert _tables(flow) == {"first"}


def _tables(flow: Flow) -> set[str]:
    return {pinned.table.name for pinned in read_state(flow.pipeline, state_topic(flow)).tables.values()}


def _succeeded(flow: Flow, before: int) -> bool:
    known = read_state(flow.pipeline, state_topic(flow))
    return before not in known.tables and known.complete


def _oid(flow: Flow, name: str = "first") -> int:
    return int(flow.execute(f"SELECT '{name}'::regclass::oid")[0][0])


# ---------------------------------------------------------------------- servers that forget who was writing to a table
@pytest.fixture
def forgetful(monkeypatch: pytest.MonkeyPatch) -> None:
    """The server counts as one of before May 2025; nobody waits for long."""
    monkeypatch.setattr(publication, "forgets_writers", lambda _: True)
    monkeypatch.setattr(writer, "_PUBLISH_SECONDS", 0.5)


@pytest.mark.usefixtures("forgetful")
def test_a_table_is_taken_in_behind_those_who_wrote_to_it_when_it_was_published(
    flow: Flow, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Tried by hand on 16.2: without this, nothing of the table was published any more behind the writer's commit."""
    carry_out, made = writer.records, list[writer.PreparedSteps]()
    monkeypatch.setattr(
        writer,
        "records",
        lambda pipeline, prepared, known: made.append(prepared) or carry_out(pipeline, prepared, known),
    )
    with psycopg.connect(flow.dsn) as writing, flow.streaming() as errors:
        flow.execute("CREATE TABLE later (id int PRIMARY KEY)", "CREATE TABLE other (id int PRIMARY KEY)")
        writing.execute("INSERT INTO later VALUES (1)")
        told = until(lambda: problems(flow).get("public.later"), "it waits", failed=errors)
        assert f"session {writing.info.backend_pid} " in told.reason and "idle in transaction" in told.reason
        until(lambda: _tables(flow) == {"first", "other"}, "the others do not wait", failed=errors)
        (end,) = flow.execute("SELECT (pg_current_wal_insert_lsn() - '0/0')::bigint")[0]
        writing.commit()
        until(lambda: "later" in _tables(flow), "it is taken in", failed=errors)
        assert [each.lsn > end for each in made if any(pin.table.name == "later" for pin in each.pinned.values())][-1]
    flow.stream()
    assert flow.compare("later").equal


@pytest.mark.usefixtures("forgetful")
def test_who_comes_later_does_not_keep_a_table_from_being_taken_in(flow: Flow) -> None:
    """Neither does a stream that is always behind: the place at which it may be taken in stays where it is."""
    flow.execute("CREATE TABLE later (id int PRIMARY KEY)")
    with connect(flow.dsn) as connection:
        cluster, told = identify(connection), Problems()
    looks = TableWatch(flow.pipeline, cluster, claim.read_own(flow.pipeline, cluster), told, patient=False)

    def place() -> int:
        flow.execute("UPDATE first SET name = name")
        looks.look_now()
        return looks.waits()

    with contextlib.closing(looks), psycopg.connect(flow.dsn) as later:
        with psycopg.connect(flow.dsn, autocommit=True) as writing:
            writing.execute("BEGIN; INSERT INTO later VALUES (1)")
            assert place() == 0 and f"session {writing.info.backend_pid} " in told.all()[0].reason
            later.execute("INSERT INTO later VALUES (2)")
            writing.execute("PREPARE TRANSACTION 'later'")
            try:
                assert place() == 0
                assert "prepared" in told.all()[0].reason and f"{later.info.backend_pid}" not in told.all()[0].reason
            finally:
                writing.execute("COMMIT PREPARED 'later'")
        found = place()
        assert found and place() == found
        # who writes to it when it is published anew is another one
        name = flow.pipeline.publication_name
        flow.execute(f"ALTER PUBLICATION {name} DROP TABLE later", f"ALTER PUBLICATION {name} ADD TABLE later")
        assert place() == 0 and f"session {later.info.backend_pid} " in told.all()[0].reason
        later.commit()
        assert place() > found


@pytest.mark.some(1)
@pytest.mark.usefixtures("forgetful")
@pytest.mark.parametrize("kind", ["", "PARTITION BY RANGE (id)"])
def test_nobody_writes_to_a_table_while_create_slot_adds_it(make_flow: MakeFlow, kind: str) -> None:
    """The stream goes on before the writer's commit."""
    flow = make_flow(tables="first", create_slot_timeout=1.0)
    flow.execute("CREATE TABLE first (id int PRIMARY KEY)", f"CREATE TABLE later (id int PRIMARY KEY) {kind}")
    if kind:
        flow.execute("CREATE TABLE part PARTITION OF later FOR VALUES FROM (0) TO (9)")
    flow.create()
    flow.change(tables="first,later")
    with psycopg.connect(flow.dsn) as writing:
        writing.execute(f"INSERT INTO {'part' if kind else 'later'} VALUES (1)")
        with pytest.raises(Outage, match=f"In the way: session {writing.info.backend_pid} .* RowExclusiveLock"):
            flow.create()
    flow.create()
    assert _tables(flow) == {"first", "later"}


@pytest.mark.usefixtures("forgetful")
def test_what_others_have_published_is_left_to_the_stream(
    make_flow: MakeFlow, caplog: pytest.LogCaptureFixture
) -> None:
    flow = make_flow(tables="first", create_publication=False)
    name = flow.pipeline.publication_name
    flow.execute(
        "CREATE TABLE first (id int PRIMARY KEY)",
        "CREATE TABLE later (id int PRIMARY KEY)",
        f"CREATE PUBLICATION {name} FOR TABLE first",
        f"CREATE PUBLICATION {name}_unkeyed",
    )
    flow.create()
    assert "LOCK TABLE … IN SHARE ROW EXCLUSIVE MODE" in caplog.text
    flow.snapshot()
    flow.execute(f"ALTER PUBLICATION {name} ADD TABLE later")
    flow.change(tables="first,later")
    flow.create()
    assert _tables(flow) == {"first"} and "public.later is taken in by the stream" in caplog.text
    flow.stream()
    assert _tables(flow) == {"first", "later"}


# ---------------------------------------------------------------------- a table that was dropped and created again
LAST = "INSERT INTO first SELECT g, 'last' FROM generate_series(100, 3000) g"
AGAIN = (
    "DROP TABLE first",
    "CREATE TABLE first (id int PRIMARY KEY, text text)",
    "INSERT INTO first VALUES (7, 'new')",
)


def test_a_table_that_is_created_again_gets_the_topic_behind_the_last_change_of_the_one_before(flow: Flow) -> None:
    before = _oid(flow)
    with flow.streaming() as errors:
        flow.execute(LAST, *AGAIN)
        until(lambda: _succeeded(flow, before), "it is taken up", failed=errors)
        flow.execute("UPDATE first SET text = 'newer'", "INSERT INTO first VALUES (8, 'newer')")
        until(lambda: [m for m in flow.read("first") if m.key == {"id": 8}], "it is streamed", failed=errors)
    flow.stream()
    messages = flow.read("first")
    assert flow.compare("first").equal
    assert_exactly_once_in_order(messages)
    # nothing of the table before was left out, and each of its rows is gone
    assert [m.key["id"] for m in messages if m.value and m.value.get("name") == "last"] == list(range(100, 3001))
    assert {m.value["id"] for m in messages if m.value and "text" in m.value} == {7, 8}


def test_a_bounded_run_publishes_what_was_dropped_and_then_takes_its_heir_up(flow: Flow) -> None:
    before = _oid(flow)
    flow.execute(LAST, *AGAIN)
    flow.create()  # as whoever starts a pipeline again does
    flow.snapshot()
    flow.stream()
    assert _succeeded(flow, before) and flow.compare("first").equal
    assert len([m for m in flow.read("first") if m.value and m.value.get("name") == "last"]) == 2901


@pytest.mark.long
def test_the_topic_of_a_table_that_was_dropped_may_be_deleted(flow: Flow) -> None:
    flow.execute("CREATE TABLE other (id int PRIMARY KEY)")
    flow.stream()
    flow.execute(LAST, AGAIN[0])
    flow.stream()
    assert _tables(flow) == {"other"}
    assert len([m for m in flow.read("first") if m.value and m.value.get("name") == "last"]) == 2901
    admin = AdminClient(flow.pipeline.kafka)
    admin.delete_topics([flow.topic("first")])[flow.topic("first")].result()
    until(lambda: flow.topic("first") not in Topics(flow.pipeline.kafka).names(), "the topic is gone")
    flow.execute("INSERT INTO other VALUES (1)")
    flow.stream()
    assert flow.compare("other").equal
    # another one of this name gets a topic of this name
    flow.execute(*AGAIN[1:])
    flow.stream()
    assert flow.compare("first").equal and [m.key for m in flow.read("first")] == [{"id": 7}]


def test_one_that_is_dropped_once_more_keeps_nobody_waiting(
    flow: Flow, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    flow.execute("CREATE TABLE other (id int PRIMARY KEY)")
    flow.stream()
    flow.execute(*AGAIN)
    records = writer.records

    def recorded(pipeline: Any, prepared: writer.PreparedSteps, known: Any) -> Any:
        if any(each.table.name == "first" for each in prepared.pinned.values()):
            flow.execute("DROP TABLE IF EXISTS first")
        return records(pipeline, prepared, known)

    monkeypatch.setattr(writer, "records", recorded)
    flow.stream()
    # as whoever comes first says it: who reads its rows, or who looks at the catalog
    assert "public.first was dropped: it" in caplog.text
    flow.execute("INSERT INTO other VALUES (1)")
    flow.stream()
    assert not read_state(flow.pipeline, state_topic(flow)).lives
    assert flow.compare("other").equal


def test_a_live_snapshot_of_no_table_that_an_earlier_version_has_recorded_ends(flow: Flow) -> None:
    with connect(flow.dsn) as connection:
        claim = Claim(flow.pipeline, identify(connection), "stream", Backoff(30.0))
    claim.write({live_key("0123456789ab"): LiveProgress((), sweep=True, required=True)})
    claim.close()
    flow.stream()
    flow.stream()
    assert not read_state(flow.pipeline, state_topic(flow)).lives


@pytest.mark.long
def test_older_transactions_do_not_keep_the_stream_from_going_on(flow: Flow) -> None:
    """Only the rows of a table that was created again wait for them."""
    flow.execute("CREATE TABLE other (id int PRIMARY KEY)")
    flow.stream()
    before = _oid(flow)
    with flow.streaming() as errors, psycopg.connect(flow.dsn) as older:
        older.execute("INSERT INTO other VALUES (1)")
        flow.execute(*AGAIN)
        until(lambda: _succeeded(flow, before), "it is taken up", failed=errors)
        flow.execute("INSERT INTO other VALUES (2)", "INSERT INTO first VALUES (9, 'newer')")
        until(lambda: len(flow.read("other")) == 1, "the stream goes on", failed=errors)
        older.commit()
    flow.stream()
    assert flow.compare("first").equal and flow.compare("other").equal


@pytest.mark.some(1)
@pytest.mark.parametrize(
    ("statement", "says"),
    [
        ("CREATE TABLE first (id int)", "it has no primary key"),
        (
            "CREATE TABLE first (id int PRIMARY KEY, bad int); ALTER TABLE first REPLICA IDENTITY NOTHING",
            "its replica identity is NOTHING",
        ),
    ],
)
def test_one_that_cannot_get_the_topic_is_named(
    flow: Flow, caplog: pytest.LogCaptureFixture, statement: str, says: str
) -> None:
    caplog.set_level(logging.WARNING)
    flow.execute("CREATE TABLE other (id int PRIMARY KEY)", "INSERT INTO other VALUES (1)")
    flow.execute("DROP TABLE first", *statement.split("; "))
    flow.stream()
    assert says in caplog.text and len(flow.read("other")) == 1
    flow.execute("INSERT INTO other VALUES (2)")
    flow.stream()
    assert len(flow.read("other")) == 2 and [m.value for m in flow.read("first")] == [{"id": 1, "name": "one"}]
