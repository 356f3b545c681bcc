"""The keys that a table has, by the hashes that the keys of records have, read in ranges of blocks."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace

import numpy as np
import numpy.typing as npt
from psycopg import pq, sql

from airflow_bottledwater.backoff import Backoff
from airflow_bottledwater.encoding.mapping import TableMapping
from airflow_bottledwater.encoding.program import Target, compile_programs, select_list
from airflow_bottledwater.errors import Outage
from airflow_bottledwater.kafka.hashes import hash_records
from airflow_bottledwater.model.relation import SourceTable
from airflow_bottledwater.model.version import Version
from airflow_bottledwater.pipeline.settings import Settings
from airflow_bottledwater.postgres import copy
from airflow_bottledwater.postgres.connect import Connection
from airflow_bottledwater.postgres.receive import MessageBlock
from airflow_bottledwater.postgres.snapshot import OwnSnapshot, copy_query
from airflow_bottledwater.publish import hashed
from airflow_bottledwater.publish.encode import BlockEncoder
from airflow_bottledwater.publish.session import LARGEST
from airflow_bottledwater.snapshot.latest import LatestRecords

#: seconds that others may wait behind our wait for a lock
LOCK = 1.0
#: seconds after which whoever waits for the table's lock gets it, and blocks whose keys are read between two looks at
#: the clock
_SECONDS, _BLOCKS = 1.0, 1 << 13

#: of the parts of a table, each with the number of its file (:meth:`OwnSnapshot.files`), the block behind the last one
#: that was read
_Upto = dict[tuple[int, int], int]


def find_keys(
    pipeline: Settings,
    connection: Connection,
    latest: LatestRecords,
    begin: Callable[[], OwnSnapshot],
    version: Callable[[OwnSnapshot], Version],
    *,
    backoff: Backoff,
    idle: Callable[[], None],
) -> OwnSnapshot:
    """Look for all keys of a table, in ranges of blocks, each under a lock and a snapshot of its own, so that nobody
    waits for long: a row that moves between two of them is changed. Returns the last snapshot, whose transaction is
    open.

    :param latest: marks the keys that are found.
    :param begin: begins a transaction that reads the table.
    :param version: the relation version of the rows.
    :param backoff: waits while another session has locked the table.
    :param idle: called while rows are waited for.
    """
    upto: _Upto = {}
    mapping = TableMapping.of(pipeline)
    while True:
        try:
            found, began = begin(), time.monotonic()
        except Outage as error:
            if connection.info.transaction_status is not pq.TransactionStatus.IDLE:
                raise
            # another session has locked the table: what was found before still counts
            backoff.wait(error)
            continue
        backoff.over()
        of, now = version(found), found.files()
        for part, first in _unread(found.parts, now, upto):
            last = upto[part.oid, now[part.oid]] = first + _BLOCKS
            blocks = copy.rows(connection, _query(part, first, last), idle=idle)
            for rows in hashed.rows(pipeline, _only_key(of.table), blocks):
                latest.find(_hashes(rows, of, mapping))
            if time.monotonic() - began > _SECONDS:
                break
        else:
            return found
        connection.execute("COMMIT")


def _only_key(table: SourceTable) -> SourceTable:
    """The table with the columns of its key alone, for hashes of keys: nobody looks at partitions."""
    return replace(
        table, columns=tuple(column for column in table.columns if column.name in table.key), partition_by=()
    )


def _query(table: SourceTable, first: int, last: int) -> sql.Composed:
    """The COPY of the keys of a table, or a partition, in the blocks [first, last)."""
    return copy_query(table, select_list(_only_key(table)), first, last)


def _unread(parts: Sequence[SourceTable], now: Mapping[int, int], upto: _Upto) -> Iterator[tuple[SourceTable, int]]:
    """What is not read yet of a table's parts: again and again the first one that is not, and its block to begin at,
    while whoever reads notes in ``upto`` how far that is done. A part with a new file, or that was attached again, is
    read from its start."""
    for part in parts:
        while (first := upto.get((part.oid, now[part.oid]), 0)) < part.pages:
            yield part, first


def _hashes(block: MessageBlock, version: Version, mapping: TableMapping) -> npt.NDArray[np.uint64]:
    """The hashes of a block of keys, as :func:`~airflow_bottledwater.kafka.hashes.hash_keys` gives them for the keys of
    records.

    :param block: rows of :func:`_query`, with the hashes of what is published as such. One that cannot be encoded is
        the key of no record.
    """
    around = mapping.around(version.topic, table := _only_key(version.table), "")
    target = Target(0, 1, version.key_schema, version.value_schema, around)
    programs = compile_programs([(table, target)], mapping.format, copied=True)
    batches = BlockEncoder(0).encode(block, programs, LARGEST)
    return np.concatenate([hash_records(encoded.records) for encoded in batches])
