"""Reads CopyData messages in bulk: compiled loops call libpq's functions on psycopg's connection.

A Python loop over ``PQgetCopyData`` reads 0.5 million messages a second, compiled code two million. So the loop is
compiled, and Python handles blocks of messages: one byte buffer and the offsets in it.
"""

from __future__ import annotations

import ctypes
import select
import time
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt
import psycopg
from psycopg import pq

from airflow_bottledwater.compiled import compiled, external, memcpy, types
from airflow_bottledwater.errors import ProtocolError

if pq.__impl__ == "python":
    from psycopg.pq._pq_ctypes import impl as _impl  # type: ignore[attr-defined]

    libpq = _impl.pq
else:
    # the extension module of psycopg_binary (or psycopg_c); its libpq resolves through it
    import importlib

    libpq = ctypes.CDLL(importlib.import_module(f"psycopg_{pq.__impl__}._psycopg").__file__)

# https://www.postgresql.org/docs/current/libpq-copy.html
_get_copy_data = external(libpq, "PQgetCopyData", types.int32, types.intp, types.intp, types.int32)
_consume_input = external(libpq, "PQconsumeInput", types.int32, types.intp)
_freemem = external(libpq, "PQfreemem", types.intp, types.intp)

_END, _ERROR, _DRY, _FULL, _LARGE = -1, -2, 0, 1, 2


@compiled
def _drain(connection, out, offsets, count, used, pointer):
    """Read messages until all that has arrived is read or the block is full; returns (state, messages, bytes)."""
    room = offsets.size - 1
    while count < room:
        n = _get_copy_data(connection, pointer.ctypes.data, np.int32(1))
        if n == 0:
            if _consume_input(connection) == 0:
                return _ERROR, count, used
            n = _get_copy_data(connection, pointer.ctypes.data, np.int32(1))
            if n == 0:
                return _DRY, count, used
        if n < 0:
            return np.int64(n), count, used
        if used + n > out.size:
            # libpq has handed the message over already: the caller makes room, and copies it from the pointer
            pointer[1] = n
            return _LARGE, count, used
        memcpy(out.ctypes.data + used, pointer[0], np.int64(n))
        _freemem(pointer[0])
        used += n
        count += 1
        offsets[count] = used
    return _FULL, count, used


def warm_up() -> None:
    """Compile the loop; with no room for a message it does nothing."""
    _drain(0, np.zeros(1, dtype=np.uint8), np.zeros(1, dtype=np.int64), 0, 0, np.zeros(2, dtype=np.int64))


@dataclass(frozen=True, slots=True)
class MessageBlock:
    """A block of messages: message ``i`` is ``data[offsets[i]:offsets[i + 1]]``.

    :param arrived: when it was there, on the clock of :func:`time.monotonic`.
    """

    data: npt.NDArray[np.uint8]
    offsets: npt.NDArray[np.int64]
    arrived: float = field(default_factory=time.monotonic)

    @property
    def count(self) -> int:
        """The number of messages."""
        return len(self.offsets) - 1


class CopyReader:
    """Reads blocks of CopyData messages from a connection in COPY OUT or COPY BOTH mode.

    :param size: bytes of a block; it is enlarged for a message that is larger.
    :param messages: the largest number of messages in a block.
    """

    def __init__(self, pgconn: pq.abc.PGconn, *, size: int = 1 << 20, messages: int = 1 << 15) -> None:
        self._pgconn = pgconn
        self._out: npt.NDArray[np.uint8] = np.empty(size, dtype=np.uint8)
        self._size = size
        self._offsets: npt.NDArray[np.int64] = np.zeros(messages + 1, dtype=np.int64)
        self._pointer: npt.NDArray[np.int64] = np.zeros(2, dtype=np.int64)
        self._pending = False
        #: whether the COPY is over (or was ended by an error, which :meth:`finish` raises)
        self.ended = False
        #: whether everything that had arrived was read; if not, read again before waiting for the socket
        self.dry = True

    @property
    def socket(self) -> int:
        """The connection's file descriptor."""
        return self._pgconn.socket

    def read(self, timeout: float | None) -> MessageBlock | None:
        """A block of messages that have arrived; None if nothing arrives within ``timeout`` seconds, or at the end of
        the COPY.

        The block's arrays belong to the reader, and are overwritten by the next call.

        :raises psycopg.OperationalError: the connection is lost.
        """
        if self.ended:
            return None
        block = self._read_now()
        if block is None and not self.ended and select.select([self.socket], [], [], timeout)[0]:
            block = self._read_now()
        return block

    def _read_now(self) -> MessageBlock | None:
        used, count = 0, 0
        if self._pending:
            used, count = self._take_large(), 1
        elif self._out.size > self._size:
            self._out = np.empty(self._size, dtype=np.uint8)
        state, count, used = _drain(self._address(), self._out, self._offsets, count, used, self._pointer)
        self.dry = state == _DRY
        if state == _LARGE:
            self._pending = True
            if count == 0:
                return self._read_now()
        elif state == _ERROR:
            raise psycopg.OperationalError(_message(self._pgconn) or "the connection to PostgreSQL was lost")
        elif state == _END:
            self.ended = True
        return MessageBlock(self._out[:used], self._offsets[: count + 1]) if count else None

    def _address(self) -> int:
        address: int | None = self._pgconn.pgconn_ptr  # type: ignore[attr-defined]
        if address is None:
            raise psycopg.OperationalError("the connection is closed")
        return int(address)

    def _take_large(self) -> int:
        size = int(self._pointer[1])
        if size > self._out.size:
            self._out = np.empty(size, dtype=np.uint8)
        ctypes.memmove(self._out.ctypes.data, int(self._pointer[0]), size)
        libpq.PQfreemem(ctypes.c_void_p(int(self._pointer[0])))
        self._offsets[1] = size
        self._pending = False
        return size

    def finish(self) -> None:
        """Read the results that follow the COPY.

        :raises psycopg.Error: the COPY failed on the server.
        :raises ProtocolError: the COPY is not over.
        """
        while (result := self._pgconn.get_result()) is not None:
            if result.status in (pq.ExecStatus.COPY_OUT, pq.ExecStatus.COPY_BOTH):
                raise ProtocolError("PostgreSQL is still in COPY mode after its end.")
            if result.status == pq.ExecStatus.FATAL_ERROR:
                raise psycopg.errors.error_from_result(result)


def _message(pgconn: pq.abc.PGconn) -> str:
    raw: bytes | None = pgconn.error_message
    return raw.decode(errors="replace").strip() if raw else ""
