"""Reads the output of COPY as blocks of rows.

https://www.postgresql.org/docs/current/sql-copy.html (Binary Format)
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Iterator

import numpy as np
import psycopg
from psycopg import pq, sql

from airflow_bottledwater.errors import ProtocolError
from airflow_bottledwater.postgres.connect import Connection, Silence, command
from airflow_bottledwater.postgres.receive import CopyReader, MessageBlock

SIGNATURE = b"PGCOPY\n\xff\r\n\0"
#: signature, 32 bits of flags, 32 bits of header extension length
HEADER_SIZE = len(SIGNATURE) + 8
TRAILER = b"\xff\xff"


def rows(
    connection: Connection, query: sql.Composable, *, block_size: int = 1 << 20, idle: Callable[[], None] = lambda: None
) -> Iterator[MessageBlock]:
    """Run a binary COPY; yields blocks whose messages are rows. A block is overwritten by the next one.

    PostgreSQL sends each row as a message of its own, with the header before the first (SendCopyBegin,
    CopySendEndOfRow: src/backend/commands/copyto.c) and the trailer, field count -1, as the last.

    :raises ProtocolError: the data is not in the binary format. See :func:`lines` for parameters and other errors.
    """
    first = True
    for block in lines(connection, query, block_size=block_size, idle=idle):
        data, offsets = block.data, block.offsets
        if first:
            head = bytes(data[offsets[0] : offsets[0] + HEADER_SIZE])
            if len(head) < HEADER_SIZE or not head.startswith(SIGNATURE):
                raise ProtocolError("COPY did not send the binary format's signature.")
            (extension,) = struct.unpack_from(">I", head, len(SIGNATURE) + 4)
            offsets = offsets.copy()
            offsets[0] += HEADER_SIZE + extension
            if offsets[0] == offsets[1]:
                offsets = offsets[1:]
            first = False
        if len(offsets) > 1 and bytes(data[offsets[-2] : offsets[-1]]) == TRAILER:
            offsets = offsets[:-1]
        if len(offsets) > 1:
            yield MessageBlock(data, np.ascontiguousarray(offsets))


def lines(
    connection: Connection, query: sql.Composable, *, block_size: int = 1 << 20, idle: Callable[[], None] = lambda: None
) -> Iterator[MessageBlock]:
    """Run a COPY; yields blocks of its messages. In the text format, each is a row. A block is overwritten by the next
    one.

    :param block_size: bytes of a block.
    :param idle: called about twice a second while nothing arrives; it may raise to end the COPY.
    :raises psycopg.Error: the query failed.
    :raises StopRequested: see :func:`~airflow_bottledwater.backoff.stoppable`.
    :raises Outage: nothing arrives, and the server does not answer.
    """
    result = command(connection, query)
    if result.status != pq.ExecStatus.COPY_OUT:
        raise psycopg.errors.error_from_result(result)
    reader = CopyReader(connection.pgconn, size=block_size)
    silence = Silence(connection)
    while not reader.ended:
        block = reader.read(0.5)
        if block is None:
            if not reader.ended:
                silence.check()
                idle()
            continue
        silence.broken()
        yield block
    reader.finish()
