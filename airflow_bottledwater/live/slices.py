"""Where the rows of a slice are, if PostgreSQL finds them without reading the whole table: then only these rows are
read."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
from psycopg import sql

from airflow_bottledwater.model.relation import SourceTable
from airflow_bottledwater.postgres import copy
from airflow_bottledwater.postgres.connect import Connection

#: rows of one table, or partition, whose places are kept at most: 8 bytes each
_MOST_ROWS = 4_000_000
#: rows that are read by one query at most: each place is some ten bytes of its text
_MOST_IN_A_QUERY = 20_000
#: a row of COPY BINARY with one tid: field count (int16), length (int32), block (uint32), offset (uint16); tidsend,
#: src/backend/utils/adt/tid.c
_ROW = np.dtype([("fields", ">i2"), ("length", ">i4"), ("block", ">u4"), ("offset", ">u2")])
#: bits of a row's number in its block (OffsetNumber, src/include/storage/off.h)
_OFFSET_BITS = 16
#: plans that read only what they look for; https://www.postgresql.org/docs/current/using-explain.html
_DIRECT = ("Index Scan", "Index Only Scan", "Bitmap Heap Scan", "Tid Scan", "Tid Range Scan")


@dataclass(frozen=True, slots=True)
class RowLocations:
    """Where the rows of a slice were when its reading began. A row that has moved since was changed, and is published
    by the stream.

    :param tids: block and number of each row, in order, as one integer.
    """

    tids: npt.NDArray[np.uint64]

    def take(self, first: int, blocks: int) -> tuple[RowLocations, int | None]:
        """The rows from a block on, as far as they are in so many blocks; and the block behind the last of these. None:
        there are no others."""
        begin = int(np.searchsorted(self.tids, first << _OFFSET_BITS))
        some = self.tids[begin : begin + _MOST_IN_A_QUERY]
        starts = np.flatnonzero(np.diff(some >> _OFFSET_BITS, prepend=np.uint64(0))[1:]) + 1
        if len(starts) >= blocks:
            some = some[: starts[blocks - 1]]
        elif begin + len(some) == len(self.tids):
            return RowLocations(some), None
        elif len(starts):
            some = some[: starts[-1]]  # the last block's other rows may be behind the limit
        return RowLocations(some), int(some[-1] >> _OFFSET_BITS) + 1

    def condition(self, connection: Connection) -> sql.Composed:
        """As a condition on a table's rows, in a transaction that reads them by it and by nothing else: by an index on
        the slice's own condition, each query would go through the whole slice."""
        for way in ("seqscan", "indexscan", "bitmapscan"):
            connection.execute(sql.SQL("SET LOCAL {} = off").format(sql.Identifier(f"enable_{way}")))
        each = (f'"({tid >> _OFFSET_BITS},{tid & 0xFFFF})"' for tid in self.tids.tolist())
        return sql.SQL("ctid = ANY ({}::tid[])").format(sql.Literal("{" + ",".join(each) + "}"))


def find(
    connection: Connection, table: SourceTable, condition: sql.Composable, *, idle: Callable[[], None]
) -> RowLocations | None:
    """Find the rows of a table that fulfil a condition, in the transaction that is open; None if PostgreSQL would read
    the whole table for that, or there are too many of them to keep their places.

    :param idle: see :func:`~airflow_bottledwater.postgres.copy.lines`.
    """
    name = sql.Identifier(table.schema, table.name)
    query = sql.SQL("SELECT ctid FROM ONLY {} WHERE (\n{}\n)").format(name, condition)
    # a partition that can have none of the rows is not looked at; and the plan is that of a COPY, which has no parallel
    # workers
    connection.execute("SET LOCAL constraint_exclusion = on")
    connection.execute("SET LOCAL max_parallel_workers_per_gather = 0")
    row = connection.execute(sql.SQL("EXPLAIN (FORMAT JSON) {}").format(query)).fetchone()
    assert row is not None
    (explained,) = json.loads(row[0]) if isinstance(row[0], str | bytes) else row[0]
    plan = explained["Plan"]
    if plan["Node Type"] == "Result" and plan.get("One-Time Filter") == "false":
        return RowLocations(np.zeros(0, dtype=np.uint64))
    if plan["Node Type"] not in _DIRECT or plan["Plan Rows"] > _MOST_ROWS:
        return None
    found: list[npt.NDArray[np.uint64]] = []
    for block in copy.rows(connection, sql.SQL("COPY ({}) TO STDOUT (FORMAT binary)").format(query), idle=idle):
        begin, end = int(block.offsets[0]), int(block.offsets[-1])
        rows = np.frombuffer(block.data[begin:end].tobytes(), dtype=_ROW)
        found.append((rows["block"].astype(np.uint64) << np.uint64(_OFFSET_BITS)) | rows["offset"])
    return RowLocations(np.sort(np.concatenate([np.zeros(0, dtype=np.uint64), *found])))
