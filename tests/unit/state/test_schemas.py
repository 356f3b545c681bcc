"""Which schema ids of a pipeline the registry is asked for."""

from __future__ import annotations

import contextlib
import threading
from types import SimpleNamespace
from typing import Any, cast

import pytest

from airflow_bottledwater.backoff import stoppable
from airflow_bottledwater.errors import CredentialsRefused, Outage, SchemasLost, StopRequested
from airflow_bottledwater.kafka.registry import Registry
from airflow_bottledwater.model.relation import Column, ColumnType, SourceTable
from airflow_bottledwater.pipeline.settings import Settings
from airflow_bottledwater.state import schemas
from airflow_bottledwater.state.pinned import PinnedTable
from airflow_bottledwater.state.pipeline_state import PipelineState
from airflow_bottledwater.state.records import table_key
from airflow_bottledwater.state.schemas import Settled, pinned_schemas, settle
from tests.support.waiting import until

INT = ColumnType(23, -1, 23, -1, "b", "integer")


@pytest.mark.parametrize(
    ("format", "key", "found"),
    [("json", ("id",), []), ("avro", ("id",), [7, 8]), ("avro", (), [8])],
)
def test_a_format_without_registry_has_no_schema_ids_and_a_table_without_key_one(
    format: str, key: tuple[str, ...], found: list[int]
) -> None:
    pipeline = Settings.of(postgres="host=db", format=format, registry={"url": "http://registry"})
    pinned = PinnedTable(SourceTable(1, "public", "t", "d", key, (Column("id", INT),)), "t", "topic-id", 1, 7, 8, 3)
    assert [each.number for each in pinned_schemas(pipeline, [pinned])] == found


@pytest.mark.parametrize("truthful", [True, False])
@pytest.mark.parametrize("number", [8, 9])
def test_a_schema_that_was_registered_again_has_to_be_there_by_its_id(
    monkeypatch: pytest.MonkeyPatch, truthful: bool, number: int
) -> None:
    """A registry that only says so would let the stream begin anew for ever."""
    pipeline = Settings.of(postgres="host=db", format="avro", registry={"url": "http://registry"})
    table = SourceTable(1, "public", "t", "d", ("id",), (Column("id", INT),))
    pinned, again = PinnedTable(table, "t", "topic-id", 1, 7, 8, 3), list[str]()
    (_, key), (subject, value) = [(each.subject, each.schema) for each in pinned_schemas(pipeline, [pinned])]

    def by_id(_: object, asked: int) -> str | None:
        return {7: key, **({number: value} if again and truthful else {})}.get(asked)

    def register(_: object, name: str, *schema: object) -> int:
        again.append(name)
        return number

    monkeypatch.setattr(schemas, "_AGAIN", (0.0,))
    monkeypatch.setattr(Registry, "schema", by_id)
    monkeypatch.setattr(Registry, "subjects", lambda _: {"t-key", "t-value"})
    monkeypatch.setattr(Registry, "restore", register)
    monkeypatch.setattr(Registry, "register", register)
    monkeypatch.setattr(schemas.catalog, "load", lambda *_: [table])
    written = dict[str, Any]()
    state = PipelineState()
    state.apply({table_key(1): pinned})
    claim = cast("Any", SimpleNamespace(state=state, write=written.update))
    if truthful:
        assert settle(pipeline, cast("Any", None), claim) == Settled()
        assert bool(written) == (number != 8)
    else:
        with pytest.raises(Outage, match=rf"{subject}.*id {number}.*several by turns"):
            settle(pipeline, cast("Any", None), claim)
        assert not written


def test_what_a_follower_of_the_registry_gets_to_know_a_moment_later_is_not_lost(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    pipeline = Settings.of(postgres="host=db", format="avro", registry={"url": "http://registry"})
    pinned = PinnedTable(SourceTable(1, "public", "t", "d", ("id",), (Column("id", INT),)), "t", "topic-id", 1, 7, 8, 3)
    wanted = pinned_schemas(pipeline, [pinned])
    known, asked = {each.number: each.schema for each in wanted}, list[int]()

    def by_id(_: object, number: int) -> str | None:
        asked.append(number)
        return known[number] if asked.count(8) > 2 or number == 7 else None

    monkeypatch.setattr(schemas, "_AGAIN", (0.0, 0.0, 0.0))
    monkeypatch.setattr(Registry, "schema", by_id)
    assert schemas.lost(Registry(pipeline.registry), wanted) == []
    assert (asked.count(7), asked.count(8)) == (1, 3)


def test_a_job_that_is_asked_to_stop_while_it_asks_the_registry_does_not_go_on(monkeypatch: pytest.MonkeyPatch) -> None:
    pipeline = Settings.of(postgres="host=db", format="avro", registry={"url": "http://registry"})
    pinned = PinnedTable(SourceTable(1, "public", "t", "d", ("id",), (Column("id", INT),)), "t", "topic-id", 1, 7, 8, 3)
    claim = cast("Any", SimpleNamespace(state=SimpleNamespace(tables={1: pinned}, later={}, accepted=set())))
    stopped = threading.Event()
    monkeypatch.setattr(Registry, "schema", lambda *_: stopped.set())
    with stoppable(stopped):
        for asks in (lambda: settle(pipeline, cast("Any", None), claim), lambda: schemas.wait_for(pipeline, pinned)):
            stopped.clear()
            with pytest.raises(StopRequested):
                asks()


def test_a_running_stream_notices_a_registry_that_was_emptied_before_it_has_asked_for_all_schemas(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    pipeline = Settings.of(postgres="host=db", format="avro", registry={"url": "http://registry"})
    tables = [SourceTable(oid, "public", f"t{oid}", "d", ("id",), (Column("id", INT),)) for oid in range(1, 201)]
    known = {each.oid: PinnedTable(each, each.name, "id", 1, 7, 2 * each.oid, 3) for each in tables}
    state, asked, told = SimpleNamespace(tables=known, later={}), list[int](), threading.Event()
    monkeypatch.setattr(schemas, "_AGAIN", (0.0, 0.0))
    monkeypatch.setattr(schemas, "_PAUSE", 0.0)
    monkeypatch.setattr(Registry, "schema", lambda _, number: asked.append(number))
    problems = cast("Any", SimpleNamespace(tell=lambda *_: told.set()))
    watch = schemas.SchemaWatch(pipeline, cast("Any", state), problems)
    assert told.wait(20)
    watch.close()
    with pytest.raises(SchemasLost):
        watch.check(cast("Any", state))
    assert len(asked) < len(known)


def test_a_password_of_the_registry_that_is_refused_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object) -> None:
        raise CredentialsRefused("The schema registry denies access.", "Check user and password.")

    pipeline = Settings.of(postgres="host=db", format="avro", registry={"url": "http://registry"})
    pinned = PinnedTable(SourceTable(1, "public", "t", "d", ("id",), (Column("id", INT),)), "t", "topic-id", 1, 7, 8, 3)
    state, told = cast("Any", SimpleNamespace(tables={1: pinned}, later={})), list[Any]()
    monkeypatch.setattr(Registry, "schema", refuse)
    problems = cast("Any", SimpleNamespace(tell=lambda _, found: told.extend(found)))
    watch = schemas.SchemaWatch(pipeline, state, problems, interval=0.05)
    with contextlib.closing(watch):
        until(lambda: told, "it is told")
        watch.check(state)
        assert told[0].remedy.startswith("Check user and password. If the credentials were changed")
