"""Tables that are taken up again because their keys changed, or because they were dropped and created again."""

from __future__ import annotations

import os
import random
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import Any

import psycopg
import pytest
from click.testing import CliRunner
from confluent_kafka.schema_registry import SchemaRegistryClient

from airflow_bottledwater.cli import cli
from airflow_bottledwater.errors import Outage, PreflightError, RecordError, Refused
from airflow_bottledwater.jobs import snapshots
from airflow_bottledwater.live import reading
from airflow_bottledwater.local.registry import SchemaRegistry
from airflow_bottledwater.postgres import slot
from airflow_bottledwater.provision import live, redrive
from airflow_bottledwater.provision import renew as renewal
from airflow_bottledwater.provision.renew import renew
from airflow_bottledwater.state.claim import read_state
from airflow_bottledwater.state.control_records import SnapshotRequest
from tests.support.topics import Flow, MakeFlow, assert_exactly_once_in_order, limit_records
from tests.support.waiting import until
from tests.support.writers import state_topic

FIRST = int(os.environ.get("BOTTLEDWATER_SEED", "1"))
SEEDS = range(FIRST, FIRST + int(os.environ.get("BOTTLEDWATER_SEEDS", "3")))
TO_OTHER = "ALTER TABLE t DROP CONSTRAINT t_pkey, ADD CONSTRAINT t_pkey PRIMARY KEY (other)"
TO_ID = "ALTER TABLE t DROP CONSTRAINT t_pkey, ADD CONSTRAINT t_pkey PRIMARY KEY (id)"


def _make(make_flow: MakeFlow, registry: SchemaRegistry | None = None, **settings: Any) -> Flow:
    flow = make_flow(registry, **{"tables": "?", **settings})
    flow.execute(
        "CREATE TABLE t (id int PRIMARY KEY, other int NOT NULL UNIQUE, text text)",
        "INSERT INTO t SELECT g, 1000 + g, 'old' FROM generate_series(1, 100) g",
        "CREATE TABLE u (id int PRIMARY KEY, text text)",
    )
    flow.create()
    flow.snapshot()
    flow.execute("UPDATE t SET text = 'streamed' WHERE id < 10", "INSERT INTO u VALUES (1, 'streamed')")
    flow.stream()
    return flow


def _renew(flow: Flow, *tables: str, by_key: bool = False) -> str:
    return renew(flow.pipeline, SnapshotRequest(tables or ("t",), by_key=by_key))[1]


@pytest.mark.parametrize("format", ["json", "avro"])
def test_a_table_with_another_key_is_taken_up_again(make_flow: MakeFlow, registry: SchemaRegistry, format: str) -> None:
    flow = _make(make_flow, registry if format == "avro" else None)
    flow.execute("UPDATE t SET text = 'before' WHERE id = 20", "INSERT INTO u VALUES (2, 'before')")
    flow.execute(TO_OTHER, "UPDATE t SET text = 'lost' WHERE id = 30", "INSERT INTO u VALUES (3, 'behind')")
    flow.execute("DELETE FROM t WHERE id = 40", "UPDATE t SET other = 5000 WHERE id = 50")
    if format == "avro":
        with pytest.raises(PreflightError, match=r"refuses the schema of subject '.*-key'.*relax the subject's compat"):
            _renew(flow)
        SchemaRegistryClient({"url": registry.url}).set_compatibility(f"{flow.topic('t')}-key", level="NONE")
    asked = _renew(flow)
    flow.execute(
        "UPDATE t SET text = 'after' WHERE id = 60",
        "DELETE FROM t WHERE id = 70",
        "INSERT INTO t VALUES (200, 1, 'new')",
    )
    flow.stream()
    assert flow.reported(asked).state == "finished" and flow.reported(asked).swept >= 100
    assert flow.compare("t").equal and flow.compare("u").equal
    if format == "json":
        messages = flow.read("t")
        assert_exactly_once_in_order(messages)
        # what was committed under the earlier key is left out
        assert [m.value and m.value["text"] for m in messages if m.key == {"id": 20}] == ["old", None]
        assert {m.value["id"] for m in messages if m.op == "u" and m.key == {"other": 1060}} == {60}
    # and from here on, it is a table like any other
    flow.execute("UPDATE t SET text = 'later'", "DELETE FROM u WHERE id = 2")
    flow.stream()
    assert flow.compare("t").equal and flow.compare("u").equal


@pytest.mark.parametrize(
    ("column", "value", "ranges"),
    [
        ("numeric", "1.5", "text"),
        ("numeric[]", "'{1.5}'", "text"),
        ("numrange", "'[1.5,2)'", "record"),
        ("part", "ROW(1.5)::part", "text"),
    ],
)
def test_a_key_is_another_one_when_the_settings_give_what_is_inside_of_it_another_form(
    make_flow: MakeFlow, column: str, value: str, ranges: str
) -> None:
    flow = make_flow(json_numeric="string", ranges=ranges)
    flow.execute("CREATE TYPE part AS (a numeric)", f"CREATE TABLE k (id {column} PRIMARY KEY, v int)")
    flow.execute(f"INSERT INTO k VALUES ({value}, 1)")
    flow.create()
    flow.snapshot()
    flow.change(json_numeric="number")
    flow.execute("UPDATE k SET v = 2")
    with pytest.raises(Refused, match="or the form that the settings choose for it"):
        flow.stream()
    flow.change(json_numeric="string")
    flow.stream()
    first, second = flow.read("k")
    assert (first.key, first.value["v"], second.key, second.value["v"]) == (first.key, 1, first.key, 2)


def test_a_table_whose_schema_the_registry_refuses_is_taken_up_again(
    make_flow: MakeFlow, registry: SchemaRegistry
) -> None:
    flow = _make(make_flow, registry)
    flow.execute("ALTER TABLE t ALTER other TYPE text", "UPDATE t SET text = 'refused' WHERE id = 30")
    with pytest.raises(RecordError, match="refuses the schema"):
        flow.stream()
    with pytest.raises(PreflightError, match=r"refuses the schema of subject '.*-value'"):
        _renew(flow)
    SchemaRegistryClient({"url": registry.url}).set_compatibility(f"{flow.topic('t')}-value", level="NONE")
    asked = _renew(flow)
    flow.execute("UPDATE t SET other = 'text' WHERE id = 60", "DELETE FROM t WHERE id = 70")
    flow.stream()
    assert flow.reported(asked).state == "finished"
    assert flow.compare("t").equal and flow.compare("u").equal


def test_it_is_read_in_the_order_of_its_new_key(make_flow: MakeFlow, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reading, "_FIRST_BLOCKS", 1)
    monkeypatch.setattr(reading, "_MOST_BLOCKS_BY_KEY", 1)
    flow = _make(make_flow)
    # the order of the new key is the opposite of that of the rows' places
    flow.execute("INSERT INTO t SELECT g, 2000 - g, 'more' FROM generate_series(101, 1900) g ON CONFLICT DO NOTHING")
    flow.execute(TO_OTHER)
    asked = _renew(flow, by_key=True)
    flow.execute("UPDATE t SET text = 'after' WHERE other = 1050", "DELETE FROM t WHERE other = 150")
    flow.stream()
    assert flow.reported(asked).state == "finished"
    read = [m.key["other"] for m in flow.read("t") if m.snapshot.startswith(asked) and m.value]
    assert len(read) > 1500 and max(read[:500]) < min(read[-500:])
    assert flow.compare("t").equal


@pytest.mark.long
def test_the_command_takes_a_table_up_again(make_flow: MakeFlow) -> None:
    flow = _make(make_flow)
    flow.execute(TO_OTHER)
    command = ["snapshot", "--postgres", flow.dsn, "--broker", flow.kafka.bootstrap, "--format", "json"]
    command += [
        "--slot",
        flow.pipeline.slot,
        "--topic-prefix",
        flow.pipeline.topic_prefix,
        "--tables",
        "t",
        "--new-key",
        "--no-wait",
    ]
    refused = CliRunner().invoke(cli, [*command, "--where", "id = 1"])
    assert refused.exit_code == 1 and "read as a whole" in refused.output
    done = CliRunner().invoke(cli, command)
    assert done.exit_code == 0 and "No job" in done.output, done.output
    flow.execute("UPDATE t SET other = other + 1 WHERE id = 100")
    flow.stream()
    assert flow.compare("t").equal


@pytest.mark.long
def test_changes_of_before_are_left_out_whatever_their_definition_was(make_flow: MakeFlow) -> None:
    flow = _make(make_flow)
    flow.execute("ALTER TABLE t REPLICA IDENTITY FULL", "UPDATE t SET text = 'full' WHERE id = 3")
    flow.execute(TO_OTHER, "UPDATE t SET text = 'full' WHERE id = 4", "ALTER TABLE t DROP COLUMN id", "TRUNCATE t")
    flow.execute(
        "INSERT INTO t VALUES (1, 'x'), (2, 'y')", "ALTER TABLE t ADD COLUMN more uuid DEFAULT gen_random_uuid()"
    )
    flow.execute("ALTER TABLE t REPLICA IDENTITY DEFAULT", "UPDATE t SET text = 'z' WHERE other = 2")
    _renew(flow)
    flow.execute("INSERT INTO t VALUES (3, 'w')")
    flow.stream()
    assert flow.compare("t").equal


def test_a_transaction_across_the_moment_is_published(make_flow: MakeFlow, monkeypatch: pytest.MonkeyPatch) -> None:
    """It has written under the new key when the boundary is drawn, and commits later."""
    flow = _make(make_flow)
    flow.execute(TO_OTHER)
    with psycopg.connect(flow.dsn) as other:
        original = slot.wait_visible

        def begin(*arguments: Any, **options: Any) -> None:
            original(*arguments, **options)
            other.execute("UPDATE t SET text = 'across' WHERE id = 5")

        monkeypatch.setattr(renewal.slot, "wait_visible", begin)
        _renew(flow)
    flow.stream()
    assert [m.value["text"] for m in flow.read("t") if m.key == {"other": 1005} and m.op == "u"] == ["across"]
    assert flow.compare("t").equal


def test_a_key_that_changes_inside_a_transaction_that_is_published_in_part(make_flow: MakeFlow) -> None:
    flow = _make(make_flow, max_transaction_bytes=64 * 1024, batch_bytes=64 * 1024)
    flow.transaction(
        "INSERT INTO u SELECT g, repeat('x', 1000) FROM generate_series(100, 299) g",
        "UPDATE t SET text = 'published' WHERE id = 20",
        "ALTER TABLE t ALTER id TYPE bigint",
        "UPDATE t SET text = 'under the new key' WHERE id = 30",
        "DELETE FROM t WHERE id = 40",
        "TRUNCATE t",
        "INSERT INTO t SELECT g, 1000 + g, 'after the TRUNCATE' FROM generate_series(20, 90) g",
        "INSERT INTO u SELECT g, repeat('y', 1000) FROM generate_series(300, 499) g",
    )
    flow.stream()
    flow.execute("UPDATE t SET text = 'later' WHERE id = 50")
    flow.stream()
    assert flow.compare("t").equal and flow.compare("u").equal
    assert_exactly_once_in_order(flow.read("u"))
    assert len(flow.read("u")) == 1 + 400


def test_older_transactions_are_waited_for(make_flow: MakeFlow) -> None:
    """They may have written to a successor before it was published: what is not in the WAL as a change must be in the
    boundary."""
    flow = _make(make_flow)
    flow.execute("DROP TABLE t", "CREATE TABLE t (id int PRIMARY KEY)")
    flow.change(create_slot_timeout=2.0)
    with psycopg.connect(flow.dsn) as other:
        other.execute("INSERT INTO u VALUES (9, 'older')")
        with pytest.raises(Outage, match="Transactions older than"):
            _renew(flow)
    _renew(flow)
    flow.stream()
    assert flow.compare("t").equal


@pytest.mark.parametrize("how", ["another key", "a successor"])
def test_dead_letters_of_before_are_not_published(make_flow: MakeFlow, how: str) -> None:
    """Nothing would ever remove a record of the earlier key; and a tombstone of the table before would remove its
    successor's row."""
    flow = _make(make_flow, on_error="log", topic_config={"max.message.bytes": "20000"})
    flow.execute("UPDATE t SET text = repeat('x', 30000), id = 500 WHERE id = 5")
    flow.stream()
    assert len(flow.dead_letters()) == 1
    if how == "another key":
        flow.execute(TO_OTHER)
    else:
        flow.execute(
            "DROP TABLE t", "CREATE TABLE t (id int PRIMARY KEY, text text)", "INSERT INTO t VALUES (5, 'new')"
        )
    _renew(flow)
    limit_records(flow, "t", 100_000)
    flow.stream()
    assert flow.compare("t").equal
    assert redrive.redrive(flow.pipeline) == redrive.Result(overtaken=1)
    assert redrive.redrive(flow.pipeline) == redrive.Result()
    assert flow.compare("t").equal


def test_what_the_topic_lacks_cannot_be_cancelled_and_is_tried_again(make_flow: MakeFlow) -> None:
    flow = _make(make_flow, topic_config={"max.message.bytes": "20000"})
    # left out by the stream, since it was written before
    flow.execute(TO_OTHER, "UPDATE t SET text = repeat('x', 30000) WHERE id = 5")
    asked = _renew(flow)
    with pytest.raises(Refused, match=r"would lack rows for good.*--pause"):
        live.cancel(flow.pipeline, flow.name, asked)
    snapshots.change(flow.pipeline, flow.name, asked, cancelled=True)  # as if it could be
    flow.stream()
    assert flow.reported(asked).state == "failed" and "public.t" in flow.reported(asked).error
    assert not flow.compare("t").equal
    flow.stream()
    assert flow.reported(asked).state == "failed"
    flow.execute("UPDATE t SET text = 'small' WHERE id = 5")
    flow.stream()
    assert flow.reported(asked).state == "finished"
    assert flow.compare("t").equal
    live.cancel(flow.pipeline, flow.name, flow.ask("t"))


def test_a_successor_gets_the_topic(make_flow: MakeFlow) -> None:
    flow = _make(make_flow)
    before = set(read_state(flow.pipeline, state_topic(flow)).tables)
    flow.execute("UPDATE t SET text = 'last' WHERE id = 1", "DELETE FROM t WHERE id = 2", "DROP TABLE t")
    flow.execute("CREATE TABLE t (name text PRIMARY KEY, n int)", "INSERT INTO t VALUES ('a', 1), ('b', 2)")
    _renew(flow)
    flow.execute("UPDATE t SET n = 3 WHERE name = 'a'", "INSERT INTO t VALUES ('c', 4)")
    flow.stream()
    assert flow.compare("t").equal and flow.compare("u").equal
    assert_exactly_once_in_order(flow.read("t"))
    known = read_state(flow.pipeline, state_topic(flow))
    assert known.complete and len(before - set(known.tables)) == 1 and set(known.completed) == set(known.tables)
    # it needs no more of what was: a second successor, while the stream has passed the first one
    flow.execute("DROP TABLE t", "CREATE TABLE t (id int PRIMARY KEY)", "INSERT INTO t VALUES (7)")
    _renew(flow)
    flow.stream()
    assert flow.compare("t").equal


@pytest.mark.long
def test_a_live_snapshot_of_a_dropped_table_goes_on_with_its_successor(make_flow: MakeFlow) -> None:
    flow = _make(make_flow)
    flow.execute("INSERT INTO t SELECT g, g, 'many' FROM generate_series(10000, 60000) g")
    asked = flow.ask("u", "t", rows_per_second=10000)
    with flow.streaming() as errors:
        until(lambda: asked in read_state(flow.pipeline, state_topic(flow)).lives, "it begins", failed=errors)
        time.sleep(1)
    assert not flow.reported(asked).ended
    flow.execute("DROP TABLE t", "CREATE TABLE t (id text PRIMARY KEY)", "INSERT INTO t VALUES ('a')")
    _renew(flow)
    flow.stream()
    assert flow.reported(asked).state == "finished"
    assert flow.compare("t").equal


@pytest.mark.long
def test_a_renamed_table_keeps_its_topic(make_flow: MakeFlow) -> None:
    flow = _make(make_flow, tables="*")
    flow.execute("ALTER TABLE t RENAME TO renamed", TO_OTHER.replace("TABLE t ", "TABLE renamed "))
    _renew(flow, "renamed")
    flow.execute("DELETE FROM renamed WHERE id > 50")
    flow.stream()
    flow.execute("ALTER TABLE renamed RENAME TO t")
    assert flow.compare("t").equal


def test_a_job_that_dies_before_it_asks_is_made_up_for(make_flow: MakeFlow, monkeypatch: pytest.MonkeyPatch) -> None:
    flow = _make(make_flow)
    flow.execute(TO_OTHER)

    def die(*_: object) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(renewal.snapshots, "ask", die)
        renew(flow.pipeline, SnapshotRequest(("t",)), "abc")
    boundaries = read_state(flow.pipeline, state_topic(flow)).boundaries
    # a repeated call is the same one
    assert renew(flow.pipeline, SnapshotRequest(("t",)), "abc")[1] == "abc"
    assert read_state(flow.pipeline, state_topic(flow)).boundaries == boundaries
    flow.stream()
    assert flow.reported("abc").swept >= 100 and flow.compare("t").equal


@pytest.mark.long
def test_what_nobody_asks_for_is_read_with_a_sweep(make_flow: MakeFlow, monkeypatch: pytest.MonkeyPatch) -> None:
    flow = _make(make_flow)
    flow.execute(TO_OTHER)
    with monkeypatch.context() as patch:
        patch.setattr(renewal.snapshots, "ask", lambda *_: None)
        _renew(flow)
    flow.stream()
    assert flow.compare("t").equal


def _running(flow: Flow) -> None:
    with flow.streaming():
        flow.streams()
        _renew(flow)


def _swapped(flow: Flow) -> None:
    flow.execute("ALTER TABLE t RENAME TO old", "CREATE TABLE t (id int PRIMARY KEY)")
    _renew(flow)


def _unkeyed(flow: Flow) -> None:
    flow.execute("ALTER TABLE t DROP CONSTRAINT t_pkey")
    _renew(flow)


def _foreign(flow: Flow) -> None:
    flow.execute("CREATE TABLE mine (id int PRIMARY KEY)")
    _renew(flow, "mine")


def _sorted_backwards(flow: Flow) -> None:
    flow.execute(
        "CREATE FUNCTION backwards(int, int) RETURNS int LANGUAGE sql IMMUTABLE AS 'SELECT btint4cmp($2, $1)'",
        "CREATE OPERATOR CLASS backwards FOR TYPE int USING btree AS OPERATOR 1 >, OPERATOR 2 >=, OPERATOR 3 =, "
        "OPERATOR 4 <=, OPERATOR 5 <, FUNCTION 1 backwards(int, int)",
        "CREATE UNIQUE INDEX backwards ON t (other backwards)",
        "ALTER TABLE t DROP CONSTRAINT t_pkey",
        "ALTER TABLE t REPLICA IDENTITY USING INDEX backwards",
    )
    _renew(flow, by_key=True)


def _no_such(flow: Flow) -> None:
    _renew(flow, "nowhere")


@pytest.mark.parametrize(
    ("case", "message"),
    [
        (_running, "runs: no table can be taken up with another key beside it"),
        (_swapped, r"holds the rows of table public\.old, which still exists"),
        (_unkeyed, r"public\.t cannot be keyed"),
        (_foreign, r"public\.mine is not one of the tables"),
        (_sorted_backwards, r"column other \(integer\) is not sorted by PostgreSQL's own operators"),
        (_no_such, "nowhere"),
    ],
)
def test_what_cannot_be_taken_up_is_refused_before_anything_changes(
    make_flow: MakeFlow, case: Callable[[Flow], None], message: str
) -> None:
    flow = _make(make_flow)
    before = read_state(flow.pipeline, state_topic(flow))
    with pytest.raises((Refused, PreflightError), match=message):
        case(flow)
    after = read_state(flow.pipeline, state_topic(flow))
    assert (after.tables, after.boundaries, after.lives) == (before.tables, before.boundaries, before.lives)


@contextmanager
def _writers(dsn: str, seed: int) -> Iterator[None]:
    """Two writers that know nothing of keys, and whose statements may fail."""
    ended = threading.Event()

    def write(dice: random.Random) -> None:
        with psycopg.connect(dsn, autocommit=True) as connection:
            while not ended.is_set():
                a, b = dice.randrange(1, 300), dice.randrange(1000, 1300)
                statements = [
                    f"INSERT INTO t (id, other, text) VALUES ({a}, {b}, '{dice.random()}')",
                    f"UPDATE t SET text = '{dice.random()}' WHERE id % 7 = {a % 7}",
                    f"UPDATE t SET id = {a + 300} WHERE id = {a}",
                    f"UPDATE t SET other = {b + 300} WHERE other = {b}",
                    f"UPDATE t SET id = id - 300 WHERE id > 300 AND id % 2 = {a % 2}",
                    f"DELETE FROM t WHERE id = {a} OR other = {b}",
                    f"INSERT INTO u VALUES ({a}, 'u') ON CONFLICT (id) DO UPDATE SET text = '{dice.random()}'",
                ]
                with suppress(psycopg.Error), connection.transaction(force_rollback=dice.random() < 0.05):
                    for statement in dice.choices(statements, k=dice.choice((1, 1, 3))):
                        connection.execute(statement)  # type: ignore[arg-type]
                time.sleep(dice.uniform(0, 0.01))

    threads = [threading.Thread(target=write, args=(random.Random(seed * 10 + i),)) for i in range(2)]
    for thread in threads:
        thread.start()
    try:
        yield
    finally:
        ended.set()
        for thread in threads:
            thread.join()


@pytest.mark.long
@pytest.mark.parametrize("seed", SEEDS)
def test_under_writers_the_topic_becomes_the_table_again(make_flow: MakeFlow, seed: int) -> None:
    dice = random.Random(seed)
    flow = _make(make_flow, xid_header=True)
    columns = "id int NOT NULL UNIQUE %s, other int NOT NULL UNIQUE %s, text text"
    flow.execute("ALTER TABLE t ADD UNIQUE (id)")
    with _writers(flow.dsn, seed):
        for turn in range(4):
            time.sleep(dice.uniform(0.1, 0.5))
            if dice.random() < 0.3:
                primary = ("PRIMARY KEY", "") if dice.random() < 0.5 else ("", "PRIMARY KEY")
                flow.transaction("DROP TABLE t", f"CREATE TABLE t ({columns % primary})")
            else:
                flow.execute(TO_ID if turn % 2 else TO_OTHER)
            time.sleep(dice.uniform(0.0, 0.5))
            if dice.random() < 0.5:
                with suppress(Refused):
                    flow.stream()
            _renew(flow)
            with flow.streaming() as errors:
                time.sleep(dice.uniform(0.5, 2.0))
            assert errors == []
    flow.stream()
    assert flow.compare("t").equal and flow.compare("u").equal
    assert_exactly_once_in_order(flow.read("u"))
