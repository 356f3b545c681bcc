"""Assets that change when tables do, on real servers: each record is in exactly one range, whatever is killed."""

from __future__ import annotations

import asyncio
import dataclasses
import datetime
import json
import random
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import closing
from types import SimpleNamespace
from typing import Any

import pytest
from airflow.sdk import Asset
from airflow.sdk.exceptions import AirflowFailException
from airflow.triggers.shared_stream import SharedStreamManager
from confluent_kafka import Producer, TopicPartition
from confluent_kafka.admin import AdminClient

from airflow_bottledwater.errors import Outage, Refused, StateError
from airflow_bottledwater.hooks.changes import Change, ChangesHook
from airflow_bottledwater.jobs import changes
from airflow_bottledwater.jobs.changes import ChangeWatch, between, present
from airflow_bottledwater.local.kafka import KafkaBroker
from airflow_bottledwater.model.changes import ChangeRange
from airflow_bottledwater.model.lsn import Position, format_lsn
from airflow_bottledwater.model.slot import parts
from airflow_bottledwater.provision import live
from airflow_bottledwater.state.identity import own
from airflow_bottledwater.state.records import Letters, encode
from airflow_bottledwater.state.store import state_topic_name
from airflow_bottledwater.triggers import watching
from airflow_bottledwater.triggers.table_changed import TableChangedTrigger
from tests.support.topics import Flow, MakeFlow, airflow_connections, alter_topic
from tests.support.waiting import until

ASSET = Asset("orders and items")
TABLES = ["orders", "items"]


@pytest.fixture
def flow_statements() -> tuple[str, ...]:
    return (
        "CREATE TABLE orders (id int PRIMARY KEY, n int)",
        "CREATE TABLE items (id int PRIMARY KEY, n int)",
        "INSERT INTO orders SELECT -i, 0 FROM generate_series(1, 50) i",
    )


@pytest.fixture
def flow(make_flow: MakeFlow, monkeypatch: pytest.MonkeyPatch) -> Flow:
    made = make_flow(partitions=3, heartbeat_interval=0.2)
    made.create()
    made.snapshot()
    airflow_connections(monkeypatch, made)
    return made


class Shop:
    """Writes to both tables in transactions that have one number each, until the block ends."""

    def __init__(self, flow: Flow, pause: float = 0.01) -> None:
        self.flow, self.written = flow, 0
        self._ended, self._pause = threading.Event(), pause
        self._thread = threading.Thread(target=self._write, daemon=True)

    def _write(self) -> None:
        rng = random.Random(7)
        while not self._ended.wait(self._pause):
            self.written += 1
            rows = ", ".join(f"({rng.randrange(40)}, {self.written})" for _ in range(1))
            insert = "INSERT INTO {} VALUES {} ON CONFLICT (id) DO UPDATE SET n = excluded.n"
            self.flow.transaction(insert.format("orders", rows), insert.format("items", rows))

    def __enter__(self) -> Shop:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._ended.set()
        self._thread.join()


def records(ranges: Sequence[ChangeRange]) -> list[Change]:
    return [change for each in ranges for change in ChangesHook().records(each)]


def places(found: Sequence[Change]) -> list[tuple[str, int, int]]:
    return sorted((each.topic, each.partition, each.offset) for each in found)


def published(flow: Flow, since: ChangeRange) -> list[tuple[str, int, int]]:
    """Where the committed records are that were published since the end of a range."""
    begins = {each.topic: each.end for each in since.tables.values()}
    return sorted(
        (flow.topic(table), message.partition, message.offset)
        for table in TABLES
        for message in flow.read(table)
        if message.offset >= begins[flow.topic(table)][message.partition]
    )


def whole(ranges: Sequence[ChangeRange]) -> None:
    """No transaction of the source is in two ranges, and each change is in the one of its position."""
    seen: dict[int, int] = {}
    for number, each in enumerate(ranges):
        of_range: dict[str, set[int]] = {"public.orders": set(), "public.items": set()}
        for change in ChangesHook().records(each):
            if change.position:
                assert each.start <= Position.parse(change.position).lsn < each.end, change
                n = json.loads(change.value or b"{}")["n"]
                of_range[change.table].add(n)
                assert seen.setdefault(n, number) == number
        assert of_range["public.orders"] == of_range["public.items"]


@pytest.mark.long
def test_each_record_is_in_one_range_and_each_transaction_whole(flow: Flow) -> None:
    told: list[ChangeRange] = []
    with flow.streaming() as errors, Shop(flow) as shop:
        flow.streams()
        with closing(ChangeWatch(flow.pipeline, flow.name, TABLES)) as watch:
            first = begins(watch)
        assert sum(map(sum, (each.end for each in first.tables.values()))) >= 50
        last = first
        while len(told) < 5:
            # another watch each time, which knows only what was kept
            kept = ChangeRange.of_event(json.loads(json.dumps(last.as_event())))
            assert kept == last
            if len(told) == 2:
                flow.ask("orders")  # rows that are read again lie between the changes
            with closing(ChangeWatch(flow.pipeline, flow.name, TABLES, min_records=20, last=kept)) as watch:
                last = until(watch.fetch, "a range", failed=errors)
            assert last.start == kept.end
            told.append(last)
        while not any(each.snapshot for each in records(told)):
            told.append(next_range(flow, told[-1]))
    assert shop.written
    flow.stream()
    told.append(next_range(flow, told[-1]))
    assert places(records(told)) == published(flow, first)
    assert sum(1 for each in records(told) if each.snapshot) == len({c.key for c in records(told) if c.snapshot}) > 50
    whole(told)
    # the same changes, found by their positions alone
    middle = told[1:4]
    found = between(flow.pipeline, flow.name, TABLES, middle[0].start, middle[-1].end)
    assert {c.position for c in records([found])} - {""} == {c.position for c in records(middle)} - {""}
    with pytest.raises(StateError, match="has published up to"):
        ChangesHook.between(flow.pipeline.slot, TABLES, format_lsn(middle[0].start), "FFFFFFFF/0")


def begins(watch: ChangeWatch) -> ChangeRange:
    """The empty range from which on a new watch tells."""
    (found,) = until(lambda: [each] if (each := watch.fetch()) is not None else None, "where it begins")
    assert found.empty
    return found


def next_range(flow: Flow, last: ChangeRange) -> ChangeRange:
    with closing(ChangeWatch(flow.pipeline, flow.name, TABLES, last=last)) as watch:
        return until(watch.fetch, "a range")


def test_what_a_bounded_run_has_published_is_known_without_a_search(
    flow: Flow, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as patch:
        # a pipeline of outboxes only has none
        patch.setattr(changes, "topics_of", lambda *_, **__: {})
        assert present(flow.pipeline, flow.name).tables == {}
    begun = present(flow.pipeline, flow.name)
    assert begun.empty and set(begun.tables) == {"public.orders", "public.items"}
    # a producer that was killed does not keep it from beginning, but from telling what would not be all
    hanging = Producer({**flow.pipeline.kafka, "transactional.id": "hanging", "transaction.timeout.ms": 60_000})
    hanging.init_transactions(10)
    hanging.begin_transaction()
    hanging.produce(flow.topic("orders"), b"{}", b"x", partition=0)
    hanging.flush()
    try:
        with monkeypatch.context() as patch:
            patch.setattr(changes, "_OPEN", 0.2)
            assert present(flow.pipeline, flow.name) == begun
            with pytest.raises(Outage, match="A transaction is open"):
                present(flow.pipeline, flow.name, begun)
            # the saved state is in each transaction, too
            letters = json.dumps(encode(Letters("public.orders", 1))).encode()
            hanging.produce(state_topic_name(*parts(flow.name)[1:]), letters, b"letters/1/x")
            hanging.flush()
            began = time.monotonic()
            assert present(flow.pipeline, flow.name) == begun
            assert time.monotonic() - began < 10
    finally:
        hanging.abort_transaction(10)
    begun = present(flow.pipeline, flow.name)
    flow.execute("INSERT INTO orders SELECT i, 1 FROM generate_series(1, 9) i")
    flow.stream()
    found = present(flow.pipeline, flow.name, ChangeRange.of_event(begun.as_event()))
    assert found.start == begun.end < found.end
    assert len(records([found])) == 9 and not found.tables["public.items"].records
    # the same as by a search, whose end is no mark of a transaction
    searched = between(flow.pipeline, flow.name, ["orders"], found.start, found.end)
    assert places(records([searched])) == places(records([found]))


def test_a_source_that_was_set_back_is_told_from_where_it_is(flow: Flow, monkeypatch: pytest.MonkeyPatch) -> None:
    begun = present(flow.pipeline, flow.name)
    flow.execute("INSERT INTO orders SELECT i, 1 FROM generate_series(1, 9) i")
    flow.stream()
    # the last range has ended at a moment that the source does not know any more; a change of then was not told
    ahead = dataclasses.replace(begun, end=begun.end + (1 << 40))
    with closing(ChangeWatch(flow.pipeline, flow.name, TABLES, last=ahead)) as watch:
        with monkeypatch.context() as patch:
            # so says a job that was replaced, but not the saved state
            asked: list[Any] = []
            patch.setattr(changes, "published", lambda *of: asked.append(of) or ahead.end)
            assert until(lambda: [each for each in [watch.fetch()] if asked], "it asks") == [None]
        found = until(watch.fetch, "a range")
    assert (found.start, len(records([found]))) == (0, 9) and found.end < ahead.end
    flow.execute("INSERT INTO orders VALUES (100, 1)")
    flow.stream()
    following = next_range(flow, found)
    assert following.start == found.end and len(records([following])) == 1


def test_changes_of_a_topic_to_which_others_publish_are_not_searched_by_position(flow: Flow) -> None:
    begun = present(flow.pipeline, flow.name)
    flow.execute("INSERT INTO orders VALUES (100, 1)")
    flow.stream()
    own(flow.pipeline, "1/other/other", [flow.topic("orders")], shared=True)
    refusal = pytest.raises(Refused, match=r"by position: topic .*orders' is shared with other pipelines")
    with closing(ChangeWatch(flow.pipeline, flow.name, TABLES, last=begun)) as watch, refusal:
        until(watch.fetch, "a range")
    with pytest.raises(Refused, match="is shared with"):
        between(flow.pipeline, flow.name, TABLES, begun.end, begun.end)
    # others are not
    between(flow.pipeline, flow.name, ["items"], begun.end, begun.end)
    assert present(flow.pipeline, flow.name, begun).tables["public.orders"].records


def test_the_name_of_an_upgraded_source_is_learned(flow: Flow, monkeypatch: pytest.MonkeyPatch) -> None:
    # pg_upgrade gives the cluster another system identifier, and the status under the old name is removed
    before = dataclasses.replace(present(flow.pipeline, flow.name), pipeline=f"1/{flow.name.partition('/')[2]}")
    flow.execute("INSERT INTO orders VALUES (100, 1)")
    flow.stream()
    names = [before.pipeline]
    monkeypatch.setattr(live, "name_of", lambda _: names.pop() if names else flow.name)
    monkeypatch.setattr(watching, "ANEW", 0.1)
    trigger = TableChangedTrigger(pipeline=flow.pipeline.slot, tables=TABLES)

    async def told() -> ChangeRange:
        async with watching.AsyncWatch(lambda: trigger._begin(flow.pipeline, before.as_event()), "A test") as watch:
            while (found := await watch.fetch()) is None:
                await asyncio.sleep(0.05)
            range_, tell = found
            assert tell
            return range_

    found = asyncio.run(asyncio.wait_for(told(), 30))
    assert found.pipeline == flow.name and len(records([found])) == 1


def test_few_changes_wait_for_more_or_for_their_time(flow: Flow) -> None:
    with flow.streaming(), closing(ChangeWatch(flow.pipeline, flow.name, ["orders"], min_records=100)) as many:
        flow.streams()
        begun = begins(many)
        flow.published("INSERT INTO items VALUES (1, 1)")
        soon = ChangeWatch(flow.pipeline, flow.name, ["orders"], min_records=100, max_wait=0.5, last=begun)
        until(lambda: soon.fetch() is None and flow.execute("SELECT pg_sleep(0.6)") and True, "it looks")
        assert soon.fetch() is None, "another table has changed"
        flow.published("INSERT INTO orders VALUES (1, 1)")
        found = until(soon.fetch, "its time has come")
        assert many.fetch() is None
        assert [json.loads(each.value or b"") for each in records([found])] == [{"id": 1, "n": 1}]
        soon.close()
        flow.published("INSERT INTO orders SELECT i, 1 FROM generate_series(2, 120) i")
        assert len(records([until(many.fetch, "enough have come")])) == 120


class Store(dict[str, Any]):
    """The asset's store."""

    async def aget(self, key: str) -> Any:
        return self.get(key)

    async def aset(self, key: str, value: Any) -> None:
        self[key] = json.loads(json.dumps(value))


class Airflow:
    """What Airflow keeps of an asset: its store, and its events, each of which triggers a run."""

    def __init__(self) -> None:
        self.store, self.events = Store(), list[Any]()

    def stored(self, payload: dict[str, Any]) -> None:
        at = datetime.datetime(2026, 1, 1, tzinfo=datetime.UTC) + datetime.timedelta(seconds=len(self.events))
        extra = {"from_trigger": True, "payload": json.loads(json.dumps(payload))}
        self.events.append(SimpleNamespace(timestamp=at, extra=extra))

    def triggerer(self, flow: Flow, *steps: str) -> None:
        """A triggerer of Airflow's own parts: for each event of the trigger, a step. It is killed at the last one.

        ``stored``: the event is stored, and the trigger learns of it; ``lost``: killed before it is stored;
        ``unconfirmed``: killed before the trigger learns of it.
        """

        async def run() -> None:
            trigger = TableChangedTrigger(pipeline=flow.pipeline.slot, tables=TABLES, poll_interval=0.1)
            path, arguments = trigger.serialize()
            assert path.endswith(".TableChangedTrigger")
            trigger = TableChangedTrigger(**json.loads(json.dumps(arguments)))
            trigger.asset_state_store = self.store  # type: ignore[assignment]
            manager, key = SharedStreamManager(), trigger.shared_stream_key()
            stream = manager.subscribe(trigger_id=1, trigger=trigger, key=key)
            events, left = trigger.filter_shared_stream(stream), list(steps)
            try:
                async for event in events:
                    number = manager.bind_pending_event(trigger_id=1, key=key)
                    assert number is not None
                    if (step := left.pop(0)) != "lost":
                        self.stored(event.payload)
                    if step == "stored":
                        asyncio.get_running_loop().call_later(0.2, manager.confirm_persisted, [number])
                    if not left:
                        await asyncio.sleep(0.5)
                        return
            finally:
                await events.aclose()
                await manager.stop_all()

        asyncio.run(asyncio.wait_for(run(), 110))

    def ranges(self) -> list[ChangeRange]:
        """What each run reads."""
        return [ChangesHook.of_run(self.context(event), ASSET) for event in self.events]

    def context(self, *triggering: Any) -> dict[str, Any]:
        return {
            "triggering_asset_events": {ASSET: list(triggering)},
            "inlet_events": {ASSET: Inlet(self.events)},
            "asset_state_store": {},
            "dag": SimpleNamespace(dag_id="on_changes"),
            "run_id": "run",
        }


class Inlet:
    """The events of an inlet as Airflow gives them."""

    def __init__(self, events: Sequence[Any]) -> None:
        self._events = list(events)

    def before(self, timestamp: str) -> Inlet:
        return Inlet([e for e in self._events if e.timestamp <= datetime.datetime.fromisoformat(timestamp)])

    def ascending(self, ascending: bool) -> Inlet:
        return Inlet(self._events if ascending else self._events[::-1])

    def limit(self, limit: int) -> Inlet:
        return Inlet(self._events[:limit])

    def __iter__(self) -> Iterator[Any]:
        return iter(self._events)


@pytest.mark.long
def test_whatever_is_killed_each_record_is_in_the_range_of_one_run(flow: Flow) -> None:
    airflow = Airflow()
    with flow.streaming(), Shop(flow):
        flow.streams()
        airflow.triggerer(flow, "stored")
        begun = ChangeRange.of_event(airflow.events[0].extra["payload"])
        airflow.triggerer(flow, "stored", "lost")
        airflow.triggerer(flow, "unconfirmed")
        assert airflow.events[-1].extra["payload"] not in airflow.store.values()
        airflow.triggerer(flow, "stored", "unconfirmed")
        late = airflow.events[1].extra["payload"]
        airflow.triggerer(flow, "stored")
        airflow.stored(airflow.events[-1].extra["payload"])  # twice
        airflow.stored(late)
        airflow.triggerer(flow, "stored", "stored")
    ranges = airflow.ranges()
    assert [each.empty for each in ranges].count(True) == 2
    flow.stream()
    last = ranges[-1]
    after = next_range(flow, ChangeRange.of_event(airflow.events[-1].extra["payload"]))
    begin = ChangeRange(begun.pipeline, 0, begun.start, {t: dataclass_end(each) for t, each in begun.tables.items()})
    assert places(records([*ranges, after])) == published(flow, begin)
    assert after.start == last.end
    whole([*ranges, after])
    # one run for several events has all of them, and the same again when it is cleared
    context = airflow.context(*airflow.events[1:5])
    together = ChangesHook.of_run(context, ASSET)
    assert places(records([together])) == places(records(ranges[1:5]))
    assert ChangesHook.of_run(context, ASSET) == together
    assert ChangesHook.of_run(airflow.context(), ASSET).empty
    with pytest.raises(AirflowFailException, match="not among the task's inlets"):
        ChangesHook.of_run({**context, "inlet_events": {}}, ASSET)


def dataclass_end(each: Any) -> Any:
    """An empty range where another one begins."""
    return type(each)(each.topic, each.id, each.start, each.start)


def test_records_that_are_gone_are_said(flow: Flow) -> None:
    with flow.streaming(), closing(ChangeWatch(flow.pipeline, flow.name, TABLES)) as watch:
        flow.streams()
        begins(watch)
        flow.published("INSERT INTO orders SELECT i, 1 FROM generate_series(1, 9) i")
        found = until(watch.fetch, "a range")
    topic = found.tables["public.orders"]
    gone = [TopicPartition(topic.topic, partition, end) for partition, end in enumerate(topic.end)]
    alter_topic(flow, "orders", cleanup_policy="compact,delete")
    admin = AdminClient(flow.pipeline.kafka)
    for future in admin.delete_records(gone).values():
        future.result()
    with pytest.raises(StateError, match="were deleted by its retention"):
        records([found])
    other = json.loads(json.dumps(found.as_event()).replace(topic.id, "another"))
    with pytest.raises(StateError, match="was deleted and made again"):
        records([ChangeRange.of_event(other)])


def test_a_range_of_which_retention_has_taken_some_is_refused(flow: Flow) -> None:
    def published_up_to(n: int) -> int:
        flow.execute(f"INSERT INTO orders SELECT i, 1 FROM generate_series({n - 99}, {n}) i")
        flow.stream()
        return changes.published(flow.pipeline, flow.name)

    alter_topic(flow, "orders", cleanup_policy="compact,delete")
    first, second, third = published_up_to(100), published_up_to(200), published_up_to(300)
    whole_range = between(flow.pipeline, flow.name, ["orders"], first, third)
    later = between(flow.pipeline, flow.name, ["orders"], second, third)
    assert len(records([whole_range])) == 200
    topic = later.tables["public.orders"]
    # the last record of before the later range stays
    kept = [TopicPartition(topic.topic, partition, start - 2) for partition, start in enumerate(topic.start)]
    admin = AdminClient(flow.pipeline.kafka)
    for future in admin.delete_records(kept).values():
        future.result()
    assert between(flow.pipeline, flow.name, ["orders"], second, third) == later
    # behind that is the marker of its transaction, which is no change
    gone = [TopicPartition(topic.topic, partition, start - 1) for partition, start in enumerate(topic.start)]
    for future in admin.delete_records(gone).values():
        future.result()
    with pytest.raises(StateError, match="has lost the records of partition"):
        between(flow.pipeline, flow.name, ["orders"], second, third)
    with pytest.raises(StateError, match=r"has lost the records of partition .*some of the range may be among"):
        between(flow.pipeline, flow.name, ["orders"], first, third)
    # for a watch that does not know the table yet, the topic begins where its records do
    with closing(ChangeWatch(flow.pipeline, flow.name, ["orders"], last=ChangeRange(flow.name, first, first))) as watch:
        assert records([watch.present()])


@pytest.mark.long
def test_a_broker_that_is_away_loses_and_doubles_nothing(
    make_flow: MakeFlow, tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch
) -> None:
    with KafkaBroker(tmp_path_factory.mktemp("away")) as broker:
        flow = make_flow(broker=broker, partitions=2, heartbeat_interval=0.2, outage_timeout=300.0, skip_snapshot=True)
        flow.create()
        airflow_connections(monkeypatch, flow)
        airflow = Airflow()
        with flow.streaming() as errors, Shop(flow):
            flow.streams()
            airflow.triggerer(flow, "stored")
            begun = ChangeRange.of_event(airflow.events[0].extra["payload"])
            broker.stop()
            away = threading.Timer(30.0, broker.start)
            away.start()
            airflow.triggerer(flow, "stored", "unconfirmed")
            airflow.triggerer(flow, "stored")
            assert not errors
        flow.stream()
        after = next_range(flow, ChangeRange.of_event(airflow.events[-1].extra["payload"]))
        begin = ChangeRange(begun.pipeline, 0, 0, {t: dataclass_end(each) for t, each in begun.tables.items()})
        assert places(records([*airflow.ranges(), after])) == published(flow, begin)
        whole([*airflow.ranges(), after])
