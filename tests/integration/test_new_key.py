"""Tables that are read again because their keys changed, or because they were dropped and created again."""

from __future__ import annotations

import os
import random
import re
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import Any

import psycopg
import pytest
from confluent_kafka.schema_registry import SchemaRegistryClient

from airflow_bottledwater.errors import PreflightError, RecordError, Refused, StateError
from airflow_bottledwater.jobs import snapshots
from airflow_bottledwater.live import reading
from airflow_bottledwater.local.registry import SchemaRegistry
from airflow_bottledwater.pipeline.table import Table
from airflow_bottledwater.provision import live, preflight, redrive
from airflow_bottledwater.provision.accept import accept
from airflow_bottledwater.state.claim import read_state
from airflow_bottledwater.state.control_records import SnapshotRequest
from airflow_bottledwater.tables import watch
from tests.support.tables import dies_before_it_reads
from tests.support.topics import Flow, MakeFlow, assert_exactly_once_in_order, limit_records
from tests.support.verifying import verify_beside_a_stream
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


@pytest.mark.parametrize("format", [pytest.param("json", marks=pytest.mark.long), "avro"])
def test_a_table_with_another_key_is_read_again(make_flow: MakeFlow, registry: SchemaRegistry, format: str) -> None:
    flow = _make(make_flow, registry if format == "avro" else None)
    flow.execute("UPDATE t SET text = 'before' WHERE id = 20", "INSERT INTO u VALUES (2, 'before')")
    flow.execute(TO_OTHER, "UPDATE t SET text = 'lost' WHERE id = 30", "INSERT INTO u VALUES (3, 'behind')")
    flow.execute("DELETE FROM t WHERE id = 40", "UPDATE t SET other = 5000 WHERE id = 50")
    if format == "avro":
        flow.stream()
        # until the registry takes the key, the other table can be streamed
        assert any(f"{flow.topic('t')}-key" in each for each in preflight.run(flow.pipeline).warnings)
        SchemaRegistryClient({"url": registry.url}).set_compatibility(f"{flow.topic('t')}-key", level="NONE")
    flow.execute("DELETE FROM t WHERE id = 70", "INSERT INTO t VALUES (200, 1, 'new')")
    flow.stream()
    assert flow.compare("t").equal and flow.compare("u").equal
    if format == "json":
        messages = flow.read("t")
        assert_exactly_once_in_order(messages)
        assert [m.value and m.value["text"] for m in messages if m.key == {"id": 20}] == ["old", "before", None]
    # and from here on, it is a table like any other
    flow.execute("UPDATE t SET text = 'later'", "DELETE FROM u WHERE id = 2")
    flow.stream()
    assert flow.compare("t").equal and flow.compare("u").equal


@pytest.mark.long
@pytest.mark.parametrize("format", ["protobuf", "json-schema"])
def test_the_schema_of_a_new_key_has_no_column_of_the_key_before(
    make_flow: MakeFlow, registry: SchemaRegistry, format: str
) -> None:
    flow = _make(make_flow, registry, format=format)
    flow.execute(TO_OTHER, "UPDATE t SET text = 'new' WHERE id = 30")
    flow.stream()
    # as with Avro, the registry does not take it by itself
    subject, client = f"{flow.topic('t')}-key", SchemaRegistryClient({"url": registry.url})
    assert any(subject in each for each in preflight.run(flow.pipeline).warnings)
    client.set_compatibility(subject, level="NONE")
    flow.stream()
    before, now = (
        client.get_version(subject, number).schema.schema_str or "" for number in client.get_versions(subject)
    )
    assert re.findall(r"\bid\b|\bother\b", before)[0] == "id"
    assert set(re.findall(r"\bid\b|\bother\b", now)) == {"other"}
    assert not verify_beside_a_stream(flow).different


#: exchanges the names of two columns
_EXCHANGE = "ALTER TABLE {t} RENAME a TO x; ALTER TABLE {t} RENAME b TO a; ALTER TABLE {t} RENAME x TO b"
#: how a key becomes another one whose columns have the same names and types: the key, and transactions
OTHER_KEYS = {
    "dropped": ("a", ["ALTER TABLE {t} DROP a, ADD a int GENERATED ALWAYS AS IDENTITY (START 2) PRIMARY KEY"]),
    "renamed": (
        "a",
        ["ALTER TABLE {t} DROP CONSTRAINT {t}_pkey", _EXCHANGE, "ALTER TABLE {t} ADD PRIMARY KEY (a)"],
    ),
    "exchanged": ("a, b", [_EXCHANGE, "UPDATE {t} SET text = 'x' WHERE a = 20"]),
    "doubled": (
        "a",
        [
            "ALTER TABLE {t} REPLICA IDENTITY FULL; ALTER TABLE {t} DROP CONSTRAINT {t}_pkey",
            "INSERT INTO {t} SELECT * FROM {t}",
            "DELETE FROM {t} one USING {t} other WHERE one.a = other.a AND one.ctid > other.ctid",
            "ALTER TABLE {t} ADD PRIMARY KEY (a)",
        ],
    ),
    "deferred": (
        "a",
        [
            "ALTER TABLE {t} REPLICA IDENTITY FULL",
            "ALTER TABLE {t} DROP CONSTRAINT {t}_pkey, ADD CONSTRAINT {t}_pkey PRIMARY KEY (a) DEFERRABLE",
            "UPDATE {t} SET a = 3 - a",
            "ALTER TABLE {t} DROP CONSTRAINT {t}_pkey, ADD CONSTRAINT {t}_pkey PRIMARY KEY (a)",
            "ALTER TABLE {t} REPLICA IDENTITY DEFAULT",
        ],
    ),
    "chosen": ("a", ["DROP INDEX {t}_b; UPDATE {t} SET b = 30 - b; CREATE UNIQUE INDEX {t}_b ON {t} (b)"]),
    "computed": ("a", ["ALTER TABLE {t} ALTER a TYPE int USING a + 10", "UPDATE {t} SET text = 'x' WHERE a = 11"]),
    # none of these is another key
    "same": ("a", ["ALTER TABLE {t} DROP CONSTRAINT {t}_pkey, ADD PRIMARY KEY (a)", "UPDATE {t} SET text = 'x'"]),
    "reindexed": ("a", ["REINDEX TABLE CONCURRENTLY {t}", "UPDATE {t} SET text = 'x'"]),
    "rewritten": ("a", ["ALTER TABLE {t} ALTER b TYPE int USING b + 1", "UPDATE {t} SET text = 'x'"]),
}  # fmt: skip


@pytest.mark.long
def test_another_key_of_columns_with_the_same_names_is_taken_up(make_flow: MakeFlow) -> None:
    flow = make_flow(tables=tuple(OTHER_KEYS), table_options={"chosen": Table(key=("b",))})
    for name, (key, _) in OTHER_KEYS.items():
        flow.execute(
            f"CREATE TABLE {name} (a int, b int NOT NULL, text text, PRIMARY KEY ({key}))",
            f"INSERT INTO {name} VALUES (1, 10, 'one'), (2, 20, 'two')",
        )
    flow.execute("CREATE UNIQUE INDEX chosen_b ON chosen (b)")
    flow.execute(*(f"ALTER TABLE {name} REPLICA IDENTITY FULL" for name in ("chosen", "reindexed")))
    flow.create()
    flow.snapshot()
    for name, (_, transactions) in OTHER_KEYS.items():
        flow.execute(*(each.format(t=name) for each in transactions))
    flow.stream()
    differences = {name: flow.compare(name).differences for name in OTHER_KEYS if name != "chosen"}
    assert not any(differences.values()), differences
    assert {m.key["b"]: m.value and m.value["a"] for m in flow.read("chosen")} == {10: 2, 20: 1}
    assert not [m for name in ("same", "reindexed", "rewritten") for m in flow.read(name) if m.snapshot]
    # and that was all
    flow.stream()
    assert {len(flow.read(name)) for name in ("same", "reindexed", "rewritten")} == {4}


@pytest.mark.long
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
    with pytest.raises(Refused, match="or the form, the name or the hash that the settings choose for it"):
        flow.stream()
    flow.change(json_numeric="string")
    flow.stream()
    first, second = flow.read("k")
    assert (first.key, first.value["v"], second.key, second.value["v"]) == (first.key, 1, first.key, 2)
    # a person accepts the other form
    flow.change(json_numeric="number")
    flow.execute("UPDATE k SET v = 3")
    assert accept(flow.pipeline, ["k"]) == ["public.k"]
    flow.stream()
    (row,) = [m for m in flow.read("k") if m.key != first.key]
    assert row.value["v"] == 3 and [m.value for m in flow.read("k") if m.key == first.key][2:] == [None]


@pytest.mark.long
def test_a_stream_goes_on_when_the_registry_takes_the_schema(make_flow: MakeFlow, registry: SchemaRegistry) -> None:
    flow = _make(make_flow, registry)
    flow.execute("ALTER TABLE t ALTER other TYPE text", "UPDATE t SET text = 'refused' WHERE id = 30")
    with pytest.raises(RecordError, match="refuses the schema"):
        flow.stream()
    SchemaRegistryClient({"url": registry.url}).set_compatibility(f"{flow.topic('t')}-value", level="NONE")
    flow.execute("UPDATE t SET other = 'text' WHERE id = 60", "DELETE FROM t WHERE id = 70")
    flow.ask("t")
    flow.stream()
    assert flow.compare("t").equal and flow.compare("u").equal


@pytest.mark.long
def test_changes_of_before_are_left_out_whatever_their_definition_was(make_flow: MakeFlow) -> None:
    flow = _make(make_flow)
    flow.execute("ALTER TABLE t REPLICA IDENTITY FULL", "UPDATE t SET text = 'full' WHERE id = 3")
    flow.execute(TO_OTHER, "UPDATE t SET text = 'full' WHERE id = 4", "ALTER TABLE t DROP COLUMN id", "TRUNCATE t")
    flow.execute(
        "INSERT INTO t VALUES (1, 'x'), (2, 'y')", "ALTER TABLE t ADD COLUMN more uuid DEFAULT gen_random_uuid()"
    )
    flow.execute("ALTER TABLE t REPLICA IDENTITY DEFAULT", "UPDATE t SET text = 'z' WHERE other = 2")
    flow.execute("INSERT INTO t VALUES (3, 'w')")
    flow.stream()
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


@pytest.mark.long
@pytest.mark.parametrize("how", ["another key", "another column", "a successor"])
def test_dead_letters_of_before_are_not_published(make_flow: MakeFlow, how: str) -> None:
    """Nothing would ever remove a record of the earlier key; and a tombstone of the table before would remove its
    successor's row."""
    flow = _make(make_flow, on_error="log", topic_config={"max.message.bytes": "20000"})
    flow.execute("UPDATE t SET text = repeat('x', 30000), id = 500 WHERE id = 5")
    flow.stream()
    assert len(flow.dead_letters()) == 1
    if how == "another key":
        flow.execute(TO_OTHER)
    elif how == "another column":
        flow.execute("ALTER TABLE t DROP id, ADD id serial PRIMARY KEY")
    else:
        flow.execute(
            "DROP TABLE t", "CREATE TABLE t (id int PRIMARY KEY, text text)", "INSERT INTO t VALUES (5, 'new')"
        )
    limit_records(flow, "t", 100_000)
    flow.stream()
    assert flow.compare("t").equal
    assert redrive.redrive(flow.pipeline) == redrive.RedriveResult(overtaken=1)
    assert redrive.redrive(flow.pipeline) == redrive.RedriveResult()
    assert flow.compare("t").equal


@pytest.mark.long
def test_what_the_topic_lacks_cannot_be_cancelled_and_is_tried_again(make_flow: MakeFlow) -> None:
    flow = _make(make_flow, topic_config={"max.message.bytes": "20000"})
    # left out by the stream, since it was written under the new key
    flow.execute(TO_OTHER, "UPDATE t SET text = repeat('x', 30000) WHERE id = 5")
    dies_before_it_reads(flow)
    (asked,) = read_state(flow.pipeline, state_topic(flow)).lives
    with pytest.raises(Refused, match=r"would lack rows for good.*--pause"):
        live.cancel(flow.pipeline, flow.name, asked)
    snapshots.ask(flow.pipeline, flow.name, asked, SnapshotRequest(("t",), sweep=True, cancelled=True))
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
    flow.execute("UPDATE t SET n = 3 WHERE name = 'a'", "INSERT INTO t VALUES ('c', 4)")
    flow.stream()
    assert flow.compare("t").equal and flow.compare("u").equal
    assert_exactly_once_in_order(flow.read("t"))
    known = read_state(flow.pipeline, state_topic(flow))
    assert known.complete and len(before - set(known.tables)) == 1 and set(known.completed) == set(known.tables)
    # it needs no more of what was: a second successor, while the stream has passed the first one
    flow.execute("DROP TABLE t", "CREATE TABLE t (id int PRIMARY KEY)", "INSERT INTO t VALUES (7)")
    flow.stream()
    assert flow.compare("t").equal


@pytest.mark.long
@pytest.mark.parametrize("first", ["the snapshot", "the stream"])
def test_a_live_snapshot_of_a_dropped_table_goes_on_with_its_successor(
    make_flow: MakeFlow, monkeypatch: pytest.MonkeyPatch, first: str
) -> None:
    """Whoever finds first that the table was dropped: what reads its rows, or the stream's look at the catalog."""
    flow = _make(make_flow)
    reads, may_read, may_look, refused, passed_on = (threading.Event() for _ in range(5))
    begin, look, unsettled, carried_out = (
        reading.begin_reading,
        watch.look,
        watch.TableWatch.unsettled,
        watch.TableWatch.carried_out,
    )
    monkeypatch.setattr(
        reading, "begin_reading", lambda *of, **how: (reads.set(), may_read.wait(60), begin(*of, **how))[2]
    )
    monkeypatch.setattr(watch.TableWatch, "unsettled", lambda *of: (refused.set(), unsettled(*of))[1])
    monkeypatch.setattr(watch.TableWatch, "carried_out", lambda *of: (passed_on.set(), carried_out(*of))[1])
    with flow.streaming() as errors:
        flow.streams()
        asked = flow.ask("t")
        until(reads.is_set, "it is about to read", failed=errors)
        if first == "the snapshot":
            monkeypatch.setattr(watch, "look", lambda *of: (may_look.wait(60), look(*of))[1])
        flow.transaction("DROP TABLE t", "CREATE TABLE t (id text PRIMARY KEY)", "INSERT INTO t VALUES ('a')")
        if first == "the snapshot":
            may_read.set()
            until(refused.is_set, "it finds no table", failed=errors)
            may_look.set()
        until(passed_on.is_set, "the topic is the successor's", failed=errors)
        assert refused.is_set() == (first == "the snapshot")
        may_read.set()
        until(lambda: flow.reported(asked).ended, "it ends", failed=errors)
    assert flow.reported(asked).state == "finished"
    flow.stream()
    assert flow.compare("t").equal


@pytest.mark.long
def test_a_renamed_table_keeps_its_topic(make_flow: MakeFlow) -> None:
    flow = _make(make_flow, tables="*")
    flow.execute("ALTER TABLE t RENAME TO renamed", TO_OTHER.replace("TABLE t ", "TABLE renamed "))
    flow.execute("DELETE FROM renamed WHERE id > 50")
    flow.stream()
    flow.execute("ALTER TABLE renamed RENAME TO t")
    assert flow.compare("t").equal


@pytest.mark.long
def test_what_nobody_asks_for_is_read_with_a_sweep(make_flow: MakeFlow) -> None:
    flow = _make(make_flow)
    flow.execute(TO_OTHER)
    dies_before_it_reads(flow)
    flow.stream()
    assert flow.compare("t").equal


@pytest.mark.some(1)
@pytest.mark.parametrize(
    ("tables", "message"),
    [("log", "are not followed, or have no key: public.log"), ("mine", "are not followed"), ("nowhere", "nowhere")],
)
def test_new_keys_of_what_is_not_followed_or_has_none_are_not_accepted(
    make_flow: MakeFlow, tables: str, message: str
) -> None:
    flow = make_flow(tables=("t", "log"), allow_unkeyed=True)
    for name, key in (("t", "PRIMARY KEY"), ("log", ""), ("mine", "PRIMARY KEY")):
        flow.execute(f"CREATE TABLE {name} (id int {key})")
    flow.create()
    with pytest.raises(StateError, match="is not complete"):
        accept(flow.pipeline, ["t"])
    flow.snapshot()
    with pytest.raises((Refused, PreflightError), match=message):
        accept(flow.pipeline, ["t", tables])
    with flow.streaming():
        flow.streams()
        with pytest.raises(StateError, match=r"is alive: .* Stop it first"):
            accept(flow.pipeline, ["t"])
    assert not read_state(flow.pipeline, state_topic(flow)).gaps


#: what makes keys come and go, and what is written meanwhile; some of it fails, as the key is
ON_KEYS = (
    "ALTER TABLE {t} DROP CONSTRAINT {t}_pkey",
    "ALTER TABLE {t} ADD PRIMARY KEY ({key})",
    "ALTER TABLE {t} ADD PRIMARY KEY ({key}) DEFERRABLE",
    "ALTER TABLE {t} DROP {one}, ADD {one} int GENERATED BY DEFAULT AS IDENTITY",
    "ALTER TABLE {t} REPLICA IDENTITY FULL",
    "ALTER TABLE {t} REPLICA IDENTITY DEFAULT",
    "INSERT INTO {t} SELECT * FROM {t} LIMIT 5",
    "DELETE FROM {t} one USING {t} other WHERE (one.a = other.a OR one.b = other.b) AND one.ctid > other.ctid",
)
WRITES = (
    "INSERT INTO {t} VALUES ({n}, {m}, 'new')",
    "UPDATE {t} SET a = 50 - a",
    "UPDATE {t} SET b = b + 1 WHERE b % 2 = {n} % 2",
    "UPDATE {t} SET text = '{n}' WHERE a % 3 = {n} % 3",
    "DELETE FROM {t} WHERE a = {n} OR b = {m}",
)


@pytest.mark.long
@pytest.mark.parametrize("seed", SEEDS)
def test_whatever_becomes_of_a_key_the_topic_becomes_the_table_again(make_flow: MakeFlow, seed: int) -> None:
    """While no stream runs, keys are dropped, exchanged and made again, in one transaction or in several."""
    dice = random.Random(seed)
    flow, tables, anew = make_flow(), ("r", "s", "t"), set[tuple[str, str]]()
    for t in tables:
        flow.execute(
            f"CREATE TABLE {t} (a int PRIMARY KEY, b int UNIQUE, text text)",
            f"INSERT INTO {t} SELECT g, 100 + g, 'old' FROM generate_series(1, 20) g",
        )
    flow.create()
    flow.snapshot()
    for _ in range(4):
        done = list[str]()
        for t in tables:
            # once at most: names that are exchanged and exchanged back leave nothing behind that could be compared
            exchange = dice.randrange(6)
            for turn in range(dice.randrange(4)):
                values = {"t": t, "n": dice.randrange(50), "m": dice.randrange(150), "one": dice.choice("ab")}
                values["key"] = dice.choice(("a", "b", "a, b", "b, a"))
                chosen = [dice.choice(dice.choice((ON_KEYS, WRITES))) for _ in range(dice.randrange(1, 7))]
                if turn == exchange:
                    chosen.insert(dice.randrange(len(chosen)), _EXCHANGE)
                statements = [each.format(**values) for each in chosen]
                done += [*statements, "--"]
                if dice.random() < 0.5:
                    statements = ["; ".join(statements)]
                for each in statements:
                    with suppress(psycopg.Error):
                        flow.execute(each)
            for each in (f"ALTER TABLE {t} DROP CONSTRAINT IF EXISTS {t}_pkey", ON_KEYS[-1].format(t=t)):
                if dice.random() < 0.3:
                    with suppress(psycopg.Error):
                        flow.execute(each)
        flow.stream()
        keyed = flow.execute(
            "SELECT conrelid::regclass::text FROM pg_constraint WHERE contype = 'p' AND NOT condeferrable"
        )
        # no row is sent for a column that is made anew: unless it is a key's, its values come with later changes
        anew |= {
            (t, f": {c} is ") for t in tables for c in "ab" if f"ALTER TABLE {t} DROP {c}, ADD {c} " in "".join(done)
        }
        differences = {
            t: [each for each in flow.compare(t).differences if not any(t == of and what in each for of, what in anew)]
            for (t,) in keyed
            if t in tables
        }
        assert not any(differences.values()), (differences, done)


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
    columns = "id int NOT NULL %s, other int NOT NULL %s, text text"
    # not with the table: PostgreSQL makes one index of UNIQUE and PRIMARY KEY there, which goes with the key
    both = "ALTER TABLE t ADD UNIQUE (id), ADD UNIQUE (other)"
    flow.execute(both)
    with _writers(flow.dsn, seed):
        for turn in range(4):
            time.sleep(dice.uniform(0.1, 0.5))
            if dice.random() < 0.3:
                primary = ("PRIMARY KEY", "") if dice.random() < 0.5 else ("", "PRIMARY KEY")
                flow.transaction("DROP TABLE t", f"CREATE TABLE t ({columns % primary})", both)
            else:
                flow.execute(TO_ID if turn % 2 else TO_OTHER)
            time.sleep(dice.uniform(0.0, 0.5))
            if dice.random() < 0.5:
                with suppress(Refused):
                    flow.stream()
            with flow.streaming() as errors:
                time.sleep(dice.uniform(0.5, 2.0))
            assert errors == []
    flow.stream()
    assert flow.compare("t").equal and flow.compare("u").equal
    assert_exactly_once_in_order(flow.read("u"))
