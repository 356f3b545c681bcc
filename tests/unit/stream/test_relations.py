"""What the stream makes of a Relation message."""

from __future__ import annotations

import math
import time
from collections.abc import Iterable
from dataclasses import replace
from typing import Any
from unittest.mock import Mock

import psycopg
import pytest

from airflow_bottledwater.encoding.mapping import TableMapping
from airflow_bottledwater.errors import Outage, Refused
from airflow_bottledwater.model.relation import Column, SourceTable
from airflow_bottledwater.model.version import Version
from airflow_bottledwater.pipeline.settings import Settings
from airflow_bottledwater.postgres import pgoutput
from airflow_bottledwater.state.pinned import PinnedTable
from airflow_bottledwater.state.pipeline_state import PipelineState
from airflow_bottledwater.state.records import LaterSchema, schema_key
from airflow_bottledwater.stream import relations
from airflow_bottledwater.stream.relations import Resolver
from tests.support import wire as w

TABLE = replace(w.table(("id", w.plain(w.TEXT)), ("a", w.plain(w.TEXT)), key=["id"], oid=7), sent=((1, "id"), (2, "a")))


def resolver(
    monkeypatch: pytest.MonkeyPatch, today: SourceTable = TABLE, by_name: dict[str, Any] | None = None, **options: Any
) -> Resolver:
    """One whose catalog has a table as it is today.

    :param by_name: the options by the tables' names; ``options`` are those of its recorded name.
    """
    by_name = by_name or {TABLE.qualified: options}
    pipeline = Settings.of(postgres="dbname=none", format="json", table_options=by_name)
    left_out = TableMapping.of(pipeline).left_out(today.schema, today.name, [name for _, name in today.sent])
    monkeypatch.setattr(Resolver, "_known_since", lambda self, oid, since: today.without(left_out))
    return Resolver(pipeline, {7: PinnedTable(TABLE, "t", "id", 1, 0, 0, 700)})


def message(*columns: str) -> pgoutput.RelationMessage:
    found = tuple(pgoutput.RelationColumn(name == "id", name, w.TEXT, -1) for name in columns)
    return pgoutput.RelationMessage(7, TABLE.schema, TABLE.name, "d", found)


def test_a_filter_that_is_new_is_known_of_a_table_that_has_not_changed(monkeypatch: pytest.MonkeyPatch) -> None:
    """An insert may then be an update that has brought a row into the filter, without its large values."""
    assert resolver(monkeypatch)(message("id", "a"), None) == Version(TABLE, "t")
    found = resolver(monkeypatch, where="a <> ''")(message("id", "a"), None)
    assert found is not None and found.table.filtered


def named(*columns: str) -> SourceTable:
    """The table, with other columns of these names."""
    made = w.table(*((name, w.plain(w.TEXT)) for name in columns), key=[columns[0]], oid=7)
    return replace(made, sent=tuple(enumerate(columns, start=1)))


@pytest.mark.parametrize(
    ("options", "columns"),
    [
        ({"exclude": ["a"]}, ("id", "b")),
        ({"mask": {"a": "null"}}, ("id", "b")),
        ({"mask": {"id": "hash"}}, ("key", "a")),
        ({"exclude": ["a"], "mask": {"b": "first:1"}}, ("id", "c")),
    ],
)
def test_a_column_is_hidden_by_the_name_that_it_had(
    monkeypatch: pytest.MonkeyPatch, options: dict[str, Any], columns: tuple[str, ...]
) -> None:
    with pytest.raises(Refused, match=r"was '\w+', of which table_options hide more"):
        resolver(monkeypatch, named(*columns), **options)(message(*columns), None)
    # also if the catalog has other columns by now
    with pytest.raises(Refused, match="table_options hide more"):
        resolver(monkeypatch, named("x", "y", "z"), **options)(message(*columns), None)


def test_a_change_of_before_is_hidden_by_the_names_of_today(monkeypatch: pytest.MonkeyPatch) -> None:
    """The options may have been given to the new name only, and the stream be behind."""
    with pytest.raises(Refused, match="its column 'a', had another name than today"):
        resolver(monkeypatch, named("id", "b"), exclude=["b"])(message("id", "a"), None)
    renamed = replace(named("id", "a"), name="renamed")
    assert resolver(monkeypatch, renamed)(message("id", "a"), None) is not None
    hidden = {TABLE.qualified: {}, renamed.qualified: {"exclude": ["a"]}}
    with pytest.raises(Refused, match="another name than today"):
        resolver(monkeypatch, renamed, by_name=hidden)(message("id", "a"), None)


@pytest.mark.parametrize(
    ("options", "today"),
    [
        ({"exclude": ["a*"]}, named("id", "a2")),
        ({"mask": {"a*": "null"}}, named("id", "a2")),
        ({"exclude": ["x"]}, named("id", "a2")),
        # it is another column
        ({"exclude": ["a"]}, replace(named("id", "a2"), sent=((1, "id"), (3, "a2")))),
    ],
)
def test_a_column_with_another_name_that_is_hidden_all_the_same_goes_on(
    monkeypatch: pytest.MonkeyPatch, options: dict[str, Any], today: SourceTable
) -> None:
    assert resolver(monkeypatch, today, **options)(message("id", "a2"), None) is not None


def test_columns_that_come_and_go_are_no_names_of_others(monkeypatch: pytest.MonkeyPatch) -> None:
    """The stream is behind: its message has neither the columns that are recorded nor those of today."""
    today = replace(named("id", "late", "new"), sent=((1, "id"), (3, "late"), (4, "new")))
    made = resolver(monkeypatch, today, exclude=["late"])
    monkeypatch.setattr(made, "_as_read", lambda *_: replace(TABLE, oid=7))
    found = made(message("id", "a", "late"), None)
    assert found is not None and [column.name for column in found.table.columns] == ["id", "a"]


@pytest.mark.parametrize("first", [True, False], ids=["the first message", "a later one"])
@pytest.mark.parametrize("change", [{"schema": "sales"}, {"name": "b"}, {"identity": "f"}, {"identity": "n"}], ids=str)
def test_whatever_a_message_says_of_its_table_holds_for_the_changes_behind_it(
    monkeypatch: pytest.MonkeyPatch, change: dict[str, Any], *, first: bool
) -> None:
    """Records tell the table's name and schema, options are found by them, and the replica identity decides whether a
    table without a key has updates. The schemas stay, which are those of the columns."""
    before = replace(TABLE, key=())
    made = resolver(monkeypatch, before)
    pinned = PinnedTable(before, "t", "id", 1, 3, 5, 700)
    made._pinned[7] = pinned
    monkeypatch.setattr(made, "_as_read", lambda *_: before)
    monkeypatch.setattr(made, "_table", lambda message, pinned, known: made._made(message, pinned, before.columns))
    sent = replace(message("id", "a"), columns=tuple(replace(c, key=False) for c in message("id", "a").columns))
    current = None if first else pinned.version
    assert made(sent, current) == pinned.version
    found = made(replace(sent, **change), current)
    assert found == replace(pinned.version, table=replace(before, **change))
    # and if it is told again, it is the same object
    assert made(replace(sent, **change), found) is found


@pytest.mark.parametrize(
    ("root", "part", "told"),
    [
        ({"identity": "f"}, {}, True),
        ({}, {"identity": "f"}, True),
        ({}, {}, False),
    ],
)
def test_a_partition_with_another_replica_identity_than_its_table_is_told(
    monkeypatch: pytest.MonkeyPatch, root: dict[str, Any], part: dict[str, Any], *, told: bool
) -> None:
    made, found = resolver(monkeypatch), []
    made._mismatch = lambda oid, why: found.append(oid)
    made._pinned[7] = PinnedTable(replace(TABLE, partitioned=True), "t", "id", 1, 0, 0, 700)
    both = replace(message("id", "a"), **root), replace(message("id", "a"), oid=8, name="part", **part)
    made.check_partition(*both)
    assert found == ([7] if told else [])
    # one that is not partitioned has no partitions
    made._pinned[7] = PinnedTable(TABLE, "t", "id", 1, 0, 0, 700)
    made.check_partition(*both)
    assert found == ([7] if told else [])


def test_the_settings_are_read_once_for_all_tables_that_they_do_not_name(monkeypatch: pytest.MonkeyPatch) -> None:
    """A publication of all tables sends changes of thousands."""
    readings = []

    def resolve(*_: object, **__: object) -> list[int]:
        readings.append(1)
        return [1, 3] if len(readings) == 1 else [1, 3, 4]

    monkeypatch.setattr(relations, "connect", lambda *_, **__: Mock())
    monkeypatch.setattr(relations.catalog, "resolve", resolve)
    made = Resolver(Settings.of(postgres="dbname=none", format="json", tables="wanted,new*"), {})

    def covers(oid: int, name: str) -> bool:
        return made._covers(pgoutput.RelationMessage(oid, "public", name, "d", ()))

    assert [covers(10 + i, f"foreign{i}") for i in range(100)] == [False] * 100
    assert covers(3, "a_partition_of_wanted") and covers(1, "wanted") and len(readings) == 1
    # it was made since they were read
    assert covers(4, "new1") and len(readings) == 2


def test_a_name_that_is_not_recorded_is_no_reason_of_what_is_refused_later(monkeypatch: pytest.MonkeyPatch) -> None:
    made = resolver(monkeypatch, exclude=["secret"])
    monkeypatch.setattr(made, "_loaded", lambda _oids: {})
    monkeypatch.setattr(made, "_table", lambda message, pinned, _known: made._made(message, pinned, TABLE.columns))
    current = made(message("id", "a", "secret"), None)
    with pytest.raises(Refused, match="was 'secret'"):
        made(message("id", "a", "shown"), current)
    assert made.unrecorded == {7}
    with pytest.raises(Refused, match="key"):
        made(replace(message("id", "a"), columns=message("a", "id").columns[:1]), current)
    assert not made.unrecorded


def test_the_names_of_a_message_that_anybody_can_write_are_not_remembered(monkeypatch: pytest.MonkeyPatch) -> None:
    made = resolver(monkeypatch, exclude=["secret"])
    monkeypatch.setattr(made, "_loaded", lambda _oids: {})
    monkeypatch.setattr(made, "_table", lambda message, pinned, _known: made._made(message, pinned, TABLE.columns))
    monkeypatch.setattr(relations, "_between", lambda *_: True)
    current = made(message("id", "a"), None)
    made.of_statement(message("id", "a", "secret"), current)
    assert made(message("id", "a", "shown"), current) is not None
    made(message("id", "a", "secret"), current)
    with pytest.raises(Refused, match="was 'secret'"):
        made.of_statement(message("id", "a", "shown"), current)
    assert not made.unrecorded


def test_a_changed_table_is_compared_with_what_is_published_by_now(monkeypatch: pytest.MonkeyPatch) -> None:
    """A live snapshot may have published rows with another definition since the stream began."""
    pipeline = Settings.of(postgres="dbname=none", format="avro", registry={"url": "http://registry"})
    state, compared = PipelineState(), list[list[str]]()

    def register(_: object, topic: str, table: SourceTable, known: list[Version]) -> int:
        compared.append([each.table.columns[-1].name for each in known])
        return 9

    monkeypatch.setattr(relations, "lost", lambda *_: [])
    monkeypatch.setattr(relations, "register_value", register)
    found = Resolver(pipeline, {7: PinnedTable(TABLE, "t", "id", 1, 7, 8, 700)}, later=lambda: state.later)
    state.apply({schema_key(7, 8): LaterSchema(named("id", "b"), 8)})
    assert found.again(Version(named("id", "c"), "t", 7)) == Version(named("id", "c"), "t", 7, 9)
    # also with what is registered, and will be published
    found.again(Version(named("id", "d"), "t", 7))
    assert compared == [["a", "b"], ["a", "b", "c"]]


def test_the_columns_of_an_outbox_may_change_again_and_again() -> None:
    """Its records have no schema, which could be registered."""
    pipeline = Settings.of(
        postgres="dbname=none", format="avro", registry={"url": "http://registry"},
        table_options={TABLE.qualified: {"outbox": "events", "outbox_key": "id", "outbox_payload": "a"}},
    )  # fmt: skip
    outbox = replace(TABLE, outbox=True)
    found = Resolver(pipeline, {7: PinnedTable(outbox, "t", "", 0, 0, 0, 700)})
    for column in ("b", "c"):
        version = Version(replace(outbox, columns=(*outbox.columns, Column(column, w.plain(w.TEXT)))), "t")
        assert found.again(version) == version


class Catalog:
    """One with tables of one definition. Reading takes as long as it does from a server that is not far away."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, count: int, **table: Any) -> None:
        self.now, self.readings, self.sessions = 1000.0, list[list[int]](), list[Mock]()
        self.tables = {oid: replace(TABLE, oid=oid, **table) for oid in range(count)}
        self.resolver = Resolver(
            Settings.of(postgres="dbname=none", format="json"),
            {oid: PinnedTable(each, "t", "id", 1, 0, 0, 700) for oid, each in self.tables.items()},
        )
        monkeypatch.setattr(time, "monotonic", lambda: self.now)
        monkeypatch.setattr(relations, "connect", lambda *_, **__: self.sessions.append(Mock()) or self.sessions[-1])
        monkeypatch.setattr(relations.catalog, "load", self._load)

    def _load(self, connection: Mock, oids: Iterable[int], _: object) -> list[SourceTable]:
        connection.execute()
        self.readings.append(list(oids))
        self.now += 0.003 + 0.0002 * len(self.readings[-1])
        return [self.tables[oid] for oid in oids if oid in self.tables]

    def send(self, oid: int, current: Version | None = None, identity: str = "d") -> Version | None:
        columns = tuple(replace(column, key=column.key or identity == "f") for column in message("id", "a").columns)
        return self.resolver(replace(message("id", "a"), oid=oid, identity=identity, columns=columns), current)


@pytest.mark.parametrize(("identity", "again"), [("d", False), ("f", False), ("d", True), ("f", True)])
def test_tables_whose_messages_wait_are_read_together_by_one_session(
    monkeypatch: pytest.MonkeyPatch, identity: str, again: bool
) -> None:
    """Ten thousand tables would take a minute, one after the other, whenever a publication is altered."""
    world = Catalog(monkeypatch, 1000, identity=identity)
    world.resolver.arrived = world.now
    for oid, pinned in world.resolver._pinned.items():
        assert world.send(oid, pinned.version if again else None, identity) == pinned.version
    alone = [each for each in world.readings if len(each) == 1]
    assert len(world.readings) - len(alone) == 1 and len(alone) < 100 and len(world.sessions) == 1
    # those that come later, each by itself, keep nobody waiting
    world.readings.clear()
    for oid in range(200):
        world.now += 10.0
        world.resolver.arrived = world.now
        assert world.send(oid, None, identity) is not None
    assert world.readings == [[oid] for oid in range(200)]
    world.sessions[0].close.assert_called_once()
    world.now += 10.0
    world.resolver.rest()
    world.sessions[-1].close.assert_called_once()


def test_what_a_message_does_not_show_is_read_after_it_has_arrived(monkeypatch: pytest.MonkeyPatch) -> None:
    """Under FULL, another key; and of a table that has gone on, what may have been altered before its message."""
    world = Catalog(monkeypatch, 2, identity="f")
    for number in (1, 2, 3):
        world.resolver.arrived = world.now
        world.now += 0.001
        world.send(0, None, "f")
        world.send(0, world.resolver._pinned[0].version, "f")
        assert len(world.readings) == number
    world.tables[0] = replace(world.tables[0], key=("a",))
    world.resolver.arrived = world.now
    with pytest.raises(Refused, match="key"):
        world.send(0, None, "f")
    # a message that tells the key may have what was read a moment ago
    world.send(1)
    world.now += 4.0
    world.resolver.arrived = world.now
    readings = len(world.readings)
    world.send(1)
    assert len(world.readings) == readings
    world.send(1, world.resolver._pinned[1].version)
    assert len(world.readings) == readings + 1


def test_a_session_that_breaks_is_opened_anew(monkeypatch: pytest.MonkeyPatch) -> None:
    world = Catalog(monkeypatch, 1)
    world.send(0)
    world.resolver.arrived = math.inf
    world.sessions[0].execute.side_effect = psycopg.OperationalError("server closed the connection unexpectedly")
    with pytest.raises(Outage, match="Reading the catalog: server closed"):
        world.send(0, world.resolver._pinned[0].version)
    assert world.send(0, world.resolver._pinned[0].version) is not None and len(world.sessions) == 2
    world.resolver.close()
    world.sessions[1].close.assert_called_once()


def test_a_message_with_another_name_than_todays_has_not_todays_options(monkeypatch: pytest.MonkeyPatch) -> None:
    pipeline = Settings.of(
        postgres="dbname=none", format="json", table_options={"public.later": {"mask": {"a": "null"}}}
    )
    before = replace(TABLE, oid=7, identity="f")
    columns = TableMapping.of(pipeline).published("public", "later", TABLE.columns)
    today = replace(before, schema="public", name="later", columns=columns)
    monkeypatch.setattr(relations, "connect", lambda *_, **__: Mock())
    monkeypatch.setattr(relations.catalog, "load", lambda *_, **__: [today])
    resolver = Resolver(pipeline, {7: PinnedTable(before, "t", "id", 1, 0, 0, 700)})
    monkeypatch.setattr(resolver, "_table", lambda *_: before)
    said = message("id", "a")
    said = replace(said, schema=TABLE.schema, name=TABLE.name, identity="f")
    found = resolver(
        replace(said, columns=tuple(replace(each, key=True) for each in said.columns)), Version(before, "t")
    )
    assert found is not None and {column.mask for column in found.table.columns} == {TABLE.columns[0].mask}


def test_the_settings_are_read_once_for_all_tables_that_were_dropped(monkeypatch: pytest.MonkeyPatch) -> None:
    read: list[float] = []

    def resolve(*_: object, **__: object) -> list[int]:
        read.append(time.monotonic())
        return [1]

    monkeypatch.setattr(relations, "connect", lambda *_, **__: Mock())
    monkeypatch.setattr(relations.catalog, "resolve", resolve)
    resolver = Resolver(Settings.of(postgres="dbname=none", format="json", tables="*"), {})
    for block in (1, 2):
        resolver.arrived = time.monotonic()
        for oid in range(100):
            resolver.unknown(pgoutput.RelationMessage(20_000 + oid, "public", f"t{oid}", "d", ()))
        assert len(read) == block and read[-1] >= resolver.arrived


def test_of_a_table_that_got_a_key_the_log_points_to_what_the_status_says_of_it(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """There is a way with less work than another slot."""
    made = resolver(monkeypatch)
    made._pinned[7] = PinnedTable(replace(TABLE, key=()), "t", "id", 1, 0, 0, 700)
    found = made(message("id", "a"), None)
    assert found is not None and found.table.key == ()
    (line,) = (each for each in caplog.messages if "has a key now (id)" in each)
    assert line.endswith("do what the pipeline's status says of it.") and "drop the slot" not in line
