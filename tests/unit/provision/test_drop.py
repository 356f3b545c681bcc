"""What a drop deletes, in which order: one that dies can be repeated, until nothing is left."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest

from airflow_bottledwater.errors import Outage, SettingError, StateError
from airflow_bottledwater.model.relation import SourceTable
from airflow_bottledwater.model.slot import Cluster
from airflow_bottledwater.pipeline.settings import Settings
from airflow_bottledwater.provision import drop
from airflow_bottledwater.state import control_topic
from airflow_bottledwater.state.control_records import (
    OwnerRecord,
    SnapshotReport,
    SnapshotRequest,
    StopRequest,
    TableRequest,
    VerifiedRecord,
    encode,
    owner_key,
    reading_key,
    request_key,
    snapshot_key,
    status_key,
    table_requests_prefix,
    verified_key,
)
from airflow_bottledwater.state.pinned import PinnedTable
from airflow_bottledwater.state.pipeline_state import PipelineState
from airflow_bottledwater.state.records import (
    CLAIM,
    IDS,
    INTENT,
    LETTERS,
    SAVED_SETTINGS,
    Ids,
    Intent,
    Letters,
    SavedSettings,
    letters_key,
    table_key,
)
from airflow_bottledwater.state.records import encode as encoded
from tests.support.status import status_of

PIPELINE = Settings.of(postgres="host=db", kafka={"bootstrap.servers": "k"}, slot="shop", format="json")
HERE, GONE = Cluster("1", 1, "db", 160000), Cluster("2", 1, "db", 160000)
RENAMED = Cluster("1", 1, "former", 160000)


class Killed(BaseException):
    """As kill -9 would end it."""


class World:
    """A pipeline's records in both state topics, of a job that was stopped for good.

    :ivar left: how many records may be written before the process dies.
    """

    def __init__(self, monkeypatch: pytest.MonkeyPatch, cluster: Cluster) -> None:
        name, self.left = cluster.pipeline("shop"), 1000
        self.kept = {
            status_key("other"): encode(status_of()),
            owner_key("chosen", "other"): encode(OwnerRecord("other")),
        }
        self.topics = {
            owner_key("shop.a", name): encode(OwnerRecord(name)),
            owner_key("chosen", name): encode(OwnerRecord(name, shared=True)),
            owner_key("given.up", name): encode(OwnerRecord(name, 5.0, dropped=True)),
        }
        self.shared: dict[str, Any] = {
            **self.kept,
            **self.topics,
            status_key(name): encode(status_of("stopped", retired=True)),
            verified_key(name): encode(VerifiedRecord()),
            request_key(name): encode(StopRequest("request")),
            f"{table_requests_prefix(name)}1": encode(TableRequest((1,), True)),
            snapshot_key(name, "s"): encode(SnapshotRequest(("a",))),
            reading_key(name, "s"): encode(SnapshotReport("reading")),
        }
        self.status = self.shared[status_key(name)]
        self.state: dict[str, Any] = {
            CLAIM: encoded(status_of().job),
            IDS: encoded(Ids(("id",))),
            INTENT: encoded(Intent("shop", "shop", 0.0, cluster.system_identifier, "root", "json", "")),
            letters_key(1, "stream"): encoded(Letters("a", 3, 2)),
            letters_key(2, "stream"): encoded(Letters("b", 3, 3)),
        }
        world = self

        class Claim:
            def __init__(self, pipeline: Settings, of: Cluster, *_: object) -> None:
                assert of.pipeline(pipeline.slot) == name
                self.state = PipelineState(dict(world.state))

            def write(self, values: dict[str, Any]) -> None:
                world.dies_before()
                kept = {key: encoded(value) for key, value in values.items() if value is not None}
                assert all(key.startswith(LETTERS) for key in kept)
                world.state = {key: value for key, value in world.state.items() if key not in values} | kept

            def close(self) -> None:
                pass

        def write(_: object, records: dict[str, Any]) -> None:
            for key, value in records.items():
                self.dies_before()
                self.shared.pop(key, None)
                if value is not None:
                    self.shared[key] = value

        @contextmanager
        def session(*_: object) -> Iterator[None]:
            yield

        monkeypatch.setattr(control_topic, "read", lambda _: dict(self.shared))
        monkeypatch.setattr(control_topic, "write", write)
        monkeypatch.setattr(drop, "session", session)
        monkeypatch.setattr(drop, "identify", lambda _: HERE)
        monkeypatch.setattr(drop, "exists", lambda _, database: database == "db")
        monkeypatch.setattr(drop, "Claim", Claim)
        topic = f"_bottledwater.{cluster.database}.shop"
        monkeypatch.setattr(drop, "read_own", lambda *_: PipelineState(dict(self.state)))
        monkeypatch.setattr(
            drop, "read_state", lambda _, read: PipelineState(dict(self.state) if read == topic else {})
        )
        monkeypatch.setattr(drop.slot, "state", lambda *_: None)
        monkeypatch.setattr(drop.slot, "states", lambda *_: [])
        monkeypatch.setattr(drop.slot, "streaming", lambda *_: [])
        monkeypatch.setattr(drop.slot, "drop", lambda *_: False)
        monkeypatch.setattr(drop.publication, "drop", lambda *_: ([], []))

    def dies_before(self) -> None:
        """A write."""
        self.left -= 1
        if self.left < 0:
            raise Killed

    def acts(self, cluster: Cluster) -> None:
        """What a person does, and repeats."""
        if cluster == HERE:
            drop.drop(PIPELINE, when="retired")
        else:
            drop.forget(PIPELINE, cluster.pipeline("shop"))


@pytest.mark.parametrize("cluster", [HERE, GONE, RENAMED], ids=["drop", "forget-cluster", "renamed"])
def test_a_drop_that_dies_is_finished_by_the_next(monkeypatch: pytest.MonkeyPatch, cluster: Cluster) -> None:
    written = 0
    while True:
        world = World(monkeypatch, cluster)
        world.left = written
        try:
            world.acts(cluster)
        except Killed:
            world.left = 1000
            world.acts(cluster)
            finished = False
        else:
            finished = True
        topics = {key: world.shared.pop(key) for key in world.topics}
        assert world.shared == world.kept, written
        # what they hold is known to be a pipeline's, or not
        assert all(record["dropped"] for record in topics.values())
        assert [record.get("shared", False) for record in topics.values()] == [False, True, False]
        # others may have come after it
        assert topics[owner_key("given.up", cluster.pipeline("shop"))]["at"] == 5.0
        # the next pipeline of this slot settles them, also if it is of another cluster
        letters = Letters("a", 3, 2, "_bottledwater_dead_letters", cluster.pipeline("shop"))
        kept = {letters_key(1, "stream"): encoded(letters)}
        assert world.state.keys() == {CLAIM, IDS, *kept} and world.state.items() >= kept.items()
        if finished:
            break
        written += 1
    assert written > 5
    if cluster != HERE:
        with pytest.raises(StateError, match="has no saved state"):
            world.acts(cluster)


def test_a_pipeline_is_forgotten_by_its_name(monkeypatch: pytest.MonkeyPatch) -> None:
    world = World(monkeypatch, GONE)
    said = drop.forget(PIPELINE.with_(slot="any"), "2/db/shop")
    assert "of pipeline '2/db/shop'" in said and "1 dead letter is open" in said
    # the connection's server may be another one than that of a source that lives
    assert "SELECT pg_drop_replication_slot('shop')" in said
    assert not any(key.startswith("status/2") for key in world.shared)


def test_a_source_that_does_not_answer_is_not_taken_for_one_that_is_gone(monkeypatch: pytest.MonkeyPatch) -> None:
    """The job has ended for good after hours of an outage, and its slot waits for it."""
    world = World(monkeypatch, GONE)
    shared, state = dict(world.shared), dict(world.state)

    def refused(*_: object) -> None:
        raise Outage("PostgreSQL at db does not answer.")

    monkeypatch.setattr(drop, "session", refused)
    with pytest.raises(StateError, match=r"'2/db/shop' is gone is not known.* db does not answer.*the new one"):
        drop.forget(PIPELINE, "2/db/shop")
    assert (world.shared, world.state) == (shared, state)


@pytest.mark.parametrize(
    ("saved", "given", "kept", "shared"),
    [
        ({}, {}, 1, False),
        ({"skip_snapshot": True}, {}, 2, False),
        ({"share_topics": True}, {}, 2, True),
        ({}, {"skip_snapshot": True, "share_topics": True}, 1, False),
    ],
)
def test_a_pipeline_is_forgotten_as_it_was_run(
    monkeypatch: pytest.MonkeyPatch, saved: dict[str, Any], given: dict[str, Any], kept: int, shared: bool
) -> None:
    """The settings that are given are those of another one, or only its connections."""
    world = World(monkeypatch, GONE)
    keyed = SourceTable(3, "public", "c", "d", ("id",), ())
    world.state |= {
        SAVED_SETTINGS: encoded(SavedSettings(saved)),
        table_key(3): encoded(PinnedTable(keyed, "shop.c", "id", 1, 0, 0, 700)),
        letters_key(3, "stream"): encoded(Letters("c", 2, 1)),
    }
    drop.forget(PIPELINE.with_(**given), "2/db/shop")
    assert sum(key.startswith(LETTERS) for key in world.state) == kept
    # its owner record was lost with the shared topic
    assert world.shared[owner_key("shop.c", "2/db/shop")].get("shared", False) is shared


def test_what_is_left_of_a_pipeline_is_deleted_beside_its_successor(monkeypatch: pytest.MonkeyPatch) -> None:
    """An attempt died before it had deleted the status, and the state topic is that of another cluster by now."""
    world = World(monkeypatch, GONE)
    world.state[INTENT] = encoded(Intent("shop", "shop", 0.0, "3", "root", "json", ""))
    state = dict(world.state)
    monkeypatch.setattr(drop, "Claim", None)  # it would end the successor's job
    drop.forget(PIPELINE, "2/db/shop")
    assert world.state == state
    topics = {key: world.shared.pop(key) for key in world.topics}
    assert world.shared == world.kept and all(record["dropped"] for record in topics.values())
    with pytest.raises(StateError, match=r"has no saved state .* belongs to cluster 3"):
        drop.forget(PIPELINE, "2/db/shop")


@pytest.mark.parametrize(
    ("name", "refusal", "why"),
    [
        ("1/db/shop", StateError, "is not gone"),
        ("1/former/shop", StateError, "has no saved state"),
        ("2/db/other", StateError, "has no saved state"),
        ("2", SettingError, "SYSTEM_IDENTIFIER/DATABASE/SLOT"),
        ("2/shop", SettingError, "SYSTEM_IDENTIFIER/DATABASE/SLOT"),
    ],
)
def test_only_a_pipeline_that_is_gone_is_forgotten(
    monkeypatch: pytest.MonkeyPatch, name: str, refusal: type[Exception], why: str
) -> None:
    world = World(monkeypatch, HERE if name == "1/db/shop" else GONE)
    shared, state = dict(world.shared), dict(world.state)
    with pytest.raises(refusal, match=why):
        drop.forget(PIPELINE, name)
    assert (world.shared, world.state) == (shared, state)
