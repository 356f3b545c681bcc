"""Receiving from a real slot: bulk, large messages, back-pressure, shutdown, and values that the stream leaves out."""

from __future__ import annotations

import contextlib
import json
import os
import queue
import secrets
import select
import signal
import threading
import time
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
from psycopg.conninfo import make_conninfo

from airflow_bottledwater.encoding import wire
from airflow_bottledwater.errors import Outage, Refused, SlotError, SlotInUse
from airflow_bottledwater.local.postgres import PostgresServer
from airflow_bottledwater.postgres import catalog, replication
from airflow_bottledwater.postgres.connect import Connection, connect
from airflow_bottledwater.postgres.receive import MessageBlock
from airflow_bottledwater.postgres.replication import ReplicationStream
from tests.support.paths import Follower, Made, copied, encoded
from tests.support.waiting import until


@pytest.fixture
def session(database: str) -> Iterator[Connection]:
    connection = connect(database)
    connection.execute("CREATE TABLE public.t (id bigint PRIMARY KEY, a int, b text)")
    connection.execute("ALTER TABLE public.t ALTER b SET STORAGE EXTERNAL")
    connection.execute("CREATE PUBLICATION p FOR TABLE public.t")
    yield connection
    connection.close()


@pytest.fixture
def follower(database: str, session: Connection) -> Iterator[Follower]:
    made = Follower(database)
    yield made
    made.close()


def state(changes: list[Made]) -> dict[int, tuple[int | None, str | None]]:
    """What a consumer of these records has in the end."""
    rows: dict[int, tuple[int | None, str | None]] = {}
    for change in changes:
        assert not change.error
        assert change.key is not None
        key = json.loads(change.key)["id"]
        if change.value is None:
            assert change.op == "d"
            rows.pop(key, None)
        else:
            row = json.loads(change.value)
            assert row["id"] == key
            rows[key] = (row["a"], row["b"])
    return rows


def table(session: Connection) -> dict[int, tuple[int | None, str | None]]:
    return {row[0]: (row[1], row[2]) for row in session.execute("SELECT id, a, b FROM public.t")}


# ------------------------------------------------------------------ bulk
def test_a_transaction_of_fifty_thousand_rows_comes_whole_and_in_order(session: Connection, follower: Follower) -> None:
    session.execute("INSERT INTO public.t SELECT g, g % 7, 'text ' || g FROM generate_series(1, 50000) g")
    batches = follower.batches()
    assert len(batches) == 1
    changes, _ = encoded(batches[0], follower.completer, "json")
    assert [json.loads(c.key or b"")["id"] for c in changes] == list(range(1, 50001))
    assert state(changes) == table(session)
    assert batches[0].changes["ordinal"].tolist() == list(range(1, 50001))


def test_a_large_transaction_is_cut_and_its_parts_are_the_whole(database: str, session: Connection) -> None:
    follower = Follower(database, limit=100_000, most=300_000)
    session.execute("INSERT INTO public.t SELECT g, g % 7, repeat('x', 100) FROM generate_series(1, 20000) g")
    batches = follower.batches()
    assert len(batches) > 5
    assert all(one.end == other.start for one, other in zip(batches, batches[1:], strict=False))
    changes = [c for b in batches for c in encoded(b, follower.completer, "json")[0]]
    assert [json.loads(c.key or b"")["id"] for c in changes] == list(range(1, 20001))
    follower.close()


def test_five_thousand_small_transactions_come_in_commit_order(session: Connection, follower: Follower) -> None:
    session.execute("SET synchronous_commit = off")
    for i in range(5000):
        session.execute(f"INSERT INTO public.t VALUES ({i}, {i % 7}, 'x')")
    batches = follower.batches()
    changes = [c for b in batches for c in encoded(b, follower.completer, "json")[0]]
    assert [json.loads(c.key or b"")["id"] for c in changes] == list(range(5000))
    lsns = [lsn for b in batches for lsn in b.changes["lsn"].tolist()]
    assert lsns == sorted(set(lsns))


def test_a_new_session_goes_on_where_the_batches_ended(session: Connection, follower: Follower) -> None:
    found: list[Made] = []
    for part in range(5):
        session.execute(
            f"INSERT INTO public.t SELECT g, 1, 'x' FROM generate_series({part * 100 + 1}, {part * 100 + 100}) g"
        )
        found += follower.changes("json")
        follower.stream.close()
        follower.open()
    assert [json.loads(c.key or b"")["id"] for c in found] == list(range(1, 501))


def test_a_message_larger_than_a_block_comes_whole(database: str, session: Connection) -> None:
    follower = Follower(database, block_bytes=1 << 16, buffer_bytes=1 << 20)
    session.execute(
        "INSERT INTO public.t VALUES (1, 1, 'before'), (2, 2, repeat('é\U0001f600', 700000)), (3, 3, 'behind')"
    )
    session.execute("INSERT INTO public.t SELECT g, g, repeat('z', 2000000) FROM generate_series(4, 6) g")
    assert state(follower.changes("json")) == table(session)
    follower.close()


# ------------------------------------------------------------------ back-pressure and shutdown
@pytest.mark.long
def test_a_consumer_that_pauses_longer_than_the_servers_patience_keeps_its_session(tmp_path: Path) -> None:
    # a status each second, and a new session that checks the server while the buffer is full: four seconds are left for
    # a machine on which that session takes long
    with PostgresServer(tmp_path / "server", settings={"wal_sender_timeout": "6s"}) as server:
        dsn = server.createdb("d")
        session = connect(dsn)
        session.execute(
            "CREATE TABLE public.t (id bigint PRIMARY KEY, a int, b text); CREATE PUBLICATION p FOR TABLE public.t"
        )
        follower = Follower(dsn, buffer_bytes=200_000, block_bytes=100_000)
        session.execute("INSERT INTO public.t SELECT g, g, repeat('x', 100) FROM generate_series(1, 100000) g")
        pid = session.execute("SELECT active_pid FROM pg_replication_slots").fetchone()
        time.sleep(8)
        assert len(state(follower.changes("json"))) == 100_000
        assert session.execute("SELECT active_pid FROM pg_replication_slots").fetchone() == pid
        follower.close()
        session.close()


def test_a_slot_whose_wal_is_gone_says_so(tmp_path: Path) -> None:
    """PostgreSQL takes such a slot for valid."""
    with PostgresServer(tmp_path / "server", initdb_args=["--wal-segsize=1"]) as server:
        dsn = server.createdb("d")
        with connect(dsn) as session:
            session.execute("CREATE TABLE public.t (id bigint PRIMARY KEY); CREATE PUBLICATION p FOR TABLE public.t")
            session.execute("SELECT pg_create_logical_replication_slot('s', 'pgoutput')")
            session.execute("INSERT INTO public.t SELECT generate_series(1, 100000)")
            ((first,),) = session.execute("SELECT pg_walfile_name(pg_current_wal_insert_lsn())").fetchall()
        server.stop("fast")
        for file in (server.data / "pg_wal").glob("0000*"):
            if file.name < first:
                file.unlink()
        server.start()
        with (
            closing(ReplicationStream(dsn, "s", ["p"], 0)) as stream,
            pytest.raises(Refused, match=r"lost WAL that the slot needs.*drop-slot --when always"),
        ):
            while True:
                stream.take(0.1)


@pytest.mark.parametrize(("idle", "hosts"), [(True, 1), (False, 1), (False, 2)])
def test_the_server_shuts_down_although_nobody_acknowledges(tmp_path: Path, idle: bool, hosts: int) -> None:
    """Also if the connection names another server, which answers, and is not the primary."""
    second = PostgresServer(tmp_path / "second", settings={"default_transaction_read_only": "on"})
    with PostgresServer(tmp_path / "server") as server, second if hosts > 1 else contextlib.nullcontext():
        dsn = server.createdb("d")
        if hosts > 1:
            ports = f"{server.port},{second.port}"
            dsn = make_conninfo(dsn, host="127.0.0.1,127.0.0.1", port=ports, target_session_attrs="read-write")
        session = connect(dsn)
        session.execute(
            "CREATE TABLE public.t (id bigint PRIMARY KEY, a int, b text); CREATE PUBLICATION p FOR TABLE public.t"
        )
        # the consumer takes nothing: the buffer is full when there is much to send
        follower = Follower(dsn, buffer_bytes=100_000, block_bytes=100_000)
        session.execute(
            "INSERT INTO public.t SELECT g, g, repeat('x', 100) FROM generate_series(1, %s) g",
            (10 if idle else 50_000,),
        )
        time.sleep(0.5)
        session.close()
        follower.connection.close()
        started = time.monotonic()
        server.stop("fast")
        # a server that waits for a session is killed after 20 s
        assert time.monotonic() - started < 15
        with pytest.raises(Outage):
            for _ in range(1000):
                follower.stream.take(0.1)
        follower.close()
        server.start()


@pytest.mark.parametrize("silent", [False, True])
def test_a_session_outlasts_a_database_that_takes_no_new_ones(
    database: str, session: Connection, monkeypatch: pytest.MonkeyPatch, silent: bool
) -> None:
    """Whether the buffer is full or the walsender says nothing, the stream asks the server by a new session."""
    monkeypatch.setattr(replication, "_PROBE_INTERVAL", 0.2)
    if silent:
        monkeypatch.setattr(replication, "_SILENCE", 0.2)
    follower = Follower(database, buffer_bytes=100_000, block_bytes=100_000)
    asked = list[bool]()
    probe = replication.probe
    monkeypatch.setattr(replication, "probe", lambda dsn: asked.append(True) or probe(dsn))
    with connect(f"{database} dbname=postgres") as other:
        other.execute(f'ALTER DATABASE "{session.info.dbname}" ALLOW_CONNECTIONS false')
        query = "SELECT active_pid FROM pg_replication_slots WHERE database = current_database()"
        walsender = (session.execute(query).fetchone() or [0])[0]
        if silent:
            os.kill(walsender, signal.SIGSTOP)
        session.execute("INSERT INTO public.t SELECT g, g, repeat('x', 100) FROM generate_series(1, 20000) g")
        try:
            until(lambda: len(asked) > 2, "the stream asks by a new session")
        finally:
            os.kill(walsender, signal.SIGCONT)
        assert len(state(follower.changes("json"))) == 20_000
        other.execute(f'ALTER DATABASE "{session.info.dbname}" ALLOW_CONNECTIONS true')
    follower.close()


def test_a_killed_session_is_an_outage_after_what_had_arrived(session: Connection, follower: Follower) -> None:
    session.execute("INSERT INTO public.t VALUES (1, 1, 'x')")
    assert len(follower.changes("json")) == 1
    session.execute(
        "SELECT pg_terminate_backend(active_pid) FROM pg_replication_slots"
        " WHERE active AND database = current_database()"
    )
    with pytest.raises(Outage):
        for _ in range(600):
            follower.stream.take(0.1)
    session.execute("INSERT INTO public.t VALUES (2, 2, 'y')")
    follower.stream.close()
    follower.open()
    assert state(follower.changes("json")) == {2: (2, "y")}


@pytest.mark.parametrize("confirming", [True, False])
def test_an_error_of_the_server_is_raised_as_it_is_behind_what_had_arrived(
    database: str, session: Connection, confirming: bool
) -> None:
    # nothing more is received until the first block is taken: the last rows and the error are then received together
    follower = Follower(database, buffer_bytes=1)
    session.execute("INSERT INTO public.t SELECT g, g, repeat('x', 100) FROM generate_series(1, 1000) g")
    session.execute("DROP PUBLICATION p")
    session.execute("INSERT INTO public.t VALUES (0, 0, 'x')")
    time.sleep(1)
    rows = 0
    with pytest.raises(Refused, match='publication "p" does not exist'):
        for lsn in range(follower.start + 1, follower.start + 10_000):
            if confirming:  # all the time, so that the thread sends a status whenever it can
                follower.stream.acknowledge(lsn)
            block = follower.stream.take(0.01)
            rows += 0 if block is None else block.count
    assert rows > 1000
    follower.close()


def test_text_that_utf8_lacks_ends_with_what_to_do(database: str, session: Connection) -> None:
    dsn = f"{database} dbname={session.info.dbname}_win"
    session.execute(f"CREATE DATABASE {session.info.dbname}_win ENCODING WIN1252 TEMPLATE template0 LOCALE 'C'")
    with connect(dsn) as other:
        other.execute("SET client_encoding = WIN1252")
        other.execute("CREATE TABLE public.t (id bigint PRIMARY KEY, b text); CREATE PUBLICATION p FOR TABLE public.t")
        follower = Follower(dsn)
        other.execute(r"INSERT INTO public.t VALUES (1, convert_from('\x81', 'WIN1252'))")
        with pytest.raises(Refused, match=r"has a character that UTF-8 lacks.*drop-slot --when always"):
            follower.batches()
        follower.close()
    session.execute(f"DROP DATABASE {session.info.dbname}_win")


def test_what_is_acknowledged_is_confirmed_by_the_slot(session: Connection, follower: Follower) -> None:
    session.execute("INSERT INTO public.t VALUES (1, 1, 'x')")
    follower.batches()
    follower.stream.acknowledge(follower.assembler.position.lsn)
    query = "SELECT confirmed_flush_lsn >= %s::text::pg_lsn FROM pg_replication_slots WHERE slot_name = %s"
    lsn = f"{follower.assembler.position.lsn >> 32:X}/{follower.assembler.position.lsn & 0xFFFFFFFF:X}"
    until(
        lambda: session.execute(query, (lsn, follower.slot)).fetchone()[0],  # type: ignore[index]
        "the slot is where the stream was acknowledged",
    )


def test_changes_are_received_while_the_consumer_is_away(session: Connection, follower: Follower) -> None:
    assert follower.batches() == []
    session.execute("INSERT INTO public.t VALUES (1, 1, 'x')")
    until(lambda: follower.stream.held, "what the thread has received")
    assert len(follower.batches()) == 1


def test_what_the_thread_receives_meanwhile_comes_first(session: Connection, follower: Follower) -> None:
    assert follower.batches() == []
    session.execute("INSERT INTO public.t VALUES (1, 1, 'x')")
    until(lambda: follower.stream.held, "what the thread has received")
    first = follower.stream._blocks[0]
    # between the consumer's look at it and its own reading
    assert follower.stream._receive_now(0.0) is first


def test_a_consumer_that_is_back_takes_what_the_thread_is_receiving_and_no_more(
    session: Connection, follower: Follower, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert follower.batches() == []
    stream, taken, wait = follower.stream, queue.Queue[MessageBlock | None](), select.select

    def silent(read: list[object], *others: float) -> object:
        return time.sleep(others[-1]) if read == [stream._socket] else wait(read, *others)  # type: ignore[call-overload]

    monkeypatch.setattr(replication, "select", SimpleNamespace(select=silent))
    with stream._reading:  # as the thread holds it while it receives
        while stream.take(0.0) is not None:
            pass
        consumer = threading.Thread(target=lambda: taken.put(stream.take(60)))
        consumer.start()
        until(lambda: stream._present, "the consumer is back")
        block = MessageBlock(np.zeros(1, dtype=np.uint8), np.array([0, 1]))
        stream._blocks.append(block)
    assert taken.get(timeout=30) is block
    consumer.join()
    stream._present = True
    session.execute("INSERT INTO public.t VALUES (1, 1, 'x')")
    assert wait([stream._socket], [], [], 30)[0]
    stream._take_over()
    assert not stream._blocks


def test_a_consumer_that_waits_gets_small_transactions_and_bursts(session: Connection, follower: Follower) -> None:
    """It receives the small ones by itself, and those behind a burst again."""
    for n in range(3):
        session.execute(f"INSERT INTO public.t VALUES ({n}, 1, 'small')")
        assert len(follower.batches()) == 1
        session.execute(
            f"INSERT INTO public.t SELECT 1000 * {n + 1} + g, g, repeat('x', 1000) FROM generate_series(1, 999) g"
        )
        assert sum(map(len, follower.batches())) == 999
        until(lambda: not follower.stream.burst, "the end of the burst")


# ------------------------------------------------------------------ unchanged TOAST values
@pytest.fixture
def large() -> str:
    """100 kB that do not compress."""
    return secrets.token_hex(50_000)


def test_an_update_of_another_column_reads_the_value_again(session: Connection, follower: Follower, large: str) -> None:
    session.execute("INSERT INTO public.t VALUES (1, 1, %s)", (large,))
    follower.batches()
    session.execute("UPDATE public.t SET a = 2")
    (change,) = follower.changes("json")
    assert state([change]) == {1: (2, large)}
    assert change.flags & wire.FLAG_REREAD
    (row,) = copied(
        session,
        catalog.load(session, [t for (t,) in session.execute("SELECT 'public.t'::regclass::oid::bigint")])[0],
        "json",
    )
    assert (row.key, row.value) == (change.key, change.value)


def test_the_full_old_row_gives_the_value(session: Connection, follower: Follower, large: str) -> None:
    session.execute("ALTER TABLE public.t REPLICA IDENTITY FULL")
    session.execute("INSERT INTO public.t VALUES (1, 1, %s)", (large,))
    follower.batches()
    session.execute("UPDATE public.t SET a = 2")
    session.execute("UPDATE public.t SET id = 3")
    session.execute("DELETE FROM public.t")
    changes = follower.changes("json")
    assert [(c.op, c.flags) for c in changes] == [("u", 0), ("d", 0), ("u", 0), ("d", 0)]
    assert state(changes[:1]) == {1: (2, large)}
    assert state(changes[:3]) == {3: (2, large)}


def test_a_key_change_keeps_the_value(session: Connection, follower: Follower, large: str) -> None:
    session.execute("INSERT INTO public.t VALUES (1, 1, %s)", (large,))
    follower.batches()
    session.execute("UPDATE public.t SET id = 2")
    changes = follower.changes("json")
    assert [c.op for c in changes] == ["d", "u"]
    assert json.loads(changes[0].key or b"") == {"id": 1}
    assert state(changes) == {2: (1, large)}


def test_the_batch_itself_gives_the_value(session: Connection, follower: Follower, large: str) -> None:
    with session.transaction():
        session.execute("INSERT INTO public.t VALUES (1, 1, %s)", (large,))
        session.execute("UPDATE public.t SET a = 2")
        session.execute("UPDATE public.t SET id = 5")
        session.execute("UPDATE public.t SET a = 3")
    changes = follower.changes("json")
    assert [c.op for c in changes] == ["c", "u", "d", "u", "u"]
    assert not any(c.flags for c in changes)
    assert state(changes) == {5: (3, large)}


def test_a_row_deleted_afterwards_is_superseded(session: Connection, follower: Follower, large: str) -> None:
    session.execute("INSERT INTO public.t VALUES (1, 1, %s), (2, 1, %s)", (large, large))
    follower.batches()
    session.execute("UPDATE public.t SET a = 2 WHERE id = 1")
    session.execute("DELETE FROM public.t WHERE id = 1")
    session.execute("UPDATE public.t SET id = 3 WHERE id = 2")
    session.execute("DELETE FROM public.t WHERE id = 3")
    superseded, changes = 0, []
    for batch in follower.batches():
        made, completed = encoded(batch, follower.completer, "json")
        superseded += len(completed.superseded)
        changes += made
    assert superseded == 2
    # the tombstone of a key change is not superseded: nothing else deletes the old key
    assert [(c.op, json.loads(c.key or b"")["id"]) for c in changes] == [("d", 1), ("d", 2), ("d", 3)]


def test_a_key_that_is_itself_stored_out_of_line_is_found(database: str, large: str) -> None:
    session = connect(database)
    session.execute("CREATE TABLE public.k (id text PRIMARY KEY, a int, b text)")
    session.execute("ALTER TABLE public.k ALTER id SET STORAGE EXTERNAL, ALTER b SET STORAGE EXTERNAL")
    session.execute("CREATE PUBLICATION p FOR TABLE public.k")
    follower = Follower(database)
    key = large[:2600]
    session.execute("INSERT INTO public.k VALUES (%s, 1, %s)", (key, large))
    follower.batches()
    session.execute("UPDATE public.k SET a = 2")
    (change,) = follower.changes("json")
    assert json.loads(change.key or b"") == {"id": key}
    assert json.loads(change.value or b"") == {"id": key, "a": 2, "b": large}
    follower.close()
    session.close()


def test_a_value_of_a_type_without_a_kernel_is_read_again_too(database: str) -> None:
    session = connect(database)
    session.execute("CREATE TABLE public.k (id int PRIMARY KEY, a int, b point[], c numeric)")
    session.execute("ALTER TABLE public.k ALTER b SET STORAGE EXTERNAL, ALTER c SET STORAGE EXTERNAL")
    session.execute("CREATE PUBLICATION p FOR TABLE public.k")
    follower = Follower(database)
    session.execute(
        "INSERT INTO public.k VALUES (1, 1, array_fill('(1,2)'::point, array[10000]), ('1e' || 30000)::numeric + 1)"
    )
    follower.batches()
    session.execute("UPDATE public.k SET a = 2")
    (change,) = follower.changes("json")
    assert json.loads(change.value or b"") == {
        "id": 1,
        "a": 2,
        "b": ["(1,2)"] * 10000,
        "c": "1" + "0" * 29999 + "1",
    }
    follower.close()
    session.close()


def test_an_unkeyed_tables_updates_need_the_full_old_row(database: str) -> None:
    session = connect(database)
    session.execute("CREATE TABLE public.k (a int, b text)")
    session.execute("ALTER TABLE public.k REPLICA IDENTITY FULL")
    session.execute("CREATE PUBLICATION p FOR TABLE public.k")
    follower = Follower(database)
    session.execute("INSERT INTO public.k VALUES (1, 'x')")
    session.execute("UPDATE public.k SET a = 2")
    session.execute("DELETE FROM public.k")
    assert [(c.op, c.key, json.loads(c.value or b"")) for c in follower.changes("json")] == [
        ("c", None, {"a": 1, "b": "x"}),
        ("u", None, {"a": 2, "b": "x"}),
    ]
    follower.close()
    session.close()


def test_a_slot_that_is_gone_or_in_use_is_said_so(database: str, session: Connection, follower: Follower) -> None:
    with pytest.raises(SlotInUse, match=follower.slot):
        ReplicationStream(database, follower.slot, ["p"], 0)
    with pytest.raises(SlotError, match="no_such_slot"):
        ReplicationStream(database, "no_such_slot", ["p"], 0)
