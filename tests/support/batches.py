"""What the stream makes of PostgreSQL's messages before they are encoded."""

from __future__ import annotations

from airflow_bottledwater.model.lsn import Position
from airflow_bottledwater.model.version import Version
from airflow_bottledwater.postgres.receive import MessageBlock
from airflow_bottledwater.publish.batch import Batch
from airflow_bottledwater.stream.assembler import TransactionAssembler


def batch_of(block: MessageBlock, version: Version) -> Batch:
    """All changes of a block, whose relations are all of this version."""
    assembler = TransactionAssembler(
        Position(0), {}, lambda *_: version, batch_bytes=1 << 30, largest_transaction=1 << 30
    )
    assembler.add(block)
    assembler.cut()
    batch = assembler.flush(empty=True)
    assert batch is not None
    return batch
