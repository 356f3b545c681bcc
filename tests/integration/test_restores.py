"""A source that was restored to an earlier moment, with a new slot and a snapshot into the same topics: positions there
are lower than those of the time that was lost, which the topics have still."""

from __future__ import annotations

import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psycopg
import pytest

from airflow_bottledwater.errors import BottledWaterError, SlotError
from airflow_bottledwater.jobs import status
from airflow_bottledwater.jobs.changes import between
from airflow_bottledwater.local.kafka import KafkaBroker
from airflow_bottledwater.local.postgres import PostgresServer
from airflow_bottledwater.model.lsn import Position, parse_lsn
from airflow_bottledwater.provision.drop import drop
from airflow_bottledwater.provision.redrive import RedriveResult, redrive
from airflow_bottledwater.verify import driver as verification
from tests.support.tables import look_often
from tests.support.topics import Flow, MakeFlow, delete_topic, limit_records, read
from tests.support.waiting import until

ROWS = [(n, n) for n in range(1, 6)]
#: more than the topic takes
LARGE = "repeat('x', 30000)"


class RestoredServer:
    """A server that is set back to its backup, and then is on another timeline."""

    def __init__(self, folder: Path) -> None:
        self.server = PostgresServer(folder / "postgres", settings={"restore_command": "/bin/false"})
        self._backup = folder / "backup"
        self.server.start()

    def back_up(self) -> None:
        """Copy all files, while the server is down."""
        self.server.stop()
        subprocess.run(["cp", "-a", self.server.data, self._backup], check=True)
        self.server.start()

    def restore(self, *, recovery: bool = True) -> None:
        """Go back to the copy.

        :param recovery: whether by a recovery, which begins a new timeline.
        """
        self.server.stop()
        shutil.rmtree(self.server.data)
        subprocess.run(["cp", "-a", self._backup, self.server.data], check=True)
        if recovery:
            version = self.server.data / "PG_VERSION"
            subprocess.run(["cp", "-a", version, version.with_name("recovery.signal")], check=True)
        self.server.start()
        until(lambda: not self._is_recovering(), "the server is a primary")

    def _is_recovering(self) -> bool:
        with psycopg.connect(self.server.dsn()) as connection:
            return connection.execute("SELECT pg_is_in_recovery()").fetchone() == (True,)


@pytest.fixture
def restored(tmp_path: Path) -> Iterator[RestoredServer]:
    made = RestoredServer(tmp_path)
    yield made
    made.server.stop()


def far(flow: Flow, segments: int) -> None:
    """Move the end of the WAL."""
    for _ in range(segments):
        flow.execute("CREATE TABLE moved ()", "DROP TABLE moved", "SELECT pg_switch_wal()")


def end_of_wal(flow: Flow) -> int:
    return parse_lsn(flow.execute("SELECT pg_current_wal_insert_lsn()::text")[0][0])


def copied(flow: Flow) -> list[tuple[Any, Any]]:
    """A copy of the table, as docs/message-format.md tells consumers to make one from the topics' beginning."""
    topic, start, truncated = flow.topic("a"), [0], list[str]()
    for event in read(flow.kafka, f"{flow.pipeline.topic_prefix}._bottledwater_events"):
        if topic not in event.value["topics"]:
            continue
        if event.value["event"] == "begin":
            start, truncated = event.value["topics"][topic], []
        else:
            truncated.append(event.value["pos"])
    rows: dict[int, tuple[str, Any]] = {}
    for message in flow.read("a"):
        if message.offset < start[message.partition]:
            continue
        _, _, shown = message.snapshot.partition("/")
        at = message.pos or (str(Position(parse_lsn(shown))) if shown else "")
        rows.pop(message.key["id"], None)
        if message.value is not None:
            rows[message.key["id"]] = at, message.value["n"]
    last = max(truncated, default="")
    return sorted((key, n) for key, (at, n) in rows.items() if at >= last)


@pytest.mark.long
def test_the_time_that_a_restore_took_back_says_nothing_of_what_came_behind_it(
    kafka: KafkaBroker, restored: RestoredServer
) -> None:
    flow = Flow(restored.server.createdb("d"), kafka, None, on_error="log", topic_config={"max.message.bytes": "20000"})
    flow.execute(
        "CREATE TABLE a (id int PRIMARY KEY, t text, n int)",
        "INSERT INTO a SELECT g, '', g FROM generate_series(1, 5) g",
    )
    flow.create()
    flow.snapshot()
    flow.stream()
    restored.back_up()
    # the time that is lost
    far(flow, 3)
    flow.execute(
        "UPDATE a SET n = 100",
        "TRUNCATE a",
        f"INSERT INTO a VALUES (2, '', 1), (7, '', 1), (8, {LARGE}, 1), (9, '', 1)",
    )
    assert flow.stream()["dead_letters"] == 1
    lost = end_of_wal(flow)
    restored.restore()
    assert end_of_wal(flow) < lost
    with pytest.raises(SlotError, match="timeline 2"):
        flow.stream()
    drop(flow.pipeline, when="always")
    flow.create()
    begun = end_of_wal(flow)
    flow.snapshot()
    assert copied(flow) == ROWS == flow.execute("SELECT id, n FROM a ORDER BY 1")
    # changes of today have lower positions than those of the lost time
    flow.execute(
        "UPDATE a SET n = 20 WHERE id = 2", f"INSERT INTO a VALUES (7, {LARGE}, 7)", "DELETE FROM a WHERE id = 1"
    )
    assert flow.stream()["dead_letters"] == 1
    reached = end_of_wal(flow)
    assert reached < lost
    (of_a,) = between(flow.pipeline, flow.name, ["a"], begun, reached - 1).tables.values()
    found = [m for m in flow.read("a") if of_a.start[0] <= m.offset < of_a.end[0]]
    assert [m.key["id"] for m in found if m.pos] == [2, 1]
    limit_records(flow, "a", 100_000)
    # what the lost time has written of 8 is nothing that the table holds
    assert redrive(flow.pipeline) == RedriveResult(published=1, overtaken=1)
    table = flow.execute("SELECT id, n FROM a ORDER BY 1")
    assert copied(flow) == table and flow.compare("a").differences == []
    flow.execute("TRUNCATE a", "INSERT INTO a VALUES (3, '', 3)")
    flow.stream()
    assert end_of_wal(flow) < lost and copied(flow) == [(3, 3)]
    # the WAL passes where the lost time has truncated the table
    far(flow, 5)
    flow.execute("INSERT INTO a VALUES (4, '', 4)")
    flow.stream()
    assert end_of_wal(flow) > lost
    with flow.streaming() as errors:
        pipeline = flow.pipeline.with_(verify_timeout=20.0)
        (verified,) = verification.run(pipeline, verification.in_threads(pipeline)).tables
        assert verified.verdict == "equal" and not errors


def test_a_truncate_of_before_a_new_snapshot_deletes_nothing_of_it(make_flow: MakeFlow) -> None:
    flow = make_flow()
    flow.execute("CREATE TABLE a (id int PRIMARY KEY, n int)", "INSERT INTO a VALUES (1, 1)")
    flow.create()
    flow.snapshot()
    flow.execute("TRUNCATE a", "INSERT INTO a VALUES (2, 2), (3, 3)")
    flow.stream()
    assert copied(flow) == [(2, 2), (3, 3)]
    drop(flow.pipeline, when="always")
    flow.execute("DELETE FROM a WHERE id = 2")
    flow.create()
    flow.snapshot()
    assert copied(flow) == [(3, 3)]
    # one that was made again begins before where the one of before has begun
    drop(flow.pipeline, when="always")
    delete_topic(flow, flow.topic("a"))
    flow.change(skip_snapshot=True)
    flow.create()
    flow.execute("INSERT INTO a VALUES (4, 4)")
    flow.stream()
    assert copied(flow) == [(4, 4)]
    # without a snapshot, what the topic has stays valid
    drop(flow.pipeline, when="always")
    flow.create()
    assert copied(flow) == [(4, 4)]


def test_a_server_that_was_set_back_behind_a_snapshot_is_refused_before_anything_was_streamed(
    kafka: KafkaBroker, restored: RestoredServer
) -> None:
    flow = Flow(restored.server.createdb("d"), kafka, None)
    flow.execute("CREATE TABLE a (id int PRIMARY KEY, n int)")
    flow.create()
    restored.back_up()
    far(flow, 1)
    flow.execute("INSERT INTO a VALUES (1, 1)")
    flow.snapshot()
    restored.restore(recovery=False)
    for act in (flow.snapshot, flow.stream):
        with pytest.raises(SlotError, match="beyond the end of the server's WAL"):
            act()
    drop(flow.pipeline, when="always")
    flow.create()
    flow.snapshot()
    assert copied(flow) == []


@pytest.mark.long
def test_a_database_that_was_restored_beside_its_own_and_has_its_name_now_begins_anew(
    kafka: KafkaBroker, restored: RestoredServer
) -> None:
    dsn = restored.server.createdb("d")
    flow = Flow(dsn, kafka, None)
    flow.execute("CREATE TABLE a (id int PRIMARY KEY, n int)", "INSERT INTO a VALUES (1, 1), (2, 2)")
    flow.create()
    flow.snapshot()
    flow.stream()
    other = Flow(restored.server.createdb("d_new"), kafka, None)
    other.execute("CREATE TABLE a (id int PRIMARY KEY, n int)", "INSERT INTO a VALUES (1, 1)")
    with psycopg.connect(restored.server.dsn(), autocommit=True) as connection:
        connection.execute("ALTER DATABASE d RENAME TO d_old")
        connection.execute("ALTER DATABASE d_new RENAME TO d")
    for act in (flow.create, flow.stream, lambda: drop(flow.pipeline, when="always")):
        with pytest.raises(BottledWaterError, match=r"belongs to database 'd_old'.* drop it there") as refused:
            act()
        assert "drop-slot --when always" in str(refused.value)
    with psycopg.connect(restored.server.dsn("d_old"), autocommit=True) as connection:
        connection.execute("SELECT pg_drop_replication_slot(%s)", [flow.pipeline.slot])
    drop(flow.pipeline, when="always")
    flow.create()
    flow.snapshot()
    assert copied(flow) == [(1, 1)] and flow.compare("a").differences == []


def test_of_a_table_that_the_stream_takes_in_it_is_told_where_it_begins(
    make_flow: MakeFlow, monkeypatch: pytest.MonkeyPatch
) -> None:
    look_often(monkeypatch)
    flow = make_flow(tables="*")
    flow.execute("CREATE TABLE a (id int PRIMARY KEY, n int)", "INSERT INTO a VALUES (1, 1)")
    flow.create()
    flow.snapshot()
    flow.execute("TRUNCATE a", "INSERT INTO a VALUES (2, 2)")
    flow.stream()
    drop(flow.pipeline, when="always")
    flow.execute("DROP TABLE a", "CREATE TABLE first (id int PRIMARY KEY)")
    flow.create()
    flow.snapshot()
    with flow.streaming() as errors:
        flow.execute("CREATE TABLE a (id int PRIMARY KEY, n int)", "INSERT INTO a VALUES (3, 3)")
        until(lambda: copied(flow) == [(3, 3)], "it is taken in", failed=errors)
        # also if the topic was made again
        flow.execute("DROP TABLE a")
        until(lambda: len(status.report(flow.pipeline).tables) == 1, "it is forgotten", failed=errors)
        delete_topic(flow, flow.topic("a"))
        flow.execute("CREATE TABLE a (id int PRIMARY KEY, n int)", "INSERT INTO a VALUES (4, 4)")
        until(lambda: len(status.report(flow.pipeline).tables) == 2, "it is taken in", failed=errors)
        until(lambda: copied(flow) == [(4, 4)], "its rows are there", failed=errors)
    events = read(flow.kafka, f"{flow.pipeline.topic_prefix}._bottledwater_events")
    told = [[name.rpartition(".")[2] for name in event.value["topics"]] for event in events]
    assert told == [["a"], ["first"], ["a"], ["a"]] and events[-1].value["topics"] == {flow.topic("a"): [0]}
