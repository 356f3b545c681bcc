"""Which table a check is about, where it has looked at all of them together."""

from __future__ import annotations

import pytest

from airflow_bottledwater.errors import CredentialsRefused, Refused
from airflow_bottledwater.kafka.registry import Registry
from airflow_bottledwater.model.relation import SourceTable
from airflow_bottledwater.pipeline.settings import Settings
from airflow_bottledwater.state.pinned import PinnedTable
from airflow_bottledwater.state.pipeline_state import PipelineState
from airflow_bottledwater.state.records import table_key
from airflow_bottledwater.tables import checks
from airflow_bottledwater.tables.checks import _blame, refused
from tests.support import wire as w

TIMESTAMP, TIMESTAMPTZ = 1114, 1184
TABLES = {name: SourceTable(number, "public", name, "d", ("id",), ()) for number, name in enumerate("abcdefgh")}


def test_only_what_is_unfit_is_blamed() -> None:
    asked = []

    def check(by_topic: dict[str, SourceTable]) -> list[str]:
        asked.append(len(by_topic))
        if "g" in by_topic:
            raise Refused("no rights on g")
        return [f"{name} is unfit" for name in by_topic if name in "bc"]

    assert _blame(check, TABLES) == {"b": ["b is unfit"], "c": ["c is unfit"], "g": ["no rights on g"]}
    assert asked[0] == len(TABLES)
    assert _blame(lambda _: [], TABLES) == {} == _blame(check, {})


def test_no_table_is_blamed_for_a_password() -> None:
    def check(_: dict[str, SourceTable]) -> list[str]:
        raise CredentialsRefused("The schema registry denies access.")

    with pytest.raises(CredentialsRefused):
        _blame(check, TABLES)
    with pytest.raises(CredentialsRefused):
        refused(CredentialsRefused("PostgreSQL refuses the connection."))


def said(monkeypatch: pytest.MonkeyPatch, topic: str, type_oid: int, oid: int = 1) -> list[str]:
    """What is said of a table whose topic is to be one in which a table of before, with oid 1, has a timestamp."""
    pipeline = Settings.of(postgres="host=db", format="avro", temporal="plain", registry={"url": "http://registry"})
    before, now = (
        w.table(("id", w.plain(kind).with_temporal("plain")), key=["id"], oid=number)
        for kind, number in ((TIMESTAMP, 1), (type_oid, oid))
    )
    known = PipelineState()
    known.apply({table_key(1): PinnedTable(before, "t", "topic-id", 1, 7, 8, 3)})
    monkeypatch.setattr(Registry, "_level", lambda *_: "BACKWARD")
    monkeypatch.setattr(Registry, "refused", lambda *_: [])
    return checks._registry(pipeline, known)({topic: now})


def test_a_table_that_gets_another_key_is_compared_with_what_was_published(monkeypatch: pytest.MonkeyPatch) -> None:
    (told,) = said(monkeypatch, "t", TIMESTAMPTZ)
    assert "readers would read id" in told
    # another topic has none of its rows
    assert said(monkeypatch, "t", TIMESTAMP) == said(monkeypatch, "other", TIMESTAMPTZ) == []


def test_a_table_that_takes_a_topic_is_compared_with_what_it_has(monkeypatch: pytest.MonkeyPatch) -> None:
    """It was dropped and made again, say: the topic keeps the rows of the one before."""
    (told,) = said(monkeypatch, "t", TIMESTAMPTZ, oid=2)
    assert "readers would read id" in told
    assert said(monkeypatch, "t", TIMESTAMP, oid=2) == said(monkeypatch, "other", TIMESTAMPTZ, oid=2) == []
