"""Single tables that a person pauses under a running stream: nothing of them is published until they go on, the others
do not notice it, and what was left out is read then."""

from __future__ import annotations

import time

import psycopg
import pytest

from airflow_bottledwater.errors import PreflightError, Refused, SettingError, StateError
from airflow_bottledwater.jobs.open_requests import OpenRequests
from airflow_bottledwater.kafka.topics import Topics
from airflow_bottledwater.local.registry import SchemaRegistry
from airflow_bottledwater.provision import live, pausing, redrive
from airflow_bottledwater.provision.accept import accept
from airflow_bottledwater.provision.drop import drop
from airflow_bottledwater.state import control_topic, schemas
from airflow_bottledwater.state.claim import read_state
from airflow_bottledwater.state.control_records import (
    REQUEST,
    SnapshotRequest,
    StatusRecord,
    StopRequest,
    encode,
    request_key,
)
from airflow_bottledwater.verify import driver as verification
from tests.support.registry_front import RegistryFront, fronted
from tests.support.tables import look_often, problems
from tests.support.topics import Flow, MakeFlow, assert_exactly_once_in_order, limit_records
from tests.support.waiting import until
from tests.support.writers import state_topic


@pytest.fixture(autouse=True)
def often_looked_at(monkeypatch: pytest.MonkeyPatch) -> None:
    """The catalog is looked at ten times a second."""
    look_often(monkeypatch, interval=1.0)


def _make(make_flow: MakeFlow, registry: SchemaRegistry | RegistryFront | None = None, **settings: object) -> Flow:
    flow = make_flow(registry, **{"tables": "?", **settings})
    for name in "ab":
        flow.execute(
            f"CREATE TABLE {name} (id int PRIMARY KEY, text text)",
            f"INSERT INTO {name} SELECT g, 'first' FROM generate_series(1, 20) g",
        )
    flow.create()
    flow.snapshot()
    flow.stream()
    return flow


def _ask(flow: Flow, *tables: str, paused: bool) -> tuple[str, str]:
    return pausing.ask(flow.pipeline, tables, paused=paused, by="alice", why="a migration")


def _pause(flow: Flow, *tables: str) -> None:
    assert pausing.carried_out(flow.pipeline, *_ask(flow, *tables, paused=True), timeout=60)


def _resume(flow: Flow, *tables: str) -> None:
    assert pausing.carried_out(flow.pipeline, *_ask(flow, *tables, paused=False), timeout=60)


def _equal(flow: Flow, errors: list[BaseException], *tables: str) -> None:
    until(lambda: all(flow.compare(each).equal for each in tables), f"topics are {tables}", pause=0.3, failed=errors)


@pytest.mark.parametrize("format", ["json", pytest.param("avro", marks=pytest.mark.long)])
def test_a_table_is_paused_and_goes_on_while_the_others_do_not_notice(
    make_flow: MakeFlow, registry: SchemaRegistry, format: str
) -> None:
    flow = _make(make_flow, registry if format == "avro" else None)
    with flow.streaming() as errors:
        flow.execute("UPDATE a SET text = 'before' WHERE id < 5")
        _equal(flow, errors, "a")
        _pause(flow, "a")
        before = _offsets(flow, "a")
        flow.transaction(
            "UPDATE a SET text = 'meanwhile'", "UPDATE b SET text = 'meanwhile'", "DELETE FROM a WHERE id > 15"
        )
        flow.transaction("INSERT INTO b VALUES (30, 'meanwhile')", "INSERT INTO a VALUES (30, 'meanwhile')")
        _equal(flow, errors, "b")
        until(lambda: "public.a" in problems(flow), "it is told", failed=errors)
        problem = problems(flow)["public.a"]
        assert problem.kind == "paused" and "bottledwater resume-table --tables public.a" in problem.remedy
        assert problem.reason.startswith("It was paused by alice on 2") and "(a migration)" in problem.reason
        assert _offsets(flow, "a") == before
        # they are left out where they come from, so that nobody is asked about them
        until(lambda: _job(flow).progress["skipped_by_table"].get("public.a"), "they are counted", failed=errors)
        (result,) = verification.run(
            flow.pipeline.with_(verify_tables=("a",)), verification.in_threads(flow.pipeline)
        ).tables
        assert not result.verified and "was paused by alice" in result.reason
        _resume(flow, "a")
        flow.transaction("UPDATE a SET text = 'after' WHERE id = 1", "UPDATE b SET text = 'after' WHERE id = 1")
        _equal(flow, errors, "a", "b")
        until(lambda: not problems(flow), "nothing is wrong any more", failed=errors)
        flow.transaction("UPDATE a SET text = 'later' WHERE id = 2", "DELETE FROM b WHERE id = 2")
        _equal(flow, errors, "a", "b")
        # what is counted goes on over these begins
        until(lambda: _job(flow).counters.get("transactions", 0) >= 5, "all transactions count", failed=errors)
        assert _job(flow).counters["skipped_changes"] >= 26
    assert errors == []
    if format == "json":
        assert_exactly_once_in_order(flow.read("b"))
        assert len([m for m in flow.read("b") if m.value and m.value["text"] == "meanwhile"]) == 21


def _job(flow: Flow) -> StatusRecord:
    found = flow.job
    assert found is not None
    return found


def _offsets(flow: Flow, table: str) -> int:
    topics = Topics(flow.pipeline.kafka)
    topic = flow.topic(table)
    return sum(topics.ends(topic, topics.describe([topic])[topic].partitions))


def _held(flow: Flow) -> bool:
    return bool(read_state(flow.pipeline, state_topic(flow)).held)


@pytest.mark.long
def test_what_no_job_hears_waits_for_the_next_one_which_publishes_nothing_before(
    make_flow: MakeFlow, monkeypatch: pytest.MonkeyPatch
) -> None:
    flow = _make(make_flow)
    before = len(flow.read("a"))
    flow.transaction("UPDATE a SET text = 'too early'", "UPDATE b SET text = 'published'")
    asked = _ask(flow, "a", paused=True)
    assert pausing.outcome(flow.pipeline, *asked).startswith("No job of slot")
    with monkeypatch.context() as patch:
        # whatever comes later, what was asked for before is known at the start
        patch.setattr(OpenRequests, "poll", lambda _: None)
        flow.stream()
    assert _held(flow) and len(flow.read("a")) == before and flow.compare("b").equal
    # a later start, and one that is asked for what is so already
    _ask(flow, "a", paused=True)
    flow.execute("UPDATE a SET text = 'meanwhile'", "TRUNCATE a", "INSERT INTO a VALUES (7, 'after')")
    flow.stream()
    assert len(flow.read("a")) == before
    with pytest.raises(Refused, match="cannot be read now: it was paused by alice"):
        live.ask(flow.pipeline, SnapshotRequest(("a",)))
    # the last word counts
    _ask(flow, "a", paused=False)
    _ask(flow, "a", paused=True)
    flow.stream()
    assert _held(flow)
    _ask(flow, "a", paused=False)
    flow.stream()
    assert not _held(flow) and flow.compare("a").equal
    assert_exactly_once_in_order(flow.read("b"))


@pytest.mark.long
def test_what_is_done_to_a_paused_table_is_taken_up_when_it_goes_on(make_flow: MakeFlow) -> None:
    flow = _make(make_flow)
    flow.execute("ALTER TABLE b ADD other int NOT NULL DEFAULT 0")
    with flow.streaming() as errors:
        _pause(flow, "a", "b")
        flow.execute("CREATE TABLE c (id int PRIMARY KEY)", "INSERT INTO c VALUES (1)")
        flow.transaction(
            "UPDATE a SET text = 'of before'", "ALTER TABLE a DROP COLUMN text, ADD n int", "UPDATE a SET n = id"
        )
        flow.execute(
            "UPDATE b SET other = id + 100",
            "ALTER TABLE b DROP CONSTRAINT b_pkey, ADD PRIMARY KEY (other)",
            "DELETE FROM b WHERE id = 7",
        )
        _equal(flow, errors, "c")
        _resume(flow, "*")
        _equal(flow, errors, "a", "b", "c")
        until(lambda: not problems(flow), "nothing is wrong any more", failed=errors)
        flow.execute("UPDATE a SET n = 1", "UPDATE b SET text = 'later'")
        _equal(flow, errors, "a", "b")
    assert errors == []


@pytest.mark.long
def test_a_paused_table_that_the_settings_do_not_name_any_more_is_told_and_read_when_it_goes_on(
    make_flow: MakeFlow,
) -> None:
    flow = _make(make_flow)
    _ask(flow, "a", paused=True)
    flow.stream()
    flow.execute("UPDATE a SET text = 'meanwhile'")
    flow.change(tables=("b",))
    with flow.streaming() as errors:
        until(lambda: "public.a" in problems(flow), "it is told", failed=errors)
        _resume(flow, "a")
        _equal(flow, errors, "a", "b")
    assert errors == []


@pytest.mark.long
def test_a_paused_table_whose_new_keys_are_accepted_stays_paused(make_flow: MakeFlow) -> None:
    flow = make_flow(tables="a", json_numeric="string")
    flow.execute("CREATE TABLE a (id numeric PRIMARY KEY, text text)", "INSERT INTO a VALUES (1.5, 'first'), (2, NULL)")
    flow.create()
    flow.snapshot()
    _ask(flow, "a", paused=True)
    flow.stream()
    flow.change(json_numeric="number")
    flow.execute("UPDATE a SET text = 'meanwhile'")
    assert accept(flow.pipeline, ["a"]) == ["public.a"]
    flow.stream()
    known = read_state(flow.pipeline, state_topic(flow))
    assert known.held == known.accepted == known.tables.keys() and len(flow.read("a")) == 2
    assert problems(flow)["public.a"].reason.startswith("It was paused by alice")
    _ask(flow, "a", paused=False)
    flow.stream()
    assert not problems(flow)
    assert {m.key["id"]: m.value and m.value["text"] for m in flow.read("a")} == {
        "1.5": None, "2": None, 1.5: "meanwhile", 2: "meanwhile",
    }  # fmt: skip


@pytest.mark.long
def test_a_table_that_bears_the_name_of_a_paused_one_is_paused_in_its_place(make_flow: MakeFlow) -> None:
    flow = _make(make_flow)
    with flow.streaming() as errors:
        _pause(flow, "a")
        before = len(flow.read("a"))
        (old,) = read_state(flow.pipeline, state_topic(flow)).held
        flow.transaction(
            "ALTER TABLE a RENAME TO x", "CREATE TABLE a (id int PRIMARY KEY)", "INSERT INTO a VALUES (99)"
        )
        flow.execute("UPDATE x SET text = 'meanwhile'", "UPDATE b SET text = 'meanwhile'")

        def passed() -> bool:
            known = read_state(flow.pipeline, state_topic(flow))
            topics = {oid: pinned.topic for oid, pinned in known.tables.items()}
            return topics.get(old) == flow.topic("x") and len(known.held) == 2

        until(passed, "both are paused", failed=errors)
        _equal(flow, errors, "b")
        assert len(flow.read("a")) == before and flow.read("x") == []
        _resume(flow, "a")
        _equal(flow, errors, "a")
        assert flow.read("x") == []
        _resume(flow, "x")
        _equal(flow, errors, "a", "b", "x")
        _pause(flow, "x")
        flow.execute("DROP TABLE x")
        until(lambda: not problems(flow), "nothing is wanted of a table that was dropped", failed=errors)
    assert errors == []


@pytest.mark.long
def test_a_live_snapshot_goes_on_without_a_table_that_is_paused(make_flow: MakeFlow) -> None:
    flow = _make(make_flow)
    with psycopg.connect(flow.dsn) as locked:
        locked.execute("LOCK TABLE a")
        with flow.streaming() as errors:
            asked = flow.ask("a", "b")
            until(lambda: read_state(flow.pipeline, state_topic(flow)).lives, "it is recorded", failed=errors)
            _pause(flow, "a")
            locked.rollback()
            until(lambda: flow.reported(asked).state == "finished", "it ends", failed=errors)
            assert len(flow.read("a")) == 20 and len(flow.read("b")) == 40
            _resume(flow, "a")
            until(lambda: len(flow.read("a")) == 40, "all of its rows are read", failed=errors)
    assert errors == []


def test_what_cannot_be_paused_is_refused_at_once(make_flow: MakeFlow) -> None:
    flow = make_flow(tables="?,??", allow_unkeyed=True)
    flow.execute("CREATE TABLE a (id int PRIMARY KEY)", "CREATE TABLE un (id int)", "CREATE TABLE foreigner (id int)")
    flow.create()
    with pytest.raises(StateError, match="is not complete"):
        _ask(flow, "a", paused=True)
    flow.snapshot()
    for tables, error, message in (
        ((), SettingError, "at least one table"),
        (("nowhere",), PreflightError, "nowhere"),
        (("a", "un"), Refused, r"public.un: no key, so that what is left out.* \(bottledwater stop\)\.$"),
        (("foreigner",), Refused, "public.foreigner: not followed by slot"),
    ):
        with pytest.raises(error, match=message):
            _ask(flow, *tables, paused=True)
    flow.change(share_topics=True)
    with pytest.raises(Refused, match="cannot be paused: topic"):
        _ask(flow, "a", paused=True)
    flow.stream()
    assert not _held(flow)


def test_what_nobody_has_answered_is_forgotten_with_the_pipeline(make_flow: MakeFlow) -> None:
    flow = _make(make_flow)
    _ask(flow, "a", paused=True)
    control_topic.write(flow.pipeline.kafka, {request_key(flow.name): encode(StopRequest(REQUEST, at=time.time()))})
    drop(flow.pipeline, when="always")
    left = {key: value for key, value in control_topic.read(flow.pipeline.kafka).items() if flow.name in key}
    # where the records of its topics come from stays known
    assert left and all(key.startswith("owner/") and value["dropped"] for key, value in left.items())


@pytest.mark.long
def test_a_registry_that_lost_schemas_has_nothing_of_a_paused_table_published(
    make_flow: MakeFlow, registry: SchemaRegistry, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(schemas, "_AGAIN", (0.1,))
    with fronted(registry) as front:
        flow = _make(make_flow, front)
        _ask(flow, "a", paused=True)
        flow.stream()
        flow.execute("UPDATE a SET text = 'meanwhile'", "UPDATE b SET text = 'meanwhile'")
        tables = read_state(flow.pipeline, state_topic(flow)).tables.values()
        before, front.lost = {each: _offsets(flow, each) for each in "ab"}, {each.value_schema for each in tables}
        with flow.streaming() as errors:
            until(lambda: _offsets(flow, "b") >= before["b"] + 40 and _ended(flow), "it is read", failed=errors)
            assert _offsets(flow, "a") == before["a"] and "public.a" in problems(flow)
            front.lost = set()
            _resume(flow, "a")
            _equal(flow, errors, "a")
    assert errors == []


def _ended(flow: Flow) -> bool:
    return not any(each.unfinished for each in read_state(flow.pipeline, state_topic(flow)).lives.values())


@pytest.mark.long
def test_dead_letters_of_a_paused_table_wait(make_flow: MakeFlow) -> None:
    flow = _make(make_flow, on_error="log")
    limit_records(flow, "a", 20_000)
    flow.execute("INSERT INTO a VALUES (30, repeat('x', 50000))")
    flow.stream()
    _ask(flow, "a", paused=True)
    flow.stream()
    limit_records(flow, "a", 100_000)
    before = len(flow.read("a"))
    assert redrive.redrive(flow.pipeline).failed == 1 and len(flow.read("a")) == before
    _ask(flow, "a", paused=False)
    flow.stream()
    assert flow.compare("a").equal
    found = redrive.redrive(flow.pipeline)
    assert found.failed == 0 and found.published + found.overtaken == 1 and flow.compare("a").equal
