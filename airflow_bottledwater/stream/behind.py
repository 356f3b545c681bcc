"""What was committed behind the rows of new tables, and that the stream has passed already."""

from __future__ import annotations

import contextlib
import struct
import time
from collections.abc import Mapping

import numpy as np

from airflow_bottledwater.model.lsn import Position
from airflow_bottledwater.pipeline.settings import Settings
from airflow_bottledwater.postgres import publication
from airflow_bottledwater.postgres.receive import MessageBlock
from airflow_bottledwater.publish.batch import Batch
from airflow_bottledwater.state.pinned import PinnedTable
from airflow_bottledwater.stream.assembler import TransactionAssembler
from airflow_bottledwater.stream.relations import Resolver
from airflow_bottledwater.tables.new_rows import NewRows

#: the head of a message of the stream: its kind, two LSNs and a time
#: (https://www.postgresql.org/docs/current/protocol-replication.html, XLogData)
_HEAD = struct.Struct(">cQQq")
#: bytes: no transaction is cut
_ALL = 1 << 40


def passed(pipeline: Settings, rows: NewRows, tables: Mapping[int, PinnedTable], reached: Position) -> list[Batch]:
    """The changes of new tables that were committed behind their rows and that the stream has left out, since it did
    not know the tables.

    :param tables: the new tables, by oid.
    :param reached: P, which is at no place inside a transaction.
    :raises psycopg.Error: the slot's session is gone.
    """
    begin = rows.slot.consistent_point
    if reached.lsn <= begin:
        return []
    data, ends = bytearray(), [0]
    names, messages = publication.names(pipeline.publication_name), pipeline.sends_messages
    for lsn, message in rows.slot.changes(names, reached.lsn, messages=messages):
        if message[:1] == b"B" and int.from_bytes(message[1:9], "big") >= reached.lsn:
            break
        data += _HEAD.pack(b"w", lsn, lsn, 0) + message
        ends.append(len(data))
    with contextlib.closing(Resolver(pipeline, dict(tables))) as resolver:
        resolver.arrived = time.monotonic()
        assembler = TransactionAssembler(
            Position(begin, 0),
            dict.fromkeys(tables, rows.boundary),
            resolver,
            batch_bytes=_ALL,
            largest_transaction=_ALL,
            unknown=lambda _: None,
        )
        if messages:
            assembler.take_messages(lambda _: None)  # the stream has published them; here they are only counted
        assembler.add(MessageBlock(np.frombuffer(data, dtype=np.uint8), np.array(ends, dtype=np.int64)))
        found = []
        while (batch := assembler.cut()) is not None:
            found.append(batch)
        last = assembler.flush(empty=False)
    return [*found, *([last] if last is not None else [])]
