"""Whose the records are that the topics of tables have, before anything is changed in them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import pytest

from airflow_bottledwater.encoding.mapping import TableMapping
from airflow_bottledwater.errors import Refused, StateError
from airflow_bottledwater.kafka.topics import Topic
from airflow_bottledwater.model.relation import Column, ColumnType, SourceTable
from airflow_bottledwater.model.slot import Cluster, SlotRecord
from airflow_bottledwater.pipeline.settings import Settings
from airflow_bottledwater.provision import kafka_checks
from airflow_bottledwater.provision.findings import Findings
from airflow_bottledwater.state import control_topic, records, store
from airflow_bottledwater.state.control_records import OwnerRecord, decode, encode, owner_key
from airflow_bottledwater.state.identity import Owners, check_topic, give_up, own, own_again, shared
from airflow_bottledwater.state.pinned import PinnedTable
from airflow_bottledwater.state.pipeline_state import PipelineState
from airflow_bottledwater.state.records import IDS, SLOT, Former, StateRecord, former_key, table_key

CLUSTER = Cluster("7", 1, "shop", 160000)
MINE, OTHER = CLUSTER.pipeline("shop"), "8/theirs/shop"
TABLE = SourceTable(5, "public", "payments", "d", ("id",), (Column("id", ColumnType(23, -1, 23, -1, "b", "integer")),))
COMPACTED = Topic("payments", "id", 1, 1000, "compact", True, True)


def known(records: Mapping[str, StateRecord | None]) -> PipelineState:
    found = PipelineState()
    found.apply(records)
    return found


class World:
    """A Kafka with the topic ``payments``, and the shared topic."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.topic, self.has_records, self.records = COMPACTED, True, dict[str, dict[str, Any]]()
        monkeypatch.setattr(kafka_checks, "Topics", lambda _: self)
        monkeypatch.setattr(control_topic, "read", lambda _: dict(self.records))
        monkeypatch.setattr(control_topic, "write", lambda _, records: self.records.update(records))

    def names(self) -> list[str]:
        return ["payments"]

    def replicas(self, wanted: int) -> int:
        return 1

    def describe(self, names: Sequence[str]) -> dict[str, Topic]:
        return {name: self.topic for name in names if name == "payments"}

    def uncreatable(self, _: object) -> dict[str, str]:
        return {}

    def all_ends(self, topics: Mapping[str, int]) -> dict[str, list[int]]:
        return {name: [9] for name in topics}

    def filled(self, topics: Mapping[str, int]) -> set[str]:
        return {*topics} if self.has_records else set()

    def problems(self, state: PipelineState | None = None, **settings: Any) -> str:
        pipeline = Settings.of(postgres="host=db", slot="shop", tables="*", **{"format": "json", **settings})
        return " ".join(kafka_checks.check_topics(pipeline, CLUSTER, state or PipelineState(), {"payments": TABLE}))


@pytest.fixture
def world(monkeypatch: pytest.MonkeyPatch) -> World:
    return World(monkeypatch)


STRANGE = "no pipeline is known to have published them"


def test_a_topic_with_the_records_of_another_program_is_refused(world: World) -> None:
    assert STRANGE in world.problems()


def test_nothing_is_advised_that_would_harm_who_has_published_them(world: World) -> None:
    world.topic = replace(COMPACTED, cleanup="delete", retention_ms=1000)
    assert "cleanup.policy=compact" not in world.problems()
    world.has_records = False
    assert "cleanup.policy=compact" in world.problems()


def test_an_empty_topic_is_taken(world: World) -> None:
    world.has_records = False
    assert not world.problems()


def test_a_topic_is_shared_at_a_persons_word(world: World) -> None:
    assert not world.problems(share_topics=True)


@pytest.mark.parametrize(("name", "dropped"), [(MINE, False), (MINE, True), (OTHER, True)])
def test_what_a_pipeline_has_published_is_taken_up_by_the_next_one(world: World, name: str, dropped: bool) -> None:
    world.records[owner_key("payments", name)] = encode(OwnerRecord(name, 1.0, dropped))
    assert not world.problems()


@pytest.mark.parametrize("dropped", [False, True])
def test_what_was_shared_with_other_programs_is_not_taken_up(world: World, dropped: bool) -> None:
    """A pipeline that was dropped, or that was killed while it was made, and has other settings now."""
    pipeline = Settings.of(postgres="host=db", share_topics=True)
    own(pipeline, MINE, ["payments"], shared=True)
    world.records[owner_key("payments", MINE)] |= {"dropped": dropped}
    assert "would delete all keys" in world.problems() and "has shared it with other programs" in world.problems()
    assert not world.problems(share_topics=True)
    world.has_records = False
    assert not world.problems()
    # what is recorded is what was known when the last one has begun
    world.has_records = True
    world.records[owner_key("payments", OTHER)] = encode(OwnerRecord(OTHER, 1.0, dropped=True))
    assert not world.problems()


def test_whether_a_topic_is_shared_is_what_the_last_start_says(world: World) -> None:
    pipeline, key = Settings.of(postgres="host=db"), owner_key("payments", MINE)
    for said in (False, True, True, False):
        own(pipeline, MINE, ["payments"], shared=said)
        found = decode(OwnerRecord, world.records[key])
        assert found is not None and found.shared is said
    before = dict(world.records)
    own(pipeline, MINE, ["payments"], shared=False)
    assert world.records == before, "written once only"


def test_the_owners_of_all_topics_are_found_by_one_reading_of_the_records(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    """There is a record for each of thousands of topics, and a snapshot that asks for them has all tables locked."""

    class Records(dict[str, Any]):
        read = 0

        def items(self) -> Any:
            self.read += 1
            return super().items()

    pipeline, topics = Settings.of(postgres="host=db", slot="shop"), [f"t{number}" for number in range(30)]
    state = known({SLOT: SlotRecord("shop", "7", 1, "shop", consistent_point=1, oldest_xid=3)})
    own(pipeline, MINE, topics, shared=False)
    own(pipeline, OTHER, topics[:1], shared=True)
    for ask in (
        lambda: list(shared(pipeline, state, topics)) == topics[:1],
        lambda: not kafka_checks.owners_problems(pipeline, CLUSTER, state, topics),
        lambda: own(pipeline, MINE, topics, shared=True) != {},
    ):
        records = Records(world.records)
        monkeypatch.setattr(control_topic, "read", lambda _, found=records: found)
        assert ask()
        assert records.read == 1


def test_a_topic_that_no_table_has_any_more_is_given_up(world: World) -> None:
    pipeline = Settings.of(postgres="host=db", transaction_topic="named")
    state = known(
        {
            SLOT: SlotRecord("shop", "7", 1, "shop", consistent_point=1, oldest_xid=3),
            table_key(TABLE.oid): PinnedTable(TABLE, "payments", "id", 1, 0, 0, 3),
            **{former_key(name): Former(6, "public.old") for name in ("old", "payments", "named", "strange")},
        }
    )
    topics = ("old", "payments", "named", "other")
    own(pipeline, MINE, topics, shared=False)
    own(pipeline, OTHER, ["strange"], shared=False)
    give_up(pipeline, state)
    assert [Owners(world.records).names(topic) for topic in topics] == [[], [MINE], [MINE], [MINE]]
    assert Owners(world.records).names("strange") == [OTHER]
    # it may be swept by whoever takes it next, this one as well
    last = Owners(world.records).last("old")
    assert last is not None and not last.shared and not shared(pipeline, state, ["old"])
    before = dict(world.records)
    give_up(pipeline, state)
    assert world.records == before, "written once only"
    # but if another one has it meanwhile, or had it together with other programs
    own(pipeline, OTHER, ["old"], shared=True)
    assert OTHER in shared(pipeline, state, ["old"])["old"]
    other = world.records.pop(owner_key("old", OTHER))
    world.records[owner_key("old", OTHER)] = {**other, "dropped": True}
    assert "others, perhaps" in shared(pipeline, state, ["old"])["old"]
    own_again(pipeline, state)
    assert Owners(world.records).names("old") == []


def test_another_pipeline_that_lives_owns_its_topic(world: World) -> None:
    world.records[owner_key("payments", OTHER)] = encode(OwnerRecord(OTHER, 1.0))
    assert "belongs to pipeline" in world.problems() and STRANGE not in world.problems()
    world.records[owner_key("payments", OTHER)] = encode(OwnerRecord(OTHER, 1.0, shared=True))
    assert "belongs to pipeline" in world.problems() and "delete topic" not in world.problems()


def test_the_topics_of_a_source_that_is_gone_are_not_to_be_shared(world: World) -> None:
    """No sweep takes away what is not in the table any more where topics are shared."""
    world.records[owner_key("payments", OTHER)] = encode(OwnerRecord(OTHER, 1.0))
    assert (
        f"'bottledwater drop-slot --forget-cluster {OTHER}'. If it is not, use another topic_prefix" in world.problems()
    )
    # one of the same database is dropped as any other
    same = CLUSTER.pipeline("another")
    world.records = {owner_key("payments", same): encode(OwnerRecord(same, 1.0))}
    assert f"belongs to pipeline {same!r}. Use another topic_prefix" in world.problems()


def test_preflight_tries_the_ids_of_the_cluster_before_and_fences_nobody(monkeypatch: pytest.MonkeyPatch) -> None:
    """A claim initialises all ids that the slot ever had, also those from before pg_upgrade."""
    mine, before = records.id_prefix(CLUSTER, "shop"), records.id_prefix(replace(CLUSTER, database="my-shop"), "shop")
    used = [of(each) for each in (mine, before) for of in (records.state_writer_id, records.stream_id)]
    used.append(records.lane_id(before, 3))
    opened: list[str] = []

    class Producer:
        def __init__(self, _: object, transactional_id: str, *__: object, **___: object) -> None:
            self.id = transactional_id

        def open(self) -> None:
            opened.append(self.id)
            if self.id.startswith(before):
                raise Refused(f"Kafka denies transactional id {self.id!r}.")

        def close(self) -> None:
            pass

    world = World(monkeypatch)
    monkeypatch.setattr(kafka_checks, "TransactionalProducer", Producer)
    monkeypatch.setattr(kafka_checks, "check_properties", lambda _: None)
    monkeypatch.setattr(world, "describe", lambda names: {})
    problems: list[str] = []
    findings = Findings(CLUSTER, state=known({IDS: records.Ids(tuple(used))}))
    kafka_checks.check_kafka(Settings.of(postgres="host=db", slot="shop", format="json"), findings, problems)
    assert problems == [f"Kafka denies transactional id '{before}-preflight'."]
    assert sorted(opened) == sorted(f"{each}-preflight" for each in (mine, before)) and not {*opened} & {*used}


def test_who_was_dropped_owns_nothing_until_it_comes_again(world: World) -> None:
    key = owner_key("payments", MINE)
    world.records[key] = encode(OwnerRecord(MINE, 1.0, dropped=True))
    assert Owners(world.records).names("payments") == []
    own(Settings.of(postgres="host=db"), MINE, ["payments"], shared=False)
    assert Owners(world.records).names("payments") == [MINE]


def test_a_table_that_is_followed_already_is_not_asked_about(world: World) -> None:
    pinned = PinnedTable(TABLE, "payments", "id", 1, 0, 0, 3)
    assert not world.problems(known({table_key(TABLE.oid): pinned}))


def test_what_will_be_swept_has_to_be_readable_before_it_is_read(world: World) -> None:
    world.records[owner_key("payments", MINE)] = encode(OwnerRecord(MINE, 1.0))
    world.topic = replace(COMPACTED, may_read=False)
    assert "denies Read on topic 'payments'" in world.problems()
    assert not world.problems(share_topics=True)
    assert not world.problems(skip_snapshot=True)
    world.has_records = False
    assert not world.problems()


SERVICE = {"events": "p._bottledwater_events", "letters": "p._bottledwater_dead_letters"}


def forgetting(name: str, settings: dict[str, Any], **changes: Any) -> list[str]:
    topic = replace(COMPACTED, name=name, **{"cleanup": "delete", "retention_ms": 1000, **changes})
    pipeline = Settings.of(postgres="host=db", topic_prefix="p", format="json", **settings)
    return [str(each) for each in kafka_checks.expiring(pipeline, ["p.payments"], {name: topic})]


@pytest.mark.parametrize(
    ("name", "settings", "said"),
    [
        ("p.payments", {}, "rows that do not change"),
        ("p.payments", {"allow_expiry": True}, ""),
        ("p.without_key", {}, ""),
        (SERVICE["events"], {}, "the event of a TRUNCATE"),
        (SERVICE["events"], {"allow_expiry": True}, ""),
        (SERVICE["events"], {"on_truncate": "stop"}, ""),
        (SERVICE["letters"], {"on_error": "log"}, "dead letters"),
        (SERVICE["letters"], {"on_error": "exit"}, ""),
        ("_bottledwater", {}, "what is written once"),
        ("_bottledwater.shop.shop", {"allow_expiry": True}, "what is written once"),
    ],
)
def test_what_has_to_stay_is_not_deleted_by_its_age(name: str, settings: dict[str, Any], said: str) -> None:
    found = forgetting(name, settings)
    assert len(found) == bool(said)
    assert not said or (
        said in found[0]
        and f"--bootstrap-server localhost:9092 --alter --entity-type topics --entity-name {name} --add-config"
        in found[0]
    )
    assert not forgetting(name, settings, cleanup="compact")


@pytest.mark.parametrize("name", SERVICE.values())
def test_a_topic_of_the_pipeline_is_made_as_it_is_demanded(name: str) -> None:
    """Also by a person, who reads how to make it again."""
    pipeline = Settings.of(
        postgres="host=db", topic_prefix="p", format="json", on_error="log", unkeyed_retention_ms=1000
    )
    made = kafka_checks.new_topic(pipeline, name, None, 1)
    config = made.configs[0]
    topic = replace(
        COMPACTED, name=name, cleanup=config["cleanup.policy"], retention_ms=int(config.get("retention.ms", 1000))
    )
    assert made.partitions == 1 and not kafka_checks.expiring(pipeline, ["p.payments"], {name: topic})
    with pytest.raises(StateError) as gone:
        check_topic(pipeline.kafka, name, None, None)
    for key in config.keys() & {"cleanup.policy", "retention.ms"}:
        assert f"{key}={config[key]}" in str(gone.value)


@pytest.mark.parametrize("table", [TABLE, None], ids=["table", "service"])
def test_a_topic_is_safe_where_the_broker_allows_its_properties(table: SourceTable | None) -> None:
    pipeline = Settings.of(postgres="host=db", topic_prefix="p")
    name = "p.payments" if table else SERVICE["events"]
    *safe, last = kafka_checks.new_topic(pipeline, name, table, 3).configs
    assert all(config.get("min.insync.replicas") == "2" for config in safe[:2])
    assert "min.insync.replicas" not in last and last["cleanup.policy"]
    assert all("min.insync.replicas" not in each for each in kafka_checks.new_topic(pipeline, name, table, 1).configs)
    chosen = pipeline.with_(topic_config={"min.insync.replicas": "3"})
    insync = {each.get("min.insync.replicas") for each in kafka_checks.new_topic(chosen, name, table, 3).configs}
    assert insync == ({"3"} if table else {"2", None})


def test_a_tombstone_is_kept_for_a_reader_who_was_away_for_days() -> None:
    """Where rows are deleted by tombstones; for an hour in a slot's own topic, all of which is read at once, with a
    marker for each commit."""
    pipeline, week, hour = Settings.of(postgres="host=db"), str(7 * 86400 * 1000), str(3600 * 1000)
    state_topic = store.state_topic_name("shop", "shop")
    for made, kept in (
        (kafka_checks.new_topic(pipeline, "payments", TABLE, 1), week),
        (kafka_checks.new_topic(pipeline, "log", replace(TABLE, identity="n", key=()), 1), None),
        (store.new_topic(store.CONTROL_TOPIC, 1), None),
        (store.new_topic(state_topic, 1), hour),
    ):
        assert made.configs[0].get("delete.retention.ms") == kept
        assert "delete.retention.ms" not in made.configs[-1], "a broker may not allow it"
    chosen = pipeline.with_(topic_config={"delete.retention.ms": "5"})
    assert kafka_checks.new_topic(chosen, "payments", TABLE, 1).configs[0]["delete.retention.ms"] == "5"


@pytest.mark.parametrize(
    ("database", "says"),
    [("d" * 220, "a shorter slot name"), ("ы" * 40, "rename the database")],
    ids=["slot", "database"],
)
def test_what_makes_the_name_of_the_state_topic_too_long_is_said(database: str, says: str) -> None:
    topic = store.state_topic_name(database, "s" * 20)
    pipeline = Settings.of(postgres="host=db")
    (problem,) = kafka_checks.name_problems(TableMapping.of(pipeline), {}, {}, [topic, store.CONTROL_TOPIC])
    assert says in problem
