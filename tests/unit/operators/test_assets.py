"""The assets of topics: which there are, and what their events say."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
from airflow.sdk import Asset, AssetAlias

from airflow_bottledwater.errors import Outage
from airflow_bottledwater.jobs import changes, status
from airflow_bottledwater.kafka.topics import Topics
from airflow_bottledwater.model.changes import ChangeRange, TopicRange
from airflow_bottledwater.operators import assets
from airflow_bottledwater.operators.assets import AssetEvents, alias_of, inlets_of, topic_uri
from airflow_bottledwater.operators.backfill import BackfillToKafkaOperator
from airflow_bottledwater.operators.snapshot import SnapshotToKafkaOperator
from airflow_bottledwater.operators.stream import StreamToKafkaOperator
from airflow_bottledwater.pipeline.settings import Settings
from airflow_bottledwater.provision import live
from airflow_bottledwater.state import control_topic
from airflow_bottledwater.state.store import state_topic_name

PIPELINE = Settings(postgres="host=db", kafka={"bootstrap.servers": "SSL://k1:9092, k2:9092"}, slot="shop")


def test_tables_that_are_named_are_inlets() -> None:
    source = {"conn_id": "shop_db", "tables": ["orders", "sales.line items", "log_*", "!sales.old", "größe"]}
    mine, found = Asset("mine"), [("shop_db/public.orders", "x-postgres://shop_db/public/orders"),
                                  ("shop_db/sales.line items", "x-postgres://shop_db/sales/line%20items")]  # fmt: skip
    pipeline = {"name": "shop", "source": source}
    for made in (
        SnapshotToKafkaOperator(task_id="s", pipeline=pipeline, inlets=[mine]),
        StreamToKafkaOperator(task_id="s", pipeline=pipeline, inlets=[mine]),
    ):
        assert [(asset.name, asset.uri) for asset in made.inlets] == [("mine", mine.uri), *found]
    of_task = BackfillToKafkaOperator(task_id="s", pipeline=pipeline, tables="orders, b*")
    assert [asset.name for asset in of_task.inlets] == ["shop_db/public.orders"]
    assert inlets_of(pipeline, "{{ params.tables }}") == inlets_of("shop") == inlets_of({"name": "shop"}) == []
    assert inlets_of({"source": {"conn_id": "{{ x }}", "tables": "a"}}) == []


class Events(dict[Any, Any]):
    """The outlet events of a task."""

    def __init__(self, *aliases: AssetAlias) -> None:
        super().__init__(dict.fromkeys(aliases, self))
        self.told: list[tuple[str, dict[str, Any]]] = []

    def add(self, asset: Asset, extra: dict[str, Any]) -> None:
        self.told.append((asset.uri, extra))


@pytest.fixture
def events(monkeypatch: pytest.MonkeyPatch) -> Events:
    monkeypatch.setattr(live, "name_of", lambda _: "1/d/shop")
    shared: dict[str, Any] = {}
    monkeypatch.setattr(control_topic, "read", lambda _: shared)
    monkeypatch.setattr(control_topic, "write", lambda _, records: shared.update(records))
    return Events(alias_of("shop"))


def asset_events(events: Events) -> AssetEvents:
    return AssetEvents({"outlet_events": events}, [Asset("mine"), alias_of("shop")], PIPELINE)


def test_an_operators_outlet_is_the_pipelines_alias_beside_those_of_the_user() -> None:
    mine = Asset("mine")
    for made in (
        SnapshotToKafkaOperator(task_id="s", pipeline="shop", outlets=[mine]),
        StreamToKafkaOperator(task_id="s", pipeline={"name": "shop"}, outlets=[mine]),
        BackfillToKafkaOperator(task_id="s", pipeline="shop", tables="a", outlets=[mine]),
    ):
        assert made.outlets == [mine, AssetAlias("bottledwater_shop")]
    # a template is not known before the task runs
    assert StreamToKafkaOperator(task_id="s", pipeline={"name": "{{ params.slot }}"}).outlets == [
        AssetAlias("bottledwater")
    ]
    assert alias_of({}) == AssetAlias("bottledwater")


def test_a_topic_is_an_asset_of_the_kafka_provider() -> None:
    assert topic_uri(PIPELINE, "shop.orders") == "kafka://k1:9092/shop.orders"
    assert Asset(topic_uri(PIPELINE, "shop.orders")).uri == "kafka://k1:9092/shop.orders"


def test_a_snapshot_tells_the_rows_of_each_table(events: Events, monkeypatch: pytest.MonkeyPatch) -> None:
    table = SimpleNamespace(table="public.a", topic="a", rows=7, insert_lsn="0/AB")
    monkeypatch.setattr(status, "known", lambda _: "state")
    outbox = SimpleNamespace(table="public.outbox", topic="events.{type}", rows=0, insert_lsn="")
    monkeypatch.setattr(status, "tables", {"state": [table, outbox]}.__getitem__)
    assert asset_events(events).snapshot() == {"a": 7}
    told = {"topic": "a", "table": "public.a", "by": "snapshot", "rows": 7, "to": "0/AB"}
    assert events.told == [("kafka://k1:9092/a", told)]


def test_a_bounded_run_tells_what_has_changed_since_it_began(events: Events, monkeypatch: pytest.MonkeyPatch) -> None:
    began = ChangeRange("1/d/shop", 5, 5, {"public.a": TopicRange("a", "i", (3,), (3,))})
    found = ChangeRange(
        "1/d/shop",
        5,
        9,
        {"public.a": TopicRange("a", "i", (3,), (7,)), "public.b": TopicRange("b", "j", (2,), (2,))},
    )
    given: list[Any] = []
    monkeypatch.setattr(changes, "present", lambda *of: given.append(of[2]) or (found if of[2] else began))
    kept = asset_events(events).begin()
    asset_events(events).stream(kept)
    assert given == [None, began]
    ((uri, extra),) = events.told
    assert uri.endswith("/a") and extra.pop("payload")["to"] == "0/9"
    assert extra == {"topic": "a", "table": "public.a", "by": "stream", "rows": 4}


def test_what_a_verification_has_published_is_told_by_the_next_bounded_run(
    events: Events, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It publishes in place of one, and its own task tells nothing."""
    places = [ChangeRange("1/d/shop", lsn, lsn, {"public.a": TopicRange("a", "i", (3,), (3,))}) for lsn in (5, 7, 9)]
    left = list(places)
    monkeypatch.setattr(changes, "present", lambda *_: left.pop(0))
    changes.leave_untold(PIPELINE, "1/d/shop")
    # another one has published more since
    changes.leave_untold(PIPELINE, "1/d/shop")
    assert left == places[1:]
    run = asset_events(events)
    assert run.begin() == places[0].as_event() == run.begin()
    # from when on the task's state has it, no later run tells it, too; which does not keep a job from running
    with monkeypatch.context() as patched:
        patched.setattr(control_topic, "write", lambda *_: (_ for _ in ()).throw(Outage("Kafka is away.")))
        run.begun()
    assert run.begin() == places[0].as_event()
    run.begun()
    assert run.begin() == places[1].as_event()


def test_a_databases_name_may_have_a_slash(monkeypatch: pytest.MonkeyPatch) -> None:
    read: list[str] = []
    known = SimpleNamespace(slot="shop", resume_at=SimpleNamespace(lsn=7))
    monkeypatch.setattr(changes, "read_state", lambda _, topic, **__: read.append(topic) or known)
    assert changes.published(PIPELINE, "1/app/eu/shop") == 7
    assert read == [state_topic_name("app/eu", "shop")]


def test_a_backfill_tells_the_topics_of_its_tables(events: Events, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Topics, "__init__", lambda *_: None)
    monkeypatch.setattr(changes, "topics_of", lambda *of: {of[2][0]: SimpleNamespace(name="a")})
    asset_events(events).backfill({"tables": ["public.a"], "rows": 3, "boundary": "0/7"})
    ((_, extra),) = events.told
    assert extra == {
        "topic": "a",
        "table": "public.a",
        "by": "backfill",
        "rows": 3,
        "tables": ["public.a"],
        "to": "0/7",
    }


@pytest.mark.parametrize("lasts", [False, True])
def test_no_task_succeeds_without_its_events(events: Events, monkeypatch: pytest.MonkeyPatch, lasts: bool) -> None:
    """An outage is waited out for a moment; if it lasts, a retry has to tell what no later run would."""
    answers: dict[str, Any] = {}
    begun = ChangeRange("1/d/shop", 5, 5)

    def answer(name: str, found: Any) -> Any:
        def ask(*_: Any) -> Any:
            if lasts or not answers.setdefault(name, []):
                answers.setdefault(name, []).append("away")
                raise Outage("Kafka does not answer.")
            return found

        return ask

    monkeypatch.setattr(assets, "_PATIENCE", 0.05 if lasts else 60.0)
    monkeypatch.setattr(Topics, "__init__", lambda *_: None)
    monkeypatch.setattr(changes, "present", answer("present", begun))
    monkeypatch.setattr(changes, "topics_of", answer("topics", {}))
    monkeypatch.setattr(status, "known", answer("known", "state"))
    monkeypatch.setattr(status, "tables", lambda _: [])
    asked, report = asset_events(events), {"tables": ["public.a"], "rows": 3, "boundary": "0/7"}
    for tell in (asked.begin, lambda: asked.stream(begun.as_event()), asked.snapshot, lambda: asked.backfill(report)):
        answers.clear()
        if lasts:
            with pytest.raises(Outage, match=r"cannot be told .* Kafka does not answer\..* A retry tells all of it"):
                tell()
        else:
            tell()
        assert answers


def test_outside_of_airflow_there_is_nobody_to_tell() -> None:
    nobody = AssetEvents({}, [], PIPELINE)
    assert nobody.begin() == {}
    nobody.stream(ChangeRange("1/d/shop").as_event())
    nobody.backfill({})
