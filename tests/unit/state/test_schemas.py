"""Which schema ids of a pipeline the registry is asked for."""

from __future__ import annotations

import contextlib
import threading
from dataclasses import replace
from types import SimpleNamespace
from typing import Any, cast

import pytest

from airflow_bottledwater.backoff import stoppable
from airflow_bottledwater.errors import CredentialsRefused, Outage, SchemaRefused, SchemasLost, StopRequested
from airflow_bottledwater.kafka.registry import Registry
from airflow_bottledwater.model.relation import Column, ColumnType, SourceTable
from airflow_bottledwater.model.version import Version
from airflow_bottledwater.pipeline.settings import Settings
from airflow_bottledwater.state import schemas
from airflow_bottledwater.state.pinned import PinnedTable
from airflow_bottledwater.state.pipeline_state import PipelineState
from airflow_bottledwater.state.records import LaterSchema, table_key
from airflow_bottledwater.state.schemas import Settled, check_published, later_schema, pinned_schemas, settle
from tests.support import wire as w
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


def two_tables(oldest_xid: int = 3) -> dict[int, PinnedTable]:
    """Two tables with the same schemas, as they are recorded."""
    tables = [SourceTable(oid, "public", f"t{oid}", "d", ("id",), (Column("id", INT),)) for oid in (1, 2)]
    return {each.oid: PinnedTable(each, each.name, "id", 1, 7, 8, oldest_xid) for each in tables}


def schemas_of(*tables: PinnedTable) -> frozenset[schemas.PinnedSchema]:
    pipeline = Settings.of(postgres="host=db", format="avro", registry={"url": "http://registry"})
    return frozenset(pinned_schemas(pipeline, tables))


def watched(monkeypatch: pytest.MonkeyPatch, left: Settled | None = None, versions: tuple[int, ...] = ()) -> str:
    """What a watch of two tables finds: the registry knows the ids 7 and 8 and the first one's subjects.

    :param versions: those that it has of subjects that its list does not name.
    """
    pipeline = Settings.of(postgres="host=db", format="avro", registry={"url": "http://registry"})
    known = two_tables()
    texts = {each.number: each.schema for each in pinned_schemas(pipeline, [known[1]])}
    monkeypatch.setattr(schemas, "_AGAIN", (0.0, 0.0))
    monkeypatch.setattr(schemas, "_PAUSE", 0.0)
    monkeypatch.setattr(schemas.meaning, "OF", {"AVRO": SimpleNamespace(same=lambda one, other: bool(one))})
    monkeypatch.setattr(Registry, "schema", lambda _, number: texts.get(number))
    monkeypatch.setattr(Registry, "subjects", lambda _: {"t1-key", "t1-value"})
    monkeypatch.setattr(Registry, "versions", lambda *_: list(versions))
    state, told = cast("Any", SimpleNamespace(tables=known, later={})), threading.Event()
    problems = cast("Any", SimpleNamespace(tell=lambda *_: told.set()))
    with contextlib.closing(schemas.SchemaWatch(pipeline, state, problems, left or Settled())) as watch:
        assert told.wait(20)
        try:
            watch.check(state)
        except SchemasLost as error:
            return str(error)
    return ""


def test_a_running_stream_notices_a_subject_that_was_deleted(monkeypatch: pytest.MonkeyPatch) -> None:
    assert "These subjects were deleted from the registry: t2-key, t2-value" in watched(monkeypatch)
    # the registry does not tell its user of it, and has it
    assert not watched(monkeypatch, versions=(1,))
    # it stays so: the stream does not begin anew for it again and again
    assert not watched(monkeypatch, Settled(deleted=schemas_of(two_tables()[2])))


def test_an_id_that_another_table_had_is_watched(monkeypatch: pytest.MonkeyPatch) -> None:
    """A registry that was emptied begins to count again."""
    before = schemas.PinnedSchema(9, "dropped-value", "{}", 8, of_key=False, oldest_xid=3)
    left = Settled(frozenset({before}), schemas_of(two_tables()[2]))
    assert not watched(monkeypatch, left)
    monkeypatch.setattr(schemas, "lost", lambda _, wanted, pause: [each for each in wanted if each.number == 8])
    assert "8 (t1-value)" in watched(monkeypatch, left)


def test_a_table_that_is_recorded_anew_is_watched_although_its_ids_are_those_of_before(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A registry that was emptied gives a table whose new keys are accepted the same ids for the same schemas."""
    now, before = (schemas_of(*two_tables(oldest_xid).values()) for oldest_xid in (3, 2))
    assert "t2-key, t2-value" in watched(monkeypatch, Settled(deleted=before))
    assert not watched(monkeypatch, Settled(deleted=now))
    monkeypatch.setattr(schemas, "lost", lambda _, wanted, pause: wanted)
    assert "7 (t1-key), 8 (t1-value)" in watched(monkeypatch, Settled(lost=before))


@pytest.mark.parametrize("takes", [True, False])
def test_a_subject_that_was_deleted_is_registered_again_if_the_registry_takes_it(
    monkeypatch: pytest.MonkeyPatch, takes: bool
) -> None:
    pipeline = Settings.of(postgres="host=db", format="avro", registry={"url": "http://registry"})
    tables = [SourceTable(oid, "public", f"t{oid}", "d", ("id",), (Column("id", INT),)) for oid in (1, 2)]
    state, again = PipelineState(), list[str]()
    pinned = [PinnedTable(each, each.name, "topic-id", 1, 10 * each.oid, 10 * each.oid + 1, 3) for each in tables]
    state.apply({table_key(each.table.oid): each for each in pinned})
    texts = {each.number: each.schema for each in pinned_schemas(pipeline, pinned)}

    def register(_: object, subject: str, schema: str) -> int:
        again.append(subject)
        if not takes:
            raise Outage("The registry takes no schemas now.")
        return 8

    monkeypatch.setattr(Registry, "schema", lambda _, number: texts[number])
    monkeypatch.setattr(Registry, "subjects", lambda _: {"t1-key"})
    monkeypatch.setattr(Registry, "register", register)
    # the other table was dropped
    monkeypatch.setattr(schemas.catalog, "load", lambda *_: tables[:1])
    claim = cast("Any", SimpleNamespace(state=state, write=lambda _: None))
    found = settle(pipeline, cast("Any", None), claim)
    assert again == ["t1-value"] and not found.lost
    assert {each.subject for each in found.deleted} == {"t2-key", "t2-value"} | (set() if takes else {"t1-value"})


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


# ---------------------------------------------------------------------- what the rows that were published mean
DATE, TIME, TIMESTAMP, TIMESTAMPTZ = 1082, 1083, 1114, 1184
INSIDE = {
    "itself": lambda kind: kind,
    "domain": lambda kind: replace(kind, oid=70000),
    "array": w.array,
    "composite": w.composite,
    "range": w.interval_of,
    "composite in array": lambda kind: w.array(w.composite(w.array(kind))),
}


def versions(*tables: SourceTable, number: int = 8) -> list[Version]:
    """The relation versions of the rows in a topic, each with the next schema id."""
    return [Version(table, "t", 7, number + i) for i, table in enumerate(tables)]


def refused(table: SourceTable, known: list[Version], level: str = "BACKWARD", **settings: Any) -> str:
    """Why a table is refused beside the rows that were published; empty if it is not."""
    pipeline = Settings.of(
        postgres="host=db", registry={"url": "http://registry"}, **{"format": "avro", "temporal": "plain"} | settings
    )
    registry = Registry.of(pipeline)
    assert registry is not None
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Registry, "_level", lambda *_: level)
        try:
            check_published(registry, pipeline, "t", table, known)
        except SchemaRefused as error:
            return str(error)
    return ""


def of(kind: ColumnType, form: str = "plain", *more: tuple[str, ColumnType]) -> SourceTable:
    return w.table(("id", w.plain(w.INT4)), ("v", kind.with_temporal(form)), *more, key=["id"])


@pytest.mark.parametrize("inside", INSIDE)
@pytest.mark.parametrize(
    ("before", "now"),
    [
        (DATE, TIMESTAMP),
        (DATE, w.INT4),
        (w.INT4, DATE),
        (TIME, TIMESTAMP),
        (TIMESTAMP, w.INT8),
        (w.INT8, TIMESTAMPTZ),
        (TIMESTAMP, TIMESTAMPTZ),
        (TIMESTAMPTZ, TIMESTAMP),
    ],
)
def test_a_number_that_was_of_another_unit_is_refused_although_its_schema_is_the_same(
    inside: str, before: int, now: int
) -> None:
    one, other = (of(INSIDE[inside](w.plain(oid))) for oid in (before, now))
    assert "between it and records with schema id 8, readers would read v" in refused(other, versions(one))
    assert not refused(one, versions(one)) and not refused(other, versions(one), "NONE")
    commented = replace(one, columns=tuple(replace(column, comment="x") for column in one.columns))
    assert not refused(commented, versions(one, other))
    # a later change has nothing to do with what was accepted then
    later = of(INSIDE[inside](w.plain(now)), "plain", ("x", w.plain(w.TEXT)))
    for known in (
        versions(one, other),
        [*versions(one), *versions(other)],
        [*versions(other, number=9), *versions(one)],
    ):
        assert not refused(later, known) and not refused(other, known) and not refused(one, known)


def test_a_table_that_becomes_an_outbox_is_not_compared_with_its_rows() -> None:
    """Its records have no schema. That a table becomes one is refused elsewhere."""
    table = of(w.plain(TIMESTAMP))
    assert not refused(replace(of(w.plain(TIMESTAMPTZ)), outbox=True), versions(table))


def test_a_form_that_the_settings_choose_is_no_other_unit() -> None:
    kind = w.plain(TIMESTAMP)
    assert not refused(of(kind, "logical"), versions(of(kind))) and not refused(of(kind), versions(of(kind, "logical")))
    hashed = replace(w.plain(TIMESTAMPTZ), form="hash")
    assert not refused(of(hashed, "plain"), versions(of(kind, "text")))


@pytest.mark.parametrize(
    ("format", "before", "now"),
    [
        ("avro", w.plain(w.NUMERIC, (10 << 16) + 2 + 4), w.plain(w.NUMERIC, (12 << 16) + 4 + 4)),
        ("protobuf", w.plain(w.INT4), w.plain(w.TEXT)),
        ("json-schema", w.plain(17), w.plain(w.TEXT)),
    ],
)
def test_the_state_knows_what_was_published_where_the_registry_has_forgotten_it(
    monkeypatch: pytest.MonkeyPatch, format: str, before: ColumnType, now: ColumnType
) -> None:
    pipeline = Settings.of(postgres="host=db", format=format, registry={"url": "http://registry"})
    registered = list[str]()
    monkeypatch.setattr(Registry, "_level", lambda *_: "BACKWARD")
    monkeypatch.setattr(Registry, "register", lambda _, subject, schema: registered.append(subject) or 9)
    with pytest.raises(SchemaRefused, match="between it and records with schema id 8, readers would read v"):
        schemas.register_value(pipeline, "t", of(now), versions(of(before)))
    assert not registered
    assert schemas.register_value(pipeline, "t", of(before, "", ("x", now)), versions(of(before))) == 9


def test_the_record_of_a_schema_has_all_columns_that_rows_with_its_id_have() -> None:
    """With them it is registered again if the registry loses it."""
    pipeline = Settings.of(postgres="host=db", format="protobuf", registry={"url": "http://registry"})

    def table(*names: str) -> SourceTable:
        return w.table(*((name, w.plain(w.INT4)) for name in ("id", *names)), key=["id"])

    def names(known: list[Version], *now: str) -> list[str] | None:
        record = later_schema(pipeline, Version(table(*now), "t", 7, 9), known)
        assert record is None or (record.number, record.table.key) == (9, ("id",))
        return record and [column.name for column in record.table.columns]

    (known,) = versions(table("a", "b"), number=8)
    assert names([known], "a", "c") == ["id", "a", "c"]
    recorded = replace(known, table=table("a", "c"), value_schema=9)
    assert names([known, recorded], "c") is None and names([known, recorded], "c", "a") is None
    # a dropped column that has come back
    assert names([known, recorded], "b", "c") == ["id", "b", "c", "a"]
    # of a schema that was recorded with the table itself
    assert names([replace(known, value_schema=9)], "a") is None
    pinned = PinnedTable(table("a"), "t", "topic-id", 1, 7, 9, 3)
    found = pinned_schemas(pipeline, [pinned], {1: {9: table("b", "a")}})
    assert [(each.number, each.of_key) for each in found] == [(7, True), (9, False)] and " b = " in found[1].schema


def test_another_unit_that_a_person_has_accepted_is_recorded_under_the_id_that_it_shares() -> None:
    pipeline = Settings.of(postgres="host=db", format="avro", temporal="plain", registry={"url": "http://registry"})
    local, moment = (Version(of(w.plain(oid)), "t", 7, 8) for oid in (TIMESTAMP, TIMESTAMPTZ))
    assert later_schema(pipeline, moment, [local]) == LaterSchema(moment.table, 8)
    assert later_schema(pipeline, local, [local, moment]) is None
