"""``toast``: changes/s of a backlog of updates that leave an out-of-line value of 8 kB unchanged, under the default
replica identity, 1,000 a transaction, until all is visible to a strict consumer; ``key`` is the type of the key: one
that is compared with an operator of an extension is found by its index, too.

Reference: ``pg_recvlogical`` to /dev/null, which gets none of the values; then a COPY of the same rows, whole.
"""

from __future__ import annotations

import time

from airflow_bottledwater.local.stack import DataStack
from tests.benchmarks.common import (
    RUNNER,
    Cpu,
    Follower,
    Job,
    Workload,
    copy_all,
    drain,
    emit,
    log,
    paused,
    recvlogical,
    scaled,
)

_CHANGES, _PER_TRANSACTION = 40_000, 1000
#: how often all rows are updated, twice each time, before it is measured
_WARM_UP = 2
#: a type, an expression for the key of row i, and the extension of the type
_KEYS = (("bigint", "i", ""), ("citext", "'key ' || i", "citext"))


def _measure(stack: DataStack, kind: str, key: str, extension: str) -> None:
    changes = scaled(_CHANGES, _PER_TRANSACTION) // _PER_TRANSACTION * _PER_TRANSACTION
    source = Workload(stack, skip_snapshot=True, tables="toasted")
    if extension:
        if not source.execute(f"SELECT FROM pg_available_extensions WHERE name = '{extension}'"):
            log.info("%s: this PostgreSQL has no such extension; BOTTLEDWATER_TEST_POSTGRES chooses another", extension)
            source.drop()
            return
        source.execute(f"CREATE EXTENSION {extension}")
    source.execute(
        f"CREATE TABLE toasted (id {kind} PRIMARY KEY, n int, big text)",
        "ALTER TABLE toasted ALTER big SET STORAGE EXTERNAL",
        f"INSERT INTO toasted SELECT {key}, i, repeat(md5(i::text), 250) FROM generate_series(1, {changes}) i",
        "CREATE INDEX ON toasted (n)",
        "VACUUM ANALYZE toasted",
        f"""CREATE PROCEDURE touch() LANGUAGE plpgsql AS $$
        BEGIN
            FOR k IN 1..{changes // _PER_TRANSACTION} LOOP
                UPDATE toasted SET n = -n WHERE n BETWEEN (k - 1) * {_PER_TRANSACTION} + 1 AND k * {_PER_TRANSACTION};
                COMMIT;
            END LOOP;
        END $$""",
    )
    source.create()
    # the stream works before it is measured
    source.execute("UPDATE toasted SET n = n WHERE n = 1")
    follower = Follower(source)
    with Job(source.pipeline, "stream", engine=RUNNER) as job:
        follower.until(1, job=job)
        # a broker that has just been started needs twice the processor time until its JVM has compiled its code
        for warmed in range(1, _WARM_UP + 1):
            source.execute("CALL touch()", "VACUUM toasted", "UPDATE toasted SET n = abs(n)", "VACUUM toasted")
            follower.until(2 * warmed * changes + 1, job=job, backoff=600)
        slot = source.extra_slot("recvlogical")
        with paused(source.walsender()):
            source.execute("CALL touch()")
            end = source.flushed()
            cpu = Cpu(stack, job)
            started = time.time()
        done = follower.until((2 * _WARM_UP + 1) * changes + 1, job=job, backoff=600)
        used = cpu.used()
        seconds = done.seen - started
        memory = job.log()
    follower.close()
    source.released()
    received = changes / recvlogical(source, slot, end)
    copied = time.monotonic()
    drain(source.dsn, copy_all(source.table("toasted")))
    copied = time.monotonic() - copied
    log.info("%s: %.1f s; %s", kind, seconds, memory[-200:])
    emit(
        "toast",
        changes / seconds,
        "changes/s",
        {"pg_recvlogical": received, "copy": changes / copied},
        key=kind,
        seconds=seconds,
        cpu_seconds=used,
        changes=changes,
    )
    source.drop()


def run(stack: DataStack) -> None:
    """See the module."""
    for key in _KEYS:
        _measure(stack, *key)
