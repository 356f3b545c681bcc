"""The verification finds every kind of damage in a topic, and only that; and it never cries wolf while writers run.

``BOTTLEDWATER_SEEDS`` says how many rounds under writers, ``BOTTLEDWATER_SEED`` which is the first.
"""

from __future__ import annotations

import contextlib
import itertools
import json
import os
import random
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from typing import Any

import msgspec
import psycopg
import pytest
from confluent_kafka import Producer

from airflow_bottledwater.backoff import Backoff
from airflow_bottledwater.errors import Outage, PreflightError, StateError
from airflow_bottledwater.local.registry import SchemaRegistry
from airflow_bottledwater.model.job import Owner
from airflow_bottledwater.model.lsn import parse_lsn
from airflow_bottledwater.postgres import pgoutput
from airflow_bottledwater.provision import pausing
from airflow_bottledwater.provision.drop import drop
from airflow_bottledwater.state.verification import Verification
from airflow_bottledwater.stream.publisher import StreamPublisher
from airflow_bottledwater.stream.source import open_source
from airflow_bottledwater.stream.start import begin
from airflow_bottledwater.tables import watch
from airflow_bottledwater.verify import driver, latest, moment, streaming
from tests.support.options import COLUMNS, HASH_KEY, drawn, keyed
from tests.support.topics import Flow, MakeFlow
from tests.support.waiting import until
from tests.support.writers import ASYNCHRONOUS, PREPARING, SHORT, Habit, Writers, make_tables

pytestmark = pytest.mark.long

FIRST = int(os.environ.get("BOTTLEDWATER_SEED", "1"))
SEEDS = range(FIRST, FIRST + int(os.environ.get("BOTTLEDWATER_SEEDS", "6")))
#: transactions that stay open for a while, so that snapshots have some in progress
WRITERS = (*[Habit(open_for=(0.05, 0.3))] * 4, SHORT, SHORT, ASYNCHRONOUS, PREPARING)
ROWS = 300
TABLE = (
    "CREATE TABLE items (id bigint PRIMARY KEY, name text, price numeric(12,2), at timestamptz, ok boolean,"
    " ratio float8)"
)
FILL = (
    "INSERT INTO items SELECT g, 'item ' || g, g / 7.0, timestamptz '2026-01-01' + g * interval '1.5 s', g % 3 = 0, g "
    f"/ 3.0 FROM generate_series(1, {ROWS}) g"
)


def verify(flow: Flow, **settings: Any) -> Verification:
    """Verify, tasks as threads."""
    pipeline = flow.pipeline.with_(**{"verify_timeout": 20.0, **settings})
    return driver.run(pipeline, driver.in_threads(pipeline))


def kinds(found: Verification) -> dict[str, int]:
    """What was found of the only table."""
    (table,) = found.tables
    return table.counts


@contextlib.contextmanager
def running(flow: Flow) -> Iterator[None]:
    """The stream runs beside the block, and does not fail."""
    with flow.streaming() as errors:
        yield
    assert not errors, errors


def begun(flow: Flow) -> Flow:
    """A pipeline with a snapshot of the table, and some changes to come."""
    flow.execute(TABLE, FILL)
    flow.create()
    flow.snapshot()
    flow.execute("UPDATE items SET name = name || '!' WHERE id % 5 = 0", "DELETE FROM items WHERE id % 50 = 0")
    return flow


class Damage:
    """A producer that nobody has asked for, and what the topic has."""

    def __init__(self, flow: Flow) -> None:
        self.flow, self.topic = flow, flow.topic("items")
        self._producer = Producer({"bootstrap.servers": flow.kafka.bootstrap, "partitioner": "murmur2_random"})
        self.records = raw(flow, self.topic)

    def write(self, key: bytes, value: bytes | None, **more: Any) -> None:
        """Write a record."""
        self._producer.produce(self.topic, value, key, **more)
        assert self._producer.flush(60) == 0

    def key(self, number: int) -> bytes:
        """The bytes of a key."""
        encoded = number * 2  # Avro's zigzag
        varint = bytearray()
        while encoded > 127:
            varint.append(encoded & 127 | 128)
            encoded >>= 7
        varint.append(encoded)
        if self.flow.pipeline.format == "json":
            return json.dumps({"id": number}, separators=(",", ":")).encode()
        head = next(iter(self.records))[:5]
        return head + bytes(varint)


def raw(flow: Flow, topic: str) -> dict[bytes, bytes]:
    """The latest values of a topic, as they are."""
    from airflow_bottledwater.kafka.topic_reader import blocks
    from airflow_bottledwater.kafka.topics import Topics

    config = flow.pipeline.kafka
    partitions = Topics(config).describe([topic])[topic].partitions
    found: dict[bytes, bytes] = {}
    for block in blocks(config, topic, Topics(config).ends(topic, partitions), Backoff(10)):
        for i in range(len(block)):
            value = block.value(i)
            if value is None:
                found.pop(block.key(i), None)
            else:
                found[block.key(i)] = value
    return found


@pytest.fixture(params=["avro", "json"])
def flow(request: pytest.FixtureRequest, make_flow: MakeFlow, registry: SchemaRegistry) -> Flow:
    return begun(make_flow(registry if request.param == "avro" else None, tables="items", partitions=3))


# ---------------------------------------------------------------------- what is not damaged
def test_a_pipeline_in_order_is_equal(flow: Flow) -> None:
    with running(flow):
        found = verify(flow)
    (table,) = found.tables
    assert (table.verdict, table.rows, table.older, table.left_out) == ("equal", ROWS - ROWS // 50, 0, [])
    assert msgspec.convert(found.as_json(), Verification) == found


def test_an_idle_database_and_an_empty_table_pass(make_flow: MakeFlow) -> None:
    flow = make_flow(tables="items")
    flow.execute(TABLE)
    flow.create()
    flow.snapshot()
    with running(flow):
        assert [verify(flow).tables[0].verdict for _ in range(2)] == ["equal", "equal"]


# ---------------------------------------------------------------------- damage
def test_a_dropped_key_is_missing(flow: Flow) -> None:
    with running(flow):
        assert not kinds(verify(flow))
        damage = Damage(flow)
        damage.write(damage.key(7), None)
        found = verify(flow)
    assert kinds(found) == {"missing": 1}
    (difference,) = found.tables[0].differences
    assert difference.key == {"id": "7"}
    assert "bottledwater snapshot --tables public.items --sweep" in found.advice()


def test_a_key_without_any_record_is_missing(make_flow: MakeFlow) -> None:
    flow = make_flow(tables="items", skip_snapshot=True)
    flow.execute(TABLE, "INSERT INTO items (id) VALUES (1), (2), (3)")
    flow.create()
    with running(flow):
        flow.execute("UPDATE items SET name = 'published' WHERE id = 2")
        found = verify(flow)
    assert kinds(found) == {"missing": 2}
    assert {(d.key["id"], d.partition, d.offset) for d in found.tables[0].differences} == {("1", -1, -1), ("3", -1, -1)}


def test_a_stale_a_changed_and_a_foreign_value_are_different(flow: Flow) -> None:
    with running(flow):
        damage = Damage(flow)
        of_another = damage.records[damage.key(12)]
        changed = damage.records[damage.key(13)].replace(b"item 13", b"item 31")
        damage.write(damage.key(11), of_another)
        damage.write(damage.key(13), changed)
        first = damage.records[damage.key(17)]
        flow.execute("UPDATE items SET name = 'newer' WHERE id = 17")
        assert not {d.key["id"] for d in verify(flow).tables[0].differences} - {"11", "13"}
        damage.write(damage.key(17), first)
        found = verify(flow)
    assert kinds(found) == {"different": 3}
    told = {d.key["id"]: (d.column, d.in_table, d.in_topic) for d in found.tables[0].differences}
    assert told["11"] == ("id", "11", "12")
    assert told["13"] == ("name", "item 13", "item 31")
    assert told["17"] == ("name", "newer", "item 17")


def test_a_key_that_the_table_does_not_have_is_surplus(flow: Flow) -> None:
    with running(flow):
        verify(flow)
        damage = Damage(flow)
        damage.write(damage.key(5000), damage.records[damage.key(3)])
        damage.write(damage.key(50), damage.records[damage.key(3)])  # it was deleted
        found = verify(flow)
    assert kinds(found) == {"surplus": 2}
    assert {d.key["id"] for d in found.tables[0].differences} == {"5000", "50"}


def test_a_record_in_a_partition_that_its_key_does_not_belong_to_is_found(flow: Flow) -> None:
    with running(flow):
        verify(flow)
        damage = Damage(flow)
        for partition in range(3):  # one of them is right
            damage.write(damage.key(3), damage.records[damage.key(3)], partition=partition)
        found = verify(flow)
        assert kinds(found) == {"wrong partition": 2}
        for partition in {d.partition for d in found.tables[0].differences}:
            damage.write(damage.key(3), None, partition=partition)
        assert not kinds(verify(flow))


def test_what_nobody_can_decode_is_found(flow: Flow) -> None:
    with running(flow):
        verify(flow)
        damage = Damage(flow)
        damage.write(damage.key(4), b"\x00\x7f\xff\xff\xffgarbage")
        damage.write(b"no key", damage.records[damage.key(3)])
        found = verify(flow)
    assert kinds(found) == {"unreadable": 2}


def test_a_key_in_other_bytes_is_surplus(make_flow: MakeFlow) -> None:
    flow = begun(make_flow(tables="items"))
    with running(flow):
        damage = Damage(flow)
        damage.write(b'{"id": 8}', damage.records[damage.key(8)])
        found = verify(flow)
    assert kinds(found) == {"surplus": 1}


def test_a_position_that_no_transaction_can_have_hides_nothing(flow: Flow) -> None:
    with running(flow):
        verify(flow)
        damage = Damage(flow)
        headers = [("op", b"d"), ("pos", b"7FFFFFFF00000000/00000001")]
        damage.write(damage.key(7), None, headers=headers)
        assert kinds(verify(flow)) == {"missing": 1}


def test_thousands_of_damaged_keys_are_counted(make_flow: MakeFlow, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(driver, "_AT_ONCE", 50)
    flow = begun(make_flow(tables="items"))
    with running(flow):
        verify(flow)
        damage = Damage(flow)
        for number in range(101, 150):
            damage.write(damage.key(number), None)
        assert kinds(verify(flow)) == {"missing": 49}
        monkeypatch.setattr(driver, "_ENOUGH", 5)
        found = verify(flow)
    assert found.tables[0].unexamined
    assert kinds(found)["missing"] >= 5


def test_a_sample_finds_its_share(make_flow: MakeFlow) -> None:
    flow = begun(make_flow(tables="items"))
    with running(flow):
        rows = [verify(flow, verify_sample=0.2).tables[0].rows for _ in range(3)]
    assert all(20 <= each <= 110 for each in rows)
    assert len(set(rows)) > 1


# ---------------------------------------------------------------------- what looks like damage
def test_a_truncated_table_is_empty_for_its_consumers(flow: Flow) -> None:
    with running(flow):
        flow.execute("TRUNCATE items", "INSERT INTO items (id) VALUES (3)", "INSERT INTO items (id) VALUES (5000)")
        assert not kinds(verify(flow))
        damage = Damage(flow)
        damage.write(damage.key(3), None)
        assert kinds(verify(flow)) == {"missing": 1}


def test_what_is_written_behind_a_truncate_without_a_position_is_not_deleted_by_it(flow: Flow) -> None:
    with running(flow):
        flow.execute("TRUNCATE items", "INSERT INTO items (id) SELECT generate_series(1, 30)")
        assert not kinds(verify(flow))
        damage = Damage(flow)
        damage.write(damage.key(9999), damage.records[damage.key(3)])
        assert kinds(verify(flow)) == {"surplus": 1}


def test_rows_of_a_new_snapshot_are_not_deleted_by_a_truncate_of_before(
    make_flow: MakeFlow, monkeypatch: pytest.MonkeyPatch
) -> None:
    flow, looks = begun(make_flow(tables="items", partitions=3)), list[int]()
    flow.execute("TRUNCATE items", FILL)
    flow.stream()
    drop(flow.pipeline, when="always")
    flow.execute("DELETE FROM items WHERE id % 2 = 0")
    flow.create()
    flow.snapshot()
    _while_it_reads(monkeypatch, looks.append)
    with running(flow):
        (table,) = verify(flow).tables
    assert (table.verdict, table.rows, looks) == ("equal", ROWS // 2, [1])


def test_a_truncate_of_another_source_deletes_nothing(flow: Flow) -> None:
    ((now,),) = flow.execute("SELECT pg_current_wal_insert_lsn()::text")
    event = {"event": "truncate", "pipeline": "1/db/slot", "pos": f"{parse_lsn(now):016X}/00000001"}
    producer = Producer({"bootstrap.servers": flow.kafka.bootstrap})
    value = json.dumps({**event, "topics": [flow.topic("items")]}).encode()
    producer.produce(f"{flow.pipeline.topic_prefix}._bottledwater_events", value)
    assert producer.flush() == 0
    with running(flow):
        assert not kinds(verify(flow))


def test_a_row_that_was_read_again_is_older_or_newer_than_a_truncate_by_its_header(flow: Flow) -> None:
    with running(flow):
        flow.execute("TRUNCATE items", "INSERT INTO items (id) VALUES (3)")
        assert not kinds(verify(flow))
        damage = Damage(flow)
        row = damage.records[damage.key(7)]
        ((now,),) = flow.execute("SELECT pg_current_wal_insert_lsn()::text")
        damage.write(damage.key(7), row, headers=[("snapshot", b"0123456789ab/0/1")])
        assert not kinds(verify(flow))
        # an id is any text; this one looks like an LSN itself
        damage.write(damage.key(7), row, headers=[("snapshot", f"AB/0/{now}".encode())])
        assert kinds(verify(flow)) == {"surplus": 1}


def test_rows_that_were_read_again_after_a_truncate_need_no_second_look(
    make_flow: MakeFlow, monkeypatch: pytest.MonkeyPatch
) -> None:
    flow = begun(make_flow(tables="items"))
    looks: list[int] = []
    _while_it_reads(monkeypatch, looks.append)
    with running(flow):
        flow.execute("TRUNCATE items", "INSERT INTO items (id) VALUES (3), (4)")
        request = flow.ask("items")
        until(lambda: flow.reported(request).state == "finished", "it is read again")
        assert [m.snapshot != "" for m in flow.read("items") if m.key == {"id": 3}][-1]
        assert not kinds(verify(flow))
    assert looks == [1]


def test_a_table_that_was_altered_is_compared_in_what_its_records_have(flow: Flow) -> None:
    with running(flow):
        flow.execute(
            "ALTER TABLE items ADD COLUMN note text DEFAULT 'new', ADD COLUMN empty int",
            "ALTER TABLE items DROP COLUMN ratio",
            "UPDATE items SET name = 'again' WHERE id = 1",
        )
        found = verify(flow)
        assert (kinds(found), found.tables[0].older) == ({}, ROWS - ROWS // 50 - 1)
        damage = Damage(flow)
        damage.write(damage.key(3), damage.records[damage.key(6)])
        assert kinds(verify(flow)) == {"different": 1}


def test_a_large_table_that_was_altered_is_not_read_again_and_again(
    make_flow: MakeFlow, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(driver, "_AT_ONCE", 20)
    monkeypatch.setattr(driver, "_LOOKS", 3)
    flow, looks = begun(make_flow(tables="items")), list[int]()
    _while_it_reads(monkeypatch, looks.append)
    with running(flow):
        flow.execute("ALTER TABLE items ADD COLUMN note text DEFAULT 'new'")
        found = verify(flow)
        (table,) = found.tables
        assert (table.verdict, table.counts, table.unsettled) == ("unsettled", {}, 0)
        assert table.unexamined and table.older and looks == [1, 2, 3, 4]
        assert found.advice().endswith("bottledwater snapshot --tables public.items")
        request = flow.ask("items")
        until(lambda: flow.reported(request).state == "finished", "the advice")
        assert verify(flow).tables[0].verdict == "equal"


def test_records_without_a_position_count_by_their_place(make_flow: MakeFlow) -> None:
    flow = begun(make_flow(tables="items"))
    with running(flow):
        verify(flow)
        damage = Damage(flow)
        row = damage.records[damage.key(3)].replace(b"item 3", b"newest")
        flow.execute("UPDATE items SET name = 'newest' WHERE id = 3")
        damage.write(damage.key(3), row, headers=[("read", b"1")])
        assert not kinds(verify(flow))


def test_what_the_stream_has_not_published_yet_is_waited_for(flow: Flow) -> None:
    flow.stream()
    flow.execute("UPDATE items SET name = 'later'")
    with ThreadPoolExecutor(1) as pool:
        found = pool.submit(verify, flow)
        time.sleep(1.0)
        with running(flow):
            assert not kinds(found.result(60))


def _while_it_reads(monkeypatch: pytest.MonkeyPatch, act: Callable[[int], None]) -> None:
    """Let something happen under each snapshot, before the topics' ends are read."""
    original, count = moment.Moments._wait_reached, itertools.count(1)

    def wait(self: moment.Moments, lsn: int, holder: Any) -> None:
        original(self, lsn, holder)
        act(next(count))
        time.sleep(0.7)  # the stream publishes it

    monkeypatch.setattr(moment.Moments, "_wait_reached", wait)


def test_what_is_later_than_the_snapshot_is_not_looked_at(flow: Flow, monkeypatch: pytest.MonkeyPatch) -> None:
    looks: list[int] = []

    def act(number: int) -> None:
        looks.append(number)
        flow.execute("UPDATE items SET name = 'later' WHERE id = 3", "DELETE FROM items WHERE id = 4")

    with running(flow):
        verify(flow)
        _while_it_reads(monkeypatch, act)
        assert verify(flow).tables[0].verdict == "equal"
    assert looks == [1]


def test_what_the_snapshot_shows_counts_though_it_was_changed_since(
    make_flow: MakeFlow, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A damaged key leads to a look at its whole bucket, in which another key is changed meanwhile."""
    monkeypatch.setattr(driver, "bits_for", lambda keys: 0)
    flow = begun(make_flow(tables="items"))
    with running(flow):
        damage = Damage(flow)
        damage.write(damage.key(7), None)
        _while_it_reads(monkeypatch, lambda number: flow.execute(f"UPDATE items SET name = 'n{number}' WHERE id = 3"))
        (table,) = verify(flow).tables
    assert (table.counts, table.unsettled) == ({"missing": 1}, 0)


def test_a_key_that_is_changed_all_the_time_is_unsettled(make_flow: MakeFlow, monkeypatch: pytest.MonkeyPatch) -> None:
    """Somebody writes nonsense, and under each snapshot again: it may be the stream, which repairs it in a moment."""
    flow = begun(make_flow(tables="items"))
    with running(flow):
        damage = Damage(flow)
        _while_it_reads(monkeypatch, lambda number: damage.write(damage.key(7), None))
        (table,) = verify(flow).tables
    assert (table.counts, table.unsettled, table.verdict) == ({}, 1, "unsettled")


def test_a_key_that_is_changed_for_a_while_is_looked_at_until_it_is_not(
    make_flow: MakeFlow, monkeypatch: pytest.MonkeyPatch
) -> None:
    flow = begun(make_flow(tables="items"))
    with running(flow):
        damage = Damage(flow)
        _while_it_reads(monkeypatch, lambda number: damage.write(damage.key(7), None) if number <= 3 else None)
        (table,) = verify(flow).tables
    assert (table.counts, table.unsettled) == ({"missing": 1}, 0)


def test_a_version_that_was_left_out_since_its_row_is_gone_is_no_difference(
    make_flow: MakeFlow, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An update is left out, and the delete behind it is not published yet when the topic is read."""
    monkeypatch.setattr(driver, "bits_for", lambda keys: 0)
    monkeypatch.setattr(streaming, "_PATIENCE", 0.0)
    flow = make_flow(tables="items")
    flow.execute(
        "CREATE TABLE items (id bigint PRIMARY KEY, n int, big text)",
        "ALTER TABLE items ALTER big SET STORAGE EXTERNAL",
        "INSERT INTO items SELECT g, 0, repeat('x', 5000) FROM generate_series(1, 10) g",
    )
    flow.create()
    flow.snapshot()
    flow.stream()
    damage = Damage(flow)
    damage.write(damage.key(7), None)
    original, withheld, numbers = moment.Moments._wait_reached, [False], itertools.count(1)

    def wait(self: moment.Moments, lsn: int, holder: Any) -> None:
        number = next(numbers)
        if number == 2:
            flow.execute("UPDATE items SET n = 1 WHERE id = 4", "DELETE FROM items WHERE id = 3")
            _stream_before_a_delete(flow)
        original(self, lsn, holder)
        if number == 1:
            flow.execute("UPDATE items SET n = 1 WHERE id = 3")
        withheld[0] = number == 1

    monkeypatch.setattr(moment.Moments, "_wait_reached", wait)

    def advance(owner: Owner | None) -> None:
        if not withheld[0]:
            flow.stream()

    found = driver.run(flow.pipeline, driver.in_threads(flow.pipeline), advance=advance)
    assert (kinds(found), found.tables[0].unsettled) == ({"missing": 1}, 0)
    assert [message.value for message in flow.read("items") if message.key["id"] == 3][1:] == [None]


def _stream_before_a_delete(flow: Flow) -> None:
    """Publish what is committed before the first DELETE."""
    start, backoff = begin(flow.pipeline), Backoff(10)
    with (
        closing(StreamPublisher(flow.pipeline, start, start.state, backoff)) as publisher,
        closing(open_source(flow.pipeline, start, start.state, backoff, publisher.reached())) as source,
    ):
        while True:
            if (batch := source.next(0.1, flush_empty=True)) is None:
                continue
            deletes = batch.changes[batch.changes["kind"] == pgoutput.DELETE]
            publisher.publish(batch.before(int(deletes["lsn"][0])) if len(deletes) else batch)
            if len(deletes):
                return


# ---------------------------------------------------------------------- a commit that others do not see yet
@pytest.mark.parametrize("written", ["items", "items_1"])
def test_a_commit_that_waits_for_its_standby_is_no_difference(
    make_flow: MakeFlow, monkeypatch: pytest.MonkeyPatch, written: str
) -> None:
    """Its change is in the topic long before a snapshot shows it; a partition may be written to under its own name."""
    flow = make_flow(tables="items")
    if written != "items":
        flow.execute(f"{TABLE} PARTITION BY RANGE (id)", "CREATE TABLE items_1 PARTITION OF items DEFAULT", FILL)
        flow.create()
        flow.snapshot()
    else:
        begun(flow)
    monkeypatch.setattr(moment, "_SETTLE", 3.0)
    stuck = psycopg.connect(flow.dsn, autocommit=True)
    stuck.execute("SET synchronous_commit = on")
    with running(flow):
        verify(flow)
        flow.execute("ALTER SYSTEM SET synchronous_standby_names = 'nobody'", "SELECT pg_reload_conf()")
        try:
            time.sleep(0.3)
            thread = threading.Thread(target=lambda: stuck.execute(f"DELETE FROM {written} WHERE id = 3"), daemon=True)
            thread.start()
            time.sleep(1.0)
            assert flow.execute("SELECT count(*) FROM items WHERE id = 3") == [(1,)]
            flow.execute("SET synchronous_commit = local", "SELECT pg_logical_emit_message(true, 'x', 'x')")
            found = verify(flow)
            assert (kinds(found), found.tables[0].verdict) == ({}, "unsettled")
            releasing = threading.Timer(1.5, lambda: flow.execute(
                "ALTER SYSTEM RESET synchronous_standby_names", "SELECT pg_reload_conf()"
            ))  # fmt: skip
            releasing.start()
            monkeypatch.setattr(moment, "_SETTLE", 20.0)
            found = verify(flow)
            assert found.tables[0].verdict == "equal"
            thread.join(60)
        finally:
            flow.execute("ALTER SYSTEM RESET synchronous_standby_names", "SELECT pg_reload_conf()")
            stuck.close()


# ---------------------------------------------------------------------- what cannot be verified
def test_without_a_stream_it_says_so(flow: Flow) -> None:
    flow.stream()
    flow.execute("UPDATE items SET name = 'later'")
    with pytest.raises(Outage, match="no stream reads from the slot"):
        verify(flow, verify_timeout=1.0)


def test_before_the_snapshot_is_complete_it_is_refused(make_flow: MakeFlow) -> None:
    flow = make_flow(tables="items")
    flow.execute(TABLE, FILL)
    with pytest.raises(StateError, match="does not know slot"):
        verify(flow)
    flow.create()
    with pytest.raises(StateError, match="not complete"):
        verify(flow)


def test_tables_are_chosen_and_those_without_a_key_are_named(
    make_flow: MakeFlow, monkeypatch: pytest.MonkeyPatch
) -> None:
    # one that was dropped is still followed
    monkeypatch.setattr(watch, "LASTS", 1000.0)
    flow = make_flow(allow_unkeyed=True, tables="items,keyless")
    flow.execute("CREATE TABLE keyless (a int)", "CREATE TABLE other (id int PRIMARY KEY)")
    begun(flow)
    with running(flow):
        assert {t.table: t.verdict for t in verify(flow).tables} == {
            "public.items": "equal",
            "public.keyless": "equal",
        }
        assert [t.table for t in verify(flow, verify_tables="items").tables] == ["public.items"]
        with pytest.raises(PreflightError, match=r"public.other does not belong"):
            verify(flow, verify_tables="other")
        flow.execute("DROP TABLE items")
        (dropped,) = (t for t in verify(flow).tables if t.table == "public.items")
        assert not dropped.verified and dropped.dropped and "does not exist any more" in dropped.reason


def test_a_table_that_has_lost_its_key_does_not_keep_others_from_being_compared(make_flow: MakeFlow) -> None:
    flow = make_flow(tables="items,other")
    flow.execute("CREATE TABLE other (id int PRIMARY KEY)", "INSERT INTO other VALUES (1)")
    begun(flow)
    with running(flow):
        flow.execute("ALTER TABLE items DROP CONSTRAINT items_pkey")
        found = {table.table: table for table in verify(flow).tables}
    assert found["public.other"].verdict == "equal" and not found["public.items"].verified
    assert "The key of public.items changed from (id) to (none)" in found["public.items"].reason


def test_a_table_that_is_paused_while_it_is_compared_is_not_said_to_differ(
    make_flow: MakeFlow, monkeypatch: pytest.MonkeyPatch
) -> None:
    flow = begun(make_flow(tables="items"))

    def pause(number: int) -> None:
        if number == 1:
            asked = pausing.ask(flow.pipeline, ["items"], paused=True, by="alice", why="a migration")
            assert pausing.carried_out(flow.pipeline, *asked, timeout=60)

    with running(flow):
        damage = Damage(flow)
        damage.write(damage.key(7), None)
        _while_it_reads(monkeypatch, pause)
        (table,) = verify(flow).tables
    assert not table.verified and not table.counts and "a migration" in table.reason


@pytest.mark.parametrize("statement", ["DROP TABLE items", "ALTER TABLE items DROP CONSTRAINT items_pkey"])
def test_a_table_that_cannot_be_compared_any_more_is_to_be_verified_again(
    make_flow: MakeFlow, monkeypatch: pytest.MonkeyPatch, statement: str
) -> None:
    flow, original = begun(make_flow(tables="items")), moment.Moments.settle

    def settle(self: moment.Moments, oids: Any) -> bool:
        with contextlib.suppress(psycopg.Error):
            flow.execute(statement)
        return original(self, oids)

    with running(flow):
        damage = Damage(flow)
        damage.write(damage.key(7), None)
        monkeypatch.setattr(moment.Moments, "settle", settle)
        with pytest.raises(Outage, match=r"(dropped while|While) it was verified.*Verify again"):
            verify(flow)
        assert verify(flow).tables[0].verdict in ("dropped", "not verified")


def test_a_renamed_table_is_named_as_it_is_called_now(make_flow: MakeFlow) -> None:
    flow = begun(make_flow(tables="items"))
    with running(flow):
        flow.execute("ALTER TABLE items RENAME TO things")
        damage = Damage(flow)
        damage.write(damage.key(7), None)
        assert "bottledwater snapshot --tables public.things --sweep" in verify(flow).advice()
        assert verify(flow, verify_tables="things").tables[0].table == "public.things"
        asked = pausing.ask(flow.pipeline, ["things"], paused=True, by="alice", why="a migration")
        assert pausing.carried_out(flow.pipeline, *asked, timeout=60)
        assert "resume-table --tables public.things" in verify(flow).tables[0].reason


def test_many_keys_are_read_in_several_passes(make_flow: MakeFlow, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(latest.LatestValues.__init__, "__kwdefaults__", {"places": 64})
    flow = begun(make_flow(tables="items"))
    with running(flow):
        found = verify(flow)
        assert (kinds(found), found.tables[0].rows) == ({}, ROWS - ROWS // 50)
        damage = Damage(flow)
        damage.write(damage.key(7), None)
        damage.write(damage.key(5000), damage.records[damage.key(3)])
        assert kinds(verify(flow)) == {"missing": 1, "surplus": 1}


# ---------------------------------------------------------------------- under writers
@pytest.mark.parametrize("seed", SEEDS)
def test_under_writers_nothing_is_found_but_the_damage(
    make_flow: MakeFlow, registry: SchemaRegistry, seed: int
) -> None:
    dice = random.Random(seed)
    flow = make_flow(
        registry if dice.random() < 0.5 else None,
        tables="a,b",
        partitions=dice.choice((1, 3)),
        lanes=dice.choice((1, 2)),
        table_options=(options := drawn(dice, ("a", "b"), [*COLUMNS])),
        hash_key=HASH_KEY,
    )
    make_tables(flow, ("a", "b"), ROWS)
    for statement in keyed(options):
        flow.execute(statement)
    flow.create()
    flow.snapshot()
    with running(flow), Writers(flow.dsn, ("a", "b"), seed, ROWS, habits=WRITERS, pause=(0.0, 0.02)):
        for _ in range(int(os.environ.get("BOTTLEDWATER_ROUNDS", "4"))):
            time.sleep(dice.uniform(0.0, 0.2))
            found = verify(flow)
            assert found.as_json()["equal"], found
