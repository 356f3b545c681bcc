"""Tombstones for keys that a new snapshot did not find again, for example after a slot was lost.

They are needed if the topic held records before the table's plan was made; the topic's ends at that time were stored
with it.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Sequence
from dataclasses import replace

from airflow_bottledwater.backoff import check_stopped
from airflow_bottledwater.encoding import wire
from airflow_bottledwater.encoding.mapping import TableMapping
from airflow_bottledwater.kafka.key_table import RANGES
from airflow_bottledwater.kafka.topic_reader import blocks
from airflow_bottledwater.kafka.topics import Topics
from airflow_bottledwater.postgres import catalog
from airflow_bottledwater.postgres.connect import Connection
from airflow_bottledwater.postgres.server import wait_flushed
from airflow_bottledwater.postgres.snapshot import begin_reading
from airflow_bottledwater.publish.removed import removals
from airflow_bottledwater.publish.session import PublishSession
from airflow_bottledwater.snapshot.keys import LOCK, find_keys
from airflow_bottledwater.snapshot.latest import LatestRecords
from airflow_bottledwater.state.pinned import PinnedTable
from airflow_bottledwater.state.records import Sweep, sweep_key

log = logging.getLogger(__name__)

#: tombstones of a transaction at least, but for the last
_TOGETHER = 10_000


def sweep(
    session: PublishSession, pinned: PinnedTable, ends: Sequence[int], connection: Connection | None = None
) -> int:
    """Publish the tombstones, thousands in a transaction, and behind them the record that it is done; returns how many.

    An interrupted sweep begins again, and finds the keys deleted for which it has published a tombstone.

    :param ends: per partition, the topic's end when the plan was made.
    :param connection: asks the table for its keys; needed if rows of it became dead letters, since their keys have no
        record of this snapshot.
    :raises TakenOver: another job has claimed the slot.
    :raises StopRequested: the snapshot is to end.
    """
    swept = 0

    def work() -> None:
        nonlocal swept
        swept = 0
        reached = Topics(session.pipeline.kafka).ends(pinned.topic, pinned.partitions)
        low = 0
        while low < RANGES:
            latest = _read(session, pinned, ends, reached, low)
            if latest.any_before():
                if connection is not None:
                    _find_rows(session, connection, pinned, latest)
                for keys in _stale(session, pinned, ends, latest):
                    records = removals(session, pinned.version, keys, wire.FROM_SNAPSHOT, session.state.resume_at.lsn)
                    session.transact([records], {}, several=True)
                    swept += len(keys)
            low = latest.high
        session.transact([], {sweep_key(pinned.table.oid): Sweep(tuple(ends), True)})

    session.run(work)
    log.info("Swept %r: %d keys that the source no longer has.", pinned.topic, swept)
    return swept


def _read(
    session: PublishSession, pinned: PinnedTable, ends: Sequence[int], reached: Sequence[int], low: int
) -> LatestRecords:
    """The latest records of the keys whose hashes lie from ``low`` on, as many as memory is for."""
    latest = LatestRecords(sum(reached), ends, low)
    for block in blocks(session.pipeline.kafka, pinned.topic, reached, session.backoff):
        check_stopped()
        latest.note(block)
    return latest


def _find_rows(session: PublishSession, connection: Connection, pinned: PinnedTable, latest: LatestRecords) -> None:
    """Mark the keys as found that the table has now: those that come and go later are the stream's."""
    pipeline, oid = session.pipeline, pinned.table.oid
    if oid not in catalog.names(connection, [oid]):
        return  # it was dropped
    found = find_keys(
        pipeline,
        connection,
        latest,
        lambda: begin_reading(connection, oid, TableMapping.of(pipeline), lock_timeout=LOCK),
        lambda found: replace(pinned.version, table=pinned.check_key(found.table, complete=False)),
        backoff=session.backoff,
        idle=check_stopped,
    )
    # what it shows cannot be lost any more
    wait_flushed(connection, pipeline.postgres, found.insert_lsn, timeout=pipeline.outage_timeout)
    connection.execute("COMMIT")


def _stale(
    session: PublishSession, pinned: PinnedTable, ends: Sequence[int], latest: LatestRecords
) -> Iterator[list[tuple[int, bytes]]]:
    """Partition and key of the latest records of keys that the snapshot has not found again, thousands at a time."""
    found: list[tuple[int, bytes]] = []
    for block in blocks(session.pipeline.kafka, pinned.topic, ends, session.backoff):
        check_stopped()
        found += latest.stale_keys(block)
        if len(found) >= _TOGETHER:
            yield found
            found = []
    if found:
        yield found
