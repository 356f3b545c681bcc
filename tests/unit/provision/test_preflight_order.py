"""What decides whether the rest can be asked is asked with the plainest query."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import psycopg
import pytest

from airflow_bottledwater.errors import PreflightError, Refused
from airflow_bottledwater.pipeline.settings import Settings
from airflow_bottledwater.postgres import connect
from airflow_bottledwater.provision import preflight, source_checks

PIPELINE = Settings.of(postgres="host=db", kafka={"bootstrap.servers": "k"}, format="json", slot="orders")


class Session:
    """Stands for one of a server whose WAL functions need wal_level logical, as Aurora's do."""

    def __init__(self, level: str, effective: str = "") -> None:
        self.level, self.effective, self.name = level, (effective,) if effective else None, ""

    def execute(self, query: Any, parameters: Any = ()) -> Any:
        if "pg_current_wal" in str(query):
            raise psycopg.errors.ObjectNotInPrerequisiteState("wal_level must be set to 'logical'")
        if "pg_settings" in str(query):
            self.name = parameters[0]
            return self
        raise AssertionError(query)

    def fetchone(self) -> tuple[str] | None:
        return {"wal_level": (self.level,), "effective_wal_level": self.effective}[self.name]

    def close(self) -> None:
        pass


@pytest.mark.parametrize(
    ("level", "kind", "said"),
    [
        ("replica", PreflightError, "^wal_level is replica: .*RDS and Aurora: rds.logical_replication = 1"),
        # whatever else it is, it is told as the server says it
        ("logical", Refused, "wal_level must be set to 'logical'"),
    ],
)
def test_a_server_that_tells_no_place_in_its_wal_is_asked_for_its_level(
    monkeypatch: pytest.MonkeyPatch, level: str, kind: type[Exception], said: str
) -> None:
    @contextlib.contextmanager
    def session(dsn: str, what: str) -> Iterator[Session]:
        try:
            yield Session(level)
        except psycopg.Error as error:
            raise connect.outage(error, what) from error

    monkeypatch.setattr(preflight, "session", session)
    monkeypatch.setattr(preflight, "check_session", lambda _: [])
    assert bool(source_checks.check_wal_level(Session(level))) == (level != "logical")  # type: ignore[arg-type]
    with pytest.raises(kind, match=said):
        preflight.run(PIPELINE)


@pytest.mark.parametrize(("level", "sufficient"), [("minimal", False), ("replica", True), ("logical", True)])
def test_postgres_19_raises_the_level_by_itself(level: str, sufficient: bool) -> None:
    """With the first logical slot, unless the WAL has not even what a standby needs."""
    assert bool(source_checks.check_wal_level(Session(level, level))) != sufficient  # type: ignore[arg-type]
