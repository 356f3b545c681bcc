"""The triggers of asset watchers: what is stored of them, and when what they have told is kept."""

from __future__ import annotations

import asyncio
import dataclasses
import datetime
import functools
import json
import re
import sys
import time
from collections.abc import AsyncIterator
from types import SimpleNamespace
from typing import Any

import pytest
from airflow.sdk import Asset, AssetWatcher
from airflow.sdk.exceptions import AirflowFailException
from airflow.sdk.module_loading import import_string

from airflow_bottledwater.errors import Outage, Refused, SettingError, StateError
from airflow_bottledwater.hooks.changes import ChangesHook
from airflow_bottledwater.jobs import changes
from airflow_bottledwater.model.changes import ChangeRange, TopicRange
from airflow_bottledwater.pipeline.description import Description, Kafka, Source
from airflow_bottledwater.provision import live
from airflow_bottledwater.triggers import alarms, slot_lag, table_changed, watcher, watching
from airflow_bottledwater.triggers.alarms import DeadLettersAlarmTrigger, SlotLagAlarmTrigger
from airflow_bottledwater.triggers.dead_letters import LettersWatch
from airflow_bottledwater.triggers.slots import SlotReader
from airflow_bottledwater.triggers.table_changed import TableChangedTrigger
from airflow_bottledwater.triggers.watcher import WatcherTrigger
from tests.support.documented import blocks

SHOP = Description("shop", source=Source("pg"), kafka=Kafka("k"))

#: system identifier and timeline
SERVER = "7/00000001"


def at(start: int, end: int) -> ChangeRange:
    return ChangeRange("1/d/shop", start, end, {"public.a": TopicRange("a", "i", (start,), (end,))})


def test_a_trigger_is_stored_as_plain_values_and_belongs_to_a_watcher() -> None:
    trigger = TableChangedTrigger(pipeline=SHOP, tables=["orders"], min_rows=5, max_wait=None)
    path, arguments = trigger.serialize()
    kept = json.loads(json.dumps(arguments))
    again = import_string(path)(**kept)
    assert again.serialize() == (path, kept)
    assert again.shared_stream_key() == trigger.shared_stream_key()
    assert Asset("orders", watchers=[AssetWatcher(name="orders", trigger=trigger)])
    for alarm in (SlotLagAlarmTrigger(pipeline=SHOP, max_lag=5), DeadLettersAlarmTrigger(pipeline=SHOP, tables="a")):
        path, arguments = alarm.serialize()
        assert import_string(path)(**json.loads(json.dumps(arguments))).serialize() == (path, arguments)
    other = TableChangedTrigger(pipeline="shop", tables="orders")
    assert other.tables == ["orders"] and other.shared_stream_key() != trigger.shared_stream_key()
    with pytest.raises(SettingError):
        TableChangedTrigger(pipeline={"name": "Not a slot"}, tables=["orders"])


class Found:
    """What a watch finds, look for look."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, *found: Any) -> None:
        self.found, self.last = list(found), list[Any]()
        #: the patterns that match no table
        self.missing: tuple[str, ...] | None = None
        monkeypatch.setattr(changes, "ChangeWatch", self._begun)
        monkeypatch.setattr(live, "name_of", lambda _: "1/d/shop")

    def _begun(self, *_: Any, last: Any, **__: Any) -> Found:
        self.last.append(last)
        return self

    def fetch(self) -> Any:
        found = self.found.pop(0)
        if isinstance(found, Exception):
            raise found
        if isinstance(found, float):
            time.sleep(found)
            return self.fetch()
        if isinstance(found, tuple):
            self.missing = found
            return None
        return found

    def close(self) -> None:
        pass


class Store(dict[str, Any]):
    async def aget(self, key: str) -> Any:
        return self.get(key)

    async def aset(self, key: str, value: Any) -> None:
        self[key] = value

    @property
    def kept(self) -> Any:
        """What the one trigger of the asset has kept; None if it has nothing."""
        first, *others = self.values() or [None]
        assert all(each == first for each in others)
        return first


def watched(store: Any, looks: int, *tables: str) -> list[tuple[Any, Any]]:
    """The events of a trigger with what is kept then, of so many looks; each is confirmed."""
    trigger = TableChangedTrigger(pipeline=SHOP, tables=tables or ["a"])
    trigger.asset_state_store = store

    async def run() -> list[tuple[Any, Any]]:
        events: list[tuple[Any, Any]] = []
        made: list[watcher._Look] = []
        producer = trigger.create_shared_stream_producer(trigger.serialize()[1])

        async def stream() -> AsyncIterator[Any]:
            for _ in range(looks):
                made.append(watcher._Look())
                yield made[-1]
                assert made[-1].over.is_set()

        async for event in trigger.filter_shared_stream(stream()):
            events.append((event.payload, None if tables else store.kept))
            outcome = SimpleNamespace(is_clean=True)
            await producer.advance([SimpleNamespace(broker_payload=made[-1], outcome=outcome)])  # type: ignore[list-item]
        return events

    return asyncio.run(run())


def read_by_run(asset: Asset, store: dict[str, Any], events: list[Any], *triggering: Any) -> ChangeRange:
    """What the run of a DAG reads.

    :param store: the asset's.
    :param events: all events of the asset.
    :param triggering: those that have begun the run.
    """
    inlet = SimpleNamespace(before=lambda _: inlet, ascending=lambda _: inlet, limit=lambda _: events[::-1])
    context: dict[str, Any] = {"triggering_asset_events": {asset: triggering}, "inlet_events": {asset: inlet}}
    kept = {asset: SimpleNamespace(get=store.get, set=store.__setitem__)}
    return ChangesHook.of_run(
        {**context, "asset_state_store": kept, "dag": SimpleNamespace(dag_id="d"), "run_id": str(triggering)}, asset
    )


def event_of(day: int, told: ChangeRange) -> SimpleNamespace:
    """An event of an asset."""
    at = datetime.datetime(2026, 1, day, tzinfo=datetime.UTC)
    return SimpleNamespace(timestamp=at, extra={"payload": told.as_event()})


@pytest.mark.usefixtures("connections")
def test_a_name_without_a_table_is_told_once(monkeypatch: pytest.MonkeyPatch, connect: Any) -> None:
    """One that was mistyped, or whose table was renamed: otherwise its DAGs just never run again."""
    connect("pg", conn_type="postgres", host="db", schema="shop")
    connect("k", conn_type="kafka", extra={"bootstrap.servers": "k:9092"})
    found = Found(monkeypatch, at(5, 5), None, ("nope",), None, at(5, 9), (), at(9, 12), ("nope",), None)
    store = Store()
    told = [payload for payload, _ in watched(store, 9)]
    named, unnamed = {**at(5, 5).as_event(), "missing": ["nope"]}, {**at(12, 12).as_event(), "missing": ["nope"]}
    assert [each | {"tables": {}} for each in told] == [
        each | {"tables": {}} for each in (named, at(5, 9).as_event(), at(9, 12).as_event(), unnamed)
    ]
    # nor again by a new watch, of this triggerer or of another one
    found.found, found.missing = [None, ("nope",)], None
    assert not watched(store, 2) and found.last[-1].missing == ("nope",)
    # one that is wrong from the beginning is told with the place where it begins
    found.missing, found.found = ("nope",), [at(5, 5)]
    ((payload, _),) = watched(Store(), 1)
    assert payload == {**at(5, 5).as_event(), "missing": ["nope"]}


@pytest.mark.usefixtures("connections")
def test_what_was_told_is_kept_once_it_is_confirmed(monkeypatch: pytest.MonkeyPatch, connect: Any) -> None:
    connect("pg", conn_type="postgres", host="db", schema="shop")
    connect("k", conn_type="kafka", extra={"bootstrap.servers": "k:9092"})
    found = Found(monkeypatch, at(5, 5), None, at(5, 9), Refused("a password was changed"), Outage("away"), at(9, 12))
    store = Store()
    first, second = watched(store, 6)
    # where it begins is no event
    assert first == (at(5, 9).as_event(), at(5, 5).as_event())
    assert second == (at(9, 12).as_event(), at(5, 9).as_event())
    assert store.kept == at(9, 12).as_event()
    # a new watch, of this triggerer or of another one, goes on from what was told
    assert found.last == [None, at(5, 9)]
    found.found = [None]
    assert not watched(store, 1) and found.last[-1] == at(9, 12)


@pytest.mark.usefixtures("connections")
def test_a_search_that_takes_long_goes_on_through_several_looks(monkeypatch: pytest.MonkeyPatch, connect: Any) -> None:
    """Airflow ends a trigger that takes too long for one, and would let it begin the same search again."""
    connect("pg", conn_type="postgres", host="db", schema="shop")
    connect("k", conn_type="kafka", extra={"bootstrap.servers": "k:9092"})
    monkeypatch.setattr(watcher, "_LONGEST_LOOK", 0.1)
    found = Found(monkeypatch, at(5, 5), 0.5, at(5, 9), *[None] * 9)
    store = Store()
    ((payload, _),) = watched(store, 9)
    assert payload == at(5, 9).as_event() and len(found.last) == 1
    assert store.kept == at(5, 9).as_event()


@pytest.mark.usefixtures("connections")
def test_each_watcher_of_an_asset_goes_on_where_it_was(monkeypatch: pytest.MonkeyPatch, connect: Any) -> None:
    connect("pg", conn_type="postgres", host="db", schema="shop")
    connect("k", conn_type="kafka", extra={"bootstrap.servers": "k:9092"})

    def told(table: str, end: int) -> ChangeRange:
        return ChangeRange("1/d/shop", end - 1, end, {table: TopicRange(table, table, (end - 1,), (end,))})

    def kept(*tables: str) -> tuple[int, dict[str, int]]:
        """Where a trigger of these tables goes on: the position, and the offset of each table."""
        found.found.append(None)
        assert not watched(store, 1, *tables)
        return found.last[-1].end, {table: each.end[0] for table, each in found.last[-1].tables.items()}

    found, store = Found(monkeypatch, told("a", 5)), Store()
    watched(store, 1, "a")
    found.found = [told("b", 9)]
    watched(store, 1, "b")
    assert kept("a") == (5, {"a": 5, "b": 9}) and kept("b") == (9, {"b": 9})
    # other tables are chosen, and then those of before again: nothing is told twice, or left out
    found.found = [dataclasses.replace(at(9, 12), tables={**told("a", 12).tables, **told("b", 12).tables})]
    watched(store, 1, "a", "b")
    assert kept("b", "a") == (12, {"a": 12, "b": 12}) and kept("a") == (5, {"a": 12, "b": 12})
    # the pipeline has other connections, for the same servers or for others
    connect("other", conn_type="postgres", host="db", schema="shop")
    monkeypatch.setattr(sys.modules[__name__], "SHOP", Description("shop", source=Source("other"), kafka=Kafka("k")))
    assert kept("a") == (5, {"a": 12, "b": 12})
    monkeypatch.setattr(live, "name_of", lambda _: "2/d/shop")
    monkeypatch.setattr(sys.modules[__name__], "SHOP", Description("shop", source=Source("pg"), kafka=Kafka("other")))
    connect("other", conn_type="kafka", extra={"bootstrap.servers": "k:9092"})
    found.found.append(None)
    assert not watched(store, 1, "a") and found.last[-1] is None


@pytest.mark.usefixtures("connections")
def test_an_asset_has_alarms_for_several_pipelines(monkeypatch: pytest.MonkeyPatch) -> None:
    late = ("reserved", 101, 500, True, 50, None, SERVER)

    async def row(*_: Any) -> Any:
        return late

    monkeypatch.setattr(SlotReader, "row", row)
    store = Store()
    for watched_ in ({"pipeline": "a"}, {"pipeline": "b"}, {"pipeline": "b", "min_safe_wal": 5}):
        for told in (1, 0):
            alarm = SlotLagAlarmTrigger(max_lag=100, max_lag_seconds=None, **watched_)
            assert len(looked(alarm, store, 1)) == told


def looked(trigger: WatcherTrigger, store: Store, looks: int, confirmed: bool = True) -> list[Any]:
    """The payloads of a trigger's events, of so many looks."""
    trigger.asset_state_store = store  # type: ignore[assignment]

    async def run() -> list[Any]:
        made: list[watcher._Look] = []
        producer = trigger.create_shared_stream_producer(trigger.serialize()[1])

        async def stream() -> AsyncIterator[Any]:
            for _ in range(looks):
                made.append(watcher._Look())
                yield made[-1]

        told = [event.payload async for event in trigger.filter_shared_stream(stream())]
        if confirmed:
            clean = SimpleNamespace(is_clean=True)
            items: Any = [SimpleNamespace(broker_payload=each, outcome=clean) for each in made]
            await producer.advance(items)
        return told

    return asyncio.run(run())


@pytest.mark.usefixtures("connections")
def test_a_slot_that_needs_somebody_is_told_once_until_it_is_right(monkeypatch: pytest.MonkeyPatch) -> None:
    rows: list[Any] = []

    async def row(*_: Any) -> Any:
        return rows.pop(0)

    monkeypatch.setattr(SlotReader, "row", row)
    trigger = SlotLagAlarmTrigger(pipeline="shop", max_lag=100, max_lag_seconds=None)
    fine, late = ("reserved", 100, 500, True, 50, None, SERVER), ("reserved", 101, 500, True, 50, None, SERVER)
    in_danger, lost = ("unreserved", 0, 500, True, 50, -5, SERVER), ("lost", 0, 500, True, 50, None, SERVER)
    being_made = ("reserved", None, 5, True, 50, None, SERVER)
    rows.extend([being_made, fine, late, late, fine, in_danger, lost, None, fine, lost])
    first, second, third = looked(trigger, store := Store(), 10)
    assert first == {"slot": "shop", "lag": 101, "retained": 500, "wal_status": "reserved", "safe_wal_size": None}
    assert second["wal_status"] == "unreserved" and "was invalidated" in third["message"]
    assert store.kept == {"wrong": True}
    # told already, by the triggerer before this one
    rows.extend([None, fine])
    assert not looked(trigger, store, 2) and store.kept == {"wrong": False}
    # killed before the event was stored: it comes again
    rows.extend([late, late])
    assert len(looked(trigger, store, 1, confirmed=False)) == len(looked(trigger, store, 1)) == 1
    late_only = SlotLagAlarmTrigger(pipeline="shop", max_lag_seconds=600)
    rows.append(late)
    assert not looked(late_only, Store(), 1)  # since when is not known
    with pytest.raises(SettingError, match="one of reserved, extended, unreserved"):
        SlotLagAlarmTrigger(pipeline="shop", wal_status="good")


@pytest.mark.parametrize(
    ("trigger", "after", "right", "wrong"),
    [
        (SlotLagAlarmTrigger(pipeline="shop", max_lag=5, max_lag_seconds=None), 600, 0, 6),
        (SlotLagAlarmTrigger(pipeline="shop", max_lag=5, max_lag_seconds=900), 900, 0, 6),
        (DeadLettersAlarmTrigger(pipeline="shop"), 600, 0, 1),
    ],
    ids=lambda each: type(each).__name__ if isinstance(each, WatcherTrigger) else None,
)
def test_an_alarm_that_cannot_look_says_so_once(
    monkeypatch: pytest.MonkeyPatch, connect: Any, trigger: WatcherTrigger, after: int, right: int, wrong: int
) -> None:
    now, seen = [1000.0], list[int]()
    # not that of the event loop
    for module in (alarms, watching):
        monkeypatch.setattr(module, "time", SimpleNamespace(monotonic=lambda: now[0], time=time.time))

    def look(*_: Any) -> int:
        now[0] += 100
        return seen.pop(0)

    async def row(*_: Any) -> Any:
        return ("reserved", look(), 500, True, 50, None, SERVER)

    async def connected(self: WatcherTrigger) -> Any:
        now[0] += 100 if not seen else 0
        return await found_connections(self)

    found_connections = WatcherTrigger._connected
    monkeypatch.setattr(WatcherTrigger, "_connected", connected)
    monkeypatch.setattr(SlotReader, "row", row)
    monkeypatch.setattr(LettersWatch, "counts", lambda _: {"public.a": look()})
    store = Store()
    assert looked(trigger, store, after // 100 - 1) == []
    (told,) = looked(trigger, store, after // 100 + 3)
    assert told["slot"] == "shop" and re.search(
        r" cannot be seen since \d{4}-.*: Airflow does not find the connection 'postgres_default'", told["message"]
    )
    assert looked(trigger, store, after // 100 + 3) == []  # by another triggerer, too
    connect("postgres_default", conn_type="postgres", host="db", schema="shop")
    connect("kafka_default", conn_type="kafka", extra={"bootstrap.servers": "k:9092"})
    # it can be seen again, and is wrong
    seen.append(wrong)
    assert len(looked(trigger, store, 1)) == 1 and store.kept == {"wrong": True}
    seen.append(right)
    assert looked(trigger, store, 1) == [] and store.kept == {"wrong": False}
    # when it is right, the next time is told again
    monkeypatch.delenv("AIRFLOW_CONN_POSTGRES_DEFAULT")
    assert len(looked(trigger, store, after // 100 + 3)) == 1 and store.kept == {"wrong": False, "unseen": True}
    connect("postgres_default", conn_type="postgres", host="db", schema="shop")
    seen.append(right)
    assert looked(trigger, store, 1) == [] and store.kept == {"wrong": False}


@pytest.mark.usefixtures("connections")
def test_no_lag_is_measured_between_two_servers(monkeypatch: pytest.MonkeyPatch) -> None:
    """The source was moved, and its stream has caught up: LSNs begin anew, lower."""
    now, count = [0.0], [0]

    async def row(*_: Any) -> Any:
        now[0] += 100
        count[0] += 1
        end, server = (10**6 + count[0], SERVER) if count[0] <= 5 else (count[0], "8/00000001")
        return ("reserved", 0, 500, True, end, None, server)

    monkeypatch.setattr(SlotReader, "row", row)
    monkeypatch.setattr(slot_lag.time, "time", lambda: now[0])
    assert looked(SlotLagAlarmTrigger(pipeline="shop", max_lag_seconds=600), Store(), 30) == []


@pytest.mark.usefixtures("connections")
def test_a_restart_makes_no_lag_right_and_tells_none_twice(monkeypatch: pytest.MonkeyPatch) -> None:
    now, ends = [0.0], iter(range(1000, 9000, 10))

    async def row(*_: Any) -> Any:
        now[0] += 100
        return ("reserved", next(ends) - confirmed[0], 500, True, confirmed[0], None, SERVER)

    monkeypatch.setattr(SlotReader, "row", row)
    monkeypatch.setattr(slot_lag.time, "time", lambda: now[0])
    confirmed, store = [50], Store()

    def looks(count: int) -> list[Any]:
        return looked(SlotLagAlarmTrigger(pipeline="shop", max_lag_seconds=600), store, count)

    assert looks(6) == [] and not store
    # nothing is known after each restart, then that it is late
    assert len(looks(9)) == 1 and store.kept == {"wrong": True}
    assert looks(3) == looks(20) == [] and store.kept == {"wrong": True}
    # what is seen from now on is published
    confirmed[0] = 9000
    assert looks(1) == [] and store.kept == {"wrong": False}
    confirmed[0] = 50
    assert looks(6) == [] and len(looks(9)) == 1


@pytest.mark.usefixtures("connections")
def test_dead_letters_are_told_once_until_they_are_settled(monkeypatch: pytest.MonkeyPatch) -> None:
    found: list[Any] = [StateError("no pipeline yet"), {}, {"public.a": 2}, {"public.a": 5}, Outage("away"), {}]
    found.append({"public.a": 1})

    def counts(_: Any) -> Any:
        counted = found.pop(0)
        if isinstance(counted, Exception):
            raise counted
        return counted

    monkeypatch.setattr(LettersWatch, "counts", counts)
    store = Store()
    first, second = looked(DeadLettersAlarmTrigger(pipeline="shop"), store, 7)
    assert first == {"slot": "shop", "open": 2, "tables": {"public.a": 2}} and second["open"] == 1
    assert store.kept == {"wrong": True}
    found.append(SettingError("tables", "b", "a table"))
    (told,) = looked(DeadLettersAlarmTrigger(pipeline="shop", tables="b"), Store(), 1)
    assert told == {"slot": "shop", "message": "Setting 'tables' cannot be 'b'. Allowed: a table."}
    found.append({"public.a": 3})
    assert not looked(DeadLettersAlarmTrigger(pipeline="shop", max_open=3, tables="a"), Store(), 1)


@pytest.mark.usefixtures("connections")
def test_a_dag_that_has_not_read_what_was_told_is_told_again(monkeypatch: pytest.MonkeyPatch, connect: Any) -> None:
    """Airflow begins one run for several events, and gives it only those up to the first one that queued it."""
    connect("pg", conn_type="postgres", host="db", schema="shop")
    connect("k", conn_type="kafka", extra={"bootstrap.servers": "k:9092"})
    monkeypatch.setattr(table_changed, "_READ_EVERY", 0.0)
    store, asset, events = Store(), Asset("a"), list[Any]()
    run = functools.partial(read_by_run, asset, store, events)

    def told(*found: ChangeRange | None) -> list[Any]:
        Found(monkeypatch, *found)
        payloads = looked(TableChangedTrigger(pipeline=SHOP, tables=["a"]), store, len(found))
        start = datetime.datetime(2026, 1, 1, tzinfo=datetime.UTC)
        made = [(start + datetime.timedelta(len(events) + at), payload) for at, payload in enumerate(payloads)]
        events.extend(SimpleNamespace(timestamp=at, extra={"payload": payload}) for at, payload in made)
        return payloads

    assert len(told(at(5, 5), at(5, 9), at(9, 12), *[None] * 9)) == 2, "no DAG is known to read"
    assert run(events[0]) == at(5, 9)
    # the second event has no run: it is told again, ever more seldom, and each row is read once
    assert told(*[None] * 18) == [at(12, 12).as_event()] * 5
    # a DAG that is paused gets none of them, and is to get one soon when it goes on
    assert len(told(*[None] * 400)) == 9
    assert run(events[2]).empty and not told(*[None] * 9)
    del store["bottledwater_read"]
    assert run(events[0]) and len(told(None, None)) == 1
    assert run(*events[1:]) == at(9, 12) and not told(*[None] * 9)


def test_a_dag_that_has_read_nothing_for_a_month_is_told_nothing_again() -> None:
    """It may have been deleted, and each event without changes runs every other DAG of the asset."""
    trigger, read = TableChangedTrigger(pipeline=SHOP, tables=["a"]), {"here": {"i": [9]}, "gone": {"i": [5]}}
    assert asyncio.run(trigger._read()) == {}
    at = {"here": time.time() - 29 * 86_400, "gone": time.time() - 31 * 86_400}
    trigger.asset_state_store = Store(bottledwater_read=read, bottledwater_read_at=at)  # type: ignore[assignment]
    assert asyncio.run(trigger._read()) == {"here": {"i": [9]}}


def test_a_run_with_events_of_several_pipelines_reads_all_of_their_changes() -> None:
    asset, store = Asset("a"), dict[str, Any]()

    def run(other: ChangeRange) -> ChangeRange:
        events = [event_of(1, at(5, 9)), event_of(2, other)]
        return read_by_run(asset, store, events, *events)

    with pytest.raises(AirflowFailException, match=r"public\.a is in topic a and in topic o.*schedule=a \| b"):
        run(ChangeRange("2/d/shop", 1, 2, {"public.a": TopicRange("o", "j", (1,), (2,))}))
    assert not store
    other = {"public.b": TopicRange("b", "j", (1,), (2,))}
    assert run(ChangeRange("2/d/shop", 1, 2, other)).tables == {**at(5, 9).tables, **other}
    assert store["bottledwater_read"] == {"d": {"i": [9], "j": [2]}}
    assert 0 <= time.time() - store["bottledwater_read_at"]["d"] < 600


def test_a_name_without_a_table_fails_a_run_once_and_takes_nothing_from_it() -> None:
    asset, store = Asset("a"), dict[str, Any]()
    told = [
        at(5, 9),
        ChangeRange("1/d/shop", 9, 9, {}, ("nope",)),
        at(9, 12),
        ChangeRange("1/d/shop", 12, 12, {}, ("o",)),
    ]
    events = [event_of(day, each) for day, each in enumerate(told, 1)]
    run = functools.partial(read_by_run, asset, store, events)
    with pytest.raises(
        AirflowFailException, match=r"No table matches .* 'a' is to tell of: nope \(pipeline 1/d/shop\)"
    ):
        run(*events[:3])
    assert "bottledwater_read" not in store
    # cleared
    assert run(*events[:3]) == at(5, 12)
    with pytest.raises(AirflowFailException, match=r"No table matches .* o "):
        run(events[3])
    assert run(events[3]).empty


def test_two_assets_with_the_same_trigger_are_refused() -> None:
    def several(key: str) -> Any:
        raise ValueError("Task has 2 concrete inlets and outlets")

    with pytest.raises(SettingError, match="one asset"):
        watched(SimpleNamespace(aget=several), 1)


def test_the_documented_dag_is_one() -> None:
    (code,) = blocks("changes.md", "A DAG that reads what has changed", "python")
    made: dict[str, Any] = {}
    exec(code, made)
    (watcher_,) = made["orders"].watchers
    assert watcher_.trigger.min_rows == 1000 and watcher_.trigger.tables == ["orders", "order_lines"]
    (code,) = blocks("changes.md", "With Spark", "python")
    exec(code, made)
    asked: list[Any] = []

    class Reader:
        def __getattr__(self, name: str) -> Any:
            return lambda *of, **more: asked.append((name, *of, more)) or self

    made["read"](SimpleNamespace(read=Reader()), at(1, 3), "k:9092")
    assert ("format", "kafka", {}) in asked
    (code,) = blocks("changes.md", "Assets of the topics", "python")
    exec(code, made)
    (code,) = blocks("changes.md", "DAGs that run when something is wrong", "python")
    exec(code, made)
    assert made["late"].watchers[0].trigger.max_lag_seconds == 900
    (event,) = blocks("changes.md", "What an event tells", "json")
    assert ChangeRange.of_event(json.loads(event)["payload"]).records == 1204
