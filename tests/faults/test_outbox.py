"""Outboxes of rows and of messages under random writers, while the stream is killed at its named points and at random
moments: each committed row or message is a record exactly once, and the events of each aggregate are in the order of
their commits."""

from __future__ import annotations

import random
import threading
import time
from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager

import psycopg
import pytest

from tests.faults.worker import STREAM_POINTS
from tests.integration.test_outbox import OUTBOX, events
from tests.support.faults import Jobs
from tests.support.topics import Flow, MakeFlow

_KINDS, _WRITERS = ("order", "customer", "bill"), 3
_LOG = "CREATE TABLE written (n bigserial, id uuid, kind text)"
#: the row is deleted at once, as an outbox's is
_INSERT = (
    "WITH made AS (INSERT INTO outbox (aggregatetype, aggregateid, type, payload)"
    " SELECT %(kind)s, %(writer)s, 'made', jsonb_build_object('n', %(n)s + g, 'text', repeat('x', 200))"
    " FROM generate_series(1, %(rows)s) g RETURNING id, aggregatetype)"
    " INSERT INTO written (id, kind) SELECT id, aggregatetype FROM made"
)
#: the same by messages
_TELL = (
    "WITH made AS MATERIALIZED (SELECT id, pg_logical_emit_message(%(transactional)s, 'outbox', jsonb_build_object("
    "'topic', %(kind)s::text, 'key', %(writer)s::text,"
    " 'payload', jsonb_build_object('n', %(n)s + g, 'text', repeat('x', 200)),"
    " 'headers', jsonb_build_object('id', id))::text) AS lsn"
    " FROM (SELECT g, gen_random_uuid() AS id FROM generate_series(1, %(rows)s) g) each)"
    " INSERT INTO written (id, kind) SELECT id, %(kind)s::text FROM made WHERE lsn > '0/0'"
)


def _write(dsn: str, writer: int, seed: int, stopped: threading.Event, errors: list[BaseException]) -> None:
    dice, n = random.Random(f"{seed}/{writer}"), 0
    try:
        with psycopg.connect(dsn, autocommit=True) as connection:
            while not stopped.is_set():
                connection.execute("BEGIN")
                for _ in range(dice.randrange(1, 4)):
                    rows = 600 if dice.random() < 0.05 else dice.randrange(1, 6)
                    said = {"kind": dice.choice(_KINDS), "writer": str(writer), "n": n, "rows": rows}
                    insert = dice.choice((_INSERT, _TELL))
                    connection.execute(insert, {**said, "transactional": True})
                    if dice.random() < 0.2:
                        never = {"kind": "never", "writer": "never", "n": n, "rows": 2, "transactional": True}
                        connection.execute("SAVEPOINT s")
                        connection.execute(insert, never)
                        connection.execute("ROLLBACK TO SAVEPOINT s")
                    n += rows
                if dice.random() < 0.7:
                    connection.execute("DELETE FROM outbox WHERE aggregateid = %s", (str(writer),))
                connection.execute("ROLLBACK" if dice.random() < 0.2 else "COMMIT")
                if dice.random() < 0.3:
                    said = {"kind": dice.choice(_KINDS), "writer": str(writer), "n": n, "rows": 2}
                    connection.execute(_TELL, {**said, "transactional": False})
                    n += 2
                time.sleep(dice.uniform(0.0, 0.03))
    except BaseException as error:
        errors.append(error)


@contextmanager
def _writers(flow: Flow, seed: int) -> Iterator[None]:
    stopped, errors = threading.Event(), list[BaseException]()
    threads = [
        threading.Thread(target=_write, args=(flow.dsn, writer, seed, stopped, errors), daemon=True)
        for writer in range(_WRITERS)
    ]
    for thread in threads:
        thread.start()
    try:
        yield
    finally:
        stopped.set()
        for thread in threads:
            thread.join(60)
    assert not errors, errors


@pytest.mark.long
@pytest.mark.parametrize("points", [2, len(STREAM_POINTS)])
def test_an_outbox_whose_stream_is_killed_is_published_exactly_once(
    make_flow: MakeFlow, jobs: Jobs, seed: int, points: int
) -> None:
    dice = random.Random(seed)
    flow = make_flow(
        tables="outbox", transaction_timeout=90.0, messages={"outbox": "outbox.{topic}"},
        table_options={"outbox": {"outbox": "outbox.{aggregatetype}", "partitions": 2}},
    )  # fmt: skip
    flow.execute(OUTBOX, _LOG)
    flow.create()
    flow.snapshot()
    chosen = dice.sample(list(STREAM_POINTS), points)
    with _writers(flow, seed):
        for point in chosen:
            first = point in ("in-claim", "before-init", "in-cut-transaction")
            in_commit = {"act": "kill-soon", "delay": dice.uniform(0.0, 0.015)} if point == "in-commit" else {}
            job = jobs.start(flow, "stream", point=point, nth=1 if first else dice.randrange(1, 4), **in_commit)
            job.killed_at_its_point()
        job = jobs.start(flow, "stream")
        time.sleep(dice.uniform(1.0, 2.0))
        job.stop()
    flow.stream()
    written: dict[str, list[str]] = defaultdict(list)
    for kind, id in flow.execute("SELECT kind, id::text FROM written"):
        written[kind].append(id)
    assert len({id for ids in written.values() for id in ids}) > 100
    for kind in _KINDS:
        found = events(flow, kind)
        ids = [each.headers["id"].decode() for each in found]
        assert len(ids) == len(set(ids)), "a row is published twice"
        assert set(ids) == set(written[kind])
        numbers = defaultdict(list)
        for each in found:
            numbers[each.key].append(each.payload["n"])
        assert all(of == sorted(of) for of in numbers.values()), "an aggregate's events are out of order"
    assert not events(flow, "never")
