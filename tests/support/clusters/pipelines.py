"""A pipeline whose jobs run on other hosts, with writers and the checker of the fault suite."""

from __future__ import annotations

import contextlib
import uuid
from collections.abc import Iterator
from typing import Any

import psycopg

from tests.support.clusters.servers import ReachableServers
from tests.support.live_reader import LiveReader
from tests.support.topics import Flow
from tests.support.verifying import verified_beside_a_stream
from tests.support.writers import PREPARING, SHORT, Habit, Writers, audit, make_tables

TABLES = ("a", "b")
ROWS = 3000
#: transactions are named, batches are small, and servers are waited for
_SETTINGS: dict[str, Any] = {
    "xid_header": True,
    "range_bytes": 64 * 1024,
    "batch_bytes": 64 * 1024,
    "max_transaction_bytes": 64 * 1024,
    "outage_timeout": 120.0,
    # a machine that does much else starts Python slowly
    "executor_timeout": 180.0,
}
_HABITS = (Habit(open_for=(0.05, 0.3)), SHORT, PREPARING)


def make_flow(servers: ReachableServers, **settings: Any) -> Flow:
    """A pipeline over a new database, whose servers are reached from all hosts."""
    name = f"d{uuid.uuid4().hex[:8]}"
    with psycopg.connect(servers.dsn(), autocommit=True) as connection:
        connection.execute(f"CREATE DATABASE {name}")  # type: ignore[call-overload]
    flow = Flow(servers.dsn(name), servers.kafka, None, tables=TABLES, **{**_SETTINGS, **settings})
    flow.change(kafka={"bootstrap.servers": servers.bootstrap})
    return flow


def writers(flow: Flow) -> Writers:
    """Writers on its tables, to be used as a context."""
    return Writers(flow.dsn, TABLES, 1, ROWS, _HABITS, (0.01, 0.1))


@contextlib.contextmanager
def live(flow: Flow, rows: int = ROWS) -> Iterator[LiveReader]:
    """Slot, tables with rows, writers, and a consumer that reads along. Behind the block, what is left is streamed
    here; each topic must be its table, and each row and each change must have come once and in order."""
    make_tables(flow, TABLES, rows)
    flow.create()
    with writers(flow), LiveReader(flow, TABLES) as reader:
        yield reader
    verified_beside_a_stream(flow)
    audit(flow, TABLES, resumed=True).check()
