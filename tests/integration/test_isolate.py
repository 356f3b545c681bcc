"""``on_error = isolate``: a table with a record that cannot be published is set aside, and all others go on."""

from __future__ import annotations

from typing import Any

import pytest
from confluent_kafka.schema_registry import SchemaRegistryClient

from airflow_bottledwater.errors import RecordError
from airflow_bottledwater.local.registry import SchemaRegistry
from airflow_bottledwater.provision import pausing
from airflow_bottledwater.state.claim import read_state
from airflow_bottledwater.stream.publisher import StreamPublisher
from tests.support.tables import look_often, problems
from tests.support.topics import Flow, MakeFlow, assert_exactly_once_in_order, limit_records, read
from tests.support.waiting import until
from tests.support.writers import state_topic

#: by the format, a value that cannot be published, and the column's type
BAD = {"json": ("text", "repeat('x', 50000)"), "avro": ("numeric(10, 2)", "'NaN'")}


@pytest.fixture(autouse=True)
def often_looked_at(monkeypatch: pytest.MonkeyPatch) -> None:
    """The catalog is looked at ten times a second."""
    look_often(monkeypatch, interval=1.0)


def _make(make_flow: MakeFlow, registry: SchemaRegistry | None = None, **settings: Any) -> Flow:
    flow = make_flow(registry, **{"tables": "?", "on_error": "isolate", **settings})
    kind = BAD[flow.pipeline.format][0]
    for name in "ab":
        flow.execute(
            f"CREATE TABLE {name} (id int PRIMARY KEY, v {kind})",
            f"INSERT INTO {name} SELECT g, '0' FROM generate_series(1, 20) g",
        )
    flow.create()
    return flow


def _streamed(flow: Flow) -> Flow:
    flow.snapshot()
    flow.stream()
    limit_records(flow, "a", 20_000)
    return flow


def _bad(flow: Flow, *statements: str) -> None:
    """A transaction over both tables, in which a change of ``a`` cannot be published."""
    value = BAD[flow.pipeline.format][1]
    flow.transaction(
        "UPDATE a SET v = '1' WHERE id = 1",
        "UPDATE b SET v = '1' WHERE id = 1",
        f"INSERT INTO a VALUES (100, {value})",
        "UPDATE b SET v = '2' WHERE id = 2",
        *statements,
        "UPDATE a SET v = '3' WHERE id = 3",
        "UPDATE b SET v = '3' WHERE id = 3",
    )


def _resume(flow: Flow) -> None:
    pausing.ask(flow.pipeline, ["a"], paused=False)


def _held(flow: Flow) -> dict[str, str]:
    known = read_state(flow.pipeline, state_topic(flow))
    return {known.tables[oid].table.name: known.gaps[oid].why for oid in known.held}


def _ids(flow: Flow, table: str) -> list[int]:
    """Of the records behind the snapshot, in order."""
    return [m.key["id"] for m in flow.read(table) if m.pos]


def test_a_table_is_set_aside_from_the_transaction_on_and_the_others_have_it_whole(make_flow: MakeFlow) -> None:
    flow = _streamed(_make(make_flow))
    flow.transaction("UPDATE a SET v = 'before' WHERE id = 7", "UPDATE b SET v = 'before' WHERE id = 7")
    _bad(flow)
    flow.transaction("UPDATE a SET v = 'behind' WHERE id = 8", "UPDATE b SET v = 'behind' WHERE id = 8")
    with flow.streaming() as errors:
        until(lambda: 8 in _ids(flow, "b"), "the other goes on", failed=errors)
        flow.transaction("UPDATE a SET v = 'later' WHERE id = 9", "UPDATE b SET v = 'later' WHERE id = 9")
        until(lambda: 9 in _ids(flow, "b"), "and on", failed=errors)
        assert _ids(flow, "a") == [7] and _ids(flow, "b") == [7, 1, 2, 3, 8, 9]
        until(lambda: "public.a" in problems(flow), "it is told", failed=errors)
        problem = problems(flow)["public.a"]
        assert problem.kind == "set-aside" and "the topic's max.message.bytes is 20,000" in problem.reason
        assert problem.reason.startswith("It has a change at 0") and problem.remedy.startswith("Mend the cause. Let")
        assert flow.dead_letters() == []
    # a later start knows it
    flow.transaction("UPDATE a SET v = 'x' WHERE id = 10", "UPDATE b SET v = 'x' WHERE id = 10")
    counted = flow.stream()
    assert _ids(flow, "a") == [7] and counted["published"] == 8 and list(_held(flow)) == ["a"]
    assert_exactly_once_in_order(flow.read("b"))
    # whoever lets it go on too early sees why it does not
    with flow.streaming() as errors:
        _resume(flow)
        until(lambda: "has a row that" in str(problems(flow).get("public.a")), "it is told", failed=errors)
        flow.execute("UPDATE b SET v = 'y'")
        until(lambda: flow.compare("b").equal, "the other goes on", failed=errors)
        limit_records(flow, "a", 100_000)
        _resume(flow)
        until(lambda: flow.compare("a").equal, "all of its rows are read", pause=0.3, failed=errors)
        until(lambda: not problems(flow), "nothing is wrong any more", failed=errors)
        flow.execute("UPDATE a SET v = 'z' WHERE id = 1")
        until(lambda: flow.compare("a").equal, "it is like any other", failed=errors)
    assert errors == []


@pytest.mark.long
def test_a_value_without_a_form_and_a_schema_that_is_refused(make_flow: MakeFlow, registry: SchemaRegistry) -> None:
    flow = _streamed(_make(make_flow, registry))
    _bad(flow)
    flow.stream()
    assert "NaN and infinity" in _held(flow)["a"] and flow.compare("b").equal
    flow.execute("DELETE FROM a WHERE id = 100")
    _resume(flow)
    flow.stream()
    assert flow.compare("a").equal and not _held(flow)
    # one of which no record can be published
    flow.transaction("ALTER TABLE a ALTER v TYPE text", "UPDATE a SET v = 'text' WHERE id = 5", "UPDATE b SET v = 5")
    flow.stream()
    assert "The schema of subject" in _held(flow)["a"] and flow.compare("b").equal
    # also from the beginning, as a DAG begins
    flow.create()
    flow.snapshot()
    flow.transaction("UPDATE a SET v = 'more' WHERE id = 5", "UPDATE b SET v = 6")
    flow.stream()
    assert flow.compare("b").equal and list(_held(flow)) == ["a"]
    SchemaRegistryClient({"url": registry.url}).set_compatibility(f"{flow.topic('a')}-value", level="NONE")
    _resume(flow)
    flow.stream()
    assert flow.compare("a").equal and not _held(flow)


@pytest.mark.long
def test_of_a_truncate_behind_it_only_the_others_are_told(make_flow: MakeFlow) -> None:
    flow = _streamed(_make(make_flow, transaction_topic="transactions"))
    _bad(flow, "TRUNCATE a, b", "TRUNCATE a", "INSERT INTO b VALUES (3, '0')", "INSERT INTO a VALUES (3, '0')")
    flow.stream()
    events = read(flow.kafka, f"{flow.pipeline.topic_prefix}._bottledwater_events")
    assert [each.value["topics"] for each in events] == [[flow.topic("b")]]
    ends = [m.value for m in read(flow.kafka, f"{flow.pipeline.topic_prefix}.transactions")]
    assert ends[-1]["topics"] == {flow.topic("b"): 4, f"{flow.pipeline.topic_prefix}._bottledwater_events": 1}
    assert list(_held(flow)) == ["a"] and _ids(flow, "a") == []


@pytest.mark.long
def test_a_table_may_have_the_policy_alone(make_flow: MakeFlow) -> None:
    flow = _make(make_flow, on_error="exit", table_options={"a": {"on_error": "isolate"}})
    _streamed(flow)
    limit_records(flow, "b", 20_000)
    _bad(flow)
    flow.stream()
    assert list(_held(flow)) == ["a"]
    flow.transaction("UPDATE a SET v = 'x'", "INSERT INTO b VALUES (100, repeat('x', 50000))")
    with pytest.raises(RecordError, match=r"public\.b"):
        flow.stream()
    assert flow.dead_letters() == []


@pytest.mark.long
def test_the_change_that_a_person_skips_sets_nothing_aside(make_flow: MakeFlow) -> None:
    flow = _streamed(_make(make_flow))
    flow.change(on_error="exit")
    _bad(flow)
    with pytest.raises(RecordError) as raised:
        flow.stream()
    flow.change(on_error="isolate", skip_position=str(raised.value.position))
    flow.stream()
    assert not _held(flow) and _ids(flow, "a") == [1, 3] and len(flow.dead_letters()) == 1


@pytest.mark.long
def test_a_transaction_that_is_published_in_parts(make_flow: MakeFlow) -> None:
    flow = _streamed(_make(make_flow, max_transaction_bytes=1 << 16, batch_bytes=1 << 16))
    flow.transaction(
        "INSERT INTO a SELECT g, repeat('x', 500) FROM generate_series(1000, 1299) g",
        "INSERT INTO b SELECT g, repeat('x', 500) FROM generate_series(1000, 1299) g",
        "UPDATE a SET v = repeat('x', 50000) WHERE id = 1000",
        "UPDATE b SET v = 'x' WHERE id BETWEEN 1000 AND 1299",
        "UPDATE a SET v = 'x'",
    )
    flow.stream()
    assert list(_held(flow)) == ["a"] and flow.compare("b").equal
    assert_exactly_once_in_order(flow.read("b"))
    flow.execute("UPDATE a SET v = 'x' WHERE id = 1000")
    _resume(flow)
    flow.stream()
    assert flow.compare("a").equal and flow.compare("b").equal


def test_an_attempt_that_is_lost_sets_it_aside_at_the_same_place(
    make_flow: MakeFlow, monkeypatch: pytest.MonkeyPatch
) -> None:
    flow = _streamed(_make(make_flow))
    _bad(flow)
    send, lost = StreamPublisher._send, list[str]()

    def sent(publisher: StreamPublisher, encoded: Any) -> None:
        if encoded.gaps and not lost:
            lost.append("it")
            raise KeyboardInterrupt
        send(publisher, encoded)

    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(StreamPublisher, "_send", sent)
        flow.stream()
    assert not _held(flow) and _ids(flow, "b") == []
    flow.transaction("UPDATE a SET v = 'behind' WHERE id = 8", "UPDATE b SET v = 'behind' WHERE id = 8")
    flow.stream()
    assert list(_held(flow)) == ["a"] and _ids(flow, "a") == [] and _ids(flow, "b") == [1, 2, 3, 8]


@pytest.mark.parametrize("format", ["json", pytest.param("avro", marks=pytest.mark.long)])
def test_a_snapshot_sets_a_table_aside_and_finishes_the_others(
    make_flow: MakeFlow, registry: SchemaRegistry, format: str, caplog: pytest.LogCaptureFixture
) -> None:
    flow = _make(make_flow, registry if format == "avro" else None, lanes=2, range_bytes=1 << 16)
    limit_records(flow, "a", 20_000)
    flow.execute(
        f"INSERT INTO a VALUES (100, {BAD[format][1]})",
        "INSERT INTO a SELECT g, '0' FROM generate_series(1000, 3000) g",
        "INSERT INTO b SELECT g, '0' FROM generate_series(1000, 3000) g",
    )
    flow.snapshot()
    assert "has a row that cannot be published" in _held(flow)["a"] and "the row with id = 100" in caplog.text
    assert read_state(flow.pipeline, state_topic(flow)).complete
    assert flow.snapshot().ranges == 0
    flow.transaction("UPDATE a SET v = '1' WHERE id = 1", "UPDATE b SET v = '1' WHERE id = 1")
    flow.stream()
    assert flow.compare("b").equal and list(_held(flow)) == ["a"]
    flow.execute("DELETE FROM a WHERE id IN (100, 1500)")
    _resume(flow)
    flow.stream()
    assert flow.compare("a").equal and flow.compare("b").equal and not _held(flow)


def test_a_live_snapshot_sets_a_table_aside(make_flow: MakeFlow, caplog: pytest.LogCaptureFixture) -> None:
    flow = _make(make_flow)
    flow.execute(f"INSERT INTO a VALUES (100, {BAD['json'][1]})")
    _streamed(flow)
    asked = flow.ask("b", "a")
    flow.execute("UPDATE b SET v = 'behind' WHERE id = 8")
    flow.stream()
    assert flow.reported(asked).state == "failed" and "The job's log names it" in flow.reported(asked).error
    assert "has a row that cannot be published" in _held(flow)["a"] and "the row with id = 100" in caplog.text
    flow.execute("UPDATE a SET v = 'left out' WHERE id = 1", "UPDATE b SET v = 'not' WHERE id = 1")
    flow.stream()
    assert _ids(flow, "a") == [] and flow.compare("b").equal
    limit_records(flow, "a", 100_000)
    _resume(flow)
    flow.stream()
    assert flow.compare("a").equal and not _held(flow)


@pytest.mark.long
def test_a_snapshot_that_is_resumed_leaves_out_what_is_set_aside(
    make_flow: MakeFlow, monkeypatch: pytest.MonkeyPatch
) -> None:
    from airflow_bottledwater.snapshot import driver

    flow = _make(make_flow)
    limit_records(flow, "a", 20_000)
    flow.execute(f"INSERT INTO a VALUES (100, {BAD['json'][1]})")
    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):

        def dies(*_: object) -> None:
            raise KeyboardInterrupt

        patch.setattr(driver._SnapshotDriver, "_check_done", dies)
        flow.snapshot()
    assert list(_held(flow)) == ["a"] and not read_state(flow.pipeline, state_topic(flow)).complete
    before = len(flow.read("a"))
    limit_records(flow, "a", 100_000)
    flow.snapshot()
    flow.stream()
    assert len(flow.read("a")) == before and flow.compare("b").equal and list(_held(flow)) == ["a"]
