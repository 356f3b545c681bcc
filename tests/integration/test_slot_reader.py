"""Slots are looked at over one session, which all triggers of a triggerer share."""

from __future__ import annotations

import asyncio
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import psycopg
import pytest

from airflow_bottledwater.errors import Outage
from airflow_bottledwater.pipeline.settings import Settings
from airflow_bottledwater.triggers.alarms import SlotLagAlarmTrigger
from airflow_bottledwater.triggers.slots import SlotReader
from airflow_bottledwater.triggers.watching import AsyncWatch


def sessions(dsn: str) -> list[Any]:
    query = "SELECT pid FROM pg_stat_activity WHERE application_name = 'bottledwater triggerer'"
    with psycopg.connect(dsn, autocommit=True) as connection:
        return connection.execute(f"{query} AND datname = current_database()").fetchall()


def test_all_triggers_of_a_database_share_a_session_that_the_last_one_closes(database: str) -> None:
    with psycopg.connect(database, autocommit=True) as connection:
        connection.execute("SELECT pg_create_logical_replication_slot('shared_a', 'pgoutput')")

    async def watch() -> None:
        readers = [SlotReader() for _ in range(30)]
        rows = await asyncio.gather(*(reader.row(database, "shared_a") for reader in readers))
        assert {row[0] for row in rows if row} == {"reserved"}
        assert await readers[0].row(database, "none") is None
        (first,) = sessions(database)
        # a session that has ended in between is none's outage
        with psycopg.connect(database, autocommit=True) as connection:
            connection.execute("SELECT pg_terminate_backend(%s)", first)
        rows = await asyncio.gather(*(reader.row(database, "shared_a") for reader in readers))
        assert all(rows) and len(sessions(database)) == 1 and sessions(database) != [first]
        # a trigger that is cancelled while it asks leaves the others a session
        asking = asyncio.create_task(readers[1].row(database, "shared_a"))
        await asyncio.sleep(0)
        asking.cancel()
        assert await readers[2].row(database, "shared_a")
        for reader in readers[1:]:
            await reader.close()
        assert len(sessions(database)) == 1
        await readers[0].close()
        await asyncio.sleep(0.2)
        assert sessions(database) == [] and not SlotReader._sessions

    asyncio.run(watch())


def test_a_source_that_does_not_answer_is_an_outage(database: str) -> None:
    async def ask() -> None:
        reader = SlotReader()
        with pytest.raises(psycopg.OperationalError):
            await reader.row(f"{database} dbname=gone", "shared_a")
        await reader.close()

    asyncio.run(ask())
    assert not SlotReader._sessions


def test_alarms_share_the_session_and_look_the_connection_up_again_after_an_outage(database: str) -> None:
    with psycopg.connect(database, autocommit=True) as connection:
        connection.execute("SELECT pg_create_logical_replication_slot('shared_b', 'pgoutput')")
    known = [database]

    def settings(dsn: str) -> Settings:
        return Settings.of(postgres=dsn, kafka={"bootstrap.servers": "none:9092"}, slot="shared_b")

    class Alarm(SlotLagAlarmTrigger):
        async def _connected(self) -> Settings:
            return settings(known[0])

    async def watch() -> None:
        trigger = Alarm(pipeline="shared_b", max_lag=-1, max_lag_seconds=None)
        alarms: list[Any] = [await trigger._begin(settings(database), None) for _ in range(10)]
        found = await asyncio.gather(*(alarm.fetch() for alarm in alarms))
        assert [each["slot"] for each in found] == ["shared_b"] * 10 and len(sessions(database)) == 1
        for alarm in alarms[1:]:
            await alarm.close()
        gone: Any = await trigger._begin(settings(f"{database} dbname=gone"), None)
        with pytest.raises(Outage, match="Reading the slot's lag"):
            await gone.fetch()
        # with the connection as it is now
        assert (await gone.fetch())["slot"] == "shared_b" and len(sessions(database)) == 1
        for alarm in (gone, alarms[0]):
            await alarm.close()
        assert not SlotReader._sessions

    asyncio.run(watch())


def test_many_alarms_find_a_host_by_its_name(database: str) -> None:
    """That takes one of the event loop's threads, which may not all be theirs."""
    named = database.replace("host=127.0.0.1", "host=localhost")
    settings = Settings.of(postgres=named, kafka={"bootstrap.servers": "none:9092"}, slot="none")

    async def look(trigger: SlotLagAlarmTrigger) -> Any:
        async with AsyncWatch(lambda: trigger._begin(settings, None), "the slot") as watching:
            return await watching.fetch()

    async def watch() -> list[Any]:
        asyncio.get_running_loop().set_default_executor(ThreadPoolExecutor(2))
        alarms = [SlotLagAlarmTrigger(pipeline="none") for _ in range(10)]
        return await asyncio.wait_for(asyncio.gather(*(look(alarm) for alarm in alarms)), 20)

    assert {each["message"] for each in asyncio.run(watch())} == {"Slot 'none' does not exist."}
