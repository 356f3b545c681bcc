"""The replication connection: it starts replication, receives (in bulk in a thread of its own), and confirms positions
to the server.

https://www.postgresql.org/docs/current/protocol-replication.html (Streaming Replication Protocol)
"""

from __future__ import annotations

import collections
import os
import select
import socket
import struct
import threading
import time
from collections.abc import Sequence

import numpy as np
import psycopg
from psycopg import pq, sql

from airflow_bottledwater.backoff import stoppable
from airflow_bottledwater.errors import BottledWaterError, Outage, ProtocolError, SlotError, SlotInUse, StopRequested
from airflow_bottledwater.model.lsn import format_lsn
from airflow_bottledwater.postgres.connect import command, connect, outage, probe
from airflow_bottledwater.postgres.dsn import describe
from airflow_bottledwater.postgres.publication import as_option
from airflow_bottledwater.postgres.receive import CopyReader, MessageBlock
from airflow_bottledwater.postgres.slot import application

#: XLogData: 'w', start LSN, end LSN, send time (8 bytes each), then the payload
XLOG_HEADER = 25
#: Primary keepalive: 'k', end LSN, send time, reply requested
_KEEPALIVE = struct.Struct(">cqqb")
#: Standby status update: 'r', written, flushed, applied, time, reply requested
_STATUS = struct.Struct(">cqqqqb")
#: seconds between the epochs of Unix and PostgreSQL
_EPOCH_SECONDS = 946_684_800

#: during a burst, the thread wakes up only when this many bytes have arrived (or for _BURST_WAIT seconds none have):
#: the walsender makes a send() for each row, and a wake-up costs more than a row
BURST_BYTES = 256 * 1024
_BURST_WAIT = 0.005
#: bytes in one block with which a burst begins, and with less it is over
_MUCH = BURST_BYTES // 4
#: seconds for which the consumer may be away before the thread receives in its place; and between two looks of the
#: thread, when something was received in the last second, and otherwise
_AWAY, _LOOK, _LOOK_IDLE = 0.005, 0.01, 0.1
#: seconds between two statuses, and between two that confirm something
_STATUS_INTERVAL, _CONFIRM_INTERVAL = 1.0, 0.1
#: keepalives that are answered in a second; a server that shuts down sends requests without a pause until everything is
#: confirmed
_REPLIES_PER_SECOND = 10
#: more requests for a reply in a second than these mean that the server is shutting down and waits for this connection
#: (it asks again after each answer, while a running server asks once in half of wal_sender_timeout)
_STORM = 5
#: seconds between two checks of the server while the buffer is full and nothing is read from it
_PROBE_INTERVAL = 2.0
#: seconds of silence after which the server is asked for a keepalive; after twice as many, a new session checks whether
#: it still serves this connection, which may be dead without TCP noticing. PostgreSQL does the same
#: (wal_sender_timeout, 60 s)
_SILENCE = 30.0


class ReplicationStream:
    """Changes from a slot, as blocks of XLogData and keepalive messages in the order of their arrival.

    As long as little arrives, the consumer receives by itself: each change through another thread would wait for that
    one, and for Python's lock. A thread receives in bursts and while the consumer is away. It also answers keepalives,
    and confirms to the server what :meth:`acknowledge` was called with.

    :param publications: the names of the publications.
    :param start: the LSN to start from; the server begins at the slot's confirmed position if that is later.
    :param messages: whether logical messages are to be sent, too.
    :param buffer_bytes: bytes that may wait for the consumer; when there are more, nothing is received.
    :ivar held: bytes that wait for it.
    :ivar burst: whether so much arrives that only the thread receives.
    :raises SlotInUse: another session replicates from the slot.
    :raises SlotError: the slot does not exist or cannot be used.
    :raises Outage: see :func:`connect`; or no walsender is free.
    """

    def __init__(
        self,
        dsn: str,
        slot: str,
        publications: Sequence[str],
        start: int,
        *,
        messages: bool = False,
        buffer_bytes: int = 64 << 20,
        block_bytes: int = 1 << 20,
    ) -> None:
        self._slot = slot
        self._where = describe(dsn)
        self._buffer_bytes = buffer_bytes
        self._connection = connect(dsn, replication=True, application=application(slot))
        self._pgconn = self._connection.pgconn
        #: blocks that the thread has received, and their bytes
        self._blocks: collections.deque[MessageBlock] = collections.deque()
        self.held = 0
        self._changed = threading.Condition()
        #: held by whoever uses the connection
        self._reading = threading.RLock()
        #: whether the consumer is receiving, or waits for something to receive; and since when it is away
        self._present, self._left = False, 0.0
        self._error: BottledWaterError | None = None
        self._closing = threading.Event()
        self._flushed = start
        self._received = start
        #: whether the server is to send a keepalive, and whether it has asked for a status
        self._reply_wanted = self._asked = False
        # the LSN that is confirmed, the times of the last status, of the last probe while the buffer was full, and of
        # the last message received; whether there is a burst, and whether little has arrived in it now
        self._confirmed, self._last_status = start, 0.0
        self._probed = self._heard = time.monotonic()
        self._silence_limit, self.burst, self._ebbs = _SILENCE, False, False
        self._replies, self._storm = _Rate(_REPLIES_PER_SECOND), _Rate(_STORM)
        try:
            self._start(publications, start, messages)
        except BaseException:
            self._connection.close()
            raise
        self._reader = CopyReader(self._pgconn, size=block_bytes)
        self._socket = socket.socket(fileno=os.dup(self._pgconn.socket))
        # a byte in here wakes the thread, to send a status at once, to receive, or to end
        self._wake_read, self._wake_write = socket.socketpair()
        self._wake_read.setblocking(False)
        self._thread = threading.Thread(target=self._run, name=f"receive-{slot}", daemon=True)
        self._thread.start()

    def _start(self, publications: Sequence[str], start: int, messages: bool) -> None:
        names = as_option(publications, self._connection)
        start_replication = sql.SQL(
            "START_REPLICATION SLOT {} LOGICAL {} (proto_version '1', publication_names {}, binary 'true'{})"
        ).format(
            sql.Identifier(self._slot), sql.SQL(format_lsn(start)), _replication_string(names),
            sql.SQL(", messages 'true'" if messages else ""),
        )  # fmt: skip
        result = command(self._connection, start_replication)
        if result.status == pq.ExecStatus.COPY_BOTH:
            return
        error = psycopg.errors.error_from_result(result)
        if error.sqlstate == "55006":
            raise SlotInUse(
                f"Slot {self._slot!r} is in use: {error}.", "Stop the other job, or wait until it has ended."
            ) from error
        if error.sqlstate in ("42704", "55000"):
            raise SlotError(
                f"Slot {self._slot!r} cannot be used: {error}.", "'bottledwater status' shows its state."
            ) from error
        if error.sqlstate == "53300":
            raise Outage(f"No walsender is free: {error}.", "Raise max_wal_senders.") from error
        raise outage(error, f"Starting replication from slot {self._slot!r}") from error

    # ------------------------------------------------------------------ the consumer's side
    def take(self, timeout: float) -> MessageBlock | None:
        """The next block; None if there is none within ``timeout`` seconds.

        :raises BottledWaterError: why the connection has ended; raised once all blocks that arrived before are taken.
        """
        deadline = time.monotonic() + timeout
        while True:
            with self._changed:
                if not self._blocks and self._error is None and self.burst:
                    self._changed.wait(max(0.0, deadline - time.monotonic()))
                if (block := self._arrived()) is not None:
                    return block
            if not self.burst and (block := self._take_directly(max(0.0, deadline - time.monotonic()))) is not None:
                return block
            if time.monotonic() >= deadline:
                return None

    def _arrived(self) -> MessageBlock | None:
        """The next block that the thread has received, with the lock of :attr:`_changed`.

        :raises BottledWaterError: there is none, and there will be none.
        """
        if self._blocks:
            block = self._blocks.popleft()
            self.held -= block.data.nbytes
            self._changed.notify_all()
            return block
        if self._error is not None:
            raise self._error
        return None

    def _take_directly(self, timeout: float) -> MessageBlock | None:
        """The next block, received by the consumer itself; None if none has arrived, or not all of a message, or the
        thread uses the connection: for a status that the server does not accept, perhaps."""
        self._present = True  # what the thread has not begun to receive by now, it leaves to the consumer
        try:
            block = self._receive_now(timeout)
            if block is None and timeout and self._reader.dry:
                select.select([self._socket], [], [], timeout)
                block = self._receive_now(timeout)
            return block
        finally:
            self._left, self._present = time.monotonic(), False

    def _receive_now(self, timeout: float) -> MessageBlock | None:
        """What the thread has received, or what has arrived since."""
        if not self._reading.acquire(timeout=timeout):
            return None
        try:
            with self._changed:
                if (block := self._arrived()) is not None:
                    return block
            return self._read()
        except Exception as error:
            raise self._end(error) from None
        finally:
            self._reading.release()

    def acknowledge(self, lsn: int) -> None:
        """Confirm to the server, within a tenth of a second, that everything up to ``lsn`` is safe; it may then remove
        its WAL."""
        self._flushed = max(self._flushed, lsn)

    def request_reply(self) -> None:
        """Ask the server to send a keepalive with its position."""
        self._reply_wanted = True
        self._wake()

    def close(self) -> None:
        """Send a last confirmation and close the connection."""
        self._closing.set()
        self._wake()
        self._thread.join(5)
        self._connection.close()
        self._socket.close()
        self._wake_read.close()
        self._wake_write.close()

    def _wake(self) -> None:
        try:
            self._wake_write.send(b"x")
        except OSError:
            pass  # closed meanwhile

    # ------------------------------------------------------------------ the thread
    def _run(self) -> None:
        try:
            with stoppable(self._closing):
                self._receive()
        except StopRequested:
            pass
        except Exception as error:  # the consumer must get any error
            self._end(error)

    def _end(self, error: Exception) -> BottledWaterError:
        """Note why the connection has ended, unless that is known, and close it; returns the reason."""
        if isinstance(error, psycopg.Error):
            error = outage(error, f"Replication from slot {self._slot!r}")
        elif isinstance(error, OSError):
            error = Outage(f"Replication from slot {self._slot!r}: {error}.")
        elif not isinstance(error, BottledWaterError):
            error = ProtocolError(f"Receiving from slot {self._slot!r} failed: {type(error).__name__}: {error}")
        assert isinstance(error, BottledWaterError)
        with self._changed:
            self._error = self._error or error
            self._changed.notify_all()
        # a server that shuts down waits for this connection, so it must be closed
        with self._reading:
            self._pgconn.finish()
        return self._error

    def _receive(self) -> None:
        while not self._closing.is_set() and self._error is None:
            self._report()
            if self._is_full():
                self._wait_for_room()
                continue
            self._probed = time.monotonic()
            if self._is_due():
                self._take_over()
            self._check_silence()
        if self._error is None:
            self._send_status()

    def _report(self) -> None:
        """Send a status to the server when it has asked for one, when a keepalive is requested, in time when there is
        something new to confirm, and every second."""
        interval = _CONFIRM_INTERVAL if self._flushed > self._confirmed else _STATUS_INTERVAL
        if self._asked or self._reply_wanted or time.monotonic() - self._last_status >= interval:
            self._send_status()

    def _wait_for_room(self) -> None:
        """Wait while the buffer is full. Nothing is read meanwhile, so it would not be noticed that the server shuts
        down: a new session checks that."""
        now = time.monotonic()
        if now - self._probed >= _PROBE_INTERVAL:
            self._probed = now
            if (session := probe(self._connection.dsn)) is not None:
                session.close()
        self._heard, self._silence_limit = time.monotonic(), _SILENCE
        with self._changed:
            self._changed.wait(0.2)

    def _is_due(self) -> bool:
        """Wait; returns whether the thread is to receive now."""
        if self.burst:
            self._ebbs = self._reader.dry and not self._wait_for_bytes()
            return True
        now = time.monotonic()
        look = _LOOK if now - self._heard < _STATUS_INTERVAL else _LOOK_IDLE
        if select.select([self._wake_read], [], [], look)[0]:
            _drain(self._wake_read)
        return self.burst or not (self._present or time.monotonic() - self._left < _AWAY)

    def _wait_for_bytes(self) -> bool:
        """In a burst, wait until much has arrived, or another thread wakes this one; returns whether much has."""
        ready, _, _ = select.select([self._socket, self._wake_read], [], [], _BURST_WAIT)
        if self._wake_read in ready:
            _drain(self._wake_read)
        return self._socket in ready

    def _set_burst(self, burst: bool) -> None:
        if burst != self.burst:
            self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_RCVLOWAT, BURST_BYTES if burst else 1)
            with self._changed:
                self.burst = burst
                self._changed.notify_all()
            self._wake()

    def _check_silence(self) -> None:
        """Check that the server is still there, when nothing has arrived for long.

        :raises Outage: it is not.
        """
        if time.monotonic() - self._heard > self._silence_limit:
            # at first only a keepalive is requested; then the server is checked repeatedly, since it may be decoding a
            # large transaction
            if self._silence_limit > _SILENCE:
                self._look_after()
            self._reply_wanted = True
            self._silence_limit += _SILENCE

    def _take_over(self) -> None:
        """Receive what has arrived in the consumer's place, unless it is back; a burst is over when that is little."""
        with self._reading:
            if self._present and not self.burst:
                return
            if (block := self._read()) is not None:
                with self._changed:
                    self._blocks.append(block)
                    self.held += block.data.nbytes
                    self._changed.notify_all()
            if self._ebbs and (block is None or block.data.nbytes < _MUCH):
                self._set_burst(False)

    def _read(self) -> MessageBlock | None:
        """What has arrived, read by whoever uses the connection; None if nothing has.

        :raises Outage: the server has ended the connection, or sends so many requests for a reply that it must be
            shutting down.
        """
        block = self._reader.read(0)
        if block is None:
            if self._reader.ended:
                self._reader.finish()
                raise Outage(f"{self._where} has ended the replication connection of slot {self._slot!r}.")
            return None
        self._heard, self._silence_limit = time.monotonic(), _SILENCE
        if block.data.nbytes >= _MUCH:
            self._set_burst(True)
        requested = self._note(block)
        if requested and not self._storm.allows(requested):
            raise Outage(f"{self._where} is shutting down.")
        if requested and self._replies.allows(1):
            self._asked = True
            self._wake()
        return MessageBlock(block.data.copy(), block.offsets.copy())

    def _look_after(self) -> None:
        """Check by a new session that the server still serves this connection, although nothing arrives.

        :raises Outage: it does not.
        """
        connection = probe(self._connection.dsn)
        if connection is None:
            return
        try:
            found = connection.execute(
                "SELECT active_pid FROM pg_replication_slots WHERE slot_name = %s", (self._slot,)
            ).fetchone()
        finally:
            connection.close()
        if found is None or found[0] != self._connection.pid:
            raise Outage(
                f"{self._where} no longer serves the job's connection to slot {self._slot!r}, and has not closed it."
            )

    def _is_full(self) -> bool:
        with self._changed:
            return self.held >= self._buffer_bytes

    def _note(self, block: MessageBlock) -> int:
        """Read a block's keepalives: returns how many request a reply, and notes the server's position."""
        data, offsets = block.data, block.offsets
        kinds = data[offsets[:-1]]
        requested = 0
        for i in np.flatnonzero(kinds == ord("k")):
            _, end, _, wanted = _KEEPALIVE.unpack(data[offsets[i] : offsets[i + 1]].tobytes())
            requested += wanted
            self._received = max(self._received, end)
        last = int(offsets[-2])
        if kinds[-1] == ord("w"):
            self._received = max(self._received, int.from_bytes(bytes(data[last + 1 : last + 9]), "big"))
        return requested

    def _send_status(self) -> None:
        flushed = self._flushed
        clock = int((time.time() - _EPOCH_SECONDS) * 1_000_000)
        wanted, self._reply_wanted, self._asked = self._reply_wanted, False, False
        message = _STATUS.pack(b"r", max(self._received, flushed), flushed, flushed, clock, int(wanted))
        started = time.monotonic()
        with self._reading:
            if self._reader.ended:
                return  # libpq would say that no COPY is in progress, which would hide the server's own error
            self._pgconn.put_copy_data(message)
            while self._pgconn.flush() == 1:
                select.select([], [self._pgconn.socket], [], 0.5)
                if time.monotonic() - started > (1.0 if self._closing.is_set() else 2 * _SILENCE):
                    raise Outage(f"{self._where} no longer accepts data from the job.")
        self._confirmed, self._last_status = flushed, time.monotonic()


def _replication_string(text: str) -> sql.SQL:
    """A string literal for a replication command, whose grammar (src/backend/replication/repl_scanner.l) has no
    ``E'…'``. That is what
    :class:`psycopg.sql.Literal` produces for a text with a backslash."""
    return sql.SQL("'" + text.replace("'", "''") + "'")


class _Rate:
    """Counts events, and allows at most ``limit`` of them in a second."""

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._second = 0
        self._count = 0

    def allows(self, events: int) -> bool:
        second = int(time.monotonic())
        if second != self._second:
            self._second, self._count = second, 0
        self._count += events
        return self._count <= self._limit


def _drain(sock: socket.socket) -> None:
    try:
        while sock.recv(4096):
            pass
    except BlockingIOError:
        pass
