"""``relations``: seconds in which a stream that has just started puts the first transaction together, with a row of
each of 10,000 partitions, whose definitions it reads from the catalog.

Reference: ``pg_recvlogical`` of the same transaction, to /dev/null.
"""

from __future__ import annotations

import time

from airflow_bottledwater.local.stack import DataStack
from airflow_bottledwater.model.lsn import Position
from airflow_bottledwater.postgres import catalog, publication
from airflow_bottledwater.postgres.connect import connect
from airflow_bottledwater.state.pinned import PinnedTable
from airflow_bottledwater.stream.assembler import TransactionAssembler
from airflow_bottledwater.stream.relations import Resolver
from tests.benchmarks.common import Workload, emit, recvlogical, scaled
from tests.benchmarks.stream import receive

_PARTITIONS = 10_000
#: partitions that are made by one transaction, whose locks must fit into PostgreSQL's table
_AT_ONCE = 500


def _make(source: Workload, count: int) -> None:
    source.execute(
        "CREATE TABLE parted (id int, day int, a text, b numeric(10,2), PRIMARY KEY (day, id)) PARTITION BY LIST (day)"
    )
    for first in range(0, count, _AT_ONCE):
        source.execute(
            f"""DO $$ BEGIN FOR i IN {first}..{min(count, first + _AT_ONCE) - 1} LOOP
                EXECUTE format('CREATE TABLE day%s PARTITION OF parted FOR VALUES IN (%s)', i, i); END LOOP; END $$"""
        )


def run(stack: DataStack) -> None:
    """See the module."""
    count = scaled(_PARTITIONS, 100)
    source = Workload(stack, format="json", tables="parted", partitioned_tables="leaves")
    _make(source, count)
    for name in publication.names(source.pipeline.publication_name):
        source.execute(f'CREATE PUBLICATION "{name}"')
    source.execute(f'ALTER PUBLICATION "{source.pipeline.publication_name}" ADD TABLE parted')
    slots = [source.extra_slot(f"relations{i}") for i in range(2)]
    source.execute(f"INSERT INTO parted SELECT 1, day, 'a', day FROM generate_series(0, {count - 1}) day")
    plain = recvlogical(source, slots[0], source.flushed())
    _, blocks = receive(source, slots[1], count, keep=True)
    with connect(source.dsn) as connection:
        oids = [
            oid
            for (oid,) in connection.execute(
                "SELECT inhrelid::int FROM pg_inherits WHERE inhparent = 'public.parted'::regclass"
            )
        ]
        tables = catalog.load(connection, oids)
    pinned = {table.oid: PinnedTable(table, table.name, "", 1, 0, 0, 3) for table in tables}
    pipeline = source.pipeline
    started = time.monotonic()
    resolver = Resolver(pipeline, pinned)
    assembler = TransactionAssembler(
        Position(0), {}, resolver,
        batch_bytes=pipeline.batch_bytes, largest_transaction=pipeline.max_transaction_bytes,
    )  # fmt: skip
    made = 0
    for block in blocks:
        resolver.arrived = block.arrived
        assembler.add(block)
        while (batch := assembler.cut() or assembler.flush(empty=False)) is not None:
            made += len(batch.changes)
    seconds = time.monotonic() - started
    resolver.close()
    assert made == count, made
    emit("relations", seconds, "s", {"pg_recvlogical": plain}, relations=count)
    source.drop()
