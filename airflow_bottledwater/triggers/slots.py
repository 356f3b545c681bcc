"""Looks at slots over one session with each database, which all triggers of a triggerer share: to open one for each
look would cost ten times as much as the look itself."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any, ClassVar

if TYPE_CHECKING:
    import psycopg

#: the server that answers, by its cluster and its timeline: LSNs of two servers cannot be compared
_SERVER = "(SELECT system_identifier FROM pg_control_system()) || '/' || left(pg_walfile_name(pg_current_wal_lsn()), 8)"
#: the last value is the server
LAG_SQL = ", ".join(
    (
        "SELECT wal_status",
        "pg_wal_lsn_diff(pg_current_wal_lsn(), confirmed_flush_lsn)::bigint",
        "pg_wal_lsn_diff(pg_current_wal_lsn(), restart_lsn)::bigint",
        "slot_type = 'logical' AND active_pid IS NOT NULL",
        "pg_wal_lsn_diff(confirmed_flush_lsn, '0/0')::bigint",
        "safe_wal_size",
        f"{_SERVER} FROM pg_replication_slots WHERE slot_name = %s",
    )
)
#: where the WAL ends, and the server
END_SQL = f"SELECT pg_current_wal_insert_lsn()::text, {_SERVER}"

#: seconds for an answer
_TIMEOUT = 30.0


class _SharedSession:
    """A session with one database, in one event loop."""

    def __init__(self, dsn: str) -> None:
        self.dsn, self.users = dsn, 0
        self._connection: psycopg.AsyncConnection[Any] | None = None
        self._asking = asyncio.Lock()

    async def row(self, slot: str) -> tuple[Any, ...] | None:
        # imported here, since sensors import the triggers, and a DAG processor does not need libpq
        import psycopg

        async with self._asking:
            # a session that has ended since the last look is no reason to wait for the next one
            for last in (self._connection is None, True):
                try:
                    async with asyncio.timeout(_TIMEOUT):
                        if self._connection is None:
                            self._connection = await psycopg.AsyncConnection.connect(
                                self.dsn, autocommit=True, connect_timeout=10, application_name="bottledwater triggerer"
                            )
                        return await (await self._connection.execute(LAG_SQL, (slot,))).fetchone()
                except (psycopg.OperationalError, TimeoutError) as error:
                    await self.close()
                    if last:
                        raise psycopg.OperationalError(str(error) or f"No answer within {_TIMEOUT:.0f} s.") from None
                except BaseException:
                    # the query may still be running
                    await self.close()
                    raise
        raise AssertionError("unreachable")

    async def close(self) -> None:
        connection, self._connection = self._connection, None
        if connection is not None:
            await connection.close()


class SlotReader:
    """Reads rows of :data:`LAG_SQL`, for one trigger, which has to close it: the last trigger of a database closes the
    session."""

    _sessions: ClassVar[dict[tuple[int, str], _SharedSession]] = {}

    def __init__(self) -> None:
        self._session: _SharedSession | None = None

    async def row(self, dsn: str, slot: str) -> tuple[Any, ...] | None:
        """The row of a slot; None if there is no such slot.

        :param dsn: the connection string; another one than before has other credentials.
        :raises psycopg.OperationalError: the source does not answer.
        """
        if self._session is None or self._session.dsn != dsn:
            await self.close()
            key = (id(asyncio.get_running_loop()), dsn)
            self._session = self._sessions.setdefault(key, _SharedSession(dsn))
            self._session.users += 1
        return await self._session.row(slot)

    async def close(self) -> None:
        """Read no more."""
        session, self._session = self._session, None
        if session is None:
            return
        session.users -= 1
        if not session.users:
            self._sessions.pop((id(asyncio.get_running_loop()), session.dsn), None)
            await session.close()
