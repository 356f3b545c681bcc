"""Live snapshots: rows that are read again while the stream runs."""

from __future__ import annotations

import dataclasses
import functools
import time
from collections.abc import Callable
from contextlib import closing
from pathlib import Path
from threading import Thread
from typing import Any

import numpy as np
import psycopg
import pytest

from airflow_bottledwater import backoff
from airflow_bottledwater.backoff import Backoff
from airflow_bottledwater.encoding.layout import CHANGE
from airflow_bottledwater.errors import BottledWaterError, CredentialsRefused, Outage
from airflow_bottledwater.jobs import snapshots
from airflow_bottledwater.kafka.errors import NewProducerNeeded, RecordRefused
from airflow_bottledwater.live import reading
from airflow_bottledwater.live import snapshot as live_snapshot
from airflow_bottledwater.live import snapshots as live_snapshots
from airflow_bottledwater.live.changed_keys import ChangedKeys
from airflow_bottledwater.live.chunks import LiveChunk
from airflow_bottledwater.live.reading import LiveReader
from airflow_bottledwater.live.snapshot import LiveSnapshot
from airflow_bottledwater.local.kafka import KafkaBroker
from airflow_bottledwater.local.postgres import PostgresServer
from airflow_bottledwater.policy import transient
from airflow_bottledwater.postgres import row_filter
from airflow_bottledwater.provision import live
from airflow_bottledwater.provision.drop import drop
from airflow_bottledwater.publish.batch import Batch
from airflow_bottledwater.publish.session import PublishSession
from airflow_bottledwater.snapshot.latest import LatestRecords
from airflow_bottledwater.state.claim import read_state
from airflow_bottledwater.state.control_records import SnapshotRequest, reading_key, snapshot_key
from airflow_bottledwater.state.control_topic import ControlTopic
from airflow_bottledwater.stream.engine import flush_target
from airflow_bottledwater.stream.publisher import StreamPublisher
from airflow_bottledwater.stream.source import open_source
from airflow_bottledwater.stream.start import begin
from tests.support.live import read_by_single_blocks
from tests.support.topics import Flow, MakeFlow, Message, limit_records
from tests.support.waiting import until
from tests.support.writers import state_topic

ROWS = 3000


def _make(flow: Flow, rows: int = ROWS) -> Flow:
    flow.execute(
        "CREATE TABLE items (id bigint PRIMARY KEY, day date, name text)",
        f"INSERT INTO items SELECT g, date '2026-01-01' + g::int % 10, 'item ' || g FROM generate_series(1, {rows}) g",
    )
    flow.create()
    flow.snapshot()
    flow.stream()
    return flow


@pytest.fixture
def flow(make_flow) -> Flow:  # type: ignore[no-untyped-def]
    return _make(make_flow(tables="items"))


def _again(flow: Flow, request_id: str) -> list[Message]:
    return [m for m in flow.read("items") if m.snapshot.startswith(f"{request_id}/")]


def test_a_table_is_read_again_by_a_bounded_run(flow: Flow) -> None:
    request_id = flow.ask("items")
    flow.stream()
    found = _again(flow, request_id)
    assert sorted(m.value["id"] for m in found) == list(range(1, ROWS + 1))
    assert {m.pos for m in found} == {""}
    report = flow.reported(request_id)
    assert (report.state, report.rows, report.superseded, report.error) == ("finished", ROWS, 0, "")
    assert report.tables == ["public.items"]
    # nothing is left to do
    flow.stream()
    assert len(_again(flow, request_id)) == ROWS
    assert flow.compare("items").equal


def test_a_slice(flow: Flow) -> None:
    request_id = flow.ask("items", where="day = '2026-01-03' OR false")
    flow.stream()
    assert {m.value["day"] for m in _again(flow, request_id)} == {"2026-01-03"}
    assert flow.reported(request_id).rows == ROWS // 10


@pytest.mark.long
def test_beside_a_stream_without_changes_it_may_take_all_the_time(
    make_flow: MakeFlow, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With a hundredth of it, each of the hundred chunks would be followed by a second in which nothing is
    published."""
    read_by_single_blocks(monkeypatch)
    flow = _make(make_flow(tables="items", live_share=0.01), 15000)
    with flow.streaming() as errors:
        asked = flow.ask("items")
        until(lambda: flow.reported(asked).ended, "the live snapshot ends", 45, pause=0.5, failed=errors)
    assert flow.reported(asked).rows == 15000


def test_several_queue_and_a_later_change_is_not_undone(flow: Flow) -> None:
    first, second = flow.ask("items", where="id <= 10"), flow.ask("items", where="id <= 20")
    flow.execute("UPDATE items SET name = 'changed' WHERE id <= 5", "DELETE FROM items WHERE id = 6")
    flow.stream()
    assert len(_again(flow, first)) == 9
    assert len(_again(flow, second)) == 19
    assert flow.compare("items").equal


def test_sweep(flow: Flow) -> None:
    flow.damage("items", {"id": 99_999}, {"id": 99_999, "day": None, "name": "not there"})
    flow.damage("items", {"id": 7}, None)
    assert not flow.compare("items").equal
    request_id = flow.ask("items", sweep=True)
    flow.stream()
    report = flow.reported(request_id)
    assert (report.state, report.tombstones, report.rows) == ("finished", 1, ROWS)
    assert flow.compare("items").equal


def test_nothing_is_left_of_them_when_the_slot_is_dropped(flow: Flow) -> None:
    flow.ask("items")
    flow.stream()
    flow.ask("items")
    assert len(snapshots.reports(flow.pipeline, flow.name)) == 2
    drop(flow.pipeline, when="always")
    assert snapshots.reports(flow.pipeline, flow.name) == {}


def test_old_reports_are_removed(flow: Flow, monkeypatch: pytest.MonkeyPatch) -> None:
    request_id = flow.ask("items")
    flow.stream()
    assert request_id in snapshots.reports(flow.pipeline, flow.name)
    monkeypatch.setattr(snapshots, "_KEPT", 0.0)
    flow.ask("items", where="false")
    flow.stream()
    assert request_id not in snapshots.reports(flow.pipeline, flow.name)


# ---------------------------------------------------------------------- what happens in the middle
def _before_the_first_chunk_is_handed_over(patch: pytest.MonkeyPatch, act: Callable[[], object]) -> None:
    original, done = LiveReader._hand_over, list[bool]()

    def hand_over(self: LiveReader, chunk: LiveChunk) -> None:
        if not done:
            done.append(True)
            act()
        original(self, chunk)

    patch.setattr(LiveReader, "_hand_over", hand_over)


def test_rows_from_before_a_truncate_are_not_published_behind_it(flow: Flow, monkeypatch: pytest.MonkeyPatch) -> None:
    _before_the_first_chunk_is_handed_over(
        monkeypatch, lambda: flow.published("TRUNCATE items", "INSERT INTO items VALUES (1, NULL, 'after')")
    )
    request_id = flow.ask("items")
    flow.stream()
    assert [(m.value["id"], m.value["name"]) for m in _again(flow, request_id)] == [(1, "after")]
    assert flow.reported(request_id).state == "finished"


def test_the_row_of_a_dead_letter_is_left_out(make_flow: MakeFlow, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its key is known, and the dead letter is newer."""
    flow = _make(make_flow(tables="items", on_error="log"), 100)
    limit_records(flow, "items", 2000)
    large = "(SELECT string_agg(md5(g::text), '') FROM generate_series(1, 100) g)"
    _before_the_first_chunk_is_handed_over(
        monkeypatch, lambda: flow.published(f"UPDATE items SET name = {large} WHERE id = 1")
    )
    request_id = flow.ask("items")
    flow.stream()
    assert [m.value["id"] for m in _again(flow, request_id)] == list(range(2, 101))
    assert (flow.reported(request_id).state, flow.reported(request_id).superseded) == ("finished", 1)
    assert len(flow.dead_letters()) == 1


def test_a_change_that_cannot_be_encoded_does_not_make_a_sweep_begin_anew_that_has_found_nothing(
    flow: Flow, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of such a change, no key is known that would be newer."""
    original, swept, note = LiveReader._find_keys, list[bool](), ChangedKeys.newer

    def find_keys(self: LiveReader, *arguments: Any) -> Any:
        swept.append(True)
        return original(self, *arguments)

    def newer(self: ChangedKeys, *arguments: Any) -> Any:
        found = note(self, *arguments)
        return dataclasses.replace(found, all=found.all or 0 < len(swept) < 3)

    monkeypatch.setattr(LiveReader, "_find_keys", find_keys)
    monkeypatch.setattr(ChangedKeys, "newer", newer)
    request_id = flow.ask("items", sweep=True)
    flow.stream()
    assert len(swept) == 1 and flow.reported(request_id).state == "finished"


def test_a_table_that_is_rewritten_meanwhile_is_read_from_its_start(
    flow: Flow, monkeypatch: pytest.MonkeyPatch
) -> None:
    read_by_single_blocks(monkeypatch)
    _before_the_first_chunk_is_handed_over(
        monkeypatch, lambda: flow.published("DELETE FROM items WHERE id <= 2000", "VACUUM FULL items")
    )
    request_id = flow.ask("items")
    flow.stream()
    assert {m.value["id"] for m in _again(flow, request_id)} == set(range(2001, ROWS + 1))


def test_a_column_that_is_added_meanwhile_is_in_the_rows(flow: Flow, monkeypatch: pytest.MonkeyPatch) -> None:
    read_by_single_blocks(monkeypatch)
    _before_the_first_chunk_is_handed_over(
        monkeypatch, lambda: flow.execute("ALTER TABLE items ADD extra int DEFAULT 7")
    )
    request_id = flow.ask("items")
    flow.stream()
    found = _again(flow, request_id)
    assert {m.value["id"] for m in found} == set(range(1, ROWS + 1))
    assert found[-1].value["extra"] == 7


@pytest.mark.long
def test_a_commit_that_was_published_before_others_can_see_it_is_not_undone(tmp_path: Path, kafka: KafkaBroker) -> None:
    """It waits for a synchronous standby: the stream has it already, a snapshot shows the row before it."""
    settings = {"synchronous_standby_names": "nobody", "synchronous_commit": "local"}
    with PostgresServer(tmp_path / "postgres", settings=settings) as server:
        flow = _make(Flow(server.createdb("shop"), kafka, None, tables="items"))
        waits = Thread(
            target=lambda: flow.execute("SET synchronous_commit = on", "UPDATE items SET name = 'new' WHERE id = 1")
        )
        waits.start()
        until(lambda: [m for m in flow.read("items") if m.op == "u"] or (flow.stream() and None), "it is published")
        request_id = flow.ask("items")
        with flow.streaming() as errors:
            until(lambda: flow.reported(request_id).state == "waiting", "it waits", failed=errors)
            assert "older than it" in flow.reported(request_id).what
            assert _again(flow, request_id) == []
            flow.execute(
                "SELECT pg_cancel_backend(pid) FROM pg_stat_activity WHERE wait_event = 'SyncRep' AND backend_type = "
                "'client backend'"
            )
            until(lambda: flow.reported(request_id).state == "finished", "it ends", failed=errors)
        waits.join(60)
        assert next(m for m in _again(flow, request_id) if m.value["id"] == 1).value["name"] == "new"


def test_it_is_paused_resumed_and_cancelled(flow: Flow, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reading, "_FIRST_BLOCKS", 1)
    first, second = flow.ask("items", rows_per_second=500.0), flow.ask("items", where="id = 1")
    with flow.streaming() as errors:
        until(lambda: flow.reported(first).rows > 0, "rows", failed=errors)
        snapshots.change(flow.pipeline, flow.name, first, paused=True)
        until(lambda: flow.reported(first).state == "paused", "it is paused", failed=errors)
        # the next one is taken meanwhile
        until(lambda: flow.reported(second).state == "finished", "the other one ends", failed=errors)
        snapshots.change(flow.pipeline, flow.name, first, paused=False, rows_per_second=0.0)
        until(lambda: flow.reported(first).state == "finished", "it ends", failed=errors)
        third = flow.ask("items", rows_per_second=100.0)
        until(lambda: flow.reported(third).state == "reading", "it reads", failed=errors)
        snapshots.change(flow.pipeline, flow.name, third, cancelled=True)
        until(lambda: flow.reported(third).state == "cancelled", "it is cancelled", failed=errors)
    assert sorted(m.value["id"] for m in _again(flow, first)) == list(range(1, ROWS + 1))


@pytest.mark.some(1)
@pytest.mark.parametrize(
    ("tables", "where", "says"),
    [
        ("items", "nonsense", "does not accept the condition"),
        ("items", "true; DROP TABLE items", "does not accept the condition"),
        # it would stand beside the table's own filter
        ("items", "true) OR (true", "does not accept the condition"),
        ("items", "true]) = (ARRAY[true", "does not accept the condition"),
        ("nothing", "", "nothing"),
        ("other", "", "is not one of the tables"),
    ],
)
def test_what_cannot_be_read_fails_and_the_stream_goes_on(flow: Flow, tables: str, where: str, says: str) -> None:
    flow.execute("CREATE TABLE other (id int PRIMARY KEY)")
    with pytest.raises(BottledWaterError, match=says):
        live.ask(flow.pipeline, SnapshotRequest((tables,), where))
    request_id = flow.ask(tables, where=where)
    flow.execute("INSERT INTO items VALUES (0, NULL, 'more')")
    assert flow.stream()["published"] >= 1
    report = flow.reported(request_id)
    assert report.state == "failed" and says in report.error
    assert flow.compare("items").equal


@pytest.mark.parametrize("by_key", [False, True])
def test_a_condition_that_is_changed_later_runs_no_other_statement(
    flow: Flow, monkeypatch: pytest.MonkeyPatch, by_key: bool
) -> None:
    """Whoever may write to the shared topic can change a request that has begun."""
    monkeypatch.setattr(reading, "_FIRST_BLOCKS", 1)
    flow.execute("CREATE TABLE other (id int PRIMARY KEY)")
    asked = flow.ask("items", where="id > 0", rows_per_second=100.0, by_key=by_key)
    with flow.streaming() as errors:
        until(lambda: flow.reported(asked).rows > 0, "it reads", failed=errors)
        snapshots.change(flow.pipeline, flow.name, asked, where="true); COMMIT; DROP TABLE public.other; SELECT (true")
        until(lambda: flow.reported(asked).state == "failed", "it fails", failed=errors)
    assert flow.execute("SELECT to_regclass('other')") != [(None,)]
    assert not errors


def test_a_condition_that_fails_at_a_row_does_not_tell_the_row(make_flow: MakeFlow) -> None:
    flow = _make(make_flow(tables="items", table_options={"items": {"mask": {"name": "null"}}}), 5)
    asked = flow.ask("items", where="name::int > 0")
    flow.stream()
    report = flow.reported(asked)
    assert report.state == "failed" and "invalid text representation (SQLSTATE 22P02)" in report.error
    assert "item " not in report.error


def test_a_change_that_the_rows_show_leaves_none_of_them_out(flow: Flow, monkeypatch: pytest.MonkeyPatch) -> None:
    original = LiveReader._step

    def step(self: LiveReader) -> None:
        # noted by the publisher, and shown by the snapshot that is taken then
        flow.published("UPDATE items SET name = 'noted' WHERE id <= 10")
        original(self)

    monkeypatch.setattr(LiveReader, "_step", step)
    request_id = flow.ask("items")
    with flow.streaming() as errors:
        until(lambda: flow.reported(request_id).state == "finished", "it ends", failed=errors)
    assert len(_again(flow, request_id)) == ROWS
    assert flow.reported(request_id).superseded == 0


@pytest.mark.some(1)
@pytest.mark.parametrize("seen", ["by its next batch", "by its rows"])
def test_changes_that_were_published_elsewhere_make_the_rows_be_read_again(flow: Flow, seen: str) -> None:
    """Another process of the same job publishes a batch: this one has noted nothing of it, and sees that by P."""
    start, waiting = begin(flow.pipeline), Backoff(10)
    request_id = flow.ask("items")
    with closing(StreamPublisher(flow.pipeline, start, start.state, waiting)) as mine:
        mine.reached()
        until(lambda: mine.live.work() or mine.live.waits, "rows are read")
        flow.execute("UPDATE items SET name = 'newer' WHERE id = 1")
        with closing(StreamPublisher(flow.pipeline, start, start.state, waiting)) as other:
            other.reached()
            with closing(open_source(flow.pipeline, start, start.state, waiting, other.position)) as source:
                target = flush_target(flow.pipeline)
                while other.position.lsn < target:
                    if (batch := source.next(0.2, flush_empty=True)) is not None:
                        other.publish(batch)
        mine._session.close()
        reached = mine.reached()
        if seen == "by its next batch":
            nothing = np.zeros(0, dtype=np.uint8)
            mine.publish(Batch(reached, reached, nothing, np.zeros(0, dtype=CHANGE), ()))
        mine.live.work()
        assert _again(flow, request_id) == []
    flow.stream()
    assert flow.compare("items").equal
    assert [m.value["name"] for m in _again(flow, request_id) if m.value["id"] == 1] == ["newer"]


@pytest.mark.long
def test_a_request_that_was_answered_is_not_begun_again_when_a_job_starts(
    flow: Flow, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is still in the shared topic, and its removal comes with another fetch."""
    request_id = flow.ask("items", where="id <= 100")
    flow.stream()
    assert len(_again(flow, request_id)) == 100
    take, completed = snapshots.SnapshotRequests._take, snapshots.SnapshotRequests._completed
    rest, due = list[Any](), time.monotonic() + 5.0

    def first(self: Any, changes: list[Any]) -> None:
        found = next((i for i, (key, value) in enumerate(changes) if request_id in key and value), len(changes))
        take(self, changes[: found + 1])
        rest.extend(changes[found + 1 :])

    def then(self: Any) -> None:
        if time.monotonic() > due:
            take(self, rest)
            completed(self)

    monkeypatch.setattr(snapshots.SnapshotRequests, "_take", first)
    monkeypatch.setattr(snapshots.SnapshotRequests, "_completed", then)
    with flow.streaming() as errors:
        flow.streams()
        flow.published("UPDATE items SET name = 'beside' WHERE id = 1")
        assert time.monotonic() < due
        time.sleep(max(0.0, due + 1.0 - time.monotonic()))
    assert not errors
    monkeypatch.undo()
    flow.stream()
    assert len(_again(flow, request_id)) == 100
    assert not read_state(flow.pipeline, state_topic(flow)).lives


@pytest.mark.long
@pytest.mark.parametrize(
    ("tables", "changes"),
    [
        pytest.param(["items"], ["UPDATE busy SET n = n + 1"], id="another table"),
        pytest.param(["busy", "items"], ["UPDATE busy SET n = n + 1"], id="a table that is done"),
        pytest.param(["items"], ["UPDATE items SET name = name || '!' WHERE id = 1"] * 600, id="one row"),
    ],
)
def test_a_sweep_ends_beside_changes_that_are_none_of_many_of_its_keys(
    make_flow: MakeFlow, monkeypatch: pytest.MonkeyPatch, tables: list[str], changes: list[str]
) -> None:
    monkeypatch.setattr(live_snapshots, "MOST", 500)
    original, begun = LiveReader._sweep, list[bool]()

    def sweep(self: LiveReader, connection: Any, oid: int) -> None:
        begun.append(True)
        if len(begun) == len(tables):
            flow.execute(*changes)
            flow.published("UPDATE busy SET n = n + 1 WHERE id = 1")
        original(self, connection, oid)

    monkeypatch.setattr(LiveReader, "_sweep", sweep)
    flow = make_flow(tables="*")
    flow.execute(
        "CREATE TABLE busy AS SELECT g AS id, 0 AS n FROM generate_series(1, 1000) g",
        "ALTER TABLE busy ADD PRIMARY KEY (id)",
    )
    _make(flow, 100)
    flow.damage("items", {"id": 99_999}, {"id": 99_999, "name": "not there"})
    request_id = flow.ask(*tables, sweep=True)
    flow.stream()
    assert flow.reported(request_id).state == "finished" and flow.reported(request_id).tombstones == 1
    assert len(begun) == len(tables)


@pytest.mark.long
def test_a_wildcard_means_the_tables_that_can_be_read_again(make_flow: MakeFlow) -> None:
    flow = make_flow(tables="items,unkeyed", allow_unkeyed=True)
    flow.execute("CREATE TABLE unkeyed (n int)", "CREATE TABLE other (id int PRIMARY KEY)")
    _make(flow, 10)
    asked, foreign, unkeyed = flow.ask("*"), flow.ask("*", "other"), flow.ask("unkey*")
    flow.stream()
    assert (flow.reported(asked).state, flow.reported(asked).rows) == ("finished", 10)
    assert "public.other is not one of the tables" in flow.reported(foreign).error
    assert "public.unkeyed is published without a key" in flow.reported(unkeyed).error
    # the advice
    flow.execute("ALTER TABLE unkeyed ADD PRIMARY KEY (n)")
    drop(flow.pipeline, when="always")
    flow.change(topic_prefix=f"{flow.pipeline.topic_prefix}_2")
    flow.create()
    flow.snapshot()
    asked = flow.ask("unkeyed")
    flow.stream()
    assert flow.reported(asked).state == "finished"


def test_tables_are_read_side_by_side_and_none_twice_at_a_time(
    make_flow: MakeFlow, monkeypatch: pytest.MonkeyPatch
) -> None:
    names = [f"t{number}" for number in range(4)]
    flow = make_flow(tables="*")
    for name in names:
        flow.execute(f"CREATE TABLE {name} AS SELECT g AS id FROM generate_series(1, 50) g")
        flow.execute(f"ALTER TABLE {name} ADD PRIMARY KEY (id)")
    flow.create()
    flow.snapshot()
    now, most, together = list[str](), list[int](), list[int]()
    original = LiveReader.run

    def run(self: LiveReader) -> None:
        (oid,) = self._at.tables
        name = self._tables[oid].table.name
        now.append(name)
        most.append(len(now))
        together.append(now.count(name))
        time.sleep(1.0)
        original(self)
        now.remove(name)

    monkeypatch.setattr(LiveReader, "run", run)
    for name in names:
        flow.damage(name, {"id": 777}, {"id": 777})
    asked = [flow.ask(name, sweep=True) for name in (*names, names[0])]
    flow.stream()
    assert {flow.reported(each).state for each in asked} == {"finished"}
    assert all(flow.compare(name).equal for name in names)
    assert (max(most), max(together)) == (4, 1)


@pytest.mark.long
def test_between_two_ranges_of_a_sweep_what_the_topic_has_by_then_is_forgotten(
    make_flow: MakeFlow, monkeypatch: pytest.MonkeyPatch
) -> None:
    """However often a large topic is read, it does not begin anew because of all changes since its first range."""
    monkeypatch.setattr(live_snapshots, "MOST", 300)
    monkeypatch.setattr(reading, "LatestRecords", functools.partial(LatestRecords, places=64))
    original, begun = LiveReader._sweep, list[bool]()

    def sweep(self: LiveReader, connection: Any, oid: int) -> None:
        begun.append(True)
        original(self, connection, oid)

    begin = LiveReader._begin

    def beside(self: LiveReader, connection: Any, oid: int) -> Any:
        if begun:
            flow.published("UPDATE items SET name = name || '.' WHERE id <= 100")
        return begin(self, connection, oid)

    monkeypatch.setattr(LiveReader, "_sweep", sweep)
    monkeypatch.setattr(LiveReader, "_begin", beside)
    flow = _make(make_flow(tables="items"), 200)
    flow.damage("items", {"id": 99_999}, {"id": 99_999, "name": "not there"})
    request_id = flow.ask("items", sweep=True)
    with flow.streaming() as errors:
        until(lambda: flow.reported(request_id).state == "finished", "it ends", failed=errors)
    assert flow.reported(request_id).tombstones == 1 and len(begun) == 1
    flow.stream()
    assert flow.compare("items").equal


def test_a_sweep_repeats_no_tombstone(flow: Flow, monkeypatch: pytest.MonkeyPatch) -> None:
    done: list[bool] = []
    ends = reading.Topics.ends

    def late(self: Any, name: str, partitions: int, **more: bool) -> Any:
        found = ends(self, name, partitions, **more)
        if name == flow.topic("items") and not done:
            done.append(True)
            flow.published("DELETE FROM items WHERE id = 5")
        return found

    monkeypatch.setattr(reading.Topics, "ends", late)
    request_id = flow.ask("items", sweep=True)
    with flow.streaming() as errors:
        until(lambda: flow.reported(request_id).state == "finished", "it ends", failed=errors)
    assert done and flow.reported(request_id).tombstones == 0
    assert [m.value for m in flow.read("items") if m.key["id"] == 5][-2:] != [None, None]


# ---------------------------------------------------------------------- what is in its way does not stop the stream
def test_while_somebody_has_locked_the_table_the_stream_goes_on(
    make_flow: MakeFlow, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A condition is tried on the table before anything is read."""
    monkeypatch.setattr(live_snapshots, "_AGAIN", 1.0)
    flow = make_flow(tables="*")
    flow.execute("CREATE TABLE other (id int PRIMARY KEY)")
    _make(flow, 100)
    with flow.streaming() as errors, psycopg.connect(flow.dsn) as migration:
        flow.streams()
        migration.execute("LOCK items IN ACCESS EXCLUSIVE MODE")
        request_id = flow.ask("items", where="id <= 10")
        until(lambda: flow.reported(request_id).state == "waiting", "it waits", failed=errors)
        assert "lock timeout" in flow.reported(request_id).what
        for number in range(5):
            flow.published(f"INSERT INTO other VALUES ({number})")
        migration.rollback()
        until(lambda: flow.reported(request_id).state == "finished", "it ends", failed=errors)
    assert len(_again(flow, request_id)) == 10 and not errors


def test_a_server_that_ends_while_the_condition_is_tried_is_an_outage(
    flow: Flow, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(live_snapshots, "_AGAIN", 1.0)
    original, tried = row_filter.check_alone, list[float]()

    def check(*arguments: Any) -> None:
        tried.append(time.monotonic())
        if len(tried) < 3:
            raise psycopg.errors.AdminShutdown("terminating connection due to administrator command")
        original(*arguments)

    monkeypatch.setattr(row_filter, "check_alone", check)
    request_id = flow.ask("items", where="id <= 10")
    flow.stream()
    assert (flow.reported(request_id).state, flow.reported(request_id).rows) == ("finished", 10)
    # it does not connect in vain all the time; who reads tries it once more
    assert len(tried) == 4 and tried[2] - tried[0] > 2.0


@pytest.mark.some(1)
@pytest.mark.parametrize("what", ["rows", "removed keys"])
def test_when_the_broker_refuses_records_for_a_moment_they_are_published_again(
    flow: Flow, monkeypatch: pytest.MonkeyPatch, what: str
) -> None:
    """The limits of a topic were changed, say: a new producer compares them. Or a limit that only the broker knows is
    met by a batch."""
    for number in range(100):
        flow.damage("items", {"id": 90_000 + number}, {"id": 90_000 + number, "name": "not there"})
    transact, publish, rule_out = PublishSession.transact, LiveSnapshot._publish, live_snapshot.rule_out
    kinds, refused, asked = list[bool](), list[bool](), list[bool]()

    def publishing(self: LiveSnapshot, chunk: LiveChunk, progress: Any) -> None:
        kinds.append(bool(chunk.stale))
        publish(self, chunk, progress)

    def refuse(self: PublishSession, batches: Any, progress: Any, **options: bool) -> None:
        # the progress behind a chunk is put in at its end
        if not progress and kinds[-1] == (what == "removed keys") and len(refused) < 2:
            refused.append(True)
            self.close()
            raise RecordRefused("The broker refuses a record.", 0, 87)
        transact(self, batches, progress, **options)

    def ruling_out(*arguments: Any) -> None:
        rule_out(*arguments)
        asked.append(True)
        if len(asked) == 1:
            raise NewProducerNeeded("The limits of the topics were changed")

    monkeypatch.setattr(LiveSnapshot, "_publish", publishing)
    monkeypatch.setattr(PublishSession, "transact", refuse)
    monkeypatch.setattr(live_snapshot, "rule_out", ruling_out)
    request_id = flow.ask("items", sweep=True)
    flow.stream()
    report = flow.reported(request_id)
    assert (report.state, report.rows, report.tombstones) == ("finished", ROWS, 100)
    assert len(refused) == len(asked) == 2
    assert flow.compare("items").equal


@pytest.mark.parametrize(
    ("where", "what", "lasting"),
    [
        pytest.param(live_snapshots, "connected", False, marks=pytest.mark.long),
        (live_snapshots, "connected", True),
        pytest.param(reading, "connect_source", True, marks=pytest.mark.long),
        pytest.param(reading.Topics, "ends", False, marks=pytest.mark.long),
    ],
    ids=["when it begins, for a moment", "when it begins", "when it reads", "when it sweeps, for a moment"],
)
def test_a_password_that_is_rotated_fails_no_live_snapshot(
    flow: Flow, monkeypatch: pytest.MonkeyPatch, where: Any, what: str, lasting: bool
) -> None:
    """The stream's own connections go on; a job that is submitted again gets the new password."""
    monkeypatch.setattr(live_snapshots, "_AGAIN", 0.5)
    monkeypatch.setattr(backoff, "ROTATION", 2.0)
    original, refused = getattr(where, what), list[float]()

    def refuse(*arguments: Any, **options: Any) -> Any:
        others = what == "ends" and arguments[1] != flow.topic("items")
        if others or (refused and not lasting):
            return original(*arguments, **options)
        refused.append(time.monotonic())
        raise CredentialsRefused("The connection is refused: authentication failed.")

    request_id = flow.ask("items", sweep=True)
    with monkeypatch.context() as patch:
        patch.setattr(where, what, refuse)
        if lasting:
            with pytest.raises(Outage, match="had worked with these credentials") as ended:
                flow.stream()
            assert transient(ended.value) and refused[-1] - refused[0] >= 1.0
        else:
            flow.stream()
    flow.stream()
    assert refused and flow.reported(request_id).state == "finished"
    assert flow.compare("items").equal


@pytest.mark.some(1)
@pytest.mark.parametrize("what", ["the report", "the removal of its request"])
def test_an_end_that_kafka_does_not_take_at_first_is_told_later(
    flow: Flow, monkeypatch: pytest.MonkeyPatch, what: str
) -> None:
    """Until then, the request is open and its progress is kept: it is neither forgotten nor begun again."""
    monkeypatch.setattr(live_snapshots, "_AGAIN", 0.5)
    request_id, failed = flow.ask("items"), list[str]()
    flow.change(heartbeat_interval=20.0)
    write = ControlTopic.write

    def away(key: str) -> None:
        if len(failed) < 3:
            failed.append(key)
            assert [each.ended for each in read_state(flow.pipeline, state_topic(flow)).lives.values()] == ["finished"]
            raise Outage("Kafka did not take a control record.")

    def writes(self: Any, records: Any, *, wait: float = 10.0) -> None:
        key = (reading_key if what == "the report" else snapshot_key)(flow.name, request_id)
        if key in records and wait:
            away(key)
        write(self, records, wait=wait)

    monkeypatch.setattr(ControlTopic, "write", writes)
    flow.stream()
    assert len(failed) == 3
    ((request, report),) = snapshots.reports(flow.pipeline, flow.name).values()
    assert request is None and report is not None and report.state == "finished"
    assert len(_again(flow, request_id)) == ROWS
    assert not read_state(flow.pipeline, state_topic(flow)).lives
