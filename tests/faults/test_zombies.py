"""Jobs that were taken for dead and wake up: nothing of theirs becomes visible, and they end and say who took over."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest

from airflow_bottledwater.backoff import Backoff
from airflow_bottledwater.errors import StaleBatch, TakenOver
from airflow_bottledwater.publish.batch import Batch
from airflow_bottledwater.snapshot import driver, lane
from airflow_bottledwater.snapshot.task import LaneTask
from airflow_bottledwater.stream.publisher import StreamPublisher
from airflow_bottledwater.stream.source import ChangeSource
from airflow_bottledwater.stream.start import begin
from tests.support.faults import Job, Jobs, ProxiedBroker
from tests.support.forms import Draw
from tests.support.live_reader import LiveReader
from tests.support.topics import Flow, MakeFlow, read
from tests.support.waiting import until
from tests.support.writers import PREPARING, SHORT, Habit, Writers, audit, make_tables, state_topic

TABLES = ("a", "b")
ROWS = 5000
HABITS = (Habit(open_for=(0.0, 0.1)), SHORT, PREPARING)


def _in_full(*points: str) -> list[Any]:
    """Points that are stopped at in the full run only."""
    return [pytest.param(point, marks=pytest.mark.long) for point in points]


def _writers(flow: Flow, seed: int) -> Writers:
    return Writers(flow.dsn, TABLES, seed, ROWS, HABITS, (0.01, 0.1), messages=True)


def _ready(flow: Flow, draw: Draw, seed: int) -> Flow:
    make_tables(flow, TABLES, ROWS)
    draw(flow, seed, TABLES)
    flow.create()
    return flow


def _end_walsender(flow: Flow) -> None:
    """What wal_sender_timeout does to a client that is silent for long."""
    flow.execute(
        "SELECT pg_terminate_backend(active_pid) FROM pg_replication_slots"
        " WHERE active AND database = current_database()"
    )


def _ended_as_a_zombie(job: Job) -> None:
    assert job.wait() == 1, job.output
    assert job.outcome.startswith("TakenOver: The slot was taken over by "), job.output
    assert "epoch" in job.outcome


def _epochs(flow: Flow) -> list[int]:
    """Whose progress became visible, in order."""
    return [m.value["epoch"] for m in read(flow.kafka, state_topic(flow)) if m.value and "epoch" in m.value]


def _nobody_came_back(flow: Flow) -> None:
    epochs = _epochs(flow)
    assert epochs == sorted(epochs)


@pytest.mark.some(1)
@pytest.mark.parametrize(
    "point", [*_in_full("received", "mid-batch", "before-position"), "before-commit", "before-acknowledge", "in-claim"]
)
def test_a_stream_that_was_replaced_wakes_and_ends(
    make_flow: MakeFlow, jobs: Jobs, draw: Draw, seed: int, point: str
) -> None:
    flow = _ready(make_flow(tables=TABLES), draw, seed)
    flow.snapshot()
    with _writers(flow, seed):
        zombie = jobs.start(flow, "stream", point=point, nth=1 if point == "in-claim" else 3, act="stop")
        zombie.stopped_at_its_point()
        _end_walsender(flow)
        flow.stream()
        successor = jobs.start(flow, "stream")
        zombie.resume()
        _ended_as_a_zombie(zombie)
        with LiveReader(flow, TABLES) as reader:
            reader.goes_on()
            assert successor.running, successor.output
        successor.stop()
    flow.stream()
    _nobody_came_back(flow)
    audit(flow, TABLES).check()


@pytest.mark.long
@pytest.mark.parametrize(
    "point",
    ["in-range", *_in_full("before-progress", "before-commit", "between-ranges", "before-init"), "before-complete"],
)
def test_a_snapshot_that_was_replaced_wakes_and_ends(
    make_flow: MakeFlow, jobs: Jobs, draw: Draw, seed: int, point: str
) -> None:
    flow = _ready(make_flow(tables=TABLES), draw, seed)
    with _writers(flow, seed):
        zombie = jobs.start(flow, "snapshot", point=point, act="stop")
        zombie.stopped_at_its_point()
        flow.snapshot()
        flow.stream()
        zombie.resume()
        _ended_as_a_zombie(zombie)
        flow.stream()
    flow.stream()
    _nobody_came_back(flow)
    audit(flow, TABLES, resumed=True).check()


@pytest.mark.long
def test_a_zombie_that_fences_the_rightful_owner_ends_and_the_owner_goes_on(
    make_flow: MakeFlow, jobs: Jobs, draw: Draw, seed: int
) -> None:
    flow = _ready(make_flow(tables=TABLES), draw, seed)
    flow.snapshot()
    with _writers(flow, seed):
        zombie = jobs.start(flow, "stream", point="before-init", act="stop")
        zombie.stopped_at_its_point()
        owner = jobs.start(flow, "stream")
        with LiveReader(flow, TABLES) as reader:
            reader.goes_on()
            zombie.resume()
            _ended_as_a_zombie(zombie)
            reader.goes_on()
        assert owner.running, owner.output
        # it was fenced, looked, and found its claim standing
        assert "a new producer reads the state" in owner.output
        owner.stop()
    flow.stream()
    _nobody_came_back(flow)
    audit(flow, TABLES).check()


@pytest.mark.long
def test_a_stream_that_was_cut_off_from_kafka_and_replaced_ends(
    make_flow: MakeFlow, jobs: Jobs, proxied: ProxiedBroker, draw: Draw, seed: int
) -> None:
    flow = _ready(make_flow(broker=proxied, tables=TABLES, transaction_timeout=60.0), draw, seed)
    flow.snapshot()
    direct = flow.pipeline.kafka
    with _writers(flow, seed):
        flow.change(kafka=proxied.proxied)
        zombie = jobs.start(flow, "stream", point="mid-batch", nth=4, act="stop")
        flow.change(kafka=direct)
        zombie.stopped_at_its_point()
        proxied.proxy.mode = "hang"
        zombie.resume()
        _end_walsender(flow)
        flow.stream()
        proxied.proxy.mode = "pass"
        _ended_as_a_zombie(zombie)
    flow.stream()
    _nobody_came_back(flow)
    audit(flow, TABLES).check()


def test_a_new_producer_of_a_replaced_job_is_told_before_its_first_record(
    make_flow: MakeFlow, draw: Draw, seed: int
) -> None:
    flow = _ready(make_flow(tables=TABLES), draw, seed)
    flow.snapshot()
    old = begin(flow.pipeline)
    newer = begin(flow.pipeline)
    publisher = StreamPublisher(flow.pipeline, old, old.state, Backoff(30))
    try:
        with pytest.raises(TakenOver, match=f"epoch {newer.job.epoch}"):
            publisher.reached()
    finally:
        publisher.close()


def test_a_batch_whose_first_attempt_was_committed_is_not_published_again(
    make_flow: MakeFlow, draw: Draw, seed: int
) -> None:
    flow = _ready(make_flow(tables=TABLES), draw, seed)
    flow.snapshot()
    start = begin(flow.pipeline)

    def publisher() -> StreamPublisher:
        return StreamPublisher(flow.pipeline, start, start.state, Backoff(20.0))

    source = ChangeSource(flow.pipeline, start.state, start.position, Backoff(20.0))
    first, second = publisher(), publisher()
    try:
        with _writers(flow, seed):
            batches = [until(lambda: _with_changes(source, first), "a batch") for _ in range(2)]
            ends = [first.publish(batch) for batch in batches]
        # the same again, by the same and by another attempt: found to be done
        assert [first.publish(batches[1]), second.publish(batches[1])] == [ends[1], ends[1]]
        assert second.publish(batches[0]) == ends[1]
        # a batch that P has not come to, and one that starts before P and ends behind it, are nobody's
        beyond = batches[1].end._replace(lsn=batches[1].end.lsn + 1)
        torn = Batch(batches[0].start, beyond, batches[1].data, batches[1].changes, batches[1].versions)
        with pytest.raises(StaleBatch):
            second.publish(torn)
    finally:
        for each in (first, second):
            each.close()
        source.close()
    flow.stream()
    audit(flow, TABLES).check()


def _with_changes(source: ChangeSource, publisher: StreamPublisher) -> Batch | None:
    batch = source.next(0.2)
    if batch is not None and not len(batch):
        publisher.publish(batch)
        return None
    return batch


@pytest.mark.long
def test_a_lane_whose_first_attempt_was_committed_publishes_nothing_again(
    make_flow: MakeFlow, draw: Draw, seed: int
) -> None:
    flow = _ready(make_flow(tables=TABLES, lanes=2), draw, seed)

    def twice(tasks: Sequence[LaneTask]) -> list[dict[str, int]]:
        first = [lane.run(flow.pipeline, task) for task in tasks]
        again = [lane.run(flow.pipeline, task) for task in tasks]
        assert sum(t["rows"] for t in first) > 1000
        assert [t["rows"] for t in again] == [0] * len(tasks)
        return first

    with _writers(flow, seed):
        driver.run(flow.pipeline, twice)
    flow.stream()
    report = audit(flow, TABLES).check()
    assert report.ahead == []
