"""An address that leads to another server while a stream runs: open sessions stay with the one of before."""

from __future__ import annotations

import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest
from psycopg.conninfo import make_conninfo

from airflow_bottledwater.errors import SlotError
from airflow_bottledwater.jobs import status
from airflow_bottledwater.local.kafka import KafkaBroker
from airflow_bottledwater.local.postgres import PostgresServer
from tests.support.faults import Proxy
from tests.support.tables import look_often
from tests.support.topics import Flow
from tests.support.waiting import until

#: longer than a block, so that it is stored apart, and an update of another column leaves it out
LARGE = "repeat('x', 20000)"


class Address:
    """A pipeline's address, which leads to its server, and can lead to a standby of it."""

    def __init__(self, kafka: KafkaBroker, folder: Path) -> None:
        self.server = PostgresServer(folder / "postgres", settings={"restore_command": "/bin/false"})
        self.standby = PostgresServer(folder / "standby", settings={"restore_command": "/bin/false"})
        self.server.start()
        self.proxy = Proxy(self.server.port)
        self.flow = flow = Flow(self.server.createdb("d"), kafka, None, skip_snapshot=True, outage_timeout=120.0)
        flow.change(postgres=make_conninfo(flow.dsn, port=self.proxy.port))
        flow.execute(
            "CREATE TABLE a (id int PRIMARY KEY, n int, t text)",
            "ALTER TABLE a ALTER COLUMN t SET STORAGE EXTERNAL",
            f"INSERT INTO a VALUES (1, 0, {LARGE})",
        )
        flow.create()
        self.name = flow.name
        self.server.stop()
        subprocess.run(["cp", "-a", self.server.data, self.standby.data], check=True)
        subprocess.run(["cp", "-a", self.standby.data / "PG_VERSION", self.standby.data / "standby.signal"], check=True)
        self.server.start()
        self.standby.start()

    def told(self) -> str:
        """What the job says of its problems."""
        found = status.read_status(self.flow.pipeline, self.name)
        return " ".join(map(str, found.problems)) if found is not None else ""

    def close(self) -> None:
        """End the servers."""
        self.proxy.close()
        self.standby.stop()
        self.server.stop()


@pytest.fixture
def address(kafka: KafkaBroker, tmp_path: Path) -> Iterator[Address]:
    made = Address(kafka, tmp_path)
    yield made
    made.close()


def test_a_stream_ends_whose_address_leads_to_a_promoted_server(
    address: Address, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The session with the server of before stays open, and is alive, but applications write elsewhere."""
    look_often(monkeypatch, interval=0.5)
    flow = address.flow
    with flow.streaming() as errors:
        flow.published("UPDATE a SET n = 1")
        Flow(address.standby.dsn("d"), flow.kafka, None).execute("SELECT pg_promote()")
        address.proxy.target = address.standby.port
        until(lambda: errors, "the stream ends")
    assert isinstance(errors[0], SlotError) and "on timeline 2" in str(errors[0])


@pytest.mark.parametrize("what", ["values", "live"])
def test_rows_are_not_read_from_a_standby_that_answers_for_a_moment(address: Address, what: str) -> None:
    flow = address.flow
    with flow.streaming() as errors:
        flow.published("INSERT INTO a VALUES (2, 0, '')")
        address.proxy.target = address.standby.port
        if what == "live":
            request = flow.ask("a")
            until(lambda: "is a standby now" in flow.reported(request).what, "it waits")
            address.proxy.target = address.server.port
            until(lambda: flow.reported(request).state == "finished", "it is read")
        else:
            flow.execute("UPDATE a SET n = 1 WHERE id = 1")
            until(lambda: "is a standby now" in address.told() or errors, "it waits")
            address.proxy.target = address.server.port
            until(lambda: errors or [m for m in flow.read("a") if m.key == {"id": 1}], "it is published")
        assert not errors
    if what == "values":
        (message,) = [m for m in flow.read("a") if m.key == {"id": 1}]
        assert message.value["n"] == 1 and len(message.value["t"]) == 20000
