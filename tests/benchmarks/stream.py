"""``stream``: a backlog of row changes (60 % inserts, 30 % updates, 10 % deletes; 1,000 a transaction, and one), from
the slot's position until all is visible to a strict consumer.

Several backlogs of one size. The first waits when the job is submitted: ``with_start`` is its rows/s from spark-submit
on, ``from_first_position`` those from the first position on (of what follows it; by then the receiver has read ahead).
Each other piles up before the running job, whose walsender stands still meanwhile. The value is the rows/s of the last,
from when that goes on; ``cold`` has those of the others, with which the broker becomes warm.

References, on the last backlog: ``pg_recvlogical`` to /dev/null, and the package's own receiver to nowhere; the first
is measured before and after the other, and its mean counts.
"""

from __future__ import annotations

import time

import numpy as np

from airflow_bottledwater.local.stack import DataStack
from airflow_bottledwater.model.lsn import parse_lsn
from airflow_bottledwater.postgres import publication
from airflow_bottledwater.postgres.receive import MessageBlock
from airflow_bottledwater.postgres.replication import XLOG_HEADER, ReplicationStream
from tests.benchmarks.common import (
    CHANGES_PER_TRANSACTION,
    ENGINES,
    Cpu,
    Follower,
    Job,
    Workload,
    emit,
    empty_job,
    log,
    paused,
    recvlogical,
    scaled,
)

_CHANGES, _SINGLE_CHANGES = 1_000_000, 300_000
#: backlogs before the measured one: a broker that has just been started needs twice the processor time until its JVM
#: has compiled its code
_WARMING = 2


def row_messages(block: MessageBlock) -> int:
    """How many inserts, updates and deletes a block has."""
    begins = block.offsets[:-1]
    rows = block.data[begins] == ord("w")
    kinds = block.data[begins[rows] + XLOG_HEADER]
    return int(np.isin(kinds, np.frombuffer(b"IUD", dtype=np.uint8)).sum())


def receive(source: Workload, slot: str, changes: int, *, keep: bool = False) -> tuple[float, list[MessageBlock]]:
    """Seconds in which our receiver has a slot's changes, and the blocks if they are kept."""
    start = source.execute(f"SELECT confirmed_flush_lsn FROM pg_replication_slots WHERE slot_name = '{slot}'")[0][0]
    names = publication.names(source.pipeline.publication_name)
    blocks: list[MessageBlock] = []
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
    for engine in ENGINES:
        for single in (False, True):
            _measure(stack, engine, single)


def _measure(stack: DataStack, engine: str, single: bool) -> None:
    source = Workload(stack, skip_snapshot=True)
    source.insert(600)
    source.create()
    follower = Follower(source)
    wanted = scaled(_SINGLE_CHANGES if single else _CHANGES, 1000)
    changes = source.churn(wanted, single=single)
    with Job(source.pipeline, "stream", engine=engine) as job:
        done = follower.until(changes, job=job)
        with_start = changes / (done.seen - job.submitted)
        first = follower.history[1]
        after = (done.published - first.published) / max(1e-9, done.seen - first.seen)
        log.info("%s: first position after %.1f s", engine, first.seen - job.submitted)
        walsender, speeds = source.walsender(), []
        for backlog in range(2, 3 + _WARMING):
            if backlog == 2 + _WARMING:
                slots = [source.extra_slot(name) for name in ("recvlogical", "receiver", "again")]
            with paused(walsender):
                source.churn(wanted, single=single)
                end = source.flushed()
                cpu = Cpu(stack, job)
                started = time.time()
            done = follower.until(backlog * changes, job=job)
            used = cpu.used()
            seconds = done.seen - started
            speeds.append(changes / seconds)
    follower.close()
    # the job's walsender may take a moment to notice
    source.released()
    alone = recvlogical(source, slots[0], end)
    receiver = changes / receive(source, slots[1], changes)[0]
    alone = (alone + recvlogical(source, slots[2], end)) / 2
    emit(
        "stream",
        speeds[-1],
        "rows/s",
        {"pg_recvlogical": changes / alone, "receiver": receiver},
        engine=engine,
        per_transaction=1 if single else CHANGES_PER_TRANSACTION,
        cold=speeds[:-1],
        ratio_receiver=speeds[-1] / receiver,
        seconds=seconds,
        with_start=with_start,
        from_first_position=after,
        first_position_seconds=first.seen - job.submitted,
        cpu_seconds=used,
        changes=changes,
    )
    source.drop()
