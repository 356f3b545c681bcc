"""What a claim does behind an initialisation: it ends what is left open, and reads the state."""

from __future__ import annotations

import threading
import time
from collections.abc import Mapping
from types import SimpleNamespace
from typing import Any, cast

import pytest

from airflow_bottledwater.backoff import Backoff
from airflow_bottledwater.errors import Outage, StateError
from airflow_bottledwater.model.job import Job
from airflow_bottledwater.model.relation import SourceTable
from airflow_bottledwater.model.slot import Cluster
from airflow_bottledwater.pipeline.settings import Settings
from airflow_bottledwater.state import claim, control_topic, store
from airflow_bottledwater.state.control_records import owner_key
from airflow_bottledwater.state.pinned import PinnedTable
from airflow_bottledwater.state.pipeline_state import PipelineState
from airflow_bottledwater.state.records import IDS, table_key


def test_an_outage_while_transactions_are_ended_is_waited_out_as_any_other(monkeypatch: pytest.MonkeyPatch) -> None:
    steps = list[str]()

    def step(name: str) -> None:
        steps.append(name)
        if outages.pop(0) == name:
            raise Outage("Away.")

    def read(*_: Any, **__: Any) -> PipelineState:
        step("read")
        return PipelineState()

    monkeypatch.setattr(claim, "read_state", read)
    outages = ["release", "", "read", "release", "", ""]
    pipeline = Settings.of(postgres="host=db", format="json")
    claim.read_behind(pipeline, "state", Backoff(5.0), lambda: step("release"))
    # nothing is read before what may be open is ended
    assert steps == ["release", "release", "read", "release", "release", "read"]


@pytest.mark.parametrize("kind", ["stream", "stop"])
def test_transactions_are_looked_for_in_all_topics_of_a_pipeline(monkeypatch: pytest.MonkeyPatch, kind: str) -> None:
    """Also in those that rows of an outbox have chosen; the name of its own topic is none."""
    pipeline, cluster = Settings.of(postgres="host=db", format="json", slot="s"), Cluster("1", 1, "d", 160000)
    a, outbox = (
        SourceTable(oid, "public", name, "d", ("id",), (), outbox=name == "outbox")
        for oid, name in ((1, "a"), (2, "outbox"))
    )
    known = PipelineState()
    known.apply({IDS: claim._ids((), "id")})
    known.apply({table_key(1): PinnedTable(a, "a", "id", 3, 0, 0, 700)})
    known.apply({table_key(2): PinnedTable(outbox, "outbox.{kind}", "", 1, 0, 0, 700)})
    mine, others = cluster.pipeline("s"), cluster.pipeline("other")
    owners = {
        owner_key("outbox.order", mine): {"pipeline": mine},
        owner_key("dropped", mine): {"pipeline": mine, "dropped": True},
        owner_key("b", others): {"pipeline": others},
    }
    looked: list[Mapping[str, int]] = []

    def release(config: object, ids: object, topics: Mapping[str, int], **_: object) -> bool:
        looked.append(topics)
        return False

    monkeypatch.setattr(claim, "release", release)
    monkeypatch.setattr(control_topic, "read", lambda kafka: owners)
    made = object.__new__(claim.Claim)
    made.pipeline, made.cluster, made.topic, made._backoff = pipeline, cluster, "state", Backoff(5.0)
    describe = {name: SimpleNamespace(partitions=3) for name in ("state", "a", "b", "outbox.order", "dropped")}
    made._admin = cast(
        Any, SimpleNamespace(describe=lambda names, **_: {n: describe[n] for n in names if n in describe})
    )
    made.job = Job.next(None, kind)
    made._release(known)
    assert looked == [{"state": 3, "a": 3, "outbox.order": 3} if kind == "stream" else {"state": 3}]


@pytest.mark.parametrize("record", [{table_key(1): {"later": 1}}, {"later": {}}])
def test_a_state_that_a_newer_version_has_written_is_not_claimed(
    monkeypatch: pytest.MonkeyPatch, record: dict[str, Any]
) -> None:
    made = object.__new__(claim.Claim)
    made.pipeline, made.cluster = Settings.of(postgres="host=db", format="json"), Cluster("1", 1, "d", 160000)
    made.topic, made._admin = "state", cast(Any, None)
    monkeypatch.setattr(store, "read_records", lambda *_, **__: record)
    monkeypatch.setattr(made, "_send", lambda _: pytest.fail("the slot was claimed"), raising=False)
    with pytest.raises(StateError, match=r"a record '(table/1|later)' that"):
        made._claim("stream")


def test_a_state_that_was_not_read_for_long_is_read_from_its_start(monkeypatch: pytest.MonkeyPatch) -> None:
    """A stream reads it on after errors only, between which compaction removes tombstones."""
    made = object.__new__(claim.Claim)
    made.pipeline, made.topic = Settings.of(postgres="host=db", format="json"), "state"
    made._admin = cast(Any, SimpleNamespace(ends=lambda *_: [5]))
    made._reader, made._reading, made._read = None, threading.Lock(), 0.0
    readers = list[Any]()

    def reader(*_: object) -> Any:
        readers.append(SimpleNamespace(at=5, read_to=lambda end, timeout: {}, close=lambda: None))
        return readers[-1]

    monkeypatch.setattr(store, "Reader", reader)
    made._read_on()
    made._read_on()
    assert len(readers) == 1
    made._read = time.monotonic() - store.READ_ON - 1
    made._read_on()
    assert len(readers) == 2
