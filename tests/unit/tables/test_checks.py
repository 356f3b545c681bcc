"""Which table a check is about, where it has looked at all of them together."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from unittest.mock import Mock

import pytest

from airflow_bottledwater.errors import CredentialsRefused, Refused
from airflow_bottledwater.kafka.registry import Registry
from airflow_bottledwater.model.relation import SourceTable
from airflow_bottledwater.model.slot import Cluster
from airflow_bottledwater.pipeline.settings import Settings
from airflow_bottledwater.provision.findings import Findings
from airflow_bottledwater.state.pinned import PinnedTable
from airflow_bottledwater.state.pipeline_state import PipelineState
from airflow_bottledwater.state.records import table_key
from airflow_bottledwater.tables import checks
from airflow_bottledwater.tables.checks import _blame, refused
from airflow_bottledwater.tables.plan import Do, Step
from tests.support import wire as w

TIMESTAMP, TIMESTAMPTZ = 1114, 1184
CLUSTER = Cluster("7", 1, "d", 160000)
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


def test_the_publications_and_the_owners_of_topics_are_read_once_for_all_tables(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """They have thousands of tables, and thousands are read again when a publication was made anew."""
    asked = list[object]()

    def check_tables(_: object, __: object, found: Findings) -> list[str]:
        found.tables = [each for each in by_oid.values() if each.oid in found.adding and each.name != "gone"]
        return ["SELECT on t7 is not granted. Run: GRANT it;"] if 7 in found.adding else []

    def check_publications(_: object, __: object, ___: object, there: object) -> list[str]:
        assert there == ["both"]
        return []

    def shared(_: object, __: object, topics: Sequence[str]) -> dict[str, str]:
        asked.append(len(topics))
        return {"t5": "other pipelines", "t6": "other pipelines"}

    by_oid = {oid: SourceTable(oid, "public", f"t{oid}", "d", ("id",), ()) for oid in range(1, 101)}
    by_oid[8] = replace(by_oid[8], name="gone")
    pipeline = Settings.of(postgres="host=db", format="json", slot="s")
    known = PipelineState()
    known.apply({table_key(oid): PinnedTable(each, f"t{oid}", "id", 1, 0, 0, 7) for oid, each in by_oid.items()})
    monkeypatch.setattr(checks.publication, "existing", lambda _, name: asked.append(name) or ["both"])
    monkeypatch.setattr(checks, "check_tables", check_tables)
    monkeypatch.setattr(checks, "check_publications", check_publications)
    monkeypatch.setattr(checks, "shared", shared)
    monkeypatch.setattr(checks.kafka_checks, "check_topics", lambda *_: [])
    monkeypatch.setattr(checks.Topics, "describe", lambda _, names: {each: Mock(partitions=1) for each in names})
    monkeypatch.setattr(checks.Topics, "filled", lambda _, topics: {*topics} - {"t6"})
    steps = [Step(oid, each.qualified, f"t{oid}", "lacks changes", Do.READ) for oid, each in by_oid.items()]
    found = checks.unfit(Mock(), pipeline, CLUSTER, known, steps, by_oid)
    assert {oid: each.why for oid, each in found.items()} == {
        5: "cannot be followed: topic 't5' has to be swept, and is shared with other pipelines",
        7: "cannot be followed: SELECT on t7 is not granted",
        8: "cannot be followed: it was dropped",
    }
    assert found[7].remedy == "Run: GRANT it;" and asked == ["s", 98]
    # nothing is asked about what needs no check
    assert checks.unfit(Mock(), pipeline, CLUSTER, known, [replace(steps[0], do=Do.STOP)], by_oid) == {}
    assert asked == ["s", 98]


@pytest.mark.parametrize(
    ("table", "allowed", "said"),
    [
        (SourceTable(1, "public", "t", "d", ("id",), ()), False, ""),
        (
            SourceTable(1, "public", "t", "d", (), (), key_problem="it has no primary key"),
            False,
            "no primary key. Give",
        ),
        (SourceTable(1, "public", "t", "d", (), ()), True, ""),
        (SourceTable(1, "public", "t", "d", (), (), partitioned=True), True, "partitioned, and without a key"),
        (SourceTable(1, "public", "t", "d", (), (), outbox=True), True, "is an outbox"),
    ],
)
def test_what_cannot_be_taken_in_beside_a_stream(
    monkeypatch: pytest.MonkeyPatch, table: SourceTable, allowed: bool, said: str
) -> None:
    monkeypatch.setattr(checks.new_rows, "too_large", lambda *_: False)
    pipeline = Settings.of(postgres="host=db", format="json", allow_unkeyed=allowed)
    why = checks._not_now(Mock(), pipeline, PipelineState(), table)
    assert said in why and bool(said) == bool(why)
