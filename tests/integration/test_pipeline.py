"""The whole path on real servers, without a JVM: hand-over, order, restart, errors."""

from __future__ import annotations

import threading
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
from psycopg import sql

from airflow_bottledwater.encoding import names
from airflow_bottledwater.errors import (
    Outage,
    RecordError,
    SlotError,
    StateError,
    StopRequested,
    TakenOver,
)
from airflow_bottledwater.jobs import requests, status
from airflow_bottledwater.local.kafka import KafkaBroker
from airflow_bottledwater.local.registry import SchemaRegistry
from airflow_bottledwater.model.stop import Stop
from airflow_bottledwater.postgres import publication
from airflow_bottledwater.postgres.connect import connect
from airflow_bottledwater.postgres.server import identify
from airflow_bottledwater.provision.drop import drop
from airflow_bottledwater.snapshot import driver, lane
from airflow_bottledwater.snapshot.task import LaneTask
from airflow_bottledwater.stream import engine
from airflow_bottledwater.stream.start import begin
from tests.support import running
from tests.support.checker import uncommitted_rule
from tests.support.compare import latest
from tests.support.topics import Flow, MakeFlow, assert_exactly_once_in_order, limit_records, read
from tests.support.waiting import until
from tests.support.writers import Writers, make_tables, records, update


def _fill(flow: Flow, *tables: str, rows: int = 4000) -> None:
    for table in tables:
        flow.execute(
            f"CREATE TABLE {table} (id bigint PRIMARY KEY, name text, n integer)",
            f"INSERT INTO {table} SELECT g, 'row ' || g, g FROM generate_series(0, {rows - 1}) g",
            f"ANALYZE {table}",
        )


@pytest.mark.parametrize("seed", [0, *(pytest.param(seed, marks=pytest.mark.long) for seed in (1, 2))])
def test_writers_during_slot_creation_snapshot_and_stream_lose_and_repeat_nothing(
    make_flow: MakeFlow, seed: int
) -> None:
    tables = ("a", "b")
    flow = make_flow(tables=tables, range_bytes=64 * 1024, lanes=3)
    make_tables(flow, tables, 4000)
    with Writers(flow.dsn, tables, seed, 4000):
        time.sleep(0.3)
        flow.create()
        time.sleep(0.5)
        flow.snapshot()
        with flow.streaming() as errors:
            until(lambda: status.report(flow.pipeline).counters["published"] > 100, "changes", failed=errors)
    assert not errors
    flow.stream()
    boundary = status.report(flow.pipeline).tables[0].boundary
    for table in tables:
        assert flow.compare(table).differences == []
        assert_exactly_once_in_order(flow.read(table))
    # the run overlapped, or it proves nothing
    assert boundary.split(":")[2], "no transaction was in progress at the boundary"


def test_avro_through_the_registry_equals_the_table(make_flow: MakeFlow, registry: SchemaRegistry) -> None:
    flow = make_flow(registry)
    flow.execute(
        "CREATE TABLE t (a text, b int, c numeric(12,3), d timestamptz, e int[], f inet, g bytea, PRIMARY KEY (b, a))",
        "INSERT INTO t SELECT 'k' || g, g, g / 7.0, now(), ARRAY[g, NULL], '::1', '\\x00ff' FROM generate_series(1, "
        "500) g",
    )
    flow.create()
    flow.snapshot()
    flow.execute("UPDATE t SET c = -c, e = '{3,NULL,4}' WHERE b % 2 = 0", "DELETE FROM t WHERE b % 5 = 0")
    flow.stream()
    comparison = flow.compare("t")
    assert comparison.differences == []
    assert (comparison.rows, comparison.snapshot_records) == (400, 500)


def test_arrays_as_text_hold_every_value(make_flow: MakeFlow) -> None:
    flow = make_flow(arrays="text")
    flow.execute(
        "CREATE TABLE t (id int PRIMARY KEY, a int[], b text[])",
        "INSERT INTO t VALUES (1, '{{1,2},{3,4}}', '[0:1]={x,NULL}')",
    )
    flow.create()
    flow.snapshot()
    flow.execute(
        "INSERT INTO t VALUES (2, '{1}', '{}')", "ALTER TABLE t ADD c date[]", "UPDATE t SET c = '{2000-01-01}'"
    )
    flow.stream()
    assert [(m.value["id"], m.value["a"], m.value["b"], m.value.get("c")) for m in flow.read("t")] == [
        (1, "{{1,2},{3,4}}", "[0:1]={x,NULL}", None),
        (2, "{1}", "{}", None),
        (1, "{{1,2},{3,4}}", "[0:1]={x,NULL}", "{2000-01-01}"),
        (2, "{1}", "{}", "{2000-01-01}"),
    ]


def test_a_restarted_stream_goes_on_where_it_was(make_flow: MakeFlow) -> None:
    flow = make_flow()
    _fill(flow, "a", rows=10)
    flow.create()
    flow.snapshot()
    for i in range(4):
        flow.execute(f"UPDATE a SET n = {i}")
        flow.stream()
    flow.stream()
    messages = flow.read("a")
    assert_exactly_once_in_order(messages)
    assert [m.op for m in messages].count("u") == 40


def test_a_snapshot_is_resumed_after_deletes_key_changes_and_moved_rows(make_flow: MakeFlow) -> None:
    flow = make_flow(range_bytes=64 * 1024, lanes=2)
    _fill(flow, "a", rows=8000)
    flow.create()

    def first_half(tasks: Sequence[LaneTask]) -> list[dict[str, int]]:
        lane.run(flow.pipeline, LaneTask(**{**_fields(tasks[0]), "chunks": tasks[0].chunks[:2]}))
        raise Outage("The cluster went away.")

    with pytest.raises(Outage, match="went away"):
        driver.run(flow.pipeline, first_half)
    with pytest.raises(StateError, match="not complete"):
        flow.stream()
    flow.execute(
        "DELETE FROM a WHERE id % 10 = 0",
        "UPDATE a SET id = id + 100000 WHERE id % 10 = 1",
        "UPDATE a SET name = name || '!'",
    )
    result = flow.snapshot()
    assert result.skipped == 2
    flow.stream()
    assert flow.compare("a").differences == []


def test_a_table_that_was_rewritten_during_its_snapshot_is_read_again(make_flow: MakeFlow) -> None:
    flow = make_flow(range_bytes=64 * 1024, lanes=2)
    _fill(flow, "a", rows=8000)
    flow.create()

    def half(tasks: Sequence[LaneTask]) -> list[dict[str, int]]:
        lane.run(flow.pipeline, LaneTask(**{**_fields(tasks[0]), "chunks": tasks[0].chunks[:2]}))
        raise Outage("The cluster went away.")

    with pytest.raises(Outage):
        driver.run(flow.pipeline, half)
    flow.execute("DELETE FROM a WHERE id < 4000", "VACUUM FULL a")
    flow.change(lanes=3)
    assert flow.snapshot().skipped == 0
    flow.stream()
    assert flow.compare("a").differences == []


def _fields(task: LaneTask) -> dict[str, Any]:
    return {name: getattr(task, name) for name in LaneTask.__slots__}


def test_a_complete_snapshot_is_not_taken_again(make_flow: MakeFlow) -> None:
    flow = make_flow()
    _fill(flow, "a", rows=10)
    flow.create()
    assert flow.snapshot().rows == 10
    assert flow.snapshot().rows == 0
    assert len(flow.read("a")) == 10


def test_skipping_the_snapshot_is_recorded_and_only_new_changes_come(make_flow: MakeFlow) -> None:
    flow = make_flow(skip_snapshot=True)
    _fill(flow, "a", rows=10)
    flow.create()
    flow.execute("INSERT INTO a VALUES (100, 'new', 1)")
    flow.stream()
    assert [m.key["id"] for m in flow.read("a")] == [100]


def test_keys_of_every_kind(make_flow: MakeFlow) -> None:
    flow = make_flow(allow_unkeyed=True, skip_snapshot=True)
    flow.execute(
        "CREATE TABLE pk (a int, b text, c int, PRIMARY KEY (c, a))",
        "CREATE TABLE full_keyed (a int PRIMARY KEY, b text)",
        "ALTER TABLE full_keyed REPLICA IDENTITY FULL",
        "CREATE TABLE full_unkeyed (a int, b text)",
        "ALTER TABLE full_unkeyed REPLICA IDENTITY FULL",
        "CREATE TABLE unkeyed (a int, b text)",
        "CREATE TABLE by_index (a int PRIMARY KEY, b int NOT NULL UNIQUE)",
        "ALTER TABLE by_index REPLICA IDENTITY USING INDEX by_index_b_key",
    )
    flow.create()
    flow.execute("INSERT INTO pk VALUES (1, 'x', 2)", "UPDATE pk SET b = 'y'", "UPDATE pk SET a = 7", "DELETE FROM pk")
    for table in ("full_keyed", "full_unkeyed"):
        flow.execute(
            f"INSERT INTO {table} VALUES (1, 'x')",
            f"UPDATE {table} SET b = 'y'",
            f"UPDATE {table} SET a = 2",
            f"DELETE FROM {table}",
        )
    flow.execute("INSERT INTO unkeyed VALUES (1, 'x')")
    flow.execute("INSERT INTO by_index VALUES (1, 10)", "UPDATE by_index SET a = 2", "UPDATE by_index SET b = 11")
    flow.stream()
    assert [(m.op, m.key, m.value and m.value["b"]) for m in flow.read("pk")] == [
        ("c", {"c": 2, "a": 1}, "x"),
        ("u", {"c": 2, "a": 1}, "y"),
        ("d", {"c": 2, "a": 1}, None),
        ("u", {"c": 2, "a": 7}, "y"),
        ("d", {"c": 2, "a": 7}, None),
    ]
    assert [(m.op, m.key) for m in flow.read("full_keyed")] == [
        ("c", {"a": 1}), ("u", {"a": 1}), ("d", {"a": 1}), ("u", {"a": 2}), ("d", {"a": 2}),
    ]  # fmt: skip
    assert [(m.op, m.key, m.value) for m in flow.read("full_unkeyed")] == [
        ("c", None, {"a": 1, "b": "x"}), ("u", None, {"a": 1, "b": "y"}), ("u", None, {"a": 2, "b": "y"}),
    ]  # fmt: skip
    assert [(m.op, m.key, m.value) for m in flow.read("unkeyed")] == [("c", None, {"a": 1, "b": "x"})]
    assert [(m.op, m.key) for m in flow.read("by_index")] == [
        ("c", {"b": 10}), ("u", {"b": 10}), ("d", {"b": 10}), ("u", {"b": 11}),
    ]  # fmt: skip


def test_a_record_that_cannot_be_encoded_stops_the_stream_before_its_transaction_and_again_after_a_restart(
    make_flow: MakeFlow, registry: SchemaRegistry
) -> None:
    flow = make_flow(registry, skip_snapshot=True)
    flow.execute("CREATE TABLE t (id int PRIMARY KEY, v numeric(5,2))")
    flow.create()
    flow.execute("INSERT INTO t VALUES (1, 1.5)")
    flow.transaction("INSERT INTO t VALUES (2, 2.5)", "INSERT INTO t VALUES (3, 'NaN')")
    flow.execute("INSERT INTO t VALUES (4, 4.5)")
    for _ in range(2):
        with pytest.raises(RecordError, match=r"public\.t.*column 'v'"):
            flow.stream()
        assert latest(flow.pipeline.kafka, flow.topic("t"))[2] == 1
    flow.change(on_error="log")
    counters = flow.stream()
    assert counters["dead_letters"] == 1
    letters = flow.dead_letters()
    assert len(letters) == 1
    assert letters[0].value["relation"] == "public.t"
    assert letters[0].value["op"] == "c"
    assert latest(flow.pipeline.kafka, flow.topic("t"))[2] == 3


def test_a_record_larger_than_its_topic_takes_is_one_dead_letter_among_a_thousand_good_ones(
    make_flow: MakeFlow,
) -> None:
    flow = make_flow(on_error="log", topic_config={"max.message.bytes": "20000"})
    _fill(flow, "a", rows=10)
    flow.execute("UPDATE a SET name = repeat('x', 30000) WHERE id = 5")
    flow.create()
    assert flow.snapshot().dead_letters == 1
    statements = [f"INSERT INTO a VALUES ({i}, 'good', 1)" for i in range(100, 1100)]
    statements[500] = "INSERT INTO a VALUES (600, repeat('x', 30000), 1)"
    flow.transaction(*statements)
    assert flow.stream()["dead_letters"] == 2
    assert len(flow.read("a")) == 9 + 999
    assert len(flow.dead_letters()) == 2


def test_a_large_transaction_is_cut_and_a_restart_goes_on_inside_it(make_flow: MakeFlow) -> None:
    flow = make_flow(skip_snapshot=True, max_transaction_bytes=64 * 1024, batch_bytes=64 * 1024)
    _fill(flow, "a", rows=0)
    flow.create()
    flow.execute("INSERT INTO a SELECT g, repeat('x', 100), g FROM generate_series(1, 5000) g")
    stopped = threading.Event()
    thread = threading.Thread(target=lambda: running.run_stream(flow.pipeline, stopped=stopped))
    thread.start()
    until(lambda: status.report(flow.pipeline).counters["published"], "a part of the transaction", pause=0.01)
    stopped.set()
    thread.join()
    flow.stream()
    messages = flow.read("a")
    assert_exactly_once_in_order(messages)
    assert [m.key["id"] for m in messages] == list(range(1, 5001))


def test_headers_that_settings_ask_for(make_flow: MakeFlow) -> None:
    flow = make_flow(xid_header=True, snapshot_headers=True)
    _fill(flow, "a", rows=1)
    flow.create()
    flow.snapshot()
    xid = flow.execute("UPDATE a SET n = 2 RETURNING pg_current_xact_id()::xid::text::bigint")[0][0]
    flow.stream()
    row, update = flow.read("a")
    assert (row.op, row.pos, row.xid) == ("r", f"{0:016X}/{0:08X}", "")
    assert (update.op, update.xid) == ("u", str(xid))
    # a position of zeros would make a row that is read again older than the change before it
    flow.ask("a")
    flow.stream()
    again = flow.read("a")[-1]
    assert again.snapshot and (again.pos, again.value) == ("", update.value)


def test_truncate_is_an_event_with_its_position(make_flow: MakeFlow) -> None:
    from tests.support.topics import read

    flow = make_flow()
    _fill(flow, "a", rows=10)
    flow.create()
    flow.snapshot()
    flow.execute("TRUNCATE a", "INSERT INTO a VALUES (1, 'after', 1)")
    assert flow.stream()["events"] == 1
    (event,) = read(flow.kafka, f"{flow.pipeline.topic_prefix}._bottledwater_events")
    after = flow.read("a")[-1]
    assert event.value["event"] == "truncate"
    assert event.value["relations"] == ["public.a"]
    assert event.value["pos"] < after.pos


def test_truncate_stops_the_stream_where_the_settings_say_so(make_flow: MakeFlow) -> None:
    flow = make_flow(on_truncate="stop")
    _fill(flow, "a", rows=10)
    flow.create()
    flow.snapshot()
    flow.execute("TRUNCATE a")
    with pytest.raises(RecordError, match="TRUNCATE"):
        flow.stream()


def test_the_newer_of_two_streams_takes_over_and_the_older_names_it(make_flow: MakeFlow) -> None:
    flow = make_flow(skip_snapshot=True, outage_timeout=60.0)
    _fill(flow, "a", rows=1)
    flow.create()
    with flow.streaming() as errors, ThreadPoolExecutor(1) as pool:
        flow.streams()
        newer = pool.submit(running.run_stream, flow.pipeline, bounded=True)

        def changed() -> list[BaseException]:
            flow.execute("UPDATE a SET n = n + 1")
            return errors

        # the older holds the slot, and finds out with a record of its own
        until(changed, "the older stream ends", pause=0.2)
        assert newer.result(60)["published"] > 0
    assert isinstance(errors[0], TakenOver)
    # who has it: the epoch of the newer
    assert "epoch" in str(errors[0])
    flow.stream()
    assert_exactly_once_in_order(flow.read("a"))
    assert flow.compare("a").differences == []


def test_an_idle_table_in_a_busy_database_does_not_retain_wal(make_flow: MakeFlow) -> None:
    flow = make_flow(skip_snapshot=True, tables="a")
    _fill(flow, "a", "busy", rows=1)
    flow.create()
    with flow.streaming() as errors:
        flow.execute("INSERT INTO busy SELECT g, 'x', 1 FROM generate_series(10, 20000) g")
        target = flow.execute("SELECT pg_current_wal_flush_lsn()")[0][0]
        until(
            lambda: flow.execute(
                f"SELECT confirmed_flush_lsn >= '{target}' FROM pg_replication_slots WHERE slot_name = "
                f"'{flow.pipeline.slot}'"
            )[0][0],
            "the slot's position passes what was not published",
            failed=errors,
        )
    assert not errors


@pytest.mark.long
def test_a_broker_that_is_away_for_a_while_is_waited_out(make_flow: MakeFlow, kafka: KafkaBroker) -> None:
    flow = make_flow(skip_snapshot=True, outage_timeout=120.0)
    _fill(flow, "a", rows=1)
    flow.create()
    with flow.streaming() as errors:
        flow.streams()
        flow.execute("UPDATE a SET n = 1")
        kafka.kill()
        flow.execute("UPDATE a SET n = 2")
        time.sleep(3)
        flow.execute("UPDATE a SET n = 3")
        kafka.start()
        until(lambda: status.report(flow.pipeline).counters["published"] >= 3, "all changes", failed=errors)
    assert not errors
    messages = flow.read("a")
    assert_exactly_once_in_order(messages)
    assert [m.value["n"] for m in messages] == [1, 2, 3]


def test_a_walsender_that_is_terminated_is_reconnected(make_flow: MakeFlow) -> None:
    ended = (
        "SELECT pg_terminate_backend(active_pid) FROM pg_replication_slots"
        " WHERE active AND database = current_database()"
    )
    flow = make_flow(skip_snapshot=True)
    _fill(flow, "a", rows=1)
    flow.create()
    with flow.streaming() as errors:
        for i in range(30):
            flow.execute(f"UPDATE a SET n = {i}")
            if i % 10 == 5:
                until(lambda: flow.execute(ended) == [(True,)], "a walsender to terminate", failed=errors)
            time.sleep(0.02)
        until(lambda: status.report(flow.pipeline).counters["published"] >= 30, "all changes", failed=errors)
    assert not errors
    messages = flow.read("a")
    assert_exactly_once_in_order(messages)
    assert [m.value["n"] for m in messages] == list(range(30))


def test_a_column_that_is_added_and_dropped_appears_and_disappears(
    make_flow: MakeFlow, registry: SchemaRegistry
) -> None:
    flow = make_flow(registry, skip_snapshot=True)
    _fill(flow, "a", rows=0)
    flow.create()
    flow.execute("INSERT INTO a VALUES (1, 'x', 1)", "ALTER TABLE a ADD COLUMN extra date DEFAULT '2020-02-02'")
    flow.execute("INSERT INTO a VALUES (2, 'x', 1)", "ALTER TABLE a DROP COLUMN n", "UPDATE a SET name = 'y'")
    flow.stream()
    assert flow.compare("a").differences == []


def test_a_table_that_is_published_behind_our_back_is_left_out_and_named(
    make_flow: MakeFlow, caplog: pytest.LogCaptureFixture
) -> None:
    flow = make_flow(skip_snapshot=True, tables="a")
    _fill(flow, "a", "b", rows=1)
    flow.create()
    flow.execute(f"ALTER PUBLICATION {flow.pipeline.publication_name} ADD TABLE b")
    flow.transaction("UPDATE b SET n = 1", "UPDATE a SET n = 1", "UPDATE b SET n = 2")
    assert flow.stream()["published"] == 1
    assert flow.compare("a").differences == []
    assert (
        caplog.text.count("sends changes of public.b, which are left out: it was dropped, or is not one of the tables")
        == 1
    )


def test_a_slot_that_was_moved_forward_or_dropped_is_refused(make_flow: MakeFlow) -> None:
    flow = make_flow(skip_snapshot=True)
    _fill(flow, "a", rows=1)
    flow.create()
    flow.stream()
    flow.execute("UPDATE a SET n = 7")
    flow.execute(f"SELECT pg_replication_slot_advance('{flow.pipeline.slot}', pg_current_wal_lsn())")
    with pytest.raises(SlotError, match="ahead of what was published"):
        flow.stream()
    flow.execute(f"SELECT pg_drop_replication_slot('{flow.pipeline.slot}')")
    with pytest.raises(SlotError, match="does not exist any more"):
        flow.stream()


def test_a_stop_request_ends_the_job_and_retiring_lets_the_slot_go(make_flow: MakeFlow) -> None:
    flow = make_flow(skip_snapshot=True)
    _fill(flow, "a", rows=1)
    flow.create()
    with connect(flow.dsn) as connection:
        cluster = identify(connection)
    with flow.streaming() as errors:
        flow.streams()
        assert "Kept" in drop(flow.pipeline, when="retired")
        asked = requests.stop_pipeline(flow.pipeline, cluster, retire=True)
        assert asked is not None
        ended = requests.wait_ended(flow.pipeline, cluster, asked.job, timeout=60)
        assert ended is not None
        assert ended.state == "stopped"
    assert not errors
    assert "Dropped slot" in drop(flow.pipeline, when="retired")


@pytest.mark.some(1)
@pytest.mark.parametrize("how", ["asked", "signal", "passed on"])
def test_only_a_stop_that_was_asked_for_is_reported_as_one(make_flow: MakeFlow, how: str) -> None:
    flow = make_flow(skip_snapshot=True)
    _fill(flow, "a", rows=1)
    flow.create()
    stopped, errors = Stop(), list[BaseException]()
    start = begin(flow.pipeline)

    def work() -> None:
        try:
            engine.follow(flow.pipeline, start, stopped=stopped)
        except BaseException as error:
            errors.append(error)

    thread = threading.Thread(target=work, daemon=True)
    thread.start()
    flow.streams()
    if how == "signal":
        stopped.interrupt(15)
    else:
        requests.pass_on(flow.pipeline, start.cluster, start.job, interrupted=15 if how == "passed on" else 0)
    thread.join(60)
    assert not thread.is_alive() and not errors
    told = flow.job
    assert told is not None
    if how == "asked":
        assert (told.state, told.error) == ("stopped", "")
    else:
        # who waits for the end of the stream does not take it for one
        assert (told.state, told.permanent) == ("failed", False)
        assert "SIGTERM from outside" in told.error


@pytest.mark.some(1)
@pytest.mark.parametrize("how", ["asked", "signal"])
def test_only_a_snapshot_that_was_asked_to_stop_is_reported_as_stopped(make_flow: MakeFlow, how: str) -> None:
    flow = make_flow()
    _fill(flow, "a", rows=1)
    flow.create()
    stopped = Stop()

    def lanes(tasks: Sequence[LaneTask]) -> list[dict[str, int]]:
        stopped.interrupt(15) if how == "signal" else stopped.set()
        time.sleep(2)
        return []

    with pytest.raises(StopRequested):
        driver.run(flow.pipeline, lanes, stopped=stopped)
    told = flow.job
    assert told is not None
    assert (told.state, told.permanent, told.over) == (
        ("failed", False, False) if how == "signal" else ("stopped", False, True)
    )
    assert ("SIGTERM from outside" in told.error) == (how == "signal")


@pytest.mark.long
def test_a_consumer_that_reads_uncommitted_and_compares_positions_has_the_same_history(make_flow: MakeFlow) -> None:
    tables = ("a", "b")
    flow = make_flow(tables=tables, skip_snapshot=True, on_error="log")
    # what the broker compares is compressed
    flow.change(kafka={**flow.pipeline.kafka, "compression.type": "none"})
    make_tables(flow, tables, 2000)
    flow.create()
    with flow.streaming() as errors:
        flow.execute(update("b", 0, 0))
        until(lambda: flow.read("b"), "the first record", failed=errors)
        sizes = iter(range(100_000, 10_000, -1000))

        def aborted() -> bool:
            """A transaction of which the broker takes the larger part and refuses a record; it is published again
            without that. A limit that the stream knows, it keeps itself: it is lowered each time."""
            letters, limit = status.report(flow.pipeline).counters["dead_letters"], next(sizes)
            limit_records(flow, "b", limit)
            flow.transaction(
                update("a", 0, 1999),
                f"UPDATE b SET name = repeat('x', {limit + 500}) WHERE id = 1",
                update("a", 0, 1999),
            )
            until(
                lambda: status.report(flow.pipeline).counters["dead_letters"] > letters,
                "the refused record's dead letter",
                failed=errors,
            )
            return len(records(flow, ["a"], committed=False)) > len(records(flow, ["a"]))

        until(aborted, "records of a transaction that was aborted", failed=errors)
        flow.execute(update("a", 0, 1999))
    assert not errors
    flow.stream()
    committed, everything = records(flow, ["a"]), records(flow, ["a"], committed=False)
    kept = uncommitted_rule(everything)
    assert [(r.key, r.pos, r.op, r.version) for r in kept] == [(r.key, r.pos, r.op, r.version) for r in committed]


def test_names_of_any_kind_are_quoted_wherever_they_stand(make_flow: MakeFlow) -> None:
    """Schema, tables, columns, types, attributes and publications, from the slot to the last change: in the snapshot,
    in values that are looked up or converted, in a table that is added later, and in what is dropped."""
    schema, table, later, kind = (
        name + "x" * (63 - len(name.encode())) for name in ('Sch"ä.', 'T\'\\{0}%s "ä".', 'Later "ü".', 'Typ"ö.')
    )
    key, large, words, pair, attribute = (
        name + "y" * (63 - len(name.encode())) for name in ('Id "%s".', "V'{}\\ä", 'W"', "P.", 'A"ß.{')
    )
    published = "P'\"\\{},%s.ä"
    published += "z" * (54 - len(published.encode()))
    flow = make_flow(schemas=(schema,), publication=published)

    def run(statement: str, **more: str) -> list[tuple[Any, ...]]:
        quoted = {"id": key, "v": large, "w": words, "p": pair, "a": attribute}
        parts = {place: sql.Identifier(name) for place, name in quoted.items()}
        qualified = {place: sql.Identifier(schema, name) for place, name in {"t": table, "kind": kind, **more}.items()}
        return flow.execute(
            sql.SQL(statement).format(schema=sql.Identifier(schema), **parts, **qualified).as_string(None)
        )

    def records(name: str) -> list[Any]:
        found = read(flow.kafka, names.topic(schema, name, flow.pipeline.topic_prefix))
        return [(m.key, m.value, m.op, m.toast) for m in found]

    def row(number: int, word: str) -> dict[str, Any]:
        return {key: number, large: "o" * 9000, words: f"'{word}'", pair: {attribute: f"'{word}'"}}

    run("CREATE SCHEMA {schema}")
    run("CREATE TYPE {kind} AS ({a} tsvector)")
    run("CREATE TABLE {t} ({id} int PRIMARY KEY, {v} text, {w} tsvector, {p} {kind})")
    run("ALTER TABLE {t} ALTER {v} SET STORAGE EXTERNAL")
    run("INSERT INTO {t} VALUES (1, repeat('o', 9000), 'one', ROW('one'))")
    flow.create()
    flow.snapshot()
    run("UPDATE {t} SET {w} = 'two', {p} = ROW('two')")
    run("CREATE TABLE {more} ({id} int PRIMARY KEY)", more=later)
    flow.create()
    flow.snapshot()
    run("INSERT INTO {more} VALUES (2)", more=later)
    flow.stream()
    assert records(table) == [({key: 1}, row(1, "one"), "r", ""), ({key: 1}, row(1, "two"), "u", "reread")]
    assert records(later) == [({key: 2}, {key: 2}, "c", "")]
    with connect(flow.dsn) as connection:
        found = publication.read(connection, published)
        assert found is not None
        assert len(found.tables) == 2
    drop(flow.pipeline, when="always")
    with connect(flow.dsn) as connection:
        assert [publication.read(connection, name) for name in publication.names(published)] == [None, None]
