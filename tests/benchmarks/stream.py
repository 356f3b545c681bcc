"""``stream``: a backlog of row changes (60 % inserts, 30 % updates, 10 % deletes, 1,000 a transaction), from the slot's position
until all is visible to a strict consumer.

Two backlogs of one size. The first waits when the job is submitted: ``with_start`` is its rows/s from spark-submit on,
``from_first_position`` those from the first position on (of what follows it; by then the receiver has read ahead). The second
piles up before the running job, whose walsender stands still meanwhile; the value is its rows/s from when that goes on.

References, on the second backlog: ``pg_recvlogical`` to /dev/null, and the package's own receiver to nowhere.
"""

from __future__ import annotations

import time

import numpy as np

from airflow_bottledwater.local.stack import DataStack
from airflow_bottledwater.model.lsn import parse_lsn
from airflow_bottledwater.postgres import publication
from airflow_bottledwater.postgres.receive import Block
from airflow_bottledwater.postgres.replication import XLOG_HEADER, ReplicationStream
from tests.benchmarks.common import (
    RUNNER,
    Cpu,
    Follower,
    Job,
    Workload,
    emit,
    empty_job,
    engines,
    log,
    paused,
    recvlogical,
    scaled,
)

_CHANGES = 1_000_000


def row_messages(block: Block) -> int:
    """How many inserts, updates and deletes a block has."""
    begins = block.offsets[:-1]
    rows = block.data[begins] == ord("w")
    kinds = block.data[begins[rows] + XLOG_HEADER]
    return int(np.isin(kinds, np.frombuffer(b"IUD", dtype=np.uint8)).sum())


def receive(source: Workload, slot: str, changes: int, *, keep: bool = False) -> tuple[float, list[Block]]:
    """Seconds in which our receiver has a slot's changes, and the blocks if they are kept."""
    start = source.execute(f"SELECT confirmed_flush_lsn FROM pg_replication_slots WHERE slot_name = '{slot}'")[0][0]
    names = publication.names(source.pipeline.publication_name)
    blocks: list[Block] = []
    started = time.monotonic()
    stream = ReplicationStream(source.dsn, slot, names, parse_lsn(start))
    try:
        left = changes
        while left > 0:
            block = stream.take(10)
            if block is not None:
                left -= row_messages(block)
                if keep:
                    blocks.append(block)
        return time.monotonic() - started, blocks
    finally:
        stream.close()


def run(stack: DataStack) -> None:
    """See the module."""
    empty_job()  # its files are in the page cache then
    for engine in [*engines(), RUNNER]:
        source = Workload(stack, skip_snapshot=True)
        source.insert(600)
        source.create()
        follower = Follower(source)
        changes = source.churn(scaled(_CHANGES, 1000))
        with Job(source.pipeline, "stream", engine=engine) as job:
            done = follower.until(changes, job=job)
            with_start = changes / (done.seen - job.submitted)
            first = follower.history[1]
            after = (done.published - first.published) / max(1e-9, done.seen - first.seen)
            log.info("%s: first position after %.1f s", engine, first.seen - job.submitted)
            slots = [source.extra_slot(name) for name in ("recvlogical", "receiver")]
            walsender = source.walsender()
            with paused(walsender):
                source.churn(changes)
                end = source.flushed()
                cpu = Cpu(stack, job)
                started = time.time()
            done = follower.until(2 * changes, job=job)
            used = cpu.used()
            seconds = done.seen - started
        follower.close()
        # the job's walsender may take a moment to notice
        source.released()
        reference = changes / recvlogical(source, slots[0], end)
        receiver = changes / receive(source, slots[1], changes)[0]
        emit(
            "stream",
            changes / seconds,
            "rows/s",
            {"pg_recvlogical": reference, "receiver": receiver},
            engine=engine,
            ratio_receiver=changes / seconds / receiver,
            seconds=seconds,
            with_start=with_start,
            from_first_position=after,
            first_position_seconds=first.seen - job.submitted,
            cpu_seconds=used,
            changes=changes,
        )
        source.drop()
