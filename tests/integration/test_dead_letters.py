"""Dead letters are heard of: counted by table and writer, open until they are re-driven or dismissed, and kept until
then."""

from __future__ import annotations

import pytest
from confluent_kafka.admin import (
    AdminClient,
    AlterConfigOpType,
    ConfigEntry,
    ConfigResource,
    NewPartitions,
    ResourceType,
)

from airflow_bottledwater.errors import PreflightError
from airflow_bottledwater.jobs import status
from airflow_bottledwater.jobs.status import PipelineReport
from airflow_bottledwater.provision import redrive
from airflow_bottledwater.provision.consequences import of_action, of_drop
from airflow_bottledwater.provision.drop import drop
from airflow_bottledwater.state import letters
from airflow_bottledwater.triggers.dead_letters import LettersWatch
from tests.support.topics import Flow, MakeFlow, create_topic, limit_records


@pytest.fixture
def flow_statements() -> tuple[str, ...]:
    return (
        "CREATE TABLE a (id int PRIMARY KEY, t text, n numeric(10, 2))",
        "CREATE TABLE b (id uuid PRIMARY KEY, n numeric(10, 2), at timestamp, t text)",
    )


def _open(report: PipelineReport) -> tuple[dict[str, dict[str, int]], int, int]:
    return report.open_letters, report.counters["open_dead_letters"], report.counters["dead_letters"]


def test_letters_of_snapshot_stream_and_live_are_open_until_they_are_settled(make_flow: MakeFlow) -> None:
    flow = make_flow(on_error="log", topic_config={"max.message.bytes": "20000"}, lanes=2, snapshot_headers=True)
    flow.execute(
        "INSERT INTO a VALUES (1, 'x', 1), (2, repeat('x', 30000), 2), (-3, repeat('x', 30000), 3)",
        "INSERT INTO b VALUES ('b0eebc99-9c0b-4ef8-bb6d-6bb9bd380a11', 'NaN', '2026-01-02 03:04:05', repeat('x', "
        "30000))",
    )
    flow.create()
    taken = flow.snapshot()
    assert (taken.rows, taken.dead_letters, taken.open_dead_letters) == (1, 3, 3)
    report = status.report(flow.pipeline)
    assert _open(report) == ({"public.a": {"snapshot": 2}, "public.b": {"snapshot": 1}}, 3, 3)
    assert report.job is not None and [each.kind for each in report.job.problems] == [letters.KIND] * 2

    flow.execute("UPDATE a SET t = repeat('y', 30000) WHERE id = 1")
    asked = flow.ask("a")
    counters = flow.stream()
    assert flow.reported(asked).dead_letters == 3
    of_a = {"snapshot": 2, "stream": 1, "live": 3}
    report = status.report(flow.pipeline)
    assert _open(report) == ({"public.a": of_a, "public.b": {"snapshot": 1}}, 7, 7)
    assert (counters["dead_letters"], counters["open_dead_letters"]) == (7, 7)
    assert report.job is not None and report.job.open_dead_letters == 7

    # people read numbers
    found = {letter.value["relation"]: letter.value for letter in flow.dead_letters()[:3]}
    assert found["public.b"]["key"] == {"id": "b0eebc99-9c0b-4ef8-bb6d-6bb9bd380a11"}
    assert found["public.b"]["columns"]["at"] == "2026-01-02 03:04:05" and found["public.b"]["columns"]["n"] == "NaN"
    assert {letter.value["key"]["id"] for letter in flow.dead_letters() if letter.value["topic"].endswith(".a")} == {
        "1",
        "2",
        "-3",
    }

    limit_records(flow, "a", 100_000)
    done = redrive.redrive(flow.pipeline)
    assert done.published + done.overtaken == 6 and done.failed == 1
    assert _open(status.report(flow.pipeline)) == ({"public.b": {"snapshot": 1}}, 1, 7)
    # whoever watches the pipeline does not wait for its next job
    assert flow.job is not None and flow.job.ended and flow.job.open_dead_letters == 1
    assert [each.subject for each in flow.job.problems if each.kind == letters.KIND] == ["public.b"]
    assert flow.compare("a").differences == []
    assert {each.pos for each in flow.read("a") if each.snapshot} == {""}, "rows of the live snapshot have no position"
    # what a sensor waits for
    watch = LettersWatch(flow.pipeline, max_open=0, tables=[])
    assert watch.fetch() is None
    assert LettersWatch(flow.pipeline, max_open=0, tables=["a"]).fetch() == {"status": "ok", "open": 0}
    assert LettersWatch(flow.pipeline, max_open=1, tables=["b"]).fetch() == {"status": "ok", "open": 1}

    assert redrive.dismiss(flow.pipeline, ["a"]) == redrive.RedriveResult()
    assert redrive.dismiss(flow.pipeline, ["b*"]) == redrive.RedriveResult(dismissed=1)
    assert watch.fetch() == {"status": "ok", "open": 0}, "it reads on"
    assert _open(status.report(flow.pipeline)) == ({}, 0, 7)
    assert flow.job.open_dead_letters == 0 and not flow.job.problems
    flow.stream()
    report = status.report(flow.pipeline)
    assert report.job is not None and report.job.problems == [] and report.job.open_dead_letters == 0


@pytest.mark.long
def test_a_letter_does_not_overwrite_what_a_live_snapshot_has_published_since(make_flow: MakeFlow) -> None:
    flow = _with_a_letter(make_flow)
    flow.execute("UPDATE c SET words = 'new'")
    flow.stream()
    limit_records(flow, "c", 100_000)
    flow.ask("c")
    flow.stream()
    assert redrive.redrive(flow.pipeline) == redrive.RedriveResult(overtaken=2)
    assert flow.read("c")[-1].value["words"] == "'new'" and flow.compare("c").equal


@pytest.mark.long
def test_a_letter_does_not_overwrite_what_a_new_snapshot_has_published_since(make_flow: MakeFlow) -> None:
    flow = _with_a_letter(make_flow)
    limit_records(flow, "c", 100_000)
    assert "All 1 open dead letters are given up" in of_action(flow.pipeline, "dismiss", [], sweep=False)
    # the new snapshot makes up for it
    assert "dead letter" not in of_drop(flow.pipeline, "always")
    assert "1 dead letter is open, and stays so" in of_drop(flow.pipeline.with_(skip_snapshot=True), "always")
    drop(flow.pipeline, when="always")
    flow.execute("UPDATE c SET words = 'new'")
    flow.create()
    flow.snapshot()
    assert _open(status.report(flow.pipeline))[:2] == ({}, 0)
    assert redrive.redrive(flow.pipeline) == redrive.RedriveResult(overtaken=1)
    assert _open(status.report(flow.pipeline))[:2] == ({}, 0)
    assert flow.read("c")[-1].value["words"] == "'new'" and flow.compare("c").equal


@pytest.mark.some(1)
@pytest.mark.parametrize(
    ("shared", "result"),
    [(False, redrive.RedriveResult(overtaken=1)), (True, redrive.RedriveResult(failed=1))],
    ids=["swept", "shared"],
)
def test_a_letter_of_before_the_slot_is_dropped_only_if_its_topic_was_swept(
    make_flow: MakeFlow, shared: bool, result: redrive.RedriveResult
) -> None:
    flow = make_flow(on_error="log", topic_config={"max.message.bytes": "20000"}, tables="a")
    flow.execute("INSERT INTO a VALUES (1, 'x', 1)")
    flow.create()
    flow.snapshot()
    flow.execute("UPDATE a SET id = 2, t = repeat('y', 30000)")
    assert flow.stream()["dead_letters"] == 1
    limit_records(flow, "a", 100_000)
    drop(flow.pipeline, when="always")
    flow.change(share_topics=shared)
    flow.create()
    flow.snapshot()
    # in a topic that others write to, the letter alone says that the former key was deleted
    assert redrive.redrive(flow.pipeline) == result
    assert flow.compare("a").equal == (not shared)


def test_a_letter_whose_row_is_as_it_was_is_published_with_what_the_server_makes_of_it(make_flow: MakeFlow) -> None:
    flow = _with_a_letter(make_flow)
    limit_records(flow, "c", 100_000)
    assert redrive.redrive(flow.pipeline) == redrive.RedriveResult(published=1)
    assert flow.read("c")[-1].value["words"] == "'old'" and flow.compare("c").equal


@pytest.mark.long
def test_a_letter_deletes_the_key_of_before_also_when_its_row_was_rewritten_since(make_flow: MakeFlow) -> None:
    flow = make_flow(on_error="log", topic_config={"max.message.bytes": "20000"}, tables="a")
    flow.execute("INSERT INTO a VALUES (1, 'x', 1.5)")
    flow.create()
    flow.snapshot()
    flow.execute("UPDATE a SET id = 2, t = repeat('y', 30000)", "ALTER TABLE a ALTER n TYPE numeric(12, 4)")
    flow.stream()
    limit_records(flow, "a", 100_000)
    assert redrive.redrive(flow.pipeline) == redrive.RedriveResult(failed=1)
    # the row is read again, and the letter alone says that its former key was deleted
    flow.ask("a")
    flow.stream()
    assert not flow.compare("a").equal
    assert redrive.redrive(flow.pipeline) == redrive.RedriveResult(published=1)
    assert flow.read("a")[-1].key == {"id": 1} and flow.compare("a").equal


def _with_a_letter(make_flow: MakeFlow) -> Flow:
    """A pipeline whose snapshot has a row that is too large, with values that the server makes texts of."""
    flow = make_flow(on_error="log", topic_config={"max.message.bytes": "20000"}, tables="c")
    flow.execute(
        "CREATE TABLE c (id macaddr PRIMARY KEY, t text, words tsvector, place point, bits bit varying[], no tsvector)",
        "INSERT INTO c VALUES ('08:00:2b:01:02:03', repeat('x', 30000), 'old', '(1.5, 2)', ARRAY[B'10', NULL])",
    )
    flow.create()
    assert flow.snapshot().dead_letters == 1
    return flow


def test_letters_that_went_with_their_topic_are_no_longer_open(make_flow: MakeFlow) -> None:
    flow = make_flow(on_error="log", skip_snapshot=True, topic_config={"max.message.bytes": "20000"})
    flow.create()
    flow.execute("INSERT INTO a VALUES (1, repeat('x', 30000), 1)")
    flow.stream()
    topic = f"{flow.pipeline.topic_prefix}._bottledwater_dead_letters"
    admin = AdminClient(flow.pipeline.kafka)
    admin.delete_topics([topic])[topic].result()
    create_topic(flow.pipeline.kafka, topic, partitions=1, replication=1, config={"cleanup.policy": "compact"})
    assert redrive.redrive(flow.pipeline) == redrive.RedriveResult()
    assert _open(status.report(flow.pipeline)) == ({}, 0, 1)


def test_service_topics_may_have_more_partitions_than_the_pipeline_makes(make_flow: MakeFlow) -> None:
    flow = make_flow(on_error="log", skip_snapshot=True, topic_config={"max.message.bytes": "20000"}, tables="a")
    letters_topic, events = (
        f"{flow.pipeline.topic_prefix}._bottledwater_{name}" for name in ("dead_letters", "events")
    )
    config = {"cleanup.policy": "compact"}
    create_topic(flow.pipeline.kafka, letters_topic, partitions=3, replication=1, config=config)
    flow.create()
    admin = AdminClient(flow.pipeline.kafka)
    admin.create_partitions([NewPartitions(events, 2)])[events].result()
    flow.execute("INSERT INTO a VALUES (1, repeat('x', 30000), 1)")
    flow.stream()
    limit_records(flow, "a", 100_000)
    assert redrive.redrive(flow.pipeline) == redrive.RedriveResult(published=1)


def test_their_topic_keeps_them_whatever_the_retention(make_flow: MakeFlow) -> None:
    flow = make_flow(on_error="log", unkeyed_retention_ms=1000)
    flow.create()
    topic = f"{flow.pipeline.topic_prefix}._bottledwater_dead_letters"
    resource = ConfigResource(ResourceType.TOPIC, topic)
    admin = AdminClient(flow.pipeline.kafka)
    (found,) = admin.describe_configs([resource]).values()
    assert found.result()["cleanup.policy"].value == "compact"
    # as somebody else may have made it
    entry = ConfigEntry("cleanup.policy", "delete", incremental_operation=AlterConfigOpType.SET)
    changed = ConfigResource(ResourceType.TOPIC, topic, incremental_configs=[entry])
    admin.incremental_alter_configs([changed])[changed].result()
    with pytest.raises(PreflightError, match="dead letters would expire"):
        flow.create()
    flow.change(on_error="exit")
    flow.create()
