"""Tables without a key: nothing tells their rows apart, so that no row may ever be read or sent a second time."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import replace

import pytest
from confluent_kafka import Producer
from confluent_kafka.admin import AdminClient

from airflow_bottledwater.errors import Outage, PreflightError, Refused
from airflow_bottledwater.kafka.topics import Topics
from airflow_bottledwater.metrics.meter import Meter
from airflow_bottledwater.model.job import Owner
from airflow_bottledwater.provision import preflight, redrive
from airflow_bottledwater.provision.drop import drop
from airflow_bottledwater.snapshot import driver, lane
from airflow_bottledwater.snapshot.task import LaneTask
from airflow_bottledwater.state import store
from airflow_bottledwater.state.claim import read_own
from airflow_bottledwater.stream import engine
from airflow_bottledwater.verify import driver as verification
from tests.support.tables import look_often, problems
from tests.support.topics import Flow, MakeFlow, delete_topic, limit_records
from tests.support.waiting import until

_ROWS = 3000


@pytest.fixture
def flow_statements() -> tuple[str, ...]:
    return (
        "CREATE TABLE a (id int, name text)",
        f"INSERT INTO a SELECT i, repeat('x', 100) FROM generate_series(1, {_ROWS}) i",
    )


@pytest.fixture
def flow(make_flow: MakeFlow) -> Flow:
    return make_flow(range_bytes=64 * 1024, lanes=1, allow_unkeyed=True)


def interrupted(flow: Flow, ranges: int, *, of: str = "a") -> None:
    """Read so many ranges of the table, at most all, and lose the job then."""
    ((oid,),) = flow.execute(f"SELECT '{of}'::regclass::oid")

    def run_lanes(tasks: Sequence[LaneTask]) -> list[dict[str, int]]:
        (task,) = tasks
        if ranges:
            lane.run(flow.pipeline, replace(task, chunks=tuple(c for c in task.chunks if c.oid == oid)[:ranges]))
        raise Outage("The job was lost.")

    with pytest.raises(Outage, match="was lost"):
        driver.run(flow.pipeline, run_lanes)


def published(flow: Flow) -> Counter[int]:
    return Counter(message.value["id"] for message in flow.read("a"))


def changed(flow: Flow) -> None:
    """Rows that move into blocks that are read already, and new ones."""
    flow.execute(
        "DELETE FROM a WHERE id <= 500",
        "VACUUM a",
        "UPDATE a SET name = repeat('z', 100) WHERE id BETWEEN 2000 AND 2010",
        "INSERT INTO a SELECT i, repeat('y', 100) FROM generate_series(5001, 6500) i",
    )


def there(flow: Flow) -> Counter[int]:
    return Counter(row[0] for row in flow.execute("SELECT id FROM a"))


def verdict(flow: Flow) -> str:
    """What a verification says of the table."""

    def advance(owner: Owner | None) -> None:
        flow.stream()

    flow.stream()  # a stream that was stopped is not followed by the verification itself
    (verified,) = verification.run(flow.pipeline, verification.in_threads(flow.pipeline), advance=advance).tables
    return verified.verdict


@pytest.mark.long
def test_a_truncate_of_before_its_first_snapshot_has_deleted_nothing(flow: Flow) -> None:
    flow.create()
    flow.snapshot()
    flow.execute("TRUNCATE a", "INSERT INTO a VALUES (1, 'x')")
    assert verdict(flow) == "equal"
    drop(flow.pipeline, when="always")
    topic, admin = flow.topic("a"), AdminClient(flow.pipeline.kafka)
    admin.delete_topics([topic])[topic].result()
    until(lambda: topic not in Topics(flow.pipeline.kafka).describe([topic]), "the topic is gone")
    flow.create()
    flow.snapshot()
    assert verdict(flow) == "equal"
    flow.execute("INSERT INTO a VALUES (2, 'y')", "TRUNCATE a", "INSERT INTO a VALUES (3, 'z')")
    assert verdict(flow) == "equal"


def test_a_snapshot_that_had_published_some_rows_is_not_resumed(flow: Flow) -> None:
    flow.create()
    interrupted(flow, 2)
    changed(flow)
    before = published(flow)
    with pytest.raises(Refused, match=r"public\.a, which has no key.*drop-slot --when always") as refused:
        flow.snapshot()
    assert published(flow) == before and f"topic '{flow.topic('a')}'" in str(refused.value)
    # the advice
    drop(flow.pipeline, when="always")
    flow.change(topic_prefix=f"{flow.pipeline.topic_prefix}_2")
    flow.create()
    flow.snapshot()
    flow.execute("INSERT INTO a VALUES (7000, 'streamed')")
    flow.stream()
    assert published(flow) == there(flow)


def _aborted(flow: Flow) -> None:
    """Leave a record in the topic that was not committed."""
    producer = Producer({**flow.pipeline.kafka, "transactional.id": flow.topic("a")})
    producer.init_transactions(20)
    producer.begin_transaction()
    producer.produce(flow.topic("a"), b"{}")
    producer.flush(60)
    producer.abort_transaction(20)


def test_a_snapshot_that_had_published_nothing_begins_anew(flow: Flow) -> None:
    flow.create()
    interrupted(flow, 0)
    # what the lost job has left in the topic was not committed
    _aborted(flow)
    changed(flow)
    flow.create()
    flow.snapshot()
    flow.stream()
    assert published(flow) == there(flow)


def test_a_snapshot_whose_progress_was_lost_adds_no_row_again(flow: Flow) -> None:
    """By an unclean election, for example: the topic has the rows, and the saved state does not know of them."""
    flow.create()
    interrupted(flow, 1)
    state, producer = store.state_topic_name(flow.cluster.database, flow.pipeline.slot), Producer(flow.pipeline.kafka)
    lost = [key for key in read_own(flow.pipeline, flow.cluster).raw if key.startswith("progress/")]
    for key in lost:
        producer.produce(state, None, key)
    assert lost and producer.flush(60) == 0
    with pytest.raises(
        Refused, match=r"has published rows to topic .* that its saved state does not know.*Drop the slot"
    ):
        flow.snapshot()
    assert len(published(flow)) < len(there(flow))


def test_a_topic_that_has_the_rows_is_not_filled_by_another_snapshot(flow: Flow) -> None:
    flow.create()
    interrupted(flow, 0)
    # what was not committed is no row
    _aborted(flow)
    drop(flow.pipeline, when="always")
    flow.create()
    flow.snapshot()
    flow.stream()
    assert published(flow) == there(flow)
    # what a major upgrade of PostgreSQL needs
    drop(flow.pipeline, when="always")
    with pytest.raises(PreflightError, match=r"has records, and public\.a has no key.*Delete the topic") as refused:
        flow.create()
    assert len(refused.value.problems) == 1
    preflight.run(flow.pipeline.with_(skip_snapshot=True))
    delete_topic(flow, flow.topic("a"))
    flow.create()
    flow.snapshot()
    flow.stream()
    assert published(flow) == there(flow)


def test_rows_that_are_all_dead_letters_are_not_read_twice(make_flow: MakeFlow) -> None:
    flow = make_flow(lanes=1, allow_unkeyed=True, on_error="log", topic_config={"max.message.bytes": "2000"})
    flow.execute("TRUNCATE a", "INSERT INTO a SELECT i, repeat('x', 3000) FROM generate_series(1, 50) i")
    flow.create()
    interrupted(flow, 1)
    flow.snapshot()
    assert len(flow.dead_letters()) == 50
    limit_records(flow, "a", 100_000)
    redrive.redrive(flow.pipeline)
    assert published(flow) == there(flow)


def test_a_table_that_is_done_is_not_read_again_although_it_was_rewritten(flow: Flow) -> None:
    flow.execute("CREATE TABLE b (id int PRIMARY KEY)", "INSERT INTO b VALUES (1)")
    flow.create()
    interrupted(flow, _ROWS)
    flow.execute("VACUUM FULL a", "INSERT INTO a VALUES (7000, 'streamed')")
    flow.snapshot()
    flow.stream()
    assert published(flow) == there(flow)
    assert len(flow.read("b")) == 1


def test_a_partition_that_is_made_when_the_others_are_done_holds_nobody_up(make_flow: MakeFlow) -> None:
    flow = make_flow(tables=("p", "q"), lanes=1, allow_unkeyed=True, partitioned_tables="root")
    flow.execute(
        "CREATE TABLE p (id int, name text) PARTITION BY RANGE (id)",
        "CREATE TABLE p1 PARTITION OF p FOR VALUES FROM (0) TO (100)",
        "INSERT INTO p SELECT i, 'x' FROM generate_series(1, 50) i",
        "CREATE TABLE q (id int PRIMARY KEY)",
    )
    flow.create()
    interrupted(flow, 1, of="p")
    flow.execute(
        "CREATE TABLE p2 PARTITION OF p FOR VALUES FROM (100) TO (200)",
        "INSERT INTO p SELECT i, 'y' FROM generate_series(90, 110) i",
    )
    flow.snapshot()
    flow.stream()
    assert Counter(message.value["id"] for message in flow.read("p")) == Counter([*range(1, 51), *range(90, 111)])


def test_the_stream_spreads_small_transactions_over_the_partitions(make_flow: MakeFlow) -> None:
    flow = make_flow(allow_unkeyed=True, skip_snapshot=True, partitions=3)
    flow.create()
    flow.execute(*(f"INSERT INTO a VALUES ({n}, 'x')" for n in range(60)))
    flow.stream()
    assert min(Counter(message.partition for message in flow.read("a")).values()) > 5


@pytest.mark.long
@pytest.mark.parametrize("streaming", [True, False])
def test_a_table_that_is_given_a_key_goes_on_without_one(
    flow: Flow, streaming: bool, caplog: pytest.LogCaptureFixture
) -> None:
    flow.create()
    flow.snapshot()
    key = ("ALTER TABLE a ADD PRIMARY KEY (id)", "UPDATE a SET name = 'new' WHERE id = 1")
    more = (
        "INSERT INTO a VALUES (7000, 'streamed')",
        "ALTER TABLE a ADD extra int",
        "INSERT INTO a VALUES (7001, 'x', 1)",
    )
    if streaming:
        with flow.streaming() as errors:
            flow.execute(*key, *more)
            until(lambda: published(flow)[7001], "the last row", failed=errors)
    else:
        flow.execute(*key)
        flow.create()
        flow.snapshot()
        flow.execute(*more)
        flow.stream()
    assert published(flow) == there(flow)
    assert {message.key for message in flow.read("a")} == {None}
    assert "public.a has a key now (id). The records of its topic have none, and stay so." in caplog.text
    assert "do what the pipeline's status says of it" in caplog.text

    assert verdict(flow) == "not verified"


def test_a_table_that_got_its_key_behind_its_taking_in_is_told_and_taken_in_anew(
    make_flow: MakeFlow, monkeypatch: pytest.MonkeyPatch
) -> None:
    """pg_restore gives it its key when the rows of all tables are there."""
    look_often(monkeypatch)
    flow = make_flow(tables="*", allow_unkeyed=True)
    flow.execute("CREATE TABLE kept (id int PRIMARY KEY)")
    topic, kafka = flow.topic("b"), Topics(flow.pipeline.kafka)
    flow.create()
    flow.snapshot()
    with flow.streaming() as errors:
        flow.execute("CREATE TABLE b AS SELECT g AS id FROM generate_series(1, 9) g")
        until(lambda: topic in kafka.names() and len(flow.read("b")) == 9, "it is taken in", failed=errors)
        flow.execute("ALTER TABLE b ADD PRIMARY KEY (id)", "DELETE FROM b WHERE id = 1", "INSERT INTO b VALUES (10)")
        until(lambda: "public.b" in problems(flow), "it is told", failed=errors)
    problem = problems(flow)["public.b"]
    assert "has one now (id)" in problem.reason and "its updates and deletes are not sent" in problem.reason
    # the advice
    flow.change(tables=("*", "!public.b"))
    flow.execute(problem.remedy.partition("run: ")[2].partition(" and start")[0])
    flow.stream()
    delete_topic(flow, topic)
    flow.change(tables="*")
    with flow.streaming() as errors:
        until(lambda: flow.compare("b").equal, "it has all rows by their keys", failed=errors)
        flow.execute("UPDATE b SET id = 20 WHERE id = 2", "DELETE FROM b WHERE id = 3")
        until(lambda: flow.compare("b").equal, "updates and deletes are sent", failed=errors)
        until(lambda: "public.b" not in problems(flow), "nothing is wrong any more", failed=errors)
    assert not errors


def test_a_table_that_is_given_a_key_before_its_snapshot_goes_on_without_one(flow: Flow) -> None:
    flow.create()
    interrupted(flow, 0)
    flow.execute("ALTER TABLE a ADD PRIMARY KEY (id)", "INSERT INTO a VALUES (7000, 'x')")
    flow.snapshot()
    flow.execute("INSERT INTO a VALUES (7001, 'y')")
    flow.stream()
    assert published(flow) == there(flow)
    assert {message.key for message in flow.read("a")} == {None}


def test_a_table_that_gets_the_full_old_row_later_sends_updates_as_preflight_says(
    flow: Flow, monkeypatch: pytest.MonkeyPatch
) -> None:
    meter = Meter()
    monkeypatch.setattr(engine, "Meter", lambda: meter)
    flow.create()
    flow.snapshot()

    def said() -> list[str]:
        return [each for each in preflight.run(flow.pipeline).warnings if "public.a" in each]

    assert said() == []
    flow.execute("ALTER TABLE a REPLICA IDENTITY FULL")
    (warning,) = said()
    assert "does not send update of public.a" in warning
    flow.execute(warning.partition("As the owner of both, run: ")[2])
    assert said() == []
    flow.execute("UPDATE a SET name = 'new' WHERE id = 1", "DELETE FROM a WHERE id = 2")
    flow.stream()
    assert [message.value for message in flow.read("a") if message.op == "u"] == [{"id": 1, "name": "new"}]
    assert meter.rows() == {"public.a": 1}, "what is not published does not count"
